"""Properties of every plan from any planner: complete, consistent, balanced."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jax_attn as ja
from helpers.attention_cases import SCHEDULES, Case, make_lengths, make_plan
from helpers.backends import Backend, on_every_platform
from jax_attn import _environment, reference

TARGETS = ("cpu", "sm_80:108", "sm_90:132")
FOLD_BATCH = 8  # csrc/params.h


# ---- random batches ------------------------------------------------------------------------------


@st.composite
def cases(draw):
    """Small enough to count every (row, position) pair, odd enough to meet every border."""
    schedule, split = draw(st.sampled_from((*SCHEDULES, ("fixed_split", 512), ("auto", None))))
    request = st.tuples(
        st.one_of(st.integers(0, 3), st.integers(0, 90)),
        st.one_of(st.integers(0, 20), st.integers(0, 700)),
    )
    requests = draw(st.lists(request, max_size=9))
    if draw(st.booleans()):
        requests.append((draw(st.integers(1, 4)), draw(st.integers(2000, 6000))))
    requests = draw(st.permutations(requests))
    causal = draw(st.booleans())
    window_left = draw(st.sampled_from((-1, -1, 0, 1, 63, 64, 65, 300)))
    window_right = -1 if causal else draw(st.sampled_from((-1, -1, 1, 40)))
    offsets = None
    if draw(st.booleans()):
        offsets = tuple(draw(st.integers(-50, 800)) for _ in requests)
    num_kv_heads, group = draw(st.sampled_from(((1, 1), (2, 2), (1, 16), (8, 4), (3, 5), (2, 7))))
    return Case(
        "random",
        qo_lens=tuple(qo_len for qo_len, _ in requests),
        kv_lens=tuple(kv_len for _, kv_len in requests),
        num_qo_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        page_size=draw(st.sampled_from((None, 1, 7, 16))),
        schedule=schedule,
        kv_split=split,
        num_ctas=draw(st.sampled_from((None, 1, 2, 13, 132))),
        q_offsets=offsets,
    )


PATHS = ("aa", "aab", "aaba", "aabab", "aac", "aacc", "b", "bb", "bba", "")


def random_forest(seed):
    """Requests with common prefixes and few queues, so that sharing pays."""
    rng = np.random.default_rng(seed)
    num_requests = rng.integers(2, 14)
    num_kv_heads, group = ((1, 1), (1, 16), (2, 4), (3, 5))[rng.integers(4)]
    causal = bool(rng.random() < 0.7)
    fixed_split = bool(rng.random() < 0.4)
    return Case(
        f"forest {seed}",
        qo_lens=tuple(rng.choice([0, 1, 1, 1, 1, 1, 2, 5, 30], num_requests).tolist()),
        kv_lens=tuple(rng.integers(0, 1300, num_requests).tolist()),
        num_qo_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        dtype=("bfloat16", "float32")[rng.integers(2)],
        causal=causal,
        window_left=int(rng.choice([-1, -1, 600, 1200])),
        window_right=-1 if causal else int(rng.choice([-1, 3])),
        page_size=(1, 7, 16)[rng.integers(3)],
        schedule="fixed_split" if fixed_split else ("balanced", "auto")[rng.integers(2)],
        kv_split=(128, 256)[rng.integers(2)] if fixed_split else None,
        num_ctas=(1, 2, 5, 33)[rng.integers(4)],
        branches=tuple(PATHS[i] for i in rng.integers(0, len(PATHS), num_requests)),
        branch_tokens=(100, 256, 400)[rng.integers(3)],
    )


forests = st.builds(random_forest, st.integers(0, 2**32 - 1))


def tokens_of(plan, item):
    """Rows of q that hold the item's tokens."""
    tokens = slice(item["first_token"], item["first_token"] + item["qo_len"])
    if item["num_groups"] > 1:
        return plan.qo_indices()[tokens]
    return np.arange(tokens.start, tokens.stop)


def q_offset_of(case, r):
    return case.kv_lens[r] - case.qo_lens[r] if case.q_offsets is None else case.q_offsets[r]


def requests_of(case):
    """[nnz_qo]. The request of each row of q."""
    return np.repeat(np.arange(len(case.qo_lens)), case.qo_lens)


random_cases = given(case=st.one_of(cases(), forests), target=st.sampled_from(TARGETS))
few_examples = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@few_examples
@random_cases
def test_every_visible_pair_is_in_exactly_one_item(case, target):
    plan = make_plan(case, target)
    lengths = make_lengths(case, np.random.default_rng(0))[0]
    qo_indptr, request_of = lengths.qo_indptr, requests_of(case)
    sizes = list(zip(case.qo_lens, case.kv_lens, strict=True))
    covered = [np.zeros((case.num_kv_heads, *size), np.int32) for size in sizes]
    written = np.zeros((case.num_kv_heads, sum(case.qo_lens)), np.int32)
    window_right = 0 if case.causal else case.window_right
    for item in plan.items():
        tokens = tokens_of(plan, item)
        requests = request_of[tokens]
        span = slice(item["kv_begin"], item["kv_end"])
        assert item["qo_len"] > 0 and item["request"] == requests[0]
        assert 0 <= span.start <= span.stop <= min(case.kv_lens[r] for r in requests)
        if item["num_groups"] <= 1 and span.stop > span.start and item["merge_idx"] < 0:
            assert (
                item["q_pos"] == q_offset_of(case, requests[0]) + tokens[0] - qo_indptr[requests[0]]
            )
        if item["num_groups"] > 1:  # every row sees all of it, by the kernel's rule and in fact
            seen = reference.visible_keys(
                item["qo_len"], span.stop, item["q_pos"], case.window_left, window_right
            )
            assert seen[:, span].all()
            pages = slice(span.start // case.page_size, -(-span.stop // case.page_size))
            tables = [lengths.page_indices[lengths.page_indptr[r] :][pages] for r in requests]
            assert (np.array(tables) == tables[0]).all()
            assert item["kv_base"] == lengths.page_indptr[requests[0]]
        for token, r in zip(tokens, requests, strict=True):
            covered[r][item["kv_head"], token - qo_indptr[r], span] += 1
        written[item["kv_head"], tokens] += item["partial_row"] < 0
    for r, (qo_len, kv_len) in enumerate(sizes):
        visible = reference.visible_keys(
            qo_len, kv_len, q_offset_of(case, r), case.window_left, window_right
        )
        assert (covered[r] <= 1).all()
        assert (covered[r] >= visible).all()
    # Each row is final or split, never both; the next test checks the split ones.
    assert (written <= 1).all()


def check_merge_groups(plan):
    """Checks that every item's state is merged once, in kv order, and every row has one writer."""
    config, header = plan.spec.kernel_config, plan.header()
    items, groups, partial_rows = plan.items(), plan.merge_groups(), plan.partial_rows()
    group_size = plan.spec.heads_per_item
    row_owner = np.full(header["num_partial_rows"], -1)

    def span_of_item(g, item, first):
        """The kv span of an item that arrives at group g, whose state begins at row `first`."""
        group = groups[g]
        token = (first - item["partial_row"]) // group_size
        mine = tokens_of(plan, item)[token : token + group["qo_len"]]
        np.testing.assert_array_equal(mine, group["qo_begin"] + np.arange(group["qo_len"]))
        before = groups[item["merge_idx"] : g]["qo_len"].sum()
        assert first == item["partial_row"] + before * group_size
        rows = slice(first, first + group["qo_len"] * group_size)
        assert (row_owner[rows] == -1).all()
        row_owner[rows] = g
        return item["kv_begin"], item["kv_end"]

    def span_of_group(g):
        group = groups[g]
        index = g - items["merge_idx"]
        members = items[(index >= 0) & (index < items["num_groups"])]
        members = np.sort(members, order="kv_begin")
        children = np.flatnonzero(groups["parent"] == g)
        firsts = partial_rows[group["partials_begin"] :: group["partials_step"]]
        firsts = firsts[: group["num_partials"]]
        assert group["num_partials"] == len(firsts) == len(members) + len(children) >= 2
        assert (members["kv_head"] == group["kv_head"]).all()
        if len(children):  # all children come before the last item, if an item arrives here
            assert group["parent"] == -1 and len(members) <= 1  # two levels
            assert (np.diff(groups["partials_begin"][children]) == FOLD_BATCH).all()
            for name in ("qo_begin", "qo_len", "kv_head"):
                assert (groups[name][children] == group[name]).all()
        else:
            assert group["partials_step"] == 1
        spans = [span_of_group(c) for c in children]
        assert [partial_rows[groups["partials_begin"][c]] for c in children] == list(
            firsts[: len(children)]
        )
        for item, first in zip(members, firsts[len(children) :], strict=True):
            spans.append(span_of_item(g, item, first))
        ends = [end for _, end in spans]
        assert ends[:-1] == [begin for begin, _ in spans[1:]]  # in kv order, without a gap
        return spans[0][0], ends[-1]

    final = np.flatnonzero(groups["parent"] < 0)
    for g in final:
        span_of_group(g)
    assert (row_owner >= 0).all()
    assert header["num_partial_rows"] <= config["max_partial_rows"]
    assert header["num_partials"] == items["num_groups"].sum() <= config["max_partials"]
    assert header["num_merge_groups"] == len(groups) <= config["max_merge_groups"]
    assert header["num_shared_tokens"] <= config["max_shared_tokens"]
    alone = items[items["merge_idx"] < 0]
    assert (alone["partial_row"] == -1).all() and (alone["num_groups"] == 0).all()
    assert (items["num_groups"][items["merge_idx"] >= 0] >= 1).all()
    # Every (token, head) has one writer: a final item or a final merge group.
    num_heads = -(-plan.spec.num_qo_heads // group_size)  # blocks of heads with mla
    writers = np.zeros((header["nnz_qo"], num_heads), int)
    for records, first in ((alone, "first_token"), (groups[final], "qo_begin")):
        for record in records:
            rows = slice(record[first], record[first] + record["qo_len"])
            writers[rows, record["kv_head"]] += 1
    assert (writers == 1).all()


@few_examples
@random_cases
def test_merge_groups_are_complete_ordered_and_apart(case, target):
    check_merge_groups(make_plan(case, target))


def long_context(target, num_qo_tokens, kv_len, heads, **options):
    """A plan of one request with few new tokens."""
    spec = ja.AttentionSpec(
        *heads, page_size=64, max_qo_tokens=num_qo_tokens, max_kv_pages=-(-kv_len // 64),
        target=target, **options,
    )  # fmt: skip
    pages = np.arange(spec.max_kv_pages)
    return ja.plan(spec, [0, num_qo_tokens], [kv_len], [0, len(pages)], pages)


MLA = {"head_dim_qk": 576, "head_dim_vo": 512, "mla": True, "sm_scale": 0.07}


@pytest.mark.parametrize("num_ctas", (34, 46, 66, 132, 264))
def test_large_states_of_mla_have_one_level(num_ctas):
    """128 heads over a long context, 131 KB a state: the CTAs share the rows of a group."""
    plan = long_context("sm_90:132", 1, 65536, (128, 1), num_ctas=num_ctas, **MLA)
    check_merge_groups(plan)
    groups, splits = plan.merge_groups(), plan.header()["num_partials"] // 2
    assert len(groups) == 2 and 16 <= splits <= num_ctas // 2
    assert (groups["num_partials"] == splits).all() and (groups["parent"] == -1).all()


def test_small_states_are_folded_by_one():
    """Decodes of a few rows wait on memory latency, and a second level would wait more often."""
    for heads in ((32, 8), (4, 1)):
        plan = long_context("sm_90:132", 1, 131072, heads, head_dim_qk=128)
        groups = plan.merge_groups()
        assert len(groups) == heads[1] and groups["num_partials"].min() > 8
        assert (groups["parent"] == -1).all() and (groups["partials_step"] == 1).all()
    # Few large states have one level, too.
    groups = long_context("sm_90:24", 1, 65536, (128, 1), **MLA).merge_groups()
    assert (groups["num_partials"] == 12).all() and (groups["parent"] == -1).all()


def test_a_chunk_of_a_long_context_is_folded_by_several():
    plan = long_context("sm_90:132", 100, 60000, (8, 2), head_dim_qk=128, window_left=50000)
    check_merge_groups(plan)
    assert (plan.merge_groups()["parent"] >= 0).any()
    # fixed_split: a state's index in its merge batch is that of its chunk, wherever a window begins
    # (here 48 tokens before a batch). States that do not begin with a full batch have one level.
    plan = long_context(
        "sm_90:132", 100, 60000, (8, 2), head_dim_qk=128, window_left=47660,
        schedule="fixed_split", kv_split=512, max_items=4000, max_partial_rows=1 << 19,
    )  # fmt: skip
    check_merge_groups(plan)
    groups, items = plan.merge_groups(), plan.items()
    one_level = (groups["parent"] < 0) & (groups["partials_step"] == 1)
    assert set(groups["first_offset"][one_level]) == {7}
    for g in np.flatnonzero(one_level):
        assert min(items["kv_begin"][items["merge_idx"] == g]) // 512 % 8 == 7
    assert len(groups[~one_level]) and (groups["first_offset"][~one_level] == 0).all()


@few_examples
@random_cases
def test_items_fit_their_tiles_and_the_queues_hold_them_all(case, target):
    plan = make_plan(case, target)
    config, header, items = plan.spec.kernel_config, plan.header(), plan.items()
    tile_rows = np.array([config[f"tile_q_{i}"] for i in range(config["num_tiles"])])
    group_size = case.num_qo_heads // case.num_kv_heads
    assert ((items["tile"] >= 0) & (items["tile"] < config["num_tiles"])).all()
    assert (items["qo_len"] * group_size <= tile_rows[items["tile"]]).all()
    assert ((items["kv_head"] >= 0) & (items["kv_head"] < case.num_kv_heads)).all()
    indptr = plan.queue_indptr()
    assert len(indptr) == config["num_ctas"] + 1
    assert indptr[0] == 0 and indptr[-1] == len(items) == header["num_items"]
    assert (np.diff(indptr) >= 0).all()
    assert header["num_items"] <= config["max_items"]
    assert header["batch_size"] == len(case.qo_lens) and header["nnz_qo"] == sum(case.qo_lens)
    starts = make_lengths(case, np.random.default_rng(0))[0]
    starts = starts.kv_indptr if case.page_size is None else starts.page_indptr
    np.testing.assert_array_equal(items["kv_base"], starts[items["request"]])


@few_examples
@random_cases
def test_queues_are_balanced_within_the_bound_of_list_scheduling(case, target):
    """Heaviest first to the least loaded: no queue exceeds the mean by more than one unit of work.

    A unit goes to a queue as a whole: an item for heads_per_unit kv heads. Queues and heads fall
    into equal partitions with the same schedule, so the mean over all is the mean of each.
    """
    plan = make_plan(case, target, share_prefixes=False)
    config, items = plan.spec.kernel_config, plan.items()
    if not len(items):
        return
    costs = plan.queue_costs()
    kv_cost = np.array([config[f"kv_cost_{i}"] for i in range(3)]) / config["kv_cost_0"]
    kv_tokens = items["kv_end"].astype(int) - items["kv_begin"]
    item_costs = config["item_cost"] + kv_tokens * kv_cost[items["tile"]]
    tall_split_cost = config["tall_split_cost"] or config["split_cost"]
    split_cost = np.where(items["tile"] > 0, tall_split_cost, config["split_cost"])
    item_costs += split_cost * (items["merge_idx"] >= 0)
    np.testing.assert_allclose(plan.item_costs(), item_costs)
    assert np.isclose(costs.sum(), item_costs.sum())
    largest_unit = item_costs.max() * config["heads_per_unit"]
    assert costs.max() <= costs.mean() + largest_unit * (1 + 1e-9)


@pytest.mark.parametrize(("kv_len", "splits"), [(641, False), (16_000, True)])
def test_a_prompt_of_few_tiles_is_split_over_a_long_context_alone(kv_len, splits):
    """A state of 128 rows costs as much as a thousand keys: `tall_split_cost`."""
    spec = ja.AttentionSpec(
        4, 1, 256, page_size=None, max_batch=1, max_qo_tokens=641, max_kv_tokens=kv_len,
        target="sm_90:132",
    )  # fmt: skip
    items = ja.plan(spec, [0, 641], [kv_len]).items()
    assert (items["merge_idx"] >= 0).any() == splits


@pytest.mark.parametrize("num_requests", [2, 6, 20])
@pytest.mark.parametrize("target", ["cpu", "sm_80:3", "sm_90:3"])
def test_costs_of_shared_items(num_requests, target):
    """On a CPU a shared item costs by its rows, at least as many as the smallest tile has."""
    spec = ja.AttentionSpec(
        8, 2, 64, dtype="bfloat16", max_batch=num_requests, max_qo_tokens=num_requests,
        max_kv_pages=num_requests * 150, num_ctas=3, target=target,
    )  # fmt: skip
    tables = [np.r_[:128, 128 + 22 * r : 150 + 22 * r] for r in range(num_requests)]
    starts = np.arange(num_requests + 1)
    plan = ja.plan(spec, starts, np.full(num_requests, 2390), 150 * starts, np.concatenate(tables))
    config, expected, by_rows = spec.kernel_config, [], []
    for item in plan.items():
        kv_cost, tile_rows = (config[f"{x}_{item['tile']}"] for x in ("kv_cost", "tile_q"))
        if item["num_groups"] > 1 and target == "cpu":
            kv_cost = max(config["kv_cost_0"], kv_cost * int(item["qo_len"]) * 4 // tile_rows)
            by_rows.append(kv_cost)
        tokens = int(item["kv_end"]) - int(item["kv_begin"])
        fixed = config["item_cost"] + config["split_cost"] * (item["merge_idx"] >= 0)
        expected.append(fixed + tokens * kv_cost / config["kv_cost_0"])
    np.testing.assert_allclose(plan.item_costs(), expected)
    assert (plan.items()["num_groups"] == num_requests).any()
    if target == "cpu":  # 8 rows of a tile of 16, or more than a tile of 16
        assert (set(by_rows) == {config["kv_cost_0"]}) == (num_requests == 2)


@pytest.mark.parametrize("num_requests, qo_len", [(1, 2048), (16, 1024), (7, 1500)])
def test_tiles_of_the_last_prompt_even_the_queues_out(num_requests, qo_len):
    """Head by head, the last head's heaviest tile would come last: 1.39 times the mean here."""
    tokens = num_requests * qo_len
    indptr = np.arange(num_requests + 1, dtype=np.int32) * qo_len
    spec = ja.AttentionSpec(
        num_qo_heads=16,
        num_kv_heads=16,
        head_dim_qk=128,
        page_size=None,
        max_batch=num_requests,
        max_qo_tokens=tokens,
        max_kv_tokens=tokens,
        target="sm_90",
    )
    plan = ja.plan(
        spec, qo_indptr=indptr, kv_indptr=indptr, kv_lens=np.full(num_requests, qo_len, np.int32)
    )
    costs = plan.queue_costs()
    assert costs.max() < 1.04 * costs.mean()


@few_examples
@random_cases
def test_states_of_a_schedule_that_balances_fit_two_tiles_a_queue(case, target):
    """The workspace depends on the grid alone, for any lengths."""
    if case.schedule not in ("balanced", "auto"):
        return
    plan = make_plan(case, target)
    config = plan.spec.kernel_config
    most = 2 * config["num_ctas"] * config["heads_per_unit"]
    tile_rows = config[f"tile_q_{config['num_tiles'] - 1}"]
    assert plan.header()["num_partial_rows"] <= most * tile_rows == config["max_partial_rows"]
    if not plan.header()["num_shared_tokens"]:
        assert (plan.items()["partial_row"] >= 0).sum() <= most


@few_examples
@random_cases
def test_auto_is_never_predicted_to_be_slower(case, target):
    """Auto is no slower than balanced, where it starts, and than whole tiles, which it tries."""
    flat = {"kv_split": None, "share_prefixes": False}
    load = {
        schedule: make_plan(dataclasses.replace(case, schedule=schedule, **flat), target)
        .queue_costs()
        .max(initial=0)
        for schedule in ("auto", "balanced", "no_split")
    }
    assert load["auto"] <= min(load["balanced"], load["no_split"]) + 1e-6
    if case.page_size is not None:
        shared, balanced = (
            make_plan(dataclasses.replace(case, schedule=schedule, kv_split=None), target)
            for schedule in ("auto", "balanced")
        )
        assert shared.queue_costs().max(initial=0) <= balanced.queue_costs().max(initial=0) + 1e-6


def balanced_and_auto(qo_lens, kv_lens):
    case = Case("", qo_lens, kv_lens, num_qo_heads=32, num_kv_heads=8, head_dim_qk=128)
    return [
        make_plan(dataclasses.replace(case, schedule=schedule, dtype="bfloat16"), "sm_90:132")
        for schedule in ("balanced", "auto")
    ]


def test_nothing_is_split_where_that_takes_longer():
    """5 requests of a server that has just started: a split costs more than it saves."""
    for plan in balanced_and_auto((17, 1, 200, 1, 1), (200,) * 5):
        assert len(plan.merge_groups()) == 0


def test_tiles_stay_whole_where_splits_take_longer():
    """Short tiles, more than there are queues."""
    hundreds = 1, 2, 3, 1, 3, 10, 6, 10, 2, 3, 3, 10, 6, 10, 6, 10, 1, 6, 2, 6, 6, 2, 3, 10
    for plan in balanced_and_auto((1,) * 24, tuple(100 * n for n in hundreds)):
        assert len(plan.merge_groups()) == 0


@few_examples
@random_cases
def test_planned_work_does_not_depend_on_capacities(case, target):
    plan = make_plan(case, target)
    fields = case.spec_fields()
    larger = {n: x + 1000 for n, x in fields.items() if n.startswith("max_") and x is not None}
    again = make_plan(case, target, **larger)
    assert again.spec.plan_words > plan.spec.plan_words
    assert again.header() == plan.header()
    np.testing.assert_array_equal(again.queue_indptr(), plan.queue_indptr())
    np.testing.assert_array_equal(again.items(), plan.items())
    np.testing.assert_array_equal(again.merge_groups(), plan.merge_groups())


def test_balanced_work_does_not_depend_on_capacities():
    """A few long requests, for which the planner chooses among several cuts."""
    for target in TARGETS:
        for num_ctas in (8, 13, 132):
            for n in (4, 6, 9, 11):
                case = Case("", (1,) * n, (23000,) + (20000,) * (n - 1), num_ctas=num_ctas)
                plan = make_plan(case, target, max_batch=n, max_qo_tokens=n)
                again = make_plan(case, target, max_batch=n + 1000, max_qo_tokens=n + 1000)
                np.testing.assert_array_equal(again.queue_indptr(), plan.queue_indptr())
                np.testing.assert_array_equal(again.items(), plan.items())


@few_examples
@random_cases
def test_planning_again_gives_the_same_bits(case, target):
    first, *others = (make_plan(case, target).buffer for _ in range(3))
    for other in others:
        np.testing.assert_array_equal(other, first)


@few_examples
@random_cases
def test_fixed_split_borders_depend_on_the_request_alone(case, target):
    case = dataclasses.replace(
        case, schedule="fixed_split", kv_split=case.kv_split or 128, share_prefixes=False
    )
    plan = make_plan(case, target)
    items = plan.items()
    names = ["qo_len", "kv_head", "tile", "kv_begin", "kv_end", "q_pos"]
    for r in range(len(case.qo_lens)):
        one = {
            name: (getattr(case, name)[r],) if getattr(case, name) is not None else None
            for name in ("qo_lens", "kv_lens", "q_offsets", "branches")
        }
        alone = make_plan(dataclasses.replace(case, **one, num_ctas=3), target).items()
        mine = items[items["request"] == r]
        np.testing.assert_array_equal(np.sort(mine[names]), np.sort(alone[names]))
        inner = mine["kv_end"][(mine["merge_idx"] >= 0)]
        assert np.isin(inner % case.kv_split, (0, *(mine["kv_end"] % case.kv_split))).all()


# ---- chosen batches ------------------------------------------------------------------------------


def test_a_split_happens_where_it_should():
    """Guards the tests above against plans that never split."""
    long = Case("", (1, 1), (8000, 100), num_ctas=16)
    assert len(make_plan(long).merge_groups()) > 0
    assert len(make_plan(dataclasses.replace(long, schedule="no_split")).merge_groups()) == 0
    fixed = make_plan(dataclasses.replace(long, schedule="fixed_split", kv_split=1024))
    spans = np.unique(fixed.items()[["request", "kv_begin", "kv_end"]])
    want = [(0, b, min(b + 1024, 8000)) for b in range(0, 8000, 1024)] + [(1, 0, 100)]
    assert [tuple(int(x) for x in span) for span in spans] == want


@pytest.mark.parametrize("target", TARGETS)
def test_balanced_spreads_one_long_request_over_all_queues(target):
    plan = make_plan(Case("", (1,), (100_000,), num_kv_heads=1, num_qo_heads=4), target)
    lengths = np.diff(plan.queue_indptr())
    assert (lengths == 0).mean() <= 0.05  # chunks are whole kv tiles
    costs = plan.queue_costs()
    assert costs.max() <= 1.35 * costs.mean()


@pytest.mark.parametrize("target", TARGETS)
def test_the_short_tile_of_a_request_is_its_first(target):
    """Under a causal mask the first tile sees the fewest keys."""
    case = Case("short tile", (700,), (700,), num_qo_heads=2, num_kv_heads=2, schedule="no_split")
    items = make_plan(case, target).items()
    items = items[items["kv_head"] == 0]
    lengths = items["qo_len"][np.argsort(items["first_token"])]
    assert lengths.sum() == 700 and 0 < lengths[0] < lengths[1]
    assert (lengths[1:] == lengths[1]).all()


@pytest.mark.parametrize("target", TARGETS[1:])
def test_neighbours_begin_with_different_heights(target):
    """Compute-bound and memory-bound items alternate at the start, over the whole grid."""
    mixed = Case("mixed", (1,) * 128 + (4096,), (8192,) * 129, 32, 8, dtype="bfloat16")
    plan = make_plan(dataclasses.replace(mixed, num_ctas=132), target)
    first = plan.items()["tile"][plan.queue_indptr()[:-1]]
    last = plan.items()["tile"][plan.queue_indptr()[1:] - 1]
    assert (first != last).all()
    assert (first[::2] != first[1::2]).all()
    assert (first[:66] != first[66:]).all()


def test_empty_batches_have_no_items():
    for case in (Case("", (), ()), Case("", (0, 0), (5, 0))):
        for schedule, split in SCHEDULES:
            plan = make_plan(dataclasses.replace(case, schedule=schedule, kv_split=split))
            assert len(plan.items()) == 0 and not plan.queue_indptr().any()


def test_rows_that_see_nothing_still_have_a_writer():
    plan = make_plan(Case("", (3, 2, 1), (0, 1, 0)))
    items = plan.items()
    assert sorted(set(items["request"])) == [0, 1, 2]
    empty = items[items["request"] != 1]
    assert (empty["kv_begin"] == empty["kv_end"]).all()


def test_the_largest_batch_fits_the_default_capacities():
    """Balanced and no_split must plan any batch within max_batch, max_qo_tokens, max_kv_pages."""
    rng = np.random.default_rng(0)
    for target in TARGETS:
        for schedule in ("balanced", "no_split", "auto"):
            for num_kv_heads, group in ((1, 1), (8, 4), (2, 16), (3, 7)):
                spec = ja.AttentionSpec(
                    num_qo_heads=num_kv_heads * group,
                    num_kv_heads=num_kv_heads,
                    head_dim_qk=64,
                    max_batch=64,
                    max_qo_tokens=512,
                    max_kv_pages=4096,
                    schedule=schedule,
                    target=target,
                )
                for _ in range(20):
                    batch_size = rng.integers(1, 65)
                    cuts = np.sort(rng.integers(0, 513, batch_size - 1))
                    qo_indptr = np.concatenate([[0], cuts, [512]])
                    pages = np.sort(rng.integers(0, 4097, batch_size - 1))
                    page_indptr = np.concatenate([[0], pages, [4096]])
                    kv_lens = 16 * np.diff(page_indptr)
                    offsets = kv_lens - np.diff(qo_indptr)
                    batch = qo_indptr, kv_lens, page_indptr, np.arange(4096)
                    assert ja.plan(spec, *batch, q_offsets=offsets).header()["nnz_qo"] == 512


def test_tail_and_reserved_pages_are_not_looked_at():
    """The plan's words do not depend on entries of page_indices that hold no token."""
    fields = {"num_qo_heads": 2, "num_kv_heads": 1, "head_dim_qk": 64, "num_pages": 10}
    spec = ja.AttentionSpec(**fields, max_batch=4, max_qo_tokens=4, max_kv_pages=12)
    qo_indptr, kv_lens, page_indptr = [0, 1, 2], [17, 16], [0, 3, 4]
    plans = [
        ja.plan(spec, qo_indptr, kv_lens, page_indptr, [3, 4, unused, 9, *tail])
        for unused, tail in ((0, []), (2147480000, [2147480000] * 8), (-7, [-1] * 300))
    ]
    assert all(p.header() == plans[0].header() for p in plans)
    assert all((p.items() == plans[0].items()).all() for p in plans)
    assert plans[0].header()["max_page_id"] == 9


def test_a_plan_is_a_pytree_of_one_leaf():
    plan = make_plan(Case("", (1,), (5,)))
    leaves, tree = jax.tree.flatten(plan)
    assert len(leaves) == 1 and leaves[0].dtype == np.int32
    assert leaves[0].shape == (plan.spec.plan_words,)
    assert jax.tree.unflatten(tree, leaves).spec is plan.spec
    hash(tree)


def test_describe_names_what_the_schedule_does():
    plan = make_plan(Case("", (1, 40), (5000, 60), num_ctas=8))
    text = plan.describe()
    for word in ("items", "queue", "imbalance", "split", "workspace", "bytes"):
        assert word in text
    assert str(len(plan.items())) in text and str(len(plan.merge_groups())) in text


def test_describe_counts_the_groups_that_fold_for_others():
    """Also those whose parent is the first group."""
    plan = long_context("sm_90:132", 16, 60000, (8, 2), head_dim_qk=128)
    parents = plan.merge_groups()["parent"]
    assert 0 in parents
    assert f"split tiles    {(parents < 0).sum()} row groups in " in plan.describe()
    assert f"first folded by {(parents >= 0).sum()} merge groups" in plan.describe()


def test_phases():
    """Letters and page counts of describe()."""
    for case, phase in (
        (Case("", (), ()), "---"),
        (Case("", (1, 1), (500, 70)), "--u"),
        (Case("", (40,), (40,)), "c--"),
        (Case("", (40, 1), (40, 9)), "c-u"),
        (Case("", (40,), (40,), causal=False), "--u"),
        (Case("", (40,), (40,), page_size=None), "c--"),
        (prefix_case(), "-su"),
    ):
        plan = make_plan(case)
        assert plan.phase() == phase, case
        assert f"phase          {phase}" in plan.describe()
    # 6144 shared tokens, 22 times 128 of one request, and 300 of the last request.
    assert "384 pages shared, 195 of one request each" in make_plan(prefix_case()).describe()


def test_a_bucket_counts_the_logits_of_a_full_batch():
    """15 requests: qo_indptr fills its section, and the lengths begin right behind it."""
    spec = ja.AttentionSpec(4, 2, 64, max_batch=15, max_qo_tokens=8, max_kv_pages=30, target="cpu")
    qo_indptr = np.cumsum([0, *[1, 0] * 7, 1])
    pages = 2 * np.arange(16)
    bucket = ja.plan(spec, qo_indptr, np.full(15, 20), pages, np.arange(30)).bucket()
    assert (bucket.num_qo_tokens, bucket.num_logits) == (8, 8)


def test_buckets():
    """Phase, query tokens, shared pages, own pages, logits."""
    for case, bucket in (
        (Case("", (), ()), ("---", 0, 0, 0, 0)),
        (Case("", (40, 0, 1), (40, 9, 17)), ("c-u", 41, 0, 3 + 2, 2)),
        (Case("", (40, 2), (40, 9), page_size=None), ("c--", 42, 0, 0, 2)),
        (prefix_case(), ("-su", sum(prefix_case().qo_lens), 384, 195, len(prefix_case().qo_lens))),
    ):
        plan = make_plan(case)
        assert plan.bucket() == bucket, case
        assert f"{bucket[1]} query tokens" in plan.describe()
        assert f"{bucket[4]} logits" in plan.describe()


def test_inputs_may_be_any_integer_array():
    spec = ja.AttentionSpec(4, 2, 64, max_batch=4, max_qo_tokens=8, max_kv_pages=8)
    arguments = [0, 2, 3], [20, 7], [0, 2, 3], [5, 1, 0]
    want = ja.plan(spec, *arguments).buffer
    for convert in (np.array, jnp.array, lambda x: np.array(x, np.uint16), tuple):
        np.testing.assert_array_equal(ja.plan(spec, *map(convert, arguments)).buffer, want)
    strided = (np.repeat(x, 2)[::2] for x in arguments)
    np.testing.assert_array_equal(ja.plan(spec, *strided).buffer, want)


@pytest.mark.parametrize("target", TARGETS)
def test_a_plan_may_be_written_to_memory_of_another(target):
    """The plan overwrites every word of the memory."""
    spec = ja.AttentionSpec(8, 2, 64, max_kv_pages=400, max_qo_tokens=99, target=target)
    memory = np.full(spec.plan_words + 2, 0x7F7F7F7F, np.int32)
    for kv_lens in ([3000, 5, 700], [1], []):
        num_pages = -(-np.array(kv_lens, int) // 16)
        page_indptr = np.concatenate([[0], np.cumsum(num_pages)])
        batch = range(len(kv_lens) + 1), kv_lens, page_indptr, range(page_indptr[-1])
        plan = ja.plan(spec, *batch, buffer=memory[1:-1])
        assert plan.buffer.base is memory
        np.testing.assert_array_equal(memory[1:-1], ja.plan(spec, *batch).buffer)
        assert memory[0] == memory[-1] == 0x7F7F7F7F
    for wrong in (memory, memory[1:-1].view(np.uint32), memory[1:-1][::-1], memory[1:-1].tolist()):
        with pytest.raises(ValueError, match="plan: buffer: expected a writeable contiguous numpy"):
            ja.plan(spec, *batch, buffer=wrong)
    with pytest.raises(ValueError, match="plan: buffer: expected None for traced arrays"):
        jax.jit(lambda lens: ja.plan(spec, *batch[:1], lens, *batch[2:], buffer=memory[1:-1]))(
            jnp.zeros(0, jnp.int32)
        )


def test_a_plan_that_anyone_holds_is_not_written_again():
    spec = ja.AttentionSpec(4, 2, 64, page_size=16, max_batch=2, max_kv_pages=300, target="sm_90")
    tables = np.arange(301, dtype=np.int32)

    def plan(length: int) -> np.ndarray:
        pages = -(-length // 16)
        return ja.plan(spec, [0, 1], [length], [0, pages], tables[:pages]).buffer

    addresses = {plan(n).ctypes.data for n in range(1, 20)}
    assert len(addresses) == 1
    holders = (
        lambda x: x,
        lambda x: x[5:][10:],
        memoryview,
        lambda x: x[3:].view(np.uint8),
        jnp.asarray,
        jax.jit(lambda x: x),
        jax.device_put,
    )
    held = [(hold(plan(n)), n) for n in range(1, 4000, 300) for hold in holders]
    words = [(np.array(x), n) for x, n in held]
    for n in range(1, 4000, 200):
        plan(n)
    for (x, n), (before, _) in zip(held, words, strict=True):
        np.testing.assert_array_equal(np.asarray(x), before, err_msg=str(n))
    del held
    assert len({plan(n).ctypes.data for n in range(1, 20)}) == 1


def test_the_bits_of_the_specs_do_not_alias():
    """Specs are static jit arguments: equal ones must hash alike, different ones must differ."""
    fields = Case("", (1,), (5,)).spec_fields()
    assert ja.AttentionSpec(**fields) == ja.AttentionSpec(**fields)
    assert hash(ja.AttentionSpec(**fields)) == hash(ja.AttentionSpec(**fields))
    for name, value in (("max_batch", 99), ("sm_scale", 0.5), ("causal", False)):
        assert ja.AttentionSpec(**(fields | {name: value})) != ja.AttentionSpec(**fields)


# ---- shared prefixes ---------------------------------------------------------------------------


def prefix_case(**more):
    """A document of 4096 tokens, two questions that many requests ask, and 128 tokens of each."""
    branches = ("aaaa",) * 10 + ("aaaabb",) * 12 + ("",)
    return Case(
        "prefix",
        qo_lens=(1,) * 23,
        kv_lens=(4224,) * 10 + (6272,) * 12 + (300,),
        num_qo_heads=32,
        num_kv_heads=8,
        branches=branches,
        branch_tokens=1024,
        dtype="bfloat16",
        **more,
    )


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("schedule, split", [("balanced", None), ("fixed_split", 512)])
def test_levels_of_prefixes_are_found_and_read_once(target, schedule, split):
    case = prefix_case(schedule=schedule, kv_split=split)
    flat, plan = (make_plan(case, target, share_prefixes=share) for share in (False, True))
    assert flat.header()["num_shared_tokens"] == 0
    assert not (flat.items()["num_groups"] > 1).any()
    items = plan.items()
    shared = items[items["num_groups"] > 1]
    assert plan.header()["num_shared_tokens"] == 22 + 12
    root = shared[shared["kv_end"] <= 4096]
    assert (root["num_groups"] <= 22).all() and root["kv_begin"].min() == 0
    assert shared["kv_end"].max() == 6144
    read = (items["kv_end"] - items["kv_begin"]).sum()
    config = plan.spec.kernel_config
    tile_tokens = config[f"tile_q_{config['num_tiles'] - 1}"] // 4
    times = -(-22 // tile_tokens)
    assert read == 8 * (times * 4096 + 2048 + 22 * 128 + 300)
    assert make_plan(case, target).buffer.tobytes() == plan.buffer.tobytes()  # the default


@few_examples
@given(case=forests, target=st.sampled_from(TARGETS))
def test_sharing_is_never_predicted_to_be_slower(case, target):
    flat, plan = (make_plan(case, target, share_prefixes=share) for share in (False, True))
    assert plan.queue_costs().max(initial=0) <= 1.03 * flat.queue_costs().max(initial=0)


def test_random_forests_share():
    """Guards the properties above against batches that never share."""
    shares = {
        target: [
            make_plan(random_forest(s), target).header()["num_shared_tokens"] for s in range(60)
        ]
        for target in TARGETS
    }
    assert all(np.count_nonzero(tokens) >= 8 for tokens in shares.values()), shares


def test_what_cannot_be_shared_is_not():
    """Equal pages after a difference, requests of several tiles, windows that end earlier."""
    lengths = {
        "qo_indptr": [0, 1, 2, 3],
        "kv_lens": [4096] * 3,
        "page_indptr": [0, 256, 512, 768],
        "page_indices": np.arange(768),
    }
    fields = {"max_batch": 4, "max_qo_tokens": 1024, "max_kv_pages": 1024, "target": "sm_90:1"}
    spec = functools.partial(ja.AttentionSpec, 32, 8, 128, **fields)

    def num_shared(spec, **more):
        return ja.plan(spec, **(lengths | more)).header()["num_shared_tokens"]

    same = np.tile(np.arange(256), 3)
    assert num_shared(spec()) == 0
    assert num_shared(spec(), page_indices=same) == 3
    assert num_shared(spec(schedule="no_split"), page_indices=same) == 0
    assert num_shared(spec(share_prefixes=False), page_indices=same) == 0
    assert num_shared(spec(window_left=2048), page_indices=same) == 0
    assert num_shared(spec(window_left=4096), page_indices=same) == 3
    assert num_shared(spec(), page_indices=same, qo_indptr=[0, 200, 500, 700]) == 0
    other = same.copy()
    other[[0, 256]] = 700, 701
    assert num_shared(spec(), page_indices=other) == 0
    # A prompt at the first positions: its tokens see none of the others' pages.
    assert num_shared(spec(), page_indices=same, q_offsets=[0, 0, 0]) == 0
    # Without a causal mask everything but the last step is shared.
    plan = ja.plan(spec(causal=False), **(lengths | {"page_indices": same}))
    shared_end = plan.items()["kv_end"][plan.items()["num_groups"] > 1].max()
    assert shared_end == 4096 - plan.spec.kernel_config["tile_kv"]


def test_a_spec_that_cannot_share_says_so():
    for fields in ({"page_size": None, "max_kv_tokens": 9}, {"schedule": "no_split"}):
        fields = {"max_kv_pages": 9 if "schedule" in fields else None} | fields
        assert not ja.AttentionSpec(4, 2, 64, **fields).share_prefixes
        with pytest.raises(ValueError, match="share_prefixes: expected False or None"):
            ja.AttentionSpec(4, 2, 64, share_prefixes=True, **fields)


# ---- plans made inside a compiled function -----------------------------------------------------


def traced_plan(spec, lengths):
    """The plan made by a jitted function whose arguments are the lengths."""
    arguments = {name: jnp.asarray(x) for name, x in lengths.items() if x is not None}
    return jax.jit(lambda arguments: ja.plan(spec, **arguments))(arguments)


def serving_lengths(rng, batch_size, kind):
    """(qo_lens, kv_lens) of a typical server batch."""
    kv_lens = rng.integers(1, 4097, batch_size)
    if kind == "zipf":
        kv_lens = 200000 // rng.permutation(np.arange(1, batch_size + 1))
    if kind == "long":
        kv_lens = np.full(batch_size, 20000)
    qo_lens = np.ones(batch_size, int)
    if kind == "mixed":
        qo_lens[::17] = rng.integers(1, 600, len(qo_lens[::17]))
        kv_lens = np.maximum(kv_lens, qo_lens)
    return qo_lens, kv_lens


@on_every_platform
@pytest.mark.parametrize("kind", ["uniform", "zipf", "long", "mixed"])
def test_a_traced_plan_has_the_bits_of_a_host_plan(kind, backend):
    rng = np.random.default_rng(0)
    for schedule, split in (
        ("balanced", None),
        ("auto", None),
        ("fixed_split", 512),
        ("no_split", None),
    ):
        for heads in ((32, 8), (8, 8), (6, 1)):
            for batch_size in (1, 6, 256):
                qo_lens, kv_lens = serving_lengths(rng, batch_size, kind)
                pages = -(-kv_lens // 16)
                spec = backend.spec(
                    num_qo_heads=heads[0],
                    num_kv_heads=heads[1],
                    head_dim_qk=128,
                    max_batch=batch_size + 3,
                    max_qo_tokens=int(qo_lens.sum()),
                    max_kv_pages=int(pages.sum()) + 5,
                    schedule=schedule,
                    kv_split=split,
                    max_items=1 << 17 if split else None,
                    max_partial_rows=1 << 22 if split else None,
                )
                lengths = {
                    "qo_indptr": np.concatenate([[0], np.cumsum(qo_lens)]),
                    "kv_lens": kv_lens,
                    "page_indptr": np.concatenate([[0], np.cumsum(pages)]),
                    "page_indices": rng.permutation(pages.sum() + 4),
                }
                host, device = ja.plan(spec, **lengths), traced_plan(spec, lengths)
                assert device.fault() == ""
                assert device.header() == host.header()
                np.testing.assert_array_equal(device.buffer, host.buffer)


@pytest.mark.cuda
@pytest.mark.parametrize("backend", [Backend("gpu")], ids=["cuda"], indirect=True)
def test_a_large_batch_is_planned_on_a_gpu(backend):
    """4096 requests and 65,536 query tokens exceed shared memory."""
    rng = np.random.default_rng(0)
    qo_lens = np.ones(4096, int)
    qo_lens[:512] = 120
    kv_lens = rng.integers(120, 3000, 4096)
    pages = -(-kv_lens // 16)
    spec = backend.spec(
        num_qo_heads=32, num_kv_heads=8, head_dim_qk=128, max_batch=4096, max_qo_tokens=1 << 17,
        max_kv_pages=1 << 20,
    )  # fmt: skip
    lengths = {
        "qo_indptr": np.concatenate([[0], np.cumsum(qo_lens)]),
        "kv_lens": kv_lens,
        "page_indptr": np.concatenate([[0], np.cumsum(pages)]),
        "page_indices": rng.permutation(1 << 20),
    }
    np.testing.assert_array_equal(
        traced_plan(spec, lengths).buffer, ja.plan(spec, **lengths).buffer
    )


def test_a_faulty_plan_says_what_the_host_would_have_said():
    case = Case("", (1, 1), (20, 30))
    plan = make_plan(case)
    words = plan.buffer.copy()
    header = plan.spec.layout["header"]
    words[header : header + 16] = 0
    words[header : header + 2] = 0x6A617066, plan.header()["version"]
    words[header + 11 : header + 14] = 6, 1, -5  # kFaultKvLenNegative, request, got
    faulty = dataclasses.replace(plan, buffer=words)
    with pytest.raises(ValueError) as refused:
        ja.plan(plan.spec, [0, 1, 2], [20, -5], [0, 2, 4], np.arange(4))
    assert faulty.fault() == faulty.describe() == str(refused.value)
    q = jnp.zeros(plan.spec.q_shape, plan.spec.dtype)
    pages = [jnp.zeros(x, plan.spec.dtype) for x in plan.spec.kv_shapes(4, plan.spec.page_size)]
    with pytest.raises(Exception, match="attention: plan: kv_lens.1.: expected a length >= 0"):
        jax.block_until_ready(ja.attention(q, *pages, faulty))


FAULTS = {
    "qo_order": {"qo_indptr": [0, 3, 2]},
    "qo_tokens": {"qo_indptr": [0, 1, 9]},
    "kv_len": {"kv_lens": [20, -1]},
    "pages_of_request": {"kv_lens": [20, 33]},
    "page_order": {"page_indptr": [0, 1 << 30, 4]},
    "pages": {"page_indptr": [0, 2, 1 << 30]},
    "page_id": {"page_indices": [5, 1, 0, 10]},
    "page_id_negative": {"page_indices": [5, -1, 0, 1]},
}


@pytest.mark.cuda
@pytest.mark.parametrize("backend", [Backend("gpu")], ids=["cuda"], indirect=True)
@pytest.mark.parametrize("changed", FAULTS.values(), ids=FAULTS)
def test_a_gpu_leaves_a_faulty_plan_where_the_host_refuses(changed, backend):
    spec = backend.spec(
        num_qo_heads=4, num_kv_heads=2, head_dim_qk=64, page_size=16, num_pages=10, max_batch=2,
        max_qo_tokens=8, max_kv_pages=4,
    )  # fmt: skip
    good = {
        "qo_indptr": [0, 1, 3], "kv_lens": [20, 20], "page_indptr": [0, 2, 4],
        "page_indices": [5, 1, 0, 9],
    }  # fmt: skip
    lengths = {name: np.array(x, np.int32) for name, x in (good | changed).items()}
    with pytest.raises(ValueError) as refused:
        ja.plan(spec, **lengths)
    plan = traced_plan(spec, lengths)
    assert plan.fault() == plan.describe() == str(refused.value)
    assert len(plan.items()) == 0 and not plan.queue_indptr().any()

    q = jnp.ones(spec.q_shape, spec.dtype)
    k_pages, v_pages = (jnp.ones(shape, spec.dtype) for shape in spec.kv_shapes(10, 16))
    o, lse = ja.attention(q, k_pages, v_pages, plan, return_lse=True)
    assert np.isnan(np.float32(o)).all() and np.isnan(lse).all()
    new = jnp.zeros((8, 2, 64), spec.dtype)
    appended = ja.append_kv(k_pages, v_pages, new, new, plan)
    assert all((np.float32(pages) == 1).all() for pages in appended)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_environment, "check", True)
        with pytest.raises(Exception, match="attention: plan: "):
            jax.block_until_ready(ja.attention(q, k_pages, v_pages, plan))
            jax.effects_barrier()


@pytest.mark.parametrize("target", [*TARGETS, "sm_90:4"])
def test_the_largest_forest_fits_the_default_capacities(target):
    """Many nodes, deep and flat: capacities that do not depend on the tree must fit any plan."""
    rng = np.random.default_rng(0)
    most = 0
    for num_kv_heads, group in ((1, 1), (8, 4), (2, 16), (1, 7)):
        for num_requests, arity in ((2, 1), (48, 1), (48, 2), (48, 3), (130, 2), (130, 40)):
            depth = rng.integers(1, 8, num_requests)
            branches = tuple(
                "".join(chr(ord("a") + rng.integers(arity)) for _ in range(n)) for n in depth
            )
            case = Case(
                "",
                qo_lens=tuple(rng.integers(1, 3, num_requests).tolist()),
                kv_lens=tuple((512 * depth + rng.integers(2, 100, num_requests)).tolist()),
                num_qo_heads=num_kv_heads * group,
                num_kv_heads=num_kv_heads,
                dtype="bfloat16",
                branches=branches,
                branch_tokens=512,
            )
            exact = {"max_batch": num_requests, "max_qo_tokens": sum(case.qo_lens)}
            plan = make_plan(case, target, **exact)
            most = max(most, plan.header()["num_shared_tokens"])
    assert most > 130


# ---- lengths near 2^30 -------------------------------------------------------------------------


def _long_spec(**fields):
    fields = {"num_qo_heads": 1, "num_kv_heads": 1, "head_dim_qk": 64, "max_batch": 4} | fields
    return ja.AttentionSpec(page_size=None, max_kv_tokens=2**31 - 1, **fields)


def _spans(spec, qo_lens, kv_lens):
    """The spans of a plan's items, in the order of requests, tokens and positions."""
    qo_indptr = np.concatenate([[0], np.cumsum(qo_lens)])
    items = ja.plan(spec, qo_indptr, kv_lens).items()
    items = np.sort(items, order=("request", "first_token", "kv_begin"))
    return [(int(i["request"]), int(i["kv_begin"]), int(i["kv_end"])) for i in items]


@pytest.mark.parametrize("target", TARGETS)
def test_whole_spans_of_any_legal_length(target):
    """Costs exceed the range of the chunks' sort: 2^36 for 115 million tokens of a tall tile."""
    spec = _long_spec(schedule="no_split", max_qo_tokens=101, target=target)
    for kv_len in (115_000_000, 2**30 - 1):
        spans = _spans(spec, [100, 1], [kv_len, kv_len])
        assert (1, 0, kv_len) in spans
        assert max(end for r, _, end in spans if r == 0) == kv_len


def test_chunks_longer_than_any_length():
    spec = _long_spec(
        schedule="fixed_split", kv_split=2**31 - 128, max_qo_tokens=64, num_qo_heads=8, target="cpu"
    )
    spans = _spans(spec, [32, 32], [250_000_000, 250_000_001])
    assert spans == [(0, 0, 250_000_000), (1, 0, 250_000_001)]


@pytest.mark.parametrize("target", ("cpu", "sm_90:1", "sm_90:132"))
def test_default_capacities_hold_the_longest_batch(target):
    spec = _long_spec(max_qo_tokens=2, target=target)
    for schedule in ("balanced", "auto"):
        spans = _spans(dataclasses.replace(spec, schedule=schedule), [1, 1], [2**30 - 1, 2**30 - 1])
        for request in (0, 1):
            own = [(begin, end) for r, begin, end in spans if r == request]
            assert own[0][0] == 0 and own[-1][1] == 2**30 - 1
            assert all(a[1] == b[0] for a, b in zip(own, own[1:], strict=False))


def test_positions_below_the_limit_are_refused():
    spec = _long_spec(max_qo_tokens=2**31 - 1, max_items=1000, target="cpu")
    with pytest.raises(ValueError, match=r"q_offsets\[0\].* positions in \(-2\^30, 2\^30\), got -"):
        ja.plan(spec, [0, 2**30 + 50], [10])


def test_more_chunks_than_there_may_be_are_counted_not_made():
    spec = ja.AttentionSpec(
        num_qo_heads=1, num_kv_heads=1, head_dim_qk=64, page_size=2**30, max_kv_pages=64,
        schedule="fixed_split", kv_split=128, max_batch=64, max_qo_tokens=64, max_items=10,
        max_partial_rows=10, target="cpu",
    )  # fmt: skip
    indptr = np.arange(65)
    with pytest.raises(
        ValueError, match=r"kv_lens: .*2\^26 chunks of kv_split = 128 .*raise kv_split"
    ):
        ja.plan(spec, indptr, [2**30 - 1] * 64, indptr, [0] * 64)
