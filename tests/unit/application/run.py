"""Runs each step of the state machine on a stage."""

from collections.abc import Callable, Mapping
from typing import Any

from nodemend.application.admit_remediation import admit_remediation
from nodemend.application.check_repair import check_repair
from nodemend.application.close_incident import close_incident
from nodemend.application.cordon_node import cordon_node
from nodemend.application.drain_node import drain_node
from nodemend.application.escalate_incident import escalate_incident
from nodemend.application.open_incident import open_incident
from nodemend.application.release_node import release_node
from nodemend.application.request_approval import request_approval
from nodemend.application.scan_gpu_health import scan_gpu_health
from nodemend.application.start_repair import start_repair
from nodemend.application.validate_node import validate_node
from nodemend.application.verify_fault import verify_fault
from nodemend.application.watch_incidents import watch_incidents
from nodemend.contracts.events import GpuFaultDetected
from nodemend.contracts.evidence import FindingModel
from nodemend.contracts.scan import ScanGpuHealthRequest
from nodemend.contracts.steps import (
    AdmitRemediationRequest,
    CheckRepairRequest,
    CloseIncidentRequest,
    CordonNodeRequest,
    DrainNodeRequest,
    EscalateIncidentRequest,
    ReleaseNodeRequest,
    RequestApprovalRequest,
    StartRepairRequest,
    ValidateNodeRequest,
    VerifyFaultRequest,
)
from nodemend.contracts.watch import WatchIncidentsRequest
from nodemend.domain.faults import Family
from nodemend.domain.findings import Finding
from tests.unit.application.stage import CLUSTER, Request, Stage, node_name

HAND = {
    "cluster": CLUSTER,
    "node": node_name(1),
    "reason": "the job said so",
    "requested_by": "alice",
}
BY_HAND = Request("hand-1", "arn:aws:states:eu-central-1:1:execution:m:hand-1")

Step = Callable[[Stage, Request], Any]


def admit(stage: Stage, request: Request, given: object = None) -> Any:
    """Run AdmitRemediation, with the dispatcher's input if none is given."""
    document = given or {"schema_version": 1, "incident_id": request.incident_id}
    return admit_remediation(
        AdmitRemediationRequest.model_validate(
            {
                "execution": {"arn": request.arn, "name": request.incident_id},
                "input": document,
            }
        ),
        ports=stage.dispatch,
    )


def verify(stage: Stage, request: Request) -> Any:
    """Run VerifyFault."""
    return verify_fault(VerifyFaultRequest(**request.fields), ports=stage.verify)


def approve(stage: Stage, request: Request, before: str = "cordon") -> Any:
    """Run ApproveCordon, or ApproveRepair."""
    fields = {**request.fields, "before": before}
    return request_approval(RequestApprovalRequest.model_validate(fields), ports=stage.verify)


def cordon(stage: Stage, request: Request) -> Any:
    """Run CordonNode."""
    return cordon_node(CordonNodeRequest(**request.fields), ports=stage.step)


def drain(stage: Stage, request: Request) -> Any:
    """Run one slice of DrainNode."""
    return drain_node(DrainNodeRequest(**request.fields), ports=stage.step)


def start(stage: Stage, request: Request) -> Any:
    """Run StartRepair."""
    return start_repair(StartRepairRequest(**request.fields), ports=stage.repair)


def check(stage: Stage, request: Request) -> Any:
    """Run CheckRepair."""
    return check_repair(CheckRepairRequest(**request.fields), ports=stage.repair)


def validate(stage: Stage, request: Request) -> Any:
    """Run ValidateNode."""
    return validate_node(ValidateNodeRequest(**request.fields), ports=stage.verify)


def release(stage: Stage, request: Request) -> Any:
    """Run ReleaseNode."""
    return release_node(ReleaseNodeRequest(**request.fields), ports=stage.step)


def escalate(stage: Stage, request: Request, error: str = "ValueError", cause: str = "no") -> Any:
    """Run EscalateIncident with what a Catch caught."""
    fields = {**request.fields, "failure": {"Error": error, "Cause": cause}}
    return escalate_incident(EscalateIncidentRequest.model_validate(fields), ports=stage.step)


def close(stage: Stage, request: Request, error: str = "", cause: str = "") -> Any:
    """Run CloseIncident, with a caught error if one is given."""
    state = {"failure": {"Error": error, "Cause": cause}} if error else {"incident_id": "x"}
    fields = {**request.fields, "state": state}
    return close_incident(CloseIncidentRequest.model_validate(fields), ports=stage.close)


def watch(stage: Stage, incident_id: str = "", status: str = "FAILED") -> Any:
    """Run the watchdog: for one ended execution, or on its schedule."""
    ended = None
    if incident_id:
        ended = {
            "executionArn": stage.executions.arn_of(incident_id),
            "name": incident_id,
            "status": status,
        }
    return watch_incidents(
        WatchIncidentsRequest.model_validate({"ended": ended}), ports=stage.watch
    )


def fault_event(stage: Stage, *findings: Finding, cluster: str = CLUSTER) -> GpuFaultDetected:
    """The event that a scan announces for findings of one node."""
    return GpuFaultDetected(
        event_id="e-1",
        occurred_at=stage.clock.now(),
        cluster=cluster,
        family=Family.ECC,
        findings=tuple(FindingModel.of(finding) for finding in findings),
    )


def open_for(stage: Stage, *findings: Finding) -> str | None:
    """Run open_incident for findings of one node."""
    return open_incident(fault_event(stage, *findings), ports=stage.open)


def scan(stage: Stage, family: Family = Family.ECC) -> Any:
    """Run one scan."""
    return scan_gpu_health(ScanGpuHealthRequest(family=family), ports=stage.scan)


STEPS: Mapping[str, Step] = {
    "verify_fault": verify,
    "request_approval": approve,
    "cordon_node": cordon,
    "drain_node": drain,
    "start_repair": start,
    "check_repair": check,
    "validate_node": validate,
    "release_node": release,
    "escalate_incident": escalate,
}
"""The steps that load the incident and need to own it; close_incident has rules of its own."""
