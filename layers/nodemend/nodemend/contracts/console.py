"""Reading what a person types into the Step Functions console."""

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from nodemend.domain.errors import InvalidInputError

M = TypeVar("M", bound=BaseModel)


def typed_object(typed: Any, example: str) -> dict[str, Any]:  # noqa: ANN401 - anything may come
    """Return the input if it is a JSON object.

    Raises:
        InvalidInputError: with the example as the remedy.
    """
    if not isinstance(typed, dict):
        raise InvalidInputError("input", "is no JSON object", f"use {example}")
    return typed


def parse_typed(model: type[M], typed: dict[str, Any], example: str) -> M:
    """Return the input as the model reads it.

    Raises:
        InvalidInputError: naming the first wrong field, with the example as the remedy.
    """
    try:
        return model.model_validate(typed)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in problem["loc"]) or "input"
        raise InvalidInputError(field, problem["msg"], f"use {example}") from error
