"""A place that makes one replacement after the other sick is a person's (case R50)."""

from datetime import timedelta
from typing import Any

import pytest

from nodemend.domain.escalation import CHURN_WINDOW, allowed_plan
from nodemend.domain.faults import Rung
from nodemend.domain.history import PastIncident, generation_of, instance
from nodemend.domain.incidents import Incident, IncidentState, Origin, Outcome
from tests.fakes.system import START
from tests.unit.application import run
from tests.unit.application.machine import Machine
from tests.unit.application.stage import (
    CLUSTER,
    Stage,
    enforce,
    gpu_node,
    instance_id,
    samples,
    xid_finding,
    xid_labels,
)

PLAN = (Rung.REBOOT, Rung.REPLACE, Rung.HUMAN)
YOUNG_S = 1860
"""A node is no candidate before this (warm-up)."""


def fall_sick(stage: Stage, number: int, **changes: Any) -> str:
    """Let the scan report XID 79 of a node now, and the dispatcher decide."""
    stage.metrics.answer("xid-count", samples(xid_labels(number, 79, 3)))
    finding = xid_finding(number)
    evidence = type(finding.evidence)(
        "xid-count", "q", 1, stage.clock.now(), xid_labels(number, 79, 3)
    )
    incident_id = run.open_for(stage, xid_finding(number, evidence=evidence, **changes))
    assert incident_id is not None
    stage.dispatch_all(incident_id)
    return incident_id


def replaced(stage: Stage, number: int, newcomer: int) -> str:
    """Let a node fall sick and be replaced by another."""
    incident_id = fall_sick(stage, number)

    def arrive() -> None:
        stage.metrics.answer("xid-count", samples())
        stage.replace_node(number, newcomer)

    Machine(stage, [(200, arrive)]).run(incident_id)
    assert stage.incident(incident_id).outcome is Outcome.REPLACED
    return incident_id


@pytest.mark.case("R50")
def test_r50_a_replacement_is_replaced_once_and_its_replacement_is_a_persons() -> None:
    stage = Stage(policy=enforce())
    replaced(stage, 1, 9)
    stage.clock.advance(YOUNG_S)
    second = replaced(stage, 9, 10)
    assert "by " + instance_id(9) in stage.incident(second).timeline[0].reason.text
    stage.clock.advance(YOUNG_S)
    before = stage.mutations()

    third = fall_sick(stage, 10)

    incident = stage.incident(third)
    assert (incident.outcome, incident.reason and incident.reason.code) == (
        Outcome.NEEDS_HUMAN,
        "replacement_of_replacement",
    )
    assert stage.mutations() == before
    assert not stage.node(10).is_unschedulable
    closed = stage.events("Incident Closed")[-1]
    assert "start the remediation by hand" in closed["remedy"]
    assert [one["replacement_instance_id"] for one in closed["record"]] == [instance_id(10)]


@pytest.mark.case("R50")
def test_r50_after_a_day_a_replacement_is_a_machine_like_any_other() -> None:
    stage = Stage(policy=enforce())
    replaced(stage, 1, 9)
    stage.clock.advance(YOUNG_S)
    replaced(stage, 9, 10)
    stage.clock.advance(CHURN_WINDOW.total_seconds() + 1)

    replaced(stage, 10, 11)


@pytest.mark.case("R50")
def test_r50_a_replacement_that_never_became_healthy_counts_as_one_too() -> None:
    stage = Stage(policy=enforce())
    first = fall_sick(stage, 1)

    def joins() -> None:
        stage.metrics.answer("xid-count", samples())
        stage.replace_node(gpu_capacity=0, gpu_allocatable=0)

    Machine(stage, [(200, joins)]).run(first)
    assert stage.incident(first).outcome is Outcome.NEEDS_HUMAN
    stage.cluster.add_node(gpu_node(9))

    second = replaced(stage, 9, 10)

    assert stage.incident(second).history[0].generation == 1
    stage.clock.advance(YOUNG_S)
    assert stage.incident(fall_sick(stage, 10)).outcome is Outcome.NEEDS_HUMAN


@pytest.mark.case("R50")
def test_r50_a_person_may_still_replace_it_by_hand() -> None:
    plan, why = allowed_plan(PLAN, incident(3, findings=()), START)

    assert (plan, why) == (PLAN, None)


def incident(generation: int, *, age: timedelta = timedelta(hours=1), **changes: Any) -> Incident:
    """A waiter on a node that stands for so many replacements in a row."""
    made = PastIncident(
        incident_id="01PAST",
        at=START - age,
        fault="xid 79",
        outcome="REPLACED",
        instance_id=instance_id(8),
        rungs=(Rung.REPLACE,),
        replacement_instance_id=instance_id(1),
        generation=generation,
    )
    values: dict[str, Any] = {
        "id": "01A",
        "cluster": CLUSTER,
        "node": gpu_node(1).ref,
        "origin": Origin.SCAN,
        "opened_at": START,
        "state": IncidentState.WAITING,
        "state_since": START,
        "findings": (xid_finding(1),),
        "history": (made,) if generation else (),
    }
    return Incident(**(values | changes))


@pytest.mark.parametrize(
    ("generation", "age", "may_replace"),
    [
        (0, timedelta(hours=1), True),
        (1, timedelta(hours=1), True),
        (2, timedelta(hours=1), False),
        (2, CHURN_WINDOW, False),
        (2, CHURN_WINDOW + timedelta(seconds=1), True),
        (5, timedelta(0), False),
    ],
)
def test_only_the_replacement_is_taken_out_of_the_plan(
    generation: int, age: timedelta, may_replace: bool
) -> None:
    plan, why = allowed_plan(PLAN, incident(generation, age=age), START)

    assert (Rung.REPLACE in plan, why is None) == (may_replace, may_replace)
    assert Rung.REBOOT in plan


def test_a_reboot_that_does_not_cure_such_a_node_is_followed_by_a_person() -> None:
    stage = Stage(policy=enforce(plans={}))
    made = incident(2).history[0]
    stage.history.remember(CLUSTER, [instance(instance_id(1))], made)

    admitted = stage.incident(fall_sick(stage, 1, code=119, action="reset_gpu"))

    assert admitted.plan == (Rung.REBOOT, Rung.HUMAN)
    assert "replacement_of_replacement" in [
        line.reason.code for line in admitted.timeline if line.reason
    ]


def test_the_longest_row_counts_and_others_replacements_do_not() -> None:
    record = (*incident(1).history, *incident(2, age=timedelta(hours=2)).history)
    since = START - CHURN_WINDOW

    assert generation_of(record, instance_id(1), since) == 2
    assert generation_of(record, instance_id(8), since) == 0
    assert generation_of(record, "", since) == 0
