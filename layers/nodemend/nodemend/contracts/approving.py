"""Input and result of the state machine with which a person answers a request for approval."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from nodemend.contracts.console import parse_typed, typed_object
from nodemend.contracts.steps import INCIDENT_ID

ANSWER_EXAMPLE = (
    '{"incident_id": "01J...", "answer": "yes", "why": "why", "answered_by": "your name"}'
)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class AnswerApproval(_Model):
    """What a person types into the Step Functions console to say yes or no."""

    schema_version: Literal[1] = 1
    incident_id: str = Field(pattern=INCIDENT_ID, description="The incident that asks.")
    answer: Literal["yes", "no"]
    answered_by: str = Field(min_length=1, max_length=200)
    why: str = Field(default="", max_length=500, description="Needed for a no.")
    rung: Literal["reboot", "replace"] | None = Field(
        default=None,
        description="The repair that is meant; needed where an incident asks a second time.",
    )

    @model_validator(mode="after")
    def _a_no_has_a_reason(self) -> Self:
        if self.answer == "no" and len(self.why.strip()) < 3:
            raise ValueError("why: a no needs a reason that others can read")
        return self


class AnswerApprovalRequest(_Model):
    """The raw input of the execution, not parsed yet."""

    input: Any

    def parse_input(self) -> AnswerApproval:
        """Return the parsed input of the execution.

        Raises:
            InvalidInputError: naming the field and the remedy.
        """
        return parse_typed(AnswerApproval, typed_object(self.input, ANSWER_EXAMPLE), ANSWER_EXAMPLE)


class AnswerApprovalResult(_Model):
    """How the request stands now, and whether that is new."""

    incident_id: str
    answer: str
    answered_by: str
    changed: bool
    message: str
