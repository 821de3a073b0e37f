"""The examples in the docstrings of the public modules run, and print what they say."""

import doctest
import importlib
import inspect

import pytest

import jax_attn as ja

# Records, functions that need a GPU or NVRTC, and those whose arguments another example shows.
WITHOUT = {"At", "FixedBatch", "PlanBucket", "Rows"}
WITHOUT |= {"append_rotated", "export_checks", "item_times", "precompile"}
WITHOUT |= {"state_from_triplet"}  # see state_to_triplet's example
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
