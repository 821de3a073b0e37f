"""Transforms of q, k, v and o: against the user's functions, and against keys rotated ahead."""

import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja
from helpers.variants import on_every_cpu
from jax_attn import _core, reference

HEADS, KV_HEADS, DIM = 6, 2, 64
RNG = np.random.default_rng(3)
FREQUENCIES = (1e4 ** (-np.arange(0, DIM, 2) / DIM)).astype(np.float32)
ANGLES = np.arange(400, dtype=np.float32)[:, None] * FREQUENCIES
OPERANDS = {
    "cos": np.cos(ANGLES),
    "sin": np.sin(ANGLES),
    "weight": RNG.uniform(0.5, 1.5, DIM).astype(np.float32),
    "head_weights": RNG.uniform(0.5, 1.5, (KV_HEADS, DIM)).astype(jnp.bfloat16),
    "matrix": (RNG.normal(size=(HEADS, DIM, DIM)) / 8).astype(np.float32),
    "place": RNG.integers(0, 300, 30 * 16).astype(np.int32),
    "seen": RNG.random(400) < 0.7,
}


def rotate(x, cos, sin):  # Su et al., arXiv 2104.09864, halves as in Llama
    a, b = x[: DIM // 2], x[DIM // 2 :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin])


def rope_q(x, at, cos, sin):
    return rotate(x, cos[at.q_pos], sin[at.q_pos])


def rope_k(x, at, cos, sin):
    return rotate(x, cos[at.kv_pos], sin[at.kv_pos])


def rope_of_slots(x, at, place):  # positions of the text, by slot of the pages
    angles = place[at.kv_row] * jnp.asarray(FREQUENCIES)
    return rotate(x, jnp.cos(angles), jnp.sin(angles))


def pairs(x, at):  # neighbours are pairs, as in GPT-J
    angles = at.kv_pos * jnp.asarray(FREQUENCIES)
    a, b = x[0::2], x[1::2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(-1)


def partial(x, at, cos, sin):  # a quarter of the elements rotates, as in GPT-NeoX
    a, b, rest = x[:8], x[8:16], x[16:]
    c, s = cos[at.kv_pos, :8], sin[at.kv_pos, 24:]
    return jnp.concatenate([a * c - b * s, b * c + a * s, rest])


def norm(x, at, weight):  # Zhang and Sennrich, arXiv 1910.07467
    return x * jax.lax.rsqrt(jnp.mean(x * x) + 1e-6) * weight


def norm_of_heads(x, at, head_weights):
    return x / (1 + jnp.max(x) - jnp.min(x)) * head_weights[at.kv_head]


def norm_then_rope(x, at, weight, cos, sin):  # Qwen3
    return rope_k(norm(x, at, weight), at, cos, sin)


def odd(x, at, seen):  # everything else: bools, integers, reversals, a lane for all
    shift = jnp.where(seen[at.kv_pos], at.kv_head - at.request, at.kv_len - at.q_len)
    lanes = jnp.where(jnp.arange(DIM) % 3 == shift % 3, x, x[::-1])
    return jnp.tanh(lanes) + x[5] * 0.1 + jnp.roll(x, 7) / (2.0 + shift * shift)


def project(x, at, matrix):
    return jnp.dot(x, matrix[at.head], precision="highest")


def project_back(x, at, matrix):
    return jnp.dot(matrix[at.head], x, precision="highest")


def gate(x, at):
    return x * jax.nn.sigmoid(at.q_pos * 0.1 - at.head)


def scale_v(x, at):
    return x * (1 + at.kv_pos * 0.01) + at.kv_head


VARIANTS = {
    "rope": {"q": rope_q, "k": rope_k},
    "rope_of_slots": {"k": rope_of_slots},
    "pairs": {"k": pairs},
    "partial": {"k": partial},
    "norm": {"k": norm, "v": norm},
    "norm_of_heads": {"k": norm_of_heads, "v": scale_v},
    "norm_then_rope": {"q": rope_q, "k": norm_then_rope},
    "odd": {"k": odd, "v": odd},
    "project": {"q": project, "o": project_back},
    "gate": {"v": scale_v, "o": gate},
}


@functools.cache
def variant_of(name, **more):
    return ja.Variant(**VARIANTS[name], **more, head_dim=DIM, operands=named_operands(name))


def named_operands(name):
    named = [f.__code__.co_varnames[2 : f.__code__.co_argcount] for f in VARIANTS[name].values()]
    return {x: OPERANDS[x] for x in dict.fromkeys(sum(named, ()))}


@jax.jit
def attend(q, k, v, plan, operands, new):
    return ja.attention(q, k, v, plan, variant_operands=operands, return_lse=True, **new)


@dataclasses.dataclass(frozen=True)
class Batch:
    paged: bool = True
    dtype: str = "float32"
    fresh: bool = False
    spec: tuple = ()

    def make(self, variant, seed=0):
        """(spec, arguments of plan, q, k, v, k_new and v_new) with dead rows that hold NaN."""
        rng = np.random.default_rng(seed)
        qo_lens, kv_lens = np.array([1, 9, 23, 0, 1]), np.array([150, 40, 23, 8, 65], np.int32)
        qo_indptr = np.int32(np.cumsum([0, *qo_lens]))
        num_pages, page_size = 30, 16
        lead = (num_pages, page_size) if self.paged else (300,)
        rows = 40
        q = rng.normal(size=(rows, HEADS, DIM))
        k, v = rng.normal(size=(2, *lead, KV_HEADS, DIM))
        fields = {"max_qo_tokens": rows, "max_batch": 6, "dtype": self.dtype, "variant": variant}
        arguments = [qo_indptr, kv_lens]
        new = {}
        if self.paged:
            pages = -(-kv_lens // page_size)
            arguments += [np.int32(np.cumsum([0, *pages])), np.int32(rng.permutation(num_pages))]
            fields |= {"max_kv_pages": 30}
        else:
            fields |= {"page_size": None, "max_kv_tokens": 300}
            k[kv_lens.sum() :] = np.nan
        q[qo_indptr[-1] :] = np.nan
        if self.fresh:
            fields["fresh_kv"] = True
            new = {"k_new": rng.normal(size=(rows, KV_HEADS, DIM)).astype(self.dtype)}
            new["v_new"] = rng.normal(size=(rows, KV_HEADS, DIM)).astype(self.dtype)
        spec = ja.AttentionSpec(
            HEADS, KV_HEADS, DIM, **{"target": "cpu", **fields, **dict(self.spec)}
        )
        return spec, arguments, *(x.astype(self.dtype) for x in (q, k, v)), new


def appended(spec, arguments, k, v, new):
    """k and v with the new tokens, which the reference reads."""
    qo_indptr, kv_lens, page_indptr, page_indices = arguments
    k, v = k.copy(), v.copy()
    for r, kv_len in enumerate(kv_lens):
        for row in range(qo_indptr[r], qo_indptr[r + 1]):
            at = kv_len - qo_indptr[r + 1] + row
            page = page_indices[page_indptr[r] + at // spec.page_size]
            k[page, at % spec.page_size] = new["k_new"][row]
            v[page, at % spec.page_size] = new["v_new"][row]
    return k, v


def check(batch, name, **more):
    variant = variant_of(name, **more)
    spec, arguments, q, k, v, new = batch.make(variant)
    operands = named_operands(name)
    o, lse = attend(q, k, v, ja.plan(spec, *arguments), operands, new)
    if new:
        k, v = appended(spec, arguments, k, v, new)
    exact = [x.astype(np.float64) for x in (q, k, v)] if spec.dtype == "float32" else [q, k, v]
    want, want_lse = reference.attention(*exact, *arguments, spec=spec, variant_operands=operands)
    live = slice(0, arguments[0][-1])
    tolerance = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}[spec.dtype]
    np.testing.assert_allclose(
        np.asarray(o, np.float32), np.asarray(want, np.float32), rtol=tolerance, atol=tolerance
    )
    np.testing.assert_allclose(lse[live], want_lse[live], rtol=tolerance, atol=tolerance)
    assert not np.asarray(o)[arguments[0][-1] :].any()


BATCHES = {
    "pages": Batch(),
    "ragged": Batch(paged=False),
    "bf16": Batch(dtype="bfloat16"),
    "fresh_f16": Batch(dtype="float16", fresh=True),
    "ragged_bf16": Batch(paged=False, dtype="bfloat16"),
    "short_chunks": Batch(spec=(("schedule", "fixed_split"), ("kv_split", 128))),
    "window": Batch(dtype="bfloat16", spec=(("window_left", 19), ("schedule", "no_split"))),
}
# Slots are rows of pages; a norm of what bf16 rounds differs by more than a unit.
_PAGES_ONLY = {"rope_of_slots"}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("batch", ["pages", "ragged"])
def test_equals_the_functions(batch, name):
    if batch == "ragged" and name in _PAGES_ONLY:
        name = "rope"
    check(BATCHES[batch], name)


@on_every_cpu
@pytest.mark.parametrize("batch", ["pages", "fresh_f16", "bf16"])
def test_every_instruction_set(backend, batch):
    check(BATCHES[batch], "norm_then_rope")
    check(BATCHES[batch], "odd")


@on_every_cpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kv_heads", [1, 2, 3])
def test_rotates_heads_together(backend, kv_heads, dtype):
    """Against keys that were rotated ahead: halves of an odd number of vectors, and an odd number
    of heads."""
    dim, kv_lens = 96, np.int32([150, 40])
    rng = np.random.default_rng(kv_heads)
    q, k, v = (
        jnp.asarray(rng.normal(size=(*lead, heads, dim)), dtype)
        for lead, heads in (((3,), 2 * kv_heads), ((13, 16), kv_heads), ((13, 16), kv_heads))
    )
    angles = np.arange(150)[:, None] * 1e4 ** (-np.arange(0, dim, 2) / dim)
    tables = {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}

    def rope(x, at, cos, sin):
        a, b, c, s = x[: dim // 2], x[dim // 2 :], cos[at.kv_pos], sin[at.kv_pos]
        return jnp.concatenate([a * c - b * s, b * c + a * s])

    pages = np.int32(rng.permutation(13))
    places = np.zeros((13, 16), np.int32)
    for first, count in ((0, 10), (10, 3)):
        places[pages[first : first + count]] = np.arange(16 * count).reshape(-1, 16)
    cos, sin = (np.pad(tables[x], ((0, 10), (0, 0)))[places][:, :, None] for x in tables)
    a, b = np.split(np.float32(k), 2, axis=-1)
    rotated = jnp.asarray(np.concatenate([a * cos - b * sin, b * cos + a * sin], -1), dtype)

    def attend_with(variant, k):
        spec = ja.AttentionSpec(
            2 * kv_heads, kv_heads, dim, dtype=dtype, max_qo_tokens=3, max_batch=2,
            max_kv_pages=13, variant=variant, target="cpu",
        )  # fmt: skip
        plan = ja.plan(spec, np.int32([0, 1, 3]), kv_lens, np.int32([0, 10, 13]), pages)
        return np.float32(ja.attention(q, k, v, plan, variant_operands=tables if variant else None))

    found = attend_with(ja.Variant(k=rope, head_dim=dim, operands=tables), k)
    tolerance = {"float32": 2e-6, "bfloat16": 1e-2}[dtype]
    np.testing.assert_allclose(found, attend_with(None, rotated), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("batch", ["ragged_bf16", "short_chunks", "window"])
def test_every_route(batch):
    check(BATCHES[batch], "rope")


def test_with_logits_and_a_mask():
    def logits(score, at):
        return score * 0.5 - 0.01 * (at.q_pos - at.kv_pos)

    def mask(at):
        return (at.kv_pos < 4) | (at.q_pos - at.kv_pos < 30)

    check(BATCHES["pages"], "rope", logits=logits, mask=mask)


def rotated(x, positions):
    """x [rows, heads, DIM] rotated as complex numbers."""
    half = DIM // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * positions * FREQUENCIES)
    return np.concatenate([turned.real, turned.imag], axis=-1).astype(np.float32)


def test_equals_keys_that_were_rotated():
    """The same attention as jax.nn over rotated q and k, which no code here computed."""
    rng = np.random.default_rng(1)
    kv_len, qo_len = 70, 5
    q = rng.normal(size=(qo_len, HEADS, DIM)).astype(np.float32)
    k, v = rng.normal(size=(2, kv_len, KV_HEADS, DIM)).astype(np.float32)
    pages = np.zeros((2, 8, 16, KV_HEADS, DIM), np.float32)
    order = np.int32(rng.permutation(8)[:5])
    for t in range(kv_len):
        pages[:, order[t // 16], t % 16] = k[t], v[t]
    spec = ja.AttentionSpec(
        HEADS, KV_HEADS, DIM, dtype="float32", max_qo_tokens=qo_len, max_batch=1, max_kv_pages=5,
        variant=variant_of("rope"), target="cpu",
    )  # fmt: skip
    plan = ja.plan(spec, np.int32([0, qo_len]), np.int32([kv_len]), np.int32([0, 5]), order)
    o = ja.attention(q, *pages, plan, variant_operands=named_operands("rope"))
    q_pos, kv_pos = np.arange(kv_len - qo_len, kv_len), np.arange(kv_len)
    want = jax.nn.dot_product_attention(
        rotated(q, q_pos[:, None, None])[None],
        rotated(k, kv_pos[:, None, None])[None],
        v[None],
        mask=(kv_pos <= q_pos[:, None])[None, None],
    )[0]
    np.testing.assert_allclose(o, want, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("batch", ["pages", "ragged"])
@pytest.mark.parametrize("name", ["norm_then_rope", "project", "norm_of_heads"])
def test_gradients(batch, name):
    """Those of q, k, v and of float operands, against the same functions around plain attention."""
    variant = variant_of(name)
    spec, arguments, q, k, v, _ = BATCHES[batch].make(variant)
    q, k, v = (np.nan_to_num(x) for x in (q, k, v))
    plan = ja.plan(spec, *arguments)
    plain_spec = dataclasses.replace(
        spec,
        page_size=None,
        max_kv_pages=None,
        max_kv_tokens=300,
        variant=None,
        share_prefixes=None,
    )
    qo_indptr, kv_lens = arguments[:2]
    plain_plan = ja.plan(plain_spec, qo_indptr, kv_lens)
    weights = np.random.default_rng(5).normal(size=(*q.shape[:2], DIM)).astype(np.float32)
    facts = facts_of(arguments, spec)

    def loss(q, k, v, operands):
        return (ja.attention(q, k, v, plan, variant_operands=operands) * weights).sum()

    def plain_loss(q, k, v, operands):
        if spec.is_paged:
            k, v = (x[facts["page"], facts["slot"]] for x in (k, v))
        rows = {"q": q, "k": k, "v": v}
        rows = {n: apply(VARIANTS[name].get(n), x, facts[n], operands) for n, x in rows.items()}
        o = ja.attention(rows["q"], rows["k"], rows["v"], plain_plan)
        o = apply(VARIANTS[name].get("o"), o, facts["q"], operands)
        return (o[: qo_indptr[-1]] * weights[: qo_indptr[-1]]).sum()

    operands = {x: jnp.asarray(array, jnp.float32) for x, array in named_operands(name).items()}
    given = {x: jnp.asarray(array) for x, array in named_operands(name).items()}
    found = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(q, k, v, given)
    want = jax.jit(jax.grad(plain_loss, argnums=(0, 1, 2, 3)))(q, k, v, operands)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        scale = np.abs(b).max()
        tolerance = 2e-2 if a.dtype == jnp.bfloat16 else 1e-4
        np.testing.assert_allclose(
            np.float32(a), np.float32(b), rtol=tolerance, atol=tolerance * scale
        )


def facts_of(arguments, spec):
    qo_indptr, kv_lens = arguments[:2]
    request = np.repeat(np.arange(len(kv_lens)), kv_lens)
    position = np.concatenate([np.arange(n) for n in kv_lens])
    rows = np.zeros(spec.max_qo_tokens, np.int32)
    for r, kv_len in enumerate(kv_lens):
        begin, end = qo_indptr[r : r + 2]
        rows[begin:end] = kv_len - (end - begin) + np.arange(end - begin)
    size = 300
    pad = lambda x: np.pad(x, (0, size - len(x))).astype(np.int32)  # noqa: E731
    found = {"q": {"q_pos": rows}, "k": {"kv_pos": pad(position)}, "v": {"kv_pos": pad(position)}}
    if spec.is_paged:
        page_indptr, page_indices = arguments[2:]
        entry = page_indptr[request] + position // spec.page_size
        found |= {"page": pad(page_indices[entry]), "slot": pad(position % spec.page_size)}
    return found


def apply(function, x, by_row, operands):
    if function is None:
        return x
    names = function.__code__.co_varnames[2 : function.__code__.co_argcount]
    heads = jnp.arange(x.shape[1])

    def one(x, head, by_row):
        group = HEADS // KV_HEADS if len(heads) == HEADS else 1
        at = type("At", (), {"head": head, "kv_head": head // group, **by_row})
        return function(x, at, **{n: operands[n] for n in names})

    return jax.vmap(jax.vmap(one, (0, 0, None)), (0, None, 0))(x, heads, by_row)


# ---- programs ------------------------------------------------------------------------------------


def test_identity_costs_nothing():
    moved = lambda x, at: jnp.concatenate([x[:10], x[10:]]).astype(jnp.float32)  # noqa: E731
    variant = ja.Variant(q=lambda x, at: x, k=moved, head_dim=DIM, normalize="none")
    assert variant.transforms == {}
    spec = Batch().make(variant_of("project"))[0]
    assert spec.kernel_spec.variant is None
    plain = dataclasses.replace(spec, variant=None)
    np.testing.assert_array_equal(spec.problem_words, plain.problem_words)


def test_equal_programs_are_equal_and_survive():
    one, two = (ja.Variant(k=rope_k, head_dim=DIM, operands=named_operands("rope")) for _ in "ab")
    assert one == two and hash(one) == hash(two) and one != variant_of("rope")
    copy = pickle.loads(pickle.dumps(one))
    assert copy == one and "sub" in str(copy)
    spec, arguments, q, k, v, _ = Batch().make(variant_of("rope"))
    again = ja.AttentionSpec.from_fields(spec.to_fields())
    assert again == spec
    operands = named_operands("rope")
    o = [attend(q, k, v, ja.plan(s, *arguments), operands, {})[0] for s in (spec, again)]
    np.testing.assert_array_equal(*o)


def branches(x, at):
    return x if at.kv_pos > 3 else -x


def at_of_query(x, at):
    return x * at.q_pos


def sorts(x, at):
    return jnp.sort(x)


def closes_over(x, at):
    return x * jnp.asarray(OPERANDS["cos"])[at.kv_pos].sum()


@pytest.mark.parametrize(
    ("functions", "error", "words"),
    [
        (
            {"k": sorts},
            NotImplementedError,
            r"k: the primitive sort at .*test_row_transforms.py:\d+",
        ),
        (
            {"k": branches},
            NotImplementedError,
            r"k: Python control flow .*test_row_transforms.py:\d+",
        ),
        (
            {"k": at_of_query},
            NotImplementedError,
            r"\.q_pos at .*test_row_transforms.py:\d+ .*kv_pos",
        ),
        ({"k": closes_over}, NotImplementedError, r"k: an index that is not constant.* at .*:\d+"),
        ({"v": project}, NotImplementedError, r"\.head at .* is not supported"),
        (
            {"k": lambda x, at: jnp.append(x, x[DIM:] * 2)},
            NotImplementedError,
            "mul of an array wi",
        ),
        ({"q": lambda x, at: x[:5]}, ValueError, r"q: expected a function that returns 64 numbers"),
        ({"q": lambda x, at, y: x}, ValueError, r"q: expected fn\(x, at, \.\.\.\)"),
        ({"q": lambda x, at: x * 2, "head_dim": None}, ValueError, "head_dim: expected elements"),
    ],
)
def test_refuses_while_tracing(functions, error, words):
    operands = {"matrix": OPERANDS["matrix"]} if "v" in functions else None
    with pytest.raises(error, match=words):
        ja.Variant(**{"head_dim": DIM, "operands": operands} | functions)


def test_refuses_a_product_with_the_users_line():
    def f(x, at, matrix):
        return x @ matrix[at.kv_head]

    with pytest.raises(
        NotImplementedError, match=r"k: a product .*test_row_transforms.py:\d+.* is not"
    ):
        ja.Variant(k=f, head_dim=DIM, operands={"matrix": OPERANDS["matrix"]})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kv_dtype": "int8"}, "variant: k is supported with kv_dtype=None, got 'int8'"),
        ({"head_dim_qk": 128}, "q of 128 elements, the spec's head_dim"),
        ({"target": "sm_90", "dtype": "float32"}, "k of pages on sm_90 is supported with bfloat16"),
        ({"mla": True, "num_kv_heads": 1, "sm_scale": 1.0}, "k is supported with mla=False"),
    ],
)
def test_specs_without(fields, words):
    given = {
        "num_qo_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim_qk": DIM,
        "dtype": "bfloat16",
    }
    given |= {"max_kv_pages": 4, "target": "cpu", "variant": variant_of("rope")} | fields
    with pytest.raises((NotImplementedError, ValueError), match=words):
        ja.AttentionSpec(**given)


def test_requests_share_only_what_is_the_same():
    """A transform that asks for lengths is not that of a shared prefix."""
    assert Batch().make(variant_of("rope"))[0].share_prefixes
    assert not Batch().make(variant_of("odd"))[0].share_prefixes


@pytest.mark.parametrize("at", range(0, 60))
def test_damaged_words_are_refused_or_harmless(at):
    variant = variant_of("partial")
    [(name, transform)] = variant.transforms.items()
    words = list(transform.words)
    for value in (-1, 0, 1, 7, 2**40):
        changed = [*words[:at], value, *words[at + 1 :]]
        try:
            again = ja.Variant.from_words(variant.words, variant.names, {name: changed})
        except ValueError as error:
            assert str(error).startswith("Variant: k: ")
        else:
            assert again.transforms[name].words == tuple(changed)


def test_a_product_needs_a_matrix():
    variant = ja.Variant(q=norm, head_dim=DIM, operands=named_operands("norm"))
    product = _core.first_transform_op + _core.transform_ops.index("product")
    line = [product, 0, DIM, 0, 0, *[0] * (3 * _core.max_transform_args)]
    words = [_core.transform_version, DIM, 1, 1, 0, *line, 0, 0, DIM]
    with pytest.raises(ValueError, match="value 0: axes of a matrix: expected 2 or more, got 1"):
        ja.Variant.from_words(variant.words, variant.names, {"q": words})


def test_hopper_routes_to_the_portable_loop():
    spec = Batch(dtype="bfloat16", spec=(("target", "sm_90"),)).make(variant_of("rope"))[0]
    assert spec.kernel_config["main_loop"] == 0
    assert any("transforms of k and v" in why for _, why in spec.problem.reasons)
    text = _core.attention_source(spec.problem).text
    assert "struct GivenOfK" in text and "using TransformOfV = NoTransform" in text
    queries = ja.Variant(q=rope_q, head_dim=DIM, operands=named_operands("rope"))
    assert dataclasses.replace(spec, variant=queries).kernel_config["main_loop"] == 1
