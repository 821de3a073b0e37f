"""Loads the models that the options name, and shows the progress."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jax_attn import models
from jax_attn.serve._engine.async_engine import AsyncEngine
from jax_attn.serve._engine.draft_model import have_same_tokens
from jax_attn.serve._engine.embedder import Embedder
from jax_attn.serve._engine.progress import progress_bar
from jax_attn.serve._engine.replicas import Replicas
from jax_attn.serve._options import LORA_RANK, MTP, num_devices, shares_experts
from jax_attn.serve._scheduling.streaming import Streaming
from jax_attn.serve._sizing import make_engine, make_replicas

log = logging.getLogger("jax_attn.serve")


def name_of(model: str) -> str:
    """The model's name for clients if --served-model-name is not given."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def load(directory: Path, args: argparse.Namespace) -> models.Model:
    """Loads a model. Raises ModelDirectoryError or ValueError."""
    config = models.load_config(directory)  # checked before the weights, which take time
    _check_config(config, directory / "config.json")
    config = _limited(config, args)
    model: models.Model = _read(directory, args, models.load)
    return model._replace(config=config)


def with_limit(model: models.Model, args: argparse.Namespace) -> models.Model:
    """The model with the limit of --max-model-len. Raises ValueError."""
    return model._replace(config=_limited(model.config, args))


def _check_config(config: models.ModelConfig, path: Path) -> None:
    """Raises ModelDirectoryError for a config of `path` that cannot be served."""
    if not config.eos_tokens:
        raise models.ModelDirectoryError(
            f"{path}: eos_token_id: expected a token that ends texts, here or in "
            "generation_config.json, got none"
        )
    try:
        models.attention_specs(config, max_batch=1, max_qo_tokens=1, max_kv_pages=1)
    except (ValueError, NotImplementedError) as error:
        raise models.ModelDirectoryError(f"{path}: {error}") from None


def _limited(config: models.ModelConfig, args: argparse.Namespace) -> models.ModelConfig:
    """Returns the config for sequences of up to --max-model-len. Raises ValueError."""
    # With `streaming` texts may be longer than what the model sees of them.
    if args.max_model_len is not None and not isinstance(args.kv_policy, Streaming):
        if args.max_model_len > config.max_positions:
            raise ValueError(
                f"--max-model-len: expected at most the model's {config.max_positions}, got "
                f"{args.max_model_len}"
            )
        config = config.limited(args.max_model_len)
    if (short := config.short_context) is not None:
        log.warning(
            "all sequences have the LongRoPE factors for long contexts; with --max-model-len %d "
            "they have those for short ones, as transformers uses for that many tokens",
            short,
        )
    return config


def _read(directory: Path, args: argparse.Namespace, load: Callable[..., Any]) -> Any:
    """load: models.load, or a function of its arguments."""
    with _loading(directory) as show:
        # Weights that devices share are copied to each device from host memory.
        host = None if _is_alone(args) else jax.local_devices(backend="cpu")[0]
        with jax.default_device(host):
            return load(directory, args.dtype, show, in_panels=_wants_panels(args))


def _is_alone(args: argparse.Namespace) -> bool:
    """Whether one device serves."""
    return num_devices(args) * args.data_parallel == 1 and args.devices is None


def _wants_panels(args: argparse.Namespace) -> bool:
    return _is_alone(args) and jax.default_backend() == "cpu"


def load_vision(directory: Path, args: argparse.Namespace) -> models.VisionModel | None:
    """Loads the model's vision tower; None: it has none that is supported, or this server serves
    texts only (several processes, a kv policy or selection, engines that share experts).
    Raises ModelDirectoryError."""
    serves_texts_only = (
        args.processes is not None
        or args.kv_policy is not None
        or args.kv_select is not None
        or shares_experts(args)
    )
    if serves_texts_only or not models.has_vision(directory):
        return None
    with _loading(directory) as show:
        return models.load_vision(directory, args.dtype, show, in_panels=_wants_panels(args))


def load_draft_model(
    model: models.Model, directory: str | os.PathLike[str] | None, args: argparse.Namespace
) -> models.Model | None:
    """Loads the draft model, if there is one. Raises ModelDirectoryError or ValueError.

    directory: of the model.
    """
    if args.draft_model is None:
        return None
    if args.draft_model == MTP:
        return _load_mtp(model, directory, args)
    draft_model: models.Model = _read(models.fetch(args.draft_model), args, models.load)
    if not have_same_tokens(draft_model, model):
        raise ValueError(
            f"--draft-model: expected one with the tokens of {args.model}, got"
            f" {args.draft_model}, which has others"
        )
    return draft_model


def _load_mtp(
    model: models.Model, directory: str | os.PathLike[str] | None, args: argparse.Namespace
) -> models.Model:
    """Loads the model's own layer for multi-token prediction. Raises as `load_draft_model`."""
    if directory is None:
        raise ValueError("--draft-model: expected a directory of the model with mtp, got none")
    try:
        config = models.mtp_config(model.config)
        load = lambda where, *rest, **kwargs: models.load_params(where, config, *rest, **kwargs)  # noqa: E731
        params = _read(Path(directory), args, load)
    except ValueError as error:
        raise ValueError(f"--draft-model mtp: {error}") from None
    return models.Model(config, params, model.tokenizer)


def load_loras(
    model: models.Model, args: argparse.Namespace
) -> list[tuple[str, models.LoraWeights]]:
    """Reads the adapters of --lora, and chooses --max-lora-rank if it is not given.

    Raises ModelDirectoryError.
    """
    loaded = [(name, models.load_lora(where, model.config)) for name, where in args.lora]
    if args.max_lora_rank is None and loaded:
        args.max_lora_rank = max(LORA_RANK, *(weights.rank for _, weights in loaded))
    return loaded


def load_embedding(
    directory: Path, name: str, args: argparse.Namespace
) -> tuple[models.EmbeddingModel, Embedder]:
    """Loads the embedding model, if there is one. Raises ModelDirectoryError."""
    with _loading(directory) as show:
        in_panels = _wants_panels(args)
        model = models.load_embedding(directory, args.dtype, show, in_panels=in_panels)
    return model, Embedder(model, name)


class Loaded(NamedTuple):
    """The models that the options name, and what runs them, not started.

    model: without weights; None with an embedding model alone, like the engine.
    vision: without weights; None: the model reads texts only.
    """

    name: str
    aliases: tuple[str, ...]
    directory: Path
    engine: AsyncEngine | Replicas | None
    model: models.Model | None
    vision: models.VisionModel | None
    embedding: tuple[models.EmbeddingModel, Embedder] | None


def load_all(args: argparse.Namespace) -> Loaded:
    """Loads the models and makes the engine. Raises OSError, ValueError, ProcessesError."""
    name, *aliases = args.served_model_name or [name_of(args.model or args.embedding_model)]
    if args.model is None:
        directory = models.fetch(args.embedding_model, args.revision)
        embedding = load_embedding(directory, name, args)
        return Loaded(name, tuple(aliases), directory, None, None, None, embedding)
    directory = models.fetch(args.model, args.revision)
    model = load(directory, args)
    # Loaded before the engine, which takes the memory that is left.
    beside, draft_model = None, load_draft_model(model, directory, args)
    vision = load_vision(directory, args)
    if args.embedding_model is not None:
        fetched = models.fetch(args.embedding_model)
        beside = load_embedding(fetched, name_of(args.embedding_model), args)
    loras = load_loras(model, args)
    make = make_engine if args.data_parallel == 1 else make_replicas
    engine = make(model, args, draft_model, vision)
    for adapter, weights in loras:
        engine.preload_lora(adapter, weights)
    # The engine holds the weights that it needs.
    model = model._replace(params={})
    if vision is not None:
        vision = dataclasses.replace(vision, params={})
    return Loaded(name, tuple(aliases), directory, engine, model, vision, beside)


@contextlib.contextmanager
def _loading(directory: Path) -> Iterator[Callable[[int, int], None]]:
    """Shows the progress. Yields show(numbers read, numbers of all)."""
    log.info("loading %s", directory)
    begin = time.monotonic()
    with progress_bar("load", " weight", unit_scale=True) as bar:

        def show(num_read: int, num_all: int) -> None:
            bar.total = num_all
            bar.update(num_read - bar.n)

        yield show
    log.info("loaded in %.1f s", time.monotonic() - begin)
