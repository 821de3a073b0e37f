"""Chooses the number of kv cache pages: all that fit in memory, unless options say otherwise."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn import models
from jax_attn.serve._engine.async_engine import AsyncEngine
from jax_attn.serve._engine.engine_config import capacities
from jax_attn.serve._engine.expert_group import ExpertGroup
from jax_attn.serve._engine.file_store import FileStore
from jax_attn.serve._engine.mtp_drafts import with_hidden
from jax_attn.serve._engine.replicas import Replicas
from jax_attn.serve._engine.selected_rows import bytes_of_bounds
from jax_attn.serve._options import (
    KV_DTYPES,
    LORA_RANK,
    engine_config,
    num_devices,
    shares_experts,
)
from jax_attn.serve._scheduling.kv_policies import num_pages_needed
from jax_attn.serve._scheduling.prompt_policy import PromptPolicy

log = logging.getLogger("jax_attn.serve")

# Per [max_running, vocab] entry: logits, counts, ten f32 that XLA needs to sort.
_SAMPLING_BYTES = 48
_NEXT_TRY = 0.9  # factor on the number of pages after pages did not fit
_CPU_BYTES = 2 << 30
_DIGEST_VALUES = 1000  # values of each weight
# Limit in multiples of the running sequences: a small model would get millions of pages.
_MAX_CACHE = 8


def make_engine(
    model: models.Model,
    args: argparse.Namespace,
    draft_model: models.Model | None = None,
    vision: models.VisionModel | None = None,
) -> AsyncEngine:
    """An engine with --num-pages pages, or as many as the device's memory holds.

    draft_model, vision: see Engine.

    Raises:
      ValueError: they do not fit.
    """
    model = with_hidden(model, draft_model)
    # A draft model has one page for each page of the model.
    configs = [each.config for each in (model, draft_model) if each is not None]
    page_bytes = sum(bytes_of_page(config, args) for config in configs)
    page_bytes += _bytes_of_bounds(model.config, args)
    of_host = _host_capacities(model.config, args)
    if args.file_cache is not None and args.file_store is None:
        args = argparse.Namespace(**vars(args) | {"file_store": _file_store(model, args)})
    fewest, num_pages = _fewest_pages(args), choose_num_pages(model, args, page_bytes)
    while True:
        try:
            config = engine_config(num_pages, args, **of_host)
            engine = AsyncEngine(model, config, args.processes, draft_model, vision)
            break
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            if args.num_pages or num_pages == fewest or args.processes is not None:
                raise ValueError(
                    "--num-pages: expected a kv cache that fits in the device's memory, got "
                    f"{num_pages} pages of {page_bytes} bytes; use fewer, or free memory."
                ) from None
        # The free memory may be fragmented: an allocator that grows
        # (XLA_PYTHON_CLIENT_PREALLOCATE=false) rounds up to powers of two.
        num_pages = max(fewest, int(_NEXT_TRY * num_pages))
    log.info(
        "kv cache: %d pages of %d tokens, %.3g GiB; a request has room for %d tokens",
        num_pages,
        args.page_size,
        num_pages * page_bytes / 2**30,
        engine.limits.max_model_len,
    )
    return engine


def make_replicas(
    model: models.Model,
    args: argparse.Namespace,
    draft_model: models.Model | None = None,
    vision: models.VisionModel | None = None,
) -> Replicas:
    """--data-parallel engines on as many parts of JAX's devices, which share what is for all.

    draft_model, vision: see Engine.

    With --expert-parallel each has a part of the experts, see ExpertGroup.

    Raises:
      ValueError: there are too few devices, pages do not fit, or experts cannot be shared.
    """
    num, size, devices = args.data_parallel, num_devices(args), jax.devices()
    if num * size > len(devices):
        each = f", each on {size} devices" if size > 1 else ""
        raise ValueError(
            f"--data-parallel: expected at most {len(devices) // size}{each}, as JAX sees"
            f" {len(devices)} devices, got {num}"
        )
    engines: list[AsyncEngine] = []
    model = with_hidden(model, draft_model)  # so that files say what their pages hold
    store = None if args.file_cache is None else _file_store(model, args)
    group = ExpertGroup(model, devices[:num]) if shares_experts(args) else None
    for i in range(num):
        of_one = argparse.Namespace(**vars(args))
        of_one.devices = tuple(devices[i * size : (i + 1) * size])
        of_one.max_waiting = -(-args.max_waiting // num)
        of_one.expert_group = group
        of_one.file_store = store
        if group is not None and engines:  # a step is one executable: all have the same shapes
            of_one.num_pages = engines[0].num_pages
        engines.append(make_engine(model, of_one, draft_model, vision))
    return Replicas(engines)


def bytes_of_page(config: models.ModelConfig, args: argparse.Namespace) -> int:
    """Bytes of a page on one device."""
    pages = _shapes_of_page(config, args)
    page_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pages))
    return int(page_bytes // args.context_parallel)


def _bytes_of_bounds(config: models.ModelConfig, args: argparse.Namespace) -> int:
    """Bytes of a page's bounds on one device, with --kv-select."""
    k_pages, _ = _shapes_of_page(config, args)
    if args.kv_select is None or isinstance(k_pages, tuple):  # such models are refused
        return 0
    return bytes_of_bounds(k_pages)


def _shapes_of_page(config: models.ModelConfig, args: argparse.Namespace) -> tuple[Any, Any]:
    """k_pages and v_pages of one page."""
    part = config
    if not config.has_special_layers:
        part = dataclasses.replace(
            config,
            num_qo_heads=config.num_qo_heads // args.tensor_parallel,
            num_kv_heads=max(1, config.num_kv_heads // args.tensor_parallel),
        )
    specs = models.attention_specs(
        part,
        dtype=args.dtype,
        kv_dtype=KV_DTYPES.get(args.kv_cache_dtype),
        page_size=args.page_size,
        max_kv_pages=1,
    )
    return jax.eval_shape(lambda: models.init_pages(part, specs, 1))


def _host_capacities(config: models.ModelConfig, args: argparse.Namespace) -> dict[str, int]:
    """Fields of EngineConfig: what --host-cache-bytes holds, with the parts of all devices.

    Half of the bytes are for states, if the model has some. Raises ValueError.
    """
    pages = {"num_host_pages": bytes_of_page(config, args) * num_devices(args)}
    states = {}
    if config.recurrent is not None:
        num_states = capacities(engine_config(1, args), config).num_states
        states["num_host_states"] = bytes_of_states(config, args) * num_devices(args) // num_states
    each = pages | states
    num, given = args.data_parallel, args.host_cache_bytes  # the engines share the bytes
    fewest, total = len(each) * max(each.values()), given // num
    if given and total < fewest:
        what = "twice the bytes of a slot of states or a page" if states else "the bytes of a page"
        what += f" for each of {num} engines" if num > 1 else ""
        raise ValueError(
            f"--host-cache-bytes: expected at least {num * fewest}, {what}, got {given}"
        )
    return {name: int(total // len(each) // size) for name, size in each.items()}


def _file_store(model: models.Model, args: argparse.Namespace) -> FileStore:
    """The directory of --file-cache. Raises ValueError."""
    fewest = bytes_of_page(model.config, args) * num_devices(args)
    if args.file_cache_bytes < 2 * fewest:
        raise ValueError(
            f"--file-cache-bytes: expected at least {2 * fewest}, the bytes of two pages, got"
            f" {args.file_cache_bytes}"
        )
    depends = [_digest(model), jax.__version__, jax.default_backend()]
    depends += [f"{name}={getattr(args, name)}" for name in _OF_PAGES]
    digest = hashlib.sha256("\n".join(depends).encode()).hexdigest()[:16]
    # A folder of its own: the directory's mode is the operator's.
    directory = args.file_cache / "prefixes"
    return FileStore(directory, args.file_cache_bytes, digest, args.owners)


# Options on which the bytes of a page depend.
_OF_PAGES = (
    "dtype",
    "kv_cache_dtype",
    "eight_bit_products",
    "page_size",
    "kv_select",  # keys of outputs depend on what the layers before read
    "tensor_parallel",
    "context_parallel",
)


def bytes_of_states(config: models.ModelConfig, args: argparse.Namespace) -> int:
    """Bytes of all slots of recurrent states on one device; 0: the model has none."""
    if config.recurrent is None:
        return 0
    num_slots = capacities(engine_config(1, args), config).num_states
    states = jax.eval_shape(lambda: models.init_states(config, num_slots, args.dtype))
    num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(states))
    return int(num_bytes // args.tensor_parallel)


def _fewest_pages(args: argparse.Namespace) -> int:
    """The number of pages that one step full of prompts needs, or a sequence with a kv policy."""
    fewest = int(-(-args.max_step_tokens // args.page_size))
    if args.kv_policy is None:
        return fewest
    return max(fewest, num_pages_needed(args.kv_policy, args.page_size))


def choose_num_pages(model: models.Model, args: argparse.Namespace, page_bytes: int) -> int:
    """Returns --num-pages or the number that fits; with several processes, the smallest of theirs.

    Raises ProcessesError if processes have different options or models.
    """
    most = _default_num_pages(model.config, args, page_bytes)
    num_pages = args.num_pages or max(_fewest_pages(args), most)
    if args.processes is None:
        return int(num_pages)
    own = {f"--{name.replace('_', '-')}": getattr(args, name) for name in _OF_ALL_PROCESSES}
    own |= {"version of jax": jax.__version__}
    own |= {"model": _digest(model)}
    return int(args.processes.agree(own, min, num_pages))


# Options that must be the same in all processes, as the devices' results depend on them.
_OF_ALL_PROCESSES = (
    "max_model_len",
    "dtype",
    "kv_cache_dtype",
    "eight_bit_products",
    "num_pages",
    "page_size",
    "max_running",
    "max_step_tokens",
    "batch_invariant",
    "tensor_parallel",
    "expert_parallel",
    "context_parallel",
)


def _digest(model: models.Model) -> str:
    """A digest of the config, of some values of each weight, and of the sum of its bytes."""
    digest = hashlib.sha256(repr(model.config).encode())
    for path, weight in jax.tree_util.tree_leaves_with_path(model.params):
        values = np.asarray(weight).reshape(-1)
        some = values[:: max(1, values.size // _DIGEST_VALUES)]
        digest.update(f"{path} {weight.shape} {weight.dtype}".encode() + some.tobytes())
        digest.update(b"%d" % np.add.reduce(values.view(f"u{values.itemsize}"), dtype=np.uint64))
    return digest.hexdigest()[:16]


def _bytes_of_loras(config: models.ModelConfig, args: argparse.Namespace) -> int:
    """The most bytes that all adapters take on one device."""
    if not args.max_loras:
        return 0
    rank = args.max_lora_rank or LORA_RANK
    numbers = models.LoraPools.numbers_per_rank(config)
    return int(args.max_loras * rank * numbers * jnp.dtype(args.dtype).itemsize)


def _bytes_of_sums(config: models.ModelConfig, args: argparse.Namespace) -> int:
    """The most bytes of the sums of weights on one device with a kv policy of prompts."""
    if not isinstance(args.kv_policy, PromptPolicy):
        return 0
    heads = -(-config.num_kv_heads // args.tensor_parallel)
    return 4 * config.page_groups[0] * heads * int(config.max_positions)


def _default_num_pages(
    config: models.ModelConfig, args: argparse.Namespace, page_bytes: int
) -> int:
    """Pages that fit in free device memory; far fewer on a CPU, as others need its memory too."""
    num_running = args.max_running * -(-config.max_positions // args.page_size)
    if memory := (args.devices or jax.local_devices())[0].memory_stats():
        left = memory["bytes_limit"] - memory["bytes_in_use"]
        left -= _SAMPLING_BYTES * args.max_running * config.vocab_size
        left -= _bytes_of_loras(config, args) + _bytes_of_sums(config, args)
        budget = int(args.memory_share * left)
        most = _MAX_CACHE * num_running
    else:
        budget, most = _CPU_BYTES, num_running
    return min(max(0, budget - bytes_of_states(config, args)) // page_bytes, most)
