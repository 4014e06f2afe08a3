"""Ask the capacity for the rung's repair, once, after a note of how things were before."""

from dataclasses import dataclass, replace

from nodemend.application.ports import Capacity, Cluster, Instances
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
    why_others_work,
)
from nodemend.contracts.steps import StartRepairRequest, StartRepairResult
from nodemend.domain.approval import needs_yes
from nodemend.domain.capacity import AutoScalingGroup, why_not_repairable
from nodemend.domain.cordon import is_cordoned_by
from nodemend.domain.errors import AwsUnavailableError
from nodemend.domain.escalation import escalate, is_on_next_rung
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
from nodemend.domain.policy import ApprovalPoint, wait_after
from nodemend.domain.rails import why_node_held, why_stand_down
from nodemend.domain.reasons import Reason

STEP = "start_repair"

_DONE = {Rung.REBOOT: "rebooted", Rung.REPLACE: "replaced"}


@dataclass(frozen=True, slots=True)
class RepairPorts:
    """What a repair needs besides the steps' own ports."""

    step: StepPorts
    capacity: Capacity
    instances: Instances


def start_repair(request: StartRepairRequest, *, ports: RepairPorts) -> StartRepairResult:
    """Reboot the node's instance, or replace it through its Auto Scaling group.

    What a repeated step and the proof compare with is stored before the call: the members of the
    group, which tell the replacement from the others; the boot id, which a reboot changes.

    Raises:
        SupersededError: if the node is another machine by now.
        RepairRefusedError: if the capacity refuses for good.
        LeaseLostError: if the incident holds no lease.
        AwsUnavailableError: if a reboot was throttled: it is asked for again.
    """
    incident = load(ports.step, request)
    match progress(incident, following=IncidentState.CHECKING):
        case Progress.ENDED:
            return StartRepairResult(incident_id=incident.id, next="close")
        case Progress.DONE:
            return StartRepairResult(incident_id=incident.id, next="check")
        case Progress.TO_DO:
            incident = _begun(incident, ports)
    if needs_yes(incident, ApprovalPoint.REPAIR):
        return StartRepairResult(incident_id=incident.id, next="approve_repair")
    cluster_policy = pinned_cluster(incident)
    group = ports.capacity.group(cluster_policy, incident.group) if incident.group else None
    if incident.dry_run:
        return _rehearse(incident, group, ports)
    match incident.rung:
        case Rung.REBOOT:
            return _reboot(incident, group, ports)
        case Rung.REPLACE if group is not None:
            return _replace(incident, group, ports)
        case _:
            why = Reason("no_repair_left", "the plan has no further repair: a person must act")
            return _give_up(incident, why, ports)


def _begun(incident: Incident, ports: RepairPorts) -> Incident:
    """Return the incident in REPAIRING; a next rung is stored as begun before anything can fail.

    Without that, escalate_incident would take the failure of this rung for its own repetition.
    """
    begun = move(incident, IncidentState.REPAIRING, ports.step.clock.now())
    return commit(ports.step, begun) if is_on_next_rung(incident) else begun


# --- reboot -------------------------------------------------------------------------------------


def _reboot(
    incident: Incident, group: AutoScalingGroup | None, ports: RepairPorts
) -> StartRepairResult:
    """Ask once. A call whose answer was lost is made again only when check_repair says so."""
    repair = incident.repair
    if repair is not None and not repair.is_unanswered:
        return _lost_answer(incident, repair, ports)
    cluster_policy = pinned_cluster(incident)
    cluster = ports.step.clusters.open(cluster_policy)
    node = observe_node(cluster, incident)
    if repair is not None and node.ref.boot_id != repair.boot_id_before:
        # It has booted since check_repair looked: the first call did arrive.
        commit(ports.step, move(incident, IncidentState.CHECKING, ports.step.clock.now()))
        return StartRepairResult(incident_id=incident.id, next="check")
    ended = _end_instead(incident, node, group, cluster, ports)
    if ended is not None:
        return ended
    noted = commit(ports.step, _noted_reboot(incident, node, group, ports))
    if not ports.instances.reboot(cluster_policy, noted.node.instance_id):
        # Certainly not accepted, so the note goes, and the retry of the task asks anew.
        commit(ports.step, replace(noted, repair=repair))
        raise AwsUnavailableError("ec2:RebootInstances: throttled")
    asked = Reason("reboot", f"instance {noted.node.instance_id} is rebooted")
    return _started(noted, asked, ports)


def _noted_reboot(
    incident: Incident, node: Node, group: AutoScalingGroup | None, ports: RepairPorts
) -> Incident:
    repair = incident.repair or RepairRecord(
        rung=Rung.REBOOT,
        group=incident.group,
        before=(),
        desired_before=group.desired if group else 0,
        intended_at=ports.step.clock.now(),
        boot_id_before=node.ref.boot_id,
        heartbeat_before=node.heartbeat_at,
    )
    noted = replace(repair, asks=repair.asks + 1, is_unanswered=False, started_at=None)
    return replace(incident, repair=noted)


def _lost_answer(incident: Incident, repair: RepairRecord, ports: RepairPorts) -> StartRepairResult:
    """An earlier try noted the call and died, or lost the answer: now only the node can tell."""
    unanswered = replace(incident, repair=replace(repair, is_unanswered=True))
    text = f"the reboot of {incident.node.instance_id} was asked for; its answer was lost"
    return _started(unanswered, Reason("reboot", text), ports)


# --- replace ------------------------------------------------------------------------------------


def _replace(incident: Incident, group: AutoScalingGroup, ports: RepairPorts) -> StartRepairResult:
    instance_id = incident.node.instance_id
    asked = Reason("replace", f"instance {instance_id} is terminated in {group.name}")
    if incident.repair is not None and group.is_leaving(instance_id):
        return _started(incident, asked, ports)  # an earlier try has asked for it
    cluster = ports.step.clusters.open(pinned_cluster(incident))
    node = observe_node(cluster, incident)
    ended = _end_instead(incident, node, group, cluster, ports)
    if ended is not None:
        return ended
    if incident.repair is None:
        incident = commit(ports.step, _noted_replacement(incident, group, ports))
    ports.capacity.terminate(pinned_cluster(incident), instance_id)
    return _started(incident, asked, ports)


def _noted_replacement(incident: Incident, group: AutoScalingGroup, ports: RepairPorts) -> Incident:
    return replace(
        incident,
        repair=RepairRecord(
            rung=Rung.REPLACE,
            group=group.name,
            before=tuple(sorted(group.instances)),
            desired_before=group.desired,
            intended_at=ports.step.clock.now(),
        ),
    )


# --- both ---------------------------------------------------------------------------------------


def _end_instead(
    incident: Incident,
    node: Node,
    group: AutoScalingGroup | None,
    cluster: Cluster,
    ports: RepairPorts,
) -> StartRepairResult | None:
    """Return how it ends without the rung's call, or None, with the lease held, if it may be made.

    The mode and the lease come last: they are what a person changes in the meantime.
    """
    if _is_uncordoned(incident, node):
        return _uncordoned(incident, node, cluster, ports)
    blocked = (
        _why_not_now(incident, node, cluster, ports)
        or why_not_repairable(incident.rung, node, group)
        or why_others_work(incident, group, ports.capacity)
    )
    if blocked is not None:
        return _give_up(incident, blocked, ports)
    stopped = why_mode_forbids(ports.step, incident, is_cordon=False)
    if stopped is not None:
        return _stop(incident, stopped, ports)
    paused = hold_lease(ports.step, incident, cover_s=wait_after(incident.waits.check_poll_s, 0))
    held = paused or why_node_held(node)
    return _stop(incident, held, ports) if held is not None else None


def _why_not_now(
    incident: Incident, node: Node, cluster: Cluster, ports: RepairPorts
) -> Reason | None:
    """Look once more, directly before what cannot be undone.

    Between the drain and this moment lie retries: another remediator may have come, and a pod may
    run there again (case R74).
    """
    name = incident.node.name
    if _has_booted_meanwhile(incident, node):
        return Reason("rebooted_meanwhile", f"{name} has booted since the incident was opened")
    other = why_stand_down(node)
    if other is not None:
        return other
    if incident.drain is None or not incident.drain.is_drained:
        what = _DONE[incident.rung]
        return Reason("not_drained", f"{name} was not drained, so it is not {what}")
    fates = classify_pods(cluster.list_pods(name), node, now=ports.step.clock.now())
    # A finished pod loses nothing: failed DaemonSet pods are what a reboot leaves behind.
    left = [
        item.pod.id
        for item in fates
        if item.fate in (PodFate.EVICT, PodFate.WAIT) and not item.pod.is_finished
    ]
    if left:
        return Reason("not_drained", f"{len(left)} pods run on {name} again, such as {left[0]}")
    return None


def _has_booted_meanwhile(incident: Incident, node: Node) -> bool:
    """Somebody else rebooted the node: what was verified is about a boot that is over."""
    is_untried = incident.repair is None and not incident.attempts
    known = incident.node.boot_id
    return is_untried and bool(known) and node.ref.boot_id not in ("", known)


def _is_uncordoned(incident: Incident, node: Node) -> bool:
    """Somebody took our cordon off after the drain: the node is theirs again."""
    return not is_cordoned_by(node, incident.id)


def _uncordoned(
    incident: Incident, node: Node, cluster: Cluster, ports: RepairPorts
) -> StartRepairResult:
    restore(cluster, incident)
    return _stop(incident, uncordoned(node), ports)


def _stop(incident: Incident, reason: Reason, ports: RepairPorts) -> StartRepairResult:
    commit(ports.step, decide_end(incident, Outcome.ABORTED_BY_OPERATOR, reason))
    return StartRepairResult(incident_id=incident.id, next="close")


def _started(incident: Incident, reason: Reason, ports: RepairPorts) -> StartRepairResult:
    now = ports.step.clock.now()
    if incident.repair is None:  # pragma: no cover - noted by both callers
        raise AssertionError("the repair was not noted")
    started = record(
        replace(incident, repair=replace(incident.repair, started_at=now)),
        DetailType.REPAIR_STARTED,
        step=STEP,
        reason=reason,
        now=now,
        data={
            "rung": incident.rung,
            "group": incident.repair.group,
            "desired_before": incident.repair.desired_before,
            "attempt": len(incident.attempts) + 1,
        },
    )
    commit(ports.step, move(started, IncidentState.CHECKING, now))
    cluster = ports.step.clusters.open(pinned_cluster(incident))
    doing = f"being {_DONE[incident.rung]}"
    message = f"instance {incident.node.instance_id} is {doing} (incident {incident.id})"
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
    done = _DONE.get(incident.rung, str(incident.rung))
    rehearsed = record(
        incident,
        DetailType.REPAIR_STARTED,
        step=STEP,
        reason=Reason("dry_run", f"{incident.node.instance_id} would be {done} {where}"),
        now=now,
        data={
            "rung": incident.rung,
            "group": incident.group,
            "desired_before": group.desired if group else 0,
        },
    )
    reason = Reason(
        "dry_run",
        f"{incident.node.name} would have been cordoned, drained and {done}: {incident.fault_text}",
    )
    commit(ports.step, decide_end(rehearsed, Outcome.OBSERVED, reason))
    return StartRepairResult(incident_id=incident.id, next="close")
