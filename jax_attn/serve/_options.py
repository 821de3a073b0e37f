"""The command line: options, their defaults, and the configurations of engine and limits."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import NamedTuple

import jax

from jax_attn import models
from jax_attn.serve._engine.engine_config import EngineConfig
from jax_attn.serve._engine.processes import Processes
from jax_attn.serve._http.connection import Connection
from jax_attn.serve._openai.limits import KeyLimits
from jax_attn.serve._scheduling.tenants import TenantLimits

_DRAFTS = 4  # of a draft model: each takes time, and all after a wrong one are useless

# The first names are those of other servers.
KV_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"} | {
    name: name for name in ("int8", "mxfp4", "nvfp4", "int4")
}


class _Steps(NamedTuple):
    """The default capacities of a step."""

    max_running: int
    max_step_tokens: int
    # A step's time grows with its tokens, and sequences that decode wait for it. With chunks of
    # these sizes the 99th percentile between tokens is 1.5 to 2.3 times the median on a CPU, 2.0 to
    # 3.3 times on an H200, in steps full of prompts up to 5.2 and 3.7 times (docs/notes/server.md).
    prefill_chunk: int
    # Used when many sequences wait. A GPU reads a larger chunk in little more time, a CPU does not.
    max_prefill_chunk: int


_ON_CPU, _ON_GPU = _Steps(32, 512, 32, 32), _Steps(256, 2048, 256, 512)
_BATCH_INVARIANT = _Steps(32, 512, 512, 512)  # every step is padded to the largest


def parse(argv: list[str] | None, description: str | None = None) -> argparse.Namespace:
    """Parses options. Exits if they contradict each other. Raises ProcessesError."""
    parser = argparse.ArgumentParser(prog="python -m jax_attn.serve", description=description)
    add = parser.add_argument
    switch = argparse.BooleanOptionalAction
    hub = """Hugging Face directory, or ORG/NAME of the Hub (the bundled model; none with
        --embedding-model)"""
    add("--model", help=hub)
    add("--revision", help="of ORG/NAME: a branch, tag or commit (main)")
    vectors = "likewise, of an embedding model, for /v1/embeddings (none)"
    add("--embedding-model", metavar="MODEL", help=vectors)
    names = "as clients call it; more are aliases (ORG/NAME, or the directory's name)"
    add("--served-model-name", nargs="+", metavar="NAME", help=names)
    longest = "tokens of prompt and output together (what the model can)"
    add("--max-model-len", type=_positive, help=longest)
    add("--dtype", choices=["bfloat16", "float16", "float32"], help="(bfloat16; on CPU float32)")
    cache = "fp8 is float8_e4m3fn: less memory than --dtype (as --dtype)"
    add("--kv-cache-dtype", choices=[*KV_DTYPES], help=cache)
    products = "multiply codes of q with the cache's: int8 on CPUs, fp8 on sm_90; less accurate"
    add("--eight-bit-products", action=switch, default=False, help=products)
    generation = "auto: generation_config.json has the defaults of sampling (%(default)s)"
    add("--generation-config", choices=["auto", "none"], default="auto", help=generation)
    add("--strict", action=switch, default=False, help="refuse unknown fields, not read past them")
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--port", type=_non_negative, default=8000, help="0: any that is free (%(default)s)")
    shown = "a key, which process lists show; may be repeated (see --api-key-file)"
    add("--api-key", action="append", default=[], metavar="KEY", help=shown)
    add("--api-key-file", type=Path, help="a key a line; every route but /health then needs one")
    operators = """keys, likewise, that may also read /metrics and all of /debug/state (without this
        file, all may who use a loopback address or the only key; else nobody)"""
    add("--operator-key-file", type=Path, help=operators)
    origin = "a web page's origin, such as http://localhost:3000, that may use the server, or *"
    add("--allow-origin", action="append", default=[], metavar="ORIGIN", help=origin)
    add("--num-pages", type=_positive, help="of the kv cache (what the device's memory holds)")
    page = "tokens of a page (16; with --context-parallel N, 64 x N)"
    add("--page-size", type=_positive, help=page)
    add("--max-running", type=_positive, help="sequences at once (32; on a GPU 256)")
    add("--max-step-tokens", type=_positive, help="tokens of a step (512; on a GPU 2048)")
    chunk = "of them, about, of prompts beside decodes (32; on a GPU 256)"
    add("--prefill-chunk", type=_positive, help=chunk)
    add("--max-waiting", type=_positive, default=1024, help="queue; then 429 (%(default)s)")
    flight = "in flight of one key, without keys of all; then 429 (--max-waiting + --max-running)"
    add("--max-requests-per-key", type=_positive, help=flight)
    add("--max-choices-per-key", type=_positive, help="their prompts x n, likewise")
    run = "of these, those that run at once; more wait (a fair share)"
    add("--max-running-per-key", type=_positive, help=run)
    prompt = f"tokens of their prompts, x n; then 429 ({KeyLimits.tokens})"
    add("--max-tokens-per-key", type=_positive, help=prompt)
    clients = "then 429; half of them for one address (%(default)s)"
    add("--max-connections", type=_positive, default=Connection.max_connections, help=clients)
    add("--access-log", action=switch, default=True, help="a line of the log for each request")
    add("--prefix-cache", action=switch, default=True, help="share the kv of equal beginnings")
    drafts = """tokens of each sequence guessed from its own text, and verified in one step, where
        steps have room for them (0: none; with --draft-model 4)"""
    add("--max-drafts", type=_non_negative, help=drafts)
    smaller = "likewise, of a smaller model with the same tokens, which guesses them instead (none)"
    add("--draft-model", metavar="MODEL", help=smaller)
    add("--batch-invariant", action=switch, default=False, help="same seed, same bits, any load")
    devices = "devices to split the model over, by heads; each has its share of it (%(default)s)"
    add("--tensor-parallel", type=_positive, default=1, metavar="N", help=devices)
    contexts = """devices to split the slots of each page over, times those of --tensor-parallel,
        for contexts that no device holds (%(default)s)"""
    add("--context-parallel", type=_positive, default=1, metavar="N", help=contexts)
    address = """of process 0, where processes of one server meet; for a mesh of devices of several
        machines, each started with the same options but --process-id (none: one process)"""
    add("--coordinator", metavar="HOST:PORT", help=address)
    add("--num-processes", type=_positive, metavar="N", help="with --coordinator: of the server")
    which = "with --coordinator: 0 to N - 1; 0 speaks HTTP"
    add("--process-id", type=_non_negative, metavar="I", help=which)
    launcher = "several processes; their launcher (Slurm, Open MPI) says which this is"
    add("--distributed", action="store_true", help=launcher)
    wait = "how long processes wait for each other at the start (%(default)s)"
    add("--start-seconds", type=_positive, default=300, help=wait)
    add("--drain-seconds", type=_positive, default=30, help="after SIGTERM (%(default)s)")
    args = parser.parse_args(argv)
    of_one = (args.coordinator, args.num_processes, args.process_id)
    if len({x is None for x in of_one}) > 1 or (args.distributed and args.coordinator):
        parser.error("expected --coordinator, --num-processes and --process-id, or --distributed")
    if args.process_id is not None and args.process_id >= args.num_processes:
        parser.error(
            f"--process-id: expected less than {args.num_processes}, got {args.process_id}"
        )
    if args.model is None and args.embedding_model is None:
        args.model = str(models.BUNDLED)
    if args.model is None:
        _check_alone(args, parser)
    if args.max_drafts is None:
        args.max_drafts = _DRAFTS if args.draft_model else 0
    if args.draft_model and not args.max_drafts:
        parser.error("--draft-model: expected --max-drafts of at least 1, got 0")
    if args.draft_model and (args.distributed or args.coordinator):
        parser.error("--draft-model: expected a server of one process")
    args.processes = None
    if args.distributed or args.coordinator:
        args.processes = Processes(*of_one, args.start_seconds)  # before JAX looks for devices
    on_cpu = jax.default_backend() == "cpu"
    args.dtype = args.dtype or ("float32" if on_cpu else "bfloat16")
    steps = _BATCH_INVARIANT if args.batch_invariant else _ON_CPU if on_cpu else _ON_GPU
    # A step holds a copy of a sequence's page table for each page that its prompt chunk touches.
    args.page_size = args.page_size or (
        16 if args.context_parallel == 1 else 64 * args.context_parallel
    )
    args.max_step_tokens = args.max_step_tokens or steps.max_step_tokens
    args.max_running = args.max_running or min(steps.max_running, args.max_step_tokens)
    args.max_prefill_chunk = args.prefill_chunk or steps.max_prefill_chunk
    args.prefill_chunk = args.prefill_chunk or steps.prefill_chunk
    return args


def _check_alone(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Checks the options of an embedding model that is served alone."""
    for name in ("draft_model", "coordinator", "distributed"):
        if getattr(args, name):
            parser.error(
                f"--{name.replace('_', '-')}: expected --model, got --embedding-model only"
            )
    if len(args.served_model_name or ()) > 1:
        parser.error("--served-model-name: expected one name of --embedding-model without --model")


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    return int(text)


def _non_negative(text: str) -> int:
    if int(text) < 0:
        raise argparse.ArgumentTypeError(f"expected at least 0, got {text}")
    return int(text)


def engine_config(num_pages: int, args: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        num_pages=num_pages,
        page_size=args.page_size,
        kv_dtype=KV_DTYPES.get(args.kv_cache_dtype),
        eight_bit_products=args.eight_bit_products,
        max_running=args.max_running,
        max_step_tokens=args.max_step_tokens,
        prefill_chunk=args.prefill_chunk,
        max_prefill_chunk=args.max_prefill_chunk,
        max_waiting=args.max_waiting,
        tenant_limits=TenantLimits(max_running=args.max_running_per_key),
        prefix_cache=args.prefix_cache,
        max_drafts=args.max_drafts,
        batch_invariant=args.batch_invariant,
        tensor_parallel=args.tensor_parallel,
        context_parallel=args.context_parallel,
    )


def num_devices(args: argparse.Namespace) -> int:
    return args.tensor_parallel * args.context_parallel


def key_limits(args: argparse.Namespace) -> KeyLimits:
    limits = KeyLimits.default(args.max_waiting, args.max_running)
    given = {
        "requests": args.max_requests_per_key,
        "choices": args.max_choices_per_key,
        "tokens": args.max_tokens_per_key,
    }
    return dataclasses.replace(
        limits, **{name: most for name, most in given.items() if most is not None}
    )
