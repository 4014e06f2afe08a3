"""A storm is seen before its first incident is opened: the guard is told before the events go."""

from datetime import timedelta

import pytest

from nodemend.application.bursts import GONE_AFTER
from nodemend.application.ports import Report
from nodemend.domain.breaker import MAX_BURSTS, MAX_NAMED, Burst, bursts_of
from nodemend.domain.errors import AwsUnavailableError, ConcurrentUpdateError
from nodemend.domain.faults import Verdict
from nodemend.domain.guard import Guard, note_bursts
from tests.fakes.system import START
from tests.unit.application import run
from tests.unit.application.stage import (
    CLUSTER,
    CrashError,
    Stage,
    node_name,
    samples,
    xid_finding,
    xid_labels,
)
from tests.unit.application.test_receive_alert import alert, send


def storm(sick: int, *, nodes: int = 8) -> Stage:
    """A fleet of which the first nodes report XID 79 in the same scan."""
    stage = Stage(nodes=nodes)
    stage.metrics.answer("xid-count", samples(*(xid_labels(n, 79, 0) for n in range(1, sick + 1))))
    return stage


def noted(stage: Stage) -> list[tuple[str, tuple[str, ...], int]]:
    return [(one.fault, one.node_names, one.more) for one in stage.guards.load(CLUSTER).bursts]


def open_first_only(stage: Stage) -> str:
    """Let the queue deliver one event, and the dispatcher run before the next is delivered."""
    first = next(one for one in stage.bus.accepted if "findings" in one.detail)
    model = first.detail["findings"][0]
    incident_id = run.open_for(stage, xid_finding(int(model["gpu_uuid"].split("-")[1]), gpu=0))
    assert incident_id is not None
    stage.dispatch_all(incident_id)
    return incident_id


def test_the_first_incident_of_a_storm_waits_though_the_others_are_still_queued() -> None:
    stage = storm(8)
    run.scan(stage)

    incident_id = open_first_only(stage)

    assert stage.executions.started == []
    assert stage.incident(incident_id).waiting_for == "breaker_open"
    [opened] = stage.events("Fleet Guard Changed")
    assert (opened["change"], opened["count"], opened["fault"]) == ("breaker_opened", 8, "xid/79")


def test_below_the_bound_the_first_incident_is_admitted_at_once() -> None:
    stage = storm(2)
    run.scan(stage)

    incident_id = open_first_only(stage)

    assert stage.executions.started == [incident_id]


def test_a_storm_of_alerts_is_noted_before_the_first_event_too() -> None:
    stage = storm(8)
    send(stage, *(alert(n) for n in range(1, 9)))

    open_first_only(stage)

    assert stage.executions.started == []
    assert noted(stage)[0][1] == tuple(sorted(node_name(n) for n in range(1, 9)))


def test_nothing_is_announced_of_a_storm_that_could_not_be_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = storm(8)
    monkeypatch.setattr(stage.guards, "store", lambda guard: False)

    with pytest.raises(ConcurrentUpdateError):
        run.scan(stage)
    with pytest.raises(ConcurrentUpdateError):
        send(stage, *(alert(n) for n in range(1, 9)))

    assert stage.bus.accepted == []


def test_a_scan_that_dies_anywhere_notes_the_storm_once_and_before_its_events() -> None:
    for after in range(1, 50):
        stage = storm(8)
        stage.crasher.arm(after)
        try:
            run.scan(stage)
        except CrashError:
            assert noted(stage) or not stage.bus.accepted
            stage.crasher.arm(None)
            run.scan(stage)
            assert len(noted(stage)) == 1
        else:
            assert after > 4
            return
    raise AssertionError("the scan never ends")


def test_a_fault_that_was_reported_already_is_no_burst_again_but_one_that_had_gone_is() -> None:
    stage = storm(8)
    run.scan(stage)
    at = stage.guards.load(CLUSTER).bursts[0].at

    for _ in range(int(GONE_AFTER.total_seconds()) // 60):
        stage.clock.advance(60)
        run.scan(stage)
    assert [one.at for one in stage.guards.load(CLUSTER).bursts] == [at]

    stage.metrics.answer("xid-count", samples())
    for _ in range(int(GONE_AFTER.total_seconds()) // 60 + 6):
        stage.clock.advance(60)
        run.scan(stage)
    stage.metrics.answer("xid-count", samples(*(xid_labels(n, 79, 0) for n in range(1, 9))))
    run.scan(stage)
    assert stage.guards.load(CLUSTER).bursts[-1].at == stage.clock.now()


def test_faults_that_join_later_are_a_burst_of_their_own_and_count_with_the_earlier() -> None:
    stage = storm(2)
    run.scan(stage)
    stage.clock.advance(60)
    stage.metrics.answer("xid-count", samples(*(xid_labels(n, 79, 0) for n in range(1, 5))))

    run.scan(stage)
    open_first_only(stage)

    assert [names for _, names, _ in noted(stage)] == [
        (node_name(1), node_name(2)),
        (node_name(3), node_name(4)),
    ]
    assert stage.executions.started == []
    assert stage.events("Fleet Guard Changed")[0]["count"] == 4


def test_names_that_mean_no_node_of_the_cluster_open_no_breaker() -> None:
    stage = Stage(nodes=8)
    strange = [xid_labels(n, 79, 0) | {"Hostname": f"dcgm-exporter-{n}"} for n in range(1, 8)]
    stage.metrics.answer("xid-count", samples(xid_labels(1, 79, 3), *strange))
    run.scan(stage)

    incident_id = run.open_for(stage, xid_finding(1))
    assert incident_id is not None
    stage.dispatch_all(incident_id)

    assert stage.executions.started == [incident_id]


def test_one_node_or_what_only_jobs_did_is_no_burst() -> None:
    jobs = [xid_finding(n, code=45, verdict=Verdict.APPLICATION) for n in range(1, 9)]
    nameless = [xid_finding(n, node_names=()) for n in range(1, 9)]
    one = [xid_finding(1, gpu=gpu) for gpu in range(8)]

    assert bursts_of([*jobs, *nameless, *one], START) == ()


def test_a_burst_names_few_nodes_and_counts_all() -> None:
    [burst] = bursts_of([xid_finding(n) for n in range(1, 2001)], START)

    assert (len(burst.node_names), burst.more) == (MAX_NAMED, 2000 - MAX_NAMED)


def test_a_storm_of_a_large_fleet_opens_the_breaker_by_its_number() -> None:
    stage = storm(100, nodes=400)  # 25 %, and only 50 are named
    run.scan(stage)

    open_first_only(stage)

    assert stage.executions.started == []
    assert stage.events("Fleet Guard Changed")[0]["count"] == 100


def test_the_guard_keeps_a_bounded_number_of_bursts_the_newest() -> None:
    guard = Guard(CLUSTER)
    for minute in range(MAX_BURSTS + 5):
        at = START + timedelta(minutes=minute)
        guard = note_bursts(guard, [Burst("xid/79", at, "xid-count", (f"a{minute}", "b"))])

    assert len(guard.bursts) == MAX_BURSTS
    assert guard.bursts[-1].at == START + timedelta(minutes=MAX_BURSTS + 4)


def test_bursts_are_forgotten_after_the_breakers_window() -> None:
    stage = storm(2)
    run.scan(stage)
    stage.clock.advance(601)

    stage.dispatch_all()

    assert noted(stage) == []


def test_an_unreachable_memory_is_an_error_before_anything_is_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = storm(8)

    def fail(cluster: str, names: object) -> dict[str, Report]:
        raise AwsUnavailableError("dynamodb:BatchGetItem: no answer")

    monkeypatch.setattr(stage.memory, "last_reports", fail)

    with pytest.raises(AwsUnavailableError):
        run.scan(stage)
    assert noted(stage) == []
