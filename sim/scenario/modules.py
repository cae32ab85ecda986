"""The source behind a policy of the user's own."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_OWN = ("hwmodels", "policies", "sim", "workloads")
"""Packages of Rooftrace, whose code results follow in any case."""


def source_digest(name: str) -> str:
    """Hexadecimal digits of the source of the module *name*: all of its package, and what it imports from the folder of that one.

    Empty where there is no such module, and for a module of Rooftrace's own.
    """
    digest = hashlib.sha256()
    names, seen = [name.partition(".")[0]], set[str](_OWN)
    folder = None
    while names:
        top = names.pop()
        found = None if top in seen else _source(top)
        seen.add(top)
        if found is None or folder not in (None, found.parent):
            continue
        folder = found.parent
        for file in sorted(found.rglob("*.py")) if found.is_dir() else [found]:
            source = file.read_bytes()
            digest.update(f"{file.relative_to(folder).as_posix()} {len(source)} ".encode() + source)
            if str(folder) not in _INSTALLED:
                names += _imports(source)
    return "" if folder is None else digest.hexdigest()


_INSTALLED = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
"""Folders in which what a module imports has a release of its own, and is not looked through."""


def _source(top: str) -> Path | None:
    """The file of the module *top*, or the folder of that package."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve()
    return Path(spec.origin).resolve() if spec.has_location and spec.origin else None


@functools.lru_cache(maxsize=4096)
def _imports(source: bytes) -> list[str]:
    """The first parts of the names that *source* imports, in order."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    return sorted(set(_imported(tree)))


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
