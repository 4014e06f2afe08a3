"""Whole remediations, from the first sign of a fault to rest, that must survive any fault."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nodemend.domain.errors import RepairRefusedError
from nodemend.domain.faults import Family, Mode
from nodemend.domain.policy import Deadlines, Limits, MaxUnavailable
from nodemend.domain.rails import EXCLUDE_LABEL, PAUSE_ANNOTATION
from tests.crash.faults import Injector
from tests.crash.world import World
from tests.unit.application.run import HAND
from tests.unit.application.stage import (
    PDB_429,
    budget,
    enforce,
    instance_id,
    node_name,
    pod,
    samples,
    xid_labels,
)
from tests.unit.application.test_receive_alert import alert, envelope, message

NEEDS_REBOOT = 119
"""An XID whose action is a reset: the default plan begins with a reboot."""


def scanned(injector: Injector, *, code: int = 79, pods: int = 1, **policy: Any) -> World:
    """A world whose ECC scan sees an XID of node 1."""
    world = World(injector, policy=enforce(**{"hold_down_s": 30, **policy}))
    for number in range(pods):
        world.cluster.add_pod(pod(f"train-{number}"))
    world.metrics.answer("xid-count", samples(xid_labels(1, code, 3)))
    world.families = (Family.ECC,)
    return world


def replaced(injector: Injector) -> World:
    """The way of most faults; dispatcher and watchdog run each minute beside it."""
    world = scanned(injector, pods=2)
    world.on_begin = lambda: world.clock.after(45, world.patrol)
    return world


def rebooted(injector: Injector) -> World:
    """The first rung cures the node."""
    return scanned(injector, code=NEEDS_REBOOT)


def rebooted_and_uncordoned(injector: Injector) -> World:
    """A driver's manager uncordons the node as it boots: the cordon is put back, once."""
    world = scanned(injector, code=NEEDS_REBOOT)

    def boot() -> None:
        world.boot_cured()
        world.uncordon_by_hand()

    world.on_reboot = boot
    return world


def rebooted_in_vain(injector: Injector) -> World:
    """The reboot does not cure, so that the node is replaced."""
    world = scanned(injector, code=NEEDS_REBOOT)
    world.on_reboot = world.boot_sick
    return world


def reboot_refused(injector: Injector) -> World:
    """EC2 refuses the reboot for good, so that the node is replaced."""
    world = scanned(injector, code=NEEDS_REBOOT)
    world.instances.stopped.add(instance_id(1))
    return world


def replacement_refused(injector: Injector) -> World:
    """The group refuses for good: a person is called."""
    world = scanned(injector)
    refused = RepairRefusedError("scale-in protected")
    world.capacity.faults.fail("terminate", refused, times=None)
    return world


def blocked(injector: Injector, **policy: Any) -> World:
    """A world where a budget holds the second of two pods."""
    world = scanned(injector, pods=2, **policy)
    world.cluster.add_budget(budget(match_labels={"app": "train-1"}))
    world.cluster.answer_evictions("ml", "train-1", *[PDB_429] * 100)
    return world


def drained_late(injector: Injector) -> World:
    """A budget holds the drain for a while, and then lets it go on."""
    world = blocked(injector)
    world.on_evict = lambda: world.clock.after(150, world.cluster.answer_evictions_no_more)
    return world


def never_drained(injector: Injector) -> World:
    """A budget holds the drain beyond its deadline: a person is called."""
    return blocked(injector, deadlines=Deadlines(drain_s=300))


def superseded(injector: Injector) -> World:
    """Another machine takes the node's name during the drain."""
    world = blocked(injector)

    def swap() -> None:
        world.metrics.clear()
        world.swap_machine(created_at=world.clock.now())

    world.on_evict = lambda: world.clock.after(150, swap)
    return world


def taken_back(injector: Injector) -> World:
    """A person uncordons the node during the drain."""
    world = blocked(injector)
    world.on_evict = lambda: world.clock.after(150, world.uncordon_by_hand)
    return world


def stopped(injector: Injector) -> World:
    """A person stops the execution in the console; the watchdog closes the incident."""
    world = blocked(injector)
    world.on_evict = lambda: world.clock.after(150, world.stop_executions)
    return world


def recovered(injector: Injector) -> World:
    """The GPU has cooled down when it is looked at again."""
    return cooled(World(injector, policy=enforce()), 1)


def after_another(injector: Injector) -> World:
    """Two nodes are sick and one may be in work: the second waits for the first one's slot."""
    limits = Limits(MaxUnavailable(count=1, percent=50))
    return cooled(World(injector, nodes=4, policy=enforce(limits=limits)), 1, 2)


def cooled(world: World, *numbers: int) -> World:
    """Let a scan find nodes hot, and the second look find that they have cooled down."""
    hot = samples(*(xid_labels(number, None, 3) for number in numbers), value=95)
    world.metrics.answer("gpu-temperature", hot)
    world.families = (Family.THERMAL,)
    world.expected = len(numbers)

    def cool_down() -> None:
        world.families = ()
        world.metrics.clear()
        world.metrics.answer("gpu", samples({}, value=1))

    world.on_begin = cool_down
    return world


def paused(injector: Injector) -> World:
    """A person has paused the cluster when the fault comes, and lets it go on."""
    world = recovered(injector)
    scans, world.families = world.families, ()

    def begin_scans() -> None:
        world.families = scans

    world.set_pause(is_paused=True)
    world.clock.after(150, begin_scans)
    world.clock.after(270, lambda: world.set_pause(is_paused=False))
    return world


def excluded(injector: Injector) -> World:
    """The node's own label keeps every remediator off: the dispatcher ends the incident."""
    world = scanned(injector)
    labels = {**world.node().labels, EXCLUDE_LABEL: "true"}
    world.cluster.change_node(node_name(1), lambda node: replace(node, labels=labels))
    return world


def rehearsed(injector: Injector) -> World:
    """A dry run."""
    return scanned(injector, mode=Mode.DRY_RUN)


def by_hand(injector: Injector) -> World:
    """A person starts it from the console."""
    world = World(injector, policy=enforce(hold_down_s=30))
    world.start_by_hand("hand-1", HAND)
    return world


def by_hand_in_vain(injector: Injector) -> World:
    """A person starts it for a node that another person has paused."""
    world = by_hand(injector)
    pause = {PAUSE_ANNOTATION: "burn-in"}
    world.cluster.change_node(node_name(1), lambda node: replace(node, annotations=pause))
    return world


def alerted(injector: Injector) -> World:
    """The alert manager says it first; the policy stops after the cordon."""
    world = scanned(injector, mode=Mode.CORDON_ONLY)
    world.families = ()
    world.send_alert(envelope(message(alert(1))))
    return world


def alerted_in_vain(injector: Injector) -> World:
    """AMP knows nothing of what the alert manager says."""
    world = World(injector, policy=enforce())
    world.send_alert(envelope(message(alert(1))))
    return world


def alert_refused(injector: Injector) -> World:
    """What nobody can read goes to the dead letters."""
    world = World(injector, policy=enforce())
    world.expected = 0
    world.send_alert(envelope(message("alert")))
    return world


SCENARIOS: Mapping[str, Callable[[Injector], World]] = {
    build.__name__: build
    for build in (
        replaced,
        rebooted,
        rebooted_and_uncordoned,
        rebooted_in_vain,
        reboot_refused,
        replacement_refused,
        drained_late,
        never_drained,
        superseded,
        taken_back,
        stopped,
        recovered,
        after_another,
        paused,
        excluded,
        rehearsed,
        by_hand,
        by_hand_in_vain,
        alerted,
        alerted_in_vain,
        alert_refused,
    )
}
