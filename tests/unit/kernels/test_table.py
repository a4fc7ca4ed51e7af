"""The one table of ops says what there is: every place exists, and the page has it as the code has."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest

from kernels.table import ROWS, Row, rendered

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import gen_kernels  # noqa: E402 - found by the line before


def test_the_page_is_up_to_date() -> None:
    text = gen_kernels.PAGE.read_text(encoding="utf-8")
    assert text.count(gen_kernels.BEGIN) == text.count(gen_kernels.END) == 1
    assert text == gen_kernels.page(text), "run make docs"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.op)
def test_every_place_exists(row: Row) -> None:
    assert row.caller and row.reference and row.test, "every op has a caller, a slow truth and a test"
    places = [
        (ROOT, row.caller),
        (ROOT, row.test),
        *((ROOT / "kernels", p) for p in (row.reference, row.cpu, row.triton)),
    ]
    for base, place in places:
        file, _, name = place.partition(":")
        assert (base / file).exists(), place
        if name:
            tree = ast.parse((base / file).read_text(encoding="utf-8"))
            assert name in {
                node.name for node in ast.walk(tree) if isinstance(node, (ast.ClassDef, ast.FunctionDef))
            }, place


def test_measured_shares_stand_in_the_row_of_their_op(tmp_path: Path) -> None:
    results = tmp_path / "kernels.json"
    measure = {"name": "linear: bf16, 1 row", "unit": "of the limit", "runs": [0.9, 0.93, 0.99]}
    results.write_text(json.dumps({"report": {"measures": [measure]}}))
    line = next(line for line in rendered(results).splitlines() if line.startswith("| linear |"))
    assert "bf16, 1 row 93%" in line
    assert "%" not in rendered(tmp_path / "none.json")
