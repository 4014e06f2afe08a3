"""SQS event source mappings: what Lambda's pollers do between a queue and a function."""

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError
from moto.sqs.models import sqs_backends

from local.aws.background import Background
from local.aws.front import Front
from local.aws.lambdas import InvokeResult, LambdaService, ThrottledError
from local.aws.patterns import matches

_LOGGER = logging.getLogger(__name__)
_ERROR_PAUSE_S = 0.2
_IDLE_S = 0.03
"""How often an empty queue is looked at. The look is in memory: it makes no call."""


@dataclass(frozen=True)
class QueueMapping:
    """One SQS event source mapping, everything resolved."""

    function_name: str
    queue_arn: str
    queue_url: str
    batch_size: int = 10
    window_s: float = 0.0
    reports_item_failures: bool = False
    concurrency: int = 2
    filters: Sequence[Mapping[str, Any]] = ()


class QueuePoller:
    """Feeds one function from one queue.

    Args:
        front: To look into the queue.
        lambdas: Runs the function.
        mapping: What connects them.
        client: An SQS client of the Lambda service.
        retry_s: After a failure, its messages become visible again after this time. None: when
            the queue's visibility time-out is over, as on AWS (minutes, usually).
    """

    def __init__(
        self,
        front: Front,
        lambdas: LambdaService,
        mapping: QueueMapping,
        client: Any,  # noqa: ANN401 - boto3's clients are made at run time
        retry_s: float | None,
    ) -> None:
        self._mapping = mapping
        self._lambdas = lambdas
        self._client = client
        self._retry_s = retry_s
        self._region, self._account = front.region, front.account_id
        self._background = Background(f"poller-{mapping.queue_url.rpartition('/')[2]}")
        self._busy_lock = threading.Lock()
        self._busy = 0
        self.enabled = True

    def start(self) -> None:
        """Begin to poll, with one thread for each concurrent batch."""
        for number in range(self._mapping.concurrency):
            self._background.spawn(self._loop, str(number))

    def stop(self) -> None:
        """End all pollers."""
        self._background.stop()

    @property
    def is_idle(self) -> bool:
        """True if no batch is being handled."""
        return self._busy == 0

    def _loop(self) -> None:
        while not self._background.stopping.is_set():
            if not self.enabled or visible_messages(self._queue()) == 0:
                self._background.stopping.wait(_IDLE_S)
                continue
            self._count(1)
            try:
                batch = self._collect()
                if batch:
                    self._handle(batch)
            except (BotoCoreError, ClientError) as error:
                _LOGGER.warning("polling %s: %s", self._mapping.queue_arn, error)
                self._background.stopping.wait(_ERROR_PAUSE_S)
            finally:
                self._count(-1)

    def _count(self, change: int) -> None:
        with self._busy_lock:
            self._busy += change

    def _queue(self) -> Any:  # noqa: ANN401 - moto's Queue
        name = self._mapping.queue_arn.rpartition(":")[2]
        return sqs_backends[self._account][self._region].queues.get(name)

    # --- a batch -------------------------------------------------------------------------------

    def _collect(self) -> list[dict[str, Any]]:
        """Receive up to a batch; with a window, wait for more until it closes."""
        batch: list[dict[str, Any]] = []
        closes = time.monotonic() + self._mapping.window_s
        while not self._background.stopping.is_set():
            if visible_messages(self._queue()):
                batch += self._receive(self._mapping.batch_size - len(batch))
            if len(batch) >= self._mapping.batch_size or time.monotonic() >= closes or not batch:
                break
            self._background.stopping.wait(min(_IDLE_S, max(0.0, closes - time.monotonic())))
        return self._filtered(batch)

    def _receive(self, count: int) -> list[dict[str, Any]]:
        answer = self._client.receive_message(
            QueueUrl=self._mapping.queue_url,
            MaxNumberOfMessages=min(10, count),
            MessageSystemAttributeNames=["All"],
            MessageAttributeNames=["All"],
            WaitTimeSeconds=0,
        )
        messages: list[dict[str, Any]] = answer.get("Messages", [])
        return messages

    def _filtered(self, batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if not self._mapping.filters:
            return batch
        kept = [message for message in batch if self._passes(message)]
        # What no filter wants is deleted, as Lambda does.
        self._delete([message for message in batch if message not in kept])
        return kept

    def _passes(self, message: dict[str, Any]) -> bool:
        try:
            body = json.loads(message["Body"])
        except ValueError:
            body = message["Body"]
        return any(matches(pattern, {"body": body}) for pattern in self._mapping.filters)

    def _handle(self, batch: list[dict[str, Any]]) -> None:
        event = {"Records": [self._record(message) for message in batch]}
        payload = json.dumps(event).encode()
        try:
            result = self._lambdas.invoke(self._mapping.function_name, payload)
        except ThrottledError:
            self._retry_later(batch)
            return
        failed = self._failed_ids(batch, result)
        self._retry_later([message for message in batch if message["MessageId"] in failed])
        done = [message for message in batch if message["MessageId"] not in failed]
        try:
            self._delete(done)
        except (BotoCoreError, ClientError):
            self._retry_later(done)  # they will come a second time, as on AWS
            raise

    def _failed_ids(self, batch: list[dict[str, Any]], result: InvokeResult) -> set[str]:
        """Return which messages failed; an answer that makes no sense fails them all."""
        everything = {message["MessageId"] for message in batch}
        if result.function_error is not None:
            return everything
        if not self._mapping.reports_item_failures:
            return set()
        try:
            answer = json.loads(result.payload)
            items = (answer or {}).get("batchItemFailures") or []
            failed = {item["itemIdentifier"] for item in items}
        except (ValueError, AttributeError, KeyError, TypeError):
            return everything
        return failed if failed <= everything else everything

    def _delete(self, messages: list[dict[str, Any]]) -> None:
        for first in range(0, len(messages), 10):
            self._client.delete_message_batch(
                QueueUrl=self._mapping.queue_url,
                Entries=[
                    {"Id": str(number), "ReceiptHandle": message["ReceiptHandle"]}
                    for number, message in enumerate(messages[first : first + 10])
                ],
            )

    def _retry_later(self, messages: list[dict[str, Any]]) -> None:
        queue = self._queue()
        if self._retry_s is None or not messages or queue is None:
            return
        # Whole seconds are all that the API takes, so this is done in moto's queue.
        handles = {message["ReceiptHandle"] for message in messages}
        for message in list(queue._messages):
            if message.receipt_handle in handles:
                message.visible_at = time.time() * 1000 + self._retry_s * 1000

    def _record(self, message: dict[str, Any]) -> dict[str, Any]:
        attributes = {
            name: {
                "stringValue": value.get("StringValue"),
                "stringListValues": [],
                "binaryListValues": [],
                "dataType": value["DataType"],
            }
            for name, value in message.get("MessageAttributes", {}).items()
        }
        return {
            "messageId": message["MessageId"],
            "receiptHandle": message["ReceiptHandle"],
            "body": message["Body"],
            "attributes": message.get("Attributes", {}),
            "messageAttributes": attributes,
            "md5OfBody": message["MD5OfBody"],
            "eventSource": "aws:sqs",
            "eventSourceARN": self._mapping.queue_arn,
            "awsRegion": self._region,
        }


def visible_messages(queue: Any) -> int:  # noqa: ANN401 - moto's Queue
    """Count the messages that a receive would return now."""
    if queue is None:
        return 0
    return sum(bool(message.visible and not message.delayed) for message in queue.messages)


def waiting_messages(queue: Any) -> int:  # noqa: ANN401 - moto's Queue
    """Count all messages of a queue: visible, delayed and in flight."""
    return len(queue._messages)
