"""Time per token of generation: one executable that plans inside, compared with a Python loop.

    python -m benchmarks.bench_generate                      -> a table; --out FILE: JSON too
    python -m benchmarks.bench_generate --tiny --steps 8     tries the script on any machine

The model has a known shape and random weights. Sampling is greedy, and pages of 16 come from a free
list. Every request starts with `--context` tokens of zeros and ends with the last step.

A row is the time of a step: one token of every request.

  python        a step is two jitted calls; the host plans, and reads the tokens before the next
  python-ahead  the same, but the host does not look at the tokens: no stop condition
  while         lax.while_loop with ja.plan of traced arrays and a stop condition on the tokens
  while-node    the same with WHILE among XLA's command-buffer commands, graphs of any size

`handler_runs` counts how often the handlers' host code ran in the timed call; 0 means a replayed
graph. To see what XLA converts, set TF_CPP_VMODULE=command_buffer_conversion_pass=2.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja
from benchmarks import report, shapes
from benchmarks.report import Ceilings, Row, log
from jax_attn import _core, models

PAGE_SIZE = 16
COMMANDS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
FORMS: dict[str, dict[str, Any]] = {
    "python": {},
    "python-ahead": {},
    "while": {},
    "while-node": {
        "xla_gpu_enable_command_buffer": COMMANDS,
        "xla_gpu_graph_min_graph_size": 1,
    },
}


class Loop:
    """One batch. A state: token, kv_lens, pages, free, num_free, count, k_pages, v_pages."""

    def __init__(self, model: models.Model, batch_size: int, context: int, num_steps: int) -> None:
        self.model, self.batch_size, self.context = model, batch_size, context
        self.num_steps = num_steps
        self.pages_each = -(-(context + num_steps) // PAGE_SIZE)
        self.num_pages = batch_size * self.pages_each
        self.specs = models.attention_specs(
            model.config,
            dtype=str(jax.tree.leaves(model.params)[0].dtype),
            page_size=PAGE_SIZE,
            num_pages=self.num_pages,
            max_batch=batch_size,
            max_qo_tokens=batch_size,
            max_kv_pages=self.num_pages,
            share_prefixes=False,
        )

    def start(self) -> dict[str, Any]:
        own = -(-self.context // PAGE_SIZE)
        ids = np.random.default_rng(0).permutation(self.num_pages).astype(np.int32)
        pages = np.zeros((self.batch_size, self.pages_each), np.int32)
        pages[:, :own] = ids[: self.batch_size * own].reshape(self.batch_size, own)
        free = np.zeros(self.num_pages, np.int32)
        num_free = self.num_pages - self.batch_size * own
        free[:num_free] = ids[self.batch_size * own :]
        k_pages, v_pages = models.init_pages(self.model.config, self.specs, self.num_pages)
        return {
            "token": jnp.arange(self.batch_size, dtype=jnp.int32),
            "kv_lens": jnp.full(self.batch_size, self.context, jnp.int32),
            "pages": jnp.asarray(pages),
            "free": jnp.asarray(free),
            "num_free": jnp.int32(num_free),
            "count": jnp.int32(0),
            "k_pages": k_pages,
            "v_pages": v_pages,
        }

    def begin(self, s: dict[str, Any]) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """Allocates the step's pages and returns the arguments of ja.plan."""
        full = s["kv_lens"] % PAGE_SIZE == 0
        rows = jnp.where(full, jnp.arange(self.batch_size), self.batch_size)
        page = s["free"][s["num_free"] - jnp.cumsum(full)]
        pages = s["pages"].at[rows, s["kv_lens"] // PAGE_SIZE].set(page, mode="drop")
        s = s | {"pages": pages, "num_free": s["num_free"] - full.sum(dtype=jnp.int32)}
        s = s | {"kv_lens": s["kv_lens"] + 1, "count": s["count"] + 1}
        indptr = jnp.arange(self.batch_size + 1, dtype=jnp.int32)
        return s, (indptr, s["kv_lens"], indptr * self.pages_each, pages.reshape(-1))

    def finish(self, params: Any, s: dict[str, Any], plans: Any) -> dict[str, Any]:
        rows = jnp.arange(self.batch_size)
        logits, k_pages, v_pages = models.forward(
            params, self.model.config, s["token"], s["kv_lens"] - 1, s["k_pages"], s["v_pages"],
            plans, rows,
        )  # fmt: skip
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return s | {"token": token, "k_pages": k_pages, "v_pages": v_pages}

    def plans(self, lengths: tuple[Any, ...]) -> tuple[ja.AttentionPlan, ...]:
        return tuple(ja.plan(spec, *lengths) for spec in self.specs)

    def in_one_call(self, options: dict[str, Any]) -> Any:
        def unfinished(s: dict[str, Any]) -> Any:
            # A data-dependent stop condition that is never met: token ids are not negative.
            return (s["count"] < self.num_steps) & (s["token"] >= 0).any()

        @functools.partial(jax.jit, donate_argnums=1, compiler_options=options or None)
        def generate(params: Any, s: dict[str, Any]) -> Any:
            def step(s: dict[str, Any]) -> dict[str, Any]:
                s, lengths = self.begin(s)
                return self.finish(params, s, self.plans(lengths))

            return jax.lax.while_loop(unfinished, step, s)

        return lambda s: generate(self.model.params, s)

    def from_python(self, reads_tokens: bool) -> Any:
        """Runs steps from Python. The host has the page tables and plans while the device works."""
        begin = jax.jit(self.begin, donate_argnums=0)
        finish = jax.jit(self.finish, donate_argnums=1)
        order = np.arange(self.batch_size + 1, dtype=np.int32)

        def generate(s: dict[str, Any]) -> Any:
            for count in range(self.num_steps):
                s, lengths = begin(s)
                # The host needs only the page ids, and has them without asking the device.
                kv_lens = np.full(self.batch_size, self.context + count + 1, np.int32)
                tables = self.tables[count]
                plans = self.plans((order, kv_lens, order * self.pages_each, tables))
                s = finish(self.model.params, s, plans)
                if reads_tokens and (np.asarray(s["token"]) < 0).all():
                    break
            return s

        return generate

    @functools.cached_property
    def tables(self) -> list[np.ndarray]:
        """The page table of every step, as an engine's host would keep it."""
        s = {name: x for name, x in self.start().items() if name not in ("k_pages", "v_pages")}
        begin, tables = jax.jit(self.begin), []
        for _ in range(self.num_steps):
            s, lengths = begin(s)
            tables.append(np.asarray(lengths[3]))
        return tables


def handler_runs() -> dict[str, int]:
    stats = _core.jit_stats()
    return {name: int(stats[f"{name}_launches"]) for name in ("plan", "append", "attention")}


def measure(loop: Loop, form: str, repeats: int) -> tuple[Row, np.ndarray]:
    if form.startswith("python"):
        generate = loop.from_python(reads_tokens=form == "python")
        loop.tables  # noqa: B018, made before anything is timed
    else:
        generate = loop.in_one_call(FORMS[form] if jax.default_backend() == "gpu" else {})
    times, runs = [], {}
    for _ in range(2 + repeats):
        state = jax.block_until_ready(loop.start())
        before = handler_runs()
        begin = time.perf_counter()
        state = jax.block_until_ready(generate(state))
        times.append(1e6 * (time.perf_counter() - begin) / loop.num_steps)
        runs = {name: n - before[name] for name, n in handler_runs().items()}
    row = Row(f"generate/{form}", statistics.median(times[2:]), more={"handler_runs": runs})
    return row, np.asarray(state["token"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=shapes.SHAPES, default="qwen3-0.6b")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--tiny", action="store_true", help="a small model on any machine")
    parser.add_argument("--out", type=Path, default=None)
    a = parser.parse_args()
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    model = shapes.make_model(a.shape, a.tiny, dtype)
    batch_size, context = (4, 20) if a.tiny else (a.batch, a.context)
    loop = Loop(model, batch_size, context, a.steps)
    rows, tokens = [], {}
    for form in a.forms.split(","):
        row, tokens[form] = measure(loop, form, a.repeats)
        row.workload += f"/{a.shape}/{batch_size}x{context}"
        rows.append(row)
        log(f"{row.workload}: {row.median_us:.1f} us a step, {row.more}")
    first, *others = tokens.values()
    if not all((other == first).all() for other in others):
        raise SystemExit("FAILED: the forms end with different tokens")
    if a.out is not None:
        report.write(a.out, rows, Ceilings(1.0, 1.0))


if __name__ == "__main__":
    main()
