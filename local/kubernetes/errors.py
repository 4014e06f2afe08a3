"""Failures of the API as Kubernetes words them: a `Status` object with its HTTP code.

`details.kind` is a resource (`nodes`) in most answers, but a kind (`Node`) where a UID
precondition failed or validation refused the object: clients that look at it must cope with both,
so the emulator must not be tidier than the real server.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from local.kubernetes.objects import JsonObject
from local.kubernetes.resources import Resource


@dataclass(frozen=True)
class Cause:
    """One entry of `details.causes`."""

    reason: str
    message: str
    field: str = ""

    def as_json(self) -> JsonObject:
        """Return the entry; `field` only where there is one."""
        entry = {"reason": self.reason, "message": self.message}
        if self.field:
            entry["field"] = self.field
        return entry


class ApiError(Exception):
    """A request that ends with a `Status` of failure."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        *,
        details: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details
        self.metadata = metadata or {}
        self.headers = dict(headers or {})

    def body(self) -> JsonObject:
        """Return the `Status`; reason and details are absent where the server leaves them out."""
        status: JsonObject = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": dict(self.metadata),
            "status": "Failure",
            "message": self.message,
        }
        if self.reason:
            status["reason"] = self.reason
        if self.details is not None:
            status["details"] = dict(self.details)
        status["code"] = self.code
        return status


class PlainTextError(ApiError):
    """A path that no API server of the aggregate knows: answered as text, not as a `Status`."""

    def __init__(self) -> None:
        super().__init__(404, "NotFound", "404 page not found\n")


def success(code: int, details: Mapping[str, Any] | None = None) -> JsonObject:
    """Return the `Status` of an eviction (201) or of a finished deletion (200).

    The code is in the body of an eviction only; a deletion tells the details instead.
    """
    status: JsonObject = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Success",
    }
    if details is None:
        status["code"] = code
    else:
        status["details"] = dict(details)
    return status


def _details(resource: Resource, name: str = "", kind: str = "") -> JsonObject:
    details: JsonObject = {}
    if name:
        details["name"] = name
    if resource.group:
        details["group"] = resource.group
    details["kind"] = kind or resource.plural
    return details


def not_found(resource: Resource, name: str) -> ApiError:
    """Return the 404 for an object that does not exist."""
    return ApiError(
        404,
        "NotFound",
        f'{resource.qualified} "{name}" not found',
        details=_details(resource, name),
    )


def unknown_resource() -> ApiError:
    """Return the 404 for a resource, version or subresource that is not served."""
    return ApiError(404, "NotFound", "the server could not find the requested resource", details={})


def already_exists(resource: Resource, name: str) -> ApiError:
    """Return the 409 for a name that is taken."""
    return ApiError(
        409,
        "AlreadyExists",
        f'{resource.qualified} "{name}" already exists',
        details=_details(resource, name),
    )


def stale(resource: Resource, name: str) -> ApiError:
    """Return the 409 for a resourceVersion that is not the current one."""
    return ApiError(
        409,
        "Conflict",
        f'Operation cannot be fulfilled on {resource.qualified} "{name}": the object has been '
        "modified; please apply your changes to the latest version and try again",
        details=_details(resource, name),
    )


def wrong_uid_in_storage(
    resource: Resource, name: str, namespace: str, uids: tuple[str, str]
) -> ApiError:
    """Return the 409 of a PUT whose uid is not the stored one; `uids`: given, stored."""
    storage = resource.storage or resource.plural
    key = f"/registry/{storage}/" + (f"{namespace}/{name}" if namespace else name)
    return ApiError(
        409,
        "Conflict",
        f'Operation cannot be fulfilled on {resource.qualified} "{name}": StorageError: invalid '
        f"object, Code: 4, Key: {key}, ResourceVersion: 0, AdditionalErrorMsg: Precondition "
        f"failed: UID in precondition: {uids[0]}, UID in object meta: {uids[1]}",
        details=_details(resource, name),
    )


def precondition_failed(
    resource: Resource, name: str, what: str, wanted: str, found: str
) -> ApiError:
    """Return the 409 of a deletion or eviction; `what`: `UID` or `ResourceVersion`."""
    tail = (
        "The object might have been deleted and then recreated"
        if what == "UID"
        else "The object might have been modified"
    )
    return ApiError(
        409,
        "Conflict",
        f'Operation cannot be fulfilled on {resource.qualified_kind} "{name}": the {what} in the '
        f"precondition ({wanted}) does not match the {what} in record ({found}). {tail}",
        details=_details(resource, name, resource.kind),
    )


def invalid(resource: Resource, name: str, causes: Sequence[Cause]) -> ApiError:
    """Return the 422 of a validation; the server lists a cause as often as it found it."""
    unique = list(dict.fromkeys(f"{cause.field}: {cause.message}" for cause in causes))
    text = unique[0] if len(unique) == 1 else "[" + ", ".join(unique) + "]"
    return ApiError(
        422,
        "Invalid",
        f'{resource.qualified_kind} "{name}" is invalid: {text}',
        details={
            **_details(resource, name, resource.kind),
            "causes": [cause.as_json() for cause in causes],
        },
    )


def version_required(resource: Resource, name: str) -> ApiError:
    """Return the 422 of a PUT without resourceVersion; it names the resource, not the kind."""
    message = "Invalid value: 0: must be specified for an update"
    cause = Cause("FieldValueInvalid", message, "metadata.resourceVersion")
    return ApiError(
        422,
        "Invalid",
        f'{resource.qualified} "{name}" is invalid: {cause.field}: {message}',
        details={**_details(resource, name), "causes": [cause.as_json()]},
    )


def invalid_options(kind: str, cause: Cause) -> ApiError:
    """Return the 422 for a query option (`PatchOptions`, `DeleteOptions`…)."""
    return ApiError(
        422,
        "Invalid",
        f'{kind}.meta.k8s.io "" is invalid: {cause.field}: {cause.message}',
        details={"group": "meta.k8s.io", "kind": kind, "causes": [cause.as_json()]},
    )


def invalid_patch(shown: str, why: str) -> ApiError:
    """Return the 422 for a patch that cannot be decoded into the type."""
    message = f'Invalid value: "{shown}": {why}'
    return ApiError(
        422,
        "Invalid",
        f' "" is invalid: patch: {message}',
        details={"causes": [Cause("FieldValueInvalid", message, "patch").as_json()]},
    )


def patch_not_applicable() -> ApiError:
    """Return the 422 of a JSON patch whose `test` failed or whose path is not there."""
    return ApiError(
        422,
        "Invalid",
        "the server rejected our request due to an error in our request",
        details={},
    )


def bad_request(message: str) -> ApiError:
    """Return a 400."""
    return ApiError(400, "BadRequest", message)


def internal(message: str) -> ApiError:
    """Return a 500 without reason and details, as the server gives it for its own faults."""
    return ApiError(500, "", message)


def unauthorized() -> ApiError:
    """Return the 401 for a token that nobody knows."""
    return ApiError(401, "Unauthorized", "Unauthorized")


def method_not_allowed() -> ApiError:
    """Return the 405 for a known path and a method that it has not."""
    return ApiError(
        405,
        "MethodNotAllowed",
        "the server does not allow this method on the requested resource",
        details={},
    )


def forbidden(
    resource_name: str,
    group: str,
    name: str,
    why: str,
    causes: Sequence[Cause] = (),
) -> ApiError:
    """Return a 403; `why` follows the words `is forbidden`."""
    qualified = f"{resource_name}.{group}" if group else resource_name
    details: JsonObject = {}
    if name:
        details["name"] = name
    if group:
        details["group"] = group
    details["kind"] = resource_name
    if causes:
        details["causes"] = [cause.as_json() for cause in causes]
    subject = f'{qualified} "{name}"' if name else qualified
    return ApiError(403, "Forbidden", f"{subject} is forbidden: {why}", details=details)


def too_many_requests(message: str, retry_after_s: int, causes: Sequence[Cause]) -> ApiError:
    """Return a 429; `Retry-After` only if `retry_after_s` is positive, as the server does."""
    details: JsonObject = {"causes": [cause.as_json() for cause in causes]}
    headers = {}
    if retry_after_s > 0:
        details["retryAfterSeconds"] = retry_after_s
        headers["Retry-After"] = str(retry_after_s)
    return ApiError(429, "TooManyRequests", message, details=details, headers=headers)
