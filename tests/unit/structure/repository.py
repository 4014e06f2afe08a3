"""The repository as data: sources as syntax trees, the template, who calls whom in bootstrap."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tools.asl import load_template

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "layers" / "nodemend" / "nodemend"
FUNCTIONS = {path.parent.name: path for path in sorted(ROOT.glob("functions/*/app.py"))}
ADAPTERS = {path.stem for path in (PACKAGE / "adapters").glob("*.py")} - {"__init__"}


@cache
def tree(path: Path) -> ast.Module:
    """Return the syntax tree of a source file."""
    return ast.parse(path.read_text())


def snake(name: str) -> str:
    """Return the use case of a state or function: DrainNode → drain_node."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def imports_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of everything that a file imports, anywhere in it."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the direction"
            yield from ((node.module or "", alias.name) for alias in node.names)


def use_cases() -> set[str]:
    """Return the application modules that define a function of their own name."""
    return {
        path.stem
        for path in (PACKAGE / "application").glob("*.py")
        if any(
            isinstance(node, ast.FunctionDef) and node.name == path.stem for node in tree(path).body
        )
    }


@cache
def template() -> dict[str, Any]:
    """Return template.yaml; `!Tag value` is `{"Tag": value}`."""
    return load_template(ROOT / "template.yaml")


def resources(kind: str) -> dict[str, dict[str, Any]]:
    """Return the properties of the template's resources of a type, by logical id."""
    return {
        name: resource["Properties"]
        for name, resource in template()["Resources"].items()
        if resource["Type"] == kind
    }


def lambda_functions() -> dict[str, dict[str, Any]]:
    """Return the properties of the template's functions, by logical id."""
    return resources("AWS::Serverless::Function")


def folder_of(properties: dict[str, Any]) -> str:
    """Return the name of a function's code folder."""
    return Path(properties["CodeUri"]).name


def refs(values: list[dict[str, Any]]) -> set[str]:
    """Return the logical ids of a list of `!Ref`s."""
    return {value["Ref"] for value in values}


@cache
def _bootstrap_calls() -> dict[str, set[str]]:
    """Return, for each function of bootstrap.py, the names that it mentions."""
    return {
        node.name: {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
        for node in tree(PACKAGE / "bootstrap.py").body
        if isinstance(node, ast.FunctionDef)
    }


def built_by(function: str) -> set[str]:
    """Return every name that is mentioned when bootstrap builds a Lambda's ports, transitively."""
    ahead = {
        node.attr
        for node in ast.walk(tree(FUNCTIONS[function]))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "bootstrap"
    }
    assert ahead, f"{function} builds nothing"
    found: set[str] = set()
    while ahead:
        name = ahead.pop()
        if name not in found:
            found.add(name)
            ahead |= _bootstrap_calls().get(name, set())
    return found
