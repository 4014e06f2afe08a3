"""EC2 Auto Scaling in memory, for unit tests of the use cases."""

from dataclasses import replace
from datetime import datetime

from nodemend.application.ports import Fleet
from nodemend.domain.capacity import IN_SERVICE, AutoScalingGroup
from nodemend.domain.errors import RepairRefusedError
from nodemend.domain.policy import ClusterPolicy
from tests.fakes.cluster import Call, Faults

TERMINATING = "Terminating"


class FakeCapacity:
    """Groups by cluster; time stands still until a test moves an instance on.

    A terminated instance stays a member in state Terminating, and no replacement appears, until
    `replace_instance` (or `lose_instance`) says so.
    """

    def __init__(self) -> None:
        self.faults = Faults()
        self._groups: dict[str, dict[str, AutoScalingGroup]] = {}
        self._outside: set[str] = set()
        self.other: dict[str, str] = {}
        """What somebody else does to a group, by its name."""
        self._launch_problems: dict[str, list[tuple[datetime, str]]] = {}

    @property
    def calls(self) -> list[Call]:
        """All calls so far."""
        return self.faults.calls

    # --- the stage --------------------------------------------------------------------------------

    def add_group(self, cluster: str, group: AutoScalingGroup) -> None:
        """Put a group there, or in the place of one of its name."""
        self._groups.setdefault(cluster, {})[group.name] = group

    def remove_group(self, cluster: str, name: str) -> None:
        """Take a group away."""
        del self._groups[cluster][name]

    def set_state(self, cluster: str, instance_id: str, state: str) -> None:
        """Put a member into a lifecycle state, or add one in it to the only group there is."""
        name = self._group_name(cluster, instance_id) or next(iter(self._groups[cluster]))
        group = self._groups[cluster][name]
        self.add_group(cluster, replace(group, instances={**group.instances, instance_id: state}))

    def add_static_instance(self, instance_id: str) -> None:
        """Let an instance run that is in no group."""
        self._outside.add(instance_id)

    def lose_instance(self, cluster: str, instance_id: str) -> None:
        """Let an instance be gone for good, without a replacement."""
        name = self._group_name(cluster, instance_id)
        if name:
            group = self._groups[cluster][name]
            members = {
                member: state for member, state in group.instances.items() if member != instance_id
            }
            self.add_group(cluster, replace(group, instances=members))

    def replace_instance(self, cluster: str, instance_id: str, newcomer: str) -> None:
        """Let an instance be gone and another one be in service in its group."""
        name = self._group_name(cluster, instance_id)
        self.lose_instance(cluster, instance_id)
        group = self._groups[cluster][name]
        self.add_group(cluster, replace(group, instances={**group.instances, newcomer: IN_SERVICE}))

    def fail_launch(self, group: str, at: datetime, message: str) -> None:
        """Let a launch of the group fail at a time."""
        self._launch_problems.setdefault(group, []).append((at, message))

    def _group_name(self, cluster: str, instance_id: str) -> str:
        groups = self._groups.get(cluster, {}).values()
        return next((group.name for group in groups if instance_id in group.instances), "")

    # --- application.ports.Capacity ---------------------------------------------------------------

    def fleet(self, cluster: ClusterPolicy) -> Fleet:
        """Return the cluster's groups."""
        return self.faults.run(
            "fleet", cluster.name, lambda: Fleet(dict(self._groups.get(cluster.name, {})))
        )

    def group(self, cluster: ClusterPolicy, name: str) -> AutoScalingGroup | None:
        """Return one group, or None."""
        return self.faults.run("group", name, lambda: self._groups.get(cluster.name, {}).get(name))

    def other_work(self, cluster: ClusterPolicy, group: AutoScalingGroup) -> str:
        """Return what a test says that somebody else does."""
        del cluster
        return self.faults.run("other_work", group.name, lambda: self.other.get(group.name, ""))

    def terminate(self, cluster: ClusterPolicy, instance_id: str) -> None:
        """Put the instance into Terminating; one that is going or gone is as good."""
        self.faults.run("terminate", instance_id, lambda: self._terminate(cluster, instance_id))

    def _terminate(self, cluster: ClusterPolicy, instance_id: str) -> None:
        if instance_id in self._outside:
            raise RepairRefusedError(f"{instance_id} is a member of no group")
        if self._group_name(cluster.name, instance_id):
            self.set_state(cluster.name, instance_id, TERMINATING)

    def launch_problem(self, cluster: ClusterPolicy, group: str, since: datetime) -> str:
        """Return the newest failed launch's message since then."""
        del cluster

        def find() -> str:
            recent = [each for each in self._launch_problems.get(group, []) if each[0] >= since]
            return max(recent)[1] if recent else ""

        return self.faults.run("launch_problem", group, find)
