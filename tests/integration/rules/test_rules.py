"""Every rule of the catalogue before promtool: it fires on the fault and on nothing like it."""

import json
import re
import subprocess
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import pytest
import yaml

from nodemend.domain.findings import Sample
from nodemend.domain.rules import findings_of, matcher_of, render_presence, render_query
from tests.integration.rules.scenarios import (
    CATALOGUE,
    Scenario,
    load_scenarios,
    published_scrape,
    rule_file,
    run_promtool,
)
from tools.asl import load_template

ROOT = Path(__file__).parents[3]
SCENARIOS = load_scenarios()
NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)


NOT_ON_MIG = {"allocated-idle"}
"""Rules whose metrics a GPU does not report once it is cut into instances."""


def names_of(rule):
    return [name for metric in rule.used for name in CATALOGUE.metric_names.get(metric, ())]


def as_parameters(scenarios: list[Scenario]) -> list[object]:
    return [
        pytest.param(
            scenario,
            id=f"{scenario.case.lower()}.{scenario.key}" if scenario.case else scenario.key,
            marks=[pytest.mark.case(scenario.case)] if scenario.case else [],
        )
        for scenario in scenarios
    ]


@pytest.mark.parametrize("scenario", as_parameters([*SCENARIOS, *published_scrape()]))
def test_rule_behaves_as_the_scenario_says(scenario, promtool_results):
    failure = promtool_results[scenario.key]

    assert failure == ""


@pytest.mark.parametrize(
    "scenario", as_parameters([scenario for scenario in SCENARIOS if scenario.verdict])
)
def test_answer_becomes_one_finding_with_the_verdict(scenario):
    rows = [labels for expected in scenario.expect for labels in expected["gpus"]]
    labels = dict(re.findall(r'(\w+)="([^"]*)"', rows[0]))
    value = float(labels.get("err_code", 79))

    found = findings_of(
        scenario.rule,
        (Sample(labels, value, NOW),),
        cluster="a",
        query="",
        xids=CATALOGUE.xids,
    )

    assert [finding.verdict for finding in found] == [scenario.verdict]
    assert found[0].node_names in (("n1",), ("n2",), ("i-1",), ())


@pytest.mark.parametrize("rule", CATALOGUE.rules, ids=lambda rule: rule.id)
def test_every_rule_has_a_scenario_that_fires_and_its_look_alikes(rule):
    own = [scenario for scenario in SCENARIOS if scenario.rule is rule]
    fires = [s for s in own if any(expected["gpus"] for expected in s.expect)]
    cases = {scenario.case for scenario in own}
    is_per_gpu = any(name.startswith("DCGM_") for name in names_of(rule))

    assert fires
    assert any(scenario.verdict for scenario in own)
    assert cases >= ({"D6", "D12"} if is_per_gpu else set())
    assert not is_per_gpu or "D8" in cases or rule.id in NOT_ON_MIG


def check_rules(path, text):
    path.write_text(text)
    done = subprocess.run(
        ["promtool", "check", "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return int(re.search(r"(\d+) rules found", done.stdout)[1])


def test_all_rules_pass_promtools_check(tmp_path):
    text = rule_file(list(CATALOGUE.rules))

    assert check_rules(tmp_path / "rules.yaml", text) == len(CATALOGUE.rules)


@pytest.mark.parametrize("resource", ["RecordingRuleGroups", "AlertingRuleGroups"])
def test_rule_groups_of_the_stack_pass_promtools_check(tmp_path, resource):
    template = load_template(ROOT / "rules.template.yaml")
    data = template["Resources"][resource]["Properties"]["Data"]["Sub"]
    text = data.replace("${ClusterLabel}", "k8s_cluster")

    found = check_rules(tmp_path / "rules.yaml", text)

    assert found == sum(len(group["rules"]) for group in yaml.safe_load(text)["groups"])


NASTY = (
    'a"b',
    "a'b`c",
    "a\\",
    'a\\"} or vector(1) #',
    "a{b}[5m]",
    "ip-10.*|.+",
    "[[gpu_temp]]",
    "]] $window_s ${x} $$ %s <<types>>",
    "line\nbreak\ttab\rreturn",
    "\u00e4\u2028\U0001f600 \ud800",
    "",
)


def test_no_text_makes_an_invalid_query(tmp_path):
    """Node names, UUIDs and clusters come from outside: labels, alerts, people."""
    random = Random(45)  # noqa: S311 - texts, the same in every run
    alphabet = "\\\"'{}[]()$%#|.*+?\n\t ab<>\u00e4"
    texts = [*NASTY, *("".join(random.choices(alphabet, k=12)) for _ in range(30))]
    expressions = []
    for text in texts:
        matcher = matcher_of("cluster", text)
        for rule in CATALOGUE.rules:
            expressions.append(render_query(rule, CATALOGUE.metric_names, matcher=matcher))
            if rule.presence:
                expressions.append(render_presence(rule, CATALOGUE.metric_names, matcher))
    rules = [{"record": f"r{n}", "expr": text} for n, text in enumerate(expressions)]
    groups = {"groups": [{"name": "g", "rules": rules}]}

    found = check_rules(tmp_path / "rules.yaml", json.dumps(groups, ensure_ascii=False))

    assert found == len(expressions)


def test_a_wrong_expectation_is_found(tmp_path):
    silent = next(scenario for scenario in SCENARIOS if not scenario.expect[0]["gpus"])
    row = '{UUID="nobody"}'
    wrong = replace(silent, expect=({**silent.expect[0], "gpus": [row]},))

    results = run_promtool(tmp_path, [wrong])

    assert "nobody" in results[wrong.key]
