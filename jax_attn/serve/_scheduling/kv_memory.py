"""The kv cache's pages and the device's slots, and the running sequences that have them.

Pages are private, or shared through the prefix cache. Each sequence locks those it reads there.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left, insort

from jax_attn.serve._scheduling.file_tier import FileTier
from jax_attn.serve._scheduling.host_tier import HostTier, Moves, PageCopy
from jax_attn.serve._scheduling.pages import PageAllocator
from jax_attn.serve._scheduling.prefix_cache import Match, Node, RadixCache
from jax_attn.serve._scheduling.prompt_policy import KeptKeys
from jax_attn.serve._scheduling.request import Adapter, Sequence, Status
from jax_attn.serve._scheduling.states import States
from jax_attn.serve._scheduling.step_plan import SchedulerConfig
from jax_attn.serve._scheduling.streaming import Rotation
from jax_attn.serve._scheduling.tenants import Tenants, rank, versioned


class KvMemory:
    """Gives pages and slots to running sequences, and takes them back.

    It keeps the tenants' lists of running sequences, and counts their pages there.
    """

    def __init__(self, config: SchedulerConfig, tenants: Tenants):
        self.config = config
        self.allocator = PageAllocator(config.num_pages)
        slots = PageAllocator(config.num_states) if config.num_states else None
        self.moves = Moves()  # before the next step
        self.host = None
        if config.num_host_pages:
            self.host = HostTier(config.num_host_pages, self.moves, config.num_host_states)
        self.cache = RadixCache(self.allocator, config.page_size, slots, self.host)
        self.states = None if slots is None else States(config, slots, self.cache)
        self.streaming, self.prompt_policy = config.streaming, config.prompt_policy
        self.num_dropped_pages = 0  # since the start
        self._rotations: list[Rotation] = []  # that the device has yet to do
        self.num_table_pages = 0  # sum of num_held over the running
        self.num_insertions = 0  # into the prefix cache: without a new one, no lookup finds more
        self.version = ""  # of the weights: see `begin_version`
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

    def begin_version(self, version: str, keep: bool) -> None:
        """Separates the prefixes cached from now on from those of other weights.

        No sequence may run. version: of the weights; "": those that the engine was made with.
        keep: keep the prefixes of other versions, for when their weights come back.
        """
        assert not self.num_running
        if not keep:
            self.cache.clear()
        self.version = version
        self.num_insertions += 1  # lookups may find other pages now

    def namespace(self, seq: Sequence) -> str:
        """Where the prefix cache has the pages that `seq` may share."""
        number = None if seq.adapter is None else seq.adapter.number
        return versioned(seq.namespace, self.version, number)

    def pages_of(self, seq: Sequence) -> int:
        """The number of pages with which `seq` enters: for all known tokens, as far as a kv policy
        drops none of them, and for what it keeps of its prompt."""
        num_whole = -(-self._num_whole(seq, len(seq.tokens)) // self.config.page_size)
        return num_whole + self.config.num_kept_pages * self.keeps_some(seq)

    def keeps_some(self, seq: Sequence) -> bool:
        """Whether `seq` keeps only some keys of its prompt, once it is read and goes on."""
        policy = self.prompt_policy
        return policy is not None and seq.num_prompt > policy.keep and seq.params.max_tokens > 1

    def _num_whole(self, seq: Sequence, num_tokens: int) -> int:
        """The number of the first num_tokens tokens of `seq` before the first drop, if any."""
        if self.streaming is not None:
            return min(num_tokens, self.streaming.first_drop)
        return min(num_tokens, seq.num_prompt) if self.keeps_some(seq) else num_tokens

    def num_held(self, seq: Sequence) -> int:
        """The number of pages that a running sequence has, shared ones included."""
        return len(seq.pages) + len(seq.originals)

    def _num_copies(self, seq: Sequence) -> int:
        """The number of leading pages of `seq.pages` that are copies of sinks."""
        if not seq.originals:
            return 0
        assert self.streaming is not None
        return self.streaming.sinks // self.config.page_size

    def pages_by_text(self, seq: Sequence) -> array[int]:
        """The pages that `seq` has, without copies of sinks, in the order of the text."""
        return seq.originals + seq.pages[self._num_copies(seq) :]

    def prompt_key(self, seq: Sequence) -> bytes:
        """The tokens of the prompt that are in the prefix cache or that `seq` brings, packed."""
        return seq.key(0 if seq.num_dropped else self._num_whole(seq, seq.num_prompt))

    def lookup_key(self, seq: Sequence) -> bytes:
        """The tokens that may come from the cache, packed: full pages without the last token.

        The last token's logits are needed. If the logits of all tokens are, the key is empty.
        """
        if not self.config.prefix_cache or seq.params.prompt_logprobs:
            return b""
        page_size = self.config.page_size
        # A sequence enters before the first drop.
        return seq.key((self._num_whole(seq, len(seq.tokens)) - 1) // page_size * page_size)

    def num_cached_pages(self, seq: Sequence, key: bytes) -> int:
        """The number of pages of `lookup_key` that the prefix cache has on the device."""
        return self.cache.peek(self.namespace(seq), key)

    def num_known_tokens(self, seq: Sequence, adapter: Adapter | None) -> int:
        """The tokens of a sequence that has not been added yet, on the device or the host."""
        number = None if adapter is None else adapter.number
        namespace = versioned(seq.namespace, self.version, number)
        known = self.cache.num_known_pages(namespace, self.lookup_key(seq))
        return known * self.config.page_size

    # ---- files ----

    @property
    def files(self) -> FileTier | None:
        """Behind the host tier; None: there is none."""
        return self.cache.files

    def open_files(self, files: FileTier) -> None:
        """Has pages and states that leave the host go to files, and come from there."""
        self.cache.files = files

    def awaits_files(self, seq: Sequence, key: bytes) -> bool:
        """Whether pages that a waiting sequence can use are being read. Begins that.

        key: of `lookup_key`. A sequence asks for a read of its own once.
        """
        if self.files is None or not key:
            return False
        if seq.file_read is None and not seq.has_asked_files:
            size = 4 * self.config.page_size
            if seq.pictures:
                key = key[: 4 * seq.pictures[0].begin // size * size]
            namespace, has_states = self.namespace(seq), self.states is not None
            known = self.cache.num_known_pages(namespace, key, with_state=False)
            usable = self.cache.num_known_pages(namespace, key) if has_states else known
            num_reading = self.files.num_reading
            seq.file_read = self.files.ask(namespace, key, known, usable, has_states)
            # One that another sequence began may bring less than this one needs.
            is_own = self.files.num_reading > num_reading
            seq.has_asked_files = seq.file_read is None or is_own
        if seq.file_read is None:
            return False
        if not seq.file_read.is_over and not self.files.is_late(seq.file_read):
            return True
        seq.has_asked_files |= not seq.file_read.is_over
        seq.file_read = None
        return not seq.has_asked_files and self.awaits_files(seq, key)

    def take_files(self, now: float) -> None:
        """Gives the cache what was read since the last call. now: on the clock of `schedule`."""
        if self.files is None:
            return
        for read, values in self.files.take(now):
            if values.pages or values.states is not None:
                self.files.num_returned += len(values.pages)
                self.cache.receive(read.namespace, read.key, read.begin, *values)
                self.num_insertions += 1

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

        Pages and states that the cache has on the host come back, unless computing their tokens
        takes less time.

        key, num_cached_pages: from `lookup_key` and `num_cached_pages`.
        """
        num_pages = self.pages_of(seq)
        if not self.has_room(num_pages - num_cached_pages, num_pages):
            return False
        match, num_back, node = self._match(seq, key)
        self.cache.lock(node)
        if not self.has_room(num_pages - len(match.pages), num_pages):
            self.cache.unlock(node)
            return False
        has_state = match.num_tokens + num_back > 0
        if self.states is not None and not self.states.may_enter(has_state):
            self.cache.unlock(node)
            return False
        pages = match.pages
        if num_back:
            self.cache.evict(num_back - self.allocator.num_free)
            back = self.allocator.allocate(num_back)
            assert back is not None
            self.cache.bring_back(node, back)
            pages = pages + back
        if self.states is not None:
            if has_state and not self.cache.bring_back_state(node):
                # Its states went while room was made. Later the sequence begins from others.
                self.cache.unlock(node)
                return False
            cached = self.cache.num_cached_pages(self.namespace(seq), key)
            self.states.enter(seq, node if has_state else None, cached * self.config.page_size)
        seq.node, seq.num_shared = node, len(pages)
        seq.pages, seq.num_computed = array("i", pages), len(pages) * self.config.page_size
        tenant = self._tenants[seq.tenant]
        self._count(seq, len(seq.pages))
        partial = None if num_back else self._partial_page(seq, node)
        grown = self.grow(seq, num_pages - len(seq.pages))
        assert grown
        if partial is not None:
            # Nothing writes the page before the copy, even if `grow` has given it away.
            source, num_tokens = partial
            self.moves.append(PageCopy(source, seq.pages[seq.num_shared]))
            seq.num_computed += num_tokens
        seq.slot = heapq.heappop(self._free_slots)
        seq.status = Status.RUNNING
        insort(tenant.running, seq, key=rank)
        return True

    def _match(self, seq: Sequence, key: bytes) -> tuple[Match, int, Node]:
        """What the cache has of `key`, how many pages of the host to use, and where they end."""
        namespace, page_size = self.namespace(seq), self.config.page_size
        match = self.cache.match(namespace, key)
        node, num_back = match.host_node, match.num_on_host
        has_state = node.host_state >= 0
        if not (num_back or has_state):
            return match, 0, node
        here = match
        if self.states is not None:
            here = self.cache.match(namespace, key, on_device=True)
        num_tokens = match.num_tokens - here.num_tokens + num_back * page_size
        if self.host is None or not self.host.is_sooner(num_back, num_tokens, has_state):
            return here, 0, here.node
        return match, num_back, node

    def _partial_page(self, seq: Sequence, node: Node) -> tuple[int, int] | None:
        """A cached page with some tokens that `seq` has after its whole cached pages, see
        RadixCache.partial_page. None with recurrent states, which checkpoints have only at ends of
        pages."""
        if self.states is not None or not self.config.prefix_cache or seq.params.prompt_logprobs:
            return None
        # As `lookup_key`: a sequence enters before the first drop.
        begin, end = seq.num_computed, self._num_whole(seq, len(seq.tokens)) - 1
        if end <= begin:
            return None
        end = min(end, begin + self.config.page_size)
        return self.cache.partial_page(self.namespace(seq), node, seq.key(end)[4 * begin :])

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
        self._count(seq, num_pages)
        return True

    def _count(self, seq: Sequence, num_new: int) -> None:
        self._tenants[seq.tenant].num_pages += num_new
        self.num_table_pages += num_new

    # ---- kv policies ----

    def drop(self, seq: Sequence) -> bool:
        """Gives back the pages that the next token of `seq` does not see, by the kv policy.

        The step that reads them last must be launched. Returns False and changes nothing if there
        is no room for copies of the sinks.
        """
        if self.streaming is None:
            if self.keeps_some(seq) and seq.num_prompt <= seq.num_computed and seq.num_pending:
                self._drop_prompt(seq)
            return True
        num_dropped = self.streaming.num_dropped(seq.num_computed)
        if num_dropped <= seq.num_dropped:
            return True
        page_size = self.config.page_size
        num_sinks = self.streaming.sinks // page_size
        begin, end = (num_sinks + num // page_size for num in (seq.num_dropped, num_dropped))
        if not seq.originals:
            sinks = seq.pages[:num_sinks]
            if not self.grow(seq, num_sinks):
                return False
            copies = seq.pages[-num_sinks:]
            del seq.pages[-num_sinks:]
            seq.originals, seq.pages[:num_sinks] = sinks, copies
        gone = seq.pages[num_sinks : num_sinks + end - begin]
        del seq.pages[num_sinks : num_sinks + end - begin]
        num_shared = max(0, min(seq.num_shared, end) - begin)
        seq.originals += gone[:num_shared]
        self.allocator.free(gone[num_shared:])
        self._count(seq, num_shared - len(gone))
        if num_sinks < seq.num_shared <= end:
            self._leave_shared(seq, num_sinks)
        seq.num_dropped = num_dropped
        self.num_dropped_pages += len(gone)
        self._rotations += (
            Rotation(source, target, num_dropped)
            for source, target in zip(seq.originals, seq.pages[:num_sinks], strict=False)
        )
        return True

    def _drop_prompt(self, seq: Sequence) -> None:
        """Gives back the pages of a prompt that is read, once: the device copies what it keeps to
        the pages behind them, which it has for that since it entered."""
        if seq.num_dropped:
            return
        assert self.prompt_policy is not None and seq.node is not None
        begin = -(-seq.num_prompt // self.config.page_size)
        gone, kept = seq.pages[:begin], seq.pages[begin:]
        adapter = -1 if seq.adapter is None else seq.adapter.slot
        prompt = seq.tokens[: seq.num_prompt]
        self.moves.append(KeptKeys(prompt, adapter, gone.tolist(), kept.tolist()))
        root = self.cache.match(self.namespace(seq), b"").node
        self.cache.lock(root)
        self.cache.unlock(seq.node)
        self.allocator.free(gone[seq.num_shared :])
        seq.node, seq.num_shared, seq.pages = root, 0, kept
        self._count(seq, -len(gone))
        seq.num_dropped = seq.num_prompt - self.prompt_policy.keep
        self.num_dropped_pages += len(gone) - len(kept)

    def _leave_shared(self, seq: Sequence, num_pages: int) -> None:
        """Unlocks the shared pages of `seq` after the first num_pages: none is in its table."""
        assert seq.node is not None
        key = seq.key(num_pages * self.config.page_size)
        node = self.cache.match(self.namespace(seq), key).node
        self.cache.lock(node)
        self.cache.unlock(seq.node)
        self._count(seq, num_pages - len(seq.originals))
        seq.node, seq.num_shared = node, num_pages
        del seq.originals[num_pages:]

    def take_rotations(self) -> list[Rotation]:
        """What the device has to do before the next step, in no order. None of them is reported
        again."""
        rotations, self._rotations = self._rotations, []
        return [*{each.target: each for each in rotations}.values()]  # the last of each

    # ---- the prefix cache ----

    def share(self, seq: Sequence, num_pages: int) -> None:
        """Moves the first pages of `seq`, which must be full, to the cache, and locks them there.

        If the cache already has the same tokens, `seq` uses the cache's pages from now on. Its
        checkpoints go with the pages.
        """
        if num_pages <= seq.num_shared or not self.config.prefix_cache:
            return
        if seq.num_dropped:
            return  # it lacks pages, and the next ones depend on the kv policy
        if self.states is not None:
            page_size = self.config.page_size
            for at, slot in self.states.take_checkpoints(seq, num_pages * page_size):
                self._share(seq, at // page_size)
                self.states.put(seq, slot)
        self._share(seq, num_pages)

    def _share(self, seq: Sequence, num_pages: int) -> None:
        assert seq.node is not None
        key = seq.key(num_pages * self.config.page_size)
        pages = seq.pages[:num_pages].tolist()
        inserted = self.cache.insert(self.namespace(seq), key, pages)
        self.num_insertions += 1
        self.cache.lock(inserted.node)
        self.cache.unlock(seq.node)
        self.allocator.free(inserted.duplicates)
        seq.pages[:num_pages] = array("i", inserted.pages)
        seq.node, seq.num_shared = inserted.node, num_pages

    def cached(self, seq: Sequence) -> tuple[list[int], list[int]]:
        """Pages of the device with the first tokens of a sequence that is not running, and the
        slot of the states after them; [] for a model without states. Until anything is evicted."""
        match = self.cache.match(self.namespace(seq), self.lookup_key(seq), on_device=True)
        has_state = self.states is not None and match.num_tokens
        return match.pages, [match.node.state] if has_state else []

    def adopt(
        self, seq: Sequence, num_pages: int, num_states: int
    ) -> tuple[dict[int, int], list[int]]:
        """Gives the cache pages for the first tokens of a sequence that is not running, and a slot
        for the states after them. Returns those that the device has yet to write: pages by their
        place in the sequence, and the slot.

        The cache has them from now on: write them before the next step. It takes none for want of
        room, or if it has these tokens.
        """
        namespace, key = self.namespace(seq), seq.key(num_pages * self.config.page_size)
        if not self.config.prefix_cache or num_pages > self.num_available or not num_pages:
            return {}, []
        if self.states is not None and not (num_states and self.states.num_available):
            return {}, []
        if self.cache.peek(namespace, key) == num_pages:
            return {}, []
        self.cache.evict(num_pages - self.allocator.num_free)
        pages = self.allocator.allocate(num_pages)
        assert pages is not None
        inserted = self.cache.insert(namespace, key, pages)
        self.num_insertions += 1
        self.allocator.free(inserted.duplicates)
        there = set(inserted.duplicates)
        written = {i: page for i, page in enumerate(pages) if page not in there}
        slots = [] if self.states is None else self.states.adopt(inserted.node)
        return written, slots

    def release(self, seq: Sequence, keep: bool) -> None:
        """Takes slot and pages from a running sequence. keep: full pages go to the cache."""
        if keep:
            num_known = min(seq.num_computed, len(seq.tokens))
            self.share(seq, num_known // self.config.page_size)
        if self.states is not None:
            self.states.release(seq)
        assert seq.node is not None
        self.cache.unlock(seq.node)
        self.allocator.free(self.pages_by_text(seq)[seq.num_shared :])
        if copies := seq.pages[: self._num_copies(seq)]:
            self.allocator.free(copies)
            self._rotations = [x for x in self._rotations if x.target not in copies]
        tenant = self._tenants[seq.tenant]
        del tenant.running[bisect_left(tenant.running, rank(seq), key=rank)]
        self._count(seq, -self.num_held(seq))
        heapq.heappush(self._free_slots, seq.slot)
        seq.pages, seq.num_computed, seq.slot = array("i"), 0, -1
        seq.node, seq.num_shared = None, 0
        seq.originals, seq.num_dropped = array("i"), 0

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
            pages = self.pages_by_text(seq)
            assert shared == pages[: seq.num_shared].tolist(), f"{seq.id}: shared pages"
            num_sinks = self._num_copies(seq)
            end = num_sinks + seq.num_dropped // self.config.page_size
            holds_more = seq.originals and num_sinks < seq.num_shared <= end
            assert not holds_more, f"{seq.id}: shared pages that it does not see"
            private += pages[seq.num_shared :] + seq.pages[:num_sinks]
            num_computed = seq.num_dropped + len(seq.pages) * self.config.page_size
            assert 0 <= seq.num_computed <= num_computed, f"{seq.id}: computed beyond its pages"
        assert len(set(private)) == len(private), "a private page has two owners"
        assert all(map(self.allocator.is_allocated, private)), "a private page is free"
        num_owned = self.allocator.num_free + self.cache.num_cached + len(private)
        assert num_owned == self.config.num_pages, f"{num_owned} of {self.config.num_pages} pages"
        for view in self.cache.walk():
            num_holders = holders.get(view.id, 0)
            assert view.holders == num_holders, f"node {view.id}: {view.holders} != {num_holders}"
        for tenant in self._tenants:
            assert tenant.num_pages == sum(map(self.num_held, tenant.running))
        if self.states is not None:
            self.states.check_integrity(running)
        slots = self._free_slots + [seq.slot for seq in running]
        assert sorted(slots) == list(range(self.config.max_running)), "slots"
        assert self.num_table_pages == sum(tenant.num_pages for tenant in self._tenants)
        assert self.num_table_pages <= self.config.max_kv_pages_step
