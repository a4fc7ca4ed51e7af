"""Writes the loads, each from its seed: run `python -m bench.simulation.make_loads` after a change, and look at the diff.

    multi_turn   conversations that grow: every turn brings the whole conversation before it, and thinks in between: a session
    shared       a dozen system prompts, of which each request has one; and bursts that all begin with one that is new
    mixed        nobody shares anything; one prompt in six is ten times as long as the others

Stand-ins for traces that cannot be shipped; their rates fit four prefill workers of `bench.simulation.costs`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import msgspec

from bench.simulation.trace import BLOCK_TOKENS, LOADS, Line


class _Blocks:
    """Ids of blocks that nobody had before."""

    def __init__(self) -> None:
        self._ids = itertools.count()

    def new(self, num_tokens: int) -> list[int]:
        """For so many tokens, the last block perhaps in part."""
        return [next(self._ids) for _ in range(-(-num_tokens // BLOCK_TOKENS))]


def multi_turn(rng: random.Random) -> Iterator[Line]:
    """70 conversations of 2 to 8 turns."""
    blocks = _Blocks()
    begins = 0.0
    for number in range(70):
        begins += rng.expovariate(1 / 1.6)
        at, length = begins, 0
        ids: list[int] = []
        for _ in range(rng.randint(2, 8)):
            known = length // BLOCK_TOKENS  # blocks of the prompt before that are full; its answer has no ids
            output = rng.randint(16, 64)
            length += rng.randint(120, 480) + output
            ids = [*ids[:known], *blocks.new(length - known * BLOCK_TOKENS)]
            yield Line(round(at * 1e3), length, output, tuple(ids), f"conversation-{number}")
            at += rng.uniform(3.0, 12.0)


def shared(rng: random.Random) -> Iterator[Line]:
    """Twelve system prompts of 640 to 1152 tokens, some used more than others; now and then a burst of 12 of a new one."""
    blocks = _Blocks()
    systems = [blocks.new(BLOCK_TOKENS * rng.randint(5, 9)) for _ in range(12)]
    at = 0.0
    for number in range(320):
        at += rng.expovariate(1 / 0.34)
        is_burst = number % 40 == 20
        system = blocks.new(1024) if is_burst else systems[min(int(rng.paretovariate(0.8)) - 1, len(systems) - 1)]
        for _ in range(12 if is_burst else 1):
            own = rng.randint(30, 200)
            length = BLOCK_TOKENS * len(system) + own
            ids = (*system, *blocks.new(own))
            yield Line(round((at + rng.random() * is_burst) * 1e3), length, rng.randint(8, 48), ids)


def mixed(rng: random.Random) -> Iterator[Line]:
    """400 independent requests, short and long."""
    blocks = _Blocks()
    at = 0.0
    for _ in range(400):
        at += rng.expovariate(1 / 0.235)
        length = rng.randint(1800, 3200) if rng.random() < 1 / 6 else rng.randint(100, 400)
        yield Line(round(at * 1e3), length, rng.randint(16, 64), tuple(blocks.new(length)))


MAKERS: dict[str, Callable[[random.Random], Iterator[Line]]] = {
    "multi_turn": multi_turn,
    "shared": shared,
    "mixed": mixed,
}


def _written(line: Line) -> bytes:
    """Without a session that nobody named."""
    fields = msgspec.structs.asdict(line)
    return msgspec.json.encode({name: value for name, value in fields.items() if value != ""})


def main() -> None:
    """Write all files."""
    LOADS.mkdir(exist_ok=True)
    for name, make in MAKERS.items():
        lines = sorted(make(random.Random(name)), key=lambda line: line.timestamp)
        (LOADS / f"{name}.jsonl").write_bytes(b"".join(_written(line) + b"\n" for line in lines))


if __name__ == "__main__":
    main()
