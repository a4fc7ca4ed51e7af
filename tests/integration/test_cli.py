"""The command as a user meets it: from any folder, in pipes, interrupted, on an environment that is asked about itself."""

import functools
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TINY = str(ROOT / "tests" / "fixtures" / "tiny-austen")


def diptych(*args, **options):
    return subprocess.run(
        [sys.executable, "-P", "-m", "cli", *args], capture_output=True, text=True, timeout=100, **options
    )


def test_the_script_is_installed():
    script = Path(sys.executable).parent / "diptych"
    assert "up" in subprocess.run([script, "--help"], capture_output=True, text=True, check=True).stdout


def test_a_folder_of_the_same_name_where_the_user_stands_hides_nothing(tmp_path):
    for name in ("kernels", "router", "cli"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the wrong package')")
    run = diptych("model", "fetch", TINY, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == TINY


def test_doctor_finds_this_environment_in_order():
    run = diptych("doctor", "--json")
    findings = json.loads(run.stdout)
    assert {f["subject"] for f in findings} >= {"python", "our packages", "torch", "shm connector", "generated code"}
    assert [f for f in findings if f["level"] == "broken"] == []
    assert run.returncode == 0


def test_doctor_says_when_a_stranger_hides_our_packages(tmp_path, monkeypatch):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = diptych("doctor", "--json")
    assert run.returncode == 1
    (found,) = [f for f in json.loads(run.stdout) if f["level"] == "broken"]
    assert "kernels" in found["fact"]
    assert str(tmp_path) in found["fact"]
    assert found["remedy"]


def test_a_reader_that_leaves_is_no_traceback():
    line = f"{sys.executable} -m cli up --help | head -1; exit ${{PIPESTATUS[0]}}"
    run = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert "Traceback" not in run.stderr
    assert run.stdout.startswith("Usage")


@pytest.mark.parametrize("number", [signal.SIGINT])
def test_ctrl_c_while_answering_is_130_and_silent(number):
    line = [sys.executable, "-m", "cli", "generate", "--model", TINY, "--prompt", "It is", "--ignore-eos"]
    line += ["--max-tokens", "1000", "--threads", "1", "--kv-memory", "16MiB"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # A shell that runs the tests in the background has them, and all that they start, ignore SIGINT.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(line, **streams, cwd=ROOT, preexec_fn=heed) as process:
        assert process.stdout.read(1)  # it has begun to answer
        process.send_signal(number)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in stderr
