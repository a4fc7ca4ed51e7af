"""The house rules with numbers: what a person can read in one sitting stays so."""

import ast

import pytest
from tree import name, parsed, sources

FUNCTION_LINES = 60
FILE_LINES = 400
FILE_LINES_STOP = 600
CLASS_METHODS = 15
CONFIG_FIELDS = 20
INTERFACE_METHODS = 8
PROTOCOLS_WIDER = {
    # Attributes of a model that the engine must know, beside one method.
    "ModelRunner": 8,
}


def functions(tree):
    return [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]


def classes(tree):
    return [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]


def methods(node):
    return [n for n in node.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]


def is_protocol(node):
    return any("Protocol" in ast.unparse(base) for base in node.bases)


def lines_of(node):
    return node.end_lineno - node.lineno + 1


@pytest.mark.parametrize("path", sources(), ids=name)
def test_functions_are_short(path):
    if "kernels" in path.parts:
        pytest.skip("kernels are exempt")
    long = [f"{f.name}: {lines_of(f)}" for f in functions(parsed(path)) if lines_of(f) > FUNCTION_LINES]
    assert not long, f"{name(path)}: functions over {FUNCTION_LINES} lines: {long}"


def test_files_are_short():
    sizes = {name(p): p.read_text(encoding="utf-8").count("\n") for p in sources()}
    assert not {n: s for n, s in sizes.items() if s > FILE_LINES_STOP}
    over = {n: s for n, s in sizes.items() if s > FILE_LINES}
    assert len(over) <= len(sizes) // 50, f"too many files over {FILE_LINES} lines: {over}"


@pytest.mark.parametrize("path", sources(), ids=name)
def test_classes_and_interfaces_are_small(path):
    for node in classes(parsed(path)):
        count = len(methods(node))
        limit = PROTOCOLS_WIDER.get(node.name, INTERFACE_METHODS) if is_protocol(node) else CLASS_METHODS
        assert count <= limit, f"{name(path)}: {node.name} has {count} methods, limit {limit}"


@pytest.mark.parametrize("path", sources(), ids=name)
def test_configs_are_frozen_and_narrow(path):
    for node in classes(parsed(path)):
        if not node.name.endswith(("Config", "Params")):
            continue
        decorators = " ".join(ast.unparse(d) for d in node.decorator_list)
        if "dataclass" not in decorators:
            continue
        assert "frozen=True" in decorators, f"{name(path)}: {node.name} is not frozen"
        fields = [n for n in node.body if isinstance(n, ast.AnnAssign)]
        assert len(fields) <= CONFIG_FIELDS, f"{name(path)}: {node.name} has {len(fields)} fields"
