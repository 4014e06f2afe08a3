"""Reads the RBAC manifest that operators apply, so that the emulated cluster allows no more."""

from pathlib import Path
from typing import Any

import yaml

from local.kubernetes import Binding, Rbac, Rule


def load_rbac(path: Path) -> Rbac:
    """Return the cluster-wide bindings of a manifest with ClusterRoles and their bindings."""
    documents = [d for d in yaml.safe_load_all(path.read_text("utf-8")) if d]
    roles = {d["metadata"]["name"]: d["rules"] for d in documents if d["kind"] == "ClusterRole"}
    bindings = [d for d in documents if d["kind"] == "ClusterRoleBinding"]
    return Rbac([_binding(document, roles) for document in bindings])


def _binding(document: dict[str, Any], roles: dict[str, list[dict[str, Any]]]) -> Binding:
    role = document["roleRef"]["name"]
    return Binding(
        rules=tuple(
            Rule(
                verbs=tuple(rule["verbs"]),
                resources=tuple(rule["resources"]),
                groups=tuple(rule["apiGroups"]),
                names=tuple(rule.get("resourceNames", ())),
            )
            for rule in roles[role]
        ),
        groups=tuple(s["name"] for s in document["subjects"] if s["kind"] == "Group"),
        users=tuple(s["name"] for s in document["subjects"] if s["kind"] == "User"),
        role=role,
    )
