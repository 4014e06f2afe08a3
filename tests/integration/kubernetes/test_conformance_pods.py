"""Listing, reading and deleting pods of every kind, as a real API server answered it."""

import pytest

from tests.integration.kubernetes.conformance import Server, Steps, judge, run_topic
from tests.integration.kubernetes.known_differences import KNOWN_DIFFERENCES
from tests.integration.kubernetes.replay import Exchange, load
from tests.integration.kubernetes.stage import KUBELET, NODE, SUCCEEDED, Stage

EXCHANGES = load("pods")
RECORDED = {exchange.name: exchange for exchange in EXCHANGES}
NODES = {exchange.name: exchange for exchange in load("nodes")}
OTHER_NODE = "ip-10-0-1-6.ec2.internal"
MIRROR = RECORDED["pod-get-mirror-pod"].body


def begin(stage: Stage) -> None:
    node = stage.node()
    stage.replay.translation.learn(
        MIRROR["metadata"]["ownerReferences"][0]["uid"], node["metadata"]["uid"]
    )
    # Daemons and replicas below find one node only: the other one is tainted.
    [other] = [
        item
        for item in NODES["node-list-limit-exact"].body["items"]
        if item["metadata"]["name"] == OTHER_NODE
    ]
    stage.node(other)
    for name in ("gpu-monitoring", "ml"):
        stage.namespace(name)
    stage.workload(
        "daemonsets",
        "gpu-monitoring",
        "dcgm-exporter",
        {},
        container="exporter",
        image="registry.example.com/dcgm-exporter:4",
        nodeSelector={"kubernetes.io/hostname": NODE},
        tolerations=[{"operator": "Exists"}],
    )
    stage.run_pods("gpu-monitoring", "dcgm-exporter")
    stage.pod_like(MIRROR, agent=KUBELET)
    stage.workload("jobs", "ml", "eval", {}, restartPolicy="Never")
    learn_name(stage, "eval", "eval-scrzs")
    stage.run_pods("ml", "eval")
    stage.deployment("ml", "serve", 1)
    [replica_set] = stage.items("/apis/apps/v1/namespaces/ml/replicasets")
    stage.replay.translation.learn(
        "675f6b74f6", replica_set["metadata"]["name"].removeprefix("serve-")
    )
    learn_name(stage, "serve", "serve-675f6b74f6-gtpj7")
    # Its template names the node: no scheduler, and no condition PodScheduled.
    stage.workload(
        "statefulsets", "ml", "web", {"replicas": 1, "serviceName": "web"}, nodeName=NODE
    )
    stage.run_pods("ml", "web")
    stage.pod_like(RECORDED["pod-get"].body)
    stage.pod("ml", "unscheduled", labels={"app": "train"}, node=None, gpus=16, status=None)
    [elsewhere] = [
        item
        for item in RECORDED["pod-list-field-selector-node-name-not-empty"].body["items"]
        if item["metadata"]["name"] == "elsewhere"
    ]
    stage.pod_like(elsewhere)


def learn_name(stage: Stage, app: str, recorded: str) -> None:
    stage.controls.settle()
    pods = stage.items("/api/v1/namespaces/ml/pods", labelSelector=f"app={app}")
    stage.replay.translation.learn(recorded, pods[-1]["metadata"]["name"])


def eval_succeeds(stage: Stage) -> None:
    name = stage.replay.translation.to_actual("eval-scrzs")
    stage.post_status(
        "ml",
        name,
        SUCCEEDED
        | {
            "containerStatuses": RECORDED["pod-get-job-pod-succeeded"].body["status"][
                "containerStatuses"
            ]
        },
    )
    stage.controls.settle()


def web_replaced(stage: Stage) -> None:
    stage.confirm_deletion("ml", "web-0")


def held(stage: Stage) -> None:
    stage.pod_like(RECORDED["pod-get-held-by-finalizer"].body)


def silent(stage: Stage) -> None:
    for path in (
        "/apis/apps/v1/namespaces/gpu-monitoring/daemonsets/dcgm-exporter",
        "/apis/apps/v1/namespaces/ml/deployments/serve",
        "/apis/apps/v1/namespaces/ml/statefulsets/web",
        "/apis/batch/v1/namespaces/ml/jobs/eval",
    ):
        stage.call("DELETE", path)
    stage.controls.settle()
    for namespace in ("ml", "gpu-monitoring", "kube-system"):
        stage.clear(namespace)
    stage.deployment("ml", "serve", 1)
    learn_name(stage, "serve", "serve-675f6b74f6-v4r6p")
    stage.budget("ml", "serve", minAvailable=1, match="serve")
    stage.pod_like(RECORDED["pod-get-on-silent-node-deleted-by-taint-manager"].body)
    stage.controls.silence(NODE)
    stage.controls.advance(60)


def node_deleted(stage: Stage) -> None:
    stage.call("DELETE", f"/api/v1/nodes/{NODE}")
    stage.controls.settle()
    stage.controls.advance(60)


STEPS: Steps = {
    "pod-get": begin,
    "pod-get-job-pod-succeeded": eval_succeeds,
    "pod-get-terminating-overdue": lambda stage: stage.controls.advance(10),
    "pod-get-statefulset-pod-replaced": web_replaced,
    "pod-delete-with-finalizer-grace-0": held,
    "pod-get-on-silent-node": silent,
    "pod-get-on-silent-node-deleted-by-taint-manager": lambda stage: stage.controls.advance(3),
    "evict-on-silent-node": lambda stage: stage.delete_budget("ml", "serve"),
    "pod-get-after-silent-node-deleted": node_deleted,
}


@pytest.fixture(scope="module")
def results(server: Server) -> dict[str, list[str]]:
    return run_topic("pods", STEPS, server)


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda exchange: exchange.name)
def test_the_answer_is_the_recorded_one(exchange: Exchange, results: dict[str, list[str]]) -> None:
    judge(exchange, results[exchange.name], KNOWN_DIFFERENCES["pods"])
