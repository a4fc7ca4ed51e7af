"""What a GGUF architecture means in Hugging Face's words: config.json, tensor names and the shape each tensor must have.

    llama (also Mistral and SmolLM as converters write them) → llama, or mistral when there is a sliding window
    qwen2 → qwen2          qwen3 → qwen3

Refuses, by name, what our decoder would compute wrongly: experts, partial rotary, unknown rope scaling. Reads no tensor data
but the rope factors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from contracts.errors import ModelLoadError
from engine.models.gguf.reading import GGUFFile

ARCHITECTURES = ("llama", "qwen2", "qwen3")

JSONValue = str | int | float | bool | None | list[str] | list[int] | dict[str, str | int | float]

_CLASS_NAMES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
ROPE_FACTORS = "rope_freqs.weight"
# Llama 3.1 and later: the constants are the same in every released model, only `factor` (8 or 32) differs.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True, slots=True)
class Architecture:
    """The numbers that shape a decoder, read from GGUF metadata."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    biases: tuple[str, ...]  # of "q", "k", "v", "output"

    @property
    def interleaved(self) -> bool:
        """Whether llama.cpp's converter interleaved the rotary rows of q and k (it does for llama only)."""
        return self.name == "llama"


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """Where one GGUF tensor goes. `heads` is set when its rotary rows must be put back into halves."""

    source: str
    target: str
    shape: tuple[int, ...]
    heads: int | None = None


def read_architecture(file: GGUFFile) -> Architecture:
    """The architecture of a file; ModelLoadError for one that is unknown or has parts that we do not compute."""
    name = file.text("general.architecture")
    if name not in ARCHITECTURES:
        raise ModelLoadError(f"{file.path}: architecture {name!r} is not known; known: {', '.join(ARCHITECTURES)}")
    if file.integer(f"{name}.expert_count", 0):
        raise ModelLoadError(f"{file.path}: {name} with experts (mixture of experts) is not supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{file.path}: tensor token_embd.weight is missing")
    hidden_size = _size(file, f"{name}.embedding_length")
    num_heads = _size(file, f"{name}.attention.head_count")
    head_dim = _size(file, f"{name}.attention.key_length", hidden_size // num_heads)
    for key in (f"{name}.rope.dimension_count", f"{name}.attention.value_length"):
        if file.integer(key, head_dim) != head_dim:
            raise ModelLoadError(
                f"{file.path}: {key} is {file.integer(key)}, only the head size {head_dim} is supported"
            )
    return Architecture(
        name=name,
        num_layers=_size(file, f"{name}.block_count"),
        hidden_size=hidden_size,
        intermediate_size=_size(file, f"{name}.feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=_size(file, f"{name}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=embedding.shape[0],
        tied="output.weight" not in file.tensors,
        biases=tuple(part for part in ("q", "k", "v", "output") if f"blk.0.attn_{part}.bias" in file.tensors),
    )


def hf_config(file: GGUFFile, arch: Architecture, dtype: str) -> dict[str, JSONValue]:
    """The contents of config.json; `dtype` is how the weights are stored."""
    prefix = arch.name
    window = file.integer(f"{prefix}.attention.sliding_window", 0)
    if window and prefix != "llama":
        raise ModelLoadError(f"{file.path}: {prefix}.attention.sliding_window is {window}, not supported for {prefix}")
    model_type = "mistral" if window else prefix
    config: dict[str, JSONValue] = {
        "architectures": [_CLASS_NAMES[model_type]],
        "model_type": model_type,
        "dtype": dtype,
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "intermediate_size": arch.intermediate_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": file.number(f"{prefix}.attention.layer_norm_rms_epsilon"),
        "rope_theta": file.number(f"{prefix}.rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, arch),
        "max_position_embeddings": file.integer(f"{prefix}.context_length"),
        "tie_word_embeddings": arch.tied,
        "attention_bias": _attention_bias(file, arch, model_type),
    }
    if window:
        config["sliding_window"] = window
    for name in ("bos", "eos"):
        if file.has(f"tokenizer.ggml.{name}_token_id"):
            config[f"{name}_token_id"] = file.integer(f"tokenizer.ggml.{name}_token_id")
    return config


def tensor_plan(file: GGUFFile, arch: Architecture) -> list[TensorPlan]:
    """Every tensor of the model in order. ModelLoadError when one is missing, has another shape, or is not part of it."""
    plans = [TensorPlan("token_embd.weight", "model.embed_tokens.weight", (arch.vocab_size, arch.hidden_size))]
    _check(file, plans)
    for layer in range(arch.num_layers):
        plan = _layer_plan(arch, layer)
        _check(file, plan)  # layer by layer: a file may claim more of them than anybody could list
        plans += plan
    ends = [TensorPlan("output_norm.weight", "model.norm.weight", (arch.hidden_size,))]
    if not arch.tied:
        ends.append(TensorPlan("output.weight", "lm_head.weight", (arch.vocab_size, arch.hidden_size)))
    _check(file, ends)
    plans += ends
    unknown = set(file.tensors) - {plan.source for plan in plans} - {ROPE_FACTORS}
    if unknown:
        raise ModelLoadError(f"{file.path}: tensor {min(unknown)} is not part of a {arch.name} model")
    return plans


def _check(file: GGUFFile, plans: Sequence[TensorPlan]) -> None:
    for plan in plans:
        tensor = file.tensors.get(plan.source)
        if tensor is None:
            raise ModelLoadError(f"{file.path}: tensor {plan.source} is missing")
        if tensor.shape != plan.shape:
            raise ModelLoadError(f"{file.path}: tensor {plan.source} has shape {tensor.shape}, expected {plan.shape}")


def _size(file: GGUFFile, key: str, default: int | None = None) -> int:
    value = file.integer(key, default)
    if value < 1:
        raise ModelLoadError(f"{file.path}: {key} is {value}, must be at least 1")
    return value


def _layer_plan(arch: Architecture, layer: int) -> list[TensorPlan]:
    source, target = f"blk.{layer}", f"model.layers.{layer}"
    q_rows, kv_rows = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    hidden, inner = arch.hidden_size, arch.intermediate_size
    q_heads = arch.num_heads if arch.interleaved else None
    kv_heads = arch.num_kv_heads if arch.interleaved else None
    attention = {
        "q": ("q_proj", (q_rows, hidden), q_heads),
        "k": ("k_proj", (kv_rows, hidden), kv_heads),
        "v": ("v_proj", (kv_rows, hidden), None),
        "output": ("o_proj", (hidden, q_rows), None),
    }
    plans = [
        TensorPlan(f"{source}.attn_norm.weight", f"{target}.input_layernorm.weight", (hidden,)),
        TensorPlan(f"{source}.ffn_norm.weight", f"{target}.post_attention_layernorm.weight", (hidden,)),
        TensorPlan(f"{source}.ffn_gate.weight", f"{target}.mlp.gate_proj.weight", (inner, hidden)),
        TensorPlan(f"{source}.ffn_up.weight", f"{target}.mlp.up_proj.weight", (inner, hidden)),
        TensorPlan(f"{source}.ffn_down.weight", f"{target}.mlp.down_proj.weight", (hidden, inner)),
    ]
    for part, (name, shape, heads) in attention.items():
        plans.append(TensorPlan(f"{source}.attn_{part}.weight", f"{target}.self_attn.{name}.weight", shape, heads))
        if part in arch.biases:
            plans.append(TensorPlan(f"{source}.attn_{part}.bias", f"{target}.self_attn.{name}.bias", shape[:1], heads))
    if arch.name == "qwen3":
        for part in ("q", "k"):
            plans.append(
                TensorPlan(
                    f"{source}.attn_{part}_norm.weight", f"{target}.self_attn.{part}_norm.weight", (arch.head_dim,)
                )
            )
    return plans


def _attention_bias(file: GGUFFile, arch: Architecture, model_type: str) -> bool:
    """Which biases config.json can express: llama and qwen3 all four or none, qwen2 exactly q, k and v, mistral none."""
    allowed: dict[str, tuple[tuple[str, ...], ...]] = {
        "llama": ((), ("q", "k", "v", "output")),
        "qwen3": ((), ("q", "k", "v", "output")),
        "qwen2": (("q", "k", "v"),),
        "mistral": ((),),
    }
    if arch.biases not in allowed[model_type]:
        shown = ", ".join(arch.biases) or "none"
        raise ModelLoadError(f"{file.path}: attention biases of a {model_type} model cannot be: {shown}")
    return bool(arch.biases)


def _rope_scaling(file: GGUFFile, arch: Architecture) -> dict[str, str | int | float] | None:
    prefix = f"{arch.name}.rope.scaling"
    kind = file.text(f"{prefix}.type", "none")
    factor = file.number(f"{prefix}.factor", file.number(f"{arch.name}.rope.scale_linear", 1.0))
    if ROPE_FACTORS in file.tensors:
        if kind not in ("none", "linear") or factor != 1.0:
            raise ModelLoadError(f"{file.path}: {ROPE_FACTORS} together with rope scaling {kind!r} is not supported")
        return _llama3_scaling(file, arch)
    if kind in ("none", "linear"):
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    if kind != "yarn":
        raise ModelLoadError(f"{file.path}: rope scaling {kind!r} is not known; known: none, linear, yarn")
    scaling: dict[str, str | int | float] = {"rope_type": "yarn", "factor": factor}
    if file.has(f"{prefix}.original_context_length"):
        scaling["original_max_position_embeddings"] = file.integer(f"{prefix}.original_context_length")
    if file.has(f"{prefix}.attn_factor"):
        # llama.cpp multiplies by 0.1 ln(factor) + 1 on top of attn_factor; Hugging Face's value replaces that product.
        scaling["attention_factor"] = file.number(f"{prefix}.attn_factor") * (0.1 * math.log(factor) + 1.0)
    return scaling


def _llama3_scaling(file: GGUFFile, arch: Architecture) -> dict[str, str | int | float]:
    """The llama3 parameters that a table of per-frequency divisors was made from; ModelLoadError when it was not."""
    tensor = file.tensors[ROPE_FACTORS]
    if tensor.shape != (arch.head_dim // 2,) or tensor.quant.name != "F32":
        raise ModelLoadError(f"{file.path}: tensor {ROPE_FACTORS} is {tensor.quant.name} {tensor.shape}")
    table = tensor.blocks.view(np.float32).astype(np.float64)
    theta = file.number(f"{arch.name}.rope.freq_base", 10000.0)
    factor = round(float(table.max()), 4)
    low, high, original = _LLAMA3_ROPE.values()
    wavelengths = 2 * math.pi * theta ** (np.arange(0, arch.head_dim, 2) / arch.head_dim)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not np.allclose(table, expected, rtol=1e-4):
        raise ModelLoadError(f"{file.path}: tensor {ROPE_FACTORS} does not follow llama3 rope scaling")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3_ROPE}
