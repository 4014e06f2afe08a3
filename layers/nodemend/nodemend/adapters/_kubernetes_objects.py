"""Kubernetes objects as JSON: what the cluster adapter sends, and how it reads what it gets.

Answers are read as plain JSON, without the client's models: those need 379 MB for 2,000 nodes.
Whatever the API may leave out is optional here as well.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from nodemend.domain.nodes import (
    GPU_RESOURCE,
    INSTANCE_TYPE_LABEL,
    Node,
    NodeRef,
    Readiness,
    Taint,
    instance_id_of,
)
from nodemend.domain.pods import DisruptionBudget, Owner, Pod, Toleration

Json = Mapping[str, Any]

ACCELERATOR_RESOURCES = ("nvidia.com/gpu", "nvidia.com/mig-", "aws.amazon.com/neuron")
"""Prefixes of extended resources: `nvidia.com/gpu.shared`, `aws.amazon.com/neuroncore`…"""

ACCELERATOR_LABELS = (
    "k8s.amazonaws.com/accelerator",
    "eks.amazonaws.com/instance-gpu-",
    "eks.amazonaws.com/instance-accelerator-",
    "karpenter.k8s.aws/instance-gpu-",
    "karpenter.k8s.aws/instance-accelerator-",
)
"""Prefixes of labels that stand only on nodes with accelerators, whatever the device plugin does:
cluster-autoscaler's, EKS Auto Mode's and Karpenter's."""

GPU_PRESENT_LABEL = "nvidia.com/gpu.present"
"""GPU feature discovery's; `true` or `false`."""

EVENT_REASON_LIMIT = 128
EVENT_MESSAGE_LIMIT = 1024
EVENT_NAMESPACE = "default"
"""Where `kubectl describe node` looks: a Node has no namespace of its own."""


# --- what is sent -------------------------------------------------------------------------------


def eviction_body(pod: Pod) -> dict[str, Any]:
    """Return the policy/v1 Eviction of exactly this pod."""
    return {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod.name, "namespace": pod.namespace},
        "deleteOptions": {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": pod.uid},
        },
    }


def event_body(
    node: NodeRef, reason: str, message: str, *, is_warning: bool, at: datetime
) -> dict[str, Any]:
    """Return a core/v1 Event about the node, cut to the limits of the API."""
    reason = camel_case(reason)[:EVENT_REASON_LIMIT]
    if len(message) > EVENT_MESSAGE_LIMIT:
        message = message[: EVENT_MESSAGE_LIMIT - 1] + "…"
    identity = "\0".join((node.uid, node.boot_id, reason, message))
    stamp = at.strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"nodemend.{hashlib.sha256(identity.encode()).hexdigest()[:24]}",
            "namespace": EVENT_NAMESPACE,
        },
        "involvedObject": {"apiVersion": "v1", "kind": "Node", "name": node.name, "uid": node.uid},
        "reason": reason,
        "message": message,
        "type": "Warning" if is_warning else "Normal",
        "source": {"component": "nodemend"},
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "count": 1,
    }


def camel_case(words: str) -> str:
    """Return a reason as Kubernetes writes it.

    Example:
        >>> camel_case("capacity_guard"), camel_case("NodeCordoned")
        ('CapacityGuard', 'NodeCordoned')
    """
    return "".join(word[:1].upper() + word[1:] for word in re.split(r"[^A-Za-z0-9]+", words))


# --- what is read -------------------------------------------------------------------------------


def node_of(item: Json, cluster: str) -> Node:
    """Read a Node object's JSON."""
    metadata, spec, status = _part(item, "metadata"), _part(item, "spec"), _part(item, "status")
    ready = _condition(status, "Ready")
    return Node(
        ref=NodeRef(
            cluster=cluster,
            name=metadata["name"],
            uid=metadata.get("uid", ""),
            instance_id=instance_id_of(spec.get("providerID")),
            boot_id=_part(status, "nodeInfo").get("bootID", ""),
        ),
        labels=_part(metadata, "labels"),
        annotations=_part(metadata, "annotations"),
        taints=tuple(
            Taint(
                key=taint["key"],
                effect=taint["effect"],
                value=taint.get("value"),
                time_added=taint.get("timeAdded"),
            )
            for taint in spec.get("taints") or ()
        ),
        is_unschedulable=bool(spec.get("unschedulable", False)),
        # No Ready condition: the kubelet has never reported, so nothing is known.
        readiness=_readiness(ready.get("status")),
        heartbeat_at=_time(ready.get("lastHeartbeatTime")),
        created_at=_time(metadata.get("creationTimestamp")),
        is_deleting=metadata.get("deletionTimestamp") is not None,
        gpu_capacity=_count(_part(status, "capacity").get(GPU_RESOURCE)),
        gpu_allocatable=_count(_part(status, "allocatable").get(GPU_RESOURCE)),
        resource_version=metadata.get("resourceVersion", ""),
    )


def has_accelerators(item: Json, gpu_instance_types: frozenset[str]) -> bool:
    """Tell whether a Node object has, or should have, GPUs or Neuron devices."""
    capacity = _part(_part(item, "status"), "capacity")
    if any(name.startswith(ACCELERATOR_RESOURCES) for name in capacity):
        return True
    labels = _part(_part(item, "metadata"), "labels")
    if labels.get(GPU_PRESENT_LABEL) == "true":
        return True
    if any(label.startswith(ACCELERATOR_LABELS) for label in labels):
        return True
    return labels.get(INSTANCE_TYPE_LABEL, "") in gpu_instance_types


def pod_of(item: Json) -> Pod:
    """Read a Pod object's JSON."""
    metadata, spec, status = _part(item, "metadata"), _part(item, "spec"), _part(item, "status")
    controller = next(
        (owner for owner in metadata.get("ownerReferences") or () if owner.get("controller")), None
    )
    return Pod(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        node_name=spec.get("nodeName", ""),
        phase=status.get("phase", ""),
        owner=Owner(
            kind=controller.get("kind", ""),
            name=controller.get("name", ""),
            api_version=controller.get("apiVersion", ""),
            uid=controller.get("uid", ""),
        )
        if controller
        else None,
        labels=_part(metadata, "labels"),
        annotations=_part(metadata, "annotations"),
        tolerations=tuple(
            Toleration(
                key=toleration.get("key") or "",
                operator=toleration.get("operator") or "Equal",
                effect=toleration.get("effect") or "",
            )
            for toleration in spec.get("tolerations") or ()
        ),
        deletion_at=_time(metadata.get("deletionTimestamp")),
        is_ready=_condition(status, "Ready").get("status") == "True",
        gpus=_gpus(spec),
    )


def disruption_budget_of(item: Json) -> DisruptionBudget:
    """Read a policy/v1 PodDisruptionBudget's JSON."""
    metadata, status = _part(item, "metadata"), _part(item, "status")
    selector = _part(item, "spec").get("selector")
    expressions = (selector or {}).get("matchExpressions") or ()
    return DisruptionBudget(
        namespace=metadata["namespace"],
        name=metadata["name"],
        match_labels=(selector or {}).get("matchLabels") or {},
        expressions=tuple(
            (each["key"], each["operator"], tuple(each.get("values") or ())) for each in expressions
        ),
        # `{}` selects all pods of the namespace, an absent selector none.
        has_selector=selector is not None,
        expected_pods=int(status.get("expectedPods", 0)),
        current_healthy=int(status.get("currentHealthy", 0)),
        desired_healthy=int(status.get("desiredHealthy", 0)),
        disruptions_allowed=int(status.get("disruptionsAllowed", 0)),
    )


def _part(item: Json, name: str) -> Json:
    return item.get(name) or {}


def _condition(status: Json, kind: str) -> Json:
    conditions: Sequence[Json] = status.get("conditions") or ()
    return next((each for each in conditions if each.get("type") == kind), {})


def _readiness(text: str | None) -> Readiness:
    return Readiness(text) if text in ("True", "False") else Readiness.UNKNOWN


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def _count(quantity: Any) -> int:  # noqa: ANN401 - JSON
    """Read the quantity of an extended resource: always whole, printed without a suffix."""
    text = str(quantity or "0")
    return int(text) if text.isdigit() else 0


def _gpus(spec: Json) -> int:
    """Return what the scheduler counts: the containers' sum, or one init container's if larger."""

    def limit(container: Json) -> int:
        return _count(_part(_part(container, "resources"), "limits").get(GPU_RESOURCE))

    steady = sum(limit(container) for container in spec.get("containers") or ())
    starting = max((limit(container) for container in spec.get("initContainers") or ()), default=0)
    return max(steady, starting)
