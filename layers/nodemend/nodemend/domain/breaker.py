"""The breaker: one fault on a large share of the fleet is a bad signal, not many sick nodes.

Pure: it judges what the dispatcher saw, and says whether new disruption is allowed. What it
decides stands in the guard item and changes with it. Running remediations and releases do not ask.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from nodemend.domain.findings import Finding
from nodemend.domain.policy import BreakerLimits
from nodemend.domain.reasons import Reason

MAX_NAMED = 50
"""Nodes that are named in the breaker's state, so that the guard item stays small."""

MAX_BURSTS = 20
"""Bursts that the guard remembers for the breaker's window."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """One fault on one node."""

    node_uid: str
    fault: str
    """Fault class, and the XID code where there is one: `xid/79`."""
    at: datetime
    """When nodemend saw it first."""
    node_name: str = ""
    rule_id: str = ""


@dataclass(frozen=True, slots=True)
class Burst:
    """One fault that one look at the metrics found on several nodes at once.

    Incidents are opened one after the other, and the first wakes the dispatcher: without this it
    would judge a storm by the first node of it.
    """

    fault: str
    """As `Sighting.fault`."""
    at: datetime
    rule_id: str
    node_names: tuple[str, ...]
    """At most `MAX_NAMED`, as the metrics name them."""
    more: int = 0
    """How many further nodes had it."""


@dataclass(frozen=True, slots=True)
class Trip:
    """Why no new disruption may start now."""

    reason: Reason
    count: int
    bound: int
    desired: int
    fault: str = ""
    rule_id: str = ""
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Breaker:
    """An open breaker, as the guard item keeps it; a closed one is None."""

    opened_at: datetime
    holds_until: datetime
    """End of the cool-down; it moves on with every look that finds the cause still there."""
    trip: Trip

    def reason(self) -> Reason:
        """Return what a waiter is told."""
        return Reason(
            "breaker_open",
            f"the breaker is open since {self.opened_at:%Y-%m-%d %H:%M} UTC: "
            f"{self.trip.reason.text}; no new remediation before {self.holds_until:%H:%M} UTC",
        )


def why_trip(
    sightings: Iterable[Sighting],
    *,
    fleet: Collection[str],
    not_ready: Sequence[str],
    desired: int,
    limits: BreakerLimits,
    group: str = "",
) -> Trip | None:
    """Return why the breaker must be open now, or None.

    Args:
        sightings: every fault that would lead to a disruption; waiters of any age, so that what
            piled up while nobody looked is still seen as the burst that it was.
        fleet: UIDs of the nodes that are there.
        not_ready: names of nodes that are unhealthy and neither new, leaving nor in our own hands.
        desired: how many nodes there should be; registered ones would shrink with the losses.
        limits: the policy's bounds.
        group: the Auto Scaling group that is judged; empty for the whole cluster.
    """
    place = f" of group {group}" if group else ""
    bound = limits.bound(desired)
    by_fault: dict[str, list[Sighting]] = {}
    for sighting in sightings:
        by_fault.setdefault(sighting.fault, []).append(sighting)
    worst: Trip | None = None
    for fault in sorted(by_fault):
        burst = _largest_burst(by_fault[fault], timedelta(seconds=limits.window_s))
        every = {one.node_uid: one for one in by_fault[fault]}
        # Nodes do not all break one after the other; a query can match one after the other.
        is_all = len(fleet) > 1 and set(fleet) <= every.keys()
        burst = every if is_all else burst
        if (is_all or len(burst) >= bound) and (worst is None or len(burst) > worst.count):
            worst = _signal_trip(fault, burst, bound, desired, limits, place, is_all=is_all)
    if worst is None and len(not_ready) > bound:
        worst = Trip(
            reason=Reason(
                "fleet_unhealthy",
                f"{len(not_ready)} of {desired} nodes{place} are not ready, more than the "
                f"bound of {bound}: look at the network and the control plane before any node",
            ),
            count=len(not_ready),
            bound=bound,
            desired=desired,
            nodes=tuple(sorted(not_ready)[:MAX_NAMED]),
        )
    return worst


def bursts_of(findings: Iterable[Finding], now: datetime) -> tuple[Burst, ...]:
    """Return, for findings that are new, each fault that several nodes have at once.

    What only the jobs or the exporters did is no reason to touch a node, and is left out.
    """
    nodes: dict[str, dict[str, str]] = {}
    for finding in findings:
        if finding.verdict.is_actionable and finding.node_names:
            by_name = nodes.setdefault(finding.fault, {})
            by_name.setdefault(finding.node_names[0], finding.evidence.rule_id)
    bursts = []
    for fault, by_name in sorted(nodes.items()):
        if len(by_name) > 1:
            names = tuple(sorted(by_name))
            rule_id = Counter(by_name.values()).most_common(1)[0][0]
            more = max(0, len(names) - MAX_NAMED)
            bursts.append(Burst(fault, now, rule_id, names[:MAX_NAMED], more))
    return tuple(bursts)


def with_bursts(known: Iterable[Burst], new: Iterable[Burst]) -> tuple[Burst, ...]:
    """Return the bursts with new ones; one that is noted again (a scan that died) counts once."""
    by_kind = {(one.fault, one.node_names): one for one in (*known, *new)}
    return tuple(sorted(by_kind.values(), key=lambda one: one.at)[-MAX_BURSTS:])


def sightings_of_burst(burst: Burst, uid_by_name: Mapping[str, str]) -> list[Sighting]:
    """Return the burst as sightings on the nodes that are there.

    A name that means no node of the cluster leads to no disruption, and so does not count.
    """
    named = [(uid_by_name[name], name) for name in burst.node_names if name in uid_by_name]
    # Those that are not named are other nodes than the named ones, and stand for themselves.
    unnamed = [(f"{burst.at.isoformat()} {number}", "") for number in range(burst.more)]
    return [
        Sighting(uid, burst.fault, burst.at, name, burst.rule_id)
        for uid, name in (*named, *unnamed)
    ]


def _largest_burst(sightings: list[Sighting], window: timedelta) -> dict[str, Sighting]:
    """Return, by node, the sightings of the window that holds most nodes."""
    ordered = sorted(sightings, key=lambda one: (one.at, one.node_uid))
    inside: Counter[str] = Counter()
    first = best = 0
    span = (0, 0)
    for last, sighting in enumerate(ordered):
        inside[sighting.node_uid] += 1
        while sighting.at - ordered[first].at > window:
            gone = ordered[first].node_uid
            inside[gone] -= 1
            if not inside[gone]:
                del inside[gone]
            first += 1
        if len(inside) > best:
            best, span = len(inside), (first, last)
    return {one.node_uid: one for one in ordered[span[0] : span[1] + 1]}


def _signal_trip(
    fault: str,
    burst: dict[str, Sighting],
    bound: int,
    desired: int,
    limits: BreakerLimits,
    place: str,
    *,
    is_all: bool,
) -> Trip:
    rules = Counter(one.rule_id for one in burst.values() if one.rule_id)
    rule_id = min(rules, key=lambda name: (-rules[name], name)) if rules else ""
    asked = f" (rule {rule_id})" if rule_id else ""
    share = (
        f"every node{place or ' of the cluster'}"
        if is_all
        else f"{len(burst)} of {desired} nodes{place} within {limits.window_s} s"
    )
    why = (
        "all nodes at once mean a bad query, not bad nodes"
        if is_all
        else f"the bound is {bound} nodes: suspect the signal before the nodes"
    )
    return Trip(
        reason=Reason(
            "fleet_signal_suspect",
            f"{fault}{asked} hit {share}; {why}",
        ),
        count=len(burst),
        bound=bound,
        desired=desired,
        fault=fault,
        rule_id=rule_id,
        nodes=tuple(sorted(one.node_name or uid for uid, one in burst.items())[:MAX_NAMED]),
    )


def next_breaker(
    current: Breaker | None,
    trip: Trip | None,
    *,
    limits: BreakerLimits,
    now: datetime,
    may_close: bool = True,
) -> Breaker | None:
    """Return the breaker after this look.

    It opens at once, stays open while the cause holds, and closes only when the cause has been gone
    for the cool-down: after a network blip nodes recover one by one, and each looks sick meanwhile.

    Args:
        current: the breaker as it was; None is closed.
        trip: why it must be open now, if it must.
        limits: the policy's bounds.
        now: the time.
        may_close: False for a look that did not see all waiters.
    """
    if trip is not None:
        holds_until = now + timedelta(seconds=limits.cooldown_s)
        if current is None:
            return Breaker(now, holds_until, trip)
        return replace(current, holds_until=max(current.holds_until, holds_until))
    if current is not None and may_close and now >= current.holds_until:
        return None
    return current
