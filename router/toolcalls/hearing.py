"""What both kinds of parsers are made of: the calls and content heard so far, and plain text that a tag may end.

Does not know how calls are written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

_MAX_GAP = 64  # characters of whitespace held back before what may be a call


@dataclass(frozen=True, slots=True)
class CallDelta:
    """More of call `index`: its name comes once, with the first; arguments are a piece of JSON text."""

    index: int
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class Heard:
    """What a piece of text became; of each call at most one delta."""

    content: str
    calls: tuple[CallDelta, ...] = ()


class CallParser(Protocol):
    """Parts what a model says into content and calls while it comes. One per answer."""

    def feed(self, text: str) -> Heard:
        """The content and calls that this text completes."""
        ...

    def end(self) -> Heard:
        """What was held back: the answer has no more text."""
        ...


class Hearing:
    """Collects until it is taken."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._calls: dict[int, CallDelta] = {}
        self._num_calls = 0

    def say(self, text: str) -> None:
        """Content."""
        self._content.append(text)

    def begin(self, name: str) -> None:
        """Another call; what is argued from now on is its."""
        self._calls[self._num_calls] = CallDelta(self._num_calls, name, "")
        self._num_calls += 1

    def argue(self, arguments: str) -> None:
        """More of the last call's arguments."""
        if arguments:
            index = self._num_calls - 1
            so_far = self._calls.get(index, CallDelta(index, None, ""))
            self._calls[index] = CallDelta(index, so_far.name, so_far.arguments + arguments)

    def take(self) -> Heard:
        """All since the last time."""
        heard = Heard("".join(self._content), tuple(self._calls.values()))
        self._content.clear()
        self._calls.clear()
        return heard


class TextBefore:
    """Text up to a tag. Holds back what may be the tag's beginning, and the whitespace before it, which goes with a call.

    Whitespace that follows a call goes too, unless it parts words before from words after. `gone` is what the last tag took
    with it: if it opened no call, it comes back.
    """

    def __init__(self, tag: str) -> None:
        self._tag = tag
        self._held = ""
        self._beside_call = False  # nothing but whitespace came since a call
        self._beside = ""  # that whitespace
        self._said = False  # content came before it
        self.gone = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The content in it, and what follows the tag when it is there."""
        text = self._held + text
        self._held = ""
        if self._beside_call:
            text = self._beside_the_call(text)
        found = text.find(self._tag)
        end = found if found >= 0 else len(text) - _open_length(text, self._tag)
        start = end - _num_spaces(text, end)
        content = self._content(text[:start])
        if found < 0:
            self._held = text[start:]
            return content, None
        end = found + len(self._tag)
        self.gone = text[start:end]
        return content, text[end:]

    def resume(self, *, beside_call: bool, said: bool) -> None:
        """Text again, behind a call or behind what was none and was `said`."""
        self._beside_call = beside_call
        self._beside = self.gone = ""
        self._said = self._said or said

    def flush(self) -> str:
        """What was held back, when no more comes."""
        held, self._held = self._held, ""
        return self._content(held)

    def _beside_the_call(self, text: str) -> str:
        fresh = text.lstrip()
        self._beside += text[: len(text) - len(fresh)][: _MAX_GAP - len(self._beside)]
        return fresh

    def _content(self, text: str) -> str:
        if not text:
            return ""
        if self._beside_call and self._said:
            text = self._beside + text
        self._beside_call = False
        self._said = True
        return text


def _open_length(text: str, tag: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `tag`."""
    if tag[0] not in text[1 - len(tag) :]:
        return 0
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


def _num_spaces(text: str, end: int) -> int:
    before = text[max(0, end - _MAX_GAP) : end]
    return len(before) - len(before.rstrip())
