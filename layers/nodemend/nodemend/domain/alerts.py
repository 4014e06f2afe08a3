"""Alerts are hints: which node and which rules to ask AMP about, and nothing more.

Whatever an alert claims, only AMP's own answer becomes a finding. So a wrong, late, forged or
repeated alert costs queries, never a node.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from nodemend.domain.faults import Family, FaultClass
from nodemend.domain.findings import node_names_of
from nodemend.domain.policy import ClusterPolicy
from nodemend.domain.reasons import Reason
from nodemend.domain.rules import Rule

ASK_AGAIN = timedelta(minutes=5)
"""The same alert within this time is a copy (SNS delivers at least once, some senders three times:
case D43); after it, it is Alertmanager's own repeat and AMP is asked again."""

MAX_ALERT_AGE = timedelta(days=5)
"""AMP repeats what still fires at most five days apart, and a queue keeps messages for four: what
began longer ago is a leftover. What still holds is found by the scans in any case."""

MAX_MESSAGE_AGE = timedelta(hours=1)
"""A notification that waited longer says nothing of now: longer than the half hour in which the
queue tries again, shorter than a queue that nobody worked off."""

CLUSTER_LABELS = ("cluster", "cluster_name", "eks_cluster", "k8s_cluster_name")
RULE_LABEL = "nodemend_rule"
"""A rule's id, for alerting rules that are made from the catalogue."""
FAMILY_LABEL = "nodemend_family"

HINT_NAMES = frozenset({*CLUSTER_LABELS, RULE_LABEL, FAMILY_LABEL, "alertname"})
"""Message attributes that may stand in for labels when the message itself cannot be read."""

TEST_ALERTS = frozenset({"TestAlert", "Watchdog", "InfoInhibitor"})
"""Alerts that speak of no fault: test buttons, heartbeats, Alertmanager's own helpers."""

_FAMILY_WORDS: Mapping[Family, tuple[str, ...]] = {
    Family.ECC: (
        *("xid", "ecc", "dbe", "sbe", "uncorrect", "remap", "retire", "fallen", "felloff", "lost"),
        *("nvlink", "nvswitch", "pcie", "fabric", "neuron", "recovery"),
    ),
    Family.THERMAL: ("therm", "temp", "throttl", "slowdown", "power", "clock", "overheat"),
    Family.UTILIZATION: (
        *("util", "idle", "hang", "hung", "stuck", "straggl"),
        *("telemetry", "exporter", "scrape"),
    ),
}
"""What people call their alerts. A name with words of several families means all of these."""

_EQUALITY = re.compile(r'([A-Za-z_]\w*)\s*=\s*"([^"]*)"')
_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


class AlertStatus(StrEnum):
    """An alert's own status; the status of its group says nothing about it."""

    FIRING = "firing"
    RESOLVED = "resolved"


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert, as far as it may be believed."""

    status: AlertStatus
    labels: Mapping[str, str] = field(default_factory=dict)
    starts_at: datetime | None = None
    """None: the message does not say (the default text message has no times)."""
    fingerprint: str = ""
    """The sender's, or made from the labels."""

    @property
    def name(self) -> str:
        """The alerting rule's name."""
        return self.labels.get("alertname", "")

    @property
    def node_names(self) -> tuple[str, ...]:
        """Names under which the labels may mean one node, best first; empty: none is named."""
        return node_names_of(self.labels)

    @property
    def is_test(self) -> bool:
        """True for test notifications and heartbeats."""
        return self.name in TEST_ALERTS

    @property
    def key(self) -> str:
        """What makes two messages the same news: fingerprint, start and status (case D43)."""
        start = self.starts_at.isoformat() if self.starts_at else ""
        return f"{self._identity}/{start}/{self.status}"

    def key_when(self, status: AlertStatus) -> str:
        """Return the key of this alert under another status."""
        return Alert(status, self.labels, self.starts_at, self.fingerprint).key

    @property
    def _identity(self) -> str:
        if self.fingerprint:
            return self.fingerprint
        return digest(*(f"{name}={value}" for name, value in sorted(self.labels.items())))[:16]


@dataclass(frozen=True, slots=True)
class Notification:
    """One message of an alert manager, read."""

    alerts: tuple[Alert, ...] = ()
    incomplete: Reason | None = None
    """Set: there are alerts that could not be read, so the clusters are asked as a whole."""
    hints: Mapping[str, str] = field(default_factory=dict)
    """What the message's attributes say of cluster and family; the sender's own configuration."""
    sent_at: datetime | None = None
    content_key: str = ""
    """Stands for the message where it has no alert that could be told apart."""

    def is_late(self, now: datetime) -> bool:
        """Tell whether the message waited so long that it says nothing of now."""
        return self.sent_at is not None and now - self.sent_at > MAX_MESSAGE_AGE


def digest(*parts: str) -> str:
    """Return a stable name for texts, whatever they contain."""
    sha = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        sha.update(f"{len(data)}:".encode() + data)
    return sha.hexdigest()


def families_of(labels: Mapping[str, str], rules: Iterable[Rule]) -> frozenset[Family]:
    """Return the rule families that the labels speak of; all of them if they do not tell.

    Example:
        >>> sorted(families_of({"alertname": "GpuXidCritical"}, ()))
        [<Family.ECC: 'ecc'>]
        >>> len(families_of({"alertname": "GpuBad"}, ()))
        3
    """
    rule = rule_of(labels, rules)
    if rule is not None:
        return frozenset({rule.family})
    family = labels.get(FAMILY_LABEL, "")
    if family in set(Family):
        return frozenset({Family(family)})
    name = re.sub(r"[^a-z]", "", labels.get("alertname", "").lower())
    told = frozenset(
        family for family, words in _FAMILY_WORDS.items() if any(word in name for word in words)
    )
    return told or frozenset(Family)


def rule_of(labels: Mapping[str, str], rules: Iterable[Rule]) -> Rule | None:
    """Return the catalogue's rule that the alert names as its origin, if it does."""
    rule_id = labels.get(RULE_LABEL, "")
    return next((rule for rule in rules if rule.id == rule_id), None)


def fault_class_of(labels: Mapping[str, str], rules: Iterable[Rule]) -> FaultClass | None:
    """Return the fault class that the alert speaks of, where it names one of our rules."""
    rule = rule_of(labels, rules)
    return rule.fault_class if rule else None


def clusters_of(
    labels: Mapping[str, str], clusters: Sequence[ClusterPolicy]
) -> tuple[ClusterPolicy, ...]:
    """Return the clusters that the labels may mean; none if they contradict every one.

    A label with a cluster's name decides; else a cluster is left out only if its matcher says
    otherwise than the labels. Several are no harm: each is asked about its own nodes.
    """
    told = {labels.get(label, "") for label in CLUSTER_LABELS} - {""}
    named = tuple(cluster for cluster in clusters if cluster.name in told)
    if named:
        return named
    return tuple(cluster for cluster in clusters if not _contradicts(cluster.matcher, labels))


def _contradicts(matcher: str, labels: Mapping[str, str]) -> bool:
    return any(labels.get(name, value) != value for name, value in _EQUALITY.findall(matcher))


def why_stale(alert: Alert, *, last_close: datetime | None, now: datetime) -> Reason | None:
    """Return why a firing alert is about the past, or None (case D26).

    Args:
        alert: The alert.
        last_close: When a remediation of the node last changed or returned the machine.
        now: The time.
    """
    if alert.starts_at is None:
        return None
    start = alert.starts_at.isoformat()
    if last_close is not None and alert.starts_at <= last_close:
        return Reason(
            "before_last_close",
            f"it has fired since {start}, and the node's last incident ended at "
            f"{last_close.isoformat()}",
        )
    if now - alert.starts_at > MAX_ALERT_AGE:
        return Reason("too_old", f"it has fired since {start}")
    return None


def record_id(at: datetime, *parts: str) -> str:
    """Return an incident id (the form of a ULID) that the same parts always give again.

    So a rejection is recorded once, whatever dies in between and however often the message comes.
    """
    milliseconds = max(0, int(at.timestamp() * 1000)) & (2**48 - 1)
    number = milliseconds << 80 | int(digest(*parts)[:20], 16)
    return "".join(_CROCKFORD[number >> shift & 31] for shift in range(125, -1, -5))
