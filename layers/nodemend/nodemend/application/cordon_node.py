"""Cordon: no new pods on the node, and a note on it whose doing that is."""

import logging
from dataclasses import replace

from nodemend.application.ports import Cluster
from nodemend.application.steps import (
    Progress,
    StepPorts,
    commit,
    end_of_held,
    hold_lease,
    load,
    observe_node,
    pinned_cluster,
    progress,
    why_held,
    why_mode_forbids,
)
from nodemend.contracts.events import MAX_LISTED
from nodemend.contracts.steps import CordonNodeRequest, CordonNodeResult
from nodemend.domain.approval import needs_yes
from nodemend.domain.cordon import (
    Ownership,
    cordon_patch,
    is_cordoned_by,
    ownership_of,
    plan_ownership,
)
from nodemend.domain.errors import ConcurrentUpdateError, IllegalTransitionError
from nodemend.domain.events import DetailType
from nodemend.domain.faults import Mode
from nodemend.domain.incidents import (
    CordonRecord,
    Incident,
    IncidentState,
    Outcome,
    decide_end,
    move,
    record,
)
from nodemend.domain.nodes import Node
from nodemend.domain.pods import Classified, PodFate, classify_pods
from nodemend.domain.policy import ApprovalPoint, wait_after
from nodemend.domain.rails import why_stand_down
from nodemend.domain.reasons import Reason

logger = logging.getLogger(__name__)

STEP = "cordon_node"

PATCH_TRIES = 4
"""Patches that may fail because the node changed between read and write."""


def cordon_node(request: CordonNodeRequest, *, ports: StepPorts) -> CordonNodeResult:
    """Cordon, taint and mark the node in one patch that tests what was read.

    The pods are classified before the node is touched, and the event says what will become of
    them. Repeating the step finds its own mark and changes nothing.

    Raises:
        SupersededError: if the node is another machine by now.
        LeaseLostError: if the incident holds no lease.
        IllegalTransitionError: if the policy wants a yes that nobody gave.
        ConcurrentUpdateError: if the node kept changing under the patch.
    """
    incident = load(ports, request)
    match progress(incident, following=IncidentState.DRAINING):
        case Progress.ENDED:
            return CordonNodeResult(incident_id=incident.id, next="close")
        case Progress.DONE:
            return CordonNodeResult(incident_id=incident.id, next="drain")
        case Progress.TO_DO:
            incident = move(incident, IncidentState.CORDONING, ports.clock.now())
    if needs_yes(incident, ApprovalPoint.CORDON):
        raise IllegalTransitionError(f"incident {incident.id}: nobody has approved the cordon")
    cluster = ports.clusters.open(pinned_cluster(incident))
    node = observe_node(cluster, incident)
    fates = classify_pods(cluster.list_pods(node.ref.name), node, now=ports.clock.now())
    if incident.dry_run:
        ownership = plan_ownership(node, incident.id)
    else:
        other = why_stand_down(node)
        if other is not None:
            commit(ports, decide_end(incident, Outcome.SKIPPED, other))
            return CordonNodeResult(incident_id=incident.id, next="close")
        forbidden = why_mode_forbids(ports, incident, is_cordon=True)
        if forbidden is not None:
            commit(ports, decide_end(incident, Outcome.ABORTED_BY_OPERATOR, forbidden))
            return CordonNodeResult(incident_id=incident.id, next="close")
        # What an earlier try has cordoned is reported whatever happened since: the drain waits.
        # The lease comes last: what is read of the guard after it could say that it is gone.
        held = why_held(ports, incident, node, is_untouched=True)
        paused = hold_lease(ports, incident, cover_s=wait_after(incident.waits.drain_poll_s, 0))
        held = held or paused
        if held is not None and not is_cordoned_by(node, incident.id):
            commit(ports, decide_end(incident, end_of_held(held), held))
            return CordonNodeResult(incident_id=incident.id, next="close")
        ownership = _cordon(cluster, node, incident)
    return _report(incident, ownership, fates, cluster, ports)


def _cordon(cluster: Cluster, node: Node, incident: Incident) -> Ownership:
    for _ in range(PATCH_TRIES):
        done = ownership_of(node)
        if done is not None and is_cordoned_by(node, incident.id):
            return done
        ownership = plan_ownership(node, incident.id)
        if cluster.patch_node(node.ref.name, cordon_patch(node, ownership)):
            return ownership
        node = observe_node(cluster, incident)
    raise ConcurrentUpdateError(f"node {node.ref.name} changed {PATCH_TRIES} times in a row")


def _report(
    incident: Incident,
    ownership: Ownership,
    fates: list[Classified],
    cluster: Cluster,
    ports: StepPorts,
) -> CordonNodeResult:
    now = ports.clock.now()
    evict = sorted(item.pod.id for item in fates if item.fate is PodFate.EVICT)
    skip = sorted(f"{item.pod.id}: {item.why}" for item in fates if item.fate is PodFate.SKIP)
    cordoned = record(
        replace(
            incident,
            cordon=CordonRecord(
                now, ownership.was_unschedulable, ownership.had_scale_down_disabled
            ),
        ),
        DetailType.NODE_CORDONED,
        step=STEP,
        reason=Reason(str(incident.fault_class), incident.fault_text),
        now=now,
        data={
            "was_unschedulable": ownership.was_unschedulable,
            "evict": tuple(evict[:MAX_LISTED]),
            "evict_count": len(evict),
            "skip": tuple(skip[:MAX_LISTED]),
            "skip_count": len(skip),
        },
    )
    is_last = incident.mode is Mode.CORDON_ONLY
    if is_last:
        reason = Reason("cordon_only", "the policy's mode stops after the cordon")
        cordoned = decide_end(cordoned, Outcome.NEEDS_HUMAN, reason)
    else:
        cordoned = move(cordoned, IncidentState.DRAINING, now)
    commit(ports, cordoned)
    if not incident.dry_run:
        cluster.record_event(
            incident.node,
            "NodemendCordoned",
            f"{incident.fault_text} (incident {incident.id})",
            is_warning=True,
        )
    return CordonNodeResult(incident_id=incident.id, next="close" if is_last else "drain")
