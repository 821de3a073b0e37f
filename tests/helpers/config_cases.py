"""Changes of config.json files: every key of every family, alone and together.

The files of RECORDS hold what transformers makes of them (make_config_verdicts.py).

A change maps a path ("rope_parameters/factor") to a value, or to ABSENT.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
import json
import random
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from helpers import embedding_cases, model_cases
from helpers.paths import DATA
from jax_attn import models
from jax_attn.models import ModelConfig
from jax_attn.models._config.keys import Keys
from jax_attn.models._embedding import embedding, encoder
from jax_attn.models._embedding.encoder import EncoderConfig
from jax_attn.models._layers import experts
from jax_attn.models._weights.float_weights import load_tree, tree_shapes
from jax_attn.models._weights.tensors import file_shapes

ABSENT = "<absent>"

Changes = dict[str, Any]
Config = ModelConfig | EncoderConfig


class Case(NamedTuple):
    base: str  # a name of BASES
    changes: Changes

    def config(self) -> dict[str, Any]:
        return changed(BASES[self.base], self.changes)

    def has_head(self) -> bool:
        """Whether the files have a head, even if the config ties it to the embedding."""
        return any("tie_word_embeddings" in path for path in self.changes)


_IMAGES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
_IMAGES |= {"num_attention_heads": 1, "image_size": 8, "patch_size": 4}
_TEXT = dict(model_cases.CONFIGS["gemma3"])
_FEWER_LAYERS = {
    name: {"num_hidden_layers": 2}
    for name in ("mixtral window", "mixtral tied, mha", "qwen3 moe", "gpt-oss", "gemma2")
} | {"qwen3 moe, some dense": {"num_hidden_layers": 4}}
_FEWER_LAYERS |= {
    name: {"num_hidden_layers": 2} for name in model_cases.CONFIGS if name.startswith("deepseek")
}
_ENCODERS = ("bert mean", "xlm-roberta", "roberta relu, pad 3")
_LEFT_OUT = ("gpt-oss mxfp4",)  # quantized files have tests of their own

BASES: dict[str, dict[str, Any]] = {
    name: config | _FEWER_LAYERS.get(name, {})
    for name, config in model_cases.CONFIGS.items()
    if name not in _LEFT_OUT
} | {
    "gemma3 with images": {
        "model_type": "gemma3",
        "text_config": _TEXT,
        "vision_config": _IMAGES,
        "mm_tokens_per_image": 4,
        "image_token_index": 47,
        "boi_token_index": 46,
        "eoi_token_index": 45,
    },
    "mistral3 with images": {
        "model_type": "mistral3",
        "text_config": dict(model_cases.CONFIGS["ministral3"]) | {"tie_word_embeddings": True},
        "vision_config": _IMAGES | {"model_type": "pixtral", "head_dim": 8},
        "tie_word_embeddings": False,
        "image_token_index": 47,
    },
    "gemma4 with images": {
        "model_type": "gemma4",
        "text_config": dict(model_cases.CONFIGS["gemma4"]),
        "vision_config": None,
        "audio_config": None,
    },
    **{name: embedding_cases.CASES[name][0] for name in _ENCODERS},
}

# ---- values ------------------------------------------------------------------------------------

_ANY: list[Any] = [ABSENT, None, "text", True, False, 0, 1, -1, 2.5, [], [1], {}]

_LINEAR = {"rope_type": "linear", "factor": 2.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
}
_ROPES: list[Any] = [
    {"rope_type": "default"},
    {"rope_theta": 50.0},
    {"rope_type": "default", "rope_theta": 50.0},
    {"rope_type": "default", "factor": 4.0},
    {"factor": 4.0},
    _LINEAR,
    _LINEAR | {"rope_theta": 50.0},
    {"type": "linear", "factor": 2.0},
    {"type": "default", "rope_type": "linear", "factor": 2.0},
    {"type": "linear", "rope_type": "default", "factor": 2.0},
    {"rope_type": None, "type": "linear", "factor": 2.0},
    _YARN,
    _YARN | {"rope_theta": 50.0},
    _YARN | {"original_max_position_embeddings": None},
    {"type": "yarn", "factor": 4.0},
    _LLAMA3,
    {"rope_type": "dynamic", "factor": 4.0},
    _LONG,
    _LONG | {"original_max_position_embeddings": 16},
    _LONG | {"original_max_position_embeddings": 96},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 50.0},
    {"rope_type": "mrope", "mrope_section": [1, 1, 2]},
    {"full_attention": _LINEAR, "sliding_attention": {"rope_type": "default"}},
    {"full_attention": {"rope_type": "default", "rope_theta": 77.0}, "sliding_attention": None},
    {"full_attention": "text"},
    {"sliding_attention": _LINEAR},
]
_ROPE_KEYS: dict[str, list[Any]] = {
    "rope_type": ["linear", "yarn", "llama3", "dynamic", "longrope", "default", "su", "axial"],
    "type": ["linear", "yarn", "default"],
    "rope_theta": [50.0, 1e6],
    "factor": [2.0, 8, 0.5],
    "partial_rotary_factor": [0.5, 0.75],
    "original_max_position_embeddings": [16, 64.0, 128, 96],
    "attention_factor": [0.7, 2],
    "beta_fast": [8.0, 0.5],
    "beta_slow": [2, 40.0],
    "mscale": [0.5, 1.3],
    "mscale_all_dim": [0.5, 1.3],
    "truncate": [],
    "low_freq_factor": [2.0],
    "high_freq_factor": [2.0, 8],
    "short_factor": [[1.0, 1.5, 2.0, 2.5], [1.0] * 6, [1.0], ["1"] * 4, [0.0] * 4, [None] * 4],
    "long_factor": [[1.0, 1.5, 2.0, 2.5], [1.0] * 6, [1.0], ["1"] * 4, [-1.0] * 4],
    "mrope_section": [[1, 1, 2]],
}
_ACTIVATIONS = ["silu", "swish", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu"]
_LAYERS = [
    ["full_attention"] * 3,
    ["sliding_attention"] * 3,
    ["sliding_attention"] * 4,
    ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    ["sliding_attention", "full_attention", "full_attention"],
    ["full_attention"],
    ["attention"] * 3,
    ["chunked_attention"] * 3,
    ["linear_attention"] * 3,
    [None] * 3,
    "full_attention",
]
_SPECIAL: dict[str, list[Any]] = {
    "rope_scaling": _ROPES,
    "rope_parameters": _ROPES,
    "hidden_act": _ACTIVATIONS,
    "hidden_activation": _ACTIVATIONS,
    "layer_types": _LAYERS,
    "eos_token_id": [[1, 2], [-1], [None], ["text"], 47, 48, 10**12, [3, 99]],
    "bos_token_id": [47, 48, 10**12],
    "pad_token_id": [47, 48],
    "topk_method": ["greedy", "group_limited_greedy", "noaux_tc"],
    "scoring_func": ["softmax", "sigmoid"],
    "mlp_only_layers": [[0], [0, 2], [9], ["0"], [True]],
    "no_rope_layers": [[0, 0, 0], [1, 1, 1], [1, 0, 1, 0], [True] * 3, [2] * 3, ["1"] * 3],
    "original_max_position_embeddings": [16, 64, 96, 128],
    "partial_rotary_factor": [0.5, 0.75],
    "rope_theta": [50.0, 1000],
    "rope_local_base_freq": [50.0, 1000],
    "sliding_window": [3, 5, 1000],
    "sliding_window_pattern": [2, 3],
    "use_bidirectional_attention": ["all"],
    "per_layer_config": [
        {"1": {"sliding_window": 3}},
        {"0": {"num_key_value_heads": 1}},
        {"0": {"rms_norm_eps": 0.9}},
    ],
    "quantization_config": [{"bits": 4}, {"quant_method": "text"}, {"quant_method": 5}],
    "compression_config": [{"bits": 4}],
    "torch_dtype": ["float16", "float32"],
    "dtype": ["float16", "float32"],
    "transformers_weights": ["model.safetensors", "other.safetensors"],
    "kv_sharing_modes": [["reuse"] * 3],
    "attention_chunk_size": [5],
    "architectures": [["LlamaForSequenceClassification"]],
    "num_experts": [3, 5],
    "num_local_experts": [3, 5],
    "n_routed_experts": [8, 16],
    "n_group": [2, 3],
    "topk_group": [1, 2],
    "moe_layer_freq": [2, [1, 0, 1]],
    "head_dim": [8, 16, 24],
    "query_pre_attn_scalar": [3, 40.0],
    "rms_norm_eps": [0.5, 1e-6],
    "per_layer_sliding_window": [],
    "text_config": [],
    "attn_implementation": ["eager"],
    "_attn_implementation": ["eager"],
}
# Keys whose change is no change of the model, or would be of another family.
_SKIPPED = frozenset(("model_type", "text_config/model_type"))
_CONTAINERS = ("rope_scaling", "rope_parameters")
_NESTED = ("full_attention", "sliding_attention")

# Keys that say the same, or decide about each other.
_RELATED: list[tuple[str, ...]] = [
    ("rope_scaling", "rope_parameters"),
    ("rope_scaling", "rope_theta"),
    ("rope_parameters", "rope_theta"),
    ("rope_scaling", "original_max_position_embeddings"),
    ("rope_parameters", "original_max_position_embeddings"),
    ("rope_scaling", "max_position_embeddings"),
    ("rope_scaling", "partial_rotary_factor"),
    ("rope_parameters", "partial_rotary_factor"),
    ("rope_scaling", "rope_local_base_freq"),
    ("rope_scaling", "layer_types"),
    ("rope_parameters", "layer_types"),
    ("num_experts", "num_local_experts"),
    ("n_routed_experts", "num_experts"),
    ("n_routed_experts", "num_local_experts"),
    ("use_sliding_window", "sliding_window"),
    ("use_sliding_window", "layer_types"),
    ("use_sliding_window", "max_window_layers"),
    ("sliding_window", "layer_types"),
    ("sliding_window_pattern", "layer_types"),
    ("sliding_window", "use_bidirectional_attention"),
    ("decoder_sparse_step", "mlp_only_layers"),
    ("no_rope_layers", "no_rope_layer_interval"),
    ("no_rope_layers", "layer_types"),
    ("num_nextn_predict_layers", "num_mtp_layers"),
    ("hidden_act", "hidden_activation"),
    ("topk_method", "n_group"),
    ("n_group", "topk_group"),
    ("topk_method", "topk_group"),
    ("qk_rope_head_dim", "head_dim"),
    ("num_attention_heads", "num_key_value_heads"),
    ("num_attention_heads", "head_dim"),
    ("num_experts_per_tok", "num_experts"),
    ("num_experts_per_tok", "num_local_experts"),
    ("torch_dtype", "dtype"),
    ("tie_word_embeddings", "tie_embeddings"),
    ("attn_logit_softcapping", "final_logit_softcapping"),
]


def values(path: str, base: dict[str, Any], default: Any) -> list[Any]:
    """Returns the values to try for a key, without repetition. default: of transformers."""
    name = path.rpartition("/")[2]
    inside = any(part in (*_CONTAINERS, *_NESTED) for part in path.split("/")[:-1])
    special = (_ROPE_KEYS if inside else _SPECIAL).get(name, ())
    tried = [*_ANY, *special]
    known = default if get(base, path) == ABSENT else get(base, path)
    if isinstance(known, (int, float)) and not isinstance(known, bool):
        # Not more layers or wider ones than those of the bases: they take time.
        tried += [known + 1, 2 * known] if known < 200 and get(base, path) != ABSENT else []
        tried += [known // 2, known / 2, float(known)]
    elif isinstance(known, str) and known != _ANYWHERE:
        tried.append(known.upper())
    unique: dict[str, Any] = {}
    for value in tried:
        unique.setdefault(json.dumps(value, sort_keys=True), value)
    unique.pop(json.dumps(get(base, path), sort_keys=True), None)
    return list(unique.values())


def get(config: dict[str, Any], path: str) -> Any:
    value: Any = config
    for part in path.split("/"):
        if not isinstance(value, dict) or part not in value:
            return ABSENT
        value = value[part]
    return value


def changed(config: dict[str, Any], changes: Changes) -> dict[str, Any]:
    config = copy.deepcopy(config)
    for path, value in changes.items():
        *parents, name = path.split("/")
        inner = config
        for parent in parents:
            if not isinstance(inner.get(parent), dict):
                inner[parent] = {}
            inner = inner[parent]
        if value == ABSENT:
            inner.pop(name, None)
        else:
            inner[name] = copy.deepcopy(value)
    return config


# ---- cases -------------------------------------------------------------------------------------

Known = dict[str, dict[str, Any]]
"""Keys that transformers reads, and their defaults, by model_type; COMMON: of every family."""
COMMON = "common"
_ANYWHERE = "<anywhere>"  # instead of a default, for keys of COMMON


def paths(name: str, known: Known) -> dict[str, Any]:
    """Returns the paths to change in a base, with transformers' defaults."""
    base = BASES[name]
    found = dict.fromkeys(known[COMMON], _ANYWHERE) | dict.fromkeys(base)
    found |= known[base["model_type"]]
    if "text_config" in base:
        text = dict.fromkeys(base["text_config"]) | known[base["text_config"]["model_type"]]
        found |= {f"text_config/{key}": default for key, default in text.items()}
    for container in [path for path in found if path.rpartition("/")[2] in _CONTAINERS]:
        rope = get(base, container)
        if rope == ABSENT:
            continue
        inner = [f"{container}/{kind}" for kind in _NESTED if kind in rope] or [container]
        found |= {f"{each}/{key}": None for each in inner for key in _ROPE_KEYS}
    return {path: default for path, default in found.items() if path not in _SKIPPED}


def singles(known: Known, bases: Iterable[str], share: int = 1) -> Iterator[Case]:
    """Every key of the bases with each of its values.

    Keys that no class of the base has are tried on the first base only, but for special values.
    share: only one of so many values of other kinds, a different one for each key.
    """
    first, *_ = bases
    for name in bases:
        yield Case(name, {})
        for path, default in paths(name, known).items():
            for value in values(path, BASES[name], default):
                is_special = value not in _ANY or value in (ABSENT, None)
                if default == _ANYWHERE and name != first and value in _ANY:
                    continue
                if is_special or not zlib.crc32(f"{name} {path} {value}".encode()) % share:
                    yield Case(name, {path: value})


def together(known: Known, rng: random.Random, bases: Iterable[str]) -> Iterator[Case]:
    """Two to five keys of a base, often related ones, without an end."""
    names = list(bases)
    while True:
        name = rng.choice(names)
        base, found = BASES[name], paths(name, known)
        prefix = rng.choice(["", "text_config/"]) if "text_config" in base else ""
        chosen: list[str] = []
        related = [group for group in _RELATED if any(prefix + key in found for key in group)]
        if rng.random() < 0.6:
            chosen += [prefix + key for key in rng.choice(related)]
        own = [path for path, default in found.items() if default != _ANYWHERE]
        chosen += rng.sample(own, rng.choice([0, 1, 2]) if chosen else 2)
        chosen += rng.sample(list(found), rng.choice([0, 0, 1]))
        yield Case(name, {path: _some(path, base, found, rng) for path in dict.fromkeys(chosen)})


def _some(path: str, base: dict[str, Any], found: dict[str, Any], rng: random.Random) -> Any:
    """Mostly a value that a model may have: two useless ones are refused for the first."""
    tried = values(path, base, found.get(path))
    plausible = [value for value in tried if value not in _ANY] + [ABSENT]
    return rng.choice(plausible if rng.random() < 0.8 else tried)


class Recorded(NamedTuple):
    """The cases of a record: each key of `singles` alone, and several keys of `bases` together.

    singles: one base of each family, two where they have different keys.
    """

    singles: tuple[str, ...]
    bases: tuple[str, ...]
    num_together: int
    share: int  # see `singles`
    step: int = 1  # one of so many of their cases


_FIRST = (
    *("llama", "llama bias tied, llama3 rope", "mistral window", "qwen2 windows above"),
    *("qwen3 bias, layer_types", "gemma2", "gemma3", "gemma3 of transformers 4"),
    *("gemma3 with images", "mixtral window", "qwen3 moe", "gpt-oss"),
    *("deepseek v2 groups, yarn", "deepseek v3", "phi3 long, partial", "olmo2", "granite"),
    *("smollm3 windows", *_ENCODERS),
)
# Families of the third record, in the order of their first base here.
_THIRD_BASES = ("qwen3 next", "qwen3 next bias, few linear", "qwen3.5", "qwen3.5 moe")
_THIRD_BASES += ("lfm2", "lfm2 bias", "olmo hybrid", "olmo hybrid bias, rope")
_THIRD_BASES += ("nemotron", "nemotron bias, gelu", "starcoder2", "starcoder2 without biases")
_THIRD_BASES += ("stablelm", "stablelm parallel", "gpt-neox", "gpt-neox in turn")
_THIRD_BASES += ("granite moe", "granite moe bias", "hunyuan", "hunyuan moe")
_THIRD_BASES += ("apertus", "apertus bias, yarn", "phimoe", "phimoe longrope")
_THIRD_BASES += ("cohere", "cohere untied", "cohere2", "cohere2 bias, layer_types")
_THIRD_BASES += ("bamba", "bamba bias", "falcon h1", "falcon h1 norms, bias")
_THIRD_BASES += ("falcon h1 gate before the norm", "granite 4", "granite 4 dense, rope")
_THIRD_BASES += ("granite 4 attention alone", "nemotron-h", "nemotron-h moe", "kimi linear")
_THIRD_BASES += ("kimi linear groups", "minimax", "minimax window", "lfm2 moe", "lfm2 moe bias")
_THIRD_BASES += ("llama4", "llama4 bias, few chunks")
_THIRD_BASES += ("gemma4", "gemma4 per-layer inputs, shared keys", "gemma4 experts")
_THIRD_BASES += ("gemma3n", "gemma3n, another active state", "gemma4 with images")
_SECOND = (
    *("qwen2 moe", "olmo3", "glm4", "glm4 moe", "dots1", "exaone4", "ernie4.5", "ernie4.5 moe"),
    *("seed oss", "arcee", "minimax m2", "ministral3", "glm4 moe lite"),
)
_THIRD = tuple({BASES[name]["model_type"]: name for name in _THIRD_BASES[::-1]}.values())[::-1]
_DECODERS = [name for name in model_cases.CONFIGS if name not in _THIRD_BASES]
_AFTER_FIRST = tuple(_DECODERS[_DECODERS.index("qwen2 moe") :])
_LATER = (*_AFTER_FIRST, "mistral3 with images")
# By the names of their files. A new family joins the last, or makes another.
RECORDS: dict[str, Recorded] = {
    "config_verdicts": Recorded(
        _FIRST,
        tuple(name for name in BASES if name not in (*_LATER, *_THIRD_BASES)),
        1500,
        5,
    ),
    "config_verdicts_2": Recorded(_SECOND, _AFTER_FIRST, 150, 12, 8),
    "config_verdicts_3": Recorded(_THIRD, _THIRD_BASES, 150, 12, 24),
}


def file_of(record: str) -> Path:
    return DATA / f"{record}.npz"


def recorded(record: str, known: Known) -> list[Case]:
    """Returns the cases of one of RECORDS."""
    cases = RECORDS[record]
    pairs = itertools.islice(together(known, random.Random(0), cases.bases), cases.num_together)
    alone = [*singles(known, cases.singles, cases.share)][:: cases.step]
    return [*alone, *pairs]


def digest(cases: list[Case]) -> str:
    """Tells whether cases are those of a record."""
    text = json.dumps([(case.base, case.config()) for case in cases])
    return hashlib.sha256(text.encode()).hexdigest()


# ---- what is compared --------------------------------------------------------------------------

# Outcomes beside rows of logits: refused by this library, by transformers only, a finding.
REFUSED, ONLY_HERE, FINDING = -1, -2, -3


class Record(NamedTuple):
    """What a file of RECORDS holds."""

    about: dict[str, Any]  # versions, "digest" of the cases, "known" keys
    outcomes: np.ndarray  # [cases] i16: a row of logits, or one of the above
    logits: np.ndarray  # [rows, 16] f32, see `sample`
    tensors: np.ndarray  # [rows] u32: see `checksum`; of the tensors that both loaded

    @classmethod
    def load(cls, record: str) -> Record:
        with np.load(file_of(record)) as file:
            about = json.loads(str(file["about"]))
            return cls(about, file["outcomes"], file["logits"], file["tensors"])

    def save(self, record: str) -> None:
        np.savez_compressed(
            file_of(record),
            about=json.dumps(self.about),
            outcomes=self.outcomes,
            logits=self.logits,
            tensors=self.tensors,
        )


def wrong_sentence(sentence: str, path: Path, case: Case) -> str:
    """Returns what is wrong with the message of a refusal: "" if it names the file and a key."""
    if not sentence.startswith(str(path)) or "\n" in sentence:
        return f"no sentence that begins with the file: {sentence!r}"
    names = {part for change in case.changes for part in change.split("/")}
    names |= {*_names(case.config())}
    is_missing = re.search(r"key '\w+' is missing", sentence)
    if not is_missing and not names & {*re.findall(r"\w+", sentence)}:
        return f"names no key: {sentence!r}"
    return ""


def _names(config: Any) -> Iterator[str]:
    if isinstance(config, dict):
        for name, value in config.items():
            yield name
            yield from _names(value)


def numbers(case: Case, config: Config) -> str:
    """Returns a text that is equal for configs with the same logits for `tokens`."""
    if isinstance(config, EncoderConfig):
        return repr(dataclasses.replace(config, family="", tensor_prefix=""))
    config = served(config)
    if case.has_head():
        config = dataclasses.replace(config, tie_embeddings=False)
    plain = dataclasses.replace(
        config, family="", bos_token=None, eos_tokens=(), extra_layers=0, tensor_prefix=""
    )
    return repr(plain)


def write(directory: Path, case: Case, config: Config) -> None:
    """Writes a directory with the tensors that `config`, ours, expects."""
    from safetensors.numpy import save_file

    (directory / "config.json").write_text(json.dumps(case.config()))
    if isinstance(config, EncoderConfig):
        save_file(embedding_cases.tensors(case.config()), directory / "model.safetensors")
        return
    if case.has_head():
        config = dataclasses.replace(config, tie_embeddings=False)
    tensors = model_cases.random_tensors(config)
    # A head is beside the text model if there is a "model." around it.
    beside = ("lm_head.weight",) if config.tensor_prefix.startswith("model.") else ()
    named = {
        ("" if name in beside else config.tensor_prefix) + name: tensor
        for name, tensor in tensors.items()
    }
    save_file(named, directory / "model.safetensors")


def parse(raw: dict[str, Any], path: Path) -> Config:
    """Returns the config of a config.json. Raises ModelDirectoryError."""
    if str(raw.get("model_type")) in encoder.FAMILIES:
        return embedding.parse_config(Keys(raw, path))
    return models.parse_config(raw, path)


def served(config: ModelConfig) -> ModelConfig:
    """Returns the config of a server that takes no longer sequences than the test's."""
    return config.limited(min(model_cases.NUM_TOKENS, config.max_positions))


def tokens(config: Config) -> np.ndarray:
    """Returns the tokens to compute logits for: not more than the model takes."""
    return model_cases.tokens()[: config.max_positions] % config.vocab_size


def logits(directory: Path, config: Config) -> np.ndarray:
    """Returns the logits [len, vocab_size] f32 of this library; of an encoder its last layer.

    Operation by operation, so that configs share what is compiled.
    """
    if isinstance(config, EncoderConfig):
        return _last_layer(
            load_tree(directory, config, encoder.tensors(config), encoder.is_other, "float32"),
            config,
        )
    config = served(config)
    params = models.load_params(directory, config, "float32")
    with mock.patch.object(experts, "grouped_matmul", jax.lax.ragged_dot):
        return np.asarray(models.reference_forward(params, config, tokens(config)))


def _last_layer(params: models.Params, config: EncoderConfig) -> np.ndarray:
    ids = tokens(config)
    x = encoder.embed(ids, config.positions(ids), np.zeros_like(ids), params, config)
    for weights in params["layers"]:
        q, k, v = encoder.project(x, weights, config)
        scores = jnp.einsum("qhd,khd->hqk", q, k) * config.head_dim**-0.5
        o = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), v)
        x = encoder.layer(x, o, weights, config)
    return np.asarray(x)


def sample(logits: np.ndarray) -> np.ndarray:
    """Returns some of the logits [len, vocab_size], [16] f32: of the last token, the first and one
    between."""
    rows = np.asarray(logits)[[-1, 0, len(logits) // 2]].reshape(-1)
    return np.resize(rows[:: max(1, len(rows) // 16)], 16).astype(np.float32)


def shapes(config: Config) -> tuple[Any, ...]:
    """Returns what decides the shapes of arrays: of the tensors, and of the tokens."""
    if isinstance(config, EncoderConfig):
        return (
            tuple(tree_shapes(encoder.tensors(config)).items()),
            len(tokens(config)),
            config.num_heads,
        )
    return tuple(file_shapes(config).items()), len(tokens(config)), config.num_qo_heads


def checksum(config: Config) -> int:
    """Returns a checksum of `shapes` in any order, without the head, which files may have all the
    same."""
    tensors, *others = shapes(config)
    named = sorted(tensor for tensor in tensors if tensor[0] != "lm_head.weight")
    return zlib.crc32(repr((named, *others)).encode())
