"""What a rehearsal deploys besides what its scenario says."""

from pathlib import Path

from local.scenario import load_scenario, rules_unseen
from nodemend.catalogue import load_catalogue

XID79 = Path(__file__).parents[3] / "local" / "scenarios" / "xid79.yaml"


def test_rules_that_read_what_no_simulated_exporter_shows_are_off() -> None:
    rules = load_scenario(XID79).full_policy["rules"]

    assert rules == {rule_id: {"enabled": False} for rule_id in rules_unseen()}
    assert {"hang", "gpu-count", "neuron-ecc-sram"} <= set(rules)


def test_rules_that_the_exporter_serves_stay_on() -> None:
    seen = {rule.id for rule in load_catalogue().rules} - set(rules_unseen())

    assert {"xid-new", "xid-count", "gpu-lost", "row-remap-failed", "gpu-temperature"} <= seen


def test_what_the_scenario_says_of_a_rule_stands() -> None:
    scenario = load_scenario(XID79)
    own = {"hang": {"enabled": True}, "xid-new": {"plan": []}}
    mine = scenario.model_copy(update={"policy": {**scenario.policy, "rules": own}})

    rules = mine.full_policy["rules"]

    assert (rules["hang"], rules["xid-new"]) == (own["hang"], own["xid-new"])
    assert rules["straggler"] == {"enabled": False}
