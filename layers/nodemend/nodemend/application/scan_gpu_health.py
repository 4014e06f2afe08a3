"""Scan one rule family in all clusters and announce what is new."""

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from nodemend.application.bursts import note_new, report_name
from nodemend.application.detection import Detection, detect
from nodemend.application.ports import (
    Announcement,
    Clock,
    EventBus,
    Guards,
    MetricsStore,
    Policies,
    Report,
    ScanMemory,
    Telemetry,
    Workspace,
)
from nodemend.application.sight import SightPorts, check_sight
from nodemend.contracts.events import GpuFaultDetected, RuleProblem, ScanBlind
from nodemend.contracts.evidence import FindingModel, ReasonModel
from nodemend.contracts.scan import ScanGpuHealthRequest, ScanGpuHealthResult
from nodemend.domain.events import DetailType
from nodemend.domain.faults import Family, Verdict
from nodemend.domain.findings import Finding, clean_ups_alone
from nodemend.domain.policy import ClusterPolicy
from nodemend.domain.reasons import Reason
from nodemend.domain.rules import Catalogue

logger = logging.getLogger(__name__)

RENOTIFY = timedelta(minutes=5)
"""A finding that still holds is announced again after this long: if the first event was lost on
its way, or the incident ended without a judgement, the next one opens it. In between repeats are
a counter. Shorter than the 15 minutes for which an occurrence is valid."""

SIGHT_WITH = Family.UTILIZATION
"""The scan that also asks whether the rules can see: the one with the lowest rate."""

REPORTED = frozenset({Verdict.FATAL, Verdict.DEGRADED, Verdict.SUSPECT})
"""What the jobs or the exporters did is counted, not announced."""

NAMED_CLEAN_UPS = 5
"""How many nodes a log line names: a job's crash shows on all of its nodes (case D24)."""


@dataclass(frozen=True, slots=True)
class ScanPorts:
    """What a scan needs."""

    metrics: MetricsStore
    sight: Workspace
    """The same metrics, with little time: whether rules can see must not cost the scan its own."""
    policies: Policies
    bus: EventBus
    memory: ScanMemory
    guards: Guards
    telemetry: Telemetry
    catalogue: Catalogue
    clock: Clock


def scan_gpu_health(request: ScanGpuHealthRequest, *, ports: ScanPorts) -> ScanGpuHealthResult:
    """Evaluate the family's rules, announce new findings per node, and say which rules are blind.

    Raises:
        PolicyInvalidError: if the deployed policy cannot be used (the scan's alarm tells).
        AwsUnavailableError, AwsForbiddenError, ConcurrentUpdateError: if findings could not be
            noted in the guard, announced or remembered.
    """
    now = ports.clock.now()
    policy = ports.policies.current()
    if not policy.clusters:
        logger.warning("no cluster is named, by the deployment or by the policy: nothing to scan")
    found = unknown = announced = 0
    answering: list[ClusterPolicy] = []
    for cluster in policy.clusters:
        detection = detect(
            ports.catalogue.of_family(request.family),
            cluster=cluster,
            metrics=ports.metrics,
            catalogue=ports.catalogue,
            policy=policy,
            at=now,
        )
        _measure(ports.telemetry, request.family, cluster, detection)
        for rule_id, why in detection.unknown.items():
            logger.warning("rule %s of %s is unknown: %s", rule_id, cluster.name, why)
        _note_clean_ups(cluster, detection.findings)
        reportable = by_node(f for f in detection.findings if f.verdict in REPORTED)
        names = [report_name(request.family, name) for name in reportable]
        last = ports.memory.last_reports(cluster.name, [*names, _blind_name(request.family)])
        note_new(cluster.name, request.family, reportable, last, guards=ports.guards, now=now)
        announcements, reports = _news(
            request.family, cluster, reportable, detection.unknown, last=last, now=now
        )
        _announce(ports.bus, ports.memory, cluster, announcements, reports)
        found += len(detection.findings)
        unknown += len(detection.unknown)
        announced += len(announcements)
        if not any(why.code == "amp_timeout" for why in detection.unknown.values()):
            answering.append(cluster)
    if request.family is SIGHT_WITH:
        # After all scans, and of no cluster whose AMP has used up the time already.
        announced += sum(
            check_sight(cluster, policy, ports=_sight_ports(ports), now=now)
            for cluster in answering
        )
    return ScanGpuHealthResult(
        family=request.family,
        clusters=len(policy.clusters),
        findings=found,
        unknown_rules=unknown,
        announced=announced,
    )


def _sight_ports(ports: ScanPorts) -> SightPorts:
    return SightPorts(
        metrics=ports.sight,
        rule_groups=ports.sight,
        bus=ports.bus,
        memory=ports.memory,
        telemetry=ports.telemetry,
        catalogue=ports.catalogue,
    )


def _measure(
    telemetry: Telemetry, family: Family, cluster: ClusterPolicy, detection: Detection
) -> None:
    for name, value in (("Scans", 1), ("RulesUnknown", len(detection.unknown))):
        telemetry.gauge(name, value, "Count", cluster=cluster.name, family=str(family))
    for name, value in (
        ("SamplesProcessed", detection.samples_processed),
        ("Findings", len(detection.findings)),
    ):
        telemetry.gauge(name, value, "Count", cluster=cluster.name)


def _note_clean_ups(cluster: ClusterPolicy, findings: Iterable[Finding]) -> None:
    """Say where XID 45 hides its cause: that is no reason to act, but one to look."""
    nodes = clean_ups_alone(findings)
    if nodes:
        logger.info(
            "XID 45 alone on %d nodes of %s (%s): the primary XID is unknown, see the kernel logs",
            len(nodes),
            cluster.name,
            ", ".join(nodes[:NAMED_CLEAN_UPS]),
        )


def by_node(findings: Iterable[Finding]) -> Mapping[str, list[Finding]]:
    """Return the findings by the node that they are reported under."""
    nodes: dict[str, list[Finding]] = {}
    for finding in findings:
        # Without any name the GPU stands for its node: the finding is reported as unresolved.
        name = finding.node_names[0] if finding.node_names else f"gpu/{finding.gpu_uuid}"
        nodes.setdefault(name, []).append(finding)
    return nodes


def _blind_name(family: Family) -> str:
    return f"blind/{family}"


def _news(
    family: Family,
    cluster: ClusterPolicy,
    found: Mapping[str, list[Finding]],
    unknown: Mapping[str, Reason],
    *,
    last: Mapping[str, Report],
    now: datetime,
) -> tuple[list[tuple[str, Announcement]], dict[str, Report]]:
    news: list[tuple[str, Announcement]] = []
    reports: dict[str, Report] = {}
    for name, findings in sorted(found.items()):
        report = report_name(family, name)
        fingerprint = _fingerprint(findings)
        if not _is_news(last.get(report), fingerprint, now):
            continue
        news.append((report, fault_event(family, cluster, name, findings, now)))
        reports[report] = Report(fingerprint, now)
    blind_name = _blind_name(family)
    fingerprint = " ".join(sorted(f"{rule}:{why.code}" for rule, why in unknown.items()))
    # The heartbeat: by its age watch_incidents sees that the scans have stopped.
    reports[f"scan/{family}"] = Report("", now)
    known = last.get(blind_name)
    if fingerprint != (known.fingerprint if known else ""):
        reports[blind_name] = Report(fingerprint, now)
        if unknown:
            news.append((blind_name, _blind_event(family, cluster, unknown, fingerprint, now)))
    return news, reports


def _is_news(last: Report | None, fingerprint: str, now: datetime) -> bool:
    if last is None or now - last.at >= RENOTIFY:
        return True
    return not set(fingerprint.split()) <= set(last.fingerprint.split())


def _announce(
    bus: EventBus,
    memory: ScanMemory,
    cluster: ClusterPolicy,
    news: Sequence[tuple[str, Announcement]],
    reports: Mapping[str, Report],
) -> None:
    """Send, then remember: a crash in between sends again with the same event ids."""
    unsent = set(bus.announce([announcement for _, announcement in news])) if news else set()
    lost = {name for name, announcement in news if announcement.event_id in unsent}
    if lost:
        logger.error("events of %s were not accepted: the next scan sends them", sorted(lost))
    kept = {name: report for name, report in reports.items() if name not in lost}
    if kept:
        memory.remember(cluster.name, kept)


def _event_id(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _fingerprint(findings: Iterable[Finding]) -> str:
    return " ".join(sorted(finding.key for finding in findings))


def fault_event(
    family: Family,
    cluster: ClusterPolicy,
    name: str,
    findings: Sequence[Finding],
    now: datetime,
    *,
    origin: Literal["scan", "alert"] = "scan",
) -> Announcement:
    """Return "GPU Fault Detected" for a node's findings of one family."""
    # Of the same moment a scan and an alert tell two events, which differ in their origin.
    event_id = _event_id(cluster.name, name, _fingerprint(findings), now.isoformat(), origin)
    detail = GpuFaultDetected(
        event_id=event_id,
        occurred_at=now,
        cluster=cluster.name,
        family=family,
        origin=origin,
        findings=tuple(FindingModel.of(finding) for finding in findings),
    )
    return Announcement(
        event_id, DetailType.GPU_FAULT_DETECTED, now, detail.model_dump(mode="json")
    )


def _blind_event(
    family: Family,
    cluster: ClusterPolicy,
    unknown: Mapping[str, Reason],
    fingerprint: str,
    now: datetime,
) -> Announcement:
    event_id = _event_id(cluster.name, f"blind/{family}", fingerprint, now.isoformat())
    detail = ScanBlind(
        event_id=event_id,
        occurred_at=now,
        cluster=cluster.name,
        family=family,
        rules=tuple(
            RuleProblem(rule_id=rule_id, reason=ReasonModel.of(why))
            for rule_id, why in sorted(unknown.items())
        ),
    )
    return Announcement(event_id, DetailType.SCAN_BLIND, now, detail.model_dump(mode="json"))
