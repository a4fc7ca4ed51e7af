"""A request as the engine would drive it, without an engine."""

from __future__ import annotations

from contracts.sampling import SamplingParams
from engine.execution.interface import ScheduledRequest

GREEDY = SamplingParams(temperature=0.0)


class Driven:
    """One request's tokens, blocks and progress."""

    def __init__(self, prompt: list[int], block_ids: list[int], sampling: SamplingParams = GREEDY) -> None:
        self.tokens = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.block_ids = block_ids
        self.sampling = sampling
        self.computed = 0

    def share(self, count: int) -> ScheduledRequest:
        """The next `count` tokens; counts them as computed."""
        start = self.computed
        self.computed += count
        return ScheduledRequest("r", self.tokens, self.num_prompt_tokens, start, count, self.block_ids, self.sampling)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]
