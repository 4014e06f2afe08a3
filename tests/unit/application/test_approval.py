"""A person's yes: asked once, waited for, and never acted on blindly."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from nodemend.application.answer_approval import AnswerApprovalPorts, answer_approval
from nodemend.contracts.approving import AnswerApprovalRequest
from nodemend.domain.errors import (
    AwsForbiddenError,
    ClusterUnavailableError,
    ConcurrentUpdateError,
    IllegalTransitionError,
    InvalidInputError,
    LeaseLostError,
    SupersededError,
)
from nodemend.domain.faults import FaultClass, Mode, Rung
from nodemend.domain.guard import release
from nodemend.domain.incidents import IncidentState, Outcome, RepairRecord
from nodemend.domain.nodes import OWNER_ANNOTATION, Taint
from nodemend.domain.policy import ApprovalPoint, ApprovalPolicy, Waits
from nodemend.domain.reasons import Reason
from tests.unit.application import run
from tests.unit.application.machine import Machine
from tests.unit.application.run import HAND
from tests.unit.application.stage import (
    CLUSTER,
    CLUSTER_POLICY,
    GROUP,
    Request,
    Stage,
    after_every_crash,
    enforce,
    instance_id,
    node_name,
    pod,
    samples,
    temperature_finding,
    times_sent,
    words,
    xid_finding,
    xid_labels,
)
from tests.unit.application.test_pause import open_breaker, put_pause

S = IncidentState
CORDON = ApprovalPolicy()
REPAIR = ApprovalPolicy(before=ApprovalPoint.REPAIR)
LADDER = (Rung.REBOOT, Rung.REPLACE, Rung.HUMAN)
XID_79 = samples(xid_labels(1, 79, 3))
POINTS = pytest.mark.parametrize("before", ["cordon", "repair"])


def admitted(approval: ApprovalPolicy = CORDON, **policy: Any) -> tuple[Stage, str]:
    """A stage with a sick node whose incident was admitted; the incident's id."""
    stage = Stage(policy=enforce(approval=approval, **policy))
    stage.cluster.add_pod(pod("train-0"))
    stage.metrics.answer("xid-count", XID_79)
    incident_id = run.open_for(stage, xid_finding())
    assert incident_id is not None
    stage.dispatch_all(incident_id)
    return stage, incident_id


def asked(before: str, **changes: Any) -> tuple[Stage, Request]:
    """A stage on which the incident has asked and nobody has answered yet."""
    approval = CORDON if before == "cordon" else REPAIR
    policy = {name: changes.pop(name) for name in ("plans", "mode") if name in changes}
    stage = Stage(policy=enforce(approval=approval, **policy))
    stage.metrics.answer("xid-count", XID_79)
    if before == "cordon":
        request = stage.put(S.APPROVING, **changes)
    else:
        request = stage.put(S.CORDONING, **changes)
        run.cordon(stage, request)
        run.drain(stage, request)
    assert run.approve(stage, request, before).next == "wait"
    stage.bus.accepted.clear()
    stage.cluster.faults.calls.clear()
    return stage, request


def answer(stage: Stage, request: Request, word: str = "yes", **given: Any) -> Any:
    fields = {"answered_by": "alice", "why": "the job is done", **given}
    document = {"incident_id": request.incident_id, "answer": word, **fields}
    return answer_approval(AnswerApprovalRequest(input=document), ports=ports(stage))


def ports(stage: Stage) -> AnswerApprovalPorts:
    return AnswerApprovalPorts(
        incidents=stage.step.incidents, outbox=stage.step.outbox, clock=stage.clock
    )


def late(stage: Stage, seconds: float = 3600) -> None:
    stage.clock.advance(seconds)


def is_as_before(stage: Stage) -> bool:
    node = stage.node()
    return not (node.is_unschedulable or node.taints or OWNER_ANNOTATION in node.annotations)


def ended(stage: Stage, request: Request) -> tuple[Outcome | None, str]:
    """Close the incident, and return outcome and reason."""
    run.close(stage, request)
    incident = stage.incident(request.incident_id)
    assert incident.is_closed
    assert not stage.holds_slot(request.incident_id)
    assert incident.reason is not None
    return incident.outcome, incident.reason.code


# --- whole remediations ---------------------------------------------------------------------------


def yes_after(stage: Stage, incident_id: str, at_s: float) -> tuple[float, Callable[[], object]]:
    request = stage.request(incident_id)
    return at_s, lambda: answer(stage, request)


def test_before_the_cordon_a_yes_is_followed_by_another_look_and_the_repair() -> None:
    stage, incident_id = admitted()

    def arrive() -> None:
        stage.metrics.clear()
        stage.replace_node()

    machine = Machine(stage, [yes_after(stage, incident_id, 900), (1200, arrive)])
    machine.run(incident_id)

    incident = stage.incident(incident_id)
    assert incident.outcome is Outcome.REPLACED
    assert words(incident.timeline) == [
        "open_incident: Incident Opened",
        "dispatch_incidents: Incident Admitted",
        "verify_fault: Fault Verified",
        "request_approval: Approval Requested",
        "answer_approval: Approval Answered",
        "request_approval: Fault Verified",
        "cordon_node: Node Cordoned",
        "drain_node: Node Drained",
        "start_repair: Repair Started",
        "validate_node: Repair Proven",
        "release_node: Node Released",
        "close_incident: Incident Closed",
    ]
    assert "ApproveRepair" not in machine.visited
    assert stage.events("Incident Admitted")[0]["approval"] == "cordon"
    (told,) = stage.events("Approval Requested")
    assert told["question"] == (
        f"May {node_name(1)} ({instance_id(1)}) be cordoned, drained and replaced?"
    )
    assert told["reason"]["text"] == "XID 79 on GPU 3"
    assert told["evidence"].startswith("rule xid-count, value 1 at 20")
    assert (told["rung"], told["rungs"], told["number"]) == ("replace", ["replace"], 1)
    assert told["findings"][0]["evidence"]["rule_id"] == "xid-count"
    (said,) = stage.events("Approval Answered")
    assert (said["answer"], said["answered_by"], said["why"]) == ("yes", "alice", "the job is done")
    assert said["reason"] == {"code": "approved", "text": "alice said yes: the job is done"}


def test_before_the_repair_the_drained_node_waits_for_the_yes() -> None:
    stage, incident_id = admitted(REPAIR)

    def arrive() -> None:
        stage.metrics.clear()
        stage.replace_node()

    def only_drained() -> None:
        assert stage.capacity.calls == [] or all(
            call.verb != "terminate" for call in stage.capacity.calls
        )
        assert stage.node().is_unschedulable

    timeline = [(800, only_drained), yes_after(stage, incident_id, 900), (1200, arrive)]
    machine = Machine(stage, timeline)
    machine.run(incident_id)

    incident = stage.incident(incident_id)
    assert incident.outcome is Outcome.REPLACED
    assert "ApproveCordon" not in machine.visited
    assert stage.events("Incident Admitted")[0]["approval"] == "repair"
    (told,) = stage.events("Approval Requested")
    assert told["question"].endswith("which is cordoned and drained, be replaced?")
    assert "NodemendApprovalRequested" in [event["reason"] for event in stage.cluster.events]


def test_without_an_approval_in_the_policy_nobody_is_asked() -> None:
    stage, incident_id = admitted()
    stage.save(incident_id, approval_policy=None)
    request = stage.request(incident_id)
    run.admit(stage, request)
    assert run.verify(stage, request).next == "cordon"


def test_a_dry_run_asks_nobody_and_tells_what_it_would_ask() -> None:
    stage, incident_id = admitted(mode=Mode.DRY_RUN)
    machine = Machine(stage)

    machine.run(incident_id)

    assert stage.incident(incident_id).outcome is Outcome.OBSERVED
    assert "Approval Requested" not in stage.bus.detail_types
    assert stage.events("Incident Admitted")[0]["approval"] == "cordon"


def test_who_starts_by_hand_is_asked_all_the_same() -> None:
    stage = Stage(policy=enforce(approval=CORDON))
    Machine(stage, [(900, lambda: None)]).run("hand-1", HAND)
    assert stage.incident("hand-1").outcome is Outcome.SKIPPED
    assert stage.incident("hand-1").reason is not None
    (told,) = stage.events("Approval Requested")
    assert told["evidence"] == "the word of alice"
    assert stage.mutations() == []


def test_cordon_only_asks_for_the_cordon() -> None:
    stage, incident_id = admitted(mode=Mode.CORDON_ONLY)
    Machine(stage, [yes_after(stage, incident_id, 60)]).run(incident_id)
    assert "be cordoned? The policy stops" in stage.events("Approval Requested")[0]["question"]
    assert stage.incident(incident_id).outcome is Outcome.NEEDS_HUMAN


def test_cordon_only_never_comes_to_the_repair_and_asks_nothing_before_it() -> None:
    stage, incident_id = admitted(REPAIR, mode=Mode.CORDON_ONLY)
    Machine(stage).run(incident_id)
    assert "Approval Requested" not in stage.bus.detail_types
    assert stage.events("Incident Admitted")[0]["approval"] == ""


# --- which rungs ----------------------------------------------------------------------------------


def test_a_rung_that_needs_no_yes_is_not_asked_about() -> None:
    stage, incident_id = admitted(
        ApprovalPolicy(rungs=(Rung.REPLACE,)), plans={FaultClass.XID: (Rung.REBOOT, Rung.HUMAN)}
    )
    request = stage.request(incident_id)
    run.admit(stage, request)
    assert run.verify(stage, request).next == "cordon"
    assert stage.events("Incident Admitted")[0]["approval"] == ""


FAILED_REBOOT = RepairRecord(Rung.REBOOT, GROUP, (), 4, intended_at=None, boot_id_before="boot-1")  # type: ignore[arg-type]


def on_second_rung(approval: ApprovalPolicy) -> tuple[Stage, Request]:
    """A drained node whose reboot has failed: the replacement comes next."""
    stage = Stage(policy=enforce(approval=approval, plans={FaultClass.XID: LADDER}))
    stage.metrics.answer("xid-count", XID_79)
    request = stage.put(S.CORDONING)
    stage.save(request.incident_id, approval_policy=None)
    run.cordon(stage, request)
    run.drain(stage, request)
    failed = replace(FAILED_REBOOT, intended_at=stage.clock.now())
    stage.save(
        request.incident_id,
        approval_policy=approval,
        state=S.ESCALATING,
        rung_index=1,
        attempts=(failed,),
    )
    stage.boot()  # our own reboot: the boot of the findings is over
    stage.bus.accepted.clear()
    return stage, request


def test_a_later_rung_that_nobody_was_asked_about_is_asked_about_before_its_repair() -> None:
    stage, request = on_second_rung(ApprovalPolicy(rungs=(Rung.REPLACE,)))

    assert run.start(stage, request).next == "approve_repair"
    assert run.approve(stage, request, "repair").next == "wait"
    assert stage.events("Approval Requested")[0]["rungs"] == ["replace"]
    answer(stage, request)
    assert run.approve(stage, request, "repair").next == "approved"
    assert run.start(stage, request).next == "check"
    assert stage.mutations()[-1] == f"terminate {instance_id(1)}"


def test_a_repair_that_failed_is_its_own_evidence_and_not_a_recovery() -> None:
    """The findings are about the boot before our reboot: they would say that it has healed."""
    stage, request = on_second_rung(REPAIR)
    run.start(stage, request)

    assert run.approve(stage, request, "repair").next == "wait"
    assert stage.incident(request.incident_id).verdict is None


def test_each_repair_is_asked_about_anew_and_an_old_yes_does_not_count() -> None:
    stage, request = asked("repair", plans={FaultClass.XID: LADDER})
    answer(stage, request)
    assert run.approve(stage, request, "repair").next == "approved"
    assert run.start(stage, request).next == "check"
    incident = stage.incident(request.incident_id)
    assert incident.repair is not None
    stage.save(
        request.incident_id,
        state=S.ESCALATING,
        rung_index=1,
        attempts=(incident.repair,),
        repair=None,
    )

    assert run.start(stage, request).next == "approve_repair"
    assert run.approve(stage, request, "repair").next == "wait"
    told = stage.events("Approval Requested")[-1]
    assert (told["number"], told["rungs"]) == (2, ["replace"])
    # Bob answers the first message now: he does not mean this.
    with pytest.raises(InvalidInputError, match=r"asks for the 2\. time"):
        answer(stage, request, answered_by="bob")
    with pytest.raises(InvalidInputError, match="about replace, not reboot"):
        answer(stage, request, answered_by="bob", rung="reboot")
    assert answer(stage, request, answered_by="bob", rung="replace").changed
    assert run.approve(stage, request, "repair").next == "approved"


def test_one_yes_before_the_cordon_is_for_the_whole_ladder() -> None:
    stage, request = asked("cordon", plans={FaultClass.XID: LADDER})
    question = stage.incident(request.incident_id).timeline[-1]
    assert question.what == "Approval Requested"
    answer(stage, request)
    assert run.approve(stage, request).next == "approved"
    assert run.cordon(stage, request).next == "drain"
    assert run.drain(stage, request).next == "drained"
    assert run.start(stage, request).next == "check"
    stage.save(request.incident_id, state=S.ESCALATING, rung_index=1, repair=None)
    assert run.start(stage, request).next == "check"


# --- nothing begins without a yes -----------------------------------------------------------------


def test_a_cordon_that_nobody_approved_is_refused_whatever_way_led_to_it() -> None:
    stage, request = asked("cordon")
    with pytest.raises(IllegalTransitionError, match="nobody has approved"):
        run.cordon(stage, request)
    assert stage.mutations() == []


@pytest.mark.parametrize("word", ["", "no"])
def test_a_repair_that_nobody_approved_is_not_begun(word: str) -> None:
    stage, request = asked("repair")
    if word:
        answer(stage, request, word)
    assert run.start(stage, request).next == "approve_repair"
    assert "terminate" not in " ".join(stage.mutations())


# --- no, and silence ------------------------------------------------------------------------------


@POINTS
def test_a_no_ends_it_with_the_node_as_it_was(before: str) -> None:
    stage, request = asked(before)

    said = answer(stage, request, "no", why="the job ends in an hour")
    result = run.approve(stage, request, before)

    assert said.message.endswith("the incident ends, and the node is as it was")
    assert result.next == "close"
    assert ended(stage, request) == (Outcome.ABORTED_BY_OPERATOR, "approval_denied")
    assert is_as_before(stage)
    closed = stage.events("Incident Closed")[0]
    assert closed["reason"]["text"] == "alice said no: the job ends in an hour"
    assert "for a day" in closed["remedy"]
    assert times_sent(stage).get("Node Released", 0) == (before == "repair")


@POINTS
def test_silence_is_a_no_and_restores_the_node(before: str) -> None:
    stage, request = asked(before)
    late(stage, 3599)
    assert run.approve(stage, request, before).wait_s == 1
    assert stage.incident(request.incident_id).verdict is None
    late(stage, 1)

    assert run.approve(stage, request, before).next == "close"

    assert ended(stage, request) == (Outcome.SKIPPED, "approval_expired")
    assert is_as_before(stage)
    (said,) = stage.events("Approval Answered")
    assert (said["answer"], said["answered_by"]) == ("expired", "")
    assert "nobody answered within 3600 s: May " in said["reason"]["text"]
    assert stage.events("Incident Closed")[0]["remedy"].startswith("Nobody answered")


def test_a_node_that_cannot_be_restored_is_a_persons_and_no_silent_end() -> None:
    stage, request = asked("repair")
    answer(stage, request, "no")
    stage.cluster.faults.fail("patch", ClusterUnavailableError("no answer"))
    with pytest.raises(ClusterUnavailableError):
        run.approve(stage, request, "repair")
    assert stage.incident(request.incident_id).verdict is None
    with pytest.raises(InvalidInputError, match="has ended: ABORTED_BY_OPERATOR, approval_denied"):
        answer(stage, request, "yes", answered_by="bob")

    run.escalate(stage, request, "ClusterUnavailableError", "no answer")

    assert ended(stage, request) == (Outcome.NEEDS_HUMAN, "cluster_unavailable")
    assert stage.node().is_unschedulable


def test_after_silence_the_same_fault_is_not_asked_about_again_at_once() -> None:
    stage, request = asked("cordon")
    late(stage)
    run.approve(stage, request)
    ended(stage, request)
    assert run.open_for(stage, xid_finding()) is None


def test_a_node_that_was_cordoned_before_us_stays_so_after_a_no() -> None:
    stage, request = asked("repair")
    incident = stage.incident(request.incident_id)
    assert incident.cordon is not None
    node = stage.node()
    text = node.annotations[OWNER_ANNOTATION].replace(
        '"was_unschedulable":false', '"was_unschedulable":true'
    )
    stage.cluster.change_node(
        node_name(1), lambda n: replace(n, annotations={**n.annotations, OWNER_ANNOTATION: text})
    )
    answer(stage, request, "no")
    run.approve(stage, request, "repair")
    assert stage.node().is_unschedulable is ('"was_unschedulable":true' in text)
    assert OWNER_ANNOTATION not in stage.node().annotations


# --- while it waits -------------------------------------------------------------------------------


@POINTS
def test_it_is_asked_once_however_often_it_is_looked_for(before: str) -> None:
    stage, request = asked(before)
    for _ in range(5):
        assert run.approve(stage, request, before).next == "wait"
    assert stage.events("Approval Requested") == []
    assert stage.mutations() == []
    assert stage.incident(request.incident_id).approval.polls == 6  # type: ignore[union-attr]


def test_the_waits_are_the_policys_and_the_last_one_ends_with_the_request() -> None:
    stage, request = asked("cordon")
    stage.save(request.incident_id, waits=Waits(approval_poll_s=(20, 60, 3000)))
    waits = []
    for _ in range(3):
        wait_s = run.approve(stage, request).wait_s
        waits.append(wait_s)
        late(stage, wait_s)
    assert waits == [60, 3000, 540]
    assert run.approve(stage, request).next == "close"


@POINTS
def test_the_lease_covers_each_wait(before: str) -> None:
    stage, request = asked(before)
    late(stage, 1800)
    wait_s = run.approve(stage, request, before).wait_s
    slot = stage.guards.load(CLUSTER).slots["uid-1"]
    assert (slot.expires_at - stage.clock.now()).total_seconds() == 60 + wait_s + 60


@POINTS
def test_a_slot_that_is_gone_ends_the_wait(before: str) -> None:
    stage, request = asked(before)
    stage.guards.store(release(stage.guards.load(CLUSTER), request.incident_id))
    with pytest.raises(LeaseLostError):
        run.approve(stage, request, before)


@POINTS
def test_a_node_that_is_gone_or_another_one_ends_it(before: str) -> None:
    stage, request = asked(before)
    stage.swap_machine()
    answer(stage, request)
    with pytest.raises(SupersededError):
        run.approve(stage, request, before)
    stage.cluster.remove_node(node_name(1))
    with pytest.raises(SupersededError, match="is gone"):
        run.approve(stage, request, before)
    assert stage.mutations() == []


@pytest.mark.parametrize("word", ["", "yes"])
def test_a_level_that_is_gone_withdraws_the_request_and_restores_the_node(word: str) -> None:
    stage, request = asked("repair", findings=(temperature_finding(),))
    stage.metrics.clear()
    stage.metrics.answer("gpu", samples({}, value=1))  # it reports, and it is cool
    if word:
        answer(stage, request, word)

    assert run.approve(stage, request, "repair").next == "close"

    assert ended(stage, request) == (Outcome.RECOVERED, "recovered")
    assert is_as_before(stage)


def test_a_node_that_booted_meanwhile_has_recovered_before_the_cordon() -> None:
    stage, request = asked("cordon")
    stage.boot()
    answer(stage, request)
    assert run.approve(stage, request).next == "close"
    assert ended(stage, request) == (Outcome.RECOVERED, "rebooted")
    assert stage.mutations() == []


def test_a_drained_node_that_booted_meanwhile_is_a_persons() -> None:
    stage, request = asked("repair")
    stage.boot()
    answer(stage, request)
    assert run.approve(stage, request, "repair").next == "close"
    assert ended(stage, request) == (Outcome.NEEDS_HUMAN, "rebooted_meanwhile")
    assert stage.node().is_unschedulable


def test_another_remediator_ends_it_before_the_cordon() -> None:
    stage, request = asked("cordon")
    taint = Taint("ToBeDeletedByClusterAutoscaler", "NoSchedule", "1")
    stage.cluster.change_node(node_name(1), lambda node: replace(node, taints=(taint,)))
    answer(stage, request)
    assert run.approve(stage, request).next == "close"
    assert ended(stage, request) == (Outcome.SKIPPED, "other_remediator")


def test_who_uncordons_the_waiting_node_has_it_back() -> None:
    stage, request = asked("repair")
    stage.uncordon_by_hand()
    assert run.approve(stage, request, "repair").next == "close"
    assert ended(stage, request) == (Outcome.ABORTED_BY_OPERATOR, "uncordoned")
    assert is_as_before(stage)


@POINTS
@pytest.mark.parametrize("word", ["", "yes"])
def test_a_mode_that_became_stricter_ends_it_whatever_was_said(before: str, word: str) -> None:
    stage, request = asked(before)
    if word:
        answer(stage, request, word)
    stage.policies.policy = enforce(mode=Mode.DRY_RUN)
    assert run.approve(stage, request, before).next == "close"
    assert ended(stage, request) == (Outcome.ABORTED_BY_OPERATOR, "mode_changed")
    assert stage.node().is_unschedulable is (before == "repair")


@POINTS
def test_a_yes_waits_for_the_end_of_a_pause(before: str) -> None:
    stage, request = asked(before)
    put_pause(stage)
    answer(stage, request)

    assert run.approve(stage, request, before).next == "wait"
    assert run.approve(stage, request, before).next == "wait"
    assert times_sent(stage)["Incident Waiting"] == 1
    assert stage.mutations() == []
    put_pause(stage, paused=False)
    assert run.approve(stage, request, before).next == "approved"
    assert stage.incident(request.incident_id).waiting_for == ""


@POINTS
def test_a_pause_that_lasts_too_long_ends_it_and_changes_nothing(before: str) -> None:
    stage, request = asked(before)
    put_pause(stage)
    answer(stage, request)
    late(stage, 600)
    assert run.approve(stage, request, before).next == "close"
    assert ended(stage, request) == (Outcome.ABORTED_BY_OPERATOR, "paused")
    assert stage.mutations() == []


@POINTS
def test_the_breaker_holds_what_has_not_begun(before: str) -> None:
    stage, request = asked(before)
    open_breaker(stage)
    answer(stage, request)
    result = run.approve(stage, request, before)
    assert result.next == ("wait" if before == "cordon" else "approved")
    if before == "cordon":
        late(stage, 600)
        run.approve(stage, request)
        assert ended(stage, request) == (Outcome.SKIPPED, "breaker_open")


@POINTS
def test_what_cannot_be_seen_after_the_yes_is_looked_at_again_and_then_skipped(before: str) -> None:
    stage, request = asked(before)
    answer(stage, request)
    stage.metrics.fail()
    waits = [run.approve(stage, request, before).wait_s for _ in range(3)]
    assert waits == [20, 60, 300]
    late(stage, 600)
    assert run.approve(stage, request, before).next == "close"
    assert ended(stage, request) == (Outcome.SKIPPED, "unverifiable")
    assert is_as_before(stage)


@POINTS
def test_what_cannot_be_seen_does_not_end_the_wait_for_an_answer(before: str) -> None:
    stage, request = asked(before)
    stage.metrics.fail()
    assert run.approve(stage, request, before).next == "wait"
    answer(stage, request)
    stage.metrics.clear()
    stage.metrics.answer("xid-count", XID_79)
    assert run.approve(stage, request, before).next == "approved"


def test_a_late_yes_looks_at_the_occurrence_at_the_time_of_its_evidence() -> None:
    """A yes renews nothing: an XID is as old as it is, and only another boot ends it."""
    stage, request = asked("cordon")
    late(stage, 3000)
    answer(stage, request)
    stage.metrics.asked.clear()
    assert run.approve(stage, request).next == "approved"
    evidence = stage.incident(request.incident_id).findings[0].evidence
    assert {one.at for one in stage.metrics.asked} == {evidence.at}


def test_a_group_that_cannot_replace_any_more_calls_a_person_before_the_cordon() -> None:
    stage, request = asked("cordon")
    answer(stage, request)
    group = stage.capacity.group(CLUSTER_POLICY, GROUP)
    assert group is not None
    stage.capacity.add_group(CLUSTER, replace(group, suspended=frozenset({"Launch"})))
    assert run.approve(stage, request).next == "close"
    assert ended(stage, request) == (Outcome.NEEDS_HUMAN, "asg_suspended")
    assert stage.mutations() == []


def test_a_group_that_somebody_else_works_on_meanwhile_is_theirs() -> None:
    stage, request = asked("cordon")
    answer(stage, request)
    stage.capacity.other[GROUP] = "an instance refresh runs"
    assert run.approve(stage, request).next == "close"
    assert ended(stage, request) == (Outcome.SKIPPED, "other_remediator")
    assert stage.mutations() == []


@POINTS
@pytest.mark.parametrize("status", ["ABORTED", "FAILED"])
def test_an_execution_that_was_stopped_while_it_waited_ends_the_incident(
    before: str, status: str
) -> None:
    stage, request = asked(before)
    stage.executions.end(request.incident_id, status)
    run.watch(stage, request.incident_id, status)
    incident = stage.incident(request.incident_id)
    is_touched = before == "repair"
    failed = Outcome.NEEDS_HUMAN if is_touched else Outcome.SKIPPED
    assert incident.outcome is (Outcome.ABORTED_BY_OPERATOR if status == "ABORTED" else failed)
    stage.clock.advance(61)  # a function does not notice that its execution was stopped
    run.watch(stage)
    assert not stage.holds_slot(request.incident_id)
    with pytest.raises(InvalidInputError, match="has ended"):
        answer(stage, request)


# --- answers --------------------------------------------------------------------------------------


def test_an_answer_of_the_same_word_again_changes_and_tells_nothing() -> None:
    stage, request = asked("cordon")
    assert answer(stage, request).changed
    second = answer(stage, request, answered_by="bob")
    assert not second.changed
    assert second.answered_by == "alice"
    assert "nothing changed, the incident is approving" in second.message
    assert times_sent(stage)["Approval Answered"] == 1


def test_a_no_wins_over_a_yes_that_nothing_has_followed_from() -> None:
    stage, request = asked("cordon")
    answer(stage, request)
    assert answer(stage, request, "no", answered_by="bob", why="not now").changed
    run.approve(stage, request)
    assert ended(stage, request) == (Outcome.ABORTED_BY_OPERATOR, "approval_denied")


def test_a_no_comes_too_late_when_the_yes_was_acted_on() -> None:
    stage, request = asked("cordon")
    answer(stage, request)
    run.approve(stage, request)
    with pytest.raises(InvalidInputError, match="alice said yes, and the incident is cordoning"):
        answer(stage, request, "no", answered_by="bob")


def test_a_yes_never_wins_over_a_no() -> None:
    stage, request = asked("cordon")
    answer(stage, request, "no", answered_by="bob")
    with pytest.raises(InvalidInputError, match="bob said no at"):
        answer(stage, request)
    run.approve(stage, request)
    assert ended(stage, request) == (Outcome.ABORTED_BY_OPERATOR, "approval_denied")


def test_an_answer_after_the_time_is_refused_also_before_the_step_has_seen_it() -> None:
    stage, request = asked("cordon")
    late(stage)
    with pytest.raises(InvalidInputError, match="the request ended at"):
        answer(stage, request)
    run.approve(stage, request)
    with pytest.raises(InvalidInputError, match="has ended: SKIPPED, approval_expired"):
        answer(stage, request)
    ended(stage, request)
    with pytest.raises(InvalidInputError, match="start the remediation by hand"):
        answer(stage, request)


def test_an_answer_in_time_counts_though_the_step_sees_it_late() -> None:
    stage, request = asked("cordon")
    late(stage, 3599)
    answer(stage, request)
    late(stage, 60)
    assert run.approve(stage, request).next == "approved"


def test_who_asks_nothing_and_who_is_unknown_cannot_be_answered() -> None:
    stage, incident_id = admitted()
    with pytest.raises(InvalidInputError, match="has asked nobody"):
        answer(stage, stage.request(incident_id))
    with pytest.raises(InvalidInputError, match="01NOBODY is unknown"):
        answer(stage, Request("01NOBODY", "arn"))


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"answer": "maybe"}, "answer"),
        ({"answer": True}, "answer"),
        ({"answered_by": ""}, "answered_by"),
        ({"rung": "human"}, "rung"),
        ({"answer": "no", "why": ""}, "a no needs a reason"),
        ({"until": "tomorrow"}, "until"),
        ({"incident_id": "a b"}, "incident_id"),
    ],
)
def test_a_wrong_input_names_the_field_and_the_remedy(given: Any, field: str) -> None:
    stage, request = asked("cordon")
    document = {"incident_id": request.incident_id, "answer": "yes", "answered_by": "a", **given}
    with pytest.raises(InvalidInputError, match=field) as caught:
        answer_approval(AnswerApprovalRequest(input=document), ports=ports(stage))
    assert "Remedy: use {" in str(caught.value)
    with pytest.raises(InvalidInputError, match="is no JSON object"):
        answer_approval(AnswerApprovalRequest(input="yes"), ports=ports(stage))


def test_of_two_people_at_once_one_is_first_and_the_other_is_told() -> None:
    stage, request = asked("cordon")
    original = stage.incidents.get

    def get(incident_id: str) -> Any:
        found = original(incident_id)
        stage.incidents.get = original  # type: ignore[method-assign]
        answer(stage, request, "no", answered_by="bob", why="not now")
        return found

    stage.incidents.get = get  # type: ignore[method-assign]
    with pytest.raises(InvalidInputError, match="bob said no"):
        answer(stage, request)
    assert times_sent(stage)["Approval Answered"] == 1


@POINTS
def test_an_answer_during_a_look_makes_the_look_start_again(before: str) -> None:
    """Whoever writes first wins: no look overwrites an answer, nor ends the request over it."""
    stage, request = asked(before)
    late(stage)
    original = stage.incidents.get
    moved = stage.clock.now()

    def get(incident_id: str) -> Any:
        found = original(incident_id)
        stage.incidents.get = original  # type: ignore[method-assign]
        known = stage.incident(incident_id).approval
        assert known is not None
        stage.save(incident_id, approval=replace(known, until=moved + timedelta(seconds=1)))
        answer(stage, request)
        return found

    stage.incidents.get = get  # type: ignore[method-assign]
    with pytest.raises(ConcurrentUpdateError):
        run.approve(stage, request, before)
    assert run.approve(stage, request, before).next == "approved"


def test_a_record_that_keeps_changing_ends_the_answer_for_a_retry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage, request = asked("cordon")

    def save(_: Any) -> Any:
        raise ConcurrentUpdateError("changed")

    monkeypatch.setattr(stage.incidents, "save", save)
    with pytest.raises(ConcurrentUpdateError, match="changed 5 times"):
        answer(stage, request)


# --- crashes --------------------------------------------------------------------------------------


@POINTS
def test_asking_survives_a_crash_at_every_call_and_asks_once(before: str) -> None:
    def build() -> tuple[Stage, Callable[[], Any]]:
        stage, request = asked(before)
        known = stage.incident(request.incident_id)
        stage.save(request.incident_id, approval=None, sequence=known.sequence)
        return stage, lambda: run.approve(stage, request, before)

    def check(stage: Stage, result: Any) -> None:
        assert result.next == "wait"
        stage.outbox.publish_pending()
        assert times_sent(stage) == {"Approval Requested": 1}
        assert stage.mutations() == []

    assert after_every_crash(build, check) >= 6


@POINTS
@pytest.mark.parametrize("word", ["yes", "no", ""])
def test_every_end_of_the_wait_survives_a_crash_at_every_call(before: str, word: str) -> None:
    def build() -> tuple[Stage, Callable[[], Any]]:
        stage, request = asked(before)
        if word:
            answer(stage, request, word)
        else:
            late(stage)
        return stage, lambda: run.approve(stage, request, before)

    def check(stage: Stage, result: Any) -> None:
        assert result.next == ("approved" if word == "yes" else "close")
        assert is_as_before(stage) is (word != "yes" or before == "cordon")
        stage.outbox.publish_pending()
        told = times_sent(stage)
        assert told["Approval Answered"] == 1
        assert told.get("Fault Verified", 0) == (word == "yes")
        assert told.get("Node Released", 0) == (word != "yes" and before == "repair")
        assert len(stage.mutations()) == told.get("Node Released", 0)

    assert after_every_crash(build, check) >= 4


def test_an_answer_survives_a_crash_at_every_call_and_is_told_once() -> None:
    def build() -> tuple[Stage, Callable[[], Any]]:
        stage, request = asked("cordon")
        return stage, lambda: answer(stage, request)

    def check(stage: Stage, result: Any) -> None:
        assert result.answered_by == "alice"
        stage.outbox.publish_pending()
        assert times_sent(stage) == {"Approval Answered": 1}

    assert after_every_crash(build, check) >= 3


@POINTS
def test_a_step_that_fails_for_good_while_it_waits_calls_a_person(before: str) -> None:
    stage, request = asked(before)
    error = AwsForbiddenError("dynamodb:UpdateItem: denied")
    result = run.escalate(stage, request, "AwsForbiddenError", str(error))
    assert result.next == "close"
    assert ended(stage, request) == (Outcome.NEEDS_HUMAN, "aws_forbidden")


def test_the_gauge_tells_how_many_wait_for_a_yes() -> None:
    stage, _ = asked("cordon")
    stage.dispatch_all()
    assert stage.telemetry.gauges[("IncidentsApproving", (("cluster", CLUSTER),))][-1] == 1


def test_the_first_end_stands() -> None:
    stage, request = asked("cordon")
    stage.save(request.incident_id, verdict=(Outcome.SKIPPED, Reason("x", "y")))
    with pytest.raises(InvalidInputError, match="has ended: SKIPPED, x: y"):
        answer(stage, request)
