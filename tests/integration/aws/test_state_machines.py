"""State machines of the fixture template: errors, waits, stops, callbacks, status events."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import ClientError

from local.aws.stack import LocalStack
from local.calls import ApiFault

BASE = {"do": "echo", "id": "x", "seconds": 0, "wait_s": 0}


def run(stack: LocalStack, timeout_s: float = 20, **changes: Any) -> Any:
    arn = stack.start_execution({**BASE, **changes}, machine="Steps")
    return stack.wait_for_execution(arn, timeout_s)


def eventually(condition: Callable[[], Any], timeout_s: float = 10) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


def status_events(stack: LocalStack, arn: str) -> list[str]:
    return [
        event.detail["status"]
        for event in stack.events()
        if event.source == "aws.states" and event.detail["executionArn"] == arn
    ]


def notified(stack: LocalStack, name: str) -> dict[str, Any] | None:
    item = (
        stack.client("dynamodb")
        .get_item(TableName=stack.resource_id("Table"), Key={"id": {"S": f"notified-{name}"}})
        .get("Item")
    )
    return None if item is None else json.loads(item["event"]["S"])


def test_an_execution_passes_its_context_to_the_function_and_ends_with_its_answer(stack):
    arn = stack.start_execution(BASE, name="by-name", machine="Steps")
    execution = stack.wait_for_execution(arn, 20)

    assert execution.status == "SUCCEEDED"
    answer = execution.output["work"]["answer"]
    assert answer["function"] == "nodemend-EchoFunction"
    assert answer["event"]["execution"] == arn
    assert answer["event"]["name"] == "by-name"


def test_an_error_is_caught_by_the_name_of_its_class(stack):
    execution = run(stack, do="fail")

    assert execution.output["end"] == "too hot"
    assert execution.output["caught"]["Error"] == "TooHotError"
    assert json.loads(execution.output["caught"]["Cause"])["errorMessage"] == "too hot"


def test_a_function_s_time_out_is_caught_as_sandbox_timedout(stack):
    execution = run(stack, do="sleep", seconds=20)

    assert execution.output["end"] == "timed out"
    assert execution.output["caught"]["Error"] == "Sandbox.Timedout"


def test_a_crash_is_caught_as_exit_error_and_fails_with_error_and_cause(stack):
    execution = run(stack, do="exit")

    assert execution.status == "FAILED"
    assert execution.error == "Runtime.ExitError"
    assert "exit status 3" in execution.cause


def test_a_platform_error_is_retried_under_its_lambda_name_with_a_real_pause(stack):
    fault = ApiFault("Invoke", 429, service="lambda", caller="states", times=2)
    stack.faults.add(fault)
    started = time.monotonic()

    execution = run(stack)

    stack.faults.remove(fault)
    assert execution.status == "SUCCEEDED"
    failures = [
        event["taskFailedEventDetails"]["error"]
        for event in stack.execution_history(execution.arn)
        if event["type"] == "TaskFailed"
    ]
    assert failures == ["Lambda.TooManyRequestsException"] * 2
    # Full jitter: between nothing and 1 s, then between nothing and 2 s.
    assert time.monotonic() - started < 6


def test_a_wait_takes_its_seconds_from_the_input(stack):
    started = time.monotonic()

    execution = run(stack, wait_s=1)

    assert execution.status == "SUCCEEDED"
    assert time.monotonic() - started >= 1


def test_an_end_by_failure_reaches_the_rule_s_function(stack):
    execution = run(stack, do="exit")

    event = eventually(lambda: notified(stack, execution.name))

    assert status_events(stack, execution.arn) == ["RUNNING", "FAILED"]
    assert event["detail-type"] == "Step Functions Execution Status Change"
    assert event["resources"] == [execution.arn]
    assert event["detail"]["error"] == "Runtime.ExitError"
    assert json.loads(event["detail"]["input"])["do"] == "exit"


def test_a_success_is_told_but_the_rule_does_not_want_it(stack):
    execution = run(stack)
    stack.wait_idle(10)

    assert status_events(stack, execution.arn) == ["RUNNING", "SUCCEEDED"]
    assert notified(stack, execution.name) is None


def test_stopping_a_waiting_execution_aborts_it_and_calls_the_rule_s_function(stack):
    arn = stack.start_execution({**BASE, "wait_s": 30}, machine="Steps")
    eventually(lambda: any(e["type"] == "WaitStateEntered" for e in stack.execution_history(arn)))

    stack.stop_execution(arn, error="ByHand", cause="the person said so")

    execution = stack.execution(arn)
    assert (execution.status, execution.error) == ("ABORTED", "ByHand")
    event = eventually(lambda: notified(stack, execution.name))
    assert event["detail"]["status"] == "ABORTED"
    assert event["detail"]["cause"] == "the person said so"
    assert event["detail"]["stopDate"] >= event["detail"]["startDate"]


def test_stopping_ends_an_execution_at_once_while_its_function_still_runs(stack):
    arn = stack.start_execution({**BASE, "do": "sleep", "seconds": 1.5}, machine="Steps")
    eventually(lambda: any(e["type"] == "TaskStarted" for e in stack.execution_history(arn)))
    started = time.monotonic()

    stack.stop_execution(arn)

    assert stack.execution(arn).status == "ABORTED"
    assert time.monotonic() - started < 1
    stack.wait_idle(10)
    assert status_events(stack, arn) == ["RUNNING", "ABORTED"]


def test_stopping_right_after_the_start_works(stack):
    arn = stack.start_execution({**BASE, "wait_s": 30}, machine="Steps")

    stack.stop_execution(arn)

    assert stack.execution(arn).status == "ABORTED"


def test_stopping_an_ended_execution_changes_nothing(stack):
    execution = run(stack)

    stack.stop_execution(execution.arn)

    assert stack.execution(execution.arn).status == "SUCCEEDED"


def test_a_machine_s_own_time_out_ends_as_timed_out_and_is_told(stack):
    arn = stack.start_execution({}, machine="Brief")

    assert stack.wait_for_execution(arn, 10).status == "TIMED_OUT"
    assert status_events(stack, arn) == ["RUNNING", "TIMED_OUT"]


def test_executions_without_a_name_get_different_ones(stack):
    client = stack.client("stepfunctions")
    arns = {
        client.start_execution(
            stateMachineArn=stack.resource_id("Steps"), input=json.dumps({**BASE, "id": str(n)})
        )["executionArn"]
        for n in range(3)
    }

    ids = {stack.wait_for_execution(arn, 20).output["id"] for arn in arns}

    assert ids == {"0", "1", "2"}


def test_a_name_can_be_used_once(stack):
    run_arn = stack.start_execution(BASE, name="only-once", machine="Steps")
    stack.wait_for_execution(run_arn, 20)

    with pytest.raises(ClientError, match="ExecutionAlreadyExists"):
        stack.start_execution(BASE, name="only-once", machine="Steps")


def test_many_executions_side_by_side_keep_their_inputs_apart(stack):
    arns = [
        stack.start_execution({**BASE, "id": f"n{number}"}, machine="Steps") for number in range(12)
    ]

    for number, arn in enumerate(arns):
        execution = stack.wait_for_execution(arn, 30)
        assert execution.output["work"]["answer"]["event"]["id"] == f"n{number}"


def ask_approval(stack: LocalStack) -> tuple[str, str]:
    known = len(stack.messages())
    arn = stack.start_execution({}, machine="Direct")
    eventually(lambda: len(stack.messages()) > known)
    return arn, json.loads(stack.messages()[-1].message)["token"]


def test_a_task_token_is_answered_and_a_direct_function_arn_keeps_error_names(stack):
    arn, token = ask_approval(stack)

    stack.client("stepfunctions").send_task_success(taskToken=token, output='{"by": "me"}')

    execution = stack.wait_for_execution(arn, 20)
    assert execution.output["caught"]["Error"] == "TooHotError"
    assert json.loads(execution.output["caught"]["Cause"])["errorMessage"] == "me"


def test_a_task_token_is_refused_by_name_and_cause(stack):
    arn, token = ask_approval(stack)

    stack.client("stepfunctions").send_task_failure(
        taskToken=token, error="DeniedError", cause="not tonight"
    )

    execution = stack.wait_for_execution(arn, 20)
    assert execution.output == {"Error": "DeniedError", "Cause": "not tonight"}


def test_a_second_answer_to_a_task_is_told_to_be_late_and_a_strange_token_invalid(stack):
    arn, token = ask_approval(stack)
    client = stack.client("stepfunctions")
    client.send_task_failure(taskToken=token, error="DeniedError")
    stack.wait_for_execution(arn, 20)

    with pytest.raises(ClientError, match="TaskTimedOut"):
        client.send_task_success(taskToken=token, output="{}")
    with pytest.raises(ClientError, match="InvalidToken"):
        client.send_task_success(taskToken="no such token", output="{}")


def test_calls_of_the_interpreter_are_known_as_the_service_s(stack):
    run(stack)

    invokes = [call for call in stack.log.calls() if call.verb == "Invoke"]
    assert {call.caller for call in invokes} == {"states"}
    assert all(not call.is_mutation for call in invokes)
