"""The operators' command: words in, one line out, an exit status that scripts can trust."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from moto import mock_aws

from ops.cli import labels_of, main
from ops.stack import CommandError, Stack

ROOT = Path(__file__).resolve().parents[3]
NOW = datetime(2026, 5, 4, 12, tzinfo=UTC)
OUTPUTS = {
    "SetPauseStateMachineArn": "arn:aws:states:eu-central-1:123456789012:stateMachine:n-set-pause",
    "AnswerApprovalStateMachineArn": "arn:aws:states:eu-central-1:123456789012:stateMachine:n-ask",
    "PolicyApplicationId": "app1",
    "PolicyEnvironmentId": "env1",
    "PolicyProfileId": "prof1",
}


@dataclass
class Aws:
    """CloudFormation, Step Functions and AppConfig, as far as the command asks them."""

    outputs: Mapping[str, str] = field(default_factory=lambda: OUTPUTS)
    statuses: list[str] = field(default_factory=lambda: ["RUNNING", "SUCCEEDED"])
    cause: str = ""
    states: list[str] = field(default_factory=lambda: ["DEPLOYING", "BAKING"])
    refuse: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def client(self, _: str) -> "Aws":
        return self

    def _called(self, action: str, given: dict[str, Any]) -> None:
        self.calls.append((action, given))
        if action == self.refuse:
            error = {"Code": "AccessDeniedException", "Message": "not\nallowed"}
            raise ClientError({"Error": error}, action)

    def describe_stacks(self, **given: Any) -> Any:
        self._called("DescribeStacks", given)
        outputs = [{"OutputKey": k, "OutputValue": v} for k, v in self.outputs.items()]
        return {"Stacks": [{"Outputs": outputs}]}

    def start_execution(self, **given: Any) -> Any:
        self._called("StartExecution", given)
        return {"executionArn": "arn:x"}

    def describe_execution(self, **given: Any) -> Any:
        self._called("DescribeExecution", given)
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        output = json.dumps({"message": "alice paused the cluster"})
        return {"status": status, "output": output, "cause": self.cause}

    def create_hosted_configuration_version(self, **given: Any) -> Any:
        self._called("CreateHostedConfigurationVersion", given)
        return {"VersionNumber": 7}

    def start_deployment(self, **given: Any) -> Any:
        self._called("StartDeployment", given)
        return {"DeploymentNumber": 3}

    def get_deployment(self, **given: Any) -> Any:
        self._called("GetDeployment", given)
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return {"State": state, "EventLog": [{"Description": "an alarm\nfired"}]}


def run(aws: Aws, *words: str) -> int:
    def stack_of(name: str, region: str | None) -> Stack:
        return Stack(name, aws, sleep=lambda _: None)  # type: ignore[arg-type]

    return main(words, stack_of=stack_of, now=lambda: NOW)


def policy(tmp_path: Path, text: str) -> str:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    return str(path)


# --- pause and resume -----------------------------------------------------------------------------


@pytest.mark.parametrize(("word", "paused"), [("pause", True), ("resume", False)])
def test_it_starts_the_state_machine_and_prints_what_it_says(
    word: str, paused: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    aws = Aws()

    assert run(aws, word, "--cluster", "a", "--reason", "network", "--by", "alice") == 0

    assert capsys.readouterr().out == "alice paused the cluster\n"
    started = next(given for action, given in aws.calls if action == "StartExecution")
    assert started["stateMachineArn"] == OUTPUTS["SetPauseStateMachineArn"]
    assert json.loads(started["input"]) == {
        "cluster": "a",
        "paused": paused,
        "reason": "network",
        "requested_by": "alice",
    }


def test_who_asks_is_the_user_unless_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "bob")
    aws = Aws()
    assert run(aws, "pause", "--cluster", "a", "--reason", "why") == 0
    started = next(given for action, given in aws.calls if action == "StartExecution")
    assert json.loads(started["input"])["requested_by"] == "bob"


def test_a_user_that_cannot_be_told_must_be_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nobody() -> str:
        raise OSError("no such user")

    monkeypatch.setattr("getpass.getuser", nobody)
    assert run(Aws(), "pause", "--cluster", "a", "--reason", "why") == 1
    assert capsys.readouterr().err.startswith("nodemend: --by: ")


@pytest.mark.parametrize(
    ("aws", "line"),
    [
        (
            Aws(
                statuses=["FAILED"], cause=json.dumps({"errorMessage": "cluster: 'b'\nis unknown"})
            ),
            "nodemend: pausing a failed: cluster: 'b' is unknown",
        ),
        (Aws(statuses=["ABORTED"], cause="stopped"), "nodemend: pausing a failed: stopped"),
        (Aws(statuses=["TIMED_OUT"]), "nodemend: pausing a failed: look at arn:x"),
        (Aws(statuses=["RUNNING"]), "nodemend: pausing a takes more than 120 s: look at arn:x"),
        (Aws(outputs={}), "nodemend: stack nodemend has no output SetPauseStateMachineArn"),
        (
            Aws(refuse="DescribeStacks"),
            "nodemend: stack nodemend cannot be read: An error occurred",
        ),
        (Aws(refuse="StartExecution"), "nodemend: pausing a: An error occurred (AccessDenied"),
    ],
    ids=["refused", "stopped", "timed out", "slow", "old stack", "no stack", "denied"],
)
def test_a_failure_is_one_line_and_exit_status_1(
    aws: Aws, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(aws, "pause", "--cluster", "a", "--reason", "why", "--by", "alice") == 1
    error = capsys.readouterr().err
    assert error.startswith(line)
    assert error.count("\n") == 1


# --- approve and deny -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["approve", "01X"], {"answer": "yes", "why": ""}),
        (["approve", "01X", "--rung", "replace"], {"answer": "yes", "why": "", "rung": "replace"}),
        (["deny", "01X", "--why", "not now"], {"answer": "no", "why": "not now"}),
    ],
)
def test_an_answer_starts_its_own_state_machine(
    words: list[str], given: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    aws = Aws()

    assert run(aws, *words, "--by", "alice", "--stack", "mine") == 0

    assert capsys.readouterr().out == "alice paused the cluster\n"
    started = next(given for action, given in aws.calls if action == "StartExecution")
    assert started["stateMachineArn"] == OUTPUTS["AnswerApprovalStateMachineArn"]
    assert json.loads(started["input"]) == {
        "incident_id": "01X",
        "answered_by": "alice",
        **given,
    }


def test_an_answer_that_is_refused_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    aws = Aws(statuses=["FAILED"], cause=json.dumps({"errorMessage": "answer:\n bob said no"}))
    assert run(aws, "approve", "01X", "--by", "alice") == 1
    assert capsys.readouterr().err == "nodemend: approving 01X failed: answer: bob said no\n"


# --- policy deploy --------------------------------------------------------------------------------


def test_a_valid_policy_is_stored_deployed_and_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    aws = Aws()
    path = policy(tmp_path, "schema_version: 1\nmode: enforce\n")

    assert run(aws, "policy", "deploy", path, "--stack", "mine") == 0

    said = capsys.readouterr().out
    assert said.startswith("policy version 7 is in force within 30 s; AppConfig takes no other")
    calls = dict(aws.calls)
    assert calls["DescribeStacks"] == {"StackName": "mine"}
    stored = calls["CreateHostedConfigurationVersion"]
    assert (stored["ApplicationId"], stored["ConfigurationProfileId"]) == ("app1", "prof1")
    assert stored["Content"] == b"schema_version: 1\nmode: enforce\n"
    assert calls["StartDeployment"]["ConfigurationVersion"] == "7"
    assert calls["StartDeployment"]["DeploymentStrategyId"] == "AppConfig.AllAtOnce"
    assert calls["GetDeployment"]["DeploymentNumber"] == 3


def test_a_strategy_without_bake_time_is_told_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    aws = Aws(states=["COMPLETE"])
    assert (
        run(aws, "policy", "deploy", policy(tmp_path, "schema_version: 1"), "--strategy", "s") == 0
    )
    assert capsys.readouterr().out == "policy version 7 is in force within 30 s\n"
    assert dict(aws.calls)["StartDeployment"]["DeploymentStrategyId"] == "s"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("schema_version: 1\nmode: fast\n", "mode: Input should be"),
        ("schema_version: 1\ndrain: {wait_s: 5}\n", "drain: is not built yet"),
        ("schema_version: 1\nrules: {nope: {}}\n", "rules.nope: no such rule"),
        ("a: [", "is no YAML"),
        ("2026-13-45", "is no YAML"),
        ("- 1", "must be a YAML mapping"),
    ],
)
def test_an_invalid_policy_never_leaves_this_machine(
    tmp_path: Path, text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    aws = Aws()
    assert run(aws, "policy", "deploy", policy(tmp_path, text)) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert aws.calls == []


@pytest.mark.parametrize(
    ("aws", "line"),
    [
        (Aws(refuse="CreateHostedConfigurationVersion"), "the policy cannot be stored: "),
        (Aws(refuse="StartDeployment"), "version 7 is stored and not deployed: "),
        (Aws(states=["ROLLED_BACK"]), "deployment 3 is ROLLED_BACK: an alarm fired"),
        (Aws(states=["DEPLOYING"]), "deployment 3 is not in force after 600 s"),
        (Aws(outputs={"PolicyApplicationId": "a"}), "stack nodemend has no output PolicyEnv"),
    ],
    ids=["store", "deploy", "rolled back", "slow", "no output"],
)
def test_a_deployment_that_fails_is_one_line(
    aws: Aws, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(aws, "policy", "deploy", policy(tmp_path, "schema_version: 1")) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"nodemend: {line}")
    assert error.count("\n") == 1


# --- policy check ---------------------------------------------------------------------------------

POLICY = """
schema_version: 1
mode: dry_run
clusters:
  - {name: a, workspace: ws-1, region: eu-central-1, matcher: 'cluster="a"'}
groups:
  - match: {pool: h100}
    mode: enforce
    limits:
      max_unavailable: {count: 1, percent: 10}
      replacements: {per_hour: 1, per_day: 3}
      breaker: {percent: 50}
    plans: {thermal: [replace, human]}
plans: {hang: []}
rules:
  gpu-temperature: {thresholds: {celsius: 80}}
  gpu-lost: {enabled: false}
  xid-new: {plan: []}
maintenance_windows:
  - {days: [sat], start: "22:00", duration_s: 3600, timezone: Europe/Berlin}
fatal_ignores_windows: true
approval: {timeout_s: 1800}
exclude: [ip-9]
"""


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(Aws(), "policy", "check", *words) == 0
    return capsys.readouterr().out


def test_the_example_policy_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, str(ROOT / "docs/policy.example.yaml"))
    assert "mode: dry_run: nodemend plans and reports, and changes nothing" in text
    assert "cluster train-a: ws-11111111-2222-3333-4444-555555555555 in eu-central-1" in text
    assert "at most 5 nodes and 2 %: 1 of 8, 2 of 100, 5 of 2000" in text
    assert "breaker: opens when one fault hits 3 of 8, 20 of 100, 400 of 2000 nodes" in text
    assert "hold: a degraded fault must last 600 s" in text


def test_everything_that_a_policy_says_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = told(capsys, policy(tmp_path, POLICY))
    for line in (
        'cluster a: ws-1 in eu-central-1, series with cluster="a"',
        "nodes with pool=h100: mode enforce: nodemend cordons, drains and repairs",
        "nodes with pool=h100: unavailable at once per group: at most 1 nodes and 10 %",
        "nodes with pool=h100: replacements per group: at most 1 an hour and 3 a day",
        "nodes with pool=h100: breaker per group: opens when one fault hits 4 of 8, 50 of 100",
        "nodes with pool=h100: thermal: replace, then human",
        "hang: observe",
        "gpu_lost: replace, then human (built in)",
        "new disruption only on sat from 22:00 Europe/Berlin for 3600 s",
        "fatal faults and starts by hand need no window",
        "approval: reboot and replace need a person's yes, asked before the cordon; no answer",
        "rule gpu-lost: off",
        "rule gpu-temperature: celsius is 80",
        "rule xid-new: observe",
        "never touched: ip-9",
    ):
        assert line in text, line


def test_without_clusters_the_stacks_own_is_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "clusters: none named" in told(capsys, policy(tmp_path, "schema_version: 1"))


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (
            ["--node", "ip-1", "--labels", "pool=h100", "--code", "95"],
            ["ip-1: xid/95 found by rule xid-", "group: pool=h100 binds", "mode: enforce"],
        ),
        (["--node", "ip-1", "--code", "13"], ["verdict application", "decision: OBSERVED"]),
        (
            ["--node", "ip-1", "--code", "74"],
            ["verdict fatal", "give --model: XID 74 is a code of ampere, hopper GPUs"],
        ),
        (
            ["--node", "ip-1", "--code", "74", "--model", "NVIDIA-H200"],
            ["verdict fatal", "xid table: NVLink up to Hopper"],
        ),
        (["--node", "ip-1", "--code", "500"], ["verdict suspect", "decision: OBSERVED"]),
        (["--node", "ip-1", "--code", "79", "--rule", "xid-new"], ["plan: observe"]),
        (["--node", "ip-9", "--code", "79"], ["decision: SKIPPED, nothing is touched: excluded"]),
        (["--node", "ip-1", "--fault", "gpu_lost"], ["decision: it is admitted if the limits"]),
        (["--node", "ip-1", "--fault", "manual"], ["by hand", "decision: it is admitted"]),
        (
            ["--node", "ip-1", "--fault", "thermal", "--labels", "pool=h100"],
            ["decision: it waits: maintenance_window: no maintenance window is open"],
        ),
    ],
)
def test_what_would_happen_to_a_node(
    words: list[str], lines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = told(capsys, policy(tmp_path, POLICY), *words)
    for line in lines:
        assert line in text, text


@pytest.mark.parametrize(
    ("text", "words", "line"),
    [
        ("mode: enforce\napproval: {}", [], "a yes is asked for before the cordon, for 3600 s"),
        (
            "mode: enforce\napproval: {before: repair, timeout_s: 60}",
            [],
            "a yes is asked for before the repair of the drained node, for 60 s",
        ),
        (
            "mode: enforce\napproval: {rungs: [replace]}",
            ["--code", "119"],
            "a yes is asked for before the repair of the drained node, for 3600 s",
        ),
        ("approval: {}", [], "a dry run asks nobody; else a yes would be asked for before the cor"),
        ("mode: enforce", [], ""),
        ("mode: enforce\napproval: {rungs: [reboot]}", [], ""),
    ],
)
def test_whether_a_person_is_asked_is_foretold(
    text: str, words: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = policy(tmp_path, f"schema_version: 1\n{text}\n")
    question = ["--node", "ip-1", "--fault", "xid", "--code", "79", *words]
    foretold = told(capsys, path, *question).split("\n\n")[1]
    assert ("approval: " in foretold) is bool(line)
    assert line in foretold


def test_a_hold_is_told_with_what_comes_after_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = policy(tmp_path, "schema_version: 1\nplans: {thermal: [replace]}\n")
    text = told(capsys, path, "--node", "i-0123456789abcdef0", "--fault", "thermal")
    assert "decision: it waits: hold: thermal has lasted 0 s" in text
    assert "when it has lasted: decision: it is admitted" in text


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--node", "n"], "--code: an XID fault needs its code"),
        (["--node", "n", "--code", "79", "--rule", "nope"], "--rule: rule: 'nope' is not in"),
        (["--node", "n", "--fault", "thermal", "--rule", "xid-new"], "--rule: xid-new finds xid"),
    ],
)
def test_a_wrong_question_is_one_line(
    words: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(Aws(), "policy", "check", policy(tmp_path, "schema_version: 1"), *words) == 1
    assert capsys.readouterr().err.startswith(f"nodemend: {line}")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["pause"],
        ["policy"],
        ["pause", "--cluster", "a"],
        ["approve"],
        ["deny", "01X"],
        ["approve", "01X", "--rung", "human"],
        ["policy", "check", "x", "--labels", "a"],
        ["policy", "check", "x", "--fault", "sunburn"],
        ["policy", "check", "x", "--fleet", "0"],
    ],
)
def test_wrong_words_are_refused_with_exit_status_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(Aws(), *words)
    assert caught.value.code == 2


def test_labels_are_pairs() -> None:
    assert labels_of("a=b,c=") == {"a": "b", "c": ""}


# --- the stack ------------------------------------------------------------------------------------


@mock_aws
def test_outputs_are_those_of_cloudformation() -> None:
    session = boto3.Session("test", "test", region_name="eu-central-1")
    body = {
        "Resources": {"Topic": {"Type": "AWS::SNS::Topic"}},
        "Outputs": {"TopicArn": {"Value": {"Ref": "Topic"}}},
    }
    session.client("cloudformation").create_stack(StackName="n", TemplateBody=json.dumps(body))

    stack = Stack("n", session)

    assert stack.output("TopicArn").startswith("arn:aws:sns:eu-central-1:")
    with pytest.raises(CommandError, match="stack n has no output Other"):
        stack.output("Other")
    with pytest.raises(CommandError, match=r"stack gone cannot be read: .*does not exist"):
        Stack("gone", session).outputs()


def test_without_a_region_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert main(["pause", "--cluster", "a", "--reason", "why", "--by", "me"]) == 1
    assert "region" in capsys.readouterr().err
