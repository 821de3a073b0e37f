"""Models of the families beside transformers on CPUs, by processor time, in turns in one process.

    taskset -c 0 python -m benchmarks.bench_models [tower] [rerank] [decode] [--rounds 3]

tower: a picture of 1,024 x 1,024 through layers of Qwen3-VL-2B's tower.
rerank: 64 pairs of 256 tokens through MiniLM's shapes, as a cross-encoder, in batches of 2,048
    tokens, beside batches of 32 pairs of transformers, as sentence-transformers has, and of 8.
decode: layers of Gemma 4 E2B's shapes, for 1 and for 8 clients, with a part of its vocabulary.

Random weights in f32 or bf16, the same on both sides. On one core a call's processor time is its
time on an idle machine, so that the ratio holds on a busy one, too. Prints the median of each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
import transformers

from benchmarks.report import log
from benchmarks.shapes import make_tokenizer
from jax_attn import models
from jax_attn.serve._engine.engine import Engine
from jax_attn.serve._engine.engine_config import EngineConfig
from jax_attn.serve._scheduling.request import SamplingParams, Sequence

Sides = dict[str, Callable[[], Any]]
_CONTEXT, _NEW = 64, 32  # tokens of a prompt and of an answer

TOWER = {
    "model_type": "qwen3_vl_vision",
    "depth": 2,  # of 24; the time of the others is the same
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "out_hidden_size": 2048,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [1],
}
_TEXT = {
    "model_type": "qwen3_vl_text",
    "vocab_size": 64,
    "hidden_size": 2048,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
}
RERANKER = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "vocab_size": 30522,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "id2label": {"0": "LABEL_0"},
}
DECODER = {
    "model_type": "gemma4_text",
    "vocab_size": 8192,  # of 262,144
    "vocab_size_per_layer_input": 8192,
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 10,  # of 35
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 5,
    "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 2,
    "use_double_wide_mlp": True,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


def compare(name: str, sides: Sides, rounds: int, work: float = 1.0) -> None:
    """Runs the sides in turns. work: what a call does, in the units of the printed rate."""
    samples: dict[str, list[float]] = {side: [] for side in sides}
    for run in sides.values():
        run()
    for _ in range(rounds):
        for side, run in sides.items():
            begin = time.process_time()
            run()
            samples[side].append(time.process_time() - begin)
    medians = {side: statistics.median(each) for side, each in samples.items()}
    ours, theirs = medians["jax_attn"], medians["transformers"]
    log(
        f"{name}: jax_attn {ours:.3f} s ({work / ours:.2f} a second), transformers {theirs:.3f} s,"
        f" {theirs / ours:.2f} x"
    )


def write(directory: Path, model: transformers.PreTrainedModel, **files: Any) -> None:
    model.save_pretrained(directory)
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))


def tower(directory: Path, dtype: str) -> Sides:
    raw = {"text_config": _TEXT, "vision_config": TOWER, "image_token_id": 60}
    raw |= {"video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
    config = transformers.Qwen3VLConfig(**raw)
    theirs = transformers.Qwen3VLForConditionalGeneration(config).to(getattr(torch, dtype)).eval()
    size = {"shortest_edge": 1 << 16, "longest_edge": 1 << 24}
    keys = {key: TOWER[key] for key in ("patch_size", "temporal_patch_size")}
    keys |= {"merge_size": 2, "size": size, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    write(directory, theirs, preprocessor_config=keys)
    vision = models.load_vision(directory, dtype, in_panels=True)
    picture = np.random.default_rng(0).integers(0, 256, (1024, 1024, 3)).astype(np.uint8)
    pixels = torch.zeros(4096, 3 * 2 * 16 * 16, dtype=getattr(torch, dtype))
    grid = torch.tensor([[1, 64, 64]])

    def run() -> None:
        with torch.inference_mode():
            theirs.model.visual(pixels, grid_thw=grid)

    return {
        "jax_attn": lambda: jax.block_until_ready(models.encode_pictures(vision, [picture])),
        "transformers": run,
    }


def rerank(directory: Path, dtype: str, their_pairs: int) -> Sides:
    theirs = transformers.BertForSequenceClassification(transformers.BertConfig(**RERANKER))
    theirs = theirs.to(getattr(torch, dtype)).eval()
    write(directory, theirs, config=RERANKER)
    make_tokenizer(RERANKER["vocab_size"]).save(str(directory / "tokenizer.json"))
    model = models.load_embedding(directory, dtype, in_panels=True)
    tokens = np.random.default_rng(0).integers(0, 30522, (64, 256))
    ids, pairs = torch.tensor(tokens), 8

    def ours() -> None:
        scores = []
        for begin in range(0, len(tokens), pairs):
            part = tokens[begin : begin + pairs].tolist()
            batch = models.EmbeddingBatch.make(model, part, pairs * 256, pairs)
            scores.append(models.embed(model, batch))
        jax.block_until_ready(scores)

    def run() -> None:
        with torch.inference_mode():
            for part in ids.split(their_pairs):
                theirs(part, attention_mask=torch.ones_like(part))

    return {"jax_attn": ours, "transformers": run}


def decode(directory: Path, dtype: str, num_clients: int) -> Sides:
    config = transformers.Gemma4TextConfig(**DECODER)
    theirs = transformers.Gemma4ForCausalLM(config).to(getattr(torch, dtype)).eval()
    write(directory, theirs)
    tokenizer = make_tokenizer(DECODER["vocab_size"])
    tokenizer.save(str(directory / "tokenizer.json"))
    model = models.load(directory, dtype, in_panels=True)
    limits = EngineConfig(
        num_pages=256, max_running=num_clients, max_step_tokens=max(64, num_clients),
        prefix_cache=False,
    )  # fmt: skip
    engine = Engine(model, limits)
    engine.warm_up()
    tokens = np.random.default_rng(0).integers(5, 8192, (num_clients, _CONTEXT))
    ids, numbers = torch.tensor(tokens), itertools.count()
    params = SamplingParams(max_tokens=_NEW, temperature=0, ignore_eos=True)

    def ours() -> None:
        names = [f"s{next(numbers)}" for _ in range(num_clients)]
        engine.submit(
            [Sequence(x, x, row.tolist(), params) for x, row in zip(names, tokens, strict=True)]
        )
        while engine.has_work:
            engine.step()

    def run() -> None:
        with torch.inference_mode():
            theirs.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                min_new_tokens=_NEW,
                max_new_tokens=_NEW,
                do_sample=False,
            )

    return {"jax_attn": ours, "transformers": run}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", default=["tower", "rerank", "decode"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for what in args.what:
        with tempfile.TemporaryDirectory() as directory:
            if what == "tower":
                compare("1,024 x 1,024", tower(Path(directory), args.dtype), args.rounds)
            elif what == "rerank":
                for pairs in (32, 8):
                    sides = rerank(Path(directory), args.dtype, pairs)
                    compare(f"64 x 256 beside batches of {pairs}", sides, args.rounds, 64)
            else:
                for number in (1, 8):
                    sides = decode(Path(directory), args.dtype, number)
                    compare(f"{number} clients", sides, args.rounds, number * _NEW)


if __name__ == "__main__":
    main()
