"""What all steps of the state machine do first and last.

A step reads the incident, makes sure that the incident is its own and the node the same machine,
observes before it acts, and commits the change with its events in one write.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum

from nodemend.application.ports import (
    Capacity,
    Clock,
    Cluster,
    Clusters,
    Guards,
    Incidents,
    Invocation,
    Outbox,
    Policies,
)
from nodemend.contracts.steps import StepRequest
from nodemend.domain.capacity import AutoScalingGroup
from nodemend.domain.errors import (
    ConcurrentUpdateError,
    InvalidInputError,
    LeaseLostError,
    PolicyInvalidError,
    SupersededError,
)
from nodemend.domain.events import DetailType
from nodemend.domain.faults import Mode
from nodemend.domain.guard import BREAKER_OPEN, LEASE_MARGIN, Guard, is_lease_valid, renew
from nodemend.domain.incidents import (
    Incident,
    IncidentState,
    Outcome,
    event_ids,
    record,
    require_owner,
)
from nodemend.domain.nodes import Node
from nodemend.domain.policy import ClusterPolicy
from nodemend.domain.rails import why_node_held
from nodemend.domain.reasons import Reason

GUARD_TRIES = 5
"""Reads and conditional writes of the guard before a step gives up and is retried."""


@dataclass(frozen=True, slots=True)
class StepPorts:
    """The ports that every step needs."""

    incidents: Incidents
    outbox: Outbox
    guards: Guards
    policies: Policies
    clusters: Clusters
    clock: Clock
    invocation: Invocation


def load(ports: StepPorts, request: StepRequest) -> Incident:
    """Return the incident, if this execution owns it.

    Raises:
        InvalidInputError: if there is no such incident.
        SupersededError: if it is closed or another execution's.
    """
    incident = ports.incidents.get(request.incident_id)
    if incident is None:
        raise InvalidInputError(
            "incident_id", f"{request.incident_id} is unknown", "start a new remediation"
        )
    require_owner(incident, request.execution.arn)
    return incident


class Progress(StrEnum):
    """Whether a step has anything left to do."""

    TO_DO = "to_do"
    DONE = "done"
    """An earlier try of this step stored its result and died before it could return it."""
    ENDED = "ended"
    """The incident's end is decided: only the close is left."""


def progress(incident: Incident, *, following: IncidentState) -> Progress:
    """Tell whether the step before the state `following` was done by an earlier try."""
    if incident.verdict is not None:
        return Progress.ENDED
    return Progress.DONE if incident.state is following else Progress.TO_DO


def commit(ports: StepPorts, incident: Incident) -> Incident:
    """Store the incident with its events, then send them; return it as stored.

    Raises:
        ConcurrentUpdateError: if the record changed meanwhile; the step is retried and observes.
    """
    saved = ports.incidents.save(incident)
    if incident.new_events:
        ports.outbox.publish(saved.id, event_ids(incident))
    return saved


def pinned_cluster(incident: Incident) -> ClusterPolicy:
    """Return the cluster as it was when the incident was admitted.

    Raises:
        PolicyInvalidError: if the record pins none.
    """
    if incident.cluster_policy is None:
        raise PolicyInvalidError(f"incident {incident.id} pins no cluster")
    return incident.cluster_policy


def observe_node(cluster: Cluster, incident: Incident) -> Node:
    """Read the node and make sure that it is still the machine of the incident.

    Raises:
        SupersededError: if the node is gone, or the name means another machine by now.
    """
    node = cluster.get_node(incident.node.name)
    if node is None:
        raise SupersededError(f"node {incident.node.name} is gone")
    if not node.ref.is_same_machine(incident.node):
        raise SupersededError(
            f"node {incident.node.name} is uid {node.ref.uid} on {node.ref.instance_id} now, not "
            f"uid {incident.node.uid} on {incident.node.instance_id}"
        )
    return node


def why_mode_forbids(ports: StepPorts, incident: Incident, *, is_cordon: bool) -> Reason | None:
    """Return why the live mode stops an incident that was admitted with more freedom.

    Raises:
        PolicyInvalidError: if the policy in force cannot be used: then nothing may be changed.
    """
    mode = ports.policies.current().mode_for(incident.node_labels)
    if mode is Mode.ENFORCE or (mode is Mode.CORDON_ONLY and is_cordon):
        return None
    return Reason("mode_changed", f"the policy's mode became {mode} while the incident was running")


def why_held(
    ports: StepPorts, incident: Incident, node: Node, *, is_untouched: bool = False
) -> Reason | None:
    """Return why nothing may be changed now, or None; read live.

    A person's pause of the cluster or the node holds every change. The breaker holds only what has
    not begun: a dispatcher that saw the first two nodes of a storm has let them go. A dry run
    changes nothing, so nothing of it is held.

    Args:
        ports: the step's ports.
        incident: the incident.
        node: its node, as it is now.
        is_untouched: True as long as nothing was done to the node.
    """
    if incident.dry_run:
        return None
    guard = ports.guards.load(incident.cluster)
    if guard.pause is not None:
        return guard.pause.reason()
    breaker = guard.breaker_over(incident.group)
    if is_untouched and breaker is not None:
        return breaker.reason()
    return why_node_held(node)


def why_others_work(
    incident: Incident, group: AutoScalingGroup | None, capacity: Capacity
) -> Reason | None:
    """Return what somebody else does to the node's whole group, or None."""
    work = capacity.other_work(pinned_cluster(incident), group) if group else ""
    return Reason("other_remediator", work) if work else None


def end_of_held(held: Reason) -> Outcome:
    """Return how an incident ends that was held for too long: by the breaker, or by a person."""
    return Outcome.SKIPPED if held.code == BREAKER_OPEN else Outcome.ABORTED_BY_OPERATOR


def tell_held(incident: Incident, held: Reason, *, step: str, now: datetime) -> Incident:
    """Return the held incident; the event is recorded once per cause, not once per look."""
    if incident.waiting_for == held.code:
        return incident
    waiting = replace(incident, waiting_for=held.code)
    return record(waiting, DetailType.INCIDENT_WAITING, step=step, reason=held, now=now)


def hold_lease(ports: StepPorts, incident: Incident, *, cover_s: float = 0) -> Reason | None:
    """Renew the incident's lease so that it covers this invocation and the wait after it.

    Call directly before changing anything. Every change is made under a lease that was read and
    extended in the same invocation and outlives it.

    Returns:
        The pause that the same read found, if there is one: then nothing may be changed. What
        changes nothing (a look at a repair that was asked for) goes on.

    Raises:
        LeaseLostError: if the incident holds no slot.
        ConcurrentUpdateError: if the guard kept changing; the step is retried.
    """

    def extend(guard: Guard) -> Guard:
        now = ports.clock.now()
        until = now + timedelta(seconds=ports.invocation.remaining_s() + cover_s) + LEASE_MARGIN
        return renew(guard, incident, until=until)

    guard = update_guard(ports.guards, incident.cluster, extend)
    remaining_s = ports.invocation.remaining_s()
    if not is_lease_valid(guard, incident, now=ports.clock.now(), remaining_s=remaining_s):
        raise LeaseLostError(f"incident {incident.id}: the lease ends before this invocation")
    return guard.pause.reason() if guard.pause else None


def update_guard(guards: Guards, cluster: str, change: Callable[[Guard], Guard]) -> Guard:
    """Read, change and conditionally write the guard, a few times if others write too.

    Returns:
        The guard as written (or as read, if `change` returned it unchanged).

    Raises:
        ConcurrentUpdateError: if every try lost.
    """
    for _ in range(GUARD_TRIES):
        guard = guards.load(cluster)
        changed = change(guard)
        if changed is guard or guards.store(changed):
            return changed
    raise ConcurrentUpdateError(f"the guard of {cluster} changed {GUARD_TRIES} times in a row")
