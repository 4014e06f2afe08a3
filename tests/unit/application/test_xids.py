"""What an XID leads to, from the sample to the end of its incident, by code and GPU."""

from dataclasses import replace
from datetime import timedelta

import pytest

from nodemend.contracts.events import FaultEnvelope
from nodemend.domain.faults import FaultClass, Rung, Verdict
from nodemend.domain.incidents import Outcome
from tests.unit.application import run
from tests.unit.application.stage import CLUSTER, Stage, node_name, samples, xid_labels

H200 = "NVIDIA H200"
B200 = "NVIDIA-B200"
GB200 = "NVIDIA GB200"


def seen(code: int, model: str = "", gpu: int = 3) -> dict[str, str]:
    """Labels of the exporter's window count for an XID of a GPU of that model."""
    return {**xid_labels(1, code, gpu), **({"modelName": model} if model else {})}


def pipeline(stage: Stage) -> None:
    """Scan, deliver the events of this scan as bus and queue do, and dispatch."""
    before = len(stage.bus.accepted)
    run.scan(stage)
    for one in stage.bus.accepted[before:]:
        if one.detail_type.value == "GPU Fault Detected":
            detail = FaultEnvelope.model_validate({"detail": one.detail, "version": "0"}).detail
            run.open_for(stage, *(model.to_finding(CLUSTER) for model in detail.findings))
    stage.dispatch_all()


def outcomes(stage: Stage) -> list[tuple[Outcome | None, str]]:
    incidents = [stage.incident(incident_id) for incident_id in stage.incidents.records]
    return [(one.outcome, one.reason.code if one.reason else "") for one in incidents]


def for_an_hour(stage: Stage) -> None:
    for _ in range(60):
        pipeline(stage)
        stage.clock.advance(60)


@pytest.mark.parametrize(
    ("code", "model"),
    [
        (500, H200),
        (999, ""),
        (1023, GB200),
        (47, H200),  # unused since Ampere; GPUd reboots for it
        (81, B200),  # unused; GPUd replaces
        (74, B200),  # of NVLink up to Hopper
        (136, B200),
        (145, H200),  # of NVLink from Blackwell on
        (155, "NVIDIA A100-SXM4-40GB"),
        (173, H200),
        (74, "NVIDIA L40S"),
        (63, H200),  # EKS replaces
        (94, H200),
        (121, GB200),  # GPUd reboots
        (142, GB200),  # EKS replaces, NVSentinel drains
        (154, B200),
        (167, B200),
    ],
)
def test_a_code_that_is_no_proof_is_reported_once_and_touches_nothing(
    code: int, model: str
) -> None:
    stage = Stage()
    stage.metrics.answer("xid-count", samples(seen(code, model)))

    for_an_hour(stage)

    assert outcomes(stage) == [(Outcome.OBSERVED, "suspect_only")]
    assert len(stage.events("Incident Opened")) == len(stage.events("Incident Closed")) == 1
    assert stage.mutations() == []
    assert stage.executions.started == []


@pytest.mark.parametrize(
    ("code", "model", "first"),
    [
        (74, H200, Rung.REBOOT),
        (74, "A100-SXM4-80GB", Rung.REBOOT),
        (136, H200, Rung.REBOOT),
        (155, B200, Rung.REBOOT),
        (110, H200, Rung.REBOOT),
        (110, "", Rung.REBOOT),  # the label was dropped: a GPU that reports the code has it
        (173, GB200, Rung.REBOOT),
        (54, B200, Rung.REPLACE),
        (64, "", Rung.REPLACE),
        (79, "NVIDIA L40S", Rung.REPLACE),
        (95, "", Rung.REBOOT),
        (109, H200, Rung.REBOOT),
        (119, B200, Rung.REBOOT),
        (120, GB200, Rung.REBOOT),
        (171, H200, Rung.REBOOT),
    ],
)
def test_a_code_that_is_proof_on_this_gpu_is_acted_on(code: int, model: str, first: Rung) -> None:
    stage = Stage()
    stage.metrics.answer("xid-count", samples(seen(code, model)))

    pipeline(stage)

    (incident_id,) = stage.executions.started
    incident = stage.incident(incident_id)
    assert incident.primary is not None
    assert (incident.primary.code, incident.primary.verdict) == (code, Verdict.FATAL)
    assert incident.plan[0] is first


@pytest.mark.parametrize("code", [13, 31, 43, 45])
@pytest.mark.parametrize("model", ["", H200, B200, GB200])
def test_what_a_job_did_is_counted_and_not_even_reported(code: int, model: str) -> None:
    stage = Stage()
    stage.metrics.answer("xid-count", samples(seen(code, model)))

    for_an_hour(stage)

    assert stage.bus.accepted == []
    assert stage.incidents.records == {}
    assert stage.telemetry.gauges["Findings", (("cluster", CLUSTER),)] == [1] * 60


@pytest.mark.case("D23")
@pytest.mark.parametrize("cause", [48, 64, 79, 95, 140])
def test_d23_xid_45_beside_its_cause_is_an_echo_and_the_cause_decides(cause: int) -> None:
    stage = Stage()
    stage.metrics.answer("xid-count", samples(seen(45, H200), seen(cause, H200), seen(43, H200)))

    pipeline(stage)

    (incident_id,) = stage.executions.started
    incident = stage.incident(incident_id)
    assert [finding.code for finding in incident.findings] == [cause]
    assert f"XID {cause} " in incident.fault_text


@pytest.mark.case("D3")
def test_d3_xid_45_alone_is_noted_once_a_scan_as_a_code_without_its_cause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def noted() -> list[str]:
        caplog.clear()
        with caplog.at_level("INFO"):
            run.scan(stage)
        return [one.getMessage() for one in caplog.records if "XID 45 alone" in one.getMessage()]

    stage = Stage(nodes=80)
    crash = [xid_labels(number, 45, gpu) for number in range(1, 78) for gpu in (0, 1)]
    stage.metrics.answer("xid-count", samples(*crash))
    (line,) = noted()
    assert "on 77 nodes" in line
    assert "the primary XID is unknown" in line
    assert len(line) < 500

    for cause in (31, 79, 500):
        stage.metrics.answer("xid-count", samples(xid_labels(1, 45, 3), xid_labels(1, cause, 3)))
        assert noted() == []
    stage.metrics.answer("xid-count", samples(xid_labels(1, 45, 3)))
    assert len(noted()) == 1
    stage.metrics.answer("gpu-lost", samples(xid_labels(1, None, 3), value=40))
    assert noted() == []


@pytest.mark.case("R71")
@pytest.mark.parametrize(("code", "incidents"), [(31, 0), (119, 1), (63, 1)])
def test_r71_a_code_that_sticks_for_six_days_is_one_occurrence_at_most(
    code: int, incidents: int
) -> None:
    """Even if the query took the level for an occurrence, the node would be handled once a boot."""
    stage = Stage()
    stage.metrics.answer("xid-new", samples({**xid_labels(1, None, 3), "err_code": str(code)}))
    for _ in range(6 * 24):
        pipeline(stage)
        for incident in stage.incidents.list_open(CLUSTER):
            request = stage.request(incident.id)
            run.escalate(stage, request)
            run.close(stage, request)
        stage.clock.at += timedelta(hours=1)

    assert len(stage.incidents.records) == incidents
    assert stage.mutations() == []


@pytest.mark.case("R72")
def test_r72_the_clean_up_code_hides_the_cause_and_the_lost_gpu_is_found_by_its_absence() -> None:
    stage = Stage()
    stage.metrics.answer("xid-new", samples({**xid_labels(1, None, 5), "err_code": "45"}, value=45))
    pipeline(stage)
    assert stage.executions.started == []
    assert stage.bus.accepted == []

    stage.metrics.answer("gpu-lost", samples(xid_labels(1, None, 5), value=40))
    # The kubelet misses the GPU, too: rows alone may be missing for the exporter's own reasons.
    stage.cluster.change_node(node_name(1), lambda node: replace(node, gpu_allocatable=7))
    pipeline(stage)

    (incident_id,) = stage.executions.started
    assert [one.fault_class for one in stage.incident(incident_id).findings] == [
        FaultClass.GPU_LOST
    ]


@pytest.mark.case("R83")
@pytest.mark.parametrize("code", range(144, 151))
def test_r83_a_code_of_nvlink_5_needs_a_second_signal(code: int) -> None:
    alone = Stage()
    alone.metrics.answer("xid-count", samples(seen(code, GB200)))
    pipeline(alone)
    assert outcomes(alone) == [(Outcome.OBSERVED, "suspect_only")]
    assert alone.executions.started == []

    beside = Stage()
    beside.metrics.answer("xid-count", samples(seen(code, GB200)))
    beside.metrics.answer("row-remap-failed", samples(xid_labels(1, None, 3)))
    pipeline(beside)
    (incident_id,) = beside.executions.started
    incident = beside.incident(incident_id)
    assert {finding.code for finding in incident.findings} == {None, code}
    assert incident.fault_class is FaultClass.ROW_REMAP_FAILED


@pytest.mark.case("R87")
@pytest.mark.parametrize("model", ["", H200, GB200])
def test_r87_xid_154_says_that_the_recovery_action_changed_and_not_to_what(model: str) -> None:
    """It may have changed back to none: the action itself is a metric (field 1523)."""
    stage = Stage()
    stage.metrics.answer("xid-count", samples(seen(154, model), seen(95, model)))
    pipeline(stage)

    (incident_id,) = stage.executions.started
    incident = stage.incident(incident_id)
    assert incident.primary is not None
    assert incident.primary.code == 95
    assert {finding.code for finding in incident.findings} == {95, 154}


@pytest.mark.case("R81")
def test_r81_a_node_that_has_just_booted_is_left_alone_whatever_its_codes_say() -> None:
    stage = Stage()
    stage.cluster.change_node(
        node_name(1),
        lambda node: replace(node, created_at=stage.clock.now() - timedelta(minutes=4)),
    )
    stage.metrics.answer("xid-count", samples(seen(119, H200), seen(145, H200)))

    for _ in range(25):  # within the start-up grace
        pipeline(stage)
        stage.clock.advance(60)

    assert outcomes(stage) == [(Outcome.SKIPPED, "warm_up")]
    assert stage.mutations() == []
    assert stage.executions.started == []
