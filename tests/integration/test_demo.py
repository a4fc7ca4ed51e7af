"""`diptych demo` on the real model: what `make demo` shows is true, and nothing is left behind."""

import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from cli.demo.questions import QUESTIONS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("connector", ["shm", "tcp"])
def test_the_demo_ends_well(smollm2_dir, connector):
    line = [sys.executable, "-P", "-m", "cli", "demo", "--model", str(smollm2_dir), "--connector", connector]
    run = subprocess.run(line, capture_output=True, text=True, timeout=380, cwd=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"same token ids colocated: yes ({len(QUESTIONS)} of {len(QUESTIONS)})" in run.stdout
    assert "Paris" in run.stdout
    rows = re.findall(r"^\d .* (?:OpenAI|gRPC) .* (\w+) *$", run.stdout, re.M)
    assert rows == [connector] * len(QUESTIONS)
    assert "Traceback" not in run.stderr
    ours = [p for p in psutil.process_iter(["cmdline"]) if str(smollm2_dir) in (p.info["cmdline"] or [])]
    assert not [p for p in ours if "--exit-with" in p.info["cmdline"] and p.ppid() == 1]
