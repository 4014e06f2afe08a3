"""The suite of the History port: the fake and DynamoDB must pass the same tests."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from nodemend.adapters.history_dynamodb import DynamoHistory
from nodemend.application.ports import History
from nodemend.domain.errors import AwsForbiddenError, AwsUnavailableError
from nodemend.domain.faults import Rung
from nodemend.domain.history import KEEP, REPORTED, PastIncident, gpu, instance
from tests.fakes import aws
from tests.fakes.aws import TABLE, Wire
from tests.fakes.stores import MemoryHistory
from tests.fakes.system import START, ManualClock

MACHINE = instance("i-0aaaaaaaaaaaaaaa1")
GPU = gpu("GPU-1")
PAST = PastIncident(
    incident_id="01A",
    at=START + timedelta(microseconds=5),
    fault="xid 119",
    outcome="REBOOTED",
    instance_id=MACHINE.id,
    gpu_uuids=("GPU-1", "GPU-2"),
    rungs=(Rung.REBOOT, Rung.REPLACE),
    replacement_instance_id="i-0aaaaaaaaaaaaaaa2",
    generation=1,
)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def dynamodb() -> Iterator[Any]:
    with aws.dynamodb() as client:
        yield client


@pytest.fixture(params=["memory", "dynamodb"])
def history(request: pytest.FixtureRequest, clock: ManualClock) -> History:
    if request.param == "memory":
        return MemoryHistory(clock)
    client = request.getfixturevalue("dynamodb")
    return DynamoHistory(table=TABLE, client=client, clock=clock)


def test_a_machine_without_a_past_has_an_empty_record(history: History) -> None:
    assert history.recall("train-a", [MACHINE, GPU]) == ()
    assert history.recall("train-a", []) == ()


def test_an_incident_is_found_by_its_machine_and_by_its_gpu_and_told_once(history: History) -> None:
    history.remember("train-a", [MACHINE, GPU, GPU], PAST)

    assert history.recall("train-a", [MACHINE]) == (PAST,)
    assert history.recall("train-a", [GPU]) == (PAST,)
    assert history.recall("train-a", [MACHINE, GPU, MACHINE]) == (PAST,)
    assert history.recall("train-b", [MACHINE]) == ()
    # A GPU's id is no machine's.
    assert history.recall("train-a", [instance("GPU-1"), gpu(MACHINE.id)]) == ()


def test_the_same_incident_noted_again_stays_one(history: History) -> None:
    for _ in range(2):
        history.remember("train-a", [MACHINE], PAST)

    assert history.recall("train-a", [MACHINE]) == (PAST,)


def test_the_newest_come_first_and_only_so_many(history: History) -> None:
    entries = [
        replace(PAST, incident_id=f"01{number:03d}", at=START + timedelta(hours=number))
        for number in range(REPORTED + 15)
    ]
    for entry in entries:
        history.remember("train-a", [MACHINE if entry.at.hour % 2 else GPU], entry)

    found = history.recall("train-a", [MACHINE, GPU])

    assert found == tuple(reversed(entries[-REPORTED:]))


def test_what_is_too_old_is_not_told_also_before_it_is_deleted(
    history: History, clock: ManualClock
) -> None:
    history.remember("train-a", [MACHINE], PAST)
    clock.advance(KEEP.total_seconds() - 1)
    assert history.recall("train-a", [MACHINE]) == (PAST,)
    clock.advance(2)
    assert history.recall("train-a", [MACHINE]) == ()


def test_an_entry_expires_by_the_tables_time_to_live(dynamodb: Any, clock: ManualClock) -> None:
    DynamoHistory(table=TABLE, client=dynamodb, clock=clock).remember("train-a", [MACHINE], PAST)

    (item,) = dynamodb.scan(TableName=TABLE)["Items"]

    assert item["expires_at"] == {"N": str(int((PAST.at + KEEP).timestamp()))}


@pytest.mark.parametrize(
    ("code", "error"),
    [("AccessDeniedException", AwsForbiddenError), ("ThrottlingException", AwsUnavailableError)],
)
def test_a_failed_query_names_the_action_that_failed(
    code: str, error: type[Exception], dynamodb: Any, clock: ManualClock
) -> None:
    Wire(dynamodb).fail("Query", code, times=5)
    store = DynamoHistory(table=TABLE, client=dynamodb, clock=clock)
    with pytest.raises(error, match="dynamodb:Query"):
        store.recall("train-a", [MACHINE])
