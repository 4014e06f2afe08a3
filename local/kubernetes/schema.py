"""Which fields and types the server knows, where its answers depend on it.

Only the types that clients of a repair tool patch by hand are described; objects of all others
are taken as they are.
"""

from collections.abc import Mapping
from typing import Final

from local.kubernetes import errors
from local.kubernetes.objects import JsonObject, JsonValue
from local.kubernetes.resources import Resource

_METADATA: Final = frozenset(
    {
        "name",
        "generateName",
        "namespace",
        "selfLink",
        "uid",
        "resourceVersion",
        "generation",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "labels",
        "annotations",
        "ownerReferences",
        "finalizers",
        "managedFields",
    }
)
_KNOWN: Final[Mapping[str, Mapping[str, frozenset[str]]]] = {
    "Node": {
        "": frozenset({"kind", "apiVersion", "metadata", "spec", "status"}),
        "metadata": _METADATA,
        "spec": frozenset(
            {
                "podCIDR",
                "podCIDRs",
                "providerID",
                "unschedulable",
                "taints",
                "configSource",
                "externalID",
            }
        ),
        "spec.taints[]": frozenset({"key", "value", "effect", "timeAdded"}),
    },
    "Eviction": {
        "": frozenset({"kind", "apiVersion", "metadata", "deleteOptions"}),
        "metadata": _METADATA,
        "deleteOptions": frozenset(
            {
                "kind",
                "apiVersion",
                "gracePeriodSeconds",
                "preconditions",
                "orphanDependents",
                "propagationPolicy",
                "dryRun",
                "ignoreStoreReadErrorWithClusterBreakingPotential",
            }
        ),
    },
}
_TYPES: Final[Mapping[str, type]] = {"spec.unschedulable": bool, "spec.providerID": str}
_GO_TYPES: Final[Mapping[type, str]] = {bool: "bool", str: "string"}


def prune_unknown(kind: str, obj: JsonObject) -> tuple[JsonObject, list[str]]:
    """Return `obj` without the fields that its type has not, and their paths."""
    known = _KNOWN.get(kind)
    if known is None:
        return obj, []
    unknown: list[str] = []
    return _prune(obj, "", "", known, unknown), unknown


def _prune(
    obj: JsonObject,
    place: str,
    shown: str,
    known: Mapping[str, frozenset[str]],
    unknown: list[str],
) -> JsonObject:
    kept: JsonObject = {}
    allowed = known.get(place)
    for key, value in obj.items():
        path = f"{shown}.{key}" if shown else key
        below = f"{place}.{key}" if place else key
        if allowed is not None and key not in allowed:
            unknown.append(path)
        elif isinstance(value, dict) and below in known:
            kept[key] = _prune(value, below, path, known, unknown)
        elif isinstance(value, list) and f"{below}[]" in known:
            kept[key] = [
                _prune(item, f"{below}[]", f"{path}[{index}]", known, unknown)
                if isinstance(item, dict)
                else item
                for index, item in enumerate(value)
            ]
        else:
            kept[key] = value
    return kept


def check_types(resource: Resource, patch: JsonObject) -> None:
    """Refuse a patch with a value of the wrong type, in the words of the strategic patch decoder.

    Raises:
        ApiError: 422.
    """
    if resource.is_custom:
        return
    for path, expected in _TYPES.items():
        section, _, key = path.partition(".")
        value = (patch.get(section) or {}).get(key)
        if value is not None and not isinstance(value, expected):
            raise errors.invalid_patch(
                go_format(patch), f"unrecognized type: {_GO_TYPES[expected]}"
            )
    for key in ("labels", "annotations"):
        for value in ((patch.get("metadata") or {}).get(key) or {}).values():
            if value is not None and not isinstance(value, str):
                raise errors.invalid_patch(go_format(patch), "unrecognized type: string")


def go_format(value: JsonValue) -> str:
    """Print a value as Go's `%v` prints maps and slices."""
    if isinstance(value, dict):
        return "map[" + " ".join(f"{k}:{go_format(v)}" for k, v in sorted(value.items())) + "]"
    if isinstance(value, list):
        return "[" + " ".join(go_format(item) for item in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return "<nil>" if value is None else str(value)
