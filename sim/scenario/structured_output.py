"""Settings of answers that grammars constrain: `structured_output`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hwmodels.grammars import grammar_libraries
from sim.scenario.section import OneOf, Section

_Time = Annotated[float, Field(ge=0)]
_Count = Annotated[int, Field(ge=1)]


class StructuredOutput(Section):
    """Requests whose answers keep to a grammar, such as a JSON schema. Times that are left out are those of the library."""

    share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The share of requests that have a grammar, drawn for each."""
    grammars: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """Different grammars, one of which is drawn for each of these requests."""
    exponent: Annotated[float, Field(ge=0)] = 0.0
    """Popularity of grammars: the i-th is asked for in proportion to i to the power of minus this; 0: all alike."""
    library: Annotated[str, OneOf(*grammar_libraries())] = "xgrammar"
    """The library whose times are taken (hwmodels/grammars.toml)."""
    compile_s: _Time | None = None
    """Seconds to compile a grammar that the machine does not keep: the request waits, and others pass it."""
    threads: _Count | None = None
    """Grammars that a machine compiles at once."""
    kept: _Count | None = None
    """Compiled grammars that a machine keeps, those used last."""
    step_s: _Time | None = None
    """Host seconds of an iteration with masks, beside those of each mask."""
    mask_s: _Time | None = None
    """Host seconds of each mask: one for each token that is sampled, or verified, under a grammar."""
    apply_s: _Time | None = None
    """Device seconds of each mask; where it is left out, from the vocabulary, the host link and the memory of the device."""
    overlapped: bool = True
    """Whether masks are filled while the forward pass runs, as vLLM, SGLang and TensorRT-LLM do; otherwise after it."""
