"""HTTPS in front of the API: Werkzeug's threaded server on a port of its own, loopback only."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import trustme
from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler
from werkzeug.wrappers import Request, Response

from local.kubernetes.api import Api
from local.kubernetes.requests import ApiRequest

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

_HOST: Final = "127.0.0.1"
_HANDSHAKE_TIMEOUT_S: Final = 10.0


class _QuietHandler(WSGIRequestHandler):
    """Logs nothing, and sends small answers at once instead of waiting for more (Nagle)."""

    disable_nagle_algorithm = True

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Say nothing: the call log has it."""

    def log_error(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Say nothing: clients that hang up are part of what is emulated."""


class _TlsServer(ThreadedWSGIServer):
    """Makes the TLS handshake in the connection's own thread.

    Werkzeug wraps the listening socket, so that one client that connects and says nothing would
    keep all others from being accepted.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, application: "WSGIApplication", context: ssl.SSLContext) -> None:
        super().__init__(_HOST, 0, application, handler=_QuietHandler)
        self.ssl_context = context
        self._open: set[socket.socket] = set()
        self._open_lock = threading.Lock()

    def process_request_thread(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: object
    ) -> None:
        """Serve one connection to its end."""
        assert isinstance(request, socket.socket)  # noqa: S101 - a TCP server's request
        connection = request
        with self._open_lock:
            self._open.add(connection)
        try:
            assert isinstance(self.ssl_context, ssl.SSLContext)  # noqa: S101 - set above
            request.settimeout(_HANDSHAKE_TIMEOUT_S)
            wrapped = self.ssl_context.wrap_socket(request, server_side=True)
            with self._open_lock:
                self._open.discard(connection)
                connection = wrapped
                self._open.add(connection)
            wrapped.settimeout(None)
            self.finish_request(wrapped, client_address)
        except (OSError, ValueError):
            pass  # the client broke off, or the server is being stopped
        finally:
            with self._open_lock:
                self._open.discard(connection)
            self.shutdown_request(connection)

    def close_connections(self) -> None:
        """End the connections that clients keep alive."""
        with self._open_lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


class ApiServer:
    """Serves an `Api` over HTTPS with a certificate of its own authority."""

    def __init__(self, api: Api) -> None:
        self._api = api
        authority = trustme.CA(organization_name="nodemend local cluster")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert(_HOST, "localhost", "kubernetes.default.svc").configure_cert(context)
        self.ca_pem = authority.cert_pem.bytes().decode()
        self._context = context
        self._server: _TlsServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Where the server listens; raises RuntimeError before `start`."""
        if self._server is None:
            raise RuntimeError("the Kubernetes emulator is not started: call start() first")
        return f"https://{_HOST}:{self._server.server_port}"

    def start(self) -> None:
        """Listen on a free port."""
        self._server = _TlsServer(self._application, self._context)
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.05},
            name="kubernetes-api",
            daemon=True,
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop listening and end open connections; a second call does nothing."""
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._server.close_connections()
        self._thread.join()
        self._server.server_close()
        self._server = self._thread = None

    def _application(
        self, environ: "WSGIEnvironment", start_response: "StartResponse"
    ) -> Iterable[bytes]:
        request = Request(environ)
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        answer = self._api.handle(
            ApiRequest(
                method=request.method,
                path=request.path,
                query=request.args.to_dict(),
                content_type=request.headers.get("Content-Type", ""),
                user_agent=request.headers.get("User-Agent", ""),
                token=token.strip() if scheme.lower() == "bearer" else None,
                body=request.get_data(),
            )
        )
        response = Response(
            answer.body, answer.status, content_type=answer.content_type, headers=answer.headers
        )
        return response(environ, start_response)
