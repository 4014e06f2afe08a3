"""Lambda of the three scheduled scans: ecc, thermal and utilization."""

from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from nodemend import bootstrap
from nodemend.application.scan_gpu_health import scan_gpu_health
from nodemend.contracts.scan import ScanGpuHealthRequest
from nodemend.observability import logger


@logger.inject_lambda_context
def handler(event: dict[str, Any], _context: LambdaContext) -> dict[str, Any]:
    """Parse the schedule's input, scan, return what was found for the log."""
    request = ScanGpuHealthRequest.model_validate(event)
    result = scan_gpu_health(request, ports=bootstrap.scan_ports())
    logger.info("scanned", extra=result.model_dump(mode="json"))
    return result.model_dump(mode="json")
