"""rules.template.yaml: generated, within AMP's limits, and silent unless somebody wants alerts."""

import re

import pytest
import yaml

from nodemend.catalogue import load_catalogue
from nodemend.domain.alerts import families_of, rule_of
from nodemend.domain.faults import Verdict
from tests.unit.structure.repository import ROOT
from tools import rule_groups
from tools.asl import load_template

CATALOGUE = load_catalogue()
TEMPLATE = load_template(ROOT / "rules.template.yaml")
RESOURCES = TEMPLATE["Resources"]


def groups_of(resource: str) -> list[dict]:
    data = RESOURCES[resource]["Properties"]["Data"]["Sub"]
    return yaml.safe_load(data.replace("${ClusterLabel}", "cluster"))["groups"]


RECORDING, ALERTING = groups_of("RecordingRuleGroups"), groups_of("AlertingRuleGroups")


def test_template_is_not_stale():
    assert rule_groups.PATH.read_text() == rule_groups.document(CATALOGUE)


def test_stale_template_is_found(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rule_groups, "PATH", tmp_path / "rules.template.yaml")

    assert rule_groups.main(["--check"]) == 1
    assert rule_groups.main([]) == 0
    assert rule_groups.main(["--check"]) == 0
    (tmp_path / "rules.template.yaml").write_text("old")
    assert rule_groups.main(["--check"]) == 1
    assert "run make schemas" in capsys.readouterr().err


def test_alerting_rules_are_off_unless_the_parameter_says_otherwise():
    assert TEMPLATE["Parameters"]["AlertingRules"]["Default"] == "false"
    assert RESOURCES["AlertingRuleGroups"]["Condition"] == "HasAlertingRules"
    assert "Condition" not in RESOURCES["RecordingRuleGroups"]
    assert all(set(rule) == {"record", "expr"} for group in RECORDING for rule in group["rules"])


@pytest.mark.parametrize("resource", RESOURCES)
def test_groups_are_within_the_limits_of_amp(resource):
    groups = groups_of(resource)
    text = RESOURCES[resource]["Properties"]["Data"]["Sub"]

    assert len(text.encode()) <= rule_groups.MAX_BYTES
    assert all(int(group["interval"].rstrip("s")) >= 30 for group in groups)
    assert all(0 < len(group["rules"]) <= 20 for group in groups)
    names = [group["name"] for group in groups]
    assert len(names) == len(set(names))


def test_template_fits_into_a_direct_upload_to_cloudformation_from_a_bucket():
    assert (ROOT / "rules.template.yaml").stat().st_size < 1_000_000


def test_only_the_cluster_label_is_substituted():
    """A dollar with a brace would be a variable of CloudFormation's."""
    for resource in RESOURCES.values():
        text = resource["Properties"]["Data"]["Sub"]

        assert set(re.findall(r"\$\{([^}]*)\}", text)) == {"ClusterLabel"}


def test_a_series_is_recorded_before_others_of_its_group_read_it():
    for group in CATALOGUE.recordings:
        seen: set[str] = set()
        own = {one.record for one in group.recordings}
        for one in group.recordings:
            read = set(re.findall(r"\[\[(nodemend:[\w:]+)", one.promql))

            assert read & own <= seen
            seen.add(one.record)


def test_every_recorded_series_that_a_rule_reads_is_recorded():
    recorded = {rule["record"] for group in RECORDING for rule in group["rules"]}
    read = {name for rule in CATALOGUE.rules for name in rule.used if name.startswith("nodemend:")}

    assert read
    assert read <= recorded


def test_a_rule_that_reads_a_recorded_series_says_what_it_is_without():
    readers = [r for r in CATALOGUE.rules if any(name.startswith("nodemend:") for name in r.used)]

    assert len(readers) >= 4
    for rule in readers:
        is_blind = any(name.startswith("nodemend:") for name in rule.metrics)
        assert "recording rules" in rule.degraded
        assert rule.degraded.startswith("Blind") == is_blind


def test_no_long_window_reads_raw_samples():
    """A day of a GPU's raw samples is 2,880; the increments of a healthy one are none."""
    raw = [*(r.promql for r in CATALOGUE.rules)]
    raw += [one.promql for group in CATALOGUE.recordings for one in group.recordings]
    for promql in raw:
        for inner, window in re.findall(r"(\S+?)\[(\d+[dw]|[2-9]h|\d\dh)(?::\w+)?\]", promql):
            assert "nodemend:" in inner, f"{inner}[{window}]"


def test_alerts_carry_what_the_alert_queue_reads():
    alerts = [rule for group in ALERTING for rule in group["rules"]]
    wanted = [r for r in CATALOGUE.rules if r.verdict.severity <= Verdict.SUSPECT.severity]

    assert [alert["labels"]["nodemend_rule"] for alert in alerts] == [rule.id for rule in wanted]
    for alert, rule in zip(alerts, wanted, strict=True):
        assert rule_of(alert["labels"], CATALOGUE.rules) is rule
        assert families_of(alert["labels"], CATALOGUE.rules) == {rule.family}
        assert alert["labels"]["team"] == "gpu"
        assert not re.search(r"\$(?!labels|value)", alert["annotations"]["summary"])


def test_other_cluster_labels_are_kept_in_what_is_recorded():
    groups = rule_groups.recording_groups(CATALOGUE, "k8s_cluster")["groups"]
    texts = [rule["expr"] for group in groups for rule in group["rules"]]

    assert any("k8s_cluster" in text for text in texts)
    assert not any(re.search(r"\bcluster\b", text) for text in texts)
