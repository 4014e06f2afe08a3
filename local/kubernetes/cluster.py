"""The cluster without its API server: objects, controllers, and what scenes do to them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from local.kubernetes import resources, scene
from local.kubernetes.controllers.base import Controller, ControlPlane
from local.kubernetes.controllers.disruption import DisruptionController
from local.kubernetes.controllers.garbage import GarbageCollector
from local.kubernetes.controllers.kubelet import KUBELET, Kubelets
from local.kubernetes.controllers.namespaces import NamespaceController
from local.kubernetes.controllers.nodes import (
    NodeLifecycleController,
    NoExecuteTainter,
    PodGarbageCollector,
    TaintManager,
)
from local.kubernetes.controllers.scheduler import Scheduler
from local.kubernetes.controllers.workloads import WorkloadController
from local.kubernetes.names import Names
from local.kubernetes.objects import (
    JsonObject,
    JsonValue,
    condition_of,
    deep_copy,
    name_of,
    namespace_of,
    node_name_of,
    phase_of,
    uid_of,
    with_condition,
    with_status,
)
from local.kubernetes.registry import DeleteOptions, Registry
from local.kubernetes.resources import Resource
from local.kubernetes.scene import NodeSpec, PodSpec
from local.kubernetes.store import Store
from local.kubernetes.timings import Timings

SETUP: Final = "setup"
_NAMESPACES: Final = ("default", "kube-system", "kube-public", "kube-node-lease")


class Cluster:
    """Nodes, workloads and the controllers that keep them.

    Scene methods may be called at any time, from any thread. They are not API calls: the call log
    does not show them.
    """

    def __init__(self, clock: Callable[[], float], timings: Timings, seed: int) -> None:
        self._clock = clock
        self._store = Store()
        self._registry = Registry(self._store, clock, Names(seed))
        self._lifecycle = NodeLifecycleController(self._registry, timings)
        self._kubelets = Kubelets(self._lifecycle, self._registry, timings)
        self._scheduler = Scheduler(self._registry, timings)
        self._workloads = WorkloadController(self._registry, timings)
        controllers: Sequence[Controller] = (
            self._lifecycle,
            NoExecuteTainter(self._registry, timings),
            TaintManager(self._registry, timings),
            PodGarbageCollector(self._registry, timings),
            GarbageCollector(self._registry, timings),
            NamespaceController(self._registry, timings),
            self._workloads,
            self._scheduler,
            self._kubelets,
            DisruptionController(self._registry, timings),
        )
        self._control_plane = ControlPlane(self._registry, controllers, timings)
        for name in _NAMESPACES:
            self.add_namespace(name)

    @property
    def controllers(self) -> list[str]:
        """The names that `pause` and `resume` take."""
        return self._control_plane.names

    def tick(self) -> None:
        """Run the controllers until nothing is left to do at the clock's present time."""
        self._control_plane.tick()

    def pause(self, *names: str) -> None:
        """Let controllers lag behind: they see what happens, but do nothing."""
        self._control_plane.pause(names)

    def resume(self, *names: str) -> None:
        """Let them catch up."""
        self._control_plane.resume(names)

    # -------------------------------------------------------------------- nodes

    def add_node(
        self,
        name: str,
        *,
        instance_id: str,
        instance_type: str = "p5.48xlarge",
        zone: str = "us-east-1a",
        gpus: int = 8,
        gpu_resource: str = scene.GPU,
        boot_id: str | None = None,
        node_group: str | None = "gpu-p5",
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
        taints: Iterable[str | Mapping[str, str]] = (),
        finalizers: Iterable[str] = (),
        owner_references: Iterable[JsonObject] = (),
        ready: bool = True,
    ) -> JsonObject:
        """Let an instance join, with a kubelet that starts and ends its pods.

        `taints` are `key=value:Effect` or objects. `gpus` is what the device plugin reports: 0
        for a node whose plugin has not registered yet (then `set_allocatable`).
        """
        with self._store.lock:
            spec = NodeSpec(
                name=name,
                instance_id=instance_id,
                instance_type=instance_type,
                zone=zone,
                gpus=gpus,
                gpu_resource=gpu_resource,
                boot_id=boot_id if boot_id is not None else self._registry.names.uid(),
                node_group=node_group,
                labels=labels or {},
                annotations=annotations or {},
                taints=scene.taints(taints),
                finalizers=tuple(finalizers),
                owner_references=tuple(owner_references),
            )
            node = self._registry.create(resources.NODES, scene.node_object(spec), manager=KUBELET)
            self._kubelets.adopt(name)
            status = scene.node_status(spec, self._registry.now(), ready=ready)
            self._registry.set_status(
                resources.NODES, node, lambda old: with_status(old, **status), manager=KUBELET
            )
            # The lifecycle controller takes the not-ready taint of admission away at once.
            self._lifecycle.reconcile(name)
            return self.node(name)

    def remove_node(self, name: str) -> None:
        """Delete the Node, as the cloud controller does when the instance is gone.

        A finalizer (Karpenter's) holds it up. The node's pods follow after `Timings.orphan_s`.
        """
        self._registry.delete(resources.NODES, "", name, DeleteOptions())

    def set_node_silent(self, name: str, silent: bool = True) -> None:
        """Let the kubelet fall silent: after the grace period the node is Unknown.

        Nothing starts or ends on the node while it is silent. With False it is heard again:
        it posts healthy conditions, and its pods become ready again.
        """
        with self._store.lock:
            if silent:
                self._lifecycle.set_silent(name, self._clock())
                return
            self._lifecycle.set_silent(name, None)
            self._kubelets.post_node_status(name)
            self._kubelets.catch_up(name)

    def set_boot_id(self, name: str, boot_id: str | None = None) -> str:
        """Post another boot id with a new heartbeat: the node has rebooted. Returns the id.

        A silent node is heard again by this. None draws a new id; "" is what a kubelet posts
        that cannot read it.
        """
        with self._store.lock:
            new_id = self._registry.names.uid() if boot_id is None else boot_id
            info = {**self._node(name)["status"]["nodeInfo"], "bootID": new_id}
            self._lifecycle.set_silent(name, None)
            self._kubelets.post_node_status(name, nodeInfo=info)
            self._kubelets.catch_up(name)
            return new_id

    def set_allocatable(
        self, name: str, gpus: int, *, resource: str = scene.GPU, capacity: int | None = None
    ) -> None:
        """Let the device plugin report another number of healthy GPUs.

        `capacity` follows only if given: a sick GPU leaves it as it is.
        """
        with self._store.lock:
            status = self._node(name)["status"]
            changed = {"allocatable": {**status["allocatable"], resource: str(gpus)}}
            if capacity is not None or resource not in status["capacity"]:
                shown = gpus if capacity is None else capacity
                changed["capacity"] = {**status["capacity"], resource: str(shown)}
            self._kubelets.post_node_status(name, **changed)

    def set_node_condition(
        self, name: str, kind: str, status: str, *, reason: str = "Set", message: str = ""
    ) -> None:
        """Set a condition of a node, as its kubelet or a monitoring agent does."""
        with self._store.lock:
            node = self._node(name)
            known = condition_of(node, kind)
            now = self._registry.now()
            moved = known is None or known["status"] != status
            condition = {
                "type": kind,
                "status": status,
                "lastHeartbeatTime": now,
                "lastTransitionTime": now
                if known is None or moved
                else known["lastTransitionTime"],
                "reason": reason,
                "message": message,
            }
            self._registry.set_status(
                resources.NODES,
                node,
                lambda old: with_condition(old, condition),
                manager=KUBELET,
            )

    def node(self, name: str) -> JsonObject:
        """Return a copy of one node; raises `ApiError` (404) if there is none."""
        return dict(deep_copy(self._node(name)))

    def nodes(self) -> list[JsonObject]:
        """Return copies of all nodes, by name."""
        return [deep_copy(node) for node in self._store.all(resources.NODES)]

    def _node(self, name: str) -> JsonObject:
        return self._registry.get(resources.NODES, "", name)

    # --------------------------------------------------------------------- pods

    def add_namespace(self, name: str) -> None:
        """Make a namespace, unless it exists."""
        with self._store.lock:
            if self._store.get(resources.NAMESPACES, "", name) is None:
                self._registry.create(
                    resources.NAMESPACES, {"metadata": {"name": name}}, manager=SETUP
                )

    def add_workload(
        self,
        kind: str,
        namespace: str,
        name: str,
        replicas: int = 1,
        *,
        labels: Mapping[str, str] | None = None,
        gpus_per_pod: int = 8,
        nodes: Sequence[str] = (),
        grace_s: int = 30,
        ready: bool = True,
        **pod: JsonValue,
    ) -> list[str]:
        """Add a Deployment, ReplicaSet, StatefulSet or Job with running pods; returns their names.

        Pod i is bound to `nodes[i]`, fit or not; pods beyond `nodes` go where the scheduler puts
        them. Later pods, which replace the first ones, take the scheduler's way and
        `Timings.start_s`. `ready` False leaves bound pods running but not ready. `pod`: further
        fields of `PodSpec`.
        """
        shown = dict(labels) if labels is not None else {"app": name}
        if kind == "Job":
            pod.setdefault("restart_policy", "Never")
        spec = PodSpec(labels=shown, gpus=gpus_per_pod, grace_s=grace_s, **pod)
        resource = resources.OWNER_RESOURCES[kind]
        with self._store.lock:
            self.add_namespace(namespace)
            owner = self._registry.create(
                resource,
                scene.workload_object(kind, namespace, name, replicas, scene.pod_template(spec)),
                manager=SETUP,
            )
            self._workloads.reconcile(f"{kind}|{namespace}/{name}")
            if kind == "Deployment":
                owner = self._store.find(resources.REPLICASETS, "owner", uid_of(owner))[0]
                self._workloads.reconcile(f"ReplicaSet|{namespace}/{name_of(owner)}")
            self._scheduler.pin(uid_of(owner), nodes)
            return self._run_pods_of(uid_of(owner), ready=ready)

    def add_daemonset(
        self,
        namespace: str,
        name: str,
        *,
        labels: Mapping[str, str] | None = None,
        node_selector: Mapping[str, str] | None = None,
        **pod: JsonValue,
    ) -> list[str]:
        """Add a DaemonSet that tolerates everything; returns the names of its running pods."""
        shown = dict(labels) if labels is not None else {"app": name}
        pod.setdefault("tolerations", ({"operator": "Exists"},))
        pod.setdefault("shared_memory", False)
        spec = PodSpec(labels=shown, node_selector=node_selector or {}, **pod)
        with self._store.lock:
            self.add_namespace(namespace)
            owner = self._registry.create(
                resources.DAEMONSETS,
                scene.workload_object("DaemonSet", namespace, name, 0, scene.pod_template(spec)),
                manager=SETUP,
            )
            self._workloads.reconcile(f"DaemonSet|{namespace}/{name}")
            return self._run_pods_of(uid_of(owner), ready=True)

    def add_bare_pod(
        self,
        namespace: str,
        name: str,
        *,
        node: str = "",
        labels: Mapping[str, str] | None = None,
        gpus: int = 0,
        grace_s: int = 30,
        phase: str = "Running",
        ready: bool = True,
        **pod: JsonValue,
    ) -> JsonObject:
        """Add a pod that nobody makes again; `phase` Pending leaves it to scheduler and kubelet."""
        shown = dict(labels) if labels is not None else {"app": name}
        body = scene.pod_template(PodSpec(labels=shown, gpus=gpus, grace_s=grace_s, **pod))
        body["metadata"] |= {"namespace": namespace, "name": name}
        with self._store.lock:
            self.add_namespace(namespace)
            if node:
                body["spec"]["nodeName"] = node
            made = self._registry.create(resources.PODS, body, manager=SETUP)
            if phase != "Pending" and node:
                made = self._kubelets.start_pod(made)
                if phase in ("Succeeded", "Failed"):
                    made = self._kubelets.finish_pod(made, phase)
                elif not ready:
                    made = self._kubelets.set_pod_ready(made, ready=False)
            return dict(deep_copy(made))

    def add_mirror_pod(
        self,
        node: str,
        name: str = "node-agent",
        *,
        namespace: str = "kube-system",
        labels: Mapping[str, str] | None = None,
    ) -> str:
        """Add the mirror pod of a static pod; returns its name. A deleted one comes back."""
        with self._store.lock:
            shown = labels if labels is not None else {"app": name}
            body = scene.mirror_pod_object(
                self._node(node), namespace, name, shown, self._registry.now()
            )
            self._kubelets.add_static_pod(body)
            made = self._registry.create(resources.PODS, body, manager=KUBELET)
            return name_of(self._kubelets.start_pod(made))

    def _run_pods_of(self, owner_uid: str, *, ready: bool) -> list[str]:
        """Skip the start-up time for the pods that a scene begins with."""
        self._scheduler.reconcile("all")
        self._scheduler.pin(owner_uid, ())
        names = []
        for pod in self._store.find(resources.PODS, "owner", owner_uid):
            names.append(name_of(pod))
            if node_name_of(pod) and phase_of(pod) == "Pending":
                started = self._kubelets.start_pod(pod)
                if not ready:
                    self._kubelets.set_pod_ready(started, ready=False)
        return names

    def set_pod_ready(self, namespace: str, name: str, ready: bool = True) -> None:
        """Let a running pod fail or pass its readiness probe."""
        pod = self._registry.get(resources.PODS, namespace, name)
        self._kubelets.set_pod_ready(pod, ready=ready)

    def finish_pod(self, namespace: str, name: str, phase: str = "Succeeded") -> None:
        """Let a pod run to its end; `phase`: Succeeded or Failed."""
        pod = self._registry.get(resources.PODS, namespace, name)
        self._kubelets.finish_pod(pod, phase)

    def remove_pod(self, namespace: str, name: str) -> None:
        """Remove a pod without grace, as if its kubelet had confirmed its end."""
        self._registry.delete(resources.PODS, namespace, name, DeleteOptions(grace_s=0))

    def pods(self, node: str | None = None, namespace: str | None = None) -> list[JsonObject]:
        """Return copies of the pods, of one node or namespace if given, by namespace and name."""
        found = (
            self._store.all(resources.PODS)
            if node is None
            else self._store.find(resources.PODS, "node", node)
        )
        return [
            deep_copy(pod) for pod in found if namespace is None or namespace_of(pod) == namespace
        ]

    # ----------------------------------------------------------- everything else

    def add_pdb(
        self,
        namespace: str,
        name: str,
        *,
        match_labels: Mapping[str, str],
        min_available: int | str | None = None,
        max_unavailable: int | str | None = None,
        unhealthy_pod_eviction_policy: str | None = None,
    ) -> None:
        """Add a PodDisruptionBudget; the disruption controller counts it a moment later."""
        self.add_namespace(namespace)
        self._registry.create(
            resources.PDBS,
            scene.budget_object(
                namespace,
                name,
                match_labels,
                min_available,
                max_unavailable,
                unhealthy_pod_eviction_policy,
            ),
            manager=SETUP,
        )

    def delete_pdb(self, namespace: str, name: str) -> None:
        """Delete a PodDisruptionBudget."""
        self._registry.delete(resources.PDBS, namespace, name, DeleteOptions())

    def add_volume_attachment(self, name: str, node: str, volume: str) -> None:
        """Attach a volume to a node."""
        self.create(
            resources.VOLUME_ATTACHMENTS, scene.volume_attachment_object(name, node, volume)
        )

    def create(self, resource: Resource, obj: JsonObject, *, manager: str = SETUP) -> JsonObject:
        """Create any object, without the API's access checks and record."""
        return dict(deep_copy(self._registry.create(resource, obj, manager=manager)))

    def delete(self, resource: Resource, namespace: str, name: str) -> None:
        """Delete any object, as above; finalizers hold it up."""
        self._registry.delete(resource, namespace, name, DeleteOptions())

    def objects(self, resource: Resource) -> list[JsonObject]:
        """Return copies of all objects of a type: events, budgets, custom resources."""
        return [deep_copy(obj) for obj in self._store.all(resource)]

    def set_status(
        self, resource: Resource, namespace: str, name: str, **status: JsonValue
    ) -> None:
        """Set status fields of any object, as its controller does."""
        obj = self._registry.get(resource, namespace, name)
        self._registry.set_status(
            resource, obj, lambda old: with_status(old, **status), manager=SETUP
        )
