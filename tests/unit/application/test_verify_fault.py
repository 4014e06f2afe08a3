"""The second look: is the fault there, on this machine, and can it be repaired here?"""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from nodemend.application.ports import QueryResult
from nodemend.domain.capacity import AutoScalingGroup
from nodemend.domain.faults import FaultClass, FaultKind, Mode, Verdict
from nodemend.domain.findings import Evidence, Finding
from nodemend.domain.incidents import IncidentState, Origin, Outcome
from nodemend.domain.nodes import Taint
from nodemend.domain.policy import ClusterPolicy, Deadlines, RulePolicy
from nodemend.domain.reasons import Reason
from tests.fakes.system import START
from tests.unit.application import run
from tests.unit.application.stage import (
    CLUSTER,
    GROUP,
    Request,
    Stage,
    after_every_crash,
    enforce,
    instance_id,
    lost_finding,
    node_name,
    samples,
    temperature_finding,
    times_sent,
    xid_finding,
    xid_labels,
)


def verifying(*findings: Finding, **policy: Any) -> tuple[Stage, Request]:
    """A stage with an incident that is to be verified."""
    stage = Stage(policy=enforce(**policy))
    request = stage.put(IncidentState.VERIFYING, findings=findings or (xid_finding(),))
    return stage, request


def ends(stage: Stage, request: Request, outcome: Outcome, code: str) -> Reason:
    """Verify, and assert that this is the decided end; return its reason."""
    assert run.verify(stage, request).next == "close"
    verdict = stage.incident(request.incident_id).verdict
    assert verdict is not None
    assert (verdict[0], verdict[1].code) == (outcome, code)
    assert stage.mutations() == []
    return verdict[1]


# --- events ---------------------------------------------------------------------------------------


def test_an_event_is_confirmed_at_the_time_of_its_evidence() -> None:
    stage, request = verifying()
    stage.metrics.answer(
        "xid-count",
        lambda at: samples(xid_labels(1, 79, 3))(at) if at == START else QueryResult(),
    )
    stage.clock.advance(400)  # the exporter's window has forgotten it by now

    assert run.verify(stage, request).next == "cordon"

    assert {asked.at for asked in stage.metrics.asked} == {START}
    incident = stage.incident(request.incident_id)
    assert incident.state is IncidentState.CORDONING
    verified = stage.events("Fault Verified")
    assert [finding["code"] for finding in verified[0]["findings"]] == [79]
    assert verified[0]["reason"]["code"] == "confirmed"


def test_an_event_that_amp_does_not_show_is_not_confirmed() -> None:
    stage, request = verifying()

    reason = ends(stage, request, Outcome.SKIPPED, "not_confirmed")

    assert "AMP does not show XID 79 on GPU 3 at 2026-05-01T10:00:00" in reason.text


@pytest.mark.parametrize(
    "seen",
    [xid_labels(1, 79, 4), xid_labels(2, 79, 3) | {"UUID": "GPU-1-3"}, xid_labels(1, 48, 3)],
    ids=["another gpu", "another node", "another code"],
)
def test_an_event_of_something_else_confirms_nothing(seen: dict[str, str]) -> None:
    stage, request = verifying()
    stage.metrics.answer("xid-count", samples(seen))

    ends(stage, request, Outcome.SKIPPED, "not_confirmed")


def test_only_a_new_boot_ends_an_event() -> None:
    stage, request = verifying()
    stage.metrics.answer("xid-count", samples(xid_labels(1, 79, 3)))
    stage.cluster.change_node(
        node_name(1), lambda node: replace(node, ref=replace(node.ref, boot_id="boot-new"))
    )

    reason = ends(stage, request, Outcome.RECOVERED, "rebooted")

    assert "has booted since XID 79 on GPU 3" in reason.text
    assert stage.metrics.asked == []


def reboot(stage: Stage, boot_id: str = "boot-new") -> None:
    """Let the stage's first node boot."""
    stage.cluster.change_node(
        node_name(1), lambda node: replace(node, ref=replace(node.ref, boot_id=boot_id))
    )


def test_after_a_reboot_evidence_of_before_it_opens_no_incident_for_the_new_boot() -> None:
    stage, request = verifying()
    reboot(stage)
    ends(stage, request, Outcome.RECOVERED, "rebooted")
    run.close(stage, request)

    # The exporter's window and the queue still hold what happened before the boot.
    for passed_s in (60, 14 * 60 - 1):
        stage.clock.advance(passed_s)
        assert run.open_for(stage, finding_now(stage, xid_finding())) is None
    # Another fault of the new boot is one, and after a quarter of an hour this one is, too.
    assert run.open_for(stage, finding_now(stage, xid_finding(code=48))) is not None
    stage.incidents.open_by_node.clear()
    stage.clock.advance(61)
    assert run.open_for(stage, finding_now(stage, xid_finding())) is not None


def test_after_a_reboot_that_is_not_the_reason_of_the_end_old_evidence_opens_nothing_either() -> (
    None
):
    stage, request = verifying(lost_finding(), xid_finding())
    stage.metrics.answer("gpu", samples({}, value=1))
    reboot(stage)
    ends(stage, request, Outcome.RECOVERED, "rebooted")
    run.close(stage, request)
    stage.clock.advance(60)

    assert run.open_for(stage, finding_now(stage, xid_finding())) is None


def test_a_rehearsal_of_a_reboot_keeps_no_real_incident_back() -> None:
    stage, request = verifying(mode=Mode.DRY_RUN)
    reboot(stage)
    ends(stage, request, Outcome.RECOVERED, "rebooted")
    run.close(stage, request)
    stage.policies.policy = enforce(version="v2")

    assert run.open_for(stage, finding_now(stage, xid_finding())) is not None


def test_a_boot_id_that_is_not_known_is_no_new_boot() -> None:
    stage, request = verifying()
    stage.metrics.answer("xid-count", samples(xid_labels(1, 79, 3)))
    reboot(stage, "")

    assert run.verify(stage, request).next == "wait"
    reboot(stage, "boot-1")
    assert run.verify(stage, request).next == "cordon"


@pytest.mark.case("R26")
def test_r26_an_event_of_a_node_that_was_found_by_instance_id_is_confirmed_by_it() -> None:
    labels = {"instance_id": instance_id(1), "UUID": "GPU-1-3", "gpu": "3", "xid": "79"}
    finding = xid_finding(
        node_names=(instance_id(1),), evidence=Evidence("xid-count", "q", 1, START, labels)
    )
    stage, request = verifying(finding)
    stage.metrics.answer("xid-count", samples(labels))

    assert run.verify(stage, request).next == "cordon"


# --- levels ---------------------------------------------------------------------------------------


def test_a_level_is_read_again_now() -> None:
    stage, request = verifying(temperature_finding())
    stage.metrics.answer("gpu-temperature", samples(xid_labels(1, None, 3), value=96))
    stage.clock.advance(300)

    assert run.verify(stage, request).next == "cordon"
    assert {asked.at for asked in stage.metrics.asked} == {stage.clock.now()}


def test_a_level_that_holds_no_more_while_the_gpu_reports_is_recovered() -> None:
    stage, request = verifying(temperature_finding())
    stage.metrics.answer("gpu", samples({}, value=1))

    reason = ends(stage, request, Outcome.RECOVERED, "recovered")

    assert "GPU 3 is hot" in reason.text


def test_a_level_whose_gpu_is_silent_is_unknown_and_waits() -> None:
    stage, request = verifying(temperature_finding())

    result = run.verify(stage, request)

    assert (result.next, result.wait_s) == ("wait", 20)
    assert stage.mutations() == []


def test_a_lost_gpu_is_confirmed_by_its_absence_while_the_node_reports() -> None:
    stage, request = verifying(lost_finding())
    stage.metrics.answer("node", samples({}, value=7))

    assert run.verify(stage, request).next == "cordon"


def test_a_lost_gpu_of_a_node_that_is_silent_altogether_is_unknown() -> None:
    stage, request = verifying(lost_finding())
    stage.metrics.answer("node", samples({}, value=0))

    assert run.verify(stage, request).next == "wait"


def test_presence_is_asked_for_this_gpu_on_this_node_of_this_cluster_only() -> None:
    policy = ClusterPolicy(CLUSTER, "ws-1", "eu-central-1", matcher='cluster="gpu-prod"')
    stage, request = verifying(lost_finding(), clusters=(policy,))

    run.verify(stage, request)

    queries = {asked.key: asked.query for asked in stage.metrics.asked}
    assert 'UUID="GPU-1-3"' in queries["gpu"]
    assert f'Hostname="{node_name(1)}"' in queries["node"]
    # Two clusters of one workspace may both have a node of this name.
    assert 'cluster="gpu-prod"' in queries["gpu"]
    assert 'cluster="gpu-prod"' in queries["node"]


def test_a_gpu_without_uuid_is_asked_for_by_node_and_index() -> None:
    labels = {"Hostname": node_name(1), "gpu": "3"}
    finding = lost_finding(gpu_uuid="", evidence=Evidence("gpu-lost", "q", 40, START, labels))
    stage, request = verifying(finding)

    run.verify(stage, request)

    query = next(asked.query for asked in stage.metrics.asked if asked.key == "gpu")
    assert f'Hostname="{node_name(1)}",gpu="3"' in query


# --- unknown --------------------------------------------------------------------------------------


@pytest.mark.case("D32")
@pytest.mark.parametrize("code", ["amp_timeout", "amp_partial", "amp_forbidden"])
@pytest.mark.parametrize("finding", [xid_finding(), temperature_finding()], ids=["event", "level"])
def test_d32_unknown_waits_with_growing_waits_and_is_skipped_at_the_deadline(
    finding: Finding, code: str
) -> None:
    stage, request = verifying(finding, deadlines=Deadlines(verify_s=600))
    stage.metrics.fail(code)

    waits = []
    while (result := run.verify(stage, request)).next == "wait":
        waits.append(result.wait_s)
        stage.clock.advance(result.wait_s)

    assert waits == [20, 60, 300, 300]
    verdict = stage.incident(request.incident_id).verdict
    assert verdict is not None
    assert (verdict[0], verdict[1].code) == (Outcome.SKIPPED, "unverifiable")
    assert code in verdict[1].text
    assert stage.mutations() == []
    assert run.close(stage, request).outcome == "SKIPPED"
    assert not stage.holds_slot(request.incident_id)
    # It was never judged, so the next scan may open it again.
    assert run.open_for(stage, finding_now(stage, finding)) is not None


def finding_now(stage: Stage, finding: Finding) -> Finding:
    """The finding as a later scan sees it."""
    return replace(finding, evidence=replace(finding.evidence, at=stage.clock.now()))


def test_what_is_known_again_before_the_deadline_is_confirmed() -> None:
    stage, request = verifying()
    stage.metrics.answer("xid-count", samples(xid_labels(1, 79, 3)))
    stage.metrics.answer("xid-count", QueryResult(problem=Reason("amp_timeout", "422")), times=2)

    assert [run.verify(stage, request).next for _ in range(3)] == ["wait", "wait", "cordon"]


def test_an_unknown_presence_is_unknown() -> None:
    stage, request = verifying(temperature_finding())
    stage.metrics.fail("amp_throttled", matches="count(")

    assert run.verify(stage, request).next == "wait"


def test_a_rule_that_is_gone_from_the_catalogue_can_judge_nothing() -> None:
    for finding in (
        xid_finding(evidence=Evidence("retired", "q", 1, START)),
        temperature_finding(evidence=Evidence("retired", "q", 1, START)),
    ):
        stage, request = verifying(finding)
        assert run.verify(stage, request).next == "wait"
        stage.clock.advance(600)
        reason = ends(stage, request, Outcome.SKIPPED, "unverifiable")
        assert "retired" in reason.text


@pytest.mark.parametrize("finding", [xid_finding(), temperature_finding()], ids=["event", "level"])
def test_a_rule_that_the_policy_switched_off_in_flight_proves_no_recovery(
    finding: Finding,
) -> None:
    stage, request = verifying(finding)
    stage.policies.policy = enforce(rules={finding.evidence.rule_id: RulePolicy(is_enabled=False)})
    stage.metrics.answer("gpu", samples({}, value=1))

    assert run.verify(stage, request).next == "wait"
    stage.clock.advance(600)
    assert "switched off" in ends(stage, request, Outcome.SKIPPED, "unverifiable").text


# --- several faults -------------------------------------------------------------------------------


def test_one_fault_that_has_gone_says_nothing_of_the_others() -> None:
    late = xid_finding(evidence=Evidence("xid-count", "q", 1, START + timedelta(seconds=30)))
    stage, request = verifying(lost_finding(), late)
    stage.metrics.answer("gpu", samples({}, value=1))  # the lost GPU is back
    stage.metrics.answer("xid-count", samples(xid_labels(1, 79, 3)))

    assert run.verify(stage, request).next == "cordon"
    assert stage.events("Fault Verified")[0]["findings"][0]["fault_class"] == "xid"


def test_a_fault_that_is_unknown_keeps_the_incident_open_though_another_has_gone() -> None:
    stage, request = verifying(lost_finding(), xid_finding())
    stage.metrics.answer("gpu", samples({}, value=1))
    stage.metrics.fail(matches="xid-count")

    assert run.verify(stage, request).next == "wait"


def test_faults_that_have_all_gone_end_with_the_most_urgent_ones_reason() -> None:
    stage, request = verifying(lost_finding(), temperature_finding())
    stage.metrics.answer("gpu", samples({}, value=1))

    reason = ends(stage, request, Outcome.RECOVERED, "recovered")

    assert "reports nothing" in reason.text


@pytest.mark.parametrize("code", [31, 63], ids=["application", "suspect"])
def test_what_was_announced_as_fatal_is_judged_by_the_catalogues_own_verdict(code: int) -> None:
    stage, request = verifying(xid_finding(code=code, verdict=Verdict.FATAL))
    stage.metrics.answer("xid-count", samples(xid_labels(1, code, 3)))

    reason = ends(stage, request, Outcome.SKIPPED, "not_confirmed")

    assert "as a fault to act on" in reason.text


@pytest.mark.parametrize(
    "change",
    [
        {"fault_class": FaultClass.ECC_UNCORRECTABLE},
        {"fault_class": FaultClass.XID, "code": 79},
        {"kind": FaultKind.EVENT},
    ],
    ids=["another class", "an xid", "another kind"],
)
def test_an_announced_fault_that_its_rule_is_not_about_is_never_confirmed(
    change: dict[str, Any],
) -> None:
    stage, request = verifying(lost_finding(**change))
    stage.metrics.answer("gpu-lost", samples(xid_labels(1, None, 3)))
    stage.metrics.answer("node", samples({}, value=7))

    assert run.verify(stage, request).next == "wait"
    stage.clock.advance(600)
    assert "gpu-lost" in ends(stage, request, Outcome.SKIPPED, "unverifiable").text


def test_all_rules_of_one_time_are_asked_together() -> None:
    later = Evidence("xid-count", "q", 1, START + timedelta(seconds=30), xid_labels(1, 48, 2))
    stage, request = verifying(
        xid_finding(),
        xid_finding(code=62, evidence=Evidence("xid-new", "q", 1, START, xid_labels(1, 62, 4))),
        xid_finding(code=48, evidence=later),
        lost_finding(),
        temperature_finding(),
    )
    stage.clock.advance(300)
    stage.metrics.fail()
    stage.crasher.arm(None)

    assert run.verify(stage, request).next == "wait"

    assert stage.crasher.calls.count("metrics.query_many") == 3
    asked = sorted((one.at, one.key) for one in stage.metrics.asked)
    assert asked == [
        (START, "xid-count"),
        (START, "xid-new"),
        (later.at, "xid-count"),
        (stage.clock.now(), "gpu-lost"),
        (stage.clock.now(), "gpu-temperature"),
    ]


def test_a_label_from_outside_cannot_change_what_is_asked() -> None:
    uuid = 'GPU-1"} or vector(1) or x{a="\\'
    labels = {"Hostname": node_name(1), "UUID": uuid, "gpu": "3"}
    finding = lost_finding(gpu_uuid=uuid, evidence=Evidence("gpu-lost", "q", 40, START, labels))
    stage, request = verifying(finding)

    run.verify(stage, request)

    query = next(asked.query for asked in stage.metrics.asked if asked.key == "gpu")
    assert r'''UUID="GPU-1\"} or vector(1) or x{a=\"\\"''' in query


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 9.223372036854776e18], ids=str)
def test_a_presence_that_is_no_number_proves_no_recovery(value: float) -> None:
    stage, request = verifying(temperature_finding())
    stage.metrics.answer("gpu", samples({}, value=value))

    assert run.verify(stage, request).next == "wait"


def test_a_suspicion_alone_is_never_confirmed() -> None:
    stage, request = verifying()
    stage.save(request.incident_id, findings=(xid_finding(verdict=Verdict.SUSPECT),))
    stage.metrics.answer("xid-count", samples(xid_labels(1, 79, 3)))

    assert run.verify(stage, request).next == "wait"


# --- by hand, rails, capacity ---------------------------------------------------------------------


def by_hand(stage: Stage, request: Request, **changes: Any) -> None:
    """Make the incident one that a person has asked for."""
    values = {"origin": Origin.HAND, "requested_by": "alice", "request_reason": "noise"}
    stage.save(request.incident_id, **(values | changes))


def test_by_hand_the_metrics_are_reported_and_decide_nothing() -> None:
    stage, request = verifying()
    by_hand(stage, request, findings=())
    stage.metrics.fail(matches="gpu-lost")
    stage.metrics.answer("xid-count", samples(xid_labels(1, 48, 2), xid_labels(2, 79, 1)))

    assert run.verify(stage, request).next == "cordon"

    verified = stage.events("Fault Verified")[0]
    assert verified["reason"]["text"] == "requested by alice: noise"
    assert [finding["code"] for finding in verified["findings"]] == [48]


def test_by_hand_what_a_scan_attaches_does_not_replace_the_persons_word() -> None:
    stage, request = verifying()
    by_hand(stage, request, findings=(xid_finding(code=63, verdict=Verdict.SUSPECT),))

    assert run.verify(stage, request).next == "cordon"
    assert stage.events("Fault Verified")[0]["fault_class"] == "manual"


@pytest.mark.parametrize(
    "change",
    [
        {"is_deleting": True},
        {"taints": (Taint("ToBeDeletedByClusterAutoscaler", "NoSchedule", "1"),)},
        {"taints": (Taint("karpenter.sh/disrupted", "NoSchedule"),)},
    ],
    ids=["deleting", "cluster-autoscaler", "karpenter"],
)
def test_somebody_elses_work_on_the_node_is_left_alone(change: dict[str, Any]) -> None:
    stage, request = verifying()
    stage.metrics.answer("xid-count", samples(xid_labels(1, 79, 3)))
    stage.cluster.change_node(node_name(1), lambda node: replace(node, **change))

    ends(stage, request, Outcome.SKIPPED, "other_remediator")


@pytest.mark.case("R65")
@pytest.mark.parametrize("process", ["Launch", "Terminate"])
def test_r65_a_suspended_group_is_found_before_the_cordon(process: str) -> None:
    stage, request = verifying()
    stage.metrics.answer("xid-count", samples(xid_labels(1, 79, 3)))
    suspend(stage, process)

    reason = ends(stage, request, Outcome.NEEDS_HUMAN, "asg_suspended")

    assert process in reason.text
    assert stage.metrics.asked == []
    assert len(stage.events("Incident Escalated")) == 1
    run.close(stage, request)
    assert "Resume the processes" in stage.events("Incident Closed")[0]["remedy"]


def suspend(stage: Stage, *processes: str) -> None:
    """Suspend processes of the stage's group."""
    group = stage.capacity.fleet(ClusterPolicy(CLUSTER, "", "")).groups[GROUP]
    stage.capacity.add_group(CLUSTER, replace(group, suspended=frozenset(processes)))


def test_an_instance_that_leaves_its_group_is_somebody_elses_business() -> None:
    stage, request = verifying()
    stage.capacity.set_state(CLUSTER, instance_id(1), "Standby")

    assert (
        "is Standby in gpu-a" in ends(stage, request, Outcome.NEEDS_HUMAN, "other_remediator").text
    )


def test_a_group_that_somebody_else_works_on_is_left_to_them() -> None:
    stage, request = verifying()
    stage.metrics.answer("xid-count", samples(xid_labels(1, 79, 3)))
    stage.capacity.other[GROUP] = "instance refresh r-1 of group gpu-a is InProgress"

    reason = ends(stage, request, Outcome.SKIPPED, "other_remediator")

    assert reason.text == "instance refresh r-1 of group gpu-a is InProgress"
    assert stage.mutations() == []


@pytest.mark.parametrize(
    ("labels", "group", "code"),
    [
        ({}, "", "capacity_kind_unsupported"),
        ({"karpenter.sh/nodepool": "gpu"}, GROUP, "capacity_kind_unsupported"),
        ({"eks.amazonaws.com/nodegroup": "mng"}, "", "group_unknown"),
        ({"eks.amazonaws.com/nodegroup": "mng"}, "gone", "group_unknown"),
    ],
)
def test_capacity_that_cannot_be_replaced_is_found_before_the_cordon(
    labels: dict[str, str], group: str, code: str
) -> None:
    stage, request = verifying()
    stage.save(request.incident_id, group=group)
    stage.cluster.change_node(node_name(1), lambda node: replace(node, labels=labels))

    ends(stage, request, Outcome.NEEDS_HUMAN, code)


def test_in_a_dry_run_what_cannot_be_replaced_needs_nobody() -> None:
    stage, request = verifying(mode=Mode.DRY_RUN)
    suspend(stage, "Launch")

    ends(stage, request, Outcome.SKIPPED, "asg_suspended")


def test_where_the_policy_stops_at_the_cordon_the_capacity_does_not_matter() -> None:
    stage, request = verifying(mode=Mode.CORDON_ONLY)
    stage.metrics.answer("xid-count", samples(xid_labels(1, 79, 3)))
    stage.capacity.add_group(
        CLUSTER, AutoScalingGroup(GROUP, 4, 0, 4, suspended=frozenset({"Launch"}))
    )

    assert run.verify(stage, request).next == "cordon"


def test_verification_survives_a_crash_at_every_call() -> None:
    def build() -> tuple[Stage, Callable[[], Any]]:
        stage, request = verifying()
        stage.metrics.answer("xid-count", samples(xid_labels(1, 79, 3)))
        return stage, lambda: run.verify(stage, request)

    def check(stage: Stage, result: Any) -> None:
        assert result.next == "cordon"
        stage.outbox.publish_pending()
        assert times_sent(stage) == {"Fault Verified": 1}

    assert after_every_crash(build, check) >= 7
