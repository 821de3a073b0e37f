"""What the prefix cache tells of: names of pages that add up to what it has."""

import array
import asyncio
import hashlib
import json
import random

import pytest

from jax_attn.serve._scheduling.cache_events import CacheEvent, SharedEvents
from jax_attn.serve._scheduling.host_tier import HostTier, Moves
from jax_attn.serve._scheduling.pages import PageAllocator
from jax_attn.serve._scheduling.prefix_cache import RadixCache


def packed(tokens) -> bytes:
    return array.array("i", tokens).tobytes()


def names(tokens, page_size, namespace="") -> list[str]:
    """The names of a text's pages, as documented."""
    digest = lambda data: hashlib.blake2b(data, digest_size=8).digest()  # noqa: E731
    before, found = digest(namespace.encode()) if namespace else b"", []
    for begin in range(0, len(tokens) - page_size + 1, page_size):
        before = digest(before + packed(tokens[begin : begin + page_size]))
        found.append(before.hex())
    return found


class Follower:
    """The pages that a cache has, by its events."""

    def __init__(self):
        self.pages = {}  # name -> the one before it

    def see(self, events):
        for kind, _, parent, pages in events:
            if kind == "cleared":
                self.pages = {}
            for before, page in zip((parent, *pages), pages, strict=False):
                if kind == "stored":
                    assert page not in self.pages and before in ("", *self.pages)
                    self.pages[page] = before
                else:
                    assert self.pages.pop(page) == before


def cached(cache) -> set[str]:
    found, texts = set(), {0: ()}
    for view in cache.walk():
        if view.parent is not None:
            tokens = (*texts[view.parent], *array.array("i", view.key))
            texts[view.id] = tokens
            found |= set(names(tokens, cache.page_size, view.namespace))
    return found


@pytest.mark.parametrize("num_host_pages", [0, 30])
def test_events_add_up_to_what_is_cached(num_host_pages):
    rng, size = random.Random(0), 2
    allocator, host = (
        PageAllocator(60),
        HostTier(num_host_pages, Moves()) if num_host_pages else None,
    )
    cache, early, late = RadixCache(allocator, size, host=host), Follower(), Follower()
    cache.watch(True)
    for step in range(400):
        tokens = [rng.randrange(2) for _ in range(size * rng.randrange(1, 7))]
        num_pages = len(tokens) // size
        cache.evict(max(0, num_pages - allocator.num_free))
        pages = allocator.allocate(num_pages)
        namespace = rng.choice(["", "a"])
        allocator.free(cache.insert(namespace, packed(tokens), pages).duplicates)
        if step == 200:
            early.see(cache.take_events())
            cache.watch(True)  # for another reader
        if step % 7 == 0:
            events = cache.take_events()
            early.see(events)
            late.see(events if step >= 200 else [])
            assert set(early.pages) == cached(cache)
    assert early.pages == late.pages
    assert host is None or host.num_stored > 100
    cache.clear()
    early.see(cache.take_events())
    assert not early.pages
    cache.watch(False)
    cache.insert("", packed([1] * size), allocator.allocate(1))
    assert cache.take_events() == []


def test_events_of_several_caches_add_up_to_what_one_of_them_has():
    rng, size = random.Random(0), 2
    shared, follower = SharedEvents(), Follower()
    assert shared.add(0, [CacheEvent("stored", "", "", ("of an earlier reader",))]) == []
    follower.see([CacheEvent("cleared")])
    allocators = [PageAllocator(20) for _ in range(3)]
    caches = [RadixCache(allocator, size) for allocator in allocators]
    for cache in caches:
        cache.watch(True)
    alive = [0, 1, 2]
    for step in range(300):
        index = rng.choice(alive)
        tokens = [rng.randrange(2) for _ in range(size * rng.randrange(1, 5))]
        caches[index].evict(max(0, len(tokens) // size - allocators[index].num_free))
        pages = allocators[index].allocate(len(tokens) // size)
        allocators[index].free(caches[index].insert("", packed(tokens), pages).duplicates)
        follower.see(shared.add(index, caches[index].take_events()))
        if step == 200:
            alive = [0, 2]
            follower.see(shared.remove(1))
        if step % 10 == 0 and step > 20:
            assert set(follower.pages) == set().union(*(cached(caches[i]) for i in alive))


def test_the_names_of_a_text():
    cache = RadixCache(PageAllocator(4), 2)
    cache.watch(True)
    cache.insert("", packed([1, 2, 3, 4]), [0, 1])
    first, second = names([1, 2, 3, 4], 2)
    assert cache.take_events()[1] == CacheEvent("stored", "", "", (first, second))
    cache.insert("", packed([1, 2, 5, 6]), [0, 2])
    (_, third) = names([1, 2, 5, 6], 2)
    assert cache.take_events() == [CacheEvent("stored", "", first, (third,))]


def test_pages_of_pictures_and_behind_them_have_no_names():
    """Their keys hold numbers that mean something to one engine alone."""
    allocator = PageAllocator(8)
    cache = RadixCache(allocator, 2)

    def insert(tokens):
        pages = allocator.allocate(len(tokens) // 2)
        allocator.free(cache.insert("", packed(tokens), pages).duplicates)

    cache.watch(True)
    insert([1, 2, 3, -1, 5, 6])
    (first,) = names([1, 2], 2)
    assert cache.take_events()[1:] == [CacheEvent("stored", "", "", (first,))]
    insert([1, 2, 3, -1, 7, 8])
    insert([-1, -1])
    assert cache.take_events() == []
    cache.watch(True)
    assert cache.take_events()[1:] == [CacheEvent("stored", "", "", (first,))]
    cache.evict(5)
    assert cache.take_events() == [CacheEvent("evicted", "", "", (first,))]


def test_over_http():
    pytest.importorskip("starlette", reason="needs the extra `serve`")
    from helpers.serve.live_server import KEYS, OPERATOR_KEY, eventually, serving

    operators = {"Authorization": f"Bearer {OPERATOR_KEY}"}
    with serving(api_keys=KEYS, operator_keys=(OPERATOR_KEY,)) as server:
        path = "/debug/cache_events"
        refused = server.get(path, Authorization=f"Bearer {KEYS[0]}")
        assert refused.status == 403 and path in refused.error["message"]
        head = (
            f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {operators['Authorization']}"
        )
        with server.connect(f"{head}\r\n\r\n".encode()) as connection:
            eventually(lambda: server.engine.watches == [True])
            server.engine.on_cache_events(
                [CacheEvent("cleared"), CacheEvent("stored", "", "ab", ("cd",))]
            )
            raw = b""
            while b'"cd"' not in raw:
                raw += connection.recv(1 << 16)
        text = raw.decode()
        assert "text/event-stream" in text and "event: cleared\ndata: {}" in text
        data = text.partition("event: stored\ndata: ")[2].splitlines()[0]
        assert json.loads(data) == {"namespace": "", "parent": "ab", "pages": ["cd"]}
        eventually(lambda: server.engine.watches == [True, False])


def test_from_an_engine(model):
    """A real engine in its thread tells of a prompt's pages, which another prompt then shares."""
    pytest.importorskip("llguidance", reason="needs the extra `serve`")
    from jax_attn.serve._engine.async_engine import AsyncEngine
    from jax_attn.serve._engine.engine_config import EngineConfig
    from jax_attn.serve._scheduling.request import SamplingParams, Sequence

    prompt = list(range(5, 29))

    async def run():
        config = EngineConfig(num_pages=16, page_size=8, max_running=1, max_step_tokens=32)
        engine, follower = AsyncEngine(model, config), Follower()
        engine.on_cache_events = follower.see
        engine.watch_cache(True)
        engine.start()
        seq = Sequence("s", "s", list(prompt), SamplingParams(max_tokens=2))
        async for _ in engine.generate([seq]):
            pass
        await engine.stop(drain=True)
        return follower

    assert set(names(prompt, 8)) <= set(asyncio.run(run()).pages)
