"""One request whose prompt is computed on one machine and decoded on another, and the links that carry its KV."""

from __future__ import annotations

from sim.engine.machine.any_machine import AnyMachine
from sim.engine.machine.machine import Machine
from sim.engine.serve.engine_core import EngineCore
from sim.engine.serve.kv_connector import ASK, COLLECT, DROP
from sim.engine.spec.roles import HandoverSpec, KvPath
from sim.engine.tiers.links import Link, Links, Transfer


class Handover:
    """One request between the machine that computes its prompt and the one that decodes it."""

    __slots__ = (
        "carrier", "computed", "delivered", "found", "has_room", "keeper", "late", "lender", "number", "prompt_tokens",
        "receiver", "sender", "sends",
    )  # fmt: skip

    def __init__(self, number: int, receiver: Machine, sender: Machine, prompt_tokens: int) -> None:
        self.number = number
        self.prompt_tokens = prompt_tokens
        self.receiver = receiver
        self.sender = sender
        # Routers count the request at both until the receiver is asked for blocks and the sender has it.
        receiver.awaited += 1
        sender.awaited += 1
        sender.awaited_tokens += prompt_tokens
        receiver.awaited_prompts += prompt_tokens
        sender.awaited_prompts += prompt_tokens
        self.keeper: EngineCore | None = None
        """The engine core of the receiver that was asked for room."""
        self.lender: EngineCore | None = None
        """The engine core of the sender that computed the prompt."""
        self.computed = False
        """Whether it is known that the prompt has been computed."""
        self.delivered = False
        """Whether the sender has the request, or has computed its prompt (`deliver`)."""
        self.late = False
        """Whether the receiver was chosen when the prompt had been computed, although room is taken before."""
        self.has_room = False
        self.sends = False
        """Whether the KV is on the link."""
        self.carrier: tuple[Link, Transfer] | None = None
        """The link and the transfer that carry the KV, where there are any bytes to send."""
        self.found = 0
        """Tokens that the receiver has in its prefix cache."""

    def ask(self, id_: int) -> None:
        """Have the receiver take room."""
        self.receiver.awaited -= 1
        self.receiver.awaited_prompts -= self.prompt_tokens
        self.keeper = self.receiver.core_for(id_)
        self.receiver.post(self.keeper, id_, ASK, self.number)

    def deliver(self) -> None:
        """Note that the sender has the request."""
        if not self.delivered:
            self.delivered = True
            self.sender.awaited -= 1
            self.sender.awaited_tokens -= self.prompt_tokens
            self.sender.awaited_prompts -= self.prompt_tokens

    def end(self) -> None:
        """End it: a machine that the request has not reached does not await it any more."""
        if self.keeper is None:
            self.receiver.awaited -= 1
            self.receiver.awaited_prompts -= self.prompt_tokens
        self.deliver()

    def drop(self, id_: int) -> None:
        """Tell the receiver to free the blocks that it was asked for, if any."""
        if self.keeper is not None:
            self.receiver.post(self.keeper, id_, DROP)

    def collect(self, id_: int) -> None:
        """Tell the sender that it may free its blocks."""
        assert self.lender is not None
        self.sender.post(self.lender, id_, COLLECT)


class KvLinks:
    """The links between machines over which KV is sent."""

    def __init__(self, spec: HandoverSpec, links: Links) -> None:
        self._spec = spec
        self._of_run = links
        self._links: dict[tuple[int, ...], Link] = {}

    def path(self, sender: Machine, receiver: Machine) -> KvPath:
        """The way between the pools of two machines."""
        pools = self._spec.pools
        return self._spec.paths[pools[sender.index], pools[receiver.index]]

    def between(self, sender: Machine, receiver: Machine) -> Link:
        """The link from one machine to another; others may share it."""
        pools = self._spec.pools
        path, both = self.path(sender, receiver), (pools[sender.index], pools[receiver.index])
        key = {
            "sender": (*both, sender.index, -1),
            "receiver": (*both, -1, receiver.index),
            "pair": (*both, sender.index, receiver.index),
            "pools": (*both, -1, -1),
        }[path.shared]
        link = self._links[key] = self._of_run.of(key, path.link)
        return link

    def stop(self, machine: AnyMachine, now_ns: int) -> None:
        """Stop the links of *machine* alone, which is no more."""
        for key, link in self._links.items():
            if machine.index in key[2:]:
                link.stop(now_ns)

    def facts(self) -> list[dict[str, int]]:
        """Each link that carried anything: its pools and machines (-1: all of the pool), how long it was busy, its places."""
        return [
            {
                "from_pool": key[0], "to_pool": key[1], "sender": key[2], "receiver": key[3], "busy_ns": link.busy_ns,
                "places": link.spec.concurrent_transfers,
            }
            for key, link in sorted(self._links.items())
        ]  # fmt: skip
