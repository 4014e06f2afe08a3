"""Whether the rules can see: what is exported, and whether recording rules are evaluated.

A rule whose metrics are missing answers as a healthy fleet does. So what the rules need is counted,
and what is missing is told: once per change, and only when two looks in a row saw it, since nodes
come and go and exporters restart.
"""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal
from urllib.parse import quote

from nodemend.application.ports import (
    Announcement,
    EventBus,
    MetricsStore,
    Report,
    RuleGroups,
    RuleGroupsResult,
    ScanMemory,
    Telemetry,
)
from nodemend.contracts.events import MetricSeen, RuleProblem, ScanBlind
from nodemend.contracts.evidence import ReasonModel
from nodemend.domain.coverage import (
    Blindness,
    Coverage,
    MetricCoverage,
    coverage_query,
    lacking_query,
    read_coverage,
)
from nodemend.domain.events import DetailType
from nodemend.domain.findings import node_names_of
from nodemend.domain.policy import ClusterPolicy, Policy
from nodemend.domain.reasons import Reason
from nodemend.domain.rule_health import problems_of
from nodemend.domain.rules import Catalogue, Rule

logger = logging.getLogger(__name__)

Cause = Literal["coverage", "rule_groups"]

LOOK_EVERY = timedelta(minutes=58)
"""A little less than an hour: the scans come every five minutes, and not to the second."""
LOOKED = "coverage/looked"
EXPECTED = ":expected"
LOOKED_INTO = 5
"""For so many metrics that a part of the fleet lacks, nodes are named."""
PERMANENT = frozenset({"amp_forbidden"})
"""Without this permission rule groups will never be seen; other problems pass by themselves."""


@dataclass(frozen=True, slots=True)
class SightPorts:
    """What the check needs."""

    metrics: MetricsStore
    rule_groups: RuleGroups
    bus: EventBus
    memory: ScanMemory
    telemetry: Telemetry
    catalogue: Catalogue


def check_sight(cluster: ClusterPolicy, policy: Policy, *, ports: SightPorts, now: datetime) -> int:
    """Count what is exported and ask how the rule groups fare; tell what has changed.

    What is exported changes rarely and is dear to count: it is looked at each hour, and at each
    call while something is missing. What cannot be asked changes nothing: unknown is neither sight
    nor blindness.

    Returns:
        How many events were announced.

    Raises:
        AwsUnavailableError, AwsForbiddenError: if news could not be announced or remembered.
    """
    groups = ports.rule_groups.rule_groups(cluster)
    last = ports.memory.last_reports(cluster.name, ("coverage", "rule_groups", LOOKED))
    coverage = (
        _look(cluster, policy, groups, ports, now)
        if is_due(last.get("coverage"), last.get(LOOKED), now)
        else None
    )
    problems: dict[Cause, Mapping[str, RuleProblem] | None] = {
        "coverage": _coverage_problems(coverage),
        "rule_groups": _group_problems(cluster, groups, ports, now),
    }
    announced = 0
    if coverage is not None and not coverage.unexpected:
        ports.memory.remember(cluster.name, {LOOKED: Report("", now)})
    for cause, found in problems.items():
        if found is None:
            continue
        before = last.get(cause)
        after, is_news = confirm(before.fingerprint if before else "", found)
        if is_news:
            told = [found[key] for key in sorted(found) if key in after.split()]
            if cause == "coverage" and coverage is not None:
                told = _with_nodes(told, coverage, cluster, ports, now)
            event = _event(cluster, cause, told, after, now)
            if ports.bus.announce([event]):
                logger.error("Scan Blind of %s was not accepted: it is sent again", cluster.name)
                continue
            announced += 1
        if before is None or after != before.fingerprint:
            ports.memory.remember(cluster.name, {cause: Report(after, now)})
    return announced


def is_due(told: Report | None, looked: Report | None, now: datetime) -> bool:
    """Tell whether what is exported is to be counted now.

    Args:
        told: what is remembered of the last look.
        looked: when the last look found nothing that somebody has to mend.
        now: the time.
    """
    words = told.fingerprint.split() if told else []
    is_open = any(word.startswith("?") or not word.endswith(EXPECTED) for word in words)
    return is_open or looked is None or now - looked.at >= LOOK_EVERY


def enabled_rules(catalogue: Catalogue, policy: Policy) -> tuple[Rule, ...]:
    """Return the rules that the policy leaves on; nobody misses what the others cannot see."""
    off = {rule_id for rule_id, rule in policy.rules.items() if not rule.is_enabled}
    return tuple(rule for rule in catalogue.rules if rule.id not in off)


def look(
    cluster: ClusterPolicy,
    policy: Policy,
    *,
    metrics: MetricsStore,
    catalogue: Catalogue,
    groups: RuleGroupsResult,
    now: datetime,
) -> tuple[Coverage | None, Reason | None, int]:
    """Return what the rules can see, or why that is unknown, and the samples that it took."""
    rules = enabled_rules(catalogue, policy)
    query = coverage_query(rules, catalogue.metric_names, matcher=cluster.matcher)
    if not query:
        return Coverage((), ()), None, 0
    answer = metrics.query_many(cluster, {"coverage": query}, now)["coverage"]
    if answer.problem is not None:
        return None, answer.problem, answer.samples_processed
    recorded = {rule.name for group in groups.groups for rule in group.rules}
    coverage = read_coverage(rules, catalogue.metric_names, answer.samples, recorded=recorded)
    return coverage, None, answer.samples_processed


def nodes_without(
    missing: MetricCoverage,
    coverage: Coverage,
    cluster: ClusterPolicy,
    *,
    metrics: MetricsStore,
    now: datetime,
    limit: int = 5,
) -> tuple[str, ...]:
    """Return some nodes that lack a metric which others have."""
    query = lacking_query(missing, coverage, matcher=cluster.matcher, limit=limit)
    answer = metrics.query_many(cluster, {"lacking": query}, now)["lacking"]
    names = (node_names_of(sample.labels) for sample in answer.samples)
    return tuple(dict.fromkeys(name[0] for name in names if name))[:limit]


def confirm(before: str, found: Mapping[str, object]) -> tuple[str, bool]:
    """Return what is to be remembered, and whether it is news.

    What is seen for the first time is remembered with a question mark, and told if the next look
    sees it, too. What is gone is forgotten at once.

    Example:
        >>> confirm("", {"a": 1}), confirm("?a", {"a": 1}), confirm("a", {"a": 1, "b": 1})
        (('?a', False), ('a', True), ('?b a', False))
    """
    words = set(before.split())
    known = {word for word in words if not word.startswith("?")}
    suspected = {word[1:] for word in words - known}
    told = {key for key in found if key in known | suspected}
    after = sorted([*told, *(f"?{key}" for key in found if key not in told)])
    return " ".join(after), bool(told) and told != known


def _look(
    cluster: ClusterPolicy,
    policy: Policy,
    groups: RuleGroupsResult,
    ports: SightPorts,
    now: datetime,
) -> Coverage | None:
    coverage, problem, samples = look(
        cluster,
        policy,
        metrics=ports.metrics,
        catalogue=ports.catalogue,
        groups=groups,
        now=now,
    )
    ports.telemetry.gauge("SamplesProcessed", samples, "Count", cluster=cluster.name)
    if coverage is None:
        logger.warning("what is exported in %s is unknown: %s", cluster.name, problem)
        return None
    ports.telemetry.gauge("RulesBlind", len(coverage.unexpected), "Count", cluster=cluster.name)
    return coverage


def _coverage_problems(coverage: Coverage | None) -> Mapping[str, RuleProblem] | None:
    if coverage is None:
        return None
    return {
        _key(one.rule_id, one.reason) + (EXPECTED if one.is_expected else ""): _problem(one)
        for one in coverage.blind
    }


def _problem(one: Blindness) -> RuleProblem:
    return RuleProblem(
        rule_id=one.rule_id,
        reason=ReasonModel.of(one.reason),
        metrics=tuple(
            MetricSeen(names=metric.names, seen=metric.seen, total=metric.total)
            for metric in one.missing
        ),
        expected=one.is_expected,
    )


def _with_nodes(
    told: list[RuleProblem],
    coverage: Coverage,
    cluster: ClusterPolicy,
    ports: SightPorts,
    now: datetime,
) -> list[RuleProblem]:
    """Name nodes for what is missing in part: asked only when there is something to tell."""
    wanted = {metric.names for one in told for metric in one.metrics}
    partial = [m for m in coverage.metrics if m.names in wanted and 0 < m.seen < m.total]
    nodes = {
        metric.names: nodes_without(metric, coverage, cluster, metrics=ports.metrics, now=now)
        for metric in partial[:LOOKED_INTO]
    }
    return [
        one.model_copy(update={"nodes": tuple(dict.fromkeys(found))[:LOOKED_INTO]})
        for one in told
        for found in [[node for m in one.metrics for node in nodes.get(m.names, ())]]
    ]


def _group_problems(
    cluster: ClusterPolicy, answer: RuleGroupsResult, ports: SightPorts, now: datetime
) -> Mapping[str, RuleProblem] | None:
    if answer.problem is not None:
        logger.warning("rule groups of %s are unknown: %s", cluster.name, answer.problem)
        if answer.problem.code not in PERMANENT:
            return None
        found: Mapping[str, Reason] = {"rule-groups": answer.problem}
    else:
        records = {name for names in ports.catalogue.metric_names.values() for name in names}
        found = problems_of(answer.groups, now, records=records)
    ports.telemetry.gauge("RuleGroupProblems", len(found), "Count", cluster=cluster.name)
    return {
        _key(name, reason): RuleProblem(rule_id=name, reason=ReasonModel.of(reason))
        for name, reason in found.items()
    }


def _key(name: str, reason: Reason) -> str:
    # Group names are other people's: no blank and no question mark may come in.
    return f"{quote(name, safe='/')}:{reason.code}"


def _event(
    cluster: ClusterPolicy,
    cause: Cause,
    problems: list[RuleProblem],
    fingerprint: str,
    now: datetime,
) -> Announcement:
    text = "\n".join((cluster.name, cause, fingerprint, now.isoformat()))
    event_id = hashlib.sha256(text.encode()).hexdigest()[:32]
    detail = ScanBlind(
        event_id=event_id,
        occurred_at=now,
        cluster=cluster.name,
        cause=cause,
        rules=tuple(problems[:50]),
    )
    return Announcement(event_id, DetailType.SCAN_BLIND, now, detail.model_dump(mode="json"))
