"""Lambda of the alert queue: ask AMP about what an alert speaks of."""

from typing import Any

from aws_lambda_powertools.utilities.batch import (
    BatchProcessor,
    EventType,
    process_partial_response,
)
from aws_lambda_powertools.utilities.data_classes.sqs_event import SQSRecord
from aws_lambda_powertools.utilities.typing import LambdaContext

from nodemend import bootstrap
from nodemend.application.receive_alert import receive_alert
from nodemend.contracts.alerts import ReceiveAlertRequest
from nodemend.observability import logger

processor = BatchProcessor(event_type=EventType.SQS, raise_on_entire_batch_failure=False)


def receive_one(record: SQSRecord) -> None:
    """Work off one message; a failure sends only this message back to the queue."""
    request = ReceiveAlertRequest.model_validate(record.raw_event)
    result = receive_alert(request, ports=bootstrap.receive_alert_ports())
    logger.info("alert received", extra=result.model_dump(mode="json"))


@logger.inject_lambda_context
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    """Work through the batch and tell SQS which messages failed."""
    return dict(
        process_partial_response(
            event=event, record_handler=receive_one, processor=processor, context=context
        )
    )
