"""Variants that several tests run, and how tests compare them."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
import variant_functions
from variant_functions import (
    sigmoid_of,
    soft_cap_of,
)

from helpers.backends import Backend
from jax_attn import _core

CPU = [pytest.param(Backend("cpu", isa), id=isa) for isa in _core.supported_cpu_isas()]


on_every_cpu = pytest.mark.parametrize("backend", CPU, indirect=True)


RNG = np.random.default_rng(7)


OPERANDS = {
    "slopes": RNG.uniform(0.01, 0.3, 4).astype(np.float32),
    "table": RNG.normal(size=(9, 4)).astype(jnp.bfloat16),
    "q_doc": RNG.integers(0, 3, 300).astype(np.int32),
    "kv_doc": RNG.integers(0, 3, 4000).astype(np.int32),
    "bias": RNG.normal(size=(1, 4, 150, 1100)).astype(np.float16),
    "seen": RNG.random((9, 1, 1100)) < 0.7,
    "prefix": RNG.integers(0, 40, 9).astype(np.int32),
    "bits": RNG.integers(0, 256, (9, 40)).astype(np.uint8),
    "temperature": np.float32(0.8),
}


def per_row(score, at, q_doc, temperature):
    return score * (temperature + 0.1 * q_doc[at.q_row])


def dilated(at):
    return ((at.q_pos - at.kv_pos) % 3 == 0) & (at.kv_pos <= at.q_pos)


def sinks_and_window(at):
    return (at.q_pos - at.kv_pos < 33) | (at.kv_pos < 4)


def nothing(at):
    return at.head < 0


soft_cap, sigmoid = soft_cap_of(3.0), sigmoid_of(2.0)


def of_lengths(score, at, slopes):
    share = at.kv_pos.astype(jnp.float32) / jnp.maximum(at.kv_len, 1) + at.q_len * 1e-3
    return score + share * slopes[at.kv_head] + at.request * 0.01


def packed(at, bits):
    return (bits[at.request, at.kv_pos // 8] >> (at.kv_pos % 8)) & 1 == 1


variant_of = functools.partial(variant_functions.variant_of, OPERANDS)
