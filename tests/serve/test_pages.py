"""The page allocator against a set of free pages."""

import random

import pytest

from jax_attn.serve._scheduling.pages import PageAllocator


def test_random_operations_against_a_set():
    rng = random.Random(0)
    allocator, free, held = PageAllocator(37), set(range(37)), []
    for _ in range(20_000):
        if rng.random() < 0.5:
            num_pages = rng.randrange(9)
            pages = allocator.allocate(num_pages)
            assert (pages is None) == (num_pages > len(free))
            if pages is not None:
                assert len(set(pages)) == num_pages
                assert set(pages) <= free
                free -= set(pages)
                held += pages
        else:
            rng.shuffle(held)
            given_back = [held.pop() for _ in range(min(len(held), rng.randrange(9)))]
            allocator.free(given_back)
            free |= set(given_back)
        assert allocator.num_free == len(free)
        assert all(allocator.is_allocated(page) == (page not in free) for page in range(37))
        allocator.check_integrity()


def test_the_same_calls_give_the_same_pages():
    def pages() -> list[list[int] | None]:
        allocator = PageAllocator(10)
        first, second = allocator.allocate(3), allocator.allocate(4)
        assert first is not None
        allocator.free(first)
        return [first, second, allocator.allocate(6)]

    assert pages() == pages()
    assert PageAllocator(10).allocate(3) is not None


def test_too_few_pages_change_nothing():
    allocator = PageAllocator(4)
    allocator.allocate(3)
    assert allocator.allocate(2) is None
    assert allocator.num_free == 1
    assert allocator.allocate(0) == []


@pytest.mark.parametrize("page", [-1, 4, 5, 10**9])
def test_free_refuses_what_is_no_page(page):
    allocator = PageAllocator(4)
    allocator.allocate(4)
    with pytest.raises(ValueError, match=f"expected an allocated page, got {page}"):
        allocator.free([page])
    allocator.check_integrity()


def test_free_refuses_a_page_twice():
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    with pytest.raises(ValueError, match="expected an allocated page"):
        allocator.free([pages[0], pages[0]])
    with pytest.raises(ValueError, match="expected an allocated page"):
        allocator.free([pages[0]])
    allocator.check_integrity()
    assert allocator.num_free == 3


def test_refuses_bad_numbers():
    with pytest.raises(ValueError, match="num_pages"):
        PageAllocator(0)
    with pytest.raises(ValueError, match="num_pages"):
        PageAllocator(1).allocate(-1)


@pytest.mark.parametrize("break_it", ["lost", "twice", "foreign"])
def test_integrity_check_sees(break_it):
    allocator = PageAllocator(4)
    allocator.allocate(1)
    if break_it == "lost":
        allocator._free.pop()
    elif break_it == "twice":
        allocator._free.append(allocator._free[0])
    else:
        allocator._is_allocated[allocator._free[0]] = 1
    with pytest.raises(AssertionError):
        allocator.check_integrity()
