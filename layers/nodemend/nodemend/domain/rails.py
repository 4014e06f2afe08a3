"""Signs that somebody else is at work on a node: then nodemend keeps its hands off."""

from nodemend.domain.nodes import Node
from nodemend.domain.reasons import Reason

OTHERS_TAINTS = {
    "ToBeDeletedByClusterAutoscaler": "cluster-autoscaler is removing it",
    "karpenter.sh/disrupted": "Karpenter is removing it",
    "node.cloudprovider.kubernetes.io/shutdown": "its instance is shut down",
}


def why_stand_down(node: Node) -> Reason | None:
    """Return why nodemend must not act on the node now, or None."""
    if node.is_deleting:
        return Reason("other_remediator", f"{node.ref.name} is being deleted by someone else")
    for taint in node.taints:
        if taint.key in OTHERS_TAINTS:
            return Reason("other_remediator", f"{node.ref.name}: {OTHERS_TAINTS[taint.key]}")
    return None
