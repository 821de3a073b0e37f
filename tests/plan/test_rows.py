"""rows and fixed_batch: what a loop over a batch needs beside its plan."""

import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja
from helpers.paths import EXAMPLES


def by_hand(qo_indptr, kv_lens, max_qo_tokens):
    """Request and position of each row, and last rows, token by token."""
    batch_size = len(kv_lens)
    request = [batch_size] * max_qo_tokens
    position, last = [0] * max_qo_tokens, [max_qo_tokens] * batch_size
    for r, (begin, end) in enumerate(zip(qo_indptr[:-1], qo_indptr[1:], strict=True)):
        for i in range(end - begin):
            request[begin + i] = r
            position[begin + i] = kv_lens[r] - (end - begin) + i
            last[r] = begin + i
    return request, position, last


def assert_rows(got, want):
    assert isinstance(got, ja.Rows)
    for name, a, b in zip(ja.Rows._fields, got, want, strict=True):
        assert a.dtype == np.int32, name
        np.testing.assert_array_equal(a, b, err_msg=name)


BATCHES = {
    "mixed": ([5, 1, 2, 1], [5, 20, 30, 1], 12),
    "empty requests": ([0, 0, 3, 0, 1, 0, 0], [9, 0, 3, 0, 2**30 - 1, 4, 0], 7),
    "full": ([4, 4], [4, 40], 8),
    "no query tokens": ([0, 0], [3, 0], 3),
    "no requests": ([], [], 3),
    "no rows": ([0, 0, 0], [7, 0, 1], 0),
}


@pytest.mark.parametrize("name", BATCHES)
def test_rows(name):
    qo_lens, kv_lens, max_qo_tokens = BATCHES[name]
    qo_indptr, kv_lens = np.cumsum([0, *qo_lens]), np.array(kv_lens, int)
    want = by_hand(qo_indptr, kv_lens, max_qo_tokens)
    host = ja.rows(qo_indptr, kv_lens, max_qo_tokens)
    assert all(type(x) is np.ndarray for x in host)
    assert_rows(host, want)
    assert_rows(ja.rows(qo_indptr.tolist(), kv_lens.tolist(), np.int64(max_qo_tokens)), want)
    assert_rows(ja.rows(jnp.array(qo_indptr), jnp.array(kv_lens), max_qo_tokens), want)
    traced = jax.jit(ja.rows, static_argnums=2)
    assert_rows(traced(qo_indptr, kv_lens, max_qo_tokens), want)
    # one of the two traced
    assert_rows(jax.jit(lambda x: ja.rows(qo_indptr, x, max_qo_tokens))(kv_lens), want)


def test_rows_of_random_batches():
    rng = np.random.default_rng(0)
    traced = jax.jit(ja.rows, static_argnums=2)
    for _ in range(20):
        qo_lens = rng.integers(0, 4, 5)
        qo_indptr, kv_lens = np.append(0, qo_lens.cumsum()), qo_lens + rng.integers(0, 9, 5)
        want = by_hand(qo_indptr, kv_lens, 16)
        assert_rows(ja.rows(qo_indptr, kv_lens, 16), want)
        assert_rows(traced(qo_indptr, kv_lens, 16), want)


def test_rows_in_loops():
    """A decode of two requests and a chunk of a third, step after step."""
    qo_indptr, begin = np.array([0, 1, 2, 5]), np.array([1, 7, 3])

    def step(kv_lens, _):
        return kv_lens + np.diff(qo_indptr), ja.rows(qo_indptr, kv_lens, 8)

    _, got = jax.jit(lambda x: jax.lax.scan(step, x, length=3))(begin)
    for i in range(3):
        want = by_hand(qo_indptr, begin + i * np.diff(qo_indptr), 8)
        assert_rows(ja.Rows(*(x[i] for x in got)), want)

    def count(state):
        kv_lens, total = state
        return kv_lens + 1, total + ja.rows(np.arange(4), kv_lens, 3).position.sum()

    loop = jax.jit(lambda x: jax.lax.while_loop(lambda s: s[0][0] < 4, count, (x, 0)))
    assert loop(begin)[1] == sum((begin + i - 1).sum() for i in range(3))


def test_scatters_and_sums_leave_padding_out():
    qo_indptr, kv_lens = np.array([0, 2, 2, 3]), np.array([2, 5, 9])
    request, position, last = map(jnp.array, ja.rows(qo_indptr, kv_lens, 5))
    x = jnp.arange(1.0, 6.0)
    np.testing.assert_array_equal(jax.ops.segment_sum(x, request, 3), [3, 0, 3])
    np.testing.assert_array_equal(jnp.zeros((3, 9)).at[request, position].set(x).sum(1), [3, 0, 3])
    np.testing.assert_array_equal(jnp.zeros(5).at[last].set(7), [0, 7, 7, 0, 0])
    np.testing.assert_array_equal(x[last], [2, 5, 3])  # the second request has no token


@pytest.mark.parametrize(
    ("qo_indptr", "kv_lens", "max_qo_tokens", "message"),
    [
        ([1, 2], [3], 4, r"rows: qo_indptr\[0\]: expected 0, got 1\."),
        ([0, 3, 2], [3, 3], 4, r"qo_indptr\[2\]: expected offsets that never decrease .* got 2"),
        ([0, 5], [5], 4, r"at most max_qo_tokens = 4, got 5; raise max_qo_tokens"),
        ([0, 0, 0], [2, -1], 4, r"kv_lens\[1\]: expected a length >= 0, got -1"),
        ([0, 1], [2**30], 4, r"kv_lens\[0\]: expected a length below 2\^30, got 1073741824"),
        ([0, 1], [2**31], 4, r"rows: kv_lens: expected values that fit int32"),
        ([0, 1, 4], [1, 2], 4, r"kv_lens\[1\]: .* 3, the .* got 2; kv_lens count the new"),
        ([0, 5], [0], 8, r"rows: kv_lens\[0\]: .* 5, the .* got 0; .* add them\.$"),
        ([0, 1], [1, 1], 4, r"rows: qo_indptr: expected 3 entries for a batch of 2, got 2"),
        ([0.0, 1.0], [1], 4, r"rows: qo_indptr: expected a 1-d integer array, got float64\[2\]"),
        ([0, 1], [[1]], 4, r"rows: kv_lens: expected a 1-d integer array, got int64\[1, 1\]"),
        ([0, 1], [1], -1, r"rows: max_qo_tokens: expected 0 to 2\^31 - 1, got -1"),
        ([0, 1], [1], 2**31, r"rows: max_qo_tokens: expected 0 to 2\^31 - 1, got 2147483648"),
    ],
)
def test_rows_refuses(qo_indptr, kv_lens, max_qo_tokens, message):
    with pytest.raises(ValueError, match=message):
        ja.rows(qo_indptr, kv_lens, max_qo_tokens)


@pytest.mark.parametrize("size", [4.0, True, None, np.arange(3)])
def test_rows_wants_a_static_size(size):
    with pytest.raises(TypeError, match="rows: max_qo_tokens: expected an int, got"):
        ja.rows([0, 1], [1], size)


def test_rows_of_bad_traced_lengths_stay_in_range():
    """They cannot raise, and the plan of the same lengths is faulty. Indices are still harmless."""
    traced = jax.jit(ja.rows, static_argnums=2)
    for qo_indptr in ([5, 2, 9, 1], [-3, -1, 2**31 - 1, 0], [0, 0, 90, 90]):
        request, _, _ = traced(np.array(qo_indptr), np.array([-1, 3, 2**31 - 1]), 7)
        assert ((request >= 0) & (request <= 3)).all()


FORMATS = [{}, {"kv_dtype": "int8"}, {"kv_dtype": "mxfp4"}, {"kv_dtype": "float8_e4m3fn"}]
LATENT = {"mla": True, "head_dim_vo": 32, "sm_scale": 0.1}


@pytest.mark.parametrize("fields", [*FORMATS, LATENT], ids=repr)
def test_a_fixed_batch_runs(fields):
    kv_heads = 1 if "mla" in fields else 2
    given = {"dtype": "bfloat16", "target": "cpu", **fields}
    batch = ja.fixed_batch(
        4, kv_heads, 64, batch_size=3, max_kv_len=20, num_layers=2, page_size=8, **given
    )
    spec, (k_pages, v_pages), (page_indptr, page_indices) = batch
    np.testing.assert_array_equal(page_indptr, [0, 3, 6, 9])
    assert sorted(page_indices) == list(range(9)) and page_indices.dtype == np.int32
    assert (spec.max_batch, spec.max_qo_tokens, spec.max_kv_pages, spec.num_pages) == (3, 3, 9, 9)
    assert jax.tree.map(jnp.shape, (k_pages, v_pages)) == spec.kv_shapes(2, 9, 8)
    assert (k_pages == 0).all() and k_pages.dtype == spec.dtype_of_kv
    # The longest lengths have room, and nothing longer.
    plan = ja.plan(spec, np.arange(4), [20, 24, 1], *batch.page_table)
    with pytest.raises(ValueError, match="expected at least 4 pages for kv_len 25"):
        ja.plan(spec, np.arange(4), [20, 25, 1], *batch.page_table)
    k_shape, v_shape = spec.new_kv_shapes
    k_new, v_new = jnp.ones(k_shape, "bfloat16"), v_shape and jnp.ones(v_shape, "bfloat16")
    k_pages, v_pages = ja.append_kv(k_pages, v_pages, k_new, v_new, plan, layer=1)
    o = ja.attention(jnp.ones(spec.q_shape, "bfloat16"), k_pages, v_pages, plan, layer=1)
    assert o.shape == spec.o_shape and np.isfinite(np.float32(o)).all() and (o[2] != 0).all()


def test_sizes_of_a_fixed_batch():
    one = ja.fixed_batch(2, 1, 64, batch_size=2, max_kv_len=16, max_qo_tokens=9, max_kv_pages=1)
    assert one.page_table[0].tolist() == [0, 1, 2]
    assert one.pages[0].shape == (2, 16, 1, 64)  # of one layer
    least = {"batch_size": 1, "max_kv_len": 1, "page_size": 1, "num_layers": 1}
    assert ja.fixed_batch(1, 1, 8, target="cpu", **least).pages[0].shape == (1, 1, 1, 1, 8)
    assert (one.spec.max_qo_tokens, one.spec.max_kv_pages, one.spec.num_pages) == (9, 1, 2)
    assert jax.eval_shape(lambda: ja.fixed_batch(2, 1, 64, batch_size=2, max_kv_len=17).pages)[
        0
    ].shape == (4, 16, 1, 64)
    sizes = {"batch_size": 2, "max_kv_len": 5, "page_size": 4, "num_layers": 3}
    for name in sizes:
        for bad in (0, -1, 2.5, True):
            with pytest.raises(ValueError, match=f"fixed_batch: {name}: expected an integer >= 1"):
                ja.fixed_batch(2, 1, 64, **sizes | {name: bad})
    with pytest.raises(ValueError, match="fixed_batch: page_size: expected an integer >= 1, got"):
        ja.fixed_batch(2, 1, 64, **sizes | {"page_size": None})
    for name in ("max_batch", "num_pages"):
        with pytest.raises(TypeError, match=r"expected neither.*make an AttentionSpec"):
            ja.fixed_batch(2, 1, 64, **sizes, **{name: 3})
    ragged = ja.AttentionSpec(2, 1, 64, page_size=None, max_kv_tokens=8, target="cpu")
    with pytest.raises(ValueError, match="page_size: expected the tokens of a page"):
        ragged.empty_pages(3)


def test_generation_on_the_device_gives_the_tokens_of_dense_attention():
    """The example, whose prompts are cut into chunks, and float64 on whole sequences."""
    example = runpy.run_path(str(EXAMPLES / "generate_on_device.py"))
    embedding, head, qkv, out = (
        np.float64(example[name]) for name in ("embedding", "head", "qkv", "out")
    )
    heads, kv_heads, chunk = example["heads"], example["kv_heads"], example["chunk"]
    prompt_lens = np.asarray(example["prompt_lens"])
    limits, texts = (np.asarray(example["done"][name]) for name in ("limit", "text"))
    assert (prompt_lens > chunk).sum() > 1 and (prompt_lens < chunk).any()  # chunks, and whole
    stopped = 0
    for prompt, prompt_len, limit, text in zip(
        np.asarray(example["prompts"]), prompt_lens, limits, texts, strict=True
    ):
        tokens = prompt[:prompt_len].tolist()
        while len(tokens) <= limit:
            x = embedding[tokens]
            hidden = np.triu(np.full((len(x), len(x)), -np.inf), 1)
            for w_in, w_out in zip(qkv, out, strict=True):
                projected = np.einsum("th,hnd->ntd", np.tanh(x), w_in)
                q, k, v = np.split(projected, (heads, heads + kv_heads))
                k, v = (y.repeat(heads // kv_heads, axis=0) for y in (k, v))
                logits = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]) + hidden
                p = np.exp(logits - logits.max(-1, keepdims=True))
                o = p @ v / p.sum(-1, keepdims=True)
                x = x + np.einsum("ntd,ndh->th", o, w_out)
            tokens.append(int((x[-1] @ head.T).argmax()))
            if tokens[-1] == example["end_token"]:
                stopped += 1
                break
        np.testing.assert_array_equal(text[: len(tokens)], tokens)
        assert not text[len(tokens) :].any()
    assert example["done"]["num_free"] == example["num_pages"]
    assert stopped  # by the token that ends a text
