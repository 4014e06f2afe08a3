"""AWS sessions for a cluster: the function's own, or those of the cluster's role.

One role per cluster (cluster-access.yaml), also in another account. Its credentials are fetched
when they are first needed and refreshed by botocore for as long as the container lives.
"""

import threading
from typing import Literal

import boto3
import botocore.session
from botocore.client import BaseClient
from botocore.credentials import (
    AssumeRoleCredentialFetcher,
    CredentialProvider,
    CredentialResolver,
    DeferredRefreshableCredentials,
)

from nodemend.adapters._aws import client_config
from nodemend.domain.policy import ClusterPolicy

ROLE_SESSION_NAME_LIMIT = 64


class ClusterRole:
    """Hands out one session per role and region.

    Args:
        session: The function's own session; its credentials assume the roles.
        role_session_name: Names the caller in CloudTrail and in the cluster's audit log: the
            function's name. Cut to the 64 characters that STS takes.
    """

    def __init__(self, *, session: boto3.Session, role_session_name: str) -> None:
        self._session = session
        self._role_session_name = role_session_name[:ROLE_SESSION_NAME_LIMIT]
        self._lock = threading.Lock()
        self._sessions: dict[tuple[str, str], boto3.Session] = {}

    def session_for(self, cluster: ClusterPolicy) -> boto3.Session:
        """Return the session for a cluster; makes no call.

        Without a role it is the function's own session, whose default region need not be the
        cluster's: name the region with each client.
        """
        if not cluster.role_arn:
            return self._session
        key = (cluster.role_arn, cluster.region)
        with self._lock:
            if key not in self._sessions:
                self._sessions[key] = self._assume(*key)
            return self._sessions[key]

    def _assume(self, role_arn: str, region: str) -> boto3.Session:
        assumed = botocore.session.get_session()
        provider = _RoleProvider(self._session, role_arn, region, self._role_session_name)
        assumed.register_component("credential_provider", CredentialResolver([provider]))
        return boto3.Session(botocore_session=assumed, region_name=region)


class _RoleProvider(CredentialProvider):
    """The only source of credentials of an assumed session, whatever the environment offers."""

    METHOD = "assume-role"
    CANONICAL_NAME = "NodemendClusterRole"

    def __init__(
        self, source: boto3.Session, role_arn: str, region: str, role_session_name: str
    ) -> None:
        super().__init__()
        self._source = source
        self._role_arn = role_arn
        self._region = region
        self._role_session_name = role_session_name

    def load(self) -> DeferredRefreshableCredentials:
        """Return credentials that call STS at their first use."""
        fetcher = AssumeRoleCredentialFetcher(
            client_creator=self._client,
            source_credentials=self._source.get_credentials(),
            role_arn=self._role_arn,
            extra_args={"RoleSessionName": self._role_session_name},
        )
        return DeferredRefreshableCredentials(fetcher.fetch_credentials, self.METHOD)

    def _client(
        self,
        service: Literal["sts"],
        *,
        aws_access_key_id: str,
        aws_secret_access_key: str,
        aws_session_token: str | None,
    ) -> BaseClient:
        # The regional endpoint: the global one is another region's trouble and needs a way out of
        # the VPC.
        return self._source.client(
            service,
            region_name=self._region,
            config=client_config(),
            aws_access_key_id=aws_access_key_id,
            aws_secret_access_key=aws_secret_access_key,
            aws_session_token=aws_session_token,
        )
