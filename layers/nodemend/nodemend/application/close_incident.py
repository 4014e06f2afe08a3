"""Last step: carry out the decided end."""

from dataclasses import dataclass

from nodemend.application.closing import ClosingPorts, close_and_free, free
from nodemend.application.escalate_incident import message_of
from nodemend.application.ports import Clock
from nodemend.contracts.steps import CloseIncidentRequest, CloseIncidentResult
from nodemend.domain.errors import error_of
from nodemend.domain.escalation import reason_of
from nodemend.domain.incidents import Incident, Outcome
from nodemend.domain.reasons import Reason

STEP = "close_incident"


@dataclass(frozen=True, slots=True)
class ClosePorts:
    """What closing needs."""

    closing: ClosingPorts
    clock: Clock


def close_incident(request: CloseIncidentRequest, *, ports: ClosePorts) -> CloseIncidentResult:
    """Close the incident with what the steps decided, and free what it holds.

    An execution that does not own the incident (a copy, a redrive, a late duplicate) changes
    nothing here and ends.

    Raises:
        PermanentError: if there never was an incident: what the execution failed with.
        ConcurrentUpdateError: if the record changed meanwhile; the task is retried.
    """
    incident = ports.closing.incidents.get(request.incident_id)
    if incident is None:
        return _without_incident(request)
    is_owner = not incident.execution_arn or incident.execution_arn == request.execution.arn
    now = ports.clock.now()
    if is_owner and incident.is_closed:
        free(incident, now=now, ports=ports.closing)
    elif is_owner:
        outcome, reason = _end_of(incident, request)
        incident = close_and_free(
            incident, outcome, reason, step=STEP, now=now, ports=ports.closing
        )
    return CloseIncidentResult(
        incident_id=incident.id,
        outcome=incident.outcome or Outcome.SUPERSEDED,
        reason=str(incident.reason or "it belongs to another execution"),
        is_owner=is_owner,
    )


def _without_incident(request: CloseIncidentRequest) -> CloseIncidentResult:
    """End an execution that failed before it had an incident, red and with its real error.

    Raises:
        PermanentError: what the failed step raised, by its class.
    """
    failure = request.state.failure
    text = message_of(failure.cause) if failure else "there is no such incident"
    if failure is not None and failure.error != "SupersededError":
        raise error_of(failure.error, text)
    return CloseIncidentResult(
        incident_id=request.incident_id,
        outcome=Outcome.SUPERSEDED,
        reason=text,
        is_owner=False,
    )


def _end_of(incident: Incident, request: CloseIncidentRequest) -> tuple[Outcome, Reason]:
    if incident.verdict is not None:
        return incident.verdict
    # In a dry run nothing was touched, so nobody has to come.
    failed = Outcome.SKIPPED if incident.dry_run else Outcome.NEEDS_HUMAN
    failure = request.state.failure
    if failure is None:
        return failed, Reason("undecided", "the execution ended without a decision")
    text = message_of(failure.cause)
    if failure.error == "SupersededError":
        return Outcome.SUPERSEDED, Reason("superseded", text)
    return failed, reason_of(failure.error, text)
