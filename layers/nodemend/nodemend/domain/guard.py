"""The fleet guard: who may take a node out of service now, and who waits.

One guard item per cluster holds what is in flight and what was started lately. The functions here
compute the next guard from guard, fleet snapshot and waiters; the store writes it with one
conditional put on its version (ADR 0001). So two dispatchers can never both give the last slot.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from nodemend.domain.capacity import IN_SERVICE, AutoScalingGroup
from nodemend.domain.errors import LeaseLostError
from nodemend.domain.faults import Mode, Rung, Verdict
from nodemend.domain.incidents import Incident, Outcome
from nodemend.domain.nodes import Node
from nodemend.domain.policy import Policy
from nodemend.domain.rails import why_stand_down
from nodemend.domain.reasons import Reason

MAX_SLOTS = 50
"""Slots per cluster, so that the guard item stays below 10 KB and its write costs little."""

LEASE_MARGIN = timedelta(seconds=60)
"""Added to every lease on top of the wait and the longest function that it covers."""

LONGEST_FUNCTION = timedelta(seconds=60)
"""The longest time-out of a function that changes something (template.yaml)."""

FIRST_LEASE = timedelta(minutes=10)
"""Covers the start of the execution and the first steps up to the first renewal."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Leave to take one node out of service: slot and lease in one."""

    incident_id: str
    node_uid: str
    node_name: str
    group: str
    taken_at: datetime
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class Guard:
    """The guard item of one cluster."""

    cluster: str
    version: int = 0
    slots: Mapping[str, Slot] = field(default_factory=dict)
    """By node UID."""
    replacements: tuple[datetime, ...] = ()
    """When replacements were admitted, for the last 24 hours."""


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """The cluster's GPU nodes and their groups at one moment."""

    at: datetime
    nodes: tuple[Node, ...]
    groups: Mapping[str, AutoScalingGroup] = field(default_factory=dict)
    group_by_instance: Mapping[str, str] = field(default_factory=dict)

    def node(self, uid: str) -> Node | None:
        """Return a node by UID."""
        return next((node for node in self.nodes if node.ref.uid == uid), None)

    def group_name(self, node: Node) -> str:
        """Return the Auto Scaling group that has the node, or an empty string."""
        return self.group_by_instance.get(node.ref.instance_id, "")

    def desired(self, group: str | None = None) -> int:
        """Return how many nodes there should be, in the cluster or in one group.

        Desired capacity, not registered nodes: deleted nodes must not shrink the denominator.
        Nodes outside any group count one each.
        """
        if group:
            return self.groups[group].desired if group in self.groups else 0
        loose = sum(1 for node in self.nodes if not self.group_name(node))
        relevant = self.groups_with_gpus()
        return loose + sum(self.groups[name].desired for name in relevant if name in self.groups)

    def missing(self, group: str) -> int:
        """Return how many nodes of a group are not registered: launching, or impossible to get."""
        registered = sum(1 for node in self.nodes if self.group_name(node) == group)
        return max(0, self.desired(group) - registered)

    def groups_with_gpus(self) -> frozenset[str]:
        """Return the groups that have GPU nodes here; the cluster's other groups do not count."""
        return frozenset(self.group_name(node) for node in self.nodes) - {""}

    @staticmethod
    def expected_uuids(node: Node, by_instance_type: Mapping[str, int]) -> int:
        """Return how many physical GPUs the node's exporter should report, at least one."""
        return by_instance_type.get(node.instance_type, 0) or max(1, node.gpu_capacity)

    def expected_gpus(self, node: Node, by_instance_type: Mapping[str, int]) -> int:
        """Return how many GPUs the node should offer to pods.

        As many as any node of its type does, which respects MIG and time slicing (0 is possible
        then); where it is the only one, its own capacity or the table's number.
        """
        of_type = [other for other in self.nodes if other.instance_type == node.instance_type]
        offered = max((other.gpu_capacity for other in of_type), default=node.gpu_capacity)
        if any(other.ref.uid != node.ref.uid for other in of_type):
            return offered
        return offered or by_instance_type.get(node.instance_type, 0)


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
) -> Dispatch:
    """Give slots to those who may act now, most severe first.

    A waiter ends here if its node is gone or another one, if the operator excluded it, or if its
    plan has no repair: then it is observed and never takes a slot.
    """
    current = replace(
        guard, replacements=tuple(at for at in guard.replacements if now - at < timedelta(days=1))
    )
    admitted: list[Admitted] = []
    kept: list[Kept] = []
    ended: list[Ended] = []
    # Times of slots admitted together must differ: each is the name of its unit of the rate.
    for number, incident in enumerate(sorted(waiters, key=_urgency)):
        taken_at = now + timedelta(microseconds=number)
        node = snapshot.node(incident.node.uid)
        end = _why_end(incident, node, snapshot, policy, now)
        if end is not None:
            ended.append(end)
            continue
        if node is None:  # pragma: no cover - _why_end has ended it
            continue
        group = snapshot.group_name(node)
        held = current.slots.get(node.ref.uid)
        if held is None or held.incident_id != incident.id:
            wait = _why_wait(current, snapshot, node, incident, policy, now)
            if wait is not None:
                kept.append(Kept(incident, wait))
                continue
            current = _take(current, incident, node, group, policy, taken_at)
        # else: the last dispatcher died between the guard and the record; the slot is ours already
        admitted.append(
            Admitted(incident, node, group, Reason("admitted", f"{incident.fault_text}"))
        )
    return Dispatch(current, tuple(admitted), tuple(kept), tuple(ended))


def _urgency(incident: Incident) -> tuple[int, datetime, str]:
    severity = incident.primary.verdict.severity if incident.primary else Verdict.FATAL.severity
    return severity, incident.opened_at, incident.id


def plan_of(incident: Incident, policy: Policy) -> tuple[Rung, ...]:
    """Return the rungs that the policy has for the incident's deciding fault."""
    rule_id = incident.primary.evidence.rule_id if incident.primary else ""
    return policy.plan_for(incident.fault_class, rule_id, incident.node_labels)


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
    other = why_stand_down(node)
    if other is not None:
        return Ended(incident, Outcome.SKIPPED, other)
    if policy.excludes(node.ref):
        reason = Reason("excluded", f"the policy excludes {node.ref.name}")
        return Ended(incident, Outcome.SKIPPED, reason)
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
    young = _why_too_young(incident, node, policy, now)
    return Ended(incident, Outcome.SKIPPED, young) if young else None


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
    snapshot: FleetSnapshot,
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
    budget = _why_over_budget(guard, snapshot, node, policy)
    if budget is not None:
        return budget
    if policy.mode_for(node.labels) is Mode.ENFORCE and Rung.REPLACE in plan_of(incident, policy):
        return _why_over_rate(guard, policy, now)
    return None


def unavailable(
    guard: Guard, snapshot: FleetSnapshot, group: str | None, *, besides: str
) -> tuple[str, ...]:
    """Return who is out of service: cordoned by anyone, not ready, in flight, or missing.

    A node that should be there and is not counts too: without it a group that cannot launch would
    be taken apart node by node. A candidate is never counted against itself (`besides`: its UID).
    """
    names = {
        node.ref.uid: node.ref.name
        for node in snapshot.nodes
        if (node.is_unschedulable or not node.is_ready or node.is_deleting)
        and (group is None or snapshot.group_name(node) == group)
    }
    names.update(
        (slot.node_uid, slot.node_name)
        for slot in guard.slots.values()
        if group is None or slot.group == group
    )
    names.pop(besides, None)
    return (*sorted(names.values()), *_missing(guard, snapshot, group))


def _missing(guard: Guard, snapshot: FleetSnapshot, group: str | None) -> list[str]:
    registered = {node.ref.uid for node in snapshot.nodes}
    gone = [slot.group for slot in guard.slots.values() if slot.node_uid not in registered]
    found = []
    for name in sorted(snapshot.groups_with_gpus() if group is None else {group}):
        # The slot of a node that has gone stands for its own gap already.
        gaps = max(0, snapshot.missing(name) - gone.count(name))
        found += [f"(missing in {name})"] * gaps
    return found


def _why_over_budget(
    guard: Guard, snapshot: FleetSnapshot, node: Node, policy: Policy
) -> Reason | None:
    own_group = snapshot.group_name(node)
    scopes: list[tuple[str, str | None, int]] = [
        ("cluster", None, policy.limits.max_unavailable.of(snapshot.desired()))
    ]
    if own_group:
        limits = policy.limits_for(node.labels)
        scopes.append(
            (
                f"group {own_group}",
                own_group,
                limits.max_unavailable.of(snapshot.desired(own_group)),
            )
        )
    for name, group, bound in scopes:
        out = unavailable(guard, snapshot, group, besides=node.ref.uid)
        if len(out) + 1 > bound:
            listed = ", ".join(out[:5]) + (", …" if len(out) > 5 else "")
            return Reason(
                "capacity_guard",
                f"{len(out)} of at most {bound} nodes of the {name} are unavailable"
                + (f" ({listed})" if out else ""),
            )
    return None


def _why_over_rate(guard: Guard, policy: Policy, now: datetime) -> Reason | None:
    rate = policy.limits.replacements
    last_hour = sum(1 for at in guard.replacements if now - at < timedelta(hours=1))
    for count, bound, span in (
        (last_hour, rate.per_hour, "hour"),
        (len(guard.replacements), rate.per_day, "day"),
    ):
        if count >= bound:
            return Reason(
                "rate_limit", f"{count} of at most {bound} replacements this {span} are used up"
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
        replacements=(*guard.replacements, now) if counts else guard.replacements,
    )


def renew(guard: Guard, incident: Incident, *, until: datetime) -> Guard:
    """Return the guard with the incident's lease extended.

    Raises:
        LeaseLostError: if the incident holds no slot (released, or taken over).
    """
    slot = guard.slots.get(incident.node.uid)
    if slot is None or slot.incident_id != incident.id:
        raise LeaseLostError(f"incident {incident.id} holds no slot for {incident.node.name}")
    extended = replace(slot, expires_at=max(slot.expires_at, until))
    return replace(guard, slots={**guard.slots, incident.node.uid: extended})


def release(guard: Guard, incident_id: str, *, refunds: bool = False) -> Guard:
    """Return the guard without the incident's slot; the same guard if it holds none.

    Args:
        guard: The guard.
        incident_id: Whose slot.
        refunds: Give its unit of the replacement rate back: nothing was replaced for it.
    """
    mine = [slot for slot in guard.slots.values() if slot.incident_id == incident_id]
    if not mine:
        return guard
    returned = {slot.taken_at for slot in mine} if refunds else set()
    return replace(
        guard,
        slots={uid: slot for uid, slot in guard.slots.items() if slot not in mine},
        replacements=tuple(at for at in guard.replacements if at not in returned),
    )


def is_lease_valid(guard: Guard, incident: Incident, *, now: datetime, remaining_s: float) -> bool:
    """Tell whether a change may be made: the lease outlives the rest of this invocation."""
    slot = guard.slots.get(incident.node.uid)
    if slot is None or slot.incident_id != incident.id:
        return False
    return slot.expires_at > now + timedelta(seconds=remaining_s)


def expired_slots(guard: Guard, now: datetime) -> Sequence[Slot]:
    """Return slots that may be taken over if their execution is not running any more."""
    limit = LONGEST_FUNCTION + LEASE_MARGIN
    return [slot for slot in guard.slots.values() if now > slot.expires_at + limit]
