"""One answer's words: tokens become text, stop strings end it, and every token keeps its log-probability.

    TokenDelta ──▶ Wording.feed ──▶ Said(text, token_ids, logprobs, stop)

Tokens come out as they went in, except those behind the one that completes a stop string; text may come later than its
tokens. Does not know where tokens come from or where text goes.
"""

from __future__ import annotations

from dataclasses import dataclass

from contracts.request import TokenDelta, TokenLogprob
from router.text.detokenizer import StopMatcher, TextStream


@dataclass(frozen=True, slots=True)
class Said:
    """What one delta became. `stop` is set when a stop string is complete: the answer is over."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    stop: str | None = None


class Wording:
    """One per answer. Stop strings are not looked for in the text of the first `min_tokens` tokens."""

    def __init__(self, stream: TextStream, stop: tuple[str, ...], include_stop: bool, min_tokens: int) -> None:
        self._stream = stream
        self._matcher = StopMatcher(stop, include_stop) if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0

    def feed(self, delta: TokenDelta) -> Said:
        """Take a delta; its text includes what was held back when it is the last."""
        if self._matcher is None:
            text = self._stream.push(self._spoken(delta))
            if delta.finish_reason is not None:
                text += self._stream.flush()
            return Said(text, delta.token_ids, delta.logprobs)
        return self._feed_with_stops(delta, self._matcher)

    def _feed_with_stops(self, delta: TokenDelta, matcher: StopMatcher) -> Said:
        spoken = self._spoken(delta)
        text = ""
        for position, token_id in enumerate(spoken, start=1):
            self._num_tokens += 1
            fresh = self._stream.push((token_id,))
            text += fresh if self._num_tokens <= self._min_tokens else matcher.push(fresh)
            if matcher.matched is not None:
                return Said(text, delta.token_ids[:position], delta.logprobs[:position], matcher.matched)
        if delta.finish_reason is not None:
            text += matcher.push(self._stream.flush())
            if matcher.matched is None:
                text += matcher.flush()
        return Said(text, delta.token_ids, delta.logprobs, matcher.matched)

    def _spoken(self, delta: TokenDelta) -> tuple[int, ...]:
        """The tokens that are text: a stop token that ended the answer is not, unless asked for."""
        ids = delta.token_ids
        if delta.stop_token_id is not None and ids and ids[-1] == delta.stop_token_id and not self._include_stop:
            return ids[:-1]
        return ids
