"""The configuration of a decoder, in one form for all families."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

from jax.sharding import Mesh

from jax_attn.models._config.quantized_files import Quantization
from jax_attn.models._config.recurrent import Recurrent
from jax_attn.models._config.rope import LongRopeScaling, Rope


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """The settings in which layers of one model may differ."""

    rope: Rope | None  # None: no position embedding
    # Tokens visible to a token, itself included; None: all before it.
    window: int | Chunk | None = None
    attention: bool = True  # False: rope and window are None
    recurrent: Recurrent | None = None  # beside attention, or in its place
    mlp: bool = True  # an MLP or experts
    temperature: Temperature | None = None  # of queries by their position
    l2_norm: bool = False  # RMSNorm of each head of q and k after RoPE, without weights
    # None: those of ModelConfig.
    num_kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    # Share of the gate's outputs that are 0, if they were normally distributed (Gemma 3n).
    sparsity: float = 0.0
    values_are_keys: bool = False  # values are the projected keys, before their norm and RoPE
    # Tokens of a picture see each other, not only those before them.
    sees_pictures: bool = False
    # The layer has no keys and values: it reads those of the last layer before it that has some
    # and that has the same window and heads.
    shares_kv: bool = False


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Positions are cut into chunks, and a token sees those before it in its own: Llama 4."""

    length: int


@dataclasses.dataclass(frozen=True)
class Temperature:
    """Queries are multiplied by 1 + beta * log(1 + floor((position + offset) / length)).

    Ministral 3 has offset 0, Llama 4 has 1 (arXiv 2501.19399).
    """

    beta: float
    length: float  # tokens up to which queries stay as they are
    offset: int = 0


@dataclasses.dataclass(frozen=True)
class NormedResidual:
    """The norm's output goes on as the residual, not its input (MiniMax, arXiv 2501.08313).

    Each part has a factor of that residual, and one of its own output.
    """

    attention: tuple[float, float]
    recurrent: tuple[float, float]
    mlp: tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts instead of an MLP; each token goes to the `per_token` likeliest."""

    count: int
    per_token: int
    intermediate_size: int
    names: ExpertNames
    normalize: bool = True  # scale the probabilities of a token's experts to sum to 1
    normalize_eps: float = 0.0  # added to their sum
    dense_layers: tuple[int, ...] = ()  # layers with an MLP instead of experts
    # The files store all experts in one tensor. "plain": [experts, in, out], with gate and up
    # interleaved; experts and router have biases. "mxfp4": the same, quantized values and scales.
    # "rows": [experts, out, in], gate before up, without biases. "columns": the same with
    # [experts, in, out].
    stacked: Literal["", "plain", "mxfp4", "rows", "columns"] = ""
    # DeepSeek: scores are sigmoids. A bias per expert affects the choice but not the weight. Only
    # experts of the best groups are chosen. Scores are scaled. All tokens also go through a shared
    # MLP of shared_size.
    sigmoid: bool = False
    has_correction: bool = False  # the bias; always with sigmoid
    groups: ExpertGroups | None = None
    scale: float = 1.0
    shared_size: int = 0
    # The jitter of the sparse mixer (arXiv 2409.12136), which chooses two experts one after the
    # other; None: there is none.
    sparse_mixer: float | None = None
    # Llama 4: experts are chosen by logits, and the sigmoid of a logit multiplies their input.
    scales_input: bool = False
    shared_gate: bool = False  # the shared MLP's output times the sigmoid of a product (Qwen 2)
    # Two matrices map the experts' inputs and outputs to and from this size; 0: hidden_size.
    latent_size: int = 0
    # Gemma 4: layers have an MLP beside the experts. The outputs of both have a norm, then they are
    # added. Experts and router have norms of their own, and each expert a scale.
    beside_mlp: bool = False


@dataclasses.dataclass(frozen=True)
class ExpertGroups:
    """`count` groups of experts; a token uses only experts of its best `chosen` groups.

    The score of a group is that of its best expert, or the sum of its best two (`by_two`).
    """

    count: int
    chosen: int
    by_two: bool


@dataclasses.dataclass(frozen=True)
class ExpertNames:
    """Tensor names in the files, after "model.layers.0."; {} is the expert."""

    router: str
    gate_up: tuple[str, ...]
    down: str
    shared: str = "mlp.shared_experts"
    correction: str = "mlp.gate.e_score_correction_bias"
    correction_is_row: bool = False  # its shape in the files is [1, count]
    latent: tuple[str, str] = ("", "")  # of the matrices before and after experts of latent_size


@dataclasses.dataclass(frozen=True)
class Latent:
    """Sizes of latent attention. The cache has one head of kv_rank + rope columns."""

    q_rank: int | None  # None: queries come from the hidden state directly
    kv_rank: int
    nope: int  # dimensions of a head's q and k without RoPE
    rope: int  # dimensions of a head's q and k with RoPE
    v: int
    interleaved: bool  # files pair neighbours for RoPE
    norm_eps: float = 1e-6  # of the norms of latents, whatever rms_norm_eps is


@dataclasses.dataclass(frozen=True)
class LayerInputs:
    """Gemma 3n and 4: each layer has an input [n, size] of its own, beside the hidden state.

    It is the sum of an embedding of the token and of a projection of the first hidden state.
    """

    size: int
    vocab_size: int  # of its embedding; other tokens have that of token 0


@dataclasses.dataclass(frozen=True)
class AltUp:
    """Several hidden states a token (Gemma 3n): see _layers/altup.py."""

    num_inputs: int
    active: int  # the state that layers compute
    scales_output: bool  # the active state is scaled before it meets the layer's own input
    laurel_rank: int


class AttentionKind(NamedTuple):
    """What a spec of attention takes from the kind of a layer."""

    window: int | Chunk | None
    num_kv_heads: int
    head_dim: int
    sees_pictures: bool

    @property
    def heads(self) -> tuple[int, int]:
        """The heads of a page, which layers of one group of pages share."""
        return self.num_kv_heads, self.head_dim


class KvPlace(NamedTuple):
    """Where the keys and values of a layer are: in a group of pages, and which layer there."""

    group: int
    layer: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The configuration of a decoder. Hashable: a static argument of jitted functions.

    Defaults are those of Llama.
    """

    family: str  # model_type of config.json
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerKind, ...]  # the kind of each layer
    rms_norm_eps: float  # of LayerNorms, too
    tie_embeddings: bool  # the files may have another head than the embedding all the same
    max_positions: int
    bos_token: int | None
    eos_tokens: tuple[int, ...]
    sm_scale: float  # attention logits = sm_scale * (q . k)
    activation: str = "silu"  # one of ACTIVATIONS, "clamped_swiglu" or "xielu"
    gated: bool = True  # False: MLPs have no gate, and the activation is that of `up`
    activation_limit: float = 0.0  # clamp limit of clamped_swiglu
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False  # of MLPs, not of experts
    # Those that are one tensor in the files; "qkv_by_head" has q, k and v of a head side by side.
    # "qk_norm": the weights of all heads of q, and of k, with qk_norm "each_head".
    packed: tuple[Literal["qkv", "qkv_by_head", "qk_norm", "gate_up"], ...] = ()
    layer_norm: bool = False  # norms subtract the mean first: LayerNorm
    norm_bias: bool = False  # of all norms but those of q and k
    # Norms of q and k, over each head or over all heads together. Weights are those of every head,
    # but with "each_head" its own.
    qk_norm: Literal["none", "per_head", "each_head", "all_heads"] = "none"
    v_norm: bool = False  # RMSNorm of v without weights; with qk_norm "per_head" only
    qk_norm_after_rope: bool = False  # not with "all_heads"
    # Norms of the inputs of attention and MLP. Layers without attention always have them.
    pre_norms: bool = True
    # The MLP's input is that of attention, through the same norm or through its own.
    parallel: Literal["", "same_norm", "own_norm"] = ""
    sinks: bool = False  # one logit per head that takes part in its softmax, without a value
    # Norms of the outputs of attention and MLP, before the residual, in layers with attention.
    post_norms: bool = False
    # Their names in the files. That of the norm before the MLP follows from them.
    post_norm_names: tuple[str, str] = ("post_attention_layernorm", "post_feedforward_layernorm")
    residual_scale: float = 1.0  # factor of the outputs of attention and MLP
    normed_residual: NormedResidual | None = None
    norm_offset: float = 0.0  # norms multiply by norm_offset + weight
    embedding_scale: float = 1.0
    attention_soft_cap: float = 0.0  # 0: none
    logit_soft_cap: float = 0.0
    logit_scale: float = 1.0
    head_bias: bool = False
    # Tokens that stand for pictures and sounds: without those, each is read as the pad token.
    placeholders: tuple[int, ...] = ()
    pad_token: int = 0
    experts: Experts | None = None
    # Factors (Falcon-H1): of what goes into attention and out of it, of an MLP's gate and output.
    attention_in_scale: float = 1.0
    attention_out_scale: float = 1.0
    gate_scale: float = 1.0
    down_scale: float = 1.0
    attention_gate: bool = False  # outputs of attention times a sigmoid, element by element
    latent: Latent | None = None  # if set, num_kv_heads is 1 and head_dim is the cache's
    layer_inputs: LayerInputs | None = None
    altup: AltUp | None = None  # with layer_inputs
    layer_scales: bool = False  # the output of each layer times a number of its own
    extra_layers: int = 0  # layers after the others in the files, for multi-token prediction
    # A layer for multi-token prediction, beside its model: see _layers/mtp.py.
    mtp: bool = False
    keeps_hidden: bool = False  # pages also hold the last hidden state of each token
    tensor_prefix: str = ""  # prefix of the tensor names in the files
    # Parts of Llama's tensor names, and what the files have in their place.
    renamed: tuple[tuple[str, str], ...] = ()
    # Parts of names in some files, and what others have in their place.
    aliases: tuple[tuple[str, str], ...] = ()
    quantization: Quantization | None = None  # of the quantized matrices in the files
    # For one device's part (tensor_parallel.py): the mesh axis over which heads, columns and
    # experts are split, and whether the vocabulary is split, too.
    heads_axis: str | None = None
    splits_vocabulary: bool = False
    heads_mesh: Mesh | None = None  # of heads_axis, for `parallel.all_reduce`
    # The mesh axis over which tokens go to their experts (expert_exchange.py). If it is heads_axis,
    # the devices have the same tokens, and each sends its part of them; else their own.
    experts_axis: str | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The distinct kinds of layers, in order of appearance."""
        return tuple(dict.fromkeys(self.layers))

    @property
    def num_recurrent_layers(self) -> int:
        """Layers with states."""
        return sum(kind.recurrent is not None for kind in self.layers)

    @property
    def recurrent(self) -> Recurrent | None:
        """The sizes of the recurrent layers; None: there are none. They are all equal, but for the
        constants of lightning attention."""
        return next((kind.recurrent for kind in self.layers if kind.recurrent), None)

    def of(self, kind: LayerKind) -> ModelConfig:
        """Returns the config with the sizes of layers of this kind."""
        sizes = {
            name: size
            for name in ("num_kv_heads", "head_dim", "intermediate_size")
            if (size := getattr(kind, name)) is not None
        }
        return dataclasses.replace(self, **sizes) if sizes else self

    def attention_kind(self, kind: LayerKind) -> AttentionKind:
        own = self.of(kind)
        return AttentionKind(kind.window, own.num_kv_heads, own.head_dim, kind.sees_pictures)

    @property
    def attention_kinds(self) -> tuple[AttentionKind, ...]:
        """The distinct kinds of attention, in order of appearance; each has a spec."""
        kinds = (kind for kind in self.layers if kind.attention)
        return tuple(dict.fromkeys(map(self.attention_kind, kinds)))

    @property
    def why_not_all_keys(self) -> str | None:
        """Why not every layer keeps the keys of all tokens; None: all do."""
        if self.latent is not None:
            return "latent attention"
        if self.recurrent is not None:
            return "recurrent layers"
        if any(kind.window is not None for kind in self.layers):
            return "layers with a sliding window"
        return None

    @property
    def page_groups(self) -> tuple[int, ...]:
        """The number of layers with keys and values of each group of pages.

        Layers with the same heads are a group, in order of appearance. A page of tokens is a page
        of each group, with the same number. Kept hidden states are layers of the first, at its end.
        """
        places = [place for place in self.kv_places if place is not None]
        groups = range(1 + max((place.group for place in places), default=0))
        num = [len({p.layer for p in places if p.group == group}) for group in groups]
        num[0] += self.num_hidden_layers
        return tuple(num)

    @property
    def num_hidden_layers(self) -> int:
        """The layers of pages that hold the last hidden state of each token; 0: it is not kept."""
        row = self.num_kv_heads * self.head_dim * (1 if self.latent else 2)
        return -(-self.hidden_size // row) if self.keeps_hidden else 0

    @property
    def kv_places(self) -> tuple[KvPlace | None, ...]:
        """Where the keys and values are that each layer attends to; None: it has no attention.

        Raises ValueError for a layer that shares keys and values of no layer before it.
        """
        groups: dict[tuple[int, int], int] = {}
        sizes: dict[int, int] = {}
        newest: dict[AttentionKind, KvPlace] = {}
        places: list[KvPlace | None] = []
        for i, kind in enumerate(self.layers):
            if not kind.attention:
                places.append(None)
                continue
            attention = self.attention_kind(kind)
            if not kind.shares_kv:
                group = groups.setdefault(attention.heads, len(groups))
                newest[attention] = KvPlace(group, sizes.get(group, 0))
                sizes[group] = newest[attention].layer + 1
            if attention not in newest:
                raise ValueError(
                    f"ModelConfig: layers: expected a layer with keys and values before layer {i},"
                    f" which shares them, with its window and heads {attention}, got none."
                )
            places.append(newest[attention])
        return tuple(places)

    @property
    def sees_pictures(self) -> bool:
        """Whether tokens of a picture see each other in some layers. A step computes all of them
        then."""
        return any(kind.sees_pictures for kind in self.layers)

    @property
    def position_parts(self) -> int:
        """3 if tokens of pictures have times, rows and columns as positions (Rope.sections)."""
        ropes = (kind.rope for kind in self.layers if kind.rope is not None)
        return 3 if any(rope.sections is not None for rope in ropes) else 1

    @property
    def has_special_layers(self) -> bool:
        """Whether layers have heads of several sizes, inputs or scales of their own, or others'
        keys and values. One device runs them, from tokens to logits."""
        return (
            self.layer_inputs is not None
            or self.layer_scales
            or len(self.page_groups) > 1
            or any(kind.shares_kv for kind in self.layers)
        )

    @property
    def short_context(self) -> int | None:
        """The tokens up to which transformers uses other RoPE factors than this config, if any.

        With LongRoPE it decides anew for each sequence. See `limited`.
        """
        scalings = (kind.rope.scaling for kind in self.layers if kind.rope is not None)
        lengths = [
            int(scaling.original_max_position_embeddings)
            for scaling in scalings
            if isinstance(scaling, LongRopeScaling) and scaling.is_long
        ]
        return min(lengths, default=None)

    def limited(self, max_positions: int) -> ModelConfig:
        """Returns the config for sequences of up to max_positions tokens.

        If they are not longer than the original context of a model with LongRoPE, its factors for
        short contexts are used.
        """

        def limit(kind: LayerKind) -> LayerKind:
            if kind.rope is None or not isinstance(kind.rope.scaling, LongRopeScaling):
                return kind
            scaling = kind.rope.scaling.limited(max_positions)
            return dataclasses.replace(kind, rope=dataclasses.replace(kind.rope, scaling=scaling))

        layers = tuple(map(limit, self.layers))
        return dataclasses.replace(self, layers=layers, max_positions=max_positions)
