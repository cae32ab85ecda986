"""What a serving stack adds to its kernels: host work of a step, launches, sampling, and the front end's share of TTFT."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from hwmodels.kernels.parameters import check_bounds, parameter
from hwmodels.tables import ROOM, read_toml

FILE = ROOM / "overheads.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Terms that kernels do not explain, each a time in seconds unless its name says otherwise."""

    step_s: float = parameter(0.0, 0.0, 0.05, "host work of an iteration that the device waits for")
    sequence_s: float = parameter(0.0, 0.0, 5e-4, "host work of each sequence in an iteration, sampling included")
    sample_s: float = parameter(0.0, 0.0, 5e-3, "sampling of an iteration, whatever the batch")
    row_s: float = parameter(0.0, 0.0, 2e-4, "host work of each token of an iteration: lists, slots, positions")
    layer_host_s: float = parameter(
        0.0,
        0.0,
        3e-3,
        "host time to launch a layer's kernels: the least a layer takes where no graph replays it; a hundred launches of "
        "30 us bound it",
    )
    expert_host_s: float = parameter(
        0.0, 0.0, 3e-3, "the same, more, for a layer with experts: routing, sorting, grouped products, and their join"
    )
    launch_overlap: float = parameter(
        0.0, 0.0, 0.95, "share of the benchmarked kernel starts hidden by fusion and dependent launches"
    )
    sustained_loss: float = parameter(
        0.0, 0.0, 2.0, "time lost in long arithmetic, in units of its time at the peak: power limit, cold operands"
    )
    narrow_loss: float = parameter(
        0.0, 0.0, 2.0, "the same, more, with weights in 8 bits or fewer: casts, scales and layouts around the product"
    )
    expand_loss: float = parameter(
        0.0, 0.0, 4.0, "the same, more, with weights in fewer bits than the arithmetic: they are expanded on the way"
    )
    admission_s: float = parameter(0.0, 0.0, 1.0, "from arrival until the scheduler sees a request: front end, queues")
    admission_s_per_token: float = parameter(0.0, 0.0, 1e-4, "tokenisation, for each prompt token")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingStack:
    """A named set of overheads, the kernels it runs, and how it batches."""

    name: str
    title: str
    overheads: Overheads
    kernels: str
    """Whose kernel parameters stand for the stack's: vllm or trtllm; empty: the datasheet roofline."""
    graph: bool
    """Decode steps replay a CUDA graph rather than launch kernel by kernel."""
    token_budget: int
    """Most tokens of an iteration (vLLM's max_num_batched_tokens)."""
    prefill_first: bool
    """Waiting prompts run before decodes go on; otherwise both share the iterations."""
    held_back: str
    """Errors on deployments that the fit of the terms did not see; empty where nothing was fitted."""
    sources: Mapping[str, str] = field(hash=False)
    """Where each term comes from."""


_TEXT = ("title", "kernels")


@functools.cache
def serving_stacks() -> Mapping[str, ServingStack]:
    """The catalogue: name -> stack, read once from overheads.toml."""
    table = read_toml(FILE)
    return {name: _stack(name, entry) for name, entry in table.items()}


def serving_stack(name: str) -> ServingStack:
    """The stack called *name*; ValueError with the nearest valid names otherwise."""
    found = serving_stacks().get(name)
    if found is None:
        near = difflib.get_close_matches(name, serving_stacks(), n=2) or list(serving_stacks())
        raise ValueError(f"{name!r} is not a serving stack; valid here: {', '.join(near)}")
    return found


def _stack(name: str, entry: Mapping[str, object]) -> ServingStack:
    values: dict[str, float] = {}
    sources: dict[str, str] = {}
    known = [f.name for f in fields(Overheads)]
    terms = entry["terms"]
    assert isinstance(terms, Mapping)
    for key, pair in terms.items():
        if key not in known:
            raise ValueError(f"{FILE.name}: {name}.terms.{key} is not an overhead; valid: {', '.join(known)}")
        values[key], sources[key] = float(pair[0]), str(pair[1])
    overheads = Overheads(**values)
    check_bounds(overheads)
    return ServingStack(
        name=name,
        title=str(entry["title"]),
        overheads=overheads,
        kernels=str(entry["kernels"]),
        graph=bool(entry["graph"]),
        prefill_first=bool(entry["prefill_first"]),
        token_budget=int(entry["token_budget"]),  # type: ignore[arg-type]
        held_back=str(entry.get("held_back", "")),
        sources=sources,
    )
