"""LIST: selectors, pages and continue tokens.

All pages of one list show the state of its first page. So the first page keeps the whole list (the
objects are immutable) until the last page is fetched or the token is five minutes old; after that
the answer is 410 with a token for an inconsistent rest, as etcd's compaction brings about.
"""

import base64
import binascii
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from local.kubernetes import errors, resources
from local.kubernetes.objects import JsonObject, name_of, namespace_of
from local.kubernetes.resources import Resource
from local.kubernetes.selectors import build_matcher, exact_field
from local.kubernetes.store import Store, key_of

TOKEN_LIFE_S: Final = 300.0
_MAX_SNAPSHOTS: Final = 256
_EXPIRED: Final = (
    "The provided continue parameter is too old to display a consistent list result. You can "
    "start a new list without the continue parameter, or use the continue token in this response "
    "to retrieve the remainder of the results. Continuing with the provided token results in an "
    "inconsistent list - objects that were created, modified, or deleted between the time the "
    "first chunk was returned and now may show up in the list."
)


@dataclass(frozen=True)
class Page:
    """One page of a list."""

    revision: int
    items: list[JsonObject]
    continue_token: str
    remaining: int | None


@dataclass(frozen=True)
class _Snapshot:
    taken_at: float
    items: list[JsonObject]


class Lister:
    """Answers LIST requests."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._snapshots: OrderedDict[tuple[str, int], _Snapshot] = OrderedDict()

    def page(self, resource: Resource, namespace: str, query: Mapping[str, str]) -> Page:
        """Return the page that the query asks for.

        Raises:
            ApiError: 400 for a bad selector, limit or token; 410 for an expired token.
        """
        limit = _limit(query)
        matcher = build_matcher(resource, query)
        token = query.get("continue", "")
        if token and query.get("resourceVersion"):
            raise errors.bad_request(
                "specifying resource version is not allowed when using continue"
            )
        if query.get("resourceVersion") == "0":
            limit = 0  # answered from the watch cache, which knows no pages
        with self._store.lock:
            if token:
                revision, start = _decode(token)
                candidates, revision = self._continued(resource, revision, start)
            else:
                revision, start = self._store.revision, ""
                candidates = self._candidates(resource, query)
            # A namespaced list is a prefix of the keys, not a selector.
            items = [
                obj
                for obj in candidates
                if (not namespace or namespace_of(obj) == namespace)
                and key_of(namespace_of(obj), name_of(obj)) >= start
            ]
            if matcher is not None:
                items = [obj for obj in items if matcher(obj)]
            if not limit or len(items) <= limit:
                return Page(revision, items, "", None)
            self._keep(resource, revision, candidates)
            key = key_of(namespace_of(items[limit - 1]), name_of(items[limit - 1]))
            return Page(
                revision,
                items[:limit],
                _encode(revision, f"/{key}\0"),
                len(items) - limit if matcher is None else None,
            )

    def _candidates(self, resource: Resource, query: Mapping[str, str]) -> list[JsonObject]:
        if resource == resources.PODS:
            node = exact_field(query.get("fieldSelector", ""), "spec.nodeName")
            if node is not None:
                return self._store.find(resource, "node", node)
        return self._store.all(resource)

    def _continued(
        self, resource: Resource, revision: int, start: str
    ) -> tuple[list[JsonObject], int]:
        if revision < 0:
            return self._store.all(resource), self._store.revision
        snapshot = self._snapshots.get((resource.qualified, revision))
        if snapshot is None or self._clock() - snapshot.taken_at > TOKEN_LIFE_S:
            raise errors.ApiError(
                410,
                "Expired",
                _EXPIRED,
                metadata={"continue": _encode(-1, start)},
            )
        return snapshot.items, revision

    def _keep(self, resource: Resource, revision: int, items: list[JsonObject]) -> None:
        key = (resource.qualified, revision)
        if key not in self._snapshots:
            self._snapshots[key] = _Snapshot(self._clock(), items)
            while len(self._snapshots) > _MAX_SNAPSHOTS:
                self._snapshots.popitem(last=False)


def _limit(query: Mapping[str, str]) -> int:
    text = query.get("limit", "") or "0"
    try:
        return int(text)
    except ValueError as error:
        raise errors.bad_request(f'strconv.ParseInt: parsing "{text}": invalid syntax') from error


def _encode(revision: int, start: str) -> str:
    text = json.dumps(
        {"v": "meta.k8s.io/v1", "rv": revision, "start": start}, separators=(",", ":")
    )
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _decode(token: str) -> tuple[int, str]:
    """Return revision and first key; the key's leading slash is the prefix's, not the key's."""
    try:
        raw = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
    except binascii.Error as error:
        raise errors.bad_request(
            "invalid continue token: continue key is not valid: illegal base64 data"
        ) from error
    try:
        content = json.loads(raw)
        return int(content["rv"]), str(content["start"]).removeprefix("/")
    except (ValueError, KeyError, TypeError) as error:
        first = raw.decode("latin-1")[:1]
        shown = first if first.isprintable() else f"\\u{ord(first or chr(0)):04x}"
        raise errors.bad_request(
            f"invalid continue token: continue key is not valid: invalid character '{shown}' "
            "looking for beginning of value"
        ) from error
