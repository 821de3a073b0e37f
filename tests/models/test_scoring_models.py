"""Cross-encoders and sequence classification against transformers, and refused models."""

import dataclasses
import json

import numpy as np
import pytest

from helpers import model_cases, scoring_cases
from jax_attn import models
from jax_attn.models._embedding import modernbert, scoring

pytest.importorskip("safetensors.numpy", reason="needs the extra `models`")
pytest.importorskip("tokenizers", reason="needs the extra `models`")

TOLERANCE = 1e-5  # of the largest number
every_model = pytest.mark.parametrize("name", scoring_cases.CASES)


def load(directory, name, **keys) -> models.EmbeddingModel:
    return models.load_embedding(scoring_cases.write(directory, name, **keys), "float32")


def logits(model, chunk=None, seconds=True) -> np.ndarray:
    sequences, begins = scoring_cases.pairs()
    types = begins if seconds and model.scoring.has_types else None
    batch = models.EmbeddingBatch.make(model, sequences, 96, 8, chunk, types)
    made = np.asarray(models.embed(model, batch))
    assert not made[len(sequences) :].any()
    return made[: len(sequences)]


def difference(got: np.ndarray, name: str) -> float:
    expected = np.load(scoring_cases.RECORDED)[name]
    assert got.shape == expected.shape and np.isfinite(got).all()
    return float(np.abs(got - expected).max() / np.abs(expected).max())


@every_model
@pytest.mark.parametrize("chunk", [None, 8])
def test_agrees_with_transformers(name, chunk, tmp_path):
    model = load(tmp_path, name)
    assert difference(logits(model, chunk), name) < TOLERANCE
    raw = scoring_cases.CASES[name]
    assert model.scoring.labels == tuple(raw["id2label"].values())
    assert model.scoring.has_types == scoring_cases.has_types(raw)


@every_model
def test_agrees_with_transformers_live(name):
    pytest.importorskip("transformers", reason="transformers is not installed")
    import make_scores

    assert difference(make_scores.logits(name), name) < TOLERANCE


@every_model
def test_a_part_of_a_head_left_out_is_seen(name, tmp_path):
    model = load(tmp_path, name)
    head = model.params["head"]
    for weight in list(head):
        changed = dataclasses.replace(
            model, params=model.params | {"head": head | {weight: 0 * head[weight]}}
        )
        assert difference(logits(changed), name) > 100 * TOLERANCE, weight
    if isinstance(model.config, modernbert.ModernBertConfig):
        return
    pooled = dataclasses.replace(model, pooling=dataclasses.replace(model.pooling, mode="mean"))
    assert difference(logits(pooled), name) > 100 * TOLERANCE


def layers(**changes):
    return lambda config: {"layers": tuple(each._replace(**changes) for each in config.layers)}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("modernbert, one label", lambda _: {"activation": "gelu_new"}),
        ("modernbert, one label", lambda _: {"classifier_activation": "gelu_new"}),
        ("modernbert, one label", lambda _: {"norm_eps": 1e-3}),
        ("modernbert, one label", layers(window=None)),
        ("modernbert, one label", layers(window=4)),
        ("modernbert, one label", layers(theta=50.0)),
        ("modernbert mean, relu, 3 labels", layers(theta=9.0)),
    ],
)
def test_a_mistake_in_modernbert_is_seen(name, change, tmp_path):
    model = load(tmp_path, name)
    config = dataclasses.replace(model.config, **change(model.config))
    assert difference(logits(dataclasses.replace(model, config=config)), name) > TOLERANCE


def test_types_left_out_are_seen(tmp_path):
    name = "bert, one label"
    assert difference(logits(load(tmp_path, name), seconds=False), name) > 100 * TOLERANCE


def test_vectors_of_modernbert(tmp_path):
    """The files are those that transformers writes for the model alone, and for masked tokens."""
    from safetensors.numpy import load_file, save_file

    scoring_cases.write(tmp_path, scoring_cases.MODERN, architectures=["ModernBertForMaskedLM"])
    path = tmp_path / "model.safetensors"
    given = {name: each for name, each in load_file(path).items() if "classifier" not in name}
    given["decoder.bias"] = np.zeros(48, np.float32)
    for tensors in (given, {name.removeprefix("model."): each for name, each in given.items()}):
        save_file(tensors, path)
        model = models.load_embedding(tmp_path, "float32")
        assert model.scoring is None and model.pooling.mode == "mean"
        batch = models.EmbeddingBatch.make(model, scoring_cases.pairs()[0], 96, 8, 16)
        assert difference(np.asarray(models.embed(model, batch))[:5], scoring_cases.VECTORS) < (
            TOLERANCE
        )


# ---- what scores mean ----------------------------------------------------------------------------


def test_activations():
    given = np.array([[1.0, -200.0], [0.0, 3.0]], np.float32)
    assert (scoring.apply(given, "identity") == given).all()
    sigmoid = [[0.7310586, 0], [0.5, 0.9525741]]
    assert np.abs(scoring.apply(given, "sigmoid") - sigmoid).max() < 1e-6
    softmax = [[1, 0], [0.0474259, 0.9525741]]
    assert np.abs(scoring.apply(given, "softmax") - softmax).max() < 1e-6


OLD_KEY, IDENTITY = "sbert_ce_default_activation_function", "torch.nn.modules.linear.Identity"


@pytest.mark.parametrize(
    ("name", "keys", "pair", "classes"),
    [
        ("bert, one label", {}, "sigmoid", "sigmoid"),
        ("bert, one label", {"problem_type": "regression"}, "sigmoid", "identity"),
        ("bert, one label", {OLD_KEY: IDENTITY}, "identity", "sigmoid"),
        (
            "bert, one label",
            {"sentence_transformers": {"activation_fn": IDENTITY, "version": "5.1"}},
            "identity",
            "sigmoid",
        ),
        ("roberta relu, 4 labels", {}, "identity", "softmax"),
        (
            "roberta relu, 4 labels",
            {"problem_type": "multi_label_classification"},
            "identity",
            "sigmoid",
        ),
    ],
)
def test_what_scores_mean(name, keys, pair, classes, tmp_path):
    means = load(tmp_path, name, **keys).scoring
    assert (means.pair_activation, means.class_activation) == (pair, classes)


@pytest.mark.parametrize(
    ("file", "value", "message"),
    [
        ("config_sentence_transformers.json", {"activation_fn": IDENTITY}, None),
        ("config_sentence_transformers.json", {"activation_fn": "x"}, "activation_fn: expected"),
        (
            "config_sentence_transformers.json",
            {"default_prompt_name": "query"},
            "default_prompt_name: expected None",
        ),
        ("modules.json", [{"type": "a.b.Transformer", "path": ""}], None),
        (
            "modules.json",
            [{"type": "a.Transformer"}, {"type": "a.Dense"}],
            "expected a Transformer alone, got ['a.Transformer', 'a.Dense']",
        ),
    ],
)
def test_files_of_sentence_transformers(file, value, message, tmp_path):
    (tmp_path / file).write_text(json.dumps(value))
    if message is None:
        activation = "identity" if "activation_fn" in value else "sigmoid"
        assert load(tmp_path, "bert, one label").scoring.pair_activation == activation
        return
    with pytest.raises(models.ModelDirectoryError) as error:
        load(tmp_path, "bert, one label")
    assert message in str(error.value) and file in str(error.value)


def test_two_activations_are_refused(tmp_path):
    sigmoid = "torch.nn.modules.activation.Sigmoid"
    keys = {OLD_KEY: IDENTITY, "sentence_transformers": {"activation_fn": sigmoid}}
    with pytest.raises(models.ModelDirectoryError, match=f"{OLD_KEY}: expected '{sigmoid}'"):
        load(tmp_path, "bert, one label", **keys)


@pytest.mark.parametrize(
    ("names", "has_types"),
    [(None, True), (["input_ids"], False), (["input_ids", "token_type_ids"], True)],
)
def test_types_are_those_of_the_tokenizer(names, has_types, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({} if names is None else {"model_input_names": names})
    )
    assert load(tmp_path, "bert, one label").scoring.has_types is has_types


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"id2label": {"0": "a", "1": "b"}}, "'classifier.bias': expected shape (2,), got (1,)"),
        ({"id2label": {"1": "a"}}, "id2label: expected names for '0', '1' and so on"),
        ({"id2label": [1]}, "id2label: expected names"),
        ({"problem_type": "ranking"}, "problem_type: expected None"),
        ({OLD_KEY: "torch.nn.Tanh"}, f"{OLD_KEY}: expected 'torch.nn.modules.linear.Identity'"),
        ({"sentence_transformers": {"activation_fn": "x"}}, "activation_fn: expected 'torch.nn"),
        ({"is_decoder": True}, "is_decoder: expected False, got True"),
    ],
)
def test_what_is_not_done_is_refused(keys, message, tmp_path):
    with pytest.raises(models.ModelDirectoryError) as error:
        load(tmp_path, "bert, one label", **keys)
    assert message in str(error.value) and str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"norm_bias": True}, "norm_bias: expected False, got True"),
        ({"attention_bias": True}, "attention_bias: expected False, got True"),
        ({"classifier_pooling": "max"}, "classifier_pooling: expected 'cls' or 'mean'"),
        ({"layer_types": ["full_attention"]}, "layer_types: expected 4 of 'full_attention'"),
        ({"local_attention": 1}, "local_attention: expected at least 2, got 1"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            "rope_type: expected 'default', got 'yarn'",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: expected None"),
    ],
)
def test_what_modernbert_does_not_do_is_refused(keys, message, tmp_path):
    with pytest.raises(models.ModelDirectoryError) as error:
        load(tmp_path, "modernbert, one label", **keys)
    assert message in str(error.value)


def test_a_decoder_with_a_head_is_refused(tmp_path):
    from helpers import embedding_cases

    embedding_cases.write(tmp_path, "qwen3", architectures=["Qwen3ForSequenceClassification"])
    with pytest.raises(models.ModelDirectoryError, match="architectures: expected an encoder"):
        models.load_embedding(tmp_path, "float32")


# ---- Qwen3-Reranker ----------------------------------------------------------------------------


def answer_difference(raw, yes=7, no=3) -> np.ndarray:
    """The logit of "yes" without that of "no" after the tokens up to LAST, as transformers has."""
    expected = np.load(model_cases.LOGITS)[raw][LAST // model_cases.LOGITS_EVERY]
    return expected[yes] - expected[no]


LAST = 42  # the last token whose logits are recorded


@pytest.mark.parametrize("name", ["qwen3", "qwen3 bias, layer_types"])
def test_yes_or_no(name, tmp_path):
    """One without a tied head, and one with."""
    scoring_cases.write_answers(tmp_path, name)
    model = models.load_embedding(tmp_path, "float32")
    assert model.scoring == scoring.OF_QUESTION and model.sizes == (1,)
    sequences = [model_cases.tokens()[: LAST + 1].tolist(), [5, 6, 7], [8]]
    for chunk in (None, 16):
        batch = models.EmbeddingBatch.make(model, sequences, 64, 4, chunk)
        got = np.asarray(models.embed(model, batch))
        assert got.shape == (4, 1)
        expected = answer_difference(name)
        assert abs(got[0, 0] - expected) < TOLERANCE * max(1, abs(expected))
        relevance = model.scoring.relevance(got[:1])
        assert abs(relevance[0] - 1 / (1 + np.exp(-expected))) < TOLERANCE
    scoring_cases.write_answers(tmp_path, name, yes="maybe")
    with pytest.raises(models.ModelDirectoryError, match="expected the tokens 'yes' and 'no'"):
        models.load_embedding(tmp_path, "float32")


def test_files_of_sentence_transformers_with_answers(tmp_path):
    scoring_cases.write_answers(tmp_path, "qwen3")
    modules = [
        {"path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
        {
            "path": "1_LogitScore",
            "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
        },
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_LogitScore").mkdir()
    path = tmp_path / "1_LogitScore" / "config.json"
    path.write_text(json.dumps({"true_token_id": 7, "false_token_id": 3}))
    assert models.load_embedding(tmp_path, "float32").scoring == scoring.OF_QUESTION
    path.write_text(json.dumps({"true_token_id": 7, "false_token_id": None}))
    with pytest.raises(models.ModelDirectoryError, match="false_token_id: expected 3, got None"):
        models.load_embedding(tmp_path, "float32")
    modules[1]["path"] = "../1_LogitScore"
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(models.ModelDirectoryError, match="path: expected one in this directory"):
        models.load_embedding(tmp_path, "float32")
