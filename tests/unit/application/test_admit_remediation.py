"""The first step: whose execution is this, and does it hold a slot?"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nodemend.domain.errors import (
    AwsUnavailableError,
    ClusterForbiddenError,
    ClusterUnavailableError,
    InvalidInputError,
    LeaseLostError,
    SupersededError,
)
from nodemend.domain.faults import FaultClass, Mode, Rung, Verdict
from nodemend.domain.guard import release
from nodemend.domain.incidents import IncidentState, Outcome
from nodemend.domain.policy import Limits, MaxUnavailable
from nodemend.domain.remedies import REMEDIES
from tests.fakes.system import START
from tests.unit.application import run
from tests.unit.application.run import BY_HAND, HAND
from tests.unit.application.stage import (
    CLUSTER,
    CLUSTER_POLICY,
    GROUP,
    Request,
    Stage,
    after_every_crash,
    enforce,
    node_name,
    times_sent,
    xid_finding,
)


def test_an_admitted_incident_is_taken_up_once() -> None:
    stage = Stage()
    request = stage.admit()
    stage.clock.advance(3)

    assert run.admit(stage, request).next == "verify"
    incident = stage.incident(request.incident_id)
    assert incident.state is IncidentState.VERIFYING
    assert incident.execution_arn == request.arn
    assert incident.verify_since == stage.clock.now()

    stage.clock.advance(60)
    assert run.admit(stage, request).next == "verify"  # a retry
    assert stage.incident(request.incident_id) == incident


def test_an_unknown_incident_is_refused_with_the_way_by_hand() -> None:
    with pytest.raises(InvalidInputError, match=r"incident_id: 01NOBODY is unknown.*requested_by"):
        run.admit(Stage(), Request("01NOBODY", "arn"))


def test_an_execution_of_another_name_does_not_own_the_incident() -> None:
    stage = Stage()
    request = stage.admit()
    copy = Request("copy-1", "arn:copy")
    document = {"schema_version": 1, "incident_id": request.incident_id}

    with pytest.raises(SupersededError, match="this one is copy-1"):
        run.admit(stage, copy, document)


def test_a_second_execution_does_not_own_an_incident_that_has_begun() -> None:
    stage = Stage()
    request = stage.admit()
    run.admit(stage, request)

    with pytest.raises(SupersededError, match="belongs to execution"):
        run.admit(stage, Request(request.incident_id, "arn:redrive"))


def test_an_incident_whose_slot_is_gone_is_not_begun() -> None:
    stage = Stage()
    request = stage.admit()
    stage.guards.store(release(stage.guards.load(CLUSTER), request.incident_id))

    with pytest.raises(LeaseLostError, match="holds no slot"):
        run.admit(stage, request)
    assert stage.incident(request.incident_id).state is IncidentState.ADMITTED


def test_an_incident_whose_end_is_decided_goes_to_the_close() -> None:
    stage = Stage()
    request = stage.admit()
    run.admit(stage, request)
    run.escalate(stage, request)

    assert run.admit(stage, request).next == "close"


def test_by_hand_the_person_is_recorded_and_the_slot_taken() -> None:
    stage = Stage()

    assert run.admit(stage, BY_HAND, HAND).next == "verify"

    incident = stage.incident("hand-1")
    assert incident.state is IncidentState.VERIFYING
    assert incident.fault_class is FaultClass.MANUAL
    assert incident.fault_text == "requested by alice: the job said so"
    assert incident.execution_arn == BY_HAND.arn
    assert (incident.mode, incident.plan) == (Mode.ENFORCE, (Rung.REPLACE, Rung.HUMAN))
    assert (incident.group, incident.expected_gpus) == (GROUP, 8)
    assert incident.cluster_policy == CLUSTER_POLICY
    assert stage.holds_slot("hand-1")
    assert [event["requested_by"] for event in stage.events("Incident Opened")] == ["alice"]
    assert [event["dry_run"] for event in stage.events("Incident Opened")] == [False]
    assert len(stage.events("Incident Admitted")) == 1
    assert stage.executions.started == []  # the execution is there already: it asks


def test_by_hand_an_unknown_cluster_is_named_with_the_known_ones() -> None:
    with pytest.raises(InvalidInputError, match=r"cluster: 'other' is not in the policy.*gpu-prod"):
        run.admit(Stage(), BY_HAND, {**HAND, "cluster": "other"})


def test_by_hand_without_any_cluster_in_the_policy_says_so() -> None:
    with pytest.raises(InvalidInputError, match=r"use one of \(none\)"):
        run.admit(Stage(policy=enforce(clusters=())), BY_HAND, HAND)


def test_by_hand_an_unknown_node_is_named_and_nothing_is_recorded() -> None:
    stage = Stage()

    with pytest.raises(InvalidInputError, match=r"has no node 'nobody'.*kubectl get nodes"):
        run.admit(stage, BY_HAND, {**HAND, "node": "nobody"})
    assert stage.incidents.records == {}


def test_by_hand_a_name_that_cannot_be_an_id_is_refused_before_anything_is_taken() -> None:
    stage = Stage()

    with pytest.raises(InvalidInputError, match=r"execution name: 'my.run'.*letters, digits"):
        run.admit(stage, Request("my.run", "arn"), HAND)
    assert stage.incidents.records == {}
    assert not stage.holds_slot("my.run")


def test_by_hand_the_id_of_a_scans_incident_is_another_execution() -> None:
    stage = Stage()
    known = stage.wait(2)

    with pytest.raises(SupersededError, match="a scan opened"):
        run.admit(stage, stage.request(known), HAND)


def test_by_hand_a_node_that_has_an_incident_is_rejected_with_its_name() -> None:
    stage = Stage()
    other = stage.wait()

    assert run.admit(stage, BY_HAND, HAND).next == "close"

    result = run.close(stage, BY_HAND)
    assert (result.outcome, result.is_owner) == ("SKIPPED", True)
    assert f"already_open: incident {other} is open" in result.reason
    assert len(stage.events("Incident Rejected")) == 1
    assert stage.incidents.open_by_node[CLUSTER, "uid-1"] == other
    assert stage.mutations() == []


def test_by_hand_a_record_that_was_not_stored_leaves_no_pointer_on_the_node() -> None:
    stage = Stage()
    original = stage.incidents.create

    def create(_: Any) -> bool:
        raise AwsUnavailableError("throttled")

    stage.incidents.create = create  # type: ignore[assignment, method-assign]
    with pytest.raises(AwsUnavailableError):
        run.admit(stage, BY_HAND, HAND)

    assert stage.incidents.open_by_node == {}
    stage.incidents.create = original  # type: ignore[method-assign]
    assert run.open_for(stage, xid_finding()) is not None


def test_by_hand_the_persons_word_decides_whatever_a_scan_attaches_before_the_slot() -> None:
    stage = Stage()
    stage.cluster.faults.fail("list", ClusterUnavailableError("timed out"), target="nodes")
    with pytest.raises(ClusterUnavailableError):
        run.admit(stage, BY_HAND, HAND)
    suspicion = xid_finding(code=63, verdict=Verdict.SUSPECT)
    assert run.open_for(stage, suspicion) == "hand-1"

    assert run.admit(stage, BY_HAND, HAND).next == "verify"

    incident = stage.incident("hand-1")
    assert len(incident.findings) == 1
    assert (incident.fault_class, incident.plan) == (
        FaultClass.MANUAL,
        (Rung.REPLACE, Rung.HUMAN),
    )


def test_by_hand_the_pointer_of_a_closed_incident_stands_in_nobodys_way() -> None:
    stage = Stage()
    old = stage.admit()
    run.admit(stage, old)
    run.escalate(stage, old)
    run.close(stage, old)
    # The close died after the record and before the pointer.
    stage.incidents.open_by_node[CLUSTER, "uid-1"] = old.incident_id

    assert run.admit(stage, BY_HAND, HAND).next == "verify"
    assert stage.incidents.open_by_node[CLUSTER, "uid-1"] == "hand-1"


def test_by_hand_without_room_the_limit_is_named_and_the_incident_ends() -> None:
    stage = Stage(policy=enforce(limits=Limits(MaxUnavailable(1, 100))))
    stage.cordon_by_hand(2)

    assert run.admit(stage, BY_HAND, HAND).next == "close"
    result = run.close(stage, BY_HAND)

    assert result.outcome == "SKIPPED"
    assert "capacity_guard: 1 of at most 1 nodes" in result.reason
    assert not stage.holds_slot("hand-1")
    assert stage.mutations() == []


def test_by_hand_limits_and_exclusion_bind_a_person_too() -> None:
    stage = Stage(policy=enforce(exclude=(node_name(1),)))

    assert run.admit(stage, BY_HAND, HAND).next == "close"
    assert "excluded" in run.close(stage, BY_HAND).reason


def test_by_hand_the_start_up_grace_does_not_bind_a_person() -> None:
    stage = Stage()
    stage.cluster.change_node(node_name(1), lambda node: replace(node, created_at=START))

    assert run.admit(stage, BY_HAND, HAND).next == "verify"


def test_by_hand_a_dispatcher_keeps_off_an_incident_that_takes_its_own_slot() -> None:
    stage = Stage()
    original = stage.guards.store

    def store(guard: Any) -> bool:
        stage.guards.store = original  # type: ignore[method-assign]
        stored = original(guard)
        stage.dispatch_all()  # its tick finds the waiter, which holds its slot already
        return stored

    stage.guards.store = store  # type: ignore[method-assign]

    assert run.admit(stage, BY_HAND, HAND).next == "verify"
    assert len(stage.guards.load(CLUSTER).slots) == 1
    assert len(stage.guards.load(CLUSTER).replacements) == 1
    assert len(stage.events("Incident Admitted")) == 1


def test_by_hand_a_rejected_incident_is_never_admitted_by_the_dispatcher() -> None:
    stage = Stage(policy=enforce(limits=Limits(MaxUnavailable(1, 100))))
    stage.cordon_by_hand(2)
    run.admit(stage, BY_HAND, HAND)
    stage.uncordon_by_hand(2)  # room again, before the close

    stage.dispatch_all()

    assert stage.incident("hand-1").state is IncidentState.WAITING
    assert not stage.holds_slot("hand-1")
    assert stage.events("Incident Admitted") == []


def test_by_hand_what_fails_after_the_opening_keeps_its_own_reason() -> None:
    stage = Stage()
    stage.cluster.faults.fail("list", ClusterForbiddenError("cannot list nodes"), target="nodes")
    with pytest.raises(ClusterForbiddenError):
        run.admit(stage, BY_HAND, HAND)

    run.escalate(stage, BY_HAND, "ClusterForbiddenError", '{"errorMessage": "cannot list nodes"}')
    result = run.close(stage, BY_HAND)

    assert result.outcome == "NEEDS_HUMAN"
    assert result.reason == "cluster_forbidden: cannot list nodes"
    assert stage.events("Incident Closed")[0]["remedy"] == REMEDIES["cluster_forbidden"]


def test_by_hand_a_node_without_gpus_is_no_candidate() -> None:
    stage = Stage()
    stage.cluster.change_node(
        node_name(1),
        lambda node: replace(node, gpu_capacity=0, gpu_allocatable=0, labels={}),
    )

    assert run.admit(stage, BY_HAND, HAND).next == "close"
    assert "no GPU node" in run.close(stage, BY_HAND).reason


def test_by_hand_a_lost_create_takes_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    original = stage.incidents.create

    def create_twice(incident: Any) -> bool:
        original(incident)
        return original(incident)  # the first answer was lost, and the SDK asked again

    monkeypatch.setattr(stage.incidents, "create", create_twice)

    assert run.admit(stage, BY_HAND, HAND).next == "verify"
    stage.outbox.publish_pending()
    assert len(stage.events("Incident Opened")) == 1


def test_by_hand_again_after_the_close_is_superseded() -> None:
    stage = Stage()
    run.admit(stage, BY_HAND, HAND)
    run.escalate(stage, BY_HAND)
    run.close(stage, BY_HAND)

    with pytest.raises(SupersededError, match="closed already"):
        run.admit(stage, BY_HAND, HAND)


def test_a_cluster_that_cannot_be_reached_is_tried_again() -> None:
    stage = Stage()
    stage.cluster.faults.fail("get", ClusterUnavailableError("timed out"))

    with pytest.raises(ClusterUnavailableError):
        run.admit(stage, BY_HAND, HAND)
    assert run.admit(stage, BY_HAND, HAND).next == "verify"


def test_admission_by_hand_survives_a_crash_at_every_call() -> None:
    def build() -> tuple[Stage, Callable[[], Any]]:
        stage = Stage()
        return stage, lambda: run.admit(stage, BY_HAND, HAND)

    def check(stage: Stage, result: Any) -> None:
        assert result.next == "verify"
        assert stage.incident("hand-1").state is IncidentState.VERIFYING
        guard = stage.guards.load(CLUSTER)
        assert [slot.incident_id for slot in guard.slots.values()] == ["hand-1"]
        assert len(guard.replacements) == 1
        stage.outbox.publish_pending()
        assert times_sent(stage) == {"Incident Opened": 1, "Incident Admitted": 1}

    assert after_every_crash(build, check) >= 12


def test_a_rejection_by_hand_survives_a_crash_at_every_call() -> None:
    def build() -> tuple[Stage, Callable[[], Any]]:
        stage = Stage()
        stage.wait()
        return stage, lambda: run.admit(stage, BY_HAND, HAND)

    def check(stage: Stage, result: Any) -> None:
        assert result.next == "close"
        assert run.close(stage, BY_HAND).outcome == Outcome.SKIPPED
        sent = times_sent(stage)
        assert (sent["Incident Rejected"], sent["Incident Closed"]) == (1, 1)

    after_every_crash(build, check)


def test_taking_up_survives_a_crash_at_every_call() -> None:
    def build() -> tuple[Stage, Callable[[], Any]]:
        stage = Stage()
        request = stage.admit()
        return stage, lambda: run.admit(stage, request)

    def check(stage: Stage, result: Any) -> None:
        assert result.next == "verify"

    assert after_every_crash(build, check) == 3
