"""Which rules can see at all: a rule whose metrics nobody exports answers as if all were well.

For each metric that the rules read, one query counts the GPUs (or Neuron instances) that have it.
What all others have and some have not is told as well: half of a fleet with an older counters
file is half blind. The query has one term per metric and does not grow with the fleet.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from nodemend.domain.findings import NODE_LABELS, UUID_LABELS, Sample
from nodemend.domain.reasons import Reason
from nodemend.domain.rules import Rule

COUNTERS_FILE = "docs/dcgm-exporter/counters.csv"

_IN_TEMPLATE = re.compile(r"\[\[([\w:]+)")
_GPU = (*UUID_LABELS, "gpu", "node", "kubernetes_node", "Hostname", "hostname")
"""What tells two GPUs apart under every label shape; MIG rows and pods fall together."""
_NEURON = ("instance_id",)
_IS_MEASURED = "< 9e18 != 2147483634"
"""Old exporters print "not supported" as a number (go-dcgm: int64 and int32 blanks)."""

_NOT_EVERYWHERE = (
    (r"NVLINK|P2P_STATUS|FABRIC", "only GPUs with NVLink have it"),
    (r"RETIRED", "only GPUs before Ampere have it"),
    (r"MEMORY_TEMP|MEM_MAX_OP_TEMP|MEMORY_MAX_OP", "only GPUs with HBM have it"),
    (r"TEMP_LIMIT|TEMP_MARGIN|SLOWDOWN|SHUTDOWN|MAX_OP", "not every driver tells it"),
    (r"RECOVERY_ACTION|SRAM_EXCEEDED|THRESHOLD_SRM", "older drivers and GPUs do not tell it"),
    (r"GPU_HEALTH_STATUS", "eleven series per GPU, so our counters file leaves it out"),
)
_NOT_WITH_MIG = (
    (r"REMAP", "GPUs before Ampere and GPUs split by MIG have none"),
    (r"GPU_UTIL|ENC_UTIL|DEC_UTIL|PROF_", "GPUs split by MIG may have none"),
)
"""What some hardware does not have, whatever the counters file says: a whole fleet may lack the
former, single GPUs the latter. It is told, and is no reason to call somebody."""


class MetricKind(StrEnum):
    """What a metric is about, and so what it can be counted by."""

    GPU = "gpu"
    NEURON = "neuron"
    RECORDED = "recorded"
    """Written by a recording rule."""
    OTHER = "other"
    """Of the cluster or a switch: it is there, or it is not."""


@dataclass(frozen=True, slots=True)
class MetricCoverage:
    """How many GPUs (Neuron: instances) have a metric, under any of its names."""

    metric: str
    """Our name for it."""
    names: tuple[str, ...]
    kind: MetricKind
    seen: int
    total: int
    """How many have any metric of this kind."""
    rules: tuple[str, ...]
    """Rules that are blind without it."""
    helps: tuple[str, ...] = ()
    """Rules that judge better with it, and work without it."""

    @property
    def is_whole(self) -> bool:
        """True if nobody lacks it."""
        return 0 < self.total <= self.seen

    @property
    def hardware(self) -> str:
        """Why so few have it, if that is the hardware's nature; else empty."""
        rows = _NOT_EVERYWHERE + (_NOT_WITH_MIG if self.seen else ())
        text = " ".join(self.names)
        return next((why for pattern, why in rows if re.search(pattern, text)), "")


@dataclass(frozen=True, slots=True)
class Blindness:
    """A rule that cannot see, or sees a part of the fleet only."""

    rule_id: str
    reason: Reason
    """Codes: `nothing_exported`, `not_exported`, `exported_in_part`, `not_recorded`,
    `label_missing`."""
    missing: tuple[MetricCoverage, ...] = ()
    is_expected: bool = False
    """The hardware may not have it; nobody needs to be called."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """What the rules can see of one cluster."""

    metrics: tuple[MetricCoverage, ...]
    blind: tuple[Blindness, ...]

    @property
    def unexpected(self) -> tuple[Blindness, ...]:
        """What somebody should mend."""
        return tuple(one for one in self.blind if not one.is_expected)


@dataclass(frozen=True, slots=True)
class _Needs:
    rules: tuple[str, ...]
    helps: tuple[str, ...]


def kind_of(names: Iterable[str]) -> MetricKind:
    """Tell by its names what a metric is about."""
    first = next(iter(names))
    if ":" in first:
        return MetricKind.RECORDED
    if first.startswith("DCGM_"):
        return MetricKind.OTHER if "NVSWITCH" in first else MetricKind.GPU
    if re.match(r"neuron|execution_|hardware_ecc|instance_info", first):
        return MetricKind.NEURON
    return MetricKind.OTHER


def coverage_query(
    rules: Iterable[Rule], metric_names: Mapping[str, tuple[str, ...]], *, matcher: str = ""
) -> str:
    """Return the query whose rows are the counts, by the label `metric`; empty without rules."""
    needs = _needs(rules)
    known = _names(needs, metric_names)
    terms = [_term(metric, names, matcher) for metric, names in known.items()]
    witness = _witness(known)
    if witness:
        names = known[witness]
        terms += [
            _term(word, names, ",".join(f'{label}=""' for label in labels), matcher)
            for word, labels in (("-uuid", UUID_LABELS), ("-node", NODE_LABELS))
        ]
    return " or ".join(terms)


def lacking_query(
    part: MetricCoverage, coverage: Coverage, *, matcher: str = "", limit: int = 5
) -> str:
    """Return a query for nodes that have GPUs without a metric: a few, the most GPUs first."""
    whole = max((m for m in coverage.metrics if m.kind is part.kind), key=lambda m: m.seen)
    have, lack = (_group(m.names, (matcher,)) for m in (whole, part))
    return f"topk({limit}, count by ({', '.join(NODE_LABELS)}) ({have} unless {lack}))"


def read_coverage(
    rules: Iterable[Rule],
    metric_names: Mapping[str, tuple[str, ...]],
    samples: Iterable[Sample],
    *,
    recorded: Collection[str] = (),
) -> Coverage:
    """Judge the answer to `coverage_query`.

    Args:
        rules: the rules that were asked for.
        metric_names: every name of a metric, by ours.
        samples: the answer.
        recorded: names of records that are deployed. Many write nothing while all is well: that
            they are missing says nothing then, and their health is looked at elsewhere.
    """
    asked = tuple(rules)
    needs = _needs(asked)
    counts = {sample.labels.get("metric", ""): int(sample.value) for sample in samples}
    known = _names(needs, metric_names)
    for metric, names in known.items():
        if not counts.get(metric) and set(names) & set(recorded):
            counts[metric] = 1
    kinds = {metric: kind_of(names) for metric, names in known.items()}
    totals = {
        kind: max((counts.get(metric, 0) for metric in known if kinds[metric] is kind), default=0)
        for kind in MetricKind
    }
    metrics = {
        metric: MetricCoverage(
            metric=metric,
            names=names,
            kind=kinds[metric],
            seen=counts.get(metric, 0),
            # One of several writers may have nothing to write: presence is all that counts.
            total=totals[kinds[metric]]
            if kinds[metric] in (MetricKind.GPU, MetricKind.NEURON)
            else max(1, counts.get(metric, 0)),
            rules=needs[metric].rules,
            helps=needs[metric].helps,
        )
        for metric, names in known.items()
    }
    blind = [one for rule in asked if (one := _blindness(rule, metrics, totals)) is not None]
    blind += _unlabelled(asked, counts, totals[MetricKind.GPU])
    return Coverage(tuple(metrics.values()), tuple(blind))


def _needs(rules: Iterable[Rule]) -> dict[str, _Needs]:
    required: dict[str, list[str]] = {}
    helping: dict[str, list[str]] = {}
    for rule in rules:
        for metric in dict.fromkeys((*rule.metrics, *_IN_TEMPLATE.findall(rule.promql))):
            where = required if metric in rule.metrics else helping
            where.setdefault(metric, []).append(rule.id)
    return {
        metric: _Needs(tuple(required.get(metric, ())), tuple(helping.get(metric, ())))
        for metric in sorted({*required, *helping})
    }


def _names(
    needs: Iterable[str], metric_names: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """Return the names of each metric; a recorded series is its own name."""
    return {
        metric: metric_names.get(metric, (metric,))
        for metric in needs
        if metric in metric_names or ":" in metric
    }


def _witness(known: Mapping[str, tuple[str, ...]]) -> str:
    """Return the GPU metric whose labels are looked at: one that every GPU has, if there is one."""
    gpu = [metric for metric, names in known.items() if kind_of(names) is MetricKind.GPU]
    return "gpu_temp" if "gpu_temp" in gpu else next(iter(gpu), "")


def _term(metric: str, names: tuple[str, ...], *matchers: str) -> str:
    counted = f"count({_group(names, matchers)})"
    return f'label_replace({counted}, "metric", "{metric}", "", "")'


def _group(names: tuple[str, ...], matchers: Iterable[str]) -> str:
    given = [matcher for matcher in matchers if matcher]
    head = names[0] if len(names) == 1 else ""
    if not head:
        given.insert(0, f'__name__=~"{"|".join(names)}"')
    selector = head + ("{" + ",".join(given) + "}" if given else "")
    labels = _NEURON if kind_of(names) is MetricKind.NEURON else _GPU
    return f"group by ({', '.join(labels)}) ({selector} {_IS_MEASURED})"


def _blindness(
    rule: Rule, metrics: Mapping[str, MetricCoverage], totals: Mapping[MetricKind, int]
) -> Blindness | None:
    needed = [metrics[metric] for metric in rule.metrics if metric in metrics]
    missing = tuple(metric for metric in needed if not metric.is_whole)
    if not missing:
        return None
    devices = {kind: totals[kind] for kind in (MetricKind.GPU, MetricKind.NEURON)}
    if not any(devices.values()):
        text = (
            "no GPU of the cluster reports anything: it has none now, or exporter, scraping, "
            "workspace or matcher are wrong"
        )
        return Blindness(rule.id, Reason("nothing_exported", text), missing)
    if any(devices.get(metric.kind) == 0 for metric in missing):
        return None  # about hardware that this cluster does not have
    worst = min(missing, key=lambda metric: (metric.seen > 0, metric.hardware != ""))
    # Who has deployed no rule groups, or does not scrape kube-state-metrics, has chosen so; the
    # event tells what that costs.
    chosen = (MetricKind.RECORDED, MetricKind.OTHER)
    is_expected = all(m.hardware or m.kind in chosen for m in missing)
    return Blindness(rule.id, _reason(worst), missing, is_expected)


def _reason(metric: MetricCoverage) -> Reason:
    name = metric.names[0]
    normal = f" ({metric.hardware})" if metric.hardware else ""
    things = "Neuron instances" if metric.kind is MetricKind.NEURON else "GPUs"
    if metric.seen:
        return Reason(
            "exported_in_part",
            f"{metric.seen} of {metric.total} {things} have {name}{normal}: compare the counters "
            "files of the exporters",
        )
    if metric.kind is MetricKind.RECORDED:
        return Reason("not_recorded", f"nothing records {name}: deploy the rule groups")
    where = f"add it to the counters file ({COUNTERS_FILE})" if name.startswith("DCGM_") else ""
    return Reason("not_exported", f"nobody exports {name}{normal}: {where or 'scrape it'}")


def _unlabelled(
    rules: Iterable[Rule], counts: Mapping[str, int], total: int
) -> Iterable[Blindness]:
    if lost := counts.get("-uuid", 0):
        blind = ", ".join(rule.id for rule in rules if "UUID" in rule.promql)
        text = f"{lost} of {total} GPUs have no UUID label, by which these rules know them: {blind}"
        yield Blindness("label-uuid", Reason("label_missing", text))
    if lost := counts.get("-node", 0):
        labels = ", ".join(NODE_LABELS)
        text = f"{lost} of {total} GPUs name no node: none of {labels} is there"
        yield Blindness("label-node", Reason("label_missing", text))
