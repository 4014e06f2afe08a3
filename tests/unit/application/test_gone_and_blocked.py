"""Nodes that are not there any more, and nodes that block: neither keeps anything else back."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from nodemend import bootstrap
from nodemend.domain.errors import ClusterUnavailableError
from nodemend.domain.incidents import Outcome
from nodemend.domain.policy import Limits, MaxUnavailable
from tests.unit.application import run
from tests.unit.application.machine import Machine
from tests.unit.application.stage import (
    CLUSTER,
    PDB_429,
    TWO_PDBS_500,
    Stage,
    enforce,
    instance_id,
    node_name,
    pod,
    samples,
    xid_finding,
    xid_labels,
)

APP = Path(__file__).parents[3] / "functions" / "open_incident" / "app.py"


def admitted(nodes: int = 1) -> tuple[Stage, list[str]]:
    """A stage with incidents that were opened, admitted and started."""
    # Three sick ones of fewer nodes would be a storm for the breaker.
    stage = Stage(nodes=20, policy=enforce(limits=Limits(MaxUnavailable(3, 100))))
    sick = range(1, nodes + 1)
    stage.metrics.answer("xid-count", samples(*(xid_labels(number, 79, 3) for number in sick)))
    ids = [run.open_for(stage, xid_finding(number)) for number in sick]
    known = [one for one in ids if one is not None]
    stage.dispatch_all(*known)
    assert stage.executions.started == known
    return stage, known


def vanish(stage: Stage, number: int = 1) -> None:
    """Let EC2 end the instance, and the cloud controller take its Node object away."""
    stage.cluster.remove_node(node_name(number))
    stage.capacity.lose_instance(CLUSTER, instance_id(number))


def bodies(stage: Stage, *numbers: int) -> dict[str, Any]:
    """A batch of the fault queue: one message for each node."""
    events = {number: run.fault_event(stage, xid_finding(number)) for number in numbers}
    return {
        "Records": [
            {
                "messageId": f"m-{number}",
                "eventSource": "aws:sqs",
                "body": json.dumps({"detail": event.model_dump(mode="json")}),
            }
            for number, event in events.items()
        ]
    }


def handle(stage: Stage, batch: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run the function on a batch; return the messages that it sends back."""
    spec = importlib.util.spec_from_file_location("open_incident_app", APP)
    assert spec is not None
    assert spec.loader is not None
    app = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(app)
    monkeypatch.setattr(bootstrap, "open_incident_ports", lambda: stage.open)
    answer = app.handler(batch, Context())
    return [one["itemIdentifier"] for one in answer["batchItemFailures"]]


class Context:
    """What the logger reads of Lambda's context."""

    function_name = "open-incident"
    memory_limit_in_mb = 256
    invoked_function_arn = "arn:aws:lambda:eu-central-1:1:function:open-incident"
    aws_request_id = "r-1"
    log_stream_name = "s"

    def get_remaining_time_in_millis(self) -> int:
        return 30_000


# --- R28: it is not there -------------------------------------------------------------------------


@pytest.mark.case("R28")
@pytest.mark.parametrize("at", ["VerifyFault", "CordonNode", "DrainNode", "StartRepair"])
def test_r28a_a_node_that_is_gone_before_a_step_ends_the_incident_without_a_call(at: str) -> None:
    stage, (incident_id,) = admitted()
    machine = Machine(stage)
    seen: list[str] = []

    def before(state: Any, data: Any, execution: Any, step: Any = machine._task) -> Any:
        if at in state["Parameters"]["FunctionName"] and not seen:
            vanish(stage)
            seen.extend(stage.mutations() or ["nothing"])
        return step(state, data, execution)

    machine._task = before  # type: ignore[method-assign]
    machine.run(incident_id)

    incident = stage.incident(incident_id)
    assert (incident.outcome, machine.error) == (Outcome.SUPERSEDED, "")
    assert (stage.mutations() or ["nothing"]) == seen
    assert stage.guards.load(CLUSTER).slots == {}
    assert stage.incidents.open_by_node == {}
    assert stage.events("Incident Escalated") == []


@pytest.mark.case("R28")
def test_r28a_the_message_of_a_node_that_is_gone_is_consumed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage()
    vanish(stage)

    assert handle(stage, bodies(stage, 1), monkeypatch) == []
    assert handle(stage, bodies(stage, 1), monkeypatch) == []
    rejected = stage.events("Incident Rejected")
    assert [one["reason"]["code"] for one in rejected] == ["unresolved_node"]


@pytest.mark.case("R28")
def test_r28a_a_waiter_whose_node_goes_takes_no_slot() -> None:
    stage = Stage()
    incident_id = run.open_for(stage, xid_finding())
    assert incident_id is not None
    vanish(stage)

    stage.dispatch_all(incident_id)

    incident = stage.incident(incident_id)
    assert incident.reason is not None
    assert (incident.outcome, incident.reason.code) == (Outcome.SUPERSEDED, "already_gone")
    assert stage.executions.started == []


@pytest.mark.case("R28")
def test_r28c_a_replacement_that_never_joins_is_told_and_not_drained() -> None:
    stage, (incident_id,) = admitted()

    def launch() -> None:
        stage.capacity.replace_instance(CLUSTER, instance_id(1), instance_id(30))
        stage.cluster.remove_node(node_name(1))

    Machine(stage, [(200, launch)]).run(incident_id)

    incident = stage.incident(incident_id)
    assert incident.reason is not None
    assert (incident.outcome, incident.reason.code) == (
        Outcome.NEEDS_HUMAN,
        "replacement_unhealthy",
    )
    assert f"{instance_id(30)} has not joined" in incident.reason.text
    assert stage.mutations() == [f"patch nodes/{node_name(1)}", f"terminate {instance_id(1)}"]


# --- R29: one that blocks -------------------------------------------------------------------------


@pytest.mark.case("R29")
@pytest.mark.parametrize("answer", [PDB_429, TWO_PDBS_500], ids=["PDB429", "two PDBs"])
def test_r29_a_blocked_node_keeps_the_others_of_its_batch_not_back(answer: Any) -> None:
    stage, ids = admitted(nodes=3)
    for number in (1, 2, 3):
        stage.cluster.add_pod(pod(f"train-{number}", number))
    stage.cluster.answer_evictions("ml", "train-2", *[answer] * 500)

    for number, incident_id in enumerate(ids, 1):
        swap = (200, lambda n=number: stage.replace_node(n, 30 + n))
        Machine(stage, [] if number == 2 else [swap]).run(incident_id)

    outcomes = [stage.incident(one).outcome for one in ids]
    assert outcomes == [Outcome.REPLACED, Outcome.NEEDS_HUMAN, Outcome.REPLACED]
    assert [one for one in stage.mutations() if "terminate" in one] == [
        f"terminate {instance_id(1)}",
        f"terminate {instance_id(3)}",
    ]


@pytest.mark.case("R29")
def test_r29_a_batch_reports_only_the_message_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    gone = ClusterUnavailableError("the API server answers 503")
    stage.cluster.faults.fail("get", gone, target=node_name(2), times=None)

    assert handle(stage, bodies(stage, 1, 2, 3), monkeypatch) == ["m-2"]
    opened = {one.incident.node.name for one in stage.incidents.records.values()}
    assert opened == {node_name(1), node_name(3)}


# --- R45: whose cordon it is ----------------------------------------------------------------------


@pytest.mark.case("R45")
def test_r45b_a_person_who_uncordons_midway_stops_everything_that_would_follow() -> None:
    stage, (incident_id,) = admitted()
    stage.cluster.add_pod(pod("train-1"))
    stage.cluster.answer_evictions("ml", "train-1", *[PDB_429] * 500)
    machine = Machine(stage, [(100, stage.uncordon_by_hand)])

    machine.run(incident_id)

    assert stage.incident(incident_id).outcome is Outcome.ABORTED_BY_OPERATOR
    assert "StartRepair" not in machine.visited
    assert not stage.node().is_unschedulable
    assert stage.node().taints == ()
    assert stage.node().owner is None
    assert not [one for one in stage.mutations() if "terminate" in one]
