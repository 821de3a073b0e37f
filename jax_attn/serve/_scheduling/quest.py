"""Quest (arXiv 2406.10774): a decode reads some pages of its request, and the others stay.

The scheduler knows nothing of it: pages are as they are without it. The device chooses them in the
step itself, for each layer, see models' `selected_pages`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Quest:
    """Each token of an output reads `pages` pages in each layer after the first ones, its own last
    page among them. Tokens of prompts, and drafts with the token in front of them, read all.

    Raises ValueError: fewer than two pages, of which one could be chosen.
    """

    pages: int

    def __post_init__(self) -> None:
        if self.pages < 2:
            raise ValueError(
                "quest: pages: expected at least 2, the last page and one that is chosen, got"
                f" {self.pages}"
            )
