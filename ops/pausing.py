"""`nodemend pause` and `nodemend resume`: the state machine that a person may start as well.

Through the state machine and not straight into the table: whoever operates needs the right to start
one state machine, not to write guard items, and each pause stands in its history.
"""

import json

from botocore.exceptions import BotoCoreError, ClientError

from ops.stack import CommandError, Stack, said

WAIT_S = 0.5
WAIT_FOR_S = 120
MACHINE_OUTPUT = "SetPauseStateMachineArn"


def set_pause(stack: Stack, *, cluster: str, paused: bool, reason: str, requested_by: str) -> str:
    """Pause or resume a cluster, wait until it holds, and return the sentence that says so.

    Raises:
        CommandError: in the words of the state machine or of AWS.
    """
    given = {
        "cluster": cluster,
        "paused": paused,
        "reason": reason,
        "requested_by": requested_by,
    }
    machine = stack.output(MACHINE_OUTPUT)
    client = stack.stepfunctions()
    doing = "pausing" if paused else "resuming"
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
        raise CommandError(f"{doing} {cluster} takes more than {WAIT_FOR_S} s: look at {arn}")
    raise CommandError(f"{doing} {cluster} failed: {_cause(answer.get('cause', ''), arn)}")


def _cause(cause: str, arn: str) -> str:
    """Return the function's own words out of Lambda's JSON, in one line."""
    try:
        told = json.loads(cause)["errorMessage"]
    except (ValueError, KeyError, TypeError):
        told = cause or f"look at {arn}"
    return " ".join(str(told).split())
