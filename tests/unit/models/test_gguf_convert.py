"""A GGUF file becomes the Hugging Face directory it stands for, bit for bit, or is refused with the reason."""

import json
import math

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from contracts.errors import ModelLoadError
from engine.models.gguf import tensors
from engine.models.gguf.architecture import read_architecture, tensor_plan
from engine.models.gguf.convert import convert_gguf
from engine.models.gguf.reading import GGUFFile
from engine.models.quantization import from_blocks
from tests.unit.models.gguf_files import K_QUANTS, Recipe, write_gguf

torch.set_num_threads(1)


def silent(_message):
    pass


def converted(tmp_path, recipe):
    """(expected tensors, output directory)."""
    expected = write_gguf(tmp_path / "tiny.gguf", recipe)
    out = tmp_path / "out"
    out.mkdir()
    convert_gguf(tmp_path / "tiny.gguf", out, silent)
    return expected, out


def refusal(tmp_path, recipe):
    write_gguf(tmp_path / "tiny.gguf", recipe)
    with pytest.raises(ModelLoadError) as caught:
        convert_gguf(tmp_path / "tiny.gguf", tmp_path, silent)
    assert "tiny.gguf" in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("quant", tensors.QUANTS)
def test_every_quant_type_is_its_dequantised_self(tmp_path, quant):
    wide = {"hidden": 256, "inner": 512, "heads": 4, "head_dim": 64} if quant in K_QUANTS else {}
    expected, out = converted(tmp_path, Recipe(quant=quant, layers=1, **wide))
    stored = load_file(out / "model.safetensors")
    assert {name.removesuffix(tensors.KEPT.get(quant, "?")) for name in stored} == expected.keys()
    dtype = torch.bfloat16 if quant == "BF16" or quant in tensors.KEPT else torch.float32
    for name, values in expected.items():
        if quant in tensors.KEPT and values.ndim == 2:
            suffix = tensors.KEPT[quant]
            blocks = stored[name + suffix]
            assert blocks.dtype is torch.uint8
            assert torch.equal(from_blocks(blocks, suffix).dequantised(), torch.from_numpy(values)), name
            continue
        assert stored[name].dtype is dtype
        assert torch.equal(stored[name], torch.from_numpy(values).to(dtype)), name
    assert json.loads((out / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


def test_bfloat16_is_chosen_over_a_limit_and_rounds_as_torch_does(tmp_path):
    expected = write_gguf(tmp_path / "tiny.gguf", Recipe(quant="Q5_1"))
    file = GGUFFile(tmp_path / "tiny.gguf")
    size = 4 * sum(values.size for values in expected.values())
    assert tensors.stored_dtype(file, size) == "float32"
    assert tensors.stored_dtype(file, size - 1) == "bfloat16"
    tensors.write_tensors(
        file, tensor_plan(file, read_architecture(file)), tmp_path / "model.safetensors", "bfloat16", silent
    )
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(stored[name], torch.from_numpy(values).to(torch.bfloat16)), name


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(),
        Recipe(tied=False, biases=("q", "k", "v", "output")),
        Recipe(heads=2, head_dim=40),
        Recipe(metadata={"llama.attention.sliding_window": 16}),
        Recipe(arch="qwen2", biases=("q", "k", "v")),
        Recipe(arch="qwen3", tied=False),
    ],
    ids=["llama", "llama-biases", "llama-head-size", "mistral", "qwen2", "qwen3"],
)
def test_transformers_finds_every_tensor_in_its_place(tmp_path, recipe):
    expected, out = converted(tmp_path, recipe)
    model, report = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    state = model.state_dict()
    for name, values in expected.items():
        assert torch.equal(state[name], torch.from_numpy(values)), name
    assert model.config.rms_norm_eps == 1e-5
    assert model.config.rope_parameters["rope_theta"] == 100000.0
    if recipe.metadata:
        assert (model.config.model_type, model.config.sliding_window) == ("mistral", 16)


def test_the_files_around_the_weights(tmp_path):
    _, out = converted(tmp_path, Recipe(metadata={"tokenizer.ggml.eot_token_id": 10}))
    assert sorted(p.name for p in out.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert json.loads((out / "generation_config.json").read_text()) == {"bos_token_id": 0, "eos_token_id": [1, 10]}
    tokenizer = json.loads((out / "tokenizer_config.json").read_text())
    assert (tokenizer["bos_token"], tokenizer["eos_token"], tokenizer["add_bos_token"]) == ("<s>", "</s>", False)
    assert tokenizer["chat_template"] == "{{ messages[0].content }}"


def llama3_factors(theta, factor, head_dim):
    """As llama.cpp's converter writes them, one frequency at a time."""
    low_wavelength, high_wavelength = 8192 / 1, 8192 / 4
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        if wavelength < high_wavelength:
            factors.append(1.0)
        elif wavelength > low_wavelength:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_a_table_of_rope_factors_becomes_llama3_scaling(tmp_path, factor):
    recipe = Recipe(rope_factors=llama3_factors(500000.0, factor, 16), metadata={"llama.rope.freq_base": 500000.0})
    _, out = converted(tmp_path, recipe)
    rope = AutoConfig.from_pretrained(out).rope_parameters
    assert rope["rope_type"] == "llama3"
    assert (rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]) == (factor, 1.0, 4.0)
    assert rope["original_max_position_embeddings"] == 8192


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, {"rope_type": "default"}),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"llama.rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
    ],
)
def test_rope_scaling_is_carried_over(tmp_path, metadata, expected):
    _, out = converted(tmp_path, Recipe(metadata=metadata))
    assert expected.items() <= AutoConfig.from_pretrained(out).rope_parameters.items()


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (Recipe(arch="gemma3"), ["architecture 'gemma3' is not known", "llama, qwen2, qwen3"]),
        (Recipe(metadata={"llama.expert_count": 8}), ["experts"]),
        (Recipe(metadata={"llama.rope.dimension_count": 8}), ["llama.rope.dimension_count is 8"]),
        (Recipe(metadata={"llama.attention.value_length": 8}), ["llama.attention.value_length is 8"]),
        (Recipe(metadata={"llama.rope.scaling.type": "longrope"}), ["rope scaling 'longrope'"]),
        (Recipe(rope_factors=np.linspace(1, 8, 8)), ["rope_freqs.weight does not follow llama3"]),
        (Recipe(rope_factors=np.ones(3)), ["rope_freqs.weight is F32 (3,)"]),
        (Recipe(drop=("blk.1.attn_k.weight",)), ["blk.1.attn_k.weight is missing"]),
        (Recipe(drop=("token_embd.weight",)), ["token_embd.weight is missing"]),
        (Recipe(extra={"blk.0.attn_sinks.weight": (4,)}), ["blk.0.attn_sinks.weight is not part of a llama model"]),
        (
            Recipe(metadata={"llama.feed_forward_length": 100}),
            ["blk.0.ffn_gate.weight has shape (96, 64), expected (100, 64)"],
        ),
        (Recipe(biases=("q",)), ["attention biases of a llama model cannot be: q"]),
        (Recipe(arch="qwen2"), ["attention biases of a qwen2 model cannot be: none"]),
        (Recipe(arch="qwen3", metadata={"qwen3.attention.sliding_window": 4}), ["sliding_window is 4"]),
        (Recipe(metadata={"llama.block_count": None}), ["the metadata has no llama.block_count"]),
        (Recipe(metadata={"llama.block_count": "two"}), ["llama.block_count has a value of type str: 'two'"]),
        (Recipe(metadata={"llama.block_count": 2**31}), ["blk.2.attn_norm.weight is missing"]),
        (Recipe(metadata={"llama.block_count": 0}), ["llama.block_count is 0, must be at least 1"]),
        (Recipe(metadata={"llama.attention.head_count": 0}), ["llama.attention.head_count is 0"]),
        (Recipe(metadata={"llama.attention.layer_norm_rms_epsilon": math.nan}), ["layer_norm_rms_epsilon is nan"]),
        (Recipe(vocab=9), ["11 tokens but only 9 rows"]),
        (
            Recipe(quant="TQ2_0", hidden=256, inner=256, head_dim=64, layers=1),
            ["token_embd.weight has type TQ2_0", "Q6_K"],
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_cannot_be_computed_is_refused_by_name(tmp_path, recipe, words):
    message = refusal(tmp_path, recipe)
    for word in words:
        assert word in message


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(tmp_path, share):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, Recipe())
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf: not a complete GGUF file"):
        convert_gguf(path, tmp_path, silent)


def test_a_type_newer_than_the_library_is_refused(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, Recipe())
    content = path.read_bytes()
    name = b"token_embd.weight"
    at = content.index(name) + len(name) + 4 + 2 * 8  # name, number of dimensions, two dimensions
    assert content[at : at + 4] == int(gguf.GGMLQuantizationType.F32).to_bytes(4, "little")
    path.write_bytes(content[:at] + (999).to_bytes(4, "little") + content[at + 4 :])
    with pytest.raises(ModelLoadError, match="999"):
        convert_gguf(path, tmp_path, silent)
