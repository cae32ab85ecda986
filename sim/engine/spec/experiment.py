"""Everything that a run needs, resolved to objects."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Literal

from hwmodels.cost import CostModel
from policies.driving import driving
from policies.eviction import Eviction, RankFunction
from policies.ranks import Balance, PromptBalance, balance_of
from policies.routers import Knowledge, RouteFunction, Router, knowledge_of
from policies.view import ALWAYS_NS, PlanFunction, Scheduler, encodes
from sim.engine.batch.decoding import Decoding
from sim.engine.batch.grammars import GrammarSpec
from sim.engine.batch.prices import StageTable
from sim.engine.record.streaming import Stream
from sim.engine.spec.adapters import AdapterSpec
from sim.engine.spec.encoding import EncodeSpec
from sim.engine.spec.images import ImagesSpec
from sim.engine.spec.lifecycle import FleetSpec
from sim.engine.spec.roles import HandoverSpec, Part
from sim.engine.tiers.tiers import TierSpec, check_tiers
from workloads import Workload

Turn = Literal["rotation", "oldest"]
PrefixCacheKind = Literal["blocks", "tree"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftBehind:
    """Blocks that layers with a window leave in a cache: they are not read again, and are evicted in their turn.

    All blocks that a sequence has computed but the last *window_blocks* (which count as a part of the others, and for each
    sequence) leave *per_block* blocks each.
    """

    per_block: float
    window_blocks: int

    def __post_init__(self) -> None:
        if not (self.per_block > 0 and self.window_blocks >= 0):
            raise ValueError(
                f"per_block is above 0 and window_blocks at least 0; got {self.per_block!r} and {self.window_blocks!r}"
            )


@dataclass(frozen=True, kw_only=True)
class ReplicaSpec:
    """A model on a machine: the cost of its iterations, its scheduler, and its KV blocks."""

    cost: CostModel | StageTable
    scheduler: Scheduler | PlanFunction
    kv_blocks: int
    block_tokens: int = 16
    decoding: Decoding | None = None
    """None: one token a step."""
    draft_cost: CostModel | None = None
    """Cost of one step of the draft model; None where drafting is free or part of the round overhead."""
    speculation_overhead_s: float = 0.0
    """Fixed cost of every iteration that verifies drafted tokens."""
    lookahead_tokens: int = 0
    """KV slots that each sequence holds beyond the tokens of its round, where the scheduler takes blocks by chunk: for methods of
    drafting that write there."""
    draft_slots: int = 0
    """Tokens of an iteration's budget that drafting takes for each sequence, for schedulers that count them."""
    max_model_len: int | None = None
    """Tokens of prompt and output that the model can take; longer requests are rejected. None: no limit."""
    micro_batches: int | None = None
    """Micro-batches in flight; None: as many as there are pipeline stages."""
    model: int | None = None
    """Row of the workload's models whose requests it serves; None: all."""
    prefix_cache: PrefixCacheKind | None = None
    """Kind of prefix cache where the workload says what prompts have in common: `blocks` as in vLLM
    (`sim.engine.cache.block_cache`), `tree` as in SGLang (`sim.engine.cache.radix_cache`); None: no prefix cache."""
    eviction: Eviction | RankFunction | None = None
    """Which cached blocks go first; None: the least recently used."""
    prefix_drops_last: bool = False
    """The last block of a hit is computed again, as vLLM does for drafters that need the target's states (EAGLE, MTP)."""
    left_behind: LeftBehind | None = None
    """Blocks of layers with windows in the prefix cache; None: there are none, or they are not kept."""
    tiers: tuple[TierSpec, ...] = ()
    """KV memory behind the device, nearest first: what the device has evicted is loaded from there."""
    swaps: bool = False
    """Preempted sequences are moved to the `host` tier and back, and not computed again."""
    images: ImagesSpec | None = None
    """Images in prompts, which are encoded in its iterations; None: there are none."""
    block_bytes: int = 0
    """Bytes of a KV block on all devices together, for the links of tiers."""
    adapters: AdapterSpec | None = None
    """LoRA adapters that its requests may ask for (`Workload.adapter`); None: there are none."""
    grammars: GrammarSpec | None = None
    """Grammars that constrain answers; None: none does."""

    def __post_init__(self) -> None:
        for name, least in (("kv_blocks", 1), ("block_tokens", 1), ("lookahead_tokens", 0), ("draft_slots", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is at least {least}; got {getattr(self, name)}")
        if self.micro_batches is not None and self.micro_batches < 1:
            raise ValueError(f"micro_batches is at least 1; got {self.micro_batches}")
        if self.eviction is not None and self.prefix_cache is None:
            raise ValueError(
                "an eviction policy orders the blocks of a prefix cache, and there is none; give prefix_cache"
            )
        check_tiers(self.tiers)
        kinds = [tier.kind for tier in self.tiers]
        if self.tiers and self.block_bytes < 1:
            raise ValueError(f"block_bytes is at least 1 where there are tiers; got {self.block_bytes}")
        if self.tiers and self.prefix_cache is None and not self.swaps:
            raise ValueError(
                "tiers keep what a prefix cache gives up, and there is none; give prefix_cache or leave tiers out"
            )
        if self.swaps and "host" not in kinds:
            raise ValueError("sequences that give way are swapped to a tier of kind host, and there is none")
        if self.images is not None:
            self._check_images(self.images)
        if isinstance(self.cost, StageTable) and self.decoding is not None:
            raise ValueError("a table of single-pass latencies has no decode steps, and so no decoding method")

    def _check_images(self, images: ImagesSpec) -> None:
        how = encodes(self.scheduler)
        if how is None:
            raise ValueError(
                "this scheduler does not know of images that are encoded in steps; take vllm or sglang, or encode them on machines "
                "of their own"
            )
        if (images.budget is None) != (how == "as needed"):
            raise ValueError(
                "this scheduler has images encoded as its chunks need them, without a budget; leave budget_tokens out"
                if how == "as needed"
                else "this scheduler plans which images are encoded, and needs a budget"
            )

    @property
    def prompt_balance(self) -> Balance | None:
        """The rule by which the scheduler itself has prompts of ranks start together, if it has one."""
        return balance_of(self.scheduler, self.kv_blocks * self.block_tokens, self.max_model_len or ALWAYS_NS)


def _drafts_a_chain(decoding: Decoding | None) -> bool:
    """Whether each round drafts the same number of tokens, one after the other."""
    if decoding is None:
        return True
    k = decoding.k(1)
    return k == decoding.k(1 << 20) and decoding.query_tokens(1) == decoding.max_query_tokens == k + 1


@dataclass(frozen=True, kw_only=True)
class MachineSpec:
    """A machine whose stages several models share. A `ReplicaSpec` by itself is a machine with one model."""

    hosted: tuple[ReplicaSpec, ...]
    turn: Turn = "rotation"
    """The order in which models plan when the first stage is free: in rotation, or the one whose queue has the oldest head."""
    ranks: int = 1
    """Replicas of each model's attention (attention data parallelism): each has sequences, a queue and the `kv_blocks` of its
    `ReplicaSpec` to itself, and the i-th micro-batches of all ranks of a model begin and end together."""
    rank_router: Router | RouteFunction | None = None
    """Routes requests of the machine to ranks of their model; None for a machine without ranks."""
    prompt_balance: PromptBalance | None = None
    """The rule for the start of ranks' prompts; None: each rank's scheduler decides."""

    def __post_init__(self) -> None:
        if not self.hosted:
            raise ValueError("hosted needs at least one ReplicaSpec; got none")
        self._check_ranks()
        self._check_driven()
        self._check_adapters()
        if any(spec.images for spec in self.hosted) and (len(self.hosted) > 1 or self.ranks > 1):
            raise ValueError(
                "images that are encoded in steps of ranks, or of models that share a machine, are not modelled; encode them on "
                "machines of their own"
            )
        if self.ranks > 1 and any(spec.grammars is not None for spec in self.hosted):
            raise ValueError("grammars on machines with ranks are not modelled; leave out ranks or grammars")
        models = [spec.model for spec in self.hosted]
        if len(self.hosted) > 1 and (None in models or len(set(models)) < len(models)):
            raise ValueError(f"models that a machine hosts are different ones; got {models!r}")
        if len({spec.cost.n_stages for spec in self.hosted}) > 1:
            raise ValueError(
                "models that a machine hosts run on the same stages; got pipelines of "
                f"{', '.join(str(spec.cost.n_stages) for spec in self.hosted)} stages"
            )

    def _check_adapters(self) -> None:
        """ValueError where iterations with adapters are not modelled."""
        for spec in self.hosted:
            if spec.adapters is None:
                continue
            batches = self.ranks > 1 or spec.cost.n_stages > 1 or (spec.micro_batches or 1) > 1
            for what, there in (
                ("ranks, a pipeline or several micro-batches", batches),
                ("a table of single-pass latencies", isinstance(spec.cost, StageTable)),
            ):
                if there:
                    raise ValueError(f"adapters beside {what} are not modelled; leave out one of the two")

    def _check_driven(self) -> None:
        """ValueError for what cannot be had of a scheduler that drives itself."""
        for spec in self.hosted:
            if driving(getattr(spec.scheduler, "inner", None)):
                raise ValueError(
                    f"{type(spec.scheduler).__name__} wraps an installed scheduler, which keeps its own queue and its own memory "
                    "and answers to no other policy; leave out what wraps it"
                )
            if not driving(spec.scheduler):
                continue
            several = len(self.hosted) > 1 or self.ranks > 1 or spec.cost.n_stages > 1 or (spec.micro_batches or 1) > 1
            lacks = {
                "a pipeline, ranks or models that share a machine": several,
                "tiers": bool(spec.tiers),
                "an eviction policy": spec.eviction is not None,
                "grammars": spec.grammars is not None,
                "a table of single-pass latencies": isinstance(spec.cost, StageTable),
                "a tree of drafts, or a number of drafts that changes": not _drafts_a_chain(spec.decoding),
            }
            found = next((what for what, there in lacks.items() if there), None)
            if found is not None:
                raise ValueError(f"an installed scheduler does not serve {found}; take one of the simulator's own")

    def _check_ranks(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"ranks is at least 1; got {self.ranks}")
        if (self.ranks == 1) != (self.rank_router is None):
            raise ValueError(
                f"a rank_router is of a machine with ranks, and one with ranks has one; got {self.ranks} ranks"
            )
        if self.ranks == 1 and self.prompt_balance is not None:
            raise ValueError("prompt_balance is between ranks, and a machine without has nothing to balance")
        for spec in self.hosted:
            if spec.prompt_balance is not None and (self.ranks == 1 or self.prompt_balance is not None):
                raise ValueError(
                    f"{type(spec.scheduler).__name__} has prompts of ranks start together (enable_prefill_delayer), which is "
                    "modelled for machines with ranks and without prompt_balance; leave it out, or give ranks and no prompt_balance"
                )
        if self.ranks == 1:
            return
        for cost in [spec.cost for spec in self.hosted]:
            if not hasattr(cost, "common_step"):
                raise ValueError(
                    f"{cost!r} does not say what a step of {self.ranks} ranks takes; give a cost model with common_step"
                )
        knows = knowledge_of(self.rank_router)
        if knows is not None and knows != Knowledge(prefixes=True):
            raise ValueError(
                f"{self.rank_router!r} asks for more than loads and cached prefixes as they are, which no router inside a machine "
                "is told; take another as rank_router"
            )


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A workload, the machines that serve it, and the router between them."""

    workload: Workload
    replicas: tuple[ReplicaSpec | MachineSpec, ...]
    router: Router
    seed: int = 0
    horizon_ns: int | None = None
    """The instant at which the clock stops; None: when every request has ended."""
    admission_s: float = 0.0
    """Time from arrival until the router sees a request (tokenisation and the rest of the front end)."""
    admission_s_per_token: float = 0.0
    """The same for each prompt token."""
    admission_serial_s: float = 0.0
    """Time that the front end works on one request at a time, before the rest: in a burst each waits for those before it. All
    machines share the front end."""
    in_flight: int | None = None
    """Requests of a trace that its clients have in flight at most; the others wait in the client, as behind a semaphore, and are
    sent in the trace's order as requests end (`arrival_ns` of the columns). None: no limit."""
    stream: Stream = Stream()  # noqa: RUF009 (frozen, so that all may share one)
    """The tokens that reach a client together; it changes what clients measure, not what machines do."""
    handover: HandoverSpec | None = None
    """Prefill and decode on machines of their own; None: each machine serves its requests from beginning to end."""
    encode: EncodeSpec | None = None
    """A stage before the prompt is computed; None: there is none."""
    fleet: FleetSpec | None = None
    """Changes of machines in time; None: all of them are there from beginning to end."""

    def __post_init__(self) -> None:
        if not self.replicas:
            raise ValueError("replicas needs at least one ReplicaSpec; got none")
        for name in ("admission_s", "admission_s_per_token", "admission_serial_s"):
            value = getattr(self, name)
            if not (isfinite(value) and value >= 0):
                raise ValueError(f"{name} is a finite time of at least 0; got {value!r}")
        self._check_driven()
        if self.handover is not None and len(self.handover.roles) != len(self.replicas):
            raise ValueError(
                f"handover has roles for {len(self.handover.roles)} machines and there are {len(self.replicas)}; give one each"
            )
        if self.encode is not None:
            self._check_encode(self.encode)
        if self.fleet is not None:
            self._check_fleet(self.fleet)
        self._check_classes()
        self._check_grammars()
        if self.in_flight is not None:
            if self.in_flight < 1:
                raise ValueError(f"in_flight is at least 1; got {self.in_flight}")
            self.workload.behind(self.in_flight)

    def _check_classes(self) -> None:
        for policy in {id(each.eviction): each.eviction for each in self.hosted}.values():
            unknown = sorted({*(getattr(policy, "classes", None) or ())} - {*self.workload.classes})
            if unknown:
                named = ", ".join(self.workload.classes) or "no classes"
                raise ValueError(f"{policy!r} names the class {unknown[0]}, and the workload has {named}")

    def _check_grammars(self) -> None:
        for grammars in [core.grammars for core in self.hosted if core.grammars is not None]:
            if len(grammars.grammar) != len(self.workload):
                raise ValueError(
                    f"grammars has {len(grammars.grammar)} numbers for {len(self.workload)} requests; give one each"
                )

    def _check_driven(self) -> None:
        if not any(driving(core.scheduler) for machine in self.machines for core in machine.hosted):
            return
        if self.handover is not None:
            raise ValueError(
                "an installed scheduler does not hand requests over; leave out separate pools for prefill and decode"
            )
        knows = knowledge_of(self.router)
        if len(self.replicas) > 1 and knows is not None and knows.prefixes:
            raise ValueError(
                f"{self.router!r} asks for what each machine has cached, which an installed scheduler does not tell; take another"
            )

    def _check_encode(self, encode: EncodeSpec) -> None:
        if len(encode.sizes) != len(self.workload):
            raise ValueError(f"encode has {len(encode.sizes)} sizes for {len(self.workload)} requests; give one each")
        knows = knowledge_of(self.router)
        if knows is not None and (knows.event_delay_s or knows.poll_s):
            raise ValueError(
                f"{self.router!r} learns late of machines, which is not modelled behind a stage that encodes"
            )

    def _check_fleet(self, fleet: FleetSpec) -> None:
        n = len(self.replicas) + (0 if self.encode is None else len(self.encode.machines))
        if len(fleet.pools) != n:
            raise ValueError(f"fleet has pools for {len(fleet.pools)} machines and there are {n}; give one each")

    def part_of(self, index: int) -> Part | None:
        """The part of machine *index* in hand-over; None: it has none."""
        spec = self.handover
        if spec is None or spec.roles[index] == "both":
            return None
        return Part(
            role=spec.roles[index],
            drops_token=spec.first_token == "decode",
            gives_token=spec.first_token == "prefill",
            headroom_tokens=spec.headroom_tokens,
        )

    @property
    def machines(self) -> tuple[MachineSpec, ...]:
        """Every replica as a machine."""
        # Thousands of machines are usually described by one object.
        made = {
            key: spec if isinstance(spec, MachineSpec) else MachineSpec(hosted=(spec,))
            for key, spec in {id(spec): spec for spec in self.replicas}.items()
        }
        return tuple(made[id(spec)] for spec in self.replicas)

    @property
    def hosted(self) -> tuple[ReplicaSpec, ...]:
        """The models on machines, machine after machine, and each as often as it has ranks: row i of a result's replicas is engine
        core i."""
        return tuple(core for machine in self.machines for core in machine.hosted for _ in range(machine.ranks))
