"""The clock, the ids and the invocation, real and in tests."""

from datetime import UTC, datetime, timedelta

import pytest
from ulid import ULID

from nodemend.adapters.system import LambdaInvocation, SystemClock, UlidIds
from nodemend.application.ports import Clock, Ids, Invocation
from tests.fakes.system import START, FixedInvocation, ManualClock, SequentialIds


@pytest.mark.parametrize("clock", [SystemClock(), ManualClock()], ids=["system", "manual"])
def test_clocks_tell_aware_utc_times_that_do_not_go_back(clock: Clock) -> None:
    first, second = clock.now(), clock.now()
    assert first.utcoffset() == timedelta(0)
    assert first <= second


def test_the_system_clock_is_the_machines() -> None:
    assert abs(SystemClock().now() - datetime.now(UTC)) < timedelta(seconds=5)


def test_a_manual_clock_moves_only_by_hand() -> None:
    clock = ManualClock()
    assert clock.now() == clock.now() == START
    assert clock.advance(1.5) == clock.now() == START + timedelta(seconds=1.5)


@pytest.mark.parametrize("ids", [UlidIds(), SequentialIds()], ids=["ulid", "sequential"])
def test_ids_are_distinct_and_fit_an_executions_name(ids: Ids) -> None:
    made = [ids.new(START) for _ in range(1000)]
    assert len(set(made)) == 1000
    assert all(len(one) == 26 and one.isalnum() for one in made)


def test_a_ulid_carries_the_given_time_and_sorts_by_it() -> None:
    ids = UlidIds()
    made = [ids.new(START + timedelta(seconds=number)) for number in range(5)]
    assert made == sorted(made)
    assert [ULID.from_str(one).datetime for one in made] == [
        START + timedelta(seconds=number) for number in range(5)
    ]


@pytest.mark.parametrize(
    "invocation",
    [LambdaInvocation(lambda: 2500), FixedInvocation(2.5)],
    ids=["lambda", "fixed"],
)
def test_the_time_that_is_left_is_in_seconds(invocation: Invocation) -> None:
    assert invocation.remaining_s() == 2.5
