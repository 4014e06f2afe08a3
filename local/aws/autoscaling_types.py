"""The values of the capacity model: groups, instances, activities, and the errors AWS answers with.

All are frozen: a snapshot handed out never changes under its reader, and a whole fleet is copied by
copying two dictionaries, which is what makes operations all-or-nothing.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum


class AwsAnswerError(Exception):
    """An error that goes to the client as AWS's XML error answer."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.status = status


def validation_error(message: str) -> AwsAnswerError:
    """Return Auto Scaling's catch-all refusal; only its message tells the cases apart."""
    return AwsAnswerError("ValidationError", message)


def activity_in_progress(activity_id: str) -> AwsAnswerError:
    """Return the refusal for an instance that is on its way in or out already."""
    return AwsAnswerError("ScalingActivityInProgress", f"Activity {activity_id} is in progress.")


class Ec2State(StrEnum):
    """`instance-state-name` of EC2."""

    PENDING = "pending"
    RUNNING = "running"
    SHUTTING_DOWN = "shutting-down"
    TERMINATED = "terminated"
    STOPPING = "stopping"
    STOPPED = "stopped"

    @property
    def code(self) -> int:
        """EC2's number for the state."""
        return _STATE_CODES[self]


_STATE_CODES: Mapping[Ec2State, int] = {
    Ec2State.PENDING: 0,
    Ec2State.RUNNING: 16,
    Ec2State.SHUTTING_DOWN: 32,
    Ec2State.TERMINATED: 48,
    Ec2State.STOPPING: 64,
    Ec2State.STOPPED: 80,
}

GONE_OR_GOING = frozenset({Ec2State.SHUTTING_DOWN, Ec2State.TERMINATED})
NOT_RUNNING = GONE_OR_GOING | {Ec2State.STOPPING, Ec2State.STOPPED}


class Lifecycle(StrEnum):
    """`LifecycleState` in a group; those without behaviour here can be set by hand."""

    PENDING = "Pending"
    PENDING_WAIT = "Pending:Wait"
    PENDING_PROCEED = "Pending:Proceed"
    IN_SERVICE = "InService"
    TERMINATING = "Terminating"
    TERMINATING_WAIT = "Terminating:Wait"
    TERMINATING_PROCEED = "Terminating:Proceed"
    TERMINATING_RETAINED = "Terminating:Retained"
    ENTERING_STANDBY = "EnteringStandby"
    STANDBY = "Standby"
    DETACHING = "Detaching"
    QUARANTINED = "Quarantined"


LEAVING = frozenset(
    {
        Lifecycle.TERMINATING,
        Lifecycle.TERMINATING_WAIT,
        Lifecycle.TERMINATING_PROCEED,
        Lifecycle.TERMINATING_RETAINED,
    }
)
ARRIVING = frozenset({Lifecycle.PENDING, Lifecycle.PENDING_WAIT, Lifecycle.PENDING_PROCEED})
COUNTED = ARRIVING | {Lifecycle.IN_SERVICE}
"""States that count against the desired capacity: a terminating or standby instance does not."""

PROCESSES = (
    "Launch",
    "Terminate",
    "AddToLoadBalancer",
    "AlarmNotification",
    "AZRebalance",
    "HealthCheck",
    "InstanceRefresh",
    "ReplaceUnhealthy",
    "ScheduledActions",
)

LAUNCHING = "autoscaling:EC2_INSTANCE_LAUNCHING"
TERMINATING = "autoscaling:EC2_INSTANCE_TERMINATING"


@dataclass(frozen=True, slots=True)
class Instance:
    """One EC2 instance, with its place in a group if it has one."""

    instance_id: str
    instance_type: str
    zone: str
    subnet_id: str
    private_ip: str
    private_dns: str
    """Also the node's name in most clusters; empty in EC2's answer once terminated."""
    launch_time: float
    """Unix seconds without fraction, as EC2 has it. Moves on start after a stop, not on reboot."""
    state: Ec2State = Ec2State.RUNNING
    group: str | None = None
    """Name of its Auto Scaling group; kept after the instance left it (see `lifecycle`)."""
    lifecycle: Lifecycle | None = None
    """None: in no group (static, or removed from the group)."""
    health: str = "Healthy"
    protected_from_scale_in: bool = False
    disable_api_termination: bool = False
    tags: Mapping[str, str] = field(default_factory=dict)
    image_id: str = "ami-0123456789abcdef0"
    capacity_reservation_id: str | None = None
    capacity_block_id: str | None = None
    purchase: str | None = None
    """`spot` or `capacity-block` (EC2's InstanceLifecycle); None: on demand."""
    operator: str | None = None
    """Set if a service owns it (EKS Auto Mode: `eks.amazonaws.com`): Operator.Managed is true."""
    boots: int = 1
    """How often it was booted: a reboot or a start adds one, and gives the node a new boot id."""
    system_status: str = "ok"
    """DescribeInstanceStatus: `ok`, `impaired`, `initializing`, `insufficient-data`."""
    instance_status: str = "ok"
    scheduled_events: tuple["ScheduledEvent", ...] = ()
    activity_id: str | None = None
    """The activity that moves it now, or moved it last."""
    state_due: float | None = None
    lifecycle_due: float | None = None
    reboot_due: float | None = None
    health_due: float | None = None
    terminated_at: float | None = None
    reason: str = ""
    """EC2's StateTransitionReason."""

    @property
    def provider_id(self) -> str:
        """`spec.providerID` of its node."""
        return f"aws:///{self.zone}/{self.instance_id}"

    @property
    def is_member(self) -> bool:
        """True while its group still lists it."""
        return self.group is not None and self.lifecycle is not None


@dataclass(frozen=True, slots=True)
class ScheduledEvent:
    """Maintenance that EC2 has announced for an instance (DescribeInstanceStatus)."""

    event_id: str
    code: str
    """One of EC2's: `instance-reboot`, `system-maintenance`, `instance-retirement`…"""
    description: str
    not_before: float


@dataclass(frozen=True, slots=True)
class Activity:
    """One scaling activity as DescribeScalingActivities shows it."""

    activity_id: str
    group: str
    description: str
    cause: str
    started_at: float
    status: str = "InProgress"
    progress: int = 0
    message: str = ""
    ended_at: float | None = None
    zone: str = ""
    subnet_id: str = ""

    @property
    def is_over(self) -> bool:
        """True if it has succeeded, failed or been cancelled."""
        return self.status in ("Successful", "Failed", "Cancelled")

    @property
    def details(self) -> str:
        """The `Details` field: JSON text with the place."""
        return json.dumps(
            {"Subnet ID": self.subnet_id, "Availability Zone": self.zone}, separators=(",", ":")
        )


@dataclass(frozen=True, slots=True)
class LifecycleHook:
    """A hook that holds instances in `Pending:Wait` or `Terminating:Wait`."""

    name: str
    transition: str
    """`LAUNCHING` or `TERMINATING`."""
    heartbeat_s: float = 60.0
    default_result: str = "CONTINUE"


@dataclass(frozen=True, slots=True)
class InstanceRefresh:
    """A rolling replacement that somebody has started: while one runs, nodemend stands down."""

    refresh_id: str
    status: str = "InProgress"
    started_at: float = 0.0
    ended_at: float | None = None
    percentage: int = 0
    to_update: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Timing:
    """How long things take, in seconds. Short by default: a laptop rehearsal must not crawl."""

    terminate_s: float = 2.0
    """From shutting-down to terminated; `math.inf`: it hangs for ever."""
    launch_delay_s: float = 1.0
    """From the missing capacity to the new instance's id."""
    pending_s: float = 1.0
    """From the new instance's id to running, and InService if no hook holds it."""
    health_check_s: float = 1.0
    """Until the group notices that EC2 stopped or terminated an instance behind its back."""
    standby_s: float = 0.5
    stop_s: float = 1.0
    start_s: float = 1.0
    reboot_s: float = 0.5
    """From RebootInstances to the new boot: the call only queues it."""
    retry_base_s: float = 2.0
    """Wait after the first failed launch; doubles up to `retry_cap_s`."""
    retry_cap_s: float = 60.0
    rebalance_s: float = 2.0
    """How long the zones must be uneven before AZRebalance acts, where it is on."""

    def __post_init__(self) -> None:
        if self.retry_base_s <= 0 or self.rebalance_s <= 0:
            raise ValueError("retry_base_s and rebalance_s must be positive: zero would loop")


@dataclass(frozen=True, slots=True)
class Shortage:
    """Launches fail for a number of tries and until a time; both must have passed."""

    tries: int = 0
    until: float | None = None
    """Unix seconds; `math.inf` for a shortage without end."""
    code: str = "InsufficientInstanceCapacity"


@dataclass(frozen=True, slots=True)
class Reservation:
    """An On-Demand Capacity Reservation or a Capacity Block."""

    reservation_id: str
    instance_type: str
    zone: str
    total: int
    kind: str = "default"
    """`default` (ODCR) or `capacity-block`."""
    state: str = "active"
    match: str = "targeted"
    end: float | None = None
    started_at: float = 0.0
    cleanup_s: float = 0.0
    """After termination a slot stays taken this long: EC2 cleans the host first."""
    taken_by_others: int = 0
    """Slots that somebody else's launches hold (an open reservation can be robbed)."""


@dataclass(frozen=True, slots=True)
class Group:
    """One Auto Scaling group."""

    name: str
    arn: str
    min_size: int
    max_size: int
    desired: int
    instance_type: str
    zones: tuple[str, ...]
    subnets: Mapping[str, str]
    """Subnet id by zone."""
    created_at: float
    timing: Timing = field(default_factory=Timing)
    tags: Mapping[str, str] = field(default_factory=dict)
    launch_template: str = ""
    launch_template_id: str = ""
    launch_template_version: str = "1"
    image_id: str = "ami-0123456789abcdef0"
    suspended: Mapping[str, str] = field(default_factory=dict)
    """Suspended processes with the reason text."""
    hooks: tuple[LifecycleHook, ...] = ()
    refreshes: tuple[InstanceRefresh, ...] = ()
    capacity_reservation_id: str | None = None
    capacity_block_id: str | None = None
    purchase: str | None = None
    health_check_grace_s: int = 300
    new_instances_protected: bool = False
    disable_api_termination: bool = False
    protection_blocks_group: bool = False
    """True: termination protection holds the group's own terminations too, in `Terminating`. The
    EC2 guide says it does not, people report it does: both can be rehearsed."""
    rebalances: bool = False
    """True: AZRebalance acts. Off unless wanted, since it terminates nodes nobody asked about."""
    reuses_addresses: bool = False
    """True: a new instance takes the lowest free address, so node names come back at once."""
    zone_plan: tuple[str, ...] = ()
    """Zones of the next launches, before the rule (fewest instances first) decides again."""
    launch_due: float | None = None
    rebalance_due: float | None = None
    failed_launches: int = 0
    unhealthy_losses: int = 0

    def is_suspended(self, *processes: str) -> bool:
        """Tell whether any of the processes is suspended."""
        return any(process in self.suspended for process in processes)


HookCall = Callable[[Instance], None]


def _ignore(_instance: Instance) -> None:
    return None


@dataclass(slots=True)
class CapacityHooks:
    """What the scene does when capacity changes: nodes and exporters come and go with instances.

    Called one at a time, in the order of the events, outside the model's lock, on whichever thread
    moved the model. Instances that `add_group` and `add_static_instance` create are not reported.
    An instance that dies while it is pending is reported as going and gone, never as launched.
    """

    on_launch: HookCall = _ignore
    """The instance has begun to run (its kubelet may join now)."""
    on_shutdown: HookCall = _ignore
    """Its termination has begun: the machine goes down, its kubelet falls silent."""
    on_terminate: HookCall = _ignore
    """The instance is gone."""
    on_reboot: HookCall = _ignore
    """It has booted again, by reboot or by start after stop: `boots` is one higher."""
    on_stop: HookCall = _ignore
    """It has stopped, and may start again."""


def iso(at: float) -> str:
    """Return whole-second ISO time as it stands in activity causes."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def capacity_error_text(code: str, instance_type: str, zone: str, others: list[str]) -> str:
    """Return the StatusMessage of a failed launch, as real groups record it."""
    if code == "ReservationCapacityExceeded":
        why = (
            "The requested reservation does not have sufficient compatible and available capacity "
            "for this request."
        )
    else:
        why = (
            f"We currently do not have sufficient {instance_type} capacity in the Availability "
            f"Zone you requested ({zone}). Our system will be working on provisioning additional "
            "capacity."
        )
        if others:
            why += (
                f" You can currently get {instance_type} capacity by not specifying an "
                f"Availability Zone in your request or choosing {', '.join(others)}."
            )
    return f"Could not launch On-Demand Instances. {code} - {why} Launching EC2 instance failed."
