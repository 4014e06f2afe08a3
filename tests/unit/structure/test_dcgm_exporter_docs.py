"""docs/dcgm-exporter: with these files every rule sees."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from local.amp.exporter import counters_file_metrics
from nodemend.catalogue import load_catalogue
from nodemend.domain.coverage import MetricKind, coverage_query, kind_of, read_coverage
from nodemend.domain.findings import NODE_LABELS, Sample
from nodemend.domain.rules import Rule
from tests.fakes.system import START
from tests.unit.structure.repository import ROOT
from tools.asl import load_template

DOCS = ROOT / "docs" / "dcgm-exporter"
CATALOGUE = load_catalogue()
COUNTERS = (DOCS / "counters.csv").read_text()
EXPORTED = counters_file_metrics(COUNTERS)


def opt_in(rule: Rule) -> bool:
    """Tell whether the catalogue says that our counters file leaves the rule's metrics out."""
    return bool(getattr(rule, "opt_in", ""))


def used() -> dict[str, tuple[str, ...]]:
    """Return the names of the GPU metrics that rules need, those of opt-in rules left out.

    Also what recording rules are made of, if the catalogue has any.
    """
    rules = [rule for rule in CATALOGUE.rules if not opt_in(rule)]
    coverage = read_coverage(rules, CATALOGUE.metric_names, [])
    needed = {m.metric for m in coverage.metrics if m.rules}
    for group in getattr(CATALOGUE, "recordings", ()):
        for recording in group.recordings:
            needed |= set(re.findall(r"\[\[(\w+)[\]|@]", recording.promql))
    gpu = {m: n for m, n in CATALOGUE.metric_names.items() if kind_of(n) is MetricKind.GPU}
    return {metric: gpu[metric] for metric in sorted(needed & set(gpu))}


@pytest.mark.parametrize("metric", used())
def test_counters_file_exports_each_metric_of_the_rules_under_one_name(metric: str):
    names = [name for name in used()[metric] if name in EXPORTED]

    assert len(names) == 1, f"{metric}: {used()[metric]}"


def test_no_rule_is_blind_with_the_counters_file():
    """As the query would answer if all of 16 GPUs exported what the file says, and no more."""
    samples = [
        Sample({"metric": metric}, 16.0, START)
        for metric, names in CATALOGUE.metric_names.items()
        if set(names) & set(EXPORTED)
    ]
    records = {
        metric
        for rule in CATALOGUE.rules
        for metric in rule.metrics
        if kind_of((metric,)) is MetricKind.RECORDED
    }
    coverage = read_coverage(CATALOGUE.rules, CATALOGUE.metric_names, samples, recorded=records)

    wanted = {rule.id for rule in CATALOGUE.rules if not opt_in(rule)}
    assert [one.rule_id for one in coverage.blind if one.rule_id in wanted] == []
    assert len(wanted) >= 7


def test_a_missing_row_blinds_its_rule():
    samples = [
        Sample({"metric": metric}, 16.0, START)
        for metric in CATALOGUE.metric_names
        if metric != "ecc_dbe_volatile"
    ]
    coverage = read_coverage(CATALOGUE.rules, CATALOGUE.metric_names, samples)

    blind = {one.rule_id: one.reason.code for one in coverage.blind}
    assert blind["ecc-dbe-volatile"] == "not_exported"


def test_rows_of_the_counters_file_are_what_the_exporter_takes():
    lines = [line for line in COUNTERS.splitlines() if line and not line.startswith("#")]
    rows = [[cell.strip() for cell in row] for row in csv.reader(lines)]

    assert {len(row) for row in rows} == {3}, "a comma in a help text"
    assert {row[1] for row in rows} <= {"gauge", "counter", "label"}
    names = [row[0] for row in rows]
    assert len(names) == len(set(names))
    assert all(row[2] for row in rows)


def test_counters_that_are_windows_are_no_counters():
    """dcgm-exporter calls XID counts of a window a counter; a collector would append _total."""
    lines = [line for line in COUNTERS.splitlines() if line.startswith("DCGM")]
    rows = {line.split(",")[0]: line.split(",")[1].strip() for line in lines}

    assert rows["DCGM_EXP_XID_ERRORS_COUNT"] == "gauge"


# --- scrape configurations ------------------------------------------------------------------------


def jobs(document: Any) -> dict[str, Any]:
    return {job["job_name"]: job for job in document["scrape_configs"]}


def plain() -> Any:
    return yaml.safe_load((DOCS / "prometheus.yml").read_text())


def managed() -> Any:
    template = load_template(DOCS / "scraper.template.yaml")
    properties = template["Resources"]["Scraper"]["Properties"]
    return yaml.safe_load(properties["ScrapeConfiguration"]["ConfigurationBlob"]["Fn::Base64"])


def test_managed_collector_scrapes_as_prometheus_does():
    assert jobs(managed()) == jobs(plain())
    assert managed()["global"] == plain()["global"]
    assert set(managed()) == {"global", "scrape_configs"}, "the collector takes nothing else"


def target_labels(relabelings: list[dict[str, Any]], source: str, target: str) -> dict[str, str]:
    return {
        one[source][0]: one[target]
        for one in relabelings
        if one.get("action", "replace") == "replace"
    }


def test_operator_and_prometheus_name_the_node_in_the_same_label():
    monitor = yaml.safe_load((DOCS / "servicemonitor.yaml").read_text())
    (endpoint,) = monitor["spec"]["endpoints"]
    relabelled = target_labels(endpoint["relabelings"], "sourceLabels", "targetLabel")
    scraped = target_labels(
        jobs(plain())["dcgm-exporter"]["relabel_configs"], "source_labels", "target_label"
    )

    assert relabelled.items() <= scraped.items()
    assert relabelled["__meta_kubernetes_pod_node_name"] == NODE_LABELS[0]
    assert endpoint["honorLabels"] is False
    assert endpoint["interval"] == plain()["global"]["scrape_interval"]


def test_chart_values_use_the_counters_file():
    values = yaml.safe_load((DOCS / "values.yaml").read_text())
    (mount,) = values["extraVolumeMounts"]
    (volume,) = values["extraConfigMapVolumes"]

    flag, path = values["arguments"]
    assert (flag, Path(path).name) == ("-f", "counters.csv")
    assert str(Path(path).parent) == mount["mountPath"]
    assert mount["name"] == volume["name"]
    assert f"create configmap {volume['configMap']['name']}" in (DOCS / "values.yaml").read_text()


def test_query_of_the_whole_catalogue_is_one_and_names_each_metric_once():
    query = coverage_query(CATALOGUE.rules, CATALOGUE.metric_names, matcher='cluster="a"')

    coverage = read_coverage(CATALOGUE.rules, CATALOGUE.metric_names, [])
    labels = [m.metric for m in coverage.metrics] + ["-uuid", "-node"]
    assert [query.count(json.dumps(label)) for label in labels] == [1] * len(labels)
    assert query.count('cluster="a"') == len(labels)
    assert len(query) < 50_000


def test_kinds_are_told_by_name():
    kinds = {
        "DCGM_FI_DEV_GPU_TEMP": MetricKind.GPU,
        "DCGM_EXP_XID_ERRORS_COUNT": MetricKind.GPU,
        "DCGM_FI_DEV_NVSWITCH_FATAL_ERRORS": MetricKind.OTHER,
        "hardware_ecc_events_total": MetricKind.NEURON,
        "execution_errors_total": MetricKind.NEURON,
        "neuroncore_utilization_ratio": MetricKind.NEURON,
        "nodemend:gpu_ecc_sbe:increase5m": MetricKind.RECORDED,
        "kube_node_status_allocatable": MetricKind.OTHER,
        "up": MetricKind.OTHER,
    }
    assert {name: kind_of((name,)) for name in kinds} == kinds
