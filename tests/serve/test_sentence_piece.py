"""SentencePiece-like tokenizers: the first space of a completion, whole and streamed, with echo."""

import functools
import itertools
import json

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")

from helpers.serve.fake_engine import FakeEngine, fake_model
from helpers.serve.live_server import serving
from helpers.serve.tokenizer_kinds import KINDS, end_token, metaspace, with_added
from jax_attn.serve._text.detokenizer import Detokenizer, Texts
from jax_attn.serve._text.token_bytes import TokenBytes

ALL_KINDS = {**KINDS, "metaspace": metaspace}
STRIPS = {"llama", "mistral", "unigram", "metaspace"}


texts_of = functools.cache(Texts)  # slow: it reads all tokens


def pieces(tokenizer, tokens, before=(), **options) -> list[str]:
    detokenizer = Detokenizer(texts_of(tokenizer), before=before, **options)
    return [*map(detokenizer.push, tokens), detokenizer.flush()]


PROMPTS = ("the", "the\n", "the 漢", "  ", "é", "name:", "a<x>")
OUTPUTS = (" the name", "    name", "the", "\n  b", " ", "<x> a")


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("skip", [True, False])
def test_a_text_that_goes_on(kind, skip):
    """It is what it adds to the text before, with every space."""
    tokenizer = with_added(ALL_KINDS[kind](), {"<x>": ("special",)})
    hidden = TokenBytes(tokenizer).special if skip else ()
    for prompt, output in itertools.product(PROMPTS, OUTPUTS):
        ids = tokenizer.encode(prompt + output, add_special_tokens=False).ids
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        for at in range(1, len(ids)):
            before, rest = ids[:at], ids[at:]
            text = tokenizer.decode(before, skip_special_tokens=skip)
            # Not inside a character, and not before the text begins.
            if "\ufffd" not in text and any(token not in hidden for token in before):
                shown = pieces(tokenizer, rest, before, skip_special_tokens=skip)
                assert text + "".join(shown) == whole


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_text_of_its_own(kind):
    """Without a text before, or with special tokens only, it begins as the tokenizer's own do."""
    tokenizer = ALL_KINDS[kind]()
    tokens = tokenizer.encode("the name", add_special_tokens=False).ids
    end = end_token(tokenizer)
    for before in ((), (end,), (end, end)):
        assert "".join(pieces(tokenizer, tokens, before)) == "the name"
    assert TokenBytes(tokenizer).strips_first_space() == (kind in STRIPS)


# ---- over HTTP ---------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=sorted(ALL_KINDS))
def server(request, tmp_path_factory):
    model = fake_model()
    model.tokenizer = ALL_KINDS[request.param]()
    directory = tmp_path_factory.mktemp("model")
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("helpers.serve.live_server.fake_model", lambda: model)
        patch.setattr(FakeEngine, "FAIL", "")
        with serving(FakeEngine(model.tokenizer), directory=directory) as server:
            server.kind = request.param
            yield server


def says(server, text: str) -> None:
    """Has the engine write the tokens that go on with `text`."""
    tokenizer = server.engine.tokenizer
    prompt = tokenizer.encode("the", add_special_tokens=False).ids
    tokens = tokenizer.encode("the" + text, add_special_tokens=False).ids
    assert tokens[: len(prompt)] == prompt
    server.engine.says = text
    server.engine.says_tokens = tokens[len(prompt) :]


@pytest.mark.parametrize("text", [" name a", "    name", ".name"])
def test_completions(server, text):
    says(server, text)
    num_output = len(server.engine.says_tokens) + 1
    body = {"prompt": "the", "max_tokens": 50, "add_special_tokens": False}
    for echo in (False, True):
        whole = "the" * echo + text
        options = body | {"echo": echo, "logprobs": 0}
        choice = server.post("/v1/completions", options).json["choices"][0]
        assert choice["text"] == whole
        found = choice["logprobs"]
        token_ends = [*found["text_offset"][1:], len(whole)]
        shown = [whole[b:e] for b, e in zip(found["text_offset"], token_ends, strict=True)]
        num_prompt = len(found["tokens"]) - num_output
        assert shown[num_prompt:-1] == found["tokens"][num_prompt:-1]  # but the end's
        *chunks, _ = server.events("/v1/completions", body | {"echo": echo})
        assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks) == whole


def test_an_answer_of_its_own_has_no_first_space(server):
    says(server, " name")
    text = "name" if server.kind in STRIPS else " name"
    body = {"messages": [{"role": "user", "content": "the"}], "max_tokens": 9}
    chat = server.post("/v1/chat/completions", body)
    assert chat.json["choices"][0]["message"]["content"] == text
    more = {"continue_final_message": True}
    chat = server.post("/v1/chat/completions", body | more)
    assert chat.json["choices"][0]["message"]["content"] == " name"
    # A prompt of special tokens only.
    end = end_token(server.engine.tokenizer)
    options = {"prompt": [end], "max_tokens": 9, "logprobs": 0}
    choice = server.post("/v1/completions", options).json["choices"][0]
    assert choice["text"] == text
    first, second, *_ = choice["logprobs"]["text_offset"]
    assert (first, second) == (0, len(choice["logprobs"]["tokens"][0]) - (text == "name"))
