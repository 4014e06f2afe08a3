"""The details of nodemend's EventBridge events, one model per detail-type.

`events/schemas/` is generated from these (`make schemas`). Contracts are additive for one release:
new fields have defaults, and none is renamed.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from nodemend.contracts.evidence import (
    EventModel,
    FindingModel,
    NodeRefModel,
    PastIncidentModel,
    ReasonModel,
)
from nodemend.domain.alerts import Alert
from nodemend.domain.errors import InvalidInputError
from nodemend.domain.events import DetailType, IncidentEvent
from nodemend.domain.guard import GuardEvent
from nodemend.domain.incidents import Incident

SOURCE = "nodemend"
"""EventBridge `source` of every event."""

MAX_EVENT_BYTES = 64 * 1024
MAX_LISTED = 50
"""Lists in events are cut here; the count beside them stays exact."""


class EventDetail(EventModel):
    """What every event carries."""

    schema_version: Literal[1] = 1
    event_id: str = Field(description="Stable: a resent event has the same id.")
    occurred_at: datetime
    cluster: str


class GpuFaultDetected(EventDetail):
    """A scan, or an alert's look, found faults on one node; all its evidence is here."""

    DETAIL_TYPE: ClassVar[DetailType] = DetailType.GPU_FAULT_DETECTED

    family: str = Field(description="Whose rules: ecc, thermal or utilization.")
    origin: Literal["scan", "alert"] = Field(
        default="scan", description="What made nodemend ask AMP."
    )
    findings: tuple[FindingModel, ...] = Field(min_length=1)


class MetricSeen(EventModel):
    """A metric that a rule needs, and how many have it."""

    names: tuple[str, ...] = Field(description="Its names; an exporter prints one of them.")
    seen: int = Field(description="How many GPUs (Neuron: instances) have it.")
    total: int = Field(description="How many have any metric of this kind.")


class RuleProblem(EventModel):
    """A rule that could not be judged, and why."""

    rule_id: str = Field(
        description="For cause rule_groups: AMP's group, or group/rule. For cause coverage it may "
        "be label-uuid or label-node: labels without which rules are blind."
    )
    reason: ReasonModel
    metrics: tuple[MetricSeen, ...] = Field(
        default=(), description="What is missing, for cause coverage."
    )
    nodes: tuple[str, ...] = Field(
        default=(), description="Some nodes that lack it while others have it; at most 5."
    )
    expected: bool = Field(
        default=False, description="Some hardware does not have it: told, and no alarm."
    )


class ScanBlind(EventDetail):
    """A scan could not judge some of its rules: unknown is neither healthy nor sick."""

    DETAIL_TYPE: ClassVar[DetailType] = DetailType.SCAN_BLIND

    cause: Literal["answer", "coverage", "rule_groups"] = Field(
        default="answer",
        description="answer: AMP gave no usable one. coverage: the metrics are not exported. "
        "rule_groups: AMP does not evaluate the recording rules.",
    )
    family: str = Field(
        default="", description="Which scan, for cause answer; the others are about all scans."
    )
    rules: tuple[RuleProblem, ...] = Field(min_length=1)


class ScanSilent(EventDetail):
    """A family was not scanned for several intervals, or is scanned again."""

    DETAIL_TYPE: ClassVar[DetailType] = DetailType.SCAN_SILENT

    family: str
    is_silent: bool = Field(description="false: a scan was completed again.")
    last_scan_at: datetime | None = Field(
        default=None, description="The last completed scan; absent if none was ever seen."
    )


class CordonLeft(EventDetail):
    """A node carries a cordon of ours that nothing takes off any more: a person must decide."""

    DETAIL_TYPE: ClassVar[DetailType] = DetailType.CORDON_LEFT

    node: NodeRefModel
    owner: str = Field(default="", description="The incident that the node's annotation names.")
    reason: ReasonModel
    remedy: str = Field(default="", description="What a person must do now.")


class FleetGuardChanged(EventDetail):
    """What stops a whole cluster has changed: the breaker, or a person's pause."""

    DETAIL_TYPE: ClassVar[DetailType] = DetailType.FLEET_GUARD_CHANGED

    change: Literal["breaker_opened", "breaker_closed", "paused", "resumed"]
    severity: Literal["critical", "info"] = Field(
        description="critical: the breaker opened; somebody should look at the signal now."
    )
    reason: ReasonModel
    requested_by: str = Field(default="", description="Who paused or resumed.")
    group: str = Field(
        default="",
        description="The Auto Scaling group whose own breaker it is; empty: the cluster's.",
    )
    fault: str = Field(default="", description="What many nodes share: thermal, xid/79.")
    rule_id: str = Field(default="", description="The rule that found it.")
    count: int = Field(default=0, description="How many nodes.")
    bound: int = Field(default=0, description="The policy's bound at that time.")
    desired: int = Field(default=0, description="How many nodes there should be.")
    nodes: tuple[str, ...] = Field(default=(), description="Their names, at most 50.")
    holds_until: datetime | None = Field(
        default=None, description="Not before this; later if the cause lasts."
    )


class IncidentDetail(EventDetail):
    """What every event about an incident carries."""

    incident_id: str
    node: NodeRefModel
    step: str
    dry_run: bool
    outcome: str | None = None
    reason: ReasonModel
    fault_class: str


class IncidentOpened(IncidentDetail):
    """An incident was recorded; nothing was done yet."""

    DETAIL_TYPE: ClassVar[DetailType] = DetailType.INCIDENT_OPENED

    origin: str
    requested_by: str = ""
    findings: tuple[FindingModel, ...] = ()
    record: tuple[PastIncidentModel, ...] = Field(
        default=(), description="Earlier incidents of this machine and its GPUs, newest first."
    )


class IncidentWaiting(IncidentDetail):
    """The incident waits for room; the reason says which limit decided."""

    DETAIL_TYPE: ClassVar[DetailType] = DetailType.INCIDENT_WAITING


class IncidentAdmitted(IncidentDetail):
    """The incident holds a slot, and its plan is fixed."""

    DETAIL_TYPE: ClassVar[DetailType] = DetailType.INCIDENT_ADMITTED

    mode: str
    plan: tuple[str, ...]
    group: str = ""
    policy_version: str
    approval: str = Field(
        default="",
        description="Before what a person's yes is asked for: cordon, repair; empty: never.",
    )


class AlertModel(EventModel):
    """An alert, as it was sent; a claim, not evidence."""

    name: str
    fingerprint: str = ""
    starts_at: datetime | None = None
    labels: dict[str, str] = Field(default_factory=dict)

    @classmethod
    def of(cls, alert: Alert) -> "AlertModel":
        """Build from the domain's value."""
        return cls(
            name=alert.name,
            fingerprint=alert.fingerprint,
            starts_at=alert.starts_at,
            labels=dict(alert.labels),
        )


class IncidentRejected(IncidentDetail):
    """A request, a finding or an alert led to no remediation; the reason says why."""

    DETAIL_TYPE: ClassVar[DetailType] = DetailType.INCIDENT_REJECTED

    findings: tuple[FindingModel, ...] = ()
    alerts: tuple[AlertModel, ...] = Field(
        default=(), description="Alerts that AMP did not confirm, at most 50."
    )
    alert_count: int = 0


class IncidentOverdue(IncidentDetail):
    """An open incident has been in its state for longer than it should."""

    DETAIL_TYPE: ClassVar[DetailType] = DetailType.INCIDENT_OVERDUE

    state: str
    since: datetime = Field(description="When it came into the state.")
    remedy: str = Field(default="", description="What a person must do now.")


class FaultVerified(IncidentDetail):
    """The second look: the fault was confirmed."""

    DETAIL_TYPE: ClassVar[DetailType] = DetailType.FAULT_VERIFIED

    findings: tuple[FindingModel, ...] = ()


class ApprovalRequested(IncidentDetail):
    """A person is asked whether it may go on; nothing is done until one says yes."""

    DETAIL_TYPE: ClassVar[DetailType] = DetailType.APPROVAL_REQUESTED

    number: int = Field(description="Which request of the incident, from 1.")
    before: str = Field(description="cordon or repair.")
    rung: str = Field(description="The repair that comes next; an answer may name it.")
    rungs: tuple[str, ...] = Field(description="All repairs that a yes allows, in order.")
    question: str = Field(description="What is asked, as a sentence.")
    evidence: str = Field(description="What was seen, in one line.")
    until: datetime = Field(description="After this the answer is no.")
    findings: tuple[FindingModel, ...] = ()


class ApprovalAnswered(IncidentDetail):
    """The answer to a request; `expired`: nobody gave one."""

    DETAIL_TYPE: ClassVar[DetailType] = DetailType.APPROVAL_ANSWERED

    number: int
    before: str
    rungs: tuple[str, ...]
    answer: Literal["yes", "no", "expired"]
    answered_by: str = ""
    why: str = ""


class NodeCordoned(IncidentDetail):
    """The node takes no new pods; in a dry run, what the patch would be."""

    DETAIL_TYPE: ClassVar[DetailType] = DetailType.NODE_CORDONED

    was_unschedulable: bool
    evict: tuple[str, ...] = Field(default=(), description="Pods that the drain will evict.")
    evict_count: int = 0
    skip: tuple[str, ...] = Field(default=(), description="Pods that stay, each with the reason.")
    skip_count: int = 0


class Block(EventModel):
    """A pod that cannot be evicted now, and what holds it."""

    pod: str
    verdict: str
    cause: str
    budgets: tuple[str, ...] = ()
    can_never_allow: bool = Field(
        default=False, description="The budget can never allow an eviction as it stands."
    )


class DrainProgress(IncidentDetail):
    """What the drain waits for has changed."""

    DETAIL_TYPE: ClassVar[DetailType] = DetailType.DRAIN_PROGRESS

    blocked: tuple[Block, ...]
    blocked_count: int


class NodeDrained(IncidentDetail):
    """No pod is left that the drain had to move."""

    DETAIL_TYPE: ClassVar[DetailType] = DetailType.NODE_DRAINED

    evicted_count: int
    slices: int
    drained_unconfirmed: tuple[str, ...] = Field(
        default=(), description="Pods of an unreachable node that no kubelet could confirm."
    )
    would_evict: tuple[str, ...] = Field(default=(), description="Dry run only.")
    blocked: tuple[Block, ...] = Field(
        default=(), description="Dry run only: budgets without room."
    )


class RepairStarted(IncidentDetail):
    """The repair was asked for; an answer of 200 is no proof of it."""

    DETAIL_TYPE: ClassVar[DetailType] = DetailType.REPAIR_STARTED

    rung: str
    group: str
    desired_before: int
    attempt: int = Field(default=1, description="Which repair of the incident, from 1.")


class RepairProven(IncidentDetail):
    """The repaired node works: Ready, its GPUs allocatable, metrics clean for the hold-down.

    After a replacement it is the new instance's node, after a reboot the node itself on a new boot.
    """

    DETAIL_TYPE: ClassVar[DetailType] = DetailType.REPAIR_PROVEN

    rung: str
    replacement: NodeRefModel | None = None
    gpus: int = 0
    boot_id: str = Field(default="", description="After a reboot: the new boot.")
    failed_pods: int = Field(
        default=0,
        description="After a reboot: pods of the node that have failed, most of them because they "
        "were admitted before the device plugin was up.",
    )


class NodeReleased(IncidentDetail):
    """The node is as it was before the cordon, or gone."""

    DETAIL_TYPE: ClassVar[DetailType] = DetailType.NODE_RELEASED

    is_uncordoned: bool = Field(
        description="The node takes pods again; false: it is gone, or was cordoned before us."
    )


class IncidentEscalated(IncidentDetail):
    """A step failed for good, and this decides what comes next."""

    DETAIL_TYPE: ClassVar[DetailType] = DetailType.INCIDENT_ESCALATED

    error: str = ""
    next_rung: str = Field(default="human", description="What is tried now: replace, or human.")


class IncidentClosed(IncidentDetail):
    """The end, with its outcome."""

    DETAIL_TYPE: ClassVar[DetailType] = DetailType.INCIDENT_CLOSED

    replacement: NodeRefModel | None = None
    remedy: str = Field(default="", description="What a person must do now; empty: nothing.")
    record: tuple[PastIncidentModel, ...] = Field(
        default=(), description="Earlier incidents of this machine and its GPUs, newest first."
    )


EVENT_MODELS: Mapping[DetailType, type[EventDetail]] = {
    DetailType.GPU_FAULT_DETECTED: GpuFaultDetected,
    DetailType.SCAN_BLIND: ScanBlind,
    DetailType.SCAN_SILENT: ScanSilent,
    DetailType.CORDON_LEFT: CordonLeft,
    DetailType.FLEET_GUARD_CHANGED: FleetGuardChanged,
    DetailType.INCIDENT_OPENED: IncidentOpened,
    DetailType.INCIDENT_WAITING: IncidentWaiting,
    DetailType.INCIDENT_ADMITTED: IncidentAdmitted,
    DetailType.INCIDENT_REJECTED: IncidentRejected,
    DetailType.INCIDENT_OVERDUE: IncidentOverdue,
    DetailType.INCIDENT_ESCALATED: IncidentEscalated,
    DetailType.INCIDENT_CLOSED: IncidentClosed,
    DetailType.FAULT_VERIFIED: FaultVerified,
    DetailType.APPROVAL_REQUESTED: ApprovalRequested,
    DetailType.APPROVAL_ANSWERED: ApprovalAnswered,
    DetailType.NODE_CORDONED: NodeCordoned,
    DetailType.DRAIN_PROGRESS: DrainProgress,
    DetailType.NODE_DRAINED: NodeDrained,
    DetailType.REPAIR_STARTED: RepairStarted,
    DetailType.REPAIR_PROVEN: RepairProven,
    DetailType.NODE_RELEASED: NodeReleased,
}


def guard_detail(cluster: str, event: GuardEvent) -> dict[str, Any]:
    """Return the JSON-ready detail of a guard's event."""
    detail = FleetGuardChanged.model_validate(
        {
            "event_id": event.event_id,
            "occurred_at": event.at,
            "cluster": cluster,
            "change": event.change,
            "severity": "critical" if event.change == "breaker_opened" else "info",
            "reason": ReasonModel.of(event.reason),
            **event.data,
        }
    )
    return detail.model_dump(mode="json", exclude_none=True)


def incident_detail(incident: Incident, event: IncidentEvent) -> dict[str, Any]:
    """Return the JSON-ready detail of an incident's event.

    Raises:
        InvalidInputError: if `event.data` does not fit the detail-type's model; that is a
            programming error, and better found here than by a consumer.
    """
    model = EVENT_MODELS[event.detail_type]
    unknown = sorted(set(event.data) - set(model.model_fields))
    if unknown:
        raise InvalidInputError(
            f"events.{event.detail_type}.{unknown[0]}",
            "is no field of the event",
            "fix the step that records the event",
        )
    try:
        detail = model.model_validate(
            {
                "event_id": event.event_id,
                "occurred_at": event.at,
                "cluster": incident.cluster,
                "incident_id": incident.id,
                "node": NodeRefModel.of(incident.node),
                "step": event.step,
                "dry_run": event.dry_run,
                "outcome": event.outcome,
                "reason": ReasonModel.of(event.reason),
                "fault_class": incident.fault_class,
                **event.data,
            }
        )
    except ValueError as error:
        raise InvalidInputError(
            f"events.{event.detail_type}", str(error), "fix the step that records the event"
        ) from error
    return detail.model_dump(mode="json", exclude_none=True)


class FaultEnvelope(BaseModel):
    """EventBridge's envelope of a "GPU Fault Detected", as the fault queue delivers it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    detail: GpuFaultDetected
