"""Prove the repair: the node's GPUs report, and no rule holds, for the whole hold-down."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Literal

from nodemend.application.check_repair import why_unfit
from nodemend.application.detection import detect, of_node
from nodemend.application.keeping import keep_cordon
from nodemend.application.steps import (
    Progress,
    commit,
    hold_lease,
    load,
    observe_node,
    pinned_cluster,
    progress,
)
from nodemend.application.verify_fault import VerifyPorts
from nodemend.contracts.evidence import NodeRefModel
from nodemend.contracts.steps import ValidateNodeRequest, ValidateNodeResult
from nodemend.domain.errors import InvalidInputError
from nodemend.domain.escalation import escalate, is_on_next_rung
from nodemend.domain.events import DetailType
from nodemend.domain.faults import Rung
from nodemend.domain.findings import NODE_LABELS, Finding, is_blank
from nodemend.domain.incidents import Incident, IncidentState, RepairRecord, move, record
from nodemend.domain.nodes import NodeRef
from nodemend.domain.policy import wait_after
from nodemend.domain.reasons import Reason
from nodemend.domain.rules import matcher_of

STEP = "validate_node"

_NAME_LABELS = tuple(label for label in NODE_LABELS if label != "instance_id")


def validate_node(request: ValidateNodeRequest, *, ports: VerifyPorts) -> ValidateNodeResult:
    """Watch the replacement, or the rebooted node, until it was clean for the policy's hold-down.

    Clean means: Ready, its GPUs allocatable, each of them reporting, and no actionable finding.
    Unknown is not clean: it starts the hold-down anew, as a finding does. Another boot does, too.

    Raises:
        InvalidInputError: if there is no repaired node to validate.
        SupersededError: if the rebooted node is another machine by now.
    """
    incident = load(ports.step, request)
    match progress(incident, following=IncidentState.RELEASING):
        case Progress.ENDED:
            return ValidateNodeResult(incident_id=incident.id, next="close")
        case Progress.DONE:
            return ValidateNodeResult(incident_id=incident.id, next="release")
        case Progress.TO_DO:
            pass
    if is_on_next_rung(incident):
        # An earlier try decided on another repair, and died before it could say so.
        return ValidateNodeResult(incident_id=incident.id, next="repair")
    incident = move(incident, IncidentState.VALIDATING, ports.step.clock.now())
    repair = incident.repair
    if repair is None or repair.subject is None:
        raise InvalidInputError("repair", "has no replacement", "start the remediation again")
    if repair.rung is Rung.REBOOT:
        incident = _observed(incident, repair.subject, ports)
        if incident.verdict is not None:
            commit(ports.step, incident)
            return ValidateNodeResult(incident_id=incident.id, next="close")
    return _judged(incident, ports)


def _observed(incident: Incident, ref: NodeRef, ports: VerifyPorts) -> Incident:
    """See to the cordon of a node that we rebooted, and notice if it has booted once more."""
    cluster = ports.step.clusters.open(pinned_cluster(incident))
    node = observe_node(cluster, incident)
    kept = keep_cordon(incident, node, cluster, step=STEP, ports=ports.step)
    if kept.repair is None or node.ref.boot_id in ("", ref.boot_id):
        return kept
    again = replace(kept.repair, rebooted_node=node.ref, clean_since=None)
    return replace(kept, repair=again)


def _judged(incident: Incident, ports: VerifyPorts) -> ValidateNodeResult:
    repair = incident.repair
    if repair is None or repair.subject is None:  # pragma: no cover - asked above
        raise AssertionError("there is no repair")
    problem = _why_not_clean(incident, repair, repair.subject, ports)
    now = ports.step.clock.now()
    if problem is not None:
        return _unclean(incident, repair, problem, ports)
    clean_since = repair.clean_since or now
    left_s = incident.hold_down_s - (now - clean_since).total_seconds()
    if left_s > 0:
        return _hold(incident, repair, clean_since, left_s, ports)
    return _proven(incident, repair, repair.subject, ports)


_UNKNOWN = "metrics_unknown"
_UNHEALTHY = {Rung.REBOOT: "reboot_unhealthy", Rung.REPLACE: "replacement_unhealthy"}


def _why_not_clean(
    incident: Incident, repair: RepairRecord, ref: NodeRef, ports: VerifyPorts
) -> Reason | None:
    cluster_policy = pinned_cluster(incident)
    unhealthy = _UNHEALTHY[repair.rung]
    node = ports.step.clusters.open(cluster_policy).get_node(ref.name)
    if node is None or not node.ref.is_same_machine(ref):
        return Reason(unhealthy, f"the new node {ref.name} is gone")
    unfit = why_unfit(node, incident.expected_gpus, unhealthy)
    if unfit is not None:
        return unfit
    now = ports.step.clock.now()
    seen = detect(
        ports.catalogue.about_nodes(),
        cluster=cluster_policy,
        metrics=ports.metrics,
        catalogue=ports.catalogue,
        policy=ports.step.policies.current(),
        at=now,
    )
    if seen.unknown:
        rule_id, why = next(iter(seen.unknown.items()))
        return Reason(_UNKNOWN, f"rule {rule_id} cannot be judged: {why}")
    mine = (*of_node(seen.findings, ref), *_of_same_gpus(incident, repair, seen.findings))
    sick = [finding for finding in mine if finding.verdict.is_actionable]
    if sick:
        return Reason(unhealthy, f"{ref.name}: {sick[0].summary}")
    return _why_not_seen(incident, repair, ref, now, ports)


def _of_same_gpus(
    incident: Incident, repair: RepairRecord, findings: Iterable[Finding]
) -> tuple[Finding, ...]:
    """Return what is found of the sick GPUs, under whatever name their node goes there."""
    gpus = set(incident.gpu_uuids) if repair.rung is Rung.REBOOT else set()
    return tuple(finding for finding in findings if finding.gpu_uuid in gpus)


def _why_not_seen(
    incident: Incident, repair: RepairRecord, ref: NodeRef, now: datetime, ports: VerifyPorts
) -> Reason | None:
    cluster_policy = pinned_cluster(incident)
    queries = _counting_queries(ref, cluster_policy.matcher, ports.catalogue.metric_names)
    answers = ports.metrics.query_many(cluster_policy, queries, now)
    for answer in answers.values():
        if answer.problem is not None:
            return Reason(_UNKNOWN, f"{ref.name}: {answer.problem}")
    counts = [
        int(sample.value)
        for answer in answers.values()
        for sample in answer.samples
        if not is_blank(sample.value)
    ]
    reporting = max(counts, default=0)
    if reporting >= incident.expected_uuids:
        return None
    # Where some report after a reboot, the others are still lost. None at all is telemetry.
    is_lost = repair.rung is Rung.REBOOT and reporting > 0
    return Reason(
        "reboot_unhealthy" if is_lost else "metrics_missing",
        f"{reporting} of {incident.expected_uuids} GPUs of {ref.name} report",
    )


def _failed_pods(incident: Incident, ports: VerifyPorts) -> int:
    """Count pods that were admitted before the device plugin was up: bare ones never recover."""
    cluster = ports.step.clusters.open(pinned_cluster(incident))
    return sum(1 for pod in cluster.list_pods(incident.node.name) if pod.phase == "Failed")


def _counting_queries(
    ref: NodeRef, matcher: str, metric_names: Mapping[str, tuple[str, ...]]
) -> dict[str, str]:
    names = "|".join(metric_names["gpu_temp"])
    more = f",{matcher}" if matcher else ""
    return {
        # Without a UUID label the index tells the GPUs of one node apart.
        label: (
            f'count(count by (UUID, gpu) ({{__name__=~"{names}",'
            f"{matcher_of(label, ref.name)}{more}}}))"
        )
        for label in _NAME_LABELS
    }


def _unclean(
    incident: Incident, repair: RepairRecord, problem: Reason, ports: VerifyPorts
) -> ValidateNodeResult:
    now = ports.step.clock.now()
    noted = replace(
        incident,
        repair=replace(repair, clean_since=None, polls=repair.polls + 1, last_problem=str(problem)),
    )
    is_reboot = repair.rung is Rung.REBOOT
    deadlines = incident.deadlines
    limit_s = incident.hold_down_s + (deadlines.reboot_s if is_reboot else deadlines.replace_s)
    # One answer that is lost at the deadline is no judgement of the node: one more look.
    is_blind = problem.code == _UNKNOWN and not repair.last_problem.startswith(_UNKNOWN)
    if now - incident.state_since >= timedelta(seconds=limit_s) and not is_blind:
        late = Reason(problem.code, f"after {limit_s} s: {problem.text}")
        escalated = escalate(noted, late, step=STEP, now=now)
        commit(ports.step, escalated)
        following: Literal["repair", "close"] = "repair" if is_on_next_rung(escalated) else "close"
        return ValidateNodeResult(incident_id=incident.id, next=following)
    wait_s = wait_after(incident.waits.check_poll_s, repair.polls)
    return _wait(noted, wait_s, ports)


def _hold(
    incident: Incident,
    repair: RepairRecord,
    clean_since: datetime,
    left_s: float,
    ports: VerifyPorts,
) -> ValidateNodeResult:
    noted = replace(
        incident,
        repair=replace(repair, clean_since=clean_since, polls=repair.polls + 1, last_problem=""),
    )
    poll_s = wait_after(incident.waits.check_poll_s, repair.polls)
    return _wait(noted, max(1, min(poll_s, math.ceil(left_s))), ports)


def _wait(incident: Incident, wait_s: int, ports: VerifyPorts) -> ValidateNodeResult:
    hold_lease(ports.step, incident, cover_s=wait_s)
    commit(ports.step, incident)
    return ValidateNodeResult(incident_id=incident.id, next="wait", wait_s=wait_s)


def _proven(
    incident: Incident, repair: RepairRecord, ref: NodeRef, ports: VerifyPorts
) -> ValidateNodeResult:
    now = ports.step.clock.now()
    found: dict[str, Any] = {"replacement": NodeRefModel.of(ref)}
    if repair.rung is Rung.REBOOT:
        found = {"boot_id": ref.boot_id, "failed_pods": _failed_pods(incident, ports)}
    proven = record(
        incident,
        DetailType.REPAIR_PROVEN,
        step=STEP,
        reason=Reason(
            "proven",
            f"{ref.name} on {ref.instance_id} is Ready with {incident.expected_gpus} GPUs and has "
            f"been clean for {incident.hold_down_s} s",
        ),
        now=now,
        data={
            "rung": repair.rung,
            "gpus": incident.expected_gpus,
            **found,
        },
    )
    commit(ports.step, move(proven, IncidentState.RELEASING, now))
    return ValidateNodeResult(incident_id=incident.id, next="release")
