"""The watchdog: what fell through the cracks is repaired, or handed to a person once."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TypeVar

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
from nodemend.domain.errors import ConcurrentUpdateError, NodemendError
from nodemend.domain.guard import expired_slots, release
from nodemend.domain.incidents import TOUCHES_NODE, Incident, IncidentState, Outcome
from nodemend.domain.reasons import Reason

logger = logging.getLogger(__name__)

T = TypeVar("T")

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
        NodemendError: if the records could not be listed at all.
    """
    if request.ended is not None:
        incident = ports.closing.incidents.get(request.ended.name)
        closed = _close_if_left(incident, ports) if incident else 0
        return WatchIncidentsResult(closed=closed)
    # First what needs nothing else to be well: events that wait must not wait for a broken policy.
    sent, unsent = ports.closing.outbox.publish_pending(before=ports.clock.now() - PENDING_AFTER)
    ports.telemetry.gauge("EventsPending", unsent, "Count")
    # The clusters come from the incidents: a policy that names one no more, or cannot be read,
    # must not leave incidents behind.
    open_incidents = ports.closing.incidents.list_open(None)
    closed = _each(open_incidents, lambda incident: _close_if_left(incident, ports))
    known = _known_clusters(ports)
    closed += _each(open_incidents, lambda incident: _end_if_unknown(incident, known, ports))
    clusters = sorted({incident.cluster for incident in open_incidents} | (known or frozenset()))
    freed = _each(clusters, lambda cluster: _free_lost_slots(cluster, ports))
    ports.telemetry.count("Watches")
    return WatchIncidentsResult(
        closed=closed, freed_slots=freed, sent_events=sent, unsent_events=unsent
    )


def _each(things: Iterable[T], look: Callable[[T], int]) -> int:
    """Look at each thing; trouble with one does not keep the others waiting."""
    total = 0
    for thing in things:
        try:
            total += look(thing)
        except NodemendError:
            logger.exception("the watch could not mend %s", getattr(thing, "id", thing))
    return total


def _known_clusters(ports: WatchPorts) -> frozenset[str] | None:
    """Return the policy's clusters; None if the policy cannot be used: then nobody is unknown."""
    try:
        return frozenset(cluster.name for cluster in ports.policies.current().clusters)
    except NodemendError:
        logger.exception("the watch goes on without a policy")
        return None


def _end_if_unknown(incident: Incident, known: frozenset[str] | None, ports: WatchPorts) -> int:
    """End what waits for a cluster that the policy does not name any more: nobody dispatches it."""
    if known is None or incident.cluster in known or incident.state is not IncidentState.WAITING:
        return 0
    reason = Reason("cluster_unknown", f"the policy names no cluster {incident.cluster} any more")
    return _close(incident, Outcome.SKIPPED, reason, ports)


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
    return _close(current, *_end_of(current, status), ports)


def _close(incident: Incident, outcome: Outcome, reason: Reason, ports: WatchPorts) -> int:
    try:
        close_and_free(
            incident, outcome, reason, step=STEP, now=ports.clock.now(), ports=ports.closing
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
    may_carry_cordon = incident.state in TOUCHES_NODE | {IncidentState.ESCALATING} or (
        incident.state is IncidentState.APPROVING and incident.cordon is not None
    )
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
