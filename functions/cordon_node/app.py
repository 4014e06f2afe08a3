"""Lambda of the step CordonNode: cordon, own and taint the node."""

from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from nodemend import bootstrap
from nodemend.application.cordon_node import cordon_node
from nodemend.contracts.steps import CordonNodeRequest
from nodemend.observability import logger


@logger.inject_lambda_context(correlation_id_path="incident_id")
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    """Parse the step's input, run the use case, return its result to the state machine."""
    request = CordonNodeRequest.model_validate(event)
    result = cordon_node(request, ports=bootstrap.step_ports(context))
    return result.model_dump(mode="json")
