"""Checks a live server with lm-evaluation-harness: check_lm_eval.py PYTHON.

PYTHON is that of an environment with the harness. Its `local-completions` measures bits per byte of
a few texts (log-probabilities of prompts) and whether generated text is as expected. Both are
compared with the bundled model's reference. No hub is contacted: the task's data are files.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

from jax_attn import models

ROOT = Path(__file__).resolve().parents[1]
TEXTS = sorted((ROOT / "examples" / "prompts").glob("*.py.txt"))
NUM_CHARS = 1500  # of each text
MAX_LEN = 640  # tokens, which the texts do not reach
NUM_GENERATED = 12  # tokens
DIGITS = 1e-4  # relative, of bits per byte

DATA = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
"""
TASKS = {
    "bits": """
task: bits
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
""",
    "greedy": """
task: greedy
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: [], max_gen_toks: NUM_GENERATED, temperature: 0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}


class Reference:
    def __init__(self) -> None:
        self._model = models.load(models.BUNDLED, "float32")
        self._forward = jax.jit(models.reference_forward, static_argnames="config")

    def _logits(self, tokens: list[int]) -> np.ndarray:
        padded = np.zeros(MAX_LEN, np.int32)  # tokens do not see the padding behind
        padded[: len(tokens)] = tokens
        logits = self._forward(self._model.params, self._model.config, padded)
        return np.asarray(logits, np.float64)[: len(tokens)]

    def bits(self, text: str) -> float:
        tokens = [self._model.config.bos_token, *self._model.tokenizer.encode(text).ids]
        logits = self._logits(tokens)[:-1]
        top = logits.max(-1)
        norms = top + np.log(np.exp(logits - top[:, None]).sum(-1))
        return float((norms - logits[np.arange(len(norms)), tokens[1:]]).sum() / np.log(2))

    def greedy(self, prompt: str) -> str:
        # The harness sends tokens and adds none before a prompt's.
        tokens = list(self._model.tokenizer.encode(prompt).ids)
        begin = len(tokens)
        for _ in range(NUM_GENERATED):
            tokens.append(int(self._logits(tokens)[-1].argmax()))
        return self._model.tokenizer.decode(tokens[begin:])


def write_tasks(directory: Path) -> float:
    """Writes the tasks and their data. Returns the expected bits per byte."""
    reference = Reference()
    texts = [path.read_text(encoding="utf-8")[:NUM_CHARS].rstrip() for path in TEXTS]
    prompts = [text[: NUM_CHARS // 4].rstrip() for text in texts]
    rows = [
        {"text": text, "prompt": prompt, "answer": reference.greedy(prompt)}
        for text, prompt in zip(texts, prompts, strict=True)
    ]
    data = directory / "texts.json"
    data.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    for name, task in TASKS.items():
        text = task.replace("NUM_GENERATED", str(NUM_GENERATED))
        text += DATA.format(path=json.dumps(str(data)))
        (directory / f"{name}.yaml").write_text(text)
    return sum(map(reference.bits, texts)) / sum(len(text.encode()) for text in texts)


def evaluate(python: str, directory: Path, url: str) -> dict[str, dict[str, float]]:
    """Runs the harness and returns its results by task."""
    arguments = {
        "model": models.BUNDLED.name,
        "base_url": f"{url}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": models.BUNDLED,
        "max_length": MAX_LEN,
        "num_concurrent": 2,
    }
    command = [python, "-m", "lm_eval", "run", "--model", "local-completions"]
    command += ["--model_args", *(f"{name}={value}" for name, value in arguments.items())]
    command += ["--tasks", *TASKS, "--include_path", directory, "--output_path", directory / "out"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(directory / "cache")}
    subprocess.run(list(map(str, command)), check=True, env=os.environ | offline, timeout=900)
    (results,) = (directory / "out").rglob("results_*.json")
    return json.loads(results.read_text())["results"]


def main() -> int:
    (python,) = sys.argv[1:]
    options = ["--port", "0", "--max-running", "4", "--max-step-tokens", "128"]
    command = [sys.executable, "-m", "jax_attn.serve", *options]
    with (
        tempfile.TemporaryDirectory() as name,
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server,
    ):
        try:
            expected = write_tasks(directory := Path(name))
            assert server.stderr is not None
            lines = iter(server.stderr.readline, "")
            url = next(
                found[1] for line in lines if (found := re.search(r"running on (http\S+)", line))
            )
            next(line for line in lines if " ready; " in line)
            results = evaluate(python, directory, url)
        finally:
            server.kill()
    bits = results["bits"]["bits_per_byte,none"]
    matches = results["greedy"]["exact_match,none"]
    print(
        f"bits per byte: {bits:.6f}, expected {expected:.6f}; generation: {matches:.0%} as expected"
    )
    return int(abs(bits - expected) > DIGITS * expected or matches != 1)


if __name__ == "__main__":
    sys.exit(main())
