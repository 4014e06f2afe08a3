"""Lambda validator of the AppConfig profile: no invalid policy is ever deployed."""

from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from nodemend import bootstrap
from nodemend.application.validate_policy import validate_policy
from nodemend.contracts.validation import ValidatePolicyRequest
from nodemend.observability import logger


@logger.inject_lambda_context
def handler(event: dict[str, Any], _context: LambdaContext) -> None:
    """Raise PolicyInvalidError, which AppConfig shows to whoever deploys."""
    request = ValidatePolicyRequest.model_validate(event)
    validate_policy(request, parse=bootstrap.parse_deployed_policy)
