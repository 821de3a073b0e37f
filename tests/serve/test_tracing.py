"""OpenTelemetry's spans: phases of a request, the client's trace, requests that fail."""

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")
export = pytest.importorskip(
    "opentelemetry.sdk.trace.export.in_memory_span_exporter", reason="needs the extra `test`"
)

from helpers.serve.live_server import eventually, serving  # noqa: E402
from jax_attn.serve._http import tracing  # noqa: E402

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Exporter(export.InMemorySpanExporter):
    def shutdown(self):
        """Spans that come at the end of a server are kept, too."""


@pytest.fixture
def exporter(monkeypatch):
    found = Exporter()
    monkeypatch.setattr(tracing, "otlp_exporter", lambda endpoint: found)
    return found


def test_a_request_has_its_phases_in_the_clients_trace(exporter):
    body = {"prompt": "import os", "max_tokens": 5}
    with serving(otlp_endpoint="http://localhost:4318/v1/traces") as server:
        server.post("/v1/completions", body, traceparent=f"00-{TRACE}-{PARENT}-01")
        server.post("/v1/completions", body | {"n": 0})
        server.post("/v1/completions", body, traceparent=f"00-{TRACE}-{PARENT}-00")  # not sampled
        server.get("/health")
    spans = exporter.get_finished_spans()
    names = [span.name for span in spans]
    path = "POST /v1/completions"
    assert names == ["queue", "prefill", "decode", path, "queue", path]
    queue, prefill, decode, whole, _, refused = spans
    assert whole.context.trace_id == int(TRACE, 16) and whole.parent.span_id == int(PARENT, 16)
    assert {span.parent.span_id for span in (queue, prefill, decode)} == {whole.context.span_id}
    assert whole.start_time == queue.start_time <= queue.end_time == prefill.start_time
    assert prefill.end_time == decode.start_time <= decode.end_time <= whole.end_time
    assert whole.attributes["gen_ai.usage.output_tokens"] == 5
    assert whole.attributes["http.response.status_code"] == 200
    assert refused.attributes["http.response.status_code"] == 400 and refused.parent is None
    assert whole.resource.attributes["service.name"] == "jax_attn.serve"


def test_a_response_in_the_background_has_its_phases(exporter):
    """The request ends with its output, not with its answer."""
    with serving(otlp_endpoint="x") as server:
        server.engine.holds_at = 2
        body = {"input": "a", "background": True, "max_output_tokens": 5}
        begun = server.post("/v1/responses", body).json
        eventually(lambda: 2 in server.engine.live.values())
        assert not exporter.get_finished_spans()
        server.engine.holds_at = None
        path = f"/v1/responses/{begun['id']}"
        eventually(lambda: server.get(path).json["status"] == "incomplete")
    *phases, whole = exporter.get_finished_spans()
    assert [span.name for span in phases] == ["queue", "prefill", "decode"]
    assert whole.name == "POST /v1/responses"
    assert whole.attributes["gen_ai.usage.output_tokens"] == 5
    assert whole.attributes["http.response.status_code"] == 200


def test_a_stream_that_fails_and_a_client_that_leaves(exporter):
    with serving(otlp_endpoint="x") as server:
        server.engine.holds_at = 2
        raw = b'{"prompt": "a", "stream": true}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
        connection = server.connect(head + b"\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw)
        eventually(lambda: server.engine.live)
        connection.close()
        eventually(lambda: not server.engine.live)
    names = [span.name for span in exporter.get_finished_spans()]
    assert names[-1] == "POST /v1/completions"


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(
        __import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None
    )
    with pytest.raises(ValueError, match=r"--otlp-endpoint needs pip install"):
        tracing.otlp_exporter("x")
