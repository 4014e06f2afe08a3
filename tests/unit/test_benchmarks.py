"""The benchmarks judge what they measure: a rail that does not hold is their exit status."""

import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import noise, quiet, storm
from benchmarks.write_units import WriteMeter, item_bytes, write_units
from nodemend.domain.policy import BreakerLimits, Limits, MaxUnavailable, ReplacementRate
from tests.fakes import aws
from tests.unit.application import stage
from tests.unit.application.stage import catalogue, enforce

RATE = ReplacementRate(1000, 1000)


def result_of(output: str) -> Any:
    return json.loads(output.splitlines()[-1])


# --- storm --------------------------------------------------------------------------------------


def test_the_storm_ends_with_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert storm.main(["--nodes", "60", "--moto-nodes", "20"]) == 0

    result = result_of(capsys.readouterr().out)
    for place, nodes, sick in (("memory", 60, 3), ("moto", 20, 1)):
        everyone, some = result[place]["storm"], result[place]["share"]
        assert everyone["waiting"] == {"breaker_open": nodes}
        assert (everyone["admitted"], everyone["cordons"], everyone["executions"]) == (0, 0, 0)
        assert everyone["critical_events"] == everyone["events"]["Fleet Guard Changed"] == 1
        assert everyone["events"]["GPU Fault Detected"] == nodes
        assert some["admitted"] == some["executions"] == some["sick"] == sick
        assert some["most_held_at_once"] == min(some["budget"], sick)


def test_the_storm_on_moto_tells_what_a_node_costs(capsys: pytest.CaptureFixture[str]) -> None:
    storm.main(["--nodes", "5", "--moto-nodes", "10"])

    result = result_of(capsys.readouterr().out)
    cost = result["moto"]["storm"]
    assert "write_units" not in result["memory"]["storm"]
    # Each node: a pointer and a record; its outbox emptied, what it waits for, the outbox again.
    # Besides, the guard with the burst, with the breaker's event, and without.
    assert cost["dynamodb_calls"]["PutItem"] == 2 * 10 + 3
    assert cost["dynamodb_calls"]["UpdateItem"] == 3 * 10
    assert cost["dynamodb_calls_per_node"] == sum(cost["dynamodb_calls"].values()) / 10
    assert cost["write_units_per_node"] == cost["write_units"] / 10
    assert cost["write_units_per_node"] > 6


def test_a_storm_that_gets_through_is_found() -> None:
    loose = enforce(limits=Limits(MaxUnavailable(5, 100), RATE, BreakerLimits(100, 2000)))
    with storm.in_memory(100, loose) as fleet:
        assert storm.share(fleet, 100, 10)["most_held_at_once"] == 5
    # One node is no fleet: nothing opens the breaker.
    with storm.in_memory(1, loose) as fleet, pytest.raises(storm.Broken, match="were admitted"):
        storm.storm(fleet, 1)


def test_a_budget_that_is_exceeded_for_a_moment_is_found() -> None:
    loose = enforce(limits=Limits(MaxUnavailable(5, 100), RATE))
    with storm.in_memory(100, loose) as fleet:
        storm._fall_sick(fleet, 5)
        fleet.guards.bound = 4
        with pytest.raises(storm.Broken, match="5 nodes are held, the budget is 4"):
            storm._dispatch(fleet.stage)


def test_a_decision_that_takes_too_long_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert storm.main(["--nodes", "5", "--moto-nodes", "5", "--limit-s", "0"]) == 1
    assert "5 nodes were decided in" in result_of(capsys.readouterr().out)["broken"]


# --- quiet --------------------------------------------------------------------------------------

SMALL = ["--nodes", "70", "--hours", "4", "--jobs", "1"]


def test_a_quiet_day_admits_nobody_and_the_control_exactly_the_sick_node(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert quiet.main(SMALL) == 0

    result = result_of(capsys.readouterr().out)
    assert result["admitted"] == 0
    assert result["control"]["admitted"] == 1
    assert list(result["control"]["outcomes"].values()) == ["REPLACED"]
    assert {kind.name for kind in noise.KINDS} <= set(result["kinds"])
    assert result["kinds"]["job crash"]["suppressed: application"] > 0
    assert result["kinds"]["row remap"]["closed: OBSERVED(suspect_only)"] > 0


def test_a_rule_that_takes_a_sticky_level_for_an_occurrence_does_not_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The control would be admitted as well; the quiet day has to say no."""
    naive = "max without ($workload) ([[xid_errors]] > 0 < 1024)"
    loosen(monkeypatch, {"xid-new": naive})

    assert quiet.main(SMALL) == 1
    assert any("quiet day: admitted" in one for one in result_of(capsys.readouterr().out)["broken"])


def test_a_product_that_sees_nothing_does_not_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loosen(monkeypatch, {rule.id: "up == 0" for rule in catalogue().rules})

    assert quiet.main(SMALL) == 1
    broken = result_of(capsys.readouterr().out)["broken"]
    assert "quiet day: no rule has seen job crash: the day proves nothing" in broken
    assert any("control: admitted: []" in one for one in broken)


def loosen(monkeypatch: pytest.MonkeyPatch, queries: dict[str, str]) -> None:
    """Give rules other queries."""
    rules = tuple(
        replace(rule, promql=queries.get(rule.id, rule.promql)) for rule in catalogue().rules
    )
    loose = replace(catalogue(), rules=rules)
    for module in (stage, quiet):
        monkeypatch.setattr(module, "catalogue", lambda: loose)


# --- write units --------------------------------------------------------------------------------

RECORD = {"pk": {"S": "INCIDENT#1"}, "sk": {"S": "RECORD"}, "opened_at": {"S": "2026"}}
OPEN = {"open_cluster": {"S": "gpu-prod"}}
PENDING = {"outbox_pending": {"S": "1"}}


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ({"S": "ä"}, 2),
        ({"N": "0"}, 1),
        ({"N": "-12300"}, 3),
        ({"N": "0.000123"}, 3),
        ({"BOOL": True}, 1),
        ({"NULL": True}, 1),
        ({"L": []}, 3),
        ({"L": [{"S": "ab"}, {"S": "c"}]}, 8),
        ({"M": {"key": {"S": "ab"}}}, 9),
    ],
)
def test_a_value_has_the_size_that_aws_documents(value: dict[str, Any], size: int) -> None:
    assert item_bytes({"a": value}) == 1 + size


@pytest.mark.parametrize(
    ("before", "after", "units"),
    [
        ({}, RECORD, 1),
        (RECORD, {}, 1),
        (RECORD, RECORD, 1),
        ({}, RECORD | OPEN, 2),
        ({}, RECORD | OPEN | PENDING, 3),
        (RECORD | OPEN | PENDING, RECORD | OPEN, 2),
        (RECORD | OPEN, RECORD | OPEN, 1),
        (RECORD | OPEN, RECORD | {"open_cluster": {"S": "gpu-test"}}, 3),
        (RECORD | {"document": {"S": "x" * 3000}}, RECORD, 3),
    ],
)
def test_a_write_costs_its_larger_side_and_the_entries_that_change(
    before: dict[str, Any], after: dict[str, Any], units: int
) -> None:
    assert write_units(before, after) == units


def test_a_refused_write_is_billed_and_the_benchmarks_own_reads_are_not() -> None:
    with aws.dynamodb() as peek:
        client = aws.aws_client("dynamodb")
        meter = WriteMeter(client, peek, aws.TABLE)
        client.put_item(TableName=aws.TABLE, Item=RECORD | {"document": {"S": "x" * 1500}})
        with meter.counting(), pytest.raises(client.exceptions.ConditionalCheckFailedException):
            client.put_item(
                TableName=aws.TABLE, Item=RECORD, ConditionExpression="attribute_not_exists(pk)"
            )
    assert (dict(meter.calls), meter.units) == ({"PutItem": 1}, 2)
