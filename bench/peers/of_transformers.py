"""transformers' `generate`: `python -m bench.peers.of_transformers FOLDER THREADS`, in our own environment."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from bench.peer import TransformersPeer
from bench.peers.child import Generated, serve


class Transformers:
    """As `bench engine` has it."""

    def __init__(self, folder: Path, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self._peer = TransformersPeer(folder)

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Generated:
        """As child.Generates has it."""
        return Generated(self._peer.step_ends_s(prompts, num_tokens), self._peer.tokens)


if __name__ == "__main__":
    serve(f"transformers {version('transformers')}", lambda: Transformers(Path(sys.argv[1]), int(sys.argv[2])))
