"""The source of our own files as trees, each parsed once however many tests walk it."""

from __future__ import annotations

import ast
import functools
from pathlib import Path


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file, in the order of `ast.walk`."""
    return tuple(ast.walk(tree(path)))
