"""The way in: an incident for a node that a scan found sick, and only one."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from nodemend.application.open_incident import nodes_named, open_incident
from nodemend.domain.errors import AwsUnavailableError, ConcurrentUpdateError, InvalidInputError
from nodemend.domain.faults import Mode, Rung, Verdict
from nodemend.domain.findings import Finding
from nodemend.domain.history import PastIncident, gpu, instance
from nodemend.domain.incidents import IncidentState, Outcome
from nodemend.domain.reasons import Reason
from tests.fakes.system import START
from tests.unit.application import run
from tests.unit.application.stage import (
    CLUSTER,
    CrashError,
    Stage,
    after_every_crash,
    enforce,
    instance_id,
    node_name,
    temperature_finding,
    times_sent,
    xid_finding,
)


def at(stage: Stage, finding: Finding) -> Finding:
    """The finding as a scan of this moment sees it."""
    return replace(finding, evidence=replace(finding.evidence, at=stage.clock.now()))


def test_an_incident_is_recorded_and_the_dispatcher_told() -> None:
    stage = Stage()

    incident_id = run.open_for(stage, xid_finding(), temperature_finding(gpu=5))

    assert incident_id is not None
    incident = stage.incident(incident_id)
    assert incident.state is IncidentState.WAITING
    assert (incident.node, incident.node_labels) == (stage.node().ref, stage.node().labels)
    assert [finding.gpu_index for finding in incident.findings] == ["3", "5"]
    assert incident.execution_arn == ""
    event = stage.events("Incident Opened")[0]
    assert (event["origin"], event["fault_class"], event["dry_run"]) == ("scan", "xid", False)
    assert len(event["findings"]) == 2
    assert stage.queue.messages == [(CLUSTER, incident_id)]
    assert stage.mutations() == []


def test_the_event_of_an_incident_in_a_dry_run_says_so() -> None:
    stage = Stage(policy=enforce(mode=Mode.DRY_RUN))
    run.open_for(stage, xid_finding())
    assert stage.events("Incident Opened")[0]["dry_run"] is True


@pytest.mark.case("R31")
def test_r31_151_messages_for_one_node_are_one_incident_and_150_counts() -> None:
    stage = Stage()
    ids = set()
    for _ in range(151):
        ids.add(run.open_for(stage, at(stage, xid_finding())))
        stage.clock.advance(4)

    assert len(ids) == 1
    assert len(stage.incidents.records) == 1
    assert len(stage.events("Incident Opened")) == 1
    assert stage.telemetry.counted("FindingsSuppressed", why="duplicate") == 150


@pytest.mark.case("R31")
def test_r31_151_messages_start_one_execution() -> None:
    stage = Stage()
    for _ in range(151):
        incident_id = run.open_for(stage, at(stage, xid_finding()))
        assert incident_id is not None
        stage.dispatch_all(incident_id)
        stage.clock.advance(4)

    assert stage.executions.started == [incident_id]
    assert len(stage.guards.load(CLUSTER).replacements) == 1


@pytest.mark.case("R32")
def test_r32_of_two_openings_at_the_same_moment_one_wins_and_the_other_attaches() -> None:
    stage = Stage()
    original = stage.incidents.claim_node
    inner: list[str | None] = []

    def claim(cluster: str, uid: str, incident_id: str) -> str:
        stage.incidents.claim_node = original  # type: ignore[method-assign]
        # The other path's message is handled in full right here.
        inner.append(run.open_for(stage, temperature_finding(gpu=5)))
        return original(cluster, uid, incident_id)

    stage.incidents.claim_node = claim  # type: ignore[assignment, method-assign]
    outer = run.open_for(stage, xid_finding())

    assert inner == [outer]
    assert outer is not None
    assert len(stage.incident(outer).findings) == 2
    assert len(stage.events("Incident Opened")) == 1


@pytest.mark.case("R32")
def test_r32_a_loser_that_finds_no_record_yet_creates_it_under_the_winners_id() -> None:
    stage = Stage()
    stage.incidents.claim_node(CLUSTER, "uid-1", "01WINNER")  # and then the winner died

    assert run.open_for(stage, xid_finding()) == "01WINNER"

    assert stage.incident("01WINNER").findings == (xid_finding(),)
    assert stage.events("Incident Opened")[0]["event_id"] == "01WINNER-0001"
    # The winner's message comes again.
    assert run.open_for(stage, temperature_finding(gpu=5)) == "01WINNER"
    assert len(stage.incident("01WINNER").findings) == 2


def test_a_create_that_lost_attaches() -> None:
    stage = Stage()
    original = stage.incidents.create

    def create(incident: Any) -> bool:
        stage.incidents.create = original  # type: ignore[method-assign]
        assert original(replace(incident, findings=(temperature_finding(gpu=5),)))
        return original(incident)

    stage.incidents.create = create  # type: ignore[method-assign]
    incident_id = run.open_for(stage, xid_finding())

    assert incident_id is not None
    assert len(stage.incident(incident_id).findings) == 2


def test_new_evidence_is_attached_to_the_running_incident_without_an_event() -> None:
    stage = Stage()
    request = stage.put(IncidentState.DRAINING)

    assert run.open_for(stage, xid_finding(), temperature_finding(gpu=5)) == request.incident_id

    incident = stage.incident(request.incident_id)
    assert incident.state is IncidentState.DRAINING
    assert [finding.key for finding in incident.findings] == [
        xid_finding().key,
        temperature_finding(gpu=5).key,
    ]
    assert stage.bus.accepted == []


def test_a_repeat_for_a_waiting_incident_tells_the_dispatcher_again() -> None:
    stage = Stage()
    incident_id = run.open_for(stage, xid_finding())
    stage.queue.messages.clear()  # the opener died before it told

    run.open_for(stage, xid_finding())

    assert stage.queue.messages == [(CLUSTER, incident_id)]


def test_a_repeat_for_a_running_incident_tells_nobody() -> None:
    stage = Stage()
    stage.put(IncidentState.DRAINING)

    run.open_for(stage, xid_finding())

    assert stage.queue.messages == []


def test_evidence_never_goes_down_with_an_incident_that_is_about_to_close() -> None:
    stage = Stage()
    request = stage.put(IncidentState.VERIFYING, findings=(temperature_finding(),))
    stage.save(request.incident_id, verdict=(Outcome.RECOVERED, Reason("recovered", "cooled")))

    with pytest.raises(ConcurrentUpdateError, match="tried again"):
        run.open_for(stage, xid_finding(gpu=5))
    run.close(stage, request)

    # The queue delivers the message again, and nobody has judged the fault yet.
    opened = run.open_for(stage, xid_finding(gpu=5))
    assert opened not in (None, request.incident_id)


def test_the_pointer_of_a_closed_incident_is_dropped() -> None:
    stage = Stage()
    request = stage.put(IncidentState.DRAINING)
    stage.save(request.incident_id, verdict=(Outcome.REPLACED, Reason("x", "y")))
    run.close(stage, request)
    stage.incidents.open_by_node[CLUSTER, "uid-1"] = request.incident_id

    opened = run.open_for(stage, temperature_finding())

    assert opened not in (None, request.incident_id)
    assert stage.incidents.open_by_node[CLUSTER, "uid-1"] == opened


def test_a_close_that_died_is_noted_before_its_fault_can_open_again() -> None:
    stage = Stage()
    request = stage.put(IncidentState.DRAINING)
    stage.save(request.incident_id, verdict=(Outcome.NEEDS_HUMAN, Reason("blocked_by_pdb", "y")))
    stage.crasher.arm(2)  # read, then written as closed; nothing else
    with pytest.raises(CrashError):
        run.close(stage, request)
    stage.crasher.arm(None)
    assert stage.incident(request.incident_id).is_closed

    assert run.open_for(stage, xid_finding()) is None
    assert run.open_for(stage, temperature_finding()) is not None
    assert stage.telemetry.counted("FindingsSuppressed", why="duplicate") == 1


def test_a_record_that_keeps_changing_leaves_the_message_to_the_queue() -> None:
    stage = Stage()
    stage.put(IncidentState.DRAINING)

    def save(incident: Any) -> Any:
        raise ConcurrentUpdateError("somebody was faster")

    stage.incidents.save = save  # type: ignore[method-assign]

    with pytest.raises(ConcurrentUpdateError, match="kept changing"):
        run.open_for(stage, temperature_finding(gpu=5))


# --- what opens nothing ---------------------------------------------------------------------------


@pytest.mark.case("R44")
def test_r44_a_late_message_about_the_past_opens_nothing() -> None:
    stage = Stage()
    stage.clock.advance(15 * 60 + 1)

    assert run.open_for(stage, xid_finding()) is None

    assert stage.incidents.records == {}
    assert stage.telemetry.counted("FindingsSuppressed", why="stale") == 1
    assert stage.cluster.calls == []


def ended_as(outcome: str, fault: str, *rungs: Rung, stage: Stage) -> None:
    """Let an earlier incident of node 1 and its GPU 3 have ended five minutes from now."""
    past = PastIncident(
        incident_id="01EARLIER",
        at=stage.clock.now() + timedelta(minutes=5),
        fault=fault,
        outcome=outcome,
        instance_id=instance_id(1),
        gpu_uuids=("GPU-1-3",),
        rungs=rungs,
    )
    stage.history.remember(CLUSTER, (instance(instance_id(1)), gpu("GPU-1-3")), past)


def test_a_message_that_comes_after_the_reboot_that_cured_its_fault_opens_nothing() -> None:
    stage = Stage()
    ended_as("REBOOTED", "xid 119", Rung.REBOOT, stage=stage)
    early = xid_finding(code=119)
    stage.clock.advance(360)
    stage.boot()

    assert run.open_for(stage, early) is None
    assert stage.telemetry.counted("FindingsSuppressed", why="stale") == 1
    assert run.open_for(stage, early, at(stage, early)) is not None  # what was seen since is news


@pytest.mark.parametrize(
    ("finding", "is_opened"),
    [
        (temperature_finding(), False),
        (temperature_finding(gpu=4), True),
        (xid_finding(), True),
        (temperature_finding(gpu_uuid=""), True),
    ],
    ids=["the same", "another GPU", "another fault", "of no GPU"],
)
@pytest.mark.case("D26")
def test_d26_a_recovery_ends_only_earlier_evidence_of_the_same_fault(
    finding: Finding, is_opened: bool
) -> None:
    stage = Stage()
    ended_as("RECOVERED", "thermal", stage=stage)
    stage.clock.advance(360)

    assert (run.open_for(stage, finding) is not None) is is_opened


@pytest.mark.case("R25")
def test_r25_evidence_that_is_older_than_the_node_is_another_machines() -> None:
    stage = Stage()
    finding = xid_finding()
    stage.clock.advance(300)
    stage.swap_machine(created_at=stage.clock.now())

    assert run.open_for(stage, finding) is None
    assert stage.incidents.records == {}
    assert stage.telemetry.counted("FindingsSuppressed", why="stale") == 1


def test_a_fault_that_was_left_to_a_person_during_the_reboot_stays_theirs() -> None:
    stage = Stage()
    ended_as("NEEDS_HUMAN", "xid 119", Rung.REBOOT, stage=stage)
    stage.cordon_as("01EARLIER")
    stage.clock.advance(360)
    stage.boot()
    again = at(stage, xid_finding(code=119))

    assert run.open_for(stage, again) is None
    assert stage.telemetry.counted("FindingsSuppressed", why="duplicate") == 1
    stage.uncordon_by_hand()  # they are done
    assert run.open_for(stage, again) is not None


def test_a_message_about_a_node_that_was_replaced_meanwhile_is_no_riddle() -> None:
    stage = Stage()
    request = stage.put(IncidentState.DRAINING)
    stage.save(request.incident_id, verdict=(Outcome.REPLACED, Reason("replaced", "y")))
    run.close(stage, request)
    known = set(stage.incidents.records)
    stage.replace_node()
    finding = xid_finding()
    stage.clock.advance(60)

    assert run.open_for(stage, finding) is None
    assert set(stage.incidents.records) == known
    assert stage.telemetry.counted("FindingsSuppressed", why="stale") == 1
    assert (
        run.open_for(stage, at(stage, finding)) is None
    )  # a node of that name is unknown, and that is news
    assert len(stage.incidents.records) == len(known) + 1


def test_evidence_of_exactly_fifteen_minutes_still_counts() -> None:
    stage = Stage()
    stage.clock.advance(15 * 60)
    assert run.open_for(stage, xid_finding()) is not None


@pytest.mark.parametrize(("ahead_s", "is_opened"), [(120, True), (121, False), (86_400, False)])
def test_evidence_from_the_future_opens_nothing_beyond_what_clocks_differ(
    ahead_s: int, is_opened: bool
) -> None:
    stage = Stage()
    ahead = replace(xid_finding().evidence, at=stage.clock.now() + timedelta(seconds=ahead_s))

    opened = run.open_for(stage, xid_finding(evidence=ahead))

    assert (opened is not None) is is_opened
    assert stage.telemetry.counted("FindingsSuppressed", why="stale") == (not is_opened)


def test_of_old_and_new_evidence_the_new_opens() -> None:
    stage = Stage()
    stage.clock.advance(3600)

    incident_id = run.open_for(stage, xid_finding(), at(stage, temperature_finding(gpu=5)))

    assert incident_id is not None
    assert [finding.gpu_index for finding in stage.incident(incident_id).findings] == ["5"]
    assert stage.telemetry.counted("FindingsSuppressed", why="stale") == 1


def test_a_cluster_that_the_policy_does_not_name_is_refused() -> None:
    stage = Stage()
    event = run.fault_event(stage, xid_finding(), cluster="other")

    with pytest.raises(InvalidInputError, match="'other' is not in the policy"):
        open_incident(event, ports=stage.open)


@pytest.mark.case("D26")
def test_d26_a_late_copy_after_the_close_is_ignored_and_a_new_fault_opens_anew() -> None:
    stage = Stage()
    request = stage.put(IncidentState.DRAINING)
    stage.save(request.incident_id, verdict=(Outcome.ABORTED_BY_OPERATOR, Reason("x", "y")))
    run.close(stage, request)

    assert run.open_for(stage, xid_finding()) is None
    assert run.open_for(stage, at(stage, xid_finding(gpu=4))) is not None


# --- which node is it? ----------------------------------------------------------------------------


@pytest.mark.case("R26")
@pytest.mark.parametrize("names", [(node_name(1),), (instance_id(1),), ("pod-x", instance_id(1))])
def test_r26_a_node_is_found_by_exact_name_or_instance_id(names: tuple[str, ...]) -> None:
    stage = Stage()

    incident_id = run.open_for(stage, xid_finding(node_names=names))

    assert incident_id is not None
    assert stage.incident(incident_id).node.uid == "uid-1"


@pytest.mark.case("R26")
@pytest.mark.parametrize(
    "names",
    [
        ("ip-10-0-1-1",),
        ("ip-10-0-1-1.corp.example",),
        ("nvidia-dcgm-exporter-cwbcm",),
        ("i-0ffffffffffffffff",),
        (node_name(1), node_name(2)),
        (),
    ],
    ids=["short", "other domain", "exporter pod", "unknown instance", "ambiguous", "none"],
)
def test_r26_d11_a_node_that_cannot_be_told_is_reported_and_never_guessed(
    names: tuple[str, ...],
) -> None:
    stage = Stage()

    assert run.open_for(stage, xid_finding(node_names=names)) is None

    event = stage.events("Incident Rejected")[0]
    assert event["reason"]["code"] == "unresolved_node"
    assert event["outcome"] == "SKIPPED"
    assert (names or ("no label names a node",))[0] in event["reason"]["text"]
    assert stage.events("Incident Opened") == []
    assert stage.mutations() == []
    assert stage.queue.messages == []
    assert stage.incidents.list_open(CLUSTER) == []


@pytest.mark.case("D11")
def test_d11_what_cannot_be_resolved_is_reported_once_a_day() -> None:
    stage = Stage()
    for _ in range(10):
        run.open_for(stage, at(stage, xid_finding(node_names=("exporter-pod",))))
        stage.clock.advance(300)
    assert len(stage.events("Incident Rejected")) == 1
    assert stage.telemetry.counted("FindingsSuppressed", why="duplicate") == 9

    stage.clock.advance(86400)
    run.open_for(stage, at(stage, xid_finding(node_names=("exporter-pod",))))
    assert len(stage.events("Incident Rejected")) == 2


@pytest.mark.case("D12")
def test_d12_two_labels_that_name_one_node_are_no_ambiguity() -> None:
    stage = Stage()
    (node,) = nodes_named(stage.cluster, [node_name(1), node_name(1), instance_id(1)])
    assert node.ref.uid == "uid-1"


def test_an_observer_records_a_suspicion_and_the_dispatcher_only_observes_it() -> None:
    stage = Stage()
    incident_id = run.open_for(stage, xid_finding(code=63, verdict=Verdict.SUSPECT))
    assert incident_id is not None
    stage.dispatch_all(incident_id)

    incident = stage.incident(incident_id)
    assert incident.outcome is Outcome.OBSERVED
    assert incident.reason is not None
    assert incident.reason.code == "suspect_only"


# --- crashes --------------------------------------------------------------------------------------


def test_opening_survives_a_crash_at_every_call() -> None:
    def build() -> tuple[Stage, Callable[[], Any]]:
        stage = Stage()
        return stage, lambda: run.open_for(stage, xid_finding())

    def check(stage: Stage, result: Any) -> None:
        assert list(stage.incidents.records) == [result]
        assert stage.queue.messages[-1] == (CLUSTER, result)
        stage.outbox.publish_pending()
        assert times_sent(stage) == {"Incident Opened": 1}

    assert after_every_crash(build, check) >= 8


def test_a_rejection_survives_a_crash_at_every_call() -> None:
    def build() -> tuple[Stage, Callable[[], Any]]:
        stage = Stage()
        return stage, lambda: run.open_for(stage, xid_finding(node_names=("who",)))

    def check(stage: Stage, result: Any) -> None:
        assert result is None
        stage.outbox.publish_pending()
        # A death between the record and the note for the day reports it once more.
        assert 1 <= times_sent(stage)["Incident Rejected"] <= 2

    after_every_crash(build, check)


def test_a_store_that_is_down_leaves_the_message_to_the_queue() -> None:
    stage = Stage()

    def claim(*_: str) -> str:
        raise AwsUnavailableError("throttled")

    stage.incidents.claim_node = claim  # type: ignore[assignment, method-assign]
    with pytest.raises(AwsUnavailableError):
        run.open_for(stage, xid_finding())
    assert stage.incidents.records == {}


def test_a_fault_that_was_held_opens_again_when_its_time_is_over() -> None:
    stage = Stage()
    stage.incidents.mark_handled(
        CLUSTER, stage.node().ref, [xid_finding().key], START + timedelta(hours=1)
    )
    assert run.open_for(stage, xid_finding()) is None
    stage.clock.advance(3601)
    assert run.open_for(stage, at(stage, xid_finding())) is not None
