"""The sockets of a router: HTTP and gRPC for users, gRPC for workers; which lock is on which.

    users    HTTP ─┐                       ┌─ Inference, reflection      a key, where there are keys
             gRPC ─┴─ TLS, if configured ──┤
    workers  gRPC ─── TLS, client certs ───┴─ Registry                   no key: not for users

Without an address of its own the workers' door is the users' gRPC port. Does not know what is behind the doors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from contracts.errors import ConfigError
from contracts.pb.diptych.v1 import inference_pb2_grpc, registry_pb2_grpc
from observability.door_metrics import DoorMetrics
from observability.log import get_logger
from router.config import RouterConfig
from router.grpc_front import INFERENCE_SERVICE, REGISTRY_SERVICE, InferenceServicer, RegistryServicer
from router.http.server import HttpServer
from router.key_door import METRICS_PATH, OPEN_PATHS, KeyInterceptor, Lock
from router.keys import Doorkeeper, KeyBook, OpenDoor
from rpc.proof_guard import CLUSTER_SERVICE, ProofGuard, say_unproven
from rpc.server import RpcServer, is_loopback
from rpc.tls import TlsFiles, say_gaps

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Ports:
    """Where a router listens. `workers` is where workers announce themselves; it may be `grpc`."""

    http: int
    grpc: int
    workers: int


class Doors:
    """Owns the sockets from `start` to `stop`."""

    def __init__(self, config: RouterConfig) -> None:
        """Reads the key file. Raises ConfigError for one that cannot be used."""
        self._config = config
        access = config.access
        self._keys = None if access.api_keys is None else KeyBook(access.api_keys)
        self.doorkeeper: Doorkeeper = OpenDoor() if self._keys is None else self._keys
        apart = access.workers is not None
        shared_services = () if apart else (REGISTRY_SERVICE,)
        open_services = (*shared_services, CLUSTER_SERVICE)
        locks = () if self._keys is None else (KeyInterceptor(self._keys, open_services, self._refused),)
        self._guard = None if access.secret is None else ProofGuard(access.secret)
        proofs = () if self._guard is None else (self._guard,)
        services = (INFERENCE_SERVICE, *shared_services)
        self._users = RpcServer(config.grpc, services, locks if apart else (*locks, *proofs))
        self._workers = (
            RpcServer(access.workers, (REGISTRY_SERVICE,), proofs) if access.workers is not None else self._users
        )
        self._http: HttpServer | None = None
        self._metrics: DoorMetrics | None = None
        tls = config.http.tls
        self._shown = TlsFiles(tls) if tls is not None and tls.listens else None

    def measure(self, registry: CollectorRegistry) -> None:
        """Export the doors' series there."""
        self._metrics = DoorMetrics(registry, self._expires_at)

    def _refused(self, door: str) -> None:
        if self._metrics is not None:
            self._metrics.refused(door)

    def _expires_at(self) -> float:
        not_after = None if self._shown is None else self._shown.current().not_after
        return 0.0 if not_after is None else not_after.timestamp()

    def serve(self, app: ASGIApp, inference: InferenceServicer, registry: RegistryServicer) -> None:
        """Put these behind the doors; once, before `start`."""
        open_paths = OPEN_PATHS if self._config.access.protect_metrics else OPEN_PATHS | {METRICS_PATH}
        locked = app if self._keys is None else Lock(app, self._keys, open_paths, self._refused)
        self._http = HttpServer(self._config.http, locked)
        inference_pb2_grpc.add_InferenceServicer_to_server(inference, self._users.grpc_server)
        registry_pb2_grpc.add_RegistryServicer_to_server(registry, self._workers.grpc_server)
        if self._guard is not None:
            self._guard.serve(self._workers.grpc_server)

    def watch_refusals(self, listener: Callable[[str], object]) -> None:
        """Tell `listener` the method of each call that does not prove that it is of this cluster."""
        if self._guard is not None:
            self._guard.on_refused = listener

    async def start(self) -> Ports:
        """Open all doors. Raises ConfigError when a port is busy or a TLS file cannot be used; then nothing stays open."""
        assert self._http is not None
        try:
            http = self._http.bind()
            ports = Ports(http, await self._users.start(), await self._start_workers())
        except ConfigError:
            await self.stop(0.0)
            raise
        await self._http.start()
        self._warn_of_strangers()
        say_gaps(self._config.access.tls, self._guard is not None)
        if self._guard is None:
            say_unproven((self._config.access.workers or self._config.grpc).host)
        return ports

    def _warn_of_strangers(self) -> None:
        """Where others than this machine's own reach users' doors, and nobody is asked who he is, that is said."""
        for door in (self._config.http, self._config.grpc):
            asked = self._keys is not None or (door.tls is not None and door.tls.client_ca is not None)
            if not asked and not is_loopback(door.host):
                log.warning("whoever reaches this router may use it: it has no API keys (--api-keys)", host=door.host)
                return

    async def _start_workers(self) -> int:
        if self._workers is self._users:
            return self._users.port
        port = await self._workers.start()
        await self._workers.set_serving(True)
        return port

    async def set_serving(self, serving: bool) -> None:
        """What gRPC health checking says to users."""
        await self._users.set_serving(serving)

    def refresh(self) -> None:
        """Follow the key file."""
        if self._keys is not None:
            self._keys.refresh()

    async def stop(self, grace_s: float) -> None:
        """Close all doors; running calls may end within `grace_s`. Idempotent."""
        if self._http is not None:
            await self._http.stop(grace_s)
        await self._users.stop(grace_s)
        if self._workers is not self._users:
            await self._workers.stop(grace_s)
