"""The front: who calls, what is recorded, which faults are injected, what is mounted."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError, ConnectionClosedError
from werkzeug.wrappers import Response

from local.aws.front import Front, FrontError
from local.aws.services import EksService, StsService
from local.calls import ApiCall, ApiFault, CallLog, FaultPlan
from local.identity import Identities

MakeClient = Callable[..., Any]


@pytest.fixture
def client(front: Front) -> Iterator[MakeClient]:
    clients = []

    def make(service: str, caller: str = "drain_node", credential: Any = None) -> Any:
        credential = credential or front.identities.issue(caller)
        made: Any = boto3.Session().client(
            service,  # type: ignore[call-overload]
            endpoint_url=front.url,
            region_name=front.region,
            aws_access_key_id=credential.access_key_id,
            aws_secret_access_key=credential.secret_access_key,
            aws_session_token=credential.session_token,
            config=Config(retries={"total_max_attempts": 1}),
        )
        clients.append(made)
        return made

    yield make
    for one in clients:
        one.close()


@pytest.fixture
def fault(front: Front) -> Iterator[Callable[..., ApiFault]]:
    added = []

    def add(*arguments: Any, **keywords: Any) -> ApiFault:
        made = ApiFault(*arguments, **keywords)
        front.faults.add(made)
        added.append(made)
        return made

    yield add
    for one in added:
        front.faults.remove(one)


def last_call(front: Front) -> ApiCall:
    return front.log.calls()[-1]


@pytest.fixture
def table(client: MakeClient) -> Iterator[str]:
    dynamodb = client("dynamodb", "deployment")
    dynamodb.create_table(
        TableName="incidents",
        BillingMode="PAY_PER_REQUEST",
        AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
        KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
    )
    yield "incidents"
    dynamodb.delete_table(TableName="incidents")


def test_each_call_is_recorded_with_its_caller_action_and_target(front, client, table):
    client("dynamodb").put_item(TableName=table, Item={"id": {"S": "1"}})

    call = last_call(front)
    assert (call.service, call.verb, call.target) == ("dynamodb", "PutItem", "incidents")
    assert (call.caller, call.status, call.is_mutation) == ("drain_node", 200, False)


def test_a_key_that_nobody_holds_is_unknown(front, client):
    credential = Identities().issue("stranger")

    client("sqs", credential=credential).list_queues()

    assert last_call(front).caller == "unknown"


def test_targets_are_told_from_each_protocol(front, client):
    client("sqs").create_queue(QueueName="faults")
    assert last_call(front).target == "faults"
    client("sns").create_topic(Name="alerts")
    assert last_call(front).target == "alerts"
    with pytest.raises(ClientError):
        client("ec2").describe_instances(InstanceIds=["i-0abc"])
    assert (last_call(front).target, last_call(front).service) == ("i-0abc", "ec2")
    with pytest.raises(ClientError):
        client("dynamodb").transact_write_items(
            TransactItems=[
                {"Delete": {"TableName": "b", "Key": {"id": {"S": "1"}}}},
                {"Delete": {"TableName": "a", "Key": {"id": {"S": "1"}}}},
            ]
        )
    assert last_call(front).target == "a,b"


def test_only_successful_writes_to_machines_count_as_mutations(front, client):
    ec2 = client("ec2")
    image = ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
    assert not last_call(front).is_mutation
    with pytest.raises(ClientError):
        ec2.run_instances(ImageId=image, MinCount=1, MaxCount=1, DryRun=True)
    assert not last_call(front).is_mutation
    instance = ec2.run_instances(ImageId=image, MinCount=1, MaxCount=1)["Instances"][0]
    assert last_call(front).is_mutation

    ec2.reboot_instances(InstanceIds=[instance["InstanceId"]])

    assert last_call(front).is_mutation
    assert last_call(front).target == instance["InstanceId"]


@pytest.mark.parametrize(
    ("call", "status", "code"),
    [
        ("dynamodb.list_tables", 400, "ValidationException"),
        ("dynamodb.list_tables", 429, "ProvisionedThroughputExceededException"),
        ("sqs.list_queues", 403, "AccessDeniedException"),
        ("sns.list_topics", 429, "Throttling"),
        ("sts.get_caller_identity", 503, "ServiceUnavailable"),
        ("ec2.describe_instances", 503, "Unavailable"),
        ("ec2.describe_instances", 403, "UnauthorizedOperation"),
        ("eks.list_clusters", 500, "ServerException"),
        ("lambda.list_functions", 429, "TooManyRequestsException"),
        ("cloudwatch.list_metrics", 429, "ThrottlingException"),
        ("events.list_rules", 500, "InternalException"),
        ("scheduler.list_schedules", 404, "ResourceNotFoundException"),
    ],
)
def test_a_fault_is_an_error_in_the_service_s_own_words(front, client, fault, call, status, code):
    service, _, method = call.partition(".")
    verb = "".join(word.title() for word in method.split("_"))
    fault(verb, status, times=1)

    with pytest.raises(ClientError) as caught:
        getattr(client(service), method)()

    assert caught.value.response["Error"]["Code"] == code
    assert caught.value.response["Error"]["Message"] == "injected by the fault plan"
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == status
    assert (last_call(front).verb, last_call(front).status) == (verb, status)


def test_a_fault_before_the_call_prevents_it(client, fault, table):
    fault("PutItem", 500, service="dynamodb", times=1)

    with pytest.raises(ClientError, match="InternalServerError"):
        client("dynamodb").put_item(TableName=table, Item={"id": {"S": "1"}})

    assert client("dynamodb").scan(TableName=table)["Count"] == 0


def test_a_fault_after_the_call_loses_only_its_answer(client, fault, table):
    fault("PutItem", 500, times=1, headers={"x-local-when": "after"})

    with pytest.raises(ClientError, match="InternalServerError"):
        client("dynamodb").put_item(TableName=table, Item={"id": {"S": "1"}})

    assert client("dynamodb").scan(TableName=table)["Count"] == 1


def test_a_mutation_whose_answer_is_lost_is_recorded_as_one(front, client, fault):
    ec2 = client("ec2")
    image = ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
    fault("RunInstances", 0, times=1, headers={"x-local-when": "after"})

    with pytest.raises(ConnectionClosedError):
        ec2.run_instances(ImageId=image, MinCount=1, MaxCount=1)

    assert (last_call(front).status, last_call(front).is_mutation) == (0, True)


def test_a_fault_is_for_its_caller_only(client, fault):
    fault("ListQueues", 403, caller="drain_node")

    client("sqs", "cordon_node").list_queues()
    with pytest.raises(ClientError, match="AccessDenied"):
        client("sqs", "drain_node").list_queues()


def test_a_fault_may_bring_its_own_body_and_delay(client, fault):
    body = json.dumps({"__type": "SlowDown", "message": "later"})
    fault("ListQueues", 400, body=body, headers={"x-local-delay-s": "0.3"}, times=1)
    started = time.monotonic()

    with pytest.raises(ClientError, match="SlowDown"):
        client("sqs").list_queues()

    assert time.monotonic() - started >= 0.3


def test_an_assumed_role_s_calls_are_known_as_the_caller_s(front, client):
    StsService(front)
    answer = client("sts", "cordon_node").assume_role(
        RoleArn="arn:aws:iam::210987654321:role/nodemend-cluster-blue", RoleSessionName="nodemend"
    )

    assert answer["AssumedRoleUser"]["Arn"] == (
        "arn:aws:sts::210987654321:assumed-role/nodemend-cluster-blue/nodemend"
    )
    credential = front.identities.lookup(answer["Credentials"]["AccessKeyId"])
    assert credential is not None
    assert credential.secret_access_key == answer["Credentials"]["SecretAccessKey"]
    assert credential.session_token == answer["Credentials"]["SessionToken"]
    client("eks", credential=credential).list_clusters()
    assert last_call(front).caller == "cordon_node"


def test_an_arn_that_is_no_role_cannot_be_assumed(front, client):
    StsService(front)

    with pytest.raises(ClientError, match="ValidationError"):
        client("sts").assume_role(
            RoleArn="arn:aws:iam::210987654321:user/me-and-you", RoleSessionName="nodemend"
        )


def test_a_registered_cluster_is_described_and_another_is_not_found(front, client):
    EksService(front).register("blue", "https://127.0.0.1:6443", "-----BEGIN CERTIFICATE-----")
    eks = client("eks")

    cluster = eks.describe_cluster(name="blue")["cluster"]

    assert cluster["endpoint"] == "https://127.0.0.1:6443"
    assert cluster["status"] == "ACTIVE"
    assert cluster["certificateAuthority"]["data"].startswith("LS0tLS1CRUdJTi")
    with pytest.raises(ClientError, match="ResourceNotFoundException"):
        eks.describe_cluster(name="green")


def test_a_mounted_application_serves_its_requests_before_moto(front, client):
    def app(environ: dict[str, Any], start_response: Any) -> Any:
        body = environ["wsgi.input"].read()
        text = f"<r><Code>{len(body)}</Code></r>"
        return Response(text, status=418)(environ, start_response)

    front.mount(lambda request: request.service == "autoscaling", app)

    with pytest.raises(ClientError):
        client("autoscaling").describe_auto_scaling_groups()

    assert (last_call(front).service, last_call(front).status) == ("autoscaling", 418)


def test_a_mounted_application_may_describe_its_calls(front, client, fault):
    def describe(environ: dict[str, Any]) -> tuple[str, str, bool]:
        return "Cut", environ["wsgi.input"].read().decode()[:6], True

    answer = Response("{}", content_type="application/x-amz-json-1.0")
    front.mount(lambda request: request.service == "kinesis", answer, describe=describe)
    kinesis = client("kinesis")

    kinesis.list_streams()
    assert (last_call(front).verb, last_call(front).is_mutation) == ("Cut", True)
    fault("Cut", 403, service="kinesis")
    with pytest.raises(ClientError, match="AccessDenied"):
        kinesis.list_streams()
    assert not last_call(front).is_mutation


def test_an_application_that_reports_itself_is_neither_recorded_nor_failed(front, client, fault):
    front.mount(
        lambda request: request.service == "aps",
        Response('{"workspace": {"workspaceId": "ws-1"}}', content_type="application/json"),
        observed=False,
    )
    fault("DescribeWorkspace", 500)
    known = len(front.log.calls())

    client("amp").describe_workspace(workspaceId="ws-1")

    assert len(front.log.calls()) == known


def test_conditional_writes_are_right_under_concurrency(client, table):
    """Twelve writers, each adding to a versioned counter by compare and swap."""
    dynamodb = client("dynamodb")
    dynamodb.put_item(TableName=table, Item={"id": {"S": "g"}, "v": {"N": "0"}})
    won: list[int] = []

    def add() -> None:
        while True:
            item = dynamodb.get_item(TableName=table, Key={"id": {"S": "g"}}, ConsistentRead=True)[
                "Item"
            ]
            version = int(item["v"]["N"])
            try:
                dynamodb.put_item(
                    TableName=table,
                    Item={"id": {"S": "g"}, "v": {"N": str(version + 1)}},
                    ConditionExpression="v = :v",
                    ExpressionAttributeValues={":v": {"N": str(version)}},
                )
            except ClientError:
                continue
            won.append(version)
            return

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(won) == list(range(8))


def test_a_handler_s_own_fault_is_a_500_that_says_what_went_wrong(front, client, caplog):
    def broken(_request: Any) -> Response:
        raise KeyError("the emulator's own mistake")

    front.route("ssm", broken)

    with pytest.raises(ClientError, match="own mistake"):
        client("ssm").describe_parameters()
    assert "ssm DescribeParameters failed" in caplog.text


def test_a_second_front_in_the_process_is_refused(front):
    second = Front(identities=Identities(), log=CallLog(), faults=FaultPlan(), region=front.region)

    with pytest.raises(FrontError, match="another front"):
        second.start()
