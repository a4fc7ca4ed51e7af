"""A real redis-server on a free port of this machine, that can be killed, stopped and started again on the same port."""

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

BINARY = shutil.which("redis-server") or "/usr/bin/redis-server"


def require_redis_server() -> None:
    """Skip the test, with a reason, where there is no redis-server; fail it in CI, where there must be one, and for another."""
    if Path(BINARY).exists():
        said = subprocess.run([BINARY, "--version"], check=True, capture_output=True, text=True).stdout
        assert re.search(r" v=([7-9]|\d\d)\.", said), f"what the documents promise is Redis 7; this is {said}"
        return
    if os.environ.get("CI") == "true":  # noqa: TID251
        pytest.fail("redis-server is not installed; CI installs it (.ci/run)")
    pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)")


class RedisProcess:
    """Owns one redis-server, which keeps nothing on disk: killed and started again, it has forgotten everything."""

    def __init__(self, folder: Path, *options: str, tls: bool = False) -> None:
        """With `tls` it takes nothing but TLS; `options` name its files."""
        self._tls = tls
        self._folder = folder
        self._options = options
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Returns when it takes connections."""
        ports = ["--port", "0", "--tls-port", str(self.port)] if self._tls else ["--port", str(self.port)]
        command = [BINARY, *ports, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        command += ["--dir", str(self._folder), "--logfile", str(self._folder / "redis.log"), *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 20
        while time.monotonic() < until:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                assert self._process.poll() is None, (self._folder / "redis.log").read_text()
                time.sleep(0.01)
            else:
                return
        raise AssertionError("redis-server does not listen")

    def kill(self) -> None:
        """As `kill -9` does; idempotent."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """It holds its connections and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def command(self, *words: str | bytes) -> object:
        """One command over a connection of its own, blocking."""
        import redis

        client = redis.Redis(port=self.port, socket_timeout=5)
        try:
            return client.execute_command(*words)
        finally:
            client.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
