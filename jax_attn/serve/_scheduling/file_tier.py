"""The third tier of the prefix cache: pages and states that the host's memory has no room for, in
files.

An entry is a page, or the states after one. Its name is a digest of the owner and of all tokens up
to its end, so it is found again after a restart, and by no other owner. What a process alone can
name stays out: prefixes of LoRA adapters, of weights loaded later, and with pictures.

Threads write entries and read them. A sequence whose next pages are in files waits while they are
read, and others run. Then the pages are the host's, and the tree has them.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from jax_attn.serve._scheduling.host_tier import HostTier, ToFiles

# A sequence that waits for files goes on without after so many times the predicted time, and more.
_LATE, _LATE_SECONDS = 2, 1.0


class Values(NamedTuple):
    """What was read: the first pages of those that were asked for, and states if they were."""

    pages: list[Any]
    states: Any = None


class Files(Protocol):
    """Writes entries and reads them, in threads of its own."""

    def __contains__(self, name: str) -> bool: ...

    def __len__(self) -> int: ...

    def write(self, owner: str, key: bytes, values: list[Any], is_state: bool) -> None:
        """Begins to write the last pages of `key`, or the states after them."""
        ...

    def flush(self, seconds: float) -> None:
        """Waits until all is written, at most so long."""
        ...

    def read(self, pages: list[str], states: str | None) -> Future[Values]: ...

    def wait(self, seconds: float) -> None:
        """Waits until a read is done, at most so long."""
        ...

    def read_seconds(self) -> tuple[float, float]:
        """Measures the times in which a page, and a slot of states (0: there are none), are read
        from the disk; infinity if there is no room to find out."""
        ...

    def counts(self) -> dict[str, int]: ...

    def close(self) -> None:
        """Ends the threads. What is not written by then is not kept."""
        ...


@dataclass(eq=False)
class Read:
    """Pages from number `begin` on, up to the end of `key`, that are on their way to the host."""

    namespace: str
    key: bytes  # packed tokens
    begin: int
    pages: list[str]  # names
    states: str | None
    values: Future[Values]
    until: float  # then nobody waits for it any more
    is_over: bool = field(default=False)


class FileTier:
    """What is in files, and the rule that says whether it is worth its way back.

    page_tokens, state_tokens: tokens that the model computes in the time in which a page, or a slot
    of states, is read. token_seconds: its time for one of them. Measured in the warm-up; 0 before.
    """

    def __init__(self, files: Files, host: HostTier, page_size: int, owners: Mapping[str, str]):
        """owners: names of tenants that outlive the process; {}: theirs do."""
        self._files, self._host, self._page_size = files, host, page_size
        self._owners = owners
        self._reads: list[Read] = []
        self._now = 0.0
        self.page_tokens = self.state_tokens = self.token_seconds = 0.0
        self.is_open = True
        self.num_returned = 0  # pages that were read, since the start

    def counts(self) -> dict[str, int]:
        """See FileStore.counts and FileCopies.counts; "returned": pages that were read."""
        return self._files.counts() | {"returned": self.num_returned}

    def measure(self, token_seconds: float) -> None:
        """Measures what entries cost. token_seconds: in which the model computes a token."""
        of_page, of_states = self._files.read_seconds()
        self.token_seconds = token_seconds
        self.page_tokens, self.state_tokens = of_page / token_seconds, of_states / token_seconds

    def close(self) -> None:
        """See Files.close."""
        self.is_open = False
        self._files.close()

    # ---- to files ----

    def store(
        self, namespace: str, key: bytes, host_pages: list[int], host_state: int | None = None
    ) -> None:
        """Has pages of the host with the last tokens of `key` written, and states after them."""
        if (owner := self._keeper(namespace)) is None:
            return
        if host_pages:
            self._host.moves.append(ToFiles(tuple(host_pages), False, owner, key))
        if host_state is not None:
            self._host.moves.append(ToFiles((host_state,), True, owner, key))

    def put(self, namespace: str, key: bytes, pages: list[Any], states: list[Any]) -> None:
        """As `store`, for values of pages and, [] or one, of states."""
        if (owner := self._keeper(namespace)) is not None:
            self._files.write(owner, key, pages, is_state=False)
            if states:
                self._files.write(owner, key, states, is_state=True)

    def flush(self, seconds: float) -> None:
        """See Files.flush."""
        self._files.flush(seconds)

    def _keeper(self, namespace: str) -> str | None:
        """`owner`; None also if pages come back later than they are computed again."""
        keeps = self._host.page_tokens + self.page_tokens < self._page_size
        return self.owner(namespace) if self.is_open and keeps else None

    def owner(self, namespace: str) -> str | None:
        """The namespace as it is called in files; None: it is of this process alone."""
        if "\0" in namespace:  # see tenants.versioned
            return None
        if not self._owners:
            return namespace
        tenant, slash, salt = namespace.partition("/")
        return None if tenant not in self._owners else self._owners[tenant] + slash + salt

    # ---- from files ----

    def ask(
        self, namespace: str, key: bytes, num_known: int, num_usable: int, has_states: bool
    ) -> Read | None:
        """Begins to read the pages of `key` after the first num_known, as far as files have them,
        unless computing their tokens takes less time. A read that brings the first of them already
        is returned as it is. None: nothing is read.

        num_usable: pages that a sequence could begin with without this.
        has_states: the model has some, and pages are of use up to those states alone.
        """
        owner = self.owner(namespace)
        if owner is None or not self.is_open or not len(self._files):
            return None
        pages: list[str] = []
        states, end = None, num_known
        in_row = True
        for number, name in enumerate(names(owner, key, num_usable, self._page_size), num_usable):
            if number >= num_known and in_row:
                in_row = page_name(name) in self._files
                pages += [page_name(name)] * in_row
            if not in_row:
                break
            if not has_states:
                end = number + 1
            elif state_name(name) in self._files:
                states, end = state_name(name), number + 1
        pages = pages[: max(0, end - num_known)]
        if not pages and states is None:
            return None
        for read in self._reads:
            if {*pages[:1], states} & {*read.pages, read.states} - {None}:
                return read
        key = key[: 4 * self._page_size * end]
        return self._begin(namespace, key, min(num_known, end), num_usable, pages, states)

    def _begin(
        self,
        namespace: str,
        key: bytes,
        begin: int,
        num_usable: int,
        pages: list[str],
        states: str | None,
    ) -> Read | None:
        if any(self._now > read.until for read in self._reads):
            return None  # the disk does not answer
        num_ahead = sum(len(read.pages) for read in self._reads)
        num_states = (states is not None) + sum(read.states is not None for read in self._reads)
        seconds_in_tokens = (num_ahead + len(pages)) * self.page_tokens
        seconds_in_tokens += num_states * self.state_tokens
        left = len(key) // 4 - num_usable * self._page_size - seconds_in_tokens
        if not self._host.is_sooner(len(pages), left, states is not None):
            return None
        values = self._files.read(pages, states)
        until = self._now + _LATE_SECONDS + _LATE * seconds_in_tokens * self.token_seconds
        read = Read(namespace, key, begin, pages, states, values, until)
        self._reads.append(read)
        return read

    @property
    def num_reading(self) -> int:
        return len(self._reads)

    def is_late(self, read: Read) -> bool:
        """Whether to go on without it."""
        return self._now > read.until

    def take(self, now: float) -> list[tuple[Read, Values]]:
        """The reads that have ended since the last call. now: on the clock of `schedule`."""
        self._now = now
        for read in self._reads:
            read.is_over = read.values.done()  # looked at once: it may end at any time
        done = [read for read in self._reads if read.is_over]
        self._reads = [read for read in self._reads if not read.is_over]
        if not self.is_open:
            return []
        return [(read, read.values.result()) for read in done]

    def wait(self, seconds: float) -> None:
        """Waits until a read is done, at most so long."""
        self._files.wait(seconds)


def names(owner: str, key: bytes, begin: int, page_size: int) -> Iterator[str]:
    """A name for each whole page of `key` from that number on: of the owner and all tokens so far.

    A text that begins with the same tokens has the same names up to there.
    """
    size = 4 * page_size
    whole = owner.encode("utf-8", "surrogatepass")
    digest = hashlib.sha256(len(whole).to_bytes(8, "little") + whole + key[: begin * size])
    for at in range(begin * size, len(key) - size + 1, size):
        digest.update(key[at : at + size])
        yield digest.hexdigest()


def page_name(name: str) -> str:
    return f"{name}.page"


def state_name(name: str) -> str:
    """The name of the states after the page of that name."""
    return f"{name}.state"


def has_pictures(key: bytes) -> bool:
    """Whether packed tokens show pictures, which numbers of this process stand for."""
    return min(array("i", key), default=0) < 0
