"""What goes over the wire comes back the same; what is missing is named."""

import math
from dataclasses import replace

import pytest

from contracts import wire, wire_commit, wire_handoff
from contracts.errors import (
    Draining,
    ErrorCode,
    HandoffError,
    InternalError,
    InvalidRequest,
    StaleEpoch,
    Unavailable,
)
from contracts.kv_layout import KVLayout
from contracts.pb.diptych.v1 import handoff_pb2, registry_pb2, types_pb2
from contracts.request import ErrorInfo, FinishReason, GenerationRequest, TokenDelta, TokenLogprob
from contracts.sampling import SamplingParams
from contracts.ticket import (
    AbortRequest,
    AbortResponse,
    CommitResponse,
    ConnectRequest,
    ConnectResponse,
    Full,
    Grant,
    RenewRequest,
    RenewResponse,
    ReserveRequest,
    Ticket,
    check_answer,
)
from contracts.worker import ConnectorAddress, WorkerInfo, WorkerKind, WorkerLoad, WorkerRef, WorkerState
from observability.stages import HandoffStats, StageTimes

SAMPLING = SamplingParams(
    temperature=0.7,
    top_k=3,
    top_p=0.75,
    min_p=0.25,
    repetition_penalty=1.5,
    presence_penalty=-0.5,
    frequency_penalty=0.5,
    logit_bias=((1, 2.0), (5, -4.0)),
    seed=2**62,
    max_tokens=7,
    min_tokens=2,
    stop_token_ids=(3, 4),
    ignore_eos=True,
    logprobs=0,
    prompt_logprobs=2,
)
REQUEST = GenerationRequest(
    "r-1", (1, 2), SAMPLING, (3,), priority=-2, deadline_s=1.5, traceparent="00-a-b-01", tracestate="v=1"
)
LOGPROB = TokenLogprob(4, -0.5, 1, ((4, -0.5), (2, -1.5)))
STAGES = StageTimes(*(0.5 + i for i in range(15)))
LAYOUT = KVLayout("m", "bfloat16", 2, 3, 4, 16, 1, 9)
P, D = WorkerRef("p", 5), WorkerRef("d", 6)


PB_LAYOUT = wire_handoff.layout_to_pb(LAYOUT)
PB_INFO = wire_handoff.worker_info_to_pb(WorkerInfo(P, WorkerKind.PREFILL, "h:1", "m", LAYOUT, ("shm",), 128, 64))


def with_changes(message, **changes):
    """A copy of a message with some of its fields set."""
    changed = type(message)()
    changed.CopyFrom(message)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


def test_the_log_probabilities_of_a_long_prompt_are_read_by_whoever_looks_at_them():
    entries = (None, *(TokenLogprob(i, -0.5 * i, 1 + i, ((4, -0.25 * i), (2, -1.5))) for i in range(1, 400)))
    delta = TokenDelta("r", 0, (7,), prompt_logprobs=entries)
    message = wire.delta_to_pb(delta)
    read = wire.delta_from_pb(message)
    assert read == delta
    got = read.prompt_logprobs
    assert (len(got), tuple(got), got[0], got[-1], tuple(got[5:7])) == (400, entries, None, entries[-1], entries[5:7])
    assert got != entries[1:]
    passed_on = wire.prompt_logprobs_to_pb(got)
    assert next(iter(passed_on)) is message.prompt_logprobs[0], "a router passes on what it need not look at"
    assert wire.delta_to_pb(read) == message


def test_request_round_trip():
    assert wire.request_from_pb(wire.request_to_pb(REQUEST)) == REQUEST
    bare = GenerationRequest("r", (1,), SamplingParams())
    assert wire.request_from_pb(wire.request_to_pb(bare)) == bare


def test_absent_sampling_fields_take_the_defaults_and_present_zeros_do_not():
    got = wire.sampling_from_pb(types_pb2.SamplingParams(temperature=0.0), SAMPLING)
    assert got == replace(SAMPLING, temperature=0.0)


def test_delta_round_trip():
    delta = TokenDelta(
        "r",
        3,
        (4,),
        (LOGPROB,),
        (None, LOGPROB),
        FinishReason.ERROR,
        9,
        16,
        ErrorInfo(ErrorCode.UNAVAILABLE, "gone", True),
        STAGES,
    )
    assert wire.delta_from_pb(wire.delta_to_pb(delta)) == delta
    assert wire.delta_from_pb(wire.delta_to_pb(TokenDelta("r", 0))) == TokenDelta("r", 0)


@pytest.mark.parametrize("reason", [None, *FinishReason])
def test_finish_reasons_round_trip(reason):
    assert wire.finish_from_pb(wire.finish_to_pb(reason)) is reason


def test_hand_off_messages_round_trip():
    reserve = ReserveRequest("h", P, D, 5, (b"a", b"b"))
    assert wire_handoff.reserve_from_pb(wire_handoff.reserve_to_pb(reserve)) == reserve
    grant = Grant("h", P, D, (4, 5), 16, 5.0, ((ConnectorAddress("tcp", "h:1"), 2**63 + 1),))
    assert wire_handoff.grant_from_pb(wire_handoff.grant_to_pb(grant)) == grant
    ticket = Ticket("h", P, D, LAYOUT, REQUEST, 2, 16, 2**63 + 1, (b"a",), (b"d",), LOGPROB, STAGES)
    assert wire_commit.ticket_from_pb(wire_commit.ticket_to_pb(ticket)) == ticket
    connect = ConnectRequest(P, D, LAYOUT)
    assert wire_handoff.connect_from_pb(wire_handoff.connect_to_pb(connect)) == connect
    connected = ConnectResponse(P, D, (ConnectorAddress("shm", "a"), ConnectorAddress("tcp", "h:1")))
    assert wire_handoff.connected_from_pb(wire_handoff.connected_to_pb(connected)) == connected
    abort = AbortRequest("h", P, D, "client left")
    assert wire_handoff.abort_from_pb(wire_handoff.abort_to_pb(abort)) == abort
    aborted = AbortResponse("h", P, D)
    assert wire_handoff.aborted_from_pb(wire_handoff.aborted_to_pb(aborted)) == aborted
    committed = CommitResponse("h", P, D, 7)
    assert wire_commit.committed_from_pb(wire_commit.committed_to_pb(committed)) == committed
    full = Full(P, D, 0.25)
    assert wire_handoff.full_from_pb(wire_handoff.full_to_pb(full)) == full
    renew = RenewRequest(P, D, ("h", "i"))
    assert wire_handoff.renew_from_pb(wire_handoff.renew_to_pb(renew)) == renew
    renewed = RenewResponse(P, D, ("i",), 5.0)
    assert wire_handoff.renewed_from_pb(wire_handoff.renewed_to_pb(renewed)) == renewed
    stats = HandoffStats("shm", 10, 2, 3, 4, 0.5, 0.25)
    assert wire.handoff_stats_from_pb(wire.handoff_stats_to_pb(stats)) == stats


@pytest.mark.parametrize("told", [math.nan, math.inf, -math.inf, 1e300, -1e300, 5e-324])
def test_what_is_no_duration_is_none(told):
    """A worker that says it would spoil every sum that it is part of, and the dashboard's JSON, which has no word for it."""
    stages = StageTimes(**dict.fromkeys(StageTimes.__slots__, told))
    assert wire.stages_from_pb(wire.stages_to_pb(stages)) == StageTimes()
    stats = wire.handoff_stats_from_pb(wire.handoff_stats_to_pb(HandoffStats("shm", 2**64 - 1, 2, 3, 4, told, told)))
    assert (stats.transfer_s, stats.exposed_s, stats.gb_per_s) == (0.0, 0.0, 0.0)


def test_every_message_and_every_answer_of_a_hand_off_names_both_lives():
    """Of those that travel alone; a Grant, a NoRoom and a Ticket are inside another."""
    whole = handoff_pb2.DESCRIPTOR.message_types_by_name
    inside = {"Window": set(), "ReserveResponse": {"grant", "no_room"}, "CommitRequest": {"ticket"}}
    for name, message in whole.items():
        fields = {field.name for field in message.fields}
        assert inside[name] <= fields if name in inside else {"prefill", "decode"} <= fields, name


@pytest.mark.parametrize("whose", ["prefill", "decode"])
def test_an_answer_of_another_life_or_worker_is_not_believed(whose):
    answer = AbortResponse("h", P, D)
    check_answer(answer, P, D)
    ref = getattr(answer, whose)
    with pytest.raises(StaleEpoch, match=ref.worker_id):
        check_answer(replace(answer, **{whose: replace(ref, epoch=ref.epoch + 1)}), P, D)
    with pytest.raises(HandoffError, match="someone"):
        check_answer(replace(answer, **{whose: replace(ref, worker_id="someone")}), P, D)


def test_worker_messages_round_trip():
    info = WorkerInfo(P, WorkerKind.PREFILL, "h:1", "m", LAYOUT, ("shm", "tcp"), 128, 64, 2048, 16)
    assert wire_handoff.worker_info_from_pb(wire_handoff.worker_info_to_pb(info)) == info
    load = WorkerLoad(WorkerState.STALLED, 1, 2, 3, 0.5, 0.02, 900.0)
    assert wire_handoff.worker_load_from_pb(wire_handoff.worker_load_to_pb(load)) == load


@pytest.mark.parametrize(
    ("read", "field"),
    [
        (lambda: wire.request_from_pb(types_pb2.Request()), "request_id"),
        (lambda: wire.request_from_pb(types_pb2.Request(request_id="r")), "sampling"),
        (lambda: wire.delta_from_pb(types_pb2.TokenDelta(logprobs=[types_pb2.TokenLogprob()])), "logprobs.rank"),
        (lambda: wire_handoff.worker_ref_from_pb(types_pb2.WorkerRef()), "worker_id"),
        (lambda: wire_handoff.layout_from_pb(types_pb2.KVLayout(dtype="int3")), "layout.dtype"),
        (
            lambda: wire_handoff.layout_from_pb(with_changes(PB_LAYOUT, transfer_dtype="int4")),
            "layout.transfer_dtype",
        ),
        (lambda: wire_handoff.reserve_from_pb(handoff_pb2.ReserveRequest()), "handoff_id"),
        (lambda: wire_handoff.reserve_from_pb(handoff_pb2.ReserveRequest(handoff_id="h")), "num_tokens"),
        (lambda: wire_commit.ticket_from_pb(handoff_pb2.Ticket()), "ticket.handoff_id"),
        (lambda: wire_handoff.abort_from_pb(handoff_pb2.AbortRequest()), "handoff_id"),
        (lambda: wire_handoff.worker_info_from_pb(registry_pb2.WorkerInfo()), "info.kind"),
        (lambda: wire_handoff.worker_info_from_pb(registry_pb2.WorkerInfo(kind=1)), "info.address"),
        (lambda: wire_handoff.worker_load_from_pb(registry_pb2.WorkerLoad()), "load.state"),
        (lambda: wire.request_from_pb(with_changes(wire.request_to_pb(REQUEST), deadline_s=math.nan)), "deadline_s"),
        *(
            (lambda name=name: wire_handoff.layout_from_pb(with_changes(PB_LAYOUT, **{name: 0})), f"layout.{name}")
            for name in ("num_layers", "num_kv_heads", "head_size", "block_size", "tp_size")
        ),
        *(
            (lambda name=name: wire_handoff.worker_info_from_pb(with_changes(PB_INFO, **{name: 0})), f"info.{name}")
            for name in ("max_model_len", "num_blocks")
        ),
    ],
)
def test_missing_and_impossible_parts_are_named(read, field):
    with pytest.raises(InvalidRequest) as caught:
        read()
    assert caught.value.field == field


@pytest.mark.parametrize("sent", [LAYOUT, LAYOUT.sent_as("int8"), LAYOUT.sent_as("fp8")])
def test_how_blocks_travel_is_said_and_older_workers_send_them_as_they_are(sent):
    message = wire_handoff.layout_to_pb(sent)
    assert wire_handoff.layout_from_pb(message) == sent
    message.ClearField("transfer_dtype")
    assert wire_handoff.layout_from_pb(message).transfer_dtype == "auto"


@pytest.mark.parametrize("kind", [Draining, Unavailable])
def test_that_a_worker_drains_is_told_apart_from_its_being_unavailable(kind):
    info = wire.error_info(kind("goes on elsewhere"))
    assert wire.error_info_from_pb(wire.error_info_to_pb(info)) == info
    assert info == ErrorInfo(ErrorCode.UNAVAILABLE, "goes on elsewhere", True, draining=kind is Draining)


def test_an_unknown_error_code_is_said_aloud():
    with pytest.raises(InternalError, match="WAT"):
        wire.error_info_from_pb(types_pb2.Error(code="WAT"))
