"""EC2's single instances in memory, for unit tests of the use cases."""

from collections.abc import Callable

from nodemend.domain.errors import RepairRefusedError
from nodemend.domain.policy import ClusterPolicy
from tests.fakes.cluster import Call, Faults


class FakeInstances:
    """Takes reboots, and tells `on_reboot`; what boots, and when, is the test's to say."""

    def __init__(self) -> None:
        self.faults = Faults()
        self.unknown: set[str] = set()
        """Instances that EC2 does not know (any more)."""
        self.stopped: set[str] = set()
        self.throttled = 0
        """How many of the next calls are throttled."""
        self.on_reboot: Callable[[str], None] = lambda instance_id: None

    @property
    def calls(self) -> list[Call]:
        """All calls so far, throttled and refused ones too."""
        return self.faults.calls

    def reboot(self, cluster: ClusterPolicy, instance_id: str) -> bool:
        """Take the reboot; see the port."""
        del cluster
        if self.throttled > 0:
            self.throttled -= 1
            self.faults.calls.append(Call("throttled", instance_id))
            return False
        return self.faults.run("reboot", instance_id, lambda: self._reboot(instance_id))

    def _reboot(self, instance_id: str) -> bool:
        if instance_id in self.unknown | self.stopped:
            raise RepairRefusedError(f"ec2:RebootInstances: {instance_id} cannot be rebooted")
        self.on_reboot(instance_id)
        return True
