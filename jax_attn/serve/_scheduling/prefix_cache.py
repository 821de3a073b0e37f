"""Maps tokens to pages of the kv cache: RadixAttention's tree, in whole pages.

Source: "SGLang: Efficient Execution of Structured Language Model Programs", section
"RadixAttention": a radix tree from token sequences to kv, leaf-first LRU eviction, reference counts
for running sequences. Here every edge is a whole number of pages: a node splits only between pages,
and a page belongs to exactly one node. Partial pages stay with the sequence that writes them.

Tokens are packed, 4 bytes each (`Sequence.key`), so comparing a whole edge is one memcmp.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from jax_attn.serve._scheduling.pages import PageAllocator

# A child is found by its first page; below the root, where namespaces part, by (namespace, page).
_ChildKey: TypeAlias = bytes | tuple[str, bytes]


class Node:
    """An edge of the tree and the node at its end. Callers may read and lock; the cache writes."""

    __slots__ = (
        "serial", "parent", "child_key", "children", "key", "pages",
        "holders", "locks", "last_access", "in_heap",
    )  # fmt: skip

    def __init__(self, serial: int, child_key: _ChildKey, key: bytes, pages: list[int]):
        self.serial = serial
        self.parent: Node | None = None
        self.child_key = child_key  # key under which the parent finds it
        self.children: dict[_ChildKey, Node] = {}
        self.key = key  # the packed tokens of `pages`
        self.pages = pages
        self.holders = 0  # locks on this node itself
        self.locks = 0  # holders, plus the locks on all nodes below
        self.last_access = 0  # the cache's logical clock
        self.in_heap = False


class Match(NamedTuple):
    """The longest cached prefix. It may be evicted until `node` is locked."""

    pages: list[int]
    num_tokens: int
    node: Node


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


class RadixCache:
    """Pages by their tokens. The cache owns inserted pages until it evicts them.

    Deterministic: time is the number of matches and insertions so far. A match or an insertion
    accesses each page that it passes through. The least recently accessed end of an unlocked branch
    is evicted first.
    """

    def __init__(self, allocator: PageAllocator, page_size: int):
        if page_size < 1:
            raise ValueError(f"page_size: expected at least 1, got {page_size}")
        self.page_size = page_size
        self.num_cached = 0  # pages
        self.num_evictable = 0  # number of cached pages that nobody locks
        self._allocator = allocator
        self._page_bytes = 4 * page_size
        self._num_nodes_made = 0
        self._clock = 0
        self._root = self._make_node(b"", b"", [])
        # Unlocked leaves as (last_access, serial, node), each once. Entries go stale when a node is
        # accessed, locked or given a child; `evict` corrects them when they come up.
        self._heap: list[tuple[int, int, Node]] = []

    def peek(self, namespace: str, key: bytes) -> int:
        """The number of leading pages of `key` that are cached. Not an access; changes nothing."""
        _, pages, _ = self._walk(namespace, key)
        return len(pages)

    def match(self, namespace: str, key: bytes) -> Match:
        """Finds the longest cached prefix of `key`, in whole pages.

        Counts as an access to its pages.
        """
        node, pages, num_in_node = self._walk(namespace, key)
        node = self._split(node, num_in_node)
        self._touch(node)
        return Match(pages, len(pages) * self.page_size, node)

    def insert(self, namespace: str, key: bytes, pages: list[int]) -> Inserted:
        """Gives the cache the pages that hold the tokens of `key`.

        Counts as an access to all of them.

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
        new = pages[len(cached) :]
        if new:
            begin = len(cached) * self._page_bytes
            child_key = self._child_key(node, namespace, key, begin)
            leaf = self._make_node(child_key, key[begin:], new)
            self._link(node, leaf)
            node = leaf
            self.num_cached += len(new)
            self.num_evictable += len(new)
        self._touch(node)
        self._offer(node)
        return Inserted(node, cached + new, duplicates)

    def lock(self, node: Node) -> None:
        """Locks `node` and all above it until `unlock(node)`. Locks count."""
        self._check_alive("lock", node)
        node.holders += 1
        at: Node | None = node
        while at is not None:
            if not at.locks:
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
                self.num_evictable += len(at.pages)
            at = at.parent
        self._offer(node)

    def evict(self, num_pages: int) -> int:
        """Frees up to num_pages unlocked pages. Returns how many."""
        freed: list[int] = []
        while len(freed) < num_pages and self._heap:
            last_access, _, node = self._heap[0]
            if node.locks or node.children:
                heapq.heappop(self._heap)
                node.in_heap = False
            elif last_access != node.last_access:
                heapq.heapreplace(self._heap, (node.last_access, node.serial, node))
            else:
                freed += self._trim(node, num_pages - len(freed))
        self.num_cached -= len(freed)
        self.num_evictable -= len(freed)
        self._allocator.free(freed)
        return len(freed)

    def walk(self) -> Iterator[NodeView]:
        """All nodes, parents first, for the live view."""
        stack = [("", self._root)]
        while stack:
            namespace, node = stack.pop()
            parent = node.parent.serial if node.parent else None
            counts = len(node.pages), node.holders, node.locks
            yield NodeView(node.serial, parent, namespace, *counts, node.last_access, node.key)
            for child_key, child in node.children.items():
                stack.append((child_key[0] if isinstance(child_key, tuple) else namespace, child))

    def check_integrity(self) -> None:
        """Raises AssertionError unless the tree, its counters and its page ownership are exact."""
        pages: list[int] = []
        num_evictable = 0
        heap = {id(node): last_access for last_access, _, node in self._heap}
        assert len(heap) == len(self._heap), "a node is in the heap twice"
        num_in_heap = 0
        stack = [self._root]
        while stack:
            node = stack.pop()
            what = f"node {node.serial}"
            assert node is self._root or node.pages, f"{what} has no pages"
            assert len(node.key) == len(node.pages) * self._page_bytes, f"{what}: length of the key"
            assert node.in_heap == (id(node) in heap), f"{what}: in_heap is wrong"
            num_in_heap += node.in_heap
            if not node.locks and not node.children and node is not self._root:
                assert node.in_heap, f"{what} can be evicted, but never will"
                assert heap[id(node)] <= node.last_access, f"{what} is queued too late"
            below = sum(child.locks for child in node.children.values())
            assert node.holders >= 0, f"{what}: {node.holders} holders"
            assert node.locks == node.holders + below, f"{what}: {node.locks} locks"
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
        assert num_in_heap == len(heap), "a node in the heap is not in the tree"
        assert len(set(pages)) == len(pages), "a page is in the tree twice"
        assert all(map(self._allocator.is_allocated, pages)), "a cached page is free"
        assert self.num_cached == len(pages), (self.num_cached, len(pages))
        assert self.num_evictable == num_evictable, (self.num_evictable, num_evictable)

    # ---- the tree ----

    def _walk(self, namespace: str, key: bytes) -> tuple[Node, list[int], int]:
        """Follows `key`. Returns the last node reached, the pages up to it, and those within it."""
        node, pages, num_in_node = self._root, [], 0
        begin = 0
        while begin + self._page_bytes <= len(key):
            child = node.children.get(self._child_key(node, namespace, key, begin))
            if child is None:
                break
            node = child
            if not key.startswith(node.key, begin):
                num_in_node = self._num_common(key, begin, node.key)
                pages += node.pages[:num_in_node]
                break
            num_in_node = len(node.pages)
            pages += node.pages
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

        `node` keeps its end, which its locks refer to. The caller accesses the new node next.
        """
        if num_pages == len(node.pages):
            return node
        border = num_pages * self._page_bytes
        parent = node.parent
        assert parent is not None
        upper = self._make_node(node.child_key, node.key[:border], node.pages[:num_pages])
        upper.locks = node.locks
        self._link(parent, upper)
        node.key, node.pages = node.key[border:], node.pages[num_pages:]
        node.child_key = node.key[: self._page_bytes]
        self._link(upper, node)
        return upper

    def _trim(self, node: Node, num_pages: int) -> list[int]:
        """Removes up to `num_pages` from the end of an unlocked leaf, the top of the heap."""
        num_kept = max(0, len(node.pages) - num_pages)
        freed = node.pages[num_kept:]
        if num_kept:
            node.pages = node.pages[:num_kept]
            node.key = node.key[: num_kept * self._page_bytes]
            return freed
        heapq.heappop(self._heap)
        node.in_heap = False
        parent = node.parent
        assert parent is not None
        del parent.children[node.child_key]
        node.parent = None
        self._offer(parent)
        return freed

    def _make_node(self, child_key: _ChildKey, key: bytes, pages: list[int]) -> Node:
        node = Node(self._num_nodes_made, child_key, key, pages)
        self._num_nodes_made += 1
        return node

    def _link(self, parent: Node, child: Node) -> None:
        parent.children[child.child_key] = child
        child.parent = parent

    def _touch(self, node: Node) -> None:
        self._clock += 1
        at: Node | None = node
        while at is not None:
            at.last_access = self._clock
            at = at.parent

    def _offer(self, node: Node) -> None:
        """Queues a node for eviction if it is an unlocked leaf."""
        if not (node.locks or node.children or node.in_heap or node is self._root):
            node.in_heap = True
            heapq.heappush(self._heap, (node.last_access, node.serial, node))

    def _check_alive(self, op: str, node: Node) -> None:
        if node.parent is None and node is not self._root:
            raise ValueError(f"{op}: node {node.serial} was evicted: lock a match before evicting")
