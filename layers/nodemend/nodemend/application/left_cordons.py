"""Cordons that no open incident owns: taken off where that is safe, else told of once.

The incident is closed, so its record takes no more events. What was restored is noted in the
memory before the patch and told afterwards; a watch that dies in between leaves the note, and the
next one tells.
"""

import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from nodemend.application.ports import Announcement, Cluster, Report
from nodemend.application.watching import Matter, WatchPorts, rotated, send, tell_once
from nodemend.contracts.events import CordonLeft, incident_detail
from nodemend.contracts.evidence import NodeRefModel, ReasonModel
from nodemend.domain.cordon import Ownership, ownership_of, restore_patch
from nodemend.domain.errors import ClusterForbiddenError
from nodemend.domain.events import DetailType, IncidentEvent
from nodemend.domain.incidents import Incident
from nodemend.domain.nodes import Node
from nodemend.domain.policy import ClusterPolicy, Policy
from nodemend.domain.reasons import Reason
from nodemend.domain.remedies import remedy_for
from nodemend.domain.watch import STEP, Care, CordonVerdict, end_of, is_marked, judge_cordon

logger = logging.getLogger(__name__)

RESTORED_AT_ONCE = 100
"""Nodes that one watch gives back; the next one goes on."""

_NOTES = "watch/restoring"


@dataclass(frozen=True, slots=True)
class _Restoring:
    """A note of a cordon that is being taken off, by the incident's id."""

    at: datetime
    is_uncordoned: bool


@dataclass(slots=True)
class _Look:
    """What one look at a cluster has found."""

    restore: list[tuple[Node, Ownership, Incident]] = field(default_factory=list)
    matters: list[Matter] = field(default_factory=list)


def watch_cordons(
    cluster_policy: ClusterPolicy,
    *,
    policy: Policy,
    open_incidents: Iterable[Incident],
    until: datetime,
    ports: WatchPorts,
) -> tuple[int, int]:
    """Look at every node of a cluster that carries our mark.

    Args:
        cluster_policy: The cluster.
        policy: The policy in force.
        open_incidents: Those of all clusters.
        until: When to stop looking; the next watch begins with another node.
        ports: The watch's ports.

    Returns:
        How many nodes were given back, and how many cordons wait for a person.

    Raises:
        ClusterUnavailableError, ClusterUnauthorizedError, ClusterForbiddenError: as the cluster
            answered; what was done is in the notes.
    """
    cluster = ports.clusters.open(cluster_policy)
    nodes = cluster.list_gpu_nodes()
    marked = [node for node in nodes if is_marked(node)]
    name = cluster_policy.name
    notes = _read_notes(name, ports)
    if not marked and not notes:
        return 0, 0
    open_uids = {one.node.uid for one in open_incidents if one.cluster == name}
    look = _judged(name, marked, policy, open_uids, until=until, ports=ports)
    restored = _restore(name, cluster, nodes, look, notes, ports)
    return restored, tell_once(name, look.matters, ports)


def _judged(
    cluster: str,
    marked: Sequence[Node],
    policy: Policy,
    open_uids: Container[str],
    *,
    until: datetime,
    ports: WatchPorts,
) -> _Look:
    look = _Look()
    # Owners and the pause are read after the nodes: whoever cordons a node from here on changes its
    # resourceVersion, which the patch tests. So does an incident that was opened since.
    pause = ports.closing.guards.load(cluster).pause
    for node in rotated(marked, ports.clock.now()):
        if ports.clock.now() >= until:
            logger.warning("no time for all %d marked nodes of %s", len(marked), cluster)
            break
        ownership = ownership_of(node)
        owner = ports.closing.incidents.get(ownership.incident_id) if ownership else None
        verdict = judge_cordon(
            node,
            owner,
            has_open_incident=node.ref.uid in open_uids,
            policy=policy,
            pause=pause,
            now=ports.clock.now(),
        )
        match verdict.care:
            case Care.RESTORE if ownership is not None and owner is not None:
                look.restore.append((node, ownership, owner))
            case Care.TELL:
                look.matters.append(_matter(node, ownership, verdict))
            case _:
                logger.info("the cordon of %s stays: %s", node.ref.name, verdict.reason)
    return look


def _restore(
    name: str,
    cluster: Cluster,
    nodes: Sequence[Node],
    look: _Look,
    known: Mapping[str, _Restoring],
    ports: WatchPorts,
) -> int:
    now = ports.clock.now()
    todo = look.restore[:RESTORED_AT_ONCE]
    notes = {
        owner.id: _Restoring(now, not ownership.was_unschedulable) for _, ownership, owner in todo
    } | dict(known)
    written = dict(notes)
    if written != known:
        _write_notes(name, written, ports)
    done: set[str] = set()
    for node, ownership, owner in todo:
        try:
            is_patched = cluster.patch_node(node.ref.name, restore_patch(node, ownership))
        except ClusterForbiddenError as error:
            denied = Reason("cluster_forbidden", f"{node.ref.name} cannot be released: {error}")
            since = owner.closed_at or owner.state_since
            verdict = CordonVerdict(Care.TELL, denied, since)
            look.matters.append(_matter(node, ownership, verdict))
            continue
        if not is_patched:
            del notes[owner.id]  # it has changed since: the next watch judges it anew
            continue
        done.add(owner.id)
        text = f"{_reason(owner).text} (incident {owner.id})"
        cluster.record_event(node.ref, "NodemendReleased", text, is_warning=False)
    _tell_restored(name, nodes, notes, done, ports)
    if notes != written:
        _write_notes(name, notes, ports)
    return len(done)


def _tell_restored(
    cluster: str,
    nodes: Iterable[Node],
    notes: dict[str, _Restoring],
    done: set[str],
    ports: WatchPorts,
) -> None:
    """Tell of each noted node that is free of its cordon now, and drop what was told."""
    by_uid = {node.ref.uid: node for node in nodes}
    events: dict[str, Announcement] = {}
    for incident_id, note in list(notes.items()):
        owner = ports.closing.incidents.get(incident_id)
        node = by_uid.get(owner.node.uid) if owner else None
        if owner is None or node is None:
            del notes[incident_id]  # the node has gone: nobody can tell any more
            continue
        if incident_id not in done and is_marked(node):
            ownership = ownership_of(node)
            if ownership is None or ownership.incident_id != incident_id:
                del notes[incident_id]  # another incident's by now
            continue
        events[incident_id] = _released(owner, note)
    unsent = send(cluster, list(events.values()), ports)
    for incident_id, event in events.items():
        if event.event_id not in unsent:
            ports.telemetry.count("Actions", cluster=cluster, action="release")
            del notes[incident_id]


def _reason(owner: Incident) -> Reason:
    text = f"{owner.node.name} is as it was before the incident ({end_of(owner)})"
    return Reason("restored", text)


def _released(owner: Incident, note: _Restoring) -> Announcement:
    event = IncidentEvent(
        event_id=f"{owner.id}-released-by-watch",
        detail_type=DetailType.NODE_RELEASED,
        at=note.at,
        step=STEP,
        dry_run=owner.dry_run,
        reason=_reason(owner),
        outcome=owner.outcome,
        data={"is_uncordoned": note.is_uncordoned},
    )
    return Announcement(
        event.event_id, event.detail_type, event.at, dict(incident_detail(owner, event))
    )


def _matter(node: Node, ownership: Ownership | None, verdict: CordonVerdict) -> Matter:
    owner = ownership.incident_id if ownership else ""

    def event(since: datetime) -> Announcement:
        detail = CordonLeft(
            event_id=f"cordon-{node.ref.uid}-{owner or 'unknown'}-{verdict.reason.code}",
            occurred_at=since,
            cluster=node.ref.cluster,
            node=NodeRefModel.of(node.ref),
            owner=owner,
            reason=ReasonModel.of(verdict.reason),
            remedy=remedy_for(verdict.reason.code, needs_human=True),
        )
        return Announcement(
            detail.event_id, DetailType.CORDON_LEFT, since, detail.model_dump(mode="json")
        )

    return Matter(f"cordon/{node.ref.uid}/{owner}", verdict.since, event)


# --- notes --------------------------------------------------------------------------------------


def _read_notes(cluster: str, ports: WatchPorts) -> Mapping[str, _Restoring]:
    report = ports.memory.last_reports(cluster, [_NOTES]).get(_NOTES)
    notes = {}
    for entry in report.fingerprint.split() if report else ():
        incident_id, at, flag = entry.split("|")
        notes[incident_id] = _Restoring(datetime.fromisoformat(at), flag == "1")
    return notes


def _write_notes(cluster: str, notes: Mapping[str, _Restoring], ports: WatchPorts) -> None:
    entries = (
        f"{incident_id}|{note.at.isoformat()}|{int(note.is_uncordoned)}"
        for incident_id, note in sorted(notes.items())
    )
    ports.memory.remember(cluster, {_NOTES: Report(" ".join(entries), ports.clock.now())})
