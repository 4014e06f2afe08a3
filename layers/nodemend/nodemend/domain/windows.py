"""Maintenance windows: the only times at which new disruption may start, where there are any."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from typing import Literal
from zoneinfo import ZoneInfo

Weekday = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
WEEKDAYS: tuple[Weekday, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
"""In the order of `datetime.weekday`."""


@dataclass(frozen=True, slots=True)
class MaintenanceWindow:
    """A time of the week. It opens by the wall clock and lasts `duration_s` real seconds."""

    days: tuple[Weekday, ...] = WEEKDAYS
    start: time = time()
    duration_s: int = 86_400
    timezone: str = "UTC"

    def contains(self, now: datetime) -> bool:
        """Tell whether the window is open; its end is outside."""
        return any(
            opening <= now < opening + timedelta(seconds=self.duration_s)
            for opening in self._openings(now, behind=self._days_long + 1, ahead=1)
        )

    def next_opening(self, now: datetime) -> datetime:
        """Return when the window opens next, after `now`, in UTC."""
        return min(one for one in self._openings(now, behind=0, ahead=8) if one > now)

    @property
    def _days_long(self) -> int:
        return -(-self.duration_s // 86_400)

    def _openings(self, now: datetime, *, behind: int, ahead: int) -> Iterable[datetime]:
        zone = zone_of(self.timezone)
        today: date = now.astimezone(zone).date()
        for offset in range(-behind, ahead + 1):
            day = today + timedelta(days=offset)
            if WEEKDAYS[day.weekday()] in self.days:
                yield datetime.combine(day, self.start, zone).astimezone(UTC)


def zone_of(name: str) -> tzinfo:
    """Return a time zone by its IANA name; `UTC` needs no time zone data.

    Raises:
        ValueError, OSError: if there is no such zone (`ZoneInfoNotFoundError` is a KeyError).
    """
    return UTC if name == "UTC" else ZoneInfo(name)


def why_outside(windows: tuple[MaintenanceWindow, ...], now: datetime) -> str | None:
    """Return why nothing new may start now, or None; without windows it always may."""
    if not windows or any(window.contains(now) for window in windows):
        return None
    opening = min(window.next_opening(now) for window in windows)
    return f"no maintenance window is open; the next opens {opening:%a %Y-%m-%d %H:%M} UTC"
