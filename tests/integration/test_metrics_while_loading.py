"""A worker that loads its model is watched already: up, and not ready. Here it loads for as long as the test wants."""

import os
import socket
import subprocess
import sys
import time
from contextlib import closing

import grpc
import httpx
from filelock import FileLock
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.integration.test_worker_processes import TINY

UNTIL_S = 60


def free_ports(count):
    with closing(socket.create_server(("127.0.0.1", 0))) as one, closing(socket.create_server(("127.0.0.1", 0))) as two:
        return [listener.getsockname()[1] for listener in (one, two)][:count]


def serving(port):
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)
        except grpc.RpcError:
            return False
    return answer.status == health_pb2.HealthCheckResponse.SERVING


def scraped(port):
    try:
        answer = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False, timeout=5)
    except httpx.TransportError:
        return ""
    return answer.text if answer.status_code == 200 else ""


def until(what, process):
    end = time.monotonic() + UNTIL_S
    while not (found := what()):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    return found


def test_a_worker_that_loads_is_up_and_not_ready(tmp_path):
    """Workers of one user take memory in turns: while somebody has it, the next waits with its model and without KV memory."""
    port, metrics = free_ports(2)
    command = [sys.executable, "-m", "cli", "decode", "--model", str(TINY), "--router", "127.0.0.1:1", "--threads", "1"]
    command += ["--kv-memory", "16MiB", "--port", str(port), "--metrics-port", str(metrics)]
    env = {**os.environ, "TMPDIR": str(tmp_path)}  # noqa: TID251
    with FileLock(tmp_path / f"diptych-memory-{os.getuid()}.lock") as turn:
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=env)
        try:
            text = until(lambda: scraped(metrics), process)
            assert "process_start_time_seconds" in text and "\ndiptych_engine_running_requests " not in text
            assert not serving(port)
            turn.release()
            until(lambda: serving(port), process)
            text = scraped(metrics)
            assert "\ndiptych_engine_running_requests 0" in text and "\ndiptych_epoch " in text
            process.terminate()
            assert process.wait(20) == 0
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(10)
