"""Deploying templates: what is created, what is refused, and that nothing stays behind."""

import gc
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest
from botocore.exceptions import ClientError

from local.aws.stack import FunctionFailedError, LocalStack
from local.aws.template import TemplateError
from local.calls import ApiFault, FaultPlan

DATA = Path(__file__).parents[2] / "data" / "aws"


def children() -> set[int]:
    """Process ids of this process's live children."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid() and fields[0] != "Z":
            found.add(int(status.parent.name))
    return found


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def make_stack(tmp_path: Path) -> Callable[..., LocalStack]:
    def make(resources: str, **options: Any) -> LocalStack:
        template = tmp_path / "template.yaml"
        template.write_text(
            "Transform: AWS::Serverless-2016-10-31\n"
            "Parameters: {Size: {Type: Number, Default: 1, AllowedValues: [1, 2]}}\n"
            "Resources:\n" + indent(resources, "  ")
        )
        return LocalStack(template, run_dir=tmp_path / "run", **options)

    return make


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks into /proc")
def test_nothing_is_left_after_a_stop_in_full_flight(tmp_path):
    threads = set(threading.enumerate())
    processes = children()
    environment = dict(os.environ)
    base = {"do": "sleep", "id": "", "seconds": 1.5, "wait_s": 0}

    stack = LocalStack(DATA / "template.yaml", run_dir=tmp_path, seconds_per_minute=0.2)
    stack.start()
    url = stack.front.url
    stack.start_execution(base, machine="Steps")
    stack.start_execution({**base, "do": "echo", "wait_s": 60}, machine="Steps")
    stack.start_execution({}, machine="Direct")
    deadline = time.monotonic() + 10
    while len(children()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert children() - processes
    started = time.monotonic()
    stack.stop()

    assert time.monotonic() - started < 6
    assert not set(threading.enumerate()) - threads
    assert not children() - processes
    assert dict(os.environ) == environment
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=2)


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks into /proc")
def test_stacks_one_after_the_other_start_empty_and_leak_no_files(tmp_path):
    counts = []
    for number in range(4):
        with LocalStack(DATA / "template.yaml", run_dir=tmp_path / str(number)) as stack:
            assert stack.invoke("EchoFunction", {"do": "count"}) == {"calls": 1}
            assert stack.executions() == []
        gc.collect()
        counts.append(open_files())

    # What leaks does so with each stack; one file more or less is what else the process does.
    assert counts[3] - counts[1] < 2


def test_the_stack_starts_quickly(tmp_path):
    started = time.monotonic()
    with LocalStack(DATA / "template.yaml", run_dir=tmp_path):
        assert time.monotonic() - started < 10  # 1.3 s on an idle machine


def test_outputs_conditions_mappings_and_names_are_resolved(tmp_path):
    parameters = {"Flavour": "spicy", "BusName": "given"}
    with LocalStack(
        DATA / "template.yaml", parameters, run_dir=tmp_path, stack_name="prod"
    ) as stack:
        assert stack.outputs == {
            "BusArn": "arn:aws:events:eu-west-1:123456789012:event-bus/given",
            "QueueUrl": f"{stack.front.url}/123456789012/prod-Queue",
            "Spicy": "prod-SpicyFunction",
            "Zone": "eu-west-1b",
            "Joined": "prod-Queue/eu-west-1",
        }
        names = {spec.logical_id: spec for spec in stack.lambdas.specs()}
        assert names["EchoFunction"].short_name == "echo"
        assert names["ThrottledFunction"].short_name == "throttled_echo"
        assert names["EchoFunction"].memory_mb == 256
        environment = stack.invoke("NotifyFunction", {"kind": "x"})
        assert environment is None
        table = stack.client("dynamodb").describe_table(TableName=stack.resource_id("Table"))
        assert table["Table"]["GlobalSecondaryIndexes"][0]["IndexName"] == "by_state"
        ttl = stack.client("dynamodb").describe_time_to_live(TableName=stack.resource_id("Table"))
        assert ttl["TimeToLiveDescription"]["TimeToLiveStatus"] == "ENABLED"


def test_extra_environment_may_be_made_from_the_endpoint(tmp_path):
    with LocalStack(
        DATA / "template.yaml",
        run_dir=tmp_path,
        environment=lambda url: {"AMP_ENDPOINT": f"{url}/workspaces"},
    ) as stack:
        answer = stack.invoke("EchoFunction", {"do": "environment"})
        assert answer["environment"]["AMP_ENDPOINT"] == f"{stack.front.url}/workspaces"
        assert answer["environment"]["AWS_ENDPOINT_URL"] == stack.front.url


def test_functions_calls_are_known_as_theirs_and_failures_by_type(tmp_path):
    with LocalStack(DATA / "template.yaml", run_dir=tmp_path) as stack:
        stack.invoke("echo", {"do": "count"})
        call = stack.log.calls()[-1]
        assert (call.caller, call.verb) == ("echo", "UpdateItem")

        with pytest.raises(FunctionFailedError, match="TooHotError") as caught:
            stack.invoke("EchoFunction", {"do": "fail"})
        assert caught.value.error_type == "TooHotError"
        assert any("too hot" in line for line in stack.logs("EchoFunction"))


@pytest.mark.parametrize(("when", "calls"), [("before", 1), ("after", 2)])
def test_a_function_can_be_made_to_die_before_or_after_a_call(tmp_path, when, calls):
    fault = ApiFault(
        "UpdateItem",
        0,
        caller="echo",
        times=1,
        headers={"x-local-kill": "1", "x-local-when": when},
    )
    with LocalStack(DATA / "template.yaml", run_dir=tmp_path, faults=FaultPlan([fault])) as stack:
        with pytest.raises(FunctionFailedError, match=r"Runtime\.ExitError"):
            stack.invoke("EchoFunction", {"do": "count"})

        assert stack.invoke("EchoFunction", {"do": "count"}) == {"calls": calls}


def test_the_fast_clock_fires_schedules(tmp_path):
    with LocalStack(DATA / "template.yaml", run_dir=tmp_path, seconds_per_minute=0.2) as stack:
        deadline = time.monotonic() + 15
        while sum(report.function == "notify" for report in stack.reports()) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_the_api_of_lambda_serves_what_describes_functions(tmp_path):
    with LocalStack(DATA / "template.yaml", run_dir=tmp_path) as stack:
        client = stack.client("lambda")
        names = [one["FunctionName"] for one in client.list_functions()["Functions"]]
        assert "nodemend-EchoFunction" in names
        found = client.get_function(FunctionName="nodemend-EchoFunction")["Configuration"]
        assert (found["Timeout"], found["Handler"]) == (2, "app.handler")
        with pytest.raises(ClientError, match="ResourceNotFoundException"):
            client.invoke(FunctionName="nobody")
        with pytest.raises(ClientError, match="RequestTooLargeException"):
            client.invoke(
                FunctionName="nodemend-EchoFunction",
                InvocationType="Event",
                Payload=json.dumps("x" * 1_100_000),
            )
        answer = client.invoke(
            FunctionName=stack.attribute("EchoFunction"), LogType="Tail", Payload='{"do": "fail"}'
        )
        assert answer["FunctionError"] == "Unhandled"
        assert json.load(answer["Payload"])["errorType"] == "TooHotError"
        assert answer["LogResult"]


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        (dedent(resources), message)
        for resources, message in (
            ("A: {Type: AWS::RDS::DBInstance}", "cannot create: AWS::RDS::DBInstance"),
            (
                """\
                A: {Type: AWS::SQS::Queue, Properties: {QueueName: !GetAtt B.QueueName}}
                B: {Type: AWS::SQS::Queue, Properties: {QueueName: !GetAtt A.QueueName}}
                """,
                "circular dependency: A -> B -> A",
            ),
            (
                "A: {Type: AWS::SQS::Queue, Properties: {QueueName: !Ref Nothing}}",
                "unknown name: Nothing",
            ),
            (
                "A: {Type: AWS::SQS::Queue, Properties: {QueueName: !ImportValue x}}",
                "Fn::ImportValue is not supported",
            ),
            (
                """\
                A: {Type: AWS::SNS::Topic}
                B: {Type: AWS::SQS::Queue, Properties: {QueueName: !GetAtt A.Colour}}
                """,
                "GetAtt A.Colour is not known",
            ),
            (
                """\
                A:
                  Type: AWS::Serverless::Function
                  Properties: {CodeUri: nowhere/, Handler: a.b, Runtime: python3.13}
                """,
                "A: no such folder",
            ),
            (
                """\
                A:
                  Type: AWS::Serverless::Function
                  Properties: {CodeUri: ., Handler: a.b, Runtime: nodejs22.x}
                """,
                "runtime 'nodejs22.x' cannot be run",
            ),
            (
                """\
                Q: {Type: AWS::SQS::Queue, Properties: {VisibilityTimeout: 5}}
                A:
                  Type: AWS::Serverless::Function
                  Properties:
                    CodeUri: .
                    Handler: a.b
                    Runtime: python3.13
                    Timeout: 10
                    Events: {E: {Type: SQS, Properties: {Queue: !GetAtt Q.Arn}}}
                """,
                "visibility time-out",
            ),
            (
                """\
                M:
                  Type: AWS::Serverless::StateMachine
                  Properties:
                    Role: arn:aws:iam::123456789012:role/r
                    Definition:
                      StartAt: A
                      States: {A: {Type: Succeed, Comment: "${Missing}"}}
                """,
                "DefinitionSubstitutions has no Missing",
            ),
            (
                """\
                R:
                  Type: AWS::Events::Rule
                  Properties:
                    EventPattern: {source: [a]}
                    Targets:
                      - {Id: t, Arn: "arn:aws:kinesis:eu-west-1:123456789012:stream/s"}
                """,
                "events cannot be sent to",
            ),
        )
    ],
)
def test_what_cannot_be_deployed_is_named_and_leaves_nothing_running(
    make_stack, resources, message
):
    threads = set(threading.enumerate())
    stack = make_stack(resources)

    with pytest.raises(TemplateError, match=message):
        stack.start()

    assert not set(threading.enumerate()) - threads


@pytest.mark.parametrize(
    ("parameters", "message"),
    [({"Size": "3"}, "not one of"), ({"Colour": "red"}, "no parameter Colour")],
)
def test_wrong_parameters_are_refused(make_stack, parameters, message):
    stack = make_stack("A: {Type: AWS::SNS::Topic}\n", parameters=parameters)

    with pytest.raises(TemplateError, match=message):
        stack.start()
