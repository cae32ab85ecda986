"""The choices that an engine makes by itself where the settings of its scheduler are left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hwmodels.deployment import Deployment
from hwmodels.memory import EngineDefaults, engine_defaults
from hwmodels.model import ModelSpec
from sim.errors import ScenarioError
from sim.scenario import named
from sim.scenario.assembly.decoding import DRAFT_HAS_KV
from sim.scenario.settings import Scenario

_PLANNED_AS_IT_IS = "micro-batches of a pipeline are planned while others run as it is"
_TAKE_TURNS = "models that share a machine take turns, and no turn is planned ahead"


def left_to_the_engine(
    scenario: Scenario, deployment: Deployment, chosen: Mapping[str, int], *, shared: bool
) -> dict[str, Any]:
    """Settings by their dotted keys that the engine whose scheduler is asked for chooses by itself, where they are left out;
    *chosen* are those that were `auto`, *shared*: the machine serves other models too."""
    pipelined = scenario.parallel.pipeline > 1 or (scenario.micro_batches or 1) > 1
    around = _Around(
        scenario=scenario,
        deployment=deployment,
        no_overlap=_PLANNED_AS_IT_IS if pipelined else _TAKE_TURNS if shared else None,
    )
    found: dict[str, Any] = {}
    for at, settings in named.chain({"policy": scenario.scheduler.policy, **scenario.scheduler.settings}, "scheduler"):
        settings = {name: chosen.get(f"{at}.{name}", value) for name, value in settings.items()}
        policy = settings.get("policy")
        if isinstance(policy, str) and policy in _ENGINES:
            found |= {f"{at}.{name}": value for name, value in _ENGINES[policy](around, at, settings).items()}
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Around:
    """The facts that the choice depends on beside the settings of the scheduler."""

    scenario: Scenario
    deployment: Deployment
    no_overlap: str | None
    """Why no iteration is planned while the one before it runs; None where it may be."""

    def defaults(self, stack: str) -> EngineDefaults:
        return engine_defaults(stack, self.deployment.device, tensor=self.scenario.parallel.tensor)

    def refused(self, key: str, why: str) -> ScenarioError:
        return ScenarioError(f"{self.scenario.source}: {key}: {why}; leave it out")


def _of_sglang(around: _Around, at: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "chunked_prefill_size" not in settings:
        # arg_groups/parallel_hook.py of SGLang 0.5.23: ranks share it.
        share = around.scenario.parallel.data
        found["chunked_prefill_size"] = max(around.defaults("sglang").max_num_batched_tokens // share, 1)
    if around.no_overlap is not None:
        # arg_groups/overrides.py of SGLang 0.5.23, _pipeline_parallel_overlap_disable.
        found |= _without_overlap(around, at, settings, "disable_overlap_schedule")
    return found


def _of_trtllm(around: _Around, at: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    if around.no_overlap is None:
        return {}
    # Its loop for pipelines has no overlap (py_executor.py, `_executor_loop_pp`).
    return _without_overlap(around, at, settings, "disable_overlap_scheduler")


def _without_overlap(around: _Around, at: str, settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The setting *name*, which disables overlap, where it is left out; one that is neither true nor false the policy refuses."""
    if settings.get(name) is False:
        raise around.refused(f"{at}.{name}", str(around.no_overlap))
    return {} if name in settings else {name: True}


def _of_vllm(around: _Around, at: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    method = around.scenario.decoding.method if around.scenario.decoding is not None else "autoregressive"
    if method not in ("autoregressive", *DRAFT_HAS_KV):
        synchronous = f"vLLM does not schedule asynchronously with {method}"
    else:
        synchronous = around.no_overlap
    found: dict[str, Any] = {}
    if synchronous is not None:
        if settings.get("async_scheduling"):
            raise around.refused(f"{at}.async_scheduling", synchronous)
        found["async_scheduling"] = False
    return found | _limits_of_vllm(settings, around.defaults("vllm"), around.deployment.model)


def _limits_of_vllm(settings: Mapping[str, Any], limits: EngineDefaults, model: ModelSpec) -> dict[str, int]:
    """The limits that are left out of *settings*: `EngineArgs._set_default_max_num_seqs_and_batched_tokens_args`, 0.32.0."""
    found = {}
    sequences = settings.get("max_num_seqs", limits.max_num_seqs)
    tokens = settings.get("max_num_batched_tokens", limits.max_num_batched_tokens)
    if "max_num_batched_tokens" not in settings:
        longest = model.max_positions
        if longest and settings.get("enable_chunked_prefill") is False:
            # A whole prompt has to fit.
            tokens = max(tokens, longest)
        if longest and type(sequences) is int and sequences > 0:
            tokens = min(tokens, sequences * longest)
        found["max_num_batched_tokens"] = tokens
    if "max_num_seqs" not in settings:
        # What is no number of tokens is refused by the policy itself.
        found["max_num_seqs"] = min(sequences, tokens) if type(tokens) is int and tokens > 0 else sequences
    return found


_ENGINES: Mapping[str, Callable[[_Around, str, Mapping[str, Any]], dict[str, Any]]] = {
    "sglang": _of_sglang,
    "trtllm": _of_trtllm,
    "vllm": _of_vllm,
}
"""The choices of each engine by the name of the scheduler, at its dotted key."""
