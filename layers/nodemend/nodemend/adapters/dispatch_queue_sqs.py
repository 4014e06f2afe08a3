"""The queue that tells dispatch_incidents to decide again."""

from typing import TYPE_CHECKING

from nodemend.adapters._aws import translating
from nodemend.contracts.dispatch import DispatchHint

if TYPE_CHECKING:
    from mypy_boto3_sqs.client import SQSClient


class SqsDispatchQueue:
    """A standard SQS queue; its event source batches what comes within five seconds."""

    def __init__(self, *, queue_url: str, client: "SQSClient") -> None:
        self._queue_url = queue_url
        self._client = client

    def notify(self, cluster: str, incident_id: str) -> None:
        """Queue one decision.

        Raises:
            AwsUnavailableError, AwsForbiddenError: as SQS answered.
        """
        body = DispatchHint(cluster=cluster, incident_id=incident_id).model_dump_json()
        with translating("sqs:SendMessage"):
            self._client.send_message(QueueUrl=self._queue_url, MessageBody=body)
