"""The way in by alert: AMP is asked, and only its answer counts."""

import json
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from local.alerts import text_message
from nodemend.application.open_incident import open_incident
from nodemend.application.ports import QueryResult
from nodemend.application.receive_alert import MAX_RECORDS, receive_alert
from nodemend.contracts.alerts import ReceiveAlertRequest, ReceiveAlertResult
from nodemend.contracts.events import FaultEnvelope, IncidentRejected
from nodemend.domain.errors import AwsForbiddenError, AwsUnavailableError, PolicyInvalidError
from nodemend.domain.faults import Family, Mode
from nodemend.domain.incidents import Incident, IncidentState, Origin, Outcome
from nodemend.domain.policy import ClusterPolicy
from nodemend.domain.reasons import Reason
from tests.fakes.system import START
from tests.unit.application import run
from tests.unit.application.stage import (
    CLUSTER,
    CLUSTER_POLICY,
    Stage,
    after_every_crash,
    catalogue,
    enforce,
    instance_id,
    node_name,
    samples,
    temperature_finding,
    xid_labels,
)

XID = len(catalogue().of_family(Family.ECC))


def alert(number: int = 1, *, status: str = "firing", gpu: int = 3, **changes: Any) -> Any:
    labels = {"alertname": "GpuXidCritical", "Hostname": node_name(number), "gpu": str(gpu)}
    values = {
        "status": status,
        "labels": labels | changes.pop("labels", {}),
        "annotations": {"summary": "XID 79"},
        "startsAt": (START - timedelta(minutes=2)).isoformat(),
        "fingerprint": f"f-{number}-{gpu}",
    }
    return values | changes


def message(*alerts: Any, **changes: Any) -> str:
    return json.dumps({"version": "4", "status": "firing", "alerts": list(alerts)} | changes)


def envelope(
    body: str, *, at: datetime = START, subject: str | None = None, **attributes: str
) -> str:
    return json.dumps(
        {
            "Type": "Notification",
            "MessageId": "m-1",
            "TopicArn": "arn:aws:sns:eu-central-1:1:alerts",
            "Subject": subject,
            "Message": body,
            "Timestamp": at.isoformat(),
            "MessageAttributes": {
                name: {"Type": "String", "Value": value} for name, value in attributes.items()
            },
        }
    )


def receive(stage: Stage, body: str) -> ReceiveAlertResult:
    request = ReceiveAlertRequest.model_validate({"body": body, "messageId": "q-1"})
    return receive_alert(request, ports=stage.alert)


def send(stage: Stage, *alerts: Any, **changes: Any) -> ReceiveAlertResult:
    """Let the alert manager send a group now."""
    return receive(stage, envelope(message(*alerts, **changes), at=stage.clock.now()))


def deliver(stage: Stage) -> list[str | None]:
    """Hand the fault events to open_incident, as bus and queue do."""
    return [
        open_incident(FaultEnvelope.model_validate({"detail": one}).detail, ports=stage.open)
        for one in stage.events("GPU Fault Detected")
    ]


def sick(stage: Stage, *numbers: int, gpu: int = 3) -> None:
    stage.metrics.answer("xid-count", samples(*(xid_labels(n, 79, gpu) for n in numbers)))


def rejected(stage: Stage) -> list[Incident]:
    return [record.incident for record in stage.incidents.records.values()]


def counted(stage: Stage, outcome: str) -> float:
    return stage.telemetry.counted("Alerts", outcome=outcome)


# --- what holds ---------------------------------------------------------------------------------


def test_what_amp_confirms_goes_the_way_of_a_scans_finding_with_its_origin() -> None:
    stage = Stage()
    sick(stage, 1)

    result = send(stage, alert())

    assert (result.firing, result.announced, result.outcomes) == (1, 1, {"confirmed": 1})
    (event,) = stage.events("GPU Fault Detected")
    assert (event["origin"], event["family"], event["cluster"]) == ("alert", "ecc", CLUSTER)
    assert event["findings"][0]["evidence"]["labels"] == xid_labels(1, 79, 3)
    (incident_id,) = deliver(stage)
    assert incident_id is not None
    incident = stage.incident(incident_id)
    assert (incident.origin, incident.state) == (Origin.ALERT, IncidentState.WAITING)
    assert stage.events("Incident Opened")[0]["origin"] == "alert"
    assert stage.mutations() == []


def test_an_event_without_an_origin_is_a_scans() -> None:
    stage = Stage()
    sick(stage, 1)
    run.scan(stage)
    assert stage.events("GPU Fault Detected")[0]["origin"] == "scan"


def test_findings_of_nodes_that_no_alert_names_are_left_to_the_scans() -> None:
    stage = Stage()
    sick(stage, 1, 2)
    send(stage, alert(1))
    (event,) = stage.events("GPU Fault Detected")
    assert list(event["findings"][0]["node_names"]) == [node_name(1)]


def test_the_family_is_asked_whatever_the_alert_claims() -> None:
    """An alert about an XID may be the first sign of a lost GPU."""
    stage = Stage()
    stage.metrics.answer("gpu-lost", samples(xid_labels(1, None, 6)))
    send(stage, alert(gpu=3))
    (event,) = stage.events("GPU Fault Detected")
    assert event["findings"][0]["fault_class"] == "gpu_lost"
    assert len(stage.metrics.asked) == XID


def test_all_families_are_asked_if_the_alert_does_not_tell() -> None:
    stage = Stage()
    stage.metrics.answer("gpu-temperature", samples(xid_labels(1, None, 3), value=95))
    send(stage, alert(labels={"alertname": "GpuBroken"}))
    assert len(stage.metrics.asked) == len(catalogue().rules)
    assert stage.events("GPU Fault Detected")[0]["family"] == "thermal"


def test_a_fault_of_the_application_confirms_the_alert_and_sends_nothing() -> None:
    stage = Stage()
    stage.metrics.answer("xid-count", samples(xid_labels(1, 31, 3)))
    result = send(stage, alert())
    assert (result.outcomes, result.announced) == ({"confirmed": 1}, 0)
    assert rejected(stage) == []


def test_a_label_with_the_instance_id_names_the_node_too() -> None:
    stage = Stage()
    labels = {"instance_id": instance_id(1), "UUID": "GPU-1-3", "gpu": "3", "xid": "79"}
    stage.metrics.answer("xid-count", samples(labels))
    one = alert()
    one["labels"] = {"alertname": "GpuXid", "instance_id": instance_id(1)}
    assert send(stage, one).outcomes == {"confirmed": 1}
    (incident_id,) = deliver(stage)
    assert incident_id is not None
    assert stage.incident(incident_id).node.name == node_name(1)


# --- what does not hold -------------------------------------------------------------------------


def test_what_amp_does_not_confirm_is_recorded_as_skipped_and_nothing_is_touched() -> None:
    stage = Stage()

    result = send(stage, alert())

    assert result.outcomes == {"not_confirmed": 1}
    (incident,) = rejected(stage)
    assert (incident.state, incident.outcome, incident.origin) == (
        IncidentState.CLOSED,
        Outcome.SKIPPED,
        Origin.ALERT,
    )
    assert incident.reason is not None
    assert incident.reason.code == "not_confirmed"
    assert incident.node.name == node_name(1)
    (event,) = stage.events("Incident Rejected")
    parsed = IncidentRejected.model_validate(event)
    assert parsed.outcome == "SKIPPED"
    assert (parsed.fault_class, parsed.alert_count) == ("unknown", 1)
    assert parsed.alerts[0].fingerprint == "f-1-3"
    assert stage.events("GPU Fault Detected") == []
    assert stage.mutations() == []
    assert stage.queue.messages == []


def test_a_rejection_names_the_fault_that_the_alerts_rule_stands_for() -> None:
    stage = Stage()
    send(stage, alert(labels={"nodemend_rule": "gpu-lost"}))
    assert stage.events("Incident Rejected")[0]["fault_class"] == "gpu_lost"


def test_a_rejection_is_recorded_once_however_often_the_alert_is_repeated() -> None:
    stage = Stage()
    for _ in range(30):
        send(stage, alert())
        stage.clock.advance(301)
    assert len(rejected(stage)) == 1
    assert counted(stage, "not_confirmed") == 30
    again = (START + timedelta(hours=2)).isoformat()
    send(stage, alert(startsAt=again))
    assert len(rejected(stage)) == 2


def test_a_repeat_is_confirmed_if_the_fault_shows_by_then() -> None:
    stage = Stage()
    send(stage, alert())
    sick(stage, 1)
    stage.clock.advance(301)
    assert send(stage, alert()).outcomes == {"confirmed": 1}


def test_the_alerts_of_one_node_are_one_rejection() -> None:
    stage = Stage()
    send(stage, *(alert(1, gpu=gpu) for gpu in range(8)), alert(2))
    assert sorted(one.node.name for one in rejected(stage)) == [node_name(1), node_name(2)]
    by_node = {event["node"]["name"]: event for event in stage.events("Incident Rejected")}
    assert by_node[node_name(1)]["alert_count"] == 8


def test_a_text_alert_that_is_not_confirmed_is_recorded_once_a_day() -> None:
    stage = Stage()
    labels = {"alertname": "GpuXid", "Hostname": node_name(1)}
    text = text_message([("firing", labels, {"s": "x"})])
    for hours in (0, 1, 24):
        stage.clock.at = START + timedelta(hours=hours)
        receive(stage, envelope(text, at=stage.clock.now()))
    assert len(rejected(stage)) == 1
    stage.clock.at = START + timedelta(days=5)  # what was remembered is forgotten
    receive(stage, envelope(text, at=stage.clock.now()))
    assert len(rejected(stage)) == 2


# --- unknown ------------------------------------------------------------------------------------


def test_unknown_is_neither_the_message_comes_again() -> None:
    stage = Stage()
    stage.metrics.fail("amp_timeout")
    with pytest.raises(AwsUnavailableError, match="amp_timeout"):
        send(stage, alert())
    assert stage.bus.accepted == []
    assert rejected(stage) == []
    assert counted(stage, "unknown") == 1
    stage.metrics.clear()
    sick(stage, 1)
    assert send(stage, alert()).outcomes == {"confirmed": 1}


def test_what_holds_is_announced_though_another_rule_is_unknown() -> None:
    stage = Stage()
    stage.metrics.fail(matches="gpu-lost")
    sick(stage, 1)
    with pytest.raises(AwsUnavailableError):
        send(stage, alert(1), alert(2))
    assert len(stage.events("GPU Fault Detected")) == 1
    stage.metrics.fail(matches="nothing-more")
    stage.metrics.clear()
    sick(stage, 1)
    assert send(stage, alert(1), alert(2)).outcomes == {"duplicate": 1, "not_confirmed": 1}
    assert len(stage.events("GPU Fault Detected")) == 1


def test_an_event_that_is_not_accepted_brings_the_message_back() -> None:
    stage = Stage()
    sick(stage, 1)
    original = stage.bus.announce
    stage.bus.announce = lambda events: [one.event_id for one in events]  # type: ignore[method-assign]
    with pytest.raises(AwsUnavailableError, match="not accepted"):
        send(stage, alert())
    stage.bus.announce = original  # type: ignore[method-assign]
    assert send(stage, alert()).announced == 1


def test_an_unusable_policy_brings_the_message_back() -> None:
    stage = Stage()
    stage.policies.problem = "no"
    with pytest.raises(PolicyInvalidError):
        send(stage, alert())
    assert stage.dead_letters.letters == []


# --- copies, late ones, resolved ones -----------------------------------------------------------


@pytest.mark.case("D43")
def test_d43_a_notification_that_comes_three_times_is_asked_and_announced_once() -> None:
    stage = Stage()
    sick(stage, 1)
    outcomes = [send(stage, alert()).outcomes for _ in range(3)]
    assert outcomes == [{"confirmed": 1}, {"duplicate": 1}, {"duplicate": 1}]
    assert len(stage.metrics.asked) == XID
    assert len(stage.events("GPU Fault Detected")) == 1


@pytest.mark.case("D43")
def test_d43_a_copy_within_one_message_counts_once() -> None:
    stage = Stage()
    assert send(stage, alert(), alert()).outcomes == {"not_confirmed": 1}


@pytest.mark.case("D36")
def test_d36_resolved_alerts_open_and_close_nothing() -> None:
    stage = Stage()
    sick(stage, 1, 2)
    request = stage.put(IncidentState.DRAINING)
    before = stage.incident(request.incident_id)

    result = send(stage, alert(1, status="resolved"), alert(2), status="firing")

    assert result.outcomes == {"resolved": 1, "confirmed": 1}
    assert stage.incident(request.incident_id) == before
    (event,) = stage.events("GPU Fault Detected")
    assert event["findings"][0]["gpu_uuid"] == "GPU-2-3"


@pytest.mark.case("D36")
def test_d36_only_resolved_alerts_ask_nothing() -> None:
    stage = Stage()
    sick(stage, 1)
    assert send(stage, alert(status="resolved"), status="resolved").outcomes == {"resolved": 1}
    assert stage.metrics.asked == []
    assert stage.incidents.records == {}


@pytest.mark.case("D26")
def test_d26_a_late_copy_of_a_resolved_alert_is_dropped_and_a_new_one_is_not() -> None:
    stage = Stage()
    sick(stage, 1)
    send(stage, alert())
    stage.clock.advance(600)
    send(stage, alert(status="resolved"))
    stage.clock.advance(600)
    late = receive(stage, envelope(message(alert()), at=START))
    assert late.outcomes == {"stale": 1}
    new = send(stage, alert(startsAt=stage.clock.now().isoformat()))
    assert new.outcomes == {"confirmed": 1}


@pytest.mark.case("D26")
def test_d26_an_alert_that_goes_on_after_a_resolved_message_is_asked_again() -> None:
    """An alert manager that heard nothing for minutes resolves, and later fires on as before."""
    stage = Stage()
    sick(stage, 1)
    send(stage, alert(status="resolved"))
    stage.clock.advance(60)
    assert send(stage, alert()).outcomes == {"confirmed": 1}


@pytest.mark.case("D26")
def test_d26_what_began_before_the_operator_took_the_node_back_is_dropped() -> None:
    stage = Stage()
    sick(stage, 1)
    request = stage.put(IncidentState.DRAINING)
    stage.executions.end(request.incident_id, "ABORTED")
    stage.clock.advance(60)
    run.watch(stage, request.incident_id, "ABORTED")
    assert stage.incident(request.incident_id).outcome is Outcome.ABORTED_BY_OPERATOR
    stage.clock.advance(60)

    assert send(stage, alert()).outcomes == {"stale": 1}
    assert stage.metrics.asked == []
    again = alert(startsAt=stage.clock.now().isoformat(), fingerprint="f-new")
    assert send(stage, again).outcomes == {"confirmed": 1}


def test_a_close_in_a_dry_run_silences_no_alert() -> None:
    stage = Stage()
    sick(stage, 1)
    request = stage.put(IncidentState.DRAINING)
    stage.save(request.incident_id, mode=Mode.DRY_RUN)
    stage.executions.end(request.incident_id, "ABORTED")
    run.watch(stage, request.incident_id, "ABORTED")
    assert send(stage, alert()).outcomes == {"confirmed": 1}


def test_a_message_that_waited_for_hours_and_an_alert_of_last_week_are_dropped() -> None:
    stage = Stage()
    sick(stage, 1)
    stage.clock.advance(3601)
    assert receive(stage, envelope(message(alert()), at=START)).outcomes == {"stale": 1}
    old = alert(startsAt=(START - timedelta(days=6)).isoformat())
    assert send(stage, old).outcomes == {"stale": 1}
    assert stage.metrics.asked == []


def test_test_notifications_and_confirmations_are_ignored() -> None:
    stage = Stage()
    result = send(stage, alert(labels={"alertname": "Watchdog"}))
    assert result.outcomes == {"ignored": 1}
    confirmation = json.loads(envelope("Welcome"))
    receive(stage, json.dumps({**confirmation, "Type": "SubscriptionConfirmation"}))
    assert stage.metrics.asked == []
    assert stage.dead_letters.letters == []
    assert stage.incidents.records == {}


# --- storms and messages that cannot be read in full ----------------------------------------------


@pytest.mark.case("D41")
def test_d41_twelve_hundred_alerts_of_one_group_are_one_set_of_queries() -> None:
    stage = Stage()
    sick(stage, *range(1, 151))
    group = [alert(number, gpu=gpu) for number in range(1, 151) for gpu in range(8)]
    result = send(stage, *group)
    assert len(stage.metrics.asked) == XID
    assert (result.firing, result.announced) == (1200, 150)


@pytest.mark.case("D41")
def test_d41_a_group_that_is_wrong_of_many_nodes_is_one_record() -> None:
    stage = Stage()
    send(stage, *(alert(number) for number in range(1, MAX_RECORDS + 2)))
    (incident,) = rejected(stage)
    assert incident.node.name == ""
    assert incident.reason is not None
    assert f"{MAX_RECORDS + 1} nodes" in incident.reason.text
    assert stage.events("Incident Rejected")[0]["alert_count"] == MAX_RECORDS + 1


@pytest.mark.case("D41")
def test_d41_a_cut_message_makes_the_whole_cluster_be_asked() -> None:
    stage = Stage()
    sick(stage, 2, 3)
    cut = envelope(message(alert())[:-30], truncated="true")
    result = receive(stage, cut)
    assert len(stage.metrics.asked) == len(catalogue().rules)
    assert (result.outcomes, result.announced) == ({"confirmed": 1}, 2)
    assert receive(stage, cut).outcomes == {"duplicate": 1}


def test_a_cut_message_that_nothing_confirms_is_recorded_once() -> None:
    stage = Stage()
    for _ in range(3):
        receive(stage, envelope("{", at=stage.clock.now(), truncated="true"))
        stage.clock.advance(301)
    (incident,) = rejected(stage)
    assert incident.reason is not None
    assert "could not be read in full" in incident.reason.text


@pytest.mark.case("D38")
def test_d38_broken_json_is_never_acted_on_but_its_attributes_are_a_hint() -> None:
    stage = Stage()
    sick(stage, 2)
    broken = '{"alerts": [{"status": "firing", "labels": {"Hostname": "n"}, "a": "say "hi""}]}'
    receive(stage, envelope(broken, alertname="GpuXid"))
    assert len(stage.metrics.asked) == XID
    (event,) = stage.events("GPU Fault Detected")
    assert event["findings"][0]["gpu_uuid"] == "GPU-2-3"


@pytest.mark.case("D38")
@pytest.mark.case("D35")
def test_d35_d38_what_cannot_be_read_goes_to_the_dead_letters_with_the_reason() -> None:
    stage = Stage()
    body = envelope('{"alerts": [{"a": "say "hi""}]}')
    result = receive(stage, body)
    assert result.outcomes == {"refused": 1}
    (letter,) = stage.dead_letters.letters
    assert (letter.body, letter.field) == (body, "Message")
    assert "JSON" in letter.error
    assert "printf" in letter.remedy
    assert stage.metrics.asked == []
    assert counted(stage, "refused") == 1


def test_a_refusal_that_cannot_be_put_aside_brings_the_message_back() -> None:
    stage = Stage()

    def put(*_: Any, **__: Any) -> None:
        raise AwsForbiddenError("sqs:SendMessage: denied")

    stage.dead_letters.put = put  # type: ignore[method-assign]
    with pytest.raises(AwsForbiddenError):
        receive(stage, "hello")


@pytest.mark.case("D35")
def test_d35_two_alerts_of_the_default_text_are_worked_off() -> None:
    stage = Stage()
    sick(stage, 1)
    labels = [{"alertname": "GpuXid", "Hostname": node_name(n)} for n in (1, 2)]
    text = text_message([("firing", one, {"s": f"{n}\n - Hostname = {node_name(3)}"})
                         for n, one in enumerate(labels)])  # fmt: skip
    result = receive(stage, envelope(text, subject="[FIRING:2] GpuXid"))
    assert result.outcomes == {"confirmed": 1, "not_confirmed": 1}
    assert [one.node.name for one in rejected(stage)] == [node_name(2)]


def test_an_alert_that_names_no_node_makes_the_cluster_be_asked() -> None:
    stage = Stage()
    sick(stage, 2)
    one = alert()
    del one["labels"]["Hostname"]
    assert send(stage, one).announced == 1


# --- clusters -----------------------------------------------------------------------------------

OTHER = ClusterPolicy("gpu-test", "ws-2", "eu-central-1")


def test_an_alert_that_names_its_cluster_asks_that_one_only() -> None:
    stage = Stage(policy=enforce(clusters=(CLUSTER_POLICY, OTHER)))
    send(stage, alert(labels={"cluster": "gpu-test"}))
    assert {asked.cluster for asked in stage.metrics.asked} == {"gpu-test"}


def test_an_alert_of_any_cluster_asks_each_and_is_rejected_once() -> None:
    stage = Stage(policy=enforce(clusters=(CLUSTER_POLICY, OTHER)))
    send(stage, alert())
    assert {asked.cluster for asked in stage.metrics.asked} == {CLUSTER, "gpu-test"}
    assert len(rejected(stage)) == 1


def test_an_alert_of_a_foreign_cluster_is_refused_and_the_others_are_worked_off() -> None:
    own = replace(CLUSTER_POLICY, matcher='cluster="a"')
    stage = Stage(policy=enforce(clusters=(own,)))
    sick(stage, 1)
    body = message(alert(1, labels={"cluster": "a"}), alert(2, labels={"cluster": "z"}))
    assert receive(stage, body).outcomes == {"refused": 1}
    assert len(stage.events("GPU Fault Detected")) == 1
    (letter,) = stage.dead_letters.letters
    assert letter.field == "labels.cluster"
    assert CLUSTER in letter.error


def test_a_policy_without_clusters_refuses_every_alert() -> None:
    stage = Stage(policy=enforce(clusters=()))
    send(stage, alert())
    assert stage.dead_letters.letters[0].field == "labels.cluster"


# --- crashes ------------------------------------------------------------------------------------


def _crash(alerts: Iterable[Any], prepare: Any = None) -> Any:
    def build() -> tuple[Stage, Any]:
        stage = Stage()
        if prepare:
            prepare(stage)
        return stage, lambda: send(stage, *alerts)

    return build


def test_a_death_after_any_call_loses_and_doubles_nothing() -> None:
    def check(stage: Stage, _: Any) -> None:
        ids = {one["event_id"] for one in stage.events("GPU Fault Detected")}
        assert len(ids) == 1
        assert [one.node.name for one in rejected(stage)] == [node_name(2)]
        stage.clock.advance(120)
        stage.outbox.publish_pending()
        assert {one["event_id"] for one in stage.events("Incident Rejected")} == {
            f"{rejected(stage)[0].id}-0001"
        }

    points = after_every_crash(
        _crash([alert(1), alert(2), alert(3, status="resolved")], lambda stage: sick(stage, 1)),
        check,
    )
    assert points >= 8


def test_a_death_around_a_refusal_keeps_the_message() -> None:
    def check(stage: Stage, _: Any) -> None:
        assert {letter.body for letter in stage.dead_letters.letters} == {"hello"}

    def build() -> tuple[Stage, Any]:
        stage = Stage()
        return stage, lambda: receive(stage, "hello")

    assert after_every_crash(build, check) == 1


def test_an_alert_about_a_fault_whose_incident_runs_adds_its_evidence_only() -> None:
    stage = Stage()
    request = stage.put(IncidentState.DRAINING, findings=(temperature_finding(),))
    sick(stage, 1)
    send(stage, alert())
    assert deliver(stage) == [request.incident_id]
    assert len(stage.incidents.records) == 1


def test_an_unknown_answer_is_told_by_its_reason() -> None:
    stage = Stage()
    stage.metrics.answer("xid-count", QueryResult(problem=Reason("amp_partial", "cut")))
    with pytest.raises(AwsUnavailableError, match="amp_partial"):
        send(stage, alert())
