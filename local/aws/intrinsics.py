"""CloudFormation's parameters, conditions, mappings and intrinsic functions."""

import base64
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from local.aws.template import TemplateError

NO_VALUE = object()
"""What `AWS::NoValue` resolves to: the property is left out."""

GetResource = Callable[[str], str]
GetAttribute = Callable[[str, str], Any]
_SUB = re.compile(r"\$\{(!?)([^}]+)\}")


class Resolver:
    """Resolves values of one template.

    Args:
        document: The CloudFormation template.
        parameters: Values given for its parameters; the others take their defaults.
        pseudo: `AWS::Region` and its like.
        ref: Returns a resource's `Ref`, creating it first if need be.
        attribute: The same for `Fn::GetAtt`.
    """

    def __init__(
        self,
        document: Mapping[str, Any],
        parameters: Mapping[str, str],
        pseudo: Mapping[str, str],
        *,
        ref: GetResource,
        attribute: GetAttribute,
    ) -> None:
        self._resources = document.get("Resources", {})
        self._mappings = document.get("Mappings", {})
        self._conditions = document.get("Conditions", {})
        self._pseudo = dict(pseudo)
        self._parameters = _parameter_values(document.get("Parameters", {}), parameters)
        self._ref = ref
        self._attribute = attribute

    def resolve(self, value: Any) -> Any:  # noqa: ANN401 - any JSON value
        """Return the value with all intrinsic functions applied."""
        if isinstance(value, list):
            items = (self.resolve(item) for item in value)
            return [item for item in items if item is not NO_VALUE]
        if not isinstance(value, dict):
            return value
        if len(value) == 1:
            (name, argument), *_ = value.items()
            function = self._function(name)
            if function is not None:
                return function(argument)
        pairs = ((name, self.resolve(item)) for name, item in value.items())
        return {name: item for name, item in pairs if item is not NO_VALUE}

    def condition(self, name: str) -> bool:
        """Return whether a named condition holds."""
        if name not in self._conditions:
            raise TemplateError(f"unknown condition: {name}")
        return bool(self._test(self._conditions[name]))

    def _function(self, name: str) -> Callable[[Any], Any] | None:
        functions: dict[str, Callable[[Any], Any]] = {
            "Ref": self._do_ref,
            "Fn::GetAtt": self._do_get_att,
            "Fn::Sub": self._do_sub,
            "Fn::Join": self._do_join,
            "Fn::If": self._do_if,
            "Fn::Select": self._do_select,
            "Fn::Split": self._do_split,
            "Fn::FindInMap": self._do_find_in_map,
            "Fn::Base64": self._do_base64,
            "Fn::GetAZs": lambda _region: [
                f"{self._pseudo['AWS::Region']}{zone}" for zone in "abc"
            ],
            "Fn::Length": lambda items: len(self.resolve(items)),
            "Fn::ToJsonString": self._do_to_json,
            "Fn::Equals": self._test_of("Fn::Equals"),
            "Fn::And": self._test_of("Fn::And"),
            "Fn::Or": self._test_of("Fn::Or"),
            "Fn::Not": self._test_of("Fn::Not"),
        }
        if name in functions:
            return functions[name]
        if name.startswith("Fn::"):
            raise TemplateError(f"{name} is not supported on the laptop")
        return None

    def _do_ref(self, name: str) -> Any:  # noqa: ANN401
        if name == "AWS::NoValue":
            return NO_VALUE
        if name in self._pseudo:
            return self._pseudo[name]
        if name in self._parameters:
            return self._parameters[name]
        if name in self._resources:
            return self._ref(name)
        raise TemplateError(f"Ref to unknown name: {name}")

    def _do_get_att(self, argument: Any) -> Any:  # noqa: ANN401
        parts = argument.split(".", 1) if isinstance(argument, str) else list(argument)
        name, attribute = parts[0], ".".join(str(self.resolve(part)) for part in parts[1:])
        if name not in self._resources:
            raise TemplateError(f"GetAtt of unknown resource: {name}")
        return self._attribute(name, attribute)

    def _do_sub(self, argument: Any) -> str:  # noqa: ANN401
        text, variables = (argument, {}) if isinstance(argument, str) else argument

        def replace(match: re.Match[str]) -> str:
            literal, name = match.groups()
            if literal:
                return f"${{{name}}}"
            if name in variables:
                return str(self.resolve(variables[name]))
            if "." in name and name not in self._pseudo:
                return str(self._do_get_att(name))
            return str(self._do_ref(name))

        return _SUB.sub(replace, text)

    def _do_join(self, argument: list[Any]) -> str:
        separator, items = argument
        return str(separator).join(str(item) for item in self.resolve(items))

    def _do_if(self, argument: list[Any]) -> Any:  # noqa: ANN401
        name, when_true, when_false = argument
        return self.resolve(when_true if self.condition(name) else when_false)

    def _do_select(self, argument: list[Any]) -> Any:  # noqa: ANN401
        index, items = argument
        return self.resolve(items)[int(self.resolve(index))]

    def _do_split(self, argument: list[Any]) -> list[str]:
        separator, text = argument
        return str(self.resolve(text)).split(separator)

    def _do_find_in_map(self, argument: list[Any]) -> Any:  # noqa: ANN401
        name, first, second = (self.resolve(part) for part in argument[:3])
        try:
            return self.resolve(self._mappings[name][first][second])
        except KeyError:
            raise TemplateError(f"no {first}.{second} in mapping {name}") from None

    def _do_base64(self, argument: Any) -> str:  # noqa: ANN401
        return base64.b64encode(str(self.resolve(argument)).encode()).decode()

    def _do_to_json(self, argument: Any) -> str:  # noqa: ANN401
        return json.dumps(self.resolve(argument))

    def _test_of(self, name: str) -> Callable[[Any], bool]:
        return lambda argument: self._test({name: argument})

    def _test(self, expression: Any) -> bool:  # noqa: ANN401
        if not isinstance(expression, dict) or len(expression) != 1:
            raise TemplateError(f"unreadable condition: {expression!r}")
        (name, argument), *_ = expression.items()
        match name:
            case "Condition":
                return self.condition(argument)
            case "Fn::Equals":
                left, right = (self.resolve(part) for part in argument)
                return str(left) == str(right)
            case "Fn::And":
                return all(self._test(part) for part in argument)
            case "Fn::Or":
                return any(self._test(part) for part in argument)
            case "Fn::Not":
                return not self._test(argument[0])
        raise TemplateError(f"{name} is not supported in a condition")


def _parameter_values(
    declared: Mapping[str, Mapping[str, Any]], given: Mapping[str, str]
) -> dict[str, Any]:
    unknown = set(given) - set(declared)
    if unknown:
        raise TemplateError(f"the template has no parameter {', '.join(sorted(unknown))}")
    values: dict[str, Any] = {}
    for name, definition in declared.items():
        if name not in given and "Default" not in definition:
            raise TemplateError(f"parameter {name} has neither a value nor a default")
        chosen = given.get(name, definition.get("Default", ""))
        value = str(chosen).lower() if isinstance(chosen, bool) else str(chosen)
        allowed = definition.get("AllowedValues")
        if allowed is not None and value not in [str(item) for item in allowed]:
            raise TemplateError(f"parameter {name}: {value!r} is not one of {allowed}")
        pattern = definition.get("AllowedPattern")
        if pattern is not None and re.fullmatch(pattern, value) is None:
            raise TemplateError(f"parameter {name}: {value!r} does not match {pattern}")
        is_list = definition.get("Type") in ("CommaDelimitedList", "List<Number>")
        values[name] = [part.strip() for part in value.split(",")] if is_list else value
    return values
