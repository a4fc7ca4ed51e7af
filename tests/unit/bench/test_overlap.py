"""What is said of a transfer that overlaps with computing: the formula at its ends, and blocks that are moved once each."""

import pytest

from bench.overlap import Cell, OverlapBenchConfig
from contracts.kv_layout import KVLayout

LAYOUT = KVLayout("bench", "bfloat16", num_layers=2, num_kv_heads=1, head_size=8, block_size=16)


@pytest.mark.parametrize("pieces", [1, 2, 4, 8])
def test_what_is_felt_lies_between_one_piece_and_all(pieces):
    whole = Cell(pieces, False, 0.0, 0.01, (0.01,))
    assert whole.predicted_s == pytest.approx(pieces * 0.01)  # nothing to hide behind
    hidden = Cell(pieces, True, 10.0, 0.01, (0.02,))
    assert hidden.predicted_s == 0.01 and hidden.ratio == pytest.approx(2.0)
    between = Cell(pieces, False, 0.01, 0.01, (0.01,))
    assert hidden.predicted_s <= between.predicted_s <= whole.predicted_s


def test_sets_have_every_block_once_on_both_sides():
    config = OverlapBenchConfig(LAYOUT, num_tokens=64, num_sets=3)
    sets = config.blocks()
    assert len(sets) == 3 and all(len(source) == len(target) == config.num_blocks for source, target in sets)
    for side in (0, 1):
        assert sorted(block for one in sets for block in one[side]) == list(range(3 * config.num_blocks))
