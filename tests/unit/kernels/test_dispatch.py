"""Which kernels are chosen: the best there are, others by name, torch's where there is no compiler, and never in silence."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from contracts.errors import ConfigError
from kernels.cpu import library
from kernels.cpu.config import compiler
from kernels.cpu.library import supported_isas
from kernels.dispatch import OPS, REFERENCE, TORCH, candidates, choose

ROOT = Path(__file__).parents[3]
TINY = ROOT / "tests" / "fixtures" / "tiny-austen"
DTYPES = (torch.float32, torch.bfloat16)
native_here = pytest.mark.skipif(not (compiler() and supported_isas()), reason="no compiler, or not an x86 on Linux")


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine that has none, and has never had one."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("DIPTYCH_KERNELS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "load", library.load.__wrapped__)
    monkeypatch.setattr("kernels.dispatch.load", library.load)
    choose.cache_clear()
    yield
    choose.cache_clear()


@native_here
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_best_instruction_set_is_chosen(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DIPTYCH_KERNELS", raising=False)
    best = supported_isas()[0]
    assert candidates("cpu", dtype).name == (best if best != "scalar" else "torch")


@native_here
def test_another_is_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*supported_isas(), "torch"):
        monkeypatch.setenv("DIPTYCH_KERNELS", name)
        found = candidates("cpu", torch.float32)
        assert found.name == name
        assert not found.notes


def test_every_op_has_its_label() -> None:
    for found in (REFERENCE, TORCH, candidates("cpu", torch.float32)):
        assert tuple(found.labels) == OPS


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_torch_computes_and_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="kernels"):
        for _ in range(2):
            assert choose("cpu", torch.float32).name == "torch"
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "torch computes (slower)" in warnings[0]
    assert len(caplog.records) == 2


@native_here
@pytest.mark.usefixtures("no_compiler")
def test_what_was_asked_for_by_name_and_cannot_be_had_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_KERNELS", supported_isas()[-1])
    with pytest.raises(ConfigError, match="no C\\+\\+ compiler"):
        candidates("cpu", torch.float32)


def test_an_instruction_set_that_this_cpu_lacks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "supported_isas", lambda: ())
    monkeypatch.setattr("kernels.dispatch.load", library.load.__wrapped__)
    monkeypatch.setenv("DIPTYCH_KERNELS", "avx512")
    with pytest.raises(ConfigError, match="does not run the avx512 kernels"):
        candidates("cpu", torch.float32)


@pytest.mark.usefixtures("no_compiler")
def test_a_model_is_served_without_a_compiler() -> None:
    """In a process of its own, whose environment is what the fixture made it."""
    script = f"""
import logging, pathlib
logging.basicConfig(level=logging.WARNING)
from engine.build import ModelRuntimeConfig, load
model = load(ModelRuntimeConfig(pathlib.Path({str(TINY)!r}), threads=1))
runner = model.runner(memoryview(bytearray(32 * model.layout.block_bytes)), 32)
print("served", runner.vocab_size)
"""
    done = subprocess.run((sys.executable, "-c", script), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "served" in done.stdout
    assert "torch computes (slower)" in done.stderr
