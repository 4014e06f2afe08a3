"""Lambda of the step CheckRepair: look whether the repair has happened."""

from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from nodemend import bootstrap
from nodemend.application.check_repair import check_repair
from nodemend.contracts.steps import CheckRepairRequest
from nodemend.observability import logger


@logger.inject_lambda_context(correlation_id_path="incident_id")
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    """Parse the step's input, run the use case, return its result to the state machine."""
    request = CheckRepairRequest.model_validate(event)
    result = check_repair(request, ports=bootstrap.repair_ports(context))
    return result.model_dump(mode="json")
