"""Writes tests/data/beams.json: beam searches of the bundled model by transformers, in float32.

    python tests/data/make_beams.py

Needs torch and transformers (2.13 and 5.24 made the file).
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers

from jax_attn import models

# Prompts, beams, tokens, length_penalty. Texts end at tokens with a line's end, besides.
CASES = [
    ("def main(", 4, 12, 1.0),
    ("import os\n", 10, 6, 0.0),
    ("class Foo:\n    def __init__(self", 5, 16, 2.0),
    ("raise", 3, 10, -1.0),
    ("for i in range(", 1, 8, 1.0),
]


def main() -> None:
    model = models.load(models.BUNDLED, dtype="float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        models.BUNDLED, dtype=torch.float32
    ).eval()
    decode = model.tokenizer.decode
    ends = [token for token in range(model.config.vocab_size) if "\n" in decode([token])][:40]
    rows = []
    for text, width, max_tokens, penalty in CASES:
        prompt = model.tokenizer.encode(text).ids
        with torch.no_grad():
            found = theirs.generate(
                torch.tensor([prompt]),
                do_sample=False,
                num_beams=width,
                num_return_sequences=width,
                max_new_tokens=max_tokens,
                length_penalty=penalty,
                early_stopping="never" if width > 1 else None,
                eos_token_id=[*model.config.eos_tokens, *ends],
                pad_token_id=-1,
                return_dict_in_generate=True,
                output_scores=True,
            )
        outputs = found.sequences[:, len(prompt) :].tolist()
        rows.append(
            {
                "prompt": prompt,
                "width": width,
                "max_tokens": max_tokens,
                "length_penalty": penalty,
                "stop_token_ids": ends,
                "tokens": [[token for token in tokens if token >= 0] for tokens in outputs],
                "scores": found.sequences_scores.tolist() if width > 1 else None,
            }
        )
    lines = ",\n".join(json.dumps(row) for row in rows)
    (Path(__file__).parent / "beams.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
