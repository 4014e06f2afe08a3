"""How long a handled fault stays handled, so that a sticky value never reopens an incident."""

from datetime import timedelta

from nodemend.domain.faults import FaultKind
from nodemend.domain.incidents import Outcome
from nodemend.domain.reasons import Reason

FOR_THIS_BOOT = timedelta(days=30)
"""An event is handled once per boot; a new boot id starts a new page of the ledger. Thirty days
bound the table's size."""

QUIET = timedelta(hours=24)
"""A level that was only observed is reported again after a day."""

WARM_UP = timedelta(minutes=30)
"""The default start-up grace."""

_REOPENABLE = frozenset({"unverifiable", "expired", "capacity_guard", "rate_limit", "node_busy"})


def ledger_key(key: str, *, is_dry_run: bool) -> str:
    """Return the name under which a handled fault is noted."""
    return f"dry/{key}" if is_dry_run else key


def ledger_keys(key: str, *, is_dry_run: bool) -> tuple[str, ...]:
    """Return the names that make a fault count as handled.

    What was only rehearsed must not keep a real remediation back; what was really handled needs
    no rehearsal.
    """
    return (key, ledger_key(key, is_dry_run=True)) if is_dry_run else (key,)


def hold_after(outcome: Outcome, reason: Reason, kind: FaultKind) -> timedelta | None:
    """Return how long the same fault on the same boot opens no new incident; None: not at all.

    What ended without a judgement of the fault (unknown metrics, no room) may open again at once.
    """
    if reason.code in _REOPENABLE:
        return None
    if kind is FaultKind.EVENT:
        return None if outcome is Outcome.SUPERSEDED else FOR_THIS_BOOT
    match outcome:
        case Outcome.NEEDS_HUMAN:
            return FOR_THIS_BOOT
        case Outcome.OBSERVED | Outcome.ABORTED_BY_OPERATOR:
            return QUIET
        case Outcome.SKIPPED:
            return WARM_UP if reason.code == "warm_up" else QUIET
        case Outcome.REPLACED | Outcome.REBOOTED | Outcome.RECOVERED | Outcome.SUPERSEDED:
            return None
