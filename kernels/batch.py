"""What one forward pass attends to, as plain numbers: which rows belong to whom and where their KV lies.

    rows of the pass:   0 … first_row … first_row + num_rows …           (query rows, one per scheduled token)
    positions:          num_computed … num_computed + num_rows − 1        (of the row's own request)
    KV of position p:   block_ids[p // block_size], offset p % block_size

A decode step is a segment of one row; a prompt's chunk is a segment of many. Nothing here says which is which.
Does not know tensors, requests or layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive query rows of one request. `block_ids` covers at least positions 0 … num_computed + num_rows − 1."""

    first_row: int
    num_rows: int
    num_computed: int
    block_ids: Sequence[int]

    @property
    def context_len(self) -> int:
        """Positions that the segment's last row sees, itself included."""
        return self.num_computed + self.num_rows
