"""The engine alone, without services: prompts in, answers out, as many at once as the engine takes.

    requests ─▶ engine.admit … ─▶ step, step, step ─▶ text pieces (as they come) and answers (as they end)

Loads torch, in this process. Does not know flags, files or terminals.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from contracts.clock import MonotonicClock
from contracts.errors import ConfigError, InternalError, InvalidRequest
from contracts.request import FinishReason, GenerationRequest, TokenDelta
from engine.build import ModelRuntimeConfig, load
from engine.config import EngineConfig, SchedulerConfig
from engine.engine import Engine
from router.text.detokenizer import StopMatcher, TextStream
from router.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class OfflineAnswer:
    """One finished answer. `text` has no special tokens and ends before a stop string."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    finish_reason: FinishReason


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


def build_engine(runtime: ModelRuntimeConfig, kv_memory_bytes: int | None, max_waiting: int) -> Engine:
    """Load the model and make an engine on KV memory of its own. Raises ConfigError or ModelLoadError."""
    model = load(runtime)
    num_blocks = model.num_blocks_for(kv_memory_bytes)
    buffer = memoryview(mmap.mmap(-1, num_blocks * model.layout.block_bytes))
    scheduler = SchedulerConfig(
        max_num_batched_tokens=runtime.max_num_batched_tokens,
        max_num_seqs=runtime.max_num_seqs,
        max_waiting=max_waiting,
    )
    return Engine(model.runner(buffer, num_blocks), EngineConfig(scheduler), MonotonicClock())


class _OpenAnswer:
    """An answer that is being written."""

    def __init__(self, index: int, request: GenerationRequest, stream: TextStream, matcher: StopMatcher) -> None:
        self.index = index
        self.finish_reason: FinishReason | None = None
        self._request = request
        self._stream = stream
        self._matcher = matcher
        self._texts: list[str] = []
        self._token_ids: list[int] = []

    def push(self, delta: TokenDelta) -> str:
        """The text that the delta completes; sets `finish_reason` when the answer ends with it."""
        self._token_ids += delta.token_ids
        shown = delta.token_ids if delta.stop_token_id is None else delta.token_ids[:-1]
        text = self._matcher.push(self._stream.push(shown))
        if self._matcher.matched is None and delta.finish_reason is not None:
            text += self._matcher.push(self._stream.flush())
            if self._matcher.matched is None:
                text += self._matcher.flush()
        self.finish_reason = FinishReason.STOP if self._matcher.matched is not None else delta.finish_reason
        self._texts.append(text)
        return text

    def finished(self) -> OfflineAnswer:
        """The answer; only after `finish_reason` is set."""
        if self.finish_reason is None:
            raise RuntimeError(f"answer {self.index} goes on")
        num_prompt_tokens = len(self._request.prompt_token_ids)
        text = "".join(self._texts)
        return OfflineAnswer(self.index, text, tuple(self._token_ids), num_prompt_tokens, self.finish_reason)


class OfflineRun:
    """Runs a list of requests to their end, once. Owns nothing but their texts."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        on_text: Callable[[int, str], None],
        on_answer: Callable[[OfflineAnswer], None],
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._on_text = on_text
        self._on_answer = on_answer
        self._open: dict[str, _OpenAnswer] = {}
        self._num_new_tokens = 0

    @property
    def num_new_tokens(self) -> int:
        """Tokens made so far."""
        return self._num_new_tokens

    def run(self, requests: Sequence[GenerationRequest]) -> OfflineTotals:
        """All of them. Raises ConfigError naming the prompt that cannot run, before any of them has begun."""
        for index, request in enumerate(requests):
            try:
                self._engine.admit(request)
            except InvalidRequest as error:
                raise ConfigError(f"prompt {index + 1}: {error.message}") from error
            stream, matcher = self._tokenizer.text_stream(skip_special_tokens=True), StopMatcher(self._stops)
            self._open[request.request_id] = _OpenAnswer(index, request, stream, matcher)
        began_s = time.monotonic()
        while self._engine.has_work:
            for delta in self._engine.step().deltas:
                self._take(delta)
        elapsed_s = time.monotonic() - began_s
        num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        return OfflineTotals(num_prompt_tokens, self._num_new_tokens, elapsed_s)

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
        if delta.finish_reason is None:  # ended by a stop string, of which the engine knows nothing
            self._engine.abort(delta.request_id)
        self._on_answer(answer.finished())
