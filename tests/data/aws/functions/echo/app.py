"""A function that does as it is told by its event."""

import os
import time
from typing import Any

import boto3


class TooHotError(Exception):
    """An error of the product's own, to be caught by its class name."""


def echo(event: dict[str, Any], context: Any) -> Any:
    return {"event": event, "function": context.function_name}


def fail(event: dict[str, Any], _context: Any) -> Any:
    raise TooHotError(event.get("message", "too hot"))


def sleep(event: dict[str, Any], _context: Any) -> Any:
    time.sleep(event["seconds"])


def leave(_event: dict[str, Any], _context: Any) -> Any:
    os._exit(3)


def environment(_event: dict[str, Any], _context: Any) -> Any:
    return {"environment": dict(os.environ)}


def count(event: dict[str, Any], _context: Any) -> Any:
    table = boto3.resource("dynamodb").Table(os.environ["TABLE"])
    answer = table.update_item(
        Key={"id": event.get("id", "calls")},
        UpdateExpression="ADD n :one",
        ExpressionAttributeValues={":one": 1},
        ReturnValues="UPDATED_NEW",
    )
    return {"calls": int(answer["Attributes"]["n"])}


DEEDS = {
    "echo": echo,
    "fail": fail,
    "sleep": sleep,
    "exit": leave,
    "environment": environment,
    "count": count,
}


def handler(event: dict[str, Any], context: Any) -> Any:
    return DEEDS[event.get("do", "echo")](event, context)
