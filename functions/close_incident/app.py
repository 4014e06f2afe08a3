"""Lambda of the step CloseIncident: carry out the decided end."""

from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from nodemend import bootstrap
from nodemend.application.close_incident import close_incident
from nodemend.contracts.steps import CloseIncidentRequest
from nodemend.observability import logger


@logger.inject_lambda_context(correlation_id_path="incident_id")
def handler(event: dict[str, Any], _context: LambdaContext) -> dict[str, Any]:
    """Parse the step's input, run the use case, return its result to the state machine."""
    request = CloseIncidentRequest.model_validate(event)
    result = close_incident(request, ports=bootstrap.close_ports())
    return result.model_dump(mode="json")
