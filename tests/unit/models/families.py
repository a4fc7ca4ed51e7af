"""Seeded random-weight models of every family and variant, made with transformers, which is the truth they are held to."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

BASE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
ROPE = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "theta": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn-full": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
        "truncate": False,
    },
    "yarn-attention": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.3,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
_FAMILIES = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}
_VARIANTS: dict[str, dict[str, dict[str, object]]] = {
    "llama": {
        "plain": {},
        "tied": {"tie_word_embeddings": True},
        "biased": {"attention_bias": True, "mlp_bias": True},
        "head-dim": {"head_dim": 24},
        "multi-head": {"num_key_value_heads": 8},
        "multi-query": {"num_key_value_heads": 1},
    },
    "mistral": {
        "plain": {"sliding_window": None},
        "sliding": {"sliding_window": 13},
        "sliding-tied": {"sliding_window": 5, "tie_word_embeddings": True, "head_dim": 16},
    },
    "qwen2": {
        "plain": {},
        "tied": {"tie_word_embeddings": True},
        "sliding": {"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 1},
        "layer-types": {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    },
    "qwen3": {
        "plain": {"head_dim": 16},
        "wide-heads": {"head_dim": 32, "tie_word_embeddings": True},
        "biased": {"head_dim": 16, "attention_bias": True},
        "sliding": {"head_dim": 16, "use_sliding_window": True, "sliding_window": 11, "max_window_layers": 2},
    },
}
CASES = [f"{family}/{variant}/default" for family, variants in _VARIANTS.items() for variant in variants]
CASES += [f"{family}/plain/{rope}" for family in _FAMILIES for rope in ROPE if rope != "default"]
# One of the rarer crossings: rescaled rotation under a sliding window.
CASES += ["mistral/sliding/yarn", "qwen2/sliding/llama3", "qwen3/sliding/linear"]


def config_of(case: str) -> PreTrainedConfig:
    family, variant, rope = case.split("/")
    values = BASE | _VARIANTS[family][variant] | {"rope_parameters": dict(ROPE[rope])}
    return _FAMILIES[family](**values)


def make_model(case: str, directory: Path, *, seed: int = 0, max_shard_size: str = "1GB") -> PreTrainedModel:
    """A float32 model with every parameter random (norms and biases too), saved to `directory`."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config_of(case), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.2 * torch.randn(parameter.shape))
            else:
                parameter.copy_(0.12 * torch.randn(parameter.shape))
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model
