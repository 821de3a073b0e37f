"""The parts that `LLM` and `AsyncLLM` share: models, threads, and checked requests."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np
from pydantic import ValidationError

from jax_attn import models
from jax_attn.llm._batch import Run
from jax_attn.llm._outputs import Completion, Output, Scores
from jax_attn.llm._params import SamplingParams
from jax_attn.llm._pictures import as_urls
from jax_attn.serve import _loading, _options, _sizing
from jax_attn.serve._engine import sampling
from jax_attn.serve._engine.async_engine import AsyncEngine
from jax_attn.serve._engine.embedder import Embedder
from jax_attn.serve._openai import schemas
from jax_attn.serve._openai.bounds import KeyLimits
from jax_attn.serve._openai.embeddings import EmbeddingReader
from jax_attn.serve._openai.errors import ApiError, from_validation, overflow
from jax_attn.serve._openai.prepare import Preparer, answer_goes_on, sampling_defaults
from jax_attn.serve._openai.scores import ScoreReader
from jax_attn.serve._scheduling import request
from jax_attn.serve._scheduling.pictures import Picture
from jax_attn.serve._scheduling.protocols import EngineStopped

Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]] | np.ndarray
"""A text, token ids, or the messages of a chat."""

_NO_LIMIT = 1 << 62
_NO_LIMITS = KeyLimits(requests=_NO_LIMIT, choices=_NO_LIMIT, tokens=_NO_LIMIT)
_ids = itertools.count()


@dataclass(frozen=True)
class Request:
    """A checked prompt, with what it is to be run with."""

    text: str | None
    tokens: list[int]
    params: SamplingParams
    max_tokens: int
    goes_on: bool  # the text goes on from the prompt's: see the engine's SamplingParams
    pictures: tuple[Picture, ...] = ()


class Runtime:
    """A model, its engine's thread, and an embedding model's, from the start to `close`.

    Its methods may be called by any thread of the process that made it.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | models.Model | None,
        directory: str | os.PathLike[str] | None,
        options: Mapping[str, Any],
    ):
        """See LLM."""
        self.is_closed = False
        self._pid = os.getpid()
        if _is_fork_of_user:
            _refuse_fork()
        options = dict(options)
        if not isinstance(model, (models.Model, str, os.PathLike, type(None))):
            raise ValueError(
                f"LLM: model: expected ORG/NAME, a directory or a loaded Model, got {model!r:.100}."
            )
        if not isinstance(model, (models.Model, type(None))):
            options["model"] = os.fspath(model)
        try:
            args = _options.from_keywords(options)
            self._load(model if isinstance(model, models.Model) else None, directory, args)
        except (ValueError, NotImplementedError) as error:
            raise type(error)(f"LLM: {error}") from None
        self._finalizer = weakref.finalize(self, _stop, self._engine, self._embedder)
        _mark_use()
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _load(
        self,
        model: models.Model | None,
        directory: str | os.PathLike[str] | None,
        args: argparse.Namespace,
    ) -> None:
        self._engine: AsyncEngine | None = None
        self._embedder: Embedder | None = None
        self._reader: EmbeddingReader | None = None
        self._scores: ScoreReader | None = None
        if args.model is not None:
            if model is None:
                found = models.fetch(args.model, args.revision)
                model = _loading.load(found, args)
                directory = found if directory is None else directory
                vision = _loading.load_vision(found, args)
            else:
                args.dtype = str(model.params["embed"].dtype)
                model = _loading.with_limit(model, args)
                vision = None
                if directory is not None and (Path(directory) / "config.json").is_file():
                    vision = _loading.load_vision(Path(directory), args)
            draft_model = _loading.load_draft_model(model, directory, args)
            loras = _loading.load_loras(model, args)
        if args.embedding_model is not None:
            fetched = models.fetch(args.embedding_model)
            name = _loading.name_of(args.embedding_model)
            embedding, self._embedder = _loading.load_embedding(fetched, name, args)
            if embedding.scoring is None:
                self._reader = EmbeddingReader(embedding, self._embedder)
            else:
                self._scores = ScoreReader(embedding, self._embedder)
        if model is None:
            return
        self._engine = _sizing.make_engine(model, args, draft_model, vision)
        for name, weights in loras:
            self._engine.preload_lora(name, weights)
        self._model = model._replace(params={})
        # A place without files: no chat template and no defaults of sampling.
        where = Path(os.devnull if directory is None else directory)
        self._defaults = sampling_defaults(where) if args.generation_config == "auto" else {}
        self._preparer = Preparer(
            self._model,
            self._engine,
            where,
            ["model"],
            _NO_LIMITS,
            self._defaults,
            vision if vision is None else dataclasses.replace(vision, params={}),
            _NO_LIMIT,
        )

    def _start(self) -> None:
        """Starts the threads and waits until everything is compiled."""
        if self._embedder is not None:
            ready = threading.Event()
            self._embedder.on_failure = ready.set
            self._embedder.start(ready.set)
            ready.wait()
            if self._embedder.failure is not None:
                raise self._embedder.failure
        if self._engine is not None:
            ready = threading.Event()
            self._engine.on_ready = self._engine.on_failure = ready.set
            self._engine.serves_early = False
            self._engine.start()
            ready.wait()
            self._engine.on_failure = lambda: None
            if self._engine.failure is not None:
                raise self._engine.failure

    def close(self) -> None:
        """Ends the threads and frees the memory. A second call does nothing."""
        self.is_closed = True
        if os.getpid() == self._pid:
            self._finalizer()
        self._engine = self._embedder = None

    # ---- what may run --------------------------------------------------------------------------

    def engine(self, call: str, *, runs: bool = True) -> AsyncEngine:
        """The engine, for a method named `call`. runs: the call needs steps.

        Raises:
          RuntimeError: this process is a fork, or the engine sleeps. EngineStopped is one.
          ValueError: there is no model for texts.
        """
        if os.getpid() != self._pid:
            _refuse_fork()
        if self._engine is None:
            if self.is_closed:
                raise EngineStopped(f"{call}: the LLM is closed.")
            raise ValueError(f"{call}: expected a model for texts, got an embedding model only.")
        if self._engine.failure is not None:
            raise EngineStopped(f"{call}: the engine has failed: {self._engine.failure}.")
        lacks = self._engine.lacks
        if runs and lacks:
            how = "update_params, then wake" if "weights" in lacks else "wake"
            how = "update_params" if lacks == {"weights"} else how
            raise RuntimeError(f"{call}: the engine lacks {' and '.join(sorted(lacks))}: {how}.")
        return self._engine

    @property
    def tokenizer(self) -> Any:
        return self._model.tokenizer

    @property
    def config(self) -> models.ModelConfig:
        return self._model.config

    def text_of(self, seq: request.Sequence, tokens: list[int]) -> str:
        return self._preparer.text_of(seq, tokens)

    # ---- requests ------------------------------------------------------------------------------

    def requests(
        self,
        call: str,
        prompts: Any,
        params: SamplingParams | Sequence[SamplingParams] | None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[Request]:
        """Encodes and checks prompts. Raises ValueError that names the first wrong one."""
        engine = self.engine(call)
        listed = as_list(prompts)
        if call == "chat":
            for i, prompt in enumerate(listed):
                if not _are_messages(prompt):
                    raise ValueError(
                        f"chat: prompts[{i}]: expected the messages of a chat, got"
                        f" {prompt!r:.100}; generate completes texts."
                    )
        each = params_of(call, params, len(listed))
        for of in {id(one): one for one in each}.values():
            check_adapter(call, of.adapter, engine.lora_names)
            try:
                sampling.check(of.of_sequence(self._defaults, max(1, of.min_tokens), 0))
            except ValueError as error:
                raise ValueError(f"{call}: {error}") from None
        encoded = self._encode(call, listed, tools, variables)
        longest, found = engine.limits.max_model_len, []
        for i, ((text, tokens, pictures), of) in enumerate(zip(encoded, each, strict=True)):
            self._check_tokens(f"{call}: prompts[{i}]", tokens)
            room = longest - len(tokens)
            max_tokens = room if of.max_tokens is None else of.max_tokens
            if room < (1 if of.max_tokens is None else max_tokens):
                too_long = overflow(f"prompts[{i}]", longest, len(tokens), of.max_tokens)
                raise ValueError(f"{call}: {too_long}")
            if of.min_tokens > max_tokens:
                raise ValueError(
                    f"{call}: min_tokens: expected at most {max_tokens}, got {of.min_tokens}."
                )
            continued = bool((variables or {}).get("continue_final_message"))
            goes_on = not _are_messages(listed[i]) or answer_goes_on(continued, of.has_grammar)
            found.append(Request(text, tokens, of, max_tokens, goes_on, pictures))
        return found

    def _encode(
        self,
        call: str,
        prompts: list[Any],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
    ) -> list[tuple[str | None, list[int], tuple[Picture, ...]]]:
        texts = [p for p in prompts if isinstance(p, str)]
        # As a batch, which several threads of the tokenizer share.
        encodings = iter(self._preparer.encode_all(texts))
        encoded: list[tuple[str | None, list[int], tuple[Picture, ...]]] = []
        for i, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                encoded.append((prompt, next(encodings), ()))
            elif _are_messages(prompt):
                encoded.append(self._render(f"{call}: prompts[{i}]", prompt, tools, variables))
            else:
                encoded.append((None, _token_list(f"{call}: prompts[{i}]", prompt), ()))
        return encoded

    def _render(
        self,
        where: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
    ) -> tuple[str, list[int], tuple[Picture, ...]]:
        try:
            body: dict[str, Any] = {"messages": [as_urls(message) for message in messages]}
        except (ValueError, OSError) as error:
            raise ValueError(f"{where}: {error}") from None
        body |= dict(variables or {})
        if tools is not None:
            body["tools"] = [dict(tool) for tool in tools]
        try:
            try:
                parsed = schemas.ChatCompletionRequest.model_validate(body)
            except ValidationError as error:
                raise from_validation(error, body) from None
            made = self._preparer.chat_prompt(parsed)
            return made.text, made.tokens, made.pictures
        except ApiError as error:
            raise ValueError(f"{where}: {error}") from None

    def _check_tokens(self, where: str, tokens: list[int]) -> None:
        if not tokens:
            raise ValueError(f"{where}: expected tokens, got none.")
        vocab_size = self._model.config.vocab_size
        for extreme in (min(tokens), max(tokens)):
            if not 0 <= extreme < vocab_size:
                raise ValueError(f"{where}: expected tokens in [0, {vocab_size}), got {extreme}.")

    def runs(self, found: Sequence[Request], order: Sequence[int]) -> Iterator[tuple[int, Run]]:
        """(index of the request, a run) for each completion, in the order of the requests."""
        now = time.monotonic()
        shared: dict[int, dict[str, Any]] = {}  # by SamplingParams
        for index in order:
            each = found[index]
            params = each.params
            if (fields := shared.get(id(params))) is None:
                fields = shared[id(params)] = params.fields(self._defaults)
            for choice, seed in enumerate(params.seeds()):
                of_sequence = request.SamplingParams(
                    max_tokens=each.max_tokens, seed=seed, goes_on=each.goes_on, **fields
                )
                deadline = None if params.deadline is None else now + params.deadline
                yield (
                    index,
                    run_of(
                        each.tokens,
                        of_sequence,
                        choice,
                        deadline,
                        params.priority,
                        params.cache_salt,
                        params.adapter,
                        each.pictures,
                    ),
                )

    def grouped_runs(self, found: Sequence[Request]) -> tuple[list[list[Run]], Iterator[Run]]:
        """The runs of each request, filled as the iterator yields them.

        Prompts that share a beginning come one after the other, so that its pages are still there.
        """
        by_request: list[list[Run]] = [[] for _ in found]
        order = sorted(range(len(found)), key=lambda i: found[i].tokens)

        def runs() -> Iterator[Run]:
            for index, run in self.runs(found, order):
                by_request[index].append(run)
                yield run

        return by_request, runs()

    def scoring_runs(
        self, tokens: Sequence[list[int]], params: SamplingParams
    ) -> Iterator[tuple[int, Run]]:
        of_sequence = params.of_sequence(self._defaults, 0, 0)
        for index, each in enumerate(tokens):
            yield index, run_of(each, of_sequence, 0, None, params.priority, "", params.adapter)

    def token_lists(self, call: str, prompts: Any, adapter: str) -> list[list[int]]:
        """Encodes prompts to be scored. Raises ValueError."""
        engine = self.engine(call)
        check_adapter(call, adapter, engine.lora_names)
        longest = engine.limits.max_model_len
        encoded = []
        for i, (_, tokens, pictures) in enumerate(self._encode(call, as_list(prompts), None, None)):
            if pictures:
                raise ValueError(f"{call}: prompts[{i}]: expected no pictures.")
            encoded.append(tokens)
            self._check_tokens(f"{call}: prompts[{i}]", tokens)
            if len(tokens) > longest:
                raise ValueError(f"{call}: {overflow(f'prompts[{i}]', longest, len(tokens), 0)}")
        return encoded

    # ---- embeddings ----------------------------------------------------------------------------

    def embed(
        self, call: str, inputs: Any, dimensions: int | None
    ) -> tuple[Future[None], Callable[[], np.ndarray], Callable[[], None]]:
        """Starts to compute vectors. Returns when they are there, what gives them, and a cancel."""
        self._check_open(call)
        if self._embedder is None or self._reader is None:
            got = "none" if self._scores is None else "one for scores"
            raise ValueError(f"{call}: expected LLM(embedding_model=...) for vectors, got {got}.")
        listed, reader = as_list(inputs), self._reader
        try:
            size = reader.dimensions(dimensions)
            tokens = [
                reader.tokens(
                    each if isinstance(each, str) else _token_list(f"inputs[{i}]", each),
                    f"inputs[{i}]",
                )
                for i, each in enumerate(listed)
            ]
        except (ApiError, ValueError) as error:
            raise ValueError(f"{call}: {error}") from None
        job = self._embedder.submit("", tokens)
        return job.done, lambda: reader.cut(job.vectors, size), job.cancel

    def rerank(
        self, call: str, query: str, documents: Sequence[str]
    ) -> tuple[Future[None], Callable[[], np.ndarray], Callable[[], None]]:
        """Starts to score pairs; otherwise as `embed`."""
        _check_texts(f"{call}: query", [query])
        _check_texts(f"{call}: documents", documents)
        reader, embedder = self._score_reader(call)
        try:
            reader.check_pairs()
            tokens, seconds = reader.tokens([(query, text) for text in documents], "documents")
        except ApiError as error:
            raise ValueError(f"{call}: {error}") from None
        job = embedder.submit("", tokens, seconds)
        return job.done, lambda: reader.scoring.relevance(job.vectors), job.cancel

    def classify(
        self, call: str, texts: Sequence[str]
    ) -> tuple[Future[None], Callable[[], np.ndarray], Callable[[], None]]:
        """Starts to classify texts; otherwise as `embed`."""
        _check_texts(f"{call}: texts", texts)
        reader, embedder = self._score_reader(call)
        try:
            tokens, _ = reader.tokens(texts, "texts")
        except ApiError as error:
            raise ValueError(f"{call}: {error}") from None
        job = embedder.submit("", tokens)
        return job.done, lambda: reader.scoring.probabilities(job.vectors), job.cancel

    def labels(self, call: str) -> tuple[str, ...]:
        """The names of the classes."""
        return self._score_reader(call)[0].scoring.labels

    def _score_reader(self, call: str) -> tuple[ScoreReader, Embedder]:
        self._check_open(call)
        if self._embedder is None or self._scores is None:
            got = "none" if self._reader is None else "one for vectors"
            raise ValueError(
                f"{call}: expected LLM(embedding_model=...) with a head for scores, got {got}."
            )
        return self._scores, self._embedder

    def _check_open(self, call: str) -> None:
        if os.getpid() != self._pid:
            _refuse_fork()
        if self.is_closed:
            raise EngineStopped(f"{call}: the LLM is closed.")


def _check_texts(what: str, texts: Any) -> None:
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not texts:
        raise ValueError(f"{what}: expected a list of texts, got {texts!r:.100}")
    for i, text in enumerate(texts):
        if not isinstance(text, str) or not text:
            raise ValueError(f"{what}[{i}]: expected a text, got {text!r:.100}")


def collect(found: Sequence[Request], runs: Sequence[list[Run]]) -> list[Output]:
    """Puts the runs of each request together."""
    outputs = []
    for each, of_request in zip(found, runs, strict=True):
        first = of_request[0]
        for run in of_request:
            if each.params.num_top is None:  # only those of the prompt were asked for
                run.completion.logprobs = None
        outputs.append(
            Output(
                each.text,
                each.tokens,
                [run.completion for run in of_request],
                first.prompt_logprobs,
                first.num_cached,
            )
        )
    return outputs


def score_of(call: str, run: Run, version: str) -> Scores:
    """Raises RuntimeError if the run failed."""
    if run.completion.error is not None or run.completion.finish_reason == "abort":
        raise RuntimeError(f"{call}: {run.completion.error or 'The engine was paused.'}")
    found = (run.prompt_logprobs or [])[1:]
    logprobs = np.array([each.logprob for each in found], np.float32)
    return Scores(run.seq.tokens[: run.seq.num_prompt], logprobs, version)


def params_of(
    call: str, params: SamplingParams | Sequence[SamplingParams] | None, num: int
) -> list[SamplingParams]:
    """Those of each of `num` prompts. Raises ValueError."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num
    is_list = isinstance(params, Sequence) and not isinstance(params, str)
    for one in params if is_list else [params]:
        if not isinstance(one, SamplingParams):
            raise ValueError(f"{call}: params: expected SamplingParams, got {one!r:.100}.")
    if len(params) != num:
        raise ValueError(
            f"{call}: params: expected one or {num}, as many as prompts, got {len(params)}."
        )
    return list(params)


def check_adapter(call: str, name: str, known: Sequence[str]) -> None:
    """Raises ValueError for an adapter that the engine does not have."""
    if name and name not in known:
        names = ", ".join(map(repr, known))
        expected = f"one of {names}" if known else "none, as no adapter is loaded"
        raise ValueError(f"{call}: adapter: expected {expected}, got {name!r}.")


def run_of(
    tokens: list[int],
    params: request.SamplingParams,
    index: int,
    deadline: float | None,
    priority: int,
    salt: str,
    adapter: str,
    pictures: tuple[Picture, ...] = (),
) -> Run:
    name = f"llm-{next(_ids)}"
    seq = request.Sequence(
        name,
        name,
        list(tokens),
        params,
        namespace=f"/{salt}" if salt else "",
        priority=int(priority),
        deadline=deadline,
        arrival=time.monotonic(),
        adapter_name=adapter,
        pictures=pictures,
    )
    return Run(seq, Completion(index))


def as_list(prompts: Any) -> list[Any]:
    """One prompt, or several, as a list. An empty list is none."""
    if isinstance(prompts, (str, bytes)) or not hasattr(prompts, "__iter__"):
        return [prompts]
    listed = list(prompts)
    if not listed:
        return []
    first = listed[0]
    is_one = isinstance(first, Mapping) or _is_int(first)
    return [listed] if is_one else listed


def _is_int(value: Any) -> bool:
    if isinstance(value, (bool, str)):
        return False
    return isinstance(value, (int, np.integer)) or (
        getattr(value, "ndim", None) == 0 and np.issubdtype(value.dtype, np.integer)
    )


def _are_messages(prompt: Any) -> bool:
    return bool(isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], Mapping))


def _token_list(where: str, prompt: Any) -> list[int]:
    values = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(values, (list, tuple)) or not all(map(_is_int, values)):
        raise ValueError(
            f"{where}: expected a text, a list of token ids or a list of messages, got"
            f" {str(prompt)[:60]!r}."
        )
    return [int(value) for value in values]


# ---- processes ---------------------------------------------------------------------------------

_has_user = False  # a Runtime was made in this process
_is_fork_of_user = False  # this process is a fork of one that has made one


def _mark_use() -> None:
    global _has_user
    _has_user = True


def _after_fork() -> None:
    global _is_fork_of_user
    _is_fork_of_user = _has_user


os.register_at_fork(after_in_child=_after_fork)


def _refuse_fork() -> NoReturn:
    raise RuntimeError(
        "LLM: expected the process that made an LLM, got a fork of it, which lacks JAX's threads;"
        " start processes with multiprocessing.get_context('spawn') and make an LLM in each."
    )


def _stop(engine: AsyncEngine | None, embedder: Embedder | None) -> None:
    if engine is not None:
        engine.begin_stop(drain=False)
        engine.join()
    if embedder is not None:
        embedder.stop()
