"""One GGUF file in, one Hugging-Face-style directory out.

    config.json  generation_config.json  model.safetensors  tokenizer.json  tokenizer_config.json

The caller gives an empty directory and makes its appearance atomic (`engine.models.store.cache`).
Matrices of Q8_0, Q4_0 and Q4_K are kept block for block, as tensors of bytes (`tensors.KEPT`), and such a model runs in bfloat16.
Other quantised weights are stored as float32 up to 2 GiB (half a billion parameters): a dequantised value needs more than the
8 bits of bfloat16's mantissa (Q4_1 is a 4-bit number times a float16 plus a float16), and with rounded weights SmolLM2's
first logits move by 0.04, so a float32 run would not be the file's model. A bfloat16 run rounds at load, to the values that
a bfloat16 file would have held. Larger models are run in bfloat16 anyway, so they are stored in it, at half the disk.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from contracts.errors import ModelLoadError
from engine.models.gguf.architecture import JSONValue, hf_config, read_architecture, tensor_plan
from engine.models.gguf.reading import GGUFFile
from engine.models.gguf.tensors import check_quants, stored_dtype, write_tensors
from engine.models.gguf.tokenizer import build_tokenizer, special_ids, tokenizer_config

# Part of the cache key: raise it when the same file would give another directory.
CONVERTER_VERSION = 2


def convert_gguf(source: Path, directory: Path, progress: Callable[[str], None]) -> None:
    """Write the model of `source` into the existing `directory`. ModelLoadError says what it cannot convert, and why."""
    progress(f"{source.name}: reading")
    file = GGUFFile(source)
    arch = read_architecture(file)
    check_quants(file)
    plans = tensor_plan(file, arch)
    dtype = stored_dtype(file)
    _write_json(directory / "config.json", hf_config(file, arch, dtype))
    progress(f"{source.name}: building the tokenizer")
    tokenizer = build_tokenizer(file)
    if tokenizer.get_vocab_size() > arch.vocab_size:
        raise ModelLoadError(
            f"{source}: {tokenizer.get_vocab_size()} tokens but only {arch.vocab_size} rows in token_embd.weight"
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", tokenizer_config(file))
    ids = special_ids(file)
    generation: dict[str, JSONValue] = {
        "bos_token_id": ids.bos,
        "eos_token_id": list(ids.ends),
        "pad_token_id": ids.pad,
    }
    _write_json(directory / "generation_config.json", {k: v for k, v in generation.items() if v is not None})
    progress(f"{source.name}: converting {len(plans)} tensors to {dtype}")
    write_tensors(file, plans, directory / "model.safetensors", dtype, progress)


def _write_json(path: Path, content: Mapping[str, JSONValue]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
