"""The engine on families unlike the bundled model.

Experts, sinks, latent attention, layers without RoPE, and quantized weights.
"""

import dataclasses

import jax
import numpy as np
import pytest

pytest.importorskip("llguidance", reason="needs the extra `serve`")


from helpers import model_cases, quantized_cases
from jax_attn import models
from jax_attn.serve import _sizing as sizing
from jax_attn.serve._engine.engine import Engine
from jax_attn.serve._engine.engine_config import EngineConfig
from jax_attn.serve._options import parse
from jax_attn.serve._scheduling.request import SamplingParams, Sequence
from jax_attn.serve._scheduling.streaming import Streaming

# Small, so that there are few executables to compile.
LIMITS = EngineConfig(num_pages=40, page_size=4, max_running=3, max_step_tokens=8)
PROMPTS = [[5, 9, 200, 31, 7, 7, 12, 90, 4], [5, 9, 200, 31, 1], [77]]
NUM_TOKENS = 8
FAMILIES = [
    "gpt-oss",
    "deepseek v2 groups, yarn",
    "mixtral window",
    "qwen3 moe, some dense",
    "phi3",
    "olmo2",
    "granite",
    "smollm3 windows",
    "qwen3 next",
    "qwen3.5",
    "lfm2 bias",
    "llama4",
    "falcon h1",
    "minimax",
    "gemma4 per-layer inputs, shared keys",
]


reference = jax.jit(
    models.reference_forward,
    static_argnames="config",
    compiler_options={"xla_backend_optimization_level": 0},
)


@pytest.fixture(scope="module")
def tokenizer():
    return models.load(models.BUNDLED, "float32").tokenizer


def sizes(tokenizer) -> dict[str, int]:
    size = tokenizer.get_vocab_size()
    return {"vocab_size": size, "vocab_size_per_layer_input": size, "eos_token_id": 0}


def greedy_answers(model: models.Model, config: EngineConfig = LIMITS) -> list[list[int]]:
    engine = Engine(model, config)
    engine.warm_up()
    return [seq.tokens[seq.num_prompt :] for seq in run(engine)]


def run(engine: Engine, namespace: str = "") -> list[Sequence]:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    seqs = [Sequence(str(i), str(i), list(x), sampling, namespace) for i, x in enumerate(PROMPTS)]
    engine.submit(seqs)
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()
    return seqs


def check(answers: list[list[int]], params, config) -> None:
    """Compares with the reference on `params`."""
    for tokens, answer in zip(PROMPTS, answers, strict=True):
        assert len(answer) == NUM_TOKENS
        padded = np.zeros(max(map(len, PROMPTS)) + NUM_TOKENS, np.int32)  # later zeros are unseen
        padded[: len(tokens) + NUM_TOKENS] = tokens + answer
        best = np.argmax(reference(params, config, padded), -1)
        assert best[len(tokens) - 1 :][:NUM_TOKENS].tolist() == answer


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_those_of_the_reference(name, tokenizer):
    config = models.parse_config(model_cases.CONFIGS[name] | sizes(tokenizer))
    params = models.random_params(config, jax.random.key(0), "float32")
    check(greedy_answers(models.Model(config, params, tokenizer)), params, config)


@pytest.mark.parametrize("name", ["granite 4", "olmo hybrid", "lfm2 moe", "bamba"])
def test_hybrids_through_the_prefix_cache(name, tokenizer):
    """Tokens are those of the reference, from a state, too; nobody goes on from another's."""
    config = models.parse_config(model_cases.CONFIGS[name] | sizes(tokenizer))
    params = models.random_params(config, jax.random.key(0), "float32")
    engine = Engine(models.Model(config, params, tokenizer), LIMITS)
    engine.warm_up()
    for namespace, num_cached in (("a", 4), ("a", 12), ("b", 4), ("b", 12)):
        seqs = run(engine, namespace)
        check([seq.tokens[seq.num_prompt :] for seq in seqs], params, config)
        assert sum(seq.num_cached for seq in seqs) == num_cached


def test_latent_rows_of_codes(tokenizer):
    """The first tokens are clear choices; after a different token the rest differs, too."""
    raw = model_cases.CONFIGS["deepseek v2 groups, yarn"] | sizes(tokenizer)
    config = models.parse_config(raw)
    params = models.random_params(config, jax.random.key(0), "float32")
    model = models.Model(config, params, tokenizer)
    plain = greedy_answers(model)
    coded = greedy_answers(model, dataclasses.replace(LIMITS, kv_dtype="float8_e4m3fn"))
    assert sum(a[0] == b[0] for a, b in zip(plain, coded, strict=True)) >= 2, (plain, coded)
    device = Engine(model, dataclasses.replace(LIMITS, kv_dtype="float8_e4m3fn")).device
    assert device._k_pages.dtype == "float8_e4m3fn" and device._v_pages is None


def test_a_page_of_latent_rows_has_keys_alone():
    config = models.parse_config(model_cases.CONFIGS["deepseek v3"])
    elements = config.num_layers * 16 * config.head_dim
    for options, size in ((["--dtype", "float32"], 4), (["--kv-cache-dtype", "fp8"], 1)):
        assert (
            sizing.bytes_of_page(config, parse(["--page-size", "16", *options])) == size * elements
        )


def test_a_page_of_a_hybrid_is_that_of_its_layers_with_attention():
    """States have slots of their own, which leave less room for pages."""
    config = models.parse_config(model_cases.CONFIGS["qwen3.5"])
    args = parse(["--page-size", "16", "--dtype", "float32", "--max-running", "5"])
    assert sizing.bytes_of_page(config, args) == 4 * 2 * 2 * 16 * 2 * 16
    states = models.init_states(config, 20, "float32")
    assert sizing.bytes_of_states(config, args) == sum(x.nbytes for x in states) > 0
    plain = models.parse_config(model_cases.CONFIGS["qwen3"])
    assert sizing.bytes_of_states(plain, args) == 0
    args.host_cache_bytes = 10**6
    page, slot = sizing.bytes_of_page(config, args), sizing.bytes_of_states(config, args) // 20
    fields = {"num_host_pages": 500_000 // page, "num_host_states": 500_000 // slot}
    assert sizing._host_capacities(config, args) == fields
    args.host_cache_bytes = 2 * slot - 1
    with pytest.raises(ValueError, match="--host-cache-bytes: expected at least .* of a slot of"):
        sizing._host_capacities(config, args)
    args.kv_policy = Streaming()
    with pytest.raises(ValueError, match="kv_policy: expected None, as .* has recurrent layers"):
        sizing._host_capacities(config, args)


def test_a_page_has_the_layers_of_all_groups_that_do_not_share():
    config = models.parse_config(model_cases.CONFIGS["gemma4 per-layer inputs, shared keys"])
    args = parse(["--page-size", "16", "--dtype", "float32"])
    assert sizing.bytes_of_page(config, args) == 4 * 2 * 16 * (2 * 2 * 16 + 2 * 2 * 32)


def test_greedy_tokens_of_quantised_weights_are_those_of_the_numbers_they_stand_for(
    tmp_path, tokenizer
):
    raw = quantized_cases.LLAMA | sizes(tokenizer)
    config, wide = quantized_cases.write(tmp_path, raw, "awq")
    params = models.load_params(tmp_path, config, "float32")
    answers = greedy_answers(models.Model(config, params, tokenizer))
    plain_dir = tmp_path / "plain"
    plain_dir.mkdir()
    pytest.importorskip("safetensors.numpy", reason="needs the extra `models`").save_file(
        wide, plain_dir / "model.safetensors"
    )
    plain_config = models.parse_config(raw)
    check(answers, models.load_params(plain_dir, plain_config, "float32"), plain_config)
