"""Lambda of the state machine SetPause: a person pauses a cluster, or lets it go on."""

from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from nodemend import bootstrap
from nodemend.application.set_pause import set_pause
from nodemend.contracts.pausing import SetPauseRequest
from nodemend.observability import logger


@logger.inject_lambda_context
def handler(event: dict[str, Any], _context: LambdaContext) -> dict[str, Any]:
    """Parse the execution's input, run the use case, return how the cluster stands now."""
    request = SetPauseRequest.model_validate(event)
    result = set_pause(request, ports=bootstrap.set_pause_ports())
    return result.model_dump(mode="json")
