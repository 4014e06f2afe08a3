"""One suite for the EC2 adapter before the emulated API, and for the fake."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import boto3
import pytest

from local.aws.autoscaling_core import Effect
from local.aws.autoscaling_model import CapacityModel
from local.aws.autoscaling_server import CapacityServer
from local.aws.autoscaling_types import AwsAnswerError
from local.aws.autoscaling_wire import Behaviour
from nodemend.adapters.instances_ec2 import Ec2Instances
from nodemend.application.ports import Instances
from nodemend.domain.errors import AwsForbiddenError, AwsUnavailableError, RepairRefusedError
from nodemend.domain.policy import ClusterPolicy
from tests.fakes.instances import FakeInstances
from tests.fakes.system import ManualClock

POLICY = ClusterPolicy("gpu-prod", "ws-1", "us-east-1")
REBOOT = "RebootInstances"


class Stage(Protocol):
    @property
    def instances(self) -> Instances: ...

    def add_instance(self) -> str:
        """Let an instance run; return its id."""
        ...

    def stop(self, instance_id: str) -> None: ...

    def forget(self, instance_id: str) -> None:
        """Let EC2 know nothing of the instance."""
        ...

    def throttle(self) -> None:
        """Let the next call be throttled."""
        ...

    def boots(self, instance_id: str) -> int:
        """Return how often the instance has been rebooted by now."""
        ...


class FakeStage:
    def __init__(self) -> None:
        self.instances = FakeInstances()
        self._taken: list[str] = []
        self.instances.on_reboot = self._taken.append

    def add_instance(self) -> str:
        return "i-0aaaaaaaaaaaaaaa1"

    def stop(self, instance_id: str) -> None:
        self.instances.stopped.add(instance_id)

    def forget(self, instance_id: str) -> None:
        self.instances.unknown.add(instance_id)

    def throttle(self) -> None:
        self.instances.throttled = 1

    def boots(self, instance_id: str) -> int:
        return self._taken.count(instance_id)


@dataclass
class EmulatorStage:
    clock: ManualClock
    model: CapacityModel
    server: CapacityServer
    instances: Ec2Instances

    def add_instance(self) -> str:
        return self.model.add_static_instance().instance_id

    def stop(self, instance_id: str) -> None:
        self.model.stop_instances([instance_id])
        self.clock.advance(60)
        self.model.tick()

    def forget(self, instance_id: str) -> None:
        unknown = AwsAnswerError("InvalidInstanceID.NotFound", f"{instance_id} does not exist")
        self.server.ec2.behaviours[REBOOT] = Behaviour(Effect.NOTHING, error=unknown)

    def throttle(self) -> None:
        limit = AwsAnswerError("RequestLimitExceeded", "Request limit exceeded.", 503)
        self.server.ec2.behaviours[REBOOT] = Behaviour(Effect.NOTHING, error=limit, times=1)

    def boots(self, instance_id: str) -> int:
        self.clock.advance(60)
        self.model.tick()
        return self.model.known([instance_id])[0].boots - 1


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatorStage]:
    clock = ManualClock()
    session = boto3.Session("AKIATEST", "secret", region_name="eu-west-1")
    model = CapacityModel(clock=lambda: clock.now().timestamp())
    with CapacityServer(model) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        yield EmulatorStage(clock, model, server, Ec2Instances(session_for=lambda _: session))


@pytest.fixture(params=["fake", "emulator"])
def stage(request: pytest.FixtureRequest) -> Stage:
    if request.param == "fake":
        return FakeStage()
    found: Stage = request.getfixturevalue("emulated")
    return found


def test_a_running_instance_is_rebooted(stage: Stage) -> None:
    instance_id = stage.add_instance()

    assert stage.instances.reboot(POLICY, instance_id) is True
    assert stage.boots(instance_id) == 1


def test_a_throttled_call_was_certainly_not_carried_out(stage: Stage) -> None:
    instance_id = stage.add_instance()
    stage.throttle()

    assert stage.instances.reboot(POLICY, instance_id) is False
    assert stage.boots(instance_id) == 0
    assert stage.instances.reboot(POLICY, instance_id) is True


def test_what_is_not_running_is_refused_for_good(stage: Stage) -> None:
    instance_id = stage.add_instance()
    stage.stop(instance_id)

    with pytest.raises(RepairRefusedError, match="ec2:RebootInstances"):
        stage.instances.reboot(POLICY, instance_id)


def test_an_instance_that_ec2_does_not_know_is_refused_for_good(stage: Stage) -> None:
    instance_id = stage.add_instance()
    stage.forget(instance_id)

    with pytest.raises(RepairRefusedError, match="ec2:RebootInstances"):
        stage.instances.reboot(POLICY, instance_id)


# --- the adapter alone ----------------------------------------------------------------------------


@pytest.mark.case("R46")
def test_r46_a_denied_call_names_the_iam_action(emulated: EmulatorStage) -> None:
    emulated.server.ec2.denied.add(REBOOT)

    with pytest.raises(AwsForbiddenError, match=r"^ec2:RebootInstances: UnauthorizedOperation"):
        emulated.instances.reboot(POLICY, emulated.add_instance())


def test_a_call_whose_answer_was_lost_is_not_repeated_by_the_client(
    emulated: EmulatorStage,
) -> None:
    instance_id = emulated.add_instance()
    lost = AwsAnswerError("InternalError", "An internal error has occurred", 500)
    emulated.server.ec2.behaviours[REBOOT] = Behaviour(error=lost, times=1)

    with pytest.raises(AwsUnavailableError, match="InternalError"):
        emulated.instances.reboot(POLICY, instance_id)

    sent = [call.verb for call in emulated.server.log.calls()]
    assert sent == [REBOOT]
    assert emulated.boots(instance_id) == 1


def test_the_client_is_the_regions_of_the_cluster(emulated: EmulatorStage) -> None:
    client = emulated.instances._client(POLICY)
    assert client.meta.region_name == "us-east-1"
