"""`nodemend policy check`: the policy in words, and what would happen to a given node and fault.

It asks the functions that the dispatcher asks, on a made-up fleet, so that what it says cannot
differ from what nodemend does.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from nodemend.domain.approval import foreseen
from nodemend.domain.capacity import AutoScalingGroup
from nodemend.domain.dispatch import Dispatch, decide_dispatch, plan_of
from nodemend.domain.errors import InvalidInputError
from nodemend.domain.faults import FaultClass, FaultKind, Mode, Rung, Verdict
from nodemend.domain.findings import Evidence, Finding
from nodemend.domain.fleet import FleetSnapshot
from nodemend.domain.generations import MODEL_LABELS
from nodemend.domain.guard import Guard
from nodemend.domain.incidents import Incident, IncidentState, Origin
from nodemend.domain.nodes import Node, NodeRef
from nodemend.domain.policy import (
    DEFAULT_CODE_PLANS,
    DEFAULT_PLANS,
    DEFAULT_XID_PLANS,
    ApprovalPoint,
    BreakerLimits,
    GroupPolicy,
    MaxUnavailable,
    Policy,
    ReplacementRate,
)
from nodemend.domain.rules import Catalogue, Rule, XidEntry
from nodemend.domain.windows import MaintenanceWindow
from ops.policy_file import catalogue
from ops.stack import CommandError

_MODES = {
    Mode.DRY_RUN: "plans and reports, and changes nothing",
    Mode.CORDON_ONLY: "cordons, then calls a person",
    Mode.ENFORCE: "cordons, drains and repairs",
}
FLEETS = (8, 100, 2000)
"""Sizes for which the bounds are told in numbers."""


@dataclass(frozen=True, slots=True)
class Question:
    """A node and a fault to ask the policy about."""

    node: str
    labels: Mapping[str, str] = field(default_factory=dict)
    fault: FaultClass = FaultClass.XID
    code: int | None = None
    model: str = ""
    """GPU model as `modelName` prints it: some XIDs mean something on some generations only."""
    rule_id: str = ""
    fleet: int = 100
    """How many nodes the made-up cluster has."""


# --- the policy in words ------------------------------------------------------------------------


def explain(policy: Policy) -> Iterator[str]:
    """Yield the policy, line by line."""
    yield f"mode: {policy.mode}: nodemend {_MODES[policy.mode]}"
    if not policy.clusters:
        yield "clusters: none named; the one of the stack's parameters is meant"
    for cluster in policy.clusters:
        matcher = f", series with {cluster.matcher}" if cluster.matcher else ""
        yield f"cluster {cluster.name}: {cluster.workspace} in {cluster.region}{matcher}"
    yield from _limits(policy)
    for group in policy.groups:
        yield from _group(group)
    yield from _plans(policy)
    for verdict, seconds in policy.hold_s.items():
        if seconds:
            yield f"hold: a {verdict} fault must last {seconds} s before a node is touched for it"
    yield from _windows(policy)
    yield from _approval(policy)
    yield from _rules(policy)
    if policy.exclude:
        yield f"never touched: {', '.join(policy.exclude)}"


def _rules(policy: Policy) -> Iterator[str]:
    for rule_id, rule in policy.rules.items():
        if not rule.is_enabled:
            yield f"rule {rule_id}: off"
        for name, value in rule.thresholds.items():
            yield f"rule {rule_id}: {name} is {value:g}"
        if rule.plan is not None:
            yield f"rule {rule_id}: {_plan(rule.plan)}"


def _limits(policy: Policy) -> Iterator[str]:
    limits = policy.limits
    yield f"unavailable at once: {_bound(limits.max_unavailable)}"
    yield f"replacements: {_rate(limits.replacements)}"
    yield f"breaker: {_breaker(limits.breaker)}"


def _rate(rate: ReplacementRate) -> str:
    return f"at most {rate.per_hour} an hour and {rate.per_day} a day"


def _breaker(breaker: BreakerLimits) -> str:
    opens = ", ".join(f"{breaker.bound(size)} of {size}" for size in FLEETS)
    return (
        f"opens when one fault hits {opens} nodes within {breaker.window_s} s, or every "
        f"node, or when more than that many are down; closes {breaker.cooldown_s} s after the cause"
    )


def _bound(limit: MaxUnavailable) -> str:
    bounds = ", ".join(f"{limit.of(size)} of {size}" for size in FLEETS)
    return f"at most {limit.count} nodes and {limit.percent:g} %: {bounds}"


def _group(group: GroupPolicy) -> Iterator[str]:
    labels = ", ".join(f"{key}={value}" for key, value in sorted(group.match.items()))
    name = f"nodes with {labels}"
    if group.mode is not None:
        yield f"{name}: mode {group.mode}: nodemend {_MODES[group.mode]}"
    if group.limits is not None:
        yield f"{name}: unavailable at once per group: {_bound(group.limits.max_unavailable)}"
        if group.limits.replacements is not None:
            yield f"{name}: replacements per group: {_rate(group.limits.replacements)}"
        if group.limits.breaker is not None:
            yield f"{name}: breaker per group: {_breaker(group.limits.breaker)}"
    for fault_class, plan in group.plans.items():
        yield f"{name}: {fault_class}: {_plan(plan)}"


def _plans(policy: Policy) -> Iterator[str]:
    for fault_class in FaultClass:
        if fault_class in policy.plans:
            yield f"{fault_class}: {_plan(policy.plans[fault_class])}"
        elif fault_class is FaultClass.XID:
            for code, plan in DEFAULT_CODE_PLANS.items():
                yield f"xid {code}: {_plan(plan)} (built in)"
            for action, plan in DEFAULT_XID_PLANS.items():
                yield f"fatal xid with the action {action}: {_plan(plan)} (built in)"
        elif fault_class in DEFAULT_PLANS:
            yield f"{fault_class}: {_plan(DEFAULT_PLANS[fault_class])} (built in)"
    yield "every other fault class: observe"


def _plan(plan: tuple[Rung, ...]) -> str:
    return ", then ".join(plan) if any(rung is not Rung.HUMAN for rung in plan) else "observe"


def _windows(policy: Policy) -> Iterator[str]:
    for window in policy.maintenance_windows:
        yield f"new disruption only {_window(window)}"
    if policy.maintenance_windows and policy.fatal_ignores_windows:
        yield "fatal faults and starts by hand need no window"


def _approval(policy: Policy) -> Iterator[str]:
    approval = policy.approval
    if approval is None:
        yield "approval: nobody is asked"
        return
    rungs = " and ".join(approval.rungs)
    where = "before the cordon" if approval.before is ApprovalPoint.CORDON else "on a drained node"
    yield (
        f"approval: {rungs} need a person's yes, asked {where}; no answer within "
        f"{approval.timeout_s} s is a no"
    )


def _window(window: MaintenanceWindow) -> str:
    return (
        f"on {', '.join(window.days)} from {window.start:%H:%M} {window.timezone} for "
        f"{window.duration_s} s"
    )


# --- what would happen --------------------------------------------------------------------------


def foretell(policy: Policy, question: Question, now: datetime) -> Iterator[str]:
    """Yield what would happen to the node if this one fault were found on it now.

    Raises:
        CommandError: if the rule or the XID is not known.
    """
    finding = _finding(question, catalogue(), now)
    incident = _incident(question, finding, now)
    yield f"{question.node}: {_what(question, finding)}"
    yield from _why(question, catalogue())
    group = policy.group_of(question.labels)
    if group is not None:
        yield f"group: {', '.join(f'{k}={v}' for k, v in sorted(group.match.items()))} binds"
    mode = policy.mode_for(question.labels)
    yield f"mode: {mode}: nodemend {_MODES[mode]}"
    yield f"plan: {_plan(plan_of(incident, policy))}"
    yield from _decision(policy, question, incident, now)


def _what(question: Question, finding: Finding | None) -> str:
    if finding is None:
        return "a remediation that a person starts by hand"
    rule = f" by rule {finding.evidence.rule_id}" if finding.evidence.rule_id else ""
    return f"{finding.fault} found{rule}, verdict {finding.verdict}"


def _why(question: Question, data: Catalogue) -> Iterator[str]:
    """Yield what the XID table says of the code, where it says why."""
    entry = _entry(question, data)
    if entry is None:
        return
    if entry.reason:
        yield f"xid table: {entry.reason}"
    variants = data.xids[entry.code].variants
    if variants and not question.model:
        generations = ", ".join(one for row in variants for one in row.generations)
        yield f"give --model: XID {entry.code} is a code of {generations} GPUs"


def _entry(question: Question, data: Catalogue) -> XidEntry | None:
    entry = data.xids.get(question.code) if question.code is not None else None
    if question.fault is not FaultClass.XID or entry is None:
        return None
    return entry.on_gpu({MODEL_LABELS[0]: question.model})


def _decision(
    policy: Policy, question: Question, incident: Incident, now: datetime
) -> Iterator[str]:
    decided = _decide(policy, question, incident, now)
    if decided.kept:
        reason = decided.kept[0].reason
        yield f"decision: it waits: {reason}"
        if reason.code == "hold":
            longest_s = max(policy.hold_s.values(), default=0)
            since = now - timedelta(seconds=longest_s)
            lasted = replace(incident, opened_at=since, last_seen=now)
            for line in _decision(policy, question, lasted, now):
                yield f"when it has lasted: {line}"
    for ended in decided.ended:
        yield f"decision: {ended.outcome}, nothing is touched: {ended.reason}"
    for admitted in decided.admitted:
        yield (
            "decision: it is admitted if the limits have room "
            f"(asked with {question.fleet} nodes and nothing else going on)"
        )
        yield from _asked(policy, question, admitted.incident)


def _asked(policy: Policy, question: Question, incident: Incident) -> Iterator[str]:
    pinned = replace(
        incident,
        mode=policy.mode_for(question.labels),
        plan=plan_of(incident, policy),
        approval_policy=policy.approval,
    )
    before = foreseen(pinned)
    if not before or policy.approval is None:
        return
    if pinned.dry_run:
        yield f"approval: a dry run asks nobody; else a yes would be asked for before the {before}"
        return
    what = "the cordon" if before == ApprovalPoint.CORDON else "the repair of the drained node"
    yield f"approval: a yes is asked for before {what}, for {policy.approval.timeout_s} s"


def _decide(policy: Policy, question: Question, incident: Incident, now: datetime) -> Dispatch:
    node = Node(
        ref=incident.node,
        labels=question.labels,
        created_at=now - timedelta(days=30),
        gpu_capacity=8,
        # A lost GPU is one that the device plugin misses, too.
        gpu_allocatable=7 if incident.fault_class is FaultClass.GPU_LOST else 8,
    )
    others = tuple(
        replace(node, ref=NodeRef(node.ref.cluster, f"other-{n}", f"uid-{n}", f"i-{n:017x}"))
        for n in range(1, question.fleet)
    )
    nodes = (node, *others)
    snapshot = FleetSnapshot(
        at=now,
        nodes=nodes,
        groups={"group": AutoScalingGroup("group", len(nodes), 0, len(nodes))},
        group_by_instance={one.ref.instance_id: "group" for one in nodes},
    )
    return decide_dispatch(Guard(node.ref.cluster), snapshot, [incident], policy, now)


def _incident(question: Question, finding: Finding | None, now: datetime) -> Incident:
    instance_id = question.node if question.node.startswith("i-") else "i-0000000000000000f"
    return Incident(
        id="policy-check",
        cluster="policy-check",
        node=NodeRef("policy-check", question.node, "uid-0", instance_id),
        origin=Origin.HAND if finding is None else Origin.SCAN,
        opened_at=now,
        state=IncidentState.WAITING,
        state_since=now,
        findings=() if finding is None else (finding,),
        node_labels=question.labels,
    )


def _finding(question: Question, data: Catalogue, now: datetime) -> Finding | None:
    if question.fault is FaultClass.MANUAL:
        return None
    rule = _rule(question, data)
    verdict = rule.verdict if rule else Verdict.FATAL
    action = ""
    if question.fault is FaultClass.XID:
        if question.code is None:
            raise CommandError("--code: an XID fault needs its code, e.g. --fault xid --code 79")
        entry = _entry(question, data)
        verdict = entry.verdict if entry else Verdict.SUSPECT
        action = entry.action if entry else ""
    return Finding(
        cluster="policy-check",
        node_names=(question.node,),
        fault_class=question.fault,
        verdict=verdict,
        kind=rule.kind if rule else FaultKind.EVENT,
        evidence=Evidence(rule.id if rule else "", "", 1, now),
        code=question.code if question.fault is FaultClass.XID else None,
        action=action,
        summary=f"{question.fault} {question.code if question.code is not None else ''}".strip(),
    )


def _rule(question: Question, data: Catalogue) -> Rule | None:
    """Return the rule that was named, else the first that finds such a fault."""
    if question.rule_id:
        try:
            rule = data.rule(question.rule_id)
        except InvalidInputError as error:
            raise CommandError(f"--rule: {error}") from error
        if rule.fault_class is not question.fault:
            raise CommandError(
                f"--rule: {rule.id} finds {rule.fault_class}: give --fault {rule.fault_class}"
            )
        return rule
    return next((one for one in data.rules if one.fault_class is question.fault), None)
