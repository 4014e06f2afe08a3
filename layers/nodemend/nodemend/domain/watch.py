"""What the watchdog decides: which cordon may go, what has lasted too long, which scan is silent.

It repairs only what is safe whatever the cause was, and leaves the rest to a person, once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from nodemend.domain.cordon import ownership_of
from nodemend.domain.faults import Family, Mode
from nodemend.domain.findings import OCCURRENCE_VALID
from nodemend.domain.guard import LEASE_MARGIN, LONGEST_FUNCTION, Pause
from nodemend.domain.incidents import Incident, IncidentState, Outcome
from nodemend.domain.nodes import REMEDIATION_TAINT_KEY, Node
from nodemend.domain.policy import Policy
from nodemend.domain.rails import why_node_held, why_stand_down
from nodemend.domain.reasons import Reason

STEP = "watch_incidents"

SETTLED_AFTER = LONGEST_FUNCTION + LEASE_MARGIN
"""Nothing that a step had begun before its incident was closed is still at work after this."""

KEPT_FOR = timedelta(hours=24)
"""A cordon that was kept for a person, who was told, is told of again after this."""

LEAVING_FOR = timedelta(hours=2)
"""The node of a terminated instance is gone after this; lifecycle hooks last an hour by default."""

SILENT_AFTER: Mapping[Family, timedelta] = {
    Family.ECC: timedelta(minutes=5),
    Family.THERMAL: timedelta(minutes=10),
    Family.UTILIZATION: timedelta(minutes=15),
}
"""Five, five and three of each scan's intervals: what the silent alarms of template.yaml take."""

# --- cordons ------------------------------------------------------------------------------------


class Care(StrEnum):
    """What the watch does about a node that carries our mark."""

    LEAVE = "leave"
    RESTORE = "restore"
    TELL = "tell"


@dataclass(frozen=True, slots=True)
class CordonVerdict:
    """What is to be done about a marked node, and why."""

    care: Care
    reason: Reason
    since: datetime | None = None
    """TELL only: since when it is a person's matter; None: since the watch first saw it."""


_HANDS_BACK = frozenset(
    {Outcome.REBOOTED, Outcome.RECOVERED, Outcome.OBSERVED, Outcome.SKIPPED, Outcome.SUPERSEDED}
)
_TAKEN_BACK = frozenset({"execution_stopped", "approval_denied"})
"""Reasons under which a person wants the node as it was."""
_IS_PROVEN = frozenset({Outcome.REBOOTED, Outcome.RECOVERED})


def is_marked(node: Node) -> bool:
    """Tell whether the node carries anything of a cordon of ours."""
    return node.owner is not None or any(
        taint.key == REMEDIATION_TAINT_KEY for taint in node.taints
    )


def hands_node_back(closed: Incident) -> bool:
    """Tell whether the node should have been as before when the incident was closed.

    Not where a person must see to it (NEEDS_HUMAN, or a pause or a lowered mode that stopped the
    remediation midway), not where a repair was asked for and not proven, and not where the cordon
    was one kept for a person already before this incident took it over.
    """
    code = closed.reason.code if closed.reason else ""
    if closed.outcome in _IS_PROVEN or code == "uncordoned":
        return True
    if closed.repair is not None or closed.attempts or _was_kept_before(closed):
        return False
    is_taken_back = closed.outcome is Outcome.ABORTED_BY_OPERATOR and code in _TAKEN_BACK
    return is_taken_back or closed.outcome in _HANDS_BACK


def _was_kept_before(closed: Incident) -> bool:
    mine = [past for past in closed.history if past.instance_id == closed.node.instance_id]
    return bool(mine) and mine[0].outcome == Outcome.NEEDS_HUMAN


def judge_cordon(
    node: Node,
    owner: Incident | None,
    *,
    has_open_incident: bool,
    policy: Policy,
    pause: Pause | None,
    now: datetime,
) -> CordonVerdict:
    """Decide about one marked node.

    Args:
        node: The node as it was just read.
        owner: The incident that its annotation names, read after the node; None: no record has it.
        has_open_incident: Whether an incident is open for this node's UID, whoever cordoned it.
        policy: The policy in force.
        pause: The cluster's pause, if there is one.
        now: The time.
    """
    name = node.ref.name
    ownership = ownership_of(node)
    if has_open_incident or (owner is not None and not owner.is_closed):
        return _leave("open", f"an incident is open for {name}")
    if ownership is None:
        return _tell("cordon_unreadable", f"{name} carries our mark without a readable note")
    if owner is None:
        # The record of another stack, perhaps: it may be at work right now.
        return _tell("owner_unknown", f"no record has incident {ownership.incident_id} of {name}")
    closed_at = owner.closed_at or owner.state_since
    if not node.ref.is_same_machine(owner.node):
        return _tell("owner_of_other_node", f"{owner.id} is about another machine", closed_at)
    is_by_watch = bool(owner.timeline) and owner.timeline[-1].step == STEP
    if not is_by_watch and now - closed_at < SETTLED_AFTER:
        return _leave("settling", f"incident {owner.id} has only just ended")
    if hands_node_back(owner):
        return _of_released(node, owner, closed_at, policy=policy, pause=pause, now=now)
    return _of_kept(owner, closed_at, now)


def end_of(closed: Incident) -> str:
    """Return outcome and reason of a closed incident in a few words."""
    return f"{closed.outcome}, {closed.reason.code}" if closed.reason else f"{closed.outcome}"


def _of_released(
    node: Node,
    owner: Incident,
    closed_at: datetime,
    *,
    policy: Policy,
    pause: Pause | None,
    now: datetime,
) -> CordonVerdict:
    should = f"{node.ref.name} should have been released ({end_of(owner)})"
    mode = policy.mode_for(node.labels)
    if mode is Mode.DRY_RUN:
        return _tell("mode_forbids", f"{should}, and the mode is {mode} now", closed_at)
    if policy.excludes(node.ref):
        return _tell("excluded", f"{should}, and the policy excludes it now", closed_at)
    held = (pause.reason() if pause else None) or why_node_held(node) or why_stand_down(node)
    if held is None:
        text = f"{node.ref.name} is as it was before the incident ({end_of(owner)})"
        return CordonVerdict(Care.RESTORE, Reason("restored", text))
    if now - closed_at < KEPT_FOR:
        return CordonVerdict(Care.LEAVE, held)
    return _tell(held.code, f"{should}: {held.text}", closed_at + KEPT_FOR)


def _of_kept(owner: Incident, closed_at: datetime, now: datetime) -> CordonVerdict:
    text = f"{owner.node.name} is cordoned since incident {owner.id} ({end_of(owner)})"
    patience = {Outcome.NEEDS_HUMAN: KEPT_FOR, Outcome.REPLACED: LEAVING_FOR}
    due = closed_at + patience.get(owner.outcome or Outcome.SKIPPED, timedelta())
    if now < due:
        return _leave("kept", text)
    code = "not_gone" if owner.outcome is Outcome.REPLACED else "cordon_kept"
    return _tell(code, text, due)


def _leave(code: str, text: str) -> CordonVerdict:
    return CordonVerdict(Care.LEAVE, Reason(code, text))


def _tell(code: str, text: str, since: datetime | None = None) -> CordonVerdict:
    return CordonVerdict(Care.TELL, Reason(code, text), since)


# --- incidents ----------------------------------------------------------------------------------

WAITS_AT_MOST = timedelta(hours=24)
WINDOW_WAITS_AT_MOST = timedelta(days=8)
"""A weekly window comes within a week."""

SLACK = timedelta(hours=1)
"""On top of a step's own deadline: the retries of a step, and of what follows it, take minutes."""


def why_overdue(incident: Incident, now: datetime) -> tuple[Reason, datetime] | None:
    """Return why an open incident has been in its state for too long, and since when; or None."""
    limit = _limit_of(incident)
    due = incident.state_since + limit
    if now < due:
        return None
    hours = limit.total_seconds() / 3600
    if incident.state is IncidentState.WAITING:
        what = f", for {incident.waiting_for}" if incident.waiting_for else ""
        text = f"it has been waiting for more than {hours:g} hours{what}"
        return Reason("waits_long", text), due
    text = f"it has been {incident.state} for more than {hours:.1f} hours, past its deadline"
    return Reason("past_deadline", text), due


def _limit_of(incident: Incident) -> timedelta:
    deadlines = incident.deadlines
    repair_s = max(deadlines.reboot_s, deadlines.replace_s)
    own_s = 0
    match incident.state:
        case IncidentState.WAITING:
            is_windowed = incident.waiting_for == "maintenance_window"
            return WINDOW_WAITS_AT_MOST if is_windowed else WAITS_AT_MOST
        case IncidentState.VERIFYING:
            own_s = deadlines.verify_s
        case IncidentState.APPROVING if incident.approval_policy is not None:
            own_s = incident.approval_policy.timeout_s + deadlines.verify_s
        case IncidentState.DRAINING:
            own_s = deadlines.drain_s
        case IncidentState.CHECKING:
            own_s = repair_s
        case IncidentState.VALIDATING:
            own_s = incident.hold_down_s + repair_s
        case _:
            pass
    return SLACK + timedelta(seconds=own_s)


def why_nobody_needed(
    incident: Incident, node: Node | None, now: datetime
) -> tuple[Outcome, Reason] | None:
    """Return how an incident ends that its execution left behind and no person has to see to.

    What was found is about a machine and a boot. If that machine is gone, or has long booted anew
    without us, what still holds is found again by the next scan (case R43). None: a repair was
    asked for, or the node is as it was, so somebody must look.
    """
    if incident.repair is not None or incident.attempts:
        return None
    name = incident.node.name
    if node is None or not node.ref.is_same_machine(incident.node):
        text = f"{name} ({incident.node.instance_id}) is gone, and nothing was asked of it"
        return Outcome.SUPERSEDED, Reason("already_gone", text)
    known = incident.node.boot_id
    is_old = now - incident.state_since > OCCURRENCE_VALID
    if is_old and known and node.ref.boot_id not in ("", known):
        text = f"{name} has booted since; what still holds is found by the next scan"
        return Outcome.SKIPPED, Reason("expired", text)
    return None


# --- scans --------------------------------------------------------------------------------------


def is_silent(family: Family, last: datetime, now: datetime) -> bool:
    """Tell whether a family has not been scanned for too long."""
    return now - last >= SILENT_AFTER[family]
