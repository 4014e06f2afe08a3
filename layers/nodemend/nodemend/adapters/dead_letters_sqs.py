"""The queue of alert messages that nodemend refuses, for a person to read."""

from typing import TYPE_CHECKING

from nodemend.adapters._aws import translating

if TYPE_CHECKING:
    from mypy_boto3_sqs.client import SQSClient

MAX_BODY_BYTES = 200 * 1024
"""What is kept of a body: a queue takes 256 KB with the attributes, and envelope and escapes have
their share of that already."""

MAX_ATTRIBUTE = 1000


class SqsDeadLetters:
    """A standard SQS queue; the reason stands in the message's attributes."""

    def __init__(self, *, queue_url: str, client: "SQSClient") -> None:
        self._queue_url = queue_url
        self._client = client

    def put(self, body: str, *, error: str, field: str, remedy: str) -> None:
        """Put a message there as it came, with what is wrong and what would be right.

        Raises:
            AwsUnavailableError, AwsForbiddenError: as SQS answered.
        """
        words = {"error": error, "field": field, "remedy": remedy}
        with translating("sqs:SendMessage"):
            self._client.send_message(
                QueueUrl=self._queue_url,
                MessageBody=_cut(_allowed(body) or "(empty)"),
                MessageAttributes={
                    name: {
                        "DataType": "String",
                        "StringValue": _allowed(text)[:MAX_ATTRIBUTE] or "-",
                    }
                    for name, text in words.items()
                },
            )


def _allowed(text: str) -> str:
    """Return the text with what SQS refuses (control characters, surrogates) replaced."""
    return "".join(
        c
        if c in "\t\n\r" or " " <= c <= "\ud7ff" or "\ue000" <= c <= "\ufffd" or c > "\uffff"
        else "\ufffd"
        for c in text
    )


def _cut(text: str) -> str:
    data = text.encode()
    if len(data) <= MAX_BODY_BYTES:
        return text
    return data[:MAX_BODY_BYTES].decode(errors="ignore") + "…"
