"""The radix cache against a dictionary that knows every page by all tokens up to its end."""

import dataclasses
import itertools
import random
from array import array

import pytest

from helpers.serve.fake_device import nodes
from jax_attn.serve._scheduling.host_tier import HostTier, Moves
from jax_attn.serve._scheduling.pages import PageAllocator
from jax_attn.serve._scheduling.prefix_cache import Match, Node, RadixCache


def pack(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


@dataclasses.dataclass
class OraclePage:
    page: int  # of the device; on the host: any, see `contents`
    last_access: int
    locks: int = 0
    num_children: int = 0
    num_below: int = 0  # of them, those on the device
    on_host: bool = False


class Oracle:
    """The cache's contract, one page at a time."""

    def __init__(self, page_size: int, num_host_pages: int = 0):
        self.page_bytes = 4 * page_size
        self.num_host_pages = num_host_pages
        self.stored: list[int] = []  # pages of the device, in the order in which they went
        self.known: dict[tuple[str, bytes], OraclePage] = {}
        self.clock = 0

    def path(self, namespace: str, key: bytes) -> list[tuple[str, bytes]]:
        """Names of the full pages of `key`."""
        ends = range(self.page_bytes, len(key) + 1, self.page_bytes)
        return [(namespace, key[:end]) for end in ends]

    def cached(self, namespace: str, key: bytes) -> list[tuple[str, bytes]]:
        found = []
        for name in self.path(namespace, key):
            if name not in self.known or self.known[name].on_host:
                break
            found.append(name)
        return found

    def on_host(self, namespace: str, key: bytes) -> list[tuple[str, bytes]]:
        """The names that follow those of `cached`, on the host."""
        rest = self.path(namespace, key)[len(self.cached(namespace, key)) :]
        known = itertools.takewhile(self.known.__contains__, rest)
        return list(known)

    def to_device(self, name: tuple[str, bytes], page: int) -> None:
        entry = self.known[name]
        entry.page, entry.on_host = page, False
        if parent := self.parent(name):
            parent.num_below += 1

    def parent(self, name: tuple[str, bytes]) -> OraclePage | None:
        return self.known.get((name[0], name[1][: -self.page_bytes]))

    def touch(self, names: list[tuple[str, bytes]]) -> None:
        self.clock += 1
        for name in names:
            self.known[name].last_access = self.clock

    def insert(self, namespace: str, key: bytes, pages: list[int]) -> list[int]:
        names = self.path(namespace, key)
        duplicates = []
        for i, (name, page) in enumerate(zip(names, pages, strict=True)):
            if name in self.known and self.known[name].on_host:
                self.to_device(name, page)
            elif name in self.known:
                if self.known[name].page != page:
                    duplicates.append(page)
            else:
                self.known[name] = OraclePage(page, 0)
                if i:
                    self.known[names[i - 1]].num_children += 1
                    self.known[names[i - 1]].num_below += 1
        self.touch(names)
        return duplicates

    def evict(self, num_pages: int) -> int:
        for num_evicted in range(num_pages):
            ends = [
                (entry.last_access, name)
                for name, entry in self.known.items()
                if not (entry.locks or entry.num_below or entry.on_host)
            ]
            if not ends:
                return num_evicted
            name = min(ends)[1]
            if self.has_room(self.known[name].last_access):
                self.known[name].on_host = True
                self.stored.append(self.known[name].page)
            else:
                self.remove(name)
            if parent := self.parent(name):
                parent.num_below -= 1
        return num_pages

    def has_room(self, last_access: int) -> bool:
        """Makes room for a page on the host, if none there is as old as that."""
        there = {name: entry for name, entry in self.known.items() if entry.on_host}
        if len(there) < self.num_host_pages:
            return True
        ends = ((e.last_access, n) for n, e in there.items() if not (e.num_children or e.locks))
        oldest = min(ends, default=None)
        if oldest is None or oldest[0] > last_access:
            return False
        self.remove(oldest[1])
        return True

    def remove(self, name: tuple[str, bytes]) -> None:
        if parent := self.parent(name):
            parent.num_children -= 1
        del self.known[name]


def contents(cache: RadixCache) -> dict[tuple[str, bytes], tuple[int, int, int]]:
    """(page, last_access, locks) by (namespace, all tokens). Page -1: it is on the host."""
    found = {}
    stack = [("", b"", cache._root)]
    while stack:
        namespace, prefix, node = stack.pop()
        for i, page in enumerate(node.pages):
            name = namespace, prefix + node.key[: 4 * cache.page_size * (i + 1)]
            found[name] = -1 if node.on_host else page, node.last_access, node.locks
        for child_key, child in node.children.items():
            below = child_key[0] if isinstance(child_key, tuple) else namespace
            stack.append((below, prefix + node.key, child))
    return found


class Machine:
    """Random operations on a cache and its oracle, compared in full after each."""

    def __init__(self, seed: int, page_size: int, num_pages: int, num_host_pages: int = 0):
        self.rng = random.Random(seed)
        self.allocator = PageAllocator(num_pages)
        self.host = HostTier(num_host_pages, Moves()) if num_host_pages else None
        self.cache = RadixCache(self.allocator, page_size, host=self.host)
        self.oracle = Oracle(page_size, num_host_pages)
        self.num_returned = 0
        self.locked: list[tuple[Node, list[tuple[str, bytes]]]] = []
        self.num_pages, self.page_size = num_pages, page_size

    def run(self, num_operations: int) -> None:
        operations = [self.match, self.insert, self.evict, self.unlock]
        for _ in range(num_operations):
            self.rng.choices(operations, (4, 4, 1, 3))[0]()
            self.check()

    def key(self) -> tuple[str, bytes]:
        rng, page_size = self.rng, self.page_size
        # One of two tokens at each position, with unequal odds: long common prefixes and many
        # splits.
        num_tokens = rng.randrange(6 * page_size)
        tokens = [int(rng.random() < 0.2) for _ in range(num_tokens)]
        return rng.choice("aab"), pack(*tokens)

    def match(self) -> None:
        namespace, key = self.key()
        names = self.oracle.cached(namespace, key)
        assert self.cache.peek(namespace, key) == len(names)
        on_host = self.oracle.on_host(namespace, key)
        match = self.cache.match(namespace, key)
        self.oracle.touch(names + on_host)
        assert match.pages == [self.oracle.known[name].page for name in names]
        assert match.num_tokens == len(names) * self.page_size
        assert match.num_on_host == len(on_host)
        if len(self.locked) < 4:
            node = match.node
            if self.rng.random() < 0.5 and self.bring_back(match, on_host):
                names, node = names + on_host, match.host_node
            self.cache.lock(node)
            for name in names:
                self.oracle.known[name].locks += 1
            self.locked.append((node, names))

    def bring_back(self, match: Match, on_host: list[tuple[str, bytes]]) -> bool:
        """Brings the part on the host back, if there is room. No page of the path may go."""
        self.cache.lock(match.host_node)
        names = self.oracle.path(*on_host[-1]) if on_host else []
        path = [self.oracle.known[name] for name in names]
        for entry in path:
            entry.locks += 1
        self.evict(max(0, len(on_host) - self.allocator.num_free))
        pages = self.allocator.allocate(len(on_host)) if on_host else None
        if pages is not None:
            there = [*self.host.allocator.allocated()]
            self.host.moves.take()
            self.cache.bring_back(match.host_node, pages)
            moves = self.host.moves.take()
            assert [move.page for move in moves] == pages and not any(m.to_host for m in moves)
            assert all(there[move.host_page] for move in moves), "a page that nobody stored"
            self.num_returned += len(pages)
            for name, page in zip(on_host, pages, strict=True):
                self.oracle.to_device(name, page)
        self.cache.unlock(match.host_node)
        for entry in path:
            entry.locks -= 1
        return pages is not None

    def unlock(self) -> None:
        if self.locked:
            node, names = self.locked.pop(self.rng.randrange(len(self.locked)))
            self.cache.unlock(node)
            for name in names:
                self.oracle.known[name].locks -= 1

    def insert(self) -> None:
        """Inserts as a sequence does: uses what is cached, or computes some of it again."""
        namespace, key = self.key()
        names = self.oracle.path(namespace, key)
        cached = [self.oracle.known[n].page for n in self.oracle.cached(namespace, key)]
        num_reused = self.rng.randint(0, len(cached))
        match = self.cache.match(namespace, key[: num_reused * 4 * self.page_size])
        assert not match.num_on_host
        self.oracle.touch(names[:num_reused])
        self.cache.lock(match.node)
        for name in names[:num_reused]:
            self.oracle.known[name].locks += 1
        num_new = len(names) - num_reused
        self.evict(max(0, num_new - self.allocator.num_free))
        pages = self.allocator.allocate(num_new)
        if pages is not None:
            key = key[: len(names) * 4 * self.page_size]
            inserted = self.cache.insert(namespace, key, cached[:num_reused] + pages)
            duplicates = self.oracle.insert(namespace, key, cached[:num_reused] + pages)
            assert inserted.duplicates == duplicates
            assert inserted.pages == [self.oracle.known[name].page for name in names]
            self.allocator.free(duplicates)
        self.cache.unlock(match.node)
        for name in names[:num_reused]:
            self.oracle.known[name].locks -= 1

    def evict(self, num_pages: int | None = None) -> None:
        if num_pages is None:
            num_pages = self.rng.randrange(4)
        assert self.cache.evict(num_pages) == self.oracle.evict(num_pages)
        if self.host is not None:
            stored = [move.page for move in self.host.moves.take() if move.to_host]
            assert set(stored) <= set(self.oracle.stored), "what was forgotten at once is not moved"
            self.oracle.stored.clear()

    def check(self) -> None:
        self.cache.check_integrity()
        self.allocator.check_integrity()
        known = self.oracle.known
        assert contents(self.cache) == {
            name: (-1 if entry.on_host else entry.page, entry.last_access, entry.locks)
            for name, entry in known.items()
        }
        on_device = [entry for entry in known.values() if not entry.on_host]
        assert self.cache.num_cached == len(on_device)
        assert self.cache.num_evictable == sum(not entry.locks for entry in on_device)
        assert self.cache.num_cached + self.allocator.num_free == self.num_pages


SHAPES = [(1, 12), (2, 12), (3, 24), (16, 40)]  # page_size, num_pages


@pytest.mark.parametrize("page_size, num_pages", SHAPES)
def test_random_operations_against_the_oracle(page_size, num_pages):
    Machine(1, page_size, num_pages).run(30_000)


@pytest.mark.parametrize("page_size, num_pages, num_host_pages", [(1, 12, 9), (3, 20, 40)])
def test_random_operations_with_a_host_tier(page_size, num_pages, num_host_pages):
    machine = Machine(2, page_size, num_pages, num_host_pages)
    machine.run(4_000)
    assert machine.num_returned > 100
    machine.cache.clear()
    machine.cache.check_integrity()
    assert machine.host.counts()["cached"] == 0 or machine.locked


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page_size, num_pages", SHAPES)
def test_many_random_operations(page_size, num_pages):
    for seed in range(8):
        Machine(seed, page_size, num_pages).run(10_000)


def make(page_size: int = 2, num_pages: int = 20) -> tuple[PageAllocator, RadixCache]:
    allocator = PageAllocator(num_pages)
    return allocator, RadixCache(allocator, page_size)


def put(cache: RadixCache, *tokens: int, namespace: str = "") -> list[int]:
    """Inserts tokens in new pages, and returns what the cache holds for them."""
    pages = cache._allocator.allocate(len(tokens) // cache.page_size)
    inserted = cache.insert(namespace, pack(*tokens), pages)
    cache._allocator.free(inserted.duplicates)
    return inserted.pages


def test_a_node_splits_at_page_borders_only():
    allocator, cache = make()
    first = put(cache, 1, 2, 3, 4, 5, 6)
    second = put(cache, 1, 2, 3, 9, 5, 6)  # differs within the second page
    assert first[0] == second[0]
    assert not set(first[1:]) & set(second[1:])
    assert cache.num_cached == 5
    assert allocator.num_free == 15  # the duplicate of the first page came back
    lengths = sorted(len(node.pages) for node in nodes(cache))
    assert lengths == [0, 1, 2, 2]
    match = cache.match("", pack(1, 2, 3, 4, 8))
    assert match.pages == first[:2] and match.num_tokens == 4
    cache.check_integrity()


def test_partial_pages_never_match():
    _, cache = make(page_size=4)
    put(cache, 1, 2, 3, 4, 5, 6, 7, 8)
    assert cache.match("", pack(1, 2, 3)).num_tokens == 0
    assert cache.match("", pack(1, 2, 3, 4, 5, 6, 7)).num_tokens == 4
    assert cache.match("", pack(1, 2, 3, 4, 5, 6, 7, 8, 9)).num_tokens == 8
    assert cache.match("", b"").num_tokens == 0


def test_namespaces_share_nothing():
    allocator, cache = make()
    mine = put(cache, 1, 2, 3, 4, namespace="mine")
    assert cache.peek("yours", pack(1, 2, 3, 4)) == 0
    assert cache.match("", pack(1, 2, 3, 4)).pages == []
    yours = put(cache, 1, 2, 3, 4, namespace="yours")
    assert not set(mine) & set(yours)
    assert cache.match("mine", pack(1, 2, 3, 4)).pages == mine
    assert {view.namespace for view in cache.walk() if view.num_pages} == {"mine", "yours"}
    assert cache.evict(4) == 4
    assert [view.num_pages for view in cache.walk()] == [0]  # no trace of the namespaces


def test_partial_pages_are_found_whatever_other_namespaces_have():
    """Only so many pages are compared, but those of others do not count."""
    _, cache = make(num_pages=300, page_size=4)
    for i in range(100):
        put(cache, 1, 2, 3, 100 + i, namespace="yours")
    (page,) = put(cache, 1, 2, 3, 4, namespace="mine")
    root = cache.match("mine", b"").node
    assert cache.partial_page("mine", root, pack(1, 2, 3, 9)) == (page, 3)
    assert cache.partial_page("nobody's", root, pack(1, 2, 3, 9)) is None
    cache.check_integrity()


def test_the_least_recently_used_end_goes_first():
    _, cache = make()
    put(cache, 1, 1, 2, 2)
    put(cache, 1, 1, 3, 3)
    put(cache, 4, 4)
    cache.match("", pack(1, 1, 2, 2))
    assert cache.evict(1) == 1
    assert cache.peek("", pack(1, 1, 3, 3)) == 1
    assert cache.evict(1) == 1
    assert cache.peek("", pack(4, 4)) == 0
    assert cache.evict(1) == 1  # now the branch that was matched, from its end
    assert cache.peek("", pack(1, 1, 2, 2)) == 1
    assert cache.evict(9) == 1


def test_a_peek_is_no_access():
    _, cache = make()
    put(cache, 1, 1)
    put(cache, 2, 2)
    cache.peek("", pack(1, 1))
    cache.evict(1)
    assert cache.peek("", pack(1, 1)) == 0
    assert cache.peek("", pack(2, 2)) == 1


@pytest.mark.parametrize("num_pages", [2, 1])
def test_other_threads_may_look_while_pages_are_evicted(monkeypatch, num_pages):
    allocator = PageAllocator(2)
    cache = RadixCache(allocator, 1, PageAllocator(1))
    cache.insert("", pack(1, 2), allocator.allocate(2))
    walk = cache._walk

    def evicted(*args):
        found = walk(*args)
        cache.evict(2)
        return found

    monkeypatch.setattr(cache, "_walk", evicted)
    assert cache.num_known_pages("", pack(1, 2, 3)[: 4 * num_pages]) == 0


def test_a_lock_holds_the_node_itself_and_all_above_it():
    allocator, cache = make()
    put(cache, 1, 1, 2, 2, 3, 3)
    put(cache, 1, 1, 9, 9)
    match = cache.match("", pack(1, 1, 2, 2))
    cache.lock(match.node)
    assert cache.num_evictable == 2
    assert cache.evict(20) == 2  # [3, 3] below and [9, 9] beside
    assert cache.match("", pack(1, 1, 2, 2)).pages == match.pages
    cache.unlock(match.node)
    assert cache.num_evictable == 2
    assert cache.evict(20) == 2
    assert allocator.num_free == 20
    cache.check_integrity()


def test_a_lock_survives_a_split_of_its_node():
    _, cache = make()
    put(cache, 1, 1, 2, 2, 3, 3)
    match = cache.match("", pack(1, 1, 2, 2, 3, 3))
    cache.lock(match.node)
    cache.match("", pack(1, 1, 2, 2, 7, 7))
    put(cache, 1, 1, 5, 5)
    assert cache.evict(20) == 1
    assert cache.match("", pack(1, 1, 2, 2, 3, 3)).pages == match.pages
    cache.unlock(match.node)
    cache.check_integrity()
    assert cache.evict(20) == 3


def test_locks_count_and_are_never_negative():
    _, cache = make()
    put(cache, 1, 1, 2, 2)
    node = cache.match("", pack(1, 1, 2, 2)).node
    upper = cache.match("", pack(1, 1)).node
    cache.lock(node)
    cache.lock(node)
    cache.unlock(node)
    assert cache.evict(2) == 0
    with pytest.raises(ValueError, match="expected a lock on it"):
        cache.unlock(upper)  # locked from below only
    cache.unlock(node)
    with pytest.raises(ValueError, match="expected a lock on it"):
        cache.unlock(node)
    cache.check_integrity()
    assert cache.evict(2) == 2
    with pytest.raises(ValueError, match="was evicted"):
        cache.lock(node)


def test_a_state_of_the_host_stays_while_those_above_make_room_for_it():
    pages, states = PageAllocator(3), PageAllocator(2)
    cache = RadixCache(pages, 1, states, HostTier(3, Moves(), num_states=1))
    kept = pages.allocate(3)

    def put(num_pages: int) -> Node:
        node = cache.insert("", pack(*range(num_pages)), kept[:num_pages]).node
        assert cache.put_state(node, states.allocate(1)[0])
        return node

    deepest = put(3)
    assert cache.evict_state() and deepest.host_state >= 0
    put(1)
    put(2)
    cache.lock(cache.match("", pack(0, 1, 2)).host_node)
    assert cache.bring_back_state(deepest) and deepest.state >= 0
    cache.check_integrity()


def test_insert_refuses_partial_pages_and_page_lists_of_other_lengths():
    allocator, cache = make()
    pages = allocator.allocate(2)
    for tokens in [(1, 2, 3), (1, 2), (1, 2, 3, 4, 5), ()]:
        with pytest.raises(ValueError, match="insert: key: expected 4 tokens for 2 pages"):
            cache.insert("", pack(*tokens), pages)
    assert cache.num_cached == 0


def test_tokens_of_any_int32():
    _, cache = make(page_size=1)
    tokens = [0, -1, 2**31 - 1, -(2**31), 255, 256]
    pages = put(cache, *tokens)
    assert cache.match("", pack(*tokens)).pages == pages
    assert cache.match("", pack(*tokens[1:])).pages == []


def test_long_prompts_are_split_where_they_part():
    """Splits a long node at every border once: the bisection must be right at each of them."""
    for border in range(1, 67):
        _, cache = make(page_size=3, num_pages=140)
        tokens = list(range(3 * 67))
        pages = put(cache, *tokens)
        other = [*tokens[: 3 * border + 1], -1, -1, *tokens[3 * border + 3 :]]
        match = cache.match("", pack(*other))
        assert match.pages == pages[:border]
        cache.check_integrity()


def break_locks(cache: RadixCache, node: Node) -> None:
    node.locks -= 1


def break_holders(cache: RadixCache, node: Node) -> None:
    node.holders, node.locks = -1, node.locks - 1


def break_pages(cache: RadixCache, node: Node) -> None:
    node.pages = [*node.pages[:-1], node.pages[0]]


def break_free(cache: RadixCache, node: Node) -> None:
    cache._allocator.free(node.pages[-1:])


def break_key(cache: RadixCache, node: Node) -> None:
    node.key = node.key[:-4]


def break_cached(cache: RadixCache, node: Node) -> None:
    cache.num_cached += 1


def break_evictable(cache: RadixCache, node: Node) -> None:
    cache.num_evictable -= 1


def break_parent(cache: RadixCache, node: Node) -> None:
    node.parent = node


def break_heap(cache: RadixCache, node: Node) -> None:
    cache._on_device.heap.clear()
    cache._on_device.queued.clear()


def break_clock(cache: RadixCache, node: Node) -> None:
    node.last_access += 100


@pytest.mark.parametrize(
    "break_it",
    [
        break_locks,
        break_holders,
        break_pages,
        break_free,
        break_key,
        break_cached,
        break_evictable,
        break_parent,
        break_heap,
        break_clock,
    ],
)
def test_integrity_check_sees(break_it):
    _, cache = make()
    put(cache, 1, 1, 2, 2, 3, 3)
    put(cache, 1, 1, 4, 4, 5, 5)
    node = cache.match("", pack(1, 1, 2, 2, 3, 3)).node
    cache.check_integrity()
    break_it(cache, node)
    with pytest.raises(AssertionError):
        cache.check_integrity()


def test_walk_shows_the_tree():
    _, cache = make()
    put(cache, 1, 1, 2, 2, namespace="a")
    put(cache, 1, 1, 3, 3, namespace="a")
    cache.lock(cache.match("a", pack(1, 1, 2, 2)).node)
    views = list(cache.walk())
    assert views[0].parent is None and views[0].id == 0
    shown = {view.id for view in views[:1]}
    for view in views[1:]:
        assert view.parent in shown  # parents first
        shown.add(view.id)
    assert sorted((view.num_pages, view.locks, view.holders) for view in views) == [
        (0, 1, 0),
        (1, 0, 0),
        (1, 1, 0),
        (1, 1, 1),
    ]


def test_many_chunks_make_a_path_that_matches_at_once():
    allocator, cache = make(page_size=4, num_pages=300)
    tokens = list(range(4 * 256))
    pages: list[int] = []
    for end in range(16, 257, 16):
        pages += allocator.allocate(16)
        inserted = cache.insert("", pack(*tokens[: 4 * end]), list(pages))
        assert inserted.pages == pages and not inserted.duplicates
    assert cache.match("", pack(*tokens)).pages == pages
    cache.check_integrity()
