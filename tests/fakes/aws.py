"""The product's table in moto, and faults on the wire of a real client."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import boto3
from botocore.awsrequest import AWSResponse
from botocore.compat import HTTPHeaders
from botocore.exceptions import EndpointConnectionError
from moto import mock_aws
from moto.dynamodb.responses import DynamoHandler

from nodemend.adapters._aws import client_config

REGION = "eu-central-1"
TABLE = "nodemend"


def aws_client(service: str, **options: Any) -> Any:
    """Return a client with the product's settings and credentials that are worth nothing."""
    return boto3.client(  # type: ignore[call-overload]
        service,
        region_name=REGION,
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
        config=client_config(),
        **options,
    )


@contextmanager
def dynamodb() -> Iterator[Any]:
    """Yield a client of a DynamoDB that has the product's table.

    DynamoDB carries out the writes of one item one after the other, and no answer shows half of
    one; moto's threads do not care for either, so a lock does it here, around whole requests.
    """
    lock = threading.RLock()
    original = DynamoHandler.call_action

    def one_at_a_time(handler: DynamoHandler) -> Any:
        with lock:
            return original(handler)

    with mock_aws(), patch.object(DynamoHandler, "call_action", one_at_a_time):
        client = aws_client("dynamodb")
        create_table(client)
        yield client


def create_table(client: Any) -> None:
    """Create the table as the template defines it."""
    strings = ("pk", "sk", "open_cluster", "outbox_pending", "opened_at")
    client.create_table(
        TableName=TABLE,
        BillingMode="PAY_PER_REQUEST",
        AttributeDefinitions=[{"AttributeName": name, "AttributeType": "S"} for name in strings],
        KeySchema=_schema("pk", "sk"),
        GlobalSecondaryIndexes=[
            {
                "IndexName": name,
                "KeySchema": _schema(hash_key, "opened_at"),
                "Projection": {"ProjectionType": "KEYS_ONLY"},
            }
            for name, hash_key in (("open", "open_cluster"), ("outbox", "outbox_pending"))
        ],
    )


def _schema(hash_key: str, range_key: str) -> list[dict[str, str]]:
    return [
        {"AttributeName": hash_key, "KeyType": "HASH"},
        {"AttributeName": range_key, "KeyType": "RANGE"},
    ]


Answer = tuple[int, dict[str, Any]]


@dataclass
class Wire:
    """Answers a client's calls in place of AWS, and records what was asked.

    The request is built, validated and serialised by botocore; only what would travel is cut off.
    """

    client: Any
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """(operation, JSON body) of each call, answered here or not."""
    _answers: list[tuple[str, Callable[[dict[str, Any]], Answer | None]]] = field(
        default_factory=list
    )

    def __post_init__(self) -> None:
        service = self.client.meta.service_model.service_name
        self.client.meta.events.register(f"before-call.{service}", self._before_call)

    def asked(self, operation: str) -> list[dict[str, Any]]:
        """Return the bodies of the calls of one operation."""
        return [body for name, body in self.requests if name == operation]

    def answer(
        self, operation: str, answer: Callable[[dict[str, Any]], Answer | None], times: int = 1
    ) -> None:
        """Answer the next calls; None lets a call pass to AWS (moto)."""
        self._answers += [(operation, answer)] * times

    def fail(self, operation: str, code: str, status: int = 400, times: int = 1) -> None:
        """Answer the next calls with an error."""
        error = {"Error": {"Code": code, "Message": "told to"}}
        self.answer(operation, lambda _: (status, dict(error)), times)

    def drop(self, operation: str, times: int = 1) -> None:
        """Let the next calls find nobody to connect to."""

        def unreachable(_: dict[str, Any]) -> Answer:
            raise EndpointConnectionError(endpoint_url="https://aws.test")

        self.answer(operation, unreachable, times)

    def repeat(self, operation: str) -> None:
        """Let the SDK send the next call twice, as it does when the first answer is lost."""
        service = self.client.meta.service_model.service_name
        done: list[bool] = []

        def once(**_: Any) -> int | None:
            if done:
                return None
            done.append(True)
            return 0

        self.client.meta.events.register(f"needs-retry.{service}.{operation}", once)

    def _before_call(self, *, model: Any, params: dict[str, Any], **_: Any) -> Any:
        body = params.get("body") or b"{}"
        asked = json.loads(body) if isinstance(body, (bytes, str)) else {}
        self.requests.append((model.name, asked))
        for index, (operation, answer) in enumerate(self._answers):
            if operation == model.name:
                del self._answers[index]
                result = answer(asked)
                return result and _response(*result)
        return None


def _response(status: int, parsed: dict[str, Any]) -> tuple[AWSResponse, dict[str, Any]]:
    metadata = {"ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": {}}}
    return AWSResponse("https://aws.test", status, HTTPHeaders(), None), parsed | metadata
