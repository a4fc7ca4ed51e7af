"""How many tokens a model can attend to: its positions, stretched where its rotary embedding stretches them.

The router bounds requests by it before it has heard of a worker, the engine when it loads the model: one formula, so that both
say the same. Does not know files, or what the other rope parameters mean.
"""

from __future__ import annotations

from collections.abc import Mapping

_MOST = 1e6  # times; beyond it is no model


def stretched_context(rope_type: str, max_positions: int, original_positions: int, factor: float) -> int:
    """Tokens. `original_positions` is the context of the pretraining, of which yarn is a multiple; llama3 names the longer
    context itself.
    """
    if rope_type in ("linear", "dynamic"):
        return int(max_positions * factor)
    if rope_type == "yarn":
        return max(max_positions, int(original_positions * factor))
    return max_positions


def context_of(config: Mapping[str, object], max_positions: int) -> int:
    """The same from a parsed Hugging Face config.json. What cannot be read stretches nothing: whoever loads it will say so."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(scaling, dict):
        return max_positions
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    inner = scaling.get("original_max_position_embeddings", max_positions)
    outer = config.get("original_max_position_embeddings")
    original = inner if outer is None else outer
    if not isinstance(rope_type, str) or not isinstance(original, int) or original < 1:
        return max_positions
    factor = scaling.get("factor", max_positions / original)
    if not isinstance(factor, int | float) or not 1.0 <= factor <= _MOST:
        return max_positions
    return stretched_context(rope_type, max_positions, original, factor)
