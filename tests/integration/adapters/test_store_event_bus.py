"""The suite of the EventBus port: the fake and EventBridge must pass the same tests."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from moto import mock_aws

from nodemend.adapters.event_bus import EventBridgeBus
from nodemend.application.ports import Announcement, EventBus
from nodemend.contracts.events import MAX_EVENT_BYTES
from nodemend.domain.errors import AwsForbiddenError, AwsUnavailableError
from nodemend.domain.events import DetailType
from tests.fakes.aws import Wire, aws_client
from tests.fakes.messages import MemoryEventBus, MemoryTelemetry
from tests.fakes.system import START


def announcement(number: int, **detail: Any) -> Announcement:
    event_id = f"event-{number:04d}"
    return Announcement(
        event_id=event_id,
        detail_type=DetailType.GPU_FAULT_DETECTED,
        at=START + timedelta(seconds=number),
        detail={"schema_version": 1, "event_id": event_id, "cluster": "train-a"} | detail,
    )


class EventBridge:
    """PutEvents as AWS answers it, with entries that fail as told."""

    def __init__(self, wire: Wire) -> None:
        self.accepted: list[str] = []
        self.failures: dict[str, int] = {}
        """How many more times an event fails."""
        self.gone = ""
        """The error code of every call while it is set."""
        self.calls: list[list[dict[str, Any]]] = []
        wire.answer("PutEvents", self._put_events, times=1000)

    def _put_events(self, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.gone:
            return 400, {"Error": {"Code": self.gone, "Message": "told to"}}
        entries = asked["Entries"]
        self.calls.append(entries)
        results = []
        for entry in entries:
            event_id = json.loads(entry["Detail"])["event_id"]
            if self.failures.get(event_id, 0) > 0:
                self.failures[event_id] -= 1
                results.append({"ErrorCode": "ThrottlingException", "ErrorMessage": "slow down"})
            else:
                self.accepted.append(event_id)
                results.append({"EventId": "x"})
        failed = sum("ErrorCode" in result for result in results)
        return 200, {"FailedEntryCount": failed, "Entries": results}

    def ids(self) -> list[list[str]]:
        """Return the event ids of each call."""
        return [[json.loads(one["Detail"])["event_id"] for one in call] for call in self.calls]


@dataclass
class Harness:
    """A bus of one kind, and how to disturb and read it."""

    bus: EventBus
    telemetry: MemoryTelemetry
    accepted: Callable[[], list[str]]
    refuse: Callable[[str], None]
    be_gone: Callable[[type[Exception]], None]


@pytest.fixture
def wire() -> Wire:
    return Wire(aws_client("events"))


@pytest.fixture
def telemetry() -> MemoryTelemetry:
    return MemoryTelemetry()


@pytest.fixture
def bridge(wire: Wire, telemetry: MemoryTelemetry) -> EventBridgeBus:
    return EventBridgeBus(bus_name="nodemend", client=wire.client, telemetry=telemetry)


@pytest.fixture(params=["memory", "eventbridge"])
def harness(
    request: pytest.FixtureRequest, telemetry: MemoryTelemetry, wire: Wire, bridge: EventBridgeBus
) -> Harness:
    if request.param == "memory":
        memory = MemoryEventBus(telemetry)

        def be_gone(error: type[Exception]) -> None:
            memory.gone = error("gone")  # type: ignore[assignment]

        return Harness(
            memory,
            telemetry,
            lambda: [one.event_id for one in memory.accepted],
            memory.refused.add,
            be_gone,
        )
    codes: dict[type[Exception], str] = {
        AwsUnavailableError: "ThrottlingException",
        AwsForbiddenError: "AccessDeniedException",
    }
    events = EventBridge(wire)
    return Harness(
        bridge,
        telemetry,
        lambda: events.accepted,
        lambda event_id: events.failures.update({event_id: 99}),
        lambda error: setattr(events, "gone", codes[error]),
    )


def test_events_are_accepted_in_their_order(harness: Harness) -> None:
    assert list(harness.bus.announce([announcement(n) for n in range(25)])) == []
    assert harness.accepted() == [f"event-{n:04d}" for n in range(25)]


def test_nothing_to_send_is_no_call(harness: Harness) -> None:
    assert list(harness.bus.announce([])) == []
    assert harness.accepted() == []


def test_a_refused_event_is_named_and_the_others_are_accepted(harness: Harness) -> None:
    harness.refuse("event-0001")
    assert list(harness.bus.announce([announcement(n) for n in range(3)])) == ["event-0001"]
    assert harness.accepted() == ["event-0000", "event-0002"]


@pytest.mark.parametrize("error", [AwsUnavailableError, AwsForbiddenError])
def test_a_bus_that_cannot_be_reached_is_an_error(harness: Harness, error: type[Exception]) -> None:
    harness.be_gone(error)
    with pytest.raises(error):
        harness.bus.announce([announcement(0), announcement(1)])
    assert harness.telemetry.counted("EventsUnsent", cluster="train-a") == 2
    assert harness.telemetry.counted("Events") == 0


def test_events_without_an_incident_are_counted_here_and_those_of_incidents_are_not(
    harness: Harness,
) -> None:
    harness.refuse("event-0001")
    harness.bus.announce([announcement(0), announcement(1), announcement(2, incident_id="01A")])
    assert harness.telemetry.counted("Events", cluster="train-a") == 1
    assert harness.telemetry.counted("Events") == 1
    assert harness.telemetry.counted("EventsUnsent", cluster="train-a") == 1


# --- EventBridge only ---------------------------------------------------------------------------


@pytest.mark.case("R70")
def test_only_failed_entries_are_sent_again_with_the_same_event_ids(
    bridge: EventBridgeBus, wire: Wire
) -> None:
    events = EventBridge(wire)
    events.failures["event-0001"] = 1
    assert list(bridge.announce([announcement(n) for n in range(3)])) == []
    assert events.ids() == [["event-0000", "event-0001", "event-0002"], ["event-0001"]]
    assert events.calls[0][1] == events.calls[1][0]
    assert sorted(events.accepted) == ["event-0000", "event-0001", "event-0002"]


@pytest.mark.case("R70")
def test_an_entry_that_keeps_failing_is_given_up_after_three_attempts_and_logged(
    bridge: EventBridgeBus, wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    events = EventBridge(wire)
    events.failures["event-0000"] = 99
    assert list(bridge.announce([announcement(0), announcement(1)])) == ["event-0000"]
    assert events.ids() == [["event-0000", "event-0001"], ["event-0000"], ["event-0000"]]
    assert "event-0000 was not accepted: ThrottlingException: slow down" in caplog.text


def test_an_entry_says_who_when_and_what(bridge: EventBridgeBus, wire: Wire) -> None:
    events = EventBridge(wire)
    bridge.announce([announcement(5, note="é")])
    entry = events.calls[0][0]
    assert entry == {
        "EventBusName": "nodemend",
        "Source": "nodemend",
        "DetailType": "GPU Fault Detected",
        "Time": START.timestamp() + 5,
        "Detail": '{"schema_version":1,"event_id":"event-0005","cluster":"train-a","note":"é"}',
    }


def test_no_call_has_more_than_ten_entries_or_256_kilobytes(
    bridge: EventBridgeBus, wire: Wire
) -> None:
    events = EventBridge(wire)
    small = [announcement(n) for n in range(12)]
    large = [announcement(n, text="é" * 30_000) for n in range(12, 18)]
    bridge.announce([*small, *large])
    assert [len(call) for call in events.calls] == [10, 6, 2]
    for call in events.calls:
        size = sum(
            14 + len((one["Source"] + one["DetailType"] + one["Detail"]).encode()) for one in call
        )
        assert size <= 256 * 1024
    assert len(events.accepted) == 18


def test_an_event_over_64_kilobytes_is_cut_and_not_lost(
    bridge: EventBridgeBus, wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    events = EventBridge(wire)
    pods = [f"namespace/pod-{number:05d}" for number in range(5000)]
    assert list(bridge.announce([announcement(0, evict=pods, evict_count=len(pods))])) == []
    text = events.calls[0][0]["Detail"]
    detail = json.loads(text)
    assert len(text.encode()) <= MAX_EVENT_BYTES
    assert detail["evict"] == pods[: len(detail["evict"])]
    assert len(detail["evict"]) > 1000
    assert detail["evict_count"] == 5000
    assert "event-0000 is cut" in caplog.text


def test_an_event_that_cannot_be_cut_is_unsent_and_holds_up_no_other(
    bridge: EventBridgeBus, wire: Wire, telemetry: MemoryTelemetry
) -> None:
    events = EventBridge(wire)
    endless = announcement(0, labels={f"label-{n}": "x" * 200 for n in range(500)})
    assert list(bridge.announce([endless, announcement(1)])) == ["event-0000"]
    assert events.accepted == ["event-0001"]
    assert telemetry.counted("EventsUnsent", cluster="train-a") == 1


def test_a_bus_that_goes_away_in_between_leaves_the_rest_unsent(
    bridge: EventBridgeBus, wire: Wire, telemetry: MemoryTelemetry
) -> None:
    accepted: list[str] = []

    def accept(asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        ids = [json.loads(one["Detail"])["event_id"] for one in asked["Entries"]]
        accepted.extend(ids)
        return 200, {"FailedEntryCount": 0, "Entries": [{"EventId": "x"} for _ in ids]}

    wire.answer("PutEvents", accept)
    wire.drop("PutEvents", times=3)
    unsent = list(bridge.announce([announcement(n) for n in range(25)]))
    assert accepted == [f"event-{n:04d}" for n in range(10)]
    assert unsent == [f"event-{n:04d}" for n in range(10, 25)]
    assert telemetry.counted("EventsUnsent") == 15
    assert telemetry.counted("Events") == 10


def test_a_bus_that_goes_away_before_the_second_attempt_leaves_the_failed_entries_unsent(
    bridge: EventBridgeBus, wire: Wire
) -> None:
    def one_fails(_: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        results = [{"EventId": "x"}, {"ErrorCode": "InternalFailure"}]
        return 200, {"FailedEntryCount": 1, "Entries": results}

    wire.answer("PutEvents", one_fails)
    wire.drop("PutEvents")
    assert list(bridge.announce([announcement(0), announcement(1)])) == ["event-0001"]


def test_a_bus_without_telemetry_sends_all_the_same(wire: Wire) -> None:
    events = EventBridge(wire)
    bus = EventBridgeBus(bus_name="nodemend", client=wire.client)
    assert list(bus.announce([announcement(0)])) == []
    assert events.accepted == ["event-0000"]


def test_events_arrive_through_a_rule_as_consumers_see_them() -> None:
    with mock_aws():
        events, sqs = aws_client("events"), aws_client("sqs")
        queue = sqs.create_queue(QueueName="seen")["QueueUrl"]
        arn = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["QueueArn"])["Attributes"]
        events.create_event_bus(Name="nodemend")
        events.put_rule(
            Name="all", EventBusName="nodemend", EventPattern='{"source": ["nodemend"]}'
        )
        target = {"Id": "1", "Arn": arn["QueueArn"]}
        events.put_targets(Rule="all", EventBusName="nodemend", Targets=[target])
        EventBridgeBus(bus_name="nodemend", client=events).announce([announcement(1)])
        body = json.loads(sqs.receive_message(QueueUrl=queue)["Messages"][0]["Body"])
    assert body["detail-type"] == "GPU Fault Detected"
    assert body["source"] == "nodemend"
    assert body["detail"] == dict(announcement(1).detail)
