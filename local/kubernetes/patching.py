"""PATCH: from the request's body to the new state of the object."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from local.kubernetes import errors, managed_fields
from local.kubernetes.defaults import drop_zero_values
from local.kubernetes.managed_fields import Manager, Path
from local.kubernetes.objects import JsonObject, JsonValue, metadata, name_of
from local.kubernetes.patches import (
    apply_json_patch,
    apply_merge_patch,
    apply_strategic_patch,
)
from local.kubernetes.requests import ApiRequest
from local.kubernetes.resources import Resource
from local.kubernetes.schema import check_types, go_format, prune_unknown

JSON_PATCH: Final = "application/json-patch+json"
MERGE_PATCH: Final = "application/merge-patch+json"
STRATEGIC_PATCH: Final = "application/strategic-merge-patch+json"
APPLY_PATCH: Final = "application/apply-patch+yaml"
_ACCEPTED_BY_CUSTOM: Final = (JSON_PATCH, MERGE_PATCH, APPLY_PATCH)


@dataclass
class Patch:
    """A decoded patch, ready to be applied to the stored object."""

    resource: Resource
    request: ApiRequest
    content_type: str
    content: Any
    warnings: list[str] = field(default_factory=list)

    @property
    def is_apply(self) -> bool:
        """A server-side apply: it has its own rules of ownership."""
        return self.content_type == APPLY_PATCH

    def manager(self, subresource: str) -> Manager:
        """Return the manager that the patch writes as."""
        operation = "Apply" if self.is_apply else "Update"
        return Manager(self.request.field_manager, operation, subresource)

    def apply_to(self, old: JsonObject, name: str, now: str, subresource: str = "") -> JsonObject:
        """Return the new state.

        Raises:
            ApiError: 400, 409 and 422 as the real server answers.
        """
        if self.content_type == JSON_PATCH:
            new = apply_json_patch(old, self.content)
        elif self.content_type == MERGE_PATCH:
            check_types(self.resource, self.content)
            new = apply_merge_patch(old, self.content)
        else:
            check_types(self.resource, self.content)
            new = apply_strategic_patch(old, self.content)
        new = self._pruned(new)
        if name_of(new) != name:
            raise errors.bad_request(
                f"the name of the object ({name_of(new)}) does not match the name on the URL "
                f"({name})"
            )
        if self.is_apply:
            return self._with_ownership(old, new, now, subresource)
        # The version as read is no precondition unless the patch names it.
        if not self._names_resource_version():
            new = {**new, "metadata": {**metadata(new), "resourceVersion": ""}}
        return new

    def _names_resource_version(self) -> bool:
        if isinstance(self.content, Mapping):
            return "resourceVersion" in (self.content.get("metadata") or {})
        return any(
            operation.get("path") == "/metadata/resourceVersion" for operation in self.content
        )

    def _pruned(self, new: JsonObject) -> JsonObject:
        pruned, unknown = prune_unknown(self.resource.kind, new)
        if unknown:
            told = [f'unknown field "{path}"' for path in unknown]
            if self.request.query.get("fieldValidation") == "Strict":
                raise errors.invalid_patch(
                    go_format(self.content), f"strict decoding error: {', '.join(told)}"
                )
            self.warnings = told
        return pruned

    def _with_ownership(
        self, old: JsonObject, new: JsonObject, now: str, subresource: str
    ) -> JsonObject:
        manager = self.manager(subresource)
        applied = managed_fields.fields_of(self.resource, self.content)
        new = managed_fields.without_abandoned(old, new, applied, manager)
        new = drop_zero_values(self.resource, new)
        conflicts = managed_fields.owners_in_conflict(self.resource, old, new, applied, manager)
        if conflicts and self.request.query.get("force") not in ("true", "1"):
            raise _apply_conflict(conflicts)
        return managed_fields.track_apply(self.resource, old, new, applied, manager, now)


def _apply_conflict(conflicts: list[tuple[str, Path]]) -> errors.ApiError:
    causes = [
        errors.Cause("FieldManagerConflict", f'conflict with "{owner}"', _dotted(path))
        for owner, path in conflicts
    ]
    count = f"{len(causes)} conflict" + ("s" if len(causes) > 1 else "")
    listed = ", ".join(f"{cause.message}: {cause.field}" for cause in causes)
    return errors.ApiError(
        409,
        "Conflict",
        f"Apply failed with {count}: {listed}",
        details={"causes": [cause.as_json() for cause in causes]},
    )


def _dotted(path: Path) -> str:
    return "".join(
        f".{element[2:]}" if element.startswith("f:") else f"[{element[2:]}]" for element in path
    )


def decode_patch(resource: Resource, request: ApiRequest) -> Patch:
    """Decode the body of a PATCH by its content type.

    Raises:
        ApiError: 400, 415 and 422.
    """
    content_type = request.content_type.partition(";")[0].strip()
    decoder = _DECODERS.get(content_type)
    if decoder is None or (resource.is_custom and content_type not in _ACCEPTED_BY_CUSTOM):
        raise _unsupported(resource)
    return Patch(resource, request, content_type, decoder(request))


def _unsupported(resource: Resource) -> errors.ApiError:
    if not resource.is_custom:
        return errors.ApiError(
            415, "UnsupportedMediaType", "415: Unsupported Media Type", details={}
        )
    return errors.ApiError(
        415,
        "UnsupportedMediaType",
        "the body of the request was in an unknown format - accepted media types include: "
        + ", ".join(_ACCEPTED_BY_CUSTOM),
    )


def _decode_object(request: ApiRequest) -> JsonValue:
    content = request.json()
    if not isinstance(content, dict):
        raise errors.bad_request("json: cannot unmarshal array into Go value")
    return content


def _decode_apply(request: ApiRequest) -> JsonValue:
    if not request.query.get("fieldManager"):
        raise errors.invalid_options(
            "PatchOptions",
            errors.Cause(
                "FieldValueRequired", "Required value: is required for apply patch", "fieldManager"
            ),
        )
    try:
        content = yaml.safe_load(request.body)
    except yaml.YAMLError as error:
        raise errors.bad_request(f"error decoding YAML: {error}") from error
    if not isinstance(content, dict):
        raise errors.bad_request("error decoding YAML: not an object")
    return content


_DECODERS: Final[Mapping[str, Callable[[ApiRequest], Any]]] = {
    JSON_PATCH: ApiRequest.json,
    MERGE_PATCH: _decode_object,
    STRATEGIC_PATCH: _decode_object,
    APPLY_PATCH: _decode_apply,
}
