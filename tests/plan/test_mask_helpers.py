"""Named masks and their block maps: the class of a block must hold for each of its pairs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja
from jax_attn import masks
from jax_attn._variant.program import At
from jax_attn.masks import HIDDEN, MIXED, VISIBLE, Mask

QO_LENS, KV_LENS = (37, 0, 5, 150, 1, 64), (300, 20, 5, 150, 777, 129)


@dataclasses.dataclass
class Lengths:
    qo_lens: tuple = QO_LENS
    kv_lens: tuple = KV_LENS

    def __post_init__(self):
        self.qo = np.concatenate([[0], np.cumsum(self.qo_lens)]).astype(np.int32)
        self.lens = np.array(self.kv_lens, np.int32)
        self.kv = np.concatenate([[0], np.cumsum(self.lens + 2)]).astype(np.int32)
        self.spec = ja.AttentionSpec(
            2, 1, 64, page_size=None, max_qo_tokens=int(self.qo[-1]) + 9, max_batch=9,
            max_kv_tokens=int(self.kv[-1]), max_steps=999, target="cpu",
        )  # fmt: skip

    def facts(self):
        """`At` of all pairs, [nnz_qo, largest kv_len], and which of the pairs exist."""
        request = np.repeat(np.arange(len(self.lens)), self.qo_lens)
        row, position = np.arange(self.qo[-1]), np.arange(max(self.kv_lens))
        fields = {
            "head": np.zeros_like(row), "kv_head": np.zeros_like(row), "request": request,
            "q_pos": self.lens[request] - np.array(self.qo_lens)[request] + row - self.qo[request],
            "q_row": row, "q_len": np.array(self.qo_lens)[request], "kv_len": self.lens[request],
        }  # fmt: skip
        fields = {name: x[:, None] for name, x in fields.items()}
        fields["kv_pos"] = position[None]
        fields["kv_row"] = self.kv[request][:, None] + position[None]
        shape = len(row), len(position)
        at = At(**{name: np.broadcast_to(x, shape).astype(np.int32) for name, x in fields.items()})
        return at, position[None] < self.lens[request][:, None]

    def dense(self, mask):
        """[nnz_qo, largest kv_len], bool, from the mask's Python function."""
        at, _ = self.facts()
        operands = {name: np.asarray(x) for name, x in mask.operands.items()}
        _, visible = mask.variant().apply(np.zeros(at.q_pos.shape, np.float32), at, operands)
        return np.asarray(visible)

    def block_map(self, mask, **more):
        more = {"kv_indptr": self.kv, "q_block": 16, "kv_block": 32} | more
        return mask.block_map(self.spec, self.qo, self.lens, **more)


def check(lengths, mask, is_exact=False, **more):
    """Checks that the map is sound; returns the share of blocks that are not MIXED."""
    found = lengths.block_map(mask, **more)
    dense, (_, there) = lengths.dense(mask), lengths.facts()
    known = total = 0
    for i in range(-(-len(dense) // found.q_block)):
        for j in range(-(-dense.shape[1] // found.kv_block)):
            rows = slice(i * found.q_block, (i + 1) * found.q_block)
            columns = slice(j * found.kv_block, (j + 1) * found.kv_block)
            pairs = dense[rows, columns][there[rows, columns]]
            if not pairs.size:
                continue
            truth = pairs.any() * VISIBLE + (~pairs).any() * HIDDEN
            got = found.classes[i, j]
            assert truth & ~got == 0, (i, j, truth, got)
            is_whole = pairs.size == found.q_block * found.kv_block
            assert not (is_exact and is_whole) or truth == got, (i, j, truth, got)
            known, total = known + (got != MIXED), total + 1
    return known / total


def documents(lengths, rng, num=6, stretch=None):
    """Ids that ascend; with `stretch`, that change to any other every so many tokens."""
    ids = np.sort(rng.integers(0, num, lengths.kv[-1])).astype(np.int32)
    if stretch is not None:
        ids = rng.permutation(ids)[np.arange(len(ids)) // stretch]
    q_ids = np.zeros(lengths.spec.max_qo_tokens, np.int32)
    for r, n in enumerate(lengths.qo_lens):
        end = lengths.kv[r] + lengths.lens[r]
        q_ids[lengths.qo[r] : lengths.qo[r + 1]] = ids[end - n : end]
    return q_ids, ids


def helpers(lengths):
    rng = np.random.default_rng(0)
    q_ids, ids = documents(lengths, rng)
    by_position = rng.integers(0, 3, (len(lengths.lens), 40)).repeat(20, 1).astype(np.int32)
    number = np.arange(lengths.qo[-1]) - np.repeat(lengths.qo[:-1], lengths.qo_lens)
    parents = np.array([rng.integers(-1, n) if n else -1 for n in number])
    bits = rng.random(int((np.array(lengths.qo_lens) * lengths.lens).sum())) < 0.5
    num_rows, num_columns = -(-lengths.spec.max_qo_tokens // 8), -(-max(lengths.kv_lens) // 24)
    counts = rng.integers(0, 9, num_rows)
    columns = np.concatenate([rng.choice(num_columns, n, False) for n in counts])
    indptr = np.concatenate([[0], np.cumsum(counts)])
    parts, shuffled = (documents(lengths, np.random.default_rng(1), stretch=n) for n in (25, 1))
    return {
        "documents": masks.document_ids(q_ids, ids),
        "documents by position": masks.document_ids(q_ids, by_position),
        "prefix": masks.prefix_lm(np.array([100, 3, 5, 0, 776, 60], np.int32)),
        "tree": masks.tree(parents, lengths.qo),
        "bits": masks.custom_mask(bits, lengths.qo, lengths.lens),
        "blocks": masks.block_sparse(indptr, columns, 8, 24, num_columns),
        "documents in parts": masks.document_ids(*parts),
        "shuffled documents": masks.document_ids(*shuffled),
    }


# Shares of the blocks that are not MIXED, in blocks of SIZES, rounded down: what is proved today.
SIZES = ((16, 32), (7, 50), (4, 8))
SHARES = {
    "documents": (0.583, 0.647, 0.868),
    "documents by position": (0.491, 0.218, 0.847),
    "prefix": (0.391, 0.415, 0.594),
    "tree": (0.216, 0.239, 0.288),
    "bits": (0.008, 0.0, 0.003),
    "blocks": (0.683, 0.647, 1.0),
    "documents in parts": (0.108, 0.133, 0.68),
    "shuffled documents": (0.0, 0.0, 0.004),
}
NAMES = tuple(SHARES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("q_block, kv_block", (*SIZES, (1, 1), (1000, 1000)))
def test_maps_are_sound(name, q_block, kv_block):
    lengths = Lengths()
    mask = helpers(lengths)[name]
    is_exact = name in ("bits", "blocks") or q_block == 1
    more = {"q_block": q_block, "kv_block": kv_block}
    share = check(lengths, mask, is_exact, **more)
    if (q_block, kv_block) in SIZES:
        assert share >= SHARES[name][SIZES.index((q_block, kv_block))]


@pytest.mark.parametrize("name", NAMES[:4])
@pytest.mark.parametrize("lengths", (Lengths(), Lengths((200,), (500,))))
def test_inside_jit_the_classes_are_the_same(name, lengths):
    if len(lengths.lens) == 1 and name in ("documents by position", "prefix"):
        lengths = Lengths()
    mask = helpers(lengths)[name]
    on_host = lengths.block_map(mask)

    @jax.jit
    def make(operands, qo, lens, kv):
        moved = dataclasses.replace(mask, operands=operands)
        return moved.block_map(
            lengths.spec, qo, lens, kv_indptr=kv, max_kv_len=max(lengths.kv_lens),
            q_block=16, kv_block=32,
        ).classes  # fmt: skip

    inside = make(dict(mask.operands), lengths.qo, lengths.lens, lengths.kv)
    worse = (np.asarray(inside) != on_host.classes) & (np.asarray(inside) != MIXED)
    assert not worse.any()  # the host knows the lengths of ranges
    if len(lengths.lens) == 1:
        np.testing.assert_array_equal(inside, on_host.classes)


def test_and_or_not():
    lengths = Lengths()
    of = helpers(lengths)
    dense = {name: lengths.dense(mask) for name, mask in of.items()}
    a, b, c = "documents", "prefix", "documents by position"
    pairs = [
        (of[a] & of[b], dense[a] & dense[b]),
        (of[a] | of[b], dense[a] | dense[b]),
        (~of[a], ~dense[a]),
        (of[a] & ~of[c], dense[a] & ~dense[c]),  # operands of the same names
        (~(of[a] | of["tree"]) & of["bits"], ~(dense[a] | dense["tree"]) & dense["bits"]),
        (of["blocks"] | ~of["blocks"], np.ones_like(dense[a])),
    ]
    for mask, want in pairs:
        np.testing.assert_array_equal(lengths.dense(mask), want)
        assert check(lengths, mask) > 0.1


def test_what_the_helpers_see():
    """Compares with masks that are written out here, not made by the same code."""
    lengths = Lengths()
    of, (at, there) = helpers(lengths), lengths.facts()
    rng = np.random.default_rng(0)
    q_ids, ids = documents(lengths, rng)
    want = q_ids[at.q_row] == ids[at.kv_row.clip(max=len(ids) - 1)]
    np.testing.assert_array_equal(lengths.dense(of["documents"])[there], want[there])
    chain = masks.tree(np.concatenate([np.arange(n) - 1 for n in QO_LENS]), lengths.qo)
    np.testing.assert_array_equal(lengths.dense(chain)[there], (at.kv_pos <= at.q_pos)[there])
    roots = masks.tree(np.full(lengths.qo[-1], -1), lengths.qo)
    alone = (at.kv_pos == at.q_pos) | (at.kv_pos < at.kv_len - at.q_len)
    np.testing.assert_array_equal(lengths.dense(roots)[there], alone[there])
    bits = rng.random(there.shape) < 0.3
    flat = [bits[lengths.qo[r] : lengths.qo[r + 1], :n] for r, n in enumerate(KV_LENS)]
    packed = [np.packbits(x.reshape(-1), bitorder="little") for x in flat]
    for visible in (np.concatenate([x.reshape(-1) for x in flat]), np.concatenate(packed)):
        custom = masks.custom_mask(visible, lengths.qo, lengths.lens)
        np.testing.assert_array_equal(lengths.dense(custom)[there], bits[there])
        check(lengths, custom, is_exact=True)


@pytest.mark.parametrize("rows, columns", ((1, 1), (1, 128), (16, 16), (64, 128), (100, 7)))
def test_block_sparse_of_any_block(rows, columns):
    lengths, rng = Lengths((300,), (700,)), np.random.default_rng(0)
    num = -(-309 // rows), -(-700 // columns)
    blocks = rng.random(num) < 0.3
    indptr, indices = np.concatenate([[0], np.cumsum(blocks.sum(1))]), np.nonzero(blocks)[1]
    mask = masks.block_sparse(indptr, indices, rows, columns, num[1])
    want = blocks.repeat(rows, 0).repeat(columns, 1)[:300, :700]
    np.testing.assert_array_equal(lengths.dense(mask), want)
    check(lengths, mask, is_exact=True, kv_indptr=None)


def test_block_sparse_hides_what_is_beyond_its_blocks():
    lengths = Lengths((300,), (700,))
    mask = masks.block_sparse([0, 2, 3], [0, 4, 4], 100, 128, 5)
    want = np.zeros((300, 700), bool)
    want[:100, :128] = want[:200, 512:640] = True
    np.testing.assert_array_equal(lengths.dense(mask), want)
    check(lengths, mask, is_exact=True, kv_indptr=None)


@pytest.mark.parametrize("rows, columns", ((1, 1), (4, 1), (100, 7), (16, 64)))
def test_block_sparse_pages_read_the_visible_keys_alone(rows, columns):
    num_rows, kv_len = 230, 330
    rng = np.random.default_rng(0)
    num = -(-num_rows // rows), -(-kv_len // columns)
    blocks = rng.random(num) < 0.15
    blocks[0] = False  # rows that see nothing
    blocks[-1, -1] = True  # a column that is cut short
    indptr, indices = np.concatenate([[0], np.cumsum(blocks.sum(1))]), np.nonzero(blocks)[1]
    shuffled = np.concatenate([rng.permutation(x) for x in np.split(indices, indptr[1:-1])])
    batch = masks.block_sparse_pages(indptr, shuffled, rows, columns, num[1], num_rows, kv_len)
    visible = blocks.repeat(rows, 0).repeat(columns, 1)[:num_rows, :kv_len]
    assert batch[1].sum() == visible[::rows].sum()
    spec = ja.AttentionSpec(
        4, 2, 32, dtype="float32", page_size=columns, causal=False, max_batch=num[0],
        max_qo_tokens=num_rows, max_kv_pages=max(1, len(indices)), target="cpu",
    )  # fmt: skip
    q = rng.standard_normal((num_rows, 4, 32), np.float32)
    k, v = rng.standard_normal((2, kv_len, 2, 32), np.float32)
    pad = num[1] * columns - kv_len
    pools = [
        np.pad(x, ((0, pad), (0, 0), (0, 0)), constant_values=np.nan).reshape(-1, columns, 2, 32)
        for x in (k, v)
    ]
    o = ja.attention(q, pools[0], pools[1], ja.plan(spec, *batch))
    logits = np.einsum("qhd,khd->hqk", q, k.repeat(2, 1)) / np.sqrt(32)
    logits = np.where(visible, logits, -np.inf)
    weights = np.exp(logits - np.maximum(logits.max(-1, keepdims=True), -1e30))
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-30)
    np.testing.assert_allclose(o, np.einsum("hqk,khd->qhd", weights, v.repeat(2, 1)), atol=1e-5)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"masks.tree: parents\[2\]: expected -1 or a number b"):
        masks.tree([-1, 0, 2], [0, 3])
    with pytest.raises(ValueError, match="visible: expected a host array, got a traced one"):
        jax.jit(lambda visible: masks.custom_mask(visible, [0, 2], [3]))(np.ones(6, bool))
    most = np.zeros(2**28, np.uint8)  # never touched, so it takes no memory
    with pytest.raises(NotImplementedError, match=r"fewer than 2\^31 bits .* got 2147483648"):
        masks.custom_mask(most, [0, 2**15], [2**16])
    with pytest.raises(ValueError, match=r"masks.custom_mask: visible: expected bool\[6\]"):
        masks.custom_mask(np.ones(5, bool), [0, 2], [3])
    with pytest.raises(ValueError, match=r"block_sparse: indices\[1\]: expected a block column in"):
        masks.block_sparse([0, 2], [0, 4], 1, 1, 4)
    with pytest.raises(ValueError, match="block_sparse: columns: expected tokens >= 1, got 0"):
        masks.block_sparse([0, 1], [0], 1, 0, 4)
    with pytest.raises(ValueError, match="block_sparse: indptr: expected ascending numbers"):
        masks.block_sparse([0, 2, 1], [0], 1, 1, 4)
    with pytest.raises(ValueError, match=r"block_sparse: indices: expected indptr\[-1\] = 1 block"):
        masks.block_sparse([0, 1], [0, 1, 2], 1, 1, 4)
    with pytest.raises(ValueError, match="block_sparse_pages: kv_len: expected 5 to 8 for 2 block"):
        masks.block_sparse_pages([0, 1], [0], 1, 4, 2, 1, 9)


# ---- through the kernels ----------------------------------------------------------------------


def attend(q, k, v, dense, there, logits=lambda score, row, keys, head: score):
    """Returns o, lse, float64; o = 0 and lse = -inf where a row sees nothing.

    logits: fn(score, row of q, its key positions, head).
    """
    o = np.zeros((*q.shape[:2], v.shape[-1]), np.float64)
    lse = np.full(q.shape[:2], -np.inf)
    visible = dense & there
    for row, keys in enumerate(visible):
        if not keys.any():
            continue
        seen_k, seen_v = k[row][keys, 0].astype(np.float64), v[row][keys, 0].astype(np.float64)
        for head in range(q.shape[1]):
            score = seen_k @ q[row, head] / np.sqrt(q.shape[2])
            x = logits(score, row, keys, head)
            weights = np.exp(x - x.max())
            o[row, head] = weights @ seen_v / weights.sum()
            lse[row, head] = x.max() + np.log(weights.sum())
    return o, lse


@pytest.mark.parametrize("name", (*NAMES[:6], "and", "or", "not"))
@pytest.mark.parametrize("lengths", (Lengths(), Lengths((700,), (1100,))), ids=("batch", "one"))
def test_attention_sees_what_the_mask_shows(name, lengths):
    """With NaN in all hidden keys; results are the same with and without lists."""
    if len(lengths.lens) == 1 and name == "prefix":
        mask = masks.prefix_lm(np.array([500], np.int32))
    elif len(lengths.lens) == 1 and "position" in name:
        mask = masks.document_ids(*documents(lengths, np.random.default_rng(1)))
    elif name in NAMES:
        mask = helpers(lengths)[name]
    else:
        a, b = helpers(Lengths())["documents"], helpers(lengths)["blocks"]
        a = masks.document_ids(*documents(lengths, np.random.default_rng(1)))
        mask = {"and": a & b, "or": a | b, "not": ~a}[name]
    rng = np.random.default_rng(0)
    spec = dataclasses.replace(
        lengths.spec, variant=mask.variant(), dtype="float32", causal=False, num_ctas=3
    )
    q = rng.normal(size=spec.q_shape).astype(np.float32)
    k, v = rng.normal(size=(2, spec.max_kv_tokens, 1, 64)).astype(np.float32)
    dense, (at, there) = lengths.dense(mask), lengths.facts()
    rows = at.kv_row.clip(max=spec.max_kv_tokens - 1)
    seen = np.zeros(spec.max_kv_tokens, bool)
    seen[rows[dense & there]] = True
    k[~seen], v[~seen] = np.nan, np.nan
    want_o, want_lse = attend(q[: lengths.qo[-1]], k[rows], v[rows], dense, there)
    block_map = lengths.block_map(mask, q_block=64, kv_block=128)
    results = []
    for max_steps in (spec.max_steps, None):
        chosen = dataclasses.replace(spec, max_steps=max_steps)
        plan = ja.plan(
            chosen, lengths.qo, lengths.lens, kv_indptr=lengths.kv,
            block_map=block_map if max_steps else None,
        )  # fmt: skip
        o, lse = ja.attention(q, k, v, plan, variant_operands=mask.operands, return_lse=True)
        o, lse = np.asarray(o)[: lengths.qo[-1]], np.asarray(lse)[: lengths.qo[-1]]
        np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
        np.testing.assert_allclose(o, want_o, atol=2e-5)
        np.testing.assert_allclose(lse, want_lse, atol=2e-5)
        results.append(o)


@pytest.mark.parametrize("schedule", ("auto", "fixed_split"))
@pytest.mark.parametrize(
    "name, page_size, has_logits",
    (
        ("documents", None, True),
        ("documents by position", 16, True),
        ("prefix", 7, True),
        ("tree", 16, False),
        ("bits", None, False),
        ("blocks", None, True),
    ),
)
def test_mla_on_a_cpu_sees_what_the_mask_shows(name, page_size, has_logits, schedule):
    """With lists, and with logits of the user. Latent rows that no row sees are NaN."""
    lengths, rng = Lengths(), np.random.default_rng(0)
    mask, slopes = helpers(lengths)[name], rng.random(16).astype(np.float32) / 100

    def alibi(score, at, slopes):
        return score - slopes[at.head] * (at.q_pos - at.kv_pos)

    more = {"logits": alibi, "operands": {"slopes": slopes}} if has_logits else {}
    variant, operands = mask.variant(**more), mask.operands | more.get("operands", {})
    spec = dataclasses.replace(
        lengths.spec, variant=variant, dtype="float32", causal=False, num_ctas=3, mla=True,
        num_qo_heads=16, head_dim_qk=96, head_dim_vo=64, sm_scale=96**-0.5, schedule=schedule,
        kv_split=128 if schedule == "fixed_split" else None, max_items=99, max_partial_rows=29999,
    )  # fmt: skip
    q = rng.normal(size=spec.q_shape).astype(np.float32)
    rows = rng.normal(size=(spec.max_kv_tokens, 1, 96)).astype(np.float32)
    dense, (at, there) = lengths.dense(mask), lengths.facts()
    places = at.kv_row.clip(max=spec.max_kv_tokens - 1)
    seen = np.zeros(spec.max_kv_tokens, bool)
    seen[places[dense & there]] = True
    rows[~seen] = np.nan
    want_o, want_lse = attend(
        q[: lengths.qo[-1]], rows[places], rows[places][..., :64], dense, there,
        lambda score, row, keys, head:
            score - has_logits * slopes[head] * (at.q_pos - at.kv_pos)[row, keys],
    )  # fmt: skip
    block_map = lengths.block_map(mask, q_block=16, kv_block=128)
    where = {"kv_indptr": lengths.kv}
    if page_size:
        num_pages = -(-lengths.lens // page_size)
        indptr = np.concatenate([[0], np.cumsum(num_pages)]).astype(np.int32)
        indices = rng.permutation(indptr[-1] + 3)[: indptr[-1]].astype(np.int32)
        pages = np.full((indptr[-1] + 3, page_size, 1, 96), np.nan, np.float32)
        for r, n in enumerate(lengths.lens):
            at_page, slot = indices[indptr[r] + np.arange(n) // page_size], np.arange(n) % page_size
            pages[at_page, slot] = rows[lengths.kv[r] : lengths.kv[r] + n]
        rows, where = pages, {"page_indptr": indptr, "page_indices": indices}
        spec = dataclasses.replace(
            spec, page_size=page_size, max_kv_pages=len(indices), max_kv_tokens=None,
            share_prefixes=False,
        )  # fmt: skip
    plan = ja.plan(spec, lengths.qo, lengths.lens, **where, block_map=block_map)
    spec.problem.check_plan(plan.buffer, -1)
    most = plan._steps_without_mask()
    if name != "bits":  # all its blocks are mixed
        assert len(plan.steps()) < most or (plan.steps() & 1).sum() < most
    o, lse = ja.attention(q, rows, None, plan, variant_operands=operands, return_lse=True)
    o, lse = np.asarray(o)[: lengths.qo[-1]], np.asarray(lse)[: lengths.qo[-1]]
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    np.testing.assert_allclose(o, want_o, atol=2e-5)
    np.testing.assert_allclose(lse, want_lse, atol=2e-5)


def test_a_hundred_contents_are_one_executable():
    lengths = Lengths((256,), (512,))
    first = masks.document_ids(*documents(lengths, np.random.default_rng(0)))
    spec = dataclasses.replace(lengths.spec, variant=first.variant(), dtype="float32")
    q = jnp.ones(spec.q_shape)
    k, v = np.random.default_rng(0).normal(size=(2, spec.max_kv_tokens, 1, 64)).astype(np.float32)

    @jax.jit
    def step(q_ids, kv_ids, qo, lens):
        mask = masks.document_ids(q_ids, kv_ids)
        block_map = mask.block_map(spec, qo, lens, max_kv_len=512)
        plan = ja.plan(spec, qo, lens, block_map=block_map)
        return ja.attention(q, k, v, plan, variant_operands=mask.operands)

    rng = np.random.default_rng(0)
    for i in range(100):
        q_ids, kv_ids = documents(lengths, rng, num=1 + i % 7)
        lens = np.array([256 + i], np.int32)
        o = step(q_ids, kv_ids, np.array([0, 200 + i % 50], np.int32), lens)
    assert step._cache_size() == 1 and np.isfinite(o).all()


# ---- random programs --------------------------------------------------------------------------


def random_function(rng):
    """A random expression over the facts and two operands."""

    def number(depth):
        kind = rng.integers(12 if depth else 5)
        if kind < 3:
            name = ("q_pos", "kv_pos", "q_row", "kv_row", "request", "q_len", "kv_len")
            field = name[rng.integers(len(name))]
            return lambda at, a, b: getattr(at, field)
        if kind == 3:
            value = int(rng.choice([-5, 0, 1, 3, 16, 64, 1000, 2**30, -(2**31), 2**31 - 1]))
            return lambda at, a, b: jnp.int32(value)
        if kind == 4:
            inner = number(0) if depth == 0 else number(depth - 1)
            return lambda at, a, b: a[inner(at, a, b)]
        x, y = number(depth - 1), number(depth - 1)
        k = int(rng.choice([1, 2, 7, 16, 100]))
        return {
            5: lambda *z: x(*z) + y(*z),
            6: lambda *z: x(*z) - y(*z),
            7: lambda *z: x(*z) * y(*z),
            8: lambda *z: jax.lax.div(x(*z), jnp.int32(k)),
            9: lambda *z: jax.lax.rem(x(*z), jnp.int32(k)),
            10: lambda *z: jnp.where(x(*z) < y(*z), abs(x(*z)), jnp.maximum(y(*z), -x(*z))),
            11: lambda at, a, b: b[x(at, a, b), y(at, a, b)] | (x(at, a, b) >> (k % 32)) & k,
        }[int(kind)]

    def truth(depth):
        x, y = number(2), number(2)
        if depth and rng.random() < 0.5:
            p, q = truth(depth - 1), truth(depth - 1)
            return (
                lambda *z: p(*z) & q(*z), lambda *z: p(*z) | q(*z), lambda *z: ~p(*z),
                lambda *z: p(*z) ^ q(*z), lambda *z: jnp.where(p(*z), q(*z), x(*z) > 3),
            )[rng.integers(5)]  # fmt: skip
        return (
            lambda *z: x(*z) < y(*z), lambda *z: x(*z) <= y(*z), lambda *z: x(*z) == y(*z),
            lambda *z: x(*z) != y(*z), lambda *z: x(*z).astype(bool),
        )[rng.integers(5)]  # fmt: skip

    body = truth(2)
    return lambda at, a, b: body(at, a, b) | (at.kv_pos < -1)


@pytest.mark.parametrize("seed", range(24))
def test_random_programs_on_intervals(seed):
    """An interval holds every value, even if i32 wraps and indices are clamped."""
    rng = np.random.default_rng(seed)
    lengths = Lengths((40, 3, 0, 70), (60, 3, 9, 170)) if seed % 2 else Lengths((130,), (200,))
    a = np.sort(rng.integers(-50, 200, 300)).astype(np.int32)
    a[rng.integers(0, 300, 3)] = rng.choice([2**31 - 1, -(2**31), 0], 3)
    b = rng.integers(0, 3, (4, 250)).astype(np.uint8)
    mask = Mask(random_function(rng), {"a": a, "b": b})
    try:
        mask.variant()
    except NotImplementedError:
        pytest.skip("more values than a program may have")
    check(lengths, mask)
    check(lengths, mask, q_block=1, kv_block=1)
