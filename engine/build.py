"""From a model directory to a runner: device and dtype checks, weights, KV pool sized by measurement, warm-up.

    load(config) ─▶ LoadedModel ── num_blocks_for(bytes | None) ─▶ the door makes a buffer ── runner(buffer, n) ─▶ TorchRunner
                    .layout  .max_model_len

Importing this module loads no torch; `load` does, in the process that needs it. Does not know who allocates KV memory.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from contracts.errors import ConfigError
from contracts.kv_layout import KVLayout
from engine.execution.config import prefer_huge_pages
from engine.pace import Pace
from engine.placement.topology import read_topology

if TYPE_CHECKING:
    from torch import Tensor

    from engine.execution.torch_runner import TorchRunner
    from engine.models.decoder import Decoder

_log = logging.getLogger(__name__)
DEVICES = ("auto", "cpu", "cuda")
_PROFILED_TOKENS = 256  # a step of seconds on small machines, not of half a minute


@dataclass(frozen=True, slots=True)
class ModelRuntimeConfig:
    """What to load and how to run it. `max_model_len` None: the model's own context; `threads` None: one a core.

    `quantization` says how matrices are held: see `engine.models.quantization`.
    `device` is one of DEVICES; "auto" takes a GPU where there is one. `gpu_memory_utilisation` is `memory_utilisation` there.

    `memory_utilisation` is the share of the memory that is free after loading which weights' scratch and KV may take.
    `max_num_batched_tokens` and `max_num_seqs` are the largest step that the scheduler will ask for.
    """

    model_dir: Path
    dtype: str = "auto"
    quantization: str = "auto"
    device: str = "cpu"
    tp_size: int = 1
    block_size: int = 16
    hash_seed: int = 0
    max_model_len: int | None = None
    threads: int | None = None
    memory_utilisation: float = 0.5
    gpu_memory_utilisation: float = 0.9
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise ConfigError(f"device: got {self.device!r}, known: {', '.join(DEVICES)}")
        if self.tp_size != 1:
            raise ConfigError(f"tp_size: got {self.tp_size}, only 1 is supported")
        for name in ("memory_utilisation", "gpu_memory_utilisation"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name}: got {getattr(self, name)}, must be above 0 and at most 1")
        for name in ("block_size", "max_num_batched_tokens", "max_num_seqs"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name}: got {value}, must be at least 1")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"max_model_len: got {self.max_model_len}, must be at least 2")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"threads: got {self.threads}, must be at least 1")


def load(config: ModelRuntimeConfig) -> LoadedModel:
    """Load the weights. Raises ModelLoadError or ConfigError, each naming what is wrong."""
    prefer_huge_pages()
    import torch

    from engine.execution.device import resolve_device
    from engine.models.loader import load_model

    device = resolve_device(config.device)

    torch.set_num_threads(config.threads or read_topology().num_threads)
    begun = time.monotonic()
    model = load_model(config.model_dir, config.dtype, device=device, quantization=config.quantization)
    context = model.config.context_len
    if config.max_model_len is not None and config.max_model_len > context:
        raise ConfigError(f"max_model_len: got {config.max_model_len}, the model's context is {context}")
    _log.info(
        "loaded %s (%s, %s, %d layers) in %.1f s for %s on %d threads",
        config.model_dir,
        model.config.family,
        str(model.dtype).removeprefix("torch."),
        model.config.num_layers,
        time.monotonic() - begun,
        device,
        torch.get_num_threads(),
    )
    return LoadedModel(config, model)


class LoadedModel:
    """Weights in memory, not yet bound to KV memory. `pace` knows what the steps of warm-up took."""

    def __init__(self, config: ModelRuntimeConfig, model: Decoder) -> None:
        self.pace = Pace()
        self._config = config
        self._model = model
        self._max_model_len = config.max_model_len or model.config.context_len
        self._layout = KVLayout(
            model=model.fingerprint,
            dtype=str(model.dtype).removeprefix("torch."),
            num_layers=model.config.num_layers,
            num_kv_heads=model.config.num_kv_heads,
            head_size=model.config.head_size,
            block_size=config.block_size,
            tp_size=config.tp_size,
            hash_seed=config.hash_seed,
        )

    @property
    def device(self) -> str:
        """Where it computes: "cpu" or "cuda"."""
        return self._model.kernels.device

    @property
    def layout(self) -> KVLayout:
        """What this model's KV memory looks like."""
        return self._layout

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._model.config.vocab_size

    @property
    def max_model_len(self) -> int:
        """Context in tokens, before the pool's size cuts it."""
        return self._max_model_len

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer unless it ignores them."""
        return frozenset(self._model.config.eos_token_ids)

    def num_blocks_for(self, kv_memory_bytes: int | None) -> int:
        """KV blocks that fit `kv_memory_bytes`; None: what measurement leaves, at most what a full house can use.

        Measured: (memory free now × utilisation − the largest step's scratch) after a profiling forward. Raises
        ConfigError when not even two blocks fit, and when more is asked for than is free.
        """
        from engine.execution.device import free_bytes

        device, block_bytes = self.device, self._layout.block_bytes
        if kv_memory_bytes is not None:
            if kv_memory_bytes > (free := free_bytes(device)):
                raise ConfigError(f"kv memory: {kv_memory_bytes} bytes asked for, {free} are free")
            num_blocks = kv_memory_bytes // block_bytes
            source = f"{kv_memory_bytes} bytes asked for"
        else:
            scratch = self._profile_bytes()
            free = free_bytes(device)
            share = self._config.memory_utilisation if device == "cpu" else self._config.gpu_memory_utilisation
            useful = self._config.max_num_seqs * self._layout.num_blocks_for(self._max_model_len)
            num_blocks = min(int(free * share - scratch) // block_bytes, useful)
            source = f"{free >> 20} MiB free × {share:g} − {scratch >> 20} MiB for a step"
        if num_blocks < 2:
            raise ConfigError(f"kv memory: {source}: fewer than 2 blocks of {block_bytes} bytes")
        _log.info(
            "kv pool: %d blocks of %d tokens, %d MiB (%s)",
            num_blocks,
            self._layout.block_size,
            num_blocks * block_bytes >> 20,
            source,
        )
        return num_blocks

    def device_memory(self, num_blocks: int) -> Tensor:
        """KV memory on the model's device for `num_blocks` blocks: uint8, for `runner`."""
        from engine.execution.device import device_bytes

        return device_bytes(self.device, num_blocks * self._layout.block_bytes)

    def runner(self, buffer: memoryview | Tensor, num_blocks: int) -> TorchRunner:
        """A warm runner on `buffer`, exactly `num_blocks` blocks of `layout`, where the model is.

        Warm-up writes into the buffer's blocks.
        """
        from engine.execution.torch_runner import TorchRunner
        from engine.execution.warm_up import warm_up

        capacity = num_blocks * self._layout.block_size
        if capacity < self._max_model_len:
            _log.warning("context cut from %d to %d tokens: the KV pool holds no more", self._max_model_len, capacity)
        runner = TorchRunner(self._model, self._layout, buffer, num_blocks, min(self._max_model_len, capacity))
        if self.device != "cpu":
            # On a CPU angles are computed as positions come, for contexts that nobody may ever fill.
            self._model.reserve(self._max_model_len)
        warm_up(runner, self._config.max_num_seqs, self.pace)
        runner.record(self._config.max_num_seqs)
        return runner

    def _profile_bytes(self) -> int:
        """Memory that the largest step needs beyond weights and KV, from a smaller one measured on KV memory of its own.

        A step's scratch is at most proportional to its tokens, so scaling a short step up errs on the safe side.
        """
        from engine.execution.device import needed_bytes
        from engine.execution.torch_runner import TorchRunner
        from engine.execution.warm_up import prompt_batch

        largest = min(self._config.max_num_batched_tokens, self._max_model_len - 1)
        num_tokens = min(largest, _PROFILED_TOKENS)
        num_blocks = self._layout.num_blocks_for(num_tokens)
        buffer = self.device_memory(num_blocks)
        runner = TorchRunner(self._model, self._layout, buffer, num_blocks, self._max_model_len)
        _, peak = needed_bytes(self.device, lambda: runner.execute(prompt_batch(num_tokens, self._layout.block_size)))
        logits = min(self._config.max_num_seqs, largest) * self.vocab_size * 4
        return peak * -(-largest // num_tokens) + logits
