"""Input and result of the state machine that pauses and resumes a cluster."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from nodemend.contracts.console import parse_typed, typed_object

PAUSE_EXAMPLE = (
    '{"cluster": "my-cluster", "paused": true, "reason": "why", "requested_by": "your name"}'
)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SetPause(_Model):
    """What a person types into the Step Functions console to pause or resume a cluster."""

    schema_version: Literal[1] = 1
    cluster: str = Field(min_length=1, max_length=100, description="As the policy names it.")
    paused: bool = Field(strict=True, description="true pauses, false resumes.")
    reason: str = Field(min_length=3, max_length=500)
    requested_by: str = Field(min_length=1, max_length=200)


class SetPauseRequest(_Model):
    """The raw input of the execution, not parsed yet."""

    input: Any

    def parse_input(self) -> SetPause:
        """Return the parsed input of the execution.

        Raises:
            InvalidInputError: naming the field and the remedy.
        """
        return parse_typed(SetPause, typed_object(self.input, PAUSE_EXAMPLE), PAUSE_EXAMPLE)


class SetPauseResult(_Model):
    """How the cluster stands now, and whether that is new."""

    cluster: str
    paused: bool
    changed: bool
    message: str
