"""What a person does wrong ends with a sentence that says what is wrong and what would be right."""

import json
import time

import pytest
import yaml

from local.calls import ApiFault
from local.scenario import load_scenario
from local.world import World
from tests.e2e.conftest import SCENARIOS

pytestmark = pytest.mark.timeout(200)


def started(world, given, name):
    """Start a remediation as a person does in the console; return the execution's ARN."""
    return world.stack.start_execution(given, name=name, machine="RemediateNode")


@pytest.mark.first
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("schema_version: 2", "schema_version"),
        ("name: [", "is no YAML"),
        ("start: {by: alert}", "start.alert goes with by: alert"),
        ("schema_version: 1\nname: x\nclusters: []\nexpect: {outcome: null}", "clusters"),
    ],
)
def test_a_wrong_scenario_file_is_named_with_its_field(run_scenario, tmp_path, text, told):
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    run = run_scenario(path)
    assert run.status == 2
    assert told in run.text
    assert "Traceback" not in run.text


def test_a_wrong_api_fault_is_refused_with_an_example(run_scenario):
    run = run_scenario(SCENARIOS / "xid79.yaml", "--api-fault", "evict")
    assert run.status == 2
    assert "evict:403" in run.text


@pytest.fixture(scope="module")
def world():
    scenario = load_scenario(SCENARIOS / "by_hand.yaml")
    with World(scenario, announce=lambda _: None) as started:
        yield started


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"node": "n", "reason": "why not", "requested_by": "me"}, "cluster"),
        ({"cluster": "train-east", "reason": "why not", "requested_by": "me"}, "node"),
        ({"cluster": "other", "node": "n", "reason": "why not", "requested_by": "me"}, "cluster"),
        (
            {"cluster": "train-east", "node": "n", "reason": "why not", "requested_by": "me"},
            "node",
        ),
        (
            {"cluster": "train-east", "node": "Not_A_Name", "reason": "why", "requested_by": "me"},
            "node",
        ),
        ({"incident_id": "01J00000000000000000000000", "schema_version": 1}, "incident_id"),
        ([], "input"),
    ],
)
def test_a_wrong_input_by_hand_fails_in_the_first_step_and_names_the_field(world, given, field):
    arn = started(world, given, name=f"wrong-{time.monotonic_ns()}")
    execution = world.stack.wait_for_execution(arn, 60)
    assert execution.status == "FAILED"
    assert execution.error == "InvalidInputError"
    message = json.loads(execution.cause)["errorMessage"]
    assert message.startswith(f"{field}: ")
    assert "Remedy: " in message
    assert world.calls.mutations() == []


@pytest.mark.case("D38")
def test_d38_an_alert_that_cannot_be_read_lies_in_the_dead_letters_with_the_reason(world):
    broken = '{"alerts": [{"status": "firing", "annotations": {"s": "XID 79 on "gpu 3""}}]}'
    topic = world.stack.resource_id("AlertTopic")
    world.stack.client("sns", caller="alertmanager").publish(TopicArn=topic, Message=broken)
    deadline = time.monotonic() + 30
    while not world.stack.queue_depth("AlertDeadLetters") and time.monotonic() < deadline:
        time.sleep(0.1)
    answer = world.stack.client("sqs").receive_message(
        QueueUrl=world.stack.resource_id("AlertDeadLetters"), MessageAttributeNames=["All"]
    )
    (message,) = answer["Messages"]
    told = {name: value["StringValue"] for name, value in message["MessageAttributes"].items()}
    assert told["field"] == "Message"
    assert "JSON" in told["error"]
    assert 'printf "%q"' in told["remedy"]
    assert json.loads(message["Body"])["Message"] == broken
    world.stack.wait_idle(20)
    assert world.stack.queue_depth("AlertQueue") == 0
    assert world.calls.mutations() == []


def test_a_denied_first_step_by_hand_ends_red_with_its_real_error(world):
    fault = ApiFault(verb="get", status=403, service="kubernetes", caller="admit_remediation")
    world.faults.add(fault)
    try:
        arn = started(
            world,
            {
                "cluster": "train-east",
                "node": world.fleet.node_name("p5-train/1"),
                "reason": "rehearsal",
                "requested_by": "me",
            },
            name="denied",
        )
        execution = world.stack.wait_for_execution(arn, 60)
    finally:
        world.faults.remove(fault)
    assert execution.status == "FAILED"
    assert execution.error == "ClusterForbiddenError"
    assert "rbac.yaml" in json.loads(execution.cause)["errorMessage"]


def test_a_console_copy_of_a_dispatched_execution_changes_nothing(world):
    """ "New execution" in the console copies the input of an execution under another name."""
    node = world.fleet.node_name("p5-train/5")
    request = {
        "cluster": "train-east",
        "node": node,
        "reason": "rehearsal",
        "requested_by": "me",
    }
    original = started(world, request, name="the-original")
    deadline = time.monotonic() + 60
    while not world.calls.mutations() and time.monotonic() < deadline:
        time.sleep(0.1)
    copy = started(world, {"schema_version": 1, "incident_id": "the-original"}, name="the-copy")
    assert world.stack.wait_for_execution(copy, 60).status == "SUCCEEDED"
    again = started(world, request, name="the-second-request")
    assert world.stack.wait_for_execution(again, 60).status == "SUCCEEDED"
    assert world.stack.wait_for_execution(original, 100).status == "SUCCEEDED"
    verbs = [call.verb for call in world.calls.mutations() if call.service != "kubernetes"]
    assert verbs == ["TerminateInstanceInAutoScalingGroup"]
    cordons = [
        c for c in world.calls.mutations() if c.caller == "cordon_node" and "nodes" in c.target
    ]
    assert len(cordons) == 1
    ends = {
        event.detail["incident_id"]: event.detail["reason"]["code"]
        for event in world.stack.events()
        if event.detail_type == "Incident Closed"
    }
    assert ends["the-original"] == "replaced"
    assert ends["the-second-request"] == "already_open"


def test_stopping_the_execution_in_the_console_closes_the_incident(world):
    node = world.fleet.node_name("p5-train/6")
    arn = started(
        world,
        {"cluster": "train-east", "node": node, "reason": "rehearsal", "requested_by": "me"},
        name="to-be-stopped",
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if any(
            e.detail_type == "Fault Verified" and e.detail["incident_id"] == "to-be-stopped"
            for e in world.stack.events()
        ):
            break
        time.sleep(0.05)
    world.stack.stop_execution(arn, cause="a person stopped it")
    closed = []
    while not closed and time.monotonic() < deadline + 30:
        closed = [
            event.detail
            for event in world.stack.events()
            if event.detail_type == "Incident Closed"
            and event.detail["incident_id"] == "to-be-stopped"
        ]
        time.sleep(0.1)
    assert closed[0]["outcome"] == "ABORTED_BY_OPERATOR"


@pytest.mark.first
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"policy": {"modee": "enforce"}}, "modee"),
        ({"policy": {"rules": {"no-such": {}}}}, "no-such"),
        (
            {"timeline": [{"when": {"event": "Incident Openedd"}, "person": {"do": "cordon"}}]},
            "when",
        ),
        ({"expect": {}}, "expect"),
    ],
)
def test_what_is_wrong_in_a_rehearsal_is_told_before_anything_starts(
    run_scenario, tmp_path, change, told
):
    scenario = yaml.safe_load((SCENARIOS / "by_hand.yaml").read_text())
    path = tmp_path / "changed.yaml"
    path.write_text(yaml.safe_dump({**scenario, **change}))
    run = run_scenario(path)
    assert run.status == 2
    assert told in run.text
    assert "Traceback" not in run.text


@pytest.mark.first
def test_a_folder_that_is_missing_is_told_before_anything_starts(run_scenario, tmp_path):
    run = run_scenario(SCENARIOS / "by_hand.yaml", "--json", str(tmp_path / "none" / "out.json"))
    assert run.status == 2
    assert "there is no folder" in run.text
