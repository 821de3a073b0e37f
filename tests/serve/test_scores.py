"""/v1/rerank, /v1/score and /classify over HTTP and in Python, with small models."""

import numpy as np
import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")
pytest.importorskip("uvicorn", reason="needs the extra `serve`")

from helpers import embedding_cases, scoring_cases
from helpers.serve.live_server import serving, serving_encoder
from jax_attn import LLM, models
from jax_attn.serve._openai import scores
from jax_attn.serve._openai.bounds import KeyLimits

TOLERANCE = 1e-5
QUERY, DOCUMENTS = "w5 w6", ["w7", "w8 w9 w10", "w11 w5 w6"]
PAIRS = [([1, 5, 6, 2, 7, 2], 4), ([1, 5, 6, 2, 8, 9, 10, 2], 4), ([1, 5, 6, 2, 11, 5, 6, 2], 4)]


def directory_of(tmp_path_factory, name):
    return scoring_cases.write(tmp_path_factory.mktemp("model"), name)


@pytest.fixture(scope="module")
def cross_directory(tmp_path_factory):
    return directory_of(tmp_path_factory, "bert, one label")


@pytest.fixture(scope="module")
def classes_directory(tmp_path_factory):
    return directory_of(tmp_path_factory, "roberta relu, 4 labels")


@pytest.fixture(scope="module")
def cross(cross_directory):
    return models.load_embedding(cross_directory, "float32")


@pytest.fixture(scope="module")
def classes(classes_directory):
    return models.load_embedding(classes_directory, "float32")


@pytest.fixture(scope="module")
def server(cross):
    with serving_encoder(cross, "scores") as server:
        yield server


@pytest.fixture(scope="module")
def classes_server(classes):
    with serving_encoder(classes, "scores") as server:
        yield server


def logits(model, sequences, seconds=None) -> np.ndarray:
    batch = models.EmbeddingBatch.make(model, sequences, 96, 8, seconds=seconds)
    return np.asarray(models.embed(model, batch))[: len(sequences)]


@pytest.fixture(scope="module")
def expected(cross) -> np.ndarray:
    sequences, seconds = zip(*PAIRS, strict=True)
    return 1 / (1 + np.exp(-logits(cross, sequences, seconds)[:, 0]))


@pytest.fixture(scope="module")
def probabilities(classes) -> np.ndarray:
    made = np.exp(logits(classes, [[1, 5, 6, 2], [1, 7, 2]]))
    return made / made.sum(axis=1, keepdims=True)


def test_rerank(server, expected):
    answer = server.post("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS})
    assert answer.ok, answer.body
    results = answer.json["results"]
    assert [each["index"] for each in results] == np.argsort(-expected).tolist()
    got = np.array([each["relevance_score"] for each in results])
    assert np.abs(got - np.sort(expected)[::-1]).max() < TOLERANCE
    assert np.ptp(expected) > 100 * TOLERANCE
    assert answer.json["usage"] == {"prompt_tokens": 22, "total_tokens": 22}
    assert answer.json["model"] == "scores" and "document" not in results[0]


def test_rerank_of_objects_the_best_only(server, expected):
    body = {
        "model": "scores",
        "query": QUERY,
        "documents": [{"text": text} for text in DOCUMENTS],
        "top_n": 1,
        "return_documents": True,
    }
    (best,) = server.post("/v1/rerank", body).json["results"]
    assert best["index"] == int(expected.argmax())
    assert best["document"] == {"text": DOCUMENTS[best["index"]]}


@pytest.mark.parametrize("text_1", [QUERY, [QUERY], [QUERY] * 3])
def test_score(server, expected, text_1):
    answer = server.post("/v1/score", {"text_1": text_1, "text_2": DOCUMENTS})
    assert [each["index"] for each in answer.json["data"]] == [0, 1, 2]
    got = [each["score"] for each in answer.json["data"]]
    assert np.abs(got - expected).max() < TOLERANCE


def test_more_pairs_than_a_batch_holds(server, expected):
    answer = server.post("/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS * 50})
    got = [each["score"] for each in answer.json["data"]]
    assert np.abs(got - np.tile(expected, 50)).max() < TOLERANCE


def test_classify(classes_server, probabilities):
    answer = classes_server.post("/classify", {"input": ["w5 w6", "w7"]})
    for i, each in enumerate(answer.json["data"]):
        assert np.abs(np.array(each["probs"]) - probabilities[i]).max() < TOLERANCE
        assert each["label"] == f"class {probabilities[i].argmax()}"
        assert each["num_classes"] == 4 and each["index"] == i


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/v1/rerank", {"documents": ["w5"]}, "query", "query"),
        ("/v1/rerank", {"query": "w5"}, "documents", "documents"),
        ("/v1/rerank", {"query": "w5", "documents": []}, "documents", "documents"),
        ("/v1/rerank", {"query": "w5", "documents": ["w5"], "top_n": 0}, "top_n", "1"),
        (
            "/v1/rerank",
            {"query": "w5", "documents": ["w5"], "max_tokens_per_doc": 7},
            "max_tokens_per_doc",
            "not supported",
        ),
        (
            "/v1/rerank",
            {"query": "w5", "documents": ["w5", " ".join(["w5"] * 61)]},
            "documents[1]",
            "resulted in 65 tokens",
        ),
        ("/v1/rerank", {"query": "w5", "documents": ["w5 " * 9**6]}, "documents[0]", "over 128"),
        ("/v1/rerank", {"query": "w5", "documents": ["w5"] * 2049}, "documents", "2048"),
        (
            "/v1/score",
            {"text_1": ["w5", "w6"], "text_2": ["w5"] * 3},
            "text_1",
            "expected one text or 3, got 2",
        ),
        ("/v1/score", {"text_1": "w5"}, "text_2", "text_2"),
        ("/classify", {"input": []}, None, "input"),
    ],
)
def test_what_is_wrong_is_said(server, path, body, param, words):
    answer = server.post(path, body)
    assert answer.status == 400, answer.body
    assert words in answer.error["message"]
    assert param is None or answer.error["param"] == param


def test_models_of_another_kind(server, classes_server):
    body = {"query": QUERY, "documents": DOCUMENTS}
    answer = classes_server.post("/v1/rerank", body)
    assert answer.status == 400 and "'scores' has 4 labels" in answer.error["message"]
    answer = server.post("/v1/embeddings", {"input": "w5"})
    assert answer.status == 404 and "'scores' is one for /v1/rerank" in answer.error["message"]
    answer = server.post("/v1/rerank", body | {"model": "x"})
    assert answer.status == 404 and "'x' makes no scores here" in answer.error["message"]
    with serving() as none:
        answer = none.post("/classify", {"input": "w5"})
        assert answer.status == 404 and "--embedding-model" in answer.error["message"]


def test_tokens_and_bytes_are_bounded(cross, monkeypatch):
    monkeypatch.setattr(scores, "MAX_REQUEST_TOKENS", 20)
    limits = KeyLimits(requests=9, choices=9, embedding_bytes=8)
    with serving_encoder(cross, "scores", key_limits=limits) as server:
        body = {"query": QUERY, "documents": DOCUMENTS}
        error = server.post("/v1/rerank", body).error
        assert error["message"] == "documents: more than 20 tokens in one request"
        few = body | {"documents": ["w5"] * 3}
        assert server.post("/v1/rerank", few).error["code"] == "too_many_embedding_bytes"
        assert server.post("/v1/rerank", body | {"documents": ["w5"] * 2}).ok


# ---- in Python ---------------------------------------------------------------------------------


def test_in_python(cross_directory, classes_directory, expected, probabilities):
    with LLM(embedding_model=str(cross_directory), dtype="float32") as llm:
        assert np.abs(llm.rerank(QUERY, DOCUMENTS) - expected).max() < TOLERANCE
        with pytest.raises(ValueError, match=r"rerank: documents\[1\]: expected a text, got 5"):
            llm.rerank(QUERY, ["w5", 5])
        with pytest.raises(ValueError, match="rerank: documents: expected a list of texts"):
            llm.rerank(QUERY, "w5")
        with pytest.raises(ValueError, match=r"embed: .* got one for scores"):
            llm.embed("w5")
    with LLM(embedding_model=str(classes_directory), dtype="float32") as llm:
        made = llm.classify(["w5 w6", "w7"])
        assert np.abs(made - probabilities).max() < TOLERANCE
        assert llm.labels == ("class 0", "class 1", "class 2", "class 3")
        with pytest.raises(ValueError, match="rerank: .*has 4 labels"):
            llm.rerank(QUERY, DOCUMENTS)


def test_a_model_for_vectors_makes_no_scores(tmp_path):
    embedding_cases.write(tmp_path, "bert mean")
    with (
        LLM(embedding_model=str(tmp_path), dtype="float32") as llm,
        pytest.raises(ValueError, match=r"classify: .* got one for vectors"),
    ):
        llm.classify(["w5"])


def test_a_text_model_that_answers_yes_or_no(tmp_path):
    """Its prompt is that of Qwen3-Reranker's model card, whose parts are encoded apart."""
    scoring_cases.write_answers(tmp_path, "qwen3")
    model = models.load_embedding(tmp_path, "float32")
    prompt = model.scoring.prompt
    pair = "<Instruct>: Given a web search query, retrieve relevant passages that answer the query"
    texts = [f"{pair}\n<Query>: {QUERY}\n<Document>: {document}" for document in DOCUMENTS]
    sequences = [
        [
            token
            for part in (prompt.before, text, prompt.behind)
            for token in model.tokenizer.encode(part, add_special_tokens=False).ids
        ]
        for text in texts
    ]
    assert prompt.before.startswith("<|im_start|>system\nJudge whether the Document meets the req")
    assert prompt.behind.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    batch = models.EmbeddingBatch.make(model, sequences, 384, 8)
    made = np.asarray(models.embed(model, batch))[:3, 0]
    scores = 1 / (1 + np.exp(-made))
    with serving_encoder(model, "answers") as server:
        answer = server.post("/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS})
        assert answer.ok, answer.body
        got = [each["score"] for each in answer.json["data"]]
        assert np.abs(got - scores).max() < TOLERANCE and np.ptp(scores) > 100 * TOLERANCE
        answer = server.post("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS})
        assert [x["index"] for x in answer.json["results"]] == np.argsort(-scores).tolist()
        assert answer.json["usage"]["total_tokens"] == sum(map(len, sequences))
        answer = server.post("/classify", {"input": QUERY})
        assert answer.status == 400 and "scores pairs only" in answer.error["message"]
