"""Restore what the cordon changed, if the node is still there, and name the outcome."""

from nodemend.application.ports import Cluster
from nodemend.application.steps import StepPorts, commit, load, pinned_cluster
from nodemend.contracts.steps import ReleaseNodeRequest, ReleaseNodeResult
from nodemend.domain.cordon import ownership_of, restore_patch
from nodemend.domain.errors import ConcurrentUpdateError
from nodemend.domain.events import DetailType
from nodemend.domain.faults import Rung
from nodemend.domain.incidents import (
    Incident,
    IncidentState,
    Outcome,
    decide_end,
    move,
    record,
)
from nodemend.domain.reasons import Reason

STEP = "release_node"

PATCH_TRIES = 4


def release_node(request: ReleaseNodeRequest, *, ports: StepPorts) -> ReleaseNodeResult:
    """Take our cordon off, exactly: a node that was cordoned before us stays cordoned.

    No lease is needed: a release never takes capacity away, so it always goes on.

    Raises:
        ConcurrentUpdateError: if the node kept changing under the patch.
    """
    incident = load(ports, request)
    if incident.verdict is not None:
        return ReleaseNodeResult(incident_id=incident.id)
    now = ports.clock.now()
    incident = move(incident, IncidentState.RELEASING, now)
    cluster = ports.clusters.open(pinned_cluster(incident))
    found, is_uncordoned = _restore(cluster, incident)
    outcome, reason = _outcome(incident)
    released = record(
        incident,
        DetailType.NODE_RELEASED,
        step=STEP,
        reason=found,
        now=now,
        data={"is_uncordoned": is_uncordoned},
    )
    commit(ports, decide_end(released, outcome, reason))
    return ReleaseNodeResult(incident_id=incident.id)


def _restore(cluster: Cluster, incident: Incident) -> tuple[Reason, bool]:
    """Return what was found and done, and whether the node takes pods again."""
    name = incident.node.name
    for _ in range(PATCH_TRIES):
        node = cluster.get_node(name)
        if node is None or not node.ref.is_same_machine(incident.node):
            return Reason("node_gone", f"{name} is gone: nothing to restore"), False
        ownership = ownership_of(node)
        if ownership is None or ownership.incident_id != incident.id:
            # An earlier try of this step took it off, or somebody else did.
            absent = Reason("not_cordoned_by_us", f"{name} carries no cordon of this incident")
            return absent, not node.is_unschedulable
        if cluster.patch_node(node.ref.name, restore_patch(node, ownership)):
            restored = Reason("restored", f"{name} is as it was before")
            return restored, not ownership.was_unschedulable
    raise ConcurrentUpdateError(f"node {incident.node.name} changed {PATCH_TRIES} times in a row")


def _outcome(incident: Incident) -> tuple[Outcome, Reason]:
    repair = incident.repair
    if repair is not None and repair.rung is Rung.REPLACE and repair.replacement_node is not None:
        new = repair.replacement_node
        return Outcome.REPLACED, Reason(
            "replaced",
            f"{incident.node.name} ({incident.node.instance_id}) was replaced by {new.name} "
            f"({new.instance_id}) because of {incident.fault_text}",
        )
    return Outcome.RECOVERED, Reason("recovered", f"{incident.node.name} needed no repair")
