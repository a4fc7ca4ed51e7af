"""A collector that speaks OTLP over gRPC and keeps what it is given."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class Span:
    name: str
    trace: str
    ident: str
    parent: str
    kind: int
    begun: int  # ns since 1970
    ended: int
    failed: bool
    said: str
    state: str
    values: dict = field(hash=False)
    service: str = ""


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    address: str = ""
    spans: list[Span] = field(default_factory=list)

    async def Export(self, request, context):
        for resource in request.resource_spans:
            service = _values(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                self.spans += [_span(span, service) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def endpoint(self) -> str:
        return f"http://{self.address}"

    async def requests(self, count: int = 1) -> list[Span]:
        """The request spans, once there are so many; they are sent after all of their children."""
        async with asyncio.timeout(10):
            while len(found := [span for span in self.spans if span.kind == 2]) < count:
                await asyncio.sleep(0.01)
        return found

    def below(self, parent: Span) -> list[Span]:
        return sorted((s for s in self.spans if s.parent == parent.ident), key=lambda s: (s.begun, s.ended))


@asynccontextmanager
async def running_collector() -> AsyncIterator[Collector]:
    collector = Collector()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(0)


def _span(span, service: str) -> Span:
    return Span(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code == 2,
        span.status.message,
        span.trace_state,
        _values(span.attributes),
        service,
    )


def _values(attributes) -> dict:
    return {pair.key: _value(pair.value) for pair in attributes}


def _value(value):
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
