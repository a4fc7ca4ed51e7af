"""What it costs to let in only who may come in: checking an API key, TLS on a streamed event, on a call, on a connection.

    key         KeyBook.caller with 1 and 10,000 keys in the file; in this process
    HTTP        CPU of the server for each event of a stream and for each connection, plain and over TLS, in turns
    gRPC        one health check over loopback, plain and with certificates of both sides, in turns

Clients of HTTP run in a process of their own, so that the CPU counted is the server's. Does not know routers or workers.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from starlette.types import Receive, Scope, Send

from bench.progress import Say
from bench.report import Measure, Report, Verdict
from bench.stats import Spread
from router.config import HttpConfig
from router.http.server import HttpServer
from router.keys import KeyBook, hash_of, new_key
from rpc.authority import CA_FILE, CERT_FILE, KEY_FILE, Authority, Period, write_identity
from rpc.secure_channel import opener_for
from rpc.server import RpcServer, ServerConfig
from rpc.tls import TlsConfig
from rpc.tls_context import client_context

_HOST = "127.0.0.1"
_REQUEST = b"GET / HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n"
_KEYS = (1, 10_000)
_TURN = 16  # events between two turns of the loop, as when a step's tokens arrive together
Runs = dict[str, list[float]]
Client = Callable[[int, TlsConfig | None, int], None]


@dataclass(frozen=True, slots=True)
class SecurityBenchConfig:
    """How often: checks, events of each of four streams, connections and calls of one round; bytes of an event."""

    rounds: int = 5
    checks: int = 5000
    events: int = 10_000
    event_bytes: int = 250
    connections: int = 200
    calls: int = 500


def run_security(config: SecurityBenchConfig, say: Say) -> Report:
    """Half a minute."""
    with tempfile.TemporaryDirectory(prefix="diptych-bench-") as folder:
        say("security: keys")
        checks = _checks(config, Path(folder))
        tls = _identity(Path(folder))
        say("security: HTTP")
        events, connections = _http(config, tls)
        say("security: gRPC")
        calls = uvloop.run(_calls(config, tls))
    median = {name: Spread(tuple(runs)).median for name, runs in (checks | events | connections).items()}
    added = median["event over TLS"] - median["event plain"]
    return Report(
        name="security",
        title="What API keys and TLS cost",
        command="python -m bench security",
        method=f"{config.rounds} rounds, in turns: {config.checks} checks of one key; {4 * config.events} events of "
        f"{config.event_bytes} B over four streams, and {config.connections} connections one after another, CPU of the "
        f"server's process; {config.calls} health checks one after another. P-256, mutual for gRPC.",
        measures=tuple(
            Measure(name, "us", tuple(s * 1e6 for s in runs))
            for group in (checks, events, connections, calls)
            for name, runs in group.items()
        ),
        verdicts=(
            Verdict("a key checked among 10,000", median["key among 10,000"] * 1e6, "us", 20.0, at_least=False),
            Verdict("CPU that TLS adds to a streamed event", added * 1e6, "us", 5.0, at_least=False),
        ),
    )


def _checks(config: SecurityBenchConfig, folder: Path) -> Runs:
    runs: Runs = {}
    for num_keys in _KEYS:
        keys = [new_key() for _ in range(num_keys)]
        path = folder / f"{num_keys}.json"
        path.write_text(json.dumps({"keys": [{"name": f"u{i}", "hash": hash_of(key)} for i, key in enumerate(keys)]}))
        book, authorization = KeyBook(path), f"Bearer {keys[-1]}"
        for _ in range(config.rounds):
            begin = time.perf_counter()
            for _ in range(config.checks):
                book.caller(authorization)
            runs.setdefault(f"key among {num_keys:,}", []).append((time.perf_counter() - begin) / config.checks)
    return runs


def _identity(folder: Path) -> TlsConfig:
    period = Period.of_days(1)
    authority = Authority.new("bench", period)
    write_identity(folder, authority, authority.issue((_HOST,), period))
    ca = folder / CA_FILE
    return TlsConfig(cert=folder / CERT_FILE, key=folder / KEY_FILE, ca=ca, client_ca=ca)


def _http(config: SecurityBenchConfig, tls: TlsConfig) -> tuple[Runs, Runs]:
    """CPU seconds of the server for an event, and for a connection."""
    shown = TlsConfig(cert=tls.cert, key=tls.key)
    events: Runs = {}
    connections: Runs = {}
    for _ in range(config.rounds):
        for name, server, client in (("plain", None, None), ("over TLS", shown, tls)):
            cpu_s = uvloop.run(_served(config, server, (read_streams, client, 4)))
            events.setdefault(f"event {name}", []).append(cpu_s / (4 * config.events))
            cpu_s = uvloop.run(_served(config, server, (open_connections, client, config.connections)))
            connections.setdefault(f"connection {name}", []).append(cpu_s / config.connections)
    return events, connections


async def _served(
    config: SecurityBenchConfig, tls: TlsConfig | None, load: tuple[Client, TlsConfig | None, int]
) -> float:
    """CPU seconds of this process while a client's process does `load`: what it runs, as whom, how often."""
    data = b"data: " + b"x" * (config.event_bytes - 8) + b"\n\n"

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for i in range(config.events):
            await send({"type": "http.response.body", "body": data, "more_body": True})
            if i % _TURN == 0:
                await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    server = HttpServer(HttpConfig(host=_HOST, port=0, tls=tls), stream)
    port = server.bind()
    await server.start()
    run, client, count = load
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)  # an Event would be a named semaphore, which outlives whoever is killed
    process = context.Process(target=_client, args=(run, (port, client, count), there), daemon=True)
    process.start()
    there.close()
    while not here.poll():
        await asyncio.sleep(0.01)
    begin = time.process_time()
    while process.is_alive():
        await asyncio.sleep(0.02)
    spent_s = time.process_time() - begin
    await server.stop(1.0)
    if process.exitcode != 0:
        raise RuntimeError(f"the client ended with {process.exitcode}")
    return spent_s


def _client(run: Client, args: tuple[int, TlsConfig | None, int], started: Connection) -> None:
    started.close()  # which the other end hears
    run(*args)


def read_streams(port: int, tls: TlsConfig | None, count: int) -> None:
    """The client's process: `count` streams at once, read to their ends."""
    context = None if tls is None else client_context(tls)

    async def read() -> None:
        reader, writer = await asyncio.open_connection(_HOST, port, ssl=context)
        writer.write(_REQUEST)
        while await reader.read(1 << 16):
            pass
        writer.close()

    async def read_all() -> None:
        await asyncio.gather(*(read() for _ in range(count)))

    uvloop.run(read_all())


def open_connections(port: int, tls: TlsConfig | None, count: int) -> None:
    """The client's process: `count` connections one after another, closed as soon as they stand."""
    context = None if tls is None else client_context(tls)

    async def open_all() -> None:
        for _ in range(count):
            _, writer = await asyncio.open_connection(_HOST, port, ssl=context)
            writer.close()

    uvloop.run(open_all())


async def _calls(config: SecurityBenchConfig, tls: TlsConfig) -> Runs:
    """Wall seconds of one call, both ends in this process."""
    runs: Runs = {}
    for _ in range(config.rounds):
        for name, identity in (("plain", None), ("over mutual TLS", tls)):
            server = RpcServer(ServerConfig(tls=identity), ())
            address = f"{_HOST}:{await server.start()}"
            async with opener_for(identity)(address, None) as channel:
                check = health_pb2_grpc.HealthStub(channel).Check
                begin = time.perf_counter()
                await check(health_pb2.HealthCheckRequest())
                connected = time.perf_counter()
                for _ in range(config.calls):
                    await check(health_pb2.HealthCheckRequest())
                called = time.perf_counter()
            runs.setdefault(f"gRPC call {name}", []).append((called - connected) / config.calls)
            runs.setdefault(f"gRPC connect and first call {name}", []).append(connected - begin)
            await server.stop(0.0)
    return runs
