"""Verification of AWS Signature Version 4, written from the published algorithm.

The product signs with botocore and requests-aws4auth. An emulator that checked with the same code
would agree with its mistakes, so this recomputes the canonical request on its own: names and
values of the query are decoded as a server decodes them (`+` is a space) and encoded again by
RFC 3986, sorted, and hashed with the body that really arrived.

Two entries: `verify_request` for the `Authorization` header of a service call, and
`verify_eks_token` for the presigned STS URL that Amazon EKS takes as a bearer token.

Sources: "Create a signed AWS API request" in the IAM user guide; for the token, the checks of
aws-iam-authenticator's verifier.
"""

import base64
import binascii
import datetime as dt
import hashlib
import hmac
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar
from urllib.parse import quote, unquote_plus, urlsplit

from local.identity import Credential, Identities

ALGORITHM = "AWS4-HMAC-SHA256"
MAX_SKEW_S = 300.0
"""AWS refuses a header signature whose date is further than this from its own clock."""

EKS_TOKEN_PREFIX = "k8s-aws-v1."  # noqa: S105 - the public prefix, not a secret
EKS_TOKEN_MAX_BYTES = 4096
EKS_TOKEN_LIFETIME_S = 900.0
EKS_CLUSTER_HEADER = "x-k8s-aws-id"

_EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()
_EKS_PARAMETERS = frozenset(
    {
        "action",
        "version",
        "x-amz-algorithm",
        "x-amz-credential",
        "x-amz-date",
        "x-amz-expires",
        "x-amz-security-token",
        "x-amz-signature",
        "x-amz-signedheaders",
        "x-amz-user-agent",
    }
)
_STS_SUFFIXES = {
    "aws": ("amazonaws.com", "api.aws"),
    "aws-cn": ("amazonaws.com.cn", "api.amazonwebservices.com.cn"),
    "aws-us-gov": ("amazonaws.com", "api.aws"),
}

Clock = Callable[[], float]
Headers = Mapping[str, str] | Iterable[tuple[str, str]]


class SignatureError(Exception):
    """A request that AWS would refuse with 403 because of how it is signed.

    `code` is the error type that AWS names in `x-amzn-ErrorType`.
    """

    code: ClassVar[str] = "InvalidSignatureException"


class MissingAuthenticationError(SignatureError):
    """There is no `Authorization` header."""

    code = "MissingAuthenticationTokenException"


class MalformedAuthenticationError(SignatureError):
    """The header, its credential scope or its date cannot be read."""

    code = "IncompleteSignatureException"


class UnknownAccessKeyError(SignatureError):
    """Nobody holds the access key, or its session token is another one."""

    code = "UnrecognizedClientException"


class WrongServiceError(SignatureError):
    """The signature is for another service."""


class WrongRegionError(SignatureError):
    """The signature is for another region."""


class ExpiredSignatureError(SignatureError):
    """The date is too far from the verifier's clock, before or after."""


class UnsignedHeaderError(SignatureError):
    """`host` or an `x-amz-` header is sent but not covered by the signature."""


class SignatureMismatchError(SignatureError):
    """What arrived is not what was signed, or the secret key is another one."""


class EksTokenError(SignatureError):
    """A bearer token that the EKS authenticator refuses before or after asking STS: 401."""

    code = "Unauthorized"


@dataclass(frozen=True, slots=True)
class _Scope:
    access_key_id: str
    date: str
    region: str
    service: str

    @classmethod
    def parse(cls, text: str) -> "_Scope":
        parts = text.split("/")
        if len(parts) != 5 or parts[4] != "aws4_request" or not all(parts):
            raise MalformedAuthenticationError(
                f"Credential must have exactly 5 slash-delimited elements, got {text!r}"
            )
        return cls(*parts[:4])

    def __str__(self) -> str:
        return f"{self.date}/{self.region}/{self.service}/aws4_request"


def verify_request(
    *,
    method: str,
    raw_path: str,
    query_string: str,
    headers: Headers,
    body: bytes,
    identities: Identities,
    services: Collection[str],
    region: str,
    clock: Clock = time.time,
) -> str:
    """Check the `Authorization` header of a request and return the caller behind it.

    Args:
        method: As sent.
        raw_path: The path as it came over the wire, still percent-encoded, without the query.
        query_string: What follows the `?`, undecoded.
        headers: All headers; names in any case. Repeated ones as separate pairs.
        body: The bytes that arrived. A form body is not decoded.
        identities: Who holds which key.
        services: Signing names that are accepted, for AMP `{"aps"}`.
        region: The only region that is accepted.
        clock: Unix seconds.

    Raises:
        SignatureError: one of its subclasses says why the request is refused.
    """
    values = _folded(headers)
    authorization = values.get("authorization")
    if authorization is None:
        raise MissingAuthenticationError("Missing Authentication Token")
    scope, signed, signature = _parse_authorization(authorization)
    credential = identities.lookup(scope.access_key_id)
    if credential is None:
        raise UnknownAccessKeyError("The security token included in the request is invalid.")
    _check_scope(scope, services, region)
    stamp = _request_date(values)
    _check_date(stamp, scope, clock())
    _check_session_token(credential, values.get("x-amz-security-token"))
    _check_signed_headers(signed, values)
    payload_hash = hashlib.sha256(body).hexdigest()
    if values.get("x-amz-content-sha256", payload_hash) != payload_hash:
        raise SignatureMismatchError("The x-amz-content-sha256 header is not the body's hash")
    canonical = "\n".join(
        (
            method.upper(),
            canonical_path(raw_path),
            canonical_query(query_string),
            *(f"{name}:{_squeezed(values.get(name, ''))}" for name in signed),
            "",
            ";".join(signed),
            payload_hash,
        )
    )
    _check_signature(credential, scope, stamp, canonical, signature)
    return credential.caller


def canonical_path(raw_path: str) -> str:
    """Encode a path for the canonical request of any service but S3.

    The path is encoded once more than it was on the wire (so `%20` becomes `%2520`), after dot
    segments and doubled slashes are gone.
    """
    parts: list[str] = []
    segments = raw_path.split("/")
    for segment in segments:
        if segment == "..":
            if parts:
                parts.pop()
        elif segment not in ("", "."):
            parts.append(segment)
    trailing = "/" if parts and segments[-1] in ("", ".", "..") else ""
    return quote("/" + "/".join(parts) + trailing, safe="/-_.~")


def canonical_query(query_string: str, *, without: str = "") -> str:
    """Sort and encode a query string.

    `+` is read as a space, as a server reads it, and written `%20`: a client that signs the `+`
    itself is refused, which is what happens to a GET signed by botocore over a URL in which
    `requests` wrote the spaces as `+` (awscurl #197, requests-aws4auth #54).

    Args:
        query_string: Undecoded, without the `?`.
        without: Name of one parameter to leave out (the signature of a presigned URL).
    """
    pairs = []
    for part in query_string.split("&"):
        if not part:
            continue
        name, _, value = part.partition("=")
        decoded = unquote_plus(name)
        if not without or decoded != without:
            pairs.append((quote(decoded, safe="-_.~"), quote(unquote_plus(value), safe="-_.~")))
    return "&".join(f"{name}={value}" for name, value in sorted(pairs))


def verify_eks_token(
    token: str,
    cluster: str,
    identities: Identities,
    *,
    clock: Clock = time.time,
    partition: str = "aws",
) -> str:
    """Check a Kubernetes bearer token as the EKS control plane does and return the caller.

    The token is a presigned `sts:GetCallerIdentity` URL. Its signature covers the header
    `x-k8s-aws-id`, which the verifier fills with the cluster's *name*: a token made for another
    cluster, or with the ARN, does not verify. `X-Amz-Expires` need only parse; the token is
    valid for 15 minutes from `X-Amz-Date` whatever it says.

    Args:
        token: What follows `Authorization: Bearer `.
        cluster: The cluster's name.
        identities: Who holds which key.
        clock: Unix seconds.
        partition: Partition of the cluster; the URL's host must be an STS host of it.

    Raises:
        EksTokenError: The token's form is wrong, or it is too old.
        SignatureError: STS would refuse the signature.
    """
    if len(token.encode()) > EKS_TOKEN_MAX_BYTES:
        raise EksTokenError(f"token is longer than {EKS_TOKEN_MAX_BYTES} bytes")
    url = _decode_eks_token(token)
    parts = urlsplit(url)
    if parts.scheme != "https":
        raise EksTokenError(f"unexpected scheme {parts.scheme!r} in pre-signed URL")
    host_region = _sts_region(parts.netloc, partition)
    if parts.path != "/":
        raise EksTokenError(f"unexpected path {parts.path!r} in pre-signed URL")
    if parts.fragment:
        raise EksTokenError("unexpected fragment in pre-signed URL")
    query = _eks_parameters(parts.query)
    signed = query["x-amz-signedheaders"].split(";")
    if EKS_CLUSTER_HEADER not in signed:
        raise EksTokenError(f"client did not sign the {EKS_CLUSTER_HEADER} header")
    _check_eks_time(query, clock())

    scope = _Scope.parse(query["x-amz-credential"])
    credential = identities.lookup(scope.access_key_id)
    if credential is None:
        raise UnknownAccessKeyError("The security token included in the request is invalid.")
    _check_scope(scope, {"sts"}, host_region)
    _check_session_token(credential, query.get("x-amz-security-token"))
    values = {"host": parts.netloc, EKS_CLUSTER_HEADER: cluster}
    if "host" not in signed or not set(signed) <= set(values):
        raise EksTokenError(f"unexpected signed headers {';'.join(signed)!r}")
    canonical = "\n".join(
        (
            "GET",
            "/",
            canonical_query(parts.query, without="X-Amz-Signature"),
            *(f"{name}:{_squeezed(values[name])}" for name in signed),
            "",
            ";".join(signed),
            _EMPTY_SHA256,
        )
    )
    stamp = query["x-amz-date"]
    if not stamp.startswith(scope.date):
        raise SignatureMismatchError("The credential scope is of another day than X-Amz-Date")
    _check_signature(credential, scope, stamp, canonical, query["x-amz-signature"])
    return credential.caller


def _decode_eks_token(token: str) -> str:
    if not token.startswith(EKS_TOKEN_PREFIX):
        raise EksTokenError(f"token is missing the prefix {EKS_TOKEN_PREFIX!r}")
    encoded = token.removeprefix(EKS_TOKEN_PREFIX)
    if not re.fullmatch(r"[A-Za-z0-9_-]+", encoded):
        raise EksTokenError("token is not unpadded base64url")
    try:
        return base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode("ascii")
    except (binascii.Error, UnicodeDecodeError) as error:
        raise EksTokenError("token does not decode to a URL") from error


def _sts_region(host: str, partition: str) -> str:
    """Return the region that a signature for this STS host must be for."""
    for suffix in _STS_SUFFIXES[partition]:
        found = re.fullmatch(rf"sts(?:-fips)?(?:\.([a-z0-9-]+))?\.{re.escape(suffix)}", host)
        if found:
            region = found[1] or "us-east-1"
            if region.startswith("us-gov-") is (partition == "aws-us-gov"):
                return region
    raise EksTokenError(f"unexpected hostname {host!r} in pre-signed URL")


def _eks_parameters(query_string: str) -> dict[str, str]:
    """Read the URL's parameters by lower-case name; refuse unknown, repeated, missing ones."""
    found: dict[str, str] = {}
    for part in query_string.split("&"):
        name, _, value = part.partition("=")
        key = unquote_plus(name).lower()
        if key not in _EKS_PARAMETERS:
            raise EksTokenError(f"non-whitelisted query parameter {unquote_plus(name)!r}")
        if key in found:
            raise EksTokenError(f"query parameter {key!r} is there twice")
        found[key] = unquote_plus(value)
    missing = _EKS_PARAMETERS - set(found) - {"version", "x-amz-security-token"}
    missing -= {"x-amz-user-agent"}
    if missing:
        raise EksTokenError(f"missing query parameter {min(missing)!r}")
    if found["action"] != "GetCallerIdentity":
        raise EksTokenError("unexpected action parameter in pre-signed URL")
    if found["x-amz-algorithm"] != ALGORITHM:
        raise EksTokenError(f"unexpected algorithm {found['x-amz-algorithm']!r}")
    return found


def _check_eks_time(query: Mapping[str, str], now: float) -> None:
    expires = query["x-amz-expires"]
    if not re.fullmatch(r"\d{1,9}", expires) or int(expires) > EKS_TOKEN_LIFETIME_S:
        raise EksTokenError(f"invalid X-Amz-Expires parameter {expires!r}")
    signed_at = _unix(query["x-amz-date"])
    if signed_at is None:
        raise EksTokenError(f"error parsing X-Amz-Date parameter {query['x-amz-date']!r}")
    if now - signed_at > EKS_TOKEN_LIFETIME_S:
        raise EksTokenError("X-Amz-Date parameter is expired (15 minutes)")
    if signed_at - now > MAX_SKEW_S:
        raise ExpiredSignatureError(f"Signature not yet current: {query['x-amz-date']}")


def _parse_authorization(text: str) -> tuple[_Scope, list[str], str]:
    algorithm, _, rest = text.strip().partition(" ")
    if algorithm != ALGORITHM:
        raise MalformedAuthenticationError(f"Unsupported algorithm {algorithm!r}")
    fields: dict[str, str] = {}
    for part in rest.split(","):
        name, _, value = part.strip().partition("=")
        fields[name] = value
    missing = {"Credential", "SignedHeaders", "Signature"} - set(fields)
    if missing:
        raise MalformedAuthenticationError(
            f"Authorization header requires {', '.join(sorted(missing))!r}"
        )
    signed = fields["SignedHeaders"].split(";")
    if signed != sorted(set(signed)) or any(name != name.lower() for name in signed):
        raise MalformedAuthenticationError("SignedHeaders must be lower-case, sorted and unique")
    return _Scope.parse(fields["Credential"]), signed, fields["Signature"]


def _check_scope(scope: _Scope, services: Collection[str], region: str) -> None:
    if scope.service not in services:
        expected = " or ".join(repr(name) for name in sorted(services))
        raise WrongServiceError(
            f"Credential should be scoped to correct service: {expected}, not {scope.service!r}."
        )
    if scope.region != region:
        raise WrongRegionError(
            f"Credential should be scoped to a valid region: {region!r}, not {scope.region!r}."
        )


def _request_date(values: Mapping[str, str]) -> str:
    stamp = values.get("x-amz-date") or values.get("date")
    if stamp is None:
        raise MalformedAuthenticationError("Authorization header requires 'X-Amz-Date' or 'Date'")
    if _unix(stamp) is None:
        raise MalformedAuthenticationError(f"Date must be in ISO-8601 basic format, got {stamp!r}")
    return stamp


def _check_date(stamp: str, scope: _Scope, now: float) -> None:
    signed_at = _unix(stamp)
    if signed_at is None:  # pragma: no cover - _request_date has refused it
        raise MalformedAuthenticationError(f"Date must be in ISO-8601 basic format, got {stamp!r}")
    if now - signed_at > MAX_SKEW_S:
        raise ExpiredSignatureError(f"Signature expired: {stamp} is more than 5 min. ago")
    if signed_at - now > MAX_SKEW_S:
        raise ExpiredSignatureError(f"Signature not yet current: {stamp}")
    if not stamp.startswith(scope.date):
        raise SignatureMismatchError("The credential scope is of another day than the date header")


def _check_session_token(credential: Credential, token: str | None) -> None:
    if not hmac.compare_digest((credential.session_token or "").encode(), (token or "").encode()):
        raise UnknownAccessKeyError("The security token included in the request is invalid.")


def _check_signed_headers(signed: list[str], values: Mapping[str, str]) -> None:
    required = {name for name in values if name.startswith("x-amz-")} | {"host"}
    unsigned = sorted(required - set(signed))
    if unsigned:
        raise UnsignedHeaderError(f"{', '.join(unsigned)!r} must be a signed header")
    absent = sorted(set(signed) - set(values))
    if absent:
        raise SignatureMismatchError(f"Signed header {absent[0]!r} did not arrive")


def _check_signature(
    credential: Credential, scope: _Scope, stamp: str, canonical: str, signature: str
) -> None:
    to_sign = "\n".join(
        (ALGORITHM, stamp, str(scope), hashlib.sha256(canonical.encode()).hexdigest())
    )
    key = f"AWS4{credential.secret_access_key}".encode()
    for part in (scope.date, scope.region, scope.service, "aws4_request"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    expected = hmac.new(key, to_sign.encode(), hashlib.sha256).hexdigest()
    if not hmac.compare_digest(expected.encode(), signature.encode()):
        raise SignatureMismatchError(
            "The request signature we calculated does not match the signature you provided."
            " Check your AWS Secret Access Key and signing method."
        )


def _folded(headers: Headers) -> dict[str, str]:
    """Join repeated headers by a comma, under their lower-case names."""
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    folded: dict[str, str] = {}
    for name, value in pairs:
        key = name.lower()
        folded[key] = f"{folded[key]},{_squeezed(value)}" if key in folded else value
    return folded


def _squeezed(value: str) -> str:
    return " ".join(value.split())


def _unix(stamp: str) -> float | None:
    if not re.fullmatch(r"\d{8}T\d{6}Z", stamp):
        return None
    try:
        return dt.datetime.strptime(stamp, "%Y%m%dT%H%M%S%z").timestamp()
    except ValueError:
        return None
