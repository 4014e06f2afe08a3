"""The resource types that the emulator serves, and what differs between them.

A new type is one entry of `BUILT_IN` (or `nodeclaims`-like: a `Resource` with `is_custom`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from local.kubernetes.objects import JsonObject


@dataclass(frozen=True)
class Resource:
    """One served resource type."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool
    subresources: frozenset[str] = frozenset({"status"})
    has_generation: bool = False
    """The server counts `metadata.generation` up when the spec changes."""
    is_custom: bool = False
    """Served from a CustomResourceDefinition: free schema, no strategic merge patch."""
    is_deletion_graceful: bool = False
    """Deletion waits for the object's grace period (pods)."""
    field_labels: tuple[str, ...] = ()
    """Field selectors beyond metadata.name and, if namespaced, metadata.namespace."""
    has_own_field_labels: bool = False
    """An unknown field label is refused with the words of the core group's conversion."""
    is_put_strict: bool = False
    """PUT creates what is missing, and needs the resource version of what is there."""
    zero: JsonObject = field(default_factory=dict)
    """What an empty object of the type serialises to: fields that are never absent."""
    storage: str = ""
    """Name in storage keys where it is not the plural (`minions`)."""

    def __hash__(self) -> int:
        return hash((self.group, self.plural))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Resource) and (self.group, self.plural) == (
            other.group,
            other.plural,
        )

    @property
    def api_version(self) -> str:
        """`apiVersion` of the objects."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        """`pods`, `poddisruptionbudgets.policy`: as error messages name the resource."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def qualified_kind(self) -> str:
        """`Pod`, `PodDisruptionBudget.policy`: as error messages name the kind."""
        return f"{self.kind}.{self.group}" if self.group else self.kind

    @property
    def list_kind(self) -> str:
        """Kind of a list of them."""
        return f"{self.kind}List"


_ZERO_NODE: Final[JsonObject] = {
    "metadata": {},
    "spec": {},
    "status": {
        "daemonEndpoints": {"kubeletEndpoint": {"Port": 0}},
        "nodeInfo": {
            "machineID": "",
            "systemUUID": "",
            "bootID": "",
            "kernelVersion": "",
            "osImage": "",
            "containerRuntimeVersion": "",
            "kubeletVersion": "",
            "kubeProxyVersion": "",
            "operatingSystem": "",
            "architecture": "",
        },
    },
}
_ZERO_PDB: Final[JsonObject] = {
    "metadata": {},
    "spec": {},
    "status": {
        "disruptionsAllowed": 0,
        "currentHealthy": 0,
        "desiredHealthy": 0,
        "expectedPods": 0,
    },
}
_ZERO_EVENT: Final[JsonObject] = {
    "metadata": {},
    "involvedObject": {},
    "source": {},
    "firstTimestamp": None,
    "lastTimestamp": None,
    "eventTime": None,
    "reportingComponent": "",
    "reportingInstance": "",
}
_ZERO: Final[JsonObject] = {"metadata": {}, "spec": {}, "status": {}}

NODES: Final = Resource(
    "",
    "v1",
    "nodes",
    "Node",
    namespaced=False,
    field_labels=("spec.unschedulable",),
    has_own_field_labels=True,
    zero=_ZERO_NODE,
    storage="minions",
)
PODS: Final = Resource(
    "",
    "v1",
    "pods",
    "Pod",
    namespaced=True,
    subresources=frozenset({"status", "eviction"}),
    has_generation=True,
    is_deletion_graceful=True,
    field_labels=(
        "spec.nodeName",
        "spec.restartPolicy",
        "spec.schedulerName",
        "spec.serviceAccountName",
        "spec.hostNetwork",
        "status.phase",
        "status.podIP",
        "status.nominatedNodeName",
    ),
    has_own_field_labels=True,
    zero={"metadata": {}, "spec": {"containers": None}, "status": {}},
)
NAMESPACES: Final = Resource(
    "",
    "v1",
    "namespaces",
    "Namespace",
    namespaced=False,
    field_labels=("status.phase",),
    has_own_field_labels=True,
    zero=_ZERO,
)
EVENTS: Final = Resource(
    "",
    "v1",
    "events",
    "Event",
    namespaced=True,
    subresources=frozenset(),
    field_labels=(
        "involvedObject.kind",
        "involvedObject.namespace",
        "involvedObject.name",
        "involvedObject.uid",
        "involvedObject.apiVersion",
        "involvedObject.resourceVersion",
        "involvedObject.fieldPath",
        "reason",
        "reportingComponent",
        "source",
        "type",
    ),
    has_own_field_labels=True,
    zero=_ZERO_EVENT,
)
PDBS: Final = Resource(
    "policy",
    "v1",
    "poddisruptionbudgets",
    "PodDisruptionBudget",
    namespaced=True,
    has_generation=True,
    zero=_ZERO_PDB,
)


def _workload(group: str, plural: str, kind: str) -> Resource:
    return Resource(group, "v1", plural, kind, namespaced=True, has_generation=True, zero=_ZERO)


DAEMONSETS: Final = _workload("apps", "daemonsets", "DaemonSet")
DEPLOYMENTS: Final = _workload("apps", "deployments", "Deployment")
REPLICASETS: Final = _workload("apps", "replicasets", "ReplicaSet")
STATEFULSETS: Final = _workload("apps", "statefulsets", "StatefulSet")
JOBS: Final = _workload("batch", "jobs", "Job")
VOLUME_ATTACHMENTS: Final = Resource(
    "storage.k8s.io",
    "v1",
    "volumeattachments",
    "VolumeAttachment",
    namespaced=False,
    zero={
        "metadata": {},
        "spec": {"attacher": "", "source": {}, "nodeName": ""},
        "status": {"attached": False},
    },
)
LEASES: Final = Resource(
    "coordination.k8s.io",
    "v1",
    "leases",
    "Lease",
    namespaced=True,
    subresources=frozenset(),
    is_put_strict=True,
    zero={"metadata": {}, "spec": {}},
)
ACCESS_REVIEWS: Final = Resource(
    "authorization.k8s.io",
    "v1",
    "selfsubjectaccessreviews",
    "SelfSubjectAccessReview",
    namespaced=False,
    subresources=frozenset(),
    zero={"metadata": {}, "spec": {}},
)
SELF_REVIEWS: Final = Resource(
    "authentication.k8s.io",
    "v1",
    "selfsubjectreviews",
    "SelfSubjectReview",
    namespaced=False,
    subresources=frozenset(),
)
NODE_CLAIMS: Final = Resource(
    "karpenter.sh",
    "v1",
    "nodeclaims",
    "NodeClaim",
    namespaced=False,
    has_generation=True,
    is_custom=True,
    has_own_field_labels=True,
    zero={"metadata": {}},
)
"""Karpenter's NodeClaims; served when given to the emulator as a custom resource."""

BUILT_IN: Final[tuple[Resource, ...]] = (
    NODES,
    PODS,
    NAMESPACES,
    EVENTS,
    PDBS,
    DAEMONSETS,
    DEPLOYMENTS,
    REPLICASETS,
    STATEFULSETS,
    JOBS,
    VOLUME_ATTACHMENTS,
    LEASES,
    ACCESS_REVIEWS,
    SELF_REVIEWS,
)

OWNER_RESOURCES: Final[Mapping[str, Resource]] = {
    resource.kind: resource
    for resource in (DAEMONSETS, DEPLOYMENTS, REPLICASETS, STATEFULSETS, JOBS)
}
"""Workload resources by the kind that owner references name."""


def field_value(obj: JsonObject, label: str) -> str:
    """Return the value that a field selector compares; absent fields are empty.

    `spec.unschedulable` is a boolean that is absent when false, and selects as `false`.
    """
    value: Any = obj
    for part in label.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if label in ("spec.unschedulable", "spec.hostNetwork"):
        return "true" if value else "false"
    if label == "source":
        return str((obj.get("source") or {}).get("component", ""))
    return "" if value is None else str(value)
