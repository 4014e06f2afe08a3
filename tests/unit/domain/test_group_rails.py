"""What binds in one Auto Scaling group besides the cluster's own limits."""

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from nodemend.domain.breaker import Burst
from nodemend.domain.dispatch import Dispatch, decide_dispatch
from nodemend.domain.faults import Mode
from nodemend.domain.guard import Guard, Replacement
from nodemend.domain.incidents import Incident
from nodemend.domain.nodes import Readiness
from nodemend.domain.policy import (
    BreakerLimits,
    GroupLimits,
    GroupPolicy,
    Limits,
    MaxUnavailable,
    Policy,
    ReplacementRate,
)
from tests.unit.domain.test_guard import CLUSTER, NOW, finding, fleet, node, waiter

ROOM = MaxUnavailable(50, 100)
WIDE = BreakerLimits(percent=100, min_nodes=2000)


def rules(
    group: str = "a",
    *,
    rate: ReplacementRate | None = None,
    breaker: BreakerLimits | None = None,
    cluster_breaker: BreakerLimits = WIDE,
) -> Policy:
    """Limits for the nodes of one group; the cluster's own leave room for everything."""
    own = GroupLimits(ROOM, rate, breaker)
    return Policy(
        mode=Mode.ENFORCE,
        limits=Limits(ROOM, ReplacementRate(100, 1000), cluster_breaker),
        groups=(GroupPolicy({"group": group}, limits=own),),
        hold_s={},
    )


def two_groups(**changes: Any) -> list[Any]:
    """Twenty nodes of group a, then twenty of group b."""
    return [
        node(n, labels=node(n).labels | {"group": "a" if n <= 20 else "b"}, **changes)
        for n in range(1, 41)
    ]


def sick(numbers: Iterable[int]) -> list[Incident]:
    return [
        waiter(
            n,
            findings=(finding(),),
            node_labels={"group": "a" if n <= 20 else "b"},
            first_seen={"xid": NOW},
        )
        for n in numbers
    ]


def decide(
    policy: Policy, waiters: Iterable[Incident], guard: Guard | None = None, **more: Any
) -> Dispatch:
    snapshot = fleet(more.pop("nodes", two_groups()))
    return decide_dispatch(
        guard or Guard(CLUSTER), snapshot, waiters, policy, more.pop("now", NOW), **more
    )


def admitted(dispatch: Dispatch) -> set[str]:
    return {one.group for one in dispatch.admitted}


def codes(dispatch: Dispatch) -> dict[str, set[str]]:
    """Reasons for waiting, by group."""
    found: dict[str, set[str]] = {}
    for one in dispatch.kept:
        found.setdefault(one.incident.node_labels["group"], set()).add(one.reason.code)
    return found


def test_a_groups_own_rate_counts_its_own_replacements_only() -> None:
    policy = rules(rate=ReplacementRate(per_hour=2, per_day=20))
    elsewhere = Guard(CLUSTER, replacements=(Replacement(NOW, "b"), Replacement(NOW, "b")))

    free = decide(policy, sick([1, 2, 3, 21, 22, 23]), elsewhere)

    assert [one.group for one in free.admitted] == ["a", "a", "b", "b", "b"]
    assert codes(free) == {"a": {"rate_limit"}}
    assert "2 of at most 2 replacements of group a this hour" in free.kept[0].reason.text


@pytest.mark.parametrize(("ago_h", "is_kept"), [(2, True), (23, True), (24, False)])
def test_a_groups_rate_per_day_ends_with_the_day(ago_h: int, is_kept: bool) -> None:
    policy = rules(rate=ReplacementRate(per_hour=9, per_day=1))
    guard = Guard(CLUSTER, replacements=(Replacement(NOW - timedelta(hours=ago_h), "a"),))

    assert (codes(decide(policy, sick([1]), guard)) == {"a": {"rate_limit"}}) is is_kept


def test_the_clusters_rate_binds_in_the_group_too() -> None:
    policy = replace(
        rules(rate=ReplacementRate(100, 1000)), limits=Limits(ROOM, ReplacementRate(1, 20), WIDE)
    )

    assert len(decide(policy, sick([1, 2, 21])).admitted) == 1


def test_a_groups_breaker_holds_its_own_nodes_and_no_others() -> None:
    policy = rules(breaker=BreakerLimits())

    dispatch = decide(policy, sick([1, 2, 3, 4, 21, 22]))  # 20 % of 20

    assert admitted(dispatch) == {"b"}
    assert codes(dispatch) == {"a": {"breaker_open"}}
    assert dispatch.guard.breaker is None
    [event] = dispatch.guard.events
    assert (event.change, event.data["group"], event.data["count"], event.data["desired"]) == (
        "breaker_opened",
        "a",
        4,
        20,
    )
    assert "4 of 20 nodes of group a within 600 s" in event.reason.text


def test_below_its_bound_a_groups_breaker_stays_closed() -> None:
    dispatch = decide(rules(breaker=BreakerLimits()), sick([1, 2, 3]))

    assert (len(dispatch.admitted), dispatch.guard.group_breakers) == (3, {})


def test_a_group_that_is_down_opens_its_own_breaker() -> None:
    nodes = [
        replace(one, readiness=Readiness.UNKNOWN if n <= 6 else Readiness.READY)
        for n, one in enumerate(two_groups(), 1)
    ]

    dispatch = decide(rules(breaker=BreakerLimits()), sick([10, 30]), nodes=nodes)

    assert admitted(dispatch) == {"b"}
    assert "6 of 20 nodes of group a are not ready" in dispatch.kept[0].reason.text


def test_a_burst_that_a_scan_noted_counts_in_the_group_of_its_nodes() -> None:
    names = tuple(node(n).ref.name for n in range(1, 8))
    guard = Guard(CLUSTER, bursts=(Burst("xid/79", NOW, "xid-new", names),))

    dispatch = decide(rules(breaker=BreakerLimits()), sick([1, 30]), guard)

    assert admitted(dispatch) == {"b"}


def test_a_groups_breaker_closes_after_its_own_cool_down_and_says_so() -> None:
    policy = rules(breaker=BreakerLimits(cooldown_s=300))
    opened = decide(policy, sick([1, 2, 3, 4])).guard
    stored = replace(opened, events=(), version=7)

    early = decide(policy, [], stored, now=NOW + timedelta(seconds=299))
    late = decide(policy, [], stored, now=NOW + timedelta(seconds=300))

    assert "a" in early.guard.group_breakers
    assert late.guard.group_breakers == {}
    [event] = late.guard.events
    assert (event.change, event.data["group"]) == ("breaker_closed", "a")


def test_only_a_look_at_all_waiters_closes_it() -> None:
    policy = rules(breaker=BreakerLimits())
    stored = replace(decide(policy, sick([1, 2, 3, 4])).guard, events=())

    look = decide(policy, [], stored, now=NOW + timedelta(days=1), knows_all=False)

    assert "a" in look.guard.group_breakers


def test_a_breaker_of_a_group_that_lost_its_limits_cools_down() -> None:
    stored = replace(decide(rules(breaker=BreakerLimits()), sick([1, 2, 3, 4])).guard, events=())

    assert "a" in decide(rules(), [], stored, now=NOW + timedelta(minutes=29)).guard.group_breakers
    assert decide(rules(), [], stored, now=NOW + timedelta(minutes=30)).guard.group_breakers == {}


def test_a_storm_over_the_whole_cluster_is_one_event() -> None:
    policy = rules(breaker=BreakerLimits(), cluster_breaker=BreakerLimits())

    dispatch = decide(policy, sick(range(1, 41)))

    assert dispatch.admitted == ()
    assert [(one.change, one.data["group"]) for one in dispatch.guard.events] == [
        ("breaker_opened", "")
    ]


def test_breakers_of_two_groups_that_open_in_one_write_are_two_events() -> None:
    own = GroupLimits(ROOM, None, BreakerLimits())
    policy = replace(
        rules(),
        groups=(GroupPolicy({"group": "a"}, limits=own), GroupPolicy({"group": "b"}, limits=own)),
    )

    dispatch = decide(policy, sick([*range(1, 6), *range(21, 26)]))

    assert len({one.event_id for one in dispatch.guard.events}) == 2
    assert set(dispatch.guard.group_breakers) == {"a", "b"}


def test_what_the_groups_breaker_held_until_it_is_past_is_not_replayed() -> None:
    policy = rules(breaker=BreakerLimits())
    first = decide(policy, sick([1, 2, 3, 4]))
    held = [replace(one.incident, waiting_for=one.reason.code) for one in first.kept]

    later = decide(policy, held, replace(first.guard, events=()), now=NOW + timedelta(days=2))

    assert {one.reason.code for one in later.ended} == {"expired"}
    assert later.admitted == ()


def test_what_is_past_before_it_was_told_of_its_groups_breaker_is_not_replayed_either() -> None:
    policy = rules(breaker=BreakerLimits())
    opened = replace(decide(policy, sick([1, 2, 3, 4])).guard, events=())
    [old] = [replace(one, last_seen=NOW - timedelta(hours=1)) for one in sick([5])]
    old = replace(old, opened_at=NOW - timedelta(hours=1), first_seen={})

    dispatch = decide(policy, [old], opened, now=NOW + timedelta(minutes=16))

    assert [one.reason.code for one in dispatch.ended] == ["expired"]
