"""What the router pays per request to know who has a prompt's prefix: hashing, looking up, expecting, and taking news.

All of it runs on the router's event loop, so what counts is how long it holds that. Does not know policies.
"""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable

from bench.progress import Say
from bench.report import Measure, Report, Verdict
from contracts.block_hash import BlockHasher, short_names
from contracts.clock import VirtualClock
from contracts.kv_layout import KVLayout
from contracts.worker import WorkerInfo, WorkerKind, WorkerRef
from router.choosing.prefix_index import PrefixIndex

_LAYOUT = KVLayout("bench", "bfloat16", num_layers=30, num_kv_heads=3, head_size=64, block_size=16)
_NUM_TOKENS = 32_768
_BLOCKS_PER_WORKER = 20_000
_ROUNDS = 30


def run_index(say: Say) -> Report:
    """Some seconds."""
    rng = random.Random(0)
    prompt = tuple(rng.randrange(50_000) for _ in range(_NUM_TOKENS))
    hasher = BlockHasher(_LAYOUT.block_size, 0)
    hashes = hasher.chain(prompt)
    say("index: hashing")
    measures = [
        _measure("hash a prompt of 32,768 tokens, 16 a block", lambda: hasher.chain(prompt)),
        _measure("hash a prompt of 1,024 tokens", lambda: hasher.chain(prompt[:1024])),
    ]
    for num_workers in (8, 64):
        say(f"index: {num_workers} workers")
        measures += _of_workers(num_workers, hashes, rng)
    by_name = {m.name: m.spread.median for m in measures}
    verdicts = (
        Verdict(
            "32,768 tokens: hash", by_name["hash a prompt of 32,768 tokens, 16 a block"], "ms", 2.0, at_least=False
        ),
        Verdict(
            "32,768 tokens: look up, 64 workers have it all",
            by_name["64 workers: look up 32,768 tokens that all have"],
            "ms",
            1.0,
            at_least=False,
        ),
    )
    return Report(
        name="index",
        title="Who has a prompt's prefix: what it costs the router",
        command="python -m bench index",
        method=f"Milliseconds of the router's event loop; workers have {_BLOCKS_PER_WORKER:,} blocks each.",
        measures=tuple(measures),
        verdicts=verdicts,
    )


def _of_workers(num_workers: int, hashes: tuple[bytes, ...], rng: random.Random) -> list[Measure]:
    tracemalloc.start()
    index = PrefixIndex(VirtualClock(), expect_s=3600.0)
    infos = [_info(n) for n in range(num_workers)]
    num_own = _BLOCKS_PER_WORKER - len(hashes)
    for info in infos:
        index.join(info)
        index.stored(info.ref, [rng.getrandbits(64) for _ in range(num_own)])
    entry_bytes = tracemalloc.get_traced_memory()[0] / (num_workers * num_own)
    tracemalloc.stop()
    label, ref = f"{num_workers} workers", infos[0].ref
    names = short_names(hashes)
    nobody = tuple(rng.randbytes(16) for _ in range(len(hashes)))
    measures = [_measure(f"{label}: look up 32,768 tokens that nobody has", lambda: index.match((*nobody,)))]
    for info in infos:
        index.stored(info.ref, names)
    measures.append(_measure(f"{label}: look up 32,768 tokens that all have", lambda: index.match((*hashes,))))
    measures.append(_measure(f"{label}: expect 32,768 tokens somewhere", lambda: index.expect(ref, hashes)))

    def news() -> None:
        index.removed(ref, names)
        index.stored(ref, names)

    measures.append(_measure(f"{label}: take news of 2,048 blocks gone and 2,048 come", news))
    measures.append(Measure(f"{label}: memory of a block that one worker has", "bytes", (entry_bytes,)))
    return measures


def _info(number: int) -> WorkerInfo:
    ref = WorkerRef(f"w{number}", 1)
    return WorkerInfo(ref, WorkerKind.PREFILL, "host:1", "bench", _LAYOUT, (), 65_536, _BLOCKS_PER_WORKER)


def _measure(name: str, act: Callable[[], object]) -> Measure:
    act()
    runs = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        act()
        runs.append((time.perf_counter() - began) * 1e3)
    return Measure(name, "ms", tuple(runs))
