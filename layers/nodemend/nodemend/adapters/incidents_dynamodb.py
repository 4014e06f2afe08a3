"""The incident records, and what keeps one node to one incident, in one DynamoDB table.

| pk | sk | what |
|---|---|---|
| `INCIDENT#<id>` | `RECORD` | the record as `document`, its outbox, what indexes and people read |
| `NODE#<cluster>#<uid>` | `OPEN` | which incident the node has now |
| `NODE#<cluster>#<uid>` | `HANDLED#<boot id>#<fault key>` | until when a fault counts as handled |
| `INSTANCE#<id>` | `CLAIM` | which incident counts this instance as its replacement |

Two sparse indexes, both with keys alone as their projection, so that a write that changes neither
key costs nothing there: `open` (`open_cluster`, `opened_at`) has the incidents that are not closed,
`outbox` (`outbox_pending`, `opened_at`) those with events that are not sent yet.

The document is the whole `Incident` without `new_events`. Readers ignore fields that they do not
know and take the default for those that are missing, because running executions outlive a deploy.
"""

import json
import logging
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError
from pydantic import TypeAdapter, ValidationError

from nodemend.adapters._aws import (
    Item,
    batch_get,
    decode_item,
    encode,
    encode_detail,
    encode_item,
    epoch_s,
    error_code,
    item_in,
    parse_stamp,
    stamp,
    translating,
    wins,
)
from nodemend.application.ports import Clock
from nodemend.contracts.events import incident_detail
from nodemend.domain.errors import AwsUnavailableError, ConcurrentUpdateError, InvalidInputError
from nodemend.domain.findings import most_severe
from nodemend.domain.incidents import Incident, IncidentState
from nodemend.domain.nodes import NodeRef

if TYPE_CHECKING:
    from mypy_boto3_dynamodb.client import DynamoDBClient

_logger = logging.getLogger(__name__)

OPEN_INDEX = "open"
OUTBOX_INDEX = "outbox"
PENDING = "1"
"""The one value of `outbox_pending`."""

KEEP_CLOSED = timedelta(days=400)
"""A year's report can still be made from the records when the year is over."""

KEEP_CLAIM = timedelta(days=30)
"""Far longer than any incident; instance ids are not used again."""

DOCUMENT_LIMIT = 192 * 1024
"""Bytes of a document. An item holds 400 KB, and the outbox needs its share when EventBridge does
not answer: three events of the largest kind, or some eighty usual ones."""

_TIMELINE_KEPT = 20
_CLAIM_ROUNDS = 5
_NEVER_STORED = {"new_events"}

_DOCUMENT = TypeAdapter(Incident)


class DynamoIncidents:
    """Incidents in DynamoDB; every write is conditional, and no transaction is needed."""

    def __init__(self, *, table: str, client: "DynamoDBClient", clock: Clock) -> None:
        self._table = table
        self._client = client
        self._clock = clock

    # --- the node's one incident ----------------------------------------------------------------

    def claim_node(self, cluster: str, node_uid: str, incident_id: str) -> str:
        """Make `incident_id` the node's open incident unless it has one; return the one it has.

        Raises:
            InvalidInputError: if the UID is empty: one pointer would stand for all such nodes.
            AwsUnavailableError: if the pointer comes and goes all the time.
        """
        if not node_uid:
            raise InvalidInputError(
                "node.uid", "is empty", "resolve the node to its Node object first"
            )
        key = encode_item({"pk": _node_pk(cluster, node_uid), "sk": "OPEN"})
        for _ in range(_CLAIM_ROUNDS):
            holder = self._put_claim({**key, "incident_id": {"S": incident_id}})
            if holder:
                return holder
        raise AwsUnavailableError(f"dynamodb:PutItem: the pointer of node {node_uid} is contended")

    def _put_claim(self, item: Item) -> str:
        """Return who holds the pointer now; empty if its holder has just let it go."""
        with translating("dynamodb:PutItem"):
            try:
                self._client.put_item(
                    TableName=self._table,
                    Item=item,
                    ConditionExpression="attribute_not_exists(pk)",
                    ReturnValuesOnConditionCheckFailure="ALL_OLD",
                )
            except ClientError as error:
                if error_code(error) != "ConditionalCheckFailedException":
                    raise
                held = item_in(error) or self._get({"pk": item["pk"], "sk": item["sk"]})
                return str(decode_item(held).get("incident_id", ""))
        return str(item["incident_id"]["S"])

    def release_node(self, cluster: str, node_uid: str, incident_id: str) -> None:
        """Drop the pointer, only if it still means this incident."""
        if not node_uid:
            return
        wins(
            "dynamodb:DeleteItem",
            lambda: self._client.delete_item(
                TableName=self._table,
                Key=encode_item({"pk": _node_pk(cluster, node_uid), "sk": "OPEN"}),
                ConditionExpression="incident_id = :mine",
                ExpressionAttributeValues={":mine": {"S": incident_id}},
            ),
        )

    # --- records --------------------------------------------------------------------------------

    def create(self, incident: Incident) -> bool:
        """Store a new record with its events in one write; False if the id exists.

        It is stored under `incident.version`, so the caller may go on to `save` the same value
        without its `new_events`.
        """
        fitting = _fit(incident)
        write_id = uuid.uuid4().hex
        outbox = _outbox_of(fitting)
        pending = {"outbox_pending": {"S": PENDING}} if outbox else {}
        item = {
            **encode_item({"pk": _incident_pk(incident.id), "sk": "RECORD"}),
            **_attributes(fitting, write_id),
            "outbox": encode(outbox),
            **pending,
        }
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

    def get(self, incident_id: str) -> Incident | None:
        """Return a record (consistent read), or None.

        Raises:
            InvalidInputError: if the stored document cannot be read by this release.
        """
        item = self._get(encode_item({"pk": _incident_pk(incident_id), "sk": "RECORD"}))
        return _incident_of(item) if item else None

    def save(self, incident: Incident) -> Incident:
        """Store the record and put its `new_events` in the outbox, in one conditional write.

        Only its new events are added to the outbox: what a publisher has removed meanwhile stays
        removed. A closed record is final, whoever comes late (case R33).

        Raises:
            ConcurrentUpdateError: if the stored version is not `incident.version`, or the stored
                record is closed.
        """
        stored = replace(_fit(incident), version=incident.version + 1)
        outbox = _outbox_of(stored)
        write_id = uuid.uuid4().hex
        sets = _attributes(stored, write_id)
        if outbox:
            sets["outbox_pending"] = {"S": PENDING}
        names = {f"#{name}": name for name in sets} | {"#outbox": "outbox"}
        values = {f":{name}": value for name, value in sets.items()}
        clauses = [f"#{name} = :{name}" for name in sets]
        for number, (event_id, entry) in enumerate(outbox.items()):
            names[f"#event{number}"] = event_id
            values[f":event{number}"] = encode(entry)
            clauses.append(f"#outbox.#event{number} = :event{number}")
        if not outbox:
            del names["#outbox"]
        expression = "SET " + ", ".join(clauses)
        if stored.is_closed:
            names["#open_cluster"] = "open_cluster"
            expression += " REMOVE #open_cluster"
        values[":read"] = encode(incident.version)
        values[":closed"] = {"S": IncidentState.CLOSED.value}
        is_saved = wins(
            "dynamodb:UpdateItem",
            lambda: self._client.update_item(
                TableName=self._table,
                Key=encode_item({"pk": _incident_pk(incident.id), "sk": "RECORD"}),
                UpdateExpression=expression,
                ConditionExpression="#version = :read AND #state <> :closed",
                ExpressionAttributeNames=names,
                ExpressionAttributeValues=values,
                ReturnValuesOnConditionCheckFailure="ALL_OLD",
            ),
            write_id=write_id,
        )
        if not is_saved:
            raise ConcurrentUpdateError(
                f"incident {incident.id} is not at version {incident.version} any more, or closed"
            )
        return replace(stored, new_events=())

    def list_open(self, cluster: str | None) -> Sequence[Incident]:
        """Return incidents that are not closed, oldest first; None: of all clusters.

        The index is eventually consistent, the records behind it are read consistently: none
        that is closed is returned. One that cannot be read is logged and left out, so that it
        does not stop all others.
        """
        keys = self._open_keys(cluster)
        found = []
        for item in batch_get(self._client, self._table, keys, consistent=True):
            try:
                incident = _incident_of(item)
            except InvalidInputError:
                _logger.exception("%s is left out of the open incidents", item["pk"]["S"])
                continue
            if not incident.is_closed:
                found.append(incident)
        return sorted(found, key=lambda incident: (incident.opened_at, incident.id))

    def _open_keys(self, cluster: str | None) -> list[Item]:
        index = {
            "TableName": self._table,
            "IndexName": OPEN_INDEX,
            "ProjectionExpression": "pk, sk",
        }
        if cluster is None:
            # The index holds open incidents only, so that reading all of it is cheap.
            with translating("dynamodb:Scan"):
                scanned = self._client.get_paginator("scan").paginate(**index)  # type: ignore[arg-type]
                return [{"pk": i["pk"], "sk": i["sk"]} for page in scanned for i in page["Items"]]
        with translating("dynamodb:Query"):
            queried = self._client.get_paginator("query").paginate(
                KeyConditionExpression="open_cluster = :cluster",
                ExpressionAttributeValues={":cluster": {"S": cluster}},
                **index,  # type: ignore[arg-type]
            )
            return [{"pk": i["pk"], "sk": i["sk"]} for page in queried for i in page["Items"]]

    # --- claims and the ledger ------------------------------------------------------------------

    def claim_instance(self, instance_id: str, incident_id: str) -> bool:
        """Claim a replacement instance; False if another incident has claimed it."""
        item = encode_item(
            {
                "pk": f"INSTANCE#{instance_id}",
                "sk": "CLAIM",
                "incident_id": incident_id,
                "expires_at": epoch_s(self._clock.now() + KEEP_CLAIM),
            }
        )
        return wins(
            "dynamodb:PutItem",
            lambda: self._client.put_item(
                TableName=self._table,
                Item=item,
                ConditionExpression="attribute_not_exists(pk) OR incident_id = :mine",
                ExpressionAttributeValues={":mine": {"S": incident_id}},
            ),
        )

    def handled_until(
        self, cluster: str, node: NodeRef, keys: Iterable[str]
    ) -> Mapping[str, datetime]:
        """Return until when which fault keys count as handled on this boot of the node.

        What has expired is not returned, also before DynamoDB deletes it (which takes days).
        """
        now = self._clock.now()
        wanted = [_handled_key(cluster, node, key) for key in dict.fromkeys(keys)]
        found = {}
        for item in batch_get(self._client, self._table, wanted, consistent=True):
            values = decode_item(item)
            until = parse_stamp(values["until"])
            if until > now:
                found[values["fault_key"]] = until
        return found

    def mark_handled(
        self, cluster: str, node: NodeRef, keys: Iterable[str], until: datetime
    ) -> None:
        """Note fault keys as handled on this boot of the node.

        A later time that is stored already stays: a duplicate that comes late shortens nothing.
        """
        for key in dict.fromkeys(keys):
            item = _handled_key(cluster, node, key) | encode_item(
                {"fault_key": key, "until": stamp(until), "expires_at": epoch_s(until) + 1}
            )
            self._put_later(item)

    def _put_later(self, item: Item) -> None:
        wins(
            "dynamodb:PutItem",
            lambda: self._client.put_item(
                TableName=self._table,
                Item=item,
                ConditionExpression="attribute_not_exists(pk) OR #until < :until",
                ExpressionAttributeNames={"#until": "until"},
                ExpressionAttributeValues={":until": item["until"]},
            ),
        )

    def _get(self, key: Item) -> Item:
        with translating("dynamodb:GetItem"):
            answer = self._client.get_item(TableName=self._table, Key=key, ConsistentRead=True)
        return dict(answer.get("Item", {}))


def _incident_pk(incident_id: str) -> str:
    return f"INCIDENT#{incident_id}"


def _node_pk(cluster: str, node_uid: str) -> str:
    return f"NODE#{cluster}#{node_uid}"


def _handled_key(cluster: str, node: NodeRef, fault_key: str) -> Item:
    """Return the key; a node that could not be resolved has no UID, and its name stands for it."""
    page = node.uid or f"name/{node.name}"
    return encode_item({"pk": _node_pk(cluster, page), "sk": f"HANDLED#{node.boot_id}#{fault_key}"})


def _attributes(incident: Incident, write_id: str) -> Item:
    """Return what every write of a record sets."""
    values: dict[str, Any] = {
        "document": _document_of(incident),
        "version": incident.version,
        "state": incident.state.value,
        "cluster": incident.cluster,
        "node_name": incident.node.name,
        "execution_arn": incident.execution_arn,
        "opened_at": stamp(incident.opened_at),
        "write_id": write_id,
    }
    if incident.is_closed:
        values["expires_at"] = epoch_s((incident.closed_at or incident.state_since) + KEEP_CLOSED)
    else:
        values["open_cluster"] = incident.cluster
    return encode_item(values)


def _document_of(incident: Incident) -> dict[str, Any]:
    document: dict[str, Any] = _DOCUMENT.dump_python(incident, mode="json", exclude=_NEVER_STORED)
    return document


def _outbox_of(incident: Incident) -> dict[str, dict[str, str]]:
    """Return the new events as the outbox holds them: the details as they will be sent."""
    return {
        event.event_id: {
            "detail_type": event.detail_type.value,
            "detail": encode_detail(incident_detail(incident, event)),
            "at": stamp(event.at),
        }
        for event in incident.new_events
    }


def _incident_of(item: Item) -> Incident:
    values = decode_item({name: item[name] for name in ("pk", "document", "version")})
    try:
        incident = _DOCUMENT.validate_python(values["document"])
    except ValidationError as error:
        raise InvalidInputError(
            f"{values['pk']}.document",
            f"cannot be read by this release: {error}",
            "deploy the release that wrote it, or a newer one",
        ) from error
    return replace(incident, version=values["version"])


def _fit(incident: Incident) -> Incident:
    """Return the incident small enough for an item, the least useful parts left out.

    First the older half of the timeline goes, again and again; then the less severe half of the
    findings. The deciding finding and the newest lines always stay.

    Raises:
        InvalidInputError: if it is still too large then.
    """
    fitting = incident
    while (size := _size(fitting)) > DOCUMENT_LIMIT:
        if len(fitting.timeline) > _TIMELINE_KEPT:
            fitting = replace(fitting, timeline=fitting.timeline[len(fitting.timeline) // 2 :])
        elif len(fitting.findings) > 1:
            fitting = _without_least_severe(fitting)
        else:
            raise InvalidInputError(
                f"incident {incident.id}", f"has {size} bytes", f"keep below {DOCUMENT_LIMIT}"
            )
    if fitting is not incident:
        _logger.warning(
            "incident %s: %d of %d timeline lines and %d of %d findings are kept",
            incident.id,
            len(fitting.timeline),
            len(incident.timeline),
            len(fitting.findings),
            len(incident.findings),
        )
    return fitting


def _without_least_severe(incident: Incident) -> Incident:
    left = list(incident.findings)
    kept = []
    for _ in range(len(left) // 2):
        kept.append(most_severe(left))
        left.remove(kept[-1])
    return replace(
        incident, findings=tuple(finding for finding in incident.findings if finding in kept)
    )


def _size(incident: Incident) -> int:
    return len(json.dumps(_document_of(incident), ensure_ascii=False).encode())
