"""The node lifecycle controller, the taint manager and the garbage collector of pods."""

from collections.abc import Iterable
from typing import Final

from local.kubernetes import resources
from local.kubernetes.controllers.base import CONTROLLER_MANAGER, Controller
from local.kubernetes.objects import (
    JsonObject,
    condition_of,
    is_finished,
    is_ready,
    is_terminating,
    metadata,
    name_of,
    namespace_of,
    node_name_of,
    seconds_of,
    uid_of,
    with_condition,
    with_metadata,
    with_status,
)
from local.kubernetes.registry import DeleteOptions, Registry
from local.kubernetes.selectors import tolerates
from local.kubernetes.store import Change
from local.kubernetes.timings import Timings

_NOT_READY: Final = "node.kubernetes.io/not-ready"
_UNREACHABLE: Final = "node.kubernetes.io/unreachable"
_UNSCHEDULABLE: Final = "node.kubernetes.io/unschedulable"
_PRESSURE: Final = {
    "MemoryPressure": "node.kubernetes.io/memory-pressure",
    "DiskPressure": "node.kubernetes.io/disk-pressure",
    "PIDPressure": "node.kubernetes.io/pid-pressure",
    "NetworkUnavailable": "node.kubernetes.io/network-unavailable",
}
_OWN_KEYS: Final = frozenset({_NOT_READY, _UNREACHABLE, _UNSCHEDULABLE, *_PRESSURE.values()})
_TTL: Final = "node.alpha.kubernetes.io/ttl"


class NodeLifecycleController(Controller):
    """Turns what a node says, or that it says nothing, into taints and conditions."""

    name = "node-lifecycle"

    def __init__(self, registry: Registry, timings: Timings) -> None:
        super().__init__(registry, timings)
        self._silent_since: dict[str, float] = {}

    def set_silent(self, name: str, since: float | None) -> None:
        """Tell when the kubelet was last heard of; None: it is heard again."""
        if since is None:
            self._silent_since.pop(name, None)
        else:
            self._silent_since.setdefault(name, since)
            self.mark_at(name, self._silent_since[name] + self.timings.monitor_grace_s)

    def is_silent(self, name: str) -> bool:
        """Tell whether the node's kubelet has been told to be silent."""
        return name in self._silent_since

    def notice(self, change: Change) -> None:
        """Nodes are looked at when they change."""
        if change.resource == resources.NODES:
            if change.new is None:
                self._silent_since.pop(change.key, None)
            else:
                self.mark(change.key)

    def reconcile(self, key: str) -> None:
        """Bring conditions and taints of one node, and the readiness of its pods, up to date."""
        node = self.store.get(resources.NODES, "", key)
        if node is None:
            return
        since = self._silent_since.get(key)
        if since is not None and self.registry.clock() >= since + self.timings.monitor_grace_s:
            node = self._with_unknown_conditions(node)
        node = taint_node(self.registry, node, "NoSchedule")
        if condition_of(node, "Ready") is not None and not is_ready(node):
            self._mark_pods_not_ready(key)

    def _with_unknown_conditions(self, node: JsonObject) -> JsonObject:
        changed = node
        for condition in (node.get("status") or {}).get("conditions") or ():
            if condition["status"] != "Unknown":
                unknown = {
                    **condition,
                    "status": "Unknown",
                    "lastTransitionTime": self.registry.now(),
                    "reason": "NodeStatusUnknown",
                    "message": "Kubelet stopped posting node status.",
                }
                changed = with_condition(changed, unknown)
        if changed is node:
            return node
        return self.registry.set_status(
            resources.NODES, node, lambda _old: changed, manager=CONTROLLER_MANAGER
        )

    def _mark_pods_not_ready(self, node_name: str) -> None:
        now = self.registry.now()
        for pod in self.store.find(resources.PODS, "node", node_name):
            ready = condition_of(pod, "Ready")
            if ready is None or ready["status"] != "True":
                continue
            self._post(with_condition(pod, {**ready, "status": "False", "lastTransitionTime": now}))

    def _post(self, pod: JsonObject) -> None:
        self.registry.set_status(resources.PODS, pod, lambda _old: pod, manager=CONTROLLER_MANAGER)


class NoExecuteTainter(Controller):
    """Adds the NoExecute taints of a node that is not ready, a pass later than NoSchedule."""

    name = "node-no-execute"

    def notice(self, change: Change) -> None:
        """Nodes are looked at when they change."""
        if change.resource == resources.NODES and change.new is not None:
            self.mark(change.key)

    def reconcile(self, key: str) -> None:
        """Bring the NoExecute taints of one node up to date."""
        node = self.store.get(resources.NODES, "", key)
        if node is not None:
            taint_node(self.registry, node, "NoExecute")


def taint_node(registry: Registry, node: JsonObject, effect: str) -> JsonObject:
    """Write the automatic taints with that effect; all other taints stay as they are."""
    wanted = [pair for pair in _wanted_taints(node) if pair[1] == effect]
    present: list[JsonObject] = list((node.get("spec") or {}).get("taints") or ())
    kept = [
        taint
        for taint in present
        if taint["key"] not in _OWN_KEYS or taint["effect"] != effect or _pair(taint) in wanted
    ]
    known = {_pair(taint) for taint in kept}
    now = registry.now()
    added = [
        {"key": key, "effect": effect, "timeAdded": now}
        for key, effect in wanted
        if (key, effect) not in known
    ]
    annotations = metadata(node).get("annotations") or {}
    if kept + added == present and _TTL in annotations:
        return node

    def changed(old: JsonObject) -> JsonObject:
        spec = {**old["spec"], "taints": kept + added}
        return with_metadata({**old, "spec": spec}, annotations={**annotations, _TTL: "0"})

    return registry.set_spec(resources.NODES, node, changed, manager=CONTROLLER_MANAGER)


def _pair(taint: JsonObject) -> tuple[str, str]:
    return (taint["key"], taint["effect"])


def _wanted_taints(node: JsonObject) -> Iterable[tuple[str, str]]:
    for kind, key in _PRESSURE.items():
        condition = condition_of(node, kind)
        if condition is not None and condition["status"] == "True":
            yield (key, "NoSchedule")
    ready = condition_of(node, "Ready")
    status = "True" if ready is None else ready["status"]
    if status != "True":
        key = _NOT_READY if status == "False" else _UNREACHABLE
        yield (key, "NoSchedule")
        yield (key, "NoExecute")
    if (node.get("spec") or {}).get("unschedulable"):
        yield (_UNSCHEDULABLE, "NoSchedule")


class TaintManager(Controller):
    """Deletes pods that do not tolerate a NoExecute taint of their node, budgets or not."""

    name = "taint-eviction"

    def notice(self, change: Change) -> None:
        """A node's taints concern all its pods."""
        if change.resource == resources.NODES and change.new is not None:
            self.mark(change.key)
        elif change.resource == resources.PODS and change.new is not None:
            node = node_name_of(change.new)
            if node and (change.old is None or node_name_of(change.old) != node):
                self.mark(node)

    def reconcile(self, key: str) -> None:
        """Delete what is due on one node, and note when the next is."""
        node = self.store.get(resources.NODES, "", key)
        taints = [
            taint
            for taint in ((node or {}).get("spec") or {}).get("taints") or ()
            if taint["effect"] == "NoExecute"
        ]
        if not taints:
            return
        now = self.registry.clock()
        for pod in self.store.find(resources.PODS, "node", key):
            if is_terminating(pod) or is_finished(pod):
                continue
            due = _tolerated_until(pod, taints, now)
            if due is not None and due <= now:
                self._delete(pod)
            elif due is not None:
                self.mark_at(key, due)

    def _delete(self, pod: JsonObject) -> None:
        generation = metadata(pod).get("generation", 1)
        self.registry.mark_disrupted(
            pod,
            "DeletionByTaintManager",
            "Taint manager: deleting due to NoExecute taint",
            observedGeneration=generation,
        )
        self.registry.delete(
            resources.PODS, namespace_of(pod), name_of(pod), DeleteOptions(uid=uid_of(pod))
        )


def _tolerated_until(pod: JsonObject, taints: list[JsonObject], now: float) -> float | None:
    """Return when the pod must go: now if a taint is not tolerated, None if all are for ever."""
    ends: list[float] = []
    for taint in taints:
        toleration = tolerates((pod.get("spec") or {}).get("tolerations"), taint)
        if toleration is None:
            return now
        seconds = toleration.get("tolerationSeconds")
        if seconds is not None:
            added = taint.get("timeAdded")
            ends.append((seconds_of(added) if added else now) + seconds)
    return min(ends, default=None)


class PodGarbageCollector(Controller):
    """Removes the pods of nodes that are gone."""

    name = "pod-garbage-collector"

    def __init__(self, registry: Registry, timings: Timings) -> None:
        super().__init__(registry, timings)
        self._gone_since: dict[str, float] = {}

    def notice(self, change: Change) -> None:
        """A node that goes leaves its pods behind for a while."""
        if change.resource != resources.NODES:
            return
        if change.new is not None:
            self._gone_since.pop(change.key, None)
        else:
            self._gone_since[change.key] = self.registry.clock()
            self.mark_at(change.key, self._gone_since[change.key] + self.timings.orphan_s)

    def reconcile(self, key: str) -> None:
        """Remove the pods of one node."""
        since = self._gone_since.get(key)
        if since is None:
            return
        if self.registry.clock() < since + self.timings.orphan_s:
            self.mark_at(key, since + self.timings.orphan_s)
            return
        del self._gone_since[key]
        for pod in self.store.find(resources.PODS, "node", key):
            self.remove(pod)

    def remove(self, pod: JsonObject) -> None:
        """Mark a pod as failed and disrupted, then remove it."""
        if not is_finished(pod):
            pod = self.registry.mark_disrupted(
                with_status(pod, phase="Failed"),
                "DeletionByPodGC",
                "PodGC: node no longer exists",
                observedGeneration=metadata(pod).get("generation", 1),
            )
        self.registry.delete(
            resources.PODS,
            namespace_of(pod),
            name_of(pod),
            DeleteOptions(grace_s=0, uid=uid_of(pod)),
        )
