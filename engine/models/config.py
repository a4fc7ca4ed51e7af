"""A decoder's shape, read from a Hugging Face config.json: one frozen type for Llama, Mistral, Qwen2 and Qwen3.

Keys that a config.json leaves out mean what the family's config class in transformers gives them. Anything that would
change the numbers and is not supported (another architecture, activation, rope type, partial rotation) is refused by
name. Reads both `rope_theta` + `rope_scaling` and the newer `rope_parameters`. Does not know tensors or files' bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from contracts.context import stretched_context
from contracts.errors import ModelLoadError
from contracts.families import ARCHITECTURES, MAX_POSITIONS, VOCAB_SIZE, family_of
from engine.models.rope import ROPE_TYPES, RopeConfig

Json = Mapping[str, object]

_MAX_LAYERS = 10_000
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """All that decides a decoder's arithmetic. `windows` has one entry per layer: tokens a row sees, None for all."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    max_positions: int
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    rope: RopeConfig
    dtype: str  # of the checkpoint
    eos_token_ids: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.windows)

    @property
    def context_len(self) -> int:
        """Tokens that the model can attend to: its positions, stretched where the rope type stretches them."""
        rope = self.rope
        return stretched_context(rope.rope_type, self.max_positions, rope.original_max_positions, rope.factor)


def read_model_config(directory: Path) -> ModelConfig:
    """From `directory`/config.json and, for the end-of-text ids, generation_config.json if there is one."""
    raw = read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.is_file() else None
    return parse_model_config(raw, eos, str(directory / "config.json"))


def parse_model_config(raw: Json, generation_eos: object = None, source: str = "config.json") -> ModelConfig:
    """From the parsed config.json; `generation_eos` goes before the config's own. Raises ModelLoadError naming the key."""
    keys = _Keys(raw, source)
    family = _family(raw, source)
    _refuse_unsupported(keys, family)
    num_heads = keys.integer("num_attention_heads", 32)
    hidden_size = keys.integer("hidden_size", 4096)
    kv_default = {"llama": num_heads, "mistral": 8}.get(family, 32)
    num_kv_heads = keys.integer("num_key_value_heads", kv_default, null=num_heads)
    head_default = 128 if family == "qwen3" else hidden_size // num_heads
    head_size = keys.integer("head_dim", head_default, null=hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise ModelLoadError(
            f"{source}: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
        )
    if head_size % 2:
        raise ModelLoadError(f"{source}: head_dim {head_size} is odd")
    attention_bias = family in ("llama", "qwen3") and keys.boolean("attention_bias", False)
    max_positions = keys.integer("max_position_embeddings", MAX_POSITIONS[family])
    return ModelConfig(
        family=family,
        vocab_size=keys.integer("vocab_size", VOCAB_SIZE[family]),
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size", {"llama": 11008, "mistral": 14336}.get(family, 22016)),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        max_positions=max_positions,
        tie_embeddings=keys.boolean("tie_word_embeddings", False),
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=family == "llama" and keys.boolean("mlp_bias", False),
        qk_norm=family == "qwen3",
        windows=_windows(keys, family),
        rope=_rope(keys, max_positions),
        dtype=_dtype(keys),
        eos_token_ids=_token_ids(generation_eos if generation_eos is not None else raw.get("eos_token_id"), source),
    )


def read_json(path: Path) -> Json:
    """The object in a JSON file; ModelLoadError names the file and what is wrong with it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


class _Keys:
    """Typed reads of a parsed config.json, with errors that name file, key and value."""

    def __init__(self, raw: Json, source: str) -> None:
        self.raw = raw
        self.source = source

    def integer(self, key: str, default: int, null: int | None = None) -> int:
        """A positive integer; `null` stands for an explicit null."""
        value = self.raw.get(key, default)
        if value is None and null is not None:
            return null
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self.wrong(key, "must be a positive integer")
        return value

    def number(self, key: str, default: float, *, least: float = 0.0, open_low: bool = False) -> float:
        """A finite number that is `least` or more, with `open_low` more. The default is taken as it is."""
        if key not in self.raw:
            return default
        value = self.raw[key]
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.wrong(key, "must be a number")
        if not math.isfinite(value) or value < least or (open_low and value == least):
            raise self.wrong(key, f"must be a finite number {'above' if open_low else 'from'} {least:g}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.raw.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "must be true or false")
        return value

    def wrong(self, key: str, limit: str) -> ModelLoadError:
        return ModelLoadError(f"{self.source}: {key}: got {self.raw.get(key)!r}, {limit}")


def _family(raw: Json, source: str) -> str:
    family = family_of(raw)
    if family is not None:
        return family
    names = raw.get("architectures")
    named = names[0] if isinstance(names, list) and names else raw.get("model_type")
    known = ", ".join(ARCHITECTURES)
    raise ModelLoadError(f"{source}: architecture {named!r} is not supported; known: {known}")


def _refuse_unsupported(keys: _Keys, family: str) -> None:
    if keys.raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise keys.wrong("hidden_act", "only silu is supported")
    if keys.raw.get("quantization_config") is not None:
        raise ModelLoadError(f"{keys.source}: quantization_config: quantised {family} checkpoints are not supported")


def _windows(keys: _Keys, family: str) -> tuple[int | None, ...]:
    num_layers = keys.integer("num_hidden_layers", 32)
    if num_layers > _MAX_LAYERS:
        raise keys.wrong("num_hidden_layers", f"at most {_MAX_LAYERS}")
    if family == "llama":
        return (None,) * num_layers
    on = family == "mistral" or keys.boolean("use_sliding_window", False)
    window = None
    if on and keys.raw.get("sliding_window", 4096) is not None:
        window = keys.integer("sliding_window", 4096)
    if family == "mistral":
        return (window,) * num_layers
    kinds = keys.raw.get("layer_types")
    if kinds is None:
        first = keys.raw.get("max_window_layers", 28)
        if not isinstance(first, int):
            raise keys.wrong("max_window_layers", "must be an integer")
        return tuple(window if i >= first else None for i in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise keys.wrong("layer_types", f"must be a list of {num_layers} names")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelLoadError(f"{keys.source}: layer_types: {kind!r} is not supported")
    if window is None and "sliding_attention" in kinds:
        raise ModelLoadError(
            f"{keys.source}: layer_types names sliding_attention, but there is no sliding_window in use"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(keys: _Keys, max_positions: int) -> RopeConfig:
    scaling = keys.raw.get("rope_parameters") or keys.raw.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise keys.wrong("rope_parameters", "must be an object")
    rope = _Keys(scaling, f"{keys.source}: rope_parameters")
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ModelLoadError(f"{rope.source}: rope type {rope_type!r} is not supported; known: {', '.join(ROPE_TYPES)}")
    partial = scaling.get("partial_rotary_factor", keys.raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelLoadError(f"{rope.source}: partial_rotary_factor: got {partial!r}, only 1 is supported")
    theta = rope.number("rope_theta", keys.number("rope_theta", 10000.0, open_low=True), open_low=True)
    # Only these types rescale with respect to an original context; the others' "original" is the config's own.
    original = max_positions
    if rope_type in ("llama3", "yarn"):
        original = rope.integer("original_max_position_embeddings", max_positions)
        original = keys.integer("original_max_position_embeddings", original, null=original)
    if rope_type == "default":
        return RopeConfig(rope_type, theta, original)
    if rope_type != "yarn" and "factor" not in scaling:
        raise ModelLoadError(f"{rope.source}: factor: missing, rope type {rope_type!r} needs it")
    explicit = scaling.get("attention_factor") is not None
    return RopeConfig(
        rope_type,
        theta,
        original,
        factor=rope.number("factor", max_positions / original, least=1.0),
        low_freq_factor=rope.number("low_freq_factor", 1.0, open_low=True),
        high_freq_factor=rope.number("high_freq_factor", 4.0, open_low=True),
        beta_fast=rope.number("beta_fast", 32.0, open_low=True),
        beta_slow=rope.number("beta_slow", 1.0, open_low=True),
        attention_factor=rope.number("attention_factor", 1.0, open_low=True) if explicit else None,
        mscale=rope.number("mscale", 0.0),
        mscale_all_dim=rope.number("mscale_all_dim", 0.0),
        truncate=rope.boolean("truncate", True),
    )


def _dtype(keys: _Keys) -> str:
    value = keys.raw.get("dtype", keys.raw.get("torch_dtype")) or "float32"
    if value not in _DTYPES:
        raise ModelLoadError(f"{keys.source}: dtype: got {value!r}, known: {', '.join(_DTYPES)}")
    return str(value)


def _token_ids(value: object, source: str) -> tuple[int, ...]:
    values = [] if value is None else value if isinstance(value, list) else [value]
    for item in values:
        if not isinstance(item, int) or isinstance(item, bool) or item < 0:
            raise ModelLoadError(f"{source}: eos_token_id: got {value!r}, must be a token id or a list of them")
    return tuple(values)
