"""The fleet at one moment: nodes, groups, and who is out of service."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from nodemend.domain.capacity import AutoScalingGroup
from nodemend.domain.nodes import Node


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """The cluster's GPU nodes and their groups at one moment."""

    at: datetime
    nodes: tuple[Node, ...]
    groups: Mapping[str, AutoScalingGroup] = field(default_factory=dict)
    group_by_instance: Mapping[str, str] = field(default_factory=dict)

    def node(self, uid: str) -> Node | None:
        """Return a node by UID."""
        return next((node for node in self.nodes if node.ref.uid == uid), None)

    def group_name(self, node: Node) -> str:
        """Return the Auto Scaling group that has the node, or an empty string."""
        return self.group_by_instance.get(node.ref.instance_id, "")

    def desired(self, group: str | None = None) -> int:
        """Return how many nodes there should be, in the cluster or in one group.

        Desired capacity, not registered nodes: deleted nodes must not shrink the denominator.
        Nodes outside any group count one each.
        """
        if group:
            return self.groups[group].desired if group in self.groups else 0
        loose = sum(1 for node in self.nodes if not self.group_name(node))
        relevant = self.groups_with_gpus()
        return loose + sum(self.groups[name].desired for name in relevant if name in self.groups)

    def groups_with_gpus(self) -> frozenset[str]:
        """Return the groups that have GPU nodes here, or say that they should.

        The cluster's other groups do not count. A group that has lost its last node must: what it
        lacks is unavailable.
        """
        told = {name for name, group in self.groups.items() if group.has_gpus}
        return frozenset(self.group_name(node) for node in self.nodes) - {""} | told

    @staticmethod
    def expected_uuids(node: Node, by_instance_type: Mapping[str, int]) -> int:
        """Return how many physical GPUs the node's exporter should report, at least one."""
        return by_instance_type.get(node.instance_type, 0) or max(1, node.gpu_capacity)

    def expected_gpus(self, node: Node, by_instance_type: Mapping[str, int]) -> int:
        """Return how many GPUs the node should offer to pods.

        As many as any node of its type does, which respects MIG and time slicing (0 is possible
        then); where it is the only one, its own capacity or the table's number.
        """
        of_type = [other for other in self.nodes if other.instance_type == node.instance_type]
        offered = max((other.gpu_capacity for other in of_type), default=node.gpu_capacity)
        if any(other.ref.uid != node.ref.uid for other in of_type):
            return offered
        return offered or by_instance_type.get(node.instance_type, 0)


class FleetView:
    """A snapshot with what a decision asks of it again and again, made and used within one.

    So 2,000 waiters cost no more than a few looks at 2,000 nodes.

    Args:
        snapshot: the fleet.
        held: UID, name and group of each node that an incident holds.
    """

    def __init__(self, snapshot: FleetSnapshot, held: Iterable[tuple[str, str, str]]) -> None:
        self.snapshot = snapshot
        held = tuple(held)
        self._nodes = {node.ref.uid: node for node in snapshot.nodes}
        self.uid_by_name: Mapping[str, str] = {
            name: node.ref.uid
            for node in snapshot.nodes
            for name in (node.ref.instance_id, node.ref.name)
        }
        self._out: dict[str, tuple[str, str]] = {
            node.ref.uid: (node.ref.name, snapshot.group_name(node))
            for node in snapshot.nodes
            if is_unavailable(node)
        }
        self._held = {uid for uid, _, _ in held}
        self._out.update((uid, (name, group)) for uid, name, group in held)
        self._counts = Counter(group for _, group in self._out.values())
        self._missing = self._gaps(held)
        self._offered: dict[str, int] = {}
        for node in snapshot.nodes:
            most = self._offered.get(node.instance_type, 0)
            self._offered[node.instance_type] = max(most, node.gpu_capacity)
        self._desired: dict[str | None, int] = {}
        self._listed: dict[str | None, list[tuple[str, str]]] = {}

    def _gaps(self, held: Iterable[tuple[str, str, str]]) -> Mapping[str, int]:
        """Return how many nodes each group lacks: launching, or impossible to get.

        A node that should be there and is not counts as unavailable: without it a group that
        cannot launch would be taken apart node by node. The slot of a node that has gone stands
        for its own gap already.
        """
        registered = Counter(self.snapshot.group_name(node) for node in self._nodes.values())
        gone = Counter(group for uid, _, group in held if uid not in self._nodes)
        return {
            name: max(0, self.snapshot.desired(name) - registered[name] - gone[name])
            for name in self.snapshot.groups_with_gpus()
        }

    def missing(self, group: str | None) -> int:
        """Return how many nodes are not registered that should be, and that no slot stands for."""
        return sum(self._missing.values()) if group is None else self._missing.get(group, 0)

    @property
    def uids(self) -> frozenset[str]:
        """UIDs of the nodes that are there."""
        return frozenset(self._nodes)

    def node(self, uid: str) -> Node | None:
        """Return a node by UID."""
        return self._nodes.get(uid)

    def offered(self, node: Node) -> int:
        """Return how many GPUs the nodes of this node's instance type offer at most."""
        return self._offered[node.instance_type]

    def members(self, group: str) -> frozenset[str]:
        """Return the UIDs of a group's nodes."""
        nodes = self._nodes.values()
        return frozenset(n.ref.uid for n in nodes if self.snapshot.group_name(n) == group)

    def desired(self, group: str | None) -> int:
        """Return how many nodes there should be, as `FleetSnapshot.desired` does."""
        if group not in self._desired:
            self._desired[group] = self.snapshot.desired(group)
        return self._desired[group]

    def take(self, node: Node, group: str) -> None:
        """Count a node that has just been given a slot."""
        if node.ref.uid not in self._out:
            self._counts[group] += 1
            self._listed.clear()
        self._out[node.ref.uid] = (node.ref.name, group)

    def count_out(self, group: str | None, *, besides: Node) -> int:
        """Return how many nodes are out of service; a candidate never counts against itself."""
        total = len(self._out) if group is None else self._counts[group]
        own = self._out.get(besides.ref.uid)
        is_own = own is not None and group in (None, own[1])
        return total - is_own + self.missing(group)

    def names_out(self, group: str | None, *, besides: Node) -> list[str]:
        """Return the first six names, sorted: one more than is told."""
        if group not in self._listed:
            self._listed[group] = sorted(
                (name, uid) for uid, (name, own) in self._out.items() if group in (None, own)
            )
        first = self._listed[group][:7]
        gaps = [
            f"(missing in {name})"
            for name in sorted(self._missing)
            if group in (None, name)
            for _ in range(self._missing[name])
        ]
        return [*(name for name, uid in first if uid != besides.ref.uid), *gaps][:6]

    def not_ready(self, now: datetime, *, grace: timedelta, group: str | None = None) -> list[str]:
        """Return nodes that are down, but for those that start, leave, or are in somebody's hands.

        A network blip does not cordon: who cordoned a node knows of it, and the budget counts it.
        """
        return [
            node.ref.name
            for node in self._nodes.values()
            if not node.is_ready
            and group in (None, self.snapshot.group_name(node))
            and not node.is_deleting
            and not node.is_unschedulable
            and node.ref.uid not in self._held
            and (node.created_at is None or now - node.created_at >= grace)
        ]


def is_unavailable(node: Node) -> bool:
    """Tell whether a node is out of service, whoever took it out."""
    return node.is_unschedulable or not node.is_ready or node.is_deleting
