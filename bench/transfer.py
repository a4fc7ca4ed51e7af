"""How fast a hand-off's bytes move: every connector between two processes, beside memcpy of the same blocks in one.

    this process (target: region, window) ◀── connector.write ── a child process (source: region, stop-watch)

The blocks are those of 1,024 tokens; they are scattered on both sides, and each round takes other ones, so that no cache
holds them. The first pass over fresh target memory (page faults) is reported apart. Beside them: digesting the same blocks in
a digester's thread, all of them (full) or the chosen ones (sampled); each side of a hand-off does that once.
`python -m bench.transfer` prints JSON on stdout and a table on stderr. Does not measure messages, leases or engines.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
import numpy as np

from bench.machine import cpu_seconds, foreign_percent, machine_facts
from bench.progress import Say, say_on_stderr
from bench.report import Measure, Record, Report, Verdict, markdown
from bench.stats import Spread, ratio
from contracts.kv_layout import KVLayout
from contracts.worker import ConnectorAddress
from kv_transfer.blocks import block_ranges, coalesce
from kv_transfer.choose import BACKENDS, NetworkConfig, make_connectors
from kv_transfer.config import Integrity
from kv_transfer.connector import ByteRange, Connector, Write
from kv_transfer.digests import ThreadDigester, chosen_blocks
from kv_transfer.region import SharedRegion

_LAYOUT = KVLayout("bench", "bfloat16", num_layers=30, num_kv_heads=3, head_size=64, block_size=16)
SHM_SHARE_OF_MEMCPY = 0.8
TCP_GB_PER_S = 2.5
_IDLE_S = 0.5


@dataclass(frozen=True, slots=True)
class TransferBenchConfig:
    """What is moved, how often. The layout is SmolLM2-135M's in bfloat16: 360 KiB a block."""

    layout: KVLayout = _LAYOUT
    num_tokens: int = 1024
    num_sets: int = 8  # different sets of blocks, taken in turn: more than a cache holds
    rounds: int = 24

    @property
    def num_blocks(self) -> int:
        """Blocks of one hand-off."""
        return self.layout.num_blocks_for(self.num_tokens)

    @property
    def kv_bytes(self) -> int:
        """Bytes of one hand-off."""
        return self.num_blocks * self.layout.block_bytes

    @property
    def region_bytes(self) -> int:
        """Bytes of each side's KV memory."""
        return self.num_sets * self.kv_bytes

    def writes(self) -> list[tuple[Write, ...]]:
        """One hand-off's writes per set; the same on every call."""
        dice = random.Random(1)
        total = self.num_sets * self.num_blocks
        source, target = dice.sample(range(total), total), dice.sample(range(total), total)
        step = self.num_blocks
        return [
            coalesce(source[at : at + step], target[at : at + step], self.layout.block_bytes)
            for at in range(0, total, step)
        ]


@dataclass(frozen=True, slots=True)
class Job:
    """What the child is told."""

    config: TransferBenchConfig
    kind: str
    address: str
    key: int


@dataclass(frozen=True, slots=True)
class Times:
    """What the child says: seconds of each hand-off. `fresh_s` are the first over their target blocks."""

    memcpy_s: tuple[float, ...]
    full_s: tuple[float, ...]
    sampled_s: tuple[float, ...]
    fresh_s: tuple[float, ...]
    warm_s: tuple[float, ...]
    idle_percent: float  # of a core, connected and with nothing to move


def connector_kinds(say: Say) -> tuple[str, ...]:
    """Those that can be measured here; the others are named."""
    kinds = []
    for backend in BACKENDS:
        reason = backend.why_not()
        if reason is None:
            kinds.append(backend.kind)
        else:
            say(f"{backend.kind} is left out: {reason}")
    return tuple(kinds)


def run_transfer(config: TransferBenchConfig, say: Say) -> Report:
    """Some seconds. Reports bytes per second, and the bars of the hand-off."""
    measured: dict[str, Times] = {}
    for kind in connector_kinds(say):
        say(f"transfer: {kind}, {config.kv_bytes / 1e6:.1f} MB a hand-off")
        measured[kind] = asyncio.run(_measure(config, kind))
    gb = config.kv_bytes / 1e9
    memcpy = Spread(tuple(gb / t for times in measured.values() for t in times.memcpy_s))
    rows = [Measure("memcpy of the same blocks, 1 thread", "GB/s", memcpy.runs)]
    full = tuple(t for times in measured.values() for t in times.full_s)
    sampled = tuple(t for times in measured.values() for t in times.sampled_s)
    rows += [
        Measure("digests of all blocks, 1 thread", "GB/s", tuple(gb / t for t in full)),
        Measure("digests of all blocks (full), one hand-off", "ms", tuple(t * 1e3 for t in full)),
        Measure("digests of chosen blocks (sampled), one hand-off", "ms", tuple(t * 1e3 for t in sampled)),
    ]
    warm: dict[str, Spread] = {}
    for kind, times in measured.items():
        warm[kind] = Spread(tuple(gb / t for t in times.warm_s))
        rows += [
            Measure(kind, "GB/s", warm[kind].runs),
            Measure(f"{kind}, one hand-off", "ms", tuple(t * 1e3 for t in times.warm_s)),
            Measure(f"{kind}, into memory never touched before", "GB/s", tuple(gb / t for t in times.fresh_s)),
            Measure(f"{kind}, idle", "% of a core", (times.idle_percent,)),
        ]
    return Report(
        name="transfer",
        title=f"A hand-off's bytes: the KV of {config.num_tokens} tokens",
        command="python -m bench transfer",
        method=f"{config.num_blocks} scattered blocks of {config.layout.block_bytes >> 10} KiB "
        f"({config.kv_bytes / 1e6:.1f} MB) from one process to another on this machine, {config.rounds} times over "
        f"{config.num_sets} different sets of blocks; memcpy copies the same blocks within one process.",
        measures=tuple(rows),
        verdicts=(
            Verdict("shm of memcpy", ratio(warm["shm"], memcpy), "", SHM_SHARE_OF_MEMCPY, at_least=True),
            Verdict("tcp on loopback", warm["tcp"].median, "GB/s", TCP_GB_PER_S, at_least=True),
        ),
    )


async def _measure(config: TransferBenchConfig, kind: str) -> Times:
    """Be the target while a child process is the source."""
    with SharedRegion(config.region_bytes) as region:
        (connector,) = make_connectors((kind,), NetworkConfig())
        connector.expose(region)
        blocks = range(config.num_sets * config.num_blocks)
        key = connector.open_window(block_ranges(blocks, config.layout))
        job = Job(config, kind, connector.address().address, key)
        try:
            answer = await asyncio.to_thread(_run_child, job)
            _check_arrived(region)
        finally:
            await connector.close()
    return answer


def _run_child(job: Job) -> Times:
    child = subprocess.run(
        [sys.executable, "-m", "bench.transfer", "source"], input=msgspec.json.encode(job), stdout=-1, check=True
    )
    return msgspec.json.decode(child.stdout, type=Times)


def _check_arrived(region: SharedRegion) -> None:
    """Every byte of the source is a 1: a measure of bytes that did not arrive would be worth nothing."""
    if int(np.frombuffer(region.buffer, dtype=np.uint8).min()) != 1:
        raise RuntimeError("bench: not every byte has arrived")


def source_main() -> None:
    """The child: move, measure, answer on stdout."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(_source(job))))


@asynccontextmanager
async def connected_source(address: ConnectorAddress, region: SharedRegion) -> AsyncIterator[Connector]:
    """A connector that writes from `region`, all of it touched before, to the target at `address`; the region stays open."""
    np.frombuffer(region.buffer, dtype=np.uint8)[:] = 1
    (connector,) = make_connectors((address.kind,), NetworkConfig())
    connector.expose(region)
    try:
        await connector.connect(address)
        yield connector
    finally:
        await connector.close()


async def _source(job: Job) -> Times:
    config = job.config
    sets = config.writes()
    address = ConnectorAddress(job.kind, job.address)
    with SharedRegion(config.region_bytes) as region:
        async with connected_source(address, region) as connector:
            fresh = await _timed(connector, (address, job.key), sets)
            turns = [sets[i % len(sets)] for i in range(config.rounds)]
            warm = await _timed(connector, (address, job.key), turns)
            cpu_s = time.process_time()
            await asyncio.sleep(_IDLE_S)
            idle_percent = 100 * (time.process_time() - cpu_s) / _IDLE_S
        memcpy = _memcpy(np.frombuffer(region.buffer, dtype=np.uint8), turns)
        full = await _digested(region, turns, config, Integrity.FULL)
        sampled = await _digested(region, turns, config, Integrity.SAMPLED)
    return Times(memcpy, full, sampled, fresh, warm, idle_percent)


async def _timed(
    connector: Connector, where: tuple[ConnectorAddress, int], turns: Sequence[Sequence[Write]]
) -> tuple[float, ...]:
    address, key = where
    times: list[float] = []
    for writes in turns:
        began = time.perf_counter()
        await connector.write(address, key, writes)
        times.append(time.perf_counter() - began)
    return tuple(times)


async def _digested(
    region: SharedRegion, turns: Sequence[Sequence[Write]], config: TransferBenchConfig, integrity: Integrity
) -> tuple[float, ...]:
    digester, size = ThreadDigester(region), config.layout.block_bytes
    times: list[float] = []
    for number, writes in enumerate(turns):
        blocks = [ByteRange(w.source_offset + at, size) for w in writes for at in range(0, w.length, size)]
        began = time.perf_counter()
        chosen = chosen_blocks(integrity, f"hand-off {number}", 0, len(blocks))
        await digester.digests([blocks[i] for i in chosen])
        times.append(time.perf_counter() - began)
    digester.close()
    return tuple(times)


def _memcpy(source: np.ndarray[tuple[int], np.dtype[np.uint8]], turns: Sequence[Sequence[Write]]) -> tuple[float, ...]:
    target = np.ones_like(source)
    times: list[float] = []
    for writes in turns:
        began = time.perf_counter()
        for w in writes:
            np.copyto(
                target[w.target_offset : w.target_offset + w.length],
                source[w.source_offset : w.source_offset + w.length],
            )
        times.append(time.perf_counter() - began)
    return tuple(times)


def main() -> None:
    """Measure once, without writing files."""
    facts, begin = machine_facts(), cpu_seconds()
    report = run_transfer(TransferBenchConfig(), say_on_stderr())
    record = Record(facts, report, foreign_percent(begin, cpu_seconds(), facts.cores))
    sys.stdout.buffer.write(msgspec.json.encode(record) + b"\n")
    sys.stderr.write(markdown(record))


if __name__ == "__main__":
    if sys.argv[1:] == ["source"]:
        source_main()
    else:
        main()
