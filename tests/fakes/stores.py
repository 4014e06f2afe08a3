"""In-memory stores. Each passes the same suite as its DynamoDB adapter
(tests/integration/adapters/test_store_*.py)."""

import json
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from pydantic import TypeAdapter

from nodemend.adapters._aws import encode_detail
from nodemend.adapters.outbox import counters_of
from nodemend.application.ports import (
    Announcement,
    Clock,
    EventBus,
    Report,
    Telemetry,
)
from nodemend.contracts.events import incident_detail
from nodemend.domain.errors import ConcurrentUpdateError, InvalidInputError, NodemendError
from nodemend.domain.guard import Guard
from nodemend.domain.history import KEEP, RECALLED, PastIncident, Subject, merged
from nodemend.domain.incidents import Incident
from nodemend.domain.nodes import NodeRef

_INCIDENT = TypeAdapter(Incident)
_GUARD = TypeAdapter(Guard)


@dataclass
class StoredIncident:
    """A record: what is stored of the incident, and what its outbox holds."""

    document: dict[str, Any]
    outbox: dict[str, Announcement] = field(default_factory=dict)

    @property
    def incident(self) -> Incident:
        return _INCIDENT.validate_python(self.document)


class MemoryIncidents:
    """`Incidents` in dictionaries; values go through JSON, as they do in the real store."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self.records: dict[str, StoredIncident] = {}
        self.open_by_node: dict[tuple[str, str], str] = {}
        self.claims: dict[str, str] = {}
        self.handled: dict[tuple[str, str, str, str], datetime] = {}

    def claim_node(self, cluster: str, node_uid: str, incident_id: str) -> str:
        if not node_uid:
            raise InvalidInputError("node.uid", "is empty", "resolve the node first")
        with self._lock:
            return self.open_by_node.setdefault((cluster, node_uid), incident_id)

    def release_node(self, cluster: str, node_uid: str, incident_id: str) -> None:
        with self._lock:
            if self.open_by_node.get((cluster, node_uid)) == incident_id:
                del self.open_by_node[(cluster, node_uid)]

    def create(self, incident: Incident) -> bool:
        with self._lock:
            if incident.id in self.records:
                return False
            self.records[incident.id] = StoredIncident(_document(incident), _outbox(incident))
            return True

    def get(self, incident_id: str) -> Incident | None:
        with self._lock:
            record = self.records.get(incident_id)
            return record.incident if record else None

    def save(self, incident: Incident) -> Incident:
        with self._lock:
            record = self.records.get(incident.id)
            stored = record.incident if record else None
            if record is None or stored is None or stored.version != incident.version:
                raise ConcurrentUpdateError(
                    f"incident {incident.id} is not at version {incident.version}"
                )
            if stored.is_closed:
                raise ConcurrentUpdateError(f"incident {incident.id} is closed")
            saved = replace(incident, version=incident.version + 1)
            outbox = _outbox(saved)
            record.document = _document(saved)
            record.outbox |= outbox
            return replace(saved, new_events=())

    def list_open(self, cluster: str | None) -> Sequence[Incident]:
        with self._lock:
            incidents = [record.incident for record in self.records.values()]
        return sorted(
            (one for one in incidents if cluster in (None, one.cluster) and not one.is_closed),
            key=lambda one: (one.opened_at, one.id),
        )

    def claim_instance(self, instance_id: str, incident_id: str) -> bool:
        with self._lock:
            return self.claims.setdefault(instance_id, incident_id) == incident_id

    def handled_until(
        self, cluster: str, node: NodeRef, keys: Iterable[str]
    ) -> Mapping[str, datetime]:
        now = self._clock.now()
        with self._lock:
            found = {key: self.handled.get(_page(cluster, node, key)) for key in keys}
        return {key: until for key, until in found.items() if until is not None and until > now}

    def mark_handled(
        self, cluster: str, node: NodeRef, keys: Iterable[str], until: datetime
    ) -> None:
        with self._lock:
            for key in keys:
                page = _page(cluster, node, key)
                self.handled[page] = max(until, self.handled.get(page, until))


def _page(cluster: str, node: NodeRef, key: str) -> tuple[str, str, str, str]:
    return cluster, node.uid or f"name/{node.name}", node.boot_id, key


def _document(incident: Incident) -> dict[str, Any]:
    document: dict[str, Any] = _INCIDENT.dump_python(
        replace(incident, new_events=()), mode="json", exclude={"new_events"}
    )
    return document


def _outbox(incident: Incident) -> dict[str, Announcement]:
    return {
        event.event_id: Announcement(
            event_id=event.event_id,
            detail_type=event.detail_type,
            at=event.at,
            detail=json.loads(encode_detail(incident_detail(incident, event))),
        )
        for event in incident.new_events
    }


class MemoryOutbox:
    """`Outbox` over a `MemoryIncidents` and any event bus."""

    def __init__(self, incidents: MemoryIncidents, bus: EventBus, telemetry: Telemetry) -> None:
        self._incidents = incidents
        self._bus = bus
        self._telemetry = telemetry

    def publish(self, incident_id: str, event_ids: Collection[str] | None = None) -> int:
        return self._publish(incident_id, event_ids=event_ids)[1]

    def publish_pending(
        self, *, before: datetime | None = None, limit: int = 100
    ) -> tuple[int, int]:
        sent = unsent = 0
        for incident_id in self.pending(limit):
            now_sent, now_unsent, is_reachable = self._publish(incident_id, before=before)
            sent += now_sent
            unsent += now_unsent
            if not is_reachable:
                break
        return sent, unsent

    def pending(self, limit: int = 100) -> Sequence[str]:
        pending = sorted(
            (record.incident.opened_at, incident_id)
            for incident_id, record in self._incidents.records.items()
            if record.outbox
        )
        return [incident_id for _, incident_id in pending[:limit]]

    def _publish(
        self,
        incident_id: str,
        *,
        event_ids: Collection[str] | None = None,
        before: datetime | None = None,
    ) -> tuple[int, int, bool]:
        record = self._incidents.records.get(incident_id)
        if record is None or not record.outbox:
            return 0, 0, True
        wanted = [
            one
            # A copy: another thread may store more events meanwhile.
            for one in list(record.outbox.values())
            if (event_ids is None or one.event_id in event_ids)
            and (before is None or one.at < before)
        ]
        entries = sorted(wanted, key=lambda one: (len(one.event_id), one.event_id))
        is_reachable = True
        try:
            refused = set(self._bus.announce(entries))
        except NodemendError:
            is_reachable = False
            refused = {one.event_id for one in entries}
        accepted = [entry for entry in entries if entry.event_id not in refused]
        for entry in accepted:
            for name, dimensions in counters_of(entry.detail_type, entry.detail):
                self._telemetry.count(name, 1, **dimensions)
        for entry in accepted:
            record.outbox.pop(entry.event_id, None)
        if refused:
            cluster = record.incident.cluster
            self._telemetry.count("EventsUnsent", len(refused), cluster=cluster)
        return len(accepted), len(refused), is_reachable


class MemoryGuards:
    """`Guards` in a dictionary."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._documents: dict[str, dict[str, Any]] = {}

    def load(self, cluster: str) -> Guard:
        with self._lock:
            document = self._documents.get(cluster)
        return _GUARD.validate_python(document) if document else Guard(cluster)

    def store(self, guard: Guard) -> bool:
        document = _GUARD.dump_python(replace(guard, version=guard.version + 1), mode="json")
        with self._lock:
            stored = self._documents.get(guard.cluster, {"version": 0})
            if stored["version"] != guard.version:
                return False
            self._documents[guard.cluster] = document
            return True


class MemoryHistory:
    """`History` in a dictionary."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._entries: dict[tuple[str, str], dict[tuple[datetime, str], PastIncident]] = {}

    def remember(self, cluster: str, subjects: Iterable[Subject], past: PastIncident) -> None:
        for subject in subjects:
            entries = self._entries.setdefault((cluster, subject.key), {})
            entries[(past.at, past.incident_id)] = past

    def recall(self, cluster: str, subjects: Iterable[Subject]) -> tuple[PastIncident, ...]:
        oldest = self._clock.now() - KEEP
        found = []
        for subject in dict.fromkeys(subjects):
            entries = self._entries.get((cluster, subject.key), {})
            newest = sorted(entries.items(), reverse=True)[:RECALLED]
            found.append([past for (at, _), past in newest if at > oldest])
        return merged(found)


class MemoryScanMemory:
    """`ScanMemory` in a dictionary."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._reports: dict[tuple[str, str], Report] = {}

    def last_reports(self, cluster: str, names: Iterable[str]) -> Mapping[str, Report]:
        oldest = self._clock.now() - timedelta(days=2)
        found = {name: self._reports.get((cluster, name)) for name in names}
        return {name: report for name, report in found.items() if report and report.at > oldest}

    def remember(self, cluster: str, reports: Mapping[str, Report]) -> None:
        for name, report in reports.items():
            self._reports[(cluster, name)] = report
