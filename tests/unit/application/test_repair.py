"""start_repair, check_repair, validate_node and release_node: a repair and its proof."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nodemend.application.ports import QueryResult
from nodemend.domain.cordon import cordon_patch, plan_ownership
from nodemend.domain.errors import (
    AwsUnavailableError,
    ConcurrentUpdateError,
    InvalidInputError,
    RepairRefusedError,
)
from nodemend.domain.faults import Mode, Rung
from nodemend.domain.incidents import DrainRecord, IncidentState, Outcome, RepairRecord
from nodemend.domain.nodes import (
    OWNER_ANNOTATION,
    REMEDIATION_TAINT_KEY,
    SCALE_DOWN_DISABLED_ANNOTATION,
    Node,
    Readiness,
    Taint,
)
from nodemend.domain.pods import Owner
from nodemend.domain.policy import ClusterPolicy, Deadlines
from nodemend.domain.reasons import Reason
from tests.fakes.system import START
from tests.unit.application import run
from tests.unit.application.stage import (
    CLUSTER,
    CLUSTER_POLICY,
    GROUP,
    Request,
    Stage,
    after_every_crash,
    clear,
    enforce,
    gpu_node,
    instance_id,
    node_name,
    pod,
    repair_of,
    samples,
    times_sent,
    verdict_of,
    xid_labels,
)

DRAINED = DrainRecord(START, is_drained=True)
TERMINATE = f"terminate {instance_id(1)}"


def repairing(**policy: Any) -> tuple[Stage, Request]:
    """A stage with an incident whose node is drained."""
    stage = Stage(policy=enforce(**policy))
    return stage, stage.put(IncidentState.REPAIRING, drain=DRAINED)


def checking(**policy: Any) -> tuple[Stage, Request]:
    """A stage with an incident whose instance was terminated."""
    stage, request = repairing(**policy)
    run.start(stage, request)
    clear(stage)
    return stage, request


def validating(**policy: Any) -> tuple[Stage, Request]:
    """A stage with an incident whose replacement is Ready."""
    stage, request = checking(**policy)
    stage.replace_node()
    assert run.check(stage, request).next == "validate"
    clear(stage)
    return stage, request


# --- start_repair ---------------------------------------------------------------------------------


def test_the_instance_is_terminated_after_a_note_of_how_things_were() -> None:
    stage, request = repairing()
    at_call: list[RepairRecord | None] = []
    original = stage.capacity.terminate

    def terminate(cluster: ClusterPolicy, instance: str) -> None:
        at_call.append(stage.incident(request.incident_id).repair)
        original(cluster, instance)

    stage.capacity.terminate = terminate  # type: ignore[assignment, method-assign]

    assert run.start(stage, request).next == "check"

    assert stage.mutations() == [TERMINATE]
    noted = at_call[0]
    assert noted is not None
    assert noted.before == tuple(instance_id(number) for number in range(1, 5))
    assert (noted.group, noted.desired_before, noted.started_at) == (GROUP, 4, None)
    assert repair_of(stage, request).started_at == stage.clock.now()
    assert stage.incident(request.incident_id).state is IncidentState.CHECKING
    event = stage.events("Repair Started")[0]
    assert (event["rung"], event["group"], event["desired_before"]) == ("replace", GROUP, 4)
    assert [one["reason"] for one in stage.cluster.events] == ["NodemendRepairStarted"]


@pytest.mark.case("R34")
def test_r34_a_death_after_the_call_is_observed_and_not_repeated() -> None:
    stage, request = repairing()
    stage.capacity.faults.fail("terminate", AwsUnavailableError("the answer was lost"), after=True)
    with pytest.raises(AwsUnavailableError):
        run.start(stage, request)

    assert run.start(stage, request).next == "check"

    assert stage.mutations() == [TERMINATE]
    assert len(stage.events("Repair Started")) == 1


@pytest.mark.case("R34")
def test_r34_the_instance_may_be_gone_altogether_by_the_retry() -> None:
    stage, request = repairing()
    stage.capacity.faults.fail("terminate", AwsUnavailableError("lost"), after=True)
    with pytest.raises(AwsUnavailableError):
        run.start(stage, request)
    stage.replace_node()

    assert run.start(stage, request).next == "check"
    assert stage.mutations() == [TERMINATE]
    assert instance_id(9) not in repair_of(stage, request).before


def test_a_refused_repair_is_a_reason_for_a_person() -> None:
    stage, request = repairing()
    stage.capacity.faults.fail("terminate", RepairRefusedError("scale-in protection"))

    with pytest.raises(RepairRefusedError):
        run.start(stage, request)
    run.escalate(stage, request, "RepairRefusedError", '{"errorMessage": "scale-in protection"}')
    result = run.close(stage, request)

    assert (result.outcome, result.reason) == (
        "NEEDS_HUMAN",
        "repair_refused: scale-in protection",
    )


def test_a_node_that_was_not_drained_is_not_replaced() -> None:
    for drain in (None, DrainRecord(START)):
        stage, request = repairing()
        stage.save(request.incident_id, drain=drain)

        assert run.start(stage, request).next == "close"
        assert verdict_of(stage, request)[1].code == "not_drained"
        assert stage.mutations() == []


@pytest.mark.parametrize("who", ["person", "later incident"])
def test_a_node_whose_cordon_is_gone_is_not_replaced_and_the_rest_is_taken_off(who: str) -> None:
    stage, request = repairing()
    if who == "person":
        stage.uncordon_by_hand()
    else:
        stage.cordon_as("01LATER")
    clear(stage)

    assert run.start(stage, request).next == "close"

    outcome, reason = verdict_of(stage, request)
    assert (outcome, reason.code) == (Outcome.ABORTED_BY_OPERATOR, "uncordoned")
    assert TERMINATE not in stage.mutations()
    if who == "person":
        assert OWNER_ANNOTATION not in stage.node().annotations
        assert REMEDIATION_TAINT_KEY not in {taint.key for taint in stage.node().taints}
    else:
        assert stage.mutations() == []
    run.close(stage, request)
    assert stage.guards.load(CLUSTER).replacements == ()


@pytest.mark.parametrize("is_retry", [False, True])
def test_pods_that_run_on_the_node_again_are_found_directly_before_the_call(
    is_retry: bool,
) -> None:
    stage, request = repairing()
    if is_retry:
        stage.capacity.faults.fail("terminate", AwsUnavailableError("throttled"))
        with pytest.raises(AwsUnavailableError):
            run.start(stage, request)
        clear(stage)
    stage.cluster.add_pod(pod("kube-proxy", owner=Owner("DaemonSet", "kube-proxy", "apps/v1")))
    stage.cluster.add_pod(pod("train-0"))

    assert run.start(stage, request).next == "close"

    outcome, reason = verdict_of(stage, request)
    assert (outcome, reason.code) == (Outcome.NEEDS_HUMAN, "not_drained")
    assert "1 pods run on" in reason.text
    assert "ml/train-0" in reason.text
    assert stage.mutations() == []


def test_what_a_drain_leaves_on_the_node_does_not_keep_it_from_being_replaced() -> None:
    stage, request = repairing()
    stage.cluster.add_pod(pod("kube-proxy", owner=Owner("DaemonSet", "kube-proxy", "apps/v1")))
    stage.cluster.add_pod(pod("was-here", phase="Failed"))

    assert run.start(stage, request).next == "check"


def test_work_on_the_whole_group_that_began_after_the_drain_is_not_cut_across() -> None:
    stage, request = repairing()
    stage.capacity.other[GROUP] = "node group gpu is UPDATING"

    assert run.start(stage, request).next == "close"

    outcome, reason = verdict_of(stage, request)
    assert (outcome, reason.code) == (Outcome.NEEDS_HUMAN, "other_remediator")
    assert stage.mutations() == []


@pytest.mark.parametrize(
    "change",
    [
        {"is_deleting": True},
        {"taints": (Taint("ToBeDeletedByClusterAutoscaler", "NoSchedule", "1"),)},
    ],
    ids=["deleting", "cluster-autoscaler"],
)
def test_a_remediator_that_came_after_the_drain_is_left_alone(change: dict[str, Any]) -> None:
    stage, request = repairing()

    def come(node: Node) -> Node:
        return replace(node, **{**change, "taints": (*node.taints, *change.get("taints", ()))})

    stage.cluster.change_node(node_name(1), come)

    assert run.start(stage, request).next == "close"

    assert verdict_of(stage, request)[1].code == "other_remediator"
    assert stage.mutations() == []


@pytest.mark.case("R65")
def test_r65_what_was_suspended_after_the_cordon_is_found_directly_before_the_call() -> None:
    stage, request = repairing()
    suspend(stage)

    assert run.start(stage, request).next == "close"

    outcome, reason = verdict_of(stage, request)
    assert (outcome, reason.code) == (Outcome.NEEDS_HUMAN, "asg_suspended")
    assert stage.mutations() == []


@pytest.mark.case("R65")
def test_r65_it_is_asked_again_when_an_earlier_try_died_before_the_call() -> None:
    stage, request = repairing()
    stage.capacity.faults.fail("terminate", AwsUnavailableError("throttled"))
    with pytest.raises(AwsUnavailableError):
        run.start(stage, request)
    stage.capacity.faults.calls.clear()
    suspend(stage)

    assert run.start(stage, request).next == "close"

    assert verdict_of(stage, request)[1].code == "asg_suspended"
    assert stage.mutations() == []


def suspend(stage: Stage) -> None:
    """Suspend launches in the stage's group."""
    group = stage.capacity.group(CLUSTER_POLICY, GROUP)
    assert group is not None
    stage.capacity.add_group(CLUSTER, replace(group, suspended=frozenset({"Launch"})))


@pytest.mark.parametrize("changes", [{"group": ""}, {"group": "gone"}, {"rung_index": 1}])
def test_without_a_repair_that_is_left_a_person_is_called(changes: dict[str, Any]) -> None:
    stage, request = repairing()
    stage.save(request.incident_id, **changes)

    assert run.start(stage, request).next == "close"
    outcome, reason = verdict_of(stage, request)
    assert (outcome, reason.code) == (Outcome.NEEDS_HUMAN, "no_repair_left")
    assert stage.mutations() == []


@pytest.mark.parametrize("group", [GROUP, "", "gone"])
def test_in_a_dry_run_the_repair_is_told_and_the_incident_observed(group: str) -> None:
    stage, request = repairing(mode=Mode.DRY_RUN)
    stage.save(request.incident_id, group=group)

    assert run.start(stage, request).next == "close"

    outcome, reason = verdict_of(stage, request)
    assert (outcome, reason.code) == (Outcome.OBSERVED, "dry_run")
    assert "would have been cordoned, drained and replaced: XID 79" in reason.text
    event = stage.events("Repair Started")[0]
    assert event["dry_run"] is True
    assert event["desired_before"] == (4 if group == GROUP else 0)
    assert stage.mutations() == []


@pytest.mark.parametrize("mode", [Mode.ENFORCE, Mode.DRY_RUN])
def test_the_repair_survives_a_crash_at_every_call_with_one_terminate(mode: Mode) -> None:
    def build() -> tuple[Stage, Callable[[], Any]]:
        stage, request = repairing(mode=mode)
        return stage, lambda: run.start(stage, request)

    def check(stage: Stage, result: Any) -> None:
        assert result.next == ("check" if mode is Mode.ENFORCE else "close")
        assert stage.mutations() == ([TERMINATE] if mode is Mode.ENFORCE else [])
        stage.outbox.publish_pending()
        assert times_sent(stage) == {"Repair Started": 1}

    assert after_every_crash(build, check) >= 4


# --- check_repair ---------------------------------------------------------------------------------


def test_the_replacement_is_found_and_claimed_when_its_node_is_fit() -> None:
    stage, request = checking()

    assert run.check(stage, request).wait_s == 20  # nothing yet
    stage.clock.advance(20)
    stage.capacity.replace_instance(CLUSTER, instance_id(1), instance_id(9))
    assert run.check(stage, request).wait_s == 60  # in service, not joined
    stage.clock.advance(60)
    stage.cluster.add_node(gpu_node(9, readiness=Readiness.NOT_READY))
    assert run.check(stage, request).wait_s == 300
    stage.clock.advance(300)
    stage.cluster.add_node(gpu_node(9, gpu_allocatable=0))
    assert run.check(stage, request).wait_s == 300
    problem = repair_of(stage, request).last_problem
    assert problem == f"replacement_unhealthy: {node_name(9)} offers 0 of 8 GPUs"
    stage.cluster.add_node(gpu_node(9))
    assert run.check(stage, request).next == "validate"

    repair = repair_of(stage, request)
    assert repair.replacement_instance_id == instance_id(9)
    assert repair.replacement_node == gpu_node(9).ref
    assert stage.incidents.claims == {instance_id(9): request.incident_id}
    assert stage.incident(request.incident_id).state is IncidentState.VALIDATING
    assert stage.mutations() == []


def test_a_newcomer_that_another_incident_claimed_is_no_proof() -> None:
    stage, request = checking()
    stage.replace_node()
    stage.incidents.claim_instance(instance_id(9), "01OTHER")

    assert run.check(stage, request).next == "wait"

    group = stage.capacity.group(CLUSTER_POLICY, GROUP)
    assert group is not None
    stage.capacity.add_group(
        CLUSTER,
        replace(group, instances={**group.instances, instance_id(8): "InService"}),
    )
    stage.cluster.add_node(gpu_node(8))
    assert run.check(stage, request).next == "validate"
    assert repair_of(stage, request).replacement_instance_id == instance_id(8)


@pytest.mark.parametrize("state", ["Terminating", ""])
def test_a_claimed_newcomer_that_dies_before_it_joins_is_let_go_for_the_next(state: str) -> None:
    stage, request = checking()
    stage.capacity.replace_instance(CLUSTER, instance_id(1), instance_id(9))
    run.check(stage, request)
    assert repair_of(stage, request).replacement_instance_id == instance_id(9)

    if state:
        stage.capacity.set_state(CLUSTER, instance_id(9), state)
    else:
        stage.capacity.lose_instance(CLUSTER, instance_id(9))
    assert run.check(stage, request).next == "wait"
    assert repair_of(stage, request).last_problem.startswith("replacement_missing")

    stage.capacity.set_state(CLUSTER, instance_id(8), "InService")
    stage.cluster.add_node(gpu_node(8))
    assert run.check(stage, request).next == "validate"
    assert repair_of(stage, request).replacement_instance_id == instance_id(8)


@pytest.mark.case("R63")
def test_r63_a_desired_capacity_that_fell_is_told_as_such() -> None:
    stage, request = checking()
    group = stage.capacity.group(CLUSTER_POLICY, GROUP)
    assert group is not None
    stage.capacity.add_group(CLUSTER, replace(group, desired=3))

    stage.clock.advance(2700)
    assert run.check(stage, request).next == "close"

    outcome, reason = verdict_of(stage, request)
    assert (outcome, reason.code) == (Outcome.NEEDS_HUMAN, "capacity_lost")
    assert "fell from 4 to 3" in reason.text


def test_insufficient_capacity_is_reported_in_the_words_of_the_activity() -> None:
    stage, request = checking()
    stage.capacity.fail_launch(GROUP, stage.clock.now(), "InsufficientInstanceCapacity in 1a")

    run.check(stage, request)

    assert "InsufficientInstanceCapacity" in repair_of(stage, request).last_problem
    stage.clock.advance(2700)
    assert run.check(stage, request).next == "close"
    outcome, reason = verdict_of(stage, request)
    assert (outcome, reason.code) == (Outcome.NEEDS_HUMAN, "replacement_missing")
    assert reason.text.startswith("after 2700 s: gpu-a cannot launch: InsufficientInstance")


def test_a_launch_that_failed_before_the_repair_is_no_news() -> None:
    stage, request = checking()
    stage.capacity.fail_launch(GROUP, START.replace(year=2025), "old")

    run.check(stage, request)

    assert "no new instance in service yet" in repair_of(stage, request).last_problem


def test_a_group_that_is_gone_is_said_so() -> None:
    stage, request = checking()
    stage.capacity.remove_group(CLUSTER, GROUP)

    run.check(stage, request)

    assert repair_of(stage, request).last_problem == "replacement_missing: group gpu-a is gone"


@pytest.mark.case("R55")
def test_r55_a_replacement_that_never_offers_its_gpus_needs_a_person() -> None:
    stage, request = checking()
    stage.replace_node(gpu_capacity=0, gpu_allocatable=0)

    waits = 0
    while (result := run.check(stage, request)).next == "wait":
        stage.clock.advance(result.wait_s)
        waits += result.wait_s

    assert waits >= 2700
    outcome, reason = verdict_of(stage, request)
    assert (outcome, reason.code) == (Outcome.NEEDS_HUMAN, "replacement_unhealthy")
    assert "offers 0 of 8 GPUs" in reason.text
    run.close(stage, request)
    assert stage.events("Incident Closed")[0]["remedy"].startswith("The new node is not fit")


def test_a_check_without_a_repair_is_refused() -> None:
    stage, request = checking()
    stage.save(request.incident_id, repair=None)

    with pytest.raises(InvalidInputError, match="was never started"):
        run.check(stage, request)


def test_a_repair_whose_start_was_never_noted_counts_from_its_intention() -> None:
    stage, request = checking()
    repair = replace(repair_of(stage, request), started_at=None)
    stage.save(request.incident_id, repair=repair)
    stage.clock.advance(2700)

    assert run.check(stage, request).next == "close"


def test_the_check_survives_a_crash_at_every_call_and_claims_one_instance() -> None:
    def build() -> tuple[Stage, Callable[[], Any]]:
        stage, request = checking()
        stage.replace_node()
        return stage, lambda: run.check(stage, request)

    def check(stage: Stage, result: Any) -> None:
        assert result.next == "validate"
        assert list(stage.incidents.claims) == [instance_id(9)]

    assert after_every_crash(build, check) >= 6


def test_a_waiting_check_survives_a_crash_at_every_call() -> None:
    def build() -> tuple[Stage, Callable[[], Any]]:
        stage, request = checking()
        return stage, lambda: run.check(stage, request)

    def check(stage: Stage, result: Any) -> None:
        assert result.next == "wait"

    assert after_every_crash(build, check) >= 6


# --- validate_node --------------------------------------------------------------------------------


def test_the_repair_is_proven_when_the_new_node_was_clean_for_the_hold_down() -> None:
    stage, request = validating(hold_down_s=300)

    waits = []
    while (result := run.validate(stage, request)).next == "wait":
        waits.append(result.wait_s)
        stage.clock.advance(result.wait_s)

    assert result.next == "release"
    assert waits == [20, 60, 220]  # never longer than what is left
    event = stage.events("Repair Proven")[0]
    assert (event["rung"], event["gpus"]) == ("replace", 8)
    assert event["replacement"]["instance_id"] == instance_id(9)
    assert stage.incident(request.incident_id).state is IncidentState.RELEASING


def test_without_a_hold_down_one_clean_look_suffices() -> None:
    stage, request = validating(hold_down_s=0)

    assert run.validate(stage, request).next == "release"


@pytest.mark.parametrize("disturbance", ["finding", "unknown", "missing", "unfit"])
def test_whatever_is_not_clean_starts_the_hold_down_anew(disturbance: str) -> None:
    stage, request = validating(hold_down_s=60)
    assert run.validate(stage, request).next == "wait"
    stage.clock.advance(40)
    match disturbance:
        case "finding":
            stage.metrics.answer("xid-count", samples(xid_labels(9, 48, 0)), times=1)
        case "unknown":
            stage.metrics.answer(
                "gpu-lost", QueryResult(problem=Reason("amp_timeout", "422")), times=1
            )
        case "missing":
            stage.metrics.answer("count(count by (UUID", samples({}, value=7), times=5)
        case "unfit":
            stage.cluster.change_node(node_name(9), lambda node: replace(node, gpu_allocatable=7))

    result = run.validate(stage, request)

    assert result.next == "wait"
    repair = repair_of(stage, request)
    assert repair.clean_since is None
    assert repair.last_problem
    stage.cluster.change_node(node_name(9), lambda node: replace(node, gpu_allocatable=8))
    stage.clock.advance(result.wait_s)
    assert run.validate(stage, request).next == "wait"
    assert repair_of(stage, request).clean_since == stage.clock.now()
    stage.clock.advance(60)
    assert run.validate(stage, request).next == "release"


@pytest.mark.parametrize(("code", "outcome"), [(31, "release"), (63, "release"), (79, "wait")])
def test_only_an_actionable_finding_speaks_against_the_new_node(code: int, outcome: str) -> None:
    stage, request = validating(hold_down_s=0)
    stage.metrics.answer("xid-count", samples(xid_labels(9, code, 0), xid_labels(2, 79, 0)))

    assert run.validate(stage, request).next == outcome


@pytest.mark.case("D32")
def test_d32_metrics_that_stay_unknown_end_with_a_person_and_not_with_success() -> None:
    stage, request = validating(deadlines=Deadlines(replace_s=900), hold_down_s=60)
    stage.metrics.fail("amp_timeout")

    while (result := run.validate(stage, request)).next == "wait":
        stage.clock.advance(result.wait_s)

    outcome, reason = verdict_of(stage, request)
    assert (outcome, reason.code) == (Outcome.NEEDS_HUMAN, "metrics_unknown")
    assert "amp_timeout" in reason.text
    assert reason.text.startswith("after 960 s: rule ")


def test_one_lost_answer_at_the_deadline_does_not_decide() -> None:
    stage, request = validating(deadlines=Deadlines(replace_s=900), hold_down_s=60)
    stage.metrics.answer("xid-count", samples(xid_labels(9, 79, 0)))
    assert run.validate(stage, request).next == "wait"
    stage.clock.advance(960)
    stage.metrics.answer("xid-count", QueryResult(problem=Reason("amp_timeout", "lost")), times=1)

    assert run.validate(stage, request).next == "wait"
    assert run.validate(stage, request).next == "close"

    outcome, reason = verdict_of(stage, request)
    assert (outcome, reason.code) == (Outcome.NEEDS_HUMAN, "replacement_unhealthy")


@pytest.mark.parametrize("offered", [0, 2, 56], ids=["mig mixed", "fewer", "time slicing"])
def test_what_nodes_of_the_type_offer_and_how_many_gpus_report_are_two_expectations(
    offered: int,
) -> None:
    stage = Stage(policy=enforce(hold_down_s=0))
    for number in range(1, 5):
        stage.cluster.add_node(gpu_node(number, gpu_capacity=offered, gpu_allocatable=offered))
    request = stage.put(IncidentState.REPAIRING, drain=DRAINED)
    run.start(stage, request)
    stage.replace_node(gpu_capacity=offered, gpu_allocatable=offered)
    assert run.check(stage, request).next == "validate"

    stage.metrics.answer("count(count by (UUID", samples({}, value=7))
    assert run.validate(stage, request).next == "wait"
    assert "7 of 8 GPUs" in repair_of(stage, request).last_problem
    stage.metrics.answer("count(count by (UUID", samples({}, value=8))
    assert run.validate(stage, request).next == "release"


def test_gpus_without_a_uuid_label_are_told_apart_by_their_index() -> None:
    stage, request = validating()

    run.validate(stage, request)

    counting = [asked.query for asked in stage.metrics.asked if "count(count" in asked.query]
    assert all(query.startswith("count(count by (UUID, gpu) ({") for query in counting)


def test_a_count_that_is_no_number_is_no_count() -> None:
    stage, request = validating()
    stage.metrics.answer("count(count by (UUID", samples({}, value=float("nan")))

    assert run.validate(stage, request).next == "wait"
    assert "0 of 8 GPUs" in repair_of(stage, request).last_problem


def test_a_count_that_cannot_be_had_is_unknown() -> None:
    stage, request = validating()
    stage.metrics.fail("amp_throttled", matches="count(count by (UUID")

    assert run.validate(stage, request).next == "wait"
    assert "metrics_unknown" in repair_of(stage, request).last_problem


def test_a_new_node_that_reports_nothing_is_not_proven() -> None:
    stage, request = validating()
    stage.metrics.clear()

    run.validate(stage, request)

    assert "0 of 8 GPUs" in repair_of(stage, request).last_problem


def test_a_rule_that_can_find_no_node_sick_cannot_keep_a_repair_unproven() -> None:
    stage, request = validating(hold_down_s=0)
    stage.metrics.fail(matches="allocated-idle")

    assert run.validate(stage, request).next == "release"
    assert "allocated-idle" not in {asked.key for asked in stage.metrics.asked}


@pytest.mark.parametrize("change", ["gone", "swapped"])
def test_a_replacement_that_is_gone_again_is_not_proven(change: str) -> None:
    stage, request = validating()
    if change == "gone":
        stage.cluster.remove_node(node_name(9))
    else:
        stage.swap_machine(9, 7)

    assert run.validate(stage, request).next == "wait"
    assert "is gone" in repair_of(stage, request).last_problem


def test_gpus_are_counted_in_this_cluster_only() -> None:
    policy = ClusterPolicy(CLUSTER, "ws-1", "eu-central-1", matcher='cluster="gpu-prod"')
    stage, request = validating(clusters=(policy,))

    run.validate(stage, request)

    counting = [asked.query for asked in stage.metrics.asked if "count(count" in asked.query]
    assert len(counting) == 5
    assert all(f'="{node_name(9)}",cluster="gpu-prod"' in query for query in counting)


def test_a_validation_without_a_replacement_is_refused() -> None:
    for repair in (None, "no node"):
        stage, request = validating()
        noted = replace(repair_of(stage, request), replacement_node=None) if repair else None
        stage.save(request.incident_id, repair=noted)

        with pytest.raises(InvalidInputError, match="has no replacement"):
            run.validate(stage, request)


@pytest.mark.parametrize("hold_down_s", [0, 600])
def test_validation_survives_a_crash_at_every_call(hold_down_s: int) -> None:
    def build() -> tuple[Stage, Callable[[], Any]]:
        stage, request = validating(hold_down_s=hold_down_s)
        return stage, lambda: run.validate(stage, request)

    def check(stage: Stage, result: Any) -> None:
        assert result.next == ("wait" if hold_down_s else "release")
        stage.outbox.publish_pending()
        assert times_sent(stage) == ({} if hold_down_s else {"Repair Proven": 1})

    assert after_every_crash(build, check) >= 6


# --- release_node ---------------------------------------------------------------------------------


def releasing(*, was_cordoned: bool = False) -> tuple[Stage, Request]:
    """A stage with an incident whose node is still there and carries its cordon."""
    stage = Stage()
    if was_cordoned:
        stage.cordon_by_hand()
    request = stage.put(IncidentState.CORDONING)
    run.cordon(stage, request)
    stage.save(request.incident_id, state=IncidentState.VALIDATING)
    clear(stage)
    return stage, request


def test_a_node_that_was_replaced_needs_no_release_and_the_outcome_names_both() -> None:
    stage, request = validating(hold_down_s=0)
    run.validate(stage, request)

    assert run.release(stage, request).next == "close"

    outcome, reason = verdict_of(stage, request)
    assert (outcome, reason.code) == (Outcome.REPLACED, "replaced")
    assert node_name(1) in reason.text
    assert instance_id(9) in reason.text
    event = stage.events("Node Released")[0]
    assert event["is_uncordoned"] is False
    assert stage.mutations() == []


def test_a_replaced_node_that_is_still_leaving_takes_no_pods_again() -> None:
    stage, request = releasing()
    new = replace(repair_note(), replacement_node=gpu_node(9).ref)
    stage.save(request.incident_id, repair=new)

    run.release(stage, request)

    assert stage.mutations() == []
    assert stage.node().is_unschedulable
    assert verdict_of(stage, request)[0] is Outcome.REPLACED


def repair_note() -> RepairRecord:
    """A repair that was asked for."""
    return RepairRecord(Rung.REPLACE, GROUP, (), 4, START)


def test_the_cordon_is_taken_off_exactly() -> None:
    stage, request = releasing()

    run.release(stage, request)

    node = stage.node()
    assert not node.is_unschedulable
    assert node.taints == ()
    assert OWNER_ANNOTATION not in node.annotations
    assert SCALE_DOWN_DISABLED_ANNOTATION not in node.annotations
    event = stage.events("Node Released")[0]
    assert (event["is_uncordoned"], event["reason"]["code"]) == (True, "restored")
    assert verdict_of(stage, request)[0] is Outcome.RECOVERED


@pytest.mark.case("R45")
def test_r45a_a_node_that_was_cordoned_before_us_stays_cordoned() -> None:
    stage, request = releasing(was_cordoned=True)

    run.release(stage, request)

    node = stage.node()
    assert node.is_unschedulable
    assert REMEDIATION_TAINT_KEY not in {taint.key for taint in node.taints}
    assert OWNER_ANNOTATION not in node.annotations
    # The event must not claim what is not so.
    event = stage.events("Node Released")[0]
    assert (event["is_uncordoned"], event["reason"]["code"]) == (False, "restored")


@pytest.mark.case("R45")
def test_r45c_the_cordon_is_restored_before_the_slot_is_given_back() -> None:
    stage, request = releasing()

    run.release(stage, request)
    assert not stage.node().is_unschedulable
    assert stage.holds_slot(request.incident_id)
    run.close(stage, request)
    assert not stage.holds_slot(request.incident_id)


def test_the_cordon_of_a_later_incident_is_not_taken_off() -> None:
    stage, request = releasing()
    node = stage.node()
    stage.cluster.patch_node(node.ref.name, cordon_patch(node, plan_ownership(node, "01LATER")))
    clear(stage)

    run.release(stage, request)

    assert stage.mutations() == []
    event = stage.events("Node Released")[0]
    assert (event["is_uncordoned"], event["reason"]["code"]) == (False, "not_cordoned_by_us")


@pytest.mark.parametrize("is_there", [True, False])
def test_a_newcomer_under_the_old_name_is_not_uncordoned(is_there: bool) -> None:
    stage, request = releasing()
    stage.swap_machine()
    if not is_there:
        stage.cluster.remove_node(node_name(1))

    run.release(stage, request)

    assert stage.mutations() == []
    assert stage.events("Node Released")[0]["reason"]["code"] == "node_gone"


def test_a_node_that_never_holds_still_ends_the_release_for_a_retry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage, request = releasing()
    monkeypatch.setattr(stage.cluster, "patch_node", lambda name, patch: False)

    with pytest.raises(ConcurrentUpdateError):
        run.release(stage, request)
    assert stage.holds_slot(request.incident_id)


def test_the_release_survives_a_crash_at_every_call() -> None:
    def build() -> tuple[Stage, Callable[[], Any]]:
        stage, request = releasing()
        return stage, lambda: run.release(stage, request)

    def check(stage: Stage, result: Any) -> None:
        assert result.next == "close"
        assert not stage.node().is_unschedulable
        assert stage.mutations() == [f"patch nodes/{node_name(1)}"]
        stage.outbox.publish_pending()
        assert times_sent(stage) == {"Node Released": 1}
        # Whichever try took it off, the event does not say that the node is gone.
        assert stage.events("Node Released")[0]["is_uncordoned"] is True

    assert after_every_crash(build, check) >= 5


def test_a_plan_past_its_end_is_a_person() -> None:
    stage, request = repairing()
    assert stage.save(request.incident_id, rung_index=5).rung is Rung.HUMAN
