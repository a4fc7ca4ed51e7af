"""Quantised models: GGUF blocks served as they are, floats rounded at load, and what other pools and kernels make of them."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from contracts.errors import ConfigError, ModelLoadError
from engine.models.decoder import Decoder
from engine.models.gguf.convert import convert_gguf
from engine.models.loader import load_model
from engine.models.quantization import QUANTIZATIONS, resolve_quantization
from kernels.cpu.config import compiler
from kernels.cpu.kernels import native
from kernels.cpu.library import load, supported_isas
from kernels.dispatch import REFERENCE, TORCH
from kernels.one_by_one import OneByOne
from tests.unit.models.families import make_model
from tests.unit.models.gguf_files import Recipe, write_gguf
from tests.unit.models.paged import PagedRun, random_schedule

ISAS = supported_isas() if compiler() else ()
needs_native = pytest.mark.skipif(not ISAS, reason="no compiler, or not an x86 on Linux")
PROMPTS = [[5, 9, 2, 7, 1, 0, 3, 4, 8, 6, 10, 2], [3], [1, 1, 4, 2, 9]]
WIDE = {"hidden": 256, "inner": 512, "heads": 4, "head_dim": 64}


def silent(_message: str) -> None:
    pass


def from_gguf(tmp_path: Path, recipe: Recipe) -> Path:
    write_gguf(tmp_path / "tiny.gguf", recipe)
    out = tmp_path / "model"
    out.mkdir()
    convert_gguf(tmp_path / "tiny.gguf", out, silent)
    return out


def small(tmp_path: Path) -> Path:
    make_model("llama/tied/default", tmp_path)
    return tmp_path


def logits(model: Decoder) -> list[Tensor]:
    run = PagedRun(model, PROMPTS)
    for index, prompt in enumerate(PROMPTS):
        run.step([(index, len(prompt))])
    return run.finish()


def off_by(found: list[Tensor], expected: list[Tensor]) -> float:
    """Of what the logits vary by, how much differs."""
    ours, theirs = torch.cat(found).float(), torch.cat(expected).float()
    assert ours.isfinite().all()
    return ((ours - theirs).norm() / theirs.norm()).item()


@needs_native
@pytest.mark.parametrize("quant", ["Q8_0", "Q4_0", "Q4_K"])
def test_a_file_of_blocks_is_computed_from_its_blocks(tmp_path: Path, quant: str) -> None:
    directory = from_gguf(tmp_path, Recipe(quant=quant, layers=2, tied=quant != "Q4_0", **WIDE))
    kernels = native(load(ISAS[0]))
    kept, plain = (load_model(directory, "float32", kernels, quantization=word) for word in ("auto", "none"))
    slow, slow_plain = (load_model(directory, "float32", REFERENCE, quantization=word) for word in ("auto", "none"))
    # Last bits of sums decide now and then between two roundings of an activation; weights this large make that count.
    assert off_by(logits(kept), logits(slow)) < 0.02
    assert off_by(logits(plain), logits(slow_plain)) < 1e-3
    assert kept.fingerprint != plain.fingerprint
    assert load_model(directory, "auto", kernels).dtype is torch.bfloat16


@needs_native
@pytest.mark.parametrize(("word", "most"), [("int8", 0.05), ("int4", 0.5)])
def test_floats_are_rounded_at_load(tmp_path: Path, word: str, most: float) -> None:
    kernels = native(load(ISAS[0]))
    plain = load_model(small(tmp_path), "float32", kernels)
    rounded = load_model(tmp_path, "float32", kernels, quantization=word)
    assert 0 < off_by(logits(rounded), logits(plain)) < most


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("word", ["int8", "int4"])
def test_company_and_chunks_do_not_show(tmp_path: Path, isa: str, dtype: str, word: str) -> None:
    kernels = native(load(isa))
    slow = replace(kernels, forward=OneByOne)
    expected = logits(load_model(small(tmp_path), dtype, slow, quantization=word))
    run = PagedRun(load_model(tmp_path, dtype, kernels, quantization=word), PROMPTS)
    for step in random_schedule(PROMPTS, random.Random(3)):
        run.step(step)
    for ours, theirs in zip(run.finish(), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_each_way_of_holding_a_model_is_a_model_of_its_own(tmp_path: Path) -> None:
    prints = {
        word: load_model(small(tmp_path), "float32", TORCH, quantization=word).fingerprint for word in QUANTIZATIONS
    }
    assert prints["auto"] == prints["none"]
    assert len(set(prints.values())) == 3


def test_kernels_that_multiply_no_quantised_weights_say_so_and_take_their_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = from_gguf(tmp_path, Recipe(quant="Q8_0"))
    with caplog.at_level(logging.INFO):
        kept = load_model(directory, "float32", TORCH)
    assert "the kernels (torch) multiply no quantised weights" in caplog.text
    assert "quantised weights: 9 int8" in caplog.text
    plain = load_model(directory, "float32", TORCH, quantization="none")
    for ours, theirs in zip(logits(kept), logits(plain), strict=True):
        assert torch.equal(ours, theirs)


def test_other_matrices_beside_blocks_become_int8(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """q, k and v share a product, so one of them that is none takes the others with it."""
    directory = from_gguf(tmp_path, Recipe(quant="Q4_0", layers=1))
    path = directory / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.self_attn.v_proj.weight"
    blocks = tensors.pop(name + ".q4_0")
    values = gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType.Q4_0)
    tensors[name] = torch.from_numpy(values).to(torch.bfloat16)
    path.unlink()
    save_file(tensors, path)
    with caplog.at_level(logging.INFO):
        load_model(directory, "float32", TORCH)
    assert "quantised weights: 4 int4, 1 int8" in caplog.text


def test_blocks_of_another_shape_or_type_are_refused(tmp_path: Path) -> None:
    directory = from_gguf(tmp_path, Recipe(quant="Q4_0", layers=1))
    path = directory / "model.safetensors"
    whole = load_file(path)
    name = "model.layers.0.mlp.down_proj.weight.q4_0"
    for wrong in (whole[name][:, :-18].contiguous(), whole[name].to(torch.int16)):
        path.unlink()
        save_file({**whole, name: wrong}, path)
        with pytest.raises(ModelLoadError, match=r"down_proj\.weight\.q4_0"):
            load_model(directory, "float32", TORCH)


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"quantization: got 'int3', known: auto, none, int8, int4"):
        resolve_quantization("int3", has_blocks=False)
