"""Serving stacks, each described once. A folder here is a stack: its `STACK` says what the rest asks for (`description`),
overheads.toml has the terms of its host work (`hwmodels.overheads`), memory.toml its account of memory (`hwmodels.memory`);
without the files there is neither. The names of engines stand nowhere else. Knows nothing of the code that asks. Read
`description` first, then `vllm`.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path

from hwmodels.stacks.description import Kernels, Stack


@functools.cache
def _found() -> Mapping[str, tuple[Stack, Path]]:
    """The stacks and their folders by name, in their order."""
    modules = [
        importlib.import_module(f"{__name__}.{each.name}") for each in pkgutil.iter_modules(__path__) if each.ispkg
    ]
    found = [(module.STACK, Path(str(module.__file__)).parent) for module in modules]
    return {stack.name: (stack, folder) for stack, folder in sorted(found, key=lambda pair: pair[0].place)}


@functools.cache
def stacks() -> Mapping[str, Stack]:
    """The stacks by name, in their order."""
    return {name: stack for name, (stack, _) in _found().items()}


def file_of(stack: str, name: str) -> Path | None:
    """The file called *name* in the folder of a stack; None where it has none."""
    file = _found()[stack][1] / name
    return file if file.is_file() else None


def default_stack() -> Stack:
    """The first stack, which a scenario has that names none."""
    return next(iter(stacks().values()))


def servers() -> tuple[str, ...]:
    """The names of the stacks with schedulers of their own."""
    return tuple(name for name, stack in stacks().items() if stack.scheduler is not None)


def kernels_of(software: str) -> Kernels:
    """The kernels of a stack; the defaults for other software."""
    stack = stacks().get(software)
    return Kernels() if stack is None else stack.kernels


def latent_alone() -> tuple[str, ...]:
    """The stacks whose kernels of latent attention were measured alone, and stand in for others'; the best for prompts first."""
    return tuple(name for name in servers() if kernels_of(name).latent_alone)


def narrow_heads() -> tuple[str, ...]:
    """The stacks that multiply latent attention's heads in 8 bits, whose kernels stand in for others'; the best first."""
    return tuple(name for name in servers() if kernels_of(name).head_products != "16 bits")


def default_scheduler(own: str = "") -> str:
    """The scheduler of the stack *own*, or else that of the default stack, where a scenario names none."""
    described = stacks().get(own)
    found = (described and described.scheduler) or default_stack().scheduler
    assert found is not None
    return found


def stack_with(scheduler: str, own: str) -> Stack | None:
    """The stack whose scheduler it is: *own* where that has it, or else the first; None for a scheduler of no stack."""
    found = {name: stack for name, stack in stacks().items() if scheduler in (stack.scheduler, *stack.schedulers)}
    return found.get(own) or next(iter(found.values()), None)
