"""The fleet guard: who may take a node out of service now, and who waits."""

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodemend.domain.capacity import AutoScalingGroup
from nodemend.domain.dispatch import Admitted, Dispatch, Ended, Kept, decide_dispatch
from nodemend.domain.errors import LeaseLostError
from nodemend.domain.faults import FaultClass, FaultKind, Mode, Rung, Verdict
from nodemend.domain.findings import Evidence, Finding
from nodemend.domain.fleet import FleetSnapshot
from nodemend.domain.guard import (
    FIRST_LEASE,
    MAX_SLOTS,
    Guard,
    Replacement,
    Slot,
    expired_slots,
    is_lease_valid,
    release,
    renew,
)
from nodemend.domain.incidents import Incident, IncidentState, Origin, Outcome
from nodemend.domain.nodes import INSTANCE_TYPE_LABEL, Node, NodeRef, Readiness, Taint
from nodemend.domain.policy import (
    GroupPolicy,
    Limits,
    MaxUnavailable,
    Policy,
    ReplacementRate,
    RulePolicy,
)
from tests.unit.domain.oracle import unavailable

NOW = datetime(2026, 5, 1, 10, 0, tzinfo=UTC)
CLUSTER = "gpu-prod"


def node(number: int, group: str = "a", **changes: Any) -> Node:
    values: dict[str, Any] = {
        "ref": NodeRef(CLUSTER, f"n{number}", f"u{number}", f"i-{number:08x}", f"b{number}"),
        "labels": {"group": group, INSTANCE_TYPE_LABEL: "p5.48xlarge"},
        "created_at": NOW - timedelta(days=1),
        "gpu_capacity": 8,
    }
    return Node(**(values | changes))


def fleet(nodes: Iterable[Node], desired: dict[str, int] | None = None) -> FleetSnapshot:
    """A snapshot; nodes are in the group that their label names ("": in none)."""
    listed = tuple(nodes)
    members: dict[str, list[str]] = {}
    for one in listed:
        if one.labels["group"]:
            members.setdefault(one.labels["group"], []).append(one.ref.instance_id)
    sizes = {name: len(ids) for name, ids in members.items()} | (desired or {})
    return FleetSnapshot(
        at=NOW,
        nodes=listed,
        groups={name: AutoScalingGroup(name, size, 0, size) for name, size in sizes.items()},
        group_by_instance={one: name for name, ids in members.items() for one in ids},
    )


def finding(verdict: Verdict = Verdict.FATAL, **changes: Any) -> Finding:
    values: dict[str, Any] = {
        "cluster": CLUSTER,
        "node_names": ("n1",),
        "fault_class": FaultClass.XID,
        "verdict": verdict,
        "kind": FaultKind.EVENT,
        "evidence": Evidence("xid-count", "q", 1, NOW),
        "code": 79,
        "summary": "XID 79",
    }
    return Finding(**(values | changes))


def waiter(number: int, verdict: Verdict | None = Verdict.FATAL, **changes: Any) -> Incident:
    values: dict[str, Any] = {
        "id": f"inc-{number:03}",
        "cluster": CLUSTER,
        "node": node(number).ref,
        "origin": Origin.SCAN if verdict else Origin.HAND,
        "opened_at": NOW - timedelta(minutes=5),
        "state": IncidentState.WAITING,
        "state_since": NOW,
        # A code of its own: one fault on many nodes is the breaker's matter (test_breaker.py).
        "findings": (finding(verdict, code=1000 + number),) if verdict else (),
        "node_labels": node(number).labels,
    }
    return Incident(**(values | changes))


def policy(count: int = 5, percent: float = 100, **changes: Any) -> Policy:
    values: dict[str, Any] = {
        "mode": Mode.ENFORCE,
        "limits": Limits(MaxUnavailable(count, percent), ReplacementRate(100, 1000)),
        "hold_s": {},
    }
    return Policy(**(values | changes))


def decide(
    snapshot: FleetSnapshot, waiters: Iterable[Incident], rules: Policy, guard: Guard | None = None
) -> Dispatch:
    return decide_dispatch(guard or Guard(CLUSTER), snapshot, waiters, rules, NOW)


def slot(number: int, group: str = "a", incident_id: str = "", **changes: Any) -> Slot:
    values: dict[str, Any] = {
        "incident_id": incident_id or f"inc-{number:03}",
        "node_uid": f"u{number}",
        "node_name": f"n{number}",
        "group": group,
        "taken_at": NOW,
        "expires_at": NOW + FIRST_LEASE,
    }
    return Slot(**(values | changes))


def started(*times: datetime) -> tuple[Replacement, ...]:
    return tuple(Replacement(at, "a") for at in times)


def guard_with(*slots: Slot, replacements: tuple[Replacement, ...] = ()) -> Guard:
    return Guard(CLUSTER, 3, {one.node_uid: one for one in slots}, replacements)


def admitted(dispatch: Dispatch) -> list[str]:
    return [one.incident.id for one in dispatch.admitted]


# --- budget ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "percent", "nodes", "bound"),
    [
        (5, 2, 8, 1),  # never less than one
        (5, 20, 16, 4),  # 3.2 rounds up (R38)
        (5, 2, 2000, 5),  # the smaller of both
        (50, 2, 2000, 40),
        (3, 100, 10, 3),
        (0, 100, 10, 0),
        (5, 0, 10, 0),
    ],
)
def test_the_smaller_of_count_and_percent_binds(
    count: int, percent: float, nodes: int, bound: int
) -> None:
    snapshot = fleet(node(n) for n in range(1, nodes + 1))
    waiters = [waiter(n) for n in range(1, min(nodes, 60) + 1)]

    dispatch = decide(snapshot, waiters, policy(count, percent))

    assert len(dispatch.admitted) == bound
    assert {one.reason.code for one in dispatch.kept} == {"capacity_guard"}


@pytest.mark.case("R38")
def test_r38_of_twelve_bad_nodes_of_sixteen_four_go_and_eight_wait() -> None:
    snapshot = fleet(node(n) for n in range(1, 17))

    dispatch = decide(snapshot, [waiter(n) for n in range(1, 13)], policy(100, 20))

    assert (len(dispatch.admitted), len(dispatch.kept)) == (4, 8)
    assert "4 of at most 4 nodes of the cluster are unavailable (n1, n2, n3, n4)" in (
        dispatch.kept[0].reason.text
    )


@pytest.mark.parametrize(
    "change",
    [
        {"is_unschedulable": True},
        {"readiness": Readiness.NOT_READY},
        {"readiness": Readiness.UNKNOWN},
        {"is_deleting": True},
    ],
    ids=["cordoned by anyone", "not ready", "unknown", "leaving"],
)
def test_whoever_took_it_out_an_unavailable_node_counts(change: dict[str, Any]) -> None:
    snapshot = fleet([node(1), node(2, **change), node(3)])

    assert admitted(decide(snapshot, [waiter(1)], policy(1))) == []
    assert admitted(decide(snapshot, [waiter(1)], policy(2))) == ["inc-001"]


def test_what_is_in_flight_counts_though_its_node_is_gone_already() -> None:
    snapshot = fleet([node(1), node(3)], {"a": 3})
    guard = guard_with(slot(2))

    assert admitted(decide(snapshot, [waiter(1)], policy(1), guard)) == []
    # Its slot and the gap that it left in the group are one and the same.
    assert unavailable(guard, snapshot, "a", besides="u1") == ("n2",)
    assert admitted(decide(snapshot, [waiter(1)], policy(2), guard)) == ["inc-001"]


def test_what_a_group_cannot_launch_counts_when_its_slot_has_been_given_back() -> None:
    # n2 was terminated and nothing came: its incident is closed, its slot free. n1 must stay.
    snapshot = fleet([node(1), node(3)], {"a": 3})

    dispatch = decide(snapshot, [waiter(1)], policy(1))

    assert admitted(dispatch) == []
    assert dispatch.kept[0].reason.code == "capacity_guard"
    assert "1 of at most 1 nodes of the cluster are unavailable (missing in a)" in (
        dispatch.kept[0].reason.text.replace("((", "(").replace("))", ")")
    )


def test_a_group_that_lost_its_last_gpu_node_is_missing_all_that_it_should_have() -> None:
    snapshot = fleet([node(1), node(2)], desired={"a": 2, "b": 3, "cpu": 5})
    groups = snapshot.groups | {"b": replace(snapshot.groups["b"], has_gpus=True)}

    dispatch = decide(replace(snapshot, groups=groups), [waiter(1)], policy(3))

    assert "3 of at most 3 nodes of the cluster are unavailable ((missing in b)" in (
        dispatch.kept[0].reason.text
    )
    assert decide(snapshot, [waiter(1)], policy(3)).admitted


def test_gaps_count_in_the_group_that_has_them_and_in_the_cluster() -> None:
    nodes = [node(1), node(2), *(node(n, "b") for n in range(3, 7))]
    snapshot = fleet(nodes, {"a": 4})
    guard = guard_with(slot(9))  # in group a, and gone: it stands for one of the two gaps

    assert unavailable(guard, snapshot, "a", besides="u1") == ("n9", "(missing in a)")
    assert unavailable(guard, snapshot, "b", besides="u3") == ()
    assert unavailable(guard, snapshot, None, besides="u3") == ("n9", "(missing in a)")


def test_a_group_with_more_nodes_than_it_wants_misses_none() -> None:
    snapshot = fleet([node(1), node(2), node(3)], {"a": 2})
    assert unavailable(Guard(CLUSTER), snapshot, None, besides="u1") == ()


def test_a_node_that_is_cordoned_and_in_flight_counts_once() -> None:
    snapshot = fleet([node(1), node(2, is_unschedulable=True), node(3)])

    assert unavailable(guard_with(slot(2)), snapshot, None, besides="u1") == ("n2",)


@pytest.mark.parametrize("change", [{"is_unschedulable": True}, {"readiness": Readiness.NOT_READY}])
def test_a_candidate_is_never_counted_against_itself(change: dict[str, Any]) -> None:
    snapshot = fleet([node(1, **change), node(2)])

    assert admitted(decide(snapshot, [waiter(1)], policy(1))) == ["inc-001"]


def test_the_groups_own_limit_binds_besides_the_clusters() -> None:
    snapshot = fleet([*(node(n, "a") for n in range(1, 6)), *(node(n, "b") for n in range(6, 11))])
    tight = GroupPolicy({"group": "a"}, limits=Limits(MaxUnavailable(1, 100)))
    waiters = [waiter(n, node_labels={"group": "a" if n < 6 else "b"}) for n in range(1, 11)]

    dispatch = decide(snapshot, waiters, policy(4, groups=(tight,)))

    assert admitted(dispatch) == ["inc-001", "inc-006", "inc-007", "inc-008"]
    texts = {one.incident.id: one.reason.text for one in dispatch.kept}
    assert "1 of at most 1 nodes of the group a" in texts["inc-002"]
    assert "4 of at most 4 nodes of the cluster" in texts["inc-009"]


def test_the_clusters_limit_binds_each_group_where_it_has_none_of_its_own() -> None:
    snapshot = fleet([*(node(n, "a") for n in range(1, 5)), *(node(n, "b") for n in range(5, 9))])

    # 25 % of 8 in the cluster are 2; 25 % of 4 in each group are 1.
    waiters = [waiter(n) for n in range(1, 9)]
    assert admitted(decide(snapshot, waiters, policy(9, 25))) == ["inc-001", "inc-005"]


def test_nodes_outside_of_any_group_count_one_each() -> None:
    loose = [node(n, "") for n in range(1, 5)]
    snapshot = fleet([*loose, *(node(n, "a") for n in range(5, 9))], {"a": 6})

    assert snapshot.desired() == 10
    assert snapshot.desired("a") == 6
    assert snapshot.desired("unknown") == 0
    # Two nodes of group a are missing.
    assert admitted(decide(snapshot, [waiter(1)], policy(2))) == []
    assert admitted(decide(snapshot, [waiter(1)], policy(3))) == ["inc-001"]


def test_a_group_that_has_no_gpu_node_is_no_part_of_the_fleet() -> None:
    snapshot = fleet([node(1)])
    cpu = AutoScalingGroup("cpu", 500, 0, 500)
    assert replace(snapshot, groups={**snapshot.groups, "cpu": cpu}).desired() == 1


def test_nodes_that_are_gone_do_not_shrink_the_denominator() -> None:
    snapshot = fleet([node(n) for n in range(1, 9)], {"a": 10})

    dispatch = decide(snapshot, [waiter(n) for n in range(1, 9)], policy(9, 50))

    # Half of ten, less the two that are missing; half of the eight that are left would be two.
    assert len(dispatch.admitted) == 3


def test_a_long_list_of_unavailable_nodes_is_cut() -> None:
    snapshot = fleet([node(1), *(node(n, is_unschedulable=True) for n in range(2, 12))])
    reason = decide(snapshot, [waiter(1)], policy(5)).kept[0].reason
    assert reason.text.endswith("(n10, n11, n2, n3, n4, …)")


def test_a_budget_of_nothing_names_no_nodes() -> None:
    reason = decide(fleet([node(1)]), [waiter(1)], policy(0)).kept[0].reason
    assert reason.text == "0 of at most 0 nodes of the cluster are unavailable"


# --- order ----------------------------------------------------------------------------------------


def test_severity_decides_then_age_then_the_id() -> None:
    old = NOW - timedelta(hours=1)
    waiters = [
        waiter(1, Verdict.DEGRADED, opened_at=old),
        waiter(2, Verdict.FATAL),
        waiter(3, Verdict.FATAL, opened_at=old),
        waiter(4, Verdict.FATAL),
        waiter(5, None),  # by hand: a person's word is as urgent as a fatal fault
    ]
    plans = {FaultClass.XID: (Rung.REPLACE,)}
    snapshot = fleet(node(n) for n in range(1, 6))

    dispatch = decide(snapshot, waiters, policy(9, plans=plans))

    assert admitted(dispatch) == ["inc-003", "inc-002", "inc-004", "inc-005", "inc-001"]


def test_the_order_of_the_input_does_not_matter() -> None:
    snapshot = fleet(node(n) for n in range(1, 9))
    waiters = [waiter(n) for n in range(1, 9)]
    assert decide(snapshot, waiters, policy(3)) == decide(snapshot, waiters[::-1], policy(3))


# --- rate -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ages", "per_hour", "per_day", "kept"),
    [
        ([10, 20], 2, 20, "2 of at most 2 replacements this hour"),
        ([10, 3600], 2, 20, ""),  # an hour ago is not within the hour
        ([10, 3599], 2, 20, "this hour"),
        ([7200] * 3, 4, 3, "3 of at most 3 replacements this day"),
        ([86400] * 3, 4, 3, ""),
        ([86399] * 3, 4, 3, "this day"),
    ],
)
def test_replacements_per_hour_and_per_day(
    ages: list[int], per_hour: int, per_day: int, kept: str
) -> None:
    rate = Limits(MaxUnavailable(5, 100), ReplacementRate(per_hour, per_day))
    guard = Guard(CLUSTER, replacements=started(*(NOW - timedelta(seconds=age) for age in ages)))

    dispatch = decide(fleet([node(1)]), [waiter(1)], policy(limits=rate), guard)

    if kept:
        assert dispatch.kept[0].reason.code == "rate_limit"
        assert kept in dispatch.kept[0].reason.text
    else:
        assert admitted(dispatch) == ["inc-001"]


def test_replacements_of_one_decision_count_among_each_other() -> None:
    rate = Limits(MaxUnavailable(50, 100), ReplacementRate(2, 20))
    snapshot = fleet(node(n) for n in range(1, 6))

    dispatch = decide(snapshot, [waiter(n) for n in range(1, 6)], policy(limits=rate))

    assert len(dispatch.admitted) == 2
    # Each time is the name of its unit, so that a release can give back exactly its own.
    assert dispatch.guard.replacements == (
        Replacement(NOW, "a"),
        Replacement(NOW + timedelta(microseconds=1), "a"),
    )
    assert {one.taken_at for one in dispatch.guard.slots.values()} == {
        one.at for one in dispatch.guard.replacements
    }


def test_what_is_older_than_a_day_is_forgotten() -> None:
    guard = Guard(CLUSTER, replacements=started(NOW - timedelta(days=2), NOW - timedelta(hours=2)))
    dispatch = decide(fleet([node(1)]), [waiter(1)], policy(), guard)
    assert dispatch.guard.replacements == (
        *started(NOW - timedelta(hours=2)),
        Replacement(NOW, "a"),
    )


@pytest.mark.parametrize("mode", [Mode.DRY_RUN, Mode.CORDON_ONLY])
def test_what_replaces_nothing_uses_up_no_rate(mode: Mode) -> None:
    rate = Limits(MaxUnavailable(5, 100), ReplacementRate(0, 0))
    dispatch = decide(fleet([node(1)]), [waiter(1)], policy(mode=mode, limits=rate))
    assert admitted(dispatch) == ["inc-001"]
    assert dispatch.guard.replacements == ()


# --- slots ----------------------------------------------------------------------------------------


def test_a_slot_is_leave_and_lease_in_one() -> None:
    dispatch = decide(fleet([node(1)]), [waiter(1)], policy())

    assert dispatch.guard.slots == {"u1": slot(1)}
    assert dispatch.admitted[0].group == "a"
    assert str(dispatch.admitted[0].reason) == "admitted: XID 79"


def test_a_node_that_another_incident_holds_is_busy() -> None:
    guard = guard_with(slot(1, incident_id="inc-999"))
    dispatch = decide(fleet([node(1), node(2)]), [waiter(1)], policy(), guard)

    assert dispatch.kept[0].reason.code == "node_busy"
    assert "incident inc-999 holds n1" in dispatch.kept[0].reason.text


def test_all_slots_of_a_cluster_can_be_taken() -> None:
    guard = guard_with(*(slot(n) for n in range(100, 100 + MAX_SLOTS)))
    snapshot = fleet([node(1)], {"a": 10_000})

    dispatch = decide(snapshot, [waiter(1)], policy(1000), guard)

    assert "all 50 slots" in dispatch.kept[0].reason.text


def test_after_a_death_between_guard_and_record_the_slot_is_taken_up_and_counted_once() -> None:
    rate = Limits(MaxUnavailable(1, 100), ReplacementRate(1, 1))
    rules = policy(limits=rate)
    snapshot = fleet([node(1), node(2)])
    first = decide(snapshot, [waiter(1)], rules)

    again = decide(snapshot, [waiter(1), waiter(2)], rules, first.guard)

    assert admitted(again) == ["inc-001"]
    assert again.guard == first.guard
    assert [one.incident.id for one in again.kept] == ["inc-002"]


# --- who ends here --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "incident", "outcome", "code"),
    [
        (None, {}, Outcome.SUPERSEDED, "already_gone"),
        ({"is_deleting": True}, {}, Outcome.SKIPPED, "other_remediator"),
        (
            {"taints": (Taint("ToBeDeletedByClusterAutoscaler", "NoSchedule"),)},
            {},
            Outcome.SKIPPED,
            "other_remediator",
        ),
        (
            {"ref": replace(node(1).ref, instance_id="i-0000beef")},
            {},
            Outcome.SUPERSEDED,
            "node_replaced",
        ),
        ({"created_at": NOW - timedelta(minutes=29)}, {}, Outcome.SKIPPED, "warm_up"),
        ({}, {"findings": (finding(Verdict.SUSPECT),)}, Outcome.OBSERVED, "suspect_only"),
        ({}, {"findings": (finding(Verdict.APPLICATION),)}, Outcome.OBSERVED, "application_only"),
        (
            {},
            {"findings": (finding(fault_class=FaultClass.THERMAL),)},
            Outcome.OBSERVED,
            "no_terminal_action",
        ),
    ],
)
def test_a_waiter_that_cannot_act_ends_without_a_slot(
    change: dict[str, Any] | None, incident: dict[str, Any], outcome: Outcome, code: str
) -> None:
    nodes = [node(2)] if change is None else [node(1, **change), node(2)]

    dispatch = decide(fleet(nodes), [waiter(1, **incident)], policy())

    (ended,) = dispatch.ended
    assert (ended.outcome, ended.reason.code) == (outcome, code)
    assert dispatch.guard.slots == {}


@pytest.mark.parametrize("word", ["n1", "i-00000001"])
def test_what_the_operator_excluded_is_left_alone(word: str) -> None:
    (ended,) = decide(fleet([node(1)]), [waiter(1)], policy(exclude=(word,))).ended
    assert (ended.outcome, ended.reason.code) == (Outcome.SKIPPED, "excluded")


@pytest.mark.parametrize("state", ["Terminating:Wait", "Standby", "Pending", "Detached"])
def test_a_waiter_whose_group_has_given_its_instance_up_ends_before_slot_and_rate(
    state: str,
) -> None:
    snapshot = fleet([node(1), node(2)])
    group = replace(snapshot.groups["a"], instances={"i-00000001": state})
    rate = Limits(MaxUnavailable(0, 100), ReplacementRate(0, 0))

    dispatch = decide(replace(snapshot, groups={"a": group}), [waiter(1)], policy(limits=rate))

    (ended,) = dispatch.ended
    assert (ended.outcome, ended.reason.code) == (Outcome.SKIPPED, "other_remediator")
    assert f"i-00000001 is {state} in a" in ended.reason.text
    assert (dispatch.guard.slots, dispatch.guard.replacements) == ({}, ())


def test_by_hand_what_a_scan_attached_neither_ends_nor_delays_the_waiter() -> None:
    asked = waiter(1, None, findings=(finding(Verdict.SUSPECT),))
    rules = policy(plans={FaultClass.XID: ()}, startup_grace_s=10**6)
    snapshot = fleet([node(1), node(2), node(3)])

    dispatch = decide(snapshot, [waiter(2, Verdict.DEGRADED), asked], rules)

    assert admitted(dispatch) == ["inc-001"]


def test_a_node_of_exactly_the_grace_or_of_unknown_age_is_a_candidate() -> None:
    for created_at in (NOW - timedelta(minutes=30), None):
        snapshot = fleet([node(1, created_at=created_at)])
        assert admitted(decide(snapshot, [waiter(1)], policy())) == ["inc-001"]


def test_a_plan_of_a_person_alone_cordons_nothing() -> None:
    rules = policy(rules={"xid-count": RulePolicy(plan=(Rung.HUMAN,))})
    (ended,) = decide(fleet([node(1)]), [waiter(1)], rules).ended
    assert ended.reason.code == "no_terminal_action"


# --- leases ---------------------------------------------------------------------------------------


def test_a_lease_is_extended_and_never_shortened() -> None:
    guard = guard_with(slot(1))
    longer = renew(guard, waiter(1), until=NOW + timedelta(hours=1))
    assert longer.slots["u1"].expires_at == NOW + timedelta(hours=1)
    assert renew(longer, waiter(1), until=NOW) == longer


@pytest.mark.parametrize("guard", [guard_with(), guard_with(slot(1, incident_id="inc-999"))])
def test_a_lease_that_is_not_held_cannot_be_renewed(guard: Guard) -> None:
    with pytest.raises(LeaseLostError, match="inc-001 holds no slot for n1"):
        renew(guard, waiter(1), until=NOW)
    assert not is_lease_valid(guard, waiter(1), now=NOW, remaining_s=0)


@pytest.mark.parametrize(("remaining_s", "is_valid"), [(599, True), (600, False), (601, False)])
def test_a_lease_must_outlive_the_rest_of_the_invocation(remaining_s: int, is_valid: bool) -> None:
    guard = guard_with(slot(1))
    assert is_lease_valid(guard, waiter(1), now=NOW, remaining_s=remaining_s) is is_valid


def test_a_release_gives_back_this_incidents_slot_only() -> None:
    guard = guard_with(slot(1), slot(2))
    assert set(release(guard, "inc-001").slots) == {"u2"}
    assert release(guard, "inc-777") is guard


def test_a_release_refunds_exactly_its_own_unit_of_the_rate_where_nothing_was_replaced() -> None:
    snapshot = fleet(node(n) for n in range(1, 4))
    guard = Guard(CLUSTER, replacements=started(NOW - timedelta(minutes=5)))
    guard = decide(snapshot, [waiter(1), waiter(2)], policy(), guard).guard
    assert len(guard.replacements) == 3

    refunded = release(guard, "inc-001", refunds=True)
    assert [one.at for one in refunded.replacements] == [
        NOW - timedelta(minutes=5),
        guard.slots["u2"].taken_at,
    ]
    assert release(guard, "inc-001").replacements == guard.replacements
    assert release(refunded, "inc-001", refunds=True) is refunded


def test_a_slot_may_be_taken_over_only_long_after_its_lease() -> None:
    guard = guard_with(slot(1))
    end = NOW + FIRST_LEASE
    assert expired_slots(guard, end + timedelta(seconds=120)) == []
    assert expired_slots(guard, end + timedelta(seconds=121)) == [slot(1)]


# --- GPUs -----------------------------------------------------------------------------------------


def test_a_node_should_have_as_many_gpus_as_its_best_peer() -> None:
    snapshot = fleet(
        [
            node(1, gpu_capacity=7),
            node(2),
            node(3, gpu_capacity=16, labels={"group": "a", INSTANCE_TYPE_LABEL: "other"}),
        ]
    )
    table = {"p5.48xlarge": 8, "p4d.24xlarge": 4}
    assert snapshot.expected_gpus(node(1, gpu_capacity=7), table) == 8
    lonely = node(4, gpu_capacity=0, labels={"group": "", INSTANCE_TYPE_LABEL: "p4d.24xlarge"})
    assert snapshot.expected_gpus(lonely, table) == 4
    unknown = node(4, gpu_capacity=0, labels={"group": "", INSTANCE_TYPE_LABEL: "x"})
    assert snapshot.expected_gpus(unknown, table) == 0


@pytest.mark.parametrize(
    ("offered", "gpus"), [(8, 8), (0, 0), (56, 56), (2, 2)], ids=["whole", "mig", "slices", "few"]
)
def test_nodes_of_a_type_offer_what_their_peers_offer_and_report_what_the_table_says(
    offered: int, gpus: int
) -> None:
    table = {"p5.48xlarge": 8}
    mine = node(1, gpu_capacity=0)
    snapshot = fleet([mine, node(2, gpu_capacity=offered)])

    assert snapshot.expected_gpus(mine, table) == gpus
    assert snapshot.expected_uuids(mine, table) == 8


def test_a_node_of_an_unknown_type_reports_as_many_gpus_as_it_has_and_at_least_one() -> None:
    assert FleetSnapshot.expected_uuids(node(1, gpu_capacity=4), {}) == 4
    assert FleetSnapshot.expected_uuids(node(1, gpu_capacity=0), {}) == 1


# --- properties -----------------------------------------------------------------------------------

SIZES = st.integers(1, 12)
VERDICTS = st.sampled_from([*Verdict, None])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("fault"), st.integers(1, 12), VERDICTS),
        st.tuples(st.just("release"), st.integers(1, 12), st.none()),
        st.tuples(st.just("vanish"), st.integers(1, 12), st.none()),
        st.tuples(st.just("join"), st.integers(1, 12), st.none()),
        st.tuples(st.just("cordon"), st.integers(1, 12), st.none()),
        st.tuples(st.just("uncordon"), st.integers(1, 12), st.none()),
        st.tuples(st.just("wait"), st.integers(1, 12), st.none()),
    ),
    max_size=40,
)


class World:
    """A fleet to which things happen, and the guard that decides over them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.guard = Guard(CLUSTER)
        self.now = NOW
        self.cordoned: set[int] = set()
        self.vanished: set[int] = set()
        """Nodes that the group cannot launch; desired capacity counts them still."""
        self.waiting: dict[int, Incident] = {}
        self.serial = 0

    def happen(self, what: str, number: int, verdict: Verdict | None) -> None:
        """Let one thing happen."""
        match what:
            case "fault" if number <= self.size and number not in self.waiting:
                self.serial += 1
                fresh = replace(waiter(number, verdict), id=f"inc-{self.serial:04}")
                self.waiting[number] = replace(fresh, opened_at=self.now)
            case "release" if f"u{number}" in self.guard.slots:
                self.guard = release(self.guard, self.guard.slots[f"u{number}"].incident_id)
            case "vanish":
                self.vanished.add(number)
            case "join":
                self.vanished.discard(number)
            case "cordon":
                self.cordoned.add(number)
            case "uncordon":
                self.cordoned.discard(number)
            case "wait":
                self.now += timedelta(seconds=number * 400)

    def snapshot(self) -> FleetSnapshot:
        """The fleet as it is."""
        numbers = set(range(1, self.size + 1)) - self.vanished
        nodes = [node(n, is_unschedulable=n in self.cordoned) for n in sorted(numbers)]
        return fleet(nodes, {"a": self.size})

    def decide(self, rules: Policy) -> Dispatch:
        """Decide, and let those who are admitted or ended wait no longer."""
        inputs = tuple(self.waiting.values())
        dispatch = decide_dispatch(self.guard, self.snapshot(), inputs, rules, self.now)
        again = decide_dispatch(self.guard, self.snapshot(), inputs[::-1], rules, self.now)
        assert dispatch == again
        everyone: tuple[Admitted | Kept | Ended, ...] = (
            *dispatch.admitted,
            *dispatch.kept,
            *dispatch.ended,
        )
        assert {one.incident.id for one in everyone} == {one.id for one in inputs}
        assert all(one.reason.code and one.reason.text for one in everyone)
        still = {one.incident.id for one in dispatch.kept}
        self.waiting = {n: one for n, one in self.waiting.items() if one.id in still}
        self.guard = dispatch.guard
        return dispatch


@settings(max_examples=120, deadline=None)
@given(
    size=SIZES,
    count=st.integers(0, 6),
    percent=st.floats(0, 100),
    per_hour=st.integers(0, 4),
    steps=STEPS,
)
def test_no_sequence_of_events_ever_exceeds_budget_or_rate(
    size: int, count: int, percent: float, per_hour: int, steps: list[Any]
) -> None:
    limit = MaxUnavailable(count, percent)
    rules = policy(limits=Limits(limit, ReplacementRate(per_hour, 6)))
    world = World(size)
    for step in steps:
        world.happen(*step)
        held = set(world.guard.slots)

        dispatch = world.decide(rules)

        new = [one for one in dispatch.admitted if one.node.ref.uid not in held]
        if new:
            guard, hour = world.guard, timedelta(hours=1)
            assert len(unavailable(guard, world.snapshot(), None, besides="")) <= limit.of(size)
            assert sum(world.now - one.at < hour for one in guard.replacements) <= per_hour
            assert len(guard.replacements) <= 6
        for one in dispatch.admitted:
            primary = one.incident.primary
            assert primary is None or primary.verdict.is_actionable
            assert world.guard.slots[one.node.ref.uid].incident_id == one.incident.id
