"""Second look: is the fault there, on this machine, and may and can it be repaired here?"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal

from nodemend.application.ports import Capacity, MetricsStore
from nodemend.application.second_look import Judgement, SecondLook
from nodemend.application.steps import (
    Progress,
    StepPorts,
    commit,
    end_of_held,
    hold_lease,
    load,
    observe_node,
    pinned_cluster,
    progress,
    tell_held,
    why_held,
    why_others_work,
)
from nodemend.contracts.evidence import FindingModel
from nodemend.contracts.steps import VerifyFaultRequest, VerifyFaultResult
from nodemend.domain.approval import needs_yes
from nodemend.domain.capacity import REPAIRS, AutoScalingGroup, why_not_repairable
from nodemend.domain.escalation import escalate
from nodemend.domain.events import DetailType
from nodemend.domain.faults import FaultKind, Mode
from nodemend.domain.findings import OCCURRENCE_VALID
from nodemend.domain.incidents import Incident, IncidentState, Outcome, decide_end, move, record
from nodemend.domain.ledger import ledger_key
from nodemend.domain.nodes import Node
from nodemend.domain.policy import ApprovalPoint, ClusterPolicy, wait_after
from nodemend.domain.rails import why_stand_down
from nodemend.domain.reasons import Reason
from nodemend.domain.rules import Catalogue

STEP = "verify_fault"

_NEXT: Mapping[IncidentState, Literal["cordon", "approve_cordon"]] = {
    IncidentState.CORDONING: "cordon",
    IncidentState.APPROVING: "approve_cordon",
}


@dataclass(frozen=True, slots=True)
class VerifyPorts:
    """What verification needs besides the steps' own ports."""

    step: StepPorts
    metrics: MetricsStore
    capacity: Capacity
    catalogue: Catalogue


def verify_fault(request: VerifyFaultRequest, *, ports: VerifyPorts) -> VerifyFaultResult:
    """Confirm node, fault, capacity and rails by fresh answers of AMP, Kubernetes and EC2.

    A level fault is read now; an event at the time of its evidence, and only a new boot id ends
    it: quiet is no recovery. What stays unknown until the deadline is skipped, nothing touched.

    Raises:
        SupersededError: if the node is another machine by now.
    """
    incident = load(ports.step, request)
    match progress(incident, following=_following(incident)):
        case Progress.ENDED:
            return VerifyFaultResult(incident_id=incident.id, next="close")
        case Progress.DONE:
            return VerifyFaultResult(incident_id=incident.id, next=_NEXT[incident.state])
        case Progress.TO_DO:
            incident = move(incident, IncidentState.VERIFYING, ports.step.clock.now())
    cluster_policy = pinned_cluster(incident)
    node = observe_node(ports.step.clusters.open(cluster_policy), incident)
    group = ports.capacity.group(cluster_policy, incident.group) if incident.group else None
    other = why_stand_down(node) or why_others_work(incident, group, ports.capacity)
    if other is not None:
        return _close(decide_end(incident, Outcome.SKIPPED, other), ports)
    held = why_held(ports.step, incident, node, is_untouched=True)
    if held is not None:
        return _held(incident, held, ports)
    blocked = why_blocked(incident, node, group)
    if blocked is not None:
        now = ports.step.clock.now()
        return _close(escalate(incident, blocked, step=STEP, now=now), ports)
    judgement = look_again(incident, node, cluster_policy, ports)
    if judgement.unknown is not None:
        return _wait(incident, judgement.unknown, ports)
    if judgement.gone is not None:
        outcome = Outcome.SKIPPED if judgement.gone.code == "not_confirmed" else Outcome.RECOVERED
        return _close(decide_end(incident, outcome, judgement.gone), ports)
    return _confirm(incident, judgement, ports)


def _following(incident: Incident) -> IncidentState:
    """Return the state after this step; APPROVING stays it when the yes has come."""
    must_ask = needs_yes(incident, ApprovalPoint.CORDON)
    is_asking = must_ask or incident.state is IncidentState.APPROVING
    return IncidentState.APPROVING if is_asking else IncidentState.CORDONING


def why_blocked(incident: Incident, node: Node, group: AutoScalingGroup | None) -> Reason | None:
    """Return why the rung that the incident begins with cannot work here.

    A later rung may be blocked now and free then; it is asked again directly before its call.
    """
    if incident.mode is Mode.CORDON_ONLY or incident.rung not in REPAIRS:
        return None
    return why_not_repairable(incident.rung, node, group)


def look_again(
    incident: Incident, node: Node, cluster_policy: ClusterPolicy, ports: VerifyPorts
) -> Judgement:
    """Judge the incident's findings by fresh answers of AMP."""
    look = SecondLook(
        cluster=cluster_policy,
        policy=ports.step.policies.current(),
        metrics=ports.metrics,
        catalogue=ports.catalogue,
        now=ports.step.clock.now(),
    )
    judgement = look.judge(incident, node)
    # Whichever fault's reason ends the incident: the events among them are of the boot before.
    if judgement.gone is not None and node.ref.boot_id not in ("", incident.node.boot_id):
        _note_for_new_boot(incident, node, ports)
    return judgement


def _note_for_new_boot(incident: Incident, node: Node, ports: VerifyPorts) -> None:
    """What happened before the boot is still on its way, in queues and in the scans' windows."""
    keys = [
        ledger_key(finding.key, is_dry_run=incident.dry_run)
        for finding in incident.findings
        if finding.kind is FaultKind.EVENT
    ]
    until = ports.step.clock.now() + OCCURRENCE_VALID
    ports.step.incidents.mark_handled(incident.cluster, node.ref, keys, until)


def _confirm(incident: Incident, judgement: Judgement, ports: VerifyPorts) -> VerifyFaultResult:
    following = _following(incident)
    verified = record(
        incident,
        DetailType.FAULT_VERIFIED,
        step=STEP,
        reason=Reason("confirmed", incident.fault_text),
        now=ports.step.clock.now(),
        data={"findings": tuple(FindingModel.of(finding) for finding in judgement.confirmed)},
    )
    # The state moves on with the event, so that a repeated step does not tell it twice.
    moved = replace(move(verified, following, ports.step.clock.now()), waiting_for="")
    commit(ports.step, moved)
    return VerifyFaultResult(incident_id=incident.id, next=_NEXT[following])


def _wait(incident: Incident, unknown: Reason, ports: VerifyPorts) -> VerifyFaultResult:
    now = ports.step.clock.now()
    since = incident.verify_since or incident.state_since
    if now - since >= timedelta(seconds=incident.deadlines.verify_s):
        reason = Reason(
            "unverifiable",
            f"the fault could not be verified within {incident.deadlines.verify_s} s: {unknown}",
        )
        return _close(decide_end(incident, Outcome.SKIPPED, reason), ports)
    wait_s = wait_after(incident.waits.check_poll_s, incident.verify_attempts)
    commit(ports.step, replace(incident, verify_attempts=incident.verify_attempts + 1))
    return VerifyFaultResult(incident_id=incident.id, next="wait", wait_s=wait_s)


def _held(incident: Incident, held: Reason, ports: VerifyPorts) -> VerifyFaultResult:
    """Nothing was touched yet: look again until the deadline, then give the slot back."""
    now = ports.step.clock.now()
    waiting = tell_held(incident, held, step=STEP, now=now)
    since = incident.verify_since or incident.state_since
    if now - since >= timedelta(seconds=incident.deadlines.verify_s):
        return _close(decide_end(waiting, end_of_held(held), held), ports)
    wait_s = wait_after(incident.waits.check_poll_s, incident.verify_attempts)
    hold_lease(ports.step, incident, cover_s=wait_s)
    commit(ports.step, replace(waiting, verify_attempts=incident.verify_attempts + 1))
    return VerifyFaultResult(incident_id=incident.id, next="wait", wait_s=wait_s)


def _close(incident: Incident, ports: VerifyPorts) -> VerifyFaultResult:
    commit(ports.step, incident)
    return VerifyFaultResult(incident_id=incident.id, next="close")
