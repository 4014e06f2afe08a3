"""NodeClaims, Events, Leases, VolumeAttachments and discovery, as a real API server answered."""

import pytest

from tests.integration.kubernetes.conformance import Server, Steps, judge, run_topic
from tests.integration.kubernetes.known_differences import KNOWN_DIFFERENCES
from tests.integration.kubernetes.replay import Exchange, load
from tests.integration.kubernetes.stage import NODE, Stage

TOPICS = ("crd", "events", "misc")
RECORDED = {topic: {item.name: item for item in load(topic)} for topic in TOPICS}


def install(stage: Stage) -> None:
    stage.controls.install("nodeclaims")


def other_claims(stage: Stage) -> None:
    for item in RECORDED["crd"]["nodeclaim-list"].body["items"]:
        name = item["metadata"]["name"]
        if name != "gpu-abc12":
            kept = ("name", "labels", "annotations", "finalizers")
            body = {
                "apiVersion": item["apiVersion"],
                "kind": item["kind"],
                "metadata": {k: v for k, v in item["metadata"].items() if k in kept},
                "spec": item["spec"],
            }
            path = "/apis/karpenter.sh/v1/nodeclaims"
            stage.create(path, body)
            if "status" in item:
                stage.patch(f"{path}/{name}/status", {"status": item["status"]})


def begin_events(stage: Stage) -> None:
    node = stage.call("GET", f"/api/v1/nodes/{NODE}")
    stage.replay.translation.learn("54c674f3-f54e-4145-a2de-6a17f4cdb41b", node["metadata"]["uid"])


def forget_generated(stage: Stage) -> None:
    """Where a generated name stands in the list is luck; in the recording it stood last."""
    recorded = RECORDED["events"]["event-create-generate-name"].body["metadata"]["name"]
    name = stage.replay.translation.to_actual(recorded)
    stage.call("DELETE", f"/api/v1/namespaces/default/events/{name}")


def attachments(stage: Stage) -> None:
    path = "/apis/storage.k8s.io/v1/volumeattachments"
    for item in RECORDED["misc"]["volumeattachment-list"].body["items"]:
        kept = ("name", "annotations", "finalizers")
        body = {
            "metadata": {k: v for k, v in item["metadata"].items() if k in kept},
            "spec": item["spec"],
        }
        stage.create(path, body, agent="csi-attacher/1")
        stage.patch(
            f"{path}/{item['metadata']['name']}/status",
            {"status": item["status"]},
            agent="csi-attacher/1",
        )


def daemon(stage: Stage) -> None:
    stage.node()
    stage.workload(
        "daemonsets",
        "gpu-monitoring",
        "dcgm-exporter",
        {},
        container="exporter",
        image="registry.example.com/dcgm-exporter:4",
        tolerations=[{"operator": "Exists"}],
    )
    [pod] = stage.run_pods("gpu-monitoring", "dcgm-exporter")
    stage.replay.translation.learn("dcgm-exporter-72xqh", pod["metadata"]["name"])


def lease(stage: Stage) -> None:
    recorded = RECORDED["misc"]["lease-get"].body
    stage.create(
        "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases",
        {"metadata": {"name": recorded["metadata"]["name"]}, "spec": recorded["spec"]},
    )


STEPS: dict[str, Steps] = {
    "crd": {"discovery-group-version": install, "nodeclaim-list": other_claims},
    "events": {
        "event-create": begin_events,
        "event-list-by-involved-object": forget_generated,
    },
    "misc": {
        "volumeattachment-list": attachments,
        "daemonset-get": daemon,
        "lease-get": lease,
    },
}


@pytest.fixture(scope="module")
def results(server: Server) -> dict[str, dict[str, list[str]]]:
    return {topic: run_topic(topic, STEPS[topic], server) for topic in ("crd", "misc", "events")}


@pytest.mark.parametrize(
    "exchange",
    [exchange for topic in TOPICS for exchange in RECORDED[topic].values()],
    ids=lambda exchange: f"{exchange.topic}-{exchange.name}",
)
def test_the_answer_is_the_recorded_one(
    exchange: Exchange, results: dict[str, dict[str, list[str]]]
) -> None:
    judge(exchange, results[exchange.topic][exchange.name], KNOWN_DIFFERENCES[exchange.topic])
