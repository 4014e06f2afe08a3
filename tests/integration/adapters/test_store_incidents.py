"""The suite of the Incidents port: the fake and DynamoDB must pass the same tests."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from nodemend.adapters.incidents_dynamodb import DOCUMENT_LIMIT, DynamoIncidents
from nodemend.application.ports import Incidents
from nodemend.domain.errors import (
    AwsForbiddenError,
    AwsUnavailableError,
    ConcurrentUpdateError,
    InvalidInputError,
)
from nodemend.domain.events import DetailType
from nodemend.domain.faults import Verdict
from nodemend.domain.incidents import (
    Incident,
    IncidentState,
    Outcome,
    TimelineEntry,
    close,
    move,
    record,
)
from nodemend.domain.nodes import NodeRef
from nodemend.domain.reasons import Reason
from tests.fakes import aws
from tests.fakes.aws import TABLE, Wire
from tests.fakes.examples import CLUSTER, NODE, finding, full, waiting
from tests.fakes.stores import MemoryIncidents
from tests.fakes.system import START, ManualClock

REASON = Reason("because", "a test says so")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def dynamodb() -> Iterator[Any]:
    with aws.dynamodb() as client:
        yield client


@pytest.fixture
def dynamo(dynamodb: Any, clock: ManualClock) -> DynamoIncidents:
    return DynamoIncidents(table=TABLE, client=dynamodb, clock=clock)


@pytest.fixture(params=["memory", "dynamodb"])
def incidents(request: pytest.FixtureRequest, clock: ManualClock) -> Incidents:
    if request.param == "memory":
        return MemoryIncidents(clock)
    store: Incidents = request.getfixturevalue("dynamo")
    return store


def stored(incident: Incident) -> Incident:
    return replace(incident, new_events=())


def closed(incident: Incident, outcome: Outcome = Outcome.SKIPPED) -> Incident:
    return close(incident, outcome, REASON, step="close_incident", now=START)


def raw(client: Any, pk: str, sk: str) -> dict[str, Any]:
    item: dict[str, Any] = client.get_item(
        TableName=TABLE, Key={"pk": {"S": pk}, "sk": {"S": sk}}
    ).get("Item", {})
    return item


def raw_record(client: Any, incident: Incident) -> dict[str, Any]:
    return raw(client, f"INCIDENT#{incident.id}", "RECORD")


# --- records ------------------------------------------------------------------------------------


def test_an_unknown_incident_is_none(incidents: Incidents) -> None:
    assert incidents.get("01NOBODY") is None


def test_a_created_incident_is_read_back_without_its_new_events(incidents: Incidents) -> None:
    incident = waiting()
    assert incidents.create(incident)
    assert incidents.get(incident.id) == stored(incident)


def test_every_field_of_a_full_incident_survives_the_store(incidents: Incidents) -> None:
    incident = full()
    incidents.create(incident)
    read = incidents.get(incident.id)
    assert read == incident
    assert read is not None
    assert [type(one) for one in (read.findings, read.plan, read.state)] == [
        tuple,
        tuple,
        IncidentState,
    ]


def test_floats_come_back_exactly(incidents: Incidents) -> None:
    values = [0.1 + 0.2, 1 / 3, 79.0, -1e-9, 9.223372036854776e18, 5e-324, 1.7976931348623157e308]
    incident = waiting(findings=tuple(finding(v, gpu=str(i)) for i, v in enumerate(values)))
    incidents.create(incident)
    read = incidents.get(incident.id)
    assert read is not None
    assert [one.evidence.value for one in read.findings] == values
    assert all(isinstance(one.evidence.value, float) for one in read.findings)


def test_a_second_creation_under_the_same_id_changes_nothing(incidents: Incidents) -> None:
    incident = waiting()
    incidents.create(incident)
    assert not incidents.create(replace(incident, requested_by="someone else"))
    assert incidents.get(incident.id) == stored(incident)


def test_a_saved_incident_has_the_next_version_and_no_new_events(incidents: Incidents) -> None:
    incident = waiting()
    incidents.create(incident)
    changed = move(stored(incident), IncidentState.ADMITTED, START)
    saved = incidents.save(record(changed, DetailType.INCIDENT_ADMITTED, **admitted_event()))
    assert saved.version == incident.version + 1
    assert saved.new_events == ()
    assert incidents.get(incident.id) == saved


def admitted_event() -> dict[str, Any]:
    return {
        "step": "dispatch_incidents",
        "reason": REASON,
        "now": START,
        "data": {"mode": "enforce", "plan": ("replace",), "policy_version": "v1"},
    }


def test_a_save_of_a_stale_version_is_refused(incidents: Incidents) -> None:
    incident = waiting()
    incidents.create(incident)
    read = stored(incident)
    incidents.save(replace(read, waiting_for="first"))
    with pytest.raises(ConcurrentUpdateError, match=incident.id):
        incidents.save(replace(read, waiting_for="second"))
    latest = incidents.get(incident.id)
    assert latest is not None
    assert latest.waiting_for == "first"


def test_an_incident_that_was_never_created_cannot_be_saved(incidents: Incidents) -> None:
    with pytest.raises(ConcurrentUpdateError):
        incidents.save(waiting())
    assert incidents.get(waiting().id) is None


@pytest.mark.case("R33")
def test_a_write_by_another_execution_after_the_close_is_rejected(incidents: Incidents) -> None:
    incident = waiting()
    incidents.create(incident)
    done = incidents.save(closed(stored(incident), Outcome.RECOVERED))
    late_duplicate = replace(done, outcome=Outcome.NEEDS_HUMAN, execution_arn="arn:run-b")
    with pytest.raises(ConcurrentUpdateError):
        incidents.save(late_duplicate)
    final = incidents.get(incident.id)
    assert final is not None
    assert final.outcome is Outcome.RECOVERED


def test_an_event_that_does_not_fit_its_model_is_refused_before_anything_is_stored(
    incidents: Incidents,
) -> None:
    incident = record(
        stored(waiting()),
        DetailType.NODE_CORDONED,
        step="cordon_node",
        reason=REASON,
        now=START,
        data={"no_such_field": 1},
    )
    with pytest.raises(InvalidInputError, match="Node Cordoned"):
        incidents.create(incident)
    assert incidents.get(incident.id) is None


def test_an_event_that_does_not_fit_its_model_leaves_the_record_as_it_was(
    incidents: Incidents,
) -> None:
    incident = waiting()
    incidents.create(incident)
    changed = replace(stored(incident), waiting_for="changed")
    with pytest.raises(InvalidInputError):
        incidents.save(
            record(changed, DetailType.REPAIR_STARTED, step="x", reason=REASON, now=START, data={})
        )
    assert incidents.get(incident.id) == stored(incident)


def test_open_incidents_are_those_of_the_cluster_that_are_not_closed_oldest_first(
    incidents: Incidents,
) -> None:
    newer = waiting("01B", opened_at=START + timedelta(seconds=1))
    older = waiting("01C", opened_at=START)
    twin = waiting("01A", opened_at=START)
    ended = waiting("01D", opened_at=START)
    elsewhere = waiting("01E", cluster="train-b")
    born_closed = closed(stored(waiting("01F")))
    for incident in (newer, older, twin, ended, elsewhere, born_closed):
        assert incidents.create(incident)
    incidents.save(closed(stored(ended)))
    assert [one.id for one in incidents.list_open(CLUSTER)] == ["01A", "01C", "01B"]
    assert incidents.list_open("train-c") == []
    assert [one.id for one in incidents.list_open(None)] == ["01A", "01C", "01E", "01B"]


def test_more_open_incidents_than_one_batch_holds_are_all_listed(incidents: Incidents) -> None:
    ids = [f"01BULK{number:04d}" for number in range(120)]
    for incident_id in ids:
        incidents.create(waiting(incident_id))
    assert [one.id for one in incidents.list_open(CLUSTER)] == ids
    assert [one.id for one in incidents.list_open(None)] == ids


# --- the node's one incident --------------------------------------------------------------------


def test_the_first_claim_of_a_node_wins_and_the_second_learns_who_has_it(
    incidents: Incidents,
) -> None:
    assert incidents.claim_node(CLUSTER, "uid-1", "01A") == "01A"
    assert incidents.claim_node(CLUSTER, "uid-1", "01B") == "01A"
    assert incidents.claim_node(CLUSTER, "uid-1", "01A") == "01A"
    assert incidents.claim_node(CLUSTER, "uid-2", "01B") == "01B"
    assert incidents.claim_node("train-b", "uid-1", "01C") == "01C"


@pytest.mark.case("R32")
def test_two_openings_that_race_for_a_node_agree_on_one_incident(incidents: Incidents) -> None:
    for round_ in range(20):
        barrier = threading.Barrier(2)

        def claim(name: str, round_: int = round_, barrier: threading.Barrier = barrier) -> str:
            barrier.wait(timeout=10)
            return incidents.claim_node(CLUSTER, f"uid-{round_}", f"{name}-{round_}")

        with ThreadPoolExecutor(2) as pool:
            holders = set(pool.map(claim, ("member", "admin")))
        assert len(holders) == 1
        assert holders <= {f"member-{round_}", f"admin-{round_}"}


def test_a_released_node_can_be_claimed_again(incidents: Incidents) -> None:
    incidents.claim_node(CLUSTER, "uid-1", "01A")
    incidents.release_node(CLUSTER, "uid-1", "01A")
    assert incidents.claim_node(CLUSTER, "uid-1", "01B") == "01B"


def test_a_late_release_does_not_drop_the_pointer_of_the_next_incident(
    incidents: Incidents,
) -> None:
    incidents.claim_node(CLUSTER, "uid-1", "01A")
    incidents.release_node(CLUSTER, "uid-1", "01A")
    incidents.claim_node(CLUSTER, "uid-1", "01B")
    incidents.release_node(CLUSTER, "uid-1", "01A")
    assert incidents.claim_node(CLUSTER, "uid-1", "01C") == "01B"


def test_a_node_without_uid_cannot_be_claimed_but_released(incidents: Incidents) -> None:
    with pytest.raises(InvalidInputError, match=r"node\.uid"):
        incidents.claim_node(CLUSTER, "", "01A")
    incidents.release_node(CLUSTER, "", "01A")


def test_an_instance_is_claimed_by_one_incident_however_often_it_asks(
    incidents: Incidents,
) -> None:
    assert incidents.claim_instance("i-0bbbbbbbbbbbbbbb1", "01A")
    assert incidents.claim_instance("i-0bbbbbbbbbbbbbbb1", "01A")
    assert not incidents.claim_instance("i-0bbbbbbbbbbbbbbb1", "01B")
    assert incidents.claim_instance("i-0bbbbbbbbbbbbbbb2", "01B")


# --- the ledger of handled faults ---------------------------------------------------------------


def test_a_handled_fault_is_known_on_this_boot_of_this_node_only(incidents: Incidents) -> None:
    until = START + timedelta(hours=24)
    incidents.mark_handled(CLUSTER, NODE, ["xid/gpu3/79", "hang/node/-"], until)
    asked = ["xid/gpu3/79", "xid/gpu3/79", "hang/node/-", "xid/gpu4/79"]
    assert incidents.handled_until(CLUSTER, NODE, asked) == {
        "xid/gpu3/79": until,
        "hang/node/-": until,
    }
    for other in (replace(NODE, boot_id="next"), replace(NODE, uid="other")):
        assert incidents.handled_until(CLUSTER, other, asked) == {}
    assert incidents.handled_until("train-b", NODE, asked) == {}
    assert incidents.handled_until(CLUSTER, NODE, []) == {}


def test_a_handled_fault_expires_by_the_clock_not_by_the_store(
    incidents: Incidents, clock: ManualClock
) -> None:
    until = START + timedelta(seconds=60)
    incidents.mark_handled(CLUSTER, NODE, ["k"], until)
    clock.advance(59.999999)
    assert incidents.handled_until(CLUSTER, NODE, ["k"]) == {"k": until}
    clock.advance(0.000001)
    assert incidents.handled_until(CLUSTER, NODE, ["k"]) == {}


def test_a_late_duplicate_does_not_shorten_how_long_a_fault_is_handled(
    incidents: Incidents,
) -> None:
    long, short = START + timedelta(days=30), START + timedelta(days=1)
    incidents.mark_handled(CLUSTER, NODE, ["k"], long)
    incidents.mark_handled(CLUSTER, NODE, ["k"], short)
    assert incidents.handled_until(CLUSTER, NODE, ["k"]) == {"k": long}
    incidents.mark_handled(CLUSTER, NODE, ["k"], long + timedelta(days=1))
    assert incidents.handled_until(CLUSTER, NODE, ["k"]) == {"k": long + timedelta(days=1)}


def test_nodes_that_could_not_be_resolved_are_told_apart_by_their_names(
    incidents: Incidents,
) -> None:
    until = START + timedelta(days=1)
    incidents.mark_handled(CLUSTER, NodeRef(CLUSTER, "pod-a"), ["k"], until)
    assert incidents.handled_until(CLUSTER, NodeRef(CLUSTER, "pod-a"), ["k"]) == {"k": until}
    assert incidents.handled_until(CLUSTER, NodeRef(CLUSTER, "pod-b"), ["k"]) == {}


# --- DynamoDB only ------------------------------------------------------------------------------


def test_the_record_is_a_readable_map_with_the_attributes_that_indexes_need(
    dynamo: DynamoIncidents, dynamodb: Any
) -> None:
    incident = waiting()
    dynamo.create(incident)
    item = raw_record(dynamodb, incident)
    assert item["document"]["M"]["node"]["M"]["name"] == {"S": NODE.name}
    assert item["document"]["M"]["findings"]["L"][0]["M"]["code"] == {"N": "79"}
    assert "new_events" not in item["document"]["M"]
    assert {
        name: item[name]
        for name in ("version", "state", "cluster", "node_name", "opened_at", "open_cluster")
    } == {
        "version": {"N": "0"},
        "state": {"S": "waiting"},
        "cluster": {"S": CLUSTER},
        "node_name": {"S": NODE.name},
        "opened_at": {"S": "2026-05-01T10:00:00.000000Z"},
        "open_cluster": {"S": CLUSTER},
    }
    assert item["outbox_pending"] == {"S": "1"}
    assert list(item["outbox"]["M"]) == [f"{incident.id}-0001"]
    assert "expires_at" not in item


def test_an_incident_without_events_is_not_in_the_outbox_index(
    dynamo: DynamoIncidents, dynamodb: Any
) -> None:
    incident = stored(waiting())
    dynamo.create(incident)
    dynamo.save(incident)
    item = raw_record(dynamodb, incident)
    assert item["outbox"] == {"M": {}}
    assert "outbox_pending" not in item


def test_a_closed_record_leaves_the_open_index_and_expires_after_400_days(
    dynamo: DynamoIncidents, dynamodb: Any
) -> None:
    incident = waiting()
    dynamo.create(incident)
    dynamo.save(closed(stored(incident)))
    item = raw_record(dynamodb, incident)
    assert "open_cluster" not in item
    assert item["expires_at"] == {"N": str(int((START + timedelta(days=400)).timestamp()))}


def test_claims_and_handled_faults_carry_a_time_to_live(
    dynamo: DynamoIncidents, dynamodb: Any
) -> None:
    dynamo.claim_instance("i-0bbbbbbbbbbbbbbb1", "01A")
    claim = raw(dynamodb, "INSTANCE#i-0bbbbbbbbbbbbbbb1", "CLAIM")
    assert claim["expires_at"] == {"N": str(int((START + timedelta(days=30)).timestamp()))}
    until = START + timedelta(days=30)
    dynamo.mark_handled(CLUSTER, NODE, ["xid/gpu3/79"], until)
    handled = raw(dynamodb, f"NODE#{CLUSTER}#{NODE.uid}", f"HANDLED#{NODE.boot_id}#xid/gpu3/79")
    assert int(handled["expires_at"]["N"]) > until.timestamp()
    dynamo.claim_node(CLUSTER, NODE.uid, "01A")
    assert "expires_at" not in raw(dynamodb, f"NODE#{CLUSTER}#{NODE.uid}", "OPEN")


def test_a_document_of_a_later_release_is_read_and_a_missing_field_takes_its_default(
    dynamo: DynamoIncidents, dynamodb: Any
) -> None:
    incident = full()
    dynamo.create(incident)
    item = raw_record(dynamodb, incident)
    item["document"]["M"]["from_the_future"] = {"M": {"a": {"N": "1"}}}
    item["document"]["M"]["findings"]["L"][0]["M"]["from_the_future"] = {"S": "x"}
    del item["document"]["M"]["waiting_for"]
    del item["document"]["M"]["drain"]["M"]["gone"]
    dynamodb.put_item(TableName=TABLE, Item=item)
    assert incident.drain is not None
    expected = replace(incident, waiting_for="", drain=replace(incident.drain, gone=0))
    assert dynamo.get(incident.id) == expected


def test_a_document_that_cannot_be_read_is_an_error_that_names_the_record(
    dynamo: DynamoIncidents, dynamodb: Any
) -> None:
    unreadable(dynamo, dynamodb, "01BROKEN")
    with pytest.raises(InvalidInputError, match="01BROKEN"):
        dynamo.get("01BROKEN")


def test_one_unreadable_record_does_not_hide_the_other_open_incidents(
    dynamo: DynamoIncidents, dynamodb: Any, caplog: pytest.LogCaptureFixture
) -> None:
    unreadable(dynamo, dynamodb, "01BROKEN")
    dynamo.create(waiting("01FINE"))
    for cluster in (CLUSTER, None):
        assert [one.id for one in dynamo.list_open(cluster)] == ["01FINE"]
    assert "01BROKEN" in caplog.text


def unreadable(dynamo: DynamoIncidents, dynamodb: Any, incident_id: str) -> None:
    incident = waiting(incident_id)
    dynamo.create(incident)
    item = raw_record(dynamodb, incident)
    item["document"]["M"]["state"] = {"S": "a state of the next release"}
    dynamodb.put_item(TableName=TABLE, Item=item)


def test_a_record_closed_since_the_index_was_read_is_not_listed(
    dynamo: DynamoIncidents, dynamodb: Any
) -> None:
    incident = waiting()
    dynamo.create(incident)
    dynamo.save(closed(stored(incident)))
    item = raw_record(dynamodb, incident)
    dynamodb.put_item(TableName=TABLE, Item=item | {"open_cluster": {"S": CLUSTER}})
    assert dynamo.list_open(CLUSTER) == []


def test_a_save_does_not_bring_back_what_a_publisher_has_removed(
    dynamo: DynamoIncidents, dynamodb: Any
) -> None:
    incident = waiting()
    dynamo.create(incident)
    dynamodb.update_item(
        TableName=TABLE,
        Key={"pk": {"S": f"INCIDENT#{incident.id}"}, "sk": {"S": "RECORD"}},
        UpdateExpression="REMOVE outbox.#sent, outbox_pending",
        ExpressionAttributeNames={"#sent": f"{incident.id}-0001"},
    )
    changed = record(stored(incident), DetailType.INCIDENT_ADMITTED, **admitted_event())
    dynamo.save(changed)
    item = raw_record(dynamodb, incident)
    assert list(item["outbox"]["M"]) == [f"{incident.id}-0002"]
    assert item["outbox_pending"] == {"S": "1"}


@pytest.mark.parametrize("operation", ["PutItem", "UpdateItem"])
def test_a_write_that_the_sdk_repeats_after_a_lost_answer_counts_as_done(
    dynamo: DynamoIncidents, dynamodb: Any, operation: str
) -> None:
    wire = Wire(dynamodb)
    incident = waiting()
    if operation == "PutItem":
        wire.repeat("PutItem")
    assert dynamo.create(incident)
    if operation == "UpdateItem":
        wire.repeat("UpdateItem")
    saved = dynamo.save(replace(stored(incident), waiting_for="x"))
    assert dynamo.get(incident.id) == saved
    assert saved.version == 1


def test_a_claim_that_the_sdk_repeats_after_a_lost_answer_is_ours(
    dynamo: DynamoIncidents, dynamodb: Any
) -> None:
    Wire(dynamodb).repeat("PutItem")
    assert dynamo.claim_node(CLUSTER, "uid-1", "01A") == "01A"
    assert dynamo.claim_node(CLUSTER, "uid-1", "01B") == "01A"


def test_a_claim_whose_holder_vanishes_in_between_is_tried_again(
    dynamo: DynamoIncidents, dynamodb: Any
) -> None:
    wire = Wire(dynamodb)
    wire.fail("PutItem", "ConditionalCheckFailedException")
    assert dynamo.claim_node(CLUSTER, "uid-1", "01A") == "01A"
    assert len(wire.asked("GetItem")) == 1
    assert wire.asked("GetItem")[0]["ConsistentRead"] is True


def test_a_claim_that_never_settles_is_given_up(dynamo: DynamoIncidents, dynamodb: Any) -> None:
    wire = Wire(dynamodb)
    wire.fail("PutItem", "ConditionalCheckFailedException", times=50)
    with pytest.raises(AwsUnavailableError, match="uid-1"):
        dynamo.claim_node(CLUSTER, "uid-1", "01A")
    assert len(wire.asked("PutItem")) == 5


def test_keys_that_dynamodb_leaves_unprocessed_are_asked_for_again(
    dynamo: DynamoIncidents, dynamodb: Any
) -> None:
    until = START + timedelta(days=1)
    keys = [f"k{number}" for number in range(3)]
    dynamo.mark_handled(CLUSTER, NODE, keys, until)
    wire = Wire(dynamodb)

    def nothing_yet(asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return 200, {"Responses": {TABLE: []}, "UnprocessedKeys": asked["RequestItems"]}

    wire.answer("BatchGetItem", nothing_yet, times=2)
    assert dynamo.handled_until(CLUSTER, NODE, keys) == dict.fromkeys(keys, until)
    wire.answer("BatchGetItem", nothing_yet, times=99)
    with pytest.raises(AwsUnavailableError, match="3 keys were not processed"):
        dynamo.handled_until(CLUSTER, NODE, keys)


def test_a_document_that_is_too_large_loses_old_timeline_lines_first(
    dynamo: DynamoIncidents, dynamodb: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lines = tuple(
        TimelineEntry(START + timedelta(seconds=i), "drain_node", "Drain Progress", long_reason(i))
        for i in range(200)
    )
    incident = waiting(timeline=lines, findings=(finding(gpu="1"), finding(gpu="2")))
    dynamo.create(stored(incident))
    read = dynamo.get(incident.id)
    assert read is not None
    assert 20 <= len(read.timeline) < 200
    assert read.timeline == incident.timeline[-len(read.timeline) :]
    assert read.findings == incident.findings
    assert "timeline lines" in caplog.text


def long_reason(number: int) -> Reason:
    return Reason("blocked", f"{number} " + "é" * 1500)


def test_a_document_that_is_still_too_large_loses_its_least_severe_findings(
    dynamo: DynamoIncidents,
) -> None:
    many = [finding(gpu=str(i), verdict=Verdict.SUSPECT, summary="s" * 4000) for i in range(100)]
    deciding = finding(gpu="deciding", summary="fatal")
    incident = stored(waiting(findings=(*many, deciding)))
    dynamo.create(incident)
    read = dynamo.get(incident.id)
    assert read is not None
    assert read.primary == deciding
    assert 1 < len(read.findings) < 101
    assert read.findings == tuple(one for one in incident.findings if one in read.findings)
    saved = dynamo.save(replace(incident, waiting_for="x"))
    assert saved == dynamo.get(incident.id)
    assert saved.findings == read.findings


def test_a_document_that_cannot_be_made_to_fit_is_refused(dynamo: DynamoIncidents) -> None:
    incident = waiting(findings=(), request_reason="x" * DOCUMENT_LIMIT)
    with pytest.raises(InvalidInputError, match="keep below"):
        dynamo.create(stored(incident))


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("AccessDeniedException", 400, AwsForbiddenError),
        ("ProvisionedThroughputExceededException", 400, AwsUnavailableError),
        ("InternalServerError", 500, AwsUnavailableError),
        ("ResourceNotFoundException", 400, InvalidInputError),
    ],
)
def test_each_method_raises_only_the_domains_errors(
    dynamo: DynamoIncidents, dynamodb: Any, code: str, status: int, error: type[Exception]
) -> None:
    wire = Wire(dynamodb)
    incident = waiting()
    calls: list[tuple[str, Any]] = [
        ("PutItem", lambda: dynamo.claim_node(CLUSTER, "uid-1", "01A")),
        ("DeleteItem", lambda: dynamo.release_node(CLUSTER, "uid-1", "01A")),
        ("PutItem", lambda: dynamo.create(incident)),
        ("GetItem", lambda: dynamo.get("01A")),
        ("UpdateItem", lambda: dynamo.save(incident)),
        ("Query", lambda: dynamo.list_open(CLUSTER)),
        ("Scan", lambda: dynamo.list_open(None)),
        ("PutItem", lambda: dynamo.claim_instance("i-1", "01A")),
        ("BatchGetItem", lambda: dynamo.handled_until(CLUSTER, NODE, ["k"])),
        ("PutItem", lambda: dynamo.mark_handled(CLUSTER, NODE, ["k"], START)),
    ]
    for operation, call in calls:
        wire.fail(operation, code, status)
        with pytest.raises(error, match=f"dynamodb:{operation}"):
            call()


def test_no_connection_is_unavailable(dynamo: DynamoIncidents, dynamodb: Any) -> None:
    Wire(dynamodb).drop("GetItem")
    with pytest.raises(AwsUnavailableError, match="dynamodb:GetItem"):
        dynamo.get("01A")
