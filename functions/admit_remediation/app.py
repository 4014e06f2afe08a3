"""Lambda of the step AdmitRemediation: whose execution is this, and has it a slot?"""

from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from nodemend import bootstrap
from nodemend.application.admit_remediation import admit_remediation
from nodemend.contracts.steps import AdmitRemediationRequest
from nodemend.observability import logger


@logger.inject_lambda_context(correlation_id_path="execution.name")
def handler(event: dict[str, Any], _context: LambdaContext) -> dict[str, Any]:
    """Parse the step's input, run the use case, return its result to the state machine."""
    request = AdmitRemediationRequest.model_validate(event)
    result = admit_remediation(request, ports=bootstrap.dispatch_ports())
    return result.model_dump(mode="json")
