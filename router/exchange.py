"""What a front hands in and what it gets back, whatever its transport: an Ask, then Pieces, each answer's last with an
Ending, the last of all with the Usage.

Does not know HTTP, gRPC, workers or how an answer is made.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from contracts.errors import InvalidRequest
from contracts.request import FinishReason, TokenLogprob
from contracts.sampling import SamplingParams
from observability.stages import HandoffStats, Spent
from router.admission.quota import Quota
from router.caller import ANYBODY, Caller
from router.choosing.route import Decision, Route
from router.text.chat_template import Conversation


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text, tokenised as it is; BOS is added where the model's tokenizer adds one, unless told not to."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, taken as they are."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation for the model's template, which brings its special tokens itself."""

    conversation: Conversation
    add_special_tokens: bool = False


Prompt = TextPrompt | TokenPrompt | ChatPrompt
MAX_ANSWERS = 128  # in one request, to all its prompts
_TRACESTATE_CHARS = 512
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One prompt, or several, and how to answer each `n` times. Raises InvalidRequest for other than 1 to MAX_ANSWERS in all.

    Answer i to prompt p has the index p * n + i. `seeded` says that the client gave the seed, so that each prompt has the
    answers that it has alone; else all answers have seeds of their own. `truncate_prompt` keeps only a prompt's last tokens,
    -1 those that leave room for the answer. `marks` are special tokens that count as text.
    With `fill_context`, sampling.max_tokens is not the client's: it is set to what the context leaves, at most
    `fill_at_most`. `each_says_prompt`: the prompt, or what is asked of it, comes with each answer; `gathered`: no piece is sent
    before all are there. With `prompt_only` the answer is empty: the one token that ends computing the prompt is not given.
    `session` is whatever the client calls the conversation that this belongs to, for policies that keep it in one place.
    `model` empty takes the only one. `route` None lets the router choose. `include_stop` keeps a stop
    string in the text. Lower `priority` runs first. `caller` is whoever's key came with it. `arrived` is when its first byte came,
    an instant of the router's clock, where that is known.
    """

    request_id: str
    prompt: Prompt
    more_prompts: tuple[Prompt, ...] = ()
    sampling: SamplingParams
    seeded: bool = True
    truncate_prompt: int | None = None
    n: int = 1
    model: str = ""
    fill_context: bool = False
    fill_at_most: int | None = None
    prompt_only: bool = False
    each_says_prompt: bool = False
    gathered: bool = False
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    marks: tuple[str, ...] = ()
    priority: int = 0
    route: Route | None = None
    timeout_s: float | None = None
    traceparent: str = ""
    tracestate: str = ""
    session: str = ""
    caller: Caller = ANYBODY
    arrived: float | None = None

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """All of them, in order."""
        return (self.prompt, *self.more_prompts)

    @property
    def num_answers(self) -> int:
        """Answers to all prompts together."""
        return self.n * len(self.prompts)

    @property
    def session_key(self) -> str:
        """Its session among those of all callers; empty where the client named none."""
        return f"{self.caller.name}\0{self.session}" if self.session else ""

    def __post_init__(self) -> None:
        if not 1 <= self.n <= MAX_ANSWERS:
            raise InvalidRequest("n", self.n, f"must be from 1 to {MAX_ANSWERS}")
        if self.num_answers > MAX_ANSWERS:
            asked = f"{len(self.prompts)} prompts, each answered {self.n} times"
            raise InvalidRequest("prompt", asked, f"at most {MAX_ANSWERS} answers in one request")
        if self.truncate_prompt is not None and self.truncate_prompt != -1 and self.truncate_prompt < 1:
            raise InvalidRequest(
                "truncate_prompt_tokens", self.truncate_prompt, "must be at least 1, or -1 for what fits"
            )


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request: each prompt once, all answers together.

    `cached_tokens` are prompt tokens found in a prefix cache when a prompt was computed, for its first answer.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Ending:
    """How an answer ended: `stop` is the stop string or stop token id that did it, if one did."""

    reason: FinishReason
    stop: str | int | None
    spent: Spent
    handoff: HandoffStats | None
    route: Route
    decision: Decision | None = None  # why it went that way


@dataclass(frozen=True, slots=True)
class Piece:
    """New text and tokens of answer `index` since its last piece.

    Text may lag behind its tokens (half a character, the beginning of a stop string). `logprobs` is empty or as long as
    `token_ids`. `prompt_token_ids` come with each answer's first piece, `prompt_logprobs` when asked for with that of
    its prompt's first answer, which is the first of that prompt. `usage` comes with the last piece of all, `quota` with the
    first where the caller has limits.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: Sequence[TokenLogprob | None] = ()
    ending: Ending | None = None
    index: int = 0
    usage: Usage | None = None
    quota: Quota | None = None


def valid_traceparent(given: str) -> str:
    """A W3C trace context as it came; anything else is dropped, as the standard asks."""
    return given if _TRACEPARENT.fullmatch(given) else ""


def valid_tracestate(given: str, traceparent: str) -> str:
    """What came beside that trace context; dropped where it is of no use or longer than the standard asks anybody to carry."""
    return given if traceparent and len(given) <= _TRACESTATE_CHARS and given.isascii() and given.isprintable() else ""
