"""One suite for the Auto Scaling adapter before the emulated APIs, and for the fake."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import boto3
import pytest
from botocore.stub import Stubber

from local.aws.autoscaling_core import Effect
from local.aws.autoscaling_model import CapacityModel
from local.aws.autoscaling_server import CapacityServer
from local.aws.autoscaling_types import (
    AwsAnswerError,
    InstanceRefresh,
    Lifecycle,
    Shortage,
    Timing,
)
from local.aws.autoscaling_wire import Behaviour
from nodemend.adapters.capacity_asg import AutoScalingCapacity
from nodemend.application.ports import Capacity
from nodemend.domain.capacity import IN_SERVICE, AutoScalingGroup
from nodemend.domain.errors import AwsForbiddenError, AwsUnavailableError, RepairRefusedError
from nodemend.domain.policy import ClusterPolicy
from tests.fakes.capacity import FakeCapacity
from tests.fakes.system import ManualClock

POLICY = ClusterPolicy("gpu-prod", "ws-1", "us-east-1")
TERMINATE = "TerminateInstanceInAutoScalingGroup"


class Stage(Protocol):
    clock: ManualClock

    @property
    def capacity(self) -> Capacity: ...

    def add_group(self, name: str, size: int, *, cluster: str = "gpu-prod") -> list[str]:
        """Add a group of running instances; return their ids."""
        ...

    def set_state(self, instance_id: str, state: str) -> None: ...

    def finish(self, instance_id: str) -> None:
        """Let a terminating instance be gone, and its replacement in service."""
        ...

    def add_static_instance(self) -> str: ...

    def fail_next_launch(self, group: str) -> None:
        """Let the next launch of a group fail for want of capacity, now."""
        ...


@dataclass
class FakeStage:
    clock: ManualClock
    capacity: FakeCapacity

    def add_group(self, name: str, size: int, *, cluster: str = "gpu-prod") -> list[str]:
        ids = [f"i-0{hash_of(name)}{index:08x}" for index in range(size)]
        group = AutoScalingGroup(name, size, 0, size + 1, dict.fromkeys(ids, IN_SERVICE))
        self.capacity.add_group(
            cluster, replace(group, tags={f"kubernetes.io/cluster/{cluster}": "owned"})
        )
        return ids

    def set_state(self, instance_id: str, state: str) -> None:
        self.capacity.set_state(POLICY.name, instance_id, state)

    def finish(self, instance_id: str) -> None:
        self.clock.advance(60)
        self.capacity.replace_instance(POLICY.name, instance_id, "i-0ffffffffffffffff")

    def add_static_instance(self) -> str:
        self.capacity.add_static_instance("i-0eeeeeeeeeeeeeeee")
        return "i-0eeeeeeeeeeeeeeee"

    def fail_next_launch(self, group: str) -> None:
        self.capacity.fail_launch(group, self.clock.now(), "We currently do not have sufficient p5")


def hash_of(name: str) -> str:
    return f"{sum(name.encode()):08x}"


@dataclass
class EmulatorStage:
    clock: ManualClock
    model: CapacityModel
    server: CapacityServer
    capacity: AutoScalingCapacity

    def add_group(self, name: str, size: int, *, cluster: str = "gpu-prod") -> list[str]:
        self.model.add_group(name, desired=size, cluster=cluster)
        return [member.instance_id for member in self.model.members(name)]

    def set_state(self, instance_id: str, state: str) -> None:
        self.model.edit_instance(
            instance_id, lambda instance: replace(instance, lifecycle=Lifecycle(state))
        )

    def finish(self, instance_id: str) -> None:
        for _ in range(10):
            self.clock.advance(6)
            self.model.tick()

    def add_static_instance(self) -> str:
        return self.model.add_static_instance().instance_id

    def fail_next_launch(self, group: str) -> None:
        self.model.set_shortage(group, Shortage(tries=1, until=-math.inf))
        self.model.terminate_in_group(self.model.members(group)[0].instance_id, decrement=False)
        self.clock.advance(1.5)
        self.model.tick()


@pytest.fixture
def session() -> boto3.Session:
    return boto3.Session("AKIATEST", "secret", region_name="eu-west-1")


@pytest.fixture
def emulated(session: boto3.Session, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatorStage]:
    clock = ManualClock()
    timing = Timing(terminate_s=5, launch_delay_s=1, pending_s=1, retry_base_s=600, retry_cap_s=600)
    model = CapacityModel(clock=lambda: clock.now().timestamp(), timing=timing)
    with CapacityServer(model) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        capacity = AutoScalingCapacity(session_for=lambda _: session)
        yield EmulatorStage(clock, model, server, capacity)


@pytest.fixture(params=["fake", "emulator"])
def stage(request: pytest.FixtureRequest) -> Stage:
    if request.param == "emulator":
        found: Stage = request.getfixturevalue("emulated")
        return found
    return FakeStage(ManualClock(), FakeCapacity())


# --- reading --------------------------------------------------------------------------------------


def test_fleet_holds_the_groups_of_this_cluster_only(stage):
    first = stage.add_group("gpu-a", 2)
    second = stage.add_group("gpu-b", 1)
    stage.add_group("other", 1, cluster="gpu-prod-2")
    fleet = stage.capacity.fleet(POLICY)
    assert set(fleet.groups) == {"gpu-a", "gpu-b"}
    assert fleet.group_by_instance == {
        **dict.fromkeys(first, "gpu-a"),
        **dict.fromkeys(second, "gpu-b"),
    }
    group = fleet.groups["gpu-a"]
    assert (group.desired, group.min_size, group.max_size) == (2, 0, 3)
    assert group.tags["kubernetes.io/cluster/gpu-prod"] == "owned"
    assert group.suspended == frozenset()


def test_cluster_without_groups_has_an_empty_fleet(stage):
    assert stage.capacity.fleet(POLICY).groups == {}


def test_group_is_read_by_name_and_is_none_when_gone(stage):
    (only,) = stage.add_group("gpu-a", 1)
    group = stage.capacity.group(POLICY, "gpu-a")
    assert group is not None
    assert group.instances == {only: IN_SERVICE}
    assert stage.capacity.group(POLICY, "gone") is None


# --- terminating ----------------------------------------------------------------------------------


def test_terminated_instance_leaves_and_a_new_member_comes(stage):
    ids = stage.add_group("gpu-a", 2)
    stage.capacity.terminate(POLICY, ids[0])
    group = stage.capacity.group(POLICY, "gpu-a")
    assert group is not None
    assert group.desired == 2
    assert group.is_leaving(ids[0])
    assert not group.is_leaving(ids[1])
    stage.finish(ids[0])
    group = stage.capacity.group(POLICY, "gpu-a")
    assert group is not None
    assert group.is_leaving(ids[0])
    assert len(group.newcomers(frozenset(ids))) == 1


@pytest.mark.case("R28")
def test_second_termination_of_an_instance_is_as_good_as_the_first(stage):
    ids = stage.add_group("gpu-a", 1)
    stage.capacity.terminate(POLICY, ids[0])
    stage.capacity.terminate(POLICY, ids[0])
    stage.finish(ids[0])
    stage.capacity.terminate(POLICY, ids[0])
    group = stage.capacity.group(POLICY, "gpu-a")
    assert group is not None
    assert len(group.newcomers(frozenset(ids))) == 1


@pytest.mark.case("R28")
def test_instance_that_is_forgotten_is_as_good_as_terminated(stage):
    stage.add_group("gpu-a", 1)
    stage.capacity.terminate(POLICY, "i-0123456789abcdef0")


def test_running_instance_in_no_group_is_refused_for_good(stage):
    stage.add_group("gpu-a", 1)
    static = stage.add_static_instance()
    with pytest.raises(RepairRefusedError, match=static):
        stage.capacity.terminate(POLICY, static)


def test_instance_state_is_told_as_the_group_shows_it(stage):
    ids = stage.add_group("gpu-a", 2)
    stage.set_state(ids[0], "Standby")
    group = stage.capacity.group(POLICY, "gpu-a")
    assert group is not None
    assert group.instances[ids[0]] == "Standby"


# --- launches -------------------------------------------------------------------------------------


def test_failed_launch_is_told_from_the_time_on_that_is_asked_for(stage):
    stage.add_group("gpu-a", 1)
    began = stage.clock.now()
    assert stage.capacity.launch_problem(POLICY, "gpu-a", began) == ""
    stage.fail_next_launch("gpu-a")
    problem = stage.capacity.launch_problem(POLICY, "gpu-a", began)
    assert "do not have sufficient" in problem
    later = stage.clock.advance(60)
    assert stage.capacity.launch_problem(POLICY, "gpu-a", later) == ""
    assert stage.capacity.launch_problem(POLICY, "gone", began) == ""


# --- the real adapter alone -----------------------------------------------------------------------


def test_every_client_is_of_the_clusters_region(emulated, session, monkeypatch):
    ids = emulated.add_group("gpu-a", 1)
    made = []
    make = session.client

    def client(name: str, **options: Any) -> Any:
        made.append((name, options["region_name"]))
        return make(name, **options)

    monkeypatch.setattr(session, "client", client)
    emulated.capacity.fleet(POLICY)
    emulated.capacity.terminate(POLICY, ids[0])
    emulated.capacity.terminate(POLICY, "i-0123456789abcdef0")
    assert session.region_name == "eu-west-1"
    assert set(made) == {("autoscaling", "us-east-1"), ("ec2", "us-east-1")}


def test_managed_node_group_is_found_by_its_own_tag(emulated):
    emulated.model.add_group("mng", desired=1, tags={"eks:cluster-name": "gpu-prod"})
    emulated.model.add_group("both", desired=1, cluster="gpu-prod", nodegroup="gpu")
    assert set(emulated.capacity.fleet(POLICY).groups) == {"both", "mng"}


@pytest.mark.parametrize(
    ("instance_type", "tags", "desired", "has_gpus"),
    [
        ("p5.48xlarge", {}, 1, True),
        ("m5.large", {}, 1, False),
        ("p5.48xlarge", {}, 0, False),  # no instance, no tag: nothing tells
        ("x", {"k8s.io/cluster-autoscaler/node-template/resources/nvidia.com/gpu": "8"}, 0, True),
        ("x", {"k8s.io/cluster-autoscaler/node-template/resources/nvidia.com/gpu": "0"}, 0, False),
        ("x", {"k8s.io/cluster-autoscaler/node-template/label/a": "8"}, 0, False),
    ],
)
def test_a_group_tells_that_its_nodes_have_gpus_also_while_it_has_none(
    emulated, session, instance_type, tags, desired, has_gpus
):
    emulated.model.add_group(
        "g", desired=desired, cluster="gpu-prod", instance_type=instance_type, tags=tags
    )
    capacity = AutoScalingCapacity(
        session_for=lambda _: session, gpu_instance_types=frozenset({"p5.48xlarge"})
    )
    assert capacity.fleet(POLICY).groups["g"].has_gpus is has_gpus


def test_the_overrides_of_a_mixed_group_tell_it_too(session, monkeypatch):
    client = session.client("autoscaling", region_name="us-east-1")
    monkeypatch.setattr(session, "client", lambda name, **more: client)
    overrides = [{"InstanceType": "p5.48xlarge"}, {"InstanceType": "p5e.48xlarge"}]
    answer = {
        "AutoScalingGroupName": "g",
        "MinSize": 0,
        "MaxSize": 2,
        "DesiredCapacity": 1,
        "DefaultCooldown": 0,
        "AvailabilityZones": [],
        "HealthCheckType": "EC2",
        "CreatedTime": "2026-01-01T00:00:00Z",
        "MixedInstancesPolicy": {"LaunchTemplate": {"Overrides": overrides}},
    }
    with Stubber(client) as stubber:
        stubber.add_response("describe_auto_scaling_groups", {"AutoScalingGroups": [answer]})
        capacity = AutoScalingCapacity(
            session_for=lambda _: session, gpu_instance_types=frozenset({"p5.48xlarge"})
        )
        assert capacity.group(POLICY, "g").has_gpus


@pytest.mark.parametrize(
    ("status", "is_told"),
    [
        ("Pending", True),
        ("InProgress", True),
        ("Cancelling", True),
        ("RollbackInProgress", True),
        ("Successful", False),
        ("Failed", False),
        ("Cancelled", False),
        ("RollbackSuccessful", False),
    ],
)
def test_a_refresh_that_is_running_is_somebody_elses_work(emulated, status, is_told):
    emulated.add_group("gpu-a", 1)
    emulated.model.set_refreshes("gpu-a", [InstanceRefresh("r-1", status)])
    group = emulated.capacity.group(POLICY, "gpu-a")
    told = emulated.capacity.other_work(POLICY, group)
    assert told == (f"instance refresh r-1 of group gpu-a is {status}" if is_told else "")


def test_a_group_that_is_gone_has_no_refresh(emulated):
    assert emulated.capacity.other_work(POLICY, AutoScalingGroup("gone", 1, 0, 1)) == ""


def test_a_denied_look_at_refreshes_names_the_action(emulated):
    emulated.add_group("gpu-a", 1)
    group = emulated.capacity.group(POLICY, "gpu-a")
    emulated.server.autoscaling.denied.add("DescribeInstanceRefreshes")
    with pytest.raises(AwsForbiddenError, match="autoscaling:DescribeInstanceRefreshes"):
        emulated.capacity.other_work(POLICY, group)


@pytest.fixture
def eks(emulated: EmulatorStage, session: boto3.Session, monkeypatch: pytest.MonkeyPatch) -> Any:
    """EKS's answers, checked against the service's own model."""
    client = session.client("eks", region_name="us-east-1")
    make = session.client
    monkeypatch.setattr(
        session, "client", lambda name, **more: client if name == "eks" else make(name, **more)
    )
    with Stubber(client) as stubber:
        yield stubber


@pytest.mark.parametrize(
    ("node_group", "told"),
    [
        ({"status": "ACTIVE"}, ""),
        ({"status": "ACTIVE", "nodeRepairConfig": {"enabled": False}}, ""),
        ({"status": "DEGRADED"}, ""),
        ({"status": "UPDATING"}, "node group gpu is UPDATING"),
        ({"status": "DELETING"}, "node group gpu is DELETING"),
        (
            {"status": "ACTIVE", "nodeRepairConfig": {"enabled": True}},
            "node repair of node group gpu is enabled",
        ),
    ],
)
def test_what_eks_does_with_a_managed_node_group_is_somebody_elses_work(
    emulated, eks, node_group, told
):
    emulated.model.add_group("asg-1", desired=1, cluster="gpu-prod", nodegroup="gpu")
    group = emulated.capacity.group(POLICY, "asg-1")
    eks.add_response(
        "describe_nodegroup",
        {"nodegroup": node_group},
        {"clusterName": "gpu-prod", "nodegroupName": "gpu"},
    )
    answer = emulated.capacity.other_work(POLICY, group)
    assert answer.startswith(told)
    assert bool(answer) is bool(told)


def test_a_node_group_that_eks_has_deleted_takes_its_instances_along(emulated, eks):
    emulated.model.add_group("asg-1", desired=1, cluster="gpu-prod", nodegroup="gpu")
    group = emulated.capacity.group(POLICY, "asg-1")
    eks.add_client_error("describe_nodegroup", "ResourceNotFoundException")
    assert "node group gpu is gone" in emulated.capacity.other_work(POLICY, group)


def test_a_denied_look_at_the_node_group_names_the_action(emulated, eks):
    emulated.model.add_group("asg-1", desired=1, cluster="gpu-prod", nodegroup="gpu")
    group = emulated.capacity.group(POLICY, "asg-1")
    eks.add_client_error("describe_nodegroup", "AccessDeniedException", "no", 403)
    with pytest.raises(AwsForbiddenError, match="eks:DescribeNodegroup"):
        emulated.capacity.other_work(POLICY, group)


def test_fleet_of_many_groups_is_read_to_the_last_page(emulated):
    for index in range(60):
        emulated.model.add_group(f"g{index:02}", desired=0, cluster="gpu-prod")
    assert len(emulated.capacity.fleet(POLICY).groups) == 60


def test_suspended_processes_are_read(emulated):
    emulated.model.add_group("gpu-a", desired=1, cluster="gpu-prod")
    emulated.model.suspend("gpu-a", ["Launch", "AZRebalance"])
    group = emulated.capacity.group(POLICY, "gpu-a")
    assert group.suspended == {"Launch", "AZRebalance"}


def test_desired_capacity_is_never_decremented(emulated):
    ids = emulated.add_group("gpu-a", 2)
    emulated.capacity.terminate(POLICY, ids[0])
    assert emulated.model.group("gpu-a").desired == 2
    targets = [(call.verb, call.target) for call in emulated.server.log.mutations()]
    assert targets == [(TERMINATE, ids[0])]


def test_lost_answer_is_settled_by_the_instances_state(emulated):
    ids = emulated.add_group("gpu-a", 1)
    lost = AwsAnswerError("ScalingActivityInProgress", "Activity x is in progress.")
    emulated.server.autoscaling.behaviours[TERMINATE] = Behaviour(error=lost, times=1)
    emulated.capacity.terminate(POLICY, ids[0])
    assert emulated.model.instance(ids[0]).lifecycle.startswith("Terminating")


@pytest.mark.parametrize("code", ["ScalingActivityInProgress", "ResourceContention"])
def test_busy_group_is_asked_again_later(emulated, code):
    ids = emulated.add_group("gpu-a", 1)
    busy = AwsAnswerError(code, "later")
    emulated.server.autoscaling.behaviours[TERMINATE] = Behaviour(Effect.NOTHING, error=busy)
    with pytest.raises(AwsUnavailableError, match=rf"{ids[0]} \(InService\)"):
        emulated.capacity.terminate(POLICY, ids[0])
    assert emulated.model.instance(ids[0]).lifecycle == IN_SERVICE


def test_refusal_of_an_instance_in_service_is_for_good(emulated):
    ids = emulated.add_group("gpu-a", 1)
    refusal = AwsAnswerError("ValidationError", "The instance is protected")
    emulated.server.autoscaling.behaviours[TERMINATE] = Behaviour(Effect.NOTHING, error=refusal)
    with pytest.raises(RepairRefusedError, match="The instance is protected"):
        emulated.capacity.terminate(POLICY, ids[0])


@pytest.mark.parametrize(
    ("action", "call"),
    [
        ("DescribeAutoScalingGroups", lambda capacity, _: capacity.fleet(POLICY)),
        ("DescribeAutoScalingGroups", lambda capacity, _: capacity.group(POLICY, "gpu-a")),
        (TERMINATE, lambda capacity, at: capacity.terminate(POLICY, "i-0123456789abcdef0")),
        (
            "DescribeScalingActivities",
            lambda capacity, at: capacity.launch_problem(POLICY, "gpu-a", at),
        ),
    ],
)
def test_denied_call_names_the_iam_action(emulated, action, call):
    emulated.add_group("gpu-a", 1)
    emulated.server.autoscaling.denied.add(action)
    with pytest.raises(AwsForbiddenError, match=f"autoscaling:{action}"):
        call(emulated.capacity, emulated.clock.now())


def test_state_that_only_ec2_can_tell_needs_its_permission(emulated):
    static = emulated.add_static_instance()
    emulated.server.ec2.denied.add("DescribeInstances")
    with pytest.raises(AwsForbiddenError, match="ec2:DescribeInstances"):
        emulated.capacity.terminate(POLICY, static)


def test_service_that_fails_is_unavailable(emulated):
    emulated.add_group("gpu-a", 1)
    failure = AwsAnswerError("InternalFailure", "oops", 500)
    emulated.server.autoscaling.behaviours["DescribeAutoScalingGroups"] = Behaviour(error=failure)
    with pytest.raises(AwsUnavailableError, match="autoscaling:DescribeAutoScalingGroups"):
        emulated.capacity.fleet(POLICY)


def test_old_activity_in_progress_hides_no_newer_failed_launch(emulated):
    ids = emulated.add_group("gpu-a", 2)
    emulated.model.set_timing("gpu-a", Timing(terminate_s=math.inf, launch_delay_s=1))
    emulated.model.terminate_in_group(ids[0], decrement=False)
    since = emulated.clock.advance(30)
    emulated.model.tick()
    emulated.model.set_timing("gpu-a", Timing(terminate_s=math.inf, launch_delay_s=1))
    emulated.model.set_shortage("gpu-a", Shortage(tries=3))
    emulated.model.terminate_in_group(ids[1], decrement=False)
    emulated.clock.advance(2)
    emulated.model.tick()
    assert "sufficient" in emulated.capacity.launch_problem(POLICY, "gpu-a", since)
