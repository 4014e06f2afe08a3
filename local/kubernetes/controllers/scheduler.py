"""The scheduler: binds Pending pods to nodes with room.

It knows cordons, taints, node selectors, required node affinity, extended resources
(`nvidia.com/gpu`, …) and the number of pods of a node; cpu and memory it takes as plentiful.
Among the nodes that fit it takes the one with the fewest GPUs in use, then the first by name.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from local.kubernetes import resources
from local.kubernetes.controllers.base import Controller
from local.kubernetes.controllers.workloads import daemon_node
from local.kubernetes.defaults import with_topology
from local.kubernetes.objects import (
    JsonObject,
    condition_of,
    is_finished,
    is_terminating,
    labels_of,
    metadata,
    name_of,
    node_name_of,
    uid_of,
    with_condition,
)
from local.kubernetes.registry import Registry
from local.kubernetes.selectors import match_labels, tolerates
from local.kubernetes.store import Change
from local.kubernetes.timings import Timings

_ALL: Final = "all"
_UNSCHEDULABLE_TAINT: Final = {
    "key": "node.kubernetes.io/unschedulable",
    "effect": "NoSchedule",
}


class Scheduler(Controller):
    """Looks at all unbound pods whenever something that matters to them changes."""

    name = "scheduler"

    def __init__(self, registry: Registry, timings: Timings) -> None:
        super().__init__(registry, timings)
        self._pending: dict[str, str] = {}
        self._pins: dict[str, list[str]] = {}

    def pin(self, owner_uid: str, nodes: Iterable[str]) -> None:
        """Bind the next pods of an owner to these nodes, in this order, fit or not."""
        self._pins[owner_uid] = list(nodes)

    def notice(self, change: Change) -> None:
        """Unbound pods come in; room appears when pods go or nodes change."""
        if change.resource == resources.PODS:
            pod = change.new
            if pod is not None and not node_name_of(pod) and not is_finished(pod):
                self._pending[change.key] = uid_of(pod)
                if change.old is None:
                    self.mark(_ALL)
                return
            self._pending.pop(change.key, None)
            if self._pending and (pod is None or is_finished(pod)):
                self.mark(_ALL)
        elif change.resource == resources.NODES and self._pending and _matters(change):
            self.mark(_ALL)

    def reconcile(self, key: str) -> None:
        """Bind what fits."""
        del key
        if not self._pending:
            return
        room = _Room(
            self.store.all(resources.NODES),
            [pod for pod in self.store.all(resources.PODS) if node_name_of(pod)],
        )
        for pod_key in sorted(self._pending, key=self._order):
            namespace, _, name = pod_key.partition("/")
            pod = self.store.get(resources.PODS, namespace, name)
            if pod is None or is_terminating(pod) or pod["spec"].get("schedulingGates"):
                continue
            node = self._pinned(pod) or room.best_for(pod)
            if node is None:
                self._refuse(pod, room)
            else:
                room.take(node, pod)
                self.bind(pod, node)

    def _order(self, pod_key: str) -> tuple[str, str]:
        namespace, _, name = pod_key.partition("/")
        pod = self.store.get(resources.PODS, namespace, name)
        return (str(metadata(pod or {}).get("creationTimestamp", "")), pod_key)

    def _pinned(self, pod: JsonObject) -> str | None:
        for reference in metadata(pod).get("ownerReferences") or ():
            nodes = self._pins.get(reference["uid"])
            if nodes:
                return nodes.pop(0)
        return None

    def bind(self, pod: JsonObject, node_name: str) -> JsonObject:
        """Bind a pod, as the binding subresource does: no manager owns `spec.nodeName`."""
        bound = {**pod, "spec": {**pod["spec"], "nodeName": node_name}}
        bound = with_topology(bound, self.store.get(resources.NODES, "", node_name))
        condition = {
            "type": "PodScheduled",
            "status": "True",
            "lastProbeTime": None,
            "lastTransitionTime": self.registry.now(),
        }
        return self.store.put(resources.PODS, with_condition(bound, condition))

    def _refuse(self, pod: JsonObject, room: "_Room") -> None:
        condition = condition_of(pod, "PodScheduled")
        if condition is not None and condition["status"] == "False":
            return
        self.store.put(
            resources.PODS,
            with_condition(
                pod,
                {
                    "type": "PodScheduled",
                    "observedGeneration": metadata(pod).get("generation", 1),
                    "status": "False",
                    "lastProbeTime": None,
                    "lastTransitionTime": self.registry.now(),
                    "reason": "Unschedulable",
                    "message": room.why_not(pod),
                },
            ),
        )


class _Room:
    """What is left on each node."""

    def __init__(self, nodes: list[JsonObject], bound: list[JsonObject]) -> None:
        self._nodes = {name_of(node): node for node in nodes}
        self._used: dict[str, dict[str, int]] = {name: {} for name in self._nodes}
        for pod in bound:
            if not is_finished(pod):
                self.take(node_name_of(pod), pod)

    def take(self, node_name: str, pod: JsonObject) -> None:
        used = self._used.setdefault(node_name, {})
        for resource, amount in _requests(pod).items():
            used[resource] = used.get(resource, 0) + amount

    def best_for(self, pod: JsonObject) -> str | None:
        wanted = _requests(pod)
        only = daemon_node(pod)
        names = [only] if only else self._nodes
        fitting = [
            name
            for name in names
            if (node := self._nodes.get(name)) is not None
            and _accepts(node, pod)
            and self._has(name, wanted)
        ]
        return min(
            fitting,
            key=lambda name: (self._used[name].get("nvidia.com/gpu", 0), name),
            default=None,
        )

    def why_not(self, pod: JsonObject) -> str:
        wanted = _requests(pod)
        full = sum(
            _accepts(node, pod) and not self._has(name, wanted)
            for name, node in self._nodes.items()
        )
        refused = sum(not _accepts(node, pod) for node in self._nodes.values())
        parts = []
        if full:
            parts.append(f"{full} Insufficient nvidia.com/gpu")
        if refused:
            parts.append(f"{refused} node(s) had untolerated taint(s)")
        count = len(self._nodes)
        return (
            f"0/{count} nodes are available: {', '.join(parts)}. no new claims to deallocate, "
            f"preemption: 0/{count} nodes are available: {count} Preemption is not helpful for "
            "scheduling."
        )

    def _has(self, name: str, wanted: Mapping[str, int]) -> bool:
        allocatable = (self._nodes[name].get("status") or {}).get("allocatable") or {}
        used = self._used[name]
        return all(
            used.get(resource, 0) + amount <= int(allocatable.get(resource, 0))
            for resource, amount in wanted.items()
        )


def _requests(pod: JsonObject) -> dict[str, int]:
    wanted = {"pods": 1}
    for container in pod["spec"].get("containers") or ():
        requests = (container.get("resources") or {}).get("requests") or {}
        for name, quantity in requests.items():
            if "/" in name:
                wanted[name] = wanted.get(name, 0) + int(quantity)
    return wanted


def _accepts(node: JsonObject, pod: JsonObject) -> bool:
    spec = pod["spec"]
    labels = labels_of(node)
    if any(labels.get(k) != v for k, v in (spec.get("nodeSelector") or {}).items()):
        return False
    taints = list((node.get("spec") or {}).get("taints") or ())
    if (node.get("spec") or {}).get("unschedulable"):
        taints.append(_UNSCHEDULABLE_TAINT)
    tolerations = spec.get("tolerations")
    if any(
        taint["effect"] != "PreferNoSchedule" and tolerates(tolerations, taint) is None
        for taint in taints
    ):
        return False
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if required is None:
        return True
    return any(_term_holds(term, node) for term in required.get("nodeSelectorTerms") or ())


def _term_holds(term: JsonObject, node: JsonObject) -> bool:
    fields = {"metadata.name": name_of(node)}
    return match_labels({"matchExpressions": term.get("matchExpressions")})(
        labels_of(node)
    ) and match_labels({"matchExpressions": term.get("matchFields")})(fields)


def _matters(change: Change) -> bool:
    if change.old is None or change.new is None:
        return change.new is not None
    return (
        change.old.get("spec") != change.new.get("spec")
        or labels_of(change.old) != labels_of(change.new)
        or (change.old.get("status") or {}).get("allocatable")
        != (change.new.get("status") or {}).get("allocatable")
    )
