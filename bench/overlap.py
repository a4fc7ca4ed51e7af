"""What of a transfer can be felt: how long a prompt's KV still travels after its last chunk is computed.

    a child process computes a prompt in chunks (one core is kept busy) ── Pusher, connector ──▶ this process: region, window

A transfer of k pieces that goes on while later chunks compute is felt for max(t, k·t - T_p·(k-1)/k): t is the time of one piece
after a chunk, with nothing before it; T_p is that of the prompt. Both sides of that are measured here, for long prompts (all but
the last piece is hidden) and for short ones (the transfer is the longer). What computes is a stand-in; the transfer is the
product's own, from `advance` on.
`python -m bench overlap`. Does not measure messages, leases or engines: `ttft` does.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from bench.progress import Say
from bench.report import Measure, Report, Table, Verdict
from bench.transfer import connected_source, connector_kinds
from contracts.clock import MonotonicClock
from contracts.kv_layout import KVLayout
from contracts.ticket import Grant
from contracts.worker import ConnectorAddress, WorkerRef
from kv_transfer.blocks import Pusher, block_ranges
from kv_transfer.choose import NetworkConfig, make_connectors
from kv_transfer.config import SenderConfig
from kv_transfer.connector import Connector
from kv_transfer.links import Link, Side
from kv_transfer.region import SharedRegion

EXPOSED_MS = 2.0
FORMULA_WITHIN = 0.30
_REFS = (WorkerRef("source", 1), WorkerRef("target", 1))
_BUSY_BYTES = 256 << 10  # what one turn of the stand-in for computing goes over


@dataclass(frozen=True, slots=True)
class OverlapBenchConfig:
    """What is moved, in how many pieces, beside how long a prompt."""

    layout: KVLayout
    num_tokens: int = 1024
    pieces: tuple[int, ...] = (1, 2, 4, 8)
    long_s: float = 0.2  # a prompt that takes longer than its transfer
    short: float = 0.5  # a prompt that takes this share of its transfer
    rounds: int = 9
    num_sets: int = 6  # different sets of blocks, taken in turn: more than a cache holds

    @property
    def num_blocks(self) -> int:
        """Blocks of one prompt."""
        return self.layout.num_blocks_for(self.num_tokens)

    @property
    def region_bytes(self) -> int:
        """Bytes of each side's KV memory."""
        return self.num_sets * self.num_blocks * self.layout.block_bytes

    def blocks(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Each set's source and target blocks, scattered."""
        dice = random.Random(1)
        total, step = self.num_sets * self.num_blocks, self.num_blocks
        source, target = dice.sample(range(total), total), dice.sample(range(total), total)
        return [(tuple(source[at : at + step]), tuple(target[at : at + step])) for at in range(0, total, step)]


@dataclass(frozen=True, slots=True)
class Job:
    """What the child is told."""

    config: OverlapBenchConfig
    kind: str
    address: str
    key: int


@dataclass(frozen=True, slots=True)
class Cell:
    """One number of pieces beside one prompt; seconds. `exposed_s` are the rounds."""

    pieces: int
    long: bool
    prompt_s: float
    piece_s: float
    exposed_s: tuple[float, ...]

    @property
    def predicted_s(self) -> float:
        """What the formula says."""
        hidden_s = self.prompt_s * (self.pieces - 1) / self.pieces
        return max(self.piece_s, self.pieces * self.piece_s - hidden_s)

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return statistics.median(self.exposed_s) / self.predicted_s


def run_overlap(config: OverlapBenchConfig, say: Say) -> Report:
    """Half a minute."""
    cells: dict[str, tuple[Cell, ...]] = {}
    for kind in connector_kinds(say):
        say(f"overlap: {kind}")
        cells[kind] = asyncio.run(_measure(config, kind))
    whole = {kind: next(c for c in these if c.pieces == 1 and c.long) for kind, these in cells.items()}
    off = {kind: max(abs(c.ratio - 1) for c in these) for kind, these in cells.items()}
    mb = config.num_blocks * config.layout.block_bytes / 1e6
    return Report(
        name="overlap",
        title=f"What of a transfer is felt after the last chunk: {config.num_tokens} tokens",
        command="python -m bench overlap",
        method=f"{config.num_blocks} scattered blocks ({mb:.1f} MB) pushed in 1 to {max(config.pieces)} pieces between two "
        f"processes while one core is kept busy, {config.rounds} times over {config.num_sets} sets of blocks; "
        f"from the end of the last chunk until all has landed. A long prompt takes {config.long_s * 1e3:.0f} ms, a short "
        f"one {config.short:.0%} of its transfer.",
        measures=tuple(_measure_of(kind, cell) for kind, these in cells.items() for cell in these),
        verdicts=(
            Verdict(
                "shm, all in one chunk: felt after it",
                statistics.median(whole["shm"].exposed_s) * 1e3,
                "ms",
                EXPOSED_MS,
                at_least=False,
            ),
            *(
                Verdict(f"{kind}: farthest from the formula", worst, "", FORMULA_WITHIN, at_least=False)
                for kind, worst in off.items()
            ),
        ),
        tables=(_table(cells),),
    )


def _measure_of(kind: str, cell: Cell) -> Measure:
    name = (
        f"{kind}, {cell.pieces} piece{'s' if cell.pieces > 1 else ''}, {'long' if cell.long else 'short'} prompt: felt"
    )
    return Measure(name, "ms", tuple(t * 1e3 for t in cell.exposed_s))


def _table(cells: Mapping[str, tuple[Cell, ...]]) -> Table:
    rows = tuple(
        (
            kind,
            str(cell.pieces),
            f"{cell.prompt_s * 1e3:.3g}",
            f"{cell.piece_s * 1e3:.3g}",
            f"{cell.predicted_s * 1e3:.3g}",
            f"{statistics.median(cell.exposed_s) * 1e3:.3g}",
            f"{cell.ratio:.2f}",
        )
        for kind, these in cells.items()
        for cell in these
    )
    columns = ("connector", "pieces k", "prompt T_p, ms", "a piece t, ms", "formula, ms", "felt, ms", "felt / formula")
    return Table("The formula max(t, k·t - T_p·(k-1)/k) beside what was measured", columns, rows)


async def _measure(config: OverlapBenchConfig, kind: str) -> tuple[Cell, ...]:
    """Be the target while a child process is the source."""
    with SharedRegion(config.region_bytes) as region:
        region.populate()
        (connector,) = make_connectors((kind,), NetworkConfig())
        connector.expose(region)
        key = connector.open_window(block_ranges(range(config.num_sets * config.num_blocks), config.layout))
        job = Job(config, kind, connector.address().address, key)
        try:
            child = await asyncio.to_thread(
                subprocess.run,
                [sys.executable, "-m", "bench.overlap"],
                input=msgspec.json.encode(job),
                stdout=subprocess.PIPE,
                check=True,
            )
        finally:
            await connector.close()
    return msgspec.json.decode(child.stdout, type=tuple[Cell, ...])


def source_main() -> None:
    """The child: compute and push, measure, answer on stdout."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(_source(job))))


async def _source(job: Job) -> tuple[Cell, ...]:
    config = job.config
    address = ConnectorAddress(job.kind, job.address)
    with SharedRegion(config.region_bytes) as region, ThreadPoolExecutor(1) as computing:
        async with connected_source(address, region) as connector:
            prompts = _Prompts(config, connector, (address, job.key), computing)
            await prompts.once(1, 0.0, config.num_tokens)  # nothing is measured for the first time
            return tuple([await _cell(prompts, k, long) for k, long in _cells(config)])


def _cells(config: OverlapBenchConfig) -> list[tuple[int, bool]]:
    """Numbers of pieces beside long prompts, and one beside a short prompt."""
    return [*((k, True) for k in config.pieces), (4, False)]


async def _cell(prompts: _Prompts, pieces: int, long: bool) -> Cell:
    """A piece by itself and the whole in turns, so that both see the same machine."""
    config = prompts.config
    tokens = config.num_tokens // pieces
    prompt_s = config.long_s
    if not long:
        at_once = [await prompts.once(1, 0.0, tokens) for _ in range(config.rounds)]
        prompt_s = config.short * pieces * statistics.median(at_once)
    alone: list[float] = []
    felt: list[float] = []
    for _ in range(config.rounds):
        alone.append(await prompts.once(1, prompt_s / pieces, tokens))  # after a chunk as the last one is
        felt.append(await prompts.once(pieces, prompt_s, config.num_tokens))
    return Cell(pieces, long, prompt_s, statistics.median(alone), tuple(felt))


class _Prompts:
    """Computes and pushes prompts, each over the next set of blocks."""

    def __init__(
        self,
        config: OverlapBenchConfig,
        connector: Connector,
        window: tuple[ConnectorAddress, int],
        computing: ThreadPoolExecutor,
    ) -> None:
        self.config = config
        self._window = window
        self._side = Side(_REFS[0], config.layout, (connector,), MonotonicClock())
        self._link = Link(_REFS[1], connector, window[0])
        self._computing = computing
        self._sets = config.blocks()
        self._turn = 0

    async def once(self, pieces: int, prompt_s: float, num_tokens: int) -> float:
        """Seconds from the end of the last chunk until every byte of these tokens has landed."""
        source, target = self._sets[self._turn % len(self._sets)]
        self._turn += 1
        blocks = self.config.layout.num_blocks_for(num_tokens)
        source, target = source[:blocks], target[:blocks]
        pusher = Pusher(self._side, num_tokens, SenderConfig(), "bench")
        grant = Grant("bench", *_REFS, target, 0, 60.0, (self._window,))
        pushing = asyncio.ensure_future(pusher.push(self._link, grant))
        loop = asyncio.get_running_loop()
        for piece in range(1, pieces + 1):
            await loop.run_in_executor(self._computing, _compute, prompt_s / pieces)
            if piece < pieces:
                pusher.advance(num_tokens * piece // pieces, source)
        began = time.perf_counter()
        pusher.finish(source)
        await pushing
        return time.perf_counter() - began


def _compute(for_s: float) -> None:
    """Keep one core busy without the interpreter's lock, as an engine's step does."""
    end = time.perf_counter() + for_s
    numbers = np.ones(_BUSY_BYTES // 4, dtype=np.float32)
    while time.perf_counter() < end:
        np.sqrt(numbers, out=numbers)


def of_layout(layout: KVLayout, rounds: int | None) -> OverlapBenchConfig:
    """The usual measurement of one model's KV."""
    config = OverlapBenchConfig(layout)
    return replace(config, rounds=rounds or config.rounds)


if __name__ == "__main__":
    source_main()
