"""Train the tiny Llama that ships with this repository, on the Python standard library.

    python examples/train_tiny_llama.py --out data/tiny-llama-stdlib  # everything
    python examples/train_tiny_llama.py --steps 3 --tiny                    # smoke test on a CPU

The corpus and the tokenizer can be made on one machine and the training run on another:

    python examples/train_tiny_llama.py --prepare corpus.npz
    python examples/train_tiny_llama.py --data corpus.npz --out data/tiny-llama-stdlib

The text is split by file: the hash of a file's relative path decides whether it is trained on or
held out, so neither the tokenizer nor the model ever sees a held-out file. The result is a Hugging
Face directory: config.json, model.safetensors (bf16), tokenizer.json, and metrics.json with the
measured results. The training is plain JAX; jax_attn.models runs the result.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import jax_attn as ja

END_OF_TEXT = "<|endoftext|>"  # token 0: begins every file, and so ends the previous one
HELD_OUT_PERCENT = 5
# Generated tables and build data, not something to learn Python from.
SKIPPED_DIRS = {"site-packages", "encodings", "pydoc_data", "__pycache__"}
SKIPPED_PREFIX = "_sysconfigdata"
MIN_LETTERS = 0.62  # of all characters; below it a file is a table of numbers


# ---- corpus ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Tokenised files. File i is tokens[starts[i]:starts[i + 1]], beginning with END_OF_TEXT."""

    names: list[str]  # relative paths
    tokens: np.ndarray  # [num_tokens] u16
    starts: np.ndarray  # [num_files + 1] i64
    num_bytes: np.ndarray  # [num_files] i64, of the original text
    tokenizer_json: str

    @property
    def held_out(self) -> np.ndarray:
        """[num_files] bool."""
        return np.array([is_held_out(name) for name in self.names])

    def file(self, idx: int) -> np.ndarray:
        return self.tokens[self.starts[idx] : self.starts[idx + 1]]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, **dataclasses.asdict(self))

    @classmethod
    def load(cls, path: Path) -> Corpus:
        with np.load(path) as data:
            arrays = {name: data[name] for name in data.files}
        names, tokenizer_json = arrays.pop("names").tolist(), str(arrays.pop("tokenizer_json"))
        return cls(names=names, tokenizer_json=tokenizer_json, **arrays)


def is_held_out(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) % 100 < HELD_OUT_PERCENT


def read_sources(root: Path) -> dict[str, str]:
    """Relative path -> text of every Python file under `root` that is worth learning from."""
    sources = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED_DIRS & set(name.parts) or name.name.startswith(SKIPPED_PREFIX):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # the codec tests keep a few files in other encodings
            continue
        letters = sum(c.isascii() and (c.isalpha() or c.isspace()) for c in text)
        if text and letters >= MIN_LETTERS * len(text):
            sources[name.as_posix()] = text
    return sources


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE: every string has an encoding, and decoding gives back the same bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def prepare_corpus(root: Path, vocab_size: int, keep_every: int = 1) -> Corpus:
    sources = dict(list(read_sources(root).items())[::keep_every])
    names = list(sources)
    tokenizer = train_tokenizer(
        [sources[name] for name in names if not is_held_out(name)], vocab_size
    )
    files = [[0, *encoding.ids] for encoding in tokenizer.encode_batch(list(sources.values()))]
    corpus = Corpus(
        names=names,
        tokens=np.concatenate([np.array(ids, np.uint16) for ids in files]),
        starts=np.cumsum([0] + [len(ids) for ids in files]),
        num_bytes=np.array([len(text.encode()) for text in sources.values()]),
        tokenizer_json=tokenizer.to_str(),
    )
    held_out, num_bytes = corpus.held_out, corpus.num_bytes
    print(
        f"corpus: {len(names)} files, {num_bytes.sum() / 1e6:.1f} MB, "
        f"{len(corpus.tokens) / 1e6:.2f} M tokens; "
        f"held out: {held_out.sum()} files, {num_bytes[held_out].sum() / 1e6:.2f} MB"
    )
    return corpus


def training_batches(corpus: Corpus, batch: int, context: int, seed: int) -> Iterator[np.ndarray]:
    """Endless [batch, context + 1] u16: each epoch packs the files end to end in a new order."""
    rng = np.random.default_rng(seed)
    train_files = np.flatnonzero(~corpus.held_out)
    spare = np.empty([0], np.uint16)
    while True:
        stream = np.concatenate([spare] + [corpus.file(i) for i in rng.permutation(train_files)])
        # Neighbours share a token: the last target of one window is the first input of the next.
        num_windows = (len(stream) - 1) // context
        windows = np.lib.stride_tricks.sliding_window_view(stream, context + 1)[::context]
        order = rng.permutation(num_windows)
        for begin in range(0, num_windows - batch + 1, batch):
            yield windows[order[begin : begin + batch]]
        spare = stream[num_windows * context :]


# ---- model -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config:
    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


TINY = Config(512, 32, 64, 2, 4, 2, 8, 128)  # for the smoke test

Params = dict[str, jax.Array]  # per-layer weights are stacked: [num_layers, in, out]


def init_params(config: Config, key: jax.Array) -> Params:
    layers, d, ff = config.num_hidden_layers, config.hidden_size, config.intermediate_size
    q_size, kv_size = (
        heads * config.head_dim
        for heads in (config.num_attention_heads, config.num_key_value_heads)
    )
    shapes = {
        "embed": (config.vocab_size, d),
        "q": (layers, d, q_size),
        "k": (layers, d, kv_size),
        "v": (layers, d, kv_size),
        "o": (layers, q_size, d),
        "gate": (layers, d, ff),
        "up": (layers, d, ff),
        "down": (layers, ff, d),
    }
    params = {}
    for (name, shape), subkey in zip(
        shapes.items(), jax.random.split(key, len(shapes)), strict=True
    ):
        # The projections that write to the residual stream start smaller the deeper the model.
        scale = 0.02 / math.sqrt(2 * layers) if name in ("o", "down") else 0.02
        params[name] = scale * jax.random.normal(subkey, shape, jnp.float32)
    return params | {
        "attention_norm": jnp.ones((layers, d)),
        "mlp_norm": jnp.ones((layers, d)),
        "final_norm": jnp.ones(d),
    }


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32**2, -1, keepdims=True) + eps)).astype(x.dtype) * weight


def rope(x: jax.Array, theta: float) -> jax.Array:
    """Rotates x: [batch, context, heads, head_dim], pairing element i with i + head_dim / 2."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * theta ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def forward(params: Params, config: Config, tokens: jax.Array) -> jax.Array:
    """Logits [batch, context, vocab_size] f32 of tokens [batch, context].

    Computes in bf16 on a GPU, in f32 on a CPU.
    """
    on_gpu = jax.default_backend() == "gpu"
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16 if on_gpu else jnp.float32), params)
    heads = (*tokens.shape, -1, config.head_dim)

    def layer(x: jax.Array, w: Params) -> tuple[jax.Array, None]:
        h = rms_norm(x, w["attention_norm"], config.rms_norm_eps)
        q, k = (rope((h @ w[name]).reshape(heads), config.rope_theta) for name in ("q", "k"))
        v = (h @ w["v"]).reshape(heads)
        o = ja.dot_product_attention(q, k, v, is_causal=True)
        x = x + o.reshape(*tokens.shape, -1) @ w["o"]
        h = rms_norm(x, w["mlp_norm"], config.rms_norm_eps)
        return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], None

    whole = {"embed", "final_norm"}
    x, _ = jax.lax.scan(
        layer, params["embed"][tokens], {k: w for k, w in params.items() if k not in whole}
    )
    x = rms_norm(x, params["final_norm"], config.rms_norm_eps)
    return jnp.dot(x, params["embed"].T, preferred_element_type=jnp.float32)


def token_losses(params: Params, config: Config, windows: jax.Array) -> jax.Array:
    """Nats of every token but the first, given those before it.

    windows: [batch, context + 1] -> [batch, context] f32.
    """
    windows = windows.astype(jnp.int32)
    logits = forward(params, config, windows[:, :-1])
    target = jnp.take_along_axis(logits, windows[:, 1:, None], -1)[..., 0]
    return jax.nn.logsumexp(logits, -1) - target


# ---- training ----------------------------------------------------------------------------------


@dataclasses.dataclass
class Recipe:
    batch: int = 16  # windows a step
    peak_lr: float = 3e-3
    warmup_steps: int = 200
    weight_decay: float = 0.2
    clip_norm: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.95


def adamw(
    params: Params, grads: Params, mu: Params, nu: Params, step: jax.Array, lr: jax.Array, r: Recipe
):
    """Runs a step of AdamW (Loshchilov and Hutter 2019), clipped; norm weights do not decay."""
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads.values()))
    grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, r.clip_norm / norm), grads)
    mu = jax.tree.map(lambda m, g: r.beta1 * m + (1 - r.beta1) * g, mu, grads)
    nu = jax.tree.map(lambda n, g: r.beta2 * n + (1 - r.beta2) * g**2, nu, grads)
    debias1, debias2 = 1 - r.beta1 ** (step + 1), 1 - r.beta2 ** (step + 1)

    def update(name: str) -> jax.Array:
        direction = (mu[name] / debias1) / (jnp.sqrt(nu[name] / debias2) + 1e-8)
        decay = 0.0 if name.endswith("norm") else r.weight_decay
        return params[name] - lr * (direction + decay * params[name])

    return {name: update(name) for name in params}, mu, nu


def make_train_chunk(config: Config, recipe: Recipe):
    """Returns a jitted function that runs one step per given window."""

    @partial(jax.jit, donate_argnums=0)
    def train_chunk(state, windows, first_step, total_steps):
        """state, windows [steps, batch, context + 1], () , () -> state, mean loss in nats."""

        def one_step(state, inputs):
            step, window = inputs
            lr = recipe.peak_lr * jnp.minimum(
                (step + 1) / recipe.warmup_steps,
                0.5 * (1 + jnp.cos(jnp.pi * jnp.minimum(1.0, step / total_steps))),
            )
            loss, grads = jax.value_and_grad(lambda p: token_losses(p, config, window).mean())(
                state[0]
            )
            return adamw(state[0], grads, *state[1:], step, lr, recipe), loss

        steps = first_step + jnp.arange(windows.shape[0])
        state, losses = jax.lax.scan(one_step, state, (steps, windows))
        return state, losses.mean()

    return train_chunk


def train(
    corpus: Corpus, config: Config, recipe: Recipe, steps: int, max_minutes: float, seed: int
) -> tuple[Params, dict]:
    """Trains. Returns the weights and the metrics of the run.

    The second chunk of steps is timed. If `steps` would take longer than `max_minutes`, the cosine
    schedule is shortened. The learning rate is still warming up then, so this loses nothing.
    """
    begin = time.monotonic()
    chunk = max(1, min(100, steps // 3))
    params = init_params(config, jax.random.key(seed))
    state = (params, jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params))
    train_chunk = make_train_chunk(config, recipe)
    batches = training_batches(corpus, recipe.batch, config.max_position_embeddings, seed)
    step, seconds_a_step, loss = 0, 0.0, math.nan
    while step < steps:
        chunk_begin = time.monotonic()
        windows = np.stack([next(batches) for _ in range(min(chunk, steps - step))])
        state, mean_loss = train_chunk(state, windows, step, steps)
        loss = float(mean_loss)
        step += len(windows)
        seconds_a_step = (time.monotonic() - chunk_begin) / len(windows)
        elapsed = time.monotonic() - begin
        if step == 2 * chunk:
            affordable = step + int((60 * max_minutes - elapsed) / seconds_a_step)
            steps = min(steps, max(step, affordable // chunk * chunk))
        if step % (5 * chunk) == 0 or step in (chunk, 2 * chunk, steps):
            print(
                f"step {step:5d}/{steps}  loss {loss:.3f} nats/token  "
                f"{1e3 * seconds_a_step:.1f} ms/step  {elapsed:.0f} s",
                flush=True,
            )
        if step < steps and step % (20 * chunk) == 0:
            bits = evaluate(corpus, config, state[0])["held_out_bits_per_byte"]
            print(f"  held out: {bits:.4f} bits/byte", flush=True)
        if elapsed > 60 * max_minutes + 30:  # the early measurement was wrong
            break
    tokens = step * recipe.batch * config.max_position_embeddings
    epochs = tokens / len(corpus.tokens) / (1 - corpus.held_out.mean())
    return state[0], {
        "steps": step,
        "tokens_seen": tokens,
        "epochs": round(float(epochs), 1),
        "final_train_loss_nats_per_token": round(loss, 4),
        "train_seconds": round(time.monotonic() - begin, 1),
        "device": jax.devices()[0].device_kind,
    }


def evaluate(corpus: Corpus, config: Config, params: Params, batch: int = 16) -> dict:
    """Measures bits per byte of the held-out files.

    Every token after END_OF_TEXT counts once, given the tokens of its file before it: all of them
    within the first context, then at least half a context (windows overlap by half).
    """
    context, half = config.max_position_embeddings, config.max_position_embeddings // 2
    windows, counted, owner = [], [], []
    for idx in np.flatnonzero(corpus.held_out):
        file = corpus.file(idx)
        for begin in range(0, max(1, len(file) - 1 - half), half):
            window = file[begin : begin + context + 1]
            first_new = half if begin else 0
            windows.append(np.pad(window, (0, context + 1 - len(window))))
            counted.append(
                (np.arange(context) >= first_new) & (np.arange(context) < len(window) - 1)
            )
            owner.append(idx)
    losses = jax.jit(lambda p, w: token_losses(p, config, w))
    nats = np.zeros(len(corpus.names))
    for begin in range(0, len(windows), batch):
        group = np.stack(windows[begin : begin + batch])
        padded = np.pad(group, ((0, batch - len(group)), (0, 0)))
        values = np.asarray(losses(params, padded), np.float64)[: len(group)]
        np.add.at(
            nats,
            owner[begin : begin + batch],
            (values * np.stack(counted[begin : begin + batch])).sum(1),
        )

    def bits_per_byte(files: np.ndarray) -> float:
        return round(
            float(nats[files].sum() / math.log(2) / max(1, corpus.num_bytes[files].sum())), 4
        )

    tests = np.array(["test" in name for name in corpus.names])
    return {
        "held_out_bits_per_byte": bits_per_byte(corpus.held_out),
        "held_out_bits_per_byte_library": bits_per_byte(corpus.held_out & ~tests),
        "held_out_bits_per_byte_tests": bits_per_byte(corpus.held_out & tests),
        "held_out_files": int(corpus.held_out.sum()),
        "held_out_bytes": int(corpus.num_bytes[corpus.held_out].sum()),
    }


# ---- result ------------------------------------------------------------------------------------


def save_model(out: Path, corpus: Corpus, config: Config, params: Params, metrics: dict) -> None:
    """Writes a Hugging Face model directory. `params` are saved as bf16."""
    out.mkdir(parents=True, exist_ok=True)

    def write_json(name: str, value: dict) -> None:
        (out / name).write_text(json.dumps(value, indent=2) + "\n")

    named = {
        "model.embed_tokens.weight": params["embed"],
        "model.norm.weight": params["final_norm"],
    }
    per_layer = {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "mlp_norm",
        **{f"self_attn.{x}_proj": x for x in "qkvo"},
        **{f"mlp.{x}_proj": x for x in ("gate", "up", "down")},
    }
    for hf_name, name in per_layer.items():
        for i, w in enumerate(params[name]):
            named[f"model.layers.{i}.{hf_name}.weight"] = (
                w.T
            )  # torch keeps a linear layer as [out, in]
    weights = {name: np.ascontiguousarray(w.astype(jnp.bfloat16)) for name, w in named.items()}
    (out / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    write_json(
        "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **dataclasses.asdict(config),
            "attention_bias": False,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "hidden_act": "silu",
            "mlp_bias": False,
            "rope_scaling": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        },
    )
    write_json("generation_config.json", {"bos_token_id": 0, "eos_token_id": 0, "do_sample": False})
    write_json(
        "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT,
            "model_max_length": config.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
        },
    )
    write_json("metrics.json", metrics)
    (out / "tokenizer.json").write_text(corpus.tokenizer_json)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--corpus",
        type=Path,
        default=Path(sysconfig.get_path("stdlib")),
        help="folder of Python sources",
    )
    parser.add_argument(
        "--prepare", type=Path, metavar="NPZ", help="write the tokenised corpus there, and stop"
    )
    parser.add_argument(
        "--data", type=Path, metavar="NPZ", help="train on a corpus that --prepare wrote"
    )
    parser.add_argument(
        "--out", type=Path, help="model directory to write (default: a temporary one)"
    )
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument(
        "--max-minutes",
        type=float,
        default=60.0,
        help="fewer steps where --steps would take longer",
    )
    parser.add_argument("--peak-lr", type=float, default=Recipe.peak_lr)
    parser.add_argument("--weight-decay", type=float, default=Recipe.weight_decay)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--tiny", action="store_true", help="a toy model on a sixteenth of the files"
    )
    args = parser.parse_args()

    config = TINY if args.tiny else Config()
    if args.data:
        corpus = Corpus.load(args.data)
    else:
        corpus = prepare_corpus(args.corpus, config.vocab_size, keep_every=16 if args.tiny else 1)
    if args.prepare:
        corpus.save(args.prepare)
        return

    recipe = Recipe(peak_lr=args.peak_lr, weight_decay=args.weight_decay)
    params, run = train(corpus, config, recipe, args.steps, args.max_minutes, args.seed)
    num_params = sum(w.size for w in params.values())
    # Measure the bf16 weights, because those are saved.
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(jnp.float32), params)
    metrics = {
        "parameters": num_params,
        **evaluate(corpus, config, params),
        **run,
        "recipe": dataclasses.asdict(recipe),
    }
    print(json.dumps(metrics, indent=2))
    out = args.out or Path(tempfile.mkdtemp(prefix="tiny-llama-"))
    save_model(out, corpus, config, params, metrics)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
