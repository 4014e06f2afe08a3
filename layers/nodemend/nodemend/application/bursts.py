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
from nodemend.domain.faults import Family
from nodemend.domain.findings import Finding
from nodemend.domain.guard import note_bursts

GONE_AFTER = timedelta(minutes=15)
"""A finding that still holds is reported every five minutes: a report that is older than this is
about one that had gone, and the fault is new again."""


def report_name(family: Family, node: str) -> str:
    """Return the name under which a scan remembers what it reported of a node."""
    return f"{family}/{node}"


def note_new(
    cluster: str,
    family: Family,
    found: Mapping[str, Iterable[Finding]],
    last: Mapping[str, Report],
    *,
    guards: Guards,
    now: datetime,
) -> None:
    """Note each fault that several nodes newly have.

    Args:
        cluster: The cluster.
        family: The family of the findings.
        found: Findings, by the name of their node.
        last: The scan's last reports, by `report_name`.
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
        if finding.key not in _known(last.get(report_name(family, name)), now)
    ]
    bursts = bursts_of(new, now)
    if bursts:
        update_guard(guards, cluster, partial(note_bursts, bursts=bursts))


def _known(report: Report | None, now: datetime) -> frozenset[str]:
    if report is None or now - report.at > GONE_AFTER:
        return frozenset()
    return frozenset(report.fingerprint.split())
