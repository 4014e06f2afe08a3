"""What comes after a step that failed for good: the next rung, or a person."""

import re
from datetime import datetime

from nodemend.domain.events import DetailType
from nodemend.domain.incidents import (
    Incident,
    IncidentState,
    Outcome,
    decide_end,
    move,
    record,
)
from nodemend.domain.reasons import Reason


def escalate(
    incident: Incident, reason: Reason, *, step: str, now: datetime, error: str = ""
) -> Incident:
    """Return the incident with its end decided and the event that says why.

    The plan's last rung is a person: the node stays as it is, and a cordoned node stays cordoned.
    In a dry run nothing was touched and nobody has to come, so the incident is skipped.
    """
    outcome = Outcome.SKIPPED if incident.dry_run else Outcome.NEEDS_HUMAN
    escalating = move(incident, IncidentState.ESCALATING, now)
    recorded = record(
        escalating,
        DetailType.INCIDENT_ESCALATED,
        step=step,
        reason=reason,
        now=now,
        data={"error": error} if error else {},
    )
    return decide_end(recorded, outcome, reason)


def reason_of(error_name: str, message: str) -> Reason:
    """Return the reason for an error that ended a step.

    Example:
        >>> reason_of("ClusterForbiddenError", "no").code
        'cluster_forbidden'
        >>> reason_of("States.Timeout", "").code
        'step_timed_out'
    """
    platform = {
        "States.Timeout": "step_timed_out",
        "Sandbox.Timedout": "step_timed_out",
    }
    code = platform.get(error_name)
    if code is None:
        bare = error_name.removesuffix("Error").replace(".", "_")
        code = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", bare).lower() or "unknown_error"
    return Reason(code, message or f"the step ended with {error_name}")
