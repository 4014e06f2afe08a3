"""Starting one of the small state machines that a person may start in the console as well.

Through the state machine and not straight into the table: whoever operates needs the right to start
one state machine, not to write items, and each start stands in its history.
"""

import json
from collections.abc import Mapping
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from ops.stack import CommandError, Stack, said

WAIT_S = 0.5
WAIT_FOR_S = 120


def run_machine(stack: Stack, output: str, given: Mapping[str, Any], *, doing: str) -> str:
    """Start a state machine, wait for its end, and return the sentence that it says.

    Args:
        stack: the deployed stack.
        output: which of its outputs has the state machine's ARN.
        given: the execution's input.
        doing: what is tried, for messages: "pausing a".

    Raises:
        CommandError: in the words of the state machine or of AWS.
    """
    machine = stack.output(output)
    client = stack.stepfunctions()
    try:
        arn = client.start_execution(stateMachineArn=machine, input=json.dumps(given))[
            "executionArn"
        ]
        for _ in range(int(WAIT_FOR_S / WAIT_S)):
            answer = client.describe_execution(executionArn=arn)
            if answer["status"] != "RUNNING":
                break
            stack.sleep(WAIT_S)
    except (BotoCoreError, ClientError) as error:
        raise said(error, doing) from error
    if answer["status"] == "SUCCEEDED":
        return str(json.loads(answer["output"])["message"])
    if answer["status"] == "RUNNING":
        raise CommandError(f"{doing} takes more than {WAIT_FOR_S} s: look at {arn}")
    raise CommandError(f"{doing} failed: {_cause(answer.get('cause', ''), arn)}")


def _cause(cause: str, arn: str) -> str:
    """Return the function's own words out of Lambda's JSON, in one line."""
    try:
        told = json.loads(cause)["errorMessage"]
    except (ValueError, KeyError, TypeError):
        told = cause or f"look at {arn}"
    return " ".join(str(told).split())
