"""EngineConfig, and the configurations of the scheduler and the device that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax

from jax_attn import models
from jax_attn.models._layers.kept_keys import why_not_kept
from jax_attn.models._layers.moved_pages import why_not_moved
from jax_attn.serve._engine import buckets
from jax_attn.serve._engine.device import DeviceConfig
from jax_attn.serve._scheduling.kv_policies import KvPolicy
from jax_attn.serve._scheduling.quest import Quest
from jax_attn.serve._scheduling.step_plan import STARVATION_SECONDS, SchedulerConfig
from jax_attn.serve._scheduling.streaming import Streaming, StreamingPages
from jax_attn.serve._scheduling.tenants import TenantLimits

if TYPE_CHECKING:
    from jax_attn.serve._engine.expert_group import ExpertGroup
    from jax_attn.serve._engine.file_store import FileStore


@dataclass(frozen=True)
class EngineConfig:
    """Capacities and policy. The engine's dtype is that of the model's weights.

    batch_invariant: the logits of a sequence, and so its text for a seed, have the same bits
    whatever runs beside it, and however it is chunked, cached or preempted. This holds between
    engines of one config on one kind of device. Each step is then padded to max_step_tokens, so
    choose a small value.
    """

    num_pages: int  # of the kv cache
    page_size: int = 16  # tokens
    kv_dtype: str | None = None  # of the kv cache, see AttentionSpec; scales of float8_e4m3fn are 1
    eight_bit_products: bool = False  # see AttentionSpec
    max_running: int = 32  # sequences that run at once
    max_step_tokens: int = 512  # query tokens of a step
    prefill_chunk: int | None = None  # about how many are prompt tokens beside decodes; None: all
    max_prefill_chunk: int = 0  # prefill_chunk grows up to this while many sequences wait
    max_waiting: int = 1024  # sequences in the queue
    max_kv_pages_step: int | None = None  # page table entries of a step; None: enough
    tenant_limits: TenantLimits = TenantLimits()  # of each tenant
    starvation_seconds: float = STARVATION_SECONDS  # see SchedulerConfig
    # What a sequence keeps of its cache; None: everything. See `streaming` and `prompt_policy`.
    kv_policy: KvPolicy | None = None
    kv_select: Quest | None = None  # what a decode reads of its cache; None: everything
    prefix_cache: bool = True
    num_host_pages: int = 0  # of the prefix cache in the host's memory, for evicted pages
    # Slots of evicted states there; None: as many as of the device, if it has pages.
    num_host_states: int | None = None
    files: FileStore | None = None  # for pages and states that leave the host's memory
    # Slots of recurrent states, of running sequences and of checkpoints, if the model has recurrent
    # layers; None: four for each of max_running.
    num_states: int | None = None
    checkpoint_tokens: int = 2048  # between checkpoints of a long prompt
    batch_invariant: bool = False
    jump_forward: bool = True  # tokens that a grammar forces are appended without a step
    # Drafts of each sequence that a step verifies. They come from the sequence's own text, or from
    # a draft model if there is one.
    max_drafts: int = 0
    # The most steps of decodes that are scheduled and launched at once, see StepPlan.
    burst_steps: int = 1
    max_grammars: int = 128  # compiled grammars kept
    max_loras: int = 0  # LoRA adapters at a time
    max_lora_rank: int = 16  # the largest
    tensor_parallel: int = 1  # devices that share heads, MLPs, experts and vocabulary
    # With tensor_parallel: tokens go to their experts by all-to-all; see TensorParallel.
    expert_parallel: bool = False
    # The engines with which this one shares experts, one device each; None: it has all experts.
    expert_group: ExpertGroup | None = None
    # Devices that share the slots of each page; multiplies tensor_parallel.
    context_parallel: int = 1
    # tensor_parallel * context_parallel devices of JAX; None: the first ones.
    devices: tuple[jax.Device, ...] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.max_running <= self.max_step_tokens:
            raise ValueError(
                "EngineConfig: max_running: expected 1 to max_step_tokens = "
                f"{self.max_step_tokens}, got {self.max_running}."
            )
        if self.max_loras and not 1 <= self.max_lora_rank <= models.MAX_LORA_RANK:
            raise ValueError(
                f"EngineConfig: max_lora_rank: expected 1 to {models.MAX_LORA_RANK}, got"
                f" {self.max_lora_rank}."
            )
        if self.burst_steps > 1 and (self.max_drafts or self.expert_group is not None):
            raise ValueError(
                "EngineConfig: burst_steps: expected 1 with max_drafts or an expert_group, got"
                f" {self.burst_steps}."
            )
        if self.num_host_pages and not self.prefix_cache:
            raise ValueError(
                "EngineConfig: num_host_pages: expected 0 without prefix_cache, got"
                f" {self.num_host_pages}."
            )
        if self.files is not None and not self.num_host_pages:
            raise ValueError("EngineConfig: files: expected None without num_host_pages, got some.")
        for name in ("tensor_parallel", "context_parallel"):
            if (count := getattr(self, name)) < 1:
                raise ValueError(f"EngineConfig: {name}: expected at least 1, got {count}.")
        if self.expert_parallel and self.tensor_parallel == 1:
            raise ValueError(
                "EngineConfig: expert_parallel: expected False with tensor_parallel = 1, got True."
            )
        if self.expert_group is not None and self.tensor_parallel * self.context_parallel > 1:
            raise ValueError(
                "EngineConfig: expert_group: expected None with tensor_parallel or context_parallel"
                " of more than 1, got a group."
            )
        if self.page_size % self.context_parallel:
            raise ValueError(
                "EngineConfig: page_size: expected a multiple of context_parallel = "
                f"{self.context_parallel}, got {self.page_size}."
            )
        if self.batch_invariant and self.context_parallel > 1:
            raise ValueError(
                "EngineConfig: batch_invariant: expected False with context_parallel > 1, got True."
            )


_STATES_EACH = 4  # slots for each running sequence: its own, and some checkpoints


def capacities(config: EngineConfig, model: models.ModelConfig) -> SchedulerConfig:
    """The scheduler's configuration.

    Raises ValueError: kv_policy or kv_select for a model that it does not suit.
    """
    for name in ("kv_policy", "kv_select"):
        policy = getattr(config, name)
        why_not = why_not_moved if isinstance(policy, Streaming) else why_not_kept
        if policy is not None and (reason := why_not(model)) is not None:
            raise ValueError(
                f"EngineConfig: {name}: expected None, as {model.family} has {reason}, got"
                f" {policy}."
            )
    max_positions, num_states = model.max_positions, 0
    if model.recurrent is not None:
        num_states = config.num_states or _STATES_EACH * config.max_running
    num_host_states = config.num_host_states
    if num_host_states is None:
        num_host_states = num_states if config.num_host_pages else 0
    pages_each = -(-max_positions // config.page_size)
    if isinstance(config.kv_policy, Streaming):
        pages_each = StreamingPages(config.kv_policy, config.page_size).max_pages
    elif config.kv_policy is not None:  # the kept keys have pages beside those of the prompt
        pages_each += config.kv_policy.num_pages(config.page_size)
    # Shared pages count once for each sequence, so this may exceed num_pages.
    enough = min(config.max_running * pages_each, 4 * config.num_pages)
    sizes = []
    if not config.batch_invariant:
        sizes = buckets.sizes(config.max_running, config.max_step_tokens, config.max_drafts > 0)
    return SchedulerConfig(
        page_size=config.page_size,
        num_pages=config.num_pages,
        max_running=config.max_running,
        max_step_tokens=config.max_step_tokens,
        prefill_chunk=config.prefill_chunk or config.max_step_tokens,
        max_prefill_chunk=config.max_prefill_chunk,
        max_waiting=config.max_waiting,
        max_kv_pages_step=config.max_kv_pages_step or enough,
        starvation_seconds=config.starvation_seconds,
        tenant_limits=config.tenant_limits,
        kv_policy=config.kv_policy,
        prefix_cache=config.prefix_cache,
        step_sizes=tuple(num_tokens for num_tokens, _ in sizes),
        num_states=num_states,
        num_host_pages=config.num_host_pages,
        num_host_states=num_host_states,
        checkpoint_tokens=config.checkpoint_tokens,
        whole_pictures=model.sees_pictures,
        burst_steps=config.burst_steps,
    )


def device_config(
    model: models.ModelConfig,
    config: EngineConfig,
    picture_shape: tuple[int, int] | None = None,
    longest_picture: int = 0,
) -> DeviceConfig:
    return DeviceConfig(
        capacities(config, model),
        batch_invariant=config.batch_invariant,
        kv_dtype=config.kv_dtype,
        eight_bit_products=config.eight_bit_products,
        tensor_parallel=config.tensor_parallel,
        expert_parallel=config.expert_parallel,
        context_parallel=config.context_parallel,
        max_drafts=config.max_drafts,
        max_loras=config.max_loras,
        max_lora_rank=config.max_lora_rank,
        devices=config.devices,
        picture_shape=picture_shape,
        longest_picture=longest_picture,
        kv_select=config.kv_select,
    )
