"""What this machine can do at most, taken beside every measurement: memory read, memory copy, bf16 arithmetic.

The best of several tries, because a limit is what is possible; the tries are kept. Does not know the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from bench.report import Measure, Report
from bench.stats import Spread

READ_BYTES = 1 << 29  # far beyond the last-level cache
COPY_BYTES = 1 << 28
GEMM_SIZE = 2048


@dataclass(frozen=True, slots=True)
class Limits:
    """The machine's limits in one run; units in the names."""

    threads: int
    read_gb_per_s: Spread
    memcpy_gb_per_s: Spread  # bytes copied per second by one thread; reads and writes each pass once
    gemm_gflop_per_s: Spread

    def measures(self) -> tuple[Measure, ...]:
        """As rows of a report."""
        return (
            Measure(f"memory read, {self.threads} threads", "GB/s", self.read_gb_per_s.runs),
            Measure("memcpy, 1 thread", "GB/s", self.memcpy_gb_per_s.runs),
            Measure(f"bf16 GEMM {GEMM_SIZE}³, {self.threads} threads", "GFLOP/s", self.gemm_gflop_per_s.runs),
        )


def measure_limits(threads: int, tries: int = 5) -> Limits:
    """Take all three, about three seconds. Leaves torch at `threads` threads."""
    import torch

    torch.set_num_threads(threads)
    return Limits(threads, _read(tries), _memcpy(tries), _gemm(tries))


def limits_report(limits: Limits, command: str) -> Report:
    """The limits alone, as a report without bars."""
    return Report(
        name="limits",
        title="What this machine can do",
        command=command,
        method="Memory read: the sum of 512 MiB of float32 (one addition per 4 bytes). "
        "memcpy: 256 MiB from one buffer to another by one thread. GEMM: bf16 through oneDNN. "
        "The limit is the highest of the tries.",
        measures=limits.measures(),
    )


def _timed(run: Callable[[], object], tries: int) -> list[float]:
    run()
    times = []
    for _ in range(tries):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return times


def _read(tries: int) -> Spread:
    import torch

    numbers = torch.ones(READ_BYTES // 4)
    with torch.inference_mode():
        return Spread(tuple(READ_BYTES / 1e9 / t for t in _timed(numbers.sum, tries)))


def _memcpy(tries: int) -> Spread:
    import numpy as np

    source, target = np.ones(COPY_BYTES, np.uint8), np.ones(COPY_BYTES, np.uint8)
    return Spread(tuple(COPY_BYTES / 1e9 / t for t in _timed(lambda: np.copyto(target, source), tries)))


def _gemm(tries: int) -> Spread:
    import torch

    left, right = (torch.randn(GEMM_SIZE, GEMM_SIZE, dtype=torch.bfloat16) for _ in range(2))
    gflop = 2 * GEMM_SIZE**3 / 1e9
    with torch.inference_mode():
        return Spread(tuple(gflop / t for t in _timed(lambda: torch.mm(left, right), tries)))
