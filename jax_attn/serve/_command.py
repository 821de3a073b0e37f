"""python -m jax_attn.serve: loads a model directory and serves it until SIGTERM or Ctrl-C.

`python -m jax_attn.serve batch` answers a file of requests instead.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

from jax_attn import models
from jax_attn.serve._engine.async_engine import AsyncEngine
from jax_attn.serve._engine.device import Device
from jax_attn.serve._engine.engine_config import device_config
from jax_attn.serve._engine.leading_device import follow
from jax_attn.serve._engine.processes import Processes, ProcessesError
from jax_attn.serve._engine.replicas import Replicas
from jax_attn.serve._executable_cache import use_cache
from jax_attn.serve._http import keys as api_keys
from jax_attn.serve._http import log_format
from jax_attn.serve._http.http_process import HttpProcess
from jax_attn.serve._http.settings import HttpConfig, ServerConfig, Setup, check_address
from jax_attn.serve._http.spare_collector import spare_the_collector
from jax_attn.serve._ipc.engine_host import EngineHost
from jax_attn.serve._ipc.wire import Wire
from jax_attn.serve._loading import load, load_all
from jax_attn.serve._options import engine_config, key_limits, parse
from jax_attn.serve._sizing import bytes_of_page, choose_num_pages

log = logging.getLogger("jax_attn.serve")


def main(argv: list[str], process: HttpProcess) -> int:
    """Returns the exit status. process: answers HTTP, unless this one does, or has no port."""
    try:
        args = parse(argv, __doc__)
        log_format.configure(args.log_format)
    except ProcessesError as error:
        print(f"jax_attn.serve: {error}", file=sys.stderr)
        return 1
    use_cache()
    processes: Processes | None = args.processes
    if processes is None:
        return _serve(args, process)
    try:
        with process:  # `fail` and `end` do not return
            status = _serve(args, process) if processes.leads else _follow(args, processes, process)
    except BaseException as error:
        log.exception("%s has failed", processes.names[processes.index])
        processes.fail(error)
    processes.end(status, "" if status == 0 else f"{processes.names[processes.index]} has ended.")


def _follow(args: argparse.Namespace, processes: Processes, process: HttpProcess) -> int:
    """Runs a process other than 0 until process 0 ends it. Returns a status if it cannot begin."""
    process.end()

    def on_signal(_: int, __: FrameType | None) -> None:
        if processes.is_leaving:
            processes.end(1, f"{processes.names[processes.index]} was stopped by a second signal.")
        processes.is_leaving = True

    try:
        model = load(models.fetch(args.model, args.revision), args)
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


def _serve(args: argparse.Namespace, process: HttpProcess) -> int:
    answers_http = args.embedding_model is not None  # this process does
    if answers_http:
        process.end()
    try:
        keys = api_keys.checked_keys(args.api_key, "--api-key")
        keys += _keys_of("--api-key-file", args.api_key_file)
        operator_keys = _keys_of("--operator-key-file", args.operator_key_file)
        args.owners = {name: owner for owner, name in api_keys.tenants(keys, operator_keys).items()}
        check_address(args.host, args.port)
        loaded = load_all(args)
        vision = loaded.vision
        config = ServerConfig(
            model_directory=loaded.directory,
            model_name=loaded.name,
            model_aliases=loaded.aliases,
            strict=args.strict,
            generation_config=args.generation_config == "auto",
            api_keys=keys,
            operator_keys=operator_keys,
            key_limits=key_limits(args),
            is_public=not api_keys.is_loopback(args.host),
            check_host=api_keys.is_loopback(args.host) and not (keys or operator_keys),
            allowed_origins=tuple(args.allow_origin),
            access_log=args.access_log,
            weights_directory=args.weights_directory,
            max_hand_over_bytes=args.hand_over_bytes,
            files_directory=args.files_directory,
            otlp_endpoint=args.otlp_endpoint,
            adapters=tuple(name for name, _ in args.lora),
            vision=vision,
            max_pictures=args.max_pictures,
            image_hosts=tuple(args.allow_image_urls),
            max_body_bytes=(4 if vision is None else 32) << 20,
        )
        http = HttpConfig(args.host, args.port, args.max_connections, args.drain_seconds)
        if not (keys or operator_keys) and not api_keys.is_loopback(args.host):
            log.warning(
                "anyone who can reach %s can use this server; see --api-key-file", args.host
            )
        if answers_http:
            # This process imports nothing else that answers HTTP, which takes half a second.
            from jax_attn.serve import _one_process

            return _one_process.serve(loaded, config, http)
    except (OSError, ValueError, NotImplementedError, ProcessesError) as error:
        print(f"jax_attn.serve: {error}", file=sys.stderr)
        return 1
    assert loaded.engine is not None and loaded.model is not None
    loaded.engine.on_ready = spare_the_collector
    setup = Setup(
        loaded.engine.limits, loaded.engine.stats(), loaded.model, config, http, args.log_format
    )
    return _run(loaded.engine, setup, process, args.processes)


def _run(
    engine: AsyncEngine | Replicas, setup: Setup, process: HttpProcess, processes: Processes | None
) -> int:
    """Runs the engine, which is not started, until the HTTP process ends. Returns the status."""
    host = EngineHost(engine, Wire(process.socket))
    if processes is not None:
        processes.on_leave = host.leave
    asyncio.run(host.run(setup))
    return 0 if process.wait() and engine.failure is None else 1


def _keys_of(option: str, path: Path | None) -> tuple[str, ...]:
    """The keys in the file of an option; () without one. A ValueError names the option."""
    if path is None:
        return ()
    try:
        return api_keys.read_keys(path)
    except OSError as error:
        raise ValueError(
            f"{option}: expected a file with one key a line, got {path}: {error.strerror}"
        ) from None
