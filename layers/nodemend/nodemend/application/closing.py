"""Carrying out the end of an incident: record first, then what others wait for.

Restore, then record, then free the slot: a slot is never free while the node is still ours. Each
part is safe to repeat, so that a crash in between is mended by doing all of it again.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from nodemend.application.ports import DispatchQueue, Guards, History, Incidents, Outbox
from nodemend.application.steps import update_guard
from nodemend.contracts.evidence import NodeRefModel, PastIncidentModel
from nodemend.domain.escalation import past_of, subjects_of
from nodemend.domain.faults import Rung
from nodemend.domain.guard import release
from nodemend.domain.history import instance
from nodemend.domain.incidents import Incident, Outcome, RepairRecord, close
from nodemend.domain.ledger import (
    LAST_CLOSE,
    LAST_CLOSE_KEPT,
    ends_the_past,
    hold_after,
    ledger_key,
)
from nodemend.domain.nodes import NodeRef
from nodemend.domain.reasons import Reason
from nodemend.domain.remedies import remedy_for

HALF_CLOSED_AFTER = timedelta(minutes=1)
"""A close that has not told its end by then died on its way, or EventBridge is away.

No function runs longer, so that no slot is freed under one; and the watch sends no sooner."""


@dataclass(frozen=True, slots=True)
class ClosingPorts:
    """What closing an incident needs."""

    incidents: Incidents
    outbox: Outbox
    guards: Guards
    dispatch_queue: DispatchQueue
    history: History


def close_and_free(
    incident: Incident,
    outcome: Outcome,
    reason: Reason,
    *,
    step: str,
    now: datetime,
    ports: ClosingPorts,
    keeps_slot: bool = False,
) -> Incident:
    """Close the incident and free what it holds; return it as stored.

    `keeps_slot` leaves the slot for the watchdog to free a minute later: a function of a stopped
    execution does not notice the stop, and what it changes yet it changes under that lease.

    Raises:
        ConcurrentUpdateError: if the record changed meanwhile.
    """
    replacement = incident.repair.replacement_node if incident.repair else None
    data: dict[str, Any] = {
        "remedy": remedy_for(reason.code, needs_human=outcome is Outcome.NEEDS_HUMAN),
        "record": tuple(PastIncidentModel.of(past) for past in incident.history),
    }
    if replacement is not None:
        data["replacement"] = NodeRefModel.of(replacement)
    closed = close(incident, outcome, reason, step=step, now=now, data=data)
    saved = ports.incidents.save(closed)
    free(saved, now=now, ports=ports, keeps_slot=keeps_slot)
    return saved


def free(closed: Incident, *, now: datetime, ports: ClosingPorts, keeps_slot: bool = False) -> None:
    """Give back what a closed incident may still hold, and send what it has to say.

    Sending comes last: an end that is not told yet is how `finish_close` knows a close that died.
    """
    if closed.outcome is None or closed.reason is None:
        return
    _give_back(closed, now=now, ports=ports, keeps_slot=keeps_slot)
    ports.outbox.publish(closed.id)
    if closed.execution_arn:
        ports.dispatch_queue.notify(closed.cluster, "")


def _give_back(
    closed: Incident, *, now: datetime, ports: ClosingPorts, keeps_slot: bool = False
) -> None:
    note_end(closed, now=now, incidents=ports.incidents, history=ports.history)
    # The intention is noted before the call: whether an answer came, the instance may be going.
    may_be_replaced = any(repair.rung is Rung.REPLACE for repair in _repairs_of(closed))
    if not keeps_slot:
        update_guard(
            ports.guards,
            closed.cluster,
            lambda guard: release(guard, closed.id, refunds=not may_be_replaced),
        )
    ports.incidents.release_node(closed.cluster, closed.node.uid, closed.id)


def note_end(closed: Incident, *, now: datetime, incidents: Incidents, history: History) -> None:
    """Note what the end means for faults that are reported from now on."""
    if closed.outcome is None or closed.reason is None:
        return
    keys_by_hold: dict[timedelta, list[str]] = {}
    for finding in closed.findings:
        hold = hold_after(closed.outcome, closed.reason, finding.kind)
        if hold is not None:
            name = ledger_key(finding.key, is_dry_run=closed.dry_run)
            keys_by_hold.setdefault(hold, []).append(name)
    since = closed.closed_at or now
    if ends_the_past(closed.outcome, closed.reason, is_dry_run=closed.dry_run):
        name_only = NodeRef(closed.cluster, closed.node.name)
        incidents.mark_handled(closed.cluster, name_only, [LAST_CLOSE], since + LAST_CLOSE_KEPT)
    for node in _boots_of(closed):
        for hold, keys in keys_by_hold.items():
            incidents.mark_handled(closed.cluster, node, keys, since + hold)
    past = past_of(closed)
    if past is not None:
        subjects = subjects_of(closed.node, closed.gpu_uuids)
        if past.replacement_instance_id:
            # The newcomer's own incident must find out that it is a replacement.
            subjects = (*subjects, instance(past.replacement_instance_id))
        history.remember(closed.cluster, subjects, past)


def finish_close(incident_id: str, *, now: datetime, ports: ClosingPorts) -> bool:
    """Finish a close that died between the record and what hangs on it; False if there is none.

    The state machine repeats its own close. One by the watchdog or the dispatcher is repeated by
    nobody: they look at open incidents only. What is closed and has not told it yet may still hold
    the node and a slot, and its fault is not noted as handled. Its end is left for the caller to
    send, afterwards.

    Args:
        incident_id: an incident with unsent events.
        now: the time.
        ports: what closing needs.
    """
    incident = ports.incidents.get(incident_id)
    if incident is None or incident.closed_at is None or not incident.node.uid:
        return False  # open; or a rejection, which never held a node
    if now - incident.closed_at < HALF_CLOSED_AFTER:
        return False  # whoever closes it is at it
    _give_back(incident, now=now, ports=ports)
    ports.dispatch_queue.notify(incident.cluster, "")
    return True


def _repairs_of(closed: Incident) -> tuple[RepairRecord, ...]:
    return (*closed.attempts, *([closed.repair] if closed.repair else []))


def _boots_of(closed: Incident) -> tuple[NodeRef, ...]:
    """Return the node under each boot on which the end holds.

    What a person must see to, or has taken back, stays theirs on the boot that our own reboot made.
    """
    if closed.outcome not in (Outcome.NEEDS_HUMAN, Outcome.ABORTED_BY_OPERATOR):
        return (closed.node,)
    rebooted = [repair.rebooted_node for repair in _repairs_of(closed) if repair.rebooted_node]
    return (closed.node, *rebooted)
