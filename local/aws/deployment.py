"""Creates a template's resources in the order in which they need each other."""

from collections.abc import Mapping
from typing import Any

from local.aws.intrinsics import Resolver
from local.aws.resources import Builder, Context, Created
from local.aws.template import Template, TemplateError


class Deployment:
    """One template being created: a resource is made when it is first referred to."""

    def __init__(
        self,
        template: Template,
        parameters: Mapping[str, str],
        pseudo: Mapping[str, str],
        context: Context,
        builders: Mapping[str, Builder],
    ) -> None:
        self._template = template
        self._context = context
        self._builders = builders
        self._pending: list[str] = []
        self.created: dict[str, Created] = {}
        """Resources by logical id."""
        self._resolver = Resolver(
            template.document, parameters, pseudo, ref=self._ref, attribute=self._attribute
        )

    def create_all(self) -> None:
        """Create every resource whose condition holds."""
        resources = self._template.resources
        unknown = sorted({one["Type"] for one in resources.values()} - set(self._builders))
        if unknown:
            raise TemplateError(f"the laptop cannot create: {', '.join(unknown)}")
        for logical_id, resource in resources.items():
            if self._is_wanted(resource):
                self._create(logical_id)

    def outputs(self) -> dict[str, Any]:
        """Return the template's outputs."""
        return {
            name: self._resolver.resolve(output["Value"])
            for name, output in self._template.document.get("Outputs", {}).items()
            if self._is_wanted(output)
        }

    def of_type(self, resource_type: str) -> list[str]:
        """Return the logical ids of the resources of a type."""
        resources = self._template.resources
        return [name for name in self.created if resources[name]["Type"] == resource_type]

    def _is_wanted(self, item: Mapping[str, Any]) -> bool:
        return "Condition" not in item or self._resolver.condition(item["Condition"])

    def _create(self, logical_id: str) -> Created:
        if logical_id in self.created:
            return self.created[logical_id]
        if logical_id in self._pending:
            circle = " -> ".join([*self._pending, logical_id])
            raise TemplateError(f"circular dependency: {circle}")
        resource = self._template.resources[logical_id]
        if not self._is_wanted(resource):
            raise TemplateError(f"{logical_id} is referred to, but its condition is false")
        self._pending.append(logical_id)
        depends_on = resource.get("DependsOn") or []
        for other in [depends_on] if isinstance(depends_on, str) else depends_on:
            if self._is_wanted(self._template.resources[other]):
                self._create(other)
        properties = self._resolver.resolve(resource.get("Properties") or {})
        created = self._builders[resource["Type"]](self._context, logical_id, properties)
        self._pending.pop()
        self.created[logical_id] = created
        return created

    def _ref(self, logical_id: str) -> str:
        return self._create(logical_id).ref

    def _attribute(self, logical_id: str, name: str) -> Any:  # noqa: ANN401 - text or list
        attributes = self._create(logical_id).attributes
        if name not in attributes:
            kind = self._template.resources[logical_id]["Type"]
            raise TemplateError(f"GetAtt {logical_id}.{name} is not known for {kind}")
        return attributes[name]
