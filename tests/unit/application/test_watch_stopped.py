"""Executions that end in the middle: the world is consistent within one interval of the watch.

A person stops the execution before each state of the machine, in a replacement and in a reboot,
and the watch hears of it at once or, if the status event is lost, on its schedule.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from nodemend.application.ports import ExecutionStatus
from nodemend.domain.cordon import is_cordoned_by
from nodemend.domain.errors import ClusterUnavailableError, LeaseLostError, NodemendError
from nodemend.domain.faults import Rung
from nodemend.domain.history import instance
from nodemend.domain.incidents import Incident, IncidentState, Outcome
from nodemend.domain.nodes import Node
from nodemend.domain.policy import Limits, MaxUnavailable
from nodemend.domain.reasons import Reason
from tests.unit.application import run
from tests.unit.application.machine import FUNCTIONS, Machine
from tests.unit.application.run import BY_HAND, HAND
from tests.unit.application.stage import (
    CLUSTER,
    PDB_429,
    Request,
    Stage,
    after_every_crash,
    assert_no_event_twice,
    enforce,
    instance_id,
    node_name,
    pod,
    samples,
    times_sent,
    xid_finding,
    xid_labels,
)

GSP = {"code": 119, "action": "reset_gpu"}
MARKS = ("nodemend/incident", "cluster-autoscaler.kubernetes.io/scale-down-disabled")


class StoppedError(Exception):
    """A person pressed Stop."""


class UntilState(list[str]):
    """The visited states; the execution is stopped when it comes to the state of this index."""

    def __init__(self, index: int | None) -> None:
        super().__init__()
        self.index = index

    def append(self, state: str) -> None:
        """Note the state, or stop before it."""
        if len(self) == self.index:
            raise StoppedError(state)
        super().append(state)


def sick(rung: Rung) -> tuple[Stage, str]:
    """A stage with an admitted incident whose first repair is this one."""
    is_reboot = rung is Rung.REBOOT
    stage = Stage()
    stage.cluster.add_pod(pod("train-0"))
    stage.metrics.answer("xid-count", samples(xid_labels(1, 119 if is_reboot else 79, 3)))
    incident_id = run.open_for(stage, xid_finding(**GSP) if is_reboot else xid_finding())
    assert incident_id is not None
    stage.dispatch_all(incident_id)
    return stage, incident_id


def help_arrives(stage: Stage, rung: Rung) -> Callable[[], None]:
    """What makes the repair succeed."""

    def booted() -> None:
        stage.metrics.clear()
        stage.metrics.answer("count(count by (UUID", samples({}, value=8))
        stage.boot()

    def replaced() -> None:
        stage.metrics.clear()
        stage.replace_node()

    return booted if rung is Rung.REBOOT else replaced


def run_until(stage: Stage, incident_id: str, rung: Rung, index: int | None) -> str:
    """Run the machine until it is stopped; return the state before which that was, or ''."""
    visited = UntilState(index)
    machine = Machine(stage, [(100, help_arrives(stage, rung))], visited)
    try:
        machine.run(incident_id)
    except StoppedError as stopped:
        stage.executions.end(incident_id, "ABORTED")
        return str(stopped)
    return ""


def marks(node: Node | None) -> tuple[bool, Mapping[str, str], tuple[str, ...]]:
    """What our cordon changes on a node; as of a clean node if it is gone."""
    if node is None:
        return False, {}, ()
    ours = {key: value for key, value in node.annotations.items() if key in MARKS}
    return node.is_unschedulable, ours, tuple(taint.key for taint in node.taints)


def is_kept(stopped: Incident) -> bool:
    """Tell whether the cordon stays on purpose: a repair was asked for, and is not proven."""
    is_proven_reboot = stopped.state is IncidentState.RELEASING and stopped.rung is Rung.REBOOT
    is_decided = stopped.verdict is not None
    return stopped.repair is not None and not is_proven_reboot and not is_decided


@pytest.mark.parametrize("by", ["event", "schedule"])
@pytest.mark.parametrize("rung", [Rung.REPLACE, Rung.REBOOT])
def test_a_stop_before_any_state_leaves_a_consistent_world_within_one_interval(
    rung: Rung, by: str
) -> None:
    places: list[str] = []
    outcomes: dict[str, set[str]] = {}
    while True:
        stage, incident_id = sick(rung)
        clean = marks(stage.node())
        place = run_until(stage, incident_id, rung, len(places))
        if not place:
            break
        places.append(place)
        stopped = stage.incident(incident_id)
        was_marked = marks(stage.cluster.get_node(node_name(1))) != clean
        for port in (stage.cluster, stage.capacity, stage.instances):
            port.faults.calls.clear()

        if by == "event":
            run.watch(stage, incident_id, "ABORTED")
            stage.clock.advance(60)
        run.watch(stage)
        assert stage.incident(incident_id).is_closed, place
        stage.clock.advance(60)  # a function does not notice the stop: its slot stays for a minute
        run.watch(stage)

        check_consistent(stage, stopped, place, was_marked=was_marked)
        outcomes.setdefault(place, set()).add(str(stage.incident(incident_id).outcome))
        for _ in range(10):
            stage.clock.advance(60)
            run.watch(stage)
        check_consistent(stage, stopped, place, was_marked=was_marked)
        assert_no_event_twice(stage)
        check_opens_again(stage, stopped)

    assert {place for place in places if place in FUNCTIONS} == set(FUNCTIONS) - {
        "EscalateIncident",
        "RequestApproval",  # no policy asks here
    }
    finished = "REBOOTED" if rung is Rung.REBOOT else "REPLACED"
    assert outcomes["DrainNode"] == {"ABORTED_BY_OPERATOR"}
    assert outcomes["ReleaseNode"] == outcomes["CloseIncident"] == {finished}


def check_consistent(stage: Stage, stopped: Incident, place: str, *, was_marked: bool) -> None:
    incident = stage.incident(stopped.id)
    assert incident.is_closed, place
    assert incident.outcome is not Outcome.NEEDS_HUMAN, place
    assert stage.guards.load(CLUSTER).slots == {}, place
    assert stage.incidents.open_by_node == {}, place
    sent = Counter(stage.bus.detail_types)
    assert sent["Incident Closed"] == 1, place
    node = stage.cluster.get_node(node_name(1))
    if node is None or not node.ref.is_same_machine(stopped.node):
        assert "Cordon Left" not in sent, place
        return
    if is_kept(stopped):
        assert is_cordoned_by(node, stopped.id), place
        assert stage.mutations() == [], place
        # Nobody was paged by the close, so the cordon that stays is told of.
        assert sent["Cordon Left"] == 1, place
        assert stage.telemetry.gauges["CordonsLeft", ()][-1] == 1, place
        return
    assert marks(node) == (False, {}, ()), place
    assert sent["Node Released"] == int(was_marked or place == "CloseIncident"), place
    assert "Cordon Left" not in sent, place


def check_opens_again(stage: Stage, stopped: Incident) -> None:
    """The person's word holds for a day; then the next scan that sees the fault may open again."""
    stage.clock.advance(25 * 3600)
    node = stage.cluster.get_node(node_name(1))
    if node is None or not node.ref.is_same_machine(stopped.node):
        return
    now = stage.clock.now()
    fault = stopped.findings[0]
    again = replace(fault, evidence=replace(fault.evidence, at=now))
    opened = run.open_for(stage, again)
    is_dealt_with = stage.incident(stopped.id).outcome in (Outcome.REBOOTED, Outcome.REPLACED)
    if is_kept(stopped) and stopped.rung is Rung.REBOOT:
        assert opened is None, "cordoned and under a new boot it is still that person's"
    elif not is_dealt_with:
        assert opened is not None
    newer = run.open_for(stage, replace(again, code=95, gpu_uuid="GPU-1-5", gpu_index="5"))
    assert newer is not None


def test_a_step_that_was_under_way_when_its_execution_was_stopped_changes_nothing_for_long() -> (
    None
):
    """Lambda finishes what it has begun: the cordon may come after the close."""
    stage = Stage()
    request = stage.put(IncidentState.CORDONING)
    stage.executions.end(request.incident_id, "ABORTED")
    original = stage.guards.load

    def load(cluster: str) -> Any:
        guard = original(cluster)
        if not stage.incident(request.incident_id).is_closed:
            stage.guards.load = original  # type: ignore[method-assign]
            renewed = stage.cluster.patch_node

            def patch(*args: Any) -> bool:
                stage.cluster.patch_node = renewed  # type: ignore[method-assign]
                run.watch(stage, request.incident_id, "ABORTED")
                return renewed(*args)

            stage.cluster.patch_node = patch  # type: ignore[method-assign]
        return guard

    stage.guards.load = load  # type: ignore[method-assign]
    with pytest.raises(NodemendError):
        run.cordon(stage, request)
    assert is_cordoned_by(stage.node(), request.incident_id)
    stage.clock.advance(60)

    assert run.watch(stage).restored_nodes == 1

    assert marks(stage.node()) == (False, {}, ())
    assert times_sent(stage) == {"Incident Closed": 1, "Node Released": 1}


def test_a_stop_after_a_person_took_the_first_cordon_over_keeps_it() -> None:
    """The cordon was kept for a person before: a stop of what they started gives nothing back."""
    stage = Stage()
    first = stage.put(IncidentState.DRAINING)
    stage.cordon_as(first.incident_id)
    run.escalate(stage, first)
    run.close(stage, first)
    stage.executions.end(first.incident_id, "SUCCEEDED")
    stage.clock.advance(600)
    stage.executions.statuses[BY_HAND.arn] = ExecutionStatus("RUNNING")
    assert run.admit(stage, BY_HAND, HAND).next == "verify"
    stage.save(BY_HAND.incident_id, state=IncidentState.CORDONING)
    assert run.cordon(stage, BY_HAND).next == "drain"
    stage.executions.statuses[BY_HAND.arn] = ExecutionStatus("ABORTED")

    run.watch(stage)

    assert stage.incident(BY_HAND.incident_id).outcome is Outcome.ABORTED_BY_OPERATOR
    assert is_cordoned_by(stage.node(), BY_HAND.incident_id)
    assert [e["owner"] for e in stage.events("Cordon Left")] == [BY_HAND.incident_id]


# --- the end without a person ---------------------------------------------------------------------


@pytest.mark.case("R43")
def test_r43_a_record_of_days_ago_is_expired_and_its_healthy_node_is_left_as_it_is() -> None:
    stage = Stage()
    request = stage.put(IncidentState.DRAINING)
    stage.executions.statuses.clear()
    stage.clock.advance(3 * 86400)
    stage.boot(1, "boot-of-today")
    stage.cluster.faults.calls.clear()

    for _ in range(3):
        run.watch(stage)
        stage.clock.advance(60)

    incident = stage.incident(request.incident_id)
    assert (incident.outcome, incident.reason and incident.reason.code) == (
        Outcome.SKIPPED,
        "expired",
    )
    assert stage.mutations() == []
    assert marks(stage.node()) == (False, {}, ())
    assert stage.cluster.events == []
    # What still holds is found by the next scan, on its own evidence.
    fresh = xid_finding(evidence=replace(xid_finding().evidence, at=stage.clock.now()))
    assert run.open_for(stage, fresh) is not None


@pytest.mark.case("R43")
def test_r43_if_our_old_cordon_is_still_on_the_healthy_node_it_is_taken_off() -> None:
    stage = Stage()
    request = stage.put(IncidentState.DRAINING)
    stage.cordon_as(request.incident_id)
    stage.executions.statuses.clear()
    stage.clock.advance(3 * 86400)
    stage.boot(1, "boot-of-today")

    assert run.watch(stage).restored_nodes == 1
    assert marks(stage.node()) == (False, {}, ())


@pytest.mark.case("R43")
def test_r43_on_the_same_boot_a_person_is_called_and_the_cordon_stays() -> None:
    stage = Stage()
    request = stage.put(IncidentState.DRAINING)
    stage.cordon_as(request.incident_id)
    stage.executions.statuses.clear()
    stage.clock.advance(3 * 86400)

    run.watch(stage)

    assert stage.incident(request.incident_id).outcome is Outcome.NEEDS_HUMAN
    assert is_cordoned_by(stage.node(), request.incident_id)


@pytest.mark.case("R28")
@pytest.mark.parametrize("how", ["gone", "another"])
def test_r28_an_execution_that_died_with_its_machine_calls_nobody(how: str) -> None:
    stage = Stage()
    request = stage.put(IncidentState.DRAINING)
    if how == "gone":
        stage.cluster.remove_node(node_name(1))
    else:
        stage.swap_machine()
    stage.executions.end(request.incident_id, "FAILED")
    stage.cluster.faults.calls.clear()

    assert run.watch(stage).closed == 1

    incident = stage.incident(request.incident_id)
    assert (incident.outcome, incident.reason and incident.reason.code) == (
        Outcome.SUPERSEDED,
        "already_gone",
    )
    assert not stage.holds_slot(request.incident_id)
    assert stage.mutations() == []


def test_an_end_that_a_step_has_decided_stands_whatever_became_of_the_node() -> None:
    stage = Stage()
    request = stage.put(IncidentState.DRAINING)
    decided = (Outcome.NEEDS_HUMAN, Reason("drain_deadline", "why"))
    stage.save(request.incident_id, verdict=decided)
    stage.cluster.remove_node(node_name(1))
    stage.executions.end(request.incident_id, "FAILED")

    run.watch(stage)

    incident = stage.incident(request.incident_id)
    assert (incident.outcome, incident.reason) == decided


def test_a_cluster_that_cannot_be_asked_is_asked_once_and_the_ends_are_told_without_it() -> None:
    stage = Stage()
    requests = [stage.put(IncidentState.DRAINING, number) for number in (1, 2)]
    for request in requests:
        stage.executions.end(request.incident_id, "FAILED")
    stage.clusters.faults.calls.clear()
    stage.clusters.faults.fail("open", ClusterUnavailableError("no answer"), times=None)

    result = run.watch(stage)

    assert (result.closed, result.unseen_clusters) == (2, 1)
    assert {stage.incident(r.incident_id).outcome for r in requests} == {Outcome.NEEDS_HUMAN}
    assert len(stage.clusters.faults.calls) == 1


# --- closes that were left half done ------------------------------------------------------------


def test_a_watch_that_dies_amid_a_close_leaves_nothing_undone() -> None:
    """The slot goes last of what must not be lost: by it the next watch sees that there is more."""

    def build() -> tuple[Stage, Callable[[], Any]]:
        stage = Stage()
        request = stage.put(IncidentState.DRAINING)
        stage.cordon_as(request.incident_id)
        stage.executions.end(request.incident_id, "FAILED")
        return stage, lambda: run.watch(stage)

    def check(stage: Stage, result: Any) -> None:
        stage.clock.advance(180)
        run.watch(stage)
        assert stage.guards.load(CLUSTER).slots == {}
        assert times_sent(stage)["Incident Closed"] == 1
        # The node is a person's: the same fault opens nothing, and the machine has its record.
        assert [key[3] for key in stage.incidents.handled] == [xid_finding().key]
        assert stage.history.recall(CLUSTER, [instance(instance_id(1))])
        assert run.open_for(stage, xid_finding()) is None

    assert after_every_crash(build, check) >= 20


# --- leases ---------------------------------------------------------------------------------------


@pytest.mark.case("R35")
def test_r35_a_step_that_is_entered_without_time_leaves_a_lease_that_ends() -> None:
    stage = Stage()
    request = stage.put(IncidentState.CORDONING)
    stage.invocation.left_s = 0

    assert run.cordon(stage, request).next == "drain"
    slot = stage.guards.load(CLUSTER).slots["uid-1"]
    assert slot.expires_at > stage.clock.now()

    # The execution dies with it: nobody is locked out for ever.
    stage.executions.end(request.incident_id, "FAILED")
    stage.clock.advance(7200)
    run.watch(stage)
    assert stage.guards.load(CLUSTER).slots == {}


@pytest.mark.case("R35")
def test_r35_a_retry_after_the_leases_end_goes_on_and_does_nothing_twice() -> None:
    stage = Stage()
    request = stage.put(IncidentState.CORDONING)
    stage.cluster.add_pod(pod("train-0"))
    stage.invocation.left_s = 0
    run.cordon(stage, request)
    stage.clock.advance(7200)
    assert run.watch(stage).freed_slots == 0  # its execution runs: nobody takes over
    expired = stage.guards.load(CLUSTER).slots["uid-1"].expires_at
    assert expired < stage.clock.now()

    assert run.cordon(stage, request).next == "drain"
    assert run.drain(stage, request).next == "wait"

    assert stage.guards.load(CLUSTER).slots["uid-1"].expires_at > stage.clock.now()
    assert stage.mutations() == [f"patch nodes/{node_name(1)}", "evict pods/ml/train-0"]


def to_be_replaced(stage: Stage, request: Request) -> None:
    """Bring an incident to the point at which its instance is to be terminated."""
    assert run.cordon(stage, request).next == "drain"
    assert run.drain(stage, request).next == "drained"


@pytest.mark.case("R36")
def test_r36_a_worker_that_wakes_after_its_lease_was_taken_makes_no_call() -> None:
    stage = Stage()
    first = stage.put(IncidentState.CORDONING)
    to_be_replaced(stage, first)
    original = stage.capacity.group
    slept: list[int] = []

    def group(*args: Any) -> Any:
        found = original(*args)
        if not slept:
            # The first worker's process is frozen here, and its execution is given up.
            slept.append(1)
            stage.executions.end(first.incident_id, "TIMED_OUT")
            stage.clock.advance(1800)
            run.watch(stage)
            stage.clock.advance(60)
            run.watch(stage)
            second = Request("hand-1", BY_HAND.arn)
            stage.executions.statuses[second.arn] = ExecutionStatus("RUNNING")
            assert run.admit(stage, second, HAND).next == "verify"
            stage.save(second.incident_id, state=IncidentState.CORDONING)
            to_be_replaced(stage, second)
            assert run.start(stage, second).next == "check"
        return found

    stage.capacity.group = group  # type: ignore[method-assign]
    with pytest.raises(NodemendError):
        run.start(stage, first)

    assert [m for m in stage.mutations() if "terminate" in m] == [f"terminate {instance_id(1)}"]
    assert stage.incident(first.incident_id).outcome is Outcome.NEEDS_HUMAN
    assert is_cordoned_by(stage.node(), "hand-1")


@pytest.mark.case("R36")
def test_r36_a_slot_is_taken_over_only_after_the_lease_and_when_the_execution_has_ended() -> None:
    stage = Stage()
    request = stage.put(IncidentState.CORDONING)
    to_be_replaced(stage, request)
    run.start(stage, request)

    stage.clock.advance(86400)
    assert run.watch(stage).freed_slots == 0
    assert stage.holds_slot(request.incident_id)


@pytest.mark.case("R36")
def test_r36_without_its_slot_a_worker_makes_no_call() -> None:
    stage = Stage()
    request = stage.put(IncidentState.CORDONING)
    to_be_replaced(stage, request)
    guard = stage.guards.load(CLUSTER)
    stage.guards.store(replace(guard, slots={}))

    with pytest.raises(LeaseLostError):
        run.start(stage, request)
    assert not [m for m in stage.mutations() if "terminate" in m]


# --- one blocked node -----------------------------------------------------------------------------


@pytest.mark.case("R29")
def test_r29_one_node_that_cannot_be_drained_keeps_the_others_not_waiting() -> None:
    stage = Stage(nodes=20, policy=enforce(limits=Limits(MaxUnavailable(3, 100))))
    requests = {}
    for number in (1, 2, 3):
        requests[number] = stage.put(
            IncidentState.CORDONING, number, findings=(xid_finding(number),)
        )
        stage.cluster.add_pod(pod(f"train-{number}", number))
    stage.cluster.answer_evictions("ml", "train-2", *[PDB_429] * 50)

    for request in requests.values():
        assert run.cordon(stage, request).next == "drain"
        run.drain(stage, request)
    ends = {number: run.drain(stage, request).next for number, request in requests.items()}

    assert ends == {1: "drained", 2: "wait", 3: "drained"}
    assert len({request.arn for request in requests.values()}) == 3
    assert [e["incident_id"] for e in stage.events("Drain Progress")] == [requests[2].incident_id]
    assert {e["incident_id"] for e in stage.events("Node Drained")} == {
        requests[1].incident_id,
        requests[3].incident_id,
    }
