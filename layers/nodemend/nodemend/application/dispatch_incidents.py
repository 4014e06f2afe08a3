"""One decision over all incidents that wait: who may act now."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

from nodemend.application.closing import ClosingPorts, close_and_free
from nodemend.application.guarding import tell_guard
from nodemend.application.ports import (
    Capacity,
    Clock,
    Cluster,
    Clusters,
    DispatchQueue,
    EventBus,
    Executions,
    Guards,
    History,
    Incidents,
    Outbox,
    Policies,
    Telemetry,
)
from nodemend.contracts.dispatch import (
    DispatchHint,
    DispatchIncidentsRequest,
    DispatchIncidentsResult,
)
from nodemend.domain.approval import foreseen
from nodemend.domain.dispatch import Admitted, Dispatch, Ended, Kept, decide_dispatch, plan_of
from nodemend.domain.errors import ConcurrentUpdateError, NodemendError
from nodemend.domain.escalation import allowed_plan, first_rung
from nodemend.domain.events import DetailType
from nodemend.domain.fleet import FleetSnapshot
from nodemend.domain.incidents import (
    Incident,
    IncidentState,
    Origin,
    TimelineEntry,
    event_ids,
    move,
    record,
)
from nodemend.domain.policy import ClusterPolicy, Policy
from nodemend.domain.rules import Catalogue

logger = logging.getLogger(__name__)

STEP = "dispatch_incidents"

GUARD_TRIES = 5

START_AGAIN_AFTER = timedelta(minutes=2)
"""An incident that was admitted this long ago and has not begun lost its StartExecution."""


TELL_FOR = timedelta(seconds=25)
"""Time for telling waiters what they wait for: in a storm of 2,000 nodes the function's own time is
too short for all of them, and a decision that was carried out must not be repeated for that."""


@dataclass(frozen=True, slots=True)
class DispatchPorts:
    """What a dispatch needs."""

    incidents: Incidents
    outbox: Outbox
    guards: Guards
    policies: Policies
    clusters: Clusters
    capacity: Capacity
    executions: Executions
    dispatch_queue: DispatchQueue
    bus: EventBus
    telemetry: Telemetry
    clock: Clock
    catalogue: Catalogue
    history: History


def dispatch_incidents(
    request: DispatchIncidentsRequest, *, ports: DispatchPorts
) -> DispatchIncidentsResult:
    """Decide for every cluster that the hints name, or for all of them on the schedule.

    A cluster that cannot be reached does not keep the others waiting.

    Raises:
        PolicyInvalidError: if the deployed policy cannot be used: nobody is admitted then.
        NodemendError: the last cluster's error, after all have been looked at.
    """
    policy = ports.policies.current()
    named = {hint.cluster for hint in request.hints}
    total = DispatchIncidentsResult()
    failure: NodemendError | None = None
    for cluster in policy.clusters:
        if request.hints and cluster.name not in named:
            continue
        hints = [hint for hint in request.hints if hint.cluster == cluster.name]
        try:
            done = _dispatch_cluster(cluster, hints, policy, ports)
        except NodemendError as error:
            logger.exception("dispatch of cluster %s failed", cluster.name)
            failure = error
            continue
        total = DispatchIncidentsResult(
            admitted=total.admitted + done.admitted,
            waiting=total.waiting + done.waiting,
            ended=total.ended + done.ended,
            restarted=total.restarted + done.restarted,
        )
    if failure is not None:
        raise failure
    return total


def _dispatch_cluster(
    cluster_policy: ClusterPolicy,
    hints: Sequence[DispatchHint],
    policy: Policy,
    ports: DispatchPorts,
) -> DispatchIncidentsResult:
    incidents = _open_incidents(cluster_policy.name, hints, ports)
    waiters = [
        incident
        for incident in incidents
        # By hand the execution came first, and takes the slot itself or ends the incident.
        if incident.state is IncidentState.WAITING and incident.origin is not Origin.HAND
    ]
    failures = _Failures()
    restarted = _start_again(incidents, failures, ports)
    ports.telemetry.gauge("IncidentsOpen", len(incidents), "Count", cluster=cluster_policy.name)
    ports.telemetry.gauge("IncidentsWaiting", len(waiters), "Count", cluster=cluster_policy.name)
    asking = sum(incident.state is IncidentState.APPROVING for incident in incidents)
    ports.telemetry.gauge("IncidentsApproving", asking, "Count", cluster=cluster_policy.name)
    if not waiters:
        if not hints:
            _look_at_fleet(cluster_policy, policy, ports)
        failures.raise_last()
        return DispatchIncidentsResult(restarted=restarted)
    decided, snapshot = decide_and_store(
        cluster_policy, ports.clusters.open(cluster_policy), waiters, policy, ports
    )
    for admission in decided.admitted:
        with failures.of(admission.incident.id):
            _begin(admission, cluster_policy, snapshot, policy, ports)
    _carry_out(decided, failures, ports)
    failures.raise_last()
    return DispatchIncidentsResult(
        admitted=len(decided.admitted),
        waiting=len(decided.kept),
        ended=len(decided.ended),
        restarted=restarted,
    )


@dataclass(slots=True)
class _Failures:
    """Lets one incident's trouble wait until the others have had their turn."""

    last: NodemendError | None = None

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        try:
            yield
        except NodemendError as error:
            logger.exception("dispatch of %s failed", what)
            self.last = error

    def raise_last(self) -> None:
        if self.last is not None:
            raise self.last


def _look_at_fleet(cluster_policy: ClusterPolicy, policy: Policy, ports: DispatchPorts) -> None:
    """Keep the breaker true while nobody waits.

    It must be open before the first node of a network blip is reported, and close after the last
    has recovered.
    A cluster that cannot be reached is no failure here: nothing is decided without it.
    """
    try:
        cluster = ports.clusters.open(cluster_policy)
        decide_and_store(cluster_policy, cluster, [], policy, ports)
    except NodemendError as error:
        logger.warning("the fleet of %s cannot be looked at: %s", cluster_policy.name, error)


def _open_incidents(
    cluster: str, hints: Iterable[DispatchHint], ports: DispatchPorts
) -> list[Incident]:
    """Return the open incidents; the index may lag, so hinted ones are read consistently."""
    found = {incident.id: incident for incident in ports.incidents.list_open(cluster)}
    for hint in hints:
        if not hint.incident_id:
            continue
        incident = ports.incidents.get(hint.incident_id)
        if incident is None or incident.is_closed:
            found.pop(hint.incident_id, None)
        else:
            found[incident.id] = incident
    return list(found.values())


def take_snapshot(
    cluster_policy: ClusterPolicy, cluster: Cluster, capacity: Capacity, clock: Clock
) -> FleetSnapshot:
    """Read the fleet: every GPU node, and the groups that they belong to."""
    fleet = capacity.fleet(cluster_policy)
    nodes = tuple(cluster.list_gpu_nodes())
    return FleetSnapshot(
        at=clock.now(),
        nodes=nodes,
        groups=fleet.groups,
        group_by_instance=fleet.group_by_instance,
    )


def decide_and_store(
    cluster_policy: ClusterPolicy,
    cluster: Cluster,
    waiters: Sequence[Incident],
    policy: Policy,
    ports: DispatchPorts,
    *,
    knows_all: bool = True,
) -> tuple[Dispatch, FleetSnapshot]:
    """Decide on guard and fleet as they are, and write the guard; again if somebody wrote first.

    The guard is read before the fleet: what another dispatcher does in between changes its
    version, and so a decision never rests on a fleet that is older than the guard it is written
    with.

    Raises:
        ConcurrentUpdateError: if every try lost.
    """
    name = cluster_policy.name
    for _ in range(GUARD_TRIES):
        guard = ports.guards.load(name)
        snapshot = take_snapshot(cluster_policy, cluster, ports.capacity, ports.clock)
        decided = decide_dispatch(
            guard, snapshot, waiters, policy, ports.clock.now(), knows_all=knows_all
        )
        is_changed = bool(decided.admitted) or decided.guard != guard
        if not is_changed or ports.guards.store(decided.guard):
            tell_guard(decided.guard, guards=ports.guards, bus=ports.bus)
            is_open = decided.guard.is_breaker_open
            ports.telemetry.gauge("BreakerOpen", int(is_open), "Count", cluster=name)
            return decided, snapshot
    raise ConcurrentUpdateError(f"the guard of {name} changed {GUARD_TRIES} times in a row")


def admit(
    admission: Admitted,
    cluster_policy: ClusterPolicy,
    snapshot: FleetSnapshot,
    policy: Policy,
    ports: DispatchPorts,
) -> Incident:
    """Return the admitted incident with its plan and everything else that it pins."""
    incident = admission.incident
    now = ports.clock.now()
    plan, churn = allowed_plan(plan_of(incident, policy), incident, now)
    first, spent = first_rung(plan, incident, policy, now)
    begun = tuple(TimelineEntry(now, STEP, "Next Rung", why) for why in (churn, spent) if why)
    pinned = replace(
        move(incident, IncidentState.ADMITTED, now),
        timeline=(*incident.timeline, *begun),
        rung_index=first,
        mode=policy.mode_for(admission.node.labels),
        policy_version=policy.version,
        cluster_policy=cluster_policy,
        waits=policy.waits,
        deadlines=policy.deadlines,
        hold_down_s=policy.hold_down_s,
        approval_policy=policy.approval,
        plan=plan,
        node_labels=admission.node.labels,
        group=admission.group,
        expected_gpus=snapshot.expected_gpus(admission.node, ports.catalogue.gpus_by_instance_type),
        expected_uuids=snapshot.expected_uuids(
            admission.node, ports.catalogue.gpus_by_instance_type
        ),
        waiting_for="",
    )
    return record(
        pinned,
        DetailType.INCIDENT_ADMITTED,
        step=STEP,
        reason=admission.reason,
        now=now,
        data={
            "mode": pinned.mode,
            "plan": tuple(pinned.plan),
            "group": pinned.group,
            "policy_version": pinned.policy_version,
            "approval": foreseen(pinned),
        },
    )


def _begin(
    admission: Admitted,
    cluster_policy: ClusterPolicy,
    snapshot: FleetSnapshot,
    policy: Policy,
    ports: DispatchPorts,
) -> None:
    """Record the admission, then start; a crash in between is mended by `_start_again`."""
    try:
        admitted = admit(admission, cluster_policy, snapshot, policy, ports)
        saved = ports.incidents.save(admitted)
    except ConcurrentUpdateError:
        logger.info(
            "incident %s got new evidence: the next dispatch admits it", admission.incident.id
        )
        ports.dispatch_queue.notify(admission.incident.cluster, admission.incident.id)
        return
    ports.outbox.publish(saved.id, event_ids(admitted))
    ports.executions.start(saved.id)


def _start_again(incidents: Iterable[Incident], failures: _Failures, ports: DispatchPorts) -> int:
    limit = ports.clock.now() - START_AGAIN_AFTER
    lost = [
        incident
        for incident in incidents
        if incident.state is IncidentState.ADMITTED
        and not incident.execution_arn
        and incident.state_since <= limit
    ]
    for incident in lost:
        logger.warning("incident %s was admitted and never began: starting it", incident.id)
        with failures.of(incident.id):
            ports.executions.start(incident.id)
    return len(lost)


def _carry_out(decided: Dispatch, failures: _Failures, ports: DispatchPorts) -> None:
    """Close those that end and tell those that wait, as many as there is time for.

    The next dispatch decides the same of the others.
    """
    end = ports.clock.now() + TELL_FOR
    todo: list[Ended | Kept] = [*decided.ended, *decided.kept]
    for done, one in enumerate(todo):
        if ports.clock.now() >= end:
            logger.info("%d more incidents are told in the next dispatch", len(todo) - done)
            return
        with failures.of(one.incident.id):
            if isinstance(one, Ended):
                _end(one.incident, one, ports)
            else:
                _keep(one, ports)


def _keep(kept: Kept, ports: DispatchPorts) -> None:
    """Tell once what the incident waits for; the same reason again is no news."""
    incident, reason = kept.incident, kept.reason
    if incident.waiting_for == reason.code:
        return
    waiting = record(
        replace(incident, waiting_for=reason.code),
        DetailType.INCIDENT_WAITING,
        step=STEP,
        reason=reason,
        now=ports.clock.now(),
    )
    try:
        ports.incidents.save(waiting)
    except ConcurrentUpdateError:
        return  # new evidence came in; the next dispatch says it
    ports.outbox.publish(incident.id, event_ids(waiting))


def _end(incident: Incident, ended: Ended, ports: DispatchPorts) -> None:
    closing = ClosingPorts(
        incidents=ports.incidents,
        outbox=ports.outbox,
        guards=ports.guards,
        dispatch_queue=ports.dispatch_queue,
        history=ports.history,
    )
    try:
        close_and_free(
            incident,
            ended.outcome,
            ended.reason,
            step=STEP,
            now=ports.clock.now(),
            ports=closing,
        )
    except ConcurrentUpdateError:
        ports.dispatch_queue.notify(incident.cluster, incident.id)
