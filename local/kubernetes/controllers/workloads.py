"""The workload controllers: pods that go are made again, as their owner's kind does it."""

import json
import zlib
from collections.abc import Callable, Mapping
from typing import Final

from local.kubernetes import resources
from local.kubernetes.controllers.base import CONTROLLER_MANAGER, Controller
from local.kubernetes.controllers.garbage import JOB_TRACKING
from local.kubernetes.managed_fields import Manager
from local.kubernetes.objects import (
    JsonObject,
    controller_of,
    deep_copy,
    is_finished,
    is_ready,
    is_terminating,
    labels_of,
    metadata,
    name_of,
    namespace_of,
    phase_of,
    uid_of,
    with_metadata,
)
from local.kubernetes.registry import DeleteOptions
from local.kubernetes.selectors import tolerates
from local.kubernetes.store import Change

_HASH_ALPHABET: Final = "bcdfghjklmnpqrstvwxz2456789"
DAEMON_TOLERATIONS: Final = (
    ("node.kubernetes.io/not-ready", "NoExecute"),
    ("node.kubernetes.io/unreachable", "NoExecute"),
    ("node.kubernetes.io/disk-pressure", "NoSchedule"),
    ("node.kubernetes.io/memory-pressure", "NoSchedule"),
    ("node.kubernetes.io/pid-pressure", "NoSchedule"),
    ("node.kubernetes.io/unschedulable", "NoSchedule"),
)


class WorkloadController(Controller):
    """All workload kinds; a key is `KIND|NAMESPACE/NAME`."""

    name = "workloads"

    def notice(self, change: Change) -> None:
        """An owner is looked at when it or one of its pods changes; a node concerns daemons."""
        resource = change.resource
        if resource == resources.PODS:
            owner = controller_of(change.latest)
            if owner is not None and owner["kind"] in resources.OWNER_RESOURCES:
                self.mark(f"{owner['kind']}|{namespace_of(change.latest)}/{owner['name']}")
        elif resources.OWNER_RESOURCES.get(resource.kind) == resource:
            self.mark(f"{resource.kind}|{change.key}")
        elif resource == resources.NODES and _differs_for_daemons(change):
            for daemon in self.store.all(resources.DAEMONSETS):
                self.mark(f"DaemonSet|{namespace_of(daemon)}/{name_of(daemon)}")

    def reconcile(self, key: str) -> None:
        """Make the missing pods of one owner."""
        kind, _, rest = key.partition("|")
        namespace, _, name = rest.partition("/")
        owner = self.store.get(resources.OWNER_RESOURCES[kind], namespace, name)
        if owner is None or is_terminating(owner) or self._is_namespace_closing(namespace):
            return
        steps: Mapping[str, Callable[[JsonObject, list[JsonObject]], None]] = {
            "ReplicaSet": self._replica_set,
            "StatefulSet": self._stateful_set,
            "Job": self._job,
            "DaemonSet": self._daemon_set,
            "Deployment": self._deployment,
        }
        steps[kind](owner, self.store.find(resources.PODS, "owner", uid_of(owner)))

    def _is_namespace_closing(self, name: str) -> bool:
        namespace = self.store.get(resources.NAMESPACES, "", name)
        return namespace is None or is_terminating(namespace)

    # ------------------------------------------------------------------ kinds

    def _deployment(self, deployment: JsonObject, _pods: list[JsonObject]) -> None:
        spec = deployment["spec"]
        digest = template_hash(spec["template"])
        name = f"{name_of(deployment)}-{digest}"
        namespace = namespace_of(deployment)
        found = self.store.get(resources.REPLICASETS, namespace, name)
        replicas = int(spec.get("replicas", 1))
        if found is None:
            template = deep_copy(spec["template"])
            labels = {**(template.get("metadata", {}).get("labels") or {})}
            labels["pod-template-hash"] = digest
            template["metadata"] = {**template.get("metadata", {}), "labels": labels}
            replica_set = {
                "metadata": {
                    "name": name,
                    "namespace": namespace,
                    "labels": labels,
                    "ownerReferences": [_owner_reference(deployment)],
                },
                "spec": {
                    "replicas": replicas,
                    "selector": {"matchLabels": labels},
                    "template": template,
                },
            }
            self.registry.create(resources.REPLICASETS, replica_set, manager=CONTROLLER_MANAGER)
        elif found["spec"].get("replicas") != replicas:
            self.registry.set_spec(
                resources.REPLICASETS,
                found,
                lambda old: {**old, "spec": {**old["spec"], "replicas": replicas}},
                manager=CONTROLLER_MANAGER,
            )

    def _replica_set(self, owner: JsonObject, pods: list[JsonObject]) -> None:
        active = [pod for pod in pods if not is_terminating(pod) and not is_finished(pod)]
        wanted = int(owner["spec"].get("replicas", 1))
        for _ in range(wanted - len(active)):
            self._create(owner, {"generateName": f"{name_of(owner)}-"})
        # The ones that are not ready go first, as they are missed least.
        surplus = sorted(active, key=lambda pod: (is_ready(pod), name_of(pod)))
        for pod in surplus[: max(0, len(active) - wanted)]:
            self._delete(pod)

    def _stateful_set(self, owner: JsonObject, pods: list[JsonObject]) -> None:
        by_name = {name_of(pod): pod for pod in pods}
        in_order = owner["spec"].get("podManagementPolicy") == "OrderedReady"
        for ordinal in range(int(owner["spec"].get("replicas", 1))):
            name = f"{name_of(owner)}-{ordinal}"
            pod = by_name.get(name)
            if pod is None:
                labels = {
                    "apps.kubernetes.io/pod-index": str(ordinal),
                    "controller-revision-hash": f"{name_of(owner)}-{_digest(owner)}",
                    "statefulset.kubernetes.io/pod-name": name,
                }
                self._create(
                    owner,
                    {"name": name, "generateName": f"{name_of(owner)}-", "labels": labels},
                    {"hostname": name, "subdomain": owner["spec"].get("serviceName", "")},
                )
                pod = None
            elif is_finished(pod) and not is_terminating(pod):
                self._delete(pod)
            if in_order and (pod is None or not is_ready(pod) or is_terminating(pod)):
                return

    def _job(self, owner: JsonObject, pods: list[JsonObject]) -> None:
        for pod in pods:
            if is_finished(pod):
                self._drop_job_finalizer(pod)
        succeeded = sum(phase_of(pod) == "Succeeded" for pod in pods)
        failed = sum(phase_of(pod) == "Failed" and not is_terminating(pod) for pod in pods)
        active = sum(not is_terminating(pod) and not is_finished(pod) for pod in pods)
        spec = owner["spec"]
        if failed > int(spec.get("backoffLimit", 6)):
            return
        wanted = min(int(spec.get("parallelism", 1)), int(spec.get("completions", 1)) - succeeded)
        labels = {
            "batch.kubernetes.io/controller-uid": uid_of(owner),
            "batch.kubernetes.io/job-name": name_of(owner),
            "controller-uid": uid_of(owner),
            "job-name": name_of(owner),
        }
        for _ in range(wanted - active):
            self._create(
                owner,
                {
                    "generateName": f"{name_of(owner)}-",
                    "labels": labels,
                    "finalizers": [JOB_TRACKING],
                },
            )

    def _drop_job_finalizer(self, pod: JsonObject) -> None:
        finalizers = metadata(pod).get("finalizers") or []
        if JOB_TRACKING in finalizers:
            kept = [item for item in finalizers if item != JOB_TRACKING]
            self.registry.update(
                resources.PODS,
                namespace_of(pod),
                name_of(pod),
                lambda old: with_metadata(old, finalizers=kept or None),
                manager=Manager(CONTROLLER_MANAGER),
            )

    def _daemon_set(self, owner: JsonObject, pods: list[JsonObject]) -> None:
        on_node: dict[str, list[JsonObject]] = {}
        for pod in pods:
            on_node.setdefault(daemon_node(pod), []).append(pod)
            if is_finished(pod) and not is_terminating(pod):
                self._delete(pod)
        spec = owner["spec"]["template"]["spec"]
        for node in self.store.all(resources.NODES):
            present = on_node.get(name_of(node), [])
            if _daemon_runs_on(spec, node):
                # Unlike a ReplicaSet, a DaemonSet waits until the old pod is really gone.
                if not present:
                    self._create_daemon(owner, name_of(node))
            else:
                for pod in present:
                    if not is_terminating(pod):
                        self._delete(pod)
        self._count_daemons(owner, on_node)

    def _count_daemons(self, owner: JsonObject, on_node: Mapping[str, list[JsonObject]]) -> None:
        spec = owner["spec"]["template"]["spec"]
        wanted = sum(_daemon_runs_on(spec, node) for node in self.store.all(resources.NODES))
        pods = [pod for present in on_node.values() for pod in present]
        ready = sum(is_ready(pod) for pod in pods)
        counts: JsonObject = {
            "currentNumberScheduled": len(pods),
            "numberMisscheduled": 0,
            "desiredNumberScheduled": wanted,
            "numberReady": ready,
            "observedGeneration": metadata(owner)["generation"],
            "updatedNumberScheduled": len(pods) or None,
            "numberAvailable": ready or None,
        }
        if wanted != ready:
            counts["numberUnavailable"] = wanted - ready
        counts = {key: value for key, value in counts.items() if value is not None}
        if owner.get("status") != counts:
            self.registry.set_status(
                resources.DAEMONSETS,
                owner,
                lambda old: {**old, "status": counts},
                manager=CONTROLLER_MANAGER,
            )

    def _create_daemon(self, owner: JsonObject, node: str) -> None:
        term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
        required = {"nodeSelectorTerms": [term]}
        affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
        tolerations = [
            *(owner["spec"]["template"]["spec"].get("tolerations") or ()),
            *(
                {"key": key, "operator": "Exists", "effect": effect}
                for key, effect in DAEMON_TOLERATIONS
            ),
        ]
        labels = {"controller-revision-hash": _digest(owner), "pod-template-generation": "1"}
        self._create(
            owner,
            {"generateName": f"{name_of(owner)}-", "labels": labels},
            {"affinity": affinity, "tolerations": tolerations},
        )

    # ------------------------------------------------------------------- pods

    def _create(self, owner: JsonObject, meta: JsonObject, spec: JsonObject | None = None) -> None:
        template = owner["spec"]["template"]
        made: JsonObject = deep_copy(template.get("metadata") or {})
        labels = {**(made.get("labels") or {}), **(meta.get("labels") or {})}
        made.update(meta)
        made["namespace"] = namespace_of(owner)
        made["labels"] = labels
        made["ownerReferences"] = [_owner_reference(owner)]
        pod = {
            "metadata": made,
            "spec": {**deep_copy(template["spec"]), **{k: v for k, v in (spec or {}).items() if v}},
        }
        self.registry.create(resources.PODS, pod, manager=CONTROLLER_MANAGER)

    def _delete(self, pod: JsonObject) -> None:
        self.registry.delete(
            resources.PODS, namespace_of(pod), name_of(pod), DeleteOptions(uid=uid_of(pod))
        )


def _owner_reference(owner: JsonObject) -> JsonObject:
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": name_of(owner),
        "uid": uid_of(owner),
        "controller": True,
        "blockOwnerDeletion": True,
    }


def template_hash(template: JsonObject) -> str:
    """Return the name part that Deployments and revisions derive from a pod template."""
    number = zlib.crc32(json.dumps(template, sort_keys=True).encode())
    letters: list[str] = []
    while len(letters) < 10:
        number, index = divmod(number * 31 + 7, len(_HASH_ALPHABET))
        letters.append(_HASH_ALPHABET[index])
        number %= 2**40
    return "".join(letters)


def _digest(owner: JsonObject) -> str:
    return template_hash(owner["spec"]["template"])


def daemon_node(pod: JsonObject) -> str:
    """Return the node that a DaemonSet's pod is made for, bound or not."""
    affinity = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {})
    for term in required.get("nodeSelectorTerms") or ():
        for field in term.get("matchFields") or ():
            if field["key"] == "metadata.name":
                return str(field["values"][0])
    return str(pod["spec"].get("nodeName", ""))


def _daemon_runs_on(spec: JsonObject, node: JsonObject) -> bool:
    labels = labels_of(node)
    wanted: Mapping[str, str] = spec.get("nodeSelector") or {}
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    tolerated = [
        *(spec.get("tolerations") or ()),
        *({"key": k, "operator": "Exists", "effect": e} for k, e in DAEMON_TOLERATIONS),
    ]
    # not-ready and unreachable do not keep a daemon away: it is what makes nodes ready.
    return all(
        taint["effect"] == "PreferNoSchedule"
        or taint["key"] in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
        or tolerates(tolerated, taint) is not None
        for taint in (node.get("spec") or {}).get("taints") or ()
    )


def _differs_for_daemons(change: Change) -> bool:
    if change.old is None or change.new is None:
        return True
    return change.old.get("spec") != change.new.get("spec") or (
        labels_of(change.old) != labels_of(change.new)
    )
