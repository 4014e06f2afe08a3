"""JSON patch, JSON merge patch and strategic merge patch, as the API server applies them.

JSON patch is not RFC 6902 to the letter: a `test` for null holds on a path that does not exist,
and an `add` below a missing parent fails the whole patch.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from local.kubernetes.errors import bad_request, patch_not_applicable
from local.kubernetes.objects import JsonObject, JsonValue, deep_copy

MERGE_KEYS: Final[Mapping[str, str]] = {
    "status.conditions": "type",
    "status.addresses": "type",
    "status.podIPs": "ip",
    "metadata.ownerReferences": "uid",
    "spec.containers": "name",
    "spec.initContainers": "name",
    "spec.volumes": "name",
}
"""Lists that strategic merge patch merges by key; every other list of objects is atomic,
`spec.taints` and `spec.tolerations` among them."""

_PRIMITIVE_SETS: Final = frozenset({"metadata.finalizers", "spec.podCIDRs"})
_MISSING: Final = object()


def apply_json_patch(document: JsonObject, operations: JsonValue) -> JsonObject:
    """Apply the operations to a copy of `document`.

    Raises:
        ApiError: 400 for a body that is no list, 422 for an operation that does not apply.
    """
    if not isinstance(operations, list):
        raise bad_request(
            "error decoding patch: json: cannot unmarshal object into Go value of type "
            "[]handlers.jsonPatchOp"
        )
    result: Any = deep_copy(document)
    for operation in operations:
        result = _apply_operation(result, operation)
    if not isinstance(result, dict):
        raise patch_not_applicable()
    return result


def _apply_operation(document: JsonValue, operation: JsonObject) -> JsonValue:
    name = operation.get("op")
    path = _pointer(operation.get("path"))
    if name == "test":
        found = _get(document, path)
        if (None if found is _MISSING else found) != operation.get("value"):
            raise patch_not_applicable()
        return document
    if name == "remove":
        return _remove(document, path)
    if name == "replace":
        if _get(document, path) is _MISSING:
            raise patch_not_applicable()
        if path and isinstance(_get(document, path[:-1]), list):
            document = _remove(document, path)
        return _add(document, path, deep_copy(operation.get("value")))
    if name == "add":
        return _add(document, path, deep_copy(operation.get("value")))
    if name in ("move", "copy"):
        return _transfer(document, operation, path)
    raise patch_not_applicable()


def _transfer(document: JsonValue, operation: JsonObject, path: Sequence[str]) -> JsonValue:
    source = _pointer(operation.get("from"))
    value = _get(document, source)
    if value is _MISSING:
        raise patch_not_applicable()
    if operation["op"] == "move":
        document = _remove(document, source)
    return _add(document, path, deep_copy(value))


def _pointer(path: JsonValue) -> list[str]:
    if not isinstance(path, str) or (path and not path.startswith("/")):
        raise patch_not_applicable()
    return [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:]]


def _index(parent: Sequence[Any], key: str, limit: int) -> int:
    if not key.isdigit() or int(key) > limit:
        raise patch_not_applicable()
    return int(key)


def _get(document: JsonValue, path: Sequence[str]) -> JsonValue:
    value = document
    for key in path:
        if isinstance(value, dict):
            value = value.get(key, _MISSING)
        elif isinstance(value, list) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        else:
            return _MISSING
        if value is _MISSING:
            return _MISSING
    return value


def _add(document: JsonValue, path: Sequence[str], value: JsonValue) -> JsonValue:
    if not path:
        return value
    parent = _get(document, path[:-1])
    key = path[-1]
    if isinstance(parent, dict):
        parent[key] = value
    elif isinstance(parent, list):
        parent.insert(len(parent) if key == "-" else _index(parent, key, len(parent)), value)
    else:
        raise patch_not_applicable()
    return document


def _remove(document: JsonValue, path: Sequence[str]) -> JsonValue:
    if not path:
        raise patch_not_applicable()
    parent = _get(document, path[:-1])
    key = path[-1]
    if isinstance(parent, dict) and key in parent:
        del parent[key]
    elif isinstance(parent, list) and parent:
        del parent[_index(parent, key, len(parent) - 1)]
    else:
        raise patch_not_applicable()
    return document


def apply_merge_patch(document: JsonValue, patch: JsonValue) -> JsonValue:
    """Apply an RFC 7386 merge patch: null removes, lists are replaced."""
    if not isinstance(patch, dict):
        return deep_copy(patch)
    result = dict(document) if isinstance(document, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = apply_merge_patch(result.get(key), value)
    return result


def apply_strategic_patch(document: JsonValue, patch: JsonValue, path: str = "") -> JsonValue:
    """Apply a strategic merge patch: as a merge patch, but keyed lists are merged by their key.

    Directives understood: `$patch: delete|replace`, `$deleteFromPrimitiveList/…`; the order
    directives that kubectl adds are accepted and ignored.
    """
    if not isinstance(patch, dict):
        return deep_copy(patch)
    if patch.get("$patch") == "replace":
        return {key: deep_copy(value) for key, value in patch.items() if key != "$patch"}
    result = dict(document) if isinstance(document, dict) else {}
    for key, value in patch.items():
        if key.startswith("$"):
            _apply_directive(result, key, value)
            continue
        below = f"{path}.{key}" if path else key
        if value is None or (isinstance(value, dict) and value.get("$patch") == "delete"):
            result.pop(key, None)
        elif isinstance(value, dict):
            result[key] = apply_strategic_patch(result.get(key), value, below)
        elif isinstance(value, list):
            result[key] = _merge_list(result.get(key), value, below)
        else:
            result[key] = value
    return result


def _apply_directive(result: JsonObject, key: str, value: JsonValue) -> None:
    prefix = "$deleteFromPrimitiveList/"
    if key.startswith(prefix):
        name = key.removeprefix(prefix)
        result[name] = [item for item in result.get(name) or () if item not in value]


def _merge_list(current: JsonValue, patch: list[Any], path: str) -> list[Any]:
    if path in _PRIMITIVE_SETS:
        merged = list(current or ())
        return merged + [item for item in patch if item not in merged]
    merge_key = MERGE_KEYS.get(path)
    if merge_key is None:
        return list(deep_copy(patch))
    items = [item for item in patch if isinstance(item, dict)]
    replaces = any(item.get("$patch") == "replace" for item in items)
    merged = [] if replaces else [dict(item) for item in current or ()]
    for item in items:
        if item.get("$patch") == "replace":
            continue
        at = [i for i, known in enumerate(merged) if known.get(merge_key) == item.get(merge_key)]
        if item.get("$patch") == "delete":
            merged = [known for i, known in enumerate(merged) if i not in at]
        elif at:
            merged[at[0]] = apply_strategic_patch(merged[at[0]], item, path)
        else:
            merged.append(apply_strategic_patch({}, item, path))
    return merged
