"""Each native op beside the machine's limits, measured in the same round: memory read, and oneDNN's bf16 matrix product.

    share = time that the limits allow / time taken          allowed: the larger of bytes / read rate and operations / GEMM rate

Weights are more than the last cache holds, and taken in turn, as a step takes them. Does not know the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from bench.progress import Say
from bench.report import Measure, Report

if TYPE_CHECKING:
    from kernels.implementation import Kernels
    from kernels.quantised import Format

ROWS = (1, 8, 16, 1024)
CONTEXTS = (4096, 16384)
READ_BYTES = 1 << 28
GEMM = (1024, 896, 9728)
UNIT = "of the limit"
# (outputs, inputs) of a layer's four products.
SHAPES = {
    "0.5B": ((1152, 896), (896, 896), (9728, 896), (896, 4864)),
    "135M": ((960, 576), (576, 576), (3072, 576), (576, 1536)),
}
# Enough layers for more than any cache of this kind of machine.
WEIGHT_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class KernelsBenchConfig:
    """Sizes are above; these may be fewer for a trial."""

    threads: int = 2
    rounds: int = 7


@dataclass(frozen=True, slots=True)
class Work:
    """One measurement: `run` reads so many bytes and does so many operations."""

    name: str
    run: Callable[[], object]
    read_bytes: float
    operations: float = 0.0


def run_kernels(config: KernelsBenchConfig, say: Say) -> Report:
    """A minute or two."""
    import torch

    from kernels.dispatch import choose

    torch.set_num_threads(config.threads)
    torch.manual_seed(0)
    ops = choose("cpu", torch.bfloat16)
    say(f"kernels: preparing ({ops.name})")
    works = [*_linears(ops), *_quantised(ops), *_attention(ops), *_sampling(ops)]
    numbers = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    left, right = (
        torch.randn(GEMM[0], GEMM[1], dtype=torch.bfloat16),
        torch.randn(GEMM[1], GEMM[2], dtype=torch.bfloat16),
    )
    reads, products = [], []
    shares: dict[str, list[float]] = {work.name: [] for work in works}
    with torch.inference_mode():
        for work in works:
            work.run()
        for turn in range(config.rounds):
            say(f"kernels: round {turn + 1} of {config.rounds}")
            products.append(2.0 * GEMM[0] * GEMM[1] * GEMM[2] / _seconds(lambda: torch.mm(left, right)))
            for work in works:
                # The read rate drifts within seconds: it is taken anew beside each op.
                reads.append(READ_BYTES / _seconds(numbers.sum))
                allowed = max(work.read_bytes / reads[-1], work.operations / products[-1])
                shares[work.name].append(allowed / _seconds(work.run))
    return Report(
        name="kernels",
        title="The native ops as shares of the machine's limits",
        command=f"python -m bench kernels --threads {config.threads}",
        method="The limit is the larger of bytes over the read rate and operations over the rate of oneDNN's bf16 product "
        f"({' × '.join(map(str, GEMM))}), both measured in the same round; 1 is all of it. More than 1 is ahead of oneDNN, "
        "or a drift of the memory between the two. Quantised ops are held against reading their weights alone, at any rows. "
        f"Kernels: {ops.name}.",
        measures=(
            Measure(f"memory read, {config.threads} threads", "GB/s", tuple(r / 1e9 for r in reads)),
            Measure(f"bf16 GEMM, {config.threads} threads", "GFLOP/s", tuple(p / 1e9 for p in products)),
            *(Measure(name, UNIT, tuple(runs)) for name, runs in shares.items()),
        ),
    )


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _in_turn(calls: list[Callable[[], object]]) -> Callable[[], None]:
    def run() -> None:
        for call in calls:
            call()

    return run


def _linears(ops: Kernels) -> list[Work]:
    import torch

    works = []
    for label, shapes in SHAPES.items():
        a_layer = sum(outs * ins for outs, ins in shapes)
        layers = -(-WEIGHT_BYTES // (2 * a_layer))
        made = [
            (ops.linear(torch.randn(outs, ins, dtype=torch.bfloat16), None), ins)
            for _ in range(layers)
            for outs, ins in shapes
        ]
        for rows in ROWS:
            some = made if rows <= 16 else made[: 2 * len(shapes)]
            share = len(some) / len(made)
            x = {ins: torch.randn(rows, ins, dtype=torch.bfloat16) for _, ins in shapes}
            calls: list[Callable[[], object]] = [partial(op, x[ins]) for op, ins in some]
            size = layers * a_layer * share
            works.append(Work(f"linear: {label}, {rows} rows", _in_turn(calls), 2 * size, 2 * size * rows))
    return works


def _quantised(ops: Kernels) -> list[Work]:
    import torch

    from kernels.quantised import quantise

    works = []
    formats: tuple[tuple[Format, float], ...] = (("int8", 8.5), ("int4", 4.5))
    if ops.quantised is None:
        return []
    outs, ins = SHAPES["0.5B"][2]
    for name, bits in formats:
        layers = int(-(-WEIGHT_BYTES * 8 // (bits * outs * ins)))
        made = [
            ops.quantised.linear(quantise(torch.randn(outs, ins), name), None, torch.bfloat16) for _ in range(layers)
        ]
        for rows in (1, 8, 16):
            x = torch.randn(rows, ins, dtype=torch.bfloat16)
            calls: list[Callable[[], object]] = [partial(op, x) for op in made]
            works.append(Work(f"quantised: {name}, {rows} rows", _in_turn(calls), layers * outs * ins * bits / 8))
    return works


def _attention(ops: Kernels) -> list[Work]:
    """One decode row, 14 query and 2 KV heads of 64, more layers than a cache holds."""
    import torch

    from kernels.batch import Segment

    works = []
    for context in CONTEXTS:
        blocks, a_layer = context // 16, context * 2 * 2 * 64 * 2
        layers = -(-WEIGHT_BYTES // a_layer)
        memory = torch.randn(blocks, layers, 2, 16, 2, 64).to(torch.bfloat16)
        segment = Segment(0, 1, context - 1, torch.randperm(blocks).tolist())
        step = ops.kv_cache(memory, (None,) * layers).attention([segment])
        query, key, value = (torch.randn(1, heads, 64).to(torch.bfloat16) for heads in (14, 2, 2))
        calls: list[Callable[[], object]] = [partial(step, layer, query, key, value) for layer in range(layers)]
        works.append(Work(f"attention: decode at {context:,}", _in_turn(calls), float(layers * a_layer)))
    return works


def _sampling(ops: Kernels) -> list[Work]:
    """Sixteen rows, top-k and top-p; the limit is to read the logits once."""
    import torch

    from kernels.sampling import Wish

    if ops.sampling is None:
        return []
    logits = torch.randn(16, 151936).to(torch.bfloat16)
    wishes = [Wish(temperature=0.8, top_k=50, top_p=0.95, keys=(1, row)) for row in range(16)]
    sampling = ops.sampling()
    run = partial(sampling, logits, range(16), wishes)
    return [Work("sampling: 16 rows", run, float(2 * logits.numel()))]
