"""What steps and transfers take on the machine that is simulated: SmolLM2-135M, one thread a worker, shared memory or TCP.

From bench/results: a prompt of 256 tokens takes 290 ms (ttft.md), so 1.1 ms a token; a stream alone gets a token every 22 ms
(ttft.md), 32 with contexts of about 130 tokens one every 73 ms (streams.md), so 1.35 ms a sequence and 2 us a token of context
beside 20 ms for the weights; KV of 23 kB a token goes at 3.2 GB/s over TCP (transfer.md), 7 us a token, of which the last chunk
is waited for. Relations between policies do not change when all of it is divided by a GPU's speed. Does not know what a step is
made of but for these counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.execution.interface import ScheduledBatch


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds."""

    step_s: float = 0.020
    prompt_token_s: float = 0.0011
    sequence_s: float = 0.00135
    context_token_s: float = 2.0e-6
    handoff_s: float = 0.004
    transfer_token_s: float = 7e-6
    exposed: float = 0.25  # share of a transfer that is left when the prompt is computed
    tell_s: float = 0.003  # from a worker to a router, and back
    announce_every_s: float = 1.0

    def batch_s(self, batch: ScheduledBatch) -> float:
        """One step."""
        prompt = sum(r.num_scheduled_tokens for r in batch.requests if r.num_scheduled_tokens > 1)
        decoding = [r for r in batch.requests if r.num_scheduled_tokens == 1]
        context = sum(len(r.token_ids) for r in decoding)
        step_s = self.step_s + len(decoding) * self.sequence_s + context * self.context_token_s
        # A prompt of hundreds of tokens reads the weights once for all of them: within the rate above.
        return max(step_s if decoding or not prompt else 0.0, 0.0) + prompt * self.prompt_token_s

    def handover_s(self, num_tokens: int) -> float:
        """What is left of a transfer of so many tokens once the last of them is computed."""
        return self.handoff_s + num_tokens * self.transfer_token_s * self.exposed
