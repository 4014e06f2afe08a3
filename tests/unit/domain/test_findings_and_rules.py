"""Signals become findings, and rules become queries: the traps of the metrics, once."""

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodemend.catalogue import load_catalogue
from nodemend.domain.errors import InvalidInputError
from nodemend.domain.faults import Family, FaultClass, FaultKind, Verdict
from nodemend.domain.findings import (
    Evidence,
    Finding,
    Sample,
    add_findings,
    by_urgency,
    collapse,
    for_cluster,
    gpu_index_of,
    gpu_uuid_of,
    is_blank,
    most_severe,
    node_names_of,
    xid_of,
)
from nodemend.domain.policy import DEFAULT_PLANS
from nodemend.domain.rules import (
    Catalogue,
    Rule,
    XidEntry,
    findings_of,
    matcher_of,
    render_presence,
    render_query,
)

NOW = datetime(2026, 5, 1, 10, 0, tzinfo=UTC)
NAMES = {"xid": ("XID_A", "XID_B"), "temp": ("TEMP",)}
XIDS = {79: XidEntry(79, "FALLEN", Verdict.FATAL, "reboot_node")}


def rule(**changes: Any) -> Rule:
    values: dict[str, Any] = {
        "id": "r-1",
        "family": Family.ECC,
        "fault_class": FaultClass.XID,
        "verdict": Verdict.SUSPECT,
        "kind": FaultKind.EVENT,
        "promql": "[[xid]] > 0",
        "thresholds": {},
        "summary": "XID $code ($name) on GPU $gpu, $value",
        "why": "because",
        "source": "us",
        "is_verdict_by_xid": True,
    }
    return Rule(**(values | changes))


def sample(value: float = 79, **labels: str) -> Sample:
    return Sample({"Hostname": "n1", "UUID": "GPU-1", "gpu": "0", **labels}, float(value), NOW)


def judge(*samples: Sample, **changes: Any) -> tuple[Finding, ...]:
    return findings_of(rule(**changes), samples, cluster="c", query="q", xids=XIDS)


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.case("R86")
@pytest.mark.parametrize(
    ("value", "blank"),
    [
        (0x7FFFFFF0, True),
        (0x7FFFFFF1, True),
        (9223372036854775792, True),
        (9.223372036854776e18, True),
        (140737488355328.0, True),
        (float("nan"), True),
        (float("inf"), True),
        (float("-inf"), True),
        (2147483631, False),
        (0, False),
        (-1, False),
        (95.5, False),
    ],
)
def test_r86_d6_blanks_are_no_measurements(value: float, blank: bool) -> None:
    assert is_blank(value) is blank


@pytest.mark.parametrize(
    ("labels", "value", "code"),
    [
        ({"err_code": "31"}, 79, 31),
        ({"xid": "62"}, 1, 62),
        ({"err_code": "79", "xid": "62"}, 1, 79),
        ({"err_code": ""}, 79, 79),
        ({"err_code": "none"}, 79, 79),
        ({"err_code": "²"}, 79, 79),
        ({}, 79, 79),
        ({}, 0, None),
        ({}, 1024, None),
        ({}, 79.5, None),
        ({}, float("nan"), None),
        ({}, float("inf"), None),
    ],
)
def test_an_xid_is_read_from_the_label_and_else_from_the_value(
    labels: dict[str, str], value: float, code: int | None
) -> None:
    assert xid_of(Sample(labels, float(value), NOW)) == code


@given(st.dictionaries(st.sampled_from(["err_code", "xid"]), st.text(max_size=4)), st.floats())
def test_no_label_and_no_value_breaks_the_reading_of_an_xid(
    labels: dict[str, str], value: float
) -> None:
    code = xid_of(Sample(labels, value, NOW))
    assert code is None or code >= 0


@pytest.mark.case("D12")
@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ({"Hostname": "n1"}, ("n1",)),
        ({"hostname": "n1"}, ("n1",)),
        ({"node": "n1", "Hostname": "exporter-pod"}, ("n1", "exporter-pod")),
        ({"node": "n1", "Hostname": "n1", "kubernetes_node": "n1"}, ("n1",)),
        ({"instance_id": "i-1", "node": ""}, ("i-1",)),
        ({"instance": "10.0.0.1:9400", "exported_instance": "x"}, ()),
        ({}, ()),
    ],
)
def test_d12_a_node_may_be_named_by_several_labels(
    labels: dict[str, str], names: tuple[str, ...]
) -> None:
    assert node_names_of(labels) == names


def test_a_gpu_is_told_by_uuid_and_index_under_their_aliases() -> None:
    assert gpu_uuid_of({"UUID": "", "uuid": "b", "gpu_uuid": "c"}) == "b"
    assert gpu_index_of({"gpu": "", "neuron_device_index": "7"}) == "7"
    assert (gpu_uuid_of({}), gpu_index_of({})) == ("", "")


# --- findings -------------------------------------------------------------------------------------


def test_a_sample_becomes_a_finding_with_all_its_evidence() -> None:
    (found,) = judge(sample(3, xid="79"))
    assert found == Finding(
        cluster="c",
        node_names=("n1",),
        fault_class=FaultClass.XID,
        verdict=Verdict.FATAL,
        kind=FaultKind.EVENT,
        evidence=Evidence("r-1", "q", 3, NOW, sample(3, xid="79").labels),
        gpu_uuid="GPU-1",
        gpu_index="0",
        code=79,
        summary="XID 79 (FALLEN) on GPU 0, 3",
        action="reboot_node",
    )
    assert found.key == "xid/GPU-1/79"


def test_the_table_decides_only_where_the_rule_says_so_and_the_code_is_known() -> None:
    assert judge(sample(xid="500"))[0].verdict is Verdict.SUSPECT
    assert judge(sample(xid="500"))[0].summary == "XID 500 (unknown) on GPU 0, 79"
    assert judge(sample(xid="79"), is_verdict_by_xid=False)[0].verdict is Verdict.SUSPECT


def test_a_sample_that_names_no_xid_is_no_xid() -> None:
    assert judge(sample(0)) == ()


def test_other_faults_have_no_code() -> None:
    (found,) = judge(sample(95.5), fault_class=FaultClass.THERMAL, summary="GPU $gpu $value $code")
    assert (found.code, found.key) == (None, "thermal/GPU-1/-/suspect")
    assert found.summary == "GPU 0 95.5 ?"


def test_a_gpu_without_labels_is_still_a_finding() -> None:
    (found,) = findings_of(rule(), (Sample({}, 79.0, NOW),), cluster="c", query="q", xids=XIDS)
    assert (found.node_names, found.gpu_uuid, found.gpu_index) == ((), "", "")
    assert found.key == "xid/node/79"
    assert "GPU ?" in found.summary


def test_without_a_uuid_the_index_tells_gpus_apart() -> None:
    labels = {"Hostname": "n1", "gpu": "4"}
    (found,) = findings_of(rule(), (Sample(labels, 79.0, NOW),), cluster="c", query="q", xids={})
    assert found.key == "xid/gpu4/79"


@pytest.mark.case("D8")
def test_d8_rows_of_mig_instances_are_one_gpu() -> None:
    rows = [sample(GPU_I_ID=str(number)) for number in range(7)]
    assert len(judge(*rows)) == 1
    # Two nodes may have GPUs of one index, and one GPU two codes.
    other = sample(Hostname="n2")
    assert len(judge(*rows, other, sample(xid="48"))) == 3


@pytest.mark.case("D6")
def test_d6_a_blank_value_makes_no_finding() -> None:
    assert judge(sample(9.22e18, xid="79"), sample(float("nan"), xid="79")) == ()


def finding(verdict: Verdict, at: datetime = NOW, gpu: str = "GPU-1") -> Finding:
    return Finding(
        "c",
        ("n1",),
        FaultClass.XID,
        verdict,
        FaultKind.EVENT,
        Evidence("r", "q", 1, at),
        gpu,
        "0",
        79,
    )


def test_severity_then_time_then_key_decides() -> None:
    later = NOW + timedelta(seconds=1)
    degraded = finding(Verdict.DEGRADED, NOW - timedelta(days=1))
    late, b, a = (
        finding(Verdict.FATAL, later),
        finding(Verdict.FATAL, gpu="B"),
        finding(Verdict.FATAL, gpu="A"),
    )
    assert by_urgency([degraded, late, b, a]) == (a, b, late, degraded)
    assert most_severe([degraded, late, b, a]) == a
    with pytest.raises(ValueError, match="empty"):
        most_severe([])


@pytest.mark.parametrize("cause", [79, 95, 149])
@pytest.mark.parametrize("echo", [43, 45, 145])
def test_in_a_burst_the_root_cause_decides_before_its_echoes_whoever_came_first(
    cause: int, echo: int
) -> None:
    later = NOW + timedelta(seconds=1)
    root = replace(finding(Verdict.FATAL, later), code=cause)
    first = replace(finding(Verdict.FATAL), code=echo)
    unranked = replace(finding(Verdict.FATAL), code=119)

    assert by_urgency([first, unranked, root]) == (root, unranked, first)
    # Severity counts most: an echo that is fatal by the table stays above a suspicion.
    assert most_severe([replace(root, verdict=Verdict.SUSPECT), first]) == first


def test_a_fault_that_a_fleet_can_share_has_no_gpu_in_it() -> None:
    assert finding(Verdict.FATAL).fault == "xid/79"
    assert replace(finding(Verdict.FATAL), code=None).fault == "xid"


def test_repeats_are_no_new_findings() -> None:
    first = finding(Verdict.FATAL)
    again = finding(Verdict.FATAL, NOW + timedelta(hours=1))
    assert add_findings((first,), [again]) == (first,)
    assert collapse([first, again]) == (first,)
    other = finding(Verdict.FATAL, gpu="B")
    assert add_findings((first,), [other, other]) == (first, other)


def test_a_finding_moves_to_the_clusters_name_that_the_policy_uses() -> None:
    assert for_cluster(finding(Verdict.FATAL), "x").cluster == "x"


# --- queries --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("promql", "matcher", "query"),
    [
        ("[[temp]] > 90", "", "TEMP > 90"),
        ("[[temp]] > 90", 'cluster="a"', 'TEMP{cluster="a"} > 90'),
        ('[[temp|pod!=""]]', 'cluster="a"', 'TEMP{pod!="",cluster="a"}'),
        ("[[xid]]", "", '{__name__=~"XID_A|XID_B"}'),
        (
            '[[xid|x="1"]] - [[xid]]',
            'cluster="a"',
            '{__name__=~"XID_A|XID_B",x="1",cluster="a"} - {__name__=~"XID_A|XID_B",cluster="a"}',
        ),
        ("[[temp]]\n   >\n 1", "", "TEMP > 1"),
        ("[[temp]][${window_s}s] > $limit", "", "TEMP[300s] > 0.5"),
    ],
)
def test_a_template_becomes_one_line_for_one_cluster(promql: str, matcher: str, query: str) -> None:
    numbers = {"window_s": 300.0, "limit": 0.5}
    rendered = render_query(rule(promql=promql, thresholds=numbers), NAMES, matcher=matcher)
    assert rendered == query


def test_the_policys_numbers_replace_the_catalogues() -> None:
    hot = rule(promql="[[temp]] > $a + $b", thresholds={"a": 1, "b": 2})
    assert render_query(hot, NAMES, thresholds={"b": 7.25}) == "TEMP > 1 + 7.25"


def test_the_labels_of_the_workload_are_aggregated_away() -> None:
    query = render_query(rule(promql="max without ($workload) ([[temp]])"), NAMES)
    for label in ("pod", "namespace", "GPU_I_ID", "instance", "err_msg"):
        assert label in query
    for label in ("UUID", "Hostname", "gpu,"):
        assert label not in query


def test_a_template_without_its_number_names_the_rule_and_the_number() -> None:
    with pytest.raises(InvalidInputError, match=r"rules.r-1.thresholds: limit has no value"):
        render_query(rule(promql="[[temp]] > $limit"), NAMES)


def test_a_template_with_an_unknown_metric_names_both() -> None:
    with pytest.raises(InvalidInputError, match=r"rules.r-1.promql: metric 'gone' is unknown"):
        render_query(rule(promql="[[gone]]"), NAMES)


def test_presence_counts_the_series_of_one_metric() -> None:
    seen = rule(presence="temp")
    assert (
        render_presence(seen, NAMES, 'UUID="a",cluster="c"') == 'count(TEMP{UUID="a",cluster="c"})'
    )


def test_a_rule_is_found_by_id_or_the_known_ones_are_named() -> None:
    catalogue = Catalogue((rule(), rule(id="r-2", family=Family.THERMAL)), NAMES)
    assert catalogue.rule("r-2").family is Family.THERMAL
    assert [one.id for one in catalogue.of_family(Family.ECC)] == ["r-1"]
    with pytest.raises(InvalidInputError, match=r"'r-3' is not in the catalogue.*r-1, r-2"):
        catalogue.rule("r-3")


# --- the whole catalogue --------------------------------------------------------------------------

CATALOGUE = load_catalogue()
LABELS = st.fixed_dictionaries(
    {"Hostname": st.sampled_from(["n1", "n2"]), "UUID": st.sampled_from(["A", "B"])},
    optional={
        "GPU_I_ID": st.sampled_from(["7", "8"]),
        "exported_pod": st.sampled_from(["a-0", "b-1"]),
        "xid": st.sampled_from(["79", "45", "62"]),
        "gpu": st.sampled_from(["0", "1"]),
        "node": st.sampled_from(["n1", "n2"]),
    },
)
VALUES = st.sampled_from([0.0, 1.0, 2.0, 79.0, 95.5, 2147483632.0, float("nan"), 9.2e18])


@given(
    st.sampled_from(CATALOGUE.rules),
    st.lists(st.tuples(LABELS, VALUES), max_size=12),
    st.randoms(use_true_random=False),
)
def test_rows_in_any_order_and_any_number_give_the_same_findings(
    one: Rule, rows: list[tuple[dict[str, str], float]], random: Random
) -> None:
    samples = [Sample(labels, value, NOW) for labels, value in rows]
    mixed = [*samples, *random.sample(samples, len(samples) // 2)]
    random.shuffle(mixed)

    def judged(given: list[Sample]) -> tuple[Finding, ...]:
        return findings_of(one, tuple(given), cluster="c", query="q", xids=CATALOGUE.xids)

    assert judged(mixed) == judged(samples)


@given(
    st.sampled_from(CATALOGUE.rules),
    st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=6),
    st.floats(),
)
def test_no_label_and_no_value_of_an_answer_is_an_exception(
    one: Rule, labels: dict[str, str], value: float
) -> None:
    found = findings_of(
        one, (Sample(labels, value, NOW),), cluster="c", query="q", xids=CATALOGUE.xids
    )
    assert len(found) <= 1


@given(st.sampled_from(CATALOGUE.rules), st.text(max_size=30))
def test_a_matcher_stands_in_the_query_as_it_was_given(one: Rule, text: str) -> None:
    matcher = matcher_of("cluster", text)

    query = render_query(one, CATALOGUE.metric_names, matcher=matcher)

    assert query.count(matcher) >= one.promql.count("[[")
    plain = render_query(one, CATALOGUE.metric_names, matcher="cluster=x")
    assert query.replace(matcher, "cluster=x") == plain


@given(st.text(max_size=30))
def test_a_matcher_is_one_quoted_string_that_utf_8_can_carry(text: str) -> None:
    quoted = matcher_of("node", text).removeprefix("node=")

    assert re.fullmatch(r'"(?:[^"\\\n]|\\.)*"', quoted, re.DOTALL)
    assert quoted.encode()


def found_by(rule_id: str, value: float, **labels: str) -> Finding:
    one = Sample({"Hostname": "n1", "UUID": "A", "gpu": "3", **labels}, value, NOW)
    (finding,) = findings_of(
        CATALOGUE.rule(rule_id), (one,), cluster="c", query="q", xids=CATALOGUE.xids
    )
    return finding


@pytest.mark.case("R83")
@pytest.mark.parametrize("code", ["144", "145", "146", "147", "148", "149", "150"])
def test_r83_an_xid_of_the_links_acts_only_with_the_drivers_own_word(code: str) -> None:
    alone = found_by("xid-new", float(code), err_code=code)
    driver = found_by("recovery-action", 2)

    assert not alone.verdict.is_actionable
    assert driver.verdict is Verdict.FATAL
    assert most_severe([alone, driver]) is driver


@pytest.mark.case("R72")
@pytest.mark.case("D3")
def test_r72_a_lost_gpu_is_found_beside_the_45_that_hides_its_xid() -> None:
    echo = found_by("xid-new", 45, err_code="45")
    lost = found_by("gpu-lost", 61)

    assert not echo.verdict.is_actionable
    assert lost.verdict is Verdict.FATAL
    assert most_severe([echo, lost]) is lost


@pytest.mark.case("R87")
def test_r87_each_recovery_action_is_a_fault_of_its_own() -> None:
    reset, reboot = found_by("recovery-action", 1), found_by("recovery-action", 2)

    assert (reset.code, reboot.code) == (1, 2)
    assert reset.key != reboot.key
    assert reset.action == reboot.action == "", "1 and 2 are no XIDs"


@pytest.mark.case("R87")
@pytest.mark.parametrize("value", [3, 5, 6, 7, 99])
def test_r87_what_nobody_knows_the_meaning_of_is_told_and_nothing_more(value: int) -> None:
    assert found_by("recovery-action-other", value).verdict is Verdict.SUSPECT


@pytest.mark.case("R52")
def test_r52_no_rule_about_telemetry_or_jobs_can_touch_a_node() -> None:
    lost = [r for r in CATALOGUE.rules if r.fault_class is FaultClass.TELEMETRY_LOST]

    assert {r.id for r in lost} >= {"exporter-down", "collector-outage", "telemetry-frozen"}
    assert not any(r.verdict.is_actionable for r in lost)
    assert not any(r in CATALOGUE.about_nodes() for r in lost)


def test_a_suspicion_does_not_hide_a_fault_to_act_on_of_its_class() -> None:
    """Keys are what the ledger notes as handled."""
    degraded, suspect = found_by("nvlink-crc", 200), found_by("nvlink-errors", 1)

    assert degraded.fault_class is suspect.fault_class
    assert degraded.key != suspect.key


@pytest.mark.parametrize("one", CATALOGUE.rules, ids=lambda one: one.id)
def test_only_what_has_been_so_before_has_a_plan_to_act(one: Rule) -> None:
    """New rules are observed until an operator gives their class a plan."""
    acts = one.is_verdict_by_xid or (
        one.verdict.is_actionable and bool(DEFAULT_PLANS.get(one.fault_class))
    )

    assert acts == (one.id in ACTING)


ACTING = {
    "xid-new",
    "xid-count",
    "ecc-dbe-volatile",
    "row-remap-failed",
    "gpu-lost",
    "gpu-count",
}


@pytest.mark.parametrize("class_", [FaultClass.HANG, FaultClass.STRAGGLER])
def test_a_hang_and_a_straggler_need_a_second_signal(class_: FaultClass) -> None:
    rules = [one for one in CATALOGUE.rules if one.fault_class is class_]

    assert rules
    for one in rules:
        assert one.verdict is Verdict.SUSPECT
        assert one.second_signal
        assert {"nodemend:gpu_tensor:avg5m", "nodemend:job_tensor:median"} <= set(one.used)
        assert any("gpu_power" in name for name in one.used)
