"""Is a directory a model that can be loaded? Looked at without reading weights: names, JSON, safetensors headers, sizes.

Does not know architectures; `engine.models` refuses those
"""

from __future__ import annotations

import json
from pathlib import Path

from contracts.errors import ModelLoadError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


def check_model_dir(path: Path) -> None:
    """Raise ModelLoadError naming the first file that is missing, unreadable or truncated."""
    _read_object(path / CONFIG_FILE)
    index = path / INDEX_FILE
    if index.exists():
        weight_map = _read_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelLoadError(f"{index}: has no weight_map")
        shards = sorted({str(name) for name in weight_map.values()})
        for number, name in enumerate(shards, start=1):
            if not (path / name).is_file():
                raise ModelLoadError(f"{path / name}: missing; it is shard {number} of {len(shards)} in {INDEX_FILE}")
    else:
        shards = [WEIGHTS_FILE]
        if not (path / WEIGHTS_FILE).is_file():
            raise ModelLoadError(f"{path}: has neither {WEIGHTS_FILE} nor {INDEX_FILE}")
    for name in shards:
        _check_safetensors(path / name)


def model_name(path: Path) -> str:
    """The name a model directory is served under: org/name for a hub snapshot, else the directory's own name."""
    resolved = path.resolve()
    repository = resolved.parent.parent.name
    if resolved.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/", 1)
    return resolved.name


def _read_object(path: Path) -> dict[str, object]:
    if not path.is_file():
        raise ModelLoadError(f"{path}: missing")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ModelLoadError(f"{path}: not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path}: must hold a JSON object, holds a {type(content).__name__}")
    return content


def _check_safetensors(path: Path) -> None:
    """Compare the file's size with the end of its last tensor."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if size < 8 or header_bytes > min(size - 8, _MAX_HEADER_BYTES):
            raise ModelLoadError(f"{path}: truncated or not safetensors: the header does not fit its {size} bytes")
        raw = file.read(header_bytes)
    try:
        header = json.loads(raw)
        ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ModelLoadError(f"{path}: not a safetensors file: its header is no table of tensors") from error
    expected = 8 + header_bytes + max(ends, default=0)
    if size != expected:
        word = "truncated" if size < expected else "too long"
        raise ModelLoadError(f"{path}: {word}: {size} bytes, its tensors need {expected}")
