"""A question, and what may be heard of its answer: one form, whichever door it was asked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from contracts.sampling import SamplingParams

TOLERANCE = 1e-4  # of log-probabilities


@dataclass(frozen=True)
class Chat:
    """A conversation of one turn."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked. `warm` is how often the same workers were asked the same before."""

    prompt: str | tuple[int, ...] | Chat
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    n: int = 1
    echo: bool = False
    prompt_only: bool = False  # echo with max_tokens 0
    warm: int = 0


@dataclass(frozen=True)
class Entry:
    """The log-probability of one token, and of the likeliest, itself among them: by their text, as OpenAI shows tokens."""

    token: str
    logprob: float
    top: Mapping[str, float]

    def same(self, other: Entry) -> bool:
        near = pytest.approx(other.logprob, abs=TOLERANCE)
        return (
            self.token == other.token and self.logprob == near and self.top == pytest.approx(other.top, abs=TOLERANCE)
        )


Entries = tuple[Entry | None, ...]


@dataclass(frozen=True)
class Said:
    """One answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None
    entries: Entries = ()


@dataclass(frozen=True)
class Heard:
    """All answers to a question. `entries` of the prompt, when they are told apart from those of the answers."""

    answers: tuple[Said, ...]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    prompt_entries: Entries = ()
    handed_off: tuple[bool, ...] = ()


def check_same(heard: Heard, expected: Heard) -> None:
    """All but where the answers were made."""
    for mine, theirs in zip(heard.answers, expected.answers, strict=True):
        assert (mine.text, mine.token_ids) == (theirs.text, theirs.token_ids)
        assert (mine.finish_reason, mine.stop_reason) == (theirs.finish_reason, theirs.stop_reason)
        check_same_entries(mine.entries, theirs.entries)
    check_same_entries(heard.prompt_entries, expected.prompt_entries)
    assert (heard.prompt_tokens, heard.completion_tokens, heard.cached_tokens) == (
        expected.prompt_tokens,
        expected.completion_tokens,
        expected.cached_tokens,
    )


def check_same_entries(heard: Entries, expected: Entries) -> None:
    assert len(heard) == len(expected)
    for index, (mine, theirs) in enumerate(zip(heard, expected, strict=True)):
        same = mine is None if theirs is None else mine is not None and mine.same(theirs)
        assert same, f"entry {index}: heard {mine}, expected {theirs}"
