"""Lambda of the step ValidateNode: prove the repair by clean metrics."""

from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from nodemend import bootstrap
from nodemend.application.validate_node import validate_node
from nodemend.contracts.steps import ValidateNodeRequest
from nodemend.observability import logger


@logger.inject_lambda_context(correlation_id_path="incident_id")
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    """Parse the step's input, run the use case, return its result to the state machine."""
    request = ValidateNodeRequest.model_validate(event)
    result = validate_node(request, ports=bootstrap.verify_ports(context))
    return result.model_dump(mode="json")
