"""What the emulated controllers and kubelets do, with a clock set by hand."""

import json

import pytest

from local.kubernetes import KubernetesEmulator, StaticTokens, Timings
from local.kubernetes.objects import JsonObject
from local.kubernetes.resources import NODE_CLAIMS, PDBS, VOLUME_ATTACHMENTS

A = "ip-10-0-1-5.ec2.internal"
B = "ip-10-0-1-6.ec2.internal"


class Clock:
    def __init__(self) -> None:
        self.now = 1_796_000_000.0

    def __call__(self) -> float:
        return self.now


class Hand:
    """An emulator with its clock, and short ways to look at it."""

    def __init__(self, **options: object) -> None:
        self.clock = Clock()
        timings = Timings(start_s=5, orphan_s=48, monitor_grace_s=50, **options)  # type: ignore[arg-type]
        self.cluster = KubernetesEmulator(
            "c",
            StaticTokens({}),
            clock=self.clock,
            timings=timings,
            background=False,
            custom_resources=[NODE_CLAIMS],
        )
        self.cluster.add_node(A, instance_id="i-0aaaaaaaaaaaaaaa1")
        self.cluster.add_node(B, instance_id="i-0aaaaaaaaaaaaaaa2")
        self.cluster.tick()

    def advance(self, seconds: float) -> None:
        self.clock.now += seconds
        self.cluster.tick()

    def cordon(self, node: str, value: bool = True) -> None:
        body = json.dumps({"spec": {"unschedulable": value}}).encode()
        answer = self.cluster.act_as(
            "person",
            "PATCH",
            f"/api/v1/nodes/{node}",
            body=body,
            content_type="application/strategic-merge-patch+json",
        )
        assert answer.status == 200
        self.cluster.tick()

    def evict(self, pod: JsonObject) -> int:
        meta = pod["metadata"]
        body = {
            "metadata": {"name": meta["name"]},
            "deleteOptions": {"preconditions": {"uid": meta["uid"]}},
        }
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/eviction"
        return self.cluster.act_as("drain", "POST", path, body=json.dumps(body).encode()).status

    def where(self, namespace: str = "ml") -> list[tuple[str, str, bool]]:
        """Return node, phase and readiness of each pod."""
        return [
            (
                pod["spec"].get("nodeName", ""),
                pod["status"]["phase"],
                any(
                    c["type"] == "Ready" and c["status"] == "True"
                    for c in pod["status"].get("conditions", [])
                ),
            )
            for pod in self.cluster.pods(namespace=namespace)
        ]

    def taints(self, node: str) -> list[tuple[str, str]]:
        return [(t["key"], t["effect"]) for t in self.cluster.node(node)["spec"].get("taints", [])]


@pytest.fixture
def hand() -> Hand:
    return Hand()


def test_a_node_joins_ready_without_taints_and_looks_like_one_of_eks(hand: Hand) -> None:
    node = hand.cluster.node(A)
    assert node["spec"] == {"providerID": "aws:///us-east-1a/i-0aaaaaaaaaaaaaaa1"}
    assert node["metadata"]["labels"]["eks.amazonaws.com/nodegroup"] == "gpu-p5"
    assert node["status"]["allocatable"]["nvidia.com/gpu"] == "8"
    assert node["status"]["addresses"][0] == {"type": "InternalIP", "address": "10.0.1.5"}
    assert node["status"]["nodeInfo"]["bootID"]


def test_a_cordon_brings_the_unschedulable_taint_and_an_uncordon_takes_it(hand: Hand) -> None:
    hand.cordon(A)
    assert hand.taints(A) == [("node.kubernetes.io/unschedulable", "NoSchedule")]
    hand.cordon(A, value=False)
    assert hand.taints(A) == []
    assert [(c.verb, c.target, c.caller) for c in hand.cluster.calls.mutations()] == [
        ("patch", f"nodes/{A}", "person")
    ] * 2


@pytest.mark.parametrize("kind", ["Deployment", "ReplicaSet", "StatefulSet", "Job"])
def test_an_evicted_pod_is_made_again_on_a_node_with_room(hand: Hand, kind: str) -> None:
    hand.cluster.add_workload(kind, "ml", "train", 1, nodes=[A], grace_s=30)
    hand.cluster.tick()
    assert hand.where() == [(A, "Running", True)]
    hand.cordon(A)
    assert hand.evict(hand.cluster.pods()[0]) == 201
    hand.advance(29)
    assert (A, "Running", True) in hand.where()
    hand.advance(1)
    hand.advance(5)
    assert hand.where() == [(B, "Running", True)]


def test_a_pod_waits_for_room_and_for_an_uncordon(hand: Hand) -> None:
    hand.cluster.add_workload("ReplicaSet", "ml", "other", 1, nodes=[B])
    [name] = hand.cluster.add_workload("ReplicaSet", "ml", "train", 1, nodes=[A])
    hand.cordon(A)
    hand.cluster.remove_pod("ml", name)
    hand.advance(60)
    assert sorted(hand.where()) == [("", "Pending", False), (B, "Running", True)]
    hand.cordon(A, value=False)
    hand.advance(5)
    assert sorted(hand.where()) == [(A, "Running", True), (B, "Running", True)]


def test_termination_can_be_faster_than_the_grace_period_but_never_slower() -> None:
    hand = Hand(termination_s=2)
    for name, grace_s in (("slow", 600), ("quick", 1)):
        hand.cluster.add_bare_pod("ml", name, node=A, grace_s=grace_s)
    for pod in hand.cluster.pods(namespace="ml"):
        assert hand.evict(pod) == 201
    hand.advance(1)
    assert [pod["metadata"]["name"] for pod in hand.cluster.pods(namespace="ml")] == ["slow"]
    hand.advance(1)
    assert hand.cluster.pods(namespace="ml") == []


def test_a_pod_with_a_finalizer_stays_until_it_is_taken_away(hand: Hand) -> None:
    hand.cluster.add_bare_pod("ml", "held", node=A, grace_s=5, finalizers=("example.com/hold",))
    assert hand.evict(hand.cluster.pods()[0]) == 201
    hand.advance(300)
    [pod] = hand.cluster.pods()
    assert pod["metadata"]["deletionGracePeriodSeconds"] == 0
    hand.cluster.act_as(
        "person",
        "PATCH",
        "/api/v1/namespaces/ml/pods/held",
        body=b'{"metadata":{"finalizers":null}}',
        content_type="application/merge-patch+json",
    )
    assert hand.cluster.pods() == []


def test_a_daemon_comes_back_on_its_cordoned_node_and_leaves_with_it(hand: Hand) -> None:
    hand.cluster.add_daemonset("gpu", "exporter")
    before = {pod["spec"]["nodeName"]: pod for pod in hand.cluster.pods(namespace="gpu")}
    assert set(before) == {A, B}
    hand.cordon(A)
    assert hand.evict(before[A]) == 201
    hand.advance(30)
    hand.advance(5)
    after = {pod["spec"]["nodeName"]: pod for pod in hand.cluster.pods(namespace="gpu")}
    assert after[A]["metadata"]["uid"] != before[A]["metadata"]["uid"]
    assert after[A]["status"]["phase"] == "Running"
    hand.cluster.remove_node(A)
    hand.advance(48)
    hand.advance(30)
    assert [node for node, _, _ in hand.where("gpu")] == [B]


def test_a_mirror_pod_comes_back(hand: Hand) -> None:
    name = hand.cluster.add_mirror_pod(A)
    [before] = hand.cluster.pods(namespace="kube-system")
    assert hand.evict(before) == 201
    hand.advance(30)
    [after] = hand.cluster.pods(namespace="kube-system")
    assert after["metadata"]["name"] == name == f"node-agent-{A}"
    assert after["metadata"]["uid"] != before["metadata"]["uid"]
    assert after["metadata"]["ownerReferences"][0]["kind"] == "Node"


def test_a_silent_node_becomes_unknown_and_its_pods_unready_but_nothing_ends(hand: Hand) -> None:
    hand.cluster.add_workload("StatefulSet", "ml", "web", 1, nodes=[A])
    hand.cluster.add_pdb("ml", "web", min_available=1, match_labels={"app": "web"})
    hand.cluster.set_node_silent(A)
    hand.advance(49)
    assert hand.taints(A) == []
    hand.advance(1)
    assert hand.taints(A) == [
        ("node.kubernetes.io/unreachable", "NoSchedule"),
        ("node.kubernetes.io/unreachable", "NoExecute"),
    ]
    assert hand.where() == [(A, "Running", False)]
    # The budget blocks an eviction by hand, but not the taint manager five minutes later.
    assert hand.evict(hand.cluster.pods()[0]) == 429
    hand.advance(299)
    assert "deletionTimestamp" not in hand.cluster.pods()[0]["metadata"]
    hand.advance(1)
    assert "deletionTimestamp" in hand.cluster.pods()[0]["metadata"]
    hand.advance(3600)
    assert hand.where() == [(A, "Running", False)]
    hand.cluster.remove_node(A)
    hand.advance(48)
    hand.advance(5)
    assert hand.where() == [(B, "Running", True)]


def test_a_rebooted_node_is_heard_again_with_another_boot_id(hand: Hand) -> None:
    hand.cluster.add_workload("StatefulSet", "ml", "web", 1, nodes=[A])
    before = hand.cluster.node(A)["status"]
    hand.cluster.set_node_silent(A)
    hand.advance(60)
    new_id = hand.cluster.set_boot_id(A)
    hand.cluster.tick()
    after = hand.cluster.node(A)["status"]
    assert after["nodeInfo"]["bootID"] == new_id != before["nodeInfo"]["bootID"]
    heartbeats = [
        next(c for c in status["conditions"] if c["type"] == "Ready")["lastHeartbeatTime"]
        for status in (before, after)
    ]
    assert heartbeats[1] > heartbeats[0]
    assert hand.taints(A) == []
    assert hand.where() == [(A, "Running", True)]


def test_the_device_plugin_can_lose_a_gpu(hand: Hand) -> None:
    hand.cluster.set_allocatable(A, 7)
    status = hand.cluster.node(A)["status"]
    assert status["allocatable"]["nvidia.com/gpu"] == "7"
    assert status["capacity"]["nvidia.com/gpu"] == "8"


def test_conditions_of_a_monitoring_agent_can_be_set(hand: Hand) -> None:
    hand.cluster.set_node_condition(
        A, "AcceleratedHardwareReady", "False", reason="NvidiaXID79Error", message="fell off"
    )
    conditions = hand.cluster.node(A)["status"]["conditions"]
    assert conditions[-1]["type"] == "AcceleratedHardwareReady"
    assert conditions[-1]["reason"] == "NvidiaXID79Error"
    assert hand.taints(A) == []


def test_a_heartbeat_follows_the_clock(hand: Hand) -> None:
    before = hand.cluster.node(A)["status"]["conditions"][3]["lastHeartbeatTime"]
    hand.advance(299)
    assert hand.cluster.node(A)["status"]["conditions"][3]["lastHeartbeatTime"] == before
    hand.advance(1)
    assert hand.cluster.node(A)["status"]["conditions"][3]["lastHeartbeatTime"] > before


def test_a_finished_pod_is_not_made_again_by_its_job(hand: Hand) -> None:
    [name] = hand.cluster.add_workload("Job", "ml", "tune", 1, nodes=[A])
    hand.cluster.finish_pod("ml", name)
    hand.advance(60)
    [pod] = hand.cluster.pods()
    assert pod["status"]["phase"] == "Succeeded"
    assert "finalizers" not in pod["metadata"]


def test_a_budget_over_a_job_never_gets_an_observed_generation(hand: Hand) -> None:
    hand.cluster.add_workload("Job", "ml", "tune", 1, nodes=[A])
    hand.cluster.add_pdb("ml", "tune", max_unavailable=1, match_labels={"app": "tune"})
    hand.cluster.tick()
    [budget] = hand.cluster.objects(PDBS)
    assert "observedGeneration" not in budget["status"]
    assert budget["status"]["conditions"][0]["reason"] == "SyncFailed"
    assert hand.evict(hand.cluster.pods()[0]) == 429
    hand.cluster.delete_pdb("ml", "tune")
    assert hand.evict(hand.cluster.pods()[0]) == 201


def test_custom_resources_are_kept_by_their_finalizers(hand: Hand) -> None:
    claim = {
        "metadata": {"name": "gpu-abc12", "finalizers": ["karpenter.sh/termination"]},
        "spec": {"nodeClassRef": {"name": "gpu"}},
    }
    hand.cluster.create(NODE_CLAIMS, claim)
    hand.cluster.set_status(NODE_CLAIMS, "", "gpu-abc12", nodeName=A)
    hand.cluster.delete(NODE_CLAIMS, "", "gpu-abc12")
    [found] = hand.cluster.objects(NODE_CLAIMS)
    assert found["status"] == {"nodeName": A}
    assert "deletionTimestamp" in found["metadata"]


def test_two_runs_with_the_same_seed_make_the_same_names() -> None:
    def run() -> list[tuple[str, str]]:
        hand = Hand()
        hand.cluster.add_workload("Deployment", "ml", "train", 2)
        hand.cluster.add_daemonset("gpu", "exporter")
        for pod in hand.cluster.pods(namespace="ml"):
            hand.evict(pod)
        hand.advance(60)
        return [(p["metadata"]["name"], p["metadata"]["uid"]) for p in hand.cluster.pods()]

    assert run() == run()


def test_a_paused_controller_lags_behind_and_catches_up(hand: Hand) -> None:
    hand.cluster.pause("node-lifecycle")
    hand.cordon(A)
    assert hand.taints(A) == []
    hand.cluster.resume("node-lifecycle")
    hand.cluster.tick()
    assert hand.taints(A) == [("node.kubernetes.io/unschedulable", "NoSchedule")]


def test_an_unknown_controller_cannot_be_paused(hand: Hand) -> None:
    with pytest.raises(ValueError, match="node-lifecycle"):
        hand.cluster.pause("nodes")


def test_snapshots_are_copies(hand: Hand) -> None:
    hand.cluster.nodes()[0]["spec"]["unschedulable"] = True
    assert "unschedulable" not in hand.cluster.node(A)["spec"]


def test_the_taint_manager_leaves_pods_that_are_terminating_already_alone(hand: Hand) -> None:
    hand.cluster.add_bare_pod("ml", "train-0", node=A)
    hand.cluster.set_node_silent(A)
    assert hand.evict(hand.cluster.pods()[0]) == 201
    hand.advance(60)
    hand.advance(301)
    [pod] = hand.cluster.pods()
    assert pod["status"]["conditions"][-1]["reason"] == "EvictionByEvictionAPI"


def test_a_deleted_owner_takes_its_pods_along_or_leaves_them_as_orphans(hand: Hand) -> None:
    for name in ("kept", "ended"):
        hand.cluster.add_workload("ReplicaSet", "ml", name, 1, nodes=[A])
    path = "/apis/apps/v1/namespaces/ml/replicasets"
    hand.cluster.act_as("p", "DELETE", f"{path}/kept", query={"propagationPolicy": "Orphan"})
    hand.cluster.act_as("p", "DELETE", f"{path}/ended", query={"propagationPolicy": "Foreground"})
    hand.cluster.tick()
    assert hand.cluster.act_as("p", "GET", f"{path}/kept").status == 404
    # In the foreground the owner waits for its pods.
    assert hand.cluster.act_as("p", "GET", f"{path}/ended").status == 200
    hand.advance(30)
    assert hand.cluster.act_as("p", "GET", f"{path}/ended").status == 404
    [pod] = hand.cluster.pods(namespace="ml")
    assert pod["metadata"]["labels"] == {
        "app": "kept",
        "topology.kubernetes.io/region": "us-east-1",
        "topology.kubernetes.io/zone": "us-east-1a",
    }
    assert "ownerReferences" not in pod["metadata"]


def test_a_volume_attachment_names_its_node_and_waits_for_the_attacher(hand: Hand) -> None:
    hand.cluster.add_volume_attachment("csi-1", A, "pvc-1")
    hand.cluster.set_status(VOLUME_ATTACHMENTS, "", "csi-1", attached=True)
    hand.cluster.delete(VOLUME_ATTACHMENTS, "", "csi-1")
    [attachment] = hand.cluster.objects(VOLUME_ATTACHMENTS)
    assert attachment["spec"]["nodeName"] == A
    assert attachment["status"] == {"attached": True}
    assert "deletionTimestamp" in attachment["metadata"]
