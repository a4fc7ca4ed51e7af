"""The slow truth for a real model: one request at a time, its prompt in one piece, no prefix cache; and requests to ask."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from contracts.clock import MonotonicClock
from contracts.request import FinishReason, GenerationRequest, TokenDelta, TokenLogprob
from contracts.sampling import SamplingParams
from engine.build import LoadedModel, ModelRuntimeConfig, load
from engine.config import EngineConfig, SchedulerConfig
from engine.engine import Engine
from kernels.dispatch import choose
from tests.integration.pools import RealModel

TINY = Path(__file__).parents[1] / "fixtures" / "tiny-austen"
GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, top_k=200, repetition_penalty=1.1, presence_penalty=0.2)
# Whether the kernels of this machine give a row the same bits in any company. If not, tokens are compared, in float32 alone.
EXACT = choose("cpu", torch.float32).exact
DTYPES = ("float32", "bfloat16") if EXACT else ("float32",)
# Log-probabilities asked for with every token: they hold all bits of its row of logits that a client can see.
LOGPROBS = 3 if EXACT else None
WHOLE = SchedulerConfig(max_num_batched_tokens=4096, max_num_seqs=1, enable_prefix_caching=False)


class Said(NamedTuple):
    """An answer, and the log-probabilities that came with its tokens: compared as they are, bit for bit."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()

    def and_then(self, delta: TokenDelta) -> Said:
        assert delta.finish_reason is not FinishReason.ERROR, delta.error
        assert delta.first_index == len(self.tokens)
        return Said(self.tokens + delta.token_ids, self.logprobs + delta.logprobs)


@cache
def loaded(model_dir: Path = TINY, dtype: str = "float32") -> LoadedModel:
    return load(ModelRuntimeConfig(model_dir, dtype=dtype, threads=1, max_num_batched_tokens=256, max_num_seqs=8))


def real_model(model_dir: Path = TINY, dtype: str = "float32") -> RealModel:
    model = loaded(model_dir, dtype)
    return RealModel(model.layout, lambda num_blocks, buffer: model.runner(buffer, num_blocks))


def engine(scheduler: SchedulerConfig, num_blocks: int = 128, model_dir: Path = TINY, dtype: str = "float32") -> Engine:
    model = loaded(model_dir, dtype)
    buffer = memoryview(
        bytearray(b"\xff") * (num_blocks * model.layout.block_bytes)
    )  # NaN wherever nothing was written
    return Engine(model.runner(buffer, num_blocks), EngineConfig(scheduler), MonotonicClock())


def heard(made: Engine, asked: Sequence[GenerationRequest]) -> dict[str, Said]:
    """All requests at once, until none is left; the books must add up at the end."""
    answers = {r.request_id: Said(r.output_token_ids) for r in asked}
    for request in asked:
        made.admit(request)
    while made.has_work:
        for delta in made.step().deltas:
            answers[delta.request_id] = answers[delta.request_id].and_then(delta)
    made.check_integrity()
    return answers


def run(made: Engine, asked: Sequence[GenerationRequest]) -> dict[str, tuple[int, ...]]:
    """The tokens of `heard`."""
    return {request_id: said.tokens for request_id, said in heard(made, asked).items()}


def spoken(asked: Sequence[GenerationRequest], model_dir: Path = TINY, dtype: str = "float32") -> dict[str, Said]:
    """Each request alone on a fresh engine's blocks."""
    made = engine(WHOLE, model_dir=model_dir, dtype=dtype)
    answers: dict[str, Said] = {}
    for request in asked:
        answers |= heard(made, [request])
    return answers


def truth(asked: Sequence[GenerationRequest], model_dir: Path = TINY) -> dict[str, tuple[int, ...]]:
    """The tokens of `spoken`."""
    return {request_id: said.tokens for request_id, said in spoken(asked, model_dir).items()}


def requests(count: int, num_output: int = 12, *, shared: int = 0, salt: str = "") -> list[GenerationRequest]:
    """Prompts of 1 to 100 tokens, every second one seeded; the first `shared` tokens are the same in all of them."""
    draw = random.Random(f"{count}/{shared}/{salt}")
    prefix = tuple(draw.randrange(3, 1024) for _ in range(shared))
    asked = []
    for index in range(count):
        sampling = replace(SEEDED, seed=index) if index % 2 else GREEDY
        sampling = replace(sampling, max_tokens=num_output, ignore_eos=index % 3 == 0, logprobs=LOGPROBS)
        own = tuple(draw.randrange(3, 1024) for _ in range(draw.choice((1, 7, 16, 33, 64, 100))))
        asked.append(GenerationRequest(f"{salt}{index}", prefix + own, sampling))
    return asked
