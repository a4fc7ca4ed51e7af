"""Finished requests as tests want them."""

from dashboard.requests import Finished
from observability.samples import RequestSample
from observability.stages import HandoffStats, StageTimes

STAGES = StageTimes(0.001, 0.002, 0.003, 0.004, 0.030, 0.005, 0.006, 0.007, 0.008, 0.009)
HANDOFF = HandoffStats("shm", kv_bytes=2_000_000, num_blocks=3, num_cached_blocks=1, transfer_s=0.001, exposed_s=0.0005)


def finished(
    name="r", *, outcome="length", ttft_s=0.05, e2e_s=1.05, tokens=11, at_s=0.0, handoff=True, gap_s=0.034, **more
) -> Finished:
    handoffs = (HANDOFF,) if handoff and ttft_s is not None else ()
    succeeded = outcome in ("stop", "length")
    sample = RequestSample(
        outcome,
        succeeded,
        "disaggregated",
        e2e_s,
        ttft_s,
        100,
        16,
        tokens,
        tokens,
        tokens,
        STAGES,
        handoffs,
        gap_s=gap_s,
        excused=outcome in ("CANCELLED", "INVALID_ARGUMENT"),
    )
    return Finished(name, at_s, sample, **more)
