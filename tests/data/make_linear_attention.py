"""Records linear_attention.npz: what transformers' and torch's functions compute.

    python tests/data/make_linear_attention.py

Needs torch and transformers, which tests do not. Inputs are in the file, so a test computes the
same from them. gated delta rule: transformers.models.qwen3_next, both of its torch functions.
"""

from pathlib import Path

import numpy as np
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

# name: (seq, decay, beta, same keys, initial state, l2 norm). None: random.
CASES = {
    "odd": (67, None, None, False, True, True),
    "one_token": (1, None, None, False, True, True),
    "no_state": (64, None, None, False, False, False),
    "g_zero": (70, 0.0, None, False, True, True),
    "g_far": (70, -20.0, None, False, True, True),
    "beta_0": (33, None, 0.0, False, True, True),
    "repeated_keys": (66, -1e-3, 1.0, True, True, True),
}
BATCH, HEADS, DIM_K, DIM_V = 2, 2, 8, 16


def main():
    rng, found = np.random.default_rng(0), {}
    for name, (seq, decay, strength, same_keys, has_state, l2_norm) in CASES.items():

        def draw(*shape):
            return rng.standard_normal(shape).astype(np.float32)

        q, k = (draw(BATCH, seq, HEADS, DIM_K) * (1 if l2_norm else 0.3) for _ in range(2))
        if same_keys:
            k[:] = k[:, :1]
        v, g = draw(BATCH, seq, HEADS, DIM_V), -np.abs(draw(BATCH, seq, HEADS))
        beta, state = 1 / (1 + np.exp(-draw(BATCH, seq, HEADS))), draw(BATCH, HEADS, DIM_K, DIM_V)
        if decay is not None:
            g[:] = decay
        if strength is not None:
            beta[:] = strength
        arrays = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "state": state}
        tensors = [torch.tensor(arrays[n]) for n in ("q", "k", "v", "g", "beta")]
        keywords = {
            "initial_state": torch.tensor(state) if has_state else None,
            "output_final_state": True,
            "use_qk_l2norm_in_kernel": l2_norm,
        }
        chunked = torch_chunk_gated_delta_rule(*tensors, **keywords)
        recurrent = torch_recurrent_gated_delta_rule(*tensors, **keywords)
        for a, b in zip(chunked, recurrent, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
        if not has_state:
            del arrays["state"]
        arrays |= {"l2_norm": np.array(l2_norm)}
        arrays |= {"o": recurrent[0].numpy(), "final_state": recurrent[1].numpy()}
        found |= {f"{name}/{key}": value for key, value in arrays.items()}
    np.savez_compressed(Path(__file__).with_name("linear_attention.npz"), **found)


if __name__ == "__main__":
    main()
