"""The disruption controller: the status of PodDisruptionBudgets."""

import math
from collections.abc import Mapping
from typing import Any, Final

from local.kubernetes import resources
from local.kubernetes.controllers.base import CONTROLLER_MANAGER, Controller
from local.kubernetes.objects import (
    JsonObject,
    condition_of,
    controller_of,
    is_ready,
    is_terminating,
    labels_of,
    metadata,
    name_of,
    namespace_of,
    seconds_of,
    with_condition,
    with_status,
)
from local.kubernetes.selectors import match_labels
from local.kubernetes.store import Change

_SCALABLE: Final = ("ReplicaSet", "StatefulSet", "Deployment")


class _SyncError(Exception):
    """The budget cannot be computed; the text ends up in its condition."""


class DisruptionController(Controller):
    """Counts the pods behind each budget."""

    name = "disruption"

    def notice(self, change: Change) -> None:
        """A budget is looked at when it changes, or a pod that it selects does."""
        if change.resource == resources.PDBS:
            if change.new is not None:
                self.mark(change.key)
        elif change.resource == resources.PODS:
            pod = change.latest
            for budget in self.store.find(resources.PDBS, "namespace", namespace_of(pod)):
                if match_labels((budget.get("spec") or {}).get("selector"))(labels_of(pod)):
                    self.mark(f"{namespace_of(budget)}/{name_of(budget)}")

    def reconcile(self, key: str) -> None:
        """Write the status of one budget, if it differs."""
        namespace, _, name = key.partition("/")
        budget = self.store.get(resources.PDBS, namespace, name)
        if budget is None:
            return
        try:
            changed = self._computed(budget, key)
        except _SyncError as error:
            changed = self._failed(budget, str(error))
        if changed != budget:
            self.registry.set_status(
                resources.PDBS, budget, lambda _old: changed, manager=CONTROLLER_MANAGER
            )

    def _computed(self, budget: JsonObject, key: str) -> JsonObject:
        selects = match_labels((budget.get("spec") or {}).get("selector"))
        pods = [
            pod
            for pod in self.store.find(resources.PODS, "namespace", namespace_of(budget))
            if selects(labels_of(pod))
        ]
        expected, desired = self._expected_and_desired(budget.get("spec") or {}, pods)
        disrupted = self._under_way(budget, pods, key)
        healthy = sum(
            is_ready(pod) and not is_terminating(pod) and name_of(pod) not in disrupted
            for pod in pods
        )
        allowed = max(0, healthy - desired) if expected > 0 else 0
        generation = metadata(budget).get("generation", 1)
        changed = with_status(
            budget,
            observedGeneration=generation,
            disruptedPods=disrupted or None,
            disruptionsAllowed=allowed,
            currentHealthy=healthy,
            desiredHealthy=desired,
            expectedPods=expected,
        )
        return self._with_verdict(
            changed,
            "True" if allowed else "False",
            "SufficientPods" if allowed else "InsufficientPods",
            "",
        )

    def _failed(self, budget: JsonObject, message: str) -> JsonObject:
        changed = with_status(budget, disruptionsAllowed=0)
        return self._with_verdict(changed, "False", "SyncFailed", message)

    def _with_verdict(
        self, budget: JsonObject, status: str, reason: str, message: str
    ) -> JsonObject:
        known = condition_of(budget, "DisruptionAllowed")
        since = (
            known["lastTransitionTime"]
            if known is not None and known["status"] == status
            else self.registry.now()
        )
        condition: JsonObject = {"type": "DisruptionAllowed", "status": status}
        observed = budget["status"].get("observedGeneration")
        if observed:
            condition["observedGeneration"] = observed
        condition |= {"lastTransitionTime": since, "reason": reason, "message": message}
        return with_condition(budget, condition)

    def _expected_and_desired(
        self, spec: Mapping[str, Any], pods: list[JsonObject]
    ) -> tuple[int, int]:
        """Return how many pods there should be, and how many must stay healthy."""
        max_unavailable = spec.get("maxUnavailable")
        min_available = spec.get("minAvailable")
        if max_unavailable is not None:
            expected = self._expected_scale(pods)
            return expected, max(0, expected - _resolved(max_unavailable, expected))
        if min_available is None:
            return len(pods), 0
        if isinstance(min_available, int):
            # A number counts every pod that the selector finds: Pending and finished ones too.
            return len(pods), min_available
        expected = self._expected_scale(pods)
        return expected, _resolved(min_available, expected)

    def _expected_scale(self, pods: list[JsonObject]) -> int:
        """Sum the replicas of the pods' controllers; bare pods count for nothing."""
        scales: dict[str, int] = {}
        for pod in pods:
            owner = controller_of(pod)
            if owner is not None and owner["uid"] not in scales:
                scales[owner["uid"]] = self._scale_of(namespace_of(pod), owner)
        return sum(scales.values())

    def _scale_of(self, namespace: str, owner: Mapping[str, Any]) -> int:
        resource = resources.OWNER_RESOURCES.get(owner["kind"])
        if resource is None or owner["kind"] not in _SCALABLE:
            group = str(owner["apiVersion"]).rpartition("/")[0]
            plural = resource.plural if resource else f"{str(owner['kind']).lower()}s"
            qualified = f"{plural}.{group}" if group else plural
            raise _SyncError(f"{qualified} does not implement the scale subresource")
        found = self.store.get(resource, namespace, owner["name"])
        if found is None:
            return 0
        return int((found.get("spec") or {}).get("replicas", 1))

    def _under_way(self, budget: JsonObject, pods: list[JsonObject], key: str) -> dict[str, str]:
        """Return the evictions that are granted but not yet seen as deletions."""
        known: Mapping[str, str] = budget["status"].get("disruptedPods") or {}
        kept = {}
        for pod in pods:
            since = known.get(name_of(pod))
            if since is None or is_terminating(pod):
                continue
            ends = seconds_of(since) + self.timings.disruption_timeout_s
            if ends > self.registry.clock():
                kept[name_of(pod)] = since
                self.mark_at(key, ends)
        return kept


def _resolved(value: int | str, total: int) -> int:
    """Resolve a number or a percentage; percentages round up, also for maxUnavailable."""
    if isinstance(value, int):
        return value
    return math.ceil(int(str(value).rstrip("%")) * total / 100)
