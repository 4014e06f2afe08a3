"""Settings of the functions, from the environment that template.yaml gives them.

One frozen class per kind of function; an absent or wrong variable fails the cold start with its
name. Nothing else in the package reads the environment.
"""

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from nodemend.domain.policy import ClusterPolicy


class _Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="NODEMEND_", frozen=True, extra="ignore")


class PolicySettings(_Settings):
    """Where the policy is, and the cluster that a policy without clusters means."""

    appconfig_application: str = Field(min_length=1)
    appconfig_environment: str = Field(min_length=1)
    appconfig_profile: str = Field(min_length=1)

    cluster_name: str = ""
    """Empty: the policy must name its clusters."""
    workspace_id: str = ""
    region: str = Field(min_length=1)
    cluster_matcher: str = ""

    cluster_role_prefix: str = ""
    """ARN prefix of the clusters' roles, to which the cluster's name is appended; the roles come
    from cluster-access.yaml. Empty: the function's own role is used."""

    def default_cluster(self) -> ClusterPolicy | None:
        """Return the deployment's own cluster, if it was given one."""
        if not self.cluster_name:
            return None
        return ClusterPolicy(
            name=self.cluster_name,
            workspace=self.workspace_id,
            region=self.region,
            matcher=self.cluster_matcher,
        )


class RecordSettings(_Settings):
    """Where incidents, guards and scan memories are, and where events go."""

    table: str = Field(min_length=1)
    bus: str = Field(min_length=1)


class DispatchSettings(_Settings):
    """What starts remediations."""

    state_machine_arn: str = Field(min_length=1)


class QueueSettings(_Settings):
    """What tells the dispatcher."""

    dispatch_queue_url: str = Field(min_length=1)


class AlertSettings(_Settings):
    """Where refused alert messages go."""

    alert_dead_letters_url: str = Field(min_length=1)


class MetricsSettings(_Settings):
    """What a query may cost."""

    max_query_samples: int = Field(default=0, ge=0)
    """AMP refuses a query that would process more, unbilled, and warns from four fifths on. 0: the
    workspace's own quota."""


class RuntimeSettings(BaseSettings):
    """What the Lambda runtime itself says."""

    model_config = SettingsConfigDict(frozen=True, extra="ignore")

    aws_lambda_function_name: str = "nodemend"
    aws_endpoint_url: str | None = None
    """AWS's own variable for endpoints of another place; it holds for AMP's data plane too, for
    which there is no SDK client."""
