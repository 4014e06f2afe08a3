"""The breaker: one fault on many nodes stops all new disruption, and nothing else does."""

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodemend.domain.breaker import Breaker, Sighting, Trip, next_breaker, why_trip
from nodemend.domain.dispatch import Dispatch, decide_dispatch
from nodemend.domain.faults import FaultClass, FaultKind, Mode, Rung, Verdict
from nodemend.domain.findings import Finding
from nodemend.domain.fleet import FleetSnapshot, FleetView
from nodemend.domain.guard import MAX_SIGHTINGS, Guard, Pause, pause, release, resume, told
from nodemend.domain.incidents import Incident, Outcome
from nodemend.domain.nodes import Readiness
from nodemend.domain.policy import BreakerLimits, Limits, MaxUnavailable, Policy, ReplacementRate
from nodemend.domain.rails import EXCLUDE_LABEL, PAUSE_ANNOTATION
from nodemend.domain.reasons import Reason
from tests.unit.domain.oracle import unavailable
from tests.unit.domain.test_guard import CLUSTER, NOW, finding, fleet, node, slot, waiter

MINUTE = timedelta(minutes=1)
LIMITS = BreakerLimits()
LEVEL = {
    "fault_class": FaultClass.THERMAL,
    "kind": FaultKind.LEVEL,
    "code": None,
    "summary": "GPU is hot",
}


def sick(
    number: int,
    *findings: Finding,
    at: datetime = NOW,
    last_seen: datetime | None = None,
    **more: Any,
) -> Incident:
    """A waiter that a scan opened at a time; all share XID 79 unless told otherwise."""
    found = findings or (finding(),)
    return waiter(
        number,
        opened_at=at,
        findings=tuple(replace(one, evidence=replace(one.evidence, at=at)) for one in found),
        first_seen={str(one.fault_class): at for one in found},
        last_seen=last_seen or at,
        **more,
    )


def policy(count: int = 50, percent: float = 100, **changes: Any) -> Policy:
    values: dict[str, Any] = {
        "mode": Mode.ENFORCE,
        "limits": Limits(MaxUnavailable(count, percent), ReplacementRate(100, 1000)),
        "plans": {FaultClass.THERMAL: (Rung.REPLACE,), FaultClass.NVLINK: (Rung.REPLACE,)},
        "hold_s": {},
    }
    return Policy(**(values | changes))


def decide(
    guard: Guard,
    waiters: Iterable[Incident],
    *,
    size: int = 40,
    now: datetime = NOW,
    rules: Policy | None = None,
    down: int = 0,
    knows_all: bool = True,
    **changes: Any,
) -> Dispatch:
    """Decide over a fleet of which the last `down` nodes are not ready."""
    nodes = [
        node(n, readiness=Readiness.UNKNOWN if n > size - down else Readiness.READY, **changes)
        for n in range(1, size + 1)
    ]
    return decide_dispatch(
        guard, fleet(nodes), waiters, rules or policy(), now, knows_all=knows_all
    )


def stored(dispatch: Dispatch, *, is_sent: bool = True) -> Guard:
    """The guard as the next dispatcher reads it."""
    guard = replace(dispatch.guard, version=dispatch.guard.version + 1)
    return replace(guard, events=()) if is_sent else guard


def kept_as(dispatch: Dispatch) -> list[Incident]:
    """The kept waiters as the dispatcher records them."""
    return [replace(one.incident, waiting_for=one.reason.code) for one in dispatch.kept]


def codes(dispatch: Dispatch) -> set[str]:
    return {one.reason.code for one in dispatch.kept}


def changes(dispatch: Dispatch) -> list[str]:
    return [event.change for event in dispatch.guard.events]


# --- when it opens --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sick_nodes", "size", "is_open"),
    [
        (2, 8, False),
        (3, 8, True),  # min_nodes, as 20 % of 8 is less
        (7, 40, False),
        (8, 40, True),  # 20 % of 40
        (8, 41, False),  # 8.2 rounds up to 9
        (9, 41, True),
        (1, 1, False),  # one node is no fleet
        (2, 2, True),  # all nodes at once, though fewer than min_nodes
    ],
)
def test_it_opens_at_the_larger_of_min_nodes_and_percent_or_when_all_match(
    sick_nodes: int, size: int, is_open: bool
) -> None:
    dispatch = decide(Guard(CLUSTER), [sick(n) for n in range(1, sick_nodes + 1)], size=size)

    assert (dispatch.guard.breaker is not None) is is_open
    assert (len(dispatch.admitted) == 0) is is_open


@pytest.mark.case("R37")
def test_r37_a_rule_that_matches_every_node_is_a_bad_query_and_cordons_none() -> None:
    hot = finding(Verdict.FATAL, **LEVEL)

    dispatch = decide(Guard(CLUSTER), [sick(n, hot) for n in range(1, 41)])

    assert dispatch.admitted == ()
    assert len(dispatch.kept) == 40
    (event,) = dispatch.guard.events
    assert (event.change, event.reason.code) == ("breaker_opened", "fleet_signal_suspect")
    assert (event.data["count"], event.data["bound"], event.data["desired"]) == (40, 8, 40)
    assert (event.data["fault"], event.data["rule_id"]) == ("thermal", "xid-count")
    assert "every node of the cluster" in event.reason.text
    assert "bad query" in event.reason.text
    text = dispatch.kept[0].reason.text
    assert "thermal (rule xid-count)" in text
    assert "no new remediation before 10:30 UTC" in text


@pytest.mark.case("R78")
def test_r78_one_reason_on_a_large_share_of_the_fleet_is_a_suspect_signal() -> None:
    link = finding(Verdict.FATAL, **{**LEVEL, "fault_class": FaultClass.NVLINK})
    flipped = [sick(n, link, at=NOW - timedelta(seconds=20 * n)) for n in range(1, 31)]

    dispatch = decide(Guard(CLUSTER), flipped, size=100)

    assert dispatch.admitted == ()
    assert codes(dispatch) == {"breaker_open"}
    assert dispatch.guard.events[0].reason.code == "fleet_signal_suspect"
    assert "30 of 100 nodes within 600 s; the bound is 20 nodes" in dispatch.kept[0].reason.text


@pytest.mark.case("D24")
def test_d24_a_crashed_job_on_77_nodes_cordons_none() -> None:
    """The gauge of an application XID alone never acts; with a fatal verdict the brake holds."""
    job = finding(Verdict.APPLICATION, code=45, summary="XID 45")
    alone = decide(Guard(CLUSTER), [sick(n, job) for n in range(1, 78)], size=288)
    assert alone.admitted == ()
    assert {one.outcome for one in alone.ended} == {Outcome.OBSERVED}
    assert alone.guard.breaker is None, "what disrupts nothing needs no brake"

    fatal = finding(code=45)
    held = decide(Guard(CLUSTER), [sick(n, fatal) for n in range(1, 78)], size=288)
    assert held.admitted == ()
    assert held.guard.breaker is not None
    assert held.guard.breaker.trip.fault == "xid/45"


@pytest.mark.case("D23")
def test_d23_xid_45_never_acts_alone_however_often_it_comes() -> None:
    again = [
        finding(Verdict.APPLICATION, code=45, gpu_index=str(n), summary="XID 45") for n in range(5)
    ]

    dispatch = decide(Guard(CLUSTER), [sick(1, *again)])

    assert dispatch.admitted == ()
    assert dispatch.ended[0].reason.code == "application_only"


def test_codes_are_counted_apart_and_so_are_classes() -> None:
    mixed = [sick(n, finding(code=70 + n)) for n in range(1, 7)]
    mixed += [sick(7, finding(Verdict.FATAL, **LEVEL)), sick(8)]

    assert len(decide(Guard(CLUSTER), mixed).admitted) == 8


def test_a_second_fault_of_the_nodes_counts_as_well_as_the_deciding_one() -> None:
    shared = finding(Verdict.DEGRADED, **LEVEL)
    waiters = [sick(n, finding(code=60 + n), shared) for n in range(1, 9)]

    dispatch = decide(Guard(CLUSTER), waiters)

    assert dispatch.guard.breaker is not None
    assert dispatch.guard.breaker.trip.fault == "thermal"


def test_one_node_with_many_gpus_counts_once() -> None:
    many = [finding(gpu_index=str(n), gpu_uuid=f"GPU-{n}") for n in range(8)]
    assert decide(Guard(CLUSTER), [sick(1, *many)], size=8).guard.breaker is None


def test_what_is_spread_over_more_than_the_window_is_no_burst() -> None:
    slow = [sick(n, at=NOW - n * timedelta(minutes=11)) for n in range(1, 9)]
    fast = [sick(n, at=NOW - n * timedelta(minutes=1)) for n in range(1, 9)]

    assert decide(Guard(CLUSTER), slow, size=8).guard.breaker is not None, "all nodes at once"
    assert decide(Guard(CLUSTER), slow).guard.breaker is None
    assert decide(Guard(CLUSTER), fast).guard.breaker is not None


def test_what_piled_up_while_nobody_looked_is_seen_as_the_burst_that_it_was() -> None:
    hot = finding(Verdict.FATAL, **LEVEL)
    old = [sick(n, hot, at=NOW - timedelta(hours=3), last_seen=NOW) for n in range(1, 20)]
    assert decide(Guard(CLUSTER), old).guard.breaker is not None


def test_a_storm_that_comes_node_by_node_is_stopped_by_what_was_let_go_before() -> None:
    guard = Guard(CLUSTER)
    let_go = 0
    for number in range(1, 21):
        dispatch = decide(guard, [sick(number)], now=NOW + number * timedelta(seconds=5))
        let_go += len(dispatch.admitted)
        guard = stored(dispatch)

    assert let_go == 7, "the eighth of 40 opens it"
    assert guard.breaker is not None


def test_the_guard_forgets_sightings_that_are_older_than_the_window() -> None:
    guard = Guard(CLUSTER)
    for number in range(1, 21):
        now = NOW + number * timedelta(minutes=11)
        dispatch = decide(guard, [sick(number, at=now)], now=now)
        assert len(dispatch.admitted) == 1
        guard = stored(dispatch)
    assert len(guard.sightings) == 1


def test_the_guard_item_stays_small() -> None:
    loose = replace(
        policy(), limits=Limits(MaxUnavailable(50, 100), breaker=BreakerLimits(100, 2000))
    )
    many = [[finding(code=100 * n + m) for m in range(4)] for n in range(1, 31)]
    waiters = [sick(n, *found) for n, found in enumerate(many, 1)]

    assert len(decide(Guard(CLUSTER), waiters, rules=loose).guard.sightings) <= MAX_SIGHTINGS


# --- nodes that are down --------------------------------------------------------------------------


@pytest.mark.parametrize(("down", "is_open"), [(8, False), (9, True)])
def test_more_than_the_bound_of_nodes_down_opens_it(down: int, is_open: bool) -> None:
    dispatch = decide(Guard(CLUSTER), [sick(1)], down=down)

    assert (dispatch.guard.breaker is not None) is is_open
    if is_open:
        assert dispatch.guard.events[0].reason.code == "fleet_unhealthy"
        assert "9 of 40 nodes are not ready" in dispatch.kept[0].reason.text


@pytest.mark.parametrize(
    "change",
    [{"created_at": NOW - MINUTE}, {"is_deleting": True}],
    ids=["that start", "that leave"],
)
def test_nodes_are_not_down(change: dict[str, Any]) -> None:
    assert decide(Guard(CLUSTER), [], down=30, **change).guard.breaker is None


def test_nodes_in_our_own_hands_are_not_down() -> None:
    held = {f"u{n}": slot(n) for n in range(31, 41)}
    assert decide(Guard(CLUSTER, slots=held), [], down=10).guard.breaker is None


@pytest.mark.case("R48")
def test_r48_a_network_blip_starts_nothing_until_the_cool_down_has_passed() -> None:
    """20 nodes: 12 Unknown at t0; 6 recover after a minute; the others after two."""
    guard = Guard(CLUSTER)
    started: list[tuple[float, int]] = []
    for minute in range(60):
        now = NOW + minute * MINUTE
        down = 12 if minute < 1 else 6 if minute < 2 else 0
        still = [sick(n, finding(code=100 + n), at=now) for n in (1, 2)]
        dispatch = decide(guard, still, size=20, down=down, now=now, rules=policy(count=1))
        guard = stored(dispatch)
        if dispatch.admitted:
            started.append((minute, len(dispatch.admitted)))
            break
        assert codes(dispatch) == {"breaker_open"}

    assert started == [(31, 1)], "the last look at 30 % was in minute 1; then 30 minutes; then one"


# --- how it closes --------------------------------------------------------------------------------


def test_one_event_on_opening_and_one_on_closing() -> None:
    guard = Guard(CLUSTER)
    seen = []
    for minute in range(100):
        now = NOW + minute * MINUTE
        waiters = [sick(n, at=now) for n in range(1, 20)] if minute < 20 else []
        dispatch = decide(guard, waiters, now=now)
        seen += [(minute, change) for change in changes(dispatch)]
        guard = stored(dispatch)

    assert seen == [(0, "breaker_opened"), (49, "breaker_closed")]


def test_the_closing_event_names_what_had_opened_it() -> None:
    trip = Trip(Reason("fleet_unhealthy", "x"), 9, 8, 40)
    guard = Guard(CLUSTER, 5, breaker=Breaker(NOW, NOW + MINUTE, trip))

    (event,) = decide(guard, [], now=NOW + MINUTE).guard.events

    assert event.event_id == "guard-gpu-prod-000006-breaker-closed"
    assert event.reason.code == "cooled_down"
    assert "fleet_unhealthy" in event.reason.text


def test_a_look_at_one_waiter_opens_it_and_never_closes_it() -> None:
    trip = Trip(Reason("fleet_unhealthy", "x"), 9, 8, 40)
    guard = Guard(CLUSTER, breaker=Breaker(NOW - 60 * MINUTE, NOW - MINUTE, trip))

    held = decide(guard, [waiter(1, None)], knows_all=False)
    assert held.guard.breaker == guard.breaker
    assert codes(held) == {"breaker_open"}
    assert decide(guard, [waiter(1, None)]).guard.breaker is None
    assert decide(Guard(CLUSTER), [waiter(1, None)], down=20, knows_all=False).guard.breaker


@pytest.mark.case("R44")
def test_r44_what_the_breaker_held_is_not_replayed_when_it_closes() -> None:
    opened = decide(Guard(CLUSTER), [sick(n) for n in range(1, 31)])
    held = kept_as(opened)
    later = NOW + timedelta(days=2)

    after = decide(stored(opened), held, now=later)

    assert after.admitted == ()
    assert len(after.ended) == 30
    assert {(one.outcome, one.reason.code) for one in after.ended} == {(Outcome.SKIPPED, "expired")}
    # Also if the breaker was closed meanwhile, by whatever.
    reset = decide(Guard(CLUSTER), held, now=later)
    assert reset.admitted == ()
    assert len(reset.ended) == 30


@pytest.mark.case("R44")
def test_r44_a_level_that_is_still_reported_outlives_the_breaker() -> None:
    hot = finding(Verdict.FATAL, **LEVEL)
    held = [
        sick(
            1, hot, at=NOW - timedelta(hours=5), last_seen=NOW - MINUTE, waiting_for="breaker_open"
        ),
        sick(2, hot, at=NOW - timedelta(hours=5), waiting_for="breaker_open"),
    ]

    dispatch = decide(Guard(CLUSTER), held)

    assert [one.incident.id for one in dispatch.admitted] == ["inc-001"]
    assert [one.incident.id for one in dispatch.ended] == ["inc-002"]


def test_what_waits_for_room_does_not_expire() -> None:
    old = sick(1, at=NOW - timedelta(hours=5), waiting_for="capacity_guard")
    assert len(decide(Guard(CLUSTER), [old]).admitted) == 1


def test_a_storm_of_events_lets_the_breaker_close_by_itself() -> None:
    guard = Guard(CLUSTER)
    waiters = [sick(n) for n in range(1, 31)]
    for minute in range(120):
        dispatch = decide(guard, waiters, now=NOW + minute * MINUTE)
        assert dispatch.admitted == ()
        waiters, guard = kept_as(dispatch), stored(dispatch)
        if guard.breaker is None:
            break
    assert waiters == []
    assert minute == 45, "15 minutes until the evidence is about the past, then the cool-down"


def test_a_bad_level_rule_holds_it_open_as_long_as_the_rule_matches() -> None:
    hot = finding(Verdict.FATAL, **LEVEL)
    guard = Guard(CLUSTER)
    for hour in range(48):
        now = NOW + timedelta(hours=hour)
        waiters = [sick(n, hot, last_seen=now, waiting_for="breaker_open") for n in range(1, 41)]
        dispatch = decide(guard, waiters, now=now)
        assert dispatch.admitted == ()
        guard = stored(dispatch)


# --- pause ----------------------------------------------------------------------------------------


def test_a_pause_keeps_every_waiter_and_says_who_and_why() -> None:
    paused = pause(Guard(CLUSTER), by="alice", why="network work", now=NOW)

    dispatch = decide(paused, [sick(1), waiter(2, None)])

    assert dispatch.admitted == ()
    assert codes(dispatch) == {"paused"}
    assert dispatch.kept[0].reason.text == (
        "alice paused the cluster at 2026-05-01 10:00 UTC: network work"
    )


def test_pausing_twice_tells_once_and_the_first_words_stand() -> None:
    once = pause(Guard(CLUSTER), by="alice", why="first", now=NOW)
    assert pause(once, by="bob", why="second", now=NOW) is once
    assert once.pause == Pause("alice", "first", NOW)
    assert [event.change for event in once.events] == ["paused"]

    again = resume(once, by="bob", why="done", now=NOW)
    assert again.pause is None
    assert [event.change for event in again.events] == ["paused", "resumed"]
    assert "bob ended the pause" in again.events[1].reason.text
    assert resume(again, by="bob", why="done", now=NOW) is again


def test_events_are_dropped_when_they_were_sent() -> None:
    guard = pause(Guard(CLUSTER, 3), by="a", why="b", now=NOW)
    assert guard.events[0].event_id == "guard-gpu-prod-000004-paused"
    assert told(guard, [guard.events[0].event_id]).events == ()
    assert told(guard, ["another"]) is guard


@pytest.mark.parametrize("value", ["", "true", "disk test until Friday"])
def test_a_node_with_the_pause_annotation_waits(value: str) -> None:
    dispatch = decide(Guard(CLUSTER), [sick(1)], annotations={PAUSE_ANNOTATION: value})

    assert codes(dispatch) == {"node_paused"}
    assert (value in dispatch.kept[0].reason.text) or value == "true"


def test_a_pause_annotation_of_false_is_none() -> None:
    dispatch = decide(Guard(CLUSTER), [sick(1)], annotations={PAUSE_ANNOTATION: "False"})
    assert len(dispatch.admitted) == 1


@pytest.mark.parametrize(("value", "is_out"), [("true", True), ("false", False)])
def test_the_label_of_the_health_check_operator_keeps_off_the_node(
    value: str, is_out: bool
) -> None:
    labels = {**node(1).labels, EXCLUDE_LABEL: value}

    dispatch = decide(Guard(CLUSTER), [sick(1)], labels=labels)

    assert (len(dispatch.admitted) == 0) is is_out
    if is_out:
        assert (dispatch.ended[0].outcome, dispatch.ended[0].reason.code) == (
            Outcome.SKIPPED,
            "excluded",
        )


# --- hold times and windows -----------------------------------------------------------------------


def test_a_degraded_fault_must_last_and_a_fatal_one_need_not() -> None:
    hot = finding(Verdict.DEGRADED, **LEVEL)
    rules = policy(hold_s={Verdict.DEGRADED: 600})
    young = sick(1, hot, at=NOW - timedelta(seconds=599), last_seen=NOW)
    old = sick(2, hot, at=NOW - 10 * MINUTE, last_seen=NOW)

    dispatch = decide(Guard(CLUSTER), [young, old, sick(3)], rules=rules)

    assert [one.incident.id for one in dispatch.admitted] == ["inc-003", "inc-002"]
    assert [one.reason.code for one in dispatch.kept] == ["hold"]
    assert "has lasted 599 s" in dispatch.kept[0].reason.text


def test_a_level_that_is_not_reported_any_more_does_not_grow_old_enough_and_ends() -> None:
    hot = finding(Verdict.DEGRADED, **LEVEL)
    rules = policy(hold_s={Verdict.DEGRADED: 600})
    seen = sick(1, hot, at=NOW - 18 * MINUTE, last_seen=NOW - 10 * MINUTE)
    over = sick(2, hot, at=NOW - 18 * MINUTE, last_seen=NOW - 16 * MINUTE)

    dispatch = decide(Guard(CLUSTER), [seen, over], rules=rules)

    assert dispatch.admitted == ()
    assert [(one.incident.id, one.reason.code) for one in dispatch.kept] == [("inc-001", "hold")]
    assert "has lasted 480 s" in dispatch.kept[0].reason.text
    ended = dispatch.ended[0]
    assert (ended.incident.id, ended.outcome) == ("inc-002", Outcome.SKIPPED)
    assert ended.reason.code == "expired"
    assert "has lasted 120 s" in ended.reason.text


@pytest.mark.case("R53")
def test_r53_codes_that_alternate_do_not_begin_the_hold_anew() -> None:
    flip = [
        finding(Verdict.DEGRADED, **{**LEVEL, "gpu_index": str(n), "gpu_uuid": f"GPU-{n}"})
        for n in (0, 1)
    ]
    incident = sick(1, *flip, at=NOW - timedelta(hours=2), last_seen=NOW)
    fresh = replace(incident.findings[1], evidence=replace(incident.findings[1].evidence, at=NOW))
    incident = replace(incident, findings=(fresh,))

    assert (
        len(
            decide(
                Guard(CLUSTER), [incident], rules=policy(hold_s={Verdict.DEGRADED: 7000})
            ).admitted
        )
        == 1
    )


def test_a_fatal_fault_that_joins_ends_the_hold() -> None:
    hot = finding(Verdict.DEGRADED, **LEVEL)
    rules = policy(hold_s={Verdict.DEGRADED: 600})
    assert len(decide(Guard(CLUSTER), [sick(1, hot, finding())], rules=rules).admitted) == 1


# --- everything at once ---------------------------------------------------------------------------

FAULTS = [finding(), finding(code=95), finding(Verdict.FATAL, **LEVEL)]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Guard, list[Incident], Policy, int, int, datetime]:
    """A guard that may be open, paused or full, waiters of any age, a fleet with nodes down."""
    size = draw(st.integers(1, 30))
    numbers = draw(st.lists(st.integers(1, size), unique=True, max_size=size))
    waiters = [
        sick(
            n,
            draw(st.sampled_from(FAULTS)),
            at=NOW - draw(st.integers(0, 40)) * MINUTE,
            waiting_for=draw(st.sampled_from(["", "breaker_open", "capacity_guard"])),
        )
        for n in numbers
    ]
    held = draw(st.lists(st.integers(1, size), unique=True, max_size=4))
    guard = Guard(CLUSTER, 1, {f"u{n}": slot(n) for n in held if n not in numbers[:2]})
    if draw(st.booleans()):
        guard = pause(guard, by="alice", why="work", now=NOW)
    if draw(st.booleans()):
        trip = Trip(Reason("fleet_unhealthy", "many are down"), 9, 8, 40)
        until = NOW + draw(st.integers(-30, 30)) * MINUTE
        guard = replace(guard, breaker=Breaker(NOW - 40 * MINUTE, until, trip))
    rules = policy(draw(st.integers(0, 6)), draw(st.sampled_from([2, 20, 50, 100])))
    return guard, waiters, rules, size, draw(st.integers(0, size)), NOW


@settings(max_examples=400, deadline=None, derandomize=True)
@given(world=worlds())
def test_no_decision_ever_breaks_a_rail(world: Any) -> None:
    guard, waiters, rules, size, down, now = world

    dispatch = decide(guard, waiters, size=size, down=down, rules=rules, now=now)

    done = [one.incident.id for one in (*dispatch.admitted, *dispatch.kept, *dispatch.ended)]
    assert sorted(done) == sorted(one.id for one in waiters), "each waiter is decided on once"
    if guard.pause is not None or dispatch.guard.breaker is not None:
        assert dispatch.admitted == ()
        assert dispatch.guard.slots == guard.slots
    bound = rules.limits.max_unavailable.of(size)
    taken = {uid for uid in dispatch.guard.slots if uid not in guard.slots}
    if taken:
        nodes = fleet(
            node(n, readiness=Readiness.UNKNOWN if n > size - down else Readiness.READY)
            for n in range(1, size + 1)
        )
        assert len(unavailable(dispatch.guard, nodes, None, besides="")) <= bound
    for held in dispatch.guard.slots.values():
        assert held.node_uid not in release(dispatch.guard, held.incident_id).slots
    assert dispatch.guard.pause == guard.pause
    same = decide(guard, waiters[::-1], size=size, down=down, rules=rules, now=now)
    assert same == dispatch, "the order of the waiters does not matter"


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    trips=st.lists(st.booleans(), min_size=1, max_size=200),
    cooldown=st.integers(0, 60),
)
def test_it_is_open_exactly_while_the_cause_was_there_within_the_cool_down(
    trips: list[bool], cooldown: int
) -> None:
    limits = BreakerLimits(cooldown_s=60 * cooldown)
    trip = Trip(Reason("fleet_unhealthy", "x"), 9, 8, 40)
    breaker: Breaker | None = None
    last: int | None = None
    for minute, is_tripped in enumerate(trips):
        now = NOW + minute * MINUTE
        breaker = next_breaker(breaker, trip if is_tripped else None, limits=limits, now=now)
        last = minute if is_tripped else last
        is_recent = last is not None and (is_tripped or minute - last < cooldown)
        assert (breaker is not None) is is_recent


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    minutes=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 60)), max_size=40),
    window=st.integers(1, 30),
)
def test_the_largest_burst_is_found(minutes: list[tuple[int, int]], window: int) -> None:
    seen = [Sighting(f"u{n}", "thermal", NOW + minute * MINUTE) for n, minute in minutes]
    limits = BreakerLimits(percent=1, min_nodes=3, window_s=60 * window)

    trip = why_trip(seen, fleet=[], not_ready=[], desired=12, limits=limits)

    best = max(
        (
            len({n for n, minute in minutes if start <= minute <= start + window})
            for _, start in minutes
        ),
        default=0,
    )
    assert (trip.count if trip else 0) == (best if best >= 3 else 0)


def test_a_node_that_somebody_cordoned_is_no_sign_of_a_network_blip() -> None:
    down = replace(node(1), readiness=Readiness.UNKNOWN)
    known = replace(node(2), readiness=Readiness.UNKNOWN, is_unschedulable=True)
    view = FleetView(FleetSnapshot(NOW, (down, known, node(3))), ())
    assert view.not_ready(NOW, grace=timedelta()) == [down.ref.name]
