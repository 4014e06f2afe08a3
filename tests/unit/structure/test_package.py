"""The package's shape: adapters, ports, module sizes, docstrings."""

import ast
import dataclasses
import importlib
import inspect
import typing
from collections.abc import Callable, Iterator

import pytest
from pydantic import BaseModel

from nodemend.adapters.system import SystemClock
from nodemend.domain.rules import Catalogue
from tests.unit.structure.repository import ADAPTERS, PACKAGE, ROOT, imports_of, tree, use_cases

MAX_LINES = 600
MODULES = sorted(ROOT.glob("layers/nodemend/nodemend/**/*.py"))
OUTSIDE_SYSTEMS = {
    "Amazon Managed Service for Prometheus": "amp",
    "EC2 Auto Scaling": "capacity_asg",
    "STS, for the clusters' roles": "cluster_role",
    "SQS, dispatch queue": "dispatch_queue_sqs",
    "SQS, refused alerts": "dead_letters_sqs",
    "EKS DescribeCluster and tokens": "eks_auth",
    "EventBridge": "event_bus",
    "Step Functions": "executions_stepfunctions",
    "DynamoDB, guard items": "guard_dynamodb",
    "DynamoDB, record of machines and GPUs": "history_dynamodb",
    "DynamoDB, incident records": "incidents_dynamodb",
    "EC2, single instances": "instances_ec2",
    "Kubernetes API": "kubernetes_cluster",
    "DynamoDB and EventBridge, outbox": "outbox",
    "AppConfig": "policy_appconfig",
    "DynamoDB, scan memory": "scan_memory_dynamodb",
    "the Lambda process itself": "system",
    "CloudWatch, by log lines": "telemetry_emf",
}
"""A second module for a system that stands here, or one that stands nowhere, is a mistake."""

VALUES = (Catalogue,)
"""What a use case may take beside ports: data that is not read anew."""


def test_each_outside_system_has_one_adapter():
    modules = list(OUTSIDE_SYSTEMS.values())

    assert sorted(modules) == sorted(set(modules))
    assert {name for name in ADAPTERS if not name.startswith("_")} == set(modules)


def test_only_one_module_imports_the_kubernetes_client():
    users = {
        path.name
        for path in MODULES
        if any(module.split(".")[0] == "kubernetes" for module, _ in imports_of(path))
    }

    assert users == {"kubernetes_cluster.py"}


def test_no_module_reads_the_environment_but_settings():
    readers = {
        path.name
        for path in MODULES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute)
        and node.attr in ("environ", "getenv")
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    }

    assert readers == set()


def test_no_module_tells_the_time_or_sleeps_but_the_clock():
    users = {
        path.name
        for path in MODULES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("now", "utcnow", "sleep", "time", "today")
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in ("datetime", "time", "date")
    }

    assert users <= {"system.py"}


def is_port(annotation: object) -> bool:
    """True for a protocol, and for a dataclass of ports."""
    if getattr(annotation, "_is_protocol", False) or annotation in VALUES:
        return True
    if not dataclasses.is_dataclass(annotation) or not isinstance(annotation, type):
        return False
    hints = typing.get_type_hints(annotation)
    fields = dataclasses.fields(annotation)
    return annotation.__name__.endswith("Ports") and all(is_port(hints[f.name]) for f in fields)


@pytest.mark.parametrize("name", sorted(use_cases()))
def test_use_case_takes_one_contract_and_ports(name):
    function = getattr(importlib.import_module(f"nodemend.application.{name}"), name)
    hints = typing.get_type_hints(function)
    parameters = list(inspect.signature(function).parameters.values())

    assert issubclass(hints[parameters[0].name], BaseModel)
    assert len(parameters) == 2
    assert parameters[1].kind is inspect.Parameter.KEYWORD_ONLY
    taken = hints[parameters[1].name]
    assert is_port(taken) or typing.get_origin(taken) is Callable


def test_a_concrete_adapter_is_no_port():
    LeakyPorts = dataclasses.make_dataclass("LeakyPorts", [("clock", SystemClock)])  # noqa: N806

    assert not is_port(SystemClock)
    assert not is_port(LeakyPorts)


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("layers/**/*.py")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_module_is_not_too_long(path):
    assert len(path.read_text().splitlines()) <= MAX_LINES


def public_nodes(path) -> Iterator[tuple[str, ast.AST]]:
    """Yield everything public of a module: itself, classes, functions, methods."""
    yield "module", tree(path)
    for node in tree(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, node
            for inner in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_"):
                    yield f"{node.name}.{inner.name}", inner


@pytest.mark.parametrize(
    "path",
    [*MODULES, *sorted(ROOT.glob("functions/*/app.py")), *sorted(ROOT.glob("tools/*.py"))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_everything_public_has_a_docstring(path):
    missing = [name for name, node in public_nodes(path) if not ast.get_docstring(node)]

    assert not missing


def test_package_is_typed():
    assert (PACKAGE / "py.typed").is_file()
