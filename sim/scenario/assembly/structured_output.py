"""Grammars of requests, and what they take on the machines of a pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hwmodels.deployment import Deployment
from hwmodels.grammars import apply_s, grammar_terms
from policies.driving import driving
from sim.engine.batch.grammars import GrammarSpec
from sim.errors import ScenarioError
from sim.scenario.assembly.pools import PoolOf
from sim.scenario.settings import Scenario
from workloads import Stream, Workload, stream


def grammars_of(
    scenario: Scenario, deployment: Deployment, workload: Workload, scheduler: object
) -> GrammarSpec | None:
    """The grammars of all requests of *workload*, as a machine of *deployment* has them; None where the scenario has none.

    ScenarioError for what is not modelled.
    """
    asked = scenario.structured_output
    if asked is None:
        return None
    if scenario.parallel.data > 1 or driving(scheduler):
        what = "ranks of data-parallel attention" if scenario.parallel.data > 1 else "an installed scheduler"
        raise ScenarioError(
            f"{scenario.source}: structured_output: masks under {what} are not modelled; leave out one of the two "
            "(--set structured_output=null)"
        )
    terms, device = grammar_terms(asked.library), deployment.device
    host = None if device.host is None else device.host.bytes_per_s
    rng = stream(scenario.seed, Stream.GRAMMARS)
    constrained = rng.random(len(workload)) < asked.share
    weights = np.arange(1, asked.grammars + 1, dtype=float) ** -asked.exponent
    drawn = rng.choice(asked.grammars, len(workload), p=weights / weights.sum())
    compile_s = terms.compile_s if asked.compile_s is None else asked.compile_s
    return GrammarSpec(
        grammar=np.where(constrained, drawn, -1).tolist(),
        compile_s=(compile_s,) * asked.grammars,
        threads=asked.threads or terms.threads,
        kept=asked.kept or terms.kept,
        step_s=terms.step_s if asked.step_s is None else asked.step_s,
        mask_s=terms.mask_s if asked.mask_s is None else asked.mask_s,
        apply_s=apply_s(deployment.model.vocab, host_bytes_per_s=host, hbm_bytes_per_s=device.hbm_bytes_per_s)
        if asked.apply_s is None
        else asked.apply_s,
        overlapped=asked.overlapped,
        goes_first=scenario.stack.compiled_go_first,
    )


def about_grammars(scenario: Scenario, pools: Sequence[PoolOf]) -> Iterator[str]:
    """Notes on the origin of the times, and on what is left out."""
    asked = scenario.structured_output
    if asked is None:
        return
    terms = grammar_terms(asked.library)
    own = [name for name in ("compile_s", "step_s", "mask_s") if getattr(asked, name) is None]
    if own:
        yield f"structured_output: {', '.join(own)} as measured with {asked.library} {terms.release} (hwmodels/grammars.toml)."
    if any(pool.role == "decode" for pool in pools):
        yield "structured_output: machines that decode are taken to have compiled a grammar by the time the KV has arrived."
