"""Which build of the engine is tested: plain Python, or compiled by mypyc."""

from __future__ import annotations

import pytest

from sim.build import is_compiled

COMPILED = is_compiled()

patches_the_engine = pytest.mark.skipif(
    COMPILED, reason="classes of the compiled engine cannot be replaced from outside"
)
