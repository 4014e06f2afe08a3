"""What the server refuses with 422, for the types that clients of a repair tool write.

Some causes stand twice or four times in the real answers: the server runs the metadata checks
more than once and does not merge what they find. The counts here are the recorded ones.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from local.kubernetes import resources
from local.kubernetes.errors import Cause, invalid
from local.kubernetes.objects import JsonObject, JsonValue, is_terminating, metadata, name_of
from local.kubernetes.resources import Resource

_NAME_PART: Final = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAME_PART_RULE: Final = (
    "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end "
    "with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for "
    "validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"
)
_LABEL_KEY_RULE: Final = (
    "a valid label key must consist of alphanumeric characters, '-', '_' or '.', and must start "
    "and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex "
    "used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]') with an optional DNS "
    "subdomain prefix and '/' (e.g. 'example.com/MyName')"
)
_EFFECTS: Final = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_DUPLICATED_METADATA_CHECKS: Final = 4
"""How often an update of a Node reports a wrong annotation key."""


def check_create(resource: Resource, obj: JsonObject) -> None:
    """Refuse a new object that the server would refuse.

    Raises:
        ApiError: 422 with the causes.
    """
    causes = [
        *_name_causes(obj),
        *_annotation_causes(obj),
        *_SPEC_CHECKS.get(resource.plural, _no_causes)(obj),
    ]
    if causes:
        raise invalid(resource, name_of(obj), causes)


def check_update(resource: Resource, old: JsonObject, new: JsonObject) -> None:
    """Refuse a change that the server would refuse.

    Raises:
        ApiError: 422 with the causes.
    """
    causes = list(_metadata_update_causes(old, new)) * 2
    causes += list(_annotation_causes(new)) * (
        _DUPLICATED_METADATA_CHECKS if resource == resources.NODES else 2
    )
    causes += list(_SPEC_CHECKS.get(resource.plural, _no_causes)(new)) * 2
    if resource == resources.NODES:
        causes += _provider_id_causes(old, new)
    if causes:
        raise invalid(resource, name_of(new), causes)


def _no_causes(_obj: JsonObject) -> Iterable[Cause]:
    return ()


def _invalid_value(value: JsonValue, rule: str, field: str) -> Cause:
    shown = f'"{value}"' if isinstance(value, str) else str(value)
    return Cause("FieldValueInvalid", f"Invalid value: {shown}: {rule}", field)


def _name_causes(obj: JsonObject) -> Iterable[Cause]:
    name = name_of(obj)
    if not name:
        yield Cause(
            "FieldValueRequired",
            "Required value: name or generateName is required",
            "metadata.name",
        )
    elif "/" in name:
        yield _invalid_value(name, "may not contain '/'", "metadata.name")
    elif not _SUBDOMAIN.fullmatch(name):
        yield _invalid_value(
            name,
            "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, "
            "'-' or '.', and must start and end with an alphanumeric character",
            "metadata.name",
        )


def _annotation_causes(obj: JsonObject) -> Iterable[Cause]:
    for key in metadata(obj).get("annotations") or {}:
        prefix, _, name = key.rpartition("/")
        if "/" in prefix:
            yield _invalid_value(key, _LABEL_KEY_RULE, "metadata.annotations")
        elif not name:
            yield _invalid_value(key, "name part must be non-empty", "metadata.annotations")
        elif not _NAME_PART.fullmatch(name):
            yield _invalid_value(key, _NAME_PART_RULE, "metadata.annotations")


def _metadata_update_causes(old: JsonObject, new: JsonObject) -> Iterable[Cause]:
    before, after = metadata(old), metadata(new)
    if after.get("uid") != before.get("uid"):
        yield _invalid_value(after.get("uid"), "field is immutable", "metadata.uid")
    if is_terminating(old):
        known = before.get("finalizers") or ()
        added = [item for item in after.get("finalizers") or () if item not in known]
        if added:
            listed = ", ".join(f'"{item}"' for item in added)
            yield Cause(
                "FieldValueForbidden",
                "Forbidden: no new finalizers can be added if the object is being deleted, "
                f"found new finalizers []string{{{listed}}}",
                "metadata.finalizers",
            )


def _node_causes(node: JsonObject) -> Iterable[Cause]:
    taints = (node.get("spec") or {}).get("taints") or ()
    seen: set[tuple[str, str]] = set()
    for index, taint in enumerate(taints):
        field = f"metadata.taints[{index}]"
        yield from _taint_causes(taint, field)
        key = (taint.get("key", ""), taint.get("effect", ""))
        if key in seen:
            yield Cause(
                "FieldValueDuplicate",
                f'Duplicate value: {{"Key":"{key[0]}","Value":"{taint.get("value", "")}",'
                f'"Effect":"{key[1]}","TimeAdded":null}}: taints must be unique by key and '
                "effect pair",
                field,
            )
        seen.add(key)


def _taint_causes(taint: Mapping[str, Any], field: str) -> Iterable[Cause]:
    yield from _qualified_name_causes(str(taint.get("key", "")), f"{field}.key")
    effect = taint.get("effect", "")
    if not effect:
        yield Cause("FieldValueRequired", "Required value", f"{field}.effect")
    elif effect not in _EFFECTS:
        supported = ", ".join(f'"{known}"' for known in _EFFECTS)
        yield Cause(
            "FieldValueNotSupported",
            f'Unsupported value: "{effect}": supported values: {supported}',
            f"{field}.effect",
        )


def _qualified_name_causes(key: str, field: str) -> Iterable[Cause]:
    name = key.rpartition("/")[2]
    if not name:
        yield _invalid_value(key, "name part must be non-empty", field)
    if not _NAME_PART.fullmatch(name):
        yield _invalid_value(key, _NAME_PART_RULE, field)


def _provider_id_causes(old: JsonObject, new: JsonObject) -> list[Cause]:
    before = (old.get("spec") or {}).get("providerID", "")
    after = (new.get("spec") or {}).get("providerID", "")
    if before and after != before:
        return [
            Cause(
                "FieldValueForbidden",
                'Forbidden: node updates may not change providerID except from "" to valid',
                "spec.providerID",
            )
        ]
    return []


def _pdb_causes(pdb: JsonObject) -> Iterable[Cause]:
    spec = pdb.get("spec") or {}
    if spec.get("minAvailable") is not None and spec.get("maxUnavailable") is not None:
        selector = _compact(spec.get("selector"))
        policy = _compact(spec.get("unhealthyPodEvictionPolicy"))
        yield Cause(
            "FieldValueInvalid",
            f'Invalid value: {{"MinAvailable":{_compact(spec["minAvailable"])},"Selector":'
            f'{selector},"MaxUnavailable":{_compact(spec["maxUnavailable"])},'
            f'"UnhealthyPodEvictionPolicy":{policy}}}: minAvailable and maxUnavailable cannot be '
            "both set",
            "spec",
        )


def _compact(value: JsonValue) -> str:
    return json.dumps(value, separators=(",", ":"))


def _event_causes(event: JsonObject) -> Iterable[Cause]:
    involved = event.get("involvedObject") or {}
    namespace = metadata(event).get("namespace", "")
    found = involved.get("namespace", "")
    # An object without a namespace is told about in `default`, and only there.
    if found not in ((namespace, "") if namespace == "default" else (namespace,)):
        yield _invalid_value(found, "does not match event.namespace", "involvedObject.namespace")
    if event.get("eventTime"):
        yield from _strict_event_causes(event)


def _strict_event_causes(event: JsonObject) -> Iterable[Cause]:
    """An Event with `eventTime` is held to the rules of events.k8s.io."""
    reporter = str(event.get("reportingComponent", ""))
    if not reporter:
        yield Cause("FieldValueRequired", "Required value", "reportingComponent")
    yield from _qualified_name_causes(reporter, "reportingComponent")
    for field in ("reportingInstance", "action"):
        if not event.get(field):
            yield Cause("FieldValueRequired", "Required value", field)


_SPEC_CHECKS: Final[Mapping[str, Callable[[JsonObject], Iterable[Cause]]]] = {
    "nodes": _node_causes,
    "poddisruptionbudgets": _pdb_causes,
    "events": _event_causes,
}
