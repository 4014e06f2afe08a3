"""What the server fills in when an object is created.

`apply_defaults` is what decoding does: the fields count as the creator's in managedFields.
`admit` is what the admission plugins do after that: nobody owns those fields.
"""

from typing import Any, Final

from local.kubernetes import resources
from local.kubernetes.names import Names
from local.kubernetes.objects import (
    JsonObject,
    deep_copy,
    labels_of,
    metadata,
    seconds_of,
    timestamp,
    with_metadata,
    with_status,
)
from local.kubernetes.resources import Resource

_PRIORITIES: Final = {"system-node-critical": 2000001000, "system-cluster-critical": 2000000000}
_TOPOLOGY_LABELS: Final = ("topology.kubernetes.io/region", "topology.kubernetes.io/zone")
_TOKEN_PATH: Final = "/var/run/secrets/kubernetes.io/serviceaccount"  # noqa: S105 - a path
DEFAULT_TOLERATION_S: Final = 300


def apply_defaults(resource: Resource, obj: JsonObject) -> JsonObject:
    """Return a copy of `obj` with the defaults of its type."""
    defaulted: JsonObject = {"kind": resource.kind, "apiVersion": resource.api_version}
    defaulted.update(deep_copy(obj))
    if resource == resources.PODS:
        default_pod_spec(defaulted.setdefault("spec", {}))
        defaulted["spec"].setdefault("enableServiceLinks", True)
        defaulted["status"] = {}
    elif resource == resources.NODES:
        defaulted.setdefault("spec", {})
        defaulted["status"] = _node_status(defaulted.get("status") or {})
    elif resource == resources.EVENTS:
        defaulted = {**deep_copy(resource.zero), **defaulted}
        for key in ("firstTimestamp", "lastTimestamp"):
            if defaulted[key]:
                defaulted[key] = timestamp(seconds_of(defaulted[key]))
    elif resource == resources.NAMESPACES:
        defaulted["spec"] = {"finalizers": ["kubernetes"]}
        defaulted["status"] = {"phase": "Active"}
        defaulted = with_metadata(
            defaulted,
            labels={
                **labels_of(defaulted),
                "kubernetes.io/metadata.name": metadata(defaulted).get("name"),
            },
        )
    elif resource in resources.OWNER_RESOURCES.values():
        _default_workload(resource, defaulted)
    elif "status" in resource.subresources:
        defaulted.pop("status", None)
        if "status" in resource.zero:
            defaulted["status"] = deep_copy(resource.zero["status"])
    return defaulted


def _node_status(given: JsonObject) -> JsonObject:
    zero = resources.NODES.zero["status"]
    status = {**deep_copy(zero), **given}
    status["nodeInfo"] = {**zero["nodeInfo"], **(given.get("nodeInfo") or {})}
    if "capacity" in status and "allocatable" not in status:
        status["allocatable"] = dict(status["capacity"])
    return status


def default_pod_spec(spec: JsonObject) -> None:
    """Fill in a pod's (or a template's) spec, in place."""
    for container in spec.get("containers") or ():
        default_resources = container.setdefault("resources", {})
        for name, quantity in (default_resources.get("limits") or {}).items():
            default_resources.setdefault("requests", {}).setdefault(name, quantity)
        container.setdefault("terminationMessagePath", "/dev/termination-log")
        container.setdefault("terminationMessagePolicy", "File")
        tag = str(container.get("image", "")).rpartition("/")[2].partition(":")[2]
        container.setdefault(
            "imagePullPolicy", "Always" if tag in ("", "latest") else "IfNotPresent"
        )
    spec.setdefault("restartPolicy", "Always")
    spec.setdefault("terminationGracePeriodSeconds", 30)
    spec.setdefault("dnsPolicy", "ClusterFirst")
    spec.setdefault("securityContext", {})
    spec.setdefault("schedulerName", "default-scheduler")


def _qos_class(spec: JsonObject) -> str:
    """GPUs do not count: only cpu and memory make a pod Burstable or Guaranteed."""
    guaranteed = True
    any_set = False
    for container in spec.get("containers") or ():
        section = container.get("resources") or {}
        for name in ("cpu", "memory"):
            limit = (section.get("limits") or {}).get(name)
            request = (section.get("requests") or {}).get(name, limit)
            any_set = any_set or limit is not None or request is not None
            guaranteed = guaranteed and limit is not None and request == limit
    if not any_set:
        return "BestEffort"
    return "Guaranteed" if guaranteed else "Burstable"


def _default_workload(resource: Resource, obj: JsonObject) -> None:
    spec = obj.setdefault("spec", {})
    template_spec = spec.setdefault("template", {}).setdefault("spec", {})
    default_pod_spec(template_spec)
    obj["status"] = {}
    if resource == resources.DAEMONSETS:
        spec.setdefault(
            "updateStrategy",
            {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}},
        )
        spec.setdefault("revisionHistoryLimit", 10)
        annotations = obj["metadata"].setdefault("annotations", {})
        annotations.setdefault("deprecated.daemonset.template.generation", "1")
        obj["status"] = {
            "currentNumberScheduled": 0,
            "numberMisscheduled": 0,
            "desiredNumberScheduled": 0,
            "numberReady": 0,
        }
    elif resource == resources.JOBS:
        spec.setdefault("parallelism", 1)
        spec.setdefault("completions", 1)
        spec.setdefault("backoffLimit", 6)
    else:
        spec.setdefault("replicas", 1)
        obj["status"] = {"replicas": 0}
        if resource == resources.STATEFULSETS:
            spec.setdefault("podManagementPolicy", "OrderedReady")


def admit(
    resource: Resource, obj: JsonObject, names: Names, node_of_pod: JsonObject | None
) -> JsonObject:
    """Return `obj` as the admission plugins leave it on creation."""
    if resource == resources.PODS:
        return with_topology(_admit_pod(obj, names), node_of_pod)
    if resource == resources.NODES:
        ready = any(
            condition.get("type") == "Ready" and condition.get("status") == "True"
            for condition in obj["status"].get("conditions") or ()
        )
        taints = list(obj["spec"].get("taints") or ())
        if not ready and all(taint["key"] != "node.kubernetes.io/not-ready" for taint in taints):
            taints.append({"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"})
            return {**obj, "spec": {**obj["spec"], "taints": taints}}
    return obj


def with_topology(pod: JsonObject, node: JsonObject | None) -> JsonObject:
    """Copy region and zone of the node to the pod, as binding a pod does since v1.35."""
    if node is None:
        return pod
    copied = {key: value for key, value in labels_of(node).items() if key in _TOPOLOGY_LABELS}
    return with_metadata(pod, labels={**labels_of(pod), **copied} or None)


def _admit_pod(pod: JsonObject, names: Names) -> JsonObject:
    spec: JsonObject = deep_copy(pod["spec"])
    is_mirror = "kubernetes.io/config.mirror" in (metadata(pod).get("annotations") or {})
    if not is_mirror:
        spec.setdefault("serviceAccountName", "default")
        spec.setdefault("serviceAccount", spec["serviceAccountName"])
        _mount_token(spec, f"kube-api-access-{names.suffix()}")
    priority = _PRIORITIES.get(str(spec.get("priorityClassName", "")), 0)
    spec.setdefault("priority", priority)
    spec.setdefault("preemptionPolicy", "PreemptLowerPriority")
    _add_default_tolerations(spec)
    status = {"phase": "Pending", "qosClass": _qos_class(spec)}
    return {**pod, "spec": spec, "status": status}


def _mount_token(spec: JsonObject, volume: str) -> None:
    sources: list[JsonObject] = [
        {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {
            "downwardAPI": {
                "items": [
                    {
                        "path": "namespace",
                        "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"},
                    }
                ]
            }
        },
    ]
    projected = {"sources": sources, "defaultMode": 420}
    spec["volumes"] = [*(spec.get("volumes") or ()), {"name": volume, "projected": projected}]
    mount = {"name": volume, "readOnly": True, "mountPath": _TOKEN_PATH}
    for container in spec.get("containers") or ():
        container["volumeMounts"] = [*(container.get("volumeMounts") or ()), mount]


def _add_default_tolerations(spec: JsonObject) -> None:
    tolerations: list[Any] = list(spec.get("tolerations") or ())
    for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
        covered = any(
            known.get("key") in (None, "", key) and known.get("effect") in (None, "", "NoExecute")
            for known in tolerations
        )
        if not covered:
            tolerations.append(
                {
                    "key": key,
                    "operator": "Exists",
                    "effect": "NoExecute",
                    "tolerationSeconds": DEFAULT_TOLERATION_S,
                }
            )
    spec["tolerations"] = tolerations


def drop_zero_values(resource: Resource, obj: JsonObject) -> JsonObject:
    """Leave out what the type's `omitempty` fields leave out: nulls, false, empty lists.

    `spec.unschedulable: false` and `null` thus both end as an absent field.
    """
    if resource.is_custom:
        return obj
    cleaned = dict(obj)
    meta = dict(metadata(obj))
    for key in ("labels", "annotations", "finalizers", "ownerReferences"):
        if key in meta and not meta[key]:
            del meta[key]
    cleaned["metadata"] = meta
    if resource == resources.PODS and (obj.get("status") or {}).get("conditions"):
        conditions = [{"lastProbeTime": None, **known} for known in obj["status"]["conditions"]]
        cleaned = with_status(cleaned, conditions=conditions)
    if resource == resources.NODES:
        spec = dict(obj.get("spec") or {})
        for key in ("unschedulable", "taints"):
            if key in spec and not spec[key]:
                del spec[key]
        cleaned["spec"] = spec
        if "status" not in obj:
            cleaned = with_status(cleaned, **deep_copy(resource.zero["status"]))
    return cleaned
