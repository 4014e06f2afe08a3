"""Input and result of the state machine with which a person answers a request for approval."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from nodemend.contracts.steps import INCIDENT_ID
from nodemend.domain.errors import InvalidInputError

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
        if not isinstance(self.input, dict):
            raise InvalidInputError("input", "is no JSON object", f"use {ANSWER_EXAMPLE}")
        try:
            return AnswerApproval.model_validate(self.input)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            field = ".".join(str(part) for part in problem["loc"]) or "input"
            raise InvalidInputError(field, problem["msg"], f"use {ANSWER_EXAMPLE}") from error


class AnswerApprovalResult(_Model):
    """How the request stands now, and whether that is new."""

    incident_id: str
    answer: str
    answered_by: str
    changed: bool
    message: str
