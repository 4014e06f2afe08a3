"""Look whether the repair has happened: an answer of 200 proves nothing."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from nodemend.application.start_repair import RepairPorts
from nodemend.application.steps import (
    Progress,
    commit,
    hold_lease,
    load,
    pinned_cluster,
    progress,
)
from nodemend.contracts.steps import CheckRepairRequest, CheckRepairResult
from nodemend.domain.capacity import AutoScalingGroup
from nodemend.domain.errors import InvalidInputError
from nodemend.domain.escalation import escalate
from nodemend.domain.incidents import Incident, IncidentState, RepairRecord, move
from nodemend.domain.nodes import Node
from nodemend.domain.policy import wait_after
from nodemend.domain.reasons import Reason

STEP = "check_repair"


def check_repair(request: CheckRepairRequest, *, ports: RepairPorts) -> CheckRepairResult:
    """Find the replacement, and see whether its node is Ready with all its GPUs.

    The replacement is a new in-service instance of the group that this incident claims for itself.

    Raises:
        InvalidInputError: if no repair was started.
    """
    incident = load(ports.step, request)
    match progress(incident, following=IncidentState.VALIDATING):
        case Progress.ENDED:
            return CheckRepairResult(incident_id=incident.id, next="close")
        case Progress.DONE:
            return CheckRepairResult(incident_id=incident.id, next="validate")
        case Progress.TO_DO:
            incident = move(incident, IncidentState.CHECKING, ports.step.clock.now())
    repair = incident.repair
    if repair is None:
        raise InvalidInputError("repair", "was never started", "start the remediation again")
    repair = _claim(incident, repair, ports)
    problem, node = _look(incident, repair, ports)
    now = ports.step.clock.now()
    if node is not None and problem is None:
        found = replace(incident, repair=replace(repair, replacement_node=node.ref, polls=0))
        commit(ports.step, move(found, IncidentState.VALIDATING, now))
        return CheckRepairResult(incident_id=incident.id, next="validate")
    waited = problem or Reason("replacement_missing", "no replacement has been seen")
    noted = replace(
        incident, repair=replace(repair, polls=repair.polls + 1, last_problem=str(waited))
    )
    since = repair.started_at or repair.intended_at
    if now - since >= timedelta(seconds=incident.deadlines.replace_s):
        late = Reason(waited.code, f"after {incident.deadlines.replace_s} s: {waited.text}")
        commit(ports.step, escalate(noted, late, step=STEP, now=now))
        return CheckRepairResult(incident_id=incident.id, next="close")
    wait_s = wait_after(incident.waits.check_poll_s, repair.polls)
    hold_lease(ports.step, incident, cover_s=wait_s)
    commit(ports.step, noted)
    return CheckRepairResult(incident_id=incident.id, next="wait", wait_s=wait_s)


def _claim(incident: Incident, repair: RepairRecord, ports: RepairPorts) -> RepairRecord:
    """Claim a newcomer of the group, so that two incidents never take one node as their proof."""
    group = ports.capacity.group(pinned_cluster(incident), repair.group)
    claimed = repair.replacement_instance_id
    if claimed and (group is None or not group.is_leaving(claimed)):
        return repair
    # Nothing claimed yet, or what was claimed died before it joined: the group launches another.
    repair = replace(repair, replacement_instance_id="")
    for instance_id in group.newcomers(frozenset(repair.before)) if group else ():
        if ports.step.incidents.claim_instance(instance_id, incident.id):
            return replace(repair, replacement_instance_id=instance_id)
    return repair


def _look(
    incident: Incident, repair: RepairRecord, ports: RepairPorts
) -> tuple[Reason | None, Node | None]:
    cluster_policy = pinned_cluster(incident)
    instance_id = repair.replacement_instance_id
    if not instance_id:
        return _why_no_instance(incident, repair, ports), None
    nodes = ports.step.clusters.open(cluster_policy).list_gpu_nodes()
    node = _node_of(nodes, instance_id)
    if node is None:
        return Reason("replacement_unhealthy", f"{instance_id} has not joined the cluster"), None
    return why_unfit(node, incident.expected_gpus), node


def _node_of(nodes: Sequence[Node], instance_id: str) -> Node | None:
    return next((node for node in nodes if node.ref.instance_id == instance_id), None)


def why_unfit(node: Node, expected_gpus: int) -> Reason | None:
    """Return why a new node is not fit to work, or None."""
    if not node.is_ready:
        return Reason("replacement_unhealthy", f"{node.ref.name} is not Ready")
    if node.gpu_allocatable < expected_gpus:
        return Reason(
            "replacement_unhealthy",
            f"{node.ref.name} offers {node.gpu_allocatable} of {expected_gpus} GPUs",
        )
    return None


def _why_no_instance(incident: Incident, repair: RepairRecord, ports: RepairPorts) -> Reason:
    cluster_policy = pinned_cluster(incident)
    group: AutoScalingGroup | None = ports.capacity.group(cluster_policy, repair.group)
    if group is None:
        return Reason("replacement_missing", f"group {repair.group} is gone")
    if group.desired < repair.desired_before:
        return Reason(
            "capacity_lost",
            f"the desired capacity of {group.name} fell from {repair.desired_before} to "
            f"{group.desired} meanwhile: nothing will be launched",
        )
    since = repair.started_at or repair.intended_at
    failure = ports.capacity.launch_problem(cluster_policy, group.name, since)
    if failure:
        return Reason("replacement_missing", f"{group.name} cannot launch: {failure}")
    return Reason("replacement_missing", f"{group.name} has no new instance in service yet")
