"""The outboxes of the incident records: sent, then counted, then marked as sent.

Delivery is at least once. Whoever dies between two of the three leaves the mark out, and the event
is sent and counted again with the same `event_id`.

Metrics derived from incident events, at most 14 series per cluster:

| metric | dimensions | what it counts |
|---|---|---|
| `Events` | `cluster` | events that EventBridge has accepted |
| `IncidentsClosed` | `cluster`, `outcome` | closed incidents, dry runs included |
| `Actions` | `cluster`, `action` | `cordon`, `drain`, `repair`, `release` that were no dry run |
| `EventsUnsent` | `cluster` | attempts after which an event was still not sent: alarm on it |
"""

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from nodemend.adapters._aws import (
    decode_item,
    encode_item,
    parse_stamp,
    translating,
    wins,
)
from nodemend.application.ports import Announcement, EventBus, Telemetry
from nodemend.domain.errors import NodemendError
from nodemend.domain.events import DetailType

if TYPE_CHECKING:
    from mypy_boto3_dynamodb.client import DynamoDBClient

_logger = logging.getLogger(__name__)

ACTIONS: Mapping[DetailType, str] = {
    DetailType.NODE_CORDONED: "cordon",
    DetailType.NODE_DRAINED: "drain",
    DetailType.REPAIR_STARTED: "repair",
    DetailType.NODE_RELEASED: "release",
}
"""Which events mean that the cluster or its capacity was changed."""

_OUTBOX_INDEX = "outbox"
_PENDING = "1"
_MARKED_AT_ONCE = 50
"""Entries removed in one write; an expression may have 300 operators and 4 KB."""


def counters_of(
    detail_type: DetailType, detail: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (metric, dimensions) of each counter that an accepted incident event adds one to."""
    cluster = str(detail.get("cluster", ""))
    # Not by detail-type: each new one would be one more of the 40 series, and says less than the
    # outcomes and actions below.
    yield "Events", {"cluster": cluster}
    if detail_type is DetailType.INCIDENT_CLOSED:
        yield "IncidentsClosed", {"cluster": cluster, "outcome": str(detail.get("outcome", ""))}
    if detail_type in ACTIONS and not detail.get("dry_run"):
        yield "Actions", {"cluster": cluster, "action": ACTIONS[detail_type]}


@dataclass(slots=True)
class _Progress:
    """How far one incident's publication has come, also when it ends by an error."""

    cluster: str = ""
    sent: int = 0
    unsent: int = 0
    is_reachable: bool = True


class DynamoOutbox:
    """Outboxes in the incident records of `incidents_dynamodb`.

    Args:
        table: Name of the table.
        client: The `dynamodb` client.
        bus: Where events go.
        telemetry: Where the counters go.
    """

    def __init__(
        self, *, table: str, client: "DynamoDBClient", bus: EventBus, telemetry: Telemetry
    ) -> None:
        self._table = table
        self._client = client
        self._bus = bus
        self._telemetry = telemetry

    def publish(self, incident_id: str, event_ids: Collection[str] | None = None) -> int:
        """Send these unsent events (None: all) in their order; return how many stay unsent.

        Never raises: what was not sent stays in the record, and no release waits for EventBridge.
        If not even the record could be read, the answer is 1.
        """
        progress = self._publish(
            incident_id, lambda event: event_ids is None or event.event_id in event_ids
        )
        return progress.unsent

    def publish_pending(
        self, *, before: datetime | None = None, limit: int = 100
    ) -> tuple[int, int]:
        """Send unsent events of up to `limit` incidents; return (sent, still unsent).

        Stops at the first incident at which AWS did not answer: the others would only wait for
        the same time-outs.
        """
        sent = unsent = 0
        for incident_id in self.pending(limit):
            progress = self._publish(incident_id, lambda event: before is None or event.at < before)
            sent += progress.sent
            unsent += progress.unsent
            if not progress.is_reachable:
                break
        return sent, unsent

    def pending(self, limit: int = 100) -> list[str]:
        """Return the ids of incidents with unsent events, oldest first; none if AWS is away."""
        pages = self._client.get_paginator("query").paginate(
            TableName=self._table,
            IndexName=_OUTBOX_INDEX,
            KeyConditionExpression="outbox_pending = :pending",
            ProjectionExpression="pk",
            ExpressionAttributeValues={":pending": {"S": _PENDING}},
            PaginationConfig={"MaxItems": limit},
        )
        try:
            with translating("dynamodb:Query"):
                items = [item for page in pages for item in page["Items"]]
        except NodemendError:
            _logger.exception("the index of unsent events cannot be read")
            self._telemetry.count("EventsUnsent", cluster="")
            return []
        return [item["pk"]["S"].removeprefix("INCIDENT#") for item in items]

    def _publish(self, incident_id: str, is_wanted: Callable[[Announcement], bool]) -> _Progress:
        progress = _Progress()
        try:
            self._send(incident_id, is_wanted, progress)
        except NodemendError:
            _logger.exception("events of incident %s are not sent", incident_id)
            progress.is_reachable = False
            progress.unsent = progress.unsent or 1
        except Exception:
            # A record that cannot be understood is a bug, and no reason to stop a remediation.
            _logger.exception("events of incident %s are not sent", incident_id)
            progress.unsent = progress.unsent or 1
        if progress.unsent:
            self._telemetry.count("EventsUnsent", progress.unsent, cluster=progress.cluster)
        return progress

    def _send(
        self, incident_id: str, is_wanted: Callable[[Announcement], bool], progress: _Progress
    ) -> None:
        record = self._read(incident_id)
        outbox = record.get("outbox", {})
        progress.cluster = record.get("cluster", "")
        if not outbox and "outbox_pending" in record:
            self._drop_flag(incident_id)
        understood = _announcements(outbox)
        announcements = [event for event in understood if is_wanted(event)]
        # What cannot be understood was wanted by nobody, and must not go unnoticed.
        progress.unsent = len(outbox) - len(understood) + len(announcements)
        left = len(outbox)
        for start in range(0, len(announcements), _MARKED_AT_ONCE):
            part = announcements[start : start + _MARKED_AT_ONCE]
            refused = frozenset(self._bus.announce(part))
            accepted = [entry for entry in part if entry.event_id not in refused]
            for entry in accepted:
                for name, dimensions in counters_of(entry.detail_type, entry.detail):
                    self._telemetry.count(name, 1, **dimensions)
            if accepted:
                self._mark_sent(
                    incident_id,
                    [entry.event_id for entry in accepted],
                    is_all=len(accepted) == left,
                )
                left -= len(accepted)
            progress.sent += len(accepted)
            progress.unsent -= len(accepted)

    def _read(self, incident_id: str) -> dict[str, Any]:
        with translating("dynamodb:GetItem"):
            answer = self._client.get_item(
                TableName=self._table,
                Key=_key(incident_id),
                ConsistentRead=True,
                ProjectionExpression="#outbox, outbox_pending, #cluster",
                ExpressionAttributeNames={"#outbox": "outbox", "#cluster": "cluster"},
            )
        return decode_item(answer.get("Item", {}))

    def _mark_sent(self, incident_id: str, event_ids: Sequence[str], *, is_all: bool) -> None:
        """Take sent entries out of the record, and the record out of the index if none is left.

        "None is left" is part of the condition: the outbox must hold these entries and no other.
        An entry that a step adds meanwhile keeps the record in the index.
        """
        paths = [f"#outbox.#event{number}" for number in range(len(event_ids))]
        names = {f"#event{number}": event_id for number, event_id in enumerate(event_ids)}
        names["#outbox"] = "outbox"
        expression = "REMOVE " + ", ".join(paths)
        if is_all:
            exist = [f"attribute_exists({path})" for path in paths]
            is_dropped = self._update(
                incident_id,
                expression + ", outbox_pending",
                " AND ".join([*exist, "size(#outbox) = :count"]),
                names,
                count=len(event_ids),
            )
            if is_dropped:
                return
        self._update(incident_id, expression, "attribute_exists(#outbox)", names)

    def _drop_flag(self, incident_id: str) -> None:
        """Take a record with an empty outbox out of the index."""
        self._update(
            incident_id,
            "REMOVE outbox_pending",
            "size(#outbox) = :count",
            {"#outbox": "outbox"},
            count=0,
        )

    def _update(
        self,
        incident_id: str,
        expression: str,
        condition: str,
        names: Mapping[str, str],
        *,
        count: int | None = None,
    ) -> bool:
        values = {} if count is None else {":count": {"N": str(count)}}
        optional = {"ExpressionAttributeValues": values} if values else {}
        return wins(
            "dynamodb:UpdateItem",
            lambda: self._client.update_item(
                TableName=self._table,
                Key=_key(incident_id),
                UpdateExpression=expression,
                ConditionExpression=condition,
                ExpressionAttributeNames=names,
                **optional,  # type: ignore[arg-type]
            ),
        )


def _key(incident_id: str) -> dict[str, Any]:
    return encode_item({"pk": f"INCIDENT#{incident_id}", "sk": "RECORD"})


def _announcements(outbox: Mapping[str, Mapping[str, str]]) -> list[Announcement]:
    """Return the entries in the order of their ids; what cannot be read is logged and left.

    Ids end in a number of at least four digits, so a longer id is a later one.
    """
    found = []
    for event_id in sorted(outbox, key=lambda event_id: (len(event_id), event_id)):
        entry = outbox[event_id]
        try:
            found.append(
                Announcement(
                    event_id=event_id,
                    detail_type=DetailType(entry["detail_type"]),
                    at=parse_stamp(entry["at"]),
                    detail=json.loads(entry["detail"]),
                )
            )
        except (KeyError, ValueError):
            _logger.exception("event %s cannot be read and stays unsent", event_id)
    return found
