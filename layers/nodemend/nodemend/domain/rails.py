"""What keeps nodemend's hands off one node, for now or altogether, whatever the fleet is like."""

from datetime import datetime

from nodemend.domain.faults import FaultClass
from nodemend.domain.incidents import Incident, has_lasted
from nodemend.domain.nodes import Node
from nodemend.domain.policy import Policy
from nodemend.domain.reasons import Reason

OTHERS_TAINTS = {
    "ToBeDeletedByClusterAutoscaler": "cluster-autoscaler is removing it",
    "karpenter.sh/disrupted": "Karpenter is removing it",
    "node.cloudprovider.kubernetes.io/shutdown": "its instance is shut down",
}


PAUSE_ANNOTATION = "nodemend/pause"
"""Set by a person on a node; its value may say why. `false` counts as not set."""
EXCLUDE_LABEL = "remediation.medik8s.io/exclude-from-remediation"
"""What the Node Health Check operator honours, too: `true` keeps every remediator off the node."""


def why_node_paused(node: Node) -> Reason | None:
    """Return why a person wants nothing new done to the node for now, or None."""
    why = node.annotations.get(PAUSE_ANNOTATION)
    if why is None or why.strip().lower() == "false":
        return None
    told = f": {why.strip()[:200]}" if why.strip() and why.strip().lower() != "true" else ""
    return Reason("node_paused", f"{node.ref.name} has the annotation {PAUSE_ANNOTATION}{told}")


def why_excluded(node: Node) -> Reason | None:
    """Return why the node is no candidate at all, by its own label, or None."""
    if node.labels.get(EXCLUDE_LABEL, "").lower() != "true":
        return None
    return Reason("excluded", f"{node.ref.name} has the label {EXCLUDE_LABEL}=true")


def why_node_held(node: Node) -> Reason | None:
    """Return why nothing may be changed on the node now: a person's pause, or its own label."""
    return why_node_paused(node) or why_excluded(node)


def why_stand_down(node: Node) -> Reason | None:
    """Return why nodemend must not act on the node now, or None."""
    if node.is_deleting:
        return Reason("other_remediator", f"{node.ref.name} is being deleted by someone else")
    for taint in node.taints:
        if taint.key in OTHERS_TAINTS:
            return Reason("other_remediator", f"{node.ref.name}: {OTHERS_TAINTS[taint.key]}")
    return None


def why_hold(incident: Incident, policy: Policy, now: datetime) -> Reason | None:
    """Return why the fault has not lasted long enough for its verdict, or None."""
    if incident.primary is None:
        return None
    hold_s = policy.hold_s.get(incident.primary.verdict, 0)
    lasted_s = has_lasted(incident, now).total_seconds()
    if lasted_s >= hold_s:
        return None
    return Reason(
        "hold",
        f"{incident.fault_class} has lasted {int(lasted_s)} s; a {incident.primary.verdict} fault "
        f"must last {hold_s} s before a node is touched for it",
    )


def why_unconfirmed(incident: Incident, node: Node, *, offered: int) -> Reason | None:
    """Return why a GPU that only the metrics miss is not believed to be lost, or None.

    Exporters drop rows of healthy GPUs: with time slicing or DRA those of idle ones
    (NVIDIA/dcgm-exporter 569). The device plugin hears of a lost GPU by itself, and the kubelet
    then offers one less.

    Args:
        incident: What waits.
        node: Its node.
        offered: GPUs that nodes of this type offer; 0: no device plugin that could be asked.
    """
    acting = {finding.fault_class for finding in incident.findings if finding.verdict.is_actionable}
    if acting != {FaultClass.GPU_LOST} or not offered or node.gpu_allocatable < offered:
        return None
    return Reason(
        "second_signal",
        f"only the metrics miss a GPU: the kubelet of {node.ref.name} still offers all "
        f"{node.gpu_allocatable}, so it may be the exporter's fault",
    )
