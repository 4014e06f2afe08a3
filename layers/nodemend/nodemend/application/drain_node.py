"""One slice of a drain: evict what can be evicted now, and say what holds the rest."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from nodemend.application.ports import Cluster
from nodemend.application.restoring import restore, uncordoned
from nodemend.application.steps import (
    Progress,
    StepPorts,
    commit,
    hold_lease,
    load,
    observe_node,
    pinned_cluster,
    progress,
    tell_held,
    why_held,
    why_mode_forbids,
)
from nodemend.contracts.events import MAX_LISTED, Block
from nodemend.contracts.steps import DrainNodeRequest, DrainNodeResult
from nodemend.domain.errors import ClusterForbiddenError
from nodemend.domain.escalation import escalate
from nodemend.domain.events import DetailType
from nodemend.domain.incidents import (
    DrainRecord,
    Incident,
    IncidentState,
    Outcome,
    decide_end,
    move,
    record,
)
from nodemend.domain.nodes import Node
from nodemend.domain.pods import (
    Classified,
    DisruptionBudget,
    EvictionAnswer,
    EvictionVerdict,
    Pod,
    PodFate,
    classify_pods,
)
from nodemend.domain.policy import wait_after
from nodemend.domain.reasons import Reason

STEP = "drain_node"

SLICE = timedelta(seconds=10)
"""Longest time for evictions in one invocation (cluster-api uses the same); waiting is the state
machine's."""

_BLOCKS = frozenset(
    {
        EvictionVerdict.BLOCKED_BY_PDB,
        EvictionVerdict.BLOCKED_BY_MULTIPLE_PDBS,
        EvictionVerdict.NAMESPACE_TERMINATING,
    }
)


@dataclass(slots=True)
class _Slice:
    """What one slice did; made and read inside this module only."""

    pending: set[str]
    """`namespace/name` of the pods that are still to be evicted."""
    evicted: dict[str, str] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)
    blocks: dict[str, tuple[Pod, EvictionAnswer]] = field(default_factory=dict)
    gone: int = 0
    forbidden: str = ""


def drain_node(request: DrainNodeRequest, *, ports: StepPorts) -> DrainNodeResult:
    """Run one slice of at most ten seconds, on a fresh list of the node's pods.

    The node is drained only when a list shows no pod that the drain has to move: an accepted
    eviction is a promise, and a pod runs on until its grace period ends.

    Raises:
        SupersededError: if the node is another machine by now.
        ClusterForbiddenError: if RBAC denies evictions; the slice's progress is stored first.
    """
    now = ports.clock.now()
    incident = load(ports, request)
    match progress(incident, following=IncidentState.REPAIRING):
        case Progress.ENDED:
            return DrainNodeResult(incident_id=incident.id, next="close")
        case Progress.DONE:
            return DrainNodeResult(incident_id=incident.id, next="drained")
        case Progress.TO_DO:
            incident = move(incident, IncidentState.DRAINING, now)
    drain = incident.drain or DrainRecord(started_at=now)
    cluster = ports.clusters.open(pinned_cluster(incident))
    node = observe_node(cluster, incident)
    fates = classify_pods(cluster.list_pods(node.ref.name), node, now=now)
    if incident.dry_run:
        return _rehearse(incident, drain, fates, cluster, ports)
    if not node.is_unschedulable:
        return _uncordoned(incident, node, cluster, ports)
    stopped = why_mode_forbids(ports, incident, is_cordon=False)
    if stopped is not None:
        commit(ports, decide_end(incident, Outcome.ABORTED_BY_OPERATOR, stopped))
        return DrainNodeResult(incident_id=incident.id, next="close")
    held = why_held(ports, incident, node)
    if held is not None:
        return _held(incident, drain, held, ports)
    if not [item for item in fates if item.fate in (PodFate.EVICT, PodFate.WAIT)]:
        return _drained(incident, drain, fates, ports)
    return _slice(incident, drain, node, fates, cluster, ports)


def _slice(
    incident: Incident,
    drain: DrainRecord,
    node: Node,
    fates: Sequence[Classified],
    cluster: Cluster,
    ports: StepPorts,
) -> DrainNodeResult:
    wait_s = wait_after(incident.waits.drain_poll_s, drain.slices)
    paused = hold_lease(ports, incident, cover_s=wait_s)
    if paused is not None:
        return _held(incident, drain, paused, ports)
    done = _evict(cluster, node, fates, ports)
    return _after_slice(incident, drain, done, cluster, wait_s, ports)


def _uncordoned(
    incident: Incident, node: Node, cluster: Cluster, ports: StepPorts
) -> DrainNodeResult:
    """Somebody wants the node back: take off the rest of our cordon, and keep off the node."""
    restore(cluster, incident)
    commit(ports, decide_end(incident, Outcome.ABORTED_BY_OPERATOR, uncordoned(node)))
    return DrainNodeResult(incident_id=incident.id, next="close")


def _held(
    incident: Incident, drain: DrainRecord, held: Reason, ports: StepPorts
) -> DrainNodeResult:
    """Evict nothing and do not go on to the repair; look again until the drain's deadline."""
    now = ports.clock.now()
    waiting = tell_held(incident, held, step=STEP, now=now)
    if now - drain.started_at >= timedelta(seconds=incident.deadlines.drain_s):
        commit(ports, decide_end(waiting, Outcome.ABORTED_BY_OPERATOR, held))
        return DrainNodeResult(incident_id=incident.id, next="close")
    wait_s = wait_after(incident.waits.drain_poll_s, drain.slices)
    hold_lease(ports, incident, cover_s=wait_s)
    commit(ports, replace(waiting, drain=replace(drain, slices=drain.slices + 1)))
    return DrainNodeResult(incident_id=incident.id, next="wait", wait_s=wait_s)


def _evict(cluster: Cluster, node: Node, fates: Sequence[Classified], ports: StepPorts) -> _Slice:
    """Try every pod once, in order; one pod's answer never ends the others' turn."""
    done = _Slice({item.pod.id for item in fates if item.fate is PodFate.EVICT})
    end = ports.clock.now() + SLICE
    for item in fates:
        if item.fate is not PodFate.EVICT:
            continue
        if ports.clock.now() >= end:
            break
        # Read directly before: with a wrong uid the server refuses the eviction and yet uses up
        # the disruption budget for two minutes. The precondition is the net below this.
        current = cluster.get_pod(item.pod.namespace, item.pod.name)
        if current is None or current.uid != item.pod.uid or current.node_name != node.ref.name:
            done.gone += 1
            done.pending.discard(item.pod.id)
            continue
        answer = cluster.evict(current)
        done.attempts[current.uid] = 1
        verdict = answer.verdict
        if verdict is EvictionVerdict.ACCEPTED:
            done.evicted[current.uid] = current.id
            done.pending.discard(current.id)
        elif verdict is EvictionVerdict.GONE:
            done.gone += 1
            done.pending.discard(current.id)
        elif verdict in _BLOCKS:
            done.blocks[current.id] = (current, answer)
        elif verdict is EvictionVerdict.FORBIDDEN:
            done.forbidden = answer.message or f"eviction of {current.id} is forbidden"
            break
        elif verdict is EvictionVerdict.THROTTLED:
            break  # the API server asks for a pause: the next slice goes on
    return done


def _after_slice(
    incident: Incident,
    drain: DrainRecord,
    done: _Slice,
    cluster: Cluster,
    wait_s: int,
    ports: StepPorts,
) -> DrainNodeResult:
    now = ports.clock.now()
    blocks = _explain(done.blocks.values(), cluster) if done.blocks else ()
    # Not the server's words: they count healthy pods, and would make each poll look like news.
    causes = {block.pod: " ".join((block.verdict, *block.budgets)) for block in blocks}
    # What held a pod that this slice got no clear answer for is not forgotten, or it would be
    # told again as news by the next one.
    held = {pod_id: cause for pod_id, cause in drain.blocked.items() if pod_id in done.pending}
    progressed = replace(
        drain,
        slices=drain.slices + 1,
        evicted={**drain.evicted, **done.evicted},
        attempts=_added(drain.attempts, done.attempts),
        blocked={**held, **causes},
        gone=drain.gone + done.gone,
    )
    updated = replace(incident, drain=progressed, waiting_for="")
    if _is_news(drain.blocked, causes):
        updated = _progress(updated, blocks, now)
    if done.forbidden:
        commit(ports, updated)
        raise ClusterForbiddenError(
            f"cluster {incident.cluster} does not allow nodemend to create pods/eviction: "
            f"{done.forbidden}. Remedy: apply docs/kubernetes/rbac.yaml."
        )
    if now - drain.started_at >= timedelta(seconds=incident.deadlines.drain_s):
        reason = _why_too_late(incident, blocks, held, done)
        commit(ports, escalate(updated, reason, step=STEP, now=now))
        return DrainNodeResult(incident_id=incident.id, next="close")
    commit(ports, updated)
    return DrainNodeResult(incident_id=incident.id, next="wait", wait_s=wait_s)


def _added(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    total = dict(before)
    for uid, count in now.items():
        total[uid] = total.get(uid, 0) + count
    return total


def _is_news(before: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """A pod that is blocked now and was not before, or by something else, is news."""
    return any(before.get(pod_id) != cause for pod_id, cause in now.items())


def _explain(blocks: Iterable[tuple[Pod, EvictionAnswer]], cluster: Cluster) -> tuple[Block, ...]:
    budgets: dict[str, Sequence[DisruptionBudget]] = {}
    explained = []
    for pod, answer in blocks:
        if pod.namespace not in budgets:
            budgets[pod.namespace] = cluster.list_disruption_budgets(pod.namespace)
        mine = [budget for budget in budgets[pod.namespace] if budget.selects(pod)]
        explained.append(
            Block(
                pod=pod.id,
                verdict=answer.verdict,
                cause=answer.cause_text,
                budgets=tuple(sorted(budget.name for budget in mine)),
                can_never_allow=len(mine) > 1 or any(b.can_never_allow for b in mine),
            )
        )
    return tuple(explained)


def _progress(incident: Incident, blocks: Sequence[Block], now: datetime) -> Incident:
    return record(
        incident,
        DetailType.DRAIN_PROGRESS,
        step=STEP,
        reason=_block_reason(blocks),
        now=now,
        data={"blocked": tuple(blocks[:MAX_LISTED]), "blocked_count": len(blocks)},
    )


def _block_reason(blocks: Sequence[Block]) -> Reason:
    worst = next(
        (block for block in blocks if block.verdict == EvictionVerdict.BLOCKED_BY_MULTIPLE_PDBS),
        blocks[0],
    )
    named = f" (budget {', '.join(worst.budgets)})" if worst.budgets else ""
    more = f" and {len(blocks) - 1} more" if len(blocks) > 1 else ""
    never = "; as it stands it can never allow an eviction" if worst.can_never_allow else ""
    return Reason(str(worst.verdict), f"{worst.pod}{more}: {worst.cause}{named}{never}")


def _why_too_late(
    incident: Incident, blocks: Sequence[Block], held: Mapping[str, str], done: _Slice
) -> Reason:
    if blocks:
        why = _block_reason(blocks)
        return Reason(why.code, f"after {incident.deadlines.drain_s} s still {why.text}")
    if held:
        # The last slice got no clear answer; the person needs to know what the others got.
        pod_id, cause = next(iter(held.items()))
        text = f"after {incident.deadlines.drain_s} s still {pod_id}: {cause}"
        return Reason(cause.split()[0], text)
    return Reason(
        "drain_deadline",
        f"pods were still ending after {incident.deadlines.drain_s} s "
        f"({len(done.evicted)} evicted in the last slice)",
    )


def _drained(
    incident: Incident, drain: DrainRecord, fates: Sequence[Classified], ports: StepPorts
) -> DrainNodeResult:
    now = ports.clock.now()
    unconfirmed = tuple(item.pod.id for item in fates if item.fate is PodFate.UNCONFIRMED)
    drained = record(
        replace(
            incident,
            drain=replace(drain, is_drained=True, blocked={}, unconfirmed=unconfirmed),
            waiting_for="",
        ),
        DetailType.NODE_DRAINED,
        step=STEP,
        reason=Reason("drained", f"{len(drain.evicted)} pods were evicted"),
        now=now,
        data={
            "evicted_count": len(drain.evicted),
            "slices": drain.slices,
            "drained_unconfirmed": unconfirmed[:MAX_LISTED],
        },
    )
    commit(ports, move(drained, IncidentState.REPAIRING, now))
    return DrainNodeResult(incident_id=incident.id, next="drained")


def _rehearse(
    incident: Incident,
    drain: DrainRecord,
    fates: Sequence[Classified],
    cluster: Cluster,
    ports: StepPorts,
) -> DrainNodeResult:
    """Say what a drain would do: which pods it would evict, and which budgets have no room."""
    now = ports.clock.now()
    evict = [item.pod for item in fates if item.fate is PodFate.EVICT]
    blocked = _foresee(evict, cluster)
    rehearsed = record(
        replace(incident, drain=replace(drain, is_drained=True)),
        DetailType.NODE_DRAINED,
        step=STEP,
        reason=Reason("dry_run", f"{len(evict)} pods would be evicted"),
        now=now,
        data={
            "evicted_count": 0,
            "slices": 0,
            "would_evict": tuple(pod.id for pod in evict[:MAX_LISTED]),
            "blocked": blocked[:MAX_LISTED],
        },
    )
    commit(ports, move(rehearsed, IncidentState.REPAIRING, now))
    return DrainNodeResult(incident_id=incident.id, next="drained")


def _foresee(evict: Sequence[Pod], cluster: Cluster) -> tuple[Block, ...]:
    """Return what would hold the pods now; no budget protects a finished one."""
    budgets = {
        namespace: cluster.list_disruption_budgets(namespace)
        for namespace in sorted({pod.namespace for pod in evict})
    }
    blocks = []
    for pod in evict:
        mine = [budget for budget in budgets[pod.namespace] if budget.selects(pod)]
        full = [budget for budget in mine if budget.disruptions_allowed < 1]
        if pod.is_finished or (len(mine) < 2 and not full):
            continue
        if len(mine) > 1:
            verdict = EvictionVerdict.BLOCKED_BY_MULTIPLE_PDBS
            cause = f"{len(mine)} budgets select the pod, and the eviction API supports one"
        else:
            verdict = EvictionVerdict.BLOCKED_BY_PDB
            cause = f"budget {full[0].name} allows {full[0].disruptions_allowed} disruptions now"
        blocks.append(
            Block(
                pod=pod.id,
                verdict=verdict,
                cause=cause,
                budgets=tuple(sorted(budget.name for budget in mine)),
                can_never_allow=len(mine) > 1 or full[0].can_never_allow,
            )
        )
    return tuple(blocks)
