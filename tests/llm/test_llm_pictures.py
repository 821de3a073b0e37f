"""Pictures from Python: LLM.chat with files, bytes, arrays and images."""

import io

import numpy as np
import pytest

pytest.importorskip("PIL.Image", reason="Pillow is not installed")

from PIL import Image

from helpers import picture_cases
from helpers.small_llm import SMALL, check_at_rest
from jax_attn import LLM, SamplingParams, models

PIXELS = picture_cases.picture(32, 24)
PARAMS = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    made = tmp_path_factory.mktemp("model")
    picture_cases.write_chat(made)
    return made


@pytest.fixture(scope="module")
def llm(directory):
    with LLM(directory, dtype="float32", **SMALL) as made:
        yield made


def chat(image) -> list[dict]:
    text = {"type": "text", "text": "what is"}
    return [{"role": "user", "content": [text, {"type": "image", "image": image}]}]


def test_a_chat_with_pictures(llm, directory, tmp_path):
    image = Image.fromarray(PIXELS)
    image.save(tmp_path / "a.png")
    file = (tmp_path / "a.png").read_bytes()
    given = [PIXELS, image, file, tmp_path / "a.png", str(tmp_path / "a.png")]
    outputs = llm.chat([chat(each) for each in given], PARAMS)
    (answer,) = {tuple(output.completions[0].tokens) for output in outputs}
    prompt = outputs[0].prompt_tokens
    vision = models.load_vision(directory, "float32")
    begin = prompt.index(vision.config.picture_token)
    assert prompt.count(vision.config.picture_token) == 12
    rows = np.asarray(models.encode_pictures(vision, [PIXELS]))
    model = models.load(directory, "float32")
    tokens = [*prompt, *answer]
    logits = picture_cases.logits(model.config, model.params, rows, tokens, [(begin, 4, 3)])
    assert tuple(np.argmax(logits, -1)[len(prompt) - 1 : -1]) == answer
    check_at_rest(llm)


def test_a_model_without_parts_of_pictures(llm):
    with pytest.raises(ValueError, match="mm_processor_kwargs: expected do_pan_and_scan false"):
        llm.chat(chat(PIXELS), PARAMS, mm_processor_kwargs={"do_pan_and_scan": True})


def test_what_is_no_picture(llm):
    out = io.BytesIO()
    Image.new("L", (8, 8)).save(out, "TIFF")
    for bad, words in [
        (3, "expected a path, the bytes of a file, an array or an image of Pillow, got int"),
        (PIXELS[0], r"expected an array \[height, width, 3\] of uint8, got \[24, 3\] of uint8"),
        (out.getvalue(), "expected a picture as PNG"),
        ("nowhere.png", "nowhere.png"),
    ]:
        with pytest.raises(ValueError, match=rf"chat: prompts\[0\]: .*{words}"):
            llm.chat(chat(bad), PARAMS)
    with pytest.raises(ValueError, match=r"score: prompts\[0\]: expected no pictures"):
        llm.score([chat(PIXELS)])
