"""Sight: what the rules cannot see is told, once per change, and never from a single look."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from nodemend.application.ports import QueryResult, RuleGroupsResult
from nodemend.application.sight import confirm
from nodemend.contracts.events import ScanBlind
from nodemend.domain.coverage import read_coverage
from nodemend.domain.faults import Family
from nodemend.domain.findings import Sample
from nodemend.domain.policy import ClusterPolicy, RulePolicy
from nodemend.domain.reasons import Reason
from nodemend.domain.rule_health import RecordedRule, RuleGroup
from tests.fakes.system import START
from tests.unit.application import run
from tests.unit.application.stage import (
    CLUSTER,
    CLUSTER_POLICY,
    Stage,
    after_every_crash,
    catalogue,
    enforce,
    node_name,
)

FIVE_MINUTES = 300


def exports(stage: Stage, *, gpus: int = 16, **counts: int) -> None:
    """Let all GPUs have every metric, but for those whose count is given."""
    needed = read_coverage(catalogue().rules, catalogue().metric_names, []).metrics
    metrics = {one.metric: counts.get(one.metric, gpus) for one in needed}

    def answer(at: datetime) -> QueryResult:
        rows = [Sample({"metric": m}, float(n), at) for m, n in metrics.items() if n]
        return QueryResult(tuple(rows), samples_processed=640)

    stage.metrics.answer("coverage", answer)


def look(stage: Stage, times: int = 1) -> None:
    for _ in range(times):
        run.scan(stage, Family.UTILIZATION)
        stage.clock.advance(FIVE_MINUTES)


def told(stage: Stage, cause: str = "coverage") -> list[Any]:
    return [event for event in stage.events("Scan Blind") if event["cause"] == cause]


def rules_of(event: Mapping[str, Any]) -> dict[str, str]:
    return {rule["rule_id"]: rule["reason"]["code"] for rule in event["rules"]}


def gauge(stage: Stage, name: str) -> list[float]:
    return stage.telemetry.gauges.get((name, (("cluster", CLUSTER),)), [])


def failing(name: str = "nodemend:a:b") -> RuleGroupsResult:
    rule = RecordedRule(name, "err", "vector contains metrics with the same labelset", START)
    return RuleGroupsResult((RuleGroup("rules", "nodemend-a", 30.0, 1.0, (rule,)),))


# --- coverage -------------------------------------------------------------------------------------


def test_a_cluster_that_exports_everything_has_nothing_to_tell() -> None:
    stage = Stage()
    exports(stage)

    look(stage, 3)

    assert stage.events("Scan Blind") == []
    assert gauge(stage, "RulesBlind") == [0]
    assert gauge(stage, "RuleGroupProblems") == [0, 0, 0]


def test_what_is_exported_is_counted_each_hour_and_each_time_while_something_is_missing() -> None:
    stage = Stage()
    exports(stage)
    look(stage, 25)
    assert len(gauge(stage, "RulesBlind")) == 3, "at 0, 60 and 120 minutes"

    exports(stage, ecc_dbe_volatile=0)
    look(stage, 12)
    assert gauge(stage, "RulesBlind")[3:] == [1]
    look(stage, 3)
    assert gauge(stage, "RulesBlind")[3:] == [1] * 4

    exports(stage)
    look(stage, 12)
    assert gauge(stage, "RulesBlind")[7:] == [0]


def test_what_the_hardware_does_not_have_is_told_and_counted_each_hour_only() -> None:
    stage = Stage()
    exports(stage, row_remap_failure=15)

    look(stage, 24)

    assert len(told(stage)) == 1
    assert gauge(stage, "RulesBlind") == [0, 0, 0], "at 0, 5 (to be sure) and 65 minutes"


def test_a_standing_problem_is_told_again_after_two_days() -> None:
    stage = Stage()
    exports(stage, ecc_dbe_volatile=0)
    look(stage, 2)
    stage.clock.at += timedelta(days=2)
    look(stage, 2)

    assert len(told(stage)) == 2


def test_a_missing_metric_is_told_by_the_second_look_and_then_no_more() -> None:
    stage = Stage()
    exports(stage, ecc_dbe_volatile=0)

    counts = []
    for _ in range(5):
        look(stage)
        counts.append(len(told(stage)))

    assert counts == [0, 1, 1, 1, 1]
    (event,) = told(stage)
    assert rules_of(event) == {"ecc-dbe-volatile": "not_exported"}
    (rule,) = event["rules"]
    assert rule["metrics"][0]["seen"] == 0
    assert rule["metrics"][0]["total"] == 16
    assert "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL" in rule["metrics"][0]["names"]
    assert gauge(stage, "RulesBlind") == [1] * 5
    assert ScanBlind.model_validate(event).family == ""


def test_a_node_that_comes_and_goes_within_one_look_is_not_told() -> None:
    stage = Stage()
    exports(stage, ecc_dbe_volatile=15)
    look(stage)
    exports(stage)
    look(stage, 12)
    exports(stage, ecc_dbe_volatile=15)
    look(stage)

    assert told(stage) == []
    assert gauge(stage, "RulesBlind") == [1, 0, 1]


def test_half_of_the_fleet_is_told_with_some_of_its_nodes() -> None:
    stage = Stage()
    exports(stage, ecc_dbe_volatile=8)
    lacking = tuple(Sample({"node": node_name(n)}, 8.0, START) for n in (3, 4))
    stage.metrics.answer("lacking", QueryResult(lacking))

    look(stage, 3)

    (event,) = told(stage)
    assert rules_of(event) == {"ecc-dbe-volatile": "exported_in_part"}
    assert event["rules"][0]["nodes"] == [node_name(3), node_name(4)]
    asked = [asked.key for asked in stage.metrics.asked]
    assert (asked.count("coverage"), asked.count("lacking")) == (3, 1), "nodes are for news only"


def test_mended_and_broken_again_is_news_again() -> None:
    stage = Stage()
    exports(stage, ecc_dbe_volatile=0)
    look(stage, 2)
    exports(stage)
    look(stage, 12)
    exports(stage, ecc_dbe_volatile=0)
    look(stage, 2)

    assert len(told(stage)) == 2


def test_another_blind_rule_is_news_and_tells_them_all() -> None:
    stage = Stage()
    exports(stage, ecc_dbe_volatile=0)
    look(stage, 2)
    exports(stage, ecc_dbe_volatile=0, xid_count=4)
    look(stage, 2)

    assert [rules_of(event) for event in told(stage)] == [
        {"ecc-dbe-volatile": "not_exported"},
        {"ecc-dbe-volatile": "not_exported", "xid-count": "exported_in_part"},
    ]


def test_a_rule_that_the_policy_switches_off_is_missed_by_nobody() -> None:
    stage = Stage(policy=enforce(rules={"ecc-dbe-volatile": RulePolicy(is_enabled=False)}))
    exports(stage, ecc_dbe_volatile=0)

    look(stage, 3)

    assert told(stage) == []
    assert gauge(stage, "RulesBlind") == [0]


def test_what_cannot_be_asked_is_neither_sight_nor_blindness() -> None:
    stage = Stage()
    exports(stage, ecc_dbe_volatile=0)
    look(stage, 2)
    stage.metrics.fail("amp_timeout", matches="coverage")
    look(stage, 2)
    exports(stage, ecc_dbe_volatile=0)
    look(stage, 2)

    assert len(told(stage)) == 1, "the time-out in between has made nothing unknown known"
    assert gauge(stage, "RulesBlind") == [1] * 4, "no value is better than a wrong one"


def test_where_amp_has_used_up_the_time_of_the_scan_nothing_more_is_asked() -> None:
    stage = Stage()
    exports(stage, ecc_dbe_volatile=0)
    stage.metrics.fail("amp_timeout", matches="allocated-idle")

    look(stage, 2)

    assert told(stage) == []
    assert "coverage" not in {asked.key for asked in stage.metrics.asked}


def test_a_rule_that_cannot_be_judged_for_another_reason_does_not_keep_the_look_back() -> None:
    stage = Stage()
    exports(stage, ecc_dbe_volatile=0)
    stage.metrics.fail("amp_query_rejected", matches="allocated-idle")

    look(stage, 2)

    assert len(told(stage)) == 1


def test_every_cluster_has_its_own_sight() -> None:
    other = ClusterPolicy("other", "ws-2", "us-east-1")
    stage = Stage(policy=enforce(clusters=(CLUSTER_POLICY, other)))
    exports(stage, ecc_dbe_volatile=0)

    look(stage, 3)

    assert sorted(event["cluster"] for event in told(stage)) == [CLUSTER, "other"]


def test_a_look_survives_a_crash_at_every_call_with_one_event_id() -> None:
    def build() -> tuple[Stage, Callable[[], Any]]:
        stage = Stage()
        exports(stage, ecc_dbe_volatile=8)
        run.scan(stage, Family.UTILIZATION)
        stage.clock.advance(FIVE_MINUTES)
        return stage, lambda: run.scan(stage, Family.UTILIZATION)

    def check(stage: Stage, _: Any) -> None:
        assert len({event["event_id"] for event in told(stage)}) == 1

    assert after_every_crash(build, check) > 3


def test_only_the_utilization_scan_asks() -> None:
    stage = Stage()
    run.scan(stage, Family.ECC)
    run.scan(stage, Family.THERMAL)

    assert "coverage" not in {asked.key for asked in stage.metrics.asked}


def test_an_event_that_was_not_accepted_is_sent_by_the_next_look() -> None:
    stage = Stage()
    exports(stage, ecc_dbe_volatile=0)
    look(stage)
    original = stage.bus.announce
    stage.bus.announce = lambda them: [one.event_id for one in them]  # type: ignore[method-assign]
    look(stage)
    stage.bus.announce = original  # type: ignore[method-assign]
    assert told(stage) == []

    look(stage)

    assert len(told(stage)) == 1


def test_samples_of_the_look_are_measured() -> None:
    stage = Stage()
    exports(stage)
    look(stage)

    assert sum(gauge(stage, "SamplesProcessed")) == 640


# --- rule groups ----------------------------------------------------------------------------------


def test_a_recording_rule_in_error_is_told_once_with_the_words_of_amp() -> None:
    stage = Stage()
    exports(stage)
    stage.metrics.groups = failing()

    look(stage, 4)

    (event,) = told(stage, "rule_groups")
    assert rules_of(event) == {"nodemend-a/nodemend:a:b": "rule_failing"}
    assert "same labelset" in event["rules"][0]["reason"]["text"]
    assert gauge(stage, "RuleGroupProblems") == [1] * 4


def test_a_rule_that_is_stale_at_one_look_is_not_told() -> None:
    stage = Stage()
    exports(stage)
    late = RecordedRule("nodemend:a:b", "ok", "", START - timedelta(hours=1))
    stage.metrics.groups = RuleGroupsResult((RuleGroup("rules", "nodemend-a", 30.0, 1.0, (late,)),))
    look(stage)
    stage.metrics.groups = RuleGroupsResult(
        (RuleGroup("rules", "a", 30.0, 1.0, (replace(late, evaluated_at=stage.clock.at),)),)
    )
    look(stage)

    assert told(stage, "rule_groups") == []


def test_names_of_groups_with_blanks_and_question_marks_are_told_once() -> None:
    stage = Stage()
    exports(stage)
    (group,) = failing().groups
    stage.metrics.groups = RuleGroupsResult((replace(group, name="nodemend ?a b"),))

    look(stage, 4)

    (event,) = told(stage, "rule_groups")
    assert list(rules_of(event)) == ["nodemend ?a b/nodemend:a:b"]


@pytest.mark.parametrize(
    ("code", "events", "measured"),
    [("amp_forbidden", 1, [1, 1, 1]), ("amp_throttled", 0, []), ("amp_unavailable", 0, [])],
)
def test_only_a_missing_permission_is_told_of_rule_groups_that_cannot_be_read(
    code: str, events: int, measured: list[float]
) -> None:
    stage = Stage()
    exports(stage)
    stage.metrics.groups = RuleGroupsResult(problem=Reason(code, "allow aps:ListRules"))

    look(stage, 3)

    assert len(told(stage, "rule_groups")) == events
    assert gauge(stage, "RuleGroupProblems") == measured


# --- what is remembered ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "found", "after", "is_news"),
    [
        ("", (), "", False),
        ("", ("a",), "?a", False),
        ("?a", ("a",), "a", True),
        ("?a", (), "", False),
        ("a", ("a",), "a", False),
        ("a", ("a", "b"), "?b a", False),
        ("?b a", ("a", "b"), "a b", True),
        ("a b", ("a",), "a", True),
        ("a", (), "", False),
        ("a", ("b",), "?b", False),
    ],
)
def test_two_looks_in_a_row_make_news(
    before: str, found: tuple[str, ...], after: str, is_news: bool
) -> None:
    assert confirm(before, dict.fromkeys(found)) == (after, is_news)
