"""A small world in which everything can happen between any two calls of a port.

A `Stage` of nine nodes in three groups, with what a test of single steps does not need: instances
that leave and come, metrics that follow from faults, executions that are moved one state at a time
by the state machine's own definition, queues that deliver late and twice, and people. Each
invocation of a function can be disturbed at any of its calls: its process dies, the call fails
before or after its effect, time passes, or somebody else acts meanwhile.

`Wire` stands before every port. It knows what the invocation has read, and checks each change as it
is made: `docs` of the rails, in words, are in `World.breaches`.
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from nodemend.application.dispatch_incidents import dispatch_incidents
from nodemend.application.open_incident import open_incident
from nodemend.application.ports import Announcement, QueryResult
from nodemend.application.receive_alert import receive_alert
from nodemend.application.scan_gpu_health import scan_gpu_health
from nodemend.application.set_pause import SetPausePorts, set_pause
from nodemend.application.watch_incidents import watch_incidents
from nodemend.contracts.alerts import ReceiveAlertRequest
from nodemend.contracts.dispatch import DispatchHint, DispatchIncidentsRequest
from nodemend.contracts.events import FaultEnvelope
from nodemend.contracts.pausing import SetPauseRequest
from nodemend.contracts.scan import ScanGpuHealthRequest
from nodemend.contracts.watch import WatchIncidentsRequest
from nodemend.domain.capacity import IN_SERVICE, AutoScalingGroup
from nodemend.domain.cordon import ownership_of
from nodemend.domain.errors import (
    AwsForbiddenError,
    AwsUnavailableError,
    ClusterForbiddenError,
    ClusterUnavailableError,
    NodemendError,
    PolicyInvalidError,
    RepairRefusedError,
)
from nodemend.domain.faults import Family, Mode, Verdict
from nodemend.domain.findings import Sample
from nodemend.domain.fleet import FleetSnapshot
from nodemend.domain.guard import Guard
from nodemend.domain.incidents import IncidentState, Outcome
from nodemend.domain.nodes import (
    INSTANCE_TYPE_LABEL,
    OWNER_ANNOTATION,
    REMEDIATION_TAINT_KEY,
    Node,
    Readiness,
)
from nodemend.domain.pods import EvictionVerdict
from nodemend.domain.policy import (
    BreakerLimits,
    Deadlines,
    GroupPolicy,
    Limits,
    MaxUnavailable,
    Policy,
    ReplacementRate,
    Waits,
)
from nodemend.domain.rails import PAUSE_ANNOTATION
from nodemend.domain.reasons import Reason
from tests.fakes.capacity import TERMINATING
from tests.fakes.cluster import FakeCluster
from tests.unit.application.machine import FUNCTIONS, _filled, _matching, definition
from tests.unit.application.stage import (
    CLUSTER,
    GROUP,
    INSTANCE_TYPE,
    PDB_429,
    Stage,
    enforce,
    gpu_node,
    instance_id,
    node_name,
    pod,
    xid_labels,
)
from tests.unit.domain.oracle import unavailable

GROUPS: Mapping[str, tuple[int, ...]] = {"gpu-a": (1, 2, 3, 4), "gpu-b": (5, 6, 7), "gpu-c": (8, 9)}
GPUS = 8
XIDS = {"xid79": 79, "xid119": 119}
LEVELS = {
    "dbe": "ecc-dbe-volatile",
    "remap": "row-remap-failed",
    "lost": "gpu-lost",
    "hot": "gpu-temperature",
}
FAULTS = (*XIDS, *LEVELS)
SEEN_FOR = timedelta(minutes=5)
"""How long the exporter's window shows an XID here."""
FUNCTION_S = 60
"""Time-out of the functions, as in the template."""
MAX_RECEIVES = 5

_NAME = re.compile(r'="(ip-[^"]+)"')
_UUID = re.compile(r'UUID="GPU-(\d+)-(\d+)"')


class BreachError(AssertionError):
    """A rail of the product did not hold."""


class DeathError(BaseException):
    """The process is gone; `name` is what Step Functions calls it."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(name)


@dataclass(frozen=True)
class Disturbance:
    """What happens around one of an invocation's calls.

    `kind`: `die_before`, `die_after`, `fail_before`, `fail_after`, `forbid`, `slow`, or the name of
    a deed of the world (`World.DEEDS`) that somebody else does after the call.
    `at` is the call's number, or its name: then it is the first of that name, and a deed is done
    directly before it, after everything that the function had to read.
    """

    at: int | str
    kind: str


@dataclass
class Call:
    """One invocation of a function, and what it has read."""

    function: str
    deadline: datetime
    incident_id: str = ""
    arn: str = ""
    disturbance: Disturbance | None = None
    count: int = 0
    guard: Guard | None = None
    policy: Policy | None = None
    nodes: tuple[Node, ...] = ()
    groups: Mapping[str, AutoScalingGroup] = field(default_factory=dict)


@dataclass(frozen=True)
class Mutation:
    """A change that was made to the cluster or the capacity."""

    at: datetime
    verb: str
    node_uid: str
    incident_id: str


@dataclass
class Fault:
    """A fault of one GPU, from its beginning to its end."""

    kind: str
    machine: int
    gpu: int
    since: datetime
    until: datetime | None = None

    def holds(self, at: datetime) -> bool:
        if self.kind in XIDS:
            return self.since <= at <= self.since + SEEN_FOR
        return self.since <= at and (self.until is None or at < self.until)


class WorldMetrics:
    """AMP over a world: what its queries answer follows from the faults and from who reports."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.is_down = False

    def query_many(
        self, cluster: Any, queries: Mapping[str, str], at: datetime
    ) -> Mapping[str, QueryResult]:
        del cluster
        if self.is_down:
            problem = Reason("amp_timeout", "no answer in time")
            return {key: QueryResult(problem=problem) for key in queries}
        return {key: QueryResult(self._samples(key, text, at)) for key, text in queries.items()}

    def _samples(self, key: str, query: str, at: datetime) -> tuple[Sample, ...]:
        world = self.world
        if key in ("gpu", "node"):
            return self._presence(query, at)
        if query.startswith("count(count by (UUID, gpu)"):
            name = _NAME.search(query)
            machine = world.machine_named(name.group(1)) if name and key == "Hostname" else None
            count = self._reporting(machine, at) if machine is not None else 0
            return (Sample({}, count, at),) if count else ()
        kinds = ("xid79", "xid119") if key == "xid-count" else ()
        kinds = kinds or tuple(kind for kind, rule in LEVELS.items() if rule == key)
        return tuple(
            Sample(world.labels_of(fault), 95.0 if fault.kind == "hot" else 1.0, at)
            for fault in world.faults
            if fault.kind in kinds and fault.holds(at) and world.is_heard(fault.machine, at)
        )

    def _presence(self, query: str, at: datetime) -> tuple[Sample, ...]:
        found = _UUID.search(query)
        if found:
            machine, gpu = int(found.group(1)), int(found.group(2))
            is_there = self.world.is_heard(machine, at) and gpu not in self._lost(machine, at)
            return (Sample({}, 1.0, at),) if is_there else ()
        name = _NAME.search(query)
        named = self.world.machine_named(name.group(1)) if name else None
        count = self._reporting(named, at) if named is not None else 0
        return (Sample({}, count, at),) if count else ()

    def _reporting(self, machine: int, at: datetime) -> int:
        return GPUS - len(self._lost(machine, at)) if self.world.is_heard(machine, at) else 0

    def _lost(self, machine: int, at: datetime) -> set[int]:
        return {
            fault.gpu
            for fault in self.world.faults
            if fault.kind == "lost" and fault.machine == machine and fault.holds(at)
        }


class Wire:
    """Stands before a port: counts, disturbs and checks each of its calls."""

    def __init__(self, target: Any, world: "World", name: str) -> None:
        self._target = target
        self._world = world
        self._name = name

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._target, name)
        if not callable(member):
            return member
        what = f"{self._name}.{name}"

        def call(*args: Any, **kwargs: Any) -> Any:
            world = self._world
            with world.around(what, args) as seen:
                result = member(*args, **kwargs)
                seen.append(result)
            if isinstance(result, FakeCluster):
                return Wire(result, world, "cluster")
            return result

        return call


@dataclass
class WorldInvocation:
    """`Invocation` of whichever function runs now."""

    world: "World"

    def remaining_s(self) -> float:
        call = self.world.calls[-1]
        return (call.deadline - self.world.clock.now()).total_seconds()


class Execution:
    """One execution of the state machine, moved one task at a time."""

    def __init__(self, world: "World", name: str, given: Any) -> None:
        self.world = world
        self.name = name
        self.arn = world.executions.arn_of(name)
        self.info = {"Id": self.arn, "Name": name, "Input": given}
        self.current = str(definition()["StartAt"])
        self.data: Any = given
        self.due_at = world.clock.now()
        self.attempts: dict[int, int] = {}
        self.is_busy = False
        self.error = ""
        self._settle()

    @property
    def status(self) -> str:
        found = self.world.executions.status(self.arn)
        assert found is not None
        return found.status

    @property
    def is_due(self) -> bool:
        return (
            self.status == "RUNNING" and not self.is_busy and self.due_at <= self.world.clock.now()
        )

    def step(self, disturbance: Disturbance | None = None) -> None:
        """Run the task that is due, once, and go on to the next one or to a wait."""
        state = definition()["States"][self.current]
        self.is_busy = True
        try:
            moved = self._task(state, disturbance)
        finally:
            self.is_busy = False
        if moved and self.status == "RUNNING":
            self.attempts = {}
            self._settle()

    def _settle(self) -> None:
        """Pass through everything that takes no invocation."""
        while self.current:
            state = definition()["States"][self.current]
            match state["Type"]:
                case "Task":
                    return
                case "Pass":
                    self.data = _filled(state["Parameters"], self.data, self.info)
                    self.current = state["Next"]
                case "Choice":
                    self.current = self._choice(state)
                case "Wait":
                    wait_s = self.data[state["SecondsPath"].removeprefix("$.")]
                    self.due_at = self.world.clock.now() + timedelta(seconds=wait_s)
                    self.current = state["Next"]
                case "Fail":
                    self.error = self.data["failure"]["Error"]
                    self.world.end_execution(self, "FAILED", self.error)
                    return
        self.world.end_execution(self, "SUCCEEDED")

    def _choice(self, state: Mapping[str, Any]) -> str:
        for rule in state["Choices"]:
            if self.data.get(rule["Variable"].removeprefix("$.")) == rule["StringEquals"]:
                return str(rule["Next"])
        return str(state["Default"])

    def _task(self, state: Mapping[str, Any], disturbance: Disturbance | None) -> bool:
        parameters = _filled(state["Parameters"], self.data, self.info)
        function = parameters["FunctionName"].removeprefix("${").removesuffix("FunctionArn}")
        payload = json.loads(json.dumps(parameters["Payload"]))
        self.world.past_tasks.append((function, payload, self.name, self.arn))
        result, name, message = self.world.run_task(
            function, payload, self.name, self.arn, disturbance
        )
        if self.status != "RUNNING":
            return False  # stopped meanwhile: what the function returns is nobody's
        if result is not None:
            self.data, self.current = result, str(state.get("Next", ""))
            return True
        rule = _matching(state["Retry"], name)
        if rule is not None and "States.ALL" not in rule["ErrorEquals"]:
            done = self.attempts.get(id(rule), 0)
            if done < rule["MaxAttempts"]:
                self.attempts[id(rule)] = done + 1
                wait_s = rule["IntervalSeconds"] * rule.get("BackoffRate", 2) ** done
                wait_s = min(wait_s, rule.get("MaxDelaySeconds", wait_s))
                self.due_at = self.world.clock.now() + timedelta(seconds=wait_s)
                return False
        caught = _matching(state["Catch"], name)
        assert caught is not None
        cause = json.dumps({"errorMessage": message, "errorType": name})
        failed = {"Error": name, "Cause": cause}
        self.data = {**self.data, caught["ResultPath"].removeprefix("$."): failed}
        self.current = str(caught["Next"])
        return True


class World(Stage):
    """Everything that nodemend touches, and everybody else."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        super().__init__(nodes=0)
        self.capacity.remove_group(CLUSTER, GROUP)
        self.metrics = WorldMetrics(self)  # type: ignore[assignment]
        self.invocation = WorldInvocation(self)  # type: ignore[assignment]
        self.instances.on_reboot = self._reboot_asked
        self.births: dict[int, datetime] = {}
        self.deaths: dict[int, datetime] = {}
        self.names: dict[int, str] = {}
        self.last_machine = 0
        self.faults: list[Fault] = []
        self.pending: list[tuple[str, str]] = []
        """What is on its way: (leave | launch | join | boot, instance or group)."""
        self.running: dict[str, Execution] = {}
        self.past_tasks: list[tuple[str, Any, str, str]] = []
        self.ended: list[tuple[str, str]] = []
        """Status events of executions that are not delivered yet."""
        self.fault_queue: list[Mapping[str, Any]] = []
        self.mutations_made: list[Mutation] = []
        self.trouble: list[str] = []
        self.hands = 0
        self.is_cluster_down = False
        self.largest_budget = 0
        self._announced = 0
        self._boots = itertools.count(2)
        self._pods = itertools.count(1)
        for group, numbers in GROUPS.items():
            self.capacity.add_group(
                CLUSTER,
                AutoScalingGroup(group, len(numbers), 0, len(numbers) + 2, instances={}),
            )
            for _ in numbers:
                self._launch(group)
                self._join(self.last_machine, created_at=self.clock.now() - timedelta(days=3))
        for number in (1, 1, 2, 5, 8):
            self.cluster.add_pod(pod(f"train-{next(self._pods)}", number))
        self.deploy()

    # --- ports: every call goes through a wire ----------------------------------------------------

    def _tap(self, target: Any, name: str) -> Any:
        return Wire(target, self, name)

    @property
    def pausing(self) -> SetPausePorts:
        return SetPausePorts(
            guards=self._tap(self.guards, "guards"),
            policies=self._tap(self.policies, "policies"),
            bus=self._tap(self.bus, "bus"),
            dispatch_queue=self._tap(self.queue, "queue"),
            clock=self.clock,
        )

    @contextmanager
    def around(self, what: str, args: Sequence[Any]) -> Iterator[list[Any]]:
        """Do what surrounds one call of a port: disturbances, notes and checks."""
        call = self.calls[-1]
        if self.clock.now() > call.deadline:
            raise DeathError("Sandbox.Timedout")
        call.count += 1
        disturbance = call.disturbance
        kind = ""
        if disturbance and disturbance.at in (call.count, what):
            kind, call.disturbance = disturbance.kind, None
            self.trouble.append(f"{kind} at {call.function}: {what}")
        if self.is_cluster_down and what.startswith("cluster."):
            if what == "cluster.evict":
                kind = kind or "unsettled"
            elif what != "cluster.record_event":
                raise ClusterUnavailableError("connection timed out")
        if kind in self.DEEDS and call.count != (disturbance and disturbance.at):
            self.DEEDS[kind](self)
            kind = ""
        self._before(kind, what)
        seen: list[Any] = []
        yield seen
        self._note(call, what, args, seen[0])
        self._after(kind, what)

    def _before(self, kind: str, what: str) -> None:
        if kind == "die_before":
            raise DeathError("Runtime.ExitError")
        if kind in ("fail_before", "forbid", "unsettled"):
            error = _error_for(what, is_denied=kind == "forbid")
            if error is not None:
                raise error

    def _after(self, kind: str, what: str) -> None:
        if kind == "die_after":
            raise DeathError("Runtime.ExitError")
        if kind == "slow":
            self.clock.advance(25)
        if kind == "fail_after":
            error = _error_for(what, is_denied=False)
            if error is not None:
                raise error
        if kind in self.DEEDS:
            self.DEEDS[kind](self)

    # --- the rails --------------------------------------------------------------------------------

    def _note(self, call: Call, what: str, args: Sequence[Any], result: Any) -> None:
        match what:
            case "guards.load":
                call.guard = result
            case "guards.store" if result:
                self._check_slots(call, args[0])
                call.guard = args[0]
            case "policies.current":
                call.policy = result
            case "cluster.list_gpu_nodes":
                call.nodes = tuple(result)
            case "capacity.fleet":
                call.groups = result.groups
            case "cluster.patch_node" if result:
                self._check_patch(call, args[0], args[1])
            case "cluster.evict" if result.verdict is EvictionVerdict.ACCEPTED:
                self._check_change(call, "evict", self._uid_of(args[0].node_name), Mode.ENFORCE)
            case "capacity.terminate":
                self._check_change(call, "terminate", self._uid_on(args[1]), Mode.ENFORCE)
                self._will("leave", args[1])
            case "instances.reboot" if result:
                self._check_change(call, "reboot", self._uid_on(args[1]), Mode.ENFORCE)

    def _check_slots(self, call: Call, guard: Guard) -> None:
        """Assert that slots are only given within every limit, as the decision saw the fleet."""
        stored = self._last_guard
        self._last_guard = guard
        new = [uid for uid in guard.slots if uid not in stored.slots]
        if not new:
            return
        assert call.policy is not None
        policy = call.policy
        if guard.pause or guard.breaker:
            raise BreachError(f"slots {new} were given while {guard.pause or guard.breaker}")
        by_instance = {i: group.name for group in call.groups.values() for i in group.instances}
        snapshot = FleetSnapshot(self.clock.now(), call.nodes, call.groups, by_instance)
        for uid in new:
            node = snapshot.node(uid)
            if node is None:
                raise BreachError(f"a slot was given for {uid}, which is no node")
            group = snapshot.group_name(node)
            scopes = [(None, policy.limits.max_unavailable.of(snapshot.desired()))]
            if group:
                limits = policy.limits_for(node.labels).max_unavailable
                scopes.append((group, limits.of(snapshot.desired(group))))
            for scope, bound in scopes:
                out = unavailable(guard, snapshot, scope, besides=uid)
                if len(out) + 1 > bound:
                    raise BreachError(f"{node.ref.name} got a slot of {bound} in {scope}: {out}")
        hour = self.clock.now() - timedelta(hours=1)
        recent = sum(one.at > hour for one in guard.replacements)
        if len(guard.replacements) > len(stored.replacements):
            rate = policy.limits.replacements
            if recent > rate.per_hour or len(guard.replacements) > rate.per_day:
                raise BreachError(f"{recent} replacements were admitted within an hour")

    _last_guard = Guard(CLUSTER)

    def _check_patch(self, call: Call, name: str, patch: Sequence[Mapping[str, Any]]) -> None:
        node = self.cluster.get_node(name)
        assert node is not None
        is_cordon = any(op["path"] == "/spec/unschedulable" and op["op"] == "add" for op in patch)
        if is_cordon:
            owner = ownership_of(node)
            if owner is None or owner.incident_id != call.incident_id:
                raise BreachError(f"{call.function} cordoned {name} in the name of {owner}")
            self._check_change(call, "cordon", node.ref.uid, Mode.CORDON_ONLY)
            self._check_out()
        else:
            incident_id = call.incident_id or self._last_to_cordon(node.ref.uid)
            self.mutations_made.append(
                Mutation(self.clock.now(), "restore", node.ref.uid, incident_id)
            )

    def _last_to_cordon(self, uid: str) -> str:
        """Return the incident whose cordon the watch takes off; it works for none of its own."""
        every = [one.incident_id for one in self.mutations_made if one.node_uid == uid]
        return every[-1] if every else ""

    def _check_change(self, call: Call, verb: str, node_uid: str, least: Mode) -> None:
        """Assert that a change was made under a lease of this invocation, by the owner, with leave.

        All of it as the invocation itself has read it: what comes after its last read, it cannot
        know.
        """
        what = f"{call.function} made {verb} of {node_uid} for {call.incident_id}"
        self.mutations_made.append(Mutation(self.clock.now(), verb, node_uid, call.incident_id))
        incident = self.incidents.get(call.incident_id)
        if incident is None or (incident.execution_arn and incident.execution_arn != call.arn):
            raise BreachError(f"{what}, which is not its own")
        if node_uid and incident.node.uid != node_uid:
            raise BreachError(f"{what}, whose node is {incident.node.uid}")
        if incident.dry_run:
            raise BreachError(f"{what} in a dry run")
        slot = call.guard.slots.get(incident.node.uid) if call.guard else None
        if slot is None or slot.incident_id != incident.id:
            raise BreachError(f"{what} and has read no lease")
        if not slot.expires_at > call.deadline:
            raise BreachError(f"{what}: its lease ends {slot.expires_at}, before {call.deadline}")
        if self._last_guard.slots.get(incident.node.uid) != slot:
            raise BreachError(f"{what}, whose slot was given up meanwhile")
        if call.guard is not None and call.guard.pause is not None:
            raise BreachError(f"{what} in a pause that it has read")
        mode = call.policy.mode_for(incident.node_labels) if call.policy else None
        if mode not in (Mode.ENFORCE, least):
            raise BreachError(f"{what} in mode {mode}")

    def _check_out(self) -> None:
        """Assert that never more nodes are out by us than the largest budget ever allowed."""
        ours = [
            node.ref.name
            for node in self.nodes()
            if node.is_unschedulable
            and (owner := ownership_of(node)) is not None
            and not owner.was_unschedulable
        ]
        if len(ours) > self.largest_budget:
            raise BreachError(f"{ours} are cordoned at once; the budget was {self.largest_budget}")

    def check(self) -> None:
        """Assert what holds between any two things that happen."""
        owners: dict[str, str] = {}
        idle = (IncidentState.WAITING, IncidentState.ADMITTED)
        for incident in self.incidents.list_open(CLUSTER):
            # What only has to close does nothing to its node any more.
            if incident.state in idle or incident.verdict is not None:
                continue
            other = owners.setdefault(incident.node.uid, incident.id)
            if other != incident.id:
                raise BreachError(f"{other} and {incident.id} both own {incident.node.name}")
            pointer = self.incidents.open_by_node.get((CLUSTER, incident.node.uid))
            if pointer != incident.id:
                raise BreachError(f"{incident.id} runs on a node whose open incident is {pointer}")
        for node in self.nodes():
            owner = ownership_of(node)
            if owner is not None and self.incidents.get(owner.incident_id) is None:
                raise BreachError(f"{node.ref.name} is cordoned for {owner.incident_id}: nobody")

    # --- functions --------------------------------------------------------------------------------

    def invoke(
        self,
        function: str,
        use_case: Callable[[], Any],
        disturbance: Disturbance | None = None,
        *,
        incident_id: str = "",
        arn: str = "",
    ) -> tuple[Any, str, str]:
        """Run a function; return its result, or the name and the words of what ended it."""
        deadline = self.clock.now() + timedelta(seconds=FUNCTION_S)
        call = Call(function, deadline, incident_id, arn, disturbance)
        self.calls.append(call)
        try:
            return use_case(), "", ""
        except NodemendError as error:
            return None, type(error).__name__, str(error)
        except DeathError as error:
            return None, error.name, error.name
        finally:
            assert self.calls.pop() is call
            self._collect()

    def run_task(
        self, function: str, payload: Any, name: str, arn: str, disturbance: Disturbance | None
    ) -> tuple[Any, str, str]:
        """Run a task's function with a payload."""
        request, use_case, ports = FUNCTIONS[function]
        parsed = request.model_validate(payload)
        result, error, message = self.invoke(
            function,
            lambda: use_case(parsed, ports=getattr(self, ports)),
            disturbance,
            incident_id=name,
            arn=arn,
        )
        return (result.model_dump(mode="json") if result else None), error, message

    def _collect(self) -> None:
        """Bring fault events to their queue, and begin executions that were started."""
        for one in self.bus.accepted[self._announced :]:
            if one.detail_type.value == "GPU Fault Detected":
                self.fault_queue.append(_as_sent(one))
        self._announced = len(self.bus.accepted)
        for name in self.executions.started:
            if name not in self.running:
                given = {"schema_version": 1, "incident_id": name}
                self.running[name] = Execution(self, name, given)

    def end_execution(self, execution: Execution, status: str, error: str = "") -> None:
        """End an execution; all but a success are told on the default bus."""
        self.executions.end(execution.name, status, error)
        if status != "SUCCEEDED":
            self.ended.append((execution.name, status))

    # --- deeds: what happens ----------------------------------------------------------------------

    def scan_now(self, family: Family = Family.ECC, disturbance: Disturbance | None = None) -> None:
        request = ScanGpuHealthRequest(family=family)
        self.invoke("Scan", lambda: scan_gpu_health(request, ports=self.scan), disturbance)

    def alert_now(self, machine: int, disturbance: Disturbance | None = None) -> None:
        labels = {"alertname": "GpuXid", "Hostname": self.names[machine], "cluster": CLUSTER}
        one = {
            "status": "firing",
            "startsAt": (self.clock.now() - timedelta(minutes=1)).isoformat(),
            "fingerprint": f"f-{machine}",
            "labels": labels,
            "annotations": {},
        }
        body = json.dumps({"version": "4", "status": "firing", "alerts": [one]})
        request = ReceiveAlertRequest.model_validate({"body": body, "messageId": "q"})
        self.invoke("ReceiveAlert", lambda: receive_alert(request, ports=self.alert), disturbance)

    def deliver(
        self, pick: int = 0, *, is_twice: bool = False, disturbance: Disturbance | None = None
    ) -> None:
        """Deliver one of the fault events; what fails comes again."""
        if not self.fault_queue:
            return
        index = pick % len(self.fault_queue)
        event = self.fault_queue[index]
        fault = FaultEnvelope.model_validate({"detail": event}).detail
        _, error, _ = self.invoke(
            "OpenIncident", lambda: open_incident(fault, ports=self.open), disturbance
        )
        if not error and not is_twice and event in self.fault_queue:
            self.fault_queue.remove(event)

    def dispatch_now(
        self, disturbance: Disturbance | None = None, *, by_hints: bool = False
    ) -> None:
        """Decide, as the schedule or as the queue's messages have it."""
        messages = tuple(self.queue.messages) if by_hints else ()
        if by_hints and not messages:
            return
        hints = tuple(DispatchHint(cluster=c, incident_id=i) for c, i in messages)
        _, error, _ = self.invoke(
            "DispatchIncidents",
            lambda: dispatch_incidents(DispatchIncidentsRequest(hints=hints), ports=self.dispatch),
            disturbance,
        )
        if not error:
            for message in messages:
                if message in self.queue.messages:
                    self.queue.messages.remove(message)

    def watch_now(self, disturbance: Disturbance | None = None, *, by_event: bool = False) -> None:
        """Let the watchdog look at everything, or at an execution that has ended."""
        ended = None
        if by_event:
            if not self.ended:
                return
            name, status = self.ended.pop(0)
            arn = self.executions.arn_of(name)
            ended = {"executionArn": arn, "name": name, "status": status}
        request = WatchIncidentsRequest.model_validate({"ended": ended})
        self.invoke(
            "WatchIncidents", lambda: watch_incidents(request, ports=self.watch), disturbance
        )

    def set_pause(self, *, paused: bool, disturbance: Disturbance | None = None) -> None:
        words = {"cluster": CLUSTER, "paused": paused, "reason": "work", "requested_by": "alice"}
        request = SetPauseRequest(input=words)
        self.invoke("SetPause", lambda: set_pause(request, ports=self.pausing), disturbance)

    def start_by_hand(self, machine: int) -> None:
        self.hands += 1
        self._start(f"hand-{self.hands}", self._by_hand(machine))

    def _by_hand(self, machine: int) -> Mapping[str, str]:
        return {
            "cluster": CLUSTER,
            "node": self.names[machine],
            "reason": "it looks sick",
            "requested_by": "alice",
        }

    def copy_execution(self, pick: int) -> None:
        """Start a "new execution" from the console: the same input under another name."""
        if self.running:
            known = list(self.running.values())[pick % len(self.running)]
            self.hands += 1
            self._start(f"copy-{self.hands}", known.info["Input"])

    def _start(self, name: str, given: Any) -> None:
        self.executions.start(name)
        self.executions.started.remove(name)
        self.running[name] = Execution(self, name, given)

    def due(self) -> list[Execution]:
        return [one for one in self.running.values() if one.is_due]

    def run_due(self, pick: int = 0, disturbance: Disturbance | None = None) -> None:
        due = self.due()
        if due:
            due[pick % len(due)].step(disturbance)

    def run_again(self, pick: int = 0, disturbance: Disturbance | None = None) -> None:
        """Run a task once more that has run before: Lambda, or somebody's late retry."""
        if self.past_tasks:
            function, payload, name, arn = self.past_tasks[-1 - pick % len(self.past_tasks)]
            self.run_task(function, payload, name, arn, disturbance)

    def stop(self, pick: int = 0) -> None:
        """Stop an execution in the console."""
        running = [one for one in self.running.values() if one.status == "RUNNING"]
        if running:
            self.end_execution(running[pick % len(running)], "ABORTED")

    def stop_this(self, *, is_watched: bool = False) -> None:
        """Stop the execution whose function is at work; the function does not notice."""
        names = [call.incident_id for call in self.calls if call.incident_id in self.running]
        for name in names[-1:]:
            if self.running[name].status == "RUNNING":
                self.end_execution(self.running[name], "ABORTED")
        if is_watched:
            while self.ended:
                self.watch_now(by_event=True)

    def redrive(self, pick: int = 0) -> None:
        """Redrive an execution that did not succeed: it goes on where it was."""
        ended = [
            one
            for one in self.running.values()
            if one.status in ("ABORTED", "FAILED", "TIMED_OUT") and not one.is_busy
        ]
        if ended:
            again = ended[pick % len(ended)]
            self.executions.statuses[again.arn] = replace(
                self.executions.statuses[again.arn], status="RUNNING"
            )
            again.attempts = {}
            again.due_at = self.clock.now()
            again._settle()

    def deploy(
        self,
        *,
        mode: Mode = Mode.ENFORCE,
        group_mode: Mode | None = None,
        count: int = 2,
        group_count: int = 2,
    ) -> None:
        """Deploy a policy; its waits are short, so that a day is told in few steps."""
        breaker = BreakerLimits(percent=50, min_nodes=4, window_s=600, cooldown_s=600)
        limits = Limits(MaxUnavailable(count, 100), ReplacementRate(4, 20), breaker)
        own = Limits(MaxUnavailable(group_count, 100), limits.replacements, breaker)
        self.policies.problem = ""
        self.policies.policy = enforce(
            mode=mode,
            groups=(GroupPolicy({"pool": "gpu-b"}, mode=group_mode, limits=own),),
            limits=limits,
            waits=Waits((20, 60), (20, 60)),
            deadlines=Deadlines(verify_s=120, drain_s=300, replace_s=600, reboot_s=240),
            hold_down_s=60,
            startup_grace_s=300,
            hold_s={Verdict.DEGRADED: 60},
        )
        self.largest_budget = max(self.largest_budget, count)

    def break_policy(self) -> None:
        self.policies.problem = "limits: is missing"

    def inject(self, kind: str, machine: int, gpu: int = 3) -> None:
        """Let a GPU be sick from now on."""
        self.faults.append(Fault(kind, machine, gpu, self.clock.now()))

    def clear(self, machine: int) -> None:
        """Let every lasting fault of a machine be over."""
        for fault in self.faults:
            if fault.machine == machine and fault.until is None:
                fault.until = self.clock.now()

    def advance(self, seconds: float) -> None:
        """Let time pass; kubelets that are heard go on being heard."""
        self.clock.advance(seconds)
        now = self.clock.now()
        for node in self.nodes():
            if node.is_ready:
                self.cluster.change_node(node.ref.name, lambda n: replace(n, heartbeat_at=now))

    # --- what nodes and groups do -----------------------------------------------------------------

    def nodes(self) -> list[Node]:
        """The cluster's nodes, asked without being counted."""
        return [
            node
            for name in list(self.cluster._nodes)
            if (node := FakeCluster.get_node(self.cluster, name)) is not None
        ]

    def machines(self) -> list[int]:
        """Numbers of the machines that have a node."""
        names = {node.ref.instance_id for node in self.nodes()}
        return [number for number in self.births if instance_id(number) in names]

    def machine(self, pick: int) -> int:
        """One of the machines that are there."""
        there = self.machines()
        return there[pick % len(there)] if there else 1

    def victim(self) -> int:
        """The machine that the function which is running is about; else any."""
        for call in reversed(self.calls):
            incident = self.incidents.get(call.incident_id)
            if incident is not None and incident.node.instance_id:
                return int(incident.node.instance_id.removeprefix("i-"), 16)
        return self.machine(0)

    def machine_named(self, name: str) -> int | None:
        """The machine that has a node name now, or had it last."""
        return max((n for n, known in self.names.items() if known == name), default=None)

    def is_heard(self, machine: int, at: datetime) -> bool:
        """Tell whether a machine's exporter was scraped at a time."""
        born = self.births.get(machine)
        died = self.deaths.get(machine)
        return born is not None and born <= at and (died is None or at < died)

    def labels_of(self, fault: Fault) -> dict[str, str]:
        labels = xid_labels(fault.machine, XIDS.get(fault.kind), fault.gpu)
        return labels | {"Hostname": self.names[fault.machine]}

    def _will(self, what: str, whom: str) -> None:
        if (what, whom) not in self.pending:
            self.pending.append((what, whom))

    def move(self, pick: int = 0) -> None:
        """Let one of the things happen that are on their way."""
        if self.pending:
            what, whom = self.pending.pop(pick % len(self.pending))
            getattr(self, f"_do_{what}")(whom)

    def _do_leave(self, instance: str) -> None:
        group = self.capacity._group_name(CLUSTER, instance)
        self.capacity.lose_instance(CLUSTER, instance)
        machine = int(instance.removeprefix("i-"), 16)
        self.deaths.setdefault(machine, self.clock.now())
        self.instances.unknown.add(instance)
        self.pending = [one for one in self.pending if one[1] != instance]
        for node in self.nodes():
            if node.ref.instance_id == instance:
                self.cluster.remove_node(node.ref.name)
                for each in FakeCluster.list_pods(self.cluster, node.ref.name):
                    self.cluster.remove_pod(each.namespace, each.name)
        if group:
            self._will("launch", group)

    def _do_launch(self, group: str) -> None:
        found = self.capacity._groups[CLUSTER][group]
        if {"Launch"} & found.suspended:
            self.pending.append(("launch", group))
            return
        while len(self.capacity._groups[CLUSTER][group].instances) < found.desired:
            self._launch(group)
            self._will("join", instance_id(self.last_machine))

    def _launch(self, group: str) -> None:
        self.last_machine += 1
        found = self.capacity._groups[CLUSTER][group]
        members = {**found.instances, instance_id(self.last_machine): IN_SERVICE}
        self.capacity.add_group(CLUSTER, replace(found, instances=members))

    def _do_join(self, instance: str) -> None:
        self._join(int(instance.removeprefix("i-"), 16))

    def _join(self, number: int, **changes: Any) -> None:
        """Let a machine's node join; now and then it gets a name that another one has had."""
        now = self.clock.now()
        free = sorted(set(self.names.values()) - {node.ref.name for node in self.nodes()})
        name = free[0] if free and number % 2 else node_name(number)
        self.names[number] = name
        self.births[number] = now if number > sum(map(len, GROUPS.values())) else now - timedelta(3)
        group = self.capacity._group_name(CLUSTER, instance_id(number))
        labels = {INSTANCE_TYPE_LABEL: INSTANCE_TYPE, "pool": group}
        made = gpu_node(number, heartbeat_at=now, labels=labels, **({"created_at": now} | changes))
        self.cluster.add_node(replace(made, ref=replace(made.ref, name=name)))

    def _reboot_asked(self, instance: str) -> None:
        self._will("boot", instance)

    def _do_boot(self, instance: str) -> None:
        """Let a node boot; what a reset mends is mended, and an XID of before is over."""
        machine = int(instance.removeprefix("i-"), 16)
        now = self.clock.now()
        for fault in self.faults:
            if fault.machine == machine and fault.kind == "dbe" and fault.until is None:
                fault.until = now
        boot_id = f"boot-{machine}-{next(self._boots)}"

        def booted(node: Node) -> Node:
            return replace(node, ref=replace(node.ref, boot_id=boot_id), heartbeat_at=now)

        self._change(instance, booted)

    def _change(self, instance: str, change: Callable[[Node], Node]) -> None:
        for node in self.nodes():
            if node.ref.instance_id == instance:
                self.cluster.change_node(node.ref.name, change)

    def change(self, machine: int, change: Callable[[Node], Node]) -> None:
        """Let somebody change a machine's node."""
        self._change(instance_id(machine), change)

    def cordon(self, machine: int) -> None:
        self.change(machine, lambda node: replace(node, is_unschedulable=True))

    def uncordon(self, machine: int) -> None:
        self.change(machine, lambda node: replace(node, is_unschedulable=False))

    def pause_node(self, machine: int, *, paused: bool = True) -> None:
        def annotate(node: Node) -> Node:
            others = {k: v for k, v in node.annotations.items() if k != PAUSE_ANNOTATION}
            return replace(
                node, annotations=others | ({PAUSE_ANNOTATION: "busy"} if paused else {})
            )

        self.change(machine, annotate)

    def set_ready(self, machine: int, *, ready: bool) -> None:
        readiness = Readiness.READY if ready else Readiness.UNKNOWN
        self.change(machine, lambda node: replace(node, readiness=readiness))

    def reboot_itself(self, machine: int) -> None:
        self._do_boot(instance_id(machine))

    def terminate_by_group(self, machine: int) -> None:
        """Let the group replace a member on its own."""
        if self.capacity._group_name(CLUSTER, instance_id(machine)):
            self.capacity.set_state(CLUSTER, instance_id(machine), TERMINATING)
            self._will("leave", instance_id(machine))

    def suspend(self, group: str, *, suspended: bool = True) -> None:
        found = self.capacity._groups[CLUSTER][group]
        processes = frozenset({"Launch"}) if suspended else frozenset()
        self.capacity.add_group(CLUSTER, replace(found, suspended=processes))

    def add_pod(self, machine: int) -> None:
        """Let the scheduler put a pod on a node that takes pods."""
        for node in self.nodes():
            if node.ref.instance_id == instance_id(machine) and not node.is_unschedulable:
                name = f"train-{next(self._pods)}"
                self.cluster.add_pod(pod(name, node_name=node.ref.name))

    def block_pods(self) -> None:
        """Let a budget refuse the next eviction of each pod."""
        for namespace, name in list(self.cluster._pods):
            self.cluster.answer_evictions(namespace, name, PDB_429)

    def _uid_of(self, name: str) -> str:
        node = FakeCluster.get_node(self.cluster, name)
        return node.ref.uid if node else ""

    def _uid_on(self, instance: str) -> str:
        found = [node.ref.uid for node in self.nodes() if node.ref.instance_id == instance]
        return found[0] if found else ""

    # --- the end ----------------------------------------------------------------------------------

    def heal(self) -> None:
        """Mend everything that is not nodemend's: APIs, metrics, nodes, policy, pauses."""
        self.is_cluster_down = False
        self.metrics.is_down = False  # type: ignore[attr-defined]
        self.bus.gone = None
        self.bus.refused.clear()
        self.deploy()
        self.set_pause(paused=False)
        self.cluster._eviction_answers.clear()
        for group in GROUPS:
            self.suspend(group, suspended=False)
        for machine in self.machines():
            self.clear(machine)
            self.pause_node(machine, paused=False)
            self.set_ready(machine, ready=True)
            self.change(machine, _without_others)

    def calm(self, *, rounds: int = 400) -> None:
        """Let everything run on, undisturbed, until nothing is left to do."""
        for number in range(rounds):
            while self.pending:
                self.move()
            for _ in range(50):
                if not self.due():
                    break
                self.run_due()
            for _ in range(len(self.fault_queue)):
                self.deliver()
            while self.ended:
                self.watch_now(by_event=True)
            self.dispatch_now(by_hints=True)
            self.dispatch_now()
            self.watch_now()
            self.check()
            if self.is_quiet() and not self.due() and not self.pending:
                return
            if number % 20 == 19:
                self.put_back()
            self.advance(60 if number < 200 else 600)
        left = [
            f"{one.id} {one.state} {one.waiting_for} {one.verdict}"
            for one in self.incidents.list_open(None)
        ]
        slots = list(self.guards.load(CLUSTER).slots.values())
        raise BreachError(f"it never ends: {left}, slots {slots}, pending {self.pending}")

    def is_quiet(self) -> bool:
        return (
            not self.incidents.list_open(None)
            and not self.guards.load(CLUSTER).slots
            and not self.guards.load(CLUSTER).events
            and not any(record.outbox for record in self.incidents.records.values())
            and not any(one.status == "RUNNING" for one in self.running.values())
        )

    def put_back(self) -> None:
        """Let people put back what is theirs, as the runbook says, and their own cordons.

        A node that was cordoned before us is released as it was, and uses up budget until then.
        """
        for node in self.nodes():
            owner = ownership_of(node)
            if owner is None:
                self.cluster.change_node(node.ref.name, _put_back)
                continue
            self._check_kept(node)
            incident = self.incidents.get(owner.incident_id)
            if incident is not None and incident.is_closed:
                self.cluster.change_node(node.ref.name, _put_back)

    def _check_kept(self, node: Node) -> None:
        """Assert that a cordon of a closed incident is one that a person was told of."""
        owner = ownership_of(node)
        incident = self.incidents.get(owner.incident_id) if owner else None
        if incident is None or not incident.is_closed:
            return
        kept = (Outcome.NEEDS_HUMAN, Outcome.ABORTED_BY_OPERATOR)
        if incident.outcome not in kept:
            raise BreachError(
                f"{node.ref.name} is still cordoned, and {incident.id} ended {incident.outcome}: "
                f"{incident.reason}"
            )

    def check_end(self) -> None:
        """Assert what holds when everything is over."""
        for node in self.nodes():
            self._check_kept(node)
        self._check_told()
        for mutation in self.mutations_made:
            self._check_mutation_told(mutation)
        reboots = Counter(one.incident_id for one in self.mutations_made if one.verb == "reboot")
        if reboots and max(reboots.values()) > 2:
            raise BreachError(f"reboots: {reboots}")

    def _check_told(self) -> None:
        """Assert that every event of every incident was sent, and that no id means two."""
        bodies: dict[str, str] = {}
        for one in self.bus.accepted:
            body = f"{one.detail_type} {sorted(one.detail.items())}"
            if bodies.setdefault(one.event_id, body) != body:
                raise BreachError(f"{one.event_id} means two events: {one.detail_type}")
        for record in self.incidents.records.values():
            incident = record.incident
            every = {f"{incident.id}-{n:04d}" for n in range(1, incident.sequence + 1)}
            sent = {i for i in bodies if i.rpartition("-")[0] == incident.id}
            if sent != every:
                raise BreachError(f"{incident.id} has events {every}, and was heard of: {sent}")

    def _check_mutation_told(self, mutation: Mutation) -> None:
        told = {
            one.detail_type.value
            for one in self.bus.accepted
            if one.detail.get("incident_id") == mutation.incident_id
        }
        incident = self.incidents.get(mutation.incident_id)
        is_told = bool(told & EVENTS_OF[mutation.verb])
        if not is_told and not (incident and incident.outcome in TOLD_BY_ITS_END):
            end = incident and (incident.outcome, str(incident.reason))
            raise BreachError(f"{mutation} has no event: {sorted(told)}, {end}")

    DEEDS: Mapping[str, Callable[["World"], None]] = {
        "watch": lambda w: w.watch_now(),
        "ended": lambda w: w.watch_now(by_event=True),
        "dispatch": lambda w: w.dispatch_now(),
        "hints": lambda w: w.dispatch_now(by_hints=True),
        "deliver": lambda w: w.deliver(),
        "pause": lambda w: w.set_pause(paused=True),
        "resume": lambda w: w.set_pause(paused=False),
        "step": lambda w: w.run_due(),
        "run_again": lambda w: w.run_again(),
        "stop": lambda w: w.stop_this(),
        "stop_and_watch": lambda w: w.stop_this(is_watched=True),
        "move": lambda w: w.move(),
        "boot": lambda w: w.reboot_itself(w.victim()),
        "cordon": lambda w: w.cordon(w.victim()),
        "uncordon": lambda w: w.uncordon(w.victim()),
        "pause_node": lambda w: w.pause_node(w.victim()),
        "dry_run": lambda w: w.deploy(mode=Mode.DRY_RUN),
        "budget_1": lambda w: w.deploy(count=1),
        "pod": lambda w: w.add_pod(w.victim()),
        "terminate": lambda w: w.terminate_by_group(w.victim()),
    }
    """What somebody else may do in the middle of an invocation."""


EVENTS_OF: Mapping[str, frozenset[str]] = {
    "cordon": frozenset({"Node Cordoned"}),
    "evict": frozenset({"Node Drained", "Drain Progress"}),
    "terminate": frozenset({"Repair Started"}),
    "reboot": frozenset({"Repair Started"}),
    "restore": frozenset({"Node Released"}),
}
TOLD_BY_ITS_END = frozenset({Outcome.ABORTED_BY_OPERATOR, Outcome.NEEDS_HUMAN, Outcome.SUPERSEDED})
"""Ends that say themselves in which step the incident was broken off."""

UNFAILING = ("metrics.", "outbox.", "cluster.record_event", "executions.arn_of")
"""Calls that never raise."""


def _error_for(what: str, *, is_denied: bool) -> NodemendError | None:
    """Return what a port raises when the world behind it fails, by the ports' own words."""
    if what.startswith(UNFAILING):
        return None
    if what == "policies.current":
        return PolicyInvalidError("it is broken")
    if what == "cluster.evict":
        return None
    if what.startswith("cluster."):
        return ClusterForbiddenError("no") if is_denied else ClusterUnavailableError("gone")
    if is_denied and what in ("capacity.terminate", "instances.reboot"):
        return RepairRefusedError("it is protected")
    return AwsForbiddenError("no") if is_denied else AwsUnavailableError("gone")


def _as_sent(one: Announcement) -> Mapping[str, Any]:
    sent: Mapping[str, Any] = json.loads(json.dumps(one.detail))
    return sent


def _put_back(node: Node) -> Node:
    """Do what docs/runbooks/put-a-node-back.md says."""
    annotations = {k: v for k, v in node.annotations.items() if k != OWNER_ANNOTATION}
    taints = tuple(taint for taint in node.taints if taint.key != REMEDIATION_TAINT_KEY)
    return replace(node, annotations=annotations, taints=taints, is_unschedulable=False)


def _without_others(node: Node) -> Node:
    """Take off other people's cordons; ours stays as it is."""
    if ownership_of(node) is not None:
        return node
    return replace(node, is_unschedulable=False)
