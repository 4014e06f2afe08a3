"""What a run costs in DynamoDB: its calls, and the write units that AWS would bill.

moto answers ReturnConsumedCapacity with a constant, so the units are computed here from the items
before and after each write, by AWS's published rules ("DynamoDB item sizes and formats",
"Capacity unit consumption for write operations", "Global secondary indexes"): one unit for each
started KB of the larger of the two, also for a write whose condition failed; on top of that, for
each index, one for each started KB of an entry that is added or removed. Storage overhead is not
part of a write.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from botocore.model import OperationModel

Item = dict[str, Any]

UNIT_BYTES = 1024
_COLLECTION_BYTES = 3

KEY = ("pk", "sk")
INDEXES = {"open": ("open_cluster", "opened_at"), "outbox": ("outbox_pending", "opened_at")}
"""The indexes of the product's table, and what their keys are (template.yaml; keys only)."""


def item_bytes(item: Item) -> int:
    """Return an item's size as DynamoDB counts it: names and values.

    Example:
        >>> item_bytes({"pk": {"S": "abc"}, "n": {"N": "12345"}, "l": {"L": [{"BOOL": True}]}})
        16
    """
    return sum(len(name.encode()) + _value_bytes(value) for name, value in item.items())


def _value_bytes(value: Item) -> int:
    ((kind, raw),) = value.items()
    match kind:
        case "S":
            return len(raw.encode())
        case "N":
            digits = raw.lstrip("-").split("E")[0].replace(".", "").strip("0")
            return 1 + math.ceil(len(digits) / 2)
        case "BOOL" | "NULL":
            return 1
        case "L":
            return _COLLECTION_BYTES + sum(1 + _value_bytes(one) for one in raw)
        case "M":
            return _COLLECTION_BYTES + len(raw) + item_bytes(raw)
        case _:
            raise ValueError(f"the product writes no {kind}: say here how large one is")


def write_units(before: Item, after: Item) -> int:
    """Return the units of one write; an item that is not there is empty.

    Example:
        >>> write_units({}, {"pk": {"S": "a"}, "sk": {"S": "b"}})
        1
        >>> write_units({}, {"pk": {"S": "a"}, "sk": {"S": "x" * 1024}})
        2
    """
    units = _started(max(item_bytes(before), item_bytes(after)))
    for attributes in INDEXES.values():
        old, new = _entry(before, attributes), _entry(after, attributes)
        if old != new:
            units += sum(_started(item_bytes(entry)) for entry in (old, new) if entry)
    return units


def _started(size: int) -> int:
    return max(1, math.ceil(size / UNIT_BYTES))


def _entry(item: Item, attributes: tuple[str, ...]) -> Item:
    """Return the item's entry in an index; only an item with all key attributes has one."""
    if not all(name in item for name in attributes):
        return {}
    return {name: item[name] for name in (*KEY, *attributes)}


@dataclass
class WriteMeter:
    """Counts the calls of a client and the units of its writes.

    Args:
        client: The client to watch: its own calls are counted.
        peek: Another client of the same table, which is not.
        table: The table's name.
    """

    client: Any
    peek: Any
    table: str
    calls: Counter[str] = field(default_factory=Counter)
    """By operation."""
    units: int = 0
    _is_on: bool = False
    _before: list[tuple[Item, Item]] = field(default_factory=list)

    def __post_init__(self) -> None:
        events = self.client.meta.events
        events.register("before-call.dynamodb", self._note)
        events.register("after-call.dynamodb", self._measure)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count inside the block only: what a benchmark reads for itself is no cost."""
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def _note(self, *, model: OperationModel, params: dict[str, Any], **_: object) -> None:
        if not self._is_on:
            return
        self.calls[model.name] += 1
        keys = _written(model.name, json.loads(params["body"]), self.table)
        self._before = [(key, self._item(key)) for key in keys]

    def _measure(self, **_: object) -> None:
        """Also after an error: a failed condition leaves the item as it was, and is billed."""
        self.units += sum(write_units(before, self._item(key)) for key, before in self._before)
        self._before = []

    def _item(self, key: Item) -> Item:
        answer = self.peek.get_item(TableName=self.table, Key=key, ConsistentRead=True)
        item: Item = answer.get("Item", {})
        return item


def _written(operation: str, body: dict[str, Any], table: str) -> list[Item]:
    match operation:
        case "PutItem":
            return [_key(body["Item"])]
        case "UpdateItem" | "DeleteItem":
            return [_key(body["Key"])]
        case "BatchWriteItem":
            requests = body["RequestItems"][table]
            return [
                _key(
                    one["PutRequest"]["Item"]
                    if "PutRequest" in one
                    else one["DeleteRequest"]["Key"]
                )
                for one in requests
            ]
        case "GetItem" | "BatchGetItem" | "Query" | "Scan":
            return []
        case _:
            raise ValueError(f"{operation} is not measured: say here what it writes")


def _key(item: Item) -> Item:
    return {name: item[name] for name in KEY}
