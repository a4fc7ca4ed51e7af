"""The doctor names every GPU, or says that there is none, and what its kernels lack."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from cli.doctor.finding import Level
from cli.doctor.kernels import check_kernels


def gpu_lines() -> list[tuple[Level, str, str]]:
    found = [(f.level, f.subject.strip(), f.fact) for f in check_kernels()]
    at = next(i for i, (_, subject, _) in enumerate(found) if subject.startswith("GPU"))
    return found[at:]


def test_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_lines() == [(Level.OK, "GPU", "none that torch sees; models run on the CPU")]


@pytest.mark.parametrize("has_triton", [True, False])
def test_each_is_named(monkeypatch: pytest.MonkeyPatch, has_triton: bool) -> None:
    if has_triton:
        pytest.importorskip("triton", reason="triton is not installed (the extra gpu)")
    else:
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else find(name))
    h200 = SimpleNamespace(name="NVIDIA H200", total_memory=139 << 30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: h200)
    *gpus, (level, subject, fact) = gpu_lines()
    assert gpus == [(Level.OK, f"GPU {i}", "NVIDIA H200, 139 GiB, sm_90") for i in (0, 1)]
    assert subject == "kernels"
    if has_triton:
        assert (level, "linear: cuBLAS" in fact) == (Level.OK, True)
    else:
        assert (level, "need triton" in fact) == (Level.WARNING, True)
