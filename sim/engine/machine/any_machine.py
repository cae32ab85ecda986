"""Any machine of a run, as routers, gateways, courses and the fleet know it: one that runs models, or one that encodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from policies.routers import NO_ADAPTERS, AdapterLoad, Booked, RoutedRequest
from sim.engine.machine.groups import Group


class AnyMachine:
    """Takes requests and gives them up; routers see it as a `policies.routers.ReplicaLoad`."""

    def __init__(self, index: int, groups: Sequence[Group] = ()) -> None:
        """*groups*: the engine cores of each model that it hosts."""
        self.index = index
        self.no_hit_order = -1
        """Only `gateway.routing.Seen` keeps it."""
        self.awaited = self.awaited_tokens = self.awaited_prompts = 0
        """Requests sent here that wait elsewhere, for blocks or for their prompt to be computed; tokens of those whose prompt is to
        be computed here, and of the prompts of all."""
        self.groups = groups
        self.cores = [core for group in groups for core in group.cores]

    @property
    def events(self) -> int:
        """Turns in which something ended."""
        raise NotImplementedError

    # Loads for routers.

    @property
    def waiting(self) -> int:
        raise NotImplementedError

    @property
    def running(self) -> int:
        raise NotImplementedError

    @property
    def kv_blocks_used(self) -> int:
        return 0

    @property
    def kv_use(self) -> float:
        return 0.0

    @property
    def kv_blocks(self) -> int:
        return 0

    @property
    def block_tokens(self) -> int:
        return 1

    @property
    def prefill_tokens(self) -> int:
        return 0

    @property
    def prompt_tokens(self) -> int:
        return 0

    @property
    def n_stages(self) -> int:
        """Stages that compute tokens."""
        return 0

    @property
    def promised_ns(self) -> int:
        """The end of all accepted work (ns), for models on tables of latencies."""
        return 0

    def done_ns(self, model: int, *, waiting: bool) -> int:
        """The end (ns) of a request that arrives now, for models on tables of latencies."""
        raise ValueError(f"machine {self.index} has no table of latencies to predict ends from")

    def found_tokens(self, request: RoutedRequest) -> int:
        """Tokens of the prompt, in full blocks, that are cached here."""
        return 0

    @property
    def adapter_load(self) -> AdapterLoad:
        """Its LoRA adapters."""
        for core in self.cores:
            if core.adapters is not None:
                return core.adapters.load(core.batches)
        return NO_ADAPTERS

    def booked(self, request: RoutedRequest) -> Booked:
        """Only `gateway.routing.Seen` keeps it."""
        return Booked()

    def hosts(self, model: int) -> bool:
        """Whether requests for a model may be sent here."""
        return True

    def core_number(self, model: int) -> int:
        """The number of the engine core of a model, with ranks of the first of them; -1 where the machine has none."""
        return -1

    # Called from outside.

    def deliver(self, id_: int, kv_tokens: int = 0) -> None:
        """Queue a request with the KV of its first *kv_tokens* tokens."""
        raise NotImplementedError

    def give_up(self, id_: int) -> None:
        """The client of a request that is here has gone."""
        raise NotImplementedError

    def abort(self, now_ns: int) -> list[int]:
        """Stop at *now_ns* and return the requests that are here, running ones before waiting ones."""
        raise NotImplementedError


M = TypeVar("M", bound=AnyMachine)
"""A kind of machine: those of one stage of requests are of one kind."""
