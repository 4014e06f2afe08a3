"""A plain reference for who is out of service, against which the fleet view is held."""

from nodemend.domain.fleet import FleetSnapshot, is_unavailable
from nodemend.domain.guard import Guard


def unavailable(
    guard: Guard, snapshot: FleetSnapshot, group: str | None, *, besides: str
) -> tuple[str, ...]:
    """Name nodes that are cordoned by anyone, not ready, in flight or missing."""
    names = {
        node.ref.uid: node.ref.name
        for node in snapshot.nodes
        if is_unavailable(node) and group in (None, snapshot.group_name(node))
    }
    names.update(
        (slot.node_uid, slot.node_name)
        for slot in guard.slots.values()
        if group in (None, slot.group)
    )
    names.pop(besides, None)
    registered = {node.ref.uid for node in snapshot.nodes}
    gone = [slot.group for slot in guard.slots.values() if slot.node_uid not in registered]
    missing = []
    for name in sorted(snapshot.groups_with_gpus() if group is None else {group}):
        there = sum(1 for node in snapshot.nodes if snapshot.group_name(node) == name)
        gaps = snapshot.desired(name) - there - gone.count(name)
        missing += [f"(missing in {name})"] * max(0, gaps)
    return (*sorted(names.values()), *missing)
