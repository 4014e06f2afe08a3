"""Scenarios of `tests/data/rules` and how promtool runs them, all in one call.

A scenario with `derive` stands for several: what it expects must also hold where exporters print
the new names or both, MIG repeats each row, a job starts in the middle, or scrapes are missed; and
nothing may fire where its values are blank, or counters stand high and begin anew.
"""

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from nodemend.catalogue import load_catalogue
from nodemend.domain.rules import Rule, render_query, render_template

DATA = Path(__file__).resolve().parents[2] / "data" / "rules"
CATALOGUE = load_catalogue()
SHOWN = "UUID, uuid, gpu, Hostname, hostname, node, err_code, xid, instance_id, neuron_device_index"
"""Labels that tell whose fault it is. An answer keeps them and holds one row per GPU and code."""


def record_of(rule: Rule) -> str:
    """Return the name under which a rule's answer is recorded."""
    return f"nodemend:{rule.id.replace('-', '_')}"


def rule_file(rules: list[Rule], *, with_recordings: bool = False) -> str:
    """Return recording rules for the rendered queries, evaluated as often as the ecc scan runs."""
    groups: list[dict[str, Any]] = []
    if with_recordings:
        groups = [
            {
                "name": group.name,
                "rules": [
                    {
                        "record": r.record,
                        "expr": render_template(r.promql, r.record, CATALOGUE.metric_names),
                    }
                    for r in group.recordings
                ],
            }
            for group in CATALOGUE.recordings
        ]
    answers = [
        {"record": record_of(rule), "expr": render_query(rule, CATALOGUE.metric_names)}
        for rule in rules
    ]
    groups.append({"name": "answers", "rules": answers})
    return yaml.safe_dump({"groups": groups})


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
    interval: str = "30s"
    with_recordings: bool = False

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
            "evaluation_interval": "1m" if self.interval == "30s" else self.interval,
            "tests": [
                {"interval": self.interval, "input_series": series, "promql_expr_test": tests}
            ],
        }


def split_series(line: str) -> dict[str, str]:
    """Split `NAME{labels} values` into promtool's two fields."""
    name, values = line.rsplit("}", 1)
    return {"series": name + "}", "values": values.strip()}


def load_scenarios() -> list[Scenario]:
    """Read every scenario; the file's name is the rule's id."""
    found = []
    for path in sorted(DATA.glob("*.yaml")):
        for raw in yaml.safe_load(path.read_text()):
            scenario = Scenario(
                rule=CATALOGUE.rule(path.stem),
                name=raw["name"],
                case=raw.get("case", ""),
                series=tuple(raw["series"]),
                expect=tuple(raw["expect"]),
                verdict=raw.get("verdict", ""),
                totals=raw.get("totals", {}),
                interval=raw.get("interval", "30s"),
                with_recordings=raw.get("recordings", _needs_recordings(CATALOGUE.rule(path.stem))),
            )
            found.append(scenario)
            if "derive" in raw:
                found += derive(scenario, raw["derive"])
    return found


def _needs_recordings(rule: Rule) -> bool:
    return any(name.startswith("nodemend:") for name in rule.metrics)


def derive(scenario: Scenario, names: list[str]) -> Iterator[Scenario]:
    """Yield the scenario's variants of these names; `all` stands for every one of them."""
    for name in DERIVED if names == ["all"] else names:
        case, change = DERIVED[name]
        changed = change(replace(scenario, verdict=""))
        yield replace(changed, name=f"{scenario.name}.{name}", case=case)


BLANKS = ("2147483632", "9223372036854775792", "2147483634")


def values_of(line: str) -> list[str]:
    """Return every value of `NAME{labels} values`, promtool's shorthand written out."""
    found = []
    for word in split_series(line)["values"].split():
        run = re.fullmatch(r"(_|-?[0-9.e+]*?[0-9.])(?:([+-][0-9.e]+))?(?:x(\d+))?", word)
        if run is None or run[3] is None:
            found.append(word)
        elif run[1] == "_":
            found += ["_"] * int(run[3])
        else:
            step = float(run[2] or 0)
            found += [f"{float(run[1]) + step * i:.10g}" for i in range(int(run[3]) + 1)]
    return found


def with_values(line: str, values: list[str]) -> str:
    """Return the series with other values."""
    return f"{split_series(line)['series']} {' '.join(values)}"


def with_label(line: str, label: str) -> str:
    """Return the series with one more label."""
    name, rest = line.split("{", 1)
    return f"{name}{{{label},{rest}"


def _is_gpu(line: str) -> bool:
    return line.startswith("DCGM_")


def _last_name(line: str) -> str:
    name, rest = line.split("{", 1)
    names = next((names for names in CATALOGUE.metric_names.values() if name in names), (name,))
    return f"{names[-1]}{{{rest}"


def _renamed(scenario: Scenario) -> Scenario:
    expect = tuple({**e, "gpus": [_rename(row) for row in e["gpus"]]} for e in scenario.expect)
    series = tuple(_rename(_last_name(line)) for line in scenario.series)
    return replace(scenario, series=series, expect=expect)


def _both_names(scenario: Scenario) -> Scenario:
    more = [_last_name(line) for line in scenario.series]
    added = tuple(line for line in more if line not in scenario.series)
    return replace(scenario, series=scenario.series + added)


def _mig(scenario: Scenario) -> Scenario:
    series = tuple(
        with_label(line, f'GPU_I_ID="{instance}",GPU_I_PROFILE="1g.10gb"')
        for line in scenario.series
        for instance in (7, 8, 9)
        if _is_gpu(line)
    )
    others = tuple(line for line in scenario.series if not _is_gpu(line))
    return replace(scenario, series=series + others)


def _silent(scenario: Scenario, series: tuple[str, ...]) -> Scenario:
    expect = tuple({**expected, "gpus": []} for expected in scenario.expect)
    longest = str(scenario.expect[-1]["at"])
    return replace(scenario, series=series, expect=expect, totals={longest: 0})


def _blank(scenario: Scenario) -> Scenario:
    def blanked(line: str) -> str:
        values = values_of(line)
        return with_values(line, [BLANKS[i * 3 // len(values)] for i in range(len(values))])

    return _silent(scenario, tuple(blanked(line) for line in scenario.series))


def _goes_blank(scenario: Scenario) -> Scenario:
    def blanked(line: str) -> str:
        values = values_of(line)
        half = len(values) // 3
        first = next(value for value in values if value not in ("_", "stale"))
        return with_values(line, [first] * half + [BLANKS[0]] * (len(values) - half))

    return _silent(scenario, tuple(blanked(line) for line in scenario.series))


def _job_start(scenario: Scenario) -> Scenario:
    """Another job takes every GPU two minutes before the first finding is expected."""
    series: list[str] = []
    for line in scenario.series:
        values = values_of(line)
        cut = len(values) // 3
        if not _is_gpu(line) or "stale" in values:
            series.append(line)
            continue
        first, second = values[:cut], values[cut:]
        series.append(with_label(with_values(line, [*first, "stale"]), 'exported_pod="old-0"'))
        later = with_values(line, ["_"] * cut + second)
        series.append(with_label(later, 'exported_pod="new-7",err_msg="x"'))
    return replace(scenario, series=tuple(series))


def _rename(text: str) -> str:
    return text.replace("Hostname=", "hostname=")


def _upgrade(scenario: Scenario) -> Scenario:
    """The exporter is upgraded a third of the way in: names, host label and address change."""
    series: list[str] = []
    for line in scenario.series:
        values = values_of(line)
        cut = len(values) // 3
        if not _is_gpu(line) or "stale" in values:
            series.append(line)
            continue
        series.append(with_label(with_values(line, [*values[:cut], "stale"]), 'instance="a:9400"'))
        later = with_values(_rename(_last_name(line)), ["_"] * cut + values[cut:])
        series.append(with_label(later, 'instance="b:9400"'))
    expect = tuple({**e, "gpus": [_rename(row) for row in e["gpus"]]} for e in scenario.expect)
    return replace(scenario, series=tuple(series), expect=expect)


def _gap(scenario: Scenario) -> Scenario:
    """Three scrapes in a row are missed, a third of the way in."""

    def torn(line: str) -> str:
        values = values_of(line)
        at = len(values) // 3
        return with_values(line, [*values[:at], "_", "_", "_", *values[at + 3 :]])

    return replace(scenario, series=tuple(torn(line) for line in scenario.series))


def _lifetime(scenario: Scenario) -> Scenario:
    """Counters that stand high all the time, then begin anew (a driver reload), are no fault."""

    def counted(line: str) -> str:
        half = len(values_of(line)) // 2
        return with_values(line, ["1000000"] * half + ["0"] * half)

    return _silent(scenario, tuple(counted(line) for line in scenario.series))


def _long_gap(scenario: Scenario) -> Scenario:
    """What is there after twenty minutes without any scrape did not happen just now."""

    def torn(line: str) -> str:
        values = [v for v in values_of(line) if v not in ("_", "stale")]
        return with_values(line, [*values[:1] * 20, *["_"] * 40, *values[-1:] * 60])

    return _silent(scenario, tuple(torn(line) for line in scenario.series))


DERIVED: dict[str, tuple[str, Callable[[Scenario], Scenario]]] = {
    "new_names": ("D12", _renamed),
    "both_names": ("", _both_names),
    "mig": ("D8", _mig),
    "blank": ("D6", _blank),
    "goes_blank": ("R86", _goes_blank),
    "job_start": ("D29", _job_start),
    "upgrade": ("D12", _upgrade),
    "gap": ("", _gap),
    "lifetime": ("R78", _lifetime),
    "long_gap": ("", _long_gap),
}


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
        text = rule_file([rule], with_recordings=True)
        (folder / f"{rule.id}.recorded.yaml").write_text(text)
    paths = {}
    for scenario in scenarios:
        path = folder / f"{scenario.key}.yaml"
        kind = "recorded" if scenario.with_recordings else "rules"
        path.write_text(
            yaml.safe_dump(scenario.as_test(folder / f"{scenario.rule.id}.{kind}.yaml"))
        )
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
