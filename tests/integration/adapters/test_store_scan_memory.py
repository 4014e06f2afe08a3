"""The suite of the ScanMemory port: the fake and DynamoDB must pass the same tests."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from nodemend.adapters.scan_memory_dynamodb import DynamoScanMemory
from nodemend.application.ports import Report, ScanMemory
from nodemend.domain.errors import AwsUnavailableError
from tests.fakes import aws
from tests.fakes.aws import TABLE, Wire
from tests.fakes.stores import MemoryScanMemory
from tests.fakes.system import START, ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def dynamodb() -> Iterator[Any]:
    with aws.dynamodb() as client:
        yield client


@pytest.fixture
def dynamo(dynamodb: Any, clock: ManualClock) -> DynamoScanMemory:
    return DynamoScanMemory(table=TABLE, client=dynamodb, clock=clock)


@pytest.fixture(params=["memory", "dynamodb"])
def memory(request: pytest.FixtureRequest, clock: ManualClock) -> ScanMemory:
    if request.param == "memory":
        return MemoryScanMemory(clock)
    store: ScanMemory = request.getfixturevalue("dynamo")
    return store


def reports(count: int) -> dict[str, Report]:
    return {
        f"ecc/node-{number}": Report(f"xid/gpu{number}/79", START, repeats=number)
        for number in range(count)
    }


def test_what_was_never_reported_is_not_remembered(memory: ScanMemory) -> None:
    assert memory.last_reports("train-a", ["ecc/node-1"]) == {}
    assert memory.last_reports("train-a", []) == {}


def test_reports_are_remembered_by_cluster_and_name(memory: ScanMemory) -> None:
    stored = reports(3)
    memory.remember("train-a", stored)
    assert memory.last_reports("train-a", ["ecc/node-1", "ecc/node-1", "ecc/node-9"]) == {
        "ecc/node-1": stored["ecc/node-1"]
    }
    assert memory.last_reports("train-b", ["ecc/node-1"]) == {}


def test_the_newest_report_stands(memory: ScanMemory) -> None:
    memory.remember("train-a", {"scan/ecc": Report("a b", START)})
    newer = Report("", START + timedelta(seconds=60, microseconds=5), repeats=7)
    memory.remember("train-a", {"scan/ecc": newer})
    assert memory.last_reports("train-a", ["scan/ecc"]) == {"scan/ecc": newer}


def test_a_storm_of_2000_nodes_is_remembered_whole(memory: ScanMemory) -> None:
    stored = reports(2000)
    memory.remember("train-a", stored)
    assert memory.last_reports("train-a", stored) == stored


def test_reports_are_forgotten_after_two_days(memory: ScanMemory, clock: ManualClock) -> None:
    memory.remember("train-a", reports(1))
    clock.advance(2 * 86400 - 1)
    assert memory.last_reports("train-a", ["ecc/node-0"]) == reports(1)
    clock.advance(1)
    assert memory.last_reports("train-a", ["ecc/node-0"]) == {}


# --- DynamoDB only ------------------------------------------------------------------------------


def test_batches_keep_dynamodbs_limits_and_items_carry_a_time_to_live(
    dynamo: DynamoScanMemory, dynamodb: Any
) -> None:
    wire = Wire(dynamodb)
    dynamo.remember("train-a", reports(60))
    dynamo.last_reports("train-a", reports(230))
    writes = [len(one["RequestItems"][TABLE]) for one in wire.asked("BatchWriteItem")]
    reads = [len(one["RequestItems"][TABLE]["Keys"]) for one in wire.asked("BatchGetItem")]
    assert writes == [25, 25, 10]
    assert reads == [100, 100, 30]
    expected = int((START + timedelta(days=2)).timestamp()) + 1
    for item in dynamodb.scan(TableName=TABLE)["Items"]:
        assert item["expires_at"] == {"N": str(expected)}


def test_items_that_dynamodb_leaves_unprocessed_are_written_again(
    dynamo: DynamoScanMemory, dynamodb: Any
) -> None:
    wire = Wire(dynamodb)

    def half(asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        puts = asked["RequestItems"][TABLE]
        done = puts[: len(puts) // 2]
        for put in done:
            dynamodb.put_item(TableName=TABLE, Item=put["PutRequest"]["Item"])
        return 200, {"UnprocessedItems": {TABLE: puts[len(done) :]}}

    wire.answer("BatchWriteItem", half, times=2)
    dynamo.remember("train-a", reports(8))
    assert [len(one["RequestItems"][TABLE]) for one in wire.asked("BatchWriteItem")] == [8, 4, 2]
    assert dynamo.last_reports("train-a", reports(8)) == reports(8)


def test_items_that_stay_unprocessed_are_an_error(dynamo: DynamoScanMemory, dynamodb: Any) -> None:
    wire = Wire(dynamodb)
    wire.answer(
        "BatchWriteItem", lambda asked: (200, {"UnprocessedItems": asked["RequestItems"]}), times=99
    )
    with pytest.raises(AwsUnavailableError, match="8 items were not processed"):
        dynamo.remember("train-a", reports(8))
    assert len(wire.asked("BatchWriteItem")) == 8
