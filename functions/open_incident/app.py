"""Lambda of the fault queue: record an incident for each node that a scan found sick."""

from typing import Any

from aws_lambda_powertools.utilities.batch import (
    BatchProcessor,
    EventType,
    process_partial_response,
)
from aws_lambda_powertools.utilities.data_classes.sqs_event import SQSRecord
from aws_lambda_powertools.utilities.typing import LambdaContext

from nodemend import bootstrap
from nodemend.application.open_incident import open_incident
from nodemend.contracts.events import FaultEnvelope
from nodemend.observability import logger

processor = BatchProcessor(event_type=EventType.SQS, raise_on_entire_batch_failure=False)


def open_one(record: SQSRecord) -> str | None:
    """Open the incident of one message; a failure sends only this message back."""
    fault = FaultEnvelope.model_validate_json(record.body).detail
    return open_incident(fault, ports=bootstrap.open_incident_ports())


@logger.inject_lambda_context
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    """Work through the batch and tell SQS which messages failed."""
    return dict(
        process_partial_response(
            event=event, record_handler=open_one, processor=processor, context=context
        )
    )
