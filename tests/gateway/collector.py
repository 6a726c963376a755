"""An OpenTelemetry collector for tests: receives OTLP over HTTP on a local port, and decodes the protobuf."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanProto


@dataclass(frozen=True)
class Told:
    """One received span."""

    proto: SpanProto
    resource: dict[str, Any]

    @property
    def name(self) -> str:
        return self.proto.name

    @property
    def attributes(self) -> dict[str, Any]:
        return values_of(self.proto.attributes)

    @property
    def took_s(self) -> float:
        return (self.proto.end_time_unix_nano - self.proto.start_time_unix_nano) / 1e9


class Collector:
    """Collects all spans. ``spans`` is complete when the gateway has ended, because it sends its last spans then."""

    def __init__(self) -> None:
        self.spans: list[Told] = []
        self.posts: list[tuple[str, str]] = []  # path and content type
        self.server: ThreadingHTTPServer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def take(self, path: str, content_type: str, body: bytes) -> None:
        self.posts.append((path, content_type))
        for one in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = values_of(one.resource.attributes)
            self.spans += [Told(span, resource) for scope in one.scope_spans for span in scope.spans]

    def traces(self) -> dict[str, list[Told]]:
        """All spans by trace id."""
        found: dict[str, list[Told]] = {}
        for span in self.spans:
            found.setdefault(span.proto.trace_id.hex(), []).append(span)
        return found

    def below(self, parent: Told) -> list[Told]:
        """The children of a span, in the order in which they began."""
        children = [one for one in self.spans if one.proto.parent_span_id == parent.proto.span_id]
        return sorted(children, key=lambda one: (one.proto.start_time_unix_nano, one.proto.end_time_unix_nano))

    def root(self, request_id: str) -> Told:
        """The root span of a request."""
        [found] = [one for one in self.spans if one.attributes.get("kvrelay.request_id") == request_id]
        return found


@contextmanager
def collector() -> Iterator[Collector]:
    """A collector that listens until the end of the block."""
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            found.take(self.path, self.headers["content-type"], body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    found.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.server.daemon_threads = True
    thread = threading.Thread(target=found.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield found
    finally:
        found.server.shutdown()
        thread.join()
        found.server.server_close()


def values_of(attributes: Any) -> dict[str, Any]:
    """OTLP's attributes as a dict."""
    pairs: list[KeyValue] = list(attributes)
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    assert kind is not None
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
