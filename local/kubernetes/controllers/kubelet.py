"""The kubelets of the nodes that the emulator was given by `add_node`.

Nodes that somebody registers over HTTP have no kubelet here: whoever does that plays it, too.
"""

from typing import Final

from local.kubernetes import resources
from local.kubernetes.controllers.base import Controller
from local.kubernetes.controllers.nodes import NodeLifecycleController
from local.kubernetes.objects import (
    JsonObject,
    JsonValue,
    condition_of,
    is_finished,
    is_ready,
    is_terminating,
    metadata,
    name_of,
    namespace_of,
    node_name_of,
    phase_of,
    seconds_of,
    uid_of,
    with_condition,
    with_status,
)
from local.kubernetes.registry import DeleteOptions, Registry
from local.kubernetes.store import Change
from local.kubernetes.timings import Timings

KUBELET: Final = "kubelet"
_HEARTBEAT: Final = "heartbeat|"
_MIRROR: Final = "mirror|"
_POD_CONDITIONS: Final = (
    "PodReadyToStartContainers",
    "Initialized",
    "Ready",
    "ContainersReady",
    "PodScheduled",
)


class Kubelets(Controller):
    """Starts and ends pods, and posts the status of the nodes."""

    name = "kubelet"

    def __init__(
        self, lifecycle: NodeLifecycleController, registry: Registry, timings: Timings
    ) -> None:
        super().__init__(registry, timings)
        self._lifecycle = lifecycle
        self._nodes: set[str] = set()
        self._bound_at: dict[str, float] = {}
        self._static_pods: dict[str, JsonObject] = {}

    def adopt(self, node_name: str) -> None:
        """Run a kubelet for the node from now on."""
        self._nodes.add(node_name)
        self.catch_up(node_name)
        self.mark_at(_HEARTBEAT + node_name, self.registry.clock() + self.timings.heartbeat_s)

    def add_static_pod(self, pod: JsonObject) -> None:
        """Keep a mirror pod in the API: a kubelet makes it again when it is deleted."""
        self._static_pods[f"{namespace_of(pod)}/{name_of(pod)}"] = pod

    def runs(self, node_name: str) -> bool:
        """Tell whether the node has a kubelet here that is not silent."""
        return node_name in self._nodes and not self._lifecycle.is_silent(node_name)

    def catch_up(self, node_name: str) -> None:
        """Look at all pods of a node whose kubelet is heard again."""
        for pod in self.store.find(resources.PODS, "node", node_name):
            self.mark(f"{namespace_of(pod)}/{name_of(pod)}")

    def notice(self, change: Change) -> None:
        """Pods of the own nodes; nodes that go take their kubelet along."""
        if change.resource == resources.NODES and change.new is None:
            self._nodes.discard(change.key)
            for key in [k for k, p in self._static_pods.items() if node_name_of(p) == change.key]:
                del self._static_pods[key]
        elif change.resource == resources.NODES and self._has_recovered(change):
            self.catch_up(change.key)
        if change.resource != resources.PODS or node_name_of(change.latest) not in self._nodes:
            return
        if change.new is None:
            self._bound_at.pop(uid_of(change.latest), None)
            if change.key in self._static_pods:
                self.mark(_MIRROR + change.key)
            return
        self._bound_at.setdefault(uid_of(change.new), self.registry.clock())
        self.mark(change.key)

    def _has_recovered(self, change: Change) -> bool:
        return (
            change.key in self._nodes
            and change.old is not None
            and is_ready(change.latest)
            and not is_ready(change.old)
        )

    def reconcile(self, key: str) -> None:
        """Do what is due for one pod or node."""
        if key.startswith(_HEARTBEAT):
            self._heartbeat(key.removeprefix(_HEARTBEAT))
        elif key.startswith(_MIRROR):
            self._restore_static_pod(key.removeprefix(_MIRROR))
        else:
            namespace, _, name = key.partition("/")
            pod = self.store.get(resources.PODS, namespace, name)
            if pod is not None and self.runs(node_name_of(pod)):
                self._reconcile_pod(key, pod)

    def _reconcile_pod(self, key: str, pod: JsonObject) -> None:
        if is_terminating(pod):
            self._terminate(key, pod)
        elif phase_of(pod) == "Pending":
            bound_at = self._bound_at.setdefault(uid_of(pod), self.registry.clock())
            starts = bound_at + self.timings.start_s
            if starts > self.registry.clock():
                self.mark_at(key, starts)
            else:
                self.start_pod(pod)
        elif phase_of(pod) == "Running" and self._lost_readiness(pod):
            self.set_pod_ready(pod, ready=True)

    def _lost_readiness(self, pod: JsonObject) -> bool:
        """The control plane marked the pod while the node was away, and the node is back."""
        ready = condition_of(pod, "Ready")
        containers = condition_of(pod, "ContainersReady")
        node = self.store.get(resources.NODES, "", node_name_of(pod))
        return (
            node is not None
            and is_ready(node)
            and ready is not None
            and ready["status"] == "False"
            and containers is not None
            and containers["status"] == "True"
        )

    def _terminate(self, key: str, pod: JsonObject) -> None:
        meta = metadata(pod)
        grace_s = float(meta.get("deletionGracePeriodSeconds", 0))
        if grace_s == 0:
            return  # confirmed already; only a finalizer holds it
        limit_s = self.timings.termination_s
        takes_s = grace_s if limit_s is None else min(grace_s, limit_s)
        ends = seconds_of(meta["deletionTimestamp"]) - grace_s + takes_s
        if ends > self.registry.clock():
            self.mark_at(key, ends)
            return
        if not is_finished(pod) and meta.get("finalizers"):
            pod = self.finish_pod(pod, "Failed")
        self.registry.delete(
            resources.PODS,
            namespace_of(pod),
            name_of(pod),
            DeleteOptions(grace_s=0, uid=uid_of(pod)),
        )

    def _restore_static_pod(self, key: str) -> None:
        pod = self._static_pods.get(key)
        namespace, _, name = key.partition("/")
        if pod is None or self.store.get(resources.PODS, namespace, name) is not None:
            return
        if self.runs(node_name_of(pod)):
            self.start_pod(self.registry.create(resources.PODS, pod, manager=KUBELET))

    # ----------------------------------------------------------- pod statuses

    def start_pod(self, pod: JsonObject) -> JsonObject:
        """Post the status of a pod whose containers run and are ready."""
        now = self.registry.now()
        node = self.store.get(resources.NODES, "", node_name_of(pod)) or {}
        host_ip = _address(node)
        pod_ip = self.registry.names.ip()

        def running(old: JsonObject) -> JsonObject:
            known = {c["type"]: c for c in old["status"].get("conditions") or ()}
            conditions = [
                {
                    "type": kind,
                    "status": "True",
                    "lastProbeTime": None,
                    "lastTransitionTime": known.get(kind, {}).get("lastTransitionTime", now),
                }
                for kind in _POD_CONDITIONS
            ]
            conditions += [c for kind, c in known.items() if kind not in _POD_CONDITIONS]
            return with_status(
                old,
                phase="Running",
                conditions=conditions,
                hostIP=host_ip,
                hostIPs=[{"ip": host_ip}],
                podIP=pod_ip,
                podIPs=[{"ip": pod_ip}],
                startTime=now,
                containerStatuses=[
                    _container_status(container, now)
                    for container in old["spec"].get("containers") or ()
                ],
            )

        return self.registry.set_status(resources.PODS, pod, running, manager=KUBELET)

    def set_pod_ready(self, pod: JsonObject, *, ready: bool) -> JsonObject:
        """Post another readiness."""
        now = self.registry.now()

        def changed(old: JsonObject) -> JsonObject:
            for kind in ("Ready", "ContainersReady"):
                condition: JsonObject = {
                    "type": kind,
                    "status": "True" if ready else "False",
                    "lastProbeTime": None,
                    "lastTransitionTime": now,
                }
                if not ready:
                    condition["reason"] = "ContainersNotReady"
                old = with_condition(old, condition)
            return old

        return self.registry.set_status(resources.PODS, pod, changed, manager=KUBELET)

    def finish_pod(self, pod: JsonObject, phase: str) -> JsonObject:
        """Post that all containers have ended; `phase`: Succeeded or Failed."""
        now = self.registry.now()
        reason = "PodCompleted" if phase == "Succeeded" else "PodFailed"

        def finished(old: JsonObject) -> JsonObject:
            for kind in ("Ready", "ContainersReady"):
                old = with_condition(
                    old,
                    {
                        "type": kind,
                        "status": "False",
                        "lastProbeTime": None,
                        "lastTransitionTime": now,
                        "reason": reason,
                    },
                )
            return with_status(old, phase=phase)

        return self.registry.set_status(resources.PODS, pod, finished, manager=KUBELET)

    # ---------------------------------------------------------- node statuses

    def _heartbeat(self, node_name: str) -> None:
        node = self.store.get(resources.NODES, "", node_name)
        if node is None or node_name not in self._nodes:
            return
        if self.runs(node_name):
            self.post_node_status(node_name)
        self.mark_at(_HEARTBEAT + node_name, self.registry.clock() + self.timings.heartbeat_s)

    def post_node_status(self, node_name: str, **status: JsonValue) -> JsonObject:
        """Post the node's status now: conditions as the kubelet knows them, with a new heartbeat.

        `status` replaces fields (`allocatable`, `nodeInfo`). Conditions that the control plane
        set to Unknown become what a healthy kubelet says.
        """
        now = self.registry.now()
        node = self.registry.get(resources.NODES, "", node_name)

        def posted(old: JsonObject) -> JsonObject:
            conditions = [
                _heard_again(condition, now) for condition in old["status"].get("conditions") or ()
            ]
            return with_status(old, conditions=conditions, **status)

        return self.registry.set_status(resources.NODES, node, posted, manager=KUBELET)


HEALTHY_CONDITIONS: Final = (
    (
        "MemoryPressure",
        "False",
        "KubeletHasSufficientMemory",
        "kubelet has sufficient memory available",
    ),
    ("DiskPressure", "False", "KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
    ("PIDPressure", "False", "KubeletHasSufficientPID", "kubelet has sufficient PID available"),
    ("Ready", "True", "KubeletReady", "kubelet is posting ready status"),
)


def _heard_again(condition: JsonObject, now: str) -> JsonObject:
    healthy = {kind: rest for kind, *rest in HEALTHY_CONDITIONS}.get(condition["type"])
    if condition["status"] != "Unknown" or healthy is None:
        return {**condition, "lastHeartbeatTime": now}
    status, reason, message = healthy
    return {
        **condition,
        "status": status,
        "reason": reason,
        "message": message,
        "lastHeartbeatTime": now,
        "lastTransitionTime": now,
    }


def _address(node: JsonObject) -> str:
    for address in (node.get("status") or {}).get("addresses") or ():
        if address["type"] == "InternalIP":
            return str(address["address"])
    return "10.0.0.1"


def _container_status(container: JsonObject, now: str) -> JsonObject:
    image = str(container.get("image", ""))
    return {
        "name": container["name"],
        "state": {"running": {"startedAt": now}},
        "lastState": {},
        "ready": True,
        "restartCount": 0,
        "image": image,
        "imageID": f"{image.partition(':')[0]}@sha256:{'0' * 64}",
        "started": True,
    }
