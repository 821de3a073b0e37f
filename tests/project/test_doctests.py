"""The examples in the docstrings of the public modules run, and print what they say."""

import doctest
import importlib
import inspect

import pytest

import jax_attn as ja

# Records, what needs a GPU or NVRTC, and what takes the arguments of a call that has an example.
WITHOUT = {"At", "PlanBucket", "append_rotated", "export_checks", "item_times", "precompile"}
WITHOUT |= {"state_from_triplet"}  # has that of state_to_triplet
CALLS = [name for name in ja.__all__ if callable(getattr(ja, name)) and name not in WITHOUT]
MODULES = sorted({inspect.getmodule(getattr(ja, name)).__name__ for name in ja.__all__})


@pytest.mark.parametrize("module", MODULES)
def test_examples_of_docstrings(module):
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    results = doctest.testmod(importlib.import_module(module), optionflags=options)
    assert results.failed == 0


@pytest.mark.parametrize("name", CALLS)
def test_public_calls_have_an_example(name):
    assert ">>> " in getattr(ja, name).__doc__
