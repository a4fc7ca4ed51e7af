"""The engine alone, without services: requests in, answers out, as many at once as the engine takes.

    requests ─▶ engine.admit … ─▶ step, step, step ─▶ text pieces (as they come) and answers (as they end)

Loads torch, in this process. Does not know flags, files or terminals.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from contracts.clock import MonotonicClock
from contracts.errors import ConfigError, InternalError, InvalidRequest
from contracts.request import FinishReason, GenerationRequest, TokenDelta, TokenLogprob
from engine.build import ModelRuntimeConfig, load
from engine.config import EngineConfig, SchedulerConfig
from engine.engine import Engine
from router.text.detokenizer import StopMatcher, TextStream
from router.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class OfflineAnswer:
    """One finished answer. `text` has no special tokens, unless they were asked for, and ends before a stop string."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class OfflineTotals:
    """What a run did; seconds do not include loading."""

    num_prompt_tokens: int
    num_new_tokens: int
    elapsed_s: float

    @property
    def tokens_per_s(self) -> float:
        """New tokens a second."""
        return self.num_new_tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class TextWish:
    """How one answer becomes text; without a tokenizer it has none."""

    tokenizer: Tokenizer | None
    stops: tuple[str, ...] = ()
    skip_special_tokens: bool = True


def build_engine(
    runtime: ModelRuntimeConfig, kv_memory_bytes: int | None, max_waiting: int, *, prefix_caching: bool = True
) -> Engine:
    """Load the model and make an engine on KV memory of its own. Raises ConfigError or ModelLoadError."""
    model = load(runtime)
    num_blocks = model.num_blocks_for(kv_memory_bytes)
    on_cpu = model.device == "cpu"
    buffer = (
        memoryview(mmap.mmap(-1, num_blocks * model.layout.block_bytes)) if on_cpu else model.device_memory(num_blocks)
    )
    scheduler = SchedulerConfig(
        max_num_batched_tokens=runtime.max_num_batched_tokens,
        max_num_seqs=runtime.max_num_seqs,
        enable_prefix_caching=prefix_caching,
        max_waiting=max_waiting,
    )
    return Engine(model.runner(buffer, num_blocks), EngineConfig(scheduler), MonotonicClock())


class _Text:
    """The text of an answer that is being written."""

    def __init__(self, stream: TextStream, stops: Sequence[str]) -> None:
        self._stream = stream
        self._matcher = StopMatcher(stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come."""
        return self._matcher.matched is not None

    def push(self, delta: TokenDelta) -> str:
        """What the delta completes."""
        shown = delta.token_ids if delta.stop_token_id is None else delta.token_ids[:-1]
        text = self._matcher.push(self._stream.push(shown))
        if not self.stopped and delta.finish_reason is not None:
            text += self._matcher.push(self._stream.flush())
            if not self.stopped:
                text += self._matcher.flush()
        return text


@dataclass(slots=True)
class _OpenAnswer:
    """An answer that is being written; `text` None where nobody reads it."""

    index: int
    num_prompt_tokens: int
    text: _Text | None
    finish_reason: FinishReason | None = None
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    num_cached_tokens: int = 0

    def push(self, delta: TokenDelta) -> str:
        """The text that the delta completes; sets `finish_reason` when the answer ends with it."""
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.num_cached_tokens += delta.num_cached_tokens
        if delta.prompt_logprobs:
            self.prompt_logprobs = tuple(delta.prompt_logprobs)
        self.finish_reason = delta.finish_reason
        if self.text is None:
            return ""
        text = self.text.push(delta)
        if self.text.stopped:
            self.finish_reason = FinishReason.STOP
        self.texts.append(text)
        return text

    def finished(self, finish_reason: FinishReason) -> OfflineAnswer:
        """The answer."""
        return OfflineAnswer(
            self.index,
            "".join(self.texts),
            tuple(self.token_ids),
            self.num_prompt_tokens,
            finish_reason,
            tuple(self.logprobs),
            self.prompt_logprobs,
            self.num_cached_tokens,
        )


class OfflineRun:
    """Runs a list of requests to their end, once. Owns their texts; the engine has none of them when `run` is over."""

    def __init__(
        self, engine: Engine, on_text: Callable[[int, str], None], on_answer: Callable[[OfflineAnswer], None]
    ) -> None:
        self._engine = engine
        self._on_text = on_text
        self._on_answer = on_answer
        self._open: dict[str, _OpenAnswer] = {}
        self._num_new_tokens = 0

    @property
    def num_new_tokens(self) -> int:
        """Tokens made so far."""
        return self._num_new_tokens

    def run(self, requests: Sequence[GenerationRequest], wishes: Sequence[TextWish]) -> OfflineTotals:
        """All of them, each with its wish. Raises ConfigError naming the prompt that cannot run, before any of them has begun."""
        try:
            self._admit(requests, wishes)
            began_s = time.monotonic()
            while self._engine.has_work:
                for delta in self._engine.step().deltas:
                    self._take(delta)
            elapsed_s = time.monotonic() - began_s
        finally:
            # After a fault, or Ctrl-C: the engine is as it was.
            for request_id in self._open:
                self._engine.abort(request_id)
        num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        return OfflineTotals(num_prompt_tokens, self._num_new_tokens, elapsed_s)

    def _admit(self, requests: Sequence[GenerationRequest], wishes: Sequence[TextWish]) -> None:
        for index, (request, wish) in enumerate(zip(requests, wishes, strict=True)):
            try:
                self._engine.admit(request)
            except InvalidRequest as error:
                raise ConfigError(f"prompt {index + 1}: {error.message}") from error
            text = None
            if wish.tokenizer is not None:
                stream = wish.tokenizer.text_stream(skip_special_tokens=wish.skip_special_tokens)
                text = _Text(stream, wish.stops)
            self._open[request.request_id] = _OpenAnswer(index, len(request.prompt_token_ids), text)

    def _take(self, delta: TokenDelta) -> None:
        answer = self._open[delta.request_id]
        if delta.error is not None:
            raise InternalError(f"prompt {answer.index + 1}: {delta.error.message}")
        self._num_new_tokens += len(delta.token_ids)
        text = answer.push(delta)
        if text:
            self._on_text(answer.index, text)
        if answer.finish_reason is None:
            return
        del self._open[delta.request_id]
        # Ended by a stop string, of which the engine knows nothing.
        if delta.finish_reason is None:
            self._engine.abort(delta.request_id)
        self._on_answer(answer.finished(answer.finish_reason))
