"""Habits that a linter does not know: no roles in the engine, no duck typing, no changing globals, no hiding places."""

import ast
import re

import pytest
from tree import ROOT, name, parsed, sources

FORBIDDEN_FILE_NAMES = {"utils", "util", "common", "helpers", "misc", "impl"}


def test_no_file_is_a_drawer():
    assert not [name(p) for p in sources() if p.stem in FORBIDDEN_FILE_NAMES]


def test_the_engine_knows_no_role():
    words = re.compile(r"\brole\b|is_prefill\w*|is_decode_node|disagg_mode|disaggregation_mode")
    guilty = {}
    for path in (ROOT / "engine").rglob("*.py"):
        code = "\n".join(line.split("#")[0] for line in path.read_text().splitlines())
        for node in ast.walk(ast.parse(code)):
            identifier = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None)
            if isinstance(identifier, str) and words.search(identifier):
                guilty[name(path)] = identifier
    assert not guilty


@pytest.mark.parametrize("path", sources(), ids=name)
def test_modules_open_with_a_docstring(path):
    assert ast.get_docstring(parsed(path)), f"{name(path)} has no module docstring"


@pytest.mark.parametrize("path", sources(), ids=name)
def test_no_duck_typing_no_globals_no_mixins(path):
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"hasattr", "getattr"}:
            # A constant name means asking an object what it is; a computed one walks declared fields.
            constant = len(node.args) > 1 and isinstance(node.args[1], ast.Constant)
            assert not constant, f"{name(path)}:{node.lineno}: {ast.unparse(node)}"
        assert not isinstance(node, ast.Global), f"{name(path)}:{node.lineno}: a module global that changes"
        if isinstance(node, ast.ClassDef):
            assert "Mixin" not in node.name, f"{name(path)}:{node.lineno}: {node.name}"


@pytest.mark.parametrize("path", sources(), ids=name)
def test_no_exception_is_swallowed(path):
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ExceptHandler):
            silent = all(isinstance(b, ast.Pass) or ast.unparse(b) in {"...", "continue"} for b in node.body)
            broad = node.type is None or ast.unparse(node.type) in {"Exception", "BaseException"}
            assert not (silent and broad), f"{name(path)}:{node.lineno}: swallowed"
            assert node.type is not None, f"{name(path)}:{node.lineno}: bare except"


def test_no_cancellation_is_lost():
    """asyncio.wait_for (Python 3.11) swallows a cancellation that comes in the turn in which its work ends."""
    assert not [name(p) for p in sources() if "asyncio.wait_for(" in p.read_text()], "use asyncio.timeout"


def test_no_todo_without_a_home():
    guilty = [name(p) for p in sources() if re.search(r"\b(TODO|FIXME|XXX)\b(?!.*https?://)", p.read_text())]
    assert not guilty


# What turns bytes into code, or into objects of the sender's choice.
_EXECUTES = {"eval", "exec", "compile", "__import__"}
_PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle"}


@pytest.mark.parametrize("path", sources(), ids=name)
def test_no_bytes_become_code(path):
    """What a peer or a file says is data: protobuf, JSON, safetensors, GGUF."""
    for node in ast.walk(parsed(path)):
        where = f"{name(path)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            assert not {a.name.partition(".")[0] for a in node.names} & _PICKLES, where
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").partition(".")[0] not in _PICKLES, where
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        assert called not in _EXECUTES, f"{where}: {called}"
        assert called not in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"), f"{where}: {called}"
        if called in ("torch.load", "np.load", "numpy.load", "torch.hub.load"):
            said = {k.arg: ast.unparse(k.value) for k in node.keywords}
            assert said.get("weights_only") == "True" or said.get("allow_pickle") == "False", f"{where}: {called}"
        assert "multiprocessing.connection" not in called, f"{where}: {called}"


# Its locks, events, queues and shared memory have names in /dev/shm, which outlive whoever is killed; a pipe does not.
_NAMELESS = {"get_context", "Pipe", "Process", "connection", "Connection"}


@pytest.mark.parametrize("path", [p for p in sources() if "multiprocessing" in p.read_text()], ids=name)
def test_nothing_of_multiprocessing_has_a_name_in_shared_memory(path):
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("multiprocessing"):
            assert {a.name for a in node.names} <= _NAMELESS, f"{name(path)}:{node.lineno}"
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("multiprocessing", "context"):
            assert node.attr in _NAMELESS, f"{name(path)}:{node.lineno}: {node.attr}"


@pytest.mark.parametrize(
    "path", [p for p in sources() if re.search("fork|multiprocessing|ProcessPool", p.read_text())], ids=name
)
def test_no_process_is_forked(path):
    """A fork has no OpenMP threads but believes that it has: once its parent computed, it waits for them for ever."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            where = f"{name(path)}:{node.lineno}: {ast.unparse(node)}"
            assert called.rpartition(".")[2] not in ("fork", "forkpty", "ProcessPoolExecutor", "set_start_method"), (
                where
            )
            assert called not in ("multiprocessing.Process", "multiprocessing.Pool", "Process", "Pool"), where
            if called.rpartition(".")[2] == "get_context":
                assert [ast.unparse(a) for a in node.args] == ["'spawn'"], where
