"""What was done before, in DynamoDB: one item for each incident of each machine and GPU.

| pk | sk | what |
|---|---|---|
| `HISTORY#<cluster>#instance/<id>` | `<closed at>#<incident id>` | an incident of this machine |
| `HISTORY#<cluster>#gpu/<uuid>` | `<closed at>#<incident id>` | an incident of this GPU |
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nodemend.adapters._aws import (
    batch_put,
    decode_item,
    encode_item,
    epoch_s,
    parse_stamp,
    stamp,
    translating,
)
from nodemend.application.ports import Clock
from nodemend.domain.faults import Rung
from nodemend.domain.history import KEEP, RECALLED, PastIncident, Subject, merged

if TYPE_CHECKING:
    from mypy_boto3_dynamodb.client import DynamoDBClient


class DynamoHistory:
    """The record of machines and GPUs; the key makes a repeated note the same item."""

    def __init__(self, *, table: str, client: "DynamoDBClient", clock: Clock) -> None:
        self._table = table
        self._client = client
        self._clock = clock

    def remember(self, cluster: str, subjects: Iterable[Subject], past: PastIncident) -> None:
        """Note an incident under each subject; the same incident again changes nothing."""
        values: dict[str, Any] = {
            "incident_id": past.incident_id,
            "at": stamp(past.at),
            "fault": past.fault,
            "outcome": past.outcome,
            "instance_id": past.instance_id,
            "gpu_uuids": list(past.gpu_uuids),
            "rungs": [str(rung) for rung in past.rungs],
            "replacement_instance_id": past.replacement_instance_id,
            "generation": past.generation,
            "expires_at": epoch_s(past.at + KEEP),
        }
        batch_put(
            self._client,
            self._table,
            (
                encode_item(
                    {
                        "pk": _pk(cluster, subject),
                        "sk": f"{stamp(past.at)}#{past.incident_id}",
                        **values,
                    }
                )
                for subject in dict.fromkeys(subjects)
            ),
        )

    def recall(self, cluster: str, subjects: Iterable[Subject]) -> tuple[PastIncident, ...]:
        """Return the newest entries of all subjects, each incident once, newest first.

        What has expired is not returned, also before DynamoDB deletes it (which takes days).
        """
        oldest = stamp(self._clock.now() - KEEP)
        return merged(
            [_past(item) for item in self._newest(_pk(cluster, subject), oldest)]
            for subject in dict.fromkeys(subjects)
        )

    def _newest(self, pk: str, oldest: str) -> list[dict[str, Any]]:
        with translating("dynamodb:Query"):
            answer = self._client.query(
                TableName=self._table,
                KeyConditionExpression="pk = :pk AND sk > :oldest",
                ExpressionAttributeValues={":pk": {"S": pk}, ":oldest": {"S": oldest}},
                ScanIndexForward=False,
                Limit=RECALLED,
                ConsistentRead=True,
            )
        return [decode_item(item) for item in answer["Items"]]


def _pk(cluster: str, subject: Subject) -> str:
    return f"HISTORY#{cluster}#{subject.key}"


def _past(values: dict[str, Any]) -> PastIncident:
    return PastIncident(
        incident_id=values["incident_id"],
        at=parse_stamp(values["at"]),
        fault=values["fault"],
        outcome=values["outcome"],
        instance_id=values["instance_id"],
        gpu_uuids=tuple(values["gpu_uuids"]),
        rungs=tuple(Rung(rung) for rung in values["rungs"]),
        replacement_instance_id=values.get("replacement_instance_id", ""),
        generation=int(values.get("generation", 0)),
    )
