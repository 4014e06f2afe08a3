"""Scenarios of `tests/data/rules` and how promtool runs them, all in one call."""

import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from nodemend.catalogue import load_catalogue
from nodemend.domain.rules import Rule, render_query

DATA = Path(__file__).resolve().parents[2] / "data" / "rules"
CATALOGUE = load_catalogue()
SHOWN = "UUID, uuid, gpu, Hostname, hostname, node, err_code, xid"
"""Labels that tell whose fault it is. An answer keeps them and holds one row per GPU and code."""


def record_of(rule: Rule) -> str:
    """Return the name under which a rule's answer is recorded."""
    return f"nodemend:{rule.id.replace('-', '_')}"


def rule_file(rules: list[Rule]) -> str:
    """Return recording rules for the rendered queries, evaluated as often as the ecc scan runs."""
    recordings = [
        {"record": record_of(rule), "expr": render_query(rule, CATALOGUE.metric_names)}
        for rule in rules
    ]
    return yaml.safe_dump({"groups": [{"name": "nodemend", "interval": "1m", "rules": recordings}]})


@dataclass(frozen=True)
class Scenario:
    """One rule, the series that it sees, and when it must fire for which GPU."""

    rule: Rule
    name: str
    case: str
    series: tuple[str, ...]
    expect: tuple[dict[str, Any], ...]
    verdict: str = ""
    totals: dict[str, int] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Names the scenario's file."""
        return f"{self.rule.id}.{self.name}"

    def as_test(self, rules_path: Path) -> dict[str, Any]:
        """Return the scenario in promtool's unit-test format."""
        record = record_of(self.rule)
        tests = [
            {
                "expr": f"count by ({SHOWN}) ({record})",
                "eval_time": expected["at"],
                "exp_samples": [{"labels": labels, "value": 1} for labels in expected["gpus"]],
            }
            for expected in self.expect
        ]
        # How many evaluations held at all: nothing between the times above goes unseen.
        tests += [
            {
                "expr": f"(sum(count_over_time({record}[{window}])) or vector(0)) <= bool {most}",
                "eval_time": window,
                "exp_samples": [{"labels": "{}", "value": 1}],
            }
            for window, most in self.totals.items()
        ]
        series = [split_series(line) for line in self.series]
        return {
            "rule_files": [str(rules_path)],
            "evaluation_interval": "1m",
            "tests": [{"interval": "30s", "input_series": series, "promql_expr_test": tests}],
        }


def split_series(line: str) -> dict[str, str]:
    """Split `NAME{labels} values` into promtool's two fields."""
    name, values = line.rsplit("}", 1)
    return {"series": name + "}", "values": values.strip()}


def load_scenarios() -> list[Scenario]:
    """Read every scenario; the file's name is the rule's id."""
    return [
        Scenario(
            rule=CATALOGUE.rule(path.stem),
            name=raw["name"],
            case=raw.get("case", ""),
            series=tuple(raw["series"]),
            expect=tuple(raw["expect"]),
            verdict=raw.get("verdict", ""),
            totals=raw.get("totals", {}),
        )
        for path in sorted(DATA.glob("*.yaml"))
        for raw in yaml.safe_load(path.read_text())
    ]


def published_scrape() -> list[Scenario]:
    """Return, for each rule, a published scrape of a healthy node, unchanged for an hour."""
    text = (DATA.parent / "dcgm" / "mig-a800.prom").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    series = tuple(f"{line}x120" for line in lines)
    silence = ({"at": "40m", "gpus": []},)
    return [
        Scenario(rule, "a_published_scrape_with_mig", "D45", series, silence, totals={"59m": 0})
        for rule in CATALOGUE.rules
    ]


def run_promtool(folder: Path, scenarios: list[Scenario]) -> dict[str, str]:
    """Run all scenarios in one call; return what failed, by key. Empty text: it passed."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.fail("promtool is not installed: run make setup")
    for rule in CATALOGUE.rules:
        (folder / f"{rule.id}.rules.yaml").write_text(rule_file([rule]))
    paths = {}
    for scenario in scenarios:
        path = folder / f"{scenario.key}.yaml"
        path.write_text(yaml.safe_dump(scenario.as_test(folder / f"{scenario.rule.id}.rules.yaml")))
        paths[str(path)] = scenario.key
    done = subprocess.run(
        [promtool, "test", "rules", *paths],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    answers = re.split(r"(?m)^Unit Testing: +", done.stdout)[1:]
    results = {}
    for answer in answers:
        path, _, text = answer.partition("\n")
        results[paths[path.strip()]] = "" if "SUCCESS" in text else text.strip()
    return results
