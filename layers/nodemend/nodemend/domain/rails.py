"""Signs that somebody else is at work on a node: then nodemend keeps its hands off."""

from nodemend.domain.nodes import Node
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
