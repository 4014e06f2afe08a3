"""One slice of a drain at a time, told as a timeline."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from nodemend.domain.errors import ClusterForbiddenError
from nodemend.domain.faults import Mode
from nodemend.domain.incidents import DrainRecord, IncidentState, Outcome
from nodemend.domain.nodes import OWNER_ANNOTATION, Readiness
from nodemend.domain.pods import EvictionAnswer, Owner, Toleration
from nodemend.domain.reasons import Reason
from tests.unit.application import run
from tests.unit.application.stage import (
    APF_429,
    FORBIDDEN_403,
    NAMESPACE_403,
    PDB_429,
    TWO_PDBS_500,
    Request,
    Stage,
    after_every_crash,
    budget,
    enforce,
    node_name,
    pod,
    times_sent,
)

GRACE = timedelta(seconds=30)


def draining(*, grace: timedelta = timedelta(), **policy: Any) -> tuple[Stage, Request]:
    """A stage with an incident whose node is cordoned."""
    stage = Stage(policy=enforce(**policy))
    stage.cluster._grace = grace
    request = stage.put(IncidentState.CORDONING)
    run.cordon(stage, request)
    stage.cluster.faults.calls.clear()
    stage.cluster.events.clear()
    stage.bus.accepted.clear()
    return stage, request


def record_of(stage: Stage, request: Request) -> DrainRecord:
    """Return how far the drain has come."""
    drain = stage.incident(request.incident_id).drain
    assert drain is not None
    return drain


def slices_until_done(stage: Stage, request: Request, limit: int = 50) -> list[int]:
    """Drain as the state machine does; return the waits."""
    waits: list[int] = []
    for _ in range(limit):
        result = run.drain(stage, request)
        if result.next != "wait":
            return waits
        waits.append(result.wait_s)
        stage.clock.advance(result.wait_s)
    raise AssertionError("the drain never ends")


def evictions(stage: Stage) -> list[str]:
    """Return the pods that the API was asked to evict, in order."""
    return stage.cluster.faults.targets("evict")


def test_a_node_without_pods_to_move_is_drained_at_once() -> None:
    stage, request = draining()
    stage.cluster.add_pod(pod("dcgm", owner=Owner("DaemonSet", "dcgm", "apps/v1")))
    stage.cluster.add_pod(pod("agent", tolerations=(Toleration(operator="Exists"),)))

    assert run.drain(stage, request).next == "drained"

    assert evictions(stage) == []
    assert stage.incident(request.incident_id).state is IncidentState.REPAIRING
    event = stage.events("Node Drained")[0]
    assert (event["evicted_count"], event["slices"]) == (0, 0)


@pytest.mark.case("R15")
def test_r14_r15_an_accepted_eviction_is_a_promise_until_a_list_shows_the_pod_no_more() -> None:
    stage, request = draining(grace=GRACE)
    stage.cluster.add_pod(pod("train-0"))

    assert run.drain(stage, request).next == "wait"  # accepted, and still running
    stage.clock.advance(20)
    assert run.drain(stage, request).next == "wait"  # terminating
    assert record_of(stage, request).evicted == {"pod-train-0": "ml/train-0"}
    stage.clock.advance(60)
    assert run.drain(stage, request).next == "drained"

    assert evictions(stage) == ["pods/ml/train-0"]
    event = stage.events("Node Drained")[0]
    assert (event["evicted_count"], event["slices"]) == (1, 2)


@pytest.mark.case("R14")
def test_r14_one_pod_that_is_gone_at_once_still_needs_a_list_that_shows_it() -> None:
    stage, request = draining()
    stage.cluster.add_pod(pod("train-0"))

    assert run.drain(stage, request).next == "wait"
    assert run.drain(stage, request).next == "drained"


@pytest.mark.case("R2")
def test_r2_r12_three_429_without_retry_after_then_success_on_the_fourth_slice() -> None:
    stage, request = draining()
    stage.cluster.add_pod(pod("a"))
    stage.cluster.answer_evictions("ml", "a", PDB_429, PDB_429, PDB_429)

    waits = slices_until_done(stage, request)

    assert waits == [20, 60, 300, 300]
    drain = record_of(stage, request)
    assert drain.attempts == {"pod-a": 4}
    assert (drain.slices, drain.is_drained, drain.blocked) == (4, True, {})


@pytest.mark.case("R1")
def test_r1_two_budgets_on_one_pod_are_named_while_the_other_pods_are_evicted() -> None:
    stage, request = draining()
    stage.cluster.add_pod(pod("a", labels={"app": "a", "team": "ml"}))
    stage.cluster.add_pod(pod("b", labels={"app": "b"}))
    stage.cluster.add_budget(budget("pdb-x", match_labels={"app": "a"}))
    stage.cluster.add_budget(budget("pdb-y", match_labels={"team": "ml"}))
    stage.cluster.answer_evictions("ml", "a", *[TWO_PDBS_500] * 50)

    run.drain(stage, request)

    assert evictions(stage) == ["pods/ml/a", "pods/ml/b"]
    event = stage.events("Drain Progress")[0]
    assert event["reason"]["code"] == "blocked_by_multiple_pdbs"
    assert event["blocked"][0] == {
        "pod": "ml/a",
        "verdict": "blocked_by_multiple_pdbs",
        "cause": TWO_PDBS_500.message,
        "budgets": ["pdb-x", "pdb-y"],
        "can_never_allow": True,
    }

    stage.clock.advance(20)
    slices_until_done(stage, request)

    result = run.close(stage, request)
    assert result.outcome == "NEEDS_HUMAN"
    assert result.reason.startswith("blocked_by_multiple_pdbs: after 1800 s still ml/a")
    assert "pdb-x, pdb-y" in result.reason
    assert "Two PodDisruptionBudgets" in stage.events("Incident Closed")[0]["remedy"]
    assert stage.node().is_unschedulable


def test_the_block_that_never_ends_is_the_one_that_the_reason_names() -> None:
    stage, request = draining()
    stage.cluster.add_pod(pod("a"))
    stage.cluster.add_pod(pod("z"))
    stage.cluster.answer_evictions("ml", "a", PDB_429)
    stage.cluster.answer_evictions("ml", "z", TWO_PDBS_500)

    run.drain(stage, request)

    reason = stage.events("Drain Progress")[0]["reason"]
    assert reason["code"] == "blocked_by_multiple_pdbs"
    assert reason["text"].startswith("ml/z and 1 more: This pod has more than one")


@pytest.mark.case("R3")
def test_r3_a_budget_that_can_never_allow_is_named_at_first_sight() -> None:
    stage, request = draining()
    stage.cluster.add_pod(pod("a"))
    stage.cluster.add_budget(budget("pdb-a"))
    stage.cluster.answer_evictions("ml", "a", *[PDB_429] * 50)

    run.drain(stage, request)

    event = stage.events("Drain Progress")[0]
    assert event["blocked"][0]["can_never_allow"] is True
    assert event["blocked"][0]["budgets"] == ["pdb-a"]
    assert "it can never allow an eviction" in event["reason"]["text"]
    assert "needs 1 healthy pods and has 1 currently" in event["reason"]["text"]

    stage.clock.advance(20)
    slices_until_done(stage, request)
    incident = stage.incident(request.incident_id)
    assert incident.verdict is not None
    assert (incident.verdict[0], incident.verdict[1].code) == (
        Outcome.NEEDS_HUMAN,
        "blocked_by_pdb",
    )
    run.close(stage, request)
    assert stage.node().is_unschedulable
    assert "PodDisruptionBudget" in stage.events("Incident Closed")[0]["remedy"]


@pytest.mark.case("R3")
def test_r3_a_budget_with_room_later_is_not_called_hopeless() -> None:
    stage, request = draining()
    stage.cluster.add_pod(pod("a"))
    stage.cluster.add_budget(budget(expected_pods=3, current_healthy=2, desired_healthy=2))
    stage.cluster.answer_evictions("ml", "a", PDB_429)

    run.drain(stage, request)

    assert stage.events("Drain Progress")[0]["blocked"][0]["can_never_allow"] is False


@pytest.mark.case("R6")
def test_r6_a_pod_that_was_replaced_on_another_node_is_never_touched() -> None:
    stage, request = draining()
    stage.cluster.add_pod(pod("web-0"))
    stage.cluster.answer_evictions("ml", "web-0", PDB_429)
    run.drain(stage, request)
    stage.clock.advance(20)
    original = stage.cluster.list_pods

    def list_pods(name: str) -> Any:
        found = original(name)
        # Between list and eviction somebody else moves it.
        stage.cluster.add_pod(pod("web-0", number=2, uid="pod-web-0-new"))
        return found

    stage.cluster.list_pods = list_pods  # type: ignore[assignment, method-assign]
    stage.cluster.faults.calls.clear()
    assert run.drain(stage, request).next == "wait"
    assert evictions(stage) == []
    assert record_of(stage, request).gone == 1
    assert run.drain(stage, request).next == "drained"
    assert stage.cluster.get_pod("ml", "web-0") is not None


@pytest.mark.parametrize(
    "answer",
    [
        EvictionAnswer(404, 'pods "a" not found', details_kind="pods"),
        EvictionAnswer(409, "the UID in the precondition does not match"),
    ],
)
def test_a_pod_that_went_in_the_meantime_counts_as_gone(answer: EvictionAnswer) -> None:
    stage, request = draining()
    stage.cluster.add_pod(pod("a"))
    stage.cluster.answer_evictions("ml", "a", answer)

    run.drain(stage, request)

    assert record_of(stage, request).gone == 1


@pytest.mark.case("R7")
def test_r7_a_finished_pod_without_owner_is_evicted_and_blocks_nothing() -> None:
    stage, request = draining()
    stage.cluster.add_pod(pod("job-x", phase="Succeeded", owner=None))
    stage.cluster.add_budget(budget())

    assert slices_until_done(stage, request) == [20]
    assert stage.events("Drain Progress") == []


@pytest.mark.case("R8")
def test_r8_ten_slices_with_one_and_the_same_block_are_one_event() -> None:
    stage, request = draining()
    stage.cluster.add_pod(pod("a"))
    stage.cluster.add_budget(budget())
    for _ in range(10):
        stage.cluster.answer_evictions("ml", "a", PDB_429)
        run.drain(stage, request)

    assert len(stage.events("Drain Progress")) == 1
    assert record_of(stage, request).attempts == {"pod-a": 10}


@pytest.mark.case("R8")
def test_r8_another_block_is_news_and_a_count_in_the_servers_words_is_none() -> None:
    stage, request = draining()
    stage.cluster.add_pod(pod("a"))
    stage.cluster.add_budget(budget())
    other_count = replace(PDB_429, causes=(("DisruptionBudget", "needs 1 and has 0 currently"),))
    stage.cluster.answer_evictions("ml", "a", PDB_429, other_count, TWO_PDBS_500)

    for _ in range(3):
        run.drain(stage, request)

    codes = [event["reason"]["code"] for event in stage.events("Drain Progress")]
    assert codes == ["blocked_by_pdb", "blocked_by_multiple_pdbs"]


@pytest.mark.case("R8")
@pytest.mark.parametrize("hiccup", [APF_429, EvictionAnswer(500, "etcd"), EvictionAnswer(0)])
def test_r8_a_hiccup_of_the_api_does_not_make_the_old_block_news_again(
    hiccup: EvictionAnswer,
) -> None:
    stage, request = draining()
    stage.cluster.add_pod(pod("a"))
    stage.cluster.add_pod(pod("b"))
    stage.cluster.answer_evictions("ml", "a", PDB_429, hiccup, PDB_429)
    stage.cluster.answer_evictions("ml", "b", PDB_429, PDB_429, PDB_429)

    for _ in range(3):
        run.drain(stage, request)

    assert len(stage.events("Drain Progress")) == 1


def test_a_block_that_went_and_came_back_is_news() -> None:
    stage, request = draining()
    stage.cluster.add_pod(pod("a"))
    stage.cluster.answer_evictions("ml", "a", PDB_429)
    run.drain(stage, request)
    run.drain(stage, request)  # evicted
    stage.cluster.add_pod(pod("a", uid="pod-a-2"))  # a bare pod that tolerates nothing is back
    stage.cluster.answer_evictions("ml", "a", PDB_429)
    run.drain(stage, request)

    assert len(stage.events("Drain Progress")) == 2


def test_a_throttled_slice_ends_and_the_next_goes_on() -> None:
    stage, request = draining()
    stage.cluster.add_pod(pod("a"))
    stage.cluster.add_pod(pod("b"))
    stage.cluster.answer_evictions("ml", "a", APF_429)

    assert run.drain(stage, request).next == "wait"
    assert evictions(stage) == ["pods/ml/a"]
    assert slices_until_done(stage, request) == [60]


def test_a_slice_stops_after_ten_seconds_and_leaves_the_rest_to_the_next() -> None:
    stage, request = draining()
    for name in "abcdef":
        stage.cluster.add_pod(pod(name))
    original = stage.cluster.evict

    def slow(one: Any) -> EvictionAnswer:
        stage.clock.advance(4)
        return original(one)

    stage.cluster.evict = slow  # type: ignore[assignment, method-assign]

    run.drain(stage, request)

    assert evictions(stage) == ["pods/ml/a", "pods/ml/b", "pods/ml/c"]
    slices_until_done(stage, request)
    assert len(evictions(stage)) == 6


@pytest.mark.case("R16")
def test_r16_a_namespace_that_ends_is_waited_for() -> None:
    stage, request = draining()
    stage.cluster.add_pod(pod("a"))
    stage.cluster.answer_evictions("ml", "a", NAMESPACE_403, NAMESPACE_403)

    assert run.drain(stage, request).next == "wait"
    assert run.drain(stage, request).next == "wait"
    stage.cluster.remove_pod("ml", "a")
    assert run.drain(stage, request).next == "drained"
    assert [e["reason"]["code"] for e in stage.events("Drain Progress")] == [
        "namespace_terminating"
    ]


@pytest.mark.case("R16")
def test_r16_a_403_without_that_cause_stops_with_the_slices_progress_stored() -> None:
    stage, request = draining()
    stage.cluster.add_pod(pod("0"))
    stage.cluster.add_pod(pod("a"))
    stage.cluster.add_pod(pod("z"))
    stage.cluster.answer_evictions("ml", "a", FORBIDDEN_403)

    with pytest.raises(ClusterForbiddenError, match="cannot create resource"):
        run.drain(stage, request)

    assert evictions(stage) == ["pods/ml/0", "pods/ml/a"]
    assert record_of(stage, request).evicted == {"pod-0": "ml/0"}
    run.escalate(stage, request, "ClusterForbiddenError", '{"errorMessage": "cannot create"}')
    result = run.close(stage, request)
    assert (result.outcome, result.reason) == ("NEEDS_HUMAN", "cluster_forbidden: cannot create")


def test_a_403_without_words_still_names_the_pod() -> None:
    stage, request = draining()
    stage.cluster.add_pod(pod("a"))
    stage.cluster.answer_evictions("ml", "a", EvictionAnswer(403))

    with pytest.raises(ClusterForbiddenError, match="eviction of ml/a is forbidden"):
        run.drain(stage, request)


@pytest.mark.case("R10")
def test_r10_pods_of_an_unreachable_node_past_their_grace_do_not_block() -> None:
    stage, request = draining()
    silence(stage)
    past = stage.clock.now() - timedelta(minutes=5)
    for name in ("a", "b"):
        stage.cluster.add_pod(pod(name, deletion_at=past))
        stage.cluster.stuck.add(f"ml/{name}")

    assert run.drain(stage, request).next == "drained"
    assert stage.events("Node Drained")[0]["drained_unconfirmed"] == ["ml/a", "ml/b"]
    assert record_of(stage, request).unconfirmed == ("ml/a", "ml/b")


@pytest.mark.case("R10")
def test_r10_running_pods_of_an_unreachable_node_are_evicted_first() -> None:
    stage, request = draining(grace=GRACE)
    silence(stage)
    stage.cluster.add_pod(pod("a"))
    stage.cluster.stuck.add("ml/a")

    assert slices_until_done(stage, request) == [20, 60]
    assert stage.events("Node Drained")[0]["drained_unconfirmed"] == ["ml/a"]


def silence(stage: Stage) -> None:
    """Let nobody hear from the node's kubelet."""
    stage.cluster.change_node(node_name(1), lambda node: replace(node, readiness=Readiness.UNKNOWN))


@pytest.mark.case("R10")
def test_r10_the_same_pods_on_a_ready_node_are_waited_for_to_the_deadline() -> None:
    stage, request = draining()
    past = stage.clock.now() - timedelta(minutes=5)
    for name in ("a", "b"):
        stage.cluster.add_pod(pod(name, deletion_at=past))
        stage.cluster.stuck.add(f"ml/{name}")

    waits = slices_until_done(stage, request)

    assert sum(waits) >= 1800
    verdict = stage.incident(request.incident_id).verdict
    assert verdict is not None
    assert (verdict[0], verdict[1].code) == (Outcome.NEEDS_HUMAN, "drain_deadline")
    assert evictions(stage) == []


def test_a_last_slice_without_clear_answers_still_says_what_holds_the_pods() -> None:
    stage, request = draining()
    stage.cluster.add_pod(pod("a"))
    stage.cluster.add_budget(budget())
    stage.cluster.answer_evictions("ml", "a", PDB_429, APF_429)
    assert run.drain(stage, request).next == "wait"
    stage.clock.advance(1800)

    assert run.drain(stage, request).next == "close"

    verdict = stage.incident(request.incident_id).verdict
    assert verdict is not None
    assert verdict[1] == Reason("blocked_by_pdb", "after 1800 s still ml/a: blocked_by_pdb pdb-a")


@pytest.mark.case("R40")
def test_r40_a_node_that_a_person_uncordoned_is_left_alone() -> None:
    stage, request = draining()
    stage.cluster.add_pod(pod("a"))
    run.drain(stage, request)
    stage.uncordon_by_hand()
    stage.cluster.faults.calls.clear()
    stage.cluster.add_pod(pod("b"))

    assert run.drain(stage, request).next == "close"

    # No eviction and no new cordon: only the rest of ours is taken off.
    assert stage.mutations() == [f"patch nodes/{node_name(1)}"]
    node = stage.node()
    assert not node.is_unschedulable
    assert node.taints == ()
    assert OWNER_ANNOTATION not in node.annotations
    result = run.close(stage, request)
    assert (result.outcome, result.reason.split(":")[0]) == ("ABORTED_BY_OPERATOR", "uncordoned")
    # A hold: the same fault does not open the node's next incident at once.
    assert run.open_for(stage, *stage.incident(request.incident_id).findings) is None


def test_giving_way_to_a_person_survives_a_crash_at_every_call() -> None:
    def build() -> tuple[Stage, Callable[[], Any]]:
        stage, request = draining()
        stage.uncordon_by_hand()
        return stage, lambda: run.drain(stage, request)

    def check(stage: Stage, result: Any) -> None:
        assert result.next == "close"
        assert not stage.node().is_unschedulable
        assert OWNER_ANNOTATION not in stage.node().annotations

    assert after_every_crash(build, check) >= 5


def test_in_a_dry_run_the_drain_is_told_and_nothing_is_evicted() -> None:
    stage, request = draining(mode=Mode.DRY_RUN)
    stage.cluster.add_pod(pod("a", labels={"app": "a"}))
    stage.cluster.add_pod(pod("b", labels={"app": "b"}))
    stage.cluster.add_pod(pod("free", labels={}))
    stage.cluster.add_pod(pod("done", phase="Succeeded", labels={"app": "a"}))
    stage.cluster.add_budget(budget("pdb-a", match_labels={"app": "a"}))
    stage.cluster.add_budget(budget("b-1", match_labels={"app": "b"}, disruptions_allowed=1))
    stage.cluster.add_budget(budget("b-2", match_labels={"app": "b"}, disruptions_allowed=1))

    assert run.drain(stage, request).next == "drained"

    assert stage.mutations() == []
    event = stage.events("Node Drained")[0]
    assert event["would_evict"] == ["ml/a", "ml/b", "ml/done", "ml/free"]
    blocks: Mapping[str, Any] = {block["pod"]: block for block in event["blocked"]}
    # No budget protects a finished pod.
    assert set(blocks) == {"ml/a", "ml/b"}
    assert blocks["ml/a"]["verdict"] == "blocked_by_pdb"
    assert blocks["ml/a"]["can_never_allow"] is True
    assert blocks["ml/a"]["cause"] == "budget pdb-a allows 0 disruptions now"
    # Two budgets with room are still one too many for the eviction API.
    assert blocks["ml/b"]["verdict"] == "blocked_by_multiple_pdbs"
    assert blocks["ml/b"]["budgets"] == ["b-1", "b-2"]


def test_a_slice_survives_a_crash_at_every_call() -> None:
    def build() -> tuple[Stage, Callable[[], Any]]:
        stage, request = draining()
        stage.cluster.add_pod(pod("a"))
        stage.cluster.add_pod(pod("blocked"))
        stage.cluster.answer_evictions("ml", "blocked", PDB_429, PDB_429)
        return stage, lambda: run.drain(stage, request)

    def check(stage: Stage, result: Any) -> None:
        assert result.next == "wait"
        assert evictions(stage).count("pods/ml/a") == 1
        stage.outbox.publish_pending()
        assert times_sent(stage) == {"Drain Progress": 1}

    assert after_every_crash(build, check) >= 12


@pytest.mark.parametrize("mode", [Mode.ENFORCE, Mode.DRY_RUN])
def test_the_end_of_a_drain_survives_a_crash_at_every_call(mode: Mode) -> None:
    def build() -> tuple[Stage, Callable[[], Any]]:
        stage, request = draining(mode=mode)
        return stage, lambda: run.drain(stage, request)

    def check(stage: Stage, result: Any) -> None:
        assert result.next == "drained"
        assert stage.mutations() == []
        stage.outbox.publish_pending()
        assert times_sent(stage) == {"Node Drained": 1}

    assert after_every_crash(build, check) >= 4
