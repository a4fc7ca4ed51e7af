"""Batches that mean nothing: for the profiling forward and to pay first-call costs before a client does.

oneDNN compiles a kernel per shape on first use (tens of milliseconds). Does not know requests that somebody waits for.
"""

from __future__ import annotations

import logging
import time

from contracts.errors import ModelLoadError
from contracts.sampling import SamplingParams
from engine.execution.interface import ModelRunner, ScheduledBatch, ScheduledRequest
from engine.pace import Pace

_log = logging.getLogger(__name__)
_GREEDY = SamplingParams(temperature=0.0)
_PROMPT_TOKENS = 64


def warm_up(runner: ModelRunner, max_num_seqs: int, pace: Pace) -> None:
    """Run a prompt and decode steps of 1, 2, 4, … rows; writes into the first blocks, which hold nothing yet.

    What they took, first-call costs included, goes into `pace`.

    Raises ModelLoadError when the model's numbers are not finite: such a worker could only answer with errors.
    """
    begun = time.monotonic()
    block_size = runner.layout.block_size
    num_tokens = min(_PROMPT_TOKENS, runner.num_blocks * block_size, runner.max_model_len - 1)
    _run(runner, prompt_batch(num_tokens, block_size), pace)
    rows = 1
    while rows <= min(max_num_seqs, runner.num_blocks):
        _run(runner, decode_batch(rows), pace)
        rows *= 2
    _log.info("warm-up took %.1f s", time.monotonic() - begun)


def _run(runner: ModelRunner, batch: ScheduledBatch, pace: Pace) -> None:
    begun = time.monotonic()
    pace.begin(batch.num_scheduled_tokens)
    results = runner.execute(batch)
    pace.end(time.monotonic() - begun)
    for result in results:
        if result.fault is not None:
            raise ModelLoadError(f"the model's weights give no tokens: {result.fault}")


def prompt_batch(num_tokens: int, block_size: int) -> ScheduledBatch:
    """One prompt of `num_tokens`, all in one step, in blocks 0, 1, …"""
    blocks = list(range(-(-num_tokens // block_size)))
    request = ScheduledRequest("warm-up", [0] * num_tokens, num_tokens, 0, num_tokens, blocks, _GREEDY)
    return ScheduledBatch((request,))


def decode_batch(num_rows: int) -> ScheduledBatch:
    """`num_rows` requests of one token each, in blocks 0, 1, …"""
    return ScheduledBatch(tuple(ScheduledRequest(f"warm-up-{i}", [0], 1, 0, 1, [i], _GREEDY) for i in range(num_rows)))
