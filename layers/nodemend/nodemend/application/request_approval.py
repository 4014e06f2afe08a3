"""Ask a person, once, and look for the answer; before anything follows, look at the fault again.

The answer is in the incident's record, where `answer_approval` puts it, and not in a callback
token: it survives redrives, lost messages and deploys, and each look sees what else has changed
meanwhile (ADR 0024).
"""

import math
from dataclasses import replace
from datetime import timedelta

from nodemend.application.ports import Cluster
from nodemend.application.restoring import restore, uncordoned
from nodemend.application.second_look import Judgement
from nodemend.application.steps import (
    Progress,
    commit,
    end_of_held,
    hold_lease,
    load,
    observe_node,
    pinned_cluster,
    progress,
    tell_held,
    why_held,
    why_mode_forbids,
    why_others_work,
)
from nodemend.application.verify_fault import VerifyPorts, look_again, why_blocked
from nodemend.contracts.evidence import FindingModel
from nodemend.contracts.steps import RequestApprovalRequest, RequestApprovalResult
from nodemend.domain.approval import (
    ask,
    denied,
    expire,
    is_granted,
    question_of,
    request_for,
)
from nodemend.domain.cordon import is_cordoned_by
from nodemend.domain.escalation import escalate
from nodemend.domain.events import DetailType
from nodemend.domain.incidents import (
    Answer,
    ApprovalRecord,
    Incident,
    IncidentState,
    Outcome,
    decide_end,
    move,
    record,
)
from nodemend.domain.nodes import Node
from nodemend.domain.policy import ApprovalPoint, wait_after
from nodemend.domain.rails import why_stand_down
from nodemend.domain.reasons import Reason

STEP = "request_approval"

_FOLLOWING = {
    ApprovalPoint.CORDON: IncidentState.CORDONING,
    ApprovalPoint.REPAIR: IncidentState.REPAIRING,
}


def request_approval(
    request: RequestApprovalRequest, *, ports: VerifyPorts
) -> RequestApprovalResult:
    """Ask whether the node may be cordoned, or repaired, and wait for a yes.

    A yes renews nothing: the fault is looked at again in the same invocation that acts on it. No
    answer in time is a no. Where the node is cordoned already, a no puts it back.

    Raises:
        SupersededError: if the node is another machine by now.
        LeaseLostError: if the incident holds no slot any more.
    """
    incident = load(ports.step, request)
    before = ApprovalPoint(request.before)
    match _progress(incident, before):
        case Progress.ENDED:
            return RequestApprovalResult(incident_id=incident.id, next="close")
        case Progress.DONE:
            return RequestApprovalResult(incident_id=incident.id, next="approved")
        case Progress.TO_DO if incident.release_for is not None:
            return _release(incident, ports)
        case Progress.TO_DO:
            incident = move(incident, IncidentState.APPROVING, ports.step.clock.now())
    cluster = ports.step.clusters.open(pinned_cluster(incident))
    node = observe_node(cluster, incident)
    asked = request_for(incident)
    no = _no(incident, asked, ports)
    if no is not None:
        return _give_back(*no, before, ports)
    over = _why_over(incident, before, node, cluster, ports)
    if over is not None:
        return _close(decide_end(incident, *over), ports)
    judgement = _look(incident, node, ports)
    if judgement.gone is not None:
        return _recovered(incident, judgement.gone, before, ports)
    if asked is not None and asked.answer is not None:
        return _approved(incident, asked, asked.answer, node, judgement, ports)
    return _wait_for_answer(incident, before, cluster, ports)


def _no(
    incident: Incident, asked: ApprovalRecord | None, ports: VerifyPorts
) -> tuple[Incident, Outcome, Reason] | None:
    """Return how it ends by a person's no, or by silence."""
    if asked is not None and asked.answer is not None and not asked.answer.is_yes:
        return incident, Outcome.ABORTED_BY_OPERATOR, denied(asked.answer)
    now = ports.step.clock.now()
    if asked is not None and asked.answer is None and now >= asked.until:
        expired, reason = expire(incident, step=STEP, now=now)
        return expired, Outcome.SKIPPED, reason
    return None


def _progress(incident: Incident, before: ApprovalPoint) -> Progress:
    """Before a repair the state is REPAIRING already: only the yes tells that it was asked for."""
    is_begun = incident.verdict is None and incident.state is IncidentState.REPAIRING
    if before is ApprovalPoint.REPAIR and is_begun and not is_granted(incident):
        return Progress.TO_DO
    return progress(incident, following=_FOLLOWING[before])


def _look(incident: Incident, node: Node, ports: VerifyPorts) -> Judgement:
    """Look at the fault again; but after a repair that failed, its failure is the evidence.

    The findings are about the boot before that repair, and would look healed.
    """
    if incident.attempts:
        return Judgement()
    return look_again(incident, node, pinned_cluster(incident), ports)


def _recovered(
    incident: Incident, gone: Reason, before: ApprovalPoint, ports: VerifyPorts
) -> RequestApprovalResult:
    """Withdraw the request: the fault is gone, or never was.

    A drained node that somebody has rebooted is for a person to look at, as in start_repair.
    """
    if before is ApprovalPoint.REPAIR and gone.code == "rebooted":
        reason = Reason("rebooted_meanwhile", gone.text)
        now = ports.step.clock.now()
        return _close(escalate(incident, reason, step=STEP, now=now), ports)
    outcome = Outcome.SKIPPED if gone.code == "not_confirmed" else Outcome.RECOVERED
    return _give_back(incident, outcome, gone, before, ports)


def _why_over(
    incident: Incident, before: ApprovalPoint, node: Node, cluster: Cluster, ports: VerifyPorts
) -> tuple[Outcome, Reason] | None:
    """Return how the incident ends whatever the answer: somebody else has the node, or the mode.

    Before a repair start_repair looks for other remediators, directly before its call.
    """
    is_cordon = before is ApprovalPoint.CORDON
    if is_cordon:
        other = why_stand_down(node)
        if other is not None:
            return Outcome.SKIPPED, other
    elif not is_cordoned_by(node, incident.id):
        restore(cluster, incident)
        return Outcome.ABORTED_BY_OPERATOR, uncordoned(node)
    forbidden = why_mode_forbids(ports.step, incident, is_cordon=is_cordon)
    return (Outcome.ABORTED_BY_OPERATOR, forbidden) if forbidden is not None else None


def _wait_for_answer(
    incident: Incident, before: ApprovalPoint, cluster: Cluster, ports: VerifyPorts
) -> RequestApprovalResult:
    asked = request_for(incident)
    return _wait(incident, asked, ports) if asked else _ask(incident, before, cluster, ports)


def _ask(
    incident: Incident, before: ApprovalPoint, cluster: Cluster, ports: VerifyPorts
) -> RequestApprovalResult:
    """Store the request with its event in one write: it is asked exactly once."""
    now = ports.step.clock.now()
    asking = ask(incident, before, now)
    asked = request_for(asking)
    if asked is None:  # pragma: no cover - it was made for this rung
        raise AssertionError("nobody was asked")
    question = question_of(asking)
    told = record(
        asking,
        DetailType.APPROVAL_REQUESTED,
        step=STEP,
        reason=Reason(str(incident.fault_class), incident.fault_text),
        now=now,
        data={
            "number": asked.number,
            "before": before,
            "rung": asked.rungs[0],
            "rungs": asked.rungs,
            "question": question,
            "evidence": _evidence(incident),
            "until": asked.until,
            "findings": tuple(FindingModel.of(finding) for finding in incident.findings),
        },
    )
    result = _wait(told, asked, ports)
    if before is ApprovalPoint.REPAIR:
        until = f"until {asked.until:%Y-%m-%d %H:%M:%S} UTC"
        message = f"{question} {incident.fault_text} (incident {incident.id}, {until})"
        cluster.record_event(incident.node, "NodemendApprovalRequested", message, is_warning=True)
    return result


def _evidence(incident: Incident) -> str:
    primary = incident.primary
    if primary is None:
        return f"the word of {incident.requested_by}"
    seen = primary.evidence
    return f"rule {seen.rule_id}, value {seen.value:g} at {seen.at:%Y-%m-%d %H:%M:%S} UTC"


def _wait(incident: Incident, asked: ApprovalRecord, ports: VerifyPorts) -> RequestApprovalResult:
    left_s = math.ceil((asked.until - ports.step.clock.now()).total_seconds())
    wait_s = max(1, min(left_s, wait_after(incident.waits.approval_poll_s, asked.polls)))
    hold_lease(ports.step, incident, cover_s=wait_s)
    polled = replace(asked, polls=asked.polls + 1)
    commit(ports.step, replace(incident, approval=polled))
    return RequestApprovalResult(incident_id=incident.id, next="wait", wait_s=wait_s)


def _approved(
    incident: Incident,
    asked: ApprovalRecord,
    yes: Answer,
    node: Node,
    judgement: Judgement,
    ports: VerifyPorts,
) -> RequestApprovalResult:
    is_untouched = asked.before is ApprovalPoint.CORDON
    held = why_held(ports.step, incident, node, is_untouched=is_untouched)
    why_not_yet = held or judgement.unknown
    if why_not_yet is not None:
        is_held = held is not None
        return _not_yet(incident, asked, yes, why_not_yet, ports, is_held=is_held)
    now = ports.step.clock.now()
    if asked.before is ApprovalPoint.CORDON:
        end = _capacity_end(incident, node, ports)
        if end is not None:
            return _close(end, ports)
    verified = record(
        incident,
        DetailType.FAULT_VERIFIED,
        step=STEP,
        reason=Reason("confirmed", f"after the yes: {incident.fault_text}"),
        now=now,
        data={"findings": tuple(FindingModel.of(finding) for finding in judgement.confirmed)},
    )
    going_on = incident if incident.attempts else verified
    moved = move(going_on, _FOLLOWING[asked.before], now)
    commit(ports.step, replace(moved, waiting_for=""))
    return RequestApprovalResult(incident_id=incident.id, next="approved")


def _capacity_end(incident: Incident, node: Node, ports: VerifyPorts) -> Incident | None:
    """Return the ended incident if its group is another one's now, or cannot do the repair."""
    cluster_policy = pinned_cluster(incident)
    group = ports.capacity.group(cluster_policy, incident.group) if incident.group else None
    other = why_others_work(incident, group, ports.capacity)
    if other is not None:
        return decide_end(incident, Outcome.SKIPPED, other)
    blocked = why_blocked(incident, node, group)
    now = ports.step.clock.now()
    return escalate(incident, blocked, step=STEP, now=now) if blocked is not None else None


def _not_yet(
    incident: Incident,
    asked: ApprovalRecord,
    yes: Answer,
    why: Reason,
    ports: VerifyPorts,
    *,
    is_held: bool,
) -> RequestApprovalResult:
    """Somebody said yes, and the fault cannot be seen or nothing may be changed now.

    For as long as a verification may take it is looked at again. A held node that is cordoned
    stays so, as it does in the other steps (ADR 0020).
    """
    now = ports.step.clock.now()
    waiting = tell_held(incident, why, step=STEP, now=now) if is_held else incident
    if now - yes.at >= timedelta(seconds=incident.deadlines.verify_s):
        if is_held:
            return _close(decide_end(waiting, end_of_held(why), why), ports)
        reason = Reason(
            "unverifiable",
            f"{yes.by} said yes, and the fault could not be verified within "
            f"{incident.deadlines.verify_s} s after that: {why}",
        )
        return _give_back(waiting, Outcome.SKIPPED, reason, asked.before, ports)
    wait_s = wait_after(incident.waits.check_poll_s, asked.rechecks)
    hold_lease(ports.step, incident, cover_s=wait_s)
    looked = replace(asked, rechecks=asked.rechecks + 1)
    commit(ports.step, replace(waiting, approval=looked))
    return RequestApprovalResult(incident_id=incident.id, next="wait", wait_s=wait_s)


def _give_back(
    incident: Incident,
    outcome: Outcome,
    reason: Reason,
    before: ApprovalPoint,
    ports: VerifyPorts,
) -> RequestApprovalResult:
    """End the incident with the node as it was; a release needs neither lease nor leave.

    The end is stored before the node is restored, so that an answer of the last moment cannot come
    between the two. It is no verdict until then: a node that could not be restored is a person's.
    """
    if before is ApprovalPoint.CORDON:
        return _close(decide_end(incident, outcome, reason), ports)
    releasing = move(incident, IncidentState.RELEASING, ports.step.clock.now())
    return _release(commit(ports.step, replace(releasing, release_for=(outcome, reason))), ports)


def _release(incident: Incident, ports: VerifyPorts) -> RequestApprovalResult:
    if incident.release_for is None:  # pragma: no cover - both callers have it
        raise AssertionError("no end was decided")
    outcome, reason = incident.release_for
    cluster = ports.step.clusters.open(pinned_cluster(incident))
    found, is_uncordoned = restore(cluster, incident)
    released = record(
        incident,
        DetailType.NODE_RELEASED,
        step=STEP,
        reason=found,
        now=ports.step.clock.now(),
        data={"is_uncordoned": is_uncordoned},
    )
    result = _close(decide_end(released, outcome, reason), ports)
    message = f"{reason.text} (incident {incident.id})"
    cluster.record_event(incident.node, "NodemendReleased", message, is_warning=False)
    return result


def _close(incident: Incident, ports: VerifyPorts) -> RequestApprovalResult:
    commit(ports.step, incident)
    return RequestApprovalResult(incident_id=incident.id, next="close")
