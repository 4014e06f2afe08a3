"""A threaded loopback WSGI server that ends completely.

Werkzeug's server leaves the threads of open connections behind when it is shut down; this one
closes their sockets and waits for them, so that a stopped stack leaves no thread and no port.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from moto.moto_server.werkzeug_app import MotoRequestHandler
from werkzeug.serving import BaseWSGIServer, make_server

WsgiApp = Callable[[dict[str, Any], Any], Any]


class _Connections:
    """The sockets and threads that are serving a request now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[threading.Thread, socket.socket] = {}

    def add(self, connection: socket.socket) -> None:
        with self._lock:
            self._open[threading.current_thread()] = connection

    def remove(self) -> None:
        with self._lock:
            self._open.pop(threading.current_thread(), None)

    def close(self, timeout_s: float) -> None:
        with self._lock:
            remaining = dict(self._open)
        for connection in remaining.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + timeout_s
        for thread in remaining:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))


class _Handler(MotoRequestHandler):  # type: ignore[misc]  # moto is untyped for mypy
    disable_nagle_algorithm = True  # header and body are two writes: 40 ms each without this
    timeout = 3600

    def setup(self) -> None:
        self.server.connections.add(self.request)
        super().setup()

    def finish(self) -> None:
        with contextlib.suppress(OSError):
            super().finish()
        self.server.connections.remove()

    def log(self, type: str, message: str, *args: Any) -> None:  # noqa: A002, ANN401 - the base class's signature
        """Say nothing: the front keeps its own record of calls."""

    def connection_dropped(self, error: BaseException, environ: Any = None) -> None:  # noqa: ANN401
        """Close without an answer, as for a fault that loses it."""
        self.close_connection = True


class LoopbackServer:
    """Serves one WSGI application on a free loopback port, from `start` to `stop`."""

    def __init__(self, app: WsgiApp, name: str) -> None:
        self._name = name
        self._connections = _Connections()
        # Threads make it HTTP/1.1; werkzeug closes each connection after its answer.
        self._server: BaseWSGIServer = make_server(
            "127.0.0.1", 0, app, threaded=True, request_handler=_Handler
        )
        self._server.connections = self._connections  # type: ignore[attr-defined]
        self._server.request_queue_size = 512
        self._server.socket.listen(512)
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        """The port that the kernel chose."""
        return self._server.server_port

    def start(self) -> None:
        """Begin to serve."""
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.05},
            name=f"{self._name}-server",
            daemon=True,
        )
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop serving, cut open connections and wait for their threads."""
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
            self._thread = None
        self._connections.close(timeout_s)
        self._server.server_close()
