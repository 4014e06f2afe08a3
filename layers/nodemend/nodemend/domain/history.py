"""What was done before on a machine and on a GPU: the memory of the escalation ladder.

A reboot can hide a fault that shows only under load (case R73), and quiet after a drain is no
recovery. So the same GPU that is faulty again goes on where the last incident ended, and who keeps
coming back is reported with its record.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from nodemend.domain.faults import Rung

KEEP = timedelta(days=90)
"""How long an entry is kept. Lemons show over weeks; policies look back at most this far."""

RECALLED = 20
"""Entries of one machine or GPU that are read: the newest."""

REPORTED = 10
"""Entries of a record in an incident and its events: the newest."""


@dataclass(frozen=True, slots=True)
class PastIncident:
    """One earlier incident, as the record of a machine or a GPU shows it."""

    incident_id: str
    at: datetime
    """When it was closed."""
    fault: str
    """The fault class, with the XID where there was one: `xid 119`."""
    outcome: str
    instance_id: str
    gpu_uuids: tuple[str, ...] = ()
    rungs: tuple[Rung, ...] = ()
    """Repairs that were asked for, in order; empty if it ended before any."""
    replacement_instance_id: str = ""
    """The instance that took this one's place; the entry stands in its record too."""
    generation: int = 0
    """How many replacements in a row that one stands for: 1 took the place of a node that was no
    replacement itself."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What a record is about: a machine or a GPU."""

    kind: str
    """`instance` or `gpu`."""
    id: str

    @property
    def key(self) -> str:
        """The name under which it is stored."""
        return f"{self.kind}/{self.id}"


def instance(instance_id: str) -> Subject:
    """Return the subject of a machine."""
    return Subject("instance", instance_id)


def gpu(uuid: str) -> Subject:
    """Return the subject of a physical GPU; it may come back in another instance."""
    return Subject("gpu", uuid)


def merged(records: Iterable[Sequence[PastIncident]]) -> tuple[PastIncident, ...]:
    """Return the entries of several records, each incident once, newest first and not too many."""
    by_id = {entry.incident_id: entry for record in records for entry in record}
    newest = sorted(by_id.values(), key=lambda entry: (entry.at, entry.incident_id), reverse=True)
    return tuple(newest[:REPORTED])


def generation_of(record: Iterable[PastIncident], instance_id: str, since: datetime) -> int:
    """Return how many replacements in a row made this instance since then; 0 if none did."""
    return max(
        (
            entry.generation
            for entry in record
            if instance_id and entry.replacement_instance_id == instance_id and entry.at >= since
        ),
        default=0,
    )


def attempts_of(record: Iterable[PastIncident], instance_id: str, since: datetime) -> int:
    """Return how many repairs of this machine were asked for since then."""
    return sum(
        len(entry.rungs)
        for entry in record
        if entry.instance_id == instance_id and entry.at >= since
    )


def tried(
    record: Iterable[PastIncident], gpu_uuids: frozenset[str], instance_id: str, since: datetime
) -> tuple[PastIncident, ...]:
    """Return the earlier incidents that a repair was made for, of the same GPU since then.

    A fault that names no GPU is compared by its machine.
    """
    return tuple(
        entry
        for entry in record
        if entry.rungs
        and entry.at >= since
        and (
            bool(gpu_uuids & set(entry.gpu_uuids))
            if gpu_uuids
            else entry.instance_id == instance_id
        )
    )
