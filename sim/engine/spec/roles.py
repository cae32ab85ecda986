"""The parts of machines in a request where prefill and decode are apart, and the way of KV from one to the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import ClassVar, Final, Literal

from policies.routers import Router
from sim.engine.tiers.links import LinkSpec

PREFILL: Final = "prefill"
DECODE: Final = "decode"

Role = Literal["both", "prefill", "decode"]
FirstToken = Literal["prefill", "arrival", "decode"]
Room = Literal["after_prefill", "before_prefill"]
Shared = Literal["sender", "receiver", "pair", "pools"]


@dataclass(frozen=True, kw_only=True)
class KvPath:
    """The way from machines of one pool to those of another."""

    link: LinkSpec
    shared: Shared = "sender"
    """Transfers that wait for each other: all of one sender, of one receiver, of the two, or of both pools."""
    bytes_per_token: float
    """Bytes that cross the link, of all ranks together."""
    bytes_per_sequence: float = 0.0
    """The same for states of constant size."""
    layers: int = 1
    """KV is sent layer by layer behind the computation, so many of them; 1: whole, when the prompt has been computed."""
    repack_s_per_byte: float = 0.0
    """Time to lay arrived KV out for the receiver's ranks, where they divide it otherwise."""

    def __post_init__(self) -> None:
        for name in ("bytes_per_token", "bytes_per_sequence", "repack_s_per_byte"):
            value = getattr(self, name)
            if not (isfinite(value) and value >= 0):
                raise ValueError(f"{name} is finite and at least 0; got {value!r}")
        if self.layers < 1:
            raise ValueError(f"layers is at least 1; got {self.layers}")

    def n_bytes(self, tokens: int) -> int:
        """Bytes of *tokens* tokens of one sequence; none where there are no tokens to send."""
        return round(tokens * self.bytes_per_token + self.bytes_per_sequence) if tokens > 0 else 0


class OneEach:
    """Tokens that a server of prompts alone is asked to emit: `policies.view.ById`. One token more than it is given, which for
    requests that continue is more than their prompt."""

    __slots__ = ("_carried",)

    def __init__(self, carried: Sequence[int] | None) -> None:
        self._carried = carried

    def __getitem__(self, id_: int, /) -> int:
        return 1 if self._carried is None else 1 + self._carried[id_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The part of one machine in hand-over."""

    role: Role
    drops_token: bool
    """The token that a prefill brings is not used."""
    gives_token: bool = False
    """It is the client's at once."""
    headroom_tokens: int


@dataclass(frozen=True, kw_only=True)
class HandoverSpec:
    """A request's life in two stages."""

    stages: ClassVar[tuple[str, ...]] = (PREFILL, DECODE)
    roles: tuple[Role, ...]
    """The role of each machine."""
    pools: tuple[int, ...]
    """The number of each machine's pool."""
    paths: Mapping[tuple[int, int], KvPath] = field(hash=False)
    """Paths by the numbers of the sender's pool and the receiver's."""
    router: Router
    """Chooses among machines that decode."""
    first_token: FirstToken = "arrival"
    """The source of the client's first token: the prefill machine when it has it (`prefill`), the decode machine when the KV is
    there (`arrival`), or the decode machine by an iteration of its own over the prompt's last token, the one from prefill being
    dropped (`decode`)."""
    room: Room = "after_prefill"
    """The time at which the receiver takes room: after the prompt has been computed, or before it is sent to be computed."""
    local_tokens: int = 0
    """A prompt of which the decode machine lacks no more tokens than these is computed there."""
    headroom_tokens: int = 0
    """Tokens that the receiver leaves free for each sequence that it has, when it takes room for one more."""

    def __post_init__(self) -> None:
        if len(self.roles) != len(self.pools):
            raise ValueError(f"{len(self.roles)} roles and {len(self.pools)} pools; give one of each for each machine")
        for role, other in (("prefill", "decode"), ("decode", "prefill")):
            if role in self.roles and other not in self.roles:
                raise ValueError(f"machines that {role} alone need some that {other}")
        for name in ("local_tokens", "headroom_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is at least 0; got {getattr(self, name)}")
        by_role = {
            role: {pool for pool, each in zip(self.pools, self.roles, strict=True) if each == role}
            for role in self.roles
        }
        for sender in by_role.get("prefill", ()):
            if not any((sender, receiver) in self.paths for receiver in by_role.get("decode", ())):
                raise ValueError(f"no path leads from pool {sender}")
        if self.room == "after_prefill" and any(path.layers > 1 for path in self.paths.values()):
            raise ValueError("KV that goes layer by layer needs room before it is computed; take room before_prefill")

    def stage_of(self, machine: int) -> str:
        """The first stage that a machine does."""
        role = self.roles[machine]
        return PREFILL if role == "both" else role

    @property
    def chosen_at_arrival(self) -> bool:
        """Whether the decode machine is chosen at the request's arrival, or when its prompt has been computed."""
        return self.room == "before_prefill" or self.local_tokens > 0
