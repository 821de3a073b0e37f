"""/metrics: counts of requests and tokens as clients see them, and the engine's numbers."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from jax_attn.serve._scheduling.protocols import ServedEngine

_TTFT_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_INTER_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 5)
_REQUEST_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

OUTCOMES = ("completed", "disconnected", "rejected", "invalid", "deadline", "failed")


class Metrics:
    """The metrics of one server. It has a separate registry: nothing is global to the process."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, engine: ServedEngine | None):
        """engine: None: its numbers are left out."""
        self._registry = CollectorRegistry()
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token", _TTFT_SECONDS
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds",
            "Between tokens of a sequence; of several at once, each its share",
            _INTER_TOKEN_SECONDS,
        )
        self.request = self._histogram(
            "request_seconds", "From arrival to the end of the answer", _REQUEST_SECONDS
        )
        requests = Counter(
            "jax_attn_requests",
            "Requests for texts and embeddings",
            ["outcome"],
            registry=self._registry,
        )
        self._outcomes = {outcome: requests.labels(outcome) for outcome in OUTCOMES}
        self.embedding_tokens = Counter(
            "jax_attn_embedding_tokens", "Tokens of embeddings", registry=self._registry
        )
        if engine is not None:
            self._registry.register(_EngineCollector(engine))

    def count(self, outcome: str) -> None:
        """Counts a request. outcome: one of OUTCOMES."""
        self._outcomes[outcome].inc()

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"jax_attn_{name}", text, buckets=buckets, registry=self._registry)


class _EngineCollector(Collector):
    """Reads the engine's numbers at each scrape, so that they cost a step nothing."""

    def __init__(self, engine: ServedEngine):
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        if not self._engine.ready:
            return
        stats = self._engine.stats()
        for name, text in (
            ("waiting", "Sequences in the queue"),
            ("running", "Sequences that take part in steps"),
        ):
            yield GaugeMetricFamily(f"jax_attn_sequences_{name}", text, value=stats[name])

        pages = GaugeMetricFamily("jax_attn_pages", "Pages of the kv cache", labels=["state"])
        for state in ("free", "cached", "used"):
            pages.add_metric([state], stats[f"pages_{state}"])
        yield pages

        held = GaugeMetricFamily(
            "jax_attn_device_bytes", "Weights and kv cache on a device", labels=["device"]
        )
        for device, count in stats["device_bytes"].items():
            held.add_metric([str(device)], count)
        yield held

        for name, text in (
            ("prompt_tokens", "Prompt tokens of admitted sequences"),
            ("prefix_hit_tokens", "Of them, those found in the prefix cache"),
            ("generated_tokens", "Output tokens"),
            ("jump_forward_tokens", "Of them, those that a grammar forced"),
            ("draft_tokens", "Guesses at what follows that were verified"),
            ("draft_tokens_taken", "Of them, those that were right: output tokens without a step"),
            ("preemptions", "Running sequences sent back to the queue"),
            ("steps", "Steps of the engine"),
            ("compilations", "Executables compiled while serving, which is to be none"),
        ):
            yield CounterMetricFamily(f"jax_attn_{name}", text, value=stats[name])

        seconds = CounterMetricFamily(
            "jax_attn_step_seconds", "Time of the engine's thread, by phase", labels=["phase"]
        )
        for phase, total in stats["step_seconds"].items():
            seconds.add_metric([phase], total)
        yield seconds
