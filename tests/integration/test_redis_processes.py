"""A local cluster and another router as real processes on one Redis with a password, which is killed under them."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx
import psutil
import pytest

from tests.integration.test_up import ROOT, TINY, until, up
from tests.redis_process import RedisProcess, require_redis_server

pytestmark = pytest.mark.slow
PASSWORD = "sesame-opens"


@pytest.fixture
def guarded_redis(tmp_path):
    require_redis_server()
    process = RedisProcess(tmp_path, "--requirepass", PASSWORD)
    process.start()
    yield process
    process.kill()


@contextmanager
def another_router(redis, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    file = tmp_path / "password"
    file.write_text(PASSWORD + "\n")
    line = [sys.executable, "-m", "cli", "router", "--model", TINY, "--http-port", str(port), "--grpc-port", "0"]
    line += ["--cluster-secret-file", str(tmp_path / "secret")]
    line += ["--registry", redis.url, "--registry-password-file", str(file), "--canary-interval", "0"]
    log = tmp_path / "router.log"
    with log.open("w") as stream:
        process = subprocess.Popen(line, stdout=stream, stderr=subprocess.STDOUT, cwd=ROOT)
    try:
        yield f"http://127.0.0.1:{port}", log
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


def health(url):
    try:
        return httpx.get(f"{url}/health", trust_env=False).json()
    except httpx.TransportError:
        return {"registry": "no router", "ready": {}}


def has(url, registry, prefill, decode):
    def look():
        said = health(url)
        return said["registry"].startswith(registry) and said["ready"] == {"prefill": prefill, "decode": decode}

    until(look, 30, f"{registry}, {prefill}P{decode}D at {url}")


def answer(url):
    body = {"model": "tiny-austen", "prompt": "It is a truth universally", "max_tokens": 8, "temperature": 0.0}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def test_two_routers_and_their_workers_go_on_while_redis_is_killed_and_find_each_other_again(guarded_redis, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef")
    url = guarded_redis.url.replace("//", f"//:{PASSWORD}@")
    with (
        up(
            tmp_path, "--registry", url, "--decode", "2", "--log-level", "info", "--cluster-secret-file", str(secret)
        ) as cluster,
        another_router(guarded_redis, tmp_path) as (other, log),
    ):
        routers = (cluster.facts["http"], other)
        for router in routers:
            has(router, "ok", 1, 2)
        text = answer(other)
        assert answer(routers[0]) == text
        for child in cluster.children:
            assert PASSWORD not in " ".join(psutil.Process(child.pid).cmdline())

        guarded_redis.kill()
        began = time.monotonic()
        for router in routers:
            has(router, "away", 1, 2)
        os.kill(cluster.pid_of("decode-0"), signal.SIGKILL)
        for router in routers:
            has(router, "away", 1, 1)
            assert answer(router) == text
        time.sleep(max(0.0, began + 6 - time.monotonic()))  # longer than any word is believed
        for router in routers:
            has(router, "away", 1, 1)
            assert answer(router) == text

        guarded_redis.start()
        for router in routers:
            has(router, "ok", 1, 2)  # its next life has begun, and all have registered again
            assert answer(router) == text
    for told in (cluster.log.read_text(), log.read_text()):
        assert PASSWORD not in told
        assert "Traceback" not in told
