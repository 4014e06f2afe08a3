"""A step failed for good: say why, and decide what comes next."""

import json

from nodemend.application.steps import StepPorts, commit, load, pinned_cluster
from nodemend.contracts.steps import EscalateIncidentRequest, EscalateIncidentResult
from nodemend.domain.errors import NodemendError, error_of
from nodemend.domain.escalation import escalate, is_about_repair, is_on_next_rung, reason_of
from nodemend.domain.incidents import Incident

STEP = "escalate_incident"

_LONGEST_TEXT = 1000


def escalate_incident(
    request: EscalateIncidentRequest, *, ports: StepPorts
) -> EscalateIncidentResult:
    """Turn a step's error into the ladder's next rung, or into the incident's end.

    The event says which, and tells a person what to do if there is no other repair.

    Raises:
        SupersededError: if the incident is closed or another execution's.
        PermanentError: if there never was an incident: the step's own error, for the close.
    """
    failure = request.failure
    if ports.incidents.get(request.incident_id) is None:
        raise error_of(failure.error, message_of(failure.cause))
    incident = load(ports, request)
    if incident.verdict is not None:
        return EscalateIncidentResult(incident_id=incident.id)
    reason = reason_of(failure.error, message_of(failure.cause))
    if is_on_next_rung(incident) and is_about_repair(reason):
        # An earlier try decided on another repair, and died before it could say so.
        return EscalateIncidentResult(incident_id=incident.id, next="repair")
    now = ports.clock.now()
    escalated = escalate(incident, reason, step=STEP, now=now, error=failure.error)
    commit(ports, escalated)
    if is_on_next_rung(escalated):
        return EscalateIncidentResult(incident_id=incident.id, next="repair")
    _tell_on_node(incident, reason.text, ports)
    return EscalateIncidentResult(incident_id=incident.id)


def message_of(cause: str) -> str:
    """Return the error message in the Cause that Lambda gives, or the Cause itself."""
    try:
        parsed = json.loads(cause)
    except ValueError:
        return cause[:_LONGEST_TEXT]
    if isinstance(parsed, dict) and "errorMessage" in parsed:
        return str(parsed["errorMessage"])[:_LONGEST_TEXT]
    return cause[:_LONGEST_TEXT]


def _tell_on_node(incident: Incident, text: str, ports: StepPorts) -> None:
    """Leave a Kubernetes Event, where the cluster can be reached: it may be the very trouble."""
    if incident.dry_run or incident.cluster_policy is None:
        return
    try:
        cluster = ports.clusters.open(pinned_cluster(incident))
    except NodemendError:
        return
    message = f"{text} (incident {incident.id})"
    cluster.record_event(incident.node, "NodemendNeedsHuman", message, is_warning=True)
