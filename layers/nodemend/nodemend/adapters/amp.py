"""Instant queries and rule health of Amazon Managed Service for Prometheus.

The query travels as a POST form body: in a URL the signature of `+`, spaces and braces differs
between signers, in a body it cannot (requests-aws4auth #54, awscurl #197).

A query that AMP cut at its minute (422) is not asked again in the same run: the function's own
time is up by then, and a narrower question would be another rule. The next scan asks it anew, and
until then its rule is unknown.
"""

import json
import logging
import re
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import requests
from botocore.credentials import Credentials
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    NoCredentialsError,
)
from requests.adapters import HTTPAdapter
from requests_aws4auth import AWS4Auth
from urllib3.exceptions import ReadTimeoutError
from urllib3.util.retry import Retry

from nodemend.application.ports import QueryResult, RuleGroupsResult
from nodemend.domain.findings import Sample
from nodemend.domain.policy import ClusterPolicy
from nodemend.domain.reasons import Reason
from nodemend.domain.rule_health import RecordedRule, RuleGroup

_LOG = logging.getLogger(__name__)

SIGNING_NAME = "aps"

_RETRIES = 2
_RETRY_STATUSES = frozenset({429, 500, 502, 503})
"""504 is no member: AMP has worked on the query for a minute by then, and so would the retry."""
_RETRY_AFTER_MAX_S = 2
_CANCELLED_STATUSES = (499, 504)
_TEXT_LIMIT = 300
_RULES_TIMEOUT_S = 10.0
_COST_WARNING = re.compile("sample|threshold|qsp", re.IGNORECASE)
_SIGNATURE = re.compile("signature|security token|credential|date in the request", re.IGNORECASE)
_LIMIT = re.compile("limit|too many samples|exceed|more than the", re.IGNORECASE)
_FRACTION = re.compile(r"\.(\d{6})\d+")


class AmpMetrics:
    """Answers to PromQL queries, with every failure told as an unknown result.

    Args:
        credentials: Of the function, as botocore refreshes them. Frozen ones would go stale in a
            warm container.
        endpoint_url: Where the data plane is, if it is not at the region's public name (an
            interface endpoint without private DNS, an emulator).
        max_workers: How many queries run side by side.
        budget_s: Time for one `query_many` as a whole. AMP cuts a query at 60 s, and a function
            that waits for that is cut itself and reports nothing: stay below its time-out.
        connect_timeout_s: Time to connect; a connection that takes longer is a blocked one.
        max_samples_error_threshold: Samples that one query may process before AMP refuses it,
            unbilled; None: the workspace's own quota binds.
        max_samples_warning_threshold: Samples from which on AMP warns; the log names the query
            then. The answer is whole: this warning alone makes it no unknown.
        user_agent: Sent to AMP, shown in its query log.
    """

    def __init__(
        self,
        *,
        credentials: Credentials,
        endpoint_url: str | None = None,
        max_workers: int = 8,
        budget_s: float = 50.0,
        connect_timeout_s: float = 3.0,
        max_samples_error_threshold: int | None = None,
        max_samples_warning_threshold: int | None = None,
        user_agent: str = "nodemend",
    ) -> None:
        self._credentials = credentials
        self._endpoint_url = endpoint_url
        self._max_workers = max_workers
        self._budget_s = budget_s
        self._connect_timeout_s = connect_timeout_s
        self._max_samples = max_samples_error_threshold
        self._warn_samples = max_samples_warning_threshold
        self._user_agent = user_agent

    def query_many(
        self, cluster: ClusterPolicy, queries: Mapping[str, str], at: datetime
    ) -> Mapping[str, QueryResult]:
        """Run instant queries side by side; the answers stand under the queries' keys.

        Returns within the budget, whatever AMP does: queries that have no answer by then are
        `amp_timeout`, and those that were not even sent are dropped.
        """
        if not queries:
            return {}
        deadline = time.monotonic() + self._budget_s
        # Connections live for one call only: a container is frozen between two scans, and what it
        # kept open has often been closed by the other side meanwhile.
        session = self._new_session()
        pool = ThreadPoolExecutor(min(self._max_workers, len(queries)), "amp-query")
        try:
            futures = {
                key: pool.submit(self._query, session, cluster, query, at, deadline)
                for key, query in queries.items()
            }
            wait(futures.values(), timeout=max(0.0, deadline - time.monotonic()))
            results = {key: self._collect(future) for key, future in futures.items()}
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            session.close()
        for key, result in results.items():
            if result.problem is not None:
                _LOG.warning(
                    "query has no usable answer",
                    extra={
                        "query_key": key,
                        "cluster": cluster.name,
                        "reason": str(result.problem),
                    },
                )
        return results

    def rule_groups(self, cluster: ClusterPolicy) -> RuleGroupsResult:
        """Return the workspace's rule groups and how they fare; failure is an unknown result."""
        with self._new_session() as session:
            try:
                response = session.get(
                    self._url(cluster, "rules"),
                    auth=self._signer(cluster),
                    timeout=(self._connect_timeout_s, min(_RULES_TIMEOUT_S, self._budget_s)),
                    allow_redirects=False,
                )
            except (requests.RequestException, BotoCoreError, ClientError) as error:
                return RuleGroupsResult(problem=self._transport_problem(cluster, error))
        answer = _document_of(response)
        if response.status_code != 200 or answer.get("status") != "success":
            return RuleGroupsResult(
                problem=_problem_of(cluster, response, answer, action="aps:ListRules")
            )
        try:
            return RuleGroupsResult(tuple(_group(group) for group in answer["data"]["groups"]))
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            text = f"AMP's list of rules is not understood: {_cut(repr(error))}"
            return RuleGroupsResult(problem=Reason("amp_unavailable", text))

    def _collect(self, future: Future[QueryResult]) -> QueryResult:
        if future.done():
            error = future.exception()
            if error is None:
                return future.result()
            # One query's mishap must not take the others' answers along.
            _LOG.error("a query failed in an unforeseen way", exc_info=error)
            return _unknown("amp_unavailable", f"the query failed here: {_cut(repr(error))}")
        return _unknown(
            "amp_timeout",
            f"no answer within the {self._budget_s:g} s that all queries of a run share; "
            "narrow the query, or raise the function's time-out and this budget together",
        )

    def _new_session(self) -> requests.Session:
        retry = Retry(
            total=_RETRIES,
            connect=0,
            read=False,
            redirect=0,
            other=0,
            status=_RETRIES,
            status_forcelist=_RETRY_STATUSES,
            allowed_methods={"GET", "POST"},
            backoff_factor=0.2,
            backoff_jitter=0.3,
            retry_after_max=_RETRY_AFTER_MAX_S,
            raise_on_status=False,
        )
        session = requests.Session()
        session.headers["User-Agent"] = self._user_agent
        adapter = HTTPAdapter(max_retries=retry, pool_maxsize=self._max_workers)
        session.mount("https://", adapter)
        session.mount("http://", adapter)
        return session

    def _url(self, cluster: ClusterPolicy, resource: str = "query") -> str:
        base = self._endpoint_url or f"https://aps-workspaces.{cluster.region}.amazonaws.com"
        workspace = quote(cluster.workspace, safe="")
        return f"{base.rstrip('/')}/workspaces/{workspace}/api/v1/{resource}"

    def _signer(self, cluster: ClusterPolicy) -> AWS4Auth:
        # One signer per request: AWS4Auth regenerates its key in place and is not thread-safe.
        return AWS4Auth(
            refreshable_credentials=self._credentials, region=cluster.region, service=SIGNING_NAME
        )

    def _query(
        self,
        session: requests.Session,
        cluster: ClusterPolicy,
        query: str,
        at: datetime,
        deadline: float,
    ) -> QueryResult:
        form = {"query": query, "time": f"{at.timestamp():.3f}", "stats": "all"}
        if self._max_samples is not None:
            form["max_samples_processed_error_threshold"] = str(self._max_samples)
        if self._warn_samples is not None:
            form["max_samples_processed_warning_threshold"] = str(self._warn_samples)
        remaining_s = max(0.05, deadline - time.monotonic())
        try:
            response = session.post(
                self._url(cluster),
                data=form,
                auth=self._signer(cluster),
                timeout=(min(self._connect_timeout_s, remaining_s), remaining_s),
                allow_redirects=False,
            )
        except (requests.RequestException, BotoCoreError, ClientError) as error:
            return QueryResult(problem=self._transport_problem(cluster, error))
        return _result_of(cluster, response, self._warn_samples)

    def _transport_problem(self, cluster: ClusterPolicy, error: Exception) -> Reason:
        host = self._url(cluster).split("/")[2]
        match error:
            case ClientError() | BotoCoreError():
                # Lambda's own credentials need no call; those of an assumed role do.
                code = "amp_forbidden" if _is_refusal(error) else "amp_unavailable"
                return Reason(
                    code,
                    f"no credentials to sign the query with: {_cut(str(error))}; check the role",
                )
            case _ if _is_read_timeout(error):
                return Reason(
                    "amp_timeout", f"{host} took the query and did not answer in time; narrow it"
                )
            case requests.exceptions.SSLError():
                problem = "its certificate was not accepted"
            case requests.ConnectTimeout():
                problem = "the connection timed out"
            case requests.ConnectionError():
                problem = "no connection, or it broke"
            case _:
                problem = "the answer could not be read"
        return Reason(
            "amp_unavailable",
            f"could not reach {host}: {problem} ({type(error).__name__}); check that the "
            "function's security group lets HTTPS out and that its subnets have a NAT or the VPC "
            f"endpoint com.amazonaws.{cluster.region}.aps-workspaces",
        )


def _is_refusal(error: ClientError | BotoCoreError) -> bool:
    if isinstance(error, ClientError):
        return str(error.response.get("Error", {}).get("Code", "")).startswith("AccessDenied")
    return isinstance(error, NoCredentialsError | CredentialRetrievalError)


def _is_read_timeout(error: Exception) -> bool:
    # A body that stops half-way is a ConnectionError around urllib3's own time-out.
    return isinstance(error, requests.ReadTimeout) or any(
        isinstance(cause, ReadTimeoutError) for cause in error.args
    )


def _unknown(code: str, text: str) -> QueryResult:
    return QueryResult(problem=Reason(code, text))


def _document_of(response: requests.Response) -> Mapping[str, Any]:
    try:
        body = json.loads(response.content)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def _result_of(
    cluster: ClusterPolicy, response: requests.Response, warn_samples: int | None
) -> QueryResult:
    answer = _document_of(response)
    is_answer = response.status_code == 200 and answer.get("status") == "success"
    if not is_answer:
        return QueryResult(problem=_problem_of(cluster, response, answer))
    try:
        parsed = _parse(answer["data"])
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        return _unknown("amp_unavailable", f"AMP's answer is not understood: {_cut(repr(error))}")
    if parsed.problem is not None:
        return QueryResult(problem=parsed.problem, samples_processed=parsed.samples_processed)
    warnings = answer.get("warnings") or []
    if _is_cost_only(warnings, parsed.samples_processed, warn_samples):
        _LOG.warning("query is costly", extra={"cluster": cluster.name, "amp": _cut(warnings[0])})
        warnings = []
    partial = (
        Reason("amp_partial", _cut(f"AMP answered in part: {'; '.join(map(str, warnings))}"))
        if warnings
        else None
    )
    return QueryResult(parsed.samples, partial, parsed.samples_processed)


def _is_cost_only(warnings: Any, processed: int, warn_samples: int | None) -> bool:  # noqa: ANN401
    """Tell whether AMP warns of nothing but the cost that we asked it to warn of.

    The wording is not documented: it must speak of samples, stand alone, and be true.
    """
    return (
        warn_samples is not None
        and processed > warn_samples
        and isinstance(warnings, list)
        and len(warnings) == 1
        and isinstance(warnings[0], str)
        and _COST_WARNING.search(warnings[0]) is not None
    )


@dataclass(frozen=True, slots=True)
class _Parsed:
    samples: tuple[Sample, ...]
    samples_processed: int
    problem: Reason | None = None


def _parse(data: Mapping[str, Any]) -> _Parsed:
    processed = int(
        ((data.get("stats") or {}).get("samples") or {}).get("totalQueryableSamples") or 0
    )
    kind, result = data["resultType"], data["result"]
    if kind == "scalar":
        return _Parsed((_sample({}, result),), processed)
    if kind != "vector":
        return _Parsed(
            (),
            processed,
            Reason("amp_query_rejected", f"the query yields a {kind}, not an instant vector"),
        )
    if any("value" not in element for element in result):
        return _Parsed(
            (), processed, Reason("amp_query_rejected", "the query yields native histograms")
        )
    return _Parsed(
        tuple(_sample(element["metric"], element["value"]) for element in result), processed
    )


def _sample(labels: Mapping[str, str], pair: Any) -> Sample:  # noqa: ANN401 - JSON
    seconds, value = pair
    if not all(isinstance(text, str) for text in labels.values()):
        raise ValueError("a label's value is no text")
    # Values are strings, because JSON knows no "NaN", "+Inf" and "-Inf".
    return Sample(dict(labels), float(value), datetime.fromtimestamp(float(seconds), UTC))


def _group(group: Mapping[str, Any]) -> RuleGroup:
    return RuleGroup(
        namespace=str(group.get("file", "")),
        name=str(group["name"]),
        interval_s=float(group.get("interval") or 0.0),
        evaluation_s=float(group.get("evaluationTime") or 0.0),
        rules=tuple(
            RecordedRule(
                name=str(rule["name"]),
                health=str(rule.get("health") or "unknown"),
                last_error=_cut(str(rule.get("lastError") or "")),
                evaluated_at=_time(rule.get("lastEvaluation")),
            )
            for rule in group.get("rules") or ()
        ),
    )


def _time(text: object) -> datetime | None:
    """Read Go's RFC 3339 with nanoseconds; its zero time means never."""
    if not isinstance(text, str) or not text or text.startswith("0001-"):
        return None
    at = datetime.fromisoformat(_FRACTION.sub(r".\1", text))
    return at.astimezone(UTC) if at.tzinfo else at.replace(tzinfo=UTC)


def _problem_of(
    cluster: ClusterPolicy,
    response: requests.Response,
    answer: Mapping[str, Any],
    *,
    action: str = "aps:QueryMetrics",
) -> Reason:
    status = response.status_code
    kind = str(answer.get("errorType") or "")
    said = _cut(
        str(answer.get("error") or answer.get("message") or answer.get("Message") or "")
        or response.text
        or response.reason
        or "no text"
    )
    is_timeout = "timed out" in said.lower() or kind in ("timeout", "canceled")
    match status:
        case 401 | 403:
            type_ = response.headers.get("x-amzn-ErrorType", "")
            remedy = (
                "the signature or its credentials were not accepted: check the workspace's region "
                "and that the role's session is alive"
                if _SIGNATURE.search(f"{type_} {said}")
                else f"allow {action} on it to the function's role, and check that the workspace "
                f"is in {cluster.region}"
            )
            return Reason(
                "amp_forbidden",
                f"AMP refused the query on workspace {cluster.workspace} ({status}: {said}); "
                + remedy,
            )
        case 404:
            return Reason(
                "amp_query_rejected",
                f"there is no workspace {cluster.workspace} in {cluster.region} ({said}); correct "
                "clusters[].workspace and region in the policy",
            )
        case 429:
            return Reason(
                "amp_throttled",
                f"AMP throttled the query ({said}); raise the workspace's query quota or scan less",
            )
        case _ if status in _CANCELLED_STATUSES or (status in (200, 422, 503) and is_timeout):
            return Reason("amp_timeout", f"AMP gave up on the query ({status}: {said}); narrow it")
        case 422 if _LIMIT.search(said):
            return Reason(
                "amp_query_rejected",
                f"the query is beyond a limit ({status}: {said}); raise the workspace's quota, or "
                "the stack's MaxQuerySamples",
            )
        case 400 | 422:
            return Reason("amp_query_rejected", f"AMP refused the query ({status}: {said})")
        case 200 if kind in ("bad_data", "execution"):
            return Reason("amp_query_rejected", f"AMP refused the query ({kind}: {said})")
        case _:
            return Reason("amp_unavailable", f"AMP answered {status}: {said}")


def _cut(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _TEXT_LIMIT else flat[: _TEXT_LIMIT - 1] + "…"
