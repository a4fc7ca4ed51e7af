"""Free memory and peak memory are measured, not guessed."""

from __future__ import annotations

import numpy as np
import psutil

from engine.execution.memory import available_bytes, peak_bytes


def test_available_is_no_more_than_the_machine_has() -> None:
    assert 0 < available_bytes() <= psutil.virtual_memory().total


def test_peak_sees_memory_that_is_already_gone_when_the_call_returns() -> None:
    size = 64 << 20

    def call() -> str:
        for _ in range(5):
            np.ones(size, dtype=np.uint8).sum()
        return "done"

    result, peak = peak_bytes(call)
    assert result == "done"
    assert size // 2 < peak < 4 * size
