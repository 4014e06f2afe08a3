"""The life of an incident: legal moves, events, ends, and what its fault is."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodemend.domain.errors import IllegalTransitionError, SupersededError
from nodemend.domain.escalation import escalate, reason_of
from nodemend.domain.events import DetailType
from nodemend.domain.faults import FaultClass, FaultKind, Mode, Rung, Verdict
from nodemend.domain.findings import Evidence, Finding
from nodemend.domain.incidents import (
    TIMELINE_LIMIT,
    TOUCHES_NODE,
    TRANSITIONS,
    Incident,
    IncidentState,
    Origin,
    Outcome,
    attach,
    close,
    decide_end,
    move,
    record,
    require_owner,
)
from nodemend.domain.nodes import NodeRef
from nodemend.domain.reasons import Reason

NOW = datetime(2026, 5, 1, 10, 0, tzinfo=UTC)
S = IncidentState
WHY = Reason("why", "because")

LEGAL = {
    S.WAITING: {S.ADMITTED, S.ESCALATING, S.CLOSED},
    S.ADMITTED: {S.VERIFYING, S.WAITING, S.ESCALATING, S.CLOSED},
    S.VERIFYING: {S.APPROVING, S.CORDONING, S.RELEASING, S.ESCALATING, S.CLOSED},
    S.APPROVING: {S.CORDONING, S.REPAIRING, S.RELEASING, S.ESCALATING, S.CLOSED},
    S.CORDONING: {S.DRAINING, S.RELEASING, S.ESCALATING, S.CLOSED},
    S.DRAINING: {S.REPAIRING, S.RELEASING, S.ESCALATING, S.CLOSED},
    S.REPAIRING: {S.APPROVING, S.CHECKING, S.RELEASING, S.ESCALATING, S.CLOSED},
    S.CHECKING: {S.VALIDATING, S.REPAIRING, S.RELEASING, S.ESCALATING, S.CLOSED},
    S.VALIDATING: {S.RELEASING, S.REPAIRING, S.ESCALATING, S.CLOSED},
    S.RELEASING: {S.ESCALATING, S.CLOSED},
    S.ESCALATING: {S.REPAIRING, S.RELEASING, S.CLOSED},
    S.CLOSED: set[IncidentState](),
}
MOVES = list(product(S, S))


def finding(**changes: object) -> Finding:
    values: dict[str, object] = {
        "cluster": "c",
        "node_names": ("n1",),
        "fault_class": FaultClass.XID,
        "verdict": Verdict.FATAL,
        "kind": FaultKind.EVENT,
        "evidence": Evidence("xid-count", "q", 1, NOW),
        "gpu_uuid": "GPU-1",
        "code": 79,
        "summary": "XID 79",
    }
    return Finding(**(values | changes))  # type: ignore[arg-type]


def incident(state: IncidentState = S.WAITING, **changes: object) -> Incident:
    values: dict[str, object] = {
        "id": "inc-1",
        "cluster": "c",
        "node": NodeRef("c", "n1", "u1", "i-00000001", "b1"),
        "origin": Origin.SCAN,
        "opened_at": NOW,
        "state": state,
        "state_since": NOW,
        "findings": (finding(),),
        "mode": Mode.ENFORCE,
    }
    return Incident(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.case("R89")
@pytest.mark.parametrize(("here", "there"), MOVES)
def test_r89_every_move_is_legal_or_refused(here: IncidentState, there: IncidentState) -> None:
    later = NOW + timedelta(seconds=9)
    if here is there:
        assert move(incident(here), there, later) == incident(here)
    elif there in LEGAL[here]:
        moved = move(incident(here), there, later)
        assert (moved.state, moved.state_since) == (there, later)
    else:
        with pytest.raises(IllegalTransitionError, match=f"{here} -> {there}"):
            move(incident(here), there, later)


def test_the_table_names_every_state_and_every_state_can_end() -> None:
    assert set(TRANSITIONS) == set(S)
    for state, successors in TRANSITIONS.items():
        assert (S.CLOSED in successors) is (state is not S.CLOSED)
        assert state not in successors


def test_a_cordon_can_only_be_carried_from_the_cordon_on() -> None:
    assert S.VERIFYING not in TOUCHES_NODE
    assert S.ADMITTED not in TOUCHES_NODE
    for state in (S.CORDONING, S.DRAINING, S.REPAIRING, S.CHECKING, S.VALIDATING, S.RELEASING):
        assert state in TOUCHES_NODE


def test_the_first_verdict_stands() -> None:
    first = decide_end(incident(), Outcome.SKIPPED, WHY)
    assert decide_end(first, Outcome.REPLACED, Reason("x", "y")) is first


@pytest.mark.case("R33")
def test_r33_an_end_is_never_overwritten() -> None:
    closed = close(incident(), Outcome.SKIPPED, WHY, step="s", now=NOW)
    assert (closed.state, closed.outcome, closed.reason, closed.closed_at) == (
        S.CLOSED,
        Outcome.SKIPPED,
        WHY,
        NOW,
    )
    with pytest.raises(IllegalTransitionError, match="closed already"):
        close(closed, Outcome.REPLACED, WHY, step="s", now=NOW)


def test_closing_says_so_with_the_outcome_and_waits_for_nothing_any_more() -> None:
    closed = close(
        incident(waiting_for="x"), Outcome.SKIPPED, WHY, step="s", now=NOW, data={"remedy": "r"}
    )
    (event,) = closed.new_events
    assert (event.detail_type, event.outcome, event.data) == (
        DetailType.INCIDENT_CLOSED,
        "SKIPPED",
        {"remedy": "r"},
    )
    assert closed.waiting_for == ""


def test_event_ids_count_and_are_the_same_when_a_step_is_repeated() -> None:
    def step(stored: Incident) -> Incident:
        first = record(stored, DetailType.FAULT_VERIFIED, step="s", reason=WHY, now=NOW)
        return record(first, DetailType.NODE_CORDONED, step="s", reason=WHY, now=NOW)

    stored = incident(sequence=41)
    ids = [event.event_id for event in step(stored).new_events]
    assert ids == ["inc-1-0042", "inc-1-0043"]
    assert ids == [event.event_id for event in step(stored).new_events]


@pytest.mark.parametrize("mode", Mode)
def test_an_event_says_whether_it_is_only_a_rehearsal(mode: Mode) -> None:
    recorded = record(incident(mode=mode), DetailType.FAULT_VERIFIED, step="s", reason=WHY, now=NOW)
    assert recorded.new_events[0].dry_run is (mode is Mode.DRY_RUN)


def test_the_timeline_is_bounded_and_the_newest_stay() -> None:
    grown = incident()
    for number in range(TIMELINE_LIMIT + 20):
        reason = Reason("n", str(number))
        grown = record(grown, DetailType.DRAIN_PROGRESS, step="s", reason=reason, now=NOW)
    texts = [entry.reason.text for entry in grown.timeline]
    assert len(texts) == TIMELINE_LIMIT
    assert (texts[0], texts[-1]) == ("20", str(TIMELINE_LIMIT + 19))
    assert grown.sequence == TIMELINE_LIMIT + 20


def test_an_incident_belongs_to_its_execution() -> None:
    require_owner(incident(), "arn:any")
    require_owner(incident(execution_arn="arn:1"), "arn:1")
    with pytest.raises(SupersededError, match="belongs to execution arn:1"):
        require_owner(incident(execution_arn="arn:1"), "arn:2")
    with pytest.raises(SupersededError, match=r"closed already \(SKIPPED\)"):
        require_owner(incident(S.CLOSED, outcome=Outcome.SKIPPED, execution_arn="arn:1"), "arn:1")
    with pytest.raises(SupersededError, match=r"closed already \(closed\)"):
        require_owner(incident(S.CLOSED), "arn:1")


def test_new_evidence_is_added_and_known_faults_are_no_news() -> None:
    known = incident()
    later = replace(finding().evidence, at=NOW + timedelta(minutes=1))
    assert attach(known, [finding(evidence=later)]) is known
    more = attach(known, [finding(code=48), finding(code=48), finding(gpu_uuid="GPU-2")])
    assert [one.key for one in more.findings] == ["xid/GPU-1/79", "xid/GPU-1/48", "xid/GPU-2/79"]


def test_the_most_severe_and_then_the_earliest_finding_decides() -> None:
    hot = finding(
        fault_class=FaultClass.THERMAL, verdict=Verdict.DEGRADED, kind=FaultKind.LEVEL, code=None
    )
    late = finding(code=48, evidence=Evidence("xid-count", "q", 1, NOW + timedelta(seconds=1)))
    both = incident(findings=(hot, late, finding()))
    assert both.primary == finding()
    assert (both.fault_class, both.fault_kind) == (FaultClass.XID, FaultKind.EVENT)
    assert both.fault_text == "XID 79"


def test_by_hand_the_persons_word_is_the_fault() -> None:
    assert incident(findings=()).primary is None
    # Also when a scan has attached what it saw.
    manual = incident(origin=Origin.HAND, requested_by="alice", request_reason="noise")
    assert manual.findings
    assert manual.primary is None
    assert (manual.fault_class, manual.fault_kind) == (FaultClass.MANUAL, FaultKind.LEVEL)
    assert manual.fault_text == "requested by alice: noise"


@pytest.mark.parametrize(("index", "rung"), [(0, Rung.REPLACE), (1, Rung.HUMAN), (2, Rung.HUMAN)])
def test_past_the_end_of_a_plan_is_a_person(index: int, rung: Rung) -> None:
    assert incident(plan=(Rung.REPLACE, Rung.HUMAN), rung_index=index).rung is rung
    assert incident(plan=(), rung_index=index).rung is Rung.HUMAN


@pytest.mark.parametrize(
    ("mode", "outcome"), [(Mode.ENFORCE, Outcome.NEEDS_HUMAN), (Mode.DRY_RUN, Outcome.SKIPPED)]
)
@pytest.mark.parametrize("state", [state for state in S if state is not S.CLOSED])
def test_from_every_open_state_a_failure_can_be_escalated(
    state: IncidentState, mode: Mode, outcome: Outcome
) -> None:
    escalated = escalate(incident(state, mode=mode), WHY, step="s", now=NOW, error="ValueError")

    assert escalated.state is S.ESCALATING
    assert escalated.verdict == (outcome, WHY)
    (event,) = escalated.new_events
    assert (event.detail_type, event.data) == (
        DetailType.INCIDENT_ESCALATED,
        {"error": "ValueError", "next_rung": "human"},
    )


def test_an_escalation_without_an_error_names_none() -> None:
    data = escalate(incident(), WHY, step="s", now=NOW).new_events[0].data
    assert data == {"next_rung": "human"}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("ClusterForbiddenError", "cluster_forbidden"),
        ("AwsUnavailableError", "aws_unavailable"),
        ("States.Timeout", "step_timed_out"),
        ("Sandbox.Timedout", "step_timed_out"),
        ("Lambda.Unknown", "lambda_unknown"),
        ("Runtime.ExitError", "runtime_exit"),
        ("Error", "unknown_error"),
        ("", "unknown_error"),
    ],
)
def test_an_error_name_becomes_a_code(error: str, code: str) -> None:
    reason = reason_of(error, "")
    assert reason.code == code
    assert reason.text == f"the step ended with {error}"
    assert reason_of(error, "words").text == "words"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(list(S)), max_size=25))
def test_whatever_is_tried_an_incident_only_walks_the_table_and_never_leaves_its_end(
    tries: list[IncidentState],
) -> None:
    current, walked = incident(), [S.WAITING]
    for state in tries:
        try:
            current = move(current, state, NOW)
        except IllegalTransitionError:
            continue
        walked.append(current.state)
    for here, there in pairwise(walked):
        assert here is there or there in LEGAL[here]
    if S.CLOSED in walked:
        assert current.state is S.CLOSED
