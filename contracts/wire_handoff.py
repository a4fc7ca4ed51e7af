"""Wire ↔ domain for the hand-off and the registry: refs, layouts, grants, worker descriptions.

The commit's messages are in `contracts.wire_commit`, the rest in `contracts.wire`.
Reading raises InvalidRequest that names a missing or impossible field. Does no I/O.
"""

from __future__ import annotations

from contracts.errors import InvalidRequest
from contracts.kv_layout import AS_IT_IS, DTYPE_BYTES, TRANSFER_DTYPES, KVLayout
from contracts.pb.diptych.v1 import handoff_pb2, registry_pb2, types_pb2
from contracts.ticket import (
    AbortRequest,
    AbortResponse,
    ConnectRequest,
    ConnectResponse,
    Full,
    Grant,
    RenewRequest,
    RenewResponse,
    ReserveRequest,
)
from contracts.worker import ConnectorAddress, WorkerInfo, WorkerKind, WorkerLoad, WorkerRef, WorkerState

_KIND_TO_PB = {
    WorkerKind.PREFILL: registry_pb2.WORKER_KIND_PREFILL,
    WorkerKind.DECODE: registry_pb2.WORKER_KIND_DECODE,
}
_KIND_FROM_PB = {value: key for key, value in _KIND_TO_PB.items()}
_STATE_TO_PB = {
    WorkerState.STARTING: registry_pb2.WORKER_STATE_STARTING,
    WorkerState.READY: registry_pb2.WORKER_STATE_READY,
    WorkerState.DRAINING: registry_pb2.WORKER_STATE_DRAINING,
    WorkerState.STALLED: registry_pb2.WORKER_STATE_STALLED,
}
_STATE_FROM_PB = {value: key for key, value in _STATE_TO_PB.items()}


def worker_ref_to_pb(ref: WorkerRef) -> types_pb2.WorkerRef:
    """Field by field."""
    return types_pb2.WorkerRef(worker_id=ref.worker_id, epoch=ref.epoch)


def worker_ref_from_pb(message: types_pb2.WorkerRef) -> WorkerRef:
    """Raises InvalidRequest when the worker has no name."""
    if not message.worker_id:
        raise InvalidRequest("worker_id", "", "must not be empty")
    return WorkerRef(message.worker_id, message.epoch)


def address_to_pb(address: ConnectorAddress) -> types_pb2.ConnectorAddress:
    """Field by field."""
    return types_pb2.ConnectorAddress(kind=address.kind, address=address.address)


def address_from_pb(message: types_pb2.ConnectorAddress) -> ConnectorAddress:
    """Field by field."""
    return ConnectorAddress(message.kind, message.address)


def layout_to_pb(layout: KVLayout) -> types_pb2.KVLayout:
    """Field by field."""
    return types_pb2.KVLayout(
        model=layout.model,
        dtype=layout.dtype,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_size=layout.head_size,
        block_size=layout.block_size,
        tp_size=layout.tp_size,
        hash_seed=layout.hash_seed,
        transfer_dtype=layout.transfer_dtype,
        protocol_version=layout.protocol_version,
    )


def layout_from_pb(message: types_pb2.KVLayout) -> KVLayout:
    """Raises InvalidRequest for a dtype that is not known, and for a size of nothing. Older workers name no transfer_dtype."""
    if message.dtype not in DTYPE_BYTES:
        raise InvalidRequest("layout.dtype", message.dtype, f"must be one of {', '.join(DTYPE_BYTES)}")
    transfer_dtype = message.transfer_dtype or AS_IT_IS
    if transfer_dtype not in TRANSFER_DTYPES:
        raise InvalidRequest("layout.transfer_dtype", transfer_dtype, f"must be one of {', '.join(TRANSFER_DTYPES)}")
    sizes = (
        ("num_layers", message.num_layers),
        ("num_kv_heads", message.num_kv_heads),
        ("head_size", message.head_size),
        ("block_size", message.block_size),
        ("tp_size", message.tp_size),
    )
    for field, size in sizes:
        if size == 0:
            raise InvalidRequest(f"layout.{field}", size, "must be at least 1")
    return KVLayout(
        model=message.model,
        dtype=message.dtype,
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_size=message.head_size,
        block_size=message.block_size,
        tp_size=message.tp_size,
        hash_seed=message.hash_seed,
        transfer_dtype=transfer_dtype,
        protocol_version=message.protocol_version,
    )


def connect_to_pb(request: ConnectRequest) -> handoff_pb2.ConnectRequest:
    """Field by field."""
    return handoff_pb2.ConnectRequest(
        prefill=worker_ref_to_pb(request.prefill),
        decode=worker_ref_to_pb(request.decode),
        layout=layout_to_pb(request.layout),
    )


def connect_from_pb(message: handoff_pb2.ConnectRequest) -> ConnectRequest:
    """Field by field."""
    return ConnectRequest(
        prefill=worker_ref_from_pb(message.prefill),
        decode=worker_ref_from_pb(message.decode),
        layout=layout_from_pb(message.layout),
    )


def connected_to_pb(response: ConnectResponse) -> handoff_pb2.ConnectResponse:
    """Field by field."""
    return handoff_pb2.ConnectResponse(
        prefill=worker_ref_to_pb(response.prefill),
        decode=worker_ref_to_pb(response.decode),
        connectors=[address_to_pb(a) for a in response.connectors],
    )


def connected_from_pb(message: handoff_pb2.ConnectResponse) -> ConnectResponse:
    """Field by field."""
    return ConnectResponse(
        prefill=worker_ref_from_pb(message.prefill),
        decode=worker_ref_from_pb(message.decode),
        connectors=tuple(address_from_pb(a) for a in message.connectors),
    )


def abort_to_pb(request: AbortRequest) -> handoff_pb2.AbortRequest:
    """Field by field."""
    return handoff_pb2.AbortRequest(
        handoff_id=request.handoff_id,
        prefill=worker_ref_to_pb(request.prefill),
        decode=worker_ref_to_pb(request.decode),
        reason=request.reason,
    )


def abort_from_pb(message: handoff_pb2.AbortRequest) -> AbortRequest:
    """Raises InvalidRequest when the id is missing."""
    if not message.handoff_id:
        raise InvalidRequest("handoff_id", "", "must not be empty")
    return AbortRequest(
        handoff_id=message.handoff_id,
        prefill=worker_ref_from_pb(message.prefill),
        decode=worker_ref_from_pb(message.decode),
        reason=message.reason,
    )


def aborted_to_pb(response: AbortResponse) -> handoff_pb2.AbortResponse:
    """Field by field."""
    return handoff_pb2.AbortResponse(
        handoff_id=response.handoff_id,
        prefill=worker_ref_to_pb(response.prefill),
        decode=worker_ref_to_pb(response.decode),
    )


def aborted_from_pb(message: handoff_pb2.AbortResponse) -> AbortResponse:
    """Field by field."""
    return AbortResponse(message.handoff_id, worker_ref_from_pb(message.prefill), worker_ref_from_pb(message.decode))


def renew_to_pb(request: RenewRequest) -> handoff_pb2.RenewRequest:
    """Field by field."""
    return handoff_pb2.RenewRequest(
        prefill=worker_ref_to_pb(request.prefill),
        decode=worker_ref_to_pb(request.decode),
        handoff_ids=request.handoff_ids,
    )


def renew_from_pb(message: handoff_pb2.RenewRequest) -> RenewRequest:
    """Field by field."""
    return RenewRequest(
        prefill=worker_ref_from_pb(message.prefill),
        decode=worker_ref_from_pb(message.decode),
        handoff_ids=tuple(message.handoff_ids),
    )


def renewed_to_pb(response: RenewResponse) -> handoff_pb2.RenewResponse:
    """Field by field."""
    return handoff_pb2.RenewResponse(
        prefill=worker_ref_to_pb(response.prefill),
        decode=worker_ref_to_pb(response.decode),
        lost_handoff_ids=response.lost_handoff_ids,
        lease_s=response.lease_s,
    )


def renewed_from_pb(message: handoff_pb2.RenewResponse) -> RenewResponse:
    """Field by field."""
    return RenewResponse(
        prefill=worker_ref_from_pb(message.prefill),
        decode=worker_ref_from_pb(message.decode),
        lost_handoff_ids=tuple(message.lost_handoff_ids),
        lease_s=message.lease_s,
    )


def reserve_to_pb(request: ReserveRequest) -> handoff_pb2.ReserveRequest:
    """Field by field."""
    return handoff_pb2.ReserveRequest(
        handoff_id=request.handoff_id,
        prefill=worker_ref_to_pb(request.prefill),
        decode=worker_ref_to_pb(request.decode),
        num_tokens=request.num_tokens,
        block_hashes=request.block_hashes,
    )


def reserve_from_pb(message: handoff_pb2.ReserveRequest) -> ReserveRequest:
    """Raises InvalidRequest when the id is missing or there is nothing to reserve."""
    if not message.handoff_id:
        raise InvalidRequest("handoff_id", "", "must not be empty")
    if message.num_tokens == 0:
        raise InvalidRequest("num_tokens", 0, "must be at least 1")
    return ReserveRequest(
        handoff_id=message.handoff_id,
        prefill=worker_ref_from_pb(message.prefill),
        decode=worker_ref_from_pb(message.decode),
        num_tokens=message.num_tokens,
        block_hashes=tuple(message.block_hashes),
    )


def grant_to_pb(grant: Grant) -> handoff_pb2.Grant:
    """Field by field."""
    windows = [handoff_pb2.Window(address=address_to_pb(address), key=key) for address, key in grant.windows]
    return handoff_pb2.Grant(
        handoff_id=grant.handoff_id,
        prefill=worker_ref_to_pb(grant.prefill),
        decode=worker_ref_to_pb(grant.decode),
        block_ids=grant.block_ids,
        num_cached_tokens=grant.num_cached_tokens,
        lease_s=grant.lease_s,
        windows=windows,
    )


def grant_from_pb(message: handoff_pb2.Grant) -> Grant:
    """Field by field."""
    return Grant(
        handoff_id=message.handoff_id,
        prefill=worker_ref_from_pb(message.prefill),
        decode=worker_ref_from_pb(message.decode),
        block_ids=tuple(message.block_ids),
        num_cached_tokens=message.num_cached_tokens,
        lease_s=message.lease_s,
        windows=tuple((address_from_pb(window.address), window.key) for window in message.windows),
    )


def full_to_pb(full: Full) -> handoff_pb2.NoRoom:
    """Field by field."""
    prefill, decode = worker_ref_to_pb(full.prefill), worker_ref_to_pb(full.decode)
    return handoff_pb2.NoRoom(prefill=prefill, decode=decode, retry_after_s=full.retry_after_s)


def full_from_pb(message: handoff_pb2.NoRoom) -> Full:
    """Field by field."""
    return Full(worker_ref_from_pb(message.prefill), worker_ref_from_pb(message.decode), message.retry_after_s)


def worker_info_to_pb(info: WorkerInfo) -> registry_pb2.WorkerInfo:
    """Field by field."""
    return registry_pb2.WorkerInfo(
        ref=worker_ref_to_pb(info.ref),
        kind=_KIND_TO_PB[info.kind],
        address=info.address,
        model_name=info.model_name,
        layout=layout_to_pb(info.layout),
        connectors=info.connectors,
        max_model_len=info.max_model_len,
        num_blocks=info.num_blocks,
        max_num_batched_tokens=info.max_num_batched_tokens,
        max_num_seqs=info.max_num_seqs,
    )


def worker_info_from_pb(message: registry_pb2.WorkerInfo) -> WorkerInfo:
    """Raises InvalidRequest for a worker of no pool, without an address, or that could hold no request."""
    kind = _KIND_FROM_PB.get(message.kind)
    if kind is None:
        raise InvalidRequest("info.kind", message.kind, "must be prefill or decode")
    if not message.address:
        raise InvalidRequest("info.address", "", "must be host:port")
    for field, count in (("max_model_len", message.max_model_len), ("num_blocks", message.num_blocks)):
        if count == 0:
            raise InvalidRequest(f"info.{field}", count, "must be at least 1")
    return WorkerInfo(
        ref=worker_ref_from_pb(message.ref),
        kind=kind,
        address=message.address,
        model_name=message.model_name,
        layout=layout_from_pb(message.layout),
        connectors=tuple(message.connectors),
        max_model_len=message.max_model_len,
        num_blocks=message.num_blocks,
        max_num_batched_tokens=message.max_num_batched_tokens,
        max_num_seqs=message.max_num_seqs,
    )


def worker_load_to_pb(load: WorkerLoad) -> registry_pb2.WorkerLoad:
    """Field by field; a worker that is gone says so by leaving, not by its load."""
    return registry_pb2.WorkerLoad(
        state=_STATE_TO_PB[load.state],
        num_waiting=load.num_waiting,
        num_running=load.num_running,
        num_queued_tokens=load.num_queued_tokens,
        kv_usage=load.kv_usage,
        decode_step_s=load.decode_step_s,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
    )


def worker_load_from_pb(message: registry_pb2.WorkerLoad) -> WorkerLoad:
    """Raises InvalidRequest when the state is not said."""
    state = _STATE_FROM_PB.get(message.state)
    if state is None:
        raise InvalidRequest("load.state", message.state, "must be starting, ready, draining or stalled")
    counts = message.num_waiting, message.num_running, message.num_queued_tokens
    return WorkerLoad(state, *counts, message.kv_usage, message.decode_step_s, message.prefill_tokens_per_s)
