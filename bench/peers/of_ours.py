"""Our engine, as `bench engine` steps it: `python -m bench.peers.of_ours FOLDER THREADS PRECISION`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from bench.ours import OurEngine, load_ours
from bench.peers.child import Generated, serve
from engine.execution.config import prefer_huge_pages


class Ours:
    """An engine on its own process, without doors."""

    def __init__(self, engine: OurEngine) -> None:
        self._engine = engine

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Generated:
        """As child.Generates has it."""
        ends = self._engine.step_ends_s(prompts, num_tokens)
        return Generated(ends, self._engine.tokens)


def load(folder: Path, threads: int, precision: str) -> Ours:
    """The model in `folder`, its weights quantised at load where that is asked."""
    prefer_huge_pages()
    return Ours(load_ours(folder, threads, "none" if precision == "bf16" else precision))


if __name__ == "__main__":
    serve(f"diptych {version('diptych')}", lambda: load(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
