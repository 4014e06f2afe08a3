"""Fifty at once, through the use cases: the in-memory stores and DynamoDB pass the same suite.

Each test lets fifty threads go from one barrier. What a queue or the state machine would try again
(`RetryableError`) is tried again at once: each such error means that somebody else got ahead, so
the number of tries is bounded, whatever order the threads run in.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from nodemend.adapters.guard_dynamodb import DynamoGuards
from nodemend.adapters.history_dynamodb import DynamoHistory
from nodemend.adapters.incidents_dynamodb import DynamoIncidents
from nodemend.adapters.outbox import DynamoOutbox
from nodemend.domain.errors import NodemendError, RetryableError, SupersededError
from nodemend.domain.faults import FaultClass, Rung
from nodemend.domain.incidents import Incident, IncidentState, Outcome
from nodemend.domain.policy import BreakerLimits, Limits, MaxUnavailable, Policy, ReplacementRate
from nodemend.domain.reasons import Reason
from tests.fakes.aws import TABLE, dynamodb
from tests.unit.application import run
from tests.unit.application.stage import (
    CLUSTER,
    Request,
    Stage,
    enforce,
    instance_id,
    node_name,
    samples,
    times_sent,
    xid_finding,
    xid_labels,
)

T = TypeVar("T")

REASON = Reason("recovered", "a test says so")

CONTENDERS = 50
SLOTS = 5
NODES = CONTENDERS + 10
"""More than contenders: a fault on every node of a fleet is a bad query, and nobody is admitted."""
WAIT_S = 60.0
"""For a barrier and for a thread: far more than any test takes."""


def five_slots(**changes: Any) -> Policy:
    """A policy in which only the budget limits."""
    limits = Limits(
        MaxUnavailable(count=SLOTS, percent=100),
        ReplacementRate(per_hour=NODES, per_day=NODES),
        BreakerLimits(percent=100, min_nodes=NODES),
    )
    return enforce(limits=limits, **changes)


DISPATCHERS = 4
"""Twice as many as the template lets run at a time (MaximumConcurrency)."""


@contextmanager
def often() -> Iterator[None]:
    """Let threads change places often: those that only compute would run one after the other."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


@pytest.fixture(params=["memory", "dynamodb"])
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """A stage on stores of one kind."""
    made = Stage(nodes=NODES, policy=five_slots())
    if request.param == "memory":
        with often():
            yield made
        return
    with dynamodb() as client:
        # The same attributes as the stage's own stores, behind the same ports.
        stores: dict[str, Any] = {
            "incidents": DynamoIncidents(table=TABLE, client=client, clock=made.clock),
            "guards": DynamoGuards(table=TABLE, client=client),
            "history": DynamoHistory(table=TABLE, client=client, clock=made.clock),
            "outbox": DynamoOutbox(
                table=TABLE, client=client, bus=made.bus, telemetry=made.telemetry
            ),
        }
        for name, store in stores.items():
            setattr(made, name, store)
        yield made


def together(*calls: Callable[[], T]) -> list[T | NodemendError]:
    """Run all calls at the same moment; return what each returned, or the error that ended it."""
    barrier = threading.Barrier(len(calls))

    def at_once(call: Callable[[], T]) -> T | NodemendError:
        barrier.wait(timeout=WAIT_S)
        for _ in range(10 * len(calls)):
            try:
                return call()
            except RetryableError:
                continue
            except NodemendError as error:
                return error
        raise AssertionError("it was tried again without end")

    with ThreadPoolExecutor(len(calls)) as pool:
        return [one.result(timeout=WAIT_S) for one in [pool.submit(at_once, c) for c in calls]]


def by_hand(stage: Stage, number: int) -> Callable[[], Any]:
    """A person's start for a node, as its execution makes it."""
    name = f"hand-{number}"
    given = run.HAND | {"node": node_name(number)}
    return lambda: run.admit(stage, stage.request(name), given)


def slots(stage: Stage) -> set[str]:
    """Ids of the incidents that hold a slot."""
    return {slot.incident_id for slot in stage.guards.load(CLUSTER).slots.values()}


def opened(stage: Stage, number: int) -> str:
    """Open the incident of a sick node; return its id."""
    incident_id = run.open_for(stage, xid_finding(number))
    assert incident_id is not None
    return incident_id


def assert_five(stage: Stage, contenders: list[Incident]) -> None:
    """Assert that five are in, and that each of the others knows why it is not."""
    states = (IncidentState.ADMITTED, IncidentState.VERIFYING)
    admitted = [one for one in contenders if one.state in states and one.verdict is None]
    others = [one for one in contenders if one not in admitted]
    assert len(contenders) == CONTENDERS
    assert slots(stage) == {one.id for one in admitted}
    assert len(admitted) == SLOTS
    assert len(stage.guards.load(CLUSTER).replacements) == SLOTS
    why = Counter(one.waiting_for or (one.verdict and one.verdict[1].code) for one in others)
    assert why == {"capacity_guard": CONTENDERS - SLOTS}
    assert times_sent(stage)["Incident Admitted"] == SLOTS


def test_of_fifty_waiting_incidents_five_are_admitted_and_started_once(stage: Stage) -> None:
    ids = [opened(stage, number) for number in range(1, CONTENDERS + 1)]

    together(*[stage.dispatch_all] * DISPATCHERS)

    assert_five(stage, [stage.incident(one) for one in ids])
    assert sorted(stage.executions.started) == sorted(slots(stage))
    assert times_sent(stage)["Incident Waiting"] == CONTENDERS - SLOTS


def test_of_fifty_starts_by_hand_five_are_admitted_and_the_others_told_the_limit(
    stage: Stage,
) -> None:
    numbers = range(1, CONTENDERS + 1)

    results = together(*(by_hand(stage, number) for number in numbers))

    contenders = [stage.incident(f"hand-{number}") for number in numbers]
    assert_five(stage, contenders)
    said = Counter(getattr(result, "next", result) for result in results)
    assert said == {"verify": SLOTS, "close": CONTENDERS - SLOTS}
    ended = [one for one in contenders if one.verdict is not None]
    assert {one.verdict[0] for one in ended if one.verdict} == {Outcome.SKIPPED}
    assert times_sent(stage)["Incident Rejected"] == CONTENDERS - SLOTS


def test_scans_dispatchers_and_persons_together_get_five_slots(stage: Stage) -> None:
    half = CONTENDERS // 2
    scanned, asked = range(1, half + 1), range(half + 1, CONTENDERS + 1)

    results = together(
        *(lambda number=number: opened(stage, number) for number in scanned),
        *(by_hand(stage, number) for number in asked),
        *[stage.dispatch_all] * DISPATCHERS,
    )
    stage.dispatch_all()  # for those that were opened after the last dispatcher had looked

    ids = [*results[:half], *(f"hand-{number}" for number in asked)]
    assert_five(stage, [stage.incident(str(one)) for one in ids])


def test_of_fifty_starts_by_hand_for_one_node_one_gets_it(stage: Stage) -> None:
    def start(name: str) -> Callable[[], Any]:
        return lambda: run.admit(stage, stage.request(name), run.HAND)

    names = [f"hand-{number}" for number in range(CONTENDERS)]

    together(*(start(name) for name in names))

    ends = [stage.incident(name).verdict for name in names]
    assert ends.count(None) == 1
    assert Counter(end[1].code for end in ends if end) == {"already_open": CONTENDERS - 1}
    assert slots(stage) == {names[ends.index(None)]}


def test_fifty_messages_of_one_node_become_one_incident_with_all_evidence(stage: Stage) -> None:
    """Five findings, each of them ten times: a queue may deliver a message again and again."""
    findings = [xid_finding(code=code, gpu=gpu) for gpu, code in enumerate((48, 74, 79, 95, 119))]
    messages = findings * (CONTENDERS // len(findings))

    results = together(*(lambda f=f: run.open_for(stage, f) for f in messages))

    assert len(set(results)) == 1
    incident = stage.incident(str(results[0]))
    assert {one.key for one in incident.findings} == {one.key for one in findings}
    assert len(incident.findings) == len(findings)
    assert [one.id for one in stage.incidents.list_open(CLUSTER)] == [incident.id]
    assert times_sent(stage)["Incident Opened"] == 1
    uid = stage.node(1).ref.uid
    assert stage.incidents.claim_node(CLUSTER, uid, "somebody-else") == incident.id


@pytest.mark.parametrize("has_same_name", [False, True], ids=["copies", "same_name"])
def test_of_fifty_executions_of_one_incident_one_owns_it(stage: Stage, has_same_name: bool) -> None:
    """A copy made in the console has a name of its own; another state machine's may have ours."""
    incident_id = opened(stage, 1)
    stage.dispatch_all(incident_id)
    given = {"schema_version": 1, "incident_id": incident_id}
    own = stage.request(incident_id)

    def enter(number: int) -> Callable[[], Any]:
        if number == 0:
            return lambda: run.admit(stage, own, given)
        name = incident_id if has_same_name else f"copy-{number}"
        arn = own.arn.removesuffix(incident_id) + f"machine-{number}:{name}"
        return lambda: run.admit(stage, Request(name, arn), given)

    results = together(*(enter(number) for number in range(CONTENDERS)))

    losers = [one for one in results if isinstance(one, SupersededError)]
    assert len(losers) == CONTENDERS - 1
    incident = stage.incident(incident_id)
    assert incident.state is IncidentState.VERIFYING
    winner = next(i for i, one in enumerate(results) if not isinstance(one, SupersededError))
    if winner == 0 or not has_same_name:
        assert (winner, incident.execution_arn) == (0, own.arn)
    else:
        assert f":machine-{winner}:" in incident.execution_arn


def test_fifty_copies_of_the_step_ask_for_one_reboot(stage: Stage) -> None:
    """Lambda may run one invocation twice; the note before the call lets one of them make it."""
    stage.policies.policy = five_slots(plans={FaultClass.XID: (Rung.REBOOT, Rung.HUMAN)})
    stage.metrics.answer("xid-count", samples(xid_labels(1, 119, 3)))
    incident_id = run.open_for(stage, xid_finding(code=119))
    assert incident_id is not None
    stage.dispatch_all(incident_id)
    request = stage.request(incident_id)
    run.admit(stage, request)
    for step in (run.verify, run.cordon, run.drain):
        step(stage, request)
    assert stage.incident(incident_id).state is IncidentState.REPAIRING

    results = together(*(lambda: run.start(stage, request) for _ in range(CONTENDERS)))

    assert {getattr(one, "next", one) for one in results} == {"check"}
    assert [call for call in stage.mutations() if call.startswith("reboot")] == [
        f"reboot {instance_id(1)}"
    ]
    assert times_sent(stage)["Repair Started"] == 1


def test_fifty_closers_make_one_close(stage: Stage) -> None:
    request = stage.put(IncidentState.RELEASING)
    stage.save(request.incident_id, verdict=(Outcome.SKIPPED, REASON))
    before = len(stage.queue.messages)

    results = together(*(lambda: run.close(stage, request) for _ in range(CONTENDERS)))

    assert {getattr(one, "outcome", one) for one in results} == {Outcome.SKIPPED}
    incident = stage.incident(request.incident_id)
    assert incident.is_closed
    closes = [one for one in stage.bus.accepted if one.detail_type.value == "Incident Closed"]
    assert {one.event_id for one in closes} == {f"{incident.id}-{incident.sequence:04d}"}
    assert [entry.what for entry in incident.timeline].count("Incident Closed") == 1
    assert slots(stage) == set()
    assert stage.outbox.publish_pending() == (0, 0)
    assert len(stage.queue.messages) > before


def test_closers_and_watchers_and_dispatchers_leave_nothing_behind(stage: Stage) -> None:
    """Many at work on the same five ends: five slots are free, and given to those who wait."""
    ids = [opened(stage, number) for number in range(1, 2 * SLOTS + 1)]
    stage.dispatch_all()
    first = sorted(slots(stage))
    for one in first:
        run.admit(stage, stage.request(one))
        stage.save(one, verdict=(Outcome.SKIPPED, REASON))
        stage.executions.end(one, "ABORTED")
    closers = [lambda one=one: run.close(stage, stage.request(one)) for one in first * 3]
    watchers = [lambda one=one: run.watch(stage, one, "ABORTED") for one in first * 3]
    dispatchers = [stage.dispatch_all] * DISPATCHERS

    together(*closers, *watchers, *dispatchers)
    stage.dispatch_all()

    assert {one for one in ids if stage.incident(one).is_closed} == set(first)
    assert slots(stage) == set(ids) - set(first)
    assert times_sent(stage)["Incident Closed"] == SLOTS
    assert sorted(stage.executions.started) == sorted(ids)
