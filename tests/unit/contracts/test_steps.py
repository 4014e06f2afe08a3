"""Inputs and results of the state machine's tasks, and of the functions beside it."""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from nodemend.contracts import steps
from nodemend.contracts.dispatch import DispatchEvent, DispatchHint
from nodemend.contracts.scan import ScanGpuHealthRequest
from nodemend.contracts.steps import (
    HAND_EXAMPLE,
    AdmitRemediationRequest,
    CloseIncidentRequest,
    EscalateIncidentRequest,
    RemediateByHand,
    RemediateIncident,
    StepRequest,
)
from nodemend.contracts.watch import WatchEvent
from nodemend.domain.errors import InvalidInputError
from nodemend.domain.faults import Family

HAND = {
    "cluster": "gpu-prod",
    "node": "ip-10-0-1-5.ec2.internal",
    "reason": "the job said so",
    "requested_by": "alice",
}
EXECUTION = {"arn": "arn:aws:states:e", "name": "01INCIDENT"}


def parse(given: object, name: str = "01INCIDENT") -> RemediateByHand | RemediateIncident:
    execution = {**EXECUTION, "name": name}
    request = AdmitRemediationRequest.model_validate({"execution": execution, "input": given})
    return request.parse_input()


def test_what_a_person_types_is_read() -> None:
    parsed = parse(HAND)
    assert isinstance(parsed, RemediateByHand)
    assert parsed.model_dump() == {"schema_version": 1, **HAND}


def test_the_example_in_every_refusal_is_itself_accepted() -> None:
    assert isinstance(
        parse(RemediateByHand.model_validate_json(HAND_EXAMPLE).model_dump()), RemediateByHand
    )


def test_what_the_dispatcher_starts_with_is_read() -> None:
    parsed = parse({"schema_version": 1, "incident_id": "01INCIDENT"})
    assert parsed == RemediateIncident(schema_version=1, incident_id="01INCIDENT")


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in HAND.items() if key != name}


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "cluster"),
        (without("cluster"), "cluster"),
        (without("node"), "node"),
        (without("reason"), "reason"),
        (without("requested_by"), "requested_by"),
        ({**HAND, "cluster": ""}, "cluster"),
        ({**HAND, "cluster": 7}, "cluster"),
        ({**HAND, "cluster": None}, "cluster"),
        ({**HAND, "node": ""}, "node"),
        ({**HAND, "node": ["a"]}, "node"),
        ({**HAND, "node": "IP-10-0-1-5"}, "node"),
        ({**HAND, "node": "a b"}, "node"),
        ({**HAND, "node": "a/../b"}, "node"),
        ({**HAND, "node": "a\n"}, "node"),
        ({**HAND, "node": "a" * 254}, "node"),
        ({**HAND, "reason": "no"}, "reason"),
        ({**HAND, "reason": "x" * 501}, "reason"),
        ({**HAND, "requested_by": ""}, "requested_by"),
        ({**HAND, "requested_by": "x" * 201}, "requested_by"),
        ({**HAND, "nodes": "x"}, "nodes"),
        ({**HAND, "schema_version": 2}, "schema_version"),
        ({"incident_id": "01X"}, "schema_version"),
        ({"schema_version": 1, "incident_id": ""}, "incident_id"),
        ({"schema_version": 1, "incident_id": "a b"}, "incident_id"),
        ({"schema_version": 1, "incident_id": 7}, "incident_id"),
        ({"schema_version": 1, "incident_id": "01X", "node": "n"}, "node"),
    ],
)
def test_a_wrong_input_names_the_field_and_the_remedy(given: object, field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        parse(given)
    assert caught.value.field == field
    assert caught.value.problem
    assert str(caught.value).endswith(f"Remedy: use {HAND_EXAMPLE}.")


@pytest.mark.parametrize("given", [None, "restart", 1, True, [], [HAND]])
def test_an_input_that_is_no_object_is_refused_with_an_example(given: object) -> None:
    with pytest.raises(InvalidInputError, match="input: is no JSON object"):
        parse(given)


@pytest.mark.parametrize("name", ["my.run", "a b", "é", "x" * 81, ""])
def test_an_execution_name_that_no_later_step_could_carry_is_refused_first(name: str) -> None:
    with pytest.raises(InvalidInputError, match="execution name: "):
        parse(HAND, name)
    with pytest.raises(ValidationError):
        StepRequest.model_validate({"incident_id": name, "execution": EXECUTION})


@pytest.mark.parametrize("name", ["hand-1", "01TEST_x", "x" * 80, "9f0a-uuid-of-the-console"])
def test_every_name_that_is_accepted_is_an_id_for_the_later_steps(name: str) -> None:
    assert isinstance(parse(HAND, name), RemediateByHand)
    request = StepRequest.model_validate({"incident_id": name, "execution": EXECUTION})
    assert request.incident_id == name


def test_an_unknown_field_in_a_steps_input_is_a_mistake_in_the_state_machine() -> None:
    with pytest.raises(ValidationError):
        StepRequest.model_validate({"incident_id": "x", "execution": EXECUTION, "more": 1})


def test_a_failure_is_read_as_step_functions_spells_it() -> None:
    request = EscalateIncidentRequest.model_validate(
        {"incident_id": "x", "execution": EXECUTION, "failure": {"Error": "E", "Cause": "c"}}
    )
    assert (request.failure.error, request.failure.cause) == ("E", "c")
    without_cause = EscalateIncidentRequest.model_validate(
        {"incident_id": "x", "execution": EXECUTION, "failure": {"Error": "States.Timeout"}}
    )
    assert without_cause.failure.cause == ""


def test_the_close_takes_whatever_the_execution_carries() -> None:
    for state, failure in (
        ({}, None),
        ({"incident_id": "x", "next": "close", "wait_s": 3}, None),
        ({"input": {"a": 1}, "failure": {"Error": "E"}}, "E"),
    ):
        request = CloseIncidentRequest.model_validate(
            {"incident_id": "x", "execution": EXECUTION, "state": state}
        )
        assert (request.state.failure.error if request.state.failure else None) == failure
    plain = CloseIncidentRequest.model_validate({"incident_id": "x", "execution": EXECUTION})
    assert plain.state.failure is None


RESULTS = [
    model
    for name, model in vars(steps).items()
    if name.endswith("Result") and isinstance(model, type) and issubclass(model, BaseModel)
]


@pytest.mark.parametrize("model", RESULTS, ids=lambda model: model.__name__)
def test_every_result_says_whose_it_is_and_most_what_comes_next(model: type[BaseModel]) -> None:
    assert "incident_id" in model.model_fields
    if model is not steps.CloseIncidentResult:
        assert "next" in model.model_fields
    if "wait_s" in model.model_fields:
        with pytest.raises(ValidationError):
            model.model_validate({"incident_id": "x", "next": "wait", "wait_s": 0})
        with pytest.raises(ValidationError):
            model.model_validate({"incident_id": "x", "next": "wait", "wait_s": 1.5})


def test_there_is_a_result_for_each_step() -> None:
    assert len(RESULTS) == 11


# --- the other functions --------------------------------------------------------------------------


def test_a_batch_of_the_queue_becomes_hints_and_the_schedule_none() -> None:
    hint = DispatchHint(cluster="a", incident_id="01X")
    event = {"Records": [{"body": hint.model_dump_json(), "messageId": "m"}]}
    assert DispatchEvent.model_validate(event).to_request().hints == (hint,)
    assert DispatchEvent.model_validate({}).to_request().hints == ()


@pytest.mark.parametrize("body", ["", "{}", "x", '{"cluster": "a", "more": 1}'])
def test_a_message_that_is_no_hint_is_refused(body: str) -> None:
    with pytest.raises(ValidationError):
        DispatchEvent.model_validate({"Records": [{"body": body}]}).to_request()


def test_a_status_event_is_read_whatever_aws_adds_to_it() -> None:
    detail = {
        "executionArn": "arn:e",
        "stateMachineArn": "arn:m",
        "name": "01X",
        "status": "FAILED",
        "startDate": 1,
    }
    request = WatchEvent.model_validate({"detail": detail, "version": "0"}).to_request()
    assert request.ended is not None
    assert (request.ended.name, request.ended.status) == ("01X", "FAILED")
    assert WatchEvent.model_validate({}).to_request().ended is None


@pytest.mark.parametrize("given", [{}, {"family": "x"}, {"family": "ecc", "more": 1}])
def test_a_scan_of_an_unknown_family_fails_at_once(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ScanGpuHealthRequest.model_validate(given)
    assert ScanGpuHealthRequest.model_validate({"family": "thermal"}).family is Family.THERMAL
