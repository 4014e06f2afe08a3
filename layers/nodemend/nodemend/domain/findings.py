"""Signals become findings: which GPU of which node has which fault, and the evidence for it.

The metrics' traps are handled here, once: blank values, label names that differ between exporter
versions, MIG rows that repeat one GPU (facts: NVIDIA dcgm-exporter and go-dcgm sources, 2026-05).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from nodemend.domain.faults import FaultClass, FaultKind, Verdict

BLANK_FROM = 2147483632
"""DCGM's int32 blank base (go-dcgm const.go); the int64 and double blanks lie above it."""

NODE_LABELS = ("node", "kubernetes_node", "Hostname", "hostname", "node_name", "instance_id")
"""Labels that may name the node, best first. A relabelled `node` is the scraper's own knowledge;
`Hostname` (before May 2026) and `hostname` (after) are the exporter's, and a DaemonSet without
NODE_NAME puts its pod name there. `instance_id` is neuron-monitor's."""

UUID_LABELS = ("UUID", "uuid", "gpu_uuid")
"""Labels that hold the physical GPU's UUID; `gpu_uuid` is that of link metrics."""
_INDEX_LABELS = ("gpu", "neuron_device_index")
_CODE_LABELS = ("err_code", "xid")
_CODES_END = 1024
"""XIDs are smaller (NVIDIA's catalogue); what is not comes of a broken or foreign metric."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One element of an instant vector. `at` is the evaluation time of the query."""

    labels: Mapping[str, str]
    value: float
    at: datetime


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was seen, so that a person can see it again: run `query` at `at`."""

    rule_id: str
    query: str
    value: float
    at: datetime
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that holds for one GPU (or for a node: no `gpu_uuid`)."""

    cluster: str
    node_names: tuple[str, ...]
    """Candidates for the node's name, best first; empty if no label could name a node."""
    fault_class: FaultClass
    verdict: Verdict
    kind: FaultKind
    evidence: Evidence
    gpu_uuid: str = ""
    gpu_index: str = ""
    code: int | None = None
    """The XID of an `xid` finding; of a `recovery_action` the driver's own number for it."""
    summary: str = ""
    action: str = ""
    """What the XID table advises, e.g. `reset_gpu`; empty for other faults."""

    @property
    def key(self) -> str:
        """What makes two findings the same fault, on one boot of one node.

        Without a code, a mere suspicion is not the same as a fault of its class to act on: once
        noted as handled, it would hide the other one.
        """
        gpu = self.gpu_uuid or (f"gpu{self.gpu_index}" if self.gpu_index else "node")
        if self.code is not None:
            return f"{self.fault_class}/{gpu}/{self.code}"
        doubt = "" if self.verdict.is_actionable else f"/{self.verdict}"
        return f"{self.fault_class}/{gpu}/-{doubt}"

    @property
    def fault(self) -> str:
        """Fault class, with the XID code where there is one: what a whole fleet can share."""
        return f"{self.fault_class}/{self.code}" if self.code is not None else f"{self.fault_class}"

    @property
    def fault_words(self) -> str:
        """The fault as the record of a machine names it: `xid 119`."""
        return self.fault.replace("/", " ")


def is_blank(value: float) -> bool:
    """Tell whether a value is one of DCGM's blanks (or not a number), not a measurement.

    Example:
        >>> is_blank(9.223372036854776e18), is_blank(87.0)
        (True, False)
    """
    return math.isnan(value) or math.isinf(value) or value >= BLANK_FROM


def node_names_of(labels: Mapping[str, str]) -> tuple[str, ...]:
    """Return the distinct names under which the labels may mean a node, best first."""
    names = (labels.get(label, "") for label in NODE_LABELS)
    return tuple(dict.fromkeys(name for name in names if name))


def gpu_uuid_of(labels: Mapping[str, str]) -> str:
    """Return the physical GPU's UUID; the same for all MIG rows of a GPU."""
    return next((labels[label] for label in UUID_LABELS if labels.get(label)), "")


def gpu_index_of(labels: Mapping[str, str]) -> str:
    """Return the GPU's index as the exporter prints it; it can change at a reboot."""
    return next((labels[label] for label in _INDEX_LABELS if labels.get(label)), "")


def xid_of(sample: Sample) -> int | None:
    """Return the XID a sample speaks of: by label where there is one, else the gauge's value."""
    for label in _CODE_LABELS:
        text = sample.labels.get(label, "")
        if text.isdecimal() and len(text) <= len(str(_CODES_END)) and 0 < int(text) < _CODES_END:
            return int(text)
    if sample.labels.get("xid"):
        return None  # of a count, whose value is how often and no code
    value = sample.value
    return int(value) if value.is_integer() and 0 < value < _CODES_END else None


def collapse(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Keep one finding per node, GPU, fault and code: MIG repeats a GPU's rows per instance.

    Which one does not depend on the order of the rows, which AMP does not promise.
    """
    best: dict[tuple[str, str], Finding] = {}
    for finding in sorted(findings, key=_rank_of_row):
        name = finding.node_names[0] if finding.node_names else ""
        best.setdefault((name, finding.key), finding)
    return tuple(best.values())


def _rank_of_row(finding: Finding) -> tuple[Any, ...]:
    evidence = finding.evidence
    labels = sorted(evidence.labels.items())
    return finding.node_names, finding.key, finding.verdict.severity, -evidence.value, labels


OCCURRENCE_VALID = timedelta(minutes=15)
"""Evidence of an event older than this is about the past; a level must have been seen since."""

_ROOT_CAUSES = frozenset({48, 64, 74, 79, 95, 140, 149})
_ECHOES = frozenset({43, 45, 94, 144, 145, 146, 147, 148, 150, 154})
"""XIDs of one burst: the cause (lost bus, uncontained error, the link's own controller), and what
the driver reports because of it (channels that are torn down, the other ends of the link). Both
come within the same second, in any order (NVIDIA's XID catalogue; NVSentinel's XID rules)."""


_CLEAN_UP = 45
"""Channels are torn down: after a fault, which has a code of its own, or at a job's end."""


def clean_ups_alone(findings: Iterable[Finding]) -> tuple[str, ...]:
    """Return the nodes that report XID 45 and nothing else that could be its cause.

    The primary XID is unknown then: the gauge keeps the last code only, and 45 comes last.
    """
    nodes: dict[str, set[int | None]] = {}
    for finding in findings:
        for name in finding.node_names[:1]:
            nodes.setdefault(name, set()).add(finding.code)
    return tuple(sorted(name for name, codes in nodes.items() if codes == {_CLEAN_UP}))


def _rank(finding: Finding) -> int:
    if finding.code in _ROOT_CAUSES:
        return 0
    return 2 if finding.code in _ECHOES else 1


def most_severe(findings: Iterable[Finding]) -> Finding:
    """Return the finding that decides: by verdict, then a root cause before its echoes.

    Ties go to the earliest evidence, then to the key.

    Raises:
        ValueError: if there is no finding.
    """
    return min(findings, key=_urgency)


def by_urgency(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings in the order in which they decide."""
    return tuple(sorted(findings, key=_urgency))


def _urgency(finding: Finding) -> tuple[int, int, datetime, str]:
    return finding.verdict.severity, _rank(finding), finding.evidence.at, finding.key


def add_findings(known: tuple[Finding, ...], new: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return `known` plus those of `new` that are no repeats of a known fault."""
    keys = {finding.key for finding in known}
    added = {finding.key: finding for finding in new if finding.key not in keys}
    return known + tuple(added.values())


def for_cluster(finding: Finding, cluster: str) -> Finding:
    """Return the finding under the given cluster name."""
    return replace(finding, cluster=cluster)
