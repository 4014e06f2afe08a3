"""A clock that a test moves, ids that count, and an invocation with a given time left."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

START = datetime(2026, 5, 1, 10, 0, tzinfo=UTC)


@dataclass
class ManualClock:
    """`Clock` that stands still until it is moved; what others do meanwhile happens on the way."""

    at: datetime = START
    _due: list[tuple[datetime, Callable[[], object]]] = field(default_factory=list)

    def now(self) -> datetime:
        return self.at

    def after(self, seconds: float, what: Callable[[], object]) -> None:
        """Let something happen when this much time has passed."""
        self._due.append((self.at + timedelta(seconds=seconds), what))

    def advance(self, seconds: float) -> datetime:
        """Move on and return the new time."""
        end = self.at + timedelta(seconds=seconds)
        while due := [one for one in self._due if one[0] <= end]:
            first = min(due, key=lambda one: one[0])
            self._due.remove(first)
            self.at = max(self.at, first[0])
            first[1]()
        # What happened may have moved the clock itself.
        self.at = max(self.at, end)
        return self.at


@dataclass
class FixedInvocation:
    """`Invocation` with a given time left."""

    left_s: float = 60.0

    def remaining_s(self) -> float:
        return self.left_s


@dataclass
class SequentialIds:
    """`Ids` that look like ULIDs and count: 01TEST00000000000000000001, …"""

    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def new(self, now: datetime) -> str:
        # One step of the interpreter: two threads never get the same number.
        return f"01TEST{next(self.numbers):020d}"
