"""AsyncEngine's interface without a model: deterministic tokens, delays, limits and failures."""

from __future__ import annotations

import asyncio
import functools
import random
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

from tokenizers import Tokenizer

from jax_attn import models
from jax_attn.serve._grammar.grammar import Grammars
from jax_attn.serve._scheduling.admission import QueueFull
from jax_attn.serve._scheduling.protocols import EngineStopped
from jax_attn.serve._scheduling.request import FinishReason
from jax_attn.serve._text.detokenizer import Detokenizer, Texts

MODEL = models.BUNDLED


@dataclass
class TokenLogprob:
    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


@dataclass
class TokenEvent:
    seq_id: str
    tokens: list[int]
    text: str = ""
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    num_cached_tokens: int | None = None
    admitted: float | None = None
    error: str | None = None
    is_clients_fault: bool = False


@dataclass
class FakeModel:
    tokenizer: Tokenizer
    config: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(
            vocab_size=4096,
            bos_token=0,
            eos_tokens=(0,),
            max_positions=2048,
            family="llama",
            quantization=None,
        )
    )


def fake_model() -> FakeModel:
    return FakeModel(Tokenizer.from_file(str(MODEL / "tokenizer.json")))


class FakeEngine:
    """An engine that gives every sequence tokens by its prompt and seed, a step each `delay`
    seconds.

    A prompt that ends with FAIL fails in its third step.
    """

    FAIL = "please fail"

    def __init__(self, tokenizer: Tokenizer, *, delay: float = 0.0, max_waiting: int = 32):
        self.tokenizer = tokenizer
        self.delay = delay
        self.limits = SimpleNamespace(
            max_model_len=256, max_running=8, max_waiting=max_waiting, num_replicas=1
        )
        self.ready = False
        self.failure: BaseException | None = None
        self.started = self.stopped = False
        self.aborts = False  # if True, running sequences abort at their next step
        self.stuck: set[str] = set()  # choices whose grammar gets stuck in the third step
        self.says = ""  # each sequence's text, a token a step, instead of made-up tokens
        self.says_tokens: list[int] | None = None  # None: as the tokenizer splits `says`
        self.live: dict[str, int] = {}  # sequence -> steps so far
        self.holds_at: int | None = None  # sequences wait after this many steps until it changes
        self.logprob_of = lambda seq: -0.5  # of each token of its output
        self.aborted: dict[str, int] = {}
        self.submitted: list = []
        self.watches: list[bool] = []
        self.on_cache_events = lambda events: None
        self._grammars = Grammars(tokenizer, max(4096, tokenizer.get_vocab_size()), (0,))
        self._texts = Texts(tokenizer)
        self._fail_tokens = tokenizer.encode(self.FAIL).ids
        self._words = [
            token
            for token in range(300, 4096)
            if tokenizer.decode([token]).strip().isalpha() and tokenizer.decode([token]).isascii()
        ]

    def start(self) -> None:
        self.started = True
        self.ready = True

    async def stop(self, drain: bool) -> None:
        self.stopped = True

    async def generate(self, seqs):
        if self.stopped:
            raise EngineStopped("The engine does not run.")
        for seq in seqs:
            if seq.params.grammar is not None:
                self._grammars.matcher(seq.params.grammar)
        most = self.limits.max_waiting
        if len(self.live) + len(seqs) > most or len(seqs) > most // self.limits.num_replicas:
            raise QueueFull("full")
        self.submitted += seqs
        self.live |= {seq.id: 0 for seq in seqs}
        admitted = time.monotonic()
        queue: asyncio.Queue = asyncio.Queue()
        workers = [asyncio.create_task(self._run(seq, admitted, queue)) for seq in seqs]
        left = len(seqs)
        try:
            while left:
                event = await queue.get()
                left -= event.finish_reason is not None
                yield event
        finally:
            for worker in workers:
                worker.cancel()
            for seq in seqs:
                if seq.id in self.live:
                    self.aborted[seq.id] = self.live.pop(seq.id)

    async def _run(self, seq, admitted: float, queue: asyncio.Queue) -> None:
        rng = random.Random(f"{seq.tokens}{seq.params.seed}")
        fails = seq.tokens[: seq.num_prompt][-len(self._fail_tokens) :] == self._fail_tokens
        text, held, num_left, step = "", "", seq.params.max_tokens, 0
        skip, before = seq.params.skip_special_tokens, seq.tokens if seq.params.goes_on else ()
        detokenizer = Detokenizer(self._texts, skip_special_tokens=skip, before=before)
        if not num_left:
            await self._read(seq, admitted, queue)
        while num_left:
            await asyncio.sleep(self.delay)
            while step == self.holds_at:
                await asyncio.sleep(0.001)
            # Some steps have two tokens, as after a jump. Some hold text back for stop strings.
            tokens = rng.choices(self._words, k=2 if step % 4 == 2 and num_left > 1 else 1)
            if self.says:
                tokens = self._tokens_of_says(step)
            num_left -= len(tokens)
            shown = [] if tokens == [0] else tokens
            new = "".join(map(detokenizer.push, shown))
            if tokens == [0] or not num_left:
                new += detokenizer.flush()
            text, held = text + new, held + new
            reason = FinishReason.STOP if tokens == [0] else self._reason(seq, text, num_left)
            event = TokenEvent(seq.id, tokens, finish_reason=reason)
            if step % 4 != 3 or reason:
                event.text, held = held, ""
            if reason == FinishReason.STOP and not self.says:
                event.text = ""  # the text left is only the stop string
            if step == 0:
                event.num_cached_tokens = 16 if seq.num_prompt > 16 else 0
                event.admitted = admitted
            if (num_top := seq.params.logprobs) is not None:
                event.logprobs = [
                    TokenLogprob(
                        token,
                        self.logprob_of(seq),
                        tuple((token + i, -0.5 - i) for i in range(num_top)),
                    )
                    for token in tokens
                ]
                if step == 0:
                    event.logprobs[:0] = self._prompt_logprobs(seq)
            if fails and step == 2:
                event = TokenEvent(
                    seq.id, [], finish_reason=FinishReason.ERROR, error="asked to fail"
                )
            if seq.id.rpartition("-")[2] in self.stuck and step == 2:
                event = TokenEvent(seq.id, [], finish_reason=FinishReason.ERROR)
                event.error, event.is_clients_fault = "grammar: too complex.", True
            self.live[seq.id] += 1
            step += 1
            if event.finish_reason is not None:
                del self.live[seq.id]
            queue.put_nowait(event)
            if event.finish_reason is not None:
                return

    def _tokens_of_says(self, step: int) -> list[int]:
        tokens = self.says_tokens
        if tokens is None:
            tokens = self.tokenizer.encode(self.says).ids
        return tokens[step : step + 1] or [0]

    async def _read(self, seq, admitted: float, queue: asyncio.Queue) -> None:
        await asyncio.sleep(self.delay)
        del self.live[seq.id]
        logprobs = self._prompt_logprobs(seq) or None
        event = TokenEvent(seq.id, [], logprobs=logprobs, finish_reason=FinishReason.LENGTH)
        event.admitted = admitted
        queue.put_nowait(event)

    def _prompt_logprobs(self, seq) -> list[TokenLogprob]:
        if not seq.params.prompt_logprobs:
            return []
        first, *rest = seq.tokens[: seq.num_prompt]
        top = tuple((4000 + i, -0.1 - i) for i in range(seq.params.logprobs))
        return [TokenLogprob(first, None, ()), *(TokenLogprob(token, -4.0, top) for token in rest)]

    def _reason(self, seq, text: str, num_left: int) -> FinishReason | None:
        if self.aborts:
            return FinishReason.ABORT
        if any(stop in text for stop in seq.params.stop):
            return FinishReason.STOP
        if seq.deadline is not None and time.monotonic() > seq.deadline:
            return FinishReason.DEADLINE
        return None if num_left else FinishReason.LENGTH

    def stats(self) -> dict:
        return {
            "waiting": max(0, len(self.live) - self.limits.max_running),
            "running": len(self.live),
            "pages_free": 40,
            "pages_cached": 14,
            "pages_used": 10,
            "pages_total": 64,
            "prompt_tokens": 1000,
            "prefix_hit_tokens": 400,
            "generated_tokens": 300,
            "preemptions": 1,
            "steps": 250,
            "compilations": 0,
            "buckets_left": 3,
            "device_bytes": {0: 4096, 1: 4096},
            "jump_forward_tokens": 7,
            "draft_tokens": 20,
            "draft_tokens_taken": 12,
            "step_seconds": {"schedule": 0.1, "plan": 0.2, "dispatch": 0.3, "wait": 1.4},
        }

    def watch_cache(self, on: bool) -> None:
        self.watches.append(on)

    async def snapshot(self) -> dict:
        return self.picture()

    @functools.cache  # noqa: B019  # as the real engine, it gives everybody the same one
    def picture(self) -> dict:
        encode = lambda text: self.tokenizer.encode(text).ids  # noqa: E731
        return {
            "step": {
                "number": 250,
                "bucket": "64 tokens x 8",
                "num_tokens": 35,
                "entries": [
                    {"id": "cmpl-1-0", "num_tokens": 1, "samples": True},
                    {"id": "cmpl-1-1", "num_tokens": 1, "samples": True},
                    {"id": "chatcmpl-2-0", "num_tokens": 33, "samples": False},
                ],
            },
            "requests": [
                {
                    "id": name,
                    "status": status,
                    "namespace": "",
                    "num_prompt": 40,
                    "num_output": 12,
                    "num_cached": 16,
                    "num_computed": 51,
                    "num_pages": 4,
                    "priority": 0,
                    "age": 1.25,
                }
                for name, status in [
                    ("cmpl-1-0", "running"),
                    ("cmpl-1-1", "running"),
                    ("chatcmpl-2-0", "running"),
                    ("cmpl-3-0", "waiting"),
                    ("cmpl-3-1", "waiting"),
                ]
            ],
            "pages": {
                "page_size": 16,
                "total": 64,
                "states": "u" * 10 + "l" * 4 + "c" * 10 + "f" * 40,
            },
            "tree": [
                {
                    "namespace": "",
                    "parent": None,
                    "tokens": encode("import os"),
                    "locks": 2,
                    "num_pages": 2,
                },
                {
                    "namespace": "",
                    "parent": 0,
                    "tokens": encode("class Server:"),
                    "locks": 1,
                    "num_pages": 1,
                },
                {
                    "namespace": "",
                    "parent": 0,
                    "tokens": encode("def main():"),
                    "locks": 1,
                    "num_pages": 1,
                },
                {
                    "namespace": "key1",
                    "parent": None,
                    "tokens": encode("secret"),
                    "locks": 0,
                    "num_pages": 3,
                },
            ],
        }
