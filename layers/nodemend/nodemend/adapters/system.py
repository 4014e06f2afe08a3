"""The clock, the ids and the running invocation."""

from collections.abc import Callable
from datetime import UTC, datetime

from ulid import ULID


class SystemClock:
    """The machine's clock."""

    def now(self) -> datetime:
        """Return the time as an aware UTC datetime."""
        return datetime.now(UTC)


class UlidIds:
    """ULIDs: they sort by time, fit an execution's name, and repeat in no 90 days."""

    def new(self, now: datetime) -> str:
        """Return a new ULID of that time."""
        return str(ULID.from_datetime(now))


class LambdaInvocation:
    """The invocation as Lambda's context object tells of it."""

    def __init__(self, get_remaining_time_in_millis: Callable[[], int]) -> None:
        self._remaining_ms = get_remaining_time_in_millis

    def remaining_s(self) -> float:
        """Return the seconds until Lambda ends this invocation."""
        return self._remaining_ms() / 1000
