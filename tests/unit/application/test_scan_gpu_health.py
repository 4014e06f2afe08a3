"""Scans: what is new is announced once, what repeats is counted, what is blind is said."""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from nodemend.application.ports import QueryResult
from nodemend.contracts.events import FaultEnvelope
from nodemend.domain.errors import AwsUnavailableError, PolicyInvalidError
from nodemend.domain.faults import Family, FaultClass
from nodemend.domain.policy import ClusterPolicy, RulePolicy
from nodemend.domain.reasons import Reason
from tests.fakes.system import START
from tests.unit.application import run
from tests.unit.application.stage import (
    CLUSTER,
    CLUSTER_POLICY,
    Stage,
    after_every_crash,
    catalogue,
    enforce,
    node_name,
    samples,
    xid_finding,
    xid_labels,
)

MINUTE = 60


def announced(stage: Stage) -> list[Any]:
    """Return the details of the fault events so far."""
    return stage.events("GPU Fault Detected")


def deliver(stage: Stage, since: int = 0) -> list[str | None]:
    """Hand the fault events to open_incident, as bus and queue do; return what came of them."""
    opened = []
    for one in stage.bus.accepted[since:]:
        if one.detail_type.value == "GPU Fault Detected":
            envelope = FaultEnvelope.model_validate({"detail": one.detail, "version": "0"})
            models = [model.to_finding(CLUSTER) for model in envelope.detail.findings]
            opened.append(run.open_for(stage, *models))
    return opened


def test_a_healthy_fleet_is_silent_and_the_number_of_queries_is_that_of_the_rules() -> None:
    stage = Stage()

    result = run.scan(stage)

    rules = catalogue().of_family(Family.ECC)
    assert len(stage.metrics.asked) == len(rules)
    assert (result.clusters, result.findings, result.unknown_rules, result.announced) == (
        1,
        0,
        0,
        0,
    )
    assert stage.bus.accepted == []
    assert stage.telemetry.gauges["Scans", (("cluster", CLUSTER), ("family", "ecc"))] == [1]


def test_a_fault_is_announced_with_all_the_evidence_of_its_node() -> None:
    stage = Stage()
    stage.metrics.answer("xid-count", samples(xid_labels(1, 79, 3), xid_labels(2, 48, 0)))
    stage.metrics.answer("row-remap-failed", samples(xid_labels(1, None, 5)))

    result = run.scan(stage)

    assert (result.findings, result.announced) == (3, 2)
    by_node = {detail["findings"][0]["node_names"][0]: detail for detail in announced(stage)}
    assert [f["fault_class"] for f in by_node[node_name(1)]["findings"]] == [
        "xid",
        "row_remap_failed",
    ]
    first = by_node[node_name(1)]["findings"][0]
    assert (first["code"], first["verdict"], first["gpu_uuid"]) == (79, "fatal", "GPU-1-3")
    assert first["evidence"]["rule_id"] == "xid-count"
    assert "DCGM_EXP_XID_ERRORS_COUNT" in first["evidence"]["query"]
    assert datetime.fromisoformat(first["evidence"]["at"]) == START


def test_a_repeat_is_no_event_until_five_minutes_have_passed() -> None:
    stage = Stage()
    stage.metrics.answer("xid-count", samples(xid_labels(1, 79, 3)))

    counts = []
    for _ in range(11):
        run.scan(stage)
        counts.append(len(announced(stage)))
        stage.clock.advance(MINUTE)

    assert counts == [1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3]
    findings = stage.telemetry.gauges["Findings", (("cluster", CLUSTER),)]
    assert findings == [1] * 11
    assert len({detail["event_id"] for detail in announced(stage)}) == 3


def test_another_fault_on_the_same_node_is_news_at_once_and_fewer_are_none() -> None:
    stage = Stage()
    stage.metrics.answer("xid-count", samples(xid_labels(1, 79, 3)))
    run.scan(stage)
    stage.clock.advance(MINUTE)
    stage.metrics.answer("xid-count", samples(xid_labels(1, 79, 3), xid_labels(1, 48, 4)))
    run.scan(stage)
    assert len(announced(stage)) == 2

    stage.clock.advance(MINUTE)
    stage.metrics.answer("xid-count", samples(xid_labels(1, 48, 4)))
    run.scan(stage)
    assert len(announced(stage)) == 2


def test_one_nodes_repeat_does_not_hide_another_nodes_news() -> None:
    stage = Stage()
    stage.metrics.answer("xid-count", samples(xid_labels(1, 79, 3)))
    run.scan(stage)
    stage.metrics.answer("xid-count", samples(xid_labels(1, 79, 3), xid_labels(2, 79, 3)))
    run.scan(stage)

    assert [d["findings"][0]["node_names"][0] for d in announced(stage)] == [
        node_name(1),
        node_name(2),
    ]


@pytest.mark.case("D1")
@pytest.mark.parametrize("rule", ["xid-new", "xid-count"])
def test_d1_what_an_application_did_opens_no_case_however_long_it_sticks(rule: str) -> None:
    stage = Stage()
    labels = {**xid_labels(1, None, 3), "err_code": "31"}
    stage.metrics.answer(rule, samples(labels, value=31))
    for _ in range(60):
        run.scan(stage)
        stage.clock.advance(MINUTE)

    assert stage.bus.accepted == []
    assert stage.telemetry.gauges["Findings", (("cluster", CLUSTER),)] == [1] * 60


@pytest.mark.case("D1")
def test_d1_a_value_that_sticks_for_two_days_is_one_incident_at_most() -> None:
    stage = Stage()
    stage.metrics.answer("xid-new", samples({**xid_labels(1, None, 3), "err_code": "79"}, value=79))
    opened = set()
    for _ in range(48 * 4):
        seen = len(stage.bus.accepted)
        run.scan(stage)
        opened |= set(deliver(stage, seen))
        for incident in stage.incidents.list_open(CLUSTER):
            request = stage.request(incident.id)
            stage.dispatch_all(incident.id)
            if stage.holds_slot(incident.id):
                run.escalate(stage, request)
                run.close(stage, request)
        stage.clock.advance(15 * MINUTE)

    assert len(stage.incidents.records) == 1
    assert opened == {*stage.incidents.records, None}


@pytest.mark.case("D4")
def test_d4_ten_scans_of_one_occurrence_are_exactly_one_incident() -> None:
    stage = Stage()
    for poll in range(14):
        stage.metrics.clear()
        if 1 <= poll <= 10:
            stage.metrics.answer("xid-count", samples(xid_labels(1, 79, 3)))
        seen = len(stage.bus.accepted)
        run.scan(stage)
        deliver(stage, seen)
        stage.clock.advance(MINUTE)

    assert len(stage.incidents.records) == 1
    assert len(stage.events("Incident Opened")) == 1


@pytest.mark.case("D3")
def test_d3_the_code_that_matters_is_acted_on_though_another_hides_it_in_the_gauge() -> None:
    stage = Stage()
    stage.metrics.answer("xid-new", samples({**xid_labels(1, None, 3), "err_code": "45"}, value=45))
    stage.metrics.answer("xid-count", samples(xid_labels(1, 62, 3)))

    run.scan(stage)

    codes = [f["code"] for detail in announced(stage) for f in detail["findings"]]
    assert codes == [62]
    (opened,) = deliver(stage)
    assert opened is not None
    assert stage.incident(opened).primary is not None


@pytest.mark.case("D3")
def test_d3_the_clean_up_code_alone_leads_to_no_action() -> None:
    stage = Stage()
    stage.metrics.answer("xid-new", samples({**xid_labels(1, None, 3), "err_code": "45"}, value=45))

    run.scan(stage)

    assert stage.bus.accepted == []


@pytest.mark.case("D2")
def test_d2_the_code_in_the_label_counts_and_not_the_old_value() -> None:
    stage = Stage()
    stage.metrics.answer("xid-new", samples({**xid_labels(1, None, 3), "err_code": "79"}, value=31))
    run.scan(stage)
    assert announced(stage)[0]["findings"][0]["code"] == 79


@pytest.mark.case("D8")
def test_d8_seven_mig_rows_are_one_finding_of_one_gpu() -> None:
    stage = Stage()
    rows = [{**xid_labels(1, 79, 0), "GPU_I_ID": str(number)} for number in range(7)]
    stage.metrics.answer("xid-count", samples(*rows))

    assert run.scan(stage).findings == 1


@pytest.mark.case("D6")
@pytest.mark.parametrize("value", [9.223372036854776e18, 2147483632, float("nan")])
def test_d6_a_blank_is_no_temperature(value: float) -> None:
    stage = Stage()
    stage.metrics.answer("gpu-temperature", samples(xid_labels(1, None, 3), value=value))

    assert run.scan(stage, Family.THERMAL).findings == 0
    assert stage.bus.accepted == []


@pytest.mark.case("D12")
def test_d12_half_a_fleet_with_the_new_label_loses_no_node() -> None:
    stage = Stage()
    new = {"hostname": node_name(2), "UUID": "GPU-2-0", "gpu": "0", "xid": "79"}
    stage.metrics.answer("xid-count", samples(xid_labels(1, 79, 3), new))

    run.scan(stage)

    assert len(announced(stage)) == 2
    assert None not in deliver(stage)


def test_a_gpu_that_no_label_gives_a_node_is_reported_and_not_guessed() -> None:
    stage = Stage()
    stage.metrics.answer("xid-count", samples({"UUID": "GPU-x", "gpu": "0", "xid": "79"}))

    run.scan(stage)

    assert announced(stage)[0]["findings"][0]["node_names"] == []
    assert deliver(stage) == [None]
    assert stage.events("Incident Rejected")[0]["reason"]["code"] == "unresolved_node"


# --- unknown --------------------------------------------------------------------------------------


@pytest.mark.case("D32")
def test_d32_a_rule_that_cannot_be_judged_is_said_once_and_nothing_else_is_announced() -> None:
    stage = Stage()
    stage.metrics.answer(
        "xid-count",
        lambda at: QueryResult(
            samples=samples(xid_labels(1, 79, 3))(at).samples,
            problem=Reason("amp_timeout", "422: query timed out - consider simplifying"),
        ),
    )
    for _ in range(10):
        assert run.scan(stage).unknown_rules == 1
        stage.clock.advance(MINUTE)

    assert announced(stage) == []
    blind = stage.events("Scan Blind")
    assert len(blind) == 1
    assert (blind[0]["cause"], blind[0]["family"]) == ("answer", "ecc")
    (rule,) = blind[0]["rules"]
    assert rule["rule_id"] == "xid-count"
    assert rule["reason"] == {
        "code": "amp_timeout",
        "text": "422: query timed out - consider simplifying",
    }
    unknown = ("RulesUnknown", (("cluster", CLUSTER), ("family", "ecc")))
    assert stage.telemetry.gauges[unknown] == [1] * 10


@pytest.mark.case("D32")
def test_d32_blind_again_after_sight_and_blind_for_another_reason_are_news() -> None:
    stage = Stage()
    stage.metrics.fail("amp_timeout", matches="xid-count")
    run.scan(stage)
    stage.metrics.clear()
    run.scan(stage)
    stage.metrics.fail("amp_timeout", matches="xid-count")
    run.scan(stage)
    stage.metrics.fail("amp_throttled", matches="xid-count")
    run.scan(stage)

    codes = [event["rules"][0]["reason"]["code"] for event in stage.events("Scan Blind")]
    assert codes == ["amp_timeout", "amp_timeout", "amp_throttled"]


def test_what_one_rule_cannot_tell_does_not_hide_what_the_others_see() -> None:
    stage = Stage()
    stage.metrics.answer("xid-count", samples(xid_labels(1, 79, 3)))
    stage.metrics.fail(matches="gpu-lost")

    result = run.scan(stage)

    assert (result.findings, result.unknown_rules, result.announced) == (1, 1, 2)


# --- policy ---------------------------------------------------------------------------------------


def test_a_rule_that_the_policy_switches_off_is_not_asked() -> None:
    stage = Stage(policy=enforce(rules={"xid-count": RulePolicy(is_enabled=False)}))
    run.scan(stage)
    assert "xid-count" not in {asked.key for asked in stage.metrics.asked}


def test_thresholds_of_the_policy_and_the_clusters_matcher_are_in_the_query() -> None:
    shared = ClusterPolicy(CLUSTER, "ws-1", "eu-central-1", matcher='cluster="gpu-prod"')
    rules = {"gpu-temperature": RulePolicy(thresholds={"celsius": 81.5})}
    stage = Stage(policy=enforce(clusters=(shared,), rules=rules))

    run.scan(stage, Family.THERMAL)

    query = stage.metrics.asked[0].query
    assert "+ 81.5" in query
    assert query.count('cluster="gpu-prod"') == query.count("__name__=~") > 1


def test_without_a_cluster_there_is_nothing_to_scan() -> None:
    assert run.scan(Stage(policy=enforce(clusters=()))).clusters == 0


def test_an_invalid_policy_stops_the_scan() -> None:
    stage = Stage()
    stage.policies.problem = "invalid"
    with pytest.raises(PolicyInvalidError):
        run.scan(stage)


def test_every_cluster_is_asked_in_its_own_workspace() -> None:
    other = ClusterPolicy("other", "ws-2", "us-east-1")
    stage = Stage(policy=enforce(clusters=(CLUSTER_POLICY, other)))

    assert run.scan(stage).clusters == 2
    assert {asked.cluster for asked in stage.metrics.asked} == {CLUSTER, "other"}


# --- the bus --------------------------------------------------------------------------------------


def test_an_event_that_was_not_accepted_is_sent_by_the_next_scan() -> None:
    stage = Stage()
    stage.metrics.answer("xid-count", samples(xid_labels(1, 79, 3), xid_labels(2, 79, 3)))
    original = stage.bus.announce

    def announce(announcements: Any) -> Any:
        stage.bus.refused = {announcements[0].event_id}
        return original(announcements)

    stage.bus.announce = announce  # type: ignore[method-assign]
    run.scan(stage)
    assert len(announced(stage)) == 1
    stage.bus.announce = original  # type: ignore[method-assign]
    stage.bus.refused = set()
    stage.clock.advance(MINUTE)
    run.scan(stage)

    assert [d["findings"][0]["node_names"][0] for d in announced(stage)] == [
        node_name(2),
        node_name(1),
    ]


def test_a_bus_that_is_gone_fails_the_scan_and_nothing_is_remembered() -> None:
    stage = Stage()
    stage.metrics.answer("xid-count", samples(xid_labels(1, 79, 3)))
    stage.bus.gone = AwsUnavailableError("no answer")
    with pytest.raises(AwsUnavailableError):
        run.scan(stage)
    stage.bus.gone = None

    run.scan(stage)
    assert len(announced(stage)) == 1


def test_a_scan_survives_a_crash_at_every_call_with_the_same_event_ids() -> None:
    def build() -> tuple[Stage, Callable[[], Any]]:
        stage = Stage()
        stage.metrics.answer("xid-count", samples(xid_labels(1, 79, 3)))
        stage.metrics.fail(matches="gpu-lost")
        return stage, lambda: run.scan(stage)

    def check(stage: Stage, result: Any) -> None:
        assert len({detail["event_id"] for detail in announced(stage)}) == 1
        assert len({detail["event_id"] for detail in stage.events("Scan Blind")}) == 1

    assert after_every_crash(build, check) == 5


def test_what_is_remembered_is_forgotten_with_its_time() -> None:
    stage = Stage()
    stage.metrics.answer("xid-count", samples(xid_labels(1, 79, 3)))
    run.scan(stage)
    stage.clock.at += timedelta(days=3)
    run.scan(stage)
    assert len(announced(stage)) == 2


def test_a_finding_comes_through_the_event_as_it_was() -> None:
    stage = Stage()
    stage.metrics.answer("xid-count", samples(xid_labels(1, 79, 3)))
    run.scan(stage)

    (incident_id,) = deliver(stage)

    assert incident_id is not None
    (finding,) = stage.incident(incident_id).findings
    assert finding.key == xid_finding().key
    assert finding.fault_class is FaultClass.XID
    assert finding.evidence.at == START
