"""Lambda of the state machine AnswerApproval: a person says yes or no."""

from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from nodemend import bootstrap
from nodemend.application.answer_approval import answer_approval
from nodemend.contracts.approving import AnswerApprovalRequest
from nodemend.observability import logger


@logger.inject_lambda_context
def handler(event: dict[str, Any], _context: LambdaContext) -> dict[str, Any]:
    """Parse the execution's input, run the use case, return how the request stands now."""
    request = AnswerApprovalRequest.model_validate(event)
    result = answer_approval(request, ports=bootstrap.answer_approval_ports())
    return result.model_dump(mode="json")
