"""What the AWS adapters share: client settings, error translation, DynamoDB values.

The adapters know nothing of each other; what two of them need stands here.
"""

import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from boto3.dynamodb.types import TypeDeserializer, TypeSerializer
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    NoRegionError,
    ParamValidationError,
    PartialCredentialsError,
)

from nodemend.contracts.events import MAX_EVENT_BYTES
from nodemend.domain.errors import (
    AwsForbiddenError,
    AwsUnavailableError,
    InvalidInputError,
    NodemendError,
)

if TYPE_CHECKING:
    from mypy_boto3_dynamodb.client import DynamoDBClient

_logger = logging.getLogger(__name__)

Item = dict[str, Any]
"""A DynamoDB item or key in the client's form: `{"pk": {"S": "…"}}`."""

BATCH_GET_KEYS = 100
BATCH_WRITE_ITEMS = 25
"""DynamoDB's own limits per call."""

BATCH_ROUNDS = 8
"""How often what a batch call left unprocessed is asked for again. A full BatchGetItem of 400 KB
items needs 3 rounds, because an answer holds 16 MB."""

_CONDITION_FAILED = "ConditionalCheckFailedException"
_THROTTLED = re.compile(
    r"Throttl|TooManyRequests|RequestLimitExceeded|ProvisionedThroughputExceeded|SlowDown"
    r"|BandwidthLimitExceeded|RequestTimeout|TransactionInProgress"
)
_FORBIDDEN = re.compile(
    r"AccessDenied|Unauthorized|UnrecognizedClient|InvalidClientTokenId|ExpiredToken"
    r"|SignatureDoesNotMatch|NotAuthorized|^Forbidden"
)


def client_config() -> Config:
    """Return the settings of every AWS client.

    botocore is the only one who retries: three attempts in all of at most 9 s each, so that even
    the worst call ends within a function's time-out of 60 s.
    """
    return Config(
        retries={"mode": "standard", "max_attempts": 3}, connect_timeout=3, read_timeout=6
    )


# --- errors -------------------------------------------------------------------------------------


@contextmanager
def translating(action: str) -> Iterator[None]:
    """Turn what botocore raises into the domain's errors.

    Args:
        action: the IAM action of the call, e.g. `dynamodb:PutItem`; every message names it.

    Raises:
        AwsUnavailableError: throttled, 5xx, no answer in time, no connection.
        AwsForbiddenError: IAM, or no credentials at all.
        InvalidInputError: AWS will refuse this request for ever.
    """
    try:
        yield
    except ClientError as error:
        raise translated(action, error) from error
    except ParamValidationError as error:
        raise InvalidInputError(action, str(error), "report this: the request is wrong") from error
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise AwsForbiddenError(f"{action}: {error}") from error
    except NoRegionError as error:
        raise InvalidInputError(action, "no AWS region is set", "set AWS_REGION") from error
    except BotoCoreError as error:
        raise AwsUnavailableError(f"{action}: {error}") from error


def error_code(error: ClientError) -> str:
    """Return the service's error code, or an empty string."""
    return str(error.response.get("Error", {}).get("Code", ""))


def is_throttled(error: ClientError) -> bool:
    """Tell whether the service refused the call for its rate, so that it did nothing."""
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    code = error_code(error)
    return status == 429 or ("Timeout" not in code and bool(_THROTTLED.search(code)))


def translated(action: str, error: ClientError) -> NodemendError:
    """Return the domain's error for a service's answer."""
    code = error_code(error)
    details = error.response.get("Error", {})
    text = f"{action}: {code}: {details.get('Message', '')}"
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if status >= 500 or status == 429 or _THROTTLED.search(code):
        return AwsUnavailableError(text)
    if status in (401, 403) or _FORBIDDEN.search(code):
        return AwsForbiddenError(text)
    return InvalidInputError(
        action,
        f"{code}: {details.get('Message', '')}",
        "check that the deployed resources and this release belong together",
    )


# --- DynamoDB -----------------------------------------------------------------------------------


def stamp(at: datetime) -> str:
    """Return a time as a string whose order is the order of time (always microseconds, UTC).

    Example:
        >>> stamp(datetime(2026, 5, 1, tzinfo=UTC))
        '2026-05-01T00:00:00.000000Z'
    """
    return at.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def parse_stamp(text: str) -> datetime:
    """Return the time that `stamp` wrote."""
    return datetime.fromisoformat(text)


def epoch_s(at: datetime) -> int:
    """Return whole seconds since 1970, as DynamoDB's time to live wants them."""
    return int(at.timestamp())


def encode(value: object) -> Item:
    """Return a JSON-like value as a DynamoDB attribute.

    Floats go through their shortest decimal form and come back exactly. What DynamoDB's numbers
    cannot hold (not a number, infinities, magnitudes beyond 1E-130 and 1E+125) becomes a string,
    which Pydantic reads back into a float.

    Example:
        >>> encode({"value": 79.1, "codes": [79]})
        {'M': {'value': {'N': '79.1'}, 'codes': {'L': [{'N': '79'}]}}}
    """
    return cast("Item", TypeSerializer().serialize(_storable(value)))


def encode_item(values: Mapping[str, Any]) -> Item:
    """Return an item whose attributes are the encoded values."""
    return {name: encode(value) for name, value in values.items()}


def _storable(value: object) -> object:
    if isinstance(value, float):
        fits = math.isfinite(value) and (value == 0 or 1e-120 < abs(value) < 1e120)
        return Decimal(repr(value)) if fits else repr(value)
    if isinstance(value, Mapping):
        return {name: _storable(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_storable(entry) for entry in value]
    return value


def decode_item(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item's attributes as JSON-like values: whole numbers as int, others as float."""
    values = TypeDeserializer()
    return {name: _plain(values.deserialize(attribute)) for name, attribute in item.items()}


def _plain(value: object) -> object:
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return value


def wins(action: str, write: Callable[[], object], *, write_id: str = "") -> bool:
    """Make a conditional write; False if its condition did not hold.

    The SDK repeats a write whose answer was lost. If the first one was carried out, the repetition
    fails on its own result. So the caller stores a `write_id` that no other write has and asks
    for `ReturnValuesOnConditionCheckFailure=ALL_OLD`: an item with our own id means that we won.
    """
    with translating(action):
        try:
            write()
        except ClientError as error:
            if error_code(error) != _CONDITION_FAILED:
                raise
            return bool(write_id) and item_in(error).get("write_id") == {"S": write_id}
    return True


def item_in(error: ClientError) -> Item:
    """Return the item that a failed condition has shown (`ALL_OLD`), or an empty one."""
    item: Item = dict(error.response).get("Item") or {}  # type: ignore[assignment]
    return item


def batch_get(
    client: "DynamoDBClient", table: str, keys: Sequence[Item], *, consistent: bool
) -> Iterator[Item]:
    """Yield the items of these keys that exist, in no order.

    Raises:
        AwsUnavailableError: if DynamoDB leaves keys unprocessed to the end (throttling).
    """
    for start in range(0, len(keys), BATCH_GET_KEYS):
        left: list[Any] = list(keys[start : start + BATCH_GET_KEYS])
        for _ in range(BATCH_ROUNDS):
            with translating("dynamodb:BatchGetItem"):
                answer = client.batch_get_item(
                    RequestItems={table: {"Keys": left, "ConsistentRead": consistent}}
                )
            yield from answer.get("Responses", {}).get(table, [])
            unprocessed = answer.get("UnprocessedKeys", {})
            left = list(unprocessed[table]["Keys"]) if table in unprocessed else []
            if not left:
                break
        else:
            raise AwsUnavailableError(f"dynamodb:BatchGetItem: {len(left)} keys were not processed")


def batch_put(client: "DynamoDBClient", table: str, items: Iterable[Item]) -> None:
    """Put items, unconditionally; no two may have the same key.

    Raises:
        AwsUnavailableError: if DynamoDB leaves items unprocessed to the end (throttling).
    """
    puts: list[Any] = [{"PutRequest": {"Item": item}} for item in items]
    for start in range(0, len(puts), BATCH_WRITE_ITEMS):
        left: Sequence[Any] = puts[start : start + BATCH_WRITE_ITEMS]
        for _ in range(BATCH_ROUNDS):
            with translating("dynamodb:BatchWriteItem"):
                answer = client.batch_write_item(RequestItems={table: left})
            left = answer.get("UnprocessedItems", {}).get(table, [])
            if not left:
                break
        else:
            raise AwsUnavailableError(
                f"dynamodb:BatchWriteItem: {len(left)} items were not processed"
            )


# --- EventBridge --------------------------------------------------------------------------------

_SHORTEST_TEXT = 256


def encode_detail(detail: Mapping[str, Any]) -> str:
    """Return an event's detail as JSON of at most 64 KB.

    One that is longer is cut, not lost: its largest list or text is halved until it fits. Counts
    beside a list stay exact, and no list becomes empty.

    Raises:
        InvalidInputError: if nothing is left to cut.
    """
    text = _compact(detail)
    if len(text.encode()) <= MAX_EVENT_BYTES:
        return text
    _logger.warning("event %s is cut to %d bytes", detail.get("event_id", ""), MAX_EVENT_BYTES)
    document = json.loads(text)
    while (size := len(text.encode())) > MAX_EVENT_BYTES:
        largest = max(_cuts(document), key=lambda cut: cut[0], default=None)
        if largest is None:
            raise InvalidInputError("event", f"has {size} bytes", f"keep below {MAX_EVENT_BYTES}")
        largest[1]()
        text = _compact(document)
    return text


def _cuts(holder: object) -> Iterator[tuple[int, Callable[[], None]]]:
    """Yield (bytes, what halves it) for each list and each long text, at any depth."""
    if isinstance(holder, dict):
        entries = list(holder.items())
    elif isinstance(holder, list):
        entries = list(enumerate(holder))
    else:
        return
    for name, value in entries:
        if isinstance(value, str) and len(value) > _SHORTEST_TEXT:
            shorter: object = value[: len(value) // 2] + "…"
        elif isinstance(value, list) and len(value) > 1:
            shorter = value[: len(value) // 2]
        else:
            shorter = None
        if shorter is not None:
            cut = partial(holder.__setitem__, name, shorter)
            yield len(_compact(value).encode()), cut
        yield from _cuts(value)


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
