"""The `decoding:` section of a scenario, and what it builds: a decoding method, the draft's cost, and its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, cast

from pydantic import Field, field_validator, model_validator

from sim.scenario.section import Section
from sim.text import shown

if TYPE_CHECKING:
    from hwmodels.cost import CostModel
    from hwmodels.deployment import Deployment
    from hwmodels.memory import MemoryPlan
    from policies.acceptance import Acceptance
    from policies.decoding import Speculative
    from policies.view import Scheduler
    from workloads import ClosedLoop, Trace

# `policies.decoding.METHODS`, which is not imported here to keep the start short; a test compares.
Method = Literal["autoregressive", "draft_model", "ngram", "medusa", "eagle", "mtp"]
Probability = Annotated[float, Field(ge=0, le=1)]
ADAPTIVE_K_MAX = 8
_WITHOUT_DRAFT = {"ngram": "n-gram look-up runs no model", "medusa": "Medusa's heads run inside the target's own step"}
_ADAPTIVE_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


class Beta(Section):
    """Every request has an alpha of its own from a Beta distribution."""

    mean: Probability
    sd: Annotated[float, Field(ge=0)]


class TwoStates(Section):
    """Acceptance in runs: a good and a bad state, by the chance of staying in each or by the autocorrelation."""

    alpha_good: Probability
    alpha_bad: Probability
    stay_good: Probability | None = None
    """Chance that the round after a good one is good."""
    stay_bad: Probability | None = None
    lag1: Annotated[float, Field(gt=-1, lt=1)] | None = None
    """Autocorrelation of accepted counts from one round to the next, in place of the two chances."""
    good_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of good rounds, with lag1; a half where it is left out."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        stays = [self.stay_good, self.stay_bad]
        if self.lag1 is None:
            if None in stays or self.good_share is not None:
                raise ValueError("two_state needs stay_good and stay_bad, or lag1 (and good_share)")
        elif stays != [None, None]:
            raise ValueError("two_state takes stay_good and stay_bad, or lag1, not both")
        return self


class Distributions(Section):
    """Next-token probabilities of target and draft: one list each, or one list per drafted position."""

    target: list[float] | list[list[float]]
    draft: list[float] | list[list[float]]


class TreeShape(Section):
    """A tree of candidates verified at once, and how often the guesses of each head are right."""

    accuracies: list[list[float]]
    """By head, then by rank of the guess, given that the guesses before it on the path were right."""
    nodes: Annotated[int, Field(ge=1)] | None = None
    """The best tree of that many nodes, root not counted."""
    branching: list[int] | None = None
    """A dense tree: children of every node, level by level."""
    paths: list[list[int]] | None = None
    """An explicit tree: each node as ranks of guesses from the root."""


class AcceptanceSettings(Section):
    """How many drafted tokens a round accepts: exactly one of the kinds."""

    alpha: Probability | None = None
    """Every drafted token alike, given that those before it were accepted."""
    per_position: list[float] | None = None
    """One rate for each drafted position; `kind` says which rate."""
    kind: Literal["conditional", "unconditional"] | None = None
    mean_length: float | None = None
    """Tokens per round, the target's own counted, when `at_k` are drafted."""
    at_k: Annotated[int, Field(ge=1)] | None = None
    """Drafted tokens behind mean_length; num_speculative_tokens where it is left out."""
    beta: Beta | None = None
    two_state: TwoStates | None = None
    recorded: Annotated[str, Field(min_length=1)] | None = None
    """A CSV with the columns request, round, accepted."""
    recorded_k: Annotated[int, Field(ge=1)] | None = None
    """Tokens drafted in the recording; num_speculative_tokens where it is left out."""
    distributions: Distributions | None = None
    tree: TreeShape | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        kinds = ("alpha", "per_position", "mean_length", "beta", "two_state", "recorded", "distributions", "tree")
        given = [kind for kind in kinds if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(kinds)}; got {' and '.join(given) or 'none'}")
        for key, of in (("kind", "per_position"), ("at_k", "mean_length"), ("recorded_k", "recorded")):
            if getattr(self, key) is not None and given != [of]:
                raise ValueError(f"{key} belongs to {of}; got it with {given[0]}")
        if self.per_position is not None and self.kind is None:
            raise ValueError(
                "per_position needs kind: conditional (given that those before were accepted) or unconditional"
            )
        return self


class Draft(Section):
    """What a draft pass costs: a model of its own, a share of the target's step, or a time."""

    model: Annotated[str, Field(min_length=1)] | None = None
    """Catalogue name or path to a config.json; its weights and KV cache take memory."""
    tensor: Annotated[int, Field(ge=1)] | None = None
    """GPUs of the replica that share the draft model; as many as the target's where it is left out."""
    allow_vocabulary_mismatch: bool = False
    """Accept a draft model whose vocabulary size is not the target's."""
    cost_ratio: Annotated[float, Field(ge=0)] | None = None
    """A pass takes this share of the target's plain step at the same batch."""
    step_s: Annotated[float, Field(ge=0)] | None = None
    """A pass takes this time at any batch."""

    @model_validator(mode="after")
    def _one_cost(self) -> Self:
        ways = ("model", "cost_ratio", "step_s")
        given = [way for way in ways if getattr(self, way) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(ways)}; got {' and '.join(given) or 'none'}")
        if self.model is None:
            misplaced = "tensor" if self.tensor is not None else "allow_vocabulary_mismatch"
            if self.tensor is not None or self.allow_vocabulary_mismatch:
                raise ValueError(f"{misplaced} belongs to a draft model; got it with {given[0]}")
        return self


class DecodingSettings(Section):
    """One token a step, or several drafted and verified at once. Names follow vLLM."""

    method: Method = "autoregressive"
    num_speculative_tokens: int | list[list[int | None]] | Literal["adaptive"] | None = None
    """Tokens drafted per round: a number, rows [lowest batch, highest batch, k] (null: no end), or adaptive."""
    max_speculative_tokens: Annotated[int, Field(ge=1)] | None = None
    """The most that adaptive may choose; 8 where it is left out."""
    acceptance: AcceptanceSettings | None = None
    rule: Literal["modified_rejection", "naive_match", "lenient"] | None = None
    """How distributions lead to acceptance; modified_rejection where it is left out."""
    b: Annotated[float, Field(gt=0)] | None = None
    """Upper end of the uniform number of rule lenient."""
    draft: Draft | None = None
    overhead_s: Annotated[float, Field(ge=0)] = 0.0
    """Fixed time of every step that verifies drafted tokens, beside target and draft."""

    @field_validator("num_speculative_tokens", mode="before")
    @classmethod
    def _a_number_or_rows(cls, value: Any) -> Any:
        rows = isinstance(value, list) and all(
            isinstance(row, list) and all(x is None or (isinstance(x, int) and not isinstance(x, bool)) for x in row)
            for row in value
        )
        if (
            value is not None
            and value != "adaptive"
            and not rows
            and (not isinstance(value, int) or isinstance(value, bool))
        ):
            raise ValueError(
                f"expected a whole number, rows such as [[1, 8, 5], [9, null, 0]], or adaptive; got {shown(value)}"
            )
        return value

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.method == "autoregressive":
            fields = type(self).model_fields
            given = [name for name in fields if name != "method" and getattr(self, name) != fields[name].default]
            if given:
                raise ValueError(f"method autoregressive drafts nothing, so {given[0]} means nothing; leave it out")
            return self
        if self.acceptance is None:
            raise ValueError(f"method {self.method} needs acceptance, such as acceptance: {{alpha: 0.8}}")
        if self.num_speculative_tokens is None and self.acceptance.tree is None:
            raise ValueError(f"method {self.method} needs num_speculative_tokens")
        if self.max_speculative_tokens is not None and self.num_speculative_tokens != "adaptive":
            raise ValueError("max_speculative_tokens is for num_speculative_tokens: adaptive")
        if self.method in _WITHOUT_DRAFT and self.draft is not None:
            raise ValueError(
                f"{_WITHOUT_DRAFT[self.method]}, so draft means nothing with method {self.method}; "
                "say what it costs as overhead_s"
            )
        if self.method not in _WITHOUT_DRAFT and self.draft is None:
            raise ValueError(f"method {self.method} needs draft: {{model: NAME}}, {{cost_ratio: C}} or {{step_s: T}}")
        if (self.rule == "lenient") != (self.b is not None):
            raise ValueError(f"rule lenient and b go together; got rule {self.rule} with b {self.b}")
        if self.rule in ("naive_match", "lenient") and self.acceptance.distributions is None:
            raise ValueError(
                f"what rule {self.rule} accepts follows from the two distributions; give acceptance.distributions, "
                "or the acceptance that the rule leads to and leave rule out"
            )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltDecoding:
    """What a replica needs to speculate, and what its results should say about it."""

    decoding: Speculative
    draft_cost: CostModel | None
    overhead_s: float
    plan: MemoryPlan
    manifest: dict[str, Any]


def build_decoding(
    settings: DecodingSettings,
    *,
    target: Deployment,
    plan: MemoryPlan,
    beside: Callable[[Deployment], MemoryPlan],
    scheduler: Scheduler,
    workload: Trace | ClosedLoop,
    find: Callable[[str], Path | None],
) -> BuiltDecoding | None:
    """The decoding method that *settings* describe beside the *target*; None for autoregressive decoding.

    *plan* is the memory without a draft, *beside* gives it with one.
    ValueError, in one sentence, for what does not fit together.
    """
    if settings.method == "autoregressive":
        return None
    if target.model.is_encoder:
        raise ValueError(f"decoding: {target.model.name} is an encoder and emits no tokens; leave decoding out")
    from policies.decoding import Speculative

    draft = None
    manifest: dict[str, Any] = {"method": settings.method, "overhead_s": settings.overhead_s}
    draft_cost: CostModel | None = None
    if settings.draft is not None:
        if settings.draft.model is not None:
            draft = _draft_deployment(settings.draft, target, find)
            plan = _beside(draft, target, plan, beside(draft))
            draft_cost = draft.cost
            manifest["draft"] = {
                "model": draft.model.name,
                "source": draft.model.source,
                "tensor": draft.parallel.tensor,
                "weight_bytes_per_device": draft.weight_bytes_per_device,
                "kv_bytes_per_token_per_device": draft.kv_bytes_per_token_per_device,
            }
        else:
            from hwmodels.latency_models import ShareOfTarget, StepTime

            if settings.draft.cost_ratio is not None:
                draft_cost = ShareOfTarget(target.cost, settings.draft.cost_ratio)
                manifest["draft"] = {"cost_ratio": settings.draft.cost_ratio}
            else:
                assert settings.draft.step_s is not None
                draft_cost = cast("CostModel", StepTime(step_s=settings.draft.step_s))
                manifest["draft"] = {"step_s": settings.draft.step_s}
    most = _most_running(scheduler, workload)
    acceptance = _acceptance(settings, find)
    k = settings.num_speculative_tokens
    if k is None:
        k = acceptance.depth  # type: ignore[attr-defined]
    elif k == "adaptive":
        k = _adaptive(settings, acceptance, target, draft_cost, workload, most)
        manifest["adaptive"] = {"context_tokens": mean_context(workload), "rows": [list(row) for row in k]}
    assert not isinstance(k, str)
    try:
        decoding = Speculative(method=settings.method, num_speculative_tokens=k, acceptance=acceptance)
    except ValueError as error:
        raise ValueError(f"decoding: {error}") from None
    last = decoding.table[-1][1]
    if last is not None and last < most:
        raise ValueError(
            f"decoding.num_speculative_tokens ends at a batch of {last}, but up to {most} sequences may run; "
            "raise its last bound or make it null"
        )
    if settings.acceptance is not None and settings.acceptance.recorded is not None:
        _check_recording(decoding, workload)
    manifest["num_speculative_tokens"] = [list(row) for row in decoding.table]
    manifest["acceptance"] = _named(acceptance)
    manifest["mean_length"] = {
        str(k): acceptance.mean_length(k) for k in sorted({k for _, _, k in decoding.table if k})
    }
    return BuiltDecoding(
        decoding=decoding,
        draft_cost=draft_cost,
        overhead_s=settings.overhead_s,
        plan=plan,
        manifest=manifest,
    )


def _draft_deployment(settings: Draft, target: Deployment, find: Callable[[str], Path | None]) -> Deployment:
    from hwmodels.deployment import deploy
    from hwmodels.model import load_model

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
    window = draft.cost.window_tokens
    if window is not None and window != target.cost.window_tokens:
        raise ValueError(
            f"decoding.draft.model: {model.name} attends to a window of {window} tokens and the target does not, which "
            "is not modelled; use draft: {cost_ratio: ...} or {step_s: ...}"
        )
    return draft


def _beside(draft: Deployment, target: Deployment, plan: MemoryPlan, both: MemoryPlan) -> MemoryPlan:
    """*both*, where the draft's weights and cache fit on the GPUs of the target's first stage; *plan* is without it."""
    if both.device_blocks - both.null_blocks < 1:
        raise ValueError(
            f"decoding.draft.model: {draft.model.name} takes {draft.weight_bytes_per_device / 1e9:.1f} GB on each of "
            f"its {draft.parallel.tensor} GPUs, but only {max(plan.stages[0].kv_bytes, 0.0) / 1e9:.1f} GB is left beside "
            f"{target.model.name}; take a smaller draft, raise decoding.draft.tensor or parallel.tensor, or a larger device"
        )
    return both


def _acceptance(settings: DecodingSettings, find: Callable[[str], Path | None]) -> Acceptance:
    from policies import acceptance as kinds

    given = settings.acceptance
    assert given is not None
    k = settings.num_speculative_tokens
    largest = _largest_k(settings)
    key = "decoding.acceptance"
    try:
        if given.alpha is not None:
            return kinds.Iid(alpha=given.alpha)
        if given.per_position is not None:
            key += ".per_position"
            assert given.kind is not None
            return kinds.PerPosition(rates=tuple(given.per_position), kind=given.kind)
        if given.mean_length is not None:
            key += ".mean_length"
            if given.at_k is None and not isinstance(k, int):
                raise ValueError("say with how many drafted tokens it was measured, as at_k")
            return kinds.MeanLength(mean=given.mean_length, at_k=given.at_k or largest)
        if given.beta is not None:
            key += ".beta"
            return kinds.BetaAlpha(mean=given.beta.mean, sd=given.beta.sd)
        if given.two_state is not None:
            key += ".two_state"
            return _two_state(given.two_state, largest)
        if given.recorded is not None:
            key += ".recorded"
            return kinds.read_recorded(_file(given.recorded, find), recorded_k=given.recorded_k or largest)
        if given.distributions is not None:
            key += ".distributions"
            return kinds.FromDistributions(
                target=given.distributions.target,
                draft=given.distributions.draft,
                rule=settings.rule or "modified_rejection",
                b=settings.b,
            )
        assert given.tree is not None
        key += ".tree"
        if settings.method in ("ngram", "draft_model"):
            raise ValueError(
                f"a tree of candidates comes from heads, and method {settings.method} drafts a chain; "
                "use medusa, eagle or mtp"
            )
        return kinds.Tree(
            accuracies=tuple(map(tuple, given.tree.accuracies)),
            nodes=given.tree.nodes,
            branching=None if given.tree.branching is None else tuple(given.tree.branching),
            paths=None if given.tree.paths is None else tuple(map(tuple, given.tree.paths)),
        )
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _two_state(settings: TwoStates, at_k: int) -> Acceptance:
    from policies.acceptance import TwoState

    if settings.lag1 is None:
        assert settings.stay_good is not None
        assert settings.stay_bad is not None
        return TwoState(
            alpha_good=settings.alpha_good,
            alpha_bad=settings.alpha_bad,
            stay_good=settings.stay_good,
            stay_bad=settings.stay_bad,
        )
    return TwoState.from_autocorrelation(
        alpha_good=settings.alpha_good,
        alpha_bad=settings.alpha_bad,
        lag1=settings.lag1,
        at_k=at_k,
        good_share=0.5 if settings.good_share is None else settings.good_share,
    )


def _file(name: str, find: Callable[[str], Path | None]) -> Path:
    found = find(name)
    if found is None:
        raise ValueError(f"{name} does not exist, neither beside the scenario nor here")
    return found


def _largest_k(settings: DecodingSettings) -> int:
    k = settings.num_speculative_tokens
    if k == "adaptive":
        return settings.max_speculative_tokens or ADAPTIVE_K_MAX
    if isinstance(k, list):
        return max((row[2] or 0 for row in k if len(row) == 3), default=1)
    return k or 1  # type: ignore[return-value]


def _most_running(scheduler: Scheduler, workload: Trace | ClosedLoop) -> int:
    """The largest batch there can be: the scheduler's own limit where it has one, and all requests otherwise."""
    at: Any = scheduler
    limit = len(workload)
    while at is not None:
        for name in ("max_sequences", "batch_size"):
            limit = min(limit, getattr(at, name, None) or limit)
        at = getattr(at, "inner", None)
    return max(limit, 1)


def mean_context(workload: Trace | ClosedLoop) -> int:
    """Tokens that a decode step of this workload attends to on average: steps weigh requests by their outputs. The mean prompt
    of a workload without outputs."""
    outputs = workload.output_tokens
    total = float(outputs.sum())
    if not total:
        return max(1, round(float(workload.prompt_tokens.mean()))) if len(outputs) else 1
    return max(1, round(float(((workload.prompt_tokens + 0.5 * outputs) * outputs).sum()) / total))


def _adaptive(
    settings: DecodingSettings,
    acceptance: Acceptance,
    target: Deployment,
    draft_cost: CostModel | None,
    workload: Trace | ClosedLoop,
    most: int,
) -> Sequence[tuple[int, int | None, int]]:
    """Rows with the k that gives the most tokens per second at each batch, by the two cost models at a mean context."""
    from hwmodels.totals import Totals, seen
    from policies.decoding import best_table

    context = mean_context(workload)
    cost = target.cost
    window = cost.window_tokens

    def totals(width: int, batch: int) -> Totals:
        kv = batch * (context + width)
        within = 0 if window is None else batch * seen(context + width, window)
        return Totals(batch * width, 0, 0, 0, 0, batch, kv, batch * width, 0, within)

    def step_s(width: int, batch: int) -> float:
        work = totals(width, batch)
        return sum(float(cost.iteration_s(work, stage)) for stage in range(cost.n_stages))

    def draft_s(batch: int) -> float:
        passes = draft_cost is not None and settings.method not in _WITHOUT_DRAFT
        return float(draft_cost.iteration_s(totals(1, batch))) if passes else 0.0  # type: ignore[union-attr]

    k_max = _largest_k(settings)
    for limit in ("depth", "recorded_k"):
        k_max = min(k_max, getattr(acceptance, limit, k_max))
    rates = getattr(acceptance, "rates", None)
    if rates is not None and (
        settings.acceptance is None or settings.acceptance.distributions is None or len(rates) > 1
    ):
        k_max = min(k_max, len(rates))
    batches = [batch for batch in _ADAPTIVE_BATCHES if batch <= most]
    return best_table(step_s, draft_s, acceptance, k_max, batches, settings.overhead_s)


def _check_recording(decoding: Speculative, workload: Trace | ClosedLoop) -> None:
    """Refuse a recording that may end before its request does, at the smallest k that the run may use."""
    import numpy as np

    rows = decoding.acceptance.rows  # type: ignore[attr-defined]
    smallest = min(k for _, _, k in decoding.table)
    reach = np.array([sum(min(accepted, smallest) + 1 for accepted in row) for row in rows])
    # The prompt's iteration emits the first token.
    needed = np.maximum(np.asarray(workload.output_tokens) - 1, 0)
    row = np.arange(len(needed)) % len(rows)
    short = np.flatnonzero(needed > reach[row])
    if short.size:
        request = int(short[0])
        which = int(row[request])
        raise ValueError(
            f"decoding.acceptance.recorded: request {request} needs {int(needed[request])} tokens from rounds, but row "
            f"{which} of the recording ends after {len(rows[which])} rounds with {int(reach[which])}; "
            "record longer answers or shorten the outputs"
        )


def _named(acceptance: Acceptance) -> str:
    text = repr(acceptance)
    return text if len(text) <= 400 else f"{type(acceptance).__name__}({len(text)} characters)"
