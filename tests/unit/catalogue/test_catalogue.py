"""The catalogue as data: complete, known to the code, and careful with XIDs."""

import re

import pytest

from nodemend.catalogue import load_catalogue
from nodemend.contracts.policy import check_rules, parse_policy
from nodemend.domain.errors import InvalidInputError, PolicyInvalidError
from nodemend.domain.faults import Family, FaultClass, Scope, Verdict
from nodemend.domain.generations import Generation
from nodemend.domain.rules import (
    BUILT_IN,
    WORKLOAD_LABELS,
    names_in,
    render_presence,
    render_query,
)

CATALOGUE = load_catalogue()
EVERY = pytest.mark.parametrize("rule", CATALOGUE.rules, ids=lambda rule: rule.id)


def test_rules_have_ids_of_their_own():
    ids = [rule.id for rule in CATALOGUE.rules]

    assert len(ids) == len(set(ids))


def test_every_family_has_rules():
    assert all(CATALOGUE.of_family(family) for family in Family)


@EVERY
def test_rule_says_why_and_whence(rule):
    assert len(rule.why.split()) >= 10
    assert rule.source
    assert rule.summary


RECORDED = {r.record: r for group in CATALOGUE.recordings for r in group.recordings}


@EVERY
def test_rule_names_only_metrics_that_are_known_and_used(rule):
    assert rule.metrics
    assert set(rule.used) <= {*CATALOGUE.metric_names, *RECORDED}
    assert set(rule.metrics) <= set(rule.used)
    assert not rule.presence or rule.presence in rule.metrics


@EVERY
def test_every_threshold_is_used_and_every_variable_has_a_value(rule):
    variables = set(re.findall(r"(?<!\$)\$\{?(\w+)", rule.promql)) - set(BUILT_IN)

    assert variables == set(rule.thresholds)
    assert not set(rule.thresholds) & set(BUILT_IN)


@EVERY
def test_rendered_query_has_no_placeholder_left_and_aggregates_workloads_away(rule):
    query = render_query(rule, CATALOGUE.metric_names)

    assert not re.search(r"\$(?!1)|\[\[|\]\]|<<", query)
    assert rule.scope is not Scope.GPU or all(label in query for label in WORKLOAD_LABELS)


def selectors(query):
    """Return the label matchers of every selector of a query."""
    return [inner for inner in re.findall(r"\{([^}]*)\}", query) if not inner.isdecimal()]


@EVERY
def test_matcher_is_in_every_selector(rule):
    matcher = 'cluster="a"'

    query = render_query(rule, CATALOGUE.metric_names, matcher=matcher)

    assert len(selectors(query)) >= rule.promql.count("[[")
    assert all(matcher in found for found in selectors(query))
    names = {n for name in rule.used for n in CATALOGUE.metric_names.get(name, (name,))}
    bare = [name for name in names if re.search(rf"\b{name}(?![\w:{{|\"])", query)]
    assert bare == []


@EVERY
def test_every_name_of_a_metric_is_asked_for(rule):
    query = render_query(rule, CATALOGUE.metric_names)

    for metric in rule.metrics:
        assert all(name in query for name in CATALOGUE.metric_names.get(metric, (metric,)))


@EVERY
def test_no_range_function_is_applied_to_a_selector_of_several_names(rule):
    """It would drop the name, and fail where an exporter prints a metric under both its names."""
    for function, metric in re.findall(
        r"(\w+_over_time|timestamp)\s*\(\s*\[\[([\w:]+)", rule.promql
    ):
        names = CATALOGUE.metric_names.get(metric, (metric,))
        assert function == "last_over_time" or len(names) == 1


@EVERY
def test_level_rule_says_by_what_its_gpu_is_seen(rule):
    assert (rule.kind == "level") == bool(rule.presence)
    if rule.presence:
        matcher = 'UUID="A"'

        assert matcher in render_presence(rule, CATALOGUE.metric_names, matcher)


@pytest.mark.parametrize("metric", CATALOGUE.metric_names)
def test_metric_has_names_that_exporters_can_print(metric):
    names = CATALOGUE.metric_names[metric]

    assert names
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"[A-Za-z_:][A-Za-z0-9_:]*", name) for name in names)


def test_no_exporter_name_means_two_metrics():
    names = [name for aliases in CATALOGUE.metric_names.values() for name in aliases]

    assert len(names) == len(set(names))


def test_every_metric_is_used_by_a_rule():
    used = {name for rule in CATALOGUE.rules for name in rule.used}
    used |= {name for recording in RECORDED.values() for name in names_in(recording.promql)}

    assert used - set(RECORDED) == set(CATALOGUE.metric_names)


def test_xid_table_is_complete_and_each_code_stands_once():
    """The file itself is counted; a code that has more rows than one needs a look at this test."""
    from importlib import resources  # noqa: PLC0415

    text = resources.files("nodemend.catalogue").joinpath("xid.csv").read_text("utf-8")
    codes = [line.split(",")[0] for line in text.splitlines() if line[:1].isdigit()]

    assert len(codes) == len(set(codes)) == len(CATALOGUE.xids) == 173


@pytest.mark.parametrize("code", [13, 31, 43, 45])
@pytest.mark.case("D23")
def test_xid_of_a_job_never_touches_a_node(code):
    assert CATALOGUE.xids[code].verdict is Verdict.APPLICATION
    assert not CATALOGUE.xids[code].verdict.is_actionable


@pytest.mark.parametrize("code", [48, 62, 64, 74, 79, 95, 119, 120, 140])
def test_xid_of_broken_hardware_is_fatal(code):
    assert CATALOGUE.xids[code].on(Generation.HOPPER).verdict is Verdict.FATAL


def test_only_xids_that_the_vendor_calls_for_a_repair_are_actionable():
    rows = [row for entry in CATALOGUE.xids.values() for row in entry.rows]
    actionable = {row.action for row in rows if row.verdict.is_actionable}

    assert actionable == {"reset_gpu", "reboot_node", "replace_node", "follow_xid48"}


def test_unknown_xids_are_suspect():
    assert {r.verdict for r in CATALOGUE.rules if r.fault_class is FaultClass.XID} == {
        Verdict.SUSPECT
    }


def test_gpus_per_instance_type_are_known_for_the_training_families():
    gpus = CATALOGUE.gpus_by_instance_type

    assert gpus["p4d.24xlarge"] == gpus["p5.48xlarge"] == 8
    assert all(1 <= count <= 16 for count in gpus.values())


def test_unknown_rule_metric_and_threshold_are_refused_by_name():
    rule = CATALOGUE.rules[0]

    with pytest.raises(InvalidInputError, match="not in the catalogue"):
        CATALOGUE.rule("xid-old")
    with pytest.raises(InvalidInputError, match="metric 'xid_errors' is unknown"):
        render_query(rule, {})


def test_policy_can_override_each_threshold_of_each_rule_and_no_other():
    known = {rule.id: tuple(rule.thresholds) for rule in CATALOGUE.rules}
    rules = {rule.id: {"thresholds": dict(rule.thresholds)} for rule in CATALOGUE.rules}
    wrong = {"gpu-lost": {"thresholds": {"celsius": 1}}}

    check_rules(parse_policy({"schema_version": 1, "rules": rules}, "v1"), known)
    with pytest.raises(PolicyInvalidError, match=r"rules\.gpu-lost\.thresholds\.celsius"):
        check_rules(parse_policy({"schema_version": 1, "rules": wrong}, "v1"), known)
