"""The part of docs/engines.md about serving stacks, from their descriptions: `python -m hwmodels.stack_page` writes it anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hwmodels.device import load_device
from hwmodels.memory import engine_defaults, stack_memories
from hwmodels.overheads import stack_releases
from hwmodels.stacks import default_scheduler, stacks
from hwmodels.stacks.description import Stack

PAGE = Path(__file__).parents[1] / "docs" / "engines.md"
_BEGIN, _END = "<!-- made by python -m hwmodels.stack_page -->\n", "<!-- end of what is made -->\n"
_DEVICE = "h100-sxm"
_CACHES = {"blocks": "blocks by content", "tree": "a radix tree", None: "none"}


def with_stacks(page: str) -> str:
    """*page* with the part between its two marks made from the descriptions; ValueError where it has no marks."""
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        raise ValueError(f"{PAGE.name} has no {_BEGIN.strip()} and {_END.strip()} behind it")
    made = "\n".join(line for stack in stacks().values() for line in _lines(stack))
    return f"{before}{begin}\n{made}\n{end}{after}"


def _lines(stack: Stack) -> Iterator[str]:
    yield f"### {stack.title}\n"
    said = f"Rules and launch options are those of release {stack.release}." if stack.release else "No server."
    if stack.like is not None:
        said = f"The engine of `{stack.like}`, whose rules it has as of release {stacks()[stack.like].release}, with other kernels."
    where = f" It runs on devices of {' and '.join(stack.vendors)} alone." if stack.vendors else ""
    yield f"`serving_stack: {stack.name}`. {said}{where}\n"
    yield "| part | modelled | known from |\n|---|---|---|"
    parts = _parts(stack) if stack.like is None else _parts_on_other_devices(stack, stack.like)
    yield from (f"| {part} | {modelled} | {source} |" for part, modelled, source in parts)
    yield ""
    if stack.checks:
        yield "| checked | release | against | on |\n|---|---|---|---|"
        yield from (f"| {check.what} | {check.release} | {check.against} | {check.on} |" for check in stack.checks)
        yield ""
    if stack.left_out:
        yield f"{stack.left_out}\n"


def _parts_on_other_devices(stack: Stack, like: str) -> Iterator[tuple[str, str, str]]:
    """The same of a stack that is another's engine on other makers' devices."""
    yield (
        "scheduler, limits, prefix cache, memory, graphs, launch options",
        f"those of `{like}`",
        "from knowledge: both are built of one source",
    )
    yield "host work", _host_work(stack), "fits to measured runs"
    yield "kernels", stack.kernels_modelled, stack.kernels_from


def _host_work(stack: Stack) -> str:
    releases = stack_releases()[stack.name].values()
    terms = [f"from release {each.release}, fitted to {each.fitted_to}" for each in releases if each.fitted_to]
    if not any(each.sources for each in releases):
        return "none"
    return "; ".join(terms) or "one set of terms"


def _parts(stack: Stack) -> Iterator[tuple[str, str, str]]:
    """Parts of a stack, how each is modelled, and where that is known from."""
    for name, each in stack.schedulers.items():
        yield "scheduler", f"`{name}`, compared with {each.compared_with}", each.known_from
    if not stack.schedulers:
        yield "scheduler", f"`{default_scheduler(stack.name)}`, where none is named", ""
    defaults = engine_defaults(stack.name, load_device(_DEVICE))
    limits = f"{defaults.max_num_batched_tokens:,} tokens and {defaults.max_num_seqs:,} sequences of an iteration on `{_DEVICE}`"
    yield "limits", limits, defaults.source
    order = f"; {stack.eviction}" if stack.eviction else ""
    yield "prefix cache", f"{_CACHES[stack.prefix_cache]}{order}", stack.eviction_borrowed
    if stack.graphs is not None:
        counted = "sequences" if stack.graphs.of_sequences else "tokens"
        yield (
            "CUDA graphs",
            f"a list of sizes in {counted}, to {defaults.graph_sequences:,} on `{_DEVICE}`",
            stack.graphs.source,
        )
    accounts = stack_memories().get(stack.name, {})
    logs = any("logs of" in source for rules in accounts.values() for source in rules.sources.values())
    if accounts:
        yield (
            "memory",
            f"accounts of {', '.join(accounts)}",
            "sources and published logs" if logs else "sources and documents",
        )
    work = _host_work(stack)
    yield "host work", work, "" if work == "none" else "fits to measured runs"
    if stack.handover is not None:
        handover = f"first token at `{stack.handover.first_token}`, room `{stack.handover.room}`"
        yield "prefill to decode", handover, stack.handover.source
    if stack.schedulers:
        yield "between ranks", f"`{stack.rank_router or 'round_robin'}`", ""
        yield "`stream_interval`", f"counts {stack.stream_by}", ""


if __name__ == "__main__":
    PAGE.write_text(with_stacks(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
