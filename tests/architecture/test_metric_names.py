"""Each metric is named once, with bounded labels, and docs/metrics.md has all of them."""

import ast
import runpy
import sys

from tree import ROOT, name, parsed, sources

from observability.names import ALL, LABELS, Kind

NAMES = ROOT / "observability" / "names.py"
BASES = tuple({metric.name.removesuffix("_total") for metric in ALL})
TOTALS = {"vllm:iteration_tokens_total"}  # vLLM's histogram


def test_each_is_there_once_with_an_ending_for_its_kind():
    names = [metric.name for metric in ALL]
    assert len(names) == len(set(names))
    for metric in ALL:
        assert (metric.kind is Kind.COUNTER) == metric.name.endswith("_total") or metric.name in TOTALS, metric.name
        assert metric.what and not metric.what.endswith("."), metric.name


def test_what_bounds_each_label_is_said():
    assert {label for metric in ALL for label in metric.labels} == set(LABELS)
    assert all(LABELS.values())


def test_no_other_file_names_one():
    for path in sources():
        said = [n.value for n in ast.walk(parsed(path)) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        named = [s for s in said if s.startswith(BASES) and "\n" not in s]
        assert not named or path == NAMES, f"{name(path)}: {named}: take it from observability.names"


def test_the_page_has_all(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    page = runpy.run_path(str(ROOT / "tools" / "gen_metrics.py"))
    assert page["PAGE"].read_text(encoding="utf-8") == page["render"](), "run python tools/gen_metrics.py"
