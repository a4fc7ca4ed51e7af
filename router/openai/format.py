"""Answers in OpenAI's forms: whole bodies, and server-sent events whose constant parts are rendered once per answer.

    Piece ──chunk──▶ b"data: {…}\\n\\n"        whole answers ──whole──▶ {…}

Per token only the text and, when asked for, ids and log-probabilities are encoded. Does not know HTTP or requests' bodies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from contracts.request import TokenLogprob
from router.exchange import Ending, Piece, Usage
from router.openai.account import diptych_json
from router.openai.json import Json, event, listed, render
from router.openai.logprobs import chat_logprobs, finite, paced, prompt_logprobs, token_text, top_with_chosen
from router.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt comes before the answer: as the text that was given, or None for what its tokens say; one for each prompt."""

    texts: tuple[str | None, ...]
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What all chunks and the body of one answer have in common."""

    response_id: str
    created: int  # seconds since 1970
    model: str
    fingerprint: str
    tokenizer: Tokenizer
    usage_chunk: bool = False
    stages: bool = False
    token_ids: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    echo: Echo | None = None
    per_prompt: int = 1  # answers to each prompt
    stop_token_ids: frozenset[int] = frozenset()  # that the client named: one that ends an answer is told
    running_usage: bool = False


class Format(Protocol):
    """One endpoint's way of saying things. One per request, whose answers' pieces may come in any order."""

    def chunk(self, piece: Piece) -> bytes:
        """The events of one piece."""
        ...

    def closing(self, usage: Usage) -> bytes:
        """Events after the last piece of all, without [DONE]."""
        ...

    def whole(self, answers: Sequence[Piece]) -> bytes:
        """The body of answers that are not streamed, in the order of their index; each is all its pieces in one."""
        ...

    def takes_long(self, pieces: Sequence[Piece]) -> bool:
        """Whether saying these takes longer than others can wait: then `chunk` and `whole` may be called in a background thread."""
        ...


_MANY_ENTRIES = 256  # of 21 tokens each, about 10 ms
_MANY_TOKENS = 4096  # to be decoded, about 3 ms


class ChatFormat:
    """chat.completion and chat.completion.chunk."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._common = _chunk_common(frame, "chat.completion.chunk")
        self._heads: dict[int, bytes] = {}  # of the answers that have begun
        self._tail = _chunk_tail(frame)
        self._usage = _RunningUsage() if frame.running_usage else None

    def chunk(self, piece: Piece) -> bytes:
        """The text of one piece; an answer's first comes behind its opening, its last has finish_reason."""
        frame = self._frame
        opening = b"" if piece.index in self._heads else self.opening(piece)
        logprobs = render(chat_logprobs(frame.tokenizer, piece)) if frame.logprobs else b"null"
        delta = b'"delta":{"content":' + render(piece.text) + b'},"logprobs":' + logprobs
        tail = self._tail if self._usage is None else self._usage.tail(piece)
        return opening + self._heads[piece.index] + delta + _choice_end(frame, piece) + tail

    def delta_chunk(self, piece: Piece, delta: Mapping[str, Json], reason: str | None) -> bytes:
        """As `chunk`, with another delta than the piece's text, and another reason to end than the piece's."""
        frame = self._frame
        opening = b"" if self.has_begun(piece.index) else self.opening(piece)
        logprobs = render(chat_logprobs(frame.tokenizer, piece)) if frame.logprobs else b"null"
        shown = b'"delta":' + render(delta) + b',"logprobs":' + logprobs
        tail = self._tail if self._usage is None else self._usage.tail(piece)
        return opening + self._heads[piece.index] + shown + _choice_end(frame, piece, reason) + tail

    def has_begun(self, index: int) -> bool:
        """Whether an answer's opening was said."""
        return index in self._heads

    def opening(self, piece: Piece) -> bytes:
        """An answer's first chunk: the role; with return_token_ids also the prompt's ids."""
        head = self._heads[piece.index] = _chunk_head(self._common, piece.index)
        extra = b""
        if self._frame.token_ids:
            extra = b',"prompt_token_ids":' + render(piece.prompt_token_ids)
        delta = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        tail = self._tail if self._usage is None else self._usage.before(piece)
        return head + delta + extra + tail

    def closing(self, usage: Usage) -> bytes:
        """Usage, when asked for."""
        return _usage_chunk(self._frame, "chat.completion.chunk", usage) if self._frame.usage_chunk else b""

    def whole(self, answers: Sequence[Piece]) -> bytes:
        """See Format."""
        return self.whole_of(answers, [(_message(answer.text), None) for answer in answers])

    def takes_long(self, pieces: Sequence[Piece]) -> bool:
        """See Format."""
        return _num_entries(pieces) > _MANY_ENTRIES

    def whole_of(self, answers: Sequence[Piece], messages: Sequence[tuple[dict[str, Json], str | None]]) -> bytes:
        """The body with these messages, and reasons to end where they are not the answers' own."""
        frame, first = self._frame, answers[0]
        choices = [self._choice(answer, *message) for answer, message in zip(answers, messages, strict=True)]
        body = _body(frame, "chat.completion", choices, answers)
        if frame.token_ids:
            body["prompt_token_ids"] = first.prompt_token_ids
        if frame.prompt_logprobs:
            body["prompt_logprobs"] = prompt_logprobs(frame.tokenizer, first.prompt_logprobs)
        return render(body)

    def _choice(self, answer: Piece, message: dict[str, Json], reason: str | None) -> dict[str, Json]:
        frame, ending = self._frame, _ended(answer)
        choice: dict[str, Json] = {
            "index": answer.index,
            "message": message,
            "logprobs": chat_logprobs(frame.tokenizer, answer) if frame.logprobs else None,
            "finish_reason": reason or ending.reason.value,
            "stop_reason": _stop_reason(frame, ending),
        }
        if frame.token_ids:
            choice["token_ids"] = answer.token_ids
        return choice


def _message(text: str) -> dict[str, Json]:
    return {"role": "assistant", "content": text, "refusal": None}


_Entry = tuple[int, TokenLogprob | None]


@dataclass(frozen=True, slots=True)
class _Echoed:
    """The prompt as it comes before each answer; entries only when log-probabilities are asked for."""

    text: str
    ids: tuple[int, ...]
    logprobs: Sequence[TokenLogprob | None]

    @property
    def entries(self) -> Iterable[_Entry]:
        """Made when they are gone through: of a long prompt they are many."""
        return zip(self.ids, self.logprobs, strict=True)


_NO_ECHO = _Echoed("", (), ())


@dataclass(slots=True)
class _Begun:
    """One answer of a completion that has begun."""

    head: bytes
    offset: int = 0  # characters of the tokens before, for text_offset


class CompletionFormat:
    """text_completion. With echo each answer begins with the prompt, and its log-probabilities with the prompt's."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._common = _chunk_common(frame, "text_completion")
        self._begun: dict[int, _Begun] = {}
        self._echoed: dict[int, _Echoed] = {}  # by prompt
        self._tail = _chunk_tail(frame)
        self._usage = _RunningUsage() if frame.running_usage else None

    def chunk(self, piece: Piece) -> bytes:
        """The text of one piece; an answer's first has the prompt's ids if asked for, its last has finish_reason."""
        frame, echoed = self._frame, self._echo(piece)
        prompt_ids = b""
        if frame.token_ids and piece.index not in self._begun:
            prompt_ids = b',"prompt_token_ids":' + render(piece.prompt_token_ids)
        begun = self._begin(piece)
        logprobs = render(self._logprobs(chain(echoed.entries, _entries(piece)), begun)) if frame.logprobs else b"null"
        text = b'"text":' + render(echoed.text + piece.text) + b',"logprobs":' + logprobs + prompt_ids
        tail = self._tail if self._usage is None else self._usage.tail(piece)
        return begun.head + text + _choice_end(frame, piece) + tail

    def closing(self, usage: Usage) -> bytes:
        """Usage, when asked for."""
        return _usage_chunk(self._frame, "text_completion", usage) if self._frame.usage_chunk else b""

    def whole(self, answers: Sequence[Piece]) -> bytes:
        """See Format."""
        frame = self._frame
        choices = [self._choice(answer) for answer in answers]
        for answer, choice in zip(answers, choices, strict=True):
            first = answers[answer.index - answer.index % frame.per_prompt]
            if frame.token_ids:
                choice["prompt_token_ids"] = first.prompt_token_ids
            if frame.prompt_logprobs:
                choice["prompt_logprobs"] = prompt_logprobs(frame.tokenizer, first.prompt_logprobs)
        return render(_body(frame, "text_completion", choices, answers))

    def takes_long(self, pieces: Sequence[Piece]) -> bool:
        """See Format."""
        decoded = 0 if self._frame.echo is None else sum(len(piece.prompt_token_ids) for piece in pieces)
        return decoded > _MANY_TOKENS or _num_entries(pieces) > _MANY_ENTRIES

    def _choice(self, answer: Piece) -> dict[str, Json]:
        frame, ending, echoed = self._frame, _ended(answer), self._echo(answer)
        entries = chain(echoed.entries, _entries(answer))
        choice: dict[str, Json] = {
            "index": answer.index,
            "text": echoed.text + answer.text,
            "logprobs": self._logprobs(entries, self._begin(answer)) if frame.logprobs else None,
            "finish_reason": ending.reason.value,
            "stop_reason": _stop_reason(frame, ending),
        }
        if frame.token_ids:
            choice["token_ids"] = answer.token_ids
        return choice

    def _echo(self, piece: Piece) -> _Echoed:
        """What comes before the text of this piece: nothing, unless it is an answer's first and the prompt is to be shown."""
        echo = self._frame.echo
        if echo is None or piece.index in self._begun:
            return _NO_ECHO
        prompt = piece.index // self._frame.per_prompt
        if prompt not in self._echoed:  # this prompt's first piece, which brings what is known of it
            ids, text = piece.prompt_token_ids, echo.texts[prompt]
            if text is None:
                text = self._frame.tokenizer.decode(ids, echo.skip_special_tokens)
            shown = self._frame.logprobs
            self._echoed[prompt] = _Echoed(text, ids if shown else (), piece.prompt_logprobs if shown else ())
        return self._echoed[prompt]

    def _begin(self, piece: Piece) -> _Begun:
        if piece.index not in self._begun:
            self._begun[piece.index] = _Begun(_chunk_head(self._common, piece.index))
        return self._begun[piece.index]

    def _logprobs(self, entries: Iterable[_Entry], begun: _Begun) -> dict[str, Json]:
        """OpenAI's old form; top_logprobs always have the chosen token. Nothing comes before a prompt's first: null."""
        tokenizer = self._frame.tokenizer
        tokens: list[str] = []
        offsets: list[int] = []
        chosen: list[float | None] = []
        top: list[bytes] = []
        for token_id, entry in paced(entries):
            token = token_text(tokenizer, token_id)
            tokens.append(token)
            offsets.append(begun.offset)
            begun.offset += len(token)
            chosen.append(None if entry is None else finite(entry.logprob))
            pairs = () if entry is None else top_with_chosen(entry)
            shown = None if entry is None else {token_text(tokenizer, other): finite(value) for other, value in pairs}
            top.append(render(shown))
        return {"text_offset": offsets, "token_logprobs": chosen, "tokens": tokens, "top_logprobs": listed(top)}


def _num_entries(pieces: Sequence[Piece]) -> int:
    return sum(len(piece.logprobs) + len(piece.prompt_logprobs) for piece in pieces)


def _entries(piece: Piece) -> list[_Entry]:
    return [(entry.token_id, entry) for entry in piece.logprobs]


def usage_json(usage: Usage) -> dict[str, Json]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _chunk_common(frame: Frame, kind: str) -> bytes:
    return b"data: " + render(_common(frame, kind))[:-1]


def _chunk_head(common: bytes, index: int) -> bytes:
    return common + b',"choices":[{"index":' + render(index) + b","


def _choice_end(frame: Frame, piece: Piece, reason: str | None = None) -> bytes:
    """From finish_reason, `reason` or the piece's own, to the end of choices, and our own account behind it."""
    ids = b',"token_ids":' + render(piece.token_ids) if frame.token_ids else b""
    ending = piece.ending
    if ending is None:
        return b',"finish_reason":null' + ids + b"}]"
    end = (
        b',"finish_reason":'
        + render(reason or ending.reason.value)
        + b',"stop_reason":'
        + render(_stop_reason(frame, ending))
    )
    account = b',"diptych":' + render(diptych_json(ending)) if frame.stages else b""
    return end + ids + b"}]" + account


class _RunningUsage:
    """vLLM's continuous_usage_stats: each chunk of an answer says its prompt's tokens and its own so far."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[int, int]] = {}

    def before(self, piece: Piece) -> bytes:
        """The end of a chunk that opens an answer."""
        return self._tail(len(piece.prompt_token_ids), 0)

    def tail(self, piece: Piece) -> bytes:
        """The end of this piece's chunk."""
        num_prompt, num_given = self._counts.get(piece.index, (len(piece.prompt_token_ids), 0))
        num_given += len(piece.token_ids)
        self._counts[piece.index] = num_prompt, num_given
        return self._tail(num_prompt, num_given)

    def _tail(self, num_prompt: int, num_given: int) -> bytes:
        counts = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_given,
            "total_tokens": num_prompt + num_given,
        }
        return b',"usage":' + render(counts) + b"}\n\n"


def _chunk_tail(frame: Frame) -> bytes:
    return b',"usage":null}\n\n' if frame.usage_chunk else b"}\n\n"


def _usage_chunk(frame: Frame, kind: str, usage: Usage) -> bytes:
    return event(render({**_common(frame, kind), "choices": [], "usage": usage_json(usage)}))


def _common(frame: Frame, kind: str) -> dict[str, Json]:
    return {
        "id": frame.response_id,
        "object": kind,
        "created": frame.created,
        "model": frame.model,
        "system_fingerprint": frame.fingerprint,
    }


def _body(frame: Frame, kind: str, choices: list[dict[str, Json]], answers: Sequence[Piece]) -> dict[str, Json]:
    """Our account is that of answer 0; of several, each has its own besides."""
    usage = answers[0].usage
    assert usage is not None, "answers without their usage are not whole"
    body: dict[str, Json] = {**_common(frame, kind), "choices": choices, "usage": usage_json(usage)}
    if frame.stages:
        accounts = [diptych_json(_ended(answer)) for answer in answers]
        body["diptych"] = accounts[0]
        if len(answers) > 1:
            for choice, account in zip(choices, accounts, strict=True):
                choice["diptych"] = account
    return body


def _stop_reason(frame: Frame, ending: Ending) -> str | int | None:
    """As vLLM: the stop string or token that the client named; nothing at the end of text."""
    named = isinstance(ending.stop, str) or ending.stop in frame.stop_token_ids
    return ending.stop if named else None


def _ended(answer: Piece) -> Ending:
    assert answer.ending is not None, "an answer without an ending is not whole"
    return answer.ending
