"""Incidents and findings for tests: a plain one, and one with everything in it."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from nodemend.contracts.evidence import FindingModel
from nodemend.domain.events import DetailType
from nodemend.domain.faults import FaultClass, FaultKind, Mode, Rung, Verdict
from nodemend.domain.findings import Evidence, Finding
from nodemend.domain.history import PastIncident
from nodemend.domain.incidents import (
    Answer,
    ApprovalRecord,
    CordonRecord,
    DrainRecord,
    Incident,
    IncidentState,
    Origin,
    Outcome,
    RepairRecord,
    TimelineEntry,
    record,
)
from nodemend.domain.nodes import NodeRef
from nodemend.domain.policy import ApprovalPoint, ApprovalPolicy
from nodemend.domain.reasons import Reason
from tests.fakes.system import START

CLUSTER = "train-a"
NODE = NodeRef(
    cluster=CLUSTER,
    name="ip-10-0-1-5.eu-central-1.compute.internal",
    uid="6f1c1d0e-6a51-4a0b-9e32-0d5b8f6f2a11",
    instance_id="i-0aaaaaaaaaaaaaaa1",
    boot_id="3f0c2f6e-9d5d-4c39-8f0f-0a4d9a6d0b77",
)


def finding(value: float = 79.0, gpu: str = "3", **changes: Any) -> Finding:
    """Return an XID finding of one GPU."""
    values: dict[str, Any] = {
        "cluster": CLUSTER,
        "node_names": (NODE.name,),
        "fault_class": FaultClass.XID,
        "verdict": Verdict.FATAL,
        "kind": FaultKind.EVENT,
        "evidence": Evidence("xid", 'DCGM_FI_DEV_XID_ERRORS{gpu="3"} > 0', value, START),
        "gpu_uuid": f"GPU-0000000{gpu}-1111-2222-3333-444444444444",
        "gpu_index": gpu,
        "code": 79,
        "summary": f"GPU {gpu} has fallen off the bus (XID 79)",
    }
    return Finding(**(values | changes))


def waiting(
    incident_id: str = "01TEST00000000000000000001",
    *,
    opened_at: datetime = START,
    **changes: Any,
) -> Incident:
    """Return an incident that was just opened by a scan, with its opening event."""
    values: dict[str, Any] = {
        "id": incident_id,
        "cluster": CLUSTER,
        "node": NODE,
        "origin": Origin.SCAN,
        "opened_at": opened_at,
        "state": IncidentState.WAITING,
        "state_since": opened_at,
        "findings": (finding(),),
    }
    incident = Incident(**(values | changes))
    return record(
        incident,
        DetailType.INCIDENT_OPENED,
        step="open_incident",
        reason=Reason("xid", incident.fault_text),
        now=opened_at,
        data={
            "origin": incident.origin,
            "findings": tuple(FindingModel.of(one) for one in incident.findings),
        },
    )


def full(incident_id: str = "01TEST0000000000000000FULL") -> Incident:
    """Return an incident in which no field has its default (and no event is new)."""
    later = START + timedelta(minutes=7, microseconds=123456)
    reason = Reason("capacity_guard", "1 of at most 1 node is unavailable: é, ⚠, 日本")
    return replace(
        waiting(incident_id),
        origin=Origin.HAND,
        state=IncidentState.VALIDATING,
        state_since=later,
        findings=(
            finding(
                evidence=Evidence(
                    "ecc", "max(x) > $t", 0.30000000000000004, later, {"gpu": "3", "Hostname": "n"}
                ),
            ),
            finding(9.223372036854776e18, gpu="4"),
            finding(-1e-9, gpu="5", code=None),
        ),
        node_labels={"nodepool": "h100", "team": ""},
        requested_by="alice",
        request_reason="the job said so",
        mode=Mode.ENFORCE,
        policy_version="v7",
        plan=(Rung.REPLACE, Rung.HUMAN),
        rung_index=1,
        group="asg-h100",
        expected_gpus=8,
        execution_arn="arn:aws:states:eu-central-1:123456789012:execution:m:" + incident_id,
        verify_attempts=2,
        verify_since=later,
        approval_policy=ApprovalPolicy(ApprovalPoint.REPAIR, (Rung.REPLACE,), 60),
        approval=ApprovalRecord(
            number=2,
            before=ApprovalPoint.REPAIR,
            rungs=(Rung.REPLACE,),
            asked_at=START,
            until=later,
            answer=Answer(is_yes=True, by="alice", why="é", at=later),
            polls=3,
            rechecks=1,
        ),
        release_for=(Outcome.SKIPPED, reason),
        cordon=CordonRecord(later, was_unschedulable=True, had_scale_down_disabled="true"),
        drain=DrainRecord(
            started_at=later,
            slices=3,
            evicted={"uid-1": "ns/pod-1"},
            attempts={"uid-1": 2},
            blocked={"ns/pod-2": "budget ns/pdb allows none"},
            gone=1,
            unconfirmed=("ns/pod-3",),
            is_drained=True,
        ),
        repair=RepairRecord(
            rung=Rung.REPLACE,
            group="asg-h100",
            before=("i-0aaaaaaaaaaaaaaa1", "i-0aaaaaaaaaaaaaaa2"),
            desired_before=2,
            intended_at=later,
            started_at=later,
            replacement_instance_id="i-0bbbbbbbbbbbbbbb1",
            replacement_node=replace(NODE, uid="new", instance_id="i-0bbbbbbbbbbbbbbb1"),
            clean_since=later,
            polls=4,
            last_problem="not_ready",
            boot_id_before=NODE.boot_id,
            heartbeat_before=START,
            asks=2,
            is_unanswered=True,
            rebooted_node=replace(NODE, boot_id="boot-2"),
            cordon_lost_at=later,
            cordon_restored_at=later,
        ),
        attempts=(RepairRecord(Rung.REBOOT, "asg-h100", (), 2, later, started_at=later, asks=1),),
        history=(
            PastIncident(
                incident_id="01TEST0000000000000000PAST",
                at=START - timedelta(days=3),
                fault="xid 119",
                outcome="REBOOTED",
                instance_id=NODE.instance_id,
                gpu_uuids=("GPU-1",),
                rungs=(Rung.REBOOT,),
            ),
        ),
        verdict=(Outcome.REPLACED, reason),
        outcome=Outcome.REPLACED,
        reason=reason,
        closed_at=later,
        waiting_for="capacity_guard",
        first_seen={"xid": later},
        last_seen=later,
        sequence=9,
        timeline=(TimelineEntry(later, "drain_node", "Drain Progress", reason),),
        new_events=(),
    )
