"""Building the library: once however many want it, anew when anything changes, in words when it cannot be done."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from contracts.errors import ConfigError
from kernels.cpu import build, library
from kernels.cpu.build import BuildError, built_library
from kernels.cpu.config import asked_for, compiler

ROOT = Path(__file__).parents[3]
TINY_SOURCE = 'extern "C" __attribute__((visibility("default"))) void dt_nothing() {}\n'
needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library of one small source, and a cache of its own."""
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "nothing.cpp").write_text(TINY_SOURCE)
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setattr(build, "SHIPPED", tmp_path / "built")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget()
    yield folder
    forget()


def forget() -> None:
    build._sources_digest.cache_clear()


@needs_compiler
def test_built_once_for_all_who_want_it_at_once(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linked = []
    run = build._run
    monkeypatch.setattr(
        build, "_run", lambda command: (linked.append(command) if "-shared" in command else 0, run(command))
    )
    with ThreadPoolExecutor(6) as pool:
        paths = list(pool.map(built_library, ["scalar"] * 6))
    assert len(set(paths)) == 1
    assert paths[0].exists()
    assert len(linked) == 1
    assert not list(paths[0].parent.glob(".building-*"))


@needs_compiler
def test_another_source_is_another_library(sources: Path) -> None:
    first = built_library("scalar")
    (sources / "nothing.cpp").write_text(TINY_SOURCE + "// changed\n")
    forget()
    second = built_library("scalar")
    assert first != second
    assert first.exists()


@needs_compiler
def test_what_changed_since_it_was_counted_is_not_built_under_its_name(sources: Path) -> None:
    build._sources_digest("scalar")
    (sources / "nothing.cpp").write_text(TINY_SOURCE + "// changed\n")
    with pytest.raises(BuildError, match="changed while this process ran"):
        built_library("scalar")
    assert not list((sources.parent / "cache").rglob("*.so"))


@needs_compiler
def test_what_the_compiler_complained_about_is_said_and_nothing_is_left(sources: Path) -> None:
    (sources / "nothing.cpp").write_text("this is not C++\n")
    forget()
    with pytest.raises(BuildError, match=r"nothing\.cpp[\s\S]*exit status 1"):
        built_library("scalar")
    assert not list(build.built_dir().glob("*.so"))


def test_without_a_compiler_the_error_says_so(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(sources))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        built_library("scalar")


@needs_compiler
def test_a_shipped_library_needs_no_compiler(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = build.ship("scalar")
    monkeypatch.setenv("PATH", str(sources))
    monkeypatch.delenv("CXX", raising=False)
    assert built_library("scalar") == shipped


def test_a_cache_that_cannot_be_written_is_said(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if compiler() is None:
        pytest.skip("no C++ compiler")
    (sources.parent / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(sources.parent / "file"))
    with pytest.raises(BuildError, match="kernels"):
        built_library("scalar")


def test_a_cpu_is_known_by_its_flags(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    avx2 = "flags\t\t: fpu sse2 avx avx2 fma f16c bmi1 bmi2"
    for line, best in (
        (avx2, "avx2"),
        (f"{avx2} avx512f avx512bw avx512dq avx512vl avx512cd", "avx512"),
        (f"{avx2} avx512f avx512bw avx512dq avx512vl avx512cd avx512_bf16 avx512_vnni", "avx512bf16"),
        ("flags\t\t: fpu sse2", "scalar"),
    ):
        info.write_text(f"processor\t: 0\n{line}\n")
        assert library.supported_isas(info)[0] == best
    # Not an x86: torch is better there than plain C++ would be.
    info.write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    assert library.supported_isas(info) == ()
    assert library.supported_isas(tmp_path / "none") == ()


def test_an_unknown_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_KERNELS", "avx1024")
    with pytest.raises(ConfigError, match=r"DIPTYCH_KERNELS: got 'avx1024', known: avx512bf16, .*torch"):
        asked_for()


def test_the_command_says_what_this_machine_would_use() -> None:
    done = subprocess.run(
        (sys.executable, "-m", "kernels.cpu", "show"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "CPU" in done.stdout
