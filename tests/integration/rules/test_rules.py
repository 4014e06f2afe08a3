"""Every rule of the catalogue before promtool: it fires on the fault and on nothing like it."""

import re
import subprocess
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from nodemend.domain.findings import Sample
from nodemend.domain.rules import findings_of
from tests.integration.rules.scenarios import (
    CATALOGUE,
    Scenario,
    load_scenarios,
    published_scrape,
    rule_file,
    run_promtool,
)

SCENARIOS = load_scenarios()
NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)


def as_parameters(scenarios: list[Scenario]) -> list[object]:
    return [
        pytest.param(
            scenario,
            id=scenario.key,
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
    assert found[0].node_names in (("n1",), ("n2",))


@pytest.mark.parametrize("rule", CATALOGUE.rules, ids=lambda rule: rule.id)
def test_every_rule_has_a_scenario_that_fires_and_its_look_alikes(rule):
    own = [scenario for scenario in SCENARIOS if scenario.rule is rule]
    fires = [s for s in own if any(expected["gpus"] for expected in s.expect)]
    cases = {scenario.case for scenario in own}

    assert fires
    assert cases >= {"D6", "D8", "D12"} - ({"D8"} if rule.id == "allocated-idle" else set())


def test_all_rules_pass_promtools_check(tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text(rule_file(list(CATALOGUE.rules)))

    done = subprocess.run(
        ["promtool", "check", "rules", str(path)], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(CATALOGUE.rules)} rules found" in done.stdout


def test_a_wrong_expectation_is_found(tmp_path):
    silent = next(scenario for scenario in SCENARIOS if not scenario.expect[0]["gpus"])
    row = '{UUID="nobody"}'
    wrong = replace(silent, expect=({**silent.expect[0], "gpus": [row]},))

    results = run_promtool(tmp_path, [wrong])

    assert "nobody" in results[wrong.key]
