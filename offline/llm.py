"""`LLM`: load a model once, then answer lists of prompts, in this process.

    with LLM("smollm2-135m-instruct", threads=2) as llm:
        for output in llm.generate(["Once upon a time"], SamplingParams(temperature=0.0, max_tokens=32)):
            print(output.outputs[0].text)

A step costs what the engine's step costs: texts are made from tokens as they come, and nothing else is between. Does not know
services or flags.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

from contracts import sampling
from contracts.errors import ConfigError, InvalidRequest
from contracts.request import GenerationRequest
from engine.engine import Engine
from engine.models.store import model_name, resolve_model
from offline.options import LLMConfig, LLMOptions, checked
from offline.output import CompletionOutput, RequestOutput
from offline.params import SamplingParams
from offline.prompts import ChatMessage, Prompt, conversations_of, params_for, prompts_of
from offline.run import OfflineAnswer, OfflineRun, TextWish, build_engine
from router.text.model_card import ModelCard, load_model_card

_MAX_PROMPTS = 1_000_000


class LLM:
    """One model in memory. Owns its engine and KV memory until `close`, or the end of a `with`.

    One call at a time; a second thread's is refused. The prefix cache lives from call to call.
    """

    def __init__(self, model: str | Path, **options: Unpack[LLMOptions]) -> None:
        """Load `model`: a directory, a .gguf file, a built-in name or a hub id; LLMConfig has the options.

        Raises TypeError or ValueError for an option; ConfigError, or its ModelLoadError, for a model or memory that is not there.
        """
        if not isinstance(model, str | Path):
            raise TypeError(f"model: got {model!r}, must be a name or a path")
        self.config: LLMConfig = checked(options)
        cache = None if self.config.cache_dir is None else Path(self.config.cache_dir)
        directory = resolve_model(str(model), cache)
        # Before the weights: a tokenizer that is not there is told at once.
        self._card: ModelCard | None = (
            load_model_card(directory, model_name(directory)) if self.config.tokenizer else None
        )
        runtime, caching = self.config.runtime(directory), self.config.prefix_caching
        self._engine: Engine | None = build_engine(
            runtime, self.config.kv_memory_bytes, _MAX_PROMPTS, prefix_caching=caching
        )
        self._numbers = itertools.count()
        self._busy = threading.Lock()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer each prompt, a text or token ids; parameters are for all, or one for each. Answers in the prompts' order.

        Raises TypeError or ValueError naming the prompt, before any has begun; RuntimeError after `close`.
        """
        found = prompts_of(prompts)
        encoded = [(one if isinstance(one, str) else None, self._encoded(one, at)) for at, one in enumerate(found, 1)]
        return self._answered(encoded, params_for(sampling_params, len(encoded)))

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, by the model's own chat template. Raises as `generate` does."""
        card = self._text_card("chat")
        encoded: list[tuple[str | None, tuple[int, ...]]] = []
        for number, conversation in enumerate(conversations_of(messages), 1):
            try:
                text = card.template_for(conversation).render(conversation)
            except InvalidRequest as error:
                raise ValueError(f"conversation {number}: {error.message}") from error
            encoded.append((text, card.tokenizer.encode(text, add_special_tokens=False)))
        return self._answered(encoded, params_for(sampling_params, len(encoded)))

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _encoded(self, prompt: Prompt, number: int) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return self._text_card(f"prompt {number}").tokenizer.encode(prompt, add_special_tokens=True)
        return tuple(prompt)

    def _text_card(self, what: str) -> ModelCard:
        if self._card is None:
            raise ValueError(f"{what}: got a text, must be token ids where the LLM has no tokenizer")
        return self._card

    def _answered(
        self, encoded: Sequence[tuple[str | None, tuple[int, ...]]], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        engine = self._engine
        if engine is None:
            raise RuntimeError("this LLM is closed")
        if len(encoded) > _MAX_PROMPTS:
            raise ValueError(f"prompts: got {len(encoded)}, at most {_MAX_PROMPTS} in one call")
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("this LLM is answering another thread's call")
        try:
            defaults = sampling.SamplingParams() if self._card is None else self._card.defaults
            requests = [
                GenerationRequest(f"llm-{next(self._numbers)}", token_ids, own.on(defaults))
                for (_, token_ids), own in zip(encoded, params, strict=True)
            ]
            answers: dict[int, OfflineAnswer] = {}
            run = OfflineRun(engine, lambda _index, _text: None, lambda answer: answers.update({answer.index: answer}))
            run.run(requests, [self._wish(one) for one in params])
        except ConfigError as error:
            raise ValueError(error.message) from error
        finally:
            self._busy.release()
        return [_output(text, token_ids, answers[at]) for at, (text, token_ids) in enumerate(encoded)]

    def _wish(self, params: SamplingParams) -> TextWish:
        if self._card is None:
            if params.stops:
                raise ValueError(f"stop: got {params.stop!r}, must be empty where the LLM has no tokenizer")
            return TextWish(None)
        return TextWish(self._card.tokenizer, params.stops, params.skip_special_tokens)


def _output(text: str | None, token_ids: tuple[int, ...], answer: OfflineAnswer) -> RequestOutput:
    made = CompletionOutput(0, answer.text, answer.token_ids, answer.finish_reason.value, answer.logprobs)
    return RequestOutput(text, token_ids, (made,), answer.prompt_logprobs, answer.num_cached_tokens)
