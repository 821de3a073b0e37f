"""jax.export with symbolic dimensions: sizes of no plan may be symbolic, others are refused."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja
from helpers import entry_points
from helpers.entry_points import compare, normal
from jax_attn import compat

PLAN = entry_points.plan_of(entry_points.spec())
TABLE = np.int32([[0, 1], [2, 3]])


def export(call, arrays, dims):
    """dims: number of an array -> its symbolic shape; the others have their own."""
    scope = jax.export.SymbolicScope()
    described = [
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype), x)
        for x in arrays
    ]
    for i, shape in dims.items():
        symbolic = jax.export.symbolic_shape(shape, scope=scope)
        described[i] = jax.ShapeDtypeStruct(symbolic, described[i].dtype)
    return jax.export.export(jax.jit(call), disabled_checks=ja.export_checks())(*described)


def of_pool(q, pages, plan):
    return ja.attention(q, pages, pages, plan)


WORKING = {
    "states": (
        ja.merge_states, (normal(2, 5, 3, 8), normal(2, 5, 3)), {0: "s, n, 3, 8", 1: "s, n, 3"}
    ),
    "gradients of states": (
        jax.grad(lambda o, lse: jnp.sum(ja.merge_states(o, lse)[0]), (0, 1)),
        (normal(2, 5, 3, 8), normal(2, 5, 3)), {0: "2, n, 3, 8", 1: "2, n, 3"},
    ),
    "triplets": (ja.state_to_triplet, (normal(5, 3, 8), normal(5, 3)), {0: "n, 3, 8", 1: "n, 3"}),
    "pool": (of_pool, (normal(6, 4, 16), normal(5, 4, 2, 16), PLAN), {1: "p, 4, 2, 16"}),
    "pool of layers": (
        lambda q, pages, plan: ja.attention(q, pages, pages, plan, layer=1),
        (normal(6, 4, 16), normal(2, 5, 4, 2, 16), PLAN), {1: "l, p, 4, 2, 16"},
    ),
    "append": (
        lambda new, pages, plan: ja.append_kv(pages, pages + 1, new, new, plan),
        (normal(6, 2, 16), normal(5, 4, 2, 16), PLAN), {1: "p, 4, 2, 16"},
    ),
    "page table": (
        lambda pages: ja.plan(entry_points.spec(), *entry_points.PAGED[:3], pages).buffer,
        (entry_points.PAGED[3],), {0: "n"},
    ),
    "another library's pool": (
        lambda q, pages: compat.paged_attention(q, pages, pages, np.int32([5, 3]), TABLE),
        (normal(2, 4, 16), normal(2, 5, 4, 16)), {1: "2, p, 4, 16"},
    ),
}  # fmt: skip
REFUSED = {
    "attention: q: expected float32.6, 4, 16. .* got float32.t, 4, 16.": (
        of_pool, (normal(6, 4, 16), normal(5, 4, 2, 16), PLAN), {0: "t, 4, 16"},
    ),
    "attention: gradients: k: sizes that are known": (
        jax.grad(lambda *x: jnp.sum(of_pool(*x))),
        (normal(6, 4, 16), normal(5, 4, 2, 16), PLAN), {1: "p, 4, 2, 16"},
    ),
    "plan: kv_lens: a length that is known": (
        lambda *x: ja.plan(entry_points.ragged(), *x).buffer, entry_points.PAGED[:2],
        {0: "b + 1", 1: "b"},
    ),
    "dot_product_attention: query: sizes that are known": (
        lambda q: ja.dot_product_attention(q, q, q), (normal(2, 5, 4, 16),), {0: "2, t, 4, 16"},
    ),
    "dot_product_attention: bias: sizes that are known": (
        lambda q, bias: ja.dot_product_attention(q, q, q, bias),
        (normal(2, 5, 4, 16), normal(5, 5)), {1: "t, 5"},
    ),
    "paged_attention: q: sizes that are known": (
        lambda q, pages: compat.paged_attention(q, pages, pages, np.int32([5, 3]), TABLE),
        (normal(2, 4, 16), normal(2, 5, 4, 16)), {0: "b, 4, 16"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WORKING)
def test_sizes_of_no_plan_may_be_symbolic(name):
    call, arrays, dims = WORKING[name]
    exported = jax.export.deserialize(export(call, arrays, dims).serialize())
    compare(exported.call(*arrays), jax.jit(call)(*arrays))


@pytest.mark.parametrize("sentence", REFUSED)
def test_others_are_refused_in_one_sentence(sentence):
    with pytest.raises((NotImplementedError, ValueError), match=f"^{sentence}"):
        export(*REFUSED[sentence])
