"""Recorded loads, in the form of Mooncake's traces: one JSON object a line, in order of time.

    {"timestamp": 1500, "input_length": 700, "output_length": 48, "hash_ids": [0, 1, 2, 3, 4, 9]}

`timestamp` in milliseconds, lengths in tokens, `hash_ids` one per BLOCK_TOKENS tokens of the prompt, the last perhaps of fewer:
equal ids in a row from the first mean an equal prefix. Mooncake's blocks have 512 tokens; ours are for models and machines of
a laptop, so a prompt is of hundreds of tokens where theirs is of thousands. Tokens themselves are not recorded: those of a
block follow from its id. `session` is ours, and may be left out: what the client says whose request it is. Does not know who
makes such a load.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import msgspec

from contracts.errors import ConfigError

BLOCK_TOKENS = 128
VOCAB_SIZE = 50_000
LOADS = Path(__file__).parent / "loads"


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request as it is written."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    session: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: when (seconds), its prompt, and how long its answer was."""

    at_s: float
    token_ids: tuple[int, ...]
    num_output: int
    session: str = ""


def read_load(path: Path) -> list[Asked]:
    """All requests of a file. Raises ConfigError naming the line that is not one."""
    asked = []
    for number, text in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            line = msgspec.json.decode(text, type=Line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path.name}, line {number}: {error}") from error
        if len(line.hash_ids) != -(-line.input_length // BLOCK_TOKENS) or line.input_length < 1:
            raise ConfigError(
                f"{path.name}, line {number}: got {len(line.hash_ids)} hash_ids for {line.input_length} tokens"
            )
        asked.append(Asked(line.timestamp / 1e3, prompt_of(line), line.output_length, line.session))
    return asked


def prompt_of(line: Line) -> tuple[int, ...]:
    """The tokens that stand for a request's prompt."""
    tokens: list[int] = []
    for block in line.hash_ids:
        tokens.extend(_tokens_of(block))
    return tuple(tokens[: line.input_length])


@lru_cache(maxsize=65_536)
def _tokens_of(block: int) -> tuple[int, ...]:
    """Any that differ between blocks: two numbers, as text of any would."""
    return tuple((block * 7919 + index * 31 + block // VOCAB_SIZE) % VOCAB_SIZE for index in range(BLOCK_TOKENS))
