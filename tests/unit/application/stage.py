"""A stage for the use cases: one cluster, its group, its metrics, and every port as a fake.

Each call of a port passes a `Tap`, so that a test can let the process die after any of them and
run the step once more, as Lambda and Step Functions do.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, partial
from typing import Any

from nodemend.application.close_incident import ClosePorts
from nodemend.application.closing import ClosingPorts
from nodemend.application.dispatch_incidents import DispatchPorts, dispatch_incidents
from nodemend.application.open_incident import OpenIncidentPorts
from nodemend.application.ports import QueryResult
from nodemend.application.receive_alert import ReceiveAlertPorts
from nodemend.application.scan_gpu_health import ScanPorts
from nodemend.application.start_repair import RepairPorts
from nodemend.application.steps import StepPorts
from nodemend.application.verify_fault import VerifyPorts
from nodemend.application.watching import WatchPorts
from nodemend.catalogue import load_catalogue
from nodemend.contracts.dispatch import DispatchHint, DispatchIncidentsRequest
from nodemend.domain.capacity import IN_SERVICE, AutoScalingGroup
from nodemend.domain.cordon import cordon_patch, plan_ownership
from nodemend.domain.faults import FaultClass, FaultKind, Mode, Rung, Verdict
from nodemend.domain.findings import Evidence, Finding, Sample
from nodemend.domain.incidents import (
    Incident,
    IncidentState,
    Origin,
    Outcome,
    RepairRecord,
    TimelineEntry,
)
from nodemend.domain.nodes import INSTANCE_TYPE_LABEL, Node, NodeRef
from nodemend.domain.pods import DisruptionBudget, EvictionAnswer, Owner, Pod
from nodemend.domain.policy import ClusterPolicy, Limits, MaxUnavailable, Policy
from nodemend.domain.reasons import Reason
from nodemend.domain.rules import Catalogue
from tests.fakes.capacity import FakeCapacity
from tests.fakes.cluster import FakeCluster, FakeClusters
from tests.fakes.control import MemoryExecutions, MemoryPolicies
from tests.fakes.instances import FakeInstances
from tests.fakes.messages import (
    MemoryDeadLetters,
    MemoryDispatchQueue,
    MemoryEventBus,
    MemoryTelemetry,
)
from tests.fakes.metrics import FakeMetrics
from tests.fakes.stores import (
    MemoryGuards,
    MemoryHistory,
    MemoryIncidents,
    MemoryOutbox,
    MemoryScanMemory,
)
from tests.fakes.system import START, FixedInvocation, ManualClock, SequentialIds

CLUSTER = "gpu-prod"
GROUP = "gpu-a"
INSTANCE_TYPE = "p5.48xlarge"
CLUSTER_POLICY = ClusterPolicy(CLUSTER, "ws-1", "eu-central-1")
PODS = "ml"
CARRIES_CORDON = frozenset({IncidentState.REPAIRING, IncidentState.CHECKING})
"""States that begin with our cordon on a node that is still there."""


class CrashError(BaseException):
    """The process is gone: nothing in the product may catch this."""

    lambda_error = "Runtime.ExitError"
    """What Step Functions hears of it from Lambda."""


class HangError(CrashError):
    """The invocation hung until Lambda ended it."""

    lambda_error = "Sandbox.Timedout"


class Crasher:
    """Counts the calls of all ports and ends the process after one of them."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.after: int | None = None
        self.has_crashed = False

    def call(self, name: str, act: "partial[Any]") -> Any:
        """Make a call of a port."""
        result = act()
        self.count(name)
        return result

    def count(self, name: str) -> None:
        """Note a call that has had its effect; crash if it is the chosen one."""
        self.calls.append(name)
        if self.after is not None and len(self.calls) == self.after:
            self.has_crashed = True
            raise CrashError(name)

    def arm(self, after: int | None) -> None:
        """Crash after that many calls from here on; None: never."""
        self.calls, self.after = [], after


class Tap:
    """Stands before a port and counts its calls."""

    def __init__(self, target: Any, crasher: Crasher, name: str) -> None:
        self._target = target
        self._crasher = crasher
        self._name = name

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._target, name)
        if not callable(member):
            return member

        def call(*args: Any, **kwargs: Any) -> Any:
            act = partial(member, *args, **kwargs)
            result = self._crasher.call(f"{self._name}.{name}", act)
            if isinstance(result, FakeCluster):
                return Tap(result, self._crasher, "cluster")
            return result

        return call


class StageCluster(FakeCluster):
    """The fake cluster, with pods whose end no kubelet ever confirms."""

    def __init__(self, **options: Any) -> None:
        super().__init__(CLUSTER, **options)
        self.stuck: set[str] = set()
        """`namespace/name` of pods that stay listed past their grace."""

    def _reap(self) -> None:
        held = {key: pod for key, pod in self._pods.items() if pod.id in self.stuck}
        super()._reap()
        self._pods |= held


@cache
def catalogue() -> Catalogue:
    """The product's own catalogue, read once."""
    return load_catalogue()


def node_name(number: int) -> str:
    """Name of a node of the stage."""
    return f"ip-10-0-1-{number}.eu-central-1.compute.internal"


def instance_id(number: int) -> str:
    """Instance of a node of the stage."""
    return f"i-{number:017x}"


def gpu_node(number: int, **changes: Any) -> Node:
    """A healthy node with eight GPUs, old enough to be a candidate."""
    values: dict[str, Any] = {
        "ref": NodeRef(
            CLUSTER, node_name(number), f"uid-{number}", instance_id(number), f"boot-{number}"
        ),
        "labels": {INSTANCE_TYPE_LABEL: INSTANCE_TYPE, "pool": "h100"},
        "created_at": START - timedelta(days=3),
        "heartbeat_at": START,
        "gpu_capacity": 8,
        "gpu_allocatable": 8,
    }
    return Node(**(values | changes))


def pod(name: str, number: int = 1, **changes: Any) -> Pod:
    """A running training pod on a node of the stage."""
    values: dict[str, Any] = {
        "namespace": PODS,
        "name": name,
        "uid": f"pod-{name}",
        "node_name": node_name(number),
        "owner": Owner("Job", "train", "batch/v1", "job-1"),
        "labels": {"app": name},
        "gpus": 1,
    }
    return Pod(**(values | changes))


PDB_429 = EvictionAnswer(
    429,
    "Cannot evict pod as it would violate the pod's disruption budget.",
    (("DisruptionBudget", "The disruption budget pdb-a needs 1 healthy pods and has 1 currently"),),
)
TWO_PDBS_500 = EvictionAnswer(
    500,
    "This pod has more than one PodDisruptionBudget, which the eviction subresource does not "
    "support.",
)
FORBIDDEN_403 = EvictionAnswer(
    403, 'pods "a" is forbidden: User "nodemend" cannot create resource "pods/eviction"'
)
NAMESPACE_403 = EvictionAnswer(
    403, "namespace is being terminated", (("NamespaceTerminating", "ml is terminating"),)
)
APF_429 = EvictionAnswer(429, "too many requests, please try again later")


def budget(name: str = "pdb-a", **changes: Any) -> DisruptionBudget:
    """A budget that can never allow an eviction: one pod, and one must stay."""
    values: dict[str, Any] = {
        "namespace": PODS,
        "name": name,
        "match_labels": {},
        "expected_pods": 1,
        "current_healthy": 1,
        "desired_healthy": 1,
        "disruptions_allowed": 0,
    }
    return DisruptionBudget(**(values | changes))


def xid_finding(number: int = 1, code: int = 79, gpu: int = 3, **changes: Any) -> Finding:
    """An XID of one GPU, as the scan reports it."""
    values: dict[str, Any] = {
        "cluster": CLUSTER,
        "node_names": (node_name(number),),
        "fault_class": FaultClass.XID,
        "verdict": Verdict.FATAL,
        "kind": FaultKind.EVENT,
        "evidence": Evidence("xid-count", "q", 1, START, xid_labels(number, code, gpu)),
        "gpu_uuid": f"GPU-{number}-{gpu}",
        "gpu_index": str(gpu),
        "code": code,
        "summary": f"XID {code} on GPU {gpu}",
    }
    return Finding(**(values | changes))


def temperature_finding(number: int = 1, gpu: int = 3, **changes: Any) -> Finding:
    """A hot GPU: a level, which can be read again."""
    values: dict[str, Any] = {
        "fault_class": FaultClass.THERMAL,
        "verdict": Verdict.DEGRADED,
        "kind": FaultKind.LEVEL,
        "code": None,
        "evidence": Evidence("gpu-temperature", "q", 95, START, xid_labels(number, None, gpu)),
        "summary": f"GPU {gpu} is hot",
    }
    return xid_finding(number, gpu=gpu, **(values | changes))


def lost_finding(number: int = 1, gpu: int = 3, **changes: Any) -> Finding:
    """A GPU that reports no more: a level whose sign is absence."""
    values: dict[str, Any] = {
        "fault_class": FaultClass.GPU_LOST,
        "kind": FaultKind.LEVEL,
        "code": None,
        "evidence": Evidence("gpu-lost", "q", 40, START, xid_labels(number, None, gpu)),
        "summary": f"GPU {gpu} reports nothing any more",
    }
    return xid_finding(number, gpu=gpu, **(values | changes))


def xid_labels(number: int, code: int | None, gpu: int) -> dict[str, str]:
    """Labels of a sample as the exporter prints them."""
    labels = {"Hostname": node_name(number), "UUID": f"GPU-{number}-{gpu}", "gpu": str(gpu)}
    return labels | ({"xid": str(code)} if code is not None else {})


def samples(*labels: Mapping[str, str], value: float = 1) -> Callable[[Any], QueryResult]:
    """Return an answer with one sample for each set of labels, at the time of the query."""

    def answer(at: Any) -> QueryResult:
        return QueryResult(
            tuple(Sample(dict(one), value, at) for one in labels), samples_processed=100
        )

    return answer


@dataclass(frozen=True)
class Request:
    """What the state machine gives every step."""

    incident_id: str
    arn: str

    @property
    def fields(self) -> dict[str, Any]:
        """As keyword arguments of a StepRequest."""
        return {
            "incident_id": self.incident_id,
            "execution": {"arn": self.arn, "name": self.incident_id},
        }


class Stage:
    """Everything that a use case touches."""

    def __init__(self, *, nodes: int = 4, policy: Policy | None = None) -> None:
        self.clock = ManualClock()
        self.crasher = Crasher()
        self.cluster = StageCluster(clock=self.clock, gpu_instance_types=frozenset({INSTANCE_TYPE}))
        self.clusters = FakeClusters(self.cluster)
        self.capacity = FakeCapacity()
        self.instances = FakeInstances()
        self.metrics = FakeMetrics()
        self.telemetry = MemoryTelemetry()
        self.incidents = MemoryIncidents(self.clock)
        self.guards = MemoryGuards()
        self.bus = MemoryEventBus(self.telemetry)
        self.outbox = MemoryOutbox(self.incidents, self.bus, self.telemetry)
        self.queue = MemoryDispatchQueue()
        self.dead_letters = MemoryDeadLetters()
        self.policies = MemoryPolicies(policy or enforce())
        self.executions = MemoryExecutions()
        self.ids = SequentialIds()
        self.memory = MemoryScanMemory(self.clock)
        self.history = MemoryHistory(self.clock)
        self.invocation = FixedInvocation()
        for number in range(1, nodes + 1):
            self.cluster.add_node(gpu_node(number))
        self.capacity.add_group(
            CLUSTER,
            AutoScalingGroup(
                GROUP,
                desired=nodes,
                min_size=0,
                max_size=nodes + 2,
                instances={instance_id(n): IN_SERVICE for n in range(1, nodes + 1)},
            ),
        )

    # --- ports ------------------------------------------------------------------------------------

    def _tap(self, target: Any, name: str) -> Any:
        return Tap(target, self.crasher, name)

    @property
    def step(self) -> StepPorts:
        return StepPorts(
            incidents=self._tap(self.incidents, "incidents"),
            outbox=self._tap(self.outbox, "outbox"),
            guards=self._tap(self.guards, "guards"),
            policies=self._tap(self.policies, "policies"),
            clusters=self._tap(self.clusters, "clusters"),
            clock=self.clock,
            invocation=self.invocation,
        )

    @property
    def repair(self) -> RepairPorts:
        return RepairPorts(
            step=self.step,
            capacity=self._tap(self.capacity, "capacity"),
            instances=self._tap(self.instances, "instances"),
        )

    @property
    def verify(self) -> VerifyPorts:
        return VerifyPorts(
            step=self.step,
            metrics=self._tap(self.metrics, "metrics"),
            capacity=self._tap(self.capacity, "capacity"),
            catalogue=catalogue(),
        )

    @property
    def closing(self) -> ClosingPorts:
        return ClosingPorts(
            incidents=self._tap(self.incidents, "incidents"),
            outbox=self._tap(self.outbox, "outbox"),
            guards=self._tap(self.guards, "guards"),
            dispatch_queue=self._tap(self.queue, "queue"),
            history=self._tap(self.history, "history"),
        )

    @property
    def close(self) -> ClosePorts:
        return ClosePorts(closing=self.closing, clock=self.clock)

    @property
    def watch(self) -> WatchPorts:
        return WatchPorts(
            closing=self.closing,
            policies=self._tap(self.policies, "policies"),
            executions=self._tap(self.executions, "executions"),
            clusters=self._tap(self.clusters, "clusters"),
            bus=self._tap(self.bus, "bus"),
            memory=self._tap(self.memory, "memory"),
            telemetry=self.telemetry,
            clock=self.clock,
        )

    @property
    def dispatch(self) -> DispatchPorts:
        return DispatchPorts(
            incidents=self._tap(self.incidents, "incidents"),
            outbox=self._tap(self.outbox, "outbox"),
            guards=self._tap(self.guards, "guards"),
            policies=self._tap(self.policies, "policies"),
            clusters=self._tap(self.clusters, "clusters"),
            capacity=self._tap(self.capacity, "capacity"),
            executions=self._tap(self.executions, "executions"),
            dispatch_queue=self._tap(self.queue, "queue"),
            bus=self._tap(self.bus, "bus"),
            telemetry=self.telemetry,
            clock=self.clock,
            catalogue=catalogue(),
            history=self._tap(self.history, "history"),
        )

    @property
    def open(self) -> OpenIncidentPorts:
        return OpenIncidentPorts(
            incidents=self._tap(self.incidents, "incidents"),
            outbox=self._tap(self.outbox, "outbox"),
            policies=self._tap(self.policies, "policies"),
            clusters=self._tap(self.clusters, "clusters"),
            dispatch_queue=self._tap(self.queue, "queue"),
            telemetry=self.telemetry,
            ids=self.ids,
            clock=self.clock,
            history=self._tap(self.history, "history"),
        )

    @property
    def alert(self) -> ReceiveAlertPorts:
        return ReceiveAlertPorts(
            metrics=self._tap(self.metrics, "metrics"),
            policies=self._tap(self.policies, "policies"),
            bus=self._tap(self.bus, "bus"),
            memory=self._tap(self.memory, "memory"),
            guards=self._tap(self.guards, "guards"),
            incidents=self._tap(self.incidents, "incidents"),
            outbox=self._tap(self.outbox, "outbox"),
            dead_letters=self._tap(self.dead_letters, "dead_letters"),
            telemetry=self.telemetry,
            catalogue=catalogue(),
            clock=self.clock,
        )

    @property
    def scan(self) -> ScanPorts:
        return ScanPorts(
            metrics=self._tap(self.metrics, "metrics"),
            sight=self._tap(self.metrics, "metrics"),
            policies=self._tap(self.policies, "policies"),
            bus=self._tap(self.bus, "bus"),
            memory=self._tap(self.memory, "memory"),
            guards=self._tap(self.guards, "guards"),
            telemetry=self.telemetry,
            catalogue=catalogue(),
            clock=self.clock,
        )

    # --- what is there ----------------------------------------------------------------------------

    def incident(self, incident_id: str) -> Incident:
        """Return a stored incident."""
        found = self.incidents.get(incident_id)
        assert found is not None
        return found

    def save(self, incident_id: str, **changes: Any) -> Incident:
        """Change a stored incident as another part of the product would."""
        return self.incidents.save(replace(self.incident(incident_id), **changes))

    def holds_slot(self, incident_id: str) -> bool:
        """Tell whether the guard has a slot of the incident."""
        slots = self.guards.load(CLUSTER).slots.values()
        return any(slot.incident_id == incident_id for slot in slots)

    def mutations(self) -> list[str]:
        """Return what was changed in the cluster and in the capacity, in order."""
        verbs = ("patch", "evict", "reboot", "terminate")
        return [
            f"{call.verb} {call.target}"
            for call in (*self.cluster.calls, *self.instances.calls, *self.capacity.calls)
            if call.verb in verbs
        ]

    def events(self, detail_type: str) -> list[Mapping[str, Any]]:
        """Return the details of all accepted events of a type."""
        return [one.detail for one in self.bus.accepted if one.detail_type.value == detail_type]

    def node(self, number: int = 1) -> Node:
        """Return a node as the API shows it."""
        found = self.cluster.get_node(node_name(number))
        assert found is not None
        return found

    def boot(self, number: int = 1, boot_id: str = "boot-2", **changes: Any) -> None:
        """Let a node have booted: its kubelet posts another boot id, and is heard now."""

        def booted(node: Node) -> Node:
            ref = replace(node.ref, boot_id=boot_id)
            return replace(node, ref=ref, heartbeat_at=self.clock.now(), **changes)

        self.cluster.change_node(node_name(number), booted)

    # --- where incidents come from ----------------------------------------------------------------

    def wait(self, number: int = 1, *findings: Finding, incident_id: str = "") -> str:
        """Let an incident for a node wait, as open_incident leaves it; return its id."""
        if any(finding.fault_class is FaultClass.GPU_LOST for finding in findings):
            self.miss_gpu(number)
        node = self.node(number)
        known = incident_id or self.ids.new(self.clock.now())
        holder = self.incidents.claim_node(CLUSTER, node.ref.uid, known)
        assert holder == known
        now = self.clock.now()
        assert self.incidents.create(
            Incident(
                id=known,
                cluster=CLUSTER,
                node=node.ref,
                origin=Origin.SCAN,
                opened_at=now,
                state=IncidentState.WAITING,
                state_since=now,
                findings=findings or (xid_finding(number),),
                node_labels=node.labels,
            )
        )
        return known

    def dispatch_all(self, *incident_ids: str) -> None:
        """Run the dispatcher with these hints, or as the schedule does."""
        hints = tuple(DispatchHint(cluster=CLUSTER, incident_id=one) for one in incident_ids)
        dispatch_incidents(DispatchIncidentsRequest(hints=hints), ports=self.dispatch)

    def admit(self, number: int = 1, *findings: Finding) -> Request:
        """Let the dispatcher admit an incident for a node, and its execution begin."""
        incident_id = self.wait(number, *findings)
        self.dispatch_all(incident_id)
        assert self.incident(incident_id).state is IncidentState.ADMITTED
        return self.request(incident_id)

    def put(self, state: IncidentState, number: int = 1, **changes: Any) -> Request:
        """Admit an incident and put it straight into a state of the machine."""
        findings = changes.pop("findings", (xid_finding(number),))
        request = self.admit(number, *findings)
        self.save(
            request.incident_id,
            state=state,
            state_since=self.clock.now(),
            execution_arn=request.arn,
            verify_since=self.clock.now(),
            **changes,
        )
        if state in CARRIES_CORDON and not self.incident(request.incident_id).dry_run:
            self.cordon_as(request.incident_id, number)
        self.outbox.publish(request.incident_id)
        self.cluster.faults.calls.clear()
        self.capacity.faults.calls.clear()
        self.instances.faults.calls.clear()
        self.bus.accepted.clear()
        return request

    def request(self, incident_id: str) -> Request:
        """Return the request of the incident's own execution."""
        return Request(incident_id, self.executions.arn_of(incident_id))

    def cordon_as(self, incident_id: str, number: int = 1) -> None:
        """Put an incident's own cordon on a node, as CordonNode does."""
        node = self.node(number)
        patch = cordon_patch(node, plan_ownership(node, incident_id))
        assert self.cluster.patch_node(node.ref.name, patch)

    def miss_gpu(self, number: int = 1) -> None:
        """Let the device plugin hear of a lost GPU."""
        self.cluster.change_node(node_name(number), lambda node: replace(node, gpu_allocatable=7))

    def cordon_by_hand(self, number: int = 1) -> None:
        """Let an administrator cordon a node."""
        self.cluster.change_node(
            node_name(number), lambda node: replace(node, is_unschedulable=True)
        )

    def uncordon_by_hand(self, number: int = 1) -> None:
        """Let an administrator uncordon a node."""
        self.cluster.change_node(
            node_name(number), lambda node: replace(node, is_unschedulable=False)
        )

    def swap_machine(self, number: int = 1, newcomer: int = 9, **changes: Any) -> None:
        """Let another machine take the node's name, as AWS hands out addresses again."""
        other = gpu_node(newcomer, **changes)
        self.cluster.add_node(replace(other, ref=replace(other.ref, name=node_name(number))))

    def replace_node(self, number: int = 1, newcomer: int = 9, **changes: Any) -> None:
        """Let the group launch a new instance for a terminated one, and its node join."""
        self.capacity.replace_instance(CLUSTER, instance_id(number), instance_id(newcomer))
        self.cluster.remove_node(node_name(number))
        self.cluster.add_node(gpu_node(newcomer, created_at=self.clock.now(), **changes))
        self.metrics.answer("count(count by (UUID", samples({}, value=8))


def enforce(**changes: Any) -> Policy:
    """A policy that lets nodemend act on one cluster."""
    values: dict[str, Any] = {
        "version": "v1",
        "mode": Mode.ENFORCE,
        "clusters": (CLUSTER_POLICY,),
        "limits": Limits(MaxUnavailable(count=2, percent=50)),
        "plans": {FaultClass.THERMAL: (Rung.REPLACE, Rung.HUMAN)},
        "hold_s": {},
    }
    return Policy(**(values | changes))


def after_every_crash(
    build: Callable[[], tuple[Stage, Callable[[], Any]]],
    check: Callable[[Stage, Any], None],
) -> int:
    """Let a step die after each of its port calls, run it again, and check the end.

    Args:
        build: Makes a new stage and the step to run on it.
        check: Asserts on the stage and on the result of the last, undisturbed run.

    Returns:
        How many places the step was crashed at.
    """
    for after in range(1, 200):
        stage, run = build()
        stage.crasher.arm(after)
        try:
            run()
        except CrashError:
            stage.crasher.arm(None)
            result = run()
            assert_no_event_twice(stage)
            check(stage, result)
        else:
            assert after > 1, "the step calls no port"
            return after - 1
    raise AssertionError("the step never ends")


def assert_no_event_twice(stage: Stage) -> None:
    """An event may be sent again, but one id always means one and the same event."""
    by_id: dict[str, set[str]] = {}
    for one in stage.bus.accepted:
        by_id.setdefault(one.event_id, set()).add(f"{one.detail_type} {sorted(one.detail.items())}")
    assert all(len(bodies) == 1 for bodies in by_id.values()), by_id


def times_sent(stage: Stage) -> Mapping[str, int]:
    """Return how many different events of each type were sent."""
    ids = {one.event_id: one.detail_type.value for one in stage.bus.accepted}
    return Counter(ids.values())


def words(timeline: Iterable[TimelineEntry]) -> list[str]:
    """Return a timeline as words."""
    return [f"{entry.step}: {entry.what}" for entry in timeline]


def clear(stage: Stage) -> None:
    """Forget what happened so far."""
    for port in (stage.cluster, stage.capacity, stage.instances):
        port.faults.calls.clear()
    stage.cluster.events.clear()
    stage.bus.accepted.clear()


def repair_of(stage: Stage, request: Request) -> RepairRecord:
    """Return the note of the attempt that is under way."""
    repair = stage.incident(request.incident_id).repair
    assert repair is not None
    return repair


def verdict_of(stage: Stage, request: Request) -> tuple[Outcome, Reason]:
    """Return the decided end."""
    verdict = stage.incident(request.incident_id).verdict
    assert verdict is not None
    return verdict
