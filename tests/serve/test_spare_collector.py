"""Full garbage collections of a server look at a bounded number of objects."""

import gc
import weakref

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")

from helpers.serve.fake_engine import FakeEngine, fake_model
from helpers.serve.live_server import eventually, post_bytes, serving
from jax_attn.serve._http import spare_collector
from jax_attn.serve._http.spare_collector import SpareCollector


@pytest.fixture
def collector(request):
    collector = SpareCollector(lambda: request.param)
    gc.disable()  # only the collections of a test
    collector.begin()
    yield collector
    collector.end()
    gc.enable()
    assert not gc.get_freeze_count()


class Node:
    """A cycle of its own."""

    def __init__(self):
        self.me = self


def num_seen() -> int:
    """The objects that the next full collection looks at."""
    return len(gc.get_objects())


@pytest.mark.parametrize("collector", [False], indirect=True)
def test_what_has_survived_is_not_looked_at_again(collector):
    kept = []
    for _ in range(3):
        kept += [[i] for i in range(20_000)]
        assert num_seen() >= 20_000
        gc.collect()
        assert num_seen() < 2_000
    del kept[:]  # freed without a collection
    gone = weakref.ref(Node())
    assert gone() is not None
    gc.collect()
    assert gone() is None  # a new cycle is found


@pytest.mark.parametrize("collector", [False, True], indirect=True)
def test_old_cycles_are_found_at_a_calm_moment_or_late(collector, monkeypatch):
    monkeypatch.setattr(spare_collector, "_UNTIL_ALL", 2)
    monkeypatch.setattr(spare_collector, "_UNTIL_ALL_AT_LAST", 4)
    node = Node()
    gone = weakref.ref(node)
    gc.collect()
    del node
    rounds = 0
    while gone() is not None:
        gc.collect()
        rounds += 1
    assert rounds == (2 if collector._is_calm() else 4)


def test_a_closed_connection_is_freed_without_a_collection():
    engine = FakeEngine(fake_model().tokenizer)
    engine.holds_at = 1
    with serving(engine) as server:
        for num_chunked in range(2):
            raw = post_bytes("/v1/completions", {"prompt": "a", "stream": True, "max_tokens": 9})
            if num_chunked:
                head, _, body = raw.partition(b"\r\n\r\n")
                lines = [x for x in head.split(b"\r\n") if not x.startswith(b"Content-Length")]
                head = b"\r\n".join([*lines, b"Transfer-Encoding: chunked"])
                raw = head + b"\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
            gc.collect()
            gc.disable()
            try:
                connection = server.connect(raw)
                assert connection.recv(1000).startswith(b"HTTP/1.1 200")
                (made,) = server.uvicorn.server_state.connections
                of_request = [weakref.ref(x) for x in (made, made.cycle, made.transport)]
                del made
                connection.close()
                eventually(lambda refs=of_request: not any(ref() for ref in refs))
            finally:
                gc.enable()
