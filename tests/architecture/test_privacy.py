"""Errors go to a log as they are, which writes what of them may be said; never as text that somebody made of them before."""

import ast

import pytest
from tree import name, parsed, sources

LOGGERS = {"log", "logger", "_log"}
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}


def log_calls(path):
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS:
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id in LOGGERS:
                yield node


def texts_of_errors(call, caught):
    for node in ast.walk(call):
        if isinstance(node, ast.Attribute) and node.attr == "message":
            yield node
        made = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"str", "repr"}
        if made and any(isinstance(a, ast.Name) and a.id in caught for a in node.args):
            yield node
        if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name) and node.value.id in caught:
            yield node


@pytest.mark.parametrize("path", [p for p in sources() if "cli/demo" not in name(p)], ids=name)
def test_logs_take_errors_and_not_their_messages(path):
    caught = {n.name for n in ast.walk(parsed(path)) if isinstance(n, ast.ExceptHandler) and n.name} | {
        "error",
        "cause",
    }
    for call in log_calls(path):
        found = [ast.unparse(node) for node in texts_of_errors(call, caught)]
        assert not found, f"{name(path)}:{call.lineno}: {', '.join(found)}: pass the error itself"
