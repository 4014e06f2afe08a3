"""EventBridge: sends events in batches and tells which were not accepted (case R70)."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nodemend.adapters._aws import encode_detail, translating
from nodemend.application.ports import Announcement, Telemetry
from nodemend.contracts.events import SOURCE
from nodemend.domain.errors import AwsForbiddenError, AwsUnavailableError, InvalidInputError

if TYPE_CHECKING:
    from mypy_boto3_events.client import EventBridgeClient

_logger = logging.getLogger(__name__)

MAX_ENTRIES = 10
MAX_BATCH_BYTES = 256 * 1024
"""EventBridge's limits for one PutEvents call; an entry counts as `_entry_bytes` says."""

ATTEMPTS = 3
"""How often an entry is offered in all. There is no pause between: what EventBridge throttles for
longer is sent by watch_incidents."""

_Entry = dict[str, Any]


class EventBridgeBus:
    """One event bus.

    Args:
        bus_name: Name or ARN of the bus.
        client: The `events` client.
        telemetry: Counts the events that belong to no incident (`Events`, `EventsUnsent`); those
            of incidents are counted by their outbox, so that both may share one bus.
    """

    def __init__(
        self, *, bus_name: str, client: "EventBridgeClient", telemetry: Telemetry | None = None
    ) -> None:
        self._bus_name = bus_name
        self._client = client
        self._telemetry = telemetry

    def announce(self, announcements: Sequence[Announcement]) -> Sequence[str]:
        """Send in order; return the ids of events that were not accepted after the retries.

        Only failed entries are offered again, with the event ids that they had.

        Raises:
            AwsUnavailableError, AwsForbiddenError: if the bus could not be reached at all. Once it
                has taken a batch, what follows is reported as not accepted instead.
        """
        unsent: list[str] = []
        entries = self._entries(announcements, unsent)
        is_reached = False
        batches = list(_batches(entries))
        for number, batch in enumerate(batches):
            try:
                unsent += self._send(batch)
            except (AwsUnavailableError, AwsForbiddenError):
                unsent += [event_id for rest in batches[number:] for event_id in rest]
                if not is_reached:
                    self._count(announcements, unsent)
                    raise
                _logger.exception("%d events are not sent", len(unsent))
                break
            is_reached = True
        self._count(announcements, unsent)
        return unsent

    def _entries(
        self, announcements: Sequence[Announcement], unsent: list[str]
    ) -> dict[str, _Entry]:
        """Return the entries by event id; what cannot be encoded is logged and counts as unsent."""
        entries: dict[str, _Entry] = {}
        for announcement in announcements:
            try:
                entries[announcement.event_id] = {
                    "EventBusName": self._bus_name,
                    "Source": SOURCE,
                    "DetailType": announcement.detail_type.value,
                    "Detail": encode_detail(announcement.detail),
                    "Time": announcement.at,
                }
            except InvalidInputError:
                _logger.exception("event %s cannot be sent", announcement.event_id)
                unsent.append(announcement.event_id)
        return entries

    def _send(self, batch: Mapping[str, _Entry]) -> list[str]:
        """Offer the entries up to `ATTEMPTS` times; return the ids of those that failed."""
        left = list(batch)
        for attempt in range(ATTEMPTS):
            try:
                failed = self._put([batch[event_id] for event_id in left])
            except (AwsUnavailableError, AwsForbiddenError):
                if attempt == 0:
                    raise
                _logger.exception("%d of %d events are not sent", len(left), len(batch))
                break
            for index, code in failed.items():
                _logger.warning("event %s was not accepted: %s", left[index], code)
            left = [left[index] for index in failed]
            if not left:
                break
        return left

    def _put(self, entries: Sequence[_Entry]) -> dict[int, str]:
        """Return the error code by index of each entry that failed in one call."""
        with translating("events:PutEvents"):
            answer = self._client.put_events(Entries=entries)  # type: ignore[arg-type]
        if not answer["FailedEntryCount"]:
            return {}
        return {
            index: f"{result['ErrorCode']}: {result.get('ErrorMessage', '')}"
            for index, result in enumerate(answer["Entries"])
            if result.get("ErrorCode")
        }

    def _count(self, announcements: Sequence[Announcement], unsent: Sequence[str]) -> None:
        if self._telemetry is None:
            return
        for announcement in announcements:
            if "incident_id" in announcement.detail:
                continue
            cluster = str(announcement.detail.get("cluster", ""))
            if announcement.event_id in unsent:
                self._telemetry.count("EventsUnsent", cluster=cluster)
            else:
                self._telemetry.count("Events", cluster=cluster)


def _batches(entries: Mapping[str, _Entry]) -> Iterator[dict[str, _Entry]]:
    batch: dict[str, _Entry] = {}
    size = 0
    for event_id, entry in entries.items():
        entry_size = _entry_bytes(entry)
        if batch and (len(batch) == MAX_ENTRIES or size + entry_size > MAX_BATCH_BYTES):
            yield batch
            batch, size = {}, 0
        batch[event_id] = entry
        size += entry_size
    if batch:
        yield batch


def _entry_bytes(entry: _Entry) -> int:
    """Return the size as EventBridge counts it: 14 bytes for the time, and the texts in UTF-8."""
    return 14 + sum(len(entry[name].encode()) for name in ("Source", "DetailType", "Detail"))
