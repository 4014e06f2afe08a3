"""The objects of the cluster, in memory, with resource versions as etcd gives them.

One lock guards everything; it is re-entrant, so that a request or a controller can hold it over
several steps and see no other writer in between. Stored objects are never changed in place.
"""

import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from local.kubernetes.objects import (
    JsonObject,
    metadata,
    name_of,
    namespace_of,
    with_metadata,
)
from local.kubernetes.resources import Resource


@dataclass(frozen=True, slots=True)
class Change:
    """One write, as told to the listeners: a creation has no `old`, a removal no `new`."""

    resource: Resource
    key: str
    old: JsonObject | None
    new: JsonObject | None

    @property
    def latest(self) -> JsonObject:
        """The newest state that there is."""
        found = self.new if self.new is not None else self.old
        assert found is not None  # noqa: S101 - one of them is always there
        return found


Listener = Callable[[Change], None]
IndexKeys = Callable[[JsonObject], Iterable[str]]


def key_of(namespace: str, name: str) -> str:
    """Return the key whose order is that of a list: as etcd sorts, not by (namespace, name)."""
    return f"{namespace}/{name}" if namespace else name


class _Collection:
    """All objects of one resource."""

    def __init__(self) -> None:
        self.objects: dict[str, JsonObject] = {}
        self.texts: dict[str, bytes] = {}
        self._sorted: list[str] | None = []
        self.indexes: dict[str, tuple[IndexKeys, dict[str, set[str]]]] = {}

    def in_order(self) -> list[JsonObject]:
        if self._sorted is None:
            self._sorted = sorted(self.objects)
        return [self.objects[key] for key in self._sorted]

    def set(self, key: str, obj: JsonObject | None) -> None:
        old = self.objects.get(key)
        for keys_of, entries in self.indexes.values():
            if old is not None:
                for value in keys_of(old):
                    entries.get(value, set()).discard(key)
            if obj is not None:
                for value in keys_of(obj):
                    entries.setdefault(value, set()).add(key)
        self.texts.pop(key, None)
        if obj is None:
            self.objects.pop(key, None)
            self._sorted = None
        else:
            if old is None:
                self._sorted = None
            self.objects[key] = obj


class Store:
    """Keeps objects by resource and key; every write takes the next resource version."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._collections: dict[Resource, _Collection] = {}
        self._listeners: list[Listener] = []
        self._revision = 1

    @property
    def revision(self) -> int:
        """The resource version of the last write."""
        return self._revision

    def subscribe(self, listener: Listener) -> None:
        """Call `listener` after each write, with the lock held: it must be quick."""
        self._listeners.append(listener)

    def add_index(self, resource: Resource, name: str, keys_of: IndexKeys) -> None:
        """Find objects of `resource` by the values that `keys_of` gives, without a scan."""
        with self.lock:
            collection = self._collection(resource)
            entries: dict[str, set[str]] = {}
            for key, obj in collection.objects.items():
                for value in keys_of(obj):
                    entries.setdefault(value, set()).add(key)
            collection.indexes[name] = (keys_of, entries)

    def get(self, resource: Resource, namespace: str, name: str) -> JsonObject | None:
        """Return the object, or None."""
        with self.lock:
            return self._collection(resource).objects.get(key_of(namespace, name))

    def all(self, resource: Resource) -> list[JsonObject]:
        """Return all objects of a resource in key order."""
        with self.lock:
            collection = self._collection(resource)
            return collection.in_order()

    def find(self, resource: Resource, index: str, value: str) -> list[JsonObject]:
        """Return the objects under an index value, in key order."""
        with self.lock:
            collection = self._collection(resource)
            keys = collection.indexes[index][1].get(value, ())
            return [collection.objects[key] for key in sorted(keys)]

    def put(self, resource: Resource, obj: JsonObject) -> JsonObject:
        """Store `obj` with the next resource version, and return it as stored."""
        with self.lock:
            self._revision += 1
            stored = with_metadata(obj, resourceVersion=str(self._revision))
            key = key_of(namespace_of(stored), name_of(stored))
            collection = self._collection(resource)
            old = collection.objects.get(key)
            collection.set(key, stored)
            self._tell(Change(resource, key, old, stored))
            return stored

    def remove(self, resource: Resource, namespace: str, name: str) -> None:
        """Take the object away; a removal takes a resource version too."""
        with self.lock:
            key = key_of(namespace, name)
            collection = self._collection(resource)
            old = collection.objects.get(key)
            if old is None:
                return
            self._revision += 1
            collection.set(key, None)
            self._tell(Change(resource, key, old, None))

    def text(self, resource: Resource, obj: JsonObject) -> bytes:
        """Return the JSON text of `obj` without apiVersion and kind; cached while it is current."""
        key = key_of(namespace_of(obj), name_of(obj))
        with self.lock:
            collection = self._collection(resource)
            if collection.objects.get(key) is not obj:
                return _dump(obj)
            text = collection.texts.get(key)
            if text is None:
                text = collection.texts[key] = _dump(obj)
            return text

    def _collection(self, resource: Resource) -> _Collection:
        found = self._collections.get(resource)
        if found is None:
            found = self._collections[resource] = _Collection()
        return found

    def _tell(self, change: Change) -> None:
        for listener in self._listeners:
            listener(change)


def _dump(obj: JsonObject) -> bytes:
    bare = {key: value for key, value in obj.items() if key not in ("apiVersion", "kind")}
    return json.dumps(bare, separators=(",", ":")).encode()


def resource_version_of(obj: JsonObject) -> str:
    """Return `metadata.resourceVersion`."""
    return str(metadata(obj).get("resourceVersion", ""))
