"""Which build of the engine is tested: plain Python, or compiled by mypyc."""

from __future__ import annotations

import pytest

from sim.engine.serve import engine_core

COMPILED = not str(engine_core.__file__).endswith(".py")

patches_the_engine = pytest.mark.skipif(
    COMPILED, reason="classes of the compiled engine cannot be replaced from outside"
)
