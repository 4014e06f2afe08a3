"""What kind of capacity a node is, and the facts of its Auto Scaling group."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from nodemend.domain.faults import Rung
from nodemend.domain.nodes import COMPUTE_TYPE_LABEL, MANAGED_NODE_GROUP_LABEL, Node
from nodemend.domain.reasons import Reason


class CapacityKind(StrEnum):
    """Kinds of node capacity on EKS, in the order in which they are told apart."""

    HYPERPOD = "hyperpod"
    AUTO_MODE = "auto_mode"
    KARPENTER = "karpenter"
    MANAGED_NODE_GROUP = "managed_node_group"
    AUTO_SCALING_GROUP = "auto_scaling_group"
    STATIC = "static"
    FARGATE = "fargate"
    HYBRID = "hybrid"


IN_SERVICE = "InService"
"""The only lifecycle state in which an instance is the group's to keep; any other means that
someone else is acting on it."""

_LEAVING = ("Terminating", "Terminated", "Detaching", "Detached")


@dataclass(frozen=True, slots=True)
class AutoScalingGroup:
    """A group as DescribeAutoScalingGroups shows it."""

    name: str
    desired: int
    min_size: int
    max_size: int
    instances: Mapping[str, str] = field(default_factory=dict)
    """Lifecycle state by instance id."""
    suspended: frozenset[str] = frozenset()
    tags: Mapping[str, str] = field(default_factory=dict)
    has_gpus: bool = False
    """The group itself says that its nodes have GPUs, also while it has none at all."""

    def is_leaving(self, instance_id: str) -> bool:
        """True if the instance is being terminated or is no member any more."""
        state = self.instances.get(instance_id, "")
        return not state or state.startswith(_LEAVING)

    def newcomers(self, before: frozenset[str]) -> tuple[str, ...]:
        """Return in-service instances that were no members before, in order of their ids.

        Launch times are whole seconds and do not decide; membership before the call does.
        """
        return tuple(
            sorted(
                instance_id
                for instance_id, state in self.instances.items()
                if state == IN_SERVICE and instance_id not in before
            )
        )


def kind_of(node: Node, *, is_in_group: bool) -> CapacityKind:
    """Tell the kind from the node's labels and from whether an Auto Scaling group has it."""
    labels = node.labels
    compute_type = labels.get(COMPUTE_TYPE_LABEL, "")
    if labels.get("sagemaker.amazonaws.com/compute-type") == "hyperpod":
        return CapacityKind.HYPERPOD
    if compute_type == "auto":
        return CapacityKind.AUTO_MODE
    if "karpenter.sh/nodepool" in labels:
        return CapacityKind.KARPENTER
    if compute_type in ("fargate", "hybrid"):
        return CapacityKind(compute_type)
    if MANAGED_NODE_GROUP_LABEL in labels:
        return CapacityKind.MANAGED_NODE_GROUP
    return CapacityKind.AUTO_SCALING_GROUP if is_in_group else CapacityKind.STATIC


_IN_A_GROUP = (CapacityKind.MANAGED_NODE_GROUP, CapacityKind.AUTO_SCALING_GROUP)


def why_not_rebootable(
    node: Node, kind: CapacityKind, group: AutoScalingGroup | None
) -> Reason | None:
    """Return why a reboot cannot work here, or cannot be proven, or None if it can.

    A reboot keeps the host and the slot, so that also an instance in no group can have one. What
    other controllers own (Karpenter, Auto Mode, HyperPod) is theirs to reboot.
    """
    if kind not in (*_IN_A_GROUP, CapacityKind.STATIC):
        return Reason(
            "capacity_kind_unsupported",
            f"{node.ref.name} is {kind} capacity, which this version cannot reboot",
        )
    if not node.ref.boot_id:
        return Reason(
            "boot_id_unknown",
            f"{node.ref.name} reports no boot id, so that a reboot could not be proven",
        )
    if group is None:
        return None
    return _why_not_in_service(node, group)


def _why_not_in_service(node: Node, group: AutoScalingGroup) -> Reason | None:
    state = group.instances.get(node.ref.instance_id, "absent")
    if state == IN_SERVICE:
        return None
    return Reason(
        "other_remediator",
        f"instance {node.ref.instance_id} is {state} in {group.name}: someone else is acting",
    )


def why_not_replaceable(
    node: Node, kind: CapacityKind, group: AutoScalingGroup | None
) -> Reason | None:
    """Return why a replacement cannot work here, or None if it can.

    Asked before the cordon and again directly before the call, so that no node is drained that
    cannot be replaced then.
    """
    if kind not in _IN_A_GROUP:
        return Reason(
            "capacity_kind_unsupported",
            f"{node.ref.name} is {kind} capacity, which this version cannot replace",
        )
    if group is None:
        return Reason("group_unknown", f"no Auto Scaling group has instance {node.ref.instance_id}")
    blocking = sorted(group.suspended & {"Launch", "Terminate"})
    if blocking:
        return Reason(
            "asg_suspended",
            f"group {group.name} has {' and '.join(blocking)} suspended: a terminated instance "
            "would not be replaced",
        )
    return _why_not_in_service(node, group)


_WHY_NOT = {Rung.REBOOT: why_not_rebootable, Rung.REPLACE: why_not_replaceable}
REPAIRS = frozenset(_WHY_NOT)
"""The rungs that do something to the machine."""


def why_not_repairable(rung: Rung, node: Node, group: AutoScalingGroup | None) -> Reason | None:
    """Return why one of `REPAIRS` cannot work on a node of this group, or None if it can."""
    return _WHY_NOT[rung](node, kind_of(node, is_in_group=group is not None), group)
