"""The watch and time: incidents past their age, and scans that have stopped."""

from collections.abc import Callable
from typing import Any

import pytest

from nodemend.application.ports import Report
from nodemend.domain.errors import AwsUnavailableError
from nodemend.domain.faults import Family, Mode
from nodemend.domain.incidents import IncidentState
from nodemend.domain.policy import ClusterPolicy, Limits, MaxUnavailable
from tests.unit.application import run
from tests.unit.application.stage import (
    CLUSTER,
    CLUSTER_POLICY,
    Stage,
    after_every_crash,
    enforce,
    times_sent,
)

HOUR = 3600


def scan_all(stage: Stage) -> None:
    for family in Family:
        run.scan(stage, family)


# --- incidents ------------------------------------------------------------------------------------


def test_an_incident_that_waits_for_long_is_told_of_once() -> None:
    stage = Stage(policy=enforce(limits=Limits(MaxUnavailable(1, 100))))
    stage.put(IncidentState.DRAINING, 2)
    waiting = stage.wait(1)
    stage.dispatch_all()
    stage.clock.advance(24 * HOUR - 1)
    version = stage.incident(waiting).version

    run.watch(stage)
    assert waiting not in [e["incident_id"] for e in stage.events("Incident Overdue")]
    for _ in range(80):
        stage.clock.advance(HOUR)
        run.watch(stage)

    told = [e for e in stage.events("Incident Overdue") if e["incident_id"] == waiting]
    assert len(told) == 1
    assert (told[0]["state"], told[0]["reason"]["code"]) == ("waiting", "waits_long")
    assert "capacity_guard" in told[0]["reason"]["text"]
    assert told[0]["remedy"]
    # The record is its execution's, or the dispatcher's.
    assert stage.incident(waiting).version == version


@pytest.mark.parametrize(
    ("state", "limit_s"),
    [
        (IncidentState.VERIFYING, HOUR + 600),
        (IncidentState.DRAINING, HOUR + 1800),
        (IncidentState.CHECKING, HOUR + 2700),
        (IncidentState.RELEASING, HOUR),
    ],
)
def test_an_execution_that_runs_past_its_deadlines_is_told_of_once_and_left_to_run(
    state: IncidentState, limit_s: int
) -> None:
    stage = Stage()
    request = stage.put(state)
    stage.clock.advance(limit_s - 1)
    assert run.watch(stage).overdue_incidents == 0

    for _ in range(60):
        stage.clock.advance(60)
        assert run.watch(stage).overdue_incidents == 1

    assert len(stage.events("Incident Overdue")) == 1
    assert not stage.incident(request.incident_id).is_closed
    assert stage.holds_slot(request.incident_id)
    assert stage.telemetry.gauges["IncidentsOverdue", ()][:2] == [0, 1]


def test_an_overdue_incident_is_told_of_by_its_own_cluster_alone() -> None:
    other = ClusterPolicy("a-first", "ws-2", "eu-central-1")
    stage = Stage(policy=enforce(clusters=(other, CLUSTER_POLICY)))
    stage.put(IncidentState.VERIFYING)
    stage.clock.advance(3 * HOUR)

    assert run.watch(stage).overdue_incidents == 1
    assert [e["cluster"] for e in stage.events("Incident Overdue")] == [CLUSTER]


def test_each_state_that_lasts_too_long_is_a_matter_of_its_own() -> None:
    stage = Stage()
    request = stage.put(IncidentState.VERIFYING)
    stage.clock.advance(3 * HOUR)
    run.watch(stage)
    stage.save(request.incident_id, state=IncidentState.CORDONING, state_since=stage.clock.now())
    assert run.watch(stage).overdue_incidents == 0
    stage.clock.advance(3 * HOUR)
    run.watch(stage)

    assert [e["state"] for e in stage.events("Incident Overdue")] == ["verifying", "cordoning"]


def test_a_dry_run_that_waits_for_long_is_told_of_without_an_alarm() -> None:
    stage = Stage(policy=enforce(mode=Mode.DRY_RUN))
    stage.put(IncidentState.DRAINING)
    stage.clock.advance(3 * HOUR)

    assert run.watch(stage).overdue_incidents == 0

    assert [e["dry_run"] for e in stage.events("Incident Overdue")] == [True]
    assert stage.telemetry.gauges["IncidentsOverdue", ()] == [0]


def test_what_the_watch_has_just_closed_is_not_overdue() -> None:
    stage = Stage()
    request = stage.put(IncidentState.DRAINING)
    stage.executions.end(request.incident_id, "FAILED")
    stage.clock.advance(5 * HOUR)

    result = run.watch(stage)

    assert (result.closed, result.overdue_incidents) == (1, 0)


# --- scans ----------------------------------------------------------------------------------------


def test_a_scan_that_stops_is_told_of_once_and_again_when_it_is_back() -> None:
    stage = Stage()
    scan_all(stage)
    last = stage.clock.now()
    for _ in range(60):
        stage.clock.advance(60)
        run.scan(stage, Family.THERMAL)
        run.scan(stage, Family.UTILIZATION)
        run.watch(stage)

    told = stage.events("Scan Silent")
    assert [(e["family"], e["is_silent"]) for e in told] == [("ecc", True)]
    assert told[0]["last_scan_at"] == last.isoformat().replace("+00:00", "Z")
    gauges = stage.telemetry.gauges["ScansSilent", ()]
    assert gauges == [0] * 4 + [1] * 56

    for _ in range(10):
        scan_all(stage)
        run.watch(stage)
        stage.clock.advance(60)

    assert [e["is_silent"] for e in stage.events("Scan Silent")] == [True, False]
    assert stage.telemetry.gauges["ScansSilent", ()][-1] == 0
    assert len({e["event_id"] for e in stage.events("Scan Silent")}) == 2


def test_a_second_silence_is_another_one() -> None:
    stage = Stage()
    for _ in range(2):
        scan_all(stage)
        run.watch(stage)
        stage.clock.advance(6 * 60)
        run.watch(stage)
    scan_all(stage)
    run.watch(stage)

    told = [e for e in stage.events("Scan Silent") if e["family"] == "ecc"]
    assert [e["is_silent"] for e in told] == [True, False, True, False]
    assert len({e["event_id"] for e in told}) == 4


def test_a_cluster_that_was_never_scanned_is_told_of_once_after_the_same_time() -> None:
    stage = Stage()
    for _ in range(200):
        run.watch(stage)
        stage.clock.advance(60)

    told = stage.events("Scan Silent")
    assert sorted(e["family"] for e in told) == ["ecc", "thermal", "utilization"]
    assert not [e for e in told if "last_scan_at" in e]
    seen = stage.telemetry.gauges["ScansSilent", ()]
    assert (seen[4], seen[5], seen[9], seen[10], seen[14], seen[15]) == (0, 1, 1, 2, 2, 3)


def test_a_silence_stays_told_over_the_memorys_time() -> None:
    stage = Stage()
    scan_all(stage)
    for _ in range(40):
        stage.clock.advance(6 * HOUR)
        assert run.watch(stage).silent_scans == 3

    assert len(stage.events("Scan Silent")) == 3


def test_each_cluster_of_the_policy_is_heard_by_itself() -> None:
    other = ClusterPolicy("gpu-test", "ws-2", "eu-central-1")
    stage = Stage(policy=enforce(clusters=(other, CLUSTER_POLICY)))
    scan_all(stage)
    stage.clock.advance(240)
    for family in Family:
        # Only one cluster is scanned any more.
        stage.memory.remember(CLUSTER, {f"scan/{family}": Report("", stage.clock.now())})
    stage.clock.advance(60)

    assert run.watch(stage).silent_scans == 1
    assert [e["cluster"] for e in stage.events("Scan Silent")] == ["gpu-test"]


def test_a_silence_that_could_not_be_told_is_told_by_the_next_watch() -> None:
    stage = Stage()
    scan_all(stage)
    stage.clock.advance(6 * 60)
    stage.bus.gone = AwsUnavailableError("no answer")
    assert run.watch(stage).silent_scans == 1
    stage.bus.gone = None

    run.watch(stage)

    assert len(stage.events("Scan Silent")) == 1


def test_a_memory_that_cannot_be_read_keeps_the_rest_of_the_watch_not_back() -> None:
    stage = Stage()
    request = stage.put(IncidentState.DRAINING)
    stage.executions.end(request.incident_id, "FAILED")

    def last_reports(*_: Any) -> Any:
        raise AwsUnavailableError("throttled")

    stage.memory.last_reports = last_reports  # type: ignore[method-assign]

    assert run.watch(stage).closed == 1
    assert stage.telemetry.counted("Watches") == 1


def test_the_ages_survive_a_crash_at_every_call() -> None:
    def build() -> tuple[Stage, Callable[[], Any]]:
        stage = Stage()
        scan_all(stage)
        stage.put(IncidentState.VERIFYING)
        stage.clock.advance(3 * HOUR)
        return stage, lambda: run.watch(stage)

    def check(stage: Stage, result: Any) -> None:
        stage.clock.advance(60)
        run.watch(stage)
        assert times_sent(stage) == {"Incident Overdue": 1, "Scan Silent": 3}

    assert after_every_crash(build, check) >= 12


def test_the_return_of_the_scans_survives_a_crash_at_every_call() -> None:
    def build() -> tuple[Stage, Callable[[], Any]]:
        stage = Stage()
        scan_all(stage)
        stage.clock.advance(3 * HOUR)
        run.watch(stage)
        scan_all(stage)
        return stage, lambda: run.watch(stage)

    def check(stage: Stage, result: Any) -> None:
        stage.clock.advance(60)
        run.watch(stage)
        assert times_sent(stage)["Scan Silent"] == 6

    assert after_every_crash(build, check) >= 8
