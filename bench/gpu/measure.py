"""Times calls on a device, the limits they are held against, and the lines of the table. Does not know what is called."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.gpu.sizes import Sizes

# Larger than any cache: written between tries, so that each finds its data in memory.
_FLUSH_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table. `error` is the largest deviation from float64, None where nothing is compared."""

    what: str
    error: float | None = None
    tolerance: float = 0.0
    ms: float | None = None
    rate: str = ""
    share: float | None = None  # of the limit

    @property
    def right(self) -> bool:
        """Whether it is within its tolerance; NaN is not."""
        return self.error is None or self.error <= self.tolerance

    def text(self) -> str:
        """For the table."""
        verdict = "" if self.error is None else f"{self.error:.1e} {'ok' if self.right else 'WRONG'}"
        took = "" if self.ms is None else f"{self.ms:.3f}"
        share = "" if self.share is None else f"{self.share:.0%}"
        return f"{self.what:<44} {verdict:>14} {took:>10} {self.rate:>14} {share:>6}"


class Stopwatch:
    """Median milliseconds of a call, on `device`, with cold caches."""

    def __init__(self, device: torch.device, tries: int) -> None:
        self._cuda = device.type == "cuda"
        self._tries = tries
        self._flush = torch.empty(_FLUSH_BYTES if self._cuda else 1, dtype=torch.uint8, device=device)

    def ms(self, call: Callable[[], object]) -> float:
        """Runs it once more than it is timed: the first compiles."""
        call()
        return statistics.median(self._once(call) for _ in range(self._tries))

    def wall_ms(self, call: Callable[[], object], warm: int = 2) -> float:
        """As a caller sees it, with all that the host does, on warm caches."""
        for _ in range(warm if self._cuda else 0):
            call()
        took = []
        for _ in range(self._tries):
            self._wait()
            begun = time.perf_counter()
            call()
            self._wait()
            took.append(1e3 * (time.perf_counter() - begun))
        return statistics.median(took)

    def _once(self, call: Callable[[], object]) -> float:
        self._flush.zero_()
        if not self._cuda:
            begun = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - begun)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


@dataclass(frozen=True, slots=True)
class Limits:
    """What the device can do, measured."""

    bytes_per_s: float
    flop_per_s: float

    def of_bytes(self, what: str, ms: float, num_bytes: float) -> Line:
        """A line for a call that moves so many bytes."""
        rate = num_bytes / ms * 1e3
        return Line(what, ms=ms, rate=f"{rate / 1e9:.0f} GB/s", share=rate / self.bytes_per_s)

    def of_flop(self, what: str, ms: float, flop: float) -> Line:
        """A line for a call of so many operations."""
        rate = flop / ms * 1e3
        return Line(what, ms=ms, rate=f"{rate / 1e12:.1f} TFLOP/s", share=rate / self.flop_per_s)


def measure_limits(device: torch.device, sizes: Sizes, watch: Stopwatch) -> tuple[Limits, tuple[Line, ...]]:
    """A copy's bandwidth (bytes read and written), and the rate of a square bfloat16 product by cuBLAS."""
    source = torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_ms = watch.ms(lambda: target.copy_(source))
    a = torch.randn(sizes.gemm, sizes.gemm, dtype=torch.bfloat16, device=device)
    gemm_ms = watch.ms(lambda: a @ a)
    limits = Limits(2 * sizes.copy_bytes / copy_ms * 1e3, 2.0 * sizes.gemm**3 / gemm_ms * 1e3)
    return limits, (
        limits.of_bytes("limit: memory, by a copy", copy_ms, 2 * sizes.copy_bytes),
        limits.of_flop("limit: bfloat16 product", gemm_ms, 2.0 * sizes.gemm**3),
    )
