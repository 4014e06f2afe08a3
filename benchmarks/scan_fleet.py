"""What the scan benchmark asks and what answers it: queries, recordings, and a fleet's history.

The history is as short as the queries allow: each metric is there for as long as a query reads it,
every 30 s as AMP has it, and what a query reads from days ago is there for a minute of that time.
The fleet is written in parts of ten nodes, each a page that Prometheus can take at once.
"""

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from local.amp.exporter import GpuFleet, Pod, counters_file_metrics
from local.amp.gpus import METRICS_BY_NAME, RENAMED
from nodemend.domain.coverage import coverage_query
from nodemend.domain.faults import Family
from nodemend.domain.rules import Catalogue, render_query, render_template

ROOT = Path(__file__).resolve().parent.parent
CLUSTER = "gpu-bench"
STEP_S = 30
GPUS_PER_NODE = 8
NODES_PER_JOB = 16
NODES_PER_PART = 10
TELEMETRY_AGE_S = 10
"""A scan comes some seconds after the last scrape."""
_NEAR_S = 3600
"""Windows up to here are one unbroken history; what is read from further back is an island."""
_MARGIN_S = 2 * STEP_S
_FOR_DAYS_S = 7200
"""Since when the faults that last are in force."""

_UNITS_S = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604_800, "y": 31_536_000}
_DURATION = r"(?:\d+(?:ms|[smhdwy]))+"
_EXPORTED = re.compile(r"\bDCGM_\w+")
_RECORDED = re.compile(r"\bnodemend:\w+:\w+")
_SCHEDULE = re.compile(
    r"ScheduleExpression: rate\((\d+) (minute|hour)s?\)\s+Input: '\{\"family\": \"(\w+)\"\}'"
)

_STEADY: Mapping[str, float] = {
    "DCGM_FI_DEV_FABRIC_HEALTH_SUMMARY": 1,
    "DCGM_FI_DEV_GPU_MAX_OP_TEMP": 87,
    "DCGM_FI_DEV_GPU_TEMP_LIMIT": 25,
    "DCGM_FI_DEV_MAX_SM_CLOCK": 1980,
    "DCGM_FI_DEV_MEM_MAX_OP_TEMP": 95,
    "DCGM_FI_DEV_PCIE_LINK_GEN": 5,
    "DCGM_FI_DEV_PCIE_LINK_WIDTH": 16,
    "DCGM_FI_DEV_PCIE_MAX_LINK_GEN": 5,
    "DCGM_FI_DEV_PCIE_MAX_LINK_WIDTH": 16,
    "DCGM_FI_DEV_POWER_MGMT_LIMIT": 700,
    "DCGM_FI_DEV_SHUTDOWN_TEMP": 92,
    "DCGM_FI_PROF_NVLINK_RX_BYTES": 9e10,
    "DCGM_FI_PROF_NVLINK_TX_BYTES": 9e10,
    "DCGM_FI_PROF_PCIE_RX_BYTES": 4e9,
    "DCGM_FI_PROF_PCIE_TX_BYTES": 4e9,
    "DCGM_FI_PROF_SM_ACTIVE": 0.93,
}
"""What a healthy GPU says of metrics that `local/amp` does not simulate; all others say 0."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording rule, rendered."""

    record: str
    expression: str
    interval_s: int
    group: str


@dataclass(frozen=True, slots=True)
class Workload:
    """Everything that AMP is asked in production, and when."""

    queries: Mapping[Family, Mapping[str, str]]
    """By family and rule id."""
    recordings: tuple[Recording, ...]
    period_s: Mapping[Family, int]
    sight: str = ""
    """What counts, each hour, which metrics are exported."""

    def read_by(self, family: Family) -> frozenset[str]:
        """Return the recordings that a family's rules read, also those behind them."""
        wanted: set[str] = set()
        texts = list(self.queries[family].values())
        by_name = {one.record: one for one in self.recordings}
        while texts:
            new = set(_RECORDED.findall(texts.pop())) & set(by_name) - wanted
            wanted |= new
            texts += [by_name[name].expression for name in new]
        return frozenset(wanted)

    def levels(self) -> Iterator[list[Recording]]:
        """Yield the recordings so that each comes after those that it reads."""
        left = list(self.recordings)
        while left:
            names = {one.record for one in left}
            ready = [one for one in left if not names & set(_RECORDED.findall(one.expression))]
            if not ready:
                raise ValueError(f"recordings read each other: {sorted(names)}")
            yield ready
            left = [one for one in left if one not in ready]

    def texts(self) -> list[str]:
        """Return all expressions."""
        asked = [query for queries in self.queries.values() for query in queries.values()]
        return asked + [one.expression for one in self.recordings]


def workload(catalogue: Catalogue, template: str) -> Workload:
    """Return what the catalogue asks, as often as the template (its text) schedules the scans.

    Raises:
        ValueError: if a family has no schedule.
    """
    periods = {
        Family(family): int(number) * (60 if unit == "minute" else 3600)
        for number, unit, family in _SCHEDULE.findall(template)
    }
    missing = sorted(set(Family) - set(periods))
    if missing:
        raise ValueError(f"no schedule in the template for {', '.join(missing)}")
    return Workload(
        queries={
            family: {
                rule.id: render_query(rule, catalogue.metric_names)
                for rule in catalogue.of_family(family)
            }
            for family in Family
        },
        recordings=tuple(_recordings(catalogue)),
        period_s=periods,
        sight=coverage_query(catalogue.rules, catalogue.metric_names),
    )


def _recordings(catalogue: Catalogue) -> Iterator[Recording]:
    for group in catalogue.recordings:
        for one in group.recordings:
            text = render_template(one.promql, one.record, catalogue.metric_names)
            yield Recording(one.record, text, group.interval_s, group.name)


def seconds(duration: str) -> float:
    """Return the length of a PromQL duration.

    Example:
        >>> seconds("1h30m")
        5400.0
    """
    parts = re.findall(r"(\d+)(ms|[smhdwy])", duration)
    return float(sum(int(number) * _UNITS_S[unit] for number, unit in parts))


@dataclass(frozen=True, slots=True)
class Reach:
    """How far back a query reads, in seconds."""

    near: float
    far: tuple[float, ...] = ()
    """Offsets beyond an hour."""
    cut: tuple[float, ...] = ()
    """Ranges beyond an hour."""


def reach_of(query: str) -> Reach:
    """Return a bound for how far back a query reads: offsets and ranges may be nested.

    Example:
        >>> reach_of("max_over_time(a[5m]) unless a offset 900s unless a offset 1d")
        Reach(near=1200.0, far=(86400.0,), cut=())
    """
    offsets = [seconds(text) for text in re.findall(rf"offset ({_DURATION})", query)]
    ranges = [seconds(text) for text in re.findall(rf"\[({_DURATION})(?::[^\]]*)?\]", query)]
    near = max([o for o in offsets if o <= _NEAR_S], default=0.0)
    near += max([r for r in ranges if r <= _NEAR_S], default=0.0)
    return Reach(
        near,
        tuple(sorted({o for o in offsets if o > _NEAR_S})),
        tuple(sorted({r for r in ranges if r > _NEAR_S})),
    )


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of history in which these metrics are written; inclusive Unix seconds."""

    start: float
    end: float
    metrics: tuple[str, ...]


def exported_metrics(catalogue: Catalogue) -> tuple[list[str], str]:
    """Return the names that the exporters print, and where they come from.

    The project's counters file, if there is one; else what the catalogue's rules name, without what
    other exporters than NVIDIA's print.
    """
    files = sorted((ROOT / "docs/dcgm-exporter").glob("*.csv"))
    if files:
        return counters_file_metrics(files[0].read_text()), str(files[0].relative_to(ROOT))
    names = [aliases[0] for aliases in catalogue.metric_names.values()]
    return [name for name in names if name.startswith("DCGM_")], "the catalogue's metrics"


def pieces(
    metrics: Sequence[str], queries: Iterable[str], end: float
) -> tuple[list[Piece], list[Piece]]:
    """Return the history that the queries need: islands of days ago, and that before the end.

    Near the end only metrics with a long window are written for long. Both are in order of time.
    """
    near = dict.fromkeys(metrics, 0.0)
    far: dict[float, set[str]] = {}
    for query in queries:
        reach = reach_of(query)
        named = set(_EXPORTED.findall(query)) & set(near)
        for name in named:
            near[name] = max(near[name], reach.near)
        for offset in reach.far:
            far.setdefault(offset, set()).update(named)
    islands = [
        Piece(end - offset - _MARGIN_S, end - offset + STEP_S, _in_order(metrics, names))
        for offset, names in sorted(far.items(), reverse=True)
        if names
    ]
    by_reach: dict[int, list[str]] = {}
    for name, window_s in near.items():
        by_reach.setdefault(_steps(window_s), []).append(name)
    found: list[Piece] = []
    borders = [*sorted(by_reach, reverse=True), -STEP_S]
    for border, following in itertools.pairwise(borders):
        names = [name for name, window_s in near.items() if _steps(window_s) >= border]
        found.append(Piece(end - border, end - following - STEP_S, _in_order(metrics, names)))
    return islands, found


def _steps(window_s: float) -> int:
    return int(window_s // STEP_S) * STEP_S + _MARGIN_S


def _in_order(metrics: Sequence[str], names: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in metrics if name in names)


def parts(nodes: int) -> list[range]:
    """Return the numbers of the nodes of each part of a fleet."""
    return [
        range(first, min(first + NODES_PER_PART, nodes))
        for first in range(0, nodes, NODES_PER_PART)
    ]


def history(piece: Piece, numbers: range, *, are_sick: bool, end: float) -> Iterator[str]:
    """Yield the OpenMetrics lines of a part of a fleet for a piece of its history."""
    simulated = [name for name in piece.metrics if RENAMED.get(name, name) in METRICS_BY_NAME]
    others = [name for name in piece.metrics if name not in simulated]
    base = next((n for n in simulated if n.startswith("DCGM_FI_DEV_GPU_TEMP")), "")
    wanted = simulated
    if others and not base:
        base = "DCGM_FI_DEV_GPU_TEMP"
        wanted = [*simulated, base]
    fleet = make_fleet(numbers, wanted, are_sick=are_sick, end=end)
    for line in fleet.history(piece.start, piece.end, STEP_S):
        if not others or not line.startswith(base + "{"):
            yield line
            continue
        if base in simulated:
            yield line
        labels, _, rest = line[len(base) :].rpartition("} ")
        stamp = rest.split(" ")[1]
        for name in others:
            yield f"{name}{labels}}} {_STEADY.get(name, 0):g} {stamp}"


def make_fleet(numbers: range, metrics: Sequence[str], *, are_sick: bool, end: float) -> GpuFleet:
    """Return nodes of a fleet in which jobs of 16 nodes work, or every GPU is an offender.

    Sick are all at once by a new XID 79 (`ecc`), heat (`thermal`), and by doing nothing for the pod
    that holds the GPU (`utilization`).
    """
    fleet = GpuFleet(CLUSTER, seed=1, metrics=metrics, clock=lambda: end)
    for number in numbers:
        name = f"ip-10-{number // 62500}-{number // 250 % 250}-{number % 250 + 1}.ec2.internal"
        job, rank = divmod(number, NODES_PER_JOB)
        fleet.add_node(name, "p5.48xlarge", pod=Pod("research", f"train{job}-{rank}"))
        if are_sick:
            fleet.inject(name, None, "xid", at=end - 2 * STEP_S, code=79)
            fleet.inject(name, None, "temperature", at=end - _FOR_DAYS_S, celsius=95)
            fleet.inject(name, None, "idle", at=end - _FOR_DAYS_S)
    return fleet


def last_scrape(now: float) -> float:
    """Return when the fleet was scraped last: before Prometheus started to watch its feeders."""
    return (now - 2 * STEP_S) // STEP_S * STEP_S
