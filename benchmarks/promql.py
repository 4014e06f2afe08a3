"""As much of PromQL as the catalogue's rules use, over series that are simulated.

So that `bench-quiet` asks the product's own query texts, and not a model of them: a rule that is
loosened is seen. What is not understood is refused, never guessed. The meaning is held to the
scenarios of `tests/data/rules`, which promtool runs too (`tests/unit/test_benchmarks.py`).

Followed are Prometheus 2's rules for staleness (a sample counts for five minutes, a stale mark ends
it at once, ranges skip the marks), label matching (`on`, `ignoring`, `group_left`), metric names
(dropped by functions and aggregations, kept by filters and `last_over_time`), and duplicates, which
are errors. Samples lie 30 s apart.
"""

import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

SCRAPE_S = 30
LOOKBACK_S = 300

Labels = tuple[tuple[str, str], ...]
"""Sorted pairs; the metric's name is `__name__`, as in Prometheus."""
Vector = dict[Labels, float]
Value = float | Callable[[int], float]
"""A constant, or a function of the sample's number."""

NAME = "__name__"


class UnsupportedQueryError(Exception):
    """The text uses more of PromQL than is known here."""


class QueryError(Exception):
    """Prometheus would answer this with an error."""


def labels_of(name: str, pairs: dict[str, str]) -> Labels:
    """Return the labels of a series; empty ones do not exist."""
    return tuple(sorted((k, v) for k, v in {**pairs, NAME: name}.items() if v))


# --- series -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """Samples without a gap: numbers `first` to `last`, both included."""

    first: int
    last: int
    value: Value
    is_marked: bool = True
    """A stale mark follows: the series or its target was gone at the next scrape."""

    def at(self, number: int) -> float:
        """Return the value of a sample."""
        return self.value(number) if callable(self.value) else self.value


@dataclass(frozen=True, slots=True)
class Series:
    """One series: its labels, and its runs in the order of time."""

    labels: Labels
    runs: tuple[Run, ...]
    phase_s: int = 0
    """When within each 30 s the target is scraped."""

    def at(self, t: int) -> float | None:
        """Return what an instant selector sees at a time (seconds), or None."""
        number = (t - self.phase_s) // SCRAPE_S
        for run in reversed(self.runs):
            if run.first > number:
                continue
            if number <= run.last:
                return run.at(number)
            if run.is_marked or t - self._time(run.last) >= LOOKBACK_S:
                return None
            return run.at(run.last)
        return None

    def between(self, start: int, end: int) -> list[float]:
        """Return the samples of a time range, both ends included."""
        low = -((self.phase_s - start) // SCRAPE_S)
        high = (end - self.phase_s) // SCRAPE_S
        return [
            run.at(number)
            for run in self.runs
            for number in range(max(low, run.first), min(high, run.last) + 1)
        ]

    def _time(self, number: int) -> int:
        return number * SCRAPE_S + self.phase_s


@dataclass(frozen=True, slots=True)
class Matcher:
    """One label matcher of a selector."""

    label: str
    op: str
    text: str

    def holds(self, labels: Labels) -> bool:
        """Tell whether labels match; a label that is not there is an empty one."""
        value = next((v for k, v in labels if k == self.label), "")
        if self.op in ("=", "!="):
            return (value == self.text) is (self.op == "=")
        return (re.fullmatch(self.text, value) is not None) is (self.op == "=~")


@dataclass
class Database:
    """Series that a query is asked over."""

    series: Sequence[Series]
    _selected: dict[tuple[Matcher, ...], list[Series]] = field(default_factory=dict)
    steps: dict[tuple[int, int], Vector] = field(default_factory=dict)
    """Answers of subqueries' expressions, by expression and time: windows overlap."""

    def select(self, matchers: tuple[Matcher, ...]) -> list[Series]:
        """Return the series that all matchers match."""
        found = self._selected.get(matchers)
        if found is None:
            found = [s for s in self.series if all(m.holds(s.labels) for m in matchers)]
            self._selected[matchers] = found
        return found


# --- labels -------------------------------------------------------------------------------------


@cache
def _only(labels: Labels, names: frozenset[str]) -> Labels:
    return tuple(pair for pair in labels if pair[0] in names)


@cache
def _without(labels: Labels, names: frozenset[str]) -> Labels:
    return tuple(pair for pair in labels if pair[0] not in names)


_NO_NAME = frozenset({NAME})


def _unique(pairs: Iterable[tuple[Labels, float]]) -> Vector:
    vector: Vector = {}
    for labels, value in pairs:
        if labels in vector:
            raise QueryError(f"two series have the same labels: {labels}")
        vector[labels] = value
    return vector


# --- expressions --------------------------------------------------------------------------------


class Expr(Protocol):
    """Something that can be evaluated at a time."""

    def vector(self, db: Database, t: int) -> Vector:
        """Return the instant vector at a time."""
        ...


@dataclass(frozen=True, slots=True)
class Number:
    """A literal."""

    value: float

    def vector(self, _db: Database, _t: int) -> Vector:
        """A number alone is no answer of a rule."""
        raise UnsupportedQueryError("a number where series are expected")


@dataclass(frozen=True, slots=True)
class Select:
    """An instant selector, or a range selector if `range_s` is set."""

    matchers: tuple[Matcher, ...]
    range_s: int = 0
    offset_s: int = 0

    def vector(self, db: Database, t: int) -> Vector:
        """Return the series that have a value now."""
        seen = ((s.labels, s.at(t - self.offset_s)) for s in db.select(self.matchers))
        return {labels: value for labels, value in seen if value is not None}

    def ranges(self, db: Database, t: int) -> dict[Labels, list[float]]:
        """Return the samples of the range."""
        end = t - self.offset_s
        start = end - self.range_s
        seen = ((s.labels, s.between(start, end)) for s in db.select(self.matchers))
        return {labels: values for labels, values in seen if values}


@dataclass(frozen=True, slots=True)
class Subquery:
    """An expression at every step of a range; steps are aligned to the clock, not to the query."""

    expr: Expr
    range_s: int
    step_s: int
    offset_s: int = 0

    def ranges(self, db: Database, t: int) -> dict[Labels, list[float]]:
        """Return the values of the range."""
        end = t - self.offset_s
        first = -(-(end - self.range_s) // self.step_s) * self.step_s
        found: dict[Labels, list[float]] = {}
        for at in range(first, end + 1, self.step_s):
            key = (id(self.expr), at)
            vector = db.steps.get(key)
            if vector is None:
                vector = db.steps[key] = self.expr.vector(db, at)
            for labels, value in vector.items():
                found.setdefault(labels, []).append(value)
        return found


_OVER_TIME: dict[str, Callable[[list[float]], float]] = {
    "avg_over_time": lambda values: sum(values) / len(values),
    "count_over_time": lambda values: float(len(values)),
    "last_over_time": lambda values: values[-1],
    "max_over_time": max,
    "min_over_time": min,
    "sum_over_time": math.fsum,
}


@dataclass(frozen=True, slots=True)
class OverTime:
    """A function over a range."""

    name: str
    argument: Select | Subquery

    def vector(self, db: Database, t: int) -> Vector:
        """Return one value for each series that has samples in the range."""
        function = _OVER_TIME[self.name]
        dropped = frozenset() if self.name == "last_over_time" else _NO_NAME
        found = self.argument.ranges(db, t).items()
        return _unique((_without(labels, dropped), function(values)) for labels, values in found)


_AGGREGATES: dict[str, Callable[[list[float]], float]] = {
    "avg": lambda values: sum(values) / len(values),
    "count": lambda values: float(len(values)),
    "max": max,
    "min": min,
    "sum": math.fsum,
}


@dataclass(frozen=True, slots=True)
class Aggregate:
    """An aggregation, `by` the names or `without` them (and the metric's name)."""

    name: str
    names: frozenset[str]
    is_by: bool
    expr: Expr

    def vector(self, db: Database, t: int) -> Vector:
        """Return one value for each group."""
        cut = _only if self.is_by else _without
        groups: dict[Labels, list[float]] = {}
        for labels, value in self.expr.vector(db, t).items():
            groups.setdefault(cut(labels, self.names), []).append(value)
        function = _AGGREGATES[self.name]
        return {labels: function(values) for labels, values in groups.items()}


@dataclass(frozen=True, slots=True)
class Matching:
    """Which labels of two sides must be equal."""

    names: frozenset[str] = frozenset()
    is_on: bool = False
    is_many: bool = False
    """`group_left`: several series on the left may meet one on the right."""

    def key(self, labels: Labels) -> Labels:
        """Return what is compared."""
        if self.is_on:
            return _only(labels, self.names)
        return _without(labels, self.names | _NO_NAME)

    def result(self, labels: Labels) -> Labels:
        """Return the labels of a comparison's result."""
        if self.is_many:
            return labels
        return _only(labels, self.names) if self.is_on else _without(labels, self.names)


_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}


@dataclass(frozen=True, slots=True)
class Compare:
    """A comparison that filters the left side."""

    op: str
    left: Expr
    right: Expr
    matching: Matching

    def vector(self, db: Database, t: int) -> Vector:
        """Return what of the left side holds."""
        holds = _COMPARE[self.op]
        left = self.left.vector(db, t)
        if isinstance(self.right, Number):
            bound = self.right.value
            return {labels: value for labels, value in left.items() if holds(value, bound)}
        if not left:
            return left
        matching = self.matching
        right = _unique((matching.key(k), v) for k, v in self.right.vector(db, t).items())
        if not matching.is_many:
            _unique((matching.key(k), v) for k, v in left.items() if matching.key(k) in right)
        return _unique(
            (matching.result(labels), value)
            for labels, value in left.items()
            if (other := right.get(matching.key(labels))) is not None and holds(value, other)
        )


@dataclass(frozen=True, slots=True)
class Combine:
    """`and`, `or`, `unless`."""

    op: str
    left: Expr
    right: Expr
    matching: Matching

    def vector(self, db: Database, t: int) -> Vector:
        """Return the left side, filtered or completed by the right."""
        left = self.left.vector(db, t)
        key = self.matching.key
        if self.op == "or":
            known = {key(labels) for labels in left}
            others = self.right.vector(db, t).items()
            return left | {labels: value for labels, value in others if key(labels) not in known}
        if not left:  # whatever is on the right
            return left
        keys = {key(labels) for labels in self.right.vector(db, t)}
        is_and = self.op == "and"
        return {labels: v for labels, v in left.items() if (key(labels) in keys) is is_and}


# --- parser -------------------------------------------------------------------------------------

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<text>"(?:[^"\\]|\\.)*")
  | (?P<duration>\d+[smhd])
  | (?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?)
  | (?P<name>[A-Za-z_][A-Za-z0-9_:]*)
  | (?P<op>=~|!~|==|!=|>=|<=|[-+*/%=<>(){}\[\],:])
    )""",
    re.VERBOSE,
)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LEVELS: tuple[frozenset[str], ...] = (
    frozenset({"or"}),
    frozenset({"and", "unless"}),
    frozenset(_COMPARE),
)


_SUBQUERIES: dict[Expr, Expr] = {}
"""Equal expressions are one object: their answers are kept once (`Database.steps`)."""


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[tuple[str, str]] = []
        at = 0
        while text[at:].strip():
            found = _TOKEN.match(text, at)
            if found is None:
                raise UnsupportedQueryError(f"at {text[at : at + 20]!r} in {text}")
            self._tokens.append((str(found.lastgroup), found[str(found.lastgroup)]))
            at = found.end()
        self._at = 0

    def parse(self) -> Expr:
        expr = self._binary(0)
        if self._kind():
            raise self._unsupported()
        return expr

    def _unsupported(self) -> UnsupportedQueryError:
        rest = " ".join(text for _, text in self._tokens[self._at :])
        return UnsupportedQueryError(f"at {rest[:40]!r} in {self._text}")

    def _kind(self) -> str:
        return self._tokens[self._at][0] if self._at < len(self._tokens) else ""

    def _peek(self) -> str:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else ""

    def _next(self, kind: str = "") -> str:
        if not self._kind() or (kind and self._kind() != kind):
            raise self._unsupported()
        self._at += 1
        return self._tokens[self._at - 1][1]

    def _take(self, text: str) -> bool:
        if self._peek() != text or self._kind() == "text":
            return False
        self._at += 1
        return True

    def _need(self, text: str) -> None:
        if not self._take(text):
            raise self._unsupported()

    def _binary(self, level: int) -> Expr:
        if level == len(_LEVELS):
            return self._postfix()
        left = self._binary(level + 1)
        while self._peek() in _LEVELS[level]:
            op = self._next()
            matching = self._matching()
            right = self._binary(level + 1)
            node = Compare if op in _COMPARE else Combine
            left = node(op, left, right, matching)
        return left

    def _matching(self) -> Matching:
        word = self._peek()
        if word not in ("on", "ignoring"):
            return Matching()
        self._next()
        names = self._names()
        is_many = self._take("group_left")
        if is_many and self._peek() == "(":
            self._need("(")
            self._need(")")  # labels of the right side are not copied here
        return Matching(names, word == "on", is_many)

    def _names(self) -> frozenset[str]:
        self._need("(")
        names = set()
        while not self._take(")"):
            names.add(self._next("name"))
            self._take(",")
        return frozenset(names)

    def _postfix(self) -> Expr:
        expr = self._primary()
        ranged: Select | Subquery | None = None
        if self._take("["):
            range_s = self._duration()
            if self._take(":"):
                same = _SUBQUERIES.setdefault(expr, expr)
                ranged = Subquery(same, range_s, self._duration())
            elif isinstance(expr, Select):
                ranged = Select(expr.matchers, range_s)
            else:
                raise self._unsupported()
            self._need("]")
        if self._take("offset"):
            offset_s = self._duration()
            if isinstance(ranged, Subquery):
                ranged = Subquery(ranged.expr, ranged.range_s, ranged.step_s, offset_s)
            elif isinstance(expr, Select):
                plain = ranged or expr
                moved = Select(plain.matchers, plain.range_s, offset_s)
                expr, ranged = moved, moved if ranged else None
            else:
                raise self._unsupported()
        # A range is no vector: only the function around it may take it.
        return expr if ranged is None else _Ranged(ranged)

    def _duration(self) -> int:
        text = self._next("duration")
        return int(text[:-1]) * _SECONDS[text[-1]]

    def _primary(self) -> Expr:
        if self._kind() == "number":
            return Number(float(self._next()))
        if self._take("("):
            expr = self._binary(0)
            self._need(")")
            return expr
        if self._peek() == "{":
            return Select(self._matchers())
        name = self._next("name")
        if name in _AGGREGATES:
            return self._aggregate(name)
        if name in _OVER_TIME:
            self._need("(")
            argument = self._postfix()
            self._need(")")
            if not isinstance(argument, _Ranged):
                raise self._unsupported()
            return OverTime(name, argument.argument)
        if self._peek() == "(":
            raise UnsupportedQueryError(f"function {name} in {self._text}")
        own = Matcher(NAME, "=", name)
        return Select((own, *(self._matchers() if self._peek() == "{" else ())))

    def _aggregate(self, name: str) -> Expr:
        is_by, names = True, frozenset[str]()
        if self._peek() in ("by", "without"):
            is_by = self._next() == "by"
            names = self._names()
        self._need("(")
        expr = self._binary(0)
        self._need(")")
        return Aggregate(name, names if is_by else names | _NO_NAME, is_by, expr)

    def _matchers(self) -> tuple[Matcher, ...]:
        self._need("{")
        found = []
        while not self._take("}"):
            label = self._next("name")
            op = self._next("op")
            if op not in ("=", "!=", "=~", "!~"):
                raise self._unsupported()
            text = re.sub(r"\\(.)", r"\1", self._next("text")[1:-1])
            found.append(Matcher(label, op, text))
            self._take(",")
        return tuple(found)


@dataclass(frozen=True, slots=True)
class _Ranged:
    argument: Select | Subquery

    def vector(self, _db: Database, _t: int) -> Vector:
        raise UnsupportedQueryError("a range where a function over time is missing")


@cache
def parse(text: str) -> Expr:
    """Return the expression of a query.

    Raises:
        UnsupportedQueryError: if the text uses more than is known here.
    """
    return _Parser(text).parse()
