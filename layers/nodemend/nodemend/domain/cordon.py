"""The cordon as one JSON patch, and its exact undoing.

`spec.taints` is one atomic list: any merge patch that names it throws other people's taints away.
So both patches test the resourceVersion that was read, write the whole list, and are built again
after a conflict.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nodemend.domain.nodes import (
    OWNER_ANNOTATION,
    REMEDIATION_TAINT_KEY,
    SCALE_DOWN_DISABLED_ANNOTATION,
    Node,
    Taint,
    TaintEffect,
)

REMEDIATION_TAINT = Taint(REMEDIATION_TAINT_KEY, TaintEffect.NO_SCHEDULE)

Patch = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Ownership:
    """Whose cordon it is, and what was there before; kept on the node in one annotation."""

    incident_id: str
    was_unschedulable: bool
    had_scale_down_disabled: str | None = None

    def as_annotation(self) -> str:
        """Return the annotation's value: JSON, because people read it with kubectl."""
        return json.dumps(
            {
                "incident": self.incident_id,
                "was_unschedulable": self.was_unschedulable,
                "had_scale_down_disabled": self.had_scale_down_disabled,
            },
            sort_keys=True,
        )


def ownership_of(node: Node) -> Ownership | None:
    """Return who cordoned the node, or None if nodemend did not (or the annotation is broken)."""
    try:
        raw = json.loads(node.owner or "null")
        return Ownership(
            str(raw["incident"]),
            bool(raw["was_unschedulable"]),
            raw.get("had_scale_down_disabled"),
        )
    except (ValueError, KeyError, TypeError):
        return None


def is_cordoned_by(node: Node, incident_id: str) -> bool:
    """Tell whether the node carries this incident's whole cordon."""
    owner = ownership_of(node)
    return (
        owner is not None
        and owner.incident_id == incident_id
        and node.is_unschedulable
        and any(taint.key == REMEDIATION_TAINT_KEY for taint in node.taints)
    )


def plan_ownership(node: Node, incident_id: str) -> Ownership:
    """Return what the cordon will note.

    If an earlier incident's cordon is still there, its note of the state before is carried on:
    our own cordon must not be taken for an administrator's.
    """
    earlier = ownership_of(node)
    if earlier is not None:
        return Ownership(incident_id, earlier.was_unschedulable, earlier.had_scale_down_disabled)
    return Ownership(
        incident_id,
        node.is_unschedulable,
        node.annotations.get(SCALE_DOWN_DISABLED_ANNOTATION),
    )


def cordon_patch(node: Node, ownership: Ownership) -> Patch:
    """Return the patch that cordons, taints and marks the node."""
    others = [taint for taint in node.taints if taint.key != REMEDIATION_TAINT_KEY]
    taints = [taint.as_json() for taint in (*others, REMEDIATION_TAINT)]
    annotations = {
        **node.annotations,
        OWNER_ANNOTATION: ownership.as_annotation(),
        SCALE_DOWN_DISABLED_ANNOTATION: "true",
    }
    return [
        *_tests(node),
        {"op": "add", "path": "/spec/unschedulable", "value": True},
        {"op": "add", "path": "/spec/taints", "value": taints},
        *_set_annotations(node, annotations),
    ]


def restore_patch(node: Node, ownership: Ownership) -> Patch:
    """Return the patch that puts back exactly what was there before the cordon."""
    keep = [taint.as_json() for taint in node.taints if taint.key != REMEDIATION_TAINT_KEY]
    annotations = {
        key: value
        for key, value in node.annotations.items()
        if key not in (OWNER_ANNOTATION, SCALE_DOWN_DISABLED_ANNOTATION)
    }
    if ownership.had_scale_down_disabled is not None:
        annotations[SCALE_DOWN_DISABLED_ANNOTATION] = ownership.had_scale_down_disabled
    patch: list[Mapping[str, Any]] = [*_tests(node)]
    if node.is_unschedulable and not ownership.was_unschedulable:
        patch.append({"op": "remove", "path": "/spec/unschedulable"})
    if len(keep) < len(node.taints):
        patch.append({"op": "replace", "path": "/spec/taints", "value": keep})
    return [*patch, *_set_annotations(node, annotations)]


def _tests(node: Node) -> Patch:
    return [
        {"op": "test", "path": "/metadata/uid", "value": node.ref.uid},
        {"op": "test", "path": "/metadata/resourceVersion", "value": node.resource_version},
    ]


def _set_annotations(node: Node, annotations: Mapping[str, str]) -> Patch:
    if dict(annotations) == dict(node.annotations):
        return []
    # "add" replaces an existing map, and makes one where the node had no annotation at all.
    return [{"op": "add", "path": "/metadata/annotations", "value": dict(annotations)}]
