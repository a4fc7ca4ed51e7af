"""chat.completion and its chunks where tools may be called: as `router.openai.format.ChatFormat`, calls parted from text.

    Piece ──▶ parser of its answer ──▶ delta: content, tool_calls        an answer with calls ends with "tool_calls"

A chunk goes out when there is something to say: text that may still become a call is held back. Does not know how calls are
written.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

from contracts.request import FinishReason
from router.exchange import Piece, Usage
from router.openai.chat import ToolUse
from router.openai.format import ChatFormat, Frame
from router.openai.json import Json
from router.toolcalls.hearing import CallDelta, CallParser

_CALLED = "tool_calls"


@dataclass(slots=True)
class _Begun:
    """One answer's parser, and how many calls it has made that count."""

    parser: CallParser
    num_calls: int = 0


@dataclass(frozen=True, slots=True)
class _Said:
    content: str
    calls: tuple[CallDelta, ...]


class ToolChatFormat:
    """See Format."""

    def __init__(self, frame: Frame, use: ToolUse) -> None:
        self._frame = frame
        self._use = use
        self._chat = ChatFormat(frame)
        self._begun: dict[int, _Begun] = {}

    def chunk(self, piece: Piece) -> bytes:
        """The content and calls that one piece completes."""
        said = self._said(piece)
        begun = self._begun[piece.index]
        frame = self._frame
        silent = not said.content and not said.calls and piece.ending is None
        if silent and not frame.logprobs and not frame.token_ids and not frame.running_usage:
            return b"" if self._chat.has_begun(piece.index) else self._chat.opening(piece)
        delta: dict[str, Json] = {}
        if said.content or not said.calls:
            delta["content"] = said.content
        if said.calls:
            delta["tool_calls"] = [_call_delta(call) for call in said.calls]
        return self._chat.delta_chunk(piece, delta, self._reason(piece, begun))

    def closing(self, usage: Usage) -> bytes:
        """Usage, when asked for."""
        return self._chat.closing(usage)

    def whole(self, answers: Sequence[Piece]) -> bytes:
        """See Format."""
        return self._chat.whole_of(answers, [self._message(answer) for answer in answers])

    def takes_long(self, pieces: Sequence[Piece]) -> bool:
        """See Format."""
        return self._chat.takes_long(pieces)

    def _message(self, answer: Piece) -> tuple[dict[str, Json], str | None]:
        said = self._said(answer)
        message: dict[str, Json] = {"role": "assistant", "content": said.content, "refusal": None}
        if said.calls:
            message["content"] = said.content or None
            message["tool_calls"] = [
                {
                    "id": _new_id(),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in said.calls
            ]
        return message, self._reason(answer, self._begun[answer.index])

    def _said(self, piece: Piece) -> _Said:
        begun = self._begun.get(piece.index)
        if begun is None:
            begun = self._begun[piece.index] = _Begun(self._use.new_parser())
        heard = begun.parser.feed(piece.text)
        content, calls = heard.content, list(heard.calls)
        if piece.ending is not None:
            rest = begun.parser.end()
            content += rest.content
            calls = _merged([*calls, *rest.calls])
        if not self._use.parallel:
            calls = [call for call in calls if call.index == 0]
        begun.num_calls += sum(call.name is not None for call in calls)
        return _Said(content, tuple(calls))

    def _reason(self, piece: Piece, begun: _Begun) -> str | None:
        """One that was cut off says so, also in the middle of a call."""
        if piece.ending is None:
            return None
        called = begun.num_calls > 0 and piece.ending.reason is FinishReason.STOP
        return _CALLED if called else piece.ending.reason.value


def _merged(deltas: Sequence[CallDelta]) -> list[CallDelta]:
    """At most one of each call."""
    merged: dict[int, CallDelta] = {}
    for delta in deltas:
        before = merged.get(delta.index)
        merged[delta.index] = delta if before is None else replace(before, arguments=before.arguments + delta.arguments)
    return list(merged.values())


def _call_delta(call: CallDelta) -> dict[str, Json]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": _new_id(), "type": "function", "function": function}


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
