"""GGUF files written by the tests: tiny, random, every quant type. The mapping here is written down a second time on purpose."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np

TOKENS = ["<s>", "</s>", "a", "b", "c", "Ġ", "ab", "Ġa", "1", "2", "<tool>"]
TYPES = [3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 4]
MERGES = ["a b", "Ġ a"]
K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


@dataclass
class Recipe:
    """A model to write. `drop`, `extra` and `metadata` spoil or change it: names, {name: shape}, {key: value or None}."""

    arch: str = "llama"
    quant: str = "F32"
    hidden: int = 64
    inner: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    layers: int = 2
    vocab: int = len(TOKENS)
    tied: bool = True
    biases: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    extra: dict[str, tuple[int, ...]] = field(default_factory=dict)
    rope_factors: np.ndarray | None = None
    metadata: dict[str, object] = field(default_factory=dict)


def write_gguf(path: Path, recipe: Recipe) -> dict[str, np.ndarray]:
    """Write the file; returns the Hugging Face tensors it stands for, float32."""
    writer = gguf.GGUFWriter(path, recipe.arch)
    for key, value in {**_metadata(recipe), **recipe.metadata}.items():
        _add(writer, key, value)
    rng = np.random.default_rng(7)
    expected: dict[str, np.ndarray] = {}
    for source, target, shape, heads in _tensors(recipe):
        if source in recipe.drop:
            continue
        quant = gguf.GGMLQuantizationType[recipe.quant if len(shape) > 1 else "F32"]
        if quant.name in K_QUANTS:
            blocks = _random_blocks(rng, shape, quant)
        else:
            values = rng.standard_normal(shape).astype(np.float32)
            if heads is not None and recipe.arch == "llama":
                values = _interleaved(values, heads)
            blocks = gguf.quantize(values, quant)
        writer.add_tensor(source, blocks, raw_dtype=quant)
        stored = np.asarray(gguf.dequantize(blocks, quant), dtype=np.float32).reshape(shape)
        expected[target] = _from_interleaved(stored, heads) if heads and recipe.arch == "llama" else stored
    if recipe.rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", recipe.rope_factors.astype(np.float32))
    for name, shape in recipe.extra.items():
        writer.add_tensor(name, np.zeros(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _metadata(recipe: Recipe) -> dict[str, object]:
    a = recipe.arch
    return {
        f"{a}.block_count": recipe.layers,
        f"{a}.context_length": 128,
        f"{a}.embedding_length": recipe.hidden,
        f"{a}.feed_forward_length": recipe.inner,
        f"{a}.attention.head_count": recipe.heads,
        f"{a}.attention.head_count_kv": recipe.kv_heads,
        f"{a}.attention.key_length": recipe.head_dim,
        f"{a}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{a}.rope.freq_base": 100000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    """None leaves the key out."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)


def _tensors(r: Recipe) -> list[tuple[str, str, tuple[int, ...], int | None]]:
    """(GGUF name, Hugging Face name, shape, heads when llama.cpp interleaves its rows)."""
    found: list[tuple[str, str, tuple[int, ...], int | None]] = [
        ("token_embd.weight", "model.embed_tokens.weight", (r.vocab, r.hidden), None),
        ("output_norm.weight", "model.norm.weight", (r.hidden,), None),
    ]
    if not r.tied:
        found.append(("output.weight", "lm_head.weight", (r.vocab, r.hidden), None))
    q, kv = r.heads * r.head_dim, r.kv_heads * r.head_dim
    for i in range(r.layers):
        b, m = f"blk.{i}.", f"model.layers.{i}."
        found += [
            (b + "attn_norm.weight", m + "input_layernorm.weight", (r.hidden,), None),
            (b + "ffn_norm.weight", m + "post_attention_layernorm.weight", (r.hidden,), None),
            (b + "ffn_gate.weight", m + "mlp.gate_proj.weight", (r.inner, r.hidden), None),
            (b + "ffn_up.weight", m + "mlp.up_proj.weight", (r.inner, r.hidden), None),
            (b + "ffn_down.weight", m + "mlp.down_proj.weight", (r.hidden, r.inner), None),
            (b + "attn_q.weight", m + "self_attn.q_proj.weight", (q, r.hidden), r.heads),
            (b + "attn_k.weight", m + "self_attn.k_proj.weight", (kv, r.hidden), r.kv_heads),
            (b + "attn_v.weight", m + "self_attn.v_proj.weight", (kv, r.hidden), None),
            (b + "attn_output.weight", m + "self_attn.o_proj.weight", (r.hidden, q), None),
        ]
        rows = {"q": (q, r.heads), "k": (kv, r.kv_heads), "v": (kv, None), "output": (r.hidden, None)}
        for part in r.biases:
            size, heads = rows[part]
            name = "o" if part == "output" else part
            found.append((f"{b}attn_{part}.bias", f"{m}self_attn.{name}_proj.bias", (size,), heads))
        if r.arch == "qwen3":
            found += [
                (b + f"attn_{p}_norm.weight", m + f"self_attn.{p}_norm.weight", (r.head_dim,), None) for p in "qk"
            ]
    return found


def _interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: row j and row j + half of a head become neighbours."""
    out = np.empty_like(values)
    size = values.shape[0] // heads
    for head in range(heads):
        for j in range(size // 2):
            out[head * size + 2 * j] = values[head * size + j]
            out[head * size + 2 * j + 1] = values[head * size + j + size // 2]
    return out


def _from_interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    out = np.empty_like(values)
    size = values.shape[0] // heads
    for head in range(heads):
        for j in range(size // 2):
            out[head * size + j] = values[head * size + 2 * j]
            out[head * size + j + size // 2] = values[head * size + 2 * j + 1]
    return out


def _random_blocks(rng: np.random.Generator, shape: tuple[int, ...], quant: gguf.GGMLQuantizationType) -> np.ndarray:
    """Random bytes below 0x40, so that no float16 scale in them is infinite or NaN."""
    block, size = gguf.GGML_QUANT_SIZES[quant]
    return rng.integers(0, 0x40, (*shape[:-1], shape[-1] // block * size), dtype=np.uint8)
