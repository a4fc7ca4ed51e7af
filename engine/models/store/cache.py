"""Directories that are made once: under a lock, beside their place, then renamed into it.

    <root>/<key>/.lock        held while the directory is made; the kernel drops it when the process dies
    <root>/<key>/.partial/    being made; left-overs of a killed process are removed by the next
    <root>/<key>/<name>/      whole, as its presence says

Does not know what it keeps.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from contracts.errors import ModelLoadError
from engine.models.store.directory import check_model_dir

_CHUNK_BYTES = 4 * 2**20


def made_once(place: Path, make: Callable[[Path], None], progress: Callable[[str], None]) -> Path:
    """Return `place`, a model directory, having called `make(empty directory)` unless another call or process did before.

    A directory that is there but damaged is made again, and `progress` says so. Whatever `make` raises comes out, and
    leaves nothing behind.
    """
    try:
        if _whole(place, progress):  # without the lock, so that a read-only cache can be served from
            return place
        place.parent.mkdir(parents=True, exist_ok=True)
        with _locked(place, progress):
            if not _whole(place, progress):
                _make(place, make)
    except OSError as error:
        raise ModelLoadError(f"{place}: the model cannot be kept there: {error}") from error
    return place


def file_digest(path: Path, progress: Callable[[str], None]) -> str:
    """SHA-256 of a file in hex; progress every GiB."""
    digest = hashlib.sha256()
    done = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            if done % 2**30 == 0:
                progress(f"{path.name}: hashed {done // 2**30} GiB")
    return digest.hexdigest()


def _locked(place: Path, progress: Callable[[str], None]) -> FileLock:
    """The lock of `place`, held; used as a context it is let go at the end."""
    lock = FileLock(place.parent / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress(f"{place.name}: waiting for another process that is making it")
        lock.acquire()
    return lock


def _whole(place: Path, progress: Callable[[str], None]) -> bool:
    if not place.exists():
        return False
    try:
        check_model_dir(place)
    except ModelLoadError as error:
        progress(f"the cached copy is damaged: {error.message}")
        return False
    return True


def _make(place: Path, make: Callable[[Path], None]) -> None:
    partial = place.parent / ".partial"
    for leftover in (partial, place):
        if leftover.exists():
            shutil.rmtree(leftover)
    partial.mkdir()
    try:
        make(partial)
        check_model_dir(partial)
        partial.rename(place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
