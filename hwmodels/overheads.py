"""The times that a serving stack adds to its kernels: host work of a step, launches, sampling, and the front end's share of
TTFT.

They stand in overheads.toml in the folder of each stack (`hwmodels.stacks`). Terms are [value, "source"]; one that is left out
is zero, for the data put it there or it moved nothing. `python -m sim.validation.fit_stacks MEASURED vllm trtllm sglang eager`
fits what is called fitted; the errors in held_back are of the terms as they stand, less what a deployment did to their fit on
straight lines (--as-they-stand), and eager's of its fit. SGLang's sequence_s, the admission of its 0.5.6 and TensorRT-LLM's of
1.1 were fitted again with the other terms held (docs/validation/kernels.md). admission_s is paid
by every request of any model: SGLang's was fitted to models of 8 billion parameters and more, and is far more than a small
model's first token can be expected to take. kernels: whose measured kernels stand in. fp8: the format of FP8 checkpoints made
for the stack where it is not fp8: TensorRT-LLM's are ModelOpt's, whose activations have static scales. releases: older ones,
each with the terms that differ from the newest's.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hwmodels.kernels.parameters import check_bounds, parameter
from hwmodels.stacks import default_stack, file_of, stacks
from hwmodels.tables import read_toml

FILE = "overheads.toml"


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
    latent_host_s: float = parameter(
        0.0, 0.0, 3e-3, "the same, more, for a layer with latent attention: its projections, norms and copies"
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
    untuned_experts: float = parameter(
        0.0,
        0.0,
        4.0,
        "share by which a layer's experts in 16 bits take longer under expert parallelism, once an iteration has as many tokens as "
        "a device has experts: their tiles are not tuned for so few experts",
    )
    block_experts_s: float = parameter(
        0.0,
        0.0,
        2e-3,
        "time that a layer's experts in FP8 blocks take more where each has few tokens, on however many devices; none where their "
        "tiles of 64 are full",
    )
    spread_experts_s_per_flop: float = parameter(
        0.0,
        0.0,
        4e-14,
        "time for each operation of a layer's experts in FP8 blocks that they take more where they lie on several devices and no "
        "graph replays the iteration",
    )
    admission_s: float = parameter(0.0, 0.0, 1.0, "from arrival until the scheduler sees a request: front end, queues")
    admission_s_per_token: float = parameter(0.0, 0.0, 1e-4, "tokenisation, for each prompt token")
    admission_serial_s: float = parameter(
        0.0, 0.0, 0.1, "the front end's work on a request that it does for one request at a time: a burst queues for it"
    )
    compute_excess: float = parameter(
        0.0,
        -0.9,
        9.0,
        "by what share of itself the arithmetic of a device's kernels takes longer than its profile says: what their time "
        "grows by with the tokens of an iteration, and attention of prompts; negative where it takes less",
    )
    bandwidth_excess: float = parameter(
        0.0,
        -0.9,
        9.0,
        "the same of reading weights and cache: what an iteration of one token takes, and attention of decodes",
    )
    prompt_excess: float = parameter(
        0.0,
        -0.9,
        9.0,
        "by what share of itself arithmetic takes longer still in iterations that compute prompts; negative where it takes less",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingStack:
    """A named set of overheads, and the kernels it runs. How it batches is its scheduler's (`policies`)."""

    name: str
    title: str
    release: str
    """The terms are those of this release and later ones, up to the next that has terms of its own."""
    fitted_to: str
    """The releases whose runs the terms were fitted to; empty where nothing was fitted."""
    overheads: Overheads
    engine: str
    """The stack whose scheduler, memory and graphs are its own: itself, but for another maker's build of one."""
    kernels: str
    """The software whose kernel parameters stand for the stack's: a stack, or AMD's aiter; empty: the datasheet roofline."""
    fp8: str
    """The format that `precision: fp8` stands for: that of the FP8 checkpoints which the stack's own documents make."""
    graph: bool
    """Decode steps replay a CUDA graph rather than launch kernel by kernel."""
    held_back: str
    """Errors on deployments that the fit of the terms did not see; empty where nothing was fitted."""
    sources: Mapping[str, str] = field(hash=False)
    """Where each term comes from."""
    fit: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The origin of terms that were fitted to one deployment's runs, and how well they were (`hwmodels.stack_files`). Empty for the
    catalogue's."""


@functools.cache
def stack_releases() -> Mapping[str, Mapping[str, ServingStack]]:
    """The catalogue: name -> release -> stack, each stack's newest release first, read once.

    A stack without a file has no terms, and the default stack's kernels.
    """
    found = {}
    for name, described in stacks().items():
        file, graph = file_of(name, FILE), described.graphs is not None
        nothing = {"title": described.title, "kernels": default_stack().name, "graph": graph, "terms": {}}
        entry = nothing if file is None else read_toml(file)
        lender = None if described.like is None else file_of(described.like, FILE)
        if lender is not None:
            entry = {**_on_other_devices(read_toml(lender), described.like), **entry}
        older = entry.pop("releases", {})
        newest = _stack(name, entry)
        found[name] = {newest.release: newest} | {
            release: _stack(name, _older(entry, release, other))
            for release, other in sorted(older.items(), key=lambda item: _numbers(item[0]), reverse=True)
        }
    return found


def _on_other_devices(like: Mapping[str, Any], engine: str | None) -> dict[str, Any]:
    """The entry of a stack that is another's engine on another maker's devices, on which its terms were not fitted."""
    lender = f"{like['title'].partition(':')[0]} on NVIDIA's GPUs, not fitted here"

    def lent(entry: Mapping[str, Any]) -> dict[str, Any]:
        terms = {term: [value, f"lent by {lender}: {source}"] for term, (value, source) in entry["terms"].items()}
        return {**entry, "fitted_to": f"{entry['fitted_to']} on NVIDIA's GPUs", "terms": terms}

    releases = {release: lent(entry) for release, entry in like.get("releases", {}).items()}
    return {**lent(like), "held_back": "", "releases": releases, "engine": engine}


def _older(newest: Mapping[str, Any], release: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of an older *release*: that of the newest but for what it says itself, without the terms that it leaves out."""
    terms = {
        term: pair for term, pair in {**newest["terms"], **own["terms"]}.items() if term not in own.get("without", ())
    }
    return {**newest, "held_back": "", **own, "release": release, "terms": terms}


def serving_stacks() -> Mapping[str, ServingStack]:
    """name -> stack, with the terms of its newest release."""
    return {name: next(iter(releases.values())) for name, releases in stack_releases().items()}


def serving_stack(name: str, release: str | None = None) -> ServingStack:
    """The stack called *name*, as of *release*: the terms of the newest release that is not after it, or else of the oldest.

    None: the newest. ValueError with the nearest valid names for another name, and for what is no release.
    """
    releases = stack_releases().get(name)
    if releases is None:
        near = difflib.get_close_matches(name, stack_releases(), n=2) or list(stack_releases())
        raise ValueError(f"{name!r} is not a serving stack; valid here: {', '.join(near)}")
    if release is None or not any(releases):
        if release is not None:
            raise ValueError(f"{name} has no releases; leave the release out")
        return next(iter(releases.values()))
    return releases[known_for(release, releases)]


def known_for(release: str, known: Iterable[str]) -> str:
    """`at_or_before`; ValueError for what is no release."""
    known = tuple(known)
    if not _numbers(release):
        raise ValueError(f"a release begins with numbers, such as {' or '.join(known)}; got {release!r}")
    if _RELEASE.fullmatch(release) is None:
        raise ValueError(
            f"a release is numbers with dots, such as {' or '.join(known)}, and may end like 1.2.0rc6; got {release!r}"
        )
    return at_or_before(release, known)


_RELEASE = re.compile(
    r"\d+(\.\d+)*([._-]?(a|alpha|b|beta|c|rc|pre|dev|post)[._-]?\d+)*(\+[a-z0-9._-]+)?", re.IGNORECASE
)
"""Numbers, and what PEP 440 lets follow them, but for letters without a number: 0.13b is a slip sooner than 0.13b0."""


def at_or_before(release: str, known: Iterable[str]) -> str:
    """The first of the *known* releases, the newest first, that is not after *release*, or else the oldest."""
    known = tuple(known)
    wanted = _numbers(release)
    return next((each for each in known if _numbers(each) <= wanted), known[-1])


def is_before(release: str, other: str) -> bool:
    """Whether *release* came before *other*; nothing came before an *other* without numbers."""
    return bool(_numbers(other)) and _numbers(release) < _numbers(other)


def _numbers(release: str) -> tuple[int, ...]:
    """The leading numbers of a release, by which releases are in order: (1, 2) for 1.2.0rc6 and for 1.2."""
    found = re.match(r"(\d+)(?:\.(\d+))?(?:\.(\d+))?", release)
    numbers = () if found is None else tuple(int(part) for part in found.groups() if part is not None)
    while numbers and numbers[-1] == 0 and len(numbers) > 1:
        numbers = numbers[:-1]
    return numbers


def _stack(name: str, entry: Mapping[str, object]) -> ServingStack:
    values: dict[str, float] = {}
    sources: dict[str, str] = {}
    known = [f.name for f in fields(Overheads)]
    terms = entry["terms"]
    assert isinstance(terms, Mapping)
    for key, pair in terms.items():
        if key not in known:
            raise ValueError(f"{FILE}: {name}.terms.{key} is not an overhead; valid: {', '.join(known)}")
        values[key], sources[key] = float(pair[0]), str(pair[1])
    overheads = Overheads(**values)
    check_bounds(overheads)
    return ServingStack(
        name=name,
        title=str(entry["title"]),
        release=str(entry.get("release", "")),
        fitted_to=str(entry.get("fitted_to", "")),
        overheads=overheads,
        engine=str(entry.get("engine", name)),
        kernels=str(entry["kernels"]),
        fp8=str(entry.get("fp8", "fp8")),
        graph=bool(entry["graph"]),
        held_back=str(entry.get("held_back", "")),
        sources=sources,
    )
