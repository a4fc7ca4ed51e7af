"""How the next token is chosen: the sampling parameters of one request and their limits.

Meanings are those of OpenAI's API and vLLM's extra fields. A token is a function of (logits, parameters, seed, position),
never of the batch it shared. Does not know logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from contracts.errors import InvalidRequest

MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_SEED = 2**63 - 1
MAX_MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's sampling parameters.

    temperature 0 is greedy. top_k 0 means all. `seed` is always set: a caller without one gets one from the router, so
    that a retry on another worker makes the same tokens. `logprobs`/`prompt_logprobs` None means none; k >= 0 means the
    chosen token's and the k likeliest. logit_bias is a sorted tuple of (token id, bias).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, without any randomness."""
        return self.temperature == 0.0

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidRequest naming the first field that is out of its range."""
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, 0, 2**31 - 1)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        # Its reciprocal is as far as its other end: a factor without a bound makes logits infinite.
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _integer("seed", self.seed, 0, MAX_SEED)
        _integer("max_tokens", self.max_tokens, 1, MAX_MAX_TOKENS)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _integer(name, value, 0, MAX_LOGPROBS)
        self._validate_token_lists(vocab_size)

    def _validate_token_lists(self, vocab_size: int) -> None:
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest("stop_token_ids", len(self.stop_token_ids), f"at most {MAX_STOP_TOKEN_IDS} ids")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest("logit_bias", len(self.logit_bias), f"at most {MAX_LOGIT_BIAS} entries")
        for token_id in self.stop_token_ids:
            _integer("stop_token_ids", token_id, 0, vocab_size - 1)
        for token_id, bias in self.logit_bias:
            _integer("logit_bias", token_id, 0, vocab_size - 1)
            _number("logit_bias", bias, -100.0, 100.0)


def _number(field: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    too_low = value <= low if open_low else value < low
    if math.isnan(value) or too_low or value > high:
        bound = "above" if open_low else "at least"
        raise InvalidRequest(field, value, f"must be {bound} {low:g} and at most {high:g}")


def _integer(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequest(field, value, f"must be an integer from {low} to {high}")
