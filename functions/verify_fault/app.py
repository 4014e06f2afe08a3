"""Lambda of the step VerifyFault: a second look at the fault."""

from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from nodemend import bootstrap
from nodemend.application.verify_fault import verify_fault
from nodemend.contracts.steps import VerifyFaultRequest
from nodemend.observability import logger


@logger.inject_lambda_context(correlation_id_path="incident_id")
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    """Parse the step's input, run the use case, return its result to the state machine."""
    request = VerifyFaultRequest.model_validate(event)
    result = verify_fault(request, ports=bootstrap.verify_ports(context))
    return result.model_dump(mode="json")
