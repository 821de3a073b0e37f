"""Plans with step lists: hidden steps get no work, and results are as without lists."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja
from helpers.attention_cases import Case, build, random_case
from helpers.backends import Backend, on_every_platform
from helpers.checking import assert_close_state, assert_same_bits
from helpers.prefixes import SharedPrompts
from jax_attn import _environment, masks, reference
from jax_attn._xla import jit
from jax_attn.masks import HIDDEN, MIXED, VISIBLE, BlockMap

REFUSED = (ValueError, jax.errors.JaxRuntimeError)


def block_mask(rng, case, q_block, kv_block, density=0.4):
    """A random map of block classes, and the same as booleans [nnz_qo, largest kv_len]."""
    fields = case.spec_fields()
    most = max((*case.kv_lens, 1))
    shape = -(-fields["max_qo_tokens"] // q_block), -(-most // kv_block)
    visible = rng.random(shape) < density
    classes = np.where(visible, VISIBLE, HIDDEN).astype(np.uint8)
    dense = np.repeat(np.repeat(visible, q_block, 0), kv_block, 1)
    return BlockMap(classes, q_block, kv_block), dense[: sum(case.qo_lens), :most]


def plan_of(case, block_map, **more):
    lengths = build(case).lengths
    fields = case.spec_fields() | {"share_prefixes": False, "max_steps": 4000} | more
    spec = ja.AttentionSpec(**fields, target="cpu")
    plan = ja.plan(spec, **lengths.plan_arguments(), block_map=block_map)
    spec.problem.check_plan(plan.buffer, -1)
    return plan, lengths


def expected(case, batch, mask):
    """o and lse, float64. mask: [nnz_qo, largest kv_len], combined with causal and windows."""
    group = case.num_qo_heads // case.num_kv_heads
    scale = case.sm_scale or case.head_dim_qk**-0.5
    nnz = sum(case.qo_lens)
    d_vo = case.head_dim_vo or case.head_dim_qk
    o = np.zeros((len(batch.q), case.num_qo_heads, d_vo))
    lse = np.full((len(batch.q), case.num_qo_heads), -np.inf)
    starts = batch.lengths.qo_indptr
    for r, kv_len in enumerate(case.kv_lens):
        rows = np.arange(starts[r], starts[r + 1])
        offset = kv_len - len(rows) if case.q_offsets is None else case.q_offsets[r]
        position, key = (offset + np.arange(len(rows)))[:, None], np.arange(kv_len)[None]
        visible = mask[rows][:, :kv_len].copy()
        if case.causal or case.window_right >= 0:
            visible &= key <= position + max(0, case.window_right)
        if case.window_left >= 0:
            visible &= key >= position - case.window_left
        for h in range(case.num_qo_heads):
            k, v = (x[r][:, h // group].astype(np.float64) for x in (batch.k_rows, batch.v_rows))
            logits = scale * batch.q[rows, h].astype(np.float64) @ k.T
            if case.logits_soft_cap:
                logits = case.logits_soft_cap * np.tanh(logits / case.logits_soft_cap)
            logits = np.where(visible, logits, -np.inf)
            if case.sinks:
                logits = np.concatenate([logits, np.full((len(rows), 1), batch.sinks[h])], 1)
                v = np.concatenate([v, np.zeros((1, d_vo))])
            top = logits.max(1, initial=-np.inf)
            weights = np.exp(logits - np.where(np.isfinite(top), top, 0)[:, None])
            total = weights.sum(1)
            seen = visible.any(1)
            o[rows[seen], h] = (weights @ v)[seen] / total[seen, None]
            lse[rows[seen], h] = (top + np.log(np.where(seen, total, 1)))[seen]
    return o[:nnz], lse[:nnz]


def run(batch, plan, num_rows):
    call = jax.jit(lambda p: ja.attention(
        batch.q, batch.k, batch.v, p, layer=batch.layer, sinks=batch.sinks, return_lse=True
    ))  # fmt: skip
    first, second = ([np.asarray(x)[:num_rows] for x in call(plan)] for _ in range(2))
    for name, a, b in zip(("o", "lse"), first, second, strict=True):
        assert_same_bits(name, a, b)
    return first


def check(case, batch, plan, mask, bound=2e-5):
    nnz = sum(case.qo_lens)
    o, lse = run(batch, plan, nnz)
    want_o, want_lse = expected(case, batch, mask)
    bounds = np.full(want_lse.shape, bound)
    assert_close_state(o, lse, want_o, want_lse, bounds * 4, bounds + 2e-6 * np.abs(
        np.where(np.isfinite(want_lse), want_lse, 0)))  # fmt: skip


CASES = (
    Case("mixed", num_ctas=3),
    Case("ragged", page_size=None, num_ctas=5),
    Case("not causal", causal=False, window_left=200, num_ctas=4, logits_soft_cap=20.0),
    Case("window", window_left=150, sinks=True, num_ctas=2),
    Case("fixed_split", (3, 400, 1), (900, 700, 3000), schedule="fixed_split", kv_split=256),
    Case("no_split", (3, 400, 1), (900, 700, 3000), schedule="no_split"),
    Case("auto", (1, 500), (5000, 900), schedule="auto", num_ctas=7),
    Case("long", (1, 2), (20000, 9000), 16, 2, 128, num_ctas=40),
    Case("offsets", (1, 200, 3), (2000, 900, 99), q_offsets=(50, 99, -2), causal=False),
)


@pytest.mark.parametrize("q_block, kv_block", ((1, 128), (7, 256), (64, 100)))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_blocks_that_are_hidden_are_skipped(case, q_block, kv_block):
    """Whole blocks of whole steps need no element mask and get none.

    A block that does not fill its steps counts as hidden only where a step holds nothing else.
    """
    rng = np.random.default_rng([q_block, kv_block])
    batch = build(case)
    # Rows of a tile see the same keys, because lists belong to tiles.
    block_map, dense = block_mask(rng, case, q_block, kv_block)
    tile_kv = 128
    plan, _ = plan_of(case, block_map)
    # The steps that the plan visits, tile by tile.
    visited = np.zeros((len(dense), -(-dense.shape[1] // tile_kv)), bool)
    items, steps = plan.items(), plan.steps()
    for item in items[items["kv_head"] == 0]:
        rows = slice(item["first_token"], item["first_token"] + item["qo_len"])
        words = steps[item["kv_begin"] // tile_kv : item["kv_end"] // tile_kv]
        assert not visited[rows][:, words >> 1].any()  # no key twice
        visited[rows, words >> 1] = True
        for word in words:
            begin = (word >> 1) * tile_kv
            end = min(begin + tile_kv, case.kv_lens[item["request"]])
            if case.window_left >= 0:
                begin = max(begin, item["q_pos"] - case.window_left)
            if case.causal:
                end = min(end, item["q_pos"] + item["qo_len"])
            part = dense[rows, begin:end]
            assert word & 1 or part.all()  # unmasked: all of it is visible
    # All visible keys are visited; beyond them, only the rest of whole tiles.
    check(case, batch, plan, np.repeat(visited, tile_kv, 1)[:, : dense.shape[1]])
    hidden = ~np.repeat(visited, tile_kv, 1)[:, : dense.shape[1]]
    for r, kv_len in enumerate(case.kv_lens):
        rows = slice(*batch.lengths.qo_indptr[r : r + 2])
        n = rows.stop - rows.start
        offset = kv_len - n if case.q_offsets is None else case.q_offsets[r]
        position, key = (offset + np.arange(n))[:, None], np.arange(kv_len)[None]
        seen = dense[rows, :kv_len].copy()
        if case.causal:
            seen &= key <= position
        if case.window_left >= 0:
            seen &= key >= position - case.window_left
        assert not (seen & hidden[rows, :kv_len]).any()


@pytest.mark.parametrize("seed", range(20))
def test_plans_of_a_map_that_hides_nothing_are_complete(seed):
    case = dataclasses.replace(random_case(seed), branches=None, share_prefixes=False)
    if case.kv_dtype or case.mla:
        case = dataclasses.replace(case, kv_dtype=None, q_dtype=None, mla=False)
    batch = build(case)
    rows, columns = len(batch.q), max((*case.kv_lens, 1))
    full = BlockMap(np.full((rows, -(-columns // 128)), VISIBLE, np.uint8), 1, 128)
    more = {"max_items": None, "max_partial_rows": None} if case.schedule != "fixed_split" else {}
    plan, lengths = plan_of(case, full, **more)
    assert plan.steps().size == plan._steps_without_mask() and not (plan.steps() & 1).any()
    spec = dataclasses.replace(plan.spec, max_steps=None, share_prefixes=False)
    o, lse = run(batch, plan, sum(case.qo_lens))
    want = run(batch, ja.plan(spec, **lengths.plan_arguments()), sum(case.qo_lens))
    if case.schedule == "no_split":
        assert_same_bits("o", o, want[0])
        assert_same_bits("lse", lse, want[1])
    np.testing.assert_allclose(
        np.float32(o), np.float32(want[0]), atol=3e-5 if case.dtype == "float32" else 3e-2
    )


@on_every_platform
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_inside_jit_the_bits_are_the_same_and_contents_never_recompile(case, backend):
    lengths = build(case).lengths
    spec = backend.spec(**case.spec_fields() | {"share_prefixes": False}, max_steps=4000)
    make = jax.jit(lambda arguments, m: ja.plan(spec, **arguments, block_map=m).buffer)
    for seed in range(5):
        block_map, _ = block_mask(np.random.default_rng(seed), case, 16, 128)
        arguments = lengths.plan_arguments()
        host = ja.plan(spec, **arguments, block_map=block_map)
        assert_same_bits("plan", np.asarray(make(arguments, block_map)), host.buffer)
    assert make._cache_size() == 1


@pytest.mark.cuda
@pytest.mark.parametrize("backend", [Backend("gpu")], ids=["cuda"], indirect=True)
def test_lists_of_a_gpu_that_do_not_fit_are_a_fault(backend):
    case = CASES[0]
    batch, arguments = build(case), build(case).lengths.plan_arguments()
    block_map, _ = block_mask(np.random.default_rng(0), case, 16, 128, density=1)
    few = BlockMap(block_map.classes[:, :3], 16, 128)
    for max_steps, given in ((5, block_map), (4000, few)):
        spec = backend.spec(**case.spec_fields() | {"share_prefixes": False}, max_steps=max_steps)
        make = jax.jit(lambda a, m, spec=spec: ja.plan(spec, **a, block_map=m))
        plan = make(arguments, given)
        with pytest.raises(ValueError) as refused:
            ja.plan(spec, **arguments, block_map=given)
        assert plan.fault() == str(refused.value)
        assert np.isnan(ja.attention(batch.q, batch.k, batch.v, plan, layer=batch.layer)).all()


def test_on_cuda_the_kernel_of_the_planner_gets_the_map():
    spec = ja.AttentionSpec(
        1, 1, 64, page_size=16, max_batch=2, max_qo_tokens=300, max_kv_pages=999, max_steps=77,
        target="sm_90:132",
    )  # fmt: skip

    @jax.jit
    def make(lens, classes):
        pages = [0, 400, 500], np.arange(500)
        return ja.plan(spec, [0, 250, 251], lens, *pages, block_map=BlockMap(classes, 64)).buffer

    lens = jax.ShapeDtypeStruct((2,), np.int32)

    def call_of(num_columns):
        classes = jax.ShapeDtypeStruct((5, num_columns), np.uint8)
        text = make.trace(lens, classes).lower(lowering_platforms=("cuda",)).as_text()
        (call,) = (line for line in text.splitlines() if "@jax_attn_plan" in line)
        assert f"tensor<5x{num_columns}xui8>" in call
        assert "q_block = 64 : i64" in call and "kv_block = 128 : i64" in call
        words = spec.problem.plan_scratch_words(0, 0, num_columns, 128)
        assert f"tensor<{words}xi32>" in call
        return words

    # 32 steps of a tile take 4 words; the pages' 125 steps are the most there can be.
    num_tiles = (call_of(100) - call_of(50)) / (4 * (4 - 2))
    assert num_tiles in (3, 4)
    assert call_of(999) == call_of(125)
    assert {name for name in jit.jobs_of(spec) if "plan" in name} == {"plan_general-90"}


def test_the_room_that_the_documentation_names_holds_any_batch():
    """Maps that hide nothing, on both kinds of devices."""
    lens, longest = (1, 1, 1, 2000, 900), 900
    qo = np.concatenate([[0], np.cumsum(lens)])
    for target in ("cpu", "sm_90:132", "sm_80:108"):
        spec = ja.AttentionSpec(
            4, 1, 64, page_size=None, causal=False, target=target, max_batch=5, max_steps=1,
            max_qo_tokens=qo[-1].item(), max_kv_tokens=5 * longest,
        )  # fmt: skip
        config = spec.kernel_config
        tile_tokens = max(config[f"tile_q_{i}"] for i in range(config["num_tiles"])) // 4
        room = (5 + qo[-1] // tile_tokens) * -(-longest // config["tile_kv"])
        spec = dataclasses.replace(spec, max_steps=room.item())
        classes = np.full((-(-qo[-1] // 128), 9), VISIBLE, np.uint8)
        plan = ja.plan(spec, qo, [longest] * 5, block_map=BlockMap(classes, 128))
        assert 0.8 * room < plan.header()["num_steps"] <= room


def test_no_room_for_the_lists_is_refused_with_the_need():
    case = CASES[0]
    block_map, _ = block_mask(np.random.default_rng(0), case, 16, 128, density=1)
    need = plan_of(case, block_map)[0].header()["num_steps"]
    plan_of(case, block_map, max_steps=need)
    sentence = f"entries of step lists: expected at most max_steps = {need - 1}, got {need}; raise"
    with pytest.raises(ValueError, match=sentence):
        plan_of(case, block_map, max_steps=need - 1)
    lengths = build(case).lengths
    fields = case.spec_fields() | {"share_prefixes": False, "max_steps": need - 1}
    spec = ja.AttentionSpec(**fields, target="cpu")
    with pytest.raises(REFUSED, match=sentence):
        jax.block_until_ready(
            jax.jit(lambda m: ja.plan(spec, **lengths.plan_arguments(), block_map=m))(block_map)
        )


def test_what_does_not_fit_is_refused():
    case = CASES[0]
    classes = np.full((20, 20), MIXED, np.uint8)
    with pytest.raises(ValueError, match="block_map: expected one for a spec with max_steps"):
        plan_of(case, None)
    with pytest.raises(ValueError, match="block_map: expected None for a spec with max_steps=None"):
        plan_of(case, BlockMap(classes), max_steps=None)
    with pytest.raises(TypeError, match="expected a jax_attn.masks.BlockMap"):
        plan_of(case, classes)
    with pytest.raises(ValueError, match="q_block: expected a number of tokens >= 1, got 0"):
        plan_of(case, BlockMap(classes, 0))
    with pytest.raises(ValueError, match=r"classes: expected uint8\[at least 225 rows of blocks"):
        plan_of(case, BlockMap(classes, 1))
    with pytest.raises(ValueError, match="classes: expected uint8"):
        plan_of(case, BlockMap(classes.astype(int)))
    with pytest.raises(ValueError, match="request 7: expected columns for the 1025 positions"):
        plan_of(case, BlockMap(classes[:, :8]))
    shares = {"max_kv_pages": 1, "max_steps": 3, "share_prefixes": True}
    for target in ("sm_90:132", "cpu"):
        with pytest.raises(NotImplementedError, match="share_prefixes: with max_steps, True is"):
            ja.AttentionSpec(1, 1, 64, **shares, target=target, schedule="fixed_split")
    assert ja.AttentionSpec(1, 1, 64, **shares | {"share_prefixes": None}).share_prefixes is False
    of_rows = ja.Variant(logits=lambda score, at: score * at.q_len, mask=lambda at: at.kv_pos > 3)
    with pytest.raises(NotImplementedError, match="asks for the request.* its mask may ask"):
        ja.AttentionSpec(1, 1, 64, **shares, target="cpu", variant=of_rows)
    with pytest.raises(ValueError, match="max_steps: expected at most 2\\^30 / tile_kv"):
        fields = {"max_kv_pages": 1, "max_steps": 2**24, "target": "cpu"}
        assert ja.AttentionSpec(1, 1, 64, **fields).problem


def test_every_word_of_a_list_is_checked(monkeypatch):
    """A changed word is refused, or names a step that the rows may see, in order."""
    case = CASES[0]
    block_map, _ = block_mask(np.random.default_rng(3), case, 16, 128)
    plan, _ = plan_of(case, block_map)
    batch = build(case)
    spec, begin = plan.spec, plan.spec.layout["steps"]
    accepted = refused = 0
    for i in range(plan.header()["num_steps"]):
        word = int(plan.buffer[begin + i])
        for value in (word ^ 1, word + 2, word - 2, word + 200, -1, -word, 2**31 - 1, -(2**31)):
            buffer = plan.buffer.copy()
            buffer[begin + i] = value
            try:
                spec.problem.check_plan(buffer, -1)
            except ValueError as error:
                refused += 1
                assert "plan: steps[" in str(error), error
                continue
            accepted += 1
            o = ja.attention(batch.q, batch.k, batch.v, dataclasses.replace(plan, buffer=buffer))
            assert np.isfinite(o[: sum(case.qo_lens)]).all()
    assert accepted and refused > 5 * plan.header()["num_steps"]
    damaged = plan.buffer.copy()
    damaged[begin] = 2**30
    for name in ("num_steps",):
        at = spec.layout["header"] + 15
        for value in (-1, 4001, 2**31 - 1, int(plan.header()[name]) - 1):
            buffer = plan.buffer.copy()
            buffer[at] = value
            with pytest.raises(ValueError, match="num_steps"):
                spec.problem.check_plan(buffer, -1)
    with pytest.raises(REFUSED, match=r"attention: plan: steps\[0\]: expected a step, times 2, of"):
        jax.block_until_ready(
            ja.attention(batch.q, batch.k, batch.v, dataclasses.replace(plan, buffer=damaged))
        )
    monkeypatch.setattr(_environment, "check", True)
    with pytest.raises(ValueError, match=r"attention: plan: steps\[0\]"):
        ja.attention(batch.q, batch.k, batch.v, dataclasses.replace(plan, buffer=damaged))


def test_records_that_name_lists_are_checked():
    """Any changed word of items and merge groups is refused or harmless."""
    case = Case("", (3, 90, 1), (900, 1500, 5000), num_ctas=7)
    block_map, _ = block_mask(np.random.default_rng(3), case, 16, 128)
    plan, _ = plan_of(case, block_map)
    batch, spec, header = build(case), plan.spec, plan.header()
    assert header["num_partials"] > 0
    run = jax.jit(lambda p: ja.attention(batch.q, batch.k, batch.v, p))
    damaged, accepted = 0, 0
    for section in ("items", "merge_groups"):
        for buffer in changed_words(plan, section):
            damaged += 1
            if not passes(spec, buffer):
                continue
            accepted += 1
            if accepted % 5 == 0:
                o = run(dataclasses.replace(plan, buffer=buffer))
                assert np.isfinite(o[: sum(case.qo_lens)]).all()
    assert 0 < accepted < damaged / 6, (accepted, damaged)


WORDS = {
    "items": ("num_items", 12),
    "merge_groups": ("num_merge_groups", 8),
    "steps": ("num_steps", 1),
}


def changed_words(plan, section):
    """The plan's buffer with each word of the section changed, to several values."""
    count, size = WORDS[section]
    begin = plan.spec.layout[section]
    for at in range(begin, begin + plan.header()[count] * size):
        old = int(plan.buffer[at])
        values = {old + 1, old - 1, old ^ 3, old + 128, old - 128, 0, -1, 2**30, -(2**31)} - {old}
        for value in values:
            buffer = plan.buffer.copy()
            buffer[at] = value
            yield buffer


def passes(spec, buffer) -> bool:
    try:
        spec.problem.check_plan(buffer, -1)
    except ValueError:
        return False
    return True


# Heads of q and of kv, head dims, whether MLA, query tokens of a request.
SHAPES = (
    pytest.param((4, 2, 96, 64, False, 5), id="d96x64"),
    pytest.param((8, 2, 128, 128, False, 5), id="d128"),
    pytest.param((4, 1, 192, 128, True, 2), id="mla"),
    pytest.param((4, 1, 576, 512, True, 1), id="deepseek"),
)


class SharedLists:
    """A plan of SharedPrompts, and the same without shared prefixes.

    The mask asks for rows and positions. A shared item has none of its own, so it only holds steps
    of which the mask hides nothing.
    """

    SEEN = {"tree": 2048, "documents": 640}  # tokens, in whole blocks

    def __init__(self, name, shape, target, **more):
        heads, num_kv_heads, dim, dim_vo, mla, num_drafts = shape
        self.rng = rng = np.random.default_rng(3)
        self.batch = batch = SharedPrompts(rng, num_drafts)
        self.mask, self.seen = batch.mask(name, rng), self.SEEN[name]
        self.spec = ja.AttentionSpec(
            heads, num_kv_heads, dim, head_dim_vo=dim_vo, mla=mla, sm_scale=0.1, page_size=16,
            causal=False, max_batch=batch.NUM_REQUESTS, max_qo_tokens=int(batch.qo_indptr[-1]),
            max_kv_pages=len(batch.page_indices), variant=self.mask.variant(), max_steps=900,
            share_prefixes=True, num_ctas=3, target=target,
            dtype="float32" if target == "cpu" else "bfloat16", **more,
        )  # fmt: skip
        self.block_map = self.mask.block_map(
            self.spec, *batch.arguments()[:2], q_block=num_drafts, kv_block=128
        )
        self.plan = self.make(self.spec)
        self.flat = self.make(dataclasses.replace(self.spec, share_prefixes=False))

    def make(self, spec):
        plan = ja.plan(spec, *self.batch.arguments(), block_map=self.block_map)
        spec.problem.check_plan(plan.buffer, -1)
        return plan

    def arrays(self):
        """q, k and v of the spec's dtype; NaN where no request has a token."""
        spec, batch, rng = self.spec, self.batch, self.rng
        q = rng.normal(size=spec.q_shape).astype(np.float32)
        k = batch.pages(rng, spec.num_kv_heads, spec.head_dim_qk)
        v = None if spec.mla else batch.pages(rng, spec.num_kv_heads, spec.head_dim_vo)
        return [x if x is None else jnp.asarray(x, spec.dtype) for x in (q, k, v)]

    def check(self):
        """Checks that shared items hold, once for a tile's requests, what the map shows to all."""
        spec, steps, items = self.spec, self.plan.steps(), self.plan.items()
        tile_kv, config = spec.kernel_config["tile_kv"], spec.kernel_config
        shared = items[items["num_groups"] > 1]
        assert len(shared) and self.plan.phase()[1] == "s"
        entries = np.concatenate(
            [steps[x["kv_begin"] // tile_kv : x["kv_end"] // tile_kv] for x in shared]
        )
        num_seen, num_requests = self.seen // tile_kv, self.batch.NUM_REQUESTS
        assert not (entries & 1).any() and set(entries >> 1) == set(range(num_seen))
        rows = config[f"tile_q_{config['num_tiles'] - 1}"]
        in_a_tile = rows // spec.heads_per_item // self.batch.num_drafts
        num_saved = (num_requests - -(-num_requests // in_a_tile)) * num_seen
        assert num_saved > 0 and len(steps) == len(self.flat.steps()) - num_saved
        most = self.flat._steps_without_mask() - num_saved
        assert f"steps          {len(steps)} of {most} (" in self.plan.describe()
        assert self.plan.bucket().num_shared_pages == self.seen // self.batch.PAGE


@pytest.mark.parametrize("name", ("tree", "documents"))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("target", ("cpu", "sm_80:108", "sm_90:132"))
def test_plans_share_what_a_map_shows_to_all(name, shape, target, tmp_path):
    lists = SharedLists(name, shape, target)
    lists.check()
    lists.plan.save(tmp_path / "plan.npz")
    again = ja.AttentionPlan.load(tmp_path / "plan.npz")
    assert_same_bits("plan", again.buffer, lists.plan.buffer)
    lists.plan.plot(tmp_path / "plan.html")


@on_every_platform
@pytest.mark.parametrize("name", ("tree", "documents"))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("schedule", ("balanced", "auto"))
def test_what_a_map_shows_to_all_is_computed_once(backend, name, shape, schedule):
    is_gpu = backend.platform == "gpu"
    lists = SharedLists(name, shape, None if is_gpu else "cpu", schedule=schedule)
    spec, batch = lists.spec, lists.batch
    arrays = lists.arrays()
    operands = lists.mask.operands
    exact = [None if x is None else np.nan_to_num(np.asarray(x, np.float32)) for x in arrays]
    want = reference.attention(*exact, *batch.arguments(), spec=spec, variant_operands=operands)
    run = jax.jit(lambda p: ja.attention(*arrays, p, variant_operands=operands, return_lse=True))
    bound = 2e-2 if is_gpu else 3e-5
    for made in (lists.plan, lists.flat):
        for got, expected_array in zip(run(made), want, strict=True):
            np.testing.assert_allclose(
                np.float32(got), np.float32(expected_array), atol=bound, rtol=bound / 2
            )
    for a, b in zip(run(lists.plan), run(lists.plan), strict=True):
        assert_same_bits("o", np.asarray(a), np.asarray(b))

    # Inside jit: levels that are given and, on a CPU, levels that are found.
    levels = [([0, batch.NUM_REQUESTS], [batch.PREFIX])]
    for prefix_levels in (levels, []) if is_gpu else (None, levels, []):
        fields = {"block_map": lists.block_map, "prefix_levels": prefix_levels}
        inside = jax.jit(lambda lens, f=fields: ja.plan(
            spec, batch.qo_indptr, lens, *batch.arguments()[2:], **f).buffer)  # fmt: skip
        outside = ja.plan(spec, *batch.arguments(), **fields)
        assert_same_bits("plan", np.asarray(inside(batch.kv_lens)), outside.buffer)
        assert (outside.header()["num_shared_tokens"] > 0) == (prefix_levels != [])


def test_pages_that_differ_are_named_before_lists_that_do_not_fit():
    """The host reports as the device planner does, whose CTAs find both faults."""
    lists = SharedLists("tree", (4, 2, 96, 64, False, 5), "cpu")
    *lengths, pages = lists.batch.arguments()
    pages = pages.copy()
    pages[lengths[2][1]] = pages[3]
    levels = [([0, lists.batch.NUM_REQUESTS], [lists.batch.PREFIX])]
    spec = dataclasses.replace(lists.spec, max_steps=1)
    with pytest.raises(ValueError, match="page_indices.*as in the request before"):
        ja.plan(spec, *lengths, pages, block_map=lists.block_map, prefix_levels=levels)


@on_every_platform
@pytest.mark.parametrize("num_heads", (16, 32, 128))
@pytest.mark.parametrize("page_size", (1, 64))
@pytest.mark.parametrize("fields", (
    {}, {"window_left": 300}, {"schedule": "fixed_split", "kv_split": 256},
), ids=("balanced", "window", "fixed_split"))  # fmt: skip
def test_latent_rows_that_a_map_hides_are_not_read(backend, num_heads, page_size, fields):
    """Every other block of 128 latent rows is NaN and hidden by the map alone.

    The kernels' loops are the same with and without a mask.
    """
    rng = np.random.default_rng(5)
    qo_lens, kv_lens = np.array([1, 3, 0, 1, 2]), np.array([1450, 700, 90, 64, 4000])
    qo_indptr = np.append(0, np.cumsum(qo_lens)).astype(np.int32)
    num_pages = -(-kv_lens // page_size)
    page_indptr = np.append(0, np.cumsum(num_pages)).astype(np.int32)
    pages = rng.permutation(int(page_indptr[-1])).astype(np.int32)
    spec = backend.spec(
        num_qo_heads=num_heads, num_kv_heads=1, head_dim_qk=576, head_dim_vo=512, mla=True,
        sm_scale=0.05, dtype="bfloat16", page_size=page_size, max_batch=5, max_qo_tokens=7,
        max_kv_pages=len(pages), max_steps=2000, num_ctas=5, **fields,
    )  # fmt: skip
    hides = masks.Mask(lambda at: at.kv_pos // 128 % 2 == 1)
    classes = np.full((7, 32), VISIBLE, np.uint8)
    classes[:, ::2] = HIDDEN
    arguments = qo_indptr, kv_lens.astype(np.int32), page_indptr, pages
    plan = ja.plan(spec, *arguments, block_map=BlockMap(classes, 1, 128))
    spec.problem.check_plan(plan.buffer, -1)
    assert (plan.steps() >> 1).size and not (plan.steps() & 1).any()
    k = rng.normal(size=(len(pages) * page_size, 1, 576))
    for r, kv_len in enumerate(kv_lens):
        at = np.arange(kv_len)
        rows = pages[page_indptr[r] + at // page_size] * page_size + at % page_size
        k[rows[at // 128 % 2 == 0]] = np.nan
    q = jnp.asarray(rng.normal(size=(7, num_heads, 576)), jnp.bfloat16)
    k = jnp.asarray(k.reshape(-1, page_size, 1, 576), jnp.bfloat16)
    run = jax.jit(lambda p: ja.attention(q, k, None, p, return_lse=True))
    want = reference.attention(
        np.float32(q), np.nan_to_num(np.float32(k)), None, *arguments,
        spec=dataclasses.replace(spec, variant=hides.variant(), max_steps=None),
    )  # fmt: skip
    for got, again, expected_array in zip(run(plan), run(plan), want, strict=True):
        assert_same_bits("o", np.asarray(got), np.asarray(again))
        np.testing.assert_allclose(
            np.float32(got), np.float32(expected_array), atol=2e-2, rtol=1e-2
        )
    if "kv_split" in fields:  # request 0's list, of odd length, becomes empty
        classes[0] = HIDDEN
        shorter = ja.plan(spec, *arguments, block_map=BlockMap(classes, 1, 128))
        for got, again in zip(run(plan), run(shorter), strict=True):
            assert_same_bits("o", np.asarray(got)[1:], np.asarray(again)[1:])


@pytest.mark.parametrize("section", ["items", "merge_groups", "steps"])
def test_words_of_shared_lists_are_checked(section):
    """Any changed word is refused, or the results stay within the batch's tokens."""
    rng = np.random.default_rng(3)
    batch = SharedPrompts(rng)
    mask = batch.mask("tree", rng)
    spec = batch.spec(mask, 1, 1)
    block_map = mask.block_map(spec, *batch.arguments()[:2], q_block=5, kv_block=128)
    plan = ja.plan(spec, *batch.arguments(), block_map=block_map)
    k, v = batch.pages(rng, 1, 64), batch.pages(rng, 1, 64)
    q = rng.normal(size=spec.q_shape).astype(np.float32)
    assert plan.header()["num_shared_tokens"] > 0
    run = jax.jit(lambda p: ja.attention(q, k, v, p, variant_operands=mask.operands))
    damaged, accepted = 0, 0
    for buffer in changed_words(plan, section):
        damaged += 1
        if passes(spec, buffer):
            accepted += 1
            assert np.isfinite(run(dataclasses.replace(plan, buffer=buffer))).all()
    assert accepted < damaged / 5, (accepted, damaged)


def test_fixed_split_bits_do_not_depend_on_neighbours():
    """A request with the same lists has the same bits alone and among others."""
    qo_lens, kv_lens = (3, 300, 40), (4000, 2500, 3000)
    rng = np.random.default_rng(0)
    q = rng.normal(size=(400, 4, 64)).astype(np.float32)
    k, v = rng.normal(size=(2, 9600, 2, 64)).astype(np.float32)
    classes = np.where(rng.random((400, 32)) < 0.5, VISIBLE, HIDDEN).astype(np.uint8)
    spec = ja.AttentionSpec(
        4, 2, 64, dtype="float32", page_size=None, max_qo_tokens=400, max_kv_tokens=9600,
        schedule="fixed_split", kv_split=256, max_items=999, max_partial_rows=99999,
        max_steps=4000, target="cpu",
    )  # fmt: skip
    qo, kv = (np.concatenate([[0], np.cumsum(x)]) for x in (qo_lens, kv_lens))
    plan = ja.plan(spec, qo, kv_lens, block_map=BlockMap(classes, 1, 128))
    assert plan.header()["num_partials"] > 0
    together = ja.attention(q, k, v, plan, return_lse=True)
    for r, n in enumerate(qo_lens):
        rows, keys = slice(qo[r], qo[r + 1]), slice(kv[r], kv[r + 1])
        alone = [np.zeros_like(x) for x in (q, k, v)]
        alone[0][:n], alone[1][: kv_lens[r]], alone[2][: kv_lens[r]] = q[rows], k[keys], v[keys]
        mine = np.full_like(classes, HIDDEN)
        mine[:n] = classes[rows]
        one = ja.plan(spec, [0, n], [kv_lens[r]], block_map=BlockMap(mine, 1, 128))
        for name, a, b in zip(
            ("o", "lse"), ja.attention(*alone, one, return_lse=True), together, strict=True
        ):
            assert_same_bits(name, np.asarray(a)[:n], np.asarray(b)[rows])


def test_a_plan_tells_what_it_skips_and_survives_a_file(tmp_path):
    case = Case("", (512,), (1024,), causal=False)
    classes = np.full((9, 8), HIDDEN, np.uint8)
    classes[:, 0], classes[:, 3] = VISIBLE, MIXED
    plan, _ = plan_of(case, BlockMap(classes))
    assert "steps          8 of 32 (75.0 % skipped), 4 masked, room for 4000" in plan.describe()
    assert plan.phase() == "--u" and plan.bucket().num_unique_pages == 16
    plan.save(tmp_path / "plan.npz")
    again = ja.AttentionPlan.load(tmp_path / "plan.npz")
    assert_same_bits("plan", again.buffer, plan.buffer)
    assert again.spec == plan.spec
    plan.plot(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert "75.0 % skipped" in page and "of the step lists" in page
    full, _ = plan_of(case, BlockMap(np.full((9, 8), VISIBLE, np.uint8)))
    assert full.item_costs().sum() > 3 * plan.item_costs().sum()


def test_with_pages_keeps_the_lists():
    case = CASES[0]
    block_map, dense = block_mask(np.random.default_rng(3), case, 16, 128)
    plan, lengths = plan_of(case, block_map)
    pages = lengths.page_indices.copy()
    pages[: lengths.page_indptr[1]] = pages[: lengths.page_indptr[1]][::-1]
    other = plan.with_pages(pages)
    arguments = lengths.plan_arguments() | {"page_indices": pages}
    fresh = ja.plan(plan.spec, **arguments, block_map=block_map)
    assert_same_bits("plan", other.buffer, fresh.buffer)
    assert_same_bits("plan", jax.jit(plan.with_pages)(pages).buffer, fresh.buffer)


def test_of_dense():
    rng = np.random.default_rng(0)
    visible = np.repeat(np.repeat(rng.random((5, 6)) < 0.5, 16, 0), 32, 1)[:75, :180]
    visible[3, 40] ^= True
    block_map = BlockMap.of_dense(visible, 16, 32)
    for i, row in enumerate(block_map.classes):
        for j, got in enumerate(row):
            block = visible[16 * i : 16 * i + 16, 32 * j : 32 * j + 32]
            assert got == block.any() * VISIBLE + (~block).any() * HIDDEN + 0
    traced = jax.jit(BlockMap.of_dense, static_argnums=(1, 2))(jnp.asarray(visible), 16, 32)
    np.testing.assert_array_equal(traced.classes, block_map.classes)
