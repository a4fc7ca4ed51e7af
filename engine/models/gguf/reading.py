"""A GGUF file opened for reading, with typed look-ups that name file and key when something is missing or of another kind.

Wraps gguf.GGUFReader, whose complaints about broken files (ValueError, IndexError, …) become ModelLoadError here.
Does not know what the keys mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import gguf
import numpy as np
import numpy.typing as npt

from contracts.errors import ModelLoadError

_T = TypeVar("_T")
_BROKEN_FILE = (ValueError, IndexError, KeyError, OverflowError, TypeError, OSError)


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One stored tensor. `shape` is row-major (outermost first), as in safetensors; `blocks` are its raw quantised bytes."""

    name: str
    shape: tuple[int, ...]
    quant: gguf.GGMLQuantizationType
    blocks: npt.NDArray[np.generic]


class GGUFFile:
    """The metadata and tensors of one file; the tensors' bytes stay on disk (mmap) until they are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
        except _BROKEN_FILE as error:
            raise ModelLoadError(f"{path}: not a complete GGUF file that this version can read: {error}") from error
        self.tensors = {
            t.name: GGUFTensor(t.name, tuple(int(n) for n in reversed(t.shape)), t.tensor_type, t.data)
            for t in self._reader.tensors
        }

    def has(self, key: str) -> bool:
        """Whether the metadata has `key`."""
        return self._reader.get_field(key) is not None

    def text(self, key: str, default: str | None = None) -> str:
        """A string; without a default a missing key raises ModelLoadError."""
        return self._value(key, str, default)

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer; without a default a missing key raises ModelLoadError."""
        return self._value(key, int, default)

    def number(self, key: str, default: float | None = None) -> float:
        """A number, read as the shortest decimal that its float32 stands for: 1e-05, not 9.999999747378752e-06."""
        field = self._reader.get_field(key)
        if field is not None and field.types[0] is gguf.GGUFValueType.FLOAT32:
            value = float(str(np.float32(self._value(key, float, None))))
        else:
            value = float(self._value(key, (float, int), default))
        if not math.isfinite(value):
            raise ModelLoadError(f"{self.path}: {key} is {value}, must be a finite number")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        """A boolean; without a default a missing key raises ModelLoadError."""
        return self._value(key, bool, default)

    def texts(self, key: str) -> list[str]:
        """A list of strings."""
        return self._list(key, str)

    def integers(self, key: str) -> list[int]:
        """A list of integers."""
        return self._list(key, int)

    def numbers(self, key: str) -> list[float]:
        """A list of floats."""
        return self._list(key, float)

    def _list(self, key: str, kind: type[_T]) -> list[_T]:
        values = self._value(key, list, None)
        if not all(isinstance(value, kind) for value in values):
            raise ModelLoadError(f"{self.path}: {key} must be a list of {kind.__name__}")
        return values

    def _value(self, key: str, kind: type[_T] | tuple[type[_T], ...], default: _T | None) -> _T:
        field = self._reader.get_field(key)
        if field is None:
            if default is None:
                raise ModelLoadError(f"{self.path}: the metadata has no {key}")
            return default
        try:
            value = field.contents()
        except _BROKEN_FILE as error:
            raise ModelLoadError(f"{self.path}: {key} cannot be read: {error}") from error
        if not isinstance(value, kind):
            raise ModelLoadError(f"{self.path}: {key} has a value of type {type(value).__name__}: {str(value)[:80]!r}")
        return value
