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

OCCURRENCE_VALID = timedelta(minutes=15)
"""Evidence of an event older than this is a late message about the past and opens nothing."""

_FOR_A_TIME = {"warm_up": WARM_UP, "not_confirmed": FOR_THIS_BOOT}
"""How long a skipped fault stays quiet, where its reason says more than `QUIET`."""

_UNJUDGED = frozenset(
    {
        "aws_unavailable",
        "capacity_guard",
        "cluster_unavailable",
        "cluster_unknown",
        "execution_failed",
        "expired",
        "node_busy",
        "policy_invalid",
        "rate_limit",
        "step_timed_out",
        "unverifiable",
    }
)
"""Ends for reasons of our own: the fault was not judged, and may open again at once."""


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

    What ended without a judgement of the fault (unknown metrics, no room, trouble of our own) may
    open again at once.
    """
    match outcome:
        case Outcome.NEEDS_HUMAN | Outcome.REPLACED:
            # The node stays a person's, or is on its way out: nothing more to open on this boot.
            return FOR_THIS_BOOT
        case Outcome.OBSERVED:
            return FOR_THIS_BOOT if kind is FaultKind.EVENT else QUIET
        case Outcome.ABORTED_BY_OPERATOR:
            return QUIET
        case Outcome.SKIPPED:
            return None if reason.code in _UNJUDGED else _FOR_A_TIME.get(reason.code, QUIET)
        case Outcome.REBOOTED | Outcome.RECOVERED:
            return FOR_THIS_BOOT if kind is FaultKind.EVENT else None
        case Outcome.SUPERSEDED:
            return None
