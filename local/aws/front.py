"""The one endpoint of the emulated AWS.

It owns moto's port, knows who calls (from the access key), reports every call, injects faults,
serves what moto cannot through handlers, and leaves the rest to moto in the same process.
"""

import contextlib
import io
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

from moto.core.config import default_user_config
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.wrappers import Response
from werkzeug.wsgi import get_input_stream

from local.aws.server import LoopbackServer, WsgiApp
from local.aws.wire import AwsRequest, error_code, error_response, read_request
from local.calls import ApiFault, CallLog, FaultPlan
from local.identity import Credential, Identities

ACCOUNT_ID = "123456789012"
"""moto's default account; credentials of any role lead to it."""

Handler = Callable[[AwsRequest], Response]
Predicate = Callable[[AwsRequest], bool]
Describe = Callable[[dict[str, Any]], tuple[str, str, bool]]
"""WSGI environment to verb, target, and whether the call is meant to change machines."""

_LOGGER = logging.getLogger(__name__)
_MOTO_LOCK = threading.Lock()
"""moto's state is global to the process, so one front at a time may use it."""
_INTERPRETER_KEY = "ak"  # what moto's ASL interpreter signs its task calls with


class FrontError(RuntimeError):
    """The front cannot be started or used."""


@dataclass(frozen=True)
class _Route:
    predicate: Predicate
    serve: Handler
    observed: bool
    describe: Describe | None = None


@dataclass(frozen=True)
class _Call:
    """What the record and the fault plan are told of a request."""

    verb: str
    target: str
    is_write: bool


def _serve_wsgi(app: WsgiApp) -> Handler:
    def serve(request: AwsRequest) -> Response:
        return Response.from_app(app, _fresh(request), buffered=True)

    return serve


class Front:
    """Serves all AWS requests of one stack.

    A fault (`local.calls.ApiFault`) names an AWS action as its verb. It may carry these headers,
    which steer the emulation and are not sent:

    - `x-local-when: after`: the call takes effect, then its answer is replaced (or lost).
    - `x-local-delay-s: SECONDS`: wait before the call is looked at.
    - `x-local-fail-entries: 0,2`: `PutEvents` refuses these entries and takes the others.

    - `x-local-kill: 1`: the Lambda worker that calls is killed, as if it died between two lines.

    Status 0 closes the connection without an answer.
    """

    def __init__(
        self, *, identities: Identities, log: CallLog, faults: FaultPlan, region: str
    ) -> None:
        self.identities = identities
        self.log = log
        self.faults = faults
        self.region = region
        self.account_id = ACCOUNT_ID
        self._routes: list[_Route] = []
        self._moto = DomainDispatcherApplication(create_backend_app)
        queues = threading.RLock()  # SNS writes into queues too
        self._locks = {"dynamodb": threading.RLock(), "sqs": queues, "sns": queues}
        self._server: LoopbackServer | None = None
        self._previous_port: str | None = None
        self.kill_caller: Callable[[str], None] = lambda _access_key_id: None
        """Kills the process behind an access key; the Lambda service sets it."""
        self.states_credential = Credential(_INTERPRETER_KEY, "sk", "", "states")

    @property
    def port(self) -> int:
        """The front's port, once started."""
        if self._server is None:
            raise FrontError("the front is not running")
        return self._server.port

    @property
    def url(self) -> str:
        """What `AWS_ENDPOINT_URL` is set to."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Take moto for this front and listen."""
        if not _MOTO_LOCK.acquire(blocking=False):
            raise FrontError("another front is running in this process; stop it first")
        try:
            reset_moto()
            default_user_config["stepfunctions"] = {"execute_state_machine": True}
            self.identities.register(self.states_credential)
            self._server = LoopbackServer(self, "aws-front")
            self._server.start()
        except BaseException:
            _MOTO_LOCK.release()
            raise
        # moto's interpreter calls http://localhost:$MOTO_PORT and reads the variable each time.
        self._previous_port = os.environ.get("MOTO_PORT")
        os.environ["MOTO_PORT"] = str(self._server.port)

    def stop(self) -> None:
        """Stop listening, cut open connections, and give moto back empty."""
        if self._server is None:
            return
        self._server.stop()
        self._server = None
        if self._previous_port is None:
            os.environ.pop("MOTO_PORT", None)
        else:
            os.environ["MOTO_PORT"] = self._previous_port
        default_user_config["stepfunctions"] = {"execute_state_machine": False}
        reset_moto()
        _MOTO_LOCK.release()

    def route(self, service: str, handler: Handler, actions: frozenset[str] | None = None) -> None:
        """Serve a service (or only some of its actions) by a function of ours."""

        def is_ours(request: AwsRequest) -> bool:
            return request.service == service and (actions is None or request.action in actions)

        self._routes.append(_Route(is_ours, handler, True))

    def mount(
        self,
        predicate: Predicate,
        app: WsgiApp,
        *,
        observed: bool = True,
        describe: Describe | None = None,
    ) -> None:
        """Serve matching requests by another WSGI application instead of moto.

        The first match wins. The application finds the caller in the environment, as
        `local.caller`.

        Args:
            predicate: Which requests are the application's.
            app: The application.
            observed: False if it reports its calls and asks for faults itself.
            describe: Tells verb, target and mutation better than the front can.
        """
        self._routes.append(_Route(predicate, _serve_wsgi(app), observed, describe))

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:  # noqa: ANN401 - WSGI
        """Serve one request."""
        body = get_input_stream(environ).read()
        environ["wsgi.input"] = io.BytesIO(body)
        environ["CONTENT_LENGTH"] = str(len(body))
        environ.pop("HTTP_TRANSFER_ENCODING", None)
        environ.pop("wsgi.input_terminated", None)
        request = read_request(environ, body)
        credential = self.identities.lookup(request.access_key_id)
        if credential is not None:
            request = replace(request, caller=credential.caller)
        environ["local.caller"] = request.caller
        route = next((known for known in self._routes if known.predicate(request)), None)
        if route is not None and not route.observed:
            response = self._guarded(route, request)
        else:
            response = self._observe(route, request)
        return response(environ, start_response)

    def _observe(self, route: _Route | None, request: AwsRequest) -> Response:
        call = _describe(route, request)
        fault = self.faults.match(request.service, call.verb, call.target, request.caller)
        if fault is None:
            response = self._guarded(route, request)
            self._record(request, call, response.status_code, response.status_code)
            return response
        request = replace(
            request, fault={name.lower(): value for name, value in fault.headers.items()}
        )
        time.sleep(float(request.fault.get("x-local-delay-s", 0)))
        response, happened = self._fail(route, request, fault)
        kills = "x-local-kill" in request.fault
        status = 0 if fault.status == 0 or kills else response.status_code
        self._record(request, call, status, happened)
        if kills:
            self.kill_caller(request.access_key_id)
        if status == 0:
            raise ConnectionResetError("the answer is lost by order of the fault plan")
        return response

    def _fail(
        self, route: _Route | None, request: AwsRequest, fault: ApiFault
    ) -> tuple[Response, int]:
        """Return the answer that the fault wants, and the status of what really happened."""
        if "x-local-fail-entries" in request.fault:
            response = self._guarded(route, request)
            return response, response.status_code
        if request.fault.get("x-local-when") == "after":
            return _fault_response(request, fault), self._guarded(route, request).status_code
        return _fault_response(request, fault), 0

    def _record(self, request: AwsRequest, call: _Call, status: int, happened: int) -> None:
        self.log.add(
            service=request.service,
            verb=call.verb,
            target=call.target,
            caller=request.caller,
            status=status,
            is_mutation=call.is_write and 200 <= happened < 300,
        )

    def _guarded(self, route: _Route | None, request: AwsRequest) -> Response:
        try:
            if route is not None:
                return route.serve(request)
            return self.ask_moto(request)
        except Exception as error:
            _LOGGER.exception("%s %s failed in the emulation", request.service, request.action)
            return error_response(
                request, 500, error_code(request, 500), f"{type(error).__name__}: {error}"
            )

    def ask_moto(self, request: AwsRequest, body: bytes | None = None) -> Response:
        """Let moto serve a request, also one that a handler took first (with another body)."""
        environ = _fresh(request, body)
        with self._serialised(request):
            return Response.from_app(cast("WsgiApp", self._moto), environ, buffered=True)

    @contextlib.contextmanager
    def _serialised(self, request: AwsRequest) -> Iterator[None]:
        """Hold the service's lock: moto loses updates and doubles messages without it.

        A long poll waits inside moto, so it goes without.
        """
        lock = self._locks.get(request.service)
        if lock is None or (request.action == "ReceiveMessage" and _is_long_poll(request)):
            yield
            return
        with lock:
            yield


def _fresh(request: AwsRequest, body: bytes | None = None) -> dict[str, Any]:
    """Return the request's environment with its body unread."""
    content = request.body if body is None else body
    return {
        **request.environ,
        "wsgi.input": io.BytesIO(content),
        "CONTENT_LENGTH": str(len(content)),
    }


def _describe(route: _Route | None, request: AwsRequest) -> _Call:
    if route is not None and route.describe is not None:
        return _Call(*route.describe(_fresh(request)))
    return _Call(request.action, request.target, request.is_infrastructure_write)


def _is_long_poll(request: AwsRequest) -> bool:
    return int(request.json.get("WaitTimeSeconds") or 0) > 0


def _fault_response(request: AwsRequest, fault: ApiFault) -> Response:
    if fault.status == 0:
        return Response(status=500)
    message = "injected by the fault plan"
    response = error_response(request, fault.status, error_code(request, fault.status), message)
    if fault.body is not None:
        response.set_data(fault.body)
    for name, value in fault.headers.items():
        if not name.lower().startswith("x-local-"):
            response.headers[name] = value
    return response


def reset_moto() -> None:
    """Empty all of moto's backends that were used."""
    from moto.moto_api._internal import moto_api_backend  # noqa: PLC0415 - costs 0.2 s

    moto_api_backend.reset()
