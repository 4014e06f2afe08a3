"""Lambda of the steps ApproveCordon and ApproveRepair: ask a person, and look for the answer."""

from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from nodemend import bootstrap
from nodemend.application.request_approval import request_approval
from nodemend.contracts.steps import RequestApprovalRequest
from nodemend.observability import logger


@logger.inject_lambda_context(correlation_id_path="incident_id")
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    """Parse the step's input, run the use case, return its result to the state machine."""
    request = RequestApprovalRequest.model_validate(event)
    result = request_approval(request, ports=bootstrap.verify_ports(context))
    return result.model_dump(mode="json")
