"""Text to tokens, once per request, and single tokens back to text for log-probabilities.

Long texts are encoded in a thread: the library gives the interpreter lock up in its batch calls only, so only those are
used. A text that begins with the BOS token does not get a second one. Does not know requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from tokenizers import Tokenizer as HFTokenizer

from router.text.background import Background, give_way
from router.text.detokenizer import ByteLevelStream, ByteVocabulary, TextStream, WindowStream

T = TypeVar("T")
_THREAD_ABOVE = 4096  # characters, about 2 ms
_SPELT_AT_ONCE = 512  # tokens


class Tokenizer:
    """One model's tokenizer. Owns caches and the threads for long texts; one per process."""

    def __init__(self, hf: HFTokenizer, bos_token: str | None) -> None:
        self._hf = hf
        self._bos_id = None if bos_token is None else hf.token_to_id(bos_token)
        self._bytes = ByteVocabulary(hf) if is_byte_level(hf) else None
        self._background = Background()

    def encodes_at_once(self, text: str) -> bool:
        """Whether `encode_text` does so without waiting for a thread."""
        return len(text) <= _THREAD_ABOVE

    async def encode_text(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """The prompt as it is, with BOS where the model's tokenizer adds one."""
        if self.encodes_at_once(text):
            return self.encode(text, add_special_tokens)
        return await self._background.run(partial(self.encode, text, add_special_tokens))

    async def decode_whole(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """`decode`, out of everybody's way where there are many."""
        if len(token_ids) > _THREAD_ABOVE:
            return await self._background.run(partial(self.decode, token_ids, skip_special_tokens))
        return self.decode(token_ids, skip_special_tokens)

    async def spell(self, token_ids: Sequence[int], say: Callable[[Sequence[bytes]], T]) -> list[T]:
        """What `say` makes of `token_bytes`, some hundred at a time; out of everybody's way where there are many."""

        def spelt() -> list[T]:
            made = []
            for begin in range(0, len(token_ids), _SPELT_AT_ONCE):
                made.append(say([self.token_bytes(token_id) for token_id in token_ids[begin : begin + _SPELT_AT_ONCE]]))
                give_way()
            return made

        return await self._background.run(spelt) if len(token_ids) > _THREAD_ABOVE else spelt()

    def text_stream(self, skip_special_tokens: bool, marks: Sequence[str] = ()) -> TextStream:
        """A new incremental detokenizer for one answer. `marks` are special tokens that are text all the same."""
        ids = (self._hf.token_to_id(mark) for mark in marks)
        kept = frozenset(token_id for token_id in ids if token_id is not None)
        if self._bytes is not None:
            return ByteLevelStream(self._bytes, skip_special_tokens, kept)
        return WindowStream(self._hf, skip_special_tokens, kept)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of all these tokens."""
        stream = self.text_stream(skip_special_tokens)
        return stream.push(token_ids) + stream.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for; pieces of characters are possible in byte-level vocabularies."""
        if self._bytes is not None:
            return self._bytes.token_bytes(token_id)
        return self._hf.decode([token_id], skip_special_tokens=False).encode()

    def encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        """As `encode_text`, in this thread."""
        encoding = self._hf.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        ids = tuple(encoding.ids)
        doubled = len(ids) > 1 and ids[0] == ids[1] == self._bos_id
        added = doubled and encoding.special_tokens_mask[0] == 1 and encoding.special_tokens_mask[1] == 0
        return ids[1:] if added else ids


def is_byte_level(hf: HFTokenizer) -> bool:
    """Whether tokens are spelled in the byte alphabet and decoded by it alone."""
    return type(hf.decoder).__name__ == "ByteLevel"
