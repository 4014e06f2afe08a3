"""What a rehearsal leaves behind, for machines. Schema: `local/schemas/result.json`."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ActionRow(_Model):
    """Something that nodemend did to the cluster or its capacity, or would have done."""

    t: float = Field(description="Seconds since the start.")
    incident: str
    caller: str
    verb: str = Field(description="cordon, evict, replace or release.")
    target: str
    dry_run: bool
    result: str = Field(description="HTTP status, planned, or answer lost.")


class EventRow(_Model):
    """An event on nodemend's bus."""

    t: float
    detail_type: str
    incident: str = ""
    step: str = ""
    outcome: str | None = None
    reason: str = Field(default="", description="Code of the reason.")
    text: str = Field(default="", description="The reason in words.")
    dry_run: bool = False
    event_id: str


class MetricRow(_Model):
    """A CloudWatch metric, summed over the rehearsal."""

    name: str
    dimensions: dict[str, str]
    samples: int
    sum: float


class MutationRow(_Model):
    """An API call that changed the cluster or its capacity, whoever made it."""

    t: float
    service: str
    verb: str
    target: str
    caller: str


class IncidentRow(_Model):
    """How an incident ended."""

    id: str
    node: str
    origin: str
    state: str
    outcome: str | None
    reason: str
    text: str
    remedy: str = ""


class NodeRow(_Model):
    """A node at the end."""

    name: str
    uid: str
    instance_id: str
    unschedulable: bool
    taints: list[dict[str, Any]]
    annotations: dict[str, str]
    role: str = Field(description="GROUP/INDEX, or GROUP/new-N for a node that came in later.")


class Expectation(_Model):
    """Whether it ended as it must."""

    met: bool
    why: list[str]


class ResultDocument(_Model):
    """The machine-readable result of one rehearsal."""

    schema_version: Literal[1] = 1
    scenario: str
    outcome: str | None
    actions: list[ActionRow]
    events: list[EventRow]
    metrics: list[MetricRow]
    api_mutations: list[MutationRow]
    incidents: list[IncidentRow]
    nodes: list[NodeRow]
    expectation: Expectation
