"""Batches whose requests share prefixes."""

from dataclasses import dataclass

import numpy as np

import jax_attn as ja
from jax_attn import masks


@dataclass
class Told:
    """A batch and its prefix levels. Page ids follow the order of requests."""

    fields: dict  # arguments of AttentionSpec
    lengths: dict  # arguments of plan
    levels: tuple

    def plan(self, target="cpu", **more):
        given = {"prefix_levels": self.levels} | more
        return ja.plan(ja.AttentionSpec(**self.fields, target=target), **self.lengths, **given)


def one_document(**fields):
    """16 questions about 2048 tokens; the first four share 512 more."""
    lens = np.r_[np.full(4, 2048 + 512 + 100), np.full(12, 2048 + 100)]
    pages = -(-lens // 16)
    tables, at = [], 128 + 32
    for r, n in enumerate(pages):
        num_shared = 160 if r < 4 else 128
        tables.append(np.r_[np.arange(num_shared), at : at + n - num_shared])
        at += n - num_shared
    fields = {
        "num_qo_heads": 8, "num_kv_heads": 2, "head_dim_qk": 64, "max_batch": 16,
        "max_qo_tokens": 16, "max_kv_pages": int(pages.sum()),
    } | fields  # fmt: skip
    lengths = {
        "qo_indptr": np.arange(17),
        "kv_lens": lens,
        "page_indptr": np.r_[0, np.cumsum(pages)],
        "page_indices": np.concatenate(tables),
    }
    levels = (([0, 16], [2048]), ([0, 4, 16], [2560, 0]))
    return Told(fields, lengths, levels)


def num_shared(plan):
    return plan.header()["num_shared_tokens"]


class SharedPrompts:
    """Requests that begin with the same 2,048 tokens; the last ones are drafts of a tree."""

    PREFIX, NUM_REQUESTS, PAGE = 2048, 9, 16

    def __init__(self, rng, num_drafts=5):
        self.num_drafts = num_drafts
        own = rng.integers(1, 300, self.NUM_REQUESTS)
        self.kv_lens = (self.PREFIX + own + self.num_drafts).astype(np.int32)
        self.qo_indptr = np.arange(self.NUM_REQUESTS + 1, dtype=np.int32) * self.num_drafts
        num_pages = -(-self.kv_lens // self.PAGE)
        self.page_indptr = np.concatenate([[0], np.cumsum(num_pages)]).astype(np.int32)
        num_shared = self.PREFIX // self.PAGE
        ids = rng.permutation(int(num_shared + (num_pages - num_shared).sum()) + 4)
        tables, self.num_pages = [], len(ids)
        for n in num_pages:
            first = num_shared + sum(len(t) - num_shared for t in tables)
            tables.append(np.concatenate([ids[:num_shared], ids[first : first + n - num_shared]]))
        self.page_indices = np.concatenate(tables).astype(np.int32)

    def arguments(self):
        return self.qo_indptr, self.kv_lens, self.page_indptr, self.page_indices

    def spec(self, mask, num_qo_heads, num_kv_heads):
        """Spec for plans on a CPU with step lists and shared prefixes: f32, head_dim 64."""
        return ja.AttentionSpec(
            num_qo_heads, num_kv_heads, 64, dtype="float32", page_size=self.PAGE, causal=False,
            max_batch=self.NUM_REQUESTS, max_qo_tokens=int(self.qo_indptr[-1]),
            max_kv_pages=len(self.page_indices), variant=mask.variant(), max_steps=400,
            share_prefixes=True, target="cpu", num_ctas=3,
        )  # fmt: skip

    def pages(self, rng, num_heads, head_dim):
        """Random k and v pages, NaN where no request has a token."""
        pages = np.full((self.num_pages, self.PAGE, num_heads, head_dim), np.nan, np.float32)
        for r, kv_len in enumerate(self.kv_lens):
            at = np.arange(kv_len)
            at = self.page_indices[self.page_indptr[r] + at // self.PAGE], at % self.PAGE
            new = rng.normal(size=(kv_len, num_heads, head_dim))
            pages[at] = np.where(np.isnan(pages[at]), new, pages[at])
        return pages

    def mask(self, name, rng):
        if name == "tree":
            draft = np.arange(self.num_drafts * self.NUM_REQUESTS) % self.num_drafts
            return masks.tree([rng.integers(-1, n) if n else -1 for n in draft], self.qo_indptr)
        # All requests see the first 700 tokens' document; the others differ.
        q_ids = rng.integers(1, 3, self.qo_indptr[-1]).astype(np.int32)
        kv_ids = rng.integers(1, 3, (self.NUM_REQUESTS, self.kv_lens.max())).astype(np.int32)
        return masks.Mask(
            lambda at, q_ids, kv_ids:
                (at.kv_pos < 700) | (q_ids[at.q_row] == kv_ids[at.request, at.kv_pos]),
            {"q_ids": q_ids, "kv_ids": kv_ids},
        )  # fmt: skip
