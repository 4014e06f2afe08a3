"""Restore what the cordon changed, if the node is still there, and name the outcome."""

from nodemend.application.restoring import restore
from nodemend.application.steps import StepPorts, commit, load, pinned_cluster
from nodemend.contracts.steps import ReleaseNodeRequest, ReleaseNodeResult
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
    outcome, reason = proven_outcome(incident)
    if outcome is Outcome.REPLACED:
        # Its instance was terminated. A lifecycle hook may keep the node for a while yet, and a
        # sick node that is on its way out must not take pods again.
        found, is_uncordoned = Reason("node_leaving", f"{incident.node.name} is leaving"), False
    else:
        found, is_uncordoned = restore(cluster, incident)
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


def proven_outcome(incident: Incident) -> tuple[Outcome, Reason]:
    """Return the end of an incident that has only its release left."""
    repair = incident.repair
    if repair is not None and repair.rung is Rung.REPLACE and repair.replacement_node is not None:
        new = repair.replacement_node
        return Outcome.REPLACED, Reason(
            "replaced",
            f"{incident.node.name} ({incident.node.instance_id}) was replaced by {new.name} "
            f"({new.instance_id}) because of {incident.fault_text}",
        )
    if repair is not None and repair.rung is Rung.REBOOT and repair.rebooted_node is not None:
        return Outcome.REBOOTED, Reason(
            "rebooted",
            f"{incident.node.name} ({incident.node.instance_id}) was rebooted because of "
            f"{incident.fault_text}, and works again",
        )
    return Outcome.RECOVERED, Reason("recovered", f"{incident.node.name} needed no repair")
