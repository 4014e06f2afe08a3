"""What nodemend tells the world: one event per change, never one per poll."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from nodemend.domain.reasons import Reason


class DetailType(StrEnum):
    """EventBridge detail-types, each with a schema in `events/schemas/`."""

    GPU_FAULT_DETECTED = "GPU Fault Detected"
    SCAN_BLIND = "Scan Blind"
    SCAN_SILENT = "Scan Silent"
    CORDON_LEFT = "Cordon Left"
    FLEET_GUARD_CHANGED = "Fleet Guard Changed"
    INCIDENT_OPENED = "Incident Opened"
    INCIDENT_WAITING = "Incident Waiting"
    INCIDENT_ADMITTED = "Incident Admitted"
    INCIDENT_REJECTED = "Incident Rejected"
    INCIDENT_OVERDUE = "Incident Overdue"
    INCIDENT_ESCALATED = "Incident Escalated"
    INCIDENT_CLOSED = "Incident Closed"
    FAULT_VERIFIED = "Fault Verified"
    APPROVAL_REQUESTED = "Approval Requested"
    APPROVAL_ANSWERED = "Approval Answered"
    NODE_CORDONED = "Node Cordoned"
    DRAIN_PROGRESS = "Drain Progress"
    NODE_DRAINED = "Node Drained"
    REPAIR_STARTED = "Repair Started"
    REPAIR_PROVEN = "Repair Proven"
    NODE_RELEASED = "Node Released"


@dataclass(frozen=True, slots=True)
class IncidentEvent:
    """One entry of an incident's outbox.

    `event_id` is made with the state change that causes the event and never changes, however
    often the event is sent.
    """

    event_id: str
    detail_type: DetailType
    at: datetime
    step: str
    dry_run: bool
    reason: Reason
    outcome: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    """What the detail-type adds; `contracts/events.py` has a model for each."""
