"""Words of workers as bytes in Redis, both ways: protobuf messages, checked whoever wrote them.

Reading raises InvalidRequest that names the field. Whoever can write to Redis can write anything: nothing here is believed
further than its form. Does not know keys.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from contracts import wire_handoff
from contracts.errors import InvalidRequest, LayoutMismatch
from contracts.kv_layout import check_same_layout
from contracts.pb.diptych.v1 import registry_pb2
from contracts.worker import WorkerInfo, WorkerLoad, WorkerRef

MAX_WORD_BYTES = 16 * 1024
MAX_ID_CHARS = 256
MAX_EPOCH = 2**53 - 1  # Lua's numbers are doubles
MAX_GAUGE = 1e9  # of a load: it is multiplied where it is shown
_MAX_ADDRESS_CHARS = 512
_MAX_CONNECTORS = 32


def word_to_bytes(info: WorkerInfo, load: WorkerLoad) -> bytes:
    """Raises InvalidRequest for a worker that nobody would believe."""
    check_word(info, load)
    message = registry_pb2.AnnounceRequest(
        info=wire_handoff.worker_info_to_pb(info), load=wire_handoff.worker_load_to_pb(load)
    )
    return message.SerializeToString()


def word_from_bytes(data: bytes) -> tuple[WorkerInfo, WorkerLoad]:
    """Raises InvalidRequest."""
    if len(data) > MAX_WORD_BYTES:
        raise InvalidRequest("word", f"{len(data)} bytes", f"at most {MAX_WORD_BYTES}")
    try:
        message = registry_pb2.AnnounceRequest.FromString(data)
    except DecodeError as error:
        raise InvalidRequest("word", data[:16], "must be an AnnounceRequest") from error
    info, load = wire_handoff.worker_info_from_pb(message.info), wire_handoff.worker_load_from_pb(message.load)
    check_word(info, load)
    return info, load


def farewell_to_bytes(ref: WorkerRef) -> bytes:
    """Field by field."""
    return registry_pb2.LeaveRequest(ref=wire_handoff.worker_ref_to_pb(ref)).SerializeToString()


def farewell_from_bytes(data: bytes) -> WorkerRef:
    """Raises InvalidRequest."""
    try:
        return wire_handoff.worker_ref_from_pb(registry_pb2.LeaveRequest.FromString(data[:MAX_WORD_BYTES]).ref)
    except DecodeError as error:
        raise InvalidRequest("farewell", data[:16], "must be a LeaveRequest") from error


def layout_to_bytes(info: WorkerInfo) -> bytes:
    """What all workers of a deployment have in common; equal bytes for equal layouts."""
    common = registry_pb2.WorkerInfo(model_name=info.model_name, layout=wire_handoff.layout_to_pb(info.layout))
    return common.SerializeToString(deterministic=True)


def check_layout(common: bytes, info: WorkerInfo) -> None:
    """Raises LayoutMismatch naming the field in which a worker differs from the others; InvalidRequest for damaged bytes."""
    try:
        message = registry_pb2.WorkerInfo.FromString(common[:MAX_WORD_BYTES])
    except DecodeError as error:
        raise InvalidRequest("layout", common[:16], "must be a WorkerInfo") from error
    layout = wire_handoff.layout_from_pb(message.layout)
    if message.model_name != info.model_name:
        raise LayoutMismatch("model_name", message.model_name, info.model_name)
    check_same_layout(layout, info.layout)


def check_worker_id(worker_id: str) -> None:
    """Raises InvalidRequest for a name that the registry does not take."""
    if not worker_id or len(worker_id) > MAX_ID_CHARS or not worker_id.isprintable():
        raise InvalidRequest("worker_id", worker_id, f"must be printable, of 1 to {MAX_ID_CHARS} characters")


def check_word(info: WorkerInfo, load: WorkerLoad) -> None:
    """Raises InvalidRequest, naming the field, for what no worker would say; NaN would spoil every choice that it is part of."""
    ref = info.ref
    check_worker_id(ref.worker_id)
    if not 0 <= ref.epoch <= MAX_EPOCH:
        raise InvalidRequest("epoch", ref.epoch, f"must be from 0 to {MAX_EPOCH}")
    host, colon, port = info.address.rpartition(":")
    named = bool(host and colon) and info.address.isprintable() and "/" not in info.address
    if not named or len(info.address) > _MAX_ADDRESS_CHARS or not (port.isascii() and port.isdigit()):
        raise InvalidRequest("info.address", info.address, "must be host:port")
    if len(info.connectors) > _MAX_CONNECTORS:
        raise InvalidRequest("info.connectors", f"{len(info.connectors)} kinds", f"at most {_MAX_CONNECTORS}")
    for kind in info.connectors:
        if len(kind) > MAX_ID_CHARS or not kind.isprintable():
            raise InvalidRequest(
                "info.connectors", kind, f"must be printable, of at most {MAX_ID_CHARS} characters each"
            )
    shares = ("kv_usage", load.kv_usage), ("decode_step_s", load.decode_step_s)
    for field, value in (*shares, ("prefill_tokens_per_s", load.prefill_tokens_per_s)):
        if not 0 <= value <= MAX_GAUGE:
            raise InvalidRequest(f"load.{field}", value, f"must be a number from 0 to {MAX_GAUGE:g}")
