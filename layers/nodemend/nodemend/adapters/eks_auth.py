"""Where a cluster's API is, and bearer tokens for it.

A token is a presigned `sts:GetCallerIdentity` URL. Making it is arithmetic: no call leaves the
function, and the EKS control plane shows the URL to STS (aws-iam-authenticator pkg/token/token.go).
"""

import base64
import binascii
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.model import ServiceId
from botocore.signers import RequestSigner

from nodemend.adapters._aws import client_config, error_code, translating
from nodemend.application.ports import Clock, ClusterEndpoint
from nodemend.domain.errors import AwsForbiddenError, AwsUnavailableError, InvalidInputError
from nodemend.domain.policy import ClusterPolicy

TOKEN_PREFIX = "k8s-aws-v1."  # noqa: S105 - the public prefix of all such tokens
CLUSTER_HEADER = "x-k8s-aws-id"

TOKEN_MAX_AGE = timedelta(minutes=10)
"""The control plane takes a token for 15 minutes from its date."""

_PRESIGN_EXPIRES_S = 60
"""Must be there and at most 900; its value counts for nothing."""

_RETRY_JITTER_S = (0.1, 0.5)


@dataclass(frozen=True, slots=True)
class _Token:
    text: str
    minted_at: datetime


class EksAccess:
    """Endpoints and tokens, cached for the life of the container.

    Args:
        session_for: The session of a cluster's role.
        clock: Decides when a token is too old.
        sleep: Waits before the one retry of a token; tests hand in their own.
    """

    def __init__(
        self,
        *,
        session_for: Callable[[ClusterPolicy], boto3.Session],
        clock: Clock,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._session_for = session_for
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.RLock()
        self._endpoints: dict[ClusterPolicy, ClusterEndpoint] = {}
        self._tokens: dict[ClusterPolicy, _Token] = {}

    # --- endpoint ---------------------------------------------------------------------------------

    def endpoint(self, cluster: ClusterPolicy, *, is_fresh: bool = False) -> ClusterEndpoint:
        """Return the endpoint; `is_fresh` asks EKS again (the cluster may be another by now).

        Raises:
            AwsForbiddenError, AwsUnavailableError: as EKS or STS answered.
            InvalidInputError: if there is no such cluster in the region.
        """
        with self._lock:
            if is_fresh or cluster not in self._endpoints:
                self._endpoints[cluster] = self._describe(cluster)
            return self._endpoints[cluster]

    def _describe(self, cluster: ClusterPolicy) -> ClusterEndpoint:
        with translating("eks:DescribeCluster"):
            client = self._session_for(cluster).client(
                "eks", region_name=cluster.region, config=client_config()
            )
            try:
                found = client.describe_cluster(name=cluster.name)["cluster"]
            except client.exceptions.ResourceNotFoundException as error:
                raise InvalidInputError(
                    "clusters[].name",
                    f"there is no EKS cluster {cluster.name!r} in {cluster.region}",
                    "correct name, region or role_arn of the cluster in the policy",
                ) from error
        url = found.get("endpoint", "")
        encoded = found.get("certificateAuthority", {}).get("data", "")
        if not url or not encoded:
            raise AwsUnavailableError(
                f"eks:DescribeCluster: {cluster.name} has no endpoint yet, its status is "
                f"{found.get('status', 'unknown')}"
            )
        try:
            return ClusterEndpoint(url, base64.b64decode(encoded, validate=True).decode("ascii"))
        except (binascii.Error, UnicodeDecodeError) as error:
            raise AwsUnavailableError(
                f"eks:DescribeCluster: the certificate authority of {cluster.name} is unreadable"
            ) from error

    # --- token ------------------------------------------------------------------------------------

    def token(self, cluster: ClusterPolicy, *, is_fresh: bool = False) -> str:
        """Return a token at most 10 minutes old; `is_fresh` mints a new one (after a 401).

        Raises:
            AwsForbiddenError: if the role may not be assumed, or there are no credentials.
            AwsUnavailableError: if STS does not answer.
        """
        with self._lock:
            now = self._clock.now()
            known = self._tokens.get(cluster)
            if known is None or is_fresh or now - known.minted_at >= TOKEN_MAX_AGE:
                known = _Token(self._mint_patiently(cluster), now)
                self._tokens[cluster] = known
            return known.text

    def _mint_patiently(self, cluster: ClusterPolicy) -> str:
        """Mint a token, with one retry: credentials are now and then refused for a moment."""
        with translating("sts:AssumeRole" if cluster.role_arn else "sts:GetCallerIdentity"):
            try:
                return self._mint(cluster)
            except (ClientError, BotoCoreError):
                self._sleep(random.uniform(*_RETRY_JITTER_S))  # noqa: S311 - jitter
            try:
                return self._mint(cluster)
            except ClientError as error:
                if error_code(error).startswith("AccessDenied"):
                    raise AwsForbiddenError(
                        f"sts:AssumeRole: {cluster.role_arn} may not be assumed, also at the "
                        "second try. Remedy: deploy cluster-access.yaml with this stack's "
                        "account and role prefix, and name its role in the policy."
                    ) from error
                raise

    def _mint(self, cluster: ClusterPolicy) -> str:
        session = self._session_for(cluster)
        credentials = session.get_credentials()
        if credentials is None:
            raise AwsForbiddenError("sts:GetCallerIdentity: the function has no AWS credentials")
        signer = RequestSigner(
            ServiceId("STS"), cluster.region, "sts", "v4", credentials, session.events
        )
        url = signer.generate_presigned_url(
            {
                "method": "GET",
                "url": f"{_sts_url(session, cluster.region)}/"
                "?Action=GetCallerIdentity&Version=2011-06-15",
                "body": {},
                "headers": {CLUSTER_HEADER: cluster.name},
                "context": {},
            },
            region_name=cluster.region,
            expires_in=_PRESIGN_EXPIRES_S,
            operation_name="",
        )
        return TOKEN_PREFIX + base64.urlsafe_b64encode(url.encode()).decode().rstrip("=")


def _sts_url(session: boto3.Session, region: str) -> str:
    """Return the public STS endpoint of the region, right in every partition.

    The URL is for EKS to call, which takes STS's own hosts only: an endpoint that is configured
    for the calls of this function (AWS_ENDPOINT_URL) has no say.
    """
    # The stubs do not know the option yet.
    public = Config(ignore_configured_endpoint_urls=True)  # type: ignore[call-arg]
    client = session.client("sts", region_name=region, config=public)
    return client.meta.endpoint_url.rstrip("/")
