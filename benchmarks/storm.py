"""A storm of faults on a large fleet, in memory: what the dispatcher lets through, and how fast.

`make bench-storm`. Two parts, on the product's own use cases and in-memory stores:

- every node is sick at once: the breaker must open, nothing may be admitted, and there must be one
  critical event;
- a share of the fleet is sick: never more nodes than the budget may be held at any instant, and all
  others must be waiting with a reason.

The clock is simulated; what is measured is computing time. The last line is JSON.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from nodemend.application.dispatch_incidents import dispatch_incidents
from nodemend.contracts.dispatch import DispatchIncidentsRequest
from nodemend.domain.dispatch import decide_dispatch
from nodemend.domain.fleet import FleetSnapshot
from nodemend.domain.guard import Guard, release
from nodemend.domain.incidents import Incident, IncidentState
from nodemend.domain.policy import Limits, Policy
from tests.unit.application.stage import CLUSTER, Stage, enforce, xid_finding

REMEDIATION_MINUTES = 40
"""How long a slot is held in the second part."""


class Broken(Exception):  # noqa: N818 - a verdict of the benchmark, not an error of the product
    """A rail did not hold."""


def storm(nodes: int, policy: Policy) -> dict[str, Any]:
    """Let every node be sick at once; return what happened.

    Raises:
        Broken: if anything was admitted, or the event was told other than once.
    """
    stage = _stage(nodes, nodes, policy)
    decide_s = _decide_s(stage, policy)
    began = time.perf_counter()
    runs = 0
    while _told(stage) < nodes and runs < 50:
        _dispatch(stage)
        stage.clock.advance(60)
        runs += 1
    dispatch_s = time.perf_counter() - began
    changes = stage.events("Fleet Guard Changed")
    if stage.executions.started or stage.mutations():
        raise Broken(f"{len(stage.executions.started)} of {nodes} were admitted in a storm")
    if [(one["change"], one["severity"]) for one in changes] != [("breaker_opened", "critical")]:
        raise Broken(f"the breaker was told as {[one['change'] for one in changes]}")
    return {
        "nodes": nodes,
        "admitted": 0,
        "cordons": 0,
        "critical_events": len(changes),
        "waiting": dict(_reasons(stage)),
        "events": len(stage.bus.accepted),
        "executions": len(stage.executions.started),
        "dispatches": runs,
        "decide_s": round(decide_s, 3),
        "dispatch_s": round(dispatch_s, 3),
    }


def share(nodes: int, sick: int, policy: Policy) -> dict[str, Any]:
    """Let a share of the nodes be sick, and mend them one after the other; return what happened.

    Raises:
        Broken: if more nodes than the budget were held, or one waited without a reason.
    """
    stage = _stage(nodes, sick, policy)
    bound = policy.limits.max_unavailable.of(nodes)
    decide_s = _decide_s(stage, policy)
    most = rounds = 0
    began = time.perf_counter()
    dispatch_s = 0.0
    while _waiting(stage) or stage.guards.load(CLUSTER).slots:
        start = time.perf_counter()
        _dispatch(stage)
        dispatch_s = max(dispatch_s, time.perf_counter() - start)
        held = len(stage.guards.load(CLUSTER).slots)
        most = max(most, held)
        if held > bound:
            raise Broken(f"{held} nodes are held, the budget is {bound}")
        silent = [one.id for one in _waiting(stage) if not one.waiting_for]
        if silent:
            raise Broken(f"{len(silent)} incidents wait without a reason, {silent[0]} first")
        stage.clock.advance(60 * REMEDIATION_MINUTES)
        _finish_all(stage)
        rounds += 1
        if rounds > 100 * sick:
            raise Broken(f"{len(_waiting(stage))} incidents are still waiting")
    if len(stage.executions.started) != sick:
        raise Broken(f"{len(stage.executions.started)} of {sick} were mended")
    return {
        "nodes": nodes,
        "sick": sick,
        "budget": bound,
        "most_held_at_once": most,
        "admitted": len(stage.executions.started),
        "simulated_hours": round(rounds * REMEDIATION_MINUTES / 60, 1),
        "events": len(stage.bus.accepted),
        "decide_s": round(decide_s, 3),
        "slowest_dispatch_s": round(dispatch_s, 3),
        "total_s": round(time.perf_counter() - began, 1),
    }


def _stage(nodes: int, sick: int, policy: Policy) -> Stage:
    stage = Stage(nodes=nodes, policy=policy)
    for number in range(1, sick + 1):
        stage.wait(number, xid_finding(number))
    return stage


def _dispatch(stage: Stage) -> None:
    dispatch_incidents(DispatchIncidentsRequest(hints=()), ports=stage.dispatch)


def _waiting(stage: Stage) -> list[Incident]:
    return [
        one
        for one in stage.incidents.list_open(CLUSTER)
        if one.state is IncidentState.WAITING and one.verdict is None
    ]


def _told(stage: Stage) -> int:
    return sum(1 for one in _waiting(stage) if one.waiting_for)


def _reasons(stage: Stage) -> Counter[str]:
    return Counter(one.waiting_for for one in _waiting(stage))


def _finish_all(stage: Stage) -> None:
    """Close what is held, as the executions would, and free the slots."""
    guard = stage.guards.load(CLUSTER)
    for slot in guard.slots.values():
        stage.save(slot.incident_id, state=IncidentState.CLOSED)
        guard = release(guard, slot.incident_id)
    if not stage.guards.store(guard):
        raise Broken("the guard changed under a single thread")


def _decide_s(stage: Stage, policy: Policy) -> float:
    """Return how long the pure decision over all waiters takes."""
    fleet = stage.capacity.fleet(policy.clusters[0])
    snapshot = FleetSnapshot(
        at=stage.clock.now(),
        nodes=tuple(stage.cluster.list_gpu_nodes()),
        groups=fleet.groups,
        group_by_instance=fleet.group_by_instance,
    )
    waiters = _waiting(stage)
    began = time.perf_counter()
    decide_dispatch(Guard(CLUSTER), snapshot, waiters, policy, stage.clock.now())
    return time.perf_counter() - began


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both parts; returns 1 if a rail did not hold."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storm", description=__doc__)
    parser.add_argument("--nodes", type=int, default=2000)
    parser.add_argument("--percent", type=float, default=5, help="sick share of the second part")
    options = parser.parse_args(arguments)
    policy = enforce(limits=Limits())  # the defaults: 5 nodes and 2 %, 4 an hour, 20 a day
    result: dict[str, Any] = {"benchmark": "storm"}
    try:
        result["storm"] = storm(options.nodes, policy)
        for name, value in result["storm"].items():
            print(f"all {options.nodes} sick: {name} {value}")
        sick = max(1, round(options.nodes * options.percent / 100))
        result["share"] = share(options.nodes, sick, policy)
        for name, value in result["share"].items():
            print(f"{sick} of {options.nodes} sick: {name} {value}")
    except Broken as error:
        result["broken"] = str(error)
    print(json.dumps(result))
    return 1 if "broken" in result else 0


if __name__ == "__main__":
    sys.exit(main())
