"""AMP's data plane as the product meets it: signatures, answers, limits, faults."""

import http.client
from urllib.parse import urlsplit

import pytest
import requests

from local.amp.front import AmpFront
from local.amp.serving import serve
from local.calls import ApiFault, CallLog
from local.identity import Credential, Identities

# Case D33: spaces, quotes, plus, braces, ampersand and percent in one query, echoed as a label.
TRICKY = 'sum by (Hostname) (a{b=~"x.+",c="A&B 50%"}) + 1'
ECHO = f"label_replace(vector(1), 'echo', '{TRICKY}', '', '')"


@pytest.fixture
def faulty(site):
    """Put a fault in force for one test."""
    added = []

    def add(verb="query", status=422, **fields):
        added.append(ApiFault(verb, status, service="amp", **fields))
        site.faults.add(added[-1])

    yield add
    for fault in added:
        site.faults.remove(fault)


def last_call(site):
    return site.calls.calls()[-1]


def refused(answer, status, code):
    assert answer.status_code == status
    assert answer.headers["x-amzn-ErrorType"] == code
    assert answer.json()["message"]
    return True


# --- signatures


@pytest.mark.case("D33")
def test_a_signed_form_body_arrives_as_the_query_that_was_asked(site, ask, signer):
    answer = ask(auth=signer("scan_ecc"), query=ECHO)
    assert answer.status_code == 200
    (row,) = answer.json()["data"]["result"]
    assert row["metric"]["echo"] == TRICKY
    call = last_call(site)
    assert (call.service, call.verb, call.target, call.caller, call.status) == (
        "amp",
        "query",
        "ws-1",
        "scan_ecc",
        200,
    )
    assert not call.is_mutation


@pytest.mark.case("D33")
def test_the_same_form_signed_by_botocore_arrives_too(site, botocore_auth):
    prepared = requests.Request("POST", f"{site.url}/query", data={"query": ECHO}).prepare()
    with requests.Session() as session:
        answer = session.send(botocore_auth(prepared), timeout=30)
    assert answer.json()["data"]["result"][0]["metric"]["echo"] == TRICKY


@pytest.mark.case("D33")
def test_a_get_with_plus_for_spaces_passes_only_if_the_signer_meant_spaces(
    site, signer, botocore_auth
):
    url, parameters = f"{site.url}/query", {"query": ECHO}
    answer = requests.get(url, params=parameters, auth=signer(), timeout=30)
    assert answer.json()["data"]["result"][0]["metric"]["echo"] == TRICKY
    prepared = requests.Request("GET", url, params=parameters).prepare()
    assert "+" in prepared.url
    with requests.Session() as session:
        answer = session.send(botocore_auth(prepared), timeout=30)
    assert refused(answer, 403, "InvalidSignatureException")


@pytest.mark.case("D33")
def test_raw_braces_in_the_url_are_an_invalid_query_string(site):
    parts = urlsplit(site.url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=10)
    try:
        connection.request("GET", parts.path + '/query?query=up{job="x"}')
        answer = connection.getresponse()
        assert answer.status == 400
        assert answer.headers["x-amzn-ErrorType"] == "InvalidQueryStringException"
    finally:
        connection.close()


def test_requests_without_a_good_signature_are_refused_and_recorded(site, ask, signer):
    unsigned = requests.post(f"{site.url}/query", data={"query": "up"}, timeout=30)
    assert refused(unsigned, 403, "MissingAuthenticationTokenException")
    stranger = Identities().issue("stranger")
    assert refused(ask(auth=signer(credential=stranger)), 403, "UnrecognizedClientException")
    key = site.identities.issue("verify_fault")
    forged = Credential(key.access_key_id, "guess", key.session_token, "verify_fault")
    assert refused(ask(auth=signer(credential=forged)), 403, "InvalidSignatureException")
    for change in ({"service": "execute-api"}, {"service": "amp"}, {"region": "eu-west-1"}):
        answer = ask(auth=signer(**change))
        assert refused(answer, 403, "InvalidSignatureException")
        assert "Credential should be scoped" in answer.json()["message"]
    assert last_call(site).status == 403
    assert last_call(site).caller == "unknown"


# --- answers


@pytest.mark.case("D34")
def test_d34_each_resource_of_the_data_plane_answers_as_prometheus_does(site, ask, signer):
    def get(resource, **parameters):
        answer = requests.get(
            f"{site.url}/{resource}", params=parameters, auth=signer(), timeout=30
        )
        assert answer.status_code == 200, answer.text
        assert answer.headers["Content-Type"].startswith("application/json")
        return answer.json()["data"]

    vector = ask(query="count(DCGM_FI_DEV_GPU_TEMP)").json()
    assert vector["status"] == "success"
    assert vector["data"]["resultType"] == "vector"
    end = site.scraped_at
    matrix = ask("query_range", query="count(up)", start=end - 60, end=end, step="30").json()
    assert [value for _, value in matrix["data"]["result"][0]["values"]] == ["6", "6", "6"]
    series = ask("series", **{"match[]": 'up{instance="10.0.1.1:9400"}'}).json()["data"]
    assert [row["instance"] for row in series] == ["10.0.1.1:9400"]
    assert "Hostname" in ask("labels").json()["data"]
    assert "ip-10-0-1-1.ec2.internal" in get("label/Hostname/values")
    assert last_call(site).verb == "values"
    assert get("rules") == {"groups": []}
    assert get("alerts") == {"alerts": []}
    assert get("metadata", metric="DCGM_FI_DEV_GPU_TEMP")["DCGM_FI_DEV_GPU_TEMP"]


def test_a_query_that_does_not_parse_is_bad_data(ask):
    answer = ask(query="sum(")
    assert answer.status_code == 400
    assert answer.json()["errorType"] == "bad_data"


@pytest.mark.case("D32")
def test_where_prometheus_says_503_for_a_timeout_amp_says_422(ask):
    costly = 'count(max_over_time({__name__=~"DCGM.+"}[25m:1s]))'
    answer = ask(query=costly, timeout="1ms")
    assert answer.status_code == 422
    assert answer.json() == {
        "status": "error",
        "errorType": "execution",
        "error": "query timed out - consider simplifying your query",
    }


def test_other_workspaces_and_operations_do_not_exist(site, signer):
    elsewhere = site.url.replace("ws-1", "ws-2")
    answer = requests.post(f"{elsewhere}/query", data={"query": "up"}, auth=signer(), timeout=30)
    assert refused(answer, 404, "ResourceNotFoundException")
    for resource in ("status/tsdb", "admin/tsdb/delete_series", "targets"):
        answer = requests.get(f"{site.url}/{resource}", auth=signer(), timeout=30)
        assert refused(answer, 404, "UnknownOperationException")


def test_only_data_plane_paths_are_handled():
    assert AmpFront.handles("/workspaces/ws-1/api/v1/query")
    assert not AmpFront.handles("/workspaces/ws-1")
    assert not AmpFront.handles("/workspaces/ws-1/rulegroupsnamespaces")


def test_a_prometheus_that_is_gone_is_a_503(signer):
    identities, calls = Identities(), CallLog()
    front = AmpFront({"ws-1": "http://127.0.0.1:1"}, identities=identities, calls=calls)
    with serve(front) as server:
        auth = signer(credential=identities.issue("a"))
        url = f"{server.url}/workspaces/ws-1/api/v1/query"
        answer = requests.post(url, data={"query": "up"}, auth=auth, timeout=30)
    front.close()
    assert refused(answer, 503, "ServiceUnavailableException")
    assert [call.status for call in calls.calls()] == [503]


# --- limits

COSTLY = "count(count_over_time(DCGM_FI_DEV_GPU_TEMP[10m]))"


def test_a_query_over_its_error_threshold_is_refused(ask):
    answer = ask(query=COSTLY, max_samples_processed_error_threshold=10)
    assert answer.status_code == 422
    assert answer.json()["errorType"] == "execution"
    assert "limit of 10" in answer.json()["error"]
    assert ask(query=COSTLY, max_samples_processed_error_threshold=10**9).status_code == 200


def test_a_query_over_its_warning_threshold_is_answered_with_a_warning(ask):
    warned = ask(query=COSTLY, max_samples_processed_warning_threshold=10).json()
    assert warned["data"]["result"]
    assert "warning threshold of 10" in warned["warnings"][0]
    quiet = ask(query=COSTLY, max_samples_processed_warning_threshold=10**9).json()
    assert "warnings" not in quiet
    assert "stats" not in quiet["data"]


def test_statistics_are_there_if_asked_for(ask):
    for more in ({}, {"max_samples_processed_warning_threshold": 10**9}):
        data = ask(query=COSTLY, stats="all", **more).json()["data"]
        assert data["stats"]["samples"]["totalQueryableSamples"] > 500


def test_a_threshold_that_is_no_number_is_refused(ask):
    answer = ask(query="up", max_samples_processed_error_threshold="many")
    assert refused(answer, 400, "ValidationException")


# --- faults


@pytest.mark.case("D32")
def test_an_injected_422_is_amps_timeout(site, ask, faulty):
    faulty(status=422, times=1)
    answer = ask(query="up")
    assert answer.status_code == 422
    assert answer.json()["error"] == "query timed out - consider simplifying your query"
    assert last_call(site).status == 422
    assert ask(query="up").status_code == 200


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (403, "AccessDeniedException", "not authorized to perform: aps:QueryMetrics"),
        (429, "ThrottlingException", "Rate exceeded"),
        (500, "InternalServerException", "Internal server error"),
        (503, "ServiceUnavailableException", "Service Unavailable"),
    ],
)
def test_other_injected_errors_have_amps_bodies(ask, faulty, status, code, message):
    faulty(status=status, headers={"Retry-After": "1"})
    answer = ask(query="up")
    assert refused(answer, status, code)
    assert message in answer.json()["message"]
    assert answer.headers["Retry-After"] == "1"


def test_a_fault_hits_only_its_caller_and_its_operation(ask, signer, faulty):
    faulty(status=429, caller="verify_fault")
    assert ask(auth=signer("verify_fault"), query="up").status_code == 429
    assert ask(auth=signer("scan_ecc"), query="up").status_code == 200
    assert ask("labels", auth=signer("verify_fault")).status_code == 200


@pytest.mark.case("D32")
def test_an_injected_200_marks_the_real_answer_as_partial_or_replaces_it(ask, faulty):
    faulty(status=200, times=1)
    partial = ask(query="count(up)").json()
    assert partial["data"]["result"][0]["value"][1] == "6"
    assert "partial" in partial["warnings"][0]
    faulty(status=200, times=1, body='{"status":"success","data":null}')
    assert ask(query="count(up)").json() == {"status": "success", "data": None}


# --- what moto does not have


@pytest.mark.case("D34")
@pytest.mark.parametrize(
    ("resource", "form"),
    [
        ("query", {"query": "up"}),
        ("query_range", {"query": "up", "start": "0", "end": "60", "step": "30"}),
        ("series", {"match[]": "up"}),
        ("labels", {}),
        ("label/job/values", {}),
        ("rules", {}),
        ("alerts", {}),
        ("metadata", {}),
    ],
)
def test_d34_every_resource_of_the_data_plane_is_answered_by_a_real_prometheus(
    site, signer, resource, form
):
    answer = requests.get(f"{site.url}/{resource}", params=form, auth=signer(), timeout=30)

    assert answer.status_code == 200, answer.text
    assert answer.json()["status"] == "success"


@pytest.mark.parametrize(
    ("resource", "action"),
    [("query", "aps:QueryMetrics"), ("rules", "aps:ListRules"), ("labels", "aps:GetLabels")],
)
def test_a_denied_request_names_the_action_that_it_needs(site, faulty, signer, resource, action):
    faulty(resource, 403)
    answer = requests.get(f"{site.url}/{resource}", auth=signer(), timeout=30)

    assert refused(answer, 403, "AccessDeniedException")
    assert action in answer.json()["message"]
