"""What a request is about: path, verb, body and options, before anybody looks at the store."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from local.kubernetes import errors
from local.kubernetes.objects import JsonObject, JsonValue
from local.kubernetes.registry import DeleteOptions

MAX_FIELD_MANAGER: Final = 128
_VERBS: Final = {
    "GET": "get",
    "POST": "create",
    "PUT": "update",
    "PATCH": "patch",
    "DELETE": "delete",
    "HEAD": "get",
}


@dataclass(frozen=True)
class ApiRequest:
    """One HTTP request, as far as the API looks at it."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    content_type: str = ""
    user_agent: str = ""
    token: str | None = None
    """The bearer token; None if the call carries no credentials."""
    body: bytes = b""

    def json(self) -> JsonValue:
        """Decode the body.

        Raises:
            ApiError: 400, in the words of the server's JSON decoder.
        """
        text = self.body.decode("utf-8", "replace")
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise errors.bad_request(go_json_error(text, error)) from error

    @property
    def is_dry_run(self) -> bool:
        """`dryRun=All` in the query."""
        return self.query.get("dryRun") == "All"

    @property
    def field_manager(self) -> str:
        """The manager that managedFields shows: by default the user agent up to the first slash."""
        return self.query.get("fieldManager") or self.user_agent.partition("/")[0] or "unknown"


@dataclass(frozen=True)
class ApiResponse:
    """One answer."""

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """What the path names."""

    is_resource: bool
    path: str
    group: str = ""
    version: str = ""
    resource: str = ""
    subresource: str = ""
    namespace: str = ""
    name: str = ""

    def verb(self, method: str) -> str:
        """Return the API verb: a GET without a name is a list."""
        verb = _VERBS.get(method, method.lower())
        if not self.is_resource or self.name:
            return verb
        return {"get": "list", "delete": "deletecollection"}.get(verb, verb)

    def logged(self) -> str:
        """Return the target as the call log writes it: `pods/NAMESPACE/NAME`."""
        if not self.is_resource:
            return self.path
        parts = [self.resource, self.namespace, self.name]
        if self.subresource not in ("", "eviction"):
            parts.append(self.subresource)
        return "/".join(part for part in parts if part)


def parse_path(path: str) -> Target:
    """Split a path into group, version, resource, namespace, name and subresource."""
    parts = [part for part in path.split("/") if part]
    if len(parts) >= 3 and parts[0] == "api":
        group, version, rest = "", parts[1], parts[2:]
    elif len(parts) >= 4 and parts[0] == "apis":
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        return Target(is_resource=False, path=path)
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2 and rest[2] != "status":
        namespace, rest = rest[1], rest[2:]
    return Target(
        is_resource=True,
        path=path,
        group=group,
        version=version,
        resource=rest[0],
        name=rest[1] if len(rest) > 1 else "",
        subresource="/".join(rest[2:]),
        namespace=namespace,
    )


def go_json_error(text: str, error: json.JSONDecodeError) -> str:
    """Word a decoding error as Go's encoding/json does."""
    if error.pos >= len(text):
        return "unexpected end of JSON input"
    character = text[error.pos]
    before = text[: error.pos].rstrip()
    place = "object key string" if before.endswith("{") else "value"
    return f"invalid character '{character}' looking for beginning of {place}"


def check_options(request: ApiRequest, kind: str) -> None:
    """Refuse query options that the server refuses.

    Raises:
        ApiError: 422 about `PatchOptions`, `CreateOptions`…
    """
    dry_run = request.query.get("dryRun")
    if dry_run not in (None, "", "All"):
        cause = errors.Cause(
            "FieldValueNotSupported",
            f'Unsupported value: ["{dry_run}"]: supported values: "All"',
            "dryRun",
        )
        raise errors.invalid_options(kind, cause)
    if len(request.query.get("fieldManager", "")) > MAX_FIELD_MANAGER:
        cause = errors.Cause(
            "FieldValueTooLong",
            f"Too long: may not be more than {MAX_FIELD_MANAGER} bytes",
            "fieldManager",
        )
        raise errors.invalid_options(kind, cause)


def delete_options(body: Mapping[str, Any] | None, query: Mapping[str, str]) -> DeleteOptions:
    """Read `DeleteOptions` from a body and the query; a field of the body wins."""
    given: JsonObject = dict(body or {})
    preconditions: JsonObject = given.get("preconditions") or {}
    grace: Any = given.get("gracePeriodSeconds")
    if grace is None:
        grace = query.get("gracePeriodSeconds")
    return DeleteOptions(
        grace_s=None if grace in (None, "") else int(grace),
        uid=preconditions.get("uid"),
        resource_version=preconditions.get("resourceVersion"),
        dry_run="All" in (given.get("dryRun") or ()) or query.get("dryRun") == "All",
        propagation=str(given.get("propagationPolicy") or query.get("propagationPolicy") or ""),
    )
