"""Beam searches of several prompts, whose steps run together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jax_attn.llm._batch import Run
from jax_attn.llm._outputs import Completion
from jax_attn.llm._params import SamplingParams
from jax_attn.llm._runtime import Request, Runtime
from jax_attn.serve._scheduling.beam_search import MAX_WIDTH, BeamSearch, unsupported
from jax_attn.serve._scheduling.events import TokenEvent
from jax_attn.serve._scheduling.request import FinishReason


def check_beams(params: SamplingParams | Sequence[SamplingParams], length_penalty: float) -> None:
    """Raises ValueError if an argument asks for what beam search does not do."""
    if not math.isfinite(length_penalty):
        raise ValueError(
            f"beam_search: length_penalty: expected a finite number, got {length_penalty!r}."
        )
    for each in params if isinstance(params, Sequence) else [params]:
        if not isinstance(each, SamplingParams):
            continue  # `Runtime.requests` says what is wrong
        if not each.n <= MAX_WIDTH:
            raise ValueError(f"beam_search: n: expected 1 to {MAX_WIDTH} beams, got {each.n}.")
        if each.max_tokens == 0:
            raise ValueError("beam_search: max_tokens: expected at least 1, got 0.")
        fields = dataclasses.asdict(each)
        name = unsupported(fields | {"prompt_logprobs": each.num_prompt_top})
        if each.has_grammar:
            name = next(n for n in ("json_schema", "regex", "grammar", "choice") if fields[n])
        if name is not None:
            raise ValueError(
                f"beam_search: {name}: expected none, as beams follow the model's own"
                f" probabilities, got {fields[name]!r:.100}."
            )


class Beams:
    """Until `runs` gives none: run them, then `take` what came of them.

    Then `found` and `by_request` are for `collect`.
    """

    def __init__(self, runtime: Runtime, found: list[Request], length_penalty: float):
        self.found = found
        self.by_request: list[list[Run]] = [[] for _ in found]
        for index, run in runtime.runs(found, range(len(found))):
            self.by_request[index].append(run)
        self._text_of = runtime.text_of
        self._searches = [
            BeamSearch(runs[0].seq, len(runs), length_penalty, runtime.config.eos_tokens)
            for runs in self.by_request
        ]
        self._in_step: list[tuple[BeamSearch, list[Run]]] = []

    def runs(self) -> list[Run]:
        """The runs of the next step; none: all searches are done, and `by_request` has texts."""
        self._in_step = [
            (search, [Run(seq, Completion(0)) for seq in search.sequences()])
            for search in self._searches
            if not search.is_done
        ]
        if not self._in_step:
            for search, runs in zip(self._searches, self.by_request, strict=True):
                events = search.events([run.seq for run in runs], self._text_of)
                for run, event in zip(runs, events, strict=True):
                    run.add(event)
        return [run for _, runs in self._in_step for run in runs]

    def take(self) -> None:
        """Goes on with the runs, which are done."""
        for search, runs in self._in_step:
            search.take([_event_of(run) for run in runs])


def _event_of(run: Run) -> TokenEvent:
    made = run.completion
    return TokenEvent(
        run.seq.id,
        made.tokens,
        logprobs=made.logprobs,
        finish_reason=FinishReason(made.finish_reason),
        num_cached_tokens=run.num_cached,
        error=made.error,
        versions=made.versions,
    )
