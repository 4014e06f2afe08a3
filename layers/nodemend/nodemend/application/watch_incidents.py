"""The watchdog: what fell through the cracks is repaired, or handed to a person once."""

import logging
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import TypeVar

from nodemend.application.closing import close_and_free, finish_close, free
from nodemend.application.left_cordons import watch_cordons
from nodemend.application.overdue_incidents import watch_overdue
from nodemend.application.ports import ExecutionStatus
from nodemend.application.release_node import proven_outcome
from nodemend.application.silent_scans import watch_scans
from nodemend.application.steps import pinned_cluster, update_guard
from nodemend.application.watching import WatchPorts, rotated
from nodemend.contracts.watch import WatchIncidentsRequest, WatchIncidentsResult
from nodemend.domain.errors import ConcurrentUpdateError, NodemendError, RetryableError
from nodemend.domain.guard import LONGEST_FUNCTION, expired_slots, release
from nodemend.domain.incidents import TOUCHES_NODE, Incident, IncidentState, Outcome
from nodemend.domain.policy import ClusterPolicy, Policy
from nodemend.domain.reasons import Reason
from nodemend.domain.watch import STEP, why_nobody_needed

logger = logging.getLogger(__name__)

T = TypeVar("T")

PENDING_AFTER = timedelta(minutes=1)
"""Events younger than this are still being sent by whoever stored them."""

LOOK_FOR = timedelta(seconds=25)
"""No cluster is begun with after this: one whose network swallows packets costs half a minute, and
the function has a minute."""

STOPPED_FROM_OUTSIDE = frozenset({"ABORTED", "TIMED_OUT"})
"""Ends of an execution that its function may outlive: Step Functions stops waiting for it, no more.
The slot is given up when every function that was at work then must have ended."""


def watch_incidents(request: WatchIncidentsRequest, *, ports: WatchPorts) -> WatchIncidentsResult:
    """Close what its execution left behind, free lost slots, take off cordons that nobody owns.

    What bypasses the state machine's Catch (its own time-out, Stop in the console, an error of
    the interpreter) arrives here, as an event at once and on the schedule in any case. What is not
    safe to mend is told of once: cordons, incidents past their age, scans that stopped.

    Raises:
        NodemendError: if the records could not be listed at all.
    """
    dark: set[str] = set()
    if request.ended is not None:
        incident = ports.closing.incidents.get(request.ended.name)
        closed = _close_if_left(incident, dark, ports) if incident else 0
        return WatchIncidentsResult(closed=closed)
    began = ports.clock.now()
    # First what needs nothing else to be well: events that wait must not wait for a broken policy.
    sent = unsent = 0
    if _finish_closes(ports):
        sent, unsent = ports.closing.outbox.publish_pending(before=began - PENDING_AFTER)
        ports.telemetry.gauge("EventsPending", unsent, "Count")
    # The clusters come from the incidents: a policy that names one no more, or cannot be read,
    # must not leave incidents behind.
    open_incidents = ports.closing.incidents.list_open(None)
    closed = _each(open_incidents, lambda incident: _close_if_left(incident, dark, ports))
    policy = _policy(ports)
    known = frozenset(cluster.name for cluster in policy.clusters) if policy else None
    closed += _each(open_incidents, lambda incident: _end_if_unknown(incident, known, ports))
    clusters = sorted({incident.cluster for incident in open_incidents} | (known or frozenset()))
    open_ids = frozenset(incident.id for incident in open_incidents)
    freed = _each(clusters, lambda cluster: _free_lost_slots(cluster, open_ids, ports))
    still_open = ports.closing.incidents.list_open(None) if closed else open_incidents
    overdue = _each(clusters, lambda cluster: watch_overdue(cluster, still_open, ports))
    ports.telemetry.gauge("IncidentsOverdue", overdue, "Count")
    silent = restored = left = unseen = 0
    if policy is not None:
        silent = _each(sorted(known or ()), lambda cluster: watch_scans(cluster, ports))
        ports.telemetry.gauge("ScansSilent", silent, "Count")
        until = began + LOOK_FOR
        look = partial(
            watch_cordons, policy=policy, open_incidents=still_open, until=until, ports=ports
        )
        restored, left, unseen = _look_at_clusters(
            policy.clusters, dark, look, until=until, ports=ports
        )
        # A rehearsal needs no access to a cluster yet, and must not alarm for it.
        unseen_now = 0 if policy.is_rehearsal else unseen
        ports.telemetry.gauge("ClustersUnseen", unseen_now, "Count")
    ports.telemetry.count("Watches")
    return WatchIncidentsResult(
        closed=closed,
        freed_slots=freed,
        sent_events=sent,
        unsent_events=unsent,
        restored_nodes=restored,
        left_cordons=left,
        overdue_incidents=overdue,
        silent_scans=silent,
        unseen_clusters=unseen,
    )


def _look_at_clusters(
    clusters: Sequence[ClusterPolicy],
    dark: set[str],
    look: Callable[[ClusterPolicy], tuple[int, int]],
    *,
    until: datetime,
    ports: WatchPorts,
) -> tuple[int, int, int]:
    """Return (nodes given back, cordons left, clusters that could not be seen).

    Clusters are looked at last, so that one that cannot be reached keeps nothing else waiting.
    """
    restored = left = unseen = 0
    for cluster in rotated(clusters, ports.clock.now()):
        if cluster.name in dark or ports.clock.now() >= until:
            unseen += 1
            continue
        try:
            given_back, waiting = look(cluster)
        except NodemendError:
            logger.exception("the nodes of cluster %s cannot be looked at", cluster.name)
            unseen += 1
            continue
        restored += given_back
        left += waiting
    if not unseen:
        # Unknown is not none: the alarm keeps its state until all clusters are seen again.
        ports.telemetry.gauge("CordonsLeft", left, "Count")
    return restored, left, unseen


def _finish_closes(ports: WatchPorts) -> bool:
    """Finish closes that died half-way; False if one has to be tried again.

    They are known by their end, which is not sent yet: so it must not be sent before.
    """
    is_done = True
    for incident_id in ports.closing.outbox.pending():
        try:
            finish_close(incident_id, now=ports.clock.now(), ports=ports.closing)
        except RetryableError:
            logger.exception("the close of incident %s is not finished yet", incident_id)
            is_done = False
        except NodemendError:
            # Will not get better by itself, and must not keep back what the others have to say.
            logger.exception("the close of incident %s cannot be finished", incident_id)
    return is_done


def _each(things: Iterable[T], look: Callable[[T], int]) -> int:
    """Look at each thing; trouble with one does not keep the others waiting."""
    total = 0
    for thing in things:
        try:
            total += look(thing)
        except NodemendError:
            logger.exception("the watch could not mend %s", getattr(thing, "id", thing))
    return total


def _policy(ports: WatchPorts) -> Policy | None:
    """Return the policy; None if it cannot be used: then no cluster is unknown, and none known."""
    try:
        return ports.policies.current()
    except NodemendError:
        logger.exception("the watch goes on without a policy")
        return None


def _end_if_unknown(incident: Incident, known: frozenset[str] | None, ports: WatchPorts) -> int:
    """End what waits for a cluster that the policy does not name any more: nobody dispatches it."""
    if known is None or incident.cluster in known or incident.state is not IncidentState.WAITING:
        return 0
    reason = Reason("cluster_unknown", f"the policy names no cluster {incident.cluster} any more")
    return _close(incident, Outcome.SKIPPED, reason, ports)


def _close_if_left(incident: Incident, dark: set[str], ports: WatchPorts) -> int:
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
    if outcome is Outcome.NEEDS_HUMAN and current.verdict is None:
        outcome, reason = _why_nobody_needed(current, dark, ports) or (outcome, reason)
    may_still_act = status is not None and status.status in STOPPED_FROM_OUTSIDE
    return _close(current, outcome, reason, ports, keeps_slot=may_still_act)


def _why_nobody_needed(
    incident: Incident, dark: set[str], ports: WatchPorts
) -> tuple[Outcome, Reason] | None:
    """Look at the node before a person is called; a cluster that is `dark` is asked only once."""
    if incident.cluster in dark or incident.cluster_policy is None:
        return None
    try:
        node = ports.clusters.open(pinned_cluster(incident)).get_node(incident.node.name)
    except NodemendError:
        logger.exception("incident %s is closed without a look at its node", incident.id)
        dark.add(incident.cluster)
        return None
    return why_nobody_needed(incident, node, ports.clock.now())


def _close(
    incident: Incident,
    outcome: Outcome,
    reason: Reason,
    ports: WatchPorts,
    *,
    keeps_slot: bool = False,
) -> int:
    try:
        close_and_free(
            incident,
            outcome,
            reason,
            step=STEP,
            now=ports.clock.now(),
            ports=ports.closing,
            keeps_slot=keeps_slot,
        )
    except ConcurrentUpdateError:
        logger.info("incident %s changed meanwhile: the next watch looks again", incident.id)
        return 0
    return 1


def _end_of(incident: Incident, status: ExecutionStatus | None) -> tuple[Outcome, Reason]:
    if incident.verdict is not None:
        return incident.verdict
    if incident.state is IncidentState.RELEASING and not incident.dry_run and incident.repair:
        # The repair is proven: only the cordon is left, and the watch takes that off.
        return proven_outcome(incident)
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


def _free_lost_slots(cluster: str, open_ids: frozenset[str], ports: WatchPorts) -> int:
    """Free slots of closed incidents when no function can be left that works under their lease.

    Those that no record has are freed when their lease is over. Who closed an incident and died
    before it had given everything back has left the slot: it goes after the ledger and the
    machine's record. So all of it is done again, and the fault that was handled does not open anew.
    """
    now = ports.clock.now()
    guard = ports.closing.guards.load(cluster)
    expired = {slot.incident_id for slot in expired_slots(guard, now)}
    freed = 0
    for slot in guard.slots.values():
        if slot.incident_id in open_ids:
            continue  # running, or closed by _close_if_left above, or started again by dispatch
        incident = ports.closing.incidents.get(slot.incident_id)
        is_expired = slot.incident_id in expired
        if incident is None and is_expired:
            lost = partial(release, incident_id=slot.incident_id)
            update_guard(ports.closing.guards, cluster, lost)
        elif incident is not None and _is_settled(incident, now, is_expired=is_expired):
            free(incident, now=now, ports=ports.closing)
        else:
            continue
        freed += 1
    return freed


def _is_settled(incident: Incident, now: datetime, *, is_expired: bool) -> bool:
    """Tell whether everybody who found the incident open has ended by now."""
    closed_at = incident.closed_at
    if not incident.is_closed or closed_at is None:
        return False
    return is_expired or now - closed_at >= LONGEST_FUNCTION
