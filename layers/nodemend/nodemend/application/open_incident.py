"""Record an incident for a node that a scan found sick. Acts on nothing."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from nodemend.application.closing import note_end
from nodemend.application.ports import (
    Clock,
    Cluster,
    Clusters,
    DispatchQueue,
    History,
    Ids,
    Incidents,
    Outbox,
    Policies,
    Telemetry,
)
from nodemend.contracts.events import GpuFaultDetected
from nodemend.contracts.evidence import FindingModel, PastIncidentModel
from nodemend.domain.errors import ConcurrentUpdateError, InvalidInputError
from nodemend.domain.escalation import offence_of, subjects_of
from nodemend.domain.events import DetailType
from nodemend.domain.faults import Mode
from nodemend.domain.findings import OCCURRENCE_VALID, Finding
from nodemend.domain.history import PastIncident
from nodemend.domain.history import merged as merge_records
from nodemend.domain.incidents import (
    Incident,
    IncidentState,
    Origin,
    Outcome,
    TimelineEntry,
    attach,
    event_ids,
    record,
)
from nodemend.domain.ledger import (
    LAST_CLOSE,
    LAST_CLOSE_KEPT,
    is_left_to_person,
    is_past,
    ledger_keys,
)
from nodemend.domain.nodes import Node, NodeRef, is_instance_id
from nodemend.domain.reasons import Reason

logger = logging.getLogger(__name__)

STEP = "open_incident"

CLOCK_SKEW = timedelta(minutes=2)
"""Evidence may be this far in the future; further, somebody's clock or message is wrong."""
SEEN_EVERY = timedelta(minutes=2)
"""How often the record of a waiting incident notes that its fault is still reported."""

ATTACH_TRIES = 4


@dataclass(frozen=True, slots=True)
class OpenIncidentPorts:
    """What opening an incident needs."""

    incidents: Incidents
    outbox: Outbox
    policies: Policies
    clusters: Clusters
    dispatch_queue: DispatchQueue
    telemetry: Telemetry
    ids: Ids
    clock: Clock
    history: History


def open_incident(fault: GpuFaultDetected, *, ports: OpenIncidentPorts) -> str | None:
    """Open an incident, attach to the node's open one, or drop a repeat.

    Every path is safe to repeat: the same message may come twice, late, or out of order.

    Returns:
        The id of the incident that has the findings now, or None if they were dropped.

    Raises:
        InvalidInputError: if the event speaks of a cluster that the policy does not name.
    """
    now = ports.clock.now()
    policy = ports.policies.current()
    cluster_policy = policy.cluster(fault.cluster)
    if cluster_policy is None:
        raise InvalidInputError(
            "cluster", f"{fault.cluster!r} is not in the policy", "add it to the policy's clusters"
        )
    findings = _current(fault, now, ports.telemetry)
    if not findings:
        return None
    cluster = ports.clusters.open(cluster_policy)
    nodes = nodes_named(cluster, _names(findings))
    origin = Origin(fault.origin)
    if len(nodes) != 1:
        _reject_unresolved(fault.cluster, findings, nodes, origin, policy.mode, ports, now)
        return None
    node = nodes[0]
    mode = policy.mode_for(node.labels)

    def opening() -> Incident | None:
        left = _unhandled(findings, node, mode, ports, now)
        history = recall(node.ref, left, ports.history) if left else ()
        news = tuple(one for one in left if not is_left_to_person(one, node, history))
        if not news:
            ports.telemetry.count("FindingsSuppressed", cluster=fault.cluster, why="duplicate")
            return None
        present = tuple(one for one in news if not is_past(one, node, history))
        _count_stale(len(news) - len(present), fault.cluster, ports.telemetry)
        if not present:
            return None
        return _new_incident(ports.ids.new(now), node, present, origin, mode, now, history)

    return _open_or_attach(opening, ports)


def _current(fault: GpuFaultDetected, now: datetime, telemetry: Telemetry) -> tuple[Finding, ...]:
    findings = tuple(model.to_finding(fault.cluster) for model in fault.findings)
    fresh = tuple(f for f in findings if -CLOCK_SKEW <= now - f.evidence.at <= OCCURRENCE_VALID)
    _count_stale(len(findings) - len(fresh), fault.cluster, telemetry)
    return fresh


def _count_stale(number: int, cluster: str, telemetry: Telemetry) -> None:
    if number:
        telemetry.count("FindingsSuppressed", number, cluster=cluster, why="stale")


def _names(findings: Iterable[Finding]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for finding in findings for name in finding.node_names))


def nodes_named(cluster: Cluster, names: Iterable[str]) -> tuple[Node, ...]:
    """Return the nodes that the names mean: by exact name or by EC2 instance id.

    Never by building or shortening a name. Names that mean several nodes are ambiguous.
    """
    found: dict[str, Node] = {}
    for name in names:
        node = cluster.get_node(name)
        if node is None and is_instance_id(name):
            node = next(
                (other for other in cluster.list_gpu_nodes() if other.ref.instance_id == name), None
            )
        if node is not None:
            found[node.ref.uid] = node
    return tuple(found.values())


def _unhandled(
    findings: tuple[Finding, ...],
    node: Node,
    mode: Mode,
    ports: OpenIncidentPorts,
    now: datetime,
) -> tuple[Finding, ...]:
    """Leave out what was handled on this boot; what a dry run handled only counts in a dry run."""
    keys = {
        finding.key: ledger_keys(finding.key, is_dry_run=mode is Mode.DRY_RUN)
        for finding in findings
    }
    until = ports.incidents.handled_until(
        node.ref.cluster, node.ref, [name for names in keys.values() for name in names]
    )
    return tuple(
        finding
        for finding in findings
        if all(name not in until or until[name] <= now for name in keys[finding.key])
    )


def _new_incident(
    incident_id: str,
    node: Node,
    findings: tuple[Finding, ...],
    origin: Origin,
    mode: Mode,
    now: datetime,
    history: tuple[PastIncident, ...],
) -> Incident:
    incident = Incident(
        id=incident_id,
        cluster=node.ref.cluster,
        node=node.ref,
        origin=origin,
        opened_at=now,
        state=IncidentState.WAITING,
        state_since=now,
        findings=findings,
        node_labels=node.labels,
        mode=mode,
        first_seen={str(finding.fault_class): now for finding in findings},
        history=history,
        last_seen=now,
    )
    return opened(incident, now)


def recall(
    node: NodeRef, findings: Iterable[Finding], history: History
) -> tuple[PastIncident, ...]:
    """Return what is known of the machine and of the GPUs in the findings, newest first."""
    uuids = dict.fromkeys(f.gpu_uuid for f in findings if f.verdict.is_actionable and f.gpu_uuid)
    return history.recall(node.cluster, subjects_of(node, uuids))


def opened(incident: Incident, now: datetime) -> Incident:
    """Return the new incident with its opening event, and a line for what is known of it."""
    if incident.history:
        known = TimelineEntry(now, STEP, "Earlier Incidents", offence_of(incident.history))
        incident = replace(incident, timeline=(*incident.timeline, known))
    return record(
        incident,
        DetailType.INCIDENT_OPENED,
        step=STEP,
        reason=Reason(str(incident.fault_class), incident.fault_text),
        now=now,
        data={
            "origin": incident.origin,
            "requested_by": incident.requested_by,
            "findings": tuple(FindingModel.of(finding) for finding in incident.findings),
            "record": tuple(PastIncidentModel.of(past) for past in incident.history),
        },
    )


def _open_or_attach(opening: Callable[[], Incident | None], ports: OpenIncidentPorts) -> str | None:
    incident = opening()
    for _ in range(ATTACH_TRIES):
        if incident is None:
            return None
        holder = ports.incidents.claim_node(incident.cluster, incident.node.uid, incident.id)
        existing = ports.incidents.get(holder)
        if existing is None:
            # Ours, or of an opener that died between the pointer and the record: under the
            # holder's id the record is the same either way.
            mine = _under(incident, holder)
            if ports.incidents.create(mine):
                ports.outbox.publish(holder, event_ids(mine))
                ports.dispatch_queue.notify(incident.cluster, holder)
                return holder
            continue
        if existing.is_closed:
            # Its close died before it dropped the pointer, and perhaps before it noted what it has
            # handled: first that, or the same fault would open again at once.
            now = ports.clock.now()
            note_end(existing, now=now, incidents=ports.incidents, history=ports.history)
            ports.incidents.release_node(incident.cluster, incident.node.uid, holder)
            incident = opening()
            continue
        if _attach(existing, incident, ports):
            return holder
    raise ConcurrentUpdateError(
        "the open incident of the node kept changing: the message is tried again"
    )


def _under(incident: Incident, incident_id: str) -> Incident:
    if incident_id == incident.id:
        return incident
    events = tuple(
        replace(event, event_id=event.event_id.replace(incident.id, incident_id))
        for event in incident.new_events
    )
    return replace(incident, id=incident_id, new_events=events)


def _attach(existing: Incident, new: Incident, ports: OpenIncidentPorts) -> bool:
    now = ports.clock.now()
    merged = attach(existing, new.findings, now=now)
    if merged is existing:
        _note_seen(existing, now, ports)
        ports.telemetry.count("FindingsSuppressed", cluster=existing.cluster, why="duplicate")
        # The opener may have died before it told the dispatcher; telling twice costs nothing.
        if existing.state is IncidentState.WAITING:
            ports.dispatch_queue.notify(existing.cluster, existing.id)
        return True
    if existing.verdict is not None:
        # It is about to close, and would take evidence with it that nobody has judged.
        return False
    try:
        history = merge_records((existing.history, new.history))
        ports.incidents.save(replace(merged, last_seen=now, history=history))
    except ConcurrentUpdateError:
        return False
    return True


def _note_seen(existing: Incident, now: datetime, ports: OpenIncidentPorts) -> None:
    """Keep a waiting incident young while its fault is reported; a lost note is no loss."""
    if existing.state is not IncidentState.WAITING or existing.verdict is not None:
        return
    if now - (existing.last_seen or existing.opened_at) < SEEN_EVERY:
        return
    try:
        ports.incidents.save(replace(existing, last_seen=now))
    except ConcurrentUpdateError:
        logger.info("incident %s changed meanwhile: whoever did has news of it", existing.id)


def _reject_unresolved(
    cluster: str,
    findings: tuple[Finding, ...],
    nodes: tuple[Node, ...],
    origin: Origin,
    mode: Mode,
    ports: OpenIncidentPorts,
    now: datetime,
) -> None:
    """Report once a day that no node could be found; no node is touched by guessing."""
    names = _names(findings)
    ref = NodeRef(cluster, names[0] if names else "")
    keys = [f"unresolved/{name}" for name in names] or ["unresolved/-"]
    handled = ports.incidents.handled_until(cluster, ref, [*keys, LAST_CLOSE])
    last_close = handled.get(LAST_CLOSE)
    if last_close is not None:
        ended = last_close - LAST_CLOSE_KEPT
        if all(finding.evidence.at <= ended for finding in findings):
            # The message comes late, and the node is gone because we have replaced it.
            _count_stale(len(findings), cluster, ports.telemetry)
            return
    if any(handled.get(key, now) > now for key in keys):
        ports.telemetry.count("FindingsSuppressed", cluster=cluster, why="duplicate")
        return
    reason = Reason(
        "unresolved_node",
        f"labels name {len(nodes)} nodes ({', '.join(node.ref.name for node in nodes)}), and a "
        "fault is of one: look at the relabelling rules of the scraper"
        if nodes
        else f"no node is named {' or '.join(names) or '(no label names a node)'}; the metrics "
        "must carry the exact node name, e.g. NODE_NAME of the exporter's DaemonSet",
    )
    incident = Incident(
        id=ports.ids.new(now),
        cluster=cluster,
        node=ref,
        origin=origin,
        opened_at=now,
        state=IncidentState.CLOSED,
        state_since=now,
        findings=findings,
        mode=mode,
        outcome=Outcome.SKIPPED,
        reason=reason,
        closed_at=now,
    )
    rejected = record(
        incident,
        DetailType.INCIDENT_REJECTED,
        step=STEP,
        reason=reason,
        now=now,
        data={"findings": tuple(FindingModel.of(finding) for finding in findings)},
    )
    ports.incidents.create(rejected)
    ports.incidents.mark_handled(cluster, ref, keys, now + timedelta(days=1))
    ports.outbox.publish(rejected.id, event_ids(rejected))
