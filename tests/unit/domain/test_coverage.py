"""Coverage: who is blind, for what, and whether somebody has to be called for it."""

from collections.abc import Mapping

import pytest

from nodemend.domain.coverage import Coverage, coverage_query, lacking_query, read_coverage
from nodemend.domain.faults import Family, FaultClass, FaultKind, Verdict
from nodemend.domain.findings import Sample
from nodemend.domain.rules import Rule
from tests.fakes.system import START

NAMES: Mapping[str, tuple[str, ...]] = {
    "temp": ("DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_GPU_TEMP_CELSIUS"),
    "dbe": ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL",),
    "slowdown": ("DCGM_FI_DEV_SLOWDOWN_TEMP",),
    "remap": ("DCGM_FI_DEV_ROW_REMAP_FAILURE",),
    "nvlink": ("DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL",),
    "neuron": ("hardware_ecc_events_total",),
    "allocatable": ("kube_node_status_allocatable",),
}


def rule(rule_id: str, *metrics: str, promql: str = "") -> Rule:
    return Rule(
        id=rule_id,
        family=Family.ECC,
        fault_class=FaultClass.GPU_LOST,
        verdict=Verdict.FATAL,
        kind=FaultKind.LEVEL,
        promql=promql or " + ".join(f"[[{metric}]]" for metric in metrics),
        thresholds={},
        summary="",
        why="",
        source="",
        metrics=metrics,
    )


HOT = rule("hot", "temp", promql="[[temp]] > [[slowdown|UUID!='']]")
DBE = rule("dbe", "dbe")
REMAP = rule("remap", "remap")
LINK = rule("link", "nvlink")
NEURON = rule("neuron", "neuron")
COUNT = rule("count", "temp", "allocatable")
TREND = rule("trend", "nodemend:sbe:day")


def seen(*rules: Rule, **counts: int) -> Coverage:
    samples = [Sample({"metric": m.replace("_", "-")}, float(n), START) for m, n in counts.items()]
    return read_coverage(rules, NAMES, samples)


def codes(coverage: Coverage) -> dict[str, str]:
    return {one.rule_id: one.reason.code for one in coverage.blind}


def test_with_every_metric_on_every_gpu_nobody_is_blind():
    coverage = seen(HOT, DBE, REMAP, temp=16, slowdown=16, dbe=16, remap=16)

    assert codes(coverage) == {}
    assert all(metric.is_whole for metric in coverage.metrics)


def test_what_nobody_exports_blinds_its_rule_and_says_what_to_add():
    coverage = seen(HOT, DBE, temp=16, slowdown=16)

    assert codes(coverage) == {"dbe": "not_exported"}
    (blind,) = coverage.unexpected
    assert "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL" in blind.reason.text
    assert "counters.csv" in blind.reason.text


def test_half_of_the_fleet_with_an_older_counters_file_is_told():
    coverage = seen(HOT, DBE, temp=16, slowdown=16, dbe=8)

    assert codes(coverage) == {"dbe": "exported_in_part"}
    assert "8 of 16 GPUs have DCGM_FI_DEV_ECC_DBE_VOL_TOTAL" in coverage.blind[0].reason.text
    assert coverage.unexpected


def test_a_metric_that_a_rule_can_do_without_blinds_nobody_and_is_in_the_table():
    coverage = seen(HOT, temp=16)

    assert codes(coverage) == {}
    table = {metric.metric: metric for metric in coverage.metrics}
    assert (table["slowdown"].seen, table["slowdown"].helps) == (0, ("hot",))
    assert (table["temp"].rules, table["slowdown"].rules) == (("hot",), ())


@pytest.mark.case("D45")
def test_d45_remap_rows_that_a_mig_gpu_lacks_are_told_and_alarm_nobody():
    coverage = seen(HOT, REMAP, temp=8, slowdown=8, remap=7)

    assert codes(coverage) == {"remap": "exported_in_part"}
    assert "MIG" in coverage.blind[0].reason.text
    assert coverage.unexpected == ()


def test_remap_rows_that_nobody_has_are_a_wrong_counters_file():
    coverage = seen(HOT, REMAP, temp=8, slowdown=8)

    assert [one.rule_id for one in coverage.unexpected] == ["remap"]


def test_nvlink_counters_of_a_fleet_without_nvlink_are_told_and_alarm_nobody():
    coverage = seen(HOT, LINK, temp=8, slowdown=8)

    assert codes(coverage) == {"link": "not_exported"}
    assert coverage.unexpected == ()
    assert "NVLink" in coverage.blind[0].reason.text


def test_rules_for_hardware_that_the_cluster_does_not_have_are_not_blind():
    assert codes(seen(HOT, NEURON, temp=8, slowdown=8)) == {}
    assert codes(seen(HOT, NEURON, neuron=4)) == {}


def test_a_cluster_that_reports_nothing_is_blind_altogether():
    coverage = seen(HOT, DBE, NEURON)

    assert set(codes(coverage).values()) == {"nothing_exported"}
    assert len(coverage.unexpected) == 3


def test_what_others_export_is_told_and_alarms_nobody():
    coverage = seen(COUNT, TREND, temp=8)

    assert codes(coverage) == {"count": "not_exported", "trend": "not_recorded"}
    assert coverage.unexpected == ()
    assert "rule groups" in coverage.blind[1].reason.text


def test_a_deployed_record_that_writes_nothing_while_all_is_well_blinds_nobody():
    coverage = read_coverage(
        [HOT, TREND],
        NAMES,
        [Sample({"metric": "temp"}, 8.0, START)],
        recorded={"nodemend:sbe:day"},
    )

    assert codes(coverage) == {}


def test_presence_is_enough_for_what_is_not_counted_by_gpu():
    assert codes(seen(COUNT, temp=8, allocatable=1)) == {}


def test_gpus_without_a_uuid_or_a_node_are_told_with_the_rules_that_miss_it():
    by_uuid = rule("by-uuid", "temp", promql="max by (UUID) ([[temp]])")
    coverage = seen(by_uuid, temp=8, _uuid=3, _node=2)

    assert codes(coverage) == {"label-uuid": "label_missing", "label-node": "label_missing"}
    assert "3 of 8" in coverage.blind[0].reason.text
    assert "by-uuid" in coverage.blind[0].reason.text
    assert len(coverage.unexpected) == 2


def test_query_has_one_term_for_each_metric_and_two_for_the_labels():
    query = coverage_query([HOT, DBE, HOT], NAMES, matcher='cluster="a"')

    assert query.count("label_replace(") == 3 + 2
    assert query.count('cluster="a"') == 5
    assert '__name__=~"DCGM_FI_DEV_GPU_TEMP|DCGM_FI_DEV_GPU_TEMP_CELSIUS"' in query
    assert 'UUID="",uuid="",gpu_uuid=""' in query
    assert coverage_query([], NAMES) == ""


def test_nodes_without_a_metric_are_asked_against_the_one_that_most_gpus_have():
    coverage = seen(HOT, DBE, temp=16, slowdown=12, dbe=8)
    (part,) = coverage.blind[0].missing

    query = lacking_query(part, coverage, matcher='cluster="a"', limit=3)

    assert query.startswith("topk(3, ")
    assert query.index("GPU_TEMP") < query.index("unless") < query.index("ECC_DBE")


def test_a_rule_about_a_metric_without_names_is_left_to_the_catalogues_own_check():
    assert codes(seen(rule("odd", "unheard-of"), HOT, temp=8, slowdown=8)) == {}
