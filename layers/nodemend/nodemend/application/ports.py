"""What the use cases need from the world, as protocols.

Every method raises only `domain.errors` classes: adapters translate what their libraries raise,
so that the state machine's Retry and Catch lists stay true.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from nodemend.domain.capacity import AutoScalingGroup
from nodemend.domain.events import DetailType
from nodemend.domain.findings import Sample
from nodemend.domain.guard import Guard
from nodemend.domain.history import PastIncident, Subject
from nodemend.domain.incidents import Incident
from nodemend.domain.nodes import Node, NodeRef
from nodemend.domain.pods import DisruptionBudget, EvictionAnswer, Pod
from nodemend.domain.policy import ClusterPolicy, Policy
from nodemend.domain.reasons import Reason
from nodemend.domain.rule_health import RuleGroup


class Clock(Protocol):
    """Tells the time; nothing else does."""

    def now(self) -> datetime:
        """Return the time as an aware UTC datetime."""
        ...


class Invocation(Protocol):
    """The running invocation, as far as leases and slices care."""

    def remaining_s(self) -> float:
        """Return the seconds until Lambda ends this invocation."""
        ...


# --- metrics ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QueryResult:
    """AMP's answer to one query.

    `problem` set means unknown: neither healthy nor sick. Partial answers (warnings) are unknown
    too, whatever samples they carry.
    """

    samples: tuple[Sample, ...] = ()
    problem: Reason | None = None
    """Codes: `amp_timeout` (422 or no answer in time), `amp_query_rejected` (422 limit, 400),
    `amp_throttled`, `amp_forbidden`, `amp_unavailable`, `amp_partial` (warnings)."""
    samples_processed: int = 0
    """`stats.samples.totalQueryableSamples`: what AMP bills."""


class MetricsStore(Protocol):
    """AMP's query API."""

    def query_many(
        self, cluster: ClusterPolicy, queries: Mapping[str, str], at: datetime
    ) -> Mapping[str, QueryResult]:
        """Run instant queries side by side and return the answer to each, by the same key.

        Never raises for a query's failure: a failed query is an unknown result.
        """
        ...


@dataclass(frozen=True, slots=True)
class RuleGroupsResult:
    """AMP's answer on the workspace's rule groups; `problem` set means unknown."""

    groups: tuple[RuleGroup, ...] = ()
    problem: Reason | None = None


class RuleGroups(Protocol):
    """How the recording and alerting rules of a workspace fare."""

    def rule_groups(self, cluster: ClusterPolicy) -> RuleGroupsResult:
        """Return all rule groups of the cluster's workspace; never raises for AMP's failure."""
        ...


class Workspace(MetricsStore, RuleGroups, Protocol):
    """A workspace's queries and its rule groups."""


# --- the cluster --------------------------------------------------------------------------------


class Cluster(Protocol):
    """The Kubernetes API of one cluster.

    Raises (all methods): ClusterUnavailableError, ClusterUnauthorizedError, ClusterForbiddenError.
    """

    def get_node(self, name: str) -> Node | None:
        """Return the node of exactly this name, or None."""
        ...

    def list_gpu_nodes(self) -> Sequence[Node]:
        """Return all nodes that have, or should have, GPUs; paged, without the client's models."""
        ...

    def patch_node(self, name: str, patch: Sequence[Mapping[str, Any]]) -> bool:
        """Apply a JSON patch; False if one of its `test`s failed (read again, decide again)."""
        ...

    def list_pods(self, node_name: str) -> Sequence[Pod]:
        """Return the pods bound to a node, in all namespaces."""
        ...

    def get_pod(self, namespace: str, name: str) -> Pod | None:
        """Return a pod, or None."""
        ...

    def evict(self, pod: Pod) -> EvictionAnswer:
        """Ask to evict the pod with its uid as a precondition; the answer is data, not an error.

        Only 401 raises (ClusterUnauthorizedError): it says nothing about the pod.
        """
        ...

    def list_disruption_budgets(self, namespace: str) -> Sequence[DisruptionBudget]:
        """Return the namespace's PodDisruptionBudgets."""
        ...

    def record_event(self, node: NodeRef, reason: str, message: str, *, is_warning: bool) -> None:
        """Write a Kubernetes Event on the node; failure is logged, never raised."""
        ...


@dataclass(frozen=True, slots=True)
class ClusterEndpoint:
    """Where a cluster's API is."""

    url: str
    ca_pem: str


class ClusterAccess(Protocol):
    """EKS: where the API is, and a bearer token for it."""

    def endpoint(self, cluster: ClusterPolicy, *, is_fresh: bool = False) -> ClusterEndpoint:
        """Return the endpoint (`eks:DescribeCluster`, cached); `is_fresh` asks EKS again.

        Raises:
            AwsForbiddenError, AwsUnavailableError: as EKS or STS answered.
            InvalidInputError: if there is no such cluster in the region.
        """
        ...

    def token(self, cluster: ClusterPolicy, *, is_fresh: bool = False) -> str:
        """Return a token at most 10 minutes old; `is_fresh` mints a new one (after a 401)."""
        ...


class Clusters(Protocol):
    """Opens clusters."""

    def open(self, cluster: ClusterPolicy) -> Cluster:
        """Return the API of a cluster; connections are kept while the container is warm.

        Raises:
            AwsForbiddenError: if `eks:DescribeCluster` or the role is denied.
            AwsUnavailableError: if EKS or STS does not answer.
        """
        ...


# --- capacity -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fleet:
    """The Auto Scaling groups of a cluster."""

    groups: Mapping[str, AutoScalingGroup] = field(default_factory=dict)

    @property
    def group_by_instance(self) -> Mapping[str, str]:
        """Name of the group by instance id."""
        return {
            instance_id: group.name
            for group in self.groups.values()
            for instance_id in group.instances
        }


class Capacity(Protocol):
    """EC2 Auto Scaling, as far as one cluster's groups go.

    Raises (all methods): AwsUnavailableError, AwsForbiddenError.
    """

    def fleet(self, cluster: ClusterPolicy) -> Fleet:
        """Return the groups tagged as the cluster's."""
        ...

    def group(self, cluster: ClusterPolicy, name: str) -> AutoScalingGroup | None:
        """Return one group, or None if it is gone."""
        ...

    def other_work(self, cluster: ClusterPolicy, group: AutoScalingGroup) -> str:
        """Return what somebody else does, or will do, to the group's nodes; empty: nothing.

        An instance refresh, an update of the managed node group, or its own node repair.
        """
        ...

    def terminate(self, cluster: ClusterPolicy, instance_id: str) -> None:
        """Terminate an instance in its group, desired capacity unchanged.

        Raises:
            RepairRefusedError: if the group refuses for good (not a member, protected).
        """
        ...

    def launch_problem(self, cluster: ClusterPolicy, group: str, since: datetime) -> str:
        """Return the message of the group's newest failed launch since then, or an empty string."""
        ...


class Instances(Protocol):
    """EC2, as far as single instances go.

    Raises (all methods): AwsUnavailableError, AwsForbiddenError.
    """

    def reboot(self, cluster: ClusterPolicy, instance_id: str) -> bool:
        """Ask EC2 to reboot an instance; EC2 only queues it, and turns it hard after minutes.

        Sent once, whatever the answer: an AwsUnavailableError leaves open whether it was accepted.

        Returns:
            False if EC2 throttled the call, so that it was certainly not accepted.

        Raises:
            RepairRefusedError: if EC2 refuses for good (no such instance, not running).
        """
        ...


# --- records ------------------------------------------------------------------------------------


class Incidents(Protocol):
    """The incident records, their outboxes, and what keeps one node to one incident.

    Raises (all methods): AwsUnavailableError, AwsForbiddenError.
    """

    def claim_node(self, cluster: str, node_uid: str, incident_id: str) -> str:
        """Make `incident_id` the node's open incident unless it has one; return the one it has."""
        ...

    def release_node(self, cluster: str, node_uid: str, incident_id: str) -> None:
        """Drop the pointer, only if it still means this incident."""
        ...

    def create(self, incident: Incident) -> bool:
        """Store a new record with its events in one write; False if the id exists."""
        ...

    def get(self, incident_id: str) -> Incident | None:
        """Return a record (consistent read), or None."""
        ...

    def save(self, incident: Incident) -> Incident:
        """Store the record and put its `new_events` in the outbox, in one conditional write.

        Returns:
            The record as stored: next version, no `new_events`.

        Raises:
            ConcurrentUpdateError: if the stored version is not `incident.version`.
        """
        ...

    def list_open(self, cluster: str | None) -> Sequence[Incident]:
        """Return incidents that are not closed (eventually consistent); None: of all clusters."""
        ...

    def claim_instance(self, instance_id: str, incident_id: str) -> bool:
        """Claim a replacement instance; False if another incident has claimed it."""
        ...

    def handled_until(
        self, cluster: str, node: NodeRef, keys: Iterable[str]
    ) -> Mapping[str, datetime]:
        """Return until when which fault keys count as handled on this boot of the node."""
        ...

    def mark_handled(
        self, cluster: str, node: NodeRef, keys: Iterable[str], until: datetime
    ) -> None:
        """Note fault keys as handled on this boot of the node."""
        ...


class History(Protocol):
    """What was done before, by machine and by GPU; kept for `domain.history.KEEP`.

    Raises (all methods): AwsUnavailableError, AwsForbiddenError.
    """

    def remember(self, cluster: str, subjects: Iterable[Subject], past: PastIncident) -> None:
        """Note an incident under each subject; the same incident again changes nothing."""
        ...

    def recall(self, cluster: str, subjects: Iterable[Subject]) -> tuple[PastIncident, ...]:
        """Return the newest entries of all subjects, each incident once, newest first."""
        ...


class Outbox(Protocol):
    """Sends what incidents have to say: EventBridge, then CloudWatch, then the mark as sent."""

    def publish(self, incident_id: str, event_ids: Collection[str] | None = None) -> int:
        """Send these of the incident's unsent events (None: all); return how many stay unsent.

        Whoever stored events sends those and no others: so two that work on one incident at the
        same moment do not send each other's.

        Never raises: what could not be sent stays marked in the record and is sent later by
        watch_incidents with the same event ids.
        """
        ...

    def publish_pending(
        self, *, before: datetime | None = None, limit: int = 100
    ) -> tuple[int, int]:
        """Send unsent events of any incident that happened before; return (sent, still unsent)."""
        ...

    def pending(self, limit: int = 100) -> Sequence[str]:
        """Return the ids of incidents with unsent events (eventually consistent).

        Never raises: if they cannot be read, there are none to see to now.
        """
        ...


@dataclass(frozen=True, slots=True)
class Announcement:
    """An event that belongs to no incident (from a scan)."""

    event_id: str
    detail_type: DetailType
    at: datetime
    detail: Mapping[str, Any]


class EventBus(Protocol):
    """Sends events that no record holds."""

    def announce(self, announcements: Sequence[Announcement]) -> Sequence[str]:
        """Send; return the ids of events that were not accepted after the retries.

        Raises:
            AwsUnavailableError, AwsForbiddenError: if the bus could not be reached at all.
        """
        ...


class ScanMemory(Protocol):
    """What the last scans reported, so that a repeat is a counter and not an event."""

    def last_reports(self, cluster: str, names: Iterable[str]) -> Mapping[str, "Report"]:
        """Return the last report by name (a node's, or `scan/<family>`)."""
        ...

    def remember(self, cluster: str, reports: Mapping[str, "Report"]) -> None:
        """Store reports by name."""
        ...


@dataclass(frozen=True, slots=True)
class Report:
    """What was last announced under a name."""

    fingerprint: str
    """Sorted keys of what was announced."""
    at: datetime
    repeats: int = 0


class Guards(Protocol):
    """The guard items.

    Raises (all methods): AwsUnavailableError, AwsForbiddenError.
    """

    def load(self, cluster: str) -> Guard:
        """Return the cluster's guard (consistent read); version 0 if there is none yet."""
        ...

    def store(self, guard: Guard) -> bool:
        """Write the guard if the stored version is still `guard.version`; False if it is not."""
        ...


class Policies(Protocol):
    """The policy in force."""

    def current(self) -> Policy:
        """Return the policy, at most 30 s old; the built-in dry run if none was ever deployed.

        Raises:
            PolicyInvalidError: if one is deployed and is invalid or gone.
            AwsUnavailableError, AwsForbiddenError: if the policy's store could not be asked.
        """
        ...


@dataclass(frozen=True, slots=True)
class ExecutionStatus:
    """State of a Step Functions execution: RUNNING, SUCCEEDED, FAILED, TIMED_OUT, ABORTED."""

    status: str
    error: str = ""
    cause: str = ""

    @property
    def is_running(self) -> bool:
        """True while the execution may still change something."""
        return self.status in ("RUNNING", "PENDING_REDRIVE")


class Executions(Protocol):
    """Runs of the state machine.

    Raises (all methods): AwsUnavailableError, AwsForbiddenError.
    """

    def start(self, incident_id: str) -> str:
        """Start the remediation under the incident's id and return its ARN.

        A second start is harmless: the name is taken, and the same ARN is returned.
        """
        ...

    def status(self, execution_arn: str) -> ExecutionStatus | None:
        """Return the status, or None if there is no such execution."""
        ...

    def arn_of(self, incident_id: str) -> str:
        """Return the ARN that the incident's execution has or would have."""
        ...


class DispatchQueue(Protocol):
    """Tells dispatch_incidents that something changed."""

    def notify(self, cluster: str, incident_id: str) -> None:
        """Queue one decision; several within the batching window become one."""
        ...


class DeadLetters(Protocol):
    """Keeps messages that are refused, for a person to read."""

    def put(self, body: str, *, error: str, field: str, remedy: str) -> None:
        """Keep a message as it came, with what is wrong and what would be right.

        Raises:
            AwsUnavailableError, AwsForbiddenError: if it is not kept.
        """
        ...


class Telemetry(Protocol):
    """CloudWatch metrics with few series: never a node or GPU as a dimension."""

    def count(self, name: str, value: float = 1, **dimensions: str) -> None:
        """Add to a counter."""
        ...

    def gauge(self, name: str, value: float, unit: str, **dimensions: str) -> None:
        """Record a value."""
        ...


class Ids(Protocol):
    """Mints incident ids."""

    def new(self, now: datetime) -> str:
        """Return a new ULID."""
        ...
