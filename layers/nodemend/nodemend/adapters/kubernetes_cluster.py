"""The Kubernetes API of a cluster, through the official client.

Only the client's `ApiClient` is used, which builds, authenticates and sends requests; what it sends
and gets is plain JSON. The generated `CoreV1Api` would cost a cold start eight times as much (0.85
s against 0.11 s from a layer without bytecode), its models need 379 MB for 2,000 nodes, and its
eviction call turns the answer's `Status` into an empty `V1Eviction`.

No call is repeated here but two kinds: once with a fresh token after a 401, and a GET once over a
new connection when the kept one turned out to be dead. Everything else is the state machine's.
"""

import json
import logging
import re
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import urllib3

from nodemend.adapters._kubernetes_objects import (
    EVENT_NAMESPACE,
    Json,
    disruption_budget_of,
    event_body,
    eviction_body,
    has_accelerators,
    node_of,
    pod_of,
)
from nodemend.application.ports import Clock, ClusterAccess, ClusterEndpoint
from nodemend.domain.errors import (
    ClusterForbiddenError,
    ClusterUnauthorizedError,
    ClusterUnavailableError,
    InvalidInputError,
    NodemendError,
)
from nodemend.domain.nodes import Node, NodeRef
from nodemend.domain.pods import DisruptionBudget, EvictionAnswer, Pod
from nodemend.domain.policy import ClusterPolicy

if TYPE_CHECKING:
    from kubernetes.client.api_client import ApiClient

_LOG = logging.getLogger(__name__)

PAGE_SIZE = 500

_TEXT_LIMIT = 500
_OBJECT_NAME = re.compile(r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RequestTimeouts:
    """Seconds for one request. The client has no defaults: without them a call may never end."""

    connect_s: float = 3.0
    """Also binds the TLS handshake."""
    read_s: float = 6.0
    """Between two bytes of the answer. A wrong uid makes the server think for 10 s before it
    says 409 (an eviction of a finished pod): the next slice settles such a pod by a GET."""


class KubernetesClusters:
    """Opens clusters and keeps one client, with its connections, for each.

    Args:
        access: Endpoint and tokens.
        clock: Stamps the Kubernetes Events.
        gpu_instance_types: Types that have accelerators, so that a node stays in the fleet while
            its device plugin and its labels are missing.
        timeouts: Of each request.
        page_size: Objects per page of a listing.
        user_agent: Up to its first slash it is the manager of the fields that are written.
    """

    def __init__(
        self,
        *,
        access: ClusterAccess,
        clock: Clock,
        gpu_instance_types: frozenset[str] = frozenset(),
        timeouts: RequestTimeouts = RequestTimeouts(),
        page_size: int = PAGE_SIZE,
        user_agent: str = "nodemend",
    ) -> None:
        self._access = access
        self._clock = clock
        self._gpu_instance_types = gpu_instance_types
        self._timeouts = timeouts
        self._page_size = page_size
        self._user_agent = user_agent
        self._lock = threading.Lock()
        self._open: dict[ClusterPolicy, KubernetesCluster] = {}

    def open(self, cluster: ClusterPolicy) -> "KubernetesCluster":
        """Return the API of a cluster; no request is made to it yet.

        Raises:
            AwsForbiddenError, AwsUnavailableError, InvalidInputError: as the endpoint's look-up.
        """
        with self._lock:
            if cluster not in self._open:
                self._open[cluster] = KubernetesCluster(
                    policy=cluster,
                    transport=_Transport(
                        access=self._access,
                        policy=cluster,
                        timeouts=self._timeouts,
                        user_agent=self._user_agent,
                    ),
                    clock=self._clock,
                    gpu_instance_types=self._gpu_instance_types,
                    page_size=self._page_size,
                )
            return self._open[cluster]


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the server said: HTTP status, and the body if it is a JSON object."""

    status: int
    body: Json
    text: str

    @property
    def message(self) -> str:
        said = str(self.body.get("message") or "") or self.text
        flat = " ".join(said.split())
        return flat if len(flat) <= _TEXT_LIMIT else flat[: _TEXT_LIMIT - 1] + "…"

    @property
    def details(self) -> Json:
        details = self.body.get("details")
        return details if isinstance(details, Mapping) else {}

    @property
    def causes(self) -> Sequence[Json]:
        return self.details.get("causes") or ()


@dataclass(frozen=True, slots=True)
class _Request:
    """One API request; `verb` and `resource` are the RBAC words, for error messages."""

    method: str
    path: str
    verb: str
    resource: str
    params: Mapping[str, str]
    """What stands in the path's braces; the client quotes it."""
    query: tuple[tuple[str, str], ...] = ()
    body: Json | Sequence[Json] | None = None
    content_type: str = ""


class _NoAnswerError(Exception):
    """No answer came, or not all of it; the message says what people can do about it."""


class _Transport:
    """Sends requests with the cluster's endpoint, certificate authority and token."""

    def __init__(
        self,
        *,
        access: ClusterAccess,
        policy: ClusterPolicy,
        timeouts: RequestTimeouts,
        user_agent: str,
    ) -> None:
        self._access = access
        self._policy = policy
        self._timeouts = timeouts
        self._user_agent = user_agent
        self._lock = threading.Lock()
        self._endpoint = access.endpoint(policy)
        self._client: ApiClient | None = None

    def send(self, request: _Request) -> _Answer:
        """Return the server's answer, whatever its status but 401.

        Raises:
            _NoAnswerError: if none came.
            ClusterUnauthorizedError: if the token is refused, the fresh one as well.
        """
        answer = self._send_once(request, self._access.token(self._policy))
        if answer.status == 401:
            answer = self._send_once(request, self._access.token(self._policy, is_fresh=True))
        if answer.status == 401:
            raise ClusterUnauthorizedError(
                f"cluster {self._policy.name} does not accept the token of "
                f"{self._policy.role_arn or 'the function role'} (401, also a fresh one: "
                f"{answer.message}). Remedy: deploy cluster-access.yaml, which makes an access "
                "entry for exactly this role, and see that the cluster's authentication mode is "
                "API or API_AND_CONFIG_MAP."
            )
        return answer

    def _send_once(self, request: _Request, token: str) -> _Answer:
        try:
            return self._exchange(request, token)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            # A kept connection dies while the container is frozen, and a cluster that was made
            # anew under its old name has another endpoint. Repeating is safe for reads only, and
            # after a time-out there is no time for it.
            if request.method != "GET" or _is_timeout(error):
                raise self._no_answer(error) from error
            self._renew(
                is_endpoint_doubtful=not isinstance(error, urllib3.exceptions.ProtocolError)
            )
        try:
            return self._exchange(request, token)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise self._no_answer(error) from error

    def _exchange(self, request: _Request, token: str) -> _Answer:
        from kubernetes.client.exceptions import ApiException  # noqa: PLC0415 - cold start

        client = self._connected()
        headers = {"Accept": "application/json", "Authorization": f"Bearer {token}"}
        if request.body is not None:
            # Not set by the client for a POST; without it the server guesses.
            headers["Content-Type"] = request.content_type or "application/json"
        sent = client.param_serialize(
            request.method,
            request.path,
            path_params=dict(request.params),
            query_params=list(request.query),
            header_params=headers,
            body=request.body,
            auth_settings=[],
        )
        timeouts = (self._timeouts.connect_s, self._timeouts.read_s)
        try:
            response = client.call_api(*sent, _request_timeout=timeouts)
        except ApiException as error:
            # Of the failures without an answer the client wraps only TLS ones, with status 0.
            raise urllib3.exceptions.SSLError(str(error.reason)) from error
        content: bytes = response.read()
        return _answer(int(response.status), content)

    def _connected(self) -> "ApiClient":
        with self._lock:
            if self._client is None:
                self._client = _api_client(self._endpoint, self._user_agent)
            return self._client

    def _renew(self, *, is_endpoint_doubtful: bool) -> None:
        """Drop all connections, and look the endpoint up again if it may be another by now."""
        endpoint = self._endpoint
        if is_endpoint_doubtful:
            try:
                endpoint = self._access.endpoint(self._policy, is_fresh=True)
            except NodemendError as error:
                # The cluster's failure is the one to report.
                _LOG.warning("endpoint of %s was not looked up: %s", self._policy.name, error)
        with self._lock:
            stale, self._client, self._endpoint = self._client, None, endpoint
        if stale is not None:
            stale.close()

    def _no_answer(self, error: Exception) -> _NoAnswerError:
        url, name = self._endpoint.url, self._policy.name
        match error:
            case urllib3.exceptions.ReadTimeoutError():
                what = f"no answer within {self._timeouts.read_s:g} s"
                remedy = "the API server is overloaded or hangs; look at its metrics"
            case urllib3.exceptions.SSLError() | ssl.SSLError():
                what = f"its certificate was not accepted ({error})"
                remedy = "is this the endpoint of the cluster, without a proxy in between?"
            case urllib3.exceptions.NameResolutionError():
                what = "its name does not resolve"
                remedy = (
                    "a private endpoint resolves inside the cluster's VPC only: run the functions "
                    "in it, with DNS support switched on"
                )
            case _:
                what = f"no connection ({type(error).__name__})"
                remedy = (
                    "let the functions' security group reach the cluster's security group on port "
                    "443; a public endpoint may have a list of allowed addresses"
                )
        return _NoAnswerError(f"cluster {name} at {url}: {what}. Remedy: {remedy}.")


def _is_timeout(error: Exception) -> bool:
    # urllib3 counts a refused connection and an unknown name among its time-outs.
    return isinstance(error, urllib3.exceptions.TimeoutError) and not isinstance(
        error, urllib3.exceptions.NewConnectionError
    )


def _api_client(endpoint: ClusterEndpoint, user_agent: str) -> "ApiClient":
    from kubernetes.client.api_client import ApiClient  # noqa: PLC0415 - 0.1 s of cold start
    from kubernetes.client.configuration import Configuration  # noqa: PLC0415

    configuration = Configuration(host=endpoint.url)
    # urllib3's default sleeps as long as a Retry-After says, three times over, and re-sends.
    configuration.retries = False
    client = ApiClient(configuration)
    client.user_agent = user_agent
    if endpoint.url.startswith("https:"):
        options = client.rest_client.pool_manager.connection_pool_kw
        options["ssl_context"] = ssl_context(endpoint.ca_pem)
    return client


def ssl_context(ca_pem: str) -> ssl.SSLContext:
    """Return a context that trusts the cluster's own authority and nothing else.

    Chain, dates and host name are verified. Only the strict RFC 5280 check of Python 3.13 is off:
    the authorities that EKS makes carry no key identifiers, and no cluster of such an authority
    could be reached from the python3.13 runtime (kubernetes-client/python#2394).
    """
    context = ssl.create_default_context(cadata=ca_pem) if ca_pem else ssl.create_default_context()
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def _answer(status: int, content: bytes) -> _Answer:
    text = content.decode("utf-8", "replace")
    try:
        body = json.loads(text)
    except ValueError:
        # `404 page not found` is plain text: the path itself is unknown to the server.
        body = None
    return _Answer(status, body if isinstance(body, dict) else {}, text)


class KubernetesCluster:
    """One cluster's API; see `application.ports.Cluster`. Safe to use from several threads."""

    def __init__(
        self,
        *,
        policy: ClusterPolicy,
        transport: _Transport,
        clock: Clock,
        gpu_instance_types: frozenset[str],
        page_size: int,
    ) -> None:
        self._policy = policy
        self._transport = transport
        self._clock = clock
        self._gpu_instance_types = gpu_instance_types
        self._page_size = page_size

    # --- nodes ------------------------------------------------------------------------------------

    def get_node(self, name: str) -> Node | None:
        """Return the node of exactly this name, or None; no other name is ever tried."""
        answer = self._get("/api/v1/nodes/{name}", "nodes", {"name": name})
        return None if answer is None else node_of(answer.body, self._policy.name)

    def list_gpu_nodes(self) -> Sequence[Node]:
        """Return the nodes that have, or should have, GPUs or Neuron devices.

        All nodes are listed and looked at here: no one label selector finds a node whose device
        plugin is down, and such a node must not vanish from the fleet.
        """

        def read(item: Json) -> Node | None:
            if not has_accelerators(item, self._gpu_instance_types):
                return None
            return node_of(item, self._policy.name)

        return self._list("/api/v1/nodes", "nodes", read)

    def patch_node(self, name: str, patch: Sequence[Mapping[str, Any]]) -> bool:
        """Apply a JSON patch; False if the node is not what was read (or is gone).

        A failed `test`, a `remove` of what is not there and an `add` below an absent parent are all
        422 with empty details. A 422 with causes (the result is no valid node) or from an
        admission webhook is one that no second reading mends.

        Raises:
            InvalidInputError: if the server finds the patch invalid.
        """
        if not _OBJECT_NAME.match(name):
            return False
        answer = self._send(
            _Request(
                "PATCH",
                "/api/v1/nodes/{name}",
                "patch",
                "nodes",
                {"name": name},
                body=[dict(operation) for operation in patch],
                content_type="application/json-patch+json",
            )
        )
        match answer.status:
            case 200 | 201:
                return True
            case 404 if answer.details.get("kind") == "nodes":
                return False
            case 409:
                return False
            case 422 if not answer.causes and "denied the request" not in answer.message:
                return False
            case _:
                raise InvalidInputError(
                    "patch",
                    f"{self._policy.name} refused it for node {name} ({answer.status}: "
                    f"{answer.message})",
                    "this is a defect of nodemend, or of an admission policy; please report it",
                )

    # --- pods -------------------------------------------------------------------------------------

    def list_pods(self, node_name: str) -> Sequence[Pod]:
        """Return the pods bound to a node, in all namespaces."""
        if not _OBJECT_NAME.match(node_name):
            return ()
        selector = ("fieldSelector", f"spec.nodeName={node_name}")
        return self._list("/api/v1/pods", "pods", pod_of, query=(selector,))

    def get_pod(self, namespace: str, name: str) -> Pod | None:
        """Return a pod, or None."""
        path = "/api/v1/namespaces/{namespace}/pods/{name}"
        answer = self._get(path, "pods", {"namespace": namespace, "name": name})
        return None if answer is None else pod_of(answer.body)

    def evict(self, pod: Pod) -> EvictionAnswer:
        """Ask to evict the pod; every answer but 401 is data, and no answer is status 0.

        The grace period is the pod's own: 0 would take the object away while containers run.

        Raises:
            ClusterUnauthorizedError: if the token is refused, the fresh one as well.
            InvalidInputError: if the pod carries no uid, without which another pod of the same
                name could be hit.
        """
        if not pod.uid:
            raise InvalidInputError("pod.uid", f"{pod.id} has none", "read the pod before it")
        request = _Request(
            "POST",
            "/api/v1/namespaces/{namespace}/pods/{name}/eviction",
            "create",
            "pods/eviction",
            {"namespace": pod.namespace, "name": pod.name},
            body=eviction_body(pod),
        )
        try:
            answer = self._transport.send(request)
        except _NoAnswerError as error:
            return EvictionAnswer(status=0, message=str(error))
        return EvictionAnswer(
            status=answer.status,
            message="" if answer.status < 300 else answer.message,
            causes=tuple(
                (str(cause.get("reason", "")), str(cause.get("message", "")))
                for cause in answer.causes
            ),
            details_kind=str(answer.details.get("kind") or ""),
        )

    def list_disruption_budgets(self, namespace: str) -> Sequence[DisruptionBudget]:
        """Return the namespace's PodDisruptionBudgets; none if there is no such namespace."""
        if not _OBJECT_NAME.match(namespace):
            return ()
        path = "/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"
        return self._list(
            path, "poddisruptionbudgets", disruption_budget_of, params={"namespace": namespace}
        )

    # --- events -----------------------------------------------------------------------------------

    def record_event(self, node: NodeRef, reason: str, message: str, *, is_warning: bool) -> None:
        """Write a Kubernetes Event on the node; what goes wrong is logged.

        The name is made from the content: a step that is repeated writes the same Event again,
        and the server refuses the second as existing.
        """
        if not node.uid:
            # `kubectl describe node` hides Events without the node's real uid.
            _LOG.warning("no Event for a node without uid", extra={"node": node.name})
            return
        body = event_body(node, reason, message, is_warning=is_warning, at=self._clock.now())
        request = _Request(
            "POST",
            "/api/v1/namespaces/{namespace}/events",
            "create",
            "events",
            {"namespace": EVENT_NAMESPACE},
            body=body,
        )
        try:
            answer = self._transport.send(request)
            problem = "" if answer.status < 300 or answer.status == 409 else answer.message
        except (_NoAnswerError, NodemendError) as error:
            problem = str(error)
        if problem:
            _LOG.warning(
                "Event was not written",
                extra={"node": node.name, "reason": reason, "problem": problem},
            )

    # --- requests ---------------------------------------------------------------------------------

    def _get(self, path: str, resource: str, params: Mapping[str, str]) -> _Answer | None:
        # Names that no object can have are not asked for: `..` would be another path, and an empty
        # name a listing.
        if not all(_OBJECT_NAME.match(value) for value in params.values()):
            return None
        answer = self._send(_Request("GET", path, "get", resource, params))
        if answer.status == 404 and answer.details.get("kind") in (resource, "namespaces"):
            return None
        return self._expect_ok(answer, f"get {resource}")

    def _list(
        self,
        path: str,
        resource: str,
        read: Callable[[Json], T | None],
        *,
        query: tuple[tuple[str, str], ...] = (),
        params: Mapping[str, str] | None = None,
    ) -> tuple[T, ...]:
        """Return what `read` makes of the items of all pages, page by page.

        A continue token expires after some minutes, or when the server compacts its history. The
        listing then starts over, once, so that what is returned is one consistent state.
        """
        found: list[T] = []
        token, restarts_left = "", 1
        while True:
            page = (*query, ("limit", str(self._page_size)))
            if token:
                page = (*page, ("continue", token))
            answer = self._send(_Request("GET", path, "list", resource, params or {}, page))
            if answer.status == 410 and token and restarts_left:
                found, token, restarts_left = [], "", restarts_left - 1
                continue
            body = self._expect_ok(answer, f"list {resource}").body
            read_items = (read(item) for item in body.get("items") or ())
            found.extend(item for item in read_items if item is not None)
            token = str((body.get("metadata") or {}).get("continue") or "")
            if not token:
                return tuple(found)

    def _send(self, request: _Request) -> _Answer:
        try:
            answer = self._transport.send(request)
        except _NoAnswerError as error:
            raise ClusterUnavailableError(str(error)) from error
        what = f"{request.verb} {request.resource}"
        if answer.status == 403:
            raise ClusterForbiddenError(
                f"cluster {self._policy.name} does not allow nodemend to {what}: {answer.message}. "
                "Remedy: apply docs/kubernetes/rbac.yaml, which binds the group of nodemend's "
                "access entry; if the text names an admission webhook or policy, exempt nodemend "
                "there."
            )
        if answer.status == 429:
            raise ClusterUnavailableError(
                f"cluster {self._policy.name} throttled {what} (429: {answer.message})"
            )
        if answer.status >= 500:
            raise ClusterUnavailableError(
                f"the API server of cluster {self._policy.name} failed to {what} "
                f"({answer.status}: {answer.message}); it was reached, so this is no network matter"
            )
        return answer

    def _expect_ok(self, answer: _Answer, what: str) -> _Answer:
        if answer.status == 200 and answer.body:
            return answer
        raise ClusterUnavailableError(
            f"cluster {self._policy.name} answered {what} with {answer.status}: {answer.message}; "
            "is this a Kubernetes API endpoint?"
        )
