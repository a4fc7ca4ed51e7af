"""transformers' `generate` as it is measured beside our engine: greedy, bf16, sdpa, KV cache, no end of sequence.

Needs the development extra (`pip install -e '.[dev]'`); our product does not import transformers. Does not know our engine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from contracts.errors import ConfigError

if TYPE_CHECKING:
    import torch


class StepStopwatch:
    """Notes when `generate` has made a token for every row; generate asks it after each step whether to stop."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """Never stop: one False per row."""
        import torch

        self.ends_s.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class TransformersPeer:
    """A loaded model; owns its weights until it is dropped."""

    name = "transformers generate"

    def __init__(self, path: Path) -> None:
        """Load the checkpoint at `path` in bf16, some seconds. `tokens` are those of the first prompt, the last time."""
        import torch

        try:
            from transformers import AutoModelForCausalLM
            from transformers.utils import logging
        except ImportError as error:
            raise ConfigError(f"transformers, the peer, is not installed: pip install -e '.[dev]' ({error})") from error

        self.tokens: tuple[int, ...] = ()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()

    def step_ends_s(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[float, ...]:
        """Generate `num_tokens` for prompts of one length; seconds from the call to the end of each step."""
        import torch
        from transformers import GenerationConfig, StoppingCriteriaList

        stopwatch = StepStopwatch()
        inputs = torch.tensor(prompts, dtype=torch.long)
        config = GenerationConfig(
            do_sample=False, max_new_tokens=num_tokens, use_cache=True, eos_token_id=None, pad_token_id=0
        )
        begin = time.perf_counter()
        with torch.inference_mode():
            made = self._model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([stopwatch]),
            )
        if made.shape[1] - inputs.shape[1] != num_tokens or len(stopwatch.ends_s) != num_tokens:
            raise RuntimeError(f"generate made {made.shape[1] - inputs.shape[1]} of {num_tokens} tokens")
        self.tokens = tuple(made[0, inputs.shape[1] :].tolist())
        return tuple(end - begin for end in stopwatch.ends_s)
