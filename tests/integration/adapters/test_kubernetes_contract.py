"""One suite for the real adapter before the emulated API server, and for the fake."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

import pytest

from local.kubernetes import ADMIN_GROUP, KubernetesEmulator, StaticTokens, Timings, User, resources
from nodemend.adapters.kubernetes_cluster import KubernetesClusters
from nodemend.application.ports import Cluster, ClusterEndpoint, Clusters
from nodemend.domain.errors import InvalidInputError
from nodemend.domain.nodes import Node, NodeRef, Readiness, Taint
from nodemend.domain.pods import (
    UNSCHEDULABLE_TAINT_KEY,
    DisruptionBudget,
    EvictionAnswer,
    EvictionVerdict,
    Owner,
    Pod,
)
from nodemend.domain.policy import ClusterPolicy
from tests.fakes.cluster import FakeCluster, FakeClusters
from tests.fakes.system import ManualClock

POLICY = ClusterPolicy("gpu-prod", "ws-1", "us-east-1")
NODE = "ip-10-0-1-5.ec2.internal"
INSTANCE = "i-0aaaaaaaaaaaaaaa1"
OWN_TAINT = {"key": "nodemend/remediation", "effect": "NoSchedule"}
BLOCKED = "The disruption budget web needs 2 healthy pods and has 2 currently"


class Stage(Protocol):
    """What a test puts into the cluster, the same for both."""

    @property
    def cluster(self) -> Cluster: ...

    def add_node(
        self,
        name: str,
        instance_id: str,
        *,
        gpus: int = 8,
        instance_type: str = "p5.48xlarge",
        labels: Mapping[str, str] = {},
        taints: Sequence[Mapping[str, str]] = (),
    ) -> None: ...

    def add_pods(self, namespace: str, name: str, count: int, node: str) -> list[str]:
        """Add ready pods of a StatefulSet that take 30 s to end; return their names."""
        ...

    def add_budget(self, namespace: str, name: str, app: str, min_available: int) -> None:
        """Protect the pods of an app, so that none may go."""
        ...

    def pass_time(self, seconds: float = 0) -> None:
        """Let time pass, and the controllers catch up."""
        ...

    def events(self) -> list[Mapping[str, Any]]: ...


@dataclass
class FakeStage:
    clock: ManualClock
    cluster: FakeCluster

    def add_node(
        self,
        name: str,
        instance_id: str,
        *,
        gpus: int = 8,
        instance_type: str = "p5.48xlarge",
        labels: Mapping[str, str] = {},
        taints: Sequence[Mapping[str, str]] = (),
    ) -> None:
        uid = f"uid-of-{name}-{len(self.cluster.calls)}"
        self.cluster.add_node(
            Node(
                NodeRef(POLICY.name, name, uid, instance_id, "boot-1"),
                labels={"node.kubernetes.io/instance-type": instance_type, **labels},
                taints=tuple(
                    Taint(each["key"], each["effect"], each.get("value")) for each in taints
                ),
                heartbeat_at=self.clock.now(),
                created_at=self.clock.now(),
                gpu_capacity=gpus,
                gpu_allocatable=gpus,
            )
        )

    def add_pods(self, namespace: str, name: str, count: int, node: str) -> list[str]:
        names = [f"{name}-{index}" for index in range(count)]
        owner = Owner("StatefulSet", name, "apps/v1", "uid-of-owner")
        for each in names:
            pod = Pod(namespace, each, f"uid-of-{each}", node, labels={"app": name}, gpus=1)
            self.cluster.add_pod(replace(pod, owner=owner))
        return names

    def add_budget(self, namespace: str, name: str, app: str, min_available: int) -> None:
        self.cluster.add_budget(
            DisruptionBudget(
                namespace,
                name,
                match_labels={"app": app},
                expected_pods=min_available,
                current_healthy=min_available,
                desired_healthy=min_available,
            )
        )
        for index in range(min_available):
            self.cluster.answer_evictions(
                namespace,
                f"{app}-{index}",
                EvictionAnswer(
                    429,
                    "Cannot evict pod as it would violate the pod's disruption budget.",
                    causes=(("DisruptionBudget", BLOCKED),),
                ),
            )

    def pass_time(self, seconds: float = 0) -> None:
        self.clock.advance(seconds)

    def events(self) -> list[Mapping[str, Any]]:
        return list(self.cluster.events)


@dataclass
class EmulatorStage:
    clock: ManualClock
    emulator: KubernetesEmulator
    cluster: Cluster

    def add_node(
        self,
        name: str,
        instance_id: str,
        *,
        gpus: int = 8,
        instance_type: str = "p5.48xlarge",
        labels: Mapping[str, str] = {},
        taints: Sequence[Mapping[str, str]] = (),
    ) -> None:
        self.emulator.add_node(
            name,
            instance_id=instance_id,
            gpus=gpus,
            instance_type=instance_type,
            labels=labels,
            taints=taints,
            boot_id="boot-1",
        )

    def add_pods(self, namespace: str, name: str, count: int, node: str) -> list[str]:
        return self.emulator.add_workload(
            "StatefulSet", namespace, name, count, gpus_per_pod=1, nodes=[node] * count
        )

    def add_budget(self, namespace: str, name: str, app: str, min_available: int) -> None:
        self.emulator.add_pdb(
            namespace, name, match_labels={"app": app}, min_available=min_available
        )
        self.emulator.tick()

    def pass_time(self, seconds: float = 0) -> None:
        self.clock.advance(seconds)
        self.emulator.tick()

    def events(self) -> list[Mapping[str, Any]]:
        return list(self.emulator.objects(resources.EVENTS))


@dataclass(frozen=True)
class FixedAccess:
    url: str
    ca_pem: str

    def endpoint(self, cluster: ClusterPolicy, *, is_fresh: bool = False) -> ClusterEndpoint:
        return ClusterEndpoint(self.url, self.ca_pem)

    def token(self, cluster: ClusterPolicy, *, is_fresh: bool = False) -> str:
        return "token"


@pytest.fixture(params=["fake", "emulator"])
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    clock = ManualClock()
    types = frozenset({"p5.48xlarge"})
    if request.param == "fake":
        fake = FakeCluster(
            POLICY.name, clock=clock, grace=timedelta(seconds=30), gpu_instance_types=types
        )
        fakes: Clusters = FakeClusters(fake)
        assert fakes.open(POLICY) is fake
        yield FakeStage(clock, fake)
        return
    emulator = KubernetesEmulator(
        POLICY.name,
        StaticTokens({"token": User("nodemend", (ADMIN_GROUP,))}),
        clock=lambda: clock.now().timestamp(),
        timings=Timings(conflict_retry_s=0.1),
        background=False,
    )
    with emulator:
        clusters: Clusters = KubernetesClusters(
            access=FixedAccess(emulator.url, emulator.ca_pem),
            clock=clock,
            gpu_instance_types=types,
            page_size=2,
        )
        yield EmulatorStage(clock, emulator, clusters.open(POLICY))


def node_of(stage: Stage, name: str = NODE) -> Node:
    node = stage.cluster.get_node(name)
    assert node is not None
    return node


def pod_of(stage: Stage, namespace: str, name: str) -> Pod:
    pod = stage.cluster.get_pod(namespace, name)
    assert pod is not None
    return pod


def cordon(node: Node) -> list[dict[str, Any]]:
    """The shape of the use case's patch: test what was read, then change it."""
    taints = [taint.as_json() for taint in node.taints]
    return [
        {"op": "test", "path": "/metadata/uid", "value": node.ref.uid},
        {"op": "test", "path": "/spec/taints", "value": taints or None},
        {"op": "add", "path": "/spec/taints", "value": [*taints, OWN_TAINT]},
        {"op": "add", "path": "/spec/unschedulable", "value": True},
        {"op": "add", "path": "/metadata/annotations/nodemend~1incident", "value": "inc-1"},
    ]


# --- nodes ----------------------------------------------------------------------------------------


def test_node_is_known_by_its_exact_name_only(stage):
    stage.add_node(NODE, INSTANCE)
    assert stage.cluster.get_node("ip-10-0-1-5") is None
    assert stage.cluster.get_node("") is None
    assert stage.cluster.get_node("..") is None
    node = node_of(stage)
    assert (node.ref.cluster, node.ref.name) == (POLICY.name, NODE)
    assert (node.ref.instance_id, node.ref.boot_id) == (INSTANCE, "boot-1")
    assert node.ref.uid
    assert node.readiness is Readiness.READY
    assert (node.gpu_capacity, node.gpu_allocatable) == (8, 8)
    assert node.heartbeat_at == node.created_at == stage.clock.now().replace(microsecond=0)


def test_gpu_nodes_are_listed_with_those_whose_device_plugin_is_down(stage):
    stage.add_node("c-gpus", "i-0aaaaaaaaaaaaaaa3")
    stage.add_node("a-no-plugin", "i-0aaaaaaaaaaaaaaa1", gpus=0)
    stage.add_node("b-cpu", "i-0aaaaaaaaaaaaaaa2", gpus=0, instance_type="m5.2xlarge")
    stage.add_node(
        "d-labelled",
        "i-0aaaaaaaaaaaaaaa4",
        gpus=0,
        instance_type="g9.new",
        labels={"nvidia.com/gpu.present": "true"},
    )
    found = stage.cluster.list_gpu_nodes()
    assert [node.ref.name for node in found] == ["a-no-plugin", "c-gpus", "d-labelled"]


def test_cordon_patch_applies_to_what_was_read(stage):
    stage.add_node(NODE, INSTANCE, taints=[{"key": "team", "value": "ml", "effect": "NoSchedule"}])
    assert stage.cluster.patch_node(NODE, cordon(node_of(stage))) is True
    stage.pass_time(1)
    node = node_of(stage)
    assert node.is_unschedulable
    assert node.owner == "inc-1"
    keys = [taint.key for taint in node.taints]
    assert keys[:2] == ["team", "nodemend/remediation"]
    # Added by the node lifecycle controller, with a time that a later patch must test as it is.
    assert keys[2:] == [UNSCHEDULABLE_TAINT_KEY]
    assert node.taints[2].time_added is not None


def test_cordon_patch_of_a_node_without_taints_applies(stage):
    stage.add_node(NODE, INSTANCE)
    assert stage.cluster.patch_node(NODE, cordon(node_of(stage))) is True
    stage.pass_time(1)
    assert node_of(stage).is_unschedulable


def test_patch_of_what_has_changed_since_is_false_and_changes_nothing(stage):
    stage.add_node(NODE, INSTANCE)
    before = node_of(stage)
    assert stage.cluster.patch_node(NODE, cordon(before)) is True
    stage.pass_time(1)
    after = node_of(stage)
    assert stage.cluster.patch_node(NODE, cordon(before)) is False
    stage.pass_time(1)
    assert node_of(stage) == after


def test_release_restores_what_was_there_before(stage):
    stage.add_node(NODE, INSTANCE, taints=[{"key": "team", "effect": "NoExecute"}])
    before = node_of(stage)
    stage.cluster.patch_node(NODE, cordon(before))
    stage.pass_time(1)
    now = node_of(stage)
    kept = [taint.as_json() for taint in now.taints if taint.key != OWN_TAINT["key"]]
    release = [
        {"op": "test", "path": "/metadata/annotations/nodemend~1incident", "value": "inc-1"},
        {
            "op": "test",
            "path": "/spec/taints",
            "value": [taint.as_json() for taint in now.taints],
        },
        {"op": "replace", "path": "/spec/taints", "value": kept},
        {"op": "remove", "path": "/spec/unschedulable"},
        {"op": "remove", "path": "/metadata/annotations/nodemend~1incident"},
    ]
    assert stage.cluster.patch_node(NODE, release) is True
    stage.pass_time(1)
    after = node_of(stage)
    assert (after.taints, after.is_unschedulable, after.owner) == (before.taints, False, None)
    assert stage.cluster.patch_node(NODE, release) is False


def test_removal_of_what_is_not_there_is_a_conflict(stage):
    stage.add_node(NODE, INSTANCE)
    patch = [{"op": "remove", "path": "/spec/unschedulable"}]
    assert stage.cluster.patch_node(NODE, patch) is False


def test_patch_that_makes_no_valid_node_is_an_input_error(stage):
    stage.add_node(NODE, INSTANCE)
    patch = [{"op": "add", "path": "/spec/taints", "value": [OWN_TAINT, OWN_TAINT]}]
    with pytest.raises(InvalidInputError, match="taint"):
        stage.cluster.patch_node(NODE, patch)
    assert node_of(stage).taints == ()


def test_patch_that_changes_nothing_keeps_the_resource_version(stage):
    stage.add_node(NODE, INSTANCE)
    before = node_of(stage)
    patch = [{"op": "test", "path": "/metadata/uid", "value": before.ref.uid}]
    assert stage.cluster.patch_node(NODE, patch) is True
    assert node_of(stage).resource_version == before.resource_version


def test_patch_of_a_missing_node_is_false(stage):
    assert stage.cluster.patch_node(NODE, []) is False


# --- pods -----------------------------------------------------------------------------------------


def test_pods_of_one_node_are_listed_from_all_namespaces(stage):
    stage.add_node(NODE, INSTANCE)
    stage.add_node("other", "i-0bbbbbbbbbbbbbbb1")
    stage.add_pods("ml", "train", 3, NODE)
    stage.add_pods("web", "front", 1, NODE)
    stage.add_pods("web", "far", 1, "other")
    pods = stage.cluster.list_pods(NODE)
    assert [pod.id for pod in pods] == ["ml/train-0", "ml/train-1", "ml/train-2", "web/front-0"]
    pod = pods[0]
    assert pod.owner is not None
    assert (pod.owner.kind, pod.owner.api_version) == ("StatefulSet", "apps/v1")
    assert (pod.node_name, pod.gpus, pod.is_ready, pod.phase) == (NODE, 1, True, "Running")
    assert pod.labels["app"] == "train"
    assert stage.cluster.get_pod("ml", "train-0") == pod
    assert stage.cluster.get_pod("ml", "none") is None
    assert stage.cluster.get_pod("none", "train-0") is None


@pytest.mark.case("R14")
def test_evicted_pod_stays_until_the_end_of_its_grace(stage):
    stage.add_node(NODE, INSTANCE)
    stage.add_pods("ml", "train", 1, NODE)
    pod = pod_of(stage, "ml", "train-0")
    answer = stage.cluster.evict(pod)
    assert (answer.status, answer.verdict) == (201, EvictionVerdict.ACCEPTED)
    terminating = pod_of(stage, "ml", "train-0")
    assert terminating.uid == pod.uid
    assert terminating.deletion_at is not None
    left = terminating.deletion_at - stage.clock.now()
    assert timedelta(seconds=29) < left <= timedelta(seconds=31)
    stage.pass_time(15)
    assert stage.cluster.evict(pod).verdict is EvictionVerdict.ACCEPTED
    assert pod_of(stage, "ml", "train-0").deletion_at is not None
    stage.pass_time(16)
    left_over = stage.cluster.get_pod("ml", "train-0")
    assert left_over is None or left_over.uid != pod.uid  # a StatefulSet makes it anew


@pytest.mark.case("R2")
def test_protected_pod_is_blocked_by_its_budget(stage):
    stage.add_node(NODE, INSTANCE)
    stage.add_pods("ml", "web", 2, NODE)
    stage.add_budget("ml", "web", "web", 2)
    answer = stage.cluster.evict(pod_of(stage, "ml", "web-0"))
    assert (answer.status, answer.verdict) == (429, EvictionVerdict.BLOCKED_BY_PDB)
    assert answer.cause_text == BLOCKED
    assert pod_of(stage, "ml", "web-0").deletion_at is None
    (budget,) = stage.cluster.list_disruption_budgets("ml")
    assert (budget.name, budget.disruptions_allowed) == ("web", 0)
    assert (budget.expected_pods, budget.current_healthy, budget.desired_healthy) == (2, 2, 2)
    assert budget.selects(pod_of(stage, "ml", "web-0"))
    assert budget.can_never_allow
    assert stage.cluster.list_disruption_budgets("none") == ()


def test_pod_of_the_same_name_with_another_uid_is_left_alone(stage):
    stage.add_node(NODE, INSTANCE)
    stage.add_pods("ml", "train", 1, NODE)
    stale = replace(pod_of(stage, "ml", "train-0"), uid="00000000-0000-4000-8000-000000000000")
    answer = stage.cluster.evict(stale)
    assert (answer.status, answer.verdict) == (409, EvictionVerdict.GONE)
    assert answer.details_kind == "Pod"
    assert pod_of(stage, "ml", "train-0").deletion_at is None


def test_eviction_of_a_missing_pod_answers_404(stage):
    stage.add_node(NODE, INSTANCE)
    stage.add_pods("ml", "train", 1, NODE)
    gone = replace(pod_of(stage, "ml", "train-0"), name="train-9")
    answer = stage.cluster.evict(gone)
    assert (answer.status, answer.details_kind) == (404, "pods")
    assert answer.verdict is EvictionVerdict.GONE


# --- events ---------------------------------------------------------------------------------------


@pytest.mark.case("R69")
def test_event_is_written_once_with_the_nodes_real_uid(stage):
    stage.add_node(NODE, INSTANCE)
    ref = node_of(stage).ref
    for _ in range(2):
        stage.cluster.record_event(ref, "NodeCordoned", "by inc-1", is_warning=True)
        stage.pass_time(5)
    stage.cluster.record_event(ref, "NodeReleased", "by inc-1", is_warning=False)
    stage.cluster.record_event(replace(ref, uid=""), "NodeReleased", "x", is_warning=False)
    events = sorted(stage.events(), key=lambda event: str(event["reason"]))
    assert [event["reason"] for event in events] == ["NodeCordoned", "NodeReleased"]
    event = events[0]
    assert event["metadata"]["namespace"] == "default"
    assert event["involvedObject"]["uid"] == ref.uid
    assert (event["type"], event["message"]) == ("Warning", "by inc-1")
