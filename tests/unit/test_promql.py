"""The benchmarks' PromQL means what promtool says it means: both answer the rules' scenarios."""

import re

import pytest

from benchmarks.promql import (
    Database,
    QueryError,
    Run,
    Series,
    UnsupportedQueryError,
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

SECONDS = {"s": 1, "m": 60, "h": 3600}
SCENARIOS = [*load_scenarios(), *published_scrape()]


def seconds(text: str) -> int:
    return int(text[:-1]) * SECONDS[text[-1]]


def runs_of(values: str) -> tuple[Run, ...]:
    """Read promtool's notation: `1x3` are four samples, `_x3` three that are missing."""
    spans: list[tuple[int, int, float]] = []
    marks = set()
    at = 0
    for word in values.split():
        if word == "stale":
            marks.add(at)
            at += 1
            continue
        found = re.fullmatch(r"(_|[0-9.e+]+)(?:x(\d+))?", word)
        assert found is not None, word
        times = int(found[2] or 0)
        if found[1] == "_":
            at += times or 1
            continue
        spans.append((at, at + times, float(found[1])))
        at += times + 1
    return tuple(Run(first, last, value, last + 1 in marks) for first, last, value in spans)


def series_of(line: str) -> Series:
    parts = split_series(line)
    name, _, rest = parts["series"].partition("{")
    return Series(labels_of(name, pairs_of(rest)), runs_of(parts["values"]))


def pairs_of(text: str) -> dict[str, str]:
    return dict(re.findall(r'(\w+)="([^"]*)"', text))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.key)
def test_a_rule_answers_here_what_it_answers_before_promtool(scenario: Scenario) -> None:
    db = Database([series_of(line) for line in scenario.series])
    query = parse(render_query(scenario.rule, CATALOGUE.metric_names))
    shown = set(SHOWN.split(", "))

    for expected in scenario.expect:
        answer = query.vector(db, seconds(expected["at"]))
        seen = sorted([pair for pair in labels if pair[0] in shown] for labels in answer)
        wanted = sorted(sorted(pairs_of(text).items()) for text in expected["gpus"])
        assert seen == wanted, expected["at"]
    for window, most in scenario.totals.items():
        answers = [query.vector(db, t) for t in range(0, seconds(window) + 1, 60)]
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


def test_a_comparison_on_labels_keeps_these_labels_only() -> None:
    answer = parse('x{pod="a"} == on (node) up').vector(DB, 37)
    assert answer == {(("node", "n1"),): 1.0}


@pytest.mark.parametrize(
    "query",
    ["up == on (node) x", "x == on (node) up", 'max_over_time({__name__=~"x|up",pod!="b"}[1m])'],
)
def test_what_prometheus_refuses_is_an_error(query: str) -> None:
    db = Database(
        [UP, CLIMBING, OTHER, Series(labels_of("up", {"node": "n1", "pod": "a"}), UP.runs)]
    )
    with pytest.raises(QueryError):
        parse(query).vector(db, 97)


@pytest.mark.parametrize(
    "query", ["rate(x[5m])", "x[5m]", "x + 1", "1", "topk(1, x)", "x @ 5", "(up)[5m]", "max(x"]
)
def test_what_is_not_known_is_refused(query: str) -> None:
    with pytest.raises(UnsupportedQueryError):
        parse(query).vector(DB, 97)
