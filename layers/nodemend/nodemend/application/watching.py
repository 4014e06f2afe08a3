"""What the parts of the watch share: their ports, and telling a person of a matter once."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeVar

from nodemend.application.closing import ClosingPorts
from nodemend.application.ports import (
    Announcement,
    Clock,
    Clusters,
    EventBus,
    Executions,
    Policies,
    Report,
    ScanMemory,
    Telemetry,
)
from nodemend.domain.errors import NodemendError
from nodemend.domain.watch import SETTLED_AFTER

logger = logging.getLogger(__name__)

T = TypeVar("T")

REFRESHED_AFTER = timedelta(days=1)
"""The memory forgets after two days; what still holds must stay told."""

_SEEN = "seen"
_TOLD = "told"


@dataclass(frozen=True, slots=True)
class WatchPorts:
    """What the watchdog needs."""

    closing: ClosingPorts
    policies: Policies
    executions: Executions
    clusters: Clusters
    bus: EventBus
    memory: ScanMemory
    telemetry: Telemetry
    clock: Clock


@dataclass(frozen=True, slots=True)
class Matter:
    """Something that the watch does not mend: a person must hear of it, once."""

    key: str
    """The same matter has the same key at each look."""
    since: datetime | None
    """Since when it is a person's; None: since a while after the watch first saw it."""
    event: Callable[[datetime], Announcement]
    """Makes the event for the time since when it is told; the same time makes the same event."""


def tell_once(cluster: str, matters: Sequence[Matter], ports: WatchPorts) -> int:
    """Send one event for each matter that was not told yet; return how many are due.

    Sent first and remembered afterwards: who dies in between sends the same event again.
    """
    if not matters:
        return 0
    now = ports.clock.now()
    named = {f"watch/{matter.key}": matter for matter in matters}
    last = ports.memory.last_reports(cluster, named)
    reports: dict[str, Report] = {}
    news: dict[str, Announcement] = {}
    due = 0
    for name, matter in named.items():
        known = last.get(name)
        if known is not None and known.fingerprint == _TOLD:
            due += 1
            if now - known.at > REFRESHED_AFTER:
                reports[name] = Report(_TOLD, now)
            continue
        since = matter.since or (known.at + SETTLED_AFTER if known else None)
        if since is None:
            reports[name] = Report(_SEEN, now)
        elif now >= since:
            due += 1
            news[name] = matter.event(since)
    unsent = send(cluster, list(news.values()), ports)
    reports |= {
        name: Report(_TOLD, now) for name, event in news.items() if event.event_id not in unsent
    }
    if reports:
        ports.memory.remember(cluster, reports)
    return due


def send(cluster: str, events: Sequence[Announcement], ports: WatchPorts) -> frozenset[str]:
    """Send events that no open record holds; return the ids of those that were not accepted.

    Never raises: nothing that the watch mends waits for EventBridge, and the next watch sends again
    what this one could not.
    """
    if not events:
        return frozenset()
    try:
        unsent = frozenset(ports.bus.announce(events))
    except NodemendError:
        logger.exception("%d events of the watch are not sent yet", len(events))
        unsent = frozenset(event.event_id for event in events)
    # The bus leaves the events of incidents to their outbox, which these are not in.
    of_incidents = [event for event in events if "incident_id" in event.detail]
    accepted = sum(event.event_id not in unsent for event in of_incidents)
    if accepted:
        ports.telemetry.count("Events", accepted, cluster=cluster)
    if accepted < len(of_incidents):
        ports.telemetry.count("EventsUnsent", len(of_incidents) - accepted, cluster=cluster)
    return unsent


def rotated(things: Sequence[T], now: datetime) -> Sequence[T]:
    """Return the things beginning with another one each minute.

    Where there is no time for all of them, none is left out for ever.
    """
    if not things:
        return things
    first = int(now.timestamp() // 60) % len(things)
    return [*things[first:], *things[:first]]
