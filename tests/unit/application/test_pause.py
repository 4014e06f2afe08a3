"""A person's pause, and the breaker, at every place where something would be changed."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from nodemend.application.dispatch_incidents import dispatch_incidents
from nodemend.application.restoring import restore
from nodemend.application.set_pause import SetPausePorts, set_pause
from nodemend.contracts.dispatch import DispatchIncidentsRequest
from nodemend.contracts.pausing import SetPauseRequest
from nodemend.domain.breaker import Breaker, Trip
from nodemend.domain.errors import AwsUnavailableError, InvalidInputError, PolicyInvalidError
from nodemend.domain.faults import FaultClass, FaultKind, Mode, Rung, Verdict
from nodemend.domain.incidents import IncidentState, Outcome
from nodemend.domain.policy import Deadlines, Limits, MaxUnavailable, Waits
from nodemend.domain.rails import EXCLUDE_LABEL, PAUSE_ANNOTATION
from nodemend.domain.reasons import Reason
from tests.unit.application import run
from tests.unit.application.stage import (
    CLUSTER,
    GROUP,
    Request,
    Stage,
    enforce,
    node_name,
    pod,
    samples,
    temperature_finding,
    times_sent,
    xid_finding,
    xid_labels,
)

S = IncidentState
INPUT = {"cluster": CLUSTER, "paused": True, "reason": "network work", "requested_by": "alice"}


def ports(stage: Stage) -> SetPausePorts:
    return SetPausePorts(
        guards=stage.guards,
        policies=stage.policies,
        bus=stage.bus,
        dispatch_queue=stage.queue,
        clock=stage.clock,
    )


def put_pause(stage: Stage, paused: bool = True, **changes: Any) -> Any:
    given = {**INPUT, "paused": paused, **changes}
    return set_pause(SetPauseRequest(input=given), ports=ports(stage))


def annotate(stage: Stage, number: int = 1, value: str | None = "disk test") -> None:
    def change(node: Any) -> Any:
        others = {k: v for k, v in node.annotations.items() if k != PAUSE_ANNOTATION}
        return replace(
            node, annotations=others if value is None else {**others, PAUSE_ANNOTATION: value}
        )

    stage.cluster.change_node(node_name(number), change)


def open_breaker(stage: Stage) -> None:
    trip = Trip(Reason("fleet_signal_suspect", "xid/79 hit 9 of 40 nodes"), 9, 8, 40)
    now = stage.clock.now()
    guard = stage.guards.load(CLUSTER)
    assert stage.guards.store(replace(guard, breaker=Breaker(now, now + timedelta(days=9), trip)))


HOLDS: dict[str, tuple[Callable[[Stage], Any], Callable[[Stage], Any], str]] = {
    "the cluster": (put_pause, lambda stage: put_pause(stage, paused=False), "paused"),
    "the node": (annotate, lambda stage: annotate(stage, value=None), "node_paused"),
}
"""How it is held, how that ends, and the reason's code."""


def dispatch(stage: Stage) -> Any:
    return dispatch_incidents(DispatchIncidentsRequest(hints=()), ports=stage.dispatch)


# --- setting it -----------------------------------------------------------------------------------


def test_a_pause_is_told_once_and_a_resume_wakes_the_dispatcher() -> None:
    stage = Stage()

    first = put_pause(stage)
    second = put_pause(stage, reason="another word", requested_by="bob")
    resumed = put_pause(stage, paused=False, requested_by="bob", reason="done")

    assert (first.changed, second.changed, resumed.changed) == (True, False, True)
    assert "alice paused the cluster" in second.message
    assert times_sent(stage) == {"Fleet Guard Changed": 2}
    paused, ended = stage.events("Fleet Guard Changed")
    assert (paused["change"], paused["severity"], paused["requested_by"]) == (
        "paused",
        "info",
        "alice",
    )
    assert paused["reason"]["text"].endswith("network work")
    assert ended["change"] == "resumed"
    assert stage.queue.messages == [(CLUSTER, "")]
    assert stage.guards.load(CLUSTER).events == ()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"cluster": "typo"}, "cluster"),
        ({"paused": "yes"}, "paused"),
        ({"reason": ""}, "reason"),
        ({"requested_by": ""}, "requested_by"),
        ({"until": "tomorrow"}, "until"),
    ],
)
def test_a_wrong_input_names_the_field_and_the_remedy(changes: Any, field: str) -> None:
    stage = Stage()
    with pytest.raises(InvalidInputError) as caught:
        put_pause(stage, **changes)
    assert caught.value.field == field
    assert "Remedy: use " in str(caught.value)
    assert stage.guards.load(CLUSTER).pause is None


@pytest.mark.parametrize("given", [None, "stop", [1], 7])
def test_an_input_that_is_no_object_is_refused(given: Any) -> None:
    with pytest.raises(InvalidInputError, match="is no JSON object"):
        set_pause(SetPauseRequest(input=given), ports=ports(Stage()))


@pytest.mark.parametrize(
    "error", [PolicyInvalidError("it is broken"), AwsUnavailableError("AppConfig is away")]
)
def test_an_unreadable_policy_does_not_keep_a_person_from_pausing(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    stage = Stage()

    def broken() -> Any:
        raise error

    monkeypatch.setattr(stage.policies, "current", broken)
    assert put_pause(stage).paused
    assert stage.guards.load(CLUSTER).pause is not None


def test_what_eventbridge_did_not_take_is_told_by_the_next_dispatch_with_the_same_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage()

    def away(_: Any) -> Any:
        raise AwsUnavailableError("events:PutEvents")

    with monkeypatch.context() as patch:
        patch.setattr(stage.bus, "announce", away)
        put_pause(stage)
    (waiting,) = stage.guards.load(CLUSTER).events
    assert stage.events("Fleet Guard Changed") == []

    dispatch(stage)

    (event,) = stage.events("Fleet Guard Changed")
    assert event["event_id"] == waiting.event_id
    assert stage.guards.load(CLUSTER).events == ()


# --- before anything is touched -------------------------------------------------------------------


@pytest.mark.parametrize(("hold", "end", "code"), HOLDS.values(), ids=HOLDS)
def test_a_waiter_is_kept_and_admitted_when_the_pause_ends(hold: Any, end: Any, code: str) -> None:
    stage = Stage(policy=enforce())
    incident_id = stage.wait()
    hold(stage)

    dispatch(stage)
    dispatch(stage)

    assert stage.executions.started == []
    assert stage.incident(incident_id).waiting_for == code
    assert [event["reason"]["code"] for event in stage.events("Incident Waiting")] == [code]
    end(stage)
    dispatch(stage)
    assert stage.executions.started == [incident_id]


@pytest.mark.parametrize(("hold", "end", "code"), HOLDS.values(), ids=HOLDS)
def test_a_start_by_hand_is_refused_with_the_pause(hold: Any, end: Any, code: str) -> None:
    stage = Stage(policy=enforce())
    hold(stage)

    result = run.admit(stage, run.BY_HAND, run.HAND)

    assert result.next == "close"
    assert stage.incident(run.BY_HAND.incident_id).verdict[1].code == code
    assert stage.guards.load(CLUSTER).slots == {}


@pytest.mark.parametrize(("hold", "end", "code"), HOLDS.values(), ids=HOLDS)
def test_verification_waits_and_goes_on(hold: Any, end: Any, code: str) -> None:
    stage = Stage(policy=enforce())
    request = stage.put(S.VERIFYING)
    hold(stage)

    first, second = run.verify(stage, request), run.verify(stage, request)

    assert (first.next, first.wait_s) == ("wait", 20)
    assert (second.next, second.wait_s) == ("wait", 60)
    assert [event["reason"]["code"] for event in stage.events("Incident Waiting")] == [code]
    assert stage.mutations() == []
    end(stage)
    stage.metrics.answer("xid", xid_sample(stage))
    after = run.verify(stage, request)
    assert after.next == "cordon"
    assert stage.incident(request.incident_id).waiting_for == ""


def xid_sample(stage: Stage) -> Any:
    return samples(xid_labels(1, 79, 3), value=1)


@pytest.mark.parametrize(("hold", "end", "code"), HOLDS.values(), ids=HOLDS)
def test_a_pause_that_outlasts_the_verification_frees_the_slot_and_touches_nothing(
    hold: Any, end: Any, code: str
) -> None:
    stage = Stage(policy=enforce(deadlines=Deadlines(verify_s=600)))
    request = stage.put(S.VERIFYING)
    hold(stage)
    stage.clock.advance(600)

    result = run.verify(stage, request)
    assert result.next == "close"
    assert run.close(stage, request).outcome == "ABORTED_BY_OPERATOR"
    assert stage.incident(request.incident_id).reason.code == code
    assert stage.guards.load(CLUSTER).slots == {}
    assert stage.mutations() == []
    # The fault was not judged: the next scan may open it again.
    end(stage)
    assert run.open_for(stage, temperature_finding(1, evidence=fresh(stage))) is not None


def fresh(stage: Stage) -> Any:
    return replace(temperature_finding(1).evidence, at=stage.clock.now())


@pytest.mark.parametrize(("hold", "end", "code"), HOLDS.values(), ids=HOLDS)
def test_a_pause_just_before_the_cordon_ends_the_incident_untouched(
    hold: Any, end: Any, code: str
) -> None:
    stage = Stage(policy=enforce())
    request = stage.put(S.CORDONING)
    hold(stage)

    assert run.cordon(stage, request).next == "close"

    outcome, reason = stage.incident(request.incident_id).verdict
    assert (outcome, reason.code) == (Outcome.ABORTED_BY_OPERATOR, code)
    assert stage.mutations() == []


def test_a_pause_between_read_and_write_of_the_lease_is_seen() -> None:
    """The renewal is a versioned write: whatever it was based on holds no pause."""
    stage = Stage(policy=enforce())
    request = stage.put(S.DRAINING, cordon=None)
    run_cordon_by_us(stage, request)
    put_pause(stage)
    stage.cluster.faults.calls.clear()

    assert run.drain(stage, request).next == "wait"
    assert not [call for call in stage.mutations() if call.startswith("evict")]


def run_cordon_by_us(stage: Stage, request: Request) -> None:
    """Bring the node into the state that the cordon leaves."""
    stage.save(request.incident_id, state=S.CORDONING)
    assert run.cordon(stage, request).next == "drain"


def test_a_cordon_that_an_earlier_try_has_placed_is_reported_in_spite_of_the_pause() -> None:
    stage = Stage(policy=enforce())
    request = stage.put(S.CORDONING)
    run_cordon_by_us(stage, request)
    stage.save(request.incident_id, state=S.CORDONING, cordon=None)  # it died before the record
    put_pause(stage)

    assert run.cordon(stage, request).next == "drain"
    assert len([call for call in stage.mutations() if call.startswith("patch")]) == 1


def test_a_node_that_is_excluded_by_its_label_in_flight_is_not_cordoned() -> None:
    stage = Stage(policy=enforce())
    request = stage.put(S.CORDONING)
    stage.cluster.change_node(
        node_name(1), lambda node: replace(node, labels={**node.labels, EXCLUDE_LABEL: "true"})
    )
    assert run.cordon(stage, request).next == "close"
    assert stage.incident(request.incident_id).verdict[1].code == "excluded"
    assert stage.mutations() == []


# --- what has begun -------------------------------------------------------------------------------


@pytest.mark.parametrize(("hold", "end", "code"), HOLDS.values(), ids=HOLDS)
def test_a_drain_evicts_nothing_while_held_and_goes_on_afterwards(
    hold: Any, end: Any, code: str
) -> None:
    stage = Stage(policy=enforce(waits=Waits((5,), (5,))))
    request = stage.put(S.CORDONING)
    run_cordon_by_us(stage, request)
    hold(stage)

    for _ in range(3):
        assert run.drain(stage, request).next == "wait"
        stage.clock.advance(5)

    assert not [call for call in stage.mutations() if call.startswith("evict")]
    assert len(stage.events("Incident Waiting")) == 1
    assert stage.incident(request.incident_id).drain.slices == 3, "waits grow, as in any drain"
    end(stage)
    assert run.drain(stage, request).next == "drained"
    assert stage.incident(request.incident_id).waiting_for == ""


@pytest.mark.parametrize(("hold", "end", "code"), HOLDS.values(), ids=HOLDS)
def test_a_pause_that_outlasts_the_drain_leaves_the_cordon_and_says_so(
    hold: Any, end: Any, code: str
) -> None:
    stage = Stage(policy=enforce())
    request = stage.put(S.CORDONING)
    run_cordon_by_us(stage, request)
    hold(stage)
    assert run.drain(stage, request).next == "wait"
    stage.clock.advance(1800)

    assert run.drain(stage, request).next == "close"

    outcome, reason = stage.incident(request.incident_id).verdict
    assert (outcome, reason.code) == (Outcome.ABORTED_BY_OPERATOR, code)
    assert stage.node().is_unschedulable
    run.close(stage, request)
    # A pause says nothing of the fault: it is reported anew afterwards.
    assert stage.incidents.handled == {}


@pytest.mark.parametrize("step", ["release"])
def test_a_release_goes_on_in_a_pause(step: str) -> None:
    stage = Stage(policy=enforce())
    request = stage.put(S.CORDONING)
    run_cordon_by_us(stage, request)
    stage.save(request.incident_id, state=S.RELEASING)
    put_pause(stage)
    open_breaker(stage)

    assert run.release(stage, request).next == "close"
    assert run.close(stage, request).outcome == "RECOVERED"
    assert not stage.node().is_unschedulable
    assert stage.guards.load(CLUSTER).slots == {}
    assert stage.guards.load(CLUSTER).pause is not None


def test_a_dry_run_that_has_begun_is_not_held() -> None:
    stage = Stage(policy=enforce(mode=Mode.DRY_RUN))
    request = stage.put(S.CORDONING)
    put_pause(stage)
    assert run.cordon(stage, request).next == "drain"
    assert stage.mutations() == []


# --- the breaker in flight ------------------------------------------------------------------------


def test_what_was_let_go_before_the_storm_was_seen_does_not_begin() -> None:
    stage = Stage(policy=enforce())
    request = stage.put(S.VERIFYING)
    open_breaker(stage)

    assert run.verify(stage, request).next == "wait"
    stage.clock.advance(600)
    assert run.verify(stage, request).next == "close"

    outcome, reason = stage.incident(request.incident_id).verdict
    assert (outcome, reason.code) == (Outcome.SKIPPED, "breaker_open")
    assert stage.mutations() == []


def test_the_breaker_is_read_again_directly_before_the_cordon() -> None:
    stage = Stage(policy=enforce())
    request = stage.put(S.CORDONING)
    open_breaker(stage)
    assert run.cordon(stage, request).next == "close"
    assert stage.mutations() == []


def test_a_groups_own_breaker_holds_what_has_not_begun_in_that_group_only() -> None:
    for group, word in ((GROUP, "wait"), ("another", "cordon")):
        stage = Stage(policy=enforce())
        request = stage.put(S.VERIFYING)
        stage.metrics.answer("xid-count", samples(xid_labels(1, 79, 3)))
        now = stage.clock.now()
        trip = Trip(Reason("fleet_signal_suspect", "many"), 4, 4, 20)
        own = {group: Breaker(now, now + timedelta(days=9), trip)}
        assert stage.guards.store(replace(stage.guards.load(CLUSTER), group_breakers=own))

        assert run.verify(stage, request).next == word


def test_the_breaker_does_not_stop_what_has_begun() -> None:
    stage = Stage(policy=enforce())
    request = stage.put(S.CORDONING)
    run_cordon_by_us(stage, request)
    open_breaker(stage)
    assert run.drain(stage, request).next == "drained"


@pytest.mark.case("R37")
def test_r37_a_storm_is_one_critical_event_and_no_cordon() -> None:
    stage = Stage(nodes=40, policy=enforce(limits=Limits(MaxUnavailable(5, 100))))
    for number in range(1, 41):
        stage.wait(number, xid_finding(number))

    for _ in range(5):
        dispatch(stage)
        stage.clock.advance(60)

    assert stage.executions.started == []
    assert stage.mutations() == []
    (event,) = stage.events("Fleet Guard Changed")
    assert (event["severity"], event["change"]) == ("critical", "breaker_opened")
    assert (event["count"], event["bound"], event["rule_id"]) == (40, 8, "xid-count")
    assert len(event["nodes"]) == 40
    assert times_sent(stage)["Incident Waiting"] == 40
    assert stage.telemetry.gauges["BreakerOpen", (("cluster", CLUSTER),)][-1] == 1


@pytest.mark.case("R44")
def test_r44_after_two_days_nothing_is_replayed_and_a_new_fault_is_dealt_with() -> None:
    stage = Stage(nodes=40, policy=enforce())
    for number in range(1, 31):
        stage.wait(number, xid_finding(number))
    dispatch(stage)
    stage.clock.advance(2 * 86400)
    dispatch(stage)
    stage.clock.advance(86400)

    dispatch(stage)

    assert stage.executions.started == []
    assert {one["reason"]["code"] for one in stage.events("Incident Closed")} == {"expired"}
    changes = [one["change"] for one in stage.events("Fleet Guard Changed")]
    assert changes == ["breaker_opened", "breaker_closed"]
    new = xid_finding(3)
    new = replace(new, evidence=replace(new.evidence, at=stage.clock.now()))
    incident_id = run.open_for(stage, new)
    dispatch(stage)
    assert stage.executions.started == [incident_id]


# --- first and last seen --------------------------------------------------------------------------


@pytest.mark.case("R53")
def test_r53_the_hold_counts_from_our_own_first_sight_of_the_fault_class() -> None:
    stage = Stage(policy=enforce(hold_s={Verdict.DEGRADED: 600}))

    def seen(gpu: int) -> Any:
        return temperature_finding(1, gpu, gpu_uuid=f"GPU-1-{gpu}", evidence=fresh(stage))

    incident_id = run.open_for(stage, seen(0))
    for number in range(1, 20):  # another GPU each time: another code, the same class
        stage.clock.advance(60)
        assert run.open_for(stage, seen(number % 2)) == incident_id
        dispatch(stage)
        if stage.executions.started:
            break

    # A level counts up to its last report, which is noted every two minutes.
    assert number == 11
    assert [one["reason"]["code"] for one in stage.events("Incident Waiting")] == ["hold"]


def test_a_second_fault_class_on_the_same_node_is_attached_with_its_own_first_sight() -> None:
    stage = Stage(policy=enforce(hold_s={Verdict.DEGRADED: 600}))
    incident_id = run.open_for(stage, temperature_finding(1, evidence=fresh(stage)))
    start = stage.clock.now()
    stage.clock.advance(120)
    xid = replace(xid_finding(1), evidence=replace(xid_finding(1).evidence, at=stage.clock.now()))

    assert run.open_for(stage, xid) == incident_id

    incident = stage.incident(incident_id)
    assert [one.fault_class for one in incident.findings] == [FaultClass.THERMAL, FaultClass.XID]
    assert dict(incident.first_seen) == {"thermal": start, "xid": stage.clock.now()}
    dispatch(stage)
    assert stage.executions.started == [incident_id], "the fatal one decides now"
    assert stage.incident(incident_id).plan == (Rung.REPLACE, Rung.HUMAN)


def test_a_waiting_incident_notes_that_its_fault_is_still_reported_every_other_minute() -> None:
    stage = Stage(policy=enforce(hold_s={Verdict.DEGRADED: 3600}))
    incident_id = run.open_for(stage, temperature_finding(1, evidence=fresh(stage)))
    start = stage.incident(incident_id)
    stage.clock.advance(60)
    run.open_for(stage, temperature_finding(1, evidence=fresh(stage)))
    assert stage.incident(incident_id).version == start.version
    stage.clock.advance(60)
    run.open_for(stage, temperature_finding(1, evidence=fresh(stage)))
    assert stage.incident(incident_id).last_seen == stage.clock.now()
    assert stage.incident(incident_id).findings == start.findings
    assert stage.incident(incident_id).findings[0].kind is FaultKind.LEVEL


@pytest.mark.case("R9")
def test_r9_a_drain_that_is_refused_leaves_a_cordon_that_is_recorded_as_ours() -> None:
    stage = Stage(policy=enforce())
    request = stage.put(S.CORDONING)
    stage.cluster.add_pod(pod("bare"))
    run_cordon_by_us(stage, request)
    (cordoned,) = stage.events("Node Cordoned")
    assert cordoned["evict"] == ["ml/bare"], "what the drain will do was known before the cordon"

    run.escalate(stage, request, "ClusterForbiddenError", "pods/eviction is forbidden")
    assert run.close(stage, request).outcome == "NEEDS_HUMAN"

    owned = stage.node()
    assert owned.is_unschedulable
    assert request.incident_id in (owned.owner or "")
    found, is_uncordoned = restore(stage.cluster, stage.incident(request.incident_id))
    assert (found.code, is_uncordoned) == ("restored", True)
    assert (stage.node().is_unschedulable, stage.node().owner, stage.node().taints) == (
        False,
        None,
        (),
    )


@pytest.mark.case("R9")
def test_r9_a_suspicion_cordons_nothing() -> None:
    stage = Stage(policy=enforce())
    incident_id = stage.wait(1, xid_finding(1, 63, verdict=Verdict.SUSPECT))

    dispatch(stage)

    incident = stage.incident(incident_id)
    assert (incident.outcome, incident.reason.code) == (Outcome.OBSERVED, "suspect_only")
    assert stage.mutations() == []
