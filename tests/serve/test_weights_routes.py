"""/v1/weights: off, refused, and new weights of a directory while requests run."""

import asyncio
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from helpers.serve.fake_engine import FakeEngine, fake_model
from helpers.serve.live_server import serving
from helpers.serve.remote import remote
from helpers.serve.small_engine import make_engine, sequence, warm_device
from jax_attn import models
from jax_attn.serve import _options

OPERATOR, CLIENT = "operator-key-0123456789", "client-key-0123456789ab"
ROUTES = ("/v1/weights", "/v1/weights/pause", "/v1/weights/resume")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A directory with `new`, other weights for the bundled model, and `wrong`."""
    top = tmp_path_factory.mktemp("weights")
    new = shutil.copytree(models.BUNDLED, top / "new")
    tensors = load_file(new / "model.safetensors")
    changed = {name: (x.astype(np.float32) * 1.05).astype(x.dtype) for name, x in tensors.items()}
    save_file(changed, new / "model.safetensors")
    wrong = shutil.copytree(new, top / "wrong")
    changed.pop("model.norm.weight")
    save_file(changed, wrong / "model.safetensors")
    return top


class Controlled(FakeEngine):
    """Remembers what operators ask for."""

    async def control(self, name, **options):
        self.controls = [*getattr(self, "controls", []), (name, options)]
        if options.get("version") == "bad":
            raise ValueError("model.norm.weight: expected, but missing")
        return "7"


def test_routes_are_off_and_for_operators(weights):
    keys = {"api_keys": (CLIENT,), "operator_keys": (OPERATOR,)}
    operator = {"Authorization": f"Bearer {OPERATOR}"}
    client = {"Authorization": f"Bearer {CLIENT}"}
    with serving(**keys) as off:
        for route in ROUTES:
            answer = off.post(route, {"path": "new"}, **operator)
            assert (answer.status, answer.error["code"]) == (404, "weights_are_fixed")
    engine = Controlled(fake_model().tokenizer)
    with serving(engine, weights_directory=weights, **keys) as server:
        for route in ROUTES:
            assert server.post(route, {}).status == 401
            answer = server.post(route, {}, **client)
            assert (answer.status, answer.error["code"]) == (403, "operators_only")
        for path in ("..", "/etc", "none", "new/model.safetensors", "../" + weights.name + "2"):
            answer = server.post("/v1/weights", {"path": path}, **operator)
            assert answer.status == 400 and answer.error["param"] == "path"
        assert server.post("/v1/weights", {}, **operator).error["param"] == "path"
        body = {"path": "new", "version": "12", "keep_prefixes": True}
        assert server.post("/v1/weights", body, **operator).json == {"version": "7"}
        assert server.post("/v1/weights/pause", {"end": True}, **operator).ok
        assert server.post("/v1/weights/resume", {}, **operator).ok
        answer = server.post("/v1/weights", {"path": "new", "version": "bad"}, **operator)
        assert answer.status == 400 and "expected, but missing" in answer.error["message"]
    assert engine.controls[:3] == [
        ("weights", {"directory": weights / "new", "version": "12", "keep_prefixes": True}),
        ("pause", {"end": True}),
        ("resume", {}),
    ]


def test_a_link_out_of_the_directory_is_refused(weights, tmp_path):
    (weights / "link").symlink_to(tmp_path)
    engine = Controlled(fake_model().tokenizer)
    with serving(engine, weights_directory=weights, operator_keys=(OPERATOR,)) as server:
        answer = server.post("/v1/weights", {"path": "link"}, Authorization=f"Bearer {OPERATOR}")
    assert answer.status == 400 and not hasattr(engine, "controls")


def test_the_option_needs_operators(capsys):
    with pytest.raises(SystemExit):
        _options.parse(["--weights-directory", "/tmp"])
    assert "--weights-directory: expected --operator-key-file" in capsys.readouterr().err


def test_weights_of_a_directory_over_the_wire(whole_model, weights):
    engine = make_engine(whole_model, warm_device(whole_model))

    async def tokens_of(client):
        return [t async for event in client.generate([sequence()]) for t in event.tokens]

    async def main():
        async with remote(engine) as client:
            before = await tokens_of(client)
            assert await client.control("pause", end=False) == "0"
            held = asyncio.create_task(tokens_of(client))
            with pytest.raises(ValueError, match="model.norm.weight"):
                await client.control(
                    "weights", directory=weights / "wrong", version=None, keep_prefixes=False
                )
            options = {"directory": weights / "new", "keep_prefixes": False}
            assert await client.control("weights", version="a", **options) == "a"
            assert not held.done()
            assert await client.control("resume") == "a"
            after = await held
            assert after != before and after == await tokens_of(client)

    asyncio.run(main())
    assert engine.version == "a"
