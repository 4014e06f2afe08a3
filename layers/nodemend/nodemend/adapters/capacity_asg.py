"""A cluster's capacity in EC2 Auto Scaling groups: self-managed ones and managed node groups."""

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

import boto3
from botocore.exceptions import ClientError

from nodemend.adapters._aws import client_config, error_code, translating
from nodemend.application.ports import Fleet
from nodemend.domain.capacity import AutoScalingGroup
from nodemend.domain.errors import AwsUnavailableError, RepairRefusedError
from nodemend.domain.policy import ClusterPolicy

if TYPE_CHECKING:
    from mypy_boto3_autoscaling.client import AutoScalingClient
    from mypy_boto3_autoscaling.type_defs import ActivityTypeDef, AutoScalingGroupTypeDef

_BUSY = frozenset({"ScalingActivityInProgress", "ResourceContention"})
_LEAVING_STATES = ("Terminating", "Terminated")
_REFRESHING = frozenset({"Pending", "InProgress", "Cancelling", "RollbackInProgress"})
_GONE_EC2_STATES = frozenset({"shutting-down", "terminated"})
_LAUNCH = "Launching a new EC2 instance"
"""How the description of a launch begins; that of a termination begins "Terminating EC2"."""

_ACTIVITIES = 200
"""How far back a failed launch is looked for. A group that cannot launch adds one every few
minutes, later every hour or so."""


class AutoScalingCapacity:
    """EC2 Auto Scaling, as far as one cluster's groups go.

    Args:
        session_for: The session of a cluster's role.
        gpu_instance_types: Instance types whose nodes have GPUs or Neuron devices.
    """

    def __init__(
        self,
        *,
        session_for: Callable[[ClusterPolicy], boto3.Session],
        gpu_instance_types: frozenset[str] = frozenset(),
    ) -> None:
        self._session_for = session_for
        self._gpu_instance_types = gpu_instance_types

    def fleet(self, cluster: ClusterPolicy) -> Fleet:
        """Return the groups tagged as the cluster's.

        Two listings, because filters are joined by "and": self-managed groups carry
        `kubernetes.io/cluster/<name>`, and EKS tags its node groups' groups with
        `eks:cluster-name` (and mostly the other one, too).
        """
        filters = (
            {"Name": "tag-key", "Values": [f"kubernetes.io/cluster/{cluster.name}"]},
            {"Name": "tag:eks:cluster-name", "Values": [cluster.name]},
        )
        return Fleet(
            {
                group.name: group
                for each in filters
                for group in self._groups(cluster, Filters=[each])
            }
        )

    def group(self, cluster: ClusterPolicy, name: str) -> AutoScalingGroup | None:
        """Return one group, or None if it is gone."""
        return next(self._groups(cluster, AutoScalingGroupNames=[name]), None)

    def _groups(self, cluster: ClusterPolicy, **selection: Any) -> Iterator[AutoScalingGroup]:  # noqa: ANN401
        with translating("autoscaling:DescribeAutoScalingGroups"):
            paginator = self._client(cluster).get_paginator("describe_auto_scaling_groups")
            for page in paginator.paginate(**selection):
                for group in page["AutoScalingGroups"]:
                    yield _group_of(group, self._gpu_instance_types)

    def other_work(self, cluster: ClusterPolicy, group: AutoScalingGroup) -> str:
        """Return what somebody else does to the group's nodes: a refresh, an update, node repair.

        A managed node group is known by EKS's own tag on its Auto Scaling group.
        """
        with translating("autoscaling:DescribeInstanceRefreshes"):
            try:
                # Newest first: one that runs is among the first.
                refreshes = self._client(cluster).describe_instance_refreshes(
                    AutoScalingGroupName=group.name, MaxRecords=10
                )["InstanceRefreshes"]
            except ClientError as error:
                if error_code(error) != "ValidationError":
                    raise
                refreshes = []  # the group is gone, and `group` says so
        for refresh in refreshes:
            if refresh.get("Status") in _REFRESHING:
                refresh_id, status = refresh.get("InstanceRefreshId", ""), refresh["Status"]
                return f"instance refresh {refresh_id} of group {group.name} is {status}"
        name = group.tags.get("eks:nodegroup-name", "")
        return self._work_on_node_group(cluster, name) if name else ""

    def _work_on_node_group(self, cluster: ClusterPolicy, name: str) -> str:
        client = self._session_for(cluster).client(
            "eks", region_name=cluster.region, config=client_config()
        )
        with translating("eks:DescribeNodegroup"):
            try:
                found = client.describe_nodegroup(clusterName=cluster.name, nodegroupName=name)
            except ClientError as error:
                if error_code(error) != "ResourceNotFoundException":
                    raise
                return f"node group {name} is gone, and its instances go with it"
        node_group = found["nodegroup"]
        if node_group.get("status") in ("UPDATING", "DELETING"):
            return f"node group {name} is {node_group['status']}"
        if node_group.get("nodeRepairConfig", {}).get("enabled"):
            return (
                f"node repair of node group {name} is enabled, and two remediators must not work "
                "on one node: disable it, or exclude the group's nodes"
            )
        return ""

    def terminate(self, cluster: ClusterPolicy, instance_id: str) -> None:
        """Terminate an instance in its group; an instance that is going already is as good.

        Desired capacity stays: a decrement would lose the node for good, and can make the group
        even out its zones by ending another one.

        Raises:
            RepairRefusedError: if the group refuses for good.
            AwsUnavailableError: if the group is busy with another activity.
        """
        action = "autoscaling:TerminateInstanceInAutoScalingGroup"
        with translating(action):
            try:
                self._client(cluster).terminate_instance_in_auto_scaling_group(
                    InstanceId=instance_id, ShouldDecrementDesiredCapacity=False
                )
            except ClientError as error:
                code = error_code(error)
                if code not in (*_BUSY, "ValidationError"):
                    raise
                state = self._state(cluster, instance_id)
                if state.startswith(_LEAVING_STATES) or state in _GONE_EC2_STATES:
                    return
                text = f"{action}: {instance_id} ({state}): {error}"
                if code in _BUSY:
                    raise AwsUnavailableError(text) from error
                raise RepairRefusedError(
                    f"{text}. Remedy: an instance that is running and in no group must be ended, "
                    "or put back into a group, by a person."
                ) from error

    def _state(self, cluster: ClusterPolicy, instance_id: str) -> str:
        """Return the instance's lifecycle state in its group, else its EC2 state.

        An instance that has left its group may run on (detached) or be gone; only EC2 knows.
        """
        with translating("autoscaling:DescribeAutoScalingInstances"):
            members = self._client(cluster).describe_auto_scaling_instances(
                InstanceIds=[instance_id]
            )["AutoScalingInstances"]
        if members:
            return str(members[0]["LifecycleState"])
        with translating("ec2:DescribeInstances"):
            client = self._session_for(cluster).client(
                "ec2", region_name=cluster.region, config=client_config()
            )
            try:
                answer = client.describe_instances(InstanceIds=[instance_id])
            except ClientError as error:
                # EC2 forgets an instance about an hour after its end.
                if error_code(error) == "InvalidInstanceID.NotFound":
                    return "terminated"
                raise
        found = [each for part in answer["Reservations"] for each in part.get("Instances", [])]
        return str(found[0]["State"]["Name"]) if found else "terminated"

    def launch_problem(self, cluster: ClusterPolicy, group: str, since: datetime) -> str:
        """Return the message of the group's newest failed launch since then, or an empty string.

        Activities come newest first, so the search ends with the first that is older.
        """
        # What is in progress comes first, then what is over, newest first. Start times may be
        # whole seconds: one in the second of `since` counts.
        earliest = since.replace(microsecond=0)
        with translating("autoscaling:DescribeScalingActivities"):
            try:
                for activity in self._activities(cluster, group):
                    if activity["StartTime"] < earliest:
                        if "EndTime" in activity:
                            break
                    elif _is_failed_launch(activity):
                        return activity.get("StatusMessage") or activity.get("Description", "")
            except ClientError as error:
                # The group is gone, and `group` says so.
                if error_code(error) != "ValidationError":
                    raise
        return ""

    def _activities(self, cluster: ClusterPolicy, group: str) -> "Iterator[ActivityTypeDef]":
        paginator = self._client(cluster).get_paginator("describe_scaling_activities")
        for page in paginator.paginate(
            AutoScalingGroupName=group,
            PaginationConfig={"MaxItems": _ACTIVITIES, "PageSize": 100},
        ):
            yield from page["Activities"]

    def _client(self, cluster: ClusterPolicy) -> "AutoScalingClient":
        return self._session_for(cluster).client(
            "autoscaling", region_name=cluster.region, config=client_config()
        )


def _is_failed_launch(activity: "ActivityTypeDef") -> bool:
    return activity["StatusCode"] == "Failed" and activity.get("Description", "").startswith(
        _LAUNCH
    )


_TEMPLATE_TAGS = tuple(
    f"k8s.io/cluster-autoscaler/node-template/resources/{resource}"
    for resource in ("nvidia.com/gpu", "aws.amazon.com/neuron")
)
"""What people tell cluster-autoscaler of the nodes of a group that has none."""


def _has_gpus(group: "AutoScalingGroupTypeDef", gpu_instance_types: frozenset[str]) -> bool:
    """Tell whether the group's nodes have GPUs, by what the group itself shows.

    A group that has no instance, no override and no tag shows nothing: its launch template would.
    """
    template = group.get("MixedInstancesPolicy", {}).get("LaunchTemplate", {})
    types = {
        *(instance.get("InstanceType", "") for instance in group.get("Instances", [])),
        *(override.get("InstanceType", "") for override in template.get("Overrides", [])),
    }
    tags = {tag.get("Key", ""): tag.get("Value", "") for tag in group.get("Tags", [])}
    told = any(tags.get(name, "0") not in ("", "0") for name in _TEMPLATE_TAGS)
    return told or bool(types & gpu_instance_types)


def _group_of(
    group: "AutoScalingGroupTypeDef", gpu_instance_types: frozenset[str]
) -> AutoScalingGroup:
    return AutoScalingGroup(
        name=group["AutoScalingGroupName"],
        desired=group["DesiredCapacity"],
        min_size=group["MinSize"],
        max_size=group["MaxSize"],
        instances={
            instance["InstanceId"]: instance["LifecycleState"]
            for instance in group.get("Instances", [])
        },
        suspended=frozenset(
            process.get("ProcessName", "") for process in group.get("SuspendedProcesses", [])
        ),
        tags={tag.get("Key", ""): tag.get("Value", "") for tag in group.get("Tags", [])},
        has_gpus=_has_gpus(group, gpu_instance_types),
    )
