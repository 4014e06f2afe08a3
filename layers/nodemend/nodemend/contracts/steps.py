"""Inputs and results of the state machine's tasks.

Each step reads the incident's record; the state machine carries little more than its id. `next`
is the word on which the Choice state after the step decides.
"""

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from nodemend.contracts.console import parse_typed, typed_object
from nodemend.domain.errors import InvalidInputError

NODE_NAME = r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"
INCIDENT_ID = r"^[0-9A-Za-z_-]{1,80}$"

HAND_EXAMPLE = (
    '{"cluster": "my-cluster", "node": "ip-10-0-1-5.ec2.internal", '
    '"reason": "why", "requested_by": "your name"}'
)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ExecutionInfo(_Model):
    """The running execution, from the context object."""

    arn: str
    name: str


class RemediateByHand(_Model):
    """What a person types into the Step Functions console: their word is the fault."""

    schema_version: Literal[1] = 1
    cluster: str = Field(min_length=1, max_length=100)
    node: str = Field(pattern=NODE_NAME, description="The node's exact Kubernetes name.")
    reason: str = Field(min_length=3, max_length=500)
    requested_by: str = Field(min_length=1, max_length=200)


class RemediateIncident(_Model):
    """What dispatch_incidents starts an execution with."""

    schema_version: Literal[1]
    incident_id: str = Field(pattern=INCIDENT_ID)


class AdmitRemediationRequest(_Model):
    """First step: the raw input of the execution, not parsed yet."""

    execution: ExecutionInfo
    input: Any

    def parse_input(self) -> RemediateByHand | RemediateIncident:
        """Return the parsed input of the execution.

        Raises:
            InvalidInputError: naming the field and the remedy.
        """
        typed = typed_object(self.input, HAND_EXAMPLE)
        if not re.fullmatch(INCIDENT_ID, self.execution.name):
            raise InvalidInputError(
                "execution name",
                f"{self.execution.name!r} cannot be an incident's id",
                "use letters, digits, - and _ only, or let the console make a name",
            )
        if "incident_id" in typed:
            return parse_typed(RemediateIncident, typed, HAND_EXAMPLE)
        return parse_typed(RemediateByHand, typed, HAND_EXAMPLE)


class StepRequest(_Model):
    """Input of every step after the first."""

    incident_id: str = Field(pattern=INCIDENT_ID)
    execution: ExecutionInfo


class AdmitRemediationResult(_Model):
    """`verify` with a slot; `close` if the incident ended here."""

    incident_id: str
    next: Literal["verify", "close"]


class VerifyFaultRequest(StepRequest):
    """Second look at the fault."""


class VerifyFaultResult(_Model):
    """`wait` while the metrics are unknown; `approve_cordon` if a person must say yes first."""

    incident_id: str
    next: Literal["cordon", "approve_cordon", "wait", "close"]
    wait_s: int = Field(default=1, ge=1)


class RequestApprovalRequest(StepRequest):
    """Ask a person, once, and look for the answer."""

    before: Literal["cordon", "repair"]


class RequestApprovalResult(_Model):
    """`approved` only after a yes and a fresh look at the fault."""

    incident_id: str
    next: Literal["approved", "wait", "close"]
    wait_s: int = Field(default=1, ge=1)


class CordonNodeRequest(StepRequest):
    """Cordon, own and taint the node."""


class CordonNodeResult(_Model):
    """`close` if the mode ends the remediation here."""

    incident_id: str
    next: Literal["drain", "close"]


class DrainNodeRequest(StepRequest):
    """One slice of the drain."""


class DrainNodeResult(_Model):
    """The slice's result; only `drained` leads to a repair."""

    incident_id: str
    next: Literal["drained", "wait", "close"]
    wait_s: int = Field(default=1, ge=1)


class StartRepairRequest(StepRequest):
    """Ask the capacity for the repair."""


class StartRepairResult(_Model):
    """`close` in a dry run; `approve_repair` if a person must say yes first."""

    incident_id: str
    next: Literal["check", "approve_repair", "close"]


class CheckRepairRequest(StepRequest):
    """Look whether the repair has happened."""


class CheckRepairResult(_Model):
    """`validate` when the repaired node is Ready with its GPUs; `repair` on the next rung."""

    incident_id: str
    next: Literal["validate", "wait", "repair", "close"]
    wait_s: int = Field(default=1, ge=1)


class ValidateNodeRequest(StepRequest):
    """Look whether the metrics are clean past the hold-down."""


class ValidateNodeResult(_Model):
    """`release` when the repair is proven; `repair` on the next rung."""

    incident_id: str
    next: Literal["release", "wait", "repair", "close"]
    wait_s: int = Field(default=1, ge=1)


class ReleaseNodeRequest(StepRequest):
    """Restore what the cordon changed, if the node is still there."""


class ReleaseNodeResult(_Model):
    """Always `close`."""

    incident_id: str
    next: Literal["close"] = "close"


class StepFailure(_Model):
    """What a Catch adds to the state: Step Functions spells these with capitals."""

    error: str = Field(alias="Error")
    cause: str = Field(default="", alias="Cause")


class EscalateIncidentRequest(StepRequest):
    """A step failed for good."""

    failure: StepFailure


class EscalateIncidentResult(_Model):
    """What comes next: `repair` on the ladder's next rung, else the close."""

    incident_id: str
    next: Literal["repair", "close"] = "close"


class CloseIncidentState(BaseModel):
    """What the execution carries when it comes to its end; only a caught failure matters."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    failure: StepFailure | None = None


class CloseIncidentRequest(StepRequest):
    """Carry out the decided end; `state.failure` is there after a superseded step."""

    state: CloseIncidentState = CloseIncidentState()


class CloseIncidentResult(_Model):
    """How the incident ended; `is_owner` False: it was not this execution's to close."""

    incident_id: str
    outcome: str
    reason: str
    is_owner: bool = True
