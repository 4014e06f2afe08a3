"""A person's yes: when one is needed, what it allows, and which answer counts.

No repair that the policy names begins without a yes, whatever way leads to it. The default answer
is no: silence ends the incident.
"""

from dataclasses import replace
from datetime import datetime, timedelta

from nodemend.domain.capacity import REPAIRS
from nodemend.domain.errors import InvalidInputError
from nodemend.domain.events import DetailType
from nodemend.domain.faults import Mode, Rung
from nodemend.domain.incidents import (
    Answer,
    ApprovalRecord,
    Incident,
    IncidentState,
    record,
)
from nodemend.domain.policy import ApprovalPoint
from nodemend.domain.reasons import Reason

_BY_HAND = "start the remediation by hand if the node still needs it"


def needs_yes(incident: Incident, before: ApprovalPoint) -> bool:
    """Tell whether the incident's rung waits for a yes here.

    A policy that asks before the cordon asks there for the whole ladder. A rung that nobody was
    asked about then, because only a later one needs a yes, is asked about directly before its
    repair. A dry run asks nobody.
    """
    policy = incident.approval_policy
    if policy is None or incident.dry_run or incident.rung not in policy.rungs:
        return False
    if before is ApprovalPoint.CORDON and policy.before is not ApprovalPoint.CORDON:
        return False
    return not is_granted(incident)


def is_granted(incident: Incident) -> bool:
    """Tell whether somebody said yes to the incident's rung."""
    request = request_for(incident)
    return request is not None and request.answer is not None and request.answer.is_yes


def request_for(incident: Incident) -> ApprovalRecord | None:
    """Return the request that is about the incident's rung; None: nobody was asked about it yet."""
    request = incident.approval
    return request if request is not None and incident.rung in request.rungs else None


def foreseen(incident: Incident) -> str:
    """Return before what the incident's plan will ask first: cordon, repair, or an empty string.

    A dry run is told what it would be.
    """
    policy = incident.approval_policy
    ahead = repairs_left(incident)
    if policy is None or not set(ahead) & set(policy.rungs):
        return ""
    if incident.rung in policy.rungs and policy.before is ApprovalPoint.CORDON:
        return str(ApprovalPoint.CORDON)
    return "" if incident.mode is Mode.CORDON_ONLY else str(ApprovalPoint.REPAIR)


def repairs_left(incident: Incident) -> tuple[Rung, ...]:
    """Return the repairs of the plan from the incident's rung on."""
    return tuple(rung for rung in incident.plan[incident.rung_index :] if rung in REPAIRS)


def ask(incident: Incident, before: ApprovalPoint, now: datetime) -> Incident:
    """Return the incident with an open request for its rung.

    Before the cordon the request is for all repairs that may follow; before a repair for that one.
    """
    policy = incident.approval_policy
    if policy is None:  # pragma: no cover - asked only where needs_yes has said so
        raise AssertionError("the incident's policy asks nobody")
    is_cordon = before is ApprovalPoint.CORDON
    request = ApprovalRecord(
        number=incident.approval.number + 1 if incident.approval else 1,
        before=before,
        rungs=repairs_left(incident) if is_cordon else (incident.rung,),
        asked_at=now,
        until=now + timedelta(seconds=policy.timeout_s),
    )
    return replace(incident, approval=request)


_DOING = {Rung.REBOOT: "rebooted", Rung.REPLACE: "replaced"}


def question_of(incident: Incident) -> str:
    """Return in words what a yes allows."""
    request = request_for(incident)
    if request is None:  # pragma: no cover - asked of incidents with a request only
        raise AssertionError("nobody was asked")
    node = f"{incident.node.name} ({incident.node.instance_id})"
    repairs = ", and if that fails ".join(_DOING[rung] for rung in request.rungs)
    if request.before is ApprovalPoint.REPAIR:
        return f"May {node}, which is cordoned and drained, be {repairs}?"
    if incident.mode is Mode.CORDON_ONLY:
        return f"May {node} be cordoned? The policy stops there and calls a person."
    return f"May {node} be cordoned, drained and {repairs}?"


def give(incident: Incident, answer: Answer, *, rung: Rung | None, step: str) -> Incident:
    """Return the incident with the answer to its open request; the same incident if it has it.

    The first answer stands, but for a no: it wins over a yes that nothing has followed from yet.

    Args:
        incident: the incident as stored.
        answer: what the person says.
        rung: the repair that the person means; None: the one that was asked for, if there is no
            doubt which.
        step: who records it.

    Raises:
        InvalidInputError: if the incident asks nothing, something else, or no more.
    """
    request = incident.approval
    if request is None:
        raise InvalidInputError(
            "incident_id", f"incident {incident.id} has asked nobody", "look at its state and mode"
        )
    if rung is not None and rung is not request.rungs[0]:
        raise InvalidInputError(
            "rung",
            f"the request is about {request.rungs[0]}, not {rung}",
            "read the newest request",
        )
    given = request.answer
    if given is not None and given.is_yes is answer.is_yes:
        return incident
    _require_open(incident, request, answer)
    if rung is None and request.number > 1:
        raise InvalidInputError(
            "rung",
            f"incident {incident.id} asks for the {request.number}. time",
            f"name what you answer: rung {request.rungs[0]}",
        )
    answered = replace(incident, approval=replace(request, answer=answer))
    return record(
        answered,
        DetailType.APPROVAL_ANSWERED,
        step=step,
        reason=_told(answer),
        now=answer.at,
        data=_data(request, "yes" if answer.is_yes else "no", answer),
    )


def _require_open(incident: Incident, request: ApprovalRecord, answer: Answer) -> None:
    given = request.answer
    closed = (incident.outcome, incident.reason) if incident.is_closed else None
    end = closed or incident.verdict or incident.release_for
    if end is not None:
        raise InvalidInputError(
            "incident_id", f"incident {incident.id} has ended: {end[0]}, {end[1]}", _BY_HAND
        )
    if given is not None and not given.is_yes:
        raise InvalidInputError("answer", f"{given.by} said no at {given.at:%H:%M} UTC", _BY_HAND)
    if incident.state is not IncidentState.APPROVING:
        raise InvalidInputError(
            "answer",
            f"{given.by if given else 'somebody'} said yes, and the incident is {incident.state}",
            "to stop it pause the cluster or stop the execution",
        )
    if given is None and answer.at >= request.until:
        raise InvalidInputError(
            "incident_id", f"the request ended at {request.until:%Y-%m-%d %H:%M:%S} UTC", _BY_HAND
        )


def expire(incident: Incident, *, step: str, now: datetime) -> tuple[Incident, Reason]:
    """Return the incident whose request nobody answered, and the reason for its end."""
    request = request_for(incident)
    if request is None or incident.approval_policy is None:  # pragma: no cover - the caller has it
        raise AssertionError("nobody was asked")
    reason = Reason(
        "approval_expired",
        f"nobody answered within {incident.approval_policy.timeout_s} s: {question_of(incident)}",
    )
    expired = record(
        incident,
        DetailType.APPROVAL_ANSWERED,
        step=step,
        reason=reason,
        now=now,
        data=_data(request, "expired", None),
    )
    return expired, reason


def denied(answer: Answer) -> Reason:
    """Return the reason for an end by a person's no."""
    return Reason("approval_denied", f"{answer.by} said no: {answer.why}")


def _told(answer: Answer) -> Reason:
    if not answer.is_yes:
        return denied(answer)
    why = f": {answer.why}" if answer.why else ""
    return Reason("approved", f"{answer.by} said yes{why}")


def _data(request: ApprovalRecord, word: str, answer: Answer | None) -> dict[str, object]:
    return {
        "number": request.number,
        "before": request.before,
        "rungs": request.rungs,
        "answer": word,
        "answered_by": answer.by if answer else "",
        "why": answer.why if answer else "",
    }
