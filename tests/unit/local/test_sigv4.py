import base64
import datetime as dt
import re
from urllib.parse import urlencode, urlsplit

import botocore.auth
import botocore.session
import pytest
import requests
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.model import ServiceId
from botocore.signers import RequestSigner
from requests_aws4auth import AWS4Auth

from local import sigv4
from local.identity import Credential, Identities

REGION = "us-east-1"
HOST = "127.0.0.1:8123"
PATH = "/workspaces/ws-1/api/v1/query"
# Case D33: everything that breaks signatures in one query.
QUERY = 'sum by (Hostname) (a{b=~"x.+",c="A&B 50%"}) + 1'


@pytest.fixture
def identities():
    return Identities()


@pytest.fixture(params=["temporary", "permanent"])
def credential(request, identities):
    return identities.issue("verify_fault", temporary=request.param == "temporary")


def prepared(method, query_string="", form=None, path=PATH):
    url = f"http://{HOST}{path}" + (f"?{query_string}" if query_string else "")
    return requests.Request(method, url, data=form).prepare()


def sign_botocore(request, credential: Credential, service="aps", region=REGION):
    aws = AWSRequest(request.method, request.url, dict(request.headers), request.body or b"")
    keys = Credentials(
        credential.access_key_id, credential.secret_access_key, credential.session_token
    )
    botocore.auth.SigV4Auth(keys, service, region).add_auth(aws)
    request.headers.update(dict(aws.headers.items()))
    return request


def sign_aws4auth(request, credential: Credential, service="aps", region=REGION):
    auth = AWS4Auth(
        credential.access_key_id,
        credential.secret_access_key,
        region,
        service,
        session_token=credential.session_token,
    )
    return auth(request)


SIGNERS = pytest.mark.parametrize("sign", [sign_botocore, sign_aws4auth])


def verify(request, identities, **changes):
    parts = urlsplit(request.url)
    body = request.body or b""
    arguments = {
        "method": request.method,
        "raw_path": parts.path,
        "query_string": parts.query,
        "headers": {**request.headers, "Host": HOST},
        "body": body.encode() if isinstance(body, str) else body,
        "identities": identities,
        "services": {"aps"},
        "region": REGION,
    } | changes
    return sigv4.verify_request(**arguments)


@SIGNERS
@pytest.mark.case("D33")
def test_a_signed_form_body_with_spaces_quotes_plus_and_braces_is_accepted(
    sign, identities, credential
):
    request = sign(prepared("POST", form={"query": QUERY, "time": "1.5"}), credential)
    assert verify(request, identities) == "verify_fault"


@SIGNERS
@pytest.mark.parametrize(
    "query_string",
    [
        "",
        urlencode({"z": "1", "a": "2", "match[]": "up"}),
        "match%5B%5D=b&match%5B%5D=a&match%5B%5D=",
        "query=up%7Ba%3D%22b%20c%22%7D%20%2B%201&time=1",
        "b=1&B=2&a=%C3%A9~-_.",
        "flag",
    ],
)
def test_a_signed_get_is_accepted_whatever_the_order_of_its_query(
    sign, identities, credential, query_string
):
    request = sign(prepared("GET", query_string), credential)
    assert verify(request, identities) == "verify_fault"


@SIGNERS
@pytest.mark.parametrize("path", ["/", "/a%20b/c", "/label/__name__/values", "/a/"])
def test_paths_are_encoded_twice_in_the_canonical_request(sign, identities, credential, path):
    request = sign(prepared("GET", path=path), credential)
    assert verify(request, identities) == "verify_fault"


@pytest.mark.case("D33")
def test_a_plus_in_a_get_query_counts_as_the_space_that_a_server_decodes(identities, credential):
    query_string = urlencode({"query": QUERY})
    assert "+" in query_string
    accepted = sign_aws4auth(prepared("GET", query_string), credential)
    assert verify(accepted, identities) == "verify_fault"
    refused = sign_botocore(prepared("GET", query_string), credential)
    with pytest.raises(sigv4.SignatureMismatchError):
        verify(refused, identities)


@SIGNERS
def test_every_flipped_byte_of_the_body_is_refused(sign, identities, credential):
    request = sign(prepared("POST", form={"query": "up"}), credential)
    body = request.body if isinstance(request.body, bytes) else request.body.encode()
    for index in range(len(body)):
        flipped = bytearray(body)
        flipped[index] ^= 1
        with pytest.raises(sigv4.SignatureMismatchError):
            verify(request, identities, body=bytes(flipped))


@SIGNERS
@pytest.mark.parametrize(
    "change",
    [
        {"method": "GET"},
        {"raw_path": PATH + "_range"},
        {"raw_path": PATH.replace("ws-1", "ws-2")},
        {"query_string": "time=1"},
    ],
)
def test_a_request_that_differs_from_what_was_signed_is_refused(
    sign, identities, credential, change
):
    request = sign(prepared("POST", form={"query": "up"}), credential)
    with pytest.raises(sigv4.SignatureMismatchError):
        verify(request, identities, **change)


@SIGNERS
def test_every_changed_signed_header_is_refused(sign, identities, credential):
    request = sign(prepared("POST", form={"query": "up"}), credential)
    good = {name.lower(): value for name, value in request.headers.items()} | {"host": HOST}
    signed = re.search(r"SignedHeaders=([^,]+)", good["authorization"])[1].split(";")
    assert {"host", "x-amz-date", "content-type"} <= set(signed)
    for name in signed:
        changed = good | {name: good[name] + "0"}
        with pytest.raises(sigv4.SignatureError):
            verify(request, identities, headers=changed)
        absent = {key: value for key, value in good.items() if key != name}
        with pytest.raises(sigv4.SignatureError):
            verify(request, identities, headers=absent)


def test_a_changed_signature_digit_is_refused(identities, credential):
    request = sign_aws4auth(prepared("POST", form={"query": "up"}), credential)
    value = request.headers["Authorization"]
    if isinstance(value, bytes):
        value = value.decode()
    request.headers["Authorization"] = value[:-1] + ("0" if value[-1] != "0" else "1")
    with pytest.raises(sigv4.SignatureMismatchError):
        verify(request, identities)


def test_an_extra_amz_header_that_is_not_signed_is_refused(identities, credential):
    request = sign_botocore(prepared("POST", form={"query": "up"}), credential)
    request.headers["X-Amz-Target"] = "Something.Else"
    with pytest.raises(sigv4.UnsignedHeaderError, match="x-amz-target"):
        verify(request, identities)


def test_a_request_without_authorization_is_named_as_such(identities):
    with pytest.raises(sigv4.MissingAuthenticationError) as caught:
        verify(prepared("POST", form={"query": "up"}), identities)
    assert caught.value.code == "MissingAuthenticationTokenException"


@pytest.mark.parametrize(
    "value",
    [
        "Bearer abc",
        "AWS4-HMAC-SHA256 Credential=AKIA/20260101/us-east-1/aps, SignedHeaders=host, Signature=a",
        "AWS4-HMAC-SHA256 SignedHeaders=host, Signature=a",
        "AWS4-HMAC-SHA256 Credential=A/20260101/r/aps/aws4_request, SignedHeaders=b;a, Signature=a",
    ],
)
def test_an_authorization_header_that_cannot_be_read_is_malformed(identities, value):
    request = prepared("POST", form={"query": "up"})
    request.headers["Authorization"] = value
    with pytest.raises(sigv4.MalformedAuthenticationError):
        verify(request, identities)


@SIGNERS
def test_unknown_key_wrong_service_and_wrong_region_are_told_apart(sign, identities, credential):
    stranger = Identities().issue("stranger")
    form = {"query": "up"}
    with pytest.raises(sigv4.UnknownAccessKeyError):
        verify(sign(prepared("POST", form=form), stranger), identities)
    with pytest.raises(sigv4.WrongServiceError, match="'aps', not 'execute-api'"):
        verify(sign(prepared("POST", form=form), credential, service="execute-api"), identities)
    with pytest.raises(sigv4.WrongRegionError):
        verify(sign(prepared("POST", form=form), credential, region="eu-west-1"), identities)


def test_a_wrong_secret_or_session_token_is_refused(identities):
    credential = identities.issue("verify_fault")
    form = {"query": "up"}
    wrong_secret = Credential(
        credential.access_key_id, "other", credential.session_token, credential.caller
    )
    with pytest.raises(sigv4.SignatureMismatchError):
        verify(sign_aws4auth(prepared("POST", form=form), wrong_secret), identities)
    for token in (None, "stale"):
        wrong_token = Credential(
            credential.access_key_id, credential.secret_access_key, token, credential.caller
        )
        with pytest.raises(sigv4.UnknownAccessKeyError):
            verify(sign_aws4auth(prepared("POST", form=form), wrong_token), identities)


def test_a_date_more_than_five_minutes_off_is_refused_in_both_directions(identities, credential):
    request = sign_aws4auth(prepared("POST", form={"query": "up"}), credential)
    signed_at = dt.datetime.strptime(request.headers["x-amz-date"], "%Y%m%dT%H%M%S%z").timestamp()
    assert verify(request, identities, clock=lambda: signed_at + 299) == "verify_fault"
    assert verify(request, identities, clock=lambda: signed_at - 299) == "verify_fault"
    with pytest.raises(sigv4.ExpiredSignatureError, match="expired"):
        verify(request, identities, clock=lambda: signed_at + 301)
    with pytest.raises(sigv4.ExpiredSignatureError, match="not yet current"):
        verify(request, identities, clock=lambda: signed_at - 301)


# --- EKS bearer tokens


def eks_token(
    credential: Credential,
    cluster="prod",
    region=REGION,
    expires_in=60,
    headers=None,
    url=None,
    padding=False,
):
    """Make a token the way that facts of EKS authentication say botocore users do."""
    session = botocore.session.get_session()
    session.set_credentials(
        credential.access_key_id, credential.secret_access_key, credential.session_token
    )
    client = session.create_client("sts", region_name=region)
    signer = RequestSigner(
        ServiceId("STS"),
        region,
        "sts",
        "v4",
        session.get_credentials(),
        session.get_component("event_emitter"),
    )
    endpoint = url or client.meta.endpoint_url
    signed = signer.generate_presigned_url(
        {
            "method": "GET",
            "url": f"{endpoint}/?Action=GetCallerIdentity&Version=2011-06-15",
            "body": {},
            "headers": {"x-k8s-aws-id": cluster} if headers is None else headers,
            "context": {},
        },
        region_name=region,
        expires_in=expires_in,
        operation_name="",
    )
    return wrap(signed, padding=padding)


def wrap(url, padding=False):
    encoded = base64.urlsafe_b64encode(url.encode()).decode()
    return "k8s-aws-v1." + (encoded if padding else encoded.rstrip("="))


def unwrap(token):
    encoded = token.removeprefix("k8s-aws-v1.")
    return base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode()


def test_a_token_made_by_botocores_request_signer_names_its_caller(identities, credential):
    token = eks_token(credential)
    assert unwrap(token).startswith("https://sts.us-east-1.amazonaws.com/?")
    assert sigv4.verify_eks_token(token, "prod", identities) == "verify_fault"


@pytest.mark.parametrize(
    ("region", "partition"),
    [("eu-central-1", "aws"), ("us-gov-west-1", "aws-us-gov"), ("cn-north-1", "aws-cn")],
)
def test_tokens_of_other_regions_and_partitions_are_accepted_where_they_belong(
    identities, credential, region, partition
):
    token = eks_token(credential, region=region)
    got = sigv4.verify_eks_token(token, "prod", identities, partition=partition)
    assert got == "verify_fault"
    other = "aws-cn" if partition == "aws" else "aws"
    with pytest.raises(sigv4.EksTokenError, match="hostname"):
        sigv4.verify_eks_token(token, "prod", identities, partition=other)


@pytest.mark.parametrize("cluster", ["staging", "arn:aws:eks:us-east-1:1:cluster/prod", "Prod"])
def test_a_token_for_another_cluster_or_for_the_arn_is_refused(identities, credential, cluster):
    with pytest.raises(sigv4.SignatureMismatchError):
        sigv4.verify_eks_token(eks_token(credential, cluster=cluster), "prod", identities)


def test_a_token_that_does_not_sign_the_cluster_header_is_refused(identities, credential):
    with pytest.raises(sigv4.EksTokenError, match="x-k8s-aws-id"):
        sigv4.verify_eks_token(eks_token(credential, headers={}), "prod", identities)


def test_a_token_is_good_for_fifteen_minutes_whatever_its_expiry_says(identities, credential):
    token = eks_token(credential, expires_in=60)
    stamp = re.search(r"X-Amz-Date=(\w+)", unwrap(token))[1]
    at = dt.datetime.strptime(stamp, "%Y%m%dT%H%M%S%z").timestamp()
    good = sigv4.verify_eks_token(token, "prod", identities, clock=lambda: at + 899)
    assert good == "verify_fault"
    with pytest.raises(sigv4.EksTokenError, match="expired"):
        sigv4.verify_eks_token(token, "prod", identities, clock=lambda: at + 901)
    with pytest.raises(sigv4.ExpiredSignatureError, match="not yet current"):
        sigv4.verify_eks_token(token, "prod", identities, clock=lambda: at - 301)


def test_an_expiry_beyond_fifteen_minutes_is_refused(identities, credential):
    assert sigv4.verify_eks_token(eks_token(credential, expires_in=900), "prod", identities)
    with pytest.raises(sigv4.EksTokenError, match="X-Amz-Expires"):
        sigv4.verify_eks_token(eks_token(credential, expires_in=901), "prod", identities)


def test_a_stranger_or_a_wrong_secret_is_refused(identities, credential):
    with pytest.raises(sigv4.UnknownAccessKeyError):
        sigv4.verify_eks_token(eks_token(Identities().issue("x")), "prod", identities)
    forged = Credential(credential.access_key_id, "guess", credential.session_token, "x")
    with pytest.raises(sigv4.SignatureMismatchError):
        sigv4.verify_eks_token(eks_token(forged), "prod", identities)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda url: url.replace("https://", "http://"), "scheme"),
        (lambda url: url.replace("sts.us-east-1.amazonaws.com", "evil.example.com"), "hostname"),
        (lambda url: url.replace("amazonaws.com", "amazonaws.com.evil.example"), "hostname"),
        (lambda url: url.replace("amazonaws.com", "amazonaws.com:8443"), "hostname"),
        (lambda url: url.replace("https://", "https://user@"), "hostname"),
        (lambda url: url.replace("/?", "/other?"), "path"),
        (lambda url: url + "&Policy=x", "non-whitelisted"),
        (lambda url: url + "&Version=2011-06-15", "twice"),
        (lambda url: url + "&version=2011-06-15", "twice"),
        (lambda url: url.replace("GetCallerIdentity", "AssumeRole"), "action"),
        (lambda url: url.replace("Action=GetCallerIdentity&", ""), "missing"),
        (lambda url: url.replace("X-Amz-Expires=60", "X-Amz-Expires=x"), "X-Amz-Expires"),
        (lambda url: re.sub("X-Amz-Date=[^&]+", "X-Amz-Date=2026", url), "X-Amz-Date"),
        (lambda url: url + "#x", "fragment"),
    ],
)
def test_a_token_with_a_tampered_url_is_refused_and_says_why(identities, credential, change, why):
    token = wrap(change(unwrap(eks_token(credential))))
    with pytest.raises(sigv4.EksTokenError, match=why):
        sigv4.verify_eks_token(token, "prod", identities)


def test_a_flipped_signature_digit_of_a_token_is_refused(identities, credential):
    url = unwrap(eks_token(credential))
    head, _, signature = url.rpartition("X-Amz-Signature=")
    flipped = ("0" if signature[0] != "0" else "1") + signature[1:]
    with pytest.raises(sigv4.SignatureMismatchError):
        sigv4.verify_eks_token(wrap(f"{head}X-Amz-Signature={flipped}"), "prod", identities)


def test_prefix_padding_length_and_encoding_of_a_token_are_checked(identities):
    credential = identities.issue("verify_fault", temporary=False)
    token = eks_token(credential)
    with pytest.raises(sigv4.EksTokenError, match="prefix"):
        sigv4.verify_eks_token(token.removeprefix("k8s-aws-v1."), "prod", identities)
    with pytest.raises(sigv4.EksTokenError, match="base64url"):
        sigv4.verify_eks_token(token + "=", "prod", identities)
    with pytest.raises(sigv4.EksTokenError, match="decode"):
        sigv4.verify_eks_token("k8s-aws-v1.a", "prod", identities)
    long = Credential("ASIALONG", "secret", "t" * 3000, "verify_fault")
    identities.register(long)
    with pytest.raises(sigv4.EksTokenError, match="4096"):
        sigv4.verify_eks_token(eks_token(long), "prod", identities)


def test_a_long_but_lawful_session_token_passes(identities):
    lambda_like = Credential("ASIALAMBDA", "secret", ("t" * 37 + "/+=") * 30, "drain_node")
    identities.register(lambda_like)
    assert sigv4.verify_eks_token(eks_token(lambda_like), "prod", identities) == "drain_node"
