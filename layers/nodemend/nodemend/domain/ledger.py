"""How long a handled fault stays handled, so that a sticky value never reopens an incident."""

from collections.abc import Iterable
from datetime import timedelta

from nodemend.domain.cordon import is_cordoned_by
from nodemend.domain.faults import FaultKind, Rung
from nodemend.domain.findings import Finding
from nodemend.domain.history import PastIncident
from nodemend.domain.incidents import Outcome
from nodemend.domain.nodes import Node
from nodemend.domain.reasons import Reason

FOR_THIS_BOOT = timedelta(days=30)
"""An event is handled once per boot; a new boot id starts a new page of the ledger. Thirty days
bound the table's size."""

QUIET = timedelta(hours=24)
"""A level that was only observed is reported again after a day."""

WARM_UP = timedelta(minutes=30)
"""The default start-up grace."""

OTHERS_AT_WORK = timedelta(hours=1)
"""A refresh, an update or a scale-down is over by then, or still to be told of."""

_FOR_A_TIME = {
    "warm_up": WARM_UP,
    "not_confirmed": FOR_THIS_BOOT,
    "other_remediator": OTHERS_AT_WORK,
}
"""How long a skipped fault stays quiet, where its reason says more than `QUIET`."""

_UNJUDGED = frozenset(
    {
        "aws_unavailable",
        "breaker_open",
        "capacity_guard",
        "cluster_unavailable",
        "cluster_unknown",
        "execution_failed",
        "expired",
        "hold",
        "maintenance_window",
        "node_busy",
        "policy_invalid",
        "rate_limit",
        "step_timed_out",
        "unverifiable",
    }
)
"""Ends for reasons of our own: the fault was not judged, and may open again at once."""

LAST_CLOSE = "last-close"
"""Under this word and the node's name alone: when an incident last changed or returned it."""

LAST_CLOSE_KEPT = timedelta(days=6)
"""A day longer than alerts are believed (`domain.alerts.MAX_ALERT_AGE`)."""

_ENDS_THE_PAST = frozenset({Outcome.REPLACED, Outcome.REBOOTED, Outcome.ABORTED_BY_OPERATOR})


_PASSING = frozenset({"node_paused", "paused"})
"""Ends by a pause: it says nothing of the fault, which is reported again after it."""


def ends_the_past(outcome: Outcome, reason: Reason, *, is_dry_run: bool) -> bool:
    """Tell whether an alert that began before this end is about what there is no more.

    Only where the machine was changed, or a person took it back: the recovery of one fault must
    not silence another that had begun meanwhile (case D26).
    """
    return not is_dry_run and outcome in _ENDS_THE_PAST and reason.code not in _PASSING


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
            return None if reason.code in _PASSING else QUIET
        case Outcome.SKIPPED:
            return None if reason.code in _UNJUDGED else _FOR_A_TIME.get(reason.code, QUIET)
        case Outcome.REBOOTED | Outcome.RECOVERED:
            return FOR_THIS_BOOT if kind is FaultKind.EVENT else None
        case Outcome.SUPERSEDED:
            return None


def is_past(finding: Finding, node: Node, record: Iterable[PastIncident]) -> bool:
    """Tell whether a finding that comes late is about what there is no more.

    A queue tries a message again after minutes. By then another machine may have the node's name;
    or the node has been rebooted and proven, and the query at the evidence's time would confirm a
    fault that is over, and reboot it once more. A recovery ends nothing but the same fault (D26).

    Args:
        finding: what was found.
        node: the node that its labels name now.
        record: earlier incidents of the machine and of its GPUs.
    """
    seen = finding.evidence.at
    if node.created_at is not None and seen < node.created_at:
        return True
    return any(
        past.instance_id == node.ref.instance_id and seen <= past.at and _has_ended(finding, past)
        for past in record
    )


def _has_ended(finding: Finding, past: PastIncident) -> bool:
    if past.outcome == Outcome.REBOOTED:
        return True
    return past.outcome == Outcome.RECOVERED and _is_same_fault(finding, past)


def is_left_to_person(finding: Finding, node: Node, record: Iterable[PastIncident]) -> bool:
    """Tell whether an earlier incident has left this very fault to a person, cordon and all.

    The ledger knows that by the boot. An incident that ended while its reboot was under way could
    not know the boot that came of it.
    """
    return any(
        past.outcome in (Outcome.NEEDS_HUMAN, Outcome.ABORTED_BY_OPERATOR)
        and Rung.REBOOT in past.rungs
        and is_cordoned_by(node, past.incident_id)
        and _is_same_fault(finding, past)
        for past in record
    )


def _is_same_fault(finding: Finding, past: PastIncident) -> bool:
    is_same_gpu = finding.gpu_uuid in past.gpu_uuids if finding.gpu_uuid else not past.gpu_uuids
    return is_same_gpu and past.fault == finding.fault_words
