"""The operators' command against the real template: the state machine, its function, AppConfig."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from local.aws.stack import LocalStack
from nodemend.adapters.guard_dynamodb import DynamoGuards
from nodemend.adapters.incidents_dynamodb import DynamoIncidents
from nodemend.adapters.system import SystemClock
from nodemend.contracts.events import incident_detail
from nodemend.domain.approval import ask
from nodemend.domain.events import DetailType
from nodemend.domain.faults import Mode, Rung
from nodemend.domain.incidents import IncidentState, record
from nodemend.domain.policy import ApprovalPoint, ApprovalPolicy
from nodemend.domain.reasons import Reason
from ops.cli import main
from ops.stack import Stack
from tests.fakes import examples

ROOT = Path(__file__).resolve().parents[3]
POLICY = """
schema_version: 1
mode: dry_run
clusters: [{name: train-a, workspace: ws-local, region: eu-west-1}]
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    parameters = {"ClusterName": "train-a", "WorkspaceId": "ws-local"}
    with LocalStack(
        ROOT / "template.yaml",
        parameters,
        run_dir=tmp_path_factory.mktemp("run"),
        region="eu-west-1",
    ) as stack:
        yield stack


@dataclass
class Session:
    """Hands out clients of the running stack; CloudFormation is not emulated, its answer is."""

    running: LocalStack

    def client(self, service: str) -> Any:
        return self if service == "cloudformation" else self.running.client(service)

    def describe_stacks(self, **_: Any) -> Any:
        ids = {
            "SetPauseStateMachineArn": "SetPause",
            "AnswerApprovalStateMachineArn": "AnswerApproval",
            "PolicyApplicationId": "PolicyApplication",
            "PolicyEnvironmentId": "PolicyEnvironment",
            "PolicyProfileId": "PolicyProfile",
        }
        outputs = [
            {"OutputKey": name, "OutputValue": self.running.resource_id(logical_id)}
            for name, logical_id in ids.items()
        ]
        return {"Stacks": [{"Outputs": outputs}]}


def run(running: LocalStack, *words: str) -> int:
    return main(words, stack_of=lambda name, region: Stack(name, Session(running)))  # type: ignore[arg-type]


def guards(running: LocalStack) -> DynamoGuards:
    return DynamoGuards(table=running.resource_id("Table"), client=running.client("dynamodb"))


def test_a_policy_is_deployed_a_cluster_paused_and_resumed(
    running: LocalStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY)
    assert run(running, "policy", "deploy", str(path)) == 0
    assert "policy version 1 is in force" in capsys.readouterr().out

    words = ["--cluster", "train-a", "--reason", "network work", "--by", "alice"]
    assert run(running, "pause", *words) == 0
    assert "alice paused the cluster" in capsys.readouterr().out
    pause = guards(running).load("train-a").pause
    assert pause is not None
    assert (pause.by, pause.why) == ("alice", "network work")

    assert run(running, "resume", *words) == 0
    assert "train-a is not paused" in capsys.readouterr().out
    assert guards(running).load("train-a").pause is None
    told = [e.detail["change"] for e in running.events() if e.detail_type == "Fleet Guard Changed"]
    assert told == ["paused", "resumed"]

    assert run(running, "pause", "--cluster", "typo", "--reason", "why", "--by", "alice") == 1
    error = capsys.readouterr().err
    assert "cluster: 'typo' is not in the policy. Remedy: use one of train-a" in error
    assert error.count("\n") == 1


ASKING = "01TEST00000000000000ASKING"


def asking(running: LocalStack, incident_id: str = ASKING) -> DynamoIncidents:
    """Store an incident that asks for a yes, as request_approval leaves it."""
    clock = SystemClock()
    store = DynamoIncidents(
        table=running.resource_id("Table"), client=running.client("dynamodb"), clock=clock
    )
    waiting = replace(
        examples.waiting(incident_id, opened_at=clock.now()),
        state=IncidentState.APPROVING,
        mode=Mode.ENFORCE,
        plan=(Rung.REPLACE, Rung.HUMAN),
        approval_policy=ApprovalPolicy(),
        new_events=(),
    )
    assert store.create(ask(waiting, ApprovalPoint.CORDON, clock.now()))
    return store


def test_a_yes_a_no_that_wins_over_it_and_a_yes_that_comes_too_late(
    running: LocalStack, capsys: pytest.CaptureFixture[str]
) -> None:
    store = asking(running)

    assert run(running, "approve", ASKING, "--why", "done", "--by", "alice") == 0
    assert "alice said yes to incident" in capsys.readouterr().out
    incident = store.get(ASKING)
    assert incident is not None
    assert incident.approval is not None
    assert incident.approval.answer is not None
    given = incident.approval.answer
    assert (given.is_yes, given.by, given.why) == (True, "alice", "done")

    assert run(running, "approve", ASKING, "--by", "bob", "--rung", "replace") == 0
    assert "alice said yes" in capsys.readouterr().out
    assert run(running, "deny", ASKING, "--why", "not now", "--by", "bob") == 0
    assert run(running, "approve", ASKING, "--by", "carol") == 1
    error = capsys.readouterr().err
    assert "answer: bob said no at" in error
    assert error.count("\n") == 1
    assert run(running, "approve", "01NOBODY", "--by", "alice") == 1
    assert "incident_id: 01NOBODY is unknown" in capsys.readouterr().err
    told = [e.detail["answer"] for e in running.events() if e.detail_type == "Approval Answered"]
    assert told == ["yes", "no"]


def test_a_request_reaches_the_topic_as_text_that_says_how_to_answer(running: LocalStack) -> None:
    now = SystemClock().now()
    asked = record(
        replace(examples.waiting(ASKING), new_events=(), mode=Mode.ENFORCE),
        DetailType.APPROVAL_REQUESTED,
        step="request_approval",
        reason=Reason("xid", "XID 79 on GPU 3"),
        now=now,
        data={
            "number": 1,
            "before": "cordon",
            "rung": Rung.REPLACE,
            "rungs": (Rung.REPLACE,),
            "question": "May n1 (i-1) be cordoned, drained and replaced?",
            "evidence": "rule xid-count, value 1",
            "until": now + timedelta(hours=1),
        },
    )
    running.client("events").put_events(
        Entries=[
            {
                "Source": "nodemend",
                "DetailType": "Approval Requested",
                "Detail": json.dumps(incident_detail(asked, asked.new_events[0])),
                "EventBusName": running.resource_id("Bus"),
            }
        ]
    )
    topic = running.resource_id("ApprovalTopic")
    deadline = time.monotonic() + 15
    while not (sent := [m for m in running.messages() if m.topic_arn == topic]):
        assert time.monotonic() < deadline
        time.sleep(0.05)

    lines = sent[0].message.splitlines()
    assert lines[0] == '"May n1 (i-1) be cordoned, drained and replaced?"'
    assert '"Why: XID 79 on GPU 3"' in lines
    assert '"Evidence: rule xid-count, value 1"' in lines
    assert f'"Yes: nodemend approve {ASKING} --rung replace --stack nodemend"' in lines
    assert any(line.startswith('"No: nodemend deny') for line in lines)
    assert "<" not in sent[0].message
    assert all(line[0] == line[-1] == '"' for line in lines)
