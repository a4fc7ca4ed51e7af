"""`diptych demo`: what `make demo` shows is true, and nothing is left behind."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from cli.demo.questions import QUESTIONS
from tests.integration.router_harness import TINY, model_dir

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_demo_ends_well(smollm2_dir):
    assert "Paris" in demo(smollm2_dir, "shm")


def test_the_demo_ends_well_over_tcp(tmp_path):
    """With the tiny model: what it says is no answer, but must be the same colocated."""
    target = model_dir(tmp_path)
    shutil.copy(TINY / "model.safetensors", target)
    demo(target, "tcp")


def demo(model, connector):
    """What it shows; AssertionError unless it ended well."""
    line = [sys.executable, "-P", "-m", "cli", "demo", "--model", str(model), "--connector", connector]
    run = subprocess.run(line, capture_output=True, text=True, timeout=380, cwd=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"same token ids colocated: yes ({len(QUESTIONS)} of {len(QUESTIONS)})" in run.stdout
    rows = re.findall(r"^\d .* (?:OpenAI|gRPC) .* (\w+) *$", run.stdout, re.M)
    assert rows == [connector] * len(QUESTIONS)
    assert "Traceback" not in run.stderr
    ours = [p for p in psutil.process_iter(["cmdline"]) if str(model) in (p.info["cmdline"] or [])]
    assert not [p for p in ours if "--exit-with" in p.info["cmdline"] and p.ppid() == 1]
    return run.stdout
