"""The drafter of a target: a model of its own on its GPUs, a share of its step, or a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hwmodels.cost import CostModel
from hwmodels.deployment import Deployment, deploy
from hwmodels.latency_models import ShareOfTarget, StepTime
from hwmodels.memory import MemoryPlan
from hwmodels.model import load_model
from hwmodels.mtp import mtp_draft
from sim.scenario.decoding import Draft


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """The cost of a draft pass, what lies in memory for it, and what results say of it."""

    cost: CostModel
    manifest: dict[str, Any]
    held: Deployment | None = None
    """The layers whose weights and cache lie on the devices of the target's first stage; None: there are none."""
    takes: str = ""
    """A part of an error's sentence, on the memory that *held* takes."""
    beside: str = ""
    """The same of what it lies beside, and of the way out."""

    def check_fits(self, without: MemoryPlan, both: MemoryPlan) -> None:
        """ValueError where *both*, the memory with the drafter, has no block for a sequence; *without* is the memory without."""
        if both.rank_blocks < 1:
            left = max(without.stages[0].kv_bytes, 0.0) / 1e9
            raise ValueError(f"{self.takes}, but only {left:.1f} GB is left beside {self.beside}")


def drafting_of(settings: Draft, *, target: Deployment, find: Callable[[str], Path | None]) -> Drafting:
    """The drafter that *settings* describe for *target*; ValueError where a draft model does not go with the target."""
    if settings.model is not None:
        draft = _draft_deployment(settings, target, find)
        return Drafting(
            cost=draft.cost,
            held=draft,
            takes=f"decoding.draft.model: {draft.model.name} takes {draft.weight_bytes_per_device / 1e9:.1f} GB on each of its "
            f"{draft.parallel.tensor} GPUs",
            beside=f"{target.model.name}; take a smaller draft, raise decoding.draft.tensor or parallel.tensor, or a larger device",
            manifest={
                "model": draft.model.name,
                "source": draft.model.source,
                "tensor": draft.parallel.tensor,
                "weight_bytes_per_device": draft.weight_bytes_per_device,
                "kv_bytes_per_token_per_device": draft.kv_bytes_per_token_per_device,
            },
        )
    if settings.cost_ratio is not None:
        share = ShareOfTarget(target.cost, settings.cost_ratio)
        return Drafting(cost=share, manifest={"cost_ratio": settings.cost_ratio})
    assert settings.step_s is not None
    time = cast("CostModel", StepTime(step_s=settings.step_s))
    return Drafting(cost=time, manifest={"step_s": settings.step_s})


def drafting_by_own_layers(target: Deployment, k: int) -> Drafting:
    """The extra layers of *target* for multi-token prediction, drafting *k* tokens a round at most; ValueError where there are
    none."""
    try:
        found = mtp_draft(target, k)
    except ValueError as error:
        raise ValueError(
            f"decoding: {error}; give draft: {{cost_ratio: C}} or {{step_s: T}}, or take another method"
        ) from None
    held = found.held
    return Drafting(
        cost=found.cost,
        held=held,
        takes=f"decoding: the layers of {target.model.name} for multi-token prediction take "
        f"{held.weight_bytes_per_device / 1e9:.1f} GB on each GPU",
        beside="its others; raise parallel.tensor, or take a larger device",
        manifest={
            "own_layers": held.model.n_layers,
            "prompts_through": found.cost.modules,
            "weight_bytes_per_device": held.weight_bytes_per_device,
            "kv_bytes_per_token_per_device": held.kv_bytes_per_token_per_device,
        },
    )


def _draft_deployment(settings: Draft, target: Deployment, find: Callable[[str], Path | None]) -> Deployment:
    assert settings.model is not None
    try:
        model = load_model(find(settings.model) or settings.model)
    except ValueError as error:
        raise ValueError(f"decoding.draft.model: {error}") from None
    if model.vocab != target.model.vocab and not settings.allow_vocabulary_mismatch:
        raise ValueError(
            f"decoding.draft.model: {model.name} has a vocabulary of {model.vocab:,} tokens and "
            f"{target.model.name} one of {target.model.vocab:,}, so its tokens mean other words; take a "
            "draft of the same family, or set decoding.draft.allow_vocabulary_mismatch: true if only padding differs"
        )
    tensor = target.parallel.tensor if settings.tensor is None else settings.tensor
    if tensor > target.parallel.tensor:
        raise ValueError(
            f"decoding.draft.tensor is {tensor}, but the target's first stage has {target.parallel.tensor} GPUs; "
            "lower it or raise parallel.tensor"
        )
    if target.parallel.n_devices != target.parallel.tensor * target.parallel.pipeline:
        raise ValueError(
            "decoding.draft.model: the memory of a draft model beside expert- or data-parallel layers is not modelled; "
            "use draft: {cost_ratio: ...} or {step_s: ...}"
        )
    try:
        draft = deploy(
            model=model,
            hardware=target.device,
            parallel={"tensor": tensor},
            kv_precision=target.kv_precision,
            cost=target.made_by,
        )
    except ValueError as error:
        raise ValueError(f"decoding.draft: {error}") from None
    window, of_target = draft.cost.window_tokens, target.cost.window_tokens
    # Chunks of so many tokens are no window of as many.
    if window is not None and (window != of_target or type(window) is not type(of_target)):
        raise ValueError(
            f"decoding.draft.model: {model.name} attends to a window of {window} tokens and the target does not, which "
            "is not modelled; use draft: {cost_ratio: ...} or {step_s: ...}"
        )
    return draft
