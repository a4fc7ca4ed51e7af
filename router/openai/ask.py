"""What an OpenAI request asks for: sampling from the model's defaults and the body's fields, prompts, and how calls are heard.

    CompletionBody ──completion_ask──▶ Ask        ChatBody ──ChatRules.ask──▶ ChatAsk(Ask, ToolUse)

Does not know HTTP, or how anything of it is done.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from contracts.errors import InvalidRequest
from contracts.sampling import MAX_LOGIT_BIAS, MAX_SEED, SamplingParams
from router.caller import ANYBODY, Caller
from router.choosing.route import Route
from router.exchange import MAX_ANSWERS, Ask, Prompt, TextPrompt, TokenPrompt
from router.openai.schema import CommonBody, CompletionBody
from router.text.model_card import ModelCard

_COMPLETION_DEFAULT_MAX_TOKENS = 16  # OpenAI's
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")  # bounded: Python refuses to read a number of thousands of digits


@dataclass(frozen=True, slots=True)
class Envelope:
    """What is around a body, as an Ask has it: the request's name, and what its connection and headers say of who asks."""

    request_id: str
    traceparent: str = ""
    tracestate: str = ""
    caller: Caller = ANYBODY
    timeout_s: float | None = None
    session: str = ""
    arrived: float | None = None


@dataclass(frozen=True, slots=True)
class Length:
    """How long an answer may be, and what comes before it, as an Ask has it. `max_tokens` None is nobody's wish."""

    max_tokens: int | None
    fill_at_most: int | None = None
    prompt_only: bool = False
    each_says_prompt: bool = False


def completion_ask(body: CompletionBody, card: ModelCard, envelope: Envelope) -> Ask:
    """What a completion asks for. Raises InvalidRequest."""
    if body.best_of not in (None, 1, body.n):
        raise InvalidRequest("best_of", body.best_of, "is not served yet; leave it out")
    of_prompt = body.prompt_logprobs
    if body.echo and body.logprobs is not None:  # of the prompt too
        if of_prompt not in (None, body.logprobs):
            said = f"with echo it must be as logprobs, {body.logprobs}, or left out"
            raise InvalidRequest("prompt_logprobs", of_prompt, said)
        of_prompt = body.logprobs
    prompt_only = body.echo is True and body.max_tokens == 0
    if prompt_only and body.min_tokens:
        raise InvalidRequest("min_tokens", body.min_tokens, "must be 0 with max_tokens: 0")
    says_prompt = body.echo is True or of_prompt is not None or body.return_token_ids is True
    length = Length(1 if prompt_only else body.max_tokens, _COMPLETION_DEFAULT_MAX_TOKENS, prompt_only, says_prompt)
    logprobs = None if prompt_only else body.logprobs
    sampling = sampling_of(body, card, max_tokens=length.max_tokens, logprobs=logprobs, prompt_logprobs=of_prompt)
    return base_ask(body, _completion_prompts(body), sampling, envelope, length)


def base_ask(
    body: CommonBody,
    prompts: tuple[Prompt, ...],
    sampling: SamplingParams,
    envelope: Envelope,
    length: Length,
    marks: tuple[str, ...] = (),
) -> Ask:
    """What is asked for by fields that all requests have. Raises InvalidRequest."""
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    route = None if body.diptych is None or body.diptych.route is None else Route(body.diptych.route)
    return Ask(
        request_id=envelope.request_id,
        prompt=prompts[0],
        more_prompts=prompts[1:],
        seeded=body.seed is not None,
        truncate_prompt=body.truncate_prompt_tokens,
        sampling=sampling,
        n=1 if body.n is None else body.n,
        model=body.model or "",
        fill_context=length.max_tokens is None,
        fill_at_most=length.fill_at_most,
        prompt_only=length.prompt_only,
        each_says_prompt=length.each_says_prompt,
        gathered=body.stream is not True,
        stop=stop,
        include_stop=body.include_stop_str_in_output is True,
        skip_special_tokens=body.skip_special_tokens is not False,
        marks=marks,
        priority=body.priority or 0,
        route=route,
        timeout_s=envelope.timeout_s,
        traceparent=envelope.traceparent,
        tracestate=envelope.tracestate,
        session=envelope.session,
        caller=envelope.caller,
        arrived=envelope.arrived,
    )


def sampling_of(
    body: CommonBody, card: ModelCard, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """The model's defaults with the fields that the body has, of which those that are named depend on the endpoint."""
    base = card.defaults
    top_k = base.top_k if body.top_k is None else max(body.top_k, 0) if body.top_k >= -1 else body.top_k
    return SamplingParams(
        temperature=_given(body.temperature, base.temperature),
        top_p=_given(body.top_p, base.top_p),
        min_p=_given(body.min_p, base.min_p),
        repetition_penalty=_given(body.repetition_penalty, base.repetition_penalty),
        presence_penalty=_given(body.presence_penalty, base.presence_penalty),
        frequency_penalty=_given(body.frequency_penalty, base.frequency_penalty),
        top_k=top_k,  # -1 is vLLM's other word for all
        seed=card.new_seed() if body.seed is None else _seed(body.seed),
        max_tokens=base.max_tokens if max_tokens is None else max_tokens,
        min_tokens=body.min_tokens or 0,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos is True,
        logit_bias=_logit_bias(body.logit_bias) if body.logit_bias else (),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _seed(given: int) -> int:
    """OpenAI's seeds are of 64 bits and have a sign, which is left away: -1 is the largest of ours. Raises InvalidRequest."""
    if not -MAX_SEED - 1 <= given <= MAX_SEED:
        raise InvalidRequest("seed", given, f"must be an integer from {-MAX_SEED - 1} to {MAX_SEED}")
    return given & MAX_SEED


def _logit_bias(given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    if len(given) > MAX_LOGIT_BIAS:  # before each is looked at
        raise InvalidRequest("logit_bias", len(given), f"at most {MAX_LOGIT_BIAS} entries")
    for key in given:
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidRequest("logit_bias", key, "keys must be token ids, each spelled in one way")
    return tuple(sorted((int(key), bias) for key, bias in given.items()))


def _completion_prompts(body: CompletionBody) -> tuple[Prompt, ...]:
    """One, or several in a list; a list of numbers is one of tokens."""
    given = body.prompt
    prompts = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
    if len(prompts) > MAX_ANSWERS:  # before each is looked at
        raise InvalidRequest("prompt", f"{len(prompts)} prompts", f"at most {MAX_ANSWERS} answers in one request")
    add_special_tokens = body.add_special_tokens is not False
    return tuple(
        TextPrompt(prompt, add_special_tokens)
        if isinstance(prompt, str)
        else TokenPrompt(tuple(cast("list[int]", prompt)))  # the schema has looked at each already
        for prompt in prompts
    )
