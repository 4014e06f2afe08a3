"""What can go wrong with one call of a port, each in the port's own words."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from nodemend.application.ports import QueryResult
from nodemend.domain.errors import AwsUnavailableError, ClusterUnavailableError, RetryableError
from nodemend.domain.pods import EvictionAnswer
from nodemend.domain.reasons import Reason
from tests.fakes.stores import MemoryIncidents
from tests.fakes.system import ManualClock
from tests.unit.application.stage import APF_429, Crasher, CrashError, HangError

CALL_TIMES_OUT_S = 27
"""Three attempts of 9 s: what `adapters._aws.client_config` allows one call."""

FUNCTION_TIMES_OUT_S = 60
"""`Timeout` of every function in template.yaml."""


class Kind(StrEnum):
    """How a call goes wrong."""

    FAILS = "fails"
    """It does not arrive: no effect, the port's transient error."""
    ANSWER_LOST = "answer_lost"
    """It has its effect, and the caller hears the transient error."""
    TIMES_OUT = "times_out"
    """Nobody answers until the client gives up: no effect, and half a minute is gone."""
    THROTTLED = "throttled"
    """Refused for its rate: no effect."""
    DIES = "dies"
    """It has its effect, and the process is gone before the next line."""
    HANGS = "hangs"
    """It has its effect, and no answer comes until Lambda ends the invocation."""


@dataclass(frozen=True)
class Point:
    """One fault: the number of the call, counted from 1, and what happens to it."""

    call: int
    kind: Kind


NEVER_FAILS = frozenset({"executions.arn_of"})
"""Methods of ports that call nobody."""

CHANGES = frozenset(
    {"cluster.patch_node", "cluster.evict", "instances.reboot", "capacity.terminate"}
)


class Injector(Crasher):
    """Counts the calls of all ports, and lets the chosen ones go wrong."""

    def __init__(self, *points: Point) -> None:
        super().__init__()
        self.points = {point.call: point.kind for point in points}
        self.hit: list[Kind] = []
        """The faults that have happened."""
        self.is_on = True
        """Off: calls are neither counted nor disturbed."""
        self.changes: list[str] = []
        """What the cluster and AWS took of what they were told to change."""
        self.clock = ManualClock()
        self.incidents = MemoryIncidents(self.clock)
        self.on_change: Callable[[str], None] = lambda name: None

    def call(self, name: str, act: "partial[Any]") -> Any:
        """Make a call of a port, or let it go wrong."""
        if not self.is_on or name in NEVER_FAILS:
            return self._make(name, act)
        self.calls.append(name)
        kind = self.points.get(len(self.calls))
        if kind is None:
            return self._make(name, act)
        self.hit.append(kind)
        return self._spoil(name, act, kind)

    def _make(self, name: str, act: "partial[Any]") -> Any:
        result = act()
        if name in CHANGES and _has_changed(name, result):
            target = str(getattr(act.args[-1], "id", act.args[-1]))
            if name == "cluster.patch_node":
                target = act.args[0]
            self.changes.append(f"{name.split('.')[1]} {target}")
            self.on_change(name)
        return result

    def _spoil(self, name: str, act: "partial[Any]", kind: Kind) -> Any:
        match kind:
            case Kind.DIES:
                self._make(name, act)
                raise CrashError(name)
            case Kind.HANGS:
                self._make(name, act)
                self.clock.advance(FUNCTION_TIMES_OUT_S)
                raise HangError(name)
            case Kind.ANSWER_LOST if name in ("outbox.publish", "outbox.publish_pending"):
                return self._sent_and_not_marked(name, act)
            case Kind.ANSWER_LOST:
                self._make(name, act)
            case Kind.TIMES_OUT:
                self.clock.advance(CALL_TIMES_OUT_S)
            case Kind.FAILS | Kind.THROTTLED:
                pass
        return _answer(name, act, kind)

    def _sent_and_not_marked(self, name: str, act: "partial[Any]") -> Any:
        """Send; the write that takes the sent events out of the outbox fails."""
        before = {key: dict(record.outbox) for key, record in self.incidents.records.items()}
        self._make(name, act)
        for key, outbox in before.items():
            self.incidents.records[key].outbox = outbox
        return _answer(name, act, Kind.ANSWER_LOST)


def _has_changed(name: str, result: Any) -> bool:
    if name == "cluster.evict":
        return bool(result.status == 201)
    return result is not False


def _eviction(act: "partial[Any]", kind: Kind) -> EvictionAnswer:
    if kind is Kind.THROTTLED:
        return APF_429
    return EvictionAnswer(500 if kind is Kind.FAILS else 0, f"the eviction {kind}")


def _unknown(act: "partial[Any]", kind: Kind) -> dict[str, QueryResult]:
    codes = {Kind.THROTTLED: "amp_throttled", Kind.FAILS: "amp_unavailable"}
    problem = Reason(codes.get(kind, "amp_timeout"), f"the query {kind}")
    return {key: QueryResult(problem=problem) for key in act.args[1]}


NEVER_RAISES: Mapping[str, Callable[["partial[Any]", Kind], Any]] = {
    "cluster.evict": _eviction,
    "cluster.record_event": lambda act, kind: None,
    "metrics.query_many": _unknown,
    "outbox.pending": lambda act, kind: [],
    "outbox.publish": lambda act, kind: 1,
    "outbox.publish_pending": lambda act, kind: (0, 1),
}
"""What those ports answer whose errors are answers."""


def _answer(name: str, act: "partial[Any]", kind: Kind) -> Any:
    """Return or raise what the port says if a call of it went wrong."""
    if name in NEVER_RAISES:
        return NEVER_RAISES[name](act, kind)
    if name == "instances.reboot" and kind is Kind.THROTTLED:
        return False
    if name == "bus.announce" and kind is Kind.THROTTLED:
        return [one.event_id for one in act.args[0]]
    error: type[RetryableError] = AwsUnavailableError
    if name.startswith("cluster."):
        error = ClusterUnavailableError
    raise error(f"{name} {kind}")
