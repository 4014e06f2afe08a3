"""Lambda of the step StartRepair: ask the capacity for the repair."""

from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from nodemend import bootstrap
from nodemend.application.start_repair import start_repair
from nodemend.contracts.steps import StartRepairRequest
from nodemend.observability import logger


@logger.inject_lambda_context(correlation_id_path="incident_id")
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    """Parse the step's input, run the use case, return its result to the state machine."""
    request = StartRepairRequest.model_validate(event)
    result = start_repair(request, ports=bootstrap.repair_ports(context))
    return result.model_dump(mode="json")
