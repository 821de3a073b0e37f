"""Limits on requests: how much of the server each tenant's requests may hold at once.

The cost of a request becomes known in steps: first that it exists, then the bytes of its body, then
its choices, tokens and log-probabilities. Its `Ticket` counts each of them before memory is taken
for it. A request over a limit is refused with a 429 that names the limit.
"""

from __future__ import annotations

from collections import Counter

from jax_attn.serve._openai.bounds import KeyLimits
from jax_attn.serve._openai.errors import ApiError
from jax_attn.serve._scheduling.protocols import ServedEngine

RETRY_AFTER_SECONDS = 1


def check_one(limits: KeyLimits, tenant: str, **amounts: int) -> None:
    """Raises ApiError, 400, if one request alone exceeds a limit."""
    for name, amount in amounts.items():
        if amount > (limit := getattr(limits, name)):
            raise _too_many(name, limit, _whose(tenant), 0, amount)


_WORDS = {
    "requests": "requests in flight",
    "choices": "choices in flight (prompts x n)",
    "tokens": "prompt tokens in flight (x n)",
    "scores": "log-probabilities of answers in flight (use streams, or fewer)",
    "body_bytes": "bytes of bodies that are being read",
    "embedding_bytes": "bytes of embeddings in flight",
    "picture_bytes": "bytes of pixels in flight, 3 for each pixel after pictures are resized",
}


def _too_many(name: str, limit: int, whose: str, held: int, amount: int) -> ApiError:
    expected = f"{_WORDS[name]}: expected at most {limit} {whose}, got"
    code = f"too_many_{name}"
    if amount > limit:  # it can never fit
        return ApiError(400, f"{expected} {amount} in one request", code=code)
    return ApiError(
        429,
        f"{expected} {held} and {amount} more; try again when some of them are done",
        code=code,
        retry_after=RETRY_AFTER_SECONDS,
    )


def _whose(tenant: str) -> str:
    return "of one key" if tenant else "of all clients together"


class Limiter:
    """Hands out tickets while the limits allow it. For one event loop."""

    def __init__(self, engine: ServedEngine | None, limits: KeyLimits):
        """engine: None: there is no queue to enter."""
        self._engine, self._limits = engine, limits
        self._held: dict[str, Counter[str]] = {}  # tenant -> what its tickets hold

    def enter(self, tenant: str, *, queues: bool) -> Ticket:
        """queues: the request needs a place in the engine's queue; it is refused if there is none.

        Raises:
          ApiError: 429.
        """
        if queues:
            self._check_queue(tenant)
        ticket = Ticket(self, tenant)
        ticket.take(requests=1)
        return ticket

    def _check_queue(self, tenant: str) -> None:
        """Refuses what the engine would refuse, as far as is known without reading the request."""
        assert self._engine is not None
        limits = self._engine.limits
        if self._engine.stats()["waiting"] < limits.max_waiting:
            return
        share = limits.max_waiting // len(self._held.keys() | {tenant})
        if self.held(tenant)["choices"] >= share:
            raise queue_full(f"the queue is full, and your share of it is {share}")

    def held(self, tenant: str) -> Counter[str]:
        return Counter(self._held.get(tenant, {}))

    def _add(self, tenant: str, amounts: dict[str, int]) -> None:
        held = self._held.get(tenant, Counter())
        for name, amount in amounts.items():
            limit = getattr(self._limits, name)
            if held[name] + amount > limit:
                raise _too_many(name, limit, _whose(tenant), held[name], amount)
        held.update(amounts)
        self._held[tenant] = held

    def _remove(self, tenant: str, amounts: dict[str, int]) -> None:
        held = self._held[tenant]
        held.subtract(amounts)
        if not any(held.values()):
            del self._held[tenant]


class Ticket:
    """The amounts that one request holds until it leaves."""

    def __init__(self, limiter: Limiter, tenant: str):
        self._limiter, self.tenant = limiter, tenant
        self._amounts: Counter[str] = Counter()

    def take(self, **amounts: int) -> None:
        """amounts: by names of KeyLimits' fields. Takes all or none.

        Raises:
          ApiError: 429; or 400, if it exceeds the limit for all requests together.
        """
        self._limiter._add(self.tenant, amounts)
        self._amounts.update(amounts)

    def give_back(self, name: str) -> None:
        """Gives back all that the request took of one amount."""
        self._limiter._remove(self.tenant, {name: self._amounts.pop(name, 0)})

    def leave(self) -> None:
        """Gives back everything. Further calls do nothing."""
        if self._amounts:
            self._limiter._remove(self.tenant, self._amounts)
            self._amounts = Counter()


def queue_full(reason: str) -> ApiError:
    return ApiError(
        429,
        f"{reason}; try again later",
        code="queue_full",
        retry_after=RETRY_AFTER_SECONDS,
    )
