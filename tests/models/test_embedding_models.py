"""Embedding models against transformers and sentence-transformers, and refused models."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from helpers import embedding_cases
from jax_attn import models
from jax_attn.models._embedding import embedding
from jax_attn.models._weights import float_weights

pytest.importorskip("safetensors.numpy", reason="needs the extra `models`")
pytest.importorskip("tokenizers", reason="needs the extra `models`")

TOLERANCE = 1e-5  # of the largest number; measured: 5e-7
every_model = pytest.mark.parametrize("name", embedding_cases.CASES)


def largest_difference(got, expected) -> float:
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape and np.isfinite(got).all()
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def embed(model, sequences, num_tokens=96, num_rows=8, chunk=None) -> np.ndarray:
    batch = models.EmbeddingBatch.make(model, sequences, num_tokens, num_rows, chunk)
    vectors = np.asarray(models.embed(model, batch))
    assert not vectors[len(sequences) :].any()
    return vectors[: len(sequences)]


def load(directory: Path, name: str) -> models.EmbeddingModel:
    return models.load_embedding(embedding_cases.write(directory, name), "float32")


@pytest.mark.parametrize("in_panels", [False, True])
@every_model
def test_agrees_with_transformers(name, in_panels, tmp_path):
    directory = embedding_cases.write(tmp_path, name)
    model = models.load_embedding(directory, "float32", in_panels=in_panels)
    recorded = np.load(embedding_cases.RECORDED)[name]
    vectors = embed(model, embedding_cases.sequences())
    assert largest_difference(vectors, recorded) < TOLERANCE
    _, _, normalizes = embedding_cases.CASES[name]
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1) == normalizes


def test_a_published_model():
    """Embeds texts and compares with sentence-transformers."""
    if (directory := embedding_cases.minilm()) is None:
        pytest.skip(f"{embedding_cases.MINILM_PACKAGE} is not installed, with 90 MB of weights")
    model = models.load_embedding(directory, "float32")
    assert model.max_tokens == 256
    model.tokenizer.no_truncation()
    model.tokenizer.no_padding()
    sequences = [model.tokenizer.encode(text).ids for text in embedding_cases.TEXTS]
    vectors = embed(model, sequences, 512, 16)
    assert np.abs(vectors - np.load(embedding_cases.RECORDED)[embedding_cases.MINILM]).max() < 1e-5


@every_model
def test_agrees_with_transformers_live(name):
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    import make_embeddings

    recorded = np.load(embedding_cases.RECORDED)[name]
    assert largest_difference(make_embeddings.embeddings(name), recorded) < TOLERANCE


def changed(**changes):
    def change(model):
        return dataclasses.replace(model, config=dataclasses.replace(model.config, **changes))

    return change


def pooled(**changes):
    def change(model):
        return dataclasses.replace(model, pooling=dataclasses.replace(model.pooling, **changes))

    return change


def without(*names):
    """Sets the named weights of every layer or of the top level to zero."""

    def change(model):
        params = model.params
        for each in (params, *params["layers"]):
            each.update({name: 0 * each[name] for name in names if name in each})
        return model

    return change


def windowless(model):
    layers = tuple(dataclasses.replace(kind, window=None) for kind in model.config.layers)
    return changed(layers=layers)(model)


MISTAKES = [
    ("bert mean", changed(activation="gelu_new")),
    ("bert mean", pooled(mode="cls")),
    ("bert mean", pooled(normalize=False)),
    ("bert mean", without("types")),
    ("bert mean", without("positions")),
    ("bert mean", without("norm_bias")),
    ("bert mean", without("qkv_bias")),
    ("bert mean", without("o_bias")),
    ("bert mean", without("up_bias")),
    ("bert mean", without("down_bias")),
    ("bert mean", without("mlp_norm_bias")),
    ("bert mean", without("attention_norm_bias")),
    ("bert cls, tanh, one type", changed(norm_eps=1e-12)),
    ("bert cls, tanh, one type", pooled(mode="last")),
    ("xlm-roberta", changed(pad_token=None)),
    ("xlm-roberta", changed(pad_token=2)),
    ("roberta relu, pad 3", changed(activation="gelu")),
    ("qwen3", pooled(mode="mean")),
    ("qwen3", changed(rms_norm_eps=1e-2)),
    ("qwen3", without("q_norm")),
    ("mistral window, mean", windowless),
]


@pytest.mark.parametrize(("name", "mistake"), MISTAKES)
def test_a_part_left_out_is_seen(name, mistake, tmp_path):
    model = mistake(load(tmp_path, name))
    recorded = np.load(embedding_cases.RECORDED)[name]
    assert largest_difference(embed(model, embedding_cases.sequences()), recorded) > TOLERANCE


@every_model
def test_vectors_do_not_depend_on_the_batch(name, tmp_path):
    model, sequences = load(tmp_path, name), embedding_cases.sequences()
    together = embed(model, sequences, 128, 16)
    for tokens, expected in zip(sequences, together, strict=True):
        assert largest_difference(embed(model, [tokens], 48, 1), expected[None]) < TOLERANCE


@every_model
@pytest.mark.parametrize("chunk", [8, 48])
def test_chunks_of_tokens_change_nothing(name, chunk, tmp_path):
    model = load(tmp_path, name)
    vectors = embed(model, embedding_cases.sequences(), 96, 8, chunk)
    assert largest_difference(vectors, np.load(embedding_cases.RECORDED)[name]) < TOLERANCE


def test_what_is_padding_is_no_piece(tmp_path):
    model = load(tmp_path, "bert mean")
    batch = models.EmbeddingBatch.make(model, [[5] * 17], 64, 2, chunk=8)
    assert len(batch.plans) == 3
    assert len(list(embedding.pieces(model, batch))) == 2 + 3 * 2 * 3


def test_a_batch_has_no_room_for_more(tmp_path):
    model = load(tmp_path, "bert mean")
    with pytest.raises(ValueError, match="at most 8 tokens of 2 sequences, got 9 of 1"):
        models.EmbeddingBatch.make(model, [[1] * 9], 8, 2)
    with pytest.raises(ValueError, match="at most 8 tokens of 2 sequences, got 3 of 3"):
        models.EmbeddingBatch.make(model, [[1], [2], [3]], 8, 2)
    with pytest.raises(ValueError, match="chunk: expected a divisor of 8, got 3"):
        models.EmbeddingBatch.make(model, [[1]], 8, 2, chunk=3)


# ---- directories -------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [1, 2, 3])
def test_parts_of_a_weight_lie_side_by_side(num):
    parts = {str(i): np.full((i + 1, 2), i) for i in range(num)}
    joined = float_weights._joined(parts, {name: part.shape for name, part in parts.items()})
    assert joined[:, 1].tolist() == [0, 1, 1, 2, 2, 2][: len(joined)]
    assert len(joined) == num * (num + 1) // 2


def edit(directory: Path, file: str, **keys) -> None:
    path = directory / file
    raw = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(raw | keys))


REFUSED = [
    ("bert mean", "config.json", {"model_type": "nomic_bert"}, "config.json: model_type: expected"),
    ("bert mean", "config.json", {"hidden_act": "silu"}, "hidden_act: expected 'gelu'"),
    (
        "bert mean",
        "config.json",
        {"position_embedding_type": "relative_key"},
        "position_embedding_type: expected 'absolute' or None, got 'relative_key'",
    ),
    ("bert mean", "config.json", {"is_decoder": True}, "is_decoder: expected False, got True"),
    ("bert mean", "config.json", {"num_attention_heads": 5}, "hidden_size: expected a multiple"),
    ("bert mean", "config.json", {"vocab_size": 47}, "expected shape (47, 32), got (48, 32)"),
    ("bert mean", "config.json", {"num_hidden_layers": 4}, "'bert.encoder.layer.3"),
    ("xlm-roberta", "config.json", {"pad_token_id": None}, "pad_token_id: expected an integer"),
    ("xlm-roberta", "config.json", {"pad_token_id": 63}, "more than pad_token_id + 1, got 64"),
    ("qwen3", "config.json", {"is_causal": False}, "is_causal: expected True, got False"),
    (
        "bert mean",
        "config.json",
        {"matryoshka_dimensions": [64]},
        "matryoshka_dimensions: expected integers from 1 to 32, got [64]",
    ),
    ("bert mean", "1_Pooling/config.json", {"pooling_mode": "max"}, "'cls', 'mean' or 'lasttoken'"),
    (
        "bert mean",
        "1_Pooling/config.json",
        {"pooling_mode": ["mean", "cls"]},
        "pooling_mode: expected",
    ),
    ("bert mean", "1_Pooling/config.json", {"include_prompt": False}, "include_prompt: expected"),
    ("bert mean", "1_Pooling/config.json", {"embedding_dimension": 3}, "embedding_dimension: "),
    ("bert mean", "sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case: expected"),
    ("bert mean", "sentence_bert_config.json", {"transformer_task": "fill-mask"}, "'fill-mask'"),
]


@pytest.mark.parametrize(("name", "file", "keys", "message"), REFUSED)
def test_what_is_not_done_is_refused(name, file, keys, message, tmp_path):
    embedding_cases.write(tmp_path, name)
    edit(tmp_path, file, **keys)
    with pytest.raises(models.ModelDirectoryError) as error:
        models.load_embedding(tmp_path, "float32")
    assert message in str(error.value) and str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", "2")], "Pooling, Dense"),
        ([("Transformer", "")], "got Transformer"),
        ([("Transformer", "0"), ("Pooling", "1_Pooling")], "path: expected '', got '0'"),
        ([("Transformer", ""), ("Pooling", "../1_Pooling")], "expected a type and a path"),
        ([("Transformer", ""), ("Pooling", "2_Pooling")], "no such file"),
    ],
)
def test_other_modules_are_refused(modules, message, tmp_path):
    embedding_cases.write(tmp_path, "bert mean")
    entries = [{"type": f"a.{kind}", "path": path} for kind, path in modules]
    (tmp_path / "modules.json").write_text(json.dumps(entries))
    with pytest.raises(models.ModelDirectoryError, match="modules.json|2_Pooling") as error:
        models.load_embedding(tmp_path, "float32")
    assert message in str(error.value)


def test_an_encoder_alone_is_pooled_by_the_mean(tmp_path):
    name = "xlm-roberta"
    embedding_cases.write(tmp_path, name)
    (tmp_path / "modules.json").unlink()
    model = models.load_embedding(tmp_path, "float32")
    assert model.pooling == embedding.Pooling("mean", normalize=False)
    recorded = np.load(embedding_cases.RECORDED)[name]
    assert largest_difference(embed(model, embedding_cases.sequences()), recorded) < TOLERANCE


def test_a_decoder_alone_makes_no_embeddings(tmp_path):
    embedding_cases.write(tmp_path, "qwen3")
    (tmp_path / "modules.json").unlink()
    with pytest.raises(models.ModelDirectoryError, match="expected the tokens 'yes' and 'no'"):
        models.load_embedding(tmp_path, "float32")


@pytest.mark.parametrize(
    ("old", "mode"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"word_embedding_dimension": 32}, "mean"),
    ],
)
def test_older_words_for_pooling(old, mode, tmp_path):
    embedding_cases.write(tmp_path, "bert mean")
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(old))
    assert models.load_embedding(tmp_path, "float32").pooling.mode == mode


def test_names_with_a_prefix_and_tensors_of_other_tasks(tmp_path):
    from safetensors.numpy import load_file, save_file

    embedding_cases.write(tmp_path, "bert mean")
    path = tmp_path / "model.safetensors"
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(path).items()}
    tensors["bert.pooler.dense.weight"] = tensors["cls.predictions.bias"] = np.ones((2, 2))
    tensors["bert.embeddings.position_ids"] = np.arange(64)[None]
    save_file(tensors, path)
    model = models.load_embedding(tmp_path, "float32")
    vectors = embed(model, embedding_cases.sequences())
    recorded = np.load(embedding_cases.RECORDED)["bert mean"]
    assert largest_difference(vectors, recorded) < TOLERANCE


@pytest.mark.parametrize(
    ("files", "longest"),
    [
        ({}, 64),
        ({"sentence_bert_config.json": {"max_seq_length": 9}}, 9),
        ({"sentence_bert_config.json": {"max_seq_length": 99}}, 64),
        ({"tokenizer_config.json": {"model_max_length": 12}}, 12),
        ({"tokenizer_config.json": {"model_max_length": 1e30}}, 64),
        (
            {
                "sentence_bert_config.json": {"max_seq_length": 9},
                "tokenizer_config.json": {"model_max_length": 8},
            },
            9,
        ),
    ],
)
def test_the_longest_sequence(files, longest, tmp_path):
    embedding_cases.write(tmp_path, "bert mean")
    for file, keys in files.items():
        edit(tmp_path, file, **keys)
    assert models.load_embedding(tmp_path, "float32").max_tokens == longest


def test_positions_of_roberta_leave_less_room(tmp_path):
    assert load(tmp_path, "roberta relu, pad 3").max_tokens == 60


def test_sizes(tmp_path):
    assert list(load(tmp_path, "bert mean").sizes) == [32]
    edit(tmp_path, "config.json", matryoshka_dimensions=[16, 8])
    assert list(models.load_embedding(tmp_path, "float32").sizes) == [8, 16, 32]
    shutil.rmtree(tmp_path / "1_Pooling")
    assert list(load(tmp_path, "qwen3").sizes) == list(range(1, 33))
