"""Schedule expressions and when they are due."""

from datetime import UTC, datetime

import pytest

from local.aws.scheduler import Cron, Schedule, ScheduleError, Scheduler, interval_minutes


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("expression", "minutes"),
    [
        ("rate(1 minute)", 1),
        ("rate(5 minutes)", 5),
        ("rate(2 hours)", 120),
        ("rate(1 day)", 1440),
        ("cron(0 12 * * ? *)", None),
    ],
)
def test_rates_are_minutes(expression, minutes):
    assert interval_minutes(expression) == minutes


@pytest.mark.parametrize(
    ("expression", "when", "is_due"),
    [
        ("cron(0 12 * * ? *)", "2026-03-01 12:00", True),
        ("cron(0 12 * * ? *)", "2026-03-01 12:01", False),
        ("cron(0/15 8-17 ? * MON-FRI *)", "2026-03-02 08:45", True),
        ("cron(0/15 8-17 ? * MON-FRI *)", "2026-03-01 08:45", False),  # a Sunday
        ("cron(0 0 1 JAN,JUL ? *)", "2026-07-01 00:00", True),
        ("cron(0 0 1 JAN,JUL ? *)", "2026-06-01 00:00", False),
        ("cron(30 6 ? * 1 2026)", "2026-03-01 06:30", True),  # 1 is Sunday
        ("cron(30 6 ? * 1 2025)", "2026-03-01 06:30", False),
    ],
)
def test_cron_matches_minutes_in_utc(expression, when, is_due):
    assert Cron.parse(expression).matches(at(when)) is is_due


@pytest.mark.parametrize("expression", ["cron(0 12 * * *)", "cron(0 12 L * ? *)", "at(now)"])
def test_expressions_that_are_not_understood_are_refused(expression):
    with pytest.raises(ScheduleError):
        Schedule("S", "s", expression, lambda: None)


def test_a_rate_is_due_once_in_each_interval():
    schedule = Schedule("S", "s", "rate(2 minutes)", lambda: None)

    due = [schedule.is_due(now - 0.5, now) for now in (10.5, 11.0, 11.5, 12.0, 12.5, 13.9, 14.1)]

    assert due == [False, False, False, True, False, False, True]


def test_a_cron_is_due_also_if_the_clock_jumps_over_its_minute():
    noon = at("2026-03-01 12:00").timestamp() / 60
    schedule = Schedule("S", "s", "cron(0 12 * * ? *)", lambda: None)

    assert schedule.is_due(noon - 3.2, noon + 4.1)
    assert not schedule.is_due(noon + 0.1, noon + 0.9)
    assert not schedule.is_due(noon + 1.0, noon + 9.0)


def test_an_unknown_schedule_is_named_with_those_that_there_are():
    scheduler = Scheduler()
    scheduler.add(Schedule("Scan", "prod-scan", "rate(1 minute)", lambda: None))

    assert scheduler.find("prod-scan").logical_id == "Scan"
    with pytest.raises(LookupError, match="no schedule Other; there are Scan"):
        scheduler.find("Other")


def test_the_clock_wants_a_positive_speed():
    with pytest.raises(ValueError, match="positive"):
        Scheduler().start_clock(0)
