"""A Redis and a second router beside the cluster, for `--registry redis`, and what befalls them.

    Redis     killed and started again having forgotten all, stopped, emptied (FLUSHALL), full (maxmemory), silent (CLIENT PAUSE)
    router-2  killed, told to end, stopped; started again at once, on the same ports

Does not know requests or the cluster's own processes.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

from tests.redis_process import RedisProcess
from tests.soak.cluster import MODEL, ROOT, STOP_S
from tests.soak.plan import Disturbance, Kind

OTHER = "router-2"
REDIS = "redis"
_HOST = "127.0.0.1"
_FULL_BYTES = 1  # less than what is there already: no writes are taken
_ENDINGS = {-signal.SIGKILL: "killed by SIGKILL", 0: "exited with code 0"}


class Sharing:
    """See the module's docstring. Owns the Redis and the router."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._secret = logs / "secret"
        self._secret.write_text("nobody but the processes of this soak knows it")
        self._redis = RedisProcess(logs)
        http_port, self._grpc_port = _free_ports(2)
        self.http, self.grpc = f"http://{_HOST}:{http_port}", f"{_HOST}:{self._grpc_port}"
        self._router: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._ending = False
        self.endings: list[tuple[str, str]] = []

    @property
    def flags(self) -> list[str]:
        """For every process of the deployment."""
        return ["--registry", self._redis.url, "--cluster-secret-file", str(self._secret)]

    @property
    def pid(self) -> int | None:
        """Of the router; None while it is between two lives."""
        return None if self._router is None or self._router.returncode is not None else self._router.pid

    def start_redis(self) -> None:
        """Returns when it takes connections."""
        self._redis.start()

    def start_router(self) -> None:
        """Begin to keep a router running."""
        self._keeping = asyncio.create_task(self._keep())

    def raise_if_dead(self) -> None:
        """Raises when the router is not kept running any more."""
        if self._keeping is not None and self._keeping.done():
            self._keeping.result()

    async def befall(self, planned: Disturbance) -> None:
        """Carry out one disturbance of Redis or the router, to its end. Nothing befalls a router that is not there."""
        if planned.victims[0] == REDIS:
            await self._befall_redis(planned)
        else:
            await self._befall_router(planned)

    async def end(self) -> None:
        """End both; `endings` has the router's last where it was none in good order."""
        self._ending = True
        if self._router is not None and self._router.returncode is None:
            self._router.terminate()
        if self._keeping is not None:
            await asyncio.wait((self._keeping,), timeout=STOP_S)
        if self.pid is not None and self._router is not None:
            self._router.kill()
            await self._router.wait()
            self.endings.append((OTHER, "did not end when it was told to"))
        self._redis.kill()

    async def _keep(self) -> None:
        command = [sys.executable, "-P", "-m", "cli", "router", "--model", str(MODEL), "--log-level", "info"]
        command += ["--http-port", self.http.rpartition(":")[2], "--grpc-port", str(self._grpc_port), *self.flags]
        command += ["--disaggregate", "always", "--drain-timeout", "20"]
        while not self._ending:
            with (self._logs / f"{OTHER}.log").open("ab") as log:
                self._router = await asyncio.create_subprocess_exec(
                    *command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT
                )
            code = await self._router.wait()
            if self._ending and code == 0:
                return
            self.endings.append((OTHER, _ENDINGS.get(code, f"exited with code {code}")))

    async def _befall_router(self, planned: Disturbance) -> None:
        router = self._router
        if router is None or router.returncode is not None:
            return
        if planned.kind is Kind.STOP:
            router.send_signal(signal.SIGSTOP)
            await asyncio.sleep(planned.length_s)
            router.send_signal(signal.SIGCONT)
        elif planned.kind is Kind.KILL:
            router.kill()
        else:
            router.terminate()

    async def _befall_redis(self, planned: Disturbance) -> None:
        redis, length_s = self._redis, planned.length_s
        match planned.kind:
            case Kind.KILL:
                redis.kill()
                await asyncio.sleep(length_s)
                redis.start()
            case Kind.STOP:
                redis.pause()
                await asyncio.sleep(length_s)
                redis.resume()
            case Kind.FLUSH:
                redis.command("FLUSHALL")
            case Kind.FULL:
                redis.command("CONFIG", "SET", "maxmemory", str(_FULL_BYTES))
                await asyncio.sleep(length_s)
                redis.command("CONFIG", "SET", "maxmemory", "0")
            case Kind.SILENT:
                redis.command("CLIENT", "PAUSE", str(int(length_s * 1000)))
                await asyncio.sleep(length_s)

    def complaints(self) -> list[str]:
        """What the router logged as errors, and tracebacks."""
        lines: list[str] = []
        with suppress(FileNotFoundError):
            lines = (self._logs / f"{OTHER}.log").read_text(errors="replace").splitlines()
        said = [line for line in lines if " ERROR " in line or " CRITICAL " in line or "Traceback" in line]
        return [f"{OTHER} | {line}" for line in said]


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind((_HOST, 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
