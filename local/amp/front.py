"""AMP's data plane before a real Prometheus.

What the managed service does differently from Prometheus is done here: the workspace in the path,
SigV4 with the service name `aps`, its query cost limits, its refusal of URLs with raw braces, 422
where Prometheus says 503 for a query that takes too long, and its error bodies for throttling and
access. The rest of a request goes to Prometheus as it is, and so does the answer.
"""

import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlencode

import urllib3
from werkzeug.wrappers import Request, Response

from local import sigv4
from local.calls import ApiFault, CallLog, FaultPlan
from local.identity import Identities

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

SERVICE = "amp"
SIGNING_NAME = "aps"

_PATH = re.compile(r"/workspaces/([^/]+)/api/v1/(.+)")
_RESOURCES = re.compile(r"query|query_range|series|labels|label/[^/]+/values|rules|alerts|metadata")
_UNSAFE_IN_QUERY = re.compile(r'[{}"<>|\\^`\s]')
"""Characters that a URL may not hold unencoded; AMP's front refuses them (awscurl #197)."""
_WARNING = "max_samples_processed_warning_threshold"
_ERROR = "max_samples_processed_error_threshold"
_QUERIES = frozenset({"query", "query_range"})
_ACTIONS = defaultdict(
    lambda: "aps:QueryMetrics",
    rules="aps:ListRules",
    alerts="aps:ListAlerts",
    series="aps:GetSeries",
    labels="aps:GetLabels",
    values="aps:GetLabels",
    metadata="aps:GetMetricMetadata",
)
_TIMED_OUT = "query timed out - consider simplifying your query"
_PROMETHEUS_TIMEOUT_S = 90.0
_HOP_HEADERS = frozenset({"connection", "content-length", "transfer-encoding", "date", "server"})

Pairs = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class _Call:
    workspace: str
    resource: str
    method: str
    parameters: Pairs
    caller: str

    @property
    def verb(self) -> str:
        return self.resource.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    body: bytes
    headers: Mapping[str, str]


class AmpFront:
    """WSGI application that answers as `aps-workspaces.<region>.amazonaws.com` does.

    Args:
        workspaces: Base URL of the Prometheus behind each workspace id.
        identities: Who may sign.
        calls: Where each request is reported (service `amp`, verb the last part of the path, target
            the workspace, caller by the signing key).
        faults: Asked before each answer. Status 422 without a body is AMP's time-out, 429 its
            throttling, 200 with a body that body, and 200 without one the real answer marked as
            partial by a warning.
        region: That requests must be signed for.
        clock: Unix seconds, for the age of signatures.
    """

    def __init__(
        self,
        workspaces: Mapping[str, str],
        *,
        identities: Identities,
        calls: CallLog | None = None,
        faults: FaultPlan | None = None,
        region: str = "us-east-1",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._workspaces = workspaces
        self._identities = identities
        self._calls = calls or CallLog()
        self._faults = faults or FaultPlan()
        self._region = region
        self._clock = clock
        self._http = urllib3.PoolManager(maxsize=16)

    @staticmethod
    def handles(path: str) -> bool:
        """Tell whether a path is the data plane's, for a front that shares its port.

        The control plane (`/workspaces/<id>`, …/rulegroupsnamespaces) is not.
        """
        return _PATH.fullmatch(path) is not None

    def close(self) -> None:
        """Close the connections to Prometheus."""
        self._http.clear()

    def __call__(
        self, environ: "WSGIEnvironment", start_response: "StartResponse"
    ) -> Iterable[bytes]:
        """Answer one request."""
        request = Request(environ)
        answer = self._handle(request)
        response = Response(answer.body, answer.status, headers=dict(answer.headers))
        return response(environ, start_response)

    def _handle(self, request: Request) -> _Answer:
        raw_path, query_string = _raw_target(request)
        found = _PATH.fullmatch(unquote(raw_path))
        if found is None or not _RESOURCES.fullmatch(found[2]):
            return _aws_error(404, "UnknownOperationException", "Unknown operation")
        workspace, resource = found.groups()
        body = request.get_data()
        caller = "unknown"
        try:
            caller = self._verify(request, raw_path, query_string, body)
            call = _Call(
                workspace,
                resource,
                request.method,
                _parameters(request, query_string, body),
                caller,
            )
            answer = self._answer(call)
        except _Refusal as refusal:
            answer = _aws_error(refusal.status, refusal.code, refusal.message)
        self._calls.add(
            service=SERVICE,
            verb=resource.rpartition("/")[2],
            target=workspace,
            caller=caller,
            status=answer.status,
        )
        return answer

    def _verify(self, request: Request, raw_path: str, query_string: str, body: bytes) -> str:
        if _UNSAFE_IN_QUERY.search(query_string):
            raise _Refusal(400, "InvalidQueryStringException", "Invalid query string")
        try:
            return sigv4.verify_request(
                method=request.method,
                raw_path=raw_path,
                query_string=query_string,
                headers=list(request.headers.items()),
                body=body,
                identities=self._identities,
                services={SIGNING_NAME},
                region=self._region,
                clock=self._clock,
            )
        except sigv4.SignatureError as error:
            raise _Refusal(403, error.code, str(error)) from error

    def _answer(self, call: _Call) -> _Answer:
        fault = self._faults.match(SERVICE, call.verb, call.workspace, call.caller)
        if fault is not None and not (fault.status == HTTPStatus.OK and fault.body is None):
            return _injected(fault, call)
        base = self._workspaces.get(call.workspace)
        if base is None:
            raise _Refusal(
                404, "ResourceNotFoundException", f"Workspace not found: {call.workspace}"
            )
        answer = self._ask(base, call)
        if fault is not None:
            answer = _with_warning(answer, "results are partial: not all data could be read")
        return answer

    def _ask(self, base: str, call: _Call) -> _Answer:
        limits = {name: _limit(call.parameters, name) for name in (_WARNING, _ERROR)}
        parameters = [pair for pair in call.parameters if pair[0] not in limits]
        is_measured = call.resource in _QUERIES and any(v is not None for v in limits.values())
        wants_stats = any(name == "stats" and value for name, value in parameters)
        if is_measured and not wants_stats:
            parameters.append(("stats", "all"))
        answer = self._forward(base, call, parameters)
        if call.resource == "rules":
            answer = _with_namespaces(answer)
        if is_measured and answer.status == HTTPStatus.OK:
            answer = _limited(answer, limits, keep_stats=wants_stats)
        return answer

    def _forward(self, base: str, call: _Call, parameters: Pairs) -> _Answer:
        url = f"{base}/api/v1/{call.resource}"
        encoded = urlencode(parameters)
        headers = {}
        content = None
        if call.method == "POST":
            headers["Content-Type"] = "application/x-www-form-urlencoded"
            content = encoded.encode()
        elif encoded:
            url += f"?{encoded}"
        try:
            answer = self._http.request(
                call.method,
                url,
                body=content,
                headers=headers,
                timeout=_PROMETHEUS_TIMEOUT_S,
                retries=False,
            )
        except urllib3.exceptions.HTTPError as error:
            raise _Refusal(503, "ServiceUnavailableException", "Service Unavailable") from error
        kept = {
            name: value
            for name, value in answer.headers.items()
            if name.lower() not in _HOP_HEADERS
        }
        return _as_amp(_Answer(answer.status, answer.data, kept))


class _Refusal(Exception):  # noqa: N818 - an answer on its way out, not a failure of ours
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


def _raw_target(request: Request) -> tuple[str, str]:
    """Return path and query as they came over the wire: the signature covers them undecoded."""
    raw = request.environ.get("RAW_URI") or request.environ.get("REQUEST_URI")
    if isinstance(raw, str) and raw.startswith("/"):
        path, _, query_string = raw.partition("?")
        return path, query_string
    return request.path, request.query_string.decode("latin-1")


def _parameters(request: Request, query_string: str, body: bytes) -> Pairs:
    pairs = parse_qsl(query_string, keep_blank_values=True)
    if request.method == "POST" and request.mimetype == "application/x-www-form-urlencoded":
        pairs += parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True)
    return pairs


def _limit(parameters: Pairs, name: str) -> int | None:
    value = next((value for key, value in parameters if key == name), None)
    if value is None:
        return None
    if not re.fullmatch(r"[1-9]\d{0,17}", value):
        raise _Refusal(400, "ValidationException", f"invalid parameter {name!r}: {value!r}")
    return int(value)


def _limited(answer: _Answer, limits: Mapping[str, int | None], *, keep_stats: bool) -> _Answer:
    document = json.loads(answer.body)
    statistics = document["data"].get("stats") or {}
    samples = statistics.get("samples", {}).get("totalQueryableSamples", 0)
    warning, error = limits[_WARNING], limits[_ERROR]
    if error is not None and samples > error:
        return _prometheus_error(
            422, "execution", f"query processed {samples} samples: more than the limit of {error}"
        )
    if not keep_stats:
        document["data"].pop("stats", None)
    if warning is not None and samples > warning:
        text = f"query processed {samples} samples: more than the warning threshold of {warning}"
        document.setdefault("warnings", []).append(text)
    return _json(200, document)


def _with_namespaces(answer: _Answer) -> _Answer:
    """Name the rule groups' namespaces: AMP has no files, and says the namespace instead."""
    if answer.status != HTTPStatus.OK:
        return answer
    document = json.loads(answer.body)
    for group in document["data"]["groups"]:
        group["file"] = PurePosixPath(group["file"]).stem
    return _json(200, document)


def _with_warning(answer: _Answer, text: str) -> _Answer:
    if answer.status != HTTPStatus.OK:
        return answer
    document = json.loads(answer.body)
    document.setdefault("warnings", []).append(text)
    return _json(200, document)


def _as_amp(answer: _Answer) -> _Answer:
    """Turn Prometheus' time-outs into AMP's.

    Prometheus says 503 with the type `timeout`, or 422 if the time ran out while it read series.
    """
    if answer.status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.UNPROCESSABLE_ENTITY):
        try:
            document = json.loads(answer.body)
        except ValueError:
            return answer
        text = str(document.get("error"))
        if document.get("errorType") == "timeout" or "context deadline exceeded" in text:
            return _prometheus_error(422, "execution", _TIMED_OUT)
    return answer


def _injected(fault: ApiFault, call: _Call) -> _Answer:
    if fault.body is not None:
        return _Answer(
            fault.status,
            fault.body.encode(),
            {"Content-Type": "application/json", **fault.headers},
        )
    answer = _usual(fault.status, call)
    return _Answer(answer.status, answer.body, {**answer.headers, **fault.headers})


def _usual(status: int, call: _Call) -> _Answer:
    """Return what AMP says with a status."""
    match status:
        case 400:
            return _prometheus_error(400, "bad_data", "invalid parameter")
        case 403:
            return _aws_error(
                403,
                "AccessDeniedException",
                f"User: {call.caller} is not authorized to perform: {_ACTIONS[call.verb]}"
                f" on resource: workspace/{call.workspace}",
            )
        case 422:
            return _prometheus_error(422, "execution", _TIMED_OUT)
        case 429:
            return _aws_error(429, "ThrottlingException", "Rate exceeded")
        case 499:
            return _prometheus_error(499, "canceled", "context canceled")
        case 503:
            return _aws_error(503, "ServiceUnavailableException", "Service Unavailable")
        case 504:
            return _aws_error(504, "GatewayTimeoutException", "Endpoint request timed out")
        case _:
            return _aws_error(status, "InternalServerException", "Internal server error")


def _prometheus_error(status: int, kind: str, text: str) -> _Answer:
    return _json(status, {"status": "error", "errorType": kind, "error": text})


def _aws_error(status: int, code: str, message: str) -> _Answer:
    answer = _json(status, {"message": message})
    return _Answer(status, answer.body, {**answer.headers, "x-amzn-ErrorType": code})


def _json(status: int, document: dict[str, Any]) -> _Answer:
    body = json.dumps(document, separators=(",", ":")).encode()
    return _Answer(status, body, {"Content-Type": "application/json"})
