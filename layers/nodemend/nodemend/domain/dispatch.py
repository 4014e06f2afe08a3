"""The dispatcher's decision: who may take a node out of service now, who waits, and who ends.

Pure: from guard, fleet snapshot and waiters to the next guard.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from nodemend.domain.breaker import (
    Breaker,
    Sighting,
    Trip,
    next_breaker,
    sightings_of_burst,
    why_trip,
)
from nodemend.domain.capacity import IN_SERVICE
from nodemend.domain.escalation import allowed_plan, first_rung
from nodemend.domain.faults import Mode, Rung, Verdict
from nodemend.domain.fleet import FleetSnapshot, FleetView
from nodemend.domain.guard import (
    BREAKER_OPEN,
    FIRST_LEASE,
    MAX_SIGHTINGS,
    MAX_SLOTS,
    Guard,
    Replacement,
    Slot,
    holds,
    recent,
    with_event,
)
from nodemend.domain.incidents import Incident, Outcome, is_stale
from nodemend.domain.nodes import Node
from nodemend.domain.policy import BreakerLimits, Policy
from nodemend.domain.rails import (
    why_excluded,
    why_hold,
    why_node_paused,
    why_stand_down,
    why_unconfirmed,
)
from nodemend.domain.reasons import Reason
from nodemend.domain.windows import why_outside

_UNRIPE = frozenset({"hold", "second_signal"})
"""What keeps a waiter because too little is known of its fault. Once that is the past, no more
will be known, and it ends."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """A waiter that got a slot."""

    incident: Incident
    node: Node
    group: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class Kept:
    """A waiter that goes on waiting, and what for."""

    incident: Incident
    reason: Reason


@dataclass(frozen=True, slots=True)
class Ended:
    """A waiter that is closed without having been admitted."""

    incident: Incident
    outcome: Outcome
    reason: Reason


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One decision over all waiters of a cluster."""

    guard: Guard
    admitted: tuple[Admitted, ...] = ()
    kept: tuple[Kept, ...] = ()
    ended: tuple[Ended, ...] = ()


def decide_dispatch(
    guard: Guard,
    snapshot: FleetSnapshot,
    waiters: Iterable[Incident],
    policy: Policy,
    now: datetime,
    *,
    knows_all: bool = True,
) -> Dispatch:
    """Give slots to those who may act now, most severe first.

    A waiter ends here if its node is gone or another one, if the operator excluded it, if its plan
    has no repair (then it is observed and never takes a slot), or if the breaker held it until what
    it says was about the past.

    Args:
        guard: the guard as it was read.
        snapshot: the fleet.
        waiters: incidents that wait.
        policy: what the operator allows.
        now: the time.
        knows_all: False if these are not all waiters of the cluster: then the breaker may open, but
            only a look at everything closes it.
    """
    held = [(slot.node_uid, slot.node_name, slot.group) for slot in guard.slots.values()]
    fleet = FleetView(snapshot, held)
    ended: list[Ended] = []
    able: list[tuple[Incident, Node]] = []
    for incident in sorted(waiters, key=_urgency):
        node = fleet.node(incident.node.uid)
        end = _why_end(incident, node, snapshot, policy, now)
        if end is not None:
            ended.append(end)
        elif node is not None:
            able.append((incident, node))
    current = _judged(recent(guard, policy, now), fleet, able, policy, now, knows_all=knows_all)
    admitted: list[Admitted] = []
    kept: list[Kept] = []
    for incident, node in able:
        group = snapshot.group_name(node)
        if _is_replay(current, incident, group, now):
            ended.append(_expired(incident))
            continue
        wait = _why_wait(current, fleet, node, incident, policy, now)
        if wait is not None:
            if wait.code in _UNRIPE and is_stale(incident, now):
                ended.append(_outlived(incident, wait))
            else:
                kept.append(Kept(incident, wait))
            continue
        if not holds(current, incident):
            # Times of slots taken together must differ: each is the name of its unit of the rate.
            taken_at = now + timedelta(microseconds=len(admitted))
            current = _take(current, incident, node, group, policy, taken_at)
            fleet.take(node, group)
        # else: the last dispatcher died between the guard and the record; the slot is ours already
        admitted.append(
            Admitted(incident, node, group, Reason("admitted", f"{incident.fault_text}"))
        )
    return Dispatch(current, tuple(admitted), tuple(kept), tuple(ended))


def _sightings_of(incident: Incident) -> list[Sighting]:
    return [
        Sighting(
            node_uid=incident.node.uid,
            fault=finding.fault,
            at=incident.first_seen.get(str(finding.fault_class), incident.opened_at),
            node_name=incident.node.name,
            rule_id=finding.evidence.rule_id,
        )
        for finding in incident.findings
        if finding.verdict.is_actionable
    ]


def _judged(
    guard: Guard,
    fleet: FleetView,
    able: Sequence[tuple[Incident, Node]],
    policy: Policy,
    now: datetime,
    *,
    knows_all: bool,
) -> Guard:
    """Return the guard with the breakers as they must be now; each change is an event."""
    seen = [
        sighting
        for incident, _ in able
        # What the breaker held until it was about the past must not hold the breaker.
        if not (incident.waiting_for == BREAKER_OPEN and is_stale(incident, now))
        for sighting in _sightings_of(incident)
    ]
    bursts = [one for burst in guard.bursts for one in sightings_of_burst(burst, fleet.uid_by_name)]
    sightings = [*seen, *guard.sightings, *bursts]
    grace = timedelta(seconds=policy.startup_grace_s)
    trip = why_trip(
        sightings,
        fleet=fleet.uids,
        not_ready=fleet.not_ready(now, grace=grace),
        desired=fleet.desired(None),
        limits=policy.limits.breaker,
    )
    guard = _switched(guard, "", trip, policy.limits.breaker, now, may_close=knows_all)
    own_limits = _limits_of_groups(fleet, policy)
    for group in sorted(own_limits.keys() | guard.group_breakers.keys()):
        limits = own_limits.get(group)
        members = fleet.members(group)
        # Under an open breaker of the cluster one more has nothing to hold and nothing to tell.
        is_judged = guard.breaker is None or group in guard.group_breakers
        trip = None
        if limits and is_judged:
            trip = why_trip(
                [one for one in sightings if one.node_uid in members],
                fleet=members,
                not_ready=fleet.not_ready(now, grace=grace, group=group),
                desired=fleet.desired(group),
                limits=limits,
                group=group,
            )
        # A group whose limits were taken out of the policy has no cause any more, and cools down.
        limits = limits or policy.limits.breaker
        guard = _switched(guard, group, trip, limits, now, may_close=knows_all)
    return guard


def _limits_of_groups(fleet: FleetView, policy: Policy) -> dict[str, BreakerLimits]:
    """Return the breaker's limits of each Auto Scaling group that has its own, by its nodes."""
    found: dict[str, BreakerLimits] = {}
    if any(group.limits and group.limits.breaker for group in policy.groups):
        for node in sorted(fleet.snapshot.nodes, key=lambda one: one.ref.name):
            name, limits = fleet.snapshot.group_name(node), policy.limits_for(node.labels).breaker
            if name and limits:
                found.setdefault(name, limits)
    return found


def _switched(
    guard: Guard,
    group: str,
    trip: Trip | None,
    limits: BreakerLimits,
    now: datetime,
    *,
    may_close: bool,
) -> Guard:
    """Return the guard with one breaker as it must be now; an empty group means the cluster's."""
    before = guard.group_breakers.get(group) if group else guard.breaker
    after = next_breaker(before, trip, limits=limits, now=now, may_close=may_close)
    if after == before:
        return guard
    if group:
        others = {name: one for name, one in guard.group_breakers.items() if name != group}
        changed = replace(guard, group_breakers=others | ({group: after} if after else {}))
    else:
        changed = replace(guard, breaker=after)
    if before is None and after is not None:
        data = _trip_data(after.trip, after, group)
        return with_event(changed, "breaker_opened", after.trip.reason, now, data)
    if after is None and before is not None:
        reason = Reason(
            "cooled_down",
            f"the cause of {before.opened_at:%Y-%m-%d %H:%M} UTC ({before.trip.reason.code}) has "
            f"been gone for {limits.cooldown_s} s",
        )
        data = _trip_data(before.trip, None, group)
        return with_event(changed, "breaker_closed", reason, now, data)
    return changed


def _trip_data(trip: Trip, breaker: Breaker | None, group: str) -> dict[str, Any]:
    return {
        "group": group,
        "fault": trip.fault,
        "rule_id": trip.rule_id,
        "count": trip.count,
        "bound": trip.bound,
        "desired": trip.desired,
        "nodes": list(trip.nodes),
        "holds_until": breaker.holds_until.isoformat() if breaker else None,
    }


def _is_replay(guard: Guard, incident: Incident, group: str, now: datetime) -> bool:
    """What the breaker held back is not acted on later: the next scan decides from live data."""
    is_held = guard.breaker_over(group) is not None or incident.waiting_for == BREAKER_OPEN
    return is_held and is_stale(incident, now)


def _expired(incident: Incident) -> Ended:
    reason = Reason(
        "expired",
        f"the breaker held it until its evidence was about the past: {incident.fault_text}; the "
        "next scan decides from live data",
    )
    return Ended(incident, Outcome.SKIPPED, reason)


def _outlived(incident: Incident, wait: Reason) -> Ended:
    reason = Reason("expired", f"AMP reports it no longer, and {wait.text}")
    return Ended(incident, Outcome.SKIPPED, reason)


def _urgency(incident: Incident) -> tuple[int, datetime, str]:
    severity = incident.primary.verdict.severity if incident.primary else Verdict.FATAL.severity
    return severity, incident.opened_at, incident.id


def plan_of(incident: Incident, policy: Policy) -> tuple[Rung, ...]:
    """Return the rungs that the policy has for the incident's deciding fault."""
    rule_id = incident.primary.evidence.rule_id if incident.primary else ""
    primary = incident.primary
    return policy.plan_for(
        incident.fault_class,
        rule_id,
        incident.node_labels,
        code=primary.code if primary else None,
        action=primary.action if primary else "",
    )


def _why_not_in_service(snapshot: FleetSnapshot, node: Node) -> Reason | None:
    """Return why the node's group has given it up already, before it takes a slot and a rate."""
    group = snapshot.groups.get(snapshot.group_name(node))
    state = group.instances.get(node.ref.instance_id, IN_SERVICE) if group else IN_SERVICE
    if group is None or state == IN_SERVICE:
        return None
    return Reason("other_remediator", f"{node.ref.instance_id} is {state} in {group.name}")


def _why_end(
    incident: Incident, node: Node | None, snapshot: FleetSnapshot, policy: Policy, now: datetime
) -> Ended | None:
    if node is None:
        reason = Reason(
            "already_gone", f"no GPU node {incident.node.name} with uid {incident.node.uid} is left"
        )
        return Ended(incident, Outcome.SUPERSEDED, reason)
    if not node.ref.is_same_machine(incident.node):
        reason = Reason("node_replaced", f"{node.ref.name} is instance {node.ref.instance_id} now")
        return Ended(incident, Outcome.SUPERSEDED, reason)
    off = why_stand_down(node) or _why_excluded(node, policy)
    if off is not None:
        return Ended(incident, Outcome.SKIPPED, off)
    primary = incident.primary
    if primary and not primary.verdict.is_actionable:
        reason = Reason(
            f"{primary.verdict}_only", f"{primary.summary}: no node is touched for that"
        )
        return Ended(incident, Outcome.OBSERVED, reason)
    leaving = _why_not_in_service(snapshot, node)
    if leaving is not None:
        return Ended(incident, Outcome.SKIPPED, leaving)
    plan = plan_of(incident, policy)
    if not any(rung is not Rung.HUMAN for rung in plan):
        reason = Reason(
            "no_terminal_action",
            f"the policy has no repair for {incident.fault_class}, so nothing is cordoned",
        )
        return Ended(incident, Outcome.OBSERVED, reason)
    plan, churn = allowed_plan(plan, incident, now)
    first, spent = first_rung(plan, incident, policy, now)
    spent = spent or churn
    if spent is not None and not any(rung is not Rung.HUMAN for rung in plan[first:]):
        # Nothing is cordoned: this machine has had its repairs, and a person decides now.
        is_dry_run = policy.mode_for(node.labels) is Mode.DRY_RUN
        return Ended(incident, Outcome.SKIPPED if is_dry_run else Outcome.NEEDS_HUMAN, spent)
    young = _why_too_young(incident, node, policy, now)
    return Ended(incident, Outcome.SKIPPED, young) if young else None


def _why_excluded(node: Node, policy: Policy) -> Reason | None:
    if policy.excludes(node.ref):
        return Reason("excluded", f"the policy excludes {node.ref.name}")
    return why_excluded(node)


def _why_too_young(incident: Incident, node: Node, policy: Policy, now: datetime) -> Reason | None:
    if incident.primary is None or node.created_at is None:
        return None
    age = now - node.created_at
    if age >= timedelta(seconds=policy.startup_grace_s):
        return None
    return Reason(
        "warm_up",
        f"{node.ref.name} is {int(age.total_seconds())} s old; nodes are left alone for "
        f"{policy.startup_grace_s} s",
    )


def _why_wait(
    guard: Guard,
    fleet: FleetView,
    node: Node,
    incident: Incident,
    policy: Policy,
    now: datetime,
) -> Reason | None:
    if guard.pause is not None:
        return guard.pause.reason()
    breaker = guard.breaker_over(fleet.snapshot.group_name(node))
    held = why_node_paused(node) or (breaker.reason() if breaker else None)
    if held is not None:
        return held
    if holds(guard, incident):
        return None
    early = (
        _why_outside_windows(incident, policy, now)
        or why_hold(incident, policy, now)
        or why_unconfirmed(incident, node, offered=fleet.offered(node))
    )
    return early or _why_no_room(guard, fleet, node, incident, policy, now)


def _why_outside_windows(incident: Incident, policy: Policy, now: datetime) -> Reason | None:
    is_fatal = incident.primary is None or incident.primary.verdict is Verdict.FATAL
    if is_fatal and policy.fatal_ignores_windows:
        return None
    why = why_outside(policy.maintenance_windows, now)
    return Reason("maintenance_window", why) if why else None


def _why_no_room(
    guard: Guard,
    fleet: FleetView,
    node: Node,
    incident: Incident,
    policy: Policy,
    now: datetime,
) -> Reason | None:
    if node.ref.uid in guard.slots:
        holder = guard.slots[node.ref.uid].incident_id
        return Reason("node_busy", f"incident {holder} holds {node.ref.name}")
    if len(guard.slots) >= MAX_SLOTS:
        return Reason("capacity_guard", f"all {MAX_SLOTS} slots of the cluster are taken")
    budget = _why_over_budget(fleet, node, policy)
    if budget is not None:
        return budget
    if policy.mode_for(node.labels) is Mode.ENFORCE and Rung.REPLACE in plan_of(incident, policy):
        return _why_over_rate(guard, fleet.snapshot.group_name(node), node, policy, now)
    return None


def _why_over_budget(fleet: FleetView, node: Node, policy: Policy) -> Reason | None:
    own_group = fleet.snapshot.group_name(node)
    scopes: list[tuple[str, str | None, int]] = [
        ("cluster", None, policy.limits.max_unavailable.of(fleet.desired(None)))
    ]
    if own_group:
        limits = policy.limits_for(node.labels)
        bound = limits.max_unavailable.of(fleet.desired(own_group))
        scopes.append((f"group {own_group}", own_group, bound))
    for name, group, bound in scopes:
        out = fleet.count_out(group, besides=node)
        if out + 1 > bound:
            names = fleet.names_out(group, besides=node)
            listed = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
            return Reason(
                "capacity_guard",
                f"{out} of at most {bound} nodes of the {name} are unavailable"
                + (f" ({listed})" if names else ""),
            )
    return None


def _why_over_rate(
    guard: Guard, group: str, node: Node, policy: Policy, now: datetime
) -> Reason | None:
    own = policy.limits_for(node.labels).replacements if group else None
    scopes = [("", policy.limits.replacements, guard.replacements)]
    if own is not None:
        in_group = tuple(one for one in guard.replacements if one.group == group)
        scopes.append((f" of group {group}", own, in_group))
    for place, rate, started in scopes:
        last_hour = sum(1 for one in started if now - one.at < timedelta(hours=1))
        for count, bound, span in (
            (last_hour, rate.per_hour, "hour"),
            (len(started), rate.per_day, "day"),
        ):
            if count >= bound:
                return Reason(
                    "rate_limit",
                    f"{count} of at most {bound} replacements{place} this {span} are used up",
                )
    return None


def _take(
    guard: Guard, incident: Incident, node: Node, group: str, policy: Policy, now: datetime
) -> Guard:
    slot = Slot(
        incident_id=incident.id,
        node_uid=node.ref.uid,
        node_name=node.ref.name,
        group=group,
        taken_at=now,
        expires_at=now + FIRST_LEASE,
    )
    # Marked with the time at which the slot was taken: `release` finds it by that.
    counts = policy.mode_for(node.labels) is Mode.ENFORCE and Rung.REPLACE in plan_of(
        incident, policy
    )
    return replace(
        guard,
        slots={**guard.slots, node.ref.uid: slot},
        replacements=(*guard.replacements, Replacement(now, group))
        if counts
        else guard.replacements,
        sightings=(*guard.sightings, *_sightings_of(incident))[-MAX_SIGHTINGS:],
    )
