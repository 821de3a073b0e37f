"""The work of every CTA for a batch: draws a plan, saves it, and reads it back.

python examples/see_schedule.py [FOLDER]; then python -m jax_attn.inspect FOLDER/plan.npz
"""

import pathlib
import sys
import tempfile

import numpy as np

import jax_attn as ja

folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
folder.mkdir(parents=True, exist_ok=True)

# Planning needs no device: this plan is for a GPU with 10 multiprocessors.
spec = ja.AttentionSpec(
    num_qo_heads=8,
    num_kv_heads=2,
    head_dim_qk=128,
    page_size=16,
    max_batch=16,
    max_qo_tokens=512,
    max_kv_pages=8192,
    target="sm_90:10",
)

# A prompt of 200 tokens, decodes of very different lengths, and four requests that share the first
# 512 pages of their caches.
qo_lens = np.array([200, 1, 1, 1, 1, 1, 1, 1, 1, 1])
kv_lens = np.array([900, 24000, 9000, 3000, 800, 100, 9000, 8500, 8300, 8200])
shared = np.arange(512)
num_pages = -(-kv_lens // 16)
own = np.split(np.arange(512, 512 + num_pages.sum()), np.cumsum(num_pages)[:-1])
tables = own[:6] + [np.concatenate([shared, pages[512:]]) for pages in own[6:]]
plan = ja.plan(
    spec,
    np.concatenate([[0], np.cumsum(qo_lens)]),
    kv_lens,
    np.concatenate([[0], np.cumsum(num_pages)]),
    np.concatenate(tables),
)
print(plan.describe())

plan.save(folder / "plan.npz")  # for a bug report; to read it back:
plan = ja.AttentionPlan.load(folder / "plan.npz")
plan.plot(folder / "schedule.html")
plan.plot(folder / "schedule.png")  # with matplotlib: pip install 'jax_attn[plot]'
print("wrote", *sorted(path.name for path in folder.iterdir()), "to", folder)
