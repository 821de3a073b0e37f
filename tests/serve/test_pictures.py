"""Pictures in the engine: pages, chunks, prefixes, drafts and preemption."""

import dataclasses
import itertools
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("llguidance", reason="needs the extra `serve`")
pytest.importorskip("safetensors.numpy")

from helpers import picture_cases
from helpers.mesh_checks import run_on_cpus
from jax_attn import models
from jax_attn.serve._engine import picture_encoder
from jax_attn.serve._engine.engine import Engine
from jax_attn.serve._engine.engine_config import EngineConfig
from jax_attn.serve._scheduling.pictures import Picture, PictureNumbers
from jax_attn.serve._scheduling.request import SamplingParams, Sequence
from jax_attn.serve._scheduling.step_plan import ScheduledSequence

# Small, so that there are few executables to compile; a picture of 24 tokens takes several steps.
LIMITS = EngineConfig(num_pages=80, page_size=4, max_running=4, max_step_tokens=16)
NUM_TOKENS = 6
TOKEN = picture_cases.PICTURE_TOKEN

_ids = itertools.count()


def random_model(name: str) -> models.Model:
    tokenizer = models.load(models.BUNDLED, "float32").tokenizer
    raw = picture_cases.CONFIGS[name]
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": 0}
    config = models.parse_config(raw | {"text_config": raw["text_config"] | sizes})
    params = models.random_params(config, jax.random.key(0), "float32")
    return models.Model(config, params, tokenizer)


@pytest.fixture(scope="module")
def model() -> models.Model:
    return random_model("qwen3 vl")


@pytest.fixture(scope="module")
def vision(tmp_path_factory) -> models.VisionModel:
    directory = tmp_path_factory.mktemp("model")
    picture_cases.write(directory, "qwen3 vl")
    return models.load_vision(directory, "float32")


@pytest.fixture(scope="module")
def engine(model, vision) -> Engine:
    made = Engine(model, LIMITS, vision=vision)
    made.warm_up()
    return made


def picture(pixels: np.ndarray, begin: int, row_gap: int = 0) -> Picture:
    height, width, _ = pixels.shape
    return Picture(begin, height // 8, width // 8, height, width, pixels.tobytes(), row_gap)


def sequence(parts: list, namespace: str = "", row_gap: int = 0, **params) -> Sequence:
    """parts: tokens and pixels."""
    tokens, pictures = [], []
    for part in parts:
        if isinstance(part, np.ndarray):
            pictures.append(picture(part, len(tokens), row_gap))
            tokens += [TOKEN if shown else 45 for shown in pictures[-1].is_shown]
        else:
            tokens += part
    options = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True} | params
    name = f"s{next(_ids)}"
    return Sequence(
        name, name, tokens, SamplingParams(**options), namespace, pictures=tuple(pictures)
    )


def run(engine: Engine, *seqs: Sequence) -> list[list[int]]:
    answers = {seq.id: [] for seq in seqs}
    engine.submit(seqs)
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            answers[event.seq_id] += event.tokens
        engine.scheduler.check_integrity()
    return list(answers.values())


def expected(model: models.Model, vision: models.VisionModel, seq: Sequence) -> list[int]:
    """The likeliest tokens after the prompt and each token of the answer, by one forward pass."""
    prompt = seq.tokens[: seq.num_prompt]
    answer = seq.tokens[seq.num_prompt :]
    pixels = [np.frombuffer(x.pixels, np.uint8).reshape(x.height, x.width, 3) for x in seq.pictures]
    spans = [(x.begin, x.rows, x.columns) for x in seq.pictures]
    rows = np.zeros((0, 1 + len(vision.config.deepstack), 32), np.float32)
    if pixels:
        rows = np.asarray(models.encode_pictures(vision, pixels))
    tokens = prompt + answer
    padded = tokens + [0] * (80 - len(tokens))  # one shape for all
    gap = vision.config.row_gap
    logits = picture_cases.logits(model.config, model.params, rows, padded, spans, None, gap)
    return np.argmax(logits, -1)[seq.num_prompt - 1 :][: len(answer)].tolist()


LARGE = picture_cases.picture(32, 48)
SMALL, TALL = picture_cases.picture(16, 16), picture_cases.picture(24, 8)


def test_answers_are_those_of_one_forward_pass(model, vision, engine):
    seqs = [
        sequence([[5, 9, 42], LARGE, [43, 7, 42], TALL, [43, 12]]),
        sequence([[5, 9, 200, 31, 7, 7, 12, 90, 4]]),
        sequence([[42], SMALL, [43, 11, 12, 13]]),
    ]
    answers = run(engine, *seqs)
    assert engine.device.num_compiles_after_warm_up == 0
    for seq, answer in zip(seqs, answers, strict=True):
        assert len(answer) == NUM_TOKENS and answer == expected(model, vision, seq)


def test_choices_share_the_pages_of_a_picture_and_other_pictures_do_not(model, vision, engine):
    prompt = [[6, 9, 200, 31, 42], LARGE, [43, 77, 78]]
    first, second = sequence(prompt), sequence(prompt)
    answers = run(engine, first, second)
    assert answers[0] == answers[1] == expected(model, vision, first)
    assert second.num_cached == 31 and first.num_cached == 0

    other = LARGE.copy()
    other[-1, -1] ^= 255
    changed = sequence([prompt[0], other, prompt[2]])
    (answer,) = run(engine, changed)
    assert changed.num_cached == 5  # what is before the picture
    assert answer == expected(model, vision, changed)
    # Nor do tokens that only look like a picture's, or another tenant's.
    as_text = sequence([prompt[0], [TOKEN] * 24, prompt[2]])
    theirs = sequence(prompt, namespace="theirs")
    answers = run(engine, as_text, theirs)
    assert as_text.num_cached == 5 and theirs.num_cached == 0
    assert answers == [expected(model, vision, each) for each in (as_text, theirs)]


def test_a_tower_runs_once_for_a_picture_of_a_namespace(vision, engine, monkeypatch):
    seen = []
    encode = models.encode_pictures

    def spied(model, pixels, size):
        seen.append(len(pixels))
        return encode(model, pixels, size)

    monkeypatch.setattr(models, "encode_pictures", spied)
    pixels = picture_cases.picture(40, 24)
    run(engine, sequence([[1], pixels, [2]]), sequence([[3], pixels, [4]]))
    run(engine, sequence([[5], pixels, [6]]))
    assert seen == [1]
    run(engine, sequence([[1], pixels, [2]], "theirs"))
    assert seen == [1, 1]


def test_rows_that_are_not_kept_are_made_again(model, vision, engine, monkeypatch):
    monkeypatch.setattr(picture_encoder, "_KEPT_BYTES", 0)
    seqs = [sequence([[21, i], picture_cases.picture(32, 40), [2]]) for i in range(3)]
    answers = run(engine, *seqs)
    assert answers == [expected(model, vision, each) for each in seqs]


def test_preempted_and_drafted(model, vision):
    """Few pages, so that sequences lose theirs and read their pictures again."""
    limits = dataclasses.replace(LIMITS, num_pages=26, max_drafts=2, prefix_cache=False)
    engine = Engine(model, limits, vision=vision)
    engine.warm_up()
    pixels = [picture_cases.picture(32, 8 + 8 * i) for i in range(4)]
    seqs = [sequence([[5, 9], each, [43, 5, 9, 5, 9]], max_tokens=16) for each in pixels]
    answers = run(engine, *seqs)
    assert engine.scheduler.stats().num_preemptions > 0
    assert answers == [expected(model, vision, each) for each in seqs]
    assert all(len(answer) == 16 for answer in answers)


def test_a_model_with_states(tmp_path):
    """Checkpoints may be within a picture or behind it."""
    picture_cases.write(tmp_path, "qwen3.5")
    model, vision = random_model("qwen3.5"), models.load_vision(tmp_path, "float32")
    limits = dataclasses.replace(LIMITS, max_running=1, num_states=8, checkpoint_tokens=8)
    engine = Engine(model, limits, vision=vision)
    engine.warm_up()
    prompt = [[6, 9, 200, 31, 42], LARGE, [43, 77, 78]]
    seqs = [sequence([*prompt, [i]]) for i in range(2)]
    answers = run(engine, seqs[0]) + run(engine, seqs[1])
    assert answers == [expected(model, vision, each) for each in seqs]
    assert seqs[1].num_cached > 8


def test_tokens_that_see_each_other_are_of_one_step(tmp_path):
    """Gemma 3: chunks end before a picture or behind it, decodes go on, a part may be cached."""
    picture_cases.write(tmp_path, "gemma3")
    model, vision = random_model("gemma3"), models.load_vision(tmp_path, "float32")
    limits = dataclasses.replace(LIMITS, prefill_chunk=4, max_step_tokens=24)
    engine = Engine(model, limits, vision=vision)
    engine.warm_up()
    one, two = (picture_cases.picture(32, 32, i) for i in range(2))
    seqs = [
        sequence([[5, 9, 42], one, [43, 7, 8, 42], two, [43, 12]]),
        sequence([[5, 9, 200, 31, 7, 7, 12, 90, 4]], max_tokens=20),
        sequence([[5, 9, 42], one, [43, 7, 8, 42], one, [43, 12]]),
    ]
    chunks = []
    begin = engine.scheduler.launched
    engine.scheduler.launched = lambda step: (chunks.extend(step.entries), begin(step))
    answers = run(engine, *seqs)
    for entry in chunks:
        end = entry.begin + entry.num_tokens
        assert not any(x.begin < end < x.end for x in entry.seq.pictures)
    assert answers == [expected(model, vision, seq) for seq in seqs]
    again = sequence([[5, 9, 42], one, [43, 7, 8, 42], two, [44, 13]])
    (answer,) = run(engine, again)
    assert again.num_cached == 39 == again.pictures[1].end
    assert answer == expected(model, vision, again)
    with pytest.raises(ValueError, match="prompt_logprobs: expected False with pictures"):
        engine.submit([sequence([[5], one, [6]], prompt_logprobs=True, logprobs=0)])


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "mistral3"])
def test_batches_of_any_tower(name, tmp_path):
    """Their sizes are whole tokens, whatever a token's patches are; they run where the tower is."""
    picture_cases.write(tmp_path, name)
    device = jax.devices()[-1]
    vision = models.load_vision(tmp_path, "float32").on(device)
    assert {x.device for x in jax.tree.leaves(vision.params)} == {device}
    encoder = picture_encoder.PictureEncoder(vision)
    encoder.warm_up(None)
    pixels = picture_cases.pictures(picture_cases.CONFIGS[name])[0]
    rows, columns = vision.grid(pixels)
    gap = vision.config.row_gap
    shown = Picture(1, rows, columns, *pixels.shape[:2], pixels.tobytes(), gap)
    own = [TOKEN if each else 45 for each in shown.is_shown]
    seq = Sequence("s", "s", [5, *own, 6], SamplingParams(max_tokens=1), "", pictures=(shown,))
    encoder.check(seq)
    rows_of = encoder.rows_of([ScheduledSequence(seq, 0, len(seq.tokens), True)])
    found = rows_of(seq, shown)
    expected = models.encode_pictures(vision, [pixels])
    np.testing.assert_allclose(found[shown.is_shown], expected, rtol=1e-4, atol=1e-4)
    assert not found[~np.array(shown.is_shown)].any()


def test_a_tower_on_the_devices_of_its_engine():
    """As of a replica, and of two devices that share the model."""
    pytest.importorskip("tokenizers")
    run_on_cpus(2, "import test_pictures; test_pictures.check_devices()")


def check_devices():
    """Runs in a process with two devices."""
    with tempfile.TemporaryDirectory() as directory:
        picture_cases.write(Path(directory), "gemma3")
        vision = models.load_vision(directory, "float32")
    model, second = random_model("gemma3"), jax.devices()[1]
    for options in ({"devices": (second,)}, {"tensor_parallel": 2}):
        limits = dataclasses.replace(LIMITS, max_step_tokens=24, **options)
        engine = Engine(model, limits, vision=vision)
        if "devices" in options:
            arrays = jax.tree.leaves(engine._pictures.model.params)
            assert {array.device for array in arrays} == {second}
        engine.warm_up()
        seq = sequence([[5, 9, 42], picture_cases.picture(32, 32), [43, 7]])
        (answer,) = run(engine, seq)
        assert answer == expected(model, vision, seq)


def test_steps_that_are_too_small_for_a_picture(tmp_path):
    picture_cases.write(tmp_path, "gemma3")
    model, vision = random_model("gemma3"), models.load_vision(tmp_path, "float32")
    with pytest.raises(ValueError, match="expected at least 19, for all 16 tokens of a picture"):
        Engine(model, LIMITS, vision=vision)
    limits = dataclasses.replace(LIMITS, max_step_tokens=24, context_parallel=2)
    with pytest.raises(ValueError, match="context_parallel: expected 1 with the pictures"):
        Engine(model, limits, vision=vision)


def test_rows_with_a_token_behind_them(tmp_path):
    """Mistral 3 has them."""
    picture_cases.write(tmp_path, "mistral3")
    model, vision = random_model("mistral3"), models.load_vision(tmp_path, "float32")
    engine = Engine(model, LIMITS, vision=vision)
    engine.warm_up()
    seqs = [
        sequence([[5, 9], LARGE, [7, 42], TALL, [12]], row_gap=1),
        sequence([[42], SMALL, [11, 12, 13]], row_gap=1),
    ]
    answers = run(engine, *seqs)
    assert answers == [expected(model, vision, seq) for seq in seqs]
    with pytest.raises(ValueError, match="expected 4 tokens 40, with one behind each row from"):
        engine.submit([sequence([[42], SMALL, [11]])])


def test_what_does_not_fit_is_refused(model, engine):
    good = sequence([[1], SMALL, [2]])
    plain = Engine(model, LIMITS)
    with pytest.raises(ValueError, match="pictures: expected none, as this qwen3_vl model reads"):
        plain.submit([good])
    bad = sequence([[1], SMALL, [2]])
    bad.tokens[3] = 5
    with pytest.raises(ValueError, match=r"pictures\[0\]: expected 4 tokens 40 from token 1 of"):
        engine.submit([bad])
    bad = sequence([[1], SMALL, [2]])
    bad.pictures = (dataclasses.replace(bad.pictures[0], rows=1),)
    with pytest.raises(ValueError, match=r"expected 8 x 8 pixels for each of 2 x 1 tokens, got"):
        engine.submit([bad])
    with pytest.raises(ValueError, match="pixels: expected 12 bytes, got 3"):
        Picture(0, 1, 1, 2, 2, b"abc")


def test_a_request_with_pictures_ends_in_its_engine(model, vision, engine):
    seq = sequence([[5, 42], LARGE, [43, 12]])
    engine.submit([seq])
    answer = [token for event in engine.step() + engine.settle() for token in event.tokens]
    with pytest.raises(ValueError, match="expected a request without pictures, got 1 of them"):
        engine.export_request(seq.id)
    while engine.has_work:
        answer += [token for event in engine.step() for token in event.tokens]
    assert answer == expected(model, vision, seq)


def test_numbers_of_pictures(monkeypatch):
    """A number is never of two contents, and of one content until it is forgotten."""
    from jax_attn.serve._scheduling import pictures

    monkeypatch.setattr(pictures, "_MOST_NUMBERS", 2)
    numbers = PictureNumbers()
    a, b, c = (picture(np.full((8, 8, 3), i, np.uint8), 0) for i in range(3))
    wide = Picture(0, 1, 1, 4, 16, a.pixels)
    assert [numbers.of(x) for x in (a, b, a)] == [0, 1, 0]
    assert [numbers.of(x) for x in (c, wide)] == [2, 3]
    assert numbers.of(b) == 4
