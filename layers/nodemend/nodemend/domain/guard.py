"""The fleet guard: what is in flight in a cluster, and what holds it.

One guard item per cluster. The functions here and in `dispatch` compute the next guard; the store
writes it with one conditional put on its version (ADR 0001). So two dispatchers can never both give
the last slot.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from nodemend.domain.breaker import Breaker, Burst, Sighting, with_bursts
from nodemend.domain.errors import LeaseLostError
from nodemend.domain.incidents import Incident
from nodemend.domain.policy import Policy
from nodemend.domain.reasons import Reason

MAX_SLOTS = 50
"""Slots per cluster, so that the guard item stays below 10 KB and its write costs little."""

MAX_SIGHTINGS = 50
"""Faults of admitted incidents that the guard remembers for the breaker's window: the waiters are
there to be counted, those that were let go are not."""

BREAKER_OPEN = "breaker_open"
"""Code under which the breaker keeps a waiter."""

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
class Pause:
    """A person's word that nothing new may start and nothing may be changed."""

    by: str
    why: str
    since: datetime

    def reason(self) -> Reason:
        """Return what whoever is held is told."""
        return Reason(
            "paused", f"{self.by} paused the cluster at {self.since:%Y-%m-%d %H:%M} UTC: {self.why}"
        )


@dataclass(frozen=True, slots=True)
class GuardEvent:
    """A "Fleet Guard Changed" that is stored with the change, and kept until it was sent."""

    event_id: str
    at: datetime
    change: str
    """`breaker_opened`, `breaker_closed`, `paused` or `resumed`."""
    reason: Reason
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Replacement:
    """One unit of the replacement rate; its time is the name by which a release gives it back."""

    at: datetime
    group: str = ""


@dataclass(frozen=True, slots=True)
class Guard:
    """The guard item of one cluster."""

    cluster: str
    version: int = 0
    slots: Mapping[str, Slot] = field(default_factory=dict)
    """By node UID."""
    replacements: tuple[Replacement, ...] = ()
    """Replacements that were admitted in the last 24 hours."""
    sightings: tuple[Sighting, ...] = ()
    """Faults of incidents that were admitted within the breaker's window, oldest first."""
    bursts: tuple[Burst, ...] = ()
    """Faults that a scan or an alert found on several nodes at once within the breaker's window."""
    breaker: Breaker | None = None
    """The cluster's; None while it is closed."""
    group_breakers: Mapping[str, Breaker] = field(default_factory=dict)
    """Open breakers of Auto Scaling groups that have one of their own."""
    pause: Pause | None = None
    """None while the cluster is not paused."""
    events: tuple[GuardEvent, ...] = ()
    """Changes that were not told yet."""

    @property
    def is_breaker_open(self) -> bool:
        """True if the cluster's breaker or a group's is open."""
        return self.breaker is not None or bool(self.group_breakers)

    def breaker_over(self, group: str) -> Breaker | None:
        """Return the open breaker that holds the nodes of a group; the cluster's goes first."""
        return self.breaker or self.group_breakers.get(group)


def holds(guard: Guard, incident: Incident) -> bool:
    """Tell whether the incident has its node's slot."""
    held = guard.slots.get(incident.node.uid)
    return held is not None and held.incident_id == incident.id


def recent(guard: Guard, policy: Policy, now: datetime) -> Guard:
    """Return the guard without what is too old to count."""
    window = timedelta(seconds=policy.longest_window_s)
    replacements = tuple(one for one in guard.replacements if now - one.at < timedelta(days=1))
    sightings = tuple(one for one in guard.sightings if now - one.at <= window)
    bursts = tuple(one for one in guard.bursts if now - one.at <= window)
    current = replace(guard, replacements=replacements, sightings=sightings, bursts=bursts)
    return guard if current == guard else current


def note_bursts(guard: Guard, bursts: Iterable[Burst]) -> Guard:
    """Return the guard that knows of faults on several nodes, before any incident is opened.

    The next decision judges them; nothing is admitted by a decision that has not seen them.
    """
    noted = with_bursts(guard.bursts, bursts)
    return guard if noted == guard.bursts else replace(guard, bursts=noted)


def with_event(
    guard: Guard, change: str, reason: Reason, now: datetime, data: Mapping[str, Any]
) -> Guard:
    """Return the guard with one more event to tell; its id is that of the write that stores it."""
    words = [change.replace("_", "-"), *([data["group"]] if data.get("group") else [])]
    event_id = "-".join(["guard", guard.cluster, f"{guard.version + 1:06d}", *words])
    event = GuardEvent(event_id, now, change, reason, data)
    return replace(guard, events=(*guard.events, event))


def told(guard: Guard, event_ids: Iterable[str]) -> Guard:
    """Return the guard without events that were sent; the same guard if it has none of them."""
    sent = frozenset(event_ids)
    left = tuple(event for event in guard.events if event.event_id not in sent)
    return replace(guard, events=left) if len(left) < len(guard.events) else guard


def pause(guard: Guard, *, by: str, why: str, now: datetime) -> Guard:
    """Return the paused guard; a second pause changes nothing, the first one's words stand."""
    if guard.pause is not None:
        return guard
    pausing = Pause(by, why, now)
    paused = replace(guard, pause=pausing)
    return with_event(paused, "paused", pausing.reason(), now, {"requested_by": by})


def resume(guard: Guard, *, by: str, why: str, now: datetime) -> Guard:
    """Return the guard with the pause lifted; the same guard if there is none."""
    if guard.pause is None:
        return guard
    reason = Reason(
        "resumed", f"{by} ended the pause of {guard.pause.since:%Y-%m-%d %H:%M} UTC: {why}"
    )
    return with_event(replace(guard, pause=None), "resumed", reason, now, {"requested_by": by})


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
        replacements=tuple(one for one in guard.replacements if one.at not in returned),
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
