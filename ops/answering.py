"""`nodemend approve` and `nodemend deny`."""

from ops.machines import run_machine
from ops.stack import Stack

MACHINE_OUTPUT = "AnswerApprovalStateMachineArn"


def answer_approval(
    stack: Stack, *, incident_id: str, is_yes: bool, why: str, rung: str | None, answered_by: str
) -> str:
    """Answer an incident's request, wait until it is recorded, and return what that says.

    Raises:
        CommandError: in the words of the state machine or of AWS.
    """
    given = {
        "incident_id": incident_id,
        "answer": "yes" if is_yes else "no",
        "why": why,
        "answered_by": answered_by,
    }
    doing = f"{'approving' if is_yes else 'denying'} {incident_id}"
    named = {"rung": rung} if rung else {}
    return run_machine(stack, MACHINE_OUTPUT, {**given, **named}, doing=doing)
