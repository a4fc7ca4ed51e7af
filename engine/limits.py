"""Refuses at the door what could never finish, naming field, value and limit. Does not know queues or time."""

from __future__ import annotations

from dataclasses import dataclass

from contracts.errors import InvalidRequest, counted
from contracts.kv_layout import KVLayout
from contracts.request import GenerationRequest


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What a request must fit: the model's vocabulary and context, and the whole KV pool."""

    vocab_size: int
    max_model_len: int  # tokens
    num_blocks: int
    layout: KVLayout

    def check(self, request: GenerationRequest, *, retain_kv: bool) -> None:
        """Raise InvalidRequest when the request is malformed, already at its end, or can never fit the pool when alone."""
        request.validate(self.vocab_size, self.max_model_len)
        for token_id in request.output_token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequest("output_token_ids", token_id, f"must be from 0 to {self.vocab_size - 1}")
        num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
        if len(request.output_token_ids) >= max_tokens:
            raise InvalidRequest(
                "output_token_ids",
                f"{len(request.output_token_ids)} tokens",
                f"must be fewer than max_tokens {max_tokens}",
            )
        # The last token of an answer is never computed, so it needs no KV.
        num_tokens = request.num_tokens if retain_kv else num_prompt + max_tokens - 1
        asked = counted(num_prompt, "token") if retain_kv else f"{num_prompt} tokens, max_tokens {max_tokens}"
        self.check_fits("prompt", asked, num_tokens)

    def check_fits(self, field: str, asked: object, num_tokens: int) -> None:
        """Raise InvalidRequest when `num_tokens` tokens need more blocks than there are."""
        needed = self.layout.num_blocks_for(num_tokens)
        if needed > self.num_blocks:
            raise InvalidRequest(
                field,
                asked,
                f"needs {needed} KV blocks of {self.layout.block_size} tokens, the pool has {self.num_blocks}",
            )
