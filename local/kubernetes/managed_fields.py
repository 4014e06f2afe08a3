"""`metadata.managedFields`: who wrote which field last.

A field set is a set of paths, a path a tuple of FieldsV1 elements (`f:spec`, `k:{"type":"Ready"}`,
`v:"x"`). That keeps the rules of the real merge library readable: a writer gains the fields that
its write added or changed, everybody else loses them, and removed fields are lost by all. So a
field that somebody removes is owned by nobody, and a write that changes nothing leaves no trace.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from local.kubernetes.objects import JsonObject, JsonValue, metadata, with_metadata
from local.kubernetes.resources import Resource

Path = tuple[str, ...]

_ATOMIC: Final = frozenset(
    {
        "spec.taints",
        "spec.tolerations",
        "spec.nodeSelector",
        "spec.selector",
        "status.containerStatuses",
        "status.initContainerStatuses",
        "status.hostIPs",
        "status.images",
        "involvedObject",
        "regarding",
        "containers.args",
        "containers.command",
    }
)
_LIST_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "status.conditions": ("type",),
    "status.addresses": ("type",),
    "status.podIPs": ("ip",),
    "metadata.ownerReferences": ("uid",),
    "spec.containers": ("name",),
    "spec.initContainers": ("name",),
    "spec.volumes": ("name",),
    "containers.volumeMounts": ("mountPath",),
    "containers.env": ("name",),
    "containers.ports": ("containerPort", "protocol"),
}
_SETS: Final = frozenset({"metadata.finalizers"})
_UNMANAGED_METADATA: Final = frozenset(
    {
        "name",
        "namespace",
        "uid",
        "resourceVersion",
        "generation",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "managedFields",
        "selfLink",
    }
)


@dataclass(frozen=True)
class Manager:
    """Who writes: one entry of managedFields is made per manager, operation and subresource."""

    name: str
    operation: str = "Update"
    subresource: str = ""


@dataclass(frozen=True)
class Comparison:
    """The paths in which two states of an object differ."""

    added: frozenset[Path]
    modified: frozenset[Path]
    removed: frozenset[Path]


class _Walker:
    def __init__(self, is_custom: bool) -> None:
        self._is_custom = is_custom
        self.added: set[Path] = set()
        self.modified: set[Path] = set()
        self.removed: set[Path] = set()

    def compare(self, path: Path, place: str, old: JsonValue, new: JsonValue) -> None:
        if old == new:
            return
        if isinstance(old, dict) or isinstance(new, dict):
            if (old is None or isinstance(old, dict)) and (new is None or isinstance(new, dict)):
                self._compare_objects(path, place, old or {}, new or {})
                return
        elif isinstance(old, list) or isinstance(new, list):
            elements_old = self._elements(place, old or [])
            elements_new = self._elements(place, new or [])
            if elements_old is not None and elements_new is not None:
                self._compare_members(path, place, elements_old, elements_new)
                return
        self.modified.add(path)

    def _compare_objects(self, path: Path, place: str, old: JsonObject, new: JsonObject) -> None:
        if place in _ATOMIC and not self._is_custom:
            self.modified.add(path)
            return
        self._compare_members(
            path,
            place,
            {f"f:{key}": value for key, value in old.items()},
            {f"f:{key}": value for key, value in new.items()},
        )

    def _compare_members(
        self, path: Path, place: str, old: Mapping[str, Any], new: Mapping[str, Any]
    ) -> None:
        for element in [*old, *(key for key in new if key not in old)]:
            below = (*path, element)
            deeper = _below(place, element)
            if element not in new:
                self.collect(below, deeper, old[element], self.removed)
            elif element not in old:
                self.collect(below, deeper, new[element], self.added)
            else:
                self.compare(below, deeper, old[element], new[element])

    def collect(self, path: Path, place: str, value: JsonValue, into: set[Path]) -> None:
        into.add(path)
        members: Mapping[str, Any] | None = None
        if isinstance(value, dict):
            if (self._is_custom or place not in _ATOMIC) and not place.endswith("[uid]"):
                members = {f"f:{key}": item for key, item in value.items()}
        elif isinstance(value, list):
            members = self._elements(place, value)
        for element, item in (members or {}).items():
            self.collect((*path, element), _below(place, element), item, into)

    def _elements(self, place: str, items: list[Any]) -> dict[str, Any] | None:
        if place in _SETS:
            return {f"v:{json.dumps(item)}": None for item in items}
        keys = (
            None
            if self._is_custom and place != "metadata.ownerReferences"
            else (_LIST_KEYS.get(place))
        )
        if keys is None:
            return None
        elements = {}
        for item in items:
            key = {name: item.get(name) for name in keys if item.get(name) is not None}
            text = json.dumps(key, separators=(",", ":"), sort_keys=True)
            elements[f"k:{text}"] = item
        return elements


def _below(place: str, element: str) -> str:
    """Return the place in the schema: containers share one, wherever they stand."""
    if element.startswith("k:"):
        return "containers" if place.endswith("ontainers") else f"{place}[{_key_name(element)}]"
    name = element[2:]
    return f"{place}.{name}" if place else name


def _key_name(element: str) -> str:
    return element[4 : element.index('"', 4)]


def compare(resource: Resource, old: JsonObject, new: JsonObject) -> Comparison:
    """Compare two states of an object, field by field, as the type's schema divides them."""
    walker = _Walker(resource.is_custom)
    walker.compare((), "", _managed_part(old), _managed_part(new))
    return Comparison(
        frozenset(walker.added), frozenset(walker.modified), frozenset(walker.removed)
    )


def fields_of(resource: Resource, obj: JsonObject) -> frozenset[Path]:
    """Return the paths that a configuration names: what an apply owns."""
    walker = _Walker(resource.is_custom)
    found: set[Path] = set()
    for key, value in _managed_part(obj).items():
        walker.collect((f"f:{key}",), key, value, found)
    structs = {("f:metadata",), ("f:spec",), ("f:status",)}
    return frozenset(found - structs)


def _managed_part(obj: JsonObject) -> JsonObject:
    part = {key: value for key, value in obj.items() if key not in ("apiVersion", "kind")}
    part["metadata"] = {
        key: value for key, value in metadata(obj).items() if key not in _UNMANAGED_METADATA
    }
    return part


def track_update(
    resource: Resource, old: JsonObject | None, new: JsonObject, manager: Manager, now: str
) -> JsonObject:
    """Return `new` with the managedFields that follow from the write of `manager`."""
    before = old if old is not None else resource.zero
    difference = compare(resource, before, new)
    entries = _read(old)
    gained = difference.added | difference.modified
    if gained or difference.removed:
        lost = gained | difference.removed
        for key in list(entries):
            fields, time = entries[key]
            entries[key] = (fields - lost, time)
        if gained:
            fields, _ = entries.get(manager, (frozenset(), now))
            entries[manager] = (fields | gained, now)
    return with_metadata(new, managedFields=_write(resource, entries) or None)


def track_apply(
    resource: Resource,
    old: JsonObject,
    new: JsonObject,
    applied: frozenset[Path],
    manager: Manager,
    now: str,
) -> JsonObject:
    """Return `new` with `manager` owning what it applied; other owners of it keep theirs."""
    difference = compare(resource, old, new)
    lost = difference.modified | difference.removed
    entries = {key: (fields - lost, time) for key, (fields, time) in _read(old).items()}
    entries[manager] = (applied, now)
    return with_metadata(new, managedFields=_write(resource, entries) or None)


def owners_in_conflict(
    resource: Resource, old: JsonObject, new: JsonObject, applied: frozenset[Path], manager: Manager
) -> list[tuple[str, Path]]:
    """Return who else owns an applied field that would change, with the field."""
    difference = compare(resource, old, new)
    contested = (difference.modified | difference.removed) & applied
    return [
        (key.name, path)
        for key, (fields, _) in _read(old).items()
        if key != manager
        for path in sorted(fields & contested)
    ]


def without_abandoned(
    old: JsonObject, new: JsonObject, applied: frozenset[Path], manager: Manager
) -> JsonObject:
    """Return `new` without the fields that `manager` applied before, and nobody wants any more."""
    entries = _read(old)
    mine = entries.get(manager, (frozenset(), ""))[0]
    others = frozenset[Path]().union(*(f for key, (f, _) in entries.items() if key != manager))
    for path in sorted(mine - applied - others, key=len, reverse=True):
        new = _without(new, path)
    return new


def _without(value: JsonObject, path: Path) -> JsonObject:
    """Take one field out; elements of lists are left alone."""
    name = path[0].removeprefix("f:")
    if not path[0].startswith("f:") or name not in value:
        return value
    if len(path) == 1:
        return {key: item for key, item in value.items() if key != name}
    below = value[name]
    return {**value, name: _without(below, path[1:])} if isinstance(below, dict) else value


def _read(obj: JsonObject | None) -> dict[Manager, tuple[frozenset[Path], str]]:
    entries = {}
    for entry in metadata(obj or {}).get("managedFields") or ():
        paths: set[Path] = set()
        _parse((), entry.get("fieldsV1") or {}, paths)
        key = Manager(entry["manager"], entry["operation"], entry.get("subresource", ""))
        entries[key] = (frozenset(paths), entry["time"])
    return entries


def _parse(path: Path, tree: Mapping[str, Any], into: set[Path]) -> None:
    for element, below in tree.items():
        if element == ".":
            into.add(path)
        elif below:
            _parse((*path, element), below, into)
        else:
            into.add((*path, element))


def _write(
    resource: Resource, entries: Mapping[Manager, tuple[frozenset[Path], str]]
) -> list[JsonObject]:
    ordered = sorted(
        ((key, fields, time) for key, (fields, time) in entries.items() if fields),
        key=lambda entry: (entry[0].operation, entry[2], entry[0].name, entry[0].subresource),
    )
    written = []
    for key, fields, time in ordered:
        entry: JsonObject = {
            "manager": key.name,
            "operation": key.operation,
            "apiVersion": resource.api_version,
            "time": time,
            "fieldsType": "FieldsV1",
            "fieldsV1": _tree(fields),
        }
        if key.subresource:
            entry["subresource"] = key.subresource
        written.append(entry)
    return written


def _tree(paths: Iterable[Path]) -> JsonObject:
    tree: JsonObject = {}
    members = sorted(paths)
    for path in members:
        node = tree
        for element in path:
            node = node.setdefault(element, {})
        node["."] = {}
    return _without_lone_dots(tree)


def _without_lone_dots(tree: JsonObject) -> JsonObject:
    return {
        element: {} if list(below) == ["."] else _without_lone_dots(below)
        for element, below in tree.items()
    }
