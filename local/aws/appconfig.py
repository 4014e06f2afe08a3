"""AppConfig: applications, hosted versions, deployments with their validators, and the data plane.

Deployments are complete at once, whatever their strategy says: nobody waits for a bake time here.
"""

import base64
import json
import secrets
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote

import jsonschema
from werkzeug.wrappers import Response

from local.aws.front import Front
from local.aws.wire import AwsRequest, error_response, json_response

InvokeValidator = Callable[[str, bytes], tuple[bytes, str | None]]
"""Function ARN and event to payload and function error."""

DEFAULT_POLL_S = 60
TOKEN_LIFETIME_S = 24 * 3600
PREDEFINED_STRATEGIES = (
    "AppConfig.AllAtOnce",
    "AppConfig.Linear50PercentEvery30Seconds",
    "AppConfig.Canary10Percent20Minutes",
    "AppConfig.Linear20PercentEvery6Minutes",
)


class AppConfigError(Exception):
    """An answer other than 2xx."""

    def __init__(self, status: int, code: str, message: str, **extra: object) -> None:
        super().__init__(message)
        self.status, self.code, self.extra = status, code, extra


def _not_found(kind: str, identifier: str) -> AppConfigError:
    message = f"{kind} not found for {identifier}"
    return AppConfigError(404, "ResourceNotFoundException", message, ResourceType=kind)


@dataclass
class _Profile:
    fields: dict[str, Any]
    versions: dict[int, dict[str, Any]] = field(default_factory=dict)


@dataclass
class _Environment:
    fields: dict[str, Any]
    deployments: list[dict[str, Any]] = field(default_factory=list)
    live: dict[str, int] = field(default_factory=dict)
    """Profile id to the version that clients get."""


@dataclass
class _Application:
    fields: dict[str, Any]
    environments: dict[str, _Environment] = field(default_factory=dict)
    profiles: dict[str, _Profile] = field(default_factory=dict)


@dataclass
class _Session:
    application_id: str
    environment_id: str
    profile_id: str
    minimum_poll_s: int | None
    seen_version: int | None = None
    last_poll: float = 0.0
    issued: float = 0.0


def _find(items: dict[str, Any], identifier: str, kind: str) -> tuple[str, Any]:
    """Find by id or name."""
    for item_id, item in items.items():
        if identifier in (item_id, item.fields["Name"]):
            return item_id, item
    raise _not_found(kind, identifier)


def _new_id() -> str:
    return secrets.token_hex(4)[:7]


class AppConfigService:
    """AppConfig of one stack; `invoke` runs Lambda validators."""

    def __init__(self, front: Front, invoke: InvokeValidator) -> None:
        self._front = front
        self._invoke = invoke
        self._lock = threading.RLock()
        self._applications: dict[str, _Application] = {}
        self._strategies: dict[str, dict[str, Any]] = {
            name: {"Id": name, "Name": name} for name in PREDEFINED_STRATEGIES
        }
        self._sessions: dict[str, _Session] = {}
        front.route("appconfig", self.handle)

    def handle(self, request: AwsRequest) -> Response:
        """Serve both APIs: they share a signing name."""
        try:
            return self._dispatch(request)
        except AppConfigError as error:
            return error_response(request, error.status, error.code, str(error), **error.extra)

    def _dispatch(self, request: AwsRequest) -> Response:
        query = {name: values[0] for name, values in parse_qs(request.query_string).items()}
        if request.action == "StartConfigurationSession":
            return self._start_session(request.json)
        if request.action == "GetLatestConfiguration":
            return self._get_latest(query.get("configuration_token", ""))
        parts = [unquote(part) for part in request.path.split("/") if part]
        with self._lock:
            if request.action == "CreateHostedConfigurationVersion":
                return self._create_version(parts, request)
        if request.action in ("StartDeployment", "ValidateConfiguration"):
            if request.action == "StartDeployment":
                return self._start_deployment(parts, request.json)
            self._validate(*self._profile(parts), int(query["configuration_version"]))
            return Response(status=204)
        with self._lock:
            return self._manage(request, parts)

    # --- control plane -------------------------------------------------------------------------

    def _manage(self, request: AwsRequest, parts: list[str]) -> Response:
        match (request.method, *parts):
            case ("POST", "deploymentstrategies"):
                strategy = {"Id": _new_id(), **request.json}
                self._strategies[str(strategy["Id"])] = strategy
                return json_response(strategy, 201)
            case ("GET", "deploymentstrategies"):
                return json_response({"Items": list(self._strategies.values())})
            case ("POST", "applications"):
                fields = {"Id": _new_id(), **request.json}
                self._applications[str(fields["Id"])] = _Application(fields)
                return json_response(fields, 201)
            case ("GET", "applications"):
                return json_response({"Items": [one.fields for one in self._applications.values()]})
            case ("GET", "applications", identifier):
                return json_response(_find(self._applications, identifier, "Application")[1].fields)
            case (_, "applications", identifier, kind, *rest):
                application_id, application = _find(self._applications, identifier, "Application")
                base = {"ApplicationId": application_id}
                if kind == "environments":
                    return self._manage_environment(request, application, base, rest)
                if kind == "configurationprofiles":
                    return self._manage_profile(request, application, base, rest)
        raise AppConfigError(501, "NotImplemented", f"not served: {request.action}")

    def _manage_environment(
        self, request: AwsRequest, application: _Application, base: dict[str, str], rest: list[str]
    ) -> Response:
        match (request.method, *rest):
            case ("POST",):
                fields = {"Id": _new_id(), "State": "READY_FOR_DEPLOYMENT", **base, **request.json}
                application.environments[str(fields["Id"])] = _Environment(fields)
                return json_response(fields, 201)
            case ("GET",):
                items = [one.fields for one in application.environments.values()]
                return json_response({"Items": items})
            case ("GET", identifier):
                _, found = _find(application.environments, identifier, "Environment")
                return json_response(found.fields)
            case ("GET", identifier, "deployments"):
                _, found = _find(application.environments, identifier, "Environment")
                return json_response({"Items": found.deployments[::-1]})
            case ("GET", identifier, "deployments", number):
                _, found = _find(application.environments, identifier, "Environment")
                for deployment in found.deployments:
                    if str(deployment["DeploymentNumber"]) == number:
                        return json_response(deployment)
                raise _not_found("Deployment", number)
        raise AppConfigError(501, "NotImplemented", f"not served: {request.action}")

    def _manage_profile(
        self, request: AwsRequest, application: _Application, base: dict[str, str], rest: list[str]
    ) -> Response:
        match (request.method, *rest):
            case ("POST",):
                fields = {"Id": _new_id(), "Type": "AWS.Freeform", **base, **request.json}
                application.profiles[str(fields["Id"])] = _Profile(fields)
                return json_response(fields, 201)
            case ("GET",):
                return json_response(
                    {"Items": [one.fields for one in application.profiles.values()]}
                )
            case ("GET", identifier):
                _, found = _find(application.profiles, identifier, "ConfigurationProfile")
                return json_response(found.fields)
            case ("GET", identifier, "hostedconfigurationversions"):
                _, found = _find(application.profiles, identifier, "ConfigurationProfile")
                items = [
                    {name: value for name, value in version.items() if name != "Content"}
                    for version in found.versions.values()
                ]
                return json_response({"Items": items[::-1]})
            case ("GET", identifier, "hostedconfigurationversions", number):
                _, found = _find(application.profiles, identifier, "ConfigurationProfile")
                version = found.versions.get(int(number))
                if version is None:
                    raise _not_found("HostedConfigurationVersion", number)
                return _version_response(version, 200)
        raise AppConfigError(501, "NotImplemented", f"not served: {request.action}")

    def _profile(self, parts: list[str]) -> tuple[str, str, _Profile]:
        application_id, application = _find(self._applications, parts[1], "Application")
        profile_id, profile = _find(application.profiles, parts[3], "ConfigurationProfile")
        return application_id, profile_id, profile

    def _create_version(self, parts: list[str], request: AwsRequest) -> Response:
        application_id, profile_id, profile = self._profile(parts)
        latest = request.headers.get("latest-version-number")
        if latest is not None and int(latest) != max(profile.versions, default=0):
            message = f"latest version is {max(profile.versions, default=0)}, not {latest}"
            raise AppConfigError(409, "ConflictException", message)
        number = max(profile.versions, default=0) + 1
        version = {
            "ApplicationId": application_id,
            "ConfigurationProfileId": profile_id,
            "VersionNumber": number,
            "ContentType": request.headers.get("content-type", "application/octet-stream"),
            "Description": request.headers.get("description", ""),
            "VersionLabel": request.headers.get("versionlabel", ""),
            "Content": request.body,
        }
        profile.versions[number] = version
        return _version_response(version, 201)

    # --- deployments ---------------------------------------------------------------------------

    def _start_deployment(self, parts: list[str], body: dict[str, Any]) -> Response:
        with self._lock:
            application_id, application = _find(self._applications, parts[1], "Application")
            environment_id, environment = _find(application.environments, parts[3], "Environment")
            profile_id, profile = _find(
                application.profiles, body["ConfigurationProfileId"], "ConfigurationProfile"
            )
            if body["DeploymentStrategyId"] not in self._strategies:
                raise _not_found("DeploymentStrategy", body["DeploymentStrategyId"])
            number = _version_number(profile, str(body["ConfigurationVersion"]))
        # Validators run without the lock: they may read the configuration themselves.
        self._validate(application_id, profile_id, profile, number)
        with self._lock:
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            deployment = {
                "ApplicationId": application_id,
                "EnvironmentId": environment_id,
                "ConfigurationProfileId": profile_id,
                "ConfigurationName": profile.fields["Name"],
                "ConfigurationVersion": str(number),
                "DeploymentStrategyId": body["DeploymentStrategyId"],
                "DeploymentNumber": len(environment.deployments) + 1,
                "Description": body.get("Description", ""),
                "State": "COMPLETE",
                "PercentageComplete": 100.0,
                "StartedAt": now,
                "CompletedAt": now,
            }
            environment.deployments.append(deployment)
            environment.live[profile_id] = number
        return json_response(deployment, 201)

    def _validate(
        self, application_id: str, profile_id: str, profile: _Profile, number: int
    ) -> None:
        content = profile.versions[number]["Content"]
        for validator in profile.fields.get("Validators") or ():
            if validator["Type"] == "JSON_SCHEMA":
                _check_schema(validator["Content"], content)
                continue
            event = {
                "applicationId": application_id,
                "configurationProfileId": profile_id,
                "configurationVersion": str(number),
                "content": base64.b64encode(content).decode(),
                "uri": profile.fields.get("LocationUri", "hosted"),
            }
            payload, function_error = self._invoke(validator["Content"], json.dumps(event).encode())
            if function_error is not None:
                raise _invalid("LAMBDA", payload.decode("utf-8", "replace"), validator["Content"])

    # --- data plane ----------------------------------------------------------------------------

    def _start_session(self, body: dict[str, Any]) -> Response:
        with self._lock:
            application_id, application = _find(
                self._applications, body["ApplicationIdentifier"], "Application"
            )
            environment_id, _ = _find(
                application.environments, body["EnvironmentIdentifier"], "Environment"
            )
            profile_id, _ = _find(
                application.profiles, body["ConfigurationProfileIdentifier"], "ConfigurationProfile"
            )
            session = _Session(
                application_id,
                environment_id,
                profile_id,
                body.get("RequiredMinimumPollIntervalInSeconds"),
            )
            return json_response({"InitialConfigurationToken": self._issue(session)}, 201)

    def _issue(self, session: _Session) -> str:
        token = base64.b64encode(uuid.uuid4().bytes + secrets.token_bytes(32)).decode()
        session.issued = time.time()
        self._sessions[token] = session
        return token

    def _get_latest(self, token: str) -> Response:
        """A token serves one call: an answer that got lost takes the session with it."""
        with self._lock:
            session = self._sessions.get(token)
            if session is None or time.time() - session.issued > TOKEN_LIFETIME_S:
                raise _bad_token("Expired" if session else "Corrupted")
            waited = time.time() - session.last_poll
            if session.minimum_poll_s is not None and waited < session.minimum_poll_s:
                raise _bad_token("PollIntervalNotSatisfied")
            application = self._applications[session.application_id]
            number = application.environments[session.environment_id].live.get(session.profile_id)
            if number is None:
                raise _not_found("Deployment", session.profile_id)
            del self._sessions[token]
            version = application.profiles[session.profile_id].versions[number]
            is_new = number != session.seen_version
            session.seen_version = number
            session.last_poll = time.time()
            headers = {
                "Next-Poll-Configuration-Token": self._issue(session),
                "Next-Poll-Interval-In-Seconds": str(session.minimum_poll_s or DEFAULT_POLL_S),
                "Version-Label": version["VersionLabel"],
            }
        return Response(
            version["Content"] if is_new else b"",
            headers=headers,
            content_type=version["ContentType"],
        )


def _version_number(profile: _Profile, wanted: str) -> int:
    for number, version in profile.versions.items():
        if wanted in (str(number), version["VersionLabel"]):
            return number
    raise _not_found("HostedConfigurationVersion", wanted)


def _version_response(version: dict[str, Any], status: int) -> Response:
    headers = {
        "Application-Id": version["ApplicationId"],
        "Configuration-Profile-Id": version["ConfigurationProfileId"],
        "Version-Number": str(version["VersionNumber"]),
        "Description": version["Description"],
        "VersionLabel": version["VersionLabel"],
    }
    return Response(
        version["Content"], status=status, headers=headers, content_type=version["ContentType"]
    )


def _check_schema(schema: str, content: bytes) -> None:
    try:
        jsonschema.validate(json.loads(content), json.loads(schema))
    except (ValueError, jsonschema.ValidationError) as error:
        raise _invalid("JSON_SCHEMA", str(error), "") from error


def _invalid(kind: str, reason: str, constraint: str) -> AppConfigError:
    detail = {"Type": kind, "Reason": reason, "Constraint": constraint, "Location": "", "Value": ""}
    return AppConfigError(
        400,
        "BadRequestException",
        f"Error running validator of type {kind}: {' '.join(reason.split())}",
        Reason="InvalidConfiguration",
        Details={"InvalidConfiguration": [detail]},
    )


def _bad_token(problem: str) -> AppConfigError:
    return AppConfigError(
        400,
        "BadRequestException",
        f"Request is invalid: configuration token {problem}",
        Reason="InvalidParameters",
        Details={"InvalidParameters": {"ConfigurationToken": {"Problem": problem}}},
    )
