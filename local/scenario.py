"""Scenarios: a fleet, a policy, what happens to it, and how it must end. YAML, checked here.

The schema is published as `local/schemas/scenario.json`.
"""

from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from local.amp.exporter import FaultKind
from local.amp.gpus import METRICS_BY_NAME, XID_COUNT, XID_ERRORS
from nodemend.catalogue import load_catalogue
from nodemend.contracts.policy import check_rules, parse_policy
from nodemend.domain.errors import PolicyInvalidError
from nodemend.domain.events import DetailType

REGION = "us-east-1"
"""Where everything is."""


class ScenarioError(ValueError):
    """The scenario file is wrong; the message names file, field and problem."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Pods(_Model):
    """A workload on the group's nodes."""

    namespace: str = "ml"
    name: str
    kind: Literal["Deployment", "ReplicaSet", "StatefulSet", "Job", "DaemonSet"] = "StatefulSet"
    replicas: int = Field(default=1, ge=1)
    gpus: int = Field(default=0, ge=0, description="GPUs that each pod holds.")
    grace_s: int = Field(default=2, ge=0)
    labels: dict[str, str] = Field(default={}, description="Default: app=NAME.")
    nodes: tuple[int, ...] = Field(
        default=(), description="Indexes of the group's nodes that the first pods are bound to."
    )

    @property
    def all_labels(self) -> dict[str, str]:
        """The labels, with the default."""
        return self.labels or {"app": self.name}


class Budget(_Model):
    """A PodDisruptionBudget."""

    namespace: str = "ml"
    name: str
    match_labels: dict[str, str]
    min_available: int | str | None = None
    max_unavailable: int | str | None = None


class Group(_Model):
    """Nodes of one kind of capacity."""

    name: str
    kind: Literal["auto_scaling_group", "managed_node_group"] = "auto_scaling_group"
    instance_type: str = "p5.48xlarge"
    size: int = Field(ge=1, le=2000)
    age_s: float = Field(default=86400, ge=0, description="How long the nodes have been there.")
    labels: dict[str, str] = {}
    pods: tuple[Pods, ...] = ()
    pdbs: tuple[Budget, ...] = ()
    launch_delay_s: float = Field(default=1, ge=0)
    join_delay_s: float = Field(
        default=1, ge=0, description="From a running instance to its Ready node."
    )
    gpus_delay_s: float = Field(
        default=1, ge=0, description="From the Ready node to its allocatable GPUs."
    )
    suspended: tuple[str, ...] = Field(default=(), description="Suspended Auto Scaling processes.")
    instance_refresh: bool = Field(
        default=False, description="True: somebody's instance refresh of the group is running."
    )
    node_repair: bool = Field(
        default=False, description="True: EKS's own node repair is on for a managed node group."
    )
    reboot_s: float = Field(
        default=1, ge=0, description="How long a node is down that reboots; then see gpus_delay_s."
    )
    reboot_happens: bool = Field(
        default=True, description="False: EC2 takes a reboot and the machine never boots again."
    )
    reboot_fixes: bool = Field(
        default=True, description="False: the node's GPU faults survive a reboot."
    )


class Cluster(_Model):
    """One EKS cluster with an AMP workspace of its own."""

    name: str
    workspace: str = "ws-local"
    groups: tuple[Group, ...] = Field(min_length=1)


class Alert(_Model):
    """One notification of an alert manager, sent to the stack's alert topic."""

    node: str = Field(description="GROUP/INDEX or a node's name; becomes the label Hostname.")
    gpu: int | None = Field(default=None, ge=0)
    alertname: str = "GpuXidCritical"
    status: Literal["firing", "resolved"] = "firing"
    labels: dict[str, str] = Field(default={}, description="Further labels, or others.")
    annotations: dict[str, str] = {}
    age_s: float = Field(default=60, ge=0, description="For how long it has fired.")
    format: Literal["json", "text"] = Field(
        default="json", description="By docs/alertmanager.example.yaml, or the default text."
    )


class Start(_Model):
    """What starts the remediation."""

    by: Literal["scan", "alert", "hand"] = "scan"
    alert: Alert | None = Field(default=None, description="By alert: what is sent.")
    at_s: float = Field(default=0, ge=0, description="By alert: when it is sent.")
    node: str = Field(default="", description="By hand: GROUP/INDEX or a node's name.")
    reason: str = "rehearsal"
    requested_by: str = "person"

    @model_validator(mode="after")
    def _hand_needs_a_node(self) -> Self:
        if self.by == "hand" and not self.node:
            raise ValueError("start.node is needed to start by hand")
        if (self.by == "alert") != (self.alert is not None):
            raise ValueError("start.alert goes with by: alert, and only with it")
        return self


class Inject(BaseModel):
    """A fault of the simulated GPUs; further fields are the kind's parameters."""

    model_config = ConfigDict(extra="allow", frozen=True)

    node: str
    gpu: int | None = None
    kind: FaultKind

    @property
    def params(self) -> dict[str, Any]:
        """The kind's own parameters."""
        return dict(self.model_extra or {})


class Clear(_Model):
    """Faults to lift."""

    node: str
    gpu: int | None = None
    kind: FaultKind | None = None


class InjectedApiFault(_Model):
    """Calls to fail."""

    verb: str
    status: int = Field(ge=0, le=599)
    service: str = ""
    caller: str = Field(default="", description="A function's folder name; empty: anybody.")
    target: str = ""
    times: int | None = Field(default=None, ge=1)
    for_s: float | None = Field(default=None, gt=0, description="Lift it again after this long.")
    how: Literal["refuse", "lose_answer", "kill_caller"] = Field(
        default="refuse",
        description="Refuse the call; or do it and lose the answer; or do it and kill the function "
        "that called. AWS calls only, but for refuse.",
    )

    @property
    def headers(self) -> dict[str, str]:
        """What steers the AWS front."""
        match self.how:
            case "refuse":
                return {}
            case "lose_answer":
                return {"x-local-when": "after"}
            case "kill_caller":
                return {"x-local-when": "after", "x-local-kill": "1"}


class Person(_Model):
    """Something that a person does."""

    do: Literal[
        "cordon",
        "uncordon",
        "delete_pdb",
        "delete_pod",
        "stop_execution",
        "pause",
        "resume",
        "approve",
        "deny",
    ]
    node: str = ""
    namespace: str = "ml"
    name: str = ""


class When(_Model):
    """Wait for an event before `at_s` counts."""

    event: DetailType = Field(description="A detail-type, e.g. Incident Opened.")


class TimelineEntry(_Model):
    """One thing that happens; `at_s` counts from the start, or from the event in `when`."""

    at_s: float = Field(default=0, ge=0)
    when: When | None = None
    inject: Inject | None = None
    clear: Clear | None = None
    api_fault: InjectedApiFault | None = None
    person: Person | None = None
    alert: Alert | None = None

    @model_validator(mode="after")
    def _exactly_one_thing(self) -> Self:
        things = [self.inject, self.clear, self.api_fault, self.person, self.alert]
        if sum(thing is not None for thing in things) != 1:
            raise ValueError("name exactly one of inject, clear, api_fault, person and alert")
        return self


class Expect(_Model):
    """How it must end."""

    outcome: str | None = Field(
        default=None, description="Outcome of the one incident; null: no incident at all."
    )
    outcomes: tuple[str, ...] | None = Field(
        default=None, description="Instead of outcome: of several, in the order of their opening."
    )
    reason: str | None = Field(default=None, description="Code of its reason.")
    actions: tuple[str, ...] | None = Field(
        default=None,
        description="What was changed, in order: cordon, evict, reboot, replace, release.",
    )
    untouched: tuple[str, ...] = Field(
        default=(), description="Nodes (GROUP/INDEX) that nobody may have changed; all: every one."
    )
    events: tuple[DetailType, ...] = Field(
        default=(), description="Detail-types that must have been sent, in this order."
    )
    waiting: dict[str, int] = Field(
        default={},
        description="How many incidents must still wait in the end, by what they wait for "
        "(breaker_open, paused, hold); they have no outcome.",
    )
    counts: dict[str, int] = Field(
        default={}, description="How many events of a detail-type there must be, exactly."
    )

    @model_validator(mode="after")
    def _one_way_to_say_it(self) -> Self:
        if not self.model_fields_set & {"outcome", "outcomes"}:
            raise ValueError("name outcome (null: no incident at all) or outcomes")
        return self

    @property
    def wanted_outcomes(self) -> list[str]:
        """The outcomes of all incidents."""
        if self.outcomes is not None:
            return list(self.outcomes)
        return [] if self.outcome is None else [self.outcome]


class Limits(_Model):
    """How long the rehearsal may take."""

    run_s: float = Field(default=120, gt=0)
    settle_s: float = Field(
        default=6, gt=0, description="Quiet seconds after which nothing more is expected."
    )


class ScenarioDocument(_Model):
    """A rehearsal of nodemend on this machine."""

    schema_version: Literal[1]
    name: str
    description: str = ""
    clusters: tuple[Cluster, ...] = Field(min_length=1, max_length=1)
    policy: dict[str, Any] = Field(
        default={},
        description="The policy document, as it is in production; its clusters are replaced by "
        "the emulated one.",
    )
    start: Start = Start()
    scans: bool = Field(
        default=True,
        description="false: the scheduled scans do not run, so that only the start does.",
    )
    timeline: tuple[TimelineEntry, ...] = ()
    expect: Expect
    limits: Limits = Limits()
    seconds_per_minute: float = Field(
        default=2, gt=0, description="How long a minute of the schedules lasts here."
    )

    @property
    def cluster(self) -> Cluster:
        """The scenario's cluster."""
        return self.clusters[0]

    @property
    def full_policy(self) -> dict[str, Any]:
        """The policy document as it is deployed here.

        Rules that read what no simulated exporter shows are off unless the scenario names them: to
        be told that they are blind would say nothing of the fleet that is rehearsed.
        """
        cluster = self.cluster
        named = {"name": cluster.name, "workspace": cluster.workspace, "region": REGION}
        matcher = f'cluster="{cluster.name}"'
        rules = {rule_id: {"enabled": False} for rule_id in rules_unseen()}
        return {
            "schema_version": 1,
            **self.policy,
            "rules": {**rules, **self.policy.get("rules", {})},
            "clusters": [{**named, "matcher": matcher}],
        }

    @property
    def whole_timeline(self) -> tuple[TimelineEntry, ...]:
        """The timeline with the alert that starts it all, if one does."""
        if self.start.alert is None:
            return self.timeline
        first = TimelineEntry(at_s=self.start.at_s, alert=self.start.alert)
        return (*self.timeline, first)


@cache
def rules_unseen() -> tuple[str, ...]:
    """Return the rules that lack a metric under all its names where the simulated exporters run."""
    shown = {*METRICS_BY_NAME, XID_ERRORS, XID_COUNT}
    catalogue = load_catalogue()
    return tuple(
        rule.id
        for rule in catalogue.rules
        if any(shown.isdisjoint(catalogue.metric_names.get(name, ())) for name in rule.metrics)
    )


def load_scenario(path: Path) -> ScenarioDocument:
    """Read a scenario file.

    Raises:
        ScenarioError: if it cannot be read, is no YAML, or a field is wrong.
    """
    try:
        raw = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise ScenarioError(f"{path} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ScenarioError(f"{path} is no YAML: {error}") from error
    try:
        scenario = ScenarioDocument.model_validate(raw)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in e['loc']) or 'document'}: {e['msg']}"
            for e in error.errors(include_url=False)
        )
        raise ScenarioError(f"{path}: {problems}") from error
    _check_policy(scenario, path)
    return scenario


def _check_policy(scenario: ScenarioDocument, path: Path) -> None:
    """Check the policy as its deployment would, before anything is started."""
    try:
        policy = parse_policy(scenario.full_policy, "rehearsal")
        rules = load_catalogue().rules
        check_rules(policy, {rule.id: tuple(rule.thresholds) for rule in rules})
    except PolicyInvalidError as error:
        raise ScenarioError(f"{path}: policy: {error}") from error
