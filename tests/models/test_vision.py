"""Pictures in models: towers, logits and pixels, against transformers' records."""

import dataclasses
import io
import json
import struct
import zlib

import numpy as np
import pytest

from helpers import picture_cases
from jax_attn import models
from jax_attn.models._config.keys import Keys
from jax_attn.models._vision import pixels, tower

pytest.importorskip("safetensors.numpy")
pytest.importorskip("tokenizers")

# Part of the largest number. Measured: up to 2e-6.
TOLERANCE = 1e-5
SIZES = [(37, 90), (8, 8), (300, 41), (64, 64)]


def recorded(name: str, key: str) -> np.ndarray:
    return np.load(picture_cases.RECORDED)[f"{name}: {key}"]


def difference(got, expected) -> float:
    """Relative to the largest expected number."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape and np.isfinite(got).all()
    return float(np.abs(got - expected).max() / np.abs(expected).max())


@pytest.fixture(scope="module", params=picture_cases.CONFIGS)
def case(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    picture_cases.write(directory, request.param)
    return request.param, directory


def features(vision: models.VisionModel) -> np.ndarray:
    return np.asarray(models.encode_pictures(vision, picture_cases.pictures()))


# ---- against transformers ----------------------------------------------------------------------


def test_tower_and_logits_agree_with_transformers(case):
    name, directory = case
    vision = models.load_vision(directory, "float32")
    rows = features(vision)
    assert difference(rows, recorded(name, "features")) < TOLERANCE
    config = models.load_config(directory)
    params = models.load_params(directory, config, "float32")
    tokens, spans = picture_cases.prompt()
    positions = models.picture_positions(0, len(tokens), spans)
    np.testing.assert_array_equal(positions, recorded(name, "positions"))
    logits = picture_cases.logits(config, params, rows, tokens, spans, [13, 17, len(tokens) - 30])
    assert difference(logits[::3], recorded(name, "logits")) < TOLERANCE


def test_live(case):
    """What transformers computes now is what the record says."""
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    import make_pictures

    name, _ = case
    for key, value in (make_pictures.computed(name) | make_pictures.resized(name)).items():
        assert difference(value, recorded(name, key)) < TOLERANCE, key


@pytest.mark.parametrize("height, width", SIZES)
def test_pixels_are_those_of_transformers(case, height, width):
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    name, directory = case
    vision = models.load_vision(directory, "float32")
    picture = models.prepare_picture(
        image.fromarray(picture_cases.picture(height, width)), vision.pixels
    )
    rows, columns = vision.grid(picture)
    expected = recorded(name, f"grid of {height} x {width}").tolist()
    assert [1, 2 * rows, 2 * columns] == expected
    batch = tower.PatchBatch.make(vision.config, [picture], 4 * rows * columns, "float32")
    normal = batch.patches / 255
    mean, std = (np.reshape(x, (3, 1, 1)) for x in (vision.pixels.mean, vision.pixels.std))
    frames = vision.config.num_frames
    patches = ((normal - mean) / std)[:, :, None].repeat(frames, 2)
    got = patches.reshape(-1)[::97]
    assert difference(got, recorded(name, f"{height} x {width}")) < 1e-6


# ---- mistakes ----------------------------------------------------------------------------------


def without_sections(config: models.ModelConfig) -> models.ModelConfig:
    (kind,) = config.kinds
    rope = dataclasses.replace(kind.rope, sections=(8, 0, 0))
    layers = tuple(dataclasses.replace(kind, rope=rope) for kind in config.layers)
    return dataclasses.replace(config, layers=layers)


@pytest.mark.parametrize("case", ["qwen3 vl"], indirect=True)
def test_the_comparison_finds_mistakes(case):
    name, directory = case
    vision = models.load_vision(directory, "float32")
    config = models.load_config(directory)
    params = models.load_params(directory, config, "float32")
    tokens, spans = picture_cases.prompt()
    rows, expected = recorded(name, "features"), recorded(name, "logits")

    def logits(config=config, rows=rows):
        return picture_cases.logits(config, params, rows, tokens, spans)[::3]

    assert difference(logits(), expected) < TOLERANCE
    assert difference(logits(without_sections(config)), expected) > 10 * TOLERANCE
    assert difference(logits(rows=rows[:, :1]), expected) > 10 * TOLERANCE
    for part, change in (("positions", lambda table: table[::-1]), ("patch", lambda x: x[::-1])):
        changed = dict(vision.params, **{part: change(vision.params[part])})
        other = dataclasses.replace(vision, params=changed)
        assert difference(features(other), recorded(name, "features")) > 10 * TOLERANCE


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"in_channels": 1}, "vision_config: in_channels: expected 3, got 1"),
        ({"hidden_act": "relu"}, "hidden_act: expected 'gelu_pytorch_tanh'"),
        ({"out_hidden_size": 16}, "out_hidden_size: expected 32, got 16"),
        ({"num_position_embeddings": 24}, "expected the square of an integer, got 24"),
        ({"deepstack_visual_indexes": [2, 0]}, "expected ascending layers of 3, got"),
        ({"num_heads": 3}, "hidden_size: expected a multiple of 4 x num_heads 3, got 32"),
        ({"model_type": "siglip"}, "model_type: expected 'qwen3_vl_vision' or 'qwen3_vl'"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_type: expected 'axial'"),
        ({"rope_parameters": {"factor": 2.0}}, "key 'factor' is not supported with 'axial'"),
        ({"num_hidden_layers": 2}, "num_hidden_layers: expected None, got 2"),
        ({"head_dim": 8}, "head_dim: expected None, got 8"),
    ],
)
def test_a_tower_that_is_refused(changes, message):
    raw = picture_cases.CONFIGS["qwen3 vl"]
    raw = raw | {"vision_config": raw["vision_config"] | changes}
    with pytest.raises(models.ModelDirectoryError, match=message):
        tower.parse(Keys(raw, "config.json"), 32, 48)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"mrope_section": [4, 4]}, "mrope_section: expected three integers >= 0, got"),
        ({"mrope_interleaved": False}, "mrope_interleaved: expected True, got False"),
    ],
)
def test_positions_that_are_refused(changes, message):
    raw = picture_cases.CONFIGS["qwen3 vl"]
    rope = raw["text_config"]["rope_parameters"] | changes
    text = raw["text_config"] | {"rope_parameters": rope}
    with pytest.raises(models.ModelDirectoryError, match=message):
        models.parse_config(raw | {"text_config": text})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"patch_size": 8}, "patch_size: expected 4, got 8"),
        ({"do_resize": False}, "do_resize: expected True"),
        ({"resample": 2}, "resample: expected 3"),
        ({"image_processor_type": "SiglipImageProcessor"}, "image_processor_type: expected"),
        ({"rescale_factor": 0.5}, "rescale_factor: expected 1 / 255, got 0.5"),
        ({"size": {"shortest_edge": 64, "longest_edge": 32}}, "a longest_edge of at least 64"),
        ({"image_std": [0.5]}, "image_std: expected a list of 3 numbers"),
    ],
)
def test_preprocessing_that_is_refused(case, changes, message, tmp_path):
    raw = picture_cases.CONFIGS["qwen3 vl"]
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(picture_cases.preprocessor(raw) | changes))
    config = tower.parse(Keys(raw, "config.json"), 32, 48)
    with pytest.raises(models.ModelDirectoryError, match=message):
        pixels.load_config(tmp_path, config)


def test_pictures_attend_to_themselves_alone(case):
    """A batch of several, with padding, is as each alone."""
    _, directory = case
    vision = models.load_vision(directory, "float32")
    alone = [models.encode_pictures(vision, [each]) for each in picture_cases.pictures()]
    together = models.encode_pictures(vision, picture_cases.pictures(), 160)
    np.testing.assert_allclose(together[:31], np.concatenate(alone), rtol=1e-4, atol=1e-4)


def test_positions_of_a_part_are_those_of_the_whole():
    tokens, spans = picture_cases.prompt()
    whole = models.picture_positions(0, len(tokens) + 5, spans)
    for begin, end in [(0, 1), (5, 9), (27, 40), (len(tokens), len(tokens) + 5)]:
        np.testing.assert_array_equal(
            models.picture_positions(begin, end, spans), whole[:, begin:end]
        )
    np.testing.assert_array_equal(models.picture_positions(3, 6, ()), [[3, 4, 5]] * 3)


# ---- files of pictures -------------------------------------------------------------------------

PIXELS = models.PixelConfig(8, 64, 4096, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def file_of(image, kind: str = "PNG", **options) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def png_header(side: int) -> bytes:
    """The beginning of a PNG of side x side pixels."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    data = b"IDAT" + zlib.compress(bytes(100))
    parts = [
        struct.pack(">I", len(x) - 4) + x + struct.pack(">I", zlib.crc32(x)) for x in (chunk, data)
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def test_a_picture_is_turned_and_its_background_white():
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    red = image.new("RGBA", (16, 8), (255, 0, 0, 255))
    red.paste((0, 0, 0, 0), (0, 0, 8, 8))
    exif = image.Exif()
    exif[274] = 6  # to be turned right
    got = models.prepare_picture(models.decode_picture(file_of(red, exif=exif)), PIXELS)
    assert got.shape == (16, 8, 3)
    assert got[0].tolist() == [[255] * 3] * 8 and got[-1].tolist() == [[255, 0, 0]] * 8


def test_files_that_are_no_pictures():
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    good = file_of(image.fromarray(picture_cases.picture(64, 64)))
    with pytest.raises(models.PictureError, match="got 5 bytes of something else"):
        models.decode_picture(b"hello")
    with pytest.raises(models.PictureError, match="a file that is damaged"):
        models.decode_picture(good[:3000])
    with pytest.raises(models.PictureError, match="PNG, JPEG, WEBP, GIF or BMP, got .* else"):
        models.decode_picture(file_of(image.new("RGB", (8, 8)), "TIFF"))
    with pytest.raises(models.PictureError, match="at most 4095 pixels, got 64 x 64"):
        models.decode_picture(good, 4095)
    for side in (10_000, 60_000):
        with pytest.raises(models.PictureError, match="expected at most 33554432 pixels"):
            models.decode_picture(png_header(side))
    with pytest.raises(models.PictureError, match="ratio of at most 200, got 1000 x 4 pixels"):
        models.prepare_picture(image.new("L", (1000, 4)), PIXELS)


def test_a_directory_that_lacks_a_part_is_of_texts(tmp_path):
    picture_cases.write(tmp_path, "qwen3 vl")
    assert models.has_vision(tmp_path)
    preprocessor, path = tmp_path / "preprocessor_config.json", tmp_path / "config.json"
    written = preprocessor.read_text()
    preprocessor.unlink()
    assert not models.has_vision(tmp_path)
    preprocessor.write_text(written)
    raw = json.loads(path.read_text())
    for vision in ({}, {"vision_config": None}):
        rest = {key: value for key, value in raw.items() if key != "vision_config"}
        path.write_text(json.dumps(rest | vision))
        assert not models.has_vision(tmp_path)
        assert models.load_config(tmp_path).family == "qwen3_vl"
