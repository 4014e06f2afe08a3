"""What runs a `Fleet`: the clock, the lock, the background thread, and the calls of the hooks.

Each operation runs on a copy of the fleet that is kept only if the operation succeeds: an error in
the middle of a batch leaves nothing half done, and an answer can be given without the deed (see
`Effect`). Reads and writes first let the fleet catch up with the clock, so a reader never sees a
state that should be over already, whether or not the background thread had its turn.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TypeVar

from local.aws.autoscaling_engine import Fleet
from local.aws.autoscaling_types import AwsAnswerError, CapacityHooks, Instance

_LOG = logging.getLogger(__name__)
T = TypeVar("T")

LOOP_PERIOD_S = 0.1
"""The thread looks at least this often, because an injected clock may jump."""


class Effect(StrEnum):
    """How often an accepted operation takes effect."""

    ONCE = "once"
    NOTHING = "nothing"
    """The answer says yes, and nothing happens."""
    TWICE = "twice"
    """Applied again at once; a refusal of the second time stays unseen."""


class FleetRunner:
    """Lets time pass for a fleet, and changes to it happen one after the other."""

    def __init__(self, fleet: Fleet, *, clock: Callable[[], float], hooks: CapacityHooks) -> None:
        self.hooks = hooks
        self._clock = clock
        self._fleet = fleet
        self._changed = threading.Condition(threading.RLock())
        self._latest = float("-inf")
        self._local = threading.local()
        self._owed: deque[tuple[str, Instance]] = deque()
        self._calling = threading.Lock()
        self._hook_errors: list[Exception] = []
        self._thread: threading.Thread | None = None
        self._is_stopping = False

    def start(self) -> None:
        """Let time pass by itself, on a background thread."""
        if self._thread is not None:
            raise RuntimeError("the model is running already")
        self._is_stopping = False
        self._thread = threading.Thread(target=self._loop, name="capacity-model", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the background thread; harmless if it does not run."""
        thread, self._thread = self._thread, None
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        if thread is not None:
            thread.join()

    def tick(self, now: float | None = None) -> None:
        """Let everything happen that is due by `now` (default: the clock), hooks included.

        A `now` ahead of the clock is kept: the model's time never goes back.
        """
        with self._changed:
            self._catch_up(now)
        self._call_hooks()

    def hook_errors(self) -> list[Exception]:
        """Return what the scene's hooks raised; the model logs them and goes on."""
        return list(self._hook_errors)

    def now(self) -> float:
        """Return the model's time: the clock, or the latest tick if that is ahead."""
        with self._changed:
            return max(self._clock(), self._latest)

    def _loop(self) -> None:
        while True:
            self.tick()
            with self._changed:
                if self._is_stopping:
                    return
                due = self._fleet.next_due()
                wait_s = LOOP_PERIOD_S if due is None else min(due - self.now(), LOOP_PERIOD_S)
                self._changed.wait(max(wait_s, 0.001))

    def _catch_up(self, now: float | None = None) -> float:
        at = max(self._clock() if now is None else now, self._latest)
        self._latest = at
        self._fleet.advance(at)
        self._owed.extend(self._fleet.notices)
        self._fleet.notices.clear()
        return at

    def _call_hooks(self) -> None:
        """Call what is owed, in order, on one thread at a time and never under the lock.

        A thread that finds another one calling leaves its own to it. So a hook may use the model,
        and no two locks are ever taken in two orders.
        """
        while self._owed:
            if not self._calling.acquire(blocking=False):
                return
            try:
                while self._owed:
                    name, instance = self._owed.popleft()
                    try:
                        getattr(self.hooks, name)(instance)
                    except Exception as error:
                        _LOG.exception("hook %s failed for %s", name, instance.instance_id)
                        self._hook_errors.append(error)
            finally:
                self._calling.release()

    @contextmanager
    def applying(self, effect: Effect) -> Iterator[None]:
        """Give the operations of this thread another effect while the block runs."""
        self._local.effect = effect
        try:
            yield
        finally:
            self._local.effect = Effect.ONCE

    def change(self, operation: Callable[[Fleet, float], T]) -> T:
        """Apply an operation: all of it, or nothing and its error."""
        effect = getattr(self._local, "effect", Effect.ONCE)
        try:
            with self._changed:
                return self._apply(operation, effect)
        finally:
            # Also after a refusal: catching up with the clock may have moved something.
            self._call_hooks()

    def _apply(self, operation: Callable[[Fleet, float], T], effect: Effect) -> T:
        at = self._catch_up()
        trial = self._fleet.copy()
        result = operation(trial, at)
        if effect is Effect.NOTHING:
            self._fleet.serial = trial.serial  # the ids it answered with stay used up
            return result
        self._settle(trial, at)
        if effect is Effect.TWICE:
            self._repeat(operation, at)
        self._changed.notify_all()
        return result

    def _settle(self, trial: Fleet, at: float) -> None:
        trial.reconcile(at)
        self._fleet = trial
        self._catch_up(at)

    def _repeat(self, operation: Callable[[Fleet, float], T], at: float) -> None:
        trial = self._fleet.copy()
        try:
            operation(trial, at)
        except AwsAnswerError:
            return
        self._settle(trial, at)

    def read(self, query: Callable[[Fleet, float], T]) -> T:
        """Answer a query about the fleet as it is now."""
        try:
            with self._changed:
                return query(self._fleet, self._catch_up())
        finally:
            self._call_hooks()
