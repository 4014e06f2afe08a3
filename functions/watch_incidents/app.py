"""Lambda of the watchdog: on ended executions, and each minute."""

from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from nodemend import bootstrap
from nodemend.application.watch_incidents import watch_incidents
from nodemend.contracts.watch import WatchEvent
from nodemend.observability import logger


@logger.inject_lambda_context
def handler(event: dict[str, Any], _context: LambdaContext) -> dict[str, Any]:
    """Repair what fell through the cracks."""
    request = WatchEvent.model_validate(event).to_request()
    result = watch_incidents(request, ports=bootstrap.watch_ports())
    return result.model_dump(mode="json")
