"""close_incident, escalate_incident and watch_incidents: every incident comes to one end."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from nodemend.application.closing import free
from nodemend.application.ports import ExecutionStatus
from nodemend.domain.errors import (
    AwsForbiddenError,
    AwsUnavailableError,
    ClusterForbiddenError,
    ClusterUnauthorizedError,
    ConcurrentUpdateError,
    PermanentError,
)
from nodemend.domain.faults import Mode, Rung
from nodemend.domain.findings import Finding
from nodemend.domain.guard import Guard, Slot
from nodemend.domain.incidents import IncidentState, Outcome, RepairRecord
from nodemend.domain.policy import ClusterPolicy, Limits, MaxUnavailable
from nodemend.domain.reasons import Reason
from tests.fakes.system import START
from tests.unit.application import run
from tests.unit.application.run import BY_HAND, HAND
from tests.unit.application.stage import (
    CLUSTER,
    CLUSTER_POLICY,
    GROUP,
    CrashError,
    Request,
    Stage,
    after_every_crash,
    enforce,
    gpu_node,
    node_name,
    temperature_finding,
    times_sent,
    xid_finding,
)


def decided(outcome: Outcome, code: str = "x", **changes: Any) -> tuple[Stage, Request]:
    """A stage with an incident whose end is decided."""
    stage = Stage()
    request = stage.put(IncidentState.DRAINING, **changes)
    stage.save(request.incident_id, verdict=(outcome, Reason(code, "why")))
    return stage, request


@pytest.mark.parametrize(
    ("repair", "units"),
    [
        (None, 0),
        # The call was about to be made, and nobody knows whether it was.
        (RepairRecord(Rung.REPLACE, GROUP, (), 4, START), 1),
        (RepairRecord(Rung.REPLACE, GROUP, (), 4, START, started_at=START), 1),
    ],
    ids=["nothing replaced", "intended", "replaced"],
)
def test_the_rate_is_given_back_where_nothing_was_replaced(
    repair: RepairRecord | None, units: int
) -> None:
    stage, request = decided(Outcome.NEEDS_HUMAN, repair=repair)
    assert len(stage.guards.load(CLUSTER).replacements) == 1

    run.close(stage, request)
    run.watch(stage)

    assert len(stage.guards.load(CLUSTER).replacements) == units


@pytest.mark.parametrize("finding", [xid_finding(), temperature_finding()], ids=["event", "level"])
def test_the_old_node_of_a_replacement_opens_no_incident_while_it_is_leaving(
    finding: Finding,
) -> None:
    stage, request = decided(Outcome.REPLACED, findings=(finding,))
    run.close(stage, request)
    stage.clock.advance(120)

    again = replace(finding, evidence=replace(finding.evidence, at=stage.clock.now()))
    assert run.open_for(stage, again) is None


@pytest.mark.parametrize("code", ["execution_failed", "cluster_unavailable", "step_timed_out"])
@pytest.mark.parametrize("finding", [xid_finding(), temperature_finding()], ids=["event", "level"])
def test_trouble_of_our_own_lets_the_same_fault_open_again_at_once(
    finding: Finding, code: str
) -> None:
    stage, request = decided(Outcome.SKIPPED, code, findings=(finding,))
    run.close(stage, request)
    stage.clock.advance(60)

    again = replace(finding, evidence=replace(finding.evidence, at=stage.clock.now()))
    assert run.open_for(stage, again) is not None


# --- close_incident -------------------------------------------------------------------------------


def test_the_decided_end_is_carried_out_and_everything_is_given_back() -> None:
    stage, request = decided(Outcome.REPLACED)
    stage.clock.advance(60)

    result = run.close(stage, request)

    assert (result.outcome, result.reason, result.is_owner) == ("REPLACED", "x: why", True)
    incident = stage.incident(request.incident_id)
    assert (incident.state, incident.closed_at) == (IncidentState.CLOSED, stage.clock.now())
    assert not stage.holds_slot(request.incident_id)
    assert stage.incidents.open_by_node == {}
    assert stage.queue.messages == [(CLUSTER, "")]
    event = stage.events("Incident Closed")[0]
    assert (event["outcome"], event["remedy"]) == ("REPLACED", "")


def test_the_replacement_is_in_the_closing_event() -> None:
    stage, request = decided(Outcome.REPLACED)
    repair = RepairRecord(Rung.REPLACE, GROUP, (), 4, START, replacement_node=gpu_node(9).ref)
    stage.save(request.incident_id, repair=repair)

    run.close(stage, request)

    assert stage.events("Incident Closed")[0]["replacement"]["name"] == node_name(9)


@pytest.mark.case("R33")
def test_r33_the_first_end_stands_and_a_late_copy_changes_nothing() -> None:
    stage, request = decided(Outcome.REPLACED)
    run.close(stage, request)
    before = stage.incident(request.incident_id)
    stage.clock.advance(20)

    copy = Request(request.incident_id, request.arn + "-b")
    result = run.close(stage, copy, "ValueError", "late")

    assert (result.outcome, result.is_owner) == ("REPLACED", False)
    assert stage.incident(request.incident_id) == before
    assert len(stage.events("Incident Closed")) == 1


@pytest.mark.case("R33")
def test_r33_a_write_that_read_the_record_before_the_close_is_refused() -> None:
    stage, request = decided(Outcome.REPLACED)
    stale = stage.incident(request.incident_id)
    run.close(stage, request)

    with pytest.raises(ConcurrentUpdateError):
        stage.incidents.save(replace(stale, state=IncidentState.ESCALATING))
    assert stage.incident(request.incident_id).outcome is Outcome.REPLACED


def test_closing_again_gives_back_what_a_crash_left_behind() -> None:
    stage, request = decided(Outcome.REPLACED)
    guard = stage.guards.load(CLUSTER)
    run.close(stage, request)
    stage.guards.store(replace(guard, version=stage.guards.load(CLUSTER).version))
    stage.incidents.open_by_node[CLUSTER, "uid-1"] = request.incident_id

    result = run.close(stage, request)

    assert result.is_owner
    assert not stage.holds_slot(request.incident_id)
    assert stage.incidents.open_by_node == {}
    assert len(stage.events("Incident Closed")) == 1


def test_another_executions_close_of_an_open_incident_changes_nothing() -> None:
    stage, request = decided(Outcome.REPLACED)

    result = run.close(stage, Request(request.incident_id, "arn:other"))

    assert (result.outcome, result.is_owner) == ("SUPERSEDED", False)
    assert "belongs to another execution" in result.reason
    assert not stage.incident(request.incident_id).is_closed
    assert stage.holds_slot(request.incident_id)


def test_closing_what_was_never_opened_says_so() -> None:
    result = run.close(Stage(), Request("01NOBODY", "arn"))

    assert (result.outcome, result.is_owner) == ("SUPERSEDED", False)
    assert result.reason == "there is no such incident"


def test_an_execution_that_failed_before_it_had_an_incident_ends_with_its_real_error() -> None:
    request = Request("01NOBODY", "arn")

    with pytest.raises(ClusterForbiddenError, match="cannot get nodes"):
        run.close(Stage(), request, "ClusterForbiddenError", '{"errorMessage": "cannot get nodes"}')
    with pytest.raises(PermanentError, match="who knows"):
        run.close(Stage(), request, "KeyError", "who knows")
    with pytest.raises(PermanentError, match="incident_id is wrong"):
        run.close(Stage(), request, "InvalidInputError", "incident_id is wrong")

    result = run.close(Stage(), request, "SupersededError", "a copy")
    assert (result.outcome, result.reason) == ("SUPERSEDED", "a copy")


@pytest.mark.parametrize(
    ("error", "mode", "outcome", "code"),
    [
        ("SupersededError", Mode.ENFORCE, "SUPERSEDED", "superseded"),
        ("SupersededError", Mode.DRY_RUN, "SUPERSEDED", "superseded"),
        ("IllegalTransitionError", Mode.ENFORCE, "NEEDS_HUMAN", "illegal_transition"),
        ("IllegalTransitionError", Mode.DRY_RUN, "SKIPPED", "illegal_transition"),
        ("", Mode.ENFORCE, "NEEDS_HUMAN", "undecided"),
        ("", Mode.DRY_RUN, "SKIPPED", "undecided"),
    ],
)
def test_an_end_that_no_step_decided_comes_from_the_failure(
    error: str, mode: Mode, outcome: str, code: str
) -> None:
    stage = Stage(policy=enforce(mode=mode))
    request = stage.put(IncidentState.DRAINING)

    result = run.close(stage, request, error, '{"errorMessage": "the words"}')

    assert (result.outcome, result.reason.split(":")[0]) == (outcome, code)
    if error:
        assert result.reason.endswith("the words")


def test_a_fault_that_was_handled_opens_no_new_incident_on_this_boot() -> None:
    stage, request = decided(Outcome.NEEDS_HUMAN, "drain_deadline")
    run.close(stage, request)

    stage.clock.advance(3 * 86400)
    fresh = xid_finding(evidence=replace(xid_finding().evidence, at=stage.clock.now()))
    assert run.open_for(stage, fresh) is None
    assert stage.telemetry.counted("FindingsSuppressed", why="duplicate") == 1

    stage.cluster.change_node(
        node_name(1), lambda node: replace(node, ref=replace(node.ref, boot_id="boot-2"))
    )
    assert run.open_for(stage, fresh) is not None


def test_each_fault_is_held_as_long_as_its_own_kind_asks() -> None:
    stage, request = decided(
        Outcome.OBSERVED, "dry_run", findings=(xid_finding(), temperature_finding(gpu=5))
    )
    run.close(stage, request)

    held = {key[3]: until for key, until in stage.incidents.handled.items()}
    now = stage.clock.now()
    assert held[xid_finding().key] == now + timedelta(days=30)
    assert held[temperature_finding(gpu=5).key] == now + timedelta(hours=24)


def test_freeing_what_is_not_closed_changes_nothing() -> None:
    stage, request = decided(Outcome.REPLACED)

    free(stage.incident(request.incident_id), now=START, ports=stage.closing)

    assert stage.holds_slot(request.incident_id)
    assert stage.queue.messages == []


def half_closed(stage: Stage) -> Request:
    """Let the watchdog die directly after it has written a stopped incident as closed."""
    request = stage.put(IncidentState.DRAINING)
    stage.executions.end(request.incident_id, "ABORTED")
    for after in range(1, 20):
        stage.crasher.arm(after)
        with pytest.raises(CrashError):
            run.watch(stage, request.incident_id, "ABORTED")
        if stage.incident(request.incident_id).is_closed:
            break
    stage.crasher.arm(None)
    assert stage.holds_slot(request.incident_id)
    assert stage.incidents.open_by_node != {}
    assert stage.bus.accepted == []
    return request


def test_a_close_that_died_in_the_watchdog_is_finished_by_the_next_one() -> None:
    stage = Stage()
    request = half_closed(stage)

    run.watch(stage)
    assert stage.holds_slot(request.incident_id)  # whoever closes it may be at it
    stage.clock.advance(61)
    result = run.watch(stage)

    assert (result.sent_events, result.unsent_events) == (1, 0)
    assert not stage.holds_slot(request.incident_id)
    assert stage.incidents.open_by_node == {}
    assert stage.incidents.handled != {}
    assert stage.queue.messages[-1] == (CLUSTER, "")
    assert stage.bus.detail_types == ["Incident Closed"]


def test_the_end_of_a_close_that_cannot_be_finished_yet_stays_untold() -> None:
    stage = Stage()
    request = half_closed(stage)
    stage.clock.advance(61)
    store = stage.guards.store
    stage.guards.store = lambda guard: False  # type: ignore[method-assign]

    run.watch(stage)

    assert stage.bus.accepted == []  # or nobody would know that it is to be finished
    stage.guards.store = store  # type: ignore[method-assign]
    run.watch(stage)
    assert not stage.holds_slot(request.incident_id)
    assert stage.bus.detail_types == ["Incident Closed"]


def test_a_close_that_can_never_be_finished_does_not_keep_the_others_silent() -> None:
    stage = Stage()
    half_closed(stage)
    stage.clock.advance(61)

    def denied(cluster: str) -> Guard:
        raise AwsForbiddenError("dynamodb:GetItem")

    stage.guards.load = denied  # type: ignore[method-assign]

    run.watch(stage)

    assert stage.bus.detail_types == ["Incident Closed"]


@pytest.mark.case("R70")
def test_r70_an_event_that_was_refused_stays_and_is_sent_later_under_its_id() -> None:
    stage, request = decided(Outcome.NEEDS_HUMAN)
    sequence = stage.incident(request.incident_id).sequence + 1
    stage.bus.refused.add(f"{request.incident_id}-{sequence:04d}")

    run.close(stage, request)

    assert stage.events("Incident Closed") == []
    assert stage.telemetry.counted("EventsUnsent") == 1
    stage.bus.refused.clear()
    stage.clock.advance(300)
    result = run.watch(stage)
    assert (result.sent_events, result.unsent_events) == (1, 0)
    assert stage.events("Incident Closed")[0]["event_id"].endswith(f"-{sequence:04d}")


@pytest.mark.case("R70")
def test_r70_a_bus_that_is_gone_holds_up_no_close() -> None:
    stage, request = decided(Outcome.NEEDS_HUMAN)
    stage.bus.gone = AwsUnavailableError("no answer")

    assert run.close(stage, request).outcome == "NEEDS_HUMAN"

    assert not stage.holds_slot(request.incident_id)
    stage.bus.gone = None
    stage.clock.advance(300)
    run.watch(stage)
    assert times_sent(stage) == {"Incident Closed": 1}


def test_the_close_survives_a_crash_at_every_call() -> None:
    def build() -> tuple[Stage, Callable[[], Any]]:
        stage, request = decided(
            Outcome.NEEDS_HUMAN, findings=(xid_finding(), temperature_finding(gpu=5))
        )
        return stage, lambda: run.close(stage, request)

    def check(stage: Stage, result: Any) -> None:
        assert (result.outcome, result.is_owner) == ("NEEDS_HUMAN", True)
        assert stage.guards.load(CLUSTER).slots == {}
        assert stage.incidents.open_by_node == {}
        assert len(stage.incidents.handled) == 2
        assert stage.queue.messages
        stage.outbox.publish_pending()
        assert times_sent(stage) == {"Incident Closed": 1}

    assert after_every_crash(build, check) >= 8


# --- escalate_incident ----------------------------------------------------------------------------


def test_a_failure_becomes_a_reason_an_event_and_a_word_on_the_node() -> None:
    stage = Stage()
    request = stage.put(IncidentState.DRAINING)

    run.escalate(stage, request, "ClusterForbiddenError", '{"errorMessage": "cannot evict"}')

    incident = stage.incident(request.incident_id)
    assert incident.state is IncidentState.ESCALATING
    assert incident.verdict == (
        Outcome.NEEDS_HUMAN,
        Reason("cluster_forbidden", "cannot evict"),
    )
    event = stage.events("Incident Escalated")[0]
    assert (event["error"], event["reason"]["text"]) == ("ClusterForbiddenError", "cannot evict")
    assert [one["reason"] for one in stage.cluster.events] == ["NodemendNeedsHuman"]


@pytest.mark.parametrize(
    ("error", "cause", "code", "text"),
    [
        ("States.Timeout", "", "step_timed_out", "the step ended with States.Timeout"),
        ("Sandbox.Timedout", "too late", "step_timed_out", "too late"),
        ("AwsUnavailableError", '"x"', "aws_unavailable", '"x"'),
        ("ZeroDivisionError", "[1]", "zero_division", "[1]"),
        ("ValueError", '{"stackTrace": []}', "value", '{"stackTrace": []}'),
        ("Error", "", "unknown_error", "the step ended with Error"),
    ],
)
def test_whatever_a_step_ended_with_has_a_code_and_a_text(
    error: str, cause: str, code: str, text: str
) -> None:
    stage = Stage()
    request = stage.put(IncidentState.DRAINING)

    run.escalate(stage, request, error, cause)

    verdict = stage.incident(request.incident_id).verdict
    assert verdict is not None
    assert verdict[1] == Reason(code, text)


def test_a_long_cause_is_cut() -> None:
    stage = Stage()
    for cause in ("x" * 5000, '{"errorMessage": "' + "x" * 5000 + '"}', "{" + "x" * 5000):
        request = stage.put(IncidentState.DRAINING)
        run.escalate(stage, request, "ValueError", cause)
        verdict = stage.incident(request.incident_id).verdict
        assert verdict is not None
        assert len(verdict[1].text) == 1000
        run.close(stage, request)
        stage.incidents.handled.clear()


def test_a_failure_before_there_was_an_incident_is_passed_on_as_it_was() -> None:
    request = Request("01NOBODY", "arn")

    with pytest.raises(ClusterForbiddenError, match="cannot get nodes"):
        run.escalate(
            Stage(), request, "ClusterForbiddenError", '{"errorMessage": "cannot get nodes"}'
        )


def test_in_a_dry_run_a_failure_calls_nobody() -> None:
    stage = Stage(policy=enforce(mode=Mode.DRY_RUN))
    request = stage.put(IncidentState.DRAINING)

    run.escalate(stage, request)

    verdict = stage.incident(request.incident_id).verdict
    assert verdict is not None
    assert verdict[0] is Outcome.SKIPPED
    assert stage.cluster.events == []


@pytest.mark.parametrize(
    "error", [ClusterUnauthorizedError("401"), AwsForbiddenError("eks:DescribeCluster")]
)
def test_a_cluster_that_is_the_very_trouble_does_not_stop_the_escalation(error: Any) -> None:
    stage = Stage()
    request = stage.put(IncidentState.DRAINING)
    stage.clusters.faults.fail("open", error)

    run.escalate(stage, request)

    assert stage.incident(request.incident_id).verdict is not None
    assert stage.cluster.events == []


def test_an_escalation_without_a_pinned_cluster_still_decides() -> None:
    stage = Stage()
    request = stage.put(IncidentState.DRAINING)
    stage.save(request.incident_id, cluster_policy=None)

    run.escalate(stage, request)

    assert stage.incident(request.incident_id).verdict is not None


def test_the_escalation_survives_a_crash_at_every_call() -> None:
    def build() -> tuple[Stage, Callable[[], Any]]:
        stage = Stage()
        request = stage.put(IncidentState.DRAINING)
        return stage, lambda: run.escalate(stage, request)

    def check(stage: Stage, result: Any) -> None:
        assert result.next == "close"
        stage.outbox.publish_pending()
        assert times_sent(stage) == {"Incident Escalated": 1}

    assert after_every_crash(build, check) >= 4


# --- watch_incidents ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "state", "outcome", "code"),
    [
        ("FAILED", IncidentState.DRAINING, Outcome.NEEDS_HUMAN, "execution_failed"),
        ("TIMED_OUT", IncidentState.CHECKING, Outcome.NEEDS_HUMAN, "execution_failed"),
        ("SUCCEEDED", IncidentState.ESCALATING, Outcome.NEEDS_HUMAN, "execution_failed"),
        ("ABORTED", IncidentState.DRAINING, Outcome.ABORTED_BY_OPERATOR, "execution_stopped"),
        ("FAILED", IncidentState.VERIFYING, Outcome.SKIPPED, "execution_failed"),
        ("ABORTED", IncidentState.VERIFYING, Outcome.ABORTED_BY_OPERATOR, "execution_stopped"),
    ],
)
@pytest.mark.parametrize("by", ["event", "schedule"])
def test_an_incident_whose_execution_ended_without_closing_it_is_closed(
    status: str, state: IncidentState, outcome: Outcome, code: str, by: str
) -> None:
    stage = Stage()
    request = stage.put(state)
    stage.executions.end(
        request.incident_id, status, "States.Runtime" if status == "FAILED" else ""
    )

    result = run.watch(stage, request.incident_id if by == "event" else "", status)

    assert result.closed == 1
    incident = stage.incident(request.incident_id)
    assert incident.outcome is outcome
    assert incident.reason is not None
    assert incident.reason.code == code
    assert str(state) in incident.reason.text
    assert stage.incidents.open_by_node == {}
    # A function does not notice that its execution is stopped: until it must have ended, the slot
    # stands for what it may change yet.
    assert stage.holds_slot(request.incident_id) is (status in ("ABORTED", "TIMED_OUT"))
    assert run.watch(stage).closed == 0
    stage.clock.advance(61)
    run.watch(stage)
    assert not stage.holds_slot(request.incident_id)
    assert stage.guards.load(CLUSTER).replacements == ()


def test_the_error_of_the_execution_is_in_the_reason() -> None:
    stage = Stage()
    request = stage.put(IncidentState.DRAINING)
    stage.executions.end(request.incident_id, "FAILED", "States.Runtime")

    run.watch(stage)

    reason = stage.incident(request.incident_id).reason
    assert reason is not None
    assert "the execution FAILED with States.Runtime while the incident was draining" in reason.text


def test_an_execution_that_is_not_there_any_more_counts_as_ended() -> None:
    stage = Stage()
    request = stage.put(IncidentState.DRAINING)
    del stage.executions.statuses[request.arn]

    assert run.watch(stage).closed == 1
    reason = stage.incident(request.incident_id).reason
    assert reason is not None
    assert "the execution gone" in reason.text


def test_a_decided_end_is_carried_out_as_decided() -> None:
    stage, request = decided(Outcome.REPLACED)
    stage.executions.end(request.incident_id, "FAILED")

    run.watch(stage)

    assert stage.incident(request.incident_id).outcome is Outcome.REPLACED


def test_in_a_dry_run_an_execution_that_failed_calls_nobody() -> None:
    stage = Stage(policy=enforce(mode=Mode.DRY_RUN))
    request = stage.put(IncidentState.DRAINING)
    stage.executions.end(request.incident_id, "FAILED")

    run.watch(stage)

    assert stage.incident(request.incident_id).outcome is Outcome.SKIPPED


@pytest.mark.parametrize("status", ["RUNNING", "PENDING_REDRIVE"])
def test_what_runs_is_left_alone(status: str) -> None:
    stage = Stage()
    request = stage.put(IncidentState.DRAINING)
    stage.executions.end(request.incident_id, status)

    assert run.watch(stage).closed == 0
    assert not stage.incident(request.incident_id).is_closed


def test_what_waits_and_what_was_admitted_and_not_begun_is_for_the_dispatcher() -> None:
    stage = Stage(policy=enforce(limits=Limits(MaxUnavailable(1, 100))))
    admitted = stage.admit(2)
    waiting = stage.wait(1)
    stage.dispatch_all()
    stage.executions.statuses.clear()

    assert run.watch(stage).closed == 0
    assert stage.incident(waiting).state is IncidentState.WAITING
    assert stage.incident(admitted.incident_id).state is IncidentState.ADMITTED


def test_an_incident_by_hand_whose_execution_died_before_it_had_a_slot_is_closed() -> None:
    stage = Stage()
    stage.wait()  # so that the request by hand is rejected
    run.admit(stage, BY_HAND, HAND)
    stage.executions.statuses[BY_HAND.arn] = ExecutionStatus("ABORTED")

    assert run.watch(stage).closed == 1

    incident = stage.incident("hand-1")
    assert incident.outcome is Outcome.SKIPPED
    assert incident.reason is not None
    assert incident.reason.code == "already_open"


@pytest.mark.case("R32")
def test_an_event_of_an_execution_that_never_had_the_incident_closes_nothing() -> None:
    stage = Stage(policy=enforce(limits=Limits(MaxUnavailable(1, 100))))
    stage.admit(2)
    waiting = stage.wait(1)

    assert run.watch(stage, waiting, "FAILED").closed == 0
    assert stage.incident(waiting).state is IncidentState.WAITING


def test_an_incident_that_is_closed_already_is_no_news() -> None:
    stage, request = decided(Outcome.REPLACED)
    run.close(stage, request)

    assert run.watch(stage, request.incident_id, "SUCCEEDED").closed == 0
    assert len(stage.events("Incident Closed")) == 1


def test_an_ended_execution_of_nobody_is_no_news() -> None:
    assert run.watch(Stage(), "01NOBODY").closed == 0


def test_an_execution_that_closed_its_incident_in_its_last_moment_wins() -> None:
    stage, request = decided(Outcome.REPLACED)
    stage.executions.end(request.incident_id, "SUCCEEDED")
    original = stage.executions.status

    def status(arn: str) -> Any:
        found = original(arn)
        run.close(stage, request)
        return found

    stage.executions.status = status  # type: ignore[assignment, method-assign]

    assert run.watch(stage).closed == 0
    assert len(stage.events("Incident Closed")) == 1


def test_a_close_between_the_read_and_the_write_is_left_to_the_next_watch() -> None:
    stage, request = decided(Outcome.REPLACED)
    stage.executions.end(request.incident_id, "FAILED")
    original = stage.incidents.get
    reads = 0

    def get(incident_id: str) -> Any:
        nonlocal reads
        found = original(incident_id)
        reads += 1
        if reads == 1:
            stage.save(request.incident_id, verify_attempts=1)
        return found

    stage.incidents.get = get  # type: ignore[method-assign]

    assert run.watch(stage).closed == 0
    assert run.watch(stage).closed == 1


def test_slots_that_nobody_holds_any_more_are_freed_after_their_lease() -> None:
    stage, request = decided(Outcome.REPLACED)
    guard = stage.guards.load(CLUSTER)
    run.close(stage, request)
    lost = replace(guard.slots["uid-1"], incident_id="01NOBODY", node_uid="uid-2")
    kept = {"uid-1": guard.slots["uid-1"], "uid-2": lost}
    stage.guards.store(replace(guard, slots=kept, version=stage.guards.load(CLUSTER).version))

    assert run.watch(stage).freed_slots == 0  # the lease still holds
    stage.clock.advance(10 * 60 + 121)
    assert run.watch(stage).freed_slots == 2
    assert stage.guards.load(CLUSTER).slots == {}


def test_the_expired_slot_of_a_running_incident_stays() -> None:
    stage = Stage()
    request = stage.put(IncidentState.CHECKING)
    stage.clock.advance(86400)

    assert run.watch(stage).freed_slots == 0
    assert stage.holds_slot(request.incident_id)


def test_the_watch_counts_itself_and_what_is_pending() -> None:
    stage, request = decided(Outcome.NEEDS_HUMAN)
    stage.bus.gone = AwsUnavailableError("no answer")
    run.close(stage, request)
    stage.clock.advance(300)

    result = run.watch(stage)

    assert result.unsent_events == 1
    assert stage.telemetry.counted("Watches") == 1
    assert stage.telemetry.gauges["EventsPending", ()] == [1]


@pytest.mark.parametrize("by", ["event", "schedule"])
def test_a_policy_that_cannot_be_used_keeps_nothing_of_the_watch_back(by: str) -> None:
    stage = Stage()
    closed = stage.put(IncidentState.DRAINING, 2)
    stage.save(closed.incident_id, verdict=(Outcome.NEEDS_HUMAN, Reason("x", "y")))
    stage.bus.gone = AwsUnavailableError("no answer")
    run.close(stage, closed)
    stage.bus.gone = None
    slots = stage.guards.load(CLUSTER)
    lost = Slot("01NOBODY", "uid-3", node_name(3), GROUP, START, START)
    stage.guards.store(replace(slots, slots={**slots.slots, "uid-3": lost}))
    request = stage.put(IncidentState.DRAINING)
    stage.executions.end(request.incident_id, "FAILED")
    stage.clock.advance(300)
    stage.policies.problem = "invalid"

    result = run.watch(stage, request.incident_id if by == "event" else "")

    assert result.closed == 1
    assert stage.incident(request.incident_id).is_closed
    if by == "schedule":
        assert result.sent_events >= 1
        assert result.freed_slots == 1
        assert stage.telemetry.counted("Watches") == 1


def test_what_waits_for_a_cluster_that_the_policy_names_no_more_is_ended() -> None:
    stage = Stage(policy=enforce(limits=Limits(MaxUnavailable(1, 100))))
    running = stage.put(IncidentState.DRAINING, 2)
    waiting = stage.wait(1)
    other = ClusterPolicy("gpu-test", "ws-2", "eu-central-1")
    stage.policies.policy = enforce(clusters=(other,))

    assert run.watch(stage).closed == 1

    incident = stage.incident(waiting)
    assert incident.outcome is Outcome.SKIPPED
    assert incident.reason is not None
    assert incident.reason.code == "cluster_unknown"
    assert ("gpu-prod", "uid-1") not in stage.incidents.open_by_node
    # What runs has its cluster pinned and comes to its own end.
    assert not stage.incident(running.incident_id).is_closed
    stage.policies.problem = "invalid"
    unread = stage.wait(3)
    assert run.watch(stage).closed == 0
    assert stage.incident(unread).state is IncidentState.WAITING


def test_an_execution_of_a_cluster_that_the_policy_names_no_more_is_still_watched() -> None:
    stage = Stage()
    request = stage.put(IncidentState.DRAINING)
    stage.executions.end(request.incident_id, "FAILED")
    other = ClusterPolicy("gpu-test", "ws-2", "eu-central-1")
    stage.policies.policy = enforce(clusters=(other,))

    assert run.watch(stage).closed == 1
    assert stage.guards.load(CLUSTER).slots == {}


def test_one_incident_that_cannot_be_mended_keeps_the_others_not_waiting() -> None:
    stage = Stage()
    broken, whole = stage.put(IncidentState.DRAINING), stage.put(IncidentState.DRAINING, 2)
    for request in (broken, whole):
        stage.executions.end(request.incident_id, "FAILED")
    original = stage.executions.status

    def status(arn: str) -> Any:
        if arn == broken.arn:
            raise AwsUnavailableError("throttled")
        return original(arn)

    stage.executions.status = status  # type: ignore[assignment, method-assign]

    assert run.watch(stage).closed == 1
    assert stage.incident(whole.incident_id).is_closed
    assert stage.telemetry.counted("Watches") == 1


def test_events_that_wait_are_sent_before_anything_else_can_fail() -> None:
    stage, request = decided(Outcome.NEEDS_HUMAN)
    stage.bus.gone = AwsUnavailableError("no answer")
    run.close(stage, request)
    stage.bus.gone = None
    stage.clock.advance(300)

    def list_open(_: str | None) -> Any:
        raise AwsUnavailableError("throttled")

    stage.incidents.list_open = list_open  # type: ignore[assignment, method-assign]
    with pytest.raises(AwsUnavailableError):
        run.watch(stage)

    assert len(stage.events("Incident Closed")) == 1
    assert stage.telemetry.counted("Watches") == 0  # its absence is what calls a person


def test_one_clusters_guard_that_cannot_be_read_keeps_the_others_slots_not_taken() -> None:
    other = ClusterPolicy("a-first", "ws-2", "eu-central-1")
    stage = Stage(policy=enforce(clusters=(other, CLUSTER_POLICY)))
    lost = Slot("01NOBODY", "uid-3", node_name(3), GROUP, START, START)
    stage.guards.store(replace(stage.guards.load(CLUSTER), slots={"uid-3": lost}))
    stage.clock.advance(300)
    original = stage.guards.load

    def load(cluster: str) -> Any:
        if cluster == "a-first":
            raise AwsUnavailableError("throttled")
        return original(cluster)

    stage.guards.load = load  # type: ignore[assignment, method-assign]

    assert run.watch(stage).freed_slots == 1


def test_the_watch_survives_a_crash_at_every_call() -> None:
    def build() -> tuple[Stage, Callable[[], Any]]:
        stage = Stage()
        request = stage.put(IncidentState.DRAINING)
        stage.executions.end(request.incident_id, "FAILED")
        return stage, lambda: run.watch(stage)

    def check(stage: Stage, result: Any) -> None:
        stage.clock.advance(3600)
        run.watch(stage)
        assert stage.incidents.list_open(CLUSTER) == []
        assert stage.guards.load(CLUSTER).slots == {}
        assert times_sent(stage)["Incident Closed"] == 1

    assert after_every_crash(build, check) >= 12
