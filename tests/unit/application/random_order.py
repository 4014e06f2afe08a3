"""Everything in random order: the rules of the stateful test."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nodemend.domain.errors import AwsUnavailableError
from nodemend.domain.faults import Family, Mode
from tests.unit.application.world import FAULTS, GROUPS, Disturbance, World

PICK = st.integers(0, 5)
MACHINE = st.sampled_from((0, 0, 1, 2, 4, 5, 7, 8))
"""Some more often than others, so that they meet."""
SECONDS = st.sampled_from((1, 5, 20, 30, 60, 61, 120, 300, 600, 1800))
KINDS = (
    "die_before",
    "die_after",
    "fail_before",
    "fail_after",
    "forbid",
    "slow",
    *World.DEEDS,
)
CALLS = (
    "capacity.group",
    "capacity.terminate",
    "cluster.evict",
    "cluster.get_node",
    "cluster.patch_node",
    "guards.load",
    "guards.store",
    "incidents.get",
    "incidents.save",
    "instances.reboot",
    "outbox.publish",
    "policies.current",
)
"""Calls at which something else may matter, most of all directly before a change."""
AT = st.integers(1, 16) | st.sampled_from(CALLS)
TROUBLE = st.builds(Disturbance, at=AT, kind=st.sampled_from(KINDS))
PERHAPS = st.none() | TROUBLE
MODES = (Mode.ENFORCE, Mode.ENFORCE, Mode.ENFORCE, Mode.CORDON_ONLY, Mode.DRY_RUN)


class RandomOrder(RuleBasedStateMachine):
    """Scans, alerts, people, crashes and clocks, in any order.

    Rules that say little alone are one rule with a word that chooses: all rules are chosen equally
    often, and most of the time executions should run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @invariant()
    def rails_hold(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.heal()
        self.world.calm()
        self.world.check_end()

    # --- faults, and how they come in -------------------------------------------------------------

    @rule(
        kind=st.sampled_from(FAULTS),
        pick=MACHINE,
        gpu=st.integers(0, 1),
        so_far=st.sampled_from(("there", "opened", "admitted", "admitted")),
    )
    def sick(self, kind: str, pick: int, gpu: int, so_far: str) -> None:
        """A new fault, and perhaps its whole way in, which single rules seldom find."""
        world = self.world
        world.inject(kind, world.machine(pick), gpu)
        if so_far == "there":
            return
        world.scan_now(Family.THERMAL if kind == "hot" else Family.ECC)
        for _ in range(len(world.fault_queue)):
            world.deliver()
        if so_far == "admitted":
            world.dispatch_now(by_hints=True)

    @rule(pick=MACHINE)
    def fault_is_over(self, pick: int) -> None:
        self.world.clear(self.world.machine(pick))

    @rule(what=st.sampled_from(("ecc", "thermal", "alert")), pick=MACHINE, trouble=PERHAPS)
    def look(self, what: str, pick: int, trouble: Any) -> None:
        if what == "alert":
            self.world.alert_now(self.world.machine(pick), trouble)
        else:
            self.world.scan_now(Family(what), trouble)

    @precondition(lambda self: self.world.fault_queue)
    @rule(pick=PICK, is_twice=st.booleans(), trouble=PERHAPS)
    def deliver(self, pick: int, is_twice: bool, trouble: Any) -> None:
        self.world.deliver(pick, is_twice=is_twice, disturbance=trouble)

    # --- functions --------------------------------------------------------------------------------

    @rule(by_hints=st.booleans(), trouble=PERHAPS)
    def dispatch(self, by_hints: bool, trouble: Any) -> None:
        self.world.dispatch_now(trouble, by_hints=by_hints)

    @rule(by_event=st.booleans(), trouble=PERHAPS)
    def watch(self, by_event: bool, trouble: Any) -> None:
        self.world.watch_now(trouble, by_event=by_event)

    @precondition(lambda self: self.world.due())
    @rule(pick=PICK)
    def step(self, pick: int) -> None:
        self.world.run_due(pick)

    @precondition(lambda self: self.world.due())
    @rule(pick=PICK, trouble=TROUBLE)
    def disturbed_step(self, pick: int, trouble: Any) -> None:
        self.world.run_due(pick, trouble)

    @precondition(lambda self: self.world.running)
    @rule(
        seconds=SECONDS,
        rounds=st.integers(1, 8),
        moves=st.booleans(),
        when=st.integers(0, 7),
        trouble=PERHAPS,
    )
    def steps(self, seconds: int, rounds: int, moves: bool, when: int, trouble: Any) -> None:
        """Some steps in a row, at most one of them disturbed, so that executions get far."""
        world = self.world
        for number in range(rounds):
            for nth in range(len(world.due())):
                world.run_due(0, trouble if (number, nth) == (when, 0) else None)
            world.check()
            for _ in range(len(world.pending) if moves else 0):
                world.move()
            world.advance(seconds)

    @precondition(lambda self: self.world.past_tasks)
    @rule(pick=PICK, trouble=PERHAPS)
    def run_again(self, pick: int, trouble: Any) -> None:
        self.world.run_again(pick, trouble)

    @rule(seconds=SECONDS)
    def time_passes(self, seconds: int) -> None:
        self.world.advance(seconds)

    # --- people -----------------------------------------------------------------------------------

    @rule(deed=st.sampled_from(("start", "copy", "stop", "redrive")), pick=PICK)
    def console(self, deed: str, pick: int) -> None:
        world = self.world
        match deed:
            case "start":
                world.start_by_hand(world.machine(pick))
            case "copy":
                world.copy_execution(pick)
            case "stop":
                world.stop(pick)
            case "redrive":
                world.redrive(pick)

    @rule(
        deed=st.sampled_from(("pause", "pause_node", "cordon", "uncordon", "put_back")),
        pick=MACHINE,
        is_on=st.booleans(),
        trouble=PERHAPS,
    )
    def person(self, deed: str, pick: int, is_on: bool, trouble: Any) -> None:
        world = self.world
        match deed:
            case "pause":
                world.set_pause(paused=is_on, disturbance=trouble)
            case "pause_node":
                world.pause_node(world.machine(pick), paused=is_on)
            case "cordon":
                world.cordon(world.machine(pick))
            case "uncordon":
                world.uncordon(world.machine(pick))
            case "put_back":
                world.put_back()

    @rule(
        mode=st.sampled_from(MODES),
        group_mode=st.sampled_from((None, *MODES)),
        count=st.sampled_from((0, 1, 1, 2, 2, 3)),
        group_count=st.sampled_from((0, 1, 2, 2)),
    )
    def deploy(self, mode: Mode, group_mode: Mode | None, count: int, group_count: int) -> None:
        self.world.deploy(mode=mode, group_mode=group_mode, count=count, group_count=group_count)

    # --- the world --------------------------------------------------------------------------------

    @precondition(lambda self: self.world.pending)
    @rule(pick=PICK)
    def move(self, pick: int) -> None:
        self.world.move(pick)

    @rule(
        deed=st.sampled_from(("boot", "terminate", "suspend", "ready", "pod", "block")),
        pick=MACHINE,
        is_on=st.booleans(),
    )
    def nature(self, deed: str, pick: int, is_on: bool) -> None:
        world = self.world
        match deed:
            case "boot":
                world.reboot_itself(world.machine(pick))
            case "terminate":
                world.terminate_by_group(world.machine(pick))
            case "suspend":
                world.suspend(sorted(GROUPS)[pick % len(GROUPS)], suspended=is_on)
            case "ready":
                world.set_ready(world.machine(pick), ready=is_on)
            case "pod":
                world.add_pod(world.machine(pick))
            case "block":
                world.block_pods()

    @rule(down=st.sampled_from(("cluster", "amp", "bus", "policy", "", "", "")))
    def outage(self, down: str) -> None:
        """Let one of the APIs be away until the next such rule; none: all are there."""
        world = self.world
        world.is_cluster_down = down == "cluster"
        world.metrics.is_down = down == "amp"  # type: ignore[attr-defined]
        world.bus.gone = AwsUnavailableError("gone") if down == "bus" else None
        world.policies.problem = "limits: is missing" if down == "policy" else ""
