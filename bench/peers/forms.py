"""The checkpoint in the form that each engine reads, made once and kept in the cache. Knows which tool makes which form."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from bench.peers.to_gguf import write_bf16
from bench.progress import Say
from contracts.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


class Forms:
    """Forms of the checkpoint in `folder`, under `cache`; `python` is the peers' own, `tokenizer` a folder with any tokenizer."""

    def __init__(self, folder: Path, cache: Path, python: Path, tokenizer: Path) -> None:
        self._folder, self._python, self._tokenizer = folder, python, tokenizer
        self._cache = cache / "bench-peers" / folder.name

    def gguf(self, precision: str, say: Say) -> Path:
        """One file for llama.cpp."""
        target = self._cache / f"{precision}.gguf"
        if not target.exists():
            say(f"peers: making {self._folder.name} for llama.cpp, {precision}")
            half = target.with_suffix(".partial")
            half.parent.mkdir(parents=True, exist_ok=True)
            if precision == "bf16":
                write_bf16(self._folder, half)
            else:
                self._run("bench.peers.to_gguf", self.gguf("bf16", say), precision, half)
            half.rename(target)
        return target

    def openvino(self, precision: str, say: Say) -> Path:
        """A folder for OpenVINO GenAI."""
        target = self._cache / f"openvino-{precision}"
        if not target.exists():
            say(f"peers: making {self._folder.name} for OpenVINO, {precision}")
            half = self._cache / f"openvino-{precision}.partial"
            shutil.rmtree(half, ignore_errors=True)
            half.mkdir(parents=True)
            self._run("bench.peers.to_openvino", self._folder, precision, self._tokenizer, half)
            half.rename(target)
        return target

    def _run(self, module: str, *words: object) -> None:
        command = [str(self._python), "-m", module, *map(str, words)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ConfigError(f"peers: {module} failed: {' '.join(done.stderr.split())[-600:]}")
