"""The policy document: YAML in AWS AppConfig, checked here and when it is deployed.

Every field has a default but `schema_version`. Unknown fields are refused, and so are fields that
this version does not act on yet: a limit that is silently ignored is worse than none.
"""

import json
import re
from collections.abc import Iterable, Mapping
from datetime import time
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from nodemend.domain.errors import PolicyInvalidError
from nodemend.domain.faults import FaultClass, Mode, Rung, Verdict
from nodemend.domain.history import KEEP
from nodemend.domain.policy import (
    ApprovalPoint,
    ApprovalPolicy,
    Attempts,
    BreakerLimits,
    ClusterPolicy,
    Deadlines,
    GroupLimits,
    GroupPolicy,
    Limits,
    MaxUnavailable,
    Policy,
    PolicySource,
    ReplacementRate,
    RulePolicy,
    Waits,
)
from nodemend.domain.windows import WEEKDAYS, MaintenanceWindow, Weekday, zone_of

SUPPORTED_RUNGS = frozenset({Rung.REBOOT, Rung.REPLACE, Rung.HUMAN})
"""Rungs that this version can carry out."""

MAX_HISTORY_EVENTS = 20_000
"""Bound on what waiting loops may use of an execution's 25,000 history events."""

MAX_MEMORY_S = int(KEEP.total_seconds())
"""Nothing older is remembered of a machine or a GPU."""

EVENTS_PER_LOOP = 9
"""Task (5), Choice (2) and Wait (2) of one round, counted from a real history."""

WaitList = Annotated[tuple[Annotated[int, Field(ge=1, le=3600)], ...], Field(min_length=1)]
Plans = dict[FaultClass, tuple[Rung, ...]]


NOT_BUILT_YET = frozenset(
    {
        "drain",
        "deadlines.volumes_s",
        "deadlines.drain_total_s",
    }
)
"""Names of the design that this version does not act on. A policy that uses one is refused, with
these words: a limit that is silently ignored is worse than none."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ClusterDocument(_Model):
    """One EKS cluster and where its metrics are."""

    name: str = Field(min_length=1, max_length=100, description="The EKS cluster's name.")
    workspace: str = Field(
        pattern=r"^ws-[A-Za-z0-9-]+$", description="Id of its AMP workspace, ws-…"
    )
    region: str = Field(
        pattern=r"^[a-z]{2}(-[a-z]+)+-\d$", description="Region of cluster and AMP."
    )
    matcher: str = Field(
        default="",
        description='PromQL matchers that select the cluster in a shared workspace: cluster="a".',
    )
    role_arn: str = Field(
        default="",
        pattern=r"^(arn:[a-z-]+:iam::\d{12}:role/.+)?$",
        description="Role to reach the cluster with; empty: the deployment's own default.",
    )


class MaxUnavailableDocument(_Model):
    """The smaller of the two binds; percentages round up; 0 stops all disruption."""

    count: int = Field(default=5, ge=0, le=50)
    percent: float = Field(default=2, ge=0, le=100)

    def to_domain(self) -> MaxUnavailable:
        """Return the domain's value."""
        return MaxUnavailable(self.count, self.percent)


class BreakerDocument(_Model):
    """When one fault on many nodes, or many nodes down, stops all new disruption."""

    percent: float = Field(default=20, gt=0, le=100)
    min_nodes: int = Field(default=3, ge=2, le=2000)
    window_s: int = Field(default=600, ge=60, le=86_400)
    cooldown_s: int = Field(default=1800, ge=0, le=86_400)

    def to_domain(self) -> BreakerLimits:
        """Return the domain's value."""
        return BreakerLimits(self.percent, self.min_nodes, self.window_s, self.cooldown_s)


class ReplacementsDocument(_Model):
    """Replacements that may start."""

    per_hour: int = Field(default=4, ge=0, le=100)
    per_day: int = Field(default=20, ge=0, le=1000)

    def to_domain(self) -> ReplacementRate:
        """Return the domain's value."""
        return ReplacementRate(self.per_hour, self.per_day)


class LimitsDocument(_Model):
    """Bounds on what nodemend itself does."""

    max_unavailable: MaxUnavailableDocument = MaxUnavailableDocument()
    replacements: ReplacementsDocument = ReplacementsDocument()
    breaker: BreakerDocument = BreakerDocument()

    def to_domain(self) -> Limits:
        """Return the domain's value."""
        return Limits(
            self.max_unavailable.to_domain(),
            self.replacements.to_domain(),
            self.breaker.to_domain(),
        )


class GroupLimitsDocument(_Model):
    """Bounds of one group, besides the cluster's own."""

    max_unavailable: MaxUnavailableDocument = MaxUnavailableDocument()
    replacements: ReplacementsDocument | None = None
    breaker: BreakerDocument | None = None

    def to_domain(self) -> GroupLimits:
        """Return the domain's value."""
        return GroupLimits(
            self.max_unavailable.to_domain(),
            self.replacements.to_domain() if self.replacements else None,
            self.breaker.to_domain() if self.breaker else None,
        )


class GroupDocument(_Model):
    """Overrides for the nodes whose labels all match; the first match binds."""

    match: dict[str, str] = Field(min_length=1, description="Node labels, exactly.")
    mode: Mode | None = None
    limits: GroupLimitsDocument | None = None
    plans: Plans = {}


class WaitsDocument(_Model):
    """Whole seconds between two looks; the last entry repeats."""

    drain_poll_s: WaitList = (20, 60, 300)
    check_poll_s: WaitList = (20, 60, 300)
    approval_poll_s: WaitList = (20, 60)


class DeadlinesDocument(_Model):
    """Seconds that a step may take in all."""

    verify_s: int = Field(default=600, ge=1, le=86_400)
    drain_s: int = Field(default=1800, ge=1, le=604_800)
    replace_s: int = Field(default=2700, ge=1, le=86_400)
    reboot_s: int = Field(default=600, ge=1, le=86_400)


class HoldDocument(_Model):
    """Whole seconds that a fault must have lasted before a node is touched for it."""

    fatal: int = Field(default=0, ge=0, le=86_400)
    degraded: int = Field(default=600, ge=0, le=86_400)

    def to_domain(self) -> dict[Verdict, int]:
        """Return the domain's value; what is not held is not named there."""
        held = {Verdict.FATAL: self.fatal, Verdict.DEGRADED: self.degraded}
        return {verdict: seconds for verdict, seconds in held.items() if seconds}


class MaintenanceWindowDocument(_Model):
    """A time of the week in which new disruption may start."""

    days: tuple[Weekday, ...] = Field(default=WEEKDAYS, min_length=1)
    start: str = Field(pattern=r"^([01]\d|2[0-3]):[0-5]\d$", description="Wall clock, HH:MM.")
    duration_s: int = Field(ge=60, le=604_800, description="Real seconds from the start on.")
    timezone: str = Field(default="UTC", description="IANA name, e.g. Europe/Berlin.")

    @field_validator("timezone")
    @classmethod
    def _timezone_must_exist(cls, timezone: str) -> str:
        try:
            zone_of(timezone)
        except (KeyError, ValueError, OSError) as error:
            raise ValueError(
                f"no time zone {timezone!r}: use an IANA name such as Europe/Berlin, or UTC"
            ) from error
        return timezone

    def to_domain(self) -> MaintenanceWindow:
        """Return the domain's value."""
        hour, minute = self.start.split(":")
        return MaintenanceWindow(
            self.days, time(int(hour), int(minute)), self.duration_s, self.timezone
        )


class AttemptsDocument(_Model):
    """Repairs of one machine within the window; after that a person is called."""

    per_node: int = Field(default=3, ge=1, le=10)
    window_s: int = Field(default=604_800, ge=60, le=MAX_MEMORY_S)


class ApprovalDocument(_Model):
    """Which repairs need a person's yes; silence is a no."""

    before: ApprovalPoint = ApprovalPoint.CORDON
    rungs: tuple[Rung, ...] = Field(default=(Rung.REBOOT, Rung.REPLACE), min_length=1)
    # The incident holds its slot while it waits, so a day is the most.
    timeout_s: int = Field(default=3600, ge=1, le=86_400)

    @field_validator("rungs")
    @classmethod
    def _rungs_must_be_repairs(cls, rungs: tuple[Rung, ...]) -> tuple[Rung, ...]:
        possible = sorted(SUPPORTED_RUNGS - {Rung.HUMAN})
        for rung in rungs:
            if rung not in possible:
                raise ValueError(f"{rung} is no repair of this version: use {', '.join(possible)}")
        if len(set(rungs)) < len(rungs):
            raise ValueError("a rung stands there twice: name each once")
        return rungs

    def to_domain(self) -> ApprovalPolicy:
        """Return the domain's value."""
        return ApprovalPolicy(self.before, self.rungs, self.timeout_s)


class RuleDocument(_Model):
    """Overrides for one rule of docs/RULES.md."""

    enabled: bool = True
    thresholds: dict[str, float] = {}
    plan: tuple[Rung, ...] | None = None


class PolicyDocument(_Model):
    """The whole document. docs/POLICY.md explains each field."""

    schema_version: Literal[1]
    mode: Mode = Mode.DRY_RUN
    clusters: tuple[ClusterDocument, ...] = ()
    groups: tuple[GroupDocument, ...] = ()
    limits: LimitsDocument = LimitsDocument()
    plans: Plans = {}
    waits: WaitsDocument = WaitsDocument()
    deadlines: DeadlinesDocument = DeadlinesDocument()
    hold_down_s: int = Field(default=600, ge=0, le=86_400)
    startup_grace_s: int = Field(default=1800, ge=0, le=86_400)
    repeat_window_s: int = Field(default=604_800, ge=0, le=MAX_MEMORY_S)
    attempts: AttemptsDocument = AttemptsDocument()
    approval: ApprovalDocument | None = None
    rules: dict[str, RuleDocument] = {}
    exclude: tuple[str, ...] = ()
    hold_s: HoldDocument = HoldDocument()
    maintenance_windows: tuple[MaintenanceWindowDocument, ...] = ()
    fatal_ignores_windows: bool = False

    @field_validator("clusters")
    @classmethod
    def _clusters_must_be_told_apart(
        cls, clusters: tuple[ClusterDocument, ...]
    ) -> tuple[ClusterDocument, ...]:
        names = [cluster.name for cluster in clusters]
        if len(names) != len(set(names)):
            raise ValueError("two clusters have one name: name each cluster once")
        for workspace in {cluster.workspace for cluster in clusters}:
            sharing = [cluster for cluster in clusters if cluster.workspace == workspace]
            if len(sharing) > 1 and not _are_disjoint([c.matcher for c in sharing]):
                raise ValueError(
                    f"workspace {workspace} serves {len(sharing)} clusters: give each a matcher "
                    'that fixes one label they share to a value of its own, such as cluster="a"'
                )
        return clusters

    @model_validator(mode="after")
    def _plans_must_be_possible(self) -> Self:
        plans = [*self.plans.items()]
        plans += [item for group in self.groups for item in group.plans.items()]
        for fault_class, plan in plans:
            _require_possible(f"plans.{fault_class}", plan)
        for rule_id, rule in self.rules.items():
            _require_possible(f"rules.{rule_id}.plan", rule.plan or ())
        return self

    @model_validator(mode="after")
    def _loops_must_fit_into_a_history(self) -> Self:
        check_poll_s, deadlines = self.waits.check_poll_s, self.deadlines
        loops = worst_case_loops(self.waits.drain_poll_s, deadlines.drain_s)
        loops += worst_case_loops(check_poll_s, deadlines.verify_s)
        # A reboot that fails is followed by a replacement, so an execution may wait for both.
        for repair_s in (deadlines.reboot_s, deadlines.replace_s):
            loops += worst_case_loops(check_poll_s, repair_s)
            # A node that turns clean at the last moment is watched for one more hold-down. A clean
            # look waits for what is left of the hold-down, which may be a second, an unclean one a
            # whole poll.
            loops += 2 * worst_case_loops(check_poll_s, repair_s + 2 * self.hold_down_s)
        if self.approval is not None:
            # Asked at most twice: once for all before the cordon, or before each of two repairs.
            # Then the fault is looked at again, for as long as a verification may take.
            loops += 2 * worst_case_loops(self.waits.approval_poll_s, self.approval.timeout_s)
            loops += 2 * worst_case_loops(check_poll_s, deadlines.verify_s)
        if loops * EVENTS_PER_LOOP > MAX_HISTORY_EVENTS:
            raise ValueError(
                f"waits and deadlines allow {loops} polls, more than an execution's history "
                "holds: let the last entries of waits grow, or shorten the deadlines"
            )
        return self

    def to_policy(self, version: str) -> Policy:
        """Return the domain's value."""
        return Policy(
            version=version,
            source=PolicySource.DEPLOYED,
            mode=self.mode,
            clusters=tuple(
                ClusterPolicy(c.name, c.workspace, c.region, c.matcher, c.role_arn)
                for c in self.clusters
            ),
            groups=tuple(
                GroupPolicy(
                    match=group.match,
                    mode=group.mode,
                    limits=group.limits.to_domain() if group.limits else None,
                    plans=group.plans,
                )
                for group in self.groups
            ),
            limits=self.limits.to_domain(),
            plans=self.plans,
            waits=Waits(
                self.waits.drain_poll_s, self.waits.check_poll_s, self.waits.approval_poll_s
            ),
            deadlines=Deadlines(
                self.deadlines.verify_s,
                self.deadlines.drain_s,
                self.deadlines.replace_s,
                self.deadlines.reboot_s,
            ),
            hold_down_s=self.hold_down_s,
            startup_grace_s=self.startup_grace_s,
            repeat_window_s=self.repeat_window_s,
            attempts=Attempts(self.attempts.per_node, self.attempts.window_s),
            approval=self.approval.to_domain() if self.approval else None,
            rules={
                rule_id: RulePolicy(rule.enabled, rule.thresholds, rule.plan)
                for rule_id, rule in self.rules.items()
            },
            exclude=self.exclude,
            hold_s=self.hold_s.to_domain(),
            maintenance_windows=tuple(window.to_domain() for window in self.maintenance_windows),
            fatal_ignores_windows=self.fatal_ignores_windows,
        )


_EQUALITY = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"')


def _are_disjoint(matchers: list[str]) -> bool:
    """Tell whether no series can match two: one label is fixed in all, to values that differ."""
    fixed = [dict(_EQUALITY.findall(matcher)) for matcher in matchers]
    common = set(fixed[0]).intersection(*fixed)
    return any(len({values[label] for values in fixed}) == len(fixed) for label in common)


def _require_possible(field: str, plan: tuple[Rung, ...]) -> None:
    for rung in plan:
        if rung not in SUPPORTED_RUNGS:
            built = ", ".join(sorted(SUPPORTED_RUNGS))
            raise ValueError(f"{field}: rung {rung} is not built yet: use {built}")
    if len(set(plan)) < len(plan):
        raise ValueError(f"{field}: a rung stands there twice: each is tried once")
    if Rung.HUMAN in plan[:-1]:
        raise ValueError(f"{field}: human must be the last rung")
    if Rung.REPLACE in plan and Rung.REBOOT in plan[plan.index(Rung.REPLACE) :]:
        raise ValueError(
            f"{field}: reboot stands after replace, which ends the instance: put it before"
        )


def worst_case_loops(waits_s: tuple[int, ...], deadline_s: int) -> int:
    """Return the most polls that a wait list allows before the deadline.

    Example:
        >>> worst_case_loops((20, 60, 300), 1800)
        8
    """
    elapsed = loops = 0
    while elapsed < deadline_s:
        elapsed += waits_s[min(loops, len(waits_s) - 1)]
        loops += 1
    return loops


def parse_policy(document: object, version: str) -> Policy:
    """Parse a policy document.

    Args:
        document: what the YAML text holds.
        version: label of the deployed version; incidents are pinned to it.

    Raises:
        PolicyInvalidError: naming each wrong field and what would be right.
    """
    if not isinstance(document, Mapping):
        raise PolicyInvalidError("the policy must be a YAML mapping that has schema_version: 1")
    try:
        # Strict JSON semantics: what a YAML file says is what a JSON document would say.
        parsed = PolicyDocument.model_validate_json(json.dumps(document))
    except ValidationError as error:
        raise PolicyInvalidError(f"the policy is invalid: {explain(error)}") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise PolicyInvalidError(
            "the policy holds a value that JSON has no form for (a date? a loop?): quote it"
        ) from error
    return parsed.to_policy(version)


def check_rules(policy: Policy, known: Mapping[str, Iterable[str]]) -> None:
    """Refuse overrides of rules or thresholds that the catalogue does not have.

    Raises:
        PolicyInvalidError: naming the field and the known names.
    """
    for rule_id, rule in policy.rules.items():
        if rule_id not in known:
            raise PolicyInvalidError(
                f"rules.{rule_id}: no such rule: use one of {', '.join(sorted(known))}"
            )
        for name, value in rule.thresholds.items():
            if name not in set(known[rule_id]):
                raise PolicyInvalidError(
                    f"rules.{rule_id}.thresholds.{name}: no such threshold: "
                    f"use one of {', '.join(sorted(known[rule_id]))}"
                )
            if name.endswith("_s") and (value < 1 or not float(value).is_integer()):
                raise PolicyInvalidError(
                    f"rules.{rule_id}.thresholds.{name}: {value} is no length of time: give whole "
                    "seconds, at least 1"
                )
            if value < 0:
                raise PolicyInvalidError(
                    f"rules.{rule_id}.thresholds.{name}: {value} would match healthy GPUs: give 0 "
                    "or more"
                )


def explain(error: ValidationError) -> str:
    """Return one line that names each wrong field, what is wrong, and the value given."""
    lines = []
    for problem in error.errors(include_url=False):
        field = ".".join(str(part) for part in problem["loc"]) or "document"
        if re.sub(r"\.\d+(?=\.|$)", "", field) in NOT_BUILT_YET:
            lines.append(f"{field}: is not built yet in this version: remove it")
            continue
        lines.append(f"{field}: {problem['msg']} (given: {_short(problem.get('input'))})")
    return "; ".join(lines)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
