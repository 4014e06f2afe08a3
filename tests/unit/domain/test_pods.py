"""Which pods a drain evicts, and what an answer to an eviction means."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodemend.domain.nodes import REMEDIATION_TAINT_KEY
from nodemend.domain.pods import (
    MIRROR_ANNOTATION,
    STUCK_MARGIN,
    UNSCHEDULABLE_TAINT_KEY,
    DisruptionBudget,
    EvictionAnswer,
    EvictionVerdict,
    Owner,
    Pod,
    PodFate,
    Toleration,
    classify,
    tolerates_cordon,
)

NOW = datetime(2026, 5, 1, 10, 0, tzinfo=UTC)
DAEMONSET = Owner("DaemonSet", "dcgm", "apps/v1")
EVERYTHING = (Toleration(operator="Exists"),)
MIRROR = {MIRROR_ANNOTATION: "hash"}


def pod(**changes: Any) -> Pod:
    values: dict[str, Any] = {
        "namespace": "ml",
        "name": "p",
        "uid": "1",
        "node_name": "n",
        "owner": Owner("Job", "train", "batch/v1"),
    }
    return Pod(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "is_unreachable", "fate"),
    [
        ({}, False, PodFate.EVICT),
        ({}, True, PodFate.EVICT),
        ({"owner": None}, False, PodFate.EVICT),
        ({"phase": "Pending"}, False, PodFate.EVICT),
        ({"phase": "Succeeded", "owner": None}, False, PodFate.EVICT),
        ({"phase": "Failed"}, False, PodFate.EVICT),
        # mirrors
        ({"annotations": MIRROR}, False, PodFate.SKIP),
        ({"annotations": MIRROR, "phase": "Failed"}, False, PodFate.SKIP),
        ({"annotations": MIRROR, "deletion_at": NOW}, True, PodFate.SKIP),
        # DaemonSets
        ({"owner": DAEMONSET}, False, PodFate.SKIP),
        ({"owner": DAEMONSET, "deletion_at": NOW}, False, PodFate.SKIP),
        ({"owner": DAEMONSET, "phase": "Failed"}, False, PodFate.EVICT),
        ({"owner": DAEMONSET, "phase": "Succeeded"}, False, PodFate.EVICT),
        ({"owner": Owner("DaemonSet", "x", "apps.kruise.io/v1")}, False, PodFate.EVICT),
        # terminating
        ({"deletion_at": NOW - timedelta(hours=1)}, False, PodFate.WAIT),
        ({"deletion_at": NOW + timedelta(seconds=30)}, True, PodFate.WAIT),
        ({"deletion_at": NOW - STUCK_MARGIN}, True, PodFate.WAIT),
        ({"deletion_at": NOW - STUCK_MARGIN - timedelta(seconds=1)}, True, PodFate.UNCONFIRMED),
        ({"deletion_at": NOW - timedelta(hours=1), "phase": "Failed"}, True, PodFate.UNCONFIRMED),
        # tolerations
        ({"tolerations": EVERYTHING}, False, PodFate.SKIP),
        ({"tolerations": EVERYTHING, "phase": "Succeeded"}, False, PodFate.EVICT),
        ({"tolerations": EVERYTHING, "deletion_at": NOW}, False, PodFate.WAIT),
    ],
)
def test_the_fate_of_a_pod(changes: dict[str, Any], is_unreachable: bool, fate: PodFate) -> None:
    classified = classify(pod(**changes), now=NOW, is_node_unreachable=is_unreachable)
    assert classified.fate is fate
    assert classified.why


BOTH = (UNSCHEDULABLE_TAINT_KEY, REMEDIATION_TAINT_KEY)


@pytest.mark.parametrize(
    ("tolerations", "expected"),
    [
        ((), False),
        ((Toleration(operator="Exists"),), True),
        ((Toleration(operator="Exists", effect="NoSchedule"),), True),
        ((Toleration(operator="Exists", effect="NoExecute"),), False),
        (tuple(Toleration(key, "Exists") for key in BOTH), True),
        (tuple(Toleration(key, "Equal") for key in BOTH), True),
        ((Toleration(BOTH[0], "Exists"),), False),
        ((Toleration(BOTH[1], "Exists"),), False),
        ((Toleration("nvidia.com/gpu", "Exists"),), False),
        ((Toleration("", "Equal"),), False),
    ],
)
def test_only_a_pod_that_tolerates_both_taints_would_come_straight_back(
    tolerations: tuple[Toleration, ...], expected: bool
) -> None:
    assert tolerates_cordon(pod(tolerations=tolerations)) is expected


BUDGET = (("DisruptionBudget", "The disruption budget pdb-a needs 1 healthy pods"),)
ENDING = (("NamespaceTerminating", "ml is being terminated"),)
MULTIPLE = (
    "This pod has more than one PodDisruptionBudget, which the eviction subresource does not "
    "support."
)
V = EvictionVerdict


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (EvictionAnswer(200), V.ACCEPTED),
        (EvictionAnswer(201), V.ACCEPTED),
        (EvictionAnswer(404, 'pods "p" not found', details_kind="pods"), V.GONE),
        (EvictionAnswer(404, "404 page not found"), V.UNSETTLED),
        (EvictionAnswer(409, "the UID in the precondition does not match"), V.GONE),
        (EvictionAnswer(429, "Cannot evict", BUDGET), V.BLOCKED_BY_PDB),
        (EvictionAnswer(429, "too many requests"), V.THROTTLED),
        (EvictionAnswer(403, "forbidden", ENDING), V.NAMESPACE_TERMINATING),
        (EvictionAnswer(403, "forbidden"), V.FORBIDDEN),
        (EvictionAnswer(500, MULTIPLE), V.BLOCKED_BY_MULTIPLE_PDBS),
        (EvictionAnswer(500, "etcdserver: request timed out"), V.UNSETTLED),
        (EvictionAnswer(500, "more than one PodDisruptionBudget"), V.UNSETTLED),
        (EvictionAnswer(503), V.UNSETTLED),
        (EvictionAnswer(0), V.UNSETTLED),
        (EvictionAnswer(400, "name parameter required"), V.UNSETTLED),
    ],
)
def test_the_meaning_of_an_answer(answer: EvictionAnswer, verdict: EvictionVerdict) -> None:
    assert answer.verdict is verdict


@given(st.integers(0, 599), st.text(max_size=20))
def test_every_answer_means_something(status: int, message: str) -> None:
    assert EvictionAnswer(status, message).verdict in V


def test_the_servers_own_words_for_a_block_come_first() -> None:
    assert EvictionAnswer(429, "Cannot evict", BUDGET).cause_text == BUDGET[0][1]
    assert EvictionAnswer(500, MULTIPLE).cause_text == MULTIPLE
    assert EvictionAnswer(429, "m", (("X", ""), ("Y", "b"), ("Z", "c"))).cause_text == "b; c"


def budget(**changes: Any) -> DisruptionBudget:
    return DisruptionBudget("ml", "pdb", **changes)


@pytest.mark.parametrize(
    ("changes", "labels", "selects"),
    [
        ({"match_labels": {"app": "a"}}, {"app": "a", "x": "y"}, True),
        ({"match_labels": {"app": "a"}}, {"app": "b"}, False),
        ({"match_labels": {"app": "a"}}, {}, False),
        ({}, {"app": "a"}, True),  # an empty selector selects all
        ({"has_selector": False}, {"app": "a"}, False),
        ({"expressions": (("app", "In", ("a", "b")),)}, {"app": "b"}, True),
        ({"expressions": (("app", "In", ("a", "b")),)}, {}, False),
        ({"expressions": (("app", "NotIn", ("a",)),)}, {"app": "b"}, True),
        ({"expressions": (("app", "NotIn", ("a",)),)}, {}, True),
        ({"expressions": (("app", "NotIn", ("a",)),)}, {"app": "a"}, False),
        ({"expressions": (("app", "Exists", ()),)}, {"app": ""}, True),
        ({"expressions": (("app", "Exists", ()),)}, {}, False),
        ({"expressions": (("app", "DoesNotExist", ()),)}, {}, True),
        ({"expressions": (("app", "DoesNotExist", ()),)}, {"app": ""}, False),
        ({"expressions": (("app", "Resembles", ("a",)),)}, {"app": "a"}, False),
        (
            {"match_labels": {"app": "a"}, "expressions": (("tier", "Exists", ()),)},
            {"app": "a"},
            False,
        ),
    ],
)
def test_which_pods_a_budget_selects(
    changes: dict[str, Any], labels: dict[str, str], selects: bool
) -> None:
    assert budget(**changes).selects(pod(labels=labels)) is selects


def test_a_budget_selects_in_its_own_namespace_only() -> None:
    assert not budget().selects(pod(namespace="other"))


@pytest.mark.case("R3")
@pytest.mark.parametrize(
    ("expected", "desired", "never"), [(1, 1, True), (1, 2, True), (2, 1, False), (3, 2, False)]
)
def test_r3_a_budget_that_wants_every_pod_healthy_can_never_allow(
    expected: int, desired: int, never: bool
) -> None:
    assert budget(expected_pods=expected, desired_healthy=desired).can_never_allow is never
