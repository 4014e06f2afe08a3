"""What the last scans reported, in DynamoDB."""

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from nodemend.adapters._aws import (
    Item,
    batch_get,
    batch_put,
    decode_item,
    encode_item,
    epoch_s,
    parse_stamp,
    stamp,
)
from nodemend.application.ports import Clock, Report

if TYPE_CHECKING:
    from mypy_boto3_dynamodb.client import DynamoDBClient

KEEP = timedelta(days=2)
"""Longer than any quiet time between two reports of the same."""


class DynamoScanMemory:
    """Reports in items `SCAN#<cluster>#<name>`/`REPORT`.

    A key of its own for each name: 2,000 nodes under one partition key would be throttled.
    """

    def __init__(self, *, table: str, client: "DynamoDBClient", clock: Clock) -> None:
        self._table = table
        self._client = client
        self._clock = clock

    def last_reports(self, cluster: str, names: Iterable[str]) -> Mapping[str, Report]:
        """Return the last report by name; what is older than two days is forgotten."""
        keys = [_key(cluster, name) for name in dict.fromkeys(names)]
        oldest = self._clock.now() - KEEP
        found = {}
        for item in batch_get(self._client, self._table, keys, consistent=True):
            values = decode_item(item)
            report = Report(
                fingerprint=values["fingerprint"],
                at=parse_stamp(values["at"]),
                repeats=values["repeats"],
            )
            if report.at > oldest:
                found[values["name"]] = report
        return found

    def remember(self, cluster: str, reports: Mapping[str, Report]) -> None:
        """Store reports by name; the newest write stands."""
        batch_put(
            self._client,
            self._table,
            (_item(cluster, name, report) for name, report in reports.items()),
        )


def _key(cluster: str, name: str) -> Item:
    return encode_item({"pk": f"SCAN#{cluster}#{name}", "sk": "REPORT"})


def _item(cluster: str, name: str, report: Report) -> Item:
    return _key(cluster, name) | encode_item(
        {
            "name": name,
            "fingerprint": report.fingerprint,
            "at": stamp(report.at),
            "repeats": report.repeats,
            "expires_at": epoch_s(report.at + KEEP) + 1,
        }
    )
