"""OpenVINO GenAI's continuous batching: `python -m bench.peers.of_openvino FOLDER THREADS`. One `step` is one step.

All settings are at their defaults but the number of threads, the tokens of a step and the room for KV; its precision is not set.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np

from bench.peers.child import Generated, serve

STEP_TOKENS = 2048
CACHE_GB = 1


class OpenVino:
    """A pipeline of its own scheduler."""

    def __init__(self, folder: Path, threads: int) -> None:
        import openvino_genai

        self._lib = openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens, scheduler.cache_size = STEP_TOKENS, CACHE_GB
        scheduler.enable_prefix_caching = False
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(folder), scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
        )
        self._numbers = itertools.count()

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Generated:
        """As child.Generates has it."""
        from openvino import Tensor

        config = self._lib.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = num_tokens, True, False
        inputs = [Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        begin = time.perf_counter()
        handles = [self._pipeline.add_request(next(self._numbers), one, config) for one in inputs]
        ends = []
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            ends.append(time.perf_counter() - begin)
        made = [tuple(handle.read_all()[0].generated_ids) for handle in handles]
        if len(ends) != num_tokens or any(len(one) != num_tokens for one in made):
            raise RuntimeError(f"{len(ends)} steps, {[len(one) for one in made]} tokens; {num_tokens} were asked for")
        return Generated(tuple(ends), made[0])


if __name__ == "__main__":
    serve(f"OpenVINO GenAI {version('openvino-genai')}", lambda: OpenVino(Path(sys.argv[1]), int(sys.argv[2])))
