"""The tenants that have sequences, and the order of their turns.

A virtual token counter decides: the tenant that has had the fewest tokens in steps goes first. A
new tenant starts at the least count of the others, so leaving and coming back gains nothing.
Source: "Fairness in Serving Large Language Models" (Sheng et al., 2024), section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from jax_attn.serve._scheduling.request import Sequence


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Limits of one tenant. None: no limit except its share.

    A tenant alone has the whole engine. If T tenants want more than there is, each has a T-th of
    the queue, of the slots, of the pages and of the tokens.

    Raises:
      ValueError: a limit is below 1.
    """

    max_waiting: int | None = None  # in the queue; more are refused with QueueFull
    max_running: int | None = None  # running sequences; more wait

    def __post_init__(self) -> None:
        for name in ("max_waiting", "max_running"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"TenantLimits: {name}: expected at least 1, got {value}")


@dataclass(eq=False, slots=True)
class Tenant:
    """The sequences of one tenant. Only the scheduler writes it."""

    name: str
    serial: int
    num_tokens: int  # the counter: its start value plus the tokens of steps
    waiting: list[Sequence] = field(default_factory=list)  # ordered by waiting_rank
    running: list[Sequence] = field(default_factory=list)  # ordered by rank
    num_pages: int = 0  # sum of KvMemory.num_held over the running
    # Admission.num_pages_given when one of its sequences last entered, or its queue was last empty
    given_at_entry: int = 0

    @property
    def turn(self) -> tuple[int, int, int]:
        """The tenant's rank; lower goes first: fewer tokens, then fewer running sequences."""
        return self.num_tokens, len(self.running), self.serial


class Tenants:
    """The tenants that have sequences, waiting or running."""

    def __init__(self) -> None:
        self._by_name: dict[str, Tenant] = {}
        self._num_made = 0

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Tenant]:
        """Iterates in arbitrary order, as there may be thousands. See `in_turn`."""
        return iter(self._by_name.values())

    def __getitem__(self, name: str) -> Tenant:
        return self._by_name[name]

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def with_most(self, amount: Callable[[Tenant], int]) -> Tenant:
        """The tenant with the largest amount; among equals the first in turn."""
        return min(self, key=lambda tenant: (-amount(tenant), tenant.turn))

    def get_or_add(self, name: str) -> Tenant:
        tenant = self._by_name.get(name)
        if tenant is None:
            least = min((tenant.num_tokens for tenant in self._by_name.values()), default=0)
            tenant = self._by_name[name] = Tenant(name, self._num_made, least)
            self._num_made += 1
        return tenant

    def remove_if_idle(self, name: str) -> None:
        tenant = self._by_name[name]
        if not (tenant.waiting or tenant.running):
            del self._by_name[name]

    def charge(self, seqs: Iterable[tuple[Sequence, int]], max_credit: int) -> None:
        """Counts the tokens that sequences have had in a step.

        max_credit: tokens by which a tenant may be behind the one that has had most. More is
        forgotten: a tenant that wanted little for long must not block the others later.
        """
        if len(self._by_name) < 2:
            return  # a tenant alone needs no count
        for seq, num_tokens in seqs:
            if (tenant := self._by_name.get(seq.tenant)) is not None:
                tenant.num_tokens += num_tokens
        tenants = self._by_name.values()
        least = max((tenant.num_tokens for tenant in tenants), default=0) - max_credit
        for tenant in tenants:
            tenant.num_tokens = max(tenant.num_tokens, least)


def in_turn(tenants: Iterable[Tenant]) -> list[Tenant]:
    return sorted(tenants, key=lambda tenant: tenant.turn)


def rank(seq: Sequence) -> tuple[int, int]:
    """Sort key of running sequences; lower comes first."""
    return seq.priority, seq.order


def waiting_rank(seq: Sequence) -> tuple[int, bool, int]:
    return seq.priority, not seq.num_preempted, seq.order


def namespace(tenant: str, salt: str) -> str:
    """The prefix cache's namespace for this tenant's requests with this salt."""
    return f"{tenant}/{salt}" if salt else tenant  # tenant names have no slash


def versioned(namespace: str, version: str, adapter: int | None = None) -> str:
    """The part of a namespace that belongs to a version of the weights; "" is the first version.

    version: without NUL. The last NUL ends the namespace, as a client's salt may have any.
    adapter: the number of a LoRA adapter, which precedes that NUL. Without one a slash does.
    """
    if adapter is not None:
        return f"{namespace}/\0{adapter}\0{version}"
    if not version and "\0" not in namespace:
        return namespace
    return f"{namespace}/\0{version}"


def owner(namespace: str) -> str:
    """The tenant that owns a namespace."""
    return namespace.partition("/")[0]
