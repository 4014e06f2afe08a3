"""Every Auto Scaling action through boto3."""

import math
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError, ReadTimeoutError

from local.aws.autoscaling import Behaviour, CapacityModel, Effect
from local.aws.autoscaling_server import CapacityServer
from local.aws.autoscaling_types import (
    LAUNCHING,
    TERMINATING,
    AwsAnswerError,
    CapacityHooks,
    InstanceRefresh,
    LifecycleHook,
    Reservation,
    Shortage,
    Timing,
)

if TYPE_CHECKING:
    from mypy_boto3_autoscaling import AutoScalingClient

ZONES = ("us-east-1a", "us-east-1b")
TIMING = Timing(terminate_s=60, launch_delay_s=30, pending_s=20, retry_base_s=10)


def refusal(error: pytest.ExceptionInfo[ClientError]) -> tuple[str, str, int]:
    response = error.value.response
    return (
        response["Error"]["Code"],
        response["Error"]["Message"],
        response["ResponseMetadata"]["HTTPStatusCode"],
    )


def group_of(client: "AutoScalingClient", name: str = "gpu") -> Any:
    answer = client.describe_auto_scaling_groups(AutoScalingGroupNames=[name])
    return answer["AutoScalingGroups"][0]


def states(client: "AutoScalingClient", name: str = "gpu") -> dict[str, str]:
    return {
        member["InstanceId"]: member["LifecycleState"]
        for member in group_of(client, name)["Instances"]
    }


def activities(client: "AutoScalingClient", name: str = "gpu") -> list[Any]:
    return list(client.describe_scaling_activities(AutoScalingGroupName=name)["Activities"])


# --- reads ------------------------------------------------------------------------------------


def test_a_group_shows_its_sizes_tags_template_and_instances(model, autoscaling):
    model.add_group(
        "gpu",
        desired=3,
        min_size=1,
        max_size=5,
        zones=ZONES,
        cluster="prod",
        nodegroup="gpu-a",
        capacity_reservation_id="cr-1",
        new_instances_protected=True,
    )
    group = group_of(autoscaling)
    assert (group["MinSize"], group["DesiredCapacity"], group["MaxSize"]) == (1, 3, 5)
    assert group["AutoScalingGroupARN"].endswith(":autoScalingGroupName/gpu")
    assert group["AvailabilityZones"] == list(ZONES)
    assert len(group["VPCZoneIdentifier"].split(",")) == 2
    assert {tag["Key"]: tag["Value"] for tag in group["Tags"]} == {
        "kubernetes.io/cluster/prod": "owned",
        "eks:cluster-name": "prod",
        "eks:nodegroup-name": "gpu-a",
    }
    assert group["SuspendedProcesses"] == []
    assert group["LaunchTemplate"]["LaunchTemplateName"] == "gpu-template"
    target = group["CapacityReservationSpecification"]["CapacityReservationTarget"]
    assert target["CapacityReservationIds"] == ["cr-1"]
    zones = [member["AvailabilityZone"] for member in group["Instances"]]
    assert zones == ["us-east-1a", "us-east-1b", "us-east-1a"]
    first = group["Instances"][0]
    assert first["LifecycleState"] == "InService"
    assert first["HealthStatus"] == "Healthy"
    assert first["InstanceType"] == "p5.48xlarge"
    assert first["ProtectedFromScaleIn"] is True
    assert first["InstanceId"].startswith("i-0")
    assert len(first["InstanceId"]) == 19


def test_instances_can_be_left_out_of_a_group_listing(model, autoscaling):
    model.add_group("gpu", desired=2)
    answer = autoscaling.describe_auto_scaling_groups(IncludeInstances=False)
    assert answer["AutoScalingGroups"][0]["Instances"] == []


def test_an_unknown_group_name_is_left_out_without_an_error(autoscaling):
    answer = autoscaling.describe_auto_scaling_groups(AutoScalingGroupNames=["nobody"])
    assert answer["AutoScalingGroups"] == []


def test_120_groups_come_in_pages_and_each_once(model, autoscaling):
    for number in range(120):
        model.add_group(f"group-{number:03d}", desired=0)
    first = autoscaling.describe_auto_scaling_groups()
    assert len(first["AutoScalingGroups"]) == 50
    pages = list(
        autoscaling.get_paginator("describe_auto_scaling_groups").paginate(
            PaginationConfig={"PageSize": 100}
        )
    )
    assert [len(page["AutoScalingGroups"]) for page in pages] == [100, 20]
    names = [group["AutoScalingGroupName"] for page in pages for group in page["AutoScalingGroups"]]
    assert names == [f"group-{number:03d}" for number in range(120)]


def test_a_group_added_between_two_pages_shifts_nothing(model, autoscaling):
    for name in ("b", "c", "d"):
        model.add_group(name, desired=0)
    first = autoscaling.describe_auto_scaling_groups(MaxRecords=2)
    model.add_group("a", desired=0)
    second = autoscaling.describe_auto_scaling_groups(MaxRecords=2, NextToken=first["NextToken"])
    assert [group["AutoScalingGroupName"] for group in second["AutoScalingGroups"]] == ["d"]
    assert "NextToken" not in second


def test_a_foreign_paging_token_is_refused(autoscaling):
    with pytest.raises(ClientError) as error:
        autoscaling.describe_auto_scaling_groups(NextToken="not-a-token")
    assert refusal(error)[0] == "InvalidNextToken"


def test_more_records_than_a_hundred_are_refused(autoscaling):
    with pytest.raises(ClientError) as error:
        autoscaling.describe_auto_scaling_groups(MaxRecords=101)
    assert refusal(error)[0] == "ValidationError"


def test_more_than_fifty_names_need_max_records(model, autoscaling):
    names = [f"g{number}" for number in range(51)]
    with pytest.raises(ClientError) as error:
        autoscaling.describe_auto_scaling_groups(AutoScalingGroupNames=names)
    assert refusal(error)[0] == "ValidationError"
    model.add_group("g50", desired=0)
    answer = autoscaling.describe_auto_scaling_groups(AutoScalingGroupNames=names, MaxRecords=60)
    assert [group["AutoScalingGroupName"] for group in answer["AutoScalingGroups"]] == ["g50"]


def test_tag_filters_are_alternatives_inside_and_conditions_between(model, autoscaling):
    model.add_group("a", desired=0, cluster="prod", nodegroup="one")
    model.add_group("b", desired=0, cluster="prod", nodegroup="two")
    model.add_group("c", desired=0, cluster="test", nodegroup="one")

    def found(*filters: Any) -> list[str]:
        answer = autoscaling.describe_auto_scaling_groups(Filters=list(filters))
        return [group["AutoScalingGroupName"] for group in answer["AutoScalingGroups"]]

    assert found({"Name": "tag-key", "Values": ["kubernetes.io/cluster/prod"]}) == ["a", "b"]
    assert found({"Name": "tag:eks:cluster-name", "Values": ["prod", "test"]}) == ["a", "b", "c"]
    assert found(
        {"Name": "tag:eks:cluster-name", "Values": ["prod"]},
        {"Name": "tag:eks:nodegroup-name", "Values": ["one"]},
    ) == ["a"]
    assert found({"Name": "tag-value", "Values": ["two"]}) == ["b"]
    assert found({"Name": "tag:eks:cluster-name", "Values": ["PROD"]}) == []
    with pytest.raises(ClientError) as error:
        found({"Name": "name", "Values": ["a"]})
    assert refusal(error)[0] == "ValidationError"


def test_auto_scaling_instances_are_found_across_groups(model, autoscaling):
    model.add_group("a", desired=1)
    model.add_group("b", desired=1)
    static = model.add_static_instance()
    everything = autoscaling.describe_auto_scaling_instances()["AutoScalingInstances"]
    assert sorted(item["AutoScalingGroupName"] for item in everything) == ["a", "b"]
    wanted = model.members("b")[0].instance_id
    found = autoscaling.describe_auto_scaling_instances(
        InstanceIds=[wanted, static.instance_id, "i-0000000000000dead"]
    )["AutoScalingInstances"]
    assert [(item["InstanceId"], item["AutoScalingGroupName"]) for item in found] == [(wanted, "b")]
    assert found[0]["LifecycleState"] == "InService"
    assert found[0]["HealthStatus"] == "HEALTHY"


def test_auto_scaling_instances_page_by_fifty(model, autoscaling):
    model.add_group("gpu", desired=120)
    pages = list(autoscaling.get_paginator("describe_auto_scaling_instances").paginate())
    assert [len(page["AutoScalingInstances"]) for page in pages] == [50, 50, 20]


def test_lifecycle_hooks_and_refreshes_are_empty_until_injected(model, autoscaling):
    model.add_group("gpu", desired=1, hooks=[LifecycleHook("drain", TERMINATING, 300)])
    model.add_group("bare", desired=0)
    hooks = autoscaling.describe_lifecycle_hooks(AutoScalingGroupName="gpu")["LifecycleHooks"]
    assert [(hook["LifecycleHookName"], hook["HeartbeatTimeout"]) for hook in hooks] == [
        ("drain", 300)
    ]
    assert autoscaling.describe_lifecycle_hooks(AutoScalingGroupName="bare")["LifecycleHooks"] == []

    def refreshes() -> list[Any]:
        answer = autoscaling.describe_instance_refreshes(AutoScalingGroupName="gpu")
        return list(answer["InstanceRefreshes"])

    assert refreshes() == []
    model.set_refreshes("gpu", [InstanceRefresh("refresh-1", started_at=0.0, percentage=40)])
    (refresh,) = refreshes()
    assert refresh["Status"] == "InProgress"
    assert refresh["PercentageComplete"] == 40
    assert refresh["StartTime"] == datetime(1970, 1, 1, tzinfo=UTC)
    assert "EndTime" not in refresh


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.describe_lifecycle_hooks(AutoScalingGroupName="x"),
        lambda client: client.describe_instance_refreshes(AutoScalingGroupName="x"),
        lambda client: client.describe_scaling_activities(AutoScalingGroupName="x"),
        lambda client: client.suspend_processes(AutoScalingGroupName="x"),
        lambda client: client.resume_processes(AutoScalingGroupName="x"),
        lambda client: client.set_desired_capacity(AutoScalingGroupName="x", DesiredCapacity=1),
        lambda client: client.exit_standby(AutoScalingGroupName="x", InstanceIds=["i-1"]),
    ],
)
def test_an_unknown_group_is_a_validation_error(autoscaling, call):
    with pytest.raises(ClientError) as error:
        call(autoscaling)
    code, message, status = refusal(error)
    assert (code, status) == ("ValidationError", 400)
    assert "not found" in message


# --- termination and replacement --------------------------------------------------------------


def test_a_replacement_runs_through_its_states_in_time(model, autoscaling, ec2, clock, heard):
    model.add_group("gpu", desired=2, timing=TIMING)
    sick, healthy = list(states(autoscaling))
    activity = autoscaling.terminate_instance_in_auto_scaling_group(
        InstanceId=sick, ShouldDecrementDesiredCapacity=False
    )["Activity"]
    assert activity["StatusCode"] == "InProgress"
    assert activity["Progress"] == 0
    assert activity["Description"] == f"Terminating EC2 instance: {sick}"
    assert activity["Cause"] == (
        f"At 2026-01-01T00:00:00Z instance {sick} was taken out of service in response to a user "
        "request."
    )
    assert "EndTime" not in activity
    assert '"Availability Zone":"us-east-1a"' in activity["Details"]
    assert states(autoscaling) == {sick: "Terminating", healthy: "InService"}
    assert heard == [("shutdown", sick)]

    clock.forward(29)
    assert list(states(autoscaling)) == [sick, healthy]
    clock.forward(1)
    new = list(states(autoscaling))[-1]
    assert states(autoscaling) == {sick: "Terminating", healthy: "InService", new: "Pending"}
    described = ec2.describe_instances(InstanceIds=[new])["Reservations"][0]["Instances"][0]
    assert described["State"] == {"Code": 0, "Name": "pending"}
    assert described["LaunchTime"] == datetime(2026, 1, 1, 0, 0, 30, tzinfo=UTC)

    clock.forward(20)
    assert states(autoscaling)[new] == "InService"
    assert heard[-1] == ("launch", new)
    clock.forward(9)
    assert states(autoscaling)[sick] == "Terminating"
    clock.forward(1)
    assert states(autoscaling) == {healthy: "InService", new: "InService"}
    assert heard == [("shutdown", sick), ("launch", new), ("terminate", sick)]

    records = activities(autoscaling)
    assert [(item["StatusCode"], item["Progress"]) for item in records] == [
        ("Successful", 100),
        ("Successful", 100),
    ]
    assert records[0]["Description"] == f"Launching a new EC2 instance: {new}"
    assert records[0]["Cause"].endswith(
        "an instance was started in response to a difference between desired and actual capacity, "
        "increasing the capacity from 1 to 2."
    )
    assert records[1]["ActivityId"] == activity["ActivityId"]
    assert (records[1]["EndTime"] - records[1]["StartTime"]).total_seconds() == 60


@pytest.mark.case("R34")
def test_a_second_termination_is_refused_while_the_first_runs_and_after_it(
    model, autoscaling, clock, heard
):
    model.add_group("gpu", desired=2, timing=TIMING)
    sick = model.members("gpu")[0].instance_id

    def terminate() -> Any:
        return autoscaling.terminate_instance_in_auto_scaling_group(
            InstanceId=sick, ShouldDecrementDesiredCapacity=False
        )

    activity_id = terminate()["Activity"]["ActivityId"]
    with pytest.raises(autoscaling.exceptions.ScalingActivityInProgressFault) as error:
        terminate()
    assert refusal(error) == (
        "ScalingActivityInProgress",
        f"Activity {activity_id} is in progress.",
        400,
    )
    clock.forward(61)
    with pytest.raises(ClientError) as gone:
        terminate()
    assert refusal(gone) == (
        "ValidationError",
        f"Instance Id not found - No managed instance found for instance ID {sick}",
        400,
    )
    assert [call for call in heard if call[0] == "terminate"] == [("terminate", sick)]
    assert len(model.members("gpu")) == 2


def test_an_instance_outside_any_group_is_not_managed(model, autoscaling):
    static = model.add_static_instance()
    with pytest.raises(ClientError) as error:
        autoscaling.terminate_instance_in_auto_scaling_group(
            InstanceId=static.instance_id, ShouldDecrementDesiredCapacity=False
        )
    assert refusal(error)[0] == "ValidationError"
    assert "No managed instance found" in refusal(error)[1]


def test_an_arriving_instance_cannot_be_terminated_yet(model, autoscaling, clock):
    model.add_group("gpu", desired=0, max_size=1, timing=TIMING)
    model.set_desired("gpu", 1)
    clock.forward(31)
    (new,) = states(autoscaling)
    with pytest.raises(ClientError) as error:
        autoscaling.terminate_instance_in_auto_scaling_group(
            InstanceId=new, ShouldDecrementDesiredCapacity=False
        )
    assert refusal(error)[0] == "ScalingActivityInProgress"


@pytest.mark.case("R63")
def test_a_decrement_takes_the_capacity_away_for_good(model, autoscaling, clock):
    model.add_group("gpu", desired=3, min_size=2, timing=TIMING)
    first, second, _ = states(autoscaling)
    activity = autoscaling.terminate_instance_in_auto_scaling_group(
        InstanceId=first, ShouldDecrementDesiredCapacity=True
    )["Activity"]
    assert activity["Cause"].endswith("shrinking the capacity from 3 to 2.")
    clock.forward(3600)
    assert group_of(autoscaling)["DesiredCapacity"] == 2
    assert len(states(autoscaling)) == 2
    with pytest.raises(ClientError) as error:
        autoscaling.terminate_instance_in_auto_scaling_group(
            InstanceId=second, ShouldDecrementDesiredCapacity=True
        )
    code, message, _status = refusal(error)
    assert code == "ValidationError"
    assert message.startswith("Currently, desiredSize equals minSize (2).")
    assert states(autoscaling)[second] == "InService"


def test_several_instances_are_terminated_together_or_not_at_all(model, autoscaling):
    model.add_group("gpu", desired=3)
    model.add_group("other", desired=1)
    first, second, third = states(autoscaling)
    answer = autoscaling.terminate_instance_in_auto_scaling_group(
        InstanceIds=[first, second],
        AutoScalingGroupName="gpu",
        ShouldDecrementDesiredCapacity=False,
    )
    assert len(answer["Activities"]) == 2
    assert "Activity" not in answer
    stranger = model.members("other")[0].instance_id
    with pytest.raises(ClientError) as error:
        autoscaling.terminate_instance_in_auto_scaling_group(
            InstanceIds=[third, stranger],
            AutoScalingGroupName="gpu",
            ShouldDecrementDesiredCapacity=False,
        )
    assert refusal(error)[1] == f"The instance {stranger} is not part of Auto Scaling group gpu."
    assert states(autoscaling)[third] == "InService"


@pytest.mark.case("R65")
def test_a_suspended_launch_leaves_the_group_short_until_it_is_resumed(model, autoscaling, clock):
    model.add_group("gpu", desired=2, timing=TIMING)
    sick = model.members("gpu")[0].instance_id
    autoscaling.suspend_processes(AutoScalingGroupName="gpu", ScalingProcesses=["Launch"])
    (suspended,) = group_of(autoscaling)["SuspendedProcesses"]
    assert suspended["ProcessName"] == "Launch"
    assert suspended["SuspensionReason"] == "User suspended at 2026-01-01T00:00:00Z"
    autoscaling.terminate_instance_in_auto_scaling_group(
        InstanceId=sick, ShouldDecrementDesiredCapacity=False
    )
    clock.forward(7200)
    assert len(states(autoscaling)) == 1
    assert group_of(autoscaling)["DesiredCapacity"] == 2
    autoscaling.resume_processes(AutoScalingGroupName="gpu", ScalingProcesses=["Launch"])
    assert group_of(autoscaling)["SuspendedProcesses"] == []
    clock.forward(50)
    assert sorted(states(autoscaling).values()) == ["InService", "InService"]


def test_processes_unnamed_are_all_processes(model, autoscaling):
    model.add_group("gpu", desired=0)
    autoscaling.suspend_processes(AutoScalingGroupName="gpu")
    assert len(group_of(autoscaling)["SuspendedProcesses"]) == 9
    autoscaling.resume_processes(AutoScalingGroupName="gpu", ScalingProcesses=["Terminate"])
    assert len(group_of(autoscaling)["SuspendedProcesses"]) == 8
    autoscaling.resume_processes(AutoScalingGroupName="gpu")
    assert group_of(autoscaling)["SuspendedProcesses"] == []
    with pytest.raises(ClientError) as error:
        autoscaling.suspend_processes(AutoScalingGroupName="gpu", ScalingProcesses=["Lunch"])
    assert refusal(error)[0] == "ValidationError"


@pytest.mark.case("R62")
def test_missing_capacity_fails_activities_until_it_is_there(model, autoscaling, clock):
    model.add_group("gpu", desired=1, zones=ZONES, timing=TIMING)
    model.set_shortage("gpu", Shortage(tries=2))
    sick = model.members("gpu")[0].instance_id
    autoscaling.terminate_instance_in_auto_scaling_group(
        InstanceId=sick, ShouldDecrementDesiredCapacity=False
    )
    clock.forward(30)
    running, failed = activities(autoscaling)
    assert running["StatusCode"] == "InProgress"
    assert failed["StatusCode"] == "Failed"
    assert failed["Progress"] == 100
    assert failed["StatusMessage"] == (
        "Could not launch On-Demand Instances. InsufficientInstanceCapacity - We currently do not "
        "have sufficient p5.48xlarge capacity in the Availability Zone you requested (us-east-1a). "
        "Our system will be working on provisioning additional capacity. You can currently get "
        "p5.48xlarge capacity by not specifying an Availability Zone in your request or choosing "
        "us-east-1b. Launching EC2 instance failed."
    )
    assert failed["Description"].startswith("Launching a new EC2 instance.  Status Reason: ")
    clock.forward(9)
    assert [item["StatusCode"] for item in activities(autoscaling)].count("Failed") == 1
    clock.forward(1)  # second try after 10 s, third after 20 s more
    assert [item["StatusCode"] for item in activities(autoscaling)].count("Failed") == 2
    clock.forward(40)
    assert list(states(autoscaling).values()) == ["InService"]
    assert [item["StatusCode"] for item in activities(autoscaling)].count("Failed") == 2


def test_a_shortage_can_last_until_a_time(model, autoscaling, clock):
    model.add_group("gpu", desired=0, max_size=1, timing=TIMING)
    model.set_shortage("gpu", Shortage(until=clock() + 600))
    autoscaling.set_desired_capacity(AutoScalingGroupName="gpu", DesiredCapacity=1)
    clock.forward(599)
    assert states(autoscaling) == {}
    clock.forward(200)
    assert list(states(autoscaling).values()) == ["InService"]


@pytest.mark.case("R62")
def test_a_full_reservation_gives_a_slot_back_only_after_its_cleanup(
    model, autoscaling, ec2, clock
):
    model.add_reservation(
        Reservation(
            "cr-1", "p5.48xlarge", "us-east-1a", total=2, kind="capacity-block", cleanup_s=300
        )
    )
    model.add_group("gpu", desired=2, capacity_reservation_id="cr-1", timing=TIMING)

    def available() -> int:
        answer = ec2.describe_capacity_reservations(CapacityReservationIds=["cr-1"])
        return int(answer["CapacityReservations"][0]["AvailableInstanceCount"])

    assert available() == 0
    sick = model.members("gpu")[0].instance_id
    autoscaling.terminate_instance_in_auto_scaling_group(
        InstanceId=sick, ShouldDecrementDesiredCapacity=False
    )
    clock.forward(30)
    failed = activities(autoscaling)[1]
    assert "ReservationCapacityExceeded" in failed["StatusMessage"]
    clock.forward(31)
    assert available() == 0
    clock.forward(300)
    assert available() == 1
    clock.forward(120)
    assert available() == 0
    assert sorted(states(autoscaling).values()) == ["InService", "InService"]


def test_activities_can_be_filtered_and_paged(model, autoscaling, clock):
    model.add_group("gpu", desired=4, timing=TIMING)
    model.add_group("other", desired=1, timing=TIMING)
    ids = []
    for member in model.members("gpu"):
        answer = autoscaling.terminate_instance_in_auto_scaling_group(
            InstanceId=member.instance_id, ShouldDecrementDesiredCapacity=True
        )
        ids.append(answer["Activity"]["ActivityId"])
        clock.forward(10)
    model.terminate_in_group(model.members("other")[0].instance_id, decrement=True)
    assert len(autoscaling.describe_scaling_activities()["Activities"]) == 5
    pages = list(
        autoscaling.get_paginator("describe_scaling_activities").paginate(
            AutoScalingGroupName="gpu", PaginationConfig={"PageSize": 3}
        )
    )
    found = [item["ActivityId"] for page in pages for item in page["Activities"]]
    assert found == ids[::-1]
    one = autoscaling.describe_scaling_activities(ActivityIds=[ids[2], "nobody"])["Activities"]
    assert [item["ActivityId"] for item in one] == [ids[2]]

    def filtered(name: str, value: str) -> list[str]:
        answer = autoscaling.describe_scaling_activities(
            AutoScalingGroupName="gpu", Filters=[{"Name": name, "Values": [value]}]
        )
        return [item["ActivityId"] for item in answer["Activities"]]

    assert filtered("StartTimeLowerBound", "2026-01-01T00:00:15Z") == [ids[3], ids[2]]
    assert filtered("StartTimeUpperBound", "2026-01-01T02:00:05+02:00") == [ids[0]]
    clock.forward(35)
    assert filtered("Status", "Successful") == [ids[1], ids[0]]
    with pytest.raises(ClientError):
        filtered("Colour", "red")
    with pytest.raises(ClientError):
        filtered("StartTimeLowerBound", "yesterday")
    with pytest.raises(ClientError):
        autoscaling.describe_scaling_activities(Filters=[{"Name": "Status", "Values": ["Failed"]}])


# --- hooks, standby, health, desired, tags ----------------------------------------------------


def test_a_termination_hook_holds_the_instance_until_it_is_completed(
    model, autoscaling, ec2, clock
):
    hook = LifecycleHook("drain", TERMINATING, 600)
    model.add_group("gpu", desired=1, timing=TIMING, hooks=[hook])
    sick = model.members("gpu")[0].instance_id
    activity = autoscaling.terminate_instance_in_auto_scaling_group(
        InstanceId=sick, ShouldDecrementDesiredCapacity=False
    )["Activity"]
    assert activity["StatusCode"] == "MidLifecycleAction"
    clock.forward(300)
    assert states(autoscaling)[sick] == "Terminating:Wait"
    state = ec2.describe_instances(InstanceIds=[sick])["Reservations"][0]["Instances"][0]["State"]
    assert state["Name"] == "running"
    with pytest.raises(ClientError) as error:
        autoscaling.complete_lifecycle_action(
            LifecycleHookName="other",
            AutoScalingGroupName="gpu",
            LifecycleActionResult="CONTINUE",
            InstanceId=sick,
        )
    assert refusal(error)[0] == "ValidationError"
    autoscaling.complete_lifecycle_action(
        LifecycleHookName="drain",
        AutoScalingGroupName="gpu",
        LifecycleActionResult="CONTINUE",
        InstanceId=sick,
    )
    assert states(autoscaling)[sick] == "Terminating:Proceed"
    clock.forward(60)
    assert sick not in states(autoscaling)


def test_a_termination_hook_runs_out_by_itself(model, autoscaling, clock):
    model.add_group(
        "gpu", desired=1, timing=TIMING, hooks=[LifecycleHook("drain", TERMINATING, 600)]
    )
    sick = model.members("gpu")[0].instance_id
    model.terminate_in_group(sick, decrement=True)
    clock.forward(600)
    assert states(autoscaling) == {sick: "Terminating:Proceed"}
    clock.forward(60)
    assert states(autoscaling) == {}


def test_a_launch_hook_holds_a_running_instance_and_can_abandon_it(
    model, autoscaling, clock, heard
):
    hook = LifecycleHook("warm", LAUNCHING, 600)
    model.add_group("gpu", desired=0, max_size=1, timing=TIMING, hooks=[hook])
    autoscaling.set_desired_capacity(AutoScalingGroupName="gpu", DesiredCapacity=1)
    clock.forward(50)
    (new,) = states(autoscaling)
    assert states(autoscaling) == {new: "Pending:Wait"}
    assert heard == [("launch", new)]
    assert activities(autoscaling)[0]["StatusCode"] == "MidLifecycleAction"
    autoscaling.complete_lifecycle_action(
        LifecycleHookName="warm",
        AutoScalingGroupName="gpu",
        LifecycleActionResult="ABANDON",
        InstanceId=new,
    )
    assert states(autoscaling) == {new: "Terminating"}
    launch = next(a for a in activities(autoscaling) if a["Description"].startswith("Launching"))
    assert launch["StatusCode"] == "Cancelled"
    clock.forward(700)
    assert list(states(autoscaling).values()) == ["InService"]


def test_standby_without_decrement_brings_another_instance(model, autoscaling, clock):
    model.add_group("gpu", desired=2, min_size=2, max_size=3, timing=TIMING)
    first, second = states(autoscaling)
    answer = autoscaling.enter_standby(
        AutoScalingGroupName="gpu", InstanceIds=[first], ShouldDecrementDesiredCapacity=False
    )
    assert answer["Activities"][0]["Description"] == f"Moving EC2 instance to Standby: {first}"
    assert states(autoscaling)[first] == "EnteringStandby"
    clock.forward(60)
    assert sorted(states(autoscaling).values()) == ["InService", "InService", "Standby"]
    with pytest.raises(ClientError) as error:
        autoscaling.enter_standby(
            AutoScalingGroupName="gpu", InstanceIds=[second], ShouldDecrementDesiredCapacity=True
        )
    assert "min-size=2" in refusal(error)[1]
    with pytest.raises(ClientError) as again:
        autoscaling.enter_standby(
            AutoScalingGroupName="gpu", InstanceIds=[first], ShouldDecrementDesiredCapacity=False
        )
    assert refusal(again)[1] == f"The instance {first} is not in InService."
    back = autoscaling.exit_standby(AutoScalingGroupName="gpu", InstanceIds=[first])
    assert back["Activities"][0]["Cause"].endswith("increasing the capacity from 2 to 3.")
    assert states(autoscaling)[first] == "Pending"
    clock.forward(1)
    assert list(states(autoscaling).values()) == ["InService"] * 3
    with pytest.raises(ClientError) as not_there:
        autoscaling.exit_standby(AutoScalingGroupName="gpu", InstanceIds=[second])
    assert refusal(not_there)[1] == f"The instance {second} is not in Standby."


def test_standby_with_decrement_launches_nothing(model, autoscaling, clock):
    model.add_group("gpu", desired=2, timing=TIMING)
    first, _second = states(autoscaling)
    autoscaling.enter_standby(
        AutoScalingGroupName="gpu", InstanceIds=[first], ShouldDecrementDesiredCapacity=True
    )
    clock.forward(3600)
    assert sorted(states(autoscaling).values()) == ["InService", "Standby"]
    assert group_of(autoscaling)["DesiredCapacity"] == 1
    with pytest.raises(ClientError) as error:
        autoscaling.exit_standby(AutoScalingGroupName="gpu", InstanceIds=["i-00000000000000000"])
    assert "is not part of Auto Scaling group gpu" in refusal(error)[1]


def test_an_unhealthy_instance_is_replaced_unless_it_is_young(model, autoscaling, clock):
    model.add_group("gpu", desired=1, timing=TIMING, age_s=100, health_check_grace_s=300)
    sick = model.members("gpu")[0].instance_id
    autoscaling.set_instance_health(InstanceId=sick, HealthStatus="Unhealthy")
    assert group_of(autoscaling)["Instances"][0]["HealthStatus"] == "Healthy"
    autoscaling.set_instance_health(
        InstanceId=sick, HealthStatus="Unhealthy", ShouldRespectGracePeriod=False
    )
    assert states(autoscaling) == {sick: "Terminating"}
    clock.forward(100)
    assert sick not in states(autoscaling)
    launched = activities(autoscaling)[0]
    assert launched["Cause"].endswith(
        "an instance was launched in response to an unhealthy instance needing to be replaced."
    )
    assert activities(autoscaling)[1]["Cause"].endswith(
        "taken out of service in response to a user health-check."
    )


@pytest.mark.parametrize("process", ["ReplaceUnhealthy", "HealthCheck"])
def test_an_unhealthy_instance_stays_while_its_replacement_is_suspended(
    model, autoscaling, clock, process
):
    model.add_group("gpu", desired=1, timing=TIMING)
    sick = model.members("gpu")[0].instance_id
    autoscaling.suspend_processes(AutoScalingGroupName="gpu", ScalingProcesses=[process])
    autoscaling.set_instance_health(InstanceId=sick, HealthStatus="Unhealthy")
    clock.forward(3600)
    assert states(autoscaling) == {sick: "InService"}
    autoscaling.resume_processes(AutoScalingGroupName="gpu", ScalingProcesses=[process])
    assert states(autoscaling) == {sick: "Terminating"}


def test_a_health_state_must_be_one_of_two(model, autoscaling):
    model.add_group("gpu", desired=1)
    sick = model.members("gpu")[0].instance_id
    with pytest.raises(ClientError) as error:
        autoscaling.set_instance_health(InstanceId=sick, HealthStatus="Poorly")
    assert refusal(error)[0] == "ValidationError"
    with pytest.raises(ClientError) as unknown:
        autoscaling.set_instance_health(InstanceId="i-00000000000000000", HealthStatus="Healthy")
    assert "No managed instance found" in refusal(unknown)[1]


def test_desired_capacity_keeps_to_its_bounds_and_scales_in_the_fullest_zone(
    model, autoscaling, clock
):
    model.add_group("gpu", desired=3, min_size=1, max_size=4, zones=ZONES, timing=TIMING)
    for desired, word in ((5, "above max value 4"), (0, "below min value 1")):
        with pytest.raises(ClientError) as error:
            autoscaling.set_desired_capacity(AutoScalingGroupName="gpu", DesiredCapacity=desired)
        assert word in refusal(error)[1]
    autoscaling.set_desired_capacity(AutoScalingGroupName="gpu", DesiredCapacity=2)
    clock.forward(60)
    zones = [member["AvailabilityZone"] for member in group_of(autoscaling)["Instances"]]
    assert sorted(zones) == list(ZONES)
    assert "was selected for termination" in activities(autoscaling)[0]["Cause"]
    autoscaling.set_desired_capacity(AutoScalingGroupName="gpu", DesiredCapacity=4)
    clock.forward(31)
    with pytest.raises(autoscaling.exceptions.ScalingActivityInProgressFault):
        autoscaling.set_desired_capacity(
            AutoScalingGroupName="gpu", DesiredCapacity=3, HonorCooldown=True
        )
    clock.forward(60)
    assert len(states(autoscaling)) == 4


def test_tags_are_added_and_changed(model, autoscaling):
    model.add_group("gpu", desired=0, tags={"team": "a"})
    autoscaling.create_or_update_tags(
        Tags=[
            {"ResourceId": "gpu", "ResourceType": "auto-scaling-group", "Key": key, "Value": value}
            for key, value in (("team", "b"), ("cost", "1 & <2>"))
        ]
    )
    tags = {tag["Key"]: tag["Value"] for tag in group_of(autoscaling)["Tags"]}
    assert tags == {"team": "b", "cost": "1 & <2>"}
    with pytest.raises(ClientError):
        autoscaling.create_or_update_tags(Tags=[{"ResourceId": "nobody", "Key": "a", "Value": "b"}])


# --- refusals, behaviours, call log -----------------------------------------------------------


def test_a_denied_action_is_an_access_denied(model, autoscaling, server):
    model.add_group("gpu", desired=1)
    server.autoscaling.denied.add("TerminateInstanceInAutoScalingGroup")
    sick = model.members("gpu")[0].instance_id
    with pytest.raises(ClientError) as error:
        autoscaling.terminate_instance_in_auto_scaling_group(
            InstanceId=sick, ShouldDecrementDesiredCapacity=False
        )
    code, message, status = refusal(error)
    assert (code, status) == ("AccessDenied", 403)
    assert "autoscaling:TerminateInstanceInAutoScalingGroup" in message
    assert states(autoscaling) == {sick: "InService"}


def test_an_action_outside_the_model_is_invalid(autoscaling):
    with pytest.raises(ClientError) as error:
        autoscaling.describe_warm_pool(AutoScalingGroupName="gpu")
    assert refusal(error)[0] == "InvalidAction"


def test_yes_can_be_said_without_the_deed(model, autoscaling, server, clock, heard):
    model.add_group("gpu", desired=1, timing=TIMING)
    sick = model.members("gpu")[0].instance_id
    server.autoscaling.behaviours["TerminateInstanceInAutoScalingGroup"] = Behaviour(
        effect=Effect.NOTHING, times=1
    )

    def terminate() -> str:
        answer = autoscaling.terminate_instance_in_auto_scaling_group(
            InstanceId=sick, ShouldDecrementDesiredCapacity=False
        )
        return str(answer["Activity"]["ActivityId"])

    pretended = terminate()
    clock.forward(3600)
    assert states(autoscaling) == {sick: "InService"}
    assert activities(autoscaling) == []
    assert heard == []
    assert terminate() != pretended
    assert states(autoscaling) == {sick: "Terminating"}


def test_the_deed_can_be_done_and_the_answer_come_too_late(model, autoscaling, server):
    model.add_group("gpu", desired=1, timing=TIMING)
    sick = model.members("gpu")[0].instance_id
    server.autoscaling.behaviours["TerminateInstanceInAutoScalingGroup"] = Behaviour(
        delay_s=30, target=sick
    )
    hasty = boto3.client(
        "autoscaling",
        region_name="us-east-1",
        endpoint_url=server.url,
        aws_access_key_id="test",
        aws_secret_access_key="test",
        config=Config(retries={"total_max_attempts": 1}, read_timeout=0.2),
    )
    with pytest.raises(ReadTimeoutError):
        hasty.terminate_instance_in_auto_scaling_group(
            InstanceId=sick, ShouldDecrementDesiredCapacity=False
        )
    hasty.close()
    assert states(autoscaling) == {sick: "Terminating"}


def test_the_deed_can_be_done_and_the_answer_be_an_error(model, autoscaling, server):
    model.add_group("gpu", desired=2, timing=TIMING)
    first, second = states(autoscaling)
    server.autoscaling.behaviours["TerminateInstanceInAutoScalingGroup"] = Behaviour(
        error=AwsAnswerError("ResourceContention", "You have a pending update.", 500), target=first
    )
    with pytest.raises(autoscaling.exceptions.ResourceContentionFault) as error:
        autoscaling.terminate_instance_in_auto_scaling_group(
            InstanceId=first, ShouldDecrementDesiredCapacity=False
        )
    assert refusal(error)[2] == 500
    autoscaling.terminate_instance_in_auto_scaling_group(
        InstanceId=second, ShouldDecrementDesiredCapacity=False
    )
    assert list(states(autoscaling).values()) == ["Terminating", "Terminating"]


def test_a_decrement_repeated_at_once_is_refused_the_second_time(model, autoscaling, server):
    model.add_group("gpu", desired=3, timing=TIMING)
    server.autoscaling.behaviours["TerminateInstanceInAutoScalingGroup"] = Behaviour(
        effect=Effect.TWICE
    )
    autoscaling.terminate_instance_in_auto_scaling_group(
        InstanceId=model.members("gpu")[0].instance_id, ShouldDecrementDesiredCapacity=True
    )
    assert group_of(autoscaling)["DesiredCapacity"] == 2
    assert list(states(autoscaling).values()) == ["Terminating", "InService", "InService"]


def test_calls_are_described_for_the_log(model, autoscaling, ec2, server):
    model.add_group("gpu", desired=1)
    sick = model.members("gpu")[0].instance_id
    states(autoscaling)
    autoscaling.describe_auto_scaling_instances()
    autoscaling.terminate_instance_in_auto_scaling_group(
        InstanceId=sick, ShouldDecrementDesiredCapacity=False
    )
    with pytest.raises(ClientError):
        autoscaling.terminate_instance_in_auto_scaling_group(
            InstanceId=sick, ShouldDecrementDesiredCapacity=False
        )
    with pytest.raises(ClientError):
        ec2.reboot_instances(InstanceIds=[sick], DryRun=True)
    logged = [
        (call.service, call.verb, call.target, call.status, call.is_mutation)
        for call in server.log.calls()
    ]
    assert logged == [
        ("autoscaling", "DescribeAutoScalingGroups", "gpu", 200, False),
        ("autoscaling", "DescribeAutoScalingInstances", "*", 200, False),
        ("autoscaling", "TerminateInstanceInAutoScalingGroup", sick, 200, True),
        ("autoscaling", "TerminateInstanceInAutoScalingGroup", sick, 400, False),
        ("ec2", "RebootInstances", sick, 412, False),
    ]


def test_time_passes_by_itself_once_the_model_is_started(heard):

    launched = threading.Event()
    model = CapacityModel(hooks=CapacityHooks(on_launch=lambda _instance: launched.set()))
    model.add_group(
        "gpu",
        desired=1,
        timing=Timing(terminate_s=math.inf, launch_delay_s=0.05, pending_s=0.05),
    )
    model.start()
    try:
        with CapacityServer(model) as server:
            client = boto3.client(
                "autoscaling",
                region_name="us-east-1",
                endpoint_url=server.url,
                aws_access_key_id="test",
                aws_secret_access_key="test",
            )
            sick = model.members("gpu")[0].instance_id
            client.terminate_instance_in_auto_scaling_group(
                InstanceId=sick, ShouldDecrementDesiredCapacity=False
            )
            assert launched.wait(10)
            assert sorted(states(client).values()) == ["InService", "Terminating"]
            client.close()
    finally:
        model.stop()
