import pytest


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: a minute or more (run with `pytest -m slow`)")


def pytest_collection_modifyitems(config, items):
    if "slow" in (config.option.markexpr or ""):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="a minute or more; run with -m slow"))
