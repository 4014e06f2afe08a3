"""Detection rules as data, and what their answers mean."""

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass, field

from nodemend.domain.errors import InvalidInputError
from nodemend.domain.faults import Family, FaultClass, FaultKind, Scope, Verdict
from nodemend.domain.findings import (
    BLANK_FROM,
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

_NODE = "node, kubernetes_node, Hostname, hostname, node_name"
_JOB = "exported_namespace, namespace, hpc_job, workload"
_IDLE_PODS = "|.*(dcgm|exporter).*"
"""The `pod` of a GPU that no job holds: none, or the exporter's own, which a scraper that does not
honour labels puts there."""

_POD_OF_JOB = "(.+?)(-[0-9]+)*(-[bcdfghjklmnpqrstvwxz2456789]{5})?"
"""A pod's name without what tells the pods of one job apart: its rank, and the suffix that
Kubernetes makes from 27 letters and digits without vowels."""

BUILT_IN: Mapping[str, str] = {
    "workload": ", ".join(WORKLOAD_LABELS),
    "node": _NODE,
    "job": _JOB,
    "cluster": "cluster",
    "idle": f'exported_pod="",hpc_job="",pod=~"{_IDLE_PODS}"',
    "blank": str(BLANK_FROM),
    "blank64": "9e18",
}
"""Words that every template may use: `$workload`, labels that are aggregated away; `$node`, labels
that name a node; `$job`, labels that name a job in `[[name@job]]`; `$cluster`, the label that tells
clusters of one workspace apart in recorded series; `$idle`, matchers of a GPU that no job holds;
`$blank`, DCGM's first blank, and `$blank64`, that of counters that outgrow it."""

_MARK = "nodemend:"
"""Recorded series begin with it; in a template they stand like metrics: `[[nodemend:x:y]]`."""


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
    under all its names, `$threshold` for a number of `thresholds`, other words are in `BUILT_IN`.
    `[[name@job]]` leaves out what no job holds and adds the label `workload`; `[[name@node]]` puts
    the node's name in the label `node`; `[[name@time]]` is the time of each sample. An offset of
    these stands inside: `[[name@node offset 10m]]`.
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
    scope: Scope = Scope.GPU
    second_signal: str = ""
    """The independent evidence that the query asks for besides the first, in words."""
    degraded: str = ""
    """What is lost without a metric, a label or a recorded series that it can do without."""
    opt_in: str = ""
    """Why the project's counters file leaves the metrics out, or whose they are."""

    @property
    def used(self) -> tuple[str, ...]:
        """All metrics and recorded series of the query, also those it can do without."""
        return names_in(self.promql)


@dataclass(frozen=True, slots=True)
class Recording:
    """One recording rule: a series that rules or people read."""

    record: str
    promql: str
    why: str


@dataclass(frozen=True, slots=True)
class RecordingGroup:
    """Recording rules that are evaluated together, in order."""

    name: str
    interval_s: int
    recordings: tuple[Recording, ...]


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All detection data: rules, metric names, XID table, GPUs per instance type, recordings."""

    rules: tuple[Rule, ...]
    metric_names: Mapping[str, tuple[str, ...]]
    xids: Mapping[int, XidEntry] = field(default_factory=dict)
    gpus_by_instance_type: Mapping[str, int] = field(default_factory=dict)
    recordings: tuple[RecordingGroup, ...] = ()

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
    # Half a surrogate pair, which JSON can spell, is no text that could be sent or be a label.
    text = value.encode("utf-8", "replace").decode()
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{label}="{escaped}"'


def render_presence(rule: Rule, metric_names: Mapping[str, tuple[str, ...]], matchers: str) -> str:
    """Return a query for how many series of the rule's presence metric match."""
    return f"count({_selector(rule.id, rule.presence, metric_names, (matchers,))})"


def names_in(template: str) -> tuple[str, ...]:
    """Return the metrics and recorded series that a template names, each once, in order.

    Example:
        >>> names_in("[[a]] / [[b@job|x='y']] + [[a]]")
        ('a', 'b')
    """
    inner = (part.split("]]", 1)[0] for part in template.split("[[")[1:])
    return tuple(dict.fromkeys(token.partition("|")[0].partition("@")[0] for token in inner))


def render_query(
    rule: Rule,
    metric_names: Mapping[str, tuple[str, ...]],
    *,
    matcher: str = "",
    thresholds: Mapping[str, float] | None = None,
    cluster_label: str = BUILT_IN["cluster"],
) -> str:
    """Return the rule's PromQL for one cluster.

    Args:
        rule: the rule.
        metric_names: every name under which exporters print a metric, by our name for it.
        matcher: label matchers that select the cluster in a shared workspace, e.g. `cluster="a"`.
        thresholds: numbers that replace the catalogue's, by name.
        cluster_label: the label that tells the clusters of one workspace apart.

    Raises:
        InvalidInputError: if the template names an unknown metric or threshold.
    """
    numbers = {**rule.thresholds, **(thresholds or {})}
    words = {name: _number(value) for name, value in numbers.items()} | {"cluster": cluster_label}
    try:
        return render_template(rule.promql, rule.id, metric_names, matcher=matcher, words=words)
    except KeyError as error:
        raise InvalidInputError(
            f"rules.{rule.id}.thresholds",
            f"{error.args[0]} has no value",
            "give the catalogue's row a default for it",
        ) from error


def render_template(
    template: str,
    where: str,
    metric_names: Mapping[str, tuple[str, ...]],
    *,
    matcher: str = "",
    words: Mapping[str, str] | None = None,
) -> str:
    """Return the PromQL of a template; recorded series need no entry in `metric_names`.

    Raises:
        InvalidInputError: if a metric is unknown.
        KeyError: if a `$word` is.
    """
    # The matcher comes from outside: nothing in it is a word or a metric, nor is it reformatted.
    protected = matcher.replace("$", "$$")
    head, *tokens = template.split("[[")
    text = _on_one_line(head)
    for token in tokens:
        inner, tail = token.split("]]", 1)
        name, _, extra = inner.partition("|")
        name, _, shape = name.partition("@")
        text += _shaped(shape, where, name, metric_names, (extra, protected)) + _on_one_line(tail)
    return string.Template(text).substitute({**BUILT_IN, **(words or {})}).strip()


def _on_one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def _shaped(
    shape: str,
    where: str,
    name: str,
    metric_names: Mapping[str, tuple[str, ...]],
    extra: tuple[str, ...],
) -> str:
    shape, _, modifier = shape.partition(" ")
    then = f" {modifier}" if modifier else ""

    def select(*more: str) -> str:
        return _selector(where, name, metric_names, (*more, *extra)) + then

    match shape:
        case "":
            return select()
        case "time":
            # timestamp() drops the name, and two names of one metric would be one series twice.
            each = [
                f"timestamp({_selector(where, name, {name: (one,)}, extra)})"
                for one in _names_of(where, name, metric_names)
            ]
            return "(" + " or ".join(each) + ")"
        case "node":
            text = select()
            for label in ("instance_id", "hostname", "Hostname", "kubernetes_node", "node"):
                text = f'label_replace({text}, "node_of", "$$1", "{label}", "(.+)")'
            return f'label_replace({text}, "node", "$$1", "node_of", "(.+)")'
        case "job":
            ways = (
                ('exported_pod!=""', "exported_pod", _POD_OF_JOB),
                (f'exported_pod="",pod!~"{_IDLE_PODS}"', "pod", _POD_OF_JOB),
                (f'exported_pod="",pod=~"{_IDLE_PODS}",hpc_job!=""', "hpc_job", "(.+)"),
            )
            parts = [
                f'label_replace({select(held)}, "workload", "$$1", "{label}", "{pattern}")'
                for held, label, pattern in ways
            ]
            return "(" + " or ".join(parts) + ")"
    raise InvalidInputError(where, f"{shape!r} is no shape of a metric", "use job, node or time")


def _names_of(
    where: str, name: str, metric_names: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...]:
    if name.startswith(_MARK):
        return (name,)
    if name not in metric_names:
        raise InvalidInputError(
            f"rules.{where}.promql", f"metric {name!r} is unknown", "add it to metrics.yaml"
        )
    return metric_names[name]


def _selector(
    where: str, name: str, metric_names: Mapping[str, tuple[str, ...]], extra: tuple[str, ...]
) -> str:
    names = _names_of(where, name, metric_names)
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
        code = _code_of(rule, sample)
        is_xid = rule.fault_class is FaultClass.XID
        if is_xid and code is None:
            continue
        entry = _entry_of(sample, code, xids) if is_xid else None
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


def _code_of(rule: Rule, sample: Sample) -> int | None:
    if rule.fault_class is FaultClass.XID:
        return xid_of(sample)
    # What the driver asks for is what happened: another action is another fault.
    return int(sample.value) if rule.fault_class is FaultClass.RECOVERY_ACTION else None


def _summary(rule: Rule, sample: Sample, gpu: str, entry: XidEntry | None, code: int | None) -> str:
    return string.Template(rule.summary).safe_substitute(
        value=_number(sample.value),
        gpu=gpu or "?",
        code=code if code is not None else "?",
        name=entry.mnemonic if entry else "unknown",
    )
