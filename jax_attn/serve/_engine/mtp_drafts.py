"""Drafts of a model's own layer for multi-token prediction.

The layer is a draft model (`draft_model`) that reads the model's last hidden states, too. They are
in the model's pages, where a step leaves them beside keys and values: so prefixes, preemption and
pages that come back from the host need no extra handling. After the first draft the layer goes on
from its own hidden state. What it keeps of drafts that were accepted is replaced: it reads their
tokens again, with the model's hidden states.

The last place of a page has the token after the page, too. If sequences part there, drafts of one
may be a little worse, as the layer has read the other's token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled

from jax_attn import models
from jax_attn.serve._engine import sampling
from jax_attn.serve._engine.buckets import Batch, Bucket
from jax_attn.serve._engine.device import Device, DeviceConfig, Scores, compile_jitted, xla_options
from jax_attn.serve._engine.draft_model import DraftModel
from jax_attn.serve._engine.engine_config import EngineConfig
from jax_attn.serve._scheduling.step_plan import ScheduledSequence


def with_hidden(model: models.Model, draft_model: models.Model | None) -> models.Model:
    """The model, whose pages also hold hidden states if the draft model needs them."""
    if draft_model is None or not draft_model.config.mtp:
        return model
    return model._replace(config=dataclasses.replace(model.config, keeps_hidden=True))


def check_mtp(layer: models.Model, model: models.Model, config: EngineConfig) -> None:
    """Raises ValueError: the layer is another model's, or the engine cannot run it."""
    if layer.config != models.mtp_config(model.config):
        raise ValueError(
            "a draft model: expected the layer for multi-token prediction of this"
            f" {model.config.family} model, got that of another {layer.config.family} model."
        )
    refused = [
        ("kv_dtype", None, config.kv_dtype),
        ("context_parallel", 1, config.context_parallel),
        ("expert_group", None, config.expert_group),
    ]
    for name, neutral, value in refused:
        if value != neutral:
            raise ValueError(
                f"EngineConfig: {name}: expected {neutral} with drafts of multi-token prediction,"
                f" got {value}; use a draft model, or drafts from the text."
            )


class MtpDevice(Device):
    """The layer's weights and pages. It reads the model's pages, embedding and head."""

    def __init__(self, layer: models.Model, config: DeviceConfig, of_model: Device):
        """of_model: the model's device; its config keeps hidden states."""
        self._of_model = of_model
        # The hidden states of the last rows of the last step: [max_running, hidden].
        shape = config.capacities.max_running, layer.config.hidden_size
        super().__init__(layer, config)
        self._made = self._everywhere(jnp.zeros(shape, self.dtype))

    def forward(
        self, batch: Batch, newest: jax.Array | None = None, hidden: np.ndarray | None = None
    ) -> Scores:
        """Runs a step of the layer. newest: see Device.forward.

        hidden: [num_tokens of the bucket] i32. Where the hidden state of each token is: the row of
          the model's pages, or ~(row of the last step). None: anywhere, for measurements.
        """
        if hidden is None:
            hidden = np.zeros(batch.bucket.num_tokens, np.int32)
        logits, rows, self._k_pages, self._v_pages, self._made = self.executable(batch.bucket)(
            self._weights,
            self._of_model.embedding_and_head(),
            batch.words,
            self.newest if newest is None else newest,
            self._k_pages,
            self._v_pages,
            self._of_model.pages,
            hidden,
            self._made,
        )
        return Scores(logits, rows)

    def compile_forward(self, bucket: Bucket, options: dict[str, Any] | None = None) -> Compiled:
        """See Device.compile_forward."""
        weights, state, (k_pages, v_pages, _), *_ = self._shapes
        shared, model_pages, made = jax.tree.map(
            self._shape_of,
            (self._of_model.embedding_and_head(), self._of_model.pages, self._made),
        )
        compute = _make_forward(self.config, self._of_model.config, self._tree, bucket)
        if self._split is not None:
            pages, everywhere = self._split.pages_spec, P()
            compute = jax.shard_map(
                compute,
                mesh=self._split.mesh,
                in_specs=(
                    *jax.tree.map(lambda x: x.sharding.spec, (weights, shared)),
                    *(everywhere, everywhere, pages, pages, (pages, pages)),
                    *(everywhere, everywhere),
                ),
                out_specs=(everywhere, everywhere, pages, pages, everywhere),
                check_vma=False,  # as of Device
            )
        forward = jax.jit(
            compute,
            donate_argnums=(4, 5),
            compiler_options=xla_options(bucket.num_tokens, weights) | (options or {}),
        )
        words, hidden = (
            jax.ShapeDtypeStruct((size,), jnp.int32, sharding=self._sharding)
            for size in (bucket.num_words, bucket.num_tokens)
        )
        return compile_jitted(
            *(forward, weights, shared, words, state.last_tokens, k_pages, v_pages, model_pages),
            *(hidden, made),
        )


def _make_forward(
    config: models.ModelConfig, of_model: models.ModelConfig, tree: Any, bucket: Bucket
) -> Callable[..., Any]:
    """(weights, shared, words, last_tokens, k_pages, v_pages, model_pages, hidden, made) ->
    logits, rows, k_pages, v_pages, made.

    weights: the leaves of the layer's params, whose structure is `tree`. shared: embedding and
    head. Others: see buckets.make_forward and MtpDevice.forward.
    """

    def forward(
        weights: list[jax.Array],
        shared: models.Params,
        words: jax.Array,
        last_tokens: jax.Array,
        k_pages: models.Pages,
        v_pages: models.Pages | None,
        model_pages: tuple[Any, Any],
        hidden: jax.Array,
        made: jax.Array,
    ) -> tuple[Any, ...]:
        params = jax.tree.unflatten(tree, weights) | shared
        given = bucket.unpack(words)
        tokens, positions = given.inputs
        tokens = jnp.where(tokens < 0, last_tokens[~tokens], tokens)
        kept = models.kept_hidden(*model_pages, jnp.maximum(hidden, 0), of_model)
        states = jnp.where(hidden[:, None] < 0, made[jnp.maximum(~hidden, 0)], kept)
        logits, k_pages, v_pages, new = models.forward(
            params,
            config,
            tokens,
            positions,
            k_pages,
            v_pages,
            given.plans,
            given.logit_rows,
            hidden=states,
        )
        made = jnp.zeros_like(made).at[: len(new)].set(new)
        return logits, given.rows, k_pages, v_pages, made

    return forward


class MtpDraftModel(DraftModel):
    """Places are those of hidden states; the token there is the one behind."""

    device: MtpDevice
    num_ahead = 1

    def _forward(
        self, entries: Seq[ScheduledSequence], newest: jax.Array | None = None
    ) -> tuple[Scores, sampling.Kind]:
        batch = self.device.plan(entries)
        hidden = np.zeros(batch.bucket.num_tokens, np.int32)
        begin = 0
        for i, entry in enumerate(entries):
            end = begin + entry.num_tokens
            if entry.begin >= self._end(entry.seq):  # a draft's, and so of the last step
                hidden[begin:end] = ~i
            else:
                at = np.arange(entry.begin, entry.begin + entry.num_tokens, dtype=np.int32)
                pages = np.frombuffer(entry.seq.pages, np.int32)[at // self._page_size]
                hidden[begin:end] = pages * self._page_size + at % self._page_size
            begin = end
        return self.device.forward(batch, newest, hidden), batch.kind
