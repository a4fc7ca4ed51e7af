"""How far an answer can be asked for before a choice in it hangs on the last bits of a logit.

Which requests share a step changes the last bits of float32 logits (docs/adr/0014). Almost always that is far from mattering;
but among hundreds of thousands of tokens a few are drawn where the first two of the race arrive together, or where the two
largest logits tie. Those are no faults of serving, so each question is cut before its first such token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from contracts.sampling import SamplingParams
from engine.build import ModelRuntimeConfig, load
from engine.execution.interface import ScheduledBatch, ScheduledRequest
from router.serving.answers import derived_seed
from tests.soak.plan import TEMPERATURE, Question

if TYPE_CHECKING:
    from torch import Tensor

    from engine.execution.torch_runner import TorchRunner

GAP = 1e-4  # between the two largest logits; ten times what the last bits are
NUDGES = 8  # tries to make a draw another one by a change of the logits of that size


def firm_questions(questions: Sequence[Question], model_dir: Path) -> tuple[Question, ...]:
    """The questions with `max_tokens` no larger than all their answers are firm for; those that are not at all are left out."""
    loaded = load(ModelRuntimeConfig(model_dir, dtype="float32", threads=1, max_num_seqs=1))
    num_blocks = loaded.layout.num_blocks_for(loaded.max_model_len)
    runner = loaded.runner(memoryview(bytearray(num_blocks * loaded.layout.block_bytes)), num_blocks)
    lengths = [min(_length(runner, question, index) for index in range(question.n)) for question in questions]
    return tuple(replace(q, max_tokens=length) for q, length in zip(questions, lengths, strict=True) if length)


def _length(runner: TorchRunner, question: Question, index: int) -> int:
    """How many tokens of answer `index` are firm; all that are asked for when it ends before."""
    seed = 0 if question.seed is None else derived_seed(question.seed, index)
    temperature = 0.0 if question.seed is None else TEMPERATURE
    params = SamplingParams(
        temperature=temperature, seed=seed, presence_penalty=question.penalty, max_tokens=question.max_tokens
    )
    tokens, num_computed = list(question.prompt), 0
    blocks = list(range(runner.num_blocks))
    for length in range(question.max_tokens):
        new = len(tokens) - num_computed
        request = ScheduledRequest("firm", tokens, len(question.prompt), num_computed, new, blocks, params)
        token_id = _firm_choice(runner.logits(ScheduledBatch((request,)))[0], request, runner.eos_token_ids)
        if token_id is None:
            return length
        if token_id in runner.eos_token_ids and not question.ignore_eos:
            break
        num_computed = len(tokens)
        tokens.append(token_id)
    return question.max_tokens


def _firm_choice(logits: Tensor, request: ScheduledRequest, eos_token_ids: frozenset[int]) -> int | None:
    """The next token, None when the last bits of the logits could make it another."""
    import torch

    from engine.sampling.choice import choose
    from engine.sampling.penalties import adjust
    from engine.sampling.random import keys

    params = request.sampling
    adjusted = adjust(logits, request, eos_token_ids)
    if params.temperature == 0.0:
        top = adjusted.topk(2)
        return int(top.indices[0]) if float(top.values[0] - top.values[1]) > GAP else None
    noise = keys(params.seed, len(request.token_ids))
    chosen = choose(adjusted, params, noise)
    generator = torch.Generator().manual_seed(len(request.token_ids))
    for _ in range(NUDGES):
        nudge = (torch.rand(adjusted.shape, generator=generator) - 0.5) * 2 * GAP
        if choose(adjusted + nudge, params, noise) != chosen:
            return None
    return chosen
