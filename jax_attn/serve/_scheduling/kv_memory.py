"""The kv cache's pages and the device's slots, and the running sequences that have them.

Pages are private, or shared through the prefix cache. Each sequence locks those it reads there.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left, insort

from jax_attn.serve._scheduling.pages import PageAllocator
from jax_attn.serve._scheduling.prefix_cache import Node, RadixCache
from jax_attn.serve._scheduling.request import Sequence, Status
from jax_attn.serve._scheduling.step_plan import SchedulerConfig
from jax_attn.serve._scheduling.tenants import Tenants, rank


class KvMemory:
    """Gives pages and slots to running sequences, and takes them back.

    It keeps the tenants' lists of running sequences, and counts their pages there.
    """

    def __init__(self, config: SchedulerConfig, tenants: Tenants):
        self.config = config
        self.allocator = PageAllocator(config.num_pages)
        self.cache = RadixCache(self.allocator, config.page_size)
        self.num_table_pages = 0  # sum of len(seq.pages) over the running
        self.num_insertions = 0  # into the prefix cache: without a new one, no lookup finds more
        self._tenants = tenants
        self._free_slots = list(range(config.max_running))  # a heap

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def num_running(self) -> int:
        return self.config.max_running - len(self._free_slots)

    @property
    def num_available(self) -> int:
        """Pages that are free, or cached and not in use."""
        return self.allocator.num_free + self.cache.num_evictable

    def pages_of(self, seq: Sequence) -> int:
        """The number of pages for all known tokens of `seq`."""
        return -(-len(seq.tokens) // self.config.page_size)

    def lookup_key(self, seq: Sequence) -> bytes:
        """The tokens that may come from the cache, packed: full pages without the last token.

        The last token's logits are needed. If the logits of all tokens are, the key is empty.
        """
        if not self.config.prefix_cache or seq.params.prompt_logprobs:
            return b""
        page_size = self.config.page_size
        return seq.key((len(seq.tokens) - 1) // page_size * page_size)

    def num_cached_pages(self, seq: Sequence, key: bytes) -> int:
        """The number of pages of `lookup_key` in the prefix cache."""
        return self.cache.peek(seq.namespace, key)

    def has_room(self, num_new: int, num_pages: int) -> bool:
        """Whether a sequence may enter that needs num_pages pages, of which num_new are new.

        A page for each running sequence and a hundredth of the pool stay in reserve: all can
        continue for page_size steps before one is preempted, and a preempted sequence waits until
        others have freed pages. So no two sequences preempt each other in turns.
        """
        config, num_running = self.config, self.num_running
        num_reserved = num_running + 1 + config.num_pages // 100 if num_running else 0
        if self.num_table_pages + num_pages + num_reserved > config.max_kv_pages_step:
            return False
        return num_new + num_reserved <= self.num_available

    def enter(self, seq: Sequence, key: bytes, num_cached_pages: int) -> bool:
        """Gives `seq` a slot, its cached prefix, and pages for the rest, if there is room.

        key, num_cached_pages: from `lookup_key` and `num_cached_pages`.
        """
        num_pages = self.pages_of(seq)
        if not self.has_room(num_pages - num_cached_pages, num_pages):
            return False
        match = self.cache.match(seq.namespace, key)
        self.cache.lock(match.node)
        if not self.has_room(num_pages - len(match.pages), num_pages):
            self.cache.unlock(match.node)
            return False
        seq.node, seq.num_shared = match.node, len(match.pages)
        seq.pages, seq.num_computed = array("i", match.pages), match.num_tokens
        tenant = self._tenants[seq.tenant]
        tenant.num_pages += len(seq.pages)
        self.num_table_pages += len(seq.pages)
        grown = self.grow(seq, num_pages - len(seq.pages))
        assert grown
        seq.slot = heapq.heappop(self._free_slots)
        seq.status = Status.RUNNING
        insort(tenant.running, seq, key=rank)
        return True

    def grow(self, seq: Sequence, num_pages: int) -> bool:
        """Appends pages to a sequence. Returns False and changes nothing if too few are left."""
        if self.num_table_pages + num_pages > self.config.max_kv_pages_step:
            return False
        if num_pages > self.num_available:
            return False
        self.cache.evict(num_pages - self.allocator.num_free)
        pages = self.allocator.allocate(num_pages)
        assert pages is not None
        seq.pages.extend(pages)
        self._tenants[seq.tenant].num_pages += num_pages
        self.num_table_pages += num_pages
        return True

    def share(self, seq: Sequence, num_pages: int) -> None:
        """Moves the first pages of `seq`, which must be full, to the cache, and locks them there.

        If the cache already has the same tokens, `seq` uses the cache's pages from now on.
        """
        if num_pages <= seq.num_shared or not self.config.prefix_cache:
            return
        assert seq.node is not None
        key = seq.key(num_pages * self.config.page_size)
        inserted = self.cache.insert(seq.namespace, key, seq.pages[:num_pages].tolist())
        self.num_insertions += 1
        self.cache.lock(inserted.node)
        self.cache.unlock(seq.node)
        self.allocator.free(inserted.duplicates)
        seq.pages[:num_pages] = array("i", inserted.pages)
        seq.node, seq.num_shared = inserted.node, num_pages

    def release(self, seq: Sequence, keep: bool) -> None:
        """Takes slot and pages from a running sequence. keep: full pages go to the cache."""
        if keep:
            num_known = min(seq.num_computed, len(seq.tokens))
            self.share(seq, num_known // self.config.page_size)
        assert seq.node is not None
        self.cache.unlock(seq.node)
        self.allocator.free(seq.pages[seq.num_shared :])
        tenant = self._tenants[seq.tenant]
        del tenant.running[bisect_left(tenant.running, rank(seq), key=rank)]
        tenant.num_pages -= len(seq.pages)
        self.num_table_pages -= len(seq.pages)
        heapq.heappush(self._free_slots, seq.slot)
        seq.pages, seq.num_computed, seq.slot = array("i"), 0, -1
        seq.node, seq.num_shared = None, 0

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page, lock and slot is accounted for."""
        self.allocator.check_integrity()
        self.cache.check_integrity()
        holders: dict[int, int] = {}
        private: list[int] = []
        running = [seq for tenant in self._tenants for seq in tenant.running]
        for seq in running:
            assert seq.node is not None, f"{seq.id}: no lock"
            holders[seq.node.serial] = holders.get(seq.node.serial, 0) + 1
            shared: list[int] = []
            node: Node | None = seq.node
            while node is not None:
                shared[:0] = node.pages
                node = node.parent
            assert shared == seq.pages[: seq.num_shared].tolist(), f"{seq.id}: shared pages"
            private += seq.pages[seq.num_shared :]
            num_computed = len(seq.pages) * self.config.page_size
            assert 0 <= seq.num_computed <= num_computed, f"{seq.id}: computed beyond its pages"
        assert len(set(private)) == len(private), "a private page has two owners"
        assert all(map(self.allocator.is_allocated, private)), "a private page is free"
        num_owned = self.allocator.num_free + self.cache.num_cached + len(private)
        assert num_owned == self.config.num_pages, f"{num_owned} of {self.config.num_pages} pages"
        for view in self.cache.walk():
            num_holders = holders.get(view.id, 0)
            assert view.holders == num_holders, f"node {view.id}: {view.holders} != {num_holders}"
        for tenant in self._tenants:
            assert tenant.num_pages == sum(len(seq.pages) for seq in tenant.running)
        slots = self._free_slots + [seq.slot for seq in running]
        assert sorted(slots) == list(range(self.config.max_running)), "slots"
        assert self.num_table_pages == sum(tenant.num_pages for tenant in self._tenants)
        assert self.num_table_pages <= self.config.max_kv_pages_step
