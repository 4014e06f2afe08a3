"""The watchdog: what fell through the cracks is repaired, or handed to a person once."""

import logging
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from nodemend.application.closing import ClosingPorts, close_and_free
from nodemend.application.ports import (
    Clock,
    Executions,
    ExecutionStatus,
    Policies,
    Telemetry,
)
from nodemend.application.steps import update_guard
from nodemend.contracts.watch import WatchIncidentsRequest, WatchIncidentsResult
from nodemend.domain.errors import ConcurrentUpdateError
from nodemend.domain.guard import expired_slots, release
from nodemend.domain.incidents import TOUCHES_NODE, Incident, IncidentState, Outcome
from nodemend.domain.reasons import Reason

logger = logging.getLogger(__name__)

STEP = "watch_incidents"

PENDING_AFTER = timedelta(minutes=1)
"""Events younger than this are still being sent by whoever stored them."""


@dataclass(frozen=True, slots=True)
class WatchPorts:
    """What the watchdog needs."""

    closing: ClosingPorts
    policies: Policies
    executions: Executions
    telemetry: Telemetry
    clock: Clock


def watch_incidents(request: WatchIncidentsRequest, *, ports: WatchPorts) -> WatchIncidentsResult:
    """Close incidents whose execution ended without doing so, free lost slots, send what waits.

    What bypasses the state machine's Catch (its own time-out, Stop in the console, an error of
    the interpreter) arrives here, as an event at once and on the schedule in any case.

    Raises:
        PolicyInvalidError: if the deployed policy cannot be used (on the schedule only).
    """
    if request.ended is not None:
        incident = ports.closing.incidents.get(request.ended.name)
        closed = _close_if_left(incident, ports) if incident else 0
        return WatchIncidentsResult(closed=closed)
    closed = freed = 0
    for cluster in ports.policies.current().clusters:
        open_incidents = ports.closing.incidents.list_open(cluster.name)
        closed += sum(_close_if_left(incident, ports) for incident in open_incidents)
        freed += _free_lost_slots(cluster.name, ports)
    sent, unsent = ports.closing.outbox.publish_pending(before=ports.clock.now() - PENDING_AFTER)
    ports.telemetry.count("Watches")
    ports.telemetry.gauge("EventsPending", unsent, "Count")
    return WatchIncidentsResult(
        closed=closed, freed_slots=freed, sent_events=sent, unsent_events=unsent
    )


def _close_if_left(incident: Incident, ports: WatchPorts) -> int:
    if incident.is_closed:
        return 0
    if incident.state is IncidentState.WAITING and not incident.execution_arn:
        return 0  # for dispatch_incidents; by hand the execution comes before the slot
    arn = incident.execution_arn or ports.executions.arn_of(incident.id)
    status = ports.executions.status(arn)
    if status is None and not incident.execution_arn:
        return 0  # admitted and not begun: dispatch_incidents starts it again
    if status is not None and status.is_running:
        return 0
    # Read again after the status: the execution may have closed the incident in its last moment.
    current = ports.closing.incidents.get(incident.id)
    if current is None or current.is_closed:
        return 0
    outcome, reason = _end_of(current, status)
    try:
        close_and_free(
            current, outcome, reason, step=STEP, now=ports.clock.now(), ports=ports.closing
        )
    except ConcurrentUpdateError:
        logger.info("incident %s changed meanwhile: the next watch looks again", incident.id)
        return 0
    return 1


def _end_of(incident: Incident, status: ExecutionStatus | None) -> tuple[Outcome, Reason]:
    if incident.verdict is not None:
        return incident.verdict
    word = status.status if status else "gone"
    if word == "ABORTED":
        return Outcome.ABORTED_BY_OPERATOR, Reason(
            "execution_stopped", f"somebody stopped the execution while it was {incident.state}"
        )
    detail = f" with {status.error}" if status and status.error else ""
    reason = Reason(
        "execution_failed", f"the execution {word}{detail} while the incident was {incident.state}"
    )
    may_carry_cordon = incident.state in TOUCHES_NODE | {IncidentState.ESCALATING}
    if incident.dry_run or not may_carry_cordon:
        return Outcome.SKIPPED, reason
    return Outcome.NEEDS_HUMAN, reason


def _free_lost_slots(cluster: str, ports: WatchPorts) -> int:
    """Free slots whose lease ran out and whose incident is closed or whose execution ended."""
    guard = ports.closing.guards.load(cluster)
    freed = 0
    for slot in expired_slots(guard, ports.clock.now()):
        incident = ports.closing.incidents.get(slot.incident_id)
        if incident is not None and not incident.is_closed:
            continue  # running, or closed by _close_if_left above, or started again by dispatch
        lost = partial(release, incident_id=slot.incident_id)
        update_guard(ports.closing.guards, cluster, lost)
        freed += 1
    return freed
