"""The garbage collector: what becomes of pods and ReplicaSets whose owner is deleted."""

from typing import Final

from local.kubernetes import resources
from local.kubernetes.controllers.base import CONTROLLER_MANAGER, Controller
from local.kubernetes.managed_fields import Manager
from local.kubernetes.objects import (
    JsonObject,
    is_terminating,
    metadata,
    name_of,
    namespace_of,
    uid_of,
    with_metadata,
)
from local.kubernetes.registry import DeleteOptions, Registry
from local.kubernetes.resources import Resource
from local.kubernetes.store import Change
from local.kubernetes.timings import Timings

_DEPENDENTS: Final = (resources.REPLICASETS, resources.PODS)
ORPHAN: Final = "orphan"
FOREGROUND: Final = "foregroundDeletion"
JOB_TRACKING: Final = "batch.kubernetes.io/job-tracking"


class GarbageCollector(Controller):
    """Background, foreground and orphaning deletion.

    A key is `gone|UID` for an owner that is no more, and `held|…` for one that waits for its
    dependents with a finalizer.
    """

    name = "garbage-collector"

    def __init__(self, registry: Registry, timings: Timings) -> None:
        super().__init__(registry, timings)
        self._held: dict[str, tuple[Resource, str, str]] = {}

    def notice(self, change: Change) -> None:
        """Owners that go or wait; dependents whose going an owner may wait for."""
        obj = change.latest
        key = f"held|{change.resource.qualified}|{change.key}"
        if change.new is None:
            self._held.pop(key, None)
            self.mark(f"gone|{uid_of(obj)}")
        elif is_terminating(obj) and {ORPHAN, FOREGROUND} & set(_finalizers(obj)):
            self._held[key] = (change.resource, namespace_of(obj), name_of(obj))
            self.mark(key)
        if self._held and change.resource in _DEPENDENTS:
            for held in self._held:
                self.mark(held)

    def reconcile(self, key: str) -> None:
        """Treat the dependents of one owner."""
        kind, _, rest = key.partition("|")
        if kind == "gone":
            self._end(rest)
            return
        held = self._held.get(key)
        owner = None if held is None else self.store.get(*held)
        if held is None or owner is None:
            return
        if ORPHAN in _finalizers(owner):
            self._orphan(uid_of(owner))
            self._release(held[0], owner, ORPHAN)
        else:
            self._end(uid_of(owner))
            if not self._dependents(uid_of(owner)):
                self._release(held[0], owner, FOREGROUND)

    def _dependents(self, owner_uid: str) -> list[tuple[Resource, JsonObject]]:
        return [
            (resource, obj)
            for resource in _DEPENDENTS
            for obj in self.store.find(resource, "owner", owner_uid)
        ]

    def _end(self, owner_uid: str) -> None:
        for resource, obj in self._dependents(owner_uid):
            if not is_terminating(obj):
                self.registry.delete(
                    resource, namespace_of(obj), name_of(obj), DeleteOptions(uid=uid_of(obj))
                )
        for resource, obj in self._dependents(owner_uid):
            # With its Job gone nobody else would ever take this finalizer away.
            self._release(resource, obj, JOB_TRACKING)

    def _orphan(self, owner_uid: str) -> None:
        for resource, obj in self._dependents(owner_uid):
            references = metadata(obj)["ownerReferences"]
            kept = [reference for reference in references if reference["uid"] != owner_uid]
            self._write(resource, with_metadata(obj, ownerReferences=kept or None))

    def _release(self, resource: Resource, obj: JsonObject, finalizer: str) -> None:
        if finalizer in _finalizers(obj):
            kept = [item for item in _finalizers(obj) if item != finalizer]
            self._write(resource, with_metadata(obj, finalizers=kept or None))

    def _write(self, resource: Resource, changed: JsonObject) -> None:
        self.registry.update(
            resource,
            namespace_of(changed),
            name_of(changed),
            lambda _old: changed,
            manager=Manager(CONTROLLER_MANAGER),
        )


def _finalizers(obj: JsonObject) -> list[str]:
    return list(metadata(obj).get("finalizers") or ())
