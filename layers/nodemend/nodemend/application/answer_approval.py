"""A person says yes or no: the answer goes into the incident's record."""

from dataclasses import dataclass

from nodemend.application.ports import Clock, Incidents, Outbox
from nodemend.contracts.approving import (
    AnswerApproval,
    AnswerApprovalRequest,
    AnswerApprovalResult,
)
from nodemend.domain.approval import give
from nodemend.domain.errors import ConcurrentUpdateError, InvalidInputError
from nodemend.domain.faults import Rung
from nodemend.domain.incidents import Answer, Incident, event_ids

STEP = "answer_approval"

TRIES = 5
"""Reads and conditional writes of the record: the waiting step and new evidence write it, too."""


@dataclass(frozen=True, slots=True)
class AnswerApprovalPorts:
    """What answering needs."""

    incidents: Incidents
    outbox: Outbox
    clock: Clock


def answer_approval(
    request: AnswerApprovalRequest, *, ports: AnswerApprovalPorts
) -> AnswerApprovalResult:
    """Record the answer with who gave it; the same answer again changes and tells nothing.

    Of two people at once one is first, and the other is told who was. It is acted on at the
    waiting step's next look.

    Raises:
        InvalidInputError: if the input is wrong, or the incident asks nothing, something else, or
            no more.
        ConcurrentUpdateError: if the record kept changing; the task is retried.
    """
    wanted = request.parse_input()
    for _ in range(TRIES):
        incident = ports.incidents.get(wanted.incident_id)
        if incident is None:
            raise InvalidInputError(
                "incident_id", f"{wanted.incident_id} is unknown", "copy it from the request"
            )
        answered = give(
            incident,
            Answer(wanted.answer == "yes", wanted.answered_by, wanted.why, ports.clock.now()),
            rung=Rung(wanted.rung) if wanted.rung else None,
            step=STEP,
        )
        if answered is incident:
            return _result(incident, wanted, is_new=False)
        try:
            saved = ports.incidents.save(answered)
        except ConcurrentUpdateError:
            continue
        ports.outbox.publish(saved.id, event_ids(answered))
        return _result(saved, wanted, is_new=True)
    raise ConcurrentUpdateError(f"incident {wanted.incident_id} changed {TRIES} times in a row")


def _result(incident: Incident, wanted: AnswerApproval, *, is_new: bool) -> AnswerApprovalResult:
    given = incident.approval.answer if incident.approval else None
    by = given.by if given else wanted.answered_by
    if not is_new:
        follows = f"nothing changed, the incident is {incident.state}"
    elif wanted.answer == "yes":
        follows = "the fault is looked at again, and if it is still there it goes on"
    else:
        follows = "the incident ends, and the node is as it was"
    return AnswerApprovalResult(
        incident_id=incident.id,
        answer=wanted.answer,
        answered_by=by,
        changed=is_new,
        message=f"{by} said {wanted.answer} to incident {incident.id}: {follows}",
    )
