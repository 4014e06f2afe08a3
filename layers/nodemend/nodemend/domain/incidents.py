"""The life of an incident: one remediation of one node, from detection to close.

An incident is a value; every change is a pure function that returns the next one together with
the events that the change causes. The store writes both in one conditional write.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from nodemend.domain.errors import IllegalTransitionError, SupersededError
from nodemend.domain.events import DetailType, IncidentEvent
from nodemend.domain.faults import FaultClass, FaultKind, Mode, Rung
from nodemend.domain.findings import OCCURRENCE_VALID, Finding, add_findings, most_severe
from nodemend.domain.history import PastIncident
from nodemend.domain.nodes import NodeRef
from nodemend.domain.policy import ApprovalPoint, ApprovalPolicy, ClusterPolicy, Deadlines, Waits
from nodemend.domain.reasons import Reason

TIMELINE_LIMIT = 200
"""Entries kept in the record; a DynamoDB item holds 400 KB. The newest always stay."""


class IncidentState(StrEnum):
    """Where an incident is; the state machine's steps, and the two ends."""

    WAITING = "waiting"
    ADMITTED = "admitted"
    VERIFYING = "verifying"
    APPROVING = "approving"
    CORDONING = "cordoning"
    DRAINING = "draining"
    REPAIRING = "repairing"
    CHECKING = "checking"
    VALIDATING = "validating"
    RELEASING = "releasing"
    ESCALATING = "escalating"
    CLOSED = "closed"


_S = IncidentState
_ENDS = (_S.ESCALATING, _S.CLOSED)

TRANSITIONS: Mapping[IncidentState, frozenset[IncidentState]] = {
    _S.WAITING: frozenset({_S.ADMITTED, *_ENDS}),
    _S.ADMITTED: frozenset({_S.VERIFYING, _S.WAITING, *_ENDS}),
    _S.VERIFYING: frozenset({_S.APPROVING, _S.CORDONING, _S.RELEASING, *_ENDS}),
    _S.APPROVING: frozenset({_S.CORDONING, _S.REPAIRING, _S.RELEASING, *_ENDS}),
    _S.CORDONING: frozenset({_S.DRAINING, _S.RELEASING, *_ENDS}),
    _S.DRAINING: frozenset({_S.REPAIRING, _S.RELEASING, *_ENDS}),
    _S.REPAIRING: frozenset({_S.APPROVING, _S.CHECKING, _S.RELEASING, *_ENDS}),
    _S.CHECKING: frozenset({_S.VALIDATING, _S.REPAIRING, _S.RELEASING, *_ENDS}),
    _S.VALIDATING: frozenset({_S.RELEASING, _S.REPAIRING, *_ENDS}),
    _S.RELEASING: frozenset({*_ENDS}),
    _S.ESCALATING: frozenset({_S.REPAIRING, _S.RELEASING, _S.CLOSED}),
    _S.CLOSED: frozenset(),
}
"""The one table of legal moves. Staying in a state is always legal (a step that is repeated)."""

TOUCHES_NODE = frozenset(
    {_S.CORDONING, _S.DRAINING, _S.REPAIRING, _S.CHECKING, _S.VALIDATING, _S.RELEASING}
)
"""States in which the node may carry our cordon; in APPROVING it may if the cordon is recorded."""


class Outcome(StrEnum):
    """How an incident ended."""

    REPLACED = "REPLACED"
    REBOOTED = "REBOOTED"
    RECOVERED = "RECOVERED"
    OBSERVED = "OBSERVED"
    SKIPPED = "SKIPPED"
    SUPERSEDED = "SUPERSEDED"
    ABORTED_BY_OPERATOR = "ABORTED_BY_OPERATOR"
    NEEDS_HUMAN = "NEEDS_HUMAN"


class Origin(StrEnum):
    """What started the incident."""

    SCAN = "scan"
    ALERT = "alert"
    HAND = "hand"


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """One line of what happened, for people."""

    at: datetime
    step: str
    what: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class CordonRecord:
    """What the cordon found and changed, so that release can restore exactly that."""

    at: datetime
    was_unschedulable: bool
    had_scale_down_disabled: str | None = None
    """The annotation's value before us; None: it was not there."""


@dataclass(frozen=True, slots=True)
class DrainRecord:
    """How far a drain has come; slices are separate invocations and know only this."""

    started_at: datetime
    slices: int = 0
    evicted: Mapping[str, str] = field(default_factory=dict)
    """`namespace/name` by uid of each pod whose eviction was accepted."""
    attempts: Mapping[str, int] = field(default_factory=dict)
    """Eviction calls by uid."""
    blocked: Mapping[str, str] = field(default_factory=dict)
    """What blocks each pod (`namespace/name`) now; the same block is reported once."""
    gone: int = 0
    unconfirmed: tuple[str, ...] = ()
    is_drained: bool = False


@dataclass(frozen=True, slots=True)
class RepairRecord:
    """The repair's write-ahead note: stored before the call, so that a retry can observe."""

    rung: Rung
    group: str
    before: tuple[str, ...]
    """Members of the group before the call; the replacement is none of these."""
    desired_before: int
    intended_at: datetime
    started_at: datetime | None = None
    replacement_instance_id: str = ""
    replacement_node: NodeRef | None = None
    clean_since: datetime | None = None
    """Since when validation has found nothing; reset by every finding or unknown."""
    polls: int = 0
    last_problem: str = ""
    """Code of what the last poll waited for: equal problems are reported once."""
    boot_id_before: str = ""
    """A reboot is proven by another one, never by the empty id that a kubelet posts early."""
    heartbeat_before: datetime | None = None
    asks: int = 0
    """Calls of the reboot that were noted: two at most, see `is_unanswered`."""
    is_unanswered: bool = False
    """Whether EC2 took the call is not known. It is made again only if nothing is seen of it."""
    rebooted_node: NodeRef | None = None
    """The node on its new boot."""
    cordon_lost_at: datetime | None = None
    cordon_restored_at: datetime | None = None
    """Once only: a cordon that is lost again was taken off by somebody who means it."""

    @property
    def subject(self) -> NodeRef | None:
        """The node that has to prove the repair: the replacement, or the rebooted node itself."""
        return self.rebooted_node if self.rung is Rung.REBOOT else self.replacement_node


@dataclass(frozen=True, slots=True)
class Answer:
    """What a person said to a request."""

    is_yes: bool
    by: str
    why: str
    at: datetime


@dataclass(frozen=True, slots=True)
class ApprovalRecord:
    """The incident's last request for a person's yes, and the answer to it."""

    number: int
    """Which request of the incident, from 1."""
    before: ApprovalPoint
    rungs: tuple[Rung, ...]
    """The repairs that a yes allows; the first one is what comes next."""
    asked_at: datetime
    until: datetime
    answer: Answer | None = None
    polls: int = 0
    rechecks: int = 0
    """Looks after the yes that could not go on yet."""


@dataclass(frozen=True, slots=True)
class Incident:
    """The record. `version` grows by one with each write and guards against lost updates."""

    id: str
    cluster: str
    node: NodeRef
    origin: Origin
    opened_at: datetime
    state: IncidentState
    state_since: datetime
    findings: tuple[Finding, ...] = ()
    node_labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that the policy's groups matched at the opening."""
    schema_version: int = 1
    version: int = 0
    requested_by: str = ""
    request_reason: str = ""
    mode: Mode = Mode.DRY_RUN
    policy_version: str = ""
    cluster_policy: ClusterPolicy | None = None
    """The cluster as the policy named it at admission; with `plan`, `waits`, `deadlines` and
    `hold_down_s` what an incident pins. Mode and pause are read live."""
    waits: Waits = field(default_factory=Waits)
    deadlines: Deadlines = field(default_factory=Deadlines)
    hold_down_s: int = 600
    approval_policy: ApprovalPolicy | None = None
    """Pinned, too."""
    plan: tuple[Rung, ...] = ()
    rung_index: int = 0
    group: str = ""
    expected_gpus: int = 0
    """How many `nvidia.com/gpu` a node of this kind offers: MIG and time slicing change it."""
    expected_uuids: int = 1
    """How many physical GPUs report metrics on such a node."""
    execution_arn: str = ""
    verify_attempts: int = 0
    verify_since: datetime | None = None
    approval: ApprovalRecord | None = None
    release_for: tuple[Outcome, Reason] | None = None
    """The end that request_approval has decided on, and that follows once the node is restored."""
    cordon: CordonRecord | None = None
    drain: DrainRecord | None = None
    repair: RepairRecord | None = None
    """The attempt that is under way; None until the rung's note is written."""
    attempts: tuple[RepairRecord, ...] = ()
    """Attempts that failed, in order."""
    history: tuple[PastIncident, ...] = ()
    """Earlier incidents of this machine and of the GPUs in the findings, newest first."""
    verdict: tuple[Outcome, Reason] | None = None
    """The end that a step has decided on; close_incident carries it out."""
    outcome: Outcome | None = None
    reason: Reason | None = None
    closed_at: datetime | None = None
    waiting_for: str = ""
    first_seen: Mapping[str, datetime] = field(default_factory=dict)
    """When nodemend saw each fault class first on this node: a fault that changes its code or its
    condition's own transition time does not begin anew."""
    last_seen: datetime | None = None
    """When a scan last reported a fault of the waiting incident."""
    sequence: int = 0
    timeline: tuple[TimelineEntry, ...] = ()
    new_events: tuple[IncidentEvent, ...] = ()
    """Events of changes that are not stored yet; the store moves them into the outbox."""

    @property
    def is_closed(self) -> bool:
        """True in the terminal state."""
        return self.state is IncidentState.CLOSED

    @property
    def dry_run(self) -> bool:
        """True if nothing may be changed on behalf of this incident."""
        return self.mode is Mode.DRY_RUN

    @property
    def primary(self) -> Finding | None:
        """The finding that decides; None by hand, where the person's word is the fault."""
        if self.origin is Origin.HAND or not self.findings:
            return None
        return most_severe(self.findings)

    @property
    def fault_class(self) -> FaultClass:
        """The deciding fault; `manual` where a person's word is the fault."""
        return self.primary.fault_class if self.primary else FaultClass.MANUAL

    @property
    def fault_kind(self) -> FaultKind:
        """How the deciding fault is verified."""
        return self.primary.kind if self.primary else FaultKind.LEVEL

    @property
    def rung(self) -> Rung:
        """The rung that is being tried; `human` past the end of the plan."""
        return self.plan[self.rung_index] if self.rung_index < len(self.plan) else Rung.HUMAN

    @property
    def rungs_asked(self) -> tuple[Rung, ...]:
        """The repairs that were asked for in this incident, in order."""
        made = (*self.attempts, self.repair) if self.repair else self.attempts
        return tuple(attempt.rung for attempt in made if attempt.started_at is not None)

    @property
    def gpu_uuids(self) -> tuple[str, ...]:
        """The GPUs that actionable findings speak of."""
        uuids = (f.gpu_uuid for f in self.findings if f.verdict.is_actionable and f.gpu_uuid)
        return tuple(dict.fromkeys(uuids))

    @property
    def fault_text(self) -> str:
        """The fault in words."""
        if self.primary:
            return self.primary.summary
        return f"requested by {self.requested_by}: {self.request_reason}"


def event_ids(incident: Incident) -> tuple[str, ...]:
    """Return the ids of the events that the incident's next write puts into the outbox."""
    return tuple(event.event_id for event in incident.new_events)


def require_owner(incident: Incident, execution_arn: str) -> None:
    """Refuse to work for an execution that does not own the incident.

    Covers console redrives and copies ("new execution"), late duplicates and closed incidents.

    Raises:
        SupersededError: if the incident is closed or belongs to another execution.
    """
    if incident.is_closed:
        outcome = f"{incident.outcome}" if incident.outcome else "closed"
        raise SupersededError(f"incident {incident.id} is closed already ({outcome})")
    if incident.execution_arn and incident.execution_arn != execution_arn:
        raise SupersededError(
            f"incident {incident.id} belongs to execution {incident.execution_arn}"
        )


def move(incident: Incident, state: IncidentState, now: datetime) -> Incident:
    """Return the incident in another state.

    Raises:
        IllegalTransitionError: if `TRANSITIONS` does not have the move.
    """
    if state is incident.state:
        return incident
    if state not in TRANSITIONS[incident.state]:
        raise IllegalTransitionError(f"incident {incident.id}: {incident.state} -> {state}")
    return replace(incident, state=state, state_since=now)


def record(
    incident: Incident,
    detail_type: DetailType,
    *,
    step: str,
    reason: Reason,
    now: datetime,
    data: Mapping[str, Any] | None = None,
) -> Incident:
    """Return the incident with one more event and timeline line."""
    sequence = incident.sequence + 1
    event = IncidentEvent(
        event_id=f"{incident.id}-{sequence:04d}",
        detail_type=detail_type,
        at=now,
        step=step,
        dry_run=incident.dry_run,
        reason=reason,
        outcome=incident.outcome,
        data=data or {},
    )
    timeline = (*incident.timeline, TimelineEntry(now, step, detail_type, reason))
    return replace(
        incident,
        sequence=sequence,
        new_events=(*incident.new_events, event),
        timeline=timeline[-TIMELINE_LIMIT:],
    )


def decide_end(incident: Incident, outcome: Outcome, reason: Reason) -> Incident:
    """Return the incident with its end decided; the first decision stands."""
    return incident if incident.verdict else replace(incident, verdict=(outcome, reason))


def close(
    incident: Incident,
    outcome: Outcome,
    reason: Reason,
    *,
    step: str,
    now: datetime,
    data: Mapping[str, Any] | None = None,
) -> Incident:
    """Return the closed incident.

    Raises:
        IllegalTransitionError: if it is closed already.
    """
    if incident.is_closed:
        raise IllegalTransitionError(f"incident {incident.id} is closed already")
    closed = replace(
        move(incident, IncidentState.CLOSED, now),
        outcome=outcome,
        reason=reason,
        closed_at=now,
        waiting_for="",
    )
    return record(closed, DetailType.INCIDENT_CLOSED, step=step, reason=reason, now=now, data=data)


def attach(
    incident: Incident, findings: Iterable[Finding], *, now: datetime | None = None
) -> Incident:
    """Return the incident with new evidence; the same incident if every fault is known."""
    merged = add_findings(incident.findings, findings)
    if len(merged) == len(incident.findings):
        return incident
    seen = dict(incident.first_seen)
    if now is not None:
        for finding in merged:
            seen.setdefault(str(finding.fault_class), now)
    return replace(incident, findings=merged, first_seen=seen)


def has_lasted(incident: Incident, now: datetime) -> timedelta:
    """Return for how long nodemend has seen the deciding fault class on this node.

    A level that is not reported any more has not lasted since; an event has happened, and counts
    from then on.
    """
    first = incident.first_seen.get(str(incident.fault_class), incident.opened_at)
    is_level = incident.primary is not None and incident.primary.kind is FaultKind.LEVEL
    return ((incident.last_seen or first) if is_level else now) - first


def is_stale(incident: Incident, now: datetime) -> bool:
    """Tell whether no actionable finding speaks of the present any more.

    An event is as old as its evidence; a level as old as the last report of it. What a person asked
    for does not go stale.
    """
    newest = [
        finding.evidence.at
        if finding.kind is FaultKind.EVENT
        else max(incident.last_seen or incident.opened_at, finding.evidence.at)
        for finding in incident.findings
        if finding.verdict.is_actionable
    ]
    return bool(newest) and now - max(newest) > OCCURRENCE_VALID
