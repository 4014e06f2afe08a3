"""CloudWatch metrics: few series, and every alarm looks at something that is emitted."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from nodemend.adapters.outbox import ACTIONS, counters_of
from nodemend.adapters.telemetry_emf import NAMESPACE
from nodemend.domain.events import DetailType
from nodemend.domain.faults import Family
from nodemend.domain.incidents import Outcome
from tests.unit.structure.repository import PACKAGE, ROOT, resources, tree

MAX_SERIES_PER_CLUSTER = 40
FORBIDDEN = {"node", "gpu", "instance_id", "uuid", "incident_id", "pod"}


@dataclass(frozen=True)
class Metric:
    """A metric that the code emits, with its dimensions and the words it writes as literals."""

    name: str
    dimensions: frozenset[str]
    literals: frozenset[tuple[str, str]]


def calls() -> Iterator[tuple[ast.Call, ast.AST]]:
    """Yield every call of a telemetry port with the module that it is in."""
    for path in sorted(PACKAGE.glob("*/*.py")):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                target = node.func.value
                owner = getattr(target, "attr", getattr(target, "id", ""))
                is_telemetry = owner.lstrip("_") == "telemetry"
                if is_telemetry and node.func.attr in ("count", "gauge"):
                    yield node, tree(path)


def names_of(call: ast.Call, module: ast.AST) -> set[str]:
    """Return the metric names of a call: its literal, or those that its loop goes through."""
    first = call.args[0]
    if isinstance(first, ast.Constant):
        return {str(first.value)}
    assert isinstance(first, ast.Name)
    loops = [
        loop
        for loop in ast.walk(module)
        if isinstance(loop, ast.For) and call in list(ast.walk(loop))
    ]
    for loop in reversed(loops):
        if isinstance(loop.target, ast.Tuple) and isinstance(loop.iter, ast.Tuple):
            position = [getattr(target, "id", "") for target in loop.target.elts].index(first.id)
            return {row.elts[position].value for row in loop.iter.elts}
    return set()  # from counters_of, which is asked itself below


def emitted() -> set[Metric]:
    """Return all metrics: those of literal calls, and those that incident events cause."""
    found = set()
    for call, module in calls():
        words = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        literals = {
            (dimension, str(value.value))
            for dimension, value in words.items()
            if isinstance(value, ast.Constant) and dimension != "cluster"
        }
        for name in names_of(call, module):
            found.add(Metric(name, frozenset(words), frozenset(literals)))
    for kind in DetailType:
        for outcome in Outcome:
            detail = {"cluster": "a", "dry_run": False, "outcome": outcome}
            for name, dimensions in counters_of(kind, detail):
                literals = {(key, str(v)) for key, v in dimensions.items() if key != "cluster"}
                found.add(Metric(name, frozenset(dimensions), frozenset(literals)))
    return found


DOMAINS = {
    "family": set(map(str, Family)),
    "outcome": set(map(str, Outcome)),
    "action": set(ACTIONS.values()),
}
"""Words of the dimensions that are variables in the code; all others are literals there."""


def series() -> set[tuple[str, frozenset[tuple[str, str]]]]:
    """Return every series of one cluster."""
    found = set()
    for metric in emitted():
        if "cluster" not in metric.dimensions:
            continue
        rows = [dict(metric.literals)]
        for dimension in metric.dimensions - {"cluster"} - set(rows[0]):
            rows = [row | {dimension: word} for row in rows for word in DOMAINS[dimension]]
        found |= {(metric.name, frozenset(row.items())) for row in rows}
    return found


def test_a_cluster_has_few_series():
    names = sorted(name for name, _ in series())

    assert len(names) <= MAX_SERIES_PER_CLUSTER, {name: names.count(name) for name in names}


def test_series_are_derived_from_the_code():
    names = {metric.name for metric in emitted()}

    assert {"Scans", "RulesUnknown", "Events", "IncidentsClosed", "Actions", "Watches"} <= names
    assert len([name for name, _ in series() if name == "Scans"]) == len(Family)


def test_no_metric_has_a_node_or_gpu_as_dimension():
    assert not [metric for metric in emitted() if metric.dimensions & FORBIDDEN]


ALARMS = {
    name: properties
    for name, properties in resources("AWS::CloudWatch::Alarm").items()
    if properties["Namespace"] == NAMESPACE
}


@pytest.mark.parametrize("name", ALARMS)
def test_alarm_looks_at_a_series_that_is_emitted(name):
    alarm = ALARMS[name]
    dimensions = {d["Name"] for d in alarm.get("Dimensions", [])}

    kinds = [m.dimensions for m in emitted() if m.name == alarm["MetricName"]]
    assert dimensions in kinds


@pytest.mark.parametrize("name", resources("AWS::CloudWatch::Alarm"))
def test_alarm_names_a_runbook_that_exists_and_tells_somebody(name):
    alarm = resources("AWS::CloudWatch::Alarm")[name]
    runbook = alarm["AlarmDescription"].rsplit("(", 1)[1].rstrip(")")

    assert (ROOT / runbook).is_file()
    assert alarm["AlarmActions"]


def test_every_metric_is_described():
    text = (ROOT / "docs/METRICS.md").read_text()

    assert not [metric.name for metric in emitted() if f"`{metric.name}`" not in text]
