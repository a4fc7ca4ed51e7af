"""What it costs that processes prove to each other that they know the cluster's secret: per call, per connection, per byte.

    proof of a call            made, and made and checked, for a small and a large request; in this process
    one call over loopback     Handoff.Renew to a service that does nothing, without and with a secret, in turns
    a connector's session      connect, and a large write, without and with a secret, in turns

Does not know engines or routers.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import grpc
import uvloop

from bench.progress import Say
from bench.report import Measure, Report, Verdict
from bench.stats import Spread
from contracts.pb.diptych.v1 import handoff_pb2, handoff_pb2_grpc
from contracts.secret import ClusterSecret, new_nonce
from kv_transfer.connector import ByteRange, Connector, Write
from kv_transfer.region import SharedRegion
from kv_transfer.shm import ShmConnector
from kv_transfer.tcp import TcpConnector
from rpc.call_proof import CallProver, CallSession
from rpc.channel import open_channel
from rpc.proof_guard import ProofGuard
from rpc.proving_channel import proving
from rpc.server import RpcServer, ServerConfig

_METHOD = "/diptych.v1.Handoff/Commit"
_SECRET = ClusterSecret(b"a secret for a measurement")
_CONNECTORS: dict[str, Callable[[ClusterSecret | None], Connector]] = {
    "shm": lambda secret: ShmConnector(secret=secret),
    "tcp": lambda secret: TcpConnector(secret=secret),
}
_WAYS: dict[str, ClusterSecret | None] = {"without": None, "with": _SECRET}
Runs = dict[str, list[float]]
_SMALL = 1 << 16


@dataclass(frozen=True, slots=True)
class ProofsBenchConfig:
    """How often: proofs, calls and connects of one round; bytes of one write."""

    rounds: int = 7
    proofs: int = 2000
    calls: int = 300
    connects: int = 20
    small_bytes: int = 200
    large_bytes: int = 20_000
    write_bytes: int = 64 << 20


def run_proofs(config: ProofsBenchConfig, say: Say) -> Report:
    """Half a minute."""
    say("proofs: of calls")
    proofs = _proofs(config)
    say("proofs: calls over loopback")
    calls = uvloop.run(_calls(config))
    say("proofs: sessions of connectors")
    connects, writes = uvloop.run(_sessions(config))
    median = {name: Spread(tuple(runs)).median for name, runs in (proofs | calls | writes).items()}
    checked = median[f"made and checked, {config.small_bytes} B"]
    verdicts = [
        Verdict("a small call's proof, made and checked", checked * 1e6, "us", 20.0, at_least=False),
        *(
            Verdict(f"{kind}: a write's time with a secret, of that without", ratio, "x", 1.1, at_least=False)
            for kind in _CONNECTORS
            for ratio in (median[f"{kind} write with"] / median[f"{kind} write without"],)
        ),
    ]
    return Report(
        name="proofs",
        title="What proving the cluster's secret costs",
        command="python -m bench proofs",
        method=f"{config.rounds} rounds, in turns: {config.proofs} proofs, {config.calls} calls one after another, "
        f"{config.connects} connects by a connector each, one write of {config.write_bytes >> 20} MiB.",
        measures=(
            *(Measure(f"proof {name}", "us", tuple(s * 1e6 for s in runs)) for name, runs in proofs.items()),
            *(Measure(f"call {name} a secret", "us", tuple(s * 1e6 for s in runs)) for name, runs in calls.items()),
            *(Measure(f"{name} a secret", "us", tuple(s * 1e6 for s in runs)) for name, runs in connects.items()),
            *(Measure(f"{name} a secret", "ms", tuple(s * 1e3 for s in runs)) for name, runs in writes.items()),
        ),
        verdicts=tuple(verdicts),
    )


def _proofs(config: ProofsBenchConfig) -> Runs:
    server, nonce = CallProver(_SECRET), new_nonce()
    session = CallSession(_SECRET, nonce, server.begin(nonce))
    runs: Runs = {}
    for _ in range(config.rounds):
        for num_bytes in (config.small_bytes, config.large_bytes):
            body = bytes(num_bytes)
            begin = time.perf_counter()
            for _ in range(config.proofs):
                session.token(_METHOD, body)
            made = time.perf_counter()
            for _ in range(config.proofs):
                server.check([session.token(_METHOD, body)], _METHOD, body)
            checked = time.perf_counter()
            runs.setdefault(f"made, {num_bytes} B", []).append((made - begin) / config.proofs)
            runs.setdefault(f"made and checked, {num_bytes} B", []).append((checked - made) / config.proofs)
    return runs


async def _renew(request: handoff_pb2.RenewRequest, context: object) -> handoff_pb2.RenewResponse:
    """Nothing."""
    del request, context
    return handoff_pb2.RenewResponse()


def _idle_service() -> grpc.GenericRpcHandler:
    made = grpc.unary_unary_rpc_method_handler(
        _renew, handoff_pb2.RenewRequest.FromString, handoff_pb2.RenewResponse.SerializeToString
    )
    return grpc.method_handlers_generic_handler("diptych.v1.Handoff", {"Renew": made})


async def _calls(config: ProofsBenchConfig) -> Runs:
    runs: Runs = {way: [] for way in _WAYS}
    for _ in range(config.rounds):
        for way, secret in _WAYS.items():
            guard = None if secret is None else ProofGuard(secret)
            server = RpcServer(ServerConfig(), (), () if guard is None else (guard,))
            server.grpc_server.add_generic_rpc_handlers((_idle_service(),))
            if guard is not None:
                guard.serve(server.grpc_server)
            address = f"127.0.0.1:{await server.start()}"
            async with proving(open_channel, secret)(address, None) as channel:
                stub = handoff_pb2_grpc.HandoffStub(channel)
                request = handoff_pb2.RenewRequest(handoff_ids=["a hand-off's id"])
                await stub.Renew(request)
                begin = time.perf_counter()
                for _ in range(config.calls):
                    await stub.Renew(request)
                runs[way].append((time.perf_counter() - begin) / config.calls)
            await server.stop(0)
    return runs


async def _sessions(config: ProofsBenchConfig) -> tuple[Runs, Runs]:
    connects: Runs = {}
    writes: Runs = {}
    with SharedRegion(config.write_bytes) as ours, SharedRegion(config.write_bytes) as theirs:
        for region in (ours, theirs):
            region.populate()
        for _ in range(config.rounds):
            for kind, make in _CONNECTORS.items():
                for way, secret in _WAYS.items():
                    connects.setdefault(f"{kind} connect {way}", []).append(
                        await _connect(partial(make, secret), config)
                    )
                    writes.setdefault(f"{kind} write {way}", []).append(
                        await _write(partial(make, secret), ours, theirs)
                    )
    return connects, writes


async def _connect(make: Callable[[], Connector], config: ProofsBenchConfig) -> float:
    """Seconds of one connect to little memory, which is mapped soon."""
    took = 0.0
    with SharedRegion(_SMALL) as ours, SharedRegion(_SMALL) as theirs:
        target = make()
        target.expose(theirs)
        for _ in range(config.connects):
            source = make()
            source.expose(ours)
            took += await _timed(partial(source.connect, target.address()))
            await source.close()
        await target.close()
    return took / config.connects


async def _write(make: Callable[[], Connector], ours: SharedRegion, theirs: SharedRegion) -> float:
    source, target, size = make(), make(), len(ours.buffer)
    source.expose(ours)
    target.expose(theirs)
    await source.connect(target.address())
    key = target.open_window([ByteRange(0, size)])
    took = await _timed(lambda: source.write(target.address(), key, [Write(0, 0, size)]))
    target.close_window(key)
    await source.close()
    await target.close()
    return took


async def _timed(work: Callable[[], Awaitable[None]]) -> float:
    begin = time.perf_counter()
    await work()
    return time.perf_counter() - begin
