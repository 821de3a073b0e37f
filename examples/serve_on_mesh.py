"""The server's engine over four devices: each has a part of the heads, MLPs, vocabulary and pages.

This is `python -m jax_attn.serve --tensor-parallel 4`, without HTTP.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4 " + os.environ.get(
    "XLA_FLAGS", ""
)


from jax_attn import models
from jax_attn.serve._engine.engine import Engine
from jax_attn.serve._engine.engine_config import EngineConfig
from jax_attn.serve._scheduling.request import SamplingParams, Sequence

PROMPTS = ("import os\n\n\ndef main(", "class Error(Exception):\n    ")


def generate(num_devices: int) -> tuple[list[str], dict[int, int]]:
    """Returns the greedy text for each prompt, and the bytes that each device holds."""
    model = models.load(models.BUNDLED, dtype="float32")
    config = EngineConfig(
        num_pages=64, max_running=2, max_step_tokens=32, tensor_parallel=num_devices
    )
    engine = Engine(model, config)
    engine.warm_up()  # compiles everything that a step can need
    greedy = SamplingParams(max_tokens=16, temperature=0)
    engine.submit(
        [
            Sequence(str(i), str(i), model.tokenizer.encode(prompt).ids, greedy)
            for i, prompt in enumerate(PROMPTS)
        ]
    )
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    while engine.has_work:
        for event in engine.step():
            tokens[int(event.seq_id)] += event.tokens
    return [model.tokenizer.decode(x) for x in tokens], engine.device.bytes_held()


if __name__ == "__main__":
    texts, held = generate(num_devices=4)
    assert (texts, len(held)) == (generate(num_devices=1)[0], 4)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        print(prompt + text, end="\n\n")
    print("bytes of weights and pages:", held)
