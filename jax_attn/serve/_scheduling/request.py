"""A client's request for one stream of tokens, and the stream's state. Plain data."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from jax_attn.serve._scheduling.file_tier import Read
from jax_attn.serve._scheduling.pictures import Picture
from jax_attn.serve._scheduling.prefix_cache import Node


class FinishReason(enum.StrEnum):
    STOP = "stop"  # end of sequence, a stop token, a stop string, or the end of the grammar
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    DEADLINE = "deadline"


class Status(enum.StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


_MAX_FLOAT = 3.4e38  # of float32


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one sequence. Neutral values turn a feature off.

    max_tokens: of the output; 0: only the prompt is read.
    logprobs: number of likeliest alternatives to report for each token; 0: the chosen token only.
    logprobs_of: "model": they are of the model's own logits. "sampled": of the distribution that
      the token was sampled from, after bias, penalties, grammar, temperature and filters; at
      temperature 0 one token has all probability.
    prompt_logprobs: report them for the prompt's tokens too. The whole prompt is then computed, as
    the prefix cache does not hold logprobs. With logprobs_of "sampled" only temperature, top_k,
      top_p and min_p change them.
    grammar: llguidance grammar text.

    Raises:
      ValueError: a value is outside its range; the message begins with the field's name.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True  # in the text
    include_stop: bool = False  # the text includes the stop string or token that ended it
    grammar: str | None = None
    # The text goes on from the prompt's; False: it is a text of its own. The first word's space
    # depends on it with SentencePiece.
    goes_on: bool = True
    logprobs_of: Literal["model", "sampled"] = "model"

    def __post_init__(self) -> None:
        def expect(name: str, what: str, holds: bool) -> None:
            if not holds:
                raise ValueError(f"{name}: expected {what}, got {getattr(self, name)!r}")

        def finite(value: float) -> bool:  # also as a float32
            return abs(value) <= _MAX_FLOAT

        expect("max_tokens", "at least 0", self.max_tokens >= 0)
        expect("min_tokens", "0 to max_tokens", 0 <= self.min_tokens <= self.max_tokens)
        expect(
            "temperature",
            "a finite number >= 0",
            finite(self.temperature) and self.temperature >= 0,
        )
        expect("top_k", "0 to 2**31 - 1", 0 <= self.top_k < 2**31)
        expect("top_p", "a number in (0, 1]", 0 < self.top_p <= 1)
        expect("min_p", "a number in [0, 1]", 0 <= self.min_p <= 1)
        expect(
            "repetition_penalty",
            "a finite number > 0",
            finite(self.repetition_penalty) and self.repetition_penalty > 0,
        )
        expect("presence_penalty", "a finite number", finite(self.presence_penalty))
        expect("frequency_penalty", "a finite number", finite(self.frequency_penalty))
        expect("logprobs", "None or at least 0", self.logprobs is None or self.logprobs >= 0)
        expect(
            "prompt_logprobs",
            "logprobs beside it",
            not self.prompt_logprobs or self.logprobs is not None,
        )
        expect("logprobs_of", "'model' or 'sampled'", self.logprobs_of in ("model", "sampled"))
        expect("stop", "strings that are not empty", all(self.stop))
        expect("logit_bias", "finite numbers", all(finite(bias) for _, bias in self.logit_bias))


class Drafter(Protocol):
    """Proposes a sequence's next tokens, for the model to verify; see `drafts`."""

    def propose(self, seq: Sequence, most: int) -> list[int]: ...

    def settle(self, num_drafts: int, num_taken: int) -> None: ...


class UnknownAdapter(ValueError):
    """The engine has no adapter of the name that a sequence gives, perhaps not any more."""


class Adapter(NamedTuple):
    """A LoRA adapter that the engine has: its place on the device, and a number of its own.

    Adapters that come and go under one name have different numbers.
    """

    slot: int
    number: int


@dataclass(eq=False, slots=True)
class Sequence:
    """One stream of tokens. A request with n > 1 has n sequences.

    They share the prompt's pages through the prefix cache, like any two sequences. Only the
    scheduler writes the fields from `status` on.
    """

    id: str
    request_id: str
    tokens: list[int]  # the prompt, then the output known to the host; only extended
    params: SamplingParams
    namespace: str = ""  # only sequences of the same namespace share pages
    priority: int = 0  # lower first
    deadline: float | None = None  # seconds on the clock of `schedule`
    arrival: float = 0.0  # seconds on the same clock, for metrics; the order is that of `add`
    tenant: str = ""  # its owner: tenants have fair shares; `priority` orders within one
    drafter: Drafter | None = None  # None: no drafts
    predicted: list[int] = field(default_factory=list)  # tokens that the output may repeat
    adapter_name: str = ""  # of a LoRA adapter; "": none
    adapter: Adapter | None = None  # what the engine has by that name
    pictures: tuple[Picture, ...] = ()  # of the prompt, by their first tokens

    num_prompt: int = field(init=False)  # len(tokens) when made
    status: Status = field(default=Status.WAITING, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    slot: int = field(default=-1, init=False)  # row of device state while RUNNING
    # Pages of the kv cache, in the order of a page table.
    pages: array[int] = field(default_factory=lambda: array("i"), init=False)
    num_computed: int = field(default=0, init=False)  # tokens whose kv is written or launched
    num_cached: int = field(
        default=0, init=False
    )  # of the prompt, found cached when first admitted
    admitted: float | None = field(default=None, init=False)  # first, on the clock of `arrival`
    num_in_flight: int = field(
        default=0, init=False
    )  # launched samples that the host does not know

    node: Node | None = field(default=None, init=False)  # holds the lock on pages[:num_shared]
    # Leading pages that the prefix cache owns: of `pages_by_text`.
    num_shared: int = field(default=0, init=False)
    # With a kv policy: the tokens that `pages` lacks, between sinks and window (`streaming`), or
    # as many of the prompt, in each head others (`prompt_policy`).
    num_dropped: int = field(default=0, init=False)
    # With `streaming` the first pages of the text that are held outside of `pages`: the sinks as
    # they were written, and what other sequences may share. `pages` begins with rotated copies of
    # the sinks.
    originals: array[int] = field(default_factory=lambda: array("i"), init=False)
    # Recurrent states, if the model has some; see `states`.
    state: int = field(default=-1, init=False)  # the slot of its own while RUNNING
    read_state: int = field(default=-1, init=False)  # the slot to read next, if not its own
    # Accepted drafts that its state lacks: computed tokens that go through the model again.
    num_behind: int = field(default=0, init=False)
    state_node: Node | None = field(default=None, init=False)  # whose checkpoint it reads first
    wanted_states: set[int] = field(default_factory=set, init=False)  # tokens of checkpoints
    # Checkpoints that are written, or launched, but not yet in the cache: slots by tokens.
    checkpoints: dict[int, int] = field(default_factory=dict, init=False)
    spare_states: list[int] = field(default_factory=list, init=False)  # allocated, not used yet
    order: int = field(default=-1, init=False)  # arrival number
    num_preempted: int = field(default=0, init=False)  # number of preemptions
    # When admission first looked it up: since then later arrivals may overtake it.
    looked_up: float | None = field(default=None, init=False)
    is_held: bool = field(default=False, init=False)  # retracted: takes no part in steps
    # Drafts are in flight, so its position is unknown: it takes no part in steps either.
    is_drafting: bool = field(default=False, init=False)
    # Pages that files have, see KvMemory.awaits_files: a read that it waits for, and whether it has
    # begun all that it can.
    file_read: Read | None = field(default=None, init=False)
    has_asked_files: bool = field(default=False, init=False)
    _last: int = field(init=False, repr=False)  # index of the last token that max_tokens allows
    _packed: bytearray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)
        self._last = self.num_prompt + max(self.params.max_tokens, 1) - 1
        # Packed in the thread that makes the request (20 ns a token), not in the engine's.
        self._packed = bytearray(array("i", self.tokens))

    @property
    def num_output(self) -> int:
        """Output tokens known to the host."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_known(self) -> int:
        """Tokens known to the device: prompt and output known to the host, and those in flight."""
        return len(self.tokens) + self.num_in_flight

    @property
    def may_retract(self) -> bool:
        """Whether a launched sample may become void because a grammar was not ready for it."""
        return self.params.grammar is not None

    @property
    def num_pending(self) -> int:
        """Tokens to put through the model before the next sample, including those in flight.

        1 while decoding; 0 when only the last token of max_tokens is awaited.
        """
        num_tokens = self.num_known
        # The last token is never fed back.
        return (num_tokens if num_tokens < self._last else self._last) - self.num_computed

    @property
    def num_left(self) -> int:
        """Samples of a decode that max_tokens allows, without those in flight."""
        return self._last - self.num_computed

    def key(self, num_tokens: int) -> bytes:
        """The first num_tokens tokens in the prefix cache's format: 4 bytes each.

        Those of pictures are negative.
        """
        return bytes(memoryview(self.packed(num_tokens))[: 4 * num_tokens])

    def number_pictures(self, number_of: Callable[[Picture], int]) -> None:
        """Has the keys say which pictures the prompt shows: see `pictures`. Before `add`."""
        for picture in self.pictures:
            number = array("i", [~number_of(picture)]).tobytes()
            self._packed[4 * picture.begin : 4 * picture.end] = number * picture.num_tokens

    @property
    def max_drafts(self) -> int:
        """The limit on drafts after the next token: the last of max_tokens is never fed back."""
        return self._last - 1 - self.num_computed

    def packed(self, num_tokens: int | None = None) -> bytearray:
        """At least the first num_tokens tokens (None: all), 4 bytes each. Do not keep it."""
        num_packed = len(self._packed) // 4
        if num_tokens is None or num_packed < num_tokens:
            self._packed += array("i", self.tokens[num_packed:]).tobytes()
        return self._packed
