"""The guard items: one per cluster, each write conditional on the version that was read."""

import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from nodemend.adapters._aws import Item, decode_item, encode_item, translating, wins
from nodemend.domain.errors import InvalidInputError
from nodemend.domain.guard import Guard

if TYPE_CHECKING:
    from mypy_boto3_dynamodb.client import DynamoDBClient

_DOCUMENT = TypeAdapter(Guard)


class DynamoGuards:
    """Guards in the items `GUARD#<cluster>`/`GUARD`."""

    def __init__(self, *, table: str, client: "DynamoDBClient") -> None:
        self._table = table
        self._client = client

    def load(self, cluster: str) -> Guard:
        """Return the cluster's guard (consistent read); version 0 if there is none yet.

        Raises:
            InvalidInputError: if this release cannot read what is stored.
        """
        with translating("dynamodb:GetItem"):
            answer = self._client.get_item(
                TableName=self._table, Key=_key(cluster), ConsistentRead=True
            )
        if "Item" not in answer:
            return Guard(cluster)
        values = decode_item(answer["Item"])
        try:
            guard = _DOCUMENT.validate_python(values["document"])
        except ValidationError as error:
            raise InvalidInputError(
                f"guard of {cluster}",
                f"cannot be read by this release: {error}",
                "deploy the release that wrote it, or a newer one",
            ) from error
        return replace(guard, version=values["version"])

    def store(self, guard: Guard) -> bool:
        """Write the guard as the next version if the stored one is still `guard.version`.

        The first write is conditional too: of two dispatchers that both found none, one loses.
        """
        document: dict[str, Any] = _DOCUMENT.dump_python(guard, mode="json")
        write_id = uuid.uuid4().hex
        item = _key(guard.cluster) | encode_item(
            {"document": document, "version": guard.version + 1, "write_id": write_id}
        )
        if guard.version == 0:
            return wins(
                "dynamodb:PutItem",
                lambda: self._client.put_item(
                    TableName=self._table,
                    Item=item,
                    ConditionExpression="attribute_not_exists(pk)",
                    ReturnValuesOnConditionCheckFailure="ALL_OLD",
                ),
                write_id=write_id,
            )
        return wins(
            "dynamodb:PutItem",
            lambda: self._client.put_item(
                TableName=self._table,
                Item=item,
                ConditionExpression="version = :read",
                ExpressionAttributeValues=encode_item({":read": guard.version}),
                ReturnValuesOnConditionCheckFailure="ALL_OLD",
            ),
            write_id=write_id,
        )


def _key(cluster: str) -> Item:
    return encode_item({"pk": f"GUARD#{cluster}", "sk": "GUARD"})
