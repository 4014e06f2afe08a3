"""Metrics: what is printed, and how many series there can be."""

import json
import math
from typing import Any

import pytest

from nodemend.adapters.outbox import ACTIONS, counters_of
from nodemend.adapters.telemetry_emf import EmfTelemetry
from nodemend.domain.events import DetailType
from nodemend.domain.incidents import Outcome
from tests.fakes.messages import MemoryTelemetry


def printed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_counter_is_one_emf_line_with_exactly_its_dimensions(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POWERTOOLS_SERVICE_NAME", "drain_node")
    EmfTelemetry().count("Actions", cluster="train-a", action="drain")
    (line,) = printed(capsys)
    directive = line["_aws"]["CloudWatchMetrics"][0]
    assert directive["Namespace"] == "nodemend"
    assert sorted(directive["Dimensions"][0]) == ["action", "cluster"]
    assert directive["Metrics"] == [{"Name": "Actions", "Unit": "Count"}]
    assert (line["Actions"], line["cluster"], line["action"]) == ([1.0], "train-a", "drain")


def test_metrics_with_different_dimensions_do_not_mix(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry = EmfTelemetry(namespace="other")
    telemetry.count("Events", 3, cluster="train-a", detail_type="Scan Blind")
    telemetry.gauge("SamplesProcessed", 1.5, "Count", cluster="train-b")
    telemetry.gauge("Age", 2, "Seconds")
    dimensions = [line["_aws"]["CloudWatchMetrics"][0]["Dimensions"] for line in printed(capsys)]
    assert [sorted(one[0]) for one in dimensions] == [["cluster", "detail_type"], ["cluster"], []]


def test_an_empty_dimension_is_unknown_and_no_other_series(
    capsys: pytest.CaptureFixture[str],
) -> None:
    EmfTelemetry().count("EventsUnsent", cluster="")
    (line,) = printed(capsys)
    assert line["cluster"] == "unknown"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_no_number_is_left_out(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, value: float
) -> None:
    EmfTelemetry().gauge("Age", value, "Seconds")
    assert printed(capsys) == []
    assert "Age" in caplog.text


def test_the_fake_adds_up_what_the_real_one_prints() -> None:
    telemetry = MemoryTelemetry()
    telemetry.count("Events", cluster="a", detail_type="x")
    telemetry.count("Events", 2, cluster="a", detail_type="y")
    telemetry.count("Events", cluster="")
    telemetry.gauge("Age", 2, "Seconds", cluster="a")
    assert telemetry.counted("Events", cluster="a") == 3
    assert telemetry.counted("Events", cluster="") == 1
    assert telemetry.gauges == {("Age", (("cluster", "a"),)): [2]}


def test_incident_events_make_at_most_14_series_per_cluster() -> None:
    """Of the 40 that a cluster may have; EventsUnsent is one of them."""
    series = {("EventsUnsent", "cluster=a")}
    for detail_type in DetailType:
        for outcome in [*Outcome, None]:
            for dry_run in (True, False):
                detail = {"cluster": "a", "dry_run": dry_run} | (
                    {"outcome": outcome.value} if outcome else {"outcome": "REPLACED"}
                )
                series |= {
                    (name, ",".join(f"{key}={value}" for key, value in sorted(dimensions.items())))
                    for name, dimensions in counters_of(detail_type, detail)
                }
    assert len(series) <= 14


def test_no_metric_has_a_node_or_gpu_as_a_dimension() -> None:
    detail = {"cluster": "a", "node": {"name": "n"}, "gpu_uuid": "g", "outcome": "REPLACED"}
    for detail_type in DetailType:
        for _, dimensions in counters_of(detail_type, detail):
            assert set(dimensions) <= {"cluster", "detail_type", "outcome", "action"}


@pytest.mark.parametrize("detail_type", list(ACTIONS))
def test_a_dry_run_is_no_action(detail_type: DetailType) -> None:
    def actions(dry_run: bool) -> list[dict[str, str]]:
        detail = {"cluster": "a", "dry_run": dry_run}
        return [found for name, found in counters_of(detail_type, detail) if name == "Actions"]

    assert actions(dry_run=True) == []
    assert actions(dry_run=False) == [{"cluster": "a", "action": ACTIONS[detail_type]}]
