"""Rule health: which of our recording rules AMP evaluates, and which it does not."""

from dataclasses import replace
from datetime import timedelta

import pytest

from nodemend.domain.rule_health import RecordedRule, RuleGroup, problems_of
from tests.fakes.system import START

RULE = RecordedRule("nodemend:gpu_ecc_sbe:increase5m", evaluated_at=START - timedelta(seconds=40))
GROUP = RuleGroup("rules", "nodemend-increments", 30.0, 1.5, (RULE,))
NAME = "nodemend-increments/nodemend:gpu_ecc_sbe:increase5m"


def codes(*groups: RuleGroup) -> dict[str, str]:
    return {name: reason.code for name, reason in problems_of(groups, START).items()}


def test_where_no_rule_groups_are_deployed_there_is_nothing_to_tell():
    assert codes() == {}


def test_a_rule_that_is_evaluated_in_time_is_well():
    assert codes(GROUP) == {}


def test_a_rule_in_error_is_told_with_the_words_of_amp():
    error = "vector contains metrics with the same labelset after applying rule labels"
    failing = replace(RULE, health="err", last_error=error)

    (reason,) = problems_of([replace(GROUP, rules=(RULE, failing))], START).values()

    assert reason.code == "rule_failing"
    assert error in reason.text


def test_an_error_without_words_is_an_error():
    assert codes(replace(GROUP, rules=(replace(RULE, health="err"),))) == {NAME: "rule_failing"}


@pytest.mark.parametrize(("age_s", "is_stale"), [(149, False), (151, True)])
def test_a_rule_is_stale_after_three_intervals_and_a_minute(age_s: float, is_stale: bool):
    late = replace(RULE, evaluated_at=START - timedelta(seconds=age_s))

    assert codes(replace(GROUP, rules=(late,))) == ({NAME: "rule_stale"} if is_stale else {})


def test_a_rule_that_was_never_evaluated_is_stale():
    new = RecordedRule(RULE.name, health="unknown")

    assert codes(replace(GROUP, rules=(new,))) == {NAME: "rule_stale"}


def test_an_answer_that_does_not_say_when_is_believed():
    assert codes(replace(GROUP, rules=(RecordedRule(RULE.name),))) == {}


def test_a_group_that_takes_longer_than_its_interval_skips_evaluations():
    assert codes(replace(GROUP, evaluation_s=31.0)) == {"nodemend-increments": "rule_slow"}


@pytest.mark.parametrize(
    ("namespace", "group", "record", "ours"),
    [
        ("web", "web", "web:latency", False),
        ("nodemend-rules", "increments", "x", True),
        ("rules", "nodemend-jobs", "x", True),
        ("rules", "jobs", "nodemend:job:util", True),
        ("rules", "jobs", "gpu:by:job", True),
    ],
)
def test_other_peoples_rules_are_not_ours_to_tell(namespace, group, record, ours):
    failing = RecordedRule(record, health="err")
    groups = [RuleGroup(namespace, group, 30.0, 90.0, (failing,))]

    found = problems_of(groups, START, records={"gpu:by:job"})

    assert bool(found) is ours
    assert len(found) == (2 if ours else 0)
