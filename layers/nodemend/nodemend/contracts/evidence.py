"""What several events carry: reasons, nodes, findings and their evidence, earlier incidents."""

from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field

from nodemend.domain.faults import FaultClass, FaultKind, Verdict
from nodemend.domain.findings import Evidence, Finding
from nodemend.domain.history import PastIncident
from nodemend.domain.nodes import NodeRef
from nodemend.domain.reasons import Reason


class EventModel(BaseModel):
    """What events and their parts have in common."""

    # Unknown fields are ignored: a consumer of this release may read the next one's events.
    model_config = ConfigDict(extra="ignore", frozen=True, use_enum_values=True)


class ReasonModel(EventModel):
    """What decided."""

    code: str = Field(description="Stable word, e.g. capacity_guard.")
    text: str = Field(description="Sentence for people.")

    @classmethod
    def of(cls, reason: Reason) -> "ReasonModel":
        """Build from the domain's value."""
        return cls(code=reason.code, text=reason.text)


class NodeRefModel(EventModel):
    """Which machine is meant; names alone are reused within minutes on AWS."""

    cluster: str
    name: str
    uid: str = ""
    instance_id: str = ""
    boot_id: str = ""

    @classmethod
    def of(cls, ref: NodeRef) -> "NodeRefModel":
        """Build from the domain's value."""
        return cls(
            cluster=ref.cluster,
            name=ref.name,
            uid=ref.uid,
            instance_id=ref.instance_id,
            boot_id=ref.boot_id,
        )

    def to_ref(self) -> NodeRef:
        """Return the domain's value."""
        return NodeRef(self.cluster, self.name, self.uid, self.instance_id, self.boot_id)


class EvidenceModel(EventModel):
    """What was seen: run `query` at `at` to see it again."""

    rule_id: str
    query: str
    value: float
    at: datetime
    labels: dict[str, str] = Field(default_factory=dict)


class FindingModel(EventModel):
    """A rule that holds for a GPU or node."""

    fault_class: str
    verdict: str
    kind: str
    node_names: tuple[str, ...] = Field(description="Candidates for the node's name, best first.")
    gpu_uuid: str = ""
    gpu_index: str = ""
    code: int | None = Field(default=None, description="The XID of an xid finding.")
    summary: str = ""
    action: str = Field(default="", description="What the XID table advises, e.g. reset_gpu.")
    evidence: EvidenceModel

    @classmethod
    def of(cls, finding: Finding) -> "FindingModel":
        """Build from the domain's value."""
        evidence = finding.evidence
        return cls(
            fault_class=finding.fault_class,
            verdict=finding.verdict,
            kind=finding.kind,
            node_names=finding.node_names,
            gpu_uuid=finding.gpu_uuid,
            gpu_index=finding.gpu_index,
            code=finding.code,
            summary=finding.summary,
            action=finding.action,
            evidence=EvidenceModel(
                rule_id=evidence.rule_id,
                query=evidence.query,
                value=evidence.value,
                at=evidence.at,
                labels=dict(evidence.labels),
            ),
        )

    def to_finding(self, cluster: str) -> Finding:
        """Return the domain's value.

        Raises:
            ValueError: if a word is none of the domain's.
        """
        return Finding(
            cluster=cluster,
            node_names=self.node_names,
            fault_class=FaultClass(self.fault_class),
            verdict=Verdict(self.verdict),
            kind=FaultKind(self.kind),
            gpu_uuid=self.gpu_uuid,
            gpu_index=self.gpu_index,
            code=self.code,
            summary=self.summary,
            action=self.action,
            evidence=Evidence(
                rule_id=self.evidence.rule_id,
                query=self.evidence.query,
                value=self.evidence.value,
                at=self.evidence.at,
                labels=self.evidence.labels,
            ),
        )


class PastIncidentModel(EventModel):
    """An earlier incident of the same machine or GPU."""

    incident_id: str
    at: datetime = Field(description="When it was closed.")
    fault: str = Field(description="The fault class, with the XID where there was one.")
    outcome: str
    instance_id: str
    gpu_uuids: tuple[str, ...] = ()
    rungs: tuple[str, ...] = Field(default=(), description="Repairs that were asked for.")
    replacement_instance_id: str = Field(
        default="", description="The instance that took its place, if it was replaced."
    )

    @classmethod
    def of(cls, past: PastIncident) -> "PastIncidentModel":
        """Build from the domain's value."""
        return cls(
            incident_id=past.incident_id,
            at=past.at,
            fault=past.fault,
            outcome=past.outcome,
            instance_id=past.instance_id,
            gpu_uuids=past.gpu_uuids,
            rungs=tuple(past.rungs),
            replacement_instance_id=past.replacement_instance_id,
        )
