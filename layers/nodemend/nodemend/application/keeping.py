"""Keeping our cordon on a node that we reboot.

A driver's own manager cordons a node for its reload, and in the end uncordons what it found
cordoned (cases R76, A4 of the field reports). So a cordon that is lost during our own reboot is put
back once, and told. A second time, or without our mark, somebody means it.
"""

from dataclasses import replace

from nodemend.application.ports import Cluster
from nodemend.application.restoring import PATCH_TRIES, restore
from nodemend.application.steps import (
    StepPorts,
    commit,
    hold_lease,
    observe_node,
    why_mode_forbids,
)
from nodemend.domain.cordon import cordon_patch, is_cordoned_by, ownership_of
from nodemend.domain.errors import ConcurrentUpdateError
from nodemend.domain.events import DetailType
from nodemend.domain.incidents import Incident, Outcome, decide_end, record
from nodemend.domain.nodes import Node
from nodemend.domain.rails import why_node_held
from nodemend.domain.reasons import Reason


def keep_cordon(
    incident: Incident, node: Node, cluster: Cluster, *, step: str, ports: StepPorts
) -> Incident:
    """Return the incident with its cordon seen to; the caller stores it.

    Its end is decided (ABORTED_BY_OPERATOR) if the node was uncordoned by somebody who means it.

    Raises:
        LeaseLostError: if the cordon would have to be restored and the incident holds no lease.
        ConcurrentUpdateError: if the node kept changing under the patch.
    """
    repair = incident.repair
    if repair is None or incident.cordon is None:
        return incident
    is_cordoned = is_cordoned_by(node, incident.id)
    if is_cordoned and (repair.cordon_lost_at is None or repair.cordon_restored_at is not None):
        return incident
    if not is_cordoned:
        owner = ownership_of(node)
        is_marked = owner is not None and owner.incident_id == incident.id
        if repair.cordon_restored_at is not None or not is_marked:
            return _aborted(incident, cluster)
        forbidden = why_mode_forbids(ports, incident, is_cordon=True)
        if forbidden is not None:
            return decide_end(incident, Outcome.ABORTED_BY_OPERATOR, forbidden)
        if repair.cordon_lost_at is None:
            noted = replace(repair, cordon_lost_at=ports.clock.now())
            incident = commit(ports, replace(incident, repair=noted))
        held = hold_lease(ports, incident) or why_node_held(node)
        if held is not None:
            return incident  # put back when the pause is over; the taint still keeps pods off
        _cordon_again(cluster, node, incident)
    return _told(incident, cluster, step=step, ports=ports)


def _aborted(incident: Incident, cluster: Cluster) -> Incident:
    restore(cluster, incident)
    text = f"somebody has uncordoned {incident.node.name}: nodemend keeps off it"
    return decide_end(incident, Outcome.ABORTED_BY_OPERATOR, Reason("uncordoned", text))


def _cordon_again(cluster: Cluster, node: Node, incident: Incident) -> None:
    for _ in range(PATCH_TRIES):
        ownership = ownership_of(node)
        if ownership is None or is_cordoned_by(node, incident.id):
            return
        if cluster.patch_node(node.ref.name, cordon_patch(node, ownership)):
            return
        node = observe_node(cluster, incident)
    raise ConcurrentUpdateError(f"node {node.ref.name} changed {PATCH_TRIES} times in a row")


def _told(incident: Incident, cluster: Cluster, *, step: str, ports: StepPorts) -> Incident:
    if incident.repair is None or incident.cordon is None:  # pragma: no cover - asked above
        raise AssertionError("there is no repair")
    now = ports.clock.now()
    text = f"the cordon of {incident.node.name} was lost during its reboot, and was put back once"
    cluster.record_event(
        incident.node, "NodemendCordoned", f"{text} (incident {incident.id})", is_warning=True
    )
    return record(
        replace(incident, repair=replace(incident.repair, cordon_restored_at=now)),
        DetailType.NODE_CORDONED,
        step=step,
        reason=Reason("cordon_lost", text),
        now=now,
        data={"was_unschedulable": incident.cordon.was_unschedulable},
    )
