"""What a step should take, from those before it."""

from __future__ import annotations

import pytest

from engine.pace import Pace

CHUNK_S, DECODE_S = 2.0, 0.02


def pace(*seen: tuple[int, float]) -> Pace:
    known = Pace()
    for num_tokens, step_s in seen:
        known.begin(num_tokens)
        known.end(step_s)
    return known


@pytest.mark.parametrize(
    ("seen", "num_tokens", "expected_s"),
    [
        ((), 2048, 0.0),
        (((1, DECODE_S),), 0, 0.0),
        (((1, DECODE_S), (512, CHUNK_S)), 1, DECODE_S),  # a decode step is not given a chunk's time
        (((1, DECODE_S), (512, CHUNK_S)), 64, CHUNK_S),  # what is no larger takes no longer
        (((512, CHUNK_S),), 512, CHUNK_S),
        (((512, CHUNK_S), (520, 1.0)), 600, CHUNK_S),  # the slowest of a size
        (((64, 5.0), (512, CHUNK_S)), 512, 5.0),  # first-call costs in a small one
        (((512, CHUNK_S),), 2048, 4 * CHUNK_S),  # larger than all before: as much per token
        (((1, DECODE_S), (64, 0.5)), 2048, 16.0),  # a worker's first chunk, after its warm-up
    ],
)
def test_what_is_expected(seen: tuple[tuple[int, float], ...], num_tokens: int, expected_s: float) -> None:
    known = pace(*seen)
    known.begin(num_tokens)
    assert known.expected_s() == pytest.approx(expected_s)


def test_a_step_that_computes_nothing_teaches_nothing() -> None:
    known = pace((1, DECODE_S), (0, 9.0))
    known.begin(1)
    assert known.expected_s() == DECODE_S


def test_a_size_stays_known_until_the_next_step_begins() -> None:
    """Else a reader between the end of a long step and the note of it would see a stall."""
    known = pace((512, CHUNK_S))
    assert known.expected_s() == CHUNK_S
