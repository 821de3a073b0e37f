"""The checks of mesh_checks.py for experts over devices."""

from __future__ import annotations

import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from collectives import collectives

import jax_attn as ja
from helpers import model_cases
from helpers.mesh_checks import make_mesh
from helpers.mesh_model_checks import bytes_of_model
from jax_attn import models
from jax_attn.models._layers import decoder, expert_exchange
from jax_attn.models._weights.weights import shapes_in_memory

BY_DEVICE = jax.P("heads")


def check_exchange(num_devices: int) -> None:
    """Checks the exchange against products row by row, with any routing and any capacity."""
    rng = np.random.default_rng(0)
    mesh = make_mesh(num_devices, 1)
    cases = [  # rows of a device, experts of a device, capacity, ids
        (12, 3, None, "any"),
        (12, 3, 2, "any"),
        (12, 2, 1, "one"),
        (12, 2, 5, "one"),
        (10, 3, 4, "some of none"),
        (3, 1, 2, "none"),
        (1, 1, None, "any"),
    ]
    for dtype, (m, count, capacity, ids) in [
        *(("float32", case) for case in cases),
        *(("bfloat16", case) for case in cases[1:3]),
    ]:
        total = num_devices * count
        high = {"any": total, "some of none": total + 3, "one": 1, "none": 0}[ids]
        expert = rng.integers(0, high, num_devices * m) if high else np.full(num_devices * m, total)
        rows = jnp.asarray(rng.normal(size=(num_devices * m, 5)), dtype)  # 5: no whole words
        weights = jnp.asarray(rng.normal(size=(total, 5, 7)), dtype)

        def product(rows, expert, weights):
            return jnp.einsum("nd,ndo->no", rows, weights[jnp.minimum(expert, len(weights) - 1)])

        def compute(rows_at, expert, weights):
            y = product(rows_at(jnp.arange(len(expert))), expert, weights)
            return jnp.where((expert < len(weights))[:, None], y, jnp.nan)

        def run(rows, expert, weights, count=count, m=m, capacity=capacity):
            return expert_exchange.exchange(
                rows.__getitem__, expert, count, m, "heads",
                lambda rows_at, expert: compute(rows_at, expert, weights), capacity,
            )  # fmt: skip

        split = jax.shard_map(
            run, mesh=mesh, in_specs=BY_DEVICE, out_specs=BY_DEVICE, check_vma=False
        )
        found = jax.jit(split)(rows, jnp.asarray(expert, jnp.int32), weights)
        expected = jnp.where((expert < total)[:, None], product(rows, expert, weights), 0)
        np.testing.assert_array_equal(
            np.asarray(found, np.float32), np.asarray(expected, np.float32), str((m, count, ids))
        )


def config_of(name: str, num_experts: int = 8, **fields: int) -> models.ModelConfig:
    raw = model_cases._COMMON | model_cases.CONFIGS[name] | fields
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return models.parse_config(raw | {x: num_experts for x in names if x in raw})


def check_by_data(name: str, num_devices: int, one_round_bytes: int | None = None) -> None:
    """Checks a step in which devices have requests of their own, and the last one has none."""
    if one_round_bytes is not None:
        expert_exchange._ONE_ROUND_BYTES = one_round_bytes
    config = config_of(name)
    mesh = make_mesh(num_devices, 1)
    split = models.ExpertParallel(config, mesh, "heads")
    params = models.random_params(config, jax.random.key(0), "float32")
    fields = {"max_batch": 2, "max_qo_tokens": 24, "max_kv_pages": 20, "page_size": 4}
    specs = models.attention_specs(split.config, dtype="float32", **fields)
    of_states = models.state_spec(
        split.config, dtype="float32", max_tokens=24, max_batch=2, num_slots=3
    )
    lengths = [23 - 5 * i for i in range(num_devices - 1)] + [0]
    texts = [np.arange(n) * (7 + i) % config.vocab_size for i, n in enumerate(lengths)]
    tokens = np.zeros((num_devices, 24), np.int32)
    plans, state_plans = [], []
    for i, (n, text) in enumerate(zip(lengths, texts, strict=True)):
        tokens[i, :n] = text
        num_pages = -(-n // 4)
        table = [0, n], [n], [0, num_pages], np.arange(num_pages)[::-1]
        plans.append(tuple(ja.plan(spec, *table) for spec in specs))
        if of_states is not None:
            state_plans.append(ja.plan_linear_attention(of_states, [0, n], [-1], [2]))
    stacked = [jax.tree.map(lambda *x: np.stack(x), *each) for each in (plans, state_plans) if each]
    parts, pages = split.split_params(params), split.init_pages(specs, 6)
    states = split.init_states(3, "float32")

    def run(params, tokens, k_pages, v_pages, states, plans, *state_plan):
        own = jax.tree.map(lambda x: x[0], (tokens, plans, state_plan))
        tokens, plans, state_plan = own
        rows = jnp.arange(24)
        new = models.forward(
            params, split.config, tokens, rows, k_pages, v_pages, plans, rows, None, states,
            *state_plan,
        )  # fmt: skip
        return new[0]

    param_specs = jax.tree.map(lambda x: x.sharding.spec, parts)
    own = split.pages_spec
    in_specs = param_specs, BY_DEVICE, own, own, own, *[BY_DEVICE] * len(stacked)
    forward = jax.jit(
        jax.shard_map(
            run, mesh=mesh, in_specs=in_specs, out_specs=BY_DEVICE, check_vma=False
        )
    )  # fmt: skip
    arguments = parts, tokens, *pages, states, *stacked
    found = Counter(collectives(forward.lower(*arguments).compile().as_text()))
    assert found == sent_bytes(config, num_devices, 24), found
    check_memory(config, params, parts, pages, num_devices)
    logits = np.asarray(forward(*arguments)).reshape(num_devices, 24, -1)
    for i, text in enumerate(texts[:-1]):
        want = models.reference_forward(params, config, text)
        np.testing.assert_allclose(logits[i, : len(text)], want, rtol=2e-4, atol=2e-4)


def check_padding(num_devices: int) -> None:
    """Checks that padding is not sent: it would fill the rounds, as all of it is for one expert."""
    mesh = make_mesh(num_devices, 1)
    split = models.ExpertParallel(config_of("qwen3 moe"), mesh, "heads")
    params = models.random_params(split.whole, jax.random.key(0), "float32")
    weights = split.split_params(params)["layers"][0]
    x = jax.random.normal(jax.random.key(1), (6 * num_devices, split.whole.hidden_size))

    def run(x, weights):
        return decoder._experts(x, weights, split.config, num_tokens=jnp.int32(4))

    specs = jax.tree.map(lambda x: x.sharding.spec, weights)
    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=(BY_DEVICE, specs), out_specs=BY_DEVICE, check_vma=False
    )
    found = np.asarray(jax.jit(mapped)(x, weights)).reshape(num_devices, 6, -1)
    whole = decoder._experts(x, params["layers"][0], split.whole).reshape(found.shape)
    np.testing.assert_allclose(found[:, :4], whole[:, :4], rtol=2e-4, atol=2e-5)
    assert not found[:, 4:].any() and np.abs(found[:, :4]).min(-1).all()


def check_by_heads(name: str, num_devices: int) -> None:
    """Checks a step whose tokens all devices have: each sends its part of them."""
    config = config_of(name)
    mesh = make_mesh(num_devices, 1)
    split = models.TensorParallel(config, mesh, "heads", exchanges_experts=True)
    params = models.random_params(config, jax.random.key(0), "float32")
    fields = {"max_batch": 2, "max_qo_tokens": 22, "max_kv_pages": 20, "page_size": 4}
    specs = models.attention_specs(split.config, dtype="float32", **fields)
    text = np.arange(19) * 7 % config.vocab_size  # 3 are padding, and 22 is no multiple of 4
    plans = tuple(ja.plan(spec, [0, 19], [19], [0, 5], [3, 1, 0, 2, 4]) for spec in specs)
    parts, pages = split.split_params(params), split.init_pages(specs, 5)
    rows = np.arange(22, dtype=np.int32)

    def run(params, tokens, k_pages, v_pages, plans):
        return models.forward(params, split.config, tokens, rows, k_pages, v_pages, plans, rows)[0]

    param_specs = jax.tree.map(lambda x: x.sharding.spec, parts)
    everywhere, own = jax.P(), split.pages_spec
    forward = jax.jit(
        jax.shard_map(
            run, mesh=mesh, in_specs=(param_specs, everywhere, own, own, everywhere),
            out_specs=everywhere, check_vma=False,
        )
    )  # fmt: skip
    arguments = parts, np.append(text, [0] * 3).astype(np.int32), *pages, plans
    found = Counter(collectives(forward.lower(*arguments).compile().as_text()))
    expected = bytes_of_model(split, 1, num_rows=22, num_logits=22)
    assert found == expected + sent_bytes(config, num_devices, -(-22 // num_devices)), found
    want = models.reference_forward(params, config, text)
    np.testing.assert_allclose(forward(*arguments)[:19], want, rtol=2e-4, atol=2e-4)


def sent_bytes(config: models.ModelConfig, num_devices: int, num_tokens: int) -> Counter:
    """Collectives of an f32 step by data with `num_tokens` on a device."""
    experts, expected = config.experts, Counter()
    shapes = shapes_in_memory(config)["layers"]
    for layer in shapes:
        if "router" not in layer:
            continue
        width = layer["latent_in"][1] if "latent_in" in layer else config.hidden_size
        most = num_tokens * min(experts.per_token, experts.count // num_devices)
        capacity = expert_exchange.capacity_of(
            num_tokens * experts.per_token, most, num_devices, 4 * width
        )
        rounds = 1 if capacity == most else 2  # the second is the body of a loop
        expected["all-to-all", 4 * num_devices * capacity * (width + 1)] += rounds
        expected["all-to-all", 4 * num_devices * capacity * width] += rounds
        if rounds > 1:
            expected["all-reduce", 4] += 1  # whether there is another round
    return expected


def check_memory(config, params, parts, pages, num_devices: int) -> None:
    """Checks that a device has 1/N of the experts, and pages of its own."""
    for (path, part), whole in zip(
        jax.tree_util.tree_leaves_with_path(parts), jax.tree.leaves(params), strict=True
    ):
        is_expert = path[-1].key.startswith(("expert_gate_up", "expert_down"))
        for shard in part.addressable_shards:
            share = num_devices if is_expert else 1
            assert shard.data.nbytes * share == whole.nbytes, path
    for x in jax.tree.leaves(pages):
        assert {shard.data.nbytes * num_devices for shard in x.addressable_shards} == {x.nbytes}


def check_devices(name: str, num_devices: int) -> None:
    """Checks the devices of engines that share experts: logits of steps of some or all of them."""
    from concurrent.futures import ThreadPoolExecutor

    from jax_attn.serve._engine.engine_config import EngineConfig, capacities, device_config
    from jax_attn.serve._engine.expert_group import ExpertDevice, ExpertGroup
    from jax_attn.serve._scheduling.request import FinishReason, SamplingParams, Sequence
    from jax_attn.serve._scheduling.scheduler import Scheduler

    numbers = itertools.count()
    config = config_of(name)
    params = models.random_params(config, jax.random.key(0), "float32")
    model = models.Model(config, params, None)
    group = ExpertGroup(model, jax.devices()[:num_devices])
    limits = [
        EngineConfig(
            num_pages=40, page_size=4, max_running=2, max_step_tokens=16,
            expert_group=group, devices=(device,),
        )
        for device in jax.devices()[:num_devices]
    ]  # fmt: skip
    devices = [ExpertDevice(group, model, device_config(config, each)) for each in limits]
    schedulers = [Scheduler(capacities(each, config)) for each in limits]
    greedy = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)

    def run(i: int, text: list[int]) -> np.ndarray:
        """The logits of a text's last token."""
        device, scheduler = devices[i], schedulers[i]
        seq = Sequence(str(next(numbers)), "", list(text), greedy)
        scheduler.add(seq)
        is_read = False
        while not is_read:
            plan = scheduler.schedule(0.0)
            batch = device.plan(plan.entries)
            scores = device.forward(batch)
            scheduler.launched(plan)
            jax.block_until_ready(device.sample(scores, batch.kind, None))
            is_read = plan.entries[0].samples
        device.rest()
        scheduler.finish(seq, FinishReason.ABORT)
        return np.asarray(scores.logits)[0]

    found: list[tuple[list[int], np.ndarray]] = []
    with ThreadPoolExecutor(num_devices) as pool:
        list(pool.map(lambda device: device.warm_up(), devices))
        for device in devices:  # each has counted the others' compilations
            device.forget_compilations()
        for who in ([*range(num_devices)], [1], [*range(num_devices)]):
            # A prompt of several steps, beside one of fewer for other engines, which rest then.
            texts = [[5 + i, 9, 77, *range(20 - 12 * i)] for i in who]
            found += zip(texts, pool.map(run, who, texts), strict=True)
    for device in devices:
        assert device.num_compiles_after_warm_up == 0
    for text, logits in found:
        want = models.reference_forward(params, config, np.array(text))[-1]
        np.testing.assert_allclose(logits, want, rtol=2e-4, atol=2e-4)


def check_replicas(name: str, num_devices: int) -> None:
    """Checks engines that share experts: answers, memory, and a failure that is of one engine."""
    import asyncio
    import functools

    from helpers.serve.live_server import eventually
    from jax_attn.serve import _options, _sizing
    from jax_attn.serve._engine.engine import Engine
    from jax_attn.serve._engine.engine_config import EngineConfig
    from jax_attn.serve._scheduling.request import SamplingParams, Sequence

    tokenizer = models.load(models.BUNDLED, "float32").tokenizer
    raw = {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": 0}
    config = config_of(name, **raw)
    params = models.random_params(config, jax.random.key(0), "float32")
    model = models.Model(config, params, tokenizer)
    prompts = [[5 + i, 9, 200, 31, *[7] * (3 * i), 12, 90] for i in range(5)]
    greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    numbers = iter(range(1000))

    def sequence(prompt, sampling=greedy):
        number = str(next(numbers))
        return Sequence(number, number, list(prompt), sampling)

    limits = EngineConfig(num_pages=40, page_size=4, max_running=3, max_step_tokens=8)
    alone = Engine(model, limits)
    alone.warm_up()
    expected = []
    for prompt in prompts:
        alone.submit([sequence(prompt)])
        tokens = []
        while alone.has_work:
            tokens += [token for event in alone.step() for token in event.tokens]
        expected.append(tokens)
    options = f"--data-parallel {num_devices} --expert-parallel --num-pages 40 --page-size 4"
    options += " --max-running 3 --max-step-tokens 8 --dtype float32"
    options += " --host-cache-bytes 1000000"
    args = _options.parse(options.split())
    replicas = _sizing.make_replicas(model, args)
    engines = [each._engine for each in replicas._engines]
    everything = sum(x.nbytes for x in jax.tree.leaves(params))
    of_experts = sum(
        x.nbytes
        for path, x in jax.tree_util.tree_leaves_with_path(params)
        if path[-1].key.startswith(("expert_gate_up", "expert_down"))
    )
    for engine in engines:
        ((device, held),) = engine.device.bytes_held().items()
        cache = sum(x.nbytes for x in jax.tree.leaves(engine.device.cache))
        assert held - cache == everything - of_experts + of_experts // num_devices
        assert device == engine.config.devices[0].id

    async def answer(prompt, sampling=greedy):
        events = [event async for event in replicas.generate([sequence(prompt, sampling)])]
        return [token for event in events for token in event.tokens], events[-1]

    async def run():
        replicas.start()
        await asyncio.to_thread(eventually, lambda: replicas.ready or replicas.failure)
        assert replicas.failure is None, replicas.failure
        answers = await asyncio.gather(*map(answer, prompts))
        assert [tokens for tokens, _ in answers] == expected
        assert all(each.stats()["prompt_tokens"] for each in replicas._engines[:2])
        # One engine alone: the others are at rest, and their devices compute experts for it.
        assert (await answer(prompts[0]))[0] == expected[0]
        assert all(each.device.num_compiles_after_warm_up == 0 for each in engines)
        await check_a_failure()
        await check_one_that_gives_up()
        await replicas.stop(drain=True)

    async def check_a_failure():
        """A step that cannot be launched ends the requests that are in it. All engines go on."""
        group = engines[0].config.expert_group
        launch, failed = group._launch, []

        @functools.wraps(launch)
        def fail(bucket, batches):
            if failed:
                return launch(bucket, batches)
            failed.append([*batches])
            for device in group._of:
                jax.tree.map(lambda x: x.delete(), device.cache)
            raise RuntimeError("no")

        group._launch = fail
        _, event = await answer([3, 4, 5])
        assert event.error == "The engine failed: RuntimeError.", event
        assert len(failed) == 1 and len(failed[0]) == 1
        lost = [i for i, engine in enumerate(engines) if engine.device.has_lost_cache]
        assert lost == [i for i in range(num_devices) if i not in failed[0]]
        # An engine that has lost its cache computes prompts again. No request of its own ends.
        answers = await asyncio.gather(*map(answer, prompts))
        assert [tokens for tokens, _ in answers] == expected
        group._launch = launch

    async def check_one_that_gives_up():
        """Its last step takes the caches with it, and it does not recover. Others go on."""
        group = engines[0].config.expert_group
        launch = group._launch

        def fail(bucket, batches):
            if 0 not in batches:
                return launch(bucket, batches)
            for device in group._of:
                jax.tree.map(lambda x: x.delete(), device.cache)
            raise RuntimeError("no")

        group._launch = fail
        first = replicas._engines[0]
        for number in range(3):
            events = [x async for x in first.generate([sequence(prompts[0])])]
            assert "The engine failed" in events[-1].error
            if number == 2:
                await asyncio.to_thread(first.join)
            events = [x async for x in replicas._engines[1].generate([sequence(prompts[1])])]
            assert [token for event in events for token in event.tokens] == expected[1]
        answers = await asyncio.gather(*map(answer, prompts))
        assert [tokens for tokens, _ in answers] == expected

    asyncio.run(run())
