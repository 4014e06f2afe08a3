"""The wire without a socket: what the front tells the log, and forms that no SDK would send."""

import io
import xml.etree.ElementTree as ET
from urllib.parse import urlencode

import pytest
from werkzeug.test import Client, EnvironBuilder
from werkzeug.wrappers import Request

from local.aws.autoscaling import AutoScalingFront, CapacityModel, Ec2Front
from local.aws.autoscaling_wire import Ec2Protocol, QueryProtocol, page_of

NAMESPACE = {"a": "http://autoscaling.amazonaws.com/doc/2011-01-01/"}


@pytest.fixture
def model() -> CapacityModel:
    model = CapacityModel(clock=lambda: 1000.0)
    model.add_group("gpu", desired=1)
    return model


def environ(**fields: str) -> dict[str, object]:
    return EnvironBuilder(method="POST", data=fields).get_environ()


def test_a_described_call_can_still_be_answered(model):
    front = AutoScalingFront(model)
    sick = model.members("gpu")[0].instance_id
    wsgi = environ(
        Action="TerminateInstanceInAutoScalingGroup",
        InstanceId=sick,
        ShouldDecrementDesiredCapacity="false",
    )
    expected = ("TerminateInstanceInAutoScalingGroup", sick, True)
    assert front.describe_call(wsgi) == expected
    assert front.describe_call(wsgi) == expected
    answer = front.handle(Request(wsgi))
    assert answer.status_code == 200


def test_a_request_whose_form_was_read_already_is_understood(model):
    front = AutoScalingFront(model)
    request = Request(environ(Action="DescribeAutoScalingGroups"))
    assert request.form["Action"] == "DescribeAutoScalingGroups"
    assert front.describe_call(request) == ("DescribeAutoScalingGroups", "*", False)
    assert front.handle(request).status_code == 200


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"Action": "SuspendProcesses", "AutoScalingGroupName": "gpu"},
            ("SuspendProcesses", "gpu", True),
        ),
        (
            {
                "Action": "EnterStandby",
                "AutoScalingGroupName": "gpu",
                "InstanceIds.member.1": "i-1",
                "InstanceIds.member.2": "i-2",
            },
            ("EnterStandby", "i-1,i-2", True),
        ),
        (
            {"Action": "CreateOrUpdateTags", "Tags.member.1.ResourceId": "gpu"},
            ("CreateOrUpdateTags", "gpu", True),
        ),
        (
            {"Action": "CreateOrUpdateTags"},
            ("CreateOrUpdateTags", "*", True),
        ),
        (
            {"Action": "SetDesiredCapacity", "DesiredCapacity": "many"},
            ("SetDesiredCapacity", "*", True),
        ),
        ({"Action": "Dance"}, ("Dance", "*", False)),
        ({}, ("", "*", False)),
    ],
)
def test_calls_are_described_as_asked(model, fields, expected):
    assert AutoScalingFront(model).describe_call(environ(**fields)) == expected


def test_a_dry_run_is_no_mutation(model):
    front = Ec2Front(model)
    fields = {"Action": "TerminateInstances", "InstanceId.1": "i-1"}
    assert front.describe_call(environ(**fields)) == ("TerminateInstances", "i-1", True)
    assert front.describe_call(environ(**fields, DryRun="true")) == (
        "TerminateInstances",
        "i-1",
        False,
    )


def test_answers_stand_in_the_namespace_of_the_service(model):
    answer = Client(AutoScalingFront(model)).post(data={"Action": "DescribeAutoScalingGroups"})
    root = ET.fromstring(answer.data)  # noqa: S314 - our own answer
    name = root.find(".//a:AutoScalingGroups/a:member/a:AutoScalingGroupName", NAMESPACE)
    assert name is not None
    assert name.text == "gpu"
    assert root.find("a:ResponseMetadata/a:RequestId", NAMESPACE) is not None
    assert answer.headers["Content-Type"].startswith("text/xml")


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"Action": "TerminateInstanceInAutoScalingGroup", "InstanceId": "i-1"}, "ValidationError"),
        (
            {
                "Action": "TerminateInstanceInAutoScalingGroup",
                "ShouldDecrementDesiredCapacity": "false",
            },
            "ValidationError",
        ),
        (
            {
                "Action": "TerminateInstanceInAutoScalingGroup",
                "ShouldDecrementDesiredCapacity": "false",
                "InstanceIds.member.1": "i-1",
            },
            "ValidationError",
        ),
        (
            {
                "Action": "TerminateInstanceInAutoScalingGroup",
                "InstanceId": "i-1",
                "ShouldDecrementDesiredCapacity": "perhaps",
            },
            "ValidationError",
        ),
        ({"Action": "SuspendProcesses"}, "ValidationError"),
        ({"Action": "CreateOrUpdateTags"}, "ValidationError"),
        ({"Action": "SetDesiredCapacity", "AutoScalingGroupName": "gpu"}, "ValidationError"),
        (
            {"Action": "SuspendProcesses", "AutoScalingGroupName.x": "gpu"},
            "MalformedQueryString",
        ),
        (
            {"Action": "DescribeAutoScalingGroups", "AutoScalingGroupNames.member.one": "gpu"},
            "MalformedQueryString",
        ),
        (
            {
                "Action": "DescribeAutoScalingGroups",
                "NextToken": "a",
                "NextToken.member.1": "gpu",
            },
            "MalformedQueryString",
        ),
    ],
)
def test_an_incomplete_form_is_refused_and_changes_nothing(model, fields, code):
    before = (model.groups(), model.instances())
    answer = Client(AutoScalingFront(model)).post(data=fields)
    assert answer.status_code == 400
    root = ET.fromstring(answer.data)  # noqa: S314 - our own answer
    found = root.find("a:Error/a:Code", NAMESPACE)
    assert found is not None
    assert found.text == code
    assert (model.groups(), model.instances()) == before


def test_an_ec2_call_without_ids_is_refused(model):
    answer = Client(Ec2Front(model)).post(data={"Action": "RebootInstances"})
    assert answer.status_code == 400
    assert b"<Response><Errors><Error><Code>MissingParameter</Code>" in answer.data


def test_an_answer_with_a_member_that_aws_does_not_have_is_a_bug():
    protocol = QueryProtocol("autoscaling")
    operation = protocol.operation("DescribeAutoScalingGroups")
    assert operation is not None
    with pytest.raises(KeyError, match="no member Groups"):
        protocol.answer(operation, {"Groups": []}, "r")


def test_lists_are_numbered_as_each_protocol_does():
    query = QueryProtocol("autoscaling")
    operation = query.operation("DescribeAutoScalingGroups")
    assert operation is not None
    form = {f"AutoScalingGroupNames.member.{number}": f"g{number}" for number in range(1, 12)}
    names = query.parse(operation, {**form, "MaxRecords": "60", "Unknown": "x"})
    assert names == {
        "AutoScalingGroupNames": [f"g{number}" for number in range(1, 12)],
        "MaxRecords": 60,
    }
    ec2 = Ec2Protocol("ec2")
    describe = ec2.operation("DescribeInstances")
    assert describe is not None
    parsed = ec2.parse(
        describe,
        {
            "InstanceId.1": "i-1",
            "Filter.1.Name": "tag:a",
            "Filter.1.Value.1": "b",
            "MaxResults": "5",
        },
    )
    assert parsed == {
        "InstanceIds": ["i-1"],
        "Filters": [{"Name": "tag:a", "Values": ["b"]}],
        "MaxResults": 5,
    }


def test_a_page_goes_on_after_an_item_that_is_gone():
    keys = ["a", "b", "c", "d"]
    page, token = page_of(keys, keys, 2, None)
    assert page == ["a", "b"]
    left = ["a", "c", "d"]
    assert page_of(left, left, 2, token) == (["c", "d"], None)


def test_a_body_is_read_from_a_stream_once(model):
    body = urlencode({"Action": "DescribeAutoScalingGroups"}).encode()
    wsgi = environ()
    wsgi["wsgi.input"] = io.BytesIO(body)
    wsgi["CONTENT_LENGTH"] = str(len(body))
    front = AutoScalingFront(model)
    assert front.describe_call(wsgi)[0] == "DescribeAutoScalingGroups"
    assert front.handle(Request(wsgi)).status_code == 200
