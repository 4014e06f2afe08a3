"""Look whether the repair has happened: an answer of 200 proves nothing."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Literal

from nodemend.application.keeping import keep_cordon
from nodemend.application.start_repair import RepairPorts
from nodemend.application.steps import (
    Progress,
    commit,
    hold_lease,
    load,
    observe_node,
    pinned_cluster,
    progress,
)
from nodemend.contracts.steps import CheckRepairRequest, CheckRepairResult
from nodemend.domain.capacity import AutoScalingGroup
from nodemend.domain.errors import InvalidInputError
from nodemend.domain.escalation import escalate, is_on_next_rung
from nodemend.domain.faults import Rung
from nodemend.domain.incidents import Incident, IncidentState, RepairRecord, move
from nodemend.domain.nodes import Node
from nodemend.domain.policy import wait_after
from nodemend.domain.reasons import Reason

STEP = "check_repair"


def check_repair(request: CheckRepairRequest, *, ports: RepairPorts) -> CheckRepairResult:
    """See whether the node has booted anew, or whether its replacement is Ready with all GPUs.

    The replacement is a new in-service instance of the group that this incident claims for itself.

    Raises:
        InvalidInputError: if no repair was started.
        SupersededError: if the rebooted node is another machine by now.
    """
    incident = load(ports.step, request)
    match progress(incident, following=IncidentState.VALIDATING):
        case Progress.ENDED:
            return CheckRepairResult(incident_id=incident.id, next="close")
        case Progress.DONE:
            return CheckRepairResult(incident_id=incident.id, next="validate")
        case Progress.TO_DO:
            pass
    if is_on_next_rung(incident) or incident.state is IncidentState.REPAIRING:
        # An earlier try decided on another repair, and died before it could say so.
        return CheckRepairResult(incident_id=incident.id, next="repair")
    incident = move(incident, IncidentState.CHECKING, ports.step.clock.now())
    repair = incident.repair
    if repair is None:
        raise InvalidInputError("repair", "was never started", "start the remediation again")
    if repair.rung is Rung.REBOOT:
        return _check_reboot(incident, repair, ports)
    return _check_replacement(incident, repair, ports)


# --- reboot -------------------------------------------------------------------------------------


def _check_reboot(
    incident: Incident, repair: RepairRecord, ports: RepairPorts
) -> CheckRepairResult:
    cluster = ports.step.clusters.open(pinned_cluster(incident))
    node = observe_node(cluster, incident)
    if node.ref.boot_id not in ("", repair.boot_id_before):
        # However this ends, the ledger must know on which boot.
        repair = replace(repair, rebooted_node=node.ref)
        incident = replace(incident, repair=repair)
    kept = keep_cordon(incident, node, cluster, step=STEP, ports=ports.step)
    if kept.verdict is not None:
        commit(ports.step, kept)
        return CheckRepairResult(incident_id=incident.id, next="close")
    incident, repair = kept, kept.repair or repair
    problem = why_not_rebooted(node, repair)
    now = ports.step.clock.now()
    if problem is None:
        seen = replace(repair, rebooted_node=node.ref, polls=0, last_problem="")
        booted = replace(incident, repair=seen)
        commit(ports.step, move(booted, IncidentState.VALIDATING, now))
        return CheckRepairResult(incident_id=incident.id, next="validate")
    passed = now - repair.intended_at
    deadline = timedelta(seconds=incident.deadlines.reboot_s)
    if passed >= deadline:
        text = f"after {incident.deadlines.reboot_s} s: {problem.text}"
        return _too_late(incident, repair, Reason(problem.code, text), ports)
    is_lost = repair.is_unanswered and repair.asks == 1
    if is_lost and node.ref.boot_id == repair.boot_id_before and passed >= deadline / 2:
        # EC2 turns a reboot hard within minutes, so this one was never accepted.
        commit(ports.step, move(incident, IncidentState.REPAIRING, now))
        return CheckRepairResult(incident_id=incident.id, next="repair")
    return _wait(incident, repair, problem, ports)


def why_not_rebooted(node: Node, repair: RepairRecord) -> Reason | None:
    """Return why the node has not proven its reboot yet, or None.

    A kubelet that has just started may post an empty boot id, and for a while after the call the
    node is still there as it was (case R57).
    """
    name = node.ref.name
    if not node.ref.boot_id or node.ref.boot_id == repair.boot_id_before:
        shown = node.ref.boot_id or "no boot id"
        return Reason("reboot_not_observed", f"{name} has not booted again ({shown})")
    is_newer = node.heartbeat_at is not None and node.heartbeat_at > repair.intended_at
    if not node.is_ready or not is_newer:
        return Reason("reboot_unhealthy", f"{name} has booted again and is not Ready yet")
    return None


# --- replacement --------------------------------------------------------------------------------


def _check_replacement(
    incident: Incident, repair: RepairRecord, ports: RepairPorts
) -> CheckRepairResult:
    repair = _claim(incident, repair, ports)
    problem, node = _look(incident, repair, ports)
    now = ports.step.clock.now()
    if node is not None and problem is None:
        found = replace(incident, repair=replace(repair, replacement_node=node.ref, polls=0))
        commit(ports.step, move(found, IncidentState.VALIDATING, now))
        return CheckRepairResult(incident_id=incident.id, next="validate")
    waited = problem or Reason("replacement_missing", "no replacement has been seen")
    since = repair.started_at or repair.intended_at
    if now - since >= timedelta(seconds=incident.deadlines.replace_s):
        late = Reason(waited.code, f"after {incident.deadlines.replace_s} s: {waited.text}")
        return _too_late(incident, repair, late, ports)
    return _wait(incident, repair, waited, ports)


def _too_late(
    incident: Incident, repair: RepairRecord, late: Reason, ports: RepairPorts
) -> CheckRepairResult:
    noted = _noted(incident, repair, late)
    escalated = escalate(noted, late, step=STEP, now=ports.step.clock.now())
    commit(ports.step, escalated)
    following: Literal["repair", "close"] = "repair" if is_on_next_rung(escalated) else "close"
    return CheckRepairResult(incident_id=incident.id, next=following)


def _wait(
    incident: Incident, repair: RepairRecord, problem: Reason, ports: RepairPorts
) -> CheckRepairResult:
    wait_s = wait_after(incident.waits.check_poll_s, repair.polls)
    hold_lease(ports.step, incident, cover_s=wait_s)
    commit(ports.step, _noted(incident, repair, problem))
    return CheckRepairResult(incident_id=incident.id, next="wait", wait_s=wait_s)


def _noted(incident: Incident, repair: RepairRecord, problem: Reason) -> Incident:
    polled = replace(repair, polls=repair.polls + 1, last_problem=str(problem))
    return replace(incident, repair=polled)


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
    return why_unfit(node, incident.expected_gpus, "replacement_unhealthy"), node


def _node_of(nodes: Sequence[Node], instance_id: str) -> Node | None:
    return next((node for node in nodes if node.ref.instance_id == instance_id), None)


def why_unfit(node: Node, expected_gpus: int, code: str) -> Reason | None:
    """Return why a repaired node is not fit to work, under this code, or None."""
    if not node.is_ready:
        return Reason(code, f"{node.ref.name} is not Ready")
    if node.gpu_allocatable < expected_gpus:
        offers = f"offers {node.gpu_allocatable} of {expected_gpus} GPUs"
        return Reason(code, f"{node.ref.name} {offers}")
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
