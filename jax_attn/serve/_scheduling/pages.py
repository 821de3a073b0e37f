"""Allocates pages of the kv cache from a free list that rejects misuse."""

from __future__ import annotations

from collections.abc import Iterable


class PageAllocator:
    """Pages 0 .. num_pages - 1, each free or allocated. Deterministic: last freed, first used."""

    def __init__(self, num_pages: int):
        if num_pages < 1:
            raise ValueError(f"num_pages: expected at least 1, got {num_pages}")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_allocated = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def is_allocated(self, page: int) -> bool:
        return 0 <= page < self.num_pages and bool(self._is_allocated[page])

    def allocated(self) -> bytes:
        """One byte per page: 1 if it is allocated, else 0."""
        return bytes(self._is_allocated)

    def allocate(self, num_pages: int) -> list[int] | None:
        """Allocates num_pages pages. Returns None, without a change, if fewer are free."""
        if num_pages < 0:
            raise ValueError(f"allocate: num_pages: expected at least 0, got {num_pages}")
        num_left = len(self._free) - num_pages
        if num_left < 0:
            return None
        pages = self._free[num_left:]
        del self._free[num_left:]
        for page in pages:
            self._is_allocated[page] = 1
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Frees pages.

        Raises:
          ValueError: a page is not allocated, or given twice; those before it are already free.
        """
        for page in pages:
            if not self.is_allocated(page):
                raise ValueError(f"free: expected an allocated page, got {page}")
            self._is_allocated[page] = 0
            self._free.append(page)

    def check_integrity(self) -> None:
        """Raises AssertionError unless each page is either allocated or once in the free list."""
        assert len(self._is_allocated) == self.num_pages
        assert sorted(self._free) == [
            page for page in range(self.num_pages) if not self._is_allocated[page]
        ], "the free list does not hold exactly the pages that are not allocated"
