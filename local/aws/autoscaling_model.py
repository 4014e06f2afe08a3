"""`CapacityModel`: EC2 instances and Auto Scaling groups of one region, for two APIs and scenes.

The operations refuse as AWS does (`AwsAnswerError`). What goes on by itself is in
`autoscaling_engine`; locking, time and hooks are in `autoscaling_core`.
"""

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from local.aws.autoscaling_core import FleetRunner
from local.aws.autoscaling_engine import Fleet
from local.aws.autoscaling_types import (
    ARRIVING,
    LEAVING,
    PROCESSES,
    Activity,
    AwsAnswerError,
    CapacityHooks,
    Ec2State,
    Group,
    Instance,
    InstanceRefresh,
    Lifecycle,
    LifecycleHook,
    Reservation,
    Shortage,
    Timing,
    activity_in_progress,
    capacity_error_text,
    iso,
    validation_error,
)


class CapacityModel(FleetRunner):
    """The fleet as scenes build it and as the two APIs act on it.

    Example:
        >>> from local.aws.autoscaling_types import Timing
        >>> model = CapacityModel(clock=lambda: 1000.0)
        >>> group = model.add_group("gpu", desired=2, timing=Timing(launch_delay_s=5, pending_s=1))
        >>> first = model.members("gpu")[0]
        >>> activity = model.terminate_in_group(first.instance_id, decrement=False)
        >>> model.tick(1006.0)
        >>> [member.lifecycle.value for member in model.members("gpu")]
        ['InService', 'InService']
    """

    def __init__(
        self,
        *,
        region: str = "us-east-1",
        account_id: str = "123456789012",
        seed: str = "nodemend",
        clock: Callable[[], float] = time.time,
        hooks: CapacityHooks | None = None,
        timing: Timing | None = None,
    ) -> None:
        super().__init__(
            Fleet(region=region, seed=seed, default_timing=timing or Timing()),
            clock=clock,
            hooks=hooks or CapacityHooks(),
        )
        self.region = region
        self.account_id = account_id

    # --- scenes -------------------------------------------------------------------------------

    def add_group(
        self,
        name: str,
        *,
        desired: int,
        min_size: int = 0,
        max_size: int | None = None,
        instance_type: str = "p5.48xlarge",
        zones: Sequence[str] | None = None,
        cluster: str | None = None,
        nodegroup: str | None = None,
        tags: Mapping[str, str] | None = None,
        timing: Timing | None = None,
        hooks: Sequence[LifecycleHook] = (),
        capacity_reservation_id: str | None = None,
        capacity_block_id: str | None = None,
        purchase: str | None = None,
        health_check_grace_s: int = 300,
        new_instances_protected: bool = False,
        disable_api_termination: bool = False,
        protection_blocks_group: bool = False,
        rebalances: bool = False,
        reuses_addresses: bool = False,
        age_s: float = 86400.0,
    ) -> Group:
        """Add a group that has its capacity already, in service since `age_s` seconds.

        Args:
            name: Unique name of the group.
            desired: Desired capacity; as many instances exist at once, spread over the zones.
            min_size: Lower bound; a decrement below it is refused.
            max_size: Upper bound; default: `desired` + 1, which leaves room for one rebalance.
            instance_type: What is launched.
            zones: Availability zones; default: the region's first.
            cluster: Name of the EKS cluster: adds `kubernetes.io/cluster/NAME=owned`.
            nodegroup: Name of the managed node group: adds `eks:cluster-name` and
                `eks:nodegroup-name`.
            tags: Further tags; they reach the instances.
            timing: How long its transitions take; default: the model's.
            hooks: Lifecycle hooks.
            capacity_reservation_id: Launches go into this reservation, or fail.
            capacity_block_id: Shown on instances of a Capacity Block.
            purchase: `spot` or `capacity-block`.
            health_check_grace_s: SetInstanceHealth leaves younger instances alone, unless told.
            new_instances_protected: Launched instances are protected from scale-in.
            disable_api_termination: Launched instances refuse EC2's TerminateInstances.
            protection_blocks_group: See `Group`.
            rebalances: See `Group`.
            reuses_addresses: See `Group`.
            age_s: Age of the first instances; mind the start-up grace of a policy.
        """
        own_tags: dict[str, str] = {}
        if cluster is not None:
            own_tags[f"kubernetes.io/cluster/{cluster}"] = "owned"
        if nodegroup is not None:
            own_tags |= {"eks:cluster-name": cluster or "", "eks:nodegroup-name": nodegroup}

        def add(fleet: Fleet, at: float) -> Group:
            if name in fleet.groups:
                raise ValueError(f"there is a group {name!r} already")
            places = tuple(zones or (f"{self.region}a",))
            group = Group(
                name=name,
                arn=self._group_arn(name),
                min_size=min_size,
                max_size=desired + 1 if max_size is None else max_size,
                desired=desired,
                instance_type=instance_type,
                zones=places,
                subnets={zone: fleet.add_subnet(name, zone) for zone in places},
                created_at=float(int(at - age_s)),
                timing=timing or fleet.default_timing,
                tags={**own_tags, **(tags or {})},
                launch_template=f"{name}-template",
                launch_template_id=f"lt-{fleet.new_instance_id().removeprefix('i-')}",
                hooks=tuple(hooks),
                capacity_reservation_id=capacity_reservation_id,
                capacity_block_id=capacity_block_id,
                purchase=purchase,
                health_check_grace_s=health_check_grace_s,
                new_instances_protected=new_instances_protected,
                disable_api_termination=disable_api_termination,
                protection_blocks_group=protection_blocks_group,
                rebalances=rebalances,
                reuses_addresses=reuses_addresses,
            )
            if not group.min_size <= desired <= group.max_size:
                raise ValueError(f"{name}: desired {desired} is outside its bounds")
            fleet.groups[name] = group
            for number in range(desired):
                fleet.create_instance(
                    group,
                    places[number % len(places)],
                    at - age_s,
                    state=Ec2State.RUNNING,
                    lifecycle=Lifecycle.IN_SERVICE,
                )
            return group

        return self.change(add)

    def _group_arn(self, name: str) -> str:
        return (
            f"arn:aws:autoscaling:{self.region}:{self.account_id}:autoScalingGroup:"
            f"{uuid.uuid5(uuid.NAMESPACE_URL, name)}:autoScalingGroupName/{name}"
        )

    def add_static_instance(
        self,
        *,
        instance_type: str = "p5.48xlarge",
        zone: str | None = None,
        tags: Mapping[str, str] | None = None,
        instance_id: str | None = None,
        capacity_reservation_id: str | None = None,
        capacity_block_id: str | None = None,
        purchase: str | None = None,
        operator: str | None = None,
        disable_api_termination: bool = False,
        age_s: float = 86400.0,
    ) -> Instance:
        """Add a running instance without a group: static, or owned by Karpenter or Auto Mode."""

        def add(fleet: Fleet, at: float) -> Instance:
            place = zone or f"{self.region}a"
            subnet_id = fleet.add_subnet("", place)
            address = fleet.new_address(subnet_id)
            new_id = instance_id or fleet.new_instance_id()
            if new_id in fleet.instances:
                raise ValueError(f"there is an instance {new_id} already")
            return fleet.put(
                Instance(
                    instance_id=new_id,
                    instance_type=instance_type,
                    zone=place,
                    subnet_id=subnet_id,
                    private_ip=address,
                    private_dns=fleet.dns_name(address),
                    launch_time=float(int(at - age_s)),
                    tags=dict(tags or {}),
                    capacity_reservation_id=capacity_reservation_id,
                    capacity_block_id=capacity_block_id,
                    purchase=purchase,
                    operator=operator,
                    disable_api_termination=disable_api_termination,
                )
            )

        return self.change(add)

    def add_reservation(self, reservation: Reservation) -> None:
        """Add a capacity reservation, or put a changed one in its place."""

        def add(fleet: Fleet, _at: float) -> None:
            fleet.reservations[reservation.reservation_id] = reservation

        self.change(add)

    def groups(self) -> list[Group]:
        """Return all groups, sorted by name."""
        return self.read(lambda fleet, _at: sorted(fleet.groups.values(), key=lambda g: g.name))

    def group(self, name: str) -> Group:
        """Return one group; a refusal as AWS's if there is none."""
        return self.read(lambda fleet, _at: _group(fleet, name))

    def instances(self) -> list[Instance]:
        """Return all instances that EC2 still knows, terminated ones included, by id."""
        return self.read(
            lambda fleet, _at: sorted(fleet.instances.values(), key=lambda i: i.instance_id)
        )

    def instance(self, instance_id: str) -> Instance:
        """Return one instance.

        Raises:
            KeyError: EC2 does not know it (any more).
        """
        return self.read(lambda fleet, _at: fleet.instances[instance_id])

    def known(self, instance_ids: Sequence[str]) -> list[Instance]:
        """Return the instances in the order asked for, or EC2's refusal if one is unknown."""
        return self.read(lambda fleet, _at: _known(fleet, instance_ids))

    def members(self, group: str) -> list[Instance]:
        """Return what a group lists, in order of joining."""
        return self.read(lambda fleet, _at: fleet.members(group))

    def activities(self, group: str | None = None) -> list[Activity]:
        """Return activities as AWS sorts them: in progress first, then the latest first."""

        def query(fleet: Fleet, _at: float) -> list[Activity]:
            newest = [
                activity
                for activity in reversed(fleet.activities.values())
                if group is None or activity.group == group
            ]
            return sorted(newest, key=lambda activity: (activity.is_over, -activity.started_at))

        return self.read(query)

    def reservations(self) -> list[tuple[Reservation, int]]:
        """Return each reservation with its available instance count."""
        return self.read(
            lambda fleet, at: [
                (value, fleet.available(value, at)) for value in fleet.reservations.values()
            ]
        )

    def set_shortage(self, name: str, shortage: Shortage | None) -> None:
        """Make launches of a group (or the start of an instance, by its id) fail; None: lift."""

        def change(fleet: Fleet, _at: float) -> None:
            fleet.shortages.pop(name, None)
            if shortage is not None:
                fleet.shortages[name] = shortage

        self.change(change)

    def set_refreshes(self, group: str, refreshes: Iterable[InstanceRefresh]) -> None:
        """Put instance refreshes on record."""
        self._edit_group(group, lambda old: replace(old, refreshes=tuple(refreshes)))

    def set_zone_plan(self, group: str, zones: Iterable[str]) -> None:
        """Fix the zones of a group's next launches, in order."""
        self._edit_group(group, lambda old: replace(old, zone_plan=tuple(zones)))

    def set_timing(self, group: str, timing: Timing) -> None:
        """Change how long a group's transitions take, from the next one on."""
        self._edit_group(group, lambda old: replace(old, timing=timing))

    def _edit_group(self, name: str, edit: Callable[[Group], Group]) -> None:
        def change(fleet: Fleet, _at: float) -> None:
            fleet.groups[name] = edit(_group(fleet, name))

        self.change(change)

    def edit_instance(self, instance_id: str, edit: Callable[[Instance], Instance]) -> None:
        """Change an instance's fields as a scene needs it: protection, status checks, lifecycle.

        Example:
            >>> from dataclasses import replace
            >>> model = CapacityModel(clock=lambda: 0.0)
            >>> node = model.add_static_instance()
            >>> edit = lambda instance: replace(instance, system_status="impaired")
            >>> model.edit_instance(node.instance_id, edit)
            >>> model.instance(node.instance_id).system_status
            'impaired'
        """

        def change(fleet: Fleet, _at: float) -> None:
            fleet.put(edit(fleet.instances[instance_id]))

        self.change(change)

    def terminate_as_service(
        self, instance_id: str, *, cause: str, decrement: bool = False
    ) -> Activity:
        """Let AWS or an autoscaler take a member, with a cause text of its own.

        For the third-party terminations of a scene: cluster-autoscaler with decrement, AZ
        rebalance. `At TIME` is put before the cause.
        """

        def change(fleet: Fleet, at: float) -> Activity:
            instance = _member(fleet, instance_id)
            _refuse_moving(instance)
            if decrement:
                _resize(fleet, str(instance.group), -1)
            return fleet.begin_termination(instance, f"At {iso(at)} {cause}", at)

        return self.change(change)

    # --- Auto Scaling's operations ------------------------------------------------------------

    def terminate_in_group(
        self, instance_id: str, *, decrement: bool, group: str | None = None
    ) -> Activity:
        """TerminateInstanceInAutoScalingGroup for one instance."""
        return self.terminate_all_in_group([instance_id], decrement=decrement, group=group)[0]

    def terminate_all_in_group(
        self, instance_ids: Sequence[str], *, decrement: bool, group: str | None = None
    ) -> list[Activity]:
        """TerminateInstanceInAutoScalingGroup; all of them or none.

        Suspending Terminate does not stop it (a person asked), nor does scale-in protection. An
        instance that is leaving or arriving already is refused with ScalingActivityInProgress.
        """

        def change(fleet: Fleet, at: float) -> list[Activity]:
            activities = []
            for instance_id in instance_ids:
                instance = _member(fleet, instance_id, group)
                _refuse_moving(instance)
                shrinking = ""
                if decrement:
                    old = _resize(fleet, str(instance.group), -1)
                    shrinking = f", shrinking the capacity from {old} to {old - 1}"
                cause = (
                    f"At {iso(at)} instance {instance_id} was taken out of service in response to "
                    f"a user request{shrinking}."
                )
                activities.append(fleet.begin_termination(instance, cause, at))
            return activities

        return self.change(change)

    def set_health(self, instance_id: str, health: str, *, respects_grace: bool) -> None:
        """SetInstanceHealth: asynchronous, and without effect on an instance within its grace."""
        if health not in ("Healthy", "Unhealthy"):
            raise validation_error(
                f"Valid instance health states are: [Healthy, Unhealthy]. {health!r} is not one."
            )

        def change(fleet: Fleet, at: float) -> None:
            instance = _member(fleet, instance_id)
            group = fleet.groups[str(instance.group)]
            is_young = at - instance.launch_time < group.health_check_grace_s
            if health == "Unhealthy" and respects_grace and is_young:
                return
            fleet.put(replace(instance, health=health))

        self.change(change)

    def suspend(self, group: str, processes: Iterable[str]) -> None:
        """SuspendProcesses; none named: all."""
        names = _processes(processes)

        def change(fleet: Fleet, at: float) -> None:
            old = _group(fleet, group)
            reason = f"User suspended at {iso(at)}"
            fleet.groups[group] = replace(
                old, suspended={**dict.fromkeys(names, reason), **old.suspended}
            )

        self.change(change)

    def resume(self, group: str, processes: Iterable[str]) -> None:
        """ResumeProcesses; none named: all."""
        names = set(_processes(processes))

        def change(fleet: Fleet, _at: float) -> None:
            old = _group(fleet, group)
            left = {name: why for name, why in old.suspended.items() if name not in names}
            fleet.groups[group] = replace(old, suspended=left)

        self.change(change)

    def set_desired(self, group: str, desired: int, *, honors_cooldown: bool = False) -> None:
        """SetDesiredCapacity, within the group's bounds."""

        def change(fleet: Fleet, _at: float) -> None:
            old = _group(fleet, group)
            if desired > old.max_size:
                raise validation_error(
                    f"New SetDesiredCapacity value {desired} is above max value {old.max_size} "
                    "for the AutoScalingGroup."
                )
            if desired < old.min_size:
                raise validation_error(
                    f"New SetDesiredCapacity value {desired} is below min value {old.min_size} "
                    "for the AutoScalingGroup."
                )
            if honors_cooldown:
                for activity in fleet.activities.values():
                    if activity.group == group and not activity.is_over:
                        raise AwsAnswerError(
                            "ScalingActivityInProgress",
                            f"Scaling activity {activity.activity_id} is in progress and blocks "
                            "this action",
                        )
            fleet.groups[group] = replace(old, desired=desired)

        self.change(change)

    def enter_standby(
        self, group: str, instance_ids: Sequence[str], *, decrement: bool
    ) -> list[Activity]:
        """EnterStandby; without decrement the group launches in their place."""

        def change(fleet: Fleet, at: float) -> list[Activity]:
            activities = []
            for instance_id in instance_ids:
                instance = _part_of(fleet, instance_id, group)
                if instance.lifecycle is not Lifecycle.IN_SERVICE:
                    raise validation_error(f"The instance {instance_id} is not in InService.")
                shrinking = ""
                if decrement:
                    old = _resize(fleet, group, -1, "place into standby 1 instance")
                    shrinking = f", shrinking the capacity from {old} to {old - 1}"
                activity = fleet.new_activity(
                    instance,
                    f"Moving EC2 instance to Standby: {instance_id}",
                    f"At {iso(at)} instance {instance_id} was moved to standby in response to a "
                    f"user request{shrinking}.",
                    at,
                    50,
                )
                fleet.put(
                    replace(
                        instance,
                        lifecycle=Lifecycle.ENTERING_STANDBY,
                        lifecycle_due=at + fleet.groups[group].timing.standby_s,
                        activity_id=activity.activity_id,
                    )
                )
                activities.append(activity)
            return activities

        return self.change(change)

    def exit_standby(self, group: str, instance_ids: Sequence[str]) -> list[Activity]:
        """ExitStandby: raises the desired capacity by what comes back."""

        def change(fleet: Fleet, at: float) -> list[Activity]:
            activities = []
            for instance_id in instance_ids:
                instance = _part_of(fleet, instance_id, group)
                if instance.lifecycle is not Lifecycle.STANDBY:
                    raise validation_error(f"The instance {instance_id} is not in Standby.")
                old = _resize(fleet, group, +1, "bring back 1 instance")
                activity = fleet.new_activity(
                    instance,
                    f"Moving EC2 instance out of Standby: {instance_id}",
                    f"At {iso(at)} instance {instance_id} was moved out of standby in response to "
                    f"a user request, increasing the capacity from {old} to {old + 1}.",
                    at,
                    30,
                )
                fleet.put(
                    replace(
                        instance,
                        lifecycle=Lifecycle.PENDING,
                        lifecycle_due=at + fleet.groups[group].timing.standby_s,
                        activity_id=activity.activity_id,
                    )
                )
                activities.append(activity)
            return activities

        return self.change(change)

    def complete_hook(self, group: str, hook: str, instance_id: str, result: str) -> None:
        """CompleteLifecycleAction: an arrival that is abandoned is terminated."""

        def change(fleet: Fleet, at: float) -> None:
            instance = fleet.instances.get(instance_id)
            names = {known.name for known in _group(fleet, group).hooks}
            if (
                hook not in names
                or instance is None
                or instance.group != group
                or instance.lifecycle not in (Lifecycle.PENDING_WAIT, Lifecycle.TERMINATING_WAIT)
            ):
                raise validation_error(
                    f"No active Lifecycle Action found with instance ID {instance_id}"
                )
            if instance.lifecycle is Lifecycle.PENDING_WAIT and result == "ABANDON":
                cause = (
                    f"At {iso(at)} an instance was taken out of service in response to an "
                    "abandoned lifecycle action."
                )
                fleet.begin_termination(instance, cause, at)
            else:
                fleet.put(replace(instance, lifecycle_due=at))

        self.change(change)

    def tag_group(self, group: str, tags: Mapping[str, str]) -> None:
        """CreateOrUpdateTags on one group; running instances keep theirs."""
        self._edit_group(group, lambda old: replace(old, tags={**old.tags, **tags}))

    # --- EC2's operations ---------------------------------------------------------------------

    def terminate(self, instance_ids: Sequence[str]) -> list[tuple[Instance, Instance]]:
        """TerminateInstances; returns each instance before and after. Repeats are no error."""

        def change(fleet: Fleet, at: float) -> list[tuple[Instance, Instance]]:
            pairs = []
            for old in _known(fleet, instance_ids):
                if old.disable_api_termination and old.terminated_at is None:
                    raise AwsAnswerError(
                        "OperationNotPermitted",
                        f"The instance '{old.instance_id}' may not be terminated. Modify its "
                        "'disableApiTermination' instance attribute and try again.",
                    )
                if old.operator is not None:
                    raise AwsAnswerError(
                        "OperationNotPermitted",
                        f"The instance '{old.instance_id}' is managed by {old.operator} and may "
                        "not be terminated.",
                    )
                if old.state not in (Ec2State.SHUTTING_DOWN, Ec2State.TERMINATED):
                    fleet.shut_down(old, at)
                pairs.append((old, fleet.instances[old.instance_id]))
            return pairs

        return self.change(change)

    def stop_instances(self, instance_ids: Sequence[str]) -> list[tuple[Instance, Instance]]:
        """StopInstances; a group will find the stopped instance unhealthy."""

        def change(fleet: Fleet, at: float) -> list[tuple[Instance, Instance]]:
            pairs = []
            for old in _known(fleet, instance_ids):
                if old.state in (Ec2State.PENDING, Ec2State.SHUTTING_DOWN, Ec2State.TERMINATED):
                    raise _wrong_state(old, "stopped")
                new = old
                if old.state is Ec2State.RUNNING:
                    new = replace(
                        old,
                        state=Ec2State.STOPPING,
                        state_due=at + fleet.timing(old).stop_s,
                        reboot_due=None,
                    )
                pairs.append((old, fleet.put(new)))
            return pairs

        return self.change(change)

    def start_instances(self, instance_ids: Sequence[str]) -> list[tuple[Instance, Instance]]:
        """StartInstances; needs capacity again, and moves the launch time."""

        def change(fleet: Fleet, at: float) -> list[tuple[Instance, Instance]]:
            pairs = []
            for old in _known(fleet, instance_ids):
                if old.state not in (Ec2State.RUNNING, Ec2State.PENDING, Ec2State.STOPPED):
                    raise _wrong_state(old, "started")
                new = old
                if old.state is Ec2State.STOPPED:
                    new = replace(
                        old,
                        state=Ec2State.PENDING,
                        state_due=at + fleet.timing(old).start_s,
                        launch_time=float(int(at)),
                    )
                pairs.append((old, fleet.put(new)))
            return pairs

        self._refuse_start(instance_ids)
        return self.change(change)

    def _refuse_start(self, instance_ids: Sequence[str]) -> None:
        """Count a try against each shortage, apart from the start, which a refusal undoes."""

        def change(fleet: Fleet, at: float) -> tuple[str, Instance] | None:
            for instance in _known(fleet, instance_ids):
                if instance.state is Ec2State.STOPPED:
                    code = fleet.take_shortage(instance.instance_id, at)
                    if code is not None:
                        return code, instance
            return None

        refused = self.change(change)
        if refused is not None:
            code, instance = refused
            text = capacity_error_text(code, instance.instance_type, instance.zone, [])
            message = text.split(" - ", 1)[1].removesuffix(" Launching EC2 instance failed.")
            raise AwsAnswerError(code, message, 500)

    def reboot(self, instance_ids: Sequence[str]) -> None:
        """RebootInstances: only queues; the boot follows after `reboot_s`, with `on_reboot`."""

        def change(fleet: Fleet, at: float) -> None:
            for old in _known(fleet, instance_ids):
                if old.state is not Ec2State.RUNNING:
                    raise AwsAnswerError(
                        "IncorrectState",
                        f"Instance '{old.instance_id}' is not in the 'running' state.",
                    )
                fleet.put(replace(old, reboot_due=at + fleet.timing(old).reboot_s))

        self.change(change)


def _group(fleet: Fleet, name: str) -> Group:
    group = fleet.groups.get(name)
    if group is None:
        raise validation_error(
            f"AutoScalingGroup name not found - AutoScalingGroup: {name} not found"
        )
    return group


def _member(fleet: Fleet, instance_id: str, group: str | None = None) -> Instance:
    instance = fleet.instances.get(instance_id)
    if instance is None or not instance.is_member:
        raise validation_error(
            f"Instance Id not found - No managed instance found for instance ID {instance_id}"
        )
    if group is not None and instance.group != group:
        raise validation_error(
            f"The instance {instance_id} is not part of Auto Scaling group {group}."
        )
    return instance


def _part_of(fleet: Fleet, instance_id: str, group: str) -> Instance:
    _group(fleet, group)
    instance = fleet.instances.get(instance_id)
    if instance is None or not instance.is_member or instance.group != group:
        raise validation_error(
            f"The instance {instance_id} is not part of Auto Scaling group {group}."
        )
    return instance


def _refuse_moving(instance: Instance) -> None:
    if instance.lifecycle in LEAVING | ARRIVING | {Lifecycle.ENTERING_STANDBY}:
        raise activity_in_progress(instance.activity_id or "unknown")


def _resize(fleet: Fleet, name: str, by: int, purpose: str = "") -> int:
    """Change the desired capacity within the bounds and return what it was.

    The refusal of a termination has a text of its own; `purpose` goes into that of the others.
    """
    group = fleet.groups[name]
    if group.min_size <= group.desired + by <= group.max_size:
        fleet.groups[name] = replace(group, desired=group.desired + by)
        return group.desired
    if not purpose:
        raise validation_error(
            f"Currently, desiredSize equals minSize ({group.min_size}). Terminating instance "
            "without replacement will violate group's min size constraint. Either set "
            "shouldDecrementDesiredCapacity flag to false or lower group's min size."
        )
    raise validation_error(
        f"AutoScalingGroup {name} has min-size={group.min_size}, max-size={group.max_size}, and "
        f"desired-size={group.desired}. To {purpose}, please update the AutoScalingGroup sizes "
        "appropriately."
    )


def _processes(names: Iterable[str]) -> list[str]:
    wanted = list(names)
    for name in wanted:
        if name not in PROCESSES:
            raise validation_error(
                f"Invalid process name {name!r}. Valid names: {', '.join(PROCESSES)}"
            )
    return wanted or list(PROCESSES)


def _known(fleet: Fleet, instance_ids: Sequence[str]) -> list[Instance]:
    """Return the instances in the order asked for, or EC2's refusal for all of them."""
    for instance_id in instance_ids:
        if not is_instance_id(instance_id):
            raise AwsAnswerError("InvalidInstanceID.Malformed", f'Invalid id: "{instance_id}"')
    missing = [instance_id for instance_id in instance_ids if instance_id not in fleet.instances]
    if len(missing) == 1:
        raise AwsAnswerError(
            "InvalidInstanceID.NotFound", f"The instance ID '{missing[0]}' does not exist"
        )
    if missing:
        raise AwsAnswerError(
            "InvalidInstanceID.NotFound", f"The instance IDs '{', '.join(missing)}' do not exist"
        )
    return [fleet.instances[instance_id] for instance_id in instance_ids]


def is_instance_id(text: str) -> bool:
    """Tell whether EC2 takes the text for an instance id: `i-` and 8 or 17 hex digits."""
    digits = text.removeprefix("i-")
    return (
        text.startswith("i-")
        and len(digits) in (8, 17)
        and all(char in "0123456789abcdef" for char in digits)
    )


def _wrong_state(instance: Instance, verb: str) -> AwsAnswerError:
    return AwsAnswerError(
        "IncorrectInstanceState",
        f"The instance '{instance.instance_id}' is not in a state from which it can be {verb}.",
    )
