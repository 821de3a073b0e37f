"""Compiles CUDA kernels, built-in and variants, with pip's NVRTC, and checks their resource use.

    python build_tools/check_kernels.py [sm_80 sm_90a sm_100a sm_120a] [--only TEXT] [--some]

Sources and options are those that a process compiles at run time. Every field of a specialization
takes each of its values somewhere in the list below; all combinations would take hours.
Prints a table and fails if a kernel

  - spills registers, or uses the stack at all (its frame is not 0 bytes), unless SPILLS says why;
  - has its wgmma serialised by ptxas;
  - does not fit its CTAs on a multiprocessor as select/cuda.cc launches them (registers, shared
    memory).

--some: compiles one kernel in SOME. The selection changes with the sources, so all get checked over
time. All kernels take some 20 minutes of processor time.

Compile times are printed, not bounded: they depend on this machine and its load. NVRTC uses one
core, so there is one process per core.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import multiprocessing
import os
import struct
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import jax

import jax_attn as ja
from jax_attn import _core
from jax_attn._variant.gradient import gradient_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.digest import sources_digest
from benchmarks.short_sequences import one_consumer
from benchmarks.variant_functions import (
    alibi,
    causal,
    dense_bias,
    documents,
    prefix_lm,
    sigmoid_of,
    soft_cap_of,
    t5_bias,
    tree,
)

ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
SOME = 4

# Shared memory of a multiprocessor, KB (CUDA programming guide, table of compute capabilities). A
# CTA takes 1 KB more than its own. Not read from csrc/cuda/common/budget.cuh, which it checks.
SMEM_KB = (
    dict.fromkeys((80, 87), 164)
    | dict.fromkeys((90, 100, 103, 110), 228)
    | dict.fromkeys((86, 89, 120, 121), 100)
)
REGISTERS = 65536  # per multiprocessor; a warp gets a multiple of 256

# Kernel name (as printed, without its architecture) -> bytes of stack that are accepted, and why.
# Compilers differ: what NVRTC 13.0 keeps in registers, 13.5 may not.
_PADDED = (40, "in the producer's copies of rows that end in padding, not in the consumers")
_ITEM_TO_ITEM = (
    104,
    "what consumers keep from item to item, which the loops of joint, single and decode items leave"
    " no registers for; with windows and a soft cap two of these words are read in every step",
)
_SHORT = (
    208,
    "three CTAs have 128 registers a thread for consumers: half of it is for merges; some ten words"
    " are read in every step",
)
_QUEUE_END = (
    40,
    "the end of the queue, which consumers read once an item, and what a merge of few states saves",
)
_BACKWARD_D64 = (
    72,
    "dk, dv, S^T, dP^T and P^T of 128 rows take 224 of 240 registers: 12 words, 18 with windows and"
    " a soft cap; not profiled",
)
_BACKWARD_D128 = (8, "two words; where was not looked into")
_BACKWARD_PAGES = (
    "what the ragged kernel has, and of the producer five words, which it reads once for each"
    " request of a unit; of the consumers two words, with windows and a soft cap at D64"
)
_BACKWARD_WIDE = (
    "of the producer, with 24 registers: what it keeps from tile to tile, and with pages from"
    " request to request; not profiled"
)
_PORTABLE_ON_SM100 = (
    136,
    "sm_100a, where mma.sync serves with all of 255 registers; not looked into, no such GPU was at"
    " hand",
)
_MERGE_ON_SM100 = (
    16,
    "sm_100a, four words of two rows' vectors beside 64 registers; not looked into, likewise",
)
_LATENT_ON_SM100 = (
    48,
    "sm_100a, where mma.sync serves: the item's place, and marks of values that are not finite;"
    " some 40 accesses in 4,600 instructions",
)
_VARIANT_ON_SM80 = (
    80,
    "what warps keep from item to item, and sums of rows beside the facts of rows and keys: 30"
    " accesses in the 2,400 instructions of a step",
)
_LIST_ON_SM80 = (
    96,
    f"{_VARIANT_ON_SM80[1]}; with lists six words more, of the next entry and of the mask",
)
_STEP_OF_CODES = (
    72,
    "products of a step of codes beside o and logits take 196 of 232 registers: words that"
    " consumers keep from item to item, of which some ten are read in every step",
)
_TABLE = (
    128,
    "as what consumers keep from item to item; three of these words are read in every step, beside"
    " a load from the user's table for every logit",
)
_CODE_ROWS = (
    160,
    "places of codes and of copies of a producer, which has 56 registers: up to 14 words that it"
    " reads in each step, 62 with head_dim 256",
)
_LINEAR_GRADIENTS = (
    16,
    "dQ, dK and three products of them take 160 of 255 registers, products among tokens 32: two to"
    " four words, read once a part of 64 columns of v",
)
_LINEAR_CHAINS = (
    16,
    "sm_80: four words beside a state of 64 registers, its operands and a product; not looked into,"
    " no such GPU was at hand",
)
_LINEAR_CHANNEL_GRADIENTS = (
    160,
    "three products of 32 registers each go through sums over rows, and half of them wait while a"
    " thread has 16 tokens of a channel: 32 to 40 words, written and read once a head",
)
_LINEAR_TERMS = (
    8,
    "96 registers, so that a multiprocessor has five CTAs: two words on sm_100a; not looked into,"
    " no such GPU was at hand",
)
SPILLS: dict[str, tuple[int, str]] = {
    **{
        f"linear_attention-bf16-d128x128-head-delta-l2-s{state}-chunks-n128-terms": _LINEAR_TERMS
        for state in ("bf16", "f32")
    },
    "linear_attention-bf16-d128x64-head-sf32-chunks-n64-state_gradients": _LINEAR_CHAINS,
    **{
        f"linear_attention-bf16-d128x128-head-delta-l2-s{state}-{loop}-n64-gradients": (
            _LINEAR_GRADIENTS
        )
        for state in ("bf16", "f32")
        for loop in ("chunks", "wgmma")
    },
    **{
        f"linear_attention-bf16-d128x128-channel-delta-l2-sf32-{loop}-n64-gradients": (
            _LINEAR_CHANNEL_GRADIENTS
        )
        for loop in ("chunks", "wgmma")
    },
    "linear_attention-bf16-d128x128-channel-delta-l2-sf32-chunks-n64-states": _LINEAR_CHAINS,
    **{
        f"linear_attention-bf16-d128x128-head-delta-l2-s{state}-chunks-n64-{phase}": _LINEAR_CHAINS
        for state in ("bf16", "f32")
        for phase in ("states", "state_gradients")
    },
    "attention-bf16-d64-g1-ragged-q64-kv64-w8-s0-wgmma": _SHORT,
    "attention-bf16-d64-g4-ragged-q64-kv64-w8-s0-right-wgmma": _SHORT,
    "attention-bf16-d40-g5-ragged-q64-kv64-w8-s0-left-right-cap-wgmma": _SHORT,
    "attention-bf16-d128-kve4m3-g8-ragged-q64_128-kv128-w12-s0-right-products8-wgmma": (
        _STEP_OF_CODES
    ),
    "attention-bf16-d128-qe4m3-kve4m3-g8-ragged-q64_128-kv128-w12-s0-right-products8-wgmma": (
        _STEP_OF_CODES
    ),
    "attention-f16-d128-kve4m3-g4-page16-q64_128-kv128-w12-s0-products8-wgmma": _STEP_OF_CODES,
    "attention-bf16-d80-kve4m3-g5-page5-q64_128-kv128-w12-s0-left-right-cap-products8-wgmma": (
        _STEP_OF_CODES
    ),
    "attention-bf16-d192x128-kve4m3-g1-ragged-q64_128-kv128-w12-s0-right-products8-wgmma": (
        _STEP_OF_CODES
    ),
    "attention-bf16-d192-qe4m3-kve4m3-g2-page1-q64_128-kv64-w12-s0-right-products8-wgmma": (
        208,
        "products of a step of codes beside o and logits take 228 of 232 registers",
    ),
    "attention-bf16-d128-kve4m3-g4-page16-q64-kv128-w12-s0-right-products8-wgmma": _STEP_OF_CODES,
    "attention-bf16-d128-kve4m3-g4-page16-q64_128-kv128-w12-s0-right-products8-wgmma-steps": (
        _STEP_OF_CODES
    ),
    "attention-bf16-d128-g1-ragged-q16_128-kv64-w4-s4": _PORTABLE_ON_SM100,
    "attention-bf16-d128-g16-page5-q16_128-kv64-w4-s4-left-right-cap": _PORTABLE_ON_SM100,
    "attention-bf16-d128-g4-page16-q16_128-kv64-w4-s4-right-alibi": _PORTABLE_ON_SM100,
    "attention-bf16-d128-g4-page16-q16_128-kv64-w4-s4-right-documents": _PORTABLE_ON_SM100,
    "attention-bf16-d128-g4-ragged-q16_128-kv64-w4-s4-right-times": _PORTABLE_ON_SM100,
    "attention-bf16-d128-g4-page16-q32_128-kv128-w12-s0-right-wgmma-alibi": _ITEM_TO_ITEM,
    "attention-bf16-d128-g4-page16-q32_128-kv128-w12-s0-right-wgmma-t5_bias": _TABLE,
    "attention-bf16-d128-g4-page16-q32_128-kv128-w12-s0-right-wgmma-soft_cap": _QUEUE_END,
    "attention-bf16-d128-g4-page16-q32_128-kv128-w12-s0-right-wgmma-sigmoid": _QUEUE_END,
    "attention-bf16-d128-g4-page16-q32_128-kv128-w12-s0-right-wgmma-dense_bias": _TABLE,
    "attention-bf16-d128-g4-page16-q32_128-kv128-w12-s0-right-wgmma-causal": _QUEUE_END,
    "attention-bf16-d128-g4-page16-q32_128-kv128-w12-s0-right-wgmma-documents": _ITEM_TO_ITEM,
    "attention-bf16-d128-g4-page16-q32_128-kv128-w12-s0-right-wgmma-prefix_lm": _QUEUE_END,
    "attention-bf16-d128-g4-page16-q32_128-kv128-w12-s0-right-wgmma-tree": _ITEM_TO_ITEM,
    "attention-bf16-d128-g4-page16-q32-kv128-w16-s0-right-wgmma-alibi": _QUEUE_END,
    "attention-bf16-d128-g4-page16-q32_128-kv128-w12-s0-right-fresh-wgmma-alibi": (
        112,
        _ITEM_TO_ITEM[1],
    ),
    "attention-bf16-d128-kve4m3-g4-page16-q32_128-kv128-w16-s0-right-wgmma-alibi": (
        264,
        f"{_ITEM_TO_ITEM[1]}, and lines of the bias of rows; 40 words since rows far from 0 are"
        " recomputed, not looked into yet",
    ),
    "attention-bf16-d64-g1-ragged-q32_192-kv128-w16-s0-wgmma-documents": _TABLE,
    "attention-bf16-d576x512-mla-g16-page64-q16_32-kv64-w12-s0-right-wgmma-documents": (
        24,
        "not looked into yet",
    ),
    "attention-bf16-d576x512-mla-g64-page64-q64-kv64-w12-s0-right-wgmma-alibi": (
        272,
        "not looked into yet: two consumers of 224 registers hold o, logits and distances; 30 words"
        " since rows far from 0 are recomputed",
    ),
    "attention-bf16-d576x512-mla-g64-page64-q64-kv64-w12-s0-right-wgmma-steps": (
        48,
        "twelve words since rows far from 0 are recomputed; not looked into yet",
    ),
    "attention-bf16-d576x512-kve4m3-mla-g32-page16-q32-kv64-w12-s0-right-wgmma": (
        16,
        "four words of the producer beside the codes of a step to come; not profiled",
    ),
    "attention-bf16-d128-kve4m3-g4-page16-q16_128-kv64-w4-s5-right-alibi": _QUEUE_END,
    "attention-bf16-d128-g4-page16-q16_128-kv64-w4-s3-right-t5_bias": _QUEUE_END,
    "attention-bf16-d128-g4-page16-q16_128-kv64-w4-s3-right-causal": _QUEUE_END,
    "attention-bf16-d128-g4-page16-q16_128-kv64-w4-s3-right-documents": _VARIANT_ON_SM80,
    "attention-bf16-d96-g4-page5-q32_128-kv128-w12-s0-right-cap-wgmma": _PADDED,
    "attention-bf16-d72-g5-page5-q32_128-kv128-w12-s0-left-right-wgmma": _PADDED,
    "attention-bf16-d80-g16-page1-q32_128-kv128-w12-s0-right-wgmma": _PADDED,
    "attention-bf16-d112-g7-page48-q32_128-kv128-w12-s0-left-right-wgmma": _PADDED,
    "attention-bf16-d96-g5-page5-q32_128-kv128-w12-s0-left-right-cap-fresh-wgmma": _PADDED,
    "attention-bf16-d64-g1-page16-q32_192-kv128-w16-s0-right-wgmma": _ITEM_TO_ITEM,
    "attention-f16-d64-g8-ragged-q32_192-kv128-w16-s0-wgmma": _ITEM_TO_ITEM,
    "attention-bf16-d64-g4-page16-q64-kv128-w16-s0-right-wgmma": _ITEM_TO_ITEM,
    "attention-bf16-d40-g5-page5-q32_192-kv128-w16-s0-left-right-cap-wgmma": _ITEM_TO_ITEM,
    "attention-bf16-d64-g8-page64-q32_192-kv128-w16-s0-fresh-wgmma": _ITEM_TO_ITEM,
    "attention-bf16-d256x64-g2-page1-q32_192-kv64-w16-s0-right-wgmma": _ITEM_TO_ITEM,
    "attention-bf16-d192x128-g1-ragged-q32_128-kv128-w12-s0-right-wgmma": _ITEM_TO_ITEM,
    "attention-f16-d192x128-g16-page16-q32_128-kv128-w12-s0-right-wgmma": _ITEM_TO_ITEM,
    "attention-bf16-d192-g4-page16-q32_128-kv64-w12-s0-right-wgmma": _ITEM_TO_ITEM,
    "attention-bf16-d256-g2-page16-q32_128-kv64-w12-s0-left-right-cap-wgmma": _ITEM_TO_ITEM,
    "attention-bf16-d256-g8-ragged-q32_128-kv64-w12-s0-wgmma": _ITEM_TO_ITEM,
    "attention-bf16-d576x512-mla-g39-ragged-q64-kv64-w12-s0-wgmma": (
        24,
        "an address where two states are added, once an item; 8 accesses where running maxima move",
    ),
    "attention-bf16-d576x512-kve4m3-mla-g16-page64-q16_32-kv64-w12-s0-right-wgmma": (
        16,
        "three words where running maxima move",
    ),
    "attention-bf16-d128-g4-ragged-q32_128-kv128-w12-s0-right-wgmma": _QUEUE_END,
    "attention-bf16-d128-g4-ragged-q32_128-kv128-w12-s0-right-wgmma-times": _QUEUE_END,
    "attention-bf16-d128-g4-page1-q32_128-kv128-w12-s0-right-wgmma": _QUEUE_END,
    "attention-bf16-d128-g4-page16-q32_128-kv128-w12-s0-right-wgmma": _QUEUE_END,
    "attention-bf16-d128-g4-page16-q32_128-kv128-w12-s0-right-fresh-wgmma": _QUEUE_END,
    "attention-bf16-d128-g1-ragged-q32_128-kv128-w12-s0-wgmma": _QUEUE_END,
    "attention-f16-d128-g8-page16-q32_128-kv128-w12-s0-right-wgmma": _QUEUE_END,
    "attention-bf16-d128-g16-page5-q32_128-kv128-w12-s0-left-right-cap-wgmma": _QUEUE_END,
    "attention-bf16-d64x256-g4-page1-q32_128-kv64-w12-s0-right-wgmma": _QUEUE_END,
    "attention-bf16-d256-g2-page1-q32_128-kv64-w12-s0-right-fresh-wgmma": _QUEUE_END,
    "attention-bf16-d80-kve4m3-g5-page5-q32_128-kv128-w16-s0-left-right-cap-wgmma": _ITEM_TO_ITEM,
    "attention-bf16-d128-kve4m3-g4-page16-q32_128-kv128-w16-s0-right-wgmma": _ITEM_TO_ITEM,
    "attention-bf16-d128-kve4m3-g4-page16-q64-kv128-w16-s0-right-wgmma": _CODE_ROWS,
    "attention-bf16-d128-kvint8-g4-page16-q64-kv128-w16-s0-right-wgmma": _CODE_ROWS,
    "attention-bf16-d128-g4-page16-q32-kv128-w16-s0-right-wgmma": _QUEUE_END,
    "attention-bf16-d192x128-kve4m3-g1-ragged-q32_128-kv64-w16-s0-right-wgmma": _QUEUE_END,
    "attention-bf16-d128-kve5m2-g4-page16-q32_128-kv128-w16-s0-right-wgmma": _ITEM_TO_ITEM,
    "attention-bf16-d256-kve5m2-g2-page16-q32_128-kv64-w12-s0-right-wgmma": _ITEM_TO_ITEM,
    "attention-bf16-d128-kvint8-g4-page16-q32_128-kv128-w16-s0-right-wgmma": _ITEM_TO_ITEM,
    "attention-bf16-d256-kvint8-g2-page16-q32_128-kv64-w12-s0-right-wgmma": _CODE_ROWS,
    "attention-bf16-d128-kvmxfp4-g4-page16-q32_128-kv128-w16-s0-right-wgmma": _ITEM_TO_ITEM,
    "attention-f16-d192x128-kve5m2-g1-page64-q32_128-kv64-w16-s0-wgmma": _CODE_ROWS,
    "attention-f16-d192x128-kvint8-g1-page64-q32_128-kv64-w16-s0-wgmma": _CODE_ROWS,
    "attention-f16-d192x128-kvmxfp4-g1-page64-q32_128-kv64-w16-s0-wgmma": _CODE_ROWS,
    "attention-f16-d192x128-kvnvfp4-g1-page64-q32_128-kv64-w16-s0-wgmma": _CODE_ROWS,
    "attention-f16-d192x128-kvint4-g1-page64-q32_128-kv64-w16-s0-wgmma": _CODE_ROWS,
    "attention-bf16-d256-kvmxfp4-g2-page16-q32_128-kv64-w12-s0-right-wgmma": _ITEM_TO_ITEM,
    "attention-bf16-d64-kvmxfp4-g8-page8-q32_128-kv128-w16-s0-left-right-cap-wgmma": _QUEUE_END,
    "attention-bf16-d128-kve5m2-g4-page16-q16_128-kv64-w4-s6-right-fresh": _PORTABLE_ON_SM100,
    "attention-bf16-d128-kvint8-g4-page16-q16_128-kv64-w4-s5-right-fresh": _PORTABLE_ON_SM100,
    "attention-bf16-d128-kvmxfp4-g4-page16-q16_128-kv64-w4-s6-right-fresh": _PORTABLE_ON_SM100,
    "attention-bf16-d128-kvnvfp4-g4-page16-q16_128-kv64-w4-s6-right-fresh": _PORTABLE_ON_SM100,
    "attention-f16-d192x128-kvnvfp4-g1-page64-q16_128-kv64-w4-s6": _PORTABLE_ON_SM100,
    "attention-bf16-d112-g7-page48-q16_128-kv64-w4-s4-left-right": _PORTABLE_ON_SM100,
    "attention-bf16-d96-g5-page5-q16_128-kv64-w4-s5-left-right-fresh": _PORTABLE_ON_SM100,
    "attention-f16-d192x128-kve5m2-g1-page64-q16_128-kv64-w4-s4": _PORTABLE_ON_SM100,
    "attention-f16-d192x128-kvmxfp4-g1-page64-q16_128-kv64-w4-s6": _PORTABLE_ON_SM100,
    "attention-f16-d192x128-kvint4-g1-page64-q16_128-kv64-w4-s6": _PORTABLE_ON_SM100,
    "attention-bf16-d128-kvint4-g4-page16-q16_128-kv64-w4-s6-right-fresh": _PORTABLE_ON_SM100,
    "merge-bf16": _MERGE_ON_SM100,
    "merge-f16": _MERGE_ON_SM100,
    "attention-bf16-d128-kvnvfp4-g4-page16-q32_128-kv128-w16-s0-right-wgmma": _CODE_ROWS,
    "attention-bf16-d256-kvnvfp4-g2-page16-q32_128-kv64-w12-s0-right-wgmma": _ITEM_TO_ITEM,
    "attention-bf16-d64-kvnvfp4-g8-page8-q32_128-kv128-w16-s0-left-right-cap-wgmma": _QUEUE_END,
    "attention-bf16-d128-kvint4-g4-page16-q32_128-kv128-w16-s0-right-wgmma": _CODE_ROWS,
    "attention-bf16-d256-kvint4-g2-page16-q32_128-kv64-w12-s0-right-wgmma": _ITEM_TO_ITEM,
    "attention-f16-d128-g8-page16-q16_128-kv64-w4-s4-right": _QUEUE_END,
    "attention-f16-d192x128-g16-page16-q16_128-kv64-w4-s3-right": _QUEUE_END,
    "attention-f16-d192x128-g16-ragged-q16_128-kv64-w4-s3-right": _QUEUE_END,
    "attention-bf16-d576x512-mla-g64-page1-q64-kv32-w8-s0-right": _LATENT_ON_SM100,
    "attention-bf16-d576x512-mla-g64-page16-q64-kv32-w8-s0-right": _LATENT_ON_SM100,
    "attention-bf16-d576x512-mla-g16-page64-q16_64-kv32-w8-s0-right": _LATENT_ON_SM100,
    "attention-f16-d576x512-mla-g24-page5-q32_64-kv32-w8-s0-left-right-cap": _LATENT_ON_SM100,
    "attention-bf16-d576x512-mla-g39-ragged-q64-kv32-w8-s0": _LATENT_ON_SM100,
    "attention-f16-d576x512-kve4m3-mla-g24-page5-q32_64-kv32-w8-s0-left-right-cap": (
        _LATENT_ON_SM100
    ),
    "attention-bf16-d576x512-kve4m3-mla-g39-ragged-q64-kv32-w8-s0": _LATENT_ON_SM100,
    "attention-bf16-d576x512-kve4m3-mla-g32-page1-q32-kv64-w12-s0-right-wgmma": (
        24,
        "six words of the producer beside the codes of a step to come; not profiled",
    ),
    "attention-f16-d256-kve4m3-g2-page16-q32_128-kv64-w12-s0-right-wgmma": (
        80,
        "as above, and what its one producer keeps from turn to turn beside 64 codes a lane",
    ),
    "attention-f16-d128-qe4m3-kve4m3-g8-page1-q16_128-kv64-w4-s6-right": (
        24,
        "sm_90a: three addresses of the loader, once a step of 128 rows, of 5,800 instructions",
    ),
    "attention-bf16-d128-g4-ragged-q16_128-kv64-w4-s3-right-times": (
        56,
        "sm_80: the kernel that records times, which nobody waits for",
    ),
    "backward-bf16-d128-g4-ragged-right-wgmma": _BACKWARD_D128,
    "backward-bf16-d128-g1-ragged-wgmma": _BACKWARD_D128,
    "backward-bf16-d64-g1-ragged-right-wgmma": _BACKWARD_D64,
    "backward-f16-d64-g8-ragged-left-right-cap-wgmma": _BACKWARD_D64,
    "backward-f16-d128-g2-ragged-left-right-cap-wgmma": (
        24,
        "6 words; with 40 registers for the producer there were none, but ptxas serialised wgmma",
    ),
    "backward-bf16-d128-g1-page16-right-wgmma": (16, _BACKWARD_PAGES),
    "backward-f16-d128-g8-page16-wgmma": (16, _BACKWARD_PAGES),
    "backward-bf16-d128-g2-page1-left-right-cap-wgmma": (48, _BACKWARD_PAGES),
    "backward-bf16-d64-g4-page16-right-wgmma": (56, _BACKWARD_PAGES),
    "backward-f16-d64-g8-page256-left-right-cap-wgmma": (96, _BACKWARD_PAGES),
    "backward-bf16-d40-g5-page5-left-right-cap-wgmma": (40, _BACKWARD_PAGES),
    "backward-bf16-d192x128-g1-page16-right-wgmma": (24, _BACKWARD_WIDE),
    "backward-bf16-d256x64-g2-page16-right-wgmma": (24, _BACKWARD_WIDE),
    "backward-bf16-d256-g2-page16-left-right-cap-wgmma": (40, _BACKWARD_WIDE),
    "backward-bf16-d96-g4-page1-right-cap": (8, "not looked into yet"),
    "plan": (
        56,
        "13.5 on sm_120a: what all phases know of the schedule, 30 accesses in 6,700 instructions;"
        " 512 threads have 128 registers each",
    ),
    "plan-general": (
        624,
        "what stages hand to functions that are called; inlined, the kernel is three times as long."
        " Of it 4 words are spilled on sm_80, up to 27 on sm_120a, none on sm_90a",
    ),
}
# Groups of more than 32 heads.
_F32_ROWS = (
    464,
    "FFMA of 64 or 128 rows: 512 threads have 128 registers each, 1,024 have 64; not profiled",
)
SPILLS |= dict.fromkeys(
    (
        f"attention-f32-{rows}-s{slots}-right"
        for rows in ("d64-g48-page16-q64-kv32-w16", "d32-g128-page16-q128-kv32-w32")
        for slots in (1, 2)
    ),
    _F32_ROWS,
)
SPILLS["attention-bf16-d128-kve4m3-g128-page1-q128-kv128-w16-s0-right-wgmma"] = _QUEUE_END
SPILLS["attention-bf16-d64-g71-ragged-q192-kv128-w16-s0-right-cap-wgmma"] = _ITEM_TO_ITEM
# Kernels for plans with step lists spill what the same kernels without them do.
SPILLS |= {
    f"attention-bf16-{kernel}": why
    for kernel, why in {
        "d512-g8-page16-q16_64-kv32-w8-s0-right-steps-documents": (8, "two words; not looked into"),
        "d128-g4-page16-q16_128-kv64-w4-s3-right-steps": _QUEUE_END,
        "d128-g4-page16-q16_128-kv64-w4-s4-right-steps-documents": _PORTABLE_ON_SM100,
        "d128-g4-page16-q16_128-kv64-w4-s3-right-steps-documents": _LIST_ON_SM80,
        "d128-g4-page16-q16_128-kv64-w4-s3-right-fresh-steps-documents": _LIST_ON_SM80,
        "d128-kve4m3-g4-page16-q16_128-kv64-w4-s5-right-steps-documents": _VARIANT_ON_SM80,
        "d128-g4-ragged-q16_128-kv64-w4-s3-steps-causal": _QUEUE_END,
        "d128-g4-page16-q32_128-kv128-w12-s0-right-wgmma-steps": _QUEUE_END,
        "d128-g4-page16-q32_128-kv128-w12-s0-right-wgmma-steps-documents": _ITEM_TO_ITEM,
        "d128-g4-page16-q32-kv128-w16-s0-right-wgmma-steps-documents": _QUEUE_END,
        "d128-g4-page16-q32_128-kv128-w12-s0-right-fresh-wgmma-steps-documents": _ITEM_TO_ITEM,
        "d128-kve4m3-g4-page16-q32_128-kv128-w16-s0-right-wgmma-steps-documents": _TABLE,
        "d128-g4-ragged-q32_128-kv128-w12-s0-wgmma-steps-causal": _QUEUE_END,
        "d256-g2-page5-q32_128-kv64-w12-s0-left-right-wgmma-steps-documents": _ITEM_TO_ITEM,
    }.items()
}


@dataclasses.dataclass(frozen=True)
class Usage:
    """Resources of one kernel."""

    registers: int  # per thread
    stack: int  # bytes per thread, for spilled registers
    smem: int  # bytes per CTA
    num_threads: int


# --- variants ---


def variants() -> dict[str, ja.Variant]:
    def array(dtype: str, rank: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1,) * rank, dtype)

    ids = array("int32", 1)
    return {
        "alibi": ja.Variant(alibi, operands={"slopes": array("float32", 1)}),
        "t5_bias": ja.Variant(t5_bias, operands={"table": array("bfloat16", 2)}),
        "soft_cap": ja.Variant(soft_cap_of(30.0)),
        "sigmoid": ja.Variant(sigmoid_of(8.0), normalize="none"),
        "dense_bias": ja.Variant(dense_bias, operands={"bias": array("bfloat16", 4)}),
        "causal": ja.Variant(mask=causal),
        "documents": ja.Variant(mask=documents, operands={"q_doc": ids, "kv_doc": ids}),
        "prefix_lm": ja.Variant(mask=prefix_lm, operands={"prefix": ids}),
        "tree": ja.Variant(mask=tree, operands={"ancestors": ids}),
    }


# --- specialisations ---


def attention_specs(target: str) -> Iterator[ja.AttentionSpec]:
    """A covering set: dtypes, head dims, groups, page sizes, masks and schedules."""

    def spec(
        dims: int | tuple[int, int], group: int, page_size: int | None, **options: Any
    ) -> ja.AttentionSpec:
        head_dim_qk, head_dim_vo = dims if isinstance(dims, tuple) else (dims, dims)
        return ja.AttentionSpec(
            num_qo_heads=2 * group,
            num_kv_heads=2,
            head_dim_qk=head_dim_qk,
            head_dim_vo=head_dim_vo,
            page_size=page_size,
            target=target,
            max_kv_tokens=4096 if page_size is None else None,
            max_kv_pages=None if page_size is None else 4096,
            **options,
        )

    def latent(heads: int, page_size: int | None, **options: Any) -> ja.AttentionSpec:
        return dataclasses.replace(
            spec(128, 1, page_size, **options),
            num_qo_heads=heads,
            num_kv_heads=1,
            head_dim_qk=576,
            head_dim_vo=512,
            mla=True,
            sm_scale=192**-0.5,
        )

    # The common cases: llama-like decode and prefill, paged and ragged.
    for page_size in (None, 1, 16):
        yield spec(128, 4, page_size)
    yield spec(128, 1, None, causal=False)
    yield spec(128, 8, 16, dtype="float16")
    yield spec(128, 4, 16, schedule="fixed_split", kv_split=1024)
    # Head dims, each with other groups, pages and masks.
    yield spec(64, 1, 16)
    yield spec(64, 8, None, causal=False, dtype="float16")
    yield spec(64, 4, 16, schedule="fixed_split", kv_split=1024)
    yield spec(40, 5, 5, window_left=100, logits_soft_cap=30.0)
    yield spec((256, 64), 2, 1)
    yield spec(72, 5, 5, window_left=100)
    yield spec(80, 16, 1)
    yield spec(96, 4, 5, logits_soft_cap=30.0)
    yield spec(112, 7, 48, window_left=64, window_right=8, causal=False)
    yield spec(128, 16, 5, window_left=4096, logits_soft_cap=50.0)
    yield spec((192, 128), 1, None)
    yield spec((192, 128), 16, 16, dtype="float16")
    yield spec((64, 256), 4, 1)
    yield spec(192, 4, 16)
    yield spec(256, 2, 16, logits_soft_cap=50.0, window_left=4096)
    yield spec(256, 8, None, causal=False)
    yield spec(256, 4, 1, schedule="fixed_split", kv_split=1024)
    # Fresh tokens beside the pages: TMA tiles, odd pages, short steps.
    yield spec(128, 4, 16, fresh_kv=True)
    yield spec(64, 8, 64, fresh_kv=True, causal=False)
    yield spec(96, 5, 5, fresh_kv=True, window_left=100, logits_soft_cap=30.0)
    yield spec(256, 2, 1, fresh_kv=True)
    yield spec(128, 4, 16, fresh_kv=True, schedule="fixed_split", kv_split=1024)
    # Batches of few rows, for which sm_90 has a decode-only kernel.
    yield spec(128, 4, 16, max_qo_tokens=8)
    yield spec((192, 128), 16, None, dtype="float16", max_qo_tokens=2)
    yield spec(256, 2, 1, logits_soft_cap=50.0, window_left=4096, max_qo_tokens=16)
    yield spec((64, 256), 4, 16, max_qo_tokens=8)
    yield spec(96, 5, 5, fresh_kv=True, window_left=100, max_qo_tokens=4)
    # MLA: blocks of up to 64 heads; 32 if shared memory is short, and for quantized KV on Hopper.
    for kv_dtype in (None, "float8_e4m3fn"):
        for heads, page_size, options in (
            (128, 1, {}),
            (16, 64, {}),
            (24, 5, {"dtype": "float16", "window_left": 100, "logits_soft_cap": 30.0}),
            (77, None, {"causal": False}),
            (64, 16, {"schedule": "fixed_split", "kv_split": 1024}),
        ):
            yield latent(heads, page_size, kv_dtype=kv_dtype, **options)
    yield latent(128, 16, kv_dtype="float8_e5m2")
    # Groups of more than 16 heads.
    yield spec(128, 48, 16)
    yield spec(64, 71, None, logits_soft_cap=30.0)
    yield spec(128, 128, 1, kv_dtype="float8_e4m3fn")
    yield spec(176 if target == "sm_120" else 256, 71, 16, window_left=100)
    # Heads of more than 256 columns.
    yield spec(512, 8, 16)
    yield spec(512, 20, None, causal=False, dtype="float16")
    yield spec((264, 328), 4, 5, window_left=100, logits_soft_cap=30.0)
    yield spec(512, 8, 16, fresh_kv=True)
    yield spec(512, 4, 16, schedule="fixed_split", kv_split=1024)
    yield spec(512, 8, 16, kv_dtype="float8_e4m3fn")
    yield spec((320, 512), 1, 64, kv_dtype="float8_e5m2", window_left=100)
    # e4m3 keys and values, and queries.
    for dims, group, page_size, options in (
        (128, 4, 16, {}),
        (128, 8, 1, {"dtype": "float16", "q_dtype": "float8_e4m3fn"}),
        (64, 1, None, {"causal": False, "q_dtype": "float8_e4m3fn"}),
        (80, 5, 5, {"window_left": 100, "logits_soft_cap": 30.0}),
        ((192, 128), 1, None, {}),
        (256, 2, 16, {"dtype": "float16"}),
        (128, 4, 16, {"schedule": "fixed_split", "kv_split": 1024}),
    ):
        yield spec(dims, group, page_size, kv_dtype="float8_e4m3fn", **options)
    # e4m3 matmuls.
    if target == "sm_90":
        for dims, group, page_size, options in (
            (128, 8, None, {}),
            (128, 8, None, {"q_dtype": "float8_e4m3fn"}),
            (128, 4, 16, {"dtype": "float16", "causal": False}),
            (64, 1, 64, {}),
            (80, 5, 5, {"window_left": 100, "logits_soft_cap": 30.0}),
            ((192, 128), 1, None, {}),
            (192, 2, 1, {"q_dtype": "float8_e4m3fn"}),
            (128, 4, 16, {"schedule": "fixed_split", "kv_split": 1024}),
            (128, 4, 16, {"max_steps": 999}),
        ):
            fields = {"kv_dtype": "float8_e4m3fn", "eight_bit_products": True}
            yield spec(dims, group, page_size, **fields, **options)
    # Quantized values that are decoded in shared memory.
    for kv_dtype in ("float8_e5m2", "int8", "mxfp4", "nvfp4", "int4"):
        yield spec(128, 4, 16, kv_dtype=kv_dtype)
        yield spec((192, 128), 1, 64, kv_dtype=kv_dtype, dtype="float16", causal=False)
        yield spec(256, 2, 16, kv_dtype=kv_dtype)
    yield spec(64, 8, 8, kv_dtype="mxfp4", window_left=100, logits_soft_cap=30.0)
    yield spec(64, 8, 8, kv_dtype="nvfp4", window_left=100, logits_soft_cap=30.0)
    # Fresh tokens beside quantized pages.
    for kv_dtype in ("float8_e4m3fn", "float8_e5m2", "int8", "mxfp4", "nvfp4", "int4"):
        yield spec(128, 4, 16, kv_dtype=kv_dtype, fresh_kv=True)
        yield spec(256, 2, 16, kv_dtype=kv_dtype, fresh_kv=True, dtype="float16")
    yield spec(128, 4, 16, kv_dtype="float8_e4m3fn", fresh_kv=True, schedule="fixed_split")
    yield spec(80, 5, 16, kv_dtype="int8", fresh_kv=True, window_left=100, logits_soft_cap=30.0)
    yield spec(128, 4, 16, kv_dtype="int8", schedule="fixed_split", kv_split=1024)
    # f32 has its own kernel.
    yield spec(64, 1, None, dtype="float32", causal=False)
    yield spec(128, 4, 16, dtype="float32", window_left=100, logits_soft_cap=30.0)
    yield spec((192, 128), 5, 5, dtype="float32")
    yield spec(256, 16, 1, dtype="float32")
    yield spec(128, 4, 16, dtype="float32", fresh_kv=True)
    yield spec(512, 8, 16, dtype="float32")
    yield spec(64, 48, 16, dtype="float32")
    yield spec(32, 128, 16, dtype="float32")
    # Variants: each in the common kernel, two in the others.
    by_name = variants()
    if target not in ("sm_80", "sm_90"):  # they run the portable kernel, too
        yield spec(128, 4, 16, variant=by_name["alibi"])
        yield spec(128, 4, 16, variant=by_name["documents"])
        yield spec(128, 4, 16, variant=by_name["documents"], max_steps=999)
        return
    for variant in by_name.values():
        yield spec(128, 4, 16, variant=variant)
    others = ({"max_qo_tokens": 8}, {"fresh_kv": True}, {"kv_dtype": "float8_e4m3fn"},
              {"dtype": "float32"})  # fmt: skip
    for options in others:
        yield spec(128, 4, 16, variant=by_name["alibi"], **options)
    yield spec(64, 1, None, causal=False, variant=by_name["documents"])
    # Plans with step lists.
    yield spec(128, 4, 16, max_steps=999)
    for options in ({}, *others):
        yield spec(128, 4, 16, variant=by_name["documents"], max_steps=999, **options)
    yield spec(128, 4, None, causal=False, variant=by_name["causal"], max_steps=999)
    yield spec(256, 2, 5, window_left=100, variant=by_name["documents"], max_steps=999)
    for heads, name in ((16, "alibi"), (16, "documents"), (128, "alibi"), (128, "documents")):
        yield latent(heads, 64, variant=by_name[name])
    yield latent(16, 64, variant=by_name["documents"], max_steps=999)
    yield latent(128, 64, max_steps=999)
    yield spec(512, 8, 16, variant=by_name["alibi"])
    yield spec(512, 8, 16, variant=by_name["documents"], max_steps=999)


def short_specs(target: str) -> Iterator[ja.AttentionSpec]:
    """Specs for Hopper's kernel with one consumer, which select/cuda.cc does not choose yet."""
    for dims, group, options in (
        ((64, 64), 1, {"causal": False}),
        ((64, 64), 4, {}),
        ((40, 40), 5, {"window_left": 100, "logits_soft_cap": 30.0}),
        ((128, 128), 4, {}),
        ((128, 72), 7, {"causal": False, "dtype": "float16"}),
    ):
        if target == "sm_90":
            yield ja.AttentionSpec(
                num_qo_heads=2 * group,
                num_kv_heads=2,
                head_dim_qk=dims[0],
                head_dim_vo=dims[1],
                page_size=None,
                max_kv_tokens=4096,
                target=target,
                **options,
            )


def backward_variants(target: str) -> Iterator[tuple[tuple[int, int], int, int | None, Any]]:
    by_name = variants()
    if target not in ("sm_80", "sm_90"):
        by_name = {name: by_name[name] for name in ("alibi", "documents")}
    for variant in by_name.values():
        yield (128, 128), 4, None, {"variant": variant}
        yield (64, 64), 4, 16, {"variant": variant}
    for dims, options in (
        ((256, 256), {"logits_soft_cap": 50.0}),
        ((128, 128), {"dtype": "float32", "window_left": 100}),
    ):
        yield dims, 5, 5, options | {"variant": by_name["alibi"]}
        yield dims, 5, 5, options | {"variant": by_name["documents"]}
        yield dims, 5, 5, options | {"variant": by_name["documents"], "max_steps": 999}
    yield (128, 128), 4, None, {"variant": by_name["documents"], "max_steps": 999}
    yield (128, 128), 4, 16, {"variant": by_name["alibi"], "max_steps": 999}
    yield (64, 64), 4, 16, {"max_steps": 999}


def wide_backward(target: str) -> Iterator[tuple[tuple[int, int], int, int | None, Any]]:
    """Head dims beyond 256, where a multiprocessor's shared memory holds their rows."""
    if _core.largest_cuda_backward_head_dim(int(target.removeprefix("sm_"))) < 512:
        return
    alibi_too = {"variant": variants()["alibi"]}
    yield (512, 512), 8, 16, {}
    yield (512, 512), 4, None, {"dtype": "float16", "window_left": 100, "logits_soft_cap": 30.0}
    yield (264, 40), 5, 5, {"window_left": 100, "logits_soft_cap": 30.0}
    yield (320, 512), 4, 16, {"max_steps": 999}
    yield (512, 512), 8, 16, {"dtype": "float32"}
    yield (512, 512), 8, 16, alibi_too
    yield (512, 512), 2, None, {"dtype": "float32"} | alibi_too


def backward_sources(spec: ja.AttentionSpec) -> list[_core.KernelSource]:
    """Returns backward kernels, with the gradients of all float operands of the spec's variant."""
    if spec.variant is None:
        return _core.backward_sources(spec.problem, [])
    types = spec.variant.operand_types
    wanted = tuple(i for i, (dtype, _) in enumerate(types) if "float" in dtype)
    return _core.backward_sources(spec.problem, list(gradient_of(spec.variant, wanted).words))


def backward_specs(target: str) -> Iterator[ja.AttentionSpec]:
    """A covering set for the backward pass."""
    for dims, group, page_size, options in (
        ((128, 128), 4, None, {}),
        ((128, 128), 8, 16, {"dtype": "float16", "causal": False}),
        ((64, 64), 1, None, {}),
        ((64, 64), 4, 16, {}),
        ((128, 128), 1, 16, {}),
        ((128, 128), 2, 1, {"window_left": 100, "logits_soft_cap": 30.0}),
        ((64, 64), 8, 256, {"dtype": "float16", "window_left": 100, "logits_soft_cap": 30.0}),
        ((128, 128), 1, None, {"causal": False}),
        ((128, 128), 2, None, {"dtype": "float16", "window_left": 100, "logits_soft_cap": 30.0}),
        ((64, 64), 8, None, {"dtype": "float16", "window_left": 100, "logits_soft_cap": 30.0}),
        ((40, 40), 5, 5, {"window_left": 100, "logits_soft_cap": 30.0}),
        ((80, 80), 1, None, {}),
        ((96, 96), 4, None, {"causal": False}),
        ((96, 96), 4, 1, {"logits_soft_cap": 30.0}),
        ((112, 112), 4, 16, {}),
        ((192, 128), 1, None, {}),
        ((192, 128), 1, 16, {}),
        ((192, 192), 2, None, {"dtype": "float16", "window_left": 100}),
        ((256, 64), 2, 16, {}),
        ((64, 256), 3, None, {}),
        ((256, 256), 2, None, {}),
        ((256, 256), 2, 16, {"window_left": 4096, "logits_soft_cap": 50.0}),
        ((64, 64), 1, None, {"dtype": "float32"}),
        ((128, 128), 4, 16, {"dtype": "float32", "window_left": 100, "logits_soft_cap": 30.0}),
        ((256, 256), 16, 1, {"dtype": "float32"}),
        *wide_backward(target),
        *backward_variants(target),
    ):
        yield ja.AttentionSpec(
            num_qo_heads=2 * group,
            num_kv_heads=2,
            head_dim_qk=dims[0],
            head_dim_vo=dims[1],
            page_size=page_size,
            target=target,
            max_kv_tokens=4096 if page_size is None else None,
            max_kv_pages=None if page_size is None else 4096,
            **options,
        )


# dtype, format, rows and columns of a tile, groups of a step (csrc/jit/kernel_source.h).
QUANTIZED_PRODUCTS = (
    *((dtype, format, 64, 256, groups) for dtype in (0, 1) for format in (0, 1, 2)
      for groups in (1, 2)),
    *((0, 0, rows, 256, 1) for rows in (8, 16, 32)),
    *((0, format, 64, 224, 1) for format in (0, 1, 2)),
    (0, 1, 8, 224, 2),
    (1, 2, 8, 224, 1),
)  # fmt: skip
HOPPER_QUANTIZED_PRODUCTS = (
    *((dtype, format, 64, 256, groups) for dtype in (0, 1) for format in (0, 1, 2)
      for groups in (1, 2)),
    *((0, 0, rows, 256, 1) for rows in (8, 16, 32)),
    *((0, format, 64, 128, 1) for format in (0, 1, 2)),
)  # fmt: skip

# dtype, transposed, rows and columns of a tile.
GROUPED_PRODUCTS = tuple(
    (dtype, transposed, *tile)
    for dtype in (0, 1)
    for transposed in (False, True)
    for tile in ((64, 64), (64, 128), (64, 256), (128, 128), (128, 256))
)


# dtype, devices, threads, vectors, two-shot, norm, quantizes (csrc/jit/kernel_source.h).
ALL_REDUCES = (
    (0, 2, 512, 1, False, True, False),
    (0, 2, 512, 2, False, False, False),
    (0, 4, 512, 1, False, True, False),
    (0, 4, 512, 2, True, True, False),
    (1, 8, 512, 2, False, True, False),
    (2, 8, 512, 2, True, True, False),
)
QUANTIZING_ALL_REDUCES = ((0, 2, 512, 1, False, True, True), (0, 8, 512, 2, True, True, True))

# Words of a problem behind its target (csrc/select/linear.cc): dtype, heads of q and of v, dims of
# k and of v, decay, delta rule, l2 norm, bf16 states, tokens, tokens a request, chunks.
LINEAR_ATTENTIONS = [
    (*kernel, tokens, qo_len, chunks)
    for tokens, qo_len, chunks in ((64, 1, 129), (4096, 4096, 66))
    for kernel in (
        (0, 16, 32, 128, 128, 1, 1, 1, 1),
        (0, 16, 32, 128, 128, 1, 1, 1, 0),
        (1, 32, 32, 128, 128, 2, 1, 1, 0),
        (0, 32, 32, 128, 128, 2, 1, 1, 0),
        (0, 2, 2, 40, 72, 2, 0, 0, 1),
        (0, 1, 24, 128, 64, 1, 0, 0, 0),
        (2, 1, 2, 256, 256, 2, 1, 1, 0),
        (0, 1, 8, 256, 64, 1, 0, 0, 1),
        (2, 2, 4, 72, 136, 0, 0, 1, 1),
        (1, 1, 1, 8, 8, 0, 1, 0, 0),
    )
]
# dtype, width, silu
SHORT_CONVOLUTIONS = ((0, 4, True), (1, 8, True), (2, 4, False), (2, 8, True), (0, 1, False))


def kernels(target: str) -> Iterator[tuple[_core.KernelSource, int]]:
    """Yields sources, with the CTAs per multiprocessor that launches need (0: as many as fit)."""
    appends: dict[str, _core.KernelSource] = {}  # by name
    for spec in attention_specs(target):
        num_sms = spec.problem.spec["num_processors"]
        yield _core.attention_source(spec.problem), spec.kernel_config["num_ctas"] // num_sms
        for rotates in (False, True):
            if spec.is_paged and not (rotates and spec.mla):
                append = _core.append_source(spec.problem, rotates)
                appends[append.name] = append
    for spec in backward_specs(target):
        for source in backward_sources(spec):
            yield source, 0
    timed = next(attention_specs(target))  # item_times
    config = timed.kernel_config | {"record_times": 1}
    yield _core.attention_source(_core.Problem(timed.problem.spec, config)), 0
    for spec in short_specs(target):
        config = one_consumer(spec.head_dim_qk)
        yield (
            _core.attention_source(_core.Problem(spec.problem.spec, config)),
            (config["num_ctas"] // 132),
        )
    arch = int(target.removeprefix("sm_"))
    for append in appends.values():
        yield append, 0
    for general in (False, True):
        yield _core.plan_source(arch, general), 0
    for dtype in range(3):
        yield _core.merge_source(arch, dtype), 0
    for reduction in ALL_REDUCES + (QUANTIZING_ALL_REDUCES if arch >= 89 else ()):
        yield _core.all_reduce_source(arch, *reduction), 0
    for case in QUANTIZED_PRODUCTS:
        yield _core.quantized_product_source(arch, *case, 0), 0
    for case in HOPPER_QUANTIZED_PRODUCTS if arch == 90 else ():
        yield _core.quantized_product_source(arch, *case, 1), 0
    for tiles in GROUPED_PRODUCTS if arch == 90 else ():
        yield _core.grouped_product_source(*tiles), 0
    linear = {
        source.name: source
        for words in LINEAR_ATTENTIONS
        for sources in (_core.linear_attention_sources, _core.linear_gradient_sources)
        for source in sources([arch, 0, *words])
    }
    for source in linear.values():
        yield source, 0
    for convolution in SHORT_CONVOLUTIONS:
        yield _core.short_convolution_source(arch, *convolution), 0


# --- reading cubins ---


def read_usage(cubin: bytes, entry: str) -> Usage:
    """Reads registers, frame and shared memory of kernel `entry` from a cubin's ELF64 sections."""
    (table_at,) = struct.unpack_from("<Q", cubin, 40)
    entry_bytes, count, names_at = struct.unpack_from("<HHH", cubin, 58)
    headers = [
        struct.unpack_from("<IIQQQQIIQQ", cubin, table_at + i * entry_bytes) for i in range(count)
    ]

    def text(section: int, at: int) -> str:
        start = headers[section][4] + at
        return cubin[start : cubin.index(b"\0", start)].decode()

    sections = {text(names_at, header[0]): i for i, header in enumerate(headers)}

    def contents(section: int) -> bytes:
        return cubin[headers[section][4] : headers[section][4] + headers[section][5]]

    symtab = sections[".symtab"]
    symbols = {}
    for at in range(headers[symtab][4], headers[symtab][4] + headers[symtab][5], 24):
        name, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", cubin, at)
        symbols[text(headers[symtab][6], name)] = (section, value)

    def initial_value(symbol: str) -> int:
        section, value = symbols[symbol]
        return struct.unpack_from("<i", contents(section), value)[0]

    # .nv.info: records (format, attribute, size or value); those of format 4 are followed by
    # `size` bytes, here (symbol index, value) for the kernel and for each function it calls.
    info = contents(sections[".nv.info"])
    values: dict[int, list[int]] = {}
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        if form == 4 and size == 8:
            values.setdefault(attribute, []).append(struct.unpack_from("<II", info, at + 4)[1])
        at += 4 + (size if form == 4 else 0)
    return Usage(
        registers=max(values[0x2F]),  # EIATTR_REGCOUNT
        stack=max(values[0x11]),  # EIATTR_FRAME_SIZE
        # All of it is dynamic: section .nv.shared holds only the kilobyte that each CTA reserves.
        smem=initial_value(f"{entry}_smem_bytes"),
        num_threads=initial_value(f"{entry}_num_threads"),
    )


# --- bounds ---


def faults(usage: Usage, arch: int, num_ctas: int) -> list[str]:
    """Returns exceeded limits. num_ctas: CTAs that must share a multiprocessor; 0: any number."""
    sm_kb = SMEM_KB[arch]
    num_ctas = max(1, num_ctas)
    warp_registers = -(-usage.registers * 32 // 256) * 256
    found = []
    if usage.stack:
        found.append(f"{usage.stack} bytes of stack")
    if num_ctas * (usage.smem + 1024) > sm_kb * 1024:
        found.append(
            f"{usage.smem} bytes of shared memory do not fit {num_ctas} CTAs in {sm_kb} KB"
        )
    if num_ctas * warp_registers * (usage.num_threads // 32) > REGISTERS:
        found.append(f"{usage.registers} registers do not fit {num_ctas} CTAs")
    return found


@functools.cache
def variant_kernels(target: str) -> dict[str, str]:
    """Maps names of variant kernels to readable ones, with the variant's name instead of a hash."""
    names = {variant.words: name for name, variant in variants().items()}
    sources = [(spec, _core.attention_source(spec.problem)) for spec in attention_specs(target)]
    sources += [(spec, backward_sources(spec)[0]) for spec in backward_specs(target)]
    kernels = {}
    for spec, source in sources:
        if spec.variant is not None:
            common = source.name.partition("-variant")[0]
            kernels[source.name] = f"{common}-{names[spec.variant.words]}"
    return kernels


def display_name(target: str, i: int) -> str:
    name: str = kernels_of(target)[i][0].name
    return variant_kernels(target).get(name, name)


@functools.cache
def kernels_of(target: str) -> list[tuple[_core.KernelSource, int]]:
    return list(kernels(target))


def check(which: tuple[str, int]) -> tuple[bool, str]:
    """Checks a kernel, the i-th of its target. Returns whether it passes, and a line about it."""
    target, i = which
    source, num_ctas = kernels_of(target)[i]
    start = time.perf_counter()
    cubin, log = source.compile()
    milliseconds = 1e3 * (time.perf_counter() - start)
    usage = read_usage(cubin, source.entry)
    found = faults(usage, int(target.removeprefix("sm_")), num_ctas)
    if "serialized" in log:  # C7510 to C7517
        found.append("ptxas serialises wgmma")
    name = display_name(target, i)
    arch_name = source.name.split("-")[1]
    bytes_accepted, reason = SPILLS.get(name.replace(f"-{arch_name}", "", 1), (0, ""))
    if usage.stack <= bytes_accepted:
        found = [fault for fault in found if not fault.endswith("of stack")]
    accepted = f"accepted: {reason}" if usage.stack else "ok"
    return not found, (
        f"{name:<62} {usage.registers:>4} {usage.stack:>6} {usage.smem:>7}"
        f" {num_ctas or '':>4} {milliseconds:>6.0f} ms  {'; '.join(found) or accepted}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("archs", nargs="*", default=ARCHS, metavar="ARCH", help="default: all")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--some", action="store_true", help=f"of these, one in {SOME}")
    arguments = parser.parse_args()
    chosen = [
        (target, i)
        for target in (arch.rstrip("a") for arch in arguments.archs)
        for i in range(len(kernels_of(target)))
        if arguments.only in display_name(target, i)
    ]
    if arguments.some:
        chosen = chosen[int(sources_digest("gpu"), 16) % SOME :: SOME]
    if not chosen:
        parser.error(f"no kernel has {arguments.only!r} in its name")
    print(f"{'kernel':<62} regs  stack    smem CTAs   compile")
    failures = 0
    num_processes = min(os.cpu_count() or 1, len(chosen))
    # Spawn, not fork: jax has threads.
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn")) as processes:
        for ok, line in processes.map(check, chosen):
            failures += not ok
            print(line, flush=True)
    print(f"{failures} kernels fail" if failures else "all kernels fit, none spills")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
