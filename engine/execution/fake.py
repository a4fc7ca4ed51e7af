"""A model runner without a model: numbers in real KV memory, and a next token that depends on every one of them.

    cell(p)      = the token_bytes of position p in its block = f(token, p, digest of all cells before p)
    digest(n)    = sum over p < n of weight(p) * cell(p), mod 2**64, read back from the buffer in every step
    next token   = g(digest of all cells, position, seed unless greedy)

So a cell that is lost, stale, misplaced or another request's changes every later token, as it would in a real model, and
connectors move these bytes as they would move real KV. `expected_tokens` says what must come out, without any memory.
Product code, no mock: control-plane tests and the simulator run on it. Needs numpy, no torch.
Does not know scheduling: it trusts nothing and raises FakeRunnerError when a batch contradicts itself.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from contracts.errors import ConfigError
from contracts.kv_layout import DTYPE_BYTES, KVLayout
from contracts.request import GenerationRequest, TokenLogprob
from contracts.sampling import SamplingParams
from engine.execution.interface import SampledToken, ScheduledBatch, ScheduledRequest

_MASK = 2**64 - 1
_WORD_BYTES = 8
_POISON = 0xFF
_BANNED = -100.0  # a logit bias that OpenAI documents as "never"
_Words = npt.NDArray[np.uint64]


class FakeRunnerError(RuntimeError):
    """The engine asked for something that no runner could do: a programming error in scheduling or in a transfer."""


@dataclass(frozen=True, slots=True)
class FakeModel:
    """What the fake pretends to be. A position's KV of one layer must be whole 8-byte words."""

    layout: KVLayout = field(default_factory=lambda: KVLayout("fake", "float32", 2, 1, 2, 16))
    vocab_size: int = 97
    max_model_len: int = 1024  # tokens
    eos_token_ids: frozenset[int] = frozenset()

    @property
    def slot_words(self) -> int:
        """8-byte words of one (layer, K or V, position)."""
        return self.layout.num_kv_heads * self.layout.head_size * DTYPE_BYTES[self.layout.dtype] // _WORD_BYTES

    @property
    def token_words(self) -> int:
        """8-byte words of one position's cell."""
        return 2 * self.layout.num_layers * self.slot_words


class FakeRunner:
    """Implements ModelRunner on `buffer` (num_blocks * layout.block_bytes bytes, its own if None), which it may not outlive.

    `strict` poisons the buffer with 0xFF first and refuses to read a cell that is still poisoned. `step_s` is how long a step
    takes at least, in real seconds.
    """

    def __init__(
        self,
        model: FakeModel,
        num_blocks: int,
        buffer: memoryview | None = None,
        *,
        step_s: float = 0.0,
        strict: bool = True,
    ) -> None:
        layout = model.layout
        num_bytes = num_blocks * layout.block_bytes
        if layout.num_kv_heads * layout.head_size * DTYPE_BYTES[layout.dtype] % _WORD_BYTES:
            raise ConfigError(
                f"num_kv_heads * head_size * dtype of the fake model must be whole {_WORD_BYTES}-byte words"
            )
        if buffer is not None and buffer.nbytes != num_bytes:
            raise ConfigError(f"kv buffer: got {buffer.nbytes} bytes, {num_blocks} blocks need {num_bytes}")
        self.model = model
        self.num_steps = 0
        self._num_blocks = num_blocks
        self._step_s = step_s
        self._strict = strict
        shape = (num_blocks, layout.num_layers, 2, layout.block_size, model.slot_words)
        storage = memoryview(bytearray(num_bytes)) if buffer is None else buffer
        self._cells: _Words = np.frombuffer(storage, dtype=np.uint64).reshape(shape)
        self._rule = _CellRule(model)
        if strict:
            self._cells.view(np.uint8).fill(_POISON)

    @property
    def layout(self) -> KVLayout:
        """What its KV memory looks like."""
        return self.model.layout

    @property
    def num_blocks(self) -> int:
        """Size of its KV memory in blocks."""
        return self._num_blocks

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.model.vocab_size

    @property
    def max_model_len(self) -> int:
        """The model's context in tokens."""
        return self.model.max_model_len

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer unless it ignores them."""
        return self.model.eos_token_ids

    def execute(self, batch: ScheduledBatch) -> tuple[SampledToken, ...]:
        """Read every request's cells, then write the new ones and sample. FakeRunnerError when the batch cannot be right."""
        started_s = time.monotonic()
        self._check(batch)
        digests = [self._digest(request) for request in batch.requests]
        results = tuple(self._compute(r, digest) for r, digest in zip(batch.requests, digests, strict=True))
        self.num_steps += 1
        left_s = self._step_s - (time.monotonic() - started_s)
        if left_s > 0:
            time.sleep(left_s)
        return results

    def _check(self, batch: ScheduledBatch) -> None:
        readers: dict[int, list[str]] = {}
        for request in batch.requests:
            end = request.num_computed_tokens + request.num_scheduled_tokens
            if not 0 < request.num_scheduled_tokens <= len(request.token_ids) - request.num_computed_tokens:
                raise FakeRunnerError(f"{request.request_id}: {request.num_scheduled_tokens} tokens scheduled")
            if end > len(request.block_ids) * self.layout.block_size or end > self.max_model_len:
                raise FakeRunnerError(f"{request.request_id}: {end} tokens in {len(request.block_ids)} blocks")
            for block_id in request.block_ids:
                readers.setdefault(block_id, []).append(request.request_id)
        for request in batch.requests:
            for block_id in _written_blocks(request, self.layout.block_size):
                if readers[block_id] != [request.request_id]:
                    raise FakeRunnerError(f"block {block_id} is written by one and used by all of {readers[block_id]}")

    def _digest(self, request: ScheduledRequest) -> int:
        num_tokens = request.num_computed_tokens
        if num_tokens == 0:
            return 0
        blocks = self._cells[request.block_ids[: self.layout.num_blocks_for(num_tokens)]]
        if self._strict and (_lines(blocks)[:num_tokens] == np.uint64(_MASK)).any():
            raise FakeRunnerError(
                f"{request.request_id}: reads KV that was never written, of its first {num_tokens} tokens"
            )
        return self._rule.digest(blocks, num_tokens)

    def _compute(self, request: ScheduledRequest, digest: int) -> SampledToken:
        first, num_tokens = request.num_computed_tokens, request.num_scheduled_tokens
        wants_prompt = request.sampling.prompt_logprobs
        bases: list[int] = []
        prompt_logprobs: list[TokenLogprob] = []
        for position in range(first, first + num_tokens):
            base, digest = self._rule.append(digest, request.token_ids[position], position)
            bases.append(base)
            if wants_prompt is not None and position + 1 < request.num_prompt_tokens:
                prompt_logprobs.append(_logprob(digest, request.token_ids[position + 1], wants_prompt, self.vocab_size))
        self._write(request, bases)
        if not request.samples:
            return SampledToken(None, prompt_logprobs=tuple(prompt_logprobs))
        token_id = _sample(self.model, request.sampling, digest, len(request.token_ids), request.num_output_tokens)
        top = request.sampling.logprobs
        logprob = None if top is None else _logprob(digest, token_id, top, self.vocab_size)
        return SampledToken(token_id, logprob, tuple(prompt_logprobs))

    def _write(self, request: ScheduledRequest, bases: list[int]) -> None:
        positions = np.arange(request.num_computed_tokens, request.num_computed_tokens + len(bases))
        blocks = np.asarray(request.block_ids)[positions // self.layout.block_size]
        self._cells[blocks, :, :, positions % self.layout.block_size] = self._rule.cells(bases)


def expected_tokens(request: GenerationRequest, model: FakeModel) -> tuple[int, ...]:
    """The whole output that `request` must get, the tokens it begins with included, wherever and however it is computed."""
    rule, digest, sampling = _CellRule(model), 0, request.sampling
    token_ids = [*request.prompt_token_ids, *request.output_token_ids]
    num_prompt = len(request.prompt_token_ids)
    for position in range(len(token_ids)):
        _, digest = rule.append(digest, token_ids[position], position)
    while len(token_ids) - num_prompt < sampling.max_tokens:
        index = len(token_ids) - num_prompt
        token_id = _sample(model, sampling, digest, len(token_ids), index)
        token_ids.append(token_id)
        if index >= sampling.min_tokens and token_id in _stop_token_ids(model, sampling):
            break
        _, digest = rule.append(digest, token_id, len(token_ids) - 1)
    return tuple(token_ids[num_prompt:])


class _CellRule:
    """What a cell holds: words base * scale + offset. Linear, so that the digest needs one number per token, not all words."""

    def __init__(self, model: FakeModel) -> None:
        shape = (model.layout.num_layers, 2, 1, model.slot_words)
        words = np.arange(model.token_words, dtype=np.uint64)
        self._scale = (_mix_array(words) | np.uint64(1)).reshape(shape)
        self._offset = _mix_array(words + np.uint64(1 << 32)).reshape(shape)
        self._weight = (_mix_array(words + np.uint64(2 << 32)) | np.uint64(1)).reshape(shape)
        self._position_weight = _mix_array(
            np.arange(model.max_model_len, dtype=np.uint64) + np.uint64(3 << 32)
        ) | np.uint64(1)
        self._scale_sum = int((self._scale * self._weight).sum())
        self._offset_sum = int((self._offset * self._weight).sum())

    def append(self, digest: int, token_id: int, position: int) -> tuple[int, int]:
        """The base of the cell at `position`, and the digest that includes it."""
        base = _mix(digest ^ _mix((token_id << 32) + position))
        weight = int(self._position_weight[position])
        return base, (digest + weight * (base * self._scale_sum + self._offset_sum)) & _MASK

    def cells(self, bases: list[int]) -> _Words:
        """The words of one cell per base: [len(bases), num_layers, 2, slot_words]."""
        column = np.array(bases, dtype=np.uint64).reshape(-1, 1, 1, 1)
        return column * self._scale[:, :, 0] + self._offset[:, :, 0]

    def digest(self, blocks: _Words, num_tokens: int) -> int:
        """The digest of the first `num_tokens` positions of [n, num_layers, 2, block_size, slot_words]."""
        per_position = (blocks * self._weight).sum(axis=(1, 2, 4), dtype=np.uint64).reshape(-1)[:num_tokens]
        return int((per_position * self._position_weight[:num_tokens]).sum(dtype=np.uint64))


def _lines(blocks: _Words) -> _Words:
    """One row of words per position: [n * block_size, token_words]."""
    return blocks.transpose(0, 3, 1, 2, 4).reshape(blocks.shape[0] * blocks.shape[3], -1)


def _written_blocks(request: ScheduledRequest, block_size: int) -> list[int]:
    end = request.num_computed_tokens + request.num_scheduled_tokens
    return request.block_ids[request.num_computed_tokens // block_size : -(-end // block_size)]


def _stop_token_ids(model: FakeModel, sampling: SamplingParams) -> frozenset[int]:
    return frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else model.eos_token_ids)


def _sample(model: FakeModel, sampling: SamplingParams, digest: int, position: int, index: int) -> int:
    """The first allowed token from a place that digest, position and seed give."""
    place = _mix(digest ^ _mix(position if sampling.greedy else position + ((sampling.seed + 1) << 20)))
    banned = {token_id for token_id, bias in sampling.logit_bias if bias <= _BANNED}
    if index < sampling.min_tokens:
        banned |= model.eos_token_ids | frozenset(sampling.stop_token_ids)
    for step in range(model.vocab_size):
        token_id = (place + step) % model.vocab_size
        if token_id not in banned:
            return token_id
    raise FakeRunnerError("sampling parameters ban every token")


def _logprob(digest: int, token_id: int, num_top: int, vocab_size: int) -> TokenLogprob:
    """A made-up log-probability that depends on all cells before."""
    value = -(_mix(digest ^ token_id) % 1000) / 1000
    top = tuple(((token_id + i) % vocab_size, value - i) for i in range(min(num_top, vocab_size)))
    return TokenLogprob(token_id, value, 1, top)


def _mix(value: int) -> int:
    """splitmix64's finaliser."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _mix_array(values: _Words) -> _Words:
    """The same for an array."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
