"""From a model directory to a decoder: every tensor accounted for, merged and packed one layer at a time.

    config.json ─▶ ModelConfig ─┐
    *.safetensors (mapped) ─────┴─▶ q,k,v → qkv · gate,up → gate_up ─▶ (quantise) ─▶ kernels.linear (packs) ─▶ Decoder

A tensor that is missing, unexpected or of another shape is refused by name. Does not know KV memory or requests.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from contracts.errors import ConfigError, ModelLoadError
from engine.models.checkpoint import Checkpoint
from engine.models.config import ModelConfig, read_model_config
from engine.models.decoder import Decoder
from engine.models.quantization import BLOCKS, Held, format_of, from_blocks, resolve_quantization
from kernels.dispatch import Kernels, choose
from kernels.interface import Embedding, Linear
from kernels.quantised import QuantisedWeight, quantise, stacked
from kernels.stack import Layer, Shape, Stack

_log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# The second where it is both.
_OUTPUT_MATRICES = ("lm_head.weight", "model.embed_tokens.weight")
# Old checkpoints carry what is computed here from the config.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def model_config(path: Path) -> ModelConfig:
    """The configuration in directory `path`; ModelLoadError when it is not one of the known architectures."""
    if not path.is_dir():
        raise ModelLoadError(f"{path}: no such model directory")
    return read_model_config(path)


def resolve_dtype(requested: str, checkpoint: str) -> str:
    """ "auto" is the checkpoint's own, but float16 becomes bfloat16, which CPUs compute in and which cannot overflow."""
    if requested == "auto":
        if checkpoint == "float16":
            _log.warning(
                "checkpoint is float16, served as bfloat16 (8 instead of 11 significant bits); float32 is exact"
            )
            return "bfloat16"
        return checkpoint
    if requested not in DTYPES:
        raise ConfigError(f"dtype: got {requested!r}, known: auto, {', '.join(DTYPES)}")
    return requested


def load_model(
    path: Path, dtype: str, kernels: Kernels | None = None, device: str = "cpu", quantization: str = "auto"
) -> Decoder:
    """The decoder in directory `path`, computing in `dtype` ("auto", "float32", "bfloat16"), with `kernels` or `device`'s best.

    `quantization`: see `engine.models.quantization`. Raises ModelLoadError.
    """
    config = model_config(path)
    torch_dtype = DTYPES[resolve_dtype(dtype, config.dtype)]
    kernels = kernels or choose(device, torch_dtype)
    with Checkpoint(path) as checkpoint, torch.inference_mode():
        held = resolve_quantization(quantization, any(name.endswith(tuple(BLOCKS)) for name in checkpoint.names))
        reader = _Reader(checkpoint, torch_dtype, kernels, held)
        stack = _stack(config, reader)
        reader.refuse_leftovers(config)
        seed = repr(sorted(asdict(config).items())) + ("" if held == "none" else f" quantization {held}")
        fingerprint = checkpoint.fingerprint(seed)
    reader.say_how_held()
    return Decoder(config, stack, kernels, fingerprint)


class _Reader:
    """Takes tensors out of a checkpoint, remembering which."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, kernels: Kernels, held: Held) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._kernels = kernels
        self._held = held
        self._taken: set[str] = set()
        self._formats: Counter[str] = Counter()

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A copy in the model's dtype."""
        return self.merged((name,), (shape[0],), *shape[1:])

    def merged(self, names: tuple[str, ...], rows: tuple[int, ...], *columns: int) -> Tensor:
        """Tensors names[i] [rows[i], *columns] one below the other, copied once."""
        # All shapes are compared before memory is asked for: a config may name sizes that nobody has.
        parts = [self._part(name, (count, *columns)) for name, count in zip(names, rows, strict=True)]
        out = torch.empty(sum(rows), *columns, dtype=self._dtype, device=self._kernels.device)
        start = 0
        for part in parts:
            out[start : start + len(part)] = part.dequantised() if isinstance(part, QuantisedWeight) else part
            start += len(part)
        return out

    def embedding(self, tied: bool, vocab: int, hidden: int) -> tuple[Embedding, Linear]:
        """The look-up of tokens and the output matrix, which are one weight if `tied`."""
        name = "model.embed_tokens.weight"
        if not tied:
            table = self._kernels.embedding(self.tensor(name, vocab, hidden))
            return table, self.linear(("lm_head",), (vocab,), hidden, bias=False)
        if self._held == "none":
            return self._kernels.tied(self.tensor(name, vocab, hidden))
        weight = self._quantised((name,), (vocab,), hidden)
        if self._kernels.quantised is None:
            return self._kernels.tied(self._on_device(weight))
        return self._kernels.quantised.tied(weight, self._dtype)

    def linear(self, modules: tuple[str, ...], rows: tuple[int, ...], features: int, bias: bool) -> Linear:
        """One projection out of several modules that share their input; module i has rows[i] outputs."""
        names = tuple(f"{module}.weight" for module in modules)
        biases = self.merged(tuple(f"{module}.bias" for module in modules), rows) if bias else None
        if self._held == "none":
            return self._kernels.linear(self.merged(names, rows, features), biases)
        weight = self._quantised(names, rows, features)
        if self._kernels.quantised is None:
            return self._kernels.linear(self._on_device(weight), biases)
        return self._kernels.quantised.linear(weight, biases, self._dtype)

    def say_how_held(self) -> None:
        """Nothing is quantised silently, nor dequantised."""
        if self._held == "none":
            return
        _log.info("quantised weights: %s", ", ".join(f"{n} {form}" for form, n in sorted(self._formats.items())))
        if self._kernels.quantised is None:
            _log.warning(
                "the kernels (%s) multiply no quantised weights: they are dequantised, which saves no memory",
                self._kernels.name,
            )

    def _part(self, name: str, shape: tuple[int, ...]) -> Tensor | QuantisedWeight:
        """A tensor as it is stored."""
        for suffix, (inputs, size) in BLOCKS.items():
            if name + suffix in self._checkpoint.names:
                self._taken.add(name + suffix)
                raw = self._checkpoint.blocks(name + suffix, (shape[0], shape[1] // inputs * size))
                return from_blocks(raw, suffix)
        found = self._checkpoint.tensor(name, shape)
        self._taken.add(name)
        return found

    def _quantised(self, names: tuple[str, ...], rows: tuple[int, ...], features: int) -> QuantisedWeight:
        """As `merged`, in one format: that of the blocks if they agree, else int8."""
        parts = [self._part(name, (count, features)) for name, count in zip(names, rows, strict=True)]
        formats = {part.format if isinstance(part, QuantisedWeight) else None for part in parts}
        if self._held != "stored" or len(formats) > 1 or None in formats:
            to = format_of(self._held, names[0] in _OUTPUT_MATRICES)
            parts = [quantise(p.dequantised() if isinstance(p, QuantisedWeight) else p, to) for p in parts]
        weight = stacked([part for part in parts if isinstance(part, QuantisedWeight)])
        self._formats[weight.format] += 1
        return weight

    def _on_device(self, weight: QuantisedWeight) -> Tensor:
        return weight.dequantised().to(self._kernels.device, self._dtype)

    def refuse_leftovers(self, config: ModelConfig) -> None:
        """Every tensor of the checkpoint has been taken or is known to be redundant."""
        redundant = {"lm_head.weight"} if config.tie_embeddings else set()
        left = sorted(n for n in self._checkpoint.names - self._taken - redundant if not _DERIVED.fullmatch(n))
        if left:
            path = self._checkpoint.file_of(left[0])
            raise ModelLoadError(f"{path}: unexpected tensor {left[0]} in a {config.family} model ({len(left)} in all)")


def _stack(config: ModelConfig, reader: _Reader) -> Stack:
    hidden = config.hidden_size
    shape = Shape(
        hidden_size=hidden,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        rms_norm_eps=config.rms_norm_eps,
    )
    embedding, lm_head = reader.embedding(config.tie_embeddings, config.vocab_size, hidden)
    layers = tuple(_layer(config, reader, f"model.layers.{i}") for i in range(config.num_layers))
    return Stack(shape, embedding, layers, reader.tensor("model.norm.weight", hidden), lm_head)


def _layer(config: ModelConfig, reader: _Reader, prefix: str) -> Layer:
    hidden, head, mlp = config.hidden_size, config.head_size, config.intermediate_size
    q, kv = config.num_heads * head, config.num_kv_heads * head
    attn, ffn = f"{prefix}.self_attn", f"{prefix}.mlp"
    qkv_names = (f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj")
    gate_up_names = (f"{ffn}.gate_proj", f"{ffn}.up_proj")
    return Layer(
        input_norm=reader.tensor(f"{prefix}.input_layernorm.weight", hidden),
        qkv=reader.linear(qkv_names, (q, kv, kv), hidden, config.qkv_bias),
        q_norm=reader.tensor(f"{attn}.q_norm.weight", head) if config.qk_norm else None,
        k_norm=reader.tensor(f"{attn}.k_norm.weight", head) if config.qk_norm else None,
        o=reader.linear((f"{attn}.o_proj",), (hidden,), q, config.o_bias),
        post_norm=reader.tensor(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=reader.linear(gate_up_names, (mlp, mlp), hidden, config.mlp_bias),
        down=reader.linear((f"{ffn}.down_proj",), (hidden,), mlp, config.mlp_bias),
    )
