"""Where an answer's time went, as OpenAI's forms and gRPC's trailer say it: each number under its own name."""

import json

from contracts.request import FinishReason
from observability.stages import HandoffStats, Spent, StageTimes
from router.choosing.route import Route
from router.exchange import Ending
from router.openai.account import diptych_json, stages_line

STAGES = StageTimes(*(2.0**-place for place in range(15)))
SPENT = Spent(STAGES, ttft_s=STAGES.ttft_s + 0.25, gap_s=STAGES.gap_s - 0.125)
SAID = {f"{name}_s": duration_s for name, duration_s in STAGES.by_name()}


def test_a_body_says_stages_and_what_is_in_none():
    handoff = HandoffStats("tcp", 4_000_000, 5, 7, 3, 0.016, 0.008)
    told = diptych_json(Ending(FinishReason.LENGTH, None, SPENT, handoff, Route.DISAGGREGATED, None))
    assert told == {
        "route": "disaggregated",
        "stages": SAID,
        "ttft_s": SPENT.ttft_s,
        "gap_s": SPENT.gap_s,
        "unexplained_s": {"ttft": 0.25, "gap": -0.125},
        "handoff": {
            "connector": "tcp",
            "kv_bytes": 4_000_000,
            "num_writes": 5,
            "num_blocks": 7,
            "num_cached_blocks": 3,
            "transfer_s": 0.016,
            "exposed_s": 0.008,
            "gb_per_s": 0.25,
        },
        "decision": None,
    }


def test_a_trailer_says_the_same_flat():
    sums = {"ttft_s": SPENT.ttft_s, "ttft_unexplained_s": 0.25, "gap_s": SPENT.gap_s, "gap_unexplained_s": -0.125}
    assert json.loads(stages_line(SPENT)) == SAID | sums
