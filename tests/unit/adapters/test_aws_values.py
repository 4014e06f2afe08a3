"""Errors, values and event details on their way to AWS and back."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass, replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from botocore.exceptions import (
    ClientError,
    ConnectTimeoutError,
    NoCredentialsError,
    NoRegionError,
    ParamValidationError,
    ReadTimeoutError,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nodemend.adapters import _aws, incidents_dynamodb
from nodemend.adapters._aws import (
    client_config,
    decode_item,
    encode_detail,
    encode_item,
    parse_stamp,
    stamp,
    translating,
    wins,
)
from nodemend.contracts.events import MAX_EVENT_BYTES
from nodemend.domain.errors import AwsForbiddenError, AwsUnavailableError, InvalidInputError
from nodemend.domain.incidents import Incident
from tests.fakes.examples import full

# --- errors -------------------------------------------------------------------------------------


def client_error(code: str, status: int = 400) -> ClientError:
    return ClientError(
        {
            "Error": {"Code": code, "Message": "told to"},
            "ResponseMetadata": {"HTTPStatusCode": status},  # type: ignore[typeddict-item]
        },
        "PutItem",
    )


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (client_error("ThrottlingException"), AwsUnavailableError),
        (client_error("ProvisionedThroughputExceededException"), AwsUnavailableError),
        (client_error("RequestLimitExceeded"), AwsUnavailableError),
        (client_error("TooManyRequestsException"), AwsUnavailableError),
        (client_error("Anything", 429), AwsUnavailableError),
        (client_error("InternalServerError", 500), AwsUnavailableError),
        (client_error("AccessDenied"), AwsForbiddenError),
        (client_error("AccessDeniedException", 400), AwsForbiddenError),
        (client_error("UnauthorizedOperation"), AwsForbiddenError),
        (client_error("ExpiredTokenException"), AwsForbiddenError),
        (client_error("KMSAccessDeniedException"), AwsForbiddenError),
        (client_error("Anything", 403), AwsForbiddenError),
        (client_error("ValidationException"), InvalidInputError),
        (client_error("ResourceNotFoundException", 404), InvalidInputError),
        (ConnectTimeoutError(endpoint_url="https://aws.test"), AwsUnavailableError),
        (ReadTimeoutError(endpoint_url="https://aws.test"), AwsUnavailableError),
        (NoCredentialsError(), AwsForbiddenError),
        (NoRegionError(), InvalidInputError),
        (ParamValidationError(report="TableName is missing"), InvalidInputError),
    ],
)
def test_what_botocore_raises_becomes_the_domains_error_with_the_action_in_it(
    raised: Exception, expected: type[Exception]
) -> None:
    with (
        pytest.raises(expected, match="dynamodb:PutItem") as caught,
        translating("dynamodb:PutItem"),
    ):
        raise raised
    assert caught.value.__cause__ is raised


def test_other_errors_pass_unchanged() -> None:
    with pytest.raises(KeyError), translating("dynamodb:PutItem"):
        raise KeyError("a bug")


def raising(error: ClientError) -> Callable[[], object]:
    def write() -> object:
        raise error

    return write


def test_a_condition_that_does_not_hold_loses_and_other_errors_are_raised() -> None:
    assert wins("dynamodb:PutItem", lambda: None)
    assert not wins("dynamodb:PutItem", raising(client_error("ConditionalCheckFailedException")))
    with pytest.raises(AwsForbiddenError):
        wins("dynamodb:PutItem", raising(client_error("AccessDeniedException")))


@pytest.mark.parametrize(("stored", "is_won"), [("mine", True), ("theirs", False), ("", False)])
def test_a_lost_condition_counts_as_won_only_if_the_stored_write_is_our_own(
    stored: str, is_won: bool
) -> None:
    error = client_error("ConditionalCheckFailedException")
    error.response["Item"] = {"write_id": {"S": stored}} if stored else {}  # type: ignore[typeddict-unknown-key]
    assert wins("dynamodb:PutItem", raising(error), write_id="mine") is is_won
    assert not wins("dynamodb:PutItem", raising(error))


def test_every_client_has_bounded_attempts_and_times() -> None:
    config: Any = client_config()
    assert config.retries["mode"] == "standard"
    assert config.retries["max_attempts"] == 3
    assert (config.connect_timeout, config.read_timeout) == (3, 6)


# --- values -------------------------------------------------------------------------------------


@given(st.floats(allow_nan=False))
def test_any_float_comes_back_exactly(value: float) -> None:
    back = decode_item(encode_item({"value": value}))["value"]
    assert float(back) == value


def test_not_a_number_comes_back_as_such() -> None:
    assert math.isnan(float(decode_item(encode_item({"value": math.nan}))["value"]))


@given(st.datetimes(timezones=st.just(UTC)), st.datetimes(timezones=st.just(UTC)))
def test_stamps_sort_as_times_do_and_come_back_exactly(one: datetime, two: datetime) -> None:
    assert (stamp(one) < stamp(two)) == (one < two)
    assert parse_stamp(stamp(one)) == one


def test_a_stamp_is_in_utc_whatever_the_zone() -> None:
    at = datetime(2026, 5, 1, 12, 0, tzinfo=timezone(timedelta(hours=2)))
    assert stamp(at) == "2026-05-01T10:00:00.000000Z"


_VALUES: dict[Any, st.SearchStrategy[Any]] = {
    datetime: st.datetimes(timezones=st.just(UTC)),
    str: st.text(max_size=20),
    int: st.integers(-(10**30), 10**30),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    type(None): st.none(),
}


def any_of(kind: Any) -> st.SearchStrategy[Any]:
    """Return any value of a type, all fields of a dataclass included: those of later releases too.

    hypothesis resolves types through one registry per process; this keeps other suites' as it is.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if kind in _VALUES:
        return _VALUES[kind]
    if isinstance(kind, type) and is_dataclass(kind):
        return st.builds(kind, **{name: any_of(one) for name, one in get_type_hints(kind).items()})
    if origin is tuple and parts[-1] is Ellipsis:
        return st.lists(any_of(parts[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(any_of, parts))
    if origin is Mapping:
        return st.dictionaries(*map(any_of, parts), max_size=3)
    if parts:
        return st.one_of(*map(any_of, parts))
    return st.sampled_from(list(kind))


def incidents() -> st.SearchStrategy[Incident]:
    fields = get_type_hints(Incident)
    del fields["new_events"]
    return st.builds(Incident, **{name: any_of(kind) for name, kind in fields.items()})


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.deferred(incidents))
def test_any_incident_survives_the_store(incident: Incident) -> None:
    assert through_the_store(incident) == incident


def test_the_full_example_survives_the_store() -> None:
    assert through_the_store(full()) == full()


def through_the_store(incident: Incident) -> Incident:
    attributes = incidents_dynamodb._attributes(incident, "write")
    return incidents_dynamodb._incident_of({"pk": {"S": "INCIDENT#x"}, **attributes})


def test_a_value_that_is_no_number_survives_in_a_finding() -> None:
    incident = full()
    evidence = replace(incident.findings[0].evidence, value=math.inf)
    odd = replace(incident, findings=(replace(incident.findings[0], evidence=evidence),))
    assert through_the_store(odd) == odd


# --- event details ------------------------------------------------------------------------------


def test_a_detail_is_compact_json_in_readable_text() -> None:
    assert encode_detail({"a": [1, 2.5], "text": "é"}) == '{"a":[1,2.5],"text":"é"}'


def test_a_detail_of_exactly_64_kilobytes_is_not_cut() -> None:
    detail = {"text": "x" * (MAX_EVENT_BYTES - len('{"text":""}'))}
    assert json.loads(encode_detail(detail)) == detail


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 4000), st.integers(1, 200), st.integers(0, 40_000), st.sampled_from(["x", "日"])
)
def test_a_large_detail_fits_afterwards_and_stays_valid(
    pods: int, causes: int, text: int, letter: str
) -> None:
    detail = {
        "event_id": "event-1",
        "evict": [f"namespace/pod-{number}" for number in range(pods)],
        "evict_count": pods,
        "blocked": [{"pod": "p", "cause": letter * 500, "budgets": ["b"]}] * causes,
        "reason": {"code": "blocked", "text": letter * text},
    }
    cut = json.loads(encode_detail(detail))
    assert len(encode_detail(detail).encode()) <= MAX_EVENT_BYTES
    assert set(cut) == set(detail)
    assert (cut["event_id"], cut["evict_count"]) == ("event-1", pods)
    assert cut["evict"] == detail["evict"][: len(cut["evict"])]  # type: ignore[index]
    assert cut["evict"]
    assert cut["blocked"]
    assert all(set(one) == {"pod", "cause", "budgets"} for one in cut["blocked"])
    assert cut["reason"]["code"] == "blocked"


def test_a_detail_in_which_nothing_can_be_cut_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="keep below 65536"):
        encode_detail({"labels": {f"label-{number}": "x" * 256 for number in range(400)}})


def test_the_limits_are_those_of_dynamodb() -> None:
    assert (_aws.BATCH_GET_KEYS, _aws.BATCH_WRITE_ITEMS) == (100, 25)
