"""AWS requests and errors as they look on the wire.

A request's service comes from its SigV4 credential scope, its action from the protocol: the
`X-Amz-Target` header (JSON), the `Action` field (query), or method and path (REST).
"""

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape

from werkzeug.wrappers import Response

_CREDENTIAL = re.compile(r"Credential=([^/,\s]+)/(\d{8})/([^/]+)/([^/]+)/aws4_request")

INFRASTRUCTURE_SERVICES = frozenset({"autoscaling", "ec2", "eks", "sagemaker"})
_READ_VERBS = ("Describe", "Get", "List", "Lookup", "Search", "BatchGet", "Head")


class Protocol(Enum):
    """How a service words its requests and errors."""

    JSON = "json"
    QUERY = "query"
    EC2 = "ec2"
    REST_JSON = "rest-json"
    CBOR = "cbor"


@dataclass(frozen=True)
class AwsRequest:
    """One signed request, read completely, with what can be told without a service model."""

    method: str
    path: str
    query_string: str
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes
    service: str
    """The service as signed (`states`, `monitoring`, `aps`…); empty if unsigned."""
    region: str
    access_key_id: str
    caller: str = "unknown"
    fault: Mapping[str, str] = field(default_factory=dict)
    """The steering headers of the fault in force, in lower case."""
    environ: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The WSGI environment, to hand the request on."""

    @cached_property
    def protocol(self) -> Protocol:
        """The protocol, told from the request's own form."""
        if self.headers.get("smithy-protocol") == "rpc-v2-cbor":
            return Protocol.CBOR
        if "x-amz-target" in self.headers:
            return Protocol.JSON
        if self.service == "ec2":
            return Protocol.EC2
        if "Action" in self.form:
            return Protocol.QUERY
        return Protocol.REST_JSON

    @cached_property
    def form(self) -> dict[str, str]:
        """Fields of a query-protocol request: the query string, then the form body."""
        fields = parse_qs(self.query_string, keep_blank_values=True)
        if self.headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
            fields.update(parse_qs(self.body.decode("utf-8", "replace"), keep_blank_values=True))
        return {name: values[0] for name, values in fields.items()}

    @cached_property
    def json(self) -> dict[str, Any]:
        """The JSON body, or an empty object if there is none."""
        try:
            parsed = json.loads(self.body or b"{}")
        except ValueError:
            return {}
        return parsed if isinstance(parsed, dict) else {}

    @cached_property
    def action(self) -> str:
        """The API action; for REST services that are not known here, method and path."""
        if self.protocol is Protocol.JSON:
            return self.headers["x-amz-target"].rpartition(".")[2]
        if self.protocol is Protocol.CBOR:
            return self.path.rpartition("/")[2]
        if "Action" in self.form:
            return self.form["Action"]
        return _rest_action(self.service, self.method, self.path)

    @cached_property
    def target(self) -> str:
        """What the call is about, as far as it can be told: a table, queue, bus or instance."""
        return _target(self)

    @property
    def is_infrastructure_write(self) -> bool:
        """True for calls that change machines (EC2, Auto Scaling, EKS, SageMaker HyperPod)."""
        return (
            self.service in INFRASTRUCTURE_SERVICES
            and not self.action.startswith(_READ_VERBS)
            and self.form.get("DryRun", "").lower() != "true"
        )


def read_request(environ: dict[str, Any], body: bytes) -> AwsRequest:
    """Build the request from a WSGI environment whose body was read already."""
    headers = {
        name[5:].replace("_", "-").lower(): value
        for name, value in environ.items()
        if name.startswith("HTTP_")
    }
    headers["content-type"] = environ.get("CONTENT_TYPE", "")
    query = environ.get("QUERY_STRING", "")
    scope = _CREDENTIAL.search(headers.get("authorization", "")) or _CREDENTIAL.search(
        unquote(query).replace("X-Amz-Credential=", "Credential=")
    )
    access_key_id, _, region, service = scope.groups() if scope else ("", "", "", "")
    return AwsRequest(
        method=environ["REQUEST_METHOD"],
        path=environ.get("PATH_INFO", "/"),
        query_string=query,
        headers=headers,
        body=body,
        service=service,
        region=region,
        access_key_id=access_key_id,
        environ=environ,
    )


_REST_ACTIONS: dict[str, list[tuple[str, str, str]]] = {
    "lambda": [
        ("POST", r"/functions/[^/]+/invocations$", "Invoke"),
        ("GET", r"/functions/[^/]+$", "GetFunction"),
        ("GET", r"/functions/[^/]+/configuration$", "GetFunctionConfiguration"),
        ("GET", r"/functions/?$", "ListFunctions"),
    ],
    "eks": [
        ("GET", r"^/clusters$", "ListClusters"),
        ("GET", r"^/clusters/[^/]+$", "DescribeCluster"),
        ("GET", r"^/clusters/[^/]+/node-groups$", "ListNodegroups"),
        ("GET", r"^/clusters/[^/]+/node-groups/[^/]+$", "DescribeNodegroup"),
        ("POST", r"^/clusters/[^/]+/node-groups/[^/]+/update-config$", "UpdateNodegroupConfig"),
        ("POST", r"^/clusters/[^/]+/node-groups/[^/]+/update-version$", "UpdateNodegroupVersion"),
        ("GET", r"^/clusters/[^/]+/updates", "DescribeUpdate"),
    ],
    "aps": [
        ("POST", r"/api/v1/query$", "QueryMetrics"),
        ("GET", r"/api/v1/query$", "QueryMetrics"),
        ("POST", r"/api/v1/query_range$", "QueryMetrics"),
        ("GET", r"/api/v1/query_range$", "QueryMetrics"),
        ("GET", r"/api/v1/label", "GetLabels"),
        ("GET", r"/api/v1/series", "GetSeries"),
        ("GET", r"^/workspaces/[^/]+$", "DescribeWorkspace"),
    ],
    "appconfig": [
        ("POST", r"^/configurationsessions$", "StartConfigurationSession"),
        ("GET", r"^/configuration$", "GetLatestConfiguration"),
        ("POST", r"/deployments$", "StartDeployment"),
        ("GET", r"/deployments$", "ListDeployments"),
        ("GET", r"/deployments/\d+$", "GetDeployment"),
        ("DELETE", r"/deployments/\d+$", "StopDeployment"),
        ("POST", r"/hostedconfigurationversions$", "CreateHostedConfigurationVersion"),
        ("GET", r"/hostedconfigurationversions$", "ListHostedConfigurationVersions"),
        ("GET", r"/hostedconfigurationversions/\d+$", "GetHostedConfigurationVersion"),
        ("POST", r"/configurationprofiles$", "CreateConfigurationProfile"),
        ("GET", r"/configurationprofiles$", "ListConfigurationProfiles"),
        ("GET", r"/configurationprofiles/[^/]+$", "GetConfigurationProfile"),
        ("POST", r"/configurationprofiles/[^/]+/validators$", "ValidateConfiguration"),
        ("POST", r"/environments$", "CreateEnvironment"),
        ("GET", r"/environments$", "ListEnvironments"),
        ("GET", r"/environments/[^/]+$", "GetEnvironment"),
        ("POST", r"^/applications$", "CreateApplication"),
        ("GET", r"^/applications$", "ListApplications"),
        ("GET", r"^/applications/[^/]+$", "GetApplication"),
        ("POST", r"^/deploymentstrategies$", "CreateDeploymentStrategy"),
        ("GET", r"^/deploymentstrategies$", "ListDeploymentStrategies"),
    ],
    "scheduler": [
        ("POST", r"^/schedules/[^/]+$", "CreateSchedule"),
        ("GET", r"^/schedules/[^/]+$", "GetSchedule"),
        ("PUT", r"^/schedules/[^/]+$", "UpdateSchedule"),
        ("GET", r"^/schedules$", "ListSchedules"),
    ],
}


def _rest_action(service: str, method: str, path: str) -> str:
    for known_method, pattern, action in _REST_ACTIONS.get(service, ()):
        if known_method == method and re.search(pattern, path):
            return action
    return f"{method} {path}"


def _last(value: object) -> str:
    return re.split(r"[:/]", str(value or ""))[-1]


_JSON_TARGETS: dict[str, tuple[str, ...]] = {
    "dynamodb": ("TableName",),
    "sqs": ("QueueUrl", "QueueName"),
    "states": ("executionArn", "stateMachineArn", "name"),
    "logs": ("logGroupName",),
    "sagemaker": ("ClusterName",),
}
_FORM_TARGETS: dict[str, tuple[str, ...]] = {
    "autoscaling": ("InstanceId", "InstanceIds.member.1", "AutoScalingGroupName"),
    "ec2": ("InstanceId.1", "InstanceId", "ResourceId.1", "VolumeId.1", "VolumeId"),
    "sns": ("TopicArn", "Name"),
    "sts": ("RoleArn",),
}


def _target(request: AwsRequest) -> str:
    if request.service == "events":
        entries = request.json.get("Entries") or [{}]
        bus = entries[0].get("EventBusName") or request.json.get("EventBusName")
        return _last(bus) or _last(request.json.get("Name")) or "default"
    if request.service == "dynamodb":
        return _dynamodb_target(request.json)
    if request.protocol in (Protocol.QUERY, Protocol.EC2):
        names = _FORM_TARGETS.get(request.service, ())
        return next((_last(request.form[name]) for name in names if request.form.get(name)), "")
    if request.protocol is Protocol.JSON:
        names = _JSON_TARGETS.get(request.service, ())
        return next((_last(request.json[name]) for name in names if request.json.get(name)), "")
    parts = [unquote(part) for part in request.path.split("/") if part]
    if request.service == "lambda" and "functions" in parts[:-1]:
        return _last(parts[parts.index("functions") + 1])
    if request.service in ("eks", "aps") and len(parts) > 1:
        return parts[3] if "node-groups" in parts and len(parts) > 3 else parts[1]
    return request.path


def _dynamodb_target(body: dict[str, Any]) -> str:
    if "TableName" in body:
        return _last(body["TableName"])
    if isinstance(body.get("RequestItems"), dict):
        return ",".join(sorted(body["RequestItems"]))
    tables = {
        operation.get("TableName", "")
        for item in body.get("TransactItems") or ()
        for operation in item.values()
    }
    return ",".join(sorted(tables))


_CODES: dict[int, str] = {
    400: "ValidationException",
    401: "UnrecognizedClientException",
    403: "AccessDeniedException",
    404: "ResourceNotFoundException",
    409: "ConflictException",
    429: "ThrottlingException",
    500: "InternalServerError",
    503: "ServiceUnavailableException",
}
_SERVICE_CODES: dict[tuple[str, int], str] = {
    ("dynamodb", 429): "ProvisionedThroughputExceededException",
    ("dynamodb", 503): "ServiceUnavailable",
    ("ec2", 400): "InvalidParameterValue",
    ("ec2", 403): "UnauthorizedOperation",
    ("ec2", 429): "RequestLimitExceeded",
    ("ec2", 500): "InternalError",
    ("ec2", 503): "Unavailable",
    ("lambda", 429): "TooManyRequestsException",
    ("lambda", 500): "ServiceException",
    ("lambda", 503): "ServiceException",
    ("events", 500): "InternalException",
    ("eks", 400): "InvalidParameterException",
    ("eks", 500): "ServerException",
}
_QUERY_CODES: dict[int, str] = {
    400: "ValidationError",
    403: "AccessDenied",
    404: "ResourceNotFound",
    429: "Throttling",
    500: "InternalFailure",
    503: "ServiceUnavailable",
}


def error_code(request: AwsRequest, status: int) -> str:
    """Return the code with which the service words an HTTP status."""
    if (code := _SERVICE_CODES.get((request.service, status))) is not None:
        return code
    if request.protocol in (Protocol.QUERY, Protocol.EC2) and status in _QUERY_CODES:
        return _QUERY_CODES[status]
    return _CODES.get(status, "InternalFailure" if status >= 500 else "ValidationException")


def error_response(
    request: AwsRequest, status: int, code: str, message: str, **extra: object
) -> Response:
    """Return an error in the request's protocol; `extra` fields go into JSON bodies."""
    request_id = str(uuid.uuid4())
    headers = {"x-amzn-RequestId": request_id}
    match request.protocol:
        case Protocol.JSON:
            body = json.dumps({"__type": code, "message": message, **extra})
            content_type = "application/x-amz-json-1.0"
        case Protocol.REST_JSON:
            body = json.dumps({"message": message, "Message": message, "Type": "User", **extra})
            content_type = "application/json"
            headers["x-amzn-ErrorType"] = code
        case Protocol.QUERY:
            kind = "Sender" if status < 500 else "Receiver"
            body = (
                f"<ErrorResponse><Error><Type>{kind}</Type><Code>{escape(code)}</Code>"
                f"<Message>{escape(message)}</Message></Error>"
                f"<RequestId>{request_id}</RequestId></ErrorResponse>"
            )
            content_type = "text/xml"
        case Protocol.EC2:
            body = (
                f"<Response><Errors><Error><Code>{escape(code)}</Code>"
                f"<Message>{escape(message)}</Message></Error></Errors>"
                f"<RequestID>{request_id}</RequestID></Response>"
            )
            content_type = "text/xml"
        case Protocol.CBOR:
            headers["smithy-protocol"] = "rpc-v2-cbor"
            return Response(
                _cbor_map({"__type": code, "message": message}),
                status=status,
                headers=headers,
                content_type="application/cbor",
            )
    return Response(body, status=status, headers=headers, content_type=content_type)


def json_response(body: object, status: int = 200, **headers: str) -> Response:
    """Return a JSON answer with a request id, as every AWS service gives one."""
    return Response(
        json.dumps(body),
        status=status,
        headers={"x-amzn-RequestId": str(uuid.uuid4()), **headers},
        content_type="application/json",
    )


def _cbor_text(value: str) -> bytes:
    raw = value.encode()
    if len(raw) < 24:
        return bytes([0x60 | len(raw)]) + raw
    if len(raw) < 0x100:
        return bytes([0x78, len(raw)]) + raw
    return b"\x79" + len(raw).to_bytes(2, "big") + raw


def _cbor_map(values: dict[str, str]) -> bytes:
    parts = [_cbor_text(part) for pair in values.items() for part in pair]
    return bytes([0xA0 | len(values)]) + b"".join(parts)
