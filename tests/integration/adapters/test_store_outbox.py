"""The suite of the Outbox port: the fake and DynamoDB must pass the same tests."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from nodemend.adapters.incidents_dynamodb import DynamoIncidents
from nodemend.adapters.outbox import DynamoOutbox
from nodemend.application.ports import Announcement, Incidents, Outbox
from nodemend.domain.errors import AwsUnavailableError
from nodemend.domain.events import DetailType
from nodemend.domain.faults import Mode
from nodemend.domain.incidents import Incident, Outcome, close, record
from nodemend.domain.reasons import Reason
from tests.fakes import aws
from tests.fakes.aws import TABLE, Wire
from tests.fakes.examples import CLUSTER, waiting
from tests.fakes.messages import MemoryEventBus, MemoryTelemetry
from tests.fakes.stores import MemoryIncidents, MemoryOutbox
from tests.fakes.system import START, ManualClock

REASON = Reason("because", "a test says so")
FIRST = "01TEST00000000000000000001"


class ProcessDiedError(BaseException):
    """The sandbox is gone: nobody catches this."""


class DyingBus(MemoryEventBus):
    """Accepts the events; then the process dies before it can mark them as sent."""

    is_dying = True

    def announce(self, announcements: Sequence[Announcement]) -> Sequence[str]:
        unsent = super().announce(announcements)
        if self.is_dying:
            raise ProcessDiedError
        return unsent


@dataclass
class Harness:
    """An outbox of one kind with its store, and a way to give it another bus."""

    incidents: Incidents
    bus: MemoryEventBus
    telemetry: MemoryTelemetry
    with_bus: Callable[[MemoryEventBus], Outbox]

    @property
    def outbox(self) -> Outbox:
        return self.with_bus(self.bus)


@pytest.fixture
def dynamodb() -> Iterator[Any]:
    with aws.dynamodb() as client:
        yield client


@pytest.fixture
def dynamo(dynamodb: Any) -> Harness:
    telemetry = MemoryTelemetry()
    incidents = DynamoIncidents(table=TABLE, client=dynamodb, clock=ManualClock())
    return Harness(
        incidents,
        MemoryEventBus(),
        telemetry,
        lambda bus: DynamoOutbox(table=TABLE, client=dynamodb, bus=bus, telemetry=telemetry),
    )


@pytest.fixture(params=["memory", "dynamodb"])
def harness(request: pytest.FixtureRequest) -> Harness:
    if request.param == "dynamodb":
        found: Harness = request.getfixturevalue("dynamo")
        return found
    telemetry = MemoryTelemetry()
    incidents = MemoryIncidents(ManualClock())
    return Harness(
        incidents,
        MemoryEventBus(),
        telemetry,
        lambda bus: MemoryOutbox(incidents, bus, telemetry),
    )


def create(harness: Harness, incident_id: str = FIRST, **changes: Any) -> Incident:
    incident = waiting(incident_id, **changes)
    assert harness.incidents.create(incident)
    return replace(incident, new_events=())


def admit(incident: Incident) -> Incident:
    return record(
        incident,
        DetailType.INCIDENT_ADMITTED,
        step="dispatch_incidents",
        reason=REASON,
        now=START,
        data={"mode": "enforce", "plan": ("replace",), "policy_version": "v1"},
    )


def ids(bus: MemoryEventBus) -> list[str]:
    return [one.event_id for one in bus.accepted]


def raw_record(client: Any, incident_id: str = FIRST) -> dict[str, Any]:
    key = {"pk": {"S": f"INCIDENT#{incident_id}"}, "sk": {"S": "RECORD"}}
    item: dict[str, Any] = client.get_item(TableName=TABLE, Key=key)["Item"]
    return item


def test_the_events_of_a_new_incident_are_sent_once(harness: Harness) -> None:
    create(harness)
    assert harness.outbox.publish(FIRST) == 0
    assert harness.outbox.publish(FIRST) == 0
    assert ids(harness.bus) == [f"{FIRST}-0001"]
    sent = harness.bus.accepted[0]
    assert sent.detail_type is DetailType.INCIDENT_OPENED
    assert sent.at == START
    assert sent.detail["event_id"] == sent.event_id
    assert sent.detail["incident_id"] == FIRST


def test_events_are_sent_in_the_order_in_which_they_happened(harness: Harness) -> None:
    incident = create(harness, sequence=9997)
    for _ in range(3):
        incident = harness.incidents.save(admit(incident))
    harness.outbox.publish(FIRST)
    assert [int(one.rsplit("-", 1)[1]) for one in ids(harness.bus)] == [9998, 9999, 10000, 10001]


def test_an_unknown_incident_has_nothing_to_say(harness: Harness) -> None:
    assert harness.outbox.publish("01NOBODY") == 0
    assert harness.bus.calls == 0


def test_what_was_refused_stays_and_is_sent_later_with_the_same_id(harness: Harness) -> None:
    incident = create(harness)
    harness.incidents.save(admit(incident))
    harness.bus.refused = {f"{FIRST}-0001"}
    assert harness.outbox.publish(FIRST) == 1
    assert ids(harness.bus) == [f"{FIRST}-0002"]
    assert harness.telemetry.counted("EventsUnsent", cluster=CLUSTER) == 1
    harness.bus.refused = set()
    assert harness.outbox.publish_pending() == (1, 0)
    assert ids(harness.bus) == [f"{FIRST}-0002", f"{FIRST}-0001"]


def test_a_bus_that_is_gone_does_not_stop_the_step_that_publishes(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    create(harness)
    harness.bus.gone = AwsUnavailableError("events:PutEvents: no answer")
    assert harness.outbox.publish(FIRST) == 1
    assert harness.telemetry.counted("EventsUnsent", cluster=CLUSTER) == 1
    assert harness.telemetry.counted("Events") == 0
    harness.bus.gone = None
    assert harness.outbox.publish(FIRST) == 0
    assert ids(harness.bus) == [f"{FIRST}-0001"]


def test_a_crash_between_sending_and_marking_sends_again_with_the_same_ids(
    harness: Harness,
) -> None:
    create(harness)
    bus = DyingBus()
    with pytest.raises(ProcessDiedError):
        harness.with_bus(bus).publish(FIRST)
    bus.is_dying = False
    assert harness.with_bus(bus).publish_pending() == (1, 0)
    assert ids(bus) == [f"{FIRST}-0001", f"{FIRST}-0001"]
    assert bus.accepted[0] == bus.accepted[1]
    assert harness.with_bus(bus).publish_pending() == (0, 0)


def test_pending_events_of_all_incidents_are_sent_oldest_incident_first(harness: Harness) -> None:
    create(harness, "01B", opened_at=START)
    create(harness, "01A", opened_at=START.replace(hour=11))
    create(harness, "01C", opened_at=START.replace(hour=9))
    harness.outbox.publish("01B")
    assert harness.outbox.publish_pending() == (2, 0)
    assert ids(harness.bus) == ["01B-0001", "01C-0001", "01A-0001"]
    assert harness.outbox.publish_pending() == (0, 0)


def test_the_incidents_with_unsent_events_are_named_oldest_first(harness: Harness) -> None:
    for number, name in enumerate(("01B", "01A", "01C")):
        create(harness, name, opened_at=START.replace(hour=12 + number))
    harness.outbox.publish("01A")
    assert list(harness.outbox.pending()) == ["01B", "01C"]
    assert list(harness.outbox.pending(limit=1)) == ["01B"]


def test_a_limit_bounds_how_many_incidents_are_looked_at(harness: Harness) -> None:
    for number in range(5):
        create(harness, f"01TEST{number}", opened_at=START.replace(minute=number))
    assert harness.outbox.publish_pending(limit=2) == (2, 0)
    assert ids(harness.bus) == ["01TEST0-0001", "01TEST1-0001"]


def test_a_gone_bus_is_asked_once_and_not_for_every_incident(harness: Harness) -> None:
    for number in range(5):
        create(harness, f"01TEST{number}")
    harness.bus.gone = AwsUnavailableError("events:PutEvents: no answer")
    assert harness.outbox.publish_pending() == (0, 1)
    assert harness.bus.calls == 1


def test_accepted_events_are_counted_by_kind_outcome_and_action(harness: Harness) -> None:
    incident = create(harness, mode=Mode.ENFORCE)
    incident = harness.incidents.save(cordon(incident))
    incident = harness.incidents.save(
        close(incident, Outcome.REPLACED, REASON, step="close_incident", now=START)
    )
    harness.outbox.publish(FIRST)
    assert harness.telemetry.counted("Events", cluster=CLUSTER) == 3
    assert harness.telemetry.counted("Actions", cluster=CLUSTER, action="cordon") == 1
    assert harness.telemetry.counted("IncidentsClosed", cluster=CLUSTER, outcome="REPLACED") == 1
    assert harness.telemetry.counted("EventsUnsent") == 0


def cordon(incident: Incident) -> Incident:
    return record(
        incident,
        DetailType.NODE_CORDONED,
        step="cordon_node",
        reason=REASON,
        now=START,
        data={"was_unschedulable": False},
    )


def test_what_a_dry_run_would_do_is_an_event_but_no_action(harness: Harness) -> None:
    harness.incidents.save(cordon(create(harness, mode=Mode.DRY_RUN)))
    harness.outbox.publish(FIRST)
    assert harness.telemetry.counted("Events") == 2
    assert harness.telemetry.counted("Actions") == 0


# --- DynamoDB only ------------------------------------------------------------------------------


def test_a_sent_outbox_is_empty_and_out_of_the_index(dynamo: Harness, dynamodb: Any) -> None:
    create(dynamo)
    dynamo.outbox.publish(FIRST)
    item = raw_record(dynamodb)
    assert item["outbox"] == {"M": {}}
    assert "outbox_pending" not in item


def test_publishing_does_not_collide_with_the_step_that_saves_next(dynamo: Harness) -> None:
    incident = create(dynamo)
    dynamo.outbox.publish(FIRST)
    assert dynamo.incidents.save(replace(incident, waiting_for="x")).version == 1


def test_an_event_added_while_the_others_are_sent_keeps_the_record_in_the_index(
    dynamo: Harness, dynamodb: Any
) -> None:
    incident = create(dynamo)

    class SavingBus(MemoryEventBus):
        def announce(self, announcements: Sequence[Announcement]) -> Sequence[str]:
            if not self.accepted:
                dynamo.incidents.save(admit(incident))
            return super().announce(announcements)

    bus = SavingBus()
    assert dynamo.with_bus(bus).publish(FIRST) == 0
    item = raw_record(dynamodb)
    assert list(item["outbox"]["M"]) == [f"{FIRST}-0002"]
    assert item["outbox_pending"] == {"S": "1"}
    assert dynamo.with_bus(bus).publish_pending() == (1, 0)
    assert ids(bus) == [f"{FIRST}-0001", f"{FIRST}-0002"]


def test_of_two_publishers_neither_drops_an_event_of_the_other(
    dynamo: Harness, dynamodb: Any
) -> None:
    """While one sends `0001`, another marks it and a step adds `0002`: the counts are equal."""
    incident = create(dynamo)

    class SlowBus(MemoryEventBus):
        def announce(self, announcements: Sequence[Announcement]) -> Sequence[str]:
            dynamo.outbox.publish(FIRST)
            dynamo.incidents.save(admit(incident))
            return super().announce(announcements)

    dynamo.with_bus(SlowBus()).publish(FIRST)
    item = raw_record(dynamodb)
    assert list(item["outbox"]["M"]) == [f"{FIRST}-0002"]
    assert item["outbox_pending"] == {"S": "1"}


def test_a_record_that_is_in_the_index_with_nothing_to_send_is_taken_out(
    dynamo: Harness, dynamodb: Any
) -> None:
    create(dynamo)
    item = raw_record(dynamodb)
    dynamodb.put_item(TableName=TABLE, Item=item | {"outbox": {"M": {}}})
    assert dynamo.outbox.publish_pending() == (0, 0)
    assert "outbox_pending" not in raw_record(dynamodb)
    assert dynamo.bus.calls == 0


def test_a_record_of_which_nothing_is_accepted_is_not_written(
    dynamo: Harness, dynamodb: Any
) -> None:
    create(dynamo)
    dynamo.bus.refused = {f"{FIRST}-0001"}
    wire = Wire(dynamodb)
    assert dynamo.outbox.publish(FIRST) == 1
    assert wire.asked("UpdateItem") == []


def test_a_mark_that_fails_leaves_the_event_for_later(dynamo: Harness, dynamodb: Any) -> None:
    create(dynamo)
    wire = Wire(dynamodb)
    wire.drop("UpdateItem")
    assert dynamo.outbox.publish(FIRST) == 1
    assert dynamo.telemetry.counted("EventsUnsent", cluster=CLUSTER) == 1
    assert dynamo.outbox.publish(FIRST) == 0
    assert ids(dynamo.bus) == [f"{FIRST}-0001", f"{FIRST}-0001"]


def test_a_record_that_cannot_be_read_is_reported_and_not_raised(
    dynamo: Harness, dynamodb: Any
) -> None:
    create(dynamo)
    wire = Wire(dynamodb)
    wire.fail("GetItem", "AccessDeniedException")
    assert dynamo.outbox.publish(FIRST) == 1
    assert dynamo.telemetry.counted("EventsUnsent") == 1


def test_an_index_that_cannot_be_read_is_reported_and_not_raised(
    dynamo: Harness, dynamodb: Any
) -> None:
    create(dynamo)
    Wire(dynamodb).fail("Query", "ThrottlingException", times=3)
    assert dynamo.outbox.publish_pending() == (0, 0)
    assert dynamo.telemetry.counted("EventsUnsent", cluster="unknown") == 1


def test_an_entry_that_cannot_be_understood_stays_and_holds_up_no_other(
    dynamo: Harness, dynamodb: Any, caplog: pytest.LogCaptureFixture
) -> None:
    create(dynamo)
    item = raw_record(dynamodb)
    entry = item["outbox"]["M"][f"{FIRST}-0001"]["M"]
    item["outbox"]["M"][f"{FIRST}-0000"] = {"M": entry | {"detail_type": {"S": "Of The Future"}}}
    dynamodb.put_item(TableName=TABLE, Item=item)
    assert dynamo.outbox.publish(FIRST) == 1
    assert ids(dynamo.bus) == [f"{FIRST}-0001"]
    assert f"{FIRST}-0000 cannot be read" in caplog.text
    assert raw_record(dynamodb)["outbox_pending"] == {"S": "1"}


def test_a_broken_record_does_not_stop_the_step_that_publishes(
    dynamo: Harness, dynamodb: Any, caplog: pytest.LogCaptureFixture
) -> None:
    create(dynamo)
    create(dynamo, "01TEST00000000000000000002")
    item = raw_record(dynamodb)
    dynamodb.put_item(TableName=TABLE, Item=item | {"outbox": {"S": "no map"}})
    assert dynamo.outbox.publish(FIRST) > 0
    assert "are not sent" in caplog.text
    sent, unsent = dynamo.outbox.publish_pending()
    assert sent == 1
    assert unsent > 0


def test_more_events_than_one_write_can_mark_are_all_sent(dynamo: Harness, dynamodb: Any) -> None:
    incident = create(dynamo)
    for _ in range(60):
        incident = admit(incident)
    dynamo.incidents.save(incident)
    wire = Wire(dynamodb)
    assert dynamo.outbox.publish(FIRST) == 0
    assert len(dynamo.bus.accepted) == 61
    assert len(wire.asked("UpdateItem")) == 2
    assert "outbox_pending" not in raw_record(dynamodb)
