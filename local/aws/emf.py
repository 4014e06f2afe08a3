"""CloudWatch's Embedded Metric Format, as CloudWatch Logs extracts it from a function's output."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class MetricSample:
    """One value of one metric under one set of dimensions."""

    at: float
    """Unix seconds, from the metric's own timestamp."""
    function: str
    namespace: str
    name: str
    value: float
    unit: str
    dimensions: dict[str, str]


def parse_emf(line: str, function: str) -> Iterator[MetricSample]:
    """Yield the samples in one line of output; nothing if the line is not EMF.

    A metric that the line declares without a value is left out, as CloudWatch does.
    """
    if '"_aws"' not in line:
        return
    try:
        document = json.loads(line)
    except ValueError:
        return
    header = document.get("_aws") if isinstance(document, dict) else None
    if not isinstance(header, dict):
        return
    at = float(header.get("Timestamp", 0)) / 1000
    for directive in header.get("CloudWatchMetrics", ()):
        yield from _directive_samples(document, directive, at, function)


def _directive_samples(
    document: dict[str, Any], directive: dict[str, Any], at: float, function: str
) -> Iterator[MetricSample]:
    for names in directive.get("Dimensions") or [[]]:
        dimensions = {name: str(document[name]) for name in names if name in document}
        for metric in directive.get("Metrics", ()):
            values = document.get(metric["Name"])
            for value in values if isinstance(values, list) else [values]:
                if isinstance(value, (int, float)):
                    yield MetricSample(
                        at=at,
                        function=function,
                        namespace=directive.get("Namespace", ""),
                        name=metric["Name"],
                        value=float(value),
                        unit=metric.get("Unit", "None"),
                        dimensions=dimensions,
                    )
