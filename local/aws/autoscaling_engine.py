"""The fleet as a discrete-event simulation: what EC2 and Auto Scaling do by themselves over time.

`Fleet.advance(now)` applies everything that falls due up to `now`, each at its own time, and lets
every group reconcile after it: so one jump of an hour gives the same timeline as an hour of ticks.
Nothing here locks, sleeps or calls out: `CapacityModel` does that.
"""

import hashlib
import ipaddress
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from local.aws.autoscaling_types import (
    ARRIVING,
    COUNTED,
    LAUNCHING,
    LEAVING,
    NOT_RUNNING,
    TERMINATING,
    Activity,
    Ec2State,
    Group,
    Instance,
    Lifecycle,
    Reservation,
    Shortage,
    Timing,
    capacity_error_text,
    iso,
)

TERMINATED_VISIBLE_S = 3600.0
"""EC2 shows a terminated instance for about an hour, then forgets its id."""
ACTIVITIES_KEPT = 2000
_SUBNET_PREFIX = 20
_FIRST_HOST = 10
"""AWS keeps the first addresses of a subnet; a gap keeps names readable."""


@dataclass(slots=True)
class Fleet:
    """All groups, instances and activities, and the rules by which they change."""

    region: str
    seed: str
    groups: dict[str, Group] = field(default_factory=dict)
    instances: dict[str, Instance] = field(default_factory=dict)
    activities: dict[str, Activity] = field(default_factory=dict)
    reservations: dict[str, Reservation] = field(default_factory=dict)
    shortages: dict[str, Shortage] = field(default_factory=dict)
    """By group name, or by instance id for StartInstances."""
    subnets: dict[str, int] = field(default_factory=dict)
    """Subnet id to the number of its address block."""
    cursors: dict[str, int] = field(default_factory=dict)
    rosters: dict[str, dict[str, None]] = field(default_factory=dict)
    """Ids of the members by group, in order of their joining; kept by `put`."""
    addresses: dict[str, str] = field(default_factory=dict)
    """Instance id by private address in use; kept by `put`."""
    notices: list[tuple[str, Instance]] = field(default_factory=list)
    """Hook calls that are owed, in order."""
    serial: int = 0
    default_timing: Timing = field(default_factory=Timing)

    def copy(self) -> "Fleet":
        """Return an independent fleet; the values inside are frozen and shared."""
        return replace(
            self,
            groups=dict(self.groups),
            instances=dict(self.instances),
            activities=dict(self.activities),
            reservations=dict(self.reservations),
            shortages=dict(self.shortages),
            subnets=dict(self.subnets),
            cursors=dict(self.cursors),
            rosters={name: dict(roster) for name, roster in self.rosters.items()},
            addresses=dict(self.addresses),
            notices=list(self.notices),
        )

    # --- time ---------------------------------------------------------------------------------

    def next_due(self) -> float | None:
        """Return the time of the next thing that happens by itself; None: nothing ever."""
        due = min(self._dues(), default=math.inf)
        return None if due == math.inf else due

    def _dues(self) -> Iterator[float]:
        for instance in self.instances.values():
            for due in (
                instance.state_due,
                instance.lifecycle_due,
                instance.reboot_due,
                instance.health_due,
            ):
                if due is not None:
                    yield due
        for group in self.groups.values():
            for due in (group.launch_due, group.rebalance_due):
                if due is not None:
                    yield due

    def advance(self, now: float) -> None:
        """Let everything happen that is due by `now`."""
        while (due := self.next_due()) is not None and due <= now:
            for instance_id in list(self.instances):
                self._step_instance(instance_id, due)
            for name in list(self.groups):
                self._step_group(name, due)
            self.reconcile(due)
        self._forget(now)

    def _forget(self, now: float) -> None:
        for instance in list(self.instances.values()):
            gone_at = instance.terminated_at
            if (
                gone_at is not None
                and not instance.is_member
                and now - gone_at > TERMINATED_VISIBLE_S
            ):
                del self.instances[instance.instance_id]
        surplus = len(self.activities) - ACTIVITIES_KEPT
        if surplus > 0:
            over = [key for key, value in self.activities.items() if value.is_over]
            for key in over[:surplus]:
                del self.activities[key]

    def _step_instance(self, instance_id: str, at: float) -> None:
        instance = self.instances[instance_id]
        if instance.state_due is not None and instance.state_due <= at:
            self._finish_state(instance, at)
            instance = self.instances[instance_id]
        if instance.reboot_due is not None and instance.reboot_due <= at:
            self._boot(replace(instance, reboot_due=None))
            instance = self.instances[instance_id]
        if instance.health_due is not None and instance.health_due <= at:
            instance = self.put(replace(instance, health_due=None, health="Unhealthy"))
        if instance.lifecycle_due is not None and instance.lifecycle_due <= at:
            self._finish_lifecycle(instance, at)

    def _finish_state(self, instance: Instance, at: float) -> None:
        match instance.state:
            case Ec2State.PENDING:
                instance = self.put(replace(instance, state=Ec2State.RUNNING, state_due=None))
                if instance.boots > 0:
                    self._boot(instance)
                else:
                    instance = self.put(replace(instance, boots=1))
                    self.notices.append(("on_launch", instance))
                if instance.lifecycle is Lifecycle.PENDING:
                    self._admit(self.instances[instance.instance_id], at)
            case Ec2State.SHUTTING_DOWN:
                instance = self.put(
                    replace(
                        instance,
                        state=Ec2State.TERMINATED,
                        state_due=None,
                        terminated_at=at,
                        reboot_due=None,
                    )
                )
                self.notices.append(("on_terminate", instance))
                if instance.lifecycle in (Lifecycle.TERMINATING, Lifecycle.TERMINATING_PROCEED):
                    self._remove(instance, at)
            case Ec2State.STOPPING:
                instance = self.put(replace(instance, state=Ec2State.STOPPED, state_due=None))
                self.notices.append(("on_stop", instance))
            case _:
                self.put(replace(instance, state_due=None))

    def _boot(self, instance: Instance) -> None:
        instance = self.put(replace(instance, boots=instance.boots + 1))
        self.notices.append(("on_reboot", instance))

    def _finish_lifecycle(self, instance: Instance, at: float) -> None:
        instance = self.put(replace(instance, lifecycle_due=None))
        match instance.lifecycle:
            case Lifecycle.PENDING | Lifecycle.PENDING_WAIT | Lifecycle.PENDING_PROCEED:
                self._serve(instance, at)
            case Lifecycle.TERMINATING_WAIT:
                self._shut_down(replace(instance, lifecycle=Lifecycle.TERMINATING_PROCEED), at)
            case Lifecycle.ENTERING_STANDBY:
                self.put(replace(instance, lifecycle=Lifecycle.STANDBY))
                self.finish_activity(instance.activity_id, at)
            case _:
                pass

    def _admit(self, instance: Instance, at: float) -> None:
        hook = self._hook(instance, LAUNCHING)
        if hook is None:
            self._serve(instance, at)
            return
        self._progress(instance.activity_id, "MidLifecycleAction", 60)
        self.put(
            replace(
                instance,
                lifecycle=Lifecycle.PENDING_WAIT,
                lifecycle_due=at + hook,
            )
        )

    def _serve(self, instance: Instance, at: float) -> None:
        self.put(replace(instance, lifecycle=Lifecycle.IN_SERVICE))
        self.finish_activity(instance.activity_id, at)

    def _hook(self, instance: Instance, transition: str) -> float | None:
        """Return the longest heartbeat of the hooks that hold this transition."""
        group = self.groups[str(instance.group)]
        return max(
            (hook.heartbeat_s for hook in group.hooks if hook.transition == transition),
            default=None,
        )

    # --- termination --------------------------------------------------------------------------

    def begin_termination(self, instance: Instance, cause: str, at: float) -> Activity:
        """Take a member out of service; the instance dies after the hook and `terminate_s`."""
        former = self.activities.get(instance.activity_id or "")
        if former is not None and not former.is_over:
            self.activities[former.activity_id] = replace(
                former, status="Cancelled", progress=100, ended_at=at
            )
        activity = self.new_activity(
            instance, f"Terminating EC2 instance: {instance.instance_id}", cause, at
        )
        instance = replace(
            instance,
            lifecycle=Lifecycle.TERMINATING,
            lifecycle_due=None,
            health_due=None,
            activity_id=activity.activity_id,
        )
        wait_s = self._hook(instance, TERMINATING)
        if wait_s is None:
            self._shut_down(instance, at)
        else:
            self._progress(activity.activity_id, "MidLifecycleAction", 0)
            self.put(
                replace(instance, lifecycle=Lifecycle.TERMINATING_WAIT, lifecycle_due=at + wait_s)
            )
        return self.activities[activity.activity_id]

    def _shut_down(self, instance: Instance, at: float) -> None:
        group = self.groups[str(instance.group)]
        self._progress(instance.activity_id, "InProgress", 0)
        if instance.state is Ec2State.TERMINATED:
            self._remove(instance, at)
        elif instance.state is Ec2State.SHUTTING_DOWN or (
            instance.disable_api_termination and group.protection_blocks_group
        ):
            self.put(instance)
        else:
            self.shut_down(instance, at)

    def shut_down(self, instance: Instance, at: float) -> None:
        """Let EC2 take an instance down, whether or not it is in a group."""
        instance = self.put(
            replace(
                instance,
                state=Ec2State.SHUTTING_DOWN,
                state_due=at + self.timing(instance).terminate_s,
                reboot_due=None,
                reason=f"User initiated ({iso(at).replace('T', ' ').replace('Z', ' GMT')})",
            )
        )
        self.notices.append(("on_shutdown", instance))

    def _remove(self, instance: Instance, at: float) -> None:
        self.put(replace(instance, lifecycle=None, lifecycle_due=None, health_due=None))
        self.finish_activity(instance.activity_id, at)

    # --- groups -------------------------------------------------------------------------------

    def members(self, name: str) -> list[Instance]:
        """Return what the group lists, terminating ones included, in order of their joining."""
        return [self.instances[instance_id] for instance_id in self.rosters.get(name, ())]

    def counted(self, name: str) -> list[Instance]:
        """Return the members that count against the desired capacity."""
        return [member for member in self.members(name) if member.lifecycle in COUNTED]

    def reconcile(self, at: float) -> None:
        """Let each group compare what it has with what it wants, and plan."""
        for name in list(self.groups):
            self._check_health(name, at)
            self._scale_in(name, at)
            self._plan_launch(name, at)
            self._plan_rebalance(name, at)

    def _check_health(self, name: str, at: float) -> None:
        group = self.groups[name]
        for member in self.members(name):
            if member.lifecycle in LEAVING and member.state is Ec2State.RUNNING:
                self._retry_protected(group, member, at)
            if member.lifecycle not in COUNTED or group.is_suspended("HealthCheck"):
                continue
            if member.health == "Unhealthy":
                if not group.is_suspended("ReplaceUnhealthy", "Terminate"):
                    self._replace_unhealthy(group, member, at)
            elif member.state in NOT_RUNNING and member.health_due is None:
                self.put(replace(member, health_due=at + group.timing.health_check_s))

    def _retry_protected(self, group: Group, member: Instance, at: float) -> None:
        """Go on with a termination that protection held, once the protection is lifted."""
        if (
            group.protection_blocks_group
            and not member.disable_api_termination
            and member.lifecycle in (Lifecycle.TERMINATING, Lifecycle.TERMINATING_PROCEED)
        ):
            self.shut_down(member, at)

    def _replace_unhealthy(self, group: Group, member: Instance, at: float) -> None:
        why = (
            "an EC2 health check indicating it has been terminated or stopped"
            if member.state in NOT_RUNNING
            else "a user health-check"
        )
        self.groups[group.name] = replace(
            self.groups[group.name],
            unhealthy_losses=self.groups[group.name].unhealthy_losses + 1,
        )
        cause = f"At {iso(at)} an instance was taken out of service in response to {why}."
        self.begin_termination(member, cause, at)

    def _scale_in(self, name: str, at: float) -> None:
        group = self.groups[name]
        while not group.is_suspended("Terminate"):
            counted = self.counted(name)
            if len(counted) <= group.desired or any(
                member.lifecycle in ARRIVING for member in counted
            ):
                return
            victim = self._victim(counted)
            if victim is None:
                return
            have = len(counted)
            self.begin_termination(
                victim,
                f"At {iso(at)} an instance was taken out of service in response to a difference "
                f"between desired and actual capacity, shrinking the capacity from {have} to "
                f"{have - 1}.  At {iso(at)} instance {victim.instance_id} was selected for "
                "termination.",
                at,
            )

    @staticmethod
    def _victim(counted: list[Instance]) -> Instance | None:
        """Pick as the default policy does: the fullest zone first, then the oldest instance."""
        zones = Counter(member.zone for member in counted)
        candidates = [member for member in counted if not member.protected_from_scale_in]
        return min(
            candidates,
            key=lambda member: (-zones[member.zone], member.launch_time, member.instance_id),
            default=None,
        )

    def _plan_launch(self, name: str, at: float) -> None:
        group = self.groups[name]
        is_wanted = not group.is_suspended("Launch") and len(self.counted(name)) < group.desired
        if is_wanted and group.launch_due is None:
            self.groups[name] = replace(group, launch_due=at + group.timing.launch_delay_s)
        elif not is_wanted and group.launch_due is not None:
            self.groups[name] = replace(group, launch_due=None)

    def _plan_rebalance(self, name: str, at: float) -> None:
        group = self.groups[name]
        counted = self.counted(name)
        is_due = (
            group.rebalances
            and not group.is_suspended("AZRebalance", "Launch", "Terminate")
            and len(counted) == group.desired
            and all(member.lifecycle is Lifecycle.IN_SERVICE for member in counted)
            and self._spread(group, counted) > 1
        )
        if is_due and group.rebalance_due is None:
            self.groups[name] = replace(group, rebalance_due=at + group.timing.rebalance_s)
        elif not is_due and group.rebalance_due is not None:
            self.groups[name] = replace(group, rebalance_due=None)

    @staticmethod
    def _spread(group: Group, counted: list[Instance]) -> int:
        sizes = Counter(dict.fromkeys(group.zones, 0))
        sizes.update(member.zone for member in counted)
        return max(sizes.values()) - min(sizes.values())

    def _step_group(self, name: str, at: float) -> None:
        group = self.groups[name]
        if group.launch_due is not None and group.launch_due <= at:
            self.groups[name] = replace(group, launch_due=None)
            self._launch_missing(name, at)
        group = self.groups[name]
        if group.rebalance_due is not None and group.rebalance_due <= at:
            self.groups[name] = replace(group, rebalance_due=None)
            zone = self._next_zone(name)
            cause = (
                f"At {iso(at)} instances were launched to balance instances in zones {zone} with "
                "other zones resulting in more than desired number of instances in the group."
            )
            self._launch_one(name, zone, cause, at)

    def _launch_missing(self, name: str, at: float) -> None:
        have = len(self.counted(name))
        missing = self.groups[name].desired - have
        for number in range(missing):
            group = self.groups[name]
            if group.unhealthy_losses > 0:
                cause = (
                    f"At {iso(at)} an instance was launched in response to an unhealthy instance "
                    "needing to be replaced."
                )
            else:
                cause = (
                    f"At {iso(at)} an instance was started in response to a difference between "
                    f"desired and actual capacity, increasing the capacity from {have + number} "
                    f"to {have + missing}."
                )
            zone = group.zone_plan[0] if group.zone_plan else self._next_zone(name)
            if not self._launch_one(name, zone, cause, at):
                group = self.groups[name]
                delay_s = min(
                    group.timing.retry_base_s * 2.0 ** min(group.failed_launches, 30),
                    group.timing.retry_cap_s,
                )
                self.groups[name] = replace(
                    group, launch_due=at + delay_s, failed_launches=group.failed_launches + 1
                )
                return
            self.groups[name] = replace(
                self.groups[name],
                zone_plan=group.zone_plan[1:],
                failed_launches=0,
                unhealthy_losses=max(group.unhealthy_losses - 1, 0),
            )

    def _next_zone(self, name: str) -> str:
        group = self.groups[name]
        sizes = Counter(member.zone for member in self.counted(name))
        return min(group.zones, key=lambda zone: (sizes[zone], group.zones.index(zone)))

    def _launch_one(self, name: str, zone: str, cause: str, at: float) -> bool:
        group = self.groups[name]
        code = self._lacking(group, at)
        if code is not None:
            text = capacity_error_text(
                code, group.instance_type, zone, [other for other in group.zones if other != zone]
            )
            activity_id = self._new_id("activity")
            self.activities[activity_id] = Activity(
                activity_id=activity_id,
                group=name,
                description=f"Launching a new EC2 instance.  Status Reason: {text}",
                cause=cause,
                started_at=at,
                ended_at=at,
                status="Failed",
                progress=100,
                message=text,
                zone=zone,
                subnet_id=group.subnets[zone],
            )
            return False
        instance = self.create_instance(
            group, zone, at, state=Ec2State.PENDING, lifecycle=Lifecycle.PENDING
        )
        activity = self.new_activity(
            instance, f"Launching a new EC2 instance: {instance.instance_id}", cause, at, 30
        )
        self.put(
            replace(
                instance,
                boots=0,
                state_due=at + group.timing.pending_s,
                activity_id=activity.activity_id,
            )
        )
        return True

    def _lacking(self, group: Group, at: float) -> str | None:
        """Return the error code if EC2 has no capacity for the group now."""
        code = self.take_shortage(group.name, at)
        if code is None and group.capacity_reservation_id is not None:
            reservation = self.reservations.get(group.capacity_reservation_id)
            if reservation is None or self.available(reservation, at) < 1:
                code = "ReservationCapacityExceeded"
        return code

    def take_shortage(self, name: str, at: float) -> str | None:
        """Count one try against the shortage of a group or instance; None: there is capacity."""
        shortage = self.shortages.get(name)
        if shortage is None:
            return None
        if shortage.tries > 0:
            self.shortages[name] = replace(shortage, tries=shortage.tries - 1)
            return shortage.code
        if shortage.until is not None and at < shortage.until:
            return shortage.code
        del self.shortages[name]
        return None

    def available(self, reservation: Reservation, at: float) -> int:
        """Return the AvailableInstanceCount of a reservation."""
        if reservation.state != "active" or (reservation.end is not None and at >= reservation.end):
            return 0
        used = sum(
            instance.capacity_reservation_id == reservation.reservation_id
            and (
                instance.state not in (Ec2State.TERMINATED, Ec2State.STOPPED)
                or (
                    instance.terminated_at is not None
                    and at < instance.terminated_at + reservation.cleanup_s
                )
            )
            for instance in self.instances.values()
        )
        return max(reservation.total - used - reservation.taken_by_others, 0)

    # --- making things ------------------------------------------------------------------------

    def create_instance(
        self, group: Group, zone: str, at: float, *, state: Ec2State, lifecycle: Lifecycle
    ) -> Instance:
        """Make a member of a group as its launch template says."""
        subnet_id = group.subnets[zone]
        address = self.new_address(subnet_id, reuse=group.reuses_addresses)
        instance_id = self._new_id("instance")
        tags = {
            **group.tags,
            "aws:autoscaling:groupName": group.name,
            "aws:ec2launchtemplate:id": group.launch_template_id,
            "aws:ec2launchtemplate:version": group.launch_template_version,
        }
        return self.put(
            Instance(
                instance_id=instance_id,
                instance_type=group.instance_type,
                zone=zone,
                subnet_id=subnet_id,
                private_ip=address,
                private_dns=self.dns_name(address),
                launch_time=float(math.floor(at)),
                state=state,
                group=group.name,
                lifecycle=lifecycle,
                protected_from_scale_in=group.new_instances_protected,
                disable_api_termination=group.disable_api_termination,
                tags=tags,
                image_id=group.image_id,
                capacity_reservation_id=group.capacity_reservation_id,
                capacity_block_id=group.capacity_block_id,
                purchase=group.purchase,
            )
        )

    def put(self, instance: Instance) -> Instance:
        """Store an instance, keep the indexes right, and return it."""
        instance_id = instance.instance_id
        self.instances[instance_id] = instance
        if instance.group is not None:
            roster = self.rosters.setdefault(instance.group, {})
            if instance.lifecycle is None:
                roster.pop(instance_id, None)
            else:
                roster.setdefault(instance_id)
        if instance.state is not Ec2State.TERMINATED:
            self.addresses[instance.private_ip] = instance_id
        elif self.addresses.get(instance.private_ip) == instance_id:
            del self.addresses[instance.private_ip]
        return instance

    def timing(self, instance: Instance) -> Timing:
        """Return the timing that holds for an instance."""
        group = self.groups.get(instance.group or "")
        return group.timing if group is not None else self.default_timing

    def new_activity(
        self, instance: Instance, description: str, cause: str, at: float, progress: int = 0
    ) -> Activity:
        """Open an activity for a member."""
        activity_id = self._new_id("activity")
        activity = Activity(
            activity_id=activity_id,
            group=str(instance.group),
            description=description,
            cause=cause,
            started_at=at,
            progress=progress,
            zone=instance.zone,
            subnet_id=instance.subnet_id,
        )
        self.activities[activity_id] = activity
        return activity

    def finish_activity(self, activity_id: str | None, at: float) -> None:
        """Mark an activity successful."""
        activity = self.activities.get(activity_id or "")
        if activity is not None and not activity.is_over:
            self.activities[activity.activity_id] = replace(
                activity, status="Successful", progress=100, ended_at=at
            )

    def _progress(self, activity_id: str | None, status: str, progress: int) -> None:
        activity = self.activities.get(activity_id or "")
        if activity is not None and not activity.is_over:
            self.activities[activity.activity_id] = replace(
                activity, status=status, progress=progress
            )

    def _new_id(self, kind: str) -> str:
        """Return the next id: the same seed gives the same ids in the same order."""
        self.serial += 1
        digest = hashlib.sha256(f"{self.seed}/{kind}/{self.serial}".encode()).hexdigest()
        if kind == "instance":
            return f"i-0{digest[:16]}"
        return "-".join((digest[:8], digest[8:12], digest[12:16], digest[16:20], digest[20:32]))

    def new_instance_id(self) -> str:
        """Return an instance id that was never used."""
        return self._new_id("instance")

    def add_subnet(self, name: str, zone: str) -> str:
        """Make a subnet of 4,096 addresses for a zone of a group."""
        digest = hashlib.sha256(f"{self.seed}/subnet/{name}/{zone}".encode()).hexdigest()
        subnet_id = f"subnet-0{digest[:16]}"
        self.subnets.setdefault(subnet_id, len(self.subnets))
        return subnet_id

    def new_address(self, subnet_id: str, *, reuse: bool = False) -> str:
        """Return a free private address of the subnet: the next one, or the lowest with `reuse`."""
        block = self.subnets[subnet_id]
        if block >= 2 ** (_SUBNET_PREFIX - 8):
            raise ValueError("the model has room for 4,096 subnets")
        base = int(ipaddress.ip_address("10.0.0.0")) + (block << (32 - _SUBNET_PREFIX))
        room = 2 ** (32 - _SUBNET_PREFIX) - _FIRST_HOST - 1
        start = 0 if reuse else self.cursors.get(subnet_id, 0)
        for step in range(room):
            host = (start + step) % room
            address = str(ipaddress.ip_address(base + _FIRST_HOST + host))
            if address not in self.addresses:
                if not reuse:
                    self.cursors[subnet_id] = host + 1
                return address
        raise ValueError(f"{subnet_id} has no free address")

    def dns_name(self, address: str) -> str:
        """Return the IP-based private DNS name of an address in this region."""
        suffix = "ec2.internal" if self.region == "us-east-1" else f"{self.region}.compute.internal"
        return f"ip-{address.replace('.', '-')}.{suffix}"
