import pytest

from jax_attn import _core


@pytest.fixture(params=_core.supported_cpu_isas())
def isa(request):
    """A CPU instruction set, for as long as the test runs."""
    before = _core.cpu_isa()
    _core.set_cpu_isa(request.param)
    yield request.param
    _core.set_cpu_isa(before)
