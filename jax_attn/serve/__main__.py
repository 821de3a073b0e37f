"""python -m jax_attn.serve: loads a model directory and serves it until SIGTERM or Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import jax

try:
    import uvicorn  # noqa: F401
    from tqdm import tqdm
except ModuleNotFoundError:
    sys.exit("jax_attn.serve needs more packages: pip install 'jax_attn[serve]'")

from jax_attn import models
from jax_attn.serve._engine.async_engine import AsyncEngine
from jax_attn.serve._engine.device import Device
from jax_attn.serve._engine.draft_model import have_same_tokens
from jax_attn.serve._engine.embedder import Embedder
from jax_attn.serve._engine.engine_config import device_config
from jax_attn.serve._engine.leading_device import follow
from jax_attn.serve._engine.processes import Processes, ProcessesError
from jax_attn.serve._http import auth
from jax_attn.serve._http.http_process import LOG_FORMAT, HttpProcess
from jax_attn.serve._http.http_server import HttpConfig, HttpServer, spare_the_collector
from jax_attn.serve._http.server import ServerConfig, create_app
from jax_attn.serve._options import engine_config, key_limits, num_devices, parse
from jax_attn.serve._sizing import bytes_of_page, choose_num_pages, make_engine

log = logging.getLogger("jax_attn.serve")


def main(argv: list[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    try:
        args = parse(argv, __doc__)
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
    """Runs a process other than 0 until process 0 ends it. Returns a status if it cannot begin."""

    def on_signal(_: int, __: FrameType | None) -> None:
        if processes.is_leaving:
            processes.end(1, f"{processes.names[processes.index]} was stopped by a second signal.")
        processes.is_leaving = True

    try:
        model = _load(models.fetch(args.model, args.revision), args)
        num_pages = choose_num_pages(model, args, bytes_of_page(model.config, args))
        device = Device(model, device_config(model.config, engine_config(num_pages, args)))
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
    if args.embedding_model is not None:
        return _load_and_serve(args, None)
    with HttpProcess() as process:
        return _load_and_serve(args, process)


def _load_and_serve(args: argparse.Namespace, process: HttpProcess | None) -> int:
    """process: answers HTTP; None: this process does, for an embedding model alone."""
    try:
        keys = auth.checked_keys(args.api_key, "--api-key")
        keys += _keys_of("--api-key-file", args.api_key_file)
        operator_keys = _keys_of("--operator-key-file", args.operator_key_file)
        name, *aliases = args.served_model_name or [_name_of(args.model or args.embedding_model)]
        engine = model = None
        if args.model is None:
            directory = models.fetch(args.embedding_model, args.revision)
            embedding = _load_embedding(directory, name, args)
        else:
            directory = models.fetch(args.model, args.revision)
            model = _load(directory, args)
            # Loaded before the engine, which takes the memory that is left.
            embedding, draft_model = None, _load_draft_model(model, args)
            if args.embedding_model is not None:
                fetched = models.fetch(args.embedding_model)
                embedding = _load_embedding(fetched, _name_of(args.embedding_model), args)
            engine = make_engine(model, args, draft_model)
            model = model._replace(params={})  # the engine holds the weights that it needs
            del draft_model
        config = ServerConfig(
            model_directory=directory,
            model_name=name,
            model_aliases=tuple(aliases),
            strict=args.strict,
            generation_config=args.generation_config == "auto",
            api_keys=keys,
            operator_keys=operator_keys,
            key_limits=key_limits(args),
            is_public=not auth.is_loopback(args.host),
            check_host=auth.is_loopback(args.host) and not (keys or operator_keys),
            allowed_origins=tuple(args.allow_origin),
            access_log=args.access_log,
        )
        http = HttpConfig(args.host, args.port, args.max_connections, args.drain_seconds)
        if not (keys or operator_keys) and not auth.is_loopback(args.host):
            log.warning(
                "anyone who can reach %s can use this server; see --api-key-file", args.host
            )
        if process is None:
            server = HttpServer(create_app(engine, model, config, embedding), http)
            return _serve_here(server, engine, embedding)
    except (OSError, ValueError, NotImplementedError, ProcessesError) as error:
        print(f"jax_attn.serve: {error}", file=sys.stderr)
        return 1
    assert engine is not None and model is not None
    engine.on_ready = spare_the_collector
    return process.serve(engine, model, config, http, args.processes)


def _serve_here(
    server: HttpServer,
    engine: AsyncEngine | None,
    embedding: tuple[models.EmbeddingModel, Embedder] | None,
) -> int:
    if engine is not None:
        engine.on_ready = spare_the_collector
    parts = [part for part in (engine, embedding and embedding[1]) if part is not None]
    for part in parts:
        # A supervisor then starts a new server.
        part.on_failure = server.stop
    asyncio.run(server.serve())
    return 0 if server.started and all(part.failure is None for part in parts) else 1


def _keys_of(option: str, path: Path | None) -> tuple[str, ...]:
    """The keys in the file of an option; () without one. A ValueError names the option."""
    if path is None:
        return ()
    try:
        return auth.read_keys(path)
    except OSError as error:
        raise ValueError(
            f"{option}: expected a file with one key a line, got {path}: {error.strerror}"
        ) from None


def _name_of(model: str) -> str:
    """The model's name for clients if --served-model-name is not given."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def _load(directory: Path, args: argparse.Namespace) -> models.Model:
    """Loads a model. Raises ModelDirectoryError or ValueError."""
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
        # Weights that devices share are copied to each device from host memory.
        is_alone = num_devices(args) == 1
        host = None if is_alone else jax.local_devices(backend="cpu")[0]
        in_panels = is_alone and jax.default_backend() == "cpu"
        with jax.default_device(host):
            return models.load(directory, args.dtype, show, in_panels=in_panels)


def _load_draft_model(model: models.Model, args: argparse.Namespace) -> models.Model | None:
    """Loads the draft model, if there is one. Raises ModelDirectoryError or ValueError."""
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
    """Loads the embedding model, if there is one. Raises ModelDirectoryError."""
    with _loading(directory) as show:
        model = models.load_embedding(directory, args.dtype, show)
    return model, Embedder(model, name)


@contextlib.contextmanager
def _loading(directory: Path) -> Iterator[Callable[[int, int], None]]:
    """Shows a progress bar on a terminal. Yields show(numbers read, numbers of all)."""
    log.info("loading %s", directory)
    begin = time.monotonic()
    with tqdm(disable=None, unit=" weights", unit_scale=True, leave=False) as bar:

        def show(num_read: int, num_all: int) -> None:
            bar.total = num_all
            bar.update(num_read - bar.n)

        yield show
    log.info("loaded in %.1f s", time.monotonic() - begin)


if __name__ == "__main__":
    sys.exit(main())
