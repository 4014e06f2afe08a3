"""Event patterns, as EventBridge rules and event source mappings match them."""

import fnmatch
import ipaddress
import operator
from collections.abc import Callable, Mapping
from typing import Any

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "=": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_ABSENT = object()


class PatternError(ValueError):
    """The pattern uses something that EventBridge would refuse."""


def matches(pattern: Mapping[str, Any], event: Any) -> bool:  # noqa: ANN401 - any JSON value
    """Tell whether an event has all that the pattern asks for.

    A list in the event matches if one of its elements does.
    """
    for name, wanted in pattern.items():
        if name == "$or":
            if not any(matches(alternative, event) for alternative in wanted):
                return False
            continue
        value = event.get(name, _ABSENT) if isinstance(event, Mapping) else _ABSENT
        if not _field_matches(name, wanted, value):
            return False
    return True


def _field_matches(name: str, wanted: Any, value: Any) -> bool:  # noqa: ANN401
    if isinstance(wanted, Mapping):
        candidates = value if isinstance(value, list) else [value]
        return any(matches(wanted, {} if item is _ABSENT else item) for item in candidates)
    if not isinstance(wanted, list):
        raise PatternError(f"{name}: a pattern's field is a list or an object, not {wanted!r}")
    values = value if isinstance(value, list) else [value]
    return any(_matches_one(matcher, item) for matcher in wanted for item in values or [_ABSENT])


def _matches_one(matcher: Any, value: Any) -> bool:  # noqa: ANN401
    if not isinstance(matcher, Mapping):
        return value is not _ABSENT and _equals(matcher, value)
    ((kind, argument),) = matcher.items()
    if kind == "exists":
        return (value is not _ABSENT) == bool(argument)
    if value is _ABSENT:
        return False
    if kind == "anything-but":
        return not _excluded(argument, value)
    if kind == "numeric":
        return _is_number(value) and _numeric(argument, float(value))
    return isinstance(value, str) and _text_matches(kind, argument, value)


def _text_matches(kind: str, argument: Any, value: str) -> bool:  # noqa: ANN401
    if isinstance(argument, Mapping):  # {"prefix": {"equals-ignore-case": "x"}}
        return _text_matches(kind, argument["equals-ignore-case"].lower(), value.lower())
    match kind:
        case "prefix":
            return value.startswith(str(argument))
        case "suffix":
            return value.endswith(str(argument))
        case "equals-ignore-case":
            return value.lower() == str(argument).lower()
        case "wildcard":
            escaped = argument.replace("[", "[[]").replace("?", "[?]")
            return fnmatch.fnmatchcase(value, escaped)
        case "cidr":
            try:
                return ipaddress.ip_address(value) in ipaddress.ip_network(argument)
            except ValueError:
                return False
    raise PatternError(f"unknown matcher: {kind}")


def _excluded(argument: Any, value: Any) -> bool:  # noqa: ANN401
    if isinstance(argument, Mapping):
        ((kind, inner),) = argument.items()
        choices = inner if isinstance(inner, list) else [inner]
        return isinstance(value, str) and any(_text_matches(kind, one, value) for one in choices)
    choices = argument if isinstance(argument, list) else [argument]
    return any(_equals(one, value) for one in choices)


def _numeric(comparisons: list[Any], value: float) -> bool:
    pairs = zip(comparisons[::2], comparisons[1::2], strict=True)
    return all(_OPERATORS[sign](value, bound) for sign, bound in pairs)


def _is_number(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _equals(wanted: Any, value: Any) -> bool:  # noqa: ANN401
    """Compare as JSON: `true` is not 1."""
    return isinstance(wanted, bool) == isinstance(value, bool) and bool(wanted == value)
