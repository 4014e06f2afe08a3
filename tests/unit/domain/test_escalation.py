"""The ladder as a decision: which failure leads where, and that it ends."""

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodemend.domain.escalation import (
    LADDER_STATES,
    escalate,
    first_rung,
    is_about_repair,
    is_on_next_rung,
    next_rung,
    offence_of,
    past_of,
    subjects_of,
)
from nodemend.domain.faults import Mode, Rung
from nodemend.domain.history import PastIncident, merged
from nodemend.domain.incidents import DrainRecord, Incident, IncidentState, Outcome, move
from nodemend.domain.policy import Attempts, Policy
from nodemend.domain.reasons import Reason
from tests.fakes.examples import NODE, finding, waiting
from tests.fakes.system import START

LADDER = (Rung.REBOOT, Rung.REPLACE, Rung.HUMAN)
GPU = finding().gpu_uuid
FAILURES = (
    Reason("reboot_not_observed", "no new boot"),
    Reason("reboot_unhealthy", "still sick"),
    Reason("repair_refused", "no"),
    Reason("aws_forbidden", "ec2:RebootInstances: UnauthorizedOperation"),
)
OTHERS = (
    Reason("aws_forbidden", "dynamodb:UpdateItem: AccessDenied"),
    Reason("aws_unavailable", "ec2:RebootInstances: no answer"),
    Reason("metrics_unknown", "amp_timeout"),
    Reason("metrics_missing", "0 of 8"),
    Reason("lease_lost", "gone"),
    Reason("cluster_forbidden", "no"),
    Reason("not_drained", "no"),
)


def repairing(state: IncidentState = IncidentState.CHECKING, **changes: object) -> Incident:
    """An incident whose reboot is under way on a drained node."""
    values: dict[str, object] = {
        "state": state,
        "mode": Mode.ENFORCE,
        "plan": LADDER,
        "drain": DrainRecord(START, is_drained=True),
    }
    return replace(waiting(), new_events=(), **(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("state", sorted(LADDER_STATES))
@pytest.mark.parametrize("reason", FAILURES, ids=str)
def test_a_failed_reboot_is_followed_by_a_replacement(state: IncidentState, reason: Reason) -> None:
    assert next_rung(repairing(state), reason) is Rung.REPLACE


@pytest.mark.parametrize("reason", OTHERS, ids=str)
def test_what_does_not_speak_of_the_repair_is_a_persons(reason: Reason) -> None:
    assert not is_about_repair(reason)
    assert next_rung(repairing(), reason) is Rung.HUMAN


@pytest.mark.parametrize(
    "changes",
    [
        {"mode": Mode.DRY_RUN},
        {"drain": None},
        {"drain": DrainRecord(START)},
        {"plan": (Rung.REBOOT, Rung.HUMAN)},
        {"plan": (Rung.REBOOT,)},
        {"rung_index": 1},
    ],
)
def test_the_ladder_goes_on_only_from_a_reboot_of_a_drained_node(
    changes: dict[str, object],
) -> None:
    assert next_rung(repairing(**changes), FAILURES[0]) is Rung.HUMAN  # type: ignore[arg-type]


@pytest.mark.parametrize("state", [s for s in IncidentState if s not in LADDER_STATES])
def test_before_and_after_the_repair_there_is_no_next_rung(state: IncidentState) -> None:
    assert next_rung(repairing(state), FAILURES[0]) is Rung.HUMAN


RUNGS = st.permutations([Rung.REBOOT, Rung.REPLACE]).flatmap(
    lambda rungs: st.integers(0, 2).map(lambda n: (*rungs[:n], Rung.HUMAN))
)


@given(RUNGS, st.lists(st.sampled_from([*FAILURES, *OTHERS]), min_size=6, max_size=6))
def test_every_ladder_ends_and_tries_no_rung_twice(
    plan: tuple[Rung, ...], failures: list[Reason]
) -> None:
    incident = repairing(plan=plan)
    tried = [incident.rung]
    for number, failure in enumerate(failures):
        escalated = escalate(incident, failure, step="s", now=START + timedelta(minutes=number))
        assert escalated.state is IncidentState.ESCALATING
        if escalated.verdict is not None:
            assert escalated.verdict == (Outcome.NEEDS_HUMAN, failure)
            break
        assert is_on_next_rung(escalated)
        tried.append(escalated.rung)
        incident = move(escalated, IncidentState.REPAIRING, START)
    else:
        pytest.fail("the ladder never ended")
    assert len(tried) == len(set(tried)) <= len(plan)


def past(hours: float, *rungs: Rung, gpu: str = GPU, instance_id: str = "") -> PastIncident:
    """An earlier incident."""
    return PastIncident(
        incident_id=f"01PAST{hours}",
        at=START - timedelta(hours=hours),
        fault="xid 119",
        outcome="REBOOTED",
        instance_id=instance_id or NODE.instance_id,
        gpu_uuids=(gpu,) if gpu else (),
        rungs=rungs,
    )


@pytest.mark.case("R73")
@pytest.mark.parametrize(
    ("history", "first"),
    [
        ((), 0),
        ((past(1, Rung.REBOOT),), 1),
        ((past(1, Rung.REBOOT, Rung.REPLACE),), 2),
        ((past(1),), 0),  # it ended before any repair
        ((past(1, Rung.REBOOT, gpu="GPU-other"),), 0),
        ((past(1, Rung.REBOOT, instance_id="i-0fffffffffffffff1"),), 1),  # the GPU moved
        ((past(169, Rung.REBOOT),), 0),  # older than a week
        ((past(2, Rung.REPLACE), past(1, Rung.REBOOT)), 2),  # the strongest counts
        ((past(1, Rung.STOP_START),), 0),  # not in this plan
    ],
)
def test_r73_the_same_gpu_begins_after_the_strongest_repair_within_the_window(
    history: tuple[PastIncident, ...], first: int
) -> None:
    found, reason = first_rung(LADDER, replace(waiting(), history=history), Policy(), START)

    assert found == first
    assert (reason is None) == (first == 0)


def test_attempts_are_counted_by_instance_and_window() -> None:
    policy = Policy(attempts=Attempts(per_node=2, window_s=7200))
    two = (past(1, Rung.REBOOT, gpu="a"), past(1.5, Rung.REBOOT, gpu="b"))
    elsewhere = tuple(replace(one, instance_id="i-0fffffffffffffff1") for one in two)
    before = tuple(replace(one, at=one.at - timedelta(hours=5)) for one in two)

    for history, first in ((two, len(LADDER)), (elsewhere, 0), (before, 0), (two[:1], 0)):
        incident = replace(waiting(), history=history)
        assert first_rung(LADDER, incident, policy, START)[0] == first


def test_what_was_only_observed_or_rehearsed_is_not_remembered() -> None:
    def ended(outcome: Outcome, **changes: object) -> Incident:
        values: dict[str, object] = {
            "mode": Mode.ENFORCE,
            "state": IncidentState.CLOSED,
            "outcome": outcome,
            "execution_arn": "arn",
            "closed_at": START,
        }
        return replace(waiting(), **(values | changes))  # type: ignore[arg-type]

    assert past_of(ended(Outcome.OBSERVED)) is None
    assert past_of(ended(Outcome.SKIPPED)) is None
    assert past_of(ended(Outcome.SUPERSEDED)) is None
    assert past_of(ended(Outcome.REBOOTED, mode=Mode.DRY_RUN)) is None
    assert past_of(ended(Outcome.NEEDS_HUMAN, execution_arn="")) is None
    kept = past_of(ended(Outcome.RECOVERED))
    assert kept is not None
    assert (kept.fault, kept.at, kept.rungs, kept.gpu_uuids) == ("xid 79", START, (), (GPU,))
    by_hand = past_of(ended(Outcome.NEEDS_HUMAN, findings=()))
    assert by_hand is not None
    assert by_hand.fault == "manual"


def test_a_record_is_told_newest_first_and_each_incident_once() -> None:
    old, new = past(5, Rung.REBOOT), past(1)
    assert merged([[old], [new, old], []]) == (new, old)
    told = offence_of((new, old)).text
    assert told.startswith("2 earlier incidents are known: ")
    assert told.endswith("xid 119 REBOOTED after reboot")


def test_whose_record_it_is() -> None:
    assert [s.key for s in subjects_of(NODE, ["GPU-1"])] == [
        f"instance/{NODE.instance_id}",
        "gpu/GPU-1",
    ]
    assert subjects_of(replace(NODE, instance_id=""), []) == ()
