"""The router as a process: it is there in a second, without torch or traces, with whose policy its flags name; a signal ends it
cleanly; a busy port is one line.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
from pathlib import Path
from observability.log import configure_logging
from router.config import HttpConfig, RouterConfig
from router.main import serve
from rpc.process import run_process
from rpc.server import ServerConfig
configure_logging("router")
port = int(sys.argv[1])
config = RouterConfig(
    model_dir=Path("tests/fixtures/tiny-austen"), model_name="tiny", http=HttpConfig(port=port), grpc=ServerConfig(port=0)
)
code = run_process(lambda: serve(config))
assert not {"torch", "engine", "observability.tracing.otel", "opentelemetry.exporter"} & sys.modules.keys()
sys.exit(code)
"""
COMMAND = """
import sys
from cli.main import main
try:
    main()
finally:
    assert not {"torch", "observability.tracing.otel", "opentelemetry.exporter"} & sys.modules.keys()
"""
POLICY = """
import sys

class Last:
    def __init__(self, context):
        sys.stderr.write(f"theirs: {context.kind.name}\\n")

    def choose(self, candidates, query):
        return candidates[-1]
"""


def start(port):
    return subprocess.Popen([sys.executable, "-c", SCRIPT, str(port)], cwd=ROOT, stderr=subprocess.PIPE, text=True)


def start_command(port, packages):
    """`diptych router` where a package is installed whose policy is for prefill workers."""
    (packages / "theirs.py").write_text(POLICY)
    about = packages / "theirs-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[diptych.policies]\nlast = theirs:Last\n")
    command = [sys.executable, "-c", COMMAND, "router", "--model", "tests/fixtures/tiny-austen"]
    command += ["--http-port", str(port), "--grpc-port", "0", "--prefill-policy", "last"]
    env = {**os.environ, "PYTHONPATH": str(packages)}  # noqa: TID251
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=env)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_it_starts_answers_and_ends_at_a_signal(tmp_path):
    port = free_port()
    process = start_command(port, tmp_path)
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                response = httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)
                break
            except httpx.ConnectError:
                assert time.monotonic() < deadline
                assert process.poll() is None, process.stderr.read()
                time.sleep(0.02)
        assert response.status_code == 503
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode == 0, log
    assert "ready" in log
    assert f"http=127.0.0.1:{port}" in log
    assert "stopped" in log
    assert [line for line in log.splitlines() if line.startswith("theirs")] == ["theirs: PREFILL"]
    assert "Traceback" not in log


def test_a_busy_port_is_one_line_and_exit_2():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start(taken.getsockname()[1])
        _, log = process.communicate(timeout=20)
    assert process.returncode == 2
    assert "cannot listen on 127.0.0.1" in log
    assert "Traceback" not in log
