"""The operators' command against the real template: the state machine, its function, AppConfig."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from local.aws.stack import LocalStack
from nodemend.adapters.guard_dynamodb import DynamoGuards
from ops.cli import main
from ops.stack import Stack

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
