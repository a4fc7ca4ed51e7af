"""Prompts that are made up: so many token ids, or so many common words, the same for the same seed.

A word of the list is about one token for the usual tokenizers; what a text prompt really had is what the server says. Ids are
drawn from the middle of the vocabulary, away from special tokens, which have the first ids or the last. Does not know loads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bench.serving.requests import Form, Prompt, Turn
from contracts.errors import ConfigError

LOWEST_ID = 256
MOST_IDS = 2**31
WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school",
    "state", "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company",
    "system", "program", "question", "work", "government", "number", "night", "point", "home", "water", "room", "mother",
    "area", "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word",
    "business", "issue", "side", "kind", "head", "house", "service", "friend", "father", "power", "hour", "game",
    "line", "end", "member", "law", "car", "city", "community", "name", "president", "team", "minute", "idea",
    "body", "information", "back", "parent", "face", "others", "level", "office", "door", "health", "person", "art",
    "war", "history", "party", "result", "change", "morning", "reason", "research", "girl", "guy", "moment", "air",
    "teacher", "force", "education",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes prompts of one form; ids are below `vocab_size`."""

    form: Form
    seed: int
    vocab_size: int = 32_000

    def __post_init__(self) -> None:
        if not LOWEST_ID < self.vocab_size <= MOST_IDS:
            raise ConfigError(f"--vocab-size: {self.vocab_size} must be above {LOWEST_ID}, and at most {MOST_IDS}")

    def write(self, name: tuple[int, ...], length: int) -> Prompt:
        """`length` tokens or words; the same `name` begins with the same ones, whatever the length."""
        rng = np.random.default_rng([self.seed, 2, *name])
        if self.form is Form.IDS:
            return tuple(rng.integers(LOWEST_ID, self.vocab_size, length).tolist())
        words = " ".join(WORDS[place] for place in rng.integers(0, len(WORDS), length))
        return words + " " if self.form is Form.TEXT else (Turn("user", words),)

    def joined(self, parts: list[Prompt]) -> Prompt:
        """One prompt of several written ones; in a chat one user's turn."""
        if self.form is Form.IDS:
            return tuple(token for part in parts for token in part if isinstance(token, int))
        texts = [part if isinstance(part, str) else _content(part) for part in parts]
        return "".join(texts) if self.form is Form.TEXT else (Turn("user", " ".join(texts)),)


def _content(part: Prompt) -> str:
    return " ".join(turn.content for turn in part if isinstance(turn, Turn))
