"""From a directory to a runner: what is refused, how the pool is sized, what is logged."""

from __future__ import annotations

import selectors
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from contracts.errors import ConfigError, ModelLoadError
from engine.build import ModelRuntimeConfig, load
from engine.models.loader import load_model

MODEL = Path("tests/fixtures/tiny-austen")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "tpu"}, "device: got 'tpu', known: auto, cpu, cuda"),
        ({"tp_size": 2}, "tp_size: got 2, only 1 is supported"),
        ({"block_size": 0}, "block_size: got 0"),
        ({"memory_utilisation": 0.0}, "memory_utilisation: got 0.0"),
        ({"memory_utilisation": 1.5}, "memory_utilisation: got 1.5"),
        ({"gpu_memory_utilisation": 0.0}, "gpu_memory_utilisation: got 0.0"),
        ({"max_model_len": 1}, "max_model_len: got 1"),
        ({"threads": 0}, "threads: got 0"),
        ({"max_num_seqs": 0}, "max_num_seqs: got 0"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_where_it_is_said(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelRuntimeConfig(MODEL, **changes)  # type: ignore[arg-type]
    assert message in caught.value.message


def test_a_context_beyond_the_models_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len: got 4096, the model's context is 1024"):
        load(ModelRuntimeConfig(MODEL, max_model_len=4096, threads=1))


def test_unknown_dtype_and_directory() -> None:
    with pytest.raises(ConfigError, match="dtype: got 'int8'"):
        load(ModelRuntimeConfig(MODEL, dtype="int8", threads=1))
    with pytest.raises(ModelLoadError, match="no such model directory"):
        load(ModelRuntimeConfig(MODEL / "nowhere", threads=1))


def test_layout_is_the_models() -> None:
    layout = load(ModelRuntimeConfig(MODEL, dtype="bfloat16", block_size=8, hash_seed=3, threads=1)).layout
    assert (layout.dtype, layout.num_layers, layout.num_kv_heads, layout.head_size) == ("bfloat16", 4, 2, 32)
    assert (layout.block_size, layout.hash_seed, layout.tp_size) == (8, 3, 1)
    assert layout.model == load_model(MODEL, "float32").fingerprint


def test_pool_by_bytes() -> None:
    loaded = load(ModelRuntimeConfig(MODEL, threads=1))
    size = loaded.layout.block_bytes
    assert loaded.num_blocks_for(10 * size + size - 1) == 10
    with pytest.raises(ConfigError, match="fewer than 2 blocks"):
        loaded.num_blocks_for(size)
    with pytest.raises(ConfigError, match=f"kv memory: {2**50} bytes asked for, [0-9]+ are free"):
        loaded.num_blocks_for(2**50)


def test_pool_by_measurement_is_no_larger_than_a_full_house_needs() -> None:
    loaded = load(ModelRuntimeConfig(MODEL, threads=1, max_num_seqs=3, max_model_len=100, memory_utilisation=0.2))
    assert loaded.num_blocks_for(None) == 3 * 7


def test_a_pool_smaller_than_the_context_cuts_it_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    loaded = load(ModelRuntimeConfig(MODEL, threads=1))
    size = 5 * loaded.layout.block_bytes
    with caplog.at_level("WARNING"):
        runner = loaded.runner(memoryview(bytearray(size)), 5)
    assert runner.max_model_len == 80
    assert "context cut from 1024 to 80 tokens" in caplog.text


def test_importing_build_loads_no_torch() -> None:
    code = "import sys, engine, engine.build; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_weights_that_give_no_tokens_are_refused_when_they_are_loaded(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(MODEL / name, tmp_path)
    tensors = load_file(MODEL / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    model = load(ModelRuntimeConfig(tmp_path, threads=1))
    with pytest.raises(ModelLoadError, match="not finite"):
        model.runner(memoryview(bytearray(4 * model.layout.block_bytes)), 4)


def test_workers_that_start_together_take_memory_in_turn() -> None:
    """Two processes must not both count the same free memory as theirs."""
    code = (
        "from engine.execution.memory import memory_turn\n"
        "with memory_turn():\n"
        "    print('in', flush=True)\n"
        "    input()\n"
        "print('out', flush=True)\n"
    )

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with start() as first:
        assert first.stdin is not None
        assert first.stdout is not None
        assert first.stdout.readline() == "in\n"
        with start() as second:
            assert second.stdout is not None
            selector = selectors.DefaultSelector()
            selector.register(second.stdout, selectors.EVENT_READ)
            assert not selector.select(0.3)
            first.kill()  # a dead worker keeps nobody waiting
            assert second.stdout.readline() == "in\n"
            second.communicate("\n")
