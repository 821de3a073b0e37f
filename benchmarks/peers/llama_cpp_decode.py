"""A decode step of llama.cpp on a CPU, interleaved with bench_engine.

    python -m benchmarks.peers.llama_cpp_decode <requests       (peers/decode_turns.py)

Random weights, greedy. The model is written to a temporary GGUF file, in the requested dtype. Needs
only llama-cpp-python and gguf, so it can run with a separate Python.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

from benchmarks.peers import decode_turns

MAX_TOKENS = 512  # per sequence


def write_model(path: Path, config: dict[str, Any], dtype: str) -> None:
    """Writes a GGUF file. config: a config.json of Qwen3."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim, inner = config["head_dim"], config["intermediate_size"]
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(vocab)
    random = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        weight = random.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
        if dtype == "bfloat16":
            words = (weight.view(np.uint32) >> 16).astype(np.uint16)
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(name, words.view(np.uint8), raw_dtype=kind)
        else:
            writer.add_tensor(name, weight)

    def add_norm(name: str, size: int) -> None:
        writer.add_tensor(name, np.ones(size, np.float32))

    add("token_embd.weight", vocab, hidden)
    add_norm("output_norm.weight", hidden)
    for i in range(config["num_hidden_layers"]):
        add_norm(f"blk.{i}.attn_norm.weight", hidden)
        add(f"blk.{i}.attn_q.weight", heads * head_dim, hidden)
        add(f"blk.{i}.attn_k.weight", kv_heads * head_dim, hidden)
        add(f"blk.{i}.attn_v.weight", kv_heads * head_dim, hidden)
        add(f"blk.{i}.attn_output.weight", hidden, heads * head_dim)
        add_norm(f"blk.{i}.attn_q_norm.weight", head_dim)
        add_norm(f"blk.{i}.attn_k_norm.weight", head_dim)
        add_norm(f"blk.{i}.ffn_norm.weight", hidden)
        add(f"blk.{i}.ffn_gate.weight", inner, hidden)
        add(f"blk.{i}.ffn_up.weight", inner, hidden)
        add(f"blk.{i}.ffn_down.weight", hidden, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load_model(config: dict[str, Any], dtype: str) -> Any:
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    params.use_mmap = False
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_model(path, config, dtype)
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise SystemExit("llama.cpp does not load the model")
    return model


class Batch:
    def __init__(self, model: Any, clients: int, context: int):
        self.clients = clients
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = clients * MAX_TOKENS
        params.n_batch = params.n_ubatch = clients * context
        params.n_seq_max = clients
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        self.context = llama_cpp.llama_init_from_model(model, params)
        self.batch = llama_cpp.llama_batch_init(clients * context, 0, 1)
        self.length = 0
        self.run(np.random.default_rng(0).integers(2, self.vocab_size, (clients, context)))

    def run(self, tokens: np.ndarray) -> None:
        """Appends tokens [clients, n] to the sequences."""
        clients, n = tokens.shape
        batch = self.batch
        batch.n_tokens = clients * n
        for i, token in enumerate(tokens.ravel().tolist()):
            batch.token[i] = token
            batch.pos[i] = self.length + i % n
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = i // n
            batch.logits[i] = i % n == n - 1
        if status := llama_cpp.llama_decode(self.context, batch):
            raise SystemExit(f"llama_decode: status {status}")
        self.length += n
        ends = [s * n + n - 1 for s in range(clients)]
        self.next = np.array([[self._logits(i).argmax()] for i in ends])

    def step(self) -> None:
        self.run(self.next)

    def close(self) -> None:
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.context)

    def _logits(self, i: int) -> np.ndarray:
        logits = llama_cpp.llama_get_logits_ith(self.context, i)
        return np.ctypeslib.as_array(logits, (self.vocab_size,))


@llama_cpp.llama_log_callback
def _quiet(level: int, text: bytes, data: Any) -> None:
    pass


if __name__ == "__main__":
    llama_cpp.llama_log_set(_quiet, None)
    llama_cpp.llama_backend_init()
    decode_turns.serve(f"llama-cpp-python {llama_cpp.__version__}", load_model, Batch)
