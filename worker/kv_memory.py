"""A worker's KV memory: on the host, where connectors move it as it is, or on a GPU, with a staging area beside it.

    host   SharedRegion ── the runner's buffer, and what connectors expose
    GPU    uint8 tensor ── the runner's buffer; SharedRegion ── the staging area, pinned, which connectors expose

Does not know models, connectors or hand-offs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from contracts.errors import ConfigError
from engine.build import LoadedModel
from kv_transfer.region import SharedRegion
from kv_transfer.staging import Copy, StagingArea
from observability.log import get_logger

if TYPE_CHECKING:
    from torch import Tensor

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class KVMemory:
    """`buffer` is the runner's, `region` what connectors expose; they are the same memory where `staging` is None.

    Owns all of them; `close` gives them back, once no connector uses them any more.
    """

    buffer: memoryview | Tensor
    region: SharedRegion
    staging: StagingArea | None = None

    def close(self) -> None:
        """Wait for a copy under way and let go. Idempotent."""
        if self.staging is not None:
            self.staging.close()
        self.region.close()


def make_kv_memory(model: LoadedModel, num_blocks: int, staging_bytes: int) -> KVMemory:
    """For `num_blocks` blocks of `model`, where it computes. Slow: every page is touched. Raises ConfigError."""
    block_bytes = model.layout.block_bytes
    if model.device == "cpu":
        region = SharedRegion(num_blocks * block_bytes)
        # Else the first request on each block pays for it, twenty times slower than a copy.
        region.populate()
        return KVMemory(region.buffer, region)
    num_slots = min(num_blocks, staging_bytes // block_bytes)
    if num_slots == 0:
        raise ConfigError(f"kv_staging: got {staging_bytes} bytes, a block of this model has {block_bytes}")
    if (room := num_slots * model.layout.block_size) < model.max_model_len:
        log.warning("KV of longer prompts does not pass through the staging area", tokens=room)
    region = SharedRegion(num_slots * block_bytes)
    region.populate()
    tensor = model.device_memory(num_blocks)
    return KVMemory(tensor, region, StagingArea(GpuMemory(tensor, region.buffer), region, block_bytes))


class GpuMemory:
    """See `kv_transfer.staging.DeviceMemory`: copies on a stream of its own, beside what the engine computes.

    The staging area is pinned where CUDA allows it: copies then run at the bus's speed and without the CPU.
    """

    def __init__(self, device: Tensor, staging: memoryview) -> None:
        import torch

        self._device = device
        self._staging = torch.frombuffer(staging, dtype=torch.uint8)
        self._stream = torch.cuda.Stream() if device.is_cuda else None  # type: ignore[no-untyped-call]
        if device.is_cuda:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            refused = runtime.cudaHostRegister(self._staging.data_ptr(), self._staging.nbytes, 0)
            if int(refused):
                log.warning("the KV staging area is not pinned, copies are slower", cuda_error=int(refused))

    def to_host(self, copies: Sequence[Copy]) -> None:
        """See DeviceMemory."""
        self._copy([(c.length, self._staging, c.host_offset, self._device, c.device_offset) for c in copies])

    def to_device(self, copies: Sequence[Copy]) -> None:
        """See DeviceMemory."""
        self._copy([(c.length, self._device, c.device_offset, self._staging, c.host_offset) for c in copies])

    def _copy(self, copies: Sequence[tuple[int, Tensor, int, Tensor, int]]) -> None:
        import torch

        with torch.cuda.stream(self._stream):
            for length, into, at, source, begin in copies:
                into[at : at + length].copy_(source[begin : begin + length], non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
