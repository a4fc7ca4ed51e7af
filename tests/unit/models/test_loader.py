"""Model directories, whole and broken: every tensor accounted for, every fault named with its file and tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from contracts.errors import ConfigError, ModelLoadError
from engine.models.decoder import Decoder
from engine.models.loader import load_model, model_config, resolve_dtype
from tests.unit.models.families import make_model
from tests.unit.models.paged import PagedRun


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole")
    make_model("qwen2/plain/default", directory)
    return directory


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sharded")
    make_model("qwen2/plain/default", directory, max_shard_size="100KB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    return directory


def copy(source: Path, target: Path) -> Path:
    shutil.copytree(source, target, dirs_exist_ok=True)
    return target


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Apply `change` to the tensors of model.safetensors."""
    path = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    path.unlink()
    save_file(tensors, path)


def logits(model: Decoder) -> Tensor:
    run = PagedRun(model, [[5, 9, 2]])
    run.step([(0, 3)])
    return run.finish()[0]


def refusal(directory: Path, dtype: str = "float32") -> str:
    with pytest.raises(ModelLoadError) as caught:
        load_model(directory, dtype)
    return caught.value.message


def test_shards_and_one_file_are_one_model(whole: Path, sharded: Path) -> None:
    one, many = load_model(whole, "auto"), load_model(sharded, "auto")
    assert torch.equal(logits(one), logits(many))
    assert one.fingerprint == many.fingerprint


def test_fingerprint_knows_weights_and_config_and_not_the_path(whole: Path, tmp_path: Path) -> None:
    original = load_model(whole, "float32").fingerprint
    same = copy(whole, tmp_path / "same")
    assert load_model(same, "float32").fingerprint == original

    other_weights = tmp_path / "other"
    make_model("qwen2/plain/default", other_weights, seed=1)
    assert load_model(other_weights, "float32").fingerprint != original

    config = json.loads((same / "config.json").read_text())
    (same / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert load_model(same, "float32").fingerprint != original


def test_fingerprint_sees_a_change_in_any_tensor(whole: Path, tmp_path: Path) -> None:
    seen = {load_model(whole, "float32").fingerprint}
    names = list(load_file(whole / "model.safetensors"))
    for i, name in enumerate(names):
        directory = copy(whole, tmp_path / str(i))
        rewrite(directory, lambda tensors, name=name: tensors.update({name: tensors[name] * 1.5}))
        seen.add(load_model(directory, "float32").fingerprint)
    assert len(seen) == len(names) + 1


def test_auto_is_the_checkpoints_dtype_and_float16_becomes_bfloat16(whole: Path) -> None:
    assert load_model(whole, "auto").dtype == torch.float32
    assert load_model(whole, "bfloat16").dtype == torch.bfloat16
    assert resolve_dtype("auto", "float16") == "bfloat16"
    assert resolve_dtype("auto", "bfloat16") == "bfloat16"
    with pytest.raises(ConfigError, match=r"dtype: got 'float16', known: auto, float32, bfloat16"):
        resolve_dtype("float16", "float32")


def test_weights_of_another_dtype_are_converted(whole: Path, tmp_path: Path) -> None:
    directory = copy(whole, tmp_path / "half")
    rewrite(directory, lambda tensors: tensors.update({n: t.half() for n, t in tensors.items()}))
    torch.testing.assert_close(
        logits(load_model(directory, "float32")), logits(load_model(whole, "float32")), atol=0.05, rtol=0.05
    )


def test_a_tied_model_may_carry_its_head_and_old_ones_their_frequencies(whole: Path, tmp_path: Path) -> None:
    make_model("llama/tied/default", tmp_path)
    before = logits(load_model(tmp_path, "float32"))

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    rewrite(tmp_path, add)
    assert torch.equal(logits(load_model(tmp_path, "float32")), before)


def test_missing_tensor(whole: Path, tmp_path: Path) -> None:
    directory = copy(whole, tmp_path / "m")
    name = "model.layers.1.mlp.down_proj.weight"
    rewrite(directory, lambda tensors: tensors.__delitem__(name))
    message = refusal(directory)
    assert name in message
    assert "model.safetensors" in message
    assert "missing" in message


def test_unexpected_tensor(whole: Path, tmp_path: Path) -> None:
    directory = copy(whole, tmp_path / "m")
    rewrite(directory, lambda tensors: tensors.update({"model.layers.0.adapter.weight": torch.zeros(3)}))
    message = refusal(directory)
    assert "unexpected tensor model.layers.0.adapter.weight" in message
    assert "model.safetensors" in message


def test_wrong_shape(whole: Path, tmp_path: Path) -> None:
    directory = copy(whole, tmp_path / "m")
    name = "model.layers.2.self_attn.k_proj.weight"
    rewrite(directory, lambda tensors: tensors.update({name: torch.zeros(16, 32)}))
    assert f"tensor {name}: shape [16, 32], expected [16, 64]" in refusal(directory)


def test_a_config_of_sizes_that_nobody_has_is_refused_before_memory_is_asked_for(whole: Path, tmp_path: Path) -> None:
    directory = copy(whole, tmp_path / "m")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": 10**12}))
    assert "expected [1000000000000, " in refusal(directory)


def test_no_tensor_at_all(whole: Path, tmp_path: Path) -> None:
    directory = copy(whole, tmp_path / "m")
    rewrite(directory, lambda tensors: tensors.clear())
    message = refusal(directory)
    assert message.startswith(str(directory))
    assert "model.embed_tokens.weight" in message
    assert "is missing" in message


def test_integer_weights(whole: Path, tmp_path: Path) -> None:
    directory = copy(whole, tmp_path / "m")
    rewrite(directory, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int32)}))
    assert "tensor model.norm.weight: dtype torch.int32 is not supported" in refusal(directory)


def test_missing_shard(sharded: Path, tmp_path: Path) -> None:
    directory = copy(sharded, tmp_path / "m")
    shard = sorted(directory.glob("*.safetensors"))[1]
    shard.unlink()
    message = refusal(directory)
    assert str(shard) in message
    assert "no such file" in message
    assert "model." in message.split("it holds")[1]


def test_shard_without_a_tensor_that_the_index_promises(sharded: Path, tmp_path: Path) -> None:
    directory = copy(sharded, tmp_path / "m")
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    first, second = sorted(set(index["weight_map"].values()))[:2]
    name = min(n for n, file in index["weight_map"].items() if file == first)
    index["weight_map"][name] = second
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    message = refusal(directory)
    assert name in message
    assert second in message


def test_index_that_points_out_of_its_directory(sharded: Path, tmp_path: Path) -> None:
    directory = copy(sharded, tmp_path / "m")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    assert "not a plain file name" in refusal(directory)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": [1]}))
    assert "weight_map" in refusal(directory)


@pytest.mark.parametrize("kept", [0.999, 0.5])
def test_truncated_file_names_the_first_tensor_that_is_cut(whole: Path, tmp_path: Path, kept: float) -> None:
    directory = copy(whole, tmp_path / "m")
    path = directory / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * kept)])
    message = refusal(directory)
    assert str(path) in message
    assert "truncated: tensor " in message


@pytest.mark.parametrize(
    "data",
    [
        b"\xa0\x86\x01\0\0\0\0\0" + b"[" * 100_000,
        b"",
        b"abc",
        b"\xff" * 64,
        b"\x08\0\0\0\0\0\0\0not json",
        b"\x02\0\0\0\0\0\0\0[]",
    ],
)
def test_a_file_that_is_no_safetensors(whole: Path, tmp_path: Path, data: bytes) -> None:
    directory = copy(whole, tmp_path / "m")
    (directory / "model.safetensors").write_bytes(data)
    assert str(directory / "model.safetensors") in refusal(directory)


def test_no_weights_and_no_directory(whole: Path, tmp_path: Path) -> None:
    directory = copy(whole, tmp_path / "m")
    (directory / "model.safetensors").unlink()
    assert "neither model.safetensors nor model.safetensors.index.json" in refusal(directory)
    with pytest.raises(ModelLoadError, match="no such model directory"):
        model_config(tmp_path / "nowhere")
