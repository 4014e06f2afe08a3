"""Scans that have stopped: told once, and once more when they are back."""

from datetime import datetime

from nodemend.application.ports import Announcement, Report
from nodemend.application.watching import REFRESHED_AFTER, WatchPorts, send
from nodemend.contracts.events import ScanSilent
from nodemend.domain.events import DetailType
from nodemend.domain.faults import Family
from nodemend.domain.watch import SILENT_AFTER, is_silent

_SILENT = "silent"
_BACK = "back"
_UNSEEN = "unseen"


def watch_scans(cluster: str, ports: WatchPorts) -> int:
    """Return how many families of the cluster are not scanned any more; tell each change once.

    A cluster that was never scanned is measured from the first look that missed it.
    """
    now = ports.clock.now()
    names = [f"{prefix}/{family}" for prefix in ("scan", "watch/scan") for family in Family]
    last = ports.memory.last_reports(cluster, names)
    silent = 0
    reports: dict[str, tuple[Announcement | None, Report]] = {}
    for family in Family:
        scan, state = last.get(f"scan/{family}"), last.get(f"watch/scan/{family}")
        word, since = _parsed(state) if state else ("", now)
        seen = scan.at if scan else since
        change: tuple[Announcement | None, Report]
        is_down = is_silent(family, seen, now)
        silent += is_down
        if is_down and word != _SILENT:
            event = _event(cluster, family, seen, is_silent=True, last=scan.at if scan else None)
            change = event, _report(_SILENT, seen, now)
        elif not is_down and word == _SILENT:
            change = (
                _event(cluster, family, since, is_silent=False, last=seen),
                _report(_BACK, seen, now),
            )
        elif scan is None and state is None:
            change = None, _report(_UNSEEN, now, now)
        elif is_down and state is not None and now - state.at > REFRESHED_AFTER:
            change = None, _report(_SILENT, since, now)
        else:
            continue
        reports[f"watch/scan/{family}"] = change
    unsent = send(cluster, [event for event, _ in reports.values() if event is not None], ports)
    told = {
        name: report
        for name, (event, report) in reports.items()
        if event is None or event.event_id not in unsent
    }
    if told:
        ports.memory.remember(cluster, told)
    return silent


def _parsed(state: Report) -> tuple[str, datetime]:
    word, since = state.fingerprint.split()
    return word, datetime.fromisoformat(since)


def _report(word: str, since: datetime, now: datetime) -> Report:
    return Report(f"{word} {since.isoformat()}", now)


def _event(
    cluster: str, family: Family, since: datetime, *, is_silent: bool, last: datetime | None
) -> Announcement:
    """Return the event; its id is that of the silence that begins or ends with it."""
    word = _SILENT if is_silent else _BACK
    at = since + SILENT_AFTER[family] if is_silent or last is None else last
    detail = ScanSilent(
        event_id=f"scan-{cluster}-{family}-{since:%Y%m%dT%H%M%S}-{word}",
        occurred_at=at,
        cluster=cluster,
        family=family,
        is_silent=is_silent,
        last_scan_at=last,
    )
    body = detail.model_dump(mode="json", exclude_none=True)
    return Announcement(detail.event_id, DetailType.SCAN_SILENT, at, body)
