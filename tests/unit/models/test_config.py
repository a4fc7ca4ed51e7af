"""config.json in, ModelConfig out: old and new spellings agree, families' defaults hold, what we cannot do is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from contracts.context import context_of
from contracts.errors import ModelLoadError
from engine.models.config import ModelConfig, parse_model_config, read_model_config
from tests.unit.models.families import CASES, config_of

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}


def parse(**changes: object) -> ModelConfig:
    return parse_model_config(LLAMA | changes)


@pytest.mark.parametrize("case", CASES)
def test_a_saved_config_and_its_old_spelling_mean_the_same(case: str) -> None:
    raw = json.loads(config_of(case).to_json_string(use_diff=False)) | {"architectures": [_architecture(case)]}
    old = {k: v for k, v in raw.items() if k not in ("rope_parameters", "dtype")}
    rope = dict(raw["rope_parameters"])
    old["rope_theta"] = rope.pop("rope_theta")
    old["torch_dtype"] = raw["dtype"] or "float32"
    old["rope_scaling"] = None if rope == {"rope_type": "default"} else {"type": rope.pop("rope_type"), **rope}
    assert parse_model_config(old) == parse_model_config(raw)


def _architecture(case: str) -> str:
    return case.split("/")[0].capitalize() + "ForCausalLM"


def test_left_out_keys_mean_the_familys_defaults() -> None:
    config = parse()
    assert (config.num_kv_heads, config.head_size, config.rms_norm_eps) == (4, 16, 1e-6)
    assert (config.tie_embeddings, config.qkv_bias, config.o_bias, config.qk_norm) == (False, False, False, False)
    assert (config.rope.rope_type, config.rope.theta, config.dtype) == ("default", 10000.0, "float32")
    qwen3 = parse(architectures=["Qwen3ForCausalLM"], num_key_value_heads=2)
    assert (qwen3.head_size, qwen3.qk_norm, qwen3.qkv_bias) == (128, True, False)
    qwen2 = parse(architectures=["Qwen2ForCausalLM"], num_key_value_heads=2)
    assert (qwen2.head_size, qwen2.qkv_bias, qwen2.o_bias) == (16, True, False)


def test_model_type_serves_where_architectures_is_absent() -> None:
    raw = {k: v for k, v in LLAMA.items() if k != "architectures"} | {"model_type": "llama"}
    assert parse_model_config(raw).family == "llama"


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2, "sliding_window": None}, (None, None)),
        ({"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2, "sliding_window": 7}, (7, 7)),
        ({"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}, (4096, 4096)),
        ({"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2, "sliding_window": 7}, (None, None)),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "num_key_value_heads": 2,
                "sliding_window": 7,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            (None, 7),
        ),
        ({"sliding_window": 7}, (None, None)),
    ],
    ids=str,
)
def test_windows(changes: dict[str, object], windows: tuple[int | None, ...]) -> None:
    assert parse(**changes).windows == windows


def test_context_is_stretched_where_the_rope_type_stretches_it() -> None:
    def scaled(**rope: object) -> int:
        return parse(rope_scaling=rope).context_len

    assert parse().context_len == 512
    assert scaled(type="linear", factor=2.0) == 1024
    assert scaled(type="dynamic", factor=4.0) == 2048
    assert scaled(type="yarn", factor=4.0, original_max_position_embeddings=512) == 2048
    assert scaled(type="yarn", factor=4.0, original_max_position_embeddings=128) == 512
    assert scaled(rope_type="llama3", factor=8.0, original_max_position_embeddings=64) == 512


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": None},
        {"rope_scaling": {"type": "linear", "factor": 2.5}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 4}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0}, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 256},
        {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 128}},
        {
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            "original_max_position_embeddings": 512,
        },
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}},
    ],
    ids=str,
)
def test_the_router_bounds_requests_by_the_context_that_the_workers_have(changes: dict[str, object]) -> None:
    assert context_of(LLAMA | changes, 512) == parse(**changes).context_len


@pytest.mark.parametrize(
    "scaling",
    [
        "x",
        [],
        {"type": 3},
        {"type": "linear"},
        {"type": "linear", "factor": "4"},
        {"type": "linear", "factor": 0.5},
        {"type": "linear", "factor": float("inf")},
        {"type": "yarn", "original_max_position_embeddings": 0},
    ],
    ids=str,
)
def test_scaling_that_cannot_be_read_stretches_nothing(scaling: object) -> None:
    assert context_of({"rope_scaling": scaling}, 512) == 512


def test_an_unknown_architecture_is_refused_by_name_with_the_known_ones() -> None:
    with pytest.raises(ModelLoadError) as caught:
        parse(architectures=["GPT2LMHeadModel"])
    for name in ("GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        assert name in caught.value.message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: got 1000000000, at most 10000"),
        ({"rms_norm_eps": -1}, "rms_norm_eps: got -1, must be a finite number from 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: got nan"),
        ({"rope_theta": 0}, "rope_theta: got 0, must be a finite number above 0"),
        ({"rope_scaling": {"type": "dynamic", "factor": -1}}, "factor: got -1, must be a finite number from 1"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor: got 0.5"),
        ({"rope_scaling": {"type": "yarn", "factor": float("inf")}}, "factor: got inf"),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            "rope type 'longrope' is not supported; known: default",
        ),
        ({"rope_scaling": {"type": "linear"}}, "factor: missing"),
        ({"rope_scaling": {"type": "linear", "factor": "two"}}, "factor: got 'two'"),
        ({"rope_scaling": 3}, "must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_attention_heads": 0}, "num_attention_heads: got 0"),
        ({"num_attention_heads": True}, "num_attention_heads: got True"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"vocab_size": "many"}, "vocab_size: got 'many'"),
        ({"rms_norm_eps": None}, "rms_norm_eps: got None"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: got 1"),
        ({"torch_dtype": "int8"}, "dtype: got 'int8'"),
        ({"eos_token_id": "</s>"}, "eos_token_id: got '</s>'"),
        ({"architectures": [], "model_type": "t5"}, "architecture 't5' is not supported"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_served_is_refused_by_key_and_value(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        parse(**changes)
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"]}, "must be a list of 2 names"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "'chunked_attention' is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "no sliding_window in use"),
        ({"max_window_layers": "all"}, "max_window_layers: got 'all'"),
    ],
    ids=str,
)
def test_layer_types_that_do_not_fit_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        parse(architectures=["Qwen2ForCausalLM"], num_key_value_heads=2, **changes)
    assert message in caught.value.message


def test_generation_config_says_first_what_ends_an_answer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"eos_token_id": 2}))
    assert read_model_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert read_model_config(tmp_path).eos_token_ids == (3, 4)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "cannot be read as JSON"), ("[1]", "expected a JSON object, got list")]
)
def test_a_config_that_is_no_json_object_names_its_file(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=message) as caught:
        read_model_config(tmp_path)
    assert str(tmp_path / "config.json") in caught.value.message


def test_bytes_that_are_no_text_name_their_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelLoadError, match="cannot be read as JSON"):
        read_model_config(tmp_path)


def test_no_config_at_all(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json: no such file"):
        read_model_config(tmp_path)
