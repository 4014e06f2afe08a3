"""What the watch decides about cordons, ages, and silences."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import yaml

from nodemend.domain.cordon import cordon_patch, plan_ownership
from nodemend.domain.faults import Family, Mode, Rung
from nodemend.domain.guard import Pause
from nodemend.domain.history import PastIncident
from nodemend.domain.incidents import (
    Incident,
    IncidentState,
    Outcome,
    RepairRecord,
    close,
)
from nodemend.domain.nodes import REMEDIATION_TAINT_KEY, Node, Taint
from nodemend.domain.policy import ApprovalPolicy, Deadlines, Policy
from nodemend.domain.rails import EXCLUDE_LABEL, PAUSE_ANNOTATION
from nodemend.domain.reasons import Reason
from nodemend.domain.watch import (
    KEPT_FOR,
    LEAVING_FOR,
    SETTLED_AFTER,
    SILENT_AFTER,
    STEP,
    Care,
    CordonVerdict,
    hands_node_back,
    is_marked,
    is_silent,
    judge_cordon,
    why_nobody_needed,
    why_overdue,
)
from tests.fakes.examples import NODE, waiting
from tests.fakes.system import START
from tests.unit.structure.repository import resources

ENFORCE = Policy(version="v1", mode=Mode.ENFORCE)
REBOOT = RepairRecord(Rung.REBOOT, "g", (), 2, START)
REPLACE = RepairRecord(Rung.REPLACE, "g", (), 2, START)
MINUTE = timedelta(minutes=1)


def ended(outcome: Outcome, code: str = "x", *, step: str = "close_incident", **changes: Any):
    """An incident that was closed at START."""
    incident = replace(waiting(), state=IncidentState.DRAINING, mode=Mode.ENFORCE, **changes)
    return close(incident, outcome, Reason(code, "why"), step=step, now=START)


def cordoned(incident_id: str = waiting().id, **changes: Any) -> Node:
    """A node with a whole cordon of an incident."""
    node = Node(ref=NODE, **changes)
    ownership = plan_ownership(node, incident_id)
    annotations = next(
        one["value"]
        for one in cordon_patch(node, ownership)
        if one["path"] == "/metadata/annotations"
    )
    taints = (*node.taints, Taint(REMEDIATION_TAINT_KEY, "NoSchedule"))
    return replace(node, is_unschedulable=True, taints=taints, annotations=annotations)


def judged(
    owner: Incident | None,
    node: Node | None = None,
    *,
    after: timedelta = timedelta(minutes=5),
    policy: Policy = ENFORCE,
    pause: Pause | None = None,
    is_open: bool = False,
) -> CordonVerdict:
    return judge_cordon(
        node or cordoned(),
        owner,
        has_open_incident=is_open,
        policy=policy,
        pause=pause,
        now=START + after,
    )


@pytest.mark.parametrize(
    ("outcome", "code", "changes", "is_handed_back"),
    [
        (Outcome.RECOVERED, "recovered", {}, True),
        (Outcome.REBOOTED, "rebooted", {"repair": REBOOT}, True),
        (Outcome.OBSERVED, "dry_run", {}, True),
        (Outcome.SKIPPED, "other_remediator", {}, True),
        (Outcome.SUPERSEDED, "superseded", {}, True),
        (Outcome.ABORTED_BY_OPERATOR, "execution_stopped", {}, True),
        (Outcome.ABORTED_BY_OPERATOR, "approval_denied", {}, True),
        (Outcome.ABORTED_BY_OPERATOR, "uncordoned", {"repair": REBOOT}, True),
        # Asked for and not proven: whether the instance is going, nobody knows.
        (Outcome.ABORTED_BY_OPERATOR, "execution_stopped", {"repair": REBOOT}, False),
        (Outcome.ABORTED_BY_OPERATOR, "execution_stopped", {"repair": REPLACE}, False),
        (Outcome.ABORTED_BY_OPERATOR, "execution_stopped", {"attempts": (REBOOT,)}, False),
        (Outcome.SUPERSEDED, "superseded", {"repair": REPLACE}, False),
        # Nobody judged the fault, and nobody wanted the node back.
        (Outcome.ABORTED_BY_OPERATOR, "paused", {}, False),
        (Outcome.ABORTED_BY_OPERATOR, "node_paused", {}, False),
        (Outcome.ABORTED_BY_OPERATOR, "mode_changed", {}, False),
        (Outcome.NEEDS_HUMAN, "cordon_only", {}, False),
        (Outcome.REPLACED, "replaced", {"repair": REPLACE}, False),
    ],
)
def test_a_node_is_handed_back_where_nothing_was_asked_of_it(
    outcome: Outcome, code: str, changes: Any, is_handed_back: bool
) -> None:
    assert hands_node_back(ended(outcome, code, **changes)) is is_handed_back
    assert (judged(ended(outcome, code, **changes)).care is Care.RESTORE) is is_handed_back


def test_a_cordon_that_was_kept_for_a_person_before_is_not_taken_off_by_a_stop() -> None:
    past = PastIncident("01OLD", START, "xid 79", "NEEDS_HUMAN", NODE.instance_id)
    other = replace(past, instance_id="i-0bbbbbbbbbbbbbbb2")
    well = replace(past, outcome="REBOOTED")
    stop = (Outcome.ABORTED_BY_OPERATOR, "execution_stopped")

    assert not hands_node_back(ended(*stop, history=(past,)))
    assert hands_node_back(ended(*stop, history=(other, well, past)))
    assert hands_node_back(ended(Outcome.REBOOTED, "rebooted", history=(past,)))


def test_what_an_open_incident_has_is_left_whoever_cordoned_it() -> None:
    still_open = replace(waiting(), state=IncidentState.DRAINING)

    assert judged(still_open).care is Care.LEAVE
    assert judged(ended(Outcome.RECOVERED), is_open=True).care is Care.LEAVE
    assert judged(None, is_open=True).care is Care.LEAVE


def test_an_incident_that_has_only_just_ended_is_left_to_its_last_step() -> None:
    by_step = ended(Outcome.RECOVERED)
    by_watch = ended(Outcome.ABORTED_BY_OPERATOR, "execution_stopped", step=STEP)
    early = SETTLED_AFTER - timedelta(seconds=1)

    assert judged(by_step, after=early).reason.code == "settling"
    assert judged(by_step, after=SETTLED_AFTER).care is Care.RESTORE
    assert judged(by_watch, after=timedelta()).care is Care.RESTORE


@pytest.mark.parametrize(
    ("node", "owner", "code"),
    [
        (replace(cordoned(), annotations={}), None, "cordon_unreadable"),
        (replace(cordoned(), annotations={"nodemend/incident": "{"}), None, "cordon_unreadable"),
        (cordoned("01OF-ANOTHER-STACK"), None, "owner_unknown"),
    ],
    ids=["taint alone", "broken note", "unknown id"],
)
def test_a_cordon_whose_past_is_not_known_is_only_told_of(
    node: Node, owner: Incident | None, code: str
) -> None:
    verdict = judged(owner, node, after=timedelta(days=30))

    assert (verdict.care, verdict.reason.code, verdict.since) == (Care.TELL, code, None)


def test_a_note_about_another_machine_is_only_told_of() -> None:
    other = replace(ended(Outcome.RECOVERED), node=replace(NODE, uid="uid-of-another"))

    verdict = judged(other)

    assert (verdict.care, verdict.reason.code) == (Care.TELL, "owner_of_other_node")


@pytest.mark.parametrize(
    ("outcome", "code", "patience", "told"),
    [
        (Outcome.NEEDS_HUMAN, "drain_deadline", KEPT_FOR, "cordon_kept"),
        (Outcome.REPLACED, "replaced", LEAVING_FOR, "not_gone"),
        (Outcome.ABORTED_BY_OPERATOR, "paused", timedelta(minutes=2), "cordon_kept"),
    ],
)
def test_a_cordon_that_is_kept_is_told_of_when_it_is_past_its_age(
    outcome: Outcome, code: str, patience: timedelta, told: str
) -> None:
    owner = ended(outcome, code)

    assert judged(owner, after=patience - timedelta(seconds=1)).care is Care.LEAVE
    verdict = judged(owner, after=patience)
    assert (verdict.care, verdict.reason.code) == (Care.TELL, told)
    assert verdict.since is not None
    assert verdict.since <= START + patience


PAUSED = Pause("alice", "network work", START)


@pytest.mark.parametrize(
    ("node", "pause", "code"),
    [
        (cordoned(), PAUSED, "paused"),
        (
            replace(cordoned(), annotations={**cordoned().annotations, PAUSE_ANNOTATION: "me"}),
            None,
            "node_paused",
        ),
        (cordoned(labels={EXCLUDE_LABEL: "true"}), None, "excluded"),
        (replace(cordoned(), is_deleting=True), None, "other_remediator"),
        (
            cordoned(taints=(Taint("karpenter.sh/disrupted", "NoSchedule"),)),
            None,
            "other_remediator",
        ),
    ],
    ids=["pause", "node pause", "label", "being deleted", "Karpenter"],
)
def test_a_release_waits_for_whoever_is_at_work_and_is_told_of_in_the_end(
    node: Node, pause: Pause | None, code: str
) -> None:
    owner = ended(Outcome.RECOVERED)

    early = judged(owner, node, pause=pause)
    assert (early.care, early.reason.code) == (Care.LEAVE, code)
    late = judged(owner, node, pause=pause, after=KEPT_FOR)
    assert (late.care, late.reason.code, late.since) == (Care.TELL, code, START + KEPT_FOR)


@pytest.mark.parametrize(
    ("policy", "code"),
    [
        (replace(ENFORCE, mode=Mode.DRY_RUN), "mode_forbids"),
        (replace(ENFORCE, exclude=(NODE.name,)), "excluded"),
        (replace(ENFORCE, exclude=(NODE.instance_id,)), "excluded"),
    ],
)
def test_where_the_policy_lets_nothing_be_changed_a_person_is_told_at_once(
    policy: Policy, code: str
) -> None:
    verdict = judged(ended(Outcome.RECOVERED), policy=policy)

    assert (verdict.care, verdict.reason.code) == (Care.TELL, code)


def test_cordon_only_lets_a_node_go() -> None:
    assert judged(
        ended(Outcome.RECOVERED), policy=replace(ENFORCE, mode=Mode.CORDON_ONLY)
    ).care is (Care.RESTORE)


def test_a_node_is_marked_by_taint_or_note_and_by_nobody_elses_cordon() -> None:
    assert is_marked(cordoned())
    assert is_marked(Node(ref=NODE, taints=(Taint(REMEDIATION_TAINT_KEY, "NoSchedule"),)))
    assert not is_marked(Node(ref=NODE, is_unschedulable=True))


# --- ages -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "changes", "limit"),
    [
        (IncidentState.WAITING, {}, timedelta(hours=24)),
        (IncidentState.WAITING, {"waiting_for": "capacity_guard"}, timedelta(hours=24)),
        (IncidentState.WAITING, {"waiting_for": "maintenance_window"}, timedelta(days=8)),
        (IncidentState.ADMITTED, {}, timedelta(hours=1)),
        (IncidentState.VERIFYING, {}, timedelta(hours=1, seconds=1)),
        (
            IncidentState.APPROVING,
            {"approval_policy": ApprovalPolicy(timeout_s=7200)},
            timedelta(hours=3, seconds=1),
        ),
        (IncidentState.CORDONING, {}, timedelta(hours=1)),
        (IncidentState.DRAINING, {}, timedelta(hours=1, seconds=20)),
        (IncidentState.REPAIRING, {}, timedelta(hours=1)),
        (IncidentState.CHECKING, {}, timedelta(hours=1, seconds=4000)),
        (IncidentState.VALIDATING, {}, timedelta(hours=1, seconds=54000)),
        (IncidentState.RELEASING, {}, timedelta(hours=1)),
        (IncidentState.ESCALATING, {}, timedelta(hours=1)),
    ],
)
def test_a_state_may_last_as_long_as_its_own_deadline_and_an_hour(
    state: IncidentState, changes: Any, limit: timedelta
) -> None:
    incident = replace(
        waiting(),
        state=state,
        deadlines=Deadlines(verify_s=1, drain_s=20, replace_s=4000, reboot_s=300),
        hold_down_s=50000,
        **changes,
    )

    assert why_overdue(incident, START + limit - timedelta(seconds=1)) is None
    late = why_overdue(incident, START + limit)
    assert late is not None
    reason, due = late
    assert due == START + limit
    is_waiting = state is IncidentState.WAITING
    assert reason.code == ("waits_long" if is_waiting else "past_deadline")
    assert incident.waiting_for in reason.text


# --- the end without a person ---------------------------------------------------------------------


def left_behind(**changes: Any) -> Incident:
    return replace(waiting(), state=IncidentState.DRAINING, mode=Mode.ENFORCE, **changes)


@pytest.mark.case("R43")
def test_r43_an_old_incident_of_a_node_that_has_booted_since_is_expired() -> None:
    rebooted = Node(ref=replace(NODE, boot_id="boot-of-today"))

    end = why_nobody_needed(left_behind(), rebooted, START + timedelta(days=3))

    assert end is not None
    assert (end[0], end[1].code) == (Outcome.SKIPPED, "expired")


@pytest.mark.case("R28")
@pytest.mark.parametrize("node", [None, Node(ref=replace(NODE, uid="uid-of-the-next"))])
def test_r28_an_incident_whose_machine_is_gone_needs_nobody(node: Node | None) -> None:
    end = why_nobody_needed(left_behind(), node, START)

    assert end is not None
    assert (end[0], end[1].code) == (Outcome.SUPERSEDED, "already_gone")


@pytest.mark.parametrize(
    ("changes", "node", "after"),
    [
        ({}, Node(ref=NODE), timedelta(days=3)),
        ({}, Node(ref=replace(NODE, boot_id="")), timedelta(days=3)),
        ({}, Node(ref=replace(NODE, boot_id="boot-2")), 10 * MINUTE),
        ({"node": replace(NODE, boot_id="")}, Node(ref=NODE), timedelta(days=3)),
        ({"repair": REPLACE}, None, timedelta(days=3)),
        ({"repair": REBOOT}, Node(ref=replace(NODE, boot_id="boot-2")), timedelta(days=3)),
        ({"attempts": (REBOOT,)}, None, timedelta(days=3)),
    ],
    ids=[
        "same boot",
        "boot unknown",
        "recent",
        "boot never known",
        "replaced",
        "rebooted",
        "tried",
    ],
)
def test_a_person_must_look_where_the_node_is_as_it_was_or_a_repair_was_asked_for(
    changes: Any, node: Node | None, after: timedelta
) -> None:
    assert why_nobody_needed(left_behind(**changes), node, START + after) is None


# --- scans ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", Family)
def test_a_scan_is_silent_when_its_alarm_says_so(family: Family) -> None:
    alarm = resources("AWS::CloudWatch::Alarm")[f"Scan{family.capitalize()}Silent"]

    assert timedelta(seconds=alarm["Period"]) == SILENT_AFTER[family]
    assert is_silent(family, START, START + SILENT_AFTER[family])
    assert not is_silent(family, START, START + SILENT_AFTER[family] - timedelta(seconds=1))


@pytest.mark.parametrize("family", Family)
def test_a_scan_that_is_silent_has_missed_three_turns_or_more(family: Family) -> None:
    function = resources("AWS::Serverless::Function")[f"Scan{family.capitalize()}Function"]
    expression = function["Events"]["Schedule"]["Properties"]["ScheduleExpression"]
    minutes = int(yaml.safe_load(expression.removeprefix("rate(").split()[0]))

    assert SILENT_AFTER[family] >= 3 * minutes * MINUTE
