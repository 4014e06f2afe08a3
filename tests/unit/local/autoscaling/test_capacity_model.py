"""The fleet over time, without a wire: what groups do by themselves and what scenes inject."""

import contextlib
import math
import threading
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from local.aws.autoscaling_core import Effect
from local.aws.autoscaling_model import CapacityModel
from local.aws.autoscaling_types import (
    TERMINATING,
    AwsAnswerError,
    CapacityHooks,
    Ec2State,
    Instance,
    Lifecycle,
    LifecycleHook,
    Shortage,
    Timing,
)

TIMING = Timing(
    terminate_s=60, launch_delay_s=30, pending_s=20, retry_base_s=10, retry_cap_s=40, rebalance_s=5
)
ZONES = ("us-east-1a", "us-east-1b")


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.at = 1000.75

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def model(clock: Clock) -> CapacityModel:
    return CapacityModel(clock=clock)


def zones(model: CapacityModel) -> list[str]:
    return sorted(
        member.zone for member in model.members("gpu") if member.lifecycle is Lifecycle.IN_SERVICE
    )


def test_the_same_seed_gives_the_same_fleet(clock):
    def fleet(seed: str) -> list[Instance]:
        model = CapacityModel(clock=clock, seed=seed)
        model.add_group("gpu", desired=3, timing=TIMING)
        model.terminate_in_group(model.members("gpu")[0].instance_id, decrement=False)
        model.tick(clock() + 100)
        return model.instances()

    assert fleet("a") == fleet("a")
    assert {node.instance_id for node in fleet("a")}.isdisjoint(
        node.instance_id for node in fleet("b")
    )


def test_one_jump_gives_the_same_timeline_as_many_ticks():
    def run(step: float) -> tuple[list[Instance], list[object]]:
        model = CapacityModel(clock=lambda: 0.0)
        model.add_group("gpu", desired=4, zones=ZONES, timing=TIMING)
        model.set_shortage("gpu", Shortage(tries=3))
        for member in model.members("gpu")[:2]:
            model.terminate_in_group(member.instance_id, decrement=False)
        at = 0.0
        while at < 400:
            at += step
            model.tick(at)
        return model.instances(), list(model.activities())

    assert run(400) == run(0.5)


def test_launch_times_are_whole_seconds_and_addresses_unique(model, clock):
    model.add_group("gpu", desired=50, zones=ZONES, timing=TIMING)
    model.terminate_in_group(model.members("gpu")[0].instance_id, decrement=False)
    clock.at += 100.4
    everything = model.instances()
    assert all(node.launch_time == int(node.launch_time) for node in everything)
    assert len({node.private_ip for node in everything}) == 51
    assert len({node.subnet_id for node in everything}) == 2


def test_an_address_can_come_back_with_the_next_instance(model, clock):
    model.add_group("gpu", desired=2, timing=replace(TIMING, terminate_s=5), reuses_addresses=True)
    sick = model.members("gpu")[0]
    model.terminate_in_group(sick.instance_id, decrement=False)
    clock.at += 60
    new = model.members("gpu")[-1]
    assert new.instance_id != sick.instance_id
    assert new.private_dns == sick.private_dns


def test_names_follow_the_region(clock):
    model = CapacityModel(clock=clock, region="eu-west-1")
    model.add_group("gpu", desired=1)
    assert model.members("gpu")[0].private_dns == "ip-10-0-0-10.eu-west-1.compute.internal"
    assert model.members("gpu")[0].provider_id.startswith("aws:///eu-west-1a/i-0")


def test_two_thousand_instances_fit_into_one_group(model):
    model.add_group("gpu", desired=2000)
    assert len({node.private_dns for node in model.members("gpu")}) == 2000


def test_retries_slow_down_up_to_the_cap(model, clock):
    model.add_group("gpu", desired=0, max_size=1, timing=TIMING)
    model.set_shortage("gpu", Shortage(until=math.inf))
    model.set_desired("gpu", 1)
    model.tick(clock() + 180)
    starts = sorted(activity.started_at - clock.at for activity in model.activities("gpu"))
    assert starts == [30, 40, 60, 100, 140, 180]
    model.set_shortage("gpu", None)
    model.tick(clock() + 241)
    assert [member.lifecycle for member in model.members("gpu")] == [Lifecycle.IN_SERVICE]


@pytest.mark.case("R64")
def test_rebalancing_launches_first_and_then_takes_a_node_nobody_asked_about(model, clock):
    model.add_group("gpu", desired=4, max_size=5, zones=ZONES, timing=TIMING, rebalances=True)
    model.set_zone_plan("gpu", ["us-east-1b"])
    sick = next(node for node in model.members("gpu") if node.zone == "us-east-1a")
    bystanders = {node.instance_id for node in model.members("gpu")} - {sick.instance_id}
    model.terminate_in_group(sick.instance_id, decrement=False)
    model.tick(clock() + 50)
    assert zones(model) == ["us-east-1a", "us-east-1b", "us-east-1b", "us-east-1b"]
    model.tick(clock() + 56)
    arriving = [node for node in model.members("gpu") if node.lifecycle is Lifecycle.PENDING]
    assert [node.zone for node in arriving] == ["us-east-1a"]
    model.tick(clock() + 200)
    assert zones(model) == ["us-east-1a", "us-east-1a", "us-east-1b", "us-east-1b"]
    left = {node.instance_id for node in model.members("gpu")}
    assert len(bystanders - left) == 1
    assert any("to balance instances in zones us-east-1a" in a.cause for a in model.activities())


def test_rebalancing_waits_while_it_is_suspended(model, clock):
    model.add_group("gpu", desired=4, zones=ZONES, timing=TIMING, rebalances=True)
    model.suspend("gpu", ["AZRebalance"])
    model.set_zone_plan("gpu", ["us-east-1b"])
    model.terminate_in_group(model.members("gpu")[0].instance_id, decrement=False)
    model.tick(clock() + 3600)
    assert zones(model) == ["us-east-1a", "us-east-1b", "us-east-1b", "us-east-1b"]
    model.resume("gpu", ["AZRebalance"])
    model.tick(clock() + 7200)
    assert zones(model) == ["us-east-1a", "us-east-1a", "us-east-1b", "us-east-1b"]


@pytest.mark.case("R63")
def test_an_autoscaler_can_take_a_node_with_its_capacity(model, clock):
    model.add_group("gpu", desired=4, timing=TIMING)
    empty = model.members("gpu")[0].instance_id
    activity = model.terminate_as_service(empty, cause="an autoscaler shrank it.", decrement=True)
    assert activity.cause == "At 1970-01-01T00:16:40Z an autoscaler shrank it."
    model.tick(clock() + 3600)
    assert model.group("gpu").desired == 3
    assert len(model.members("gpu")) == 3


def test_scale_in_spares_protected_instances(model, clock):
    model.add_group("gpu", desired=2, timing=TIMING)
    first, second = model.members("gpu")
    model.edit_instance(first.instance_id, lambda old: replace(old, protected_from_scale_in=True))
    model.set_desired("gpu", 1)
    model.tick(clock() + 60)
    assert [node.instance_id for node in model.members("gpu")] == [first.instance_id]
    model.set_desired("gpu", 0)
    model.tick(clock() + 3600)
    assert [node.instance_id for node in model.members("gpu")] == [first.instance_id]
    assert second.instance_id not in {node.instance_id for node in model.members("gpu")}


def test_a_launch_that_is_planned_already_is_stopped_by_its_suspension(model, clock):
    model.add_group("gpu", desired=2, timing=TIMING)
    model.terminate_in_group(model.members("gpu")[0].instance_id, decrement=False)
    model.tick(clock() + 10)
    model.suspend("gpu", ["Launch"])
    model.tick(clock() + 600)
    assert len(model.members("gpu")) == 1


def test_suspending_terminate_stops_scale_in_but_not_a_person(model, clock):
    model.add_group("gpu", desired=3, timing=TIMING)
    model.suspend("gpu", ["Terminate"])
    model.set_desired("gpu", 2)
    model.tick(clock() + 600)
    assert len(model.members("gpu")) == 3
    model.terminate_in_group(model.members("gpu")[0].instance_id, decrement=False)
    model.tick(clock() + 700)
    assert len(model.members("gpu")) == 2


def test_protection_can_hold_a_termination_of_the_group_until_it_is_lifted(model, clock):
    model.add_group(
        "gpu",
        desired=1,
        timing=TIMING,
        disable_api_termination=True,
        protection_blocks_group=True,
    )
    sick = model.members("gpu")[0].instance_id
    activity = model.terminate_in_group(sick, decrement=True)
    model.tick(clock() + 3600)
    assert model.instance(sick).state is Ec2State.RUNNING
    assert model.instance(sick).lifecycle is Lifecycle.TERMINATING
    assert model.activities("gpu")[0].status == "InProgress"
    model.edit_instance(sick, lambda old: replace(old, disable_api_termination=False))
    model.tick(clock() + 3660)
    assert model.members("gpu") == []
    assert model.activities("gpu")[0].activity_id == activity.activity_id
    assert model.activities("gpu")[0].status == "Successful"


def test_protection_does_not_hold_a_group_by_default(model, clock):
    model.add_group("gpu", desired=1, timing=TIMING, disable_api_termination=True)
    model.terminate_in_group(model.members("gpu")[0].instance_id, decrement=True)
    model.tick(clock() + 60)
    assert model.members("gpu") == []


def test_a_termination_can_hang_for_ever(model, clock):
    model.add_group("gpu", desired=1, timing=replace(TIMING, terminate_s=math.inf))
    sick = model.members("gpu")[0].instance_id
    model.terminate_in_group(sick, decrement=False)
    model.tick(clock() + 1e6)
    assert model.instance(sick).state is Ec2State.SHUTTING_DOWN
    assert [node.lifecycle for node in model.members("gpu")] == [
        Lifecycle.TERMINATING,
        Lifecycle.IN_SERVICE,
    ]


def test_an_instance_that_dies_while_it_waits_leaves_after_its_hook(model, clock):
    model.add_group(
        "gpu", desired=1, timing=TIMING, hooks=[LifecycleHook("drain", TERMINATING, 500)]
    )
    sick = model.members("gpu")[0].instance_id
    model.terminate_in_group(sick, decrement=True)
    model.terminate([sick])
    model.tick(clock() + 100)
    assert model.instance(sick).state is Ec2State.TERMINATED
    assert model.members("gpu")[0].lifecycle is Lifecycle.TERMINATING_WAIT
    model.tick(clock() + 500)
    assert model.members("gpu") == []


def test_an_instance_that_dies_on_its_way_in_is_replaced(model, clock):
    model.add_group("gpu", desired=0, max_size=1, timing=TIMING)
    model.set_desired("gpu", 1)
    model.tick(clock() + 35)
    (first,) = model.members("gpu")
    model.terminate([first.instance_id])
    model.tick(clock() + 600)
    (second,) = model.members("gpu")
    assert second.instance_id != first.instance_id
    assert second.lifecycle is Lifecycle.IN_SERVICE
    assert all(activity.is_over for activity in model.activities("gpu"))


def test_a_refused_batch_leaves_no_trace(model):
    model.add_group("gpu", desired=3, min_size=2, timing=TIMING)
    before = (model.groups(), model.instances(), model.activities())
    ids = [member.instance_id for member in model.members("gpu")]
    with pytest.raises(AwsAnswerError, match="desiredSize equals minSize"):
        model.terminate_all_in_group(ids, decrement=True, group="gpu")
    assert (model.groups(), model.instances(), model.activities()) == before


def test_hooks_are_called_outside_the_lock_and_in_order(clock):
    seen: list[tuple[str, str, int]] = []

    def note(name: str):
        # A hook uses the model from another thread: it would deadlock if the lock were held.
        def hook(instance: Instance) -> None:
            sizes: list[int] = []
            helper = threading.Thread(target=lambda: sizes.append(len(fleet.members("gpu"))))
            helper.start()
            helper.join(5)
            assert not helper.is_alive()
            seen.append((name, instance.instance_id, sizes[0]))

        return hook

    fleet = CapacityModel(
        clock=clock, hooks=CapacityHooks(on_launch=note("launch"), on_terminate=note("gone"))
    )
    fleet.add_group("gpu", desired=1, timing=TIMING)
    sick = fleet.members("gpu")[0].instance_id
    fleet.terminate_in_group(sick, decrement=False)
    fleet.tick(clock() + 100)
    new = fleet.members("gpu")[0].instance_id
    assert seen == [("launch", new, 1), ("gone", sick, 1)]
    assert fleet.hook_errors() == []


def test_a_failing_hook_is_kept_and_stops_nothing(clock, caplog):
    def fail(_instance: Instance) -> None:
        raise ValueError("no such node")

    model = CapacityModel(clock=clock, hooks=CapacityHooks(on_terminate=fail))
    model.add_group("gpu", desired=2, timing=TIMING)
    for member in model.members("gpu"):
        model.terminate_in_group(member.instance_id, decrement=True)
    model.tick(clock() + 60)
    assert model.members("gpu") == []
    assert [str(error) for error in model.hook_errors()] == ["no such node"] * 2
    assert "on_terminate failed" in caplog.text


def test_the_effect_holds_for_one_thread_and_one_block(model):
    model.add_group("gpu", desired=2, max_size=9, timing=TIMING)
    with model.applying(Effect.NOTHING):
        model.set_desired("gpu", 5)
        other = threading.Thread(target=lambda: model.set_desired("gpu", 3))
        other.start()
        other.join(5)
    assert model.group("gpu").desired == 3
    model.set_desired("gpu", 4)
    assert model.group("gpu").desired == 4


def test_twice_applies_what_can_be_applied_twice(model, clock):
    model.add_group("gpu", desired=1, max_size=9, timing=TIMING)
    node = model.members("gpu")[0].instance_id
    model.enter_standby("gpu", [node], decrement=True)
    model.tick(clock() + 1)
    with model.applying(Effect.TWICE):
        model.exit_standby("gpu", [node])
    assert model.group("gpu").desired == 1


def test_time_never_goes_back(model, clock):
    model.add_group("gpu", desired=1, timing=TIMING)
    model.tick(clock() + 100)
    assert model.now() == clock() + 100
    model.tick(clock() + 50)
    assert model.now() == clock() + 100


def test_many_threads_lose_no_change(model, clock):
    model.add_group("gpu", desired=40, timing=TIMING)
    ids = [member.instance_id for member in model.members("gpu")]
    threads = [
        threading.Thread(target=model.terminate_in_group, args=[one], kwargs={"decrement": True})
        for one in ids
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert model.group("gpu").desired == 0
    assert {member.lifecycle for member in model.members("gpu")} == {Lifecycle.TERMINATING}
    model.tick(clock() + 60)
    assert model.members("gpu") == []


OPERATIONS = ("terminate", "shrink", "grow", "ec2", "standby", "return", "stop", "unhealthy")


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 9), st.floats(0, 90)), max_size=25
    )
)
def test_whatever_happens_a_group_comes_to_rest_at_its_desired_capacity(steps):
    now = 0.0
    gone: list[str] = []
    launched: list[str] = []
    fleet = CapacityModel(
        clock=lambda: now,
        hooks=CapacityHooks(
            on_launch=lambda instance: launched.append(instance.instance_id),
            on_terminate=lambda instance: gone.append(instance.instance_id),
        ),
    )
    fleet.add_group("gpu", desired=4, max_size=8, zones=ZONES, timing=TIMING, rebalances=True)
    for operation, index, wait_s in steps:
        members = fleet.members("gpu")
        one = members[index % len(members)].instance_id if members else "i-00000000000000000"
        desired = fleet.group("gpu").desired
        with contextlib.suppress(AwsAnswerError):
            match operation:
                case "terminate":
                    fleet.terminate_in_group(one, decrement=False)
                case "shrink":
                    fleet.terminate_in_group(one, decrement=True)
                case "grow":
                    fleet.set_desired("gpu", desired + 1)
                case "ec2":
                    fleet.terminate([one])
                case "standby":
                    fleet.enter_standby("gpu", [one], decrement=index % 2 == 0)
                case "return":
                    fleet.exit_standby("gpu", [one])
                case "stop":
                    fleet.stop_instances([one])
                case _:
                    fleet.set_health(one, "Unhealthy", respects_grace=False)
        now += wait_s
    now += 3000
    group, members = fleet.group("gpu"), fleet.members("gpu")
    serving = [member for member in members if member.lifecycle is Lifecycle.IN_SERVICE]
    assert len(serving) == group.desired
    assert all(member.state is Ec2State.RUNNING for member in serving)
    assert {member.lifecycle for member in members} <= {Lifecycle.IN_SERVICE, Lifecycle.STANDBY}
    assert len(set(gone)) == len(gone)
    assert len(set(launched)) == len(launched)
    terminated = [node for node in fleet.instances() if node.state is Ec2State.TERMINATED]
    assert {node.instance_id for node in terminated} <= set(gone)
    assert all(activity.is_over for activity in fleet.activities())


def test_start_and_stop_run_the_clock_once(model):
    model.start()
    with pytest.raises(RuntimeError, match="running already"):
        model.start()
    model.stop()
    model.stop()
    model.start()
    model.stop()


@pytest.mark.parametrize("field", ["retry_base_s", "rebalance_s"])
def test_pauses_of_nothing_are_refused(field):
    with pytest.raises(ValueError, match="must be positive"):
        Timing(**{field: 0.0})


def test_names_and_sizes_are_checked(model):
    model.add_group("gpu", desired=1)
    with pytest.raises(ValueError, match="already"):
        model.add_group("gpu", desired=1)
    with pytest.raises(ValueError, match="outside its bounds"):
        model.add_group("small", desired=1, min_size=2)
    node = model.add_static_instance(instance_id="i-0123456789abcdef0")
    with pytest.raises(ValueError, match="already"):
        model.add_static_instance(instance_id=node.instance_id)
