"""The door for gRPC clients, and the door for workers: messages to domain values and back, nothing else.

    GenerateRequest ──ask_from_pb──▶ Ask ──▶ service ──▶ Piece ──piece_to_pb──▶ GenerateResponse

Errors are raised as DiptychError; `rpc.calls` makes statuses of them. A call that its client cancels closes the answer,
which frees everything. Does not know HTTP, or how an answer is made.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

import grpc

from contracts.errors import InvalidRequest
from contracts.pb.diptych.v1 import inference_pb2 as pb
from contracts.pb.diptych.v1 import inference_pb2_grpc, registry_pb2, registry_pb2_grpc, types_pb2
from contracts.wire import (
    finish_to_pb,
    handoff_stats_to_pb,
    logprob_to_pb,
    prompt_logprobs_to_pb,
    sampling_from_pb,
    stages_to_pb,
)
from contracts.wire_handoff import worker_info_from_pb, worker_load_from_pb, worker_ref_from_pb
from observability.stages import Spent
from registry.wire import check_word
from router.admission.gate import Entry
from router.admission.rate_limits import length
from router.choosing.route import Route
from router.choosing.sessions import HEADER, session_of
from router.exchange import Ask, Piece, Prompt, TextPrompt, TokenPrompt, valid_traceparent, valid_tracestate
from router.grpc_chat import chat_prompt
from router.key_door import AUTHORIZATION, authorization
from router.keys import Doorkeeper
from router.openai.account import stages_line
from router.openai.ask import Envelope
from router.openai.chat import ChatRules
from router.service import Inference
from router.text.model_card import ModelCard
from router.workers.registry import OpenRegistry

INFERENCE_SERVICE: str = pb.DESCRIPTOR.services_by_name["Inference"].full_name
REGISTRY_SERVICE: str = registry_pb2.DESCRIPTOR.services_by_name["Registry"].full_name
_ROUTE_FROM_PB = {pb.ROUTE_DISAGGREGATED: Route.DISAGGREGATED, pb.ROUTE_COLOCATED: Route.COLOCATED}
_ROUTE_TO_PB = {value: key for key, value in _ROUTE_FROM_PB.items()}
_SAMPLING_FIELDS = frozenset(types_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
_GenerateContext = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]
_ListContext = grpc.aio.ServicerContext[pb.ListModelsRequest, pb.ListModelsResponse]
_TokenizeContext = grpc.aio.ServicerContext[pb.TokenizeRequest, pb.TokenizeResponse]
_DetokenizeContext = grpc.aio.ServicerContext[pb.DetokenizeRequest, pb.DetokenizeResponse]
_AnnounceContext = grpc.aio.ServicerContext[registry_pb2.AnnounceRequest, registry_pb2.AnnounceResponse]
_LeaveContext = grpc.aio.ServicerContext[registry_pb2.LeaveRequest, registry_pb2.LeaveResponse]


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Serves Inference. `new_id` names requests whose clients did not; `doorkeeper` knows whose they are."""

    def __init__(
        self,
        service: Inference,
        rules: ChatRules,
        timeout_s: float,
        new_id: Callable[[], str],
        doorkeeper: Doorkeeper,
    ) -> None:
        self._service = service
        self._rules = rules
        self._timeout_s = timeout_s
        self._new_id = new_id
        self._doorkeeper = doorkeeper

    async def Generate(
        self, request: pb.GenerateRequest, context: _GenerateContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        """See the service's definition."""
        arrived = self._service.began(0.0)
        ask = ask_from_pb(request, self._service.card, self._rules, self._envelope(request, context, arrived))
        spent: list[Spent] = []
        try:
            async with aclosing(self._service.answer(ask, self._timeout_s, spent.append)) as pieces:
                async for piece in pieces:
                    if piece.quota is not None:
                        await context.send_initial_metadata(tuple(piece.quota.words().items()))
                    yield piece_to_pb(ask.request_id, piece)
        except InvalidRequest as error:
            raise error.at(_path(error.field, request)) from error
        context.set_trailing_metadata((("diptych-stages", stages_line(*spent)),))

    def _envelope(self, request: pb.GenerateRequest, context: _GenerateContext, arrived: float) -> Envelope:
        """What comes around the message. Raises Unauthenticated."""
        said: dict[str, str] = {}  # the first of each name
        for key, value in context.invocation_metadata() or ():
            said.setdefault(key, str(value))
        traceparent = valid_traceparent(said.get("traceparent", ""))
        return Envelope(
            request_id=request.request_id or self._new_id(),
            caller=self._doorkeeper.caller(said.get(AUTHORIZATION, "")),
            timeout_s=context.time_remaining(),
            session=session_of(said.get(HEADER)),
            traceparent=traceparent,
            tracestate=valid_tracestate(said.get("tracestate", ""), traceparent),
            arrived=arrived,
        )

    async def ListModels(self, request: pb.ListModelsRequest, context: _ListContext) -> pb.ListModelsResponse:
        """See the service's definition."""
        del request, context
        return pb.ListModelsResponse(
            models=[pb.Model(name=self._service.card.name, max_model_len=self._service.max_model_len())]
        )

    async def Tokenize(self, request: pb.TokenizeRequest, context: _TokenizeContext) -> pb.TokenizeResponse:
        """See the service's definition."""
        self._service.check_model(request.model)
        add = request.add_special_tokens if request.HasField("add_special_tokens") else None
        match request.WhichOneof("input"):
            case "text":
                prompt: Prompt = TextPrompt(request.text, add is not False)
            case "chat":
                prompt = chat_prompt(request.chat, self._rules, add)
            case _:
                raise InvalidRequest("input", None, "one of text and chat must be set")
        async with self._reading(context, length(prompt)) as entry:
            token_ids = await self._service.prompter.token_ids(prompt)
            entry.took(len(token_ids), 0)
        return pb.TokenizeResponse(token_ids=token_ids, max_model_len=self._service.max_model_len())

    async def Detokenize(self, request: pb.DetokenizeRequest, context: _DetokenizeContext) -> pb.DetokenizeResponse:
        """See the service's definition."""
        self._service.check_model(request.model)
        card = self._service.card
        card.check_ids(request.token_ids, "token_ids[{}]")
        async with self._reading(context, len(request.token_ids)) as entry:
            text = await card.tokenizer.decode_whole(request.token_ids, skip_special_tokens=False)
            entry.took(len(request.token_ids), 0)
        return pb.DetokenizeResponse(text=text)

    @asynccontextmanager
    async def _reading(self, context: _TokenizeContext | _DetokenizeContext, num_tokens: float) -> AsyncIterator[Entry]:
        """Under the caller's limits, whose standing goes before the answer."""
        caller = self._doorkeeper.caller(authorization(tuple(context.invocation_metadata() or ())))
        left_s = context.time_remaining()
        timeout_s = self._timeout_s if left_s is None else min(self._timeout_s, left_s)
        async with self._service.reading(caller, max(1.0, num_tokens), timeout_s) as entry:
            yield entry
        if entry.quota is not None:
            await context.send_initial_metadata(tuple(entry.quota.words().items()))


class RegistryServicer(registry_pb2_grpc.RegistryServicer):
    """Serves Registry over any registry."""

    def __init__(self, registry: OpenRegistry) -> None:
        self._registry = registry

    async def Announce(
        self, request: registry_pb2.AnnounceRequest, context: _AnnounceContext
    ) -> registry_pb2.AnnounceResponse:
        """See the service's definition."""
        del context
        info, load = worker_info_from_pb(request.info), worker_load_from_pb(request.load)
        check_word(info, load)
        return registry_pb2.AnnounceResponse(ttl_s=await self._registry.announce(info, load))

    async def Leave(self, request: registry_pb2.LeaveRequest, context: _LeaveContext) -> registry_pb2.LeaveResponse:
        """See the service's definition."""
        del context
        ref = worker_ref_from_pb(request.ref)
        kinds = [worker.info.kind for worker in self._registry.workers() if worker.info.ref == ref]
        await self._registry.leave(ref)
        return registry_pb2.LeaveResponse(num_others=sum(len(self._registry.ready(kind)) for kind in kinds))


def ask_from_pb(message: pb.GenerateRequest, card: ModelCard, rules: ChatRules, envelope: Envelope) -> Ask:
    """Raises InvalidRequest naming the field that is missing or not known."""
    return Ask(
        request_id=envelope.request_id,
        prompt=_prompt_from_pb(message, rules),
        sampling=sampling_from_pb(message.sampling, card.defaults, card.new_seed()),
        model=message.model,
        n=message.n if message.HasField("n") else 1,
        fill_context=not message.sampling.HasField("max_tokens"),
        stop=tuple(message.stop),
        include_stop=message.include_stop,
        skip_special_tokens=message.skip_special_tokens if message.HasField("skip_special_tokens") else True,
        priority=message.priority,
        route=_route_from_pb(message.route),
        timeout_s=envelope.timeout_s,
        traceparent=envelope.traceparent,
        tracestate=envelope.tracestate,
        session=envelope.session,
        caller=envelope.caller,
        arrived=envelope.arrived,
    )


def piece_to_pb(request_id: str, piece: Piece) -> pb.GenerateResponse:
    """One piece of the answer on the wire."""
    message = pb.GenerateResponse(request_id=request_id, index=piece.index, text=piece.text, token_ids=piece.token_ids)
    if piece.logprobs:
        message.logprobs.extend(logprob_to_pb(entry) for entry in piece.logprobs)
    if piece.prompt_logprobs:
        message.prompt_logprobs.extend(prompt_logprobs_to_pb(piece.prompt_logprobs))
    ending = piece.ending
    if ending is None:
        return message
    message.finish_reason = finish_to_pb(ending.reason)
    if isinstance(ending.stop, str):
        message.stop_string = ending.stop
    elif ending.stop is not None:
        message.stop_token_id = ending.stop
    if piece.usage is not None:
        message.usage.prompt_tokens = piece.usage.prompt_tokens
        message.usage.completion_tokens = piece.usage.completion_tokens
        message.usage.cached_tokens = piece.usage.cached_tokens
    message.stages.CopyFrom(stages_to_pb(ending.spent.stages))
    _say_measured(message, ending.spent)
    if ending.handoff is not None:
        message.handoff.CopyFrom(handoff_stats_to_pb(ending.handoff))
    message.route = _ROUTE_TO_PB[ending.route]
    decision = ending.decision
    if decision is not None:
        said = pb.RouteDecision(
            reason=decision.reason.value,
            predicted_remote_s=decision.predicted_remote_s,
            predicted_local_s=decision.predicted_local_s,
            measured_s=decision.measured_s,
        )
        message.decision.CopyFrom(said)
    return message


def _say_measured(message: pb.GenerateResponse, spent: Spent) -> None:
    if spent.ttft_s is not None and spent.ttft_unexplained_s is not None:
        message.ttft_s, message.ttft_unexplained_s = spent.ttft_s, spent.ttft_unexplained_s
    if spent.gap_s is not None and spent.gap_unexplained_s is not None:
        message.gap_s, message.gap_unexplained_s = spent.gap_s, spent.gap_unexplained_s


def _prompt_from_pb(message: pb.GenerateRequest, rules: ChatRules) -> Prompt:
    match message.WhichOneof("input"):
        case "text":
            return TextPrompt(message.text)
        case "token_ids":
            return TokenPrompt(tuple(message.token_ids.ids))
        case "chat":
            return chat_prompt(message.chat, rules)
        case _:
            raise InvalidRequest("input", None, "one of text, token_ids and chat must be set")


def _path(field: str, message: pb.GenerateRequest) -> str:
    """The way to a field of an Ask in the message that it came in."""
    if field in _SAMPLING_FIELDS:
        return f"sampling.{field}"
    return message.WhichOneof("input") or field if field == "prompt" else field


def _route_from_pb(value: pb.Route.ValueType) -> Route | None:
    if value == pb.ROUTE_UNSPECIFIED:
        return None
    if value not in _ROUTE_FROM_PB:
        raise InvalidRequest("route", value, "must be a known value of Route")
    return _ROUTE_FROM_PB[value]
