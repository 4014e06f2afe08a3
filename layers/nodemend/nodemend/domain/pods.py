"""Which pods a drain evicts, and why the others stay.

The rules are those of `kubectl drain --ignore-daemonsets --delete-emptydir-data --force`
(kubernetes/kubectl pkg/drain/filters.go, 2026-08), told as one classification.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from nodemend.domain.nodes import REMEDIATION_TAINT_KEY, Node, Readiness

MIRROR_ANNOTATION = "kubernetes.io/config.mirror"
UNSCHEDULABLE_TAINT_KEY = "node.kubernetes.io/unschedulable"

STUCK_MARGIN = timedelta(seconds=5)
"""How long past its deletionTimestamp a pod of an unreachable node is still waited for. The
timestamp is the end of the grace period already, so this only covers clocks."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The controller that made a pod."""

    kind: str
    name: str
    api_version: str = ""
    uid: str = ""


@dataclass(frozen=True, slots=True)
class Toleration:
    """One toleration; an empty key with operator Exists tolerates everything."""

    key: str = ""
    operator: str = "Equal"
    effect: str = ""


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod as far as a drain reads it."""

    namespace: str
    name: str
    uid: str
    node_name: str
    phase: str = "Running"
    owner: Owner | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    deletion_at: datetime | None = None
    """`metadata.deletionTimestamp`: the END of the grace period of a terminating pod."""
    is_ready: bool = True
    gpus: int = 0

    @property
    def id(self) -> str:
        """`namespace/name`, for people."""
        return f"{self.namespace}/{self.name}"

    @property
    def is_finished(self) -> bool:
        """True for Succeeded and Failed pods, which no budget protects."""
        return self.phase in ("Succeeded", "Failed")


class PodFate(StrEnum):
    """What a drain does with a pod."""

    EVICT = "evict"
    WAIT = "wait"
    """Terminating already: only waited for."""
    SKIP = "skip"
    """Stays, and does not keep the node from being drained."""
    UNCONFIRMED = "unconfirmed"
    """Terminating on a node that nobody hears from: no kubelet will ever confirm it."""


@dataclass(frozen=True, slots=True)
class Classified:
    """A pod with its fate and the reason for it."""

    pod: Pod
    fate: PodFate
    why: str


def classify(pod: Pod, *, now: datetime, is_node_unreachable: bool) -> Classified:
    """Decide a pod's fate. Pure: `now` is an input."""
    if MIRROR_ANNOTATION in pod.annotations:
        return Classified(pod, PodFate.SKIP, "mirror of a static pod: the kubelet owns it")
    if is_daemonset_pod(pod) and not pod.is_finished:
        return Classified(pod, PodFate.SKIP, "its DaemonSet ignores cordons")
    if pod.deletion_at is not None:
        if is_node_unreachable and now > pod.deletion_at + STUCK_MARGIN:
            return Classified(
                pod, PodFate.UNCONFIRMED, "past its grace on a node that nobody hears from"
            )
        return Classified(pod, PodFate.WAIT, "terminating")
    if tolerates_cordon(pod) and not pod.is_finished:
        return Classified(pod, PodFate.SKIP, "tolerates every taint and would come straight back")
    return Classified(pod, PodFate.EVICT, "finished" if pod.is_finished else "runs on the node")


def classify_pods(pods: Iterable[Pod], node: Node, *, now: datetime) -> list[Classified]:
    """Decide the fate of all pods of a node, in the order of their names."""
    is_unreachable = node.readiness is Readiness.UNKNOWN
    return [
        classify(pod, now=now, is_node_unreachable=is_unreachable)
        for pod in sorted(pods, key=lambda pod: pod.id)
    ]


def is_daemonset_pod(pod: Pod) -> bool:
    """True if an `apps/v1` DaemonSet controls the pod."""
    owner = pod.owner
    return owner is not None and (owner.kind, owner.api_version) == ("DaemonSet", "apps/v1")


def tolerates_cordon(pod: Pod) -> bool:
    """True if neither our taint nor the cordon's keeps the pod off: evicting it is a loop."""
    return all(
        any(_tolerates(toleration, key) for toleration in pod.tolerations)
        for key in (UNSCHEDULABLE_TAINT_KEY, REMEDIATION_TAINT_KEY)
    )


def _tolerates(toleration: Toleration, key: str) -> bool:
    if toleration.effect not in ("", "NoSchedule"):
        return False
    if toleration.operator == "Exists":
        return toleration.key in ("", key)
    # Both taints carry no value, and "Equal" without a value matches exactly those.
    return toleration.key == key


class EvictionVerdict(StrEnum):
    """What the answer of the eviction API means for one pod."""

    ACCEPTED = "accepted"
    GONE = "gone"
    BLOCKED_BY_PDB = "blocked_by_pdb"
    BLOCKED_BY_MULTIPLE_PDBS = "blocked_by_multiple_pdbs"
    NAMESPACE_TERMINATING = "namespace_terminating"
    THROTTLED = "throttled"
    UNSETTLED = "unsettled"
    """A server error or a time-out: the next slice reads what became of it."""
    FORBIDDEN = "forbidden"


_MULTIPLE_PDBS = "does not support"
_MULTIPLE_PDBS_SUBJECT = "more than one PodDisruptionBudget"


@dataclass(frozen=True, slots=True)
class EvictionAnswer:
    """The HTTP answer to an eviction; status 0 means that none came in time."""

    status: int
    message: str = ""
    causes: tuple[tuple[str, str], ...] = ()
    """(reason, message) of each `details.causes[]`."""
    details_kind: str = ""

    @property
    def verdict(self) -> EvictionVerdict:
        """Classify by the table of facts: an answer never ends the drain of the other pods."""
        reasons = {reason for reason, _ in self.causes}
        if 200 <= self.status < 300:
            return EvictionVerdict.ACCEPTED
        if self.status == 404:
            # Without details it is no answer about a pod: an unknown path, or a proxy's own 404.
            return EvictionVerdict.GONE if self.details_kind else EvictionVerdict.UNSETTLED
        if self.status == 409:
            # Our uid precondition failed: another pod has taken the name, ours is gone.
            return EvictionVerdict.GONE
        if self.status == 429:
            is_budget = "DisruptionBudget" in reasons
            return EvictionVerdict.BLOCKED_BY_PDB if is_budget else EvictionVerdict.THROTTLED
        if self.status == 403:
            is_ending = "NamespaceTerminating" in reasons
            return EvictionVerdict.NAMESPACE_TERMINATING if is_ending else EvictionVerdict.FORBIDDEN
        # Only the message tells this 500, which lasts until a person acts, from a passing one.
        if _MULTIPLE_PDBS_SUBJECT in self.message and _MULTIPLE_PDBS in self.message:
            return EvictionVerdict.BLOCKED_BY_MULTIPLE_PDBS
        return EvictionVerdict.UNSETTLED

    @property
    def cause_text(self) -> str:
        """The server's own words for a block, or the Status message."""
        texts = [text for _, text in self.causes if text]
        return "; ".join(texts) or self.message


@dataclass(frozen=True, slots=True)
class DisruptionBudget:
    """A PodDisruptionBudget as far as a drain explains itself with it."""

    namespace: str
    name: str
    match_labels: Mapping[str, str] = field(default_factory=dict)
    expressions: tuple[tuple[str, str, tuple[str, ...]], ...] = ()
    """(key, operator, values) of each `matchExpressions[]`."""
    has_selector: bool = True
    expected_pods: int = 0
    current_healthy: int = 0
    desired_healthy: int = 0
    disruptions_allowed: int = 0

    def selects(self, pod: Pod) -> bool:
        """Tell whether the budget protects the pod; no selector selects nothing, `{}` all."""
        if not self.has_selector or pod.namespace != self.namespace:
            return False
        return all(
            pod.labels.get(key) == value for key, value in self.match_labels.items()
        ) and all(_matches(pod.labels, *expression) for expression in self.expressions)

    @property
    def can_never_allow(self) -> bool:
        """True if no eviction can ever succeed: every expected pod must stay healthy.

        Pending and finished pods count as expected under a numeric `minAvailable`, so False does
        not promise anything.
        """
        return self.expected_pods <= self.desired_healthy


def _matches(labels: Mapping[str, str], key: str, operator: str, values: tuple[str, ...]) -> bool:
    match operator:
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
        case _:
            return False
