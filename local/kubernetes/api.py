"""The API: from a request to an answer, with the access checks, faults and the record of calls."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from local.calls import ApiFault, CallLog, FaultPlan
from local.kubernetes import errors, reviews
from local.kubernetes.access import ANONYMOUS, Action, Authenticator, Rbac, User
from local.kubernetes.errors import ApiError, PlainTextError
from local.kubernetes.eviction import Evictions
from local.kubernetes.listing import Lister
from local.kubernetes.managed_fields import Manager
from local.kubernetes.objects import JsonObject, metadata, uid_of, with_metadata
from local.kubernetes.patching import decode_patch
from local.kubernetes.registry import Registry
from local.kubernetes.requests import (
    ApiRequest,
    ApiResponse,
    Target,
    check_options,
    delete_options,
    parse_path,
)
from local.kubernetes.resources import ACCESS_REVIEWS, PODS, SELF_REVIEWS, Resource

SERVICE: Final = "kubernetes"
_TEXT: Final = "text/plain; charset=utf-8"
_VERSION: Final[JsonObject] = {
    "major": "1",
    "minor": "36",
    "emulationMajor": "1",
    "emulationMinor": "36",
    "minCompatibilityMajor": "1",
    "minCompatibilityMinor": "35",
    "gitVersion": "v1.36.2",
    "gitCommit": "98b35193b2ac7a23a673325f5e9b830ecd5ba406",
    "gitTreeState": "clean",
    "buildDate": "1970-01-01T00:00:00Z",
    "goVersion": "go1.26.3",
    "compiler": "gc",
    "platform": "linux/amd64",
}
_HEALTH_PATHS: Final = frozenset({"/healthz", "/livez", "/readyz"})


@dataclass(frozen=True)
class _Answer:
    """What a handler did: the response, and whether the cluster changed by it."""

    response: ApiResponse
    changed: bool = False


@dataclass
class Api:
    """Everything behind the HTTP server."""

    registry: Registry
    evictions: Evictions
    authenticate: Authenticator
    rbac: Rbac
    calls: CallLog
    faults: FaultPlan
    resources: Iterable[Resource]
    _served: dict[tuple[str, str, str], Resource] = field(init=False)
    _groups: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self._served = {(r.group, r.version, r.plural): r for r in self.resources}
        self._groups = {r.group for r in self.resources if not r.is_custom}
        self._lister = Lister(self.registry.store, self.registry.clock)
        self._handlers: Mapping[str, Callable[[ApiRequest, Target, Resource], _Answer]] = {
            "get": self._get,
            "list": self._list,
            "create": self._create,
            "update": self._update,
            "patch": self._patch,
            "delete": self._delete,
        }

    def serve(self, resource: Resource) -> None:
        """Serve another resource type from now on, as after installing its definition."""
        self._served[(resource.group, resource.version, resource.plural)] = resource

    def handle(self, request: ApiRequest, user: User | None = None) -> ApiResponse:
        """Answer a request, and report it to the call log; `user` skips the authentication."""
        target = parse_path(request.path)
        user = user or self._user(request)
        verb = target.verb(request.method)
        logged = "evict" if verb == "create" and target.subresource == "eviction" else verb
        answer = self._answer(request, target, user, verb, logged)
        self.calls.add(
            service=SERVICE,
            verb=logged,
            target=target.logged(),
            caller=user.name if user else "unknown",
            status=answer.response.status,
            is_mutation=answer.changed,
        )
        return answer.response

    def _user(self, request: ApiRequest) -> User | None:
        user = self.authenticate(request.token)
        return ANONYMOUS if user is None and request.token is None else user

    def _answer(
        self, request: ApiRequest, target: Target, user: User | None, verb: str, logged: str
    ) -> _Answer:
        try:
            if user is None:
                raise errors.unauthorized()
            fault = self.faults.match(SERVICE, logged, target.logged(), user.name)
            if fault is not None:
                return _Answer(_faulty(fault, target, user, verb))
            if not target.is_resource:
                return _Answer(self._answer_path(request, user))
            self._authorize(target, user, verb)
            return self._dispatch(request, target, user, verb)
        except ApiError as error:
            return _Answer(_error_response(error))

    # ------------------------------------------------------------------ access

    def _authorize(self, target: Target, user: User, verb: str) -> None:
        resource = "/".join(part for part in (target.resource, target.subresource) if part)
        action = Action(verb, target.group, resource, target.namespace, target.name)
        if not self.rbac.decide(user, action).allowed:
            raise access_denied(target, user, verb)

    def _answer_path(self, request: ApiRequest, user: User) -> ApiResponse:
        path = request.path
        if not self.rbac.decide_path(user, path).allowed:
            raise errors.ApiError(
                403,
                "Forbidden",
                f'forbidden: User "{user.name}" cannot {request.method.lower()} path "{path}"',
                details={},
            )
        if path in _HEALTH_PATHS:
            return ApiResponse(200, b"ok", _TEXT)
        if path.rstrip("/") == "/version":
            return _json_response(200, _VERSION)
        raise PlainTextError

    # ---------------------------------------------------------------- dispatch

    def _dispatch(self, request: ApiRequest, target: Target, user: User, verb: str) -> _Answer:
        resource = self._resource(target)
        if resource in (ACCESS_REVIEWS, SELF_REVIEWS):
            return _Answer(_json_response(201, self._review(request, resource, user, verb)))
        if target.subresource == "eviction" and resource == PODS:
            if verb != "create":
                raise errors.method_not_allowed()
            changed, warnings = self.evictions.evict(request, target.namespace, target.name)
            return _Answer(_json_response(201, errors.success(201), warnings), changed)
        if target.subresource and target.subresource not in resource.subresources:
            raise errors.unknown_resource()
        if request.query.get("watch") in ("true", "1"):
            raise errors.ApiError(501, "", "watches are not emulated: list again instead")
        handler = self._handlers.get(verb)
        needs_name = verb not in ("list", "create")
        if handler is None or needs_name != bool(target.name):
            raise errors.method_not_allowed()
        return handler(request, target, resource)

    def _review(self, request: ApiRequest, resource: Resource, user: User, verb: str) -> JsonObject:
        if verb != "create":
            raise errors.method_not_allowed()
        now = self.registry.now()
        if resource == SELF_REVIEWS:
            return reviews.who_am_i(user, now)
        return reviews.review(request.json(), user, self.rbac, request.field_manager, now)

    def _resource(self, target: Target) -> Resource:
        resource = self._served.get((target.group, target.version, target.resource))
        if resource is None or (target.namespace and not resource.namespaced):
            if target.group in self._groups:
                raise errors.unknown_resource()
            raise PlainTextError
        if resource.namespaced and target.name and not target.namespace:
            raise errors.unknown_resource()
        return resource

    # ---------------------------------------------------------------- handlers

    def _get(self, _request: ApiRequest, target: Target, resource: Resource) -> _Answer:
        obj = self.registry.get(resource, target.namespace, target.name)
        return _Answer(self._object_response(200, resource, obj))

    def _list(self, request: ApiRequest, target: Target, resource: Resource) -> _Answer:
        page = self._lister.page(resource, target.namespace, request.query)
        meta: JsonObject = {"resourceVersion": str(page.revision)}
        if page.continue_token:
            meta["continue"] = page.continue_token
        elif resource.is_custom:
            meta["continue"] = ""
        if page.remaining is not None:
            meta["remainingItemCount"] = page.remaining
        head = json.dumps(
            {"kind": resource.list_kind, "apiVersion": resource.api_version, "metadata": meta},
            separators=(",", ":"),
        )
        prefix = _type_prefix(resource) if resource.is_custom else b"{"
        store = self.registry.store
        items = b",".join(prefix + store.text(resource, obj)[1:] for obj in page.items)
        return _Answer(ApiResponse(200, head[:-1].encode() + b',"items":[' + items + b"]}"))

    def _create(self, request: ApiRequest, target: Target, resource: Resource) -> _Answer:
        check_options(request, "CreateOptions")
        obj = _body_object(request)
        if resource.namespaced:
            if not target.namespace:
                raise errors.method_not_allowed()
            obj = with_metadata(obj, namespace=target.namespace)
        created = self.registry.create(
            resource, obj, manager=request.field_manager, dry_run=request.is_dry_run
        )
        response = self._object_response(201, resource, created)
        return _Answer(response, changed=not request.is_dry_run)

    def _update(self, request: ApiRequest, target: Target, resource: Resource) -> _Answer:
        check_options(request, "UpdateOptions")
        body = _body_object(request)
        if resource.is_put_strict:
            if self.registry.store.get(resource, target.namespace, target.name) is None:
                return self._create(request, target, resource)
            if not metadata(body).get("resourceVersion") and not metadata(body).get("uid"):
                raise errors.version_required(resource, target.name)
        given = metadata(body).get("uid")

        def replaced(old: JsonObject) -> JsonObject:
            if given and given != uid_of(old):
                raise errors.wrong_uid_in_storage(
                    resource, target.name, target.namespace, (given, uid_of(old))
                )
            return body

        written = self.registry.update(
            resource,
            target.namespace,
            target.name,
            replaced,
            manager=Manager(request.field_manager, subresource=target.subresource),
            dry_run=request.is_dry_run,
        )
        return _Answer(self._object_response(200, resource, written.obj), written.changed)

    def _patch(self, request: ApiRequest, target: Target, resource: Resource) -> _Answer:
        check_options(request, "PatchOptions")
        patch = decode_patch(resource, request)
        now = self.registry.now()
        try:
            written = self.registry.update(
                resource,
                target.namespace,
                target.name,
                lambda old: patch.apply_to(old, target.name, now, target.subresource),
                manager=patch.manager(target.subresource),
                dry_run=request.is_dry_run,
            )
        except ApiError as error:
            error.headers.update(_warning_headers(patch.warnings))
            raise
        response = self._object_response(200, resource, written.obj, patch.warnings)
        return _Answer(response, written.changed)

    def _delete(self, request: ApiRequest, target: Target, resource: Resource) -> _Answer:
        check_options(request, "DeleteOptions")
        options = delete_options(request.json() if request.body else None, request.query)
        deleted = self.registry.delete(resource, target.namespace, target.name, options)
        if resource != PODS and deleted.is_gone:
            details: JsonObject = {"name": target.name}
            if resource.group:
                details["group"] = resource.group
            details |= {"kind": resource.plural, "uid": uid_of(deleted.obj)}
            return _Answer(_json_response(200, errors.success(200, details)), deleted.changed)
        return _Answer(self._object_response(200, resource, deleted.obj), deleted.changed)

    def _object_response(
        self, status: int, resource: Resource, obj: JsonObject, warnings: Iterable[str] = ()
    ) -> ApiResponse:
        text = self.registry.store.text(resource, obj)
        return ApiResponse(
            status, _type_prefix(resource) + text[1:], headers=_warning_headers(warnings)
        )


def access_denied(target: Target, user: User, verb: str) -> ApiError:
    """Return the 403 of RBAC: the subresource is told in the text, but not in the details."""
    resource = "/".join(part for part in (target.resource, target.subresource) if part)
    scope = f'in the namespace "{target.namespace}"' if target.namespace else "at the cluster scope"
    return errors.forbidden(
        target.resource,
        target.group,
        target.name,
        f'User "{user.name}" cannot {verb} resource "{resource}" in API group "{target.group}" '
        f"{scope}",
    )


def _faulty(fault: ApiFault, target: Target, user: User, verb: str) -> ApiResponse:
    """Answer as the real server would with the fault's status; its own body and headers win."""
    error = _fault_error(fault.status, target, user, verb)
    response = _error_response(error)
    headers = {**response.headers, **fault.headers}
    content_type = headers.pop("Content-Type", response.content_type)
    body = response.body if fault.body is None else fault.body.encode()
    return ApiResponse(fault.status, body, content_type, headers)


def _fault_error(status: int, target: Target, user: User, verb: str) -> ApiError:
    if status == 401:
        return errors.unauthorized()
    if status == 403:
        return access_denied(target, user, verb)
    named = {"name": target.name, "kind": target.resource}
    if status == 404 and target.name:
        text = f'{target.resource} "{target.name}" not found'
        return errors.ApiError(404, "NotFound", text, details=named)
    if status == 409:
        return errors.ApiError(
            409,
            "Conflict",
            f'Operation cannot be fulfilled on {target.resource} "{target.name}": the object has '
            "been modified; please apply your changes to the latest version and try again",
            details=named,
        )
    if status == 429:
        # What priority and fairness answers: no cause, so it is not a budget's refusal.
        return errors.ApiError(
            429,
            "TooManyRequests",
            "Too many requests, please try again later.",
            details={"retryAfterSeconds": 1},
            headers={"Retry-After": "1"},
        )
    if status == 504:
        return errors.ApiError(
            504,
            "Timeout",
            "Timeout: request did not complete within the allotted timeout",
            details={},
        )
    reason = {500: "InternalError", 503: "ServiceUnavailable"}.get(status, "")
    return errors.ApiError(status, reason, f"an error on the server ({status})", details={})


def _body_object(request: ApiRequest) -> JsonObject:
    body: Any = request.json()
    if not isinstance(body, dict):
        raise errors.bad_request("the body of the request is not an object")
    return body


def _type_prefix(resource: Resource) -> bytes:
    return f'{{"kind":"{resource.kind}","apiVersion":"{resource.api_version}",'.encode()


def _warning_headers(warnings: Iterable[str]) -> Mapping[str, str]:
    told = ", ".join('299 - "' + text.replace('"', '\\"') + '"' for text in warnings)
    return {"Warning": told} if told else {}


def _json_response(status: int, body: JsonObject, warnings: Iterable[str] = ()) -> ApiResponse:
    return ApiResponse(
        status,
        json.dumps(body, separators=(",", ":")).encode(),
        headers=_warning_headers(warnings),
    )


def _error_response(error: ApiError) -> ApiResponse:
    if isinstance(error, PlainTextError):
        return ApiResponse(error.code, error.message.encode(), _TEXT)
    return ApiResponse(
        error.code,
        json.dumps(error.body(), separators=(",", ":")).encode(),
        headers=error.headers,
    )
