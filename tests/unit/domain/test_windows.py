"""Maintenance windows: by the wall clock of their zone, whatever the clocks do in spring."""

from datetime import UTC, datetime, time, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodemend.domain.windows import WEEKDAYS, MaintenanceWindow, why_outside, zone_of

NIGHT = MaintenanceWindow(("mon", "tue"), time(22), 4 * 3600)
MONDAY = datetime(2026, 5, 4, tzinfo=UTC)


@pytest.mark.parametrize(
    ("hours", "is_open"),
    [(21.99, False), (22, True), (25.99, True), (26, False), (46, True), (70, False), (-2, False)],
)
def test_a_window_opens_on_its_days_and_reaches_into_the_next_one(
    hours: float, is_open: bool
) -> None:
    assert NIGHT.contains(MONDAY + timedelta(hours=hours)) is is_open


def test_without_windows_it_is_always_open() -> None:
    assert why_outside((), MONDAY) is None


def test_outside_of_all_windows_the_next_opening_is_named() -> None:
    later = MaintenanceWindow(("sun",), time(3), 3600)
    text = why_outside((later, NIGHT), MONDAY)
    assert text == "no maintenance window is open; the next opens Mon 2026-05-04 22:00 UTC"
    assert why_outside((later, NIGHT), MONDAY + timedelta(hours=23)) is None


@pytest.mark.parametrize(
    ("day", "opens_utc"),
    [
        (datetime(2026, 3, 28, tzinfo=UTC), 21),
        (datetime(2026, 3, 29, tzinfo=UTC), 20),
        (datetime(2026, 10, 25, tzinfo=UTC), 21),
    ],
    ids=["winter time", "summer time", "winter time again"],
)
def test_it_opens_by_the_wall_clock_of_its_zone(day: datetime, opens_utc: int) -> None:
    berlin = MaintenanceWindow(WEEKDAYS, time(22), 3600, "Europe/Berlin")
    opening = day.replace(hour=opens_utc)
    assert berlin.contains(opening)
    assert not berlin.contains(opening - timedelta(seconds=1))
    assert berlin.next_opening(opening - timedelta(hours=1)) == opening


def test_a_window_of_a_week_is_always_open() -> None:
    always = MaintenanceWindow(("wed",), time(), 604_800)
    assert all(always.contains(MONDAY + timedelta(hours=h)) for h in range(24 * 14))


def test_an_unknown_zone_is_refused() -> None:
    with pytest.raises(KeyError):
        zone_of("Europe/Atlantis")


WINDOWS = st.builds(
    MaintenanceWindow,
    days=st.lists(st.sampled_from(WEEKDAYS), min_size=1, unique=True).map(tuple),
    start=st.times().map(lambda t: t.replace(second=0, microsecond=0)),
    duration_s=st.integers(60, 604_800),
    timezone=st.sampled_from(["UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata"]),
)
MOMENTS = st.integers(0, 365 * 1440).map(
    lambda minute: datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=minute)
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(window=WINDOWS, now=MOMENTS)
def test_the_next_opening_is_one_and_lies_within_a_week(
    window: MaintenanceWindow, now: datetime
) -> None:
    opening = window.next_opening(now)
    assert now < opening <= now + timedelta(days=8)
    assert window.contains(opening)
    local = opening.astimezone(ZoneInfo(window.timezone))
    assert WEEKDAYS[local.weekday()] in window.days or local.time() != window.start
