"""Whole remediations in the order of the state machine's own definition."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nodemend.application.ports import QueryResult
from nodemend.domain.errors import (
    AwsUnavailableError,
    ClusterForbiddenError,
    ClusterUnavailableError,
    RepairRefusedError,
)
from nodemend.domain.faults import Family, Mode
from nodemend.domain.findings import Finding
from nodemend.domain.incidents import Incident, IncidentState, Outcome
from nodemend.domain.nodes import OWNER_ANNOTATION, Readiness
from nodemend.domain.remedies import REMEDIES
from tests.unit.application import run
from tests.unit.application.machine import FUNCTIONS, Machine, definition
from tests.unit.application.run import HAND
from tests.unit.application.stage import (
    CLUSTER,
    FORBIDDEN_403,
    GROUP,
    PDB_429,
    Stage,
    after_every_crash,
    budget,
    enforce,
    instance_id,
    node_name,
    pod,
    samples,
    temperature_finding,
    times_sent,
    words,
    xid_finding,
    xid_labels,
)

XID_79 = samples(xid_labels(1, 79, 3))
HAPPY_WAY = [
    "AdmitRemediation",
    "VerifyFault",
    "CordonNode",
    "DrainNode",
    "StartRepair",
    "CheckRepair",
    "ValidateNode",
    "ReleaseNode",
    "CloseIncident",
]


def sick(*findings: Finding, pods: int = 2, **policy: Any) -> tuple[Stage, str]:
    """A stage on which a scan's finding was opened and admitted; the incident's id."""
    stage = Stage(policy=enforce(**policy))
    for number in range(pods):
        stage.cluster.add_pod(pod(f"train-{number}"))
    stage.metrics.answer("xid-count", XID_79)
    incident_id = run.open_for(stage, *(findings or (xid_finding(),)))
    assert incident_id is not None
    stage.dispatch_all(incident_id)
    assert stage.executions.started == [incident_id]
    return stage, incident_id


def new_node(stage: Stage, **changes: Any) -> Callable[[], None]:
    """Let the group bring a new node; the old one's metrics end with it."""

    def arrive() -> None:
        stage.metrics.clear()
        stage.replace_node(**changes)

    return arrive


def tasks(machine: Machine) -> list[str]:
    """Return the tasks in order, each once where it was repeated."""
    names = [name for name in machine.visited if name in FUNCTIONS]
    return [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]


def end_of(stage: Stage, incident_id: str) -> Incident:
    """Return the closed incident, and assert what holds for every end."""
    incident = stage.incident(incident_id)
    assert incident.is_closed
    assert stage.guards.load(CLUSTER).slots == {}
    assert stage.incidents.open_by_node == {}
    assert stage.outbox.publish_pending() == (0, 0)
    assert len(stage.events("Incident Closed")) == 1
    return incident


def needs_human(stage: Stage, incident_id: str, code: str) -> Incident:
    """Assert that a person is called, and told what to do; return the incident."""
    incident = end_of(stage, incident_id)
    assert incident.outcome is Outcome.NEEDS_HUMAN
    assert incident.reason is not None
    assert incident.reason.code == code
    closed = stage.events("Incident Closed")[0]
    assert closed["remedy"] == REMEDIES[code]
    assert len(stage.events("Incident Escalated")) == 1
    return incident


def test_the_driver_knows_every_function_of_the_definition() -> None:
    states = definition()["States"]
    named = {
        state["Parameters"]["FunctionName"] for state in states.values() if state["Type"] == "Task"
    }
    assert named == {"${" + name + "FunctionArn}" for name in FUNCTIONS}


def test_replaced() -> None:
    stage, incident_id = sick()
    machine = Machine(stage, [(200, new_node(stage))])

    machine.run(incident_id)

    assert tasks(machine) == HAPPY_WAY
    incident = end_of(stage, incident_id)
    assert incident.outcome is Outcome.REPLACED
    assert stage.mutations() == [
        f"patch nodes/{node_name(1)}",
        "evict pods/ml/train-0",
        "evict pods/ml/train-1",
        f"terminate {instance_id(1)}",
    ]
    assert words(incident.timeline) == [
        "open_incident: Incident Opened",
        "dispatch_incidents: Incident Admitted",
        "verify_fault: Fault Verified",
        "cordon_node: Node Cordoned",
        "drain_node: Node Drained",
        "start_repair: Repair Started",
        "validate_node: Repair Proven",
        "release_node: Node Released",
        "close_incident: Incident Closed",
    ]
    assert stage.bus.detail_types == [line.split(": ")[1] for line in words(incident.timeline)]
    assert {one.detail["dry_run"] for one in stage.bus.accepted} == {False}
    ids = [one.event_id for one in stage.bus.accepted]
    assert ids == [f"{incident_id}-{number:04d}" for number in range(1, 10)]
    assert stage.events("Incident Closed")[0]["replacement"]["instance_id"] == instance_id(9)
    assert not stage.node(9).is_unschedulable
    # The researcher and the on-call engineer see it on the node, too.
    assert [event["reason"] for event in stage.cluster.events] == [
        "NodemendCordoned",
        "NodemendRepairStarted",
    ]


def test_observed_a_dry_run_changes_nothing_at_all() -> None:
    stage, incident_id = sick(mode=Mode.DRY_RUN)
    before = stage.node()

    machine = Machine(stage)
    machine.run(incident_id)

    assert tasks(machine) == [*HAPPY_WAY[:5], "CloseIncident"]
    incident = end_of(stage, incident_id)
    assert incident.outcome is Outcome.OBSERVED
    assert stage.mutations() == []
    assert stage.cluster.events == []
    assert stage.node() == before
    assert {one.detail["dry_run"] for one in stage.bus.accepted} == {True}
    assert stage.events("Node Drained")[0]["would_evict"] == ["ml/train-0", "ml/train-1"]


def test_a_rehearsal_does_not_keep_the_real_remediation_back() -> None:
    stage, incident_id = sick(mode=Mode.DRY_RUN)
    Machine(stage).run(incident_id)
    assert run.open_for(stage, xid_finding()) is None  # rehearsed once is enough

    stage.policies.policy = enforce(version="v2")
    real = run.open_for(stage, xid_finding())

    assert real is not None
    stage.dispatch_all(real)
    Machine(stage, [(100, new_node(stage))]).run(real)
    assert stage.incident(real).outcome is Outcome.REPLACED


def test_recovered_a_gpu_that_reports_again_is_left_alone() -> None:
    stage, incident_id = sick(temperature_finding())
    stage.metrics.answer("gpu", samples({}, value=1))

    machine = Machine(stage)
    machine.run(incident_id)

    assert tasks(machine) == ["AdmitRemediation", "VerifyFault", "CloseIncident"]
    assert end_of(stage, incident_id).outcome is Outcome.RECOVERED
    assert stage.mutations() == []


def test_skipped_unverifiable_nothing_is_touched_and_the_next_scan_may_open_it_again() -> None:
    stage, incident_id = sick()
    stage.metrics.fail("amp_timeout")

    machine = Machine(stage)
    machine.run(incident_id)

    assert tasks(machine) == ["AdmitRemediation", "VerifyFault", "CloseIncident"]
    incident = end_of(stage, incident_id)
    assert incident.outcome is Outcome.SKIPPED
    assert incident.reason is not None
    assert incident.reason.code == "unverifiable"
    assert stage.mutations() == []

    stage.metrics.clear()
    stage.metrics.answer("xid-count", XID_79)
    stage.bus.accepted.clear()
    run.scan(stage, Family.ECC)
    detail = stage.events("GPU Fault Detected")[0]
    finding = replace(xid_finding(), evidence=replace(xid_finding().evidence, at=stage.clock.now()))
    assert detail["findings"][0]["code"] == 79
    assert run.open_for(stage, finding) not in (None, incident_id)


def test_amp_that_answers_again_in_time_leads_on() -> None:
    stage, incident_id = sick()
    stage.metrics.fail("amp_timeout")

    def answer() -> None:
        stage.metrics.clear()
        stage.metrics.answer("xid-count", XID_79)

    machine = Machine(stage, [(70, answer), (300, new_node(stage))])
    machine.run(incident_id)

    assert end_of(stage, incident_id).outcome is Outcome.REPLACED


@pytest.mark.case("R3")
def test_needs_human_a_budget_that_blocks_for_ever() -> None:
    stage, incident_id = sick()
    stage.cluster.add_budget(budget(match_labels={"app": "train-1"}))
    stage.cluster.answer_evictions("ml", "train-1", *[PDB_429] * 50)

    machine = Machine(stage)
    machine.run(incident_id)

    incident = needs_human(stage, incident_id, "blocked_by_pdb")
    assert tasks(machine) == [*HAPPY_WAY[:4], "CloseIncident"]
    assert len(stage.events("Drain Progress")) == 1
    assert stage.node().is_unschedulable
    assert OWNER_ANNOTATION in stage.node().annotations
    assert stage.capacity.faults.targets("terminate") == []
    assert incident.drain is not None
    assert incident.drain.evicted == {"pod-train-0": "ml/train-0"}


@pytest.mark.case("R16")
def test_needs_human_evictions_are_forbidden() -> None:
    stage, incident_id = sick()
    stage.cluster.answer_evictions("ml", "train-0", FORBIDDEN_403)

    machine = Machine(stage)
    machine.run(incident_id)

    needs_human(stage, incident_id, "cluster_forbidden")
    assert tasks(machine) == [*HAPPY_WAY[:4], "EscalateIncident", "CloseIncident"]
    assert len(stage.cluster.faults.targets("evict")) == 1


@pytest.mark.case("R55")
def test_needs_human_a_replacement_without_gpus() -> None:
    stage, incident_id = sick()

    machine = Machine(stage, [(100, new_node(stage, gpu_capacity=0, gpu_allocatable=0))])
    machine.run(incident_id)

    needs_human(stage, incident_id, "replacement_unhealthy")
    assert len(stage.capacity.faults.targets("terminate")) == 1


def test_needs_human_insufficient_capacity() -> None:
    stage, incident_id = sick()

    def refuse() -> None:
        stage.capacity.lose_instance(CLUSTER, instance_id(1))
        stage.cluster.remove_node(node_name(1))
        stage.capacity.fail_launch(GROUP, stage.clock.now(), "InsufficientInstanceCapacity")

    machine = Machine(stage, [(90, refuse)])
    machine.run(incident_id)

    incident = needs_human(stage, incident_id, "replacement_missing")
    assert incident.reason is not None
    assert "InsufficientInstanceCapacity" in incident.reason.text


def test_needs_human_the_group_refuses() -> None:
    stage, incident_id = sick()
    stage.capacity.faults.fail("terminate", RepairRefusedError("scale-in protected"))

    Machine(stage).run(incident_id)

    needs_human(stage, incident_id, "repair_refused")


@pytest.mark.parametrize("at", ["VerifyFault", "CordonNode", "DrainNode", "StartRepair"])
@pytest.mark.case("R25")
def test_superseded_whenever_another_machine_takes_the_name(at: str) -> None:
    stage, incident_id = sick()
    machine = Machine(stage)
    original = machine._task
    swapped_at: list[int] = []

    def task(state: Any, data: Any, execution: Any) -> Any:
        if state["Parameters"]["FunctionName"] == "${" + at + "FunctionArn}" and not swapped_at:
            stage.swap_machine()
            swapped_at.append(len(stage.mutations()))
        return original(state, data, execution)

    machine._task = task  # type: ignore[method-assign]
    machine.run(incident_id)

    incident = end_of(stage, incident_id)
    assert incident.outcome is Outcome.SUPERSEDED
    assert len(stage.mutations()) == swapped_at[0]  # nothing was done to the newcomer
    assert not stage.node().is_unschedulable
    assert stage.events("Incident Escalated") == []
    assert stage.events("Incident Closed")[0]["remedy"] == ""


def test_aborted_a_person_wants_the_node_back() -> None:
    stage, incident_id = sick()
    stage.cluster.answer_evictions("ml", "train-1", *[PDB_429] * 9)

    Machine(stage, [(70, stage.uncordon_by_hand)]).run(incident_id)

    assert end_of(stage, incident_id).outcome is Outcome.ABORTED_BY_OPERATOR
    assert not stage.node().is_unschedulable
    assert stage.capacity.faults.targets("terminate") == []


def test_a_mode_that_is_lowered_in_flight_stops_at_the_next_step() -> None:
    stage, incident_id = sick()
    stage.cluster.answer_evictions("ml", "train-1", *[PDB_429] * 9)

    def lower() -> None:
        stage.policies.policy = enforce(mode=Mode.DRY_RUN)

    Machine(stage, [(70, lower)]).run(incident_id)

    incident = end_of(stage, incident_id)
    assert incident.outcome is Outcome.ABORTED_BY_OPERATOR
    assert incident.reason is not None
    assert incident.reason.code == "mode_changed"
    assert stage.events("Incident Closed")[0]["remedy"]


def test_cordon_only() -> None:
    stage, incident_id = sick(mode=Mode.CORDON_ONLY)

    Machine(stage).run(incident_id)

    incident = end_of(stage, incident_id)
    assert incident.outcome is Outcome.NEEDS_HUMAN
    assert stage.mutations() == [f"patch nodes/{node_name(1)}"]
    assert stage.node().is_unschedulable


def test_by_hand_the_way_is_the_same() -> None:
    stage = Stage()
    machine = Machine(stage, [(10, new_node(stage))])

    machine.run("hand-1", HAND)

    assert tasks(machine) == HAPPY_WAY
    assert end_of(stage, "hand-1").outcome is Outcome.REPLACED


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"cluster": CLUSTER}, "InvalidInputError"),
        ({**HAND, "node": "nobody"}, "InvalidInputError"),
        ({**HAND, "nodes": "x"}, "InvalidInputError"),
        ("restart it", "InvalidInputError"),
        ([1], "InvalidInputError"),
    ],
)
def test_by_hand_a_wrong_input_ends_the_execution_red(given: Any, error: str) -> None:
    stage = Stage()
    machine = Machine(stage)

    machine.run("hand-1", given)

    assert tasks(machine) == ["AdmitRemediation"]
    assert machine.visited[-1] == "InputRejected"
    assert machine.error == error
    assert stage.incidents.records == {}


def test_by_hand_a_cluster_that_refuses_ends_the_execution_red() -> None:
    stage = Stage()
    stage.cluster.faults.fail("get", ClusterForbiddenError("cannot get nodes"), times=None)
    machine = Machine(stage)

    machine.run("hand-1", HAND)

    assert machine.visited[-1] == "IncidentNotClosed"
    assert machine.error == "ClusterForbiddenError"
    assert stage.incidents.records == {}


@pytest.mark.parametrize(
    ("verb", "target"),
    [("get", "nodes/"), ("list", "pods/"), ("patch", "nodes/"), ("get", "pods/"), ("evict", "")],
)
def test_a_cluster_that_is_away_for_a_moment_changes_only_the_time(verb: str, target: str) -> None:
    stage, incident_id = sick()
    stage.cluster.faults.fail(verb, ClusterUnavailableError("timed out"), target=target, times=3)

    Machine(stage, [(200, new_node(stage))]).run(incident_id)

    assert end_of(stage, incident_id).outcome is Outcome.REPLACED
    assert len(stage.capacity.faults.targets("terminate")) == 1


@pytest.mark.parametrize("verb", ["group", "terminate"])
def test_aws_that_is_away_for_a_moment_changes_only_the_time(verb: str) -> None:
    stage, incident_id = sick()
    stage.capacity.faults.fail(verb, AwsUnavailableError("throttled"), times=3, after=True)

    Machine(stage, [(200, new_node(stage))]).run(incident_id)

    assert end_of(stage, incident_id).outcome is Outcome.REPLACED
    assert len(stage.capacity.faults.targets("terminate")) in (1, 4)
    assert len(stage.events("Repair Started")) == 1


def test_a_cluster_that_stays_away_needs_a_person() -> None:
    stage, incident_id = sick()
    stage.cluster.faults.fail(
        "list", ClusterUnavailableError("timed out"), target="pods/", times=None
    )

    Machine(stage).run(incident_id)

    needs_human(stage, incident_id, "cluster_unavailable")
    assert stage.mutations() == []


@pytest.mark.case("R10")
def test_a_dead_node_is_replaced_although_nobody_confirms_the_end_of_its_pods() -> None:
    stage, incident_id = sick()
    stage.cluster.change_node(node_name(1), lambda node: replace(node, readiness=Readiness.UNKNOWN))
    stage.cluster.stuck |= {"ml/train-0", "ml/train-1"}

    Machine(stage, [(300, new_node(stage))]).run(incident_id)

    assert end_of(stage, incident_id).outcome is Outcome.REPLACED
    drained = stage.events("Node Drained")[0]
    assert drained["drained_unconfirmed"] == ["ml/train-0", "ml/train-1"]


@pytest.mark.case("R33")
def test_r33_a_second_execution_of_the_same_incident_changes_nothing() -> None:
    stage, incident_id = sick()
    Machine(stage, [(200, new_node(stage))]).run(incident_id)
    before = stage.incident(incident_id), list(stage.mutations())

    again = Machine(stage)
    result = again.run(incident_id)

    assert result["outcome"] == "REPLACED"
    assert (stage.incident(incident_id), stage.mutations()) == before
    assert tasks(again) == ["AdmitRemediation", "CloseIncident"]


def test_a_whole_remediation_survives_a_crash_at_every_call_of_every_step() -> None:
    """Each run dies once, after one of its calls, and is taken up where the machine was."""

    def build() -> tuple[Stage, Callable[[], Any]]:
        stage, incident_id = sick(pods=1, hold_down_s=0)
        stage.bus.accepted.clear()
        request = stage.request(incident_id)
        position = 0

        def remediate() -> None:
            nonlocal position
            while position < len(way):
                result = way[position](stage, request)
                if result.next == "wait":
                    stage.clock.advance(result.wait_s)
                    continue
                position += 1
                if position == 5:
                    new_node(stage)()

        way = [
            run.admit,
            run.verify,
            run.cordon,
            run.drain,
            run.start,
            run.check,
            run.validate,
            run.release,
        ]
        return stage, remediate

    def check(stage: Stage, result: Any) -> None:
        (incident,) = stage.incidents.list_open(CLUSTER)
        run.close(stage, stage.request(incident.id))
        stage.outbox.publish_pending()
        assert stage.incident(incident.id).outcome is Outcome.REPLACED
        assert stage.mutations() == [
            f"patch nodes/{node_name(1)}",
            "evict pods/ml/train-0",
            f"terminate {instance_id(1)}",
        ]
        assert set(times_sent(stage).values()) == {1}
        assert len(times_sent(stage)) == 7

    assert after_every_crash(build, check) > 50


def test_two_sick_nodes_of_one_group_never_take_one_new_node_as_their_proof() -> None:
    stage = Stage()
    stage.metrics.answer("xid-count", samples(xid_labels(1, 79, 3), xid_labels(2, 79, 3)))
    first, second = stage.wait(1), stage.wait(2, xid_finding(2))
    stage.dispatch_all()
    for incident_id in (first, second):
        for step in (run.admit, run.verify, run.cordon, run.drain, run.start):
            step(stage, stage.request(incident_id))
    stage.metrics.clear()
    stage.replace_node(1, 9)

    assert run.check(stage, stage.request(first)).next == "validate"
    assert run.check(stage, stage.request(second)).next == "wait"
    stage.replace_node(2, 8)
    assert run.check(stage, stage.request(second)).next == "validate"

    claims = stage.incidents.claims
    assert claims == {instance_id(9): first, instance_id(8): second}
    assert stage.incident(second).state is IncidentState.VALIDATING


def test_a_query_that_is_answered_in_part_proves_no_recovery() -> None:
    stage, incident_id = sick(temperature_finding())
    stage.metrics.answer("gpu-temperature", QueryResult())
    stage.metrics.fail("amp_partial", matches="count(")

    Machine(stage).run(incident_id)

    assert end_of(stage, incident_id).outcome is Outcome.SKIPPED
