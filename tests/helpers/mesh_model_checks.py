"""The checks of mesh_checks.py for models and the engine: heads over one axis, kv over another."""

from __future__ import annotations

import gc
from collections import Counter
from math import prod

import jax
import numpy as np
from collectives import collectives

import jax_attn as ja
from helpers.mesh_checks import make_mesh, on_gpu
from jax_attn import parallel


def check_models(
    num_devices: int, first: int = 0, step: int = 1, num_kv_shards: int = 1, **sizes: int
) -> None:
    """Checks families first, first + step, ...: logits of one device, collectives, and memory.

    sizes: replace a family's own sizes, so that the devices divide them.
    """
    from helpers import model_cases
    from jax_attn import models

    checked = []
    for name, raw in list(model_cases.CONFIGS.items())[first::step]:
        config = models.parse_config(model_cases._COMMON | raw | sizes)
        mesh = make_mesh(num_devices, num_kv_shards)
        try:
            split = models.TensorParallel(
                config, mesh, "heads", "kv" if num_kv_shards > 1 else None
            )
        except ValueError as error:
            assert "use fewer devices" in str(error) and "\n" not in str(error)
            continue
        params = models.random_params(config, jax.random.key(0), "float32")
        tokens = np.arange(23) * 7 % config.vocab_size
        capacities = {"max_batch": 2, "max_qo_tokens": 24, "max_kv_pages": 20}
        fields = capacities | {"dtype": "float32", "page_size": 4}
        specs = models.attention_specs(split.config, **fields)
        lengths = np.array([0, 23]), np.array([23]), np.array([0, 6]), np.array([5, 2, 9, 1, 0, 7])
        everywhere = plan_spec = jax.sharding.PartitionSpec()
        plans = tuple(ja.plan(spec, *lengths) for spec in specs)
        if num_kv_shards > 1:
            kv_shards = [split.kv_shards(spec) for spec in specs]
            plans = tuple(parallel.plan_kv_shards(x, *lengths) for x in kv_shards)
            plan_spec = kv_shards[0].plan_spec
        parts, pages = split.split_params(params), split.init_pages(specs, 11)
        param_specs = jax.tree.map(lambda x: x.sharding.spec, parts)
        of_states = models.state_spec(
            split.config, dtype="float32", max_tokens=24, max_batch=2, num_slots=3
        )
        state_plan, states = None, split.init_states(3, "float32")
        if of_states is not None:
            state_plan = ja.plan_linear_attention(of_states, [0, 0, 23], [-1, -1], [2, 1])
        states_spec = split.states_spec

        def run(params, states, state_plan, *args, config=split.config):
            return models.forward(
                params, config, *args, states=states, state_plan=state_plan
            )[:3]  # fmt: skip

        forward = jax.jit(
            jax.shard_map(
                run,
                mesh=mesh,
                in_specs=(param_specs, states_spec, everywhere, everywhere, everywhere,
                          split.pages_spec, split.pages_spec, plan_spec, everywhere),
                out_specs=(everywhere, split.pages_spec, split.pages_spec),
                check_vma=False,
            ),
            donate_argnums=(5, 6),
        )  # fmt: skip
        padded = np.append(tokens, 0).astype(np.int32)
        arguments = (parts, states, state_plan, padded, np.arange(24, dtype=np.int32), *pages,
                     plans, np.arange(23, dtype=np.int32))  # fmt: skip
        found = Counter(collectives(forward.lower(*arguments).compile().as_text()))
        expected = bytes_of_model(split, num_kv_shards, num_rows=24, num_logits=23)
        assert found == expected, (name, found, expected)
        check_shares(name, split, params, parts, pages, num_kv_shards)
        logits = forward(*arguments)[0]
        want = models.reference_forward(params, config, tokens)
        np.testing.assert_allclose(logits, want, rtol=2e-4, atol=2e-4, err_msg=name)
        checked.append(name)
    assert checked, "all families were refused"
    print(f"{num_devices} x {num_kv_shards} devices: {len(checked)} families: {', '.join(checked)}")


def bytes_of_model(split, num_kv_shards, *, num_rows: int, num_logits: int) -> Counter:
    """Collectives of an f32 step: (kind, bytes of the results on one device) -> count."""
    whole, own, layers = split.whole, split.config, split.whole.num_layers
    expected = Counter()
    if whole.recurrent is not None:
        expected += sums_of_hybrid(split, num_rows)
    elif whole.parallel:  # XLA makes one of the sums of attention and MLP
        expected["all-reduce", 2 * 4 * num_rows * whole.hidden_size] += layers
    else:
        expected["all-reduce", 4 * num_rows * whole.hidden_size] += 2 * layers
    if whole.qk_norm == "all_heads":  # one number a token for each of q and k
        expected["all-reduce", 4 * 2 * num_rows] += sum(kind.attention for kind in whole.layers)
    if own.splits_vocabulary:  # one for the embedding, one for the logits
        expected["all-reduce", 4 * num_rows * whole.hidden_size] += 1
        expected["all-gather", 4 * num_logits * whole.vocab_size] += 1
    if on_gpu() and split.size == 1:  # XLA leaves out transfers of a device to itself
        expected.clear()
    elif on_gpu():  # the sums of rows are a kernel of ours
        for kind, size in list(expected):
            if kind == "all-reduce" and size != 4 * 2 * num_rows:
                del expected[kind, size]
    if num_kv_shards > 1:
        head_dim_vo = whole.latent.kv_rank if whole.latent else whole.head_dim
        states = num_rows * own.num_qo_heads * (head_dim_vo + 1)
        num_attention = sum(kind.attention for kind in whole.layers)
        expected["all-gather", 4 * num_kv_shards * states] += num_attention
    return expected


def sums_of_hybrid(split, num_rows: int) -> Counter:
    """Collectives of the layers: a sum for each part, and norms over outputs of several devices."""
    from jax_attn.models._weights.weights import shapes_in_memory

    expected = Counter()
    weights = shapes_in_memory(split.whole)["layers"]
    for kind, names in zip(split.config.layers, weights, strict=True):
        parts = (kind.recurrent is not None) + kind.attention
        if parts == 2:  # XLA makes one of two
            expected["all-reduce", 2 * 4 * num_rows * split.whole.hidden_size] += 1
        num_sums = int(parts == 1) + ("down" in names or "router" in names)
        expected["all-reduce", 4 * num_rows * split.whole.hidden_size] += num_sums
        together = getattr(kind.recurrent, "normed_together", None)
        if together is not None and getattr(kind.recurrent, "norm", "") != "none":
            expected["all-gather", 4 * num_rows * split.size] += 1
    return expected


def check_shares(name, split, params, parts, pages, num_kv_shards) -> None:
    """Checks shares of 1/N; norms, router, latent projections and repeated heads are whole."""
    whole_names = ("norm", "router", "q_a", "kv_a", "o_bias", "down_bias", "xielu", "latent_")
    # q and k heads or groups that are fewer than devices; latent inputs of KDA's gates
    may_repeat = ("qkvz", "conv", "zxbcdt", "zxbcdt_bias", "conv_bias", "fgb")
    for (path, part), whole in zip(
        jax.tree_util.tree_leaves_with_path(parts), jax.tree.leaves(params), strict=True
    ):
        key = path[-1].key
        held = [shard.data.nbytes for shard in part.addressable_shards]
        assert len(set(held)) == 1, (name, key)
        is_repeated = key in ("qkv", "qkv_bias") and split.whole.num_kv_heads < split.size
        is_repeated |= key in may_repeat and held[0] * split.size > whole.nbytes
        if key == "shared_gate" or any(word in key for word in whole_names):
            assert held[0] <= whole.nbytes, (name, key)
        elif not is_repeated:
            assert held[0] * split.size == whole.nbytes, (name, key, held, whole.nbytes)
    repeats = max(1, split.size // split.whole.num_kv_heads)
    for x in pages:
        if x is not None and not split.whole.latent:
            num_layers = split.whole.page_groups[0]
            shape = num_layers, 11, 4, split.whole.num_kv_heads, split.whole.head_dim
            held = x.addressable_shards[0].data.nbytes
            assert held * split.size * num_kv_shards == 4 * prod(shape) * repeats, (name, held)


def check_training(name: str) -> None:
    """Checks gradients of `train_forward` on two devices, each with a part of the batch."""
    from helpers import model_cases
    from jax_attn import models

    config = models.parse_config(model_cases._COMMON | model_cases.CONFIGS[name])
    params = models.random_params(config, jax.random.key(0), "float32")
    sizes = {"dtype": "float32", "page_size": 4, "max_batch": 1, "max_qo_tokens": 8}
    [spec] = models.train_specs(config, max_kv_pages=2, **sizes)
    plans = (ja.plan(spec, [0, 8], [8], [0, 2], [0, 1]),)
    of_states = models.state_spec(config, dtype="float32", max_tokens=8, max_batch=1, num_slots=1)
    state_plans = (ja.plan_linear_attention(of_states, [0, 8], [-1], [-1]),)
    tokens = np.arange(32).reshape(4, 8) * 7 % config.vocab_size

    def loss(forward, tokens):
        logits = jax.lax.map(forward, tokens)
        return (jax.nn.log_softmax(logits) * np.cos(np.arange(config.vocab_size))).sum()

    def ours(params, tokens):
        rows = np.arange(8)
        run = lambda x: models.train_forward(  # noqa: E731
            params, config, x, rows, plans, rows, state_plans
        )
        return loss(run, tokens)

    def plain(params, tokens):
        return loss(lambda x: models.reference_forward(params, config, x), tokens)

    by_batch, everywhere = jax.P("heads"), jax.P()
    mesh = make_mesh(2, 1)
    split = jax.shard_map(
        lambda params, tokens: jax.lax.psum(ours(params, tokens), "heads"),
        mesh=mesh, in_specs=(everywhere, by_batch), out_specs=everywhere,
    )  # fmt: skip
    found, expected = (jax.jit(jax.grad(f))(params, tokens) for f in (split, plain))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3 * abs(b).max() + 1e-6)


def check_engine(*splits: tuple[int, int]) -> None:
    """Checks greedy f32 tokens against one device, and each device's share of the memory.

    splits: (tensor_parallel, context_parallel).
    """

    from helpers.model_cases import shallow
    from jax_attn import models
    from jax_attn.serve._engine.engine import Engine
    from jax_attn.serve._engine.engine_config import EngineConfig
    from jax_attn.serve._scheduling.request import SamplingParams, Sequence

    prompts = [[5, 9, 200, 31, 7, 7, 12, 90, 4] * 3, [5, 9, 200, 31, 1], [77]]
    answers, held, live = {}, {}, {}
    for split in ((1, 1), *splits):
        limits = EngineConfig(num_pages=60, page_size=4, max_running=3, max_step_tokens=16,
                              tensor_parallel=split[0], context_parallel=split[1])  # fmt: skip
        earlier = jax.live_arrays()  # kept alive, so that no new array reuses their memory
        model = shallow(models.load(models.BUNDLED, "float32"))
        config = model.config
        engine = Engine(model, limits)
        del model  # an engine of several devices keeps only their shares
        engine.warm_up()
        greedy = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        drawn = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True, logprobs=2)
        kinds = (greedy, drawn, greedy)
        engine.submit([Sequence(str(i), str(i), list(x), kinds[i]) for i, x in enumerate(prompts)])
        tokens = [[] for _ in prompts]
        while engine.has_work:
            for event in engine.step():
                tokens[int(event.seq_id)] += event.tokens
        assert engine.device.num_compiles_after_warm_up == 0
        answers[split], held[split] = tokens, engine.device.bytes_held()
        live[split] = live_bytes(besides=earlier)
        del engine, earlier
        gc.collect()  # frees cycles that hold arrays
    assert all(len(x) == 12 for x in answers[1, 1])
    pages = config.num_layers * 60 * 4 * config.num_kv_heads * config.head_dim * 2 * 4
    weights = held[1, 1][0] - pages
    # Everything else on one device is whole on each: the sampler's state, tables, results.
    others = live[1, 1][0] - weights - pages
    assert others < 0.1 * (weights + pages), (others, weights, pages)
    for split in splits:
        assert answers[split] == answers[1, 1], (split, answers)
        assert len(live[split]) == prod(split)
        if split[0] <= config.num_kv_heads:
            share = weights / split[0] + pages / prod(split)
            for device, size in live[split].items():
                assert 0.999 * share <= size - others < 1.03 * share, (split, device, size, share)
                assert share <= held[split][device] < 1.03 * share, (split, held, share)


def live_bytes(besides: list[jax.Array]) -> Counter:
    """Bytes of the buffers of all live arrays by device, without those of `besides`."""
    buffers = buffers_of(jax.live_arrays())
    total = Counter()
    for place in buffers.keys() - buffers_of(besides).keys():
        total[place[0]] += buffers[place]
    return total


def buffers_of(arrays: list[jax.Array]) -> dict[tuple[int, int], int]:
    """Bytes by device and address. A shard's data is another array over the same memory."""
    return {
        (shard.device.id, shard.data.unsafe_buffer_pointer()): shard.data.nbytes
        for array in arrays
        for shard in array.addressable_shards
    }


def check_features(*splits: tuple[int, int]) -> None:
    """Checks all features of a server, mixed and short of pages, against one device."""
    from jax_attn import models
    from jax_attn.serve._engine.engine import Engine
    from jax_attn.serve._engine.engine_config import EngineConfig
    from jax_attn.serve._grammar import grammar
    from jax_attn.serve._scheduling.request import SamplingParams, Sequence

    model = models.load(models.BUNDLED, "float32")
    repeated, text = (
        [0, *model.tokenizer.encode(x).ids]
        for x in ("def add(a, b):\n    return a + b\n\n\n" * 4, "import os\nimport sys\n" * 3)
    )
    requests = (
        (repeated, {}),
        (text, {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.3}),
        (text, {"grammar": grammar.from_regex("[a-z]{3,9} = [0-9]{4}")}),
        (repeated, {"temperature": 0.8, "seed": 3, "logprobs": 3, "top_p": 0.9}),
        (text, {"logprobs": 1, "prompt_logprobs": True, "logit_bias": ((300, 2.0),)}),
        (repeated[:30], {"temperature": 1.0, "seed": 5, "top_k": 20, "min_p": 0.01}),
    )
    answers = {}
    for split in ((1, 1), *splits):
        limits = EngineConfig(num_pages=30, page_size=8, max_running=4, max_step_tokens=24,
                              max_drafts=4, num_host_pages=40, tensor_parallel=split[0],
                              context_parallel=split[1])  # fmt: skip
        engine = Engine(model, limits)
        engine.warm_up()
        host = engine.scheduler.memory.host
        host.call_tokens = host.page_tokens = 0.0  # pages come back on any machine
        told = [([], []) for _ in requests]
        for turn in range(2):  # the second pass finds the first one's prefixes
            common = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
            engine.submit(
                [
                    Sequence(f"{turn}.{i}", str(i), list(x), SamplingParams(**common | more))
                    for i, (x, more) in enumerate(requests)
                ]
            )
            while engine.has_work:
                for event in engine.step():
                    assert event.error is None, event
                    tokens, logprobs = told[int(event.seq_id.split(".")[1])]
                    tokens += event.tokens
                    for entry in event.logprobs or ():
                        logprobs += [entry.logprob or 0.0, *(x for _, x in entry.top)]
                engine.scheduler.check_integrity()
            engine.scheduler.cache.evict(limits.num_pages)  # to the host
        stats = engine.stats()
        assert engine.device.num_compiles_after_warm_up == 0
        for name in ("preemptions", "prefix_hit_tokens", "draft_tokens_taken"):
            assert stats[name] > 0, (split, name, stats)
        assert stats["host"]["returned"] > 0, (split, stats)
        answers[split] = told
        del engine
        gc.collect()
    for split in splits:
        for i, (got, want) in enumerate(zip(answers[split], answers[1, 1], strict=True)):
            assert got[0] == want[0], (split, i, got[0], want[0])
            np.testing.assert_allclose(got[1], want[1], atol=1e-3, err_msg=str((split, i)))
    assert [bool(logprobs) for _, logprobs in answers[1, 1]] == [0, 0, 0, 1, 1, 0]


def check_family(name: str, *splits: tuple[int, int], expert_parallel: bool = False) -> None:
    """Checks experts, sinks, latent attention and states: two devices answer as one does."""
    from helpers import model_cases
    from jax_attn import models
    from jax_attn.serve._engine.engine import Engine
    from jax_attn.serve._engine.engine_config import EngineConfig
    from jax_attn.serve._scheduling.request import SamplingParams, Sequence

    tokenizer = models.load(models.BUNDLED, "float32").tokenizer
    prompts = [[5, 9, 200, 31, 7, 7, 12, 90, 4], [5, 9, 200, 31, 1], [77]]
    more = {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": 0}
    raw = model_cases._COMMON | model_cases.CONFIGS[name] | more
    if "num_local_experts" in raw:
        raw["num_local_experts"] = 4  # divisible by two devices
    config = models.parse_config(raw)
    params = models.random_params(config, jax.random.key(0), "float32")
    answers = {}
    for split in ((1, 1), *splits):
        limits = EngineConfig(num_pages=40, page_size=4, max_running=3, max_step_tokens=3,
                              num_host_pages=4, tensor_parallel=split[0],
                              context_parallel=split[1],
                              expert_parallel=expert_parallel and split[0] > 1)  # fmt: skip
        engine = Engine(models.Model(config, params, tokenizer), limits)
        engine.warm_up()
        sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        engine.submit([Sequence(str(i), str(i), list(x), sampling) for i, x in enumerate(prompts)])
        answers[split] = [[] for _ in prompts]
        while engine.has_work:
            for event in engine.step():
                answers[split][int(event.seq_id)] += event.tokens
    assert all(len(x) == 8 for x in answers[1, 1])
    for split, got in answers.items():
        assert got == answers[1, 1], (split, got, answers[1, 1])
