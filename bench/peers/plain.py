"""A checkpoint that other engines can read: weights that ours keeps in blocks of eight or four bits are bf16 here.

    model.safetensors: NAME.q8_0 uint8 [out, bytes] ──▶ NAME bf16 [out, in]        all other files as they are

Without it a peer would have its missing weights made up (transformers) or not load (vLLM), and ours would be called bf16 with
eight bits. Made once, kept in the cache. Does not know engines.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from bench.progress import Say

WEIGHTS = "model.safetensors"


def plain_checkpoint(folder: Path, cache: Path, say: Say) -> Path:
    """`folder` itself where nothing in it is kept in blocks."""
    from safetensors import safe_open

    from engine.models.quantization import BLOCKS

    with safe_open(folder / WEIGHTS, framework="pt") as file:
        if not any(name.endswith(tuple(BLOCKS)) for name in file.keys()):  # noqa: SIM118  (no mapping)
            return folder
    # Named by where it comes from, too: one model converted anew is another checkpoint.
    target = cache / "bench-peers" / "plain" / folder.parent.name / folder.name
    if not target.exists():
        say(f"peers: making {folder.name} plain")
        half = target.with_name(f"{target.name}.partial")
        shutil.rmtree(half, ignore_errors=True)
        shutil.copytree(folder, half, ignore=shutil.ignore_patterns(WEIGHTS))
        write_plain(folder / WEIGHTS, half / WEIGHTS)
        half.rename(target)
    return target


def write_plain(source: Path, target: Path) -> None:
    """The tensors of `source`, blocks as the numbers that they stand for."""
    import gguf
    import torch
    from safetensors.torch import load_file, save_file

    from engine.models.quantization import BLOCKS

    tensors = {}
    for name, tensor in load_file(source).items():
        suffix = next((suffix for suffix in BLOCKS if name.endswith(suffix)), None)
        if suffix is None:
            tensors[name] = tensor
        else:
            kind = gguf.GGMLQuantizationType[suffix[1:].upper()]
            tensors[name.removesuffix(suffix)] = torch.from_numpy(gguf.dequantize(tensor.numpy(), kind)).bfloat16()
    save_file(tensors, target, metadata={"format": "pt"})
