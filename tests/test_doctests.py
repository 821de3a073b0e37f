"""The examples in the docstrings of the public modules run, and print what they say."""

import doctest
import importlib
import inspect

import pytest

import jax_attn as ja

CALLS = ("plan", "attention", "merge_states", "dot_product_attention", "Variant")
MODULES = sorted({inspect.getmodule(getattr(ja, name)).__name__ for name in ja.__all__})


@pytest.mark.parametrize("module", MODULES)
def test_examples_of_docstrings(module):
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    results = doctest.testmod(importlib.import_module(module), optionflags=options)
    assert results.failed == 0


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_most_code_begins_with_have_an_example(name):
    assert ">>> " in getattr(ja, name).__doc__
