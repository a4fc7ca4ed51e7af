"""How answers are chosen, as a caller of `LLM` says it. Does not know the model whose defaults it leaves room for."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from contracts import sampling
from contracts.errors import InvalidRequest
from offline.checks import flag, integer, integers, number, texts

MAX_STOPS = 128
_ANY_VOCABULARY = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one prompt or of many; names and meanings are those of vLLM's class.

    None leaves temperature, top_k, top_p, min_p and repetition_penalty to the model's own generation_config.json, and the
    seed to chance. `top_k` 0 or -1 takes all tokens. `stop` is a text or several; an answer ends before it. `logprobs` k also
    gives the k likeliest tokens at each position. TypeError and ValueError say which field, what it was and what is allowed.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name in ("max_tokens", "min_tokens"):
            integer(name, getattr(self, name), 0)
        for name in ("seed", "logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                integer(name, getattr(self, name), 0)
        if self.top_k is not None:
            integer("top_k", self.top_k, -1)
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            if getattr(self, name) is not None:
                number(name, getattr(self, name))
        for name in ("presence_penalty", "frequency_penalty"):
            number(name, getattr(self, name))
        for name in ("ignore_eos", "skip_special_tokens"):
            flag(name, getattr(self, name))
        if len(self.stops) > MAX_STOPS:
            raise ValueError(f"stop: got {len(self.stops)} texts, at most {MAX_STOPS}")
        self._check_token_ids()
        try:
            self.on(sampling.SamplingParams()).validate(_ANY_VOCABULARY)
        except InvalidRequest as error:
            raise ValueError(error.message) from error

    def _check_token_ids(self) -> None:
        integers("stop_token_ids", self.stop_token_ids, 0)
        if not isinstance(self.logit_bias, Mapping):
            raise TypeError(f"logit_bias: got {self.logit_bias!r}, must be a mapping of token ids to numbers")
        for token_id, bias in self.logit_bias.items():
            integer("logit_bias", token_id, 0)
            number(f"logit_bias[{token_id}]", bias)

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer."""
        return texts("stop", self.stop)

    def on(self, defaults: sampling.SamplingParams) -> sampling.SamplingParams:
        """As the engine wants them: what is None is from `defaults`, and the seed a new one."""
        given = {
            name: getattr(self, name)
            for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
            if getattr(self, name) is not None
        }
        if self.top_k == -1:
            given["top_k"] = 0
        return replace(
            defaults,
            **given,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple(sorted(self.logit_bias.items())),
            seed=secrets.randbelow(sampling.MAX_SEED) if self.seed is None else self.seed,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )
