"""Calls between tags, as Hermes, Qwen and SmolLM2 write them: <tool_call>{…}</tool_call> or <tool_call>[{…}, {…}]</tool_call>.

    TEXT ──opening tag──▶ OPENED ──{──▶ OBJECT ──}──▶ BETWEEN ──{──▶ OBJECT …
     ▲                      └─[──▶ ITEM ──{──▶ OBJECT ──}──▶ BETWEEN ──,──▶ ITEM …    ──]──▶ BETWEEN
     │                             not what belongs there: before any call ──▶ TEXT, all since the tag is content
     └──closing tag─────                                   after a call    ──▶ STRAY, content up to the closing tag

Nothing of a call is given as content and no half tag is. An empty list is no call and no content: SmolLM2 says so that it
needs none. Costs the same per character whatever came before.
"""

from __future__ import annotations

from enum import Enum, auto

from router.toolcalls.hearing import Heard, Hearing, TextBefore
from router.toolcalls.reader import CallReader, Step


class _State(Enum):
    TEXT = auto()
    OPENED = auto()
    ITEM = auto()
    OBJECT = auto()
    BETWEEN = auto()
    STRAY = auto()


class TaggedParser:
    """See CallParser."""

    def __init__(self, opening: str, closing: str) -> None:
        self._closing_tag = closing
        self._hearing = Hearing()
        self._before = TextBefore(opening)
        self._reader = CallReader(None)
        self._state = _State.TEXT
        self._raw: list[str] = []  # since the opening tag, until a call has begun
        self._called = False  # it has, since the opening tag
        self._in_list = False
        self._closing = ""  # the beginning of a closing tag
        self._back = ""  # to be read again as text

    def feed(self, text: str) -> Heard:
        """See CallParser."""
        while text:
            text = self._text(text) if self._state is _State.TEXT else self._tagged(text)
        return self._hearing.take()

    def end(self) -> Heard:
        """See CallParser."""
        closing, self._closing = self._closing, ""
        match self._state:
            case _State.OBJECT if self._reader.begun:
                self._hearing.argue(self._reader.rest(closing))
            case _State.OBJECT if self._called:
                self._hearing.say(self._reader.raw)
            case _State.STRAY:
                self._hearing.say(closing)
            case _State.OPENED | _State.ITEM | _State.OBJECT if not self._called:
                self._hearing.say(self._before.gone + "".join(self._raw))
        self._hearing.say(self._before.flush())
        return self._hearing.take()

    def _text(self, text: str) -> str:
        content, rest = self._before.push(text)
        self._hearing.say(content)
        if rest is None:
            return ""
        self._state = _State.OPENED
        self._raw.clear()
        self._called = self._in_list = False
        return rest

    def _tagged(self, text: str) -> str:
        """Read up to where TEXT goes on, if it does; returns what is to be read there."""
        position = 0
        while position < len(text):
            if self._state is _State.OBJECT and not self._closing:
                length = self._reader.run(text, position)
                if length:
                    self._hearing.argue(self._reader.take_arguments())
                    position += length
                    continue
            self._read(text[position])
            position += 1
            if self._state is _State.TEXT:
                back, self._back = self._back, ""
                return back + text[position:]
        return ""

    def _read(self, char: str) -> None:
        if not self._closing and not (char == "<" and self._may_close()):
            self._take(char)
            return
        self._closing += char
        if self._closing == self._closing_tag:
            self._closing = ""
            self._resume(beside_call=True)
        elif not self._closing_tag.startswith(self._closing):
            rest, self._closing = self._closing, ""
            if char == "<":  # the one before was none; this may be
                rest, self._closing = rest[:-1], char
            for one in rest:
                self._take(one)

    def _may_close(self) -> bool:
        """Whether a closing tag is one here: not within a string, and not where a call has yet to begin."""
        if self._state is _State.OBJECT:
            return self._reader.begun and not self._reader.quoted
        return self._called or self._state is _State.BETWEEN

    def _take(self, char: str) -> None:
        if not self._called:
            self._raw.append(char)
        match self._state:
            case _State.TEXT:
                self._back += char
            case _State.OBJECT:
                self._object(char)
            case _State.STRAY:
                self._hearing.say(char)
            case _:
                self._outside(char)

    def _outside(self, char: str) -> None:
        """Of an object, but within the tags."""
        if char.isspace():
            return
        if char == "{" and (self._state is not _State.BETWEEN or not self._in_list):
            self._state = _State.OBJECT
            self._reader = CallReader(None)
            self._reader.step(char)
        elif char == "[" and self._state is _State.OPENED:
            self._in_list, self._state = True, _State.ITEM
        elif char == "," and self._in_list and self._state is _State.BETWEEN:
            self._state = _State.ITEM
        elif char == "]" and self._in_list:
            self._in_list, self._state = False, _State.BETWEEN
        else:
            self._stray(char)

    def _object(self, char: str) -> None:
        reader, had_begun = self._reader, self._reader.begun
        step = reader.step(char)
        if reader.begun and not had_begun:
            self._called = True
            self._hearing.begin(reader.name)
        if reader.begun:
            self._hearing.argue(reader.take_arguments())
        if step is Step.DONE:
            self._state = _State.BETWEEN
        elif step is Step.BROKEN:
            if self._called and not reader.begun:
                self._hearing.say(reader.raw)
                self._state = _State.STRAY
                self._read(char)  # it may begin the closing tag
            else:
                self._stray(char)

    def _stray(self, char: str) -> None:
        """This does not belong here: it is text, and with it all since the opening tag, unless that was a call."""
        if self._called:
            self._state = _State.STRAY
            self._hearing.say(char)
            return
        self._hearing.say(self._before.gone + "".join(self._raw[:-1]))
        self._resume(beside_call=False)
        self._back = char

    def _resume(self, *, beside_call: bool) -> None:
        said = not beside_call or self._state is _State.STRAY
        self._state = _State.TEXT
        self._before.resume(beside_call=beside_call, said=said)
