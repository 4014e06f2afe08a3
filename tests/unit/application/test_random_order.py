"""Everything in random order, the same orders each time; `make fuzz` explores others.

Below: what exploring has found, told as plain tests, and that the rails of the world can fail.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from nodemend.application import cordon_node, start_repair
from nodemend.domain import dispatch as dispatch_module
from nodemend.domain.incidents import Incident, Outcome
from tests.unit.application.random_order import RandomOrder
from tests.unit.application.world import BreachError, Disturbance, World

FIXED = settings(
    derandomize=True,
    max_examples=20,
    stateful_step_count=60,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
"""A few seconds of computing, also while coverage is measured."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of lines of log would only be kept in memory."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def world() -> World:
    return World()


def come_in(world: World) -> None:
    """Let what is sick be found, opened and dispatched."""
    world.scan_now()
    for _ in range(len(world.fault_queue)):
        world.deliver()
    world.dispatch_now(by_hints=True)


def ends(world: World) -> list[Outcome | None]:
    """Let everything run to its end, assert all that holds then, and return the outcomes."""
    world.calm()
    world.check_end()
    return [record.incident.outcome for record in world.incidents.records.values()]


def test_every_rail_holds_in_random_order() -> None:
    run_state_machine_as_test(RandomOrder, settings=FIXED)  # type: ignore[no-untyped-call]


def test_an_undisturbed_world_mends_what_is_sick(world: World) -> None:
    world.inject("xid79", 1)
    world.inject("dbe", 5)
    come_in(world)

    assert ends(world) == [Outcome.REPLACED, Outcome.REBOOTED]
    verbs = [one.verb for one in world.mutations_made]
    assert {verb: verbs.count(verb) for verb in verbs} == {
        "cordon": 2,
        "evict": 3,
        "terminate": 1,
        "reboot": 1,
        "restore": 1,
    }


# --- found by exploring ---------------------------------------------------------------------------


def test_a_scan_and_an_alert_of_the_same_moment_are_two_events(world: World) -> None:
    """Both had the same event id, and told different origins under it."""
    world.inject("xid79", 1)
    world.scan_now()
    world.alert_now(1)

    ids = {one.event_id for one in world.bus.accepted}
    origins = {one.detail["origin"] for one in world.bus.accepted}
    assert (len(ids), origins) == (2, {"scan", "alert"})
    world.calm()
    world.check_end()


@pytest.mark.parametrize(
    ("task", "call", "verb"),
    [
        ("CordonNode", "cluster.patch_node", "cordon"),
        ("DrainNode", "cluster.evict", "evict"),
        ("StartRepair", "capacity.terminate", "terminate"),
    ],
)
def test_a_function_that_outlives_its_execution_changes_only_what_its_slot_stands_for(
    world: World, task: str, call: str, verb: str
) -> None:
    """Somebody stops the execution directly before the call; the function does not notice.

    The watchdog used to free the slot at once, so that a second node could be taken meanwhile.
    """
    world.deploy(count=1)
    world.largest_budget = 1
    for machine in (1, 5):
        world.inject("xid79", machine)
    come_in(world)
    while world.due()[0].current != task:
        world.run_due()
        world.advance(0 if world.due() else 60)

    world.run_due(0, Disturbance(call, "stop_and_watch"))

    assert world.mutations_made[-1].verb == verb
    first = world.mutations_made[-1].incident_id
    assert world.incident(first).outcome is Outcome.ABORTED_BY_OPERATOR
    world.dispatch_now()
    assert world.holds_slot(first)
    assert len(world.executions.started) == 1
    world.advance(61)
    world.watch_now()
    assert not world.holds_slot(first)
    assert Outcome.REPLACED in ends(world)


# --- the rails can fail ---------------------------------------------------------------------------


@pytest.mark.parametrize("module", [cordon_node, start_repair])
def test_a_change_without_a_lease_is_noticed(
    world: World, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "hold_lease", lambda *_, **__: None)
    monkeypatch.setattr(module, "why_held", lambda *_, **__: None, raising=False)
    world.inject("xid79", 1)
    come_in(world)

    with pytest.raises(BreachError, match="has read no lease"):
        world.calm()


def test_a_slot_beyond_the_budget_is_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_module, "_why_over_budget", lambda *_: None)
    for machine in (1, 5, 8):
        world.inject("xid79", machine)

    with pytest.raises(BreachError, match="got a slot of 2"):
        come_in(world)


def test_a_change_that_nobody_is_told_of_is_noticed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(incident: Incident, *_: Any, **__: Any) -> Incident:
        return replace(incident, sequence=incident.sequence)

    monkeypatch.setattr(start_repair, "record", silent)
    world.inject("xid79", 1)
    come_in(world)
    world.calm()

    with pytest.raises(BreachError, match=r"terminate.*has no event"):
        world.check_end()


def test_an_incident_that_never_ends_is_noticed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.inject("xid79", 1)
    come_in(world)
    monkeypatch.setattr(world, "run_due", lambda *_: None)

    with pytest.raises(BreachError, match="it never ends"):
        world.calm(rounds=5)


def test_a_disturbance_strikes_the_call_that_it_names(world: World) -> None:
    world.inject("xid79", 1)
    come_in(world)

    world.run_due(0, Disturbance(2, "die_after"))

    assert world.trouble == ["die_after at AdmitRemediation: guards.load"]
    assert world.due() == []
    assert ends(world) == [Outcome.REPLACED]
