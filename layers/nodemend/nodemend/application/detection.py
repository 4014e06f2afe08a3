"""Asking the rules: the same code for the scans, the second look and the proof of a repair."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from nodemend.application.ports import MetricsStore
from nodemend.domain.findings import Finding
from nodemend.domain.nodes import NodeRef
from nodemend.domain.policy import ClusterPolicy, Policy
from nodemend.domain.reasons import Reason
from nodemend.domain.rules import Catalogue, Rule, findings_of, render_query


@dataclass(frozen=True, slots=True)
class Detection:
    """What a set of rules says of a cluster."""

    findings: tuple[Finding, ...]
    unknown: Mapping[str, Reason]
    """Rules that could not be judged, by id, and why: neither healthy nor sick."""
    samples_processed: int = 0
    queries: int = 0


def detect(
    rules: Iterable[Rule],
    *,
    cluster: ClusterPolicy,
    metrics: MetricsStore,
    catalogue: Catalogue,
    policy: Policy,
    at: datetime,
) -> Detection:
    """Evaluate rules for a cluster at a time, one query each, side by side.

    The number of queries is the number of rules: it does not grow with nodes or GPUs.
    """
    enabled = {rule.id: rule for rule in rules if _is_enabled(policy, rule)}
    queries = {
        rule.id: render_query(
            rule,
            catalogue.metric_names,
            matcher=cluster.matcher,
            thresholds=policy.rules[rule.id].thresholds if rule.id in policy.rules else None,
        )
        for rule in enabled.values()
    }
    answers = metrics.query_many(cluster, queries, at)
    found: list[Finding] = []
    unknown: dict[str, Reason] = {}
    for rule_id, rule in enabled.items():
        answer = answers[rule_id]
        if answer.problem is not None:
            unknown[rule_id] = answer.problem
            continue
        found.extend(
            findings_of(
                rule,
                answer.samples,
                cluster=cluster.name,
                query=queries[rule_id],
                xids=catalogue.xids,
            )
        )
    return Detection(
        findings=tuple(found),
        unknown=unknown,
        samples_processed=sum(answer.samples_processed for answer in answers.values()),
        queries=len(queries),
    )


def _is_enabled(policy: Policy, rule: Rule) -> bool:
    return rule.id not in policy.rules or policy.rules[rule.id].is_enabled


def of_node(findings: Iterable[Finding], node: NodeRef) -> tuple[Finding, ...]:
    """Return the findings that name the node, by its name or its instance (as Neuron does)."""
    return tuple(finding for finding in findings if node.is_named_by(finding.node_names))
