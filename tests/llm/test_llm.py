"""LLM and AsyncLLM: results, options, streams, scores, and what ends them."""

import _thread
import asyncio
import contextlib
import functools
import gc
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import warnings
import weakref

import jax
import numpy as np
import pytest

pytest.importorskip("llguidance", reason="needs the extra `serve`")

from helpers import trainers
from helpers.model_cases import shallow
from helpers.paths import DATA
from helpers.small_llm import SMALL, check_at_rest
from jax_attn import LLM, AsyncLLM, SamplingParams, models
from jax_attn.llm import BATCH_INVARIANT, EngineStopped, token_logprobs
from jax_attn.serve import _options

GREEDY = SamplingParams(max_tokens=6, temperature=0)
PROMPTS = ["def add(a, b):\n    return", "class A", "import os\n", "def main(", "x", "for i in"]


def texts(outputs):
    return [output.text for output in outputs]


def test_results_are_in_order_and_do_not_depend_on_what_runs_beside(llm):
    alone = [llm.generate(prompt, GREEDY)[0].text for prompt in PROMPTS]
    assert texts(llm.generate(PROMPTS, GREEDY)) == alone
    tokens = [
        output.prompt_tokens for output in llm.generate(PROMPTS, SamplingParams(max_tokens=0))
    ]
    mixed = [np.array(tokens[0]), *PROMPTS[1:3], tuple(tokens[3]), *tokens[4:]]
    outputs = llm.generate(mixed, [GREEDY] * 3 + [SamplingParams(max_tokens=2, temperature=0)] * 3)
    assert texts(outputs)[:3] == alone[:3]
    assert [output.prompt for output in outputs[:3]] == [None, *PROMPTS[1:3]]
    assert [len(output.tokens) for output in outputs[3:]] == [2, 2, 2]
    assert [output.prompt_tokens for output in outputs] == tokens
    assert all(output.completions[0].finish_reason == "length" for output in outputs)
    assert llm.generate([]) == []
    check_at_rest(llm)


BEAMS = json.loads((DATA / "beams.json").read_text())


def beam_params(case) -> SamplingParams:
    return SamplingParams(
        n=case["width"], max_tokens=case["max_tokens"], stop_token_ids=case["stop_token_ids"]
    )


def test_beams_are_those_of_transformers(llm):
    """Searches of one call share steps."""
    for penalty in {case["length_penalty"] for case in BEAMS}:
        cases = [case for case in BEAMS if case["length_penalty"] == penalty]
        outputs = llm.beam_search(
            [case["prompt"] for case in cases],
            [beam_params(case) for case in cases],
            length_penalty=penalty,
        )
        for case, output in zip(cases, outputs, strict=True):
            assert [each.tokens for each in output.completions] == case["tokens"]
            assert all(each.logprobs is None for each in output.completions)
    check_at_rest(llm)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"n": 11}, "n: expected 1 to 10 beams, got 11"),
        ({"max_tokens": 0}, "max_tokens: expected at least 1"),
        ({"temperature": 0.5}, "temperature: expected none"),
        ({"min_tokens": 1}, "min_tokens: expected none"),
        ({"stop": "x"}, "stop: expected none"),
        ({"prompt_logprobs": True}, "prompt_logprobs: expected none"),
        ({"regex": "a"}, "regex: expected none"),
    ],
)
def test_what_beams_do_not_honour_is_refused(llm, params, words):
    with pytest.raises(ValueError, match=f"^beam_search: {words}"):
        llm.beam_search("x", SamplingParams(**{"max_tokens": 4} | params))
    with pytest.raises(ValueError, match="^beam_search: length_penalty: expected a finite"):
        llm.beam_search("x", SamplingParams(max_tokens=4), length_penalty=float("nan"))


def test_equal_beginnings_share_pages_however_prompts_are_ordered(llm):
    """More of them than the cache holds, and than the engine looks up in its queue."""
    beginnings = [[100 + i] * 16 for i in range(150)]
    prompts = [beginning + [last] for last in (7, 8) for beginning in beginnings]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1))
    assert sum(output.num_cached_tokens for output in outputs) == 150 * 16


def test_choices_seeds_and_logprobs(llm):
    params = SamplingParams(n=3, max_tokens=5, seed=7, logprobs=2, prompt_logprobs=True)
    [one], [two] = (llm.generate("def f(", params) for _ in range(2))
    tokens = [completion.tokens for completion in one.completions]
    assert [completion.index for completion in one.completions] == [0, 1, 2]
    assert tokens == [completion.tokens for completion in two.completions]
    assert len(set(map(tuple, tokens))) > 1
    for completion in one.completions:
        assert [each.token for each in completion.logprobs] == completion.tokens
        assert all(len(each.top) == 2 for each in completion.logprobs)
        assert completion.token_logprobs().shape == (5,)
    assert [each.token for each in one.prompt_logprobs] == one.prompt_tokens
    [plain] = llm.generate("def f(", SamplingParams(max_tokens=1, prompt_logprobs=True))
    assert plain.completions[0].logprobs is None and plain.prompt_logprobs is not None


def test_streams_are_the_same_text_in_parts(llm):
    params = SamplingParams(n=2, max_tokens=8, seed=3, logprobs=True, prompt_logprobs=True)
    [whole] = llm.generate("def f(", params)
    chunks = list(llm.stream("def f(", params))
    for completion in whole.completions:
        mine = [chunk for chunk in chunks if chunk.index == completion.index]
        assert "".join(chunk.text for chunk in mine) == completion.text
        assert sum((chunk.tokens for chunk in mine), []) == completion.tokens
        assert len(sum((chunk.logprobs for chunk in mine), [])) == len(completion.tokens)
        assert [chunk.finish_reason for chunk in mine] == [None] * (len(mine) - 1) + ["length"]
        assert len(mine) > 2
    stream = llm.stream("def f(", SamplingParams(max_tokens=400, ignore_eos=True))
    next(stream)
    stream.close()
    check_at_rest(llm)


def test_chats_constraints_and_stops(llm):
    messages = [{"role": "user", "content": "Who is it?"}]
    [by_chat] = llm.chat(messages, GREEDY)
    [by_prompt] = llm.generate([messages], GREEDY)
    assert by_chat.prompt == by_prompt.prompt and "Who is it?" in by_chat.prompt
    assert by_chat.text == by_prompt.text
    assert len(llm.chat([messages, messages], GREEDY)) == 2
    [choice] = llm.generate("x", SamplingParams(max_tokens=20, choice=["yes", "no"]))
    assert choice.text in ("yes", "no") and choice.completions[0].finish_reason == "stop"
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    params = SamplingParams(max_tokens=40, json_schema=schema | {"additionalProperties": False})
    assert llm.generate("x", params)[0].text == '{"a":1}'
    assert "".join(chunk.text for chunk in llm.stream("x", params)) == '{"a":1}'
    [whole] = llm.generate("def add(", SamplingParams(max_tokens=12, temperature=0))
    stop = whole.text[3:5]
    [cut] = llm.generate("def add(", SamplingParams(max_tokens=12, temperature=0, stop=stop))
    assert cut.text == whole.text.partition(stop)[0]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda llm: llm.generate(["x", []]), "generate: prompts[1]: expected tokens, got none"),
        (lambda llm: llm.generate(["x", 5.5]), "prompts[1]: expected a text, a list of token ids"),
        (lambda llm: llm.generate([[1, 99999]]), "prompts[0]: expected tokens in [0, 4096), got"),
        (lambda llm: llm.generate("x", [GREEDY] * 2), "params: expected one or 1"),
        (lambda llm: llm.generate("x" * 9999, GREEDY), "maximum context length is 512 tokens"),
        (lambda llm: llm.generate("x", SamplingParams(max_tokens=512)), "context length is 512"),
        (lambda llm: llm.generate("x", SamplingParams(logprobs=21)), "logprobs: expected at most"),
        (lambda llm: SamplingParams(top_p=0), "top_p: expected a number in (0, 1], got 0"),
        (lambda llm: SamplingParams(n=0), "n: expected at least 1, got 0"),
        (lambda llm: SamplingParams(regex="a", choice=["b"]), "regex: expected one constraint"),
        (lambda llm: llm.generate("x", SamplingParams(regex="(")), "regex parse error"),
        (lambda llm: llm.chat([{"role": "user"}]), "chat: prompts[0]: messages[0]"),
        (lambda llm: llm.embed("x"), "expected LLM(embedding_model=...) for vectors, got none"),
        (lambda llm: llm.score([[]]), "score: prompts[0]: expected tokens, got none"),
        (lambda llm: llm.generate("x", {"n": 2}), "generate: params: expected SamplingParams, got"),
        (
            lambda llm: llm.generate(["x"], [{}]),
            "params: expected SamplingParams, got {}",
        ),
        (lambda llm: llm.score("x", {"top_k": 2}), "score: params: expected SamplingParams, got"),
        (lambda llm: llm.chat("x"), "chat: prompts[0]: expected the messages of a chat, got 'x'"),
        (
            lambda llm: llm.generate("x", SamplingParams(adapter="a")),
            "adapter: expected none, as no adapter is loaded, got 'a'",
        ),
        (lambda llm: LLM(5), "LLM: model: expected ORG/NAME, a directory or a loaded Model, got 5"),
    ],
)
def test_what_does_not_fit_is_a_sentence_before_anything_runs(llm, call, sentence):
    steps = llm.stats()["steps"]
    with pytest.raises(ValueError) as raised:
        call(llm)
    assert sentence in str(raised.value) and "\n" not in str(raised.value)
    assert llm.stats()["steps"] == steps


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("n", True, "an integer"),
        ("max_tokens", 2.5, "an integer or None"),
        ("top_k", 2.5, "an integer or None"),
        ("seed", "3", "an integer or None"),
        ("temperature", "hot", "a number or None"),
        ("presence_penalty", None, "a number"),
        ("deadline", "soon", "a number or None"),
        ("logprobs", 1.5, "True, False, an integer or None"),
        ("stop", 5, "a text or texts"),
        ("stop_token_ids", 5, "a list of integers"),
        ("logit_bias", {"5": 1.0}, "a map from integers to numbers or None"),
        ("choice", "yes", "a list of texts or None"),
        ("choice", [], "a list of texts or None"),
        ("regex", 5, "a text or None"),
        ("adapter", None, "a text"),
    ],
)
def test_a_field_of_another_type_never_reaches_a_step(field, value, expected):
    with pytest.raises(ValueError) as raised:
        SamplingParams(**{field: value})
    assert str(raised.value) == f"{field}: expected {expected}, got {value!r}"


def test_numbers_of_numpy_are_numbers(llm):
    fields = {"max_tokens": 3, "top_k": 9, "seed": 2**62, "temperature": 0.5, "priority": 1}
    of_numpy = {name: np.array(value)[()] for name, value in fields.items()}
    ids = np.array(7)[()]
    params = SamplingParams(**of_numpy, stop_token_ids=[ids], logit_bias={ids: np.float32(1)})
    plain = SamplingParams(**fields, stop_token_ids=[7], logit_bias={7: 1.0})
    assert texts(llm.generate("x", params)) == texts(llm.generate("x", plain))


@pytest.mark.parametrize(
    "argv",
    [
        ["--max-running=0"],
        ["--num-pages=abc"],
        ["--memory-share=half"],
        ["--memory-share=1.5"],
        ["--dtype=int7"],
        ["--max-runing=3"],
        ["--draft-model=x", "--max-drafts=0"],
    ],
)
def test_options_are_the_servers(argv, capsys):
    with pytest.raises(SystemExit):
        _options.parse(argv)
    sentence = capsys.readouterr().err.splitlines()[-1].partition("error: ")[2]
    names = [option[2:].replace("-", "_").partition("=")[::2] for option in argv]
    with pytest.raises(ValueError) as raised:
        LLM(models.BUNDLED, **dict(names))
    assert str(raised.value) == f"LLM: {sentence}"
    assert "expected" in sentence or sentence.startswith(("unrecognized", "argument --dtype"))


def test_options_of_the_server_alone_are_refused(model):
    with pytest.raises(ValueError, match="^LLM: --port: expected an option of the engine"):
        LLM(model, port=80)
    with pytest.raises(ValueError, match="^LLM: --max-model-len: expected at most the model's"):
        LLM(model, max_model_len=1 << 20)
    with pytest.raises(ValueError, match="^LLM: --devices: expected 2"):
        LLM(model, tensor_parallel=2, devices=jax.devices())
    parsed = _options.from_keywords({"max_running": 3, "prefix_cache": False, "num_pages": None})
    assert (parsed.max_running, parsed.prefix_cache) == (3, False)


def test_memory_share_is_of_the_free_memory(model, monkeypatch):
    from jax_attn.serve import _sizing

    class Gpu:
        def memory_stats(self):
            return {"bytes_limit": 1 << 32, "bytes_in_use": 1 << 31}

    monkeypatch.setattr(_sizing.jax, "local_devices", lambda: [Gpu()])
    numbers = [
        _sizing._default_num_pages(
            model.config, _options.from_keywords({"memory_share": share}), page_bytes=1 << 20
        )
        for share in (0.2, 0.4)
    ]
    assert numbers[1] == pytest.approx(2 * numbers[0], abs=1)


# ---- what ends it --------------------------------------------------------------------------------


@pytest.fixture
def interruptible():
    """SIGINT raises, as in a terminal; a shell's background job ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_leaves_a_usable_engine(llm, monkeypatch, interruptible):
    before = llm.generate(PROMPTS, GREEDY)
    device = llm._runtime.engine("")._engine.device
    forward, calls = device.forward, []

    def interrupting(batch):
        calls.append(batch)
        if len(calls) == 4:
            _thread.interrupt_main()
        return forward(batch)

    monkeypatch.setattr(device, "forward", interrupting)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, SamplingParams(max_tokens=400, ignore_eos=True))
    monkeypatch.undo()
    check_at_rest(llm)
    assert texts(llm.generate(PROMPTS, GREEDY)) == texts(before)


def test_an_answer_is_a_text_of_its_own(llm):
    """Unless something else says how it begins; a completion goes on from its prompt."""
    chat = [{"role": "user", "content": "a"}]
    regex = SamplingParams(max_tokens=2, regex="a+")
    plain = SamplingParams(max_tokens=2)
    found = llm._runtime.requests("generate", ["a", chat, chat], [plain, plain, regex])
    assert [each.goes_on for each in found] == [True, False, True]
    runs = dict(llm._runtime.runs(found, range(3)))
    assert [runs[i].seq.params.goes_on for i in range(3)] == [True, False, True]


def test_a_failed_step_is_an_error_of_its_texts(llm, monkeypatch):
    device = llm._runtime.engine("")._engine.device
    forward = device.forward

    def failing(batch):
        monkeypatch.setattr(device, "forward", forward)
        raise RuntimeError("of a test")

    monkeypatch.setattr(device, "forward", failing)
    [output] = llm.generate("x", GREEDY)
    assert output.completions[0].finish_reason == "error"
    assert "The engine failed" in output.completions[0].error
    assert llm.generate("x", GREEDY)[0].completions[0].finish_reason == "length"


def test_two_engines_in_one_process_and_many_threads(llm, model):
    expected = texts(llm.generate(PROMPTS, GREEDY))
    with LLM(model, directory=models.BUNDLED, **SMALL) as other:
        found, threads = {}, []
        for i in range(6):
            of = (llm, other)[i % 2]
            work = lambda i=i, of=of: found.update({i: texts(of.generate(PROMPTS, GREEDY))})  # noqa: E731
            threads.append(threading.Thread(target=work))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == dict.fromkeys(range(6), expected)
    with pytest.raises(EngineStopped, match="generate: the LLM is closed"):
        other.generate("x")
    other.close()
    assert texts(llm.generate(PROMPTS, GREEDY)) == expected


def test_more_prompts_than_the_queue_holds(model):
    with LLM(model, **SMALL, max_waiting=8) as llm:
        prompts = [[1 + i] for i in range(60)]
        outputs = [None, None]

        def run(i):
            outputs[i] = llm.generate(prompts, SamplingParams(max_tokens=2, temperature=0))

        threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [o.prompt_tokens for o in outputs[0]] == prompts
        assert texts(outputs[0]) == texts(outputs[1])


def test_a_collected_llm_frees_its_thread_and_its_memory(model):
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays())
    llm = LLM(model, **SMALL)
    llm.generate("x", GREEDY)
    engine = weakref.ref(llm._runtime.engine(""))
    thread = engine()._thread
    assert sum(array.nbytes for array in jax.live_arrays()) > before
    del llm
    gc.collect()
    assert not thread.is_alive() and engine() is None
    assert sum(array.nbytes for array in jax.live_arrays()) <= before


def test_a_close_ends_what_runs(model):
    llm = LLM(model, **SMALL)
    stream = llm.stream("x", SamplingParams(max_tokens=400, ignore_eos=True))
    next(stream)
    threading.Thread(target=llm.close).start()
    with pytest.raises(EngineStopped):
        for _ in stream:
            pass


def test_a_fork_and_a_pickle_are_refused(llm):
    ours, theirs = os.pipe()
    with warnings.catch_warnings(action="ignore"):  # JAX warns of forks, too
        child = os.fork()
    if not child:
        sentences = []
        for call in (lambda: llm.generate("x"), LLM):
            try:
                call()
            except RuntimeError as error:
                sentences.append(str(error))
        os.write(theirs, "\n".join(sentences).encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        sentences = pipe.read().splitlines()
    os.waitpid(child, 0)
    assert len(sentences) == 2 and all("'spawn'" in sentence for sentence in sentences)
    with pytest.raises(TypeError, match="LLM: expected to stay in its process"):
        pickle.dumps(llm)


def _in_a_child(queue):
    with LLM(models.BUNDLED, dtype="float32", **SMALL) as llm:
        queue.put(texts(llm.generate(PROMPTS, GREEDY)))


def test_a_spawned_process_has_its_own(llm):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_in_a_child, args=(queue,))
    process.start()
    assert queue.get(timeout=600) == texts(llm.generate(PROMPTS, GREEDY))
    process.join()
    assert process.exitcode == 0


def test_importing_the_package_imports_no_server():
    program = (
        "import sys, jax_attn; assert 'LLM' in dir(jax_attn);"
        "assert not [n for n in sys.modules if n.startswith(('jax_attn.serve', 'jax_attn.llm'))]"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    with pytest.raises(AttributeError, match="no attribute 'LML'"):
        import jax_attn

        jax_attn.LML  # noqa: B018


# ---- scores --------------------------------------------------------------------------------------


def test_scores_are_the_logprobs_of_the_model(llm, model):
    tokens = llm.tokenizer.encode("def add(a, b):\n    return a + b\n").ids
    [score] = llm.score([tokens])
    logits = models.reference_forward(model.params, model.config, np.array(tokens))
    expected = jax.nn.log_softmax(logits)[np.arange(len(tokens) - 1), tokens[1:]]
    np.testing.assert_allclose(score.logprobs, expected, atol=2e-5)
    assert score.tokens == tokens and score.version == "0"
    assert llm.score([[5]])[0].logprobs.shape == (0,)


FILTERS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 5},
    {"top_p": 0.8, "min_p": 0.02},
]


@pytest.mark.parametrize("fields", FILTERS)
def test_sampler_scorer_and_trainer_have_one_distribution(llm, model, fields):
    """Logprobs of the distribution sampled from, as sampled, as scored, from logits."""
    params = SamplingParams(max_tokens=12, seed=5, logprobs=True, **fields)
    [output] = llm.generate("def add(a", params)
    tokens = output.prompt_tokens + output.tokens
    sampled = output.completions[0].token_logprobs()
    [score] = llm.score([tokens], params)
    np.testing.assert_allclose(score.logprobs[-len(sampled) :], sampled, atol=2e-5)
    logits = models.reference_forward(model.params, model.config, np.array(tokens))[:-1]
    trained = token_logprobs(logits, np.array(tokens[1:]), **fields)
    np.testing.assert_allclose(trained, score.logprobs, atol=5e-5)
    assert np.isfinite(sampled).all() and (sampled <= 0).all()
    of_model = SamplingParams(max_tokens=12, seed=5, logprobs=True, logprobs_of="model", **fields)
    [raw] = llm.generate("def add(a", of_model)
    assert raw.tokens == output.tokens
    assert (raw.completions[0].token_logprobs() != sampled).any() == bool(fields)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_forward_passes_of_ones_own_have_the_samplers_bits(dtype):
    """With batch_invariant: over packed weights, with the engine's kv_split."""
    model = shallow(models.load(models.BUNDLED, dtype=dtype))
    config, fields = model.config, {"temperature": 0.7}
    params = SamplingParams(n=2, max_tokens=20, seed=5, logprobs=True, ignore_eos=True, **fields)
    with LLM(model, directory=models.BUNDLED, **SMALL, batch_invariant=True) as llm:
        [output] = llm.generate("def add(a, b):\n    return", params)
        kv_split = llm.kv_split
    sampled = np.concatenate([each.token_logprobs() for each in output.completions])
    batch = trainers.group(config, output, kv_split, dtype)

    @functools.partial(jax.jit, compiler_options=BATCH_INVARIANT)
    def of_forward(weights, batch):
        tokens, positions, plans, rows, answers = batch
        pages = models.init_pages(
            config, [plan.spec for plan in plans], len(tokens) // trainers.PAGE
        )
        logits, *_ = models.forward(weights, config, tokens, positions, *pages, plans, rows)
        return token_logprobs(logits, answers, **fields)

    packed = models.pack_params(model.params, config)
    np.testing.assert_array_equal(of_forward(packed, batch), sampled)

    def plain(params, *rest):
        return models.train_forward(params, config, *rest)

    def packing(params, *rest):
        return plain(models.pack_params(params, config), *rest)

    (_, expected), (found, gradients) = (
        trainers.logprobs_and_gradients(forward, model.params, batch, **fields)
        for forward in (plain, packing)
    )
    np.testing.assert_array_equal(found, sampled)
    largest = 1e-5 if dtype == "float32" else 0.03
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=largest * abs(b).max())


def test_at_temperature_0_one_token_has_all_probability(llm):
    [output] = llm.generate("x", SamplingParams(max_tokens=3, temperature=0, logprobs=2))
    for each in output.completions[0].logprobs:
        assert each.logprob == 0 and each.top[0] == (each.token, 0) and each.top[1][1] == -np.inf


def test_logprobs_of_a_trainer_have_gradients_and_no_filtered_token():
    logits = jax.random.normal(jax.random.key(0), (4, 50))
    tokens = jax.numpy.argmax(logits, axis=1)
    fields = {"temperature": 0.7, "top_k": 5}
    gradient = jax.grad(lambda x: token_logprobs(x, tokens, **fields).sum())(logits)
    assert np.isfinite(gradient).all() and ((gradient != 0).sum(axis=1) == 5).all()
    kept = jax.nn.softmax(jax.lax.top_k(logits, 5)[0] / 0.7)
    found = token_logprobs(logits, tokens, **fields)
    np.testing.assert_allclose(np.exp(found), kept[:, 0], rtol=1e-5)


# ---- asyncio -------------------------------------------------------------------------------------


def test_async(model, llm):
    expected = texts(llm.generate(PROMPTS, GREEDY))

    async def main():
        async with AsyncLLM(model, directory=models.BUNDLED, **SMALL) as made:
            found = await asyncio.gather(*(made.generate(prompt, GREEDY) for prompt in PROMPTS))
            assert [output.text for [output] in found] == expected
            chunks = [chunk async for chunk in made.stream(PROMPTS[0], GREEDY)]
            assert "".join(chunk.text for chunk in chunks) == expected[0]
            forever = SamplingParams(max_tokens=400, ignore_eos=True)
            task = asyncio.create_task(made.generate(PROMPTS, forever))
            async with contextlib.aclosing(made.stream("x", forever)) as stream:
                await anext(stream)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(check_at_rest, made.llm)
            [score] = await made.score(PROMPTS[0])
            assert score.logprobs.tolist() == llm.score(PROMPTS[0])[0].logprobs.tolist()
            messages = [{"role": "user", "content": "x"}]
            assert texts(await made.chat(messages, GREEDY)) == texts(llm.chat(messages, GREEDY))
            [beams] = await made.beam_search(BEAMS[0]["prompt"], beam_params(BEAMS[0]))
            assert [each.tokens for each in beams.completions] == BEAMS[0]["tokens"]
            await made.sleep()
            with pytest.raises(RuntimeError, match="generate: the engine lacks pages: wake"):
                await made.generate("x")
            await made.wake()
            assert await made.update_params(model.params) == made.version == "1"
            await made.pause()
            await made.resume()
            with pytest.raises(ValueError, match="n: expected"):
                await made.generate("x", SamplingParams(n=0))
        with pytest.raises(EngineStopped):
            await made.generate("x")

    asyncio.run(main())
