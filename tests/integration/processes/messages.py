"""Which of our messages a proxy sees pass: each function gives the message, or None for any other. Knows no processes.

A proxy sees bytes without the method they are for, so a message is known by who says it to whom, and by fields that only
it has.
"""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from contracts.pb.diptych.v1 import decode_pb2, handoff_pb2, prefill_pb2
from tests.integration.processes.proxy import Direction, Passing

_M = TypeVar("_M", bound=Message)


def run_of(passing: Passing) -> prefill_pb2.PrefillRun | None:
    """A prompt on its way from the router to a prefill worker."""
    message = _said(passing, "router", Direction.UP, "prefill")
    if message is None:
        return None
    command = _as(prefill_pb2.PrefillCommand, message)
    return command.run if command is not None and command.HasField("run") else None


def reserve_of(passing: Passing) -> handoff_pb2.ReserveRequest | None:
    """A prefill worker asks for room."""
    message = _said(passing, "prefill", Direction.UP, "decode")
    if message is None:
        return None
    request = _as(handoff_pb2.ReserveRequest, message)
    return request if request is not None and request.num_tokens else None


def commit_of(passing: Passing) -> handoff_pb2.Ticket | None:
    """A prefill worker commits."""
    message = _said(passing, "prefill", Direction.UP, "decode")
    if message is None:
        return None
    commit = _as(handoff_pb2.CommitRequest, message)
    return commit.ticket if commit is not None and commit.ticket.request.prompt_token_ids else None


def batch_of(passing: Passing) -> decode_pb2.DecodeBatch | None:
    """One step's tokens on their way from a decode worker to the router."""
    message = _said(passing, "router", Direction.DOWN, "decode")
    if message is None:
        return None
    batch = _as(decode_pb2.DecodeBatch, message)
    return batch if batch is not None and any(delta.token_ids for delta in batch.deltas) else None


def is_handed_off(passing: Passing) -> bool:
    """A prefill worker tells the router that its part is done."""
    message = _said(passing, "router", Direction.DOWN, "prefill")
    batch = None if message is None else _as(prefill_pb2.PrefillBatch, message)
    return batch is not None and any(event.HasField("handed_off") for event in batch.events)


def _as(kind: type[_M], message: bytes) -> _M | None:
    """None for what cannot be one: other services' messages go between the same processes."""
    try:
        return kind.FromString(message)
    except DecodeError:
        return None


def _said(passing: Passing, client: str, direction: Direction, server: str) -> bytes | None:
    """The message that passes this way between such processes, if one does."""
    if passing.unit.message is None or passing.direction is not direction:
        return None
    between = passing.link.proxy.name.startswith(server) and passing.link.client.startswith(client)
    return passing.unit.message if between else None
