"""An alert is a hint: ask AMP now, and let what holds go the way of a scan's finding."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from nodemend.application.bursts import note_new, report_name
from nodemend.application.detection import Detection, detect
from nodemend.application.ports import (
    Announcement,
    Clock,
    DeadLetters,
    EventBus,
    Guards,
    Incidents,
    MetricsStore,
    Outbox,
    Policies,
    Report,
    ScanMemory,
    Telemetry,
)
from nodemend.application.scan_gpu_health import (
    REPORTED,
    by_node,
    fault_event,
)
from nodemend.contracts.alerts import (
    ReceiveAlertRequest,
    ReceiveAlertResult,
    parse_notification,
)
from nodemend.contracts.events import MAX_LISTED, AlertModel
from nodemend.domain.alerts import (
    ASK_AGAIN,
    Alert,
    AlertStatus,
    Notification,
    clusters_of,
    families_of,
    fault_class_of,
    record_id,
    why_stale,
)
from nodemend.domain.errors import AwsUnavailableError, InvalidInputError
from nodemend.domain.events import DetailType
from nodemend.domain.faults import Family
from nodemend.domain.findings import Finding
from nodemend.domain.incidents import (
    Incident,
    IncidentState,
    Origin,
    Outcome,
    event_ids,
    record,
)
from nodemend.domain.ledger import LAST_CLOSE, LAST_CLOSE_KEPT
from nodemend.domain.nodes import NodeRef
from nodemend.domain.policy import ClusterPolicy, Policy
from nodemend.domain.reasons import Reason
from nodemend.domain.rules import Catalogue

logger = logging.getLogger(__name__)

STEP = "receive_alert"

MAX_RECORDS = 25
"""More nodes than this that one message accuses wrongly are one wrong alerting rule, and one
record."""

_NOT_CONFIRMED = "not_confirmed"
_RESOLVED = "resolved"


@dataclass(frozen=True, slots=True)
class ReceiveAlertPorts:
    """What receiving an alert needs."""

    metrics: MetricsStore
    policies: Policies
    bus: EventBus
    memory: ScanMemory
    guards: Guards
    incidents: Incidents
    outbox: Outbox
    dead_letters: DeadLetters
    telemetry: Telemetry
    catalogue: Catalogue
    clock: Clock


@dataclass(frozen=True, slots=True)
class _Hint:
    """What one alert, or a message that cannot be read in full, makes us ask."""

    key: str
    clusters: tuple[ClusterPolicy, ...]
    families: frozenset[Family]
    node_names: tuple[str, ...] = ()
    """Empty: whatever node."""
    alert: Alert | None = None
    sent_at: datetime | None = None

    @property
    def home(self) -> str:
        """The cluster under which the hint is remembered and, if nothing holds, recorded."""
        return self.clusters[0].name

    @property
    def memory_name(self) -> str:
        """The name of what is remembered of it."""
        return f"alert/{self.key}"


@dataclass(slots=True)
class _Answers:
    """What AMP says of the clusters that were asked."""

    by_cluster: dict[str, Detection] = field(default_factory=dict)

    def findings(self, hint: _Hint, cluster: ClusterPolicy) -> tuple[Finding, ...]:
        """Return what holds in a cluster of what the hint means, whatever its verdict."""
        names = set(hint.node_names)
        return tuple(
            finding
            for finding in self.by_cluster[cluster.name].findings
            if not names or names & set(finding.node_names)
        )

    def holds(self, hint: _Hint) -> bool:
        """Tell whether anything of what the hint means holds."""
        return any(self.findings(hint, cluster) for cluster in hint.clusters)

    def unknown(self, hint: _Hint) -> Reason | None:
        """Return why what the hint means cannot be judged, or None."""
        for cluster in hint.clusters:
            for reason in self.by_cluster[cluster.name].unknown.values():
                return reason
        return None


def receive_alert(request: ReceiveAlertRequest, *, ports: ReceiveAlertPorts) -> ReceiveAlertResult:
    """Ask AMP about what a notification speaks of, and announce what holds.

    One set of queries for each cluster, however many alerts there are (case D41). What does not
    hold is recorded once as rejected. Resolved alerts neither open nor close anything (case D36).
    A message that is refused goes to the dead-letter queue with the reason and is done.

    Raises:
        AwsUnavailableError: if AMP could not judge an alert, or an event was not accepted; the
            queue delivers the message again, and everything done so far is safe to repeat.
        AwsForbiddenError: if an AWS API denies a call.
        PolicyInvalidError: if the deployed policy cannot be used.
    """
    try:
        notification = parse_notification(request)
    except InvalidInputError as error:
        return _refuse(request, error, ports)
    policy = ports.policies.current()
    counts: Counter[str] = Counter()
    now = ports.clock.now()
    hints, refusal = _hints(notification, policy, ports, now, counts)
    fresh = _fresh(hints, ports, now, counts)
    answers = _ask(fresh, policy, ports, now)
    announced = _announce(fresh, answers, ports, now)
    known = [hint for hint in fresh if answers.holds(hint)]
    unknown = {h.key: why for h in fresh if not answers.holds(h) and (why := answers.unknown(h))}
    wrong = [hint for hint in fresh if not answers.holds(hint) and hint.key not in unknown]
    _reject(wrong, policy, ports, now)
    _remember(ports.memory, {"confirmed": known, _NOT_CONFIRMED: wrong}, now)
    counts.update(confirmed=len(known), not_confirmed=len(wrong), unknown=len(unknown))
    _count(counts, ports.telemetry)
    if unknown:
        raise AwsUnavailableError(
            f"AMP could not judge {len(unknown)} of {len(fresh)} alerts: "
            f"{next(iter(unknown.values()))}; the message is tried again"
        )
    if refusal is not None:
        return _refuse(request, refusal, ports)
    return ReceiveAlertResult(
        firing=len(hints), announced=announced, outcomes={k: v for k, v in counts.items() if v}
    )


def _refuse(
    request: ReceiveAlertRequest, error: InvalidInputError, ports: ReceiveAlertPorts
) -> ReceiveAlertResult:
    """Give the message to a person, with the reason: to try it again would change nothing."""
    logger.warning("alert message %s is refused: %s", request.message_id, error)
    ports.dead_letters.put(
        request.body, error=error.problem, field=error.field, remedy=error.remedy
    )
    _count(Counter(refused=1), ports.telemetry)
    return ReceiveAlertResult(outcomes={"refused": 1})


def _count(counts: Mapping[str, int], telemetry: Telemetry) -> None:
    for outcome, number in counts.items():
        if number:
            telemetry.count("Alerts", number, outcome=outcome)


# --- what to ask --------------------------------------------------------------------------------


def _hints(
    notification: Notification,
    policy: Policy,
    ports: ReceiveAlertPorts,
    now: datetime,
    counts: Counter[str],
) -> tuple[list[_Hint], InvalidInputError | None]:
    """Return what to ask, and the refusal of alerts of clusters that the policy does not name."""
    if notification.is_late(now):
        counts["stale"] += max(1, len(notification.alerts))
        return [], None
    counts["ignored"] += sum(alert.is_test for alert in notification.alerts)
    alerts = [alert for alert in notification.alerts if not alert.is_test]
    resolved = [alert for alert in alerts if alert.status is AlertStatus.RESOLVED]
    counts[_RESOLVED] += len(resolved)
    _remember_resolved(resolved, policy, ports, notification.sent_at or now)
    found, refusal = [], None
    for alert in alerts:
        if alert.status is AlertStatus.RESOLVED:
            continue
        clusters = clusters_of(alert.labels, policy.clusters)
        if clusters:
            families = families_of(alert.labels, ports.catalogue.rules)
            names, sent_at = alert.node_names, notification.sent_at
            found.append(_Hint(alert.key, clusters, families, names, alert, sent_at))
        else:
            refusal = _no_cluster(policy)
    if notification.incomplete is not None:
        logger.warning("clusters are asked as a whole: %s", notification.incomplete)
        clusters = clusters_of(notification.hints, policy.clusters)
        if clusters:
            families = families_of(notification.hints, ports.catalogue.rules)
            found.append(_Hint(notification.content_key, clusters, families))
        else:
            refusal = _no_cluster(policy)
    return found, refusal


def _no_cluster(policy: Policy) -> InvalidInputError:
    known = ", ".join(cluster.name for cluster in policy.clusters) or "none"
    return InvalidInputError(
        "labels.cluster",
        f"the labels mean no cluster of the policy (it names {known})",
        "add the cluster to the policy, or let the alert manager route only its alerts here",
    )


def _remember_resolved(
    resolved: Iterable[Alert], policy: Policy, ports: ReceiveAlertPorts, at: datetime
) -> None:
    """Note which firing alerts are over, so that a late copy of one is known for what it is.

    Only what was sent before the end is late: an alert manager that heard nothing for minutes says
    "resolved" and later goes on with the same start.
    """
    by_home: dict[str, dict[str, Report]] = {}
    for alert in resolved:
        clusters = clusters_of(alert.labels, policy.clusters)
        if alert.starts_at is not None and clusters:
            name = f"alert/{alert.key_when(AlertStatus.FIRING)}"
            by_home.setdefault(clusters[0].name, {})[name] = Report(_RESOLVED, at)
    for home, reports in by_home.items():
        ports.memory.remember(home, reports)


def _fresh(
    hints: Iterable[_Hint], ports: ReceiveAlertPorts, now: datetime, counts: Counter[str]
) -> list[_Hint]:
    """Leave out copies, and alerts about the past."""
    unique = {hint.key: hint for hint in hints}
    last = _recall(unique.values(), ports.memory)
    closes: dict[tuple[str, str], datetime | None] = {}
    fresh = []
    for hint in unique.values():
        report = last.get(hint.memory_name)
        is_over = report is not None and report.fingerprint == _RESOLVED
        if report is not None and is_over and (hint.sent_at or now) <= report.at:
            counts["stale"] += 1
        elif report is not None and not is_over and now - report.at < ASK_AGAIN:
            counts["duplicate"] += 1
        elif why := _why_stale(hint, closes, ports, now):
            logger.info("alert %s is dropped: %s", hint.key, why)
            counts["stale"] += 1
        else:
            fresh.append(hint)
    return fresh


def _recall(hints: Iterable[_Hint], memory: ScanMemory) -> dict[str, Report]:
    names: dict[str, list[str]] = {}
    for hint in hints:
        names.setdefault(hint.home, []).append(hint.memory_name)
    found: dict[str, Report] = {}
    for home, asked in names.items():
        found |= memory.last_reports(home, asked)
    return found


def _why_stale(
    hint: _Hint,
    closes: dict[tuple[str, str], datetime | None],
    ports: ReceiveAlertPorts,
    now: datetime,
) -> Reason | None:
    if hint.alert is None:
        return None
    times = []
    # Which of several clusters is meant is not known, and so neither whose end would count.
    for name in hint.node_names if len(hint.clusters) == 1 else ():
        place = (hint.home, name)
        if place not in closes:
            until = ports.incidents.handled_until(
                hint.home, NodeRef(hint.home, name), [LAST_CLOSE]
            ).get(LAST_CLOSE)
            closes[place] = until - LAST_CLOSE_KEPT if until else None
        times.append(closes[place])
    known = [at for at in times if at is not None]
    return why_stale(hint.alert, last_close=max(known, default=None), now=now)


def _ask(
    hints: Sequence[_Hint], policy: Policy, ports: ReceiveAlertPorts, now: datetime
) -> _Answers:
    """Ask each cluster once: the rules of all families that any alert speaks of."""
    families: dict[ClusterPolicy, set[Family]] = {}
    for hint in hints:
        for cluster in hint.clusters:
            families.setdefault(cluster, set()).update(hint.families)
    answers = _Answers()
    for cluster, asked in families.items():
        answers.by_cluster[cluster.name] = detect(
            [rule for rule in ports.catalogue.rules if rule.family in asked],
            cluster=cluster,
            metrics=ports.metrics,
            catalogue=ports.catalogue,
            policy=policy,
            at=now,
        )
    return answers


# --- what holds ---------------------------------------------------------------------------------


def _announce(
    hints: Sequence[_Hint], answers: _Answers, ports: ReceiveAlertPorts, now: datetime
) -> int:
    """Send one event for each node and family; return how many."""
    found: dict[tuple[ClusterPolicy, Family], dict[str, Finding]] = {}
    for hint in hints:
        for cluster in hint.clusters:
            for finding in answers.findings(hint, cluster):
                if finding.verdict in REPORTED:
                    family = ports.catalogue.rule(finding.evidence.rule_id).family
                    place = f"{finding.node_names} {finding.key}"
                    found.setdefault((cluster, family), {})[place] = finding
    events: list[Announcement] = []
    for (cluster, family), held in found.items():
        nodes = by_node(held.values())
        last = ports.memory.last_reports(cluster.name, [report_name(family, n) for n in nodes])
        note_new(cluster.name, family, nodes, last, guards=ports.guards, now=now)
        events.extend(
            fault_event(family, cluster, name, findings, now, origin="alert")
            for name, findings in sorted(nodes.items())
        )
    lost = ports.bus.announce(events) if events else ()
    if lost:
        raise AwsUnavailableError(
            f"{len(lost)} of {len(events)} events were not accepted: the message is tried again"
        )
    return len(events)


# --- what does not hold -------------------------------------------------------------------------


def _reject(
    wrong: Sequence[_Hint], policy: Policy, ports: ReceiveAlertPorts, now: datetime
) -> None:
    """Record once for each node that AMP did not confirm its alerts; repeats are counters."""
    last = _recall(wrong, ports.memory)
    by_place: dict[tuple[str, str], list[_Hint]] = {}
    for hint in wrong:
        report = last.get(hint.memory_name)
        if report is None or report.fingerprint != _NOT_CONFIRMED:
            name = hint.node_names[0] if hint.node_names else ""
            by_place.setdefault((hint.home, name), []).append(hint)
    for cluster in dict.fromkeys(cluster for cluster, _ in by_place):
        places = {name: hints for (home, name), hints in by_place.items() if home == cluster}
        if len(places) > MAX_RECORDS:
            logger.warning("%d nodes of %s are accused wrongly at once", len(places), cluster)
            everything = [hint for hints in places.values() for hint in hints]
            _record_rejection(cluster, "", everything, policy, ports, now)
            continue
        for name, hints in sorted(places.items()):
            _record_rejection(cluster, name, hints, policy, ports, now)


def _record_rejection(
    cluster: str,
    name: str,
    hints: Sequence[_Hint],
    policy: Policy,
    ports: ReceiveAlertPorts,
    now: datetime,
) -> None:
    alerts = [hint.alert for hint in hints if hint.alert is not None]
    starts = [alert.starts_at for alert in alerts if alert.starts_at]
    # Without a time of its own an alert is news again on the next day.
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    began = min(starts, default=midnight)
    reason = Reason(_NOT_CONFIRMED, _what_is_wrong(name, alerts, hints))
    incident = Incident(
        id=record_id(began, cluster, began.isoformat(), *sorted(hint.key for hint in hints)),
        cluster=cluster,
        node=NodeRef(cluster, name),
        origin=Origin.ALERT,
        opened_at=now,
        state=IncidentState.CLOSED,
        state_since=now,
        mode=policy.mode,
        outcome=Outcome.SKIPPED,
        reason=reason,
        closed_at=now,
    )
    faults = {fault_class_of(alert.labels, ports.catalogue.rules) for alert in alerts}
    told = next(iter(faults)) if len(faults) == 1 else None
    rejected = record(
        incident,
        DetailType.INCIDENT_REJECTED,
        step=STEP,
        reason=reason,
        now=now,
        data={
            "fault_class": told or "unknown",
            "alerts": tuple(AlertModel.of(alert) for alert in alerts[:MAX_LISTED]),
            "alert_count": len(alerts),
        },
    )
    ports.incidents.create(rejected)
    ports.outbox.publish(rejected.id, event_ids(rejected))


def _what_is_wrong(name: str, alerts: Sequence[Alert], hints: Sequence[_Hint]) -> str:
    families = sorted({str(family) for hint in hints for family in hint.families})
    what = " and ".join(sorted({alert.name or "unnamed" for alert in alerts})[:5])
    nodes = {hint.node_names[0] for hint in hints if hint.node_names}
    where = name or (f"{len(nodes)} nodes" if nodes else "any node")
    if not what:
        what = "a message that could not be read in full"
    return (
        f"{what}: AMP shows no fault of {where} now (rules asked: {', '.join(families)}); "
        "nothing is done"
    )


def _remember(memory: ScanMemory, results: Mapping[str, Sequence[_Hint]], now: datetime) -> None:
    by_home: dict[str, dict[str, Report]] = {}
    for word, hints in results.items():
        for hint in hints:
            by_home.setdefault(hint.home, {})[hint.memory_name] = Report(word, now)
    for home, reports in by_home.items():
        memory.remember(home, reports)
