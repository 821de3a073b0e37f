"""OpenTelemetry traces of requests: queue, prefill and decode as spans of one.

The spans are made when the request has ended, from the times of its record, so that a trace costs a
stream nothing. They belong to the trace of the client's `traceparent`, if it sent one (W3C Trace
Context).
"""

from __future__ import annotations

import os
import time
from typing import Any

from jax_attn.serve._openai.access_log import Record

_SERVICE = "jax_attn.serve"


class Tracer:
    """Sends the spans of requests to a collector, in a thread of its own."""

    def __init__(self, exporter: Any):
        """exporter: of opentelemetry; see `otlp_exporter`."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        named = "OTEL_SERVICE_NAME" in os.environ
        resource = Resource.create(None if named else {"service.name": _SERVICE})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(_SERVICE)

    def request(self, record: Record, method: str, path: str, traceparent: str) -> None:
        """Makes the spans of a request that ends now."""
        from opentelemetry import trace
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        now, wall = time.monotonic(), time.time_ns()

        def at(moment: float) -> int:
            return wall - int((now - moment) * 1e9)

        parent = TraceContextTextMapPropagator().extract({"traceparent": traceparent})
        status = record.shown_status
        span = self._tracer.start_span(
            f"{method} {path}",
            parent,
            SpanKind.SERVER,
            {
                "http.request.method": method,
                "url.path": path,
                "http.response.status_code": status,
                "gen_ai.usage.input_tokens": record.num_prompt,
                "gen_ai.usage.output_tokens": record.num_output,
                "jax_attn.request_id": record.id,
            },
            start_time=at(record.arrival),
        )
        if status >= 500:
            span.set_status(StatusCode.ERROR)
        inside = trace.set_span_in_context(span)
        ends = [record.arrival, record.admitted, record.first_token, now]
        for name, begin, end in zip(_PHASES, ends[:-1], ends[1:], strict=True):
            # A request may end in any of them.
            if begin is not None and (name != "decode" or record.num_output):
                phase = self._tracer.start_span(name, inside, start_time=at(begin))
                phase.end(at(now if end is None else end))
        span.end(wall)

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()


_PHASES = ("queue", "prefill", "decode")


def otlp_exporter(endpoint: str) -> Any:
    """An exporter to a collector's address, such as http://localhost:4318/v1/traces.

    Raises:
      ValueError: OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise ValueError("--otlp-endpoint needs pip install 'jax_attn[otel]'") from None
    return OTLPSpanExporter(endpoint=endpoint)
