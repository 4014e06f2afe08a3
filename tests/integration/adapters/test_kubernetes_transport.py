"""The Kubernetes adapter on the wire: what it sends, and what becomes of each answer.

Answers are those of a real API server (tests/data/kubernetes_client) from a server that a test
scripts, so that states are reachable which a healthy cluster never shows.
"""

import ipaddress
import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.wrappers import Request, Response

from nodemend.adapters.kubernetes_cluster import KubernetesClusters, RequestTimeouts
from nodemend.application.ports import ClusterEndpoint
from nodemend.domain.errors import (
    AwsUnavailableError,
    ClusterForbiddenError,
    ClusterUnauthorizedError,
    ClusterUnavailableError,
    InvalidInputError,
)
from nodemend.domain.nodes import NodeRef
from nodemend.domain.pods import EvictionVerdict, Pod
from nodemend.domain.policy import ClusterPolicy
from tests.fakes.system import ManualClock

EXCHANGES = json.loads(
    (Path(__file__).parents[2] / "data/kubernetes_client/exchanges.json").read_text()
)
POLICY = ClusterPolicy("gpu-prod", "ws-1", "us-east-1", role_arn="arn:aws:iam::1:role/cluster")
NODE = "ip-10-0-1-5.ec2.internal"
POD = Pod("ml", "train-0", "uid-7", NODE)
PATCH = [{"op": "test", "path": "/metadata/uid", "value": "x"}]

Answer = Callable[[], Response]


@dataclass(frozen=True)
class Got:
    """One request as the server saw it."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any


class Script:
    """A server that gives the next scripted answer, whatever the request; the last one repeats."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.got: list[Got] = []

    def add(self, *answers: Answer) -> None:
        self.answers.extend(answers)

    def __call__(self, environ: Any, start_response: Any) -> Any:
        return self._answer(Request(environ))(environ, start_response)

    def _answer(self, request: Request) -> Response:
        text = request.get_data(as_text=True)
        self.got.append(
            Got(
                request.method,
                request.path,
                dict(request.args),
                dict(request.headers),
                json.loads(text) if text else None,
            )
        )
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return answer()


def recorded(name: str) -> Answer:
    """Answer as the real server did."""
    exchange = EXCHANGES[name]
    body = exchange["body"]
    return lambda: Response(
        body if isinstance(body, str) else json.dumps(body),
        exchange["status"],
        headers=exchange["headers"],
    )


def answer(status: int, body: Any = None, **headers: str) -> Answer:
    text = body if isinstance(body, str) else json.dumps(body)
    return lambda: Response(
        text, status, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )


@dataclass
class Access:
    """Cluster access that counts; tokens are t0, t1…, endpoints come from a list."""

    endpoints: list[ClusterEndpoint]
    tokens: int = 0
    fresh_endpoints: int = 0
    refresh_error: Exception | None = None
    asked: list[bool] = field(default_factory=list)

    def endpoint(self, cluster: ClusterPolicy, *, is_fresh: bool = False) -> ClusterEndpoint:
        assert cluster == POLICY
        if is_fresh:
            self.fresh_endpoints += 1
            if self.refresh_error is not None:
                raise self.refresh_error
            if len(self.endpoints) > 1:
                self.endpoints.pop(0)
        return self.endpoints[0]

    def token(self, cluster: ClusterPolicy, *, is_fresh: bool = False) -> str:
        assert cluster == POLICY
        self.asked.append(is_fresh)
        self.tokens += is_fresh
        return f"t{self.tokens}"


class _KeepAlive(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def server(script: Script) -> Iterator[str]:
    server = make_server("127.0.0.1", 0, script, threaded=True, request_handler=_KeepAlive)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def access(server: str) -> Access:
    return Access([ClusterEndpoint(server, "")])


def opened(access: Access, *, read_s: float = 2.0, page_size: int = 500) -> Any:
    clusters = KubernetesClusters(
        access=access,
        clock=ManualClock(),
        timeouts=RequestTimeouts(connect_s=0.5, read_s=read_s),
        page_size=page_size,
        user_agent="nodemend/1.2.3",
    )
    cluster = clusters.open(POLICY)
    assert clusters.open(POLICY) is cluster
    return cluster


# --- requests -------------------------------------------------------------------------------------


def test_request_carries_token_user_agent_and_no_body(script, access):
    script.add(recorded("node-get"))
    node = opened(access).get_node(NODE)
    assert node.ref.name == NODE
    got = script.got[0]
    assert (got.method, got.path) == ("GET", f"/api/v1/nodes/{NODE}")
    assert got.headers["Authorization"] == "Bearer t0"
    assert got.headers["User-Agent"] == "nodemend/1.2.3"
    assert "Content-Type" not in got.headers


def test_patch_is_sent_as_a_json_patch(script, access):
    script.add(recorded("node-get"))
    assert opened(access).patch_node(NODE, PATCH) is True
    got = script.got[0]
    assert (got.method, got.headers["Content-Type"]) == ("PATCH", "application/json-patch+json")
    assert got.body == PATCH


@pytest.mark.case("R14")
@pytest.mark.case("R17")
def test_eviction_is_posted_with_everything_set(script, access):
    script.add(recorded("evict-success"))
    assert opened(access).evict(POD).verdict is EvictionVerdict.ACCEPTED
    got = script.got[0]
    assert (got.method, got.path) == ("POST", "/api/v1/namespaces/ml/pods/train-0/eviction")
    assert got.headers["Content-Type"] == "application/json"
    assert got.body == {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": "train-0", "namespace": "ml"},
        "deleteOptions": {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": "uid-7"},
        },
    }


def test_pod_without_uid_is_never_evicted(script, access):
    with pytest.raises(InvalidInputError, match="uid"):
        opened(access).evict(Pod("ml", "train-0", "", NODE))
    assert script.got == []


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "UPPER", "a?b", "a b", "-a", "x" * 254])
def test_names_that_no_object_can_have_are_not_asked_for(script, access, name):
    cluster = opened(access)
    assert cluster.get_node(name) is None
    assert cluster.get_pod("ml", name) is None
    assert cluster.get_pod(name, "train-0") is None
    assert cluster.list_pods(name) == ()
    assert cluster.list_disruption_budgets(name) == ()
    assert cluster.patch_node(name, PATCH) is False
    assert script.got == []


@pytest.mark.case("R26")
def test_short_host_name_is_asked_for_as_it_is_and_never_completed(script, access):
    script.add(recorded("node-get-missing"))
    assert opened(access).get_node("ip-10-0-1-5") is None
    assert [got.path for got in script.got] == ["/api/v1/nodes/ip-10-0-1-5"]


@pytest.mark.parametrize("name", ["pod-get-missing", "pod-get-missing-namespace"])
def test_missing_pod_or_namespace_is_none(script, access, name):
    script.add(recorded(name))
    assert opened(access).get_pod("ml", "train-0") is None


def test_plain_text_404_is_no_missing_object(script, access):
    script.add(recorded("nodeclaim-delete-not-installed"))
    with pytest.raises(ClusterUnavailableError, match="Kubernetes API endpoint"):
        opened(access).get_node(NODE)


# --- patches --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "node-patch-json-test-fails",
        "node-patch-json-test-missing-path",
        "node-patch-with-wrong-uid-json-test",
        "node-patch-json-remove-missing",
        "node-patch-json-append-to-absent-list",
        "node-patch-with-stale-resource-version",
        "node-patch-missing-node",
    ],
)
def test_patch_of_a_node_that_is_not_what_was_read_is_false(script, access, name):
    script.add(recorded(name))
    assert opened(access).patch_node(NODE, PATCH) is False
    assert len(script.got) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("node-patch-json-add-taint-same-key-effect", "taints must be unique"),
        ("node-patch-provider-id-change", "may not change providerID"),
        ("node-patch-json-not-a-list", "error decoding patch"),
    ],
)
def test_patch_that_is_invalid_is_an_input_error(script, access, name, text):
    script.add(recorded(name))
    with pytest.raises(InvalidInputError, match=text):
        opened(access).patch_node(NODE, PATCH)


def test_patch_that_an_admission_webhook_denies_is_not_taken_for_a_failed_test(script, access):
    denial = {"kind": "Status", "message": 'admission webhook "x" denied the request: no'}
    script.add(answer(422, denial))
    with pytest.raises(InvalidInputError, match="admission webhook"):
        opened(access).patch_node(NODE, PATCH)


# --- evictions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("evict-success", EvictionVerdict.ACCEPTED),
        ("evict-terminating", EvictionVerdict.ACCEPTED),
        ("evict-missing-pod", EvictionVerdict.GONE),
        ("evict-uid-mismatch", EvictionVerdict.GONE),
        ("evict-replaced-running-pod-old-uid", EvictionVerdict.GONE),
        ("evict-pdb-exhausted", EvictionVerdict.BLOCKED_BY_PDB),
        ("evict-pdb-not-processed", EvictionVerdict.BLOCKED_BY_PDB),
        ("evict-pdb-sync-failed-after-sync", EvictionVerdict.BLOCKED_BY_PDB),
        ("evict-on-silent-node-blocked", EvictionVerdict.BLOCKED_BY_PDB),
        ("evict-two-pdbs", EvictionVerdict.BLOCKED_BY_MULTIPLE_PDBS),
        ("evict-namespace-terminating", EvictionVerdict.NAMESPACE_TERMINATING),
        ("evict-forbidden", EvictionVerdict.FORBIDDEN),
    ],
)
def test_every_answer_to_an_eviction_is_data(script, access, name, verdict):
    script.add(recorded(name))
    found = opened(access).evict(POD)
    assert found.verdict is verdict
    assert found.status == EXCHANGES[name]["status"]
    assert len(script.got) == 1


@pytest.mark.case("R2")
def test_exhausted_budget_names_the_budget_and_returns_at_once(script, access):
    script.add(recorded("evict-pdb-exhausted"))
    began = time.monotonic()
    found = opened(access).evict(POD)
    assert time.monotonic() - began < 1
    assert found.cause_text == "The disruption budget web needs 1 healthy pods and has 1 currently"
    assert len(script.got) == 1


@pytest.mark.case("R17")
def test_missing_pod_namespace_and_path_are_told_apart(script, access):
    script.add(
        recorded("evict-missing-pod"),
        recorded("evict-missing-namespace"),
        recorded("nodeclaim-delete-not-installed"),
    )
    cluster = opened(access)
    kinds = [cluster.evict(POD).details_kind for _ in range(3)]
    assert kinds == ["pods", "namespaces", ""]


@pytest.mark.parametrize("status", [400, 405, 410, 418, 429, 500, 503, 504])
def test_unheard_of_answers_to_an_eviction_are_data_too(script, access, status):
    script.add(answer(status, "<html>proxy</html>"))
    found = opened(access).evict(POD)
    assert (found.status, found.message) == (status, "<html>proxy</html>")


def test_eviction_without_an_answer_has_status_0_and_is_not_sent_again(access, script):
    script.add(lambda: Response(_slow(1.0), 201))
    found = opened(access, read_s=0.2).evict(POD)
    assert (found.status, found.verdict) == (0, EvictionVerdict.UNSETTLED)
    assert "no answer within 0.2 s" in found.message
    assert len(script.got) == 1


def _slow(seconds: float) -> Iterator[bytes]:
    time.sleep(seconds)
    yield b"{}"


# --- time -----------------------------------------------------------------------------------------


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that takes connections and says nothing."""
    listener = socket.create_server(("127.0.0.1", 0))
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.close()


@pytest.mark.case("R20")
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_server_that_never_answers_fails_within_the_timeouts(silent, scheme):
    cluster = opened(Access([ClusterEndpoint(f"{scheme}://{silent}", "")]), read_s=0.3)
    began = time.monotonic()
    with pytest.raises(ClusterUnavailableError, match="no answer within"):
        cluster.get_node(NODE)
    assert time.monotonic() - began < 1


def test_default_timeouts_leave_a_step_below_ten_seconds():
    timeouts = RequestTimeouts()
    assert timeouts.connect_s + timeouts.read_s < 10


@pytest.mark.case("R20")
@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_not_slept_in_the_client(script, access, status):
    script.add(answer(status, {"kind": "Status", "message": "later"}, Retry_After="10"))
    cluster = opened(access)
    began = time.monotonic()
    with pytest.raises(ClusterUnavailableError, match="later"):
        cluster.get_node(NODE)
    assert time.monotonic() - began < 1
    assert len(script.got) == 1


# --- 401 and 403 ----------------------------------------------------------------------------------


@pytest.mark.case("R21")
def test_refused_token_is_refreshed_once_and_the_call_repeated(script, access):
    script.add(recorded("node-get-bad-token"), recorded("node-get"))
    assert opened(access).get_node(NODE) is not None
    assert [got.headers["Authorization"] for got in script.got] == ["Bearer t0", "Bearer t1"]
    assert access.asked == [False, True]


@pytest.mark.case("R21")
@pytest.mark.case("R24")
@pytest.mark.parametrize(
    "call",
    [
        lambda cluster: cluster.get_node(NODE),
        lambda cluster: cluster.list_gpu_nodes(),
        lambda cluster: cluster.patch_node(NODE, PATCH),
        lambda cluster: cluster.evict(POD),
    ],
)
def test_token_that_is_refused_twice_is_an_access_entry_matter(script, access, call):
    script.add(recorded("node-get-bad-token"))
    with pytest.raises(ClusterUnauthorizedError, match=r"role/cluster.*access entry"):
        call(opened(access))
    assert access.asked == [False, True]
    assert len(script.got) == 2


@pytest.mark.case("R24")
def test_forbidden_call_names_verb_resource_and_remedy(script, access):
    script.add(recorded("node-patch-forbidden"))
    with pytest.raises(ClusterForbiddenError) as caught:
        opened(access).patch_node(NODE, PATCH)
    text = str(caught.value)
    assert "patch nodes" in text
    assert 'User "dev" cannot patch resource "nodes"' in text
    assert "rbac.yaml" in text
    assert access.asked == [False]


# --- network --------------------------------------------------------------------------------------


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_refused_connection_is_told_as_network_trouble():
    access = Access([ClusterEndpoint(f"http://127.0.0.1:{closed_port()}", "")])
    with pytest.raises(ClusterUnavailableError, match="security group"):
        opened(access).get_node(NODE)
    assert access.fresh_endpoints == 1


def test_name_that_does_not_resolve_is_told_as_such():
    access = Access([ClusterEndpoint("http://cluster.invalid", "")])
    with pytest.raises(ClusterUnavailableError, match="private endpoint resolves inside"):
        opened(access).get_node(NODE)


def test_server_error_is_told_as_no_network_matter(script, access):
    script.add(answer(500, {"kind": "Status", "message": "etcd is gone"}))
    with pytest.raises(ClusterUnavailableError, match=r"etcd is gone.*no network matter"):
        opened(access).list_pods(NODE)


def test_cluster_that_was_made_anew_is_found_at_its_new_endpoint(script, server):
    script.add(recorded("node-get"))
    access = Access(
        [ClusterEndpoint(f"http://127.0.0.1:{closed_port()}", ""), ClusterEndpoint(server, "")]
    )
    cluster = opened(access)
    assert cluster.get_node(NODE) is not None
    assert cluster.evict(POD).status == 200
    assert access.fresh_endpoints == 1


def test_failed_lookup_of_the_endpoint_does_not_hide_the_clusters_failure():
    access = Access([ClusterEndpoint(f"http://127.0.0.1:{closed_port()}", "")])
    access.refresh_error = AwsUnavailableError("eks: throttled")
    with pytest.raises(ClusterUnavailableError, match="security group"):
        opened(access).get_node(NODE)


def test_mutation_is_not_repeated_after_a_broken_connection():
    access = Access([ClusterEndpoint(f"http://127.0.0.1:{closed_port()}", "")])
    cluster = opened(access)
    with pytest.raises(ClusterUnavailableError):
        cluster.patch_node(NODE, PATCH)
    assert cluster.evict(POD).status == 0
    assert access.fresh_endpoints == 0


def test_kept_connection_that_died_is_replaced_for_a_read(script):
    """The server answers once on a connection, then drops the next request on the floor."""
    body = json.dumps(EXCHANGES["node-get"]["body"]).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    accepted = []

    def serve(listener: socket.socket) -> None:
        for _ in range(2):
            connection, _ = listener.accept()
            accepted.append(connection)
            connection.recv(65536)
            connection.sendall(head % len(body) + body)
            if len(accepted) == 1:
                connection.recv(65536)
                # A reset, as from a load balancer that has forgotten the connection.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        access = Access([ClusterEndpoint(f"http://127.0.0.1:{listener.getsockname()[1]}", "")])
        cluster = opened(access)
        assert cluster.get_node(NODE) is not None
        assert cluster.get_node(NODE) is not None
        thread.join(5)
    assert len(accepted) == 2
    assert access.fresh_endpoints == 0  # the endpoint was not in doubt


# --- listings -------------------------------------------------------------------------------------


def page(names: list[str], token: str = "") -> Answer:
    items = [
        {"metadata": {"name": name}, "status": {"capacity": {"nvidia.com/gpu": "8"}}}
        for name in names
    ]
    metadata = {"resourceVersion": "1"} | ({"continue": token} if token else {})
    return answer(200, {"kind": "NodeList", "metadata": metadata, "items": items})


def names_of(nodes: Any) -> list[str]:
    return [node.ref.name for node in nodes]


def test_listing_follows_continue_tokens_to_the_end(script, access):
    script.add(page(["a", "b"], "T1"), page(["c"], "T2"), page([]))
    assert names_of(opened(access, page_size=2).list_gpu_nodes()) == ["a", "b", "c"]
    assert [got.query for got in script.got] == [
        {"limit": "2"},
        {"limit": "2", "continue": "T1"},
        {"limit": "2", "continue": "T2"},
    ]


def test_expired_continue_token_starts_the_listing_over_and_counts_no_node_twice(script, access):
    script.add(
        page(["a", "b"], "T1"),
        recorded("node-list-continue-expired"),
        page(["a", "b"], "T2"),
        page(["c"]),
    )
    assert names_of(opened(access).list_gpu_nodes()) == ["a", "b", "c"]
    assert [got.query.get("continue") for got in script.got] == [None, "T1", None, "T2"]


def test_continue_token_that_expires_again_ends_the_listing(script, access):
    script.add(
        page(["a"], "T1"),
        recorded("node-list-continue-expired"),
        page(["a"], "T2"),
        recorded("node-list-continue-expired"),
    )
    with pytest.raises(ClusterUnavailableError, match="410"):
        opened(access).list_gpu_nodes()
    assert len(script.got) == 4


def test_page_that_fails_makes_no_short_fleet(script, access):
    script.add(page(["a"], "T1"), answer(503, {"message": "gone"}))
    with pytest.raises(ClusterUnavailableError):
        opened(access).list_gpu_nodes()


def test_pods_are_selected_by_node_on_the_server(script, access):
    script.add(answer(200, {"kind": "PodList", "metadata": {}, "items": []}))
    assert opened(access).list_pods(NODE) == ()
    assert script.got[0].query == {"fieldSelector": f"spec.nodeName={NODE}", "limit": "500"}


def test_budgets_are_listed_in_their_namespace(script, access):
    script.add(recorded("pdb-list-namespace"))
    budgets = opened(access).list_disruption_budgets("web")
    assert {budget.name for budget in budgets} == {
        item["metadata"]["name"] for item in EXCHANGES["pdb-list-namespace"]["body"]["items"]
    }
    assert script.got[0].path == "/apis/policy/v1/namespaces/web/poddisruptionbudgets"


# --- events ---------------------------------------------------------------------------------------

REF = NodeRef("gpu-prod", NODE, "uid-1", "i-0aaaaaaaaaaaaaaa1", "boot-1")


@pytest.mark.case("R69")
def test_event_is_posted_to_the_default_namespace(script, access):
    script.add(answer(201, {"kind": "Event"}))
    opened(access).record_event(REF, "NodeCordoned", "by inc-1", is_warning=True)
    got = script.got[0]
    assert (got.method, got.path) == ("POST", "/api/v1/namespaces/default/events")
    assert got.headers["Content-Type"] == "application/json"
    assert got.body["involvedObject"]["uid"] == "uid-1"


@pytest.mark.case("R69")
@pytest.mark.parametrize(
    "name", ["event-create-forbidden", "node-get-bad-token", "nodeclaim-delete-not-installed"]
)
def test_event_that_is_refused_is_logged_and_never_raised(script, access, caplog, name):
    script.add(recorded(name))
    opened(access).record_event(REF, "NodeCordoned", "by inc-1", is_warning=True)
    assert "Event was not written" in caplog.text


def test_event_that_exists_already_is_no_problem(script, access, caplog):
    script.add(answer(409, {"kind": "Status", "reason": "AlreadyExists"}))
    with caplog.at_level(logging.DEBUG):
        opened(access).record_event(REF, "NodeCordoned", "by inc-1", is_warning=False)
    assert "was not written" not in caplog.text


def test_event_for_an_unreachable_cluster_is_logged(caplog):
    access = Access([ClusterEndpoint(f"http://127.0.0.1:{closed_port()}", "")])
    opened(access).record_event(REF, "NodeCordoned", "by inc-1", is_warning=True)
    assert "Event was not written" in caplog.text


@pytest.mark.case("R69")
def test_event_without_the_nodes_uid_is_not_written(script, access, caplog):
    opened(access).record_event(NodeRef("c", NODE), "X", "m", is_warning=True)
    assert script.got == []
    assert "without uid" in caplog.text


# --- TLS ------------------------------------------------------------------------------------------


@pytest.fixture
def tls(script: Script) -> Iterator[tuple[str, str]]:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    server = make_server("127.0.0.1", 0, script, threaded=True, ssl_context=context)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"https://127.0.0.1:{server.server_port}", authority.cert_pem.bytes().decode()
    server.shutdown()
    thread.join()
    server.server_close()


def test_cluster_is_trusted_by_its_own_authority(script, tls):
    script.add(recorded("node-get"))
    assert opened(Access([ClusterEndpoint(*tls)])).get_node(NODE) is not None


@pytest.mark.parametrize("authority", ["another", "none", "garbage"])
def test_server_of_another_authority_gets_no_token(script, tls, authority):
    pems = {
        "another": trustme.CA().cert_pem.bytes().decode(),
        "none": "",
        "garbage": "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
    }
    access = Access([ClusterEndpoint(tls[0], pems[authority])])
    with pytest.raises(ClusterUnavailableError, match="certificate was not accepted"):
        opened(access).get_node(NODE)
    assert script.got == []


def eks_like_chain() -> tuple[str, str]:
    """Return an authority and a server certificate with key, both without key identifiers.

    EKS makes its authorities so: `CN=kubernetes` with basic constraints and nothing else.
    """
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kubernetes")])
    began = datetime.now(UTC) - timedelta(hours=1)

    def builder(public: ec.EllipticCurvePublicKey, name: x509.Name) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .issuer_name(issuer)
            .subject_name(name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(began)
            .not_valid_after(began + timedelta(days=1))
        )

    authority = (
        builder(ca_key.public_key(), issuer)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kube-apiserver")])
    server = (
        builder(key.public_key(), subject)
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return authority.public_bytes(pem).decode(), (server.public_bytes(pem) + private).decode()


@pytest.mark.case("kubernetes-client/python#2394")
def test_authority_as_eks_makes_it_is_trusted_though_python_is_strict(
    script, tmp_path, monkeypatch
):
    authority, chain = eks_like_chain()
    (tmp_path / "server.pem").write_text(chain)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(tmp_path / "server.pem")
    make_context = ssl.create_default_context

    def strict(*args: Any, **options: Any) -> ssl.SSLContext:
        """As Python 3.13 does."""
        context = make_context(*args, **options)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", strict)
    script.add(recorded("node-get"))
    server = make_server("127.0.0.1", 0, script, threaded=True, ssl_context=serving)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        access = Access([ClusterEndpoint(f"https://127.0.0.1:{server.server_port}", authority)])
        assert opened(access).get_node(NODE) is not None
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
