"""One JSON object that is a call, read character by character, so that its arguments can go on while they are written.

    {"name": "f", "arguments": {  ──▶ BEGUN: the call stands, and all that follows up to the matching brace are its arguments
    {"arguments": {…}, "name": "f"} , {"name": "f"}  ──▶ known only at its end, and then whole

Before it has begun, anything that is not JSON, or no call, is BROKEN and nobody has heard of it. Afterwards only brackets and
strings are followed: whether the arguments are good JSON is for whoever reads them, as OpenAI's clients know.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container
from enum import Enum, auto

_ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\r\n"
_PLAIN_QUOTED = re.compile(r'[^"\\]+')
_PLAIN = re.compile(r'[^"{}\[\]<]+')  # "<" may be a tag's, which is not for us to say


class Step(Enum):
    """What a character did."""

    MORE = auto()
    DONE = auto()  # it was the object's last
    BROKEN = auto()  # it does not belong there, and was not taken


class _At(Enum):
    OPEN = auto()
    KEY_OR_END = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA_OR_END = auto()


class CallReader:
    """Reads one call. `known` are the names that count; None for any. `raw` is all of it until it has begun; `quoted` says whether
    the next character is inside of a string.
    """

    def __init__(self, known: Container[str] | None) -> None:
        self._known = known
        self._at = _At.OPEN
        self._token: list[str] = []  # the key or value that is being read
        self._key = ""
        self._name: str | None = None
        self._depth = 0  # of brackets inside of a value
        self.quoted = False
        self._escaped = False
        self._raw: list[str] = []
        self._arguments: list[str] = []
        self._streaming = False
        self.begun = False

    @property
    def name(self) -> str:
        """Of a call that has begun."""
        assert self._name is not None
        return self._name

    @property
    def raw(self) -> str:
        """The text so far of what has not begun."""
        return "".join(self._raw)

    def take_arguments(self) -> str:
        """What came of the arguments since the last time."""
        taken = "".join(self._arguments)
        self._arguments.clear()
        return taken

    def run(self, text: str, start: int) -> int:
        """How many characters from `start` do nothing but go on with the arguments; they are taken. For speed alone."""
        if not self._streaming or self._escaped:
            return 0
        found = (_PLAIN_QUOTED if self.quoted else _PLAIN).match(text, start)
        if found is None:
            return 0
        self._arguments.append(found.group())
        return found.end() - start

    def rest(self, text: str) -> str:
        """As much of `text` as would be arguments."""
        for char in text:
            if self.step(char) is Step.BROKEN:
                break
        return self.take_arguments()

    def step(self, char: str) -> Step:
        """Read one character."""
        step = self._step(char)
        if not self.begun and step is not Step.BROKEN:
            self._raw.append(char)
            if step is Step.DONE and not self._whole():
                self._raw.pop()
                return Step.BROKEN
        return step

    def _step(self, char: str) -> Step:
        match self._at:
            case _At.KEY | _At.VALUE if self._token:
                return self._inside(char)
            case _ if char in _SPACE:
                return Step.MORE
            case _At.OPEN:
                return self._expect(char, "{", _At.KEY_OR_END)
            case _At.KEY_OR_END if char == "}":
                return Step.DONE
            case _At.KEY_OR_END | _At.KEY if char == '"':
                self._at = _At.KEY
                return self._inside(char)
            case _At.COLON:
                return self._expect(char, ":", _At.VALUE)
            case _At.VALUE if char not in ",:}]":
                return self._begin_value(char)
            case _At.COMMA_OR_END if char == "}":
                return Step.DONE
            case _At.COMMA_OR_END:
                return self._expect(char, ",", _At.KEY)
        return Step.BROKEN

    def _expect(self, char: str, wanted: str, following: _At) -> Step:
        if char != wanted:
            return Step.BROKEN
        self._at = following
        return Step.MORE

    def _begin_value(self, char: str) -> Step:
        if char == "{" and self._key in _ARGUMENTS and self._name is not None:
            if self._known is not None and self._name not in self._known:
                return Step.BROKEN
            self.begun = self._streaming = True
        return self._inside(char)

    def _inside(self, char: str) -> Step:
        """A character of a key or value, or the one behind a number or word, which is read again."""
        streamed, first = self._streaming, not self._token
        if not first and self._bare(char):
            step = self._end_token()
            return step if step is Step.BROKEN else self._step(char)
        if streamed:
            self._arguments.append(char)
        if first or not streamed:
            self._token.append(char)
        if self.quoted:
            self._follow_string(char)
        elif char == '"':
            self.quoted = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        if self._depth == 0 and not self.quoted and char in '"}]':
            return self._end_token()
        return Step.MORE

    def _bare(self, char: str) -> bool:
        """Whether this ends a number or word, which have no end of their own."""
        return self._depth == 0 and not self.quoted and char in ",}]" + _SPACE

    def _follow_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self.quoted = False

    def _end_token(self) -> Step:
        token = "".join(self._token)
        self._token.clear()
        self._streaming = False
        if self._at is _At.KEY:
            self._at = _At.COLON
            key = _loaded(token)
            self._key = key if isinstance(key, str) else ""
            return Step.MORE if isinstance(key, str) else Step.BROKEN
        self._at = _At.COMMA_OR_END
        if self.begun:
            return Step.MORE
        value = _loaded(token)
        if value is None and token != "null":
            return Step.BROKEN
        if self._key == "name":
            if not isinstance(value, str) or not value:
                return Step.BROKEN
            self._name = value
        return Step.MORE

    def _whole(self) -> bool:
        """Whether an object that has ended without beginning is a call after all."""
        call = _loaded(self.raw)
        if not isinstance(call, dict) or self._name is None:
            return False
        if self._known is not None and (self._name not in self._known or not any(key in call for key in _ARGUMENTS)):
            return False
        given = next((call[key] for key in _ARGUMENTS if key in call), None)
        if isinstance(given, str):  # some models write them as OpenAI does
            given = _loaded(given)
        if given is not None and not isinstance(given, dict):
            return False
        self.begun = True
        self._arguments.append(json.dumps(given or {}, ensure_ascii=False))
        return True


def _loaded(text: str) -> object:
    """None for what is not JSON."""
    try:
        loaded: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return loaded
