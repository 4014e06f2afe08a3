"""The part of EC2 that nodemend uses, over the same `CapacityModel` as Auto Scaling.

Instances and their states only, and capacity reservations for reading. What it does not serve is
answered with InvalidAction; a front may send calls not in `handlers` to moto, whose EC2 knows
none of these instances.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from local.aws.autoscaling_model import CapacityModel
from local.aws.autoscaling_types import AwsAnswerError, Ec2State, Instance, Reservation
from local.aws.autoscaling_wire import Behaviour, Ec2Protocol, Fields, QueryFront, page_of

_MOST = 1000
_VPC_ID = "vpc-0123456789abcdef0"


class Ec2Front(QueryFront):
    """The EC2 API over a `CapacityModel`, as a WSGI application."""

    service: ClassVar[str] = "ec2"
    mutations: ClassVar[frozenset[str]] = frozenset(
        {"TerminateInstances", "RebootInstances", "StopInstances", "StartInstances"}
    )

    def __init__(
        self, model: CapacityModel, behaviours: Mapping[str, Behaviour] | None = None
    ) -> None:
        super().__init__(model, Ec2Protocol("ec2"), behaviours)
        self.handlers = {
            "DescribeInstances": self._describe_instances,
            "DescribeInstanceStatus": self._describe_status,
            "DescribeCapacityReservations": self._describe_reservations,
            "TerminateInstances": self._terminate,
            "RebootInstances": self._reboot,
            "StopInstances": self._stop,
            "StartInstances": self._start,
        }

    def target(self, action: str, params: Fields) -> str:
        """Return the ids that the call names."""
        del action
        ids = params.get("InstanceIds") or params.get("CapacityReservationIds") or []
        return ",".join(ids)

    def authorize(self, action: str, params: Fields) -> None:
        """Refuse denied actions, and end a dry run: it answers with an error either way."""
        if action in self.denied:
            raise AwsAnswerError(
                "UnauthorizedOperation",
                "You are not authorized to perform this operation. No identity-based policy "
                f"allows the ec2:{action} action",
                403,
            )
        if params.get("DryRun"):
            raise AwsAnswerError(
                "DryRunOperation", "Request would have succeeded, but DryRun flag is set.", 412
            )

    # --- reads --------------------------------------------------------------------------------

    def _selected(self, params: Fields) -> tuple[list[Instance], str | None]:
        wanted = params.get("InstanceIds", [])
        size = _page_size(params, "instancesSet" if wanted else None)
        if wanted:  # named instances come in one answer, in the order asked for
            size = len(wanted)
        instances = self.model.known(wanted) if wanted else self.model.instances()
        filters = [_filter(rule, _INSTANCE_FIELDS) for rule in params.get("Filters", [])]
        found = [instance for instance in instances if all(rule(instance) for rule in filters)]
        return page_of(
            found, [instance.instance_id for instance in found], size, params.get("NextToken")
        )

    def _describe_instances(self, params: Fields) -> Fields:
        page, token = self._selected(params)
        return {
            "Reservations": [
                {
                    "ReservationId": f"r-{instance.instance_id.removeprefix('i-')}",
                    "OwnerId": self.model.account_id,
                    "Groups": [],
                    "Instances": [_instance_fields(instance)],
                }
                for instance in page
            ],
            "NextToken": token,
        }

    def _describe_status(self, params: Fields) -> Fields:
        shows_all = params.get("IncludeAllInstances", False)
        rules = [] if shows_all else [{"Name": "instance-state-name", "Values": ["running"]}]
        page, token = self._selected({**params, "Filters": [*params.get("Filters", []), *rules]})
        return {
            "InstanceStatuses": [_status_fields(instance) for instance in page],
            "NextToken": token,
        }

    def _describe_reservations(self, params: Fields) -> Fields:
        wanted = params.get("CapacityReservationIds", [])
        size = _page_size(params, None)
        known = {value.reservation_id: (value, free) for value, free in self.model.reservations()}
        for reservation_id in wanted:
            if reservation_id not in known:
                raise AwsAnswerError(
                    "InvalidCapacityReservationId.NotFound",
                    f"The capacity reservation '{reservation_id}' does not exist",
                )
        filters = [_filter(rule, _RESERVATION_FIELDS) for rule in params.get("Filters", [])]
        found = [
            (value, free)
            for key, (value, free) in sorted(known.items())
            if (not wanted or key in wanted) and all(rule(value) for rule in filters)
        ]
        page, token = page_of(
            found, [value.reservation_id for value, _ in found], size, params.get("NextToken")
        )
        return {
            "CapacityReservations": [
                _reservation_fields(value, free, self.model) for value, free in page
            ],
            "NextToken": token,
        }

    # --- mutations ----------------------------------------------------------------------------

    def _terminate(self, params: Fields) -> Fields:
        return {"TerminatingInstances": _changes(self.model.terminate(params["InstanceIds"]))}

    def _stop(self, params: Fields) -> Fields:
        return {"StoppingInstances": _changes(self.model.stop_instances(params["InstanceIds"]))}

    def _start(self, params: Fields) -> Fields:
        return {"StartingInstances": _changes(self.model.start_instances(params["InstanceIds"]))}

    def _reboot(self, params: Fields) -> Fields:
        self.model.reboot(params["InstanceIds"])
        return {}


def _page_size(params: Fields, clash: str | None) -> int:
    size = params.get("MaxResults")
    if size is None:
        return _MOST
    if clash is not None:
        raise AwsAnswerError(
            "InvalidParameterCombination",
            f"The parameter {clash} cannot be used with the parameter maxResults",
        )
    if not 5 <= size <= _MOST:
        raise AwsAnswerError(
            "InvalidParameterValue",
            f"Value ( {size} ) for parameter maxResults is invalid. Expecting a value between 5 "
            f"and {_MOST}.",
        )
    return int(size)


def _instance_fields(instance: Instance) -> Fields:
    is_gone = instance.state is Ec2State.TERMINATED
    fields: Fields = {
        "InstanceId": instance.instance_id,
        "ImageId": instance.image_id,
        "State": _state(instance.state),
        # EC2 blanks the names and drops the addresses of terminated instances.
        "PrivateDnsName": "" if is_gone else instance.private_dns,
        "PublicDnsName": "",
        "StateTransitionReason": instance.reason,
        "AmiLaunchIndex": 0,
        "ProductCodes": [],
        "InstanceType": instance.instance_type,
        "LaunchTime": instance.launch_time,
        "Placement": {"AvailabilityZone": instance.zone, "GroupName": "", "Tenancy": "default"},
        "Monitoring": {"State": "disabled"},
        "Architecture": "x86_64",
        "BlockDeviceMappings": [],
        "EbsOptimized": True,
        "EnaSupport": True,
        "Hypervisor": "xen",
        "NetworkInterfaces": [],
        "RootDeviceName": "/dev/xvda",
        "RootDeviceType": "ebs",
        "SecurityGroups": [],
        "Tags": [{"Key": key, "Value": value} for key, value in sorted(instance.tags.items())],
        "VirtualizationType": "hvm",
        "InstanceLifecycle": instance.purchase,
        "CapacityReservationId": instance.capacity_reservation_id,
        "CapacityBlockId": instance.capacity_block_id,
        "Operator": {"Managed": instance.operator is not None, "Principal": instance.operator},
    }
    if not is_gone:
        fields |= {
            "PrivateIpAddress": instance.private_ip,
            "SubnetId": instance.subnet_id,
            "VpcId": _VPC_ID,
        }
    if instance.reason:
        fields["StateReason"] = {
            "Code": "Client.UserInitiatedShutdown",
            "Message": "Client.UserInitiatedShutdown: User initiated shutdown",
        }
    return fields


def _status_fields(instance: Instance) -> Fields:
    is_running = instance.state is Ec2State.RUNNING
    return {
        "AvailabilityZone": instance.zone,
        "InstanceId": instance.instance_id,
        "InstanceState": _state(instance.state),
        "InstanceStatus": _check(instance.instance_status if is_running else "not-applicable"),
        "SystemStatus": _check(instance.system_status if is_running else "not-applicable"),
        "Events": [
            {
                "InstanceEventId": event.event_id,
                "Code": event.code,
                "Description": event.description,
                "NotBefore": event.not_before,
            }
            for event in instance.scheduled_events
        ],
        "Operator": {"Managed": instance.operator is not None, "Principal": instance.operator},
    }


def _check(status: str) -> Fields:
    if status == "not-applicable":
        return {"Status": status, "Details": []}
    detail = {"ok": "passed", "impaired": "failed"}.get(status, status)
    return {"Status": status, "Details": [{"Name": "reachability", "Status": detail}]}


def _reservation_fields(value: Reservation, available: int, model: CapacityModel) -> Fields:
    return {
        "CapacityReservationId": value.reservation_id,
        "OwnerId": model.account_id,
        "CapacityReservationArn": (
            f"arn:aws:ec2:{model.region}:{model.account_id}:capacity-reservation/"
            f"{value.reservation_id}"
        ),
        "InstanceType": value.instance_type,
        "InstancePlatform": "Linux/UNIX",
        "AvailabilityZone": value.zone,
        "Tenancy": "default",
        "TotalInstanceCount": value.total,
        "AvailableInstanceCount": available,
        "EbsOptimized": False,
        "EphemeralStorage": False,
        "State": value.state,
        "StartDate": value.started_at,
        "EndDate": value.end,
        "EndDateType": "unlimited" if value.end is None else "limited",
        "InstanceMatchCriteria": value.match,
        "CreateDate": value.started_at,
        "Tags": [],
        "ReservationType": value.kind,
    }


def _changes(pairs: Sequence[tuple[Instance, Instance]]) -> list[Fields]:
    return [
        {
            "InstanceId": new.instance_id,
            "CurrentState": _state(new.state),
            "PreviousState": _state(old.state),
        }
        for old, new in pairs
    ]


def _state(state: Ec2State) -> Fields:
    return {"Code": state.code, "Name": state.value}


def _dns(instance: Instance) -> list[str]:
    return [] if instance.state is Ec2State.TERMINATED else [instance.private_dns]


def _address(instance: Instance) -> list[str]:
    return [] if instance.state is Ec2State.TERMINATED else [instance.private_ip]


_INSTANCE_FIELDS: Mapping[str, Callable[[Any], Iterable[str]]] = {
    "instance-id": lambda instance: [instance.instance_id],
    "private-dns-name": _dns,
    "private-ip-address": _address,
    "network-interface.addresses.private-ip-address": _address,
    "instance-state-name": lambda instance: [instance.state.value],
    "instance-state-code": lambda instance: [str(instance.state.code)],
    "instance-type": lambda instance: [instance.instance_type],
    "instance-lifecycle": lambda instance: [instance.purchase or ""],
    "availability-zone": lambda instance: [instance.zone],
    "subnet-id": lambda instance: [instance.subnet_id],
    "capacity-reservation-id": lambda instance: [instance.capacity_reservation_id or ""],
    "system-status.status": lambda instance: [instance.system_status],
    "instance-status.status": lambda instance: [instance.instance_status],
    "event.code": lambda instance: [event.code for event in instance.scheduled_events],
    "operator.managed": lambda instance: [str(instance.operator is not None).lower()],
    "tag-key": lambda instance: list(instance.tags),
}

_RESERVATION_FIELDS: Mapping[str, Callable[[Any], Iterable[str]]] = {
    "state": lambda value: [value.state],
    "instance-type": lambda value: [value.instance_type],
    "availability-zone": lambda value: [value.zone],
    "instance-match-criteria": lambda value: [value.match],
}


def _filter(
    rule: Mapping[str, Any], fields: Mapping[str, Callable[[Any], Iterable[str]]]
) -> Callable[[Any], bool]:
    """Return the test for one filter; its values are alternatives with `*` and `?`."""
    name = rule.get("Name", "")
    pattern = re.compile("|".join(_pattern(value) for value in rule.get("Values", [])) or "(?!)")
    read: Callable[[Any], Iterable[str]]
    if name.startswith("tag:") and fields is _INSTANCE_FIELDS:
        key = name.removeprefix("tag:")

        def read(instance: Instance) -> Iterable[str]:
            return [instance.tags[key]] if key in instance.tags else []
    elif name in fields:
        read = fields[name]
    else:
        raise AwsAnswerError("InvalidParameterValue", f"The filter '{name}' is invalid")
    return lambda thing: any(pattern.fullmatch(text) for text in read(thing))


def _pattern(value: str) -> str:
    return "".join({"*": ".*", "?": "."}.get(char, re.escape(char)) for char in value)
