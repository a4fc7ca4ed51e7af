"""The slow truth of a question, from what is written about it: transformers' forward over the whole text for each token.

No cache, no batch, no chunk, no workers; penalties, filters and stop strings in plain Python from their definitions. Only the
draw for a (seed, position) is the product's, which is a definition too.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from functools import cache

import torch
from tokenizers import Tokenizer

from contracts.sampling import SamplingParams
from engine.sampling.race import draw
from engine.sampling.random import keys
from router.serving.answers import derived_seed
from router.text.detokenizer import byte_alphabet
from tests.equivalence.truth import TINY
from tests.equivalence.truths.case import Chat, Entries, Entry, Heard, Question, Said
from tests.equivalence.truths.house import BLOCK_SIZE, BOS, EOS

TOKENIZER = Tokenizer.from_file(str(TINY / "tokenizer.json"))
BYTES = byte_alphabet()


@cache
def expected(question: Question) -> Heard:
    """What must be heard, at whichever door and however the answer is made."""
    prompt = prompt_ids(question)
    answers = tuple(_answer(question, prompt, index) for index in range(question.n))
    shown = question.sampling.prompt_logprobs
    entries: Entries = () if shown is None else _prompt_entries(prompt, shown)
    cached = 0 if question.warm == 0 or shown is not None else (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    made = sum(len(answer.token_ids) for answer in answers)
    if question.echo:
        answers = tuple(_echoed(question, prompt, entries, answer) for answer in answers)
        entries = ()
    return Heard(answers, len(prompt), made, cached, entries)


def prompt_ids(question: Question) -> tuple[int, ...]:
    """BOS once, then the text."""
    if isinstance(question.prompt, tuple):
        return question.prompt
    text = f"user: {question.prompt.text}\nassistant:" if isinstance(question.prompt, Chat) else question.prompt
    return (BOS, *TOKENIZER.encode(text.removeprefix("<|bos|>"), add_special_tokens=False).ids)


def token_text(token_id: int) -> str:
    """As OpenAI shows it: pieces of characters by their bytes."""
    token = TOKENIZER.id_to_token(token_id)
    if token_id in (BOS, EOS):
        return token
    raw = bytes(BYTES[char] for char in token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


@cache
def _model() -> torch.nn.Module:
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    torch.set_num_threads(1)
    return LlamaForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


def _logits(token_ids: tuple[int, ...]) -> torch.Tensor:
    """Behind each token: [len(token_ids), vocab]."""
    with torch.inference_mode():
        return _model()(torch.tensor([token_ids])).logits[0]


@cache
def _last_logits(token_ids: tuple[int, ...]) -> torch.Tensor:
    return _logits(token_ids)[-1].clone()


def _answer(question: Question, prompt: tuple[int, ...], index: int) -> Said:
    sampling = replace(question.sampling, seed=derived_seed(question.sampling.seed, index))
    if question.prompt_only:
        return Said("", (), "length", None)
    made: tuple[int, ...] = ()
    entries: tuple[Entry, ...] = ()
    while True:
        raw = _last_logits(prompt + made)
        token_id = _choose(_adjusted(raw.tolist(), prompt, made, sampling), len(prompt + made), sampling)
        made += (token_id,)
        if sampling.logprobs is not None:
            entries += (_entry(raw, token_id, sampling.logprobs),)
        ended = len(made) > sampling.min_tokens and _ends(token_id, sampling)
        spoken = made[:-1] if ended and not question.include_stop else made
        text = TOKENIZER.decode(list(spoken), skip_special_tokens=question.skip_special_tokens)
        last = ended or len(made) == sampling.max_tokens
        found = _stop(question, made, text if last else text.rstrip("\ufffd"))
        if found is not None:
            stop, start = found
            return Said(text[: start + len(stop) * question.include_stop], made, "stop", stop, entries)
        if last:
            return Said(text, made, "stop" if ended else "length", token_id if ended else None, entries)


def _ends(token_id: int, sampling: SamplingParams) -> bool:
    return token_id in sampling.stop_token_ids or (token_id == EOS and not sampling.ignore_eos)


def _stop(question: Question, made: tuple[int, ...], text: str) -> tuple[str, int] | None:
    """A stop string and where it begins in the text: one at most is complete, since it was looked for after each token."""
    quiet = TOKENIZER.decode(list(made[: question.sampling.min_tokens])).rstrip("\ufffd")
    if len(made) <= question.sampling.min_tokens:
        return None
    found = [(stop, text.find(stop, len(quiet))) for stop in question.stop]
    return min(((stop, start) for stop, start in found if start >= 0), key=lambda f: f[1] + len(f[0]), default=None)


def _adjusted(
    logits: list[float], prompt: tuple[int, ...], made: tuple[int, ...], sampling: SamplingParams
) -> list[float]:
    if len(made) < sampling.min_tokens:
        for token_id in (EOS, *sampling.stop_token_ids):
            logits[token_id] = -math.inf
    for token_id, bias in sampling.logit_bias:
        logits[token_id] += bias
    for token_id in {*prompt, *made}:
        factor = sampling.repetition_penalty
        logits[token_id] *= 1 / factor if logits[token_id] > 0 else factor
    for token_id, count in Counter(made).items():
        logits[token_id] -= sampling.frequency_penalty * count + sampling.presence_penalty
    return logits


def _choose(logits: list[float], position: int, sampling: SamplingParams) -> int:
    """The likeliest; or by a race among the likeliest that the filters leave."""
    ranked = sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))
    if sampling.temperature == 0:
        return ranked[0]
    seed, best = sampling.seed, logits[ranked[0]]
    weights = [math.exp((value - best) / sampling.temperature) for value in logits]
    kept = [token_id for token_id in ranked if weights[token_id] >= sampling.min_p]
    kept = kept[: sampling.top_k or None]
    mass = sampling.top_p * sum(weights[token_id] for token_id in kept)
    before = [0.0, *itertools.accumulate(weights[token_id] for token_id in kept)]
    nucleus = [token_id for token_id, sum_before in zip(kept, before, strict=False) if sum_before < mass]
    return draw(torch.tensor([weights[i] if i in nucleus else 0.0 for i in range(len(weights))]), keys(seed, position))


def _entry(raw: torch.Tensor, token_id: int, num_top: int) -> Entry:
    logprobs = torch.log_softmax(raw.to(torch.float64), dim=-1).tolist()
    likeliest = sorted(range(len(logprobs)), key=lambda t: (-logprobs[t], t))[:num_top]
    return Entry(token_text(token_id), logprobs[token_id], {token_text(t): logprobs[t] for t in {*likeliest, token_id}})


def _prompt_entries(prompt: tuple[int, ...], num_top: int) -> Entries:
    rows = _logits(prompt)
    return (None, *(_entry(rows[i], token_id, num_top) for i, token_id in enumerate(prompt[1:])))


def _echoed(question: Question, prompt: tuple[int, ...], entries: Entries, answer: Said) -> Said:
    text = question.prompt if isinstance(question.prompt, str) else TOKENIZER.decode(list(prompt))
    return replace(answer, text=text + answer.text, entries=entries + answer.entries)
