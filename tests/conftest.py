import os

# Before numpy loads: the reference multiplies many small matrices, on which BLAS threads only wait.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import pytest

from jax_attn import config


def pytest_configure(config):
    config.addinivalue_line("markers", "big: needs many GB of memory (run with `pytest -m big`)")


def pytest_collection_modifyitems(config, items):
    if "big" in (config.option.markexpr or ""):
        return
    for item in items:
        if item.get_closest_marker("big"):
            item.add_marker(pytest.mark.skip(reason="needs many GB; run with -m big"))


@pytest.fixture(autouse=True, scope="session")
def poison():
    """Results and workspaces hold 0xFF (NaN, -1) before every kernel of every test."""
    with config.poisoned():
        yield


@pytest.fixture
def backend(request):
    if request.param.platform == "gpu":
        try:
            jax.devices("gpu")
        except RuntimeError as error:
            pytest.skip(f"no GPU: {str(error).splitlines()[0]}")
    with request.param.active():
        yield request.param
