"""Answers in OpenAI's forms: whole bodies, and server-sent events whose constant parts are rendered once per answer.

    Piece ──chunk──▶ b"data: {…}\\n\\n"        Pieces ──whole──▶ {…}

Per token only the text and, when asked for, ids and log-probabilities are encoded. Does not know HTTP or requests' bodies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from contracts.request import TokenLogprob
from router.exchange import Ending, Piece, Usage
from router.tokenizer import Tokenizer

Json = str | int | float | bool | None | Sequence["Json"] | Mapping[str, "Json"]
DONE = b"data: [DONE]\n\n"
_MIN_LOGPROB = -9999.0  # JSON has no infinity
_ENCODER = msgspec.json.Encoder()


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


class Format(Protocol):
    """One endpoint's way of saying things."""

    def opening(self, piece: Piece) -> bytes:
        """Events before the first piece."""
        ...

    def chunk(self, piece: Piece) -> bytes:
        """The event of one piece."""
        ...

    def closing(self, ending: Ending) -> bytes:
        """Events after the last piece, without [DONE]."""
        ...

    def whole(self, answer: Piece) -> bytes:
        """The body of an answer that is not streamed; `answer` is all pieces in one."""
        ...


class ChatFormat:
    """chat.completion and chat.completion.chunk."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._head = _chunk_head(frame, "chat.completion.chunk")
        self._tail = _chunk_tail(frame)

    def opening(self, piece: Piece) -> bytes:
        """The role; with return_token_ids also the prompt's ids."""
        extra = b""
        if self._frame.token_ids:
            extra = b',"prompt_token_ids":' + render(piece.prompt_token_ids)
        delta = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        return self._head + delta + extra + self._tail

    def chunk(self, piece: Piece) -> bytes:
        """The text of one piece; the last has finish_reason."""
        frame = self._frame
        logprobs = render(chat_logprobs(frame.tokenizer, piece)) if frame.logprobs else b"null"
        delta = b'"delta":{"content":' + render(piece.text) + b'},"logprobs":' + logprobs
        return self._head + delta + _choice_end(frame, piece) + self._tail

    def closing(self, ending: Ending) -> bytes:
        """Usage, when asked for."""
        return _usage_chunk(self._frame, "chat.completion.chunk", ending.usage) if self._frame.usage_chunk else b""

    def whole(self, answer: Piece) -> bytes:
        """See Format."""
        frame, ending = self._frame, _ended(answer)
        choice: dict[str, Json] = {
            "index": 0,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": chat_logprobs(frame.tokenizer, answer) if frame.logprobs else None,
            "finish_reason": ending.reason.value,
            "stop_reason": ending.stop,
        }
        body = _body(frame, "chat.completion", choice, ending)
        if frame.token_ids:
            choice["token_ids"] = answer.token_ids
            body["prompt_token_ids"] = answer.prompt_token_ids
        if answer.prompt_logprobs:
            body["prompt_logprobs"] = prompt_logprobs(frame.tokenizer, answer.prompt_logprobs)
        return render(body)


class CompletionFormat:
    """text_completion."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._head = _chunk_head(frame, "text_completion")
        self._tail = _chunk_tail(frame)
        self._offset = 0  # characters of the tokens before, for text_offset
        self._opened = False

    def opening(self, piece: Piece) -> bytes:  # noqa: ARG002 - the interface's
        """Nothing: text begins at once."""
        return b""

    def chunk(self, piece: Piece) -> bytes:
        """The text of one piece; the last has finish_reason."""
        frame = self._frame
        logprobs = render(self._logprobs(piece)) if frame.logprobs else b"null"
        prompt_ids = b""
        if frame.token_ids and not self._opened:
            prompt_ids = b',"prompt_token_ids":' + render(piece.prompt_token_ids)
        self._opened = True
        text = b'"text":' + render(piece.text) + b',"logprobs":' + logprobs + prompt_ids
        return self._head + text + _choice_end(frame, piece) + self._tail

    def closing(self, ending: Ending) -> bytes:
        """Usage, when asked for."""
        return _usage_chunk(self._frame, "text_completion", ending.usage) if self._frame.usage_chunk else b""

    def whole(self, answer: Piece) -> bytes:
        """See Format."""
        frame, ending = self._frame, _ended(answer)
        choice: dict[str, Json] = {
            "index": 0,
            "text": answer.text,
            "logprobs": self._logprobs(answer) if frame.logprobs else None,
            "finish_reason": ending.reason.value,
            "stop_reason": ending.stop,
        }
        if frame.token_ids:
            choice["token_ids"] = answer.token_ids
            choice["prompt_token_ids"] = answer.prompt_token_ids
        if answer.prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs(frame.tokenizer, answer.prompt_logprobs)
        return render(_body(frame, "text_completion", choice, ending))

    def _logprobs(self, piece: Piece) -> dict[str, Json]:
        """OpenAI's old form; top_logprobs always have the chosen token."""
        tokenizer = self._frame.tokenizer
        tokens, offsets = [], []
        for entry in piece.logprobs:
            token = token_text(tokenizer, entry.token_id)
            tokens.append(token)
            offsets.append(self._offset)
            self._offset += len(token)
        top: list[Json] = [
            {token_text(tokenizer, token_id): finite(value) for token_id, value in _top_with_chosen(entry)}
            for entry in piece.logprobs
        ]
        return {
            "text_offset": offsets,
            "token_logprobs": [finite(entry.logprob) for entry in piece.logprobs],
            "tokens": tokens,
            "top_logprobs": top,
        }


def render(value: Json) -> bytes:
    """JSON in UTF-8."""
    return _ENCODER.encode(value)


def error_body(message: str, kind: str, param: str | None, code: str | int | None) -> bytes:
    """OpenAI's error object."""
    return render({"error": {"message": message, "type": kind, "param": param, "code": code}})


def event(body: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + body + b"\n\n"


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as text; one that is a piece of a character as OpenAI writes it, "bytes:\\xe6\\x97"."""
    spelled = tokenizer.token_bytes(token_id)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def finite(logprob: float) -> float:
    """JSON has no infinity: very unlikely is -9999, as in vLLM."""
    return max(logprob, _MIN_LOGPROB)


def chat_logprobs(tokenizer: Tokenizer, piece: Piece) -> dict[str, Json]:
    """One entry per token, its top_logprobs as many as were asked for."""

    def entry(token_id: int, logprob: float) -> dict[str, Json]:
        return {
            "token": token_text(tokenizer, token_id),
            "logprob": finite(logprob),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    content: list[Json] = [
        {**entry(e.token_id, e.logprob), "top_logprobs": [entry(token_id, value) for token_id, value in e.top]}
        for e in piece.logprobs
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob | None]) -> list[Json]:
    """vLLM's form: per prompt token a map from token id to its log-probability, null for the first."""
    shown: list[Json] = []
    for entry in entries:
        if entry is None:
            shown.append(None)
            continue
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(entry.top, start=1)}
        ranks[entry.token_id] = entry.rank
        shown.append(
            {
                str(token_id): {
                    "logprob": finite(value),
                    "rank": ranks[token_id],
                    "decoded_token": token_text(tokenizer, token_id),
                }
                for token_id, value in _top_with_chosen(entry)
            }
        )
    return shown


def usage_json(usage: Usage) -> dict[str, Json]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def diptych_json(ending: Ending) -> dict[str, Json]:
    """Where the time of this answer went; durations in seconds."""
    handoff: Json = None
    if ending.handoff is not None:
        handoff = {**dataclasses.asdict(ending.handoff), "gb_per_s": ending.handoff.gb_per_s}
    return {"route": ending.route.value, "stages": dataclasses.asdict(ending.stages), "handoff": handoff}


def _top_with_chosen(entry: TokenLogprob) -> list[tuple[int, float]]:
    """The likeliest tokens, and the chosen one if it is not among them."""
    if any(token_id == entry.token_id for token_id, _ in entry.top):
        return list(entry.top)
    return [*entry.top, (entry.token_id, entry.logprob)]


def _chunk_head(frame: Frame, kind: str) -> bytes:
    head = render(_common(frame, kind))
    return b"data: " + head[:-1] + b',"choices":[{"index":0,'


def _choice_end(frame: Frame, piece: Piece) -> bytes:
    """From finish_reason to the end of choices, and our own account behind it."""
    ids = b',"token_ids":' + render(piece.token_ids) if frame.token_ids else b""
    ending = piece.ending
    if ending is None:
        return b',"finish_reason":null' + ids + b"}]"
    reason = b',"finish_reason":' + render(ending.reason.value) + b',"stop_reason":' + render(ending.stop)
    account = b',"diptych":' + render(diptych_json(ending)) if frame.stages else b""
    return reason + ids + b"}]" + account


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


def _body(frame: Frame, kind: str, choice: dict[str, Json], ending: Ending) -> dict[str, Json]:
    body: dict[str, Json] = {**_common(frame, kind), "choices": [choice], "usage": usage_json(ending.usage)}
    if frame.stages:
        body["diptych"] = diptych_json(ending)
    return body


def _ended(answer: Piece) -> Ending:
    assert answer.ending is not None, "an answer without an ending is not whole"
    return answer.ending
