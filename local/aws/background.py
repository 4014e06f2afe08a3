"""Threads that are counted, and end when the stack stops."""

import logging
import threading
import time
from collections.abc import Callable

_LOGGER = logging.getLogger(__name__)


class Background:
    """Runs functions in threads of their own, counts them, and waits for them at the end."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self.stopping = threading.Event()
        """Set once; every loop and wait in a background thread looks at it."""

    def spawn(self, function: Callable[[], None], name: str) -> None:
        """Start a thread; a failure is logged, never silent."""

        def run() -> None:
            try:
                function()
            except Exception:
                if not self.stopping.is_set():
                    _LOGGER.exception("%s/%s failed", self._name, name)
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name=f"{self._name}-{name}", daemon=True)
        with self._lock:
            if self.stopping.is_set():
                return
            self._threads.add(thread)
        thread.start()

    @property
    def running(self) -> int:
        """How many threads have not ended."""
        with self._lock:
            return len(self._threads)

    def stop(self, timeout_s: float = 5.0) -> None:
        """Tell all threads to end and wait for them."""
        with self._lock:
            self.stopping.set()
            threads = list(self._threads)
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
