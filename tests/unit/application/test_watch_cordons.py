"""The watch and the nodes: cordons that nobody owns are taken off exactly, or told of once."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from nodemend.application.left_cordons import RESTORED_AT_ONCE
from nodemend.application.watch_incidents import LOOK_FOR
from nodemend.domain.errors import (
    AwsForbiddenError,
    AwsUnavailableError,
    ClusterForbiddenError,
    ClusterUnauthorizedError,
    ClusterUnavailableError,
)
from nodemend.domain.faults import Mode
from nodemend.domain.guard import pause, resume
from nodemend.domain.incidents import IncidentState, Outcome
from nodemend.domain.nodes import OWNER_ANNOTATION, REMEDIATION_TAINT_KEY, Node, Taint
from nodemend.domain.policy import ClusterPolicy, GroupPolicy, Limits
from nodemend.domain.reasons import Reason
from tests.fakes.cluster import FakeCluster, FakeClusters
from tests.unit.application import run
from tests.unit.application.stage import (
    CLUSTER,
    CLUSTER_POLICY,
    Request,
    Stage,
    after_every_crash,
    enforce,
    gpu_node,
    node_name,
    times_sent,
)

SCALE_DOWN = "cluster-autoscaler.kubernetes.io/scale-down-disabled"


def looks(node: Node) -> tuple[bool, Mapping[str, str], set[str]]:
    """What a cordon changes on a node."""
    ours = {key: value for key, value in node.annotations.items() if "ttl" not in key}
    keys = {taint.key for taint in node.taints if not taint.key.startswith("node.kubernetes.io")}
    return node.is_unschedulable, ours, keys


def left(
    outcome: Outcome = Outcome.SKIPPED, code: str = "x", number: int = 1, stage: Stage | None = None
) -> tuple[Stage, Request]:
    """A node that its closed incident has left cordoned, some time ago."""
    stage = stage or Stage()
    request = stage.put(IncidentState.CORDONING, number)
    stage.cordon_as(request.incident_id, number)
    stage.save(request.incident_id, verdict=(outcome, Reason(code, "why")))
    run.close(stage, request)
    stage.executions.end(request.incident_id, "SUCCEEDED")
    stage.clock.advance(300)
    stage.cluster.faults.calls.clear()
    stage.bus.accepted.clear()
    return stage, request


def test_a_cordon_that_should_be_gone_is_taken_off_and_told_of() -> None:
    stage, request = left()

    result = run.watch(stage)

    assert result.restored_nodes == 1
    assert looks(stage.node()) == (False, {}, set())
    event = stage.events("Node Released")[0]
    assert event["incident_id"] == request.incident_id
    assert (event["is_uncordoned"], event["step"]) == (True, "watch_incidents")
    assert (event["outcome"], event["reason"]["code"]) == ("SKIPPED", "restored")
    assert [one["reason"] for one in stage.cluster.events] == ["NodemendReleased"]
    assert stage.telemetry.counted("Actions", action="release") == 1
    assert stage.telemetry.counted("Events") >= 1
    stage.clock.advance(60)
    assert run.watch(stage).restored_nodes == 0
    assert len(stage.events("Node Released")) == 1
    assert stage.mutations() == [f"patch nodes/{node_name(1)}"]


@pytest.mark.case("R45")
def test_r45_what_others_had_put_on_the_node_stays_exactly() -> None:
    stage = Stage()
    before = gpu_node(
        1,
        is_unschedulable=True,
        annotations={SCALE_DOWN: "false", "team": "a"},
        taints=(Taint("dedicated", "NoSchedule", "ml"),),
    )
    stage.cluster.add_node(before)
    expected = looks(stage.node())
    left(stage=stage)
    assert looks(stage.node()) != expected

    assert run.watch(stage).restored_nodes == 1

    assert looks(stage.node()) == expected
    assert stage.events("Node Released")[0]["is_uncordoned"] is False


def test_a_node_that_changes_under_the_patch_is_left_to_the_next_watch() -> None:
    stage, _ = left()
    original = stage.guards.load

    def load(cluster: str) -> Any:
        stage.cluster.change_node(node_name(1), lambda node: replace(node, gpu_allocatable=7))
        return original(cluster)

    stage.guards.load = load  # type: ignore[method-assign]
    assert run.watch(stage).restored_nodes == 0
    assert stage.events("Node Released") == []
    stage.guards.load = original  # type: ignore[method-assign]

    assert run.watch(stage).restored_nodes == 1
    assert len(stage.events("Node Released")) == 1


def test_what_a_person_has_put_back_meanwhile_is_not_told_as_ours() -> None:
    stage, _ = left()
    original = stage.cluster.list_gpu_nodes

    def list_gpu_nodes() -> Any:
        found = original()
        stage.cluster.add_node(gpu_node(1))
        return found

    stage.cluster.list_gpu_nodes = list_gpu_nodes  # type: ignore[method-assign]
    for _ in range(2):
        assert run.watch(stage).restored_nodes == 0
        stage.clock.advance(60)

    assert stage.events("Node Released") == []


def test_an_incident_that_takes_the_cordon_over_meanwhile_keeps_it() -> None:
    stage, _ = left()
    original = stage.cluster.list_gpu_nodes

    def list_gpu_nodes() -> Any:
        found = original()
        stage.cluster.list_gpu_nodes = original  # type: ignore[method-assign]
        stage.cordon_as(stage.put(IncidentState.DRAINING).incident_id)
        return found

    stage.cluster.list_gpu_nodes = list_gpu_nodes  # type: ignore[method-assign]
    run.watch(stage)
    stage.clock.advance(60)
    run.watch(stage)

    assert stage.node().is_unschedulable
    assert stage.events("Node Released") == []


def test_the_cordon_of_an_open_incident_is_never_touched() -> None:
    stage = Stage()
    for number, state in enumerate((IncidentState.DRAINING, IncidentState.CHECKING), start=1):
        request = stage.put(state, number)
        stage.cordon_as(request.incident_id, number)
    stage.cluster.faults.calls.clear()
    stage.clock.advance(1200)

    assert run.watch(stage).restored_nodes == 0
    assert stage.mutations() == []


def test_a_new_incident_of_the_node_keeps_the_old_cordon_until_it_is_decided() -> None:
    stage, _ = left(Outcome.SUPERSEDED)
    stage.wait()

    assert run.watch(stage).restored_nodes == 0
    assert stage.mutations() == []


def test_a_paused_cluster_is_left_and_mended_after_the_pause() -> None:
    stage, _ = left()
    guard = stage.guards.load(CLUSTER)
    stage.guards.store(pause(guard, by="alice", why="network work", now=stage.clock.now()))

    assert run.watch(stage).restored_nodes == 0
    assert stage.mutations() == []

    guard = stage.guards.load(CLUSTER)
    stage.guards.store(resume(guard, by="alice", why="done", now=stage.clock.now()))
    assert run.watch(stage).restored_nodes == 1


def test_a_dry_run_changes_nothing_and_a_person_is_told() -> None:
    stage, request = left()
    stage.policies.policy = enforce(mode=Mode.DRY_RUN)

    result = run.watch(stage)

    assert (result.restored_nodes, result.left_cordons) == (0, 1)
    assert stage.mutations() == []
    event = stage.events("Cordon Left")[0]
    assert (event["owner"], event["reason"]["code"]) == (request.incident_id, "mode_forbids")


def told_kept(stage: Stage) -> list[str]:
    return [event["reason"]["code"] for event in stage.events("Cordon Left")]


@pytest.mark.parametrize(
    ("outcome", "code", "quiet_s", "told"),
    [
        (Outcome.NEEDS_HUMAN, "drain_deadline", 23 * 3600, "cordon_kept"),
        (Outcome.REPLACED, "replaced", 3600, "not_gone"),
        (Outcome.ABORTED_BY_OPERATOR, "mode_changed", 0, "cordon_kept"),
    ],
)
def test_a_cordon_that_is_kept_is_told_of_once_when_it_is_old(
    outcome: Outcome, code: str, quiet_s: int, told: str
) -> None:
    stage, request = left(outcome, code)
    before = looks(stage.node())
    if quiet_s:
        stage.clock.advance(quiet_s)
        assert run.watch(stage).left_cordons == 0
        stage.clock.advance(2 * 3600)

    for _ in range(5 * 24):
        result = run.watch(stage)
        assert (result.restored_nodes, result.left_cordons) == (0, 1)
        stage.clock.advance(3600)

    assert told_kept(stage) == [told]
    event = stage.events("Cordon Left")[0]
    assert event["node"]["uid"] == "uid-1"
    assert request.incident_id in event["reason"]["text"]
    assert event["remedy"]
    assert looks(stage.node()) == before
    assert stage.telemetry.gauges["CordonsLeft", ()][-1] == 1
    assert stage.mutations() == []


def test_the_alarm_ends_when_the_node_was_put_back() -> None:
    stage, _ = left(Outcome.ABORTED_BY_OPERATOR, "mode_changed")
    run.watch(stage)
    stage.cluster.add_node(gpu_node(1))

    assert run.watch(stage).left_cordons == 0
    assert stage.telemetry.gauges["CordonsLeft", ()] == [1, 0]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda node: replace(node, annotations={}), "cordon_unreadable"),
        (
            lambda node: replace(
                node,
                annotations={
                    OWNER_ANNOTATION: '{"incident": "01OTHERSTACK", "was_unschedulable": false}'
                },
            ),
            "owner_unknown",
        ),
    ],
)
def test_a_cordon_that_no_record_explains_is_watched_for_a_while_then_told_of_once(
    change: Callable[[Node], Node], code: str
) -> None:
    stage, _ = left()
    stage.cluster.change_node(node_name(1), change)

    assert run.watch(stage).left_cordons == 0
    stage.clock.advance(60)
    assert run.watch(stage).left_cordons == 0
    for _ in range(4):
        stage.clock.advance(60)
        assert run.watch(stage).left_cordons == 1

    assert told_kept(stage) == [code]
    assert stage.mutations() == []


def test_another_machine_under_the_name_is_not_touched() -> None:
    stage, _ = left()
    marks = stage.node()
    stage.swap_machine()
    stage.cluster.change_node(
        node_name(1),
        lambda node: replace(node, annotations=marks.annotations, taints=marks.taints),
    )

    run.watch(stage)

    assert stage.mutations() == []
    assert told_kept(stage) == ["owner_of_other_node"]


# --- trouble --------------------------------------------------------------------------------------


def test_a_denied_patch_is_told_of_once_and_keeps_no_other_node_waiting() -> None:
    stage, denied = left(number=1)
    left(number=2, stage=stage)
    stage.cluster.faults.fail(
        "patch", ClusterForbiddenError("cannot patch nodes"), target=node_name(1), times=None
    )

    assert run.watch(stage).restored_nodes == 1
    stage.clock.advance(60)
    result = run.watch(stage)

    assert (result.restored_nodes, result.left_cordons) == (0, 1)
    assert not stage.node(2).is_unschedulable
    assert told_kept(stage) == ["cluster_forbidden"]
    told = [one["incident_id"] for one in stage.events("Node Released")]
    assert len(told) == 1
    assert denied.incident_id not in told


@pytest.mark.parametrize(
    "error",
    [
        AwsForbiddenError("sts:AssumeRole"),
        AwsUnavailableError("no answer"),
        ClusterUnavailableError("no answer"),
        ClusterUnauthorizedError("401"),
        ClusterForbiddenError("cannot list nodes"),
    ],
)
@pytest.mark.parametrize("verb", ["open", "list"])
def test_a_cluster_that_cannot_be_seen_keeps_nothing_else_waiting(error: Any, verb: str) -> None:
    other = ClusterPolicy("a-first", "ws-2", "eu-central-1")
    stage, _ = left(stage=Stage(policy=enforce(clusters=(other, CLUSTER_POLICY))))
    dark = FakeCluster("a-first")
    stage.clusters = FakeClusters(dark, stage.cluster)
    if verb == "open":
        stage.clusters.faults.fail("open", error, target="a-first", times=None)
    else:
        dark.faults.fail("list", error, times=None)
    request = stage.put(IncidentState.VERIFYING, 2)
    stage.executions.end(request.incident_id, "FAILED")

    result = run.watch(stage)

    assert (result.unseen_clusters, result.restored_nodes, result.closed) == (1, 1, 1)
    assert stage.telemetry.gauges["ClustersUnseen", ()] == [1]
    # What is unknown is not none: the alarm keeps its state.
    assert ("CordonsLeft", ()) not in stage.telemetry.gauges
    assert stage.telemetry.counted("Watches") == 1


@pytest.mark.parametrize(
    ("policy", "alarmed"),
    [
        ({"mode": Mode.DRY_RUN}, 0),
        ({"mode": Mode.DRY_RUN, "groups": (GroupPolicy({"pool": "a"}, limits=Limits()),)}, 0),
        ({"mode": Mode.DRY_RUN, "groups": (GroupPolicy({"pool": "a"}, mode=Mode.ENFORCE),)}, 1),
        ({"mode": Mode.CORDON_ONLY}, 1),
    ],
)
def test_a_rehearsal_raises_no_alarm_for_a_cluster_without_access(
    policy: dict[str, Any], alarmed: int
) -> None:
    stage = Stage(policy=enforce(**policy))
    stage.clusters.faults.fail("open", AwsForbiddenError("sts:AssumeRole"), times=None)

    assert run.watch(stage).unseen_clusters == 1
    assert stage.telemetry.gauges["ClustersUnseen", ()] == [alarmed]


def test_a_cluster_that_swallows_time_is_begun_with_another_one_next_time() -> None:
    names = ("c-1", "c-2", "c-3")
    policies = tuple(ClusterPolicy(name, "ws", "eu-central-1") for name in names)
    stage = Stage(policy=enforce(clusters=policies))
    stage.clusters = FakeClusters(*(FakeCluster(name) for name in names))
    original, seen = stage.clusters.open, set()

    def opened(cluster: ClusterPolicy) -> Any:
        seen.add(cluster.name)
        stage.clock.advance(LOOK_FOR.total_seconds())
        return original(cluster)

    stage.clusters.open = opened  # type: ignore[method-assign]
    for _ in names:
        assert run.watch(stage).unseen_clusters == 2
        stage.clock.advance(60 - LOOK_FOR.total_seconds())

    assert seen == set(names)


def test_a_lost_answer_of_the_patch_is_told_by_the_next_watch() -> None:
    stage, request = left()
    stage.cluster.faults.fail("patch", ClusterUnavailableError("no answer"), after=True)

    assert run.watch(stage).restored_nodes == 0
    assert stage.events("Node Released") == []
    stage.clock.advance(60)
    run.watch(stage)

    assert [one["incident_id"] for one in stage.events("Node Released")] == [request.incident_id]
    assert stage.mutations() == [f"patch nodes/{node_name(1)}"]


def test_a_patch_that_never_arrived_is_made_again() -> None:
    stage, _ = left()
    stage.cluster.faults.fail("patch", ClusterUnavailableError("no answer"))

    run.watch(stage)
    assert run.watch(stage).restored_nodes == 1
    assert len(stage.events("Node Released")) == 1


def test_a_bus_that_is_gone_holds_up_no_release_and_the_event_comes_later() -> None:
    stage, _ = left()
    kept, _ = left(Outcome.ABORTED_BY_OPERATOR, "mode_changed", number=2, stage=stage)
    stage.bus.gone = AwsUnavailableError("no answer")

    assert run.watch(stage).restored_nodes == 1
    assert stage.telemetry.counted("EventsUnsent") >= 2
    stage.bus.gone = None
    stage.clock.advance(60)
    run.watch(kept)

    assert times_sent(stage) == {"Node Released": 1, "Cordon Left": 1}


def test_a_node_that_went_away_before_its_release_was_told_is_not_told_of() -> None:
    stage, _ = left()
    stage.cluster.faults.fail("patch", ClusterUnavailableError("no answer"))
    run.watch(stage)
    stage.cluster.remove_node(node_name(1))

    run.watch(stage)

    assert stage.events("Node Released") == []


def test_the_look_at_the_nodes_survives_a_crash_at_every_call() -> None:
    def build() -> tuple[Stage, Callable[[], Any]]:
        stage, _ = left()
        left(Outcome.ABORTED_BY_OPERATOR, "mode_changed", number=2, stage=stage)
        return stage, lambda: run.watch(stage)

    def check(stage: Stage, result: Any) -> None:
        stage.clock.advance(60)
        run.watch(stage)
        assert looks(stage.node(1)) == (False, {}, set())
        assert stage.node(2).is_unschedulable
        assert [m for m in stage.mutations() if m.startswith("patch")] == [
            f"patch nodes/{node_name(1)}"
        ]
        sent = times_sent(stage)
        assert (sent["Node Released"], sent["Cordon Left"]) == (1, 1)

    assert after_every_crash(build, check) >= 15


def test_2000_nodes_are_looked_at_in_two_calls_and_given_back_in_portions() -> None:
    stage, _ = left(Outcome.NEEDS_HUMAN)
    for number in range(10, 2010):
        stage.cluster.add_node(gpu_node(number))
    stage.cluster.faults.calls.clear()
    began = time.perf_counter()

    run.watch(stage)

    assert time.perf_counter() - began < 5
    assert [call.target for call in stage.cluster.calls] == ["nodes"]

    # Each of them is left cordoned, as after a table that was restored from an old backup.
    closed = stage.incident(next(iter(stage.incidents.records)))
    for number in range(10, 310):
        node = gpu_node(number)
        incident = replace(closed, id=f"01OLD{number}", node=node.ref, outcome=Outcome.SKIPPED)
        assert stage.incidents.create(incident)
        stage.cordon_as(f"01OLD{number}", number)
    restored = [run.watch(stage).restored_nodes for _ in range(4)]

    assert restored == [RESTORED_AT_ONCE] * 3 + [0]
    assert len(stage.events("Node Released")) == 300


def test_time_that_runs_out_amid_the_nodes_ends_the_look_and_the_next_goes_on() -> None:
    stage = Stage()
    for number in (1, 2):
        left(number=number, stage=stage)
    original = stage.incidents.get

    def get(incident_id: str) -> Any:
        stage.clock.advance(LOOK_FOR.total_seconds())
        return original(incident_id)

    stage.incidents.get = get  # type: ignore[method-assign]
    assert run.watch(stage).restored_nodes == 1
    stage.clock.advance(60)
    assert run.watch(stage).restored_nodes == 1


def test_taint_and_note_go_from_a_node_that_somebody_has_uncordoned() -> None:
    stage, _ = left(Outcome.ABORTED_BY_OPERATOR, "uncordoned")
    stage.uncordon_by_hand()

    run.watch(stage)

    assert looks(stage.node()) == (False, {}, set())
    assert REMEDIATION_TAINT_KEY not in {taint.key for taint in stage.node().taints}


def test_a_broken_policy_stops_only_the_look_at_the_nodes() -> None:
    stage, _ = left()
    stage.policies.problem = "invalid"

    result = run.watch(stage)

    assert (result.restored_nodes, stage.telemetry.counted("Watches")) == (0, 1)
    assert stage.mutations() == []
    assert ("ScansSilent", ()) not in stage.telemetry.gauges


def test_old_matters_stay_told_over_the_memorys_time() -> None:
    stage, _ = left(Outcome.ABORTED_BY_OPERATOR, "paused")
    for _ in range(40):
        run.watch(stage)
        stage.clock.advance(timedelta(hours=6).total_seconds())

    assert told_kept(stage) == ["cordon_kept"]
