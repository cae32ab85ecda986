"""The effect of each change of a deployment for the same traffic: candidates run by a sweep, judged by the SLO, ranked by cost."""

from __future__ import annotations

import json
import math
import os
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from hwmodels.adapters import slot_rules
from hwmodels.deployment import Deployment
from hwmodels.device import device_catalogue
from hwmodels.overheads import serving_stacks
from policies.acceptance import PUBLISHED
from sim.errors import RooftraceError
from sim.launch.drafters import published_heads
from sim.scenario import Scenario
from sim.scenario.adapters import AdapterSettings
from sim.scenario.assembly.deployment import deployment_of
from sim.scenario.assembly.memory import memory_plan_of
from sim.scenario.assembly.prefix_cache import caches
from sim.scenario.assembly.prices import price_of
from sim.scenario.workload import workload_of
from sim.study import slots
from sim.study.notes import Noted
from sim.study.optimize import judged
from sim.study.points import META, Sweep
from sim.study.progress import Progress
from sim.study.rates import ATTAINMENT, REPLICATIONS, Judgement, Target, target_of
from sim.study.sweep import SweepResult, sweep
from sim.study.table import HALF_WIDTH, flatten
from sim.text import unknown
from workloads import Workload
from workloads.reuse import reuse

DEFAULT_SLO: Mapping[str, float] = {"slo.ttft_p95_s": 1.0, "slo.tpot_p95_s": 0.05}
"""The limits where the scenario has no SLO."""
MOST_DEVICES = 5
"""Devices that are tried beside the scenario's own where other changes are tried too."""
MOST = 21
"""Candidates at most that are run, the scenario itself among them, where the groups do not propose more."""
MOST_TIMES = 16
"""The largest multiple of the scenario's machines that is tried, where fewer do not keep the SLO."""
HOST_GIB = 200.0
"""Host memory of a machine, where it is tried as a tier."""
_SLOTS = "adapters.max_loras"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A change: the scenario with other settings."""

    group: str
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def assignments(self) -> list[str]:
        """The settings as `--set` takes them."""
        return assignments(self.settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A candidate that ran. Figures are those of the run with the scenario's own seed; the verdict is over all replications."""

    candidate: Candidate
    judgement: Judgement
    figures: Mapping[str, Any]
    """Its summary by dotted keys, as `rooftrace run` gives it."""
    half_widths: Mapping[str, float | None]
    """Half the width of the interval of the mean over replications, by the same keys; None where these do not differ."""
    e2el_s: tuple[float | None, ...]
    """The mean end-to-end latency under each seed; None where no request finished."""
    as_now: bool
    """Whether all its figures are those of the scenario as it is."""

    @property
    def keeps(self) -> bool:
        return self.judgement.met is True

    @property
    def usd_per_hour(self) -> float | None:
        return self.figures.get("costs.usd_per_hour")


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A candidate that cannot be, and why."""

    candidate: Candidate
    reason: str


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The outcome of `advise`."""

    base: Scenario
    """The scenario with the SLO that candidates are held to."""
    assumed: Mapping[str, float]
    """The SLO that was assumed; empty where the scenario has its own."""
    target: Target
    rows: tuple[Row, ...]
    """All that ran: those that keep the SLO first, by cost an hour; the others after them, by cost too."""
    refused: tuple[Refused, ...]
    said: tuple[str, ...]
    """The candidates that were not tried, and why."""
    notes: tuple[Noted, ...]
    replications: int

    @property
    def now(self) -> Row:
        """The scenario as it is."""
        return next(row for row in self.rows if not row.candidate.settings)

    @property
    def least(self) -> int | None:
        """The least number of the scenario's own machines that keeps the SLO; None where none of those tried does."""
        kept = [_machines(self.base, row.candidate) for row in self.rows if row.keeps and _only_machines(row.candidate)]
        return min(kept, default=None)

    @property
    def least_is_known(self) -> bool:
        """Whether so many were tried that no fewer, or if none keeps the SLO no more, are left to try."""
        return self.base.autoscale is None and not _more_machines(self.base, self.rows)

    @property
    def adapter_slots(self) -> slots.SlotAdvice | None:
        """How many slots to have for adapters; None where no number was tried beside the scenario's own."""
        tried = list(_of_slots(self.base, self.rows))
        return None if len(tried) < 2 else slots.advice(tried, _slots_now(self.base))

    def ranks(self) -> list[int | None]:
        """The place of each row by cost among those that keep the SLO, the same for those that cost the same; None for others."""
        costs = sorted(row.usd_per_hour for row in self.rows if row.keeps and row.usd_per_hour is not None)
        return [
            costs.index(row.usd_per_hour) + 1 if row.keeps and row.usd_per_hour is not None else None
            for row in self.rows
        ]


def assignments(settings: Mapping[str, Any]) -> list[str]:
    """*settings* as `--set` takes them."""
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()]


def command(scenario: str, assignments: Sequence[str]) -> str:
    """The command that runs *scenario*, a file or nothing, with settings changed."""
    sets = [text for each in assignments for text in ("--set", shlex.quote(each))]
    return " ".join(["rooftrace run", *filter(None, [scenario and shlex.quote(scenario)]), *sets])


def advise(
    scenario: Scenario,
    *,
    only: Sequence[str] = (),
    attainment: float = ATTAINMENT,
    replications: int = REPLICATIONS,
    out: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    progress: Callable[[Progress], None] | bool | None = None,
) -> Advice:
    """Run *scenario* and the changes of *only* (names of `GROUPS`; all of them without) on its workload, and rank them.

    A scenario without an SLO is held to `DEFAULT_SLO`. *out* keeps the runs, and the same call goes on there. RooftraceError for an
    unknown group, for a scenario of several pools, whose changes are each pool's own, and where the scenario itself cannot run.
    """
    for name in only:
        if name not in GROUPS:
            raise RooftraceError(unknown(f"{name} is not a group of changes", name, GROUPS))
    if scenario.pools is not None or scenario.placement is not None:
        raise RooftraceError(
            "advise changes a deployment of one kind of machines, and the scenario has pools; vary the settings of each pool with "
            "rooftrace sweep --axis pools.NAME.hardware=... or rooftrace optimize --axis ..."
        )
    assumed = {} if scenario.has_limits else dict(DEFAULT_SLO)
    base = scenario.with_values(assumed)
    found = _proposed(base, only or tuple(GROUPS))
    target = target_of(base, attainment)
    tried = [Candidate(group="now", name="as it is"), *found.candidates]
    with tempfile.TemporaryDirectory(prefix="rooftrace-advise-") if out is None else nullcontext(out) as folder:
        while True:
            points = [{f"{META}change": each.name, **each.settings} for each in tried]
            plan = Sweep(base=base, points=points, replications=replications)
            result = sweep(plan, out=folder, jobs=jobs, progress=progress)
            rows, refused = _rows(result, tried, target, base)
            more = _more_machines(base, rows) if not only or "machines" in only else []
            more += _more_of_other_devices(base, rows)
            more += _more_slots(base, rows, refused) if not only or "adapters" in only else []
            more = more[: max(0, MOST - len(tried))]
            if not more:
                return Advice(
                    base=base, assumed=assumed, target=target, rows=_ranked(rows), refused=(*found.refused, *refused),
                    said=tuple(found.said), notes=(*_by_change(result.notes), *found.assumptions(rows)), replications=replications,
                )  # fmt: skip
            tried += more


def proposals(scenario: Scenario, groups: Sequence[str]) -> list[Candidate]:
    """The changes that *groups* (names of `GROUPS`) propose for *scenario*, of one kind of machines; none has been tried."""
    return _proposed(scenario, groups).candidates


def _proposed(base: Scenario, groups: Sequence[str]) -> _Found:
    found = _Found(base, alone=len(groups) == 1)
    for name, (_, propose) in GROUPS.items():
        if name in groups:
            found.group = name
            propose(found)
    return found


def _reason(error: str, base: Scenario) -> str:
    return error.removeprefix(f"{base.source}: ")


def _rows(
    result: SweepResult, tried: Sequence[Candidate], target: Target, base: Scenario
) -> tuple[list[Row], list[Refused]]:
    rows: list[Row] = []
    refused: list[Refused] = []
    table = result.table.to_dict("records")
    for candidate, judgement, summaries, row in zip(
        tried, judged(result, target), result.summaries(), table, strict=True
    ):
        if judgement is None or summaries[0] is None:
            refused.append(Refused(candidate=candidate, reason=_reason(str(row["error"]), base)))
            if not candidate.settings:
                raise RooftraceError(str(row["error"]))
            continue
        figures = flatten(summaries[0])
        figures.pop("wall_s", None)
        half_widths = {
            key: None if (half := row.get(key + HALF_WIDTH)) is None or half != half else float(half) for key in figures
        }
        as_now = bool(rows) and figures == rows[0].figures
        rows.append(
            Row(
                candidate=candidate,
                judgement=judgement,
                figures=figures,
                half_widths=half_widths,
                as_now=as_now,
                e2el_s=tuple(each["e2el_s"]["mean"] for each in summaries if each is not None),
            )
        )
    return rows, refused


def _ranked(rows: Sequence[Row]) -> tuple[Row, ...]:
    def place(row: Row) -> tuple[Any, ...]:
        usd = row.usd_per_hour
        return not row.keeps, usd is None, usd or 0.0, bool(row.candidate.settings)

    return tuple(sorted(rows, key=place))


def _only_machines(candidate: Candidate) -> bool:
    return set(candidate.settings) <= {"replicas"}


def _machines(base: Scenario, candidate: Candidate) -> int:
    return candidate.settings.get("replicas", base.replicas)


def _more_machines(base: Scenario, rows: Sequence[Row]) -> list[Candidate]:
    """The next number of the scenario's machines to try on the way to the least that keeps the SLO; none when it is found."""
    if base.autoscale is not None:
        return []
    met = {_machines(base, row.candidate): row.keeps for row in rows if _only_machines(row.candidate)}
    least = min((n for n, keeps in met.items() if keeps), default=None)
    if least is None:
        n = 2 * max(met)
        return [_of_machines(n)] if n <= MOST_TIMES * base.replicas else []
    below = max((n for n, keeps in met.items() if not keeps and n < least), default=0)
    # Of many machines the least is found within a fiftieth of them.
    return [] if least - below <= max(1, least // 50) else [_of_machines((least + below) // 2)]


def _more_of_other_devices(base: Scenario, rows: Sequence[Row]) -> list[Candidate]:
    """Twice the machines of each other device that does not keep the SLO, while they cost less than what does."""
    kept = [row.usd_per_hour for row in rows if row.keeps and row.usd_per_hour is not None]
    now = rows[0].usd_per_hour
    most_usd = min(kept, default=now)
    tried = [row.candidate.settings for row in rows]
    found = []
    for row in rows:
        settings = row.candidate.settings
        if not set(settings) <= {"hardware", "replicas"} or "hardware" not in settings or row.keeps:
            continue
        n = 2 * _machines(base, row.candidate)
        more = {**settings, "replicas": n}
        if (
            most_usd is not None
            and row.usd_per_hour is not None
            and 2 * row.usd_per_hour < most_usd
            and more not in tried
        ):
            found.append(Candidate(group="devices", name=f"{n} machines of {settings['hardware']}", settings=more))
    return found


def _slots_now(base: Scenario) -> int:
    """Slots for adapters on the device; 0 without adapters."""
    return 0 if base.adapters is None else base.adapters.slots(slot_rules(base.stack_name)).max_loras


def _most_slots(base: Scenario) -> int:
    """Slots beside which none waits: one for each adapter, and for the base model where it takes one."""
    return 0 if base.adapters is None else base.adapters.count + slot_rules(base.stack_name).base_has_slot


def _slots_of(base: Scenario, candidate: Candidate) -> int | None:
    """The slots for adapters of a *candidate* that changes nothing else; None for any other."""
    n = candidate.settings.get(_SLOTS)
    if base.adapters is None or (candidate.settings and n is None):
        return None
    return _slots_now(base) if n is None else n


def _of_slots(base: Scenario, rows: Sequence[Row]) -> Iterator[slots.Slots]:
    """The numbers of slots that ran."""
    for row in rows:
        n, figures = _slots_of(base, row.candidate), row.figures
        if n is None:
            continue
        blocks, tokens, a_slot = figures.get("memory.blocks"), None, None
        if blocks:
            tokens = blocks * figures["memory.block_tokens"]
            a_slot = figures["memory.adapter_bytes"] / n * tokens / figures["memory.kv_bytes"]
        yield slots.Slots(
            n=n,
            keeps=row.keeps,
            e2el_s=tuple(math.inf if each is None else each for each in row.e2el_s),
            kv_tokens=tokens,
            kv_tokens_a_slot=a_slot,
            figures=figures,
            half_widths=row.half_widths,
        )


def _more_slots(base: Scenario, rows: Sequence[Row], refused: Sequence[Refused]) -> list[Candidate]:
    """The next number of slots for adapters to try on the way to the best; none when it is found, or where none was proposed."""
    tried = list(_of_slots(base, rows))
    if base.adapters is None or len(tried) < 2:
        return []
    cannot = [n for n in (_slots_of(base, each.candidate) for each in refused) if n is not None]
    n = slots.next_number(tried, cannot, _most_slots(base))
    return [] if n is None else [_with_slots(base.adapters, n)]


def _with_slots(adapters: AdapterSettings, n: int) -> Candidate:
    name = f"{n} adapter slot{'s' * (n != 1)}"
    return Candidate(group="adapters", name=name, settings=slots.settings_of(adapters, n))


def _by_change(notes: Sequence[Noted]) -> tuple[Noted, ...]:
    """*notes* with the names of the changes that they hold for, in place of their settings."""
    key = f"{META}change="
    return tuple(replace(each, where=tuple(where.rpartition(key)[2] for where in each.where)) for each in notes)


def _of_machines(n: int) -> Candidate:
    return Candidate(group="machines", name=f"{n} machine{'s' * (n != 1)}", settings={"replicas": n})


class _Found:
    """Collects what the groups of changes propose for a scenario."""

    def __init__(self, base: Scenario, *, alone: bool) -> None:
        self.base, self.group = base, ""
        self.alone = alone
        """Whether one group alone proposes."""
        self.deployment: Deployment = deployment_of(base)
        self.workload = workload_of(base)
        self.candidates: list[Candidate] = []
        self.refused: list[Refused] = []
        self.said: list[str] = []
        self.sources: dict[str, str] = {}
        """Where the acceptance of each candidate that drafts tokens comes from, by the candidate's name."""

    def propose(self, name: str, **settings: Any) -> None:
        """*settings* with `__` for each dot."""
        dotted = {key.replace("__", "."): value for key, value in settings.items()}
        self.candidates.append(Candidate(group=self.group, name=name, settings=dotted))

    def drafted(self, name: str, decoding: Mapping[str, Any], source: str) -> None:
        """Speculation whose acceptance is taken from *source*."""
        self.propose(name, decoding=decoding)
        self.sources[name] = source

    def assumptions(self, rows: Sequence[Row]) -> tuple[Noted, ...]:
        """The assumptions of the acceptance of candidates that ran."""
        ran = [row.candidate.name for row in rows if row.candidate.name in self.sources]
        return tuple(
            Noted(
                note=f"acceptance is assumed: {self.sources[name]}; your requests decide what yours is",
                where=(name,), n=1, of=len(rows),
            )
            for name in ran
        )  # fmt: skip

    @property
    def names_blocks(self) -> bool:
        """Whether the workload says which prompts begin alike."""
        return self.workload.prefix_block_tokens is not None


def _by_machines(found: _Found) -> None:
    n = found.base.replicas
    if found.base.autoscale is not None:
        found.said.append("machines: autoscale says how many there are; vary autoscale.* with rooftrace sweep.")
        return
    found.candidates += [_of_machines(each) for each in (n - 1, n + 1) if each > 0]


def _by_device(found: _Found) -> None:
    """Devices that hold the model: first those with half of the memory bandwidth at least, by bandwidth for their price."""
    here = found.deployment.device
    holding, unpriced = [], []
    for name, device in device_catalogue().items():
        if name == here.name or (device.vendor == "Google") != (here.vendor == "Google"):
            continue
        candidate = Candidate(group="devices", name=name, settings={"hardware": name})
        usd, _ = price_of(found.base, device)
        if usd is None:
            unpriced.append(name)
            continue
        try:
            memory_plan_of(found.base.with_value("hardware", name))
        except RooftraceError as error:
            found.refused.append(Refused(candidate=candidate, reason=_reason(str(error), found.base)))
            continue
        slow = device.hbm_bytes_per_s < here.hbm_bytes_per_s / 2
        holding.append((slow, -device.hbm_bytes_per_s / usd, candidate))
    holding.sort(key=lambda each: each[:2])
    most = len(holding) if found.alone else MOST_DEVICES
    found.candidates += [candidate for *_, candidate in holding[:most]]
    if left := [candidate.name for *_, candidate in holding[most:]]:
        found.said.append(
            f"devices: {most} of {len(holding)} that hold the model are tried, by memory bandwidth for their price, those with "
            f"less than half of {here.name}'s last; --only devices tries {', '.join(left)} too."
        )
    if unpriced:
        found.said.append(
            f"devices: {', '.join(unpriced)} have no price here and cannot be ranked by cost; costs.prices takes a file of prices."
        )


def _by_tensor(found: _Found) -> None:
    degree = found.base.parallel.tensor
    for each in (degree // 2, 2 * degree):
        if each >= 1:
            found.propose(f"tensor parallel {each}", parallel__tensor=each)


def _by_precision(found: _Found) -> None:
    model = found.deployment.model
    present = {model.base_precision, model.mlp_precision, model.expert_precision}
    for name, called in (("fp8", "FP8"), ("nvfp4", "FP4")):
        if present & {name, f"{name}_static", f"{name}_block"}:
            found.said.append(f"precision: the weights are in {name} already.")
        else:
            found.propose(f"{called} weights", precision=name)
    if found.deployment.kv_precision in ("bf16", "fp16", "fp32"):
        found.propose("FP8 KV cache", kv_precision="fp8")
    else:
        found.said.append(f"precision: the KV cache is in {found.deployment.kv_precision} already.")


def _by_prefix(found: _Found) -> None:
    if not found.names_blocks:
        found.said.append(
            "prefix: the workload does not say which prompts begin alike, so what prefix caching gives cannot be told; a trace "
            "with hash_ids (mooncake) or a column prefix_blocks_N (plain) says it."
        )
        return
    found.said.append(f"prefix: the workload says which prompts begin alike{_reused(found.workload)}.")
    off = caches(found.base)
    found.propose(f"{'no ' if off else ''}prefix caching", memory__prefix_caching=not off)


def _reused(workload: Workload) -> str:
    if workload.prefix_blocks is None:
        return ""
    return f": a cache without limit would find {reuse(workload).best_hit_rate:.1%} of the prompt tokens"


def _by_host_memory(found: _Found) -> None:
    if not found.names_blocks:
        found.said.append("memory: without prefix ids nothing is loaded from a tier of host memory either.")
    elif not caches(found.base):
        found.said.append("memory: prefix caching is off, so that nothing is loaded from a tier of host memory.")
    elif found.base.memory.tiers:
        found.propose("no memory tiers", memory__tiers=[])
    else:
        found.propose(f"{HOST_GIB:g} GiB host memory", memory__tiers=[{"kind": "host", "gib": HOST_GIB}])


def _by_speculation(found: _Found) -> None:
    model = found.deployment.model
    if found.base.decoding.method != "autoregressive":
        found.propose("no speculation", decoding={"method": "autoregressive"})
        return
    name = next((name for name in PUBLISHED if model.name.startswith(name)), None)
    if name is not None and model.mtp_layers:
        k = len(PUBLISHED[name].rates)
        decoding = {"method": "mtp", "num_speculative_tokens": k, "acceptance": {"published": name}}
        found.drafted(f"MTP, {k} drafted, acceptance as published", decoding, PUBLISHED[name].source)
    for head in published_heads(model):
        k = head.decoding["num_speculative_tokens"]
        found.drafted(f"{head.name}, {k} drafted, acceptance as published", head.decoding, head.source)
    if not found.sources:
        found.said.append(
            f"speculation: no acceptance is published for {model.name}; with one that you have measured, --set "
            "'decoding={method: ..., num_speculative_tokens: ..., acceptance: {...}}' tries it."
        )


def _by_pools(found: _Found) -> None:
    n = found.base.replicas
    if found.base.autoscale is not None or found.base.failures is not None:
        found.said.append("pools: with autoscale or failures, give pools of your own in a scenario.")
        return
    connector = found.base.stack.connector
    links = {"net": {} if connector is None else {"connector": connector}}
    n = max(n, 2)
    for prefill in dict.fromkeys((n // 2, n // 4 or n // 2)):
        pools = {
            "prefill": {"role": "prefill", "replicas": prefill},
            "decode": {"role": "decode", "replicas": n - prefill},
        }
        found.propose(f"{prefill} prefill and {n - prefill} decode machines", pools=pools, links=links)


def _by_release(found: _Found) -> None:
    stack, asked = serving_stacks().get(found.base.serving_stack), found.base.serving_release
    if stack is None or not stack.release or asked in (None, stack.release):
        found.said.append("release: the stack runs as its newest release whose overheads are known.")
        return
    found.propose(f"{stack.name} {stack.release}", serving_release=stack.release)


def _by_adapters(found: _Found) -> None:
    adapters = found.base.adapters
    if adapters is None:
        found.said += ["adapters: the scenario has none."] * found.alone
        return
    now, most = _slots_now(found.base), _most_slots(found.base)
    found.candidates += [_with_slots(adapters, n) for n in slots.numbers_to_try(now, most)]
    if adapters.slots(slot_rules(found.base.stack_name)).max_cpu_loras < adapters.count:
        found.propose(f"host memory for all {adapters.count} adapters", adapters__max_cpu_loras=adapters.count)


GROUPS: Mapping[str, tuple[str, Callable[[_Found], None]]] = {
    "machines": ("one machine more or fewer, and the least that keep the SLO", _by_machines),
    "devices": ("other devices that hold the model", _by_device),
    "tensor": ("half and twice the tensor parallelism", _by_tensor),
    "precision": ("FP8 and FP4 weights, and an FP8 KV cache", _by_precision),
    "prefix": ("prefix caching", _by_prefix),
    "memory": ("host memory behind the KV cache", _by_host_memory),
    "speculation": ("drafted tokens, with published acceptance", _by_speculation),
    "pools": ("prefill and decode apart", _by_pools),
    "release": ("the newest release of the serving stack", _by_release),
    "adapters": ("more and fewer slots for adapters, and host memory for all of them", _by_adapters),
}
"""Groups of changes: what they are, and what proposes them."""
