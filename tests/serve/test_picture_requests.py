"""Pictures in requests: from data: URLs to places in the prompt, and what is refused."""

import base64
import dataclasses
import io

import numpy as np
import pytest

pytest.importorskip("llguidance", reason="needs the extra `serve`")
pytest.importorskip("PIL.Image", reason="Pillow is not installed")

from PIL import Image

from helpers import picture_cases
from helpers.serve.fake_engine import FakeEngine
from helpers.serve.live_server import eventually, post_bytes, serving
from jax_attn import models
from jax_attn.models._vision.layers import PromptText
from jax_attn.models._vision.pixels import PanAndScan
from jax_attn.serve._anthropic import message_schemas
from jax_attn.serve._anthropic.messages_api import MessagesApi
from jax_attn.serve._http.picture_urls import FetchError, PictureFetcher
from jax_attn.serve._ollama import ollama_api, ollama_schemas
from jax_attn.serve._openai import response_schemas, schemas
from jax_attn.serve._openai.bounds import KeyLimits
from jax_attn.serve._openai.errors import ApiError
from jax_attn.serve._openai.logprobs import TokenJson
from jax_attn.serve._openai.model_facts import ModelFacts
from jax_attn.serve._openai.pictures import PictureReader
from jax_attn.serve._openai.prepare import Caller, Preparer
from jax_attn.serve._openai.responses_api import ResponsesApi
from jax_attn.serve._text.token_bytes import TokenBytes

CALLER = Caller("", 0.0)
PIXELS = picture_cases.picture(32, 48)


def encoded(pixels: np.ndarray = PIXELS) -> str:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


URL = f"data:image/png;base64,{encoded()}"


def part(url: str = URL) -> dict:
    return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A directory, and its text model and vision tower without weights."""
    directory = tmp_path_factory.mktemp("model")
    picture_cases.write_chat(directory)
    model = models.load(directory, "float32")._replace(params={})
    return directory, model, dataclasses.replace(models.load_vision(directory), params={})


@pytest.fixture(scope="module")
def preparer(loaded) -> Preparer:
    directory, model, vision = loaded
    engine = FakeEngine(model.tokenizer)
    limits = KeyLimits.default(8, 8)
    return Preparer(model, engine, directory, ["tiny"], limits, {}, vision, 3)


def chat(preparer: Preparer, content: list, **fields):
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4} | fields
    return preparer.chat(schemas.ChatCompletionRequest.model_validate(body), CALLER)


def check(preparer: Preparer, sequences: list, text: str, grids: list[tuple[int, int]]) -> None:
    """text: of the prompt, with one place for each picture."""
    for seq in sequences:
        tokens, pieces = seq.tokens, []
        assert [(x.rows, x.columns) for x in seq.pictures] == grids
        token = preparer._pictures._vision.config.picture_token
        begin = 0
        for each in seq.pictures:
            assert tokens[each.begin : each.end] == [token] * each.num_tokens
            pieces += tokens[begin : each.begin + 1]
            begin = each.end
        decoded = preparer.decode(pieces + tokens[begin:])
        assert decoded == text.replace("PICTURE", "<|vision_start|><|image_pad|><|vision_end|>")


def test_parts_of_a_chat(preparer):
    other = f"data:image/jpeg;base64,{encoded(picture_cases.picture(16, 16))}"
    text = {"type": "text", "text": "and"}
    made = chat(preparer, [part(), text, part(other)], n=2)
    check(preparer, made.sequences, "user: PICTUREandPICTURE;", [(4, 6), (2, 2)])
    first, second = made.sequences
    assert first.pictures is second.pictures
    assert first.pictures[0].pixels == PIXELS.tobytes()
    body = {"messages": [{"role": "user", "content": [part()]}]}
    tokens = preparer.tokenize(schemas.TokenizeRequest.model_validate(body))
    assert tokens == preparer.chat_prompt(schemas.ChatCompletionRequest.model_validate(body)).tokens


def test_responses_and_messages(preparer):
    shown = {"type": "input_image", "image_url": URL, "detail": "high"}
    content = [{"type": "input_text", "text": "what is"}, shown]
    body = {"input": [{"role": "user", "content": content}], "max_output_tokens": 4}
    parsed = response_schemas.ResponsesRequest.model_validate(body)
    api = ResponsesApi(preparer, TokenJson(TokenBytes(preparer._tokenizer)))
    made, _ = api.prepare(parsed, CALLER)
    check(preparer, made.sequences, "user: what isPICTURE;", [(4, 6)])

    source = {"type": "base64", "media_type": "image/png", "data": encoded()}
    content = [
        {"type": "text", "text": "what is"},
        {"type": "image", "source": source},
        {"type": "text", "text": "?"},
    ]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "model": "tiny"}
    api = MessagesApi(preparer)
    made, _ = api.prepare(message_schemas.MessagesRequest.model_validate(body), CALLER)
    check(preparer, made.sequences, "user: what isPICTURE?;", [(4, 6)])
    del body["max_tokens"]
    count = api.count(message_schemas.CountRequest.model_validate(body))
    assert count.input_tokens == len(made.sequences[0].tokens)


# What a template of the family writes for a picture, and what transformers' processor makes of it.
PROMPTS = {
    "gemma3": (
        "<start_of_image>",
        lambda h, w: f"\n\n<start_of_image>{'<soft>' * 16}<end_of_image>\n\n",
    ),
    "gemma4": ("<soft>", lambda h, w: f"<start_of_image>{'<soft>' * h * w}<end_of_image>"),
    "mistral3": ("<soft>", lambda h, w: "[IMG_BREAK]".join(["<soft>" * w] * h) + "[IMG_END]"),
}


@pytest.mark.parametrize("family", PROMPTS)
def test_the_text_around_a_picture(family, tmp_path):
    marker, expanded = PROMPTS[family]
    tokenizer = picture_cases.write_family(tmp_path, family, marker)
    model = models.Model(models.load_config(tmp_path), {}, tokenizer)
    vision = dataclasses.replace(models.load_vision(tmp_path), params={})
    engine, limits = FakeEngine(tokenizer), KeyLimits.default(8, 8)
    engine.limits.max_model_len = 2000
    preparer = Preparer(model, engine, tmp_path, ["tiny"], limits, {}, vision, 3)
    text = {"type": "text", "text": "\nand\n"}
    (seq,) = chat(preparer, [part(), text, part()]).sequences
    grids = [(x.rows, x.columns) for x in seq.pictures]
    assert len(grids) == 2
    pieces = "\nand\n".join(expanded(*grid) for grid in grids)
    expected = tokenizer.encode(f"user: {pieces};", add_special_tokens=False).ids
    assert seq.tokens == expected
    token = vision.config.picture_token
    for each in seq.pictures:
        own = np.array(seq.tokens[each.begin : each.end])
        assert ((own == token) == each.is_shown).all()
    with pytest.raises(ApiError, match="a place in the prompt for each of 1 pictures, got 2"):
        chat(preparer, [part(), {"type": "text", "text": marker}])


def test_a_tokenizer_without_the_tokens_of_pictures(loaded):
    directory, model, vision = loaded
    prompt = dataclasses.replace(vision.config, prompt=PromptText(99999, (99999,)))
    with pytest.raises(ValueError, match="expected token 99999, which config.json names"):
        PictureReader(dataclasses.replace(vision, config=prompt), model.tokenizer, 99, None)
    prompt = dataclasses.replace(vision.config, prompt=PromptText(1, (1,), ("[IMG_BREAK]", "b")))
    with pytest.raises(ValueError, match=r"expected the token '\[IMG_BREAK\]' of pictures"):
        PictureReader(dataclasses.replace(vision, config=prompt), model.tokenizer, 99, None)


# Left, top, right and bottom of parts, as Gemma3ImageProcessor of transformers 5.24 cuts them.
PARTS = {
    (600, 600): [],
    (600, 719): [],
    (600, 720): [(0, 0, 360, 600), (360, 0, 720, 600)],
    (512, 1024): [(0, 0, 512, 512), (512, 0, 1024, 512)],
    (256, 2000): [(i, 0, i + 500, 256) for i in range(0, 2000, 500)],
    (255, 2000): [],
    (1000, 300): [(0, 0, 300, 334), (0, 334, 300, 668), (0, 668, 300, 1000)],
    (1300, 512): [(0, 0, 512, 434), (0, 434, 512, 868), (0, 868, 512, 1300)],
    (700, 513): [(0, 0, 513, 350), (0, 350, 513, 700)],
    (300, 1501): [(0, 0, 376, 300), (376, 0, 752, 300), (752, 0, 1128, 300), (1128, 0, 1501, 300)],
}


def test_parts_are_cut_as_transformers_does():
    pan_and_scan = PanAndScan()
    assert {size: pan_and_scan.boxes(*size) for size in PARTS} == PARTS


def test_pan_and_scan(tmp_path):
    """Parts of a long picture follow it, with the text that Gemma 3's processor writes."""
    marker, expanded = PROMPTS["gemma3"]
    tokenizer = picture_cases.write_family(tmp_path, "gemma3", marker)
    model = models.Model(models.load_config(tmp_path), {}, tokenizer)
    vision = dataclasses.replace(models.load_vision(tmp_path), params={})
    engine, limits = FakeEngine(tokenizer), KeyLimits.default(8, 8)
    engine.limits.max_model_len = 2000
    preparer = Preparer(model, engine, tmp_path, ["tiny"], limits, {}, vision, 3)
    long = picture_cases.picture(300, 620)
    content = [part(f"data:image/png;base64,{encoded(long)}"), part()]  # the second is small
    asked = {"mm_processor_kwargs": {"do_pan_and_scan": True}}
    (seq,) = chat(preparer, content, **asked).sequences
    one = expanded(4, 4)
    text = f"Here is the original image {one} and here are some crops to help you see better {one}"
    expected = tokenizer.encode(f"user: {text} {one}{one};", add_special_tokens=False).ids
    (plain,) = chat(preparer, content).sequences
    assert len(plain.pictures) == 2 and len(seq.pictures) == 4
    assert seq.tokens == expected
    whole, *parts = [x.pixels for x in seq.pictures[:3]]
    image = Image.fromarray(long)
    for got, box in zip(parts, [(0, 0, 310, 300), (310, 0, 620, 300)], strict=True):
        assert got == models.prepare_picture(image.crop(box), vision.pixels).tobytes()
    assert whole == models.prepare_picture(image, vision.pixels).tobytes()
    shown = [{"type": "input_image", "image_url": x["image_url"]["url"]} for x in content]
    body = asked | {"input": [{"role": "user", "content": shown}]}
    api = ResponsesApi(preparer, TokenJson(TokenBytes(tokenizer)))
    made, _ = api.prepare(response_schemas.ResponsesRequest.model_validate(body), CALLER)
    assert made.sequences[0].tokens == expected


def test_a_model_without_parts_of_pictures(preparer):
    with pytest.raises(ApiError, match="^mm_processor_kwargs: expected do_pan_and_scan false"):
        chat(preparer, [part()], mm_processor_kwargs={"do_pan_and_scan": True})


def test_pictures_are_a_feature(loaded, preparer):
    assert preparer.features == ["completions", "chat", "pictures"]
    directory, model, _ = loaded
    facts, tokens = ModelFacts.of(model.config, directory), TokenJson(TokenBytes(model.tokenizer))
    api = ollama_api.OllamaApi(preparer, facts, tokens)
    shown = api.show(ollama_schemas.ShowRequest(model="tiny"))
    assert shown.capabilities == ["completion", "vision"]


def test_a_chat_of_ollama(preparer):
    messages = [{"role": "user", "content": "what is", "images": [encoded()]}]
    parsed = ollama_schemas.OllamaChatRequest.model_validate({"model": "m", "messages": messages})
    messages = ollama_api._messages(parsed.messages)
    made = preparer.chat(
        schemas.ChatCompletionRequest.model_validate({"messages": messages, "max_tokens": 4}),
        CALLER,
    )
    check(preparer, made.sequences, "user: PICTUREwhat is;", [(4, 6)])


BAD = [
    (part("https://example.com/a.png"), ".image_url.url", "as nothing is fetched here, got 'http"),
    (part("data:image/png,abc"), ".image_url.url", "expected a data: URL with base64"),
    (part("data:image/png;base64,a b"), ".image_url.url", "expected base64 behind the comma"),
    (part("data:;base64,aGVsbG8="), ".image_url.url", "got 5 bytes of something else"),
]


@pytest.mark.parametrize("bad, param, words", BAD)
def test_a_picture_that_is_refused(preparer, bad, param, words):
    with pytest.raises(ApiError, match=words) as refused:
        chat(preparer, [{"type": "text", "text": "a"}, bad])
    assert refused.value.status == 400
    assert refused.value.param == f"messages[0].content[1]{param}"
    assert len(str(refused.value)) < 300


def test_requests_that_are_refused(preparer):
    with pytest.raises(ApiError, match="expected at most 3 pictures, got 4"):
        chat(preparer, [part()] * 4)
    with pytest.raises(ApiError, match="a place in the prompt for each of 1 pictures, got 2"):
        chat(preparer, [part(), {"type": "text", "text": "<|image_pad|>"}])
    with pytest.raises(ApiError, match="a place in the prompt for each of 0 pictures, got 1"):
        chat(preparer, [{"type": "text", "text": "<|image_pad|>"}])
    with pytest.raises(ApiError, match="truncate_prompt_tokens: not supported with pictures"):
        chat(preparer, [part()], truncate_prompt_tokens=9)
    with pytest.raises(ApiError, match="expected pictures of the user, got one of 'system'"):
        messages = [{"role": "system", "content": [part()]}, {"role": "user", "content": "a"}]
        chat(preparer, [], messages=messages)
    preparer._pictures._max_tokens, most = 30, preparer._pictures._max_tokens
    with pytest.raises(ApiError, match="resulted in over 48 tokens"):
        chat(preparer, [part()] * 3)
    preparer._pictures._max_tokens = most


def test_pixels_in_flight_are_bounded(loaded):
    directory, model, vision = loaded
    engine, path = FakeEngine(model.tokenizer), "/v1/chat/completions"
    limits = KeyLimits(requests=9, choices=9, picture_bytes=2 * PIXELS.nbytes)
    body = {"messages": [{"role": "user", "content": [part()]}], "max_tokens": 4, "n": 3}
    with serving(engine, directory, model=model, vision=vision, key_limits=limits) as server:
        limiter = server.app.state.server.limiter
        assert server.post(path, body).ok
        eventually(lambda: not limiter.held(""))
        three = {"messages": [{"role": "user", "content": [part()] * 3}]}
        answer = server.post(path, body | three)
        assert answer.status == 400 and answer.error["code"] == "too_many_picture_bytes"
        engine.holds_at = 1
        sent = post_bytes(path, body)
        with server.connect(sent), server.connect(sent):
            eventually(lambda: limiter.held("")["picture_bytes"] == 2 * PIXELS.nbytes)
            answer = server.post(path, body)
            assert answer.status == 429 and "pixels in flight" in answer.error["message"]
        eventually(lambda: not limiter.held(""))


def test_urls_of_allowed_hosts(loaded, monkeypatch):
    """In whole requests, with what another server would send."""
    directory, model, vision = loaded
    engine, url = FakeEngine(model.tokenizer), "https://pictures.example/a.png"
    asked = []

    def fetch(self, url, max_bytes, deadline):
        asked.append(url)
        if "lost" in url:
            raise FetchError("the host 'pictures.example' answered 404")
        return base64.b64decode(encoded())

    monkeypatch.setattr(PictureFetcher, "_fetch", fetch)
    hosts = {"image_hosts": ("pictures.example",)}
    with serving(engine, directory, model=model, vision=vision, **hosts) as server:
        body = {"messages": [{"role": "user", "content": [part(url), part(), part(url)]}]}
        assert server.post("/v1/chat/completions", body | {"max_tokens": 4}).ok
        (seq,) = engine.submitted
        assert [x.pixels for x in seq.pictures] == [PIXELS.tobytes()] * 3
        assert asked == [url]
        answer = server.post("/tokenize", body)
        assert answer.ok and answer.json["tokens"] == seq.tokens
        body = {"messages": [{"role": "user", "content": [part(url), part(url + "?lost")]}]}
        answer = server.post("/v1/chat/completions", body | {"max_tokens": 4})
        assert answer.status == 400 and "answered 404" in answer.error["message"]
        assert answer.error["param"] == "messages[0].content[1].image_url.url"
        eventually(lambda: not server.app.state.server.limiter.held(""))
