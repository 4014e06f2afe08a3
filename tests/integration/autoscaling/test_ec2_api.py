"""Every EC2 action through boto3."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from botocore.exceptions import ClientError

from local.aws.autoscaling import Behaviour, Effect
from local.aws.autoscaling_types import Lifecycle, Reservation, ScheduledEvent, Shortage, Timing

TIMING = Timing(terminate_s=60, launch_delay_s=30, pending_s=20, stop_s=40, start_s=25, reboot_s=90)


def refusal(error: pytest.ExceptionInfo[ClientError]) -> tuple[str, str, int]:
    response = error.value.response
    return (
        response["Error"]["Code"],
        response["Error"]["Message"],
        response["ResponseMetadata"]["HTTPStatusCode"],
    )


def one(ec2: Any, instance_id: str) -> Any:
    (reservation,) = ec2.describe_instances(InstanceIds=[instance_id])["Reservations"]
    (instance,) = reservation["Instances"]
    return instance


def found(ec2: Any, *filters: Any) -> list[str]:
    pages = ec2.get_paginator("describe_instances").paginate(Filters=list(filters))
    return [
        instance["InstanceId"]
        for page in pages
        for reservation in page["Reservations"]
        for instance in reservation["Instances"]
    ]


def test_an_instance_of_a_group_shows_where_it_belongs(model, ec2):
    model.add_group(
        "gpu",
        desired=1,
        cluster="prod",
        nodegroup="gpu-a",
        capacity_reservation_id="cr-1",
        capacity_block_id="cb-1",
        purchase="capacity-block",
    )
    member = model.members("gpu")[0]
    instance = one(ec2, member.instance_id)
    assert instance["State"] == {"Code": 16, "Name": "running"}
    assert instance["PrivateDnsName"] == member.private_dns
    assert instance["PrivateDnsName"] == (
        f"ip-{instance['PrivateIpAddress'].replace('.', '-')}.ec2.internal"
    )
    assert instance["InstanceLifecycle"] == "capacity-block"
    assert instance["CapacityReservationId"] == "cr-1"
    assert instance["CapacityBlockId"] == "cb-1"
    assert instance["Operator"] == {"Managed": False}
    tags = {tag["Key"]: tag["Value"] for tag in instance["Tags"]}
    assert tags["aws:autoscaling:groupName"] == "gpu"
    assert tags["kubernetes.io/cluster/prod"] == "owned"
    assert tags["eks:nodegroup-name"] == "gpu-a"
    assert instance["LaunchTime"] == datetime(2025, 12, 31, tzinfo=UTC)


def test_auto_mode_instances_name_their_operator_and_refuse_ec2(model, ec2):
    node = model.add_static_instance(operator="eks.amazonaws.com")
    assert one(ec2, node.instance_id)["Operator"] == {
        "Managed": True,
        "Principal": "eks.amazonaws.com",
    }
    with pytest.raises(ClientError) as error:
        ec2.terminate_instances(InstanceIds=[node.instance_id])
    assert refusal(error)[0] == "OperationNotPermitted"
    assert found(ec2, {"Name": "operator.managed", "Values": ["true"]}) == [node.instance_id]


def test_filters_combine(model, ec2):
    model.add_group("a", desired=2, cluster="prod")
    model.add_group("b", desired=1, cluster="test")
    static = model.add_static_instance(tags={"karpenter.sh/nodeclaim": "gpu-x7"})
    a_ids = sorted(member.instance_id for member in model.members("a"))
    name = model.members("a")[1].private_dns
    assert found(ec2, {"Name": "private-dns-name", "Values": [name]}) == [
        model.members("a")[1].instance_id
    ]
    assert found(ec2, {"Name": "private-dns-name", "Values": ["ip-*.ec2.internal"]}) == sorted(
        instance.instance_id for instance in model.instances()
    )
    assert found(ec2, {"Name": "private-dns-name", "Values": ["ip-.*"]}) == []
    assert found(ec2, {"Name": "tag:kubernetes.io/cluster/prod", "Values": ["owned"]}) == a_ids
    assert found(ec2, {"Name": "tag-key", "Values": ["karpenter.sh/nodeclaim"]}) == [
        static.instance_id
    ]
    assert (
        found(
            ec2,
            {"Name": "tag:aws:autoscaling:groupName", "Values": ["a", "b"]},
            {"Name": "instance-state-name", "Values": ["stopped"]},
        )
        == []
    )
    model.terminate([a_ids[0]])
    assert found(ec2, {"Name": "instance-state-name", "Values": ["shutting-down"]}) == [a_ids[0]]
    with pytest.raises(ClientError) as error:
        found(ec2, {"Name": "colour", "Values": ["red"]})
    assert refusal(error) == ("InvalidParameterValue", "The filter 'colour' is invalid", 400)


def test_instances_come_in_pages(model, ec2):
    model.add_group("gpu", desired=23)
    pages = list(
        ec2.get_paginator("describe_instances").paginate(PaginationConfig={"PageSize": 10})
    )
    assert [len(page["Reservations"]) for page in pages] == [10, 10, 3]
    assert len(found(ec2)) == 23
    member = model.members("gpu")[0].instance_id
    with pytest.raises(ClientError) as error:
        ec2.describe_instances(InstanceIds=[member], MaxResults=10)
    assert refusal(error)[0] == "InvalidParameterCombination"
    with pytest.raises(ClientError) as small:
        ec2.describe_instances(MaxResults=4)
    assert refusal(small)[0] == "InvalidParameterValue"
    with pytest.raises(ClientError) as token:
        ec2.describe_instances(MaxResults=10, NextToken="zz")
    assert refusal(token)[0] == "InvalidNextToken"


@pytest.mark.case("R28")
def test_unknown_and_malformed_ids_are_told_apart(model, ec2):
    known = model.add_static_instance().instance_id
    with pytest.raises(ClientError) as error:
        ec2.describe_instances(InstanceIds=["i-00000000000000000"])
    assert refusal(error) == (
        "InvalidInstanceID.NotFound",
        "The instance ID 'i-00000000000000000' does not exist",
        400,
    )
    with pytest.raises(ClientError) as several:
        ec2.terminate_instances(InstanceIds=["i-00000000", known, "i-00000001"])
    assert refusal(several) == (
        "InvalidInstanceID.NotFound",
        "The instance IDs 'i-00000000, i-00000001' do not exist",
        400,
    )
    with pytest.raises(ClientError) as malformed:
        ec2.reboot_instances(InstanceIds=["hyperpod-i-0123456789abcdef0"])
    assert refusal(malformed)[0] == "InvalidInstanceID.Malformed"
    assert one(ec2, known)["State"]["Name"] == "running"


def test_a_dry_run_answers_with_an_error_either_way(model, ec2, server, clock, heard):
    node = model.add_static_instance().instance_id
    with pytest.raises(ClientError) as allowed:
        ec2.reboot_instances(InstanceIds=[node], DryRun=True)
    assert refusal(allowed) == (
        "DryRunOperation",
        "Request would have succeeded, but DryRun flag is set.",
        412,
    )
    server.ec2.denied.add("RebootInstances")
    with pytest.raises(ClientError) as denied:
        ec2.reboot_instances(InstanceIds=[node], DryRun=True)
    assert refusal(denied)[0::2] == ("UnauthorizedOperation", 403)
    clock.forward(600)
    model.tick()
    assert heard == []


@pytest.mark.case("R46")
def test_a_denied_reboot_is_unauthorized_and_boots_nothing(model, ec2, server, clock, heard):
    node = model.add_static_instance().instance_id
    server.ec2.denied.add("RebootInstances")
    with pytest.raises(ClientError) as error:
        ec2.reboot_instances(InstanceIds=[node])
    assert refusal(error)[0::2] == ("UnauthorizedOperation", 403)
    clock.forward(600)
    model.tick()
    assert heard == []


def test_a_reboot_is_queued_and_keeps_launch_time_and_address(model, ec2, clock, heard):
    model.add_group("gpu", desired=1, timing=TIMING)
    node = model.members("gpu")[0]
    ec2.reboot_instances(InstanceIds=[node.instance_id])
    clock.forward(89)
    assert one(ec2, node.instance_id)["State"]["Name"] == "running"
    assert heard == []
    clock.forward(1)
    instance = one(ec2, node.instance_id)
    assert heard == [("reboot", node.instance_id)]
    assert instance["LaunchTime"].timestamp() == node.launch_time
    assert instance["PrivateIpAddress"] == node.private_ip
    assert model.instance(node.instance_id).boots == 2
    assert model.members("gpu")[0].lifecycle is Lifecycle.IN_SERVICE


def test_a_reboot_can_be_lost_or_doubled(model, ec2, server, clock, heard):
    node = model.add_static_instance().instance_id
    server.ec2.behaviours["RebootInstances"] = Behaviour(effect=Effect.NOTHING, times=1)
    ec2.reboot_instances(InstanceIds=[node])
    clock.forward(600)
    model.tick()
    assert heard == []
    ec2.reboot_instances(InstanceIds=[node])
    clock.forward(600)
    model.tick()
    assert heard == [("reboot", node)]


def test_a_node_that_is_not_running_cannot_be_rebooted(model, ec2, clock):
    node = model.add_static_instance().instance_id
    ec2.stop_instances(InstanceIds=[node])
    with pytest.raises(ClientError) as error:
        ec2.reboot_instances(InstanceIds=[node])
    assert refusal(error)[0] == "IncorrectState"


def test_termination_takes_its_time_and_leaves_a_trace_without_a_name(model, ec2, clock, heard):
    model.add_group("gpu", desired=1, timing=TIMING)
    node = model.members("gpu")[0].instance_id
    (change,) = ec2.terminate_instances(InstanceIds=[node])["TerminatingInstances"]
    assert change["PreviousState"]["Name"] == "running"
    assert change["CurrentState"] == {"Code": 32, "Name": "shutting-down"}
    (again,) = ec2.terminate_instances(InstanceIds=[node])["TerminatingInstances"]
    assert again["PreviousState"]["Name"] == "shutting-down"
    clock.forward(60)
    gone = one(ec2, node)
    assert gone["State"]["Name"] == "terminated"
    assert gone["PrivateDnsName"] == ""
    assert "PrivateIpAddress" not in gone
    assert [call for call in heard if call[1] == node] == [("shutdown", node), ("terminate", node)]
    clock.forward(3700)
    with pytest.raises(ClientError) as error:
        one(ec2, node)
    assert refusal(error)[0] == "InvalidInstanceID.NotFound"


def test_a_group_replaces_what_ec2_terminated_behind_its_back(model, ec2, clock):
    model.add_group("gpu", desired=1, timing=TIMING)
    node = model.members("gpu")[0].instance_id
    ec2.terminate_instances(InstanceIds=[node])
    assert model.members("gpu")[0].lifecycle is Lifecycle.IN_SERVICE
    clock.forward(1)
    assert model.members("gpu")[0].lifecycle is Lifecycle.TERMINATING
    causes = [activity.cause for activity in model.activities("gpu")]
    assert causes[0].endswith("an EC2 health check indicating it has been terminated or stopped.")
    clock.forward(120)
    (new,) = model.members("gpu")
    assert new.instance_id != node
    assert new.lifecycle is Lifecycle.IN_SERVICE


def test_termination_protection_refuses_all_that_were_named(model, ec2):
    guarded = model.add_static_instance(disable_api_termination=True).instance_id
    other = model.add_static_instance().instance_id
    with pytest.raises(ClientError) as error:
        ec2.terminate_instances(InstanceIds=[other, guarded])
    assert refusal(error) == (
        "OperationNotPermitted",
        (
            f"The instance '{guarded}' may not be terminated. Modify its 'disableApiTermination' "
            "instance attribute and try again."
        ),
        400,
    )
    assert one(ec2, other)["State"]["Name"] == "running"
    model.edit_instance(guarded, lambda old: replace(old, disable_api_termination=False))
    ec2.terminate_instances(InstanceIds=[guarded])


def test_stop_and_start_move_the_launch_time_and_boot_anew(model, ec2, clock, heard):
    node = model.add_static_instance()
    node_id = node.instance_id
    (stopping,) = ec2.stop_instances(InstanceIds=[node_id])["StoppingInstances"]
    assert stopping["CurrentState"]["Name"] == "stopping"
    with pytest.raises(ClientError) as early:
        ec2.start_instances(InstanceIds=[node_id])
    assert refusal(early)[0] == "IncorrectInstanceState"
    clock.forward(10)
    assert one(ec2, node_id)["State"]["Name"] == "stopped"
    (starting,) = ec2.start_instances(InstanceIds=[node_id])["StartingInstances"]
    assert starting["CurrentState"]["Name"] == "pending"
    clock.forward(10)
    instance = one(ec2, node_id)
    assert instance["State"]["Name"] == "running"
    assert instance["LaunchTime"] == datetime(2026, 1, 1, 0, 0, 10, tzinfo=UTC)
    assert heard == [("stop", node_id), ("reboot", node_id)]
    ec2.terminate_instances(InstanceIds=[node_id])
    with pytest.raises(ClientError) as late:
        ec2.stop_instances(InstanceIds=[node_id])
    assert refusal(late)[0] == "IncorrectInstanceState"


def test_a_start_without_capacity_is_a_server_error_and_can_be_tried_again(model, ec2, clock):
    node = model.add_static_instance().instance_id
    model.set_shortage(node, Shortage(tries=1))
    ec2.stop_instances(InstanceIds=[node])
    clock.forward(10)
    with pytest.raises(ClientError) as error:
        ec2.start_instances(InstanceIds=[node])
    code, message, status = refusal(error)
    assert (code, status) == ("InsufficientInstanceCapacity", 500)
    assert message.startswith("We currently do not have sufficient p5.48xlarge capacity")
    assert one(ec2, node)["State"]["Name"] == "stopped"
    ec2.start_instances(InstanceIds=[node])


def test_a_stopped_member_is_replaced_unless_it_is_in_standby(model, ec2, clock):
    model.add_group("gpu", desired=2, timing=TIMING)
    first, second = (member.instance_id for member in model.members("gpu"))
    model.enter_standby("gpu", [first], decrement=True)
    clock.forward(1)
    ec2.stop_instances(InstanceIds=[first, second])
    clock.forward(600)
    lifecycles = {member.instance_id: member.lifecycle for member in model.members("gpu")}
    assert lifecycles[first] is Lifecycle.STANDBY
    assert second not in lifecycles
    assert len(lifecycles) == 2


def test_status_checks_and_scheduled_events_are_shown(model, ec2):
    node = model.add_static_instance().instance_id
    stopped = model.add_static_instance().instance_id
    event = ScheduledEvent("instance-event-1", "instance-retirement", "hardware", 1_767_312_000.0)
    model.edit_instance(
        node, lambda old: replace(old, system_status="impaired", scheduled_events=(event,))
    )
    ec2.stop_instances(InstanceIds=[stopped])
    (status,) = ec2.describe_instance_status()["InstanceStatuses"]
    assert status["InstanceId"] == node
    assert status["SystemStatus"]["Status"] == "impaired"
    assert status["SystemStatus"]["Details"] == [{"Name": "reachability", "Status": "failed"}]
    assert status["InstanceStatus"]["Status"] == "ok"
    assert status["Events"][0]["Code"] == "instance-retirement"
    assert status["Events"][0]["NotBefore"] == datetime(2026, 1, 2, tzinfo=UTC)
    everything = ec2.describe_instance_status(IncludeAllInstances=True)["InstanceStatuses"]
    assert {item["InstanceId"]: item["InstanceState"]["Name"] for item in everything} == {
        node: "running",
        stopped: "stopping",
    }
    assert ec2.describe_instance_status(InstanceIds=[stopped])["InstanceStatuses"] == []
    with pytest.raises(ClientError) as error:
        ec2.describe_instance_status(InstanceIds=["i-00000000000000000"])
    assert refusal(error)[0] == "InvalidInstanceID.NotFound"


def test_reservations_are_listed_and_filtered(model, ec2):
    model.add_reservation(Reservation("cr-1", "p5.48xlarge", "us-east-1a", total=4))
    model.add_reservation(
        Reservation(
            "cr-2",
            "p4d.24xlarge",
            "us-east-1b",
            total=2,
            kind="capacity-block",
            end=1_767_312_000.0,
            taken_by_others=1,
        )
    )
    model.add_static_instance(capacity_reservation_id="cr-1")
    answer = ec2.describe_capacity_reservations()["CapacityReservations"]
    assert [
        (item["CapacityReservationId"], item["AvailableInstanceCount"], item["State"])
        for item in answer
    ] == [("cr-1", 3, "active"), ("cr-2", 1, "active")]
    assert answer[0]["EndDateType"] == "unlimited"
    assert answer[1]["EndDate"] == datetime(2026, 1, 2, tzinfo=UTC)
    assert answer[1]["ReservationType"] == "capacity-block"
    (only,) = ec2.describe_capacity_reservations(
        Filters=[{"Name": "instance-type", "Values": ["p4d.*"]}]
    )["CapacityReservations"]
    assert only["CapacityReservationId"] == "cr-2"
    with pytest.raises(ClientError) as error:
        ec2.describe_capacity_reservations(CapacityReservationIds=["cr-9"])
    assert refusal(error)[0] == "InvalidCapacityReservationId.NotFound"


def test_an_unserved_action_is_invalid(ec2):
    with pytest.raises(ClientError) as error:
        ec2.describe_vpcs()
    assert refusal(error)[0] == "InvalidAction"
