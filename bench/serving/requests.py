"""One request of a load, and what became of it.

    BenchRequest ──drive──▶ Outcome(scheduled, sent, Reply | error)

All times are seconds of `time.monotonic`, which on one machine is one clock for all processes. Does not know protocols.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from contracts.errors import ConfigError, DiptychError

MOST_TOKENS = 2**24  # of one prompt or one answer
Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation; `role` is "system", "user" or "assistant"."""

    role: str
    content: str


Prompt = str | Tokens | tuple[Turn, ...]
"""Text as it is, token ids, or a conversation for the model's chat template."""


class Form(StrEnum):
    """What a target takes of a prompt that the load makes up."""

    IDS = "ids"
    TEXT = "text"
    CHAT = "chat"


def checked_length(where: str, name: str, length: int, least: int = 1) -> int:
    """A number of tokens that a prompt or an answer can have. Raises ConfigError naming place, value and limits."""
    if not least <= length <= MOST_TOKENS:
        raise ConfigError(f"{where}: {name} {length} must be from {least} to {MOST_TOKENS}")
    return length


class AskFailed(DiptychError):
    """One request was refused, broke off or gave no token; the load goes on and counts it."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """What to ask. `at_s` is when, from the start of the load, where the data say so.

    `after` is the index of the request whose answer this one continues: then `prompt` is only what is new, and the whole prompt
    is the earlier whole prompt, the real answer and this. `prompt_len` is in tokens as far as the data know, else 0.
    """

    prompt: Prompt
    output_len: int
    prompt_len: int = 0
    at_s: float | None = None
    after: int | None = None
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer: when it was sent, and for each event that brought tokens, when it was read.

    `output_tokens` and `prompt_tokens` as the server counts them (0: it did not say). `sent_s` is the moment before the first
    byte was handed to the transport. `route` is "disaggregated" or "colocated" where the server says it.
    """

    sent_s: float
    arrivals_s: tuple[float, ...]
    output_tokens: int
    prompt_tokens: int = 0
    text: str = ""
    token_ids: Tokens = ()
    route: str = ""

    def __post_init__(self) -> None:
        if not self.arrivals_s:
            raise AskFailed("the answer brought no token")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request; latencies count from `scheduled_s`, when it should have been sent."""

    scheduled_s: float
    prompt_len: int
    reply: Reply | None = None
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether an answer came to its end."""
        return self.reply is not None

    @property
    def answered(self) -> Reply:
        """The reply. AskFailed when there is none."""
        if self.reply is None:
            raise AskFailed(self.error)
        return self.reply

    @property
    def lag_s(self) -> float:
        """How much later than scheduled it was sent."""
        return self.answered.sent_s - self.scheduled_s

    @property
    def ttft_s(self) -> float:
        """Scheduled to first token."""
        return self.answered.arrivals_s[0] - self.scheduled_s

    @property
    def e2el_s(self) -> float:
        """Scheduled to last token."""
        return self.answered.arrivals_s[-1] - self.scheduled_s

    @property
    def itl_s(self) -> tuple[float, ...]:
        """The gaps between events that brought tokens."""
        return tuple(later - earlier for earlier, later in itertools.pairwise(self.answered.arrivals_s))

    @property
    def output_len(self) -> int:
        """Tokens of the answer."""
        return self.answered.output_tokens

    @property
    def tpot_s(self) -> float | None:
        """(E2EL - TTFT) / (n - 1); None for one token."""
        return (self.e2el_s - self.ttft_s) / (self.output_len - 1) if self.output_len > 1 else None


class Target(Protocol):
    """A server that is measured."""

    async def ask(self, prompt: Prompt, output_len: int) -> Reply:
        """One answer of `output_len` tokens, read to its end. Raises AskFailed."""
        ...

    async def close(self) -> None:
        """Let the connections go."""
        ...
