"""The AMP adapter on the wire: signed form bodies, and what becomes of each answer."""

import json
import math
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import botocore.credentials
import pytest
import trustme
from botocore.exceptions import ClientError, NoCredentialsError
from werkzeug.serving import make_server
from werkzeug.wrappers import Request, Response

from local.amp.serving import serve
from local.identity import Identities
from local.sigv4 import SignatureError, verify_request
from nodemend.adapters.amp import AmpMetrics
from nodemend.application.ports import MetricsStore, QueryResult, RuleGroupsResult
from nodemend.domain.policy import ClusterPolicy
from tests.fakes.metrics import FakeMetrics

CLUSTER = ClusterPolicy("gpu-prod", "ws-1234", "eu-west-1")
AT = datetime(2026, 5, 1, 10, 30, 0, 250000, tzinfo=UTC)
NASTY = 'sum by (Hostname) (a{b=~"x.+",c="A&B 50%"}) + 1'

Answer = Callable[[], Response]


def vector(*samples: tuple[Mapping[str, str], str], **more: Any) -> dict[str, Any]:
    result = [{"metric": labels, "value": [1777631400.25, value]} for labels, value in samples]
    return {"status": "success", "data": {"resultType": "vector", "result": result, **more}}


def ok(body: Any) -> Answer:
    return lambda: Response(json.dumps(body), 200, content_type="application/json")


def error(status: int, body: Any, **headers: str) -> Answer:
    text = body if isinstance(body, str) else json.dumps(body)
    return lambda: Response(text, status, headers=dict(headers))


class Server:
    """Checks signatures as AMP does and gives scripted answers; the last one repeats."""

    def __init__(self) -> None:
        self.identities = Identities()
        self.answers: list[Answer] = [ok(vector())]
        self.forms: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.requests = 0
        self._lock = threading.Lock()

    def __call__(self, environ: Any, start_response: Any) -> Any:
        return self._answer(Request(environ))(environ, start_response)

    def _answer(self, request: Request) -> Response:
        with self._lock:
            self.requests += 1
        body = request.get_data(cache=True, parse_form_data=False)
        try:
            verify_request(
                method=request.method,
                raw_path=request.path,
                query_string=request.query_string.decode(),
                headers=list(request.headers),
                body=body,
                identities=self.identities,
                services={"aps"},
                region=CLUSTER.region,
            )
        except SignatureError as refusal:
            return Response(json.dumps({"message": str(refusal)}), 403)
        with self._lock:
            self.forms.append(dict(request.form))
            self.paths.append(f"{request.method} {request.full_path}")
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return answer()


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def url(server: Server) -> Iterator[str]:
    running = serve(server)
    yield running.url
    running.stop()


def credentials_of(identities: Identities) -> botocore.credentials.Credentials:
    key = identities.issue("scan_gpu_health")
    return botocore.credentials.Credentials(
        key.access_key_id, key.secret_access_key, key.session_token
    )


@pytest.fixture
def metrics(server: Server, url: str) -> AmpMetrics:
    return AmpMetrics(credentials=credentials_of(server.identities), endpoint_url=url, budget_s=3.0)


def one(metrics: MetricsStore, query: str = "up") -> QueryResult:
    return metrics.query_many(CLUSTER, {"rule": query}, AT)["rule"]


def code_of(result: QueryResult) -> str:
    assert result.problem is not None
    return result.problem.code


def text_of(result: QueryResult) -> str:
    assert result.problem is not None
    return result.problem.text


# --- requests -------------------------------------------------------------------------------------


@pytest.mark.case("D33")
def test_query_arrives_as_it_was_written_through_the_signed_post(metrics, server):
    assert one(metrics, NASTY).problem is None
    assert server.forms == [{"query": NASTY, "time": f"{AT.timestamp():.3f}", "stats": "all"}]
    assert server.paths == ["POST /workspaces/ws-1234/api/v1/query?"]


def test_cost_limit_is_sent_where_one_is_set(server, url):
    metrics = AmpMetrics(
        credentials=credentials_of(server.identities),
        endpoint_url=url + "/",
        max_samples_error_threshold=50_000_000,
    )
    assert one(metrics).problem is None
    assert server.forms[0]["max_samples_processed_error_threshold"] == "50000000"


def costly(server: Server, url: str, warn: int = 1000) -> AmpMetrics:
    """Let AMP warn of queries that process more than so many samples."""
    return AmpMetrics(
        credentials=credentials_of(server.identities),
        endpoint_url=url,
        max_samples_warning_threshold=warn,
        budget_s=3.0,
    )


def processed(samples: int, *warnings: str) -> dict[str, Any]:
    stats = {"samples": {"totalQueryableSamples": samples}}
    return vector(({"gpu": "0"}, "1"), stats=stats) | {"warnings": list(warnings)}


COST = "query processed 1500 samples: more than the warning threshold of 1000"


def test_warning_threshold_is_sent_where_one_is_set(server, url):
    assert one(costly(server, url)).problem is None
    assert server.forms[0]["max_samples_processed_warning_threshold"] == "1000"


def test_a_warning_of_cost_alone_leaves_the_answer_whole_and_is_logged(server, url, caplog):
    server.answers = [ok(processed(1500, COST))]

    result = one(costly(server, url))

    assert (result.problem, len(result.samples), result.samples_processed) == (None, 1, 1500)
    assert "query is costly" in caplog.text


@pytest.mark.parametrize(
    ("samples", "warnings"),
    [
        (1500, [COST, "some blocks were cut"]),
        (1500, ["some blocks were cut"]),
        (900, [COST]),
    ],
    ids=["another beside it", "another instead", "not true"],
)
def test_any_other_warning_makes_the_answer_partial(server, url, samples, warnings):
    server.answers = [ok(processed(samples, *warnings))]
    assert code_of(one(costly(server, url))) == "amp_partial"


def test_a_warning_of_cost_that_we_did_not_ask_for_makes_the_answer_partial(metrics, server):
    server.answers = [ok(processed(1500, COST))]
    assert code_of(one(metrics)) == "amp_partial"


def test_a_query_beyond_the_error_threshold_says_what_to_raise(metrics, server):
    text = "query processed 6000 samples: more than the limit of 5000"
    server.answers = [error(422, {"status": "error", "errorType": "execution", "error": text})]
    result = one(metrics)
    assert code_of(result) == "amp_query_rejected"
    assert text in text_of(result)
    assert "MaxQuerySamples" in text_of(result)
    assert len(server.forms) == 1, "a refusal is not asked again"


def test_endpoint_is_the_regions_own_unless_one_is_configured():
    metrics = AmpMetrics(credentials=botocore.credentials.Credentials("a", "b"))
    assert (
        metrics._url(CLUSTER)
        == "https://aps-workspaces.eu-west-1.amazonaws.com/workspaces/ws-1234/api/v1/query"
    )


def test_refreshed_credentials_sign_the_next_query(server, url):
    class Rotating(botocore.credentials.Credentials):
        def get_frozen_credentials(self) -> Any:
            return credentials_of(server.identities).get_frozen_credentials()

    metrics = AmpMetrics(credentials=Rotating("stale", "stale"), endpoint_url=url)
    assert one(metrics).problem is None
    assert one(metrics).problem is None


def test_queries_run_side_by_side_and_answers_stand_under_their_keys(server, url):
    running = threading.Barrier(4, timeout=5)

    def together() -> Response:
        running.wait()
        return Response(json.dumps(vector()), 200)

    server.answers = [together]
    metrics = AmpMetrics(
        credentials=credentials_of(server.identities), endpoint_url=url, max_workers=4
    )
    results = metrics.query_many(CLUSTER, {f"r{n}": f"up == {n}" for n in range(4)}, AT)
    assert [results[f"r{n}"].problem for n in range(4)] == [None] * 4


def test_workers_are_bounded(server, url):
    active, most = [0], [0]
    lock = threading.Lock()

    def count() -> Response:
        with lock:
            active[0] += 1
            most[0] = max(most[0], active[0])
        time.sleep(0.02)
        with lock:
            active[0] -= 1
        return Response(json.dumps(vector()), 200)

    server.answers = [count]
    metrics = AmpMetrics(
        credentials=credentials_of(server.identities), endpoint_url=url, max_workers=2
    )
    metrics.query_many(CLUSTER, {str(n): "up" for n in range(8)}, AT)
    assert most[0] == 2


def test_no_queries_make_no_call(metrics, server):
    assert metrics.query_many(CLUSTER, {}, AT) == {}
    assert server.paths == []


# --- answers --------------------------------------------------------------------------------------


def test_samples_are_read_with_labels_value_and_time(metrics, server):
    stats = {"samples": {"totalQueryableSamples": 1234, "peakSamples": 9}}
    server.answers = [ok(vector(({"gpu": "3"}, "79"), ({}, "1.5e3"), stats=stats))]
    result = one(metrics)
    assert result.problem is None
    assert [(dict(sample.labels), sample.value) for sample in result.samples] == [
        ({"gpu": "3"}, 79.0),
        ({}, 1500.0),
    ]
    assert result.samples[0].at == datetime.fromtimestamp(1777631400.25, UTC)
    assert result.samples_processed == 1234


def test_values_that_json_has_no_words_for_are_read(metrics, server):
    server.answers = [ok(vector(({}, "NaN"), ({}, "+Inf"), ({}, "-Inf")))]
    values = [sample.value for sample in one(metrics).samples]
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf]


def test_scalar_is_one_sample_without_labels(metrics, server):
    body = {"status": "success", "data": {"resultType": "scalar", "result": [1777631400, "2"]}}
    server.answers = [ok(body)]
    (sample,) = one(metrics).samples
    assert (dict(sample.labels), sample.value) == ({}, 2.0)


def test_empty_vector_is_a_healthy_answer(metrics):
    assert one(metrics) == QueryResult()


@pytest.mark.case("D32")
def test_warnings_make_an_answer_partial_whatever_samples_it_carries(metrics, server):
    body = vector(({"gpu": "0"}, "1")) | {"warnings": ["PromQL warning: some blocks were cut"]}
    server.answers = [ok(body)]
    result = one(metrics)
    assert code_of(result) == "amp_partial"
    assert "some blocks were cut" in text_of(result)
    assert len(result.samples) == 1


def test_infos_are_no_problem(metrics, server):
    server.answers = [ok(vector() | {"infos": ["metric might not be a counter"], "warnings": []})]
    assert one(metrics).problem is None


@pytest.mark.parametrize("kind", ["matrix", "string"])
def test_result_that_is_no_instant_vector_is_a_wrong_query(metrics, server, kind):
    server.answers = [ok({"status": "success", "data": {"resultType": kind, "result": []}})]
    assert code_of(one(metrics)) == "amp_query_rejected"


def test_native_histograms_are_a_wrong_query(metrics, server):
    element = {"metric": {}, "histogram": [1, {"count": "1"}]}
    body = {"status": "success", "data": {"resultType": "vector", "result": [element]}}
    server.answers = [ok(body)]
    assert code_of(one(metrics)) == "amp_query_rejected"


@pytest.mark.parametrize(
    "body",
    [
        "<html>hello</html>",
        "",
        "[]",
        '{"status": "success"}',
        '{"status": "success", "data": {"resultType": "vector"}}',
        '{"status": "success", "data": {"resultType": "vector", "result": [{"value": [1, "1"]}]}}',
        '{"status": "success", "data": {"resultType": "scalar", "result": [1, "many"]}}',
        '{"status": "success", "data": {"resultType": "scalar", "result": [1e300, "1"]}}',
        '{"status": "success", "data": null}',
        json.dumps(vector(({"gpu": 3}, "1"))),  # type: ignore[dict-item]
        json.dumps(vector(({}, "1"), stats=[1])),
        "[" * 100_000,
    ],
)
def test_answer_that_is_not_understood_is_unknown(metrics, server, body):
    server.answers = [lambda: Response(body, 200)]
    assert code_of(one(metrics)) == "amp_unavailable"


TIMED_OUT = {
    "status": "error",
    "errorType": "execution",
    "error": "query timed out - consider simplifying your query",
}


@pytest.mark.case("D32")
@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (422, TIMED_OUT, "amp_timeout"),
        (200, TIMED_OUT, "amp_timeout"),
        (503, {"status": "error", "errorType": "timeout", "error": "x"}, "amp_timeout"),
        (504, "upstream", "amp_timeout"),
        (499, "", "amp_timeout"),
        (
            422,
            {"status": "error", "errorType": "execution", "error": "would load too many samples"},
            "amp_query_rejected",
        ),
        (
            400,
            {"status": "error", "errorType": "bad_data", "error": "parse error"},
            "amp_query_rejected",
        ),
        (
            200,
            {"status": "error", "errorType": "execution", "error": "limit"},
            "amp_query_rejected",
        ),
        (
            422,
            {
                "status": "error",
                "errorType": "execution",
                "error": "the query hit the max number of chunks limit (limit: 20000000 chunks)",
            },
            "amp_query_rejected",
        ),
        (
            422,
            {
                "status": "error",
                "errorType": "execution",
                "error": "the query time range exceeds the limit (query length: 100d, limit: 95d)",
            },
            "amp_query_rejected",
        ),
        (
            422,
            {
                "status": "error",
                "errorType": "execution",
                "error": "multiple matches for labels: many-to-one matching must be explicit",
            },
            "amp_query_rejected",
        ),
        (400, {"message": "InvalidQueryStringException"}, "amp_query_rejected"),
        (
            499,
            {"status": "error", "errorType": "canceled", "error": "context canceled"},
            "amp_timeout",
        ),
        (507, "full", "amp_unavailable"),
        (404, {"message": "Workspace not found"}, "amp_query_rejected"),
        (403, {"message": "not authorized to perform: aps:QueryMetrics"}, "amp_forbidden"),
        (401, "", "amp_forbidden"),
        (429, {"message": "Rate exceeded"}, "amp_throttled"),
        (500, "oops", "amp_unavailable"),
        (503, "oops", "amp_unavailable"),
        (302, "", "amp_unavailable"),
        (200, {"status": "error", "errorType": "internal", "error": "x"}, "amp_unavailable"),
    ],
)
def test_refusals_are_told_apart_and_never_raised(metrics, server, status, body, code):
    server.answers = [error(status, body, Location="http://127.0.0.1:1/elsewhere")]
    result = one(metrics)
    assert (code_of(result), result.samples) == (code, ())


def test_redirect_is_not_followed_with_a_signature_in_hand(metrics, server, url):
    server.answers = [error(307, "", Location=f"{url}/elsewhere")]
    assert code_of(one(metrics)) == "amp_unavailable"
    assert server.requests == 1


def test_refusals_carry_the_words_of_amp_and_a_remedy(metrics, server):
    server.answers = [error(403, {"message": "no identity-based policy allows it"})]
    text = text_of(one(metrics))
    assert "no identity-based policy allows it" in text
    assert "aps:QueryMetrics" in text
    assert "ws-1234" in text


def test_wrong_signature_is_forbidden_and_not_taken_for_a_missing_permission(url):
    metrics = AmpMetrics(
        credentials=botocore.credentials.Credentials("AKIAUNKNOWN", "x"), endpoint_url=url
    )
    result = one(metrics)
    assert code_of(result) == "amp_forbidden"
    assert "signature" in text_of(result)
    assert "allow aps:QueryMetrics" not in text_of(result)


def test_expired_session_is_told_as_such(metrics, server):
    words = "The security token included in the request is expired"
    server.answers = [error(403, {"message": words})]
    assert "session is alive" in text_of(one(metrics))


def test_limits_are_told_apart_from_wrong_queries(metrics, server):
    body = {"status": "error", "errorType": "execution", "error": "would load too many samples"}
    server.answers = [error(422, body)]
    assert "beyond a limit" in text_of(one(metrics))
    server.answers = [error(422, body | {"error": "many-to-many matching not allowed"})]
    assert "beyond a limit" not in text_of(one(metrics))


def test_a_query_that_timed_out_in_amp_is_not_asked_again_within_the_scan(metrics, server):
    """D32: AMP has worked on it for a minute; the next scan asks anew."""
    server.answers = [error(422, TIMED_OUT)]
    assert code_of(one(metrics)) == "amp_timeout"
    assert len(server.forms) == 1


def test_long_words_are_cut(metrics, server):
    server.answers = [error(400, "x" * 100_000)]
    assert len(text_of(one(metrics))) < 400


def test_one_failed_query_leaves_the_others_answered(metrics, server):
    def by_query() -> Response:
        is_bad = server.forms[-1]["query"] == "bad"
        return Response("", 400) if is_bad else Response(json.dumps(vector()), 200)

    server.answers = [by_query]
    metrics._max_workers = 1
    results = metrics.query_many(CLUSTER, {"a": "good", "b": "bad", "c": "good"}, AT)
    assert [results[key].problem is None for key in "abc"] == [True, False, True]


def test_a_mishap_with_one_query_leaves_the_others_answered(metrics, server, monkeypatch, caplog):
    original = AmpMetrics._query

    def query(self: AmpMetrics, *given: Any) -> QueryResult:
        if given[2] == "odd":
            raise RuntimeError("unforeseen")
        return original(self, *given)

    monkeypatch.setattr(AmpMetrics, "_query", query)
    results = metrics.query_many(CLUSTER, {"a": "up", "b": "odd"}, AT)
    assert results["a"].problem is None
    assert code_of(results["b"]) == "amp_unavailable"
    assert "unforeseen" in caplog.text


# --- rule groups ----------------------------------------------------------------------------------


def groups(*rules: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    group = {
        "name": "nodemend-increments",
        "file": "nodemend",
        "interval": 30,
        "evaluationTime": 0.25,
        "rules": list(rules),
    }
    return {"status": "success", "data": {"groups": [group | more]}}


def test_rules_are_asked_with_a_signed_get_and_read_with_their_health(metrics, server):
    failing = {
        "name": "nodemend:a:b",
        "type": "recording",
        "health": "err",
        "lastError": "vector contains metrics with the same labelset",
        "lastEvaluation": "2026-05-01T10:29:58.123456789Z",
    }
    never = {"name": "nodemend:c:d", "health": "unknown", "lastEvaluation": "0001-01-01T00:00:00Z"}
    other_zone = {"name": "x", "health": "ok", "lastEvaluation": "2026-05-01T12:29:58+02:00"}
    server.answers = [ok(groups(failing, never, other_zone, {"name": "bare"}))]

    answer = metrics.rule_groups(CLUSTER)

    assert server.paths == ["GET /workspaces/ws-1234/api/v1/rules?"]
    assert answer.problem is None
    (group,) = answer.groups
    assert (group.namespace, group.name) == ("nodemend", "nodemend-increments")
    assert (group.interval_s, group.evaluation_s) == (30.0, 0.25)
    first, second, third, fourth = group.rules
    assert (first.health, first.last_error) == ("err", failing["lastError"])
    assert first.evaluated_at == datetime(2026, 5, 1, 10, 29, 58, 123456, tzinfo=UTC)
    assert (second.health, second.evaluated_at) == ("unknown", None)
    assert third.evaluated_at == datetime(2026, 5, 1, 10, 29, 58, tzinfo=UTC)
    assert (fourth.health, fourth.evaluated_at) == ("unknown", None)


def test_a_workspace_without_rule_groups_has_none(metrics, server):
    server.answers = [ok({"status": "success", "data": {"groups": []}})]
    assert metrics.rule_groups(CLUSTER) == RuleGroupsResult()


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (403, {"message": "not authorized to perform: aps:ListRules"}, "amp_forbidden"),
        (404, {"message": "Workspace not found"}, "amp_query_rejected"),
        (429, {"message": "Rate exceeded"}, "amp_throttled"),
        (500, "oops", "amp_unavailable"),
        (504, "", "amp_timeout"),
        (200, "<html>", "amp_unavailable"),
        (200, {"status": "success", "data": {"groups": [{"rules": []}]}}, "amp_unavailable"),
        (200, groups({"name": "a", "lastEvaluation": "yesterday"}), "amp_unavailable"),
        (200, groups(interval="often"), "amp_unavailable"),
    ],
)
def test_rules_that_cannot_be_read_are_unknown(metrics, server, status, body, code):
    server.answers = [error(status, body)]
    answer = metrics.rule_groups(CLUSTER)
    assert answer.problem is not None
    assert (answer.problem.code, answer.groups) == (code, ())


def test_rules_are_asked_again_when_throttled(metrics, server):
    server.answers = [error(429, "later"), ok(groups())]
    assert metrics.rule_groups(CLUSTER).problem is None
    assert server.requests == 2


def test_rules_that_cannot_be_reached_are_unknown():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    metrics = AmpMetrics(
        credentials=botocore.credentials.Credentials("a", "b"),
        endpoint_url=f"http://127.0.0.1:{port}",
    )
    answer = metrics.rule_groups(CLUSTER)
    assert answer.problem is not None
    assert answer.problem.code == "amp_unavailable"


# --- retries and time -----------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_throttling_and_server_errors_are_asked_again(metrics, server, status):
    server.answers = [error(status, "later"), ok(vector(({}, "1")))]
    assert one(metrics).problem is None
    assert len(server.forms) == 2
    assert server.forms[0] == server.forms[1]


@pytest.mark.parametrize(("status", "calls"), [(503, 3), (400, 1), (403, 1), (422, 1), (504, 1)])
def test_retries_are_bounded_and_made_only_where_they_help(metrics, server, status, calls):
    server.answers = [error(status, "no")]
    one(metrics)
    assert len(server.forms) == calls


def test_long_retry_after_is_not_obeyed_in_full(server, url):
    server.answers = [error(429, "later", **{"Retry-After": "60"}), ok(vector())]
    metrics = AmpMetrics(
        credentials=credentials_of(server.identities), endpoint_url=url, budget_s=5.0
    )
    began = time.monotonic()
    assert one(metrics).problem is None
    assert time.monotonic() - began < 3


def test_budget_binds_all_queries_together(server, url):
    release = threading.Event()

    def hang() -> Response:
        release.wait(5)
        return Response(json.dumps(vector()), 200)

    server.answers = [hang]
    metrics = AmpMetrics(
        credentials=credentials_of(server.identities), endpoint_url=url, budget_s=0.4, max_workers=2
    )
    began = time.monotonic()
    results = metrics.query_many(CLUSTER, {str(n): "up" for n in range(6)}, AT)
    took = time.monotonic() - began
    release.set()
    assert took < 1.5
    assert {code_of(result) for result in results.values()} == {"amp_timeout"}
    assert len(results) == 6


def test_body_that_stops_half_way_is_a_timeout(server, url):
    def drip() -> Response:
        def body() -> Iterator[bytes]:
            yield b'{"status": "success", '
            time.sleep(1)

        return Response(body(), 200)

    server.answers = [drip]
    metrics = AmpMetrics(
        credentials=credentials_of(server.identities), endpoint_url=url, budget_s=0.3
    )
    assert code_of(one(metrics)) == "amp_timeout"


# --- network --------------------------------------------------------------------------------------


def test_refused_connection_is_told_as_network_trouble():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    metrics = AmpMetrics(
        credentials=botocore.credentials.Credentials("a", "b"),
        endpoint_url=f"http://127.0.0.1:{port}",
    )
    result = one(metrics)
    assert code_of(result) == "amp_unavailable"
    assert "com.amazonaws.eu-west-1.aps-workspaces" in text_of(result)
    assert "security group" in text_of(result)


def test_broken_connection_is_unavailable():
    def hang_up(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.recv(65536)
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=hang_up, args=(listener,), daemon=True)
        thread.start()
        metrics = AmpMetrics(
            credentials=botocore.credentials.Credentials("a", "b"),
            endpoint_url=f"http://127.0.0.1:{listener.getsockname()[1]}",
        )
        assert code_of(one(metrics)) == "amp_unavailable"
        thread.join(5)


def test_connection_that_is_never_taken_up_is_unavailable_within_the_connect_timeout():
    """A listener whose queue is full drops what knocks, as a security group does."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        knocking = [socket.socket() for _ in range(3)]
        for each in knocking:
            each.setblocking(False)
            each.connect_ex(address)
        metrics = AmpMetrics(
            credentials=botocore.credentials.Credentials("a", "b"),
            endpoint_url=f"http://127.0.0.1:{address[1]}",
            connect_timeout_s=0.3,
            budget_s=5.0,
        )
        began = time.monotonic()
        result = one(metrics)
        for each in knocking:
            each.close()
    assert (code_of(result), time.monotonic() - began < 2) == ("amp_unavailable", True)
    assert "timed out" in text_of(result)


def test_certificate_of_another_authority_is_refused(server):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    running = make_server("127.0.0.1", 0, server, threaded=True, ssl_context=context)
    thread = threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    metrics = AmpMetrics(
        credentials=credentials_of(server.identities),
        endpoint_url=f"https://127.0.0.1:{running.server_port}",
    )
    result = one(metrics)
    running.shutdown()
    thread.join()
    running.server_close()
    assert (code_of(result), server.forms) == ("amp_unavailable", [])
    assert "certificate" in text_of(result)


def test_body_in_a_broken_encoding_is_unavailable(metrics, server):
    server.answers = [lambda: Response(b"no gzip", 200, headers={"Content-Encoding": "gzip"})]
    result = one(metrics)
    assert (code_of(result), "could not be read" in text_of(result)) == ("amp_unavailable", True)


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (ClientError({"Error": {"Code": "AccessDenied"}}, "AssumeRole"), "amp_forbidden"),
        (ClientError({"Error": {"Code": "Throttling"}}, "AssumeRole"), "amp_unavailable"),
        (NoCredentialsError(), "amp_forbidden"),
    ],
)
def test_credentials_that_cannot_be_had_make_every_query_unknown(url, server, failure, code):
    class Broken(botocore.credentials.Credentials):
        def get_frozen_credentials(self) -> Any:
            raise failure

    metrics = AmpMetrics(credentials=Broken("a", "b"), endpoint_url=url)
    assert code_of(one(metrics)) == code
    assert server.forms == []


# --- the fake -------------------------------------------------------------------------------------


def test_fake_answers_by_key_or_query_and_otherwise_with_a_healthy_vector():
    fake = FakeMetrics()
    assert one(fake) == QueryResult()
    fake.asked.clear()
    bad = QueryResult(samples_processed=7)
    fake.answer("rule", bad, times=1)
    fake.fail("amp_timeout", matches="temp")
    answers = fake.query_many(CLUSTER, {"rule": "up", "x": "max(temp) > 90", "y": "z"}, AT)
    assert answers["rule"] is bad
    assert code_of(answers["x"]) == "amp_timeout"
    assert answers["y"] == QueryResult()
    assert fake.query_many(CLUSTER, {"rule": "up"}, AT)["rule"] == QueryResult()
    assert [asked.key for asked in fake.asked] == ["rule", "x", "y", "rule"]
    assert fake.asked[0].at == AT
