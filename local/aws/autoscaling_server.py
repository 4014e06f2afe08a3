"""Both fronts on a loopback port of their own, for tests and for looking at them with any SDK.

The pipeline on the laptop does not use it: there, the AWS front mounts both applications itself.
"""

import re
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server
from werkzeug.wrappers import Request, Response

from local.aws.autoscaling import AutoScalingFront, Ec2Front
from local.aws.autoscaling_model import CapacityModel
from local.aws.autoscaling_wire import QueryFront
from local.calls import CallLog

_SCOPE = re.compile(r"Credential=[^/]+/\d{8}/[^/]+/(?P<service>[^/]+)/aws4_request")


class _QuietHandler(WSGIRequestHandler):
    """Without an access log: the calls stand in the `CallLog`."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        pass


class CapacityServer:
    """Serves `autoscaling` and `ec2` by the credential scope of the signature, and logs the calls.

    Example:
        >>> from local.aws.autoscaling_model import CapacityModel
        >>> with CapacityServer(CapacityModel()) as server:
        ...     server.url.startswith("http://127.0.0.1:")
        True
    """

    def __init__(self, model: CapacityModel, log: CallLog | None = None) -> None:
        self.model = model
        self.log = log or CallLog()
        self.autoscaling = AutoScalingFront(model)
        self.ec2 = Ec2Front(model)
        self._fronts: Mapping[str, QueryFront] = {
            front.service: front for front in (self.autoscaling, self.ec2)
        }
        self._server: BaseWSGIServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """The `endpoint_url` for a client."""
        if self._server is None:
            raise RuntimeError("the server does not run")
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._server = make_server(
            "127.0.0.1",
            0,
            Request.application(self._dispatch),
            threaded=True,
            request_handler=_QuietHandler,
        )
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), name="capacity-server", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for front in self._fronts.values():
            front.close()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        if self._thread is not None:
            self._thread.join()

    def _dispatch(self, request: Request) -> Response:
        match = _SCOPE.search(request.headers.get("Authorization", ""))
        front = self._fronts.get(match["service"]) if match else None
        if front is None:
            return Response("no front for this credential scope", status=404)
        verb, target, is_mutation = front.describe_call(request)
        response = front.handle(request)
        self.log.add(
            service=front.service,
            verb=verb,
            target=target,
            caller="unknown",
            status=response.status_code,
            is_mutation=is_mutation and response.status_code < 400,
        )
        return response
