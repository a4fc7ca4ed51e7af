"""Log-probabilities in OpenAI's forms and vLLM's. Does not know requests or answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from contracts.request import TokenLogprob
from router.exchange import Piece
from router.openai.json import Json, listed, render
from router.text.background import give_way
from router.text.tokenizer import Tokenizer

T = TypeVar("T")
_ENTRIES_AT_ONCE = 32  # of 21 tokens each
_MIN_LOGPROB = -9999.0  # JSON has no infinity


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as text; one that is a piece of a character as OpenAI writes it, "bytes:\\xe6\\x97"."""
    return spelled(tokenizer.token_bytes(token_id))


def spelled(token: bytes) -> str:
    """The same of a token's bytes."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


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

    content = [
        render({**entry(e.token_id, e.logprob), "top_logprobs": [entry(token_id, value) for token_id, value in e.top]})
        for e in paced(piece.logprobs)
    ]
    return {"content": listed(content), "refusal": None}


def prompt_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob | None]) -> Json:
    """vLLM's form: per prompt token a map from token id to its log-probability, null for the first."""
    return listed([render(_ranked(tokenizer, entry)) for entry in paced(entries)])


def _ranked(tokenizer: Tokenizer, entry: TokenLogprob | None) -> Json:
    if entry is None:
        return None
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(entry.top, start=1)}
    ranks[entry.token_id] = entry.rank
    return {
        str(token_id): {
            "logprob": finite(value),
            "rank": ranks[token_id],
            "decoded_token": token_text(tokenizer, token_id),
        }
        for token_id, value in top_with_chosen(entry)
    }


def paced(entries: Iterable[T]) -> Iterator[T]:
    """The same; where it is gone through in a background thread, others have their turn about each millisecond."""
    for count, entry in enumerate(entries, start=1):
        yield entry
        if count % _ENTRIES_AT_ONCE == 0:
            give_way()


def top_with_chosen(entry: TokenLogprob) -> list[tuple[int, float]]:
    """The likeliest tokens, and the chosen one if it is not among them."""
    if any(token_id == entry.token_id for token_id, _ in entry.top):
        return list(entry.top)
    return [*entry.top, (entry.token_id, entry.logprob)]
