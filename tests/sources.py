"""The source of our own files as trees, each parsed once however many tests walk it."""

from __future__ import annotations

import ast
import functools
import gc
from collections.abc import Iterable, Iterator
from pathlib import Path

import sim

PACKAGES = Path(sim.__file__).parents[1]
"""The folder that our packages are imported from: the repository, or where a wheel has been installed."""


@functools.cache
def tree(path: Path) -> ast.Module:
    # Trees are millions of objects that stay: looking for garbage among them takes as long as to parse them.
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    finally:
        gc.freeze()
        gc.enable()


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a *body* and of those within them, which are far fewer than all nodes."""
    for each in body:
        yield each
        for name in ("body", "orelse", "finalbody"):
            yield from statements(getattr(each, name, ()))
        for branch in (*getattr(each, "handlers", ()), *getattr(each, "cases", ())):
            yield from statements(branch.body)


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file, in the order of `ast.walk`."""
    return tuple(ast.walk(tree(path)))
