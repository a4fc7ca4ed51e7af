"""How much a worker has to do, in tokens: the one measure of load that all policies share.

    prefill   prompt tokens that are not computed yet. Requests say little: one may be a hundred times another.
    decode    what its next step has to do: read the KV of every context it holds, and run a row per sequence, which costs
              as much as reading about SEQUENCE_TOKENS tokens' KV; and prompts that it has to compute itself

A row of a step costs 2 N operations for N parameters, a token of context `layout.token_bytes` to read. For an 8B model on
a GPU of 1 PFLOP/s and 3.3 TB/s that is 16 us against 40 ns a token, 400 tokens; for SmolLM2-135M on a CPU core, 1.35 ms against
2 us, 650 (bench/simulation/costs.py says from which measurements). Long contexts are a burden by their KV, short ones by number.

What was announced is late, and counts tokens that will turn out to be cached; what this router knows is neither, but it does
not see other routers. So its own requests count as it knows them, and of what was announced the share that is others', or has not
ended since.
"""

from __future__ import annotations

from contracts.worker import WorkerKind
from router.policies.interface import Candidate

SEQUENCE_TOKENS = 512


def burden(candidate: Candidate) -> int:
    """Tokens, see above."""
    queued = candidate.num_inflight_tokens + round(candidate.load.num_queued_tokens * candidate.others)
    if candidate.info.kind is WorkerKind.PREFILL:
        return queued
    used = round(candidate.load.kv_usage * candidate.info.num_blocks) * candidate.info.layout.block_size
    held = max(round(used * (1 - candidate.ended)), candidate.num_inflight_kv_tokens + round(used * candidate.others))
    return num_sequences(candidate) * SEQUENCE_TOKENS + held + queued


def num_sequences(candidate: Candidate) -> int:
    """Requests that it has."""
    announced = candidate.load.num_running + candidate.load.num_waiting
    return candidate.num_inflight + round(announced * candidate.others)
