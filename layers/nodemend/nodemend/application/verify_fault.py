"""Second look: is the fault there, on this machine, and may and can it be repaired here?"""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from nodemend.application.detection import Detection, detect, of_node
from nodemend.application.ports import Capacity, MetricsStore
from nodemend.application.steps import (
    Progress,
    StepPorts,
    commit,
    load,
    observe_node,
    pinned_cluster,
    progress,
)
from nodemend.contracts.events import FindingModel
from nodemend.contracts.steps import VerifyFaultRequest, VerifyFaultResult
from nodemend.domain.capacity import kind_of, why_not_replaceable
from nodemend.domain.errors import InvalidInputError
from nodemend.domain.escalation import escalate
from nodemend.domain.events import DetailType
from nodemend.domain.faults import FaultKind, Mode, Rung
from nodemend.domain.findings import NODE_LABELS, Finding, by_urgency
from nodemend.domain.incidents import Incident, IncidentState, Outcome, decide_end, move, record
from nodemend.domain.nodes import Node
from nodemend.domain.policy import ClusterPolicy, Policy, wait_after
from nodemend.domain.rails import why_stand_down
from nodemend.domain.reasons import Reason
from nodemend.domain.rules import Catalogue, Rule, render_presence

STEP = "verify_fault"


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the second look says: confirmed, not there any more, or unknown."""

    confirmed: tuple[Finding, ...] = ()
    gone: Reason | None = None
    unknown: Reason | None = None


@dataclass(frozen=True, slots=True)
class VerifyPorts:
    """What verification needs besides the steps' own ports."""

    step: StepPorts
    metrics: MetricsStore
    capacity: Capacity
    catalogue: Catalogue


def verify_fault(request: VerifyFaultRequest, *, ports: VerifyPorts) -> VerifyFaultResult:
    """Confirm node, fault, capacity and rails by fresh answers of AMP, Kubernetes and EC2.

    A level fault is read now; an event at the time of its evidence, and only a new boot id ends
    it: quiet is no recovery. What stays unknown until the deadline is skipped, nothing touched.

    Raises:
        SupersededError: if the node is another machine by now.
    """
    incident = load(ports.step, request)
    match progress(incident, following=IncidentState.CORDONING):
        case Progress.ENDED:
            return VerifyFaultResult(incident_id=incident.id, next="close")
        case Progress.DONE:
            return VerifyFaultResult(incident_id=incident.id, next="cordon")
        case Progress.TO_DO:
            incident = move(incident, IncidentState.VERIFYING, ports.step.clock.now())
    cluster_policy = pinned_cluster(incident)
    node = observe_node(ports.step.clusters.open(cluster_policy), incident)
    other = why_stand_down(node)
    if other is not None:
        return _close(decide_end(incident, Outcome.SKIPPED, other), ports)
    blocked = _why_not_repairable(incident, node, cluster_policy, ports)
    if blocked is not None:
        now = ports.step.clock.now()
        return _close(escalate(incident, blocked, step=STEP, now=now), ports)
    judgement = _judge(incident, node, cluster_policy, ports)
    if judgement.unknown is not None:
        return _wait(incident, judgement.unknown, ports)
    if judgement.gone is not None:
        outcome = Outcome.SKIPPED if judgement.gone.code == "not_confirmed" else Outcome.RECOVERED
        return _close(decide_end(incident, outcome, judgement.gone), ports)
    return _confirm(incident, judgement, ports)


def _why_not_repairable(
    incident: Incident, node: Node, cluster_policy: ClusterPolicy, ports: VerifyPorts
) -> Reason | None:
    if incident.mode is Mode.CORDON_ONLY or incident.rung is not Rung.REPLACE:
        return None
    group = ports.capacity.group(cluster_policy, incident.group) if incident.group else None
    kind = kind_of(node, is_in_group=group is not None)
    return why_not_replaceable(node, kind, group)


def _judge(
    incident: Incident, node: Node, cluster_policy: ClusterPolicy, ports: VerifyPorts
) -> Judgement:
    policy = ports.step.policies.current()
    if not incident.findings:
        return _by_hand(node, cluster_policy, policy, ports)
    judged = []
    # The first that is confirmed suffices; but that one is gone says nothing of the others.
    for finding in by_urgency(incident.findings):
        if not finding.verdict.is_actionable:
            continue
        judgement = _judge_finding(incident, finding, node, cluster_policy, policy, ports)
        if judgement.confirmed:
            return judgement
        judged.append(judgement)
    unknown = [judgement for judgement in judged if judgement.unknown is not None]
    return next(iter([*unknown, *judged]), Judgement(unknown=Reason("no_finding", "none acts")))


def _judge_finding(
    incident: Incident,
    finding: Finding,
    node: Node,
    cluster_policy: ClusterPolicy,
    policy: Policy,
    ports: VerifyPorts,
) -> Judgement:
    if finding.kind is FaultKind.LEVEL:
        return _judge_level(finding, node, cluster_policy, policy, ports)
    if node.ref.boot_id != incident.node.boot_id:
        reason = Reason("rebooted", f"{node.ref.name} has booted since {finding.summary}")
        return Judgement(gone=reason)
    return _judge_event(incident, finding, node, cluster_policy, policy, ports)


def _ask(
    rule: Rule, at: datetime, cluster_policy: ClusterPolicy, policy: Policy, ports: VerifyPorts
) -> Detection:
    return detect(
        [rule],
        cluster=cluster_policy,
        metrics=ports.metrics,
        catalogue=ports.catalogue,
        policy=policy,
        at=at,
    )


def _rule(finding: Finding, policy: Policy, ports: VerifyPorts) -> Rule | None:
    override = policy.rules.get(finding.evidence.rule_id)
    if override is not None and not override.is_enabled:
        return None
    try:
        return ports.catalogue.rule(finding.evidence.rule_id)
    except InvalidInputError:
        return None


def _judge_event(
    incident: Incident,
    primary: Finding,
    node: Node,
    cluster_policy: ClusterPolicy,
    policy: Policy,
    ports: VerifyPorts,
) -> Judgement:
    rule = _rule(primary, policy, ports)
    if rule is None:
        return Judgement(unknown=_retired(primary))
    seen = _ask(rule, primary.evidence.at, cluster_policy, policy, ports)
    if seen.unknown:
        return Judgement(unknown=next(iter(seen.unknown.values())))
    confirmed = [f for f in of_node(seen.findings, node.ref.name) if f.key == primary.key]
    if confirmed or _seen_under_another_name(seen, incident, primary):
        return Judgement(confirmed=tuple(confirmed) or (primary,))
    reason = Reason(
        "not_confirmed", f"AMP does not show {primary.summary} at {primary.evidence.at.isoformat()}"
    )
    return Judgement(gone=reason)


def _seen_under_another_name(seen: Detection, incident: Incident, primary: Finding) -> bool:
    """Cover nodes that were resolved by instance id: labels carry no node name there."""
    names = set(primary.node_names)
    return incident.node.name not in names and any(
        f.key == primary.key and names & set(f.node_names) for f in seen.findings
    )


def _judge_level(
    primary: Finding,
    node: Node,
    cluster_policy: ClusterPolicy,
    policy: Policy,
    ports: VerifyPorts,
) -> Judgement:
    rule = _rule(primary, policy, ports)
    if rule is None:
        return Judgement(unknown=_retired(primary))
    now = ports.step.clock.now()
    seen = _ask(rule, now, cluster_policy, policy, ports)
    if seen.unknown:
        return Judgement(unknown=next(iter(seen.unknown.values())))
    names = {node.ref.name, *primary.node_names}
    holding = tuple(f for f in seen.findings if f.key == primary.key and names & set(f.node_names))
    if holding:
        return Judgement(confirmed=holding)
    return _absent_or_recovered(rule, primary, cluster_policy, now, ports)


def _absent_or_recovered(
    rule: Rule, primary: Finding, cluster_policy: ClusterPolicy, now: datetime, ports: VerifyPorts
) -> Judgement:
    """The rule does not hold. Only a GPU that reports can have recovered."""
    queries = {
        name: render_presence(
            rule, ports.catalogue.metric_names, _joined(matcher, cluster_policy.matcher)
        )
        for name, matcher in (("gpu", _gpu_matcher(primary)), ("node", _node_matcher(primary)))
    }
    answers = ports.metrics.query_many(cluster_policy, queries, now)
    for answer in answers.values():
        if answer.problem is not None:
            return Judgement(unknown=answer.problem)
    gpu_reports = any(sample.value > 0 for sample in answers["gpu"].samples)
    node_reports = any(sample.value > 0 for sample in answers["node"].samples)
    if gpu_reports:
        reason = Reason("recovered", f"AMP shows no longer: {primary.summary}")
        return Judgement(gone=reason)
    if rule.is_absence_the_fault and node_reports:
        return Judgement(confirmed=(primary,))
    return Judgement(
        unknown=Reason("metrics_missing", f"{rule.id} cannot see the GPU: its metrics are missing")
    )


def _joined(*matchers: str) -> str:
    return ",".join(matcher for matcher in matchers if matcher)


def _gpu_matcher(finding: Finding) -> str:
    labels = finding.evidence.labels
    for label in ("UUID", "uuid", "gpu_uuid"):
        if labels.get(label):
            return f'{label}="{labels[label]}"'
    return _node_matcher(finding) + f',gpu="{finding.gpu_index}"'


def _node_matcher(finding: Finding) -> str:
    labels = finding.evidence.labels
    name = next((label for label in NODE_LABELS if labels.get(label)), "Hostname")
    return f'{name}="{labels.get(name, "")}"'


def _retired(finding: Finding) -> Reason:
    rule_id = finding.evidence.rule_id
    return Reason("rule_unknown", f"rule {rule_id} is not in the catalogue, or switched off now")


def _by_hand(
    node: Node, cluster_policy: ClusterPolicy, policy: Policy, ports: VerifyPorts
) -> Judgement:
    """A person's word is the fault; what the metrics say is reported, and decides nothing."""
    seen = detect(
        ports.catalogue.rules,
        cluster=cluster_policy,
        metrics=ports.metrics,
        catalogue=ports.catalogue,
        policy=policy,
        at=ports.step.clock.now(),
    )
    return Judgement(confirmed=of_node(seen.findings, node.ref.name))


def _confirm(incident: Incident, judgement: Judgement, ports: VerifyPorts) -> VerifyFaultResult:
    verified = record(
        incident,
        DetailType.FAULT_VERIFIED,
        step=STEP,
        reason=Reason("confirmed", incident.fault_text),
        now=ports.step.clock.now(),
        data={"findings": tuple(FindingModel.of(finding) for finding in judgement.confirmed)},
    )
    # The state moves on with the event, so that a repeated step does not tell it twice.
    moved = move(verified, IncidentState.CORDONING, ports.step.clock.now())
    commit(ports.step, moved)
    return VerifyFaultResult(incident_id=incident.id, next="cordon")


def _wait(incident: Incident, unknown: Reason, ports: VerifyPorts) -> VerifyFaultResult:
    now = ports.step.clock.now()
    since = incident.verify_since or incident.state_since
    if now - since >= timedelta(seconds=incident.deadlines.verify_s):
        reason = Reason(
            "unverifiable",
            f"the fault could not be verified within {incident.deadlines.verify_s} s: {unknown}",
        )
        return _close(decide_end(incident, Outcome.SKIPPED, reason), ports)
    wait_s = wait_after(incident.waits.check_poll_s, incident.verify_attempts)
    commit(ports.step, replace(incident, verify_attempts=incident.verify_attempts + 1))
    return VerifyFaultResult(incident_id=incident.id, next="wait", wait_s=wait_s)


def _close(incident: Incident, ports: VerifyPorts) -> VerifyFaultResult:
    commit(ports.step, incident)
    return VerifyFaultResult(incident_id=incident.id, next="close")
