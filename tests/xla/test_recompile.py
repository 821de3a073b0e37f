"""New lengths and page tables are data: one compilation serves every batch of a spec."""

import contextlib

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np

import jax_attn as ja
from helpers.attention_cases import SCHEDULES
from helpers.backends import on_every_platform


@contextlib.contextmanager
def count_compilations():
    events = []

    def listen(event, _duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    # No public function removes a listener; it only appends to its own list.


def random_batch(rng, spec):
    """Random lengths from nothing to the capacities; qo_len <= kv_len, as append needs."""
    batch_size = int(rng.integers(0, spec.max_batch + 1))
    max_pages = spec.max_kv_pages // max(batch_size, 1)
    max_qo_len = spec.max_qo_tokens // max(batch_size, 1)
    num_pages = rng.integers(0, max_pages + 1, batch_size)
    kv_lens = np.maximum(num_pages * spec.page_size - rng.integers(0, 3, batch_size), 0)
    qo_lens = np.minimum(rng.integers(0, max_qo_len + 1, batch_size), kv_lens)
    qo_indptr, page_indptr = (np.concatenate([[0], np.cumsum(x)]) for x in (qo_lens, num_pages))
    arrays = qo_indptr, kv_lens, page_indptr, rng.permutation(100)[: page_indptr[-1]]
    return tuple(x.astype(np.int32) for x in arrays)


@on_every_platform
def test_new_lengths_never_recompile(backend):
    rng = np.random.default_rng(0)
    for schedule, split in SCHEDULES:
        spec = backend.spec(
            num_qo_heads=4,
            num_kv_heads=2,
            head_dim_qk=64,
            dtype="float32",
            page_size=4,
            max_batch=7,
            max_qo_tokens=40,
            max_kv_pages=90,
            schedule=schedule,
            kv_split=split,
        )
        caches = tuple(jnp.zeros((2, 100, 4, 2, 64)) for _ in "kv")
        q, new = jnp.ones((40, 4, 64)), jnp.ones((40, 2, 64))
        layers = [jnp.int32(0), jnp.int32(1)]

        @jax.jit
        def step(caches, q, new, plan, layer):
            caches = ja.append_kv(*caches, new, new, plan, layer=layer)
            return caches, ja.attention(q, *caches, plan, layer=layer, return_lse=True)

        with count_compilations() as compilations:
            for i in range(25):
                plan = ja.plan(spec, *random_batch(rng, spec))
                caches, (o, _) = step(caches, q, new, plan, layers[i % 2])
                assert np.isfinite(o).all()
        assert step._cache_size() == 1
        assert len(compilations) == 1


@on_every_platform
def test_a_plan_on_the_device_runs_the_executable_of_one_on_the_host(backend):
    spec = backend.spec(
        num_qo_heads=2, num_kv_heads=2, head_dim_qk=64, max_qo_tokens=4, max_kv_pages=4
    )
    q = jnp.ones((4, 2, 64), jnp.bfloat16)
    pages = jnp.ones((4, 16, 2, 64), jnp.bfloat16)
    attend = jax.jit(lambda *arguments: ja.attention(*arguments))  # a cache of its own
    plan = ja.plan(spec, [0, 2], [20], [0, 2], [1, 3])
    on_host = attend(q, pages, pages, plan)
    on_device = attend(q, pages, pages, jax.device_put(plan, backend.device))
    np.testing.assert_array_equal(on_host, on_device)
    assert attend._cache_size() <= 2  # committed arguments may be a second entry, not a third


def test_equal_specs_share_an_executable():
    fields = {"num_qo_heads": 2, "num_kv_heads": 2, "head_dim_qk": 64, "dtype": "float32"}
    fields |= {"max_qo_tokens": 4, "max_kv_pages": 4, "target": "cpu"}
    attend = jax.jit(lambda *arguments: ja.attention(*arguments))  # a cache of its own
    for _ in range(3):
        spec = ja.AttentionSpec(**fields)
        plan = ja.plan(spec, [0, 1], [3], [0, 1], [0])
        attend(jnp.ones((4, 2, 64)), jnp.ones((4, 16, 2, 64)), jnp.ones((4, 16, 2, 64)), plan)
    assert attend._cache_size() == 1
