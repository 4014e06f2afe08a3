"""The scene's machines: instances, their nodes, pods and exporters, kept in step.

An instance that starts becomes a node with an exporter, one that goes down falls silent, one that
is gone takes its node along, as kubelet, cloud controller and DaemonSet do on AWS.
"""

import threading
import time
from collections.abc import Callable

from local.amp.exporter import GpuFleet
from local.amp.exporter import Pod as GpuPod
from local.aws.autoscaling import CapacityModel
from local.aws.autoscaling_types import CapacityHooks, Instance, InstanceRefresh, Timing
from local.calls import CallLog, FaultPlan
from local.kubernetes import Authenticator, KubernetesEmulator, Rbac, Timings
from local.scenario import Cluster, Group

GPUS_BY_TYPE = {"p5.48xlarge": 8, "p4d.24xlarge": 8, "g5.12xlarge": 4, "g6.48xlarge": 8}


class SceneFleet:
    """The machines of one cluster.

    Args:
        cluster: The scenario's cluster.
        kubernetes: Builds the Kubernetes emulator from a clock.
        region: Where it is.
        announce: Gets a line when a machine comes or goes.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        kubernetes: Callable[[Callable[[], float], Timings], KubernetesEmulator],
        region: str,
        announce: Callable[[str], None],
    ) -> None:
        self._cluster = cluster
        self._region = region
        self._announce = announce
        self._age_s = 0.0
        self._timers: list[threading.Timer] = []
        self._arrivals: dict[str, int] = {}
        self._lock = threading.Lock()
        self.roles: dict[str, str] = {}
        """Role (GROUP/INDEX) by instance id."""
        self.names: dict[str, str] = {}
        self._lost: dict[str, set[int]] = {}
        """Node name by role."""
        self.exporters = GpuFleet(cluster.name)
        timings = Timings(start_s=1.0, orphan_s=1.0, monitor_grace_s=4.0, reaction_s=0.02)
        self.kubernetes = kubernetes(lambda: time.time() - self._age_s, timings)
        self.capacity = CapacityModel(
            region=region,
            hooks=CapacityHooks(
                on_launch=self._on_launch,
                on_shutdown=self._on_shutdown,
                on_terminate=self._on_terminate,
                on_reboot=self._on_reboot,
            ),
        )
        for group in cluster.groups:
            self._add_group(group)
        self._age_s = 0.0

    def start(self) -> None:
        """Let the machines live."""
        self.kubernetes.start()
        self.capacity.start()

    def stop(self) -> None:
        """End all threads."""
        self.capacity.stop()
        for timer in self._timers:
            timer.cancel()
        for timer in self._timers:
            timer.join()
        self.kubernetes.stop()

    @property
    def cluster_name(self) -> str:
        """The cluster's name."""
        return self._cluster.name

    def node_name(self, role_or_name: str) -> str:
        """Return the node's name for GROUP/INDEX, or the name itself."""
        return self.names.get(role_or_name, role_or_name)

    def role_of(self, instance_id: str) -> str:
        """Return GROUP/INDEX of an instance."""
        return self.roles.get(instance_id, instance_id)

    def _group(self, name: str | None) -> Group:
        return next(group for group in self._cluster.groups if group.name == name)

    def _add_group(self, group: Group) -> None:
        is_managed = group.kind == "managed_node_group"
        self.capacity.add_group(
            group.name,
            desired=group.size,
            instance_type=group.instance_type,
            cluster=self._cluster.name,
            nodegroup=group.name if is_managed else None,
            timing=Timing(launch_delay_s=group.launch_delay_s, terminate_s=1.0, pending_s=0.5),
            age_s=group.age_s,
        )
        if group.suspended:
            self.capacity.suspend(group.name, group.suspended)
        if group.instance_refresh:
            self.capacity.set_refreshes(group.name, [InstanceRefresh("refresh-1")])
        # Nodes and pods are as old as the scenario says: the emulator's clock runs late meanwhile.
        self._age_s = group.age_s
        for index, instance in enumerate(self.capacity.members(group.name)):
            self._join(group, instance, f"{group.name}/{index}", gpus=self._gpus(group))
        self._add_pods(group)

    @staticmethod
    def _gpus(group: Group) -> int:
        return GPUS_BY_TYPE.get(group.instance_type, 8)

    def _join(self, group: Group, instance: Instance, role: str, *, gpus: int) -> None:
        name = instance.private_dns
        self.roles[instance.instance_id] = role
        self.names[role] = name
        self.kubernetes.add_node(
            name,
            instance_id=instance.instance_id,
            instance_type=group.instance_type,
            zone=instance.zone,
            gpus=gpus,
            node_group=group.name if group.kind == "managed_node_group" else None,
            labels={"nvidia.com/gpu.present": "true", **group.labels},
        )
        self.exporters.add_node(
            name, group.instance_type, address=instance.private_ip, gpus=self._gpus(group)
        )

    def _add_pods(self, group: Group) -> None:
        names = [self.names[f"{group.name}/{index}"] for index in range(group.size)]
        for pods in group.pods:
            self.kubernetes.add_namespace(pods.namespace)
            if pods.kind == "DaemonSet":
                self.kubernetes.add_daemonset(pods.namespace, pods.name, labels=pods.all_labels)
                continue
            indexes = pods.nodes or tuple(i % group.size for i in range(pods.replicas))
            nodes = [names[index] for index in indexes]
            made = self.kubernetes.add_workload(
                pods.kind,
                pods.namespace,
                pods.name,
                pods.replicas,
                labels=pods.all_labels,
                gpus_per_pod=pods.gpus,
                nodes=nodes,
                grace_s=pods.grace_s,
            )
            for pod, node in zip(made, nodes, strict=False):
                if pods.gpus:
                    self.exporters.assign(node, range(pods.gpus), GpuPod(pods.namespace, pod))
        for pdb in group.pdbs:
            self.kubernetes.add_namespace(pdb.namespace)
            self.kubernetes.add_pdb(
                pdb.namespace,
                pdb.name,
                match_labels=pdb.match_labels,
                min_available=pdb.min_available,
                max_unavailable=pdb.max_unavailable,
            )

    # --- hooks of the capacity model -----------------------------------------------------------

    def lose_gpus(self, name: str, gpu: int | None) -> None:
        """Let the device plugin hear of a lost GPU (None: of all), as NVIDIA's does from NVML.

        It offers them again after a boot only, also where they report again before that.
        """
        role = next(role for role, known in self.names.items() if known == name)
        gpus = range(self._gpus(self._group(role.rpartition("/")[0])))
        lost = self._lost.setdefault(name, set())
        lost.update(gpus if gpu is None else {gpu})
        self.kubernetes.set_allocatable(name, len(gpus) - len(lost))

    def _later(self, delay_s: float, call: Callable[[], None]) -> None:
        timer = threading.Timer(delay_s, call)
        timer.daemon = True
        with self._lock:
            self._timers.append(timer)
        timer.start()

    def _on_launch(self, instance: Instance) -> None:
        group = self._group(instance.group)
        with self._lock:
            number = self._arrivals[group.name] = self._arrivals.get(group.name, 0) + 1
        role = f"{group.name}/new-{number}"
        self._announce(f"EC2 launches {instance.instance_id} for {group.name}")

        def join() -> None:
            # The kubelet is Ready before the device plugin has registered the GPUs.
            self._join(group, instance, role, gpus=0)
            self._announce(f"{instance.private_dns} joins the cluster")
            self._later(group.gpus_delay_s, offer)

        def offer() -> None:
            gpus = self._gpus(group)
            self.kubernetes.set_allocatable(instance.private_dns, gpus, capacity=gpus)
            self._announce(f"{instance.private_dns} offers {gpus} GPUs")

        self._later(group.join_delay_s, join)

    def _on_reboot(self, instance: Instance) -> None:
        """Take the machine down, and let it boot: kubelet first, then the GPUs."""
        name = self.names.get(self.role_of(instance.instance_id))
        group = self._group(instance.group)
        if name is None or not group.reboot_happens:
            self._announce(f"EC2 took the reboot of {instance.instance_id}; it does not happen")
            return
        self._announce(f"{name} goes down for its reboot")
        self.kubernetes.set_node_silent(name)
        if not group.reboot_fixes:
            for fault in self.exporters.faults(name):
                fault.survives_reboot = True
        self.exporters.reboot(name, down_s=group.reboot_s)

        def boot() -> None:
            # Heard again under a new boot id; the device plugin has not registered yet.
            self._lost.pop(name, None)
            self.kubernetes.set_allocatable(name, 0)
            boot_id = self.kubernetes.set_boot_id(name)
            self._announce(f"{name} has booted ({boot_id}) and offers no GPU yet")
            self._later(group.gpus_delay_s, offer)

        def offer() -> None:
            gpus = self._gpus(group)
            self.kubernetes.set_allocatable(name, gpus, capacity=gpus)
            self._announce(f"{name} offers {gpus} GPUs")

        self._later(group.reboot_s, boot)

    def _on_shutdown(self, instance: Instance) -> None:
        self._announce(f"EC2 shuts {instance.instance_id} down")
        name = self.names.get(self.role_of(instance.instance_id))
        if name is not None:
            self.exporters.remove_node(name)

    def _on_terminate(self, instance: Instance) -> None:
        self._announce(f"{instance.instance_id} is gone")
        name = self.names.get(self.role_of(instance.instance_id))
        if name is not None:
            self.kubernetes.remove_node(name)


def emulated_cluster(
    name: str, authenticator: Authenticator, rbac: Rbac, *, calls: CallLog, faults: FaultPlan
) -> Callable[[Callable[[], float], Timings], KubernetesEmulator]:
    """Return a builder of the cluster's emulator, for `SceneFleet`."""

    def build(clock: Callable[[], float], timings: Timings) -> KubernetesEmulator:
        return KubernetesEmulator(
            name, authenticator, rbac, calls=calls, faults=faults, clock=clock, timings=timings
        )

    return build
