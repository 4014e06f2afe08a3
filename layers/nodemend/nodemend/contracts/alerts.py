"""What alert managers send: SNS envelopes, JSON by template or webhook, the default text message.

Two things are never believed: text that could have been put into an annotation by whoever wrote
it, and the rest of a message that cannot be read in full. Of such a message only its attributes
count, which come from the alert manager's own configuration.
"""

import json
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from nodemend.domain.alerts import HINT_NAMES, Alert, AlertStatus, Notification, digest
from nodemend.domain.errors import InvalidInputError
from nodemend.domain.reasons import Reason

TEMPLATE = "docs/alertmanager.example.yaml"


class _Open(BaseModel):
    """Other people's documents: fields that we do not know are left alone."""

    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True)


class SqsAttribute(_Open):
    """A message attribute as Lambda hands it on (raw message delivery)."""

    string_value: str | None = Field(default=None, alias="stringValue")


class ReceiveAlertRequest(_Open):
    """One record of the alert queue."""

    body: str
    message_id: str = Field(default="", alias="messageId")
    attributes: dict[str, str] = {}
    message_attributes: dict[str, SqsAttribute] = Field(default={}, alias="messageAttributes")

    @property
    def sent_at(self) -> datetime | None:
        """When the queue took the message."""
        text = self.attributes.get("SentTimestamp", "")
        if not re.fullmatch(r"\d{1,14}", text):
            return None
        return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=int(text))


class ReceiveAlertResult(BaseModel):
    """What became of the message's alerts, for the log."""

    firing: int = 0
    announced: int = Field(default=0, description="Fault events sent.")
    outcomes: dict[str, int] = {}


class SnsAttribute(_Open):
    """A message attribute inside an SNS envelope."""

    value: str = Field(default="", alias="Value")


class SnsEnvelope(_Open):
    """An SNS message as it lies in a queue without raw message delivery."""

    type: Literal["Notification", "SubscriptionConfirmation", "UnsubscribeConfirmation"] = Field(
        alias="Type"
    )
    topic_arn: str = Field(alias="TopicArn")
    message: str = Field(alias="Message")
    subject: str | None = Field(default=None, alias="Subject")
    timestamp: str = Field(default="", alias="Timestamp")
    message_attributes: dict[str, SnsAttribute] = Field(default={}, alias="MessageAttributes")

    @property
    def published_at(self) -> datetime | None:
        """When SNS took the message; however late it is delivered, this stays."""
        try:
            return parse_time(self.timestamp)
        except ValueError:
            return None


class AlertDocument(_Open):
    """One alert of a JSON message. Annotations are not read at all: they are prose."""

    status: AlertStatus | None = None
    labels: dict[str, str] = {}
    starts_at: datetime | None = Field(default=None, alias="startsAt")
    fingerprint: str = ""

    @field_validator("status", mode="before")
    @classmethod
    def _any_case(cls, value: object) -> object:
        return (value.lower() or None) if isinstance(value, str) else value

    @field_validator("labels", mode="before")
    @classmethod
    def _absent_is_empty(cls, value: object) -> object:
        return {} if value is None else value

    @field_validator("starts_at", mode="before")
    @classmethod
    def _go_or_rfc(cls, value: object) -> object:
        return parse_time(value) if isinstance(value, str) else value


class GroupDocument(_Open):
    """An alert group: webhook version 4, Grafana's, AWS's documented template, and ours."""

    status: AlertStatus | None = None
    alerts: tuple[AlertDocument, ...]
    truncated_alerts: int = Field(default=0, alias="truncatedAlerts")

    @field_validator("status", mode="before")
    @classmethod
    def _any_case(cls, value: object) -> object:
        return (value.lower() or None) if isinstance(value, str) else value


# --- times --------------------------------------------------------------------------------------

_TIME = re.compile(
    r"(?P<date>\d{4}-\d\d-\d\d)[ T](?P<time>\d\d:\d\d:\d\d)(?:[.,](?P<fraction>\d{1,9}))?"
    r" ?(?P<zone>[Zz]|[+-]\d\d:?\d\d)"
    r"(?: [A-Za-z]{1,6}| [+-]\d{2,4})?"  # Go repeats the zone by name, or by number without one
    r"(?: m=[+-][\d.]+)?"  # Go's monotonic clock
)


def parse_time(text: str) -> datetime | None:
    """Return a time in RFC 3339 or as Go prints one; None for Go's zero time and for no text.

    Nanoseconds are cut to microseconds, so that both forms of one time are equal.

    Example:
        >>> parse_time("2026-11-30 17:32:05.123456789 +0000 UTC").isoformat()
        '2026-11-30T17:32:05.123456+00:00'
        >>> parse_time("0001-01-01T00:00:00Z") is None
        True

    Raises:
        ValueError: if it is neither.
    """
    if not text.strip():
        return None
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise ValueError("is no time: write it in RFC 3339")
    if match["date"].startswith("0001-"):
        return None
    micro = (match["fraction"] or "0").ljust(6, "0")[:6]
    zone = "+00:00" if match["zone"] in "Zz" else match["zone"]
    try:
        at = datetime.fromisoformat(f"{match['date']}T{match['time']}.{micro}{zone}")
        return at.astimezone(UTC)
    except OverflowError as error:
        raise ValueError("is no time of this world") from error


# --- the message --------------------------------------------------------------------------------


def parse_notification(request: ReceiveAlertRequest) -> Notification:
    """Read one record of the alert queue, with or without SNS's envelope around the message.

    Raises:
        InvalidInputError: naming what is wrong and what would be right; the message is worth
            nothing then, not even as a hint.
    """
    envelope = _envelope(request.body)
    if envelope is None:
        given = {name: a.string_value or "" for name, a in request.message_attributes.items()}
        message, subject, sent_at = request.body, "", request.sent_at
    else:
        if envelope.type != "Notification":
            return Notification()
        given = {name: a.value for name, a in envelope.message_attributes.items()}
        message, subject = envelope.message, envelope.subject or ""
        sent_at = envelope.published_at or request.sent_at
    hints = {name: value for name, value in given.items() if name in HINT_NAMES and value}
    try:
        alerts, incomplete = _content(message, subject)
    except InvalidInputError as error:
        alerts = ()
        incomplete = _salvaged(error, hints, given)
    if _is_truncated(given):
        incomplete = Reason("truncated", "the message was cut, so alerts are missing in it")
    return Notification(
        alerts=alerts,
        incomplete=incomplete,
        hints=hints,
        sent_at=sent_at,
        content_key=digest(message),
    )


def _envelope(body: str) -> SnsEnvelope | None:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or not {"Type", "TopicArn", "Message"} <= set(document):
        return None
    try:
        return SnsEnvelope.model_validate(document)
    except ValidationError as error:
        raise _invalid("", error, "send the topic's messages to the queue as SNS makes them") from (
            error
        )


def _is_truncated(given: Mapping[str, str]) -> bool:
    return given.get("truncated", "").lower() == "true"


def _salvaged(
    error: InvalidInputError, hints: Mapping[str, str], given: Mapping[str, str]
) -> Reason:
    """Return why a message that cannot be read is a hint all the same.

    Raises:
        InvalidInputError: if its attributes say nothing either.
    """
    if not hints and not _is_truncated(given):
        raise error
    return Reason("unreadable", f"{error.field}: {error.problem}")


def _content(message: str, subject: str) -> tuple[tuple[Alert, ...], Reason | None]:
    text = message.strip()
    if text.startswith(("{", "[")):
        return _from_json(text)
    if any(line in _SECTIONS for line in message.split("\n")):
        return _from_text(message, subject)
    if not text or text.startswith("Error - "):
        problem = f"AMP found nothing that it could send ({text or 'it is empty'})"
        raise InvalidInputError("Message", problem, f"repair the template: see {TEMPLATE}")
    raise InvalidInputError(
        "Message",
        "is neither JSON nor the default text of an alert manager",
        f"use the message template of {TEMPLATE}",
    )


# --- JSON ---------------------------------------------------------------------------------------

_GO_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_REPLACEMENT = "\ufffd"


def _from_json(text: str) -> tuple[tuple[Alert, ...], Reason | None]:
    document = _load(text)
    if not isinstance(document, dict):
        raise InvalidInputError("Message", "is no JSON object", f"use the template of {TEMPLATE}")
    try:
        group = GroupDocument.model_validate(document)
    except ValidationError as error:
        raise _invalid("", error, f"use the message template of {TEMPLATE}") from error
    alerts = tuple(
        Alert(
            status=_status(alert, group, number),
            labels=alert.labels,
            starts_at=alert.starts_at,
            fingerprint=alert.fingerprint,
        )
        for number, alert in enumerate(group.alerts)
    )
    if group.truncated_alerts > 0:
        why = f"{group.truncated_alerts} alerts of the group are not in the message"
        return alerts, Reason("truncated", why)
    return alerts, None


def _status(alert: AlertDocument, group: GroupDocument, number: int) -> AlertStatus:
    if alert.status is not None:
        return alert.status
    # A group that fires may hold resolved alerts; of one that is resolved every alert is.
    if group.status is not None and (
        group.status is AlertStatus.RESOLVED or len(group.alerts) == 1
    ):
        return group.status
    raise InvalidInputError(
        f"alerts.{number}.status", "is missing", f"use the message template of {TEMPLATE}"
    )


def _load(text: str) -> Any:  # noqa: ANN401 - any JSON value
    """Parse JSON, or JSON whose strings Go's `printf "%q"` has written.

    The two differ in the escapes of control characters and of what Unicode cannot print. A key
    that stands twice is refused: an unescaped annotation could have brought the second.
    """
    for candidate in (text, _GO_ESCAPE.sub(_as_json_escape, text)):
        try:
            return json.loads(candidate, object_pairs_hook=_without_duplicates)
        except (ValueError, RecursionError) as error:
            problem = error
    told = problem.msg if isinstance(problem, json.JSONDecodeError) else str(problem)
    raise InvalidInputError(
        "Message",
        f"is no valid JSON: {told}",
        f'write every value with printf "%q", as the template of {TEMPLATE} does',
    ) from problem


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return document


def _as_json_escape(match: re.Match[str]) -> str:
    byte, rune, character = match.groups()
    if byte is not None:
        code = int(byte, 16)
        # Above ASCII it is a byte that was no UTF-8.
        return f"\\u{code:04x}" if code < 0x80 else _REPLACEMENT
    if rune is not None:
        code = int(rune, 16)
        return json.dumps(chr(code))[1:-1] if code <= 0x10FFFF else _REPLACEMENT
    return {"a": "\\u0007", "v": "\\u000b", "'": "'"}.get(character, match.group(0))


def _invalid(prefix: str, error: ValidationError, remedy: str) -> InvalidInputError:
    problem = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in (*filter(None, [prefix]), *problem["loc"])) or "Message"
    return InvalidInputError(field, str(problem["msg"]), remedy)


# --- the default text ---------------------------------------------------------------------------

_FIRING, _RESOLVED = "Alerts Firing:", "Alerts Resolved:"
_SECTIONS = frozenset({_FIRING, _RESOLVED})
_LABELS, _ANNOTATIONS, _SOURCE = "Labels:", "Annotations:", "Source:"
_FRAME = _SECTIONS | {_LABELS, _ANNOTATIONS}
_LABEL = re.compile(r" - ([A-Za-z_]\w*) = (.*)", re.ASCII)
_COUNT = re.compile(r"\[FIRING:(\d+)\]")


class _At(Enum):
    """Where in the text a line stands."""

    HEADER = 0
    """The annotations that all alerts share, in one run of text."""
    BETWEEN = 1
    LABELS = 2
    ANNOTATIONS = 3


class _ForgeableError(ValueError):
    """The text has more than one reading."""


def _from_text(message: str, subject: str) -> tuple[tuple[Alert, ...], Reason | None]:
    """Read Alertmanager's default text, if it has one reading only.

    Values may contain newlines, so an annotation can imitate labels, blocks, even sections. Labels
    stand first in a block, and the first block stands first in its section: what an annotation
    imitates comes after that and shows as a part out of place or as a block too many. Where
    neither can be told, no label of the message is believed.
    """
    try:
        blocks = _blocks(message.split("\n"))
        _refuse_blocks_too_many(blocks, subject)
    except _ForgeableError as error:
        return (), Reason("ambiguous_text", str(error))
    return tuple(Alert(status, labels) for status, labels in blocks), None


def _blocks(lines: Iterable[str]) -> list[tuple[AlertStatus, dict[str, str]]]:
    found: list[tuple[AlertStatus, dict[str, str]]] = []
    sections: list[AlertStatus] = []
    at = _At.HEADER
    for line in lines:
        if at is _At.BETWEEN and line == _LABELS and sections:
            found.append((sections[-1], {}))
            at = _At.LABELS
        elif at is _At.LABELS:
            at = _At.ANNOTATIONS if line == _ANNOTATIONS else _label(found[-1][1], line)
        elif at is _At.ANNOTATIONS:
            at = _annotation(line)
        elif line in _FRAME or (at is _At.BETWEEN and line.strip()):
            at = _section(line, sections)
    if at is not _At.BETWEEN or not found:
        raise _ForgeableError("it ends within an alert")
    return found


def _annotation(line: str) -> _At:
    if line in _FRAME:
        raise _ForgeableError("an annotation imitates the frame of an alert")
    return _At.BETWEEN if line.startswith(_SOURCE) else _At.ANNOTATIONS


def _section(line: str, sections: list[AlertStatus]) -> _At:
    """Go into a section; each stands there once at most, what fires first."""
    if line == _FIRING and not sections:
        sections.append(AlertStatus.FIRING)
    elif line == _RESOLVED and AlertStatus.RESOLVED not in sections:
        sections.append(AlertStatus.RESOLVED)
    else:
        raise _ForgeableError("a line stands where none can")
    return _At.BETWEEN


def _label(labels: dict[str, str], line: str) -> _At:
    """Take a label; Alertmanager prints `alertname` first and the others by name."""
    match = _LABEL.fullmatch(line)
    if match is None:
        raise _ForgeableError("a label's value has more than one line")
    name, value = match.groups()
    if labels and _rank(name) <= _rank(next(reversed(labels))):
        raise _ForgeableError("the labels of an alert are out of order")
    labels[name] = value
    return _At.LABELS


def _rank(name: str) -> tuple[bool, str]:
    return name != "alertname", name


def _refuse_blocks_too_many(blocks: list[tuple[AlertStatus, dict[str, str]]], subject: str) -> None:
    firing = sum(status is AlertStatus.FIRING for status, _ in blocks)
    counted = _COUNT.match(subject)
    if counted is not None and int(counted[1]) != firing:
        raise _ForgeableError(f"the subject counts {counted[1]} firing alerts, the text {firing}")
    # The first block of all is real. Another may be an annotation's, or may be real and pushed
    # into another section by one, unless the default subject counts those that fire; and the count
    # tells only while no section could have taken as many as the annotation added.
    if firing and len(blocks) > 1 and (counted is None or 1 < firing < len(blocks)):
        raise _ForgeableError(f"whether {firing} alerts fire, or others, cannot be told")
