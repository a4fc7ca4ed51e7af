"""The checkpoint has the shape it says, is a function of its seed, and is there whole or not at all."""

import json

import torch
from safetensors.torch import load_file

from bench.checkpoint import HALF_B, Shape, half_b_checkpoint

TINY = Shape(
    hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_size=8, ffn_size=24, vocab_size=50, max_model_len=64
)


def test_the_real_shape_has_494_million_parameters():
    assert round(HALF_B.matmul_parameters / 1e6) == 494


def test_weights_are_bf16_and_a_function_of_the_seed(tmp_path):
    first = load_file(half_b_checkpoint(tmp_path / "a", TINY) / "model.safetensors")
    again = load_file(half_b_checkpoint(tmp_path / "b", TINY) / "model.safetensors")
    other = load_file(half_b_checkpoint(tmp_path / "c", TINY, seed=1) / "model.safetensors")
    assert all(weight.dtype == torch.bfloat16 for weight in first.values())
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert sum(w.numel() for w in first.values() if w.dim() == 2) == TINY.matmul_parameters


def test_it_is_made_once_and_a_broken_off_start_does_not_count(tmp_path):
    leftover = tmp_path / "bench-llama-16x2-v50-seed0.partial"
    leftover.mkdir()
    (leftover / "junk").write_text("half a file")
    path = half_b_checkpoint(tmp_path, TINY)
    assert not leftover.exists()
    assert not (path / "junk").exists()
    stamp = (path / "model.safetensors").stat().st_mtime_ns
    assert half_b_checkpoint(tmp_path, TINY) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == stamp


def test_transformers_reads_it(tmp_path):
    from transformers import AutoModelForCausalLM

    path = half_b_checkpoint(tmp_path, TINY)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    stored = load_file(path / "model.safetensors")
    assert torch.equal(model.lm_head.weight, stored["model.embed_tokens.weight"])
    assert json.loads((path / "config.json").read_text())["eos_token_id"] is None


def test_prefill_arithmetic_grows_with_the_prompt():
    assert HALF_B.prefill_flop(1024) > 2 * 1024 * HALF_B.num_layers * HALF_B.layer_parameters
    assert HALF_B.prefill_flop(2048) > 2 * HALF_B.prefill_flop(1024) - 4e11
