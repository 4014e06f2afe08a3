"""A queue consumer: fails the messages that ask for it, and remembers the others."""

import json
import os
from typing import Any

import boto3
from shared_code import GREETING


def handler(event: dict[str, Any], _context: Any) -> dict[str, Any]:
    table = boto3.resource("dynamodb").Table(os.environ["TABLE"])
    failures = []
    for record in event["Records"]:
        body = json.loads(record["body"])
        message = body.get("detail", body)
        if message.get("fail"):
            failures.append({"itemIdentifier": record["messageId"]})
            continue
        table.put_item(
            Item={
                "id": message["id"],
                "greeting": GREETING,
                "batch": len(event["Records"]),
                "receives": int(record["attributes"]["ApproximateReceiveCount"]),
            }
        )
    return {"batchItemFailures": failures}
