"""Cordon: no new pods on the node, and a note on it whose doing that is."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nodemend.domain.cordon import cordon_patch, plan_ownership
from nodemend.domain.errors import ConcurrentUpdateError
from nodemend.domain.faults import Mode
from nodemend.domain.incidents import CordonRecord, IncidentState, Outcome
from nodemend.domain.nodes import (
    OWNER_ANNOTATION,
    REMEDIATION_TAINT_KEY,
    SCALE_DOWN_DISABLED_ANNOTATION,
    Taint,
)
from nodemend.domain.pods import MIRROR_ANNOTATION, Owner
from tests.unit.application import run
from tests.unit.application.stage import (
    Request,
    Stage,
    after_every_crash,
    enforce,
    node_name,
    pod,
    times_sent,
)

PATCH = f"patch nodes/{node_name(1)}"


def cordoning(**policy: Any) -> tuple[Stage, Request]:
    """A stage with an incident whose fault is confirmed."""
    stage = Stage(policy=enforce(**policy))
    return stage, stage.put(IncidentState.CORDONING)


def test_one_patch_cordons_taints_and_marks_the_node() -> None:
    stage, request = cordoning()

    assert run.cordon(stage, request).next == "drain"

    node = stage.node()
    assert stage.mutations() == [PATCH]
    assert node.is_unschedulable
    assert REMEDIATION_TAINT_KEY in {taint.key for taint in node.taints}
    assert node.annotations[SCALE_DOWN_DISABLED_ANNOTATION] == "true"
    assert json.loads(node.annotations[OWNER_ANNOTATION]) == {
        "incident": request.incident_id,
        "was_unschedulable": False,
        "had_scale_down_disabled": None,
    }
    incident = stage.incident(request.incident_id)
    assert incident.state is IncidentState.DRAINING
    assert incident.cordon == CordonRecord(stage.clock.now(), was_unschedulable=False)
    assert [event["reason"] for event in stage.cluster.events] == ["NodemendCordoned"]


def test_the_event_says_what_will_become_of_each_pod() -> None:
    stage, request = cordoning()
    stage.cluster.add_pod(pod("train-0"))
    stage.cluster.add_pod(pod("dcgm", owner=Owner("DaemonSet", "dcgm", "apps/v1")))
    stage.cluster.add_pod(pod("kube-proxy", annotations={MIRROR_ANNOTATION: "x"}))
    stage.cluster.add_pod(pod("done", phase="Succeeded", owner=None))
    stage.cluster.add_pod(pod("other", number=2))

    run.cordon(stage, request)

    event = stage.events("Node Cordoned")[0]
    assert event["evict"] == ["ml/done", "ml/train-0"]
    assert event["skip"] == [
        "ml/dcgm: its DaemonSet ignores cordons",
        "ml/kube-proxy: mirror of a static pod: the kubelet owns it",
    ]
    assert (event["evict_count"], event["skip_count"]) == (2, 2)
    assert event["was_unschedulable"] is False


def test_lists_in_the_event_are_cut_and_the_counts_stay_exact() -> None:
    stage, request = cordoning()
    for number in range(70):
        stage.cluster.add_pod(pod(f"p-{number:03}"))

    run.cordon(stage, request)

    event = stage.events("Node Cordoned")[0]
    assert (len(event["evict"]), event["evict_count"]) == (50, 70)


@pytest.mark.case("R45")
def test_r45a_a_node_that_an_administrator_had_cordoned_is_noted_as_such() -> None:
    stage, request = cordoning()
    stage.cordon_by_hand()

    run.cordon(stage, request)

    assert stage.events("Node Cordoned")[0]["was_unschedulable"] is True
    incident = stage.incident(request.incident_id)
    assert incident.cordon is not None
    assert incident.cordon.was_unschedulable


def test_other_peoples_taints_stay_with_the_time_they_were_added() -> None:
    stage, request = cordoning()
    theirs = Taint("team/reserved", "NoSchedule", "a", "2026-01-01T00:00:00Z")
    stage.cluster.change_node(node_name(1), lambda node: replace(node, taints=(theirs,)))

    run.cordon(stage, request)

    assert theirs in stage.node().taints


@pytest.mark.parametrize(
    "change",
    [{"is_deleting": True}, {"taints": (Taint("ToBeDeletedByClusterAutoscaler", "NoSchedule"),)}],
    ids=["deleting", "cluster-autoscaler"],
)
@pytest.mark.parametrize("mode", [Mode.ENFORCE, Mode.CORDON_ONLY])
def test_a_remediator_that_came_after_the_second_look_is_left_alone(
    mode: Mode, change: dict[str, Any]
) -> None:
    stage, request = cordoning(mode=mode)
    stage.cluster.change_node(node_name(1), lambda node: replace(node, **change))

    assert run.cordon(stage, request).next == "close"

    verdict = stage.incident(request.incident_id).verdict
    assert verdict is not None
    assert (verdict[0], verdict[1].code) == (Outcome.SKIPPED, "other_remediator")
    assert stage.mutations() == []


def test_the_cordon_of_an_earlier_incident_is_not_taken_for_an_administrators() -> None:
    stage, request = cordoning()
    node = stage.node()
    stage.cluster.patch_node(node.ref.name, cordon_patch(node, plan_ownership(node, "01EARLIER")))
    stage.cluster.faults.calls.clear()

    run.cordon(stage, request)

    owner = json.loads(stage.node().annotations[OWNER_ANNOTATION])
    assert owner["incident"] == request.incident_id
    assert owner["was_unschedulable"] is False
    assert stage.mutations() == [PATCH]


def test_a_node_that_changed_under_the_patch_is_read_and_patched_again() -> None:
    stage, request = cordoning()
    original = stage.cluster.get_node
    reads = 0

    def get_node(name: str) -> Any:
        nonlocal reads
        found = original(name)
        reads += 1
        if reads == 1:  # a kubelet's heartbeat
            stage.cluster.change_node(name, lambda node: node)
        return found

    stage.cluster.get_node = get_node  # type: ignore[method-assign]

    assert run.cordon(stage, request).next == "drain"
    assert stage.mutations() == [PATCH, PATCH]
    assert stage.node().is_unschedulable


def test_a_node_that_never_holds_still_ends_the_step_for_a_retry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage, request = cordoning()
    monkeypatch.setattr(stage.cluster, "patch_node", lambda name, patch: False)

    with pytest.raises(ConcurrentUpdateError, match="changed 4 times"):
        run.cordon(stage, request)
    assert stage.incident(request.incident_id).state is IncidentState.CORDONING


def test_in_a_dry_run_the_event_says_it_all_and_nothing_is_touched() -> None:
    stage, request = cordoning(mode=Mode.DRY_RUN)
    stage.cluster.add_pod(pod("train-0"))

    assert run.cordon(stage, request).next == "drain"

    assert stage.mutations() == []
    assert stage.cluster.events == []
    event = stage.events("Node Cordoned")[0]
    assert event["dry_run"] is True
    assert event["evict"] == ["ml/train-0"]


def test_a_policy_that_stops_at_the_cordon_calls_a_person() -> None:
    stage, request = cordoning(mode=Mode.CORDON_ONLY)

    assert run.cordon(stage, request).next == "close"
    result = run.close(stage, request)

    assert stage.mutations() == [PATCH]
    assert (result.outcome, result.reason.split(":")[0]) == ("NEEDS_HUMAN", "cordon_only")
    assert "repair the node by hand" in stage.events("Incident Closed")[0]["remedy"]
    assert stage.node().is_unschedulable


@pytest.mark.parametrize("mode", [Mode.ENFORCE, Mode.CORDON_ONLY, Mode.DRY_RUN])
def test_the_cordon_survives_a_crash_at_every_call_with_one_patch(mode: Mode) -> None:
    def build() -> tuple[Stage, Callable[[], Any]]:
        stage, request = cordoning(mode=mode)
        stage.cluster.add_pod(pod("train-0"))
        return stage, lambda: run.cordon(stage, request)

    def check(stage: Stage, result: Any) -> None:
        stage.outbox.publish_pending()
        assert times_sent(stage) == {"Node Cordoned": 1}
        assert len(stage.cluster.events) <= 1
        if mode is Mode.DRY_RUN:
            assert stage.mutations() == []
            return
        assert stage.mutations() == [PATCH]
        assert stage.node().is_unschedulable
        assert stage.events("Node Cordoned")[0]["was_unschedulable"] is False
        if mode is Mode.CORDON_ONLY:
            verdict = stage.incidents.list_open("gpu-prod")[0].verdict
            assert verdict is not None
            assert verdict[0] is Outcome.NEEDS_HUMAN

    assert after_every_crash(build, check) >= 5
