"""A clock that a test moves, ids that count, and an invocation with a given time left."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

START = datetime(2026, 5, 1, 10, 0, tzinfo=UTC)


@dataclass
class ManualClock:
    """`Clock` that stands still until it is moved."""

    at: datetime = START

    def now(self) -> datetime:
        return self.at

    def advance(self, seconds: float) -> datetime:
        """Move on and return the new time."""
        self.at += timedelta(seconds=seconds)
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

    last: int = 0

    def new(self, now: datetime) -> str:
        self.last += 1
        return f"01TEST{self.last:020d}"
