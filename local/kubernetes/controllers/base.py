"""The controllers' common ground: they are told of changes, and work when they are run."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from local.kubernetes.registry import Registry
from local.kubernetes.store import Change, Store
from local.kubernetes.timings import Timings

CONTROLLER_MANAGER: Final = "kube-controller-manager"
_MAX_ROUNDS: Final = 100
_MAX_WAIT_S: Final = 0.25


class Controller(ABC):
    """One control loop. It collects what it must look at, and looks at it when it is run."""

    name: str

    def __init__(self, registry: Registry, timings: Timings) -> None:
        self.registry = registry
        self.store: Store = registry.store
        self.timings = timings
        self._dirty: set[str] = set()
        self._due: dict[str, float] = {}

    @abstractmethod
    def notice(self, change: Change) -> None:
        """Take note of a change; called with the store's lock held, so it must be quick."""

    @abstractmethod
    def reconcile(self, key: str) -> None:
        """Bring one thing from what is to what should be."""

    def mark(self, key: str) -> None:
        """Look at `key` in the next run."""
        self._dirty.add(key)

    def mark_at(self, key: str, when: float) -> None:
        """Look at `key` when the clock reaches `when`, or earlier if asked before."""
        self._due[key] = min(when, self._due.get(key, when))

    def run(self) -> bool:
        """Work off what is marked and due, in order of the keys; tell whether there was any."""
        now = self.registry.clock()
        for key in [key for key, when in self._due.items() if when <= now]:
            del self._due[key]
            self._dirty.add(key)
        work, self._dirty = sorted(self._dirty), set()
        for key in work:
            self.reconcile(key)
        return bool(work)

    def next_due(self) -> float | None:
        """Return when the clock makes something due."""
        return min(self._due.values(), default=None)

    @property
    def has_work(self) -> bool:
        """Something is marked."""
        return bool(self._dirty)


class ControlPlane:
    """Runs the controllers: by hand with `tick`, or on a thread of its own."""

    def __init__(
        self, registry: Registry, controllers: Sequence[Controller], timings: Timings
    ) -> None:
        self._registry = registry
        self._controllers = controllers
        self._timings = timings
        self._paused: set[str] = set()
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        registry.store.subscribe(self._notice)

    @property
    def names(self) -> list[str]:
        """The controllers' names, as `pause` takes them."""
        return [controller.name for controller in self._controllers]

    def _notice(self, change: Change) -> None:
        for controller in self._controllers:
            controller.notice(change)
        self._wake.set()

    def tick(self) -> None:
        """Run all controllers until nothing is left to do at the clock's present time."""
        with self._registry.store.lock:
            for _ in range(_MAX_ROUNDS):
                active = [c for c in self._controllers if c.name not in self._paused]
                worked = [controller.run() for controller in active]
                if True not in worked:
                    return
            raise RuntimeError("the controllers did not come to rest: two of them disagree")

    def pause(self, names: Iterable[str]) -> None:
        """Let controllers notice but not act, as if they lagged behind.

        Raises:
            ValueError: For a name that no controller has.
        """
        names = set(names)
        if not names <= set(self.names):
            raise ValueError(f"no such controllers: {names}; there are: {', '.join(self.names)}")
        with self._registry.store.lock:
            self._paused |= names

    def resume(self, names: Iterable[str]) -> None:
        """Let paused controllers catch up."""
        with self._registry.store.lock:
            self._paused -= set(names)
        self._wake.set()

    def start(self) -> None:
        """Run the controllers on a background thread, a moment after each change."""
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="kubernetes-controllers")
        self._thread.daemon = True
        self._thread.start()

    def stop(self) -> None:
        """Stop the background thread; does nothing if there is none."""
        if self._thread is None:
            return
        self._stopping = True
        self._wake.set()
        self._thread.join()
        self._thread = None

    def _loop(self) -> None:
        pause = threading.Event()
        while not self._stopping:
            self._wake.wait(self._wait_s(self._registry.clock))
            self._wake.clear()
            if self._stopping:
                return
            pause.wait(self._timings.reaction_s)
            self.tick()

    def _wait_s(self, clock: Callable[[], float]) -> float:
        with self._registry.store.lock:
            active = [c for c in self._controllers if c.name not in self._paused]
            if any(controller.has_work for controller in active):
                return 0.0
            due = [when for c in active if (when := c.next_due()) is not None]
        # Bounded: the clock may be one that somebody sets by hand.
        return max(0.0, min(_MAX_WAIT_S, min(due, default=clock() + _MAX_WAIT_S) - clock()))
