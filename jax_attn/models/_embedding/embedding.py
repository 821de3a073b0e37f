"""Embedding models: an encoder or a decoder, and pooling of its last layer to a vector per text.

An encoder with a head makes scores instead: `EmbeddingModel.scoring` says of what.

    model = models.load_embedding("all-MiniLM-L6-v2", dtype="float32")
    batch = models.EmbeddingBatch.make(model, [[101, 7592, 102], [101, 2088, 102]], 64, 8)
    vectors = models.embed(model, batch)[:2]  # [2, size] f32

Sequences of different lengths are packed back to back, without padding between them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja
from jax_attn.models._config.config import LayerKind, ModelConfig
from jax_attn.models._config.directory import (
    ModelDirectoryError,
    existing,
    existing_directory,
    read_json,
)
from jax_attn.models._config.keys import Keys, one_of
from jax_attn.models._embedding import encoder, modernbert, scoring
from jax_attn.models._embedding.encoder import EncoderConfig
from jax_attn.models._embedding.modernbert import ModernBertConfig
from jax_attn.models._embedding.scoring import Scoring
from jax_attn.models._families import parse
from jax_attn.models._layers import decoder
from jax_attn.models._loading import loading
from jax_attn.models._weights import float_weights, weights
from jax_attn.models._weights.float_weights import Weight
from jax_attn.models._weights.protocols import Tokenizer
from jax_attn.models._weights.tensors import Parts
from jax_attn.models._weights.weights import Params

Mode = Literal["cls", "mean", "last"]
Config: TypeAlias = EncoderConfig | ModernBertConfig | ModelConfig
Kind: TypeAlias = LayerKind | modernbert.Layer


@dataclasses.dataclass(frozen=True)
class Pooling:
    """How the last layer becomes a vector. Hashable."""

    mode: Mode = "mean"  # the first token's row, the mean of all rows, or the last token's row
    normalize: bool = False  # scale vectors to length 1


@dataclasses.dataclass(frozen=True)
class EmbeddingModel:
    """An embedding model, as `load_embedding` returns it.

    max_tokens: tokens of the longest sequence.
    sizes: vector sizes that a client may ask for, ascending; the last is the model's own.
    scoring: what the model's scores mean, if it makes scores, as cross-encoders do; its "vectors"
      are then logits, and `pooling` is not used.
    """

    config: Config
    params: Params
    tokenizer: Tokenizer
    pooling: Pooling
    max_tokens: int
    sizes: Seq[int]
    scoring: Scoring | None = None

    def operations(self, num_tokens: int) -> int:
        """Approximate operations per token and layer when it attends to num_tokens: two per weight,
        and four per element of a key."""
        num_weights = sum(leaf.size for leaf in jax.tree.leaves(self.params["layers"][-1]))
        num_heads, _ = _num_heads(self.config)
        return 2 * num_weights + 4 * num_tokens * num_heads * self.config.head_dim

    @property
    def size(self) -> int:
        """Elements of a vector; for a model with a head, of its scores."""
        return self.config.hidden_size if self.scoring is None else len(self.scoring.labels)


# ---- directories -------------------------------------------------------------------------------


def load_embedding(
    directory: str | Path,
    dtype: jax.typing.DTypeLike = "bfloat16",
    progress: Callable[[int, int], None] | None = None,
    *,
    in_panels: bool = False,
) -> EmbeddingModel:
    """Loads a directory of sentence-transformers, or of an encoder alone.

    An encoder alone has the default pooling of sentence-transformers: the mean, not normalized. One
    whose `architectures` is of sequence classification has its head, and makes scores. So does
    Qwen3-Reranker: a qwen3 model without pooling, whose score is that of "yes" as its next token.

    Args: see `load`. in_panels is for encoders; other models' weights stay as they are.

    Raises:
      ModelDirectoryError: a file, key or tensor is missing or does not fit; names it.
    """
    directory = existing_directory(directory)
    path = directory / "config.json"
    keys = Keys(read_json(path), path)
    config = parse_config(keys)
    if scoring.is_scoring(keys):
        return _load_scoring(directory, keys, config, dtype, progress, in_panels)
    tokenizer = loading.load_tokenizer(directory)
    if not isinstance(config, ModelConfig):
        params = _load_params(directory, config, dtype, progress, None, in_panels)
    elif (answers := scoring.answers(directory, keys, tokenizer)) is not None:
        return _load_of_answers(directory, keys, tokenizer, answers, dtype, progress)
    else:
        params = weights.load_params(directory, config, dtype, progress, with_head=False)
    max_tokens, pooling = _modules(directory, config)
    return EmbeddingModel(
        config=config,
        params=params,
        tokenizer=tokenizer,
        pooling=pooling,
        max_tokens=max_tokens,
        sizes=_sizes(keys, config),
    )


def _load_of_answers(
    directory: Path,
    keys: Keys,
    tokenizer: Tokenizer,
    answers: tuple[int, int],
    dtype: jax.typing.DTypeLike,
    progress: Callable[[int, int], None] | None,
) -> EmbeddingModel:
    config = parse.parse_config(keys.raw, keys.path)
    if config.quantization is not None:
        raise keys.error("quantization_config: expected None for a model that scores pairs")
    params = weights.load_params(directory, config, dtype, progress)
    head = scoring.head_of_answers(params, answers)
    return EmbeddingModel(
        config=config,
        params=params | {"head": head},
        tokenizer=tokenizer,
        pooling=Pooling("last"),
        max_tokens=_max_tokens(directory, config, "text-generation"),
        sizes=(1,),
        scoring=scoring.OF_QUESTION,
    )


def _load_scoring(
    directory: Path,
    keys: Keys,
    config: Config,
    dtype: jax.typing.DTypeLike,
    progress: Callable[[int, int], None] | None,
    in_panels: bool,
) -> EmbeddingModel:
    if isinstance(config, ModelConfig):
        raise keys.error(
            f"architectures: expected an encoder for sequence classification "
            f"({one_of(ENCODERS)}), got model_type {config.family!r}"
        )
    means = scoring.parse(keys, config, directory)
    head = scoring.head_tensors(config, len(means.labels))
    return EmbeddingModel(
        config=config,
        params=_load_params(directory, config, dtype, progress, head, in_panels),
        tokenizer=loading.load_tokenizer(directory),
        pooling=Pooling("mean" if _head_reads_mean(config) else "cls"),
        max_tokens=_max_tokens(directory, config, "sequence-classification"),
        sizes=(len(means.labels),),
        scoring=means,
    )


def _head_reads_mean(config: Config) -> bool:
    return isinstance(config, ModernBertConfig) and config.classifier_mean


def _load_params(
    directory: Path,
    config: EncoderConfig | ModernBertConfig,
    dtype: jax.typing.DTypeLike,
    progress: Callable[[int, int], None] | None,
    head: dict[str, Parts] | None,
    in_panels: bool,
) -> Params:
    if isinstance(config, ModernBertConfig):
        tree, is_other = modernbert.tensors(config), modernbert.is_other
    else:
        tree, is_other = encoder.tensors(config), encoder.is_other
    if head is not None:
        tree["head"] = {name: Weight(parts) for name, parts in head.items()}
    return float_weights.load_tree(
        directory, config, tree, is_other, dtype, progress, in_panels=in_panels
    )


ENCODERS: dict[str, Callable[[Keys], EncoderConfig | ModernBertConfig]] = {
    **encoder.FAMILIES,
    "modernbert": modernbert.parse,
}


def parse_config(keys: Keys) -> Config:
    """Returns the config of an embedding model from the keys of its config.json."""
    keys.need("model_type")
    keys.expect("model_type", *ENCODERS, *parse.FAMILIES)
    family = keys.need("model_type")
    return ENCODERS[family](keys) if family in ENCODERS else _decoder_config(keys)


def _decoder_config(keys: Keys) -> ModelConfig:
    config = parse.parse_config(keys.raw, keys.path)
    if config.latent is not None or config.recurrent is not None or config.has_special_layers:
        raise keys.error(f"model_type: {config.family!r} makes no embeddings here")
    return dataclasses.replace(config, tie_embeddings=True)  # no LM head: some files lack it


def _sizes(keys: Keys, config: Config) -> Seq[int]:
    """Returns the sizes of vectors: several for Matryoshka models (arXiv 2205.13147), in which a
    prefix of a vector is an embedding, too."""
    size = config.hidden_size
    if (named := keys.get("matryoshka_dimensions")) is not None:
        is_list = isinstance(named, list) and all(type(x) is int and 0 < x <= size for x in named)
        if not is_list:
            raise keys.error(
                f"matryoshka_dimensions: expected integers from 1 to {size}, got {named!r}"
            )
        return tuple(sorted({*named, size}))
    # Qwen3-Embedding is a Matryoshka model, but its files do not say so.
    if keys.flag("is_matryoshka", default=config.family == "qwen3"):
        return range(1, size + 1)
    return (size,)


_MODES: dict[str, Mode | None] = {
    "cls": "cls",
    "mean": "mean",
    "lasttoken": "last",
    **dict.fromkeys(("max", "mean_sqrt_len_tokens", "weightedmean")),
}
_OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


def _modules(directory: Path, config: Config) -> tuple[int, Pooling]:
    """Returns the longest sequence and the pooling, from modules.json and the files it names."""
    path = directory / "modules.json"
    if not path.is_file():
        if isinstance(config, ModelConfig):
            raise ModelDirectoryError(
                f"{path}: no such file, which says how a {config.family} model's layers are pooled"
            )
        return config.max_positions, Pooling()
    modules = read_json(path, list)
    pooling, max_tokens = Pooling(), config.max_positions
    kinds = []
    for module in modules:
        name, folder = (
            module.get(key) if isinstance(module, dict) else None for key in ("type", "path")
        )
        if not isinstance(name, str) or not isinstance(folder, str) or ".." in Path(folder).parts:
            raise ModelDirectoryError(f"{path}: expected a type and a path, got {module!r}")
        kinds.append(kind := name.rpartition(".")[2])
        if kind == "Transformer":
            if folder not in ("", "."):
                raise ModelDirectoryError(f"{path}: path: expected '', got {folder!r}")
            max_tokens = _max_tokens(directory, config)
        elif kind == "Pooling":
            pooling = Pooling(_mode(existing(directory / folder / "config.json"), config))
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ModelDirectoryError(
            f"{path}: expected Transformer, Pooling and perhaps Normalize, got {', '.join(kinds)}"
        )
    return max_tokens, dataclasses.replace(pooling, normalize=kinds[-1] == "Normalize")


def _max_tokens(directory: Path, config: Config, task: str = "feature-extraction") -> int:
    """Returns the length at which sentence-transformers truncates texts. Longer ones raise here."""
    path = directory / "sentence_bert_config.json"
    longest = config.max_positions
    if path.is_file():
        keys = Keys(read_json(path), path)
        keys.expect("do_lower_case", False, None)  # lower-casing in addition to the tokenizer's
        keys.expect("transformer_task", task, None)
        keys.expect("module_output_name", _OUTPUTS[task], None)
        if keys.get("max_seq_length") is not None:
            return min(keys.size("max_seq_length"), longest)
    path = directory / "tokenizer_config.json"
    if path.is_file():
        keys = Keys(read_json(path), path)
        if keys.get("model_max_length") is not None:
            longest = min(longest, int(keys.number("model_max_length")))
    return longest


_OUTPUTS = {
    "feature-extraction": "token_embeddings",
    "sequence-classification": "scores",
    "text-generation": "causal_logits",
}


def _mode(path: Path, config: Config) -> Mode:
    keys = Keys(read_json(path), path)
    keys.expect("include_prompt", True)  # only the client knows which tokens are the prompt
    size = keys.get("embedding_dimension", keys.get("word_embedding_dimension"))
    if size not in (None, config.hidden_size):
        raise keys.error(f"embedding_dimension: expected {config.hidden_size}, got {size!r}")
    named = keys.get("pooling_mode")
    if named is None:
        named = [mode for key, mode in _OLD_MODES.items() if keys.flag(key)] or "mean"
    if isinstance(named, list) and len(named) == 1:
        (named,) = named
    mode = _MODES.get(named) if isinstance(named, str) else None
    if mode is None:
        supported = [name for name, known in _MODES.items() if known]
        raise keys.error(f"pooling_mode: expected {one_of(supported)}, got {named!r}")
    return mode


# ---- batches -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class EmbeddingBatch:
    """Sequences packed back to back, then padding.

    tokens, positions, types: [num_tokens] i32. types: 1 for a pair's second text, otherwise 0.
    lens: [num_rows] i32. Tokens of each sequence; 0 for an unused row.
    plans: for each chunk that has tokens, one plan per window of the model's layers; an encoder has
      one window.
    chunk: tokens of a chunk, a divisor of num_tokens.
    """

    tokens: Any
    positions: Any
    types: Any
    lens: Any
    plans: tuple[tuple[ja.AttentionPlan, ...], ...]
    chunk: int

    @staticmethod
    def make(
        model: EmbeddingModel,
        sequences: Seq[Seq[int]],
        num_tokens: int,
        num_rows: int,
        chunk: int | None = None,
        seconds: Seq[int] | None = None,
    ) -> EmbeddingBatch:
        """Packs sequences into a batch and plans it.

        seconds: for each sequence, where its tokens of type 1 begin; None: nowhere.
        num_tokens, num_rows: capacity in tokens and in sequences, which fixes the shapes. On CPUs
          1,024 to 2,048 tokens are the fastest: the arrays of larger batches leave the caches.
        chunk: tokens of one piece of work; None: num_tokens.

        Raises ValueError if either capacity is exceeded, or if chunk does not divide num_tokens.
        """
        lens = np.array([len(each) for each in sequences], np.int32)
        used = int(lens.sum())
        chunk = chunk or num_tokens
        if used > num_tokens or len(sequences) > num_rows:
            raise ValueError(
                f"EmbeddingBatch: expected at most {num_tokens} tokens of {num_rows} sequences, "
                f"got {used} of {len(sequences)}"
            )
        if num_tokens % chunk:
            raise ValueError(
                f"EmbeddingBatch: chunk: expected a divisor of {num_tokens}, got {chunk}"
            )
        tokens, all_lens = np.zeros(num_tokens, np.int32), np.zeros(num_rows, np.int32)
        tokens[:used] = list(itertools.chain.from_iterable(sequences))
        all_lens[: len(lens)] = lens
        indptr = np.append(0, lens.cumsum())
        positions = ja.rows(indptr, lens, num_tokens).position
        if isinstance(model.config, EncoderConfig):
            for begin, end in itertools.pairwise(indptr):
                positions[begin:end] = model.config.positions(tokens[begin:end])
        types = np.zeros(num_tokens, np.int32)
        for begin, end, second in zip(indptr, indptr[1:], seconds or (), strict=False):
            types[begin + second : end] = 1
        specs = _specs(model, num_tokens, num_rows, chunk)
        plans = tuple(_plans(specs, lens, begin) for begin in range(0, used, chunk))
        return EmbeddingBatch(tokens, positions, types, all_lens, plans, chunk)


def _specs(
    model: EmbeddingModel, num_tokens: int, num_rows: int, chunk: int
) -> tuple[ja.AttentionSpec, ...]:
    room: dict[str, Any] = {
        "dtype": str(model.params["embed"].dtype),
        "page_size": None,
        "max_batch": num_rows,
        "max_qo_tokens": chunk,
        "max_kv_tokens": num_tokens,
    }
    if isinstance(model.config, EncoderConfig):
        return (encoder.attention_spec(model.config, **room),)
    if isinstance(model.config, ModernBertConfig):
        return modernbert.attention_specs(model.config, **room)
    return decoder.attention_specs(model.config, **room)


def _plans(
    specs: tuple[ja.AttentionSpec, ...], lens: np.ndarray, begin: int
) -> tuple[ja.AttentionPlan, ...]:
    """Plans the chunk of queries that begins at token `begin`: the part of each sequence in the
    chunk attends to all keys of that sequence."""
    indptr = np.concatenate([[0], lens.cumsum()]).astype(np.int32)
    first, last = (
        np.clip(border, begin, begin + specs[0].max_qo_tokens)
        for border in (indptr[:-1], indptr[1:])
    )
    qo_lens = last - first
    qo_indptr = np.concatenate([[0], qo_lens.cumsum()]).astype(np.int32)
    offsets = np.where(qo_lens > 0, first - indptr[:-1], 0).astype(np.int32)
    kv_lens = np.where(qo_lens > 0, lens, 0).astype(np.int32)
    return tuple(
        ja.plan(spec, qo_indptr, kv_lens, kv_indptr=indptr, q_offsets=offsets) for spec in specs
    )


# ---- the forward pass --------------------------------------------------------------------------


def embed(model: EmbeddingModel, batch: EmbeddingBatch) -> jax.Array:
    """Returns [num_rows, size] f32, the vector of each sequence; zeros for unused rows."""
    *_, vectors = pieces(model, batch)
    return vectors


def pieces(model: EmbeddingModel, batch: EmbeddingBatch) -> Iterator[jax.Array]:
    """Embeds piece by piece, so that other work can run on the device between pieces.

    A piece is launched when the iterator is advanced. Each yield is the asynchronous result of a
    piece: wait for it before you ask for the next. The last is the result of `embed`. Pieces of
    equal shapes share an executable, and so do layers.
    """
    config = model.config
    others = {key: value for key, value in model.params.items() if key != "layers"}
    tokens, positions, types, lens, plans = jax.device_put(
        (batch.tokens, batch.positions, batch.types, batch.lens, batch.plans)
    )
    yield (x := _begin(tokens, positions, types, others, config=config))
    chunks = [(np.int32(i * batch.chunk), each) for i, each in enumerate(plans)]
    heads = None if batch.chunk == len(tokens) else _no_heads(x, config=config)
    for i, own in enumerate(model.params["layers"]):
        kind = None if isinstance(config, EncoderConfig) else config.layers[i]
        layer = {"weights": own, "config": config, "kind": kind}
        if heads is None:
            for _, each in chunks:
                yield (x := _layer(x, positions, each, **layer))
            continue
        for begin, _ in chunks:
            heads = _project(x, positions, heads, begin, chunk=batch.chunk, **layer)
            yield heads[0]
        for begin, each in chunks:
            yield (x := _attend(x, heads, begin, each, chunk=batch.chunk, **layer))
    yield _end(x, lens, others, config=config, pooling=model.pooling)


Heads: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]
"""q, k, v: [num_tokens, num_heads, head_dim]."""


@partial(jax.jit, static_argnames="config")
def _begin(
    tokens: jax.Array, positions: jax.Array, types: jax.Array, params: Params, config: Config
) -> jax.Array:
    if isinstance(config, EncoderConfig):
        return encoder.embed(tokens, positions, types, params, config)
    if isinstance(config, ModernBertConfig):
        return modernbert.embed(tokens, params, config)
    return decoder.embed(tokens, params, config)


@partial(jax.jit, static_argnames="config")
def _no_heads(x: jax.Array, config: Config) -> Heads:
    q_heads, kv_heads = _num_heads(config)
    q, k, v = (
        jnp.zeros((len(x), n, config.head_dim), x.dtype) for n in (q_heads, kv_heads, kv_heads)
    )
    return q, k, v


def _num_heads(config: Config) -> tuple[int, int]:
    """Returns the number of heads of q, and of k and v."""
    if not isinstance(config, ModelConfig):
        return config.num_heads, config.num_heads
    return config.num_qo_heads, config.num_kv_heads


@partial(jax.jit, static_argnames=("config", "kind"))
def _layer(
    x: jax.Array,
    positions: jax.Array,
    plans: tuple[ja.AttentionPlan, ...],
    weights: Params,
    config: Config,
    kind: Kind | None,
) -> jax.Array:
    """Runs a whole layer on a batch of one chunk."""
    heads = _heads_of(x, positions, weights, config, kind)
    return _with_attention(x, *heads, plans, weights, config, kind)


@partial(jax.jit, static_argnames=("config", "kind", "chunk"), donate_argnames="heads")
def _project(
    x: jax.Array,
    positions: jax.Array,
    heads: Heads,
    begin: jax.Array,
    weights: Params,
    config: Config,
    kind: Kind | None,
    chunk: int,
) -> Heads:
    """Returns `heads` with the projections of the chunk written into it."""
    rows, places = (jax.lax.dynamic_slice_in_dim(each, begin, chunk) for each in (x, positions))
    new = _heads_of(rows, places, weights, config, kind)
    q, k, v = (
        jax.lax.dynamic_update_slice_in_dim(array, part, begin, 0)
        for array, part in zip(heads, new, strict=True)
    )
    return q, k, v


@partial(jax.jit, static_argnames=("config", "kind", "chunk"), donate_argnames="x")
def _attend(
    x: jax.Array,
    heads: Heads,
    begin: jax.Array,
    plans: tuple[ja.AttentionPlan, ...],
    weights: Params,
    config: Config,
    kind: Kind | None,
    chunk: int,
) -> jax.Array:
    """Returns x with the layer's results in the rows of the chunk. heads: q, k, v of all tokens."""
    q, k, v = heads
    rows, q = (jax.lax.dynamic_slice_in_dim(each, begin, chunk) for each in (x, q))
    rows = _with_attention(rows, q, k, v, plans, weights, config, kind)
    return jax.lax.dynamic_update_slice_in_dim(x, rows, begin, 0)


def _heads_of(
    x: jax.Array, positions: jax.Array, weights: Params, config: Config, kind: Kind | None
) -> Heads:
    if isinstance(config, EncoderConfig):
        return encoder.project(x, weights, config)
    if isinstance(config, ModernBertConfig):
        assert isinstance(kind, modernbert.Layer)
        return modernbert.project(x, weights, positions, config, kind)
    assert isinstance(kind, LayerKind)
    return decoder.project(x, weights, positions, config, kind)


def _with_attention(
    x: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    plans: tuple[ja.AttentionPlan, ...],
    weights: Params,
    config: Config,
    kind: Kind | None,
) -> jax.Array:
    """Attends and finishes the layer. x, q: [n, ...], of a chunk. k, v: of all tokens."""
    if isinstance(config, EncoderConfig):
        return encoder.layer(x, ja.attention(q, k, v, plans[0]), weights, config)
    assert kind is not None
    if isinstance(config, ModernBertConfig):
        plan = plans[config.windows.index(kind.window)]
        return modernbert.finish(x, ja.attention(q, k, v, plan), weights, config)
    assert isinstance(kind, LayerKind)
    plan = plans[config.attention_kinds.index(config.attention_kind(kind))]
    attend = lambda sinks: ja.attention(q, k, v, plan, sinks=sinks)  # noqa: E731
    return decoder.layer(x, weights, config, kind, attend)


@partial(jax.jit, static_argnames=("config", "pooling"))
def _end(
    x: jax.Array,
    lens: jax.Array,
    params: Params,
    config: Config,
    pooling: Pooling,
) -> jax.Array:
    num_rows = len(lens)
    indptr = jnp.append(0, jnp.cumsum(lens))
    owners, _, last = ja.rows(indptr, lens, len(x))
    if pooling.mode != "mean":
        x = x[last if pooling.mode == "last" else indptr[:-1]]
    if isinstance(config, ModelConfig):
        x = decoder.final_norm(x, params, config)
    if isinstance(config, ModernBertConfig):
        x = modernbert.layer_norm(x, params["final_norm"], config.norm_eps)
    x = x.astype(jnp.float32)
    if pooling.mode == "mean":
        sums = jax.ops.segment_sum(x, owners, num_rows + 1, indices_are_sorted=True)
        x = sums[:num_rows] / jnp.maximum(lens, 1)[:, None]
    if "head" in params:
        x = scoring.logits(x, params["head"], config)
    if pooling.normalize:
        x /= jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
    return jnp.where(lens[:, None] > 0, x, 0)
