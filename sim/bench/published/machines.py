"""The machines behind measured serving runs: a deployment under its stack's own scheduler and account of memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hwmodels.memory import LargestBatch, engine_defaults, memory_plan, stack_memory
from hwmodels.mtp import mtp_draft
from hwmodels.parallel import ParallelConfig
from hwmodels.stacks import stacks
from policies.decoding import Speculative
from sim.bench.published.servers import ServerSettings, published_by
from sim.engine import MachineSpec, ReplicaSpec
from sim.errors import RooftraceError
from sim.scenario.assembly.ranks import named_rank_router, rank_router_of

if TYPE_CHECKING:
    from hwmodels.deployment import Deployment
    from hwmodels.memory import MemoryPlan
    from hwmodels.model import ModelSpec
    from hwmodels.overheads import ServingStack
    from policies.acceptance import Acceptance


class Unmodelled(RooftraceError, ValueError):
    """A row that cannot be predicted; the message is the reason that reports count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Multi-token prediction as a server ran it."""

    k: int
    """Tokens drafted in a round."""
    acceptance: Acceptance


def devices_of(model: ModelSpec, *, tensor: int, pipeline: int, data: int, expert: int) -> ParallelConfig:
    """The split of *model* that a row states; of groups of experts as many as divide the devices. `Unmodelled` where it cannot
    be."""
    try:
        if model.experts is None:
            parallel = ParallelConfig(tensor=tensor, pipeline=pipeline)
        else:
            while (tensor * data) % expert:
                expert -= 1
            parallel = ParallelConfig(tensor=tensor, pipeline=pipeline, data=data, expert=expert)
        parallel.check(model)
    except ValueError as error:
        raise Unmodelled(str(error).partition(";")[0]) from None
    return parallel


def machine_of(
    deployment: Deployment,
    stack: ServingStack,
    settings: ServerSettings,
    *,
    concurrency: int,
    speculation: Speculation | None = None,
    prefills: bool = False,
) -> MachineSpec:
    """One replica of *deployment* behind *stack*; `Unmodelled` where it does not fit.

    At most *concurrency* requests are in flight. Groups of data-parallel attention are ranks, among which requests are spread as
    the stack does by itself; *prefills*: on a worker that only computes prompts.
    """
    tensor, ranks = deployment.parallel.tensor, deployment.parallel.data
    scheduler = settings.scheduler(stack.name, deployment.device, tensor=tensor, concurrency=concurrency, ranks=ranks)
    speculates: dict[str, Any] = {}
    draft = None
    try:
        if speculation is not None:
            draft = mtp_draft(deployment, speculation.k)
            speculates = {
                "decoding": Speculative(
                    method="mtp", num_speculative_tokens=speculation.k, acceptance=speculation.acceptance
                ),
                "draft_cost": draft.cost,
                "lookahead_tokens": speculation.k,
            }
        plan = deployment.fitted(
            _memory(deployment, stack, settings, concurrency, None if draft is None else draft.held)
        )
    except ValueError as error:
        why = str(error)
        raise Unmodelled(
            f"does not fit: {why.partition(':')[0]}" if "does not fit" in why else why.partition(";")[0]
        ) from None
    replica = ReplicaSpec(
        cost=deployment.cost,
        scheduler=scheduler,
        kv_blocks=plan.rank_blocks,
        block_tokens=plan.block_tokens,
        **speculates,
    )
    own_ranks = published_by(stack.name).prefill_ranks if prefills else None
    return MachineSpec(
        hosted=(replica,),
        ranks=ranks,
        rank_router=None if ranks == 1 else named_rank_router(own_ranks) if own_ranks else rank_router_of(stack.name),
        prompt_balance=settings.prompt_balance if ranks > 1 else None,
    )


def _memory(
    deployment: Deployment,
    stack: ServingStack,
    settings: ServerSettings,
    concurrency: int,
    draft: Deployment | None,
) -> MemoryPlan:
    defaults = engine_defaults(stack.name, deployment.device, tensor=deployment.parallel.tensor)
    published = stacks()[stack.name].published
    sequences = settings.max_sequences or min(defaults.max_num_seqs, max(concurrency, 256))
    return memory_plan(
        deployment,
        stack_memory(stack.name, None if published is None else published.memory_release),
        largest=LargestBatch(settings.token_budget or min(8192, defaults.max_num_batched_tokens), sequences),
        share=settings.memory_share,
        draft=draft,
    )
