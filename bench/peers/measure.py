"""The measurement as `python -m bench peers` runs it: two models, all engines that are installed, one report."""

from __future__ import annotations

import json
from pathlib import Path

from bench.checkpoint import HALF_B, Shape
from bench.peers.forms import Forms
from bench.peers.plain import plain_checkpoint
from bench.peers.report import Part, peers_report
from bench.peers.run import PeersConfig, run_rounds
from bench.peers.subjects import PEERS_PYTHON, missing, subjects
from bench.progress import Say
from bench.report import Report


def shape_of(folder: Path) -> Shape:
    """Of a Llama checkpoint with tied embeddings."""
    config: dict[str, int] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads = config["num_attention_heads"]
    return Shape(
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config["num_key_value_heads"],
        head_size=config.get("head_dim") or config["hidden_size"] // heads,
        ffn_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
    )


def run_peers(half_b: Path, small: Path, cache: Path, config: PeersConfig, say: Say) -> Report:
    """The 0.5B-shaped checkpoint, then the small real model, whose tokenizer also serves where an engine wants one."""
    small = plain_checkpoint(small, cache, say)
    parts = []
    for name, folder, shape in (("0.5B", half_b, HALF_B), (small.name, small, shape_of(small))):
        forms = Forms(folder, cache, PEERS_PYTHON, tokenizer=small)
        found = subjects(folder, forms, config.threads, say)
        parts.append(Part(name, shape, run_rounds(found, shape.vocab_size, config, say)))
    return peers_report(parts, missing(), config)
