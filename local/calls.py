"""What the emulators saw, and what they were told to answer wrongly.

Every emulated service reports each request as an `ApiCall` to one `CallLog`, and asks one
`FaultPlan` before it answers. So a scenario's record of mutations has one source, and a fault is
injected where the real service would have failed: on the wire, not in the product's code.
"""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One request as the emulated service saw it."""

    at: float
    """Unix seconds at which the answer was ready."""
    service: str
    """`kubernetes`, `amp`, or the AWS service as the SDK signs it (`dynamodb`, `events`…)."""
    verb: str
    """Kubernetes: get, list, create, patch, update, delete, evict. AMP: query. AWS: the action."""
    target: str
    """What it was about: `nodes/NAME`, `pods/NAMESPACE/NAME`, an instance id, a table…"""
    caller: str
    """Who signed it: the Lambda function's short name, `kubelet`, `person`, or `unknown`."""
    status: int
    """HTTP status of the answer."""
    is_mutation: bool = False
    """True if the request changed the cluster or the capacity (accepted, and not a dry run)."""


class CallLog:
    """Collects `ApiCall`s from all threads, in the order in which they were answered."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._calls: list[ApiCall] = []

    def add(
        self,
        *,
        service: str,
        verb: str,
        target: str,
        caller: str,
        status: int,
        is_mutation: bool = False,
    ) -> None:
        """Append one call, stamped with the log's clock."""
        with self._lock:
            self._calls.append(
                ApiCall(self._clock(), service, verb, target, caller, status, is_mutation)
            )

    def calls(self) -> list[ApiCall]:
        """Return a copy of all calls so far."""
        with self._lock:
            return list(self._calls)

    def mutations(self) -> list[ApiCall]:
        """Return the calls that changed something."""
        return [call for call in self.calls() if call.is_mutation]


@dataclass(slots=True)
class ApiFault:
    """An instruction to answer matching calls with an error.

    Empty fields match everything. `caller` is the Lambda function's short name.
    """

    verb: str
    status: int
    service: str = ""
    caller: str = ""
    target: str = ""
    """Substring of the call's target."""
    times: int | None = None
    """How many calls to fail; None: all."""
    headers: dict[str, str] = field(default_factory=dict)
    body: str | None = None
    """The error body to send instead of the service's usual one."""

    def matches(self, service: str, verb: str, target: str, caller: str) -> bool:
        """Tell whether a call falls under this fault."""
        return (
            self.verb.lower() == verb.lower()
            and self.service in ("", service)
            and self.caller in ("", caller)
            and self.target in target
        )


class FaultPlan:
    """The faults in force now; emulators ask it before they answer."""

    def __init__(self, faults: Iterable[ApiFault] = ()) -> None:
        self._lock = threading.Lock()
        self._faults = list(faults)

    def add(self, fault: ApiFault) -> None:
        """Put a fault in force."""
        with self._lock:
            self._faults.append(fault)

    def remove(self, fault: ApiFault) -> None:
        """Lift a fault; unknown ones are ignored."""
        with self._lock:
            self._faults = [known for known in self._faults if known is not fault]

    def match(self, service: str, verb: str, target: str, caller: str) -> ApiFault | None:
        """Return the first fault that matches, and count it down."""
        with self._lock:
            for known in self._faults:
                if known.times == 0 or not known.matches(service, verb, target, caller):
                    continue
                if known.times is not None:
                    known.times -= 1
                return known
        return None
