"""`/metrics` over HTTP, in threads, for a process whose event loop has other things to do.

    connection ──▶ a thread of its own ──▶ answered, or left after `stall_s`, however it goes on
                     └── one too many: the oldest is left for it

So whoever dribbles, or opens connections and says nothing, holds no more than `_CROWD` threads, and a scraper still gets in.
Texts are made one after the other, for a share of the time only (`observability.exposition`): who asks more often waits.
Plain HTTP: numbers without prompts, for an inner network. Does not know what is measured.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import ThreadingWSGIServer

from contracts.errors import ConfigError
from observability.exposition import Allowance
from observability.log import get_logger
from rpc.server import join_address

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

log = get_logger(__name__)
_CROWD = 32
_LOOK_S = 0.1


class MetricsPort:
    """Owns the port and its threads until `close`."""

    def __init__(self, host: str, port: int, registry: CollectorRegistry, stall_s: float = 10.0) -> None:
        """Listen; ConfigError when the port is busy. Port 0 takes a free one."""
        try:
            family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            self._server = _Server(family, (str(where[0]), port), stall_s)
        except OSError as error:
            said = f"cannot listen on {join_address(host, port)} for metrics: {error.strerror or error}"
            raise ConfigError(said) from error
        self._server.set_app(_paced(prometheus_client.make_wsgi_app(registry)))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_LOOK_S,), name="metrics", daemon=True)
        self._thread.start()
        self.port = int(self._server.server_address[1])

    def close(self) -> None:
        """Give the port back. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _paced(make: WSGIApplication) -> WSGIApplication:
    allowance, turn = Allowance(time.monotonic), threading.Lock()

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        with turn:
            time.sleep(allowance.pause_s())
            begun = time.thread_time()  # what other threads do meanwhile is not its cost
            text = make(environ, start_response)
            allowance.spend(time.thread_time() - begun)
        return text

    return answer


class _Server(ThreadingWSGIServer):
    """A thread for each connection, and the end of those that take too long or are too many."""

    request_queue_size = (
        256  # not socketserver's 5: whom the kernel drops, because others came at once, tries again a second later
    )

    def __init__(self, family: int, where: tuple[str, int], stall_s: float) -> None:
        self.address_family = family
        self._stall_s = stall_s
        self._lock = threading.Lock()
        self._since: dict[socket.socket, float] = {}  # the oldest first
        super().__init__(where, _Quiet)

    def process_request(self, request: socket.socket, client_address: tuple[str, int]) -> None:  # type: ignore[override]
        """socketserver's hook: a connection is there."""
        with self._lock:
            self._since[request] = time.monotonic()
        self._cut(len(self._since) - _CROWD, "too many connections")
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """socketserver's hook, called every `_LOOK_S`."""
        super().service_actions()
        due = time.monotonic() - self._stall_s
        with self._lock:
            late = sum(since < due for since in self._since.values())
        self._cut(late, "it does not go on")

    def close_request(self, request: socket.socket) -> None:  # type: ignore[override]
        """socketserver's hook: a connection is done with."""
        with self._lock:
            self._since.pop(request, None)
        super().close_request(request)

    def handle_error(self, request: socket.socket, client_address: tuple[str, int]) -> None:  # type: ignore[override]  # noqa: ARG002
        """socketserver's hook, where an exception is current: of a caller that has gone, nothing else is known to raise."""
        log.warning("metrics not served", client=str(client_address), reason=str(sys.exc_info()[1]))

    def _cut(self, number: int, reason: str) -> None:
        """Shut the oldest; the thread of each finds that out and closes it."""
        for _ in range(number):
            with self._lock:
                if not self._since:
                    return
                oldest = next(iter(self._since))
                del self._since[oldest]
                with suppress(OSError):  # the caller was faster
                    oldest.shutdown(socket.SHUT_RDWR)
            log.info("connection cut", reason=reason, stall_s=self._stall_s)


class _Quiet(WSGIRequestHandler):
    """Logs no requests."""

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""
