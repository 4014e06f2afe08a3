"""`nodemend coverage`: what the rules can see of a cluster, asked live."""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from botocore.exceptions import BotoCoreError

from nodemend.adapters.amp import AmpMetrics
from nodemend.application.ports import MetricsStore, Workspace
from nodemend.application.sight import look, nodes_without
from nodemend.domain.coverage import Coverage, MetricCoverage
from nodemend.domain.policy import ClusterPolicy, Policy
from nodemend.domain.rule_health import problems_of
from ops.policy_file import catalogue, read_policy
from ops.stack import CommandError, Stack

NAMED = 10
"""So many nodes are named that lack what others have."""


def place_of(stack: Stack, cluster: str, path: Path | None) -> tuple[ClusterPolicy, Policy]:
    """Return where the cluster's metrics are, and the policy that says which rules are on.

    Raises:
        CommandError: if neither the policy file nor the stack's parameters name the cluster.
    """
    if path is not None:
        policy, _ = read_policy(path)
        named = policy.cluster(cluster)
        if named is not None:
            return named, policy
    else:
        policy = Policy()
    given = stack.parameters()
    if given.get("ClusterName") != cluster or not given.get("WorkspaceId"):
        raise CommandError(
            f"the workspace of {cluster} is not known: name the policy file that has it with "
            "--policy, or the stack that was deployed for it with --stack"
        )
    region = stack.session.region_name or ""
    matcher = given.get("ClusterMatcher", "")
    return ClusterPolicy(cluster, given["WorkspaceId"], region, matcher), policy


def metrics_of(stack: Stack) -> Workspace:
    """Return AMP with the operator's own credentials.

    Raises:
        CommandError: if there are none.
    """
    try:
        credentials = stack.session.get_credentials()
    except BotoCoreError as error:
        raise CommandError(str(error)) from error
    if credentials is None:
        raise CommandError("there are no AWS credentials: AMP wants a signature")
    return AmpMetrics(credentials=credentials)


def report(
    cluster: ClusterPolicy, policy: Policy, metrics: Workspace, now: datetime
) -> tuple[list[str], int]:
    """Return the table, and how many rules are blind that the hardware does not excuse.

    Raises:
        CommandError: if AMP gave no usable answer.
    """
    groups = metrics.rule_groups(cluster)
    coverage, problem, samples = look(
        cluster, policy, metrics=metrics, catalogue=catalogue(), groups=groups, now=now
    )
    if coverage is None:
        raise CommandError(f"AMP does not say what {cluster.name} exports: {problem}")
    lines = [*_table(coverage), "", *_blind(coverage, cluster, metrics, now)]
    if groups.problem is not None:
        lines.append(f"AMP does not list its rule groups: {groups.problem}")
    for name, why in problems_of(groups.groups, now).items():
        lines.append(f"rule group {name}: {why.text}")
    lines.append(f"AMP processed {samples} samples for this.")
    return lines, len(coverage.unexpected)


def _table(coverage: Coverage) -> Iterator[str]:
    rows = [("metric", "have it", "needed by", "helps")]
    for metric in coverage.metrics:
        have = f"{metric.seen} of {metric.total}" if metric.total else "none"
        if metric.hardware and not metric.is_whole:
            have += " *"
        rows.append((metric.names[0], have, ", ".join(metric.rules), ", ".join(metric.helps)))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, (*widths, 0), strict=True))
        yield "  ".join(cells).rstrip()
    if any(metric.hardware and not metric.is_whole for metric in coverage.metrics):
        yield "* not all hardware has it"


def _blind(
    coverage: Coverage, cluster: ClusterPolicy, metrics: MetricsStore, now: datetime
) -> Iterator[str]:
    if not coverage.blind:
        yield "Every rule sees."
    partial: dict[str, MetricCoverage] = {}
    for one in coverage.blind:
        mark = " (expected)" if one.is_expected else ""
        yield f"{one.rule_id} is blind{mark}: {one.reason.text}"
        partial |= {m.metric: m for m in one.missing if 0 < m.seen < m.total}
    for metric in partial.values():
        nodes = nodes_without(metric, coverage, cluster, metrics=metrics, now=now, limit=NAMED)
        yield f"without {metric.names[0]}: {', '.join(nodes) or 'AMP names no node'}"
