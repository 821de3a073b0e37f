"""The engine for asyncio: the calls of `LLM`, awaited."""

from __future__ import annotations

import asyncio
import os
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

import numpy as np

from jax_attn import models
from jax_attn.llm._batch import RETRY_SECONDS, Batch, Run
from jax_attn.llm._beams import Beams, check_beams
from jax_attn.llm._hand_over import Started, start_export, start_import
from jax_attn.llm._llm import LLM, scoring_params
from jax_attn.llm._outputs import Chunk, Output, Scores
from jax_attn.llm._params import SamplingParams
from jax_attn.llm._runtime import Prompt, Request, collect, score_of
from jax_attn.llm._streams import ChunkQueue
from jax_attn.serve._engine.hand_over import HandedOver

Result = TypeVar("Result")


class AsyncLLM:
    """`LLM` for asyncio. Methods of these names do the same, and are awaited.

        llm = jax_attn.AsyncLLM("ORG/NAME")
        outputs = await asyncio.gather(*(llm.generate(prompt) for prompt in prompts))

    It may be used in several event loops. Cancelling a call ends its sequences. The constructor
    blocks until everything is compiled. `llm` is the LLM inside, for other threads.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | models.Model | None = None,
        *,
        directory: str | os.PathLike[str] | None = None,
        **options: Any,
    ):
        """See LLM."""
        self.llm = LLM(model, directory=directory, **options)
        self._runtime = self.llm._runtime

    # ---- texts ---------------------------------------------------------------------------------

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Output]:
        """See LLM.generate."""
        found = await asyncio.to_thread(self._runtime.requests, "generate", prompts, params)
        return await self._outputs("generate", found)

    async def chat(
        self,
        messages: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[Output]:
        """See LLM.chat."""
        found = await asyncio.to_thread(
            self._runtime.requests, "chat", messages, params, tools, variables
        )
        return await self._outputs("chat", found)

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncGenerator[Chunk]:
        """See LLM.stream. An async generator; `contextlib.aclosing` ends it early."""
        found = await asyncio.to_thread(self._runtime.requests, "stream", [prompt], params)
        engine, loop = self._runtime.engine("stream"), asyncio.get_running_loop()
        arrived: asyncio.Queue[Any] = asyncio.Queue()

        def put(item: Any) -> None:
            _call(loop, lambda: arrived.put_nowait(item))

        runs = [run for _, run in self._runtime.runs(found, range(len(found)))]
        chunks = ChunkQueue(engine, runs, put)
        try:
            chunks.start()
            while not chunks.is_done:
                for chunk in chunks.take(await arrived.get()):
                    yield chunk
        finally:
            chunks.abort()
        self.llm.check_alive("stream", engine)

    async def score(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None
    ) -> list[Scores]:
        """See LLM.score."""
        scored = scoring_params(params)
        tokens = await asyncio.to_thread(
            self._runtime.token_lists, "score", prompts, scored.adapter
        )
        runs = [run for _, run in self._runtime.scoring_runs(tokens, scored)]
        await self._run("score", runs)
        return [score_of("score", run, self.llm.version) for run in runs]

    async def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        length_penalty: float = 1.0,
    ) -> list[Output]:
        """See LLM.beam_search."""
        check_beams(params, length_penalty)
        found = await asyncio.to_thread(self._runtime.requests, "beam_search", prompts, params)
        beams = Beams(self._runtime, found, length_penalty)
        while runs := beams.runs():
            await self._run("beam_search", runs)
            beams.take()
        return collect(beams.found, beams.by_request)

    async def export_request(
        self, prompt: Prompt, params: SamplingParams | None = None, *, num_tokens: int = 1
    ) -> HandedOver:
        """See LLM.export_request."""
        return await _finish(start_export, self._runtime, prompt, params, num_tokens)

    async def import_request(self, handed: HandedOver | bytes) -> Output:
        """See LLM.import_request."""
        return await _finish(start_import, self._runtime, handed)

    async def embed(self, inputs: Any, *, dimensions: int | None = None) -> np.ndarray:
        """See LLM.embed."""
        return await _finish(self._runtime.embed, "embed", inputs, dimensions)

    async def rerank(self, query: str, documents: Sequence[str]) -> np.ndarray:
        """See LLM.rerank."""
        return await _finish(self._runtime.rerank, "rerank", query, documents)

    async def classify(self, texts: Sequence[str]) -> np.ndarray:
        """See LLM.classify."""
        return await _finish(self._runtime.classify, "classify", texts)

    @property
    def labels(self) -> tuple[str, ...]:
        """See LLM.labels."""
        return self.llm.labels

    # ---- weights and memory --------------------------------------------------------------------

    @property
    def version(self) -> str:
        """See LLM.version."""
        return self.llm.version

    async def update_params(self, params: Any, **options: Any) -> str:
        """See LLM.update_params."""
        return await asyncio.to_thread(self.llm.update_params, params, **options)

    async def load_lora(self, name: str, adapter: Any, **options: Any) -> None:
        """See LLM.load_lora."""
        await asyncio.to_thread(self.llm.load_lora, name, adapter, **options)

    async def unload_lora(self, name: str) -> None:
        """See LLM.unload_lora."""
        await self._between_steps("unload_lora", lambda engine: engine.unload_lora(name))

    @property
    def loras(self) -> list[str]:
        """See LLM.loras."""
        return self.llm.loras

    async def pause(self, *, end: bool = False) -> None:
        """See LLM.pause."""
        await self._between_steps("pause", lambda engine: engine.pause(end=end))

    async def resume(self) -> None:
        """See LLM.resume."""
        await self._between_steps("resume", lambda engine: engine.resume())

    async def sleep(self, *, weights: bool = False) -> None:
        """See LLM.sleep."""
        await self._between_steps("sleep", lambda engine: engine.sleep(weights=weights))

    async def wake(self) -> None:
        """See LLM.wake."""
        await self._between_steps("wake", lambda engine: engine.wake())

    def stats(self) -> dict[str, Any]:
        """See LLM.stats."""
        return self.llm.stats()

    # ---- the model and the end -----------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """See LLM.tokenizer."""
        return self.llm.tokenizer

    @property
    def config(self) -> models.ModelConfig:
        """See LLM.config."""
        return self.llm.config

    @property
    def kv_split(self) -> int | None:
        """See LLM.kv_split."""
        return self.llm.kv_split

    async def close(self) -> None:
        """See LLM.close."""
        await asyncio.to_thread(self.llm.close)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __reduce__(self) -> NoReturn:
        self.llm.__reduce__()

    # ---- runs ----------------------------------------------------------------------------------

    async def _between_steps(self, call: str, work: Callable[[Any], Future[None]]) -> None:
        await asyncio.wrap_future(work(self._runtime.engine(call, runs=False)))

    async def _outputs(self, call: str, found: list[Request]) -> list[Output]:
        by_request, runs = self._runtime.grouped_runs(found)
        await self._run(call, runs)
        return collect(found, by_request)

    async def _run(self, call: str, runs: Iterable[Run]) -> None:
        engine, loop = self._runtime.engine(call), asyncio.get_running_loop()
        news = asyncio.Event()
        batch = Batch(engine, runs, lambda: _call(loop, news.set))
        try:
            while True:
                news.clear()
                batch.refill()
                if batch.is_done:
                    break
                await _wait(news.wait(), RETRY_SECONDS if batch.must_retry else None)
        except BaseException:
            batch.abort()
            raise
        self.llm.check_alive(call, engine)


async def _wait(news: Awaitable[Any], seconds: float | None) -> None:
    try:
        async with asyncio.timeout(seconds):
            await news
    except TimeoutError:
        pass


def _call(loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
    """Calls `work` in the loop, unless it is closed: then nobody waits."""
    try:
        loop.call_soon_threadsafe(work)
    except RuntimeError:
        pass


async def _finish(start: Callable[..., Started[Result]], *args: Any) -> Result:
    """Starts work of `_runtime.embed` or its kin in a thread, and waits for its result."""
    done, result, cancel = await asyncio.to_thread(start, *args)
    try:
        await asyncio.wrap_future(done)
    finally:
        cancel()
    return result()
