"""The engine alone, without doors: how long one batch takes, and how many prompts a second go through when all are there at once.

    batch_latency     a batch of fixed shape, again and again       vLLM's `bench latency`: avg_latency, latencies, percentiles
    throughput        as many prompts as fit, until all are done    vLLM's `bench throughput`: tokens_per_second

Does not load models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from bench.serving.measures import Json, JsonObject
from bench.serving.requests import BenchRequest
from contracts.errors import ConfigError, InternalError, InvalidRequest
from contracts.request import GenerationRequest
from contracts.sampling import SamplingParams
from engine.engine import Engine

PERCENTILES = (10, 25, 50, 75, 90, 99)


def batch_latency(
    engine: Engine, batches: Sequence[Sequence[BenchRequest]], warmups: int, on_done: Callable[[], None] = lambda: None
) -> JsonObject:
    """Seconds from admitting a batch to its last token, of every batch after the first `warmups`. Raises ConfigError."""
    latencies = []
    for number, batch in enumerate(batches):
        took_s = _run(engine, batch, f"latency-{number}")
        if number >= warmups:
            latencies.append(took_s)
        on_done()
    listed: list[Json] = [*latencies]
    percentiles: JsonObject = {f"{q}": float(np.percentile(latencies, q)) for q in PERCENTILES}
    return {"avg_latency": float(np.mean(latencies)), "latencies": listed, "percentiles": percentiles}


def throughput(
    engine: Engine, requests: Sequence[BenchRequest], on_done: Callable[[], None] = lambda: None
) -> JsonObject:
    """All of them at once, until the last has ended; `on_done` is told of each. ConfigError names the prompt that cannot run."""
    elapsed_s = _run(engine, requests, "throughput", on_done)
    prompt_tokens = sum(len(request.prompt) for request in requests)
    output_tokens = sum(request.output_len for request in requests)
    return {
        "elapsed_time": elapsed_s,
        "num_requests": len(requests),
        "total_num_tokens": prompt_tokens + output_tokens,
        "total_output_tokens": output_tokens,
        "requests_per_second": len(requests) / elapsed_s,
        "tokens_per_second": (prompt_tokens + output_tokens) / elapsed_s,
        "output_tokens_per_second": output_tokens / elapsed_s,
    }


def _run(
    engine: Engine, requests: Sequence[BenchRequest], name: str, on_done: Callable[[], None] = lambda: None
) -> float:
    begin_s = time.monotonic()
    for index, request in enumerate(requests):
        sampling = SamplingParams(temperature=0.0, max_tokens=request.output_len, ignore_eos=True)
        ids = tuple(token for token in request.prompt if isinstance(token, int))
        try:
            engine.admit(GenerationRequest(f"{name}-{index}", ids, sampling))
        except InvalidRequest as error:
            raise ConfigError(f"prompt {index + 1}: {error.message}") from error
    while engine.has_work:
        for delta in engine.step().deltas:
            if delta.error is not None:
                raise InternalError(f"{delta.request_id}: {delta.error.message}")
            if delta.finish_reason is not None:
                on_done()
    return max(time.monotonic() - begin_s, 1e-9)
