"""A day of a healthy fleet, with everything that looks like a fault and is none.

`make bench-quiet`. 2,000 nodes for a simulated day at the level of what AMP answers: the product's
own queries are evaluated (`benchmarks/promql.py`) over the series that healthy nodes have on an
ordinary day (`benchmarks/noise.py`: job starts, exporter restarts, rolling upgrades, MIG, gaps,
XIDs of user code, a job crash on 77 nodes, …). From there on it is the product: scan_gpu_health
each minute (thermal every 2, utilization every 5), receive_alert, open_incident (every seventh
message twice), dispatch_incidents, and for what is admitted the real state machine. AMP itself
fails now and then. The policy has a repair for every fault class, so that nothing is kept back by
a plan that is missing.

No node may be admitted. The control is the same day with one node that is really sick: exactly that
node must be admitted, and be replaced. And every kind of noise that a rule must see has to have
been seen. The last line is JSON; the exit status is 1 if any of this is not so.

Why it is enough to evaluate the nodes on which something happens, and each other node once: the
rules of this day compare a GPU with its past and with its own node, and match on the GPU's UUID or
the node's name; so the fleet's answer is the nodes' answers put together, and a node on which
nothing happens is never part of it (`plain` in the noise). Not so two kinds of rules: those that
compare the nodes of a job read recorded series, and nothing is recorded here, so they are silent;
those that count the fleet's silent nodes (`exporter-down`, `collector-outage`) see fleets of one
node, and find telemetry at fault, which is counted and never announced.
"""

import argparse
import json
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, cast

from benchmarks import noise
from benchmarks.noise import Change, Episode, Machine, steady
from benchmarks.promql import NAME, Database, parse
from nodemend.application.dispatch_incidents import dispatch_incidents
from nodemend.application.open_incident import open_incident
from nodemend.application.ports import QueryResult, RuleGroupsResult
from nodemend.application.receive_alert import receive_alert
from nodemend.application.scan_gpu_health import REPORTED, by_node, scan_gpu_health
from nodemend.contracts.alerts import ReceiveAlertRequest
from nodemend.contracts.dispatch import DispatchHint, DispatchIncidentsRequest
from nodemend.contracts.events import FaultEnvelope
from nodemend.contracts.scan import ScanGpuHealthRequest
from nodemend.domain.errors import AwsUnavailableError
from nodemend.domain.events import DetailType
from nodemend.domain.faults import Family, FaultClass, Rung
from nodemend.domain.findings import Finding, Sample
from nodemend.domain.nodes import Node, NodeRef
from nodemend.domain.policy import DEFAULT_HOLD_S, ClusterPolicy, Limits, Policy
from nodemend.domain.reasons import Reason
from nodemend.domain.rules import findings_of
from tests.fakes.system import START, ManualClock
from tests.unit.application.machine import Machine as Execution
from tests.unit.application.stage import (
    CLUSTER,
    Stage,
    StageCluster,
    catalogue,
    enforce,
    gpu_node,
    instance_id,
)

EVERY_S: Mapping[Family, int] = {Family.ECC: 60, Family.THERMAL: 120, Family.UTILIZATION: 300}
"""How often each family is scanned (template.yaml)."""

HINTS_AT_ONCE = 100

AMP_FAILS = ("execution", "throttled", "partial")
"""What AMP answers now and then instead: a time-out (422), 429, HTTP 200 with warnings."""
AMP_FAILS_FOR_S = 240

DELIVERED_TWICE = 7
"""Every so many fault messages one comes twice: SQS and EventBridge deliver at least once."""

SICK = "control: a sick node"
NEWCOMER = "control: its replacement"


def policy() -> Policy:
    """Return a policy that repairs whatever is found; limits and hold times are the defaults."""
    return enforce(
        limits=Limits(),
        hold_s=DEFAULT_HOLD_S,
        plans=dict.fromkeys(FaultClass, (Rung.REPLACE, Rung.HUMAN)),
    )


# --- the stage, made fast enough for a day ------------------------------------------------------


class ListedCluster(StageCluster):
    """The cluster with its list of nodes kept: it is read each minute, and rarely changes."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - the stage's own
        super().__init__(**options)
        self._listed: Sequence[Node] | None = None

    def list_gpu_nodes(self) -> Sequence[Node]:
        """Return the nodes, as the fake does."""
        if self._listed is None:
            self._listed = super().list_gpu_nodes()
        return self._listed

    def remove_node(self, name: str) -> None:
        """Take a node away."""
        super().remove_node(name)
        self._listed = None

    def _touch(self, name: str) -> None:
        super()._touch(name)
        self._listed = None


@dataclass
class Active:
    """An episode that is being looked at."""

    episode: Episode
    db: Database


_ABOUT_SIGHT = frozenset({"coverage", "lacking"})
"""Keys of the queries for what the rules can see."""


@dataclass
class SimulatedAmp:
    """`MetricsStore` over the series of the nodes on which something happens."""

    active: dict[str, Active] = field(default_factory=dict)
    """By node name."""
    fails: Mapping[int, str] = field(default_factory=dict)
    """Start of each time (seconds) in which AMP gives no usable answer, and what it says."""
    samples: list[tuple[str, Sample]] = field(default_factory=list)
    """What the scan was answered: node name and sample. A scan asks more than once."""
    findings: list[Finding] = field(default_factory=list)
    failed: int = 0

    def query_many(
        self, cluster: ClusterPolicy, queries: Mapping[str, str], at: datetime
    ) -> Mapping[str, QueryResult]:
        """Return the answers: the nodes' own ones put together."""
        t = int((at - START).total_seconds())
        why = next((w for s, w in self.fails.items() if s <= t < s + AMP_FAILS_FOR_S), "")
        if why:
            self.failed += len(queries)
            problem = QueryResult(problem=Reason("amp_unavailable", f"simulated: {why}"))
            return dict.fromkeys(queries, problem)
        return {key: self._ask(cluster.name, key, query, t) for key, query in queries.items()}

    def rule_groups(self, cluster: ClusterPolicy) -> RuleGroupsResult:
        """Return none: recording rules are not part of the day."""
        return RuleGroupsResult()

    def _ask(self, cluster: str, key: str, query: str, t: int) -> QueryResult:
        if key in _ABOUT_SIGHT:
            return QueryResult(
                problem=Reason("not_simulated", "what is exported is another matter")
            )
        expression = parse(query)
        at = START + timedelta(seconds=t)
        found = []
        for name, active in self.active.items():
            for labels, value in expression.vector(active.db, t).items():
                sample = Sample({k: v for k, v in labels if k != NAME}, value, at)
                found.append(sample)
                self.samples.append((name, sample))
        rule = next((rule for rule in catalogue().rules if rule.id == key), None)
        if rule is not None:
            xids = catalogue().xids
            self.findings += findings_of(
                rule, tuple(found), cluster=cluster, query=query, xids=xids
            )
        return QueryResult(tuple(found), samples_processed=len(found))


class DayClock:
    """The stage's clock; while a state machine waits, the day goes on."""

    def __init__(self, clock: ManualClock, day: "Day") -> None:
        self._clock = clock
        self._day = day

    def now(self) -> datetime:
        """Return the time."""
        return self._clock.now()

    def advance(self, seconds: float) -> datetime:
        """Move on, and let everything happen on its way that is due each minute."""
        end = self._clock.now() + timedelta(seconds=seconds)
        while (due := self._day.next_tick) <= end:
            self._clock.at = max(due, self._clock.at)
            self._day.tick()
        self._clock.at = max(end, self._clock.at)
        return self._clock.at


# --- the day ------------------------------------------------------------------------------------


class Day:
    """One day of the fleet.

    Args:
        nodes: How many.
        seed: Of everything that is random.
        hours: How long.
        is_control: One node is really sick.
    """

    def __init__(self, nodes: int, seed: int, *, hours: float = 24, is_control: bool) -> None:
        rng = random.Random(seed)
        self.length_s = int(hours * 3600)
        machines = noise.fleet(nodes, rng)
        self._episodes = noise.day(machines[:-1], rng, self.length_s)
        self.sick = machines[-1].name if is_control else ""
        last = self._sick_or_not(machines[-1], is_sick=is_control)
        self._episodes = sorted([*self._episodes, last], key=lambda one: one.from_s)
        # Its parts are exchanged for others of the same shape.
        self.stage: Any = cast("Any", Stage(nodes=nodes, policy=policy()))
        self.clock = DayClock(self.stage.clock, self)
        self._prepare(nodes)
        self.amp = SimulatedAmp(
            fails={rng.randrange(600, self.length_s - 600): why for why in AMP_FAILS}
        )
        self.stage.metrics = self.amp
        self.stage.clock = self.clock
        self.next_tick = START
        self.stats: dict[str, Counter[str]] = {}
        self.kinds: dict[str, str] = {}
        """Kind by incident id."""
        self.outcomes: dict[str, str] = {}
        """What became of what was admitted, by node name."""
        self._changes: list[tuple[int, Change, Machine]] = []
        self._told = self._messages = self._begun = 0
        self._newcomer = nodes + 1

    def _prepare(self, nodes: int) -> None:
        """Put the fleet into a cluster that is fast to list."""
        clock = self.stage.clock
        cluster = ListedCluster(clock=clock, gpu_instance_types=frozenset({"p5.48xlarge"}))
        for number in range(1, nodes + 1):
            cluster.add_node(gpu_node(number))
        self.stage.cluster = cluster
        self.stage.clusters = type(self.stage.clusters)(cluster)

    def _sick_or_not(self, machine: Machine, *, is_sick: bool) -> Episode:
        """Return what happens on the node that is healthy in one day and sick in the other.

        A GPU falls off the bus: XID 79, and its rows vanish.
        """
        at_s = self.length_s // 2
        start = machine.sample(at_s)
        old = steady(machine)
        if not is_sick:
            return Episode("plain", machine, at_s, at_s + 3600, [old])
        xids, counts = {**old.xids, 3: 79}, {3: (79, 1)}
        fresh = replace(old, start=start, end=start + 2, xids=xids, counts=counts)
        lost = replace(fresh, start=start + 2, end=start + 30, hidden=frozenset({3}))
        return Episode(SICK, machine, at_s, at_s + 3600, [replace(old, end=start), fresh, lost])

    def run(self) -> None:
        """Let the day pass."""
        self.clock.advance(self.length_s)

    def tick(self) -> None:
        """Do what is due at this minute."""
        t = int((self.next_tick - START).total_seconds())
        self.next_tick += timedelta(seconds=60)
        self._begin_and_end(t)
        self._change(t)
        for family, every_s in EVERY_S.items():
            if t % every_s == 0:
                self._scan(family)
        self._deliver()
        self._dispatch()
        self._note()
        self._execute()

    def _begin_and_end(self, t: int) -> None:
        over = [name for name, one in self.amp.active.items() if one.episode.until_s < t]
        for name in over:
            del self.amp.active[name]
        while self._episodes and self._episodes[0].from_s <= t:
            episode = self._episodes.pop(0)
            self.amp.active[episode.machine.name] = Active(episode, episode.database())
            self._changes += [(change.at_s, change, episode.machine) for change in episode.changes]
            self._of(episode.kind)["episodes"] += 1

    def _of(self, kind: str) -> Counter[str]:
        return self.stats.setdefault(kind, Counter())

    def _kind_of(self, node: str) -> str:
        active = self.amp.active.get(node)
        return active.episode.kind if active else "nothing"

    def _change(self, t: int) -> None:
        due = [one for one in self._changes if one[0] <= t]
        self._changes = [one for one in self._changes if one[0] > t]
        for _, change, machine in sorted(due, key=lambda one: one[0]):
            if change.what == "alert":
                self._alert(change, machine)
                continue
            node = self.stage.cluster.get_node(machine.name)
            if node is not None:
                self.stage.cluster.add_node(_changed(node, change, machine))

    def _alert(self, change: Change, machine: Machine) -> None:
        """Let the users' alert manager say again what it has said for days."""
        gpu, code = change.gpu, change.code
        labels = {"alertname": "GpuXidCritical", "Hostname": machine.name, "gpu": str(gpu)}
        alert = {
            "status": "firing",
            "labels": labels | {"err_code": str(code)},
            "startsAt": (START - timedelta(days=2)).isoformat(),
            "fingerprint": f"{machine.number}-{gpu}",
        }
        body = json.dumps({"version": "4", "status": "firing", "alerts": [alert]})
        request = ReceiveAlertRequest(body=body, messageId=f"m-{machine.number}")
        try:
            result = receive_alert(request, ports=self.stage.alert)
        except AwsUnavailableError:  # the queue delivers it again
            t = int((self.clock.now() - START).total_seconds())
            self._changes.append((t + 60, change, machine))
            self._of(self._kind_of(machine.name))["alert tried again"] += 1
            return
        for outcome, number in result.outcomes.items():
            self._of(self._kind_of(machine.name))[f"alert {outcome}"] += number

    def _scan(self, family: Family) -> None:
        before = len(self.stage.bus.accepted)
        self.amp.samples, self.amp.findings = [], []
        scan_gpu_health(ScanGpuHealthRequest(family=family), ports=self.stage.scan)
        for name, _ in self.amp.samples:
            self._of(self._kind_of(name))["signals"] += 1
        for finding in self.amp.findings:
            stats = self._of(self._kind_of(finding.node_names[0]))
            stats["findings"] += 1
            if finding.verdict not in REPORTED:
                stats[f"suppressed: {finding.verdict}"] += 1
        reported = by_node(f for f in self.amp.findings if f.verdict in REPORTED)
        announced = Counter(
            one.detail["findings"][0]["node_names"][0]
            for one in self.stage.bus.accepted[before:]
            if one.detail_type is DetailType.GPU_FAULT_DETECTED
        )
        for name in reported:
            word = "announced" if announced[name] else "suppressed: told already"
            self._of(self._kind_of(name))[word] += 1

    def _deliver(self) -> None:
        """Hand the fault events to open_incident, as bus and queue do."""
        faults = self._news(DetailType.GPU_FAULT_DETECTED)
        for detail in faults:
            self._messages += 1
            for _ in range(2 if self._messages % DELIVERED_TWICE == 0 else 1):
                body = json.dumps({"detail": detail})
                self._open(FaultEnvelope.model_validate_json(body))

    def _open(self, envelope: FaultEnvelope) -> None:
        stage, fault = self.stage, envelope.detail
        kind = self._kind_of(fault.findings[0].node_names[0])
        known = len(stage.incidents.records)
        incident_id = open_incident(fault, ports=stage.open)
        if incident_id is None:
            self._of(kind)["suppressed: handled or stale"] += 1
        elif len(stage.incidents.records) > known:
            self._of(kind)["opened"] += 1
            self.kinds[incident_id] = kind
        else:
            self._of(kind)["suppressed: incident is open"] += 1

    def _news(self, detail_type: DetailType) -> list[Mapping[str, Any]]:
        """Return what was sent since the last look, of one type; the others are noted."""
        fresh = self.stage.bus.accepted[self._told :]
        self._told = len(self.stage.bus.accepted)
        for one in fresh:
            self._note_event(one.detail_type, one.detail)
        return [one.detail for one in fresh if one.detail_type is detail_type]

    def _note(self) -> None:
        self._news(DetailType.INCIDENT_CLOSED)

    def _note_event(self, detail_type: DetailType, detail: Mapping[str, Any]) -> None:
        if detail_type is DetailType.FLEET_GUARD_CHANGED:
            self._of("fleet")[f"guard: {detail['change']}"] += 1
        kind = self.kinds.get(str(detail.get("incident_id", "")))
        if kind is None:
            return
        stats = self._of(kind)
        if detail_type is DetailType.INCIDENT_WAITING:
            stats["waiting"] += 1
            stats[f"waiting: {detail['reason']['code']}"] += 1
        elif detail_type is DetailType.INCIDENT_ADMITTED:
            stats["admitted"] += 1
        elif detail_type is DetailType.INCIDENT_CLOSED:
            stats[f"closed: {detail['outcome']}({detail['reason']['code']})"] += 1

    def _dispatch(self) -> None:
        """Decide as the queue's batches do, or with nothing in the queue as the schedule does."""
        queue = self.stage.queue.messages
        batches = [queue[i : i + HINTS_AT_ONCE] for i in range(0, len(queue), HINTS_AT_ONCE)]
        self.stage.queue.messages = []
        for batch in batches or [[]]:
            hints = tuple(DispatchHint(cluster=c, incident_id=i) for c, i in batch)
            dispatch_incidents(DispatchIncidentsRequest(hints=hints), ports=self.stage.dispatch)

    def _execute(self) -> None:
        """Let the state machine run for what was admitted, up to its end."""
        started = self.stage.executions.started
        while self._begun < len(started):
            incident_id = started[self._begun]
            self._begun += 1
            node = self.stage.incident(incident_id).node
            execution = Execution(self.stage, timeline=[(600, partial(self._replace, node))])
            execution.run(incident_id)
            self._note()
            self.outcomes[node.name] = str(self.stage.incident(incident_id).outcome)

    def _replace(self, ref: NodeRef) -> None:
        """Let the group launch a new instance, if the old one was terminated."""
        group = self.stage.capacity.group(self.stage.policies.current().clusters[0], "gpu-a")
        if group.instances.get(ref.instance_id) == "InService":
            return
        newcomer = Machine(self._newcomer, 0, is_renamed=True, has_codes=True, has_limit=True)
        self._newcomer += 1
        self.stage.capacity.replace_instance(CLUSTER, ref.instance_id, instance_id(newcomer.number))
        self.stage.cluster.remove_node(ref.name)
        self.stage.cluster.add_node(gpu_node(newcomer.number, created_at=self.clock.now()))
        t = int((self.clock.now() - START).total_seconds())
        era = replace(steady(newcomer), start=newcomer.sample(t))
        episode = Episode(NEWCOMER, newcomer, t, t + 7200, [era])
        self.amp.active[newcomer.name] = Active(episode, episode.database())

    # --- verdict ----------------------------------------------------------------------------------

    @property
    def admitted(self) -> list[str]:
        """Names of the nodes that were admitted."""
        return [self.stage.incident(one).node.name for one in self.stage.executions.started]

    def problems(self) -> list[str]:
        """Return what is not as it must be."""
        found = []
        wanted = [self.sick] if self.sick else []
        if self.admitted != wanted:
            kinds = Counter(self.kinds[one] for one in self.stage.executions.started)
            found.append(f"admitted: {self.admitted[:5]} of {dict(kinds)}, not {wanted}")
        if self.sick and self.outcomes.get(self.sick) != "REPLACED":
            found.append(f"the sick node ended as {self.outcomes.get(self.sick)}, not REPLACED")
        found += [
            f"no rule has seen {kind.name}: the day proves nothing"
            for kind in noise.KINDS
            if kind.is_answered and not self._of(kind.name)["signals"]
        ]
        if not self.amp.failed:
            found.append("AMP has never failed")
        return found


def _changed(node: Node, change: Change, machine: Machine) -> Node:
    match change.what:
        case "cordon" | "uncordon":
            return replace(node, is_unschedulable=change.what == "cordon")
        case "boot":
            machine.boots += 1
            ref = replace(node.ref, boot_id=f"boot-{machine.number}-{machine.boots}")
            return replace(node, ref=ref, readiness=change.readiness)
        case _:
            return replace(node, readiness=change.readiness)


@dataclass(frozen=True)
class Told:
    """What is known after a day."""

    problems: list[str]
    stats: dict[str, dict[str, int]]
    admitted: list[str]
    outcomes: dict[str, str]
    seconds: float


def spend(nodes: int, seed: int, hours: float, is_control: bool) -> Told:
    """Let one day pass and judge it."""
    began = time.perf_counter()
    day = Day(nodes, seed, hours=hours, is_control=is_control)
    logging.disable(logging.WARNING)  # that AMP fails is told in the result
    try:
        day.run()
    finally:
        logging.disable(logging.NOTSET)
    stats = {kind: dict(counts) for kind, counts in sorted(day.stats.items())}
    passed = round(time.perf_counter() - began, 1)
    return Told(day.problems(), stats, day.admitted, day.outcomes, passed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Spend the quiet day and the control; returns 1 if either is not as it must be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quiet", description=__doc__)
    parser.add_argument("--nodes", type=int, default=2000)
    parser.add_argument("--hours", type=float, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="1: one day after the other")
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    days = [(options.nodes, options.seed, options.hours, control) for control in (False, True)]
    if options.jobs > 1:
        with ProcessPoolExecutor(options.jobs) as pool:
            quiet, control = pool.map(spend, *zip(*days, strict=True))
    else:
        quiet, control = (spend(*one) for one in days)
    for kind, counts in quiet.stats.items():
        print(f"{kind}:", ", ".join(f"{name} {number}" for name, number in sorted(counts.items())))
    print(f"quiet day: {len(quiet.admitted)} of {options.nodes} nodes admitted")
    print(f"control: admitted {control.admitted}, outcomes {control.outcomes}")
    problems = [f"quiet day: {one}" for one in quiet.problems]
    problems += [f"control: {one}" for one in control.problems]
    result = {
        "benchmark": "quiet",
        "nodes": options.nodes,
        "hours": options.hours,
        "seed": options.seed,
        "admitted": len(quiet.admitted),
        "opened": sum(counts.get("opened", 0) for counts in quiet.stats.values()),
        "kinds": quiet.stats,
        "control": {"admitted": len(control.admitted), "outcomes": control.outcomes},
        "wall_s": round(time.perf_counter() - began, 1),
        **({"broken": problems} if problems else {}),
    }
    print(json.dumps(result))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
