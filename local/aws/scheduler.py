"""EventBridge Scheduler: fires schedules by hand, or on a clock that runs faster than life.

On AWS two runs of a schedule may overlap if one takes longer than the interval. Here a schedule
whose last run has not ended is passed over and counted, so that a fast clock cannot pile up runs.
"""

import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

from local.aws.background import Background

_LOGGER = logging.getLogger(__name__)
_UNITS = {"minute": 1.0, "hour": 60.0, "day": 1440.0}


class ScheduleError(ValueError):
    """The schedule expression is not understood."""


def interval_minutes(expression: str) -> float | None:
    """Return the minutes between runs of `rate(...)`; None for another kind."""
    match = re.fullmatch(r"rate\((\d+) (minute|hour|day)s?\)", expression.strip())
    return int(match[1]) * _UNITS[match[2]] if match else None


def _field_values(text: str, low: int, high: int) -> frozenset[int]:
    """Return the values of one cron field (numbers, lists, ranges, steps, `*`, `?`)."""
    values: set[int] = set()
    for part in text.split(","):
        span, _, step = part.partition("/")
        if span in ("*", "?"):
            first, last = low, high
        elif "-" in span:
            first, last = (int(bound) for bound in span.split("-"))
        else:
            first = int(span)
            last = high if step else first
        values.update(range(first, last + 1, int(step or 1)))
    return frozenset(values)


_DAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
_MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")


@dataclass(frozen=True)
class Cron:
    """A `cron(minutes hours day-of-month month day-of-week year)` expression in UTC."""

    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    """1 is Sunday, as AWS counts."""
    years: frozenset[int]

    @classmethod
    def parse(cls, expression: str) -> "Cron":
        """Read an expression; `L`, `W` and `#` are refused."""
        match = re.fullmatch(r"cron\(([^)]*)\)", expression.strip())
        fields = match[1].upper().split() if match else []
        if len(fields) != 6:
            raise ScheduleError(f"not understood: {expression}")
        for number, name in enumerate(_MONTHS, 1):
            fields[3] = fields[3].replace(name, str(number))
        for number, name in enumerate(_DAYS, 1):
            fields[4] = fields[4].replace(name, str(number))
        bounds = ((0, 59), (0, 23), (1, 31), (1, 12), (1, 7), (1970, 2199))
        try:
            sets = [_field_values(text, *bound) for text, bound in zip(fields, bounds, strict=True)]
        except ValueError as error:
            raise ScheduleError(f"not understood: {expression}") from error
        return cls(*sets)

    def matches(self, when: datetime) -> bool:
        """Tell whether the schedule runs in this minute."""
        return (
            when.minute in self.minutes
            and when.hour in self.hours
            and when.day in self.days
            and when.month in self.months
            and when.isoweekday() % 7 + 1 in self.weekdays
            and when.year in self.years
        )


@dataclass
class Schedule:
    """One schedule, everything resolved."""

    logical_id: str
    name: str
    expression: str
    run: Callable[[], None]
    """Fires the target and returns when the run has ended."""
    enabled: bool = True
    last_due_minute: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._minutes = interval_minutes(self.expression)
        self._cron = None
        if self._minutes is None:
            self._cron = Cron.parse(self.expression)

    def is_due(self, previous: float, now: float) -> bool:
        """Tell whether a run falls between two moments (minutes on the schedule's clock)."""
        if self._minutes is not None:
            return int(previous // self._minutes) != int(now // self._minutes)
        if self._cron is None or int(previous) == int(now):
            return False
        minutes = range(int(previous) + 1, int(now) + 1)
        return any(self._cron.matches(datetime.fromtimestamp(m * 60, UTC)) for m in minutes)


class Scheduler:
    """The schedules of one stack."""

    def __init__(self) -> None:
        self._schedules: dict[str, Schedule] = {}
        self._background = Background("scheduler")
        self.skipped = 0
        """Runs passed over because the last one of the same schedule had not ended."""

    def add(self, schedule: Schedule) -> None:
        """Make a schedule known."""
        self._schedules[schedule.logical_id] = schedule

    def names(self) -> list[str]:
        """Return the logical ids."""
        return list(self._schedules)

    def find(self, name: str) -> Schedule:
        """Return a schedule by logical id or name."""
        for schedule in self._schedules.values():
            if name in (schedule.logical_id, schedule.name):
                return schedule
        raise LookupError(f"no schedule {name}; there are {', '.join(self._schedules)}")

    def disable(self, prefix: str) -> None:
        """Take the schedules whose logical ids begin so off the clock; `tick` still fires them."""
        for schedule in self._schedules.values():
            if schedule.logical_id.startswith(prefix):
                schedule.enabled = False

    def tick(self, name: str) -> bool:
        """Fire a schedule now and wait for its run; False if its last run has not ended."""
        return self._fire(self.find(name))

    def _fire(self, schedule: Schedule) -> bool:
        if not schedule.lock.acquire(blocking=False):
            self.skipped += 1
            return False
        try:
            schedule.run()
        finally:
            schedule.lock.release()
        return True

    def start_clock(self, seconds_per_minute: float) -> None:
        """Fire the enabled schedules on a clock whose minutes last this long."""
        if seconds_per_minute <= 0:
            raise ValueError("seconds_per_minute must be positive")
        self._background.spawn(lambda: self._run_clock(seconds_per_minute), "clock")

    def _run_clock(self, seconds_per_minute: float) -> None:
        started = time.monotonic()
        origin = float(int(time.time() / 60))
        previous = origin
        while not self._background.stopping.wait(min(0.05, seconds_per_minute / 10)):
            now = origin + (time.monotonic() - started) / seconds_per_minute
            for schedule in list(self._schedules.values()):
                if schedule.enabled and schedule.is_due(previous, now):
                    self._background.spawn(partial(self._fire_quietly, schedule), schedule.name)
            previous = now

    def _fire_quietly(self, schedule: Schedule) -> None:
        self._fire(schedule)

    @property
    def firing(self) -> int:
        """Runs under way."""
        return sum(schedule.lock.locked() for schedule in self._schedules.values())

    def stop(self) -> None:
        """Stop the clock and wait for runs under way."""
        self._background.stop()
