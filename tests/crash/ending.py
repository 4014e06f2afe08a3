"""How a world ends, as far as a fault on the way must not change it."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from nodemend.domain.events import DetailType
from nodemend.domain.incidents import Incident
from nodemend.domain.nodes import Node
from tests.crash.world import World
from tests.fakes.system import START
from tests.unit.application.stage import CLUSTER, assert_no_event_twice, words

WAITING = "dispatch_incidents: Incident Waiting"
"""Told only if it has to wait, and whether it has depends on which of two comes first."""

REPAIR_STARTED = "start_repair: Repair Started"

Ending = Mapping[str, Any]


BY_WATCH = "-released-by-watch"
"""How the id of what the watch says of a closed incident's node ends."""


def ending_of(world: World) -> Ending:
    """Return what must be the same whatever goes wrong on the way: no ids, no times.

    Asserts what must hold in any case: nothing is held any more, and every line of a timeline has
    been told under one id with one body.
    """
    assert_no_event_twice(world)
    incidents = sorted(
        (record.incident for record in world.incidents.records.values()),
        key=lambda one: (one.node.name, one.opened_at),
    )
    guard = world.guards.load(CLUSTER)
    assert guard.slots == {}, "a slot is left"
    assert guard.events == (), "a change of the guard is not told"
    assert world.incidents.open_by_node == {}, "a pointer is left"
    assert world.outbox.publish_pending() == (0, 0), "an event is not sent"
    for one in incidents:
        _assert_all_is_told(world, one)
    statuses = (status.status for status in world.executions.statuses.values())
    return {
        "incidents": [_shown(one) for one in incidents],
        # What was changed, however often it was asked for: each thing once.
        "changes": Counter(world.injector.changes),
        "nodes": [_shown_node(node) for node in world.cluster.list_gpu_nodes()],
        "pods": [one.id for name in _node_names(world) for one in world.cluster.list_pods(name)],
        "executions": Counter(statuses),
        "guard": _told_of_guard(world),
        "newcomers": set(world.incidents.claims),
        "replacements": len(guard.replacements),
        "handled": set(world.incidents.handled),
        "has_letters": bool(world.dead_letters.letters),
        "history": {key: len(past) for key, past in world.history._entries.items()},
    }


def _assert_all_is_told(world: World, incident: Incident) -> None:
    told = {
        one.event_id: one.detail_type.value
        for one in world.bus.accepted
        if one.detail.get("incident_id") == incident.id
        # The watch speaks of a closed incident, and a closed record is not written any more.
        and not one.event_id.endswith(BY_WATCH)
    }
    kept = [line.what for line in incident.timeline if line.what in set(DetailType)]
    assert [told[key] for key in sorted(told)] == kept, "timeline and events differ"
    numbers = [int(key.rsplit("-", 1)[1]) for key in sorted(told)]
    assert numbers == list(range(1, incident.sequence + 1)), "an event is lost"


def _shown(incident: Incident) -> Mapping[str, Any]:
    return {
        "node": incident.node.name,
        "outcome": incident.outcome,
        "reason": incident.reason.code if incident.reason else "",
        "timeline": _deliberate(incident),
        "repairs": incident.rungs_asked,
        "replacement": incident.repair and incident.repair.replacement_node,
    }


def _deliberate(incident: Incident) -> list[str]:
    """Return the timeline without the lines that a fault may add or take away on purpose.

    A reboot whose answer was lost, and that nothing is seen of, is asked for and told once more.
    """
    lines = [line for line in words(incident.timeline) if line != WAITING]
    attempts = (*incident.attempts, *([incident.repair] if incident.repair else []))
    for _ in [attempt for attempt in attempts if attempt.asks > 1]:
        lines.remove(REPAIR_STARTED)
    return lines


def _shown_node(node: Node) -> Mapping[str, Any]:
    return {
        "ref": node.ref,
        "is_unschedulable": node.is_unschedulable,
        "taints": sorted(f"{taint.key}:{taint.effect}" for taint in node.taints),
        "annotations": sorted(node.annotations),
        "labels": sorted(node.labels),
    }


def _told_of_guard(world: World) -> Mapping[str, int]:
    """Return how many changes of the guard were told, by kind."""
    changes = {
        one.event_id: str(one.detail["change"])
        for one in world.bus.accepted
        if one.detail_type is DetailType.FLEET_GUARD_CHANGED
    }
    return Counter(changes.values())


def _node_names(world: World) -> list[str]:
    return [node.ref.name for node in world.cluster.list_gpu_nodes()]


def took_s(world: World) -> float:
    """Return after how many seconds the last incident was closed."""
    incidents = (record.incident for record in world.incidents.records.values())
    closed = [one.closed_at for one in incidents if one.closed_at is not None]
    return (max(closed, default=START) - START).total_seconds()
