"""EC2 Auto Scaling on the laptop: its actions and life cycle, for calls signed for `autoscaling`.

Why not moto's: it launches the replacement inside TerminateInstanceInAutoScalingGroup even while
Launch is suspended, answers a second call for the same instance with 500, and keeps no activities.
Why not moto's EC2 beneath it (`autoscaling_ec2` answers instead): an instance's state, membership
and health and the group's activities change together, and over time. Held in two stores they would
have to be kept in step after every event; and moto's instances terminate, reboot and stop at once,
which hides just the windows that a remediation must survive. Other EC2 calls can still go to moto.

What it does as AWS documents, or as public error reports show it:

- the instance is Terminating at once and EC2 follows; the replacement starts after the group's
  launch delay, while the old one is still going down, and only if Launch is not suspended;
- a second termination of the same instance is refused with ScalingActivityInProgress while it is on
  its way out, and with ValidationError ("No managed instance found") once it is gone;
- an instance on its way in is refused with ScalingActivityInProgress too;
- decrementing below the minimum is a ValidationError, and nothing is terminated;
- failed launches are activities with EC2's text, tried again with growing pauses.

Choices where no source is certain: suspending Terminate does not stop a termination that a person
asks for (it stops scale-in and the replacement of unhealthy instances); termination protection does
not stop a group, unless the group is told so (`protection_blocks_group`).
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, ClassVar

from local.aws.autoscaling_core import Effect
from local.aws.autoscaling_ec2 import Ec2Front
from local.aws.autoscaling_model import CapacityModel
from local.aws.autoscaling_types import (
    Activity,
    AwsAnswerError,
    Group,
    Instance,
    InstanceRefresh,
    validation_error,
)
from local.aws.autoscaling_wire import Behaviour, Fields, QueryFront, QueryProtocol, page_of

__all__ = ["AutoScalingFront", "Behaviour", "CapacityModel", "Ec2Front", "Effect"]

_GROUPS_A_PAGE = 50
_INSTANCES_A_PAGE = 50
_ACTIVITIES_A_PAGE = 100
_MOST = 100


class AutoScalingFront(QueryFront):
    """The Auto Scaling API over a `CapacityModel`, as a WSGI application."""

    service: ClassVar[str] = "autoscaling"
    mutations: ClassVar[frozenset[str]] = frozenset(
        {
            "TerminateInstanceInAutoScalingGroup",
            "SetInstanceHealth",
            "SuspendProcesses",
            "ResumeProcesses",
            "SetDesiredCapacity",
            "EnterStandby",
            "ExitStandby",
            "CompleteLifecycleAction",
            "CreateOrUpdateTags",
        }
    )

    def __init__(
        self, model: CapacityModel, behaviours: Mapping[str, Behaviour] | None = None
    ) -> None:
        super().__init__(model, QueryProtocol("autoscaling"), behaviours)
        self.handlers = {
            "DescribeAutoScalingGroups": self._describe_groups,
            "DescribeAutoScalingInstances": self._describe_instances,
            "DescribeScalingActivities": self._describe_activities,
            "DescribeInstanceRefreshes": self._describe_refreshes,
            "DescribeLifecycleHooks": self._describe_hooks,
            "TerminateInstanceInAutoScalingGroup": self._terminate,
            "SetInstanceHealth": self._set_health,
            "SuspendProcesses": self._suspend,
            "ResumeProcesses": self._resume,
            "SetDesiredCapacity": self._set_desired,
            "EnterStandby": self._enter_standby,
            "ExitStandby": self._exit_standby,
            "CompleteLifecycleAction": self._complete_hook,
            "CreateOrUpdateTags": self._tag,
        }

    def target(self, action: str, params: Fields) -> str:
        """Return the instance ids of the call, else its groups."""
        if action == "CreateOrUpdateTags":
            groups = [str(tag.get("ResourceId", "")) for tag in params.get("Tags", [])]
            return ",".join(dict.fromkeys(groups))
        for name in ("InstanceIds", "AutoScalingGroupNames"):
            if params.get(name):
                return ",".join(params[name])
        return str(params.get("InstanceId") or params.get("AutoScalingGroupName") or "")

    def authorize(self, action: str, params: Fields) -> None:
        """Refuse denied actions as IAM does."""
        del params
        if action in self.denied:
            raise AwsAnswerError(
                "AccessDenied",
                f"User is not authorized to perform: autoscaling:{action} because no "
                f"identity-based policy allows the autoscaling:{action} action",
                403,
            )

    # --- reads --------------------------------------------------------------------------------

    def _describe_groups(self, params: Fields) -> Fields:
        names = params.get("AutoScalingGroupNames", [])
        size = _page_size(params, _GROUPS_A_PAGE, _MOST)
        if len(names) > size:
            raise validation_error(
                f"The number of group names that may be passed in is limited to {size}"
            )
        filters = params.get("Filters", [])
        groups = [
            group
            for group in self.model.groups()
            if (not names or group.name in names or group.arn in names)
            and all(_has_tag(group, rule) for rule in filters)
        ]
        page, token = page_of(
            groups, [group.name for group in groups], size, params.get("NextToken")
        )
        shows_instances = params.get("IncludeInstances", True)
        return {
            "AutoScalingGroups": [self._group_fields(group, shows_instances) for group in page],
            "NextToken": token,
        }

    def _group_fields(self, group: Group, shows_instances: bool) -> Fields:
        members = self.model.members(group.name) if shows_instances else []
        fields: Fields = {
            "AutoScalingGroupName": group.name,
            "AutoScalingGroupARN": group.arn,
            "LaunchTemplate": _template(group),
            "MinSize": group.min_size,
            "MaxSize": group.max_size,
            "DesiredCapacity": group.desired,
            "DefaultCooldown": 300,
            "AvailabilityZones": list(group.zones),
            "LoadBalancerNames": [],
            "TargetGroupARNs": [],
            "HealthCheckType": "EC2",
            "HealthCheckGracePeriod": group.health_check_grace_s,
            "Instances": [self._member_fields(group, member) for member in members],
            "CreatedTime": group.created_at,
            "SuspendedProcesses": [
                {"ProcessName": name, "SuspensionReason": reason}
                for name, reason in sorted(group.suspended.items())
            ],
            "VPCZoneIdentifier": ",".join(group.subnets.values()),
            "EnabledMetrics": [],
            "Tags": [
                {
                    "ResourceId": group.name,
                    "ResourceType": "auto-scaling-group",
                    "Key": key,
                    "Value": value,
                    "PropagateAtLaunch": True,
                }
                for key, value in sorted(group.tags.items())
            ],
            "TerminationPolicies": ["Default"],
            "NewInstancesProtectedFromScaleIn": group.new_instances_protected,
            "ServiceLinkedRoleARN": (
                f"arn:aws:iam::{self.model.account_id}:role/aws-service-role/"
                "autoscaling.amazonaws.com/AWSServiceRoleForAutoScaling"
            ),
            "CapacityRebalance": False,
            "TrafficSources": [],
        }
        if group.capacity_reservation_id is not None:
            fields["CapacityReservationSpecification"] = {
                "CapacityReservationPreference": "capacity-reservations-only",
                "CapacityReservationTarget": {
                    "CapacityReservationIds": [group.capacity_reservation_id]
                },
            }
        return fields

    def _member_fields(self, group: Group, member: Instance) -> Fields:
        return {
            "InstanceId": member.instance_id,
            "InstanceType": member.instance_type,
            "AvailabilityZone": member.zone,
            "LifecycleState": member.lifecycle,
            "HealthStatus": member.health,
            "LaunchTemplate": _template(group),
            "ProtectedFromScaleIn": member.protected_from_scale_in,
        }

    def _describe_instances(self, params: Fields) -> Fields:
        wanted = params.get("InstanceIds", [])
        if len(wanted) > _INSTANCES_A_PAGE:
            raise validation_error(
                "The number of instance ids that may be passed in is limited to "
                f"{_INSTANCES_A_PAGE}"
            )
        groups = {group.name: group for group in self.model.groups()}
        members = [
            (groups[str(instance.group)], instance)
            for instance in self.model.instances()
            if instance.is_member and (not wanted or instance.instance_id in wanted)
        ]
        page, token = page_of(
            members,
            [instance.instance_id for _, instance in members],
            _page_size(params, _INSTANCES_A_PAGE, _INSTANCES_A_PAGE),
            params.get("NextToken"),
        )
        return {
            "AutoScalingInstances": [
                # Here AWS writes the health in capitals, unlike in DescribeAutoScalingGroups.
                self._member_fields(group, instance)
                | {"AutoScalingGroupName": group.name, "HealthStatus": instance.health.upper()}
                for group, instance in page
            ],
            "NextToken": token,
        }

    def _describe_activities(self, params: Fields) -> Fields:
        name = params.get("AutoScalingGroupName")
        if name is not None:
            self.model.group(name)
        wanted = params.get("ActivityIds", [])
        found = [
            activity
            for activity in self.model.activities(name)
            if (not wanted or activity.activity_id in wanted)
            and all(_passes(activity, rule, name) for rule in params.get("Filters", []))
        ]
        page, token = page_of(
            found,
            [activity.activity_id for activity in found],
            _page_size(params, _ACTIVITIES_A_PAGE, _MOST),
            params.get("NextToken"),
            is_sorted=False,
        )
        return {
            "Activities": [self._activity_fields(activity) for activity in page],
            "NextToken": token,
        }

    def _activity_fields(self, activity: Activity) -> Fields:
        return {
            "ActivityId": activity.activity_id,
            "AutoScalingGroupName": activity.group,
            "Description": activity.description,
            "Cause": activity.cause,
            "StartTime": activity.started_at,
            "EndTime": activity.ended_at,
            "StatusCode": activity.status,
            "StatusMessage": activity.message or None,
            "Progress": activity.progress,
            "Details": activity.details,
            "AutoScalingGroupARN": self.model.group(activity.group).arn,
        }

    def _describe_refreshes(self, params: Fields) -> Fields:
        group = self.model.group(params["AutoScalingGroupName"])
        wanted = params.get("InstanceRefreshIds", [])
        found = [
            refresh for refresh in group.refreshes if not wanted or refresh.refresh_id in wanted
        ]
        page, token = page_of(
            found,
            [refresh.refresh_id for refresh in found],
            _page_size(params, _GROUPS_A_PAGE, _MOST),
            params.get("NextToken"),
            is_sorted=False,
        )
        return {
            "InstanceRefreshes": [_refresh_fields(group, refresh) for refresh in page],
            "NextToken": token,
        }

    def _describe_hooks(self, params: Fields) -> Fields:
        group = self.model.group(params["AutoScalingGroupName"])
        wanted = params.get("LifecycleHookNames", [])
        return {
            "LifecycleHooks": [
                {
                    "LifecycleHookName": hook.name,
                    "AutoScalingGroupName": group.name,
                    "LifecycleTransition": hook.transition,
                    "HeartbeatTimeout": int(hook.heartbeat_s),
                    "GlobalTimeout": int(min(hook.heartbeat_s * 100, 172800)),
                    "DefaultResult": hook.default_result,
                }
                for hook in group.hooks
                if not wanted or hook.name in wanted
            ]
        }

    # --- mutations ----------------------------------------------------------------------------

    def _terminate(self, params: Fields) -> Fields:
        decrement = params["ShouldDecrementDesiredCapacity"]
        group = params.get("AutoScalingGroupName")
        if "InstanceIds" in params:
            if group is None:
                raise self.protocol.missing("AutoScalingGroupName")
            activities = self.model.terminate_all_in_group(
                params["InstanceIds"], decrement=decrement, group=group
            )
            return {"Activities": [self._activity_fields(activity) for activity in activities]}
        if "InstanceId" not in params:
            raise self.protocol.missing("InstanceId")
        activity = self.model.terminate_in_group(
            params["InstanceId"], decrement=decrement, group=group
        )
        return {"Activity": self._activity_fields(activity)}

    def _set_health(self, params: Fields) -> Fields:
        self.model.set_health(
            params["InstanceId"],
            params["HealthStatus"],
            respects_grace=params.get("ShouldRespectGracePeriod", True),
        )
        return {}

    def _suspend(self, params: Fields) -> Fields:
        self.model.suspend(params["AutoScalingGroupName"], params.get("ScalingProcesses", []))
        return {}

    def _resume(self, params: Fields) -> Fields:
        self.model.resume(params["AutoScalingGroupName"], params.get("ScalingProcesses", []))
        return {}

    def _set_desired(self, params: Fields) -> Fields:
        self.model.set_desired(
            params["AutoScalingGroupName"],
            params["DesiredCapacity"],
            honors_cooldown=params.get("HonorCooldown", False),
        )
        return {}

    def _enter_standby(self, params: Fields) -> Fields:
        activities = self.model.enter_standby(
            params["AutoScalingGroupName"],
            params.get("InstanceIds", []),
            decrement=params["ShouldDecrementDesiredCapacity"],
        )
        return {"Activities": [self._activity_fields(activity) for activity in activities]}

    def _exit_standby(self, params: Fields) -> Fields:
        activities = self.model.exit_standby(
            params["AutoScalingGroupName"], params.get("InstanceIds", [])
        )
        return {"Activities": [self._activity_fields(activity) for activity in activities]}

    def _complete_hook(self, params: Fields) -> Fields:
        self.model.complete_hook(
            params["AutoScalingGroupName"],
            params["LifecycleHookName"],
            params.get("InstanceId", ""),
            params["LifecycleActionResult"],
        )
        return {}

    def _tag(self, params: Fields) -> Fields:
        by_group: dict[str, dict[str, str]] = {}
        for tag in params["Tags"]:
            by_group.setdefault(tag.get("ResourceId", ""), {})[tag["Key"]] = tag.get("Value", "")
        for name in by_group:
            self.model.group(name)
        for name, tags in by_group.items():
            self.model.tag_group(name, tags)
        return {}


def _template(group: Group) -> Fields:
    return {
        "LaunchTemplateId": group.launch_template_id,
        "LaunchTemplateName": group.launch_template,
        "Version": group.launch_template_version,
    }


def _refresh_fields(group: Group, refresh: InstanceRefresh) -> Fields:
    return {
        "InstanceRefreshId": refresh.refresh_id,
        "AutoScalingGroupName": group.name,
        "Status": refresh.status,
        "StatusReason": refresh.reason or None,
        "StartTime": refresh.started_at,
        "EndTime": refresh.ended_at,
        "PercentageComplete": refresh.percentage,
        "InstancesToUpdate": refresh.to_update,
    }


def _has_tag(group: Group, rule: Mapping[str, Any]) -> bool:
    """Apply one filter: its values are alternatives, compared exactly."""
    name = rule.get("Name", "")
    values = rule.get("Values", [])
    if name == "tag-key":
        return any(key in values for key in group.tags)
    if name == "tag-value":
        return any(value in values for value in group.tags.values())
    if name.startswith("tag:"):
        return group.tags.get(name.removeprefix("tag:")) in values
    raise validation_error(
        f"Filter type {name} is not correct. Allowed Filter types are: tag-key, tag-value, tag:KEY"
    )


def _passes(activity: Activity, rule: Mapping[str, Any], group: str | None) -> bool:
    name = rule.get("Name", "")
    values: Iterable[str] = rule.get("Values", [])
    match name:
        case "Status":
            if group is None:
                raise validation_error("Filter Status needs AutoScalingGroupName")
            return activity.status in values
        case "StartTimeLowerBound":
            return all(activity.started_at >= _moment(value) for value in values)
        case "StartTimeUpperBound":
            return all(activity.started_at <= _moment(value) for value in values)
        case _:
            raise validation_error(f"Filter type {name} is not correct.")


def _moment(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise validation_error(f"{text!r} is no ISO 8601 time") from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _page_size(params: Fields, default: int, most: int) -> int:
    size = int(params.get("MaxRecords", default))
    if not 1 <= size <= most:
        raise validation_error(f"MaxRecords {size} is not between 1 and {most}.")
    return size
