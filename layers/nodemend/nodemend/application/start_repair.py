"""Ask the capacity for the repair, once, after a note of how things were before."""

from dataclasses import dataclass, replace

from nodemend.application.ports import Capacity, Cluster
from nodemend.application.restoring import restore, uncordoned
from nodemend.application.steps import (
    Progress,
    StepPorts,
    commit,
    hold_lease,
    load,
    observe_node,
    pinned_cluster,
    progress,
    why_mode_forbids,
)
from nodemend.contracts.steps import StartRepairRequest, StartRepairResult
from nodemend.domain.capacity import AutoScalingGroup, kind_of, why_not_replaceable
from nodemend.domain.cordon import is_cordoned_by
from nodemend.domain.escalation import escalate
from nodemend.domain.events import DetailType
from nodemend.domain.faults import Rung
from nodemend.domain.incidents import (
    Incident,
    IncidentState,
    Outcome,
    RepairRecord,
    decide_end,
    move,
    record,
)
from nodemend.domain.nodes import Node
from nodemend.domain.pods import PodFate, classify_pods
from nodemend.domain.policy import wait_after
from nodemend.domain.rails import why_stand_down
from nodemend.domain.reasons import Reason

STEP = "start_repair"


@dataclass(frozen=True, slots=True)
class RepairPorts:
    """What a repair needs besides the steps' own ports."""

    step: StepPorts
    capacity: Capacity


def start_repair(request: StartRepairRequest, *, ports: RepairPorts) -> StartRepairResult:
    """Replace the node's instance through its Auto Scaling group.

    The members of the group are stored before the call: they tell the replacement from the others
    afterwards, and a repeated step sees from them that the call was made.

    Raises:
        SupersededError: if the node is another machine by now.
        RepairRefusedError: if the group refuses for good.
        LeaseLostError: if the incident holds no lease.
    """
    incident = load(ports.step, request)
    match progress(incident, following=IncidentState.CHECKING):
        case Progress.ENDED:
            return StartRepairResult(incident_id=incident.id, next="close")
        case Progress.DONE:
            return StartRepairResult(incident_id=incident.id, next="check")
        case Progress.TO_DO:
            incident = move(incident, IncidentState.REPAIRING, ports.step.clock.now())
    cluster_policy = pinned_cluster(incident)
    group = ports.capacity.group(cluster_policy, incident.group) if incident.group else None
    if incident.dry_run:
        return _rehearse(incident, group, ports)
    if incident.rung is not Rung.REPLACE or group is None:
        why = Reason("no_repair_left", "the plan has no further repair: a person must act")
        return _give_up(incident, why, ports)
    if incident.repair is not None and group.is_leaving(incident.node.instance_id):
        return _started(incident, group, ports)  # an earlier try has asked for it
    ended = _last_look(incident, group, ports)
    if ended is not None:
        return ended
    if incident.repair is None:
        incident = commit(ports.step, _noted(incident, group, ports))
    hold_lease(ports.step, incident, cover_s=wait_after(incident.waits.check_poll_s, 0))
    ports.capacity.terminate(cluster_policy, incident.node.instance_id)
    return _started(incident, group, ports)


def _last_look(
    incident: Incident, group: AutoScalingGroup, ports: RepairPorts
) -> StartRepairResult | None:
    """Look once more, directly before what cannot be undone; None: go on.

    Between the drain and this moment lie retries: a person may have taken the node back, another
    remediator may have come, a pod may run there again.
    """
    cluster = ports.step.clusters.open(pinned_cluster(incident))
    node = observe_node(cluster, incident)
    stopped = why_mode_forbids(ports.step, incident, is_cordon=False)
    if not is_cordoned_by(node, incident.id):
        restore(cluster, incident)
        stopped = uncordoned(node)
    if stopped is not None:
        commit(ports.step, decide_end(incident, Outcome.ABORTED_BY_OPERATOR, stopped))
        return StartRepairResult(incident_id=incident.id, next="close")
    blocked = (
        why_stand_down(node)
        or _why_not_drained(incident, node, cluster, ports)
        or why_not_replaceable(node, kind_of(node, is_in_group=True), group)
    )
    return _give_up(incident, blocked, ports) if blocked is not None else None


def _why_not_drained(
    incident: Incident, node: Node, cluster: Cluster, ports: RepairPorts
) -> Reason | None:
    name = node.ref.name
    if incident.drain is None or not incident.drain.is_drained:
        return Reason("not_drained", f"{name} was not drained, so it is not replaced")
    fates = classify_pods(cluster.list_pods(name), node, now=ports.step.clock.now())
    left = [item.pod.id for item in fates if item.fate in (PodFate.EVICT, PodFate.WAIT)]
    if left:
        return Reason("not_drained", f"{len(left)} pods run on {name} again, such as {left[0]}")
    return None


def _noted(incident: Incident, group: AutoScalingGroup, ports: RepairPorts) -> Incident:
    return replace(
        incident,
        repair=RepairRecord(
            rung=incident.rung,
            group=group.name,
            before=tuple(sorted(group.instances)),
            desired_before=group.desired,
            intended_at=ports.step.clock.now(),
        ),
    )


def _started(incident: Incident, group: AutoScalingGroup, ports: RepairPorts) -> StartRepairResult:
    now = ports.step.clock.now()
    if incident.repair is None:  # pragma: no cover - stored above
        raise AssertionError("the repair was not noted")
    started = record(
        replace(incident, repair=replace(incident.repair, started_at=now)),
        DetailType.REPAIR_STARTED,
        step=STEP,
        reason=Reason(
            "replace", f"instance {incident.node.instance_id} is terminated in {group.name}"
        ),
        now=now,
        data={
            "rung": incident.rung,
            "group": group.name,
            "desired_before": incident.repair.desired_before,
        },
    )
    commit(ports.step, move(started, IncidentState.CHECKING, now))
    cluster = ports.step.clusters.open(pinned_cluster(incident))
    message = f"instance {incident.node.instance_id} is being replaced (incident {incident.id})"
    cluster.record_event(incident.node, "NodemendRepairStarted", message, is_warning=True)
    return StartRepairResult(incident_id=incident.id, next="check")


def _give_up(incident: Incident, reason: Reason, ports: RepairPorts) -> StartRepairResult:
    now = ports.step.clock.now()
    commit(ports.step, escalate(incident, reason, step=STEP, now=now))
    return StartRepairResult(incident_id=incident.id, next="close")


def _rehearse(
    incident: Incident, group: AutoScalingGroup | None, ports: RepairPorts
) -> StartRepairResult:
    now = ports.step.clock.now()
    where = f"in group {group.name}" if group else "(no Auto Scaling group has it)"
    rehearsed = record(
        incident,
        DetailType.REPAIR_STARTED,
        step=STEP,
        reason=Reason("dry_run", f"{incident.node.instance_id} would be replaced {where}"),
        now=now,
        data={
            "rung": incident.rung,
            "group": incident.group,
            "desired_before": group.desired if group else 0,
        },
    )
    reason = Reason(
        "dry_run",
        f"{incident.node.name} would have been cordoned, drained and replaced: "
        f"{incident.fault_text}",
    )
    commit(ports.step, decide_end(rehearsed, Outcome.OBSERVED, reason))
    return StartRepairResult(incident_id=incident.id, next="close")
