"""The decoding method of a scenario beside its target: how many tokens a round drafts, what that takes, and whether it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hwmodels.cost import CostModel
from hwmodels.deployment import Deployment
from hwmodels.model.names import normalised
from hwmodels.totals import Totals, seen
from policies.acceptance import Acceptance, published
from policies.acceptance.process import IntArray
from policies.decoding import Speculative, best_table
from policies.view import Scheduler
from sim.errors import ScenarioError
from sim.scenario import named
from sim.scenario.assembly.acceptance import acceptance_of, check_recording, largest_k
from sim.scenario.assembly.draft import Drafting, drafting_by_own_layers, drafting_of
from sim.scenario.decoding import WITHOUT_DRAFT, DecodingSettings
from sim.scenario.settings import Scenario
from sim.scenario.workload import mean_context
from workloads import Workload

DRAFT_HAS_KV = ("draft_model", "eagle", "mtp")
"""Methods whose drafter writes KV for the tokens that it drafts (`VllmConfig.num_lookahead_tokens` of vLLM 0.32.0); also those that
vLLM schedules asynchronously (`VllmConfig.__post_init__`), and none else that are modelled here."""
_ADAPTIVE_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltDecoding:
    """The parts that a replica needs to speculate, and the facts about it for the results."""

    decoding: Speculative
    draft_cost: CostModel | None
    overhead_s: float
    manifest: dict[str, Any]
    notes: tuple[str, ...]


def drafting_for(
    settings: DecodingSettings, *, target: Deployment, find: Callable[[str], Path | None]
) -> Drafting | None:
    """The drafter that *settings* ask for beside *target*; None where nothing drafts but the tokens themselves.

    ValueError, in one sentence, for one that does not go with the target.
    """
    if settings.method == "autoregressive":
        return None
    if target.model.is_encoder:
        raise ValueError(f"decoding: {target.model.name} is an encoder and emits no tokens; leave decoding out")
    if settings.draft is not None:
        return drafting_of(settings.draft, target=target, find=find)
    if settings.method == "mtp":
        return drafting_by_own_layers(target, largest_k(_with_k_of_heads(settings, target)))
    return None


def build_decoding(
    settings: DecodingSettings,
    *,
    target: Deployment,
    drafting: Drafting | None,
    scheduler: Scheduler,
    workload: Workload,
    numbers: IntArray,
    find: Callable[[str], Path | None],
) -> BuiltDecoding | None:
    """The decoding method that *settings* describe beside the *target*; None for autoregressive decoding.

    *drafting* is its `drafting_for`; *numbers*: of the requests of *workload* in the whole run.
    ValueError, in one sentence, for what does not fit together.
    """
    if settings.method == "autoregressive":
        return None
    method, settings = settings.method, _with_k_of_heads(settings, target)
    draft_cost = None if drafting is None else drafting.cost
    most = _most_running(scheduler, workload)
    acceptance = acceptance_of(settings, find)
    positions = _positions(settings, acceptance)
    k = settings.num_speculative_tokens
    if k is None:
        k = acceptance.depth  # type: ignore[attr-defined]
    elif k == "adaptive":
        k = _adaptive(settings, acceptance, target, draft_cost, workload, most, positions)
    elif largest_k(settings) > positions:
        raise ValueError(
            f"decoding.num_speculative_tokens drafts {largest_k(settings)} tokens a round, and {_stated(settings)} says nothing "
            f"beyond the first {positions}; draft at most {positions}, or state the acceptance of more positions"
        )
    assert not isinstance(k, str)
    try:
        decoding = Speculative(method=method, num_speculative_tokens=k, acceptance=acceptance)
    except ScenarioError:
        raise
    except ValueError as error:
        raise ValueError(f"decoding: {error}") from None
    _check_table(decoding, most)
    if settings.acceptance is not None and settings.acceptance.recorded is not None:
        check_recording(decoding, workload, numbers)
    return BuiltDecoding(
        decoding=decoding,
        draft_cost=draft_cost,
        overhead_s=settings.overhead_s,
        manifest=_manifest(settings, decoding, drafting, workload),
        notes=(*_fewer_than_asked(settings, positions), *_measured_elsewhere(settings, target)),
    )


def _positions(settings: DecodingSettings, acceptance: Acceptance) -> int:
    """The positions, of those that a round may draft, that *acceptance* says anything about."""
    stated, asked = settings.acceptance, largest_k(settings)
    if stated is None or stated.policy is not None:
        return asked
    for limit in ("depth", "recorded_k"):
        asked = min(asked, getattr(acceptance, limit, asked))
    rates = getattr(acceptance, "rates", ())
    everywhere = not rates or (stated.distributions is not None and len(rates) == 1)
    return asked if everywhere else min(asked, len(rates))


def _stated(settings: DecodingSettings) -> str:
    """The key by which the acceptance is stated, with the name of a published one."""
    given = settings.acceptance
    assert given is not None
    (kind,) = set(given.model_dump(exclude_none=True)) - {"kind", "at_k", "recorded_k"}
    return f"decoding.acceptance.{kind}" + (f": {given.published}" if given.published else "")


def _fewer_than_asked(settings: DecodingSettings, positions: int) -> Iterator[str]:
    """A note where adaptive cannot choose as many drafted tokens as it may, for want of their acceptance."""
    if settings.num_speculative_tokens == "adaptive" and largest_k(settings) > positions:
        yield (
            f"decoding.num_speculative_tokens: adaptive chooses at most {positions} drafted token{'s' * (positions != 1)} and not "
            f"{largest_k(settings)}, because {_stated(settings)} says nothing beyond; acceptance: {{alpha: ...}}, or rates of more "
            f"positions, lets it choose more, and max_speculative_tokens: {positions} leaves this note out."
        )


def _measured_elsewhere(settings: DecodingSettings, target: Deployment) -> Iterator[str]:
    """A note where a published acceptance was measured with another model or another way of drafting."""
    if settings.acceptance is None or settings.acceptance.published is None:
        return
    found = published(settings.acceptance.published)
    same_model = f"{normalised(target.model.name)}-".startswith(f"{found.model}-")
    if not same_model or settings.method != found.method:
        yield (
            f"{_stated(settings)} was measured with {found.model} and the method {found.method}, and here {target.model.name} "
            f"decodes with {settings.method}, which may accept more or less; decoding.acceptance takes rates of your own "
            "(per_position, mean_length)."
        )


def _with_k_of_heads(settings: DecodingSettings, target: Deployment) -> DecodingSettings:
    """*settings* with as many drafted tokens as the target has layers of its own for mtp, where nothing else is said."""
    if settings.num_speculative_tokens is not None or settings.draft is not None or settings.method != "mtp":
        return settings
    return settings.model_copy(update={"num_speculative_tokens": target.model.mtp_layers or None})


def _check_table(decoding: Speculative, most: int) -> None:
    """ValueError where the table of drafted tokens ends before the largest batch, *most*."""
    last = decoding.table[-1][1]
    if last is not None and last < most:
        raise ValueError(
            f"decoding.num_speculative_tokens ends at a batch of {last}, but up to {most} sequences may run; "
            "raise its last bound or make it null"
        )


def _manifest(
    settings: DecodingSettings, decoding: Speculative, drafting: Drafting | None, workload: Workload
) -> dict[str, Any]:
    """The facts about the method that results keep."""
    found: dict[str, Any] = {"method": settings.method, "overhead_s": settings.overhead_s}
    if drafting is not None:
        found["draft"] = drafting.manifest
    if settings.acceptance is not None and settings.acceptance.published is not None:
        found["acceptance_source"] = published(settings.acceptance.published).source
    table = [list(row) for row in decoding.table]
    if settings.num_speculative_tokens == "adaptive":
        found["adaptive"] = {"context_tokens": mean_context(workload), "rows": table}
    found["num_speculative_tokens"] = table
    found["acceptance"] = _named(decoding.acceptance)
    drafted = sorted({k for _, _, k in decoding.table if k})
    found["mean_length"] = {str(k): decoding.acceptance.mean_length(k) for k in drafted}
    return found


def _most_running(scheduler: Scheduler, workload: Workload) -> int:
    """The largest batch there can be: the scheduler's own limit where it has one, and all requests otherwise."""
    limit = named.limit_of(scheduler, named.SEQUENCES)
    return max(len(workload) if limit is None else min(limit, len(workload)), 1)


def _adaptive(
    settings: DecodingSettings,
    acceptance: Acceptance,
    target: Deployment,
    draft_cost: CostModel | None,
    workload: Workload,
    most: int,
    k_max: int,
) -> Sequence[tuple[int, int | None, int]]:
    """Rows with the k that gives the most tokens per second at each batch, by the two cost models at a mean context."""
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
        passes = draft_cost is not None and settings.method not in WITHOUT_DRAFT
        return float(draft_cost.iteration_s(totals(1, batch))) if passes else 0.0  # type: ignore[union-attr]

    batches = [batch for batch in _ADAPTIVE_BATCHES if batch <= most]
    return best_table(step_s, draft_s, acceptance, k_max, batches, settings.overhead_s)


def _named(acceptance: Acceptance) -> str:
    text = repr(acceptance)
    return text if len(text) <= 400 else f"{type(acceptance).__name__}({len(text)} characters)"


def slots_of_drafts(scenario: Scenario, decoding: BuiltDecoding | None) -> dict[str, Any]:
    """The resources that drafting takes beside the tokens that are verified: KV slots of each sequence, and tokens of the
    budget."""
    method = scenario.decoding.method if scenario.decoding is not None else "autoregressive"
    if decoding is None or method not in DRAFT_HAS_KV:
        return {}
    # `SpeculativeConfig.max_num_new_slots_for_drafting` of vLLM 0.32.0.
    return {"lookahead_tokens": decoding.decoding.max_query_tokens - 1, "draft_slots": int(method == "draft_model")}
