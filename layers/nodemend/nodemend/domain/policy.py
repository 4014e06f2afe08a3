"""What the operator allows, as the decisions read it.

`contracts/policy.py` parses and checks the document; here it is plain values with the questions
that the decisions ask. Defaults are those of docs/POLICY.md.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from nodemend.domain.faults import FaultClass, Mode, Rung, Verdict
from nodemend.domain.nodes import NodeRef
from nodemend.domain.windows import MaintenanceWindow

_REPLACE = (Rung.REPLACE, Rung.HUMAN)
_REBOOT = (Rung.REBOOT, Rung.REPLACE, Rung.HUMAN)
_OBSERVE: tuple[Rung, ...] = ()

DEFAULT_PLANS: Mapping[FaultClass, tuple[Rung, ...]] = {
    FaultClass.XID: _REPLACE,
    FaultClass.ECC_UNCORRECTABLE: _REBOOT,
    FaultClass.ROW_REMAP_FAILED: _REPLACE,
    FaultClass.GPU_LOST: _REPLACE,
    FaultClass.MANUAL: _REPLACE,
}
"""Fault classes that are not named are observed: reported, and no node is touched. Uncorrectable
memory errors are what XID 48 tells: the vendor's action for it is a reset."""

DEFAULT_XID_PLANS: Mapping[str, tuple[Rung, ...]] = {
    "reset_gpu": _REBOOT,
    "reboot_node": _REBOOT,
    "follow_xid48": _REBOOT,
    "replace_node": _REPLACE,
}
"""Plans for an XID by its action in catalogue/xid.csv. A reset means a reboot: the driver resets
every GPU on its way up, and nothing has to run on the node for it."""

DEFAULT_CODE_PLANS: Mapping[int, tuple[Rung, ...]] = {79: _REPLACE}
"""Plans for XIDs whose action does not decide. 79, a GPU that is off the bus: the vendor's action
is a restart of the bare metal, and a reboot of an EC2 instance is none: card and host stay under
power. A new instance is the restart that is meant."""


DEFAULT_HOLD_S: Mapping[Verdict, int] = {Verdict.DEGRADED: 600}
"""Seconds by verdict; a verdict that is not named is not held."""


@dataclass(frozen=True, slots=True)
class ClusterPolicy:
    """One EKS cluster and where its metrics are."""

    name: str
    workspace: str
    region: str
    matcher: str = ""
    """PromQL matchers that select the cluster in a workspace that several share."""
    role_arn: str = ""
    """Role to assume for the cluster; empty: the function's own."""

    def with_role(self, prefix: str) -> "ClusterPolicy":
        """Return the cluster with the deployment's default role, unless it names one."""
        if self.role_arn or not prefix:
            return self
        return replace(self, role_arn=prefix + self.name)


@dataclass(frozen=True, slots=True)
class MaxUnavailable:
    """How many nodes may be unavailable at once: the smaller of count and percent."""

    count: int = 5
    percent: float = 2.0

    def of(self, desired: int) -> int:
        """Return the bound for a group of `desired` nodes.

        A percentage rounds up, and the bound is at least 1 unless count or percent is 0: in a
        small group nothing could be repaired otherwise.

        Example:
            >>> MaxUnavailable(count=5, percent=2).of(8)
            1
            >>> MaxUnavailable(count=0, percent=2).of(2000)
            0
        """
        if self.count == 0 or self.percent == 0:
            return 0
        return max(1, min(self.count, math.ceil(desired * self.percent / 100)))


@dataclass(frozen=True, slots=True)
class ReplacementRate:
    """How many replacements may start per hour and per day, in a cluster or a group."""

    per_hour: int = 4
    per_day: int = 20


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """When one fault on many nodes, or many nodes down, stops all new disruption."""

    percent: float = 20
    min_nodes: int = 3
    window_s: int = 600
    cooldown_s: int = 1800

    def bound(self, desired: int) -> int:
        """Return how many nodes with one fault open the breaker; the percentage rounds up.

        Example:
            >>> BreakerLimits().bound(8), BreakerLimits().bound(2000)
            (3, 400)
        """
        return max(self.min_nodes, math.ceil(desired * self.percent / 100))


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what nodemend itself does."""

    max_unavailable: MaxUnavailable = MaxUnavailable()
    replacements: ReplacementRate = ReplacementRate()
    breaker: BreakerLimits = BreakerLimits()


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """Bounds that bind in an Auto Scaling group besides the cluster's own."""

    max_unavailable: MaxUnavailable = MaxUnavailable()
    replacements: ReplacementRate | None = None
    """None: only the cluster's rate binds."""
    breaker: BreakerLimits | None = None
    """None: only the cluster's breaker holds its nodes."""


@dataclass(frozen=True, slots=True)
class Attempts:
    """How many repairs of one machine may be asked for within a window; then a person is called."""

    per_node: int = 3
    window_s: int = 604_800


class ApprovalPoint(StrEnum):
    """What a person is asked for before it happens."""

    CORDON = "cordon"
    REPAIR = "repair"


@dataclass(frozen=True, slots=True)
class ApprovalPolicy:
    """Which repairs need a person's yes."""

    before: ApprovalPoint = ApprovalPoint.CORDON
    rungs: tuple[Rung, ...] = (Rung.REBOOT, Rung.REPLACE)
    timeout_s: int = 3600
    """After this the answer is no."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds between two looks of a waiting step; the last entry repeats."""

    drain_poll_s: tuple[int, ...] = (20, 60, 300)
    check_poll_s: tuple[int, ...] = (20, 60, 300)
    approval_poll_s: tuple[int, ...] = (20, 60)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long a step may take in all, in seconds."""

    verify_s: int = 600
    drain_s: int = 1800
    replace_s: int = 2700
    reboot_s: int = 600


@dataclass(frozen=True, slots=True)
class GroupPolicy:
    """Overrides for the nodes whose labels match."""

    match: Mapping[str, str]
    mode: Mode | None = None
    limits: GroupLimits | None = None
    plans: Mapping[FaultClass, tuple[Rung, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RulePolicy:
    """Overrides for one detection rule."""

    is_enabled: bool = True
    thresholds: Mapping[str, float] = field(default_factory=dict)
    plan: tuple[Rung, ...] | None = None


class PolicySource(StrEnum):
    """Where a policy came from."""

    BUILT_IN = "built_in"
    """None was ever deployed: dry run."""
    DEPLOYED = "deployed"


@dataclass(frozen=True, slots=True)
class Policy:
    """The whole policy document."""

    version: str = "built-in"
    source: PolicySource = PolicySource.BUILT_IN
    mode: Mode = Mode.DRY_RUN
    clusters: tuple[ClusterPolicy, ...] = ()
    groups: tuple[GroupPolicy, ...] = ()
    limits: Limits = Limits()
    plans: Mapping[FaultClass, tuple[Rung, ...]] = field(default_factory=dict)
    waits: Waits = Waits()
    deadlines: Deadlines = Deadlines()
    hold_down_s: int = 600
    startup_grace_s: int = 1800
    repeat_window_s: int = 604_800
    attempts: Attempts = Attempts()
    approval: ApprovalPolicy | None = None
    """None: nobody is asked."""
    rules: Mapping[str, RulePolicy] = field(default_factory=dict)
    exclude: tuple[str, ...] = ()
    hold_s: Mapping[Verdict, int] = field(default_factory=lambda: DEFAULT_HOLD_S)
    """How long a fault must have lasted before a node is touched for it, by verdict."""
    maintenance_windows: tuple[MaintenanceWindow, ...] = ()
    """Where there are any, new disruption starts inside them only."""
    fatal_ignores_windows: bool = False
    """Fatal faults, and starts by hand, need no window."""

    def cluster(self, name: str) -> ClusterPolicy | None:
        """Return the cluster of that name, or None if the policy does not name it."""
        return next((cluster for cluster in self.clusters if cluster.name == name), None)

    def with_default_cluster(self, cluster: ClusterPolicy | None) -> "Policy":
        """Return the policy with the deployment's own cluster if the document names none."""
        if self.clusters or cluster is None:
            return self
        return replace(self, clusters=(cluster,))

    def with_cluster_roles(self, prefix: str) -> "Policy":
        """Return the policy with the deployment's default role for clusters that name none."""
        return replace(self, clusters=tuple(cluster.with_role(prefix) for cluster in self.clusters))

    def group_of(self, labels: Mapping[str, str]) -> GroupPolicy | None:
        """Return the first group whose labels all match."""
        for group in self.groups:
            if all(labels.get(key) == value for key, value in group.match.items()):
                return group
        return None

    @property
    def is_rehearsal(self) -> bool:
        """True if no node can be changed under this policy: every mode is dry run."""
        return all((group.mode or self.mode) is Mode.DRY_RUN for group in self.groups) and (
            self.mode is Mode.DRY_RUN
        )

    def mode_for(self, labels: Mapping[str, str]) -> Mode:
        """Return the mode that binds a node."""
        group = self.group_of(labels)
        return group.mode if group and group.mode else self.mode

    def limits_for(self, labels: Mapping[str, str]) -> GroupLimits:
        """Return the limits of the node's group (the cluster's own bind besides)."""
        group = self.group_of(labels)
        return group.limits if group and group.limits else GroupLimits(self.limits.max_unavailable)

    @property
    def longest_window_s(self) -> int:
        """The longest window of any breaker: what is older counts for none."""
        groups = [group.limits.breaker for group in self.groups if group.limits]
        return max(one.window_s for one in (self.limits.breaker, *groups) if one)

    def plan_for(
        self,
        fault_class: FaultClass,
        rule_id: str,
        labels: Mapping[str, str],
        *,
        code: int | None = None,
        action: str = "",
    ) -> tuple[Rung, ...]:
        """Return the rungs for a fault: the rule's own, else the group's, the policy's, ours.

        Args:
            fault_class: the deciding fault.
            rule_id: the rule that found it.
            labels: the node's labels.
            code: the XID, if it is one.
            action: what the XID table advises for it.
        """
        rule = self.rules.get(rule_id)
        if rule and rule.plan is not None:
            return rule.plan
        group = self.group_of(labels)
        for plans in (group.plans if group else {}, self.plans):
            if fault_class in plans:
                return plans[fault_class]
        usual = DEFAULT_PLANS.get(fault_class, _OBSERVE)
        if fault_class is not FaultClass.XID or code is None:
            return usual
        return DEFAULT_CODE_PLANS.get(code) or DEFAULT_XID_PLANS.get(action, usual)

    def excludes(self, node: NodeRef) -> bool:
        """Tell whether the operator took the node out, by name or instance id."""
        return node.name in self.exclude or node.instance_id in self.exclude


def wait_after(waits_s: tuple[int, ...], attempt: int) -> int:
    """Return the seconds to wait after the given attempt (0 is the first); the last repeats.

    Example:
        >>> [wait_after((20, 60, 300), attempt) for attempt in range(5)]
        [20, 60, 300, 300, 300]
    """
    return waits_s[min(attempt, len(waits_s) - 1)]
