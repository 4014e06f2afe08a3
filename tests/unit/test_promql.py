"""The benchmarks' PromQL means what promtool says it means: both answer the rules' scenarios."""

import math
import re

import pytest

from benchmarks.promql import (
    NAME,
    SCRAPE_S,
    Database,
    QueryError,
    Run,
    Series,
    UnsupportedQueryError,
    Value,
    labels_of,
    parse,
)
from nodemend.domain.rules import render_presence, render_query
from tests.integration.rules.scenarios import (
    CATALOGUE,
    SHOWN,
    Scenario,
    load_scenarios,
    published_scrape,
    split_series,
)

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604_800}
SCENARIOS = [*load_scenarios(), *published_scrape()]


def as_parameters(scenarios: list[Scenario]) -> list[object]:
    """Leave out what reads recorded series: nothing is recorded here."""
    recorded = pytest.mark.skip(reason="needs recordings")
    return [
        pytest.param(one, id=one.key, marks=[recorded] if one.with_recordings else [])
        for one in scenarios
    ]


def seconds(text: str) -> int:
    return int(text[:-1]) * SECONDS[text[-1]]


def runs_of(values: str, every: int) -> tuple[Run, ...]:
    """Read promtool's notation: `1+2x3` are 1, 3, 5 and 7, `_x3` three that are missing.

    `every` tells how many scrapes lie between two of them.
    """
    spans: list[tuple[int, int, Value]] = []
    marks = set()
    at = 0
    for word in values.split():
        if word == "stale":
            marks.add(at)
            at += 1
            continue
        found = re.fullmatch(r"(_|-?[0-9.e+]*?[0-9.])([+-][0-9.e]+)?(?:x(\d+))?", word)
        assert found is not None, word
        times = int(found[3] or 0)
        if found[1] == "_":
            at += times or 1
            continue
        value = ramp(at * every, float(found[1]), float(found[2] or 0) / every)
        spans += [(n, n, value) for n in range(at, at + times + 1)] if every > 1 else []
        spans += [(at, at + times, value)] if every == 1 else []
        at += times + 1
    return tuple(
        Run(first * every, last * every, value, last + 1 in marks) for first, last, value in spans
    )


def ramp(first: int, start: float, step: float) -> Value:
    return (lambda number: start + step * (number - first)) if step else start


def series_of(line: str, every: int = 1) -> Series:
    parts = split_series(line)
    name, _, rest = parts["series"].partition("{")
    return Series(labels_of(name, pairs_of(rest)), runs_of(parts["values"], every))


def pairs_of(text: str) -> dict[str, str]:
    return dict(re.findall(r'(\w+)="([^"]*)"', text))


@pytest.mark.parametrize("scenario", as_parameters(SCENARIOS))
def test_a_rule_answers_here_what_it_answers_before_promtool(scenario: Scenario) -> None:
    interval_s = seconds(scenario.interval)
    every_s = max(60, interval_s)  # how often promtool evaluates the rule
    db = Database([series_of(line, interval_s // SCRAPE_S) for line in scenario.series])
    query = parse(render_query(scenario.rule, CATALOGUE.metric_names))
    shown = set(SHOWN.split(", "))

    for expected in scenario.expect:
        answer = query.vector(db, seconds(expected["at"]) // every_s * every_s)
        seen = sorted([pair for pair in labels if pair[0] in shown] for labels in answer)
        wanted = sorted(sorted(pairs_of(text).items()) for text in expected["gpus"])
        assert seen == wanted, expected["at"]
    for window, most in scenario.totals.items():
        answers = [query.vector(db, t) for t in range(0, seconds(window) + 1, every_s)]
        assert sum(len(answer) for answer in answers) <= most


@pytest.mark.parametrize("rule", CATALOGUE.rules, ids=lambda rule: rule.id)
def test_every_query_of_a_rule_is_understood(rule) -> None:
    names = CATALOGUE.metric_names
    parse(render_query(rule, names, matcher='cluster="a"'))
    parse(render_presence(rule, names, 'UUID="A"')) if rule.presence else None


UP = Series(labels_of("up", {"node": "n1"}), (Run(0, 10, 1.0),))
CLIMBING = Series(labels_of("x", {"node": "n1", "pod": "a"}), (Run(0, 10, float),), phase_s=7)
OTHER = Series(labels_of("x", {"node": "n1", "pod": "b"}), (Run(0, 3, 5.0, False),))
DB = Database([UP, CLIMBING, OTHER])


@pytest.mark.parametrize(
    ("query", "t", "values"),
    [
        ("x", 97, [3, 5]),
        ("x", 96, [2, 5]),
        ('x{pod!="b"}', 97, [3]),
        ('x{pod=~"a|c"}', 97, [3]),
        ('{__name__=~"x|y",pod!~"a"}', 97, [5]),
        ("x", 307, [5, 10]),  # no stale mark: the sample at 90 s counts until 390 s
        ("x", 337, [5]),
        ("x", 390, []),
        ("x offset 1m", 97, [1, 5]),
        ("max_over_time(x[30s])", 97, [3, 5]),
        ("count_over_time(x[2m] offset 1m)", 190, [4, 3]),
        ("last_over_time(x[5m])", 337, [10, 5]),
        ("max by (node) (x)", 97, [5]),
        ("sum without (pod) (x > 3)", 97, [5]),
        ("count(x)", 97, [2]),
        ("x > 2 < 4", 97, [3]),
        ("x and on (node) up", 97, [3, 5]),
        ("x unless on (node) up", 97, []),
        ("x unless on (node) up", 337, [5]),
        ('x{pod="a"} or x', 97, [3, 5]),
        ('x > on (node) group_left () max by (node) (x{pod="a"})', 97, [5]),
        ("max_over_time((max without (pod) (x))[90s:30s])", 97, [5]),
        ('min_over_time((x{pod="a"})[60s:30s] offset 30s)', 127, [1]),
    ],
)
def test_the_language_means_what_prometheus_means(query: str, t: int, values: list[float]) -> None:
    assert sorted(parse(query).vector(DB, t).values()) == sorted(values)


@pytest.mark.parametrize(
    ("query", "value"),
    [
        ("up + 1", 2),
        ("2 - up", 1),
        ("-up", -1),
        ("1 + 2 * 3 * up", 7),
        ("(1 + 2) * 3 * up", 9),
        ("10 - 3 - 2 * up", 5),
        ("2 ^ 3 ^ 2 * up", 512),
        ("-2 ^ 2 * up", -4),
        ("2 ^ -1 * up", 0.5),
        ("-7 % 4 * up", -3),
        ("up % 0", math.nan),
        ("up / 0", math.inf),
        ("-up / 0", -math.inf),
        ("0 * up / 0", math.nan),
        ("10 ^ 400 * up", math.inf),
        ("(-8 * up) ^ 0.5", math.nan),
        ("floor(-2.5 * up)", -3),
        ("ceil(2.1 * up)", 3),
        ("abs(-up)", 1),
        ("floor(up / 0)", math.inf),
        ("clamp_min(up, 4)", 4),
        ("clamp_max(up, 4)", 1),
        ("vector(5) + 1", 6),
        ("0 * up + time()", 97),
        ("2 > up", 1),
        ("up - up > 0 or up", 1),
        ("max(up / 0 or x - x)", math.inf),
        ("quantile(0.5, x)", 4),
        ("quantile by (node) (0.25, x)", 3.5),
        ("quantile(2, x)", math.inf),
        ("group(x)", 1),
        ("sum(x) by (node)", 8),
        ("timestamp(up)", 90),
        ('timestamp(x{pod="b"})', 90),
        ('timestamp(x{pod="a"} offset 30s)', 67),
        ("timestamp(up + 1)", 97),
        ('x{pod="a"} / on (node) up', 3),
        ('up / ignoring (pod) x{pod="b"}', 0.2),
    ],
)
def test_arithmetic_binds_and_computes_as_in_prometheus(query: str, value: float) -> None:
    (answer,) = parse(query).vector(DB, 97).values()
    assert answer == pytest.approx(value, nan_ok=True)


@pytest.mark.parametrize(("op", "count"), [("==", 0), ("!=", 1), (">", 0), ("<=", 0)])
def test_nan_is_equal_to_nothing(op: str, count: int) -> None:
    assert len(parse(f"0 * up / 0 {op} 1").vector(DB, 97)) == count
    assert len(parse(f"0 * up / 0 {op} 0 * up / 0").vector(DB, 97)) == count


def test_nan_is_passed_over_by_the_extremes_and_sorts_first() -> None:
    for first, second in (("a", "b"), ("b", "a")):
        some = f'(0 * x{{pod="{first}"}} / 0 or x{{pod="{second}"}})'
        (least,) = parse(f"min({some})").vector(DB, 97).values()
        (most,) = parse(f"max({some})").vector(DB, 97).values()
        assert least == most in (3, 5)
        (last,) = parse(f"quantile(1, {some})").vector(DB, 97).values()
        assert last == most


N1 = ("node", "n1")


@pytest.mark.parametrize(
    ("query", "labels"),
    [
        ("up", {(N1, (NAME, "up"))}),
        ("+up", {(N1, (NAME, "up"))}),
        ("up > 0", {(N1, (NAME, "up"))}),
        ("0 < up", {(N1, (NAME, "up"))}),
        ("up * 1", {(N1,)}),
        ("-up", {(N1,)}),
        ("abs(up)", {(N1,)}),
        ("timestamp(up)", {(N1,)}),
        ("x + on (node) group_left () up", {(N1, ("pod", "a")), (N1, ("pod", "b"))}),
        ("x - ignoring (pod) group_left up", {(N1, ("pod", "a")), (N1, ("pod", "b"))}),
        ("x - x", {(N1, ("pod", "a")), (N1, ("pod", "b"))}),
        ('up - ignoring (pod) x{pod="a"}', {(N1,)}),
        ("vector(1)", {()}),
        ("count(x) + on () vector(1)", {()}),
        ('label_replace(up, "of", "$1-${1}", "node", "n(.)")', {(N1, (NAME, "up"), ("of", "1-1"))}),
        ('label_replace(up, "of", "$1", "node", "1")', {(N1, (NAME, "up"))}),
        ('label_replace(up, "of", "2", "", "")', {(N1, (NAME, "up"), ("of", "2"))}),
        ('label_replace(up, "node", "$2", "node", "n1(x)?")', {((NAME, "up"),)}),
    ],
)
def test_what_is_computed_keeps_the_labels_that_prometheus_keeps(
    query: str, labels: set[tuple[tuple[str, str], ...]]
) -> None:
    assert set(parse(query).vector(DB, 97)) == {tuple(sorted(one)) for one in labels}


def test_a_comparison_on_labels_keeps_these_labels_only() -> None:
    answer = parse('x{pod="a"} == on (node) up').vector(DB, 37)
    assert answer == {(("node", "n1"),): 1.0}


@pytest.mark.parametrize(
    "query",
    [
        "up == on (node) x",
        "x == on (node) up",
        "x + on (node) up",
        "up * on (node) x",
        "x - on (node) group_left () x",
        '{__name__=~"x|up",pod!="b"} / 2',
        'label_replace(x, "pod", "c", "", "")',
        'max_over_time({__name__=~"x|up",pod!="b"}[1m])',
    ],
)
def test_what_prometheus_refuses_is_an_error(query: str) -> None:
    db = Database(
        [UP, CLIMBING, OTHER, Series(labels_of("up", {"node": "n1", "pod": "a"}), UP.runs)]
    )
    with pytest.raises(QueryError):
        parse(query).vector(db, 97)


@pytest.mark.parametrize(
    "query",
    [
        "rate(x[5m])",
        "x[5m]",
        "x[5m] + 1",
        "1",
        "1 + 1",
        "1 < 2",
        "x and 1",
        "x > bool 1",
        "x + on (node) 1",
        "x * on (node) group_left (pod) up",
        "x * on (node) group_right () up",
        "abs(1)",
        "clamp_min(x, up)",
        "quantile(x)",
        "label_replace(x, pod)",
        "topk(1, x)",
        "x @ 5",
        "(up)[5m]",
        "max(x",
    ],
)
def test_what_is_not_known_is_refused(query: str) -> None:
    with pytest.raises(UnsupportedQueryError):
        parse(query).vector(DB, 97)
