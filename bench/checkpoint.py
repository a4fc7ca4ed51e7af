"""Makes the 0.5B-shaped checkpoint the engine is measured on: random bf16 weights from a seed, as a Hugging Face directory.

The shape is Qwen2.5-0.5B's in Llama's form (no biases): 494 M parameters, 988 MB. Speed does not depend on what the weights are,
so nothing has to be downloaded. It has no tokenizer; the engine is asked in token ids. Does not know who reads it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

INIT_STD = 0.02


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama decoder with tied embeddings."""

    hidden_size: int = 896
    num_layers: int = 24
    num_heads: int = 14
    num_kv_heads: int = 2
    head_size: int = 64
    ffn_size: int = 4864
    vocab_size: int = 151_936
    max_model_len: int = 32_768

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer that a token is multiplied with (norms left out)."""
        attention = 2 * self.hidden_size * self.head_size * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.ffn_size

    @property
    def matmul_parameters(self) -> int:
        """Weights that one decode step reads: all layers and the tied head."""
        return self.num_layers * self.layer_parameters + self.vocab_size * self.hidden_size

    def prefill_flop(self, num_tokens: int) -> float:
        """Floating-point operations of a causal prefill that needs the logits of its last token only."""
        layers = 2.0 * self.num_layers * self.layer_parameters * num_tokens
        attention = 2.0 * self.num_layers * self.num_heads * self.head_size * num_tokens**2
        return layers + attention + 2.0 * self.vocab_size * self.hidden_size


HALF_B = Shape()


def half_b_checkpoint(cache: Path, shape: Shape = HALF_B, seed: int = 0) -> Path:
    """The directory of the checkpoint under `cache`, made when it is not there yet: complete or not at all."""
    name = f"bench-llama-{shape.hidden_size}x{shape.num_layers}-v{shape.vocab_size}-seed{seed}"
    target = cache / name
    if target.exists():
        return target
    unfinished = cache / f"{name}.partial"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    _write_weights(unfinished / "model.safetensors", shape, seed)
    (unfinished / "config.json").write_text(json.dumps(_config(shape), indent=2), encoding="utf-8")
    # No eos id: generation runs to its length everywhere.
    (unfinished / "generation_config.json").write_text(json.dumps({"do_sample": False}), encoding="utf-8")
    unfinished.rename(target)
    return target


def _config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "intermediate_size": shape.ffn_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_model_len,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": None,
        "initializer_range": INIT_STD,
    }


def _write_weights(path: Path, shape: Shape, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, size in _parameters(shape):
        weight = torch.empty(size, dtype=torch.bfloat16)
        tensors[name] = weight.fill_(1.0) if len(size) == 1 else weight.normal_(0.0, INIT_STD, generator=generator)
    save_file(tensors, path, metadata={"format": "pt"})


def _parameters(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor's name and size, [out, in] for matrices, in the file's order."""
    hidden, q_size, kv_size = shape.hidden_size, shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (q_size, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (kv_size, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (kv_size, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, q_size)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.mlp.gate_proj.weight", (shape.ffn_size, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (shape.ffn_size, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, shape.ffn_size)
    yield "model.norm.weight", (hidden,)
