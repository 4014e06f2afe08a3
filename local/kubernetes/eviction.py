"""The eviction subresource: which budget is asked, what it costs, and what is answered.

The order of the checks is the real one, and it matters: the caller's preconditions come last, so
an eviction with a wrong uid under a budget is refused *after* it has used the budget up.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from local.kubernetes import errors, resources
from local.kubernetes.errors import ApiError, Cause
from local.kubernetes.objects import (
    JsonObject,
    condition_of,
    is_finished,
    is_ready,
    is_terminating,
    labels_of,
    metadata,
    name_of,
    namespace_of,
    phase_of,
    timestamp,
    uid_of,
    with_condition,
    with_status,
)
from local.kubernetes.registry import DeleteOptions, Registry, check_preconditions
from local.kubernetes.requests import ApiRequest, delete_options
from local.kubernetes.schema import prune_unknown
from local.kubernetes.selectors import match_labels
from local.kubernetes.store import resource_version_of

_VIOLATES: Final = "Cannot evict pod as it would violate the pod's disruption budget."
_MULTIPLE: Final = (
    "This pod has more than one PodDisruptionBudget, which the eviction subresource does not "
    "support."
)
_NOT_PROCESSED_RETRY_S: Final = 10
_MAX_DISRUPTED_PODS: Final = 2000
_RETRIES: Final = 20
_MANAGER: Final = "kube-apiserver"


class Evictions:
    """Serves POST `…/pods/NAME/eviction`."""

    def __init__(
        self,
        registry: Registry,
        *,
        conflict_retry_s: float,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`conflict_retry_s`: how long the server retries a conflict of a pod without budget."""
        self._registry = registry
        self._store = registry.store
        self._retry_s = conflict_retry_s
        self._sleep = sleep

    def evict(self, request: ApiRequest, namespace: str, name: str) -> tuple[bool, list[str]]:
        """Evict a pod; return whether anything changed, and the warnings for the caller.

        Must be called without the store's lock: a conflict may be retried for seconds.

        Raises:
            ApiError: 400, 403, 404, 409, 422, 429, 500 as the real server answers.
        """
        body = _decode(request)
        body, unknown = prune_unknown("Eviction", body)
        given = metadata(body)
        if given.get("namespace", namespace) != namespace:
            raise errors.bad_request(
                "the namespace of the provided object does not match the namespace sent on the "
                "request"
            )
        self._registry.check_namespace(resources.PODS, namespace, name)
        if given.get("name") != name:
            raise errors.bad_request("name in URL does not match name in Eviction object")
        options = delete_options(body.get("deleteOptions"), {})
        options = replace(options, dry_run=options.dry_run or request.is_dry_run)
        changed = self._evict(namespace, name, options)
        return changed, [f'unknown field "{path}"' for path in unknown]

    def _evict(self, namespace: str, name: str, options: DeleteOptions) -> bool:
        for attempt in range(_RETRIES + 1):
            with self._store.lock:
                pod = self._registry.get(resources.PODS, namespace, name)
                if not _can_ignore_budget(pod):
                    return self._evict_under_budget(pod, options)
                try:
                    return self._delete(pod, options)
                except ApiError as error:
                    if error.code != 409 or attempt == _RETRIES:
                        raise
            self._sleep(self._retry_s / _RETRIES)
        raise AssertionError  # the last attempt returns or raises

    def _evict_under_budget(self, pod: JsonObject, options: DeleteOptions) -> bool:
        budgets = self._budgets_of(pod)
        if len(budgets) > 1:
            raise errors.internal(_MULTIPLE)
        if budgets and not _may_go_unready(pod, budgets[0]):
            self._take_disruption(pod, budgets[0], options)
        return self._delete(pod, options)

    def _budgets_of(self, pod: JsonObject) -> list[JsonObject]:
        return [
            budget
            for budget in self._store.find(resources.PDBS, "namespace", namespace_of(pod))
            if match_labels((budget.get("spec") or {}).get("selector"))(labels_of(pod))
        ]

    def _take_disruption(self, pod: JsonObject, budget: JsonObject, options: DeleteOptions) -> None:
        name = name_of(budget)
        status: JsonObject = budget["status"]
        if status.get("observedGeneration", 0) < metadata(budget).get("generation", 0):
            raise _too_many(
                f"The disruption budget {name} is still being processed by the server.",
                _NOT_PROCESSED_RETRY_S,
            )
        allowed = int(status["disruptionsAllowed"])
        if allowed < 0:
            raise errors.forbidden(
                "poddisruptionbudgets", "policy", name, "pdb disruptions allowed is negative"
            )
        if len(status.get("disruptedPods") or ()) > _MAX_DISRUPTED_PODS:
            raise errors.forbidden(
                "poddisruptionbudgets",
                "policy",
                name,
                "DisruptedPods map too big - too many evictions not confirmed by PDB controller",
            )
        if allowed == 0:
            raise _too_many(_why_not(budget), 0)
        if options.dry_run:
            return
        self._registry.set_status(
            resources.PDBS, budget, lambda old: self._decremented(old, pod), manager=_MANAGER
        )

    def _decremented(self, budget: JsonObject, pod: JsonObject) -> JsonObject:
        now = timestamp(self._registry.clock())
        status = budget["status"]
        left = int(status["disruptionsAllowed"]) - 1
        changed = with_status(
            budget,
            disruptionsAllowed=left,
            disruptedPods={**(status.get("disruptedPods") or {}), name_of(pod): now},
        )
        if left == 0:
            changed = with_condition(
                changed,
                {
                    "type": "DisruptionAllowed",
                    "status": "False",
                    "observedGeneration": status["observedGeneration"],
                    "lastTransitionTime": now,
                    "reason": "InsufficientPods",
                    "message": "",
                },
            )
        return changed

    def _delete(self, pod: JsonObject, options: DeleteOptions) -> bool:
        check_preconditions(resources.PODS, pod, options)
        changed = False
        if not options.dry_run and not _is_marked(pod):
            pod = self._registry.mark_disrupted(
                pod, "EvictionByEvictionAPI", "Eviction API: evicting"
            )
            changed = True
        outcome = self._registry.delete(
            resources.PODS,
            namespace_of(pod),
            name_of(pod),
            replace(options, uid=uid_of(pod), resource_version=resource_version_of(pod)),
        )
        return changed or outcome.changed


def _decode(request: ApiRequest) -> JsonObject:
    prefix = "the object provided is unrecognized (must be of type Eviction): couldn't get "
    try:
        body: Any = request.json()
    except ApiError as error:
        shown = request.body.decode("utf-8", "replace") or "<empty>"
        raise errors.bad_request(
            f"{prefix}version/kind; json parse error: {error.message} ({shown})"
        ) from error
    if not isinstance(body, dict):
        raise errors.bad_request(f"{prefix}version/kind; json parse error")
    kind = body.get("kind") or "Eviction"
    api_version = body.get("apiVersion") or "policy/v1"
    if kind != "Eviction":
        raise errors.bad_request(
            f'{kind} in version "{api_version.rpartition("/")[2]}" cannot be handled as a '
            f"Eviction: converting ({api_version}.{kind}) to (policy.Eviction): unknown conversion"
        )
    if api_version not in ("policy/v1", "policy/v1beta1"):
        raise errors.bad_request(
            f'Eviction in version "{api_version}" cannot be handled as a Eviction: no kind '
            f'"Eviction" is registered for version "{api_version}" in scheme '
            '"pkg/api/legacyscheme/scheme.go:30"'
        )
    return body


def _can_ignore_budget(pod: JsonObject) -> bool:
    return is_terminating(pod) or is_finished(pod) or phase_of(pod) == "Pending"


def _may_go_unready(pod: JsonObject, budget: JsonObject) -> bool:
    """An unready pod costs no budget if enough others are healthy, or the policy says so."""
    if is_ready(pod):
        return False
    if (budget.get("spec") or {}).get("unhealthyPodEvictionPolicy") == "AlwaysAllow":
        return True
    status = budget["status"]
    return bool(status["currentHealthy"] >= status["desiredHealthy"] > 0)


def _why_not(budget: JsonObject) -> str:
    status = budget["status"]
    name = name_of(budget)
    condition = condition_of(budget, "DisruptionAllowed")
    if condition is not None and condition["reason"] == "SyncFailed":
        return (
            f"The disruption budget {name} does not allow evicting pods currently because it "
            f"failed sync: {condition['message']}"
        )
    if status["currentHealthy"] <= status["desiredHealthy"]:
        return (
            f"The disruption budget {name} needs {status['desiredHealthy']} healthy pods and has "
            f"{status['currentHealthy']} currently"
        )
    return f"The disruption budget {name} does not allow evicting pods currently"


def _too_many(message: str, retry_after_s: int) -> ApiError:
    return errors.too_many_requests(_VIOLATES, retry_after_s, [Cause("DisruptionBudget", message)])


def _is_marked(pod: JsonObject) -> bool:
    condition = condition_of(pod, "DisruptionTarget")
    return condition is not None and condition["status"] == "True"
