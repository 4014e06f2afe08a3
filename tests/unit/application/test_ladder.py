"""The escalation ladder: reboot, then replace, then a person; each once, and with a memory."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from nodemend.domain.cordon import is_cordoned_by
from nodemend.domain.errors import (
    AwsForbiddenError,
    AwsUnavailableError,
    ConcurrentUpdateError,
    InvalidInputError,
    RepairRefusedError,
    SupersededError,
)
from nodemend.domain.faults import FaultClass, Mode, Rung
from nodemend.domain.findings import Finding
from nodemend.domain.history import PastIncident, gpu, instance
from nodemend.domain.incidents import (
    DrainRecord,
    Incident,
    IncidentState,
    Outcome,
    RepairRecord,
)
from nodemend.domain.nodes import OWNER_ANNOTATION, Node, Readiness
from nodemend.domain.policy import Attempts, Deadlines, Limits, MaxUnavailable
from nodemend.domain.rails import PAUSE_ANNOTATION
from tests.fakes.system import START
from tests.unit.application import run
from tests.unit.application.machine import Machine
from tests.unit.application.stage import (
    CLUSTER,
    GROUP,
    Request,
    Stage,
    after_every_crash,
    clear,
    enforce,
    gpu_node,
    instance_id,
    node_name,
    pod,
    repair_of,
    samples,
    times_sent,
    verdict_of,
    words,
    xid_finding,
    xid_labels,
)

LADDER = (Rung.REBOOT, Rung.REPLACE, Rung.HUMAN)
REBOOT = f"reboot {instance_id(1)}"
TERMINATE = f"terminate {instance_id(1)}"
DENIED = "ec2:RebootInstances: UnauthorizedOperation: not authorized"


def gsp_finding(number: int = 1, **changes: Any) -> Finding:
    """An XID whose action is a reset: the default plan begins with a reboot."""
    return xid_finding(number, code=119, action="reset_gpu", **changes)


def drained(**policy: Any) -> tuple[Stage, Request]:
    """A stage with an incident whose node is cordoned and drained, and is to be rebooted."""
    stage = Stage(policy=enforce(**policy))
    request = stage.put(IncidentState.CORDONING, findings=(gsp_finding(),))
    assert run.cordon(stage, request).next == "drain"
    assert run.drain(stage, request).next == "drained"
    assert stage.incident(request.incident_id).rung is Rung.REBOOT
    clear(stage)
    return stage, request


def checking(**policy: Any) -> tuple[Stage, Request]:
    """A stage with an incident whose reboot EC2 has taken."""
    stage, request = drained(**policy)
    assert run.start(stage, request).next == "check"
    clear(stage)
    return stage, request


def validating(**policy: Any) -> tuple[Stage, Request]:
    """A stage with an incident whose node has booted again."""
    stage, request = checking(**policy)
    stage.clock.advance(60)
    stage.boot()
    stage.metrics.answer("count(count by (UUID", samples({}, value=8))
    assert run.check(stage, request).next == "validate"
    clear(stage)
    return stage, request


def until_not_waiting(stage: Stage, step: Callable[[], Any]) -> Any:
    """Run a step until it no longer waits, and let its waits pass."""
    while (result := step()).next == "wait":
        stage.clock.advance(result.wait_s)
    return result


# --- the reboot -----------------------------------------------------------------------------------


def test_a_reboot_is_asked_for_after_a_note_of_boot_and_heartbeat() -> None:
    stage, request = drained()
    at_call: list[RepairRecord | None] = []
    stage.instances.on_reboot = lambda _: at_call.append(stage.incident(request.incident_id).repair)

    assert run.start(stage, request).next == "check"

    assert stage.mutations() == [REBOOT]
    noted = at_call[0]
    assert noted is not None
    assert (noted.rung, noted.boot_id_before, noted.heartbeat_before) == (
        Rung.REBOOT,
        "boot-1",
        START,
    )
    assert (noted.intended_at, noted.started_at, noted.asks) == (stage.clock.now(), None, 1)
    assert repair_of(stage, request).started_at == stage.clock.now()
    event = stage.events("Repair Started")[0]
    assert (event["rung"], event["attempt"], event["reason"]["code"]) == ("reboot", 1, "reboot")
    assert [one["reason"] for one in stage.cluster.events] == ["NodemendRepairStarted"]
    assert "is being rebooted" in stage.cluster.events[0]["message"]


def test_the_reboot_survives_a_crash_at_every_call_and_is_asked_for_once() -> None:
    def build() -> tuple[Stage, Callable[[], Any]]:
        stage, request = drained()
        return stage, lambda: run.start(stage, request)

    def check(stage: Stage, result: Any) -> None:
        assert result.next == "check"
        # Where the process died before the call, check_repair asks for it later.
        assert stage.mutations() in ([REBOOT], [])
        stage.outbox.publish_pending()
        assert times_sent(stage) == {"Repair Started": 1}

    assert after_every_crash(build, check) >= 8


def test_from_a_crash_at_any_call_of_the_start_the_node_ends_rebooted_and_only_once() -> None:
    def build() -> tuple[Stage, Callable[[], Any]]:
        stage, request = drained(hold_down_s=0)
        stage.metrics.answer("count(count by (UUID", samples({}, value=8))
        due: list[object] = []
        stage.instances.on_reboot = due.append
        words = ["repair"]
        return stage, lambda: until_rebooted(stage, request, due, words)

    def check(stage: Stage, result: Any) -> None:
        assert result == "release"
        assert stage.mutations() == [REBOOT]

    assert after_every_crash(build, check) >= 15


def until_rebooted(stage: Stage, request: Request, due: list[object], words: list[str]) -> str:
    """Go on from the last word that was said, as the state machine does after a crash."""
    while len(words) < 100:
        match words[-1]:
            case "repair":
                words.append(run.start(stage, request).next)
            case "check" | "wait":
                words.append(run.check(stage, request).next)
                stage.clock.advance(30)
                if due:
                    stage.boot()
            case "validate":
                words.append(run.validate(stage, request).next)
            case done:
                return done
    raise AssertionError("the reboot never ends")


@pytest.mark.case("R34")
def test_r34_a_reboot_whose_answer_was_lost_is_not_asked_for_twice() -> None:
    stage, request = drained()
    stage.instances.faults.fail("reboot", AwsUnavailableError("the answer was lost"), after=True)
    with pytest.raises(AwsUnavailableError):
        run.start(stage, request)

    assert run.start(stage, request).next == "check"
    stage.clock.advance(40)
    assert run.check(stage, request).next == "wait"
    stage.boot()
    assert run.check(stage, request).next == "validate"

    assert stage.mutations() == [REBOOT]
    event = stage.events("Repair Started")[0]
    assert event["reason"]["text"].endswith("its answer was lost")


def test_a_reboot_that_nothing_is_seen_of_is_asked_for_once_more_at_half_its_time() -> None:
    stage, request = drained()
    stage.instances.faults.fail("reboot", AwsUnavailableError("no connection"))
    with pytest.raises(AwsUnavailableError):
        run.start(stage, request)
    run.start(stage, request)
    stage.instances.faults.calls.clear()  # the first one never arrived

    assert until_not_waiting(stage, lambda: run.check(stage, request)).next == "repair"
    assert stage.clock.now() - START >= timedelta(seconds=300)
    assert run.check(stage, request).next == "repair"  # died before it could say so
    assert run.start(stage, request).next == "check"
    assert stage.mutations() == [REBOOT]
    assert repair_of(stage, request).asks == 2
    assert until_not_waiting(stage, lambda: run.check(stage, request)).next == "repair"

    # Not a third time: the next rung is another repair.
    assert stage.incident(request.incident_id).rung is Rung.REPLACE
    assert stage.events("Incident Escalated")[0]["reason"]["code"] == "reboot_not_observed"
    assert stage.mutations() == [REBOOT]


def test_the_second_call_is_not_made_if_the_node_has_booted_meanwhile() -> None:
    stage, request = drained()
    stage.instances.faults.fail("reboot", AwsUnavailableError("lost"), after=True)
    with pytest.raises(AwsUnavailableError):
        run.start(stage, request)
    run.start(stage, request)
    assert until_not_waiting(stage, lambda: run.check(stage, request)).next == "repair"
    stage.boot()

    assert run.start(stage, request).next == "check"
    assert run.check(stage, request).next == "validate"
    assert stage.mutations() == [REBOOT]
    assert len(stage.events("Repair Started")) == 1


def test_a_second_call_whose_answer_is_lost_is_not_followed_by_a_third() -> None:
    stage, request = drained()
    stage.instances.faults.fail("reboot", AwsUnavailableError("lost"), times=2)
    for _ in range(2):
        with pytest.raises(AwsUnavailableError):
            run.start(stage, request)
        assert run.start(stage, request).next == "check"
        until_not_waiting(stage, lambda: run.check(stage, request))

    assert stage.incident(request.incident_id).rung is Rung.REPLACE


@pytest.mark.case("R46")
def test_r46_a_throttled_reboot_is_tried_again_at_once() -> None:
    stage, request = drained()
    stage.instances.throttled = 2
    for _ in range(2):
        with pytest.raises(AwsUnavailableError, match="ec2:RebootInstances"):
            run.start(stage, request)
        assert stage.incident(request.incident_id).repair is None

    assert run.start(stage, request).next == "check"
    assert stage.mutations() == [REBOOT]
    assert repair_of(stage, request).is_unanswered is False


@pytest.mark.case("R46")
@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (AwsForbiddenError(DENIED), DENIED),
        (RepairRefusedError("InvalidInstanceID.NotFound"), "InvalidInstanceID.NotFound"),
    ],
)
def test_r46_a_refused_reboot_leads_to_the_next_rung(error: Exception, cause: str) -> None:
    stage, request = drained()
    stage.instances.faults.fail("reboot", error)
    with pytest.raises(type(error)):
        run.start(stage, request)

    result = run.escalate(stage, request, type(error).__name__, cause)

    assert result.next == "repair"
    incident = stage.incident(request.incident_id)
    assert (incident.state, incident.rung) == (IncidentState.ESCALATING, Rung.REPLACE)
    assert [attempt.rung for attempt in incident.attempts] == [Rung.REBOOT]
    event = stage.events("Incident Escalated")[0]
    assert (event["next_rung"], event["error"]) == ("replace", type(error).__name__)
    # The same failure again is a repeated task, and takes no further rung.
    assert run.escalate(stage, request, type(error).__name__, cause).next == "repair"
    assert stage.incident(request.incident_id).rung is Rung.REPLACE
    assert run.start(stage, request).next == "check"
    assert stage.mutations()[-1] == TERMINATE
    assert stage.events("Repair Started")[0]["attempt"] == 2


@pytest.mark.case("R46")
def test_r46_without_another_rung_a_person_is_called_with_the_action_that_was_denied() -> None:
    stage, request = drained(plans={FaultClass.XID: (Rung.REBOOT, Rung.HUMAN)})
    stage.instances.faults.fail("reboot", AwsForbiddenError(DENIED))
    with pytest.raises(AwsForbiddenError):
        run.start(stage, request)

    assert run.escalate(stage, request, "AwsForbiddenError", DENIED).next == "close"
    result = run.close(stage, request)

    assert (result.outcome, result.reason) == ("NEEDS_HUMAN", f"aws_forbidden: {DENIED}")
    assert "Allow the IAM action" in stage.events("Incident Closed")[0]["remedy"]


@pytest.mark.parametrize(
    "cause",
    [
        "dynamodb:UpdateItem: AccessDeniedException: no",
        "sts:AssumeRole: AccessDenied: no",
    ],
)
def test_what_is_denied_beside_the_repair_is_no_reason_for_a_stronger_one(cause: str) -> None:
    stage, request = drained()

    assert run.escalate(stage, request, "AwsForbiddenError", cause).next == "close"
    assert verdict_of(stage, request)[0] is Outcome.NEEDS_HUMAN


@pytest.mark.parametrize(
    "error", ["AwsUnavailableError", "ConcurrentUpdateError", "LeaseLostError", "States.Timeout"]
)
def test_trouble_of_our_own_is_not_mended_by_ending_an_instance(error: str) -> None:
    stage, request = drained()

    assert run.escalate(stage, request, error, "no").next == "close"
    assert stage.mutations() == []


def test_a_failure_before_the_next_rung_has_begun_cannot_go_round_in_circles() -> None:
    stage, request = checking()
    stage.clock.advance(600)
    assert run.check(stage, request).next == "repair"

    denied = "dynamodb:UpdateItem: AccessDeniedException: no"
    assert run.escalate(stage, request, "AwsForbiddenError", denied).next == "close"

    outcome, reason = verdict_of(stage, request)
    assert (outcome, reason.code) == (Outcome.NEEDS_HUMAN, "aws_forbidden")


@pytest.mark.case("R74")
@pytest.mark.parametrize("drain", [None, DrainRecord(START)])
def test_r74_only_a_drained_node_is_rebooted(drain: DrainRecord | None) -> None:
    stage, request = drained()
    stage.save(request.incident_id, drain=drain)

    assert run.start(stage, request).next == "close"

    outcome, reason = verdict_of(stage, request)
    assert (outcome, reason.code) == (Outcome.NEEDS_HUMAN, "not_drained")
    assert stage.mutations() == []


@pytest.mark.case("R74")
@pytest.mark.parametrize("rung_index", [0, 1])
def test_r74_a_node_that_was_uncordoned_after_its_drain_is_neither_rebooted_nor_replaced(
    rung_index: int,
) -> None:
    stage, request = drained()
    stage.save(request.incident_id, rung_index=rung_index)
    stage.uncordon_by_hand()

    assert run.start(stage, request).next == "close"

    outcome, reason = verdict_of(stage, request)
    assert (outcome, reason.code) == (Outcome.ABORTED_BY_OPERATOR, "uncordoned")
    assert not {REBOOT, TERMINATE} & set(stage.mutations())
    assert OWNER_ANNOTATION not in stage.node().annotations


@pytest.mark.parametrize("rung_index", [0, 1])
def test_a_node_that_somebody_rebooted_during_its_drain_is_not_repaired_on_old_evidence(
    rung_index: int,
) -> None:
    stage, request = drained()
    stage.save(request.incident_id, rung_index=rung_index)
    stage.boot(boot_id="boot-by-hand")

    assert run.start(stage, request).next == "close"

    outcome, reason = verdict_of(stage, request)
    assert (outcome, reason.code) == (Outcome.NEEDS_HUMAN, "rebooted_meanwhile")
    assert stage.mutations() == []


def test_another_machine_under_the_name_is_not_rebooted() -> None:
    stage, request = drained()
    stage.swap_machine()

    with pytest.raises(SupersededError):
        run.start(stage, request)
    assert stage.mutations() == []


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"labels": {"karpenter.sh/nodepool": "gpu"}}, "capacity_kind_unsupported"),
        ({"boot_id": ""}, "boot_id_unknown"),
        ({"lifecycle": "Standby"}, "other_remediator"),
    ],
)
def test_where_a_reboot_cannot_work_or_be_proven_a_person_is_called(
    changes: dict[str, Any], code: str
) -> None:
    stage, request = drained()
    if "lifecycle" in changes:
        stage.capacity.set_state(CLUSTER, instance_id(1), changes["lifecycle"])

    def changed(node: Node) -> Node:
        ref = replace(node.ref, boot_id=changes.get("boot_id", node.ref.boot_id))
        return replace(node, ref=ref, labels={**node.labels, **changes.get("labels", {})})

    stage.cluster.change_node(node_name(1), changed)

    assert run.start(stage, request).next == "close"
    assert verdict_of(stage, request)[1].code == code
    assert stage.mutations() == []


def test_an_instance_that_is_in_no_group_can_be_rebooted() -> None:
    stage, request = drained()
    stage.capacity.lose_instance(CLUSTER, instance_id(1))
    stage.save(request.incident_id, group="")

    assert run.start(stage, request).next == "check"
    assert stage.mutations() == [REBOOT]


def test_a_mode_that_was_lowered_meanwhile_stops_the_reboot() -> None:
    stage, request = drained()
    stage.policies.policy = enforce(mode=Mode.CORDON_ONLY)

    assert run.start(stage, request).next == "close"
    assert verdict_of(stage, request)[1].code == "mode_changed"
    assert stage.mutations() == []


def test_in_a_dry_run_the_reboot_is_told_and_nothing_is_asked() -> None:
    stage = Stage(policy=enforce(mode=Mode.DRY_RUN))
    request = stage.put(
        IncidentState.REPAIRING,
        findings=(gsp_finding(),),
        drain=DrainRecord(START, is_drained=True),
    )

    assert run.start(stage, request).next == "close"

    event = stage.events("Repair Started")[0]
    assert (event["rung"], event["dry_run"]) == ("reboot", True)
    outcome, reason = verdict_of(stage, request)
    assert outcome is Outcome.OBSERVED
    assert "would have been cordoned, drained and rebooted" in reason.text
    assert stage.mutations() == []


# --- its proof ------------------------------------------------------------------------------------


@pytest.mark.case("R57")
def test_r57_neither_the_old_boot_id_nor_an_empty_one_proves_a_reboot() -> None:
    stage, request = checking()

    stage.clock.advance(40)
    stage.boot(boot_id="boot-1")  # the old boot still sends heartbeats
    assert run.check(stage, request).next == "wait"
    assert "has not booted again (boot-1)" in repair_of(stage, request).last_problem
    stage.boot(boot_id="")
    assert run.check(stage, request).next == "wait"
    assert "(no boot id)" in repair_of(stage, request).last_problem
    stage.boot(boot_id="boot-2", readiness=Readiness.NOT_READY)
    assert run.check(stage, request).next == "wait"
    stage.boot(boot_id="boot-2", readiness=Readiness.READY)
    assert run.check(stage, request).next == "validate"

    assert repair_of(stage, request).rebooted_node == replace(gpu_node(1).ref, boot_id="boot-2")


@pytest.mark.case("R57")
def test_r57_a_heartbeat_that_is_older_than_the_call_proves_nothing() -> None:
    stage, request = checking()
    stage.boot()

    def before_the_call(node: Node) -> Node:
        return replace(node, heartbeat_at=START - timedelta(seconds=1))

    stage.cluster.change_node(node_name(1), before_the_call)
    stage.clock.advance(40)

    assert run.check(stage, request).next == "wait"
    stage.boot()
    assert run.check(stage, request).next == "validate"


@pytest.mark.case("R90")
def test_r90_a_reboot_that_is_not_observed_leads_to_a_replacement_and_not_to_another_one() -> None:
    stage, request = checking()

    result = until_not_waiting(stage, lambda: run.check(stage, request))

    assert result.next == "repair"
    assert stage.clock.now() - START >= timedelta(seconds=600)
    event = stage.events("Incident Escalated")[0]
    assert (event["reason"]["code"], event["next_rung"]) == ("reboot_not_observed", "replace")
    assert event["reason"]["text"].startswith("after 600 s: ")
    assert event.get("outcome") is None
    assert run.start(stage, request).next == "check"
    assert stage.mutations() == [TERMINATE]


@pytest.mark.case("R90")
def test_r90_without_a_stronger_rung_a_person_is_called() -> None:
    stage, request = checking(plans={FaultClass.XID: (Rung.REBOOT, Rung.HUMAN)})

    assert until_not_waiting(stage, lambda: run.check(stage, request)).next == "close"

    outcome, reason = verdict_of(stage, request)
    assert (outcome, reason.code) == (Outcome.NEEDS_HUMAN, "reboot_not_observed")
    run.close(stage, request)
    assert "did not boot again" in stage.events("Incident Closed")[0]["remedy"]


def test_what_a_person_must_see_to_stays_theirs_on_the_boot_that_our_reboot_made() -> None:
    stage, request = validating(plans={FaultClass.XID: (Rung.REBOOT, Rung.HUMAN)}, hold_down_s=60)
    stage.cluster.change_node(
        node_name(1), lambda node: replace(node, readiness=Readiness.NOT_READY)
    )
    assert until_not_waiting(stage, lambda: run.validate(stage, request)).next == "close"
    assert verdict_of(stage, request)[0] is Outcome.NEEDS_HUMAN

    run.close(stage, request)

    held = {boot for _, _, boot, _ in stage.incidents.handled}
    assert held == {stage.incident(request.incident_id).node.boot_id, "boot-2"}


def test_the_boot_is_known_even_if_the_node_is_taken_back_before_it_is_checked() -> None:
    stage, request = checking()
    stage.clock.advance(60)
    stage.boot()
    stage.uncordon_by_hand()
    run.check(stage, request)
    stage.uncordon_by_hand()
    run.check(stage, request)
    rebooted = repair_of(stage, request).rebooted_node
    assert rebooted is not None
    assert rebooted.boot_id == "boot-2"


def test_the_deadline_of_a_reboot_is_the_policys() -> None:
    stage, request = checking(deadlines=Deadlines(reboot_s=90))
    stage.clock.advance(89)
    assert run.check(stage, request).next == "wait"
    stage.clock.advance(1)
    assert run.check(stage, request).next == "repair"


def test_a_node_that_becomes_another_machine_during_its_reboot_is_superseded() -> None:
    stage, request = checking()
    stage.cluster.remove_node(node_name(1))

    with pytest.raises(SupersededError):
        run.check(stage, request)


def test_the_check_of_a_reboot_survives_a_crash_at_every_call() -> None:
    def build() -> tuple[Stage, Callable[[], Any]]:
        stage, request = checking()
        stage.clock.advance(60)
        stage.boot()
        return stage, lambda: run.check(stage, request)

    def check(stage: Stage, result: Any) -> None:
        assert result.next == "validate"
        assert stage.mutations() == []

    assert after_every_crash(build, check) >= 4


def test_the_step_to_the_next_rung_survives_a_crash_at_every_call() -> None:
    def build() -> tuple[Stage, Callable[[], Any]]:
        stage, request = checking()
        stage.clock.advance(600)
        return stage, lambda: (run.check(stage, request), request)

    def check(stage: Stage, result: Any) -> None:
        answer, request = result
        assert answer.next == "repair"
        assert stage.incident(request.incident_id).rung_index == 1
        stage.outbox.publish_pending()
        assert times_sent(stage) == {"Incident Escalated": 1}

    assert after_every_crash(build, check) >= 4


@pytest.mark.case("R48")
def test_r48_while_a_node_reboots_it_starts_nothing_else_and_counts_as_unavailable() -> None:
    limits = Limits(MaxUnavailable(count=1, percent=50))
    stage, request = checking(limits=limits)
    stage.boot(readiness=Readiness.UNKNOWN)

    assert run.open_for(stage, gsp_finding(gpu_uuid="GPU-1-5", gpu_index="5")) == (
        request.incident_id
    )
    other = run.open_for(stage, gsp_finding(2))
    assert other is not None
    stage.dispatch_all(other)
    assert stage.incident(other).waiting_for == "capacity_guard"
    assert stage.mutations() == []


@pytest.mark.case("R48")
def test_r48_a_rebooted_node_leaves_no_stale_status_that_opens_a_second_incident() -> None:
    stage, incident_id = sick()
    Machine(stage, [(120, boots_well(stage))]).run(incident_id)
    assert closed(stage, incident_id).outcome is Outcome.REBOOTED

    run.scan(stage)

    assert stage.events("GPU Fault Detected") == []
    assert stage.incidents.list_open(CLUSTER) == []


# --- the gate before the uncordon -----------------------------------------------------------------


@pytest.mark.case("R56")
def test_r56_a_node_whose_device_plugin_is_late_stays_cordoned_for_the_whole_hold_down() -> None:
    stage, request = validating(hold_down_s=120)
    stage.boot(gpu_allocatable=0)
    assert run.validate(stage, request).next == "wait"
    stage.clock.advance(90)
    stage.boot(gpu_allocatable=8)
    stage.cluster.add_pod(pod("bare-1", phase="Failed"))
    stage.cluster.add_pod(pod("bare-2", phase="Failed"))
    offered_at = stage.clock.now()

    result = run.validate(stage, request)
    while result.next == "wait":
        assert stage.node().is_unschedulable
        stage.clock.advance(result.wait_s)
        result = run.validate(stage, request)

    assert stage.clock.now() - offered_at >= timedelta(seconds=120)
    event = stage.events("Repair Proven")[0]
    assert (event["rung"], event["gpus"], event["boot_id"]) == ("reboot", 8, "boot-2")
    assert event["failed_pods"] == 2
    assert "replacement" not in event
    assert run.release(stage, request).next == "close"
    assert not stage.node().is_unschedulable
    outcome, reason = verdict_of(stage, request)
    assert (outcome, reason.code) == (Outcome.REBOOTED, "rebooted")


@pytest.mark.parametrize("sick", ["finding", "same gpu", "lost", "unfit", "not ready"])
def test_a_node_that_is_still_sick_after_its_reboot_is_replaced(sick: str) -> None:
    stage, request = validating(hold_down_s=0, deadlines=Deadlines(reboot_s=60))
    match sick:
        case "finding":
            stage.metrics.answer("xid-count", samples(xid_labels(1, 119, 3)))
        case "same gpu":  # under another name, as where a node was found by its instance id
            labels = xid_labels(1, 119, 3) | {"Hostname": "exporter-pod-7"}
            stage.metrics.answer("xid-count", samples(labels))
        case "lost":
            stage.metrics.answer("count(count by (UUID", samples({}, value=7))
        case "unfit":
            stage.boot(gpu_allocatable=7)
        case "not ready":
            stage.boot(readiness=Readiness.UNKNOWN)

    assert until_not_waiting(stage, lambda: run.validate(stage, request)).next == "repair"

    event = stage.events("Incident Escalated")[0]
    assert (event["reason"]["code"], event["next_rung"]) == ("reboot_unhealthy", "replace")
    assert run.validate(stage, request).next == "repair"  # died before it could say so
    assert stage.node().is_unschedulable
    assert run.start(stage, request).next == "check"
    assert stage.mutations() == [TERMINATE]


@pytest.mark.parametrize("unknown", ["amp", "exporter"])
def test_what_is_unknown_after_a_reboot_is_no_reason_to_replace(unknown: str) -> None:
    stage, request = validating(hold_down_s=0, deadlines=Deadlines(reboot_s=60))
    if unknown == "amp":
        stage.metrics.fail("amp_timeout")
    else:
        stage.metrics.clear()

    assert until_not_waiting(stage, lambda: run.validate(stage, request)).next == "close"

    outcome, reason = verdict_of(stage, request)
    assert outcome is Outcome.NEEDS_HUMAN
    assert reason.code == ("metrics_unknown" if unknown == "amp" else "metrics_missing")


def test_a_fault_of_another_node_does_not_speak_against_the_rebooted_one() -> None:
    stage, request = validating(hold_down_s=0)
    stage.metrics.answer("xid-count", samples(xid_labels(2, 79, 3)))

    assert run.validate(stage, request).next == "release"


def test_a_node_that_boots_once_more_begins_its_hold_down_anew() -> None:
    stage, request = validating(hold_down_s=100)
    assert run.validate(stage, request).next == "wait"
    stage.clock.advance(90)
    stage.boot(boot_id="boot-3")

    assert run.validate(stage, request).next == "wait"
    stage.clock.advance(20)
    assert run.validate(stage, request).next == "wait"
    stage.clock.advance(80)
    assert run.validate(stage, request).next == "release"
    assert stage.events("Repair Proven")[0]["boot_id"] == "boot-3"


def test_a_node_that_was_cordoned_before_us_stays_cordoned_after_its_reboot() -> None:
    stage = Stage(policy=enforce(hold_down_s=0))
    stage.cordon_by_hand()
    request = stage.put(IncidentState.CORDONING, findings=(gsp_finding(),))
    run.cordon(stage, request)
    run.drain(stage, request)
    run.start(stage, request)
    stage.clock.advance(60)
    stage.boot()
    stage.metrics.answer("count(count by (UUID", samples({}, value=8))
    run.check(stage, request)
    run.validate(stage, request)

    run.release(stage, request)

    assert stage.node().is_unschedulable
    assert OWNER_ANNOTATION not in stage.node().annotations
    assert verdict_of(stage, request)[0] is Outcome.REBOOTED


def test_a_validation_without_a_rebooted_node_is_refused() -> None:
    stage, request = validating()
    noted = replace(repair_of(stage, request), rebooted_node=None)
    stage.save(request.incident_id, repair=noted)

    with pytest.raises(InvalidInputError):
        run.validate(stage, request)


# --- a cordon that gets lost ----------------------------------------------------------------------


@pytest.mark.case("R76")
@pytest.mark.parametrize("step", ["check", "validate"])
def test_r76_a_cordon_that_is_lost_during_our_reboot_is_put_back_once_and_told(step: str) -> None:
    stage, request = checking() if step == "check" else validating()
    look = run.check if step == "check" else run.validate
    stage.uncordon_by_hand()

    assert look(stage, request).next == "wait"

    assert is_cordoned_by(stage.node(), request.incident_id)
    told = stage.events("Node Cordoned")
    assert [event["reason"]["code"] for event in told] == ["cordon_lost"]
    assert stage.mutations() == [f"patch nodes/{node_name(1)}"]
    assert look(stage, request).next == "wait"
    assert len(stage.events("Node Cordoned")) == 1


@pytest.mark.case("R76")
def test_r76_a_cordon_that_is_lost_a_second_time_was_taken_off_on_purpose() -> None:
    stage, request = validating()
    stage.uncordon_by_hand()
    run.validate(stage, request)
    stage.uncordon_by_hand()

    assert run.validate(stage, request).next == "close"

    outcome, reason = verdict_of(stage, request)
    assert (outcome, reason.code) == (Outcome.ABORTED_BY_OPERATOR, "uncordoned")
    assert not stage.node().is_unschedulable
    assert OWNER_ANNOTATION not in stage.node().annotations


@pytest.mark.case("R76")
def test_r76_a_node_without_our_mark_is_not_cordoned_again() -> None:
    stage, request = checking()

    def stripped(node: Node) -> Node:
        return replace(node, is_unschedulable=False, annotations={}, taints=())

    stage.cluster.change_node(node_name(1), stripped)

    assert run.check(stage, request).next == "close"
    assert verdict_of(stage, request)[0] is Outcome.ABORTED_BY_OPERATOR
    assert stage.mutations() == []


@pytest.mark.case("R76")
def test_r76_putting_the_cordon_back_survives_a_crash_at_every_call() -> None:
    def build() -> tuple[Stage, Callable[[], Any]]:
        stage, request = checking()
        stage.uncordon_by_hand()
        return stage, lambda: run.check(stage, request)

    def check(stage: Stage, result: Any) -> None:
        assert result.next == "wait"
        assert stage.node().is_unschedulable
        assert stage.mutations() == [f"patch nodes/{node_name(1)}"]
        stage.outbox.publish_pending()
        assert times_sent(stage) == {"Node Cordoned": 1}

    assert after_every_crash(build, check) >= 8


def test_a_lowered_mode_keeps_the_cordon_from_being_put_back() -> None:
    stage, request = checking()
    stage.uncordon_by_hand()
    stage.policies.policy = enforce(mode=Mode.DRY_RUN)

    assert run.check(stage, request).next == "close"
    assert verdict_of(stage, request)[1].code == "mode_changed"
    assert stage.mutations() == []


def paused_node(node: Node) -> Node:
    """A node that a person has paused."""
    return replace(node, annotations={**node.annotations, PAUSE_ANNOTATION: "mine for now"})


def test_a_paused_node_is_neither_rebooted_nor_replaced() -> None:
    for rung_index in (0, 1):
        stage, request = drained()
        stage.save(request.incident_id, rung_index=rung_index)
        stage.cluster.change_node(node_name(1), paused_node)

        assert run.start(stage, request).next == "close"
        outcome, reason = verdict_of(stage, request)
        assert (outcome, reason.code) == (Outcome.ABORTED_BY_OPERATOR, "node_paused")
        assert stage.mutations() == []


def test_a_lost_cordon_of_a_paused_node_is_put_back_when_the_pause_is_over() -> None:
    stage, request = checking()
    stage.uncordon_by_hand()
    stage.cluster.change_node(node_name(1), paused_node)

    assert run.check(stage, request).next == "wait"
    assert stage.mutations() == []

    def resumed(node: Node) -> Node:
        kept = {k: v for k, v in node.annotations.items() if k != PAUSE_ANNOTATION}
        return replace(node, annotations=kept)

    stage.cluster.change_node(node_name(1), resumed)
    assert run.check(stage, request).next == "wait"
    assert stage.node().is_unschedulable
    assert len(stage.events("Node Cordoned")) == 1


def test_a_cordon_that_comes_back_by_itself_while_it_is_put_back_is_as_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage, request = checking()
    stage.uncordon_by_hand()
    patch_node = stage.cluster.patch_node

    def beaten(name: str, patch: Any) -> bool:
        """Somebody else's patch comes first, and does the same."""
        patch_node(name, patch)
        return False

    monkeypatch.setattr(stage.cluster, "patch_node", beaten)

    assert run.check(stage, request).next == "wait"
    assert is_cordoned_by(stage.node(), request.incident_id)


def test_a_node_that_never_holds_still_is_cordoned_again_by_the_retry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage, request = checking()
    stage.uncordon_by_hand()
    monkeypatch.setattr(stage.cluster, "patch_node", lambda name, patch: False)

    with pytest.raises(ConcurrentUpdateError):
        run.check(stage, request)
    monkeypatch.undo()
    assert run.check(stage, request).next == "wait"
    assert stage.node().is_unschedulable
    assert len(stage.events("Node Cordoned")) == 1


# --- whole remediations ---------------------------------------------------------------------------


def sick(finding: Finding | None = None, **policy: Any) -> tuple[Stage, str]:
    """A stage on which a scan's finding was opened and admitted; the incident's id."""
    stage = Stage(policy=enforce(**policy))
    stage.cluster.add_pod(pod("train-0"))
    stage.metrics.answer("xid-count", samples(xid_labels(1, 119, 3)))
    incident_id = run.open_for(stage, finding or gsp_finding())
    assert incident_id is not None
    stage.dispatch_all(incident_id)
    return stage, incident_id


def healed(stage: Stage) -> None:
    """Let the fault be gone and all GPUs report."""
    stage.metrics.clear()
    stage.metrics.answer("count(count by (UUID", samples({}, value=8))


def boots_well(stage: Stage) -> Callable[[], None]:
    """Let the node boot and be cured."""

    def boot() -> None:
        stage.boot()
        healed(stage)

    return boot


def closed(stage: Stage, incident_id: str) -> Incident:
    """Return the closed incident, and assert that nothing is left behind."""
    incident = stage.incident(incident_id)
    assert incident.is_closed
    assert stage.guards.load(CLUSTER).slots == {}
    assert stage.outbox.publish_pending() == (0, 0)
    assert len(stage.events("Incident Closed")) == 1
    return incident


def test_rebooted_the_node_takes_pods_again_and_nothing_else_was_touched() -> None:
    stage, incident_id = sick()
    before = stage.node()

    Machine(stage, [(120, boots_well(stage))]).run(incident_id)

    incident = closed(stage, incident_id)
    assert incident.outcome is Outcome.REBOOTED
    assert stage.mutations() == [
        f"patch nodes/{node_name(1)}",
        "evict pods/ml/train-0",
        f"patch nodes/{node_name(1)}",
        REBOOT,
    ]
    node = stage.node()
    assert (node.is_unschedulable, node.taints, node.annotations) == (
        before.is_unschedulable,
        before.taints,
        before.annotations,
    )
    assert words(incident.timeline) == [
        "open_incident: Incident Opened",
        "dispatch_incidents: Incident Admitted",
        "verify_fault: Fault Verified",
        "cordon_node: Node Cordoned",
        "drain_node: Node Drained",
        "start_repair: Repair Started",
        "validate_node: Repair Proven",
        "release_node: Node Released",
        "close_incident: Incident Closed",
    ]


def test_a_reboot_that_does_not_cure_is_followed_by_one_replacement() -> None:
    stage, incident_id = sick()

    def arrive() -> None:
        healed(stage)
        stage.replace_node()

    machine = Machine(stage, [(120, stage.boot), (3600, arrive)])
    machine.run(incident_id)

    incident = closed(stage, incident_id)
    assert incident.outcome is Outcome.REPLACED
    assert [m for m in stage.mutations() if m in (REBOOT, TERMINATE)] == [REBOOT, TERMINATE]
    assert [attempt.rung for attempt in incident.attempts] == [Rung.REBOOT]
    assert incident.rungs_asked == (Rung.REBOOT, Rung.REPLACE)
    assert stage.events("Incident Escalated")[0]["next_rung"] == "replace"
    assert machine.visited.count("StartRepair") == 2


def test_a_ladder_that_comes_to_its_end_calls_a_person_and_tries_each_rung_once() -> None:
    stage, incident_id = sick()

    Machine(stage).run(incident_id)

    incident = closed(stage, incident_id)
    assert (incident.outcome, incident.reason and incident.reason.code) == (
        Outcome.NEEDS_HUMAN,
        "replacement_missing",
    )
    assert [m for m in stage.mutations() if m in (REBOOT, TERMINATE)] == [REBOOT, TERMINATE]
    escalations = [event["next_rung"] for event in stage.events("Incident Escalated")]
    assert escalations == ["replace", "human"]


@pytest.mark.case("R46")
def test_r46_a_denied_reboot_and_a_denied_replacement_end_with_a_person() -> None:
    stage, incident_id = sick()
    stage.instances.faults.fail("reboot", AwsForbiddenError(DENIED), times=None)
    denied = "autoscaling:TerminateInstanceInAutoScalingGroup: AccessDenied: no"
    stage.capacity.faults.fail("terminate", AwsForbiddenError(denied), times=None)

    machine = Machine(stage)
    machine.run(incident_id)

    incident = closed(stage, incident_id)
    assert incident.outcome is Outcome.NEEDS_HUMAN
    assert str(incident.reason) == f"aws_forbidden: {denied}"
    assert machine.visited.count("EscalateIncident") == 2
    assert stage.node().is_unschedulable


def test_a_drain_that_fails_leads_to_no_repair_at_all() -> None:
    stage, incident_id = sick()
    stage.cluster.stuck.add("ml/train-0")

    machine = Machine(stage)
    machine.run(incident_id)

    assert "StartRepair" not in machine.visited
    assert closed(stage, incident_id).outcome is Outcome.NEEDS_HUMAN
    assert not {REBOOT, TERMINATE} & set(stage.mutations())


@pytest.mark.case("R50")
def test_r50_a_replacement_that_takes_its_time_is_waited_for_and_not_replaced_again() -> None:
    stage, incident_id = sick(xid_finding(code=119, action="replace_node"))
    start = stage.clock.now()

    def joins() -> None:
        healed(stage)
        stage.replace_node(gpu_capacity=0, gpu_allocatable=0)

    def offers() -> None:
        stage.cluster.add_node(gpu_node(9))

    machine = Machine(stage, [(18 * 60, joins), (24 * 60, offers)])
    machine.run(incident_id)

    assert closed(stage, incident_id).outcome is Outcome.REPLACED
    assert stage.clock.now() - start > timedelta(minutes=24)
    assert stage.mutations().count(TERMINATE) == 1


@pytest.mark.case("R50")
def test_r50_a_replacement_that_never_offers_its_gpus_is_a_persons_and_not_replaced_again() -> None:
    stage, incident_id = sick(xid_finding(code=119, action="replace_node"))

    def joins() -> None:
        healed(stage)
        stage.replace_node(gpu_capacity=0, gpu_allocatable=0)

    Machine(stage, [(600, joins)]).run(incident_id)

    incident = closed(stage, incident_id)
    assert (incident.outcome, incident.reason and incident.reason.code) == (
        Outcome.NEEDS_HUMAN,
        "replacement_unhealthy",
    )
    assert [m for m in stage.mutations() if m.startswith("terminate")] == [TERMINATE]


# --- the memory -----------------------------------------------------------------------------------


def again(stage: Stage, *findings: Finding) -> str:
    """Let the scan report a fault on the new boot, and the dispatcher decide; the incident's id."""
    stage.metrics.answer("xid-count", samples(xid_labels(1, 119, 3)))
    fresh = [
        replace(one, evidence=replace(one.evidence, at=stage.clock.now()))
        for one in (findings or (gsp_finding(),))
    ]
    incident_id = run.open_for(stage, *fresh)
    assert incident_id is not None
    stage.dispatch_all(incident_id)
    return incident_id


def rebooted(**policy: Any) -> Stage:
    """A stage on which GPU 3 of node 1 was cured by a reboot an hour ago."""
    stage, incident_id = sick(**policy)
    Machine(stage, [(120, boots_well(stage))]).run(incident_id)
    assert closed(stage, incident_id).outcome is Outcome.REBOOTED
    stage.clock.advance(3600)
    clear(stage)
    return stage


@pytest.mark.case("R73")
def test_r73_the_same_gpu_that_is_faulty_again_is_replaced_and_not_rebooted_again() -> None:
    stage = rebooted()

    incident_id = again(stage)

    incident = stage.incident(incident_id)
    assert (incident.state, incident.rung) == (IncidentState.ADMITTED, Rung.REPLACE)
    assert "dispatch_incidents: Next Rung" in words(incident.timeline)

    def arrive() -> None:
        healed(stage)
        stage.replace_node()

    Machine(stage, [(200, arrive)]).run(incident_id)
    assert closed(stage, incident_id).outcome is Outcome.REPLACED
    assert REBOOT not in stage.mutations()


@pytest.mark.case("R73")
def test_r73_quiet_after_the_drain_is_no_recovery() -> None:
    """The node says nothing any more once it is drained, and yet is rebooted."""
    stage, incident_id = sick()
    quiet = [(25, stage.metrics.clear), (120, boots_well(stage))]

    Machine(stage, quiet).run(incident_id)

    assert stage.incident(incident_id).outcome is Outcome.REBOOTED
    assert stage.mutations().count(REBOOT) == 1


def test_another_gpu_of_the_machine_begins_at_the_first_rung() -> None:
    stage = rebooted()
    stage.metrics.answer("xid-count", samples(xid_labels(1, 119, 5)))
    other = gsp_finding(gpu_uuid="GPU-1-5", gpu_index="5")

    assert stage.incident(again(stage, other)).rung is Rung.REBOOT


def test_after_the_window_the_ladder_begins_anew() -> None:
    stage = rebooted(repeat_window_s=1800)

    assert stage.incident(again(stage)).rung is Rung.REBOOT


def test_a_fault_that_names_no_gpu_is_remembered_by_its_machine() -> None:
    stage = rebooted()
    nameless = gsp_finding(gpu_uuid="", gpu_index="")

    assert stage.incident(again(stage, nameless)).rung is Rung.REPLACE


def test_the_record_of_a_repeat_offender_is_told_when_it_opens_and_when_it_closes() -> None:
    stage = rebooted()
    first = next(iter(stage.incidents.records))

    incident_id = again(stage)

    opened = stage.events("Incident Opened")[0]
    assert [entry["incident_id"] for entry in opened["record"]] == [first]
    known = opened["record"][0]
    assert (known["fault"], known["outcome"], known["rungs"]) == ("xid 119", "REBOOTED", ["reboot"])
    assert known["instance_id"] == instance_id(1)
    assert known["gpu_uuids"] == ["GPU-1-3"]
    incident = stage.incident(incident_id)
    line = incident.timeline[0]
    assert (line.what, line.reason.code) == ("Earlier Incidents", "repeat_offender")
    assert "xid 119 REBOOTED after reboot" in line.reason.text
    Machine(stage).run(incident_id)
    assert stage.events("Incident Closed")[0]["record"] == opened["record"]


def past(days: float, *rungs: Rung, number: int = 1, **changes: Any) -> PastIncident:
    """An earlier incident of node 1."""
    values: dict[str, Any] = {
        "incident_id": f"01PAST{days}",
        "at": START - timedelta(days=days),
        "fault": "xid 48",
        "outcome": "REBOOTED",
        "instance_id": instance_id(number),
        "gpu_uuids": ("GPU-1-7",),
        "rungs": rungs,
    }
    return PastIncident(**(values | changes))


def remembering(*entries: PastIncident, **policy: Any) -> Stage:
    """A stage that knows these earlier incidents."""
    stage = Stage(policy=enforce(**policy))
    for entry in entries:
        subjects = [instance(entry.instance_id), *(gpu(uuid) for uuid in entry.gpu_uuids)]
        stage.history.remember(CLUSTER, subjects, entry)
    return stage


@pytest.mark.parametrize(("days", "state"), [(1, IncidentState.CLOSED), (8, "admitted")])
def test_a_machine_that_had_its_repairs_is_a_persons_and_is_not_cordoned(
    days: float, state: str
) -> None:
    stage = remembering(*(past(days + n / 10, Rung.REBOOT) for n in range(3)))

    incident = stage.incident(again(stage))

    assert incident.state == state
    if state is IncidentState.CLOSED:
        assert incident.outcome is Outcome.NEEDS_HUMAN
        assert incident.reason is not None
        assert incident.reason.code == "attempts_exhausted"
        assert stage.mutations() == []
        assert stage.guards.load(CLUSTER).slots == {}
        assert "all the repairs" in stage.events("Incident Closed")[0]["remedy"]
        # The next scan does not call the person again.
        assert run.open_for(stage, gsp_finding()) is None


def test_the_number_of_repairs_is_the_policys_and_counts_repairs_and_not_incidents() -> None:
    entries = (past(1, Rung.REBOOT, Rung.REPLACE), past(2), past(3))
    stage = remembering(*entries, attempts=Attempts(per_node=2))
    assert stage.incident(again(stage)).is_closed

    stage = remembering(*entries)
    assert stage.incident(again(stage)).state is IncidentState.ADMITTED


def test_a_gpu_that_comes_back_in_another_instance_is_not_replaced_again() -> None:
    moved = past(2, Rung.REPLACE, number=4, gpu_uuids=("GPU-1-3",), outcome="REPLACED")
    stage = remembering(moved)

    incident = stage.incident(again(stage))

    assert incident.outcome is Outcome.NEEDS_HUMAN
    assert incident.reason is not None
    assert incident.reason.code == "repeat_offender"
    assert "GPU-1-3 is faulty again" in incident.reason.text
    assert stage.mutations() == []


def test_in_a_dry_run_nobody_is_called_for_a_repeat_offender() -> None:
    stage = remembering(*(past(1 + n, Rung.REBOOT) for n in range(3)), mode=Mode.DRY_RUN)

    assert stage.incident(again(stage)).outcome is Outcome.SKIPPED


def test_what_a_person_starts_by_hand_begins_at_the_first_rung_whatever_was_before() -> None:
    stage = remembering(
        *(past(1 + n, Rung.REBOOT) for n in range(5)), plans={FaultClass.MANUAL: LADDER}
    )

    result = run.admit(stage, run.BY_HAND, run.HAND)

    assert result.next == "verify"
    incident = stage.incident(run.BY_HAND.incident_id)
    assert incident.rung is Rung.REBOOT
    assert len(stage.events("Incident Opened")[0]["record"]) == 5


def test_a_second_sick_gpu_brings_its_own_record_into_the_open_incident() -> None:
    moved = past(2, Rung.REBOOT, number=4, gpu_uuids=("GPU-1-5",))
    stage = remembering(moved)
    incident_id = run.open_for(stage, gsp_finding())
    assert incident_id is not None
    assert stage.incident(incident_id).history == ()

    run.open_for(stage, gsp_finding(gpu_uuid="GPU-1-5", gpu_index="5"))

    assert [one.incident_id for one in stage.incident(incident_id).history] == [moved.incident_id]


def test_rehearsals_and_what_was_never_admitted_are_not_remembered() -> None:
    stage, incident_id = sick(mode=Mode.DRY_RUN)
    Machine(stage).run(incident_id)
    assert stage.history.recall(CLUSTER, [instance(instance_id(1))]) == ()

    stage, incident_id = sick(exclude=(node_name(1),))
    assert stage.incident(incident_id).is_closed
    assert stage.history.recall(CLUSTER, [instance(instance_id(1))]) == ()


def test_a_repair_that_was_refused_does_not_count_as_an_attempt() -> None:
    stage, incident_id = sick(plans={FaultClass.XID: (Rung.REBOOT, Rung.HUMAN)})
    stage.instances.faults.fail("reboot", AwsForbiddenError(DENIED))

    Machine(stage).run(incident_id)

    (entry,) = stage.history.recall(CLUSTER, [gpu("GPU-1-3")])
    assert (entry.outcome, entry.rungs) == ("NEEDS_HUMAN", ())


def test_the_close_of_a_rebooted_incident_survives_a_crash_at_every_call_and_is_noted_once() -> (
    None
):
    def build() -> tuple[Stage, Callable[[], Any]]:
        stage, request = validating(hold_down_s=0)
        run.validate(stage, request)
        run.release(stage, request)
        stage.bus.accepted.clear()
        return stage, lambda: run.close(stage, request)

    def check(stage: Stage, result: Any) -> None:
        assert result.outcome == "REBOOTED"
        record = stage.history.recall(CLUSTER, [instance(instance_id(1)), gpu("GPU-1-3")])
        assert [entry.outcome for entry in record] == ["REBOOTED"]
        stage.outbox.publish_pending()
        assert times_sent(stage) == {"Incident Closed": 1}

    assert after_every_crash(build, check) >= 6


def test_the_group_of_the_stage_keeps_its_members_through_a_reboot() -> None:
    stage, incident_id = sick()
    members = stage.capacity.group(stage.policies.current().clusters[0], GROUP)

    Machine(stage, [(120, boots_well(stage))]).run(incident_id)

    assert stage.capacity.group(stage.policies.current().clusters[0], GROUP) == members
