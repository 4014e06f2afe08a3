"""A cluster in memory, for unit tests of the use cases.

It keeps Nodes as the API's JSON, so that a JSON patch means here what it means there, and passes
the same suite as the real adapter (`tests/integration/adapters/test_kubernetes_contract.py`).
"""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from nodemend.adapters._kubernetes_objects import event_body, has_accelerators, node_of
from nodemend.application.ports import Clock
from nodemend.domain.errors import InvalidInputError
from nodemend.domain.nodes import Node, NodeRef, TaintEffect
from nodemend.domain.pods import UNSCHEDULABLE_TAINT_KEY, DisruptionBudget, EvictionAnswer, Pod
from nodemend.domain.policy import ClusterPolicy
from tests.fakes.system import ManualClock

T = TypeVar("T")

_FIRST_RESOURCE_VERSION = 1000


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a port's method, in the words of the emulators' call log."""

    verb: str
    target: str


@dataclass(slots=True)
class Fault:
    """An error that matching calls raise, before or after they have had their effect."""

    verb: str
    error: Exception
    target: str = ""
    times: int | None = 1
    is_after: bool = False


class Faults:
    """Records calls and raises what a test has asked for."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._faults: list[Fault] = []

    def fail(
        self,
        verb: str,
        error: Exception,
        *,
        target: str = "",
        times: int | None = 1,
        after: bool = False,
    ) -> None:
        """Let the next `times` calls of the verb raise (None: all).

        Args:
            target: Substring of the call's target.
            after: The call takes effect first, as when the answer is lost on its way.
        """
        self._faults.append(Fault(verb, error, target, times, after))

    def run(self, verb: str, target: str, action: Callable[[], T]) -> T:
        """Record the call, do it, and raise if a fault asks for it."""
        self.calls.append(Call(verb, target))
        fault = self._match(verb, target)
        if fault is not None and not fault.is_after:
            raise fault.error
        result = action()
        if fault is not None:
            raise fault.error
        return result

    def targets(self, verb: str) -> list[str]:
        """Return the targets of all calls of a verb, in order."""
        return [call.target for call in self.calls if call.verb == verb]

    def _match(self, verb: str, target: str) -> Fault | None:
        for fault in self._faults:
            if fault.verb == verb and fault.target in target and fault.times != 0:
                if fault.times is not None:
                    fault.times -= 1
                return fault
        return None


class FakeCluster:
    """One cluster, as `application.ports.Cluster` describes it.

    Args:
        name: The cluster's name.
        clock: Stamps events and deletion times.
        grace: How long an evicted pod takes to go; zero: it is gone at once.
        gpu_instance_types: As for the real adapter.
    """

    def __init__(
        self,
        name: str = "gpu-prod",
        *,
        clock: Clock | None = None,
        grace: timedelta = timedelta(),
        gpu_instance_types: frozenset[str] = frozenset(),
    ) -> None:
        self.name = name
        self.faults = Faults()
        self.events: list[dict[str, Any]] = []
        """Kubernetes Events as written, each once."""
        self._clock = clock or ManualClock()
        self._grace = grace
        self._gpu_instance_types = gpu_instance_types
        self._nodes: dict[str, dict[str, Any]] = {}
        self._pods: dict[tuple[str, str], Pod] = {}
        self._budgets: list[DisruptionBudget] = []
        self._eviction_answers: dict[tuple[str, str], list[EvictionAnswer]] = {}
        self._resource_version = _FIRST_RESOURCE_VERSION

    # --- the stage --------------------------------------------------------------------------------

    @property
    def calls(self) -> list[Call]:
        """All calls so far."""
        return self.faults.calls

    def add_node(self, node: Node) -> None:
        """Put a node there, or in the place of one of its name."""
        self._nodes[node.ref.name] = node_json(node)
        self._touch(node.ref.name)

    def change_node(self, name: str, change: Callable[[Node], Node]) -> None:
        """Let somebody else change a node."""
        self.add_node(change(node_of(self._nodes[name], self.name)))

    def remove_node(self, name: str) -> None:
        """Take a node away, as the cloud controller does when its instance is gone."""
        del self._nodes[name]

    def add_pod(self, pod: Pod) -> None:
        """Put a pod there, or in the place of one of its name."""
        self._pods[pod.namespace, pod.name] = pod

    def remove_pod(self, namespace: str, name: str) -> None:
        """Take a pod away; harmless if it is gone."""
        self._pods.pop((namespace, name), None)

    def add_budget(self, budget: DisruptionBudget) -> None:
        """Put a PodDisruptionBudget there. It is listed; script what it does to evictions."""
        self._budgets.append(budget)

    def answer_evictions(self, namespace: str, name: str, *answers: EvictionAnswer) -> None:
        """Answer the next evictions of a pod so; after the last one they succeed again.

        Scripted answers have no effect on the pod, whatever their status.
        """
        self._eviction_answers.setdefault((namespace, name), []).extend(answers)

    def answer_evictions_no_more(self) -> None:
        """Forget the scripted answers: from now on evictions succeed."""
        self._eviction_answers.clear()

    # --- application.ports.Cluster ----------------------------------------------------------------

    def get_node(self, name: str) -> Node | None:
        """Return the node of exactly this name, or None."""

        def read() -> Node | None:
            item = self._nodes.get(name)
            return None if item is None else node_of(item, self.name)

        return self.faults.run("get", f"nodes/{name}", read)

    def list_gpu_nodes(self) -> Sequence[Node]:
        """Return the nodes with accelerators, in order of their names, as the API lists them."""

        def read() -> Sequence[Node]:
            return tuple(
                node_of(item, self.name)
                for _, item in sorted(self._nodes.items())
                if has_accelerators(item, self._gpu_instance_types)
            )

        return self.faults.run("list", "nodes", read)

    def patch_node(self, name: str, patch: Sequence[Mapping[str, Any]]) -> bool:
        """Apply a JSON patch; False if the node is another than the one that was read."""
        return self.faults.run("patch", f"nodes/{name}", lambda: self._patch_node(name, patch))

    def list_pods(self, node_name: str) -> Sequence[Pod]:
        """Return the pods bound to a node."""

        def read() -> Sequence[Pod]:
            self._reap()
            return tuple(pod for _, pod in sorted(self._pods.items()) if pod.node_name == node_name)

        return self.faults.run("list", f"pods/{node_name}", read)

    def get_pod(self, namespace: str, name: str) -> Pod | None:
        """Return a pod, or None."""

        def read() -> Pod | None:
            self._reap()
            return self._pods.get((namespace, name))

        return self.faults.run("get", f"pods/{namespace}/{name}", read)

    def evict(self, pod: Pod) -> EvictionAnswer:
        """Evict a pod, unless the script says otherwise."""
        return self.faults.run("evict", f"pods/{pod.id}", lambda: self._evict(pod))

    def list_disruption_budgets(self, namespace: str) -> Sequence[DisruptionBudget]:
        """Return the namespace's budgets."""
        return self.faults.run(
            "list",
            f"poddisruptionbudgets/{namespace}",
            lambda: tuple(each for each in self._budgets if each.namespace == namespace),
        )

    def record_event(self, node: NodeRef, reason: str, message: str, *, is_warning: bool) -> None:
        """Keep an Event; the same one again is refused by the API and kept once here."""
        if not node.uid:
            return
        body = event_body(node, reason, message, is_warning=is_warning, at=self._clock.now())
        self.faults.calls.append(Call("create", f"events/{node.name}"))
        if body["metadata"]["name"] not in {each["metadata"]["name"] for each in self.events}:
            self.events.append(body)

    # --- how it works -----------------------------------------------------------------------------

    def _touch(self, name: str) -> None:
        self._resource_version += 1
        self._nodes[name]["metadata"]["resourceVersion"] = str(self._resource_version)

    def _patch_node(self, name: str, patch: Sequence[Mapping[str, Any]]) -> bool:
        item = self._nodes.get(name)
        if item is None:
            return False
        try:
            patched = apply_json_patch(item, patch)
        except PatchConflictError:
            return False
        if not patched.get("spec", {}).get("unschedulable", False):
            patched.get("spec", {}).pop("unschedulable", None)
        _validate_taints(name, patched)
        if patched != item:
            self._nodes[name] = patched
            self._touch(name)
            self._follow_cordon(name)
        return True

    def _follow_cordon(self, name: str) -> None:
        """Do what the node lifecycle controller does within a tenth of a second of a cordon."""
        spec = self._nodes[name]["spec"]
        others = [
            taint for taint in spec.get("taints", []) if taint["key"] != UNSCHEDULABLE_TAINT_KEY
        ]
        is_tainted = len(others) < len(spec.get("taints", []))
        is_cordoned = bool(spec.get("unschedulable", False))
        if is_cordoned and not is_tainted:
            stamp = self._clock.now().strftime("%Y-%m-%dT%H:%M:%SZ")
            others.append(
                {
                    "key": UNSCHEDULABLE_TAINT_KEY,
                    "effect": TaintEffect.NO_SCHEDULE.value,
                    "timeAdded": stamp,
                }
            )
        if is_cordoned is is_tainted:
            return
        spec["taints"] = others
        if not others:
            del spec["taints"]
        self._touch(name)

    def _reap(self) -> None:
        now = self._clock.now()
        self._pods = {
            key: pod
            for key, pod in self._pods.items()
            if pod.deletion_at is None or pod.deletion_at > now
        }

    def _evict(self, pod: Pod) -> EvictionAnswer:
        key = (pod.namespace, pod.name)
        script = self._eviction_answers.get(key)
        if script:
            return script.pop(0)
        self._reap()
        known = self._pods.get(key)
        if known is None:
            return EvictionAnswer(404, f'pods "{pod.name}" not found', details_kind="pods")
        if known.uid != pod.uid:
            return EvictionAnswer(
                409, "the UID in the precondition does not match", details_kind="Pod"
            )
        if known.deletion_at is None:
            self._pods[key] = replace(known, deletion_at=self._clock.now() + self._grace)
        return EvictionAnswer(201)


class FakeClusters:
    """Opens fake clusters by name."""

    def __init__(self, *clusters: FakeCluster) -> None:
        self.faults = Faults()
        self._clusters = {cluster.name: cluster for cluster in clusters}

    def open(self, cluster: ClusterPolicy) -> FakeCluster:
        """Return the cluster of that name.

        Raises:
            InvalidInputError: if there is none, as EKS says it.
        """

        def find() -> FakeCluster:
            if cluster.name not in self._clusters:
                raise InvalidInputError("clusters[].name", "there is no such cluster", "correct it")
            return self._clusters[cluster.name]

        return self.faults.run("open", cluster.name, find)


# --- JSON -----------------------------------------------------------------------------------------


def node_json(node: Node) -> dict[str, Any]:
    """Return a Node object as the API would send it, absent fields left out."""
    metadata: dict[str, Any] = {
        "name": node.ref.name,
        "uid": node.ref.uid,
        "labels": dict(node.labels),
        # Every real node has this one, or a patch could not add a second below its parent.
        "annotations": {"node.alpha.kubernetes.io/ttl": "0", **node.annotations},
        "creationTimestamp": _stamp(node.created_at),
        "deletionTimestamp": _stamp(datetime(2026, 5, 1, tzinfo=UTC)) if node.is_deleting else None,
        "resourceVersion": node.resource_version,
    }
    instance_id = node.ref.instance_id
    spec: dict[str, Any] = {
        "providerID": f"aws:///us-east-1a/{instance_id}" if instance_id else None,
        "unschedulable": True if node.is_unschedulable else None,
        "taints": [taint.as_json() for taint in node.taints],
    }
    ready = {
        "type": "Ready",
        "status": str(node.readiness),
        "lastHeartbeatTime": _stamp(node.heartbeat_at),
    }
    status: dict[str, Any] = {
        "nodeInfo": {"bootID": node.ref.boot_id},
        "conditions": [_present(ready)],
        "capacity": _gpus(node.gpu_capacity),
        "allocatable": _gpus(node.gpu_allocatable),
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": _present(metadata),
        "spec": _present(spec),
        "status": status,
    }


def _present(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value not in (None, "", [], {})}


def _stamp(at: datetime | None) -> str | None:
    return None if at is None else at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _gpus(count: int) -> dict[str, str]:
    return {"cpu": "192"} | ({"nvidia.com/gpu": str(count)} if count else {})


def _validate_taints(name: str, item: Mapping[str, Any]) -> None:
    seen = set()
    for taint in item.get("spec", {}).get("taints", []):
        identity = (taint.get("key"), taint.get("effect"))
        if identity in seen:
            raise InvalidInputError(
                "patch", f"duplicate taint {identity} on {name}", "taint once per key and effect"
            )
        if taint.get("effect") not in set(TaintEffect):
            raise InvalidInputError("patch", f"effect of {identity} on {name}", "use a known one")
        seen.add(identity)


class PatchConflictError(Exception):
    """A `test` failed, or the patch names what is not there: 422 with empty details."""


_ABSENT = object()


def apply_json_patch(document: Any, patch: Sequence[Mapping[str, Any]]) -> Any:
    """Return the patched copy of a document (RFC 6902, as the API server applies it).

    `test` with null holds for a missing member, as recorded from a real server.

    Raises:
        PatchConflictError: as described there.
    """
    result = copy.deepcopy(document)
    for operation in patch:
        path = [_unescaped(part) for part in operation["path"].split("/")[1:]]
        parent = _walk(result, path[:-1])
        value = copy.deepcopy(operation.get("value"))
        match operation["op"]:
            case "test":
                _test(parent, path[-1], value)
            case "add":
                _add(parent, path[-1], value)
            case "replace":
                _remove(parent, path[-1], removes=False)
                _set(parent, path[-1], value)
            case "remove":
                _remove(parent, path[-1])
            case other:
                raise InvalidInputError("patch", f"operation {other!r}", "use a known one")
    # What is compared and kept is JSON: no tuples, no enums.
    return json.loads(json.dumps(result))


def _unescaped(part: str) -> str:
    return part.replace("~1", "/").replace("~0", "~")


def _walk(document: Any, path: Sequence[str]) -> Any:
    for part in path:
        document = _member(document, part)
    return document


def _member(parent: Any, key: str) -> Any:
    if isinstance(parent, dict):
        return parent.get(key, _ABSENT)
    if isinstance(parent, list) and key.isdigit() and int(key) < len(parent):
        return parent[int(key)]
    return _ABSENT


def _test(parent: Any, key: str, value: Any) -> None:
    found = _member(parent, key)
    if (None if found is _ABSENT else found) != value:
        raise PatchConflictError(f"test of {key!r} failed")


def _add(parent: Any, key: str, value: Any) -> None:
    if isinstance(parent, list):
        if key != "-" and not (key.isdigit() and int(key) <= len(parent)):
            raise PatchConflictError(f"no place {key!r} in the list")
        parent.insert(len(parent) if key == "-" else int(key), value)
    else:
        _set(parent, key, value)


def _set(parent: Any, key: str, value: Any) -> None:
    if isinstance(parent, list):
        parent[int(key)] = value
    elif isinstance(parent, dict):
        parent[key] = value
    else:
        raise PatchConflictError(f"{key!r} has no parent")


def _remove(parent: Any, key: str, *, removes: bool = True) -> None:
    if _member(parent, key) is _ABSENT:
        raise PatchConflictError(f"{key!r} is not there")
    if removes:
        del parent[int(key) if isinstance(parent, list) else key]
