"""Lambda of the dispatch queue and its schedule: one decision over all that wait."""

from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from nodemend import bootstrap
from nodemend.application.dispatch_incidents import dispatch_incidents
from nodemend.contracts.dispatch import DispatchEvent
from nodemend.observability import logger


@logger.inject_lambda_context
def handler(event: dict[str, Any], _context: LambdaContext) -> dict[str, Any]:
    """Decide once for the whole batch; a failure sends the batch back and is safe to repeat."""
    request = DispatchEvent.model_validate(event).to_request()
    result = dispatch_incidents(request, ports=bootstrap.dispatch_ports())
    return result.model_dump(mode="json")
