"""Telling the guard of a fault that many nodes have at once, before it is announced.

Events become incidents one after the other, and the first wakes the dispatcher. What is noted here
is in the guard before the first event is sent, so that no decision can miss it.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from functools import partial

from nodemend.application.ports import Guards, Report
from nodemend.application.steps import update_guard
from nodemend.domain.breaker import bursts_of
from nodemend.domain.findings import Finding
from nodemend.domain.guard import note_bursts

GONE_AFTER = timedelta(minutes=15)
"""A finding that still holds is reported every five minutes: a report that is older than this is
about one that had gone, and the fault is new again."""


def note_new(
    cluster: str,
    found: Mapping[str, Iterable[Finding]],
    last: Mapping[str, Report],
    *,
    guards: Guards,
    now: datetime,
) -> None:
    """Note each fault that several nodes newly have.

    Args:
        cluster: The cluster.
        found: Findings, by the name of their report in the scan's memory.
        last: The last report by the same name.
        guards: Where it is noted.
        now: The time.

    Raises:
        ConcurrentUpdateError, AwsUnavailableError, AwsForbiddenError: if it could not be noted:
            then nothing may be announced.
    """
    new = [
        finding
        for name, findings in found.items()
        for finding in findings
        if finding.key not in _known(last.get(name), now)
    ]
    bursts = bursts_of(new, now)
    if bursts:
        update_guard(guards, cluster, partial(note_bursts, bursts=bursts))


def _known(report: Report | None, now: datetime) -> frozenset[str]:
    if report is None or now - report.at > GONE_AFTER:
        return frozenset()
    return frozenset(report.fingerprint.split())
