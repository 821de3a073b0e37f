"""/metrics: counts of requests and tokens as clients see them, and the engine's numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

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
        self.first_event = self._histogram(
            "first_event_seconds",
            "From a stream's arrival until an event with output is written to the client",
            _TTFT_SECONDS,
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
        replicas: list[dict[str, Any]] | None = stats.get("replicas")
        if replicas is None:
            yield from _families([((), stats)])
            return
        failed = GaugeMetricFamily(
            "jax_attn_replica_failed", "1: the replica has failed", labels=["replica"]
        )
        for i, each in enumerate(replicas):
            failed.add_metric([str(i)], each["failed"])
        yield failed
        yield from _families([((str(i),), each) for i, each in enumerate(replicas)])


def _families(each: list[tuple[tuple[str, ...], dict[str, Any]]]) -> Iterator[Metric]:
    """each: (its labels, stats) of each engine. The label is the replica's number, if any."""
    label = ["replica"] if each[0][0] else []

    def family(
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        values: Callable[[dict[str, Any]], dict[str, float]],
        more: str | None = None,
    ) -> Metric:
        """values: by the value of the label `more`; without one there is one value."""
        made = kind(f"jax_attn_{name}", text, labels=[*label, *([more] if more else [])])
        for labels, stats in each:
            for key, value in values(stats).items():
                made.add_metric([*labels, *([str(key)] if more else [])], value)
        return made

    def one(name: str) -> Callable[[dict[str, Any]], dict[str, float]]:
        return lambda stats: {"": stats[name]}

    def of(name: str, *keys: str) -> Callable[[dict[str, Any]], dict[str, float]]:
        return lambda stats: {key: stats[name][key] for key in keys or stats[name]}

    first = each[0][1]
    for name, text in (
        ("waiting", "Sequences in the queue"),
        ("running", "Sequences that take part in steps"),
    ):
        yield family(GaugeMetricFamily, f"sequences_{name}", text, one(name))

    def pages(stats: dict[str, Any]) -> dict[str, float]:
        return {state: stats[f"pages_{state}"] for state in ("free", "cached", "used")}

    yield family(GaugeMetricFamily, "pages", "Pages of the kv cache", pages, "state")
    if first.get("states"):
        states = of("states")
        yield family(GaugeMetricFamily, "states", "Recurrent states", states, "state")
    if first.get("host"):
        kept, text = of("host", "free", "cached"), "Pages in the host's memory"
        yield family(GaugeMetricFamily, "host_pages", text, kept, "state")
        if first.get("host_states"):
            text = "Recurrent states in the host's memory"
            yield family(GaugeMetricFamily, "host_states", text, of("host_states"), "state")
        for name, text in (
            ("stored", "Pages that went to the host's memory"),
            ("returned", "Pages that came back from the host's memory"),
        ):
            moved = partial(lambda stats, name: {"": stats["host"][name]}, name=name)
            yield family(CounterMetricFamily, f"host_pages_{name}", text, moved)
    if first.get("files"):
        for name, text, key in (
            ("file_cache_entries", "Pages and states in files", "cached"),
            ("file_cache_bytes", "Bytes of them", "bytes"),
        ):
            now = partial(lambda stats, key: {"": stats["files"][key]}, key=key)
            yield family(GaugeMetricFamily, name, text, now)
        for name, text, key in (
            ("file_pages_stored", "Pages that were written to files", "stored"),
            ("file_pages_returned", "Pages that were read from files", "returned"),
            ("file_pages_left_out", "Pages that the disk was too slow to take", "left_out"),
            ("file_cache_entries_evicted", "Files that made room for others", "evicted"),
            ("file_cache_entries_damaged", "Files that could not be read", "damaged"),
        ):
            total = partial(lambda stats, key: {"": stats["files"][key]}, key=key)
            yield family(CounterMetricFamily, name, text, total)
    if first.get("dropped_pages") is not None:
        dropped, text = one("dropped_pages"), "Pages that --kv-policy gave back while a request ran"
        yield family(CounterMetricFamily, "dropped_pages", text, dropped)
    held, text = of("device_bytes"), "Weights and kv cache on a device"
    yield family(GaugeMetricFamily, "device_bytes", text, held, "device")
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
        yield family(CounterMetricFamily, name, text, one(name))
    text = "Shapes of a step that are not compiled yet; steps use larger ones"
    yield family(GaugeMetricFamily, "buckets_left", text, one("buckets_left"))
    seconds, text = of("step_seconds"), "Time of the engine's thread, by phase"
    yield family(CounterMetricFamily, "step_seconds", text, seconds, "phase")
