"""Nodes and who they are.

A node's name is no identity: AWS hands out private addresses, and so node names, again within
minutes. A `NodeRef` carries what tells two machines of one name apart.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum

GPU_RESOURCE = "nvidia.com/gpu"
INSTANCE_TYPE_LABEL = "node.kubernetes.io/instance-type"
MANAGED_NODE_GROUP_LABEL = "eks.amazonaws.com/nodegroup"
COMPUTE_TYPE_LABEL = "eks.amazonaws.com/compute-type"

OWNER_ANNOTATION = "nodemend/incident"
"""Whose cordon it is: the incident id, and what `spec.unschedulable` was before, in JSON."""
SCALE_DOWN_DISABLED_ANNOTATION = "cluster-autoscaler.kubernetes.io/scale-down-disabled"
REMEDIATION_TAINT_KEY = "nodemend/remediation"

_INSTANCE_ID = re.compile(r"^i-[0-9a-f]{8,17}$")


@dataclass(frozen=True, slots=True)
class NodeRef:
    """One machine under one node name.

    `boot_id` changes with every boot; it is the only field that may differ for the same machine.
    """

    cluster: str
    name: str
    uid: str = ""
    instance_id: str = ""
    boot_id: str = ""

    def is_same_machine(self, other: "NodeRef") -> bool:
        """Tell whether both mean the same Node object on the same instance, whatever the boot."""
        return (self.cluster, self.name, self.uid, self.instance_id) == (
            other.cluster,
            other.name,
            other.uid,
            other.instance_id,
        )

    def is_named_by(self, names: Collection[str]) -> bool:
        """Tell whether labels that may name a node name this one, exactly."""
        return any(name and name in names for name in (self.name, self.instance_id))


class Readiness(StrEnum):
    """The node's Ready condition."""

    READY = "True"
    NOT_READY = "False"
    UNKNOWN = "Unknown"
    """The node controller has not heard from the kubelet: nothing on the node confirms anything."""


class TaintEffect(StrEnum):
    """What a taint does to pods that do not tolerate it."""

    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


@dataclass(frozen=True, slots=True)
class Taint:
    """One entry of `spec.taints`; `time_added` is kept so that a patch can test the exact list."""

    key: str
    effect: str
    value: str | None = None
    time_added: str | None = None

    def as_json(self) -> dict[str, str]:
        """Return the taint as the API writes it, absent fields left out."""
        fields = {
            "key": self.key,
            "value": self.value,
            "effect": self.effect,
            "timeAdded": self.time_added,
        }
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Node:
    """What the Kubernetes API says of a node at one moment."""

    ref: NodeRef
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    is_unschedulable: bool = False
    readiness: Readiness = Readiness.READY
    heartbeat_at: datetime | None = None
    created_at: datetime | None = None
    is_deleting: bool = False
    gpu_capacity: int = 0
    gpu_allocatable: int = 0
    resource_version: str = ""

    @property
    def instance_type(self) -> str:
        """The EC2 instance type, or an empty string where the label is missing."""
        return self.labels.get(INSTANCE_TYPE_LABEL, "")

    @property
    def is_ready(self) -> bool:
        """True only if the kubelet says so; Unknown is not ready."""
        return self.readiness is Readiness.READY

    @property
    def owner(self) -> str | None:
        """The raw ownership annotation, if nodemend cordoned this node."""
        return self.annotations.get(OWNER_ANNOTATION)

    def with_cluster(self, cluster: str) -> "Node":
        """Return the same node under another cluster name."""
        return replace(self, ref=replace(self.ref, cluster=cluster))


def instance_id_of(provider_id: str | None) -> str:
    """Return the EC2 instance id in `spec.providerID`, or an empty string.

    Fargate and hybrid nodes have ids of other forms and are never repaired.

    Example:
        >>> instance_id_of("aws:///us-east-1a/i-0aaaaaaaaaaaaaaa1")
        'i-0aaaaaaaaaaaaaaa1'
        >>> instance_id_of("aws:///us-east-1a/fargate-ip-10-0-1-5.ec2.internal")
        ''
    """
    last = (provider_id or "").rsplit("/", 1)[-1]
    return last if _INSTANCE_ID.match(last) else ""


def is_instance_id(text: str) -> bool:
    """Tell whether the text has the form of an EC2 instance id."""
    return bool(_INSTANCE_ID.match(text))
