"""How many answers are made at once where nobody has said it: what the ready decode workers run at once, and a quarter more.

    ready decode workers: max_num_seqs 64, 64 ──▶ 160 places        none is ready ──▶ as many as before

What is let in beyond what workers run waits in their own queues, in order of arrival, where shares, priorities and deadlines
count for nothing; what is let in below it leaves them idle. The quarter is for those that a prefill worker has and that are on
their way. Does not know who waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from contracts.worker import WorkerInfo

FIRST_PLACES = 64  # before any decode worker was ready
_SPARE = 1.25
_UNSAID = 256  # of a worker that does not say what it runs at once


def places_for(decode: Iterable[WorkerInfo]) -> int:
    """For these ready decode workers; 0 when there is none, which says nothing."""
    return sum(math.ceil(_SPARE * info.max_num_seqs) if info.max_num_seqs else _UNSAID for info in decode)
