"""Calls without tags, as Llama 3 writes them: an answer that is {"name": …, "parameters": {…}}, several with ; between them.

    START ──{──▶ OBJECT ──}──▶ BETWEEN ──{──▶ OBJECT …           START: the answer's beginning, or behind <|python_tag|>
      └─────▶ TEXT ◀──┘ no call    └─────▶ TEXT

Only names of tools that were given count: an answer that is JSON may be just that. What is no call is content as it stands.
Costs the same per character whatever came before.
"""

from __future__ import annotations

from collections.abc import Container
from enum import Enum, auto

from router.toolcalls.hearing import Heard, Hearing, TextBefore
from router.toolcalls.reader import CallReader, Step

_SEPARATORS = ";,"


class _State(Enum):
    TEXT = auto()
    START = auto()
    OBJECT = auto()
    BETWEEN = auto()


class BareParser:
    """See CallParser."""

    def __init__(self, mark: str, names: Container[str]) -> None:
        """`mark` may come before calls, also in the middle of an answer."""
        self._names = names
        self._hearing = Hearing()
        self._before = TextBefore(mark)
        self._reader = CallReader(names)
        self._state = _State.START
        self._called = False  # since START
        self._raw: list[str] = []  # since START or the last call, until the next has begun
        self._back = ""  # to be read again as text

    def feed(self, text: str) -> Heard:
        """See CallParser."""
        while text:
            text = self._text(text) if self._state is _State.TEXT else self._calls(text)
        return self._hearing.take()

    def end(self) -> Heard:
        """See CallParser."""
        if self._state is _State.START or (self._state is _State.OBJECT and not self._reader.begun):
            self._no_call()
        self._hearing.say(self._before.flush())
        return self._hearing.take()

    def _text(self, text: str) -> str:
        content, rest = self._before.push(text)
        self._hearing.say(content)
        if rest is None:
            return ""
        self._state = _State.START
        self._called = False
        self._raw.clear()
        return rest

    def _calls(self, text: str) -> str:
        """Read up to where TEXT goes on, if it does; returns what is to be read there."""
        position = 0
        while position < len(text):
            if self._state is _State.OBJECT:
                length = self._reader.run(text, position)
                if length:
                    self._hearing.argue(self._reader.take_arguments())
                    position += length
                    continue
            self._take(text[position])
            position += 1
            if self._state is _State.TEXT:
                back, self._back = self._back, ""
                return back + text[position:]
        return ""

    def _take(self, char: str) -> None:
        if self._state is _State.OBJECT:
            self._object(char)
        elif char == "{":
            self._state = _State.OBJECT
            self._reader = CallReader(self._names)
            self._object(char)
        elif char.isspace() or (char in _SEPARATORS and self._state is _State.BETWEEN):
            self._raw.append(char)
        else:
            self._back = "".join(self._raw) + char
            gone = "" if self._called else self._before.gone
            self._hearing.say(gone)
            self._resume(beside_call=self._called, said=gone != "")

    def _object(self, char: str) -> None:
        reader, had_begun = self._reader, self._reader.begun
        step = reader.step(char)
        if reader.begun and not had_begun:
            self._called = True
            self._raw.clear()
            self._hearing.begin(reader.name)
        if reader.begun:
            self._hearing.argue(reader.take_arguments())
        elif step is Step.MORE:
            self._raw.append(char)
        if step is Step.DONE:
            self._state = _State.BETWEEN
        elif step is Step.BROKEN:
            if reader.begun:
                self._resume(beside_call=True, said=False)
            else:
                self._no_call()
            self._back = char

    def _no_call(self) -> None:
        """What was held back is text."""
        raw = "".join(self._raw)
        self._hearing.say(raw.lstrip() if self._called else self._before.gone + raw)
        self._resume(beside_call=False, said=True)

    def _resume(self, *, beside_call: bool, said: bool) -> None:
        self._state = _State.TEXT
        self._before.resume(beside_call=beside_call, said=said)
        self._raw.clear()
