"""Requests as columns of integers, and what makes them valid."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workloads.classes import ServiceClass
from workloads.columns import INT64_MAX, NS_PER_S, IntArray, first_row, int_column
from workloads.follows import Follows

OPTIONAL = {
    "model_index": 0,
    "deadline_ns": -1,
    "session": -1,
    "priority": -INT64_MAX,
    "max_tokens": 0,
    "abort_ns": -1,
    "class_index": 0,
    "tenant_index": 0,
    "predicted_tokens": 0,
    "encoder_tokens": 0,
}
"""Columns that a trace may have beside those that it must, with the least value of each."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Requests:
    """Requests in order of arrival; all columns are read-only int64 arrays of one length n >= 1.

    Raises ValueError, naming row (from 0), column and value, for negative, fractional, NaN or infinite
    numbers, arrivals out of order, and a request with neither prompt nor output tokens. A request too long
    for any machine is legal here: the engine rejects it at admission.
    """

    arrival_ns: IntArray
    """Arrivals of the requests, nanoseconds from the start of the run; non-decreasing."""
    prompt_tokens: IntArray
    output_tokens: IntArray
    """Tokens to generate; 0 for single-pass models, whose answer is one pass over the prompt."""
    model_index: IntArray | None = None
    """Row of `models` that each request asks for; None where there is at most one model."""
    models: tuple[str, ...] = ()
    """Names of the models; empty for a single model without a name."""
    deadline_ns: IntArray | None = None
    """Nanoseconds after its arrival by which a request should be finished; -1 where it has no deadline."""
    session: IntArray | None = None
    """Conversation that each request belongs to; -1 where it has none."""
    priority: IntArray | None = None
    """Smaller goes first, as in vLLM; 0 where nothing else is said. What it does is up to the scheduler."""
    max_tokens: IntArray | None = None
    """Output tokens that the client allows at most; None: as many as come out. Schedulers that plan for what may come see it."""
    abort_ns: IntArray | None = None
    """Nanoseconds after its arrival at which the client gives a request up; -1 where it waits for the end."""
    class_index: IntArray | None = None
    """Row of `classes` that each request is of; None where there are no classes of service."""
    classes: tuple[str, ...] = ()
    """Names of the classes; what is agreed of them is in `terms`, where anything is."""
    terms: tuple[ServiceClass, ...] = ()
    """Terms of each of `classes`; empty where these are but names."""
    tenant_index: IntArray | None = None
    """Row of `tenants` that sends each request; None where nobody says who sends it."""
    tenants: tuple[str, ...] = ()
    predicted_tokens: IntArray | None = None
    """Output tokens that a predictor expects of each request; schedulers see it. None: there is no predictor."""
    encoder_tokens: IntArray | None = None
    """Tokens of images and the like that are encoded before the prompt is computed; 0: nothing is. None: nobody says."""
    prefix_blocks: IntArray | None = None
    """Block ids of all requests end to end; equal ids after equal ids are equal tokens, as far as two requests have them. Where a
    request has more of them than its prompt needs, they name the tokens that it emits as well, which a later prompt may contain;
    what comes after the last is its own. Row i owns `prefix_of(i)`."""
    prefix_offsets: IntArray | None = None
    """n + 1 offsets into `prefix_blocks`."""
    prefix_block_tokens: int | None = None
    """Tokens that one block id stands for (the last block of a request may be partly filled)."""
    follows: Follows | None = None
    """Which requests are sent only when others have ended; `arrival_ns` of such a one is but its place in the order."""
    source: str = ""
    """The origin of the requests, in words."""
    notes: tuple[str, ...] = ()
    """Sentences on what reading them left out or assumed."""

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name in ("arrival_ns", "prompt_tokens", "output_tokens"):
            put(self, name, int_column(getattr(self, name), name))
        n = len(self.arrival_ns)
        if n == 0:
            raise ValueError("a trace needs at least one request; got none")
        for name, floor in OPTIONAL.items():
            value = getattr(self, name)
            if value is not None:
                put(self, name, int_column(value, name, minimum=floor))
        for name in ("prompt_tokens", "output_tokens", *OPTIONAL):
            value = getattr(self, name)
            if value is not None and len(value) != n:
                raise ValueError(f"{name} needs one value a request ({n}); got {len(value)}")
        self._check_rows()
        self._check_models()
        self._check_named("class_index", "classes")
        self._check_named("tenant_index", "tenants")
        if self.terms and tuple(each.name for each in self.terms) != self.classes:
            raise ValueError(f"terms are those of the classes {self.classes!r}, in their order; got {self.terms!r}")
        self._check_prefixes(n)
        self._check_follows()

    def _check_rows(self) -> None:
        """ValueError where the values of one row contradict each other, or rows are not in order of arrival."""
        if self.max_tokens is not None and (row := first_row(self.max_tokens < self.output_tokens)) is not None:
            raise ValueError(
                f"row {row}: a request emits no more than its max_tokens; got {self.output_tokens[row]} output tokens and "
                f"max_tokens {self.max_tokens[row]}"
            )
        if (row := first_row(np.diff(self.arrival_ns) < 0)) is not None:
            raise ValueError(
                f"arrival_ns must not decrease; row {row + 1} has {self.arrival_ns[row + 1]} "
                f"after {self.arrival_ns[row]}: sort the requests by arrival (Trace.from_arrays(..., sort=True))"
            )
        empty = (self.prompt_tokens == 0) & (self.output_tokens == 0)
        if (row := first_row(empty)) is not None:
            raise ValueError(
                f"row {row}: a request needs prompt_tokens or output_tokens above 0; got 0 and 0: leave it out"
            )

    def _check_follows(self) -> None:
        if self.follows is not None:
            if len(self.follows) != len(self):
                raise ValueError(f"follows needs one entry a request ({len(self)}); got {len(self.follows)}")
            if self.abort_ns is not None:
                raise ValueError(
                    "requests that wait for others cannot be given up as well; leave out abort_ns or follows"
                )

    def _check_models(self) -> None:
        models = tuple(self.models)
        object.__setattr__(self, "models", models)
        if any(not isinstance(name, str) or not name for name in models):
            raise ValueError(f"models are non-empty names; got {models!r}")
        if len(set(models)) != len(models):
            raise ValueError(f"models must differ; got {models!r}")
        if self.model_index is None:
            if len(models) > 1:
                raise ValueError(f"a trace of {len(models)} models needs model_index; got none")
            return
        if not models:
            raise ValueError("model_index needs the names in models; got no names")
        if (row := first_row(self.model_index >= len(models))) is not None:
            raise ValueError(
                f"row {row}: model_index is a row of the {len(models)} models; got {self.model_index[row]}"
            )
        if len(models) == 1:
            # One canonical form, so that equal traces compare equal.
            object.__setattr__(self, "model_index", None)

    def _check_named(self, index: str, names: str) -> None:
        """Rows of a table of names, and the names: both or neither."""
        rows, found = getattr(self, index), tuple(getattr(self, names))
        object.__setattr__(self, names, found)
        if (rows is None) != (not found):
            raise ValueError(f"{index} and {names} go together; got only one of them")
        if any(not isinstance(name, str) or not name for name in found) or len(set(found)) != len(found):
            raise ValueError(f"{names} are names that differ; got {found!r}")
        if rows is not None and (row := first_row(rows >= len(found))) is not None:
            raise ValueError(f"row {row}: {index} is a row of the {len(found)} {names}; got {rows[row]}")

    def _check_prefixes(self, n: int) -> None:
        parts = (self.prefix_blocks, self.prefix_offsets, self.prefix_block_tokens)
        if all(part is None for part in parts):
            return
        if self.prefix_blocks is None or self.prefix_offsets is None or self.prefix_block_tokens is None:
            raise ValueError("prefix_blocks, prefix_offsets and prefix_block_tokens go together; got only some of them")
        blocks = int_column(self.prefix_blocks, "prefix_blocks")
        offsets = int_column(self.prefix_offsets, "prefix_offsets")
        object.__setattr__(self, "prefix_blocks", blocks)
        object.__setattr__(self, "prefix_offsets", offsets)
        tokens = self.prefix_block_tokens
        if isinstance(tokens, bool) or not isinstance(tokens, int | np.integer) or tokens < 1:
            raise ValueError(f"prefix_block_tokens is a positive integer; got {tokens!r}")
        object.__setattr__(self, "prefix_block_tokens", int(tokens))
        if len(offsets) != n + 1 or offsets[0] != 0 or offsets[-1] != len(blocks) or np.any(np.diff(offsets) < 0):
            raise ValueError(
                f"prefix_offsets are {n + 1} non-decreasing numbers from 0 to the {len(blocks)} of prefix_blocks; "
                f"got {offsets!r}"
            )
        counts = np.diff(offsets)
        too_many = counts > -(-(self.prompt_tokens + self.output_tokens) // int(tokens))
        if (row := first_row(too_many)) is not None:
            raise ValueError(
                f"row {row}: prefix_blocks has {offsets[row + 1] - offsets[row]} blocks of {tokens} tokens "
                f"for a prompt of {self.prompt_tokens[row]} and {self.output_tokens[row]} output tokens; they cannot have more"
            )

    def __len__(self) -> int:
        return len(self.arrival_ns)

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return int(self.arrival_ns[-1] - self.arrival_ns[0]) / NS_PER_S

    @property
    def arrival_s(self) -> NDArray[np.float64]:
        return self.arrival_ns / NS_PER_S

    def prefix_of(self, row: int) -> IntArray:
        """Block ids of one request's prompt, in order; empty without prefix blocks."""
        if self.prefix_blocks is None or self.prefix_offsets is None:
            return np.empty(0, dtype=np.int64)
        row = range(len(self))[row]
        return self.prefix_blocks[self.prefix_offsets[row] : self.prefix_offsets[row + 1]]

    def model_of(self, row: int) -> str | None:
        """The name of the model that a request asks for; None without names."""
        row = range(len(self))[row]
        if not self.models:
            return None
        return self.models[0 if self.model_index is None else int(self.model_index[row])]
