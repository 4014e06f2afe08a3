"""Label and field selectors, with the error messages of the real parsers."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from local.kubernetes.errors import bad_request
from local.kubernetes.objects import JsonObject, labels_of
from local.kubernetes.resources import Resource, field_value

Matcher = Callable[[JsonObject], bool]
LabelMatcher = Callable[[Mapping[str, str]], bool]

_TOKEN: Final = re.compile(r"\s*(==|!=|=|!|\(|\)|,|[^\s=!(),]+)")


def match_labels(selector: JsonObject | None) -> LabelMatcher:
    """Build a matcher from a `LabelSelector` object.

    None selects nothing and `{}` everything: that is how policy/v1 reads a budget's selector.
    """
    if selector is None:
        return lambda _labels: False
    wanted: dict[str, str] = dict(selector.get("matchLabels") or {})
    requirements = [
        _requirement(item["key"], str(item["operator"]).lower(), set(item.get("values") or ()))
        for item in selector.get("matchExpressions") or ()
    ]

    def matches(labels: Mapping[str, str]) -> bool:
        return all(labels.get(key) == value for key, value in wanted.items()) and all(
            requirement(labels) for requirement in requirements
        )

    return matches


def _requirement(key: str, operator: str, values: set[str]) -> LabelMatcher:
    if operator == "exists":
        return lambda labels: key in labels
    if operator == "doesnotexist":
        return lambda labels: key not in labels
    if operator == "in":
        return lambda labels: labels.get(key) in values
    return lambda labels: key not in labels or labels[key] not in values


def parse_label_selector(text: str) -> LabelMatcher:
    """Parse the query form: `a=b,c!=d,e in (f,g),h notin (i),j,!k`.

    Raises:
        ApiError: 400, for a selector that does not parse.
    """
    parser = _LabelParser(text)
    requirements = parser.parse()
    return lambda labels: all(requirement(labels) for requirement in requirements)


class _LabelParser:
    def __init__(self, text: str) -> None:
        self._words = [match.group(1) for match in _TOKEN.finditer(text)]
        self._position = 0

    def parse(self) -> list[LabelMatcher]:
        requirements: list[LabelMatcher] = []
        while self._peek():
            requirements.append(self._one())
            word = self._peek()
            if word == ",":
                self._next()
                if not self._peek():
                    self._fail(", found '', expected: identifier after ','")
            elif word:
                self._fail(f": found '{word}', expected: ',' or 'end of string'")
        return requirements

    def _peek(self) -> str:
        return self._words[self._position] if self._position < len(self._words) else ""

    def _next(self) -> str:
        word = self._peek()
        self._position += 1
        return word

    def _one(self) -> LabelMatcher:
        if self._peek() == "!":
            self._next()
            return _requirement(self._next(), "doesnotexist", set())
        key = self._next()
        operator = self._peek()
        if operator in ("", ","):
            return _requirement(key, "exists", set())
        self._next()
        if operator in ("=", "=="):
            return _requirement(key, "in", {self._value()})
        if operator == "!=":
            return _requirement(key, "notin", {self._value()})
        if operator in ("in", "notin"):
            return _requirement(key, operator, self._values())
        self._fail(f": found '{operator}', expected: in, notin, =, ==, !=, gt, lt")
        raise AssertionError  # unreachable: _fail raises

    def _value(self) -> str:
        return "" if self._peek() in ("", ",") else self._next()

    def _values(self) -> set[str]:
        if self._next() != "(":
            self._fail(": found '', expected: '('")
        values = set()
        while True:
            values.add(self._next())
            word = self._next()
            if word == ")":
                return values
            if word != ",":
                self._fail(f": found '{word}', expected: ',' or ')'")

    @staticmethod
    def _fail(why: str) -> None:
        raise bad_request(f"unable to parse requirement{why}")


def parse_field_selector(resource: Resource, text: str) -> Matcher:
    """Parse `a=b,c!=d` over the field labels that the resource supports.

    Raises:
        ApiError: 400, for one that does not parse or names an unsupported field.
    """
    requirements: list[tuple[str, bool, str]] = []
    for part in text.split(","):
        if not part:
            continue
        match = re.fullmatch(r"([^=!]*)(==|!=|=)(.*)", part)
        if match is None:
            raise bad_request(f"invalid selector: '{text}'; can't understand '{part}'")
        label, operator, value = match.groups()
        _check_field_label(resource, label)
        requirements.append((label, operator != "!=", value))

    def matches(obj: JsonObject) -> bool:
        return all(
            (field_value(obj, label) == value) is is_equal
            for label, is_equal, value in requirements
        )

    return matches


def exact_field(text: str, label: str) -> str | None:
    """Return the value that the selector demands of `label`, if it names one: for an index."""
    for part in text.split(","):
        for operator in ("==", "="):
            if part.startswith(f"{label}{operator}"):
                return part.removeprefix(f"{label}{operator}").removeprefix("=")
    return None


def _check_field_label(resource: Resource, label: str) -> None:
    known = ["metadata.name", *resource.field_labels]
    if resource.namespaced or not resource.has_own_field_labels:
        known.append("metadata.namespace")
    if label in known:
        return
    if resource.has_own_field_labels:
        raise bad_request(f"field label not supported: {label}")
    raise bad_request(
        f'"{label}" is not a known field selector: only "metadata.name", "metadata.namespace"'
    )


def build_matcher(resource: Resource, query: Mapping[str, str]) -> Matcher | None:
    """Return the matcher of a LIST; None if it selects everything."""
    matchers: list[Matcher] = []
    label_text = query.get("labelSelector", "")
    if label_text:
        by_label = parse_label_selector(label_text)
        matchers.append(lambda obj: by_label(labels_of(obj)))
    field_text = query.get("fieldSelector", "")
    if field_text:
        matchers.append(parse_field_selector(resource, field_text))
    if not matchers:
        return None
    return lambda obj: all(matcher(obj) for matcher in matchers)


def tolerates(tolerations: list[Any] | None, taint: Mapping[str, Any]) -> JsonObject | None:
    """Return the first toleration that covers the taint."""
    for toleration in tolerations or ():
        if toleration.get("effect") not in (None, "", taint.get("effect")):
            continue
        if toleration.get("key") not in (None, "", taint.get("key")):
            continue
        if toleration.get("operator", "Equal") == "Exists" or toleration.get(
            "value", ""
        ) == taint.get("value", ""):
            return dict(toleration)
    return None
