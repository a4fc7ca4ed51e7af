"""The kinds of models there are here, and what a config.json of each means by what it leaves out.

The router and the engine read the same file, so they take the same defaults: those of the family's class in transformers.
Does not know files or arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping

ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
MAX_POSITIONS: Mapping[str, int] = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
VOCAB_SIZE: Mapping[str, int] = {"llama": 32000, "mistral": 32000, "qwen2": 151936, "qwen3": 151936}


def family_of(config: Mapping[str, object]) -> str | None:
    """The family of a parsed config.json; None for one that is not known here."""
    names = config.get("architectures")
    if isinstance(names, list) and names:
        return next((ARCHITECTURES[name] for name in names if isinstance(name, str) and name in ARCHITECTURES), None)
    model_type = config.get("model_type")
    return model_type if isinstance(model_type, str) and model_type in ARCHITECTURES.values() else None
