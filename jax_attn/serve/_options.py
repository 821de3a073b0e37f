"""The command line: options, their defaults, and the configurations of engine and limits."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar
from urllib.parse import urlsplit

import jax

from jax_attn import models
from jax_attn.serve._engine.engine_config import EngineConfig
from jax_attn.serve._engine.processes import Processes
from jax_attn.serve._http.log_format import FORMATS
from jax_attn.serve._http.settings import MAX_CONNECTIONS
from jax_attn.serve._openai.bounds import MAX_PICTURES, KeyLimits
from jax_attn.serve._scheduling import kv_policies
from jax_attn.serve._scheduling.kv_policies import KvPolicy
from jax_attn.serve._scheduling.quest import Quest
from jax_attn.serve._scheduling.step_plan import STARVATION_SECONDS
from jax_attn.serve._scheduling.streaming import Streaming
from jax_attn.serve._scheduling.tenants import TenantLimits

_DRAFTS = 4  # of a draft model: each takes time, and all after a wrong one are useless

_T = TypeVar("_T")

MTP = "mtp"  # --draft-model: the model's own layer for multi-token prediction

LORA_RANK = 16  # --max-lora-rank, unless an adapter has more

MEMORY_SHARE = 0.85  # of the free memory; the rest is for activations

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


# Options that only a server of HTTP has, or one of several processes.
_OF_SERVER = frozenset(
    ("strict", "host", "port", "api_key", "api_key_file", "operator_key_file", "allow_origin")
    + ("weights_directory", "hand_over_bytes", "files_directory", "otlp_endpoint")
    + ("max_requests_per_key", "max_choices_per_key", "max_running_per_key", "max_tokens_per_key")
    + (
        "max_pictures",
        "allow_image_urls",
        "max_connections",
        "access_log",
        "log_format",
        "drain_seconds",
    )
    + ("served_model_name", "data_parallel")
    + ("coordinator", "num_processes", "process_id", "distributed", "start_seconds")
)


class _RaisingParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def from_keywords(options: Mapping[str, Any]) -> argparse.Namespace:
    """Options by their names in Python, such as max_running=8, checked as those of `parse`.

    None is an option that is not given. `devices` are JAX's, one for each part of the model.

    Raises:
      ValueError: an option that there is not, that only a server has, or whose value does not fit.
    """
    argv, devices = [], options.get("devices")
    for name, value in options.items():
        if name == "devices":
            continue
        option = f"--{name.replace('_', '-')}"
        if name in _OF_SERVER:
            raise ValueError(f"{option}: expected an option of the engine, got one of the server")
        if name == "lora":
            argv += [f"{option}={adapter}={where}" for adapter, where in dict(value or {}).items()]
        elif isinstance(value, bool):
            argv.append(option if value else f"--no-{option[2:]}")
        elif value is not None:
            argv.append(f"{option}={value}")
    args = parse(argv, parser=_RaisingParser(allow_abbrev=False, add_help=False))
    if devices is not None:
        args.devices = tuple(devices)
        if len(args.devices) != num_devices(args):
            raise ValueError(
                f"--devices: expected {num_devices(args)}, which is --tensor-parallel times"
                f" --context-parallel, got {len(args.devices)}"
            )
    return args


def parse_batch(argv: list[str], description: str | None) -> argparse.Namespace:
    """Options of `batch`, with `input` and `output`. Exits if one is of the server alone."""
    prog = "python -m jax_attn.serve batch"
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog, description=description, formatter_class=formatter)
    parser.add_argument("input", metavar="IN.jsonl", type=Path, help="requests, one a line")
    parser.add_argument("output", metavar="OUT.jsonl", type=Path, help="answers, one a line")
    args = parse(argv, parser=parser)
    for name in _OF_SERVER - {"strict", "served_model_name", "data_parallel"}:
        if getattr(args, name) != parser.get_default(name):
            option = f"--{name.replace('_', '-')}"
            parser.error(f"{option}: expected an option of the engine, got one of the server")
    return args


def parse(
    argv: list[str] | None,
    description: str | None = None,
    parser: argparse.ArgumentParser | None = None,
) -> argparse.Namespace:
    """Parses options. Exits if they contradict each other. Raises ProcessesError.

    parser: of another kind, without options; then as its `error` does.
    """
    prog = "python -m jax_attn.serve"
    parser = parser or argparse.ArgumentParser(prog=prog, description=description)
    switch = argparse.BooleanOptionalAction
    add = parser.add_argument_group("models").add_argument
    hub = """Hugging Face directory, or ORG/NAME of the Hub (the bundled model; none with
        --embedding-model)"""
    add("--model", help=hub)
    add("--revision", help="of ORG/NAME: a branch, tag or commit (main)")
    vectors = "likewise, of an embedding model or a cross-encoder (none)"
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
    add = parser.add_argument_group("HTTP").add_argument
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--port", type=_port, default=8000, help="0: any that is free (%(default)s)")
    add("--strict", action=switch, default=False, help="refuse unknown fields, not read past them")
    origin = "a web page's origin, such as http://localhost:3000, that may use the server, or *"
    add("--allow-origin", action="append", default=[], metavar="ORIGIN", help=origin)
    clients = "then 429; half of them for one address (%(default)s)"
    add("--max-connections", type=_positive, default=MAX_CONNECTIONS, help=clients)
    add("--drain-seconds", type=_positive, default=30, help="after SIGTERM (%(default)s)")
    shown = f"of a request, for models that read them ({MAX_PICTURES})"
    add("--max-pictures", type=_positive, metavar="N", help=shown)
    hosts = "fetch pictures by URLs of this host, if its addresses are public; may be repeated"
    add("--allow-image-urls", type=_host, action="append", default=[], metavar="HOST", help=hosts)
    add = parser.add_argument_group("keys, and limits of each").add_argument
    shown = "a key, which process lists show; may be repeated (see --api-key-file)"
    add("--api-key", action="append", default=[], metavar="KEY", help=shown)
    add("--api-key-file", type=Path, help="a key a line; every route but /health then needs one")
    operators = """keys, likewise, that may also read /metrics and all of /debug/state (without this
        file, all may who use a loopback address or the only key; else nobody)"""
    add("--operator-key-file", type=Path, help=operators)
    where = """directories in it are weights that operators may load while the server runs, by
        POST /v1/weights; with --operator-key-file (none)"""
    add("--weights-directory", type=Path, metavar="DIR", help=where)
    moved = """of a request that operators may move between servers, by POST /v1/hand_over; with
        --operator-key-file (0: none moves)"""
    add("--hand-over-bytes", type=_non_negative, default=0, metavar="BYTES", help=moved)
    kept = "where /v1/files and /v1/batches keep theirs; without it there are none (none)"
    add("--files-directory", type=Path, metavar="DIR", help=kept)
    flight = "in flight of one key, without keys of all; then 429 (--max-waiting + --max-running)"
    add("--max-requests-per-key", type=_positive, help=flight)
    add("--max-choices-per-key", type=_positive, help="their prompts x n, likewise")
    run = "of these, those that run at once; more wait (a fair share)"
    add("--max-running-per-key", type=_positive, help=run)
    prompt = f"tokens of their prompts, x n; then 429 ({KeyLimits.tokens})"
    add("--max-tokens-per-key", type=_positive, help=prompt)
    add = parser.add_argument_group("cache and steps").add_argument
    add("--num-pages", type=_positive, help="of the kv cache (what the device's memory holds)")
    share = "of the device's free memory, for the kv cache; not on a CPU (%(default)s)"
    add("--memory-share", type=_share, default=MEMORY_SHARE, metavar="SHARE", help=share)
    page = "tokens of a page (16; with --context-parallel N, 64 x N)"
    add("--page-size", type=_positive, help=page)
    add("--prefix-cache", action=switch, default=True, help="share the kv of equal beginnings")
    kept = f"""what a sequence keeps of its cache: a long text its first and last tokens
        (StreamingLLM), or a prompt the KEEP keys of each head that it looks at most (SnapKV, H2O):
        {", ".join(kv_policies.EXAMPLES)} (everything)"""
    add("--kv-policy", type=_kv_policy, metavar="POLICY", help=kept)
    read = f"""what a token of an output reads of its cache: in each layer as many pages, those that
        it may look at most (Quest): {", ".join(kv_policies.SELECT_EXAMPLES)} (everything)"""
    add("--kv-select", type=_kv_select, metavar="SELECTION", help=read)
    host = """memory of the host for pages that the device's prefix cache has no room for (0)"""
    add("--host-cache-bytes", type=_non_negative, default=0, metavar="BYTES", help=host)
    files = """a directory for what the host's memory has no room for either; it outlives the server
        (none)"""
    add("--file-cache", type=Path, metavar="DIR", help=files)
    add("--file-cache-bytes", type=_positive, metavar="BYTES", help="the most bytes of its files")
    add("--max-running", type=_positive, help="sequences at once (32; on a GPU 256)")
    add("--max-step-tokens", type=_positive, help="tokens of a step (512; on a GPU 2048)")
    chunk = "of them, about, of prompts beside decodes (32; on a GPU 256)"
    add("--prefill-chunk", type=_positive, help=chunk)
    bursts = (
        "steps of decodes launched at once, at most, while no request could enter (%(default)s)"
    )
    add("--burst-steps", type=_positive, default=1, metavar="N", help=bursts)
    add("--max-waiting", type=_positive, default=1024, help="queue; then 429 (%(default)s)")
    starved = """that a request waits, at most, while later ones enter because more of their
        prompts is cached (%(default)g)"""
    add("--starvation-seconds", type=_non_negative, default=STARVATION_SECONDS, help=starved)
    add("--batch-invariant", action=switch, default=False, help="same seed, same bits, any load")
    add = parser.add_argument_group("drafts").add_argument
    drafts = """tokens of each sequence guessed from its own text, and verified in one step, where
        steps have room for them (0: none; with --draft-model 4)"""
    add("--max-drafts", type=_non_negative, help=drafts)
    smaller = """likewise, of a smaller model with the same tokens, which guesses them instead; mtp:
        the model's own layer for multi-token prediction does (none)"""
    add("--draft-model", metavar="MODEL", help=smaller)
    add = parser.add_argument_group("LoRA adapters").add_argument
    where = """a LoRA adapter's directory, as PEFT writes it; clients name it as the model; may be
        repeated (none)"""
    add("--lora", type=_lora, action="append", default=[], metavar="NAME=DIR", help=where)
    places = "adapters at a time; more than there are leave room to load others (those of --lora)"
    add("--max-loras", type=_positive, metavar="N", help=places)
    most = "the largest rank (that of --lora's, at least 16)"
    add("--max-lora-rank", type=_positive, metavar="R", help=most)
    add = parser.add_argument_group("several devices and processes").add_argument
    devices = "devices to split the model over, by heads; each has its share of it (%(default)s)"
    add("--tensor-parallel", type=_positive, default=1, metavar="N", help=devices)
    contexts = """devices to split the slots of each page over, times those of --tensor-parallel,
        for contexts that no device holds (%(default)s)"""
    add("--context-parallel", type=_positive, default=1, metavar="N", help=contexts)
    replicas = """engines of the whole model, each on its own devices (times those of the options
        above), behind one queue and one port (%(default)s)"""
    add("--data-parallel", type=_positive, default=1, metavar="N", help=replicas)
    experts = """send tokens to their experts by all-to-all: with --tensor-parallel N, each device
        sends a part of the tokens; with --data-parallel N, the engines share the experts, each has
        1/N of them"""
    add("--expert-parallel", action=switch, default=False, help=experts)
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
    add = parser.add_argument_group("log and traces").add_argument
    add("--access-log", action=switch, default=True, help="a line of the log for each request")
    collector = """where traces go, such as http://localhost:4318/v1/traces; needs
        jax_attn[otel] (none)"""
    add("--otlp-endpoint", metavar="URL", help=collector)
    add(
        "--log-format", choices=FORMATS, default="text", help="json: an object a line (%(default)s)"
    )
    args = parser.parse_args(argv)
    of_one = (args.coordinator, args.num_processes, args.process_id)
    if len({x is None for x in of_one}) > 1 or (args.distributed and args.coordinator):
        parser.error("expected --coordinator, --num-processes and --process-id, or --distributed")
    if args.process_id is not None and args.process_id >= args.num_processes:
        parser.error(
            f"--process-id: expected less than {args.num_processes}, got {args.process_id}"
        )
    if args.weights_directory is not None and args.operator_key_file is None:
        parser.error("--weights-directory: expected --operator-key-file beside it")
    if args.hand_over_bytes and args.operator_key_file is None:
        parser.error("--hand-over-bytes: expected --operator-key-file beside it")
    if args.hand_over_bytes and (args.distributed or args.coordinator):
        parser.error("--hand-over-bytes: expected a server of one process")
    if args.model is None and args.embedding_model is None:
        args.model = str(models.BUNDLED)
    if args.model is None:
        _check_alone(args, parser)
    _check_loras(args, parser)
    _check_host_cache(args, parser)
    _check_file_cache(args, parser)
    if args.data_parallel > 1 and (args.distributed or args.coordinator):
        parser.error("--data-parallel: expected a server of one process")
    _check_experts(args, parser)
    if args.max_drafts is None:
        args.max_drafts = _DRAFTS if args.draft_model else 0
    if args.draft_model and not args.max_drafts:
        parser.error("--draft-model: expected --max-drafts of at least 1, got 0")
    if args.draft_model and (args.distributed or args.coordinator):
        parser.error("--draft-model: expected a server of one process")
    args.processes = args.devices = args.expert_group = args.file_store = None
    args.owners = {}
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


def _check_host_cache(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if not args.host_cache_bytes:
        return
    if not args.prefix_cache:
        parser.error("--host-cache-bytes: expected --prefix-cache beside it")
    if args.distributed or args.coordinator:
        parser.error("--host-cache-bytes: expected a server of one process")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if args.host_cache_bytes > memory:
        parser.error(
            f"--host-cache-bytes: expected at most {memory}, the machine's memory, got"
            f" {args.host_cache_bytes}"
        )


def _check_file_cache(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if (args.file_cache is None) != (args.file_cache_bytes is None):
        parser.error("--file-cache: expected --file-cache-bytes beside it, and that not alone")
    if args.file_cache is not None and not args.host_cache_bytes:
        parser.error("--file-cache: expected --host-cache-bytes beside it")


def _check_experts(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if not args.expert_parallel:
        return
    if args.tensor_parallel == 1 and args.data_parallel == 1:
        parser.error(
            "--expert-parallel: expected --tensor-parallel or --data-parallel of more than 1"
        )
    if not shares_experts(args):
        return
    refused = {
        "tensor_parallel": args.tensor_parallel > 1,
        "context_parallel": args.context_parallel > 1,
        "draft_model": args.draft_model,
        "max_loras": args.max_loras,
        "weights_directory": args.weights_directory,
    }
    for name, is_given in refused.items():
        if is_given:
            option = f"--{name.replace('_', '-')}"
            parser.error(f"--expert-parallel: expected no {option} with --data-parallel")


def shares_experts(args: argparse.Namespace) -> bool:
    """Whether the engines of --data-parallel share the experts."""
    return bool(args.expert_parallel and args.data_parallel > 1)


def _check_loras(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    names = [name for name, _ in args.lora]
    if len(set(names)) < len(names):
        parser.error(f"--lora: expected a name for each, got {', '.join(names)}")
    args.max_loras = len(names) if args.max_loras is None else args.max_loras
    if args.max_loras < len(names):
        parser.error(f"--max-loras: expected at least {len(names)}, as --lora has, got fewer")
    if not args.max_loras:
        return
    if args.max_lora_rank is not None and args.max_lora_rank > models.MAX_LORA_RANK:
        parser.error(
            f"--max-lora-rank: expected at most {models.MAX_LORA_RANK}, got {args.max_lora_rank}"
        )
    option = "--lora" if names else "--max-loras"
    if args.model is None:
        parser.error(f"{option}: expected --model, got --embedding-model only")
    if args.distributed or args.coordinator:
        parser.error(f"{option}: expected a server of one process")


def _check_alone(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Checks the options of an embedding model that is served alone."""
    for name in ("draft_model", "coordinator", "distributed"):
        if getattr(args, name):
            parser.error(
                f"--{name.replace('_', '-')}: expected --model, got --embedding-model only"
            )
    if len(args.served_model_name or ()) > 1:
        parser.error("--served-model-name: expected one name of --embedding-model without --model")


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an integer, got {text!r}") from None


def _positive(text: str) -> int:
    if _integer(text) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    return int(text)


def _host(text: str) -> str:
    if not text.isascii() or urlsplit(f"//{text}").hostname != text.lower():
        raise argparse.ArgumentTypeError(f"expected a host such as example.com, got {text!r}")
    return text


def _kv_policy(text: str) -> KvPolicy:
    return _of_name(kv_policies.parse, text)


def _kv_select(text: str) -> Quest:
    return _of_name(kv_policies.parse_selection, text)


def _of_name(parse: Callable[[str], _T], text: str) -> _T:
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _lora(text: str) -> tuple[str, Path]:
    name, _, where = text.partition("=")
    if not (name and where):
        raise argparse.ArgumentTypeError(f"expected NAME=DIR, got {text!r}")
    return name, Path(where)


def _share(text: str) -> float:
    sentence = f"expected a number between 0 and 1, got {text}"
    try:
        share = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(sentence) from None
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(sentence)
    return share


def _non_negative(text: str) -> int:
    if _integer(text) < 0:
        raise argparse.ArgumentTypeError(f"expected at least 0, got {text}")
    return int(text)


def _port(text: str) -> int:
    if not 0 <= _integer(text) <= 65535:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 65535, got {text}")
    return int(text)


def engine_config(
    num_pages: int,
    args: argparse.Namespace,
    num_host_pages: int = 0,
    num_host_states: int | None = None,
) -> EngineConfig:
    return EngineConfig(
        num_pages=num_pages,
        num_host_pages=num_host_pages,
        num_host_states=num_host_states,
        files=args.file_store,
        page_size=args.page_size,
        kv_dtype=KV_DTYPES.get(args.kv_cache_dtype),
        eight_bit_products=args.eight_bit_products,
        max_running=args.max_running,
        max_step_tokens=args.max_step_tokens,
        prefill_chunk=args.prefill_chunk,
        max_prefill_chunk=args.max_prefill_chunk,
        max_waiting=args.max_waiting,
        starvation_seconds=args.starvation_seconds,
        tenant_limits=TenantLimits(max_running=args.max_running_per_key),
        kv_policy=_limited_kv_policy(args),
        kv_select=args.kv_select,
        prefix_cache=args.prefix_cache,
        max_drafts=args.max_drafts,
        burst_steps=args.burst_steps,
        batch_invariant=args.batch_invariant,
        max_loras=args.max_loras,
        max_lora_rank=args.max_lora_rank or LORA_RANK,
        tensor_parallel=args.tensor_parallel,
        expert_parallel=args.expert_parallel and not shares_experts(args),
        expert_group=args.expert_group,
        context_parallel=args.context_parallel,
        devices=args.devices,
    )


def _limited_kv_policy(args: argparse.Namespace) -> KvPolicy | None:
    """--kv-policy, for texts of up to --max-model-len tokens."""
    policy: KvPolicy | None = args.kv_policy
    if isinstance(policy, Streaming) and args.max_model_len is not None:
        return dataclasses.replace(policy, max_tokens=args.max_model_len)
    return policy


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
