"""Replays recorded exchanges against an API server, and says how its answers differ.

Nothing here knows the emulator: a base URL, an authority and tokens are enough.

What is ignored: values of uid, resourceVersion, continue tokens, times, addresses, and the parts
of names that a server makes up. Everything else must be as recorded, error texts included.
"""

import http.client
import json
import re
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

DATA = Path(__file__).parents[2] / "data" / "kubernetes"
OFFICIAL_CLIENT = "OpenAPI-Generator/37.0.0/python"
WRONG_UID = "00000000-0000-4000-8000-000000000000"

_UID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_TIME = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z")
_MICRO_TIME = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}\.\d{6}Z")
_IGNORED_KEYS = frozenset({"resourceVersion", "continue", "podIP", "podIPs", "hostIP", "hostIPs"})
_MADE_UP = (
    (_UID, "<uid>"),
    (_TIME, "<time>"),
    (_MICRO_TIME, "<micro time>"),
    (re.compile(r"kube-api-access-[a-z0-9]{5}"), "<token volume>"),
    (re.compile(r"(ResourceVersion in (?:the precondition|record)) \(\d+\)"), r"\1"),
)
_HASH_LABELS = frozenset({"controller-revision-hash", "pod-template-hash"})


@dataclass(frozen=True)
class Exchange:
    """One recorded request with its answer."""

    topic: str
    name: str
    note: str
    request: Mapping[str, Any]
    response: Mapping[str, Any]
    has_managed_fields: bool

    @property
    def body(self) -> Any:
        return self.response["body"]


def load(topic: str) -> list[Exchange]:
    content = json.loads((DATA / f"{topic}.json").read_text())
    return [
        Exchange(
            topic,
            item["name"],
            item["note"],
            item["request"],
            item["response"],
            not item.get("managed_fields_dropped", False),
        )
        for item in content["exchanges"]
    ]


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: Any


@dataclass
class ApiUnderTest:
    """A server, and a token for each kind of caller; no token: a call without credentials."""

    base_url: str
    ca_pem: str
    tokens: dict[str, str]
    _local: threading.local = field(default_factory=threading.local)
    _open: list[http.client.HTTPSConnection] = field(default_factory=list)

    def send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        content_type: str | None = None,
        body: Any = None,
        caller: str = "admin",
        user_agent: str = OFFICIAL_CLIENT,
    ) -> Answer:
        headers = {"User-Agent": user_agent, "Accept": "application/json"}
        token = self.tokens.get(caller)
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        if content_type:
            headers["Content-Type"] = content_type
        content = None
        if body is not None:
            content = body if isinstance(body, str) else json.dumps(body)
        url = f"{path}?{urlencode(query)}" if query else path
        connection = self._connection()
        connection.request(method, url, content, headers)
        response = connection.getresponse()
        text = response.read().decode()
        shown = response.getheader("Content-Type", "")
        return Answer(
            response.status,
            {
                name: value
                for name in ("Content-Type", "Retry-After", "Warning")
                if (value := response.getheader(name)) is not None
            },
            json.loads(text) if shown.startswith("application/json") else text,
        )

    def _connection(self) -> http.client.HTTPSConnection:
        found = getattr(self._local, "connection", None)
        if found is None:
            parts = urlsplit(self.base_url)
            context = ssl.create_default_context(cadata=self.ca_pem)
            found = http.client.HTTPSConnection(
                parts.hostname or "", parts.port, timeout=30, context=context
            )
            self._local.connection = found
            self._open.append(found)
        return found

    def close(self) -> None:
        for connection in self._open:
            connection.close()


class Translation:
    """Recorded strings (uids, made-up names) and what they are on the server under test."""

    def __init__(self) -> None:
        self._actual: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        self.tokens: dict[str, str] = {}

    def learn(self, recorded: str, actual: str) -> None:
        self._actual[recorded] = actual

    def knows(self, recorded: str) -> bool:
        return recorded in self._actual

    def to_actual(self, value: Any) -> Any:
        return _replace(value, self._actual)

    def to_recorded(self, value: Any) -> Any:
        return _replace(value, {actual: recorded for recorded, actual in self._actual.items()})


def _replace(value: Any, pairs: Mapping[str, str]) -> Any:
    text = json.dumps(value)
    if pairs:
        # One pass, longest first: no replacement may be replaced again.
        parts = sorted(map(re.escape, pairs), key=len, reverse=True)
        text = re.sub("|".join(parts), lambda match: pairs[match.group()], text)
    return json.loads(text)


class Replay:
    """Sends recorded requests in their order, and remembers what the answers teach."""

    def __init__(self, api: ApiUnderTest) -> None:
        self.api = api
        self.translation = Translation()

    def differences(self, exchange: Exchange) -> list[str]:
        """Send one request; return how the answer differs from the recorded one."""
        answer = self.send(exchange)
        self._learn(exchange.body, answer.body)
        return compare(exchange, answer, self.translation)

    def send(self, exchange: Exchange) -> Answer:
        request = exchange.request
        path = self.translation.to_actual(request["path"])
        self._learn_uid_of_target(exchange, path)
        body = request["body"]
        if body is not None and not isinstance(body, str):
            body = self._with_versions(self.translation.to_actual(body))
        return self.api.send(
            request["method"],
            path,
            query={
                name: self.translation.tokens.get(value, self.translation.to_actual(value))
                for name, value in request["query"].items()
            },
            content_type=request["content_type"],
            body=body,
            caller=request.get("auth", "admin"),
            user_agent=request.get("user_agent", OFFICIAL_CLIENT),
        )

    def _learn_uid_of_target(self, exchange: Exchange, path: str) -> None:
        """A uid that no answer has shown yet is that of the object which the path names."""
        unknown = {
            uid
            for uid in _UID.findall(json.dumps(exchange.request["body"]))
            if uid != WRONG_UID and not self.translation.knows(uid)
        }
        if not unknown:
            return
        found = self.api.send("GET", path.removesuffix("/eviction"))
        if found.status == 200:
            for uid in unknown:
                self.translation.learn(uid, found.body["metadata"]["uid"])

    def _with_versions(self, body: Any) -> Any:
        if isinstance(body, list):
            return body
        for holder in (body.get("metadata"), _preconditions(body)):
            if holder and holder.get("resourceVersion") in self.translation.versions:
                recorded = holder["resourceVersion"]
                holder["resourceVersion"] = self.translation.versions[recorded]
        return body

    def _learn(self, recorded: Any, actual: Any) -> None:
        if not isinstance(recorded, dict) or not isinstance(actual, dict):
            return
        for known, found in _objects(recorded, actual):
            self._learn_object(known.get("metadata") or {}, found.get("metadata") or {})
        token = (recorded.get("metadata") or {}).get("continue")
        found_token = (actual.get("metadata") or {}).get("continue")
        if token and found_token:
            self.translation.tokens[token] = found_token

    def _learn_object(self, known: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        if "uid" in known and "uid" in found and not self.translation.knows(known["uid"]):
            self.translation.learn(known["uid"], found["uid"])
        if "resourceVersion" in known and "resourceVersion" in found:
            self.translation.versions[known["resourceVersion"]] = found["resourceVersion"]
        if known.get("generateName") and "name" in found and known["name"] != found["name"]:
            self.translation.learn(known["name"], found["name"])


def _preconditions(body: Mapping[str, Any]) -> Any:
    options = body.get("deleteOptions") or body
    return options.get("preconditions")


def _objects(recorded: Mapping[str, Any], actual: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    if "items" in recorded:
        return list(zip(recorded["items"], actual.get("items", []), strict=False))
    return [(recorded, actual)]


def compare(exchange: Exchange, answer: Answer, translation: Translation) -> list[str]:
    """Return the differences as sentences; none if the answer is the recorded one."""
    expected = exchange.response
    found: list[str] = []
    if answer.status != expected["status"]:
        found.append(f"status {answer.status}, recorded {expected['status']}")
    found += [
        f"{name} {answer.headers.get(name)!r}, recorded {expected['headers'].get(name)!r}"
        for name in ("Content-Type", "Retry-After", "Warning")
        if answer.headers.get(name) != expected["headers"].get(name)
    ]
    actual = _normal(translation.to_recorded(answer.body), exchange.has_managed_fields)
    _compare("", _normal(expected["body"], exchange.has_managed_fields), actual, found)
    return found


def _normal(value: Any, with_managers: bool) -> Any:
    if isinstance(value, dict):
        normal: dict[str, Any] = {}
        for key, item in value.items():
            if key == "managedFields":
                if with_managers:
                    normal[key] = _managers(item)
            elif key in _IGNORED_KEYS or (key in _HASH_LABELS and isinstance(item, str)):
                normal[key] = "<ignored>"
            else:
                normal[key] = _normal(item, with_managers)
        return normal
    if isinstance(value, list):
        return [_normal(item, with_managers) for item in value]
    if isinstance(value, str):
        for pattern, shown in _MADE_UP:
            value = pattern.sub(shown, value)
    return value


def _managers(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Owners of each field; their order and times are no part of it."""
    return {
        f"{entry['manager']} {entry['operation']} {entry.get('subresource', '')}": json.loads(
            re.sub(r'k:{\\"ip\\":[^}]*}', "k:<ip>", json.dumps(entry["fieldsV1"]))
        )
        for entry in entries
    }


def _compare(path: str, expected: Any, actual: Any, found: list[str]) -> None:
    if isinstance(expected, dict) and isinstance(actual, dict):
        for key in sorted(expected.keys() | actual.keys()):
            below = f"{path}.{key}" if path else key
            if key not in actual:
                found.append(f"{below} is absent, recorded {_short(expected[key])}")
            elif key not in expected:
                found.append(f"{below} is {_short(actual[key])}, recorded absent")
            else:
                _compare(below, expected[key], actual[key], found)
    elif isinstance(expected, list) and isinstance(actual, list):
        if len(expected) != len(actual):
            found.append(
                f"{path} has {len(actual)} items, recorded {len(expected)}: {_short(actual)}"
            )
        for index, (left, right) in enumerate(zip(expected, actual, strict=False)):
            _compare(f"{path}[{index}]", left, right, found)
    elif expected != actual:
        found.append(f"{path} is {_short(actual)}, recorded {_short(expected)}")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 300 else f"{text[:300]}…"
