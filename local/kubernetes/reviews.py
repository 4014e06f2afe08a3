"""Reviews about the caller itself: who am I, and may I do this?"""

from local.kubernetes import errors
from local.kubernetes.access import Action, Rbac, User, with_system_groups
from local.kubernetes.managed_fields import Manager, track_update
from local.kubernetes.objects import JsonObject, JsonValue
from local.kubernetes.resources import ACCESS_REVIEWS, SELF_REVIEWS


def who_am_i(user: User, now: str) -> JsonObject:
    """Answer a SelfSubjectReview."""
    shown: JsonObject = {"username": user.name, "groups": list(with_system_groups(user).groups)}
    if user.uid:
        shown["uid"] = user.uid
    return {
        "kind": SELF_REVIEWS.kind,
        "apiVersion": SELF_REVIEWS.api_version,
        "metadata": {"creationTimestamp": now},
        "status": {"userInfo": shown},
    }


def review(body: JsonValue, user: User, rbac: Rbac, manager: str, now: str) -> JsonObject:
    """Answer a review about the caller itself.

    Raises:
        ApiError: 422 unless exactly one kind of attributes is given.
    """
    spec: JsonObject = dict((body or {}).get("spec") or {})
    resource = spec.get("resourceAttributes")
    path = spec.get("nonResourceAttributes")
    if (resource is None) == (path is None):
        message = (
            "Invalid value: null: exactly one of nonResourceAttributes or resourceAttributes must "
            "be specified"
        )
        cause = errors.Cause("FieldValueInvalid", message, "spec.resourceAttributes")
        raise errors.ApiError(
            422,
            "Invalid",
            f'.authorization.k8s.io "" is invalid: {cause.field}: {message}',
            details={"group": "authorization.k8s.io", "causes": [cause.as_json()]},
        )
    if resource is not None:
        named = "/".join(
            part for part in (resource.get("resource", ""), resource.get("subresource", "")) if part
        )
        decision = rbac.decide(
            user,
            Action(
                resource.get("verb", ""),
                resource.get("group", ""),
                named,
                resource.get("namespace", ""),
                resource.get("name", ""),
            ),
        )
        spec["resourceAttributes"] = {key: value for key, value in resource.items() if value}
    else:
        decision = rbac.decide_path(user, str((path or {}).get("path", "")))
    status: JsonObject = {"allowed": decision.allowed}
    if decision.reason:
        status["reason"] = decision.reason
    answered: JsonObject = {
        "kind": ACCESS_REVIEWS.kind,
        "apiVersion": ACCESS_REVIEWS.api_version,
        "metadata": {},
        "spec": spec,
    }
    answered = track_update(ACCESS_REVIEWS, None, answered, Manager(manager), now)
    return {**answered, "status": status}
