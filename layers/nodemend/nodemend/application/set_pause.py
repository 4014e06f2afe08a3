"""Pause a cluster, or let it go on: a person's word in the guard item."""

from dataclasses import dataclass

from nodemend.application.guarding import tell_guard
from nodemend.application.ports import Clock, DispatchQueue, EventBus, Guards, Policies
from nodemend.application.steps import update_guard
from nodemend.contracts.pausing import SetPause, SetPauseRequest, SetPauseResult
from nodemend.domain.errors import InvalidInputError, NodemendError
from nodemend.domain.guard import Guard, pause, resume


@dataclass(frozen=True, slots=True)
class SetPausePorts:
    """What pausing needs."""

    guards: Guards
    policies: Policies
    bus: EventBus
    dispatch_queue: DispatchQueue
    clock: Clock


def set_pause(request: SetPauseRequest, *, ports: SetPausePorts) -> SetPauseResult:
    """Set or lift the pause; doing it twice changes nothing and tells nothing twice.

    It holds for every change that is made after this returns: dispatch, the start by hand and each
    mutating step read the guard directly before they act.

    Raises:
        InvalidInputError: if the input is wrong; names the field and the remedy.
        ConcurrentUpdateError: if the guard kept changing; the task is retried.
    """
    wanted = request.parse_input()
    _require_known(wanted.cluster, ports)
    # A try that died after its write finds the state that it wanted, and still has to tell it.
    was_paused = ports.guards.load(wanted.cluster).pause is not None

    def change(guard: Guard) -> Guard:
        decide = pause if wanted.paused else resume
        return decide(guard, by=wanted.requested_by, why=wanted.reason, now=ports.clock.now())

    guard = update_guard(ports.guards, wanted.cluster, change)
    tell_guard(guard, guards=ports.guards, bus=ports.bus)
    if not wanted.paused:
        ports.dispatch_queue.notify(wanted.cluster, "")
    return SetPauseResult(
        cluster=wanted.cluster,
        paused=wanted.paused,
        changed=was_paused is not wanted.paused,
        message=_message(wanted, guard),
    )


def _require_known(cluster: str, ports: SetPausePorts) -> None:
    """Refuse a misspelt name, unless the policy cannot be read: then a stop is wanted most."""
    try:
        known = sorted(one.name for one in ports.policies.current().clusters)
    except NodemendError:
        return
    if cluster not in known:
        names = ", ".join(known) or "(none)"
        raise InvalidInputError(
            "cluster", f"{cluster!r} is not in the policy", f"use one of {names}"
        )


def _message(wanted: SetPause, guard: Guard) -> str:
    if guard.pause is not None:
        return f"{guard.pause.reason().text}; nothing new starts and nothing is changed"
    return f"{wanted.cluster} is not paused; waiting incidents are dispatched now"
