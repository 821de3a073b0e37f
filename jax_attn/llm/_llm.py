"""The engine for threads: calls that return when their texts are there."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

import numpy as np
from tqdm import tqdm

from jax_attn import models
from jax_attn.llm._batch import RETRY_SECONDS, Batch, Run
from jax_attn.llm._beams import Beams, check_beams
from jax_attn.llm._hand_over import Started, start_export, start_import
from jax_attn.llm._outputs import Chunk, Output, Scores
from jax_attn.llm._params import SamplingParams
from jax_attn.llm._runtime import Prompt, Request, Runtime, collect, score_of
from jax_attn.llm._streams import ChunkQueue
from jax_attn.llm._weights import filtered, read_lora
from jax_attn.serve._engine.hand_over import HandedOver
from jax_attn.serve._scheduling.protocols import EngineStopped

Result = TypeVar("Result")


class LLM:
    """A model, and the engine that runs it in a thread of this process.

        llm = jax_attn.LLM("ORG/NAME", max_running=64)
        [output] = llm.generate("def main(")
        print(output.text)

    Every method may be called from any thread, and several at once: their sequences share steps. A
    context manager; `close` also runs when the object is collected and when Python exits.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | models.Model | None = None,
        *,
        directory: str | os.PathLike[str] | None = None,
        **options: Any,
    ):
        """Loads the model and compiles every step.

        model: ORG/NAME of the Hugging Face Hub, a directory, or a loaded Model; None: the model in
          the package.
        directory: with a loaded Model, where its tokenizer_config.json, chat template and
          generation_config.json are.
        options: those of the server (docs/server.md), with underscores: num_pages, max_running,
          kv_cache_dtype, tensor_parallel, memory_share and so on, but not those of HTTP and of
          several processes. Besides, devices: of JAX, one for each part of the model.

        Raises:
          ValueError: an option, or a directory, does not fit; the server's sentence says which.
          RuntimeError: this process is a fork of one that has made an LLM.
        """
        self._runtime = Runtime(model, directory, options)

    # ---- texts ---------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Output]:
        """Completes prompts. Returns an Output for each, in order.

        Prompts with equal beginnings are run one after the other, so that they share pages.

        prompts: one or several; each a text, a list of token ids, or the messages of a chat.
        params: for all, or one for each.
        progress: show a bar; None: on a terminal.

        Raises:
          ValueError: a prompt or a parameter does not fit; nothing has run.
          RuntimeError: the engine has failed, is closed (EngineStopped) or sleeps.
        An exception, as Ctrl-C raises, ends the call's sequences; the LLM can be used again.
        """
        found = self._runtime.requests("generate", prompts, params)
        return self._outputs(found, progress)

    def chat(
        self,
        messages: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        progress: bool | None = None,
        **variables: Any,
    ) -> list[Output]:
        """Completes chats, by the model's chat template. Otherwise as `generate`.

        messages: of a chat, as OpenAI has them; or a list of chats. A picture is a part of the
          content, {"type": "image", "image": ...}: a path, the bytes of a file, an array [height,
          width, 3] of u8, or an image of Pillow; or image_url with a data: URL.
        tools: descriptions of functions, as OpenAI has them, for the template.
        variables: fields of the server's chat requests that change the prompt: chat_template,
          chat_template_kwargs, add_generation_prompt, continue_final_message, reasoning_effort,
          mm_processor_kwargs.
        """
        found = self._runtime.requests("chat", messages, params, tools, variables)
        return self._outputs(found, progress)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Completes one prompt, and yields its text as it is made.

        Chunks of n completions are interleaved. Closing the iterator ends what is left.

        Raises as `generate`, at the first chunk or here.
        """
        found = self._runtime.requests("stream", [prompt], params)
        return self._chunks(found)

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Scores]:
        """The log-probabilities of the tokens of prompts, each after those before it.

        They are computed by the steps that also sample. With batch_invariant=True they have the
        bits that the sampler's have for the same tokens.

        params: temperature, top_k, top_p, min_p and logprobs_of say of which distribution, adapter
          of which model. The default is that of the model's own logits.

        Raises as `generate`.
        """
        scored = scoring_params(params)
        tokens = self._runtime.token_lists("score", prompts, scored.adapter)
        runs: list[Run] = [run for _, run in self._runtime.scoring_runs(tokens, scored)]
        self._run("score", runs, len(runs), progress)
        version = self._runtime.engine("score", runs=False).version
        return [score_of("score", run, version) for run in runs]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        length_penalty: float = 1.0,
    ) -> list[Output]:
        """The likeliest completions of each prompt, the best first, by beam search.

        The rules are those of transformers' generate(num_beams=n, early_stopping="never"). Each
        token is a step of its own for every beam, so texts take longer than sampled ones.

        params: n is the number of beams and of texts, at most 10. max_tokens, logprobs (of the
          model's own logits), ignore_eos, stop_token_ids, include_stop, skip_special_tokens,
          priority, deadline, cache_salt and adapter are as in `generate`; other fields are refused.
        length_penalty: completions are compared by the sum of their logprobs over
          length ** length_penalty.

        Raises as `generate`.
        """
        check_beams(params, length_penalty)
        beams = Beams(
            self._runtime, self._runtime.requests("beam_search", prompts, params), length_penalty
        )
        while runs := beams.runs():
            self._run("beam_search", runs, len(runs), progress=False)
            beams.take()
        return collect(beams.found, beams.by_request)

    def export_request(
        self, prompt: Prompt, params: SamplingParams | None = None, *, num_tokens: int = 1
    ) -> HandedOver:
        """Reads a prompt, and gives the request away once it has num_tokens tokens or a few more.

        `import_request` of another LLM goes on with it. Full pages of the kv cache and recurrent
        states go along. `to_bytes` carries it to another process. The first call of an LLM compiles
        two copies.

        params: with n = 1.

        Raises as `generate`. Not for models over several processes.
        """
        return _finish(start_export(self._runtime, prompt, params, num_tokens))

    def import_request(self, handed: HandedOver | bytes) -> Output:
        """Goes on with a request of another LLM of the same model, page_size and kv cache.

        With batch_invariant=True in both, the output has the bits that one LLM would have made.

        handed: from `export_request`, or its `to_bytes`.

        Returns the whole output, with the tokens made before. Raises ValueError if it does not fit;
        otherwise as `generate`.
        """
        return _finish(start_import(self._runtime, handed))

    def embed(self, inputs: Any, *, dimensions: int | None = None) -> np.ndarray:
        """Vectors of texts or lists of token ids, by the model of `embedding_model`.

        dimensions: the first numbers only, for models trained for that.

        Returns [number of inputs, size] f32. Raises as `generate`.
        """
        return _finish(self._runtime.embed("embed", inputs, dimensions))

    def rerank(self, query: str, documents: Sequence[str]) -> np.ndarray:
        """Scores of documents for a query, by the cross-encoder of `embedding_model`.

        Returns [number of documents] f32, in their order; more is better. They are what
        sentence-transformers' CrossEncoder.predict gives: between 0 and 1 unless config.json names
        no activation. Raises as `embed`.
        """
        return _finish(self._runtime.rerank("rerank", query, documents))

    def classify(self, texts: Sequence[str]) -> np.ndarray:
        """Probabilities of `labels`, by the model for sequence classification of
        `embedding_model`.

        Returns [number of texts, number of labels] f32. Raises as `embed`.
        """
        return _finish(self._runtime.classify("classify", texts))

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes of `classify`."""
        return self._runtime.labels("labels")

    # ---- weights and memory --------------------------------------------------------------------

    @property
    def version(self) -> str:
        """The name of the weights' version; "0": those that it was made with."""
        return self._runtime.engine("version", runs=False).version

    def update_params(
        self,
        params: Any,
        *,
        version: str | None = None,
        filter: Callable[[str, Any], bool] | None = None,
        names: Callable[[str], str | None] | Mapping[str, str] | None = None,
        partial: bool = False,
        donate: bool = False,
        keep_prefixes: bool = False,
    ) -> str:
        """Replaces weights between two steps. Nothing of a step is compiled again.

        Running sequences go on: they read their tokens again with the new weights, and
        `Completion.versions` says which made each token. The prefix cache is emptied.

        params: a pytree of arrays, sharded in any way, on any devices. Names are the keys of its
          paths, joined by dots: those of models.Params (layers.0.qkv), or of the model's files
          (model.layers.0.self_attn.q_proj.weight, with torch's shapes). flax's nnx states work.
        version: a name; None: the number of updates so far.
        filter: (name, array) -> whether to use it.
        names: from names in `params` to the model's; None: leave it out. A map or a function.
        partial: weights that are not in `params` stay as they are.
        donate: the engine takes the arrays' memory where layouts agree; the caller's are deleted.
          Otherwise it copies.
        keep_prefixes: keep what the old weights have cached, for when an update names their version
          again. The caller answers for a version being the same weights.

        Returns the version.

        Raises:
          ValueError: names, shapes or dtypes do not fit; the old weights go on.
          RuntimeError: the engine has failed, or is closed (EngineStopped).
        """
        given = filtered(params, filter, names)
        engine = self._runtime.engine("update_params", runs=False)
        options = {"partial": partial, "donate": donate, "keep_prefixes": keep_prefixes}
        return _result(engine.update_params(given, version, **options))

    def load_lora(
        self,
        name: str,
        adapter: str | os.PathLike[str] | Mapping[str, Any],
        *,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Loads a LoRA adapter between two steps, for requests with SamplingParams(adapter=name).

        Nothing of a step is compiled again. An adapter of the same name is replaced; requests that
        run with it end with it. It needs a free place of --max-loras (LLM(max_loras=...)).

        adapter: a directory that PEFT has written, or its tensors by name, as arrays; then
          config: what adapter_config.json has.

        Raises:
          ValueError: it does not fit, in one sentence, or there is no place.
          RuntimeError: the engine has failed, or is closed (EngineStopped).
        """
        engine = self._runtime.engine("load_lora", runs=False)
        weights = read_lora(adapter, config, self._runtime.config)
        _result(engine.load_lora(name, weights))

    def unload_lora(self, name: str) -> None:
        """Takes an adapter away from new requests. Those that run with it go on.

        Raises ValueError for an unknown name.
        """
        _result(self._runtime.engine("unload_lora", runs=False).unload_lora(name))

    @property
    def loras(self) -> list[str]:
        """The names of the adapters."""
        return self._runtime.engine("loras", runs=False).lora_names

    def pause(self, *, end: bool = False) -> None:
        """Returns when no step runs. None begins until `resume`; requests wait meanwhile.

        end: end the requests there are, with finish_reason "abort", instead of having them go on.
        """
        _result(self._runtime.engine("pause", runs=False).pause(end=end))

    def resume(self) -> None:
        """Undoes `pause`."""
        _result(self._runtime.engine("resume", runs=False).resume())

    def sleep(self, *, weights: bool = False) -> None:
        """Frees the KV cache's memory, and the weights' too if `weights`, until `wake`.

        Requests of other threads go on after `wake`; new ones are refused until then.
        """
        _result(self._runtime.engine("sleep", runs=False).sleep(weights=weights))

    def wake(self) -> None:
        """Takes the memory again that `sleep` has freed. Freed weights need update_params first.

        Raises ValueError without weights, or if the memory is not there.
        """
        _result(self._runtime.engine("wake", runs=False).wake())

    def stats(self) -> dict[str, Any]:
        """Numbers of the engine after its last step, as /metrics has them."""
        return dict(self._runtime.engine("stats", runs=False).stats())

    # ---- the model -----------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The model's, of the package `tokenizers`."""
        self._runtime.engine("tokenizer", runs=False)
        return self._runtime.tokenizer

    @property
    def config(self) -> models.ModelConfig:
        """The model's. max_positions is the limit of prompt and output together."""
        self._runtime.engine("config", runs=False)
        return self._runtime.config

    @property
    def kv_split(self) -> int | None:
        """Tokens of a chunk of keys with batch_invariant, as AttentionSpec.kv_split; None: without.

        A forward pass of one's own with this kv_split has the engine's bits (docs/rl.md).
        """
        return self._runtime.engine("kv_split", runs=False).kv_split

    # ---- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends running requests with EngineStopped, then the thread, and frees the memory."""
        self._runtime.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("LLM: expected to stay in its process; make one in each process instead.")

    # ---- runs ----------------------------------------------------------------------------------

    def _outputs(self, found: list[Request], progress: bool | None) -> list[Output]:
        by_request, runs = self._runtime.grouped_runs(found)
        self._run("generate", runs, sum(each.params.n for each in found), progress)
        return collect(found, by_request)

    def _run(self, call: str, runs: Iterable[Run], number: int, progress: bool | None) -> None:
        """Runs all. Raises RuntimeError if the engine fails or is closed."""
        if not number:
            return
        engine = self._runtime.engine(call)
        news = threading.Event()
        num_done = 0

        def count(_: Run) -> None:
            nonlocal num_done
            num_done += 1

        batch = Batch(engine, runs, news.set, count)
        disable = None if progress is None else not progress
        try:
            with tqdm(total=number, desc=call, unit="text", disable=disable) as bar:
                while True:
                    news.clear()
                    batch.refill()
                    bar.update(num_done - bar.n)
                    if batch.is_done:
                        break
                    news.wait(RETRY_SECONDS if batch.must_retry else None)
        except BaseException:
            batch.abort()
            raise
        self.check_alive(call, engine)

    def _chunks(self, found: list[Request]) -> Iterator[Chunk]:
        engine = self._runtime.engine("stream")
        arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        runs = [run for _, run in self._runtime.runs(found, range(len(found)))]
        chunks = ChunkQueue(engine, runs, arrived.put)
        try:
            chunks.start()
            while not chunks.is_done:
                yield from chunks.take(arrived.get())
        finally:
            chunks.abort()
        self.check_alive("stream", engine)

    def check_alive(self, call: str, engine: Any) -> None:
        """Raises EngineStopped if the engine ended during a call."""
        if engine.failure is not None:
            raise EngineStopped(f"{call}: the engine has failed: {engine.failure}.")
        if self._runtime.is_closed:
            raise EngineStopped(f"{call}: the LLM was closed.")


def scoring_params(params: SamplingParams | None) -> SamplingParams:
    """The parameters of `score` for those that its caller gives. Raises ValueError."""
    if params is not None and not isinstance(params, SamplingParams):
        raise ValueError(f"score: params: expected SamplingParams, got {params!r:.100}.")
    if params is None:
        return SamplingParams(
            max_tokens=0, temperature=1.0, logprobs=True, prompt_logprobs=True, logprobs_of="model"
        )
    return SamplingParams(
        max_tokens=0,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        logprobs=True,
        prompt_logprobs=True,
        logprobs_of=params.logprobs_of,
        priority=params.priority,
        adapter=params.adapter,
    )


def _result(future: Future[Result]) -> Result:
    return future.result()


def _finish(started: Started[Result]) -> Result:
    """Waits for what `_runtime.embed` and its kin have started."""
    done, result, cancel = started
    try:
        done.result()
    finally:
        cancel()
    return result()
