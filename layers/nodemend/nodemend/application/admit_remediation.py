"""First step: whose execution is this, and does it hold a slot?"""

from dataclasses import replace
from datetime import datetime

from nodemend.application.dispatch_incidents import (
    DispatchPorts,
    admit,
    decide_and_store,
)
from nodemend.application.open_incident import opened, recall
from nodemend.application.ports import Cluster
from nodemend.contracts.steps import (
    AdmitRemediationRequest,
    AdmitRemediationResult,
    RemediateByHand,
    RemediateIncident,
)
from nodemend.domain.errors import InvalidInputError, LeaseLostError, SupersededError
from nodemend.domain.events import DetailType
from nodemend.domain.faults import Mode
from nodemend.domain.history import PastIncident
from nodemend.domain.incidents import (
    Incident,
    IncidentState,
    Origin,
    Outcome,
    decide_end,
    event_ids,
    move,
    record,
    require_owner,
)
from nodemend.domain.nodes import Node
from nodemend.domain.policy import ClusterPolicy, Policy
from nodemend.domain.reasons import Reason

STEP = "admit_remediation"


def admit_remediation(
    request: AdmitRemediationRequest, *, ports: DispatchPorts
) -> AdmitRemediationResult:
    """Take up the incident that the dispatcher admitted, or open and admit one by hand.

    By hand the execution's name is the incident's id, and the slot is taken here; if there is no
    room, the incident ends with the limit that decided. A person may start it again later.

    Raises:
        InvalidInputError: if the input is wrong; names the field and the remedy.
        SupersededError: if the incident belongs to another execution (a copy, a redrive).
        LeaseLostError: if the dispatcher's slot is gone.
    """
    parsed = request.parse_input()
    if isinstance(parsed, RemediateIncident):
        incident = _admitted_incident(parsed, request, ports)
    else:
        incident = _by_hand(parsed, request, ports)
    if incident.verdict is not None or incident.is_closed:
        return AdmitRemediationResult(incident_id=incident.id, next="close")
    if incident.state is not IncidentState.ADMITTED:
        return AdmitRemediationResult(incident_id=incident.id, next="verify")
    now = ports.clock.now()
    ports.incidents.save(
        replace(
            move(incident, IncidentState.VERIFYING, now),
            execution_arn=request.execution.arn,
            verify_since=incident.verify_since or now,
        )
    )
    return AdmitRemediationResult(incident_id=incident.id, next="verify")


def _admitted_incident(
    parsed: RemediateIncident, request: AdmitRemediationRequest, ports: DispatchPorts
) -> Incident:
    incident = ports.incidents.get(parsed.incident_id)
    if incident is None:
        raise InvalidInputError(
            "incident_id",
            f"{parsed.incident_id} is unknown",
            "start by hand with cluster, node, reason and requested_by",
        )
    if request.execution.name != incident.id:
        raise SupersededError(
            f"incident {incident.id} belongs to the execution of its own name, and this one is "
            f"{request.execution.name}"
        )
    require_owner(incident, request.execution.arn)
    _require_slot(incident, ports)
    return incident


def _require_slot(incident: Incident, ports: DispatchPorts) -> None:
    slot = ports.guards.load(incident.cluster).slots.get(incident.node.uid)
    if slot is None or slot.incident_id != incident.id:
        raise LeaseLostError(f"incident {incident.id} holds no slot for {incident.node.name}")


def _by_hand(
    parsed: RemediateByHand, request: AdmitRemediationRequest, ports: DispatchPorts
) -> Incident:
    policy = ports.policies.current()
    cluster_policy = _cluster(parsed, policy)
    known = ports.incidents.get(request.execution.name)
    if known is not None and known.origin is not Origin.HAND:
        raise SupersededError(f"{known.id} is the id of an incident that a {known.origin} opened")
    if known is not None:
        require_owner(known, request.execution.arn)
        if known.state is not IncidentState.WAITING:
            return known  # a retry of this step: everything below was done
    cluster = ports.clusters.open(cluster_policy)
    incident = known or _open(parsed, request, cluster, policy, ports)
    if incident.verdict is not None or incident.is_closed:
        return incident
    incident = _claim(incident, ports)
    if incident.verdict is not None:
        return incident
    return _take_slot(incident, cluster_policy, cluster, policy, ports)


def _cluster(parsed: RemediateByHand, policy: Policy) -> ClusterPolicy:
    cluster = policy.cluster(parsed.cluster)
    if cluster is None:
        known = ", ".join(sorted(c.name for c in policy.clusters)) or "(none)"
        raise InvalidInputError(
            "cluster", f"{parsed.cluster!r} is not in the policy", f"use one of {known}"
        )
    return cluster


def _open(
    parsed: RemediateByHand,
    request: AdmitRemediationRequest,
    cluster: Cluster,
    policy: Policy,
    ports: DispatchPorts,
) -> Incident:
    node = cluster.get_node(parsed.node)
    if node is None:
        raise InvalidInputError(
            "node",
            f"cluster {parsed.cluster} has no node {parsed.node!r}",
            "use a name exactly as `kubectl get nodes` prints it",
        )
    now = ports.clock.now()
    mode = policy.mode_for(node.labels)
    history = recall(node.ref, (), ports.history)
    incident = opened(_new_incident(parsed, request, node, mode, now, history), now)
    # The record comes first: a pointer to an incident that was never stored would block the node.
    if ports.incidents.create(incident):
        ports.outbox.publish(incident.id, event_ids(incident))
    return ports.incidents.get(incident.id) or incident


def _claim(incident: Incident, ports: DispatchPorts) -> Incident:
    """Make the incident the node's open one, or end it: the node has another."""
    holder = _claim_node(incident, ports)
    if holder == incident.id:
        return incident
    reason = Reason("already_open", f"incident {holder} is open for {incident.node.name} already")
    rejected = _reject(incident, reason, ports)
    saved = ports.incidents.save(rejected)
    ports.outbox.publish(saved.id, event_ids(rejected))
    return saved


def _claim_node(incident: Incident, ports: DispatchPorts) -> str:
    """Claim the node; a pointer that a closed incident left behind stands in nobody's way."""
    uid = incident.node.uid
    holder = ports.incidents.claim_node(incident.cluster, uid, incident.id)
    if holder != incident.id:
        existing = ports.incidents.get(holder)
        if existing is not None and existing.is_closed:
            ports.incidents.release_node(incident.cluster, uid, holder)
            holder = ports.incidents.claim_node(incident.cluster, uid, incident.id)
    return holder


def _new_incident(
    parsed: RemediateByHand,
    request: AdmitRemediationRequest,
    node: Node,
    mode: Mode,
    now: datetime,
    history: tuple[PastIncident, ...],
) -> Incident:
    return Incident(
        id=request.execution.name,
        cluster=parsed.cluster,
        node=node.ref,
        origin=Origin.HAND,
        opened_at=now,
        state=IncidentState.WAITING,
        state_since=now,
        node_labels=node.labels,
        mode=mode,
        requested_by=parsed.requested_by,
        request_reason=parsed.reason,
        execution_arn=request.execution.arn,
        history=history,
    )


def _take_slot(
    incident: Incident,
    cluster_policy: ClusterPolicy,
    cluster: Cluster,
    policy: Policy,
    ports: DispatchPorts,
) -> Incident:
    decided, snapshot = decide_and_store(
        cluster_policy, cluster, [incident], policy, ports, knows_all=False
    )
    if decided.admitted:
        admitted = admit(decided.admitted[0], cluster_policy, snapshot, policy, ports)
    elif decided.kept:
        admitted = _reject(incident, decided.kept[0].reason, ports)
    else:
        ended = decided.ended[0]
        admitted = decide_end(incident, ended.outcome, ended.reason)
    saved = ports.incidents.save(admitted)
    ports.outbox.publish(saved.id, event_ids(admitted))
    return saved


def _reject(incident: Incident, reason: Reason, ports: DispatchPorts) -> Incident:
    rejected = record(
        incident, DetailType.INCIDENT_REJECTED, step=STEP, reason=reason, now=ports.clock.now()
    )
    return decide_end(rejected, Outcome.SKIPPED, reason)
