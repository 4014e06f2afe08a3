"""The suite of the DeadLetters port: the fake, and SQS by moto."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from moto import mock_aws

from nodemend.adapters.dead_letters_sqs import MAX_BODY_BYTES, SqsDeadLetters
from nodemend.application.ports import DeadLetters
from nodemend.domain.errors import AwsForbiddenError, AwsUnavailableError, InvalidInputError
from tests.fakes.aws import Wire, aws_client
from tests.fakes.messages import DeadLetter, MemoryDeadLetters


@dataclass
class Harness:
    """A queue of one kind, and what is in it."""

    queue: DeadLetters
    letters: Callable[[], list[DeadLetter]]


@pytest.fixture
def sqs() -> Iterator[tuple[SqsDeadLetters, Any, str]]:
    with mock_aws():
        client = aws_client("sqs")
        url = client.create_queue(QueueName="refused")["QueueUrl"]
        yield SqsDeadLetters(queue_url=url, client=client), client, url


def received(client: Any, url: str) -> list[DeadLetter]:
    answer = client.receive_message(
        QueueUrl=url, MaxNumberOfMessages=10, MessageAttributeNames=["All"]
    )
    found = []
    for message in answer.get("Messages", []):
        words = {k: v["StringValue"] for k, v in message["MessageAttributes"].items()}
        found.append(DeadLetter(message["Body"], **words))
    return found


@pytest.fixture(params=["memory", "sqs"])
def harness(request: pytest.FixtureRequest) -> Harness:
    if request.param == "memory":
        memory = MemoryDeadLetters()
        return Harness(memory, lambda: memory.letters)
    adapter, client, url = request.getfixturevalue("sqs")
    return Harness(adapter, lambda: received(client, url))


def test_a_message_is_kept_as_it_came_with_error_field_and_remedy(harness: Harness) -> None:
    harness.queue.put('{"a": "é"}', error="is no JSON", field="Message", remedy="write JSON")
    assert harness.letters() == [DeadLetter('{"a": "é"}', "is no JSON", "Message", "write JSON")]


def test_a_message_that_is_put_there_twice_is_there_twice(harness: Harness) -> None:
    for _ in range(2):
        harness.queue.put("x", error="e", field="f", remedy="r")
    assert len(harness.letters()) == 2


# --- SQS only -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "kept"),
    [("", "(empty)"), ("a\x00b\ud800", "a\ufffdb\ufffd"), ("tab\tline\n😀", "tab\tline\n😀")],
)
def test_what_a_queue_refuses_is_replaced(
    sqs: tuple[SqsDeadLetters, Any, str], body: str, kept: str
) -> None:
    adapter, client, url = sqs
    adapter.put(body, error="bad \x01", field="", remedy="r" * 5000)
    (letter,) = received(client, url)
    assert (letter.body, letter.error, letter.field) == (kept, "bad \ufffd", "-")
    assert len(letter.remedy) == 1000


def test_a_long_message_is_cut_between_characters(sqs: tuple[SqsDeadLetters, Any, str]) -> None:
    adapter, client, url = sqs
    adapter.put("x" + "é" * MAX_BODY_BYTES, error="e", field="f", remedy="r")
    (letter,) = received(client, url)
    assert len(letter.body.encode()) <= MAX_BODY_BYTES + 3
    assert letter.body.endswith("é…")


def test_a_queue_that_refuses_is_an_error_of_the_domain(
    sqs: tuple[SqsDeadLetters, Any, str],
) -> None:
    adapter, client, _ = sqs
    wire = Wire(client)
    for code, error in (
        ("AccessDenied", AwsForbiddenError),
        ("RequestThrottled", AwsUnavailableError),
        ("AWS.SimpleQueueService.NonExistentQueue", InvalidInputError),
    ):
        wire.fail("SendMessage", code)
        with pytest.raises(error, match="sqs:SendMessage"):
            adapter.put("x", error="e", field="f", remedy="r")
