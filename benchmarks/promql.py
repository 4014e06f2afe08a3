"""As much of PromQL as the catalogue's rules use, over series that are simulated.

So that `bench-quiet` asks the product's own query texts, and not a model of them: a rule that is
loosened is seen. What is not understood is refused, never guessed. The meaning is held to the
scenarios of `tests/data/rules`, which promtool runs too (`tests/unit/test_promql.py`).

Followed are Prometheus 2's rules for staleness (a sample counts for five minutes, a stale mark ends
it at once, ranges skip the marks), precedence (`^` to the right and before a sign), label matching
(`on`, `ignoring`, `group_left`), metric names (dropped by arithmetic, functions and aggregations,
kept by filters, `label_replace` and `last_over_time`), floats (a division by zero is no error, NaN
is equal to nothing), and duplicates, which are errors. Samples lie 30 s apart.
"""

import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
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
        found = self._last(t)
        return None if found is None else found[0].at(found[1])

    def timestamp(self, t: int) -> float | None:
        """Return when the sample was taken that an instant selector sees at a time, or None."""
        found = self._last(t)
        return None if found is None else float(self._time(found[1]))

    def _last(self, t: int) -> tuple[Run, int] | None:
        number = (t - self.phase_s) // SCRAPE_S
        for run in reversed(self.runs):
            if run.first > number:
                continue
            if number <= run.last:
                return run, number
            if run.is_marked or t - self._time(run.last) >= LOOKBACK_S:
                return None
            return run, run.last
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


class Scalar:
    """A number without labels, which may depend on the time."""

    __slots__ = ()

    def number(self, t: int) -> float:
        """Return the number at a time."""
        raise NotImplementedError

    def vector(self, _db: Database, _t: int) -> Vector:
        """A number alone is no answer of a rule."""
        raise UnsupportedQueryError("a number where series are expected")


@dataclass(frozen=True, slots=True)
class Number(Scalar):
    """A literal."""

    value: float

    def number(self, _t: int) -> float:
        """Return the literal."""
        return self.value


@dataclass(frozen=True, slots=True)
class Time(Scalar):
    """`time()`."""

    def number(self, t: int) -> float:
        """Return the time that is asked for, not the clock's."""
        return float(t)


@dataclass(frozen=True, slots=True)
class Computed(Scalar):
    """Arithmetic between two numbers."""

    op: str
    left: Scalar
    right: Scalar

    def number(self, t: int) -> float:
        """Return the result."""
        return _ARITHMETIC[self.op](self.left.number(t), self.right.number(t))


def _divide(left: float, right: float) -> float:
    if right:
        return left / right
    if left == 0 or math.isnan(left):
        return math.nan
    return math.copysign(math.inf, left) * math.copysign(1, right)


def _modulo(left: float, right: float) -> float:
    """The sign is the left side's, as in C and unlike in Python."""
    if right == 0 or math.isinf(left):
        return math.nan
    return math.fmod(left, right)


def _power(left: float, right: float) -> float:
    try:
        return math.pow(left, right)
    except OverflowError:
        return -math.inf if left < 0 and right % 2 == 1 else math.inf
    except ValueError:  # a root of a negative number, or zero to a negative power
        return math.nan if left else _divide(1, left if right % 2 == 1 else 0.0)


_ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _divide,
    "%": _modulo,
    "^": _power,
}


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


def _max(values: list[float]) -> float:
    """Return the largest that is a number; NaN only if none is."""
    found = max(values)  # passes over every NaN but a first one
    if not math.isnan(found):
        return found
    return max((value for value in values if not math.isnan(value)), default=found)


def _min(values: list[float]) -> float:
    """Return the smallest that is a number; NaN only if none is."""
    found = min(values)
    if not math.isnan(found):
        return found
    return min((value for value in values if not math.isnan(value)), default=found)


def _average(values: list[float]) -> float:
    return sum(values) / len(values)


def _quantile(q: float, values: list[float]) -> float:
    """Return what lies between the two nearest ranks; NaN sorts before all numbers."""
    if math.isnan(q):
        return math.nan
    if not 0 <= q <= 1:
        return math.copysign(math.inf, q)
    ordered = sorted(values, key=lambda v: -math.inf if math.isnan(v) else v)
    weight, rank = math.modf(q * (len(ordered) - 1))
    low, high = int(rank), min(int(rank) + 1, len(ordered) - 1)
    return ordered[low] * (1 - weight) + ordered[high] * weight


_OVER_TIME: dict[str, Callable[[list[float]], float]] = {
    "avg_over_time": _average,
    "count_over_time": lambda values: float(len(values)),
    "last_over_time": lambda values: values[-1],
    "max_over_time": _max,
    "min_over_time": _min,
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


@dataclass(frozen=True, slots=True)
class OfEach:
    """A function of each value; further arguments are numbers."""

    name: str
    expr: Expr
    arguments: tuple[Scalar, ...] = ()

    def vector(self, db: Database, t: int) -> Vector:
        """Return the results."""
        function = _OF_EACH[self.name]
        numbers = [one.number(t) for one in self.arguments]
        return _unique(
            (_without(labels, _NO_NAME), function(value, *numbers))
            for labels, value in self.expr.vector(db, t).items()
        )


def _integer(function: Callable[[float], int]) -> Callable[[float], float]:
    return lambda value: float(function(value)) if math.isfinite(value) else value


_OF_EACH: dict[str, Callable[..., float]] = {
    "abs": abs,
    "ceil": _integer(math.ceil),
    "clamp_max": lambda value, most: math.nan if math.isnan(most) else _min([most, value]),
    "clamp_min": lambda value, least: math.nan if math.isnan(least) else _max([least, value]),
    "floor": _integer(math.floor),
}
_NUMBERS = {"clamp_max": 1, "clamp_min": 1}
"""How many numbers a function of `_OF_EACH` takes besides the vector."""


@dataclass(frozen=True, slots=True)
class Timestamp:
    """`timestamp`: when the samples of a selector were taken."""

    expr: Expr

    def vector(self, db: Database, t: int) -> Vector:
        """Return the times; what is computed is computed now."""
        if not isinstance(self.expr, Select):
            found = [(labels, float(t)) for labels in self.expr.vector(db, t)]
        else:
            at = t - self.expr.offset_s
            seen = ((s.labels, s.timestamp(at)) for s in db.select(self.expr.matchers))
            found = [(labels, taken) for labels, taken in seen if taken is not None]
        return _unique((_without(labels, _NO_NAME), taken) for labels, taken in found)


@dataclass(frozen=True, slots=True)
class AsVector:
    """`vector`: a number as a series without labels."""

    scalar: Scalar

    def vector(self, _db: Database, t: int) -> Vector:
        """Return the one series."""
        return {(): self.scalar.number(t)}


@dataclass(frozen=True, slots=True)
class LabelReplace:
    """`label_replace`: a label is set where another one's whole value matches."""

    expr: Expr
    label: str
    replacement: str
    source: str
    pattern: str

    def vector(self, db: Database, t: int) -> Vector:
        """Return the series, some of them under other labels."""
        arguments = self.label, self.replacement, self.source, self.pattern
        found = self.expr.vector(db, t).items()
        return _unique((_replaced(labels, *arguments), value) for labels, value in found)


@cache
def _replaced(labels: Labels, label: str, replacement: str, source: str, pattern: str) -> Labels:
    pairs = dict(labels)
    found = re.fullmatch(pattern, pairs.get(source, ""))
    if found is None:
        return labels
    # A group that took no part in the match is empty; so is one that does not exist.
    groups = {str(n): text or "" for n, text in enumerate((found[0], *found.groups()))}
    pairs[label] = re.sub(
        r"\$(?:(\d+)|\{(\d+)\})", lambda one: groups.get(one[1] or one[2], ""), replacement
    )
    return tuple(sorted((k, v) for k, v in pairs.items() if v))


_AGGREGATES: dict[str, Callable[[list[float]], float]] = {
    "avg": _average,
    "count": lambda values: float(len(values)),
    "group": lambda _values: 1.0,
    "max": _max,
    "min": _min,
    "sum": math.fsum,
}


@dataclass(frozen=True, slots=True)
class Aggregate:
    """An aggregation, `by` the names or `without` them (and the metric's name)."""

    name: str
    names: frozenset[str]
    is_by: bool
    expr: Expr
    quantile: Scalar | None = None
    """Set for `quantile`, and for it alone."""

    def vector(self, db: Database, t: int) -> Vector:
        """Return one value for each group."""
        cut = _only if self.is_by else _without
        groups: dict[Labels, list[float]] = {}
        for labels, value in self.expr.vector(db, t).items():
            groups.setdefault(cut(labels, self.names), []).append(value)
        if self.quantile is not None:
            q = self.quantile.number(t)
            return {labels: _quantile(q, values) for labels, values in groups.items()}
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
        """Return the labels of the result; arithmetic drops the name besides."""
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


def _pairs(
    left: Vector, right: Vector, matching: Matching
) -> Iterator[tuple[Labels, float, float]]:
    """Yield the labels of the result and the two values of what meets.

    Stricter than Prometheus in one point: several series on the left that meet one on the right
    are an error even if a comparison would have dropped them. The rule waits for its first error.
    """
    key = matching.key
    ones = _unique((key(labels), value) for labels, value in right.items())
    if not matching.is_many:
        _unique((key(labels), value) for labels, value in left.items() if key(labels) in ones)
    for labels, value in left.items():
        other = ones.get(key(labels))
        if other is not None:
            yield matching.result(labels), value, other


@dataclass(frozen=True, slots=True)
class Operation:
    """A binary operation of which at least one side has labels."""

    op: str
    left: Expr
    right: Expr
    matching: Matching

    def _met(self, db: Database, t: int) -> Iterator[tuple[Labels, float, float]]:
        """Yield the labels of the result, and the left and the right value."""
        if isinstance(self.left, Scalar):
            number = self.left.number(t)
            for labels, value in self.right.vector(db, t).items():
                yield labels, number, value
            return
        left = self.left.vector(db, t)
        if isinstance(self.right, Scalar):
            number = self.right.number(t)
            for labels, value in left.items():
                yield labels, value, number
        elif left:  # whatever is on the right
            yield from _pairs(left, self.right.vector(db, t), self.matching)


@dataclass(frozen=True, slots=True)
class Compare(Operation):
    """A comparison that filters the left side, or the side that is no number."""

    def vector(self, db: Database, t: int) -> Vector:
        """Return what holds, with its value."""
        holds = _COMPARE[self.op]
        is_right = isinstance(self.left, Scalar)
        return _unique(
            (labels, right if is_right else left)
            for labels, left, right in self._met(db, t)
            if holds(left, right)
        )


@dataclass(frozen=True, slots=True)
class Arithmetic(Operation):
    """Arithmetic between series, or a series and a number."""

    def vector(self, db: Database, t: int) -> Vector:
        """Return the results; the name goes, for it is another quantity."""
        function = _ARITHMETIC[self.op]
        return _unique(
            (_without(labels, _NO_NAME), function(left, right))
            for labels, left, right in self._met(db, t)
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
  | (?P<duration>\d+[smhdw])
  | (?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?)
  | (?P<name>[A-Za-z_][A-Za-z0-9_:]*)
  | (?P<op>=~|!~|==|!=|>=|<=|[-+*/%^=<>(){}\[\],:])
    )""",
    re.VERBOSE,
)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604_800}
_LEVELS: tuple[frozenset[str], ...] = (
    frozenset({"or"}),
    frozenset({"and", "unless"}),
    frozenset(_COMPARE),
    frozenset({"+", "-"}),
    frozenset({"*", "/", "%"}),
)
"""Binary operators from the loosest to the tightest; `^` is tighter yet, and goes to the right."""


_SUBQUERIES: dict[Expr, Expr] = {}
"""Equal expressions are one object: their answers are kept once (`Database.steps`)."""


def _unquoted(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text[1:-1])


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
            return self._unary()
        left = self._binary(level + 1)
        while self._kind() != "text" and self._peek() in _LEVELS[level]:
            op = self._next()
            matching = self._matching()
            left = self._operation(op, left, self._binary(level + 1), matching)
        return left

    def _unary(self) -> Expr:
        """Read a sign; `-2 ^ 2` is -4, for the power is the tighter one."""
        if self._take("+"):
            return self._unary()
        if self._take("-"):
            return self._operation("*", Number(-1.0), self._unary(), Matching())
        base = self._postfix()
        if not self._take("^"):
            return base
        matching = self._matching()
        return self._operation("^", base, self._unary(), matching)

    def _operation(self, op: str, left: Expr, right: Expr, matching: Matching) -> Expr:
        scalars = isinstance(left, Scalar), isinstance(right, Scalar)
        if any(scalars) and matching != Matching():
            raise UnsupportedQueryError(f"matching with a number in {self._text}")
        if op in _ARITHMETIC:
            if isinstance(left, Scalar) and isinstance(right, Scalar):
                return Computed(op, left, right)
            return Arithmetic(op, left, right, matching)
        if op in _COMPARE:
            if all(scalars):
                raise UnsupportedQueryError(f"a comparison of two numbers in {self._text}")
            return Compare(op, left, right, matching)
        if any(scalars):
            raise UnsupportedQueryError(f"{op} with a number in {self._text}")
        return Combine(op, left, right, matching)

    def _matching(self) -> Matching:
        word = self._peek()
        if word == "bool":
            raise self._unsupported()
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
        if name in _AGGREGATES or name == "quantile":
            return self._aggregate(name)
        if self._peek() == "(":
            return self._call(name)
        own = Matcher(NAME, "=", name)
        return Select((own, *(self._matchers() if self._peek() == "{" else ())))

    def _call(self, name: str) -> Expr:
        self._need("(")
        expr: Expr
        if name in _OVER_TIME:
            argument = self._postfix()
            if not isinstance(argument, _Ranged):
                raise self._unsupported()
            expr = OverTime(name, argument.argument)
        elif name in _OF_EACH:
            vector = self._vector()
            numbers = []
            for _ in range(_NUMBERS.get(name, 0)):
                self._need(",")
                numbers.append(self._scalar())
            expr = OfEach(name, vector, tuple(numbers))
        elif name == "timestamp":
            expr = Timestamp(self._vector())
        elif name == "time":
            expr = Time()
        elif name == "vector":
            expr = AsVector(self._scalar())
        elif name == "label_replace":
            expr = self._label_replace()
        else:
            raise UnsupportedQueryError(f"function {name} in {self._text}")
        self._need(")")
        return expr

    def _label_replace(self) -> Expr:
        vector = self._vector()
        texts = []
        for _ in range(4):
            self._need(",")
            texts.append(_unquoted(self._next("text")))
        return LabelReplace(vector, *texts)

    def _vector(self) -> Expr:
        expr = self._binary(0)
        if isinstance(expr, Scalar):
            raise self._unsupported()
        return expr

    def _scalar(self) -> Scalar:
        expr = self._binary(0)
        if not isinstance(expr, Scalar):
            raise self._unsupported()
        return expr

    def _aggregate(self, name: str) -> Expr:
        grouping = self._grouping()
        self._need("(")
        quantile = None
        if name == "quantile":
            quantile = self._scalar()
            self._need(",")
        expr = self._vector()
        self._need(")")
        is_by, names = grouping or self._grouping() or (True, frozenset[str]())
        return Aggregate(name, names if is_by else names | _NO_NAME, is_by, expr, quantile)

    def _grouping(self) -> tuple[bool, frozenset[str]] | None:
        """Read `by` or `without`, which may stand before the parenthesis or after it."""
        if self._peek() not in ("by", "without"):
            return None
        return self._next() == "by", self._names()

    def _matchers(self) -> tuple[Matcher, ...]:
        self._need("{")
        found = []
        while not self._take("}"):
            label = self._next("name")
            op = self._next("op")
            if op not in ("=", "!=", "=~", "!~"):
                raise self._unsupported()
            found.append(Matcher(label, op, _unquoted(self._next("text"))))
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
