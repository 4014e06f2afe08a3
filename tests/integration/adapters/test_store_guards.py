"""The suite of the Guards port: the fake and DynamoDB must pass the same tests."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from nodemend.adapters.guard_dynamodb import DynamoGuards
from nodemend.application.ports import Guards
from nodemend.domain.breaker import MAX_NAMED, Breaker, Burst, Sighting, Trip
from nodemend.domain.errors import AwsForbiddenError, AwsUnavailableError, InvalidInputError
from nodemend.domain.guard import (
    MAX_SIGHTINGS,
    Guard,
    GuardEvent,
    Pause,
    Replacement,
    Slot,
)
from nodemend.domain.reasons import Reason
from tests.fakes import aws
from tests.fakes.aws import TABLE, Wire
from tests.fakes.stores import MemoryGuards
from tests.fakes.system import START

THREADS = 50


@pytest.fixture
def dynamodb() -> Iterator[Any]:
    with aws.dynamodb() as client:
        yield client


@pytest.fixture
def dynamo(dynamodb: Any) -> DynamoGuards:
    return DynamoGuards(table=TABLE, client=dynamodb)


@pytest.fixture(params=["memory", "dynamodb"])
def guards(request: pytest.FixtureRequest) -> Guards:
    if request.param == "memory":
        return MemoryGuards()
    store: Guards = request.getfixturevalue("dynamo")
    return store


def slot(number: int) -> Slot:
    return Slot(
        incident_id=f"01TEST{number}",
        node_uid=f"uid-{number}",
        node_name=f"ip-10-0-0-{number}",
        group="",
        taken_at=START,
        expires_at=START + timedelta(minutes=10, microseconds=1),
    )


def with_slot(guard: Guard, number: int) -> Guard:
    return replace(guard, slots={**guard.slots, f"uid-{number}": slot(number)})


def test_a_cluster_without_guard_item_has_an_empty_one_of_version_zero(guards: Guards) -> None:
    assert guards.load("train-a") == Guard("train-a")


def test_a_stored_guard_comes_back_with_the_next_version(guards: Guards) -> None:
    guard = replace(
        with_slot(with_slot(Guard("train-a"), 1), 2),
        replacements=(Replacement(START, "a"), Replacement(START + timedelta(microseconds=1))),
        bursts=(Burst("xid/79", START, "xid-new", ("n1", "n2"), more=3),),
        group_breakers={"a": Breaker(START, START, Trip(Reason("x", "y"), 4, 3, 8))},
    )
    assert guards.store(guard)
    assert guards.load("train-a") == replace(guard, version=1)
    assert guards.load("train-b") == Guard("train-b")


def test_a_guard_that_was_read_before_the_last_write_is_not_stored(guards: Guards) -> None:
    guards.store(Guard("train-a"))
    read = guards.load("train-a")
    assert guards.store(with_slot(read, 1))
    assert not guards.store(with_slot(read, 2))
    assert list(guards.load("train-a").slots) == ["uid-1"]


def test_of_two_first_writes_one_loses(guards: Guards) -> None:
    assert guards.store(with_slot(Guard("train-a"), 1))
    assert not guards.store(with_slot(Guard("train-a"), 2))
    assert list(guards.load("train-a").slots) == ["uid-1"]


@pytest.mark.parametrize("is_same", [False, True], ids=["different", "identical"])
def test_of_fifty_dispatchers_exactly_one_wins_each_round(guards: Guards, is_same: bool) -> None:
    for round_ in range(3):
        read = guards.load("train-a")
        barrier = threading.Barrier(THREADS)

        def contend(number: int, read: Guard = read, barrier: threading.Barrier = barrier) -> bool:
            barrier.wait(timeout=30)
            return guards.store(with_slot(read, 0 if is_same else number))

        with ThreadPoolExecutor(THREADS) as pool:
            won = list(pool.map(contend, range(THREADS)))
        assert won.count(True) == 1
        stored = guards.load("train-a")
        assert stored.version == round_ + 1
        winner = 0 if is_same else won.index(True)
        assert f"uid-{winner}" in stored.slots
        assert len(stored.slots) <= round_ + 1


# --- DynamoDB only ------------------------------------------------------------------------------


def test_a_write_that_the_sdk_repeats_after_a_lost_answer_counts_as_won(
    dynamo: DynamoGuards, dynamodb: Any
) -> None:
    for version in range(2):
        wire = Wire(dynamodb)
        wire.repeat("PutItem")
        assert dynamo.store(Guard("train-a", version=version))
        assert dynamo.load("train-a").version == version + 1


def test_a_guard_of_a_later_release_is_read_and_a_broken_one_is_an_error(
    dynamo: DynamoGuards, dynamodb: Any
) -> None:
    guard = with_slot(Guard("train-a"), 1)
    dynamo.store(guard)
    item = dynamodb.scan(TableName=TABLE)["Items"][0]
    item["document"]["M"]["something_new"] = {"M": {"open": {"BOOL": False}}}
    del item["document"]["M"]["replacements"]
    dynamodb.put_item(TableName=TABLE, Item=item)
    assert dynamo.load("train-a") == replace(guard, version=1)
    item["document"]["M"]["slots"] = {"S": "none"}
    dynamodb.put_item(TableName=TABLE, Item=item)
    with pytest.raises(InvalidInputError, match="guard of train-a"):
        dynamo.load("train-a")


def test_a_guard_with_all_its_slots_and_a_day_of_replacements_stays_small(
    dynamo: DynamoGuards, dynamodb: Any
) -> None:
    guard = replace(Guard("train-a"), replacements=(Replacement(START, "gpu-a"),) * 20)
    for number in range(50):
        guard = with_slot(guard, number)
    dynamo.store(guard)
    item = dynamodb.scan(TableName=TABLE)["Items"][0]
    assert len(str(item)) < 40_000


def test_everything_that_a_guard_can_hold_comes_back_and_stays_small(guards: Guards) -> None:
    names = tuple(f"ip-10-0-{number}.eu-central-1.compute.internal" for number in range(MAX_NAMED))
    trip = Trip(Reason("fleet_signal_suspect", "xid/79: é"), 400, 3, 2000, "xid/79", "r", names)
    guard = replace(
        Guard("train-a"),
        replacements=(Replacement(START, "gpu-a"),) * 20,
        bursts=(Burst("xid/79", START, "xid-new", names, more=1950),),
        sightings=tuple(
            Sighting(f"uid-{number}", "xid/79", START, f"ip-{number}", "xid-new")
            for number in range(MAX_SIGHTINGS)
        ),
        breaker=Breaker(START, START + timedelta(minutes=30), trip),
        pause=Pause("alice", "network work", START),
    )
    told = GuardEvent("guard-1", START, "breaker_opened", trip.reason, {"count": 400, "nodes": []})
    guard = with_slot(replace(guard, events=(told,)), 1)

    assert guards.store(guard)

    assert guards.load("train-a") == replace(guard, version=1)
    assert len(str(guard)) < 60_000


def test_a_guard_of_the_release_before_is_read(dynamo: DynamoGuards, dynamodb: Any) -> None:
    dynamo.store(with_slot(Guard("train-a"), 1))
    item = dynamodb.scan(TableName=TABLE)["Items"][0]
    for name in ("sightings", "breaker", "pause", "events"):
        del item["document"]["M"][name]
    dynamodb.put_item(TableName=TABLE, Item=item)

    guard = dynamo.load("train-a")

    assert (guard.breaker, guard.pause, guard.events, guard.sightings) == (None, None, (), ())
    assert list(guard.slots) == ["uid-1"]


@pytest.mark.parametrize(
    ("code", "error"),
    [("AccessDeniedException", AwsForbiddenError), ("ThrottlingException", AwsUnavailableError)],
)
def test_guards_raise_only_the_domains_errors(
    dynamo: DynamoGuards, dynamodb: Any, code: str, error: type[Exception]
) -> None:
    wire = Wire(dynamodb)
    wire.fail("GetItem", code)
    with pytest.raises(error, match="dynamodb:GetItem"):
        dynamo.load("train-a")
    for version in range(2):
        wire.fail("PutItem", code)
        with pytest.raises(error, match="dynamodb:PutItem"):
            dynamo.store(Guard("train-a", version=version))
