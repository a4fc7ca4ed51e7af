"""How fast steps are here, smoothed: seconds of a step that only decodes, prompt tokens per second of one that reads prompts.

Both are 0 until known. A step with few prompt tokens tells nothing of the rate, because it mostly waits for the weights.
Written and read in the engine's thread. Does not know requests or what the numbers are for.
"""

from __future__ import annotations

_SHARE = 1 / 16  # of a new step in a mean
_MIN_PROMPT_TOKENS = 64


class Tempo:
    """Means that forget."""

    def __init__(self) -> None:
        self.decode_step_s = 0.0
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens per second of steps that read prompts; 0 until there was one."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

    def note(self, num_requests: int, num_tokens: int, step_s: float) -> None:
        """A step computed so many tokens of so many requests in `step_s`: as many tokens as requests means that all decode."""
        if num_requests == 0 or step_s <= 0:
            return
        if num_tokens == num_requests:
            known = self.decode_step_s
            self.decode_step_s = step_s if known == 0 else known + _SHARE * (step_s - known)
        elif num_tokens >= _MIN_PROMPT_TOKENS:
            self._tokens += _SHARE * (num_tokens - self._tokens)
            self._seconds += _SHARE * (step_s - self._seconds)
