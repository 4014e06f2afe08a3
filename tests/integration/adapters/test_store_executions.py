"""The suites of the Executions and DispatchQueue ports: the fakes, Step Functions and SQS."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from moto import mock_aws

from nodemend.adapters.dispatch_queue_sqs import SqsDispatchQueue
from nodemend.adapters.executions_stepfunctions import StepFunctionsExecutions
from nodemend.application.ports import DispatchQueue, Executions, ExecutionStatus
from nodemend.contracts.dispatch import DispatchHint
from nodemend.domain.errors import AwsForbiddenError, AwsUnavailableError, InvalidInputError
from tests.fakes.aws import Wire, aws_client
from tests.fakes.control import STATE_MACHINE_ARN, MemoryExecutions
from tests.fakes.messages import MemoryDispatchQueue


@pytest.fixture
def states() -> Iterator[Any]:
    with mock_aws():
        client = aws_client("stepfunctions")
        client.create_state_machine(
            name="nodemend-remediate-node",
            roleArn="arn:aws:iam::123456789012:role/states",
            definition='{"StartAt": "Wait", "States": {"Wait": {"Type": "Succeed"}}}',
        )
        yield client


@pytest.fixture
def step_functions(states: Any) -> StepFunctionsExecutions:
    return StepFunctionsExecutions(state_machine_arn=STATE_MACHINE_ARN, client=states)


@dataclass
class Harness:
    """Executions of one kind, and the hand that stops one."""

    executions: Executions
    stop: Callable[[str], None]


@pytest.fixture(params=["memory", "stepfunctions"])
def harness(request: pytest.FixtureRequest) -> Harness:
    if request.param == "memory":
        memory = MemoryExecutions()
        return Harness(
            memory, lambda incident_id: memory.end(incident_id, "ABORTED", "Stopped", "by hand")
        )
    executions: StepFunctionsExecutions = request.getfixturevalue("step_functions")
    client = request.getfixturevalue("states")

    def stop(incident_id: str) -> None:
        arn = executions.arn_of(incident_id)
        client.stop_execution(executionArn=arn, error="Stopped", cause="by hand")

    return Harness(executions, stop)


def test_an_execution_has_its_incidents_name(harness: Harness) -> None:
    arn = harness.executions.start("01A")
    assert arn == harness.executions.arn_of("01A")
    assert arn.endswith(":execution:nodemend-remediate-node:01A")


@pytest.mark.case("R32")
def test_a_second_start_returns_the_execution_that_runs_already(harness: Harness) -> None:
    assert harness.executions.start("01A") == harness.executions.start("01A")


def test_a_start_after_the_end_returns_the_execution_that_there_was(harness: Harness) -> None:
    arn = harness.executions.start("01A")
    harness.stop("01A")
    assert harness.executions.start("01A") == arn
    status = harness.executions.status(arn)
    assert status is not None
    assert not status.is_running


def test_a_started_execution_runs_and_a_stopped_one_does_not(harness: Harness) -> None:
    arn = harness.executions.start("01A")
    status = harness.executions.status(arn)
    assert status is not None
    assert status.is_running
    harness.stop("01A")
    status = harness.executions.status(arn)
    assert status is not None
    assert status.status == "ABORTED"
    assert not status.is_running


def test_an_execution_that_never_was_has_no_status(harness: Harness) -> None:
    assert harness.executions.status(harness.executions.arn_of("01NOBODY")) is None
    assert harness.executions.status("") is None


# --- Step Functions only ------------------------------------------------------------------------


def test_the_input_names_the_incident(step_functions: StepFunctionsExecutions, states: Any) -> None:
    arn = step_functions.start("01A")
    document = json.loads(states.describe_execution(executionArn=arn)["input"])
    assert document == {"schema_version": 1, "incident_id": "01A"}


def test_a_failed_execution_tells_its_error(
    step_functions: StepFunctionsExecutions, states: Any
) -> None:
    failed = {"status": "FAILED", "error": "SupersededError", "cause": "closed already"}
    Wire(states).answer("DescribeExecution", lambda _: (200, dict(failed)))
    status = step_functions.status(step_functions.arn_of("01A"))
    assert status == ExecutionStatus("FAILED", "SupersededError", "closed already")


def test_a_taken_name_is_no_error(step_functions: StepFunctionsExecutions, states: Any) -> None:
    """AWS answers so for 90 days after the end; emulators differ."""
    Wire(states).fail("StartExecution", "ExecutionAlreadyExists")
    assert step_functions.start("01A") == step_functions.arn_of("01A")


def test_an_alias_of_the_state_machine_starts_executions_of_the_machine(states: Any) -> None:
    executions = StepFunctionsExecutions(
        state_machine_arn=f"{STATE_MACHINE_ARN}:live", client=states
    )
    assert executions.arn_of("01A").endswith(":execution:nodemend-remediate-node:01A")


@pytest.mark.parametrize("arn", ["", "remediate-node", STATE_MACHINE_ARN.replace(":stateM", ":x")])
def test_what_is_no_state_machines_arn_is_refused(states: Any, arn: str) -> None:
    with pytest.raises(InvalidInputError, match="state_machine_arn"):
        StepFunctionsExecutions(state_machine_arn=arn, client=states)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("AccessDeniedException", AwsForbiddenError),
        ("ThrottlingException", AwsUnavailableError),
        ("StateMachineDoesNotExist", InvalidInputError),
    ],
)
def test_executions_raise_only_the_domains_errors(
    step_functions: StepFunctionsExecutions, states: Any, code: str, error: type[Exception]
) -> None:
    wire = Wire(states)
    wire.fail("StartExecution", code)
    with pytest.raises(error, match="states:StartExecution"):
        step_functions.start("01A")
    wire.fail("DescribeExecution", code)
    with pytest.raises(error, match="states:DescribeExecution"):
        step_functions.status(STATE_MACHINE_ARN)


# --- the dispatch queue -------------------------------------------------------------------------


@dataclass
class QueueHarness:
    """A dispatch queue of one kind, and what is in it."""

    queue: DispatchQueue
    messages: Callable[[], list[tuple[str, str]]]


@pytest.fixture
def sqs() -> Iterator[tuple[SqsDispatchQueue, Any, str]]:
    with mock_aws():
        client = aws_client("sqs")
        url = client.create_queue(QueueName="dispatch")["QueueUrl"]
        yield SqsDispatchQueue(queue_url=url, client=client), client, url


@pytest.fixture(params=["memory", "sqs"])
def queue(request: pytest.FixtureRequest) -> QueueHarness:
    if request.param == "memory":
        memory = MemoryDispatchQueue()
        return QueueHarness(memory, lambda: memory.messages)
    adapter, client, url = request.getfixturevalue("sqs")

    def messages() -> list[tuple[str, str]]:
        found = client.receive_message(QueueUrl=url, MaxNumberOfMessages=10).get("Messages", [])
        hints = [DispatchHint.model_validate_json(message["Body"]) for message in found]
        return [(hint.cluster, hint.incident_id) for hint in hints]

    return QueueHarness(adapter, messages)


def test_each_notice_is_a_message_that_dispatch_understands(queue: QueueHarness) -> None:
    queue.queue.notify("train-a", "01A")
    queue.queue.notify("train-b", "")
    assert sorted(queue.messages()) == [("train-a", "01A"), ("train-b", "")]


def test_a_queue_that_refuses_is_an_error_of_the_domain(
    sqs: tuple[SqsDispatchQueue, Any, str],
) -> None:
    adapter, client, _ = sqs
    wire = Wire(client)
    for code, error in (
        ("AccessDenied", AwsForbiddenError),
        ("RequestThrottled", AwsUnavailableError),
        ("AWS.SimpleQueueService.NonExistentQueue", InvalidInputError),
    ):
        wire.fail("SendMessage", code)
        with pytest.raises(error, match="sqs:SendMessage"):
            adapter.notify("train-a", "01A")
