"""A stage on which the whole pipeline runs: schedules, queues, Lambda, and the state machine.

Messages come again after their queue's visibility time-out, a schedule goes on with its next
minute, and the state machine follows the Retry and Catch of its own definition.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from nodemend.application.dispatch_incidents import dispatch_incidents
from nodemend.application.open_incident import open_incident
from nodemend.application.receive_alert import receive_alert
from nodemend.application.set_pause import SetPausePorts, set_pause
from nodemend.contracts.alerts import ReceiveAlertRequest
from nodemend.contracts.dispatch import DispatchHint, DispatchIncidentsRequest
from nodemend.contracts.events import FaultEnvelope
from nodemend.contracts.pausing import SetPauseRequest
from nodemend.domain.errors import RetryableError
from nodemend.domain.events import DetailType
from nodemend.domain.faults import Family
from nodemend.domain.incidents import IncidentState
from tests.crash.faults import Injector
from tests.fakes.stores import MemoryOutbox
from tests.unit.application import run
from tests.unit.application.machine import Machine
from tests.unit.application.stage import CLUSTER, CrashError, Stage, Tap, samples

VISIBLE_AGAIN = timedelta(seconds=360)
"""`VisibilityTimeout` of every queue in template.yaml."""

RETRY = timedelta(seconds=2)
"""`IntervalSeconds` of the state machines."""

MANY_TICKS = 45
"""More minutes than any scenario may take to come to rest."""

NEWCOMER = 9
"""Number of the node that replaces the sick one."""


class StoppedError(BaseException):
    """A person has stopped the execution."""


class StoppableMachine(Machine):
    """An execution that a person can stop between two steps."""

    is_stopped = False

    def _task(self, state: Any, data: Any, execution: Any) -> Any:
        if self.is_stopped:
            raise StoppedError
        return super()._task(state, data, execution)


@dataclass
class Message:
    """What a queue holds, and from when on it is delivered."""

    handle: Callable[[], object]
    visible_at: datetime
    again: timedelta = VISIBLE_AGAIN


class World(Stage):
    """The pipeline, its cluster, and its AWS account."""

    def __init__(self, injector: Injector, **options: Any) -> None:
        super().__init__(**{"nodes": 2, **options})
        self.crasher = self.injector = injector
        injector.clock, injector.incidents = self.clock, self.incidents
        injector.on_change = self._on_change
        # The outbox's own call of the bus is a call like others.
        self.outbox = MemoryOutbox(self.incidents, Tap(self.bus, injector, "bus"), self.telemetry)
        self.families: tuple[Family, ...] = ()
        """Which scans run each minute."""
        self.expected = 1
        """How many incidents there will be."""
        self.on_terminate: Callable[[], None] = self.bring_newcomer
        self.on_reboot: Callable[[], None] = self.boot_cured
        self.on_evict: Callable[[], None] = lambda: None
        self.on_begin: Callable[[], None] = lambda: None
        """What else happens when an execution begins."""
        self.machines: dict[str, StoppableMachine] = {}
        """By the name of the execution."""
        self._messages: list[Message] = []
        self._collected = 0
        self._has_terminated = False

    # --- what others do -------------------------------------------------------------------------

    def _on_change(self, name: str) -> None:
        # A second termination of the same instance launches nothing more.
        if name == "capacity.terminate" and not self._has_terminated:
            self._has_terminated = True
            self.clock.after(100, self.on_terminate)
        if name == "instances.reboot":
            self.clock.after(60, self.on_reboot)
        if name == "cluster.evict":
            self.on_evict()

    def bring_newcomer(self) -> None:
        """Let the group bring a new node; the old one's metrics end with it."""
        self.metrics.clear()
        self.replace_node(1, NEWCOMER)

    def boot_cured(self) -> None:
        """Let the rebooted node come back, and all its GPUs report."""
        self.metrics.clear()
        self.boot_sick()

    def boot_sick(self) -> None:
        """Let the rebooted node come back, and what was wrong with it be wrong still."""
        self.metrics.answer("count(count by (UUID", samples({}, value=8))
        self.boot()

    def send_alert(self, body: str) -> None:
        """Put a message into the alert queue."""
        request = ReceiveAlertRequest.model_validate({"body": body, "messageId": "m-1"})
        self._send(lambda: receive_alert(request, ports=self.alert))

    def set_pause(self, *, is_paused: bool) -> None:
        """Let a person pause the cluster, or let it go on, in the console."""
        asked = {"cluster": CLUSTER, "paused": is_paused, "reason": "why", "requested_by": "alice"}
        ports = SetPausePorts(
            guards=self._tap(self.guards, "guards"),
            policies=self._tap(self.policies, "policies"),
            bus=self._tap(self.bus, "bus"),
            dispatch_queue=self._tap(self.queue, "queue"),
            clock=self.clock,
        )
        self._send(partial(set_pause, SetPauseRequest(input=asked), ports=ports), RETRY)

    def start_by_hand(self, name: str, given: Any) -> None:
        """Let a person start an execution in the console."""
        self._send(partial(self._execute, name, given))

    def stop_executions(self) -> None:
        """Let a person stop in the console whatever runs."""
        for machine in self.machines.values():
            machine.is_stopped = True

    def patrol(self) -> None:
        """Let the schedules of dispatcher and watchdog go on while an execution runs."""
        statuses = self.executions.statuses.values()
        if any(status.is_running for status in statuses):
            self._invoke(self.dispatch_all)
            self._invoke(partial(run.watch, self))
            self.clock.after(60, self.patrol)

    # --- how it runs ----------------------------------------------------------------------------

    def run(self) -> None:
        """Run until nothing is left to do, and then undisturbed for as long as repairs may take."""
        for _ in range(MANY_TICKS):
            self._tick()
            if self._is_at_rest():
                break
            self.clock.advance(60)
        else:
            raise AssertionError(f"it never ends: {self._open_states()}")
        self.injector.is_on = False
        for _ in range(2):
            self.clock.advance(120)
            self._tick()
        assert self._is_at_rest(), "something begins anew"

    def _tick(self) -> None:
        for family in self.families:
            self._invoke(partial(run.scan, self, family))
        self._deliver()
        self._invoke(self.dispatch_all)
        self._invoke(partial(run.watch, self))
        self._deliver()

    def _is_at_rest(self) -> bool:
        self._collect()
        is_enough = len(self.incidents.records) >= self.expected
        return is_enough and not self._messages and not self._open_states()

    def _open_states(self) -> list[str]:
        states = [str(record.document["state"]) for record in self.incidents.records.values()]
        return [state for state in states if state != IncidentState.CLOSED]

    def _invoke(self, work: Callable[[], object]) -> bool:
        """Run one invocation; False if it failed, so that its message is delivered again."""
        try:
            work()
        except (RetryableError, CrashError):
            return False
        return True

    def _send(self, handle: Callable[[], object], again: timedelta = VISIBLE_AGAIN) -> None:
        self._messages.append(Message(handle, self.clock.now(), again))

    def _deliver(self) -> None:
        """Deliver what is in the queues, and what that brings, until nothing more is visible."""
        self._collect()
        while due := [one for one in self._messages if one.visible_at <= self.clock.now()]:
            for message in due:
                message.visible_at = self.clock.now() + message.again
                if self._invoke(message.handle):
                    self._messages.remove(message)
            self._collect()

    def _collect(self) -> None:
        """Take over what the ports have put on its way."""
        for sent in self.bus.accepted[self._collected :]:
            if sent.detail_type is DetailType.GPU_FAULT_DETECTED:
                fault = FaultEnvelope.model_validate({"detail": sent.detail}).detail
                self._send(partial(self._open, fault))
        self._collected = len(self.bus.accepted)
        hints = tuple(
            DispatchHint(cluster=cluster, incident_id=incident_id)
            for cluster, incident_id in self.queue.messages
        )
        if hints:
            self._send(partial(self._dispatch, DispatchIncidentsRequest(hints=hints)))
            self.queue.messages.clear()
        for name in self.executions.started:
            if name not in self.machines:
                self._execute(name, None)

    def _open(self, fault: Any) -> None:
        open_incident(fault, ports=self.open)

    def _dispatch(self, request: DispatchIncidentsRequest) -> None:
        dispatch_incidents(request, ports=self.dispatch)

    def _execute(self, name: str, given: Any) -> None:
        self.executions.start(name)
        machine = self.machines[name] = StoppableMachine(self)
        self.on_begin()
        try:
            machine.run(name, given)
        except StoppedError:
            self.executions.end(name, "ABORTED")
        status = self.executions.status(self.executions.arn_of(name))
        # EventBridge tells the watchdog of an execution that did not succeed.
        if status is not None and status.status != "SUCCEEDED":
            self._send(partial(run.watch, self, name, status.status))
