"""Where a model runs: a GPU that is asked for and missing is said at once, and "auto" takes what there is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from contracts.errors import ConfigError
from engine.build import ModelRuntimeConfig, load
from engine.execution.device import device_bytes, finish, free_bytes, needed_bytes, resolve_device

MODEL = Path("tests/fixtures/tiny-austen")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("built_for", "why"), [("13.0", "torch sees none"), (None, "is built without CUDA")], ids=["with CUDA", "without"]
)
def test_a_gpu_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch, built_for: str | None, why: str) -> None:
    monkeypatch.setattr(torch.version, "cuda", built_for)
    with pytest.raises(ConfigError, match=f"got 'cuda', but there is no GPU to use: .*{why}"):
        load(ModelRuntimeConfig(MODEL, device="cuda"))


@pytest.mark.usefixtures("no_gpu")
def test_auto_is_the_cpu_then() -> None:
    assert resolve_device("auto") == resolve_device("cpu") == "cpu"
    assert load(ModelRuntimeConfig(MODEL, device="auto", threads=1)).device == "cpu"


def test_auto_is_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == resolve_device("cuda") == "cuda"
    assert resolve_device("cpu") == "cpu"


def test_memory_of_the_cpu() -> None:
    assert free_bytes("cpu") > 0
    result, needed = needed_bytes("cpu", lambda: 7)
    assert result == 7
    assert needed >= 0
    assert device_bytes("cpu", 12).tolist() == [0] * 12
    finish("cpu")
