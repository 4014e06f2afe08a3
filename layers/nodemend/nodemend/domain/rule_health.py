"""Whether the recording rules that detection stands on are evaluated, and without an error.

A rule that AMP stopped evaluating leaves its last samples behind for five minutes and then
nothing: to whoever queries it that looks like health.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from nodemend.domain.reasons import Reason

PREFIX = "nodemend"
"""Namespaces, groups and records of ours begin so. A workspace holds other people's rules, too,
and their errors are not ours to tell."""

MISSED = 3
"""A rule that was not evaluated for this many intervals is stale."""
GRACE = timedelta(minutes=1)
"""On top: AMP evaluates late at times, and tells of an evaluation later still."""


@dataclass(frozen=True, slots=True)
class RecordedRule:
    """One rule of a group as AMP tells of it."""

    name: str
    health: str = "ok"
    """`ok`, `err`, or `unknown` before its first evaluation."""
    last_error: str = ""
    evaluated_at: datetime | None = None
    """None: never."""


@dataclass(frozen=True, slots=True)
class RuleGroup:
    """Rules that are evaluated one after the other, every `interval_s`."""

    namespace: str
    name: str
    interval_s: float
    evaluation_s: float = 0.0
    """How long the last evaluation of the whole group took."""
    rules: tuple[RecordedRule, ...] = ()


def problems_of(
    groups: Iterable[RuleGroup], now: datetime, *, records: Collection[str] = ()
) -> Mapping[str, Reason]:
    """Return what is wrong, by `group/rule`, or by `group` where it is the group's own trouble.

    Args:
        groups: all groups of the workspace.
        now: the time.
        records: names of recorded metrics that the catalogue reads, besides those under `PREFIX`.
    """
    found: dict[str, Reason] = {}
    for group in groups:
        if 0 < group.interval_s < group.evaluation_s and _ours(group, group.rules, records):
            found[group.name] = Reason(
                "rule_slow",
                f"group {group.name} takes {group.evaluation_s:.0f} s and should be evaluated "
                f"every {group.interval_s:.0f} s: evaluations are skipped; give it a longer "
                "interval or fewer rules",
            )
        for rule in group.rules:
            if not _ours(group, (rule,), records):
                continue
            reason = _problem_of(group, rule, now)
            if reason is not None:
                found[f"{group.name}/{rule.name}"] = reason
    return found


def _ours(group: RuleGroup, rules: Iterable[RecordedRule], records: Collection[str]) -> bool:
    names = (group.namespace, group.name, *(rule.name for rule in rules))
    return any(name.startswith(PREFIX) or name in records for name in names)


def _problem_of(group: RuleGroup, rule: RecordedRule, now: datetime) -> Reason | None:
    if rule.health == "err":
        error = rule.last_error or "AMP does not say why"
        return Reason("rule_failing", f"{rule.name} is not recorded: {error}")
    patience = timedelta(seconds=MISSED * group.interval_s) + GRACE
    if rule.evaluated_at is None:
        # With another health the answer merely does not say when.
        is_new = rule.health == "unknown"
        return Reason("rule_stale", f"{rule.name} was never evaluated") if is_new else None
    if now - rule.evaluated_at > patience:
        return Reason(
            "rule_stale",
            f"{rule.name} was last evaluated at {rule.evaluated_at.isoformat(timespec='seconds')}"
            f" and should be every {group.interval_s:.0f} s",
        )
    return None
