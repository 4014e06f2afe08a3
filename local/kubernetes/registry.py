"""Create, update and delete with the rules of the API server's generic registry.

Requests, controllers and scene builders all write through here, so that resource versions,
generations, managedFields, finalizers and graceful deletion are the same whoever writes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from local.kubernetes import errors, managed_fields, resources
from local.kubernetes.defaults import admit, apply_defaults, drop_zero_values
from local.kubernetes.managed_fields import Manager
from local.kubernetes.names import Names
from local.kubernetes.objects import (
    JsonObject,
    JsonValue,
    is_finished,
    is_terminating,
    metadata,
    name_of,
    namespace_of,
    node_name_of,
    seconds_of,
    timestamp,
    uid_of,
    with_condition,
    with_metadata,
    with_status,
)
from local.kubernetes.resources import Resource
from local.kubernetes.store import Store, resource_version_of
from local.kubernetes.validation import check_create, check_update

NAMESPACE_CAUSE: Final = "NamespaceTerminating"
Transform = Callable[[JsonObject], JsonObject]


@dataclass(frozen=True)
class DeleteOptions:
    """What a DELETE or an eviction may ask for."""

    grace_s: int | None = None
    uid: str | None = None
    resource_version: str | None = None
    dry_run: bool = False
    propagation: str = ""


@dataclass(frozen=True)
class Written:
    """The outcome of a write: the object, and whether anything changed."""

    obj: JsonObject
    changed: bool


@dataclass(frozen=True)
class Deleted:
    """The outcome of a deletion."""

    obj: JsonObject
    is_gone: bool
    changed: bool


class Registry:
    """The generic part of the API server, over the store."""

    def __init__(self, store: Store, clock: Callable[[], float], names: Names) -> None:
        self.store = store
        self.clock = clock
        self.names = names
        for resource in (
            resources.PODS,
            resources.PDBS,
            *resources.OWNER_RESOURCES.values(),
        ):
            store.add_index(resource, "namespace", lambda obj: (namespace_of(obj),))
        store.add_index(resources.PODS, "node", lambda pod: (node_name_of(pod),))
        for resource in (resources.PODS, resources.REPLICASETS):
            store.add_index(
                resource,
                "owner",
                lambda obj: [ref["uid"] for ref in metadata(obj).get("ownerReferences") or ()],
            )

    def now(self) -> str:
        """Return the time of the clock as the API writes times."""
        return timestamp(self.clock())

    def get(self, resource: Resource, namespace: str, name: str) -> JsonObject:
        """Return the object.

        Raises:
            ApiError: 404.
        """
        found = self.store.get(resource, namespace, name)
        if found is None:
            raise errors.not_found(resource, name)
        return found

    def create(
        self, resource: Resource, obj: JsonObject, *, manager: str, dry_run: bool = False
    ) -> JsonObject:
        """Store a new object; a `generateName` is completed.

        Raises:
            ApiError: 404 and 403 about its namespace, 409 if it exists, 422 if it is invalid.
        """
        with self.store.lock:
            meta = metadata(obj)
            name = str(meta.get("name") or "")
            if not name and meta.get("generateName"):
                name = f"{meta['generateName']}{self.names.suffix()}"
            namespace = str(meta.get("namespace") or "")
            if resource.namespaced:
                self.check_namespace(resource, namespace, name)
            new = apply_defaults(
                resource, drop_zero_values(resource, with_metadata(obj, name=name))
            )
            new = with_metadata(
                new,
                uid=self.names.uid(),
                creationTimestamp=self.now(),
                generation=1 if resource.has_generation else None,
                managedFields=None,
                resourceVersion=None,
                deletionTimestamp=None,
                deletionGracePeriodSeconds=None,
            )
            new = managed_fields.track_update(resource, None, new, Manager(manager), self.now())
            node = self.store.get(resources.NODES, "", node_name_of(new))
            new = admit(resource, new, self.names, node)
            check_create(resource, new)
            if self.store.get(resource, namespace, name) is not None:
                raise errors.already_exists(resource, name)
            return new if dry_run else self.store.put(resource, new)

    def check_namespace(self, resource: Resource, namespace: str, name: str) -> None:
        """Refuse to create in a namespace that is missing or terminating.

        Raises:
            ApiError: 404 about the namespace, or 403 with the cause NamespaceTerminating.
        """
        found = self.store.get(resources.NAMESPACES, "", namespace)
        if found is None:
            raise errors.not_found(resources.NAMESPACES, namespace)
        if is_terminating(found):
            raise errors.forbidden(
                resource.plural,
                resource.group,
                name,
                f"unable to create new content in namespace {namespace} because it is being "
                "terminated",
                [
                    errors.Cause(
                        NAMESPACE_CAUSE,
                        f"namespace {namespace} is being terminated",
                        "metadata.namespace",
                    )
                ],
            )

    def update(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        transform: Transform,
        *,
        manager: Manager | None,
        dry_run: bool = False,
    ) -> Written:
        """Replace an object by what `transform` makes of it.

        A write that changes nothing keeps the resource version. `manager` None means a write of
        the server itself, which leaves managedFields alone (an eviction's condition).

        Raises:
            ApiError: 404, 409 for a stale resource version, 422 if the result is invalid.
        """
        with self.store.lock:
            old = self.get(resource, namespace, name)
            proposed = transform(old)
            _check_resource_version(resource, old, proposed)
            subresource = manager.subresource if manager else "status"
            new = self._keep_system_fields(resource, old, proposed, subresource)
            if manager is not None and manager.operation == "Apply":
                new = with_metadata(new, managedFields=metadata(proposed).get("managedFields"))
            check_update(resource, old, new)
            new = drop_zero_values(resource, new)
            if manager is not None and manager.operation == "Update":
                new = managed_fields.track_update(resource, old, new, manager, self.now())
            if new == old:
                return Written(old, changed=False)
            if resource.has_generation and new.get("spec") != old.get("spec"):
                new = with_metadata(new, generation=int(metadata(old)["generation"]) + 1)
            if dry_run:
                return Written(new, changed=False)
            stored = self.store.put(resource, new)
            if _was_held_by_finalizers_only(new):
                self.store.remove(resource, namespace, name)
            return Written(stored, changed=True)

    @staticmethod
    def _keep_system_fields(
        resource: Resource, old: JsonObject, new: JsonObject, subresource: str
    ) -> JsonObject:
        """Undo what the part of the object being written may not change."""
        before = metadata(old)
        kept = {
            key: before.get(key)
            for key in (
                "name",
                "namespace",
                "creationTimestamp",
                "generation",
                "deletionTimestamp",
                "deletionGracePeriodSeconds",
                "managedFields",
                "resourceVersion",
                "generateName",
            )
        }
        kept["uid"] = metadata(new).get("uid") or before.get("uid")
        result = with_metadata(new, **kept)
        if "status" in resource.subresources:
            frozen = "spec" if subresource == "status" else "status"
            result = {key: value for key, value in result.items() if key != frozen}
            if frozen in old:
                result[frozen] = old[frozen]
        return {**result, "kind": resource.kind, "apiVersion": resource.api_version}

    def delete(
        self, resource: Resource, namespace: str, name: str, options: DeleteOptions
    ) -> Deleted:
        """Delete at once, or begin a deletion that a grace period or a finalizer holds up.

        Raises:
            ApiError: 404, or 409 if a precondition does not hold.
        """
        with self.store.lock:
            obj = self.get(resource, namespace, name)
            check_preconditions(resource, obj, options)
            if resource == resources.NAMESPACES:
                return self._delete_namespace(obj, options)
            grace_s = self._grace_s(resource, obj, options)
            obj = _with_propagation(obj, options.propagation)
            marked = self._mark_deleted(resource, obj, grace_s)
            stays = bool(metadata(marked).get("finalizers")) or (
                metadata(marked).get("deletionGracePeriodSeconds", 0) > 0
            )
            if options.dry_run:
                return Deleted(marked, is_gone=not stays, changed=False)
            if stays:
                changed = marked != self.store.get(resource, namespace, name)
                stored = self.store.put(resource, marked) if changed else marked
                return Deleted(stored, is_gone=False, changed=changed)
            self.store.remove(resource, namespace, name)
            return Deleted(marked, is_gone=True, changed=True)

    @staticmethod
    def _grace_s(resource: Resource, obj: JsonObject, options: DeleteOptions) -> int:
        if not resource.is_deletion_graceful:
            return 0
        if not node_name_of(obj) or is_finished(obj):
            return 0
        grace_s = options.grace_s
        if grace_s is None:
            grace_s = int((obj.get("spec") or {}).get("terminationGracePeriodSeconds", 30))
        # A negative period is an old way to say "the smallest one".
        return 1 if grace_s < 0 else grace_s

    def _mark_deleted(self, resource: Resource, obj: JsonObject, grace_s: int) -> JsonObject:
        meta = metadata(obj)
        generation = meta.get("generation")
        if is_terminating(obj):
            known_s = int(meta.get("deletionGracePeriodSeconds", 0))
            if grace_s >= known_s:
                return obj
            asked_at = seconds_of(meta["deletionTimestamp"]) - known_s
            return with_metadata(
                obj,
                deletionTimestamp=timestamp(asked_at + grace_s),
                deletionGracePeriodSeconds=grace_s,
            )
        return with_metadata(
            obj,
            deletionTimestamp=timestamp(self.clock() + grace_s),
            deletionGracePeriodSeconds=grace_s,
            generation=generation + 1 if resource.has_generation and generation else generation,
        )

    def _delete_namespace(self, obj: JsonObject, options: DeleteOptions) -> Deleted:
        if is_terminating(obj):
            return Deleted(obj, is_gone=False, changed=False)
        marked = with_metadata(obj, deletionTimestamp=self.now())
        marked = with_status(marked, phase="Terminating")
        if options.dry_run:
            return Deleted(marked, is_gone=False, changed=False)
        return Deleted(self.store.put(resources.NAMESPACES, marked), is_gone=False, changed=True)

    def finish_namespace(self, name: str) -> None:
        """Remove a terminating namespace whose content is gone."""
        self.store.remove(resources.NAMESPACES, "", name)

    def mark_disrupted(
        self, pod: JsonObject, reason: str, message: str, **extra: JsonValue
    ) -> JsonObject:
        """Store the condition DisruptionTarget; nobody owns it in managedFields."""
        condition = {
            "type": "DisruptionTarget",
            **extra,
            "status": "True",
            "lastProbeTime": None,
            "lastTransitionTime": self.now(),
            "reason": reason,
            "message": message,
        }
        return self.store.put(resources.PODS, with_condition(pod, condition))

    def set_status(
        self, resource: Resource, obj: JsonObject, transform: Transform, *, manager: str
    ) -> JsonObject:
        """Write an object's status as a controller or kubelet does."""
        return self.update(
            resource,
            namespace_of(obj),
            name_of(obj),
            lambda old: with_metadata(transform(old), resourceVersion=None),
            manager=Manager(manager, subresource="status"),
        ).obj

    def set_spec(
        self, resource: Resource, obj: JsonObject, transform: Transform, *, manager: str
    ) -> JsonObject:
        """Write an object's metadata and spec as a controller does."""
        return self.update(
            resource,
            namespace_of(obj),
            name_of(obj),
            lambda old: with_metadata(transform(old), resourceVersion=None),
            manager=Manager(manager),
        ).obj


def _check_resource_version(resource: Resource, old: JsonObject, new: JsonObject) -> None:
    wanted = resource_version_of(new)
    if not wanted:
        return
    if not wanted.isdigit():
        raise errors.internal(f'strconv.ParseUint: parsing "{wanted}": invalid syntax')
    if wanted != resource_version_of(old):
        raise errors.stale(resource, name_of(old))


_FINALIZER_OF: Final = {"Orphan": "orphan", "Foreground": "foregroundDeletion"}


def _with_propagation(obj: JsonObject, propagation: str) -> JsonObject:
    """Add the finalizer by which the garbage collector is asked to come first."""
    finalizer = _FINALIZER_OF.get(propagation)
    present = metadata(obj).get("finalizers") or []
    if finalizer is None or finalizer in present:
        return obj
    return with_metadata(obj, finalizers=[*present, finalizer])


def _was_held_by_finalizers_only(obj: JsonObject) -> bool:
    """Tell whether a deletion has nothing left to wait for."""
    meta = metadata(obj)
    return meta.get("deletionGracePeriodSeconds") == 0 and not meta.get("finalizers")


def check_preconditions(resource: Resource, obj: JsonObject, options: DeleteOptions) -> None:
    """Compare uid and resource version with what the caller demands.

    Raises:
        ApiError: 409.
    """
    if options.uid is not None and options.uid != uid_of(obj):
        raise errors.precondition_failed(resource, name_of(obj), "UID", options.uid, uid_of(obj))
    version = resource_version_of(obj)
    if options.resource_version is not None and options.resource_version != version:
        raise errors.precondition_failed(
            resource, name_of(obj), "ResourceVersion", options.resource_version, version
        )
