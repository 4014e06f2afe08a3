"""EKS tokens and endpoints, and the sessions of cluster roles."""

import base64
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import boto3
import botocore.session
import pytest
from botocore.exceptions import (
    ClientError,
    ConnectTimeoutError,
    CredentialRetrievalError,
)
from botocore.stub import Stubber
from moto import mock_aws

from local.identity import Identities
from local.sigv4 import SignatureError, verify_eks_token
from nodemend.adapters.cluster_role import ClusterRole
from nodemend.adapters.eks_auth import TOKEN_PREFIX, EksAccess
from nodemend.domain.errors import AwsForbiddenError, AwsUnavailableError, InvalidInputError
from nodemend.domain.policy import ClusterPolicy
from tests.fakes.system import ManualClock

CLUSTER = ClusterPolicy("gpu-prod", "ws-1", "eu-west-1")
ROLE = "arn:aws:iam::123456789012:role/nodemend/nodemend-cluster-gpu-prod"
DENIED = ClientError({"Error": {"Code": "AccessDenied", "Message": "not allowed"}}, "AssumeRole")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def identities() -> Identities:
    return Identities()


@pytest.fixture
def session(identities: Identities) -> boto3.Session:
    key = identities.issue("drain_node")
    return boto3.Session(key.access_key_id, key.secret_access_key, key.session_token)


def access_of(session: boto3.Session, clock: ManualClock | None = None) -> EksAccess:
    return EksAccess(
        session_for=lambda _: session, clock=clock or ManualClock(), sleep=lambda _: None
    )


# --- tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("region", "partition"),
    [("eu-west-1", "aws"), ("us-gov-west-1", "aws-us-gov"), ("cn-north-1", "aws-cn")],
)
def test_token_is_accepted_in_every_partition(session, identities, region, partition):
    token = access_of(session).token(ClusterPolicy("gpu-prod", "ws-1", region))
    assert verify_eks_token(token, "gpu-prod", identities, partition=partition) == "drain_node"


def test_token_is_for_one_cluster_only(session, identities):
    token = access_of(session).token(CLUSTER)
    with pytest.raises(SignatureError):
        verify_eks_token(token, "gpu-test", identities)


def test_token_names_the_real_sts_host_though_another_endpoint_is_configured(
    session, identities, monkeypatch
):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:4566")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", "http://127.0.0.1:4567")
    token = access_of(session).token(CLUSTER)
    encoded = token.removeprefix(TOKEN_PREFIX)
    url = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode()
    assert url.startswith("https://sts.eu-west-1.amazonaws.com/?Action=GetCallerIdentity&")
    assert verify_eks_token(token, "gpu-prod", identities) == "drain_node"


@pytest.mark.case("R21")
def test_token_is_kept_for_less_than_ten_minutes(session, monkeypatch):
    minted = count_mints(monkeypatch)
    clock = ManualClock()
    access = access_of(session, clock)
    access.token(CLUSTER)
    clock.advance(599)
    access.token(CLUSTER)
    assert len(minted) == 1
    clock.advance(1)
    access.token(CLUSTER)
    assert len(minted) == 2


@pytest.mark.case("R21")
def test_fresh_token_is_minted_at_once_and_then_kept(session, monkeypatch):
    minted = count_mints(monkeypatch)
    access = access_of(session)
    access.token(CLUSTER)
    access.token(CLUSTER, is_fresh=True)
    access.token(CLUSTER)
    assert len(minted) == 2


def test_clusters_do_not_share_tokens(session, monkeypatch):
    minted = count_mints(monkeypatch)
    access = access_of(session)
    first = access.token(CLUSTER)
    assert access.token(ClusterPolicy("other", "ws-1", "eu-west-1")) != first
    assert len(minted) == 2


def count_mints(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    minted: list[str] = []
    original = EksAccess._mint

    def mint(self: EksAccess, cluster: ClusterPolicy) -> str:
        minted.append(cluster.name)
        return original(self, cluster)

    monkeypatch.setattr(EksAccess, "_mint", mint)
    return minted


class FlakySession:
    """A session whose credentials fail as often as the test says."""

    def __init__(self, session: boto3.Session, *errors: Exception) -> None:
        self._session = session
        self._errors = list(errors)
        self.fetches = 0

    def get_credentials(self) -> Any:
        self.fetches += 1
        if self._errors:
            raise self._errors.pop(0)
        return self._session.get_credentials()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


@pytest.mark.case("R23")
def test_credentials_that_fail_once_are_asked_for_once_more_after_a_short_wait(session, identities):
    flaky: Any = FlakySession(session, DENIED)
    waits: list[float] = []
    access = EksAccess(session_for=lambda _: flaky, clock=ManualClock(), sleep=waits.append)
    token = access.token(CLUSTER)
    assert verify_eks_token(token, "gpu-prod", identities) == "drain_node"
    assert flaky.fetches == 2
    assert len(waits) == 1
    assert 0 < waits[0] <= 0.5


@pytest.mark.case("R23")
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (DENIED, AwsForbiddenError),
        (
            ClientError({"Error": {"Code": "Throttling", "Message": "slow"}}, "AssumeRole"),
            AwsUnavailableError,
        ),
        (ConnectTimeoutError(endpoint_url="https://sts"), AwsUnavailableError),
        (CredentialRetrievalError(provider="x", error_msg="y"), AwsUnavailableError),
    ],
)
def test_credentials_that_fail_twice_end_in_an_error_of_ours(session, error, expected):
    flaky: Any = FlakySession(session, error, error, error)
    access = access_of(flaky)
    with pytest.raises(expected, match="sts:"):
        access.token(ClusterPolicy("gpu-prod", "ws-1", "eu-west-1", role_arn=ROLE))
    assert flaky.fetches == 2


def test_function_without_credentials_is_told_so():
    class Nothing(FlakySession):
        def get_credentials(self) -> None:
            return None

    nothing: Any = Nothing(boto3.Session())
    with pytest.raises(AwsForbiddenError, match="no AWS credentials"):
        access_of(nothing).token(CLUSTER)


# --- endpoint -------------------------------------------------------------------------------------


@pytest.fixture
def eks(session: boto3.Session, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stubber]:
    client = session.client("eks", region_name="eu-west-1")
    make: Callable[..., Any] = session.client
    monkeypatch.setattr(
        session,
        "client",
        lambda name, **options: client if name == "eks" else make(name, **options),
    )
    with Stubber(client) as stubber:
        yield stubber


def described(url: str = "https://a.eks.amazonaws.com", ca: str = "CA PEM") -> dict[str, Any]:
    encoded = base64.b64encode(ca.encode()).decode()
    return {"cluster": {"endpoint": url, "certificateAuthority": {"data": encoded}}}


def test_endpoint_is_looked_up_once_for_the_life_of_the_container(session, eks):
    eks.add_response("describe_cluster", described(), {"name": "gpu-prod"})
    access = access_of(session)
    found = access.endpoint(CLUSTER)
    assert (found.url, found.ca_pem) == ("https://a.eks.amazonaws.com", "CA PEM")
    assert access.endpoint(CLUSTER) is found
    eks.assert_no_pending_responses()


def test_endpoint_is_looked_up_again_when_asked_for(session, eks):
    eks.add_response("describe_cluster", described())
    eks.add_response("describe_cluster", described("https://b.eks.amazonaws.com"))
    access = access_of(session)
    access.endpoint(CLUSTER)
    assert access.endpoint(CLUSTER, is_fresh=True).url == "https://b.eks.amazonaws.com"
    assert access.endpoint(CLUSTER).url == "https://b.eks.amazonaws.com"


@pytest.mark.parametrize(
    ("code", "status", "expected", "text"),
    [
        ("ResourceNotFoundException", 404, InvalidInputError, "no EKS cluster 'gpu-prod'"),
        ("AccessDeniedException", 403, AwsForbiddenError, "eks:DescribeCluster"),
        ("ServerException", 500, AwsUnavailableError, "eks:DescribeCluster"),
        ("ThrottlingException", 429, AwsUnavailableError, "eks:DescribeCluster"),
    ],
)
def test_refusals_of_eks_are_told_apart(session, eks, code, status, expected, text):
    eks.add_client_error("describe_cluster", code, "no", status)
    with pytest.raises(expected, match=text):
        access_of(session).endpoint(CLUSTER)


def test_cluster_that_is_being_made_has_no_endpoint_yet(session, eks):
    eks.add_response("describe_cluster", {"cluster": {"status": "CREATING"}})
    eks.add_response("describe_cluster", described())
    access = access_of(session)
    with pytest.raises(AwsUnavailableError, match="CREATING"):
        access.endpoint(CLUSTER)
    assert access.endpoint(CLUSTER).ca_pem == "CA PEM"  # the failure was not kept


def test_unreadable_certificate_authority_is_reported(session, eks):
    broken = described()
    broken["cluster"]["certificateAuthority"]["data"] = "%%%"
    eks.add_response("describe_cluster", broken)
    with pytest.raises(AwsUnavailableError, match="certificate authority"):
        access_of(session).endpoint(CLUSTER)


# --- roles ----------------------------------------------------------------------------------------


def test_cluster_without_a_role_uses_the_functions_own_session(session):
    assert ClusterRole(session=session, role_session_name="f").session_for(CLUSTER) is session


def test_role_is_assumed_at_first_use_under_the_functions_name_and_kept(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAENVIRONMENT00000")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    policy = ClusterPolicy("gpu-prod", "ws-1", "eu-west-1", role_arn=ROLE)
    with mock_aws():
        own = boto3.Session()
        roles = ClusterRole(session=own, role_session_name="nodemend-drain_node-" + "x" * 80)
        assumed = roles.session_for(policy)
        assert assumed is not own
        assert roles.session_for(policy) is assumed
        assert assumed.region_name == "eu-west-1"
        who = assumed.client("sts").get_caller_identity()
    assert who["Arn"].startswith("arn:aws:sts::123456789012:assumed-role/")
    assert who["Arn"].endswith("/" + ("nodemend-drain_node-" + "x" * 80)[:64])
    frozen = assumed.get_credentials()
    assert frozen is not None
    assert str(frozen.get_frozen_credentials().access_key).startswith("ASIA")


def test_credentials_of_a_role_are_fetched_when_needed_and_again_before_they_end(
    session, monkeypatch
):
    calls = []
    lifetimes_s = [300, 3600]

    class Sts:
        def assume_role(self, **kwargs: Any) -> dict[str, Any]:
            calls.append(kwargs)
            ends = datetime.now(UTC) + timedelta(seconds=lifetimes_s[len(calls) - 1])
            return {
                "Credentials": {
                    "AccessKeyId": f"ASIA{len(calls)}",
                    "SecretAccessKey": "s",
                    "SessionToken": "t",
                    "Expiration": ends,
                }
            }

        def close(self) -> None:
            """Nothing to close."""

    monkeypatch.setattr(session, "client", lambda *_, **__: Sts())
    policy = ClusterPolicy("gpu-prod", "ws-1", "eu-west-1", role_arn=ROLE)
    assumed = ClusterRole(session=session, role_session_name="f").session_for(policy)
    credentials = assumed.get_credentials()
    assert credentials is not None
    assert calls == []
    keys = [credentials.get_frozen_credentials().access_key for _ in range(4)]
    # The first ones end within the ten minutes in which botocore insists on new ones.
    assert keys[-2:] == ["ASIA2", "ASIA2"]
    assert calls == [{"RoleArn": ROLE, "RoleSessionName": "f"}] * 2


def test_assumed_session_takes_no_credentials_from_the_environment(session, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAENVIRONMENT00000")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr(session, "client", lambda *_, **__: pytest.fail("no call is due"))
    policy = ClusterPolicy("gpu-prod", "ws-1", "eu-west-1", role_arn=ROLE)
    assumed = ClusterRole(session=session, role_session_name="f").session_for(policy)
    credentials = assumed.get_credentials()
    assert credentials is not None
    assert credentials.method == "assume-role"


def test_ordinary_botocore_sessions_are_left_alone(session):
    policy = ClusterPolicy("gpu-prod", "ws-1", "eu-west-1", role_arn=ROLE)
    ClusterRole(session=session, role_session_name="f").session_for(policy)
    assert botocore.session.get_session().get_credentials() is None
