"""`diptych bench compare` on the tiny model: real clusters in turns, each worker on its own core, the same tokens from both."""

import json
import os
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from cli.commands import compare as command
from cli.comparison import starter
from cli.main import run
from rpc.cores import usable_in_order

TINY = Path(__file__).parents[1] / "fixtures" / "tiny-austen"
pytestmark = pytest.mark.skipif(len(usable_in_order()) < 2, reason="needs two cores")


def cores_of_workers():
    """For each worker process under this one: its pool, and the cores on which its threads may run."""
    found = []
    for child in psutil.Process().children():
        line = child.cmdline()
        pool = next((kind for kind in ("prefill", "decode") if kind in line), None)
        if pool is not None:
            threads = {int(tid) for tid in os.listdir(f"/proc/{child.pid}/task")}
            cores = {core for tid in threads for core in os.sched_getaffinity(tid)}
            found.append((pool, tuple(sorted(cores))))
    return sorted(found)


def test_both_are_started_pinned_measured_and_gone(tmp_path, monkeypatch, capsys):
    seen = []

    def watched(*args):
        start = starter(*args)

        @asynccontextmanager
        async def begin(system):
            async with start(system) as address:
                seen.append(cores_of_workers())
                yield address

        return begin

    monkeypatch.setattr(command, "starter", watched)
    first, second, *_ = usable_in_order()
    code = run([
        "bench", "compare", "--model", str(TINY), "--kv-memory", "16MiB", "--rounds", "1", "--window", "0.4",
        "--prefill-cores", f"{first}", "--decode-cores", f"{second}", "--streams", "2", "--stream-input-len", "8",
        "--stream-output-len", "100", "--output-len", "4", "--input-len", "200", "--request-rate", "10",
        "--result-dir", str(tmp_path),
    ])  # fmt: skip
    said = capsys.readouterr().err
    assert code == 0, said
    assert seen == [
        [("decode", (second,)), ("prefill", (first,))],
        sorted([("decode", (first,)), ("decode", (second,))]),
    ]
    assert not [child for child in psutil.Process().children() if "cli" in child.cmdline()]
    found = json.loads((tmp_path / "compare.json").read_text())["report"]
    assert found["verdicts"][0]["value"] == 0, said
    assert any(note.startswith("Failed prompts: none") for note in found["notes"])
    medians = {measure["name"]: measure["runs"] for measure in found["measures"]}
    for system in ("1P1D", "2 colocated"):
        assert medians[f"200 tokens, 10/s: {system}: TTFT p50"][0] > 0
        assert medians[f"200 tokens, 10/s: {system}: output"][0] > 0
    assert (tmp_path / "compare.html").read_text().count("data:image/png;base64,") == 2
    assert {path.name for path in tmp_path.iterdir()} == {
        "compare.json", "compare.md", "compare.html", "compare-itl.png", "compare-rest.png"
    }  # fmt: skip
