"""A worker's KV memory: on the host, where connectors move it as it is, or beside a staging area, which they move instead.

    host                 SharedRegion ── the runner's buffer, and what connectors expose
    host, narrow form    SharedRegion ── the runner's buffer; SharedRegion ── the staging area, which connectors expose
    GPU                  uint8 tensor ── the runner's buffer; SharedRegion ── the staging area, pinned, which connectors expose

Does not know models, connectors or hand-offs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from contracts.errors import ConfigError
from contracts.kv_layout import AS_IT_IS
from engine.build import LoadedModel
from kv_transfer.region import SharedRegion
from kv_transfer.staging import Copy, DeviceMemory, StagingArea
from observability.log import get_logger
from worker.packed_memory import PackedMemory

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.packing import Form

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class KVMemory:
    """`buffer` is the runner's, `region` what connectors expose; they are the same memory where `staging` is None.

    `own` is the region behind `buffer`, where that is another. Owns all of them; `close` gives them back, once no connector
    uses them any more.
    """

    buffer: memoryview | Tensor
    region: SharedRegion
    staging: StagingArea | None = None
    own: SharedRegion | None = None

    def close(self) -> None:
        """Wait for a copy under way and let go. Idempotent."""
        if self.staging is not None:
            self.staging.close()
        if self.own is not None:
            self.own.close()
        self.region.close()


def make_kv_memory(model: LoadedModel, num_blocks: int, staging_bytes: int, transfer_dtype: str = AS_IT_IS) -> KVMemory:
    """For `num_blocks` blocks of `model`, where it computes. Slow: every page is touched. Raises ConfigError.

    `transfer_dtype` is one of contracts.kv_layout.TRANSFER_DTYPES.
    """
    own = None
    if model.device == "cpu":
        own = _touched(num_blocks * model.layout.block_bytes)
        if transfer_dtype == AS_IT_IS:
            return KVMemory(own.buffer, own)
    sent_bytes = model.layout.sent_as(transfer_dtype).sent_block_bytes
    num_slots = min(num_blocks, staging_bytes // sent_bytes)
    if num_slots == 0:
        raise ConfigError(f"kv_staging: got {staging_bytes} bytes, a block of this model has {sent_bytes}")
    if (room := num_slots * model.layout.block_size) < model.max_model_len:
        log.warning("KV of longer prompts does not pass through the staging area", tokens=room)
    region = _touched(num_slots * sent_bytes)
    buffer = model.device_memory(num_blocks) if own is None else own.buffer
    memory: DeviceMemory
    if isinstance(buffer, memoryview) or transfer_dtype != AS_IT_IS:
        memory = _packed(model, (buffer, num_blocks), region.buffer, transfer_dtype)
    else:
        memory = GpuMemory(buffer, region.buffer)
    return KVMemory(buffer, region, StagingArea(memory, region, sent_bytes), own)


def _packed(
    model: LoadedModel, blocks: tuple[memoryview | Tensor, int], staging: memoryview, transfer_dtype: str
) -> PackedMemory:
    # Here, not above: what loads no model needs no torch.
    from engine.execution.kv_storage import kv_tensor
    from kernels.dispatch import choose

    layout, form = model.layout.sent_as(transfer_dtype), cast("Form", transfer_dtype)
    cache = kv_tensor(blocks[0], layout, blocks[1])
    kernels = choose(model.device, cache.dtype)
    if cache.is_cuda:
        _pin(staging)
    log.info("KV travels in a narrow form", transfer_dtype=transfer_dtype, packed_by=kernels.labels["packing"])
    return PackedMemory(cache, kernels.packing(cache, form), staging, layout.sent_block_bytes)


def _pin(staging: memoryview) -> None:
    """The staging area is pinned where CUDA allows it: copies then run at the bus's speed and without the CPU."""
    import torch

    area = torch.frombuffer(staging, dtype=torch.uint8)
    refused = torch.cuda.cudart().cudaHostRegister(area.data_ptr(), area.nbytes, 0)  # type: ignore[no-untyped-call]
    if int(refused):
        log.warning("the KV staging area is not pinned, copies are slower", cuda_error=int(refused))


def _touched(num_bytes: int) -> SharedRegion:
    region = SharedRegion(num_bytes)
    # Else the first request on each block pays for it, twenty times slower than a copy.
    region.populate()
    return region


class GpuMemory:
    """See `kv_transfer.staging.DeviceMemory`: copies on a stream of its own, beside what the engine computes."""

    def __init__(self, device: Tensor, staging: memoryview) -> None:
        import torch

        self._device = device
        self._staging = torch.frombuffer(staging, dtype=torch.uint8)
        self._stream = torch.cuda.Stream() if device.is_cuda else None  # type: ignore[no-untyped-call]
        if device.is_cuda:
            _pin(staging)

    def to_host(self, copies: Sequence[Copy]) -> None:
        """See DeviceMemory."""
        self._copy([(c.length, self._staging, c.host_offset, self._device, c.device_offset) for c in copies])

    def to_device(self, copies: Sequence[Copy]) -> None:
        """See DeviceMemory."""
        self._copy([(c.length, self._device, c.device_offset, self._staging, c.host_offset) for c in copies])

    def blank(self, block_id: int, num_tokens: int) -> None:
        """See DeviceMemory: bytes travel as they are."""

    def _copy(self, copies: Sequence[tuple[int, Tensor, int, Tensor, int]]) -> None:
        import torch

        with torch.cuda.stream(self._stream):
            for length, into, at, source, begin in copies:
                into[at : at + length].copy_(source[begin : begin + length], non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
