"""EventBridge: takes PutEvents, records every entry, and delivers it to the rules' targets.

moto keeps buses, rules and targets (so that its API shows and changes them); it delivers neither to
Lambda nor to Step Functions, so matching and delivery are done here for all targets.
"""

import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError
from werkzeug.wrappers import Response

from local.aws.background import Background
from local.aws.front import Front
from local.aws.patterns import PatternError, matches
from local.aws.wire import AwsRequest, error_response

MAX_ENTRIES = 10
MAX_REQUEST_BYTES = 1_048_576
"""EventBridge's limit for a PutEvents request (256 KB until late 2025)."""

_RETRY_PAUSES_S = (0.1, 0.2, 0.5, 1.0)

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """One event that a bus accepted."""

    at: float
    """Unix seconds of its arrival."""
    caller: str
    bus: str
    source: str
    detail_type: str
    detail: dict[str, Any]
    event_id: str
    """EventBridge's id of the entry, not the product's `event_id` in the detail."""


Deliver = Callable[[str, bytes], None]
"""Sends an event's JSON to a target ARN."""


class EventRouter:
    """The buses of one stack."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._lock = threading.Lock()
        self._events: list[RecordedEvent] = []
        self._targets: dict[str, Deliver] = {}
        self._background = Background("events")
        self.failed_deliveries: list[tuple[str, str]] = []
        """Target ARN and reason of deliveries that failed, for the scenario's report."""
        front.route("events", self.handle, frozenset({"PutEvents"}))

    def add_target_kind(self, service: str, deliver: Deliver) -> None:
        """Say how events get to targets whose ARN names this service."""
        self._targets[service] = deliver

    def supports(self, target_arn: str) -> bool:
        """Tell whether events can be delivered to this target."""
        service = target_arn.split(":")[2]
        return service in self._targets or service == "events"

    def deliver(self, target_arn: str, body: bytes) -> None:
        """Send a body to any target, as a schedule does."""
        service = target_arn.split(":")[2]
        if service == "events":
            entry = json.loads(body)
            self.emit(
                bus=target_arn.rpartition("/")[2],
                source="aws.scheduler",
                detail_type="Scheduled Event",
                detail=entry,
                resources=[],
                caller="scheduler",
            )
        else:
            self._targets[service](target_arn, body)

    def events(self) -> list[RecordedEvent]:
        """Return every accepted event, in the order of arrival."""
        with self._lock:
            return list(self._events)

    @property
    def delivering(self) -> int:
        """Deliveries under way."""
        return self._background.running

    def stop(self) -> None:
        """Wait for deliveries under way."""
        self._background.stop()

    # --- PutEvents -----------------------------------------------------------------------------

    def handle(self, request: AwsRequest) -> Response:
        """Serve PutEvents, entry by entry."""
        entries = request.json.get("Entries") or []
        if not 0 < len(entries) <= MAX_ENTRIES:
            message = (
                f"1 validation error detected: Value at 'entries' failed to satisfy constraint: "
                f"Member must have length between 1 and {MAX_ENTRIES}"
            )
            return error_response(request, 400, "ValidationException", message)
        if len(request.body) > MAX_REQUEST_BYTES:
            message = "Total size of the entries in the request is over the limit."
            return error_response(request, 400, "ValidationException", message)
        ordered_to_fail = {
            int(index)
            for index in request.fault.get("x-local-fail-entries", "").split(",")
            if index.strip()
        }
        results = [
            self._put_entry(entry, request.caller, is_ordered_to_fail=index in ordered_to_fail)
            for index, entry in enumerate(entries)
        ]
        failed = sum("ErrorCode" in result for result in results)
        body = json.dumps({"FailedEntryCount": failed, "Entries": results})
        return Response(body, content_type="application/x-amz-json-1.1")

    def _put_entry(
        self, entry: dict[str, Any], caller: str, *, is_ordered_to_fail: bool
    ) -> dict[str, str]:
        if is_ordered_to_fail:
            message = "injected by the fault plan"
            return {"ErrorCode": "ThrottlingException", "ErrorMessage": message}
        for name in ("Source", "DetailType", "Detail"):
            if not entry.get(name):
                message = f"Parameter {name} is not valid. Reason: {name} is a required argument."
                return {"ErrorCode": "InvalidArgument", "ErrorMessage": message}
        try:
            detail = json.loads(entry["Detail"])
        except ValueError:
            detail = None
        if not isinstance(detail, dict):
            return {"ErrorCode": "MalformedDetail", "ErrorMessage": "Detail is malformed."}
        if entry["Source"].startswith("aws."):
            message = "Not authorized for the source."
            return {"ErrorCode": "NotAuthorizedForSourceException", "ErrorMessage": message}
        bus = str(entry.get("EventBusName") or "default").rpartition("/")[2]
        if bus not in self._buses():
            # As on AWS: an entry for a bus that does not exist is accepted and goes nowhere.
            return {"EventId": str(uuid.uuid4())}
        at = float(entry.get("Time") or time.time())
        event_id = self.emit(
            bus=bus,
            source=entry["Source"],
            detail_type=entry["DetailType"],
            detail=detail,
            resources=entry.get("Resources") or [],
            caller=caller,
            at=at,
        )
        return {"EventId": event_id}

    def emit(
        self,
        *,
        bus: str,
        source: str,
        detail_type: str,
        detail: dict[str, Any],
        resources: list[str],
        caller: str,
        at: float | None = None,
    ) -> str:
        """Put one event on a bus, as a service does with its own; returns its id.

        Delivery goes on in the background, as on AWS.
        """
        event_id = str(uuid.uuid4())
        arrived = time.time()
        with self._lock:
            self._events.append(
                RecordedEvent(arrived, caller, bus, source, detail_type, detail, event_id)
            )
        when = datetime.fromtimestamp(arrived if at is None else at, UTC)
        event = {
            "version": "0",
            "id": event_id,
            "detail-type": detail_type,
            "source": source,
            "account": self._front.account_id,
            "time": when.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "region": self._front.region,
            "resources": resources,
            "detail": detail,
        }
        self._route(bus, event)
        return event_id

    # --- rules and targets ---------------------------------------------------------------------

    def _buses(self) -> Mapping[str, Any]:
        from moto.events.models import events_backends  # noqa: PLC0415 - loads moto's events

        backend = events_backends[self._front.account_id][self._front.region]
        buses: Mapping[str, Any] = backend.event_buses
        return buses

    def _route(self, bus: str, event: dict[str, Any]) -> None:
        for rule in list(self._buses()[bus].rules.values()):
            pattern = rule.event_pattern.dump()
            if rule.state != "ENABLED" or not pattern:
                continue
            try:
                is_wanted = matches(json.loads(pattern), event)
            except PatternError as error:  # EventBridge would have refused the rule
                _LOGGER.error("rule %s: %s", rule.name, error)  # noqa: TRY400 - no traceback
                continue
            if is_wanted:
                for target in list(rule.targets):
                    deliver = partial(self._deliver, target, event)
                    self._background.spawn(deliver, f"rule-{rule.name}")

    def _deliver(self, target: dict[str, Any], event: dict[str, Any]) -> None:
        arn = str(target["Arn"])
        body = _body_for(target, event).encode()
        try:
            self._deliver_with_retries(arn, body, event)
        except Exception as error:
            _LOGGER.warning("event %s did not reach %s: %s", event["id"], arn, error)
            with self._lock:
                self.failed_deliveries.append((arn, str(error)))
            dead_letter_arn = target.get("DeadLetterConfig", {}).get("Arn")
            if dead_letter_arn:
                self._targets["sqs"](dead_letter_arn, body)

    def _deliver_with_retries(self, arn: str, body: bytes, event: dict[str, Any]) -> None:
        """Try a few times: EventBridge does so for up to 24 h, with growing pauses."""
        service = arn.split(":")[2]
        if service == "events":
            self._route(arn.rpartition("/")[2], event)
            return
        for pause_s in (*_RETRY_PAUSES_S, None):
            try:
                self._targets[service](arn, body)
            except (BotoCoreError, ClientError):
                if pause_s is None or self._background.stopping.wait(pause_s):
                    raise
            else:
                return


def _body_for(target: Mapping[str, Any], event: Mapping[str, Any]) -> str:
    """Return what a target gets: its fixed input, its transformed one, or the event."""
    if target.get("Input"):
        return str(target["Input"])
    transformer = target.get("InputTransformer")
    return transformed(transformer, event) if transformer else json.dumps(event)


def transformed(transformer: Mapping[str, Any], event: Mapping[str, Any]) -> str:
    """Return an input transformer's text: `<name>` is the value at the path of that name.

    Paths are plain (`$.detail.a`); what is not there is an empty string, as on AWS.
    """
    text = str(transformer["InputTemplate"])
    for name, path in (transformer.get("InputPathsMap") or {}).items():
        value: Any = event
        for part in str(path).removeprefix("$.").split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        shown = value if isinstance(value, str) else json.dumps(value)
        text = text.replace(f"<{name}>", "" if value is None else shown)
    return text
