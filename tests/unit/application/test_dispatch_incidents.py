"""One decision over all that wait, with the guard as the only word that counts."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from nodemend.application.dispatch_incidents import dispatch_incidents
from nodemend.contracts.dispatch import DispatchHint, DispatchIncidentsRequest
from nodemend.domain.errors import (
    AwsUnavailableError,
    ClusterUnavailableError,
    ConcurrentUpdateError,
    PolicyInvalidError,
)
from nodemend.domain.faults import FaultClass, Mode, Rung, Verdict
from nodemend.domain.guard import Slot, release
from nodemend.domain.incidents import DrainRecord, IncidentState, Outcome
from nodemend.domain.policy import (
    ClusterPolicy,
    Deadlines,
    Limits,
    MaxUnavailable,
    ReplacementRate,
    Waits,
)
from tests.unit.application import run
from tests.unit.application.stage import (
    CLUSTER,
    CLUSTER_POLICY,
    GROUP,
    Stage,
    after_every_crash,
    enforce,
    gpu_node,
    instance_id,
    lost_finding,
    node_name,
    temperature_finding,
    times_sent,
    xid_finding,
)

ONE = Limits(MaxUnavailable(1, 100))


def dispatch(stage: Stage, *hints: tuple[str, str]) -> Any:
    """Run the dispatcher with hints of (cluster, incident id)."""
    request = DispatchIncidentsRequest(
        hints=tuple(DispatchHint(cluster=cluster, incident_id=one) for cluster, one in hints)
    )
    return dispatch_incidents(request, ports=stage.dispatch)


def test_an_admitted_incident_pins_its_plan_and_is_started() -> None:
    policy = enforce(
        waits=Waits((1,), (2,)), deadlines=Deadlines(1, 2, 3), hold_down_s=9, version="v7"
    )
    stage = Stage(policy=policy)
    incident_id = stage.wait()

    result = dispatch(stage)

    assert (result.admitted, result.waiting, result.ended) == (1, 0, 0)
    incident = stage.incident(incident_id)
    assert incident.state is IncidentState.ADMITTED
    assert (incident.mode, incident.policy_version) == (Mode.ENFORCE, "v7")
    assert (incident.waits, incident.deadlines) == (policy.waits, policy.deadlines)
    assert (incident.hold_down_s, incident.cluster_policy) == (9, CLUSTER_POLICY)
    assert (incident.plan, incident.group) == ((Rung.REPLACE, Rung.HUMAN), GROUP)
    assert incident.expected_gpus == 8
    assert stage.executions.started == [incident_id]
    event = stage.events("Incident Admitted")[0]
    assert (event["mode"], event["plan"]) == ("enforce", ["replace", "human"])
    assert stage.telemetry.gauges["IncidentsWaiting", (("cluster", CLUSTER),)] == [1]


@pytest.mark.case("R38")
def test_of_several_waiters_the_most_severe_goes_first_and_the_rest_wait_with_the_limit() -> None:
    stage = Stage(policy=enforce(limits=ONE))
    hot = stage.wait(1, temperature_finding(1))
    stage.clock.advance(1)
    xid = stage.wait(2, xid_finding(2))
    late = stage.wait(3, xid_finding(3))

    result = dispatch(stage)

    assert (result.admitted, result.waiting) == (1, 2)
    assert stage.executions.started == [xid]
    for incident_id in (hot, late):
        incident = stage.incident(incident_id)
        assert (incident.state, incident.waiting_for) == (IncidentState.WAITING, "capacity_guard")
    waiting = stage.events("Incident Waiting")
    assert len(waiting) == 2
    assert (
        f"1 of at most 1 nodes of the cluster are unavailable ({node_name(2)})"
        in (waiting[0]["reason"]["text"])
    )


def test_a_freed_slot_goes_to_the_next_in_line_and_waiting_is_told_once() -> None:
    stage = Stage(policy=enforce(limits=ONE))
    first = stage.admit(1)
    second = stage.wait(2)
    third = stage.wait(3, xid_finding(3, 95))
    for _ in range(5):
        dispatch(stage)
        stage.clock.advance(60)
    assert len(stage.events("Incident Waiting")) == 2

    run.admit(stage, first)
    run.escalate(stage, first)
    run.close(stage, first)
    dispatch(stage, (CLUSTER, ""))

    assert stage.executions.started == [first.incident_id, second]
    assert stage.incident(third).state is IncidentState.WAITING
    assert stage.incident(second).waiting_for == ""


def test_another_limit_than_before_is_told_again() -> None:
    stage = Stage(policy=enforce(limits=ONE))
    first = stage.admit(1)
    stage.wait(2)
    dispatch(stage)
    stage.policies.policy = enforce(limits=Limits(MaxUnavailable(2, 100), ReplacementRate(1, 1)))
    dispatch(stage)

    codes = [event["reason"]["code"] for event in stage.events("Incident Waiting")]
    assert codes == ["capacity_guard", "rate_limit"]
    assert stage.executions.started == [first.incident_id]


def test_a_storm_of_faults_never_exceeds_the_budget() -> None:
    stage = Stage(nodes=40, policy=enforce(limits=Limits(MaxUnavailable(5, 10))))
    for number in range(1, 41):
        stage.wait(number, xid_finding(number, code=500 + number))
        if number % 7 == 0:
            dispatch(stage)
    dispatch(stage)

    assert len(stage.guards.load(CLUSTER).slots) == 4  # 10 % of 40
    assert len(stage.executions.started) == 4


@pytest.mark.case("R75")
def test_r75_a_fault_without_a_plan_is_observed_and_takes_no_slot() -> None:
    stage = Stage(policy=enforce(plans={FaultClass.XID: ()}))
    incident_id = stage.wait()

    result = dispatch(stage)

    assert (result.admitted, result.ended) == (0, 1)
    incident = stage.incident(incident_id)
    assert (incident.outcome, incident.state) == (Outcome.OBSERVED, IncidentState.CLOSED)
    assert incident.reason is not None
    assert incident.reason.code == "no_terminal_action"
    assert stage.mutations() == []
    assert stage.executions.started == []
    assert stage.guards.load(CLUSTER).slots == {}


@pytest.mark.case("R75")
@pytest.mark.parametrize(("code", "verdict"), [(31, Verdict.APPLICATION), (63, Verdict.SUSPECT)])
def test_r75_a_code_without_a_remedy_is_observed_and_nothing_is_cordoned(
    code: int, verdict: Verdict
) -> None:
    stage = Stage()
    incident_id = stage.wait(1, xid_finding(code=code, verdict=verdict))

    dispatch(stage)

    incident = stage.incident(incident_id)
    assert incident.outcome is Outcome.OBSERVED
    assert incident.reason is not None
    assert incident.reason.code == f"{verdict}_only"
    assert stage.mutations() == []
    assert stage.executions.started == []


@pytest.mark.case("R25")
def test_a_waiter_whose_node_is_gone_or_another_one_is_superseded() -> None:
    stage = Stage()
    gone, swapped = stage.wait(1), stage.wait(2)
    stage.cluster.remove_node(node_name(1))
    stage.cluster.add_node(
        gpu_node(2, ref=replace(gpu_node(2).ref, instance_id="i-0ffffffffffffffff"))
    )

    assert dispatch(stage).ended == 2

    assert stage.incident(gone).outcome is Outcome.SUPERSEDED
    assert stage.incident(swapped).outcome is Outcome.SUPERSEDED
    assert stage.incidents.open_by_node == {}


def test_without_waiters_a_hint_does_not_make_it_read_the_fleet() -> None:
    stage = Stage()

    dispatch(stage, (CLUSTER, ""))

    assert stage.cluster.calls == []
    assert stage.capacity.calls == []


def test_without_waiters_the_schedule_looks_at_the_fleet_for_the_breakers_sake() -> None:
    stage = Stage()

    dispatch(stage)

    assert [call.verb for call in stage.cluster.calls] == ["list"]
    assert stage.telemetry.gauges["BreakerOpen", (("cluster", CLUSTER),)] == [0]
    assert stage.guards.load(CLUSTER).version == 0, "nothing changed, so nothing is written"


def test_a_hinted_incident_is_seen_though_the_index_lags(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    incident_id = stage.wait()
    monkeypatch.setattr(stage.incidents, "list_open", lambda cluster: [])

    assert dispatch(stage, (CLUSTER, "")).admitted == 0
    assert dispatch(stage, (CLUSTER, incident_id)).admitted == 1


def test_a_hint_of_a_closed_incident_overrules_the_lagging_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(policy=enforce(plans={FaultClass.XID: ()}))
    incident_id = stage.wait()
    stale = stage.incident(incident_id)
    dispatch(stage)
    monkeypatch.setattr(stage.incidents, "list_open", lambda cluster: [stale])

    result = dispatch(stage, (CLUSTER, incident_id), (CLUSTER, "01NOBODY"))

    assert (result.admitted, result.ended) == (0, 0)


def test_hints_only_wake_the_clusters_that_they_name() -> None:
    stage = Stage()
    stage.wait()

    assert dispatch(stage, ("other", "")).admitted == 0
    assert dispatch(stage).admitted == 1


def test_a_cluster_that_cannot_be_reached_does_not_keep_the_others_waiting() -> None:
    away = ClusterPolicy("away", "ws-2", "eu-central-1")
    stage = Stage(policy=enforce(clusters=(away, CLUSTER_POLICY)))
    stage.incidents.create(
        replace(stage.incident(stage.wait()), id="01AWAY", cluster="away", version=0)
    )
    stage.clusters.faults.fail("open", ClusterUnavailableError("timed out"), target="away")

    with pytest.raises(ClusterUnavailableError):
        dispatch(stage)

    assert len(stage.executions.started) == 1
    assert stage.incident("01AWAY").state is IncidentState.WAITING


def test_an_invalid_policy_admits_nobody() -> None:
    stage = Stage()
    stage.wait()
    stage.policies.problem = "invalid"

    with pytest.raises(PolicyInvalidError):
        dispatch(stage)
    assert stage.executions.started == []


def test_a_lost_start_is_made_good_after_two_minutes() -> None:
    stage = Stage()
    incident_id = stage.wait()
    original = stage.executions.start

    def start(_: str) -> str:
        raise AwsUnavailableError("throttled")

    stage.executions.start = start  # type: ignore[assignment, method-assign]
    with pytest.raises(AwsUnavailableError):
        dispatch(stage)
    assert stage.incident(incident_id).state is IncidentState.ADMITTED
    stage.executions.start = original  # type: ignore[method-assign]

    stage.clock.advance(119)
    assert dispatch(stage).restarted == 0
    stage.clock.advance(1)
    assert dispatch(stage).restarted == 1
    assert stage.executions.started == [incident_id]
    assert len(stage.guards.load(CLUSTER).replacements) == 1


def test_evidence_that_arrives_during_the_admission_only_delays_it() -> None:
    stage = Stage()
    incident_id = stage.wait()
    original = stage.guards.store

    def store(guard: Any) -> bool:
        stage.guards.store = original  # type: ignore[method-assign]
        run.open_for(stage, temperature_finding(gpu=5))
        return original(guard)

    stage.guards.store = store  # type: ignore[method-assign]
    dispatch(stage)

    assert stage.incident(incident_id).state is IncidentState.WAITING
    assert (CLUSTER, incident_id) in stage.queue.messages
    assert dispatch(stage, (CLUSTER, incident_id)).admitted == 1
    guard = stage.guards.load(CLUSTER)
    assert (len(guard.slots), len(guard.replacements)) == (1, 1)


@pytest.mark.parametrize("what", ["kept", "ended"])
def test_evidence_that_arrives_before_a_verdict_is_stored_makes_the_next_dispatch_decide(
    what: str,
) -> None:
    stage = Stage(policy=enforce(limits=ONE, exclude=(node_name(3),)))
    stage.admit(1)
    number = 2 if what == "kept" else 3
    incident_id = stage.wait(number)
    stage.bus.accepted.clear()
    original = stage.guards.load

    def load(cluster: str) -> Any:
        stage.guards.load = original  # type: ignore[method-assign]
        run.open_for(stage, temperature_finding(number, gpu=5))
        return original(cluster)

    stage.guards.load = load  # type: ignore[method-assign]
    dispatch(stage)
    assert stage.events("Incident Waiting") == stage.events("Incident Closed") == []

    dispatch(stage, (CLUSTER, incident_id))
    assert len(stage.events("Incident Waiting" if what == "kept" else "Incident Closed")) == 1


def test_two_dispatchers_never_both_give_the_last_slot() -> None:
    stage = Stage(policy=enforce(limits=ONE))
    stage.wait(1)
    original = stage.guards.store

    def store(guard: Any) -> bool:
        stage.guards.store = original  # type: ignore[method-assign]
        stage.wait(2)
        dispatch(stage)  # the other dispatcher, with another waiter in view
        return original(guard)

    stage.guards.store = store  # type: ignore[method-assign]
    dispatch(stage)

    guard = stage.guards.load(CLUSTER)
    assert (len(guard.slots), len(guard.replacements)) == (1, 1)
    assert len(stage.executions.started) == 1


def test_a_fleet_that_changed_before_the_guard_was_written_is_looked_at_again() -> None:
    stage = Stage(policy=enforce(limits=ONE))
    waiting = stage.wait(1)
    original = stage.cluster.list_gpu_nodes

    def list_gpu_nodes() -> Any:
        seen = original()
        stage.cluster.list_gpu_nodes = original  # type: ignore[method-assign]
        # Meanwhile another incident ran to its end: its slot came and went, its cordon stays.
        other = stage.wait(2)
        guard = stage.guards.load(CLUSTER)
        now = stage.clock.now()
        slot = Slot(other, "uid-2", node_name(2), GROUP, now, now)
        assert stage.guards.store(replace(guard, slots={"uid-2": slot}))
        stage.cordon_as(other, 2)
        assert stage.guards.store(release(stage.guards.load(CLUSTER), other))
        return seen

    stage.cluster.list_gpu_nodes = list_gpu_nodes  # type: ignore[assignment, method-assign]

    assert dispatch(stage, (CLUSTER, waiting)).admitted == 0
    incident = stage.incident(waiting)
    assert (incident.state, incident.waiting_for) == (IncidentState.WAITING, "capacity_guard")
    assert stage.guards.load(CLUSTER).slots == {}


@pytest.mark.parametrize("where", ["start", "save"])
def test_trouble_with_one_incident_keeps_the_others_of_its_cluster_not_waiting(where: str) -> None:
    two = Limits(MaxUnavailable(2, 100))
    stage = Stage(nodes=30, policy=enforce(limits=two, exclude=(node_name(4),)))
    first, second, kept, ended = (stage.wait(n, xid_finding(n)) for n in range(1, 5))
    store, method = {
        "start": (stage.executions, "start"),
        "save": (stage.incidents, "save"),
    }[where]
    original = getattr(store, method)

    def fail(subject: Any) -> Any:
        if first in (subject, getattr(subject, "id", "")):
            raise AwsUnavailableError("throttled")
        return original(subject)

    setattr(store, method, fail)
    with pytest.raises(AwsUnavailableError):
        dispatch(stage)

    assert stage.executions.started == [second]
    assert stage.incident(kept).waiting_for == "capacity_guard"
    assert stage.incident(ended).is_closed


@pytest.mark.parametrize("has_waiter", [True, False])
def test_a_start_that_keeps_failing_keeps_the_others_not_waiting(has_waiter: bool) -> None:
    stage = Stage()
    lost = stage.admit(1)
    del stage.executions.statuses[lost.arn]
    stage.executions.started.clear()
    other = stage.wait(2) if has_waiter else ""
    stage.clock.advance(120)
    original = stage.executions.start

    def start(incident_id: str) -> str:
        if incident_id == lost.incident_id:
            raise AwsUnavailableError("throttled")
        return original(incident_id)

    stage.executions.start = start  # type: ignore[method-assign]
    with pytest.raises(AwsUnavailableError):
        dispatch(stage)

    assert stage.executions.started == ([other] if has_waiter else [])


def test_a_group_that_cannot_launch_loses_no_second_node() -> None:
    stage = Stage(policy=enforce(limits=ONE))
    first = stage.put(IncidentState.REPAIRING, drain=DrainRecord(stage.clock.now(), True))
    run.start(stage, first)
    stage.capacity.lose_instance(CLUSTER, instance_id(1))
    stage.cluster.remove_node(node_name(1))
    run.escalate(stage, first, "PermanentError", "no capacity")
    run.close(stage, first)
    assert stage.guards.load(CLUSTER).slots == {}
    second = stage.wait(2)

    assert dispatch(stage).admitted == 0
    assert stage.incident(second).waiting_for == "capacity_guard"
    stage.capacity.set_state(CLUSTER, instance_id(9), "InService")
    stage.cluster.add_node(gpu_node(9))
    assert dispatch(stage).admitted == 1


def test_a_guard_that_keeps_changing_leaves_the_decision_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage()
    stage.wait()
    monkeypatch.setattr(stage.guards, "store", lambda guard: False)

    with pytest.raises(ConcurrentUpdateError, match="5 times in a row"):
        dispatch(stage)
    assert stage.executions.started == []


def test_an_old_fault_of_a_young_node_is_left_alone() -> None:
    stage = Stage()
    stage.cluster.change_node(
        node_name(1),
        lambda node: replace(node, created_at=stage.clock.now() - timedelta(minutes=4)),
    )
    incident_id = stage.wait()

    dispatch(stage)

    reason = stage.incident(incident_id).reason
    assert reason is not None
    assert reason.code == "warm_up"


def waiting_codes(stage: Stage) -> list[str]:
    return [one["reason"]["code"] for one in stage.events("Incident Waiting")]


def test_a_gpu_that_only_the_metrics_miss_waits_for_the_device_plugin_to_miss_it_too() -> None:
    stage = Stage()
    incident_id = stage.wait(1, lost_finding())
    stage.cluster.add_node(gpu_node(1))  # all eight are offered, as if nothing were lost

    dispatch(stage)
    assert (stage.executions.started, waiting_codes(stage)) == ([], ["second_signal"])
    stage.miss_gpu(1)
    dispatch(stage)
    assert stage.executions.started == [incident_id]


def test_a_gpu_that_only_the_metrics_miss_ends_untouched_when_they_miss_it_no_more() -> None:
    stage = Stage()
    incident_id = stage.wait(1, lost_finding())
    stage.cluster.add_node(gpu_node(1))

    dispatch(stage)
    stage.clock.advance(901)
    dispatch(stage)

    incident = stage.incident(incident_id)
    assert incident.reason is not None
    assert (incident.outcome, incident.reason.code) == (Outcome.SKIPPED, "expired")
    assert "still offers all 8" in incident.reason.text
    assert (stage.executions.started, stage.mutations()) == ([], [])


@pytest.mark.parametrize(
    ("findings", "changes"),
    [
        ((lost_finding(), xid_finding(1, 119)), {}),
        ((lost_finding(),), {"gpu_capacity": 7, "gpu_allocatable": 7}),
        ((lost_finding(),), {"gpu_allocatable": 0}),
    ],
    ids=["an XID tells of it, too", "a kubelet that counted anew", "a plugin that is gone"],
)
def test_a_lost_gpu_with_a_second_signal_is_acted_on(findings: Any, changes: Any) -> None:
    stage = Stage()
    incident_id = stage.wait(1, *findings)
    stage.cluster.add_node(gpu_node(1, **changes))

    dispatch(stage)

    assert stage.executions.started == [incident_id]


def test_where_no_node_offers_gpus_the_metrics_word_is_all_there_is() -> None:
    stage = Stage(nodes=2)
    incident_id = stage.wait(1, lost_finding())
    for number in (1, 2):
        stage.cluster.add_node(gpu_node(number, gpu_capacity=0, gpu_allocatable=0))

    dispatch(stage)

    assert stage.executions.started == [incident_id]


def test_heat_that_has_passed_before_its_hold_time_ends_untouched() -> None:
    stage = Stage(policy=enforce(hold_s={Verdict.DEGRADED: 600}))
    evidence = replace(temperature_finding().evidence, at=stage.clock.now())
    incident_id = run.open_for(stage, temperature_finding(evidence=evidence))
    assert incident_id is not None

    for _ in range(30):
        dispatch(stage)
        stage.clock.advance(60)

    incident = stage.incident(incident_id)
    assert incident.reason is not None
    assert (incident.outcome, incident.reason.code) == (Outcome.SKIPPED, "expired")
    assert (stage.executions.started, waiting_codes(stage)) == ([], ["hold"])


def test_the_dispatch_survives_a_crash_at_every_call() -> None:
    def build() -> tuple[Stage, Callable[[], Any]]:
        stage = Stage(policy=enforce(limits=ONE, exclude=(node_name(4),)))
        for number in (1, 2, 4):
            stage.wait(number, xid_finding(number))
        return stage, lambda: dispatch(stage)

    def check(stage: Stage, result: Any) -> None:
        stage.clock.advance(120)
        dispatch(stage)  # the next tick starts what was admitted and not begun
        guard = stage.guards.load(CLUSTER)
        assert len(guard.slots) == 1
        assert len(guard.replacements) == 1
        assert len(stage.executions.started) == 1
        assert len(stage.incidents.list_open(CLUSTER)) == 2
        stage.outbox.publish_pending()
        assert times_sent(stage) == {
            "Incident Admitted": 1,
            "Incident Waiting": 1,
            "Incident Closed": 1,
        }

    assert after_every_crash(build, check) >= 15
