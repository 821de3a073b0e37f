"""Masks that save work: what a mask does to blocks of queries and keys, for plans to skip."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

if TYPE_CHECKING:
    from jax_attn.spec import AttentionSpec

# Classes of a block. May any pair of it be visible, may any be hidden? Of several blocks: their OR.
VISIBLE, HIDDEN, MIXED = 1, 2, 3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockMap:
    """What a mask does to blocks of q_block query tokens and kv_block positions.

    classes: [num_row_blocks, num_kv_blocks], u8: VISIBLE, all of the block is; HIDDEN, nothing is;
        MIXED, it depends, or nobody knows. Row block i has rows [i * q_block, (i + 1) * q_block) of
        q, column j the positions [j * kv_block, (j + 1) * kv_block) of each row's own request.
    q_block, kv_block: tokens. Best are divisors of the height of query tiles and of tile_kv.

    A pytree: made inside jit, or passed to it, new classes never recompile.
    """

    classes: Any
    q_block: int = dataclasses.field(default=64, metadata={"static": True})
    kv_block: int = dataclasses.field(default=128, metadata={"static": True})

    @classmethod
    def of_dense(cls, visible: Any, q_block: int = 64, kv_block: int = 128) -> BlockMap:
        """The map of a dense mask.

        visible: [num_rows, num_positions], bool, host or traced. Rows of q by positions of keys.
        """
        rows, columns = visible.shape
        xp = jax.numpy if isinstance(visible, jax.Array) else np
        padding = (-rows % q_block, -columns % kv_block)
        blocks = [
            xp.pad(x, [(0, n) for n in padding]).reshape(
                (rows + padding[0]) // q_block, q_block, -1, kv_block
            )
            for x in (visible, ~visible)
        ]
        some, hidden = (x.any((1, 3)).astype(np.uint8) for x in blocks)
        return cls(some * VISIBLE + hidden * HIDDEN, q_block, kv_block)


def check_block_map(spec: AttentionSpec, block_map: Any) -> None:
    """Raises ValueError for a map that does not fit the spec, TypeError for what is none."""
    op = "plan: block_map"
    if block_map is None:
        if spec.max_steps is not None:
            raise ValueError(f"{op}: expected one for a spec with max_steps, got None.")
        return
    if not isinstance(block_map, BlockMap):
        raise TypeError(f"{op}: expected a jax_attn.masks.BlockMap, got {type(block_map)}.")
    if spec.max_steps is None:
        raise ValueError(
            f"{op}: expected None for a spec with max_steps=None, got one; give the spec room for"
            " step lists: max_steps, in steps of tile_kv keys that query tiles visit."
        )
    for name in ("q_block", "kv_block"):
        tokens = getattr(block_map, name)
        if isinstance(tokens, bool) or not isinstance(tokens, int) or not 0 < tokens < 2**31:
            raise ValueError(f"{op}: {name}: expected a number of tokens >= 1, got {tokens!r}.")
    dtype = getattr(block_map.classes, "dtype", None)
    shape: tuple[int, ...] = getattr(block_map.classes, "shape", ())
    num_rows = -(-spec.max_qo_tokens // block_map.q_block)
    if dtype != np.uint8 or len(shape) != 2 or shape[0] < num_rows:
        raise ValueError(
            f"{op}: classes: expected uint8[at least {num_rows} rows of blocks, for max_qo_tokens ="
            f" {spec.max_qo_tokens} at q_block = {block_map.q_block}; columns], got {dtype}"
            f"{list(shape)}."
        )
