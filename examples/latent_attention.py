"""DeepSeek's latent attention: prompts without absorption, then decodes over the latent cache.

The cache holds one row of 576 elements per token, for all 16 heads. Per-head keys and values are
never computed for cached tokens.
"""

import dataclasses
import functools

import deepseek
import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja
from jax_attn.models import Rope

config = deepseek.DeepseekConfig(
    hidden_size=256,
    intermediate_size=512,
    num_attention_heads=16,
    q_lora_rank=128,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    rope=Rope(10000.0),
)
params = deepseek.random_block(config, jax.random.key(0), "bfloat16")
block = jax.jit(functools.partial(deepseek.block, config=config), donate_argnames="latent_pages")

prompt_lens = np.array([70, 200, 33])
batch, max_tokens = len(prompt_lens), int(prompt_lens.sum())
prompt_cache, (pages, _), page_table = ja.fixed_batch(
    **deepseek.cache_fields(config),
    page_size=64,
    batch_size=batch,
    max_kv_len=256,
    max_qo_tokens=max_tokens,
)
decode_cache = dataclasses.replace(prompt_cache, max_qo_tokens=batch)
prompt = deepseek.prompt_spec(config, max_tokens, max_batch=batch)

# The prompts: head dims 192 and 128, keys and values expanded from the latent rows.
qo_indptr = np.concatenate([[0], np.cumsum(prompt_lens)])
prompts = jax.random.normal(jax.random.key(1), (max_tokens, config.hidden_size), "bfloat16")
hidden, pages = block(
    params,
    x=prompts,
    positions=ja.rows(qo_indptr, prompt_lens, max_tokens).position,
    latent_pages=pages,
    cache_plan=ja.plan(prompt_cache, qo_indptr, prompt_lens, *page_table),
    prompt_plan=ja.plan(prompt, qo_indptr, prompt_lens),
)

# One token per request: each cache row is read once for all heads, as key and as value.
tokens = jax.random.normal(jax.random.key(2), (batch, config.hidden_size), "bfloat16")
kv_lens = prompt_lens + 1
hidden, pages = block(
    params,
    x=tokens,
    positions=prompt_lens,
    latent_pages=pages,
    cache_plan=ja.plan(decode_cache, np.arange(batch + 1), kv_lens, *page_table),
)

reference = jax.jit(deepseek.reference_block, static_argnames="config")
for r in range(batch):  # the formulas of the paper, on the whole sequence
    sequence = jnp.concatenate([prompts[qo_indptr[r] : qo_indptr[r + 1]], tokens[r : r + 1]])
    expected = reference(params, config, sequence)[-1]
    np.testing.assert_allclose(
        hidden[r].astype("float32"), expected.astype("float32"), atol=0.03 * abs(expected).max()
    )
per_token = 2 * 16 * (192 + 128)
print(f"{int(kv_lens.sum())} cached tokens of {2 * 576} bytes, instead of {per_token}")
