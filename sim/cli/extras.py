"""Packages that come with extras of the installation, and are asked for where a command needs them."""

from __future__ import annotations

from importlib.util import find_spec

from sim.errors import RooftraceError

EXTRAS = {
    "explore": ("starlette", "uvicorn", "httptools"),
    "serve": ("starlette", "uvicorn", "httptools"),
    "forecast": ("statsmodels",),
    "torch": ("torch", "transformers"),
    "jax": ("jax",),
    "distributed": ("distributed",),
    "notebooks": ("jupyterlab", "jupytext"),
}
"""Extra (`pip install -e '.[EXTRA]'` in a clone) -> the packages that it brings (pyproject.toml)."""


def missing(extra: str) -> list[str]:
    """The packages of *extra* that are not installed."""
    return [package for package in EXTRAS[extra] if find_spec(package) is None]


def needs(extra: str) -> None:
    """RooftraceError where the command that is called as *extra* lacks a package of it."""
    if lacking := missing(extra):
        raise RooftraceError(f"rooftrace {extra} needs {lacking[0]}: pip install {' '.join(lacking)}")
