"""Detection rules as data, and what their answers mean."""

import string
from collections.abc import Mapping
from dataclasses import dataclass, field

from nodemend.domain.errors import InvalidInputError
from nodemend.domain.faults import Family, FaultClass, FaultKind, Verdict
from nodemend.domain.findings import (
    Evidence,
    Finding,
    Sample,
    collapse,
    gpu_index_of,
    gpu_uuid_of,
    is_blank,
    node_names_of,
    xid_of,
)
from nodemend.domain.generations import MODEL_LABELS, Generation, generation_of

WORKLOAD_LABELS = (
    "container",
    "container_name",
    "err_msg",
    "exported_container",
    "exported_namespace",
    "exported_pod",
    "GPU_I_ID",
    "GPU_I_PROFILE",
    "hpc_job",
    "instance",
    "namespace",
    "pod",
    "pod_name",
    "pod_namespace",
    "pod_uid",
    "vgpu",
)
"""Labels that change when a job starts, an exporter restarts or MIG splits a GPU. They would make
one GPU look like several, or its past like another GPU's (`$workload` in the templates)."""


@dataclass(frozen=True, slots=True)
class XidEntry:
    """What an XID means for the node (catalogue/xid.csv).

    The entry itself is for whichever generation has no variant; `on` gives the one that holds for
    a GPU.
    """

    code: int
    mnemonic: str
    verdict: Verdict
    action: str
    overruled: tuple[str, ...] = ()
    """Sources that would touch a node where we do not, or the other way round."""
    reason: str = ""
    """Why it was decided so; empty where all sources agree and nothing was to decide."""
    generations: tuple[Generation, ...] = ()
    """Where a variant holds; empty for the entry itself."""
    variants: tuple["XidEntry", ...] = ()
    """Entries of generations where the code means something else than the entry itself says."""
    of_unknown_model: "XidEntry | None" = None
    """Where the metrics carry no model; None: the entry itself. Who reports a code, has it."""

    def on(self, generation: Generation | None) -> "XidEntry":
        """Return the entry for a GPU of that generation; None: of none that the catalogue knows."""
        for variant in self.variants:
            if generation in variant.generations:
                return variant
        return self

    def on_gpu(self, labels: Mapping[str, str]) -> "XidEntry":
        """Return the entry for the GPU that the labels name by its model."""
        if not any(labels.get(name) for name in MODEL_LABELS):
            return self.of_unknown_model or self
        return self.on(generation_of(labels))

    @property
    def rows(self) -> tuple["XidEntry", ...]:
        """The entry itself and all variants."""
        return (self, *self.variants)


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the catalogue.

    `promql` is a template: `[[name]]` or `[[name|matchers]]` stands for the selector of a metric
    under all its names, `$threshold` for a number of `thresholds`.
    """

    id: str
    family: Family
    fault_class: FaultClass
    verdict: Verdict
    kind: FaultKind
    promql: str
    thresholds: Mapping[str, float]
    summary: str
    """One sentence for people, with `$value`, `$gpu` and `$code`."""
    why: str
    source: str
    metrics: tuple[str, ...] = ()
    """Names of the metrics without which the rule is blind."""
    presence: str = ""
    """The metric whose presence shows that the rule can see the GPU: a level fault that holds no
    more is recovered only if it is there. A missing series is unknown, not healthy."""
    is_absence_the_fault: bool = False
    """The fault IS the missing series: absent while the node's other GPUs report."""
    is_verdict_by_xid: bool = False
    """The XID table decides the verdict; `verdict` stands for codes that it does not know."""


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All detection data: rules, metric names, XID table, GPUs per instance type."""

    rules: tuple[Rule, ...]
    metric_names: Mapping[str, tuple[str, ...]]
    xids: Mapping[int, XidEntry] = field(default_factory=dict)
    gpus_by_instance_type: Mapping[str, int] = field(default_factory=dict)

    def rule(self, rule_id: str) -> Rule:
        """Return a rule by id.

        Raises:
            InvalidInputError: if the catalogue has no such rule.
        """
        for rule in self.rules:
            if rule.id == rule_id:
                return rule
        known = ", ".join(rule.id for rule in self.rules)
        raise InvalidInputError(
            "rule", f"{rule_id!r} is not in the catalogue", f"use one of {known}"
        )

    def about_nodes(self) -> tuple[Rule, ...]:
        """Return the rules that can find a node sick; the others are about jobs and exporters."""
        return tuple(
            rule for rule in self.rules if rule.verdict.is_actionable or rule.is_verdict_by_xid
        )

    def of_family(self, family: Family) -> tuple[Rule, ...]:
        """Return the rules that one scheduled scan evaluates."""
        return tuple(rule for rule in self.rules if rule.family is family)


def matcher_of(label: str, value: str) -> str:
    r"""Return a PromQL matcher for exactly this value; label values come from outside.

    Example:
        >>> matcher_of("UUID", 'GPU-1"} or vector(1)')
        'UUID="GPU-1\\"} or vector(1)"'
    """
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{label}="{escaped}"'


def render_presence(rule: Rule, metric_names: Mapping[str, tuple[str, ...]], matchers: str) -> str:
    """Return a query for how many series of the rule's presence metric match."""
    return f"count({_selector(rule, rule.presence, metric_names, (matchers,))})"


def render_query(
    rule: Rule,
    metric_names: Mapping[str, tuple[str, ...]],
    *,
    matcher: str = "",
    thresholds: Mapping[str, float] | None = None,
) -> str:
    """Return the rule's PromQL for one cluster.

    Args:
        rule: the rule.
        metric_names: every name under which exporters print a metric, by our name for it.
        matcher: label matchers that select the cluster in a shared workspace, e.g. `cluster="a"`.
        thresholds: numbers that replace the catalogue's, by name.

    Raises:
        InvalidInputError: if the template names an unknown metric or threshold.
    """
    text = rule.promql
    while "[[" in text:
        head, rest = text.split("[[", 1)
        inner, tail = rest.split("]]", 1)
        name, _, extra = inner.partition("|")
        text = head + _selector(rule, name, metric_names, (extra, matcher)) + tail
    numbers = {**rule.thresholds, **(thresholds or {})}
    printed = {name: _number(value) for name, value in numbers.items()}
    printed["workload"] = ", ".join(WORKLOAD_LABELS)
    try:
        return " ".join(string.Template(text).substitute(printed).split())
    except KeyError as error:
        raise InvalidInputError(
            f"rules.{rule.id}.thresholds",
            f"{error.args[0]} has no value",
            "give the catalogue's row a default for it",
        ) from error


def _selector(
    rule: Rule, name: str, metric_names: Mapping[str, tuple[str, ...]], extra: tuple[str, ...]
) -> str:
    if name not in metric_names:
        raise InvalidInputError(
            f"rules.{rule.id}.promql", f"metric {name!r} is unknown", "add it to metrics.yaml"
        )
    names = metric_names[name]
    matchers = [text for text in extra if text]
    if len(names) == 1:
        return names[0] + ("{" + ",".join(matchers) + "}" if matchers else "")
    return "{" + ",".join([f'__name__=~"{"|".join(names)}"', *matchers]) + "}"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(value)


def findings_of(
    rule: Rule,
    samples: tuple[Sample, ...],
    *,
    cluster: str,
    query: str,
    xids: Mapping[int, XidEntry],
) -> tuple[Finding, ...]:
    """Judge the rule's answer: every sample that is no blank is an offender.

    The query filters on the server, so the answer lists offenders only. Blank values are dropped
    here once more, since a comparison such as `> 90` lets them pass.
    """
    found = []
    for sample in samples:
        if is_blank(sample.value):
            continue
        code = xid_of(sample) if rule.fault_class is FaultClass.XID else None
        if rule.fault_class is FaultClass.XID and code is None:
            continue
        entry = _entry_of(sample, code, xids)
        verdict = entry.verdict if rule.is_verdict_by_xid and entry else rule.verdict
        gpu = gpu_index_of(sample.labels)
        found.append(
            Finding(
                cluster=cluster,
                node_names=node_names_of(sample.labels),
                fault_class=rule.fault_class,
                verdict=verdict,
                kind=rule.kind,
                gpu_uuid=gpu_uuid_of(sample.labels),
                gpu_index=gpu,
                code=code,
                summary=_summary(rule, sample, gpu, entry, code),
                action=entry.action if entry else "",
                evidence=Evidence(rule.id, query, sample.value, sample.at, dict(sample.labels)),
            )
        )
    return collapse(found)


def _entry_of(sample: Sample, code: int | None, xids: Mapping[int, XidEntry]) -> XidEntry | None:
    entry = xids.get(code) if code is not None else None
    return entry.on_gpu(sample.labels) if entry else None


def _summary(rule: Rule, sample: Sample, gpu: str, entry: XidEntry | None, code: int | None) -> str:
    return string.Template(rule.summary).safe_substitute(
        value=_number(sample.value),
        gpu=gpu or "?",
        code=code if code is not None else "?",
        name=entry.mnemonic if entry else "unknown",
    )
