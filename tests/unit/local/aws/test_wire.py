"""Requests told apart by service, action and target; errors in each protocol."""

import json
from typing import Any

import pytest

from local.aws.wire import AwsRequest, Protocol, error_code, error_response, read_request

SCOPE = "AWS4-HMAC-SHA256 Credential=AKIAX/20260301/eu-west-1/{}/aws4_request, SignedHeaders=host"


def request(
    service: str,
    method: str = "POST",
    path: str = "/",
    query: str = "",
    body: object = b"",
    **headers: str,
) -> AwsRequest:
    environ: dict[str, Any] = {
        "REQUEST_METHOD": method,
        "PATH_INFO": path,
        "QUERY_STRING": query,
        "HTTP_AUTHORIZATION": SCOPE.format(service),
        "CONTENT_TYPE": headers.pop("content_type", "application/json"),
        **{f"HTTP_{name.upper()}": value for name, value in headers.items()},
    }
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return read_request(environ, content)


def form(service: str, text: str) -> AwsRequest:
    return request(
        service, body=text.encode(), content_type="application/x-www-form-urlencoded; charset=utf-8"
    )


@pytest.mark.parametrize(
    ("made", "protocol", "action", "target"),
    [
        (
            request(
                "dynamodb", body={"TableName": "incidents"}, x_amz_target="DynamoDB_2012.PutItem"
            ),
            Protocol.JSON, "PutItem", "incidents",
        ),
        (
            request(
                "dynamodb",
                body={"RequestItems": {"b": [], "a": []}},
                x_amz_target="DynamoDB_20120810.BatchWriteItem",
            ),
            Protocol.JSON, "BatchWriteItem", "a,b",
        ),
        (
            request(
                "sqs",
                body={"QueueUrl": "http://127.0.0.1:1/123456789012/faults"},
                x_amz_target="AmazonSQS.SendMessage",
            ),
            Protocol.JSON, "SendMessage", "faults",
        ),
        (
            request(
                "events",
                body={"Entries": [{"EventBusName": "arn:aws:events:r:1:event-bus/own"}]},
                x_amz_target="AWSEvents.PutEvents",
            ),
            Protocol.JSON, "PutEvents", "own",
        ),
        (
            request("events", body={"Entries": [{}]}, x_amz_target="AWSEvents.PutEvents"),
            Protocol.JSON, "PutEvents", "default",
        ),
        (
            request(
                "states",
                body={"stateMachineArn": "arn:aws:states:r:1:stateMachine:remediate", "name": "n"},
                x_amz_target="AWSStepFunctions.StartExecution",
            ),
            Protocol.JSON, "StartExecution", "remediate",
        ),
        (
            form("autoscaling", "Action=TerminateInstanceInAutoScalingGroup&InstanceId=i-1"),
            Protocol.QUERY, "TerminateInstanceInAutoScalingGroup", "i-1",
        ),
        (
            form("ec2", "Action=RebootInstances&InstanceId.1=i-2"),
            Protocol.EC2, "RebootInstances", "i-2",
        ),
        (
            form("sts", "Action=AssumeRole&RoleArn=arn:aws:iam::1:role/cluster-blue"),
            Protocol.QUERY, "AssumeRole", "cluster-blue",
        ),
        (
            request(
                "lambda",
                path="/2015-03-31/functions/arn:aws:lambda:r:1:function:drain/invocations",
            ),
            Protocol.REST_JSON, "Invoke", "drain",
        ),
        (
            request("eks", "GET", "/clusters/blue"),
            Protocol.REST_JSON, "DescribeCluster", "blue",
        ),
        (
            request("eks", "GET", "/clusters/blue/node-groups/gpu"),
            Protocol.REST_JSON, "DescribeNodegroup", "gpu",
        ),
        (
            request("aps", path="/workspaces/ws-1/api/v1/query"),
            Protocol.REST_JSON, "QueryMetrics", "ws-1",
        ),
        (
            request("aps", "DELETE", "/other"),
            Protocol.REST_JSON, "DELETE /other", "/other",
        ),
        (
            request("monitoring", path="/service/X/operation/PutMetricData",
                    smithy_protocol="rpc-v2-cbor"),
            Protocol.CBOR, "PutMetricData", "/service/X/operation/PutMetricData",
        ),
    ],
)  # fmt: skip
def test_requests_tell_protocol_action_and_target(made, protocol, action, target):
    assert (made.protocol, made.action, made.target) == (protocol, action, target)
    assert made.access_key_id == "AKIAX"
    assert made.region == "eu-west-1"


def test_a_presigned_request_tells_its_key_in_the_query():
    made = read_request(
        {
            "REQUEST_METHOD": "GET",
            "QUERY_STRING": "Action=GetCallerIdentity&X-Amz-Credential="
            "ASIAY%2F20260301%2Feu-west-1%2Fsts%2Faws4_request&X-Amz-Expires=60",
        },
        b"",
    )

    assert (made.access_key_id, made.service, made.action) == ("ASIAY", "sts", "GetCallerIdentity")


def test_an_unsigned_request_has_no_service():
    made = read_request({"REQUEST_METHOD": "GET"}, b"not json")

    assert (made.service, made.json, made.path) == ("", {}, "/")


@pytest.mark.parametrize(
    ("made", "is_write"),
    [
        (form("ec2", "Action=RebootInstances"), True),
        (form("ec2", "Action=RebootInstances&DryRun=true"), False),
        (form("ec2", "Action=DescribeInstances"), False),
        (form("autoscaling", "Action=SetInstanceHealth"), True),
        (form("sns", "Action=Publish"), False),
        (request("sagemaker", x_amz_target="SageMaker.BatchReplaceClusterNodes"), True),
        (request("sagemaker", x_amz_target="SageMaker.ListClusterNodes"), False),
    ],
)
def test_only_writes_to_machines_are_infrastructure_writes(made, is_write):
    assert made.is_infrastructure_write is is_write


def test_errors_are_worded_in_the_request_s_protocol():
    json_error = error_response(
        request("sqs", x_amz_target="AmazonSQS.X"), 400, "Bad", "why", Reason="r"
    )
    rest = error_response(request("eks", "GET", "/clusters/x"), 404, "Missing", "why")
    query = error_response(form("sns", "Action=X"), 500, "Bad", "a < b")
    ec2 = error_response(form("ec2", "Action=X"), 400, "Bad", "why")
    cbor = error_response(request("monitoring", smithy_protocol="rpc-v2-cbor"), 429, "Slow", "why")

    assert json.loads(json_error.get_data()) == {"__type": "Bad", "message": "why", "Reason": "r"}
    assert rest.headers["x-amzn-ErrorType"] == "Missing"
    assert b"<Type>Receiver</Type><Code>Bad</Code><Message>a &lt; b</Message>" in query.get_data()
    assert b"<Response><Errors><Error><Code>Bad</Code>" in ec2.get_data()
    assert cbor.get_data() == b"\xa2\x66__type\x64Slow\x67message\x63why"


def test_a_status_without_a_code_of_its_own_gets_a_general_one():
    assert error_code(request("sqs", x_amz_target="AmazonSQS.X"), 418) == "ValidationException"
    assert error_code(request("sqs", x_amz_target="AmazonSQS.X"), 507) == "InternalFailure"
    assert error_code(form("sns", "Action=X"), 429) == "Throttling"
