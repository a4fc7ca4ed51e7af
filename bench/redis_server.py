"""A redis-server of a measurement's own, which keeps nothing. Does not know what is put into it."""

from __future__ import annotations

import shutil
import socket
import subprocess

import psutil

from contracts.errors import ConfigError
from registry.config import RedisAddress


class RedisServer:
    """Owns the process, from `start` to `kill`. Raises ConfigError where no redis-server is installed."""

    def __init__(self, folder: str) -> None:
        binary = shutil.which("redis-server")
        if binary is None:
            raise ConfigError("redis-server is not installed")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = RedisAddress("127.0.0.1", probe.getsockname()[1])
        self._command = [binary, "--port", str(self.address.port), "--save", "", "--dir", folder, "--logfile", "log"]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns at once."""
        self._process = subprocess.Popen(self._command)

    def kill(self) -> None:
        """As `kill -9` does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def cpu_s(self) -> float:
        """What it has used."""
        assert self._process is not None
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)
