"""In-memory event bus, dispatch queue and telemetry."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from nodemend.application.ports import Announcement, Telemetry
from nodemend.domain.errors import NodemendError


class MemoryEventBus:
    """`EventBus` that keeps what it accepted; it can refuse single events or be gone."""

    def __init__(self, telemetry: Telemetry | None = None) -> None:
        self._telemetry = telemetry
        self.accepted: list[Announcement] = []
        self.refused: set[str] = set()
        """Ids of events that are not accepted."""
        self.gone: NodemendError | None = None
        """What every call raises while it is set."""
        self.calls = 0

    def announce(self, announcements: Sequence[Announcement]) -> Sequence[str]:
        self.calls += 1
        if self.gone is not None:
            self._count(announcements, {one.event_id for one in announcements})
            raise self.gone
        unsent = [one.event_id for one in announcements if one.event_id in self.refused]
        self.accepted += [one for one in announcements if one.event_id not in self.refused]
        self._count(announcements, unsent)
        return unsent

    def _count(self, announcements: Sequence[Announcement], unsent: Iterable[str]) -> None:
        lost = set(unsent)
        for one in announcements:
            if self._telemetry is None or "incident_id" in one.detail:
                continue
            cluster = str(one.detail.get("cluster", ""))
            if one.event_id in lost:
                self._telemetry.count("EventsUnsent", 1, cluster=cluster)
            else:
                self._telemetry.count(
                    "Events", 1, cluster=cluster, detail_type=one.detail_type.value
                )

    @property
    def detail_types(self) -> list[str]:
        """The detail-types accepted so far, in their order."""
        return [one.detail_type.value for one in self.accepted]


@dataclass
class MemoryDispatchQueue:
    """`DispatchQueue` that keeps its messages."""

    messages: list[tuple[str, str]] = field(default_factory=list)

    def notify(self, cluster: str, incident_id: str) -> None:
        self.messages.append((cluster, incident_id))


@dataclass(frozen=True)
class DeadLetter:
    """A refused message and why."""

    body: str
    error: str
    field: str
    remedy: str


@dataclass
class MemoryDeadLetters:
    """`DeadLetters` that keeps its messages."""

    letters: list[DeadLetter] = field(default_factory=list)

    def put(self, body: str, *, error: str, field: str, remedy: str) -> None:
        self.letters.append(DeadLetter(body, error, field, remedy))


Series = tuple[str, tuple[tuple[str, str], ...]]


class MemoryTelemetry:
    """`Telemetry` that adds up counters and keeps each gauge's values, by name and dimensions."""

    def __init__(self) -> None:
        self.counters: Counter[Series] = Counter()
        self.gauges: dict[Series, list[float]] = {}

    def count(self, name: str, value: float = 1, **dimensions: str) -> None:
        self.counters[_series(name, dimensions)] += value  # type: ignore[assignment]

    def gauge(self, name: str, value: float, unit: str, **dimensions: str) -> None:
        self.gauges.setdefault(_series(name, dimensions), []).append(value)

    def counted(self, name: str, **dimensions: str) -> float:
        """Return the sum of a counter over all series that have these dimensions."""
        wanted = {(key, text or "unknown") for key, text in dimensions.items()}
        return sum(
            value
            for (counter, pairs), value in self.counters.items()
            if counter == name and wanted <= set(pairs)
        )


def _series(name: str, dimensions: dict[str, str]) -> Series:
    return name, tuple(sorted((key, text or "unknown") for key, text in dimensions.items()))
