"""The second look: what fresh answers of AMP say of an incident's findings.

A level is read now; an event at the time of its evidence. Nothing of the announcement is believed
but where to look: rule, verdict and fault are judged again from AMP's own answer.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from nodemend.application.detection import Detection, detect, of_node
from nodemend.application.ports import MetricsStore
from nodemend.domain.errors import InvalidInputError
from nodemend.domain.faults import FaultKind
from nodemend.domain.findings import NODE_LABELS, Finding, by_urgency, is_blank
from nodemend.domain.incidents import Incident, Origin
from nodemend.domain.nodes import Node
from nodemend.domain.policy import ClusterPolicy, Policy
from nodemend.domain.reasons import Reason
from nodemend.domain.rules import Catalogue, Rule, matcher_of, render_presence

GPU_WITNESS = "gpu_temp"
"""The metric that every GPU has, by which they are counted."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the second look says: confirmed, not there any more, or unknown."""

    confirmed: tuple[Finding, ...] = ()
    gone: Reason | None = None
    unknown: Reason | None = None


@dataclass(frozen=True, slots=True)
class SecondLook:
    """Where and with what to look; one per verification."""

    cluster: ClusterPolicy
    policy: Policy
    metrics: MetricsStore
    catalogue: Catalogue
    now: datetime

    def judge(self, incident: Incident, node: Node) -> Judgement:
        """Judge all findings of the incident that may act.

        The first that is confirmed suffices; but that one is gone says nothing of the others. By
        hand the person's word is the fault: what the metrics say is reported and decides nothing.
        """
        if incident.origin is Origin.HAND:
            seen = self._detect(self.catalogue.rules, self.now)
            return Judgement(confirmed=of_node(seen.findings, node.ref))
        findings = [f for f in by_urgency(incident.findings) if f.verdict.is_actionable]
        early = [self._judge_unasked(incident, finding, node) for finding in findings]
        pairs = list(zip(findings, early, strict=True))
        asked = self._ask_all(finding for finding, known in pairs if known is None)
        judged = []
        for finding, known in pairs:
            judgement = known or self._judge_one(finding, node, asked)
            if judgement.confirmed:
                return judgement
            judged.append(judgement)
        unknown = [judgement for judgement in judged if judgement.unknown is not None]
        none = Judgement(unknown=Reason("no_finding", "no finding of the incident may act"))
        return next(iter([*unknown, *judged]), none)

    def _ask_all(self, findings: Iterable[Finding]) -> Mapping[datetime, Detection]:
        """Ask for all rules of one time in one go: AMP's time-outs must not add up."""
        rules: dict[datetime, dict[str, Rule]] = {}
        for finding in findings:
            rule = self._rule(finding)
            if rule is not None:
                rules.setdefault(self._time_of(finding), {})[rule.id] = rule
        return {at: self._detect(by_id.values(), at) for at, by_id in rules.items()}

    def _time_of(self, finding: Finding) -> datetime:
        return finding.evidence.at if finding.kind is FaultKind.EVENT else self.now

    def _detect(self, rules: Iterable[Rule], at: datetime) -> Detection:
        return detect(
            rules,
            cluster=self.cluster,
            metrics=self.metrics,
            catalogue=self.catalogue,
            policy=self.policy,
            at=at,
        )

    def _rule(self, finding: Finding) -> Rule | None:
        override = self.policy.rules.get(finding.evidence.rule_id)
        if override is not None and not override.is_enabled:
            return None
        try:
            rule = self.catalogue.rule(finding.evidence.rule_id)
        except InvalidInputError:
            return None
        is_same = (rule.fault_class, rule.kind) == (finding.fault_class, finding.kind)
        return rule if is_same else None

    def _judge_unasked(self, incident: Incident, finding: Finding, node: Node) -> Judgement | None:
        """Judge what AMP need not be asked for; None: it must be."""
        if self._rule(finding) is None:
            return Judgement(unknown=_retired(finding))
        if finding.kind is FaultKind.EVENT:
            if not node.ref.boot_id:
                return Judgement(unknown=Reason("boot_unknown", f"{node.ref.name} has no boot id"))
            if node.ref.boot_id != incident.node.boot_id:
                text = f"{node.ref.name} has booted since {finding.summary}"
                return Judgement(gone=Reason("rebooted", text))
        return None

    def _judge_one(
        self, finding: Finding, node: Node, asked: Mapping[datetime, Detection]
    ) -> Judgement:
        rule = self.catalogue.rule(finding.evidence.rule_id)
        seen = asked[self._time_of(finding)]
        if rule.id in seen.unknown:
            return Judgement(unknown=seen.unknown[rule.id])
        # Names that mean no node, such as an exporter's pod, may be those of several nodes: only
        # the node's own name or instance makes a finding its own.
        same = [f for f in of_node(seen.findings, node.ref) if f.key == finding.key]
        holding = tuple(f for f in same if f.verdict.is_actionable)
        if holding:
            stranger = self._why_not_alone(holding[0], node)
            return Judgement(unknown=stranger) if stranger else Judgement(confirmed=holding)
        if finding.kind is FaultKind.EVENT or same:
            when = self._time_of(finding).isoformat()
            text = f"AMP does not show {finding.summary} at {when} as a fault to act on"
            return Judgement(gone=Reason("not_confirmed", text))
        return self._absent_or_recovered(rule, finding)

    def _why_not_alone(self, finding: Finding, node: Node) -> Reason | None:
        """Return why the metrics under the node's name cannot be its own alone.

        Two clusters whose networks overlap have nodes of one name. In a workspace that both write
        to, and that no matcher separates, the fault may be the other node's: then there are more
        GPUs under the name than the machine has.
        """
        expected = self.catalogue.gpus_by_instance_type.get(node.instance_type, 0)
        names = self.catalogue.metric_names.get(GPU_WITNESS)
        if not expected or not names or not finding.gpu_uuid:
            return None
        matcher = _joined(_node_matcher(finding), self.cluster.matcher)
        query = f'count(group by (UUID) ({{__name__=~"{"|".join(names)}",{matcher}}}))'
        answer = self.metrics.query_many(self.cluster, {"identity": query}, self._time_of(finding))[
            "identity"
        ]
        if answer.problem is not None:
            return answer.problem
        seen = max((int(s.value) for s in answer.samples if not is_blank(s.value)), default=0)
        if seen <= expected:
            return None
        return Reason(
            "identity_ambiguous",
            f"{seen} GPUs report under the name of {node.ref.name}, which has {expected}: another "
            "cluster's node has the name, too, or had it minutes ago; give the cluster a matcher",
        )

    def _absent_or_recovered(self, rule: Rule, finding: Finding) -> Judgement:
        """The rule does not hold. Only a GPU that reports can have recovered."""
        names = self.catalogue.metric_names
        queries = {
            what: render_presence(rule, names, _joined(matcher, self.cluster.matcher))
            for what, matcher in (("gpu", _gpu_matcher(finding)), ("node", _node_matcher(finding)))
        }
        answers = self.metrics.query_many(self.cluster, queries, self.now)
        for answer in answers.values():
            if answer.problem is not None:
                return Judgement(unknown=answer.problem)
        reports = {
            what: any(s.value > 0 and not is_blank(s.value) for s in answer.samples)
            for what, answer in answers.items()
        }
        if reports["gpu"]:
            reason = Reason("recovered", f"AMP shows no longer: {finding.summary}")
            return Judgement(gone=reason)
        if rule.is_absence_the_fault and reports["node"]:
            return Judgement(confirmed=(finding,))
        text = f"{rule.id} cannot see the GPU: its metrics are missing"
        return Judgement(unknown=Reason("metrics_missing", text))


def _joined(*matchers: str) -> str:
    return ",".join(matcher for matcher in matchers if matcher)


def _gpu_matcher(finding: Finding) -> str:
    labels = finding.evidence.labels
    for label in ("UUID", "uuid", "gpu_uuid"):
        if labels.get(label):
            return matcher_of(label, labels[label])
    return _joined(_node_matcher(finding), matcher_of("gpu", finding.gpu_index))


def _node_matcher(finding: Finding) -> str:
    labels = finding.evidence.labels
    name = next((label for label in NODE_LABELS if labels.get(label)), "Hostname")
    return matcher_of(name, labels.get(name, ""))


def _retired(finding: Finding) -> Reason:
    rule_id = finding.evidence.rule_id
    return Reason(
        "rule_unknown",
        f"rule {rule_id} is not in the catalogue for {finding.fault_class}, or is switched off now",
    )
