"""Maps tokens to pages of the kv cache: RadixAttention's tree, in whole pages.

Source: "SGLang: Efficient Execution of Structured Language Model Programs", section
"RadixAttention": a radix tree from token sequences to kv, leaf-first LRU eviction, reference counts
for running sequences. Here every edge is a whole number of pages: a node splits only between pages,
and a page belongs to exactly one node. A page that agrees with a prompt in its first tokens only
is shared by copy-on-write (`partial_page`). A page that is not full stays with the sequence that
writes it.

Tokens are packed, 4 bytes each (`Sequence.key`), so comparing a whole edge is one memcmp.

A model with recurrent layers goes on from a state, not from pages alone. Then a node may have a
checkpoint: the slot of the states after all tokens up to its end. A match ends at the deepest node
with one. States and pages are of different memory and are evicted separately; but a node that loses
its last pages loses its state, too.

With a host tier (`host_tier`) a page that leaves the device goes to the host, and its node stays in
the tree. A node is on the device or on the host as a whole, and all below one on the host are there
too: so a path is a part on the device, then a part on the host. So do the states of a node: that of
one on the host is there, too, and that of one on the device may be.

With files behind the host (`files`) what leaves the host's memory is written there, and leaves the
tree. What is read again comes back as nodes on the host.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, KeysView
from typing import Any, Literal, NamedTuple, TypeAlias

from jax_attn.serve._scheduling.cache_events import CacheEvent, CacheLog
from jax_attn.serve._scheduling.file_tier import FileTier
from jax_attn.serve._scheduling.host_tier import HostTier
from jax_attn.serve._scheduling.pages import PageAllocator

# Children of a node that are compared with the tokens after a match, the oldest first: there may be
# thousands below the root. They are of one namespace, whatever others have cached.
_PARTIAL_LOOKUPS = 64
# The least part of a page that is worth a copy. All prompts may begin with the same token.
_LEAST_PART = 1 / 4

# A child is found by its first page; below the root, where namespaces part, by (namespace, page).
_ChildKey: TypeAlias = bytes | tuple[str, bytes]


class Node:
    """An edge of the tree and the node at its end. Callers may read and lock; the cache writes."""

    __slots__ = (
        "serial", "parent", "child_key", "children", "num_below", "key", "pages", "on_host",
        "holders", "locks", "last_access", "state", "host_state", "state_holders",
    )  # fmt: skip

    def __init__(self, serial: int, child_key: _ChildKey, key: bytes, pages: list[int]):
        self.serial = serial
        self.parent: Node | None = None
        self.child_key = child_key  # key under which the parent finds it
        self.children: dict[_ChildKey, Node] = {}
        self.num_below = 0  # children on the device
        self.key = key  # the packed tokens of `pages`
        self.pages = pages  # of the device, or of the host if `on_host`
        self.on_host = False
        self.holders = 0  # locks on this node itself
        self.locks = 0  # holders, plus the locks on all nodes below
        self.last_access = 0  # the cache's logical clock
        self.state = -1  # slot of the states after the last token of `pages`; -1: no checkpoint
        self.host_state = -1  # that of the host that has them instead
        self.state_holders = 0  # sequences that will read it: it is not evicted


class Match(NamedTuple):
    """The longest cached prefix. It may be evicted until `node` or `host_node` is locked.

    pages, num_tokens, node: the part on the device.
    host_node, num_on_host: where the part on the host ends, and its pages; `node` and 0 without.
      With states, those of host_node may be on the host.
    """

    pages: list[int]
    num_tokens: int
    node: Node
    host_node: Node
    num_on_host: int


class Inserted(NamedTuple):
    """The result of an insertion.

    pages: the cache's pages for the whole key, which a page table should use from now on.
    duplicates: passed pages whose tokens were already cached; the caller must free them.
    """

    node: Node
    pages: list[int]
    duplicates: list[int]


class NodeView(NamedTuple):
    """A node for the live view. The root has id 0, no parent and no pages.

    holders: locks on the node itself. locks: those and the locks on all nodes below.
    """

    id: int
    parent: int | None
    namespace: str
    num_pages: int
    holders: int
    locks: int
    last_access: int
    key: bytes  # the packed tokens of its pages
    on_host: bool


class _Ends:
    """Nodes whose last pages may be evicted, the least recently accessed first.

    Each is once in the heap. Entries go stale when a node is accessed, or may not be evicted any
    more; `first` corrects them when they come up.
    """

    def __init__(self, may_go: Callable[[Node], bool]):
        self._may_go = may_go
        self.heap: list[tuple[int, int, Node]] = []  # (last_access, serial, node)
        self.queued: set[Node] = set()

    def offer(self, node: Node) -> None:
        """Queues a node if it may be evicted."""
        if node not in self.queued and self._may_go(node):
            self.queued.add(node)
            heapq.heappush(self.heap, (node.last_access, node.serial, node))

    def first(self) -> Node | None:
        """The one to evict next; None: there is none."""
        while self.heap:
            last_access, _, node = self.heap[0]
            if not self._may_go(node):
                heapq.heappop(self.heap)
                self.queued.discard(node)
            elif last_access != node.last_access:
                heapq.heapreplace(self.heap, (node.last_access, node.serial, node))
            else:
                return node
        return None


def _ends_on_device(node: Node) -> bool:
    is_in_tree = node.parent is not None  # and is not the root
    return is_in_tree and not (node.on_host or node.locks or node.num_below)


def _ends_on_host(node: Node) -> bool:
    return node.parent is not None and node.on_host and not (node.locks or node.children)


class RadixCache:
    """Pages by their tokens. The cache owns inserted pages until it evicts them.

    Deterministic: time is the number of matches and insertions so far. A match or an insertion
    accesses each page that it passes through. The least recently accessed end of an unlocked branch
    is evicted first.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        page_size: int,
        states: PageAllocator | None = None,
        host: HostTier | None = None,
    ):
        """states: slots of recurrent states; None: the model has none, and pages are enough.
        host: the second tier."""
        if page_size < 1:
            raise ValueError(f"page_size: expected at least 1, got {page_size}")
        self.page_size = page_size
        self.num_cached = 0  # pages on the device
        self.num_evictable = 0  # number of cached pages that nobody locks
        self._allocator, self._states, self._host = allocator, states, host
        self.files: FileTier | None = None  # behind the host
        self._log: CacheLog | None = None  # None: nobody wants to know
        self._with_state: dict[Node, None] = {}  # nodes with a checkpoint on the device
        self._with_host_state: dict[Node, None] = {}  # and on the host
        self._page_bytes = 4 * page_size
        self._num_nodes_made = 0
        self._clock = 0
        self._root = self._make_node(b"", b"", [])
        self._first: dict[str, dict[_ChildKey, Node]] = {}  # its children by namespace
        self._on_device, self._on_host = _Ends(_ends_on_device), _Ends(_ends_on_host)

    def peek(self, namespace: str, key: bytes) -> int:
        """The number of pages that `match` would find on the device. Not an access."""
        node, pages, num_in_node = self._walk(namespace, key)
        if self._states is not None:
            node = self._checkpoint(node, num_in_node, on_device=True)
            return sum(len(each.pages) for each in _path_to(node))
        return len(pages)

    def num_cached_pages(self, namespace: str, key: bytes) -> int:
        """The number of leading pages of `key` that are cached, with or without a state."""
        return len(self._walk(namespace, key)[1])

    def num_known_pages(self, namespace: str, key: bytes, with_state: bool = True) -> int:
        """The number of leading pages of `key` on the device or the host. Not an access.

        with_state: with states: up to some that are cached.

        Other threads may call it; while the tree changes, the number may be wrong.
        """
        node, pages, num_in_node = self._walk(namespace, key)
        if self._states is not None and with_state:
            node = self._checkpoint(node, num_in_node, on_device=False)
            return sum(len(each.pages) for each in _path_to(node))
        num_known, at = len(pages), node.parent if node.on_host else None
        if node.on_host:
            num_known += num_in_node
        while at is not None and at.on_host:
            num_known += len(at.pages)
            at = at.parent
        return num_known

    def match(self, namespace: str, key: bytes, on_device: bool = False) -> Match:
        """Finds the longest cached prefix of `key`, in whole pages; with states, that has one.

        on_device: with states: pages and states there alone. Counts as an access to its pages.
        """
        node, pages, num_in_node = self._walk(namespace, key)
        if self._states is None:
            node = self._split(node, num_in_node)
        else:
            node = self._checkpoint(node, num_in_node, on_device)
            pages = [x for each in _path_to(node) if not each.on_host for x in each.pages]
        self._touch(node)
        on_host = [*_host_part(node)]
        num_on_host = sum(len(each.pages) for each in on_host)
        last = on_host[-1].parent if on_host else node
        assert last is not None
        return Match(pages, len(pages) * self.page_size, last, node, num_on_host)

    def partial_page(self, namespace: str, node: Node, key: bytes) -> tuple[int, int] | None:
        """A page of the device after `node` that begins with tokens of `key`: (page, how many).

        None: there is none with a quarter of a page of them.

        node: of a match, where its part on the device ends. key: the packed tokens that follow. The
        page is the cache's: copy it, before anything that writes it now or later.
        """
        wanted = key[: self._page_bytes]
        best: tuple[int, int] | None = None
        children = node.children
        if node is self._root:
            children = self._first.get(namespace, {})
        for child in itertools.islice(children.values(), _PARTIAL_LOOKUPS):
            if child.on_host:
                continue
            most = min(len(wanted), self._page_bytes) // 4
            num_tokens = num_common(wanted, child.key, most)
            if num_tokens > (0 if best is None else best[1]):
                best = child.pages[0], num_tokens
        return best if best is not None and best[1] >= _LEAST_PART * self.page_size else None

    def insert(self, namespace: str, key: bytes, pages: list[int]) -> Inserted:
        """Gives the cache the pages that hold the tokens of `key`.

        Counts as an access to all of them. They take the place of pages on the host.

        `pages` may begin with pages that the cache returned for the same tokens.

        Raises:
          ValueError: the length of `key` does not match `pages`.
        """
        if len(key) != len(pages) * self._page_bytes:
            raise ValueError(
                f"insert: key: expected {len(pages) * self.page_size} tokens for {len(pages)} "
                f"pages, got {len(key) / 4:g}"
            )
        node, cached, num_in_node = self._walk(namespace, key)
        node = self._split(node, num_in_node)
        duplicates = [page for page, kept in zip(pages, cached) if page != kept]  # noqa: B905
        num_known = len(cached) + sum(len(each.pages) for each in _host_part(node))
        if num_known > len(cached):
            assert self._host is not None
            self._host.allocator.free(self._to_device(node, pages[len(cached) : num_known]))
        if num_known < len(pages):
            begin = num_known * self._page_bytes
            child_key = self._child_key(node, namespace, key, begin)
            leaf = self._make_node(child_key, key[begin:], pages[num_known:])
            self._link(node, leaf)
            node.num_below += 1
            node = leaf
            self.num_cached += len(leaf.pages)
            self.num_evictable += len(leaf.pages)
            if self._log is not None:
                self._log.add("stored", namespace, key, num_known)
        self._touch(node)
        self._offer(node)
        return Inserted(node, cached + pages[len(cached) :], duplicates)

    def bring_back_state(self, node: Node) -> bool:
        """Has the states of a locked node on the device copied to a slot of the device, if they are
        on the host. False: there is no slot."""
        self._check_alive("bring_back_state", node)
        if node.host_state < 0:
            return True
        assert self._host is not None and self._states is not None and node.locks
        if not self._states.num_free and not self.evict_state():
            return False
        # Making room may have put other states there, but never in place of newer ones.
        taken = self._states.allocate(1)
        if taken is None or node.host_state < 0:
            self._states.free(taken or [])
            return False
        self._host.give_back_state(node.host_state, taken[0])
        node.host_state = -1
        del self._with_host_state[node]
        node.state = taken[0]
        self._with_state[node] = None
        return True

    def bring_back(self, node: Node, pages: list[int]) -> None:
        """Has the pages of the host up to `node`, which is locked, copied to pages of the device.

        pages: as many as `Match.num_on_host`. They belong to the cache from now on.
        """
        self._check_alive("bring_back", node)
        assert self._host is not None and node.locks
        self._host.give_back(self._to_device(node, pages), pages)

    def receive(
        self, namespace: str, key: bytes, begin: int, pages: list[Any], states: Any
    ) -> None:
        """Takes pages of `key` from number `begin` on, read from files, to the host, as far as it
        has room; and states after all of `key`, unless they are None.

        They are dropped if the tree has lost the pages before them, or has them already.
        """
        host = self._host
        assert host is not None
        end = begin + len(pages)
        node, _, num_in_node = self._walk(namespace, key[: end * self._page_bytes])
        num_known = self.num_known_pages(namespace, key[: end * self._page_bytes], False)
        if num_known < begin:
            return
        node = self._split(node, num_in_node)
        pages = pages[num_known - begin :]
        self.lock(node)
        self._make_room(host, len(pages), self._clock)
        num_pages = min(len(pages), host.allocator.num_free)
        host_pages = host.allocator.allocate(num_pages)
        self.unlock(node)
        if host_pages:
            first = num_known * self._page_bytes
            own = key[first : first + num_pages * self._page_bytes]
            leaf = self._make_node(self._child_key(node, namespace, own), own, host_pages)
            leaf.on_host = True
            self._link(node, leaf)
            host.receive(host_pages, pages[:num_pages])
            node = leaf
            if self._log is not None:
                self._log.add("stored", namespace, key[: first + len(own)], num_known)
        self._touch(node)
        self._offer(node)
        if states is not None and num_pages == len(pages) and node is not self._root:
            self._receive_state(node, states, host)

    def _receive_state(self, node: Node, states: Any, host: HostTier) -> None:
        if node.state < 0 and node.host_state < 0 and self._take_host_slot(node, host):
            host.receive_state(node.host_state, states)

    def lock(self, node: Node) -> None:
        """Locks `node` and all above it until `unlock(node)`. Locks count."""
        self._check_alive("lock", node)
        node.holders += 1
        at: Node | None = node
        while at is not None:
            if not (at.locks or at.on_host):
                self.num_evictable -= len(at.pages)
            at.locks += 1
            at = at.parent

    def unlock(self, node: Node) -> None:
        """Undoes one `lock(node)`.

        Raises:
          ValueError: the node is not locked.
        """
        self._check_alive("unlock", node)
        if not node.holders:
            raise ValueError(f"unlock: node {node.serial}: expected a lock on it, got none")
        node.holders -= 1
        at: Node | None = node
        while at is not None:
            at.locks -= 1
            if not at.locks:
                self.num_evictable += 0 if at.on_host else len(at.pages)
                self._offer(at)
            at = at.parent

    def evict(self, num_pages: int) -> int:
        """Frees up to num_pages unlocked pages of the device. Returns how many.

        With a host tier they go there, in place of pages that were not accessed later.
        """
        return self._evict(num_pages, self._host)

    def clear(self) -> None:
        """Forgets all pages that are not locked, those on the host too, and moves of pages."""
        self._evict(self.num_cached, None)
        for node in list(self._with_host_state):
            self._drop_host_state(node)
        if self._host is not None:
            self._host.moves.clear()
            num_pages = self._host.allocator.num_pages
            self._make_room(self._host, num_pages, self._clock, keeps=False)

    def _evict(self, num_pages: int, host: HostTier | None) -> int:
        num_freed = 0
        while num_freed < num_pages and (node := self._on_device.first()) is not None:
            freed = self._trim(node, num_pages - num_freed, host)
            self._allocator.free(freed)
            num_freed += len(freed)
        self.num_cached -= num_freed
        self.num_evictable -= num_freed
        return num_freed

    # ---- events ----

    def watch(self, on: bool) -> None:
        """Begins to log events, with all that is cached, or ends it."""
        self._log = CacheLog(self.page_size) if on else None
        stack = list(self._root.children.values()) if self._log is not None else []
        while stack:
            node = stack.pop()
            self._log_pages("stored", node, 0)
            stack += node.children.values()

    def take_events(self) -> list[CacheEvent]:
        return self._log.take() if self._log is not None else []

    def _log_pages(self, kind: Literal["stored", "evicted"], node: Node, begin: int) -> None:
        """Logs the pages of a node from that one on. Those that go to the host are still cached."""
        if self._log is None or begin == len(node.pages):
            return
        namespace, key = self._path(node)
        num_before = len(key) // self._page_bytes - len(node.pages)
        self._log.add(kind, namespace, key, num_before + begin)

    def _path(self, node: Node) -> tuple[str, bytes]:
        """The namespace of a node, and its tokens from the root on."""
        keys = []
        while True:
            keys.append(node.key)
            assert node.parent is not None
            if node.parent is self._root:
                assert isinstance(node.child_key, tuple)
                return node.child_key[0], b"".join(reversed(keys))
            node = node.parent

    def latest_first(self) -> Iterator[tuple[str, bytes, Node]]:
        """All nodes with their namespaces and their tokens from the root on: the most recently used
        first, and each after the nodes above it."""
        nodes, found = list(self._root.children.values()), []
        while nodes:
            node = nodes.pop()
            found.append(node)
            nodes += node.children.values()
        # No node is more recent than its parent, and sorting is stable.
        found.sort(key=lambda node: -node.last_access)
        yield from ((*self._path(node), node) for node in found)

    # ---- checkpoints ----

    @property
    def nodes_with_state(self) -> KeysView[Node]:
        return self._with_state.keys()

    @property
    def num_evictable_states(self) -> int:
        """Checkpoints that nobody holds."""
        return sum(not node.state_holders for node in self._with_state)

    def put_state(self, node: Node, state: int) -> bool:
        """Gives the cache the slot of the states at the end of `node`. False: it has them."""
        self._check_alive("put_state", node)
        if node is self._root or node.state >= 0:
            return False
        self._drop_host_state(node)
        node.state = state
        self._with_state[node] = None
        return True

    def hold_state(self, node: Node) -> None:
        """Keeps the state of a locked node until `release_state`. Holds count."""
        self._check_alive("hold_state", node)
        if node.state < 0 or not node.locks:
            raise ValueError(f"hold_state: node {node.serial}: expected a lock and a state")
        node.state_holders += 1

    def release_state(self, node: Node) -> None:
        """Undoes one `hold_state(node)`."""
        if not node.state_holders:
            raise ValueError(f"release_state: node {node.serial}: expected a hold, got none")
        node.state_holders -= 1

    def evict_state(self) -> bool:
        """Frees the least recently accessed state that nobody holds; its pages stay.

        With a host tier it goes there, if it has room, in place of one that was not accessed later.
        Among several on one path it is the shallowest: a deeper one serves the same requests
        better. Looks at all states: there are some hundred, and a step evicts a few.
        """
        free = [node for node in self._with_state if not node.state_holders]
        if not free:
            return False
        node = min(free, key=self._age)
        self._state_to_host(node)
        self._drop_state(node)
        return True

    def _age(self, node: Node) -> tuple[int, int]:
        return node.last_access, self._depth(node)

    def _drop_state(self, node: Node) -> None:
        if node.state >= 0:
            assert self._states is not None and not node.state_holders
            self._states.free([node.state])
            node.state = -1
            del self._with_state[node]

    def _drop_host_state(self, node: Node) -> None:
        if node.host_state >= 0:
            assert self._host is not None and self._host.states is not None
            self._host.states.free([node.host_state])
            node.host_state = -1
            del self._with_host_state[node]

    def _state_to_host(self, node: Node) -> None:
        """Copies the states of a node to the host, if it takes them."""
        host = self._host
        if host is None or host.states is None or not host.is_open or node.state < 0:
            return
        if self._take_host_slot(node, host):
            host.store_state(node.state, node.host_state)

    def _take_host_slot(self, node: Node, host: HostTier) -> bool:
        """Gives a node a slot of states of the host, if it is worth one."""
        if host.states is None:
            return False
        if not host.states.num_free:
            oldest = min(self._with_host_state, key=self._age)
            # The deeper of two on one path stays: a sequence may be about to bring it back.
            if self._age(oldest) > self._age(node):
                return False
            self._to_files(oldest, [])
            self._drop_host_state(oldest)
        taken = host.states.allocate(1)
        assert taken is not None
        (node.host_state,) = taken
        self._with_host_state[node] = None
        return True

    def _depth(self, node: Node) -> int:
        return 0 if node.parent is None else 1 + self._depth(node.parent)

    def _checkpoint(self, node: Node, num_in_node: int, on_device: bool) -> Node:
        """The deepest node with a checkpoint on the path of `_walk`.

        on_device: on the device; else anywhere. The root: there is none, or it was evicted while
          another thread looks here.
        """
        at: Node | None = node
        if num_in_node < len(node.pages):  # its state is that of its end
            at = node.parent
        while at is not None and at.state < 0 and (on_device or at.host_state < 0):
            at = at.parent
        return self._root if at is None else at

    def walk(self) -> Iterator[NodeView]:
        """All nodes, parents first, for the live view."""
        stack = [("", self._root)]
        while stack:
            namespace, node = stack.pop()
            parent = node.parent.serial if node.parent else None
            counts = len(node.pages), node.holders, node.locks
            more = node.last_access, node.key, node.on_host
            yield NodeView(node.serial, parent, namespace, *counts, *more)
            for child_key, child in node.children.items():
                stack.append((child_key[0] if isinstance(child_key, tuple) else namespace, child))

    def check_integrity(self) -> None:
        """Raises AssertionError unless the tree, its counters and its page ownership are exact."""
        pages: list[int] = []
        host_pages: list[int] = []
        num_evictable = num_states = num_host_states = 0
        for ends in (self._on_device, self._on_host):
            queued = {node: last_access for last_access, _, node in ends.heap}
            assert len(queued) == len(ends.heap), "a node is in the heap twice"
            assert queued.keys() == ends.queued, "the heap has other nodes than it says"
        first = {key: node for of_one in self._first.values() for key, node in of_one.items()}
        assert first == self._root.children, "children of the root by namespace"
        assert all(self._first.values()), "a namespace without children"
        stack = [self._root]
        while stack:
            node = stack.pop()
            what = f"node {node.serial}"
            assert node is self._root or node.pages, f"{what} has no pages"
            assert len(node.key) == len(node.pages) * self._page_bytes, f"{what}: length of the key"
            for ends, may_go in (
                (self._on_device, _ends_on_device(node)),
                (self._on_host, _ends_on_host(node)),
            ):
                assert not may_go or node in ends.queued, f"{what} can be evicted, but never will"
            num_below = sum(not child.on_host for child in node.children.values())
            assert node.num_below == num_below, f"{what}: {node.num_below} children on the device"
            assert not (node.on_host and num_below), f"{what} is on the host, one below it is not"
            below = sum(child.locks for child in node.children.values())
            assert node.holders >= 0, f"{what}: {node.holders} holders"
            assert node.locks == node.holders + below, f"{what}: {node.locks} locks"
            assert (node.state >= 0) == (node in self._with_state), f"{what}: state {node.state}"
            assert node.state < 0 or node.host_state < 0, f"{what}: states twice"
            assert (node.host_state >= 0) == (node in self._with_host_state), f"{what}: host state"
            num_host_states += node.host_state >= 0
            assert not (node.on_host and node.state >= 0), f"{what}: a state without its pages"
            assert not node.state_holders or (node.state >= 0 and node.locks), f"{what}: holders"
            num_states += node.state >= 0
            if node.on_host:
                host_pages += node.pages
            else:
                pages += node.pages
                num_evictable += 0 if node.locks else len(node.pages)
            for child_key, child in node.children.items():
                first_page = child_key[1] if isinstance(child_key, tuple) else child_key
                assert isinstance(child_key, tuple) == (node is self._root), f"{what}: child keys"
                assert child.child_key == child_key, f"{what} has a child by another name"
                assert child.key[: self._page_bytes] == first_page, f"{what}: child keys"
                assert child.parent is node, f"{what} is not the parent of its child"
                assert child.last_access <= node.last_access, f"{what} is older than its child"
                stack.append(child)
        for ends in (self._on_device, self._on_host):
            late = [node for when, _, node in ends.heap if when > node.last_access]
            assert not late, f"node {late[0].serial} is queued too late"
        assert len(set(pages)) == len(pages), "a page is in the tree twice"
        assert all(map(self._allocator.is_allocated, pages)), "a cached page is free"
        assert self.num_cached == len(pages), (self.num_cached, len(pages))
        assert num_states == len(self._with_state), "a state of a node that is not in the tree"
        assert self.num_evictable == num_evictable, (self.num_evictable, num_evictable)
        assert num_host_states == len(self._with_host_state), "a lost state of the host"
        if self._host is None:
            assert not host_pages, "a page on a host that there is not"
            return
        if (slots := self._host.states) is not None:
            slots.check_integrity()
            num_slots = slots.num_free + num_host_states
            assert num_slots == slots.num_pages, "a state of the host is lost"
        held = self._host.allocator
        held.check_integrity()
        assert len(set(host_pages)) == len(host_pages), "a page of the host is in the tree twice"
        assert all(map(held.is_allocated, host_pages)), "a cached page of the host is free"
        assert held.num_free + len(host_pages) == held.num_pages, "a page of the host is lost"

    # ---- the tree ----

    def _walk(self, namespace: str, key: bytes) -> tuple[Node, list[int], int]:
        """Follows `key`. Returns the last node reached, the pages of the device up to it, and the
        number of pages within it."""
        node, pages, num_in_node = self._root, [], 0
        begin = 0
        while begin + self._page_bytes <= len(key):
            child = node.children.get(self._child_key(node, namespace, key, begin))
            if child is None:
                break
            node = child
            if not key.startswith(node.key, begin):
                num_in_node = self._num_common(key, begin, node.key)
                pages += [] if node.on_host else node.pages[:num_in_node]
                break
            num_in_node = len(node.pages)
            pages += [] if node.on_host else node.pages
            begin += len(node.key)
        return node, pages, num_in_node

    def _child_key(self, node: Node, namespace: str, key: bytes, begin: int = 0) -> _ChildKey:
        first_page = key[begin : begin + self._page_bytes]
        return (namespace, first_page) if node is self._root else first_page

    def _num_common(self, key: bytes, begin: int, edge: bytes) -> int:
        """Pages in which `edge` agrees with key[begin:]; the first is known to. A bisection."""
        low, high = 1, len(edge) // self._page_bytes
        while low < high:
            middle = (low + high + 1) // 2
            if key.startswith(edge[: middle * self._page_bytes], begin):
                low = middle
            else:
                high = middle - 1
        return low

    def _split(self, node: Node, num_pages: int) -> Node:
        """Returns the node that ends after the first `num_pages` of `node`: itself or a new parent.

        `node` keeps its end, which its locks refer to.
        """
        if num_pages == len(node.pages):
            return node
        border = num_pages * self._page_bytes
        parent = node.parent
        assert parent is not None
        upper = self._make_node(node.child_key, node.key[:border], node.pages[:num_pages])
        upper.locks, upper.on_host = node.locks, node.on_host
        upper.num_below, upper.last_access = int(not node.on_host), node.last_access
        self._link(parent, upper)
        node.key, node.pages = node.key[border:], node.pages[num_pages:]
        node.child_key = node.key[: self._page_bytes]
        self._link(upper, node)
        return upper

    def _trim(self, node: Node, num_pages: int, host: HostTier | None) -> list[int]:
        """Takes up to `num_pages` from the end of a node that ends on the device.

        host: gets them; None: they are forgotten, with all that is below.
        """
        if host is not None:
            self._state_to_host(node)
        self._drop_state(node)  # it is that of the end
        num_kept = max(0, len(node.pages) - num_pages)
        freed = node.pages[num_kept:]
        if host is not None and self._to_host(node, num_kept, host):
            return freed
        self._forget_below(node)
        self._cut(node, num_kept)
        return freed

    def _cut(self, node: Node, num_pages: int) -> None:
        """Leaves the first num_pages of a node without children; without any it is removed."""
        if num_pages < len(node.pages):
            self._drop_host_state(node)
        self._log_pages("evicted", node, num_pages)
        if num_pages:
            node.pages = node.pages[:num_pages]
            node.key = node.key[: num_pages * self._page_bytes]
            return
        parent = node.parent
        assert parent is not None
        del parent.children[node.child_key]
        if isinstance(node.child_key, tuple):
            namespace, _ = node.child_key
            del self._first[namespace][node.child_key]
            if not self._first[namespace]:
                del self._first[namespace]
        parent.num_below -= not node.on_host
        node.parent = None
        self._offer(parent)

    # ---- the host tier ----

    def _to_host(self, node: Node, num_kept: int, host: HostTier) -> bool:
        """Moves the pages of `node` after the first num_kept to the host, as many as it takes, and
        forgets the others. False: it takes none."""
        if not host.keeps(self.page_size):
            return False
        num_pages = len(node.pages) - num_kept
        self._make_room(host, num_pages, node.last_access)
        num_pages = min(num_pages, host.allocator.num_free)
        host_pages = host.allocator.allocate(num_pages)
        if not host_pages:
            return False
        self._cut(node, num_kept + num_pages)
        pages = node.pages[num_kept:]
        if num_kept:
            self._split(node, num_kept)  # `node` is its end
        host.store(pages, host_pages)
        parent = node.parent
        assert parent is not None
        node.pages, node.on_host = host_pages, True
        parent.num_below -= 1
        self._join(node)
        self._offer(node)
        self._offer(parent)
        return True

    def _join(self, node: Node) -> None:
        """Makes one node of two on the host, or an end that leaves bit by bit would be many."""
        if len(node.children) != 1:
            return
        (child,) = node.children.values()
        if child.locks or child.last_access != node.last_access or node.host_state >= 0:
            return
        if child.host_state >= 0:
            node.host_state, child.host_state = child.host_state, -1
            del self._with_host_state[child]
            self._with_host_state[node] = None
        node.key, node.pages = node.key + child.key, node.pages + child.pages
        node.children, child.parent = child.children, None
        for each in node.children.values():
            each.parent = node

    def _to_device(self, node: Node, pages: list[int]) -> list[int]:
        """Gives pages of the device to the nodes on the host up to `node`. Returns those of the
        host, in the same order."""
        host_pages: list[int] = []
        end = len(pages)
        for at in _host_part(node):
            host_pages[:0] = at.pages
            at.pages, end = pages[end - len(at.pages) : end], end - len(at.pages)
            at.on_host = False
            assert at.parent is not None
            at.parent.num_below += 1
            self.num_evictable += 0 if at.locks else len(at.pages)
        assert not end
        self.num_cached += len(pages)
        return host_pages

    def _make_room(
        self, host: HostTier, num_pages: int, last_access: int, keeps: bool = True
    ) -> None:
        """Frees pages of the host that nobody locks or accessed later, until num_pages are free.

        keeps: they go to files, if there are any.
        """
        allocator = host.allocator
        while allocator.num_free < num_pages:
            node = self._on_host.first()
            if node is None or node.last_access > last_access:
                return
            num_kept = max(0, len(node.pages) - (num_pages - allocator.num_free))
            if keeps:
                self._to_files(node, node.pages[num_kept:])
            allocator.free(node.pages[num_kept:])
            self._cut(node, num_kept)

    def _to_files(self, node: Node, host_pages: list[int]) -> None:
        """Has the last pages of a node on the host written, and its states there."""
        if self.files is not None and (host_pages or node.host_state >= 0):
            state = node.host_state if node.host_state >= 0 else None
            self.files.store(*self._path(node), host_pages, state)

    def _forget_below(self, node: Node) -> None:
        """Forgets all below a node, which is on the host and not locked."""
        if not node.children:
            return
        assert self._host is not None
        forgotten = [*node.children.values()]
        for below in forgotten:
            assert below.on_host and not below.locks
            self._log_pages("evicted", below, 0)
            self._drop_host_state(below)
            self._host.allocator.free(below.pages)
            forgotten += below.children.values()
        node.children = {}
        for below in forgotten:
            below.parent = None

    def _make_node(self, child_key: _ChildKey, key: bytes, pages: list[int]) -> Node:
        node = Node(self._num_nodes_made, child_key, key, pages)
        self._num_nodes_made += 1
        return node

    def _link(self, parent: Node, child: Node) -> None:
        parent.children[child.child_key] = child
        child.parent = parent
        if isinstance(child.child_key, tuple):
            self._first.setdefault(child.child_key[0], {})[child.child_key] = child

    def _touch(self, node: Node) -> None:
        self._clock += 1
        at: Node | None = node
        while at is not None:
            at.last_access = self._clock
            at = at.parent

    def _offer(self, node: Node) -> None:
        """Queues a node for eviction if it may be evicted."""
        self._on_device.offer(node)
        self._on_host.offer(node)

    def _check_alive(self, op: str, node: Node) -> None:
        if node.parent is None and node is not self._root:
            raise ValueError(f"{op}: node {node.serial} was evicted: lock a match before evicting")


def num_common(one: bytes | bytearray, other: bytes | bytearray, most: int) -> int:
    """The number of leading tokens in which two packed texts agree, at most `most`."""
    a, b = memoryview(one), memoryview(other)
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if a[4 * low : 4 * middle] == b[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _path_to(node: Node) -> list[Node]:
    """The nodes below the root to `node`."""
    path: list[Node] = []
    at: Node | None = node
    while at is not None:
        path.append(at)
        at = at.parent
    return path[::-1]


def _host_part(node: Node) -> Iterator[Node]:
    """The nodes on the host from `node` upwards."""
    while node.on_host:
        yield node
        assert node.parent is not None
        node = node.parent
