"""Carrying out the end of an incident: record first, then what others wait for.

Restore, then record, then free the slot: a slot is never free while the node is still ours. Each
part is safe to repeat, so that a crash in between is mended by doing all of it again.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from nodemend.application.ports import DispatchQueue, Guards, Incidents, Outbox
from nodemend.application.steps import update_guard
from nodemend.contracts.events import NodeRefModel
from nodemend.domain.guard import release
from nodemend.domain.incidents import Incident, Outcome, close
from nodemend.domain.ledger import hold_after, ledger_key
from nodemend.domain.reasons import Reason
from nodemend.domain.remedies import remedy_for


@dataclass(frozen=True, slots=True)
class ClosingPorts:
    """What closing an incident needs."""

    incidents: Incidents
    outbox: Outbox
    guards: Guards
    dispatch_queue: DispatchQueue


def close_and_free(
    incident: Incident,
    outcome: Outcome,
    reason: Reason,
    *,
    step: str,
    now: datetime,
    ports: ClosingPorts,
) -> Incident:
    """Close the incident and free what it holds; return it as stored.

    Raises:
        ConcurrentUpdateError: if the record changed meanwhile.
    """
    replacement = incident.repair.replacement_node if incident.repair else None
    data: dict[str, Any] = {
        "remedy": remedy_for(reason.code, needs_human=outcome is Outcome.NEEDS_HUMAN)
    }
    if replacement is not None:
        data["replacement"] = NodeRefModel.of(replacement)
    closed = close(incident, outcome, reason, step=step, now=now, data=data)
    saved = ports.incidents.save(closed)
    free(saved, now=now, ports=ports)
    return saved


def free(closed: Incident, *, now: datetime, ports: ClosingPorts) -> None:
    """Give back what a closed incident may still hold, and send what it has to say."""
    if closed.outcome is None or closed.reason is None:
        return
    keys_by_hold: dict[timedelta, list[str]] = {}
    for finding in closed.findings:
        hold = hold_after(closed.outcome, closed.reason, finding.kind)
        if hold is not None:
            name = ledger_key(finding.key, is_dry_run=closed.dry_run)
            keys_by_hold.setdefault(hold, []).append(name)
    since = closed.closed_at or now
    for hold, keys in keys_by_hold.items():
        ports.incidents.mark_handled(closed.cluster, closed.node, keys, since + hold)
    # The intention is noted before the call: whether an answer came, the instance may be going.
    may_be_replaced = closed.repair is not None
    update_guard(
        ports.guards,
        closed.cluster,
        lambda guard: release(guard, closed.id, refunds=not may_be_replaced),
    )
    ports.incidents.release_node(closed.cluster, closed.node.uid, closed.id)
    ports.outbox.publish(closed.id)
    if closed.execution_arn:
        ports.dispatch_queue.notify(closed.cluster, "")
