"""Taking our cordon off a node, exactly."""

from nodemend.application.ports import Cluster
from nodemend.domain.cordon import ownership_of, restore_patch
from nodemend.domain.errors import ConcurrentUpdateError
from nodemend.domain.incidents import Incident
from nodemend.domain.nodes import Node
from nodemend.domain.reasons import Reason

PATCH_TRIES = 4


def restore(cluster: Cluster, incident: Incident) -> tuple[Reason, bool]:
    """Put back what was there before the incident's cordon; a second call changes nothing.

    Returns:
        What was found and done, and whether the node takes pods again.

    Raises:
        ConcurrentUpdateError: if the node kept changing under the patch.
    """
    name = incident.node.name
    for _ in range(PATCH_TRIES):
        node = cluster.get_node(name)
        if node is None or not node.ref.is_same_machine(incident.node):
            return Reason("node_gone", f"{name} is gone: nothing to restore"), False
        ownership = ownership_of(node)
        if ownership is None or ownership.incident_id != incident.id:
            # An earlier try took it off, or somebody else did.
            absent = Reason("not_cordoned_by_us", f"{name} carries no cordon of this incident")
            return absent, not node.is_unschedulable
        if cluster.patch_node(node.ref.name, restore_patch(node, ownership)):
            restored = Reason("restored", f"{name} is as it was before")
            return restored, not ownership.was_unschedulable
    raise ConcurrentUpdateError(f"node {name} changed {PATCH_TRIES} times in a row")


def uncordoned(node: Node) -> Reason:
    """Return the reason for keeping off a node whose cordon somebody has taken away."""
    return Reason("uncordoned", f"somebody has uncordoned {node.ref.name}: nodemend keeps off it")
