"""The cordon as a JSON patch, and its exact undoing: applied by a JSON patch library."""

import copy
import json
from dataclasses import replace
from typing import Any

import jsonpatch
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodemend.domain.cordon import (
    REMEDIATION_TAINT,
    Ownership,
    cordon_patch,
    is_cordoned_by,
    ownership_of,
    plan_ownership,
    restore_patch,
)
from nodemend.domain.nodes import (
    OWNER_ANNOTATION,
    SCALE_DOWN_DISABLED_ANNOTATION,
    Node,
    NodeRef,
    Taint,
)
from nodemend.domain.pods import UNSCHEDULABLE_TAINT_KEY

REF = NodeRef("c", "n1", "u1", "i-00000001", "b1")
CONTROLLERS_TAINT = Taint(UNSCHEDULABLE_TAINT_KEY, "NoSchedule", None, "2026-05-01T10:00:00Z")


def as_json(node: Node) -> dict[str, Any]:
    """The Node as the API keeps it: what is empty or false is not there."""
    metadata: dict[str, Any] = {"uid": node.ref.uid, "resourceVersion": node.resource_version}
    if node.annotations:
        metadata["annotations"] = dict(node.annotations)
    spec: dict[str, Any] = {}
    if node.is_unschedulable:
        spec["unschedulable"] = True
    if node.taints:
        spec["taints"] = [taint.as_json() for taint in node.taints]
    return {"metadata": metadata, "spec": spec}


def from_json(document: dict[str, Any]) -> Node:
    """Read it back."""
    metadata, spec = document["metadata"], document["spec"]
    return Node(
        REF,
        annotations=metadata.get("annotations", {}),
        taints=tuple(
            Taint(one["key"], one["effect"], one.get("value"), one.get("timeAdded"))
            for one in spec.get("taints", ())
        ),
        is_unschedulable=spec.get("unschedulable", False),
        resource_version=metadata["resourceVersion"],
    )


def applied(node: Node, patch: Any) -> Node:
    """Apply a patch as the API does, with the node lifecycle controller's own taint."""
    document = jsonpatch.apply_patch(copy.deepcopy(as_json(node)), json.loads(json.dumps(patch)))
    document["metadata"]["resourceVersion"] = str(int(node.resource_version) + 1)
    after = from_json(document)
    others = tuple(taint for taint in after.taints if taint.key != UNSCHEDULABLE_TAINT_KEY)
    if not after.is_unschedulable:
        return replace(after, taints=others)
    has_it = len(others) < len(after.taints)
    return after if has_it else replace(after, taints=(*after.taints, CONTROLLERS_TAINT))


def without_version(node: Node) -> Node:
    return replace(node, resource_version="")


def node(**changes: Any) -> Node:
    values: dict[str, Any] = {"ref": REF, "resource_version": "7"}
    return Node(**(values | changes))


KEYS = st.text("abc./-", min_size=1, max_size=6).map(lambda key: "x/" + key)
ANNOTATIONS = st.dictionaries(
    st.one_of(KEYS, st.just(SCALE_DOWN_DISABLED_ANNOTATION)), st.text(max_size=6), max_size=4
)
TAINTS = st.lists(
    st.builds(
        Taint,
        key=KEYS,
        effect=st.sampled_from(["NoSchedule", "NoExecute", "PreferNoSchedule"]),
        value=st.one_of(st.none(), st.text("ab", max_size=2)),
        time_added=st.one_of(st.none(), st.just("2026-01-01T00:00:00Z")),
    ),
    max_size=4,
    unique_by=lambda taint: (taint.key, taint.effect),
).map(tuple)


@settings(max_examples=150, deadline=None)
@given(annotations=ANNOTATIONS, taints=TAINTS, is_unschedulable=st.booleans())
def test_a_restored_node_is_exactly_what_it_was(
    annotations: dict[str, str], taints: tuple[Taint, ...], is_unschedulable: bool
) -> None:
    own = (*taints, CONTROLLERS_TAINT) if is_unschedulable else taints
    before = node(annotations=annotations, taints=own, is_unschedulable=is_unschedulable)

    ownership = plan_ownership(before, "inc-1")
    cordoned = applied(before, cordon_patch(before, ownership))
    assert is_cordoned_by(cordoned, "inc-1")
    assert ownership_of(cordoned) == ownership
    assert set(own) <= set(cordoned.taints)
    assert cordoned.annotations[SCALE_DOWN_DISABLED_ANNOTATION] == "true"

    restored = applied(cordoned, restore_patch(cordoned, ownership))
    assert without_version(restored) == without_version(before)


@settings(max_examples=60, deadline=None)
@given(annotations=ANNOTATIONS, taints=TAINTS, is_unschedulable=st.booleans())
def test_a_second_incidents_cordon_still_restores_what_was_before_the_first(
    annotations: dict[str, str], taints: tuple[Taint, ...], is_unschedulable: bool
) -> None:
    own = (*taints, CONTROLLERS_TAINT) if is_unschedulable else taints
    before = node(annotations=annotations, taints=own, is_unschedulable=is_unschedulable)
    first = applied(before, cordon_patch(before, plan_ownership(before, "inc-1")))

    second = applied(first, cordon_patch(first, plan_ownership(first, "inc-2")))

    assert is_cordoned_by(second, "inc-2")
    assert not is_cordoned_by(second, "inc-1")
    assert [taint.key for taint in second.taints].count(REMEDIATION_TAINT.key) == 1
    ownership = ownership_of(second)
    assert ownership is not None
    restored = applied(second, restore_patch(second, ownership))
    assert without_version(restored) == without_version(before)


@pytest.mark.case("R45")
def test_r45a_a_node_that_was_cordoned_before_us_stays_so() -> None:
    before = node(is_unschedulable=True, taints=(CONTROLLERS_TAINT,))
    ownership = plan_ownership(before, "inc-1")
    cordoned = applied(before, cordon_patch(before, ownership))

    restored = applied(cordoned, restore_patch(cordoned, ownership))

    assert restored.is_unschedulable
    assert restored.taints == (CONTROLLERS_TAINT,)


def test_what_others_added_meanwhile_stays_too() -> None:
    before = node()
    ownership = plan_ownership(before, "inc-1")
    cordoned = applied(before, cordon_patch(before, ownership))
    theirs = Taint("team/reserved", "NoExecute", "x", "2026-05-01T10:05:00Z")
    meanwhile = replace(
        cordoned,
        taints=(theirs, *cordoned.taints),
        annotations={**cordoned.annotations, "theirs": "1"},
    )

    restored = applied(meanwhile, restore_patch(meanwhile, ownership))

    assert restored.taints == (theirs,)
    assert dict(restored.annotations) == {"theirs": "1"}


def test_a_node_that_a_person_uncordoned_loses_the_rest_of_our_cordon() -> None:
    before = node()
    ownership = plan_ownership(before, "inc-1")
    cordoned = applied(before, cordon_patch(before, ownership))
    uncordoned = replace(cordoned, is_unschedulable=False, taints=(REMEDIATION_TAINT,))

    restored = applied(uncordoned, restore_patch(uncordoned, ownership))

    assert without_version(restored) == without_version(before)


def test_both_patches_test_what_was_read() -> None:
    before = node()
    ownership = plan_ownership(before, "inc-1")
    for patch in (cordon_patch(before, ownership), restore_patch(before, ownership)):
        for changed in (replace(before, resource_version="8"), other_machine(before)):
            document = as_json(changed)
            with pytest.raises(jsonpatch.JsonPatchTestFailed):
                jsonpatch.apply_patch(document, json.loads(json.dumps(patch)))


def other_machine(before: Node) -> Node:
    return replace(before, ref=replace(before.ref, uid="u2"))


def test_restoring_what_carries_nothing_of_ours_only_tests() -> None:
    patch = restore_patch(node(annotations={"x": "y"}), Ownership("inc-1", False))
    assert {operation["op"] for operation in patch} == {"test"}


@pytest.mark.parametrize(
    "raw", [None, "", "x", "[]", "1", '"incident"', "{}", '{"incident": "i"}', "null"]
)
def test_an_annotation_that_is_no_note_of_ours_owns_nothing(raw: str | None) -> None:
    annotations = {} if raw is None else {OWNER_ANNOTATION: raw}
    assert ownership_of(node(annotations=annotations)) is None
    assert not is_cordoned_by(node(annotations=annotations, is_unschedulable=True), "i")


@pytest.mark.parametrize(
    "change", [{"is_unschedulable": False}, {"taints": ()}, {"annotations": {}}]
)
def test_a_cordon_that_lost_a_part_is_not_whole(change: dict[str, Any]) -> None:
    before = node()
    cordoned = applied(before, cordon_patch(before, plan_ownership(before, "inc-1")))
    assert is_cordoned_by(cordoned, "inc-1")
    assert not is_cordoned_by(replace(cordoned, **change), "inc-1")
