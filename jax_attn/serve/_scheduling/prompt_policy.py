"""SnapKV (arXiv 2404.14469) and H2O (arXiv 2306.14048): prompts that are read keep some keys.

The prompt goes through the model over all its keys. Then each KV head of each layer keeps `keep` of
them, its own: those with the largest sums of attention weights, and the last ones. All heads keep
equally many, so they stay in one page table: slot i of the pages has key i of those that a head
kept. `KvMemory` gives a sequence pages for them when it enters, and takes the pages of the whole
prompt back when it has been read. The prefix cache may still have these, as nothing was changed in
them; pages of what follows depend on the policy and are never shared.

Keys are rotated at their index in the text and stay so. Tokens of the output have their index, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class PromptPolicy:
    """A prompt of more tokens keeps `keep` keys in each head.

    recent: of these, those of the last tokens.
    queries: whose weights are summed: the prompt's last ones; None: all.
    pool: keys before `recent` get the sums of so many neighbours, as retention.snapkv does it.

    Raises ValueError: recent is not within 1 and keep.
    """

    name: str
    keep: int
    recent: int
    queries: int | None
    pool: int

    def __post_init__(self) -> None:
        if not 1 <= self.recent <= self.keep:
            raise ValueError(
                f"{self.name}: keep: expected at least {max(1, self.recent)}, the last tokens that"
                f" always stay, got {self.keep}"
            )

    @classmethod
    def snapkv(cls, keep: int, window: int = 32) -> PromptPolicy:
        """keep: the window's keys among them. window: queries whose weights are summed."""
        return cls("snapkv", keep, window, queries=window, pool=7)

    @classmethod
    def h2o(cls, keep: int) -> PromptPolicy:
        """Half of the kept keys are the last ones, as in the paper."""
        return cls("h2o", keep, -(-keep // 2), queries=None, pool=1)

    def num_pages(self, page_size: int) -> int:
        """Pages of the kept keys."""
        return -(-self.keep // page_size)


class KeptKeys(NamedTuple):
    """The device copies the keys that a prompt keeps from its pages to others.

    tokens: of the prompt. adapter: its place on the device; -1: none.
    """

    tokens: list[int]
    adapter: int
    sources: list[int]
    targets: list[int]

    @property
    def pages_written(self) -> list[int]:
        """The pages of the device that the copy writes."""
        return self.targets
