"""Many calls at once: no deadlock with a thread pool of any size, and the bits of a single call."""

import os
import subprocess
import sys
import textwrap
import threading

import jax
import numpy as np
import pytest

import jax_attn as ja
from helpers.attention_cases import Case, build
from helpers.backends import on_every_platform
from helpers.checking import assert_same_bits

# Independent calls in one jit: XLA runs them on its pool, and their threads share work through the
# same pool. Attention calls take turns with their workspace, so they run one by one. Merges have
# none and run on all threads at once, beside the attention.
MANY_CALLS = textwrap.dedent(
    """
    import sys
    import jax, jax.numpy as jnp, numpy as np
    import jax_attn as ja

    spec = ja.AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim_qk=64, dtype="float32",
                            max_batch=4, max_qo_tokens=40, max_kv_pages=200, target="cpu",
                            schedule="fixed_split", kv_split=256)
    qo_indptr, kv_lens, page_indptr = [0, 1, 34, 35], [1500, 60, 300], [0, 94, 98, 117]
    plan = ja.plan(spec, qo_indptr, kv_lens, page_indptr, np.arange(117))
    assert len(plan.merge_groups()) > 0
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(40, 4, 64)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(120, 16, 2, 64)), jnp.float32) for _ in "kv")

    def one(q, k, v, plan):
        o, lse = ja.attention(q, k, v, plan, return_lse=True)
        return ja.merge_state(o, lse, o, lse)

    def many(qs, k, v, plan, o, lses):
        merged = [ja.merge_states(o, lse) for lse in lses]
        return merged, [one(q, k, v, plan) for q in qs]

    many, single, merge = jax.jit(many), jax.jit(one), jax.jit(ja.merge_states)
    o = jnp.asarray(rng.normal(size=(2, 2048, 1, 64)), jnp.float32)
    lses = [jnp.asarray(rng.normal(size=(2, 2048, 1)), jnp.float32) for _ in range(64)]
    want = [merge(o, lse) for lse in lses]
    qs = [q * i for i in range(1, 65)]
    want = want, [single(q, k, v, plan) for q in qs]
    for _ in range(10):
        got = many(qs, k, v, plan, o, lses)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
            np.testing.assert_array_equal(a, b)

    def append(k, v, new, plan):
        return ja.append_kv(k, v, new, new, plan)

    many_appends = jax.jit(lambda k, v, new, plan: [append(k, v, new * i, plan) for i in range(32)])
    new = jnp.asarray(rng.normal(size=(40, 2, 64)), jnp.float32)
    for _ in range(3):
        pools = many_appends(k, v, new, plan)
        for i in (0, 1, 31):
            for a, b in zip(pools[i], append(k, v, new * i, plan)):
                np.testing.assert_array_equal(a, b)
    print("done")
    """
)


def run_python(code, timeout, **env):
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"JAX_PLATFORMS": "cpu"} | env,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        pytest.fail(f"hangs: nothing after {timeout} s")
    assert done.returncode == 0 and done.stdout.strip().endswith("done"), done.stderr[-4000:]


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_many_independent_calls_in_one_jit(threads):
    run_python(MANY_CALLS, timeout=240, PJRT_NPROC=str(threads), NPROC=str(threads))


@on_every_platform
def test_calls_from_many_python_threads(backend):
    """One executable, one plan, several callers: calls share no state."""
    cases = [
        Case("", kv_lens=tuple(n + 7 * i for n in (33, 0, 500)), qo_lens=(1, 0, 40))
        for i in range(4)
    ]
    work = []
    for case in cases:
        batch = build(case)
        plan = ja.plan(backend.spec(**case.spec_fields()), **batch.lengths.plan_arguments())
        work.append((batch.q, batch.k, batch.v, plan))
    attend = jax.jit(lambda *arguments: ja.attention(*arguments, return_lse=True))
    want = [jax.tree.map(np.asarray, attend(*arguments)) for arguments in work]
    errors = []

    def call(i):
        try:
            with jax.default_device(backend.device):
                for _ in range(20):
                    for name, a, b in zip(("o", "lse"), attend(*work[i]), want[i], strict=True):
                        assert_same_bits(name, a, b)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(i % 4,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=240)
        assert not thread.is_alive(), "hangs"
    assert not errors, errors[0]


def test_plans_made_in_many_threads_are_the_plans_made_in_one():
    spec = ja.AttentionSpec(
        8, 2, 64, max_batch=64, max_qo_tokens=64, max_kv_pages=4096, target="cpu"
    )
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(8):
        kv_lens = rng.integers(1, 1000, 64)
        page_indptr = np.concatenate([[0], np.cumsum(-(-kv_lens // 16))])
        batches.append((np.arange(65), kv_lens, page_indptr, rng.permutation(4096)))
    want = [ja.plan(spec, *batch).buffer for batch in batches]
    errors = []

    def make(i):
        for _ in range(50):
            if not np.array_equal(ja.plan(spec, *batches[i]).buffer, want[i]):
                errors.append(i)

    threads = [threading.Thread(target=make, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
