"""Lambda of the step EscalateIncident: decide what follows a failed step."""

from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from nodemend import bootstrap
from nodemend.application.escalate_incident import escalate_incident
from nodemend.contracts.steps import EscalateIncidentRequest
from nodemend.observability import logger


@logger.inject_lambda_context(correlation_id_path="incident_id")
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    """Parse the step's input, run the use case, return its result to the state machine."""
    request = EscalateIncidentRequest.model_validate(event)
    result = escalate_incident(request, ports=bootstrap.step_ports(context))
    return result.model_dump(mode="json")
