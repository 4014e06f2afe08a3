"""Single EC2 instances of a cluster: the reboot."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from nodemend.adapters._aws import client_config, error_code, is_throttled, translating
from nodemend.domain.errors import RepairRefusedError
from nodemend.domain.policy import ClusterPolicy

if TYPE_CHECKING:
    from mypy_boto3_ec2.client import EC2Client

_REFUSED = frozenset(
    {
        "IncorrectInstanceState",
        "IncorrectState",
        "InvalidInstanceID",
        "InvalidInstanceID.Malformed",
        "InvalidInstanceID.NotFound",
        "OperationNotPermitted",
        "UnsupportedOperation",
    }
)
"""Answers that say that this instance cannot be rebooted: gone, stopped, or a service's own."""


class Ec2Instances:
    """EC2, as far as single instances go.

    Args:
        session_for: The session of a cluster's role.
    """

    def __init__(self, *, session_for: Callable[[ClusterPolicy], boto3.Session]) -> None:
        self._session_for = session_for

    def reboot(self, cluster: ClusterPolicy, instance_id: str) -> bool:
        """Ask EC2 to reboot an instance; False if it throttled the call.

        The client does not repeat the call by itself: one whose answer was lost may have been
        accepted, and the second would hit the machine on its way up.

        Raises:
            RepairRefusedError: if EC2 refuses for good.
        """
        action = "ec2:RebootInstances"
        with translating(action):
            try:
                self._client(cluster).reboot_instances(InstanceIds=[instance_id])
            except ClientError as error:
                if is_throttled(error):
                    return False
                if error_code(error) in _REFUSED:
                    raise RepairRefusedError(f"{action}: {instance_id}: {error}") from error
                raise
        return True

    def _client(self, cluster: ClusterPolicy) -> "EC2Client":
        once = Config(retries={"mode": "standard", "total_max_attempts": 1})
        return self._session_for(cluster).client(
            "ec2", region_name=cluster.region, config=client_config().merge(once)
        )
