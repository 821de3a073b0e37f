"""python -m jax_attn.serve: loads a model directory and serves it until SIGTERM or Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import hashlib
import logging
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

try:
    import uvicorn
    from tqdm import tqdm
except ModuleNotFoundError:
    sys.exit("jax_attn.serve needs more packages: pip install 'jax_attn[serve]'")

import jax_attn as ja
from jax_attn import models
from jax_attn.serve import auth
from jax_attn.serve.async_engine import AsyncEngine
from jax_attn.serve.connection import Connection
from jax_attn.serve.device import Device
from jax_attn.serve.draft_model import have_same_tokens
from jax_attn.serve.embedder import Embedder
from jax_attn.serve.engine_config import EngineConfig, device_config
from jax_attn.serve.gate import KeyLimits
from jax_attn.serve.processes import Processes, ProcessesError
from jax_attn.serve.replay import follow
from jax_attn.serve.server import ServerConfig, create_app
from jax_attn.serve.tenants import TenantLimits

log = logging.getLogger("jax_attn.serve")

_MAX_HEADER_BYTES = 16384  # request line and headers; more is a 400 of uvicorn's
_BACKLOG = 2048  # connections that the kernel keeps until they are accepted
_ACCEPTS = 64  # of them at a time, 10 ms, in which no stream goes on
_OTHER_FILES = 128  # than connections
_MAX_FILES = 65536  # open ones; many a shell allows 1,024, fewer than the queue has clients
_SAMPLING_BYTES = 48  # for each of [max_running, vocab]: logits, counts, ten f32 of XLA's to sort
_KV_SHARE = 0.85  # of the memory that is left; the rest is for activations
_NEXT_TRY = 0.9  # of the pages that did not fit
_CPU_BYTES = 2 << 30
_DRAFTS = 4  # of a draft model: each takes its time, and behind a wrong one all are in vain
_DIGEST_VALUES = 1000  # of each weight
_MAX_CACHE = 8  # times what can run at once: beyond, a small model would own millions of pages


class _Steps(NamedTuple):
    """What a step has room for, unless options say otherwise."""

    max_running: int
    max_step_tokens: int
    # A step's time grows with its tokens, and whoever decodes waits for it. With chunks of these
    # sizes the 99th percentile between tokens is 1.5 to 2.3 times the median on a CPU, 2.0 to 3.3
    # times on an H200, in steps full of prompts up to 5.2 and 3.7 times (docs/notes/server.md).
    prefill_chunk: int
    # Where many wait. A GPU reads a larger chunk in little more time, a CPU does not.
    max_prefill_chunk: int


_ON_CPU, _ON_GPU = _Steps(32, 512, 32, 32), _Steps(256, 2048, 256, 512)
_BATCH_INVARIANT = _Steps(32, 512, 512, 512)  # every step is padded to the largest


class _Uvicorn(uvicorn.Server):
    """Drains at the first signal, gives up at the second, and returns after either."""

    def __init__(self, config: uvicorn.Config, on_drain: Callable[[], None]):
        super().__init__(config)
        self._on_drain = on_drain

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for server in self.servers:
            for listener in server.sockets:
                with listener.dup() as same:
                    same.listen(_BACKLOG)  # asyncio makes one number of both

    def stop(self) -> None:
        """From any thread. What is being answered is answered first."""
        self.should_exit = True

    def leave(self) -> None:
        """What the first signal does, and nothing if it has come. From any thread."""
        if not self.should_exit:
            self._on_drain()
            self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Without super(), which would raise the signal again after the drain.
        self._on_drain()
        self.force_exit = self.should_exit
        self.should_exit = True


def main(argv: list[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        args = _parse(argv)
    except ProcessesError as error:
        print(f"jax_attn.serve: {error}", file=sys.stderr)
        return 1
    processes: Processes | None = args.processes
    if processes is None:
        return _serve(args)
    try:
        status = _serve(args) if processes.leads else _follow(args, processes)
    except BaseException as error:
        log.exception("%s has failed", processes.names[processes.index])
        processes.fail(error)
    processes.end(status, "" if status == 0 else f"{processes.names[processes.index]} has ended.")


def _follow(args: argparse.Namespace, processes: Processes) -> int:
    """What a process other than 0 does, until process 0 ends it. Returns if it cannot begin."""

    def on_signal(_: int, __: FrameType | None) -> None:
        if processes.is_leaving:
            processes.end(1, f"{processes.names[processes.index]} was stopped by a second signal.")
        processes.is_leaving = True

    try:
        model = _load(models.fetch(args.model, args.revision), args)
        num_pages = _num_pages(model, args, _page_bytes(model.config, args))
        device = Device(model, device_config(model.config, _engine_config(num_pages, args)))
    except (OSError, ValueError, NotImplementedError, ProcessesError) as error:
        print(f"jax_attn.serve: {error}", file=sys.stderr)
        return 1
    del model

    def run() -> None:
        try:
            follow(device, processes)
        except BaseException as error:
            log.exception("%s has failed", processes.names[processes.index])
            processes.fail(error)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    thread = threading.Thread(target=run, name="jax_attn follower", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(1)  # signals run in this thread alone
    return 1


def _serve(args: argparse.Namespace) -> int:
    try:
        keys = auth.checked_keys(args.api_key, "--api-key")
        keys += auth.read_keys(args.api_key_file) if args.api_key_file else ()
        operator_keys = auth.read_keys(args.operator_key_file) if args.operator_key_file else ()
        name, *aliases = args.served_model_name or [_name_of(args.model or args.embedding_model)]
        engine = model = None
        if args.model is None:
            directory = models.fetch(args.embedding_model, args.revision)
            embedding = _load_embedding(directory, name, args)
        else:
            directory = models.fetch(args.model, args.revision)
            model = _load(directory, args)
            # Before the engine, which takes what memory is left.
            embedding, draft_model = None, _load_draft_model(model, args)
            if args.embedding_model is not None:
                fetched = models.fetch(args.embedding_model)
                embedding = _load_embedding(fetched, _name_of(args.embedding_model), args)
            engine = _make_engine(model, args, draft_model)
            model = model._replace(params={})  # of which the engine has what it needs
            del draft_model
        config = ServerConfig(
            model_directory=directory,
            model_name=name,
            model_aliases=tuple(aliases),
            strict=args.strict,
            generation_config=args.generation_config == "auto",
            api_keys=keys,
            operator_keys=operator_keys,
            key_limits=_key_limits(args),
            is_public=not auth.is_loopback(args.host),
            check_host=auth.is_loopback(args.host) and not (keys or operator_keys),
            allowed_origins=tuple(args.allow_origin),
            access_log=args.access_log,
        )
        app = create_app(engine, model, config, embedding)
    except (OSError, ValueError, NotImplementedError, ProcessesError) as error:
        print(f"jax_attn.serve: {error}", file=sys.stderr)
        return 1
    if not (keys or operator_keys) and not auth.is_loopback(args.host):
        log.warning("anyone who can reach %s can use this server; see --api-key-file", args.host)
    connection = _limited_connection(args.max_connections, _allow_many_connections())
    server = _Uvicorn(
        uvicorn.Config(
            app,
            host=args.host,
            port=args.port,
            backlog=_ACCEPTS,
            http=connection,  # of h11, the one whose limit on headers can be set
            h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
            ws="none",
            lifespan="on",
            access_log=False,
            server_header=False,
            headers=[("X-Content-Type-Options", "nosniff")],
            proxy_headers=False,
            timeout_graceful_shutdown=args.drain_seconds,
        ),
        on_drain=app.state.server.drain,
    )
    if engine is not None:
        engine.on_ready = _spare_the_collector
    parts = [part for part in (engine, embedding and embedding[1]) if part is not None]
    for part in parts:
        # Whoever keeps servers running starts another one then.
        part.on_failure = server.stop
    if args.processes is not None:
        args.processes.on_leave = server.leave
    asyncio.run(server.serve())
    return 0 if server.started and all(part.failure is None for part in parts) else 1


def _spare_the_collector() -> None:
    """What is there by now stays: a hundred thousand objects, 60 ms of every full collection."""
    gc.collect()
    gc.freeze()


def _name_of(model: str) -> str:
    """As clients call it, unless they are told."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def _load(directory: Path, args: argparse.Namespace) -> models.Model:
    """Raises: ModelDirectoryError, ValueError."""
    model = _read(directory, args)
    longest = model.config.max_positions
    if args.max_model_len is None:
        return model
    if args.max_model_len > longest:
        raise ValueError(
            f"--max-model-len: expected at most the model's {longest}, got {args.max_model_len}"
        )
    config = dataclasses.replace(model.config, max_positions=args.max_model_len)
    return model._replace(config=config)


def _read(directory: Path, args: argparse.Namespace) -> models.Model:
    with _loading(directory) as show:
        # Weights that devices share go to each from host memory.
        host = jax.local_devices(backend="cpu")[0] if _num_devices(args) > 1 else None
        with jax.default_device(host):
            return models.load(directory, args.dtype, show)


def _load_draft_model(model: models.Model, args: argparse.Namespace) -> models.Model | None:
    """Raises: ModelDirectoryError, ValueError."""
    if args.draft_model is None:
        return None
    draft_model = _read(models.fetch(args.draft_model), args)
    if not have_same_tokens(draft_model, model):
        raise ValueError(
            f"--draft-model: expected one with the tokens of {args.model}, got"
            f" {args.draft_model}, which has others"
        )
    return draft_model


def _load_embedding(
    directory: Path, name: str, args: argparse.Namespace
) -> tuple[models.EmbeddingModel, Embedder]:
    """Raises: ModelDirectoryError."""
    with _loading(directory) as show:
        model = models.load_embedding(directory, args.dtype, show)
    return model, Embedder(model, name)


@contextlib.contextmanager
def _loading(directory: Path) -> Iterator[Callable[[int, int], None]]:
    """With a bar on a terminal. Gives what wants to be told how much is read, of how much."""
    log.info("loading %s", directory)
    begin = time.monotonic()
    with tqdm(disable=None, unit=" weights", unit_scale=True, leave=False) as bar:

        def show(num_read: int, num_all: int) -> None:
            bar.total = num_all
            bar.update(num_read - bar.n)

        yield show
    log.info("loaded in %.1f s", time.monotonic() - begin)


# The first of them is a name that other servers have for it.
_KV_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "int8": "int8", "mxfp4": "mxfp4"}


def _row_bytes(config: models.ModelConfig, args: argparse.Namespace) -> int:
    """Of the keys or values of a token and head, as the cache stores them."""
    if args.kv_cache_dtype is None or config.latent:
        return config.head_dim * jnp.dtype(args.dtype).itemsize
    spec = ja.AttentionSpec(
        num_qo_heads=1,
        num_kv_heads=1,
        head_dim_qk=config.head_dim,
        dtype=args.dtype,
        kv_dtype=_KV_DTYPES[args.kv_cache_dtype],
        max_kv_pages=1,
    )
    k_shape, _ = spec.kv_shapes()
    return k_shape[-1] * jnp.dtype(spec.dtype_of_kv).itemsize


def _make_engine(
    model: models.Model, args: argparse.Namespace, draft_model: models.Model | None = None
) -> AsyncEngine:
    """With as many pages as the device's memory holds, unless it was told how many.

    Raises:
      ValueError: they do not fit.
    """
    # A draft model has pages of its own beside each of the model's.
    configs = [each.config for each in (model, draft_model) if each is not None]
    page_bytes = sum(_page_bytes(config, args) for config in configs)
    fewest, num_pages = _fewest_pages(args), _num_pages(model, args, page_bytes)
    while True:
        try:
            config = _engine_config(num_pages, args)
            engine = AsyncEngine(model, config, args.processes, draft_model)
            break
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            if args.num_pages or num_pages == fewest or args.processes is not None:
                raise ValueError(
                    "--num-pages: expected a kv cache that fits in the device's memory, got "
                    f"{num_pages} pages of {page_bytes} bytes; use fewer, or free memory."
                ) from None
        # All that is free need not be to be had in two pieces: an allocator that takes memory bit
        # by bit (XLA_PYTHON_CLIENT_PREALLOCATE=false) rounds up to powers of two.
        num_pages = max(fewest, int(_NEXT_TRY * num_pages))
    log.info(
        "kv cache: %d pages of %d tokens, %.3g GiB; a request has room for %d tokens",
        num_pages,
        args.page_size,
        num_pages * page_bytes / 2**30,
        engine.limits.max_model_len,
    )
    return engine


def _page_bytes(config: models.ModelConfig, args: argparse.Namespace) -> int:
    """What one device has of a page."""
    page_bytes = 2 * config.num_layers * args.page_size * config.num_kv_heads
    page_bytes *= _row_bytes(config, args)
    page_bytes //= 1 if config.latent else min(args.tensor_parallel, config.num_kv_heads)
    return int(page_bytes // args.context_parallel)


def _fewest_pages(args: argparse.Namespace) -> int:
    """For one step of prompts."""
    return int(-(-args.max_step_tokens // args.page_size))


def _num_pages(model: models.Model, args: argparse.Namespace, page_bytes: int) -> int:
    """As the options say, or what the memory holds: of several processes, the least that one holds.

    Raises ProcessesError where processes have other options or another model.
    """
    most = _default_num_pages(model.config, args, page_bytes)
    num_pages = args.num_pages or max(_fewest_pages(args), most)
    if args.processes is None:
        return int(num_pages)
    own = {f"--{name.replace('_', '-')}": getattr(args, name) for name in _OF_ALL_PROCESSES}
    own |= {"version of jax": jax.__version__}
    own |= {"model": _digest(model)}
    return int(args.processes.agree(own, min, num_pages))


# Options that each process is to be given alike: what its devices compute depends on them.
_OF_ALL_PROCESSES = (
    "max_model_len",
    "dtype",
    "kv_cache_dtype",
    "num_pages",
    "page_size",
    "max_running",
    "max_step_tokens",
    "batch_invariant",
    "tensor_parallel",
    "context_parallel",
)


def _digest(model: models.Model) -> str:
    """Of the config, and of some values of each weight."""
    digest = hashlib.sha256(repr(model.config).encode())
    for path, weight in jax.tree_util.tree_leaves_with_path(model.params):
        values = np.asarray(weight).reshape(-1)
        some = values[:: max(1, values.size // _DIGEST_VALUES)]
        digest.update(f"{path} {weight.shape} {weight.dtype}".encode() + some.tobytes())
    return digest.hexdigest()[:16]


def _engine_config(num_pages: int, args: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        num_pages=num_pages,
        page_size=args.page_size,
        kv_dtype=_KV_DTYPES.get(args.kv_cache_dtype),
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


def _num_devices(args: argparse.Namespace) -> int:
    return args.tensor_parallel * args.context_parallel


def _default_num_pages(
    config: models.ModelConfig, args: argparse.Namespace, page_bytes: int
) -> int:
    """What the device's free memory holds; on CPU, whose memory others need too, far less."""
    num_running = args.max_running * -(-config.max_positions // args.page_size)
    if memory := jax.local_devices()[0].memory_stats():
        left = memory["bytes_limit"] - memory["bytes_in_use"]
        left -= _SAMPLING_BYTES * args.max_running * config.vocab_size
        budget = int(_KV_SHARE * left)
        most = _MAX_CACHE * num_running
    else:
        budget, most = _CPU_BYTES, num_running
    return min(budget // page_bytes, most)


def _allow_many_connections() -> int:
    """Each is an open file. Returns how many may be open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _MAX_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def _limited_connection(max_connections: int, max_files: int) -> type[Connection]:
    """One address may have half of them, so that others find some left."""
    most = max(2, min(max_connections, max_files - _OTHER_FILES))
    if most < max_connections:
        log.warning("connections: at most %d, as this process may open %d files", most, max_files)

    class Limited(Connection):
        max_connections = most
        max_of_address = -(-most // 2)

    return Limited


def _key_limits(args: argparse.Namespace) -> KeyLimits:
    limits = KeyLimits.default(args.max_waiting, args.max_running)
    given = {
        "requests": args.max_requests_per_key,
        "choices": args.max_choices_per_key,
        "tokens": args.max_tokens_per_key,
    }
    return dataclasses.replace(
        limits, **{name: most for name, most in given.items() if most is not None}
    )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m jax_attn.serve", description=__doc__)
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
    cache = "fp8 is float8_e4m3fn; int8, fp8_e5m2 and mxfp4 on a CPU: less memory (as --dtype)"
    add("--kv-cache-dtype", choices=[*_KV_DTYPES], help=cache)
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
    # A step has a copy of a sequence's page table for each page that its prompt's chunk touches.
    args.page_size = args.page_size or (
        16 if args.context_parallel == 1 else 64 * args.context_parallel
    )
    args.max_step_tokens = args.max_step_tokens or steps.max_step_tokens
    args.max_running = args.max_running or min(steps.max_running, args.max_step_tokens)
    args.max_prefill_chunk = args.prefill_chunk or steps.max_prefill_chunk
    args.prefill_chunk = args.prefill_chunk or steps.prefill_chunk
    return args


def _check_alone(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Of an embedding model that is served alone."""
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


if __name__ == "__main__":
    sys.exit(main())
