"""The suite of the Policies port: the fake, and AppConfig's data plane over HTTP."""

import http.server
import json
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from botocore.exceptions import NoCredentialsError

from nodemend.adapters.policy_appconfig import AppConfigPolicies
from nodemend.application.ports import Policies
from nodemend.domain.errors import AwsForbiddenError, AwsUnavailableError, PolicyInvalidError
from nodemend.domain.faults import Mode
from nodemend.domain.policy import ClusterPolicy, Policy, PolicySource
from tests.fakes.aws import aws_client
from tests.fakes.control import MemoryPolicies
from tests.fakes.system import ManualClock

DEFAULT = ClusterPolicy("train-a", "ws-1", "eu-central-1")
NOT_DEPLOYED: dict[str, Any] = {"Message": "no deployment", "ResourceType": "Deployment"}
BAD_TOKEN: dict[str, Any] = {
    "Message": "bad token",
    "Reason": "InvalidParameters",
    "Details": {"InvalidParameters": {"ConfigurationToken": {"Problem": "Corrupted"}}},
}


@dataclass
class AppConfigData:
    """AppConfig's data plane: sessions whose tokens are good for one call."""

    content: bytes | None = None
    label: str = ""
    none_is: str = "not_found"
    """How "nothing is deployed" is told: not_found, bad_request or empty."""
    lose: int = 0
    """How many of the next answers to GetLatestConfiguration get lost, their tokens spent."""
    fail: int = 0
    """HTTP status of every answer while it is set."""
    code: str = "InternalServerException"
    """The error's name in these answers."""
    calls: list[str] = field(default_factory=list)
    tokens: dict[str, bytes | None] = field(default_factory=dict)
    """What the session of a token has seen already."""

    def start_session(self) -> tuple[int, dict[str, str], bytes]:
        self.calls.append("start")
        if self.fail:
            return self.error(self.fail, self.code, {"Message": "told to"})
        body = json.dumps({"InitialConfigurationToken": self._issue(None)}).encode()
        return 201, {"Content-Type": "application/json"}, body

    def latest(self, token: str) -> tuple[int, dict[str, str], bytes] | None:
        """Return (status, headers, body); None: the connection breaks."""
        self.calls.append("get")
        if self.fail:
            return self.error(self.fail, self.code, {"Message": "told to"})
        if token not in self.tokens:
            return self.error(400, "BadRequestException", BAD_TOKEN)
        seen = self.tokens.pop(token)
        if self.lose:
            self.lose -= 1
            return None
        if self.content is None and self.none_is == "not_found":
            return self.error(404, "ResourceNotFoundException", NOT_DEPLOYED)
        if self.content is None and self.none_is == "bad_request":
            return self.error(400, "BadRequestException", {"Message": "nothing deployed"})
        headers = {"Next-Poll-Configuration-Token": self._issue(self.content)}
        is_new = self.content is not None and self.content != seen
        if is_new and self.label:
            headers["Version-Label"] = self.label
        return 200, headers, (self.content or b"") if is_new else b""

    def _issue(self, seen: bytes | None) -> str:
        token = uuid.uuid4().hex
        self.tokens[token] = seen
        return token

    @staticmethod
    def error(status: int, code: str, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        headers = {"x-amzn-ErrorType": code, "Content-Type": "application/json"}
        return status, headers, json.dumps(body).encode()


@pytest.fixture
def data() -> AppConfigData:
    return AppConfigData()


@pytest.fixture
def url(data: AppConfigData) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._reply(data.start_session())

        def do_GET(self) -> None:
            query = parse_qs(urlsplit(self.path).query)
            self._reply(data.latest(query["configuration_token"][0]))

        def _reply(self, reply: tuple[int, dict[str, str], bytes] | None) -> None:
            self.close_connection = True
            if reply is None:
                return
            status, headers, body = reply
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def parse(document: object, version: str) -> Policy:
    if not isinstance(document, dict) or "mode" not in document:
        raise PolicyInvalidError("mode: is missing")
    return Policy(version=version, source=PolicySource.DEPLOYED, mode=Mode(document["mode"]))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def make(
    url: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., AppConfigPolicies]]:
    # botocore waits up to a second between its attempts; the attempts are what is tested.
    monkeypatch.setattr("botocore.endpoint.time.sleep", lambda _: None)
    client = aws_client("appconfigdata", endpoint_url=url)

    def build(**changes: Any) -> AppConfigPolicies:
        options: dict[str, Any] = {
            "application": "nodemend",
            "environment": "live",
            "profile": "policy",
            "client": client,
            "parse": parse,
            "clock": clock,
        }
        return AppConfigPolicies(**(options | changes))

    yield build
    client.close()


@dataclass
class Harness:
    """A policy source of one kind, and what operators do to it."""

    policies: Policies
    deploy: Callable[[str], None]
    spoil: Callable[[], None]


@pytest.fixture(params=["memory", "appconfig"])
def harness(request: pytest.FixtureRequest) -> Harness:
    if request.param == "memory":
        memory = MemoryPolicies(default_cluster=DEFAULT)

        def deploy(mode: str) -> None:
            memory.policy = parse({"mode": mode}, "v1")

        return Harness(memory, deploy, lambda: setattr(memory, "problem", "it is spoiled"))
    data: AppConfigData = request.getfixturevalue("data")
    make = request.getfixturevalue("make")
    clock: ManualClock = request.getfixturevalue("clock")

    def deploy_document(mode: str) -> None:
        data.content = f"mode: {mode}\n".encode()
        clock.advance(31)

    return Harness(
        make(default_cluster=DEFAULT), deploy_document, lambda: setattr(data, "content", b"no")
    )


def test_without_any_deployed_policy_the_built_in_dry_run_binds(harness: Harness) -> None:
    policy = harness.policies.current()
    assert policy.mode is Mode.DRY_RUN
    assert policy.source is PolicySource.BUILT_IN
    assert policy.clusters == (DEFAULT,)


def test_a_policy_deployed_later_binds(harness: Harness) -> None:
    harness.policies.current()
    harness.deploy("enforce")
    policy = harness.policies.current()
    assert policy.mode is Mode.ENFORCE
    assert policy.source is PolicySource.DEPLOYED
    assert policy.clusters == (DEFAULT,)


def test_a_deployed_policy_that_is_invalid_is_never_replaced_by_the_built_in_one(
    harness: Harness,
) -> None:
    harness.deploy("enforce")
    harness.spoil()
    with pytest.raises(PolicyInvalidError):
        harness.policies.current()


# --- AppConfig only -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["not_found", "bad_request", "empty"])
def test_each_way_of_saying_nothing_is_deployed_means_dry_run(
    make: Callable[..., AppConfigPolicies], data: AppConfigData, how: str
) -> None:
    data.none_is = how
    assert make().current() == Policy()


@pytest.mark.parametrize("how", ["not_found", "bad_request", "empty"])
def test_nothing_is_deployed_is_remembered_for_30_seconds(
    make: Callable[..., AppConfigPolicies], data: AppConfigData, clock: ManualClock, how: str
) -> None:
    data.none_is = how
    policies = make()
    policies.current()
    asked = len(data.calls)
    data.content = b"mode: enforce"
    clock.advance(29)
    assert policies.current() == Policy()
    assert len(data.calls) == asked
    clock.advance(1)
    assert policies.current().mode is Mode.ENFORCE


def test_a_policy_is_read_once_within_30_seconds(
    make: Callable[..., AppConfigPolicies], data: AppConfigData
) -> None:
    data.content = b"mode: enforce"
    policies = make()
    first = policies.current()
    assert policies.current() is first
    assert data.calls == ["start", "get"]


@pytest.mark.parametrize("label", ["v7", ""])
def test_the_version_is_the_label_or_a_hash_of_the_content(
    make: Callable[..., AppConfigPolicies], data: AppConfigData, label: str
) -> None:
    data.content, data.label = b"mode: enforce", label
    version = make().current().version
    assert version == (label or "26b55f4d2ccc")


def test_a_poll_without_news_keeps_policy_and_version(
    make: Callable[..., AppConfigPolicies], data: AppConfigData, monkeypatch: pytest.MonkeyPatch
) -> None:
    data.content, data.label = b"mode: enforce", "v7"
    policies = make()
    first = policies.current()
    expire(policies)
    assert policies.current() is first
    assert data.calls == ["start", "get", "get"]
    data.content, data.label = b"mode: cordon_only", "v8"
    expire(policies)
    second = policies.current()
    assert (second.mode, second.version) == (Mode.CORDON_ONLY, "v8")


def expire(policies: AppConfigPolicies) -> None:
    """Let Powertools' cache run out, as it does 30 s later by the machine's clock."""
    provider = policies._provider
    assert provider is not None
    provider.store.clear()


def test_one_lost_answer_does_not_stick(
    make: Callable[..., AppConfigPolicies], data: AppConfigData
) -> None:
    """The SDK repeats the call with the spent token; then a new session is started."""
    data.content = b"mode: enforce"
    policies = make()
    policies.current()
    data.content, data.lose = b"mode: cordon_only", 1
    expire(policies)
    assert policies.current().mode is Mode.CORDON_ONLY
    assert data.calls == ["start", "get", "get", "get", "start", "get"]


def test_answers_that_keep_getting_lost_are_trouble_on_the_way_and_not_dry_run(
    make: Callable[..., AppConfigPolicies], data: AppConfigData
) -> None:
    data.content, data.lose = b"mode: enforce", 99
    policies = make()
    with pytest.raises(AwsUnavailableError, match="appconfig:GetLatestConfiguration"):
        policies.current()
    data.lose = 0
    assert policies.current().mode is Mode.ENFORCE


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (500, "InternalServerException", AwsUnavailableError),
        (503, "ServiceUnavailableException", AwsUnavailableError),
        (429, "ThrottlingException", AwsUnavailableError),
        (400, "ThrottlingException", AwsUnavailableError),
        (403, "AccessDeniedException", AwsForbiddenError),
        (400, "UnrecognizedClientException", AwsForbiddenError),
    ],
)
def test_an_appconfig_that_cannot_be_asked_says_nothing_of_the_policy(
    make: Callable[..., AppConfigPolicies],
    data: AppConfigData,
    status: int,
    code: str,
    error: type[Exception],
) -> None:
    data.fail, data.code = status, code
    policies = make()
    with pytest.raises(error, match=f"appconfig:GetLatestConfiguration: {code}"):
        policies.current()
    data.fail, data.content = 0, b"mode: enforce"
    policies.current()
    data.fail = status
    expire(policies)
    with pytest.raises(error, match=f"appconfig:GetLatestConfiguration: {code}"):
        policies.current()


def test_no_connection_says_nothing_of_the_policy(make: Callable[..., AppConfigPolicies]) -> None:
    client = aws_client("appconfigdata", endpoint_url="http://127.0.0.1:1")
    with pytest.raises(AwsUnavailableError, match="appconfig:GetLatestConfiguration"):
        make(client=client).current()
    client.close()


def test_no_credentials_are_a_denial(make: Callable[..., AppConfigPolicies]) -> None:
    def refuse(**_: str) -> None:
        raise NoCredentialsError

    client = SimpleNamespace(start_configuration_session=refuse)
    with pytest.raises(AwsForbiddenError, match="appconfig:GetLatestConfiguration"):
        make(client=client).current()


@pytest.mark.parametrize("how", ["not_found", "bad_request", "empty"])
def test_a_policy_that_was_there_and_is_gone_is_never_replaced_by_the_built_in_one(
    make: Callable[..., AppConfigPolicies], data: AppConfigData, how: str
) -> None:
    data.content = b"mode: enforce"
    policies = make()
    policies.current()
    data.content, data.none_is = None, how
    if how == "empty":
        # "Empty" means "unchanged" within a session; a new one has nothing to give.
        data.tokens.clear()
    expire(policies)
    with pytest.raises(PolicyInvalidError, match="gone"):
        policies.current()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"mode: [enforce", "is no YAML"),
        (b"mode: \xff", "is no YAML"),
        (b"at: 2026-99-99", "is no YAML"),
        (b"- mode", "mode: is missing"),
        (b"# nothing but a comment", "mode: is missing"),
    ],
)
def test_a_document_that_cannot_be_used_is_invalid_until_it_is_mended(
    make: Callable[..., AppConfigPolicies], data: AppConfigData, content: bytes, why: str
) -> None:
    data.content = content
    policies = make()
    for _ in range(2):
        with pytest.raises(PolicyInvalidError, match=why):
            policies.current()
    data.content = b"mode: enforce"
    expire(policies)
    assert policies.current().mode is Mode.ENFORCE


def test_a_rebuilt_provider_leaves_no_trace_in_the_user_agent(
    make: Callable[..., AppConfigPolicies], data: AppConfigData, url: str
) -> None:
    agents: list[str] = []
    client = aws_client("appconfigdata", endpoint_url=url)
    client.meta.events.register_last(
        "before-send.appconfigdata",
        lambda request, **_: agents.append(request.headers["User-Agent"]),
    )
    policies = make(client=client)
    data.content = b"mode: enforce"
    policies.current()
    for _ in range(3):
        data.tokens.clear()
        expire(policies)
        policies.current()
    assert len(set(map(len, agents))) == 1
    client.close()
