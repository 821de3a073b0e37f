"""Heads that turn the first token's row into scores: cross-encoders and sequence classification.

Source: BertForSequenceClassification and RobertaForSequenceClassification of transformers: a dense
layer, tanh, and a linear layer of num_labels rows. ModernBertForSequenceClassification: the first
token's row or the mean, a dense layer, an activation, LayerNorm, and a linear layer.

Qwen3-Reranker (arXiv 2506.05176) is a text model that is asked whether a document answers a query:
its score is the probability of "yes", of "yes" and "no", after the prompt of its model card.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn.models._config.activations import ACTIVATIONS
from jax_attn.models._config.config import ModelConfig
from jax_attn.models._config.directory import ModelDirectoryError, existing, read_json
from jax_attn.models._config.keys import Keys
from jax_attn.models._embedding import modernbert
from jax_attn.models._embedding.encoder import EncoderConfig
from jax_attn.models._embedding.modernbert import ModernBertConfig
from jax_attn.models._weights.protocols import Tokenizer
from jax_attn.models._weights.tensors import Parts
from jax_attn.models._weights.weights import Params

Activation = Literal["identity", "sigmoid", "softmax"]
_MODEL_INPUTS = "model_input_names"
_TYPES = "token_type_ids"


class PairPrompt(NamedTuple):
    """The text that asks a text model about a pair; its parts are encoded apart."""

    before: str
    pair: str  # with {query} and {document}
    behind: str


@dataclasses.dataclass(frozen=True)
class Scoring:
    """What a model's scores mean. Hashable.

    labels: their names, one a score.
    pair_activation: what makes a cross-encoder's score of a logit, as sentence-transformers has it.
    class_activation: what makes probabilities of logits; identity for a regression.
    has_types: whether the second text of a pair has token type 1, instead of 0.
    prompt: of a text model, which scores pairs only; None: of an encoder.
    """

    labels: tuple[str, ...]
    pair_activation: Activation
    class_activation: Activation
    has_types: bool
    prompt: PairPrompt | None = None

    def relevance(self, logits: np.ndarray) -> np.ndarray:
        """Returns the scores [n] f32 of pairs from logits [n, 1]."""
        return apply(logits, self.pair_activation)[:, 0]

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """Returns the probabilities [n, num_labels] f32 of classes from logits."""
        return apply(logits, self.class_activation)


def apply(logits: np.ndarray, activation: Activation) -> np.ndarray:
    """Applies an activation to [n, num_labels] f32; softmax over the labels."""
    if activation == "identity":
        return logits
    if activation == "sigmoid":
        return np.exp(-np.logaddexp(0, -logits))
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


# ---- config.json -------------------------------------------------------------------------------


def is_scoring(keys: Keys) -> bool:
    """Whether config.json is one of a model for sequence classification."""
    return any(
        isinstance(name, str) and name.endswith("ForSequenceClassification")
        for name in keys.items("architectures") or ()
    )


def parse(keys: Keys, config: EncoderConfig | ModernBertConfig, directory: Path) -> Scoring:
    """Returns what the scores mean. Raises ModelDirectoryError that names the key."""
    _expect_no_modules(directory)
    labels = _labels(keys)
    return Scoring(
        labels=labels,
        pair_activation=_pair_activation(keys, directory, len(labels)),
        class_activation=_class_activation(keys, len(labels)),
        has_types=_has_types(config, directory),
    )


def _expect_no_modules(directory: Path) -> None:
    """Refuses sentence-transformers' modules behind the model, which would change its scores."""
    path = directory / "modules.json"
    if path.is_file():
        types = [
            each.get("type") if isinstance(each, dict) else each for each in read_json(path, list)
        ]
        if [str(name).rpartition(".")[2] for name in types] != ["Transformer"]:
            raise Keys({}, path).error(f"expected a Transformer alone, got {types!r:.200}")


def _labels(keys: Keys) -> tuple[str, ...]:
    given = keys.get("id2label")
    if given is None:
        return tuple(f"LABEL_{i}" for i in range(keys.size("num_labels", 2)))
    if (
        not isinstance(given, dict)
        or not given
        or set(given) != {str(i) for i in range(len(given))}
        or not all(isinstance(name, str) for name in given.values())
    ):
        raise keys.error(f"id2label: expected names for '0', '1' and so on, got {given!r}")
    return tuple(given[str(i)] for i in range(len(given)))


_ACTIVATIONS: dict[str, Activation] = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}


def _pair_activation(keys: Keys, directory: Path, num_labels: int) -> Activation:
    """Returns the activation that sentence-transformers' CrossEncoder has by default."""
    found: dict[str, Activation] = {}
    path = directory / "config_sentence_transformers.json"
    newest = Keys(read_json(path), path) if path.is_file() else None
    if newest is not None:
        newest.expect("default_prompt_name", None)  # it would change the texts
    inner = keys.inner("sentence_transformers")
    for owner, key in (
        (newest, "activation_fn"),
        (inner, "activation_fn"),
        (keys, "sbert_ce_default_activation_function"),
    ):
        if owner is not None and owner.get(key) is not None:
            owner.expect(key, *(found or _ACTIVATIONS))
            found = {owner.get(key): _ACTIVATIONS[owner.get(key)]}
    default: Activation = "sigmoid" if num_labels == 1 else "identity"
    return next(iter(found.values()), default)


def _class_activation(keys: Keys, num_labels: int) -> Activation:
    """Returns the activation of transformers' text-classification pipeline."""
    keys.expect(
        "problem_type",
        None,
        "regression",
        "single_label_classification",
        "multi_label_classification",
    )
    kind = keys.get("problem_type")
    if kind == "regression":
        return "identity"
    if kind == "multi_label_classification" or (kind is None and num_labels == 1):
        return "sigmoid"
    return "softmax"


def _has_types(config: EncoderConfig | ModernBertConfig, directory: Path) -> bool:
    path, by_default = directory / "tokenizer_config.json", config.family == "bert"
    if not path.is_file():
        return by_default and config.num_types > 1
    names = Keys(read_json(path), path).items(_MODEL_INPUTS)
    return (by_default if names is None else _TYPES in names) and config.num_types > 1


# ---- text models -------------------------------------------------------------------------------

_QUESTION = PairPrompt(
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and"
    ' the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n",
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    "<Query>: {query}\n<Document>: {document}",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)
_QUESTION_FAMILIES = ("qwen3",)
OF_QUESTION = Scoring(("relevance",), "sigmoid", "sigmoid", has_types=False, prompt=_QUESTION)


def answers(directory: Path, keys: Keys, tokenizer: Tokenizer) -> tuple[int, int] | None:
    """Returns the tokens of "yes" and "no" if the directory is one of Qwen3-Reranker; else None.

    That is a text model without modules.json, or with the one of sentence-transformers 5.4, whose
    LogitScore must name these tokens. Raises ModelDirectoryError.
    """
    if keys.get("model_type") not in _QUESTION_FAMILIES:
        return None
    path = directory / "modules.json"
    found = tuple(tokenizer.token_to_id(word) for word in ("yes", "no"))
    if path.is_file():
        modules = [each for each in read_json(path, list) if isinstance(each, dict)]
        kinds = [str(each.get("type")).rpartition(".")[2] for each in modules]
        if kinds != ["Transformer", "LogitScore"]:
            return None
        folder = modules[1].get("path")
        if not isinstance(folder, str) or ".." in Path(folder).parts:
            raise Keys({}, path).error(f"path: expected one in this directory, got {folder!r}")
        settings_path = existing(directory / folder / "config.json")
        settings = Keys(read_json(settings_path), settings_path)
        for key, token in zip(("true_token_id", "false_token_id"), found, strict=True):
            settings.expect(key, token)
    yes, no = found
    if yes is None or no is None:
        raise ModelDirectoryError(
            f"{directory / 'tokenizer.json'}: expected the tokens 'yes' and 'no' of a model that"
            " scores pairs, got a vocabulary without them"
        )
    return yes, no


def head_of_answers(params: Params, tokens: tuple[int, int]) -> Params:
    """Makes the head of the score from that of the text model: the difference of two logits."""
    head = params["head"].T if "head" in params else params["embed"]
    yes, no = (head[token].astype(jnp.float32) for token in tokens)
    return {"out": (yes - no)[:, None]}


# ---- weights and the forward pass ----------------------------------------------------------------


def head_tensors(config: EncoderConfig | ModernBertConfig, num_labels: int) -> dict[str, Parts]:
    """Returns for each weight of the head its tensor in the files, with torch's shape."""
    d = config.hidden_size
    if isinstance(config, ModernBertConfig):
        return {
            "dense": {"head.dense.weight": (d, d)},
            "norm": {"head.norm.weight": (d,)},
            "out": {"classifier.weight": (num_labels, d)},
            "out_bias": {"classifier.bias": (num_labels,)},
        }
    dense, out = (
        ("pooler.dense", "classifier")
        if config.family == "bert"
        else ("classifier.dense", "classifier.out_proj")
    )
    return {
        "dense": {f"{dense}.weight": (d, d)},
        "dense_bias": {f"{dense}.bias": (d,)},
        "out": {f"{out}.weight": (num_labels, d)},
        "out_bias": {f"{out}.bias": (num_labels,)},
    }


def logits(
    x: jax.Array, head: Params, config: EncoderConfig | ModernBertConfig | ModelConfig
) -> jax.Array:
    """Returns [n, num_labels] f32 from the pooled rows [n, hidden] f32."""
    weights = {name: each.astype(jnp.float32) for name, each in head.items()}
    if isinstance(config, ModelConfig):
        return x @ weights["out"]
    if isinstance(config, ModernBertConfig):
        h = ACTIVATIONS[config.classifier_activation](x @ weights["dense"])
        h = modernbert.layer_norm(h, weights["norm"], config.norm_eps)
    else:
        h = jnp.tanh(x @ weights["dense"] + weights["dense_bias"])
    return h @ weights["out"] + weights["out_bias"]
