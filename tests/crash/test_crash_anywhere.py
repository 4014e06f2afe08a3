"""Any call of any port may go wrong in any way, and the end is the same.

Each scenario runs once undisturbed; then once for each of its calls and each kind of fault, and
for a sample of pairs. What is checked stands in `ending.py`.
"""

import inspect
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache, partial
from typing import Any

import pytest

from nodemend.application import (
    check_repair,
    cordon_node,
    drain_node,
    ports,
    start_repair,
    validate_node,
    verify_fault,
    watch_incidents,
)
from nodemend.application.closing import ClosingPorts
from nodemend.application.steps import Progress, progress, update_guard
from nodemend.domain.capacity import AutoScalingGroup
from nodemend.domain.guard import release
from nodemend.domain.incidents import Incident, Outcome
from tests.crash.conftest import PAIRS, SWEEP
from tests.crash.ending import Ending, ending_of, took_s
from tests.crash.faults import NEVER_FAILS, Injector, Kind, Point
from tests.crash.scenarios import SCENARIOS
from tests.crash.world import World

SEED = 20260501
PAIRS_TRIED = 300
NEAR = 12
"""Half of the pairs are this close: the second fault hits the recovery from the first."""

LATEST_S = 900
"""A fault may delay the end by as much: a message comes again after six minutes, a reboot that
nothing is seen of is asked for again after five."""

PORTS: dict[str, type] = {
    "bus": ports.EventBus,
    "capacity": ports.Capacity,
    "cluster": ports.Cluster,
    "clusters": ports.Clusters,
    "dead_letters": ports.DeadLetters,
    "executions": ports.Executions,
    "guards": ports.Guards,
    "history": ports.History,
    "incidents": ports.Incidents,
    "instances": ports.Instances,
    "memory": ports.ScanMemory,
    "metrics": ports.MetricsStore,
    "outbox": ports.Outbox,
    "policies": ports.Policies,
    "queue": ports.DispatchQueue,
}
"""All ports that call somebody; not the clock, ids, telemetry (lines on standard output)."""


@dataclass(frozen=True)
class Undisturbed:
    """How a scenario goes and ends if nothing goes wrong."""

    calls: Sequence[str]
    ending: Ending
    took_s: float


@cache
def undisturbed(name: str) -> Undisturbed:
    """Run a scenario without any fault."""
    world = SCENARIOS[name](Injector())
    world.run()
    return Undisturbed(tuple(world.injector.calls), ending_of(world), took_s(world))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Keep the log of thousands of faults out of memory."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def disturbed(name: str, *points: Point) -> World:
    """Run a scenario with faults, and assert that it ends as it does without."""
    world = SCENARIOS[name](Injector(*points))
    world.run()
    usual = undisturbed(name)
    ending = ending_of(world)
    if ending != usual.ending:
        named = ", ".join(f"{usual.calls[p.call - 1]} ({p.call}) {p.kind}" for p in points[:1])
        assert ending == usual.ending, f"{name}: {named}"
    assert took_s(world) - usual.took_s <= LATEST_S, f"{name} {points}: too late"
    return world


def sweep(name: str, kind: Kind) -> int:
    """Run a scenario with a fault of this kind at each call; return how many faults there were."""
    hits = 0
    for number, call in enumerate(undisturbed(name).calls, 1):
        world = disturbed(name, Point(number, kind))
        assert world.injector.calls[number - 1] == call
        hits += len(world.injector.hit)
    return hits


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("name", SCENARIOS)
def test_any_fault_of_any_call_changes_nothing_but_the_time(
    name: str, kind: Kind, record_property: Callable[[str, object], None]
) -> None:
    calls = len(undisturbed(name).calls)

    points = sweep(name, kind)

    assert points == calls
    record_property(SWEEP, (name, str(kind), calls, points))


def test_every_method_of_every_port_is_among_the_calls() -> None:
    called = {call for name in SCENARIOS for call in undisturbed(name).calls}
    known = {
        f"{port}.{method}"
        for port, protocol in PORTS.items()
        for method, _ in inspect.getmembers(protocol, inspect.isfunction)
        if not method.startswith("_")
    }
    assert called == known - NEVER_FAILS


def test_pairs_of_faults_change_nothing_but_the_time(
    record_property: Callable[[str, object], None],
) -> None:
    given_up = 0
    for name, points in pairs():
        if all(point.kind is Kind.HANGS for point in points):
            given_up += is_given_up(name, points)
        else:
            disturbed(name, *points)
    record_property(
        PAIRS,
        f"{PAIRS_TRIED} pairs (seed {SEED}) survived, {given_up} of them by calling a person "
        "because a step timed out twice",
    )


def pairs() -> Iterator[tuple[str, tuple[Point, Point]]]:
    """Yield a sample of scenarios with two faults each; the same one at each run."""
    random_ = random.Random(SEED)  # noqa: S311
    names = list(SCENARIOS)
    sizes = [len(undisturbed(name).calls) for name in names]
    for _ in range(PAIRS_TRIED):
        name = random_.choices(names, sizes)[0]
        calls = len(undisturbed(name).calls)
        first = random_.randint(1, calls)
        second = first + random_.randint(1, NEAR if random_.random() < 0.5 else calls)
        kinds = random_.choices(list(Kind), k=2)
        yield name, (Point(first, kinds[0]), Point(second, kinds[1]))


def is_given_up(name: str, points: Iterable[Point]) -> bool:
    """Run with two invocations that hang; assert that a step which hangs twice ends safely.

    The state machine tries a step again once after a time-out: the same work mostly takes as long.
    """
    world = SCENARIOS[name](Injector(*points))
    world.run()
    ending, usual = ending_of(world), undisturbed(name).ending
    if ending == usual:
        return False
    assert ending["changes"] <= usual["changes"], f"{name} {points}: something is done twice"
    for one, expected in zip(ending["incidents"], usual["incidents"], strict=True):
        end, known = (one["outcome"], one["reason"]), (expected["outcome"], expected["reason"])
        assert end in (known, (Outcome.NEEDS_HUMAN, "step_timed_out")), f"{name} {points}"
    return True


# --- the suite notices what is missing ------------------------------------------------------------

Mutate = Callable[[pytest.MonkeyPatch], None]


def terminate_again(patch: pytest.MonkeyPatch) -> None:
    """Ask for the termination of an instance that is terminating already."""
    patch.setattr(start_repair, "_replace", without_observation(start_repair._replace))


def without_observation(original: Any) -> Any:
    def mutated(incident: Any, group: AutoScalingGroup, ports: Any) -> Any:
        def is_leaving(self: AutoScalingGroup, instance_id: str) -> bool:
            return False

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(AutoScalingGroup, "is_leaving", is_leaving)
            patch.setattr(start_repair, "_end_instead", lambda *_: None)
            return original(incident, group, ports)

    return mutated


def reboot_again(patch: pytest.MonkeyPatch) -> None:
    """Ask for a reboot although the note says that it was asked for."""

    def mutated(incident: Any, repair: Any, ports: Any) -> Any:
        return start_repair._reboot(replace(incident, repair=None), None, ports)

    patch.setattr(start_repair, "_lost_answer", mutated)
    patch.setattr(start_repair, "_end_instead", lambda *_: None)


def repeat_what_is_done(patch: pytest.MonkeyPatch) -> None:
    """Do a step again that has stored its result."""

    def mutated(incident: Any, *, following: Any) -> Progress:
        found = progress(incident, following=following)
        return Progress.TO_DO if found is Progress.DONE else found

    for step in (verify_fault, cordon_node, drain_node, start_repair, check_repair, validate_node):
        patch.setattr(step, "progress", mutated)


def leave_closes_half_done(patch: pytest.MonkeyPatch) -> None:
    """Do not finish a close that died on its way: neither by its end nor by its slot."""

    def free_slot_only(closed: Incident, *, now: datetime, ports: ClosingPorts) -> None:
        give_up = partial(release, incident_id=closed.id, refunds=True)
        update_guard(ports.guards, closed.cluster, give_up)

    patch.setattr(watch_incidents, "finish_close", lambda *_, **__: False)
    patch.setattr(watch_incidents, "free", free_slot_only)


@pytest.mark.parametrize(
    ("mutate", "name"),
    [
        (terminate_again, "by_hand"),
        (reboot_again, "rebooted"),
        (repeat_what_is_done, "replaced"),
        (leave_closes_half_done, "stopped"),
    ],
)
def test_without_one_guard_of_its_idempotency_the_sweep_fails(
    mutate: Mutate, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = undisturbed(name)
    mutate(monkeypatch)

    # Undisturbed, the guard is not needed: only a fault shows that it is missing.
    assert ending_of(disturbed(name)) == usual.ending
    with pytest.raises(AssertionError):
        sweep(name, Kind.DIES)
