"""The namespace controller: empties namespaces that are being deleted."""

from local.kubernetes import resources
from local.kubernetes.controllers.base import Controller
from local.kubernetes.objects import is_terminating, name_of, namespace_of, uid_of
from local.kubernetes.registry import DeleteOptions
from local.kubernetes.resources import Resource
from local.kubernetes.store import Change

_CONTENT: tuple[Resource, ...] = (
    *resources.OWNER_RESOURCES.values(),
    resources.PDBS,
    resources.PODS,
)


class NamespaceController(Controller):
    """Deletes what is in a terminating namespace, then the namespace."""

    name = "namespace"

    def notice(self, change: Change) -> None:
        """Namespaces, and pods that leave one."""
        if change.resource == resources.NAMESPACES and change.new is not None:
            if is_terminating(change.new):
                self.mark(change.key)
        elif change.new is None and change.resource in _CONTENT:
            self.mark(namespace_of(change.latest))

    def reconcile(self, key: str) -> None:
        """Delete the content of one terminating namespace; remove it once it is empty."""
        namespace = self.store.get(resources.NAMESPACES, "", key)
        if namespace is None or not is_terminating(namespace):
            return
        for resource in _CONTENT:
            for obj in self.store.find(resource, "namespace", key):
                if not is_terminating(obj):
                    self.registry.delete(
                        resource, key, name_of(obj), DeleteOptions(uid=uid_of(obj))
                    )
        if not any(self.store.find(resource, "namespace", key) for resource in _CONTENT):
            self.registry.finish_namespace(key)
