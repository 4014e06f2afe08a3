"""Ledger, policy, nodes, capacity, rails, reasons: the small decisions, each by its table."""

import doctest
import importlib
import pkgutil
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nodemend.domain
from nodemend.catalogue import load_catalogue
from nodemend.domain import errors
from nodemend.domain.capacity import (
    AutoScalingGroup,
    CapacityKind,
    kind_of,
    why_not_replaceable,
)
from nodemend.domain.faults import FaultClass, FaultKind, Mode, Rung, Verdict
from nodemend.domain.incidents import Outcome
from nodemend.domain.ledger import (
    FOR_THIS_BOOT,
    OTHERS_AT_WORK,
    QUIET,
    WARM_UP,
    hold_after,
    ledger_key,
    ledger_keys,
)
from nodemend.domain.nodes import (
    Node,
    NodeRef,
    Readiness,
    Taint,
    instance_id_of,
    is_instance_id,
)
from nodemend.domain.policy import (
    DEFAULT_CODE_PLANS,
    DEFAULT_PLANS,
    DEFAULT_XID_PLANS,
    ClusterPolicy,
    GroupLimits,
    GroupPolicy,
    Limits,
    MaxUnavailable,
    Policy,
    ReplacementRate,
    RulePolicy,
    wait_after,
)
from nodemend.domain.rails import why_stand_down
from nodemend.domain.reasons import Reason

REF = NodeRef("c", "n1", "u1", "i-00000001", "b1")
MODULES = [
    f"nodemend.domain.{module.name}" for module in pkgutil.iter_modules(nodemend.domain.__path__)
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_the_docstrings_hold(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_there_are_examples_to_hold() -> None:
    assert sum(doctest.testmod(importlib.import_module(n)).attempted for n in MODULES) >= 10


# --- ledger ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "code", "kind", "hold"),
    [
        # A person's, or on its way out: nothing more to open on this boot, whatever the reason.
        *(
            (outcome, code, kind, FOR_THIS_BOOT)
            for outcome, code in (
                (Outcome.NEEDS_HUMAN, "x"),
                (Outcome.NEEDS_HUMAN, "execution_failed"),
                (Outcome.NEEDS_HUMAN, "cluster_unavailable"),
                (Outcome.REPLACED, "replaced"),
            )
            for kind in FaultKind
        ),
        # Skipped: the reason says for how long. What was not judged may open again at once.
        *(
            (Outcome.SKIPPED, code, kind, hold)
            for code, hold in (
                ("aws_unavailable", None),
                ("capacity_guard", None),
                ("cluster_unavailable", None),
                ("cluster_unknown", None),
                ("execution_failed", None),
                ("expired", None),
                ("node_busy", None),
                ("policy_invalid", None),
                ("rate_limit", None),
                ("step_timed_out", None),
                ("unverifiable", None),
                ("warm_up", WARM_UP),
                ("not_confirmed", FOR_THIS_BOOT),
                ("excluded", QUIET),
                ("other_remediator", OTHERS_AT_WORK),
                ("mode_changed", QUIET),
            )
            for kind in FaultKind
        ),
        *((Outcome.ABORTED_BY_OPERATOR, "uncordoned", kind, QUIET) for kind in FaultKind),
        *((Outcome.SUPERSEDED, "superseded", kind, None) for kind in FaultKind),
        # An event is told once per boot; a level can be read again.
        (Outcome.OBSERVED, "dry_run", FaultKind.EVENT, FOR_THIS_BOOT),
        (Outcome.OBSERVED, "dry_run", FaultKind.LEVEL, QUIET),
        (Outcome.RECOVERED, "rebooted", FaultKind.EVENT, FOR_THIS_BOOT),
        (Outcome.RECOVERED, "recovered", FaultKind.LEVEL, None),
        (Outcome.REBOOTED, "x", FaultKind.EVENT, FOR_THIS_BOOT),
        (Outcome.REBOOTED, "x", FaultKind.LEVEL, None),
    ],
)
def test_a_handled_fault_is_held_as_long_as_its_end_asks(
    outcome: Outcome, code: str, kind: FaultKind, hold: timedelta | None
) -> None:
    assert hold_after(outcome, Reason(code, ""), kind) == hold


@pytest.mark.parametrize("outcome", Outcome)
@pytest.mark.parametrize("kind", FaultKind)
def test_every_end_has_an_answer(outcome: Outcome, kind: FaultKind) -> None:
    hold = hold_after(outcome, Reason("x", ""), kind)
    assert hold is None or timedelta() < hold <= FOR_THIS_BOOT


def test_a_rehearsal_is_noted_apart_and_a_real_end_counts_for_both() -> None:
    rehearsed, real = ledger_key("k", is_dry_run=True), ledger_key("k", is_dry_run=False)
    assert rehearsed != real
    assert set(ledger_keys("k", is_dry_run=True)) == {rehearsed, real}
    assert set(ledger_keys("k", is_dry_run=False)) == {real}


# --- policy ---------------------------------------------------------------------------------------


def test_the_plan_of_the_rule_goes_before_the_groups_the_policys_and_ours() -> None:
    labels = {"pool": "h100"}
    xid = FaultClass.XID
    one, two, three = (Rung.HUMAN,), (Rung.REBOOT,), (Rung.STOP_START,)
    group = GroupPolicy({"pool": "h100"}, plans={xid: two})
    everything = Policy(rules={"r": RulePolicy(plan=one)}, groups=(group,), plans={xid: three})
    assert everything.plan_for(xid, "r", labels) == one
    assert everything.plan_for(xid, "other", labels) == two
    assert everything.plan_for(xid, "other", {}) == three
    assert Policy().plan_for(xid, "other", {}) == DEFAULT_PLANS[xid]
    assert Policy().plan_for(FaultClass.THERMAL, "", {}) == ()
    nothing = replace(everything, rules={"r": RulePolicy(plan=()), "s": RulePolicy()})
    assert nothing.plan_for(xid, "r", labels) == ()  # observe, said on purpose
    assert nothing.plan_for(xid, "s", labels) == two


@pytest.mark.parametrize(
    ("code", "action", "first"),
    [
        (119, "reset_gpu", Rung.REBOOT),  # a reset means a reboot
        (151, "reboot_node", Rung.REBOOT),
        (171, "follow_xid48", Rung.REBOOT),
        (64, "replace_node", Rung.REPLACE),
        (54, "replace_node", Rung.REPLACE),
        (79, "reboot_node", Rung.REPLACE),  # the bare metal is meant, and a guest cannot reboot it
        (999, "", Rung.REPLACE),
        (None, "reset_gpu", Rung.REPLACE),
    ],
)
def test_the_plan_for_an_xid_begins_as_its_action_says(
    code: int | None, action: str, first: Rung
) -> None:
    assert Policy().plan_for(FaultClass.XID, "r", {}, code=code, action=action)[0] is first
    mine = Policy(plans={FaultClass.XID: (Rung.HUMAN,)})
    assert mine.plan_for(FaultClass.XID, "r", {}, code=code, action=action) == (Rung.HUMAN,)


def test_every_action_of_an_xid_that_acts_has_a_plan() -> None:
    rows = [row for entry in load_catalogue().xids.values() for row in entry.rows]
    actions = {row.action for row in rows if row.verdict.is_actionable}
    assert actions == set(DEFAULT_XID_PLANS)


def test_every_default_plan_ends_with_a_person() -> None:
    plans = (DEFAULT_PLANS, DEFAULT_XID_PLANS, DEFAULT_CODE_PLANS)
    for plan in [plan for each in plans for plan in each.values()]:
        assert plan[-1] is Rung.HUMAN
        assert Rung.HUMAN not in plan[:-1]


def test_the_first_group_whose_labels_all_match_binds() -> None:
    limits = GroupLimits(MaxUnavailable(1, 1))
    both = GroupPolicy({"pool": "a", "zone": "1"}, mode=Mode.ENFORCE)
    pool = GroupPolicy({"pool": "a"}, limits=limits)
    policy = Policy(groups=(both, pool), mode=Mode.CORDON_ONLY)
    assert policy.group_of({"pool": "a", "zone": "1", "x": "y"}) is both
    assert policy.group_of({"pool": "a"}) is pool
    assert policy.group_of({"pool": "b"}) is None
    assert policy.mode_for({"pool": "a", "zone": "1"}) is Mode.ENFORCE
    assert policy.mode_for({"pool": "a"}) is Mode.CORDON_ONLY
    assert policy.limits_for({"pool": "a"}) is limits
    assert policy.limits_for({"pool": "a", "zone": "1"}) == GroupLimits(
        policy.limits.max_unavailable
    )


def test_clusters_by_name_with_the_deployments_defaults() -> None:
    mine = ClusterPolicy("mine", "ws-1", "r")
    named = ClusterPolicy("named", "ws-2", "r", role_arn="arn:own")
    assert Policy().cluster("mine") is None
    assert Policy().with_default_cluster(None) == Policy()
    assert Policy().with_default_cluster(mine).cluster("mine") is mine
    both = Policy(clusters=(mine, named))
    assert both.with_default_cluster(mine) is both
    roles = both.with_cluster_roles("arn:prefix-")
    assert [cluster.role_arn for cluster in roles.clusters] == ["arn:prefix-mine", "arn:own"]
    assert both.with_cluster_roles("") == both


def test_exclusion_is_by_exact_name_or_instance_id() -> None:
    assert Policy(exclude=("n1",)).excludes(REF)
    assert Policy(exclude=("i-00000001",)).excludes(REF)
    assert not Policy(exclude=("n", "n11", "u1")).excludes(REF)
    assert not Policy(exclude=("x",)).excludes(replace(REF, instance_id=""))


@given(count=st.integers(0, 50), percent=st.floats(0, 100), desired=st.integers(0, 5000))
def test_a_bound_is_the_smaller_of_both_and_zero_only_on_purpose(
    count: int, percent: float, desired: int
) -> None:
    bound = MaxUnavailable(count, percent).of(desired)
    if count == 0 or percent == 0:
        assert bound == 0
    else:
        assert 1 <= bound <= count
        assert bound == 1 or (bound - 1) < desired * percent / 100


@given(st.lists(st.integers(1, 100), min_size=1, max_size=5), st.integers(0, 20))
def test_the_last_wait_repeats(waits: list[int], attempt: int) -> None:
    expected = waits[attempt] if attempt < len(waits) else waits[-1]
    assert wait_after(tuple(waits), attempt) == expected


def test_the_defaults_of_the_design() -> None:
    policy = Policy()
    assert (policy.mode, policy.hold_down_s, policy.startup_grace_s) == (Mode.DRY_RUN, 600, 1800)
    assert policy.limits == Limits(MaxUnavailable(5, 2), ReplacementRate(4, 20))
    assert policy.waits.drain_poll_s == policy.waits.check_poll_s == (20, 60, 300)
    deadlines = policy.deadlines
    assert (deadlines.verify_s, deadlines.drain_s, deadlines.replace_s) == (600, 1800, 2700)


# --- nodes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("provider_id", "expected"),
    [
        ("aws:///us-east-1a/i-0aaaaaaaaaaaaaaa1", "i-0aaaaaaaaaaaaaaa1"),
        ("aws:///us-east-1a/i-0abcdef1", "i-0abcdef1"),
        ("aws:///eu-central-1a/fargate-ip-10-0-1-5.eu-central-1.compute.internal", ""),
        ("eks-hybrid:///eu-central-1/my-cluster/mi-0123456789abcdef0", ""),
        ("aws:///us-east-1a/i-0AAAAAAAAAAAAAAA1", ""),
        ("i-0aaaaaaaaaaaaaaa1", "i-0aaaaaaaaaaaaaaa1"),
        ("aws:///us-east-1a/i-123", ""),
        ("", ""),
        (None, ""),
    ],
)
def test_an_instance_id_is_read_from_the_provider_id_or_not_at_all(
    provider_id: str | None, expected: str
) -> None:
    assert instance_id_of(provider_id) == expected
    assert is_instance_id(expected) is bool(expected)


@pytest.mark.parametrize("field", ["cluster", "name", "uid", "instance_id"])
def test_only_the_boot_may_differ_for_the_same_machine(field: str) -> None:
    assert REF.is_same_machine(replace(REF, boot_id="b2"))
    assert not REF.is_same_machine(replace(REF, **{field: "other"}))


def test_unknown_is_not_ready() -> None:
    assert Node(REF).is_ready
    assert not Node(REF, readiness=Readiness.UNKNOWN).is_ready
    assert not Node(REF, readiness=Readiness.NOT_READY).is_ready


def test_a_taint_leaves_out_what_it_has_not() -> None:
    assert Taint("k", "NoSchedule").as_json() == {"key": "k", "effect": "NoSchedule"}
    assert Taint("k", "NoExecute", "", "2026-01-01T00:00:00Z").as_json() == {
        "key": "k",
        "effect": "NoExecute",
        "value": "",
        "timeAdded": "2026-01-01T00:00:00Z",
    }


def test_a_node_moves_to_the_clusters_name_that_the_policy_uses() -> None:
    assert Node(REF).with_cluster("x").ref == replace(REF, cluster="x")


# --- capacity and rails ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "is_in_group", "kind"),
    [
        ({}, True, CapacityKind.AUTO_SCALING_GROUP),
        ({}, False, CapacityKind.STATIC),
        ({"eks.amazonaws.com/nodegroup": "g"}, True, CapacityKind.MANAGED_NODE_GROUP),
        ({"eks.amazonaws.com/nodegroup": "g"}, False, CapacityKind.MANAGED_NODE_GROUP),
        ({"karpenter.sh/nodepool": "p"}, True, CapacityKind.KARPENTER),
        (
            {"eks.amazonaws.com/compute-type": "auto", "karpenter.sh/nodepool": "p"},
            False,
            CapacityKind.AUTO_MODE,
        ),
        ({"eks.amazonaws.com/compute-type": "fargate"}, False, CapacityKind.FARGATE),
        ({"eks.amazonaws.com/compute-type": "hybrid"}, False, CapacityKind.HYBRID),
        (
            {
                "sagemaker.amazonaws.com/compute-type": "hyperpod",
                "eks.amazonaws.com/nodegroup": "g",
            },
            True,
            CapacityKind.HYPERPOD,
        ),
    ],
)
def test_kinds_of_capacity_are_told_apart_in_their_order(
    labels: dict[str, str], is_in_group: bool, kind: CapacityKind
) -> None:
    assert kind_of(Node(REF, labels=labels), is_in_group=is_in_group) is kind


def group(state: str | None = "InService", *suspended: str) -> AutoScalingGroup:
    members = {} if state is None else {REF.instance_id: state}
    return AutoScalingGroup("g", 1, 0, 1, members, frozenset(suspended))


@pytest.mark.parametrize(
    ("kind", "capacity", "code"),
    [
        (CapacityKind.AUTO_SCALING_GROUP, group(), ""),
        (CapacityKind.MANAGED_NODE_GROUP, group(), ""),
        (CapacityKind.MANAGED_NODE_GROUP, group("InService", "AZRebalance"), ""),
        (CapacityKind.KARPENTER, group(), "capacity_kind_unsupported"),
        (CapacityKind.STATIC, None, "capacity_kind_unsupported"),
        (CapacityKind.MANAGED_NODE_GROUP, None, "group_unknown"),
        (CapacityKind.AUTO_SCALING_GROUP, group("InService", "Launch"), "asg_suspended"),
        (CapacityKind.AUTO_SCALING_GROUP, group("InService", "Terminate"), "asg_suspended"),
        (CapacityKind.AUTO_SCALING_GROUP, group("Standby"), "other_remediator"),
        (CapacityKind.AUTO_SCALING_GROUP, group("Terminating:Wait"), "other_remediator"),
        (CapacityKind.AUTO_SCALING_GROUP, group(None), "other_remediator"),
    ],
)
def test_why_a_replacement_cannot_work_here(
    kind: CapacityKind, capacity: AutoScalingGroup | None, code: str
) -> None:
    reason = why_not_replaceable(Node(REF), kind, capacity)
    assert (reason.code if reason else "") == code


def test_both_suspended_processes_are_named() -> None:
    reason = why_not_replaceable(
        Node(REF), CapacityKind.AUTO_SCALING_GROUP, group("InService", "Terminate", "Launch")
    )
    assert reason is not None
    assert "Launch and Terminate suspended" in reason.text


@pytest.mark.parametrize(
    ("state", "is_leaving"),
    [
        ("InService", False),
        ("Pending", False),
        ("Standby", False),
        ("Terminating", True),
        ("Terminating:Wait", True),
        ("Terminated", True),
        ("Detaching", True),
        (None, True),
    ],
)
def test_an_instance_that_is_leaving_needs_no_second_call(
    state: str | None, is_leaving: bool
) -> None:
    assert group(state).is_leaving(REF.instance_id) is is_leaving


def test_newcomers_are_in_service_and_were_no_members() -> None:
    members = {"i-3": "InService", "i-2": "InService", "i-1": "InService", "i-4": "Pending"}
    capacity = AutoScalingGroup("g", 4, 0, 4, members)
    assert capacity.newcomers(frozenset({"i-1"})) == ("i-2", "i-3")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({}, ""),
        ({"taints": (Taint("team/reserved", "NoSchedule"),)}, ""),
        ({"is_deleting": True}, "being deleted"),
        ({"taints": (Taint("ToBeDeletedByClusterAutoscaler", "NoSchedule"),)}, "autoscaler"),
        ({"taints": (Taint("karpenter.sh/disrupted", "NoSchedule"),)}, "Karpenter"),
        ({"taints": (Taint("node.cloudprovider.kubernetes.io/shutdown", "NoSchedule"),)}, "shut"),
    ],
)
def test_nodemend_stands_down_for_others(change: dict[str, Any], word: str) -> None:
    reason = why_stand_down(Node(REF, **change))
    assert (reason is not None) is bool(word)
    if reason:
        assert (reason.code, word in reason.text) == ("other_remediator", True)


# --- words ----------------------------------------------------------------------------------------


def test_only_fatal_and_degraded_faults_may_touch_a_node() -> None:
    assert [one for one in Verdict if one.is_actionable] == [Verdict.FATAL, Verdict.DEGRADED]
    assert Verdict.FATAL.severity < Verdict.DEGRADED.severity < Verdict.SUSPECT.severity


def test_an_invalid_input_names_field_problem_and_remedy() -> None:
    error = errors.InvalidInputError("node", "is missing", "name it")
    assert (error.field, error.problem, error.remedy) == ("node", "is missing", "name it")


@pytest.mark.parametrize(
    ("name", "cls", "text"),
    [
        ("ClusterForbiddenError", errors.ClusterForbiddenError, "words"),
        ("PolicyInvalidError", errors.PolicyInvalidError, "words"),
        # One that is not made again is named at least.
        ("InvalidInputError", errors.PermanentError, "InvalidInputError: words"),
        ("AwsUnavailableError", errors.PermanentError, "AwsUnavailableError: words"),
        ("KeyError", errors.PermanentError, "KeyError: words"),
    ],
)
def test_an_error_is_made_again_by_its_name(name: str, cls: type[Exception], text: str) -> None:
    error = errors.error_of(name, "words")
    assert type(error) is cls
    assert str(error) == text
