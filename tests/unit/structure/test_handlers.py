"""A handler parses, calls its one use case, serialises."""

import ast

import pytest

from tests.unit.structure.repository import FUNCTIONS, imports_of, tree, use_cases

MAX_LINES = 40
BRANCHES = (ast.If, ast.IfExp, ast.Match, ast.While, ast.Try)
ALLOWED = ("nodemend.contracts.", "nodemend.observability", "nodemend.application.")
EVERY = pytest.mark.parametrize("name", FUNCTIONS)


def functions_in(name: str) -> list[ast.FunctionDef]:
    return [node for node in tree(FUNCTIONS[name]).body if isinstance(node, ast.FunctionDef)]


@EVERY
def test_handler_has_at_most_forty_lines(name):
    handler = next(node for node in functions_in(name) if node.name == "handler")

    assert handler.end_lineno - handler.lineno < MAX_LINES
    assert len(FUNCTIONS[name].read_text().splitlines()) <= 2 * MAX_LINES


@EVERY
def test_handler_decides_nothing(name):
    found = [node for function in functions_in(name) for node in ast.walk(function)]

    assert not [node.lineno for node in found if isinstance(node, BRANCHES)]


@EVERY
def test_function_imports_the_one_use_case_of_its_name(name):
    own = [
        (module, imported)
        for module, imported in imports_of(FUNCTIONS[name])
        if module.startswith("nodemend.application")
    ]

    assert own == [(f"nodemend.application.{name}", name)]


@EVERY
def test_function_imports_nothing_of_the_package_but_its_edges(name):
    inside = [
        (module, imported)
        for module, imported in imports_of(FUNCTIONS[name])
        if module.split(".")[0] == "nodemend"
    ]

    strange = [
        (module, imported)
        for module, imported in inside
        if not module.startswith(ALLOWED) and (module, imported) != ("nodemend", "bootstrap")
    ]
    assert not strange


@EVERY
def test_function_imports_no_library_but_powertools(name):
    outside = {module.split(".")[0] for module, _ in imports_of(FUNCTIONS[name])}

    assert outside <= {"nodemend", "aws_lambda_powertools", "typing"}


@EVERY
def test_use_case_is_called_by_the_function_of_its_name(name):
    called = [
        node.func.id
        for node in ast.walk(tree(FUNCTIONS[name]))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]

    assert called.count(name) == 1


def test_every_use_case_has_a_function_and_every_function_a_use_case():
    assert use_cases() == set(FUNCTIONS)
