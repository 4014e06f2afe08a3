"""`nodemend pause` and `nodemend resume`."""

from ops.machines import run_machine
from ops.stack import Stack

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
    doing = f"{'pausing' if paused else 'resuming'} {cluster}"
    return run_machine(stack, MACHINE_OUTPUT, given, doing=doing)
