"""Documents say what is: door signs have their headings, and every anchor in them resolves to a real function."""

import ast
import re

import pytest
from tree import PACKAGES, ROOT, parsed

HEADINGS = ["## In and out", "## One request here", "## Always true", "## May import", "## Not our job"]
ANCHOR = re.compile(r"`([\w/]+\.py):([\w.]+)`")
TEST_PATH = re.compile(r"tests/[\w/]+\.py")
DOCUMENTS = sorted({ROOT / "docs" / "ARCHITECTURE.md", ROOT / "README.md", *(ROOT / p / "README.md" for p in PACKAGES)})


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_has_its_door_sign(package):
    lines = (ROOT / package / "README.md").read_text().splitlines()
    assert len(lines) <= 60
    assert re.match(rf"# {package} — \S", lines[0])
    assert [line for line in lines if line.startswith("## ")] == HEADINGS


def defined(path):
    """Names of all functions, classes and Class.method in a module."""
    names = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}.{n.name}" for n in node.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
            }
    return names


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_anchors_resolve(document):
    for file, symbol in ANCHOR.findall(document.read_text()):
        candidates = [ROOT / file, document.parent / file]
        path = next((c for c in candidates if c.exists()), None)
        assert path, f"{document.name} names {file}, which does not exist"
        assert symbol in defined(path), f"{document.name} names {file}:{symbol}, which does not exist"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_tests_that_are_named_exist(document):
    missing = [t for t in TEST_PATH.findall(document.read_text()) if not (ROOT / t).exists()]
    assert not missing


def test_architecture_walks_a_request_through_every_door():
    anchors = {file.split("/")[0] for file, _ in ANCHOR.findall((ROOT / "docs" / "ARCHITECTURE.md").read_text())}
    assert {"router", "prefill_service", "kv_transfer", "decode_service", "engine"} <= anchors


def test_every_direct_dependency_has_its_reason_and_its_pin():
    text = (ROOT / "pyproject.toml").read_text()
    wanted = set(re.findall(r'^    "([\w-]+)(?:\[\w+\])?>=', text, re.M)) | set(
        re.findall(r'^    "(types-\w+)"', text, re.M)
    )
    pins = {
        line.split("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    assert wanted
    assert {w.lower().replace("_", "-") for w in wanted} <= pins
    reasons = (ROOT / "docs" / "adr" / "0010-dependencies.md").read_text().lower().replace("_", "-")
    assert not [w for w in wanted if w.lower().replace("_", "-") not in reasons]


def test_every_decision_is_listed():
    folder = ROOT / "docs" / "adr"
    listed = (folder / "README.md").read_text()
    assert [path.name for path in sorted(folder.glob("0*.md")) if f"]({path.name})" not in listed] == []
