"""Serve a WSGI application on the loopback interface from a thread."""

import threading
from types import TracebackType
from typing import TYPE_CHECKING, Self

from werkzeug.serving import WSGIRequestHandler, make_server

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication


class _QuietHandler(WSGIRequestHandler):
    """No access log: a scrape of each node each second would drown what matters."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Say nothing."""


class RunningServer:
    """A WSGI application in a thread; also a context manager.

    The port is chosen by the system unless given. Requests are served side by side.
    """

    def __init__(self, app: "WSGIApplication", *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._server = make_server(host, port, app, threaded=True, request_handler=_QuietHandler)
        self.host = host
        self.port = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.05},
            name=f"wsgi-{self.port}",
            daemon=True,
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """`http://host:port`, without a slash at the end."""
        return f"http://{self.host}:{self.port}"

    def stop(self) -> None:
        """Stop serving and close the port; safe to call twice."""
        self._server.shutdown()
        self._thread.join(timeout=5)
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def serve(app: "WSGIApplication", *, host: str = "127.0.0.1", port: int = 0) -> RunningServer:
    """Start serving and return the running server; stop it with `stop()` or `with`."""
    return RunningServer(app, host=host, port=port)
