"""Takes events from rules and schedules, and the policy from its validator's call."""

import base64
import json
import os
from typing import Any

import boto3


class BadPolicyError(Exception):
    """The policy cannot be used."""


def handler(event: dict[str, Any], _context: Any) -> None:
    table = boto3.resource("dynamodb").Table(os.environ["TABLE"])
    key = event.get("detail", {}).get("name") or event.get("kind", "none")
    table.put_item(Item={"id": f"notified-{key}", "event": json.dumps(event)})


def validate(event: dict[str, Any], _context: Any) -> None:
    content = base64.b64decode(event["content"]).decode()
    if "mode" not in content:
        raise BadPolicyError("the policy has no mode")
