"""Pictures in models: towers, logits and pixels, against transformers' records."""

import dataclasses
import io
import json
import struct
import zlib

import jax
import numpy as np
import pytest

from helpers import picture_cases
from jax_attn import models
from jax_attn.models._products.panels import Panels
from jax_attn.models._vision import pixels
from jax_attn.models._vision.layers import PatchBatch

pytest.importorskip("safetensors.numpy")
pytest.importorskip("tokenizers")

# Part of the largest number. Measured: up to 1.8e-5, with Mistral 3.
TOLERANCE = 5e-5
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


def features(vision: models.VisionModel, name: str) -> np.ndarray:
    return np.asarray(
        models.encode_pictures(vision, picture_cases.pictures(picture_cases.CONFIGS[name]))
    )


# ---- against transformers ----------------------------------------------------------------------


def test_tower_and_logits_agree_with_transformers(case):
    name, directory = case
    vision = models.load_vision(directory, "float32")
    raw = picture_cases.CONFIGS[name]
    rows = features(vision, name)
    assert difference(rows, recorded(name, "features")) < TOLERANCE
    config = models.load_config(directory)
    params = models.load_params(directory, config, "float32")
    tokens, spans = picture_cases.prompt(raw)
    if config.position_parts == 3:
        positions = models.picture_positions(0, len(tokens), spans)
        np.testing.assert_array_equal(positions, recorded(name, "positions"))
    logits = picture_cases.logits(
        config, params, rows, tokens, spans, picture_cases.chunks(raw), vision.config.row_gap
    )
    assert difference(logits[::3], recorded(name, "logits")) < TOLERANCE


def test_a_tower_in_panels(case):
    name, directory = case
    vision = models.load_vision(directory, "float32", in_panels=True)
    assert isinstance(vision.params["layers"][0]["o"], Panels)
    assert difference(features(vision, name), recorded(name, "features")) < TOLERANCE


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
    assert [rows, columns] == recorded(name, f"grid of {height} x {width}").tolist()
    mean, std = (np.reshape(x, (3, 1, 1)) for x in (vision.pixels.mean, vision.pixels.std))
    normal = (picture.transpose(2, 0, 1) / 255 - mean) / std
    if "qwen" in name:
        capacity = rows * columns * vision.config.merge_size**2
        batch = PatchBatch.make(vision.config, [picture], capacity, "float32")
        frames = vision.config.num_frames
        normal = ((batch.patches / 255 - mean) / std)[:, :, None].repeat(frames, 2)
    got = normal.reshape(-1)[::97]
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
    tokens, spans = picture_cases.prompt(picture_cases.CONFIGS[name])
    rows, expected = recorded(name, "features"), recorded(name, "logits")

    def logits(config=config, rows=rows):
        return picture_cases.logits(config, params, rows, tokens, spans)[::3]

    assert difference(logits(), expected) < TOLERANCE
    assert difference(logits(without_sections(config)), expected) > 10 * TOLERANCE
    assert difference(logits(rows=rows[:, :1]), expected) > 10 * TOLERANCE
    for part, change in (("positions", lambda table: table[::-1]), ("patch", lambda x: x[::-1])):
        changed = dict(vision.params, **{part: change(vision.params[part])})
        other = dataclasses.replace(vision, params=changed)
        assert difference(features(other, name), recorded(name, "features")) > 10 * TOLERANCE


@pytest.mark.parametrize("case", ["gemma3", "gemma4"], indirect=True)
def test_tokens_of_a_picture_see_each_other(case):
    """Without it the logits differ from transformers' by more than the tolerance."""
    name, directory = case
    raw = picture_cases.CONFIGS[name]
    config = models.load_config(directory)
    assert config.sees_pictures
    params = models.load_params(directory, config, "float32")
    tokens, spans = picture_cases.prompt(raw)
    rows, expected = recorded(name, "features"), recorded(name, "logits")
    layers = tuple(dataclasses.replace(kind, sees_pictures=False) for kind in config.layers)
    causal = dataclasses.replace(config, layers=layers)
    logits = picture_cases.logits(causal, params, rows, tokens, spans)[::3]
    assert difference(logits, expected) > 10 * TOLERANCE
    # Nothing before a picture sees it.
    before = (spans[0][0] + 2) // 3
    assert difference(logits[:before], expected[:before]) < TOLERANCE


REFUSED_TOWERS = [
    ("gemma3", {"mm_tokens_per_image": 15}, "expected the square of a divisor of image_size 32"),
    ("gemma3", {"image_token_index": 48}, "image_token_index: expected a token"),
    ("gemma3", {"vision": {"num_attention_heads": 3}}, "a multiple of num_attention_heads 3"),
    ("gemma3", {"vision": {"model_type": "clip_vision_model"}}, "expected 'siglip_vision_model'"),
    ("gemma4", {"vision": {"head_dim": 6}}, "head_dim: expected a multiple of 4, got 6"),
    ("gemma4", {"vision": {"num_key_value_heads": 3}}, "a multiple of num_key_value_heads 3"),
    ("gemma4", {"vision": {"attention_bias": True}}, "attention_bias: expected False"),
    ("mistral3", {"vision_feature_layer": -2}, "vision_feature_layer: expected -1, got -2"),
    ("mistral3", {"vision": {"head_dim": 8}}, "head_dim: expected 16, got 8"),
    ("mistral3", {"projector_hidden_act": "tanh"}, "projector_hidden_act: expected 'gelu'"),
]


@pytest.mark.parametrize("name, changes, message", REFUSED_TOWERS)
def test_a_tower_of_another_family_that_is_refused(name, changes, message):
    changes = dict(changes)
    raw = picture_cases.CONFIGS[name]
    vision = raw["vision_config"] | changes.pop("vision", {})
    with pytest.raises(models.ModelDirectoryError, match=message):
        picture_cases.config_of(raw | changes | {"vision_config": vision})


REFUSED_PIXELS = [
    ("gemma3", {"size": {"height": 32, "width": 16}}, "width: expected 32, got 16"),
    ("gemma3", {"resample": 3}, "resample: expected 2"),
    ("gemma4", {"max_soft_tokens": 100}, "max_soft_tokens: expected 280, 70, 140, 560 or 1120"),
    ("gemma4", {"max_soft_tokens": 1120}, "expected at most position_embedding_size 256 /"),
    ("gemma4", {"do_normalize": True}, "do_normalize: expected False"),
    ("gemma4", {"pooling_kernel_size": 2}, "pooling_kernel_size: expected 3, got 2"),
    ("mistral3", {"size": {"longest_edge": 0}}, "longest_edge: expected a number > 0"),
    ("mistral3", {"do_center_crop": True}, "do_center_crop: expected None or False"),
]


@pytest.mark.parametrize("name, changes, message", REFUSED_PIXELS)
def test_preprocessing_of_another_family_that_is_refused(name, changes, message, tmp_path):
    raw = picture_cases.CONFIGS[name]
    keys = picture_cases.preprocessor(raw) | changes
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(keys))
    (tmp_path / "processor_config.json").write_text(json.dumps(picture_cases.processor(raw)))
    with pytest.raises(models.ModelDirectoryError, match=message):
        pixels.load_config(tmp_path, picture_cases.config_of(raw))


def test_the_processor_says_how_pictures_are_resized(tmp_path):
    """transformers 5 writes it into processor_config.json. Pixtral's patches are only there."""
    raw = picture_cases.CONFIGS["mistral3"]
    config = picture_cases.config_of(raw)
    path = tmp_path / "processor_config.json"
    assert not pixels.has_config(tmp_path)
    whole = picture_cases.processor(raw) | {"image_processor": picture_cases.preprocessor(raw)}
    path.write_text(json.dumps(whole))
    assert pixels.has_config(tmp_path)
    assert pixels.load_config(tmp_path, config).sizing == pixels.LongestEdge(8, 60)
    for change, message in (
        ({"spatial_merge_size": 1}, "spatial_merge_size: expected 2, got 1"),
        ({"patch_size": 16}, "patch_size: expected 4, got 16"),
        ({"image_break_token": "|"}, "image_break_token: expected"),
    ):
        path.write_text(json.dumps(whole | change))
        with pytest.raises(models.ModelDirectoryError, match=message):
            pixels.load_config(tmp_path, config)


def test_names_of_tensors_on_the_hub(tmp_path):
    """Those of SigLIP have one more part, and a head that is not read."""
    from safetensors.numpy import load_file, save_file

    picture_cases.write(tmp_path, "gemma3")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    expected = models.load_vision(tmp_path, "float32").params
    longer = {
        key.replace("vision_tower.", "vision_tower.vision_model."): tensors[key] for key in tensors
    }
    longer["vision_tower.vision_model.head.probe"] = np.zeros(3, np.float32)
    save_file(longer, path)
    assert models.has_vision(tmp_path)
    jax.tree.map(
        np.testing.assert_array_equal, models.load_vision(tmp_path, "float32").params, expected
    )
    save_file({key: tensors[key] for key in tensors if "vision_tower" not in key}, path)
    assert not models.has_vision(tmp_path)
    config = models.load_config(tmp_path)  # a text model, which loads
    models.load_params(tmp_path, config, "float32")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"in_channels": 1}, "vision_config: in_channels: expected 3, got 1"),
        ({"hidden_act": "tanh"}, "hidden_act: expected 'gelu'"),
        ({"out_hidden_size": 16}, "out_hidden_size: expected 32, got 16"),
        ({"num_position_embeddings": 24}, "expected the square of an integer, got 24"),
        ({"deepstack_visual_indexes": [2, 0]}, "expected ascending layers of 3, got"),
        ({"num_heads": 3}, "hidden_size: expected a multiple of 4 x num_heads 3, got 32"),
        ({"model_type": "siglip"}, "model_type: expected 'qwen3_vl_vision' or 'qwen3_vl'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type: expected 'axial'"),
        ({"rope_parameters": {"factor": 2.0}}, "key 'factor' is not supported with 'axial'"),
        ({"num_hidden_layers": 2}, "num_hidden_layers: expected None, got 2"),
        ({"head_dim": 8}, "head_dim: expected None, got 8"),
    ],
)
def test_a_tower_that_is_refused(changes, message):
    raw = picture_cases.CONFIGS["qwen3 vl"]
    raw = raw | {"vision_config": raw["vision_config"] | changes}
    with pytest.raises(models.ModelDirectoryError, match=message):
        picture_cases.config_of(raw)


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
def test_preprocessing_that_is_refused(changes, message, tmp_path):
    raw = picture_cases.CONFIGS["qwen3 vl"]
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(picture_cases.preprocessor(raw) | changes))
    config = picture_cases.config_of(raw)
    with pytest.raises(models.ModelDirectoryError, match=message):
        pixels.load_config(tmp_path, config)


def test_pictures_attend_to_themselves_alone(case):
    """A batch of several, with padding, is as each alone."""
    name, directory = case
    vision = models.load_vision(directory, "float32")
    pictures = picture_cases.pictures(picture_cases.CONFIGS[name])
    alone = np.concatenate([models.encode_pictures(vision, [each]) for each in pictures])
    capacity = (len(alone) + 9) * vision.config.merge_size**2
    together = models.encode_pictures(vision, pictures, capacity)[: len(alone)]
    np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-4)


def test_positions_of_a_part_are_those_of_the_whole():
    tokens, spans = picture_cases.prompt(picture_cases.CONFIGS["qwen3 vl"])
    whole = models.picture_positions(0, len(tokens) + 5, spans)
    for begin, end in [(0, 1), (5, 9), (27, 40), (len(tokens), len(tokens) + 5)]:
        np.testing.assert_array_equal(
            models.picture_positions(begin, end, spans), whole[:, begin:end]
        )
    np.testing.assert_array_equal(models.picture_positions(3, 6, ()), [[3, 4, 5]] * 3)


# ---- files of pictures -------------------------------------------------------------------------

PIXELS = models.PixelConfig(pixels.Multiples(8, 64, 4096), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


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
