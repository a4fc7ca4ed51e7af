"""Spans of one request through OpenTelemetry's SDK: begun with the request, its stages told when it is over.

    request(name, caller's context, instant) ──▶ RequestSpan ──stage──▶ children ──end──▶ queue ──a thread──▶ collector

All instants are of one monotonic clock, in seconds; each request sets it against the time of day once, so that no step of
that time can put a child outside its parent. What the collector does not take in time is lost, and costs no request anything:
the queue is bounded, and its going away and coming back are a line each. Does not know requests, workers or stages.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from observability.log import get_logger
from observability.tracing.config import TracingConfig

log = get_logger(__name__)
Attributes = Mapping[str, str | bool | int | float | Sequence[str]]
_LAST_EXPORT_S = 1.0  # for an export that its exporter has just ended
_W3C = TraceContextTextMapPropagator()


class Tracing:
    """Owns the SDK's provider, its queue and its thread, which live until `close`. One per process and role."""

    def __init__(self, config: TracingConfig, resource: Mapping[str, str]) -> None:
        """`resource` says who this is; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES go before it. Connects when it sends."""
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # the exporter below says it, once
        who = {**resource, **OTELResourceDetector().detect().attributes}
        # The sampler is the SDK's: it honours the parent unless OTEL_TRACES_SAMPLER says otherwise.
        self._provider = TracerProvider(resource=Resource.create(who), shutdown_on_exit=False)
        self._exporter = _Exporter(config)
        self._processor = BatchSpanProcessor(self._exporter)
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("diptych")

    def request(self, name: str, traceparent: str, tracestate: str, begun: float, now: float) -> RequestSpan:
        """Begin a request's span. Both strings are what its caller sent, or empty."""
        sent = {"traceparent": traceparent, "tracestate": tracestate}
        parent = _W3C.extract(sent, Context()) if traceparent else Context()
        return RequestSpan(self._tracer, name, parent, time.time_ns() - int(now * 1e9), begun)

    def close(self, timeout_s: float) -> None:
        """Send what is left, for at most so long. Blocks."""
        flush = threading.Thread(target=self._processor.shutdown, name="last spans", daemon=True)
        flush.start()  # the SDK's own patience is half a minute, and not to be set
        flush.join(timeout_s)
        self._exporter.shutdown()
        flush.join(_LAST_EXPORT_S)


class RequestSpan:
    """A span of kind SERVER. `recording` is False where nobody will see it: then only its context is of use."""

    def __init__(self, tracer: Tracer, name: str, parent: Context, offset_ns: int, begun: float) -> None:
        self._tracer = tracer
        self._offset_ns = offset_ns
        self._span = tracer.start_span(name, parent, SpanKind.SERVER, start_time=self._at(begun))
        self._inside = set_span_in_context(self._span, Context())
        self.recording = self._span.is_recording()

    @property
    def traceparent(self) -> str:
        """Its own context in W3C's form, for whoever works for this request."""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    @property
    def tracestate(self) -> str:
        """What goes with it; often empty."""
        return self._span.get_span_context().trace_state.to_header()

    def stage(self, name: str, begun: float, ended: float, attributes: Attributes, error: str = "") -> None:
        """A child that is over; `error` is the kind of what ended it, empty for none."""
        span = self._tracer.start_span(name, self._inside, start_time=self._at(begun), attributes=attributes)
        self._end(span, ended, error)

    def end(self, ended: float, attributes: Attributes, error: str = "") -> None:
        """It is over, after all its stages."""
        self._span.set_attributes(attributes)
        self._end(self._span, ended, error)

    def _end(self, span: Span, ended: float, error: str) -> None:
        if error:  # only its kind: what is said beside it may repeat a user
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(self._at(ended))

    def _at(self, instant: float) -> int:
        return self._offset_ns + int(instant * 1e9)


class _Exporter(SpanExporter):
    """OTLP over gRPC; says when the collector goes away and when it is back. Runs in the queue's thread."""

    def __init__(self, config: TracingConfig) -> None:
        self._endpoint = config.endpoint
        self._inner = OTLPSpanExporter(endpoint=config.endpoint, insecure=config.insecure)
        self._num_lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See SpanExporter."""
        result = self._inner.export(spans)
        if result is not SpanExportResult.SUCCESS:
            if self._num_lost == 0:
                log.warning("traces are lost: their collector does not take them", endpoint=self._endpoint)
            self._num_lost += len(spans)
        elif self._num_lost:
            log.info("traces are taken again", endpoint=self._endpoint, spans_lost=self._num_lost)
            self._num_lost = 0
        return result

    def shutdown(self) -> None:
        """See SpanExporter."""
        self._inner.shutdown()
