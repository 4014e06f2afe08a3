"""PutEvents, rules, queues, topics and schedules of the fixture template."""

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import ClientError

from local.aws.stack import LocalStack
from local.calls import ApiFault


def put(stack: LocalStack, *details: dict[str, Any], detail_type: str = "Work Found") -> Any:
    entries = [
        {
            "Source": "nodemend",
            "DetailType": detail_type,
            "Detail": json.dumps(detail),
            "EventBusName": stack.resource_id("Bus"),
        }
        for detail in details
    ]
    return stack.client("events").put_events(Entries=entries)


def item(stack: LocalStack, key: str) -> dict[str, Any] | None:
    answer = stack.client("dynamodb").get_item(
        TableName=stack.resource_id("Table"), Key={"id": {"S": key}}
    )
    found: dict[str, Any] | None = answer.get("Item")
    return found


def stored(stack: LocalStack, key: str, timeout_s: float = 15) -> dict[str, Any]:
    found: dict[str, Any] = eventually(lambda: item(stack, key), timeout_s)
    return found


def eventually(condition: Callable[[], Any], timeout_s: float = 15) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


def received(stack: LocalStack, logical_id: str) -> list[str]:
    client = stack.client("sqs")
    url = stack.resource_id(logical_id)
    answer = client.receive_message(QueueUrl=url, MaxNumberOfMessages=10)
    messages = answer.get("Messages", [])
    for message in messages:
        client.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
    return [message["Body"] for message in messages]


def test_an_event_goes_by_rule_and_queue_to_the_function(stack):
    answer = put(stack, {"id": "job-way"})

    assert answer["FailedEntryCount"] == 0
    found = stored(stack, "job-way")
    assert found["greeting"] == {"S": "from the layer"}
    assert found["receives"] == {"N": "1"}
    stack.wait_idle(10)
    assert stack.queue_depth("Queue") == 0


def test_every_entry_is_recorded_with_its_caller_also_if_no_rule_wants_it(stack):
    answer = put(stack, {"id": "nobody wants this"})

    (event,) = [one for one in stack.events() if one.detail == {"id": "nobody wants this"}]
    assert (event.caller, event.bus, event.source) == ("person", "nodemend-bus", "nodemend")
    assert event.event_id == answer["Entries"][0]["EventId"]
    assert abs(event.at - time.time()) < 30
    stack.wait_idle(10)
    assert item(stack, "nobody wants this") is None


def test_a_failed_message_is_tried_again_and_ends_in_the_dead_letter_queue(stack):
    put(stack, {"id": "job-good"}, {"id": "job-bad", "fail": True})

    eventually(lambda: stack.queue_depth("DeadLetters") == 1)

    assert stored(stack, "job-good")["receives"] == {"N": "1"}
    assert item(stack, "job-bad") is None
    bodies = received(stack, "DeadLetters")
    assert [json.loads(body)["detail"]["id"] for body in bodies] == ["job-bad"]
    stack.wait_idle(10)


def test_messages_that_come_close_together_are_one_batch(stack):
    put(stack, *({"id": f"job-batch-{number}"} for number in range(5)))

    sizes = {stored(stack, f"job-batch-{number}")["batch"]["N"] for number in range(5)}
    assert max(int(size) for size in sizes) >= 3


def test_single_entries_can_be_made_to_fail_and_the_others_go_through(stack):
    fault = ApiFault("PutEvents", 200, headers={"x-local-fail-entries": "0"}, times=1)
    stack.faults.add(fault)

    answer = put(stack, {"id": "job-lost"}, {"id": "job-kept"})

    assert answer["FailedEntryCount"] == 1
    assert answer["Entries"][0]["ErrorCode"] == "ThrottlingException"
    eventually(lambda: item(stack, "job-kept"))
    assert item(stack, "job-lost") is None
    assert "job-lost" not in [event.detail.get("id") for event in stack.events()]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"Detail": "not json"}, "MalformedDetail"),
        ({"Detail": "[1]"}, "MalformedDetail"),
        ({"Source": ""}, "InvalidArgument"),
        ({"Source": "aws.states"}, "NotAuthorizedForSourceException"),
    ],
)
def test_a_bad_entry_fails_alone(stack, change, code):
    good = {"Source": "nodemend", "DetailType": "X", "Detail": "{}"}

    answer = stack.client("events").put_events(Entries=[good, {**good, **change}])

    assert answer["FailedEntryCount"] == 1
    assert answer["Entries"][1]["ErrorCode"] == code


def test_more_than_ten_entries_are_refused(stack):
    with pytest.raises(ClientError, match="ValidationException"):
        put(stack, *({"id": str(number)} for number in range(11)))


def test_an_entry_for_a_bus_that_is_not_there_is_taken_and_goes_nowhere(stack):
    entry = {"Source": "a", "DetailType": "b", "Detail": "{}", "EventBusName": "elsewhere"}

    answer = stack.client("events").put_events(Entries=[entry])

    assert answer["FailedEntryCount"] == 0
    assert "elsewhere" not in {event.bus for event in stack.events()}


def test_failing_queue_calls_delay_an_event_and_do_not_lose_it(stack):
    for verb in ("SendMessage", "ReceiveMessage", "DeleteMessageBatch"):
        stack.faults.add(ApiFault(verb, 500, service="sqs", times=1))

    put(stack, {"id": "job-through-faults"})

    eventually(lambda: item(stack, "job-through-faults"))
    stack.wait_idle(15)
    assert stored(stack, "job-through-faults")["receives"] == {"N": "2"}


def test_a_disabled_rule_delivers_nothing(stack):
    client = stack.client("events")
    rule = {"Name": stack.resource_id("WorkRule"), "EventBusName": stack.resource_id("Bus")}
    client.disable_rule(**rule)

    put(stack, {"id": "job-disabled"})
    stack.wait_idle(10)
    client.enable_rule(**rule)

    assert item(stack, "job-disabled") is None


def test_a_rule_starts_a_state_machine_and_forwards_to_another_bus(stack):
    put(stack, {"id": "brief"}, detail_type="Be Brief")

    execution = eventually(
        lambda: next((one for one in stack.executions() if "Brief" in one.state_machine), None)
    )
    assert execution.input["detail"] == {"id": "brief"}
    assert execution.name.startswith("event-")
    stack.stop_execution(execution.arn)


def test_a_topic_delivers_to_the_queue_what_its_filter_wants(stack):
    client = stack.client("sns")
    topic = stack.resource_id("Topic")

    client.publish(TopicArn=topic, Subject="s", Message=json.dumps({"id": "by-topic"}))
    client.publish(TopicArn=topic, Message=json.dumps({"other": 1}))

    eventually(lambda: item(stack, "by-topic"))
    stack.wait_idle(10)
    assert [message.subject for message in stack.messages()] == ["s", ""]
    assert stack.messages()[0].caller == "person"


def test_a_schedule_s_tick_runs_its_function_with_its_input(stack):
    assert stack.tick("NotifyFunctionEachMinute")

    event = json.loads(stored(stack, "notified-scheduled")["event"]["S"])
    assert event == {"kind": "scheduled"}


def test_a_schedule_whose_run_has_not_ended_is_passed_over(stack):
    schedule = stack.scheduler.find("NotifyFunctionEachMinute")
    release = threading.Event()
    original, schedule.run = schedule.run, lambda: release.wait(10) and None
    running = threading.Thread(target=stack.tick, args=("NotifyFunctionEachMinute",))
    running.start()
    try:
        eventually(lambda: stack.scheduler.firing)

        assert not stack.tick("NotifyFunctionEachMinute")
    finally:
        release.set()
        running.join()
        schedule.run = original
    assert stack.tick("NotifyFunctionEachMinute")


def test_an_asynchronous_invocation_that_fails_for_good_leaves_a_record_in_the_queue(stack):
    client = stack.client("lambda")

    answer = client.invoke(
        FunctionName="nodemend-throttled-echo", InvocationType="Event", Payload='{"do": "fail"}'
    )

    assert answer["StatusCode"] == 202
    assert answer["Payload"].read() == b""
    eventually(lambda: stack.queue_depth("DeadLetters"))
    record = json.loads(received(stack, "DeadLetters")[0])
    assert record["requestContext"]["approximateInvokeCount"] == 2
    assert record["responsePayload"]["errorType"] == "TooHotError"


def test_waiting_for_quiet_names_what_is_not(stack):
    arn = stack.start_execution({"do": "echo", "id": "", "seconds": 0,
                                 "wait_s": 20}, machine="Steps")  # fmt: skip

    with pytest.raises(TimeoutError, match="executions"):
        stack.wait_idle(0.3)
    stack.stop_execution(arn)
