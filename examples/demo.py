"""Continuous batching with jax_attn: a dozen requests of very different lengths, one compiled step.

    make demo      or      python examples/demo.py --temperature 0.8 --max-new-tokens 200

A step processes tokens of the running requests that are not in the cache yet: one token of a
request that decodes, a chunk of a prompt. All of them share one call of attention per layer.
Requests arrive while others run, and reuse the pages of a prefix that another has computed.

At the end `models.reference_forward` recomputes the logits (dense attention, one sequence at a
time). The exit code is 1 if they differ by more than the tolerance, or if anything was compiled
after the warm-up.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import shutil
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np

import jax_attn as ja
from jax_attn import models

HERE = Path(__file__).resolve().parent

# (file in examples/prompts, number of its first lines, step of arrival)
PROMPTS = [
    ("unittest_loader", 63, 0),
    ("wsgiref_util", 3, 0),
    ("plistlib", 180, 0),
    ("tkinter_colorchooser", 17, 0),
    ("ast", 56, 0),
    ("email_parser", 41, 0),
    ("importlib_abc", 28, 8),
    ("unittest_loader", 97, 16),
    ("unittest_loader", 121, 16),
    ("plistlib", 77, 24),
    ("ast", 115, 32),
    ("email_parser", 56, 40),
    ("importlib_abc", 113, 48),
    ("wsgiref_util", 38, 56),
]

# Largest difference of any logit from the reference path, which runs in the same dtype. Logits
# reach about 20, where neighbouring bf16 numbers are 0.125 apart.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}


# ---- requests and pages ------------------------------------------------------------------------


@dataclasses.dataclass
class Request:
    name: str
    tokens: list[int]  # the prompt, then what was generated
    num_prompt: int
    arrival: int  # step
    pages: list[int] = dataclasses.field(default_factory=list)
    kv_len: int = 0  # tokens in the cache
    num_reused: int = 0  # tokens of these that another request had computed
    logits: list[np.ndarray] = dataclasses.field(default_factory=list)  # a row per generated token
    done: bool = False

    @property
    def num_pending(self) -> int:
        """Tokens that are not in the cache yet; 1 while decoding."""
        return len(self.tokens) - self.kv_len

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class PagePool:
    """Pages of the KV cache: a free list, users per page, and full pages indexed by prefix."""

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages, self.page_size = num_pages, page_size
        self.peak_used = 0
        self._free = list(range(num_pages))
        self._num_users = [0] * num_pages
        self._page_of: dict[bytes, int] = {}  # all tokens up to the end of the page -> page
        self._prefix_of: dict[int, bytes] = {}  # and back

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def admit(self, request: Request, max_len: int) -> bool:
        """Allocates all pages that `request` can need, or none if too few are free."""
        reused = []
        # The last token of a prompt is always computed, because its logits are needed.
        for idx in range((request.num_prompt - 1) // self.page_size):
            page = self._page_of.get(self._prefix(request, idx))
            if page is None:
                break
            reused.append(page)
        num_new = -(-max_len // self.page_size) - len(reused)
        if num_new > len(self._free):
            return False
        request.pages = reused + [self._free.pop() for _ in range(num_new)]
        for page in request.pages:
            self._num_users[page] += 1
        request.kv_len = request.num_reused = len(reused) * self.page_size
        self.peak_used = max(self.peak_used, self.num_used)
        return True

    def publish(self, request: Request) -> None:
        """Offers the full pages of a prompt, which are written now, to later requests."""
        for idx in range(request.num_prompt // self.page_size):
            page, prefix = request.pages[idx], self._prefix(request, idx)
            if prefix not in self._page_of:
                self._page_of[prefix], self._prefix_of[page] = page, prefix

    def release(self, request: Request) -> None:
        for page in request.pages:
            self._num_users[page] -= 1
            if not self._num_users[page]:
                self._page_of.pop(self._prefix_of.pop(page, b""), None)
                self._free.append(page)
        request.pages = []

    def _prefix(self, request: Request, idx: int) -> bytes:
        return np.array(request.tokens[: (idx + 1) * self.page_size], np.int32).tobytes()


def read_requests(model: models.Model, max_new_tokens: int) -> list[Request]:
    requests = []
    for name, num_lines, arrival in PROMPTS:
        lines = (HERE / "prompts" / f"{name}.py.txt").read_text(encoding="utf-8").split("\n")
        text = "\n".join(lines[:num_lines])
        tokens = model.tokenizer.encode(text, add_special_tokens=False).ids
        if model.config.bos_token is not None:
            tokens = [model.config.bos_token, *tokens]
        if len(tokens) + max_new_tokens > model.config.max_positions:
            sys.exit(
                f"demo: {name}: {len(tokens)} prompt tokens and --max-new-tokens {max_new_tokens} "
                f"outgrow the model's {model.config.max_positions} positions"
            )
        requests.append(Request(f"{name}:{num_lines}", tokens, len(tokens), arrival))
    return requests


# ---- the step ----------------------------------------------------------------------------------


class Engine:
    """The model, its cache, and one step of any batch."""

    def __init__(self, model: models.Model, args: argparse.Namespace, dtype: str):
        config = model.config
        self.config, self.params = config, model.params
        self.max_new_tokens = args.max_new_tokens
        # The step has two sizes, so that decodes alone do not pay for the padding of a chunk. Each
        # size has a spec per kind of layer: some models use a window in every other layer.
        self.sizes = [args.max_batch, args.max_batch + args.chunk]  # max_qo_tokens
        self.max_batch, self.page_size = args.max_batch, args.page_size
        self.specs = {
            max_qo_tokens: models.attention_specs(
                config,
                dtype=dtype,
                page_size=args.page_size,
                max_batch=args.max_batch,
                max_qo_tokens=max_qo_tokens,
                max_kv_pages=args.max_batch * -(-config.max_positions // args.page_size),
            )
            for max_qo_tokens in self.sizes
        }
        specs = self.specs[self.sizes[0]]
        self.k_pages, self.v_pages = models.init_pages(config, specs, args.num_pages)
        self.plan_seconds: list[float] = []
        self.step_seconds: list[tuple[int, float]] = []  # max_qo_tokens, seconds

        def step(params, tokens, positions, k_pages, v_pages, plans, logit_rows, step_idx):
            logits, k_pages, v_pages = models.forward(
                params, config, tokens, positions, k_pages, v_pages, plans, logit_rows
            )
            sampled = jnp.argmax(logits, axis=-1)
            if args.temperature > 0:
                key = jax.random.fold_in(jax.random.key(args.seed), step_idx)
                sampled = jax.random.categorical(key, logits / args.temperature)
            return sampled, logits, k_pages, v_pages

        self._step = jax.jit(step, donate_argnames=("k_pages", "v_pages"))
        for size in self.sizes:  # an empty batch is legal and compiles everything
            self._run([], size)
        self.plan_seconds, self.step_seconds = [], []

    def run(self, batch: list[tuple[Request, int]]) -> None:
        """Runs the next n pending tokens of each (request, n) through the model.

        A request with no pending tokens left gets a new token.
        """
        num_tokens = sum(n for _, n in batch)
        size = next(size for size in self.sizes if num_tokens <= size)
        sampled, logits = self._run(batch, size)
        for row, (request, n) in enumerate(batch):
            request.kv_len += n
            if request.num_pending:
                continue
            token = int(sampled[row])
            request.tokens.append(token)
            request.logits.append(logits[row])
            request.done = (
                token in self.config.eos_tokens or len(request.generated) == self.max_new_tokens
            )

    def _run(self, batch: list[tuple[Request, int]], size: int):
        """Returns sampled [max_batch], logits [max_batch, vocab_size]; rows past the batch are
        undefined."""
        tokens, logit_rows = np.zeros(size, np.int32), np.zeros(self.max_batch, np.int32)
        qo_lens = np.array([n for _, n in batch], np.int32)
        kv_lens = np.array([request.kv_len + n for request, n in batch], np.int32)
        num_pages = -(-kv_lens // self.page_size)
        page_indices = [
            page for (r, _), n in zip(batch, num_pages, strict=True) for page in r.pages[:n]
        ]
        qo_indptr, page_indptr = (np.append(0, np.cumsum(x)) for x in (qo_lens, num_pages))
        new = [r.tokens[r.kv_len : r.kv_len + n] for r, n in batch]
        tokens[: qo_indptr[-1]] = list(itertools.chain.from_iterable(new))
        _, positions, logit_rows[: len(batch)] = ja.rows(qo_indptr, kv_lens, size)

        begin = time.perf_counter()
        lengths_and_pages = (qo_indptr, kv_lens, page_indptr, np.array(page_indices, np.int32))
        plans = tuple(ja.plan(spec, *lengths_and_pages) for spec in self.specs[size])
        planned = time.perf_counter()
        sampled, logits, self.k_pages, self.v_pages = self._step(
            self.params,
            tokens,
            positions,
            self.k_pages,
            self.v_pages,
            plans,
            logit_rows,
            np.int32(len(self.plan_seconds)),
        )
        sampled, logits = np.asarray(sampled), np.asarray(logits)
        self.plan_seconds.append(planned - begin)
        self.step_seconds.append((size, time.perf_counter() - planned))
        return sampled, logits


def serve(engine: Engine, pool: PagePool, requests: list[Request], screen: Screen) -> None:
    """The main loop: admit, schedule, run, retire."""
    waiting = sorted(requests, key=lambda request: request.arrival)
    running: list[Request] = []
    max_batch, max_tokens = engine.max_batch, engine.sizes[-1]
    for step_idx in itertools.count():
        while waiting and waiting[0].arrival <= step_idx and len(running) < max_batch:
            if not pool.admit(waiting[0], waiting[0].num_prompt + engine.max_new_tokens):
                break  # wait until others free their pages
            running.append(waiting.pop(0))

        batch, budget = [], max_tokens
        for request in sorted(running, key=lambda request: request.num_pending > 1):  # decode first
            if n := min(request.num_pending, budget):
                batch.append((request, n))
                budget -= n
        engine.run(batch)

        for request, _ in batch:
            if len(request.generated) == 1:
                pool.publish(request)
            if request.done:
                pool.release(request)
                running.remove(request)
                screen.show_text(request)
        screen.show_progress(step_idx, running, waiting)
        if not (running or waiting):
            return


# ---- the terminal ------------------------------------------------------------------------------


class Screen:
    """Prints finished texts and, below them on a terminal, the running requests.

    Without a terminal, it prints a line of progress every hundred steps.
    """

    def __init__(self, requests: list[Request], tokenizer, pool: PagePool):
        self.requests, self.tokenizer, self.pool = requests, tokenizer, pool
        self.live = sys.stdout.isatty()
        self.begin = self.last_drawn = time.perf_counter()
        self._num_lines = 0

    def show_text(self, request: Request) -> None:
        """Prints the end of the prompt, dim, and the generated text."""
        self.clear()
        prompt = self.tokenizer.decode(request.tokens[: request.num_prompt])
        tail = "\n".join(prompt.split("\n")[-3:])
        text = self.tokenizer.decode(request.generated)
        reused = f", {request.num_reused} of them reused" if request.num_reused else ""
        print(
            self._style(
                "1;36",
                f"== {request.name}: {request.num_prompt} prompt tokens{reused}; "
                f"{len(request.generated)} generated",
            )
        )
        print(self._style("2", tail) + text + "\n")

    def show_progress(self, step_idx: int, running: list[Request], waiting: list[Request]) -> None:
        now = time.perf_counter()
        if not self.live:
            if step_idx % 100 == 99:
                print(self._progress(step_idx, running, waiting), flush=True)
            return
        if now - self.last_drawn < 0.05:
            return
        self.last_drawn = now
        self.clear()
        width, height = shutil.get_terminal_size()
        lines = [self._progress(step_idx, running, waiting)]
        lines += [self._row(request, width) for request in running][: height - 3]
        print("\n".join(line[: width - 1] for line in lines), flush=True)
        self._num_lines = len(lines)

    def clear(self) -> None:
        if self._num_lines:
            print(f"\x1b[{self._num_lines}F\x1b[J", end="")  # up, and erase what is below
            self._num_lines = 0

    def _progress(self, step_idx: int, running: list[Request], waiting: list[Request]) -> str:
        num_generated = sum(len(request.generated) for request in self.requests)
        rate = num_generated / (time.perf_counter() - self.begin)
        arrived = sum(request.arrival <= step_idx for request in waiting)
        num_done = sum(request.done for request in self.requests)
        return (
            f"-- step {step_idx + 1}: {num_done} done, {len(running)} running, {arrived} waiting | "
            f"{num_generated} tokens, {rate:.0f}/s | "
            f"pages {self.pool.num_used}/{self.pool.num_pages}"
        )

    def _row(self, request: Request, width: int) -> str:
        name = f"{request.name:>24} "
        if not request.generated:
            filled = 20 * request.kv_len // request.num_prompt
            return f"{name}[{'#' * filled:<20}] {request.kv_len}/{request.num_prompt} of the prompt"
        text = self.tokenizer.decode(request.generated[-60:])
        return name + " ".join(text.split())[-(width - len(name) - 1) :]

    def _style(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.live else text


# ---- afterwards --------------------------------------------------------------------------------


def largest_difference(model: models.Model, requests: list[Request]) -> float:
    """Returns the largest difference between the sampled-from and the reference logits."""
    reference = jax.jit(models.reference_forward, static_argnames="config")
    largest = 0.0
    for request in requests:
        # Padding to powers of two saves compilations; tokens do not see the padding behind them.
        padded = np.zeros(1 << (len(request.tokens) - 1).bit_length(), np.int32)
        padded[: len(request.tokens)] = request.tokens
        expected = reference(model.params, model.config, padded)
        expected = np.asarray(expected)[request.num_prompt - 1 : len(request.tokens) - 1]
        largest = max(largest, float(np.abs(expected - np.stack(request.logits)).max()))
    return largest


def print_summary(engine: Engine, pool: PagePool, requests: list[Request], seconds: float) -> None:
    num_steps = len(engine.plan_seconds)
    if not num_steps:
        return
    num_generated = sum(len(request.generated) for request in requests)
    num_reused = sum(request.num_reused for request in requests)
    num_read = sum(min(request.kv_len, request.num_prompt) for request in requests) - num_reused
    rest = seconds - sum(engine.plan_seconds) - sum(s for _, s in engine.step_seconds)
    print(
        f"requests   {sum(request.done for request in requests)} of {len(requests)} finished\n"
        f"tokens     {num_generated} generated and {num_read} of prompts read in {seconds:.2f} s: "
        f"{num_generated / seconds:.0f} and {num_read / seconds:.0f} tokens/s; "
        f"{num_reused} prompt tokens reused\n"
        f"per step   plan {1e6 * statistics.median(engine.plan_seconds):.0f} us (median)"
    )
    for size, kind in zip(engine.sizes, ("decode only", "with prompt chunks"), strict=True):
        times = [seconds for n, seconds in engine.step_seconds if n == size]
        if times:
            print(
                f"           step {1e3 * statistics.median(times):.2f} ms (median), {kind}: "
                f"{len(times)} steps of {size} rows"
            )
    print(
        f"           rest {1e6 * rest / num_steps:.0f} us (mean): scheduling, texts, terminal\n"
        f"pages      {pool.peak_used} of {pool.num_pages} used at most, {pool.page_size} tokens "
        f"each; {pool.num_used} in use now"
    )


def count_compilations() -> list[str]:
    """Returns a list to which every later XLA compilation adds an entry."""
    compilations: list[str] = []

    def listen(event: str, duration: float, **kwargs) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compilations.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return compilations


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model_dir = models.BUNDLED
    parser.add_argument("--model", type=Path, default=model_dir, help="a Hugging Face directory")
    parser.add_argument("--dtype", choices=TOLERANCE, help="default: float32 on a CPU")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="per request")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: always the likeliest")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-batch", type=int, default=8, help="requests that run at once")
    parser.add_argument("--chunk", type=int, default=120, help="prompt tokens a step, at least")
    parser.add_argument("--num-pages", type=int, default=320)
    parser.add_argument("--page-size", type=int, default=16, help="tokens")
    parser.add_argument("--check", type=int, default=14, help="requests to check by the reference")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    dtype = args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    try:
        model = models.load(args.model, dtype)
    except models.ModelDirectoryError as error:
        sys.exit(f"demo: {error}")
    requests = read_requests(model, args.max_new_tokens)
    pool = PagePool(args.num_pages, args.page_size)
    num_needed = max(-(-(r.num_prompt + args.max_new_tokens) // args.page_size) for r in requests)
    if num_needed > args.num_pages:
        sys.exit(f"demo: --num-pages: expected at least {num_needed}, got {args.num_pages}")

    print(f"{args.model.name} in {dtype} on {jax.devices()[0].device_kind}", flush=True)
    begin = time.perf_counter()
    engine = Engine(model, args, dtype)
    print(f"compiled in {time.perf_counter() - begin:.1f} s\n", flush=True)
    compilations = count_compilations()
    screen = Screen(requests, model.tokenizer, pool)
    begin = time.perf_counter()
    interrupted = False
    try:
        serve(engine, pool, requests, screen)
    except KeyboardInterrupt:
        interrupted = True
    seconds = time.perf_counter() - begin
    num_compilations = len(compilations)
    screen.clear()
    if interrupted:
        print("interrupted; unfinished so far:\n")
        for request in requests:
            pool.release(request)
            if request.generated and not request.done:
                screen.show_text(request)
    print_summary(engine, pool, requests, seconds)
    if interrupted:
        return 130

    print(f"compiled   {num_compilations} times after the warm-up", flush=True)
    checked = requests[: args.check]
    difference = largest_difference(model, checked)
    num_rows = sum(len(request.generated) for request in checked)
    print(
        f"logits     {num_rows} rows of {len(checked)} requests: at most {difference:.1e} off the "
        f"reference path (tolerance {TOLERANCE[dtype]:g})"
    )
    passed = num_compilations == 0 and difference <= TOLERANCE[dtype] and pool.num_used == 0
    if not passed:
        print("FAILED: expected no compilation, no page in use, and logits within the tolerance")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
