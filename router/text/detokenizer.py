"""Tokens to text while they come: never half a character, never a stop string, nothing lost.

    token ids ──▶ TextStream ──▶ text of whole characters ──▶ StopMatcher ──▶ text that cannot be part of a stop string

Two text streams with one meaning: `ByteLevelStream` for byte-level vocabularies (bytes are known per token, so each token
costs the same, whatever came before) and `WindowStream` for all others (decodes a short window again). The library's own
DecodeStream is not used: it holds every byte back while a sequence stays invalid, each step costing more, and has no end.
Does not know requests or transports.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_OPEN = (
    3  # at most this many bytes of a character can be there without the rest, so as many U+FFFD may still change
)
_SPLIT_AFTER = 32  # tokens of a window that ends in the middle of a character, before it is cut at a character's border
_CUT_AFTER = 256  # … before it is cut anywhere: not reached by text, only by noise


class TextStream(Protocol):
    """Turns one answer's tokens into text."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The characters that these tokens complete."""
        ...

    def flush(self) -> str:
        """The end: bytes that never became a character come out as U+FFFD."""
        ...


class ByteVocabulary:
    """The bytes of each token of a byte-level vocabulary. Shared by all streams; owns only a cache of the vocabulary's size."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = special_ids(tokenizer)
        self._byte_of = byte_alphabet()
        self._cache: dict[int, bytes] = {}

    def token_bytes(self, token_id: int) -> bytes:
        """The token's bytes; of a token that is not in the byte alphabet, its UTF-8; of an unknown id, none."""
        found = self._cache.get(token_id)
        if found is None:
            found = self._cache[token_id] = self._spell(token_id)
        return found

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` leaves it out."""
        return token_id in self._special

    def _spell(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes([self._byte_of[char] for char in token])
        except KeyError:
            return token.encode()


class ByteLevelStream:
    """Exact and incremental: the bytes of all tokens through one UTF-8 decoder."""

    def __init__(
        self, vocabulary: ByteVocabulary, skip_special_tokens: bool, kept: frozenset[int] = frozenset()
    ) -> None:
        """`kept` are special tokens that are text all the same."""
        self._vocabulary = vocabulary
        self._skip_special = skip_special_tokens
        self._kept = kept
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """See TextStream."""
        vocabulary = self._vocabulary
        if self._skip_special:
            token_ids = [t for t in token_ids if not vocabulary.is_special(t) or t in self._kept]
        return self._decoder.decode(b"".join(map(vocabulary.token_bytes, token_ids)))

    def flush(self) -> str:
        """See TextStream."""
        return self._decoder.decode(b"", final=True)


class WindowStream:
    """For any decoder: decodes the tokens since the last whole character behind the ones before, and takes what is new.

    The tokens before (`_context`) are there because decoders treat the first token of a text in a special way (a leading
    space is dropped). Byte-fallback decoders turn a whole run of byte tokens to U+FFFD when one of them does not fit; what
    was sent by then stays as it was, and the new tokens are decoded by themselves.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, kept: frozenset[int] = frozenset()) -> None:
        """`kept` are special tokens that are text all the same."""
        self._tokenizer = tokenizer
        # With some kept, the library is not told to leave special tokens out: it would leave out all.
        self._left_out = special_ids(tokenizer) - kept if skip_special_tokens and kept else frozenset()
        self._skip_special = skip_special_tokens and not kept
        self._context: list[int] = []
        self._context_text = ""
        self._window: list[int] = []
        self._sent = 0  # characters of the window's text that were given out

    def push(self, token_ids: Sequence[int]) -> str:
        """See TextStream."""
        return "".join(self._push_one(t) for t in token_ids if t not in self._left_out)

    def flush(self) -> str:
        """See TextStream."""
        rest = self._window_text()[self._sent :] if self._window else ""
        self._move_on(len(self._window))
        return rest

    def _push_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._window_text()
        whole = text.rstrip(_REPLACEMENT)
        num_open = min(len(text) - len(whole), _MAX_OPEN)
        stable = text[: len(text) - num_open]
        fresh = stable[self._sent :]
        self._sent = max(self._sent, len(stable))
        if num_open == 0 and text:
            self._move_on(len(self._window))
        elif len(self._window) > _SPLIT_AFTER:
            fresh += self._cut(text)
        return fresh

    def _window_text(self) -> str:
        text = self._decode(self._context + self._window)
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        return self._decode(self._window)

    def _cut(self, text: str) -> str:
        """Give up a window that has grown long, at a border between characters if there is one near its end."""
        for kept in range(1, _MAX_OPEN + 1):
            head = len(self._window) - kept
            before = self._decode(self._context + self._window[:head])[len(self._context_text) :]
            if before and text.startswith(before) and before + self._decode(self._window[head:]) == text:
                fresh = before[self._sent :]
                sent = max(0, self._sent - len(before))
                self._move_on(head)
                self._sent = sent
                return fresh
        if len(self._window) <= _CUT_AFTER:
            return ""
        fresh = text[self._sent :]
        self._move_on(len(self._window))
        return fresh

    def _move_on(self, num_tokens: int) -> None:
        self._context = self._window[:num_tokens]
        self._context_text = self._decode(self._context)
        self._window = self._window[num_tokens:]
        self._sent = 0

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special)


class StopMatcher:
    """Finds the first stop string to be complete, however the text is cut into pieces.

    Holds back the longest end of the text that a stop string could still begin with. Among stop strings complete at the
    same character the longest wins.
    """

    def __init__(self, stops: Sequence[str], include_in_text: bool = False) -> None:
        self._stops = tuple(sorted({s for s in stops if s}, key=len, reverse=True))
        self._longest = max(map(len, self._stops), default=0)
        self._include = include_in_text
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that may be shown. When `matched` is set by this call, it is the last, and what follows is dropped."""
        if not self._stops:
            return text
        text = self._held + text
        found = self._first_complete(text)
        if found is not None:
            start, self.matched = found
            self._held = ""
            return text[: start + len(self.matched)] if self._include else text[:start]
        keep = self._open_length(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, when the answer ends without a match."""
        held, self._held = self._held, ""
        return held

    def _first_complete(self, text: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None  # (end, start, stop)
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _open_length(self, text: str) -> int:
        """Length of the longest end of `text` that is a proper beginning of a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            end = text[len(text) - length :]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids of the tokens that are marks, not text."""
    return frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's table), turned round."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    table.update({chr(0x100 + rank): byte for rank, byte in enumerate(others)})
    return table
