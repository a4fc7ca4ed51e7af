"""The tensors of a Hugging Face model directory, by name: one safetensors file, or shards with an index.

Files are mapped, not read: a tensor's bytes are touched when it is copied, so that loading never holds the weights twice.
What is wrong with a file is said with the file's and the tensor's name. Does not know architectures.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from contracts.errors import ModelLoadError
from engine.models.config import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_HEADER_LIMIT = 100_000_000  # bytes; the format's own limit
_SAMPLES = 16  # places in each tensor that the fingerprint reads
_SAMPLE_BYTES = 64


class _SafeFile(Protocol):
    """The part of safetensors' untyped handle that is used here."""

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> Tensor: ...


class Checkpoint:
    """Open files of one directory; a context manager, which closes them. Tensors taken must be copied before that."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files = _tensor_files(directory)
        self._open: dict[Path, _SafeFile] = {}
        for path in sorted(set(self._files.values())):
            self._open[path] = _open(path)
        for name, path in self._files.items():
            if name not in self._open[path].keys():  # noqa: SIM118 -- not a dict
                raise ModelLoadError(f"{path}: tensor {name} is missing, which {INDEX} promises")

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.clear()

    @property
    def names(self) -> frozenset[str]:
        """All tensors."""
        return frozenset(self._files)

    def file_of(self, name: str) -> Path:
        """The file that holds tensor `name`."""
        return self._files[name]

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A mapped tensor of exactly `shape`, floating point; ModelLoadError otherwise."""
        found = self._found(name, shape)
        if not found.is_floating_point() or found.element_size() < 2:
            raise ModelLoadError(f"{self._files[name]}: tensor {name}: dtype {found.dtype} is not supported")
        return found

    def _found(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._files:
            raise ModelLoadError(
                f"{_where(self._directory, self._files.values())}: tensor {name} {list(shape)} is missing"
            )
        path = self._files[name]
        try:
            found = self._open[path].get_tensor(name)
        except SafetensorError as error:
            raise ModelLoadError(f"{path}: tensor {name}: {error}") from error
        if tuple(found.shape) != shape:
            raise ModelLoadError(f"{path}: tensor {name}: shape {list(found.shape)}, expected {list(shape)}")
        return found

    def blocks(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A mapped tensor of bytes of exactly `shape`; ModelLoadError otherwise."""
        found = self._found(name, shape)
        if found.dtype != torch.uint8:
            raise ModelLoadError(f"{self._files[name]}: tensor {name}: dtype {found.dtype}, expected bytes")
        return found

    def fingerprint(self, seed: str) -> str:
        """A short hash of `seed` and every tensor's name, dtype, shape and a sample of its bytes; not of paths or shards."""
        digest = hashlib.blake2b(seed.encode(), digest_size=16)
        for name in sorted(self._files):
            tensor = self._open[self._files[name]].get_tensor(name)
            digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(_sample(tensor))
        return digest.hexdigest()


def _sample(tensor: Tensor) -> bytes:
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    if flat.numel() <= _SAMPLES * _SAMPLE_BYTES:
        return flat.numpy().tobytes()
    step = (flat.numel() - _SAMPLE_BYTES) // (_SAMPLES - 1)
    return b"".join(flat[i * step : i * step + _SAMPLE_BYTES].numpy().tobytes() for i in range(_SAMPLES))


def _tensor_files(directory: Path) -> dict[str, Path]:
    """Which file holds which tensor."""
    single, index = directory / SINGLE, directory / INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise ModelLoadError(f"{index}: weight_map: must map tensor names to file names")
        for shard in sorted(set(weight_map.values())):
            if Path(shard).name != shard:
                raise ModelLoadError(f"{index}: shard {shard!r} is not a plain file name")
            if not (directory / shard).is_file():
                first = min(name for name, file in weight_map.items() if file == shard)
                raise ModelLoadError(f"{directory / shard}: no such file; {INDEX} says it holds {first} and more")
        return {name: directory / shard for name, shard in weight_map.items()}
    if single.is_file():
        return dict.fromkeys(_open(single).keys(), single)
    raise ModelLoadError(f"{directory}: neither {SINGLE} nor {INDEX} is there")


def _open(path: Path) -> _SafeFile:
    _check_complete(path)
    try:
        return cast(_SafeFile, safe_open(str(path), framework="pt", device="cpu"))
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path}: not a readable safetensors file: {error}") from error


def _check_complete(path: Path) -> None:
    """Say which tensor a truncated file lacks: the library only says that the file is not fully covered."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER_LIMIT):
            raise ModelLoadError(f"{path}: truncated or no safetensors file: {size} bytes, header of {length}")
        try:
            header = json.loads(file.read(length))
            ends = {name: int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"}
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise ModelLoadError(f"{path}: no safetensors header: {error}") from error
    present = size - 8 - length
    cut = sorted((end, name) for name, end in ends.items() if end > present)
    if cut:
        raise ModelLoadError(f"{path}: truncated: tensor {cut[0][1]} ends at byte {cut[0][0]} of {present} present")


def _where(directory: Path, paths: Iterable[Path]) -> Path:
    """The only file that could have it, or else the directory."""
    found = set(paths)
    return found.pop() if len(found) == 1 else directory
