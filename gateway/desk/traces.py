"""Sends requests as traces with OpenTelemetry's exporter. Imported only if ``--trace-endpoint`` is set.

A request's ``traceparent`` decides whether it is traced; without one, ``--trace-sample`` does. All spans are made when the request
is over, by :mod:`kvrelay.gateway.desk.spans`; workers export nothing. The exporter's thread sends batches, and drops spans if the
collector is away for long.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvrelay import __version__
from kvrelay.common.clock import Clock
from kvrelay.gateway.desk.spans import Span, spans_of
from kvrelay.gateway.http.request import ApiRequest
from kvrelay.gateway.settings import TraceSettings

_TIMEOUT_S = 5.0  # for sending one batch
_MAX_BATCH = 128  # spans; encoding them delays the gateway's other thread


@dataclass(frozen=True, slots=True)
class _Open:
    span: trace.Span  # of the whole request
    zero_ns: int  # since 1970, when the gateway's clock was at 0


class Traces:
    """The traces of one gateway. Implements :class:`kvrelay.gateway.http.edge.Observer`. Lives on the gateway's asyncio loop."""

    def __init__(
        self, endpoint: str, settings: TraceSettings, clock: Clock, wall_clock_ns: Callable[[], int] = time.time_ns
    ) -> None:
        """``endpoint``: that of ``settings``. ``clock``: the clock of requests. ``wall_clock_ns``: nanoseconds since 1970."""
        self._clock = clock
        self._wall_clock_ns = wall_clock_ns
        about = {
            "service.name": "kvrelay-gateway",
            "service.version": __version__,
            "service.instance.id": os.uname().nodename,
        }
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES override ours.
        resource = Resource(about).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(settings.trace_sample), resource=resource, shutdown_on_exit=False
        )
        exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, max_export_batch_size=_MAX_BATCH))
        self._tracer = self._provider.get_tracer("kvrelay", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._open: dict[int, _Open] = {}  # by what is unique: a client may choose the same id twice

    def begin(self, request: ApiRequest) -> None:
        """Decide whether the request is traced. Only a POST is: other requests generate nothing."""
        if request.method != "POST":
            return
        context = Context()
        if "traceparent" in request.headers:
            context = self._propagator.extract(request.headers, context)
        zero_ns = self._wall_clock_ns() - round(self._clock() * 1e9)
        begun_ns = _ns(zero_ns, request.received_s)
        span = self._tracer.start_span("request", context, kind=trace.SpanKind.SERVER, start_time=begun_ns)
        if span.is_recording():
            request.trace_id = trace.format_trace_id(span.get_span_context().trace_id)
            self._open[id(request)] = _Open(span, zero_ns)

    def end(self, request: ApiRequest, route: str) -> None:
        """Send the request's spans if it is traced."""
        if (opened := self._open.pop(id(request), None)) is None:
            return
        whole = spans_of(request, route, self._clock())
        opened.span.update_name(whole.name)
        self._fill(opened.span, whole, opened.zero_ns)

    def close(self) -> None:
        """Send the remaining spans. Waits for a collector at most as long as for one batch. Call it on another thread."""
        self._provider.shutdown()

    def _fill(self, span: trace.Span, told: Span, zero_ns: int) -> None:
        """Copy ``told`` into ``span``, which has begun, and end it."""
        span.set_attributes(told.attributes)
        for event in told.events:
            span.add_event(event.name, event.attributes, _ns(zero_ns, event.at_s))
        if told.error is not None:
            span.set_status(trace.StatusCode.ERROR, told.error)
        if told.children:
            context = trace.set_span_in_context(span, Context())
            for child in told.children:
                begun = self._tracer.start_span(child.name, context, start_time=_ns(zero_ns, child.begun_s))
                self._fill(begun, child, zero_ns)
        span.end(_ns(zero_ns, told.ended_s))


def _ns(zero_ns: int, moment_s: float) -> int:
    return zero_ns + round(moment_s * 1e9)
