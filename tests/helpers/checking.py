"""Compares attention states: positions of nan and inf, then errors row by row, then direction."""

from __future__ import annotations

import numpy as np


def assert_close_state(o, lse, want_o, want_lse, o_bound, lse_bound) -> None:
    """Checks a state against the truth and prints the first offending coordinate.

    o, want_o: [n, num_heads, head_dim_vo]; lse, want_lse: [n, num_heads]; want_* are float64.
    o_bound, lse_bound: [n, num_heads] largest absolute error allowed in a row.
    """
    o, lse = (np.asarray(x).astype(np.float64) for x in (o, lse))
    assert o.shape == want_o.shape and lse.shape == want_lse.shape
    _check_special("lse", lse, want_lse)
    _check_special("o", o, want_o)
    _check_error("lse", lse, want_lse, lse_bound)
    _check_error("o", o, want_o, o_bound[..., None])
    # Every element of a row may be within its bound while all are off in the same direction.
    finite = np.isfinite(want_o).all(-1)
    norms = np.linalg.norm(o, axis=-1) * np.linalg.norm(want_o, axis=-1)
    checked = finite & (norms > 0)
    cosine = (o * np.where(checked[..., None], want_o, 0)).sum(-1) / np.where(checked, norms, 1)
    limit = 1 - 4 * (o_bound / np.maximum(np.abs(want_o).max(-1, initial=0), 1e-30)) ** 2 - 1e-6
    _fail_at("cosine of o", checked & (cosine < limit), cosine, np.ones_like(cosine), 1 - limit)


def assert_same_bits(name: str, got, want) -> None:
    """Checks that bits are equal. NaNs with the same bits are equal; 0 and -0 differ."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape and got.dtype == want.dtype, (
        f"{name}: expected {want.dtype}{list(want.shape)}, got {got.dtype}{list(got.shape)}"
    )
    words = f"u{got.dtype.itemsize}"
    differ = np.ascontiguousarray(got).view(words) != np.ascontiguousarray(want).view(words)
    _fail_at(f"bits of {name}", differ, got, want, np.zeros(1))


def _check_special(name, got, want) -> None:
    for what, positions in (("nan", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        _fail_at(f"{what} in {name}", positions(got) != positions(want), got, want, np.zeros(1))


def _check_error(name, got, want, bound) -> None:
    finite = np.isfinite(want)
    error = np.abs(np.where(finite, got, 0) - np.where(finite, want, 0))
    _fail_at(name, error > bound, got, want, bound)


def _fail_at(name, wrong, got, want, bound) -> None:
    if not wrong.any():
        return
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    limit = np.broadcast_to(bound, wrong.shape)[at]
    raise AssertionError(
        f"{name}: {int(wrong.sum())} of {wrong.size} elements are wrong, the first at {list(at)}:"
        f" expected {want[at]!r}, got {got[at]!r} (bound {limit:.3g})"
    )
