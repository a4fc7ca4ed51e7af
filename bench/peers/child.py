"""An engine's process: it loads once, says so, then generates what it is asked, one line of JSON each way.

    ──▶ {"prompts": [[…], …], "num_tokens": n}      ◀── {"ready": "NAME VERSION"}, then {"ends_s": […], "tokens": […]} for each

Runs in every engine's own environment, so it knows nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Generated:
    """Seconds from the call to the end of each step, and the first prompt's tokens."""

    ends_s: tuple[float, ...]
    tokens: tuple[int, ...]


class Generates(Protocol):
    """A loaded model of an engine."""

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Generated:
        """Greedily, `num_tokens` for each of the prompts, which are of one length; nothing ends early."""
        ...


def serve(version: str, load: Callable[[], Generates]) -> None:
    """Load, then answer until stdin ends. What libraries print goes to stderr: stdout is for answers."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = load()
    print(json.dumps({"ready": version}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        made = engine.generate(asked["prompts"], asked["num_tokens"])
        print(json.dumps({"ends_s": made.ends_s, "tokens": made.tokens}), file=answers, flush=True)
