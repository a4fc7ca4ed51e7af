"""llama.cpp by its C interface: `python -m bench.peers.of_llamacpp FILE.gguf THREADS`. Contexts as llama-batched-bench makes them.

Each sequence has its own stretch of the cache; logits are asked of a prompt's last token only, and the greatest is taken by numpy.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np

from bench.peers.child import Generated, serve

BATCH_TOKENS = 2048
CELLS = 256  # of a cache, one step of its size


class LlamaCpp:
    """A model, and one context for each number of sequences that was asked for."""

    def __init__(self, path: Path, threads: int) -> None:
        import llama_cpp

        self._lib = llama_cpp
        self._lib.llama_backend_init()
        self._threads = threads
        self._model = self._lib.llama_model_load_from_file(str(path).encode(), self._lib.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {path.name}")
        self._num_words = self._lib.llama_vocab_n_tokens(self._lib.llama_model_get_vocab(self._model))
        self._contexts: dict[tuple[int, int], object] = {}
        self._batch = self._lib.llama_batch_init(BATCH_TOKENS, 0, 1)

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Generated:
        """As child.Generates has it."""
        context = self._context(len(prompts), len(prompts[0]) + num_tokens)
        self._lib.llama_memory_clear(self._lib.llama_get_memory(context), True)
        begin = time.perf_counter()
        last = self._read(context, prompts)
        ends, first = [time.perf_counter() - begin], [last[0]]
        for position in range(len(prompts[0]), len(prompts[0]) + num_tokens - 1):
            last = self._run(context, [(token, position, row, True) for row, token in enumerate(last)])
            ends.append(time.perf_counter() - begin)
            first.append(last[0])
        return Generated(tuple(ends), tuple(first))

    def _read(self, context: object, prompts: Sequence[Sequence[int]]) -> list[int]:
        """All prompts, in as few batches as hold whole ones."""
        last: list[int] = []
        each = max(1, BATCH_TOKENS // len(prompts[0]))
        for first in range(0, len(prompts), each):
            entries = [
                (token, position, row, position == len(prompt) - 1)
                for row, prompt in enumerate(prompts[first : first + each], first)
                for position, token in enumerate(prompt)
            ]
            last += self._run(context, entries)
        return last

    def _run(self, context: object, entries: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """One llama_decode of (token, position, sequence, whether its logits are wanted); the greedy choices, in order."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (token, position, row, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = row, wanted
        if self._lib.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        chosen = []
        for i, (*_, wanted) in enumerate(entries):
            if wanted:
                logits = np.ctypeslib.as_array(self._lib.llama_get_logits_ith(context, i), (self._num_words,))
                chosen.append(int(logits.argmax()))
        return chosen

    def _context(self, count: int, length: int) -> object:
        cells = -(-length // CELLS) * CELLS
        if (count, cells) not in self._contexts:
            params = self._lib.llama_context_default_params()
            params.n_ctx, params.n_seq_max, params.n_batch = count * cells, count, BATCH_TOKENS
            params.n_threads = params.n_threads_batch = self._threads
            self._contexts[count, cells] = self._lib.llama_init_from_model(self._model, params)
        return self._contexts[count, cells]


if __name__ == "__main__":
    serve(
        f"llama.cpp (llama-cpp-python {version('llama-cpp-python')})",
        lambda: LlamaCpp(Path(sys.argv[1]), int(sys.argv[2])),
    )
