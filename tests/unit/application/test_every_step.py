"""What holds for each step of the state machine, whatever it does."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nodemend.domain.errors import (
    ConcurrentUpdateError,
    IllegalTransitionError,
    InvalidInputError,
    LeaseLostError,
    PolicyInvalidError,
    SupersededError,
)
from nodemend.domain.faults import Mode, Rung
from nodemend.domain.guard import release
from nodemend.domain.incidents import (
    DrainRecord,
    IncidentState,
    Outcome,
    RepairRecord,
    move,
)
from nodemend.domain.nodes import NodeRef
from nodemend.domain.policy import ApprovalPolicy
from nodemend.domain.reasons import Reason
from tests.fakes.system import START
from tests.unit.application import run
from tests.unit.application.stage import (
    CLUSTER,
    GROUP,
    Request,
    Stage,
    budget,
    enforce,
    gpu_node,
    instance_id,
    pod,
    samples,
    temperature_finding,
    xid_labels,
)

STATES = {
    "verify_fault": IncidentState.VERIFYING,
    "request_approval": IncidentState.APPROVING,
    "cordon_node": IncidentState.CORDONING,
    "drain_node": IncidentState.DRAINING,
    "start_repair": IncidentState.REPAIRING,
    "check_repair": IncidentState.CHECKING,
    "validate_node": IncidentState.VALIDATING,
    "release_node": IncidentState.RELEASING,
    "escalate_incident": IncidentState.DRAINING,
}
DISRUPTIVE = ("cordon_node", "drain_node", "start_repair")
LOOKS_AT_NODE = ("verify_fault", "request_approval", "cordon_node", "drain_node", "start_repair")


def ready_for(step: str, **policy: Any) -> tuple[Stage, Request]:
    """A stage on which the step has something to do."""
    stage = Stage(policy=enforce(**policy))
    stage.cluster.add_pod(pod("train-0"))
    stage.cluster.add_budget(budget(match_labels={"app": "train-0"}))
    stage.metrics.answer("xid-count", samples(xid_labels(1, 79, 3)))
    state = STATES[step]
    changes: dict[str, Any] = {}
    if step == "request_approval":
        changes["approval_policy"] = ApprovalPolicy()
    if step in ("start_repair", "check_repair", "validate_node", "release_node"):
        changes["drain"] = DrainRecord(START, is_drained=True)
        stage.cluster.remove_pod("ml", "train-0")
    if step in ("check_repair", "validate_node", "release_node"):
        new = gpu_node(9).ref if step != "check_repair" else None
        changes["repair"] = repair(new)
    if step in ("drain_node", "start_repair", "release_node"):
        request = stage.put(IncidentState.CORDONING)
        run.cordon(stage, request)
        now = stage.clock.now()
        stage.save(request.incident_id, state=state, state_since=now, **changes)
    else:
        request = stage.put(state, **changes)
    if step in ("check_repair", "validate_node", "release_node"):
        stage.capacity.set_state(CLUSTER, instance_id(1), "Terminating")
    if step == "validate_node":
        stage.replace_node()
    stage.cluster.faults.calls.clear()
    stage.capacity.faults.calls.clear()
    stage.bus.accepted.clear()
    return stage, request


def repair(new: NodeRef | None = None) -> RepairRecord:
    """A repair that was asked for."""
    return RepairRecord(
        rung=Rung.REPLACE,
        group=GROUP,
        before=tuple(instance_id(n) for n in range(1, 5)),
        desired_before=4,
        intended_at=START,
        started_at=START,
        replacement_instance_id=new.instance_id if new else "",
        replacement_node=new,
    )


@pytest.mark.parametrize("step", [name for name in run.STEPS if name != "escalate_incident"])
def test_a_step_of_an_unknown_incident_names_the_incident(step: str) -> None:
    with pytest.raises(InvalidInputError, match="incident_id: 01NOBODY is unknown"):
        run.STEPS[step](Stage(), Request("01NOBODY", "arn"))


@pytest.mark.parametrize("step", run.STEPS)
def test_a_step_of_a_closed_incident_changes_nothing(step: str) -> None:
    stage, request = ready_for(step)
    stage.save(request.incident_id, verdict=(Outcome.SKIPPED, Reason("x", "y")))
    run.close(stage, request)
    before = stage.mutations(), stage.incident(request.incident_id)

    with pytest.raises(SupersededError, match="closed already"):
        run.STEPS[step](stage, request)

    assert (stage.mutations(), stage.incident(request.incident_id)) == before


@pytest.mark.parametrize("step", run.STEPS)
def test_a_step_of_another_execution_changes_nothing(step: str) -> None:
    stage, request = ready_for(step)
    copy = Request(request.incident_id, request.arn + "-copy")
    before = stage.incident(request.incident_id)

    with pytest.raises(SupersededError, match="belongs to execution"):
        run.STEPS[step](stage, copy)

    assert stage.mutations() == []
    assert stage.incident(request.incident_id) == before


@pytest.mark.parametrize("step", run.STEPS)
def test_a_step_after_the_decided_end_only_points_to_the_close(step: str) -> None:
    stage, request = ready_for(step)
    stage.save(request.incident_id, verdict=(Outcome.NEEDS_HUMAN, Reason("asg_suspended", "x")))

    result = run.STEPS[step](stage, request)

    assert result.next == "close"
    assert stage.mutations() == []
    assert stage.incident(request.incident_id).verdict == (
        Outcome.NEEDS_HUMAN,
        Reason("asg_suspended", "x"),
    )


@pytest.mark.parametrize(
    ("step", "word"),
    [
        ("verify_fault", "cordon"),
        ("request_approval", "approved"),
        ("cordon_node", "drain"),
        ("drain_node", "drained"),
        ("start_repair", "check"),
        ("check_repair", "validate"),
        ("validate_node", "release"),
    ],
)
def test_a_step_that_an_earlier_try_finished_only_says_so_again(step: str, word: str) -> None:
    stage, request = ready_for(step)
    following = {
        "cordon": IncidentState.CORDONING,
        "approved": IncidentState.CORDONING,
        "drain": IncidentState.DRAINING,
        "drained": IncidentState.REPAIRING,
        "check": IncidentState.CHECKING,
        "validate": IncidentState.VALIDATING,
        "release": IncidentState.RELEASING,
    }[word]
    before = stage.save(request.incident_id, state=following)

    assert run.STEPS[step](stage, request).next == word

    assert stage.mutations() == []
    assert stage.incident(request.incident_id) == before


@pytest.mark.case("R25")
@pytest.mark.parametrize("step", LOOKS_AT_NODE)
def test_r25_a_new_machine_under_the_old_name_ends_the_incident_untouched(step: str) -> None:
    stage, request = ready_for(step)
    stage.swap_machine()

    with pytest.raises(SupersededError, match="uid uid-9 on i-0") as caught:
        run.STEPS[step](stage, request)
    assert stage.mutations() == []

    result = run.close(stage, request, "SupersededError", str(caught.value))

    assert result.outcome == "SUPERSEDED"
    incident = stage.incident(request.incident_id)
    assert incident.is_closed
    assert incident.outcome is Outcome.SUPERSEDED
    assert not stage.holds_slot(request.incident_id)
    assert stage.mutations() == []
    assert not stage.node().is_unschedulable
    assert stage.events("Incident Escalated") == []
    assert stage.events("Incident Closed")[0]["remedy"] == ""


@pytest.mark.case("R25")
@pytest.mark.parametrize("step", LOOKS_AT_NODE)
def test_r25_the_same_name_on_another_instance_is_another_machine(step: str) -> None:
    stage, request = ready_for(step)
    stage.cluster.change_node(
        gpu_node(1).ref.name,
        lambda node: replace(node, ref=replace(node.ref, instance_id=instance_id(9))),
    )

    with pytest.raises(SupersededError, match=f"uid-1 on {instance_id(9)} now"):
        run.STEPS[step](stage, request)
    assert stage.mutations() == []


@pytest.mark.parametrize("step", LOOKS_AT_NODE)
def test_a_step_whose_node_is_gone_is_superseded(step: str) -> None:
    stage, request = ready_for(step)
    stage.cluster.remove_node(gpu_node(1).ref.name)

    with pytest.raises(SupersededError, match="is gone"):
        run.STEPS[step](stage, request)
    assert stage.mutations() == []


@pytest.mark.parametrize("step", [*DISRUPTIVE, "validate_node", "check_repair", "request_approval"])
def test_a_step_without_its_slot_changes_nothing(step: str) -> None:
    stage, request = ready_for(step)
    if step == "validate_node":
        stage.metrics.fail()
    stage.guards.store(release(stage.guards.load(CLUSTER), request.incident_id))

    with pytest.raises(LeaseLostError, match="holds no slot"):
        run.STEPS[step](stage, request)
    assert stage.mutations() == []


@pytest.mark.parametrize("step", DISRUPTIVE)
def test_a_slot_that_another_incident_holds_is_no_lease(step: str) -> None:
    stage, request = ready_for(step)
    guard = stage.guards.load(CLUSTER)
    slot = replace(guard.slots["uid-1"], incident_id="01OTHER")
    stage.guards.store(replace(guard, slots={"uid-1": slot}))

    with pytest.raises(LeaseLostError):
        run.STEPS[step](stage, request)
    assert stage.mutations() == []


@pytest.mark.parametrize("step", DISRUPTIVE)
def test_a_change_is_made_under_a_lease_that_outlives_the_invocation_and_the_wait(
    step: str,
) -> None:
    stage, request = ready_for(step)
    stage.clock.advance(3600)  # the first lease has run out long ago, and nobody has taken it

    run.STEPS[step](stage, request)

    slot = stage.guards.load(CLUSTER).slots["uid-1"]
    held_s = (slot.expires_at - stage.clock.now()).total_seconds()
    assert held_s == 60 + 20 + 60  # the invocation, the first wait, the margin


@pytest.mark.parametrize("step", DISRUPTIVE)
def test_a_lease_that_ends_within_the_invocation_is_none(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, request = ready_for(step)
    left = iter([0.0, *[10_000.0] * 9])
    monkeypatch.setattr(stage.invocation, "remaining_s", lambda: next(left))

    with pytest.raises(LeaseLostError, match="ends before this invocation"):
        run.STEPS[step](stage, request)
    assert stage.mutations() == []


@pytest.mark.parametrize("mode", [Mode.DRY_RUN, Mode.CORDON_ONLY])
@pytest.mark.parametrize("step", DISRUPTIVE)
def test_a_mode_that_became_stricter_in_flight_stops_the_next_step(step: str, mode: Mode) -> None:
    stage, request = ready_for(step)
    stage.policies.policy = enforce(mode=mode, version="v2")

    result = run.STEPS[step](stage, request)

    incident = stage.incident(request.incident_id)
    if step == "cordon_node" and mode is Mode.CORDON_ONLY:
        assert result.next == "drain"
        assert stage.mutations() == [f"patch nodes/{gpu_node(1).ref.name}"]
        return
    assert result.next == "close"
    assert stage.mutations() == []
    assert incident.verdict is not None
    assert incident.verdict[0] is Outcome.ABORTED_BY_OPERATOR
    assert incident.verdict[1].code == "mode_changed"
    assert str(mode) in incident.verdict[1].text


@pytest.mark.parametrize("step", [*DISRUPTIVE, "validate_node", "verify_fault", "request_approval"])
def test_a_policy_that_became_invalid_in_flight_stops_every_change(step: str) -> None:
    stage, request = ready_for(step)
    stage.policies.problem = "the policy is invalid: mode"

    with pytest.raises(PolicyInvalidError):
        run.STEPS[step](stage, request)
    assert stage.mutations() == []


@pytest.mark.parametrize("step", [*DISRUPTIVE, "check_repair", "validate_node", "release_node"])
def test_a_record_that_pins_no_cluster_is_refused(step: str) -> None:
    stage, request = ready_for(step)
    stage.save(request.incident_id, cluster_policy=None)

    with pytest.raises(PolicyInvalidError, match="pins no cluster"):
        run.STEPS[step](stage, request)
    assert stage.mutations() == []


def test_a_step_out_of_order_is_an_illegal_move_and_changes_nothing() -> None:
    stage, request = ready_for("drain_node")
    stage.save(request.incident_id, state=IncidentState.ADMITTED)

    with pytest.raises(IllegalTransitionError, match="admitted -> draining"):
        run.drain(stage, request)
    assert stage.mutations() == []


@pytest.mark.parametrize("step", ["cordon_node", "drain_node", "start_repair"])
def test_a_guard_that_keeps_changing_ends_the_step_for_a_retry(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, request = ready_for(step)
    monkeypatch.setattr(stage.guards, "store", lambda guard: False)

    with pytest.raises(ConcurrentUpdateError, match="changed 5 times"):
        run.STEPS[step](stage, request)
    assert stage.mutations() == []


def attach_evidence_at(stage: Stage, request: Request) -> Callable[[], None]:
    """Let new evidence be stored as if another Lambda did it now."""

    def attach() -> None:
        known = stage.incident(request.incident_id)
        stage.save(request.incident_id, findings=(*known.findings, temperature_finding(gpu=5)))

    return attach


@pytest.mark.parametrize("step", [name for name in run.STEPS if name != "escalate_incident"])
def test_evidence_that_arrives_during_a_step_makes_it_start_again_and_nothing_happens_twice(
    step: str,
) -> None:
    stage, request = ready_for(step)
    attach = attach_evidence_at(stage, request)
    original = stage.incidents.get

    def get(incident_id: str) -> Any:
        found = original(incident_id)
        stage.incidents.get = original  # type: ignore[method-assign]
        attach()
        return found

    stage.incidents.get = get  # type: ignore[method-assign]
    with pytest.raises(ConcurrentUpdateError):
        run.STEPS[step](stage, request)

    run.STEPS[step](stage, request)

    assert len(stage.incident(request.incident_id).findings) == 2
    assert len([one for one in stage.mutations() if one.startswith(("patch", "terminate"))]) <= 1
    evictions = [one for one in stage.mutations() if one.startswith("evict")]
    assert len(evictions) == len(set(evictions))


def test_moving_on_from_a_closed_incident_is_illegal() -> None:
    stage, request = ready_for("verify_fault")
    stage.save(request.incident_id, verdict=(Outcome.SKIPPED, Reason("x", "y")))
    run.close(stage, request)

    with pytest.raises(IllegalTransitionError):
        move(stage.incident(request.incident_id), IncidentState.VERIFYING, stage.clock.now())
