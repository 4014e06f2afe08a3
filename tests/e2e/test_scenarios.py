"""Every scenario that ships, through the command line."""

import pytest
import yaml

from tests.e2e.conftest import SCENARIOS

FIRST = {"xid79", "xid79_dry_run"}
ALL = sorted(path.stem for path in SCENARIOS.glob("*.yaml"))


@pytest.mark.timeout(260)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.first] if name in FIRST else []) for name in ALL],
)
def test_the_scenario_ends_as_it_must(run_scenario, name):
    run = run_scenario(SCENARIOS / f"{name}.yaml")
    assert run.status == 0, run.text
    assert run.result["expectation"] == {"met": True, "why": []}
    ids = [event["event_id"] for event in run.result["events"]]
    assert len(ids) == len(set(ids)), "an event was sent twice"


def changed(tmp_path, **fields):
    """Return a copy of the xid79 scenario with top-level fields replaced."""
    scenario = yaml.safe_load((SCENARIOS / "xid79.yaml").read_text())
    path = tmp_path / "changed.yaml"
    path.write_text(yaml.safe_dump({**scenario, **fields}))
    return path


@pytest.mark.timeout(260)
def test_denied_evictions_end_with_a_person_and_exit_status_1(run_scenario):
    run = run_scenario(SCENARIOS / "xid79.yaml", "--api-fault", "evict:403")
    assert run.status == 1
    assert run.result["outcome"] == "NEEDS_HUMAN"
    (incident,) = run.result["incidents"]
    assert incident["reason"] == "cluster_forbidden"
    assert "pods/eviction" in incident["text"]
    assert "RBAC" in incident["remedy"] or "ClusterRole" in incident["remedy"]
    # Cordoned once, and neither drained nor replaced; the node stays out of service.
    assert [m["verb"] for m in run.result["api_mutations"]] == ["patch"]
    (sick,) = [node for node in run.result["nodes"] if node["unschedulable"]]
    assert incident["node"] == sick["name"]
    assert "nodemend/incident" in sick["annotations"]


@pytest.mark.timeout(260)
def test_a_changed_expectation_is_not_met_and_exits_1(run_scenario, tmp_path):
    run = run_scenario(changed(tmp_path, expect={"outcome": "OBSERVED"}))
    assert run.status == 1
    assert run.result["outcome"] == "REPLACED"
    assert not run.result["expectation"]["met"]


@pytest.mark.timeout(260)
def test_without_the_fault_nothing_at_all_is_changed(run_scenario, tmp_path):
    run = run_scenario(changed(tmp_path, timeline=[]))
    assert run.status == 1
    assert run.result["api_mutations"] == []
    assert run.result["incidents"] == []


@pytest.mark.timeout(260)
@pytest.mark.case("D1")
def test_d1_an_application_xid_opens_no_incident_however_often_it_is_scanned(
    run_scenario, tmp_path
):
    fault = {"node": "p5-train/3", "gpu": 5, "kind": "xid", "code": 31}
    path = changed(
        tmp_path, timeline=[{"at_s": 1, "inject": fault}], expect={"outcome": None, "actions": []}
    )
    run = run_scenario(path)
    assert run.status == 0, run.text
    assert run.event_types == []


@pytest.mark.timeout(260)
@pytest.mark.case("D2")
def test_d2_a_fatal_xid_that_follows_a_harmless_one_opens_exactly_one_incident(
    run_scenario, tmp_path
):
    where = {"node": "p5-train/3", "gpu": 5, "kind": "xid"}
    path = changed(
        tmp_path,
        timeline=[
            {"at_s": 0, "inject": {**where, "code": 31}},
            {"at_s": 4, "inject": {**where, "code": 79}},
        ],
    )
    run = run_scenario(path)
    assert run.status == 0, run.text
    assert run.event_types.count("Incident Opened") == 1


@pytest.mark.timeout(500)
def test_runs_are_equal_but_for_ids_and_times(run_scenario):
    first = run_scenario(SCENARIOS / "xid79.yaml").by_role()
    for _ in range(3):
        assert run_scenario(SCENARIOS / "xid79.yaml").by_role() == first
