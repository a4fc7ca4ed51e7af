"""Where the time of an answer went, and why it went its way: ours, beside what OpenAI's forms have. Durations are in seconds.

Does not know the forms that it is put into.
"""

from __future__ import annotations

import dataclasses

from observability.stages import Spent
from router.exchange import Ending
from router.openai.json import Json, render


def diptych_json(ending: Ending) -> dict[str, Json]:
    """Where the time of this answer went, and why it went this way; durations in seconds."""
    spent = ending.spent
    handoff: Json = None
    if ending.handoff is not None:
        handoff = {**dataclasses.asdict(ending.handoff), "gb_per_s": ending.handoff.gb_per_s}
    decision: Json = None
    if ending.decision is not None:
        decision = {**dataclasses.asdict(ending.decision), "regret_s": ending.decision.regret_s}
    return {
        "route": ending.route.value,
        "stages": {**spent.by_field()},
        "ttft_s": spent.ttft_s,
        "gap_s": spent.gap_s,
        "unexplained_s": {"ttft": spent.ttft_unexplained_s, "gap": spent.gap_unexplained_s},
        "handoff": handoff,
        "decision": decision,
    }


def stages_line(spent: Spent) -> bytes:
    """The stages, and beside them what they add up to, as one flat object: gRPC's trailer."""
    said: dict[str, Json] = {**spent.by_field()}
    said |= {"ttft_s": spent.ttft_s, "ttft_unexplained_s": spent.ttft_unexplained_s}
    said |= {"gap_s": spent.gap_s, "gap_unexplained_s": spent.gap_unexplained_s}
    return render(said)
