"""Objects as they look on EKS, for those who set up scenes."""

import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from local.kubernetes.controllers.kubelet import HEALTHY_CONDITIONS
from local.kubernetes.objects import JsonObject

GPU: Final = "nvidia.com/gpu"
_IMAGE: Final = "registry.example.com/train:1.0"
_MACHINES: Final[Mapping[str, tuple[str, str, str, str]]] = {
    "p5.48xlarge": ("192", "191450m", "2097105464Ki", "2088241720Ki"),
    "p4d.24xlarge": ("96", "95690m", "1176329808Ki", "1168000000Ki"),
    "g6.48xlarge": ("192", "191450m", "786000000Ki", "778000000Ki"),
    "trn2.48xlarge": ("192", "191450m", "2097105464Ki", "2088241720Ki"),
}
"""cpu and memory: capacity and allocatable of a few types; others get those of `m5.2xlarge`."""
_DEFAULT_MACHINE: Final = ("8", "7910m", "31000000Ki", "30000000Ki")
_DNS_NAME: Final = re.compile(r"ip-(\d+)-(\d+)-(\d+)-(\d+)\.")


@dataclass(frozen=True)
class NodeSpec:
    """What a node is made of."""

    name: str
    instance_id: str
    instance_type: str = "p5.48xlarge"
    zone: str = "us-east-1a"
    gpus: int = 8
    gpu_resource: str = GPU
    boot_id: str = ""
    node_group: str | None = "gpu-p5"
    """The managed node group that the labels tell; None: no such labels."""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Mapping[str, str], ...] = ()
    finalizers: tuple[str, ...] = ()
    owner_references: tuple[JsonObject, ...] = ()
    kubelet_version: str = "v1.36.2"

    @property
    def provider_id(self) -> str:
        """`aws:///ZONE/INSTANCE`."""
        return f"aws:///{self.zone}/{self.instance_id}"

    @property
    def address(self) -> str:
        """The address in the name, or one derived from it."""
        match = _DNS_NAME.match(self.name)
        if match:
            return ".".join(match.groups())
        number = zlib.crc32(self.name.encode())
        return f"10.0.{number >> 8 & 255}.{number & 255}"


def node_object(spec: NodeSpec) -> JsonObject:
    """Return the Node as its kubelet registers it: without conditions and capacity."""
    region = spec.zone.rstrip("abcdef")
    labels = {
        "beta.kubernetes.io/arch": "amd64",
        "beta.kubernetes.io/instance-type": spec.instance_type,
        "beta.kubernetes.io/os": "linux",
        "failure-domain.beta.kubernetes.io/region": region,
        "failure-domain.beta.kubernetes.io/zone": spec.zone,
        "kubernetes.io/arch": "amd64",
        "kubernetes.io/hostname": spec.name,
        "kubernetes.io/os": "linux",
        "node.kubernetes.io/instance-type": spec.instance_type,
        "topology.kubernetes.io/region": region,
        "topology.kubernetes.io/zone": spec.zone,
    }
    if spec.node_group is not None:
        labels |= {
            "eks.amazonaws.com/capacityType": "ON_DEMAND",
            "eks.amazonaws.com/nodegroup": spec.node_group,
            "eks.amazonaws.com/nodegroup-image": "ami-0aaaaaaaaaaaaaaa1",
        }
    meta: JsonObject = {
        "name": spec.name,
        "labels": {**labels, **spec.labels},
        "annotations": {
            "alpha.kubernetes.io/provided-node-ip": spec.address,
            "volumes.kubernetes.io/controller-managed-attach-detach": "true",
            **spec.annotations,
        },
    }
    if spec.finalizers:
        meta["finalizers"] = list(spec.finalizers)
    if spec.owner_references:
        meta["ownerReferences"] = list(spec.owner_references)
    node_spec: JsonObject = {"providerID": spec.provider_id}
    if spec.taints:
        node_spec["taints"] = [dict(taint) for taint in spec.taints]
    return {"kind": "Node", "apiVersion": "v1", "metadata": meta, "spec": node_spec}


def node_status(spec: NodeSpec, now: str, *, ready: bool = True) -> JsonObject:
    """Return the first status that a kubelet posts."""
    cpu, cpu_left, memory, memory_left = _MACHINES.get(spec.instance_type, _DEFAULT_MACHINE)
    shared = {"hugepages-1Gi": "0", "hugepages-2Mi": "0", "pods": "100"}
    if spec.gpus:
        shared[spec.gpu_resource] = str(spec.gpus)
    conditions = [
        {
            "type": kind,
            "status": status,
            "lastHeartbeatTime": now,
            "lastTransitionTime": now,
            "reason": reason,
            "message": message,
        }
        for kind, status, reason, message in HEALTHY_CONDITIONS
    ]
    if not ready:
        conditions[-1] |= {
            "status": "False",
            "reason": "KubeletNotReady",
            "message": "container runtime network not ready",
        }
    machine_id = "ec2" + spec.instance_id.removeprefix("i-").rjust(29, "0")
    return {
        "capacity": {
            "cpu": cpu,
            "ephemeral-storage": "209702892Ki",
            "memory": memory,
            **shared,
        },
        "allocatable": {
            "cpu": cpu_left,
            "ephemeral-storage": "192188443124",
            "memory": memory_left,
            **shared,
        },
        "conditions": conditions,
        "addresses": [
            {"type": "InternalIP", "address": spec.address},
            {"type": "InternalDNS", "address": spec.name},
            {"type": "Hostname", "address": spec.name},
        ],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": 10250}},
        "nodeInfo": {
            "machineID": machine_id,
            "systemUUID": machine_id,
            "bootID": spec.boot_id,
            "kernelVersion": "6.12.40-64.114.amzn2023.x86_64",
            "osImage": "Amazon Linux 2023.8.20250915",
            "containerRuntimeVersion": "containerd://2.1.4",
            "kubeletVersion": spec.kubelet_version,
            "kubeProxyVersion": "",
            "operatingSystem": "linux",
            "architecture": "amd64",
        },
    }


@dataclass(frozen=True)
class PodSpec:
    """What the pods of a scene are made of."""

    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 0
    gpu_resource: str = GPU
    grace_s: int = 30
    image: str = _IMAGE
    shared_memory: bool = True
    """An emptyDir of medium Memory, as every PyTorch pod has it for /dev/shm."""
    tolerations: tuple[Mapping[str, Any], ...] = (
        {"key": GPU, "operator": "Exists", "effect": "NoSchedule"},
    )
    node_selector: Mapping[str, str] = field(default_factory=dict)
    priority_class: str = ""
    finalizers: tuple[str, ...] = ()
    restart_policy: str = "Always"


def pod_template(spec: PodSpec) -> JsonObject:
    """Return metadata and spec, as a template or as the body of a bare pod."""
    resources: JsonObject = {}
    if spec.gpus:
        amount = {spec.gpu_resource: str(spec.gpus)}
        resources = {"limits": dict(amount), "requests": dict(amount)}
    container: JsonObject = {"name": "main", "image": spec.image, "resources": resources}
    pod: JsonObject = {
        "containers": [container],
        "restartPolicy": spec.restart_policy,
        "terminationGracePeriodSeconds": spec.grace_s,
    }
    if spec.shared_memory:
        container["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108
        pod["volumes"] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if spec.tolerations:
        pod["tolerations"] = [dict(toleration) for toleration in spec.tolerations]
    if spec.node_selector:
        pod["nodeSelector"] = dict(spec.node_selector)
    if spec.priority_class:
        pod["priorityClassName"] = spec.priority_class
    meta: JsonObject = {"labels": dict(spec.labels)}
    if spec.annotations:
        meta["annotations"] = dict(spec.annotations)
    if spec.finalizers:
        meta["finalizers"] = list(spec.finalizers)
    return {"metadata": meta, "spec": pod}


def workload_object(
    kind: str, namespace: str, name: str, replicas: int, template: JsonObject
) -> JsonObject:
    """Return a Deployment, ReplicaSet, StatefulSet, Job or DaemonSet."""
    spec: JsonObject = {"template": template}
    selector = {"matchLabels": dict(template["metadata"]["labels"])}
    if kind == "Job":
        spec |= {"parallelism": replicas, "completions": replicas, "backoffLimit": 1000}
    elif kind == "DaemonSet":
        spec["selector"] = selector
    else:
        spec |= {"replicas": replicas, "selector": selector}
    if kind == "StatefulSet":
        # One at a time would make the start of a scene as slow as its slowest pod, times all.
        spec |= {"serviceName": name, "podManagementPolicy": "Parallel"}
    return {"metadata": {"namespace": namespace, "name": name}, "spec": spec}


def mirror_pod_object(
    node: JsonObject, namespace: str, name: str, labels: Mapping[str, str], now: str
) -> JsonObject:
    """Return the mirror pod of a static pod, as the node's kubelet makes it."""
    node_name = node["metadata"]["name"]
    digest = f"{zlib.crc32(f'{namespace}/{name}/{node_name}'.encode()):08x}" * 4
    return {
        "metadata": {
            "name": f"{name}-{node_name}",
            "namespace": namespace,
            "labels": dict(labels),
            "annotations": {
                "kubernetes.io/config.hash": digest,
                "kubernetes.io/config.mirror": digest,
                "kubernetes.io/config.seen": now,
                "kubernetes.io/config.source": "file",
            },
            "ownerReferences": [
                {
                    "apiVersion": "v1",
                    "kind": "Node",
                    "name": node_name,
                    "uid": node["metadata"]["uid"],
                    "controller": True,
                }
            ],
        },
        "spec": {
            "containers": [{"name": "main", "image": _IMAGE}],
            "nodeName": node_name,
            "hostNetwork": True,
            "tolerations": [{"operator": "Exists", "effect": "NoExecute"}],
            "priorityClassName": "system-node-critical",
        },
    }


def budget_object(
    namespace: str,
    name: str,
    match_labels: Mapping[str, str],
    min_available: int | str | None,
    max_unavailable: int | str | None,
    policy: str | None,
) -> JsonObject:
    """Return a PodDisruptionBudget."""
    spec: JsonObject = {"selector": {"matchLabels": dict(match_labels)}}
    if min_available is not None:
        spec["minAvailable"] = min_available
    if max_unavailable is not None:
        spec["maxUnavailable"] = max_unavailable
    if policy is not None:
        spec["unhealthyPodEvictionPolicy"] = policy
    return {"metadata": {"namespace": namespace, "name": name}, "spec": spec}


def volume_attachment_object(name: str, node_name: str, volume: str) -> JsonObject:
    """Return the attachment of an EBS volume to a node."""
    return {
        "metadata": {"name": name, "finalizers": ["external-attacher/ebs-csi-aws-com"]},
        "spec": {
            "attacher": "ebs.csi.aws.com",
            "source": {"persistentVolumeName": volume},
            "nodeName": node_name,
        },
    }


def taint(text: str) -> JsonObject:
    """Parse `key=value:Effect` or `key:Effect`, as `kubectl taint` writes it."""
    pair, _, effect = text.rpartition(":")
    key, _, value = pair.partition("=")
    return {"key": key, **({"value": value} if value else {}), "effect": effect}


def taints(given: Iterable[str | Mapping[str, str]]) -> tuple[JsonObject, ...]:
    """Parse taints given as text or as objects."""
    return tuple(taint(item) if isinstance(item, str) else dict(item) for item in given)
