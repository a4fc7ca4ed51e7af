"""How an `LLM` is loaded and run, as a caller says it by name. Does not know models."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypedDict

from engine.build import ModelRuntimeConfig
from offline.checks import flag, integer


class LLMOptions(TypedDict, total=False):
    """The keyword arguments of `LLM`; LLMConfig says what they mean."""

    dtype: str
    quantization: str
    device: str
    max_model_len: int | None
    kv_memory_bytes: int | None
    threads: int | None
    max_num_seqs: int
    max_num_batched_tokens: int | None
    prefix_caching: bool
    cache_dir: str | Path | None
    tokenizer: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMConfig:
    """One LLM. None leaves `max_model_len` to the model, `kv_memory_bytes` to half of what is free, `threads` to the cores.

    `max_num_seqs` prompts are answered at a time, the others wait; a step computes at most `max_num_batched_tokens` tokens.
    Without `tokenizer` prompts are token ids and answers have no text. Models that are fetched are kept in `cache_dir`.
    """

    dtype: str = "auto"
    quantization: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    kv_memory_bytes: int | None = None
    threads: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    prefix_caching: bool = True
    cache_dir: str | Path | None = None
    tokenizer: bool = True

    def __post_init__(self) -> None:
        for name in ("dtype", "quantization", "device"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name}: got {getattr(self, name)!r}, must be a text")
        for name, low in (("max_model_len", 2), ("kv_memory_bytes", 1), ("threads", 1), ("max_num_batched_tokens", 1)):
            if getattr(self, name) is not None:
                integer(name, getattr(self, name), low)
        integer("max_num_seqs", self.max_num_seqs, 1)
        for name in ("prefix_caching", "tokenizer"):
            flag(name, getattr(self, name))
        if self.cache_dir is not None and not isinstance(self.cache_dir, str | Path):
            raise TypeError(f"cache_dir: got {self.cache_dir!r}, must be a path")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens: got {self.max_num_batched_tokens}, must be at least max_num_seqs {self.max_num_seqs}"
            )

    def runtime(self, model_dir: Path) -> ModelRuntimeConfig:
        """For the model in `model_dir`."""
        base = ModelRuntimeConfig(model_dir)
        return ModelRuntimeConfig(
            model_dir,
            dtype=self.dtype,
            quantization=self.quantization,
            device=self.device,
            max_model_len=self.max_model_len,
            threads=self.threads,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens or max(base.max_num_batched_tokens, self.max_num_seqs),
        )


def checked(options: LLMOptions) -> LLMConfig:
    """Raises TypeError for a name that is none, TypeError or ValueError for a value."""
    known = [field.name for field in fields(LLMConfig)]
    for name in options:
        if name not in known:
            raise TypeError(f"LLM: got an unexpected option {name!r}; there are {', '.join(known)}")
    return LLMConfig(**options)
